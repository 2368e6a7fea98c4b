"""One bash on a terminal, and its two channels: the terminal for output, a pipe beside it for reports.

shell.bash, which is sourced first, defines the reports: ``end`` with an exit code, ``syntax``, and ``state`` with the
number of the file that holds the whole state; `BashProcess.ask` adds ``answer``.

Processes inside may write to the pipe and to the files too. So a report must match exactly, other lines are dropped,
however long they are, and no file is read beyond a bound.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import importlib.resources
import os
import re
import select
import shlex
import signal
import stat
import termios
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sandboxgym.sandbox import process_table
from sandboxgym.sandbox.base import Backend, Process, SandboxClosed, SandboxUnavailable
from sandboxgym.sandbox.files.reading import FLAGS, beginning, check_regular, regular_file
from sandboxgym.sandbox.shell.state import Parser, ShellState, parse_limits
from sandboxgym.sandbox.shell.terminal import encode
from sandboxgym.system import proc

if TYPE_CHECKING:
    from pexpect.fdpexpect import fdspawn

ARGV = ("bash", "--norc", "--noprofile", "--noediting", "-i")
READY, PARTIAL = "ready", "partial"
"""The nonces of the reports of a bash that has just started, with all of its state or with what comes before a line
that bash gave up at."""
MAX_STATE = 4 * 2**20
"""Bytes of a shell's whole state above which it is not read: as a script, it may take twenty times as much."""

# One group, sourced in POSIX mode: all of it is parsed before any of the command is. See shell.bash.
_GO = b"""{
{ \\__sg_look; __sg_text='%s'; \\__sg_prepare %s; } >/dev/null 2>&1 || ((1))
\\eval "$__sg_code"
{ \\__sg_resume "$?"; "${__sg_then[@]}"; } >/dev/null 2>&1
}
"""
_RESUME = b'\\__sg_unfinished;"${__sg_then[@]}"\n'

_TIOCSIG = 0x40045436 if os.uname().sysname == "Linux" else 0x2000745F
_CHUNK = 1 << 16
_MAX_LIMITS = 1 << 16  # bytes that ``ulimit -Sa`` prints
_REPORT = re.compile(
    rb"([0-9a-f]{16}|%b|%b) (end|syntax|state|answer) ([0-9]{1,3})\Z" % (READY.encode(), PARTIAL.encode())
)
_LONGEST_REPORT = 64
_LINE = 256  # typed at once: less than a terminal takes without anybody reading
_READS_LINE = re.compile(rb"[0-9]+ 0x0 0x[0-9a-f]+ 0x400 ")  # bash reads lines in these pieces, `read` in others
_LEARNING = 0.05  # seconds in which an idle bash must be seen to wait for a line
_BUSY, _TURN = 2.0, 0.002  # the same for one that wants to run, and seconds between two looks at it
_GLANCE = 0.1  # seconds between two looks at a process that nobody tells of


class BashReport(NamedTuple):
    """A report of the bash beside the terminal."""

    nonce: str
    kind: str
    value: int


class Heard(NamedTuple):
    """Output and reports of the bash received at one time."""

    output: bytes
    reports: list[BashReport]


@dataclass(frozen=True, slots=True)
class Connection:
    """Facts about a captured bash needed to continue with a copy of it."""

    name: str
    """Name of its directory below the control directory."""
    received: bytes
    limits: Mapping[str, bytes] | None
    modes: list[Any] | None
    typed: bytes


