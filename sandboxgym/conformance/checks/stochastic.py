"""Level 3: where futures are random, a restore changes no probability, and seeded siblings are independent.

Where the random streams are captured, futures couple exactly (`stochastic.coupled`); what is left to statistics is
that a *seed* given to ``restore`` or ``fork`` gives a fresh draw from the right distribution, and environments whose
randomness nobody captures. The samples are compared in one of two designs, named in the evidence:

- *replayed*: the controls are replays from ``reset(seed)`` to the very state of the snapshot, whose ``np_random`` is
  replaced there; against ``restore(snap, seed=…)``. For environments that repeat from a seed and draw from
  ``np_random``, which is Gymnasium's rule.
- *live*: whole runs, each from a new environment and another seed, that were never interrupted; against such runs in
  which a snapshot was taken on the way, a detour walked and the snapshot restored. Any environment allows this: if
  snapshots are faithful, the past and the future together have one distribution. Runs are permuted among those with
  the same past only, as far as there are many.

All p-values of a run (of the three statistical checks) go into one procedure of Holm at `statistics.ALPHA`.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from sandboxgym.conformance import statistics as st
from sandboxgym.conformance.check import Budget, Failed, Inconclusive, Skipped, check
from sandboxgym.conformance.recording import Scene, choose, first_difference, opened, release
from sandboxgym.conformance.subject import AnyEnv, Control, Op, Outcome, Subject, branch, put, take

SHIFTS = {"quick": 0.2, "full": 0.1}
"""The total variation distance that a budget must be able to see with `statistics.POWER`, else INCONCLUSIVE."""
REPEATS = {"quick": 0.3, "full": 0.15}
"""The share of sibling pairs that repeat each other that it must be able to see."""
NEAR = 3
"""Transitions of each future that are compared whole; of the rest, the return, the length and the end."""
PILOT = 12
"""Futures drawn at a place to see whether anything is random there."""
PLACES = {"quick": 1, "full": 2}
CELLS = 6
"""Cells for which enough futures are drawn."""


# Futures.


class Future(NamedTuple):
    """A random continuation: what the tests look at."""

    past: int
    """Hash of all that came before."""
    whole: tuple[int, ...]
    """Hashes of the first `NEAR` transitions; shorter where the episode ended."""
    fields: tuple[tuple[int, ...], ...]
    """Of each of them: hashes of observation, reward, flags, info and hidden state."""
    numbers: tuple[tuple[float, ...], ...]
    """Of each of them: reward and numeric observation."""
    total: float
    """Return to the end."""
    length: int
    end: int
    """Hash of the last transition's reward and flags."""


@dataclass
class Policy:
    """The same function of what was returned in every future: the only randomness is the environment's."""

    subject: Subject
    first: Any
    space: Any
    seed: int
    limit: int

    def follow(self, env: AnyEnv, past: int) -> Future:
        """Act until the end of the episode."""
        rng = np.random.default_rng(self.seed)
        self.space.seed(self.seed)
        whole, fields, numbers = [], [], []
        total, length, end, action = 0.0, 0, 0, self.first
        for index in range(self.limit):
            length += 1
            if index < NEAR:
                outcome, raw = self.subject.call(env, Op("step", action))
                whole.append(hash(outcome))
                flags = (outcome.terminated, outcome.truncated, outcome.raised)
                parts = (outcome.observation, outcome.reward, flags, outcome.info, outcome.state)
                fields.append(tuple(map(hash, parts)))
                numbers.append(() if raw is None else tuple(_numbers(raw[1], raw[0])))
            else:
                raw = _step(env, action)
            if raw is None:
                end = hash("raised")
                break
            with contextlib.suppress(TypeError, ValueError):
                total += float(raw[1])
            end = hash((raw[1] if isinstance(raw[1], (int, float)) else 0, bool(raw[2]), bool(raw[3])))
            if raw[2] or raw[3]:
                break
            action = choose(self.subject, self.space, raw[0], raw[4], rng, True)
        return Future(past, tuple(whole), tuple(fields), tuple(numbers), total, length, end)


