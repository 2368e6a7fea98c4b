"""Adapter of any environment for TRL's `GRPOTrainer(environment_factory=…)` (TRL 1.16 or newer).

>>> import gymnasium as gym
>>> import sandboxgym
>>> factory = TRLEnvironments(lambda: gym.make("sandboxgym/ALFWorld-v0"), generations=4)
>>> environment = factory()  # GRPOTrainer does this, once for each rollout that it runs at a time
>>> text = environment.reset(task=7)
>>> environment.step("sing")
'Nothing happens.'
>>> environment.get_reward()
0.0
>>> factory.close()

What this module promises:

1. With ``generations=G``, the G rollouts of a prompt start from one snapshot: exactly the same state, even if ``start``
   draws random numbers, and a random stream of its own for each.
2. The fork point may be anywhere in an episode, and is reached once per group.
3. The reward is the sum of the environment's rewards from there on. A failed environment is an error, never a reward
   (TRL itself shows a tool's exception to the model and continues).

4. `TreeRollouts`, a ``rollout_func``, rolls out a tree per prompt, with any number of branch points, and with
   `tree_trainer` every token has the advantage of its action (`sandboxgym.adapters.tokens.trees` says which). With
   ``loss_type="dapo"``, TRL's default, the loss over all rows is then the algorithm's. Rows that TRL needs beyond those
   of the trees train nothing.

This module only needs this package; the trainer is installed by ``pip install "sandboxgym[trl]"``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import gymnasium as gym
import numpy as np

from sandboxgym.adapters.prompts import Choice, Prompt
from sandboxgym.adapters.tokens.chat_format import ChatFormat
from sandboxgym.adapters.tokens.trees import Algorithm, Engine, Sample, TokenPolicy, token_rows
from sandboxgym.tree import EnvSource, Schedule, rollout_async
from sandboxgym.tree.nodes import PathKey
from sandboxgym.wrappers import restore, snapshot

if TYPE_CHECKING:
    from torch import Tensor

OVER = "The episode is over."


def show(observation: Any, info: dict[str, Any]) -> str:
    """The observation, followed by the admissible actions if the environment gives them."""
    commands = info.get("admissible_commands")
    return f"{observation}\nYou can: {', '.join(commands)}" if commands else str(observation)


def reset_to_task(env: gym.Env[Any, Any], row: dict[str, Any]) -> str:
    """Start the episode of the row's ``task``, or any if it has no such column."""
    task = row.get("task")
    return show(*env.reset(options=None if task is None else {"task": task}))


class TRLEnvironment:
    """One rollout at a time, as TRL drives it: `reset`, the tool `step`, `get_reward`."""

    def __init__(
        self,
        env: gym.Env[Any, Any],
        begin: Callable[[gym.Env[Any, Any], dict[str, Any]], str],
        read: Callable[[str], Any] = str.strip,
        prompt: Prompt | None = None,
    ) -> None:
        self._env, self._begin = env, begin
        self._read = (lambda answer: prompt.read(answer, {})) if prompt else read
        self._prompt = prompt or Prompt()
        self._total, self._over = 0.0, True
        self._failure: Exception | None = None

    def reset(self, **row: Any) -> str:
        """Start a rollout of this row of the data set; the returned text is appended to its prompt."""
        self._total, self._over, self._failure = 0.0, False, None
        return self._begin(self._env, row)

    def step(self, action: str) -> str:
        """Act in the environment.

        Args:
            action: What to do, such as one of the commands that were offered.

        Returns:
            What happened.
        """
        if self._over:
            return OVER
        command = self._read(str(action))
        try:
            observation, reward, terminated, truncated, info = self._env.step(command)
        except Exception as error:  # TRL turns it into text for the model; the rollout shall end with it
            self._failure = error
            raise
        self._total += float(reward)
        self._over = bool(terminated or truncated)
        return f"{observation}\n{OVER}" if self._over else self._prompt.show(observation, info)

    def get_reward(self) -> float:
        """Sum of the rewards since `reset`.

        Raises:
            RuntimeError: the environment failed in this rollout.
        """
        if self._failure is not None:
            raise RuntimeError(f"the environment failed in this rollout: {self._failure!r}") from self._failure
        return self._total


