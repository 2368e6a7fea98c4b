"""The persistent shell: what it runs, what it reports, what it survives."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from sandbox.sandboxes import Maker, any_box, box, kind, make  # noqa: F401 - fixtures

from sandboxgym.sandbox.base import Limits, SandboxError
from sandboxgym.sandbox.sandbox import Sandbox
from sandboxgym.sandbox.shell import bash_session as shell_module

# fixtures of another module are arguments of the tests below
# ruff: noqa: F811


def running(sandbox: Sandbox) -> list[str]:
    """Command lines of what runs beside the shell."""
    return [item.removeprefix("background: ") for item in sandbox.lossy() if item.startswith("background: ")]


def control(sandbox: Sandbox) -> str:
    """Folder of the shell's files, inside."""
    return sandbox.execute(f"echo {sandbox.backend.control_inside}/shell.*").output.strip()


def test_one_shell_for_all_commands(box: Sandbox) -> None:
    assert box.execute("mkdir ~/place && cd ~/place && x='one two' && export Y=3").exit_code == 0
    box.execute("greet() { echo hello $1; }; alias up='echo up'")
    result = box.execute('echo ${PWD#$HOME}; echo "$x"; printenv Y; greet you; up')
    assert result.output == "/place\none two\n3\nhello you\nup\n"
    assert not (result.timed_out or result.ended or result.syntax_error or result.elided)


@pytest.mark.parametrize("code", [0, 1, 2, 77, 126, 127, 130, 255])
def test_exit_codes_are_exact(any_box: Sandbox, code: int) -> None:
    command = {0: "true", 126: "/etc", 127: "no-such-command"}.get(code, f"bash -c 'exit {code}'")
    assert any_box.execute(command).exit_code == code
    assert any_box.execute("echo $?").output == f"{code}\n"


def test_a_killed_program_gives_128_plus_the_signal(any_box: Sandbox) -> None:
    assert any_box.execute("bash -c 'kill -9 $$'").exit_code == 137
    assert any_box.execute("sleep 100 & kill $!; wait $!").exit_code == 143


def test_the_last_argument_survives(any_box: Sandbox) -> None:
    any_box.execute("true first last")
    assert any_box.execute("echo $_").output == "last\n"


@pytest.mark.parametrize(
    ("command", "output"),
    [
        ("cat <<'END'\n$HOME `date` \"quoted\" it's\nEND", '$HOME `date` "quoted" it\'s\n'),
        ("cat <<END\n$((1 + 1)) !!\nEND", "2 !!\n"),
        ("for i in 1 2; do\n  echo $i\ndone\n\n\necho end", "1\n2\nend\n"),
        ("echo hi! !x '!y' \"!z\"", "hi! !x !y !z\n"),
        ("echo grün 日本 🎉; printf 'ab'", "grün 日本 🎉\nab"),
        ("printf %s '\udcff\udcfe' | od -An -tx1", " ff fe\n"),
        ("printf %s '\ud800' | od -An -tx1", " ed a0 80\n"),
        ("# nothing", ""),
        ("", ""),
        ("\n  \n", ""),
        ("echo a # comment", "a\n"),
        ("echo a \\\n  b", "a b\n"),
        ("echo a\\", "a\\\n"),
        ("echo '\ta\x01b'", "\ta\x01b\n"),
        ("echo one; return 0; echo two", "one\n"),
        ("shopt -s extglob\ncase aab in +(a)b) echo pattern ;; esac\nshopt -u extglob", "pattern\n"),
        ("alias shout='echo LOUD'\nshout now", "LOUD now\n"),
        ("f() { local x=1; echo in $x; }; f; unset -f f", "in 1\n"),
        ("printf 'no newline'", "no newline"),
        ("printf '\\377\\n'", "\\xff\n"),
        ("echo $(( 6 * 7 )); (exit 3); echo $?", "42\n3\n"),
        ("}", None),
        ("echo a )", None),
        ("if true; then echo a", None),
        ("echo 'open", None),
        ("echo a\n}\necho b; {\n:", None),
        ("echo a\nfi\nif :; then", None),
    ],
)
def test_whatever_bash_takes(any_box: Sandbox, command: str, output: str | None) -> None:
    result = any_box.execute(command)
    if output is None:
        assert result.syntax_error
        assert result.exit_code != 0
        assert "syntax error" in result.output or "unexpected" in result.output
        assert not result.output.startswith("a\n"), "part of it was run"
    else:
        assert not result.syntax_error
        assert result.output == output
    assert any_box.execute("echo still here").output == "still here\n"


