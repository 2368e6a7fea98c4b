"""Environments in other threads and processes, shared by `SnapshotVectorEnv`, `RemoteEnv` and the pools.

1. A worker hosts one or more environments, each in a numbered slot, and executes one call after the other.
2. A worker process is a fresh interpreter, never a fork of this one: that is safe with threads, locks and PyTorch in
   the owner, needs no ``if __name__ == "__main__"`` in its script and does not import that script again. It imports
   from the owner's import path, and never from the working directory where the owner would not (`interpreter`).
3. An exception in an environment comes back with its own type and the remote traceback as its ``__cause__``; the worker
   continues. A death or a timeout is a typed error; the next `Worker.post` starts a new worker.
4. No worker process outlives its owner, whatever ended it: a worker watches its pipe and its parent. (Linux'
   ``PR_SET_PDEATHSIG`` is not used: it fires when the *thread* that started the worker ends, and it leaves an
   environment no chance to end its own processes.)
5. Snapshots cross as their durable bytes, once: a worker keeps the most recent ones that it took or received, by id.

The owner and its workers trust each other (calls are pickled); nothing here listens on a network.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any, Literal

import cloudpickle  # type: ignore[import-untyped]  # a requirement of Gymnasium

from sandboxgym.core import Snapshot
from sandboxgym.system import interpreter
from sandboxgym.workers.env_host import (
    Call,
    CallOutcome,
    CallTimedOut,
    Host,
    NotKept,
    RemoteTraceback,
    Shipped,
    WorkerDied,
    remember,
    snapshot_key,
)
from sandboxgym.workers.kept import Keeping, Kept, KeptSnapshot, SnapKey
from sandboxgym.workers.process import GRACE, Answer, dumps
from sandboxgym.workers.store import Lease, SnapshotStore

Mode = Literal["sync", "thread", "process", "ray"]

_CHILD = "sandboxgym.workers.process"
_FAREWELL = 2.0
"""Seconds that a worker has to close its environments where the interpreter is waiting to exit."""


class Worker(ABC):
    """A worker that executes calls in the order posted. One caller at a time: hold ``lock`` where there may be several.

    Attributes:
        generation: counts the starts; an environment made in an earlier generation is gone.
        lock: for callers that share the worker.
    """

    ships = False
    """True if snapshots cross as bytes."""

    def __init__(self, *, keep: int = 64) -> None:
        self.generation = 0
        self.lock = threading.RLock()
        self.bytes_shipped = 0
        self.snapshots_shipped = 0
        self.keeping: Keeping | None = None
        """Settings by which the worker keeps its snapshots; None: they come here as bytes."""
        self.dropped: deque[SnapKey] = deque()
        """Snapshots kept in the worker that nobody here needs any more."""
        self.told: Callable[[BaseException], object] = lambda error: None
        """Is told of each exception that a call raised in the worker."""
        self._keep = keep
        self._held: OrderedDict[SnapKey, None] = OrderedDict()
        self._since = 0.0
        self._pending = 0
        self._opened: tuple[SnapshotStore, Lease] | None = None

    def start(self) -> None:
        """Start the worker, without waiting until it is ready. No effect on one that runs."""
        if not self.alive:
            self.generation += 1
            self._held.clear()
            self.dropped.clear()
            self._pending = 0
            self._start()

    def post(self, calls: Sequence[Call]) -> None:
        """Send calls; `take` gives one `CallOutcome` for each, in order. Starts the worker if it does not run."""
        self.start()
        self._since = time.monotonic()
        self._pending += len(calls)
        self._post(calls)

    def take(self, timeout: float | None = None) -> CallOutcome:
        """The next outcome.

        Args:
            timeout: seconds that this call may take in the worker.

        Raises:
            WorkerDied: the worker died, and all its environments are lost.
            CallTimedOut: the call took too long, so the worker was ended and its environments are lost.
        """
        remaining = None if timeout is None else max(0.0, self._since + timeout - time.monotonic())
        try:
            outcome = self._take(remaining)
        except TimeoutError:
            self.kill()
            raise CallTimedOut(f"the environment took longer than {timeout:g} s; its worker was ended") from None
        if self._pending > 1:
            self._since = time.monotonic()
        self._pending -= 1
        if outcome.error is not None:
            self.told(outcome.error)
        return outcome

    def settle(self) -> None:
        """End the worker after an interruption if outcomes are due: they would be taken for those of later calls."""
        if self._pending and self.alive:
            self.kill()
        self._pending = 0

    def call(self, slot: int, method: str, *args: Any, timeout: float | None = None) -> Any:
        """Execute one call: return its value, or raise its exception."""
        with self.lock:
            try:
                self.post([Call(slot, method, args)])
                return self.take(timeout).get()
            finally:
                self.settle()

    def ship(self, snap: Any) -> Shipped:
        """A snapshot as an argument of `restore` or `run`: only its key if the worker keeps it.

        Raises:
            SnapshotReleased: it was released.
        """
        key = snapshot_key(snap)
        if key is None or not self.ships:
            return Shipped(key, handle=snap)
        if isinstance(snap, KeptSnapshot) and self.keeping is not None and key == snap.kept.key and not snap.released:
            if not snap.kept.at(self):
                snap.kept.prepare()
            return Shipped(key, stored=True)
        if snap.released or key not in self._held or not self.alive:
            data = snap.to_bytes()
            self.start()  # before it is noted: a start forgets what the worker before it held
            self.bytes_shipped += len(data)
            self.snapshots_shipped += 1
        else:
            data = None
        remember(self._held, key, None, self._keep)
        return Shipped(key, data=data)

    def receive(self, shipped: Shipped) -> Any:
        """The snapshot that a call of `Host.snapshot` returned."""
        if shipped.facts is not None:
            assert shipped.key is not None and self.keeping is not None
            return KeptSnapshot(Kept(self, shipped.key, *self._places()), shipped.facts)
        if shipped.data is None:
            return shipped.handle
        assert shipped.key is not None
        remember(self._held, shipped.key, None, self._keep)
        return Snapshot.from_bytes(shipped.data)

    def take_dropped(self) -> list[SnapKey]:
        """Snapshots that the worker is to be told to drop, which is done with this."""
        found: list[SnapKey] = []
        while self.dropped:  # threads only append to it, and who takes from it holds the worker's lock
            found.append(self.dropped.popleft())
        return found

    def prepare(self, snap: Any, timeout: float | None = None) -> None:
        """See to it that a snapshot which another worker keeps can be read here; holding no worker's lock.

        Args:
            snap: of any kind.
            timeout: seconds that the other worker has for writing it to the store.

        Raises:
            SnapshotMissing: that worker is gone, and the store has nothing of it.
        """
        if isinstance(snap, KeptSnapshot) and not snap.released and not snap.kept.at(self):
            snap.kept.prepare(timeout)

    def _places(self) -> tuple[SnapshotStore, Lease]:
        assert self.keeping is not None
        if self._opened is None:
            self._opened = self.keeping.opened()
        return self._opened

    @property
    def pid(self) -> int | None:
        """Process id of a worker process that runs."""
        return None

    def holds(self, key: SnapKey | None) -> bool:
        """True if the worker keeps the snapshot."""
        return key in self._held

    def restore(
        self, slot: int, snap: Any, seed: int | None, *, streams: bool = False, timeout: float | None = None
    ) -> Any:
        """Call `Host.restore`, again with the bytes if the worker turns out not to keep them."""
        with self.lock:
            try:
                return self.call(slot, "restore", self.ship(snap), seed, streams, timeout=timeout)
            except NotKept:
                self.forget(snap)
                return self.call(slot, "restore", self.ship(snap), seed, streams, timeout=timeout)

    def forget(self, snap: Any) -> None:
        """Forget that the worker keeps a snapshot, so that its bytes are shipped next time."""
        self._held.pop(snapshot_key(snap), None)  # type: ignore[arg-type]

    @property
    @abstractmethod
    def alive(self) -> bool:
        """True if the worker runs; an environment of an earlier `generation` is gone all the same."""

    @abstractmethod
    def kill(self) -> None:
        """End the worker at once, without waiting for environments to close."""

    def interrupt(self) -> None:  # noqa: B027  # only a process can be
        """Make the thread that waits in `take` find the worker dead, where possible; called from another thread."""

    @abstractmethod
    def ask_to_close(self) -> None:
        """Begin an orderly end; `close` completes it. Several workers close side by side that way."""

    @abstractmethod
    def close(self) -> None:
        """Close the environments and end the worker, within seconds. Idempotent."""

    @abstractmethod
    def _start(self) -> None: ...

    @abstractmethod
    def _post(self, calls: Sequence[Call]) -> None: ...

    @abstractmethod
    def _take(self, timeout: float | None) -> CallOutcome: ...


class InlineWorker(Worker):
    """A worker in the caller's own thread, executing calls when their outcome is taken. Timeouts do not apply."""

    def __init__(self, *, keep: int = 64) -> None:
        super().__init__(keep=keep)
        self._host: Host | None = None
        self._posted: deque[Call] = deque()

    @property
    def alive(self) -> bool:
        """True if there are environments."""
        return self._host is not None

    def kill(self) -> None:
        """Close the environments."""
        if self._host is not None:
            self._host.close_all()
        self._host = None
        self._posted.clear()

    def settle(self) -> None:
        """Drop calls that were not executed."""
        self._posted.clear()
        self._pending = 0

    def ask_to_close(self) -> None:
        """Do nothing: there is no thread to prepare."""

    def close(self) -> None:
        """Close the environments."""
        self.kill()

    def execute(self, calls: Mapping[int, Call]) -> dict[int, CallOutcome]:
        """`post` and `take` of all calls, each by its key: several times as fast, for there is nothing to wait for."""
        self.start()
        assert self._host is not None
        outcomes = {}
        for key, (slot, method, args) in calls.items():
            try:
                outcomes[key] = CallOutcome(getattr(self._host, method)(slot, *args))
            except Exception as error:  # the environment's, and its outcome
                outcomes[key] = CallOutcome(None, error)
        return outcomes

    def step_all(self, actions: Sequence[Any]) -> tuple[list[Any], dict[int, Exception]]:
        """Step the slots 0, 1, …, each with its action: transitions; None and an exception where it failed."""
        assert self._host is not None
        return self._host.step_all(actions)

    def _start(self) -> None:
        self._host = Host(keep=self._keep, ships=False)

    def _post(self, calls: Sequence[Call]) -> None:
        self._posted.extend(calls)

    def _take(self, timeout: float | None) -> CallOutcome:
        assert self._host is not None
        call = self._posted.popleft()
        try:
            return CallOutcome(self._host.perform(call))
        except Exception as error:  # the environment's, and its outcome
            return CallOutcome(None, error)


