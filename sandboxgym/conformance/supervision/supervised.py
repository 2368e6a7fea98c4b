"""Runs of the suite in a watched process, so that no environment can end, hang or flood a run.

1. The child is the same command in a new interpreter. It reports each check over a pipe, and the report is made here
   from these messages. If it ends too early, that becomes the result of the current check, with the traceback that
   Python's `faulthandler` wrote. A new child continues with the next check; after `DEATHS` children the remaining
   checks are skipped.
2. The child is ended if no call is made or returns (`pulse`) for `Limits.call` seconds, in which waiting for a
   processor counts half; if it and its own processes hold more memory than `Limits.memory`; or if it printed more than
   `Limits.output`.
3. Too much memory is INCONCLUSIVE, because many large snapshots are not wrong; the other reasons are a FAIL.
4. The environment's output goes to standard error, its first `SHOWN` bytes; standard input is empty.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import pickle
import re
import resource
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from sandboxgym.conformance.check import Check, Result, Verdict
from sandboxgym.conformance.reports.verdicts import NOT_RUN
from sandboxgym.conformance.runner import Listener, Report
from sandboxgym.conformance.subject import Subject
from sandboxgym.conformance.supervision import janitor, pulse, scratch
from sandboxgym.conformance.supervision.janitor import offspring
from sandboxgym.system import interpreter, proc, run_directories
from sandboxgym.system.proc import started

VARIABLE = "SANDBOXGYM_CONFORMANCE_WATCHED"
"""Environment variable with the child's descriptors; the child removes it."""
DEATHS = 3
"""Number of children that end too early, for one way of making the environment, after which checks are skipped."""
SHOWN = 1 << 18
"""Bytes of output that are passed on."""
TICK = 0.25
MIB = 1 << 20


class Unusable(Exception):
    """Nothing can be certified: the environment cannot be made, or an argument is wrong."""


@dataclass(frozen=True)
class Limits:
    """Resource limits of a run.

    Attributes:
        call: seconds within which some call on the environment must be made or return.
        memory: most bytes that the processes of the run hold together; default: half of the available memory.
        output: most bytes that may be printed.
    """

    call: float = 300.0
    memory: int = field(default_factory=lambda: available() // 2)
    output: int = 1 << 30


@dataclass
class _Way:
    """One way of making the environment, with the results of its run so far."""

    head: Report | None = None
    results: dict[str, Result] = field(default_factory=dict)
    report: Report | None = None
    deaths: int = 0
    extras: bool = True
    """True to shorten scripts and measure the strength; False after that ended a child."""


# In the child.


class Watched:
    """The child's side, which reports each check to the watching process."""

    def __init__(self, descriptors: str) -> None:
        messages, pulses, traces, state = map(int, descriptors.split(","))
        for descriptor in (messages, pulses, traces, state):
            os.set_inheritable(descriptor, False)
        self.pipe = os.fdopen(messages, "wb")
        pulse.share(pulses)
        import faulthandler

        self.traces = os.fdopen(traces, "wb")  # kept open: the handler writes to its descriptor
        faulthandler.enable(self.traces)
        self.done: list[tuple[Report | None, dict[str, Result], bool]]
        with os.fdopen(state, "rb") as file:
            run, self.done = pickle.load(file)
        scratch.use(run)
        _, hard = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard))

    @classmethod
    def here(cls) -> Watched | None:
        """Connection to the watching process, if this process is such a child."""
        found = os.environ.pop(VARIABLE, None)
        return None if found is None else cls(found)

    def tell(self, kind: str, way: int, value: Any) -> None:
        """Send one message."""
        content = pickle.dumps((kind, way, value))
        self.pipe.write(struct.pack("<Q", len(content)) + content)
        self.pipe.flush()
        pulse.beat()

    def run(self, way: int, subject: Subject, run: Callable[..., Report], strength: bool) -> Report:
        """Run the suite as ``run`` does, and report it; checks with known results are not run again."""
        finished, known, extras = self.done[way]
        if finished is not None:
            return finished
        subject.make_env = _beating(subject.make_env)
        if subject.shell is not None:
            subject.shell = _beating(subject.shell)

        def listener(check: Check, result: Result | None) -> None:
            if result is None:
                self.tell("begin", way, check.id)
            else:
                self.tell("result", way, _plain(result))

        report = run(
            subject,
            listener=listener,
            strength=strength and extras,
            shrink=extras,
            known=known,
            on_start=lambda head: self.tell("head", way, head),
            on_checked=lambda: self.tell("begin", way, None),
        )
        plain = replace(report, results=tuple(map(_plain, report.results)))
        self.tell("report", way, plain)
        return plain


