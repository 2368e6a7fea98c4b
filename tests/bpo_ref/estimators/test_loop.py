"""The trainer's loop, from the rollout to the weights: an optimizer step does what the algorithm says.

Updates of a tabular policy against exact gradients: the mean change of the weights is the learning rate times the
gradient. Every comparison has a false-alarm rate of at most 1e-3 over the draw of the seeds, which are fixed.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tabular import MDP, Comparison, compare, random_mdp
from tabular_loop import LR, LoopTrainer, TokenPolicy, penalised

from bpo_ref import train
from bpo_ref.args import Args
from sandboxgym.tree import Action, Context, Edge, Node, RolloutTree
from sandboxgym.tree import Path as TreePath

SPARSE, DENSE = random_mdp(seed=244), random_mdp(seed=244, dense=True)
REFERENCE = SPARSE.logits[::-1] * 0.7
VALUES = np.sin(np.arange(5.0))
MANY = bool(os.environ.get("SANDBOXGYM_TREES"))

COMMON: dict[str, Any] = {
    "prompts": 8, "max_turns": 5, "context": 64, "spacing": 1, "lr": LR, "max_grad_norm": 1e9,
    "aggregation": "constant", "eval_every": 10**9,
}  # fmt: skip
KL: dict[str, Any] = {"kl": 0.3, "kl_in": "reward"}
SPLIT: dict[str, Any] = {"algo": "bpo", "roulette_below": 0.4, "width": 2, "points": 3}
ONE_STEP: dict[str, Any] = {"epochs": 1, "minibatches": 1}
PPO: dict[str, Any] = {"algo": "ppo", "advantage_norm": "none", "gae_lam": 1.0, "roots": 3, "value_lr": LR, **ONE_STEP}

# name -> settings, MDP, what the mean change is in gradients of the return
LOOPS: dict[str, tuple[dict[str, Any], MDP, float]] = {
    "grpo, two minibatches": ({"algo": "grpo", "group_std": False, "roots": 4, "minibatches": 2}, SPARSE, 2 * 3 / 4),
    "rloo-value, kl": ({"algo": "rloo-value", "roots": 4, "value_decay": 0.5, **KL}, SPARSE, 1.0),
    "bpo": (SPLIT, SPARSE, 1.0),
    "ppo": (PPO, SPARSE, 1.0),
}
MORE: dict[str, tuple[dict[str, Any], MDP, float]] = {
    "rloo-value": ({"algo": "rloo-value", "roots": 4, "value_decay": 0.5}, DENSE, 1.0),
    "bpo, kl, two minibatches": ({**SPLIT, **KL, "minibatches": 2}, SPARSE, 2.0),
    "bpo, flat": ({**SPLIT, "pack": "flat"}, DENSE, 1.0),
    "ppo, kl, two minibatches": ({**PPO, **KL, "minibatches": 2}, SPARSE, 2.0),
    "ppo over tokens, two epochs": ({**PPO, "gae_steps": "token", "epochs": 2}, DENSE, 2.0),
    "rloo by steps": ({"algo": "rloo", "roots": 3, "ratio": "step"}, DENSE, 1.0),
    "vineppo, kl": ({"algo": "vineppo", "roots": 3, "mc_rollouts": 2, **KL}, SPARSE, 1.0),
    "bpo-tree": ({"algo": "bpo-tree", "width": 3, "step_weight_power": 1.0}, SPARSE, 1.0),
}


@pytest.fixture(autouse=True)
def _files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Episodes of numbers are not written as text."""
    monkeypatch.setattr(train, "write_samples", lambda *_, **__: None)