class ThreadWorker(Worker):
    """A worker in a thread of its own.

    A thread cannot be ended from outside: after a timeout it is left alone, closes its environments when the call
    returns, and a new thread with new environments takes its place. Threads are daemons, so they do not keep the
    interpreter from exiting.
    """

    def __init__(self, *, keep: int = 64) -> None:
        super().__init__(keep=keep)
        self._calls: queue.SimpleQueue[Call | None] | None = None
        self._outcomes: queue.SimpleQueue[CallOutcome] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._end: Callable[[], Any] = lambda: None

    @property
    def alive(self) -> bool:
        """True if the present thread takes calls."""
        return self._calls is not None

    def kill(self) -> None:
        """Abandon the thread; it ends after its present call."""
        self._end()
        self._calls = None

    def ask_to_close(self) -> None:
        """Let the thread end once its calls are done."""
        self.kill()

    def close(self) -> None:
        """Wait, for some seconds, until the thread has closed its environments."""
        self.kill()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(GRACE)

    def _start(self) -> None:
        self._calls = queue.SimpleQueue()
        self._outcomes = queue.SimpleQueue()
        host = Host(keep=self._keep, ships=False)
        self._end = weakref.finalize(self, self._calls.put, None)  # also when nobody calls close()
        arguments = (host, self._calls, self._outcomes)
        self._thread = threading.Thread(target=_serve_thread, args=arguments, daemon=True, name="sandboxgym-worker")
        self._thread.start()

    def _post(self, calls: Sequence[Call]) -> None:
        assert self._calls is not None
        for call in calls:
            self._calls.put(call)

    def _take(self, timeout: float | None) -> CallOutcome:
        try:
            return self._outcomes.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError from None


