"""Rows, tensors and loss: training uses exactly the sampled tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bpo_ref.args import Args, resolved
from bpo_ref.baselines import Memory
from bpo_ref.config import ConfigError
from bpo_ref.eval import make_env
from bpo_ref.learning.models import ActorCritic
from bpo_ref.learning.tiny import tiny_model, tiny_tokenizer, words_of
from bpo_ref.sampling.chat_format import ChatFormat
from bpo_ref.sampling.generate import Generator, token_logps
from bpo_ref.sampling.generate import forward as forward_pass
from bpo_ref.sampling.policy import ChatPolicy
from bpo_ref.schedules import make_schedule
from bpo_ref.train import (
    Batch,
    Critique,
    PathRow,
    aggregate,
    assign_credit,
    collate,
    denominator_of,
    micro_batches,
    policy_loss,
    rows_of,
    shuffled_parts,
    value_loss,
)
from sandboxgym.tree import Action, Edge, Envs, Node, RolloutTree, rollout

WORDS = ["You are in the middle of a room. Looking quickly around you, you see a", "drawer cabinet shelf go to open"]


@dataclass
class Player:
    """An untrained tiny model and the environments it plays in."""

    model: Any
    chat: ChatFormat
    envs: Envs

    def policy(self, args: Args) -> ChatPolicy:
        generator = Generator(
            self.model,
            stop_ids=self.chat.stop_ids,
            max_new_tokens=6,
            temperature=args.temperature,
            context_limit=args.context,
        )
        return ChatPolicy(generator, self.chat)

    def trees(self, args: Args, *, tasks: int = 3, max_live: int = 1024, seed: int = 0) -> list[RolloutTree]:
        """Rollouts with credit; ALFWorld's rewards, all 0 here, are replaced by the parity of the answers' length."""
        memory = Memory.of(args)
        schedule, policy = make_schedule(args, (3,), memory), self.policy(args)
        trees = rollout(self.envs, policy, schedule, tasks=list(range(tasks)), seed=(seed,), max_live=max_live)
        for path in (path for tree in trees for path in tree.paths):
            path.edges[-1].reward = float(sum(edge.action.tokens for edge in path.from_root()) % 2)
        assign_credit(trees, args, memory)
        return trees


@pytest.fixture(scope="module")
def player() -> Iterator[Player]:
    envs = Envs(lambda: make_env("sandboxgym/ALFWorld-v0", ("games=embedded:train",), 5))
    tokenizer = tiny_tokenizer(words_of(WORDS))
    model = tiny_model(tokenizer, hidden=32, ffn=64, layers=1, max_position_embeddings=512)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)  # far enough from uniform to notice a wrong context
    yield Player(model, ChatFormat(tokenizer), envs)
    envs.close()


def settings(algo: str = "bpo-tree", **options: Any) -> Args:
    chosen = {"prompts": 3, "points": 2, "width": 3, "max_turns": 5, "context": 512, "step_weight_power": 1.0}
    return resolved(Args(algo=algo, **{**chosen, **options}))


def forward(model: Any, batch: Batch, args: Args) -> Tensor:
    return token_logps(model, batch.ids, batch.lengths, temperature=args.temperature)[0]


# Rows and tensors.


def test_mask_covers_exactly_the_sampled_tokens(player: Player) -> None:
    rows = rows_of(player.trees(settings()))
    batch = collate(rows, "cpu")
    assert any(row.edges[0].parent.depth for row in rows)  # forks, whose prefix is context
    for i, row in enumerate(rows):
        sampled = [token for edge in row.edges for token in edge.action.data.ids]
        assert batch.ids[i, 1:][batch.mask[i]].tolist() == sampled
    assert batch.mask.sum() == sum(edge.action.tokens for row in rows for edge in row.edges)


def test_ids_are_those_that_were_sampled_never_tokenised_again(player: Player) -> None:
    trees = player.trees(settings())
    for row, path in zip(rows_of(trees), (path for tree in trees for path in tree.paths)):
        ids: list[int] = []
        for edge in path.from_root():
            ids += edge.action.memory.prompt
            assert len(ids) == edge.action.position
            ids += edge.action.data.ids
        assert row.ids == ids


def test_a_forks_context_is_its_parents_up_to_the_branch_point(player: Player) -> None:
    trees = player.trees(settings())
    forks = [(tree.paths[0], path) for tree in trees for path in tree.paths if path.start.depth]
    assert forks
    for backbone, path in forks:
        decision = backbone.edges[path.start.depth].action
        mine, theirs = rows_of_paths([path, backbone])
        assert path.edges[0].action.position == decision.position
        assert mine[: decision.position] == theirs[: decision.position]
        assert path.edges[0].action.entropy == pytest.approx(decision.entropy, abs=1e-5)


def rows_of_paths(paths: Sequence[Any]) -> list[list[int]]:
    return [path.edges[-1].action.memory.ids() for path in paths]


def test_every_sampled_token_has_its_actions_values(player: Player) -> None:
    rows = rows_of(player.trees(settings()))
    batch = collate(rows, "cpu")
    number = 0
    for i, row in enumerate(rows):
        for edge in row.edges:
            for offset, logp in enumerate(edge.action.data.logps):
                t = edge.action.position + offset - 1
                assert batch.step[i, t] == number
                assert batch.old_logps[i, t] == torch.tensor(logp)
                assert batch.advantage[i, t] == torch.tensor(edge.advantage)
                assert batch.weight[i, t] == torch.tensor(edge.weight)
            number += 1
    for values in (batch.old_logps, batch.advantage, batch.weight):
        assert not values[~batch.mask].any()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_log_probabilities_are_the_trainers_also_after_an_update(player: Player, temperature: float) -> None:
    args = settings(temperature=temperature)
    before = {name: value.clone() for name, value in player.model.state_dict().items()}
    optimizer = torch.optim.AdamW(player.model.parameters(), lr=1e-2)
    contexts = []
    for seed in (0, 1):
        batch = collate(rows_of(player.trees(args, seed=seed)), "cpu")
        logps = forward(player.model, batch, args)
        torch.testing.assert_close(logps[batch.mask], batch.old_logps[batch.mask], atol=2e-5, rtol=0)
        (-logps[batch.mask].mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        contexts.append(batch)
        assert (forward(player.model, batch, args) - logps).abs().max() > 1e-2  # the update can be seen
    player.model.load_state_dict(before)


@pytest.mark.parametrize("root_branch", ["always", "free"])
def test_branching_only_the_root_has_rloos_tensors_and_loss_bitwise(player: Player, root_branch: str) -> None:
    branched = settings(schedule="root", points=1, width=4, root_branch=root_branch)
    losses, batches = [], []
    for args in (branched, settings("rloo", roots=4)):
        trees = player.trees(args, max_live=1)  # the same rounding needs the same batches of the sampler
        rows = rows_of(trees)
        batch = collate(rows, "cpu")
        loss, _ = policy_loss(forward(player.model, batch, args), batch, args)
        losses.append(aggregate(loss, batch, rows, denominator_of(rows, len(trees), args), args))
        batches.append(batch)
    assert batches[0].advantage.any()
    for name in ("ids", "lengths", "step", "advantage", "weight", "old_logps"):
        assert torch.equal(getattr(batches[0], name), getattr(batches[1], name)), name
    assert torch.equal(losses[0], losses[1])


@pytest.mark.parametrize("algo", ["bpo-paper", "bpo-tree", "bpo-forest", "vineppo", "rloo"])
def test_every_token_of_context_is_read_once(player: Player, algo: str) -> None:
    """A fork may be chosen before its path continues or after it has ended; nothing is kept afterwards."""
    args = (
        settings(algo, roots=3, spacing=1) if algo in ("bpo-forest", "vineppo", "rloo") else settings(algo, spacing=1)
    )
    policy = player.policy(args)
    trees = rollout(player.envs, policy, make_schedule(args, (3,), Memory.of(args)), tasks=[0, 1], seed=(0,))
    reading, taken_over = 0, 0
    for tree in trees:
        reading += len(tree.paths[0].edges[0].action.memory.prompt) - 1
        for path in tree.paths:  # each feeds the last token again, for what comes after it
            taken_over += path.edges[0].action.position - 1
            reading += 1 + sum(1 + len(edge.action.memory.prompt) for edge in path.edges[1:])
    assert (policy.prefilled, policy.reused) == (reading, taken_over) and taken_over
    assert not policy._rows and not policy._session._rows
    batch = collate(rows_of(trees), "cpu")
    with torch.no_grad():
        logps = forward(player.model, batch, args)
    torch.testing.assert_close(logps[batch.mask], batch.old_logps[batch.mask], atol=2e-5, rtol=0)


# The loss of hand-made batches: two rows, two actions each, the second row padded.


def made(advantages: Sequence[float] = (1.0, -2.0, 0.5, 3.0)) -> Batch:
    step = torch.tensor([[-1, 0, 0, -1, 1, 1, 1], [2, -1, 3, 3, -1, -1, -1]])
    values = torch.tensor([*advantages, 0.0])[step]
    weight = torch.tensor([0.5, 0.25, 1.0, 0.5, 0.0])[step]
    old = torch.where(step >= 0, -torch.arange(1.0, 15.0).view(2, 7) / 10, 0.0)
    return Batch(torch.zeros(2, 8, dtype=torch.long), torch.tensor([8, 5]), step, values, weight, old)


def rows_like(batch: Batch) -> list[PathRow]:
    """Rows with the tokens and weights of `made`."""
    rows = []
    for i in range(len(batch.step)):
        edges = []
        for number in batch.step[i].unique()[1:].tolist():
            where = batch.step[i] == number
            edge = Edge((0, i), Node(0, None, None, owner=()), Action("", tokens=int(where.sum())))
            edge.weight = float(batch.weight[i][where][0])
            edges.append(edge)
        rows.append(PathRow([0] * int(batch.lengths[i]), edges))
    return rows


def gradient(batch: Batch, args: Args, *, moved: float = 0.0, reference: Tensor | None = None) -> Tensor:
    """Gradient of the summed loss by the log-probabilities, which have all ``moved`` since sampling."""
    logps = (batch.old_logps + moved).requires_grad_()
    loss, _ = policy_loss(logps, batch, args, reference)
    return torch.autograd.grad(loss.sum(), logps)[0]


@pytest.mark.parametrize("ratio", ["token", "step"])
def test_gradient_on_policy_is_the_policy_gradient(ratio: Any) -> None:
    batch = made()
    torch.testing.assert_close(gradient(batch, settings(ratio=ratio)), -batch.advantage)


def test_the_sequence_ratio_is_that_of_all_tokens_and_every_token_keeps_its_advantage() -> None:
    """GSPO-token: on the policy that has sampled, the policy gradient; elsewhere each token times its row's ratio."""
    batch = made()
    wide = settings(ratio="sequence", clip_low=10.0, clip_high=100.0)
    torch.testing.assert_close(gradient(batch, wide), -batch.advantage)
    change = torch.linspace(-0.3, 0.4, 14).view(2, 7)
    logps = (batch.old_logps + change).requires_grad_()
    (found,) = torch.autograd.grad(policy_loss(logps, batch, wide)[0].sum(), logps)
    mean = (change * batch.mask).sum(dim=1) / batch.mask.sum(dim=1)
    torch.testing.assert_close(found, -batch.advantage * mean.exp()[:, None])