def test_a_syntax_error_leaves_all_as_it_was(box: Sandbox) -> None:
    box.execute("x=1")
    result = box.execute("x=2; touch ~/never; if")
    assert result.syntax_error
    assert "line 1" in result.output or "line 2" in result.output
    assert box.execute("echo $x; ls ~/never 2>/dev/null").output == "1\n"


def test_an_unfinished_here_document_is_what_bash_makes_of_it(any_box: Sandbox) -> None:
    result = any_box.execute("cat <<END\nline")
    assert not result.syntax_error
    assert result.output.endswith("line\n") or result.output.endswith("line")


def test_a_null_byte_is_refused(any_box: Sandbox) -> None:
    assert any_box.execute("echo a\0b").syntax_error


def test_large_commands(any_box: Sandbox) -> None:
    text = "".join(f"line {number} 'quoted' $x\n" for number in range(30_000))
    result = any_box.execute(f"cat <<'END' | cksum\n{text}END")
    assert any_box.execute("wc -c <<'END'\n" + text + "END").output.strip() == str(len(text))
    assert result.exit_code == 0


def test_error_messages_are_those_of_an_interactive_bash(any_box: Sandbox) -> None:
    assert any_box.execute("no-such-command").output == "bash: no-such-command: command not found\n"


@pytest.mark.parametrize(
    "setting",
    [
        "PS1='\\u@\\h> '; PS2='more> '",
        "PROMPT_COMMAND='echo prompt'",
        "PROMPT_COMMAND=",
        "unset PROMPT_COMMAND",
        "IFS=_; set -f",
        "set -u",
        "set -C",
        "set -x",
        "set -v",
        "set -a",
        "set -T -E",
        "set -o posix",
        "set +m",
        "shopt -s nocasematch nullglob failglob",
        "trap 'echo debug' DEBUG",
        "trap 'echo failed' ERR",
        "trap 'echo returned' RETURN",
        "trap 'echo bye' EXIT",
        "trap '' INT TERM HUP CHLD",
        "printf() { :; }; read() { :; }; declare() { :; }; pwd() { :; }; trap() { :; }; export -f printf",
        "alias builtin=false eval=false printf=false",
        "stty raw -echo",
        "stty echo",
        "exec 2>/dev/null",
        "printf '\\033[?2004h'",
        "exec 7>/dev/null",
        "readonly PROMPT_COMMAND",
        "set -- a 'b c'",
        "ulimit -n 64",
        "umask 777",
        "cd /; PATH=",
    ],
)
def test_whatever_a_user_sets_the_shell_stays_usable(make: Maker, setting: str) -> None:
    box = make()
    assert box.execute(setting).exit_code == 0
    for number in range(2):
        result = box.execute(f"x={number}; echo out; false")
        assert result.exit_code == 1
        assert "out" in result.output.split("\n")
        assert "__sg" not in result.output
        assert not result.ended
        assert box.execute("echo $x").output.split("\n")[-2].endswith(str(number))


def test_traces_show_the_command_only(any_box: Sandbox) -> None:
    any_box.execute("set -x")
    result = any_box.execute("echo traced")
    any_box.execute("set +x")
    assert result.output.lstrip("+ ") == "echo traced\ntraced\n"


def test_traps_run_as_often_as_they_should(box: Sandbox) -> None:
    box.execute("trap 'echo failed' ERR")
    assert box.execute("false; true").output == "failed\n"
    assert box.execute("false").output == "failed\n"
    assert box.execute("false || true").output == ""
    box.execute("trap - ERR; trap 'echo before $BASH_COMMAND' DEBUG")
    assert box.execute("true one\ntrue two").output == "before true one\nbefore true two\n"
    box.execute("trap - DEBUG")
    assert box.execute("true").output == ""


def test_an_environment_that_changes_the_prompt(box: Sandbox) -> None:
    box.execute('_OLD=$PS1; PS1="(venv) $PS1"; deactivate() { PS1=$_OLD; }; hash -r')
    assert box.execute("echo in").output == "in\n"
    box.execute("deactivate")
    assert box.execute("echo out").output == "out\n"


def test_marks_of_earlier_commands_are_plain_output(box: Sandbox) -> None:
    box.execute("true")
    directory = control(box)
    nonce = box.execute(
        f"sed -n 's/.*__sg_prepare \\([0-9a-f]*\\);.*/\\1/p' {directory}/go; : " + "x" * 100
    ).output.strip()
    assert len(nonce) == 16
    result = box.execute(f"printf '\\036{nonce}}}\\036'; echo '$ '; printf '\\036{nonce}{{\\036'; echo; false")
    assert result.exit_code == 1
    assert result.output == f"\x1e{nonce}}}\x1e$ \n\x1e{nonce}{{\x1e\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["go", "state.0", "state.1", "syntax", "limits"])
