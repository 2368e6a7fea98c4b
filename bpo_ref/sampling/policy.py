"""A chat model as the policy of a rollout tree, and expert episodes for its SFT."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import gymnasium as gym

from bpo_ref.config import ConfigError
from bpo_ref.learning.packing import common_prefix
from bpo_ref.sampling.backends import Conversations, SamplingBackend
from bpo_ref.sampling.chat_format import ChatFormat
from bpo_ref.sampling.env_source import ask
from bpo_ref.sampling.generate import Generation
from sandboxgym.adapters.prompts import Exchange, Prompt
from sandboxgym.adapters.tokens.chat_format import Turn as Turn  # for importers of this module
from sandboxgym.task_env import Expert, has_expert, task_count
from sandboxgym.tree import Action, Context, Envs, Failure, Path, PathKey
from sandboxgym.tree.envs import described, logger
from sandboxgym.workers.env_host import FleetError

if TYPE_CHECKING:
    from bpo_ref.sampling.served import ServedBackend


@dataclass(frozen=True)
class Asked:
    """Turn that a policy was asked for, its prompt appended to the path's conversation."""

    context: Context
    message: str
    prompt: list[int]
    """Ids that the message adds to the conversation."""
    row: int
    position: int
    """Tokens of the conversation."""


class ChatPlayer:
    """Conversations of paths, with their prompts and actions: the base of `ChatPolicy` and `AsyncChatPolicy`.

    A conversation is read once: a fork continues from the keys and values of its parent, independent rollouts from
    those of the prompt. Where the prompt shows a window, each turn is a conversation of its own, and continues from the
    prefix that it shares with the one before. Rows live until nothing can continue from them; make a new policy after
    the weights have changed.

    Args:
        session: of a backend (`backends`).
        chat: converts text to ids and back.
        prompt: format of the prompts and of the answers.
        entropy_skip: tokens that every answer begins with: `Action.entropy` is that of the token after them.
    """

    def __init__(
        self, session: Conversations, chat: ChatFormat, *, prompt: Prompt | None = None, entropy_skip: int = 0
    ) -> None:
        self._session, self._chat = session, chat
        self._prompt = prompt or Prompt()
        self._skip = entropy_skip
        self._rows: dict[Any, int] = {}

    def record(self, action: Action) -> Any:
        """A decision as plain data (`sandboxgym.tree.journal`)."""
        return list(vars(action.data).values())

    def recall(self, contexts: Sequence[Context], records: Sequence[Any]) -> list[Action | None]:
        """The actions of records: the conversations continue with them, and are read when something is sampled."""
        actions: list[Action | None] = []
        for asked, record in zip(self._asked(contexts), records, strict=True):
            generation = Generation(*record) if self._able(asked) else None
            if generation is not None:
                self._session.extend(asked.row, generation.ids)
            actions.append(None if generation is None else self._action(asked, generation))
        return actions

    def _asked(self, contexts: Sequence[Context]) -> list[Asked]:
        """Append the prompts of the contexts to their conversations."""
        told = [self._prompt.message(_past(context), context.observation, context.info) for context in contexts]
        prompts = [self._encode(context, message) for context, message in zip(contexts, told)]
        self._append(contexts, prompts)
        rows = [self._rows[context.path] for context in contexts]
        lengths = [len(self._session.context(row)) for row in rows]
        return [Asked(*each) for each in zip(contexts, told, prompts, rows, lengths, strict=True)]

    def _able(self, asked: Asked) -> bool:
        """True if the conversation has room for an answer."""
        return self._session.room(asked.row) >= 1

    def _action(self, asked: Asked, generation: Generation) -> Action:
        """The action that a sampled turn means."""
        context, answer = asked.context, self._chat.action(generation.ids)
        text, complaint = self._prompt.hear(answer, context.info)
        exchange = Exchange(str(context.observation), asked.message, answer, text, complaint)
        before = None if self._prompt.history else context.memory
        past = (*_past(context), exchange)
        return Action(
            text=text,
            entropy=self._entropy(generation),
            logp=sum(generation.logps) if generation.logps else math.nan,
            position=asked.position,
            tokens=len(generation.ids),
            memory=Turn(before, asked.prompt, generation.ids, generation.truncated, past),
            data=generation,
            valid=not complaint,
        )

    def release(self, path: tuple[int, PathKey]) -> None:
        """Forget a path that will not be continued."""
        if path in self._rows:
            self._session.drop([self._rows.pop(path)])

    @property
    def prefilled(self) -> int | None:
        """Number of context tokens that the model has read; None: the backend does not tell."""
        return self._session.prefilled

    @property
    def reused(self) -> int | None:
        """Number of context tokens whose keys and values were taken from another path."""
        return self._session.reused

    def _entropy(self, generation: Generation) -> float:
        """Entropy of the deciding token; NaN if not known."""
        known = generation.entropies
        return known[min(self._skip, len(known) - 1)] if known else math.nan

    def _encode(self, context: Context, message: str) -> list[int]:
        """Ids that the message adds to the conversation."""
        before: Turn | None = context.memory
        if before is None or self._prompt.history:
            return self._chat.start(message)
        return self._chat.turn(message, truncated=before.truncated)

    def _append(self, contexts: Sequence[Context], prompts: Sequence[list[int]]) -> None:
        """Append each prompt to its path's row; a fork's row begins as a fork of its parent's."""
        opening = []
        for context, prompt in zip(contexts, prompts):
            root = context.path[0], ()
            if context.path in self._rows:
                self._go_on(context.path, prompt)
            elif context.memory is None and root not in self._rows:
                self._rows[root] = self._session.add(prompt)
                opening.append(self._rows[root])
        self._session.prefill(opening)
        for context, prompt in zip(contexts, prompts):
            if context.path not in self._rows:
                before: Turn | None = None if self._prompt.history else context.memory
                ids = (before.ids() if before else []) + prompt
                parent = self._rows.get((context.path[0], context.path[1][:-2]))
                self._rows[context.path] = self._session.add(ids) if parent is None else self._fork(parent, ids)

    def _go_on(self, path: tuple[int, PathKey], prompt: list[int]) -> None:
        """Begin the path's next turn: more of its conversation, or another one where the prompt shows a window."""
        row = self._rows[path]
        if self._prompt.history:
            self._rows[path] = self._fork(row, prompt)
            self._session.drop([row])
        else:
            self._session.extend(row, prompt)

    def _fork(self, row: int, ids: list[int]) -> int:
        """Fork a row at the common prefix, then append the rest."""
        shared = common_prefix(self._session.context(row), ids)
        if not shared:
            return self._session.add(ids)
        fork = self._session.fork(row, length=shared)
        self._session.extend(fork, ids[shared:])
        return fork