def looped(name: str, tmp_path: Path, *, updates: int, **options: Any) -> Comparison:
    """Changes of the weights in so many updates against the exact gradient."""
    chosen, mdp, times = (LOOPS | MORE)[name]
    args = Args(**{**COMMON, "out": str(tmp_path), **chosen, "updates": updates, **options})
    penalty = (args.kl or 0.0) > 0
    trainer = LoopTrainer(
        args,
        mdp,
        reference=REFERENCE if penalty else None,
        values=VALUES if args.algo == "ppo" else None,
        silent=args.algo == "ppo",
    )
    changes = trainer.sampled()
    (policy,) = (change for key, change in changes.items() if key.endswith("logits"))
    exact = (penalised(mdp, REFERENCE, args.kl) if penalty else mdp).gradient(args.gamma)
    found = compare(policy, times * exact)
    print(f"{name}: max|z| {found.z:.1f} of {found.critical:.1f}, off by {found.bias:.3f}")
    return found


# One update at a time.


def trainer_of(tmp_path: Path, *, reference: np.ndarray | None = None, **options: Any) -> LoopTrainer:
    """A trainer of the sparse MDP."""
    args = Args(**{**COMMON, "out": str(tmp_path), "prompts": 4, **options})
    return LoopTrainer(args, SPARSE, reference=reference, values=VALUES)


def credited(trainer: LoopTrainer) -> list[RolloutTree]:
    """The first batch, with its credit."""
    trees = trainer._rollouts((0,))
    train.assign_credit(trees, trainer.args, trainer.session.memory)
    return trees


@pytest.mark.parametrize("options", [{"algo": "rloo", "baseline": "critic"}, {"algo": "ppo", "gae_lam": 1.0}])
def test_a_value_head_learns_returns_and_not_advantages(tmp_path: Path, options: dict[str, Any]) -> None:
    trainer = trainer_of(tmp_path, gamma=0.5, roots=3, **options)
    for path in (path for tree in credited(trainer) for path in tree.paths):
        to_go = 0.0
        for edge in reversed(path.edges):
            to_go = edge.reward + 0.5 * to_go
            assert edge.data.targets == [pytest.approx(to_go, abs=1e-6)]
            assert edge.data.values == [pytest.approx(float(VALUES[edge.parent.observation]), abs=1e-6)]


def test_the_value_loss_is_a_mean_over_the_states_that_are_learnt(tmp_path: Path) -> None:
    options = {"gae_lam": 1.0, "value_clip": 0.0, "value_weight": 0.5, "value_lr": 3 * LR, **ONE_STEP}
    trainer = trainer_of(tmp_path, algo="ppo", roots=3, **options)
    trees = credited(trainer)
    edges = [edge for tree in trees for edge in tree.edges()]
    expected = np.zeros(5)
    for edge in edges:
        state = edge.parent.observation
        expected[state] -= 3 * 0.5 * (VALUES[state] - edge.data.targets[0]) / len(edges)
    trainer.session.set_lr(trainer.args.lr)
    metrics = trainer._optimize(trees)
    moved = (trainer.session.model.value_head.weight[0].detach().numpy() - VALUES) / LR
    np.testing.assert_allclose(moved, expected, atol=2e-4)
    losses = [0.5 * (VALUES[edge.parent.observation] - edge.data.targets[0]) ** 2 for edge in edges]
    assert metrics["update/value_loss"] == pytest.approx(np.mean(losses), rel=1e-4)


def test_the_value_head_has_a_rate_of_its_own_and_does_not_decay(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, algo="ppo", roots=3, value_lr=7e-2, weight_decay=0.1)
    trainer.session.strategy.optimizer = trainer.session.adamw(trainer.session.network)
    trainer.session.set_lr(0.5 * LR)
    rates = {
        id(p): (g["lr"], g["weight_decay"])
        for g in trainer.session.strategy.optimizer.param_groups
        for p in g["params"]
    }
    policy, head = trainer.session.network.policy, trainer.session.network.value_head
    assert rates[id(policy.logits)] == (0.5 * LR, 0.1)
    assert [rates[id(p)] for p in head.parameters()] == [(pytest.approx(0.5 * 7e-2), 0.0)] * 2


