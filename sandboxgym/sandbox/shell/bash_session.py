"""A persistent bash on a terminal: each command finds the state that the last one left.

1. A command arrives in a file; only one fixed line is typed. So its text may hold anything that bash takes: several
   lines, here-documents, ``!``. It is parsed as a whole first, and not run if it does not parse.
2. Its exit code arrives through a pipe beside the terminal, and its output lies between two marks that are new each
   time. No output can be mistaken for a prompt, and no prompt for output. What background jobs print between two
   commands is dropped.
3. After the time limit Ctrl-C is sent, then everything that the command started is killed, wherever it went
   (``aftermath.py``). The shell stays, with what the command had changed by then, unless it hangs itself.
4. The shell hands out its whole state after each command (`ShellState`), while nobody waits for it. A shell that ended
   (``exit``, ``exec``, ``set -e``, ``kill -9 $$``) is replaced by one with the state after the last command that was
   completed, and so is one whose user broke what it reports with: it is seen to be back at its prompt, where the kernel
   shows that, rather than waited for until the time limit. `Result.ended` and `Result.replaced` tell. A command that
   had not begun by then runs in the new shell, once.
5. Redefinitions by users (builtins, reserved words, options, descriptors, prompts) are kept, and captured with the
   state; the code that starts and ends a command does not depend on them (``shell.bash``).
6. Nothing here waits for a fixed time.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from sandboxgym.errors import SnapshotCorrupt
from sandboxgym.sandbox.base import (
    LONGEST_COMMAND,
    Backend,
    Process,
    ProcessInfo,
    Result,
    SandboxClosed,
    SandboxError,
    SandboxUnavailable,
)
from sandboxgym.sandbox.process_table import descriptor_target, state
from sandboxgym.sandbox.shell.aftermath import Moment, birth_of, births_of, end_started, kill_started
from sandboxgym.sandbox.shell.bash import ARGV, PARTIAL, BashProcess, Connection, Heard
from sandboxgym.sandbox.shell.state import ShellState
from sandboxgym.sandbox.shell.terminal import Capture, decode, encode, plain_text
from sandboxgym.system import proc

log = logging.getLogger("sandboxgym")

TIMED_OUT = 124
GRACE = 0.5
"""Seconds after Ctrl-C in which a command may end by itself."""
PATIENCE = 3.0
"""Seconds, without those in which it is stopped, in which a shell must come back once its commands are killed."""
STARTING = 30.0
"""Seconds in which a new shell must answer."""
SETTLING = 10.0
"""Seconds in which a shell must have dumped its state after a command, before it is replaced."""

_PATTERN_WINDOW = 1 << 16  # bytes of output that a pattern is looked for in
_ECHOED = re.compile(rb'^\(\(1\)\) >"\$__sg_.*\n', re.MULTILINE)  # with set -v, bash shows the line that ends a command
_BETWEEN = 0.005  # seconds between two looks at which processes there are
_EXITING, _FORKED = 0x4, 0x40  # PF_EXITING and PF_FORKNOEXEC, of the kernel's flags of a process
_ATTEMPTS = 5  # shells that are started one after the other before a command is given up
_FIRST_LOOK, _RAREST_LOOK = 0.05, 1.0  # seconds between two looks at whether a bash that says nothing still can
_PROMPT = 1000  # bytes of a prompt that are known again
_SEEN_IDLE = 3  # looks after which nothing more is expected of a bash that is at its prompt
_SEEN_ROBBED, _ROBBED = 5, 1.0  # looks, and seconds, after which a bash will not get the line that it waits for
_GAP = 64  # chunks between two commands that are read and dropped


@dataclass(frozen=True, slots=True)
class Interaction(Result):
    """Output of a command since the last interaction."""

    running: bool = False
    """True if the command still runs, and can be answered; ``exit_code`` means nothing yet."""


@dataclass(slots=True)
class _Robbed:
    """Looks in a row at which a bash waited for a line that was typed."""

    looks: int = 0
    since: float = 0.0

    def look(self, robbed: bool) -> bool:
        """Count a look; true once it was seen often enough, for long enough."""
        now = time.monotonic()
        if not robbed or not self.looks:
            self.looks, self.since = 0, now
        self.looks += robbed
        return self.looks >= _SEEN_ROBBED and now - self.since >= _ROBBED


@dataclass(slots=True)
class _Command:
    """State of the running command."""

    text: str
    raw: int
    nonce: str
    capture: Capture
    began: float
    """Start, by `time.monotonic`."""
    since: Moment
    """Start, by the clock of process start times."""
    older: Mapping[int, str]
    """Children of the shell before the command, with their start times."""
    exit_code: int | None = None
    syntax_error: bool = False
    replaced: bool = False
    robbed: _Robbed = field(default_factory=_Robbed)
    prompt: bytes = b""
    """Prompt printed by a lost bash when it was asked: it printed one before, too."""


@dataclass(slots=True)
class _Watch:
    """Observation of a bash that is being waited for."""

    at: float = field(default_factory=lambda: time.monotonic() + _FIRST_LOOK)
    """Time of the next look."""
    pause: float = _FIRST_LOOK
    asked: bool = False
    idle: int = 0
    """Number of looks at which it was at its prompt since it was asked."""
    robbed: _Robbed = field(default_factory=_Robbed)


@dataclass(frozen=True, slots=True)
class ShellSession:
    """State of a captured shell beside the bash itself: its running command, and the output received so far."""

    connection: Connection
    number: int
    command: _Command | None
    """Running command; its ``older`` are numbered as inside, without their start times."""
    state: ShellState | None
    dump: bytes
    slot: int | None
    settled: bool


class Shell:
    """A bash in a sandbox.

    Args:
        backend: of the sandbox; live from the first command on.
        env: the environment of a new shell.
        cwd: its directory.
        output: bytes that are kept of one command's output.
        state: its initial state; default: only ``env`` and ``cwd``.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        env: Mapping[str, str],
        cwd: str = "/",
        output: int = 1_000_000,
        state: ShellState | None = None,
    ) -> None:
        self._backend, self._env, self._cwd, self._output = backend, dict(env), cwd, output
        self._number = 0
        self._bash: BashProcess | None = None
        self._command: _Command | None = None
        self._state, self._dump = state, b""
        self._slot: int | None = None  # of the last complete dump of this bash
        self._settled = False  # that dump is of the present
        self._startled = False  # signals were sent to it that it may not have noticed yet
        self._question = ""
        self._replaced = False  # since the last command; the next one tells
        self._failures = 0  # shells since that command which ended, itself included if it ended one

    @classmethod
    def restored(
        cls,
        backend: Backend,
        process: Process,
        session: ShellSession,
        *,
        env: Mapping[str, str],
        cwd: str = "/",
        output: int = 1_000_000,
    ) -> Shell:
        """A copy of a captured shell, whose bash runs already: in the middle of a command, if it was in one.

        Args:
            backend: of the sandbox.
            process: the bash.
            session: of the captured shell.
            env: as for any shell, and so the others.
            cwd: see there.
            output: see there.
        """
        self = cls(backend, env=env, cwd=cwd, output=output, state=session.state)
        self._bash = BashProcess.restored(backend, process, session.connection)
        self._number, self._dump = session.number, session.dump
        self._slot, self._settled = session.slot, session.settled
        self._command = self._copied(session.command)
        return self

    def session(self) -> ShellSession:
        """State of a stopped bash for `restored`; all of its output is read first."""
        bash = self._bash
        assert bash is not None
        while heard := bash.step(0.0):
            self._take(heard)
            if bash.gone:
                break
        command = self._command
        if command is not None:
            older = {number: "" for pid in command.older if (number := number_inside(pid))}
            command = replace(command, capture=copy.deepcopy(command.capture), older=older)
        return ShellSession(bash.connection, self._number, command, self._state, self._dump, self._slot, self._settled)

    def move(self, process: Process, session: ShellSession) -> None:
        """Continue with a copy of the bash, which has taken its place since ``session`` was taken."""
        assert self._bash is not None
        self._bash.move(process)
        self._command = self._copied(session.command)

    def _copied(self, command: _Command | None) -> _Command | None:
        if command is None:
            return None
        older = {pid: birth_of(pid) for pid in _children(self.pid) if number_inside(pid) in command.older}
        return replace(command, capture=copy.deepcopy(command.capture), older=older)

    @property
    def running(self) -> bool:
        """True if an `interact` left a command that has not ended."""
        return self._command is not None

    @property
    def pid(self) -> int | None:
        """Process id of the bash on the host, if it was started and the id can be known."""
        return None if self._bash is None else self._bash.process.pid

    def start(self) -> None:
        """Start the bash, without waiting until it is ready. Idempotent.

        Raises:
            SandboxUnavailable: it cannot be started.
        """
        if self._bash is None:
            self._spawn()

    def execute(self, command: str, *, timeout: float, raw: int = 0) -> Result:
        """Run a command to its end.

        Args:
            command: bash source, in any number of lines.
            timeout: seconds after which everything that it started is killed.
            raw: bytes of its output's beginning that are also kept as they were written.

        Raises:
            SandboxError: a command of `interact` has not ended.
            SandboxClosed: the sandbox is gone.
        """
        if self._command is not None:
            raise SandboxError("a command still runs: continue with interact(), or end it with interrupt()")
        if refusal := _refusal(command):
            return Result(output=refusal, exit_code=2, seconds=0.0, syntax_error=True)
        self._begin(command, raw=raw)
        done = self._wait(time.monotonic() + timeout)
        if not done:
            self._interrupt()
        return self._finish(timed_out=not done)

    def interact(self, text: str, *, timeout: float, until: str | None = None) -> Interaction:
        r"""Start a command, or type to the one that runs; wait until it ends, or says ``until``, or for some time.

        Args:
            text: a command if none runs, else what is typed: end a line with ``\n``; ``\x03`` is Ctrl-C,
                ``\x04`` at the start of a line ends the input.
            timeout: seconds after which it is left waiting. It is not killed.
            until: a regular expression; once the new output matches, it is returned.

        Raises:
            SandboxError: more than `base.LONGEST_COMMAND` characters are typed.
        """
        if self._command is None:
            text = text[: LONGEST_COMMAND + 1].replace("\0", "")
            if refusal := _refusal(text):
                return Interaction(output=refusal, exit_code=2, seconds=0.0, syntax_error=True)
            self._begin(text)
        elif self._bash is not None:
            if refusal := _refusal(text, typed=True):
                raise SandboxError(refusal.strip())
            self._bash.type(encode(text))
        if self._wait(time.monotonic() + timeout, until=re.compile(until) if until else None):
            return self._finish(timed_out=False)
        command = self._running()
        data, elided = command.capture.drain()
        seconds = time.monotonic() - command.began
        return Interaction(output=plain_text(data), exit_code=-1, seconds=seconds, elided=elided, running=True)

    def interrupt(self) -> Interaction:
        """End the command that runs, as a timeout would.

        Raises:
            SandboxError: none runs.
        """
        self._running()
        self._interrupt()
        return self._finish(timed_out=True)

    def state(self) -> ShellState | None:
        """State after the last completed command; None if nothing was started.

        Raises:
            SandboxClosed: the sandbox is gone.
            SandboxError: it cannot be read, because a process inside tampered with it, or it is larger than
                `bash.MAX_STATE` bytes.
        """
        if self._bash is not None and self._command is None:
            self._settle()
            try:
                return self._last_state()
            except SandboxError:
                self._idle().dump_less(os.urandom(8).hex())
                self._settled = False
                self._settle()
        return self._last_state()

    @property
    def known_state(self) -> ShellState | None:
        """The last state that could be read."""
        return self._state

    def rest(self) -> None:
        """Wait until an idle bash has closed the files that it uses itself between two commands, as far as can be seen.

        And until what it started in the background is the program that it was to be.
        """
        if self._bash is None or self._command is not None:
            return
        self._settle()
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if state(self.pid or 0) != "R" and not any(map(_is_starting, _children(self.pid))):
                return
            os.sched_yield()

    def redirected(self) -> tuple[str, ...]:
        """Descriptors 0 to 2 of a bash at rest that do not lead to its terminal, as far as can be seen."""
        found = []
        with contextlib.suppress(OSError):
            terminal = os.readlink(f"/proc/{self.pid}/fd/255")  # where bash keeps it
            for number in range(3):
                try:
                    target = os.readlink(f"/proc/{self.pid}/fd/{number}")
                except FileNotFoundError:
                    target = "closed"
                if target != terminal:
                    found.append(f"{number} -> {descriptor_target(self.pid, number) or 'closed'}")
        return tuple(found)

    def owns(self, info: ProcessInfo) -> bool:
        """True if a process is the bash itself."""
        return info.pid == self.pid if self.pid is not None else info.command == " ".join(ARGV)

    def close(self) -> None:
        """Kill the bash and its descendants. Idempotent."""
        if self._bash is not None:
            self._bash.close()
            self._bash = self._command = self._slot = None

    def _spawn(self) -> BashProcess:
        self._number += 1
        # A state has its own directory, and commands may have removed the one that the first shell started in.
        cwd = self._cwd if self._state is None else "/"
        try:
            self._bash = BashProcess(self._backend, env=self._env, cwd=cwd, state=self._state)
        except SandboxUnavailable:
            if self._number == 1 or cwd == "/":
                raise
            self._bash = BashProcess(self._backend, env=self._env, cwd="/", state=self._state)
        self._slot, self._settled, self._dump = None, False, b""
        self._startled = False
        return self._bash

    def _settle(self) -> None:
        """Wait until the bash is idle and its state complete, or replace it."""
        bash = self._bash or self._spawn()
        deadline = time.monotonic() + (STARTING if self._slot is None else SETTLING)
        output, watch = b"", _Watch()
        while not self._settled and not bash.gone and time.monotonic() < deadline:
            output = (output + self._take(bash.step(min(deadline, watch.at))))[-1000:]
            if self._looks_lost(watch):
                break
        if self._settled:
            return
        if self._slot is None and self._number == 1 and self._state is None:
            status = bash.process.wait(0)
            self.close()
            raise SandboxUnavailable(
                f"no bash answered in the sandbox (exit status {status}): {plain_text(output).strip()!r}"
            )
        bash.process.kill()
        self._replace()

    def _replace(self) -> int:
        """Replace a bash that ended or hangs; returns the exit code of the old one."""
        assert self._bash is not None
        try:
            self._state = self._last_state()
        except SandboxError as error:
            log.warning("a new shell starts with an older state: %s", error)
        self._failures += 1
        if self._failures > 1 and self._state is not None:  # what it carries may be what ends each shell
            log.warning("a new shell starts without functions, aliases, options and traps: those before it ended")
            self._state = self._state.values_only()
        status = self._bash.process.wait(1.0)
        self.close()
        if not self._backend.live:
            self._backend.processes()  # raises what the backend knows of its end
            raise SandboxClosed("the processes of the sandbox were ended from outside")
        self._spawn()
        self._replaced = True
        return 128 + signal.SIGKILL if status is None else status

    def _last_state(self) -> ShellState | None:
        if self._bash is not None and self._slot is not None:
            try:
                dump = self._bash.dump(self._slot)
                if dump != self._dump:
                    self._dump, self._state = dump, self._bash.parse(dump)
            except (OSError, ValueError, SnapshotCorrupt) as error:
                raise SandboxError(f"the state of the shell cannot be read: {error}") from error
        return self._state

    def _idle(self) -> BashProcess:
        """The bash, started and idle; output since the last command is dropped."""
        self.start()
        for _ in range(_ATTEMPTS):
            self._settle()
            if not self._settled:  # it was replaced, and the new one may be killed while it starts
                continue
            assert self._bash is not None
            for _ in range(_GAP):
                if self._bash.gone or not self._take(self._bash.step(0.0)):
                    break
            if self._startled:
                self._calm(self._bash)
            if not self._bash.gone:
                return self._bash
            self._replace()
        raise SandboxError(f"each of the last {_ATTEMPTS} shells in the sandbox ended before it could be used")

    def _calm(self, bash: BashProcess) -> None:
        """Make the bash answer a line that does nothing, repeatedly if needed.

        A Ctrl-C that it notices at its prompt makes it throw away a line, and that must not be the next command.
        """
        self._question = os.urandom(8).hex()
        deadline, pause = time.monotonic() + SETTLING, 0.1
        while self._question and not bash.gone and time.monotonic() < deadline:
            bash.ask(self._question)
            until = time.monotonic() + pause
            while self._question and not bash.gone and time.monotonic() < until:
                self._take(bash.step(until))
            pause *= 2
        self._startled = False
        if self._question:
            bash.process.kill()
            bash.gone = True

    def _begin(self, command: str, *, raw: int = 0) -> None:
        bash = self._idle()
        nonce = os.urandom(8).hex()
        bash.command(command, nonce)
        mark = b"\x1e" + nonce.encode()
        self._settled = False
        self._command = _Command(
            text=command,
            raw=raw,
            nonce=nonce,
            capture=Capture(self._output, begin=mark + b"{\x1e", end=mark + b"}\x1e", raw=raw),
            began=time.monotonic(),
            since=Moment.now(),
            older=births_of(_children(self.pid)),
            replaced=self._replaced,
        )
        self._replaced = False

    def _wait(self, deadline: float, *, until: re.Pattern[str] | None = None, again: bool = True) -> bool:
        """True if the command, or the shell, ended before the deadline or the pattern.

        With ``again``, a command that could not begin is given to another shell.
        """
        command, bash = self._running(), self._bash
        assert bash is not None
        seen, watch = b"", _Watch()
        while not (command.capture.complete and command.exit_code is not None):
            if bash.gone:
                begun = command.capture.begun or command.exit_code is not None
                if begun or not again or self._failures >= _ATTEMPTS:
                    break
                # What an earlier command left ended the shell: this one did not begin, so it is given to a new shell.
                self._command = None
                self._replace()
                self._begin(command.text, raw=command.raw)
                deadline += self._running().began - command.began  # it has its whole time there
                command, bash, watch = self._running(), self._bash, _Watch()
                assert bash is not None
                continue
            chunk = self._take(bash.step(min(deadline, watch.at)))
            if watch.asked:
                command.prompt += chunk[:_PROMPT]
            if until:
                seen = (seen + chunk)[-_PATTERN_WINDOW:]
                if until.search(plain_text(seen)):
                    return False
            if time.monotonic() >= deadline:
                return False
            if self._looks_lost(watch):
                if command.exit_code is None or not command.capture.begun:  # or its terminal takes nothing from it
                    bash.process.kill()
                    bash.gone = True
                    continue
                break
        return True

    def _looks_lost(self, watch: _Watch) -> bool:
        """True if the bash is at its prompt and will not send the report that is due: its user overwrote the reporting.

        One that is stopped is woken. Seen at its prompt, it is asked, once; then it is waited for until it is there
        again, for some time, since what it wrote on the terminal takes its way. A line that it waits for although it
        was typed has been read by another process, which will read the next one, too.
        """
        bash = self._bash
        assert bash is not None
        if time.monotonic() < watch.at:
            return False
        watch.pause = min(watch.pause * 2, _RAREST_LOOK)
        bash.wake()
        if bash.at_prompt():
            watch.pause = _FIRST_LOOK
            if watch.asked:
                watch.idle += 1
            else:
                watch.asked = True
                bash.resume()
        robbed = (watch if self._command is None else self._command).robbed.look(bash.robbed())
        watch.at = time.monotonic() + watch.pause
        return watch.idle >= _SEEN_IDLE or robbed

    def _take(self, heard: Heard | None) -> bytes:
        if heard is None:
            return b""
        command = self._command
        for nonce, kind, value in heard.reports:
            if kind == "answer" and nonce == self._question:
                self._question = ""
            elif kind == "state" and value in (0, 1):
                self._slot, self._settled = value, command is None or nonce == command.nonce
                if nonce == PARTIAL and not self._replaced:
                    log.warning("a new shell could not take all of the state of the one before")
                    self._replaced = True
            elif command is not None and nonce == command.nonce:
                if kind == "end":
                    command.exit_code = value
                elif kind == "syntax":
                    command.syntax_error = True
        if command is not None and heard.output:
            command.capture.feed(heard.output)
        return heard.output

    def _finish(self, *, timed_out: bool) -> Interaction:
        command, bash = self._running(), self._bash
        assert bash is not None
        data, elided = command.capture.drain()
        if not command.capture.complete and command.prompt:
            data = data.removesuffix(command.prompt).removesuffix(command.prompt)
        output, code = plain_text(_ECHOED.sub(b"", data)), command.exit_code
        if command.syntax_error:
            with contextlib.suppress(OSError):
                output = decode(bash.syntax_error(self._output))
        bash.forget_typed()
        self._command = None
        seconds = time.monotonic() - command.began
        ended = bash.gone
        if command.capture.begun:
            self._failures = 0
        if ended:
            status = self._replace()
            self._replaced = False  # `ended` tells it
            code = status if code is None else code
        assert code is not None
        return Interaction(
            output=output,
            exit_code=TIMED_OUT if timed_out else code,
            seconds=seconds,
            timed_out=timed_out,
            elided=elided,
            syntax_error=command.syntax_error,
            ended=ended,
            replaced=command.replaced,
            raw=_ECHOED.sub(b"", bytes(command.capture.beginning)),
        )

    def _running(self) -> _Command:
        if self._command is None:
            raise SandboxError("no command runs")
        return self._command

    def _interrupt(self) -> None:
        """End the command; the bash too, if the command survives. Nothing of the command runs after this."""
        command, bash = self._running(), self._bash
        assert bash is not None
        self._startled = True
        bash.forget_typed()
        bash.abort()
        bash.interrupt()
        done = self._wait(time.monotonic() + GRACE, again=False)
        given, pause = 0.0, _BETWEEN
        while not done and given < PATIENCE:
            if not bash.at_prompt():  # there nothing is left to be dropped, and bash may end of the signal (shell.bash)
                bash.abort()
            began = time.monotonic()
            with contextlib.suppress(SandboxClosed):  # which waiting will tell
                kill_started(self._backend, command.since, older=command.older, shell=self.pid)
            bash.interrupt()
            killed = time.monotonic()
            pause = max(pause, killed - began)  # the bash was stopped as well: it gets as long to come back
            done = self._wait(killed + pause, again=False)
            given += time.monotonic() - killed
            pause *= 1.5
        if not done:
            bash.process.kill()
            self._wait(time.monotonic() + PATIENCE, again=False)
            bash.gone = True
        if self._backend.live:
            end_started(self._backend, command.since, older=command.older, shell=self.pid)


