"""The tests of distributions keep their level, have the claimed power, and give correct intervals."""

from __future__ import annotations

import numpy as np
import pytest

st = pytest.importorskip("sandboxgym.conformance.stats.tests")
pytest.importorskip("scipy")


def rejections(p_values, level):
    return sum(p <= level for p in p_values)


def allowed(runs, level):
    """The most rejections that a test of this level gives with probability 0.9999."""
    from scipy.stats import binom

    return int(binom.isf(1e-4, runs, level))


def simulated(runs, size=60):
    """p-values of comparisons of samples from one distribution, by test."""
    rng = np.random.default_rng(7)
    found = {"few": [], "many": [], "ranks": [], "energy": [], "strata": [], "dependence": []}
    for _ in range(runs):
        few = rng.choice(3, size=2 * size, p=[0.7, 0.2, 0.1])
        many = st.merged(rng.geometric(0.05, size=2 * size) - 1, 6)
        rows = rng.normal(size=(2 * size, 2)) ** 3
        strata = rng.integers(3, size=2 * size)
        found["few"].append(st.homogeneity("", few, size, rng, 399).p)
        found["many"].append(st.homogeneity("", many, size, rng, 399).p)
        found["ranks"].append(st.ranks("", rows[:, 0], size, rng, 399).p)
        found["energy"].append(st.energy("", rows[:size], size // 2, rng, 199).p)
        shifted = (few + strata) % 3  # depends on the stratum, and on nothing else
        found["strata"].append(st.homogeneity("", shifted, size, rng, 399, strata=strata).p)
        found["dependence"].append(st.dependence("", rng.choice(3, size=(20, 3)), rng, 199).p)
    return found


@pytest.mark.parametrize("runs", [60, pytest.param(800, marks=pytest.mark.slow)])
def test_samples_of_one_distribution_are_rejected_no_more_often_than_the_level(runs):
    for name, p_values in simulated(runs).items():
        for level in (0.01, 0.05, 0.2):
            assert rejections(p_values, level) <= allowed(runs, level), (name, level)
        assert rejections(p_values, 0.5) > 0.3 * runs, f"{name} hardly ever rejects: its p-values are too large"


def test_a_stopped_p_value_agrees_with_one_from_all_draws():
    rng = np.random.default_rng(0)
    for observed in (0.0, 1.0, 2.0):
        p = np.mean([st.permutation_p(observed, rng.standard_normal, 2000) for _ in range(200)])
        truth = {0.0: 0.5, 1.0: 0.1587, 2.0: 0.0228}[observed]
        assert p == pytest.approx(truth, rel=0.15)
    assert st.permutation_p(50.0, rng.standard_normal, 999) == 1 / 1000


def test_equal_statistics_count_against_a_difference():
    assert st.permutation_p(1.0, lambda number: np.full(number, 1.0 - 1e-13), 999) == 1.0


@pytest.mark.parametrize(("size", "shift"), [(600, 0.2), (2900, 0.1)])
def test_the_claimed_power_is_there(size, shift):
    rng = np.random.default_rng(1)
    alpha = 1e-4
    claimed = st.power((size, size), 2, shift, alpha)
    assert claimed >= 0.98
    found = 0
    for _ in range(15):
        labels = np.concatenate([rng.random(size) < 0.5, rng.random(size) < 0.5 + shift]).astype(np.int64)
        found += st.homogeneity("", labels, size, rng, 20_000).p <= alpha
    assert found >= 13


def test_power_is_least_favourable():
    # the facts page's table: 99 % for a coin from 0.5 to 0.5 + shift, at 1e-4
    for size, shift in ((1906, 0.1), (457, 0.2), (189, 0.3)):
        assert st.power((size, size), 2, shift, 1e-4) == pytest.approx(0.99, abs=0.02)
    assert st.power((100, 100), 30, 0.2, 1e-4) < st.power((100, 100), 3, 0.2, 1e-4)
    assert st.cells_for((4000, 4000), 0.1, 1e-4) > st.cells_for((2900, 2900), 0.1, 1e-4) >= 2
    assert st.detectable((1906, 1906), 2, 1e-4) == pytest.approx(0.1, abs=0.005)
    assert st.detectable((5, 5), 2, 1e-4) == 1.0


def test_holm_adjusts_and_keeps_the_order():
    assert st.holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "c": 0.06, "b": 0.06})
    assert st.holm({}) == {}


