"""Trees in SkyRL: a generator and an advantage estimator for its trainer (skyrl 0.3).

    class Experiment(BasePPOExp):
        def get_generator(self, cfg, tokenizer, inference_engine_client):
            envs = PooledEnvs(lambda: gym.make("sandboxgym/ALFWorld-v0", max_episode_steps=30))
            algorithm = TreeAlgorithm(Args(algo="bpo", max_turns=30))
            return TreeGenerator(inference_engine_client, tokenizer, envs, algorithm, context=4096)

together with ``trainer.algorithm.advantage_estimator=sandboxgym``, ``generator.step_wise_trajectories=true`` and a call
of `register` before SkyRL checks its configuration. What this module promises:

1. A prompt of SkyRL's batch names a task, and becomes one tree, whatever ``n_samples_per_prompt`` is; every path of it
   is a row, in any number. To SkyRL each row is a trajectory of one step (``is_last_step``), because that is the way
   in which it takes unequal numbers of rows and an estimator's advantages token by token.
2. Rows hold the ids that SkyRL's engines sampled. The prompt ends before the first sampled turn; observations, and
   turns before the fork, are in the response with a loss mask of 0.
3. A row's reward is that of its whole episode, at its last token. Its advantages stay in this process, where SkyRL's
   trainer asks the estimator for them: `sandboxgym.adapters.tokens.trees` says what they are. With
   ``loss_reduction="token_mean"`` and one mini-batch per step SkyRL's loss is then the algorithm's.
4. In evaluations there are independent rollouts, as many as SkyRL asks for.
5. A prompt that lost its tree has no row; if all did, `generate` raises.

This module needs only this package; SkyRL is installed as its own documentation says.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sandboxgym.adapters.prompts import Prompt
from sandboxgym.adapters.tokens.chat_format import ChatFormat
from sandboxgym.adapters.tokens.trees import Algorithm, Sample, TokenPolicy, TokenRow, token_rows
from sandboxgym.tree import EnvSource, Failure, RolloutTree, Schedule, rollout_async
from sandboxgym.tree.nodes import PathKey

if TYPE_CHECKING:
    from torch import Tensor

ESTIMATOR = "sandboxgym"
"""Name of the advantage estimator: ``trainer.algorithm.advantage_estimator``."""
_credited: deque[dict[str, list[tuple[list[float], float]]]] = deque(maxlen=64)
"""Advantages and reward of the rows of each prompt, in order, until `estimate` has handed them over: batch by batch,
the last ones, for SkyRL need not ask for those that it filters out."""


def register() -> None:
    """Register the estimator with SkyRL. Idempotent."""
    from skyrl.backends.skyrl_train.utils.ppo_utils import AdvantageEstimatorRegistry

    if ESTIMATOR not in AdvantageEstimatorRegistry.list_available():
        AdvantageEstimatorRegistry.register(ESTIMATOR, estimate)


class SkyRLEngine:
    """Engine of `TokenPolicy` that asks SkyRL's inference engines (`sandboxgym.adapters.tokens.trees.Engine`).

    Args:
        client: SkyRL's ``InferenceEngineInterface``.
        params: sampling parameters of every request, of vLLM.
        name: part of the names of conversations, which differs between rollouts.
    """

    def __init__(self, client: Any, params: Mapping[str, Any], *, name: str) -> None:
        self._client, self._params, self._name = client, dict(params), name

    async def __call__(
        self, ids: list[int], /, *, limit: int, stop_ids: Sequence[int], seed: int, path: tuple[int, PathKey]
    ) -> Sample:
        """Sample a turn."""
        most = min(limit, self._params.get("max_tokens") or limit)
        own = {"max_tokens": most, "stop_token_ids": list(stop_ids), "seed": seed}
        # One name per tree: the prefixes that its paths share are in the cache of one engine.
        request = {
            "prompt_token_ids": [ids],
            "session_ids": [f"{self._name}-{path[0]}"],
            "sampling_params": {**self._params, **own},
        }
        told = await self._client.generate(request)
        logps = told.get("response_logprobs")
        return Sample(list(told["response_ids"][0]), list(logps[0]) if logps else None)


def task_of(extras: Mapping[str, Any]) -> Any:
    """The environment's task of a prompt: its column ``task``."""
    if "task" not in extras:
        raise ValueError(f"expected prompts with a column 'task', found the columns {sorted(extras)}")
    return extras["task"]


