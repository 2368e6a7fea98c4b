"""Sampling by servers: turns are the trainer's, and no answer is taken that is not what was asked for."""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_engine import FakeServer, Fault, choice, nan, place, spoiled, wait_until
from transformers import LlamaConfig, LlamaForCausalLM

from bpo_ref.args import Args, resolved
from bpo_ref.config import ConfigError
from bpo_ref.sampling import served
from bpo_ref.sampling.backends import make_backend
from bpo_ref.sampling.engine import EngineError, Expected
from bpo_ref.sampling.generate import ContextOverflow, Generator, StaleSession, score
from bpo_ref.sampling.served import Fleet, ServedSession
from bpo_ref.sampling.vllm import VllmEngine

VOCABULARY, STOPS, LIMIT = 40, (2, 7, 11), 64
SHAPE = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}


@pytest.fixture(autouse=True)
def _tidy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No thread outlives its request for long."""
    before = set(threading.enumerate())
    yield
    wait_until(lambda: not set(threading.enumerate()) - before)


def llama(*, tied: bool = False) -> Any:
    """A model with weights so large that a wrong context would be noticed."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, max_position_embeddings=LIMIT, tie_word_embeddings=tied, **SHAPE
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6.0 if parameter.dim() > 1 else 1.0)
    return model


def fleet_of(*servers: FakeServer, seconds: float = 300.0, retries: int = 2) -> Fleet:
    """Engines that serve version v0 without having loaded anything: their initial weights are the right ones."""
    engines = [VllmEngine(server.url) for server in servers]
    fleet = Fleet(engines, vocabulary=VOCABULARY, seconds=seconds, retries=retries, pause=0.01)
    for server in servers:
        server.version = "v0"
    fleet.serve("/nowhere", "v0", lambda engine: None, load=False)
    return fleet


def session_of(fleet: Fleet, model: Any, contexts: Any, **options: Any) -> Any:
    sampling: dict[str, Any] = {"max_new_tokens": 5, "temperature": 0.7, "context_limit": LIMIT, "entropies": False}
    return make_backend("vllm", model, stop_ids=STOPS, fleet=fleet, **(sampling | options)).open(contexts)


def contexts(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, rng.integers(1, 40)).tolist() for _ in range(count)]


def streams(count: int) -> list[np.random.Generator]:
    return [np.random.default_rng([3, i]) for i in range(count)]


def conversation(session: Any) -> list[list[int]]:
    """Greedy turns of rows that go on, are forked early and late, come and go."""
    session.generate([0, 1, 2])
    session.extend(0, [3, 4, 5])
    fork = session.fork(0, length=len(session.context(0)) - 4)
    session.drop([1])
    late = session.add(contexts(1, seed=9)[0])
    session.prefill([late])
    twin = session.fork(late)
    session.generate([0, 2, fork, late, twin])
    found = [session.context(row) for row in (0, 2, fork, late, twin)]
    session.drop([0, 2, fork, late, twin])
    return found


def test_conversations_are_those_of_the_sampler_in_the_process() -> None:
    model = llama()
    here = Generator(model, stop_ids=STOPS, max_new_tokens=5, temperature=0.7, context_limit=LIMIT)
    expected = conversation(here.open(contexts(3)))
    with FakeServer(model) as one, FakeServer(model) as other:
        session = session_of(fleet_of(one, other), model, contexts(3))
        assert conversation(session) == expected
        assert {request["cache_salt"] for request in one.requests} == {"v0"}
        assert one.requests and other.requests


@pytest.mark.parametrize("entropies", [False, True])
def test_log_probabilities_are_the_servers_and_on_demand_the_trainers_too(entropies: bool) -> None:
    model = llama()
    with FakeServer(model) as server:
        session = session_of(fleet_of(server), model, contexts(4), entropies=entropies)
        turns = session.generate(range(4), streams(4))
    with torch.no_grad():
        logps, found = score(model, [session.context(row) for row in range(4)], temperature=0.7)
    for row, turn in enumerate(turns):
        end = len(session.context(row)) - 1
        span = slice(end - len(turn.ids), end)
        assert turn.sampler_logps == pytest.approx(logps[row, span].tolist(), abs=1e-5)
        assert turn.logps == (pytest.approx(logps[row, span].tolist(), abs=1e-5) if entropies else [])
        assert turn.entropies == (pytest.approx(found[row, span].tolist(), abs=1e-5) if entropies else [])
        assert turn.truncated == (turn.ids[-1] not in STOPS)