class ChatPolicy(ChatPlayer):
    """Policy that samples the next turn of every live path in one batch (`sandboxgym.tree.Policy`); see `ChatPlayer`.

    Args:
        generator: samples (`backends`).
        chat: as for `ChatPlayer`.
        **options: of `ChatPlayer`.
    """

    def __init__(self, generator: SamplingBackend, chat: ChatFormat, **options: Any) -> None:
        super().__init__(generator.open(), chat, **options)

    def __call__(self, contexts: Sequence[Context]) -> list[Action | None]:
        """Sample one action per context, None where the conversation has no room left for one."""
        asked = self._asked(contexts)
        able = [at for at, each in enumerate(asked) if self._able(each)]
        rows, rngs = [asked[at].row for at in able], [contexts[at].rng for at in able]
        generations = self._session.generate(rows, rngs) if able else []
        actions: list[Action | None] = [None] * len(asked)
        for at, generation in zip(able, generations, strict=True):
            actions[at] = self._action(asked[at], generation)
        return actions


class AsyncChatPolicy(ChatPlayer):
    """Policy that asks servers for each path by itself (`sandboxgym.tree.AsyncPolicy`); see `ChatPlayer`.

    Args:
        backend: the servers.
        chat: as for `ChatPlayer`.
        **options: of `ChatPlayer`.
    """

    def __init__(self, backend: ServedBackend, chat: ChatFormat, **options: Any) -> None:
        self._served = backend.open()
        super().__init__(self._served, chat, **options)

    async def __call__(self, context: Context) -> Action | None:
        """Sample one action, None where the conversation has no room left for one."""
        (asked,) = self._asked([context])
        if not self._able(asked):
            return None
        return self._action(asked, await self._served.turn(asked.row, context.rng))


def _past(context: Context) -> tuple[Exchange, ...]:
    return context.memory.past if context.memory is not None else ()


