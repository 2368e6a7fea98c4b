"""The small network for state values: what it learns, saves and refuses."""

from __future__ import annotations

import numpy as np
import pytest

from bpo_ref.config import ConfigError
from bpo_ref.learning.value_network import Example, Features, ValueNetwork, told_of


def batch(seed: int, *, kind: str = "find") -> list[Example]:
    """States of which the first feature is worth half, and being refused costs a fifth."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(200):
        near, depth, refused = float(rng.random() < 0.5), int(rng.integers(5)), int(rng.integers(3))
        found.append(Example(Features((near, 0.3), depth, refused, kind), 0.5 * near - 0.2 * (refused == 1), 1.0))
    return found


def taught(batches: int) -> ValueNetwork:
    network = ValueNetwork(5)
    for seed in range(batches):
        network.observe(batch(seed))
    return network


def test_it_learns_what_features_turns_and_refusals_are_worth() -> None:
    states = [
        Features((1.0, 0.3), 2, 0, "find"),
        Features((1.0, 0.3), 2, 1, "find"),
        Features((0.0, 0.3), 2, 0, "find"),
    ]
    assert ValueNetwork(5).values(states) == [0.0, 0.0, 0.0]
    assert taught(3).values(states) == pytest.approx([0.5, 0.3, 0.0], abs=0.05)


def test_equal_batches_make_equal_networks_also_from_a_checkpoint() -> None:
    states = [example.state for example in batch(9)]
    straight, resumed = taught(3), taught(2)
    resumed = ValueNetwork(5, state=resumed.state())
    resumed.observe(batch(2))
    assert resumed.values(states) == straight.values(states)


def test_a_copy_learns_nothing_of_what_the_original_learns() -> None:
    states = [example.state for example in batch(9)]
    network = taught(1)
    copy, before = network.copy(), network.values(states)
    network.observe(batch(1))
    assert copy.values(states) == before != network.values(states)


def test_later_batches_count_more() -> None:
    state = Features((1.0, 0.3), 2, 0, "find")
    forgetful, faithful = ValueNetwork(5, 0.1), ValueNetwork(5, 1.0)
    for network in (forgetful, faithful):
        for value in (0.0, 1.0):
            network.observe([Example(Features((1.0, 0.3), t % 5, 0, "find"), value, 1.0) for t in range(50)])
    assert forgetful.values([state])[0] == pytest.approx(1 / 1.1, abs=0.05)
    assert faithful.values([state])[0] == pytest.approx(0.5, abs=0.05)


def test_a_type_of_task_that_is_new_is_no_error() -> None:
    network = taught(1)
    for number in range(2 * network.KINDS):
        network.observe(batch(number, kind=f"kind {number}"))
    assert np.isfinite(network.values([Features((1.0, 0.3), 2, 0, "never met")])).all()


@pytest.mark.parametrize("told", [None, ("near",), (float("nan"),), (float("inf"), 1.0)])
def test_features_that_are_no_numbers_are_refused(told: object) -> None:
    with pytest.raises(ConfigError, match="expected finite numbers"):
        told_of(told)


def test_states_with_more_or_fewer_features_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"the same number in every state, found \[2, 3\]"):
        taught(1).values([Features((1.0, 0.3, 0.1), 2, 0, "find")])