def test_the_sequence_ratio_of_equal_advantages_has_the_gradient_of_gspo() -> None:
    batch, wide = made([0.5] * 4), settings(ratio="sequence", clip_low=10.0, clip_high=100.0)
    start = batch.old_logps + torch.linspace(-0.3, 0.4, 14).view(2, 7)
    mine, theirs = start.clone().requires_grad_(), start.clone().requires_grad_()
    policy_loss(mine, batch, wide)[0].sum().backward()
    sizes = batch.mask.sum(dim=1)
    ratio = (((theirs - batch.old_logps) * batch.mask).sum(dim=1) / sizes).exp()  # one term a row, of its mean
    (-0.5 * ratio * sizes).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad)


def test_the_loss_of_the_sequence_ratio_is_the_papers_objective_clip_included() -> None:
    """GSPO (Zheng et al., 2025): J = 1/G Σ_i min(s_i A_i, clip(s_i, 1 - ε, 1 + ε') A_i), s_i = (π/π_old)^(1/|y_i|).

    And GSPO-token, 1/G Σ_i 1/|y_i| Σ_t min(s_it A_it, clip(s_it) A_it), s_it = sg(s_i) π_t / sg(π_t), for advantages
    that differ within a row. Two rows; the first is beyond the upper bound, the second within both.
    """
    args = settings(ratio="sequence", aggregation="path", clip_low=3e-4, clip_high=4e-4)
    for advantages, within in (([1.0, 1.0, -1.0, -1.0], True), ([1.0, -2.0, 0.5, 3.0], False)):
        batch = replace(made(advantages), weight=made().mask / 2.0)
        rows = rows_like(batch)
        change = torch.tensor([[5e-4], [1e-4]]) * batch.mask
        mine, theirs = ((batch.old_logps + change).requires_grad_() for _ in range(2))
        aggregate(policy_loss(mine, batch, args)[0], batch, rows, denominator_of(rows, 1, args), args).backward()
        objective = torch.zeros(())
        for i in range(2):
            new, old, a = theirs[i][batch.mask[i]], batch.old_logps[i][batch.mask[i]], batch.advantage[i][batch.mask[i]]
            sequence = ((new - old).sum() / len(new)).exp()
            s = sequence if within else sequence.detach() * new.exp() / new.exp().detach()
            bounded = s.clamp(1 - args.clip_low, 1 + args.clip_high)
            objective = objective + torch.minimum(s * a, bounded * a).mean() / 2
        (-objective).backward()
        assert mine.grad is not None and theirs.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-7, rtol=1e-5)
        assert bool(mine.grad[0].any()) == (not within)  # where the clip is active nothing flows; a worse action is not
        loss = aggregate(policy_loss(mine, batch, args)[0], batch, rows, denominator_of(rows, 1, args), args)
        torch.testing.assert_close(loss, -objective)


