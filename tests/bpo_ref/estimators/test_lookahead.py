"""Fork look-ahead is unbiased, by comparison with exact gradients, for any V̂."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from lookahead_cases import CASES, ROULETTE, SPARSE, batches_of, briefly, edges_of, settings, taught
from tabular import Credit, compare, gradients

from bpo_ref.args import Args
from bpo_ref.baselines import Memory, features, mean_value, summarize
from bpo_ref.lookahead import LookAhead
from bpo_ref.train import assign_credit
from sandboxgym.tree import RolloutTree

FAST = 400  # batches of 4 trees
MANY = int(os.environ.get("SANDBOXGYM_TREES", 0)) // 4


def own_luck_too(trees: Sequence[RolloutTree], args: Args, memory: Memory, *_: Any) -> None:
    assign_credit(trees, args, memory)
    for edge in edges_of(trees):
        edge.advantage -= edge.control


def probabilities_of_other_weights(
    trees: Sequence[RolloutTree], args: Args, memory: Memory, ahead: LookAhead, score: Any
) -> None:
    ahead.set_controls(trees, lambda asked: [0.3 * value for value in score(asked)])
    assign_credit(trees, args, memory)
    ahead.set_controls(trees, score)


def luck_of_earlier_decisions(trees: Sequence[RolloutTree], args: Args, memory: Memory, *_: Any) -> None:
    """Subtract the luck that led to a state, not that which came after it."""
    assign_credit(trees, args, memory)
    for edge in edges_of(trees):
        edge.advantage += edge.luck - edge.control * 2


def sampled_action_left_out(trees: Sequence[RolloutTree], args: Args, memory: Memory, *_: Any) -> None:
    """Set controls as if the sampled action had never been listed."""
    kept = [(edge, edge.control) for edge in edges_of(trees)]
    for edge, control in kept:
        edge.control = min(control, 0.0)
    assign_credit(trees, args, memory)
    for edge, control in kept:
        edge.control = control


def own_return_in_the_baseline(trees: Sequence[RolloutTree], args: Args, memory: Memory, *_: Any) -> None:
    """Count the path itself among the others in the residual at a state."""
    assign_credit(trees, args, memory)
    for edge in edges_of(trees):
        edge.advantage -= (edge.value - edge.luck) / 5


PLANTED: dict[str, tuple[str, Callable[..., None]]] = {
    "own return in the baseline": ("rloo-pooled, network", own_return_in_the_baseline),
    "own luck too": ("rloo-pooled", own_luck_too),
    "own luck too, forks": ("bpo", own_luck_too),
    "probabilities of other weights": ("rloo-pooled", probabilities_of_other_weights),
    "luck of earlier decisions": ("rloo-pooled", luck_of_earlier_decisions),
    "sampled action left out": ("rloo-pooled", sampled_action_left_out),
}


@functools.cache
def estimates(case: str, batches: int) -> dict[str, np.ndarray]:
    """Sample gradients with the correction, without it, and with the errors planted in it."""
    mdp, args, teach, listed = CASES[case]
    memory = teach(mdp, args)
    now: list[Any] = []

    def sampled() -> Iterator[list[RolloutTree]]:
        for trees, *rest in batches_of(mdp, args, memory, batches=batches, listed=listed):
            now[:] = rest
            yield trees

    def without(trees: Sequence[RolloutTree]) -> None:
        kept = [(edge, edge.control) for edge in edges_of(trees)]
        for edge, _ in kept:
            edge.control = 0.0
        assign_credit(trees, args, memory)
        for edge, control in kept:
            edge.control = control

    credits: dict[str, Credit] = {
        "with": lambda trees: assign_credit(trees, args, memory) and None,
        "without": without,
    }
    for name, (where, error) in PLANTED.items():
        if where == case:
            credits[name] = lambda trees, error=error: error(trees, args, memory, *now)
    return gradients(mdp, sampled(), credits)


def noise(samples: np.ndarray) -> float:
    return float(samples.var(axis=0).sum())


def sampled_once(case: str) -> Any:
    """Mark of tests of one case, which one worker gets: `estimates` then samples it once."""
    return pytest.mark.xdist_group(f"look-ahead, {case}")


EVERY = [pytest.param(case, marks=sampled_once(case)) for case in CASES]


@pytest.mark.parametrize("case", EVERY)
def test_look_ahead_is_unbiased(case: str) -> None:
    mdp, args, *_ = CASES[case]
    samples = estimates(case, FAST)
    found = compare(samples["with"], mdp.gradient(args.gamma))
    relative = noise(samples["with"]) / noise(samples["without"])
    print(f"{case}: max|z| {found.z:.2f} of {found.critical:.2f}, noise {relative:.2f} of that without")
    assert not found.biased, found
    assert relative != 1.0  # something was taken off


@pytest.mark.slow
@pytest.mark.skipif(not MANY, reason="a study of half an hour: SANDBOXGYM_TREES=20000 runs it")
@pytest.mark.parametrize("case", EVERY)
def test_look_ahead_is_unbiased_over_many_trees(case: str) -> None:
    mdp, args, *_ = CASES[case]
    found = compare(estimates(case, MANY)["with"], mdp.gradient(args.gamma))
    print(f"{case}: max|z| {found.z:.2f} of {found.critical:.2f}, relative error {found.bias:.3f}")
    assert not found.biased, found
    assert found.bias < 0.05, found


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=sampled_once(case)) for case in ("rloo", "rloo-pooled", "bpo-split", "bpo")]
)
def test_look_ahead_takes_noise_off(case: str) -> None:
    samples = estimates(case, FAST)
    assert noise(samples["with"]) < 0.95 * noise(samples["without"])


@pytest.mark.parametrize("error", [pytest.param(each, marks=sampled_once(PLANTED[each][0])) for each in PLANTED])
def test_planted_error_is_caught(error: str) -> None:
    case, _ = PLANTED[error]
    mdp, args, *_ = CASES[case]
    found = compare(estimates(case, FAST)[error], mdp.gradient(args.gamma))
    print(f"{error}: max|z| {found.z:.1f}, relative bias {found.bias:.2f}")
    assert found.biased, found


# What no gradient shows.


def test_values_are_those_before_the_batch_whatever_is_learnt_of_it() -> None:
    args = settings("rloo-pooled", roots=4)
    memory = taught(SPARSE, args)
    for trees, ahead, score in batches_of(SPARSE, args, memory, batches=3, listed=(0, 1)):
        before = [edge.control for edge in edges_of(trees)]
        memory.observe(trees, assign_credit(trees, args, memory), args)
        ahead.set_controls(trees, score)
        assert [edge.control for edge in edges_of(trees)] == before
        assert any(before)


def test_a_network_is_that_before_the_batch_whatever_is_learnt_of_it() -> None:
    args = settings("rloo-pooled", roots=4, network="both")
    memory = briefly(SPARSE, args)
    for trees, ahead, score in batches_of(SPARSE, args, memory, batches=2, listed=(0, 1)):
        before = [edge.control for edge in edges_of(trees)]
        told = memory.network.values([features(trees[0].root, "")]) if memory.network else []
        memory.observe(trees, assign_credit(trees, args, memory), args)
        assert memory.network and memory.network.values([features(trees[0].root, "")]) != told  # it has learned
        ahead.set_controls(trees, score)
        assert [edge.control for edge in edges_of(trees)] == before
        assert any(before)


def test_fair_squares_are_of_returns_less_luck() -> None:
    """In flat rollouts the mean square at the root is that of each path's return less the luck of all its decisions."""
    args = settings("rloo-pooled", roots=4)
    memory = taught(SPARSE, args)
    for trees, *_ in batches_of(SPARSE, args, memory, batches=2, listed=(0, 1)):
        assign_credit(trees, args, memory)
        for tree in trees:
            less = [sum(edge.reward - edge.control for edge in path.edges) for path in tree.paths]
            squares = [square for _, square in summarize(tree, "key", fair=True).returns]
            assert squares == pytest.approx([value**2 for value in less])
            plain = [square for _, square in summarize(tree, "key").returns]
            assert plain == pytest.approx([path.total_reward**2 for path in tree.paths])


