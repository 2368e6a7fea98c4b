"""`RemoteEnv`: an environment in a worker process, used like a local one.

1. ``reset``, ``step``, ``render``, ``snapshot``, ``restore`` and ``fork`` act on the whole stack in the worker, and
   exceptions come back with their own types.
2. Its snapshots are those of the same stack in this process: they restore in an environment of the same id made by
   ``gym.make``, and the other way round. Wrappers around the `RemoteEnv` are captured by `sandboxgym.snapshot` in
   addition.
3. The random streams of ``action_space`` and ``observation_space`` are part of its state, drawn from in either process.
4. Tasks, expert and card of a `TaskEnv` are passed on: an environment without one of them has it not here either.
5. If the worker dies or is ended by a timeout, the call raises `WorkerDied` or `CallTimedOut`; the next ``reset`` or
   ``restore`` starts a new worker.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any, ClassVar, Self

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from sandboxgym import randomness
from sandboxgym.core import SnapshotSpec, Transition
from sandboxgym.errors import SnapshotNotSupported
from sandboxgym.randomness import sibling_seed
from sandboxgym.task_env import EnvCard, Task, TaskRows
from sandboxgym.workers.env_host import Call, Description, Executed, MakeEnv, WorkerDied, env_maker
from sandboxgym.workers.worker import Mode, Worker, make_worker
from sandboxgym.wrappers.jobs import EnvJob, EnvResult


class WorkerSlots:
    """One worker and its slots in use. The worker ends with its last environment, unless it is kept on."""

    def __init__(self, worker: Worker, *, keep_on: bool = False) -> None:
        self.worker = worker
        self.keep_on = keep_on
        self.slots: set[int] = set()
        self._next = 0

    def join(self) -> int:
        """Take a slot for one more environment."""
        with self.worker.lock:
            self._next += 1
            self.slots.add(self._next)
            return self._next

    def leave(self, slot: int) -> None:
        """Free a slot; freeing the last one closes the worker."""
        with self.worker.lock:
            self.slots.discard(slot)
            last = not self.slots and not self.keep_on
        if last:
            self.worker.close()


class RemoteExpert:
    """Proxy of an expert that plays in a worker process; see `sandboxgym.task_env.Expert`.

    Args:
        call: calls a method of the expert with an observation; returns its result and whether it was a mistake.
    """

    def __init__(self, call: Callable[[str, Any], tuple[Any, bool]]) -> None:
        self._call = call
        self.noisy = False

    def reset(self, observation: Any) -> None:
        """Begin an episode: the environment has been reset."""
        _, self.noisy = self._call("reset", observation)

    def act(self, observation: Any) -> Any:
        """The next action."""
        action, self.noisy = self._call("act", observation)
        return action


class RemoteEnv(gym.Env[Any, Any]):
    """Proxy of an environment that lives in a worker process.

    Calls are synchronous and may come from any thread, one at a time for each worker.

    Args:
        env: an id, an ``EnvSpec`` or a function that makes the environment.
        timeout: seconds that ``step``, ``render`` and similar calls may take; None: no limit.
        reset_timeout: seconds that ``reset``, ``snapshot`` and ``restore`` may take (default: 10 × ``timeout``).
        create_timeout: seconds that starting the worker and making the environment may take.
        fork_to: where `fork` puts the children: each in a new ``"process"``, or all in this one's ``"worker"``, which
            is cheaper, steps them in turn and needs no durable snapshots.
        mode: ``"thread"`` keeps it in a thread of this process instead, ``"ray"`` on a Ray cluster, as of `EnvPool`.
        shared: the slots of a worker to share.
        **kwargs: of ``gym.make`` or of the function.

    Example:
        >>> env = RemoteEnv("sandboxgym/ALFWorld-v0", max_episode_steps=40)
        >>> observation, info = env.reset(seed=0)
        >>> snap = env.snapshot()
        >>> env.close()
    """

    captures_stack: ClassVar[bool] = True
    """Snapshots include the wrappers in the worker; see ``wrappers/stack.py``."""

    _described: Description
    _num_tasks: int | None = None
    """Number of tasks, once it was asked for."""

    def __init__(
        self,
        env: str | EnvSpec | MakeEnv,
        *,
        timeout: float | None = None,
        reset_timeout: float | None = None,
        create_timeout: float | None = 300.0,
        fork_to: str = "process",
        mode: Mode = "process",
        shared: WorkerSlots | None = None,
        **kwargs: Any,
    ) -> None:
        if fork_to not in ("process", "worker"):
            raise ValueError(f"expected fork_to to be 'process' or 'worker', found {fork_to!r}")
        self._make = env_maker(env, **kwargs)
        self._timeout = timeout
        self._reset_timeout = reset_timeout if reset_timeout is not None or timeout is None else 10 * timeout
        self._create_timeout = create_timeout
        self._fork_to = fork_to
        self._mode = mode
        self._slots = shared or WorkerSlots(make_worker(mode))
        self._slot = self._slots.join()
        self._generation = 0
        self._closed = False
        try:
            self._take_on(self._create())
        except BaseException:
            self._slots.leave(self._slot)
            raise

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """See ``gymnasium.Env.reset``."""
        self._revive()
        return self._call("reset", seed, options, timeout=self._reset_timeout)  # type: ignore[no-any-return]

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """See ``gymnasium.Env.step``."""
        return self._call("step", action, timeout=self._timeout)  # type: ignore[no-any-return]

    def render(self) -> Any:
        """See ``gymnasium.Env.render``."""
        return self._call("render", timeout=self._timeout)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """An attribute of the environment in the worker, or the result of calling it."""
        return self._call("attribute", name, args, kwargs, timeout=self._timeout)

    def close(self) -> None:
        """Close the environment, and its worker if nothing else uses it. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._living():
            with contextlib.suppress(
                Exception
            ):  # of the environment, or its worker has died: it is given up either way
                self._slots.worker.call(self._slot, "close", timeout=self._reset_timeout)
        self._slots.leave(self._slot)

    @property
    def worker(self) -> Worker:
        """The worker that the environment is in."""
        return self._slots.worker

    @property
    def lost(self) -> bool:
        """True if its worker ended; a reset or a restore starts another."""
        return not self._living()

    def move_to(self, shared: WorkerSlots, *, blank: bool = False) -> None:
        """Continue in another worker, from a snapshot; if anything fails, it stays where it is.

        Args:
            shared: the slots of the other worker.
            blank: without its state, because a reset or a restore comes next.

        Raises:
            SnapshotError, EnvFailure: of the snapshot, or of either worker.
        """
        before = dict(vars(self))
        old, old_slot, old_generation = self._slots, self._slot, self._generation
        snap = None if blank else self.snapshot()
        try:
            self._slots, self._slot = shared, shared.join()
            try:
                self._take_on(self._create())
                if snap is not None:
                    self.restore(snap)
            except BaseException:
                there, made = self._slot, self._slots is shared and self._generation == shared.worker.generation
                vars(self).update(before)
                if made and shared.worker.alive:
                    with contextlib.suppress(Exception):  # of the environment: what is raised is why it was moved back
                        shared.worker.call(there, "close", timeout=self._reset_timeout)
                shared.leave(there)
                raise
        finally:
            if snap is not None:
                snap.release()
        if old.worker.alive and old_generation == old.worker.generation:
            with contextlib.suppress(Exception):  # of the environment, which continues elsewhere
                old.worker.call(old_slot, "close", timeout=self._reset_timeout)
        old.leave(old_slot)

    def prepare(self, job: EnvJob) -> None:
        """Make the environment anew, if it was lost with its worker and a job begins by a reset or a restore."""
        if job.reset is not None or job.restore is not None:
            self._revive()

    def prepare_snapshot(self, job: EnvJob) -> None:
        """Have the snapshot that a job restores written to the store, if another worker keeps it; holding no lock.

        Raises:
            SnapshotMissing: that worker is gone, and the store has nothing of it.
        """
        if job.restore is not None:
            self.worker.prepare(job.restore[0], self._reset_timeout)

    def packed(self, job: EnvJob) -> Call:
        """A job as the call of its worker; hold the worker's lock until its outcome is taken.

        Raises:
            WorkerDied: the environment was lost with its worker.
            SnapshotReleased: of the snapshot to restore.
        """
        self._check_open()
        self._check_living()
        shipped, seed = (None, None) if job.restore is None else (self.worker.ship(job.restore[0]), job.restore[1])
        drawn = self._drawn() if job.capture else None
        dropped = self.worker.take_dropped()
        return Call(self._slot, "execute", (job.reset, shipped, seed, drawn, job.capture, job.step, dropped))

    def unpacked(self, done: Executed) -> EnvResult:
        """Result of a job, from what its call returned."""
        if done.streams is not None:
            self._put_streams(done.streams)
        snap = None if done.shipped is None else self.worker.receive(done.shipped)
        return EnvResult(done.begun, snap, None, done.stepped, done.capturing, done.stepping)

    def timeout_of(self, job: EnvJob) -> float | None:
        """Seconds that a job may take; None where one of its calls may take as long as it likes."""
        begins = job.reset is not None or job.restore is not None or job.capture
        limits = [self._reset_timeout] * begins + [self._timeout] * (job.step is not None)
        known = [limit for limit in limits if limit is not None]
        return sum(known) if len(known) == len(limits) else None

    @property
    def last(self) -> Transition:
        """The last transition of the base environment; see `SnapshotEnv.last`."""
        return self.call("last")  # type: ignore[no-any-return]

    @property
    def snapshot_spec(self) -> SnapshotSpec:
        """Spec of the snapshots of the base environment.

        Raises:
            SnapshotNotSupported: it has none.
        """
        if self._described.snapshot_spec is None:
            raise SnapshotNotSupported(f"{self} has no snapshots: derive the environment from sandboxgym.SnapshotEnv")
        return self._described.snapshot_spec

    @property
    def card(self) -> EnvCard:
        """Card of the environment; empty where it has none."""
        return self._described.card

    @property
    def num_tasks(self) -> int:
        """Number of tasks; see `TaskEnv.num_tasks`."""
        self._offered("num_tasks")
        if self._num_tasks is None:
            self._num_tasks = self._call("attribute", "num_tasks", (), {}, timeout=self._reset_timeout)
        return self._num_tasks

    @property
    def tasks(self) -> Callable[..., TaskRows]:
        """See `TaskEnv.tasks`; rows are read from the worker one by one."""
        self._offered("tasks")
        return self._tasks

    @property
    def expert(self) -> Callable[..., RemoteExpert]:
        """See `TaskEnv.expert`; the expert plays in the worker, with a copy of ``rng``."""
        self._offered("expert")
        return self._expert

    def _tasks(self, split: str | None = None) -> TaskRows:
        def row(position: int) -> Task:
            name, kind = self._call("task_row", split, position, timeout=self._reset_timeout)
            return Task(
                name, lambda: self._call("task_instruction", split, position, timeout=self._reset_timeout), kind
            )

        return TaskRows(self._call("task_count", split, timeout=self._reset_timeout), row)

    def _expert(self, **options: Any) -> RemoteExpert:
        number = self._call("expert", options, timeout=self._reset_timeout)
        generation = self._generation

        def call(method: str, observation: Any) -> tuple[Any, bool]:
            if self._generation != generation:
                raise WorkerDied(f"this expert of {self} was lost with its worker: make another one")
            return self._call("expert_call", number, method, observation, timeout=self._timeout)  # type: ignore[no-any-return]

        return RemoteExpert(call)

    def _offered(self, name: str) -> None:
        """Raise the AttributeError of an environment that lacks it."""
        if name not in self._described.offers:
            raise AttributeError(f"{self} has no {name}: its environment is not a sandboxgym.TaskEnv with one")

    def snapshot(self) -> Any:
        """Capture the whole stack in the worker; see `sandboxgym.snapshot`."""
        with self._slots.worker.lock:
            dropped = self.worker.take_dropped()
            shipped, streams = self._call("snapshot", True, self._drawn(), dropped, timeout=self._reset_timeout)
            self._put_streams(streams)
            return self._slots.worker.receive(shipped)

    def restore(self, snap: Any, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Return to a captured state, in place; see `sandboxgym.restore`."""
        self.worker.prepare(snap, self._reset_timeout)
        with self._slots.worker.lock:
            self._revive()
            self._check_open()
            started, streams = self._slots.worker.restore(
                self._slot, snap, seed, streams=True, timeout=self._reset_timeout
            )
            self._put_streams(streams)
        return started  # type: ignore[no-any-return]

    def fork(self, k: int, *, seed: int | None = None) -> list[Self]:
        """Create ``k`` new environments at this state; see `SnapshotEnv.fork`. All or nothing."""
        if k < 1:
            raise ValueError(f"expected at least 1 fork, found k={k}")
        return self._fork_here(k, seed) if self._fork_to == "worker" else self._fork_apart(k, seed)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.fork(1)[0]

    def __copy__(self) -> Self:
        raise TypeError("a shallow copy of an environment would share its state: use fork(), or copy.deepcopy")

    def __str__(self) -> str:
        return f"<RemoteEnv {self.spec.id if self.spec else self._make}>"

    @property  # type: ignore[misc]
    def np_random(self) -> Any:  # type: ignore[override]
        """Unavailable: drawing from a copy would not advance the environment's own stream."""
        raise AttributeError("the random stream of a RemoteEnv is in its worker; seed it by reset(seed=…)")

    @property
    def np_random_seed(self) -> int | None:  # type: ignore[override]
        """Seed of the environment in the worker."""
        return self.call("np_random_seed")  # type: ignore[no-any-return]

    def _fork_here(self, k: int, seed: int | None) -> list[Self]:
        shared = self._slots
        with shared.worker.lock:
            slots = [shared.join() for _ in range(k)]
            try:
                self._call("fork", slots, seed, self._drawn(), timeout=self._reset_timeout)
            except BaseException:
                for slot in slots:
                    shared.leave(slot)
                raise
            return [self._child(shared, slot) for slot in slots]

    def _fork_apart(self, k: int, seed: int | None) -> list[Self]:
        children: list[Self] = []
        snap = self.snapshot()
        try:
            for _ in range(k):
                shared = WorkerSlots(make_worker(self._mode))
                shared.worker.start()  # all side by side: they wait for their interpreters below
                children.append(self._child(shared, shared.join()))
            for index, child in enumerate(children):
                child.restore(snap, seed=None if seed is None else sibling_seed(seed, index))
        except BaseException:
            for child in children:
                child.close()
            raise
        return children

    def _child(self, shared: WorkerSlots, slot: int) -> Self:
        """A proxy for another environment like this one; in a new worker its first restore makes it."""
        child = type(self).__new__(type(self))
        for name in ("_make", "_timeout", "_reset_timeout", "_create_timeout", "_fork_to", "_mode", "_closed"):
            setattr(child, name, getattr(self, name))
        child._slots, child._slot = shared, slot
        child._generation = shared.worker.generation if shared is self._slots else 0
        child._take_on(self._described)
        if shared is self._slots:
            child._put_streams(child._call("streams", timeout=self._timeout))
        return child

    def _take_on(self, described: Description) -> None:
        self._described = described
        self._num_tasks = None
        self.observation_space = copy.deepcopy(described.observation_space)
        self.action_space = copy.deepcopy(described.action_space)
        self.metadata = described.metadata
        self.render_mode = described.render_mode
        self.spec = described.spec
        self._synced = self._streams()

    def _create(self) -> Description:
        with self._slots.worker.lock:
            worker, keeping = self._slots.worker, self._slots.worker.keeping
            arguments = (self._make,) if keeping is None else (self._make, keeping)
            described = worker.call(self._slot, "make", *arguments, timeout=self._create_timeout)
            self._generation = self._slots.worker.generation
        return described  # type: ignore[no-any-return]

    def _living(self) -> bool:
        return self._slots.worker.alive and self._generation == self._slots.worker.generation

    def _revive(self) -> None:
        with self._slots.worker.lock:
            if not self._closed and not self._living():
                self._create()

    def _check_open(self) -> None:
        if self._closed:
            raise gym.error.ClosedEnvironmentError(f"{self} was closed")

    def _check_living(self) -> None:
        if not self._living():
            raise WorkerDied(f"{self} was lost with its worker: reset() or restore() starts a new one")

    def _call(self, method: str, *args: Any, timeout: float | None) -> Any:
        self._check_open()
        with self._slots.worker.lock:
            self._check_living()
            return self._slots.worker.call(self._slot, method, *args, timeout=timeout)

    def _streams(self) -> list[Any]:
        return randomness.capture_spaces(self.action_space, self.observation_space)

    def _drawn(self) -> list[Any] | None:
        """The spaces' streams, if they were seeded or drawn from in this process since they were last synchronised."""
        streams = self._streams()
        if streams == self._synced:
            return None
        self._synced = streams
        return streams

    def _put_streams(self, streams: list[Any]) -> None:
        randomness.restore_spaces(streams, self.action_space, self.observation_space)
        self._synced = streams
