"""The vector environment: its calls on many environments at once, and their recovery when a worker dies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self, TypeVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from sandboxgym.core import Snapshot, SnapshotSpec
from sandboxgym.errors import ResetNeeded, SnapshotError, SnapshotNotSupported, SnapshotReleased
from sandboxgym.randomness import sibling_seed
from sandboxgym.spaces import Unicode
from sandboxgym.workers.env_host import (
    Call,
    CallOutcome,
    CallTimedOut,
    Description,
    EnvFailure,
    MakeEnv,
    NotKept,
    WorkerDied,
    env_maker,
)
from sandboxgym.workers.infos import Infos, batch_all, batch_infos
from sandboxgym.workers.vector.batched import actions_of, batched, chosen_by, per_env, placeholder
from sandboxgym.workers.vector.exchange import exchange
from sandboxgym.workers.worker import InlineWorker, Mode, Worker, close_workers, make_worker

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
T = TypeVar("T")


class EpisodeOver(Exception):
    """Step of an environment whose episode is over, that was never reset, or that failed."""


class NotEnoughIdle(Exception):
    """Raised if fewer environments are idle than forks were requested."""


class _Durable(NamedTuple):
    """Snapshot to which an environment returns when its worker dies."""

    snap: Any
    seed: int | None


class SnapshotVectorEnv(VectorEnv[Any, Any, Any]):
    """``n`` environments, stepped together.

    Args:
        env_fns: one function per environment. In processes they are sent by cloudpickle, so lambdas and functions of
            the main script work; see `make` for environments with an id.
        mode: ``"sync"`` steps one after the other in this thread, which is fastest while a step takes less than about a
            millisecond; ``"thread"`` pays where steps wait (containers, network); ``"process"`` where they compute;
            ``"ray"`` has workers on a Ray cluster, as of `EnvPool`.
        workers: threads or processes, each with an equal share of the environments, stepped in turn (default: one per
            environment; one for all with ``"sync"``).
        timeout: seconds that the step of one environment may take; None: no limit. In mode ``"sync"`` neither this
            nor ``reset_timeout`` can be set.
        reset_timeout: seconds that reset, snapshot and restore may take (default: 10 × ``timeout``).
        create_timeout: seconds that starting a worker and making an environment may take.
        checkpoint_every: number of steps of an environment between two snapshots, the first at its reset, to which it
            goes back if its worker dies; 0: none are taken.
        autoreset: reset finished environments in the same step, as Gymnasium's ``AutoresetMode.SAME_STEP`` does, with
            the end in ``infos["final_obs"]`` and ``infos["final_info"]``.
        on_error: ``"report"`` failures, see below; or ``"raise"`` the first one, once all environments have answered.

    A failed environment gets ``truncated=True``, reward 0, its last observation, and the exception in
    ``infos["error"]`` and ``errors``; it is idle until it is reset or restored. If its worker died and it went back to
    a snapshot, the observation and info are that moment's, ``infos["recovered"]`` is the snapshot's id, and it can be
    stepped on at once by a caller who takes note; one who does not sees an episode that was cut off. All environments
    of a dead worker are reported, also those that were not asked to do anything.

    Environments left out by a mask keep their last observation, reward and flags in the batch; ``infos`` are only of
    those that were asked (Gymnasium's ``_key`` masks say so). ``infos_list`` has every environment's own last info.

    Raises:
        Exception: whatever making an environment raised; all are closed then.
        ValueError: spaces differ between environments, or arguments do not fit.

    Example:
        >>> vec = SnapshotVectorEnv.make("sandboxgym/ALFWorld-v0", 3)
        >>> observations, infos = vec.reset(seed=0)
        >>> snap = vec.snapshot([0])[0]
        >>> observations, rewards, terminated, truncated, infos = vec.step(["look", "inventory", "look"])
        >>> observations, infos = vec.restore({1: snap, 2: snap}, seeds=7)
        >>> vec.idle([1, 2])
        >>> vec.fork(snap, 2, seed=7)
        [1, 2]
        >>> vec.close()
    """

    _rewards: list[float]
    _terminations: list[bool]
    _truncations: list[bool]
    _active: list[bool]

    def __init__(
        self,
        env_fns: Sequence[MakeEnv],
        mode: Mode = "sync",
        *,
        workers: int | None = None,
        timeout: float | None = None,
        reset_timeout: float | None = None,
        create_timeout: float | None = 300.0,
        checkpoint_every: int = 0,
        autoreset: bool = False,
        on_error: Literal["report", "raise"] = "report",
    ) -> None:
        self.num_envs = n = len(env_fns)
        count = (1 if mode == "sync" else n) if workers is None else workers
        if n < 1 or not 1 <= count <= n:
            raise ValueError(f"expected at least one environment and 1 to {n} workers, found workers={workers}")
        if mode == "sync" and (timeout is not None or reset_timeout is not None):
            raise ValueError("a timeout needs mode='thread' or 'process': mode='sync' cannot interrupt a step")
        if on_error not in ("report", "raise"):
            raise ValueError(f"expected on_error to be 'report' or 'raise', found {on_error!r}")
        self.mode = mode
        self._makes = list(env_fns)
        self._timeout = timeout
        self._reset_timeout = reset_timeout if reset_timeout is not None or timeout is None else 10 * timeout
        self._create_timeout = create_timeout
        self._checkpoint_every = checkpoint_every
        self._autoreset = autoreset
        self._on_error = on_error
        self.errors: dict[int, EnvFailure] = {}
        self._durable: list[_Durable | None] = [None] * n
        self._since_durable = [0] * n
        self._workers: list[Worker] = [make_worker(mode) for _ in range(count)]
        self._of = [self._workers[index * count // n] for index in range(n)]
        self._generations = [0] * n
        self._known = [False] * n
        try:
            described = self._make_all()
        except BaseException:
            close_workers(self._workers)
            raise
        self._describe(described)

    @classmethod
    def make(cls, env: str | EnvSpec | MakeEnv, num_envs: int, mode: Mode = "sync", **kwargs: Any) -> Self:
        """Make ``num_envs`` equal environments.

        Args:
            env: an id, an ``EnvSpec`` or a factory.
            num_envs: number of environments.
            mode: see the class.
            **kwargs: of the class; all others are given to ``gym.make``, or to the factory.
        """
        own = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        return cls([env_maker(env, **kwargs)] * num_envs, mode, **own)

    # The Gymnasium API, with masks.

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
        mask: Any = None,
    ) -> tuple[Any, Infos]:
        """Reset all environments, or those in the mask.

        Args:
            seed: an int means ``seed + i`` for environment i, as in Gymnasium; or one per environment.
            options: for every environment, or one dict (or None) an environment.
            mask: (n,) bool: which to reset. Gymnasium's ``options={"reset_mask": …}`` means the same.
        """
        if isinstance(options, Mapping) and "reset_mask" in options:
            if mask is not None:
                raise ValueError("expected mask or options['reset_mask'], found both")
            options = dict(options)
            mask = options.pop("reset_mask")
        super().reset(seed=seed if isinstance(seed, int) else None)
        seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, (int, np.integer)) else seed
        each = per_env(options, "options", self.num_envs, single=(Mapping,))
        chosen = chosen_by(mask, self.num_envs)
        infos = self._reset(chosen, per_env(seeds, "seed", self.num_envs), each)
        return self._observe(), self._batched(infos)

    def step(self, actions: Any, mask: Any = None) -> tuple[Any, Floats, Bools, Bools, Infos]:
        """Step all environments, or those in the mask.

        Args:
            actions: one per environment; those of environments left out are not looked at.
            mask: (n,) bool: which to step, such as `active`.

        Raises:
            EpisodeOver: one of them is not `active`; none was stepped.
        """
        if mask is None and self._all_here():
            return self._step_here(self._each(actions))
        chosen = chosen_by(mask, self.num_envs)
        over = [index for index in chosen if not self._active[index]]
        if over:
            raise EpisodeOver(
                f"environments {over} are idle (finished, failed or never reset): reset or restore them, or step the "
                "others by mask=vec.active"
            )
        each = self._each(actions)
        outcomes, infos = self._perform({index: Call(index, "step", (each[index],)) for index in chosen}, self._timeout)
        for index, outcome in outcomes.items():
            if outcome.error is None:
                observation, reward, terminated, truncated, infos[index] = outcome.value
                self._put(index, observation, float(reward), bool(terminated), bool(truncated), infos[index])
                self._active[index] = not (terminated or truncated)
                self._since_durable[index] += 1
            else:
                self._fail(index, "step", outcome.error, infos)
        if self._checkpoint_every:
            due = [i for i in chosen if self._active[i] and self._since_durable[i] >= self._checkpoint_every]
            self._checkpoint(due, infos)
        rewards = np.array(self._rewards, np.float64)
        terminated, truncated = np.array((self._terminations, self._truncations), np.bool_)
        if self._autoreset:
            ended = [int(i) for i in np.flatnonzero(terminated | truncated) if i in infos]
            finals = {i: {"final_obs": self._observations[i], "final_info": infos[i]} for i in ended}
            infos.update({i: {**info, **finals[i]} for i, info in self._reset(ended).items()})
        return self._observe(), rewards, terminated, truncated, self._batched(infos)

    def _all_here(self) -> bool:
        """True if every environment can be stepped in this thread, and what follows a step is the step alone."""
        worker = self._workers[0]
        return (
            len(self._workers) == 1
            and isinstance(worker, InlineWorker)
            and worker.alive
            and not (self._checkpoint_every or self._autoreset or self.closed)
            and self._generations.count(worker.generation) == self.num_envs
            and all(self._active)
        )

    def _each(self, actions: Any) -> Sequence[Any]:
        if type(actions) is list and len(actions) == self.num_envs and not self._composed:
            return [*actions]  # an environment may change the caller's
        return actions_of(actions, self.single_action_space, self.action_space, self.num_envs)

    def _step_here(self, actions: Sequence[Any]) -> tuple[Any, Floats, Bools, Bools, Infos]:
        """Step all environments, one after the other in this thread: `step` without what only workers need."""
        worker = self._workers[0]
        assert isinstance(worker, InlineWorker)
        transitions, failed = worker.step_all(actions)
        for index in failed:
            transitions[index] = (self._observations[index], 0.0, False, True, self._infos[index])
        observations, rewards, terminated, truncated, told = zip(*transitions)
        gained, ends = np.fromiter(rewards, np.float64, len(rewards)), np.zeros((2, len(rewards)), np.bool_)
        if ended := any(terminated) or any(truncated):
            ends[:] = terminated, truncated
        self._observations[:], self._infos[:], self._rewards = observations, told, gained.tolist()
        self._terminations, self._truncations = ends.tolist()
        if ended:
            self._active = [not (one or other) for one, other in zip(self._terminations, self._truncations)]
        if failed:
            infos = dict(enumerate(told))
            for index, error in failed.items():
                self._fail(index, "step", error, infos)
            batch = self._batched(infos)
        else:
            batch = batch_all(told)
        return self._observe(), gained, *ends, batch

    def render(self) -> tuple[Any, ...]:
        """Rendered frames of every environment."""
        return tuple(self._get({i: Call(i, "render") for i in range(self.num_envs)}, self._timeout).values())

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """An attribute of every environment, or the results of calling it with these arguments."""
        calls = {i: Call(i, "attribute", (name, args, kwargs)) for i in range(self.num_envs)}
        return tuple(self._get(calls, self._timeout).values())

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """An attribute of every environment: `call` without arguments."""
        return self.call(name)

    def close_extras(self, **kwargs: Any) -> None:
        """End the workers; called once by ``close``."""
        close_workers(self._workers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        """Do nothing: workers end with their owner; Gymnasium's version would close during interpreter shutdown."""

    # What Gymnasium does not have.

    @property
    def active(self) -> Bools:
        """(n,) bool: environments that can be stepped: reset or restored, and neither finished nor failed since."""
        return np.array(self._active, np.bool_)

    @property
    def infos_list(self) -> list[dict[str, Any]]:
        """Last info of every environment."""
        return list(self._infos)

    @property
    def pids(self) -> list[int | None]:
        """Process id of each environment's worker; None in this process, or while there is none."""
        return [worker.pid for worker in self._of]

    @property
    def observations(self) -> Any:
        """Batch of the last observations."""
        return self._observe()

    @property
    def snapshot_spec(self) -> SnapshotSpec:
        """Spec of the environments' snapshots.

        Raises:
            SnapshotNotSupported: they have none.
        """
        if self._snapshot_spec is None:
            raise SnapshotNotSupported("the environments have no snapshots: derive them from sandboxgym.SnapshotEnv")
        return self._snapshot_spec

    def snapshot(self, indices: Sequence[int] | None = None) -> list[Any]:
        """Capture environments, finished ones too.

        Args:
            indices: which (default: all).

        Returns:
            One `Snapshot` each; the same as `sandboxgym.snapshot` of such an environment gives.

        Raises:
            ResetNeeded: one was never reset.
            WorkerDied, CallTimedOut: its environments went back to their last snapshots, as `errors` says of each.
            Exception: whatever the capture raised.
        """
        chosen = list(range(self.num_envs)) if indices is None else [self._index(i) for i in indices]
        self._check_known(chosen)
        taken = self._get({i: Call(i, "snapshot") for i in chosen}, self._reset_timeout)
        snaps = {i: self._of[i].receive(shipped) for i, shipped in taken.items()}
        for index, snap in snaps.items():
            self._keep_durable(index, snap, None)
        return [snaps[index] for index in chosen]

    def restore(
        self, snaps: Mapping[int, Any], seeds: int | Mapping[int, int | None] | None = None
    ) -> tuple[Any, Infos]:
        """Restore environments to captured states, whatever state they are in.

        Args:
            snaps: snapshot for each index; one snapshot may go to many.
            seeds: None restores the random streams too; a seed an index, or one int S, of which environment i gets
                ``sibling_seed(S, i)``.

        Returns:
            The batch of observations (of all environments) and the infos of those restored.
        """
        each = {self._index(i): snap for i, snap in snaps.items()}
        if isinstance(seeds, Mapping):
            given = {self._index(i): seed for i, seed in seeds.items()}
        else:
            given = {} if seeds is None else {i: sibling_seed(int(seeds), i) for i in each}
        infos = self._restore(each, given)
        return self._observe(), self._batched(infos)

    def fork(self, snap: Any, k: int, *, seed: int | None = None) -> list[int]:
        """Fork ``k`` siblings of a captured state onto idle environments (not `active`), lowest index first.

        Their observations and infos are in `observations` and `infos_list`.

        Args:
            snap: of any of the environments, or of an equal one elsewhere.
            k: number of forks, at least 1.
            seed: None clones the random streams; sibling j gets ``sibling_seed(seed, j)``, as from ``env.fork``.

        Returns:
            The indices.

        Raises:
            NotEnoughIdle: fewer than k are idle; see `idle`. Nothing has changed.
            Exception: whatever a restore raised; the k environments are idle again.
        """
        if k < 1:
            raise ValueError(f"expected at least 1 fork, found k={k}")
        free = [index for index, active in enumerate(self._active) if not active]
        if len(free) < k:
            raise NotEnoughIdle(f"expected {k} idle environments to fork onto, found {len(free)}: {free}")
        chosen = free[:k]
        seeds = {} if seed is None else {index: sibling_seed(seed, j) for j, index in enumerate(chosen)}
        report, self._on_error = self._on_error, "report"
        try:
            self._restore(dict.fromkeys(chosen, snap), seeds)
        finally:
            self._on_error = report
        failed = [index for index in chosen if index in self.errors]
        if failed:
            for index in chosen:
                self._active[index] = False
            failure = self.errors[failed[0]]
            raise (failure.__cause__ if type(failure) is EnvFailure else None) or failure
        return chosen

    def idle(self, indices: Sequence[int]) -> None:
        """Give up the episodes of these environments: they can then be forked onto, but not stepped."""
        for index in [self._index(i) for i in indices]:
            self._active[index] = False

    # The mechanism.

    def _make_all(self) -> list[Description]:
        for worker in self._workers:
            worker.start()
        calls = {index: Call(index, "make", (make,)) for index, make in enumerate(self._makes)}
        outcomes, lost = exchange(calls, self._of, self._create_timeout if self.mode != "sync" else None)
        for error in lost.values():
            raise error
        self._generations = [worker.generation for worker in self._of]
        return [outcomes[index].get() for index in calls]

    def _describe(self, described: list[Description]) -> None:
        first = described[0]
        self.single_observation_space = copy.deepcopy(first.observation_space)
        self.single_action_space = copy.deepcopy(first.action_space)
        for index, other in enumerate(described):
            mine = (self.single_observation_space, self.single_action_space)
            if (other.observation_space, other.action_space) != mine:
                close_workers(self._workers)
                raise ValueError(
                    f"expected the spaces of environment 0, {mine}, found in environment {index} "
                    f"{(other.observation_space, other.action_space)}"
                )
        n = self.num_envs
        self._of_text = isinstance(self.single_observation_space, (spaces.Text, Unicode))
        self._composed = isinstance(self.single_action_space, (spaces.Tuple, spaces.Dict))
        self.observation_space = batch_space(self.single_observation_space, n)
        self.action_space = batch_space(self.single_action_space, n)
        mode = AutoresetMode.SAME_STEP if self._autoreset else AutoresetMode.DISABLED
        self.metadata = {**first.metadata, "autoreset_mode": mode}
        self.render_mode = first.render_mode
        self._snapshot_spec = first.snapshot_spec
        self._observations: list[Any] = [placeholder(self.single_observation_space) for _ in range(n)]
        self._infos: list[dict[str, Any]] = [{} for _ in range(n)]
        # Lists, of which arrays are made when they are returned: a step has less to do with them.
        self._rewards = [0.0] * n
        self._terminations, self._truncations, self._active = [False] * n, [False] * n, [False] * n

    def _reset(
        self, chosen: Sequence[int], seeds: Sequence[Any] | None = None, options: Sequence[Any] | None = None
    ) -> dict[int, Infos]:
        calls = {
            i: Call(i, "reset", (None if seeds is None else seeds[i], None if options is None else options[i]))
            for i in chosen
        }
        outcomes, infos = self._perform(calls, self._reset_timeout, again=lambda index: calls[index])
        for index, outcome in outcomes.items():
            if outcome.error is None:
                observation, infos[index] = outcome.value
                self._begin(index, observation, infos[index])
                self._durable[index] = None
            else:
                self._fail(index, "reset", outcome.error, infos)
        if self._checkpoint_every:
            self._checkpoint([i for i in chosen if self._active[i]], infos)
        return infos

    def _restore(self, snaps: Mapping[int, Any], seeds: Mapping[int, int | None]) -> dict[int, Infos]:
        def call(index: int) -> Call:
            return Call(index, "restore", (self._of[index].ship(snaps[index]), seeds.get(index)))

        for snap in snaps.values():
            if isinstance(snap, Snapshot) and snap.released:
                raise SnapshotReleased(f"{snap!r} cannot be used after release()")
        self._revive(list(snaps))  # before anything is shipped: what a dead worker held is not held any more
        outcomes, infos = self._perform({i: call(i) for i in snaps}, self._reset_timeout, again=call)
        for index, outcome in outcomes.items():
            if isinstance(outcome.error, NotKept):
                self._of[index].forget(snaps[index])
                more, others = self._perform({index: call(index)}, self._reset_timeout)
                infos.update(others)
                outcome = more.get(index, outcome)
            if outcome.error is None:
                observation, infos[index] = outcome.value
                self._begin(index, observation, infos[index])
                self._keep_durable(index, snaps[index], seeds.get(index))
            else:
                self._fail(index, "restore", outcome.error, infos)
        return infos

    def _begin(self, index: int, observation: Any, info: dict[str, Any]) -> None:
        self._put(index, observation, 0.0, False, False, info)
        self._active[index] = self._known[index] = True
        self._since_durable[index] = 0
        self.errors.pop(index, None)

    def _put(self, i: int, observation: Any, reward: float, terminated: bool, truncated: bool, info: Infos) -> None:
        self._observations[i], self._infos[i] = observation, info
        self._rewards[i], self._terminations[i], self._truncations[i] = reward, terminated, truncated

    def _fail(self, index: int, during: str, error: BaseException, infos: dict[int, Infos]) -> None:
        """Report a failure as the end of an episode."""
        failure = error
        if not isinstance(error, EnvFailure):
            failure = EnvFailure(f"environment {index} failed in {during}: {type(error).__name__}: {error}")
            failure.__cause__ = error
        assert isinstance(failure, EnvFailure)
        failure.index, failure.during = index, during
        if error.__cause__ is not None:
            failure.remote_traceback = str(error.__cause__)
        if during in ("reset", "restore") and not isinstance(error, SnapshotError):
            self._generations[index] = 0  # whatever is wrong with it, the next try is with a new one
        self.errors[index] = failure
        self._put(index, self._observations[index], 0.0, False, True, {**self._infos[index], "error": failure})
        self._active[index] = False
        infos[index] = {"error": failure}

    def _perform(
        self, calls: Mapping[int, Call], timeout: float | None, *, again: Callable[[int], Call] | None = None
    ) -> tuple[dict[int, CallOutcome], dict[int, Infos]]:
        """Execute calls, in all workers side by side.

        Args:
            calls: at most one per environment.
            timeout: seconds for each.
            again: makes the call anew for one more try after its worker died (not after a timeout).

        Returns:
            The outcomes, without those of workers that died, whose environments are all in the infos instead.
        """
        self._check_open()
        failures = self._revive(list(calls))
        calls = {index: call for index, call in calls.items() if index not in failures}
        outcomes, lost = exchange(calls, self._of, timeout)
        outcomes.update({index: CallOutcome(None, failure) for index, failure in failures.items()})
        infos: dict[int, Infos] = {}
        for index, error in lost.items():
            asked = [i for i in calls if self._of[i] is self._of[index]]
            for i in asked:
                outcomes.pop(i, None)
            if again is None or isinstance(error, CallTimedOut):
                infos.update(self._recover(index, calls[index].method, error))
                continue
            infos.update(self._recover(index, calls[index].method, error, leave_out=asked))
            more, others = self._perform({i: again(i) for i in asked}, timeout)
            outcomes.update(more)
            infos.update(others)
        return outcomes, infos

    def _get(self, calls: Mapping[int, Call], timeout: float | None) -> dict[int, Any]:
        """Values of calls whose results have no place for a failure: the first failure is raised."""
        outcomes, _ = self._perform(calls, timeout)
        for index in calls:
            if index not in outcomes:
                raise self.errors[index]
        return {index: outcomes[index].get() for index in calls}

    def _revive(self, indices: Sequence[int]) -> dict[int, BaseException]:
        """Remake environments whose worker was replaced; exceptions of those that cannot be made."""
        failures: dict[int, BaseException] = {}
        for index in indices:
            worker = self._of[index]
            if worker.alive and self._generations[index] == worker.generation:
                continue
            try:
                worker.call(index, "make", self._makes[index], timeout=self._create_timeout)
                self._generations[index] = worker.generation
            except Exception as error:  # whatever its constructor raises is reported as its failure
                failures[index] = error
        return failures

    def _recover(
        self, culprit: int, during: str, error: EnvFailure, *, leave_out: Sequence[int] = ()
    ) -> dict[int, Infos]:
        """Restart a dead worker and restore its environments to their last snapshots; the failures to report."""
        infos: dict[int, Infos] = {}
        worker = self._of[culprit]
        for index in (i for i in range(self.num_envs) if self._of[i] is worker):
            if index in leave_out or not (self._known[index] or index == culprit):
                continue
            own = error
            if index != culprit:
                own = WorkerDied(f"environment {index} was lost with its worker: {error}")
            durable = self._durable[index]
            self._fail(index, during, own, infos)
            self._known[index] = False
            if durable is None or (isinstance(durable.snap, Snapshot) and durable.snap.released):
                continue
            failed = self._revive([index])
            try:
                if index in failed:
                    raise failed[index]
                started = worker.restore(index, durable.snap, durable.seed, timeout=self._reset_timeout)
            except Exception as cause:  # the death of the worker is what is reported
                own.add_note(f"it could not be taken back to its last snapshot: {cause!r}")
                continue
            observation, info = started
            report = {**info, **infos[index], "recovered": durable.snap.id}
            self._begin(index, observation, report)
            self._truncations[index] = True
            self.errors[index] = own
            infos[index] = report
        return infos

    def _checkpoint(self, indices: Sequence[int], infos: dict[int, Infos]) -> None:
        outcomes, others = self._perform({i: Call(i, "snapshot") for i in indices}, self._reset_timeout)
        infos.update(others)
        for index, outcome in outcomes.items():
            if outcome.error is None:
                self._keep_durable(index, self._of[index].receive(outcome.value), None)
            else:
                self._fail(index, "snapshot", outcome.error, infos)

    def _keep_durable(self, index: int, snap: Any, seed: int | None) -> None:
        """Remember a snapshot by a copy that stays valid when the caller releases the original."""
        own = snap.layered(snap.layers) if isinstance(snap, Snapshot) else snap
        self._durable[index] = _Durable(own, seed)
        self._since_durable[index] = 0

    def _batched(self, infos: dict[int, Infos]) -> Infos:
        if self._on_error == "raise":
            for index in sorted(infos):
                if "error" in infos[index]:
                    raise infos[index]["error"]
        return batch_infos(infos, self.num_envs)

    def _observe(self) -> Any:
        return batched(self._observations, self.single_observation_space, text=self._of_text)

    def _index(self, index: int) -> int:
        if not isinstance(index, (int, np.integer)) or not 0 <= index < self.num_envs:
            raise IndexError(f"expected an environment from 0 to {self.num_envs - 1}, found {index!r}")
        return int(index)

    def _check_known(self, indices: Sequence[int]) -> None:
        for index in indices:
            if not self._known[index]:
                raise ResetNeeded(f"environment {index} has no state: reset or restore it first")

    def _check_open(self) -> None:
        if self.closed:
            raise gym.error.ClosedEnvironmentError("this vector environment was closed")


_OPTIONS = (
    "workers",
    "timeout",
    "reset_timeout",
    "create_timeout",
    "checkpoint_every",
    "autoreset",
    "on_error",
)