class TreeGenerator:
    """Generator of SkyRL (``GeneratorInterface``) that rolls out trees.

    Args:
        client: SkyRL's inference engines.
        tokenizer: of SkyRL's model, with a chat template.
        envs: source of the environments; the caller closes it.
        algorithm: says where trees fork and what actions are credited with.
        context: maximum number of tokens of an episode.
        prompt: format of the prompts and of the answers; SkyRL's own prompts are not shown to the model.
        task: function from the other columns of a prompt to the environment's task.
        max_new_tokens: maximum number of tokens of an action; SkyRL's ``max_generate_length`` is one, too.
        observation_tokens: maximum number of tokens of an observation, the middle of longer ones is left out; 0: any.
        max_live: maximum number of environments that are live at once.
        retries: number of environments that a path may lose before it is dropped.
        seed: seed of all rollouts.
    """

    def __init__(
        self,
        client: Any,
        tokenizer: Any,
        envs: EnvSource,
        algorithm: Algorithm,
        *,
        context: int,
        prompt: Prompt | None = None,
        task: Callable[[Mapping[str, Any]], Any] = task_of,
        max_new_tokens: int = 512,
        observation_tokens: int = 0,
        max_live: int = 256,
        retries: int = 2,
        seed: int = 0,
    ) -> None:
        self._client, self._envs, self._algorithm, self._task = client, envs, algorithm, task
        self._prompt, self._context, self._most = prompt or Prompt(), context, max_new_tokens
        self._chat = ChatFormat(tokenizer, system=self._prompt.system, observation_tokens=observation_tokens)
        self._max_live, self._retries, self._seed, self._batches = max_live, retries, seed, 0
        self._one_at_a_time = asyncio.Lock()  # a source of environments is not made for several rollouts

    async def generate(self, input_batch: Mapping[str, Any]) -> dict[str, Any]:
        """Roll out the trees of a batch: a ``GeneratorInput`` of SkyRL to a ``GeneratorOutput``.

        Raises:
            ValueError: the batch has no ids of trajectories, or no tasks.
            RuntimeError: all trees were lost.
        """
        ids, extras = input_batch.get("trajectory_ids"), input_batch.get("env_extras")
        if ids is None or extras is None:
            raise ValueError("expected a batch with trajectory_ids and env_extras, as SkyRL's trainer makes it")
        about = input_batch.get("batch_metadata")
        training = about is None or about.training_phase == "train"
        repeats = Counter(one.instance_id for one in ids)
        first = {one.instance_id: i for i, one in reversed(list(enumerate(ids)))}
        uids = list(repeats)  # in the order of the batch
        tasks = [self._task(extras[first[uid]]) for uid in uids]
        async with self._one_at_a_time:
            seed = (self._seed, about.global_step if about else 0, self._batches, int(training))
            self._batches += 1
            counts = {i: repeats[uid] for i, uid in enumerate(uids)}
            schedule = self._algorithm.schedule(seed, tasks) if training else Schedule(counts)
            trees, lost = await self._trees(schedule, tasks, seed, input_batch.get("sampling_params") or {})
            trees = self._algorithm.credit(trees) if training else trees
        rows = token_rows(trees, credited=training)
        if not rows:
            raise RuntimeError(
                f"all {len(uids)} trees were lost{f', the last one to: {lost[-1].error}' if lost else ''}"
            )
        if training:
            _credited.append(
                {
                    uid: [(row.advantages, row.path.total_reward) for row in rows if row.tree == i]
                    for i, uid in enumerate(uids)
                }
            )
        named = [replace(ids[first[uids[row.tree]]], repetition_id=row.number) for row in rows]
        return skyrl_output(rows, named, training=training) | {"rollout_metrics": measured(trees, lost)}

    async def _trees(
        self, schedule: Schedule, tasks: Sequence[Any], seed: Sequence[int], params: Mapping[str, Any]
    ) -> tuple[list[RolloutTree], list[Failure]]:
        engine = SkyRLEngine(self._client, params, name="-".join(map(str, seed)))
        policy = TokenPolicy(engine, self._chat, self._prompt, context=self._context, max_new_tokens=self._most)
        lost: list[Failure] = []
        limits: dict[str, Any] = {"max_live": self._max_live, "retries": self._retries, "failures": lost}
        return await rollout_async(self._envs, policy, schedule, tasks=tasks, seed=seed, **limits), lost


