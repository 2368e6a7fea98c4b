"""Sampling backends give the same conversations, and none reuses cached keys of other weights."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import wordgame
from tqdm import TMonitor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from bpo_ref import eval as eval_module
from bpo_ref.args import Args
from bpo_ref.learning import packing
from bpo_ref.learning.models import build_tiny
from bpo_ref.sampling.backends import LocalBackendName, SamplingBackend, make_backend
from bpo_ref.sampling.continuous import ContinuousGenerator, GenerationFailed
from bpo_ref.sampling.generate import ContextOverflow, StaleSession, score
from bpo_ref.sampling.policy import ChatPolicy
from bpo_ref.train import Trainer

VOCABULARY, STOPS, LIMIT = 40, (2, 7, 11), 64
SHAPE = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}


@pytest.fixture(autouse=True)
def _tidy() -> Iterator[None]:
    """No thread of a backend outlives its session."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    before = set(threading.enumerate())
    yield
    torch.set_num_threads(threads)
    # Progress bars start one that watches them, for the rest of the process.
    assert not {thread for thread in threading.enumerate() if not isinstance(thread, TMonitor)} - before


def model_of(config: Callable[..., Any], build: Callable[[Any], Any]) -> Any:
    """Weights so large that a wrong context would be noticed."""
    torch.manual_seed(0)
    model = build(config(vocab_size=VOCABULARY, hidden_size=32, max_position_embeddings=LIMIT, **SHAPE))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6.0 if parameter.dim() > 1 else 1.0)
    return model


def llama() -> Any:
    return model_of(LlamaConfig, LlamaForCausalLM)


def qwen2() -> Any:
    return model_of(Qwen2Config, Qwen2ForCausalLM)


def backend_of(name: Any, model: Any, *, entropies: bool = True, tokens: int = 5) -> SamplingBackend:
    options: dict[str, Any] = {"max_new_tokens": tokens, "temperature": 0.7, "context_limit": LIMIT}
    return make_backend(name, model, stop_ids=STOPS, entropies=entropies, **options)


def contexts(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, rng.integers(1, 40)).tolist() for _ in range(count)]


def streams(count: int) -> list[np.random.Generator]:
    return [np.random.default_rng([3, i]) for i in range(count)]


def conversation(backend: SamplingBackend) -> list[list[int]]:
    """Greedy turns of rows that go on, are forked early and late, come and go."""
    session = backend.open(contexts(3))
    session.generate([0, 1, 2])
    session.extend(0, [3, 4, 5])
    fork = session.fork(0, length=len(session.context(0)) - 4)
    assert session.context(fork) == session.context(0)[:-4]
    session.drop([1])
    late = session.add(contexts(1, seed=9)[0])
    session.prefill([late])
    twin = session.fork(late)
    session.generate([0, 2, fork, late, twin])
    found = [session.context(row) for row in (0, 2, fork, late, twin)]
    assert found[3] == found[4]
    session.drop([0, 2, fork, late, twin])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("build", [llama, qwen2])
@pytest.mark.parametrize("packed", [False, True])
def test_backends_have_the_same_greedy_conversations(build: Callable[[], Any], packed: bool) -> None:
    model = build()
    if packed:
        packing.enable(model)
    attention = model.config._attn_implementation
    found = [conversation(backend_of(name, model)) for name in get_args(LocalBackendName)]
    assert found[0] == found[1]
    assert model.config._attn_implementation == attention


@pytest.mark.slow
def test_a_new_session_knows_nothing_of_the_old_weights() -> None:
    """The same prefix before and after an update: pages of the old one would be found again."""
    model, rows = llama(), [[5] * 40, [5] * 40 + [6]]
    before = backend_of("transformers-continuous", model)
    session = before.open(rows)
    (old, _) = session.generate([0, 1])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    with pytest.raises(StaleSession):
        session.generate([0, 1])
    assert not hasattr(model, "_cached_continuous_batching_manager")
    (new, other) = (backend_of(name, model).open(rows) for name in get_args(LocalBackendName))
    turns = [session.generate([0, 1]) for session in (new, other)]
    assert [turn.ids for turn in turns[0]] == [turn.ids for turn in turns[1]]
    assert turns[0][0].ids != old.ids
    other.drop([0, 1])


@pytest.mark.slow
@pytest.mark.parametrize("name", get_args(LocalBackendName))
def test_log_probabilities_are_the_trainers_or_none(name: Any) -> None:
    model = llama()
    for entropies in (True, False):
        session = backend_of(name, model, entropies=entropies).open(contexts(4))
        turns = session.generate(range(4), streams(4))
        with torch.no_grad():
            logps, found = score(model, [session.context(row) for row in range(4)], temperature=0.7)
        for row, turn in enumerate(turns):
            if name != "hf" and not entropies:
                assert not turn.logps and not turn.entropies
                continue
            n = len(session.context(row))
            span = slice(n - 1 - len(turn.ids), n - 1)
            torch.testing.assert_close(torch.tensor(turn.logps), logps[row, span], atol=1e-5, rtol=0)
            torch.testing.assert_close(torch.tensor(turn.entropies), found[row, span], atol=1e-5, rtol=0)
        session.drop(range(4))