@pytest.mark.parametrize("ratio", ["token", "step", "sequence"])
@pytest.mark.parametrize(
    ("advantage", "moved", "flows"),
    [(1.0, 0.5, False), (1.0, -0.5, True), (-1.0, 0.5, True), (-1.0, -0.5, False), (1.0, 0.05, True)],
)
def test_clipping_is_one_sided(ratio: Any, advantage: float, moved: float, flows: bool) -> None:
    found = gradient(made([advantage] * 4), settings(ratio=ratio, clip_low=0.2, clip_high=0.2), moved=moved)
    assert bool(found.any()) == flows


@pytest.mark.parametrize(("moved", "flows"), [(0.25, True), (0.35, False)])
def test_upper_and_lower_bound_are_separate(moved: float, flows: bool) -> None:
    args = settings(clip_low=0.1, clip_high=0.35)  # exp(0.25) = 1.28, exp(0.35) = 1.42, exp(-0.25) = 0.78
    assert bool(gradient(made([1.0] * 4), args, moved=moved).any()) == flows
    assert not gradient(made([-1.0] * 4), args, moved=-0.25).any()


def test_ratio_levels() -> None:
    batch, wide = made([1.0] * 4), {"clip_low": 10.0, "clip_high": 100.0}
    change = torch.linspace(-0.3, 0.4, 14).view(2, 7)
    logps = batch.old_logps + change
    token, step, sequence = (
        policy_loss(logps, batch, settings(ratio=r, **wide))[0] for r in ("token", "step", "sequence")
    )
    torch.testing.assert_close(token, -change.exp() * batch.mask)
    for number in range(4):
        where = batch.step == number
        torch.testing.assert_close(step[where].sum(), -change[where].sum().exp())
    for i in range(2):
        where = batch.mask[i]
        torch.testing.assert_close(sequence[i][where], -change[i][where].mean().exp().expand(int(where.sum())))


