"""An agent's actions, files and output take bounded memory and time of the training process."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sandboxgym.envs.swebench.grading import parsing
from sandboxgym.envs.swebench.grading import verdict as grading
from sandboxgym.envs.swebench.grading.durations import without_durations
from sandboxgym.sandbox.agent import editor as editor_module
from sandboxgym.sandbox.agent import tools
from sandboxgym.sandbox.agent.box import READ
from sandboxgym.sandbox.agent.editor import SHOWN, Editor  # noqa: F401 - for the programs below
from sandboxgym.sandbox.agent.episode import outcome
from sandboxgym.sandbox.agent.tools import LONGEST, Edit, Malformed, ToolSet, parse
from sandboxgym.sandbox.base import Result
from sandboxgym.sandbox.files.reading import FLAGS, regular_file
from sandboxgym.sandbox.shell.terminal import Capture

ALLOWED = 64 * 2**20
"""Bytes of memory that one action may take for a time, beside what there was."""


class HostFiles:
    """Files of this machine in place of a sandbox's."""

    def read_file(self, path: str) -> bytes:
        descriptor = os.open(path, FLAGS)
        try:
            return regular_file(descriptor, path, limit=READ)
        finally:
            os.close(descriptor)

    def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        Path(path).write_bytes(data)

    def run(self, command: str) -> Result:
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        return Result(done.stdout, done.returncode, 0.0)


EDITS: dict[str, tuple[str, dict[str, Any]]] = {
    "empty lines": ("b'\\n' * READ", {}),
    "short lines": ("b'ab\\n' * (READ // 3)", {}),
    "one line": ("b'x' * READ", {}),
    "wide characters": ("b'x' * (READ - 4) + '\\U0001f389'.encode()", {}),
    "no text": ("b'\\xff' * READ", {}),
    "names": ("b'a\\n' * (READ // 2)", {"name": "f.py"}),
    "a list": ("b'a,' * (READ // 2)", {"name": "f.py"}),
    "as much as is outlined": ("b'a,' * 49_500", {"name": "f.py"}),
    "an endless expression": ("b'-' * 100_000 + b'1'", {"name": "f.py"}),
    "an endless chain": ("b'x' + b'.a' * 40_000", {"name": "f.py"}),
    "too large": ("b''", {"size": 2**30}),
}


@pytest.mark.parametrize("content", EDITS)
def test_no_edit_takes_the_memory_of_the_owner(content: str, tmp_path: Path) -> None:
    made, facts = EDITS[content]
    program = f"""
import os, resource, sys, time
from envs.swebench.workspaces.test_owner_bounds import *
path = {str(tmp_path / facts.get("name", "f.txt"))!r}
with open(path, "wb") as file:
    file.write({made})
    if {facts.get("size", 0)}:
        file.truncate({facts.get("size", 0)})
most = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
small, began, editor, files = most(), time.process_time(), Editor(), HostFiles()
for call in (
    Edit("view", path), Edit("view", path, {{"view_range": (1, -1)}}),
    Edit("str_replace", path, {{"old_str": "a", "new_str": "b"}}),
    Edit("str_replace", path, {{"old_str": "q" * 2**20, "new_str": "b"}}),
    Edit("insert", path, {{"insert_line": 0, "new_str": "x"}}), Edit("undo_edit", path),
    Edit("create", path, {{"file_text": "x"}}),
):
    editor, said, _ = editor.edited(call, files)
    assert len(said) < 2 * SHOWN, (call.command, len(said))
    del said
assert time.process_time() - began < 30, time.process_time() - began
print("grew", most() - small)
"""
    tests = Path(__file__).parents[3]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tests.parent, tests, tests / "support")))}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < ALLOWED


