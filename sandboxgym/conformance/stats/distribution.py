"""Statistics of a run: futures sampled with and without a restore, all tests on them, and their common error rate.

All p-values of a run (of the three statistical checks) go into one Holm procedure at level `tests.ALPHA`. In the live
design, a run is permuted only with runs of the same past, if there are many of these.
"""

from __future__ import annotations

import contextlib
import importlib.util
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from sandboxgym.conformance.check import Budget, Skipped
from sandboxgym.conformance.harness.continuations import NEAR, Future, Place, places, policy_at, reach, seed_of
from sandboxgym.conformance.harness.scenario import opened, release
from sandboxgym.conformance.stats import tests as st
from sandboxgym.conformance.subject import Subject, fork, restore, snapshot

SHIFTS = {"quick": 0.2, "full": 0.1}
"""Total variation distance that a budget must be able to detect with `tests.POWER`, else INCONCLUSIVE."""
REPEATS = {"quick": 0.3, "full": 0.15}
"""Share of repeated sibling pairs that a budget must be able to detect."""
CELLS = 6
"""Number of cells for which enough futures are drawn."""


@dataclass
class Study:
    """All statistical results of a run, together because Holm's procedure must see all p-values."""

    reason: str = ""
    """Reason why there is nothing to test; empty if there is something."""
    designs: list[str] = field(default_factory=list)
    tests: dict[str, dict[str, st.Comparison]] = field(default_factory=dict)
    """Comparisons by check, then by name."""
    drift: dict[str, float] = field(default_factory=dict)
    """p-values of the uninterrupted futures' first half against their second half."""
    shift: float = 0.0
    repeats: float = 0.0
    samples: dict[str, int] = field(default_factory=dict)
    calibration: dict[str, Any] = field(default_factory=dict)
    scripts: dict[str, str] = field(default_factory=dict)
    chance: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Agreement by chance and the number of pairs, for tests of dependence."""

    @property
    def adjusted(self) -> dict[str, float]:
        """Holm's adjusted p-values over all tests."""
        return st.holm({name: test.p for tests in self.tests.values() for name, test in tests.items()})

    @property
    def strictest(self) -> float:
        """Level of the strictest step of Holm's procedure."""
        return st.ALPHA / max(1, sum(map(len, self.tests.values())))


_studies: weakref.WeakKeyDictionary[Subject, dict[tuple[Budget, int], Study]] = weakref.WeakKeyDictionary()

TRANSITIONS, RETURNS, SIBLINGS = (
    "stochastic.transition_distribution",
    "stochastic.return_distribution",
    "stochastic.siblings_independent",
)


def study(subject: Subject, budget: Budget) -> Study:
    """The study of a subject, made at the first request."""
    if importlib.util.find_spec("scipy") is None:
        raise Skipped("power and intervals need scipy: pip install 'sandboxgym[conformance]'")
    known = _studies.setdefault(subject, {})
    key = (replace(budget, seconds=0.0), subject.seed)  # checks of one run may have other limits
    if key not in known:
        known[key] = _study(subject, budget)
    return known[key]


def _study(subject: Subject, budget: Budget) -> Study:
    result = Study(shift=SHIFTS.get(budget.name, 0.2), repeats=REPEATS.get(budget.name, 0.3))
    rng = np.random.default_rng([subject.seed, 1001])
    with contextlib.ExitStack() as stack:
        chosen, result.reason = places(subject, budget, stack)
        planned = 6 * len(chosen) + 9
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
    """Draw from both sides in turn, so that drift affects both, until the samples suffice for the power."""
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
    """Groups with the same past; small groups are merged."""
    pasts = st.labelled([future.past for future in pooled])
    counts = np.bincount(pasts)
    frequent = int((counts >= max(50, len(pooled) // 8)).sum())
    return st.merged(pasts, frequent + 1) if frequent else np.zeros(len(pooled), dtype=np.int64)


def _rows(pooled: list[Future], depth: int) -> Any:
    """Numbers of a transition as rows, or None where there are none, or not always as many."""
    widths = {len(future.numbers[depth]) for future in pooled if depth < len(future.numbers)}
    if len(widths) != 1 or (width := widths.pop()) < 2:
        return None
    rows = [future.numbers[depth] if depth < len(future.numbers) else (0.0,) * width for future in pooled]
    return np.array(rows, dtype=np.float64)


def _script(place: Place) -> str:
    """Lines of a script that samples the next transition on both sides."""
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


def _siblings(subject: Subject, budget: Budget, place: Place) -> dict[str, list[list[Future]]]:
    """Families of seeded siblings at one state, by the way of making them; every family has a seed of its own."""
    k = max(2, budget.forks)
    made: dict[str, list[list[Future]]] = {"fork": [], "restore": []}
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(opened(subject))
        reach(subject, source, place.control, place.point)
        snap = snapshot(source)
        stack.callback(release, snap)
        policy = policy_at(subject, source, place.control, place.point, NEAR)
        for index in budget.spending(budget.samples // 8, seconds=1.25 * budget.seconds, at_least=10):
            seed = seed_of(subject.seed, index, 10)
            children = fork(source, k, seed)
            try:
                made["fork"].append([policy.follow(child, 0) for child in children])
            finally:
                for child in children:
                    child.close()
            family = []
            for sibling in range(k):
                restore(source, snap, index * k + sibling)  # neighbouring seeds, as users give them
                family.append(policy.follow(source, 0))
            made["restore"].append(family)
            restore(source, snap)
    return made


def _relate(
    result: Study, families: dict[str, list[list[Future]]], same: list[Future], rng: np.random.Generator, draws: int
) -> None:
    """Test siblings for independence, in the next transition and in all near ones, and for the right distribution."""
    tests = result.tests.setdefault(SIBLINGS, {})

    def alike(name: str, one: list[Future], other: list[Future]) -> None:
        labels = st.merged(st.labelled([future.whole for future in (*one, *other)]), CELLS)
        if labels.max() > 0:
            tests[name] = st.homogeneity(name, labels, len(one), rng, draws)

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
        if same:
            everyone = [future for group in groups for future in group]
            alike(f"{how}: all of each family against uninterrupted futures", same, everyone)
        later = [future for group in groups for future in group[1:]]
        alike(f"{how}: the first of each family against the others", [group[0] for group in groups], later)
    if not same:  # nothing uninterrupted starts here: what was forked against what was restored
        forked, restored = ([future for group in families[how] for future in group] for how in ("fork", "restore"))
        alike("forks against restores", forked, restored)
