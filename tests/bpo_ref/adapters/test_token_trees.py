"""Trees for the trainers of others: rows hold exactly what was sampled, with exactly our advantages."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from tree_players import ENV, Players, TinyEngine, algorithm, players

from bpo_ref.adapters.algorithm import TreeAlgorithm
from bpo_ref.args import Args
from bpo_ref.config import ConfigError
from bpo_ref.learning.batch import collate, rows_of
from bpo_ref.sampling.generate import Generation, token_logps
from bpo_ref.train import aggregate, denominator_of, policy_loss
from sandboxgym.adapters.prompts import Prompt
from sandboxgym.adapters.tokens.trees import EngineError, Sample, TokenPolicy, TokenRow, token_rows
from sandboxgym.tree import RolloutTree, rollout_async

Grown = tuple[list[RolloutTree], TinyEngine]
ALGORITHMS = ["bpo-forest", "rloo-pooled", "grpo", "gigpo"]


@pytest.fixture(scope="module")
def player() -> Iterator[Players]:
    with players() as made:
        yield made


@pytest.fixture(scope="module")
def grown(player: Players) -> Callable[[str, int], Grown]:
    """Trees of an algorithm with prompts of this history, made once."""

    @functools.cache
    def made(algo: str, history: int) -> Grown:
        return player.grow(algorithm(algo, history=history), prompt=Prompt(history=history))

    return made


def ours(trees: Sequence[RolloutTree]) -> list[Any]:
    """Rows of this package's trainer for the same trees."""
    for edge in (edge for tree in trees for edge in tree.edges()):
        sample: Sample | Generation = edge.action.data
        edge.action.data = Generation(sample.ids, list(sample.logps or ()), [], edge.action.memory.truncated)
    return rows_of(trees)


def mean_loss(model: Any, rows: Sequence[TokenRow]) -> torch.Tensor:
    """Mean of -advantage log-probability over the sampled tokens: the gradient of a mean of ratios at ratio 1."""
    total, tokens = torch.zeros(()), 0
    for row in rows:
        ids = torch.tensor([row.prompt + row.response])
        logps = torch.log_softmax(model(ids).logits[0, :-1].float(), -1).gather(1, ids[0, 1:, None])[:, 0]
        response = logps[len(row.prompt) - 1 :]
        mask, advantages = torch.tensor(row.mask, dtype=torch.float32), torch.tensor(row.advantages)
        total = total - (mask * advantages * response).sum()
        tokens += sum(row.mask)
    return total / tokens


# Rows.


@pytest.mark.parametrize("history", [0, 2])
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_a_row_holds_exactly_the_ids_that_the_engine_was_given_and_returned(
    grown: Callable[[str, int], Grown], algo: str, history: int
) -> None:
    trees, engine = grown(algo, history)
    rows = token_rows(trees)
    seen: Counter[tuple[int, Any]] = Counter()
    for row in rows:
        ids, trained = row.prompt + row.response, [0] * len(row.response)
        assert len(row.mask) == len(row.logps or ()) == len(row.advantages) == len(row.response)
        for edge in row.edges:
            asked, sampled, logps = engine.log[row.tree, edge.path][edge.parent.depth - row.path.start.depth]
            assert ids[: len(asked)] == asked
            assert ids[len(asked) : len(asked) + len(sampled)] == sampled
            place = len(asked) - len(row.prompt)
            trained[place : place + len(sampled)] = [1] * len(sampled)
            assert row.logps is not None
            assert row.logps[place : place + len(sampled)] == logps
            seen[row.tree, edge.path] += 1
        assert row.mask == trained
        assert row.response[-1] == row.edges[-1].action.data.ids[-1]  # it ends with what was sampled last
        assert not any(a for a, m in zip(row.advantages, row.mask, strict=True) if not m)
    assert seen == {path: len(turns) for path, turns in engine.log.items()}  # every turn once
    assert any(any(row.advantages) for row in rows)


