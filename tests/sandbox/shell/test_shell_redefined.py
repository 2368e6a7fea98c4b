"""A shell whose commands redefined builtins, functions and options that its own lines could call."""

from __future__ import annotations

import time

import pytest
from sandbox.sandboxes import box, kind, make  # noqa: F401 - fixtures

from sandboxgym.sandbox import process_table
from sandboxgym.sandbox.sandbox import Sandbox
from sandboxgym.sandbox.shell.bash import BashProcess

# fixtures of another module are arguments of the tests below
# ruff: noqa: F811

NAMES = ": builtin printf eval command read declare export trap set unset cd exec return local source kill wait enable"


@pytest.mark.parametrize(
    ("setting", "question", "answer"),
    [
        (
            "; ".join(f"function {name} {{ echo {name} >>~/called; }}" for name in NAMES.split()),
            "type -t : builtin printf eval enable unset return",
            "function\n" * 7,
        ),
        ("alias " + " ".join(f"{name}=false" for name in NAMES.split()), "type -t eval builtin", "alias\nalias\n"),
        ("alias {='echo brace' }='echo end' if='echo if' then=x fi=y '[[=echo test'", "type -t { if", "alias\nalias\n"),
        (
            "enable -n builtin eval unset return",
            "enable -n",
            "".join(f"enable -n {name}\n" for name in ("builtin", "eval", "return", "unset")),
        ),
        ("enable -n . unset set trap mapfile", "type -t . unset set trap mapfile", ""),
        ("enable -n enable", "compgen -A disabled", "enable\n"),
    ],
)
def test_what_is_redefined_stays_so_and_hinders_nothing(box: Sandbox, setting: str, question: str, answer: str) -> None:
    assert box.execute(setting, timeout=20).exit_code == 0
    for number in range(2):
        result = box.execute(f"x={number}; echo out; false", timeout=20)
        assert (result.output, result.exit_code, result.ended) == ("out\n", 1, False)
        assert box.execute(question, timeout=20).output == answer
    snap = box.snapshot()
    box.restore(snap)
    snap.release()
    assert box.execute('echo "$x"', timeout=20).output == "1\n"
    assert box.execute(question, timeout=20).output == answer
    assert box.execute("cat ~/called", timeout=20).exit_code == 1


@pytest.mark.parametrize(
    "setting",
    [
        "readonly __sg_status",
        "readonly POSIXLY_CORRECT",
        "shopt -s extdebug; trap false DEBUG",
        "set -r",
        "enable -n enable builtin",
        "function builtin { :; }; readonly -f builtin",
        "__sg_hook= __sg_late= __sg_then=()",
    ],
)
def test_a_shell_that_cannot_say_how_its_command_ended_is_replaced(box: Sandbox, setting: str) -> None:
    box.execute("x=before; greet() { echo hello; }")
    result = box.execute(f"echo out; {setting}", timeout=60)
    assert (result.output.startswith("out\n"), result.ended, result.timed_out) == (True, True, False)
    assert setting == "set -r" or "bash-" not in result.output  # a restricted shell complains in between
    again = box.execute('echo "$x"; greet; false', timeout=60)
    assert (again.output, again.exit_code, again.ended, again.timed_out) == ("before\nhello\n", 1, False, False)