@pytest.mark.parametrize("kind_of_trap", ["ln -s {}", "mkfifo", "mkdir"])
def test_nobody_inside_leads_the_host_elsewhere(any_box: Sandbox, name: str, kind_of_trap: str, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (box,) = any_box.fork(1)
    with box:
        box.execute("x=1")
        box.execute(f"cd {control(box)}; rm {name}; {kind_of_trap.format(precious)} {name}")
        for command in ("if", "true"):
            box.execute(command, timeout=1)
            with contextlib.suppress(SandboxError):
                box.snapshot()
        assert box.execute("echo usable", timeout=60).output == "usable\n"
    assert precious.read_text() == "kept"


def test_a_forged_report_is_not_believed(box: Sandbox) -> None:
    directory = control(box)
    result = box.execute(f"printf 'x end 0\\ngarbage\\n\\n\\377 a b c\\n' >{directory}/status; echo on; false")
    assert (result.exit_code, result.output) == (1, "on\n")


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("exit 7", 7),
        ("exec bash -c 'echo last; exit 9'", 9),
        ("set -e; false; echo never", 1),
        ("kill -9 $$", 137),
        ("sleep 100 & exit 3", 3),
        ("f() { exit 4; }; f", 4),
    ],
)
def test_a_shell_that_ends_is_replaced_with_its_last_state(make: Maker, command: str, code: int) -> None:
    box = make()
    box.execute("x='kept value'; cd /tmp; f() { echo function; }; export Y=1; set -u")
    result = box.execute(f"x=lost; {command}")
    assert (result.exit_code, result.ended, result.timed_out) == (code, True, False)
    if "last" in command:
        assert result.output == "last\n"
    assert box.execute('echo "$x"; pwd; f; printenv Y; echo $-').output.startswith("kept value\n/tmp\nfunction\n1\n")
    assert running(box) == []


def test_exit_runs_the_exit_trap(box: Sandbox) -> None:
    box.execute("trap 'echo bye' EXIT")
    result = box.execute("echo going; exit 2")
    assert (result.output, result.exit_code, result.ended) == ("going\nbye\n", 2, True)


def test_a_shell_killed_between_two_commands_is_replaced(box: Sandbox) -> None:
    box.execute("x=5; me=$$; (setsid sh -c 'while [ ! -e ~/go ]; do sleep 0.01; done; kill -9 '$me) &")
    shell = box._parts.shell
    assert shell is not None and shell.pid is not None
    shell.rest()  # it has handed out its state
    box.write_file("/root/go", b"")
    old = shell.pid
    while any(info.pid == old for info in box.backend.processes()):
        time.sleep(0.01)
    assert box.execute("echo $x").output == "5\n"
    assert shell.pid != old


@pytest.mark.parametrize(
    "command",
    [
        "cat",
        "sleep 1000",
        "sleep 1000 | cat",
        "while :; do :; done",
        "sh -c 'trap \"\" INT TERM; while :; do sleep 100; done'",
        "(setsid sleep 1000 &); sleep 1000",
        "sleep 1000 & wait",
        "python3 -c 'import time; print(1, flush=True); time.sleep(1000)'",
        "stty -isig; sleep 1000",
        "read line",
        "sh -c 'trap \"\" INT TERM; sleep 1000'; touch ~/after",
        "python3 -c 'import signal, time; signal.signal(2, lambda *_: exit()); time.sleep(100)'; touch ~/after",
        "trap '' INT; while :; do :; done; touch ~/after",
        "trap '' INT; sleep 1000; touch ~/after",
        "trap 'echo interrupted' INT; while :; do sleep 100; done; touch ~/after",
    ],
)
def test_a_timeout_ends_the_whole_tree_and_leaves_a_usable_shell(make: Maker, command: str) -> None:
    box = make()
    box.execute("x=before; cd /tmp")
    result = box.execute(f"echo start; x=during; {command}", timeout=0.8)
    assert (result.timed_out, result.exit_code, result.ended) == (True, 124, False)
    assert result.output.startswith("start\n")
    assert running(box) == []
    again = box.execute("echo $x; pwd")
    assert (again.output, again.exit_code) == ("during\n/tmp\n", 0)
    assert box.execute("ls ~/after").exit_code != 0


