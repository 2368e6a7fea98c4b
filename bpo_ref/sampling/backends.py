"""What samples: one small interface, and the backends of ``--backend`` behind it.

A further one (an inference server, say) is a class with `Backend.open` and sessions of the methods of `Conversations`;
it has to be told of new weights when a session is opened, and may leave log-probabilities to the trainer. Those by
which it has sampled belong in `Generation.sampler_logps` where they are not the trainer's: ``--tis`` needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from bpo_ref.sampling.continuous import ContinuousGenerator
from bpo_ref.sampling.generate import Generation, Generator

CausalLM: TypeAlias = Any  # of transformers, bare or wrapped by PEFT: they share no base class
BackendName = Literal["hf", "transformers-continuous"]


class Conversations(Protocol):
    """Rows of token ids that only ever grow, sampled with the weights at the time of `Backend.open`."""

    @property
    def prefilled(self) -> int | None:
        """Tokens of context that the model has read; None: not known."""

    @property
    def reused(self) -> int | None:
        """Tokens of context that rows took over from others, read."""

    def add(self, context: Sequence[int], /) -> int:
        """A new row that begins with these ids."""

    def fork(self, row: int, /, *, length: int | None = None) -> int:
        """A new row that begins with the first ``length`` tokens of another (default: all)."""

    def extend(self, row: int, ids: Sequence[int], /) -> None:
        """Append tokens of the environment."""

    def drop(self, rows: Sequence[int], /) -> None:
        """Forget rows and free what they hold; with the last, everything."""

    def context(self, row: int, /) -> list[int]:
        """The exact ids of a row so far."""

    def room(self, row: int, /) -> int:
        """How many tokens still fit; below 1 the row cannot take another turn."""

    def prefill(self, rows: Sequence[int], /) -> None:
        """Rows that are about to be forked: a hint."""

    def generate(self, rows: Sequence[int], rngs: Sequence[np.random.Generator] | None = None, /) -> list[Generation]:
        """One turn of each of these rows, greedy without ``rngs``; ``logps`` and ``entropies`` empty if not known."""


class Backend(Protocol):
    """Opens sessions."""

    def open(self, contexts: Sequence[Sequence[int]] = (), /) -> Conversations:
        """A session whose rows 0, 1, ... begin with ``contexts``."""


def make_backend(
    name: BackendName,
    model: CausalLM,
    *,
    stop_ids: Sequence[int],
    max_new_tokens: int,
    temperature: float,
    context_limit: int,
    entropies: bool,
    sampler_logps: bool = False,
) -> Backend:
    """The backend of that name.

    Args:
        name: ``hf`` (`generate.Generator`) or ``transformers-continuous`` (`continuous.ContinuousGenerator`).
        model: to sample from.
        stop_ids: tokens that end a turn.
        max_new_tokens: most tokens of a turn.
        temperature: of the sampling.
        context_limit: most tokens of a row.
        entropies: whether they are needed as soon as a turn has been sampled.
        sampler_logps: whether the sampler's own log-probabilities are needed; of ``hf`` they are `Generation.logps`.
    """
    sampling: dict[str, Any] = {
        "stop_ids": stop_ids,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "context_limit": context_limit,
    }
    if name == "transformers-continuous":
        return ContinuousGenerator(model, score=entropies, sampler_logps=sampler_logps, **sampling)
    return Generator(model, **sampling)
