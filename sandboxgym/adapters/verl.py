"""Trees in verl: an agent-loop manager and an advantage estimator for its trainer (verl 0.9, ``trainer.use_v1``).

    # shop.py, named by +actor_rollout_ref.rollout.agent.agent_loop_manager_class=shop.Manager
    class Manager(TreeManager):
        prompt = make_prompt("react", "sandboxgym/WebShop-v0")

        def environments(self):
            return PooledEnvs(lambda: gym.make("sandboxgym/WebShop-v0", max_episode_steps=15))

        def algorithm(self):
            return TreeAlgorithm(Args(algo="bpo", env_id="sandboxgym/WebShop-v0", max_turns=15))

together with ``algorithm.adv_estimator=sandboxgym``. What this module promises:

1. A prompt of verl's batch names a task, and becomes one tree; every path of it is a row of the batch, in any number:
   verl pads with rows that train nothing.
2. Rows hold the ids that verl's servers sampled. The prompt ends before the first sampled turn; observations, and turns
   before the fork, are in the response with a mask of 0.
3. A row's reward is that of its whole episode. Its advantages travel with it (`ADVANTAGES` among its extra fields), and
   the estimator hands them to verl as they are: `sandboxgym.adapters.tokens.trees` says what they are. With
   ``loss_agg_mode="token-mean"`` and one mini-batch per step verl's loss is then the algorithm's.
4. In validation there are independent rollouts, ``val_kwargs.n`` of each prompt.
5. A rollout that fails is logged, and its prompts are reported to verl as failed; so is a prompt that lost its tree.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from sandboxgym.adapters.prompts import Prompt
from sandboxgym.adapters.tokens.chat_format import ChatFormat
from sandboxgym.adapters.tokens.trees import Algorithm, Sample, TokenPolicy, TokenRow, token_rows
from sandboxgym.tree import EnvSource, Failure, RolloutTree, Schedule, rollout_async
from sandboxgym.tree.envs import described, logger
from sandboxgym.tree.nodes import PathKey

if TYPE_CHECKING:
    from torch import Tensor

ESTIMATOR = "sandboxgym"
"""Name of the advantage estimator: ``algorithm.adv_estimator``."""
ADVANTAGES = "tree_advantages"
"""Extra field of a row: an advantage for each token of the response."""
_AGAIN = 30.0  # seconds until verl, which waits for it, is told once more of a failure


class VerlEngine:
    """Engine of `TokenPolicy` that asks verl's servers (`sandboxgym.adapters.tokens.trees.Engine`).

    Args:
        client: verl's ``LLMServerClient``.
        params: sampling parameters of every request.
        seeded: whether the servers take a ``seed`` with a request, as vLLM does.
        name: part of the names of conversations, which differs between rollouts.
    """

    def __init__(self, client: Any, params: Mapping[str, Any], *, seeded: bool, name: str) -> None:
        self._client, self._params, self._seeded, self._name = client, dict(params), seeded, name

    async def __call__(
        self, ids: list[int], /, *, limit: int, stop_ids: Sequence[int], seed: int, path: tuple[int, PathKey]
    ) -> Sample:
        """Sample a turn; the versions of the weights that it was sampled with come along."""
        params = {**self._params, "max_tokens": limit, "stop_token_ids": list(stop_ids)}
        if self._seeded:
            params["seed"] = seed
        # One name per tree: the prefixes that its paths share are in the cache of one server.
        told = await self._client.generate(f"{self._name}-{path[0]}", prompt_ids=ids, sampling_params=params)
        extra = told.extra_fields
        versions = extra.get("min_global_steps"), extra.get("max_global_steps")
        return Sample(list(told.token_ids), list(told.log_probs) if self._params.get("logprobs") else None, versions)


class TreeManager:
    """Agent-loop manager that rolls out trees: derive from it, and say of what.

    verl makes it by `create`; it asks `environments` and `algorithm` once.
    """

    prompt: Prompt = Prompt()
    """Format of the prompts and of the answers; verl's own prompts are not shown to the model."""
    max_new_tokens: int = 512
    """Maximum number of tokens of an action; an episode has ``prompt_length + response_length`` of verl's rollout."""
    observation_tokens: int = 0
    """Maximum number of tokens of an observation; the middle of longer ones is left out. 0: no limit."""
    max_live: int = 256
    """Maximum number of environments that are live at once."""
    retries: int = 2
    """Number of environments that a path may lose before it is dropped."""

    def environments(self) -> EnvSource:
        """Source of the environments, to be implemented."""
        raise NotImplementedError(f"{type(self).__name__} has to implement environments()")

    def algorithm(self) -> Algorithm:
        """Algorithm that says where trees fork and what actions are credited with, to be implemented."""
        raise NotImplementedError(f"{type(self).__name__} has to implement algorithm()")

    def task(self, row: Mapping[str, Any]) -> Any:
        """The environment's task of a row of the data set: ``extra_info["task"]``."""
        found = row.get("extra_info")
        if not isinstance(found, Mapping) or "task" not in found:
            raise ValueError(f"expected rows with extra_info['task'], found extra_info={found!r}")
        return found["task"]

    def tokenizer(self) -> Any:
        """Tokenizer of verl's model, with a chat template."""
        from verl.utils.config import omega_conf_to_dataclass

        return omega_conf_to_dataclass(self.config.actor_rollout_ref.model).tokenizer

    def __init__(
        self, config: Any, llm_client: Any, teacher_client: Any = None, reward_loop_worker_handles: Any = None
    ) -> None:
        if teacher_client:
            raise ValueError("trees go without distillation, found a teacher")
        self.config, self._client = config, llm_client
        self._envs, self._algorithm = self.environments(), self.algorithm()
        self._chat = ChatFormat(self.tokenizer(), system=self.prompt.system, observation_tokens=self.observation_tokens)
        self._batches = 0
        self._one_at_a_time = asyncio.Lock()  # a source of environments is not made for several rollouts
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="sandboxgym-verl", daemon=True).start()

    @classmethod
    def create(cls, *args: Any, **options: Any) -> Self:
        """Make the manager in the process of verl's trainer, and register the estimator there."""
        from verl.trainer.ppo.core_algos import register_adv_est

        register_adv_est(ESTIMATOR)(estimate)
        made = cls(*args, **options)
        atexit.register(made.close)
        return made

    def close(self) -> None:
        """End the rollouts and close the environments, as the end of the trainer's process does. Idempotent."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        getattr(self._envs, "close", lambda: None)()

    def generate_sequences(self, prompts: Any) -> None:
        """Start to roll out the trees of a batch; rows are put into verl's TransferQueue when all are complete.

        The batch is a TensorDict of verl, with a ``uid`` per row, ``global_steps`` and in validation ``validate``.
        """
        rows = rows_of_batch(prompts)
        base, step = self.config.actor_rollout_ref.rollout.get("seed", 0) or 0, rows[0]["global_steps"]
        seed = (int(base), int(step), self._batches)  # a resumed run draws other numbers than its first batches
        self._batches += 1
        asyncio.run_coroutine_threadsafe(self._serve(rows, seed), self._loop)

    async def _serve(self, rows: list[dict[str, Any]], seed: tuple[int, ...]) -> None:
        import transfer_queue as tq

        uids, partition = [row["uid"] for row in rows], "val" if rows[0].get("validate") else "train"

        async def report(statuses: Sequence[str]) -> None:
            tags = [{"status": status} for status in statuses]
            await asyncio.to_thread(tq.kv_batch_put, keys=uids, partition_id=partition, tags=tags)

        try:
            async with self._one_at_a_time:
                await report(["running"] * len(rows))
                trees = await self._trees(rows, seed)
            await self._put(tq, self.rows(rows, trees), partition)
            grown = {tree.index for tree in trees}
            await report(["finished" if i in grown else "failure" for i in range(len(rows))])
        except Exception as error:  # nobody awaits this: the rows say that it failed
            logger.error("a rollout of %d trees failed: %s", len(rows), described(error), exc_info=error)
            while True:
                try:
                    return await report(["failure"] * len(rows))
                except Exception as unheard:
                    logger.error("verl was not told, again in %g s: %s", _AGAIN, described(unheard))
                    await asyncio.sleep(_AGAIN)

    async def _trees(self, rows: Sequence[Mapping[str, Any]], seed: tuple[int, ...]) -> list[RolloutTree]:
        """Roll out the trees of a batch, with credit unless it is for validation."""
        config, validate = self.config.actor_rollout_ref.rollout, bool(rows[0].get("validate"))
        tasks = [self.task(row) for row in rows]
        chosen = config.val_kwargs if validate else config
        params = {name: chosen[name] for name in ("temperature", "top_p", "top_k")}
        params |= {"repetition_penalty": 1.0, "logprobs": bool(config.calculate_log_probs)}
        named = f"{'val' if validate else 'train'}-{'-'.join(map(str, seed))}"
        engine = VerlEngine(self._client, params, seeded=config.name == "vllm", name=named)
        length = config.prompt_length + config.response_length
        policy = TokenPolicy(engine, self._chat, self.prompt, context=length, max_new_tokens=self.max_new_tokens)
        schedule = Schedule(config.val_kwargs.n) if validate else self._algorithm.schedule(seed, tasks)
        lost: list[Failure] = []
        limits: dict[str, Any] = {"max_live": self.max_live, "retries": self.retries, "failures": lost}
        trees = await rollout_async(self._envs, policy, schedule, tasks=tasks, seed=seed, **limits)
        if lost:
            dropped = sum(failure.dropped for failure in lost)
            logger.warning("environments lost: %d, paths dropped: %d; last: %s", len(lost), dropped, lost[-1].error)
        return trees if validate else self._algorithm.credit(trees)

    def rows(self, asked: Sequence[Mapping[str, Any]], trees: Sequence[RolloutTree]) -> list[dict[str, Any]]:
        """Rows of trees as verl reads them, each with its ``key`` and ``tag``; ``asked`` by `RolloutTree.index`."""
        validate = bool(asked[0].get("validate"))
        return [verl_row(row, asked[row.tree], validate) for row in token_rows(trees, credited=not validate)]

    async def _put(self, tq: Any, rows: Sequence[dict[str, Any]], partition: str) -> None:
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        if not rows:
            return
        keys, tags = [row.pop("key") for row in rows], [row.pop("tag") for row in rows]
        fields = list_of_dict_to_tensordict(list(rows))
        await asyncio.to_thread(tq.kv_batch_put, keys=keys, partition_id=partition, fields=fields, tags=tags)


def rows_of_batch(prompts: Any) -> list[dict[str, Any]]:
    """Rows of a TensorDict of verl as dictionaries; what is not given per row is in each of them."""
    return [{name: _item(value, i) for name, value in prompts.items()} for i in range(len(prompts))]


def _item(value: Any, i: int) -> Any:
    if type(value).__name__ == "NonTensorData":
        return value.data
    found = value[i]
    return found.data if type(found).__name__ == "NonTensorData" else found


def verl_row(row: TokenRow, asked: Mapping[str, Any], validate: bool = False) -> dict[str, Any]:
    """Fields of a row for verl's TransferQueue, with its ``key`` and ``tag``.

    In training the field ``uid`` is the row's key, by which `estimate` finds its advantages.
    """
    import torch

    key = f"{asked['uid']}_{row.number}_{row.turn}"
    versions = [edge.action.data.extra or (None, None) for edge in row.edges]
    step = asked["global_steps"] - 1  # the version that a synchronous trainer samples with
    oldest = min(step if low is None else low for low, _ in versions)
    newest = max(step if high is None else high for _, high in versions)
    ids, mask = row.prompt + row.response, torch.tensor(row.mask)
    reward = torch.zeros(len(row.response))
    reward[-1] = row.path.total_reward
    fields = {
        **{name: value for name, value in asked.items() if name != "validate"},
        "uid": asked["uid"] if validate else key,
        "session_id": row.number,
        "prompts": torch.tensor(row.prompt),
        "responses": torch.tensor(row.response),
        "input_ids": torch.tensor(ids),
        "position_ids": torch.arange(len(ids)),
        "response_mask": mask,
        "loss_mask": mask,
        "rm_scores": reward,
        "num_turns": 2 * len(row.path.from_root()),
        "multi_modal_inputs": {},
        "extra_fields": {
            ADVANTAGES: row.advantages,
            "reward_extra_info": {"success": float(row.path.edges[-1].success)},
            "min_global_steps": oldest,
            "max_global_steps": newest,
        },
    }
    if row.logps is not None:
        fields["rollout_log_probs"] = torch.tensor(row.logps)
    tag = {"status": "success", "global_steps": asked["global_steps"], "seq_len": len(ids)}
    tag |= {"prompt_len": len(row.prompt), "response_len": len(row.response)}
    tag |= {"min_global_steps": oldest, "max_global_steps": newest}
    return {"key": key, "tag": tag, **fields}


def estimate(
    token_level_rewards: Tensor, response_mask: Tensor, config: Any = None, index: Any = None, **_: Any
) -> tuple[Tensor, Tensor]:
    """The advantages that came with the rows, as verl's estimators return them: advantages and returns, [rows, tokens].

    Args:
        token_level_rewards: not used, the credit is made of them.
        response_mask: [rows, tokens]; rows of 0 are verl's padding, and get 0.
        config: verl's ``algorithm``.
        index: ``uid`` of each row.

    Raises:
        ValueError: ``use_kl_in_reward`` is set, whose rewards come too late; or a row is not one of `TreeManager`.
    """
    import torch
    import transfer_queue as tq

    if config is not None and config.get("use_kl_in_reward", False):
        raise ValueError("algorithm.use_kl_in_reward: expected False, for credit is assigned before; use use_kl_loss")
    advantages = torch.zeros(response_mask.shape, dtype=torch.float32)
    places = [i for i, mask in enumerate(response_mask) if mask.any()]
    keys = [str(index[i]) for i in places]
    found = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=["extra_fields"])["extra_fields"]
    for i, key, extra in zip(places, keys, found, strict=True):
        extra = getattr(extra, "data", extra)
        if ADVANTAGES not in extra:
            raise ValueError(f"expected rows of a TreeManager, found {key} without {ADVANTAGES}")
        values = torch.tensor(extra[ADVANTAGES])
        advantages[i, : len(values)] = values
    advantages *= response_mask
    return advantages, advantages
