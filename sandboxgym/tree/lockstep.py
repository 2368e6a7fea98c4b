"""Lockstep rollouts behind `sandboxgym.tree.rollout`: paths that advance together, waiting forks, failed environments.

`Driver` is what this driver shares with the one whose paths advance by themselves (`asynchronous.py`).

1. A captured state is kept while a path may start from it: waiting forks, a path that may yet request some, and (with
   ``retries``) the path whose last snapshot it is.
2. An exception of an environment ends the rollout, or (with ``retries``) only that environment: see `Lockstep.recover`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np
from gymnasium.utils.env_checker import data_equivalence

from sandboxgym.errors import SnapshotCorrupt, SnapshotMissing
from sandboxgym.tree.envs import EnvSource, NearSource, ToldSource, described, logger
from sandboxgym.tree.live import Acting, CapturedNode, LivePath, Reset
from sandboxgym.tree.nodes import Action, Edge, Node, Path, PathKey, RolloutTree
from sandboxgym.tree.policies import Clock, Context, Failure, Look, Policy, Recovery
from sandboxgym.tree.schedules import Schedule
from sandboxgym.wrappers.jobs import Begun, EnvJob, EnvResult, execute

T = TypeVar("T")

Outcome = tuple[Any, float, float] | Exception
"""Result of a job, seconds of capturing and of stepping; or the exception that the environment raised."""


ORIGINS = {"snapshot": "the last snapshot on its path", "fork": "where it forked", "reset": "the reset to its task"}
"""Kinds of `Recovery` as text."""


class Diverged(Exception):
    """Replaying the same actions gave a different observation."""


@dataclass(slots=True)
class _Cohort:
    """Paths that advance in lockstep."""

    live: list[LivePath] = field(default_factory=list)
    started: list[tuple[int, PathKey]] = field(default_factory=list)
    """Paths whose last forks have started, but not acted yet."""
    acting: list[Acting] = field(default_factory=list)
    outcomes: Callable[[], list[Outcome]] | None = None
    """Waits for the steps of ``acting``; None while none is being executed."""


class Driver:
    """Bookkeeping of one rollout, whichever path advances when: its environments, trees, captured states, failures."""

    def __init__(
        self,
        envs: EnvSource,
        policy: object,
        schedule: Schedule,
        seed: Sequence[int],
        clock: Clock,
        retries: int,
        failures: list[Failure],
        look: Look | None = None,
        capture_every: int = 0,
        timeout: float | None = None,
    ) -> None:
        if timeout is not None and not timeout > 0.0:
            raise ValueError(f"expected timeout to be a positive number of seconds or None, found {timeout}")
        self.timeout, self.late = timeout, TimeoutError(f"the rollout took longer than {timeout} s")
        for name, number in (("retries", retries), ("capture_every", capture_every)):
            if number < 0:
                raise ValueError(f"expected {name} to be at least 0, found {number}")
        self.envs, self.schedule, self.seed, self.clock = envs, schedule, seed, clock
        self.retries, self.failures, self.look = retries, failures, look
        self.replays = retries > 0  # states to recover from are kept
        self.capture_every = capture_every
        self.on_release: Callable[[tuple[int, PathKey]], Any] = getattr(policy, "release", lambda path: None)
        self.holds: Counter[tuple[int, PathKey]] = Counter()  # while a path is live, and a point on it kept
        self.waiting: list[tuple[RolloutTree, CapturedNode]] = []
        self.taken: dict[int, gym.Env[Any, Any]] = {}
        self.near = envs if isinstance(envs, NearSource) else None

    # Environments.

    def take(self, near: Any = None) -> gym.Env[Any, Any]:
        """A live environment in any state, to be restored to the snapshot ``near``, if that is given."""
        env = self.envs.take() if near is None or self.near is None else self.near.take_near(near)
        self.taken[id(env)] = env
        return env

    def give(self, env: gym.Env[Any, Any]) -> None:
        """Return an environment, unless it was discarded."""
        if self.taken.pop(id(env), None) is not None:
            self.envs.give(env)

    def discard(self, env: gym.Env[Any, Any]) -> None:
        """Discard an environment that failed."""
        if self.taken.pop(id(env), None) is not None:
            self.envs.discard(env)

    def account(self, waited: float, outcomes: Iterable[Outcome]) -> None:
        """Divide the seconds spent waiting for jobs between capturing and stepping."""
        ended = [outcome for outcome in outcomes if not isinstance(outcome, Exception)]
        captures, steps = (sum(outcome[i] for outcome in ended) for i in (1, 2))
        share = captures / (captures + steps) if captures + steps else 0.0
        self.clock.snapshots += waited * share
        self.clock.steps += waited * (1.0 - share)

    # What a policy keeps of paths.

    def hold(self, path: tuple[int, PathKey]) -> None:
        """Count one more reason for the policy to keep what it has of a path."""
        self.holds[path] += 1

    def release(self, path: tuple[int, PathKey]) -> None:
        """Give up one `hold` on a path; after the last one the policy is told to release the path."""
        self.holds[path] -= 1
        if not self.holds[path]:
            del self.holds[path]
            self.on_release(path)

    # The course of a path.

    def live_paths(self) -> list[LivePath]:
        """Paths that have started and not ended."""
        raise NotImplementedError

    def resetting(self, task: Any, index: int) -> Reset:
        """The reset to a task."""
        return Reset(task, index, _seed(self.seed, index, ()), self.look)

    def planted(self, reset: Reset, begun: Begun, captured: float, roots: int) -> RolloutTree:
        """The tree of a task that was reset to; its root paths wait at the root."""
        observation, info = begun
        root = Node(0, observation, info.get("progress_key"), owner=(), state_hash=info.get("state_hash"))
        root.features, root.ahead = info.get("features"), reset.ahead
        tree = RolloutTree(reset.task, reset.index, root, kind=str(info.get("task_type", "")), snapshots=1)
        tree.snapshot_seconds = captured
        self.hold((reset.index, root.owner))
        self.waiting += [(tree, CapturedNode(root, memory=None, pending=roots, snap=reset.snap, users=roots))] * roots
        return tree

    def begun(self, tree: RolloutTree, point: CapturedNode, env: gym.Env[Any, Any]) -> LivePath:
        """A path that starts at a captured state, to which its environment has yet to be restored."""
        path = Path((*point.node.owner, point.node.depth, point.node.width), point.node)
        point.node.width += 1
        tree.paths.append(path)
        rng = np.random.Generator(np.random.PCG64(_sequence(self.seed, tree.index, path.key, purpose=1)))
        context = Context((tree.index, path.key), None, {}, point.node.depth, point.memory, rng)
        self.hold(context.path)
        return LivePath(tree, path, env, point.node, context, [point])

    def point(self, run: LivePath, action: Action) -> CapturedNode | None:
        """Captured node in which the action was decided: siblings start there, or may yet; or the path can recover."""
        count = self.schedule.now(run.tree, run.path, run.node, action)
        if not count and not self.schedule.watches(run.path):
            if not self.replays or not self.capture_every:
                return None
            since = run.node.depth - run.anchors[-1].node.depth
            return CapturedNode(run.node, run.context.memory, spare=True) if since >= self.capture_every else None
        self.hold((run.tree.index, run.node.owner))
        return CapturedNode(run.node, run.context.memory, pending=count)

    def append_step(self, run: LivePath, action: Action, result: tuple[Any, Any, Any, Any, dict[str, Any]]) -> bool:
        """Append the result of a step to the path; True if the path continues."""
        observation, reward, terminated, truncated, info = result
        edge = Edge(run.path.key, run.node, action, float(reward), bool(terminated), bool(truncated))
        edge.valid = action.valid and bool(info.get("valid_action", True))
        edge.success = bool(info.get("success", False))
        edge.verdict = str(info.get("verdict") or "")
        edge.masked, edge.suspicious = bool(info.get("masked", False)), bool(info.get("suspicious"))
        depth, key = run.node.depth + 1, info.get("progress_key")
        state, features = info.get("state_hash"), info.get("features")
        edge.child = Node(depth, observation, key, run.path.key, edge, state_hash=state, features=features)
        run.node.width = max(run.node.width, 1)  # the path that reached the node is its sibling 0
        run.node.children.append(edge)
        run.path.edges.append(edge)
        run.node = edge.child
        run.context = Context(run.context.path, observation, info, depth, action.memory, run.context.rng)
        return not (terminated or truncated) and self.survives(run)

    def survives(self, run: LivePath) -> bool:
        """True if the schedule lets the path continue, decided by a random draw where its probability is below 1."""
        node = run.node
        node.survival = self.schedule.survival(run.tree, run.path, node)
        if node.survival >= 1.0:
            return True
        coin = _sequence(self.seed, run.tree.index, (*run.path.key, node.depth), purpose=2)
        node.stopped = bool(np.random.Generator(np.random.PCG64(coin)).random() >= node.survival)
        return not node.stopped

    def keep(self, run: LivePath, point: CapturedNode, seconds: float) -> None:
        """Record a captured state: siblings start there, or its path may request them once it has ended."""
        run.tree.snapshots += 1
        run.tree.snapshot_seconds += seconds
        point.users = 0 if point.spare else point.pending or 1
        if self.replays:
            point.users += 1
            while len(run.anchors) > 1:
                run.anchors.pop().free()
            run.anchors.append(point)
        if point.pending:
            run.node.width = max(run.node.width, 1)
            self.wait(run, point)
        elif not point.spare:
            run.points.append(point)

    def wait(self, run: LivePath, point: CapturedNode) -> None:
        """Have the siblings that a path requested wait at a captured state."""
        self.waiting += [(run.tree, point)] * point.pending

    def end(self, run: LivePath) -> None:
        """End a path: ask the schedule where to fork it afterwards, and return its environment."""
        if run.dropped:
            return
        if not run.path.edges:
            error = f"the policy has no room to act at the start of task {run.tree.task!r}"
            lost = len(run.tree.offspring(run.path.key))
            self.note(Failure(run.tree.index, run.path.key, run.node.depth, error, lost, too_long=True))
            logger.warning("%s: path %s is dropped", error, run.path.key)
            self.drop(run)
            return
        last = run.path.edges[-1]
        last.truncated = last.truncated or not last.terminated  # also where the policy had no room left
        if run.points:
            siblings = {id(node): count for node, count in self.schedule.after(run.tree, run.path)}
            for point in run.points:
                point.pending = siblings.get(id(point.node), 0)
                point.users += point.pending
                if point.pending:
                    self.wait(run, point)
        self.leave(run)

    def leave(self, run: LivePath) -> None:
        """Release all states of a path, except those that waiting forks start from."""
        for point in run.points:
            point.free()
            if not point.pending:
                self.release((run.tree.index, point.node.owner))
        for point in run.anchors:
            point.free()
        run.points, run.anchors = [], []
        self.release(run.context.path)
        self.give(run.env)

    # Environments that fail.

    def restoring(self, run: LivePath) -> EnvJob:
        """The restore of a path's environment to the state that the path starts from."""
        return EnvJob(run.env, restore=(run.anchors[0].snap, _seed(self.seed, run.tree.index, run.path.key)))

    def replay_to(self, run: LivePath, anchor: CapturedNode, go: Callable[[Begun], T]) -> T:
        """Replay a path's actions on an environment, from a captured state to its present node, then continue.

        With ``retries``, a captured state that was lost with what kept it, or damaged there, is replaced by an earlier
        one: that from which the path started, or else the reset to the task.
        """
        first = run.anchors[0]
        origin: CapturedNode | None = None
        for point in (first,) if anchor is first else (anchor, first):
            seed = _seed(self.seed, run.tree.index, run.path.key) if point is first else None
            try:
                if (snap := self.captured(point)) is None:
                    continue
                begun = execute(EnvJob(run.env, restore=(snap, seed))).begun
            except (SnapshotMissing, SnapshotCorrupt) as error:
                if not self.replays:
                    raise
                logger.warning("a captured state of path %s is lost: %s", run.path.key, error)
                continue
            origin = point
            break
        else:
            begun = self.replay_to_start(run)
        assert begun is not None
        since = 0 if origin is None else origin.node.depth
        edges = [edge for edge in run.path.edges if edge.parent.depth >= since]
        for edge in edges:
            repeat(run.env, edge)
        kind = "reset" if origin is None else "fork" if origin is first else "snapshot"
        run.replayed = (kind, len(edges) + (run.path.start.depth if origin is None else 0))
        run.behind = False
        return go(begun)

    def captured(self, point: CapturedNode) -> Any:
        """The snapshot of a captured state; None if it ended with its process.

        Raises:
            SnapshotMissing, SnapshotCorrupt: it was lost with what kept it.
        """
        return point.snap

    def replay_to_start(self, run: LivePath) -> Begun:
        """Lead an environment from the reset to the task to the start of a path, by the paths before it."""
        reset, tree, env = self.resetting(run.tree.task, run.tree.index), run.tree, run.env
        begun = execute(replace(reset.job(env), capture=False, look=None)).begun
        assert begun is not None
        if not data_equivalence(begun[0], tree.root.observation):
            raise Diverged(f"after the reset to task {tree.task!r}")
        key, start = run.path.key, run.path.start
        edges = run.path.from_root()[: start.depth]
        starts = {key[end - 2]: key[:end] for end in range(2, len(key) + 1, 2)}
        for depth in range(start.depth + 1):
            if depth in starts:  # where each path drew from a stream of its own
                here = execute(EnvJob(env, capture=True)).snap
                seed = _seed(self.seed, tree.index, starts[depth])
                try:
                    begun = execute(EnvJob(env, restore=(here, seed))).begun
                finally:
                    here.release()
                assert begun is not None
            if depth < start.depth:
                repeat(env, edges[depth])
        return begun

    def note(self, failure: Failure) -> None:
        """Record a failure for the caller."""
        self.failures.append(failure)

    def failure(self, run: LivePath, error: Exception, dropped: int = 0) -> Failure:
        """The failure record of a path."""
        return Failure(run.tree.index, run.path.key, run.node.depth, described(error), dropped)

    def record_failure(self, failure: Failure) -> None:
        """Record a failure for the caller, the source of environments, and in the log."""
        self.note(failure)
        self.tell(failure)
        cost = f"dropped paths: {failure.dropped}" if failure.dropped else "trying again with another"
        place = f"task {failure.task}, path {failure.path}, step {failure.depth}"
        logger.warning("an environment failed (%s), %s: %s", place, cost, failure.error)

    def record_recovery(self, run: LivePath, error: str) -> None:
        """Record that a path continues with another environment: for the source of environments, and in the log."""
        kind, actions = run.replayed
        recovery = Recovery(run.tree.index, run.path.key, run.node.depth, kind, actions, error)
        self.tell(recovery)
        place = f"task {recovery.task}, path {recovery.path}, step {recovery.depth}"
        logger.warning("recovered (%s) from %s, actions repeated: %d, after: %s", place, ORIGINS[kind], actions, error)

    def tell(self, event: Failure | Recovery) -> None:
        """Tell the source of environments, if it counts such events."""
        if isinstance(self.envs, ToldSource):
            self.envs.note(event)

    def drop(self, run: LivePath) -> None:
        """Remove a path and everything forked off it."""
        if run.dropped:
            return
        tree, keys = run.tree, run.tree.offspring(run.path.key)
        tree.remove(keys)
        for other in self.live_paths():
            if other.tree is tree and other.path.key in keys and not other.dropped:
                other.dropped = True
                self.abandon(other)
        waiting, self.waiting = self.waiting, []
        for entry in waiting:
            point = entry[1]
            if entry[0] is not tree or point.node.owner not in keys:
                self.waiting.append(entry)
                continue
            point.free()
            point.pending -= 1
            if not point.pending:
                self.release((tree.index, point.node.owner))

    def drop_late(self, run: LivePath) -> None:
        """Drop a path that has not ended at the deadline, with its forks."""
        if not run.dropped:
            self.record_failure(self.failure(run, self.late, dropped=len(run.tree.offspring(run.path.key))))
            self.drop(run)

    def drop_waiting(self) -> None:
        """Drop the paths that have not started at the deadline."""
        while self.waiting:
            tree, point = self.waiting.pop()
            self.record_failure(Failure(tree.index, point.node.owner, point.node.depth, described(self.late), 1))
            point.free()
            point.pending -= 1
            if not point.pending:
                self.release((tree.index, point.node.owner))

    def leave_out(self, indices: Sequence[int]) -> None:
        """Leave out tasks that were not reset to before the deadline."""
        for index in indices:
            self.record_failure(Failure(index, (), 0, described(self.late), self.schedule.roots_of(index)))

    def abandon(self, run: LivePath) -> None:
        """End a live path that was removed with the one it was forked off."""
        self.leave(run)

    def forget(self, run: LivePath, point: CapturedNode) -> None:
        """Forget a state that was to be captured on a path which is removed."""
        if point.snap is not None:
            point.snap.release()
        if not point.spare:
            self.release((run.tree.index, point.node.owner))