def test_a_turn_depends_on_its_own_stream_alone() -> None:
    model = llama()
    with FakeServer(model) as one, FakeServer(model) as other:
        alone = [
            session_of(fleet_of(one), model, [row]).generate([0], [stream])[0].ids
            for row, stream in zip(contexts(4), streams(4))
        ]
        together = session_of(fleet_of(one, other), model, contexts(4)).generate(range(4), streams(4))
        again = session_of(fleet_of(one), model, contexts(4)).generate(range(4), streams(5)[1:])
    assert [turn.ids for turn in together] == alone
    assert [turn.ids for turn in again] != alone


def test_answers_reach_their_rows_in_whatever_order_they_come() -> None:
    model = llama()
    with FakeServer(model) as server:
        expected = [turn.ids for turn in session_of(fleet_of(server), model, contexts(6)).generate(range(6))]
        server.requests.clear()
        server.fault = lambda number: Fault(latency=0.3 - 0.05 * number)  # the first request is answered last
        turns = session_of(fleet_of(server), model, contexts(6)).generate(range(6))
    assert [turn.ids for turn in turns] == expected


def test_no_request_waits_for_another() -> None:
    model = llama()
    all_are_there = threading.Barrier(16)

    def waiting(number: int) -> Fault:
        all_are_there.wait(300)
        return Fault()

    with FakeServer(model, fault=waiting) as server:
        session = session_of(fleet_of(server, seconds=120.0, retries=0), model, [[5, 6]] * 16, max_new_tokens=1)
        session.generate(range(16), streams(16))


def early(answer: dict[str, Any]) -> None:
    """An aborted answer: two tokens of five, of which none ends a turn."""
    found = choice(answer)
    found["token_ids"] = [5, 6]
    found["logprobs"]["content"] = [{"token_id": token, "logprob": -1.0} for token in (5, 6)]
    found["weight_versions"] = [{"version": "v0", "start": 0, "end": 2}]


def beyond(answer: dict[str, Any]) -> None:
    """A token after one that ends the turn."""
    early(answer)
    choice(answer)["token_ids"][0] = choice(answer)["logprobs"]["content"][0]["token_id"] = STOPS[0]


def outside(answer: dict[str, Any]) -> None:
    choice(answer)["token_ids"][0] = place(answer)["token_id"] = VOCABULARY


def versions(*spans: tuple[str, int, int]) -> Callable[[dict[str, Any]], None]:
    def change(answer: dict[str, Any]) -> None:
        end = len(choice(answer)["token_ids"])
        told = [{"version": version, "start": start, "end": min(last, end)} for version, start, last in spans]
        choice(answer)["weight_versions"] = told

    return change


CACHED, LESS, MORE = ({"prompt_tokens_details": {"cached_tokens": count}} for count in ("many", -3, 4))