@pytest.mark.slow
def test_continuous_batching_samples_the_tempered_distribution_of_all_tokens() -> None:
    model, count = llama(), 600
    with torch.no_grad():
        model.lm_head.weight.mul_(0.2)  # flat enough for a top-k to be noticed
    session = backend_of("transformers-continuous", model, tokens=1, entropies=False).open([[5, 6, 8]] * count)
    turns = session.generate(range(count), streams(count))
    session.drop(range(count))
    frequencies = np.bincount([turn.ids[0] for turn in turns], minlength=VOCABULARY) / count
    with torch.no_grad():
        probabilities = (model(torch.tensor([[5, 6, 8]])).logits[0, -1] / 0.7).softmax(-1).numpy()
    errors = np.sqrt(probabilities * (1 - probabilities) / count)
    assert np.all(np.abs(frequencies - probabilities) < 5 * errors + 2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("entropies", [False, True])
def test_the_log_probabilities_that_it_has_drawn_by_are_told_on_demand(entropies: bool) -> None:
    """They are those of the tempered distribution, as near to the trainer's as kernels agree."""
    model = llama()
    options: dict[str, Any] = {"max_new_tokens": 5, "temperature": 0.7, "context_limit": LIMIT}
    for wanted in (False, True):
        generator = make_backend(
            "transformers-continuous", model, stop_ids=STOPS, entropies=entropies, sampler_logps=wanted, **options
        )
        session = generator.open(contexts(3))
        for turn, row in zip(session.generate(range(3), streams(3)), range(3)):
            assert bool(turn.logps) == entropies and len(turn.sampler_logps) == (len(turn.ids) if wanted else 0)
            if wanted:
                ids = torch.tensor([session.context(row)])
                with torch.no_grad():
                    logps = (model(ids).logits / 0.7).log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
                assert turn.sampler_logps == pytest.approx(logps[-len(turn.ids) :].tolist(), abs=1e-4)
        session.drop(range(3))


@pytest.mark.slow
def test_turns_end_where_they_must() -> None:
    session = backend_of("transformers-continuous", llama()).open([[5] * (LIMIT - 2), [5] * LIMIT, [6]])
    with pytest.raises(ContextOverflow):
        session.generate([1])
    turns = session.generate([0, 2], streams(2))
    assert len(turns[0].ids) <= 2
    for turn in turns:
        assert turn.truncated == (turn.ids[-1] not in STOPS)
        assert not set(turn.ids[:-1]) & set(STOPS)
    assert session.generate([]) == []
    session.drop([0, 1, 2])


@pytest.mark.slow
def test_a_request_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    session = backend_of("transformers-continuous", model).open([[5, 6]])
    monkeypatch.setattr(type(model.model), "forward", lambda *_, **__: 1 / 0)
    with pytest.raises(GenerationFailed):
        session.generate([0], streams(1))
    assert not hasattr(model, "_cached_continuous_batching_manager")


def test_a_temperature_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature"):
        ContinuousGenerator(llama(), stop_ids=STOPS, max_new_tokens=4, temperature=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("tis", [0.0, 2.0])
def test_a_run_trains_on_what_continuous_batching_sampled(tmp_path: Path, tis: float) -> None:
    """Log-probabilities that the backend does not give are the trainer's, so that the first ratio is 1."""
    options: dict[str, Any] = {"env_id": wordgame.ENV_ID, "max_turns": 6, "context": 160, "max_new_tokens": 4}
    sizes: dict[str, Any] = {"prompts": 2, "width": 2, "sft_episodes": 12, "updates": 1, "eval_episodes": 2}
    backend: Any = "transformers-continuous"
    trainer = Trainer(Args(algo="bpo-forest", roots=2, backend=backend, tis=tis, out=str(tmp_path), **options, **sizes))
    try:
        policy: list[ChatPolicy] = []
        player = trainer.session.player
        trainer.session.player = lambda temperature: policy.append(player(temperature)) or policy[-1]  # type: ignore
        trees = trainer._rollouts((0,))
        assert not policy[0]._rows and not hasattr(trainer.session.policy, "_cached_continuous_batching_manager")
        edges = [edge for tree in trees for edge in tree.edges()]
        assert all(len(edge.action.data.logps) == edge.action.tokens for edge in edges)
        assert all(math.isfinite(edge.action.logp) for edge in edges)
        assert all(len(edge.action.data.sampler_logps) == (edge.action.tokens if tis else 0) for edge in edges)
        assert not tis or 0 < trainer.rollout_costs["rollout/sampler_mismatch"] < 1e-4
        for i, edge in enumerate(edges):
            edge.advantage = float(i % 2)
        metrics = trainer._optimize(trees)
    finally:
        trainer.session.close()
    assert metrics["update/ratio"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", get_args(LocalBackendName))
def test_a_checkpoint_is_scored_with_any_backend(name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, report = tmp_path / "policy", tmp_path / "score.json"
    model, tokenizer = build_tiny("0.2M", ["task 0 turn 1 say a word"], vocabulary=0, context=160, seed=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    made: list[str] = []
    monkeypatch.setattr(
        eval_module,
        "make_backend",
        lambda name, *rest, **options: made.append(name) or make_backend(name, *rest, **options),
    )
    words = ["eval", "--checkpoint", str(folder), "--env-id", wordgame.ENV_ID, "--episodes", "4", "--max-turns", "5"]
    words += ["--context", "160", "--max-new-tokens", "4", "--backend", name, "--json", str(report)]
    monkeypatch.setattr("sys.argv", words)
    eval_module.main()
    assert made == [name]
    score = json.loads(report.read_text())["score"]
    assert score["n"] == len(score["outcomes"]) == 4 and score["tokens"] >= score["turns"] > 0