def test_a_lost_shell_is_seen_also_where_it_was_slow_to_come_to_its_prompt(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine it was not seen in the first looks before any command."""
    learn, looks = BashProcess._learn_prompt, BashProcess._system_call

    def late(bash: BashProcess) -> None:
        end = time.monotonic() + 0.3
        monkeypatch.setattr(BashProcess, "_system_call", lambda self: looks(self) if time.monotonic() > end else b"")
        monkeypatch.setattr(process_table, "state", lambda pid: "R")
        learn(bash)
        monkeypatch.setattr(process_table, "state", state)

    state = process_table.state
    monkeypatch.setattr(BashProcess, "_learn_prompt", late)
    box.execute("x=before")
    result = box.execute("echo out; readonly __sg_status", timeout=60)
    assert (result.output, result.ended, result.timed_out) == ("out\n", True, False)
    assert box.execute('echo "$x"', timeout=60).output == "before\n"


@pytest.mark.parametrize(
    "setting",
    ["readonly __sg_nonce", "declare -r __sg_slot", "set -u; unset __sg_hook", "set -t", "PROMPT_COMMAND=(false exit)"],
)
def test_a_command_before_which_the_shell_was_lost_runs_once_in_a_new_one(box: Sandbox, setting: str) -> None:
    box.execute("x=before")
    result = box.execute(setting, timeout=60)
    assert not result.timed_out
    result = box.execute('echo "$x"; echo once >>~/once; false', timeout=60)
    assert (result.output, result.exit_code, result.replaced) == ("before\n", 1, True)
    result = box.execute("cat ~/once", timeout=60)
    assert (result.output, result.replaced, result.ended) == ("once\n", False, False)


def test_a_shell_whose_terminal_takes_nothing_more_is_replaced(box: Sandbox) -> None:
    exclusive = "import fcntl, os; fcntl.ioctl(os.open('/dev/tty', 2), 0x540C)"
    if box.execute(f'x=before; python3 -c "{exclusive}"').exit_code != 0:
        pytest.skip("no Python in this sandbox")
    result = box.execute("echo once >>~/once; echo out; false", timeout=60)
    if result.output == "out\n":
        pytest.skip("a terminal in exclusive mode can be opened here")
    assert (result.exit_code, result.ended, result.timed_out) == (1, True, False)
    result = box.execute('cat ~/once; echo "$x"', timeout=60)
    assert (result.output, result.ended, result.replaced) == ("once\nbefore\n", False, False)


def test_a_background_job_that_reads_the_terminal_takes_one_shell_with_it(box: Sandbox, kind: str) -> None:
    if kind == "docker":
        pytest.skip("what a shell in a container waits for is not seen")
    box.execute("x=before; (while :; do read -n 1 y; done </dev/tty) & cat /dev/tty >/dev/null & sleep 0.5")
    result = box.execute('echo once >>~/once; echo "$x"; false', timeout=120)
    assert (result.output, result.exit_code, result.timed_out) == ("before\n", 1, False)
    assert box.execute("cat ~/once", timeout=120).output == "once\n"


def test_a_time_limit_holds_where_a_background_job_reads_the_terminal(box: Sandbox, kind: str) -> None:
    if kind == "docker":
        pytest.skip("what a shell in a container waits for is not seen")
    box.execute("x=before; (while :; do read -n 1 y; done </dev/tty) & cat /dev/tty >/dev/null & sleep 0.5")
    result = box.execute("sleep 1000", timeout=0.5)
    assert result.timed_out and (result.exit_code, result.output) == (124, "")
    assert box.execute('echo "$x"', timeout=120).output == "before\n"


def test_a_stopped_shell_goes_on(box: Sandbox) -> None:
    result = box.execute("x=1; kill -STOP $$; echo out; false", timeout=60)
    assert (result.output, result.exit_code, result.timed_out, result.ended) == ("out\n", 1, False, False)
    assert box.execute('echo "$x"').output == "1\n"


@pytest.mark.parametrize("name", ["PS0", "PS1"])
def test_prompts_execute_nothing_between_commands(box: Sandbox, name: str) -> None:
    box.execute(f"{name}='$(sleep 1000)'")
    for _ in range(2):
        assert box.execute("shopt promptvars", timeout=60).output == "promptvars     \ton\n"
    snap = box.snapshot()
    box.restore(snap)
    snap.release()
    assert box.execute(f'echo "${name}"; shopt promptvars', timeout=60).output == "$(sleep 1000)\npromptvars     \ton\n"
    box.execute("shopt -u promptvars")
    assert box.execute("shopt promptvars", timeout=60).output == "promptvars     \toff\n"


@pytest.mark.parametrize("attribute", ["--", "-x"])
def test_a_variable_that_is_too_large_is_left_out_and_named(box: Sandbox, attribute: str) -> None:
    box.execute("x=1; greet() { echo hello; }")
    box.execute(f"declare {attribute} large=$(head -c 30000000 /dev/zero | tr '\\0' a)", timeout=60)
    state = box.shell_state()
    assert state is not None and state.omitted.split() == [b"_", b"large"]
    snap = box.snapshot()
    assert [item for item in snap.lossy if "'large'" in item]
    assert box.execute('echo "${#large}"', timeout=60).output == "30000000\n"
    box.restore(snap)
    snap.release()
    assert box.execute('echo "$x${large-}"; greet', timeout=60).output == "1\nhello\n"
    state = box.shell_state()
    assert state is not None and state.omitted == b""