def test_intervals_hold_the_truth():
    rng = np.random.default_rng(2)
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.3, 0.3])
    missed = missed_single = missed_kolmogorov = 0
    for _ in range(200):
        estimate, low, high = st.tv_interval(rng.multinomial(300, p), rng.multinomial(200, q))
        assert low <= estimate <= high
        missed += not low <= 0.1 <= high
        low, high = st.proportion_interval(int(rng.binomial(50, 0.2)), 50)
        missed_single += not low <= 0.2 <= high
        _, low, high = st.kolmogorov_interval(rng.random(100), rng.random(100) + 0.1)
        missed_kolmogorov += not low <= 0.1 <= high
    assert missed <= 10 and missed_single <= 20 and missed_kolmogorov <= 10
    assert st.proportion_interval(0, 10)[0] == 0.0 and st.proportion_interval(10, 10)[1] == 1.0


def test_siblings_that_repeat_each_other_are_found_and_independent_ones_are_not():
    rng = np.random.default_rng(3)
    groups = rng.integers(6, size=(150, 4))
    assert st.dependence("", groups, rng, 2000).p > 0.001
    repeats = groups.copy()
    copied = rng.random(150) < 0.5
    repeats[copied, 1] = repeats[copied, 0]
    assert st.dependence("", repeats, rng, 2000).p < 0.001
    clones = np.repeat(np.arange(20)[:, None], 2, axis=1)
    found = st.dependence("", clones, rng, 2000)
    assert found.p < 0.001 and found.effect[0] > 0.9
    assert st.dependence_power(1 / 6, 900, 0.3, 1e-4) > 0.99 > st.dependence_power(1 / 6, 20, 0.3, 1e-4)


def test_cells_follow_from_the_pooled_sample():
    labels = np.array([0, 1, 1, 2, 2, 2, 3])
    assert st.merged(labels, 2).tolist() == [1, 1, 1, 0, 0, 0, 1]
    assert st.quantiles(np.array([1.0, 1.0, 5.0]), 4).tolist() == [0, 0, 1]
    assert len(np.unique(st.quantiles(np.arange(100.0), 5))) == 5
    cells = st.nearest(np.random.default_rng(0).normal(size=(100, 3)), 6, np.random.default_rng(1))
    assert len(np.unique(cells)) == 6


def test_calibration_reports_what_it_found():
    rng = np.random.default_rng(5)
    found = st.calibrate(rng.integers(4, size=300), rng.normal(size=300), rng, runs=40, size=60)
    assert found["within the level"] and set(found["rejected"]) == {"homogeneity", "ranks", "energy", "any, by Holm"}


def test_nan_infinities_and_huge_numbers_are_values_like_others():
    rng = np.random.default_rng(1)
    values = rng.normal(size=400)
    values[rng.random(400) < 0.3] = np.nan
    values[rng.random(400) < 0.1] = np.inf
    values[:3] = 1e308
    found = st.calibrate(rng.integers(5, size=400), values, rng, runs=60, size=100)
    assert found["within the level"], found
    more = values[:200].copy()
    more[:100][rng.random(100) < 0.5] = np.nan
    assert st.ranks("", more, 100, rng, 399).p < 0.01
    assert st.energy("", np.stack([more, more], axis=1), 100, rng, 399).p < 0.01
    assert len(np.unique(st.quantiles(values, 8))) >= 6
