"""Action formats and observations of both sets of tools."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxgym.envs.swebench.grading.durations import runs_tests, without_durations
from sandboxgym.sandbox.agent.tools import (
    BASH_SHOWN,
    MARKER,
    SWE_AGENT_SHOWN,
    Bash,
    Edit,
    Malformed,
    Submit,
    parse,
    show,
    submission,
)
from sandboxgym.sandbox.base import Result


def call(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})


@pytest.mark.parametrize(
    "action, command",
    [
        ("ls -la", "ls -la"),
        ("cat <<'EOF' > a\n  two\nEOF\n", "cat <<'EOF' > a\n  two\nEOF"),
        ('{"command": "ls"}', "ls"),
        (call("bash", command="ls\npwd"), "ls\npwd"),
        (json.dumps({"name": "bash", "arguments": '{"command": "ls"}'}), "ls"),
        (json.dumps({"type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}), "ls"),
        (json.dumps({"tool_calls": [{"function": {"name": "bash", "arguments": {"command": "ls"}}}]}), "ls"),
        (f"<tool_call>\n{call('bash', command='ls')}\n</tool_call>", "ls"),
        ("```bash\nls\n```", "ls"),
        ("```\nls\n```", "ls"),
        ("I look around.\n\n```mswea_bash_command\nls -la\ncat a\n```\nThat is all.", "ls -la\ncat a"),
        ("cat > README.md <<'EOF'\n```bash\nls\n```\nEOF", "cat > README.md <<'EOF'\n```bash\nls\n```\nEOF"),
        ("```bash\ncat > a <<E\n```\nx\n```\nE\n```", "cat > a <<E\n```\nx\n```\nE"),
        ("{ echo a; echo b; }", "{ echo a; echo b; }"),
        ('[ "$a" = b ] && echo yes', '[ "$a" = b ] && echo yes'),
        ("str_replace_editor view /a", "str_replace_editor view /a"),
    ],
)
def test_bash(action: str, command: str) -> None:
    assert parse(action, "bash") == Bash(command)


@pytest.mark.parametrize(
    "action", ["submit", " submit\n", "```bash\nsubmit\n```", call("submit"), '{"name": "submit"}']
)
@pytest.mark.parametrize("tools", ["bash", "swe-agent"])
def test_submit(action: str, tools: Any) -> None:
    assert parse(action, tools) == Submit()


@pytest.mark.parametrize(
    "action, reason",
    [
        ("", "empty"),
        (" \n", "empty"),
        ("```bash\n\n```", "empty"),
        ("```bash\nls\n```\n```bash\npwd\n```", "exactly one"),
        ('{"command": ls}', "not valid JSON"),
        ('{"command": 3}', "takes one argument"),
        (call("bash", command="ls", more=1), "takes one argument"),
        (call("python", code="1"), "no tool 'python'"),
        (call("str_replace_editor", command="view", path="/a"), "no tool 'str_replace_editor'"),
        (json.dumps([{"name": "submit"}, {"name": "submit"}]), "one call at a time"),
        (json.dumps({"name": "bash", "arguments": "{"}), "not valid JSON"),
        (json.dumps({"name": "bash", "arguments": 3}), "as an object"),
        ("echo \0", "null character"),
        ("<tool_call>{}</tool_call><tool_call>{}</tool_call>", "one call at a time"),
    ],
)
def test_malformed_for_bash(action: str, reason: str) -> None:
    parsed = parse(action, "bash")
    assert isinstance(parsed, Malformed)
    assert reason in parsed.explanation


@pytest.mark.parametrize(
    "action, expected",
    [
        ("ls", Bash("ls")),
        ("First I look.\n```\nls -la\n```", Bash("ls -la")),
        ("An example:\n```\nnot this\n```\nNow:\n```bash\nls\n```\n", Bash("ls")),
        (call("bash", command="str_replace_editor view /a"), Bash("str_replace_editor view /a")),
        ("str_replace_editor view /a.py", Edit("view", "/a.py")),
        ("str_replace_editor view /a.py --view_range 1 20", Edit("view", "/a.py", {"view_range": (1, 20)})),
        ("str_replace_editor view /a.py --view_range '[1, -1]'", Edit("view", "/a.py", {"view_range": (1, -1)})),
        (
            "Fix it.\n```\nstr_replace_editor str_replace /a.py --old_str 'x = 1\n  y' --new_str \"z\"\n```",
            Edit("str_replace", "/a.py", {"old_str": "x = 1\n  y", "new_str": "z"}),
        ),
        ("str_replace_editor create /a 'some text'", Edit("create", "/a", {"file_text": "some text"})),
        (
            "str_replace_editor insert /a --insert_line 3 --new_str hello",
            Edit("insert", "/a", {"insert_line": 3, "new_str": "hello"}),
        ),
        (call("str_replace_editor", command="undo_edit", path="/a", old_str=None), Edit("undo_edit", "/a")),
        (
            call("str_replace_editor", command="view", path="/a", view_range=[2, 3]),
            Edit("view", "/a", {"view_range": (2, 3)}),
        ),
    ],
)
def test_swe_agent(action: str, expected: object) -> None:
    assert parse(action, "swe-agent") == expected


@pytest.mark.parametrize(
    "action, reason",
    [
        (call("str_replace_editor", command="delete", path="/a"), "Unrecognized editor command 'delete'"),
        (call("str_replace_editor", command="view"), "needs a 'path'"),
        (call("str_replace_editor", command="create", path="/a"), "needs the argument 'file_text'"),
        (call("str_replace_editor", command="str_replace", path="/a"), "needs the argument 'old_str'"),
        (call("str_replace_editor", command="insert", path="/a", new_str="x", insert_line="two"), "line number"),
        (call("str_replace_editor", command="insert", path="/a", new_str="x", insert_line=True), "line number"),
        (call("str_replace_editor", command="view", path="/a", view_range=[1]), "view_range"),
        (call("str_replace_editor", command="view", path="/a", colour=1), "no argument 'colour'"),
        (call("str_replace_editor", command="create", path="/a", file_text=3), "must be a text"),
        ("str_replace_editor create /a 'open", "cannot be read"),
        ("str_replace_editor view /a --view_range", "needs a value"),
        ("str_replace_editor", "Unrecognized editor command None"),
    ],
)
def test_malformed_for_swe_agent(action: str, reason: str) -> None:
    parsed = parse(action, "swe-agent")
    assert isinstance(parsed, Malformed)
    assert reason in parsed.explanation


JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["name", "arguments", "command", "path", "function", "tool_calls", "view_range"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@given(
    st.text() | JSON_LIKE.map(json.dumps) | st.text(alphabet="`\n bash{}[]\"'<\\"),
    st.sampled_from(["bash", "swe-agent"]),
)
def test_no_text_is_an_exception(action: str, tools: Any) -> None:
    assert isinstance(parse(action, tools), Bash | Edit | Submit | Malformed)


def result(output: str, exit_code: int = 0, **more: Any) -> Result:
    return Result(output, exit_code, 0.1, raw=output.encode(), **more)


def test_the_marker_submits_what_follows() -> None:
    assert submission(result(f"{MARKER}\ndiff --git a/x b/x\n")) == b"diff --git a/x b/x\n"
    assert submission(result(f"\n {MARKER} \n")) == b""
    assert submission(result(f"{MARKER}\n", exit_code=1)) is None
    assert submission(result(f"first\n{MARKER}\n")) is None


def test_output_of_bash() -> None:
    assert show(result("a\nb\n"), "bash", limit=60) == "<returncode>0</returncode>\n<output>\na\nb\n</output>"
    assert show(result("", 3), "bash", limit=60) == "<returncode>3</returncode>\n<output>\n</output>"


def test_long_output_of_bash_is_cut_in_the_middle() -> None:
    whole = show(result("x" * (BASH_SHOWN - 1)), "bash", limit=60)
    assert "x" * (BASH_SHOWN - 1) in whole and "elided" not in whole
    cut = show(result("a" * 5_000 + "m" * 123 + "z" * 5_000), "bash", limit=60)
    assert f"<output_head>\n{'a' * 5000}\n</output_head>" in cut
    assert f"<output_tail>\n{'z' * 5000}\n</output_tail>" in cut
    assert "123 characters elided" in cut and "m" * 3 not in cut


def test_output_of_swe_agent() -> None:
    assert show(result("a\n"), "swe-agent", limit=30) == "OBSERVATION:\na"
    assert show(result(""), "swe-agent", limit=30) == "OBSERVATION:\nYour command ran successfully and printed nothing."
    assert show(result("a\n", 1), "swe-agent", limit=30) == "OBSERVATION:\na\n(exit code 1)"
    cut = show(result("x" * (SWE_AGENT_SHOWN + 7)), "swe-agent", limit=30)
    assert "<response clipped>" in cut and "; 7 were left out" in cut and len(cut) < SWE_AGENT_SHOWN + 500


@pytest.mark.parametrize("tools", ["bash", "swe-agent"])
def test_what_went_wrong_is_said(tools: Any) -> None:
    assert "more than 30 seconds" in show(result("partial\n", 124, timed_out=True), tools, limit=30)
    assert "partial" in show(result("partial\n", 124, timed_out=True), tools, limit=30)
    assert "syntax error and was not run" in show(result("bash: …\n", 2, syntax_error=True), tools, limit=30)
    assert "ended the shell" in show(result("", 0, ended=True), tools, limit=30)
    both = show(result("", 124, timed_out=True, ended=True), tools, limit=30)
    assert "more than 30 seconds" in both and "ended the shell" in both
    assert "Before the command, the shell had ended" in show(result("", 0, replaced=True), tools, limit=30)
    assert "900 bytes in the middle" in show(result("a", 0, elided=900), tools, limit=30)


@pytest.mark.parametrize(
    "line, shown",
    [
        ("===== 3 passed in 1.27s =====", "===== 3 passed in 0.00s ====="),
        ("1 failed, 2 passed, 1 warning in 61.20s (0:01:01)", "1 failed, 2 passed, 1 warning in 0.00s"),
        ("Ran 12 tests in 0.345s\n\nOK", "Ran 12 tests in 0.000s\n\nOK"),
        ("Ran 12 tests in 0.345s", "Ran 12 tests in 0.345s"),
        ("it was done in 3.5s or so", "it was done in 3.5s or so"),
    ],
)
def test_durations_read_zero(line: str, shown: str) -> None:
    assert without_durations(f"a\n{line}\nb", "pytest") == f"a\n{shown}\nb"


@pytest.mark.parametrize(
    "command",
    [
        "python -m pytest -q | tail -1",
        "cd a && A=1 pytest x.py 2>&1 | tail -n 5",
        "cat > f.py <<'EOF'\ncat y\nEOF\npytest -q",
        "./tests/runtests.py a.b",
        "bin/test -C x",
        "pytest | sed -n 1,5p",
        "timeout 60 python -W error -m unittest",
        "for i in 1 2; do pytest; done",
        "git stash; pytest; git stash pop",
        "sed -i s/a/b/ f && tox -e py39",
    ],
)
def test_a_command_that_runs_tests(command: str) -> None:
    assert runs_tests(command)
    assert without_durations("1 passed in 0.12s", command) == "1 passed in 0.00s"


@pytest.mark.parametrize(
    "command",
    [
        "cat pytest.txt",
        "pytest; cat log",
        "git diff",
        "pytest && git diff",
        "grep pytest f",
        "head -3 test_a.py",
        "sed -n 1,5p f; pytest",
        "pytest > log; tail log",
        "tail log | pytest",
        "python -c 'print(1)'; pytest",
        "echo $(cat f); pytest",
        "bash -c pytest",
        "test -f pytest",
        "pytest 'unclosed",
        "cat a | grep pytest",
    ],
)
def test_what_may_show_a_file_is_shown_as_it_is(command: str) -> None:
    assert not runs_tests(command)
    assert without_durations("1 passed in 0.12s", command) == "1 passed in 0.12s"