class TRLEnvironments:
    """Factory of a trainer's environments, which keeps the fork point that a group of rollouts shares.

    Args:
        make: makes one Gymnasium environment.
        start: moves an environment to the start of a row's rollouts and returns the text for the model, such as the
            story so far; by default it resets to the row's ``task``. To continue from saved snapshots:
            ``lambda env, row: show(*sandboxgym.restore(env, Snapshot.load(row["snapshot"])))``. With several training
            processes each starts its part of a group, so ``start`` must then depend on nothing but the row.
        read: converts a text to the environment's action; its errors are attributed to the model, not the environment.
        prompt: replaces ``read`` for models that write their actions as text of this form. An answer that it cannot
            read is an error that TRL shows to the model. It also formats the observation after a step. Its system
            prompt belongs into the rows' ``prompt``. A ``history`` is refused, because TRL keeps the conversation, and
            so is `Choice`, because the text of ``start`` has no list of actions.
        generations: number of consecutive rollouts of one row that share a fork point: `GRPOConfig.num_generations`.
            1: every rollout starts by itself.
        seed: seed of the rollouts' random streams in the environments.
    """

    def __init__(
        self,
        make: Callable[[], gym.Env[Any, Any]],
        *,
        start: Callable[[gym.Env[Any, Any], dict[str, Any]], str] = reset_to_task,
        read: Callable[[str], Any] = str.strip,
        prompt: Prompt | None = None,
        generations: int = 1,
        seed: int = 0,
    ) -> None:
        if generations < 1:
            raise ValueError(f"expected at least one generation, found generations={generations}")
        if prompt and prompt.history:
            raise ValueError(f"expected a prompt that shows the whole conversation, found history={prompt.history}")
        if isinstance(prompt, Choice):
            raise ValueError("expected a prompt that reads answers by themselves, found one that numbers actions")
        self._prompt = prompt
        self._make, self._start, self._read, self._generations = make, start, read, generations
        self._seeds = np.random.SeedSequence(seed)
        self._made: list[gym.Env[Any, Any]] = []
        self._snap: Any = None
        self._left = 0
        self._row: dict[str, Any] = {}
        self._text = ""

    def __call__(self) -> TRLEnvironment:
        """Make another environment; TRL resets it for each rollout."""
        self._made.append(self._make())
        return TRLEnvironment(self._made[-1], self._begin, self._read, self._prompt)

    def close(self) -> None:
        """Close all environments made by this factory."""
        self._release()
        for env in self._made:
            env.close()
        self._made = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, env: gym.Env[Any, Any], row: dict[str, Any]) -> str:
        # Compare rows, because a process may get only part of a group, and evaluation uses other sizes.
        if not self._left or row != self._row:
            self._release()
            self._text = self._start(env, row)
            if self._generations == 1:
                return self._text
            self._snap, self._row, self._left = snapshot(env), row, self._generations
        (child,) = self._seeds.spawn(1)
        restore(env, self._snap, seed=int(child.generate_state(1, np.uint64)[0]))
        self._left -= 1
        return self._text

    def _release(self) -> None:
        if self._snap is not None:
            self._snap.release()
        self._snap, self._left = None, 0


