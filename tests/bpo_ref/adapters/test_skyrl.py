"""Trees in SkyRL: what its generator returns, advantages through its estimator; with SkyRL itself where installed."""

from __future__ import annotations

import asyncio
import importlib.util
import multiprocessing
import sys
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from components import missing
from page_blocks import block, overrides
from tree_players import Players, TinyEngine, algorithm, players

from sandboxgym.adapters import skyrl as adapter
from sandboxgym.adapters.skyrl import TreeGenerator, estimate
from sandboxgym.adapters.tokens.trees import TokenRow


@pytest.fixture(scope="module")
def player() -> Iterator[Players]:
    with players() as made:
        yield made


@pytest.fixture(autouse=True)
def no_advantages_of_other_tests() -> Iterator[None]:
    yield
    adapter._credited.clear()


@dataclass
class TrajectoryID:
    """Stand-in for SkyRL's class of this name."""

    instance_id: str
    repetition_id: int


class Client:
    """Stands in for SkyRL's inference engines."""

    def __init__(self, model: Any, *, logprobs: bool = True) -> None:
        self.engine, self.requests, self.logprobs = TinyEngine(model), [], logprobs  # type: ignore[var-annotated]

    async def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(request)
        params = request["sampling_params"]
        asked = params["max_tokens"], params["stop_token_ids"], params["seed"]
        ids, logps = self.engine.sample(request["prompt_token_ids"][0], *asked)
        await asyncio.sleep(0)
        return {
            "response_ids": [ids],
            "responses": [""],
            "stop_reasons": ["stop"],
            "response_logprobs": [logps] if self.logprobs else None,
        }


def generator(player: Players, client: Any, algo: str = "bpo-forest", **options: Any) -> TreeGenerator:
    return TreeGenerator(
        client, player.tokenizer, player.envs, algorithm(algo), context=512, max_new_tokens=6, **options
    )


def batch(tasks: Sequence[int] = (0, 1, 2), *, repeats: int = 1, phase: str = "train") -> dict[str, Any]:
    numbers = [(task, repeat) for task in tasks for repeat in range(repeats)]
    return {
        "prompts": [[{"role": "user", "content": ""}]] * len(numbers),
        "env_classes": [""] * len(numbers),
        "env_extras": [{"task": task} for task, _ in numbers],
        "sampling_params": {"temperature": 1.0, "max_tokens": 1024, "logprobs": 1},
        "trajectory_ids": [TrajectoryID(f"p{task}", repeat) for task, repeat in numbers],
        "batch_metadata": SimpleNamespace(global_step=3, training_phase=phase),
    }


def aligned(values: Sequence[Sequence[float]]) -> torch.Tensor:
    """Rows as SkyRL pads them: aligned on the right."""
    width = max(map(len, values))
    return torch.tensor([[0.0] * (width - len(row)) + list(row) for row in values])


def uids(output: dict[str, Any]) -> list[str]:
    return [one.instance_id for one in output["trajectory_ids"]]


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[TokenRow]:
    """The rows of the last batch that was generated."""
    kept: list[TokenRow] = []
    inner = adapter.token_rows

    def spy(*args: Any, **options: Any) -> list[TokenRow]:
        kept[:] = inner(*args, **options)
        return list(kept)

    monkeypatch.setattr(adapter, "token_rows", spy)
    return kept


@pytest.mark.parametrize("algo", ["bpo-forest", "rloo-pooled", "grpo"])
def test_a_batch_becomes_trees_whose_rows_skyrl_gets_in_order(player: Players, rows: list[TokenRow], algo: str) -> None:
    client = Client(player.model)
    output = asyncio.run(generator(player, client, algo).generate(batch()))
    assert output["prompt_token_ids"] == [row.prompt for row in rows]
    assert output["response_ids"] == [row.response for row in rows]
    assert output["loss_masks"] == [row.mask for row in rows]
    assert output["rollout_logprobs"] == [row.logps for row in rows]
    assert [sum(rewards) for rewards in output["rewards"]] == [row.path.total_reward for row in rows]
    assert [rewards[-1] for rewards in output["rewards"]] == [row.path.total_reward for row in rows]
    assert uids(output) == [f"p{row.tree}" for row in rows] == sorted(uids(output))
    names = [(one.instance_id, one.repetition_id) for one in output["trajectory_ids"]]
    assert len(set(names)) == len(names)
    assert output["is_last_step"] == [True] * len(rows)
    assert set(output["stop_reasons"]) <= {"stop", "length"}
    assert output["rollout_metrics"]["generate/tree_paths"] == len(rows)
    assert len({request["session_ids"][0] for request in client.requests}) == 3
    assert all(request["sampling_params"]["max_tokens"] == 6 for request in client.requests)
    assert all(request["sampling_params"]["stop_token_ids"] == [*player.chat.stop_ids] for request in client.requests)