class Lockstep(Driver):
    """State of one call of `rollout`: the live paths, and the paths that wait at captured nodes."""

    def __init__(
        self,
        envs: EnvSource,
        policy: Policy,
        schedule: Schedule,
        seed: Sequence[int],
        clock: Clock,
        background: ThreadPoolExecutor | None,
        retries: int,
        failures: list[Failure],
        look: Look | None = None,
        capture_every: int = 0,
        timeout: float | None = None,
    ) -> None:
        super().__init__(envs, policy, schedule, seed, clock, retries, failures, look, capture_every, timeout)
        self.policy, self.background = policy, background
        self.deadline = None if timeout is None else time.monotonic() + timeout
        self.cohorts: list[_Cohort] = []
        self.starting: dict[int, CapturedNode] = {}
        """Starts of the paths of a wave that have no environment yet, by identity."""

    def run(self, tasks: Sequence[Any], indices: Sequence[int], max_live: int) -> list[RolloutTree]:
        """Run the rollout; the trees, in the order of the tasks."""
        trees: list[RolloutTree] = []
        try:
            for at in range(0, len(tasks), max_live):
                some = indices[at : at + max_live]
                if not self.is_late(partial(self.leave_out, some)):
                    trees += self.reset_roots(tasks[at : at + max_live], some)
            while self.waiting and not self.is_late(self.drop_waiting):
                wave, self.waiting = self.waiting[:max_live], self.waiting[max_live:]
                self.starting = {id(point): point for _, point in wave}
                self.cohorts = [_Cohort() for _ in range(2 if self.background else 1)]
                for cohort, paths in zip(self.cohorts, self.divided(wave), strict=True):
                    self.start(cohort, paths)
                while any(cohort.live for cohort in self.cohorts):
                    for cohort in self.cohorts:
                        if cohort.outcomes is not None:
                            self.advance(cohort, cohort.outcomes)
                        if cohort.live and not self.is_late(partial(self.drop_live, cohort)):
                            self.act(cohort)
        finally:  # nothing is left over after an error; otherwise all of this is empty
            if self.background:
                self.background.shutdown()  # steps that are under way end first
            for env in list(self.taken.values()):
                self.give(env)
            points = [*(point for _, point in self.waiting), *self.starting.values()]
            for cohort in self.cohorts:
                points += [point for run in cohort.live for point in run.points + run.anchors]
                points += [acting.point for acting in cohort.acting if acting.point is not None]
            for point in points:
                if point.snap is not None:
                    point.snap.release()
        return [tree for tree in trees if tree.paths]

    def is_late(self, drop: Callable[[], None]) -> bool:
        """True after the deadline: what has not ended is dropped.

        Raises:
            TimeoutError: where there are no ``retries``.
        """
        if not self.passed():
            return False
        if not self.retries:
            raise self.late
        drop()
        return True

    def passed(self) -> bool:
        """True if the deadline of the rollout has passed."""
        return self.deadline is not None and time.monotonic() > self.deadline

    def drop_live(self, cohort: _Cohort) -> None:
        """Drop the live paths of a cohort, which are at rest."""
        while cohort.started:
            self.release(cohort.started.pop())
        for run in list(cohort.live):
            self.drop_late(run)
        cohort.live = []

    def divided(self, wave: Sequence[tuple[RolloutTree, CapturedNode]]) -> list[list[tuple[RolloutTree, CapturedNode]]]:
        """The paths of each cohort, those of one tree together, as evenly as that allows."""
        paths: list[list[tuple[RolloutTree, CapturedNode]]] = [[] for _ in self.cohorts]
        by_tree: dict[int, list[tuple[RolloutTree, CapturedNode]]] = {}
        for tree, point in wave:
            by_tree.setdefault(id(tree), []).append((tree, point))
        for group in by_tree.values():
            min(paths, key=len).extend(group)
        return paths

    def live_paths(self) -> list[LivePath]:
        """Paths that have started and not ended."""
        return [run for cohort in self.cohorts for run in cohort.live]

    def reset_roots(self, tasks: Sequence[Any], indices: Sequence[int]) -> list[RolloutTree]:
        """Reset to each task and capture the root, at which its independent rollouts wait."""
        trees: dict[int, RolloutTree] = {}
        wanted = {index: self.schedule.roots_of(index) for index in indices}
        todo = list(zip(tasks, indices, strict=True))
        for retries_left in reversed(range(self.retries + 1)):
            envs = {index: self.obtained() for _, index in todo}
            resets = [self.resetting(task, index) for task, index in todo]
            began = time.perf_counter()
            done = self.execute(resets, [reset.job(envs[reset.index]) for reset in resets])
            outcomes = noted(done, [reset.note for reset in resets])
            self.account(time.perf_counter() - began, outcomes)
            again, errors = [], []
            for reset, outcome in zip(resets, outcomes, strict=True):
                if isinstance(outcome, Exception):
                    errors.append(outcome)
                    again.append((reset.task, reset.index))
                    reset.forget()
                    continue
                begun, seconds, _ = outcome
                trees[reset.index] = self.planted(reset, begun, seconds, wanted[reset.index])
                self.give(envs[reset.index])
            if errors and not self.retries:
                raise errors[0]
            last = not retries_left or self.passed()
            for (_, index), error in zip(again, errors, strict=True):
                self.discard(envs[index])
                self.record_failure(Failure(index, (), 0, described(error), wanted[index] if last else 0))
            todo = again
            if last:
                break
        planted = {index: place for place, index in enumerate(indices)}
        self.waiting.sort(key=lambda entry: planted.get(entry[0].index, -1))  # whatever failed
        return [trees[index] for index in indices if index in trees]

    def obtained(self, near: Any = None) -> gym.Env[Any, Any]:
        """An environment as `take` gives it; with ``retries`` it is asked for again where it could not be made."""
        for retries_left in reversed(range(self.retries)):
            try:
                return self.take(near)
            except Exception as error:  # an environment's constructor may raise anything
                logger.warning("no environment could be made (%s), retries left: %d", described(error), retries_left)
        return self.take(near)

    def start(self, cohort: _Cohort, wave: Sequence[tuple[RolloutTree, CapturedNode]]) -> None:
        """Restore an environment for each of these paths."""
        for tree, point in wave:
            cohort.live.append(self.begun(tree, point, self.obtained(point.snap)))
            self.starting.pop(id(point), None)  # others may start there, too
        began = time.perf_counter()
        done = self.execute(cohort.live, [self.restoring(run) for run in cohort.live])
        self.clock.snapshots += time.perf_counter() - began
        for run, found in zip(cohort.live, done, strict=True):
            begun = self.recover(run, found, same) if isinstance(found, Exception) else found.begun
            (point,) = run.anchors
            point.pending -= 1
            if not point.pending:
                cohort.started.append((run.tree.index, point.node.owner))
            if begun is None:
                self.drop(run)
                continue
            run.context.observation, run.context.info = begun
            if not self.replays:
                run.anchors.pop().free()
        cohort.live = [run for run in cohort.live if not run.dropped]

    def act(self, cohort: _Cohort) -> None:
        """Decide the next step of every live path, and have the environments execute it."""
        began = time.perf_counter()
        decided = list(zip(cohort.live, self.decide(cohort.live), strict=True))
        self.clock.policy += time.perf_counter() - began
        cohort.acting = [
            Acting(run, action, self.point(run, action), self.look) for run, action in decided if action is not None
        ]
        while cohort.started:
            self.release(cohort.started.pop())
        carry_out = partial(self.carry_out, cohort.acting)
        cohort.outcomes = self.background.submit(carry_out).result if self.background else carry_out

    def carry_out(self, acting: Sequence[Acting]) -> list[Outcome]:
        """Have the environments execute the steps of the paths."""
        done = self.execute(acting, [act.job() for act in acting])
        return noted(done, [act.note for act in acting])

    def decide(self, runs: Sequence[LivePath]) -> Sequence[Action | None]:
        """The policy's decision for each path."""
        return self.policy([run.context for run in runs])

    def execute(
        self, asked: Sequence[Reset | LivePath | Acting], jobs: Sequence[EnvJob]
    ) -> Sequence[EnvResult | Exception]:
        """Results of the environments' jobs, each for a reset, the start of a path or a step."""
        return self.envs.execute_all(jobs)

    def advance(self, cohort: _Cohort, wait: Callable[[], list[Outcome]]) -> None:
        """Wait for the steps of the paths, and record their results."""
        began = time.perf_counter()
        outcomes = wait()
        self.account(time.perf_counter() - began, outcomes)
        acted = []
        for acting, outcome in zip(cohort.acting, outcomes, strict=True):
            found = None if isinstance(outcome, Exception) else outcome
            if isinstance(outcome, Exception) and not acting.run.dropped:
                found = self.recover(acting.run, outcome, acting.step)
            if found is None:
                self.drop(acting.run)
            acted.append((acting, found))
        cohort.acting, cohort.outcomes = [], None
        for acting, found in acted:
            if acting.point is None:
                continue
            if found is None or acting.run.dropped:
                self.forget(acting.run, acting.point)
            else:
                self.keep(acting.run, acting.point, found[1])
        going = []
        for acting, found in acted:
            if found is not None and not acting.run.dropped and self.append_step(acting.run, acting.action, found[0]):
                going.append(acting.run)
        stays = set(map(id, going))
        ended = [run for run in cohort.live if id(run) not in stays]
        for run in ended:
            self.end(run)
        cohort.live = going

    def recover(self, run: LivePath, error: Exception, go: Callable[[Begun], T]) -> T | None:
        """Result of ``go`` with another environment, replayed to the path's node.

        None after too many failures, or one after the deadline.

        The first begins at the last snapshot, those after it where the path started, in case that snapshot is at fault.

        Raises:
            Exception: the error, where there are no ``retries``.
        """
        while True:
            if not self.retries:
                raise error
            self.discard(run.env)
            run.lost += 1
            if run.lost > self.retries or self.passed():
                self.record_failure(self.failure(run, error, dropped=len(run.tree.offspring(run.path.key))))
                return None
            self.record_failure(self.failure(run, error))
            began, lost = time.perf_counter(), described(error)
            try:
                run.env = self.take()
                (found,) = self.envs.call([partial(self.replay_to, run, run.anchors[-1 if run.lost == 1 else 0], go)])
                self.record_recovery(run, lost)
                return found
            except Exception as failed_again:  # of an environment: it counts as one more loss
                error = failed_again
            finally:
                self.clock.snapshots += time.perf_counter() - began


def noted(done: Sequence[EnvResult | Exception], notes: Sequence[Callable[[EnvResult], Outcome]]) -> list[Outcome]:
    """Results of jobs after each was recorded by its function; an exception stays in a result's place."""
    pairs = zip(done, notes, strict=True)
    return [found if isinstance(found, Exception) else note(found) for found, note in pairs]


def repeat(env: gym.Env[Any, Any], edge: Edge) -> None:
    """Execute a step of a path once more.

    Raises:
        Diverged: it shows something else than it did.
    """
    observation, *_ = env.step(edge.action.text)
    if not data_equivalence(observation, edge.child.observation):
        raise Diverged(f"after {edge.action.text!r}, at step {edge.child.depth}")


def same(begun: Begun) -> Begun:
    """Outcome of a restore, for `Driver.replay_to`."""
    return begun


def _sequence(seed: Sequence[int], index: int, key: PathKey, *, purpose: int) -> np.random.SeedSequence:
    return np.random.SeedSequence([*seed, index, purpose], spawn_key=key)


def _seed(seed: Sequence[int], index: int, key: PathKey) -> int:
    return int(_sequence(seed, index, key, purpose=0).generate_state(1, np.uint64)[0])
