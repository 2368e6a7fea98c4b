"""The adapters: an environment driven by TRL, a chat endpoint as a policy."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gymnasium as gym
import pytest
from chat_stub import ChatStub, chat_stub, commands
from components import missing

import sandboxgym
from sandboxgym.adapters.trl import OVER, TRLEnvironment, TRLEnvironments
from sandboxgym.tree import Context, Envs, ForkAt, TopEntropy, rollout, rollout_async

Starts = list[tuple[Any, str]]


# TRL


@pytest.fixture
def starts() -> Starts:
    return []


def begin(starts: Starts) -> Callable[[gym.Env[Any, Any], dict[str, Any]], str]:
    """Goes to a state that differs each time, three throws into an episode."""

    def start(env: gym.Env[Any, Any], row: dict[str, Any]) -> str:
        env.reset(seed=len(starts))
        for _ in range(3):
            env.step(0)
        starts.append((row.get("task"), str(sandboxgym.snapshot(env).digest)))
        return f"start {len(starts)}"

    return start


def dice() -> gym.Env[Any, Any]:
    return gym.make("toys/Dice-v0")


def alfworld() -> gym.Env[Any, Any]:
    return gym.make("sandboxgym/ALFWorld-v0")


def test_the_generations_of_a_prompt_start_from_one_fork_point(starts):
    with TRLEnvironments(dice, read=int, start=begin(starts), generations=4) as factory:
        environments = [factory() for _ in range(8)]
        texts = [e.reset(task=task) for e, task in zip(environments, [7] * 4 + [9] * 4)]
        assert texts == ["start 1"] * 4 + ["start 2"] * 4
        assert [task for task, _ in starts] == [7, 9]
        observations = [e._env.unwrapped.last.observation for e in environments]
        assert len({str(o) for o in observations[:4]}) == len({str(o) for o in observations[4:]}) == 1


def test_a_row_that_comes_again_gets_a_new_fork_point_after_its_generations(starts):
    with TRLEnvironments(dice, read=int, start=begin(starts), generations=2) as factory:
        environment = factory()
        assert [environment.reset(task=7) for _ in range(5)] == ["start 1", "start 1", "start 2", "start 2", "start 3"]


def test_a_group_that_is_cut_short_does_not_shift_the_next(starts):
    with TRLEnvironments(dice, read=int, start=begin(starts), generations=3) as factory:
        environment = factory()
        tasks = [1, 1, 2, 2, 2, 3]
        assert [environment.reset(task=task)[-1] for task in tasks] == ["1", "1", "2", "2", "2", "3"]


def test_rollouts_of_a_group_have_random_streams_of_their_own(starts):
    def throws(seed: int) -> list[str]:
        made = TRLEnvironments(dice, read=int, start=begin([]), generations=6, seed=seed)
        with made as factory:
            environment = factory()
            told = []
            for _ in range(6):
                environment.reset()
                told.append(" ".join(environment.step("0") for _ in range(4)))
            return told

    first = throws(seed=0)
    assert len(set(first)) == 6
    assert throws(seed=0) == first != throws(seed=1)


def test_the_reward_is_what_the_environment_gave_since_the_fork_point():
    def before_the_goal(env: gym.Env[Any, Any], row: dict[str, Any]) -> str:
        observation, info = env.reset(options={"task": row["task"]})
        expert, snaps = env.unwrapped.expert(), []
        expert.reset(observation)
        while not info["success"]:
            snaps.append(sandboxgym.snapshot(env))
            row_action[0] = expert.act(observation)
            observation, *_, info = env.step(row_action[0])
        return sandboxgym.restore(env, snaps[-1])[0]

    row_action = [""]
    with TRLEnvironments(alfworld, start=before_the_goal, generations=2) as factory:
        winner, loser = factory(), factory()
        assert winner.reset(task=3) == loser.reset(task=3)
        assert OVER in winner.step(f" {row_action[0]}\n")
        assert OVER not in loser.step("look")
        assert (winner.get_reward(), loser.get_reward()) == (1.0, 0.0)
        assert winner.step("look") == OVER  # no step beyond the end, no reward twice
        assert winner.get_reward() == 1.0
        winner.reset(task=3)
        assert winner.get_reward() == 0.0


def test_rewards_add_up():
    class Paying(gym.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            observation, _, *rest = self.env.step(action)
            return observation, float(action == "look"), *rest

    with TRLEnvironments(lambda: Paying(alfworld())) as factory:
        environment = factory()
        environment.reset(task=0)
        for action in ("look", "inventory", "look", "inventory"):
            environment.step(action)
        assert environment.get_reward() == 2.0


def test_without_generations_every_rollout_is_started_by_itself(starts):
    with TRLEnvironments(dice, read=int, start=begin(starts)) as factory:
        environment = factory()
        assert [environment.reset(task=7) for _ in range(3)] == ["start 1", "start 2", "start 3"]


def test_a_failed_environment_is_an_error_and_not_a_reward():
    class Broken(gym.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            raise OSError("the sandbox is gone")

    with TRLEnvironments(lambda: Broken(alfworld())) as factory:
        environment = factory()
        environment.reset(task=0)
        with pytest.raises(OSError, match="the sandbox is gone"):
            environment.step("look")
        with pytest.raises(RuntimeError, match=r"failed in this rollout.*the sandbox is gone"):
            environment.get_reward()
        environment.reset(task=0)
        assert environment.get_reward() == 0.0


def test_the_model_is_given_one_tool():
    """TRL exposes every public method but ``reset`` and ``get_reward``, and wants types and a documented argument."""
    public = {name for name, _ in inspect.getmembers(TRLEnvironment, inspect.isfunction) if not name.startswith("_")}
    assert public == {"reset", "step", "get_reward"}
    try:
        from transformers.utils import get_json_schema
    except ImportError:
        missing("transformers", "transformers is not installed")
    function = get_json_schema(TRLEnvironment.step)["function"]
    assert function["name"] == "step"
    assert function["parameters"]["properties"]["action"]["type"] == "string"


def test_an_answer_that_cannot_be_read_is_the_models_mistake(starts):
    with TRLEnvironments(dice, read=int, start=begin(starts)) as factory:
        environment = factory()
        environment.reset()
        with pytest.raises(ValueError, match="invalid literal"):
            environment.step("one")
        assert environment.get_reward() == 0.0


@pytest.mark.parametrize("generations", [0, -1])
def test_generations_must_be_positive(generations):
    with pytest.raises(ValueError, match=f"generations={generations}"):
        TRLEnvironments(alfworld, generations=generations)


# Chat endpoints


@pytest.fixture
def openai() -> Any:
    try:
        import openai
    except ImportError:
        missing("openai", "the package openai is not installed")
    return openai


def fair(request: dict[str, Any]) -> Any:
    """Any admissible command, by the request's seed; uncertain where the conversation is three turns old."""
    offered = commands(request)
    turn = sum(message["role"] == "assistant" for message in request["messages"])
    top = [math.log(0.25)] * 4 if turn == 3 else [math.log(0.9)]
    return offered[request["seed"] % len(offered)] + "\nbecause", [-0.5, -1.0], top


