"""The benchmark of rollout drivers: all of them grow the same trees, and its server knows prefixes."""

from __future__ import annotations

import pytest

from sandboxgym.bench import rollouts
from sandboxgym.bench.rollouts import BLOCK, Conversation, measure
from sandboxgym.tree import TopEntropy


def test_every_driver_samples_the_same_tokens_with_most_of_the_prefixes_cached() -> None:
    found = measure(TopEntropy(2, width=3, roots=2), scale=0.0, tasks=2, max_live=4, updates=2, learning=1.0)
    assert [one.name for one in found] == ["lockstep", "asynchronous", "asynchronous, one off"]
    assert len({one.tokens for one in found}) == len({one.read for one in found}) == 1
    assert all(len(one.trees) == 4 and one.read / 2 < one.reused < one.read for one in found)


def test_drivers_that_grow_other_trees_are_no_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    trees = iter([["some"], ["others"]])
    monkeypatch.setattr(rollouts, "seen", lambda _: next(trees))
    with pytest.raises(RuntimeError, match="the trees of lockstep are not those of lockstep"):
        measure(TopEntropy(1, width=2), scale=0.0, tasks=1, max_live=1)


def test_forks_share_the_blocks_before_them() -> None:
    start = Conversation().extended(0, 2 * BLOCK + 5)
    one, other = start.extended(1, BLOCK), start.extended(2, BLOCK)
    assert len(one.blocks) == len(other.blocks) == 3 and start.blocks == one.blocks[:2] == other.blocks[:2]
    assert one.blocks[2] != other.blocks[2] and start.extended(1, BLOCK) == one