def _step(env: AnyEnv, action: Any) -> tuple[Any, ...] | None:
    try:
        return env.step(copy.deepcopy(action))
    except Exception:  # part of the future: `Policy.follow` says so
        return None


def _numbers(*values: Any, most: int = 16) -> Iterator[float]:
    """The numbers in nested values, at most 16 each; text has none."""
    for value in values:
        if isinstance(value, dict):
            yield from _numbers(*[value[key] for key in sorted(value, key=str)])
        elif isinstance(value, (list, tuple)):
            yield from _numbers(*value)
        elif isinstance(value, (bool, int, float, np.generic, np.ndarray)):
            array = np.asarray(value)
            if array.dtype.kind in "biuf":
                flat = array.ravel()[:: max(1, array.size // most)][:most].astype(np.float64)
                yield from np.nan_to_num(np.clip(flat, -1e12, 1e12)).tolist()


@dataclass
class Place:
    """A state, how to draw its futures with and without a restore, and how it was reached."""

    name: str
    design: str
    control: Control
    point: int
    draw: Callable[[int], Future]
    """A future of the uninterrupted environment."""
    drawn: Callable[[int], Future]
    """A future after a restore."""
    again: Callable[[int], Future] = field(default=lambda index: Future(0, (), (), (), 0.0, 0, 0))
    """In the live design: an uninterrupted future of a run from always the same seed."""
    drawn_again: Callable[[int], Future] = field(default=lambda index: Future(0, (), (), (), 0.0, 0, 0))
    """And a restored one, each restore with another seed."""
    uninterrupted: list[Future] = field(default_factory=list)
    restored: list[Future] = field(default_factory=list)


def _seed(*key: int) -> int:
    return int(np.random.SeedSequence(key).generate_state(1)[0]) % 2**31


def _fresh(env: AnyEnv, seed: int) -> None:
    """Fresh streams where Gymnasium keeps them."""
    env.unwrapped.np_random = np.random.default_rng(seed)
    env.action_space.seed(seed)
    env.observation_space.seed(seed)


def _reach(subject: Subject, env: AnyEnv, control: Control, point: int, seed: int | None = None) -> list[Outcome]:
    """Play the first ``point`` calls of a control run, with another seed where one is given."""
    seed = control.seed if seed is None else seed
    env.action_space.seed(seed)
    env.observation_space.seed(seed)
    start = control.ops[0]._replace(value=(seed, control.ops[0].value[1]))
    return [subject.call(env, op)[0] for op in (start, *control.ops[1:point])]


def _policy(subject: Subject, env: AnyEnv, control: Control, point: int, limit: int) -> Policy:
    following = control.ops[point] if point < len(control.ops) else control.ops[0]
    space = copy.deepcopy(env.action_space)
    seed = _seed(subject.seed, point, 5)
    space.seed(seed)
    first = following.value if following.kind == "step" else space.sample()
    return Policy(subject, first, space, seed, limit)


def _reusable(subject: Subject, control: Control) -> bool:
    """Whether a used environment that is reset runs like a new one (not with running statistics in a wrapper)."""
    with opened(subject) as env:
        for trial in range(2):
            _reach(subject, env, control, 1)
            _fresh(env, trial)
            for op in control.ops[1 : control.last]:
                subject.call(env, op)
            found = _reach(subject, env, control, len(control.ops))
            if first_difference(control.outcomes, found):
                return False
    return True


def replayed(subject: Subject, control: Control, point: int, budget: Budget, stack: contextlib.ExitStack) -> Place:
    """The first design; its environments are closed with ``stack``."""
    source = stack.enter_context(opened(subject))
    _reach(subject, source, control, point)
    snap = take(source)
    stack.callback(release, snap)
    policy = _policy(subject, source, control, point, budget.steps)
    used = stack.enter_context(opened(subject)) if _reusable(subject, control) else None

    def uninterrupted(env: AnyEnv, index: int) -> Future:
        _reach(subject, env, control, point)
        _fresh(env, _seed(subject.seed, index, 6))
        return policy.follow(env, 0)

    def draw(index: int) -> Future:
        if used is not None:
            return uninterrupted(used, index)
        with opened(subject) as env:
            return uninterrupted(env, index)

    def drawn(index: int) -> Future:
        put(source, snap, _seed(subject.seed, index, 7))
        return policy.follow(source, 0)

    return Place(f"after {point} calls, {control.name}", "replayed", control, point, draw, drawn)


def live(subject: Subject, control: Control, point: int, budget: Budget) -> Place:
    """The second design."""
    with opened(subject) as env:
        policy = _policy(subject, env, control, point, budget.steps)

    def run(seed: int, interrupt: bool, restore: int) -> Future:
        with opened(subject) as env:
            past = hash(tuple(_reach(subject, env, control, point, seed)))
            if interrupt:
                snap = take(env)
                try:
                    for _ in range(2):
                        _step(env, policy.first)
                    put(env, snap, restore if subject.capabilities.rng else None)
                finally:
                    release(snap)
            return policy.follow(env, past)

    def seeds(*key: int) -> int:
        return _seed(subject.seed, *key)

    return Place(
        f"after {point} calls of runs like {control.name}",
        "live",
        control,
        point,
        draw=lambda index: run(seeds(index, 8), False, 0),
        drawn=lambda index: run(seeds(index, 9), True, seeds(index, 11)),
        again=lambda index: run(control.seed, False, 0),
        drawn_again=lambda index: run(control.seed, True, seeds(index, 11)),
    )


def places(subject: Subject, budget: Budget, stack: contextlib.ExitStack) -> tuple[list[Place], str]:
    """Where futures are random, most varied first transitions first; the reason where nowhere."""
    found: list[tuple[int, Place]] = []
    tried = 0
    for index in range(2):
        control = subject.control(index, budget.steps)
        if control.outcomes[0].raised:
            continue
        replaceable = _replaceable(subject, control)
        last = max(1, control.last - 1)
        for point in sorted({1, 2, max(1, last // 2), last}):
            if point >= len(control.ops):
                continue
            variety = 0
            if control.repeatable and replaceable:
                place = replayed(subject, control, point, budget, stack)
                variety = _variety(place.draw)
            if variety <= 1:  # draws of its own, if any: seen in runs from one seed, or where a restore has a seed
                place = live(subject, control, min(point, 3), budget)
                variety = _variety(place.again if not control.repeatable else place.drawn_again)
            tried += PILOT
            if variety > 1:
                found.append((variety, place))
    if not found:
        return [], f"no randomness seen in {tried} reseeded futures"
    found.sort(key=lambda item: -item[0])
    chosen: list[Place] = []
    for _, place in found:  # the most varied of all, then of other places
        if all((place.point, place.design) != (other.point, other.design) for other in chosen):
            chosen.append(place)
    return chosen[: PLACES.get(budget.name, 2)], ""


def _variety(draw: Callable[[int], Future]) -> int:
    """How many different futures a few draws give."""
    return len({draw(10**6 + trial).whole for trial in range(PILOT)})


def _replaceable(subject: Subject, control: Control) -> bool:
    """Whether ``np_random`` can be replaced (a proxy's may be another environment's)."""
    with opened(subject) as env:
        _reach(subject, env, control, 1)
        try:
            _fresh(env, 1)
        except (AttributeError, TypeError):
            return False
    return True


# Comparing.


@dataclass
class Study:
    """All that the statistical checks of a run found out, for Holm's procedure must see all p-values."""

    reason: str = ""
    """Why there is nothing to test."""
    designs: list[str] = field(default_factory=list)
    tests: dict[str, dict[str, st.Comparison]] = field(default_factory=dict)
    """By check, then by name."""
    drift: dict[str, float] = field(default_factory=dict)
    """p-values of the uninterrupted futures' first half against their second half."""
    shift: float = 0.0
    repeats: float = 0.0
    samples: dict[str, int] = field(default_factory=dict)
    calibration: dict[str, Any] = field(default_factory=dict)
    scripts: dict[str, str] = field(default_factory=dict)
    chance: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Of the tests of dependence: agreement by chance and the number of pairs."""

    @property
    def adjusted(self) -> dict[str, float]:
        """Holm's adjusted p-values over all tests."""
        return st.holm({name: test.p for tests in self.tests.values() for name, test in tests.items()})

    @property
    def strictest(self) -> float:
        """The level of the strictest step."""
        return st.ALPHA / max(1, sum(map(len, self.tests.values())))


_studies: weakref.WeakKeyDictionary[Subject, dict[tuple[Budget, int], Study]] = weakref.WeakKeyDictionary()

TRANSITIONS, RETURNS, SIBLINGS = (
    "stochastic.transition_distribution",
    "stochastic.return_distribution",
    "stochastic.siblings_independent",
)


def study(subject: Subject, budget: Budget) -> Study:
    """The study of a subject, made when first asked for."""
    if importlib.util.find_spec("scipy") is None:
        raise Skipped("power and intervals need scipy: pip install 'sandboxgym[conformance]'")
    known = _studies.setdefault(subject, {})
    key = (budget, subject.seed)
    if key not in known:
        known[key] = _study(subject, budget)
    return known[key]


def _study(subject: Subject, budget: Budget) -> Study:
    result = Study(shift=SHIFTS.get(budget.name, 0.2), repeats=REPEATS.get(budget.name, 0.3))
    rng = np.random.default_rng([subject.seed, 1001])
    with contextlib.ExitStack() as stack:
        chosen, result.reason = places(subject, budget, stack)
        planned = 6 * len(chosen) + 6
        result.designs = [f"{place.design}: {place.name}" for place in chosen]
        for place in chosen:
            _sample(place, budget, result.shift, st.ALPHA / planned, 3 * budget.seconds / len(chosen))
            result.samples[place.name] = len(place.restored)
        if not chosen:
            return result
        families = _siblings(subject, budget, chosen[0])
        main = chosen[0]
        same = main.uninterrupted if main.design == "replayed" else []  # live ones are of other states
    draws = st.draws_for(planned)
    for number, place in enumerate(chosen):
        _compare(result, place, number, rng, draws, st.ALPHA / planned)
    _relate(result, families, same, rng, draws)
    pooled = [*main.uninterrupted, *main.restored]
    half = len(main.uninterrupted) // 2
    if half > 10:
        labels = st.merged(st.labelled([future.whole[:1] for future in main.uninterrupted]), 8)
        result.drift["first transition"] = st.homogeneity("", labels, half, rng, draws).p
    labels = st.merged(st.labelled([future.whole[:1] for future in pooled]), 8)
    totals = np.array([future.total for future in pooled])
    runs = 60 if budget.name == "quick" else 1000
    result.calibration = st.calibrate(labels, totals, rng, runs=runs, size=min(200, max(20, len(pooled) // 2)))
    return result


def _sample(place: Place, budget: Budget, shift: float, alpha: float, seconds: float) -> None:
    """Draw from both sides in turn, so that what drifts does so on both, until there are enough for the power."""
    enough = next(
        (n for n in range(50, budget.samples, 50) if st.power((n, n), CELLS, shift, alpha) >= st.POWER), budget.samples
    )
    for index in budget.spending(enough, seconds=seconds, at_least=10):
        place.uninterrupted.append(place.draw(index))
        place.restored.append(place.drawn(index))


def _compare(result: Study, place: Place, number: int, rng: np.random.Generator, draws: int, alpha: float) -> None:
    """All tests at one place."""
    pooled = [*place.uninterrupted, *place.restored]
    first = len(place.uninterrupted)
    sizes = (first, len(place.restored))
    strata = _strata(pooled)
    cells = st.cells_for(sizes, result.shift, alpha)
    spread = len(np.unique(strata)) - 1
    cells = max(2, cells - spread)

    def enter(check: str, name: str, test: Callable[[str], st.Comparison]) -> None:
        name = f"{name}, place {number}"
        result.tests.setdefault(check, {})[name] = test(name)

    def categories(check: str, name: str, labels: Any) -> None:
        if len(np.unique(labels)) > 1:
            part = st.merged(labels, cells)
            enter(check, name, lambda name: st.homogeneity(name, part, first, rng, draws, strata=strata))

    for name, depth in (("next transition", 0), (f"transition {NEAR}", NEAR - 1)):
        seen = [future.whole[depth] if depth < len(future.whole) else 0 for future in pooled]
        rows = _rows(pooled, depth)
        labels = st.labelled(seen)
        continuous = labels.max() + 1 > len(pooled) / 8
        if continuous and rows is not None:
            few = len(np.unique(rows, axis=0)) <= 1
            labels = np.zeros(len(pooled), dtype=np.int64) if few else st.nearest(rows, cells, rng)
        elif continuous:  # text that never repeats: the part of it that varies least, but does
            columns = [
                st.labelled([future.fields[depth][part] if depth < len(future.fields) else 0 for future in pooled])
                for part in range(5)
            ]
            varied = sorted((column.max(), part) for part, column in enumerate(columns) if column.max() > 0)
            labels = columns[varied[0][1]] if varied else labels
        categories(TRANSITIONS, name, labels)
        if rows is not None and len(np.unique(rows, axis=0)) > 10:
            enter(TRANSITIONS, f"{name}, numbers", partial(st.energy, rows=rows, first=first, rng=rng, draws=draws))
    totals = np.array([future.total for future in pooled])
    if len(np.unique(totals)) > 1:
        enter(RETURNS, "return, ranks", lambda name: st.ranks(name, totals, first, rng, draws))
        categories(RETURNS, "return", st.quantiles(totals, cells))
    categories(RETURNS, "end and length", _ends(pooled, cells))
    result.scripts[f"place {number}"] = _script(place)


def _ends(pooled: list[Future], cells: int) -> Any:
    lengths = st.quantiles(np.array([float(future.length) for future in pooled]), max(2, cells // 2))
    return st.labelled([(future.end, int(length)) for future, length in zip(pooled, lengths)])


def _strata(pooled: list[Future]) -> Any:
    """Groups with the same past; those with few members are one."""
    pasts = st.labelled([future.past for future in pooled])
    counts = np.bincount(pasts)
    frequent = int((counts >= max(50, len(pooled) // 8)).sum())
    return st.merged(pasts, frequent + 1) if frequent else np.zeros(len(pooled), dtype=np.int64)


def _rows(pooled: list[Future], depth: int) -> Any:
    """The numbers of a transition as rows, or None where there are none, or not always as many."""
    widths = {len(future.numbers[depth]) for future in pooled if depth < len(future.numbers)}
    if len(widths) != 1 or (width := widths.pop()) < 2:
        return None
    rows = [future.numbers[depth] if depth < len(future.numbers) else (0.0,) * width for future in pooled]
    return np.array(rows, dtype=np.float64)


def _script(place: Place) -> str:
    """Lines that sample the next transition on both sides."""
    seed, options = place.control.ops[0].value
    actions = [op.value for op in place.control.ops[1 : place.point]]
    following = place.control.ops[place.point]
    action = repr(following.value) if following.kind == "step" else "control.action_space.sample()"
    lines = ["from collections import Counter", "", "import numpy as np", ""]
    if place.design == "replayed":
        body = f"""
def at_the_state():
    env = make_env()
    env.reset(seed={seed}, options={options!r})
    for action in {actions!r}:
        env.step(action)
    return env


control, source, restored, uninterrupted = at_the_state(), at_the_state(), Counter(), Counter()
snap = sandboxgym.snapshot(source)
for seed in range(1000):
    control = at_the_state()
    control.unwrapped.np_random = np.random.default_rng(seed)
    uninterrupted[repr(control.step({action}))] += 1
    sandboxgym.restore(source, snap, seed=seed)
    restored[repr(source.step({action}))] += 1
"""
    else:
        body = f"""
uninterrupted, restored = Counter(), Counter()
for seed in range(2000):
    control = make_env()
    control.reset(seed=seed, options={options!r})
    for action in {actions!r}:
        control.step(action)
    if seed % 2:
        snap = sandboxgym.snapshot(control)
        control.step({action})
        sandboxgym.restore(control, snap)
    (restored if seed % 2 else uninterrupted)[repr(control.step({action}))] += 1
"""
    tail = """
for transition in uninterrupted | restored:
    print(uninterrupted[transition], restored[transition], transition)
"""
    return "\n".join(lines) + body + tail.lstrip("\n")


# Siblings.


def _siblings(subject: Subject, budget: Budget, place: Place) -> dict[str, list[list[Future]]]:
    """Families of seeded siblings at one state, by how they were made; every family has a seed of its own."""
    k = max(2, budget.forks)
    made: dict[str, list[list[Future]]] = {"fork": [], "restore": []}
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(opened(subject))
        _reach(subject, source, place.control, place.point)
        snap = take(source)
        stack.callback(release, snap)
        policy = _policy(subject, source, place.control, place.point, NEAR)
        for index in budget.spending(budget.samples // 8, seconds=1.25 * budget.seconds, at_least=10):
            seed = _seed(subject.seed, index, 10)
            children = branch(source, k, seed)
            try:
                made["fork"].append([policy.follow(child, 0) for child in children])
            finally:
                for child in children:
                    child.close()
            family = []
            for sibling in range(k):
                put(source, snap, index * k + sibling)  # neighbouring seeds, as users give them
                family.append(policy.follow(source, 0))
            made["restore"].append(family)
            put(source, snap)
    return made


def _relate(
    result: Study, families: dict[str, list[list[Future]]], same: list[Future], rng: np.random.Generator, draws: int
) -> None:
    """Whether members of a family agree, of the next transition and of all near ones, and whether families vary."""
    tests = result.tests.setdefault(SIBLINGS, {})
    for how, groups in families.items():
        for what, look in (("next transition", 1), (f"{NEAR} transitions", NEAR)):
            flat = [future.whole[:look] for group in groups for future in group]
            labels = st.labelled(flat).reshape(len(groups), -1)
            if labels.max() == 0:
                continue
            if labels.max() > labels.size / 2:  # nearly all differ: only exact repetition can be seen
                what = f"{what}, exact"
            name = f"{how}: {what}"
            tests[name] = st.dependence(name, labels, rng, draws)
            pairs = len(groups) * labels.shape[1] * (labels.shape[1] - 1) // 2
            result.chance[name] = (st.agreement_by_chance(labels), pairs)
        futures = [future.whole for future in same] + [group[0].whole for group in groups]
        labels = st.merged(st.labelled(futures), CELLS)
        if same and labels.max() > 0:
            name = f"{how}: the first of each family against uninterrupted futures"
            tests[name] = st.homogeneity(name, labels, len(same), rng, draws)


# Checks.


@check(
    "stochastic.coupled",
    level=3,
    needs=("rng",),
    after=("api.protocol",),
    hazard="Draws after a restore are not those that the captured streams were going to give: nothing can be repeated.",
    blind="Streams that no call of the recorded runs draws from.",
)
def coupled(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """For environments with captured streams: a restore after one with a seed gives the uninterrupted future again; a
    restore with a seed gives the same future twice, also in another environment; and a snapshot of what was restored
    with a seed repeats that future.
    """
    compared = 0
    if not subject.noise:
        raise Skipped("no randomness seen: runs with other draws give the same, and restore.* compare those exactly")
    for index in range(max(1, budget.traces // 2)):
        control = subject.control(index, budget.steps)
        last = control.last
        points = {1, int(rng.integers(1, last)) if last > 1 else 1, max(1, last // 2)}
        with Scene(subject) as scene:
            walk = scene.walk(control, points)
            other = scene.start(control)
            for point in walk.points:
                seed = int(rng.integers(2**31))
                rest = control.ops[point:last]
                scene.restore(walk.env, walk.snaps[point], seed=seed)
                once = scene.play(walk.env, rest)
                scene.restore(walk.env, walk.snaps[point])
                compared += scene.expect(walk.env, walk, point, "a restore after one with a seed is not exact")
                for env in (walk.env, other):
                    scene.restore(env, walk.snaps[point], seed=seed)
                    middle = len(rest) // 2
                    twice = scene.play(env, rest[:middle])
                    snap = scene.snapshot(env)
                    twice += scene.play(env, rest[middle:])
                    compared += len(rest)
                    if difference := first_difference(once, twice):
                        scene.fail(f"two restores with seed {seed} go on differently: {difference}")
                    scene.restore(env, snap)
                    again = scene.play(env, rest[middle:])
                    if difference := first_difference(once[middle:], again):
                        scene.fail(f"a snapshot of what was restored with a seed is not exact: {difference}")
    return {"calls compared": compared}


def _judge(subject: Subject, budget: Budget, check: str, what: str) -> dict[str, Any]:
    """The verdict of a check on the study's p-values."""
    found = study(subject, budget)
    if found.reason:
        raise Skipped(found.reason)
    tests, adjusted = found.tests.get(check, {}), found.adjusted
    if not tests:
        raise Skipped("what it compares was always the same where futures are random")
    evidence: dict[str, Any] = {
        "tests": [{**test.to_json(), "adjusted p": adjusted[name]} for name, test in tests.items()],
        "tests in all": len(adjusted),
        "false alarms of the run": st.ALPHA,
        "designs": found.designs,
        "calibration": found.calibration,
    }
    rejected = sorted((name for name in tests if adjusted[name] <= st.ALPHA), key=lambda name: adjusted[name])
    if rejected:
        test = tests[rejected[0]]
        effect = ""
        if test.effect is not None:
            effect = f"; {test.distance} {test.effect[0]:.3f}, at least {test.effect[1]:.3f}"
        message = f"{what}: {test.name} (adjusted p = {adjusted[test.name]:.2g}{effect})"
        script = found.scripts.get(test.name.rpartition(", ")[2])
        raise Failed(message, evidence, None if script is None else _runnable(subject, script))
    if not found.calibration["within the level"]:
        raise Inconclusive(f"the calibration rejects too often: {found.calibration['rejected']}", evidence)
    if min(found.drift.values(), default=1.0) <= st.ALPHA / 10:
        raise Inconclusive("uninterrupted futures drift by themselves from draw to draw", evidence)
    return evidence


def _runnable(subject: Subject, body: str) -> str:
    return Scene(subject).script() + body


def _powerful(found: Study, tests: dict[str, st.Comparison], evidence: dict[str, Any]) -> None:
    """Raise unless a shift of the promised size would have been found in every place's main test."""
    powers = [
        (st.power(test.sizes, test.cells, found.shift, found.strictest), test.sizes, test.cells)
        for test in tests.values()
        if test.cells >= 2
    ]
    if not powers:
        raise Inconclusive("no test with a known power applies", evidence)
    chance, sizes, cells = max(powers)
    evidence["power"] = {
        "TV": found.shift,
        "at least": round(chance, 4),
        "detectable TV": round(st.detectable(sizes, cells, found.strictest), 4),
    }
    if chance < st.POWER:
        raise Inconclusive(
            f"{sizes[1]} futures a side find a total variation distance of {found.shift} with probability "
            f"{chance:.3f} only, {st.POWER} is asked for",
            evidence,
        )


@check(
    TRANSITIONS,
    level=3,
    after=("api.protocol",),
    hazard="Siblings are drawn from another distribution than the backbone: their mean return is another one.",
    blind="Shifts of what none of the first three transitions shows, or smaller than the detectable one in the "
    "evidence; in the replayed design, randomness drawn from anything but np_random; in the live design, shifts that "
    "the variety of pasts hides.",
)
def transition_distribution(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Draws the next transitions of one state many times, restored and uninterrupted, and compares them: χ² of whole
    transitions (or of cells of continuous ones), and the energy distance of their numbers.
    """
    evidence = _judge(subject, budget, TRANSITIONS, "the next transitions after a restore have another distribution")
    found = study(subject, budget)
    _powerful(found, found.tests[TRANSITIONS], evidence)
    return evidence


@check(
    RETURNS,
    level=3,
    after=("api.protocol",),
    hazard="Returns of siblings are not those that the state would have given: every advantage is biased.",
    blind="As transition_distribution; beyond the budget's number of steps, nothing.",
)
def return_distribution(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Compares returns to the end of the episode (ranks; χ²), and how and when it ends, of the same futures."""
    evidence = _judge(subject, budget, RETURNS, "the returns after a restore have another distribution")
    found = study(subject, budget)
    _powerful(found, found.tests[RETURNS], evidence)
    return evidence


@check(
    SIBLINGS,
    level=3,
    after=("api.protocol",),
    hazard="Siblings repeat each other: a group of four counts as four samples and is worth less.",
    blind="Dependence by which siblings do not agree more often: antithetic draws, say. Of continuous outcomes, all "
    "but exact repetition.",
)
def siblings_independent(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Makes many families of siblings, by ``fork(k, seed=…)`` and by restores with neighbouring seeds; tests whether
    members of a family agree more often than those of different families do; where streams are captured, forks without
    a seed must all agree.
    """
    evidence = _judge(subject, budget, SIBLINGS, "seeded siblings repeat each other")
    found = study(subject, budget)
    if subject.capabilities.rng:
        evidence["unseeded forks that agree"] = _unseeded(subject, budget)
    chances = {
        name: round(st.dependence_power(chance, pairs, found.repeats, found.strictest), 4)
        for name, (chance, pairs) in found.chance.items()
    }
    evidence["power"] = {"share of repeating pairs": found.repeats, "of the tests": chances}
    for how in ("fork", "restore"):
        best = max((value for name, value in chances.items() if name.startswith(how)), default=0.0)
        if best < st.POWER:
            reason = (
                f"families of {how}s find that {found.repeats:.0%} of pairs repeat with probability {best:.2f} only"
            )
            raise Inconclusive(reason, evidence)
    return evidence


def _unseeded(subject: Subject, budget: Budget) -> int:
    control = subject.control(0, budget.steps)
    if not control.repeatable:
        return 0
    point = max(1, control.last // 2)
    with Scene(subject) as scene:
        walk = scene.walk(control, [point])
        scene.restore(walk.env, walk.snaps[point])
        children = scene.fork(walk.env, max(2, budget.forks))
        futures = [scene.play(child, control.ops[point : control.last]) for child in children]
        for future in futures[1:]:
            if difference := first_difference(futures[0], future):
                scene.fail(f"forks without a seed go on differently: {difference}")
    return len(futures)


__all__ = [
    "Study",
    "coupled",
    "return_distribution",
    "siblings_independent",
    "study",
    "transition_distribution",
]