@pytest.fixture
def endpoint(openai) -> Iterator[ChatStub]:
    with chat_stub(fair) as stub:
        yield stub


@pytest.fixture
def envs() -> Iterator[Envs]:
    with Envs(lambda: gym.make("sandboxgym/ALFWorld-v0", max_episode_steps=6)) as made:
        yield made


@pytest.fixture
def policy(openai) -> Iterator[Any]:
    """Makes policies that ask a stub, and closes their connections."""
    from sandboxgym.adapters.openai import ChatEndpoint

    with contextlib.ExitStack() as stack:
        yield lambda stub, **settings: stack.enter_context(
            ChatEndpoint.connect(stub.url, "stub", **{"max_retries": 0, **settings})
        )


def test_siblings_start_where_the_endpoint_was_least_certain(endpoint, envs, policy):
    trees = rollout(envs, policy(endpoint), TopEntropy(1, width=3), tasks=[0, 1])
    for tree in trees:
        assert [node.depth for node in tree.branch_nodes] == [3]
        assert [len(node.children) for node in tree.branch_nodes] == [3]
        assert all(edge.valid for edge in tree.edges())
        entropies = [edge.action.entropy for edge in tree.paths[0].edges]
        assert entropies[3] == pytest.approx(math.log(4))
        assert entropies[0] == pytest.approx(-0.9 * math.log(0.9) - 0.1 * math.log(0.1))
        assert all(edge.action.logp == -1.5 for edge in tree.edges())
        assert {(edge.action.position, edge.action.tokens) for edge in tree.edges()} == {(7, 2)}
    assert len(endpoint.requests) == sum(tree.env_steps for tree in trees)
    assert all(request["logprobs"] and request["top_logprobs"] == 20 for request in endpoint.requests)