class TrainerEngine:
    """Engine that samples with the trainer's own model, all requests that wait in one batch.

    Each request has its own random stream, so a path does not depend on its batch, up to rounding.

    Args:
        trainer: a ``GRPOTrainer``; its ``temperature`` applies.
    """

    def __init__(self, trainer: Any) -> None:
        self._model = trainer.accelerator.unwrap_model(trainer.model)
        self._temperature, self._pad = float(trainer.args.temperature), trainer.processing_class.pad_token_id
        self._waiting: list[tuple[list[int], int, int, asyncio.Future[list[int]]]] = []
        self._task: asyncio.Task[None] | None = None
        self._alone = asyncio.Lock()  # a model is not made for several threads

    async def __call__(
        self, ids: list[int], /, *, limit: int, stop_ids: Sequence[int], seed: int, path: tuple[int, PathKey]
    ) -> Sample:
        """Sample a turn; TRL computes log-probabilities itself."""
        future: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._waiting.append((ids, limit, seed, future))
        if self._task is None:
            self._task = asyncio.create_task(self._serve(list(stop_ids)))
        return Sample(await future)

    async def _serve(self, stop_ids: list[int]) -> None:
        await asyncio.sleep(0.002)  # others come in meanwhile: environments are faster than the model
        async with self._alone:
            batch, self._waiting, self._task = self._waiting, [], None
            try:
                answers = await asyncio.to_thread(self._generate, batch, stop_ids)
            except Exception as error:  # each caller that waits gets it
                for *_, future in batch:
                    if not future.done():
                        future.set_exception(error)
                return
        for (*_, future), answer in zip(batch, answers, strict=True):
            if not future.done():
                future.set_result(answer)

    def _generate(self, batch: Sequence[tuple[list[int], int, int, Any]], stop_ids: list[int]) -> list[list[int]]:
        import torch

        model, width = self._model, max(len(ids) for ids, *_ in batch)
        streams = [torch.Generator().manual_seed(seed) for _, _, seed, _ in batch]

        def noisy(_: Tensor, scores: Tensor) -> Tensor:
            # The largest of logits with Gumbel noise is a sample of the softmax; `generate` has one stream for all.
            noise = [-torch.empty(scores.shape[-1]).exponential_(generator=stream).log() for stream in streams]
            return scores.float() / self._temperature + torch.stack(noise).to(scores.device)

        padded = [[self._pad] * (width - len(ids)) + ids for ids, *_ in batch]
        attended = [[0] * (width - len(ids)) + [1] * len(ids) for ids, *_ in batch]
        training = model.training
        model.eval()
        try:
            with torch.no_grad():
                found = model.generate(
                    input_ids=torch.tensor(padded, device=model.device),
                    attention_mask=torch.tensor(attended, device=model.device),
                    max_new_tokens=max(limit for _, limit, *_ in batch),
                    do_sample=False,
                    logits_processor=[noisy],
                    eos_token_id=stop_ids,
                    pad_token_id=self._pad,
                )
        finally:
            model.train(training)
        return [_until(row[:limit], stop_ids) for row, (_, limit, *_) in zip(found[:, width:].tolist(), batch)]


def _until(ids: list[int], stop_ids: Sequence[int]) -> list[int]:
    """Tokens up to and including the first that ends the turn."""
    end = next((place for place, token in enumerate(ids, 1) if token in stop_ids), len(ids))
    return ids[:end]


def task_of(prompt: Any) -> int:
    """The task that a prompt names: the number that its last message is."""
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    try:
        return int(text)
    except (TypeError, ValueError):
        raise ValueError(f"expected a prompt whose last message is the number of a task, found {text!r}") from None