def test_a_fork_has_what_came_before_as_context_and_the_prompt_of_its_root(player: Players) -> None:
    trees, _ = player.grow(algorithm())
    forks = [row for row in token_rows(trees) if row.path.start.depth]
    assert forks
    by_key = {(row.tree, row.path.key): row for row in token_rows(trees)}
    for row in forks:
        backbone = by_key[row.tree, row.path.start.owner]
        assert row.prompt == backbone.prompt
        shared = row.edges[0].action.position - len(row.prompt)
        assert shared > 0
        assert row.response[:shared] == backbone.response[:shared]
        assert not any(row.mask[:shared])
        assert any(backbone.mask[:shared])


def test_trees_have_unequal_numbers_of_rows_and_rows_keep_their_order(player: Players) -> None:
    trees, _ = player.grow(algorithm(), tasks=6, seed=5)
    rows = token_rows(trees)
    assert [(row.tree, row.number) for row in rows] == [(t.index, i) for t in trees for i in range(len(t.paths))]
    assert len({len(tree.paths) for tree in trees}) > 1


def test_a_window_makes_every_turn_a_row_of_its_own(player: Players) -> None:
    trees, _ = player.grow(algorithm(history=1), prompt=Prompt(history=1))
    rows = token_rows(trees)
    assert len(rows) == sum(tree.env_steps for tree in trees)
    assert all(row.mask == [1] * len(row.response) for row in rows)
    assert sum(row.last for row in rows) == sum(len(tree.paths) for tree in trees)


def test_rows_to_evaluate_keep_all_paths_without_advantages(player: Players) -> None:
    trees, _ = player.grow(algorithm("vineppo", roots=2, mc_rollouts=1))
    assert len(token_rows(trees)) < len(token_rows(trees, credited=False)) == sum(len(tree.paths) for tree in trees)
    assert not any(any(row.advantages) for row in token_rows(trees, credited=False))


# Advantages and gradients are those of this package's trainer.


@pytest.mark.parametrize("history", [0, 2])
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_advantages_are_those_of_our_batches_token_by_token(
    grown: Callable[[str, int], Grown], algo: str, history: int
) -> None:
    trees, _ = grown(algo, history)
    rows, mine = token_rows(trees), ours(trees)
    batch = collate(mine, "cpu")
    assert len(rows) == len(mine) > 3
    scale = sum(sum(row.mask) for row in rows) / sum(row.mass for row in mine)
    for i, row in enumerate(rows):
        assert mine[i].ids == row.prompt + row.response
        span = slice(len(row.prompt) - 1, len(mine[i].ids) - 1)
        assert batch.mask[i, span].int().tolist() == row.mask
        assert batch.mask[i].sum() == sum(row.mask)
        wanted = scale * batch.advantage[i, span] * batch.weight[i, span]
        assert torch.allclose(torch.tensor(row.advantages), wanted, atol=1e-6)
        assert row.logps == pytest.approx(batch.old_logps[i, span].tolist())


@pytest.mark.parametrize("algo", ["bpo-forest", "rloo-pooled", "grpo"])
def test_the_mean_over_sampled_tokens_has_the_gradient_of_our_loss(
    player: Players, grown: Callable[[str, int], Grown], algo: str
) -> None:
    rule = algorithm(algo)
    trees, _ = grown(algo, 0)
    rows, mine = token_rows(trees), ours(trees)
    batch = collate(mine, "cpu")
    logps = token_logps(player.model, batch.ids, batch.lengths, temperature=1.0)[0]
    losses, _ = policy_loss(logps, batch, rule.args)
    loss = aggregate(losses, batch, mine, denominator_of(mine, len(trees), rule.args), rule.args)
    parameters = list(player.model.parameters())
    expected = torch.autograd.grad(loss, parameters)
    found = torch.autograd.grad(mean_loss(player.model, rows), parameters)
    assert sum(float(g.abs().sum()) for g in expected) > 1e-3
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-6, rtol=1e-4)


