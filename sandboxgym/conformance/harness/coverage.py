"""Controls found by search: long episodes, every way of ending, rare actions and events.

1. A search only proposes actions. The control is recorded from a reset, without any snapshot, so that faulty snapshots
   cost coverage and never a verdict.
2. It returns to promising moments with the environment's own snapshots, as a tree does; where these raise, the coverage
   is that of plain episodes.
3. It is bounded in calls and in processor seconds, and made once for all checks of a run.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sandboxgym.conformance.check import Budget
from sandboxgym.conformance.harness.canonical import Items, canonical, mark, show
from sandboxgym.conformance.harness.scenario import choose, control_seed, opened, record, release, seed_spaces
from sandboxgym.conformance.subject import AnyEnv, Control, Op, Outcome, Subject, restore, snapshot
from sandboxgym.conformance.supervision.clock import Stopwatch

CALLS = {"quick": 4000, "full": 40000}
"""Calls that a search may make, over all starts."""
BEYOND = 12
"""Steps of a control beyond the event for which it was chosen."""
VALUES = 8
"""Values of one kind (rewards, texts in info) that count as different events."""
DEATHS = 60
"""Number of ends in a row without a longer episode after which the search for a longer one stops."""
PLACES = 48
"""Observations that count as different places to continue from."""
RUNS = (10, 50, 250)
"""Mean numbers of steps for which an action is repeated, in turn, in a quarter of the calls: some states are reached
only by repeating an action for long, which random actions never do.
"""
STUBBORN = 0.2
"""Share of the bursts of actions from a moment that only repeat its last action."""

Feature = tuple[Any, ...]


@dataclass(frozen=True)
class Coverage:
    """Result of a search."""

    controls: tuple[Control, ...]
    """Recorded runs that together cover the most, endings first."""

    events: tuple[tuple[int, ...], ...]
    """Numbers of calls before each new event, per control."""

    palette: tuple[Any, ...]
    """One action of each kind that was taken."""

    reached: dict[str, Any]
    """Coverage of the recorded runs, for reports."""


@dataclass
class _Moment:
    """A moment from which a search can continue."""

    path: tuple[Any, ...]
    """The actions since the reset."""
    raw: tuple[Any, ...]
    total: float
    seen: frozenset[Feature]
    snap: Any


_found: weakref.WeakKeyDictionary[Subject, dict[tuple[Budget, int], Coverage]] = weakref.WeakKeyDictionary()


def coverage(subject: Subject, budget: Budget) -> Coverage:
    """Coverage of a run; the search is made at the first request, and all checks share it."""
    known = _found.setdefault(subject, {})
    key = (replace(budget, seconds=0.0, total=0.0), subject.seed)  # checks of one run may have other limits
    if key not in known:
        known[key] = _covered(subject, budget)
    return known[key]


def _covered(subject: Subject, budget: Budget) -> Coverage:
    plain = [subject.control(index, budget.steps) for index in range(budget.traces)]
    searches: list[_Search] = []
    stopped = ""
    if subject.noise and not subject.capabilities.rng:
        stopped = "futures cannot be repeated"
    elif not plain[0].repeatable:
        stopped = "runs do not repeat themselves"
    else:
        longest = budget.steps if budget.waits else _longest(plain[0], budget)
        starts = 1 if budget.waits else min(2, len(plain))
        for index in range(starts):
            search = _Search(subject, budget, index, longest, starts)
            search.run()
            searches.append(search)
            stopped = stopped or search.stopped
    chosen = _chosen(searches, 2 if budget.waits else 1 + budget.traces)
    controls = tuple(
        record(subject, search.index, len(path) + BEYOND, planned=path) for search, path in chosen if len(path)
    )
    everything = (*plain, *controls)
    palette = {kind(op.value): op.value for control in everything for op in control.ops if op.kind == "step"}
    seen: set[Feature] = set()
    events = [tuple(_news(control, seen)) for control in everything][len(plain) :]
    reached = {
        "episodes": len(everything),
        "longest": max(control.last for control in everything) - 1,
        "endings": dict(_counted(ending(control) for control in everything)),
        "kinds of actions": len(palette),
        "keys of info": sorted(
            {key for control in everything for outcome in control.outcomes for key in keys(outcome)}
        ),
        "calls of the search": sum(search.calls for search in searches),
    }
    if stopped:
        reached["search ended early"] = stopped
    return Coverage(controls, tuple(events), tuple(palette.values()), reached)


def _longest(control: Control, budget: Budget) -> int:
    """Most steps of a control run: up to eight times the usual number if a call is fast."""
    call = control.seconds / len(control.ops)
    affordable = budget.seconds / 20 / max(call, 1e-6)
    return int(min(8 * budget.steps, max(budget.steps, affordable)))


def ending(control: Control) -> str:
    """Ending of the first episode of a control run."""
    if control.ended is None:
        return "not reached"
    last = control.outcomes[control.ended - 1]
    names = [name for name in ("terminated", "truncated") if _true(getattr(last, name))]
    return " and ".join(names) or "ended"


def keys(outcome: Outcome) -> tuple[str, ...]:
    """The keys of an outcome's info."""
    info = outcome.info
    items = info[1] if isinstance(info, tuple) and len(info) == 2 and isinstance(info[1], Items) else ()
    return tuple(show(key) for key, _ in items)


