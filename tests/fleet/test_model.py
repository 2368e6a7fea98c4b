"""The model of a fleet: costs recovered from measurements, and a simulation with the limits that it must have."""

from __future__ import annotations

import pytest

from sandboxgym.bench.fleet.model import Costs, OwnerCosts, fitted, owners_needed, simulate

COSTS = Costs(per_message=0.001, per_step=0.00002)


def test_costs_are_recovered_from_what_they_explain() -> None:
    measured = [OwnerCosts(m, n, m * COSTS.per_message + n * COSTS.per_step) for m, n in ((2, 2), (2, 64), (4, 128))]
    found = fitted(measured)
    assert found.per_message == pytest.approx(COSTS.per_message)
    assert found.per_step == pytest.approx(COSTS.per_step)


def test_no_cost_is_below_zero() -> None:
    assert fitted([OwnerCosts(1, 1, 0.001), OwnerCosts(1, 100, 0.2)]).per_message == 0.0
    assert fitted([OwnerCosts(1, 10, 0.002), OwnerCosts(1, 100, 0.001)]).per_step == 0.0


def test_one_ratio_of_steps_to_messages_cannot_tell_the_costs_apart() -> None:
    with pytest.raises(ValueError, match="two numbers of steps per message"):
        fitted([OwnerCosts(1, 10, 0.1), OwnerCosts(2, 20, 0.2)])


def test_slow_steps_are_limited_by_the_workers_and_fast_ones_by_the_owner() -> None:
    slow = simulate(COSTS, workers=10, envs=4, step=1.0, spread=0.0, latency=0.0)
    assert slow.steps_per_second == pytest.approx(10 * 4 / 4.0, rel=0.01) and slow.owner < 0.01
    fast = simulate(COSTS, workers=1000, envs=4, step=1e-6, spread=0.0, latency=0.0)
    most = 4 / (COSTS.per_message + 4 * COSTS.per_step)
    assert fast.steps_per_second == pytest.approx(most, rel=0.01) and fast.owner > 0.99


def test_several_owners_raise_what_one_could_not() -> None:
    one = simulate(COSTS, workers=1000, envs=4, step=0.01)
    count = owners_needed(COSTS, workers=1000, envs=4, step=0.01)
    more = simulate(COSTS, workers=1000, envs=4, step=0.01, owners=count)
    assert one.owner > 0.9 and more.owner <= 0.5 and count > 8
    assert more.steps_per_second > 8 * one.steps_per_second
    assert owners_needed(COSTS, workers=10, envs=4, step=1.0) == 1


@pytest.mark.parametrize("owners", [0, 11])
def test_every_owner_has_a_worker(owners: int) -> None:
    with pytest.raises(ValueError, match=r"as many as there are workers \(10\)"):
        simulate(COSTS, workers=10, envs=1, step=0.1, owners=owners)