def skyrl_output(rows: Sequence[TokenRow], ids: Sequence[Any], *, training: bool) -> dict[str, Any]:
    """Rows as a ``GeneratorOutput`` of SkyRL.

    Args:
        rows: of `token_rows`, tree by tree.
        ids: ``TrajectoryID`` of each row.
        training: every row is a trajectory of its own; otherwise the rows of a path are one, of which the last counts.
    """
    known = all(row.logps is not None for row in rows)
    return {
        "prompt_token_ids": [row.prompt for row in rows],
        "response_ids": [row.response for row in rows],
        "rewards": [[0.0] * (len(row.response) - 1) + [row.path.total_reward] for row in rows],
        "loss_masks": [row.mask for row in rows],
        "stop_reasons": ["length" if row.edges[-1].action.memory.truncated else "stop" for row in rows],
        "rollout_logprobs": [row.logps for row in rows] if known else None,
        "trajectory_ids": list(ids),
        "is_last_step": [training or row.last for row in rows],
    }


def measured(trees: Sequence[RolloutTree], lost: Sequence[Failure]) -> dict[str, float]:
    """Numbers of a rollout for SkyRL's log."""
    paths = [path for tree in trees for path in tree.paths]
    return {
        "generate/tree_paths": float(len(paths)),
        "generate/tree_forks": float(sum(len(tree.branch_nodes) for tree in trees)),
        "generate/tree_env_steps": float(sum(tree.env_steps for tree in trees)),
        "generate/tree_tokens": float(sum(tree.tokens for tree in trees)),
        "generate/tree_success": sum(path.edges[-1].success for path in paths if path.edges) / max(1, len(paths)),
        "generate/tree_env_failures": float(len(lost)),
    }


def estimate(
    token_level_rewards: Tensor, response_mask: Tensor, index: Sequence[Any], config: Any = None, **_: Any
) -> tuple[Tensor, Tensor]:
    """The advantages of `TreeGenerator`'s rows, as SkyRL's estimators return them: advantages and returns.

    Args:
        token_level_rewards: [rows, tokens]; the credit is made of them already, so they only tell rows apart.
        response_mask: [rows, tokens], 1 for the tokens of a response, which SkyRL aligns on the right; in step-wise
            training SkyRL passes ones everywhere, and applies the mask itself to what comes back.
        index: uid of each row's prompt; rows of one prompt are in the order in which they were generated. SkyRL hands
            over no name of a row: two that were swapped are noticed where rewards differ, or lengths, if masks tell.
        config: SkyRL's ``trainer.algorithm``.

    Raises:
        ValueError: ``use_kl_in_reward`` is set, whose rewards come too late; or rows are not a `TreeGenerator`'s, or
            not in its order, or with other rewards.
    """
    import torch

    if getattr(config, "use_kl_in_reward", False):
        raise ValueError("use_kl_in_reward: expected False, for credit is assigned before; use use_kl_loss")
    advantages = torch.zeros(response_mask.shape, dtype=torch.float32)
    met: Counter[str] = Counter()
    whole = bool(response_mask.all())  # says nothing about lengths
    for i, uid in enumerate(map(str, index)):
        known = _rows_of(uid)
        if known is None and uid.removeprefix("pad").isdigit() and uid.startswith("pad"):
            continue  # SkyRL's padding, which trains nothing
        if known is None or met[uid] >= len(known):
            raise ValueError(f"expected the rows of a TreeGenerator's last batch, found row {i} of prompt {uid!r}")
        values, reward = known[met[uid]]
        length, total = int(response_mask[i].sum()), float(token_level_rewards[i].sum())
        same_length = length >= len(values) if whole else length == len(values)
        if not same_length or not math.isclose(total, reward, rel_tol=1e-4, abs_tol=1e-6):
            raise ValueError(
                f"expected the rows of prompt {uid!r} in the order in which they were generated: as row {met[uid]} one "
                f"of {len(values)} tokens with reward {reward:g}, found one of {length} with {total:g} (row {i})"
            )
        met[uid] += 1
        advantages[i, advantages.shape[1] - len(values) :] = torch.tensor(values)
    for uid, count in met.items():
        if count < (expected := len(_rows_of(uid) or ())):
            raise ValueError(f"expected all {expected} rows of prompt {uid!r}, found {count}")
    for batch in _credited:
        for uid in met:
            batch.pop(uid, None)
    return advantages, advantages


def _rows_of(uid: str) -> list[tuple[list[float], float]] | None:
    """Advantages and rewards of a prompt's rows, as they were generated last; None: none are kept."""
    return next((batch[uid] for batch in reversed(_credited) if uid in batch), None)
