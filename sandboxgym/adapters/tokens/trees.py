"""Rollout trees of tokens for trainers of others: an engine samples turns, paths become rows with advantages.

What this module promises:

1. Token in, token out: a row holds exactly the ids that the engine was given and those that it returned. Only what the
   environment says is tokenized, once.
2. Every sampled token is trained on once: a path that was forked off another one has what came before as context.
3. A row's advantages are ours, token by token: ``weight * advantage`` of the action that a token belongs to, times one
   factor for the whole batch, with which the mean over all sampled tokens is our loss; 0 where nothing was sampled.
4. An engine's answer that cannot be what was asked for (no token, too many, log-probabilities of another number of
   tokens) is an `EngineError`, never a row; nor is an advantage that is not a finite number.

`sandboxgym.adapters.verl` and `sandboxgym.adapters.skyrl` are made of it; credit is any `Algorithm`, such as
`bpo_ref.adapters.algorithm.TreeAlgorithm`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sandboxgym.adapters.prompts import Exchange, Prompt
from sandboxgym.adapters.tokens.chat_format import ChatFormat, Turn
from sandboxgym.tree import Action, Context, Edge, Path, PathKey, RolloutTree, Schedule


class EngineError(RuntimeError):
    """An engine's answer is not what was asked for; the message says what was expected and what came."""


class Algorithm(Protocol):
    """Places of forks, and credit of actions. An algorithm may learn from one batch for the next."""

    def schedule(self, seed: Sequence[int], tasks: Sequence[Any], /) -> Schedule:
        """Schedule of a batch with these tasks; ``seed`` keys what it draws."""

    def credit(self, trees: Sequence[RolloutTree], /) -> list[RolloutTree]:
        """Set `Edge.advantage` and `Edge.weight`; the trees to train on."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A turn as an engine has sampled it."""

    ids: list[int]
    """With the stop token, if one was sampled."""
    logps: list[float] | None = None
    """Log-probability of each token, None if the engine does not report them."""
    extra: Any = None
    """Anything else that the trainer wants to know of the request, such as the version of the weights."""


class Engine(Protocol):
    """Sampler of tokens; requests are made side by side."""

    async def __call__(
        self, ids: list[int], /, *, limit: int, stop_ids: Sequence[int], seed: int, path: tuple[int, PathKey]
    ) -> Sample:
        """Sample at most ``limit`` tokens after ``ids``, up to and including one of ``stop_ids``.

        Args:
            ids: the whole context.
            limit: maximum number of tokens.
            stop_ids: tokens that end the turn.
            seed: from the path's own random stream.
            path: `Context.path`: a conversation, for engines that place its requests on one server.
        """


class TokenPolicy:
    """Policy of `sandboxgym.tree.rollout_async` that asks an engine for the tokens of each turn.

    Args:
        engine: see `Engine`.
        chat: converts text to ids and back.
        prompt: format of the prompts and of the answers.
        context: maximum number of tokens of an episode.
        max_new_tokens: maximum number of tokens of an action.

    Raises:
        ValueError: a turn could never be sampled.
    """

    def __init__(self, engine: Engine, chat: ChatFormat, prompt: Prompt, *, context: int, max_new_tokens: int) -> None:
        if not 1 <= max_new_tokens < context:
            raise ValueError(
                f"expected max_new_tokens from 1 to less than the context of {context} tokens, found {max_new_tokens}"
            )
        self._engine, self._chat, self._prompt = engine, chat, prompt
        self._context, self._most = context, max_new_tokens

    async def __call__(self, context: Context) -> Action | None:
        """Sample one action; None where the conversation has no room left for one.

        Raises:
            EngineError: see the module.
        """
        last: Turn | None = context.memory
        past = last.past if last else ()
        told = self._prompt.message(past, context.observation, context.info)
        before = None if self._prompt.history else last
        prompt = self._chat.turn(told, truncated=before.truncated) if before else self._chat.start(told)
        ids = (before.ids() if before else []) + prompt
        limit = min(self._most, self._context - len(ids))
        if limit < 1:
            return None
        seed = int(context.rng.integers(2**31))
        sample = await self._engine(ids, limit=limit, stop_ids=self._chat.stop_ids, seed=seed, path=context.path)
        _check(sample, limit)
        answer = self._chat.action(sample.ids)
        text, complaint = self._prompt.hear(answer, context.info)
        exchange = Exchange(str(context.observation), told, answer, text, complaint)
        truncated = sample.ids[-1] not in self._chat.stop_ids
        return Action(
            text=text,
            logp=math.nan if sample.logps is None else sum(sample.logps),
            position=len(ids),
            tokens=len(sample.ids),
            memory=Turn(before, prompt, list(sample.ids), truncated, (*past, exchange)),
            data=sample,
            valid=not complaint,
        )