def test_kl_is_k3_and_its_gradient() -> None:
    batch, args = made([0.0] * 4), settings(kl=0.3)
    apart = torch.linspace(-1.0, 1.0, 14).view(2, 7)
    loss, stats = policy_loss(batch.old_logps, batch, args, batch.old_logps + apart)
    k3 = (apart.exp() - apart - 1) * batch.mask
    torch.testing.assert_close(loss, 0.3 * k3)
    torch.testing.assert_close(stats["kl"], k3.sum())
    found = gradient(batch, args, reference=batch.old_logps + apart)
    torch.testing.assert_close(found, -0.3 * apart * batch.mask)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_gradient_of_the_divergence_is_that_of_the_reverse_one(estimator: Any) -> None:
    """Over all tokens of a small vocabulary, with their probabilities, it is the exact gradient of KL(π‖ref)."""
    torch.manual_seed(0)
    logits, reference = torch.randn(5, dtype=torch.float64), torch.randn(5, dtype=torch.float64).log_softmax(0)
    logits.requires_grad_()
    logps = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((logps.exp() * (logps - reference)).sum(), logits, retain_graph=True)
    nothing = torch.zeros(1, 5, dtype=torch.float64)
    step = torch.arange(5)[None]
    batch = replace(made(), old_logps=logps.detach()[None], advantage=nothing, step=step, weight=nothing)
    loss, _ = policy_loss(logps[None], batch, settings(kl=1.0, kl_estimator=estimator), reference[None])
    (found,) = torch.autograd.grad((logps.detach().exp() * loss[0]).sum(), logits)
    torch.testing.assert_close(found, exact)


