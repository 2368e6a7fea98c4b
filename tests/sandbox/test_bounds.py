"""Everything read from a sandbox is bounded in bytes and time, and unexpected content is handled."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sandbox.docker_image import docker_image  # noqa: F401 - fixture
from sandbox.sandboxes import check

from sandboxgym.errors import SnapshotCorrupt
from sandboxgym.sandbox import process_table
from sandboxgym.sandbox.base import LONGEST_COMMAND, READ_LIMIT, FileTooLarge, SandboxError
from sandboxgym.sandbox.files.reading import FLAGS, beginning, regular_file
from sandboxgym.sandbox.sandbox import Sandbox, make_sandbox
from sandboxgym.sandbox.shell import bash as shell_process
from sandboxgym.sandbox.shell.bash import MAX_STATE, BashReport, parse_reports
from sandboxgym.sandbox.shell.state import SECTIONS, ShellState
from sandboxgym.sandbox.shell.terminal import plain_text

# fixtures of another module are arguments of the tests below
# ruff: noqa: F811

MIB = 2**20
ALLOWED = 64 * MIB
"""Memory that one action may take here for a time, beside what there was."""


@pytest.fixture(scope="module", params=["overlay", "overlay-rootless", "copy", "docker"])
def box(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    if request.param != "docker":
        check(request.param)
    rootfs = f"docker:{request.getfixturevalue('docker_image')}" if request.param == "docker" else "host"
    with make_sandbox(request.param, rootfs=rootfs, allow_unsafe=True) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def any_box() -> Iterator[Sandbox]:
    with make_sandbox(allow_unsafe=True) as sandbox:
        yield sandbox


def peak(program: str, **environment: str) -> int:
    """Bytes by which a program grows after the line ``# from here``, at its largest."""
    before, _, after = program.partition("# from here\n")
    whole = (
        f"import resource\nmost = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n{before}\n"
        f"small = most()\n{after}\nprint('grew', most() - small)\n"
    )
    checkout = Path(__file__).parents[2]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(checkout / name) for name in ("", "tests", "tests/support")),
        **environment,
    }
    done = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.rpartition("grew ")[2])


# Files.


def place(box: Sandbox, name: str) -> str:
    """A path that `Sandbox.execute` and `Sandbox.read_file` agree on."""
    inside = getattr(box.backend, "inside", None)
    return str(inside(name)) if inside else name


def test_a_large_file_is_refused_before_it_is_read(box: Sandbox) -> None:
    large, exact = place(box, "/tmp/large"), place(box, "/tmp/exact")
    assert box.execute(f"truncate -s 1G {large} && truncate -s 1000 {exact}").exit_code == 0
    began = time.monotonic()
    with pytest.raises(FileTooLarge, match=f"at most {READ_LIMIT:,} bytes") as caught:
        box.read_file("/tmp/large")
    assert caught.value.errno == errno.EFBIG and "large" in str(caught.value.filename)
    assert time.monotonic() - began < 60
    assert box.read_file("/tmp/exact", limit=1000) == bytes(1000)
    with pytest.raises(FileTooLarge, match="1,000 bytes"):
        box.read_file("/tmp/exact", limit=999)
    box.execute(f"rm {large} {exact}")


def test_what_is_no_regular_file_is_not_read_as_one(box: Sandbox) -> None:
    pipe, link = place(box, "/tmp/pipe"), place(box, "/tmp/link")
    box.execute(f"mkfifo {pipe}; ln -s {pipe} {link}")
    for path in ("/tmp/pipe", "/tmp/link", "/tmp", "/tmp/none"):
        with pytest.raises(OSError):
            box.read_file(path)
    if box.backend.capabilities.isolated:
        for path in ("/dev/zero", "/dev/tty", "/proc"):
            with pytest.raises(OSError):
                box.read_file(path)
    box.execute(f"rm {pipe} {link}")


