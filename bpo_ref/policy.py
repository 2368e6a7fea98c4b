"""A chat model as the policy of a rollout tree, and expert episodes to warm it up."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bpo_ref.chat import ChatFormat
from bpo_ref.generate import Generator
from sandboxgym.tree import Action, Context, Envs, Path


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn added to a conversation: `Action.memory`. Forks share the turns before them."""

    before: Turn | None
    prompt: list[int]
    sampled: list[int]
    truncated: bool

    def ids(self) -> list[int]:
        """The exact ids of the conversation up to here."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.before
        return [token for turn in reversed(turns) for token in turn.prompt + turn.sampled]


class ChatPolicy:
    """Samples the next turn of every live path in one batch (`sandboxgym.tree.Policy`).

    Rows live as long as their paths; make a new policy after the weights have changed.
    """

    def __init__(self, generator: Generator, chat: ChatFormat) -> None:
        self._chat = chat
        self._session = generator.open()
        self._rows: dict[Any, int] = {}

    def __call__(self, contexts: Sequence[Context]) -> list[Action | None]:
        """One action a context, None where the conversation has no room left for one."""
        live = {context.path for context in contexts}
        finished = [path for path in self._rows if path not in live]
        self._session.drop([self._rows.pop(path) for path in finished])
        prompts = [self._read(context) for context in contexts]
        rows = [self._rows[context.path] for context in contexts]
        able = [i for i, row in enumerate(rows) if self._session.room(row) >= 1]
        positions = {i: len(self._session.context(rows[i])) for i in able}
        generations = self._session.generate([rows[i] for i in able], [contexts[i].rng for i in able]) if able else []
        actions: list[Action | None] = [None] * len(contexts)
        for i, generation in zip(able, generations):
            actions[i] = Action(
                text=self._chat.action(generation.ids),
                entropy=generation.entropies[0],
                logp=sum(generation.logps),
                position=positions[i],
                tokens=len(generation.ids),
                memory=Turn(contexts[i].memory, prompts[i], generation.ids, generation.truncated),
                data=generation,
            )
        return actions

    def _read(self, context: Context) -> list[int]:
        """Append the observation to the path's row, opening the row if the path is new; returns what was appended."""
        before: Turn | None = context.memory
        if before is None:
            prompt = self._chat.start(context.observation)
        else:
            prompt = self._chat.turn(context.observation, truncated=before.truncated)
        if context.path in self._rows:
            self._session.extend(self._rows[context.path], prompt)
        else:
            self._rows[context.path] = self._session.add((before.ids() if before else []) + prompt)
        return prompt


def collect_demonstrations(
    envs: Envs, episodes: int, *, noise: float, seed: int, progress: Callable[[int], Any] = lambda _: None
) -> list[dict[str, list[Any]]]:
    """Successful expert episodes, played through the environment's own API; tasks in turn.

    Args:
        envs: of an environment whose base has ``num_tasks`` and ``expert(rng=…, noise=…)``.
        episodes: how many to play.
        noise: probability of a random action of the expert.
        seed: of tasks' order and noise.
        progress: called with 1 after each.

    Returns:
        ``{"observations": […], "actions": […], "learn": […]}`` of equal length; ``learn`` is False for noise.
    """
    env = envs.take()
    base: Any = env.unwrapped
    if not hasattr(base, "expert"):
        raise NotImplementedError(f"{base} has no expert to demonstrate: set sft_steps=0 and a pretrained model")
    order = list(range(base.num_tasks))
    random.Random(seed).shuffle(order)
    collected: list[dict[str, list[Any]]] = []
    for episode in range(episodes):
        expert = base.expert(rng=random.Random(f"{seed}/{episode}"), noise=noise)
        observation, info = env.reset(options={"task": order[episode % len(order)]})
        expert.reset(observation)
        observations, actions, learn, over = [], [], [], False
        while not over:
            observations.append(observation)
            actions.append(expert.act(observation))
            learn.append(not expert.noisy)
            observation, _, terminated, truncated, info = env.step(actions[-1])
            over = terminated or truncated
        if info["success"]:
            collected.append({"observations": observations, "actions": actions, "learn": learn})
        progress(1)
    envs.give(env)
    return collected


def episode_text(path: Path) -> str:
    """An episode as a person reads it."""
    lines = []
    for edge in path.from_root():
        lines += [str(edge.parent.observation), f"> {edge.action.text}    [H {edge.action.entropy:.2f}]"]
    last = path.edges[-1]
    outcome = "success" if last.success else "out of turns or context" if last.truncated else "failure"
    return "\n".join([*lines, str(last.child.observation), f"-- {outcome}, {len(path.from_root())} turns"])
