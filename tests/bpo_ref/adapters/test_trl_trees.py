"""Trees in TRL: several branch points per episode, the advantages of every token, one update with a tiny model."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from components import missing
from test_token_trees import mean_loss
from tree_players import Parity, Players, algorithm, players

from bpo_ref.adapters.algorithm import TreeAlgorithm
from sandboxgym.adapters import trl as adapter
from sandboxgym.adapters.tokens.trees import TokenRow
from sandboxgym.adapters.trl import TrainerEngine, TreeRollouts, tree_return, tree_trainer


@pytest.fixture(scope="module")
def player() -> Iterator[Players]:
    with players() as made:
        yield made


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[TokenRow]:
    """The rows of the last batch."""
    kept: list[TokenRow] = []
    inner = adapter.token_rows

    def spy(*args: Any, **options: Any) -> list[TokenRow]:
        kept[:] = inner(*args, **options)
        return list(kept)

    monkeypatch.setattr(adapter, "token_rows", spy)
    return kept


def stub(player: Players, *, generations: int = 12, processes: int = 1, training: bool = True) -> Any:
    """Stand-in for a trainer, with the attributes that `TreeRollouts` reads."""
    player.model.train(training)
    return SimpleNamespace(
        model=player.model,
        accelerator=SimpleNamespace(num_processes=processes, unwrap_model=lambda model: model),
        args=SimpleNamespace(temperature=1.0),
        processing_class=player.tokenizer,
        num_generations=generations,
        state=SimpleNamespace(global_step=4),
        num_generations_eval=2,
    )


def rollouts(player: Players, rule: TreeAlgorithm | None = None, **options: Any) -> TreeRollouts:
    return TreeRollouts(player.envs, rule or algorithm(), player.tokenizer, context=512, max_new_tokens=6, **options)


def several() -> Parity:
    """Two independent rollouts per task, each with two branch points of three children."""
    return algorithm(schedule="random", forks="roots", roots=2, points=2, width=3)


def prompts(tasks: Sequence[int], repeats: int) -> list[Any]:
    return [[{"role": "user", "content": str(task)}] for task in tasks for _ in range(repeats)]


def test_trees_fill_the_batch_and_rows_beyond_them_train_nothing(player: Players, rows: list[TokenRow]) -> None:
    made = rollouts(player)
    told = made(prompts([0, 1], 12), stub(player))
    assert len(rows) < 24
    for i in range(24):
        row = rows[i % len(rows)]
        assert told["prompt_ids"][i] == row.prompt
        assert told["completion_ids"][i] == row.response
        assert told["env_mask"][i] == (row.mask if i < len(rows) else [0] * len(row.mask))
        assert told["tree_return"][i] == row.path.total_reward
    assert tree_return(told["tree_return"], prompts=[]) == told["tree_return"]
    longest = max(map(len, told["completion_ids"]))
    advantages = made.advantages(torch.zeros(24, longest, dtype=torch.int64))
    for i, values in enumerate(advantages):
        expected = rows[i].advantages if i < len(rows) else []
        assert values.tolist() == pytest.approx(expected + [0.0] * (longest - len(expected)))
    assert any(len({a for a, m in zip(row.advantages, row.mask, strict=True) if m}) > 1 for row in rows)


def test_one_episode_has_several_branch_points_and_returns_that_differ(player: Players, rows: list[TokenRow]) -> None:
    rollouts(player, several())(prompts([0, 1, 2], 12), stub(player))
    starts = {(row.tree, id(row.path.start)) for row in rows if row.path.start.depth}
    assert max(sum(tree == chosen for tree, _ in starts) for chosen in range(3)) > 1
    assert any(len({row.path.total_reward for row in rows if row.tree == tree}) > 1 for tree in range(3))


def test_an_evaluation_has_independent_rollouts(player: Players, rows: list[TokenRow]) -> None:
    told = rollouts(player)(prompts([0, 1], 2), stub(player, training=False))
    assert len(rows) == len(told["completion_ids"]) == 4
    assert not any(row.path.start.depth for row in rows)
    player.model.train()


def test_what_trl_cannot_do_with_trees_is_refused(player: Players) -> None:
    with pytest.raises(ValueError, match=r"at most 4 rows from 2 trees, found \d+: num_generations has to be at least"):
        rollouts(player)(prompts([0, 1], 2), stub(player, generations=2))
    with pytest.raises(ValueError, match="expected every prompt 12 times in a row, found 24 otherwise"):
        rollouts(player)(prompts([0, 1, 0, 1], 6), stub(player))
    with pytest.raises(ValueError, match="expected one training process, for credit needs all trees; found 2"):
        rollouts(player)(prompts([0], 12), stub(player, processes=2))
    with pytest.raises(ValueError, match="expected a prompt whose last message is the number of a task, found 'hello'"):
        rollouts(player)([[{"role": "user", "content": "hello"}]] * 12, stub(player))


def test_the_trainers_model_samples_the_same_whatever_else_is_in_the_batch(player: Players) -> None:
    trainer = stub(player)
    asked = [([5, 6, 7] * (i + 1), 3 + i % 3, 100 + i) for i in range(5)]

    async def sample(chosen: Sequence[tuple[list[int], int, int]]) -> list[list[int]]:
        engine, stops = TrainerEngine(trainer), player.chat.stop_ids
        answers = await asyncio.gather(
            *(engine(ids, limit=limit, stop_ids=stops, seed=seed, path=(0, (0, 0))) for ids, limit, seed in chosen)
        )
        return [answer.ids for answer in answers]

    together = asyncio.run(sample(asked))
    assert together == [asyncio.run(sample([one]))[0] for one in asked]
    assert all(1 <= len(ids) <= limit for ids, (_, limit, _) in zip(together, asked, strict=True))
    assert player.model.training


def test_the_trainers_model_samples_from_its_softmax(player: Players) -> None:
    """4,000 draws of one token: their frequencies are the model's probabilities."""
    context, draws = [5, 6, 7, 8], 4000

    async def sample() -> list[int]:
        engine = TrainerEngine(stub(player))
        asked = (engine(context, limit=1, stop_ids=(0,), seed=seed, path=(0, (0, 0))) for seed in range(draws))
        return [answer.ids[0] for answer in await asyncio.gather(*asked)]

    found = torch.bincount(torch.tensor(asyncio.run(sample())), minlength=len(player.tokenizer)) / draws
    with torch.no_grad():
        expected = torch.softmax(player.model(torch.tensor([context])).logits[0, -1].float(), 0)
    assert float((found - expected).abs().sum()) < 0.12  # total variation of a fair sample: about 0.05


