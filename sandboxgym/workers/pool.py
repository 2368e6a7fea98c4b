"""A queue of jobs on environments in workers, scheduled by the place of their snapshots.

1. A job is a function ``run(env, observation, info)``. It is executed beside an environment that was restored from a
   snapshot, or reset, for it alone; its result or exception arrives in a `concurrent.futures.Future`.
2. Siblings run where their snapshot is: its bytes are shipped once to a worker, which keeps it; an idle worker takes
   over the jobs of busy ones.
3. Seeds make a job's result independent of where and when it was executed.
4. When a worker dies, its job is repeated once on a new one, then fails with `WorkerDied`; no other job is affected. A
   job that takes too long fails with `CallTimedOut` at once.

A whole episode, or a group of siblings, in one job costs one message each way: cheap environments gain from processes
only that way. `PooledEnvs` gives rollout trees (`tree/nodes.py`) environments in worker processes instead.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import logging
import os
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeVar

import cloudpickle  # type: ignore[import-untyped]  # a requirement of Gymnasium
import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from sandboxgym.errors import SnapshotMissing
from sandboxgym.randomness import sibling_seed
from sandboxgym.tree import Envs
from sandboxgym.workers.batches import execute_all
from sandboxgym.workers.env_host import (
    Call,
    CallTimedOut,
    EnvFailure,
    MakeEnv,
    NotKept,
    WorkerDied,
    env_maker,
    snapshot_key,
)
from sandboxgym.workers.kept import KeptLease, KeptSnapshot
from sandboxgym.workers.remote import RemoteEnv, WorkerSlots
from sandboxgym.workers.worker import Mode, ProcessWorker, Worker, close_workers, make_worker
from sandboxgym.wrappers.jobs import EnvJob, EnvResult

logger = logging.getLogger("sandboxgym")

T = TypeVar("T")
Run = Callable[[gym.Env[Any, Any], Any, dict[str, Any]], T]
"""A job: a function of an environment and the observation and info of its restore or reset."""

_OLDEST_FIRST = 32
"""Interval in jobs at which a worker takes the oldest one, so that none waits for ever behind new siblings."""

_NOTHING = object()
_FAREWELL = 10.0
"""Seconds that `EnvPool.close` waits for its threads at most."""


class PoolClosed(RuntimeError):
    """The pool was closed before the job was done, or before it was submitted."""


@dataclass(slots=True)
class PoolStats:
    """Counts since the pool was made."""

    workers: int = 0
    jobs: int = 0
    """Jobs that ended, failed ones included."""
    failed: int = 0
    retried: int = 0
    restores: int = 0
    """Jobs that began at a snapshot."""
    resets: int = 0
    local: int = 0
    """Restores on a worker that had the snapshot already."""
    snapshots_shipped: int = 0
    bytes_shipped: int = 0
    """Bytes of snapshots shipped to workers."""
    busy_seconds: float = 0.0
    """Busy seconds, summed over the workers."""
    seconds: float = 0.0
    """Seconds since the pool was made."""

    @property
    def busy_share(self) -> float:
        """Fraction of the workers' time spent on work, 0 to 1."""
        return self.busy_seconds / (self.seconds * self.workers) if self.seconds else 0.0

    @property
    def locality(self) -> float:
        """Fraction of the restores that shipped no bytes, 0 to 1."""
        return self.local / self.restores if self.restores else 0.0


@dataclass(slots=True, eq=False)
class _Job:
    number: int
    run: Any
    snap: Any
    seed: int | None
    options: dict[str, Any] | None
    future: Future[Any] = field(default_factory=Future)
    deaths: int = 0
    running: bool = False

    @property
    def group(self) -> Any:
        """Group key, equal for siblings of one snapshot; None for a job that begins with a reset."""
        return None if self.snap is None else snapshot_key(self.snap) or id(self.snap)