class BashProcess:
    """A bash in a live sandbox; it was told to start, and reports the nonce `READY` when it has.

    Args:
        backend: of the sandbox.
        env: its environment.
        cwd: its directory.
        state: its initial state, if not only ``env`` and ``cwd``.

    Raises:
        SandboxUnavailable: it cannot be started.
    """

    def __init__(self, backend: Backend, *, env: Mapping[str, str], cwd: str, state: ShellState | None) -> None:
        folder = backend.shell_directory()
        self._open(backend, folder, make=True)
        inside = f"{backend.control_inside}/{folder.name}"
        try:
            self._write("init", _init(inside, state))
            process = backend.spawn(ARGV, env=env, cwd=cwd, terminal=True)
        except BaseException as error:
            self._remove()
            if isinstance(error, OSError):
                raise SandboxUnavailable(f"bash could not be started in the sandbox: {error}") from error
            raise
        self._attach(process)
        assert process.terminal is not None
        self._modes = _modes(process.terminal)
        self._received = b""
        self._limits: Mapping[str, bytes] | None = None
        # What the state holds may end the first line; the second does nothing if all of it was read.
        self._typed = f". {shlex.quote(inside + '/init')} >/dev/null 2>&1\n".encode() + _RESUME

    @classmethod
    def restored(cls, backend: Backend, process: Process, connection: Connection) -> BashProcess:
        """A copy of a captured bash, which runs already.

        Args:
            backend: of the sandbox; its control directory holds the files of the captured one.
            process: of the copy, with its terminal.
            connection: of the captured one.
        """
        self = cls.__new__(cls)
        self._open(backend, backend.control / connection.name, make=False)
        self._attach(process)
        self._modes, self._received, self._limits = connection.modes, connection.received, connection.limits
        self._typed = connection.typed
        return self

    @property
    def connection(self) -> Connection:
        """Facts about this bash for `restored`."""
        return Connection(self._name, self._received, self._limits, self._modes, self._typed)

    def move(self, process: Process) -> None:
        """Continue with a copy of this bash, which has taken its place; the old one is forgotten, not killed."""
        self.process.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
        self._remove()
        self._open(self._backend, self._backend.control / self._name, make=False)
        self._attach(process)

    def _open(self, backend: Backend, folder: Path, *, make: bool) -> None:
        self._backend = backend
        self._name = folder.name
        self._parser: Parser | None = None
        # Those inside may change what lies here: nothing is found by its path again, and no link is followed.
        self._place = os.open(folder, os.O_DIRECTORY | os.O_NOFOLLOW)
        if make:
            os.mkfifo("status", dir_fd=self._place)
        # Opened for writing too, so that it never ends.
        self._status = os.open("status", os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=self._place)
        os.fchmod(self._status, 0o666)
        inside = f"{backend.control_inside}/{self._name}"
        go = shlex.quote(f"{inside}/go")
        self._reports = shlex.quote(f"{inside}/status").encode()
        self._line = f"\\__sg_enter||((1));\\. {go};".encode() + _RESUME

    def _attach(self, process: Process) -> None:
        self.process = process
        assert process.terminal is not None
        self._terminal, self._end_of_file = _expect(process.terminal)
        self._pidfd = open_pidfd(process.pid)
        self._poll = select.poll()
        for descriptor in (process.terminal, self._status, self._pidfd):
            if descriptor is not None:
                self._poll.register(descriptor, select.POLLIN)
        self._prompt: bytes | None = None  # the system call in which it waits for a line, once that was seen
        self._goal: int | None = None  # bytes that it has read in all once it has read what was typed
        self.gone = False
        """True if the bash has ended, and all its output was read."""

    def command(self, text: str, nonce: str) -> None:
        """Make an idle bash run a command."""
        quoted = encode(text).replace(b"'", rb"'\''")
        content = _GO % (quoted, nonce.encode())
        try:
            self._write("go", content)
        except OSError:  # somebody inside took its place
            self.process.kill()
            self.gone = True
        if self._modes is not None:  # a program may have left its own
            with contextlib.suppress(termios.error):  # the bash is gone, which reading will tell
                termios.tcsetattr(self._terminal.child_fd, termios.TCSANOW, self._modes)
        self._learn_prompt()
        self._type_line(self._line)

    def resume(self) -> None:
        """Make a bash at its prompt send the report that is due; no effect if none is."""
        self._type_line(_RESUME)

    def dump_less(self, nonce: str) -> None:
        """Make a bash at its prompt dump its state again, without the variables that are too large."""
        self._type_line(b"__sg_less=1 __sg_nonce=%s;%s" % (nonce.encode(), _RESUME))

    def at_prompt(self) -> bool:
        """True if the bash is seen to wait for its next line. False where the kernel does not show that.

        The buffer tells its prompt from the builtin ``read`` and from the programs that a command starts.
        """
        if self._prompt is None or self._goal is None or self._typed or self._system_call() != self._prompt:
            return False
        read = self._bytes_read()
        return read is not None and read >= self._goal

    def robbed(self) -> bool:
        """True if the bash waits for a line that was typed already. False where the kernel does not show that.

        It sleeps, which it does not while there is something to read for it.
        """
        if self._prompt is None or self._goal is None or self._typed or self._system_call() != self._prompt:
            return False
        read = self._bytes_read()
        if read is None or read >= self._goal or process_table.state(self.process.pid or 0) != "S":
            return False
        with contextlib.suppress(OSError):
            return b"freez" not in proc.head(f"/proc/{self.process.pid}/wchan", 64)  # nor one that a group froze
        return True

    def wake(self) -> None:
        """Continue the bash if a signal stopped it: it has no parent that would."""
        if self.process.pid is not None and process_table.state(self.process.pid) == "T":
            with contextlib.suppress(OSError):  # it is gone, or it is another user's
                os.kill(self.process.pid, signal.SIGCONT)

    def _type_line(self, line: bytes) -> None:
        read = None if self._prompt is None else self._bytes_read()
        self._goal = None if read is None else read + len(line)
        self._typed = line

    def _learn_prompt(self) -> None:
        began = time.monotonic()
        while self._prompt is None and (call := self._system_call()) is not None:
            waited = time.monotonic() - began
            if _READS_LINE.fullmatch(call):
                self._prompt = call
            elif waited < _LEARNING:
                os.sched_yield()
            elif waited < _BUSY and process_table.state(self.process.pid or 0) in ("R", "D"):
                time.sleep(_TURN)  # others have the processor: it will come to its prompt
            else:
                break

    def _system_call(self) -> bytes | None:
        """System call that the bash is in, with the first arguments; empty in none, None if that cannot be seen."""
        try:
            words = proc.head(f"/proc/{self.process.pid}/syscall", 256).split()
        except OSError:
            return None
        return b"%s %s %s %s " % tuple(words[:4]) if len(words) > 4 else b""

    def _bytes_read(self) -> int | None:
        pid = self.process.pid  # of the thread: what its children have read does not count
        try:
            return int(proc.head(f"/proc/{pid}/task/{pid}/io", 256).split()[1])
        except (OSError, IndexError, ValueError):
            return None

    def ask(self, nonce: str) -> None:
        """Make a bash at its prompt report ``answer``, and change nothing."""
        self._typed += b"{ \\builtin printf '%s answer 0\\n' >%s;} 2>/dev/null\n" % (nonce.encode(), self._reports)

    def type(self, data: bytes) -> None:
        """Type to the program that reads the terminal; `step` sends the text."""
        self._typed += data

    def forget_typed(self) -> None:
        """Discard typed text that was not read yet."""
        self._typed = b""

    def step(self, deadline: float) -> Heard | None:
        """Wait for output and reports; None if none came before the deadline (by `time.monotonic`)."""
        terminal = self._terminal.child_fd
        if self._typed:
            self._poll.modify(terminal, select.POLLIN | select.POLLOUT)
        left = max(deadline - time.monotonic(), 0.0)
        ready = dict(self._poll.poll(min(left, _GLANCE if self._pidfd is None else left) * 1000))
        reports = self._receive() if self._status in ready else []
        output = b""
        events = ready.get(terminal, 0)
        if events & select.POLLOUT:
            with contextlib.suppress(OSError):  # it is gone, which reading will tell
                self._typed = self._typed[self._terminal.send(self._typed[:_LINE]) :]
            if not self._typed:
                self._poll.modify(terminal, select.POLLIN)
        if events & ~select.POLLOUT:
            try:
                output = self._terminal.read_nonblocking(_CHUNK, 0)
            except (self._end_of_file, OSError):
                self.gone = True
        # A terminal does not end with the bash as long as a background process holds it.
        elif self._pidfd in ready or (not ready and self._pidfd is None and self.process.wait(0) is not None):
            self.gone = True
        if self.gone:
            reports += self._receive()
        return Heard(output, reports) if ready or self.gone else None

    def interrupt(self) -> None:
        """Send SIGINT without the Ctrl-C key, at which the terminal would drop the output in transit."""
        terminal = self._terminal.child_fd
        try:
            fcntl.ioctl(terminal, _TIOCSIG, signal.SIGINT)
        except OSError as error:
            if error.errno in (errno.ENOTTY, errno.EINVAL):  # a container's socket
                os.write(terminal, b"\x03")

    def abort(self) -> None:
        """Make the bash drop the rest of its command, as soon as the program that it waits for has ended."""
        if self.process.pid is not None and hasattr(signal, "SIGRTMAX"):
            with contextlib.suppress(OSError):  # it is gone, or it is another user's
                os.kill(self.process.pid, signal.SIGRTMAX)

    def dump(self, slot: int) -> bytes:
        """Content of a state file that was reported complete."""
        return self._read(f"state.{slot}", MAX_STATE)

    def syntax_error(self, nbytes: int) -> bytes:
        """Bash's message about a command that does not parse, its first bytes."""
        with self._opened("syntax") as descriptor:
            check_regular(descriptor, "syntax")
            return beginning(descriptor, nbytes)

    def parse(self, dump: bytes) -> ShellState:
        """Parse the state in a dump."""
        if self._limits is None:
            self._limits = parse_limits(self._read("limits", _MAX_LIMITS))
        if self._parser is None:
            self._parser = Parser(self._limits)
        return self._parser.parse(dump)

    def close(self) -> None:
        """Kill the bash and its descendants. Once."""
        with contextlib.suppress(SandboxClosed):  # all was killed with the sandbox
            self.process.kill()
        self.process.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
        self._remove()

    def _remove(self) -> None:
        os.close(self._status)
        os.close(self._place)

    def _write(self, name: str, content: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(name, flags, 0o644, dir_fd=self._place), "wb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(f"{name} is no longer a file")
            file.write(content)
            file.truncate()  # not emptied first, which can take a file system a millisecond and more

    def _read(self, name: str, limit: int) -> bytes:
        with self._opened(name) as descriptor:
            return regular_file(descriptor, name, limit=limit)

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        descriptor = os.open(name, FLAGS | os.O_NOFOLLOW, dir_fd=self._place)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _receive(self) -> list[BashReport]:
        with contextlib.suppress(BlockingIOError):
            self._received += os.read(self._status, _CHUNK)
        reports, self._received = parse_reports(self._received)
        return reports


def parse_reports(received: bytes) -> tuple[list[BashReport], bytes]:
    """The complete reports in received bytes, and the beginning of another one, as far as it can be one.

    Half a line that somebody else wrote does not spoil the report after it.
    """
    *lines, rest = received.split(b"\n")
    found = (_REPORT.search(line[-_LONGEST_REPORT:]) for line in lines)
    reports = [BashReport(match[1].decode(), match[2].decode(), int(match[3])) for match in found if match]
    return reports, rest[-_LONGEST_REPORT:]


def open_pidfd(pid: int | None) -> int | None:
    """A descriptor that becomes readable when a process ends; None where pidfds do not exist."""
    if pid is None or not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


@functools.cache
def _source() -> bytes:
    """shell.bash without its comments, which every new bash would read byte by byte."""
    source = importlib.resources.files("sandboxgym.sandbox.shell").joinpath("shell.bash").read_bytes()
    return b"\n".join(line for line in source.split(b"\n") if not line.lstrip().startswith(b"#"))


def _init(directory: str, state: ShellState | None) -> bytes:
    place = shlex.quote(directory).encode()
    return b"\n".join(
        [
            _source().replace(b"@DIR@", place),
            b"ulimit -Sa >%s/limits" % place,
            b"__sg_nonce=" + PARTIAL.encode(),
            state.script() if state else b"",
            b"__sg_nonce=" + READY.encode(),
            _RESUME,
        ]
    )


def _expect(terminal: int) -> tuple[fdspawn, type[Exception]]:
    try:
        from pexpect import EOF
        from pexpect.fdpexpect import fdspawn
    except ImportError as error:
        raise SandboxUnavailable("the shell needs pexpect: pip install 'sandboxgym[sandbox]'") from error
    spawned = fdspawn(terminal, timeout=None, use_poll=True)
    spawned.delaybeforesend = None
    return spawned, EOF


def _modes(terminal: int) -> list[Any] | None:
    """Terminal modes for each command; None where this side has no terminal (a container's socket)."""
    try:
        modes = termios.tcgetattr(terminal)
    except termios.error:
        return None
    modes[1] &= ~termios.OPOST  # else the kernel converts each line end: half a minute for 100 MB of short lines
    return modes