@pytest.mark.parametrize(("where", "estimator"), [("loss", "k1"), ("reward", "k2"), ("reward", "k3")])
def test_estimators_that_would_not_be_what_they_say_are_refused(where: Any, estimator: Any) -> None:
    with pytest.raises(ConfigError, match="kl_estimator: expected k"):
        settings(kl=0.1, kl_in=where, kl_estimator=estimator)
    assert settings(kl=0.1, kl_in="reward").kl_estimator == "k1"


def test_padding_and_prompts_have_no_loss_and_no_gradient() -> None:
    batch = made()
    logps = torch.where(batch.mask, batch.old_logps, torch.tensor(-50.0)).requires_grad_()
    loss, _ = policy_loss(logps, batch, settings(kl=0.1), torch.zeros_like(logps))
    (found,) = torch.autograd.grad(loss.sum(), logps)
    assert not loss[~batch.mask].any() and not found[~batch.mask].any()


def test_statistics_are_sums_over_sampled_tokens() -> None:
    batch = made()
    _, stats = policy_loss(batch.old_logps + 0.5, batch, settings())
    assert stats["tokens"] == 8
    torch.testing.assert_close(stats["ratio"] / 8, torch.tensor(0.5).exp())
    up = int(((batch.advantage > 0) & batch.mask).sum())
    assert (stats["clipped_low"], stats["clipped_high"]) == (0, up) and 0 < up < 8
    _, stats = policy_loss(batch.old_logps - 0.5, batch, settings())
    assert (stats["clipped_low"], stats["clipped_high"]) == (8 - up, 0)
    _, stats = policy_loss(batch.old_logps + 0.5, batch, settings())
    torch.testing.assert_close(stats["approx_kl"] / 8, torch.tensor(-0.5).exp() - 1 + 0.5)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token", (0.5 * 2 + 0.25 * 3 + 1 * 1 + 0.5 * 2) / (0.5 * 2 + 0.25 * 3 + 1 * 1 + 0.5 * 2)),
        ("path", 1.0),
        ("constant", (0.5 * 2 + 0.25 * 3 + 1 * 1 + 0.5 * 2) / 3),
    ],
)
def test_aggregation_of_equal_losses(aggregation: Any, expected: float) -> None:
    batch, args = made(), settings(aggregation=aggregation)
    rows = rows_like(batch)
    loss = aggregate(batch.mask.float(), batch, rows, denominator_of(rows, 3, args), args)
    assert float(loss) == pytest.approx(expected)