def test_writing_to_a_pipe_that_nobody_reads_is_an_error_at_once(box: Sandbox) -> None:
    if box.backend.capabilities.name == "docker":
        pytest.skip("the daemon puts a file in the place of the pipe")
    pipe = place(box, "/tmp/pipe")
    box.execute(f"mkfifo {pipe}")
    with pytest.raises(OSError):
        box.write_file("/tmp/pipe", b"x")
    box.execute(f"rm {pipe}")


def test_a_file_of_proc_that_never_ends_is_read_to_the_limit(box: Sandbox) -> None:
    if not box.backend.capabilities.isolated:
        pytest.skip("its /proc is the host's")
    began = time.monotonic()
    with pytest.raises(OSError) as caught:
        box.read_file("/proc/1/pagemap", limit=MIB)
    assert isinstance(caught.value, FileTooLarge) or caught.value.errno in (errno.EPERM, errno.EACCES)
    assert time.monotonic() - began < 60


def test_programs_that_were_replaced_do_not_hold_the_owner(docker_image: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sandboxgym.sandbox.docker import container_files as docker_files
    from sandboxgym.sandbox.docker import exec as docker_exec

    with make_sandbox("docker", rootfs=f"docker:{docker_image}") as sandbox:
        before = sandbox.snapshot()
        sandbox.execute(f"printf '#!/bin/sh\\nwhile :; do echo {'yes' * 10_000}; done\\n' > /usr/bin/head")
        with pytest.raises(FileTooLarge):
            sandbox.read_file("/proc/version", limit=MIB)
        sandbox.execute("printf '#!/bin/sh\\nsleep 7779\\n' > /usr/bin/head")
        with monkeypatch.context() as hurried, pytest.raises(TimeoutError):
            hurried.setattr(docker_files, "_READING", 2.0)
            sandbox.read_file("/proc/version")
        assert not [info for info in sandbox.backend.processes() if "7779" in info.command]
        # The one that sets each new shell's terminal: the next shell cannot be had, which is said in time.
        sandbox.execute("printf '#!/bin/sh\\nsleep 7779\\n' > /usr/bin/stty")
        with monkeypatch.context() as hurried, pytest.raises(SandboxError, match="terminal"):
            hurried.setattr(docker_exec, "_SECONDS", 6.0)  # in which a process must have been started, too
            sandbox.execute("exit")
            sandbox.execute("true")
        sandbox.restore(before)
        assert sandbox.execute("echo fine").output == "fine\n"
        before.release()


def test_no_more_is_read_than_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    descriptor = os.open(path, FLAGS)
    try:
        assert regular_file(descriptor, "file", limit=100) == b"x" * 100
        os.lseek(descriptor, 0, os.SEEK_SET)
        assert beginning(descriptor, 10) == b"x" * 10
    finally:
        os.close(descriptor)
    zero = os.open("/dev/zero", FLAGS)
    try:
        assert len(beginning(zero, 3 * MIB)) == 3 * MIB
        with pytest.raises(TimeoutError):
            beginning(zero, 1 << 40, seconds=0.0)
        with pytest.raises(OSError, match="not a regular file"):
            regular_file(zero, "/dev/zero", limit=10)
    finally:
        os.close(zero)


def test_the_error_survives_the_way_between_processes() -> None:
    error = pickle.loads(pickle.dumps(FileTooLarge.of("/f", size=10, limit=5)))
    assert isinstance(error, FileTooLarge) and error.errno == errno.EFBIG and error.filename == "/f"


def test_reading_takes_little_more_than_the_file() -> None:
    program = """
from sandboxgym.sandbox.sandbox import make_sandbox
from sandboxgym.sandbox.base import FileTooLarge
sandbox = make_sandbox(allow_unsafe=True).start()
path = getattr(sandbox.backend, "inside", str)("/tmp/f")
sandbox.execute(f"truncate -s 1G {path}; truncate -s 16M {path}2")
# from here
assert len(sandbox.read_file("/tmp/f2")) == 2**24
try:
    sandbox.read_file("/tmp/f")
except FileTooLarge:
    pass
sandbox.close()
"""
    assert peak(program) < ALLOWED


# Output, reports, state.


@pytest.mark.parametrize(
    "piece", [b"\x1b]", b"\x07\x1b]", b"\x1bP\x1b", b"\ra", b"\x08", b"\x1b[", b"\x1b[K\ra", b"\x1b ", b"\xff"]
)
def test_output_becomes_text_in_a_time_that_grows_with_its_length(piece: bytes) -> None:
    began = time.process_time()
    plain_text(b"x" * 400_000 + piece * (600_000 // len(piece)))
    assert time.process_time() - began < 10  # a square would be hours


@given(st.lists(st.sampled_from(["a", "K", "\r", "\x08", "\n", "\x1b", "[", "]", "\x07", "\\", "0", "é"]), max_size=30))
def test_any_output_becomes_text(pieces: list[str]) -> None:
    assert isinstance(plain_text("".join(pieces).encode()), str)


NONCE = "0123456789abcdef"


@given(st.lists(st.one_of(st.binary(max_size=80), st.sampled_from([b"\n", f"{NONCE} end 0".encode(), b" state 9"]))))
def test_whatever_stands_in_the_pipe_of_reports(pieces: list[bytes]) -> None:
    reports, rest = parse_reports(b"".join(pieces))
    assert len(rest) <= 64
    for report in reports:
        assert report.kind in ("end", "syntax", "state", "answer") and 0 <= report.value <= 999


def test_reports_are_taken_to_the_letter() -> None:
    line = f"{NONCE} end 7\n".encode()
    assert parse_reports(line) == ([BashReport(NONCE, "end", 7)], b"")
    assert parse_reports(b"half a line" + line) == ([BashReport(NONCE, "end", 7)], b"")
    for wrong in (b"9" * 5000, b"-1", b"1_0", b" 1", b"1 2", "\u0661".encode()):
        assert parse_reports(f"{NONCE} end ".encode() + wrong + b"\n")[0] == []
    received = b""
    for at in range(0, len(line), 3):  # it may come in pieces
        reports, received = parse_reports(received + line[at : at + 3])
    assert reports == [BashReport(NONCE, "end", 7)]


def test_a_flood_without_line_ends_is_not_kept(any_box: Sandbox) -> None:
    folder = any_box.execute(f"echo {any_box.backend.control_inside}/shell.*").output.strip()
    result = any_box.execute(f"timeout 1 head -c 20M /dev/zero > {folder}/status; echo done")
    assert result.output.endswith("done\n") and result.exit_code == 0
    bash = any_box._parts.shell._bash  # type: ignore[union-attr]
    assert bash is not None and len(bash._received) < 100
    assert any_box.execute("echo fine").output == "fine\n"


def dump(**sections: bytes) -> bytes:
    content = {"cwd": b"/\n", "status": b"0", **sections}
    return b"\0".join([*(content.get(name, b"") for name in SECTIONS), b"end", b""])


@pytest.mark.parametrize(
    "section",
    [
        "variables=b'declare -- x=\"' + b'a' * n + b'\"\\n'",
        "variables=b'declare -a x=(' + b'[0]=\"a\" ' * (n // 8) + b')\\n'",
        "functions=b'__sg_a () \\n{' * (n // 13)",
        "directories=b'\\n' * n",
        "history=b'\\n 1  \\x1ea' * (n // 7)",
        "limits=b'-a) ' + b' ' * n",
    ],
)
def test_a_state_takes_a_time_and_a_memory_that_grow_with_its_length(section: str) -> None:
    program = f"""
import time
from sandbox.test_bounds import dump
from sandboxgym.sandbox.shell.state import ShellState
from sandboxgym.sandbox.shell.bash import MAX_STATE
n = MAX_STATE - 1000
content = dump({section})
# from here
began = time.process_time()
ShellState.parse(content, limits={{}}).script()
assert time.process_time() - began < 20, time.process_time() - began
"""
    assert peak(program) < ALLOWED


@given(st.binary(max_size=300))
def test_any_bytes_are_a_state_or_one_error(data: bytes) -> None:
    for content in (data, dump(variables=data), dump(functions=data), dump(status=data), dump(limits=data)):
        try:
            ShellState.parse(content, limits={})
        except (SnapshotCorrupt, ValueError) as error:
            assert len(str(error)) < 2000


def test_a_state_that_is_too_large_is_an_error_and_the_shell_goes_on(any_box: Sandbox) -> None:
    any_box.execute(f"eval \"f() {{ echo $(head -c {MAX_STATE + MIB} /dev/zero | tr '\\0' a); }}\"")
    with pytest.raises(SandboxError, match=f"at most {MAX_STATE:,} bytes"):
        any_box.shell_state()
    assert any_box.execute("f | wc -c; unset -f f").output == f"{MAX_STATE + MIB + 1}\n"
    assert any_box.shell_state() is not None


@pytest.mark.parametrize("way", ["execute", "run", "interact"])
def test_a_command_without_end_is_refused(any_box: Sandbox, way: str) -> None:
    command = "#" * (LONGEST_COMMAND + 1)
    arguments = {"timeout": 5.0}
    result = getattr(any_box, way)(command, **arguments)
    assert result.syntax_error and result.exit_code == 2 and f"{LONGEST_COMMAND:,}" in result.output
    assert any_box.execute("echo fine").output == "fine\n"


def test_what_is_typed_has_an_end(any_box: Sandbox) -> None:
    assert any_box.interact("cat >/dev/null", timeout=0.2).running
    with pytest.raises(SandboxError, match="typed"):
        any_box.interact("x" * (LONGEST_COMMAND + 1), timeout=0.2)
    any_box.interrupt()


# Processes.


def test_what_a_process_shows_of_itself_is_cut_and_is_text(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, time\n"
        "name = os.path.join(os.fsencode(sys.argv[1]), b'\\xff\\xfe' + b'n' * 200)\n"
        "held = [open(name, 'w') for _ in range(500)]\n"
        "print('ready', flush=True)\n"
        "time.sleep(100)\n"
    )
    arguments = [sys.executable, program, tmp_path, b"\xff\xfe", "y" * 100_000]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        command, held = process_table.command_line(process.pid), process_table.descriptors(process.pid)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]
    assert "\\xff\\xfe" in command and len(command) < 2000
    assert len(held) <= 70 and held[-1].endswith("and more") and "\\xff\\xfe" in held[0]
    assert sum(map(len, held)) < 50_000
    (command + "".join(held)).encode()  # no surrogates


def test_a_process_whose_first_thread_has_ended_is_alive() -> None:
    program = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(100,)).start()\n"
        "print('ready', flush=True)\n"
        "ctypes.CDLL(None).pthread_exit(0)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        for _ in range(6000):
            if Path(f"/proc/{process.pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z":
                break
            time.sleep(0.01)
        assert process_table.state(process.pid) in {"R", "S"}  # of the other thread
        [row] = process_table.table(only=process.pid.__eq__)
        assert row.runs
    finally:
        process.kill()
        process.stdout.close()  # type: ignore[union-attr]
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert process_table.state(process.pid) == "Z"
    process.wait()


def test_an_error_names_a_few_processes_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [process_table.ProcessRow(2**22 + n, 1, 1, "S", "1", "y" * 1000) for n in range(1000)]
    monkeypatch.setattr(process_table, "_PATIENCE", -1.0)
    monkeypatch.setattr(process_table, "table", lambda only: rows)
    with pytest.raises(SandboxError, match="1000 processes") as caught:
        process_table.kill_until_none(lambda: rows, kill=lambda pids: None)
    assert len(str(caught.value)) < 2000


def test_the_bound_of_a_state_fits_what_is_allowed() -> None:
    assert shell_process.MAX_STATE * 16 <= ALLOWED