def _beating(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # some checks look at its arguments
    def beating(*args: Any, **kwargs: Any) -> Any:
        pulse.beat()
        try:
            return function(*args, **kwargs)
        finally:
            pulse.beat()

    return beating


def _plain(result: Result) -> Result:
    """A result for a pipe: evidence may hold values that only the environment's modules can decode."""
    from sandboxgym.conformance.runner import plain

    return replace(result, evidence=plain(result.evidence))


# In the parent.


def supervise(
    arguments: Sequence[str],
    ways: int,
    checks: Sequence[Check],
    *,
    name: str,
    limits: Limits | None = None,
    listener: Listener | None = None,
) -> Report:
    """Run the conformance command in watched children; return its report.

    Args:
        arguments: arguments of ``python -m sandboxgym.conformance``.
        ways: number of ways in which the environment is made (1, and one for each ``--beside``).
        checks: the checks that will run, in order.
        name: name of the environment, for the report if it cannot be made.
        limits: resource limits of the run.
        listener: called before and after each check.

    Raises:
        Unusable: the environment cannot be made, or an argument is wrong.
    """
    limits = limits or Limits()
    known = [_Way() for _ in range(ways)]
    start = time.perf_counter()
    with _run_directory() as run:
        while not all(way.report for way in known):
            child = _Child(arguments, known, limits, checks, listener, run)
            try:
                with _terminable():
                    finding = child.watch()
            finally:
                child.end()
            if finding is None:
                break
            with contextlib.suppress(OSError):  # what cannot be removed yet is tried again at the end
                scratch.clear(run)
            run_directories.reap()  # its environments' own: sandboxes, browsers
            way = known[child.way]
            way.deaths += 1
            _record(way, child.at, finding, checks, name, listener)
            if way.report is not None:
                way.report = replace(way.report, seconds=time.perf_counter() - start)
    reports = [way.report for way in known if way.report is not None]
    return replace(reports[0], beside=tuple(reports[1:]))


@contextlib.contextmanager
def _run_directory() -> Iterator[Path]:
    """Run directory that records the children's resources; it is removed with this process, even if that is killed."""
    run = run_directories.claim(scratch.KIND).absolute()
    try:
        with janitor.waiting(run):
            yield run
    finally:
        with contextlib.suppress(OSError):  # the next process that claims tries again, for its owner will be gone
            run_directories.give_back(run)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Make SIGTERM an exit with cleanup; otherwise the child would continue, for ever if its environment hangs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass(frozen=True)
class _Finding:
    """Reason why a child ended too early."""

    text: str
    verdict: Verdict
    evidence: dict[str, Any]


def _record(
    way: _Way, at: str | None, finding: _Finding, checks: Sequence[Check], name: str, listener: Listener | None
) -> None:
    """Assign the finding to the check that ran; skip the others if continuing is useless."""

    def note(check: Check, result: Result) -> None:
        way.results[check.id] = result
        if listener is not None:
            listener(check, result)

    left = [check for check in checks if check.id not in way.results]
    begun = way.head is not None
    if begun and not left:
        way.extras = False  # the checks are all there: a new child only makes the report
        if way.deaths < 2 * DEATHS:
            return
    elif left:
        check = next((check for check in left if check.id == at), left[0])
        note(check, Result(check.id, finding.verdict, finding.text, finding.evidence))
        left.remove(check)
        at = check.id
    if begun and way.deaths < DEATHS and left:
        return
    times = f" for the {way.deaths}. time" if way.deaths > 1 else ""
    why = finding.text.partition(";")[0]
    reason = f"{at} had to be ended{times} ({why})" if begun else why
    for check in left:
        note(check, Result(check.id, Verdict.SKIP, NOT_RUN + reason))
    order = [way.results[check.id] for check in checks]
    way.report = replace(way.head or _bare(name), results=tuple(order))


def _bare(name: str) -> Report:
    """Report of an environment without any results."""
    from sandboxgym.conformance.runner import bare

    return bare(name)


class _Child:
    """A child and its messages so far.

    Attributes:
        way: the way of making the environment that it is at.
        at: the check that it is at; None before the first and after the last.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        known: list[_Way],
        limits: Limits,
        checks: Sequence[Check],
        listener: Listener | None,
        run: Path,
    ) -> None:
        self.known, self.limits, self.listener = known, limits, listener
        self.checks = {check.id: check for check in checks}
        self.way, self.at = next(index for index, way in enumerate(known) if way.report is None), None
        self.kin: dict[int, str] = {}
        self.printed, self.tail, self.buffer = 0, b"", b""
        self.traces: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed by end)
        with tempfile.TemporaryFile() as pulses, tempfile.TemporaryFile() as state:
            pulses.truncate(mmap.PAGESIZE)
            self.page = mmap.mmap(pulses.fileno(), mmap.PAGESIZE)
            state.write(pickle.dumps((run, [(way.report, way.results, way.extras) for way in known])))
            state.flush()
            state.seek(0)
            self.messages, told = os.pipe()
            self.output, printed = os.pipe()
            passed = (told, pulses.fileno(), self.traces.fileno(), state.fileno())
            environment = {**interpreter.environment(), VARIABLE: ",".join(map(str, passed))}
            try:
                self.process = subprocess.Popen(
                    interpreter.module_command("sandboxgym.conformance", *arguments),
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=printed,
                    pass_fds=passed,
                )
            finally:
                os.close(told)
                os.close(printed)
        janitor.entrust(run, self.process.pid)
        os.set_blocking(self.messages, False)
        os.set_blocking(self.output, False)

    def watch(self) -> _Finding | None:
        """Follow the child to its end; return why it ended early, or None if it reported everything.

        Raises:
            Unusable: the child reported that nothing can be certified.
        """
        beats, still, last = -1, 0.0, time.monotonic()
        delay = self.delay()
        while True:
            ready, _, _ = select.select([self.messages, self.output], [], [], TICK)
            for descriptor in ready:
                self.read(descriptor)
            now = time.monotonic()
            passed, last = min(now - last, 4 * TICK), now  # a suspended machine is not a hanging environment
            self.look()
            count, waited = pulse.read(self.page), self.delay()
            # Half of the wait for a processor counts, so that a call that never returns ends on a busy machine too.
            still = 0.0 if count != beats else still + passed - min(passed, max(0.0, waited - delay)) / 2
            beats, delay = count, waited
            if self.process.poll() is not None:
                self.drain()
                return self.ended()
            if still > self.limits.call:
                return self.stopped(f"no call returned within {self.limits.call:g} s", Verdict.FAIL)
            if self.printed > self.limits.output:
                return self.stopped(f"more than {self.limits.output // MIB} MiB were printed", Verdict.FAIL)
            if memory([self.process.pid, *self.kin]) > self.limits.memory:
                size = pulse.largest(self.page) // MIB
                text = f"more than {self.limits.memory // MIB} MiB of memory were held"
                text += f", where a snapshot takes {size} MiB" if size else ""
                return self.stopped(text, Verdict.INCONCLUSIVE)

    def read(self, descriptor: int) -> None:
        """Read the available messages and output."""
        try:
            content = os.read(descriptor, 1 << 20)
        except BlockingIOError:
            return
        if descriptor == self.output:
            if content and self.printed < SHOWN:
                sys.stderr.write(content[: SHOWN - self.printed].decode("utf-8", "replace"))
                if self.printed + len(content) >= SHOWN:
                    sys.stderr.write("\n[the environment prints on; no more of it is shown]\n")
                sys.stderr.flush()
            self.printed += len(content)
            self.tail = (self.tail + content)[-2000:]
        else:
            self.buffer += content
            while len(self.buffer) >= 8 and len(self.buffer) >= (size := struct.unpack("<Q", self.buffer[:8])[0] + 8):
                message, self.buffer = self.buffer[8:size], self.buffer[size:]
                self.hear(*pickle.loads(message))
        if not content:
            time.sleep(TICK)  # it has closed its end; its own end is near

    def drain(self) -> None:
        """Read what an ended child has left in the pipes."""
        for descriptor in (self.messages, self.output):
            for _ in range(64):
                if not select.select([descriptor], [], [], 0)[0]:
                    break
                before = self.printed, len(self.buffer), self.at
                self.read(descriptor)
                if before == (self.printed, len(self.buffer), self.at):
                    break

    def hear(self, kind: str, way: int, value: Any) -> None:
        """Record one message."""
        known, self.way = self.known[way], way
        if kind == "unusable":
            raise Unusable(value)
        if kind == "head":
            known.head = known.head or value
        elif kind == "begin":
            self.at = value
            if value is not None and self.listener is not None:
                self.listener(self.checks[value], None)
        elif kind == "result":
            known.results[value.id] = value
            self.at = None if len(known.results) == len(self.checks) else self.at
            if self.listener is not None:
                self.listener(self.checks[value.id], value)
        elif kind == "report":
            known.report, self.at = value, None

    def look(self) -> None:
        """Record the child's processes that live, to end them when it is gone: the id of another may be reused."""
        self.kin = {pid: birth for pid, birth in self.kin.items() if birth and started(pid) == birth}
        for pid in offspring(self.process.pid):
            self.kin.setdefault(pid, started(pid))

    def delay(self) -> float:
        """Seconds that the child's main thread waited for a processor."""
        try:
            return int(Path(f"/proc/{self.process.pid}/schedstat").read_text().split()[1]) * 1e-9
        except (OSError, IndexError, ValueError):
            return 0.0

    def ended(self) -> _Finding | None:
        """Finding for a child that ended by itself."""
        if all(way.report for way in self.known):
            return None
        code = self.process.returncode
        how = f"by {_signal(-code)}" if code < 0 else f"with exit status {code}"
        return self.finding(f"the interpreter was ended {how} in the middle of the run", Verdict.FAIL)

    def stopped(self, text: str, verdict: Verdict) -> _Finding:
        """End the child, with a traceback."""
        self.process.send_signal(signal.SIGABRT)
        self.wait(5)
        self.process.kill()
        self.process.wait()
        return self.finding(text, verdict)

    def finding(self, text: str, verdict: Verdict) -> _Finding:
        """The finding with the known place in the code."""
        self.traces.seek(0)
        trace = self.traces.read(20_000).decode("utf-8", "replace")
        evidence = {"traceback": trace} if trace else {}
        if last := self.tail.decode("utf-8", "replace").strip():
            evidence["last output"] = last[-500:]
        place = _place(trace)
        return _Finding(f"{text}; it was in {place}" if place else text, verdict, evidence)

    def wait(self, seconds: float) -> None:
        """Wait for the child's end and read its output meanwhile, because a full pipe would block it."""
        end = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < end:
            for descriptor in select.select([self.messages, self.output], [], [], TICK)[0]:
                with contextlib.suppress(Unusable):
                    self.read(descriptor)

    def end(self) -> None:
        """End the child and all that it has started, after an interruption too; close everything."""
        if self.process.poll() is None:  # interrupted: a terminal has told it, too
            self.wait(0.5)
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGINT)
                self.wait(10)
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
        if self.process.returncode != 0:
            for pid, birth in self.kin.items():
                if birth and started(pid) == birth:
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
        os.close(self.messages)
        os.close(self.output)
        self.page.close()
        self.traces.close()


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _place(trace: str) -> str:
    """Innermost recorded call of the relevant thread, in the environment's code rather than in Python's library."""
    threads = re.split(r"^(?=Current thread|Thread)", trace, flags=re.MULTILINE)
    chosen = [text for text in threads if "conformance" in text] or threads[1:]
    calls = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', chosen[0]) if chosen else []
    library = os.path.dirname(os.__file__)
    for file, line, function in calls:
        if not file.startswith(("<", library)) or "packages" in file:
            return f"{function} ({os.path.basename(file)}, line {line})"
    return ""


def available() -> int:
    """Free bytes of memory, by the machine and by the control group; a very large number if unknown."""
    found = [1 << 50]
    with contextlib.suppress(OSError, AttributeError):
        told = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        found += [int(told[1]) * 1024] if told else []
    with contextlib.suppress(OSError, ValueError):
        most = int(Path("/sys/fs/cgroup/memory.max").read_text())
        found.append(most - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    return max(MIB, min(found))


def memory(pids: Sequence[int]) -> int:
    """Bytes of memory that processes hold together, without mapped files.

    What forks still share is counted once, as far as the kernel tells; that is asked only where the sum is large.
    """
    held = {pid: _status(pid, "RssAnon", "RssShmem") for pid in pids}
    total = sum(held.values())
    if total < 256 * MIB or len(held) == 1:
        return total
    return sum(_proportional(pid) or size for pid, size in held.items() if size)


def _status(pid: int, *names: str) -> int:
    try:
        return proc.nbytes(f"/proc/{pid}/status", *names)
    except OSError:
        return 0


def _proportional(pid: int) -> int:
    try:
        return proc.nbytes(f"/proc/{pid}/smaps_rollup", "Pss_Anon", "Pss_Shmem")
    except OSError:
        return 0