def test_a_fork_goes_on_with_the_conversation_of_its_node(endpoint, envs, policy):
    (tree,) = rollout(envs, policy(endpoint, system="Play."), ForkAt([2], width=2), tasks=[0])
    backbone, sibling = tree.paths
    before = backbone.edges[1].action.memory
    assert [m["role"] for m in before] == ["system", "user", "assistant", "user", "assistant"]
    assert before[0]["content"] == "Play."
    assert sibling.edges[0].action.memory[:5] == backbone.edges[2].action.memory[:5] == before
    told = [m["content"].partition("\n")[0] for m in backbone.edges[-1].action.memory if m["role"] == "assistant"]
    assert told == [edge.action.text for edge in backbone.from_root()]


def test_seeds_make_rollouts_repeat(endpoint, envs, policy):
    def played(seed: int) -> list[str]:
        trees = rollout(envs, policy(endpoint), ForkAt([1], width=2), tasks=[0, 1], seed=(seed,))
        return [edge.action.text for tree in trees for edge in tree.edges()]

    assert played(0) == played(0) != played(1)


def test_paths_that_advance_by_themselves_are_those_of_lockstep(endpoint, envs, policy):
    def told(trees: Any) -> list[Any]:
        return [
            (tree.index, path.key, [edge.action.text for edge in path.edges]) for tree in trees for path in tree.paths
        ]

    schedule = TopEntropy(1, width=3)
    expected = rollout(envs, policy(endpoint), schedule, tasks=[0, 1])
    chat = policy(endpoint, concurrency=2)
    found = asyncio.run(rollout_async(envs, chat.each, schedule, tasks=[0, 1]))
    assert told(found) == told(expected) and sum(len(tree.paths) for tree in found) == 6
    chat.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("sandboxgym-chat")]


def test_an_error_of_the_endpoint_ends_an_asynchronous_rollout(openai, envs, policy):
    with (
        chat_stub(lambda request: (400, {"error": {"message": "no such thing"}})) as stub,
        pytest.raises(openai.BadRequestError, match="no such thing"),
    ):
        asyncio.run(rollout_async(envs, policy(stub).each, TopEntropy(1, width=3), tasks=[0, 1]))


def test_connections_of_its_own_are_closed_and_those_of_a_given_client_are_not(openai, endpoint, envs):
    from sandboxgym.adapters.openai import ChatEndpoint

    with ChatEndpoint.connect(endpoint.url, "stub") as own:
        rollout(envs, own, ForkAt([], width=1), tasks=[0])
        assert not own.client.is_closed()
    assert own.client.is_closed()
    with openai.OpenAI(base_url=endpoint.url, api_key="none") as client:
        with ChatEndpoint(client, "stub") as given:
            rollout(envs, given, ForkAt([], width=1), tasks=[0])
        assert not client.is_closed()


def test_live_paths_are_asked_at_the_same_time(openai, envs, policy):
    everyone = threading.Barrier(4)  # each answer waits for all four requests: one at a time would never end

    def together(request: dict[str, Any]) -> Any:
        try:
            everyone.wait(timeout=120)
        except threading.BrokenBarrierError:
            return 500, {}
        return fair(request)

    with chat_stub(together) as stub:
        trees = rollout(envs, policy(stub), ForkAt([], width=1, roots=4), tasks=[0])
        assert trees[0].env_steps == 24
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("sandboxgym-chat")]


def test_a_request_that_fails_is_tried_again(openai, envs, policy):
    failing = iter([True, False, True])

    def flaky(request: dict[str, Any]) -> Any:
        return (500, {"error": {"message": "busy"}}) if next(failing, False) else fair(request)

    with chat_stub(flaky) as stub:
        (tree,) = rollout(envs, policy(stub, max_retries=2), ForkAt([], width=1), tasks=[0])
        assert (tree.env_steps, len(stub.requests)) == (6, 8)


