"""The worker's side: environments in numbered slots, and the calls executed on them.

The vocabulary shared by an owner (``worker.py``) and its workers: a `Call`, its `CallOutcome`, a `Shipped` snapshot,
typed failures. Snapshots cross as their durable bytes, once: a host keeps the most recent ones that it took or
received, by id.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cloudpickle  # type: ignore[import-untyped]  # a requirement of Gymnasium
import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from sandboxgym import randomness
from sandboxgym.core import Snapshot, SnapshotSpec
from sandboxgym.errors import SnapshotError
from sandboxgym.task_env import EnvCard, Expert, Task, has_expert
from sandboxgym.workers.failures import CallTimedOut as CallTimedOut
from sandboxgym.workers.failures import EnvFailure as EnvFailure
from sandboxgym.workers.failures import FleetError as FleetError
from sandboxgym.workers.failures import HostCounts as HostCounts
from sandboxgym.workers.failures import WorkerDied as WorkerDied
from sandboxgym.workers.kept import Facts, Keeper, Keeping, SnapKey
from sandboxgym.wrappers import fork, restore, snapshot
from sandboxgym.wrappers.jobs import EnvJob, execute

AnyEnv = gym.Env[Any, Any]
MakeEnv = Callable[[], AnyEnv]


EXPERTS = 64
"""Number of experts kept per environment: demonstrations make one per episode and use it until the episode ends."""


class RemoteTraceback(Exception):
    """Remote traceback of an exception raised in a worker, set as its ``__cause__``."""

    def __str__(self) -> str:
        return f"in the worker:\n\n{self.args[0]}"


@dataclass(frozen=True, slots=True)
class Description:
    """Facts that an owner knows of an environment in a worker."""

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    metadata: dict[str, Any]
    spec: EnvSpec | None
    render_mode: str | None
    snapshot_spec: SnapshotSpec | None
    """Spec of the snapshots; None where the environment does not support them."""
    card: EnvCard
    """Card of the environment, empty where it has none."""
    offers: frozenset[str]
    """Methods of `TaskEnv` that the environment has, of ``num_tasks``, ``tasks`` and ``expert``."""


class Call(NamedTuple):
    """One method of `Host` for the environment in one slot."""

    slot: int
    method: str
    args: tuple[Any, ...] = ()


class CallOutcome(NamedTuple):
    """Result of a call: the value that it returned, or the exception that it raised."""

    value: Any
    error: BaseException | None = None

    def get(self) -> Any:
        """Return the value, or raise the exception."""
        if self.error is not None:
            raise self.error
        return self.value


class Shipped(NamedTuple):
    """A snapshot in transit between an owner and a worker: its bytes, the object, or only the key of a kept one."""

    key: SnapKey | None
    data: bytes | None = None
    handle: Any = None
    facts: Facts | None = None
    """Facts for the owner about a snapshot that the worker keeps."""
    stored: bool = False
    """True if the store has the snapshot, so that a worker reads it there."""


class Executed(NamedTuple):
    """Results of `Host.execute`: those of an `EnvResult`, its snapshot in transit, and the spaces' random streams.

    The streams are those at the snapshot or the restore; None where there was neither.
    """

    begun: Any
    shipped: Shipped | None
    stepped: Any
    capturing: float
    stepping: float
    streams: Any


class NotKept(Exception):
    """The worker does not keep, or no longer keeps, the snapshot named by its key only."""


def snapshot_key(snap: Any) -> SnapKey | None:
    """Key of a `Snapshot`; None for a third party's handle, which is shipped whole each time."""
    return (snap.id, len(snap.layers)) if isinstance(snap, Snapshot) else None


def env_maker(env: str | EnvSpec | MakeEnv, **kwargs: Any) -> MakeEnv:
    """A function that makes the environment in any process: ``gym.make`` of an id or a spec, or a given factory.

    An id registered in this process only (not by a module that a worker imports) goes along as its spec.
    """
    if not isinstance(env, (str, EnvSpec)):
        return functools.partial(env, **kwargs) if kwargs else env
    if isinstance(env, str) and ":" not in env:
        env = gym.spec(env)
    return functools.partial(gym.make, env, **kwargs)


