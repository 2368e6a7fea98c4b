"""The interface of a generation engine on a server: token ids in, token ids and log-probabilities out.

What this module promises:

1. Every request names the version of the weights that it wants, and the engine reports the version for every token.
   `checked` refuses an answer if even one token was drawn from other weights.
2. An answer is taken only if it is exactly what was asked for: one turn, its end where it must be, one finite
   log-probability for every token. Anything else is a `BadAnswer`.
3. Errors are of two kinds: after an `EngineUnavailable`, a `BadAnswer` or `OtherWeights` the request may be repeated,
   with the same seed; a `WrongEngine` would give the same again.

`vllm.VllmEngine` is such an engine. Another one is a class with the methods of `Engine`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch

Weights: TypeAlias = "Callable[[], Iterable[tuple[str, torch.Tensor]]]"
"""Function that gives the names and tensors of a model, the same ones in the same order whenever it is called."""


class EngineError(RuntimeError):
    """Raised if an engine gives no usable answer; the message names the engine and what differs."""


class EngineUnavailable(EngineError):
    """Raised if no answer came in time, or the engine says that it failed."""


class BadAnswer(EngineError):
    """Raised if an answer is not one to the request."""


class OtherWeights(BadAnswer):
    """Raised if tokens were drawn from other weights than those asked for."""


class WrongEngine(EngineError):
    """Raised if an engine serves something else than the run needs: a model, a tokenizer, a length, settings."""


@dataclass(frozen=True)
class TurnRequest:
    """A turn to be sampled."""

    ids: list[int]
    """Token ids of the conversation so far."""
    version: str
    """Version of the weights; also the salt of the prefix cache, so that no key of other weights is met."""
    stop_ids: tuple[int, ...]
    """Tokens that end the turn."""
    limit: int
    """Largest number of tokens."""
    temperature: float
    """Temperature; 0: the most probable tokens."""
    seed: int
    """Seed of the turn, which then does not depend on what else is sampled."""
    key: str = ""
    """Name of the request, unique among all; each repetition has another."""
    adapter: bool = False
    """True if the weights are the adapter of that name, on top of the weights that the engine was started with."""


@dataclass(frozen=True)
class Span:
    """Tokens of an answer that were drawn from the same weights, from ``start`` to before ``end``."""

    version: str
    start: int
    end: int


@dataclass(frozen=True)
class Answer:
    """An engine's answer, as it came."""

    key: str
    ids: list[int]
    logps: list[float]
    """Log-probability of each token under the tempered distribution."""
    spans: list[Span]
    cached: int | None = None
    """Number of context tokens that were taken from the prefix cache; None: not told."""


@dataclass(frozen=True)
class Expected:
    """Requirements of a run on an engine."""

    context: int
    """Largest number of tokens of a conversation."""
    text: str
    """Text on which tokenizers are compared."""
    tokens: list[int]
    """Token ids of the text, without special tokens."""
    temperatures: tuple[float, ...] = (1.0,)
    """Temperatures whose log-probabilities are learned from."""
    rank: int = 0
    """Rank of the adapters that will be loaded; 0: whole weights will be."""
    sleeps: bool = False
    """True if it will be asked to sleep."""
    nccl: bool = False
    """True if it will be sent weights over NCCL."""


@dataclass(frozen=True)
class Sent:
    """Weights that are sent over NCCL."""

    weights: Weights
    """Function that gives their names, as in a checkpoint, and their tensors."""
    device: torch.device
    """GPU from which they are sent."""


class Engine(Protocol):
    """An engine on a server. All methods may be called from several threads."""

    @property
    def name(self) -> str:
        """Name for messages: its address."""

    def check(self, expected: Expected, /, *, seconds: float) -> None:
        """Compare the engine with what the run needs.

        Raises:
            WrongEngine: something differs; the message says what was expected and what was found.
            EngineUnavailable: no answer.
        """

    def generate(self, request: TurnRequest, /, *, seconds: float) -> Answer:
        """Sample a turn; see `checked` for the answer.

        Raises:
            EngineUnavailable: no answer within that time.
            BadAnswer: the answer cannot be read.
            WrongEngine: the engine refuses such requests.
        """

    def load(self, folder: str, version: str, /, *, seconds: float) -> None:
        """Load the weights in a folder and give them this version; turns that are being sampled are finished first.

        Raises:
            EngineUnavailable: the weights were not loaded; what the engine serves then has no version of a run.
        """

    def version(self, *, seconds: float) -> str:
        """Name of the weights that the engine serves; ``""`` if it does not say.

        Raises:
            EngineUnavailable: no answer within that time.
        """

    def load_adapter(self, folder: str, version: str, /, *, seconds: float) -> None:
        """Load the LoRA adapter in a folder as this version, in place of those loaded before; otherwise like `load`."""

    def receive(self, sent: Sent, version: str, /, *, seconds: float) -> None:
        """Get weights over NCCL as this version; otherwise like `load`."""

    def sleep(self, *, seconds: float) -> None:
        """Free the memory of its GPU until `wake`; nothing is sampled meanwhile.

        Raises:
            EngineUnavailable: it does not sleep.
        """

    def wake(self, *, seconds: float) -> None:
        """Have the weights back that it had before it slept; if it is awake, do nothing.

        Raises:
            EngineUnavailable: it is not awake.
        """


def checked(answer: Answer, request: TurnRequest, *, engine: str, vocabulary: int) -> Answer:
    """Return an answer if it is one to the request.

    Args:
        answer: the engine's.
        request: what was asked for.
        engine: name for messages.
        vocabulary: number of token ids of the model.

    Raises:
        BadAnswer: naming what differs.
        OtherWeights: some tokens were drawn from other weights.
    """

    def refuse(wrong: bool, expected: str, found: object) -> None:
        if wrong:
            raise BadAnswer(f"{engine} gave no answer to what was asked: expected {expected}, found {found}")

    ids, count = answer.ids, len(answer.ids)
    refuse(answer.key != request.key, "the answer to this request", "that to another one")
    refuse(not 1 <= count <= request.limit, f"1 to {request.limit} tokens", count)
    refuse(not all(0 <= token < vocabulary for token in ids), f"token ids below {vocabulary}", ids)
    stops = [place for place, token in enumerate(ids) if token in request.stop_ids]
    refuse(bool(stops) and stops[0] < count - 1, "no token after one that ends a turn", ids)
    refuse(not stops and count < request.limit, f"a token that ends the turn, or {request.limit} tokens", ids)
    most = len(request.ids)
    refuse(answer.cached is not None and not 0 <= answer.cached <= most, f"0 to {most} cached tokens", answer.cached)
    refuse(len(answer.logps) != count, f"{count} log-probabilities", len(answer.logps))
    refuse(not all(_is_logp(logp) for logp in answer.logps), "finite log-probabilities", answer.logps)
    told = [span.version for span in answer.spans for _ in range(span.start, span.end)]
    edges = [0, *(span.end for span in answer.spans)]
    apart = [span.start for span in answer.spans] != edges[:-1]
    refuse(apart or len(told) != count, "the version of the weights of every token", answer.spans)
    if others := sorted(set(told) - {request.version}):
        raise OtherWeights(
            f"{engine} sampled from other weights than this run's: expected version {request.version}, found "
            f"{', '.join(others)} (it was started again, or another run uses it too)"
        )
    return answer


def _is_logp(logp: float) -> bool:
    return math.isfinite(logp) and logp <= 1e-3  # rounding