class EnvPool:
    """Workers with one environment each, and a queue of jobs for them.

    Args:
        env: an id, an ``EnvSpec`` or a function that makes the environment.
        workers: number of workers (default: one per processor).
        mode: ``"process"``; ``"thread"`` where environments wait (containers, network) more than they compute;
            ``"ray"`` for workers on a Ray cluster (`RayWorker`): the one that this process is connected to, else that
            of ``$RAY_ADDRESS``, else one of this machine's cores.
        max_pending: jobs that may be queued, those being executed not counted; see `submit`.
        timeout: seconds that a job may take; None: no limit. In mode ``"thread"`` it needs a second thread per worker.
        create_timeout: seconds that starting a worker and making its environment may take; None: no limit.
        batch: maximum number of siblings in one message to a worker. More than 1 helps with jobs of less than a
            millisecond, but divides long jobs unevenly.
        keep: number of snapshots that a worker keeps.
        locality: False gives every job to the next free worker, in order.
        **kwargs: of ``gym.make`` or of the function.

    Example:
        >>> def fly(env, observation, info):
        ...     return env.step("fly")[0]
        >>> with EnvPool("sandboxgym/ALFWorld-v0", workers=2, mode="thread") as pool:
        ...     pool.submit(fly, task=0).result()
        'Nothing happens.'
    """

    def __init__(
        self,
        env: str | EnvSpec | MakeEnv,
        workers: int | None = None,
        *,
        mode: Literal["thread", "process", "ray"] = "process",
        max_pending: int = 1024,
        timeout: float | None = None,
        create_timeout: float | None = 300.0,
        batch: int = 1,
        keep: int = 64,
        locality: bool = True,
        **kwargs: Any,
    ) -> None:
        count = workers if workers is not None else os.cpu_count() or 1
        if min(count, max_pending, batch, keep) < 1:
            raise ValueError(f"expected positive numbers, found {count=}, {max_pending=}, {batch=}, {keep=}")
        if mode not in ("thread", "process", "ray"):
            raise ValueError(f"expected mode to be 'thread', 'process' or 'ray', found {mode!r}")
        self._make = env_maker(env, **kwargs)
        self._timeout, self._create_timeout = timeout, create_timeout
        self._max_pending, self._batch, self._locality = max_pending, batch, locality
        kind: Mode = "sync" if mode == "thread" and timeout is None else mode  # each has a thread here anyway
        self._workers = [make_worker(kind, keep=keep) for _ in range(count)]
        self._ships = self._workers[0].ships
        self._changed = threading.Condition()
        self._fresh: deque[_Job] = deque()
        self._groups: OrderedDict[Any, deque[_Job]] = OrderedDict()
        self._pending = 0
        self._busy: set[Worker] = set()
        self._made: dict[Worker, int] = {}
        self._numbers = itertools.count()
        self._picks = 0
        self._closed = False
        self._stats = PoolStats(workers=count)
        self._began = time.monotonic()
        for worker in self._workers:
            if self._ships:
                worker.start()
        self._threads = [
            threading.Thread(target=self._dispatch, args=(worker,), daemon=True, name=f"sandboxgym-pool-{index}")
            for index, worker in enumerate(self._workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        run: Run[T],
        *,
        snap: Any = None,
        task: Any = None,
        options: dict[str, Any] | None = None,
        seed: int | None = None,
        block: bool = True,
    ) -> Future[T]:
        """Queue one job.

        Args:
            run: the job. In processes it is sent by cloudpickle, as it is now; what it returns is pickled.
            snap: begin there; it must not be released before the job is done. The default is a reset.
            task: short for ``options={"task": task}``.
            options: of the reset.
            seed: of the restore or reset.
            block: wait while ``max_pending`` jobs are queued; False raises instead.

        Returns:
            A future: ``cancel()`` takes the job out of the queue, a running job continues. It raises what the job
            raised, with the worker's traceback as ``__cause__``.

        Raises:
            queue.Full: ``max_pending`` jobs are queued, and ``block`` is False.
            PoolClosed: the pool was closed.
            ValueError: both ``snap`` and a task or options were given.
        """
        if snap is not None and (task is not None or options is not None):
            raise ValueError("expected snap, or task and options of a reset, found both")
        if task is not None:
            options = {**(options or {}), "task": task}
        return self._submit(run, [(snap, seed, options)], block)[0]

    def fork(self, snap: Any, k: int, run: Run[T], *, seed: int | None = None, block: bool = True) -> list[Future[T]]:
        """Queue one job for each of ``k`` siblings.

        Args:
            snap: their initial state.
            k: number of jobs, at least 1.
            run: the same for all.
            seed: sibling i gets ``sibling_seed(seed, i)``, as from ``env.fork(k, seed=seed)``; None clones the streams.
            block: as in `submit`; without it either all are queued or none.

        Raises:
            queue.Full, PoolClosed: as by `submit`.
            ValueError: ``k`` is below 1.
        """
        if k < 1:
            raise ValueError(f"expected at least 1 fork, found k={k}")
        seeds = [None if seed is None else sibling_seed(seed, index) for index in range(k)]
        return self._submit(run, [(snap, own, None) for own in seeds], block)

    @staticmethod
    def as_completed(futures: Iterable[Future[T]], timeout: float | None = None) -> Iterator[Future[T]]:
        """Futures in the order of completion; see `concurrent.futures.as_completed`."""
        return concurrent.futures.as_completed(futures, timeout)

    @property
    def stats(self) -> PoolStats:
        """A copy of the counts so far."""
        with self._changed:
            values = {name: getattr(self._stats, name) for name in PoolStats.__slots__}
        values["bytes_shipped"] = sum(worker.bytes_shipped for worker in self._workers)
        values["snapshots_shipped"] = sum(worker.snapshots_shipped for worker in self._workers)
        values["seconds"] = time.monotonic() - self._began
        return PoolStats(**values)

    def close(self, *, wait: bool = False) -> None:
        """End the workers. Idempotent.

        Args:
            wait: carry out all jobs first. Otherwise queued ones are cancelled and running ones fail with `PoolClosed`
                (in threads, which cannot be stopped, they are waited for some seconds).
        """
        with self._changed:
            while wait and not self._closed and (self._pending or self._busy):
                self._changed.wait()
            self._closed = True
            dropped = [*self._fresh, *itertools.chain.from_iterable(self._groups.values())]
            self._fresh.clear()
            self._groups.clear()
            self._pending = 0
            self._changed.notify_all()
            busy = list(self._busy)
        for job in dropped:
            if not job.future.cancel():  # it ran before, on a worker that died
                job.future.set_exception(PoolClosed("the pool was closed before the job was executed again"))
        for worker in busy:
            worker.interrupt()
        deadline = time.monotonic() + _FAREWELL
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        self.close(wait=kind is None)

    def _submit(self, run: Any, starts: list[tuple[Any, int | None, Any]], block: bool) -> list[Future[Any]]:
        packed = cloudpickle.dumps(run) if self._ships else run
        jobs = [_Job(next(self._numbers), packed, *start) for start in starts]
        if not block:
            with self._changed:
                self._check_open()
                if self._pending + len(jobs) > self._max_pending:
                    raise queue.Full(f"{self._pending} of {self._max_pending} jobs are queued, no room for {len(jobs)}")
                for job in jobs:
                    self._enqueue(job)
        else:
            for job in jobs:
                with self._changed:
                    while self._pending >= self._max_pending and not self._closed:
                        self._changed.wait()
                    self._check_open()
                    self._enqueue(job)
        for job in jobs:
            job.future.add_done_callback(lambda future, job=job: self._forget_cancelled(job))  # type: ignore[misc]
        return [job.future for job in jobs]

    def _check_open(self) -> None:
        if self._closed:
            raise PoolClosed("the pool is closed")

    def _queue_of(self, job: _Job) -> deque[_Job]:
        return self._fresh if job.group is None else self._groups.setdefault(job.group, deque())

    def _enqueue(self, job: _Job, *, first: bool = False) -> None:
        waiting = self._queue_of(job)
        if first:
            waiting.appendleft(job)
        else:
            waiting.append(job)
        self._pending += 1
        self._changed.notify_all()

    def _forget_cancelled(self, job: _Job) -> None:
        if not job.future.cancelled():
            return
        with self._changed:
            waiting = self._queue_of(job)
            if job in waiting:
                waiting.remove(job)
                self._pending -= 1
            self._drop_empty(job.group)
            self._changed.notify_all()

    def _drop_empty(self, group: Any) -> None:
        if group is not None and not self._groups.get(group):
            self._groups.pop(group, None)

    def _next(self, worker: Worker) -> list[_Job] | None:
        """Next job of the worker; None once the pool is closed."""
        with self._changed:
            while not self._closed and (group := self._choose(worker)) is _NOTHING:
                self._changed.wait()
            if self._closed:
                return None
            waiting = self._fresh if group is None else self._groups[group]
            count = max(1, min(self._batch, len(waiting) // len(self._workers))) if group is not None else 1
            jobs = [waiting.popleft() for _ in range(count)]
            self._drop_empty(group)
            self._pending -= len(jobs)
            self._busy.add(worker)
            self._changed.notify_all()
            return jobs

    def _choose(self, worker: Worker) -> Any:
        """Group to take a job from; `_NOTHING` if there is none, or only some that an idle worker is nearer to.

        The worker's own, else the oldest that no worker holds, else the oldest that only busy workers hold.
        """
        heads = [(jobs[0].number, group) for group, jobs in self._groups.items()]
        if self._fresh:
            heads.append((self._fresh[0].number, None))
        if not heads:
            return _NOTHING
        heads.sort(key=lambda head: head[0])
        self._picks += 1
        if not self._locality or self._picks % _OLDEST_FIRST == 0:
            return heads[0][1]
        for _, group in heads:
            if group is not None and worker.holds(group):
                return group
        for _, group in heads:
            if not any(other.holds(group) for other in self._workers):
                return group
        for _, group in heads:
            if not any(other.holds(group) and other not in self._busy for other in self._workers):
                return group
        return _NOTHING

    def _dispatch(self, worker: Worker) -> None:
        """Main loop of the thread of one worker."""
        while (jobs := self._next(worker)) is not None:
            began = time.monotonic()
            try:
                self._carry_out(worker, jobs)
            except BaseException as error:  # SystemExit in a job in this thread: the thread continues
                worker.settle()
                for job in jobs:
                    if not job.future.done():
                        self._finish(job, None, error)
            with self._changed:
                self._busy.discard(worker)
                self._stats.busy_seconds += time.monotonic() - began
                self._changed.notify_all()
        worker.close()

    def _carry_out(self, worker: Worker, jobs: list[_Job]) -> None:
        due: deque[_Job] = deque()
        calls: list[Call] = []
        for job in jobs:
            if not (job.running or job.future.set_running_or_notify_cancel()):
                continue
            job.running = True
            try:
                self._make_env(worker)
                shipped = None if job.snap is None else worker.ship(job.snap)
            except WorkerDied as error:
                self._after_death(job, error)
            except Exception as error:  # of making the environment: it is the job's result
                self._finish(job, None, error)
            else:
                self._count(job, local=shipped is not None and shipped.data is None)
                due.append(job)
                calls.append(Call(0, "run", (job.run, shipped, job.seed, job.options)))
        if calls:
            worker.post(calls)
        while due:
            try:
                outcome = worker.take(self._timeout)
            except EnvFailure as error:
                if isinstance(error, CallTimedOut):
                    self._finish(due.popleft(), None, error)
                else:
                    self._after_death(due.popleft(), error)
                for job in reversed(due):  # they had not begun
                    self._again(job)
                return
            job = due.popleft()
            if isinstance(outcome.error, NotKept):
                worker.forget(job.snap)
                self._again(job)
            else:
                self._finish(job, outcome.value, outcome.error)

    def _make_env(self, worker: Worker) -> None:
        if not worker.alive or self._made.get(worker) != worker.generation:
            worker.call(0, "make", self._make, timeout=self._create_timeout)
            self._made[worker] = worker.generation

    def _count(self, job: _Job, *, local: bool) -> None:
        with self._changed:
            self._stats.restores += job.snap is not None
            self._stats.resets += job.snap is None
            self._stats.local += local

    def _after_death(self, job: _Job, error: EnvFailure) -> None:
        job.deaths += 1
        if self._closed or job.deaths > 1:
            self._finish(job, None, PoolClosed("the pool was closed while the job ran") if self._closed else error)
            return
        with self._changed:
            self._stats.retried += 1
        self._again(job)

    def _again(self, job: _Job) -> None:
        with self._changed:
            if not self._closed:
                self._enqueue(job, first=True)
                return
        self._finish(job, None, PoolClosed("the pool was closed before the job was executed"))

    def _finish(self, job: _Job, value: Any, error: BaseException | None) -> None:
        with self._changed:
            self._stats.jobs += 1
            self._stats.failed += error is not None
        if error is None:
            job.future.set_result(value)
        else:
            job.future.set_exception(error)


NEAR = 4
"""Environments that a worker may have in use beyond the others where it keeps the snapshots that they start from."""


class PooledEnvs(Envs):
    """Live environments for `sandboxgym.tree.rollout` that step side by side in worker processes.

    They are `RemoteEnv`s, spread evenly over the workers. A rollout sends each worker one message for the steps of all
    its live paths. If steps only wait, ``Envs(make, threads=…)`` serves as well.

    Args:
        env: an id, an ``EnvSpec`` or a function that makes an environment.
        workers: processes (default: one a processor).
        threads: calls under way at a time, in this process (default: 8 per worker, at most 64).
        timeout: of `RemoteEnv`, as are ``reset_timeout`` and ``create_timeout``.
        reset_timeout: see there.
        create_timeout: see there.
        store: of a directory or URL that all workers can reach (`SnapshotStore`): snapshots stay in the workers that
            took them, and durable copies are written to the store in the background. Default: each comes here as bytes.
        every_k_steps: with a store, steps of an environment between snapshots that get a durable copy at once. After
            a loss more actions are repeated if it is large.
        bandwidth: with a store, bytes per second that each worker writes in the background; None: no limit.
        **kwargs: of ``gym.make`` or of the function.
    """

    def __init__(
        self,
        env: str | EnvSpec | MakeEnv,
        workers: int | None = None,
        *,
        threads: int | None = None,
        timeout: float | None = None,
        reset_timeout: float | None = None,
        create_timeout: float | None = 300.0,
        store: str | os.PathLike[str] | None = None,
        every_k_steps: int = 1,
        bandwidth: float | None = None,
        **kwargs: Any,
    ) -> None:
        if every_k_steps < 1:
            raise ValueError(f"expected every_k_steps to be at least 1, found {every_k_steps}")
        if bandwidth is not None and not bandwidth > 0:
            raise ValueError(f"expected a bandwidth of more than 0 bytes per second, or None, found {bandwidth}")
        count = workers if workers is not None else os.cpu_count() or 1
        if count < 1:
            raise ValueError(f"expected at least one worker, found {workers=}")
        self._settings: dict[str, Any] = {
            "timeout": timeout,
            "reset_timeout": reset_timeout,
            "create_timeout": create_timeout,
        }
        super().__init__(env_maker(env, **kwargs), threads=threads or max(2, min(64, 8 * count)))
        self._slots: list[WorkerSlots] = []
        self._taken = [0] * count
        self._at: dict[int, int] = {}
        self._free: list[list[RemoteEnv]] = [[] for _ in range(count)]
        self._lease: KeptLease | None = None
        if store is not None:
            self._lease = KeptLease(store, every=every_k_steps, bandwidth=bandwidth)
        try:
            for _ in range(count):
                self._slots.append(WorkerSlots(self.new_worker(), keep_on=True))
                self._slots[-1].worker.keeping = None if self._lease is None else self._lease.keeping
                self._slots[-1].worker.start()
        except BaseException:
            PooledEnvs.close(self)
            raise

    def new_worker(self) -> Worker:
        """A worker, which the constructor starts."""
        return ProcessWorker()

    def take(self) -> gym.Env[Any, Any]:
        """A live environment in any state, on the worker with the fewest in use, to be reset or restored.

        Raises:
            WorkerDied: every worker in turn died while it made the environment.
        """
        for tries_left in reversed(range(len(self._slots) + 1)):
            try:
                return self.take_at(min(self._places(), key=self._taken.__getitem__))
            except WorkerDied as error:  # a moment ago, or nobody knew: it has another process the next time
                if not tries_left:
                    raise
                logger.warning("an environment is made once more: %s", error)
        raise AssertionError

    def _places(self) -> Sequence[int]:
        """Numbers of the workers that may be asked for an environment."""
        return range(len(self._slots))

    def take_near(self, snap: Any) -> gym.Env[Any, Any]:
        """A live environment as `take` gives it, on the worker that keeps a snapshot if it has few more in use."""
        if isinstance(snap, KeptSnapshot):
            place = next((at for at, shared in enumerate(self._slots) if snap.kept.at(shared.worker)), None)
            if place is not None and self._taken[place] < min(self._taken) + NEAR:
                with contextlib.suppress(WorkerDied):  # it was lost, and nobody knew
                    return self.take_at(place)
        return self.take()

    def take_at(self, place: int) -> gym.Env[Any, Any]:
        """A live environment on the worker with a number."""
        env = self._free[place].pop() if self._free[place] else self._new_at(place)
        self._taken[place] += 1
        return env

    def _new_at(self, place: int) -> RemoteEnv:
        env = RemoteEnv(self._make, shared=self._slots[place], **self._settings)
        self._made.append(env)
        self._at[id(env)] = place
        return env

    def give(self, env: gym.Env[Any, Any]) -> None:
        """Return an environment, for use by the next path."""
        assert isinstance(env, RemoteEnv)
        place = self._at[id(env)]
        self._taken[place] -= 1
        self._free[place].append(env)

    def discard(self, env: gym.Env[Any, Any]) -> None:
        """Close an environment that failed, whatever state it is in."""
        self._taken[self._at.pop(id(env))] -= 1
        super().discard(env)

    def execute_all(self, jobs: Sequence[EnvJob]) -> list[EnvResult | Exception]:
        """Execute jobs, each on an environment of its own: one message per worker, and no threads.

        Those with a look-ahead, a function of this process, are executed call by call.
        """
        if any(job.look is not None for job in jobs):
            return super().execute_all(jobs)
        return execute_all(jobs)

    def reference(self, snap: Any) -> tuple[str, ...] | None:
        """Name of a snapshot's durable copy, which may not be complete yet; None if it gets none."""
        return None if self._lease is None else self._lease.reference(snap)

    def durable(self, reference: tuple[str, ...]) -> Any:
        """The snapshot of a name, of this process or one that was killed, whose lease is taken over and ended here.

        Raises:
            SnapshotMissing, SnapshotCorrupt: it is not in the store, or damaged there.
        """
        if self._lease is None:
            raise SnapshotMissing("there is no store of snapshots")
        return self._lease.durable(reference)

    def close(self) -> None:
        """Close the environments and end the workers. Idempotent."""
        with contextlib.ExitStack() as stack:
            if self._lease is not None:
                stack.callback(self._lease.close)
            stack.callback(close_workers, [shared.worker for shared in self._slots])
            super().close()
        self._free = [[] for _ in self._slots]
        self._at.clear()