def test_path_aggregation_weighs_paths_alike() -> None:
    batch, args = made(), settings(aggregation="path")
    rows, losses = rows_like(batch), torch.tensor([[1.0], [5.0]]) * made().mask
    assert float(aggregate(losses, batch, rows, denominator_of(rows, 3, args), args)) == pytest.approx(3.0)


# Micro-batches.


@pytest.mark.parametrize("aggregation", ["token", "path", "constant"])
@pytest.mark.parametrize("ratio", ["token", "step", "sequence"])
def test_micro_batches_do_not_change_the_gradient(player: Player, aggregation: Any, ratio: Any) -> None:
    args = settings(aggregation=aggregation, ratio=ratio)
    trees = player.trees(args)
    rows = rows_of(trees)
    denominator = denominator_of(rows, len(trees), args)
    found = []
    for micro_tokens in (10**6, 600, 1):
        player.model.zero_grad()
        total = 0.0
        for part in micro_batches(rows, replace(args, micro_tokens=micro_tokens)):
            batch = collate(part, "cpu")
            loss, _ = policy_loss(forward(player.model, batch, args), batch, args)
            loss = aggregate(loss, batch, part, denominator, args)
            loss.backward()
            total += float(loss.detach())
        found.append((total, torch.cat([p.grad.flatten() for p in player.model.parameters()])))
    assert found[0][1].norm() > 1e-4
    for total, grad in found[1:]:
        assert total == pytest.approx(found[0][0], abs=1e-6)
        torch.testing.assert_close(grad, found[0][1], atol=1e-6, rtol=1e-4)
    player.model.zero_grad()


def plain_rows(*lengths: int, advantage: float = 1.0) -> list[PathRow]:
    rows = []
    for length in lengths:
        edge = Edge((0, 0), Node(0, None, None, owner=()), Action("", tokens=1))
        edge.advantage = advantage
        rows.append(PathRow([0] * length, [edge]))
    return rows


def test_micro_batches_hold_every_row_once_within_the_limit() -> None:
    rows = plain_rows(5, 90, 40, 40, 10, 300, 41)
    parts = micro_batches(rows, settings(micro_tokens=100, pack="flat"))
    assert sorted(len(row.ids) for part in parts for row in part) == sorted(len(row.ids) for row in rows)
    assert all(len(part) == 1 or len(part) * max(len(row.ids) for row in part) <= 100 for part in parts)
    assert len(parts) < len(rows)


def test_rows_that_cannot_move_the_policy_are_left_out_but_one() -> None:
    still, moving = plain_rows(5, 6, advantage=0.0), plain_rows(7)
    assert micro_batches([*still, *moving], settings()) == [moving]
    assert micro_batches(still, settings()) == [still[:1]]
    assert sum(map(len, micro_batches([*still, *moving], settings(kl=0.1)))) == 3


# Options of the loss, and the value head's.


@pytest.mark.parametrize(("estimator", "expected"), [("k2", lambda d: d**2 / 2), ("k3", lambda d: d.exp() - d - 1)])
def test_estimators_of_the_divergence(estimator: Any, expected: Any) -> None:
    batch, apart = made([0.0] * 4), torch.linspace(-1.0, 1.0, 14).view(2, 7)
    loss, _ = policy_loss(batch.old_logps, batch, settings(kl=0.5, kl_estimator=estimator), batch.old_logps + apart)
    torch.testing.assert_close(loss, 0.5 * expected(apart) * batch.mask)


def test_dual_clip_bounds_the_loss_of_bad_actions_that_became_likely() -> None:
    plain, dual = settings(), settings(dual_clip=3.0)
    for advantage, moved in ((-1.0, 0.5), (1.0, 2.0)):
        same = [gradient(made([advantage] * 4), args, moved=moved) for args in (plain, dual)]
        torch.testing.assert_close(*same)
    assert gradient(made([-1.0] * 4), plain, moved=2.0).any()
    assert not gradient(made([-1.0] * 4), dual, moved=2.0).any()  # e² > 3