def test_skyrl_gets_our_advantages_token_by_token_once(player: Players, rows: list[TokenRow]) -> None:
    output = asyncio.run(generator(player, Client(player.model)).generate(batch()))
    rewards = aligned([*output["rewards"], [0.0]])
    ones = aligned([*([1.0] * len(row) for row in output["rewards"]), [1.0]])
    options: dict[str, Any] = {"config": SimpleNamespace(use_kl_in_reward=False), "gamma": 1.0, "values": None}
    advantages, returns = estimate(rewards, ones, [*uids(output), "pad0"], **options)
    assert torch.equal(advantages[:-1], aligned([row.advantages for row in rows]))
    assert torch.equal(advantages, returns)
    assert advantages[:-1].abs().sum() > 1
    assert not advantages[-1].any()
    with pytest.raises(
        ValueError, match="expected the rows of a TreeGenerator's last batch, found row 0 of prompt 'p0'"
    ):
        estimate(rewards, ones, uids(output), **options)


def test_in_step_wise_training_skyrls_masks_of_ones_hide_the_lengths_only(
    player: Players, rows: list[TokenRow]
) -> None:
    output = asyncio.run(generator(player, Client(player.model)).generate(batch()))
    rewards, names = aligned(output["rewards"]), uids(output)
    assert len({len(row.mask) for row in rows}) > 1
    totals = rewards.sum(1)
    swapped = list(range(len(names)))
    one, other = next((i, j) for i in swapped for j in swapped if names[i] == names[j] and totals[i] != totals[j])
    swapped[one], swapped[other] = other, one
    with pytest.raises(ValueError, match=f"prompt '{names[one]}' in the order in which they were generated"):
        estimate(rewards[swapped], torch.ones_like(rewards), names)
    short = min(len(row.mask) for row in rows) - 1
    with pytest.raises(ValueError, match=rf"found one of {short} with"):
        estimate(rewards[:, -short:], torch.ones_like(rewards)[:, -short:], names)
    advantages, _ = estimate(rewards, torch.ones_like(rewards), names)
    assert torch.equal(advantages, aligned([row.advantages for row in rows]))


def test_prompts_that_skyrl_filters_out_are_forgotten_in_time(player: Players, rows: list[TokenRow]) -> None:
    made = generator(player, Client(player.model))
    for first in (0, 3, 0):  # the first batch is filtered out, and one of its prompts comes again
        output = asyncio.run(made.generate(batch([first])))
    ones = aligned([[1.0] * len(row) for row in output["rewards"]])
    advantages, _ = estimate(aligned(output["rewards"]), ones, uids(output))
    assert torch.equal(advantages, aligned([row.advantages for row in rows]))
    assert [sorted(kept) for kept in adapter._credited] == [[], ["p3"], []]
    for _ in range(100):
        adapter._credited.append({})
    assert not any(adapter._credited)


def test_what_the_estimator_cannot_serve_is_refused(player: Players) -> None:
    output = asyncio.run(generator(player, Client(player.model)).generate(batch([0, 1])))
    rewards, names = aligned(output["rewards"]), uids(output)
    masks = aligned([[1.0] * len(row) for row in output["rewards"]])
    with pytest.raises(ValueError, match="use_kl_in_reward: expected False"):
        estimate(rewards, rewards, names, config=SimpleNamespace(use_kl_in_reward=True))
    with pytest.raises(ValueError, match=r"expected all \d+ rows of prompt 'p1', found \d+"):
        estimate(rewards[:-1], masks[:-1], names[:-1])
    with pytest.raises(ValueError, match="found row 0 of prompt 'q'"):
        estimate(rewards, masks, ["q"] * len(names))
    lengths = [len(row) for row in output["rewards"]]
    other = next(i for i in range(1, len(names)) if names[i] == names[0] and lengths[i] != lengths[0])
    order = list(range(len(names)))
    order[0], order[other] = other, 0
    with pytest.raises(
        ValueError, match=f"'p0' in the order .* as row 0 one of {lengths[0]} tokens .* {lengths[other]} "
    ):
        estimate(rewards[order], masks[order], names)
    with pytest.raises(ValueError, match=r"'p0' in the order .* with 7\b"):
        estimate(torch.cat([rewards[:1] * 0 + masks[:1] * 7 / lengths[0], rewards[1:]]), masks, names)
    estimate(rewards, masks, names)


def test_an_evaluation_has_as_many_independent_rollouts_as_it_asks_for(player: Players, rows: list[TokenRow]) -> None:
    output = asyncio.run(generator(player, Client(player.model)).generate(batch([4, 2], repeats=3, phase="eval")))
    assert uids(output) == ["p4"] * 3 + ["p2"] * 3
    assert [one.repetition_id for one in output["trajectory_ids"]] == [0, 1, 2] * 2
    assert output["is_last_step"] == [True] * 6
    assert not any(row.path.start.depth for row in rows)
    assert not any(adapter._credited)


