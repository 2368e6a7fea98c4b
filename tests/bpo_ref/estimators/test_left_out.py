"""Truncated importance sampling, truncated answers and episodes, dynamic sampling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_estimators import grow
from test_loss import gradient, made, settings
from tiny_runs import TINY, _signals, metrics, trained  # noqa: F401 - a fixture

from bpo_ref.args import Args
from bpo_ref.learning.batch import Critique, collate, rows_of
from bpo_ref.learning.rescore import rescore, sampler_mismatch
from bpo_ref.sampling.generate import Generation
from bpo_ref.sampling.policy import Turn
from bpo_ref.sampling.selection import cut_actions, leave_out, returns_differ
from bpo_ref.train import Trainer, assign_credit, policy_loss
from sandboxgym.tree import Node, RolloutTree
from sandboxgym.tree import Path as TreePath

# Truncated importance sampling.


def apart() -> torch.Tensor:
    """π_old / π_sampler of every token of `made`: from e^-0.9 to e^1.05."""
    return (torch.arange(14.0).view(2, 7) - 6) * 0.15


@pytest.mark.parametrize("kl", [0.0, 0.3])
def test_each_token_counts_as_often_as_the_capped_ratio_says(kl: float) -> None:
    batch, cap = made(), 1.5
    batch.sampler_logps = batch.old_logps - apart()
    plain, corrected = settings(kl=kl), settings(kl=kl, tis=cap)
    logps, reference = batch.old_logps + 0.1, batch.old_logps - 0.2 if kl else None
    counts = torch.minimum(apart().exp(), torch.tensor(cap))
    before, _ = policy_loss(logps, batch, plain, reference)
    after, stats = policy_loss(logps, batch, corrected, reference)
    torch.testing.assert_close(after, before * counts)
    assert stats["tis_capped"] == ((apart().exp() > cap) & batch.mask).sum() > 0
    torch.testing.assert_close(
        gradient(batch, corrected, moved=0.1, reference=reference),
        gradient(batch, plain, moved=0.1, reference=reference) * counts,
    )


def test_the_corrected_gradient_on_the_policy_that_measured_is_the_weighted_policy_gradient() -> None:
    batch = made()
    batch.sampler_logps = batch.old_logps - apart()
    torch.testing.assert_close(gradient(batch, settings(tis=100.0)), -batch.advantage * apart().exp() * batch.mask)


@pytest.mark.parametrize("same", [True, False], ids=["equal", "not told apart"])
def test_it_changes_nothing_where_sampler_and_trainer_agree(same: bool) -> None:
    batch, logps = made(), made().old_logps + 0.1
    batch.sampler_logps = batch.old_logps.clone() if same else None
    plain, corrected = (policy_loss(logps, batch, settings(tis=cap))[0] for cap in (0.0, 2.0))
    assert torch.equal(plain, corrected)


def spoken(tree: RolloutTree, *, logps: Sequence[float] = (-1.0, -2.0), cut: Sequence[int] = ()) -> RolloutTree:
    """Gives every action of a tree two tokens after a prompt of one; those numbered in ``cut`` lack their end."""
    for number, edge in enumerate(tree.edges()):
        before = edge.parent.parent.action.memory if edge.parent.parent else None
        generation = Generation([5, 6], list(logps), [0.0, 0.0], truncated=number in cut)
        edge.action.memory = Turn(before, [4], generation.ids, generation.truncated)
        edge.action.position = 1 + 3 * edge.parent.depth
        edge.action.tokens, edge.action.data, edge.advantage, edge.weight = 2, generation, 1.0, 1.0
    return tree


def rooted() -> RolloutTree:
    return RolloutTree(None, 0, Node(0, None, None, owner=()))


def test_the_samplers_log_probabilities_are_kept_beside_the_trainers() -> None:
    tree = rooted()
    grow(tree, tree.root, (0, 0), 0, 1)
    spoken(tree)
    shift = torch.tensor([[0.0, 0.25, 0.0, 0.0, -0.5]])

    def measure(batch: Any) -> Any:
        return batch.old_logps + shift, torch.full_like(batch.old_logps, 0.7), None

    rescore([tree], settings(), measure, measure, torch.device("cpu"))
    first, second = tree.paths[0].edges
    assert first.action.data.logps == [-1.0, -2.0] and not sampler_mismatch([tree])
    rescore([tree], settings(tis=2.0), measure, measure, torch.device("cpu"))
    assert first.action.data.logps == [-1.0, -1.75] and first.action.data.sampler_logps == [-1.0, -2.0]
    assert first.action.logp == -2.75
    batch = collate(rows_of([tree]), "cpu")
    assert batch.sampler_logps is not None
    torch.testing.assert_close(batch.old_logps - batch.sampler_logps, shift)
    ((tokens, total, largest),) = sampler_mismatch([tree])
    assert (tokens, total) == (4, 0.75) and largest == pytest.approx(math.exp(0.25))
    second.action.data = replace(second.action.data, sampler_logps=[])  # as where a backend tells nothing of it
    assert sampler_mismatch([tree])[0][0] == 2


def test_the_mismatch_of_the_packages_own_sampler_is_that_of_rounding(tmp_path: Path) -> None:
    options: dict[str, Any] = {"algo": "grpo", "sft_steps": 0, "updates": 2, "eval_untrained": False}
    trained(tmp_path / "plain", **options)
    trained(tmp_path / "corrected", tis=2.0, **options)
    plain, corrected = ([m for m in metrics(tmp_path / name) if "update/loss" in m] for name in ("plain", "corrected"))
    assert all("rollout/sampler_mismatch" not in line for line in plain)
    for line, other in zip(corrected, plain, strict=True):
        assert 0 <= line["rollout/sampler_mismatch"] < 1e-5
        assert line["rollout/sampler_ratio_max"] == pytest.approx(1.0, abs=1e-4) and line["update/tis_capped"] == 0
        assert line["update/grad_norm"] == pytest.approx(other["update/grad_norm"], rel=1e-3)


# Answers and episodes that were cut.


def cut_at_the_end(path: TreePath) -> None:
    path.edges[-1].truncated = True


def test_an_action_is_left_out_if_every_episode_through_it_was_cut_or_its_answer_was() -> None:
    """A backbone of four steps that is cut, a fork at its second state that ends, one at its third that is cut."""
    tree = rooted()
    backbone = grow(tree, tree.root, (0, 0), 0, 0, 0, 0)
    ends = grow(tree, backbone.edges[0].child, (0, 0, 1, 1), 0, 1)
    lost = grow(tree, backbone.edges[1].child, (0, 0, 2, 1), 0)
    spoken(tree, cut=[5])  # the fork's second answer
    for path in (backbone, lost):
        cut_at_the_end(path)
    expected = [*backbone.edges[1:], ends.edges[1], *lost.edges]
    assert {id(edge) for edge in cut_actions(tree)} == {id(edge) for edge in expected}
    assert leave_out([tree], settings(), (0,)) == 0 and all(edge.weight for edge in tree.edges())
    backbone.edges[2].data = Critique([0.5, 0.5], targets=[1.0, 1.0])
    assert leave_out([tree], settings(mask_truncated=True), (0,)) == len(expected) == 5
    assert [edge.weight for edge in tree.edges()] == [1, 0, 0, 0, 1, 0, 0]
    assert all(math.isnan(target) for target in backbone.edges[2].data.targets)
    rows = rows_of([tree])
    assert [row.edges[0] for row in rows] == [backbone.edges[0], ends.edges[0]]  # nothing is left of the third path
    assert [row.mass for row in rows] == [2.0, 2.0]
    batch = collate(rows, "cpu")
    assert (batch.weight > 0).sum() == 4
    assert leave_out([tree], settings(mask_truncated=True), (0,)) == 0  # those that count nothing are not counted again


def test_what_roulette_has_stopped_is_not_cut() -> None:
    tree = rooted()
    stopped = grow(tree, tree.root, (0, 0), 0, 0)
    spoken(tree)
    cut_at_the_end(stopped)
    assert len(cut_actions(tree)) == 2
    stopped.edges[-1].child.stopped = True
    assert not cut_actions(tree)


def test_actions_that_were_cut_are_counted_and_a_batch_of_nothing_else_changes_nothing(tmp_path: Path) -> None:
    common: dict[str, Any] = {"algo": "rloo", "sft_steps": 0, "updates": 2, "eval_untrained": False}
    options = {**TINY, **common, "out": str(tmp_path / "none"), "max_turns": 2, "sft_reward": 0.0, "prompts": 2}
    trainer = Trainer(Args(**options, mask_truncated=True))
    before = {name: value.clone() for name, value in trainer.session.model.state_dict().items()}
    trainer.run()
    lines = [line for line in metrics(tmp_path / "none") if "rollout/success" in line]
    assert [line["rollout/truncated_episodes"] for line in lines] == [1.0, 1.0]
    assert [line["update/skipped"] for line in lines] == [1.0, 1.0]
    assert lines[1]["total/env_steps"] == sum(line["rollout/left_out_actions"] for line in lines)
    assert all(torch.equal(value, before[name]) for name, value in trainer.session.model.state_dict().items())
    trained(tmp_path / "some", **common, mask_truncated=True)
    (first, *_) = (line for line in metrics(tmp_path / "some") if "update/loss" in line)
    answers = first["rollout/truncated_turns"] * first["total/env_steps"]
    assert first["rollout/truncated_episodes"] == 0 and first["rollout/left_out_actions"] == pytest.approx(answers)
    assert 0 < answers < first["total/env_steps"]


# Dynamic sampling.


def test_the_first_tasks_whose_returns_differ_are_kept_and_all_that_was_drawn_is_counted(tmp_path: Path) -> None:
    common: dict[str, Any] = {**TINY, "out": str(tmp_path), "algo": "grpo", "roots": 2, "sft_steps": 0}
    whole = Trainer(Args(**{**common, "prompts": 8}))
    drawn = whole._rollouts((0, 5))
    whole.session.close()
    trainer = Trainer(Args(**common, dynamic_sampling=2.0))
    kept = trainer._rollouts((0, 5))

    def said(tree: RolloutTree) -> list[list[str]]:
        return [[edge.action.text for edge in path.edges] for path in tree.paths]

    differing = [tree for tree in drawn if returns_differ(tree)]
    assert 0 < len(differing) < 8
    assert [tree.index for tree in kept] == list(range(len(kept))) and len(kept) == min(4, len(differing))
    assert list(map(said, kept)) == [said(tree) for tree in differing[:4]]
    assert trainer.rollout_costs["rollout/differing_tasks"] == len(differing)
    trainer._count(_credited(kept, trainer), 1.0)
    assert trainer.session.counters["returns"] == sum(len(tree.paths) for tree in drawn) == 16
    assert trainer.session.counters["tokens"] == sum(tree.tokens for tree in drawn)
    assert trainer.session.counters["env_steps"] == sum(tree.env_steps for tree in drawn)
    trainer.session.close()


def _credited(trees: Sequence[RolloutTree], trainer: Trainer) -> Sequence[RolloutTree]:
    assign_credit(trees, trainer.args, trainer.session.memory)
    return trees


def test_where_no_returns_differ_the_batch_is_what_it_would_have_been(tmp_path: Path) -> None:
    options: dict[str, Any] = {"algo": "grpo", "roots": 2, "sft_steps": 0, "max_turns": 1, "updates": 1}
    options["sft_reward"] = 0.0
    trainer = trained(tmp_path, **options, dynamic_sampling=1.5, eval_untrained=False)  # one turn: all are lost
    (line,) = (line for line in metrics(tmp_path) if "update/loss" in line)
    assert (line["rollout/drawn_tasks"], line["rollout/differing_tasks"]) == (6, 0)
    assert (trainer.session.counters["returns"], line["rollout/equal_groups"]) == (12, 1.0)