def test_value_loss_is_that_of_learnt_states_clipped() -> None:
    nan = float("nan")
    batch = replace(
        made(),
        old_values=torch.tensor([[0.0, 0.5, 0.0, 0.0, 1.0, 0.0, 0.0], [0.0] * 7]),
        targets=torch.tensor([[nan, 1.0, nan, nan, 0.0, nan, nan], [nan] * 7]),
    )
    values = torch.zeros(2, 7)
    values[0, 1], values[0, 4] = 1.0, 0.9  # of the states in which tokens 2 and 5 are drawn
    total, learnt = value_loss(values, batch, settings(value_clip=0.0))
    assert learnt == 2
    assert float(total) == pytest.approx(0.5 * (0.0 + 0.81))
    total, _ = value_loss(values, batch, settings(value_clip=0.2))  # .5 -> .7, off by .3; 1 -> .9 as it is
    assert float(total) == pytest.approx(0.5 * (0.09 + 0.81))


def test_the_value_head_sees_the_state_that_a_token_is_drawn_in(player: Player) -> None:
    """Its value at a position depends on the tokens up to there, and starts at 0."""
    args = settings()
    batch = collate(rows_of(player.trees(args)), "cpu")
    whole = ActorCritic(player.model)
    assert not forward_pass(whole, batch.ids, batch.lengths)[2].any()
    with torch.no_grad():
        whole.value_head.weight.fill_(1.0)
        logps, _, before = forward_pass(whole, batch.ids, batch.lengths)
        t = int(batch.mask[0].nonzero()[0])  # token t + 1 is the first sampled
        changed = batch.ids.clone()
        changed[0, t + 1] = (changed[0, t + 1] + 1) % player.model.config.vocab_size
        after = forward_pass(whole, changed, batch.lengths)[2]
    torch.testing.assert_close(after[0, : t + 1], before[0, : t + 1])
    assert not torch.isclose(after[0, t + 1], before[0, t + 1])
    torch.testing.assert_close(logps, forward_pass(player.model, batch.ids, batch.lengths)[0])


def test_tokens_have_their_own_advantages_and_targets_where_a_critic_gave_them(player: Player) -> None:
    trees = player.trees(settings())
    for edge in (edge for tree in trees for edge in tree.edges()):
        n = edge.action.tokens
        edge.data = Critique([0.5] * n, targets=[float(i) for i in range(n)], advantages=[-float(i) for i in range(n)])
    batch = collate(rows_of(trees), "cpu")
    assert batch.targets is not None and batch.old_values is not None
    assert torch.equal(batch.targets.isnan(), ~batch.mask)
    assert torch.equal(batch.targets[batch.mask], -batch.advantage[batch.mask])
    assert (batch.old_values[batch.mask] == 0.5).all()


def test_paths_of_weight_0_are_not_trained_on(player: Player) -> None:
    trees = player.trees(settings("vineppo", roots=2, mc_rollouts=2, mc_turns=1))
    assert len(rows_of(trees)) == 2 * len(trees) < sum(len(tree.paths) for tree in trees)


# Minibatches.


@pytest.mark.parametrize(("prompts", "minibatches", "processes"), [(16, 4, 2), (12, 3, 4), (8, 8, 1), (6, 1, 3)])
def test_minibatches_are_drawn_anew_evenly_for_any_number_of_processes(
    prompts: int, minibatches: int, processes: int
) -> None:
    args = settings(prompts=prompts, minibatches=minibatches)
    drawn = [shuffled_parts(args, (0, 5, 0, epoch)) for epoch in range(200)]
    for parts in drawn:
        for rank in range(processes):
            numbers = np.bincount(parts[rank::processes], minlength=minibatches)
            assert (numbers == prompts // minibatches // processes).all()
    if minibatches > 1:
        assert len({tuple(parts) for parts in drawn}) > 1
        often = np.mean([parts[:, None] == np.arange(minibatches) for parts in drawn], axis=0)  # [prompts, minibatches]
        assert abs(often - 1 / minibatches).max() < 5 * (1 / minibatches / 200) ** 0.5