def test_repeated_prompts_are_one_tree_in_training(player: Players) -> None:
    once = asyncio.run(generator(player, Client(player.model)).generate(batch([0, 1])))
    repeated = asyncio.run(generator(player, Client(player.model)).generate(batch([0, 1], repeats=4)))
    assert once["response_ids"] == repeated["response_ids"]
    assert uids(once) == uids(repeated)


def test_batches_differ_and_their_seeds_are_those_of_the_generator(player: Players) -> None:
    made = generator(player, Client(player.model))
    first, second = (asyncio.run(made.generate(batch([0]))) for _ in range(2))
    assert first["response_ids"] != second["response_ids"]
    again = asyncio.run(generator(player, Client(player.model)).generate(batch([0])))
    assert first["response_ids"] == again["response_ids"]


def test_engines_that_report_no_log_probabilities_give_none(player: Players) -> None:
    output = asyncio.run(generator(player, Client(player.model, logprobs=False)).generate(batch([0])))
    assert output["rollout_logprobs"] is None


def test_batches_without_tasks_or_ids_are_refused(player: Players) -> None:
    made = generator(player, Client(player.model))
    with pytest.raises(ValueError, match=r"expected prompts with a column 'task', found the columns \['other'\]"):
        asyncio.run(made.generate(batch([0]) | {"env_extras": [{"other": 1}]}))
    with pytest.raises(ValueError, match="expected a batch with trajectory_ids and env_extras"):
        asyncio.run(made.generate(batch([0]) | {"trajectory_ids": None}))


# SkyRL itself.


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SkyRL's trainer and estimators; its registry, without a Ray cluster, is of this process."""
    if importlib.util.find_spec("skyrl") is None:
        missing("skyrl", "skyrl is not installed")
    if sys.version_info < (3, 12):  # pydantic refuses the TypedDicts of SkyRL's types otherwise
        import typing_extensions

        monkeypatch.setattr(typing, "TypedDict", typing_extensions.TypedDict)
    from skyrl.backends.skyrl_train.utils import ppo_utils
    from skyrl.train import evaluate, trainer
    from skyrl.train.generators import base, utils

    adapter.register()
    adapter.register()
    return SimpleNamespace(ppo=ppo_utils, trainer=trainer, evaluate=evaluate, base=base, utils=utils)


def settings_of(real: Any) -> Any:
    """The settings that docs/verl.md names, of SkyRL's own class."""
    settings = real.trainer.SkyRLTrainConfig()
    settings.generator.step_wise_trajectories = True
    settings.generator.n_samples_per_prompt = 1
    settings.trainer.train_batch_size = settings.trainer.policy_mini_batch_size = 3
    settings.trainer.algorithm.advantage_estimator = adapter.ESTIMATOR
    settings.trainer.algorithm.loss_reduction = "token_mean"
    settings.trainer.algorithm.use_kl_in_reward = False
    settings.trainer.critic.model.path = None
    settings.trainer.dump_eval_results = False
    return settings


