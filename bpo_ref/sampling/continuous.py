"""Turns sampled by transformers' continuous batching: a paged cache, requests that come and go, CUDA graphs.

What this module promises:

1. It is used like `generate.SamplingSession`, with the same conversations token by token.
2. No key or value outlives the weights that it was computed with: the paged cache, which shares whole pages of equal
   prefixes between requests, is thrown away with the session's last row and never handed to another session.
3. A request that fails raises `GenerationFailed`; transformers only logs it.

Not promised: a row's tokens depend on the batch, because requests draw from one stream. Log-probabilities are not
taken from the paged kernels, which round differently from the trainer's: with ``score`` each turn is measured by the
trainer's own forward pass, otherwise they are left to the trainer, which measures whole trees. With ``sampler_logps``
those of the kernels are returned too, so that the loss can be corrected by them (``--tis``).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from bpo_ref.learning import packing
from bpo_ref.sampling.generate import CausalLM, ContextOverflow, Generation, StaleSession, score, weights_version

KNOWN = inspect.signature(ContinuousBatchingConfig).parameters
"""Options of transformers' configuration, which change from version to version."""


class GenerationFailed(RuntimeError):
    """Raised if continuous batching failed on a request."""


class ContinuousGenerator:
    """Sampler of turns from a causal language model by continuous batching.

    Args:
        model: on CUDA for speed; on a CPU it is for tests.
        stop_ids: tokens that end a turn.
        max_new_tokens: largest number of tokens per turn.
        temperature: temperature of the sampling.
        context_limit: largest number of tokens per row; default: the model's ``max_position_embeddings``.
        score: measure log-probabilities and entropies of each turn, for schedules that decide by them.
        sampler_logps: also return the log-probabilities by which tokens were drawn.
        page: tokens per page of the cache; requests share whole pages only, and turns of agents are short.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        stop_ids: Sequence[int],
        max_new_tokens: int,
        temperature: float = 1.0,
        context_limit: int | None = None,
        score: bool = False,
        sampler_logps: bool = False,
        page: int = 32,
    ) -> None:
        if temperature <= 0:
            raise ValueError(f"temperature must be positive, got {temperature}; for greedy turns pass no rngs")
        self.model = model
        self.stop_ids = frozenset(stop_ids)
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.context_limit: int = context_limit or model.config.max_position_embeddings
        self.score = score
        self.sampler_logps = sampler_logps
        self.page = page

    def open(self, contexts: Sequence[Sequence[int]] = ()) -> ContinuousSession:
        """Open a session whose rows 0, 1, ... begin with ``contexts``, the full ids of each so far."""
        session = ContinuousSession(self)
        for context in contexts:
            session.add(context)
        return session


class ContinuousSession:
    """Conversations continued turn by turn; the paged cache finds their shared prefixes."""

    prefilled = None
    """None: the cache does not tell."""
    reused = None

    def __init__(self, generator: ContinuousGenerator) -> None:
        self._generator = generator
        self._weights = weights_version(generator.model)
        self._rows: dict[int, list[int]] = {}
        self._opened = 0
        self._sampled: bool | None = None  # whether the manager's requests are, None: there is none
        # transformers keeps a persistent manager on the model; its pages are of the weights of an earlier session.
        generator.model.destroy_cached_continuous_batching_manager()

    def add(self, context: Sequence[int]) -> int:
        """Add a row that begins with ``context``; returns its number."""
        if not context:
            raise ValueError("a row needs at least one token to begin with")
        self._rows[self._opened] = list(context)
        self._opened += 1
        return self._opened - 1

    def fork(self, row: int, *, length: int | None = None) -> int:
        """Fork a row: a new one that begins with the first ``length`` tokens of ``row`` (default: all)."""
        return self.add(self._rows[row][:length])

    def extend(self, row: int, ids: Sequence[int]) -> None:
        """Append tokens of the environment to a row."""
        self._rows[row].extend(ids)

    def drop(self, rows: Sequence[int]) -> None:
        """Forget finished rows; with the last row the cache is freed too."""
        for row in rows:
            del self._rows[row]
        if not self._rows:
            self._close()

    def context(self, row: int) -> list[int]:
        """Exact ids of a row so far."""
        return list(self._rows[row])

    def room(self, row: int) -> int:
        """Number of tokens that still fit into a row's context."""
        return self._generator.context_limit - len(self._rows[row])

    def prefill(self, rows: Sequence[int]) -> None:
        """Do nothing: the cache finds prefixes by itself."""

    def generate(self, rows: Sequence[int], rngs: Sequence[np.random.Generator] | None = None) -> list[Generation]:
        """Sample one turn of each row; the first of ``rngs`` seeds them all, without ``rngs`` they are greedy.

        Raises:
            ContextOverflow: a row has no room left.
            StaleSession: the weights have changed since the session was opened.
            GenerationFailed: continuous batching failed on a request.
        """
        generator = self._generator
        if weights_version(generator.model) != self._weights:
            self._close()
            raise StaleSession("the weights changed after this session was opened; open a new one")
        if full := [row for row in rows if self.room(row) < 1]:
            raise ContextOverflow(f"rows {full} have reached the limit of {generator.context_limit} tokens")
        if not rows:
            return []
        if self._sampled is not None and self._sampled != (rngs is not None):
            self._close()
        turns = self._request(rows, rngs)
        for row, (ids, _) in zip(rows, turns):
            self._rows[row].extend(ids)
        if not generator.score:
            return [Generation(ids, [], [], ids[-1] not in generator.stop_ids, told) for ids, told in turns]
        with torch.inference_mode():
            contexts = [self._rows[row] for row in rows]
            logps, entropies = score(generator.model, contexts, temperature=generator.temperature)
        measured = []
        for i, (ids, told) in enumerate(turns):
            span = slice(len(contexts[i]) - 1 - len(ids), len(contexts[i]) - 1)
            truncated = ids[-1] not in generator.stop_ids
            measured.append(Generation(ids, logps[i, span].tolist(), entropies[i, span].tolist(), truncated, told))
        return measured

    def _request(
        self, rows: Sequence[int], rngs: Sequence[np.random.Generator] | None
    ) -> list[tuple[list[int], list[float]]]:
        """Draw the tokens of each row, with their log-probabilities where these are wanted."""
        generator, model = self._generator, self._generator.model
        before = model.config._attn_implementation
        if before == packing.ATTENTION:  # which is SDPA except for packed rows
            model.set_attn_implementation("sdpa")
        training = model.training
        model.eval()
        options: dict[str, Any] = {"do_sample": rngs is not None}
        if rngs is not None:
            options |= {"temperature": generator.temperature, "top_k": 0, "top_p": 1.0}
        config = GenerationConfig(
            max_new_tokens=generator.max_new_tokens, eos_token_id=sorted(generator.stop_ids), **options
        )
        try:
            with model.continuous_batching_context_manager(
                generation_config=config,
                continuous_batching_config=self._batching(len(rows), rngs),
                persistent_manager=True,
                warmup=model.device.type == "cuda",
            ) as manager:
                self._sampled = rngs is not None
                ids = [
                    manager.add_request(
                        self._rows[row],
                        max_new_tokens=min(generator.max_new_tokens, self.room(row)),
                        eos_token_id=sorted(generator.stop_ids),
                    )
                    for row in rows
                ]
                found: dict[str, tuple[list[int], list[float]]] = {}
                while len(found) < len(rows):
                    result = manager.get_result(timeout=1)
                    # transformers logs the failure of a request and continues without an exception.
                    if result is not None and result.error is not None:
                        raise GenerationFailed(f"request {result.request_id}: {result.error}")
                    if result is not None and result.is_finished():
                        found[result.request_id] = list(result.generated_tokens), list(result.logprobs)
                    elif not manager.is_running():
                        raise GenerationFailed(f"continuous batching ended with {len(found)} of {len(rows)} requests")
        except BaseException:
            self._close()
            raise
        finally:
            model.train(training)
            if model.config._attn_implementation != before:
                model.set_attn_implementation(before)
        return [found[name] for name in ids]

    def _batching(self, rows: int, rngs: Sequence[np.random.Generator] | None) -> ContinuousBatchingConfig:
        generator = self._generator
        seed = None if not rngs else int(rngs[0].integers(2**31))
        page = "page_size" if "page_size" in KNOWN else "block_size"  # transformers renamed it
        options: dict[str, Any] = {page: generator.page, "seed": seed}
        options["return_logprobs"] = generator.sampler_logps
        if generator.model.device.type == "cpu":  # by default it takes most of the memory
            pages = rows * (-(-generator.context_limit // generator.page) + 1)
            options |= {"num_blocks": pages, "max_batch_tokens": 4096, "use_cuda_graph": False}
            options |= {"use_async_batching": False}
            options |= {"auto_switch_to_flash": False} if "auto_switch_to_flash" in KNOWN else {}
        return ContinuousBatchingConfig(**options)

    def _close(self) -> None:
        self._generator.model.destroy_cached_continuous_batching_manager()
        self._sampled = None