def _serve_thread(host: Host, calls: queue.SimpleQueue[Call | None], outcomes: queue.SimpleQueue[CallOutcome]) -> None:
    while (call := calls.get()) is not None:
        try:
            outcomes.put(CallOutcome(host.perform(call)))
        except BaseException as error:  # SystemExit in an environment must not end the thread with the caller waiting
            outcomes.put(CallOutcome(None, error))
    host.close_all()


class ProcessWorker(Worker):
    """A worker in a process of its own: a fresh interpreter with this one's ``sys.path``.

    Factories, options and jobs are pickled with cloudpickle, so functions and classes of ``__main__`` and lambdas
    work. ``OMP_NUM_THREADS`` is 1 in the worker unless it is set: there are many workers to a machine.
    """

    ships = True

    def __init__(self, *, keep: int = 64) -> None:
        super().__init__(keep=keep)
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection[Any, Any] | None = None
        self._answers: deque[Answer] = deque()
        self._end: Callable[[], Any] = lambda: None
        self._owner = os.getpid()

    @property
    def alive(self) -> bool:
        """True if a process was started and not found dead."""
        return self._process is not None

    @property
    def pid(self) -> int | None:
        """Process id of the present worker process."""
        return self._process.pid if self._process is not None else None

    def kill(self) -> None:
        """Kill the process."""
        if self._process is not None and os.getpid() == self._owner:
            self._process.kill()
        self._end()
        self._process = self._pipe = None
        self._answers.clear()

    def interrupt(self) -> None:
        """Kill the process; the thread waiting for it cleans up."""
        process = self._process
        if process is not None and os.getpid() == self._owner:
            process.kill()

    def ask_to_close(self) -> None:
        """Ask the process to end."""
        if self._pipe is not None and os.getpid() == self._owner:
            with contextlib.suppress(OSError):
                self._pipe.send_bytes(b"")

    def close(self) -> None:
        """Ask the process to end, and kill it after some seconds."""
        process = self._process
        if process is not None and os.getpid() == self._owner:
            self.ask_to_close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        self.kill()

    def _start(self) -> None:
        mine, theirs = Pipe()
        code = f"import {_CHILD} as child; child.main()"
        command = interpreter.command(code, str(theirs.fileno()), str(os.getpid()), str(self._keep))
        environment = {"OMP_NUM_THREADS": "1", **interpreter.environment()}
        with theirs:
            process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, bufsize=0
            )
        self._process, self._pipe = process, mine
        self._owner = os.getpid()
        self._end = weakref.finalize(self, _end_process, process, mine, self._owner)

    def _post(self, calls: Sequence[Call]) -> None:
        assert self._pipe is not None
        with contextlib.suppress(OSError):  # dead; take() says so
            self._pipe.send_bytes(pickle.dumps(packed(calls), pickle.HIGHEST_PROTOCOL))

    def _take(self, timeout: float | None) -> CallOutcome:
        if self._pipe is None or self._process is None:
            raise WorkerDied("the worker process was ended by an earlier call")
        if not self._answers:
            try:
                if timeout is not None and not self._pipe.poll(timeout):
                    raise TimeoutError
                self._answers.extend(pickle.loads(self._pipe.recv_bytes()))
            except (EOFError, ConnectionError) as error:
                raise self._died() from error
        return outcome_of(self._answers.popleft())

    def _died(self) -> WorkerDied:
        process = self._process
        assert process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):  # its pipe closes a moment before it has ended
            process.wait(10.0)
        code = process.returncode
        self.kill()
        if code is None:
            how = "closed its pipe"
        elif code < 0:
            how = f"was killed by signal {-code} ({signal.strsignal(-code)})"
        else:
            how = f"exited with status {code}"
        return WorkerDied(f"worker process {process.pid} {how}")