def collect_demonstrations(
    envs: Envs,
    episodes: int,
    *,
    noise: float,
    seed: int,
    least: float | None = None,
    expert_kwargs: Mapping[str, Any] | None = None,
    prompt: Prompt | None = None,
    retries: int = 0,
    failures: list[Failure] | None = None,
    progress: Callable[[int], Any] = lambda _: None,
) -> list[dict[str, list[Any]]]:
    """Play expert episodes through the API and keep those with a total reward of ``least``, or successful ones (None).

    ``env.unwrapped.expert(rng=…, noise=…)`` gives the player, see `sandboxgym.task_env.Expert`.

    Args:
        envs: source of the environment.
        episodes: number of episodes to play.
        noise: probability of a deliberate mistake.
        seed: seed of the tasks' order and the mistakes.
        least: see above.
        expert_kwargs: further arguments of ``expert``.
        prompt: format of prompts and answers.
        retries: environments that an episode may lose before it is left out. 0: the first error is raised.
        failures: is given what environments raised, one entry each; its ``task`` is the number of the episode.
        progress: called after each episode.

    Returns:
        Conversations, as ``{"observations": […], "actions": […], "learn": […]}`` of equal length (messages, answers,
        False for noise): one per episode, or one per turn where the prompt shows a window of past turns.

    Raises:
        ConfigError: the environment has no expert, or the expert does not take ``expert_kwargs``.
        FleetError: no other environment can be had.
    """
    prompt = prompt or Prompt()

    def expert_of(env: gym.Env[Any, Any], key: int | str) -> Expert:
        base: Any = env.unwrapped
        player: Expert = base.expert(rng=random.Random(key), noise=noise, **(expert_kwargs or {}))
        return player

    def checked(env: gym.Env[Any, Any]) -> int | None:
        if not has_expert(env):
            raise ConfigError(
                f"sft_steps: {env.unwrapped} has no expert to learn from: give sft_data, or a pretrained model"
            )
        try:
            expert_of(env, seed)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"expert_kwargs: {error}") from error
        return task_count(env)

    count = ask(envs, checked)
    env: gym.Env[Any, Any] | None = None
    order = list(range(1 if count is None else count))
    random.Random(seed).shuffle(order)
    collected: list[dict[str, list[Any]]] = []
    for episode in range(episodes):
        options = None if count is None else {"task": order[episode % len(order)]}
        for left in reversed(range(retries + 1)):
            try:
                if env is None:
                    env = envs.take()
                expert = expert_of(env, f"{seed}/{episode}")
                collected += _demonstration(env, expert, prompt, least, seed=seed + episode, options=options)
                break
            except FleetError:  # there will be no other environment soon
                raise
            except Exception as error:  # environments and experts raise any type of error
                if not retries:
                    if env is not None:
                        envs.give(env)
                    raise
                how = "trying again with another" if left else "leaving it out"
                logger.warning("an environment failed (expert episode %d), %s: %s", episode, how, described(error))
                if failures is not None:
                    failures.append(Failure(episode, (), 0, described(error), dropped=int(not left)))
                if env is not None:
                    envs.discard(env)
                    env = None
        progress(1)
    if env is not None:
        envs.give(env)
    return collected


def _demonstration(
    env: gym.Env[Any, Any],
    expert: Expert,
    prompt: Prompt,
    least: float | None,
    *,
    seed: int,
    options: dict[str, Any] | None,
) -> list[dict[str, list[Any]]]:
    """Conversations of one episode; none if its reward is too low."""
    observation, info = env.reset(seed=seed, options=options)
    expert.reset(observation)
    past: list[Exchange] = []
    learn, over, total = [], False, 0.0
    while not over:
        action = expert.act(observation)
        shown = prompt.message(past, observation, info)
        past.append(Exchange(str(observation), shown, prompt.write(action, info), action))
        learn.append(not expert.noisy)
        observation, reward, terminated, truncated, info = env.step(action)
        total += float(reward)
        over = terminated or truncated
    if not (info.get("success", True) if least is None else total >= least):
        return []
    columns: dict[str, list[Any]] = {
        "observations": [e.shown for e in past],
        "actions": [e.answer for e in past],
        "learn": learn,
    }
    parts = [slice(i, i + 1) for i in range(len(past))] if prompt.history else [slice(None)]
    return [{name: column[part] for name, column in columns.items()} for part in parts]


def read_demonstrations(path: FilePath) -> list[dict[str, list[Any]]]:
    """Episodes from a file of chats, one ``{"messages": [{"role", "content"}, …]}`` per line, roles in turn.

    System messages are left out: set the run's ``system`` instead. Whatever follows the last answer is left out too.

    Raises:
        ConfigError: a line is not such a chat, or the file cannot be read or is empty; the message names it.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"sft_data: cannot read {path}: {error}") from error
    if not lines:
        raise ConfigError(f"sft_data: expected a chat on every line of {path}, found none")
    episodes = []
    for number, line in enumerate(lines, 1):
        try:
            messages = [m for m in json.loads(line)["messages"] if m["role"] != "system"]
            roles, texts = [m["role"] for m in messages], [m["content"] for m in messages]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"sft_data: {path}:{number}: expected {{'messages': […]}}, found {line:.80}") from error
        turns = len(messages) // 2
        if roles[: 2 * turns] != ["user", "assistant"] * turns or not turns:
            raise ConfigError(f"sft_data: {path}:{number}: expected user and assistant in turn, found {roles}")
        observations, actions = texts[: 2 * turns : 2], texts[1 : 2 * turns : 2]
        episodes.append({"observations": observations, "actions": actions, "learn": [True] * turns})
    return episodes


def episode_text(path: Path) -> str:
    """Format an episode for a person to read."""
    lines = []
    for edge in path.from_root():
        lines += [str(edge.parent.observation), f"> {edge.action.text}    [H {edge.action.entropy:.2f}]"]
    last = path.edges[-1]
    outcome = "success" if last.success else "out of turns or context" if last.truncated else "failure"
    return "\n".join([*lines, str(last.child.observation), f"-- {outcome}, {len(path.from_root())} turns"])