FAULTS: dict[str, tuple[Fault, str]] = {  # and what the error names, if it goes on
    "it fails": (Fault(status=500, body=b'{"error": "CUDA"}'), "status 500.*CUDA"),
    "it is busy": (Fault(status=429, body=b"later"), "status 429.*later"),
    "no answer": (Fault(drop=True), "cannot be reached"),
    "half an answer": (Fault(cut=True), "cannot be reached.*IncompleteRead"),
    "no JSON": (Fault(body=b"<html>proxy</html>"), "expected JSON.*proxy"),
    "nothing": (Fault(body=b""), "with choices, found None"),
    "another kind of JSON": (Fault(body=b"[1, 2]"), "with choices, found"),
    "a choice without tokens": (Fault(body=b'{"choices": [{"text": "hello"}]}'), "token ids.*hello"),
    "two turns": (spoiled(lambda answer: answer["choices"].append(choice(answer))), "one turn for one.*found 2"),
    "no turn": (spoiled(lambda answer: answer["choices"].clear()), "found 0"),
    "the answer twice": (Fault(twice=True), "expected JSON"),
    "another's answer": (spoiled(lambda answer: answer.update(request_id="generate-tokens-x")), "that to another"),
    "no tokens": (spoiled(lambda answer: choice(answer).update(token_ids=None)), "token ids"),
    "text for a token": (spoiled(lambda answer: choice(answer)["token_ids"].__setitem__(0, "5")), "token ids"),
    "too short": (spoiled(early), "ends the turn, or 5 tokens"),
    "too long": (spoiled(beyond), "no token after one that ends a turn"),
    "a token that is none": (spoiled(outside), "token ids below 40"),
    "no log-probabilities": (spoiled(lambda answer: choice(answer).update(logprobs=None)), "log-probabilities"),
    "fewer log-probabilities": (spoiled(lambda answer: choice(answer)["logprobs"]["content"].pop()), "of others"),
    "log-probabilities of others": (spoiled(lambda answer: place(answer).update(token_id=0)), "those of others"),
    "not a number": (spoiled(nan), "finite log-probabilities"),
    "a probability above 1": (spoiled(lambda answer: place(answer).update(logprob=0.5)), "finite log-probabilities"),
    "a number of hundreds of digits": (spoiled(lambda answer: place(answer).update(logprob=-(10**400))), "finite log"),
    "text for a number": (spoiled(lambda answer: place(answer).update(logprob="-1")), "expected a number, found '-1'"),
    "text for a count": (spoiled(lambda answer: answer.update(usage=CACHED)), "a whole number, found 'many'"),
    "a count below 0": (spoiled(lambda answer: answer.update(usage=LESS)), "0 to 3 cached tokens, found -3"),
    "more than the context": (spoiled(lambda answer: answer.update(usage=MORE)), "0 to 3 cached tokens, found 4"),
    "a hundred thousand brackets": (Fault(body=b"[" * 100000), "expected JSON"),
    "no version": (spoiled(lambda answer: choice(answer).update(weight_versions=None)), "vLLM 0.32 or newer"),
    "a version of some tokens": (spoiled(versions(("v0", 0, 1))), "version of the weights of every token"),
    "a version from a later token": (spoiled(versions(("v0", 1, 9))), "version of the weights of every token"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_an_answer_that_is_none_is_asked_for_again_and_never_taken(name: str) -> None:
    model, (fault, named) = llama(), FAULTS[name]
    rows = [[5, 6, 8]]
    with FakeServer(model) as server:
        fleet = fleet_of(server)
        expected = session_of(fleet, model, rows).generate([0], streams(1))
        assert len(expected[0].ids) >= 3
        server.requests.clear()
        server.fault = lambda number: fault if number < 2 else Fault()
        assert session_of(fleet, model, rows).generate([0], streams(1)) == expected
        keys = [request["request_id"] for request in server.requests]
        assert len(keys) == 3 == len(set(keys)), "each repetition is a request of its own"
        server.fault = lambda number: fault
        session = session_of(fleet, model, rows)
        with pytest.raises(EngineError, match=rf"{server.url}.*{named}.*asked 3 times"):
            session.generate([0], streams(1))
        assert session.context(0) == rows[0]


def test_tokens_from_prefix_caches_are_counted_where_servers_tell() -> None:
    model = llama()
    with FakeServer(model) as server:
        session = session_of(fleet_of(server), model, [[5, 6, 8], [5, 6, 8, 9]])
        session.generate([0, 1], streams(2))
        assert session.prefilled is None and session.reused is None
        told = {"prompt_tokens_details": {"cached_tokens": 2}}
        server.fault = lambda number: spoiled(lambda answer: answer.update(usage=told))
        lengths = [len(session.context(row)) for row in (0, 1)]
        session.generate([0, 1], streams(2))
        assert (session.prefilled, session.reused) == (sum(lengths) - 4, 4)


@pytest.mark.parametrize("fault", [Fault(latency=500.0), Fault(trickle=True)], ids=["silent", "byte by byte"])
def test_a_server_that_does_not_answer_in_time_is_asked_again(fault: Fault) -> None:
    model = llama()
    with FakeServer(model) as server:
        fleet = fleet_of(server, retries=1)
        session = session_of(fleet, model, [[5, 6]])
        session.generate([0], streams(1))  # asks for the model's name too, for which a busy machine needs longer
        server.requests.clear()
        server.fault, fleet.seconds = (lambda number: fault), 0.4
        began = time.monotonic()
        with pytest.raises(EngineError, match=r"no answer to /inference/v1/generate within 0\.\d+ s; asked 2 times"):
            session.generate([0], streams(1))
        assert time.monotonic() - began < 400
        wait_until(lambda: len(server.requests) == 2)


def test_a_late_answer_is_not_taken_for_the_next_ones() -> None:
    """The first attempt's answer comes when the second one has been answered already."""
    model = llama()
    with FakeServer(model) as server:
        expected = session_of(fleet_of(server), model, contexts(2)).generate([0, 1], streams(2))
        server.requests.clear()
        server.fault = lambda number: Fault(latency=6.0) if number < 2 else Fault()
        session = session_of(fleet_of(server, seconds=5.0), model, contexts(2))
        turns = session.generate([0, 1], streams(2))
    assert [turn.ids for turn in turns] == [turn.ids for turn in expected]


def test_the_first_error_does_not_wait_for_slow_answers() -> None:
    model = llama()
    fault = Fault(status=400, body=b"no such thing"), Fault(latency=500.0)
    with FakeServer(model, fault=lambda number: fault[number % 2]) as server:
        session = session_of(fleet_of(server, seconds=480.0), model, [[5], [6]])
        began = time.monotonic()
        with pytest.raises(EngineError, match=r"refuses.*no such thing"):
            session.generate([0, 1], streams(2))
        assert time.monotonic() - began < 400


def test_the_next_server_is_asked_where_one_has_died() -> None:
    model = llama()
    with FakeServer(model) as one, FakeServer(model) as other:
        fleet = fleet_of(one, other)
        expected = session_of(fleet, model, contexts(4)).generate(range(4), streams(4))
        one.stop()
        session = session_of(fleet, model, contexts(4))
        assert session.generate(range(4), streams(4)) == expected
        one.start()


def test_a_server_that_is_not_there_ends_with_its_address() -> None:
    model = llama()
    with FakeServer(model) as server:
        session = session_of(fleet_of(server), model, [[5]])
    with pytest.raises(EngineError, match=rf"{server.url}: cannot be reached.*refused.*asked 3 times"):
        session.generate([0], streams(1))


def test_tokens_of_other_weights_are_never_taken(caplog: pytest.LogCaptureFixture) -> None:
    """It is given the weights again; if it still samples from others, the run ends."""
    model = llama()
    with FakeServer(model) as server:
        loaded: list[str] = []
        fleet = fleet_of(server)
        fleet.engines[0].load = lambda folder, version, seconds: loaded.append(version)  # type: ignore[method-assign]
        for spans in [("v1", 0, 9)], [("v0", 0, 2), ("v1", 2, 9)], [("default", 0, 1), ("v0", 1, 9)]:
            loaded.clear()
            server.requests.clear()
            server.fault = lambda number, spans=spans: spoiled(versions(*spans))  # type: ignore[misc]
            session = session_of(fleet, model, [[5, 6, 8]])
            with caplog.at_level(logging.WARNING), pytest.raises(EngineError, match="expected version v0, found"):
                session.generate([0], streams(1))
            assert session.context(0) == [5, 6, 8]
            assert loaded == ["v0"] * 3 and len(server.requests) == 3
    assert "has other weights" in caplog.text


def test_rows_of_one_prefix_go_to_one_server_until_it_has_too_many() -> None:
    model = llama()
    with FakeServer(model) as one, FakeServer(model) as other:
        session: ServedSession = session_of(fleet_of(one, other), model, [])
        tasks = [session.add([task, 5, 6]) for task in range(4)]
        places = [session._places[row] for row in tasks]
        assert sorted(places) == [0, 0, 1, 1]
        forks = [session.fork(row) for row in tasks] + [session.add([task, 5, 6, 9]) for task in range(4)]
        assert [session._places[row] for row in forks] == 2 * places
        many = [session.fork(tasks[0]) for _ in range(100)]
        share = sum(session._places[row] == places[0] for row in many)
        assert 50 <= share < 100


def test_full_rows_and_old_weights_are_refused() -> None:
    model = llama()
    with FakeServer(model) as server:
        fleet = fleet_of(server)
        session = session_of(fleet, model, [[5] * (LIMIT - 2), [5] * LIMIT])
        with pytest.raises(ContextOverflow):
            session.generate([1])
        assert len(session.generate([0], streams(1))[0].ids) <= 2
        assert session.generate([]) == []
        stale = session_of(fleet, model, [[5]])
        with torch.no_grad():
            model.lm_head.weight.mul_(2.0)
        with pytest.raises(StaleSession):
            stale.generate([0])
        other = session_of(fleet, model, [[5]])
        fleet.serve("/nowhere", "v1", lambda engine: None, load=False)
        with pytest.raises(StaleSession):
            other.generate([0])
        asked = len(server.requests)
        assert asked == 1


def test_an_engine_without_weights_of_the_run_is_not_asked() -> None:
    fleet = Fleet([VllmEngine("http://127.0.0.1:1")], vocabulary=VOCABULARY, seconds=1.0, retries=0)
    with pytest.raises(StaleSession):
        session_of(fleet, llama(), [[5]])
    with pytest.raises(ValueError, match="at least one engine"):
        Fleet([], vocabulary=VOCABULARY, seconds=1.0, retries=0)
    with pytest.raises(ValueError, match="needs the engines"):
        session_of(None, llama(), [[5]])  # type: ignore[arg-type]


class Words:
    """A tokenizer of single letters."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % VOCABULARY for letter in text]}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a short context": ({"context": 32}, "expected a context of at least 64 tokens, found 32"),
    "another tokenizer": ({"tokenizer": lambda text, **_: {"input_ids": [1]}}, r"another tokenizer: .*found \[1\]"),
    "an old version": ({"vllm": "0.19.1"}, "expected vLLM 0.32 or newer, found 0.19.1"),
    "a version that is none": ({"vllm": None}, "expected an answer with version"),
    "raw log-probabilities": ({"logprobs_mode": "raw_logprobs"}, "--logprobs-mode processed_logprobs.*raw_logprobs"),
    "no way to change weights": ({"missing": ("/weight_info",)}, "start it with VLLM_SERVER_DEV_MODE=1"),
    "another program": ({"missing": ("/v1/models",)}, "refuses /v1/models with status 404"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_server_of_something_else_is_refused_with_what_differs(name: str) -> None:
    model, (options, named) = llama(), WRONG[name]
    expected = Expected(LIMIT, "go to", Words()("go to", add_special_tokens=False)["input_ids"], (0.7,))
    with FakeServer(model, **{"tokenizer": Words(), **options}) as server, FakeServer(model, tokenizer=Words()) as good:
        fleet_of(good).check(expected)
        with pytest.raises(EngineError, match=rf"^{server.url}.*{named}"):
            fleet_of(good, server).check(expected)


def test_adapters_of_which_a_server_tells_nonsense_are_refused() -> None:
    model = llama()
    tokens = Words()("go to", add_special_tokens=False)["input_ids"]
    with FakeServer(model, tokenizer=Words(), vllm="dev") as server:
        answer = server.answer
        for lora in ("none", ["none"], {"max_lora_rank": "8"}, {"max_lora_rank": None}):

            def told(path: str, body: Any, lora: Any = lora) -> Any:
                found = answer(path, body)
                return (
                    found if path != "/server_info" else {"vllm_config": found["vllm_config"] | {"lora_config": lora}}
                )

            server.answer = told  # type: ignore[method-assign]
            with pytest.raises(EngineError, match=rf"^{server.url}: expected an answer with max_lora_rank, found"):
                fleet_of(server, retries=0).check(Expected(LIMIT, "go to", tokens, (0.7,), 8))


def test_a_pause_whose_answer_is_lost_is_ended() -> None:
    """Else nobody gets an answer of the server any more, other runs included."""
    model = llama()
    with FakeServer(model) as server:
        answer = server.answer

        def lost(path: str, body: Any) -> Any:
            answer(path, body)
            if path == lost_at[-1]:
                raise RuntimeError("lost on its way")
            return {}

        server.answer = lost  # type: ignore[method-assign]
        lost_at: list[str] = []
        for each in ("/pause", "/update_weight_version", "/collective_rpc"):
            lost_at.append(each)
            with pytest.raises(EngineError):
                VllmEngine(server.url).load("/nowhere", "v1", seconds=5.0)
            assert not server.paused


def test_processes_that_find_a_server_started_again_load_its_weights_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, loading, go_on = llama(), threading.Event(), threading.Event()
    with FakeServer(model) as server, caplog.at_level(logging.INFO):
        loaded: list[str] = []

        def load(folder: str, version: str, *, seconds: float) -> None:
            loaded.append(version)
            loading.set()
            assert go_on.wait(120)
            server.version = version

        processes = [fleet_of(server), fleet_of(server)]
        verified: list[str] = []
        for fleet in processes:
            fleet.serve(str(tmp_path), "v0", lambda engine: verified.append(engine.name), load=False)
            fleet.engines[0].load = load  # type: ignore[method-assign]
        server.version = "default"  # it was started again

        def other() -> None:
            assert loading.wait(120)
            session_of(processes[1], model, [[5]]).generate([0], streams(1))

        def let_go() -> None:
            wait_until(lambda: "another process loads the weights" in caplog.text)
            go_on.set()

        threads = [threading.Thread(target=each) for each in (other, let_go)]
        for thread in threads:
            thread.start()
        session_of(processes[0], model, [[5]]).generate([0], streams(1))
        for thread in threads:
            thread.join()
    assert loaded == ["v0"] and len(verified) == 2


def test_a_server_without_the_token_interface_is_told_how_to_start() -> None:
    model = llama()
    with FakeServer(model, missing=("/inference/v1/generate",)) as server:
        session = session_of(fleet_of(server), model, [[5]])
        with pytest.raises(EngineError, match="start it with --enable-scale-out"):
            session.generate([0], streams(1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "vllm"}, "server: expected addresses with backend=vllm"),
        ({"server": ("http://a:1",)}, "server: expected addresses with backend=vllm alone, found hf"),
        ({"backend": "vllm", "server": ("http://a:1", "http://a:1")}, "server: expected each address once"),
        ({"backend": "vllm", "server": ("node7:8000",)}, "server: expected an address such as"),
        ({"backend": "vllm", "server": ("http://node7:port",)}, "server: "),
        ({"server_tolerance": 0.1}, "server_tolerance: expected it with backend=vllm alone, found hf"),
        ({"server_weights": "/dev/shm"}, "server_weights: expected it with backend=vllm alone, found hf"),
        ({"backend": "vllm", "server": ("http://a:1",), "server_timeout": 0.0}, "server_timeout"),
        ({"backend": "vllm", "server": ("http://a:1",), "server_retries": -1}, "server_retries"),
        ({"backend": "vllm", "server": ("http://a:1",), "server_tolerance": 0.0}, "server_tolerance"),
    ],
)
def test_settings_that_name_no_server_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(Args(**settings))


def test_actions_in_threads_come_back_in_order_and_stop_each_other() -> None:
    told: list[bool] = []

    def fail(stop: threading.Event) -> int:
        raise KeyError("first")

    def wait(stop: threading.Event) -> int:
        told.append(stop.wait(120))
        return 1

    assert served.at_once([lambda _, i=i: i for i in range(50)], most=3) == list(range(50))  # type: ignore[misc]
    assert served.at_once([], most=3) == []
    with pytest.raises(KeyError):
        served.at_once([wait, fail, *itertools.repeat(wait, 5)], most=2)
    wait_until(lambda: told == [True])


def test_what_is_sent_is_the_request_alone() -> None:
    """No filter of tokens of the model's generation config, and no other end of a turn, takes part."""
    model = llama()
    with FakeServer(model) as server:
        session_of(fleet_of(server), model, [[5, 6]]).generate([0], streams(1))
        (body,) = json.loads(json.dumps(server.requests))
    seed = int(streams(1)[0].integers(2**31))
    sampling = body["sampling_params"]
    assert body["token_ids"] == [5, 6] and body["model"] == "policy"
    assert (sampling["seed"], sampling["temperature"], sampling["max_tokens"]) == (seed, 0.7, 5)
    assert sampling["stop_token_ids"] == list(STOPS) and sampling["ignore_eos"] is True
    assert (sampling["top_p"], sampling["top_k"], sampling["min_p"], sampling["repetition_penalty"]) == (1, 0, 0, 1)