def outcome_of(answer: Answer) -> CallOutcome:
    """The outcome that another process answered with; see ``process.answer_of``."""
    if isinstance(answer, tuple):
        return CallOutcome(answer[0])
    try:
        failed, content = pickle.loads(answer)
        value = pickle.loads(content)
    except Exception as error:  # unpickling runs code of the environment's classes
        return CallOutcome(None, error)
    if not failed:
        return CallOutcome(value)
    exception, text = value
    exception.__cause__ = RemoteTraceback(text)
    return CallOutcome(None, exception)


PackedCall = tuple[int, str, bytes | tuple[Any, ...]]
"""A call on its way to another process: arguments that are plain data as they are, others as bytes."""


def packed(calls: Sequence[Call]) -> list[PackedCall]:
    """Calls as another process receives them."""
    return [(call.slot, call.method, call.args if _plain(call) else _dumps_args(call)) for call in calls]


def _plain(call: Call) -> bool:
    """True for a step with a text or a number as its action, and nothing else: most calls of a rollout."""
    if call.method != "execute":
        return False
    reset, shipped, _, drawn, _, step, dropped = call.args
    others = reset is not None or shipped is not None or drawn is not None or dropped
    return not others and step is not None and type(step[0]) in (str, int)


def _dumps_args(call: Call) -> bytes:
    """Plain pickle for pure data; cloudpickle where there may be code of ``__main__``."""
    if call.method in ("make", "reset", "attribute", "run") or (call.method == "execute" and call.args[0] is not None):
        packed: bytes = cloudpickle.dumps(call.args)
        return packed
    return dumps(call.args)