def _sizes(outcome: Outcome) -> Iterator[Feature]:
    """Sizes of the containers in an outcome's info."""
    info = outcome.info
    items = info[1] if isinstance(info, tuple) and len(info) == 2 and isinstance(info[1], Items) else ()
    for key, value in items:
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], tuple):
            yield ("size", show(key), len(value[1]))


def _true(value: Any) -> bool:
    return show(value).rstrip("_").endswith("True")


def _counted(values: Iterator[str]) -> Iterator[tuple[str, int]]:
    found = sorted(values)
    return ((value, found.count(value)) for value in dict.fromkeys(found))


def kind(action: Any) -> Any:
    """Kind of an action: the number, the verb of a command, else its type."""
    if isinstance(action, (bool, int, np.integer)):
        return int(action)
    if isinstance(action, str):
        return action.split(" ", 1)[0][:40]
    return type(action).__name__


def _news(control: Control, seen: set[Feature]) -> Iterator[int]:
    """Numbers of calls after which a recorded run showed a new feature; ``seen`` holds the features of earlier runs."""
    for index in range(1, control.last):
        op, outcome = control.ops[index], control.outcomes[index]
        features: set[Feature] = {("action", kind(op.value)), ("raised", outcome.raised)}
        features |= {("info", key) for key in keys(outcome)}
        features |= {size for size in _sizes(outcome) if sum(each[:2] == size[:2] for each in seen) < VALUES}
        if sum(feature[0] == "reward" for feature in seen) < VALUES:
            features.add(("reward", outcome.reward))
        if features - seen:
            seen |= features
            yield index + 1


def _features(action: Any, raw: tuple[Any, ...], total: float) -> Iterator[Feature]:
    """Features of a step."""
    observation, reward, terminated, truncated, info = raw
    yield ("action", kind(action))
    if terminated or truncated:
        yield ("ending", bool(terminated), bool(truncated))
    if isinstance(reward, (int, float, np.number)) and reward:
        yield ("sign", bool(reward > 0))
        yield ("reward", round(float(reward), 3))
        yield ("return", round(total, 3))
    if isinstance(info, dict):
        for key, value in info.items():
            yield ("key", str(key))
            if value is None or isinstance(value, (bool, np.bool_)) or (isinstance(value, str) and len(value) < 80):
                yield ("value", str(key), str(value))
            elif isinstance(value, (list, tuple, dict, set, frozenset)):
                yield ("value", str(key), len(value))
    if not isinstance(observation, np.ndarray) or observation.dtype.kind != "f":
        yield ("place", mark(canonical(observation)))