def test_a_model_that_fails_ends_the_rollout_with_its_error(player: Players) -> None:
    trainer = stub(player)
    trainer.accelerator.unwrap_model = lambda model: SimpleNamespace(training=True, eval=lambda: None, train=bool)
    with pytest.raises(AttributeError, match="generate"):
        rollouts(player)(prompts([0], 12), trainer)


def test_one_update_of_trls_trainer_is_a_step_along_our_gradient(
    player: Players, rows: list[TokenRow], tmp_path: Any
) -> None:
    """GRPOTrainer itself, on a CPU: plain gradient descent with step 1 moves the weights by exactly our gradient."""
    try:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer
    except ImportError:
        missing("trl", "trl is not installed")
    model = copy.deepcopy(player.model)
    settings = GRPOConfig(
        output_dir=str(tmp_path),
        max_steps=1,
        num_generations=12,
        per_device_train_batch_size=36,
        max_grad_norm=1e9,
        beta=0.0,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    made = rollouts(player, several())
    trainer = tree_trainer(GRPOTrainer)(
        model,
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": prompts([task], 1)[0]} for task in range(3)]),
        processing_class=player.tokenizer,
        reward_funcs=[tree_return],
        rollout_func=made,
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)),
    )
    trainer.train()
    assert len({row.path.start.depth for row in rows}) > 1
    parameters = list(player.model.parameters())  # the weights before the update
    expected = torch.autograd.grad(mean_loss(player.model, rows), parameters)
    assert sum(float(g.abs().sum()) for g in expected) > 1e-3
    for before, after, gradient in zip(parameters, trainer.model.parameters(), expected, strict=True):
        assert torch.allclose(before - after, gradient, atol=2e-6, rtol=1e-3)
    logged = next(entry for entry in trainer.state.log_history if "reward" in entry)
    assert logged["reward_std"] > 0
