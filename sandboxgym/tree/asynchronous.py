"""Asynchronous rollouts: every path advances by itself, so that none waits for the slowest.

1. The trees are those of `sandboxgym.tree.rollout` with the same arguments, the order of paths and children and the
   numbers of siblings included, whatever takes how long: all random streams are keyed by path, and what depends on the
   order of events (`in_lockstep_order`) is put into the order that lockstep would have had.
2. That holds for schedules whose answers depend on the path they are asked about: on its nodes, its edges and the
   states above them, on the task, and on what the schedule itself noted about these. Other paths of the tree
   (``tree.paths``, the children and the width of a node) grow in an order of their own.
3. One call at a time is under way on an environment, in a thread. An environment is never given back, and a rollout
   never ends, in the middle of a call; nothing can interrupt one that hangs, so environments need timeouts of their own
   (``timeout`` of `sandboxgym.workers.remote.RemoteEnv` and `sandboxgym.workers.pool.PooledEnvs`).
   A ``timeout`` of the rollout drops the paths that have not ended, and waits for these calls, too.
4. After an error or a cancellation all environments are back, all snapshots released, all threads and tasks gone.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import gymnasium as gym

from sandboxgym.tree.envs import EnvSource, described, guarded, logger
from sandboxgym.tree.live import Acting, CapturedNode, LivePath, Reset
from sandboxgym.tree.lockstep import Driver, same
from sandboxgym.tree.nodes import Action, Edge, Node, PathKey, RolloutTree
from sandboxgym.tree.policies import Clock, Context, Failure, Look
from sandboxgym.tree.schedules import Schedule
from sandboxgym.wrappers.jobs import Begun

T = TypeVar("T")

Identity = tuple[int, PathKey]
"""(task index, path key), as in `Context.path`."""
Request = tuple[int, bool, Node, int]
"""Turn of a path, True if the path had ended by then, the node, and the number of siblings requested there."""


class AsyncPolicy(Protocol):
    """Protocol of asynchronous policies: decide for one path; paths are asked about side by side.

    Any ``async def policy(context)`` is one. Like a `Policy` it may have a method ``release(path)``. A call that is not
    needed any more, because its path was dropped or the rollout ends, is cancelled.
    """

    async def __call__(self, context: Context, /) -> Action | None:
        """One action; None ends the path as truncated (no room left to act)."""


@dataclass(slots=True, eq=False)
class _Walk:
    """The course of one live path."""

    run: LivePath
    start: CapturedNode
    task: asyncio.Task[Any]
    turns: int = 0
    """Decisions that the policy was asked for."""
    thinking: bool = False
    """The policy is being asked."""
    cancelled: int = 0
    """Number of times that the task was cancelled because the path was dropped."""
    broken: Exception | None = None
    """Exception of the environment when it was captured while the policy was asked."""
    point: CapturedNode | None = None
    """State being captured for the present step."""
    departed: bool = False
    """True if it has made a decision of its own and needs nothing of the path that it was forked off."""


class Asynchronous(Driver):
    """State of one call of `rollout_async`: the live paths, and what waits for an environment."""

    def __init__(
        self,
        envs: EnvSource,
        policy: AsyncPolicy,
        schedule: Schedule,
        seed: Sequence[int],
        clock: Clock,
        retries: int,
        failures: list[Failure],
        look: Look | None = None,
        capture_every: int = 0,
        timeout: float | None = None,
        *,
        max_live: int,
    ) -> None:
        super().__init__(envs, policy, schedule, seed, clock, retries, failures, look, capture_every, timeout)
        if max_live < 1:
            raise ValueError(f"expected max_live to be at least 1, found {max_live}")
        self.policy, self.max_live = policy, max_live
        self.walks: dict[Identity, _Walk] = {}
        self.resets: deque[tuple[Any, int]] = deque()
        self.roots: dict[int, int] = {}
        self.trees: dict[int, RolloutTree] = {}
        self.asked: dict[Identity, list[Request]] = {}
        self.dropped: set[Identity] = set()
        self.failed: list[tuple[Failure, int]] = []
        self.busy = self.starting = 0
        self.stopping = self.over = False
        self.timer: asyncio.Task[None] | None = None
        self.waits = _Waits()
        self.given: list[Future[None]] = []
        # Sources of environments are not made for several threads, and to make an environment may take long.
        self.source = ThreadPoolExecutor(1, thread_name_prefix="sandboxgym-rollout-source")
        threads = max(1, min(max_live, getattr(envs, "threads", max_live)))
        self.calls = ThreadPoolExecutor(threads, thread_name_prefix="sandboxgym-rollout")

    async def run(self, tasks: Sequence[Any], indices: Sequence[int]) -> list[RolloutTree]:
        """Run the rollout; the trees, in the order of the tasks."""
        self.roots = {index: self.schedule.roots_of(index) for index in indices}
        self.resets.extend(zip(tasks, indices, strict=True))
        errors: Sequence[BaseException] = ()
        complete = False
        try:
            async with asyncio.TaskGroup() as self.group:
                self.fill()
                if self.timeout is not None and self.busy:
                    self.timer = self.group.create_task(self.expire(self.timeout))
            complete = True
        except BaseExceptionGroup as group:
            errors = group.exceptions
        finally:
            self.close()
            if not complete:
                self.failures += [failure for failure, _ in self.failed]
        if errors:
            raise errors[0]
        return self.in_lockstep_order(indices)

    def close(self) -> None:
        """Give back what is left over after an error; otherwise there is nothing."""
        self.calls.shutdown()  # at once: all calls have ended
        self.source.shutdown()
        for env in list(self.taken.values()):
            super().give(env)
        points = [point for _, point in self.waiting]
        for walk in self.walks.values():
            points += [*walk.run.points, *walk.run.anchors, *([walk.point] if walk.point is not None else [])]
        for point in points:
            if point.snap is not None:
                point.snap.release()
        self.waiting, self.walks = [], {}
        for future in self.given:
            future.result()

    def fill(self) -> None:
        """Start as many paths and resets as wait, up to the number of environments."""
        while not self.stopping and self.busy < self.max_live and self.starting < len(self.waiting) + len(self.resets):
            self.busy += 1
            self.starting += 1
            self.group.create_task(self.start())

    async def start(self) -> None:
        """Take an environment, and with it the path that has waited longest, or else a task to reset to."""
        try:
            env = await self.obtained()
            self.starting -= 1
            if env is None:
                pass
            elif self.waiting:
                await self.walk(*self.waiting.pop(0), env)
            elif self.resets:
                await self.reset(*self.resets.popleft(), env)
            else:  # dropped meanwhile
                self.give(env)
        except BaseException:
            self.stopping = True
            raise
        self.busy -= 1
        self.fill()
        if not self.busy and self.timer is not None:
            self.timer.cancel()

    async def expire(self, seconds: float) -> None:
        """Wait for the deadline, then drop what has not ended.

        Raises:
            TimeoutError: where there are no ``retries``.
        """
        await _passed(seconds)
        self.over = True
        try:
            if not self.retries:
                raise self.late
            for run in self.live_paths():
                self.drop_late(run)
            self.drop_waiting()
            self.leave_out([index for _, index in self.resets])
            self.resets.clear()
        except BaseException:
            self.stopping = True
            raise

    async def reset(self, task: Any, index: int, env: gym.Env[Any, Any]) -> None:
        """Reset to a task and capture the root, at which its independent rollouts wait."""
        for retries_left in reversed(range(self.retries + 1)):
            reset = self.resetting(task, index)
            try:
                outcome = await self.ask(reset, partial(reset.begin, env))
            except BaseException:
                reset.forget()
                raise
            if not isinstance(outcome, Exception):
                begun, seconds, _ = outcome
                self.trees[index] = self.planted(reset, begun, seconds, self.roots[index])
                self.give(env)
                if self.over:
                    self.drop_waiting()
                return
            reset.forget()
            if not self.retries:
                raise outcome
            await self.in_source(partial(super().discard, env))
            last = not retries_left or self.over
            self.record_failure(Failure(index, (), 0, described(outcome), self.roots[index] if last else 0))
            if last:
                return
            if (other := await self.obtained()) is None:
                self.leave_out([index])
                return
            env = other

    # The course of a path.

    async def walk(self, tree: RolloutTree, point: CapturedNode, env: gym.Env[Any, Any]) -> None:
        """Roll out one path from its start to its end."""
        task = asyncio.current_task()
        assert task is not None
        run = self.begun(tree, point, env)
        walk = self.walks[run.context.path] = _Walk(run, point, task)
        try:
            if await self.restored(walk):
                while await self.turn(walk):
                    pass
        except asyncio.CancelledError:
            if not run.dropped or self.ending(walk):
                raise
            if walk.point is not None and walk.point.snap is not None:  # captured while the policy was asked
                walk.point.snap.release()
            if walk.broken is not None:
                await self.lose(run, walk.broken)
        self.depart(walk)
        self.end(run)
        if run.dropped:
            self.leave(run)
        del self.walks[run.context.path]

    def ending(self, walk: _Walk) -> bool:
        """True if the path was cancelled together with the rollout."""
        return walk.task.cancelling() > walk.cancelled

    async def restored(self, walk: _Walk) -> bool:
        """Restore the environment to the start of the path; False if the path is dropped."""
        run = walk.run
        found = await self.ask(run, partial(self.replay_to, run, run.anchors[0], same), restoring=True)
        begun = await self.recover(run, found, same) if isinstance(found, Exception) else found
        if begun is None:
            self.drop(run)
        if begun is None or run.dropped:
            return False
        run.context.observation, run.context.info = begun
        if not self.replays:
            run.anchors.pop().free()
        return True

    async def turn(self, walk: _Walk) -> bool:
        """Decide and execute one step of a path; True if it continues."""
        run = walk.run
        action, seconds, broken = await self.decide(walk)
        early, walk.point = walk.point, None
        point = self.point(run, action) if action is not None and not run.dropped else None
        self.depart(walk)  # not before: the state that it started from may be captured again
        if point is not None and early is not None:
            point.snap = early.snap
        elif early is not None and early.snap is not None:
            early.snap.release()
        if action is None or run.dropped:
            if broken is not None:
                await self.lose(run, broken)
            return False
        walk.point = point
        acting = Acting(run, action, point, self.look)
        outcome = broken if broken is not None else await self.ask(acting, acting.step)
        found = await self.recover(run, outcome, acting.step) if isinstance(outcome, Exception) else outcome
        walk.point = None
        if found is None:
            self.drop(run)
        if found is None or run.dropped:
            if point is not None:
                self.forget(run, point)
            return False
        result, captured, _ = found
        if point is not None:
            self.keep(run, point, seconds + captured)
        return self.append_step(run, action, result)

    async def decide(self, walk: _Walk) -> tuple[Action | None, float, Exception | None]:
        """Ask the policy for the next action, and capture a watched path meanwhile.

        The seconds that capturing took and what it raised come with the action, the state is ``walk.point``.
        """
        run, capturing, walk.broken = walk.run, None, None
        if self.schedule.watches(run.path) and not run.behind:
            walk.point = CapturedNode(run.node, run.context.memory)
            capturing = asyncio.create_task(self.in_thread(partial(walk.point.capture, run.env)))
        walk.turns += 1
        since = self.waits.begin()
        walk.thinking = True
        try:
            answer = self.asked_policy(run)
            if not inspect.isawaitable(answer):
                raise TypeError(f"expected the policy to be asynchronous (async def), found {self.policy!r}")
            action = await answer
        except asyncio.CancelledError as error:
            if run.dropped or self.ending(walk):
                raise
            raise RuntimeError(f"the policy's call for path {run.context.path} was cancelled by the policy") from error
        finally:
            walk.thinking = False
            self.clock.policy += self.waits.end(since)
            if capturing is not None:
                since = self.waits.begin()
                await _ended(capturing)
                self.clock.snapshots += self.waits.end(since)
                if not capturing.cancelled() and isinstance(failed := capturing.result(), Exception):
                    walk.broken = failed  # for a path that is dropped at this moment, too
        if self.ending(walk):  # the policy has kept the cancellation to itself
            raise asyncio.CancelledError
        captured = capturing.result() if capturing is not None else 0.0
        return (action, 0.0, captured) if isinstance(captured, Exception) else (action, captured, None)

    def asked_policy(self, run: LivePath) -> Awaitable[Action | None]:
        """The policy's decision for a path, to be awaited."""
        return self.policy(run.context)

    def depart(self, walk: _Walk) -> None:
        """Note, once, that a path needs nothing of the one that it was forked off any more."""
        if walk.departed:
            return
        walk.departed = True
        walk.start.pending -= 1
        if not walk.start.pending:
            self.release((walk.run.tree.index, walk.start.node.owner))

    def wait(self, run: LivePath, point: CapturedNode) -> None:
        """Have the siblings that a path requested wait at a captured state, until an environment is free."""
        super().wait(run, point)
        ended = any(kept is point for kept in run.points)
        turn = self.walks[run.context.path].turns - 1
        self.asked.setdefault(run.context.path, []).append((turn, ended, point.node, point.pending))
        self.fill()

    # Environments.

    async def ask(
        self, asked: Reset | LivePath | Acting, job: Callable[[], T], *, restoring: bool = False
    ) -> T | Exception:
        """Result of an environment's job, for a reset, the start of a path or a step."""
        return await self.call(job, restoring=restoring)

    async def call(self, job: Callable[[], T], *, restoring: bool = False) -> T | Exception:
        """Run a job on an environment in a thread and account for the time; an exception takes the result's place."""
        since = self.waits.begin()
        try:
            found = await self.in_thread(job)
        finally:
            waited = self.waits.end(since)
        if restoring:
            self.clock.snapshots += waited
        else:
            self.account(waited, [found])  # type: ignore[list-item]
        return found

    async def in_thread(self, job: Callable[[], T]) -> T | Exception:
        """Run a job on an environment in a thread."""
        (found,) = await self.finished(self.calls.submit(self.envs.call, [partial(guarded, job)]))
        return found

    async def in_source(self, job: Callable[[], T]) -> T:
        """Run a job on the source of environments, in its thread."""
        return await self.finished(self.source.submit(job))

    async def obtained(self) -> gym.Env[Any, Any] | None:
        """A live environment; with ``retries`` it is asked for again where its worker dies while it is made.

        None after the deadline.
        """
        retries_left = self.retries
        while True:
            try:
                env = await self.in_source(self.take_in_time)
            except Exception as error:  # an environment's constructor may raise anything
                if self.over:
                    return None
                if not retries_left:
                    raise
                retries_left -= 1
                logger.warning("no environment could be made (%s), retries left: %d", described(error), retries_left)
                continue
            if self.over:
                self.give(env)
                return None
            return env

    def take_in_time(self) -> gym.Env[Any, Any]:
        """Take an environment, in the thread of the source; raises TimeoutError after the deadline."""
        if self.over:
            raise self.late
        return self.take()

    async def finished(self, future: Future[T]) -> T:
        """Result of a call in a thread. One that has begun is waited for, also by a task that is cancelled."""
        wrapped = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(wrapped)
        except asyncio.CancelledError:
            if not future.cancel():
                await _ended(wrapped)
            raise

    def give(self, env: gym.Env[Any, Any]) -> None:
        """Return an environment, unless it was discarded; the next one is taken after that."""
        self.given.append(self.source.submit(super().give, env))

    # Environments that fail.

    async def recover(self, run: LivePath, error: Exception, go: Callable[[Begun], T]) -> T | None:
        """Result of ``go`` with another environment, as in `Lockstep.recover`; None for a dropped path, too."""
        while await self.lose(run, error):
            try:
                run.env = await self.in_source(self.take_in_time)
            except Exception as failed_again:  # of an environment's constructor: it counts as one more loss
                error = failed_again
                if self.over:
                    return None
                continue
            if self.over:
                return None
            anchor = run.anchors[-1 if run.lost == 1 else 0]
            found = await self.call(partial(self.replay_to, run, anchor, go), restoring=True)
            if not isinstance(found, Exception):
                self.record_recovery(run, described(error))
                return found
            error = found
        return None

    async def lose(self, run: LivePath, error: Exception) -> bool:
        """Discard the environment of a path; True if the path may have another one.

        Raises:
            Exception: the error, where there are no ``retries``.
        """
        if not self.retries:
            raise error
        await self.in_source(partial(super().discard, run.env))
        if run.dropped:  # nobody continues it
            self.note(self.failure(run, error))
            return False
        run.lost += 1
        again = run.lost <= self.retries
        lost = 0 if again else len(run.tree.offspring(run.path.key))
        self.record_failure(self.failure(run, error, dropped=lost))
        return again

    def live_paths(self) -> list[LivePath]:
        """Paths that have started and not ended."""
        return [walk.run for walk in self.walks.values()]

    def drop(self, run: LivePath) -> None:
        """Remove a path and everything forked off it, live or not."""
        self.dropped.add(run.context.path)
        super().drop(run)

    def abandon(self, run: LivePath) -> None:
        """Have the task of a removed path end it: at once if the policy is being asked, else after its call."""
        walk = self.walks[run.context.path]
        if walk.thinking:
            walk.cancelled += 1
            walk.task.cancel()

    def note(self, failure: Failure) -> None:
        """Record a failure for the caller, with the turn of its path (-1: the restore to its start), or of resets."""
        walk = self.walks.get((failure.task, failure.path))
        before = sum((other.task, other.path) == (failure.task, failure.path) for other, _ in self.failed)
        self.failed.append((failure, walk.turns - 1 if walk is not None else before))

    # The order of things.

    def in_lockstep_order(self, indices: Sequence[int]) -> list[RolloutTree]:
        """The trees, with paths, children and failures in the order that the lockstep driver has them."""
        trees = [self.trees[index] for index in indices if index in self.trees]
        places = _places(trees, self.roots, self.asked, self.dropped, self.max_live)
        for tree in trees:
            tree.paths.sort(key=lambda path, index=tree.index: places[index, path.key])  # type: ignore[misc]
            for path in tree.paths:
                path.start.children.sort(key=_sibling)
        position = {index: place for place, index in enumerate(indices)}

        def moment(entry: tuple[int, tuple[Failure, int]]) -> tuple[float, ...]:
            arrival, (failure, turn) = entry
            if not failure.path:  # a reset
                place = position[failure.task]
                return (-1, place // self.max_live, turn, place)
            wave, place = places.get((failure.task, failure.path), (math.inf, arrival))
            return (wave, turn, failure.too_long, place)

        self.failures += [failure for _, (failure, _) in sorted(enumerate(self.failed), key=moment)]
        return [tree for tree in trees if tree.paths]


class _Waits:
    """Wall-clock time divided among those that wait at the same moment, in equal parts."""

    def __init__(self) -> None:
        self.waiting = 0
        self.since = time.perf_counter()
        self.share = 0.0  # of one that would have waited all the time

    def _tick(self, change: int) -> None:
        now = time.perf_counter()
        if self.waiting:
            self.share += (now - self.since) / self.waiting
        self.since, self.waiting = now, self.waiting + change

    def begin(self) -> float:
        """Begin to wait; the result is for `end`."""
        self._tick(1)
        return self.share

    def end(self, since: float) -> float:
        """End a wait; returns the seconds that are its part."""
        self._tick(-1)
        return self.share - since


def _places(
    trees: Iterable[RolloutTree],
    roots: Mapping[int, int],
    asked: Mapping[Identity, Sequence[Request]],
    dropped: Collection[Identity],
    max_live: int,
) -> dict[Identity, tuple[int, int]]:
    """Wave and place in it of every path in a lockstep rollout, in which these siblings are requested."""
    waiting = [(tree, tree.root) for tree in trees for _ in range(roots[tree.index])]
    started: Counter[int] = Counter()
    places: dict[Identity, tuple[int, int]] = {}
    wave = 0
    while waiting:
        live, waiting = waiting[:max_live], waiting[max_live:]
        requests: list[tuple[tuple[int, bool, int], list[tuple[RolloutTree, Node]]]] = []
        for place, (tree, node) in enumerate(live):
            sibling = started[id(node)] + (node is not tree.root)  # 0 is the path that reached the node
            started[id(node)] += 1
            key = (*node.owner, node.depth, sibling)
            places[tree.index, key] = (wave, place)
            for turn, ended, start, count in asked.get((tree.index, key), ()):
                if (tree.index, key) not in dropped or start.owner != key:
                    requests.append(((turn, ended, place), [(tree, start)] * count))
        requests.sort(key=lambda request: request[0])
        waiting += [entry for _, entries in requests for entry in entries]
        wave += 1
    return places


def _sibling(edge: Edge) -> int:
    """Number of an edge among those that leave its node: 0 is that of the path that reached it."""
    return 0 if edge.path == edge.parent.owner else edge.path[-1]


async def _passed(seconds: float) -> None:
    """Wait for a deadline."""
    await asyncio.sleep(seconds)


async def _ended(future: asyncio.Future[Any]) -> None:
    """Wait for a future to end, and only then be cancelled."""
    cancelled = False
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            cancelled = True
    if not future.cancelled():
        future.exception()  # has been looked at
    if cancelled:
        raise asyncio.CancelledError
