"""Sampling backends: one small interface, and the choices of ``--backend`` behind it.

Another backend is a class with `SamplingBackend.open` whose sessions have the methods of `Conversations`. It may leave
log-probabilities to the trainer. If it samples from other log-probabilities, they belong in `Generation.sampler_logps`:
``--tis`` needs them. For another inference server only an `engine.Engine` is needed: `served.ServedBackend` asks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from bpo_ref.sampling.generate import Generation
    from bpo_ref.sampling.served import Fleet

CausalLM: TypeAlias = Any  # of transformers, bare or wrapped by PEFT: they share no base class
LocalBackendName = Literal["hf", "transformers-continuous"]
BackendName = Literal["hf", "transformers-continuous", "vllm"]


class Conversations(Protocol):
    """Rows of token ids that only ever grow, sampled with the weights at the time of `SamplingBackend.open`."""

    @property
    def prefilled(self) -> int | None:
        """Number of context tokens that the model has read; None: not known."""

    @property
    def reused(self) -> int | None:
        """Number of context tokens taken from other rows instead of being read."""

    def add(self, context: Sequence[int], /) -> int:
        """Add a row that begins with these ids; returns its number."""

    def fork(self, row: int, /, *, length: int | None = None) -> int:
        """Fork a row: a new one that begins with its first ``length`` tokens (default: all)."""

    def extend(self, row: int, ids: Sequence[int], /) -> None:
        """Append tokens of the environment to a row."""

    def drop(self, rows: Sequence[int], /) -> None:
        """Forget rows and free their memory; with the last row, all of it."""

    def context(self, row: int, /) -> list[int]:
        """Exact ids of a row so far."""

    def room(self, row: int, /) -> int:
        """Number of tokens that still fit; below 1 the row cannot take another turn."""

    def prefill(self, rows: Sequence[int], /) -> None:
        """Prepare rows that are about to be forked: a hint."""

    def generate(self, rows: Sequence[int], rngs: Sequence[np.random.Generator] | None = None, /) -> list[Generation]:
        """Sample one turn per row, greedily without ``rngs``; ``logps`` and ``entropies`` are empty if not known."""


class SamplingBackend(Protocol):
    """A sampler that opens sessions."""

    def open(self, contexts: Sequence[Sequence[int]] = (), /) -> Conversations:
        """Open a session whose rows 0, 1, ... begin with ``contexts``."""


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
    pinned: bool = False,
    fleet: Fleet | None = None,
) -> SamplingBackend:
    """Make the backend of that name.

    Args:
        name: ``hf`` (`generate.Generator`), ``transformers-continuous`` (`continuous.ContinuousGenerator`) or ``vllm``
            (`served.ServedBackend`).
        model: to sample from.
        stop_ids: tokens that end a turn.
        max_new_tokens: largest number of tokens per turn.
        temperature: temperature of the sampling.
        context_limit: largest number of tokens per row.
        entropies: whether they are needed as soon as a turn has been sampled.
        sampler_logps: whether the sampler's own log-probabilities are needed; of ``hf`` they are `Generation.logps`.
        pinned: whether engines continue with the weights that they have while those of ``model`` change.
        fleet: the engines that already serve these weights, for ``vllm``.

    Raises:
        ValueError: the temperature is not positive; or for ``vllm``, there are no engines, or ``pinned`` and
            ``entropies`` are both set.
        NotImplementedError: ``hf`` with a model that has other than full attention.
    """
    sampling: dict[str, Any] = {
        "stop_ids": stop_ids,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "context_limit": context_limit,
    }
    # imported here, because the settings of a run need the names of the backends, but not PyTorch
    if name == "transformers-continuous":
        from bpo_ref.sampling.continuous import ContinuousGenerator

        return ContinuousGenerator(model, score=entropies, sampler_logps=sampler_logps, **sampling)
    if name == "vllm":
        from bpo_ref.sampling.served import ServedBackend

        if fleet is None:
            raise ValueError("backend: vllm needs the engines to ask, found none")
        return ServedBackend(fleet, model, score=entropies, pinned=pinned, **sampling)
    from bpo_ref.sampling.generate import Generator

    return Generator(model, **sampling)