def one_step_trees(*advantages: float) -> list[RolloutTree]:
    """A tree a number: one action of two tokens with that advantage and weight 1."""
    trees = []
    for index, advantage in enumerate(advantages):
        tree = RolloutTree(None, index, Node(0, None, None, owner=()))
        edge = Edge((0, 0), tree.root, Action("", tokens=2), reward=advantage)
        edge.child = Node(1, None, None, owner=(0, 0), parent=edge)
        edge.advantage, edge.weight = advantage, 1.0
        tree.root.children.append(edge)
        tree.paths.append(TreePath((0, 0), tree.root, [edge]))
        trees.append(tree)
    return trees


def test_advantages_are_normalised_over_what_is_trained_on_alone() -> None:
    trees = one_step_trees(1.0, 2.0, 6.0, 1000.0)
    (aside,) = trees[3].edges()
    aside.weight = 0.0
    train.normalize(trees, list)
    found = [edge.advantage for tree in trees for edge in tree.edges()]
    np.testing.assert_allclose(found, [-2 / 14**0.5 * 3**0.5, -1 / 14**0.5 * 3**0.5, 3 / 14**0.5 * 3**0.5, 1000.0])


def test_returns_that_are_left_out_are_drawn_at_random(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, algo="rloo", roots=4, subsample_returns=3)
    trees = trainer._rollouts((0,))
    drawn = 400
    left_out = np.zeros((len(trees), 4))
    together = 0
    for seed in range(drawn):
        for edge in (edge for tree in trees for edge in tree.edges()):
            edge.weight = 1.0
        train.leave_out(trees, trainer.args, (seed,))
        found = np.array(
            [[not all(e.weight for e in p.edges) for p in sorted(t.paths, key=lambda p: p.key)] for t in trees]
        )
        assert (found.sum(axis=1) == 1).all()
        left_out += found
        together += bool((found[0] == found[1]).all())
    assert abs(left_out / drawn - 1 / 4).max() < 5 * (3 / 16 / drawn) ** 0.5
    assert together < drawn / 2  # every task has its own draw


def test_an_update_leaves_out_what_is_beyond_the_number_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(tmp_path, algo="rloo", roots=4, subsample_returns=3, updates=1)
    numbers: list[int] = []
    optimize = trainer._optimize
    monkeypatch.setattr(
        trainer, "_optimize", lambda trees: (numbers.append(len(train.rows_of(trees))), optimize(trees))[1]
    )
    trainer.sampled()
    assert numbers == [4 * 3]


def test_a_batch_is_remembered_after_its_credit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(tmp_path, algo="rloo-value", roots=3, updates=2)
    known: list[dict[str, Any]] = []
    assign = train.assign_credit

    def watched(trees: Any, args: Any, memory: Any, gather: Any) -> Any:
        known.append(memory.values.state())
        return assign(trees, args, memory, gather)

    monkeypatch.setattr(train, "assign_credit", watched)
    trainer.sampled()
    assert len(known) == 2
    assert known[0]["overall"][0] == 0.0  # of the first batch nothing is known
    assert known[1]["overall"][0] == pytest.approx(4 * 3)
    assert trainer.session.memory.values.state()["overall"][0] == pytest.approx(4 * 3 * (1 + trainer.args.value_decay))


@pytest.mark.parametrize("silent", [False, True])
def test_leaving_the_reference_costs_reward(tmp_path: Path, silent: bool) -> None:
    args = Args(**{**COMMON, "out": str(tmp_path), "algo": "rloo", "roots": 3, **KL})
    trainer = LoopTrainer(args, SPARSE, reference=REFERENCE, silent=silent)
    logps, reference = np.log(SPARSE.policy), np.log(replace(SPARSE, logits=REFERENCE).policy)
    costs = []
    for edge in (edge for tree in trainer._rollouts((0,)) for edge in tree.edges()):
        at = edge.parent.observation, edge.action.text
        ended = edge.child.observation == len(SPARSE.logits)
        earned = SPARSE.rewards[*at, -1] if ended else 0.0
        costs.append(0.3 * (logps[at] - reference[at]))
        assert edge.reward == pytest.approx(earned - costs[-1], abs=1e-5)
        assert edge.action.data.logps == [pytest.approx(logps[at], abs=1e-5)]
    assert min(costs) < -0.05 and max(costs) > 0.05