def prompts_of(tasks: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of SkyRL's data set."""
    told = [{"role": "user", "content": "not shown"}]
    return [{"prompt": told, "env_class": None, "env_extras": {"task": task}, "uid": f"p{task}"} for task in tasks]


class Tokenizer:
    """All that SkyRL's trainer asks of a tokenizer here."""

    pad_token_id = 0


def test_skyrl_accepts_the_command_of_the_page(real: Any) -> None:
    from skyrl.train.utils.utils import validate_cfg

    told = [*overrides("verl.md", "games.py"), "trainer.logger=console"]
    settings = real.trainer.SkyRLTrainConfig.from_cli_overrides(told)
    validate_cfg(settings)
    expected = settings_of(real)
    for name in ("step_wise_trajectories", "n_samples_per_prompt"):
        assert getattr(settings.generator, name) == getattr(expected.generator, name)
    for name in ("advantage_estimator", "loss_reduction", "use_kl_in_reward"):
        assert getattr(settings.trainer.algorithm, name) == getattr(expected.trainer.algorithm, name)
    assert settings.trainer.train_batch_size == settings.trainer.policy_mini_batch_size
    settings.trainer.algorithm.advantage_estimator = "sandboxgyn"
    with pytest.raises(AssertionError, match="invalid advantage_estimator"):
        validate_cfg(settings)


def test_the_program_of_the_page_makes_a_generator(player: Players, real: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    method = multiprocessing.get_start_method()
    names: dict[str, Any] = {"__name__": "games"}
    try:
        exec(block("verl.md", "python", "class Experiment(BasePPOExp)"), names)
    finally:
        multiprocessing.set_start_method(method, force=True)  # SkyRL's entry point sets another one
    made = names["Experiment"].get_generator(None, settings_of(real), player.tokenizer, Client(player.model))
    made._envs.close()
    assert isinstance(made, adapter.TreeGenerator)


def test_the_output_has_the_fields_of_skyrls_type(player: Players, real: Any) -> None:
    params = {"temperature": 1.0, "max_tokens": 1024}
    asked, _ = real.utils.prepare_generator_input(prompts_of([0, 1, 2]), 1, params, "none", "train", 3)
    assert set(asked) <= set(batch())
    made = generator(player, Client(player.model))
    output = asyncio.run(made.generate(asked))
    assert set(output) <= set(real.base.GeneratorOutput.__annotations__)
    assert {type(one) for one in output["trajectory_ids"]} == {real.base.TrajectoryID}


def test_skyrls_own_evaluation_counts_each_independent_rollout_once(
    player: Players, real: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    totals: list[float] = []
    inner = adapter.token_rows

    def rewarded(trees: Sequence[Any], **options: Any) -> list[TokenRow]:
        for i, path in enumerate(path for tree in trees for path in tree.paths):
            path.edges[-1].reward = float(i)  # the tiny model wins nothing by itself
            totals.append(path.total_reward)
        return inner(trees, **options)

    monkeypatch.setattr(adapter, "token_rows", rewarded)
    settings = settings_of(real)
    settings.generator.eval_n_samples_per_prompt = 3
    made = generator(player, Client(player.model))
    loader = [prompts_of([4, 2])]
    metrics = asyncio.run(real.evaluate.evaluate_step_wise(loader, made, settings, 3, player.tokenizer))
    assert totals == [0, 1, 2, 3, 4, 5]
    assert metrics["eval/all/avg_score"] == 2.5
    assert "eval/all/pass_at_3" in metrics


@pytest.mark.parametrize("algo", ["bpo-forest", "rloo-pooled", "grpo"])
def test_skyrls_own_loss_with_our_advantages_has_our_gradient(
    player: Players, rows: list[TokenRow], real: Any, algo: str
) -> None:
    """From the generator's output through the methods of SkyRL's trainer to its loss, with rows for its padding."""
    from test_token_trees import mean_loss

    Ours = real.trainer.RayPPOTrainer
    settings = settings_of(real)
    trainer = Ours.__new__(Ours)
    trainer.cfg, trainer.tokenizer, trainer.all_metrics = settings, Tokenizer(), {}
    trainer.generator = generator(player, Client(player.model), algo)
    trainer.dispatch = SimpleNamespace(get_lcm_dp_size=lambda: 5)  # makes SkyRL pad

    params = {"temperature": 1.0, "max_tokens": 1024, "logprobs": 1}
    asked, _ = real.utils.prepare_generator_input(prompts_of([0, 1, 2]), 1, params, "none", "train", 3)
    output = asyncio.run(trainer.generate(asked))  # SkyRL's checks included
    names = uids(output)
    output, names = trainer.postprocess_generator_output(output, names)
    totals = [row.path.total_reward for row in rows]
    assert trainer.all_metrics["reward/avg_raw_reward"] == pytest.approx(sum(totals) / len(totals))
    data = trainer.convert_to_training_input(output, names)
    assert data.metadata["policy_mini_batch_boundaries"] == [(0, len(rows))]
    data["values"] = None
    data = trainer.compute_advantages_and_returns(data)
    for i, row in enumerate(rows):
        assert data["advantages"][i, -len(row.mask) :].tolist() == pytest.approx(row.advantages)
    data = trainer._normalize_advantages(data, data.metadata["policy_mini_batch_boundaries"])

    width = data["loss_mask"].shape[1]
    logps = torch.zeros(len(data["sequences"]), width)
    for i, (ids, attended) in enumerate(zip(data["sequences"], data["attention_mask"], strict=True)):
        real_ids = ids[attended.bool()][None]
        found = torch.log_softmax(player.model(real_ids).logits[0, :-1].float(), -1)
        found = found.gather(1, real_ids[0, 1:, None])[:, 0]
        length = int(data["response_mask"][i].sum())
        logps = logps.index_put((torch.tensor([i] * length), torch.arange(width - length, width)), found[-length:])
    config = settings.trainer.algorithm
    loss, _ = real.ppo.ppo_policy_loss(
        logps, logps.detach(), data["advantages"], config, data["loss_mask"], data["rollout_logprobs"]
    )
    parameters = list(player.model.parameters())
    expected = torch.autograd.grad(mean_loss(player.model, rows), parameters)  # ours: test_token_trees.py
    assert sum(float(g.abs().sum()) for g in expected) > 1e-3
    for a, b in zip(torch.autograd.grad(loss, parameters), expected, strict=True):
        assert torch.allclose(a, b, atol=1e-6, rtol=1e-4)