@dataclass
class _Search:
    """A search from one reset."""

    subject: Subject
    budget: Budget
    index: int
    longest: int
    starts: int
    calls: int = 0
    stopped: str = ""
    paths: dict[Feature, tuple[tuple[Any, ...], frozenset[Feature]]] = field(default_factory=dict)
    """Paths by the feature that they showed first: the actions, and all their features."""
    archive: list[_Moment] = field(default_factory=list)
    _values: dict[Any, set[Feature]] = field(default_factory=dict)
    _length: int = 4

    def run(self) -> None:
        """Run plain episodes, then a long one that returns from every end, then bursts from new features."""
        quick = CALLS.get(self.budget.name, CALLS["quick"])
        self.most = quick // self.starts if self.index else quick
        self.watch = Stopwatch()
        self.rng = np.random.default_rng([self.subject.seed, self.index, 17])
        try:
            with opened(self.subject) as env:
                self.space = copy.deepcopy(env.action_space)
                self.space.seed(int(self.rng.integers(2**31)))
                try:
                    for _ in range(4):
                        self._episode(env)
                    for number in itertools.count():
                        if self.late() or (number >= len(RUNS) and self.calls >= self.most / 4):
                            break
                        self._episode(env, RUNS[number % len(RUNS)])
                    if self.index == 0:
                        self._survive(env)
                    self._explore(env)
                finally:
                    for moment in self.archive:
                        release(moment.snap)
        except Exception as error:  # faulty snapshots are for the checks to find
            self.stopped = f"{type(error).__qualname__}: {error}"[:200]

    def late(self) -> bool:
        """True if the search has used up its calls or its time."""
        limit = self.budget.seconds / 2
        waited = self.watch.elapsed > (2 if self.budget.waits else 6) * limit
        return self.calls >= self.most or waited or self.watch.busy > limit

    def _reset(self, env: AnyEnv) -> tuple[Any, ...] | None:
        seed_spaces(env, seed := control_seed(self.subject, self.index))
        self.calls += 1
        return self.subject.call(env, Op("reset", (seed, self.subject.options(self.index))))[1]

    def _act(self, env: AnyEnv, raw: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...] | None]:
        action = choose(self.subject, self.space, raw[0], raw[4], self.rng, bool(self.rng.random() < 0.6))
        return self._again(env, action)

    def _again(self, env: AnyEnv, action: Any) -> tuple[Any, tuple[Any, ...] | None]:
        self.calls += 1
        try:
            return action, env.step(copy.deepcopy(action))
        except Exception:  # the end of this path, as of an episode
            return action, None

    def _new(
        self, path: tuple[Any, ...], raw: tuple[Any, ...], total: float, seen: frozenset[Feature]
    ) -> tuple[bool, frozenset[Feature]]:
        """Record the features of a path's last step; True if any was new, and all features of the path."""
        news = False
        mine = set()
        for feature in _features(path[-1], raw, total):
            values = self._values.setdefault(feature[:-1] if feature[0] == "value" else feature[0], set())
            limit = {"reward": VALUES, "return": PLACES, "value": VALUES, "place": PLACES}.get(feature[0], 1000)
            if feature in values or len(values) < limit:
                news = news or feature not in values
                values.add(feature)
                mine.add(feature)
        seen = seen | mine
        for feature in mine - self.paths.keys():
            self.paths[feature] = (path, seen)
        if len(path) >= 2 * self._length:
            self._length = len(path)
            self.paths["length", len(path)] = (path, seen)
        return news, seen

    def _episode(self, env: AnyEnv, length: int = 1) -> None:
        """Play one episode, in which an action is repeated for ``length`` steps on average."""
        raw, total = self._reset(env), 0.0
        path: tuple[Any, ...] = ()
        seen: frozenset[Feature] = frozenset()
        left = 0
        while raw is not None and len(path) < self.longest and not self.late():
            if left:
                action, raw = self._again(env, path[-1])
            else:
                action, raw = self._act(env, raw)
                left = int(self.rng.geometric(1 / length))
            left -= 1
            path = (*path, action)
            if raw is None:
                return
            total += _number(raw[1])
            _, seen = self._new(path, raw, total, seen)
            if raw[2] or raw[3]:
                return

    def _survive(self, env: AnyEnv) -> None:
        """Play one long episode: from every end but a truncation, return by ever more steps."""
        raw = self._reset(env)
        if raw is None:
            return
        path: tuple[Any, ...] = ()
        seen: frozenset[Feature] = frozenset()
        total, deaths = 0.0, 0
        marks = [_Moment(path, raw, total, seen, snapshot(env))]
        best: tuple[tuple[Any, ...], frozenset[Feature]] = (path, seen)
        try:
            while len(path) < self.longest and deaths < DEATHS and not self.late():
                action, raw = self._act(env, raw)
                path = (*path, action)
                if raw is not None:
                    total += _number(raw[1])
                    _, seen = self._new(path, raw, total, seen)
                    if len(path) > len(best[0]):
                        best, deaths = (path, seen), 0
                    if raw[3]:
                        break
                if raw is None or raw[2]:
                    deaths += 1
                    for _ in range(min(len(marks) - 1, deaths // 3)):
                        release(marks.pop().snap)
                    path, raw, total, seen = marks[-1].path, marks[-1].raw, marks[-1].total, marks[-1].seen
                    restore(env, marks[-1].snap)
                elif len(path) % 2 == 0:
                    marks.append(_Moment(path, raw, total, seen, snapshot(env)))
                    if len(marks) > 64:
                        release(marks.pop(1).snap)
        finally:
            for mark in marks:
                release(mark.snap)
        if best[0]:
            self.paths["longest",] = best

    def _explore(self, env: AnyEnv) -> None:
        raw = self._reset(env)
        if raw is None:
            return
        self.archive.append(_Moment((), raw, 0.0, frozenset(), snapshot(env)))
        while not self.late():
            recent = self.archive[-8:] if self.rng.random() < 0.5 else self.archive
            moment = recent[int(self.rng.integers(len(recent)))]
            restore(env, moment.snap)
            path, total, seen = moment.path, moment.total, moment.seen
            current: tuple[Any, ...] | None = moment.raw
            stubborn = path and self.rng.random() < STUBBORN
            for _ in range(min(30, int(self.rng.geometric(0.15))) if not stubborn else 3 * RUNS[0]):
                if current is None or current[2] or current[3] or len(path) >= self.longest:
                    break
                action, current = self._again(env, path[-1]) if stubborn else self._act(env, current)
                path = (*path, action)
                if current is None:
                    break
                total += _number(current[1])
                news, seen = self._new(path, current, total, seen)
                if news and not (current[2] or current[3]) and len(self.archive) < 200:
                    self.archive.append(_Moment(path, current, total, seen, snapshot(env)))


def _number(reward: Any) -> float:
    return float(reward) if isinstance(reward, (int, float, np.number)) else 0.0


def _chosen(searches: list[_Search], count: int) -> list[tuple[_Search, tuple[Any, ...]]]:
    """The paths with the largest joint coverage: one of each ending, the longest, then by their additions."""
    candidates = [
        (search, *found) for search in searches for found in {id(it[0]): it for it in search.paths.values()}.values()
    ]
    chosen: list[tuple[_Search, tuple[Any, ...]]] = []
    seen: set[Feature] = set()

    def choose_one(search: _Search, path: tuple[Any, ...], features: frozenset[Feature]) -> None:
        if all(path is not other for _, other in chosen):
            chosen.append((search, path))
            seen.update(features)

    endings = {feature for search in searches for feature in search.paths if feature[0] == "ending"}
    for feature in [*sorted(endings), ("longest",)]:
        search = next((search for search in searches if feature in search.paths), None)
        if search is not None:
            choose_one(search, *search.paths[feature])
    while len(chosen) < count and candidates:
        best = max(candidates, key=lambda candidate: len(_telling(candidate[2]) - seen))
        if not _telling(best[2]) - seen:
            break
        choose_one(*best)
        candidates = [each for each in candidates if each is not best]  # actions may be arrays, which `==` is none of
    return chosen


def _telling(features: frozenset[Feature]) -> set[Feature]:
    """Features that a reader of the report would call an event."""
    return {feature for feature in features if feature[0] not in ("place", "return")}