def test_the_memory_of_earlier_batches_makes_trees_fork(player: Players) -> None:
    """``bpo`` forks by the values of earlier batches: in the first one there are none."""
    rule = algorithm("bpo", roots=2, spacing=0)

    def forks(seed: int) -> int:
        return sum(node.depth > 0 for tree in player.grow(rule, tasks=4, seed=seed)[0] for node in tree.branch_nodes)

    assert forks(0) == 0
    assert sum(map(forks, range(1, 4))) > 0
    again = TreeAlgorithm(rule.args, state=rule.state())
    assert again.state() == rule.state()


# What is refused.


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"algo": "sft"}, "algo"),
        ({"algo": "ppo"}, "credit"),
        ({"algo": "bpo-paper"}, "schedule"),
        ({"algo": "rloo", "baseline": "critic"}, "baseline"),
        ({"algo": "rloo", "aggregation": "constant"}, "aggregation"),
        ({"algo": "rloo", "dynamic_sampling": 2.0}, "dynamic_sampling"),
        ({"algo": "rloo", "kl": 0.1, "kl_in": "reward"}, "kl_in"),
    ],
)
def test_settings_that_need_this_packages_trainer_are_refused(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: in another trainer expected"):
        TreeAlgorithm(Args(env_id=ENV, **settings))


def test_an_environment_without_progress_keys_is_named() -> None:
    assert TreeAlgorithm(Args(algo="bpo", env_id=ENV), keyed=False).args.schedule == "explained"
    with pytest.raises(ConfigError, match="progress_key"):
        TreeAlgorithm(Args(algo="rloo-pooled", env_id=ENV), keyed=False)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Sample([], []), "expected from 1 to 6 sampled tokens, found 0"),
        (Sample([5] * 7, None), "expected from 1 to 6 sampled tokens, found 7"),
        (Sample([5, 6], [-1.0]), "expected a log-probability for each of 2 tokens, found 1"),
        (Sample([5], [float("nan")]), "expected log-probabilities of at most 0, found"),
    ],
)
def test_an_answer_that_cannot_be_right_is_an_error_and_no_row(player: Players, answer: Sample, message: str) -> None:
    async def engine(ids: list[int], /, **_: Any) -> Sample:
        return answer

    policy = TokenPolicy(engine, player.chat, Prompt(), context=512, max_new_tokens=6)
    with pytest.raises(EngineError, match=message):
        asyncio.run(rollout_async(player.envs, policy, algorithm("rloo").schedule((0,), [0]), tasks=[0]))


def test_a_reward_that_is_no_number_is_an_error_and_not_remembered(player: Players) -> None:
    rule = algorithm("rloo-pooled")
    trees, _ = player.grow(rule)
    before = rule.state()
    trees[1].paths[0].edges[0].reward = float("nan")
    with pytest.raises(ValueError, match="expected finite rewards, found nan in tree 1 after the action"):
        TreeAlgorithm.credit(rule, trees)
    assert rule.state() == before
    trees[1].paths[0].edges[0].advantage = float("inf")
    with pytest.raises(ValueError, match=r"expected finite advantages, found inf with weight .* in path 0 of tree 1"):
        token_rows(trees)


def test_an_episode_ends_where_the_context_has_no_room_left(player: Players) -> None:
    trees, engine = player.grow(algorithm("rloo"), context=150)
    lengths = [len(row.prompt + row.response) for row in token_rows(trees, credited=False)]
    assert max(lengths) <= 150
    assert any(not edge.terminated and not edge.truncated for tree in trees for edge in tree.edges())
    assert isinstance(engine, TinyEngine)
    with pytest.raises(ValueError, match="less than the context of 6 tokens, found 6"):
        TokenPolicy(engine, player.chat, Prompt(), context=6, max_new_tokens=6)


def test_logps_that_the_engine_does_not_report_are_none(player: Players) -> None:
    inner = TinyEngine(player.model)

    async def silent(ids: list[int], /, **options: Any) -> Sample:
        return Sample((await inner(ids, **options)).ids)

    policy = TokenPolicy(silent, player.chat, Prompt(), context=512, max_new_tokens=6)
    schedule = algorithm("rloo").schedule((0,), [0])
    trees = asyncio.run(rollout_async(player.envs, policy, schedule, tasks=[0]))
    assert {row.logps for row in token_rows(trees, credited=False)} == {None}