class Host:
    """The environments of one worker, on which calls are executed.

    Args:
        keep: number of snapshots kept, least recently used first out.
        ships: snapshots leave as bytes (another process), not as objects.
    """

    def __init__(self, *, keep: int, ships: bool) -> None:
        self._envs: dict[int, AnyEnv] = {}
        self._makes: dict[int, MakeEnv] = {}
        self._rows: dict[int, dict[str | None, Sequence[Task]]] = {}
        self._experts: dict[int, OrderedDict[int, Expert]] = {}
        self._kept: OrderedDict[SnapKey, tuple[Snapshot, int]] = OrderedDict()
        """Snapshots, with the bytes of their durable forms; 0 where these are not known."""
        self._keep = keep
        self._ships = ships
        self._keeper: Keeper | None = None
        self._counted: Counter[str] = Counter()
        self._since: dict[int, int] = {}
        """Steps in a slot since a snapshot was given to the keeper to write; none since a reset."""

    def perform(self, call: Call) -> Any:
        """Execute one call."""
        return getattr(self, call.method)(call.slot, *call.args)

    def counts(self) -> HostCounts:
        """Counts of what the worker did so far, and holds now."""
        kept, nbytes, written = len(self._kept), sum(size for _, size in self._kept.values()), 0
        if self._keeper is not None:
            held, held_bytes, written = self._keeper.counts()
            kept, nbytes = kept + held, nbytes + held_bytes
        return HostCounts(**self._counted, written=written, environments=len(self._envs), kept=kept, kept_bytes=nbytes)

    def make(self, slot: int, make: MakeEnv, keeping: Keeping | None = None) -> Description:
        """Make a new environment in the slot, and close the one that was there.

        With ``keeping`` the worker's snapshots stay here from now on.
        """
        if keeping is not None and self._keeper is None:
            self._keeper = Keeper(keeping)
        with contextlib.suppress(Exception):  # of one that is done with
            self.close(slot)
        self._makes[slot] = make
        env = self._envs[slot] = make()
        self._counted["created"] += 1
        try:
            spec = snapshot_spec_of(env)
        except AttributeError:
            spec = None
        card = getattr(env.unwrapped, "card", None)
        return Description(
            observation_space=env.observation_space,
            action_space=env.action_space,
            metadata=env.metadata,
            spec=env.spec,
            render_mode=env.render_mode,
            snapshot_spec=spec,
            card=card if isinstance(card, EnvCard) else EnvCard(),
            offers=frozenset(offers_of(env)),
        )

    def reset(self, slot: int, seed: int | None, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        """See ``gymnasium.Env.reset``."""
        self._since.pop(slot, None)
        self._counted["resets"] += 1
        return self._envs[slot].reset(seed=seed, options=options)

    def step(self, slot: int, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """See ``gymnasium.Env.step``."""
        self._count_step(slot)
        return self._envs[slot].step(action)

    def step_all(self, actions: Sequence[Any]) -> tuple[list[Any], dict[int, Exception]]:
        """`step` of the slots 0, 1, …, each with its action: transitions; None and an exception where it failed."""
        envs = self._envs
        found: list[Any] = []
        failed: dict[int, Exception] = {}
        for slot, action in enumerate(actions):
            try:
                found.append(envs[slot].step(action))
            except Exception as error:  # the environment's: the others are stepped all the same
                failed[slot] = error
                found.append(None)
        self._counted["steps"] += len(found)
        for slot in self._since:
            self._since[slot] += slot < len(found)
        return found, failed

    def snapshot(self, slot: int, streams: bool = False, drawn: Any = None, dropped: Sequence[SnapKey] = ()) -> Any:
        """Capture the whole stack, with ``streams`` also the present random streams of the spaces.

        ``drawn`` are those streams as they are on the owner's side, where the owner has drawn from them; ``dropped``
        are snapshots that the owner needs no more.
        """
        self._drop(dropped)
        env = self._envs[slot]
        self._put_streams(env, drawn)
        shipped = self._ship(slot, snapshot(env))
        return (shipped, self.streams(slot)) if streams else shipped

    def restore(self, slot: int, shipped: Shipped, seed: int | None, streams: bool = False) -> Any:
        """Return to a captured state: its (observation, info), with ``streams`` also the spaces' random streams."""
        self._counted["restores"] += 1
        started = restore(self._envs[slot], self._receive(shipped), seed=seed)
        return (started, self.streams(slot)) if streams else started

    def fork(self, slot: int, slots: Sequence[int], seed: int | None, streams: Any) -> None:
        """Fork children of the environment into new slots."""
        self._put_streams(self._envs[slot], streams)
        self._envs.update(zip(slots, fork(self._envs[slot], len(slots), seed=seed), strict=True))
        self._counted["created"] += len(slots)

    def streams(self, slot: int) -> Any:
        """The random streams of the environment's spaces."""
        env = self._envs[slot]
        return randomness.capture_spaces(env.action_space, env.observation_space)

    def execute(
        self,
        slot: int,
        reset: tuple[int | None, dict[str, Any] | None] | None,
        shipped: Shipped | None,
        seed: int | None,
        drawn: Any,
        capture: bool,
        step: tuple[Any] | None,
        dropped: Sequence[SnapKey] = (),
    ) -> Executed:
        """Execute an `sandboxgym.tree.EnvJob`: reset or restore, snapshot, step, each if it is asked for.

        Args:
            slot: of the environment.
            reset: seed and options of a reset.
            shipped: snapshot of a restore.
            seed: of the restore.
            drawn: as of `snapshot`.
            capture: take a snapshot.
            step: the action of a step.
            dropped: snapshots that the owner needs no more.

        Raises:
            NotKept: of the snapshot to restore, before anything else was done.
        """
        if dropped:
            self._drop(dropped)
        env = self._envs[slot]
        self._put_streams(env, drawn)
        if reset is not None:
            self._since.pop(slot, None)
        if step is not None and reset is None and shipped is None and not capture:  # most jobs of a rollout
            began = time.perf_counter()
            stepped = env.step(*step)
            self._count_step(slot)
            return Executed(None, None, stepped, 0.0, time.perf_counter() - began, None)
        snap = None if shipped is None else (self._receive(shipped), seed)
        done = execute(EnvJob(env, reset=reset, restore=snap, capture=capture, step=step))
        self._counted["resets"] += reset is not None
        self._counted["restores"] += snap is not None
        streams = self.streams(slot) if capture or snap is not None else None
        taken = self._ship(slot, done.snap) if capture else None
        if step is not None:
            self._count_step(slot)
        return Executed(done.begun, taken, done.stepped, done.capturing, done.stepping, streams)

    def render(self, slot: int) -> Any:
        """See ``gymnasium.Env.render``."""
        return self._envs[slot].render()

    def attribute(self, slot: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An attribute of the outermost layer that has it, or the result of calling it if it is callable."""
        value = self._envs[slot].get_wrapper_attr(name)
        return value(*args, **kwargs) if callable(value) else value

    def task_count(self, slot: int, split: str | None) -> int:
        """Number of rows of ``env.tasks(split)``."""
        return len(self._tasks(slot, split))

    def task_row(self, slot: int, split: str | None, position: int) -> tuple[str, str]:
        """Id and type of a row of ``env.tasks(split)``."""
        row = self._tasks(slot, split)[position]
        return row.id, row.type

    def task_instruction(self, slot: int, split: str | None, position: int) -> str:
        """Instruction of a row of ``env.tasks(split)``."""
        return self._tasks(slot, split)[position].instruction

    def expert(self, slot: int, options: dict[str, Any]) -> int:
        """Make a player for demonstrations; returns its number."""
        base: Any = self._envs[slot].unwrapped
        players = self._experts.setdefault(slot, OrderedDict())
        number = 1 + max(players, default=0)
        remember(players, number, base.expert(**options), EXPERTS)
        return number

    def expert_call(self, slot: int, number: int, method: str, observation: Any) -> tuple[Any, bool]:
        """Result of an expert's ``reset`` or ``act``, and whether its last action was a deliberate mistake."""
        players = self._experts.get(slot)
        player = players.get(number) if players is not None else None
        if player is None:
            raise LookupError(f"this expert is gone: expected one of the last {EXPERTS} of its environment")
        result = getattr(player, method)(observation)
        return result, player.noisy

    def run(
        self,
        slot: int,
        run: bytes | Callable[..., Any],
        shipped: Shipped | None,
        seed: int | None,
        options: dict[str, Any] | None,
    ) -> Any:
        """Restore or reset, then call ``run(env, observation, info)``. An environment that fails then is made anew."""
        function = cloudpickle.loads(run) if isinstance(run, bytes) else run
        snap = None if shipped is None else self._receive(shipped)

        def start() -> Any:
            env = self._envs[slot]
            return env.reset(seed=seed, options=options) if snap is None else restore(env, snap, seed=seed)

        try:
            started = start()
        except SnapshotError:
            raise
        except Exception:  # what an earlier job left behind
            self.make(slot, self._makes[slot])
            started = start()
        return function(self._envs[slot], *started)

    def close(self, slot: int) -> None:
        """Close the slot's environment, if there is one."""
        env = self._envs.pop(slot, None)
        self._rows.pop(slot, None)
        self._experts.pop(slot, None)
        if env is not None:
            env.close()

    def close_all(self) -> None:
        """Close every environment, even if closing one of them failed."""
        for slot in list(self._envs):
            with contextlib.suppress(Exception):  # of an environment: the others are closed all the same
                self.close(slot)
        if self._keeper is not None:
            self._keeper.close()
        self._kept.clear()

    def _tasks(self, slot: int, split: str | None) -> Sequence[Task]:
        """Rows of a split, kept: reading a split may take long, and its rows are asked for one by one."""
        rows = self._rows.setdefault(slot, {})
        if split not in rows:
            base: Any = self._envs[slot].unwrapped
            rows[split] = base.tasks(split)
        return rows[split]

    def store_now(self, slot: int, key: SnapKey) -> None:
        """Write a snapshot that this worker keeps to the store, so that another worker can read it."""
        if self._keeper is None:
            raise NotKept(key)
        self._keeper.store_now(key)

    def store_all(self, slot: int) -> None:
        """Write all snapshots that this worker keeps to the store, before it ends."""
        if self._keeper is not None:
            self._keeper.store_all()

    def _count_step(self, slot: int) -> None:
        self._counted["steps"] += 1
        if slot in self._since:
            self._since[slot] += 1

    def _drop(self, keys: Sequence[SnapKey]) -> None:
        if self._keeper is not None and keys:
            self._keeper.drop(list(keys))

    def _ship(self, slot: int, snap: Any) -> Shipped:
        self._counted["snapshots"] += 1
        key = snapshot_key(snap)
        if key is None or not self._ships:
            return Shipped(key, handle=snap)
        if self._keeper is not None:
            due = self._since.get(slot, self._keeper.keeping.every) >= self._keeper.keeping.every
            if due:
                self._since[slot] = 0
            self._keeper.keep(key, snap, durable=due)
            return Shipped(key, facts=Facts(snap.header, snap.layers, snap.id, snap.parent))
        data = snap.to_bytes()
        remember(self._kept, key, (snap, len(data)), self._keep)
        return Shipped(key, data=data)

    def _receive(self, shipped: Shipped) -> Any:
        key, data, handle = shipped.key, shipped.data, shipped.handle
        if handle is not None or key is None:
            return handle
        if self._keeper is not None and (kept := self._keeper.get(key)) is not None:
            return kept
        size = 0
        if data is not None:
            snap, size = Snapshot.from_bytes(data), len(data)
        elif key in self._kept:
            snap, size = self._kept[key]
        elif shipped.stored and self._keeper is not None:
            snap = self._keeper.load(key)
        else:
            raise NotKept(key)
        remember(self._kept, key, (snap, size), self._keep)
        return snap

    @staticmethod
    def _put_streams(env: AnyEnv, streams: Any) -> None:
        if streams is not None:
            randomness.restore_spaces(streams, env.action_space, env.observation_space)


def offers_of(env: AnyEnv) -> Iterator[str]:
    """Names of the parts of `TaskEnv` that an environment has, without computing any of them."""
    for name in ("num_tasks", "tasks"):
        if inspect.getattr_static(env.unwrapped, name, None) is not None:
            yield name
    if has_expert(env):
        yield "expert"


def snapshot_spec_of(env: AnyEnv) -> SnapshotSpec:
    """Spec of the snapshots of a stack's base environment; raises AttributeError where it has none."""
    spec: SnapshotSpec = env.get_wrapper_attr("snapshot_spec")
    return spec


def remember(kept: OrderedDict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Put into a least-recently-used mapping; owner and worker do the same, so their contents agree."""
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > most:
        kept.popitem(last=False)
