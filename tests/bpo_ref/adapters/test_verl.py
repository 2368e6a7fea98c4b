"""Trees in verl: rows for its queue, advantages through its estimator; with verl itself where it is installed."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from components import missing
from page_blocks import block, overrides
from tree_players import Players, TinyEngine, algorithm, players

from sandboxgym.adapters import verl as adapter
from sandboxgym.adapters.tokens.trees import token_rows
from sandboxgym.adapters.verl import ADVANTAGES, TreeManager, VerlEngine, estimate, rows_of_batch, verl_row
from sandboxgym.tree import RolloutTree


@pytest.fixture(scope="module")
def player() -> Iterator[Players]:
    with players() as made:
        yield made


class Queue(ModuleType):
    """Stands in for ``transfer_queue``: rows and tags by key."""

    def __init__(self) -> None:
        super().__init__("transfer_queue")
        self.rows: dict[str, dict[str, dict[str, Any]]] = {"train": {}, "val": {}}
        self.tags: dict[str, dict[str, dict[str, Any]]] = {"train": {}, "val": {}}
        self.statuses: dict[str, list[str]] = {}

    def kv_batch_put(self, keys: Sequence[str], partition_id: str, fields: Any = None, tags: Any = None) -> None:
        for i, key in enumerate(keys):
            self.tags[partition_id].setdefault(key, {}).update(tags[i])
            self.statuses.setdefault(key, []).append(tags[i]["status"])
            if fields is not None:
                self.rows[partition_id][key] = fields[i]

    def kv_batch_get(self, keys: Sequence[str], partition_id: str, select_fields: Sequence[str]) -> dict[str, Any]:
        return {name: [self.rows[partition_id][key][name] for key in keys] for name in select_fields}


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    """A queue in the place of verl's, which stores rows as they are."""
    made = Queue()
    monkeypatch.setitem(sys.modules, "transfer_queue", made)
    for name in ("verl", "verl.utils", "verl.utils.tensordict_utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["verl.utils.tensordict_utils"].list_of_dict_to_tensordict = list  # type: ignore[attr-defined]
    return made


class Client:
    """Stands in for verl's ``LLMServerClient``."""

    def __init__(self, model: Any) -> None:
        self.engine, self.requests, self.broken = TinyEngine(model), [], False  # type: ignore[var-annotated]

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        self.requests.append((request_id, sampling_params))
        if self.broken:
            raise ConnectionError("the server is gone")
        asked = sampling_params["max_tokens"], sampling_params["stop_token_ids"], sampling_params["seed"]
        ids, logps = self.engine.sample(prompt_ids, *asked)
        await asyncio.sleep(0)
        return SimpleNamespace(
            token_ids=ids, log_probs=logps, extra_fields={"min_global_steps": 4, "max_global_steps": 5}
        )


class Dict(dict[str, Any]):
    """A dictionary whose items are attributes too, as verl's configuration has them."""

    __getattr__ = dict.__getitem__


def configuration(**rollout: Any) -> Dict:
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    lengths = {"prompt_length": 256, "response_length": 256, "calculate_log_probs": True, "name": "vllm"}
    validation = Dict(temperature=0.5, top_p=0.9, top_k=5, n=2)
    return Dict(actor_rollout_ref=Dict(rollout=Dict(**sampling, **lengths, **rollout, val_kwargs=validation)))


def manager(player: Players, client: Any, algo: str = "bpo-forest") -> TreeManager:
    class Manager(TreeManager):
        max_new_tokens = 6

        def environments(self) -> Any:
            return player.envs

        def algorithm(self) -> Any:
            return algorithm(algo)

        def tokenizer(self) -> Any:
            return player.tokenizer

    return Manager(configuration(), client)


class Batch(dict[str, Any]):
    """Stands in for a TensorDict: a list for each field; its length is the number of rows."""

    def __len__(self) -> int:
        return len(self["uid"])


def batch(tasks: Sequence[int] = (0, 1, 2), **more: Any) -> Batch:
    rows = {"uid": [f"prompt-{task}" for task in tasks], "extra_info": [{"task": task} for task in tasks]}
    return Batch(**rows, global_steps=[7] * len(tasks), **more)


def until_settled(queue: Queue, uids: Sequence[str]) -> list[str]:
    """Last status of the prompts, once each of them has one that is final."""
    deadline = time.monotonic() + 300
    while not all(queue.statuses.get(uid, [""])[-1] in ("finished", "failure") for uid in uids):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return [queue.statuses[uid][-1] for uid in uids]


# Rows.


def asked(trees: Sequence[RolloutTree]) -> dict[int, dict[str, Any]]:
    return {tree.index: {"uid": f"uid{tree.index}", "global_steps": 7, "raw_prompt": []} for tree in trees}


def test_a_row_has_the_fields_of_verls_queue(player: Players) -> None:
    trees, _ = player.grow(algorithm())
    rows = token_rows(trees)
    for row in rows:
        fields = verl_row(row, asked(trees)[row.tree])
        ids = row.prompt + row.response
        assert fields["input_ids"].tolist() == [*fields["prompts"].tolist(), *fields["responses"].tolist()] == ids
        assert fields["position_ids"].tolist() == list(range(len(ids)))
        assert fields["response_mask"].tolist() == fields["loss_mask"].tolist() == row.mask
        assert fields["rollout_log_probs"].tolist() == pytest.approx(row.logps)
        assert fields["rm_scores"].sum() == fields["rm_scores"][-1] == row.path.total_reward
        assert fields["extra_fields"][ADVANTAGES] == row.advantages
        assert fields["raw_prompt"] == []
        assert fields["tag"]["seq_len"] == fields["tag"]["prompt_len"] + fields["tag"]["response_len"] == len(ids)
        assert fields["tag"]["min_global_steps"] == fields["tag"]["max_global_steps"] == 3
    keys = [verl_row(row, asked(trees)[row.tree])["key"] for row in rows]
    assert len(set(keys)) == len(keys)
    assert [verl_row(row, asked(trees)[row.tree])["uid"] for row in rows] == keys
    assert {verl_row(row, asked(trees)[row.tree], True)["uid"] for row in rows} == {"uid0", "uid1", "uid2"}


def test_the_version_of_a_server_that_reports_none_is_that_of_the_step_before(player: Players) -> None:
    trees, _ = player.grow(algorithm("rloo"), tasks=1)
    for edge in trees[0].edges():
        edge.action.data = SimpleNamespace(ids=edge.action.data.ids, logps=None, extra=(None, None))
    fields = verl_row(token_rows(trees, credited=False)[0], {"uid": "u", "global_steps": 7})
    assert fields["tag"]["min_global_steps"] == fields["tag"]["max_global_steps"] == 6
    assert "rollout_log_probs" not in fields


# The estimator.


def padded(fields: Sequence[dict[str, Any]], name: str) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([row[name] for row in fields], batch_first=True)


def test_verl_gets_our_advantages_token_by_token_in_any_order_and_beside_padding(player: Players, queue: Queue) -> None:
    trees, _ = player.grow(algorithm())
    rows = token_rows(trees)[::-1]
    fields = [verl_row(row, asked(trees)[row.tree]) for row in rows]
    queue.rows["train"] = {row["key"]: row for row in fields}
    mask = padded(fields, "response_mask")
    mask = torch.cat([mask, torch.zeros(2, mask.shape[1], dtype=mask.dtype)])  # verl's padding
    index = np.array([row["uid"] for row in fields] + ["pad1", "pad1"], dtype=object)
    advantages, returns = estimate(torch.zeros(mask.shape), mask, config={}, index=index, gamma=1.0)
    assert advantages.shape == returns.shape == mask.shape
    for i, row in enumerate(rows):
        assert advantages[i, : len(row.mask)].tolist() == pytest.approx(row.advantages)
        assert not advantages[i, len(row.mask) :].any()
    assert not advantages[-2:].any()
    assert advantages.abs().sum() > 1


def test_settings_and_rows_that_the_estimator_cannot_serve_are_refused(queue: Queue) -> None:
    mask = torch.ones(1, 2)
    with pytest.raises(ValueError, match="use_kl_in_reward: expected False"):
        estimate(mask, mask, config={"use_kl_in_reward": True}, index=["a"])
    queue.rows["train"] = {"a": {"extra_fields": {}}}
    with pytest.raises(ValueError, match="expected rows of a TreeManager, found a without tree_advantages"):
        estimate(mask, mask, config={}, index=["a"])


# The manager.


@pytest.mark.parametrize("algo", ["bpo-forest", "rloo-pooled", "grpo"])
def test_a_batch_becomes_trees_whose_rows_are_in_the_queue(player: Players, queue: Queue, algo: str) -> None:
    client = Client(player.model)
    manager(player, client, algo).generate_sequences(batch())
    uids = [f"prompt-{task}" for task in range(3)]
    assert until_settled(queue, uids) == ["finished"] * 3
    assert all(queue.statuses[uid] == ["running", "finished"] for uid in uids)
    rows = queue.rows["train"]
    assert {key.rsplit("_", 2)[0] for key in rows} == set(uids)
    assert all(row["uid"] == key and row["extra_info"] == {"task": int(key[7])} for key, row in rows.items())
    assert {queue.tags["train"][key]["min_global_steps"] for key in rows} == {4}
    assert {queue.tags["train"][key]["max_global_steps"] for key in rows} == {5}
    names = {name for name, _ in client.requests}
    assert len(names) == 3  # the paths of a tree share the prefix cache of one server
    assert len({params["seed"] for _, params in client.requests}) == len(client.requests)
    assert {params["temperature"] for _, params in client.requests} == {1.0}


def test_batches_that_overlap_are_rolled_out_one_after_the_other_and_differ(player: Players, queue: Queue) -> None:
    client = Client(player.model)
    made = manager(player, client, "rloo")
    made.generate_sequences(batch([0]))
    made.generate_sequences(Batch(uid=["again-0"], extra_info=[{"task": 0}], global_steps=[8]))
    assert until_settled(queue, ["prompt-0", "again-0"]) == ["finished"] * 2
    first, second = (
        [row["responses"].tolist() for key, row in queue.rows["train"].items() if key.startswith(uid)]
        for uid in ("prompt", "again")
    )
    assert first
    assert second
    assert first != second


def test_validation_has_independent_rollouts_and_no_advantages(player: Players, queue: Queue) -> None:
    client = Client(player.model)
    manager(player, client).generate_sequences(batch(validate=[True] * 3))
    assert until_settled(queue, ["prompt-0", "prompt-1", "prompt-2"]) == ["finished"] * 3
    assert not queue.rows["train"]
    keys = sorted(queue.rows["val"])
    assert keys == [f"prompt-{task}_{path}_0" for task in range(3) for path in range(2)]
    assert all(row["uid"] == key.rsplit("_", 2)[0] for key, row in queue.rows["val"].items())
    assert "validate" not in queue.rows["val"][keys[0]]
    assert {params["temperature"] for _, params in client.requests} == {0.5}


def test_a_rollout_that_fails_is_reported_to_verl_and_the_next_one_goes_on(
    player: Players, queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    client = Client(player.model)
    made = manager(player, client, "rloo")
    client.broken = True
    made.generate_sequences(batch([0, 1]))
    assert until_settled(queue, ["prompt-0", "prompt-1"]) == ["failure"] * 2
    assert "a rollout of 2 trees failed: ConnectionError: the server is gone" in caplog.text
    client.broken = False
    made.generate_sequences(batch([2]))
    assert until_settled(queue, ["prompt-2"]) == ["finished"]
    made.generate_sequences(Batch(uid=["no-task"], extra_info=[{}], global_steps=[8]))
    assert until_settled(queue, ["no-task"]) == ["failure"]
    assert "expected rows with extra_info['task'], found extra_info={}" in caplog.text


def test_a_failure_that_verl_could_not_be_told_of_is_told_again(
    player: Players, queue: Queue, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "_AGAIN", 0.01)
    refusals = [ConnectionError("the queue is full")] * 3
    put = queue.kv_batch_put

    def refusing(*args: Any, **options: Any) -> None:
        if refusals:
            raise refusals.pop()
        put(*args, **options)

    monkeypatch.setattr(queue, "kv_batch_put", refusing)
    made = manager(player, Client(player.model), "rloo")
    made.generate_sequences(batch([0]))
    assert until_settled(queue, ["prompt-0"]) == ["failure"]
    assert caplog.text.count("verl was not told") == 2


def test_a_manager_closes_its_environments_with_the_process(
    player: Players, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithms = ModuleType("verl.trainer.ppo.core_algos")
    algorithms.register_adv_est = lambda name: lambda function: function  # type: ignore[attr-defined]
    for name in ("verl.trainer", "verl.trainer.ppo"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, algorithms.__name__, algorithms)
    at_exit: list[Any] = []
    monkeypatch.setattr(adapter.atexit, "register", at_exit.append)
    closed: list[str] = []

    class Manager(type(manager(player, None))):  # type: ignore[misc]
        def environments(self) -> Any:
            return SimpleNamespace(close=lambda: closed.append("environments"))

    made = Manager.create(configuration(), None)
    (end,) = at_exit
    end()
    made.close()
    assert closed == ["environments"] * 2


class Fragile:
    """A source of environments of which the first one that is asked for cannot be stepped."""

    threads = 1

    def __init__(self, inner: Any) -> None:
        self.inner, self.broken, self.calls = inner, True, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def call(self, jobs: Sequence[Any]) -> list[Any]:
        """Lose every job after the reset and the first restore, once."""
        self.calls += 1
        if self.broken and self.calls == 3:
            self.broken = False
            return [ConnectionError("the environment is gone") for _ in jobs]
        return list(self.inner.call(jobs))


def test_lost_environments_are_logged_and_cost_no_path(
    player: Players, queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    made = manager(player, Client(player.model), "rloo")
    made._envs = Fragile(player.envs)  # type: ignore[assignment]
    made.generate_sequences(batch([0]))
    assert until_settled(queue, ["prompt-0"]) == ["finished"]
    assert "environments lost: 1, paths dropped: 0; last: ConnectionError: the environment is gone" in caplog.text
    assert len(queue.rows["train"]) > 2


def test_what_a_manager_has_to_say_is_named(player: Players) -> None:
    with pytest.raises(NotImplementedError, match=r"TreeManager has to implement environments\(\)"):
        TreeManager(configuration(), None)
    with pytest.raises(ValueError, match="without distillation"):
        TreeManager(configuration(), None, teacher_client={"a": 1})


def test_an_engine_without_seeds_gets_none(player: Players) -> None:
    seen = []

    class Plain:
        async def generate(self, request_id: str, **options: Any) -> Any:
            seen.append(options["sampling_params"])
            return SimpleNamespace(token_ids=[5], log_probs=None, extra_fields={})

    engine = VerlEngine(Plain(), {"temperature": 1.0, "logprobs": False}, seeded=False, name="x")
    sample = asyncio.run(engine([1, 2], limit=3, stop_ids=(9,), seed=4, path=(0, (0, 0))))
    assert (sample.ids, sample.logps, sample.extra) == ([5], None, (None, None))
    assert seen == [{"temperature": 1.0, "logprobs": False, "max_tokens": 3, "stop_token_ids": [9]}]
    assert adapter.ESTIMATOR == "sandboxgym"
    assert rows_of_batch(batch([3]))[0]["uid"] == "prompt-3"


def test_the_largest_tree_of_the_page_has_as_many_paths_as_its_command_says() -> None:
    names: dict[str, Any] = {"__name__": "shop"}
    exec(block("verl.md", "python", "class Manager(TreeManager)"), names)
    args = names["Manager"].algorithm(SimpleNamespace()).args
    told = dict(setting.split("=", 1) for setting in overrides("verl.md", "verl.trainer.main_ppo"))
    assert args.roots * args.width**args.points == int(told["actor_rollout_ref.rollout.n"])
    assert (
        args.prompts == int(told["data.train_batch_size"]) == int(told["actor_rollout_ref.actor.ppo_mini_batch_size"])
    )


# verl itself.


def real() -> None:
    for name in ("verl", "transfer_queue", "tensordict"):
        if importlib.util.find_spec(name) is None:
            missing("verl", f"{name} is not installed")


def test_verl_accepts_the_command_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real()
    from hydra import compose, initialize_config_module
    from hydra.errors import ConfigCompositionException
    from verl.utils.import_utils import load_class_from_fqn

    told = overrides("verl.md", "verl.trainer.main_ppo")
    (named,) = [setting for setting in told if "agent_loop_manager_class" in setting]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [*told, "actor_rollout_ref.rollout.name=vllm"])
        with pytest.raises(ConfigCompositionException, match="agent_loop_manager_class"):
            compose("ppo_trainer", [named.removeprefix("+")])
    assert config.algorithm.adv_estimator == adapter.ESTIMATOR
    (tmp_path / "shop.py").write_text(block("verl.md", "python", "class Manager(TreeManager)"), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    found = load_class_from_fqn(config.actor_rollout_ref.rollout.agent.agent_loop_manager_class, "AgentLoopManager")
    assert issubclass(found, TreeManager)


@pytest.mark.parametrize("algo", ["bpo-forest", "rloo-pooled", "grpo"])
def test_verls_own_loss_with_our_advantages_has_our_gradient(
    player: Players, monkeypatch: pytest.MonkeyPatch, algo: str
) -> None:
    """Through verl's `compute_advantage_for_multi_trajectories` and `ppo_loss`, on its nested tensors."""
    real()
    import verl.trainer.ppo.v1  # noqa: F401 - imports the real queue
    from test_token_trees import mean_loss
    from verl.protocol import DataProto
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn, register_adv_est
    from verl.trainer.ppo.padding_utils import construct_minimal_padding_template
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    trees, _ = player.grow(algorithm(algo))
    rows = token_rows(trees)
    fields = [verl_row(row, asked(trees)[row.tree]) for row in rows]
    queue = Queue()
    queue.rows["train"] = {row["key"]: row for row in fields}
    monkeypatch.setitem(sys.modules, "transfer_queue", queue)
    register_adv_est(adapter.ESTIMATOR)(estimate)
    assert get_adv_estimator_fn("sandboxgym") is estimate
    keys, tags = [row.pop("key") for row in fields], [row.pop("tag") for row in fields]
    padding, _ = construct_minimal_padding_template(fields[0], tags[0], player.tokenizer.eos_token_id)
    fields += [{**padding, "uid": "pad"}] * 2  # as verl fills up a batch
    keys += ["pad_0_0", "pad_1_0"]

    config = {"use_kl_in_reward": False, "adv_estimator": "sandboxgym"}
    tensors = {name: padded(fields, name) for name in ("response_mask", "rm_scores")}
    data = DataProto.from_dict(tensors={**tensors, "token_level_rewards": tensors["rm_scores"]})
    data.non_tensor_batch["uid"] = np.array([row["uid"] for row in fields], dtype=object)
    data = compute_advantage_for_multi_trajectories(data, keys, "sandboxgym", config=config)
    for i, row in enumerate(rows):
        assert data.batch["advantages"][i, : len(row.mask)].tolist() == pytest.approx(row.advantages)

    logps, old = [], []
    for row in fields:
        ids = row["input_ids"][None]
        found = torch.log_softmax(player.model(ids).logits[0].float(), -1)
        shifted = found[:-1].gather(1, ids[0, 1:, None])[:, 0]
        logps.append(torch.cat([shifted, shifted.new_zeros(1)]))  # position t: of token t + 1
        old.append(shifted[len(row["prompts"]) - 1 :].detach())
    lengths = [len(row["responses"]) for row in fields]
    batch = list_of_dict_to_tensordict(
        [
            {
                **{name: row[name] for name in ("prompts", "responses", "input_ids", "response_mask")},
                "old_log_probs": old[i],
                "advantages": data.batch["advantages"][i, : lengths[i]],
            }
            for i, row in enumerate(fields)
        ]
    )
    tokens = int(tensors["response_mask"].sum())
    from verl.utils import tensordict_utils as tu

    for name, value in {"dp_size": 1, "batch_num_tokens": tokens, "global_batch_size": len(fields)}.items():
        tu.assign_non_tensor(batch, **{name: value})
    actor = FSDPActorConfig(strategy="fsdp", loss_agg_mode="token-mean", rollout_n=1, use_dynamic_bsz=True)
    output = {"log_probs": torch.nested.nested_tensor_from_jagged(torch.cat(logps), batch["input_ids"].offsets())}
    loss, _ = ppo_loss(actor, output, batch)
    parameters = list(player.model.parameters())
    found = torch.autograd.grad(loss, parameters)
    expected = torch.autograd.grad(mean_loss(player.model, rows), parameters)  # ours: test_token_trees.py
    assert sum(float(g.abs().sum()) for g in expected) > 1e-3
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-6, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["bpo-forest", "rloo-pooled", "grpo"])
def test_an_update_by_verls_own_worker_moves_the_weights_by_our_gradient(algo: str) -> None:
    """Its `TrainingWorker` with its FSDP2 engine on the CPU, four rows per micro-batch, padding included."""
    real()
    tests = Path(__file__).parents[2]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (tests.parent, tests / "support", tests / "bpo_ref")))
    }
    command = [sys.executable, str(Path(__file__).with_name("verl_update.py")), algo]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["largest"] > 1e-3
    assert told["difference"] < 1e-5
    assert {"actor/pg_loss", "grad_norm", "lr"} <= set(told["metrics"])


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_batch_goes_through_verls_own_queue_buffer_padding_and_advantages(player: Players) -> None:
    """On a Ray cluster of this process, from `generate_sequences` to what verl's actors would be given."""
    real()
    import ray
    import transfer_queue as tq
    from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    from verl.utils import tensordict_utils as tu

    # As many CPUs as the queue's actors ask for; and not on the cluster of other tests, which Ray finds in /tmp.
    ray.init("local", num_cpus=32, include_dashboard=False, log_to_driver=False)
    try:
        tq.init()
        client = Client(player.model)
        made = type(manager(player, client)).create(config=configuration(), llm_client=client)
        uids = ["a-0", "a-1", "a-2"]
        asked = {"uid": uids, "extra_info": [{"task": i} for i in range(3)], "raw_prompt": [[{"role": "user"}]] * 3}
        arrays = {name: np.empty(3, dtype=object) for name in asked}
        for name, values in asked.items():
            arrays[name][:] = values
        prompts = tu.get_tensordict(arrays)
        tu.assign_non_tensor_data(prompts, "global_steps", 7)
        pending = [{"is_prompt": True, "status": "pending", "global_steps": 7}] * 3
        tq.kv_batch_put(keys=uids, partition_id="train", tags=pending)
        made.generate_sequences(prompts)
        buffer = ReplayBuffer("sync", Dict(), None, "drop", Dict(), poll_interval=0.2)
        chosen, _ = buffer.sample(global_steps=7, partition_id="train", batch_size=3)
        rows = len(chosen.keys)
        assert rows > 6
        chosen = upsample_batch_to_divisible_size(chosen, rows + 5, player.tokenizer.eos_token_id)
        assert len(chosen.keys) == rows + 5
        config = configuration(n=1)
        config["algorithm"] = Dict(use_kl_in_reward=False, adv_estimator="sandboxgym", gamma=1.0, lam=1.0)
        PPOTrainer._compute_advantage(SimpleNamespace(config=config), chosen, {})
        names = ["advantages", "response_mask", "responses", "input_ids", "position_ids", "extra_fields"]
        found = tq.kv_batch_get(keys=chosen.keys, partition_id="train", select_fields=names)
        trained = 0
        for i in range(rows + 5):
            advantages, mask = found["advantages"][i], found["response_mask"][i]
            assert len(advantages) == len(mask) == len(found["responses"][i])
            assert found["position_ids"][i].tolist() == list(range(len(found["input_ids"][i])))
            if i >= rows:
                assert not mask.any()
                assert not advantages.any()
                continue
            extra = found["extra_fields"][i]
            extra = getattr(extra, "data", extra)
            assert advantages.tolist() == pytest.approx(extra[ADVANTAGES])
            assert not advantages[mask == 0].any()
            trained += int(advantages.abs().sum() > 0)
        assert trained > 3
    finally:
        ray.shutdown()