class Misread(TokenPolicy):
    """A policy whose answers of 1 cannot be read."""

    def _act(self, context: Context) -> Action:
        action = super()._act(context)
        return replace(action, valid=action.text != 1)


def test_actions_that_cannot_be_read_cost_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(tmp_path, algo="rloo", roots=3, invalid_penalty=0.25)
    monkeypatch.setattr(trainer.session, "player", lambda _: Misread(SPARSE, silent=False))
    seen = []
    for edge in (edge for tree in trainer._rollouts((0,)) for edge in tree.edges()):
        ended = edge.child.observation == len(SPARSE.logits)
        earned = SPARSE.rewards[edge.parent.observation, edge.action.text, -1] if ended else 0.0
        seen.append(edge.action.text == 1)
        assert edge.valid is not seen[-1]
        assert edge.reward == pytest.approx(earned - 0.25 * seen[-1], abs=1e-6)
    assert 0 < sum(seen) < len(seen)


def steps_of(trainer: LoopTrainer, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Content of each optimizer step of an update: tasks, rows, tasks of the rows that went through, denominators."""
    steps: list[dict[str, Any]] = []
    rows_of, backward = train.rows_of, trainer._backward

    def chosen(trees: Any) -> Any:
        rows = rows_of(trees)
        steps.append({"tasks": {tree.index for tree in trees}, "rows": rows, "passed": [], "by": set()})
        return rows

    def passed(rows: Any, denominator: float, learnt: float) -> Any:
        steps[-1]["passed"] += [id(row) for row in rows]
        steps[-1]["by"].add((denominator, learnt))
        return backward(rows, denominator, learnt)

    monkeypatch.setattr(train, "rows_of", chosen)
    monkeypatch.setattr(trainer, "_backward", passed)
    trees = credited(trainer)
    trainer._optimize(trees)
    return steps


def test_minibatches_take_different_tasks_and_together_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(
        tmp_path, algo="ppo", roots=2, prompts=6, minibatches=3, epochs=4, pack="flat", micro_tokens=24
    )
    steps = steps_of(trainer, monkeypatch)
    epochs = [steps[i : i + 3] for i in range(0, 12, 3)]
    assert len(steps) == 12
    for epoch in epochs:
        assert sorted(index for step in epoch for index in step["tasks"]) == list(range(6))
        assert all(len(step["tasks"]) == 2 for step in epoch)
    assert len({tuple(tuple(sorted(step["tasks"])) for step in epoch) for epoch in epochs}) > 1  # shuffled anew
    for step in steps:
        assert sorted(step["passed"]) == sorted(map(id, step["rows"]))  # in micro-batches, each row once


@pytest.mark.parametrize("aggregation", ["token", "path", "constant"])
def test_what_a_minibatch_is_divided_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aggregation: Any) -> None:
    trainer = trainer_of(tmp_path, algo="ppo", roots=2, prompts=6, minibatches=3, aggregation=aggregation)
    for step in steps_of(trainer, monkeypatch):
        edges = [edge for row in step["rows"] for edge in row.edges]
        expected = {"token": sum(edge.weight for edge in edges), "path": 4.0, "constant": 2.0}[aggregation]
        ((denominator, learnt),) = step["by"]
        assert denominator == pytest.approx(expected) and learnt == len(edges)


@pytest.mark.parametrize("processes", [1, 3])
def test_a_loss_is_scaled_by_the_number_of_processes_whose_gradients_are_averaged(
    tmp_path: Path, processes: int
) -> None:
    trainer = trainer_of(tmp_path, algo="rloo", roots=2)
    accelerator: Any = SimpleNamespace(num_processes=processes, backward=lambda loss: loss.backward())
    trainer.session.strategy.accelerator = accelerator
    weight = torch.ones(1, requires_grad=True)
    trainer.session.strategy.backward(2.0 * weight.sum())
    assert weight.grad is not None and weight.grad.item() == 2.0 * processes


def test_metrics_are_means_over_tokens_and_steps(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, algo="rloo", roots=3, minibatches=2, kl=0.1, reference=REFERENCE)
    trees = credited(trainer)
    trainer.session.set_lr(0.0)
    metrics = trainer._optimize(trees)
    assert metrics["update/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["update/approx_kl"] == pytest.approx(0.0, abs=1e-6)
    logps, reference = np.log(SPARSE.policy), np.log(replace(SPARSE, logits=REFERENCE).policy)
    at = [(edge.parent.observation, edge.action.text) for tree in trees for edge in tree.edges()]
    apart = np.array([reference[x] - logps[x] for x in at])
    assert metrics["update/kl"] == pytest.approx(np.mean(np.exp(apart) - apart - 1), rel=1e-4)


def test_gradients_are_scaled_down_to_their_greatest_norm(tmp_path: Path) -> None:
    free, bound = (trainer_of(tmp_path, algo="rloo", roots=3, max_grad_norm=norm) for norm in (1e9, 1e-2))
    moved = []
    for trainer in (free, bound):
        trees = credited(trainer)
        trainer.session.set_lr(LR)
        trainer._optimize(trees)
        moved.append((trainer.session.model.logits.detach().numpy() - SPARSE.logits) / LR)
    norm = np.linalg.norm(moved[0])
    assert norm > 0.05
    np.testing.assert_allclose(moved[1], moved[0] * 1e-2 / norm, rtol=0.02, atol=2e-4)


def test_gradients_do_not_add_up_over_steps(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, algo="rloo", roots=3)
    for _ in range(2):  # the second step from the same weights is the first again
        trees = credited(trainer)
        trainer.session.set_lr(LR)
        trainer._optimize(trees)
        trainer.session.record()
        trainer.session.model.load_state_dict(trainer.session.start)
    np.testing.assert_allclose(trainer.session.changes[0]["logits"], trainer.session.changes[1]["logits"], atol=1e-6)


# Many updates.


@pytest.mark.parametrize("name", LOOPS)
def test_the_mean_change_of_the_weights_is_the_gradient(name: str, tmp_path: Path) -> None:
    found = looped(name, tmp_path, updates=120)
    assert not found.biased, found


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_the_mean_change_of_the_weights_is_the_gradient_with_other_settings(name: str, tmp_path: Path) -> None:
    found = looped(name, tmp_path, updates=120)
    assert not found.biased, found


@pytest.mark.slow
@pytest.mark.skipif(not MANY, reason="a study of some minutes: SANDBOXGYM_TREES=20000 runs it")
@pytest.mark.parametrize("name", [*LOOPS, *MORE])
def test_the_mean_change_of_the_weights_is_the_gradient_over_many_updates(name: str, tmp_path: Path) -> None:
    found = looped(name, tmp_path, updates=500, seed=1)  # sees half the error that 120 would show
    assert not found.biased, found


@pytest.mark.parametrize("pack", ["flat", "tree"])
def test_the_trainer_measures_at_the_temperature_that_is_sampled_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: Any
) -> None:
    trainer = trainer_of(tmp_path, algo="rloo", roots=3, temperature=0.5, pack=pack)
    told: list[tuple[float, bool]] = []

    def forward(model: Any, *tensors: Any, temperature: float, packed: bool, **_: Any) -> Any:
        told.append((temperature, packed))
        return tensors[0], tensors[0], None

    monkeypatch.setattr(train, "forward", forward)
    batch = SimpleNamespace(ids=torch.zeros(1, 2), lengths=torch.tensor([2]), mask=torch.ones(1, 1))
    trainer._forward(trainer.session.model, batch)  # type: ignore[arg-type]
    assert told == [(0.5, pack == "tree")]
    trainer.session.envs.close()