def _end_process(process: subprocess.Popen[bytes], pipe: Connection[Any, Any], owner: int) -> None:
    if os.getpid() != owner:  # a fork of the owner has this finalizer too, but not the process
        pipe.close()
        return
    with contextlib.suppress(OSError):
        pipe.send_bytes(b"")  # closing does not suffice while another thread waits for an answer
    pipe.close()
    try:
        process.wait(_FAREWELL)  # nobody called close(): at the owner's exit, or when it was collected as garbage
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def make_worker(mode: Mode, *, keep: int = 64) -> Worker:
    """Make a worker of a kind.

    Raises:
        ValueError: the mode is none of ``"sync"``, ``"thread"``, ``"process"``, ``"ray"``.
        FleetError: the cluster of ``"ray"`` cannot be reached; see `sandboxgym.workers.nodes.cluster.connect`.
        DependencyNotInstalled: Ray is not installed.
    """
    if mode == "ray":
        from sandboxgym.workers.nodes.worker import RayWorker  # imports Ray

        return RayWorker(keep=keep)
    kinds: dict[str, type[Worker]] = {"sync": InlineWorker, "thread": ThreadWorker, "process": ProcessWorker}
    if mode not in kinds:
        raise ValueError(f"expected mode to be one of {', '.join(map(repr, [*kinds, 'ray']))}, found {mode!r}")
    return kinds[mode](keep=keep)


def close_workers(workers: Sequence[Worker]) -> None:
    """Close all workers, side by side."""
    for worker in workers:
        worker.ask_to_close()
    for worker in workers:
        worker.close()