def test_memory_learns_plain_returns() -> None:
    args = settings("bpo", **ROULETTE)
    memory, plain = taught(SPARSE, args), taught(SPARSE, args)
    for trees, *_ in batches_of(SPARSE, args, memory, batches=3, listed=(0, 1)):
        memory.observe(trees, assign_credit(trees, args, memory), args)
        assert any(edge.control for edge in edges_of(trees))
        for edge in edges_of(trees):
            edge.control = 0.0
        plain.observe(trees, assign_credit(trees, args, plain), args)
        assert memory.values.state() == plain.values.state()


def test_luck_is_backed_up_as_values_are() -> None:
    args = settings("bpo", **ROULETTE)
    memory = taught(SPARSE, args)
    for trees, *_ in batches_of(SPARSE, args, memory, batches=3, listed=(0, 1)):
        assign_credit(trees, args, memory)
        for edge in edges_of(trees):
            node = edge.child
            if node.children and node.survival == 1.0:
                mean = sum(child.value - child.luck - child.control for child in node.children) / len(node.children)
                assert node.value - node.luck == pytest.approx(mean)
                assert node.value == pytest.approx(mean_value(node))
            elif not node.children:
                assert node.luck == 0.0


def test_without_controls_credit_is_what_it_was() -> None:
    args = settings("bpo", **ROULETTE)
    memory = taught(SPARSE, args)
    plain = replace(args, lookahead=False)
    for trees, *_ in batches_of(SPARSE, args, memory, batches=2, listed=(0, 1)):
        for edge in edges_of(trees):
            edge.control = 0.0
        assign_credit(trees, args, memory)
        found = [(edge.advantage, edge.luck) for edge in edges_of(trees)]
        assign_credit(trees, plain, memory)
        assert found == [(edge.advantage, 0.0) for edge in edges_of(trees)]