def _check(sample: Sample, limit: int) -> None:
    if not 1 <= len(sample.ids) <= limit:
        raise EngineError(f"expected from 1 to {limit} sampled tokens, found {len(sample.ids)}")
    if sample.logps is None:
        return
    if len(sample.logps) != len(sample.ids):
        raise EngineError(f"expected a log-probability for each of {len(sample.ids)} tokens, found {len(sample.logps)}")
    if not all(-math.inf < logp <= 1e-3 for logp in sample.logps):
        raise EngineError(f"expected log-probabilities of at most 0, found {sample.logps}")


@dataclass(slots=True)
class TokenRow:
    """A path as a training row, or one of its turns where prompts show a window.

    All lists but ``prompt`` have an entry per token of ``response``.
    """

    tree: int
    """Index of the tree in its batch."""
    number: int
    """Number of the path in its tree."""
    turn: int
    """Number of the row among those of its path."""
    path: Path = field(repr=False)
    edges: list[Edge] = field(repr=False)
    """Actions that the row trains."""
    prompt: list[int]
    """System prompt and first observation, up to the first sampled turn of the conversation."""
    response: list[int]
    """All that follows: sampled turns and observations."""
    mask: list[int]
    """1 for tokens sampled on this path; 0 for observations, and for turns before the fork."""
    logps: list[float] | None
    """Log-probabilities as sampled, 0 where ``mask`` is 0; None if the engine does not report them."""
    advantages: list[float]
    """See the module, promise 3; 0 where ``mask`` is 0."""

    @property
    def last(self) -> bool:
        """True for the row with the path's last action."""
        return self.edges[-1] is self.path.edges[-1]


def token_rows(trees: Iterable[RolloutTree], *, credited: bool = True) -> list[TokenRow]:
    """Rows of all paths, tree by tree; those of weight 0 train nothing and are left out.

    Args:
        trees: grown by a `TokenPolicy`.
        credited: False: keep all paths, with advantages of 0, to evaluate.

    Raises:
        ValueError: an advantage or a weight is not a finite number; a trainer would learn nothing, or lose its model.
    """
    rows = [row for tree in trees for number, path in enumerate(tree.paths) for row in _rows_of(tree, number, path)]
    if not credited:
        return rows
    rows = [row for row in rows if any(edge.weight for edge in row.edges)]
    trained = [edge for row in rows for edge in row.edges]
    mass = sum(edge.weight * edge.action.tokens for edge in trained)
    scale = sum(edge.action.tokens for edge in trained) / mass if mass else 0.0
    for row in rows:
        for edge, span in _spans(row):
            advantage = scale * edge.weight * edge.advantage
            if not math.isfinite(advantage):
                raise ValueError(
                    f"expected finite advantages, found {edge.advantage} with weight {edge.weight} "
                    f"in path {row.number} of tree {row.tree}"
                )
            row.advantages[span] = [advantage] * edge.action.tokens
    return rows


def _rows_of(tree: RolloutTree, number: int, path: Path) -> list[TokenRow]:
    conversations: list[list[Edge]] = []
    for edge in path.edges:
        if not conversations or edge.action.memory.before is None:
            conversations.append([])
        conversations[-1].append(edge)
    rows = []
    for turn, edges in enumerate(conversations):
        last: Turn = edges[-1].action.memory
        first = last
        while first.before is not None:
            first = first.before
        ids, start = last.ids(), len(first.prompt)
        length = len(ids) - start
        known = all(edge.action.data.logps is not None for edge in edges)
        logps = [0.0] * length if known else None
        row = TokenRow(
            tree.index, number, turn, path, edges, ids[:start], ids[start:], [0] * length, logps, [0.0] * length
        )
        for edge, span in _spans(row):
            row.mask[span] = [1] * edge.action.tokens
            if row.logps is not None:
                row.logps[span] = edge.action.data.logps
        rows.append(row)
    return rows


def _spans(row: TokenRow) -> Iterable[tuple[Edge, slice]]:
    """Each action of a row, with the place of its tokens in the response."""
    for edge in row.edges:
        start = edge.action.position - len(row.prompt)
        yield edge, slice(start, start + edge.action.tokens)