def _refusal(text: str, *, typed: bool = False) -> str:
    """Reason why a text cannot be given to bash; empty if it can."""
    if len(text) > LONGEST_COMMAND:
        what = "what is typed" if typed else "a command"
        return f"bash: {what} has at most {LONGEST_COMMAND:,} characters, found {len(text):,}\n"
    if "\0" in text and not typed:
        return "bash: a command cannot hold a null byte\n"
    return ""


def number_inside(pid: int) -> int | None:
    """Process id of a process in its innermost namespace; None if it is gone."""
    match = re.search(r"^NSpid:.*\s(\d+)$", _status(pid), re.MULTILINE)
    return int(match[1]) if match else None


def _children(pid: int | None) -> frozenset[int]:
    """Children of a process, where the host shows them."""
    try:
        return frozenset(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_bytes().split()))
    except OSError:
        return frozenset()


def _is_starting(pid: int) -> bool:
    """True if a process was just forked, and is, or may be, about to execute a program."""
    try:
        found = proc.stat(pid)
        if found.state not in "RD" or found.ticks:  # it sleeps, or has run for some time
            return False
        return bool(found.flags & _FORKED) or not proc.head(f"/proc/{pid}/cmdline", 1)  # replaced, it has no arguments
    except OSError:
        return False


def is_dying(pid: int) -> bool:
    """True if a process was killed and is exiting."""
    with contextlib.suppress(OSError):
        if proc.stat(pid).flags & _EXITING:
            return True
    pending = [int(mask, 16) for mask in re.findall(r"^(?:Shd|Sig)Pnd:\s*(\w+)$", _status(pid), re.MULTILINE)]
    return any(mask & 1 << (signal.SIGKILL - 1) for mask in pending)


def _status(pid: int | None) -> str:
    try:
        return proc.head(f"/proc/{pid}/status", 1 << 16).decode(errors="replace")
    except OSError:
        return ""