def test_a_shell_that_hangs_itself_is_replaced(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandboxgym.sandbox.shell.bash_session.PATIENCE", 0.3)
    box = make()
    box.execute("x=before; cd /tmp")
    result = box.execute("echo start; x=during; exec sleep 1000", timeout=0.8)
    assert (result.timed_out, result.exit_code, result.ended) == (True, 124, True)
    assert result.output.startswith("start\n")
    assert box.execute("echo $x; pwd").output == "before\n/tmp\n"
    assert box.execute("ls ~/after").exit_code != 0
    assert running(box) == []


def test_a_shell_comes_back_also_where_killing_takes_longer_than_it_is_waited_for(
    any_box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy daemon does this: while processes are found and killed, the shell is stopped, too."""
    kill_started, wait = shell_module.kill_started, shell_module.Shell._wait
    needs = 0.0

    def slowly(*arguments: Any, **options: Any) -> dict[int, str]:
        nonlocal needs
        needs = needs or 0.6
        time.sleep(0.4)
        return kill_started(*arguments, **options)

    def later(shell: shell_module.Shell, deadline: float, **options: Any) -> bool:
        nonlocal needs
        if needs <= 0.0:
            return wait(shell, deadline, **options)
        pause = max(deadline - time.monotonic(), 0.0)
        needs -= pause
        time.sleep(pause)
        return needs <= 0.0 and wait(shell, time.monotonic() + 30, **options)

    monkeypatch.setattr(shell_module, "kill_started", slowly)
    monkeypatch.setattr(shell_module.Shell, "_wait", later)
    result = any_box.execute("kept=2; sh -c 'trap \"\" INT; sleep 100'", timeout=0.2)
    assert (result.timed_out, result.ended) == (True, False)
    assert any_box.execute('echo "$kept"').output == "2\n"


def test_a_shell_told_too_late_that_its_command_ran_too_long_goes_on(make: Maker) -> None:
    box = make()
    box.execute("x=before; trap '' INT")
    shell = box._parts.shell
    assert shell is not None and shell._bash is not None
    pid = shell.pid
    for number in range(5):
        shell.rest()  # it reads a line
        shell._bash.abort()
        result = box.execute(f"echo $x {number}")
        assert (result.output, result.exit_code, result.ended) == (f"before {number}\n", 0, False)
    assert shell.pid == pid
    assert box.execute("trap -p INT").output == "trap -- '' SIGINT\n"


def test_background_jobs_of_earlier_commands_survive_a_timeout(box: Sandbox) -> None:
    box.execute("sleep 1234 &")
    box.execute("(setsid sleep 1235 &)")
    time.sleep(0.05)  # start times of processes are told in hundredths of a second
    assert box.execute("sleep 1236 & cat", timeout=0.2).timed_out
    assert sorted(running(box)) == ["sleep 1234", "sleep 1235"]


def test_background_jobs_make_no_noise(box: Sandbox) -> None:
    assert box.execute("sleep 0.05 &").output == ""
    assert box.execute("sleep 0.1; echo done").output == "done\n"
    assert box.execute("echo quiet").output == "quiet\n"


def test_a_background_job_that_prints_later_confuses_nothing(box: Sandbox) -> None:
    box.execute("(for i in 1 2 3 4 5 6 7 8; do echo noise $i; sleep 0.02; done; : >~/done) &")
    while box.execute("test -e ~/done").exit_code != 0:
        assert box.execute("echo a; (exit 5)").exit_code == 5
    assert box.execute("echo clean").output == "clean\n"


def test_a_background_job_that_holds_the_terminal_does_not_hold_the_command(box: Sandbox) -> None:
    began = time.monotonic()
    assert box.execute("sleep 1000 & echo started").output == "started\n"
    assert time.monotonic() - began < 400


def test_what_was_typed_ahead_is_not_run(box: Sandbox) -> None:
    started = box.interact("echo ready; until [ -e ~/go ]; do sleep 0.01; done", timeout=60, until="ready")
    assert started.running
    assert box.interact("touch ~/typed\n", timeout=0.1).running
    box.write_file("/root/go", b"")
    assert box.interact("", timeout=60).exit_code == 0
    assert box.execute("ls ~/typed").exit_code != 0


def test_talking_to_a_program(box: Sandbox) -> None:
    asked = box.interact("read -p 'name? ' name; echo hello $name", timeout=60, until=r"\? $")
    assert asked.running
    assert asked.output == "name? "
    with pytest.raises(SandboxError, match="still runs"):
        box.execute("true")
    answered = box.interact("you\n", timeout=60)
    assert not answered.running
    assert (answered.output.removeprefix("you\n"), answered.exit_code) == ("hello you\n", 0)
    assert box.execute("echo $name").output == "you\n"


def test_interrupting_a_program_by_typing(box: Sandbox) -> None:
    assert box.interact("cat; echo not reached", timeout=0.1).running
    assert "again" in box.interact("again\n", timeout=60, until="again").output
    ended = box.interact("\x03", timeout=60)
    assert (ended.running, ended.exit_code) == (False, 130)
    assert "not reached" not in ended.output
    assert box.interact("cat", timeout=0.1).running
    assert box.interact("\x04", timeout=60).exit_code == 0


_IGNORING = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGQUIT, signal.SIG_IGN)
from sandboxgym.sandbox.sandbox import make_sandbox
with make_sandbox(sys.argv[1], allow_unsafe=True) as box:
    box.interact("cat", timeout=0)
    box.interact("here\\n", timeout=60, until="here")
    print(box.interact(sys.argv[2], timeout=60).exit_code)
"""


@pytest.mark.parametrize(("key", "code"), [("\x03", 130), ("\x1c", 131)])
def test_keys_end_programs_where_the_owner_ignores_their_signals(kind: str, key: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", _IGNORING, kind, key], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip().endswith(str(code)), done.stderr


def test_ending_what_waits(box: Sandbox) -> None:
    assert box.interact("x=1; echo set; cat", timeout=60, until="set").running
    assert box.interrupt().exit_code == 124
    assert box.execute("echo $x").output == "1\n"
    with pytest.raises(SandboxError, match="no command"):
        box.interrupt()


def test_a_function_named_like_the_null_command_runs_only_when_it_is_called(box: Sandbox) -> None:
    """Else the classical fork bomb would go off again at every later command."""
    box.execute(":() { echo $((++calls)); }; calls=0")
    for _ in range(3):
        assert box.execute("echo ok").output == "ok\n"
    box.execute("if")  # refused
    assert box.execute("echo $calls").output == "0\n"
    assert box.execute(":").output == "1\n"


def test_a_late_interrupt_does_not_drop_the_next_command(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is sent again and again until the command ends; bash may notice the last one at its prompt.

    Rarely, bash 5.2 crashes of a signal there. A new one then has the last state that was captured, and that is said.
    """
    monkeypatch.setattr(shell_module, "GRACE", 0.0)
    monkeypatch.setattr(shell_module, "_BETWEEN", 0.0005)
    lost = 0
    for number in range(25):
        assert box.interact(f"x={number}; echo set; cat", timeout=60, until="set").running
        interrupted = box.interrupt()
        after = box.execute("echo $x; echo ran", timeout=20)
        assert after.output.endswith("\nran\n")
        if after.output != f"{number}\nran\n":
            assert interrupted.ended or after.replaced
            lost += 1
    assert lost <= 2


def test_output_is_bounded(make: Maker) -> None:
    box = make(limits=Limits(output=1000))
    result = box.execute("for ((i = 0; i < 10000; i++)); do echo $i; done")
    head, _, tail = result.output.partition("\n[... ")
    assert head.startswith("0\n1\n2\n")
    assert tail.endswith("9998\n9999\n")
    assert len(result.output) < 1100
    assert result.elided == sum(len(f"{i}\n") for i in range(10000)) - 1000
    assert box.execute("echo short").output == "short\n"


@pytest.mark.slow
def test_a_flood_of_output_is_bounded(box: Sandbox) -> None:
    result = box.execute("yes | head -c 100000000; false", timeout=300)
    assert (result.exit_code, result.timed_out) == (1, False)
    assert result.elided == 100_000_000 - 1_000_000
    assert box.execute("echo $?").output == "1\n"


def test_progress_bars_and_colours(any_box: Sandbox) -> None:
    result = any_box.execute(r"printf '\033[32m10%%\r50%%\r100%%\033[0m\ndone\n'")
    assert result.output == "100%\ndone\n"


def test_programs_see_a_terminal_of_200_columns(any_box: Sandbox) -> None:
    assert any_box.execute("test -t 0 && test -t 1 && test -t 2 && stty size").output.split()[1] == "200"


def test_time_is_told(any_box: Sandbox) -> None:
    assert 0.1 <= any_box.execute("sleep 0.1").seconds < 60


def test_a_shell_that_is_killed_while_it_starts_is_replaced(box: Sandbox) -> None:
    box.execute("x=1")
    shell = box._parts.shell
    assert shell is not None and shell.pid is not None
    shell.rest()  # what a command did is known a moment after its end
    for _ in range(2):
        os.kill(shell.pid, signal.SIGKILL)
        box.execute("true")
        with contextlib.suppress(ProcessLookupError):
            os.kill(shell.pid, signal.SIGKILL)  # one that was started just now, or the old one once more
        assert box.execute("echo $x", timeout=60).exit_code in (0, 128 + signal.SIGKILL)
    assert box.execute("echo $x", timeout=60).output == "1\n"
