"""The init of a live container as a compiled program and in Python: both do the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from components import missing
from sandbox.overlay_boxes import Maker, box, make, rootless, sh  # noqa: F401 - fixtures

from sandboxgym.sandbox.overlay import init as box_module
from sandboxgym.sandbox.overlay import init_binary, ipc

# fixtures of another module are arguments of the tests below
# ruff: noqa: F811

SCRIPT = """
import json, os, sys, time
from sandboxgym.sandbox.overlay.backend import OverlayBackend
from sandboxgym.sandbox.files.rootfs import host

backend = OverlayBackend(host(), rootless=sys.argv[1] == "rootless")
backend.start()


def ends(argv, **arguments):
    try:
        process = backend.spawn(argv, env={"PATH": "nothing:/nowhere:/usr/bin", "A": "b=c"}, **arguments)
    except (OSError, ValueError) as error:
        return [type(error).__name__, getattr(error, "errno", None), getattr(error, "filename", None), str(error)]
    output = b""
    try:
        while part := os.read(process.terminal if process.terminal is not None else process.output, 4096):
            output += part
    except OSError:  # the end of a terminal
        pass
    result = [process.wait(300), output.decode()]
    process.close()
    return result


def left():
    end = time.monotonic() + 300  # they were killed, which takes a moment
    while (found := [info.command for info in backend.processes()]) and time.monotonic() < end:
        time.sleep(0.01)
    return found


source, sink = os.pipe()
os.write(sink, b"typed")
os.close(sink)
(backend.control / "sh").mkdir()
results = {
    "status": ends(["sh", "-c", "exit 7"]),
    "signal": ends(["sh", "-c", "kill -9 $$"]),
    "both streams": ends(["sh", "-c", "echo out; echo err >&2"]),
    "environment": ends(["env"]),
    "directory": ends(["pwd"], cwd="/usr/lib"),
    "no directory": ends(["pwd"], cwd="/usr/none"),
    "no program": ends(["nothing-like-this"]),
    "no such path": ends(["/usr/bin/nothing-like-this"]),
    "not executable": ends(["/etc/passwd"]),
    "a directory": ends(["/usr"]),
    "null byte": ends(["echo", "a\\0b"]),
    "no arguments": ends(["true", ""]),
    "input": ends(["cat"], stdin=source),
    "nothing to read": ends(["cat"]),
    "blocked": ends(["grep", "^SigBlk", "/proc/self/status"]),
    "ignored": int(ends(["grep", "^SigIgn", "/proc/self/status"])[1].split()[1], 16) & ~(3 << 31),  # two are glibc's
    "session": ends(["sh", "-c", "sleep 100 & sleep 100 >/dev/null 2>&1 & exit 3"]),
    "left": left(),
    "open": ends(["sh", "-c", "cd /proc/self/fd; echo *"]),
    "terminal": ends(["sh", "-c", "tty; stty size; stty -a | grep -o -- '-echo ' ; echo $$ > /dev/tty"], terminal=True),
    "orphans": ends(["sh", "-c", "(sleep 0.01; echo late) & wait; ls /proc | grep -c '^1$'"]),
    "score": ends(["sh", "-c", "until grep 500 /proc/self/oom_score_adj; do :; done"]),
    "many": [ends(["true"])[0] for _ in range(50)],
    "name": ends(["cat", "/proc/1/comm"])[1],
}
backend.close()
print(json.dumps(results))
"""


def results_with(init: str, rootless: bool) -> dict[str, object]:
    environment = {**os.environ, init_binary.VARIABLE: init}
    command = [sys.executable, "-c", SCRIPT, "rootless" if rootless else "root"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    results: dict[str, object] = json.loads(done.stdout)
    return results


@pytest.fixture
def compiled() -> Path:
    program = init_binary.program()
    if program is None:
        missing("cc", "no C compiler, or none that links statically")
        raise AssertionError
    return program


def test_both_kinds_do_the_same(rootless: bool, compiled: Path) -> None:
    small, python = results_with("", rootless), results_with("python", rootless)
    assert (small.pop("name"), python.pop("name")) == ("init\n", "python\n")
    assert small == python
    assert small["status"] == [7, ""] and small["signal"] == [137, ""]
    assert small["environment"] == [0, "PATH=nothing:/nowhere:/usr/bin\nA=b=c\n"]
    assert small["blocked"] == [0, "SigBlk:\t0000000000000000\n"] and small["ignored"] == 0
    assert small["input"] == [0, "typed"] and small["left"] == []
    assert small["many"] == [0] * 50


def test_the_small_one_takes_little_memory(make: Maker, compiled: Path) -> None:
    box = make()
    box.start()
    assert sh(box, "echo up") == "up"  # an answer, so the program runs
    lines = Path(f"/proc/{box.container.pid}/smaps_rollup").read_text().splitlines()  # type: ignore[union-attr]
    private = sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty"))
    assert 0 < private < 300  # kB


def test_one_that_is_gone_is_done_without(compiled: Path) -> None:
    assert box_module._opened("/no/such/program") == box_module._opened("") == -1
    os.close(box_module._opened(str(compiled)))


def test_without_a_compiler_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SANDBOXGYM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert init_binary.program() is None
    monkeypatch.setenv(init_binary.VARIABLE, "python")
    assert init_binary.program() is None


def test_it_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiled: Path) -> None:
    monkeypatch.setenv("SANDBOXGYM_CACHE", str(tmp_path / "cache"))
    first = init_binary.program()
    assert first is not None
    made = first.stat().st_mtime_ns
    monkeypatch.setenv("PATH", str(tmp_path))
    assert init_binary.program() == first and first.stat().st_mtime_ns == made
    assert [path.name for path in first.parent.iterdir()] == [first.name]


@pytest.mark.parametrize("terminal", [False, True])
def test_requests_are_read_as_they_were_written(terminal: bool) -> None:
    env = {"PATH": "/bin", "EMPTY": "", "LINES": "a\nb", "BYTES": os.fsdecode(b"\xff")}
    packed = ipc.pack_spawn(["sh", "", "-c"], env, cwd="/a b", terminal=terminal, adopts=True)
    read = ipc.unpack_spawn(packed)
    assert (read["argv"], read["env"], read["cwd"], read["path"]) == (["sh", "", "-c"], env, "/a b", "/bin")
    assert (read["terminal"], read["adopts"]) == (terminal, terminal)
    for bad in ({"A=B": ""}, {"": "x"}, {"A": "\0"}):
        with pytest.raises(ValueError, match="expected"):
            ipc.pack_spawn(["true"], bad, cwd="/", terminal=False, adopts=False)