def test_what_the_client_gives_up_on_is_raised(openai, envs, policy):
    with chat_stub(lambda request: (500, {"error": {"message": "down"}})) as stub:
        with pytest.raises(openai.InternalServerError, match="down"):
            rollout(envs, policy(stub), ForkAt([], width=1, roots=3), tasks=[0])
        with pytest.raises(openai.APIConnectionError):
            rollout(envs, policy(ChatStub(fair, url="http://127.0.0.1:9/v1")), ForkAt([], width=1), tasks=[0])


def test_a_silent_endpoint_times_out(openai, envs, policy):
    release = threading.Event()

    def silent(request: dict[str, Any]) -> Any:
        release.wait(30)
        return fair(request)

    with chat_stub(silent) as stub:
        try:
            with pytest.raises(openai.APITimeoutError):
                rollout(envs, policy(stub, timeout=0.2), ForkAt([], width=1), tasks=[0])
        finally:
            release.set()


@pytest.mark.parametrize(
    "error",
    [
        {"code": "context_length_exceeded", "message": "too long"},
        {"message": "This model's maximum context length is 4096 tokens."},
    ],
    ids=["OpenAI", "vLLM"],
)
def test_a_full_context_ends_the_path(openai, envs, policy, error):
    def small(request: dict[str, Any]) -> Any:
        return (400, {"error": error}) if len(request["messages"]) > 6 else fair(request)

    with chat_stub(small) as stub:
        (tree,) = rollout(envs, policy(stub), ForkAt([], width=1), tasks=[0])
        assert [edge.truncated for edge in tree.paths[0].edges] == [False, False, True]


def test_an_endpoint_without_log_probabilities_is_refused_unless_asked_for(openai, envs, policy):
    def bare(request: dict[str, Any]) -> Any:
        assert ("logprobs" in request) == ("top_logprobs" in request)
        return "look", [], []

    with chat_stub(bare) as stub:
        with pytest.raises(ValueError, match="top_logprobs=0"):
            rollout(envs, policy(stub), ForkAt([], width=1), tasks=[0])
        (tree,) = rollout(envs, policy(stub, top_logprobs=0), ForkAt([], width=1), tasks=[0])
        assert tree.env_steps == 6
        assert all(math.isnan(edge.action.entropy) for edge in tree.edges())
        assert "logprobs" not in stub.requests[-1]


def test_how_it_shows_and_reads_is_the_users(endpoint, envs, policy):
    def shown(context: Context) -> str:
        return f"turn {context.depth}\nYou can:\nlook"

    chat = policy(endpoint, show=shown, read=str.upper, max_tokens=None, temperature=0.5)
    (tree,) = rollout(envs, chat, ForkAt([], width=1), tasks=[0])
    assert [edge.action.text for edge in tree.edges()] == ["LOOK\nBECAUSE"] * 6
    assert "turn 5" in endpoint.requests[-1]["messages"][-1]["content"]
    assert "max_tokens" not in endpoint.requests[0]
    assert endpoint.requests[0]["temperature"] == 0.5


@pytest.mark.parametrize("known", [[], [0.0], [math.log(0.5)] * 2, [math.log(0.5), -math.inf], [1e-9]])
def test_entropy_counts_the_rest_as_one_outcome(known: Sequence[float]):
    from sandboxgym.adapters.openai import entropy

    expected = {0: 0.0, 1: 0.0, 2: math.log(2)}[len(known)]
    assert entropy(known) == pytest.approx(expected, abs=1e-8)


# Without the packages


def test_the_adapters_are_imported_without_the_packages_they_serve(tmp_path):
    code = """
import sys
for name in ("openai", "trl", "verl", "transfer_queue", "skyrl", "transformers", "torch"):
    sys.modules[name] = None  # as if not installed
import sandboxgym.adapters.trl, sandboxgym.adapters.verl, sandboxgym.adapters.skyrl
from sandboxgym.adapters.openai import ChatEndpoint
try:
    ChatEndpoint.connect("http://localhost/v1", "model")
except ImportError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert result.stdout == 'a chat endpoint needs the package openai: pip install "sandboxgym[openai]"\n'