def test_a_large_file_is_answered_in_words(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(500 * 2**20)
    for command, arguments in (("view", {}), ("str_replace", {"old_str": "a"}), ("insert", {"insert_line": 0})):
        _, said, done = Editor().edited(Edit(command, str(path), {"new_str": "x", **arguments}), HostFiles())
        assert not done and "too large" in said and f"{READ:,}" in said and "sed" in said


def test_a_pipe_is_answered_in_words(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    _, said, done = Editor().edited(Edit("view", str(tmp_path / "pipe")), HostFiles())
    assert not done and "not a regular file" in said


def test_what_can_be_undone_is_bounded_in_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(editor_module, "REMEMBERED", 1000)
    editor = Editor()
    for number in range(40):
        editor, _, done = editor.edited(
            Edit("create", str(tmp_path / f"f{number}"), {"file_text": "x" * 100}), HostFiles()
        )
        assert done
    assert sum(len(text) for texts in editor.history.values() for text in texts) <= 1000
    _, _, undone = editor.edited(Edit("undo_edit", str(tmp_path / "f39")), HostFiles())
    assert undone, "the last edit can be undone"


def test_a_program_that_was_replaced_says_no_mode(tmp_path: Path) -> None:
    class Replaced(HostFiles):
        def run(self, command: str) -> Result:
            return Result("no mode at all", 0, 0.0)

    (tmp_path / "f").write_text("a")
    call = Edit("str_replace", str(tmp_path / "f"), {"old_str": "a", "new_str": "b"})
    _, said, done = Editor().edited(call, Replaced())
    assert not done and "mode" in said


ACTIONS = {
    "fences without end": "```bash\n" * (LONGEST // 8),
    "calls without end": "<tool_call>" * (LONGEST // 11),
    "spaces in a call": "<tool_call>" + " " * (LONGEST - 20),
    "nested lists": '{"a":' + "[" * (LONGEST // 2),
    "lists": '[{"a":[' + "[]," * (LONGEST // 3 - 10),
    "options": "str_replace_editor " + "--path a " * (LONGEST // 9 - 10),
    "quotes": "str_replace_editor " + "'a'" * (LONGEST // 3 - 10),
    "unknown arguments": '{"' + '":1,"'.join(map(str, range(100_000))) + '":1}',
    "a large number": '{"command":"insert","path":"/f","new_str":"","insert_line":' + "9" * 4000 + "}",
    "too long": "x" * (LONGEST + 1),
}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("kind", ["bash", "swe-agent"])
def test_any_action_is_read_in_time(action: str, kind: ToolSet) -> None:
    began = time.process_time()
    call = parse(ACTIONS[action], kind)
    assert time.process_time() - began < 20
    if isinstance(call, Malformed):
        assert len(call.explanation) <= 1000
    if action == "too long":
        assert isinstance(call, Malformed) and f"{LONGEST:,}" in call.explanation


def test_any_text_is_an_action_or_an_explanation() -> None:
    rng = random.Random(5)
    pieces = ["```", "\n", "bash", "<tool_call>", "</tool_call>", "{", "}", "[", "]", '"', ":", ",", "name", "\\", "\0"]
    pieces += ["arguments", "str_replace_editor", "--path", "view", "'", "1e999", "\ud800", "null", "command", " "]
    for _ in range(5000):
        text = "".join(rng.choice(pieces) for _ in range(rng.randrange(20)))
        for kind in ("bash", "swe-agent"):
            parse(text, kind)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "piece", ["\n", " ", ", 1 passed", "=", "1 passed ", "in 1.1s ", "Ran 1 tests in 1.1s\n", "in 1.1s\n \n"]
)
def test_output_is_searched_in_time(piece: str) -> None:
    output = piece * (10**6 // len(piece))
    began = time.process_time()
    outcome(output)
    without_durations(output, "pytest")
    tools.submission(Result(output, 0, 0.0, raw=output.encode()))
    assert time.process_time() - began < 20


def test_how_the_tests_went_is_still_found() -> None:
    assert outcome("x\n=== 1 failed, 2 passed in 0.1s ===\n") == "failed"
    assert outcome("3 passed, 1 warning in 0.12s") == "passed"
    assert outcome("Ran 2 tests in 0.1s\n\nFAILED (errors=1)") == "failed"
    assert outcome("nothing") is None


class Log:
    """A box in which a script has printed something, as far as it is kept."""

    network = True

    def __init__(self, printed: bytes) -> None:
        self.printed = printed

    def run(
        self, command: str, *, timeout: float | None = None, output: int | None = None, most: int | None = None
    ) -> Result:
        capture = Capture(output or 1_000_000)
        if "/eval.sh" in command:
            for at in range(0, len(self.printed), 1 << 16):
                capture.feed(self.printed[at : at + (1 << 16)])
        kept, elided = capture.drain()
        return Result(kept.decode("utf-8", "backslashreplace"), 0, 0.0, elided=elided)

    def restore(self, snapshot: object) -> None:
        pass

    def write_file(self, path: str, data: bytes) -> None:
        pass

    def localised(self, text: str) -> str:
        return text

    generalised = localised


def graded(printed: bytes) -> grading.PatchVerdict:
    from sandboxgym.envs.swebench.mini import tasks

    return grading._test(Log(printed), type("P", (), {"snapshot": None}), tasks()[0], "patch", 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("printed", [b"x" * 300_000, b"\xff\n" * 150_000, b"\n" * 300_000], ids=["x", "ff", "lines"])
def test_a_log_that_is_too_large_resolves_nothing(
    printed: bytes, official_code: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sandboxgym.envs.swebench.mini import tasks

    results = "".join(f"PASSED {name}\n" for name in (*tasks()[0].fail_to_pass, *tasks()[0].pass_to_pass))
    log = f": '>>>>> Start Test Output'\n{results}".encode()
    assert graded(log + b": '>>>>> End Test Output'\n").resolved
    monkeypatch.setattr(grading, "LOG_LIMIT", 200_000)
    monkeypatch.setattr(grading, "LINES_LIMIT", 200_000)
    verdict = graded(log + printed + b"\n: '>>>>> End Test Output'\n")
    assert (verdict.resolved, verdict.reason) == (False, "too much output")
    assert len(verdict.log) < 70_000 and "at most 200,000 bytes" in verdict.log


def test_a_log_that_takes_the_official_parser_minutes_is_given_up(
    official_code: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from sandboxgym.envs.swebench.mini import tasks

    monkeypatch.setattr(grading, "PARSER_SECONDS", 2)
    task = replace(tasks()[0], log_parser="parse_log_sympy")
    log = ">>>>> Start Test Output\n" + ("_" * 1000 + "\n") * 8000 + ">>>>> End Test Output\n"
    verdict = grading.grade_log(task, log, "patch")
    assert (verdict.resolved, verdict.reason) == (False, "no test results")
    assert "more than 2 s of processor time" in verdict.log
    assert grading.grade_log(task, "log", "patch").reason == "no test results", "the next one is parsed"


def test_a_parser_that_fails_and_a_server_that_was_killed_are_survived(official_code: None, tmp_path: Path) -> None:
    from sandboxgym.envs.swebench.mini import tasks

    with pytest.raises(parsing.ParserDied, match="KeyError"):
        parsing.parse(str(tmp_path / "none"), {"row": {}})
    with pytest.raises(parsing.ParserDied, match="memory"):
        (tmp_path / "log").write_text("x" * 10**8)
        row = tasks()[0].row()
        prediction = {"instance_id": row["instance_id"], "model_patch": "-"}
        parsing.parse(str(tmp_path / "log"), {"row": row, "prediction": prediction}, memory=5 * 10**7)
    server = parsing._servers[os.getpid()]
    server._process.kill()
    server._process.wait()
    assert grading.grade_log(tasks()[0], "log", "patch").reason == "no test results"
    assert parsing._servers[os.getpid()] is not server
    last = parsing._servers[os.getpid()]._process
    parsing.close()
    assert last.returncode == 0, "it ends by itself when its owner is gone"


def test_kept_verdicts_are_bounded_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "_verdicts", type(grading._verdicts)())
    monkeypatch.setattr(grading, "_KEPT_CHARACTERS", 1000)
    for number in range(50):
        grading._remember((str(number), "", False), grading.PatchVerdict(False, "p" * 50, "tests fail", log="l" * 50))
    assert list(grading._verdicts)[-1][0] == "49" and len(grading._verdicts) == 10