class TreeRollouts:
    """``rollout_func`` of a GRPOTrainer that rolls out a tree per prompt; for trainers of `tree_trainer`.

    The model sees the environment's prompts; those of the data set name tasks. Reward functions get the return of each
    path as ``tree_return``; `tree_return` is one.

    Args:
        envs: source of the environments; the caller closes it.
        algorithm: says where trees fork and what actions are credited with.
        tokenizer: the trainer's, with a chat template.
        context: maximum number of tokens of an episode.
        prompt: format of the prompts and of the answers.
        task: function from a prompt of the data set to the environment's task.
        engine: makes the engine of a trainer; by default its own model samples.
        max_new_tokens: maximum number of tokens of an action.
        observation_tokens: maximum number of tokens of an observation; 0: no limit.
        max_live: maximum number of environments that are live at once.
        retries: number of environments that a path may lose before it is dropped.
        seed: seed of all rollouts.
    """

    def __init__(
        self,
        envs: EnvSource,
        algorithm: Algorithm,
        tokenizer: Any,
        *,
        context: int,
        prompt: Prompt | None = None,
        task: Callable[[Any], Any] = task_of,
        engine: Callable[[Any], Engine] = TrainerEngine,
        max_new_tokens: int = 256,
        observation_tokens: int = 0,
        max_live: int = 256,
        retries: int = 2,
        seed: int = 0,
    ) -> None:
        self._envs, self._algorithm, self._task, self._engine = envs, algorithm, task, engine
        self._prompt, self._context, self._most = prompt or Prompt(), context, max_new_tokens
        self._chat = ChatFormat(tokenizer, system=self._prompt.system, observation_tokens=observation_tokens)
        self._limits: dict[str, Any] = {"max_live": max_live, "retries": retries}
        self._seed, self._batches = seed, 0
        self._advantages: list[list[float]] = []

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """Roll out the trees of a batch, in which every prompt is repeated: one row for each of ``prompts``.

        Raises:
            ValueError: there are several training processes, trees of more rows than the batch has, or prompts that are
                not repeated.
            RuntimeError: all trees were lost.
        """
        processes = trainer.accelerator.num_processes
        if processes > 1:
            raise ValueError(f"expected one training process, for credit needs all trees; found {processes}")
        training = trainer.model.training
        repeats = trainer.num_generations if training else trainer.num_generations_eval
        if len(prompts) % repeats or any(prompts[i] != prompts[i - i % repeats] for i in range(len(prompts))):
            raise ValueError(f"expected every prompt {repeats} times in a row, found {len(prompts)} otherwise")
        tasks = [self._task(prompt) for prompt in prompts[::repeats]]
        seed = (self._seed, trainer.state.global_step, self._batches, int(training))
        self._batches += 1
        schedule = self._algorithm.schedule(seed, tasks) if training else Schedule(repeats)
        policy = TokenPolicy(
            self._engine(trainer), self._chat, self._prompt, context=self._context, max_new_tokens=self._most
        )
        trees = asyncio.run(rollout_async(self._envs, policy, schedule, tasks=tasks, seed=seed, **self._limits))
        rows = token_rows(self._algorithm.credit(trees) if training else trees, credited=training)
        if not rows:
            raise RuntimeError(f"all {len(tasks)} trees were lost")
        if len(rows) > len(prompts):
            raise ValueError(
                f"expected at most {len(prompts)} rows from {len(tasks)} trees, found {len(rows)}: "
                f"num_generations has to be at least {-(-len(rows) // len(tasks))}"
            )
        filled = [rows[i % len(rows)] for i in range(len(prompts))]
        idle = [i >= len(rows) for i in range(len(prompts))]
        self._advantages = [[] if pad else row.advantages for row, pad in zip(filled, idle)]
        return {
            "prompt_ids": [row.prompt for row in filled],
            "completion_ids": [row.response for row in filled],
            "logprobs": [row.logps for row in rows] if all(row.logps for row in rows) and not any(idle) else None,
            "env_mask": [[0] * len(row.mask) if pad else row.mask for row, pad in zip(filled, idle)],
            "tree_return": [row.path.total_reward for row in filled],
        }

    def advantages(self, completion_ids: Tensor) -> Tensor:
        """Advantages of the last batch's tokens, [rows, tokens], as TRL pads ``completion_ids``."""
        import torch

        found = torch.zeros(completion_ids.shape, dtype=torch.float32)
        for i, values in enumerate(self._advantages):
            found[i, : len(values)] = torch.tensor(values)
        return found.to(completion_ids.device)


def tree_return(tree_return: list[float], **_: Any) -> list[float]:
    """Reward function for TRL: the return of each path."""
    return tree_return


def tree_trainer(base: Any) -> Any:
    """Class of trainers whose tokens have the advantages of their `TreeRollouts`: derived from ``GRPOTrainer``."""

    class TreeTrainer(base):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            if self.model.training:
                output["advantages"] = self.rollout_func.advantages(output["completion_ids"])
            return output

    return TreeTrainer
