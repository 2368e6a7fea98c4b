"""Prompts: the texts for models and how their answers are read, the same for training and for the adapters."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import pytest
from chat_stub import chat_stub
from components import missing

import sandboxgym  # noqa: F401
from sandboxgym.adapters.prompts import (
    ANYWHERE,
    FORMAT,
    Choice,
    Exchange,
    Prompt,
    React,
    UnreadableAnswer,
    make_prompt,
)
from sandboxgym.adapters.trl import TRLEnvironments
from sandboxgym.registration import card_of
from sandboxgym.tree import Envs, ForkAt, rollout

COMMANDS = {"admissible_commands": ["go to desk 1", "look"]}


@pytest.mark.parametrize(
    ("answer", "action"),
    [
        ("<action>look</action>", "look"),
        ("<think>hm</think><action> go to desk 1\n</action> ", "go to desk 1"),
        ("<think>I could <action>open</action>.</think>\n<action>look</action>", "look"),
        ("<think>a</think><think>b</think> so: <action>look</action> done", "look"),
        ("hm\n</think>\n\n<action>look</action>", "look"),  # the template has opened the thought
        ("<action>\ncd src\ngrep -n 'a < b' x.py\n</action>", "cd src\ngrep -n 'a < b' x.py"),
    ],
)
def test_an_action_is_read_from_its_tags(answer: str, action: str) -> None:
    assert React().read(answer, {}) == action
    assert React().hear(answer, {}) == (action, "")


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        ("look", "no action"),
        ("", "no action"),
        ("<action>lo", "no action"),  # cut off: half a command is not carried out
        ("<action> </action>", "no action"),
        ("<think>hm <action>look</action></think>", "no action"),
        ("<action>look</action><action>wait</action>", "several actions"),
        ("<action>look</action> </action>", "several actions"),
    ],
)
def test_an_answer_without_exactly_one_action_is_not_carried_out(answer: str, complaint: str) -> None:
    with pytest.raises(UnreadableAnswer, match=complaint):
        React().read(answer, {})
    assert React().hear(answer, {})[0] == "" and complaint in React().hear(answer, {})[1]


@pytest.mark.parametrize("prompt", [Prompt(), React(), Choice()])
@pytest.mark.parametrize("action", ["look", "search[red shoes]", "cat <<EOF > a\n<b>\nEOF"])
def test_what_is_written_can_be_read(prompt: Prompt, action: str) -> None:
    assert prompt.read(prompt.write(action, COMMANDS), COMMANDS) == action


def test_the_plain_prompt_tells_and_takes_everything_as_it_is() -> None:
    prompt = make_prompt("plain", "sandboxgym/ALFWorld-v0")
    past = [Exchange("room", "room", "look", "look")]
    assert prompt.message(past, " a mug\n", COMMANDS) == " a mug\n"
    assert prompt.hear(" <action>x ", {}) == (" <action>x ", "")
    assert prompt.system is None


@pytest.mark.parametrize(
    ("env_id", "family"),
    [
        ("sandboxgym/ALFWorld-v0", "ALFWorld"),
        ("sandboxgym/WebShop-v0", "WebShop"),
        ("sandboxgym/WebShopBrowser-v0", "WebShop"),
        ("sandboxgym/SWEBench-v0", "SWEBench"),
        ("sandboxgym:sandboxgym/SWEBench-v3", "SWEBench"),
        ("toys/Dice-v0", None),
    ],
)
def test_every_environment_has_its_system_prompt(env_id: str, family: str | None) -> None:
    system = make_prompt("react", env_id).system
    assert system is not None and system.endswith(FORMAT)
    told = card_of(f"sandboxgym/{family}-v0").system_prompt if family else ANYWHERE
    assert told and system.startswith(told)
    assert make_prompt("react", env_id, system="Do.").system == "Do."


@pytest.mark.parametrize(
    ("name", "history", "complaint"),
    [("act", 0, "prompt: expected plain, react or choice"), ("react", -1, "expected 0"), ("plain", -1, "expected 0")],
)
def test_what_cannot_be_is_refused(name: Any, history: int, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        make_prompt(name, "x-v0", history=history)


def test_possible_actions_are_told_where_there_are_any() -> None:
    prompt = React(list_actions=True)
    assert prompt.show("Hi.", COMMANDS) == "Hi.\nYou can: go to desk 1, look"
    assert prompt.show("Hi.", {}) == "Hi."
    assert React().show("Hi.", COMMANDS) == "Hi."


def test_a_number_chooses_among_the_possible_actions() -> None:
    prompt = make_prompt("choice", "sandboxgym/ALFWorld-v0")
    assert prompt.show("Hi.", COMMANDS) == "Hi.\n1: go to desk 1\n2: look"
    assert (prompt.read(" 2\n", COMMANDS), prompt.write("look", COMMANDS)) == ("look", "2")
    assert prompt.read("search[2]", COMMANDS) == "search[2]"  # what is in no list can be said
    for answer in ("0", "3", "99"):
        assert prompt.hear(answer, COMMANDS) == ("", f"There is no action {answer}. Choose from 1 to 2.")
    assert (prompt.show("Hi.", {}), prompt.read("2", {})) == ("Hi.", "2")  # nothing is listed: the plain prompt
    window = make_prompt("choice", "sandboxgym/ALFWorld-v0", history=1)
    assert window.message([Exchange("o0", "o0", "2", "look")], "o1", COMMANDS).startswith("o0\n> look\no1\n1: ")


def test_an_unreadable_answer_is_told_of_once() -> None:
    prompt = React()
    bad = Exchange("o0", "o0", "look", *prompt.hear("look", {}))
    good = Exchange("o1", "o1", "<action>look</action>", "look")
    assert prompt.message([bad], "o1", {}) == "Your answer had no action. Write one between <action> and </action>.\no1"
    assert prompt.message([bad, good], "o2", {}) == "o2"


def test_a_window_shows_the_beginning_and_the_last_turns() -> None:
    prompt = make_prompt("react", "toys/Dice-v0", system="S", history=2, list_actions=True)
    past = [Exchange(f"o{i}", "as shown", f"<action>a{i}</action>", f"a{i}") for i in range(4)]
    assert prompt.message([], "o0", {}) == "o0"
    assert prompt.message(past[:1], "o1", {}) == "o0\n> a0\no1"
    assert prompt.message(past[:2], "o2", {}) == "o0\n> a0\no1\n> a1\no2"
    assert prompt.message(past[:3], "o3", {}) == "o0\n[1 turn left out]\n> a1\no2\n> a2\no3"
    shown = prompt.message(past, "o4", {"admissible_commands": ["x"]})
    assert shown == "o0\n[2 turns left out]\n> a2\no3\n> a3\no4\nYou can: x"
    assert prompt.messages(past, "o4", {}) == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": prompt.message(past, "o4", {})},
    ]


def test_without_a_window_the_conversation_is_as_it_was_told() -> None:
    past = [Exchange("o0", "o0 as shown", "<action>a0</action>", "a0")]
    assert React(system="S").messages(past, "o1", {}) == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "o0 as shown"},
        {"role": "assistant", "content": "<action>a0</action>"},
        {"role": "user", "content": "o1"},
    ]


@pytest.mark.parametrize("env_id", ["sandboxgym/ALFWorld-v0", "sandboxgym/WebShop-v0"])
def test_the_empty_action_is_invalid_and_changes_nothing(env_id: str) -> None:
    env = gym.make(env_id)
    before = env.reset(seed=0)[1]["state_hash"]
    _, reward, terminated, _, info = env.step("")
    assert (reward, terminated, info["valid_action"], info["state_hash"]) == (0.0, False, False, before)
    env.close()


# The bridges


@pytest.fixture(scope="module")
def envs():
    with Envs(lambda: gym.make("sandboxgym/ALFWorld-v0", max_episode_steps=3)) as made:
        yield made


@pytest.mark.parametrize("history", [0, 1])
def test_an_endpoint_is_told_and_read_as_the_prompt_says(envs, history: int) -> None:
    try:
        from sandboxgym.adapters.openai import ChatEndpoint
    except ImportError:
        missing("openai", "the package openai is not installed")
    prompt = make_prompt("react", "sandboxgym/ALFWorld-v0", list_actions=True, history=history)
    answers = iter(["<think>hm</think><action>look</action>", "look", "<action>inventory</action>"])

    def answer(request: dict[str, Any]) -> Any:
        return next(answers), [-1.0, -1.0], [-0.1]

    with chat_stub(answer) as stub, ChatEndpoint.connect(stub.url, "stub", prompt=prompt) as endpoint:
        (tree,) = rollout(envs, endpoint, ForkAt([], width=1), tasks=[0])
        requests = list(stub.requests)
    edges = tree.paths[0].edges
    assert [(edge.action.text, edge.valid) for edge in edges] == [("look", True), ("", False), ("inventory", True)]
    assert all(request["messages"][0] == {"role": "system", "content": prompt.system} for request in requests)
    assert [len(request["messages"]) for request in requests] == ([2, 4, 6] if history == 0 else [2, 2, 2])
    last = requests[-1]["messages"][-1]["content"]
    assert last.startswith("Your answer had no action.") and "You can: " in last
    assert ("[1 turn left out]" in last) == bool(history)
    assert not math.isnan(edges[0].action.entropy)


def test_trl_is_told_and_read_as_the_prompt_says() -> None:
    prompt = make_prompt("react", "sandboxgym/ALFWorld-v0", list_actions=True)
    with TRLEnvironments(lambda: gym.make("sandboxgym/ALFWorld-v0"), prompt=prompt) as factory:
        environment = factory()
        environment.reset(task=0)
        assert "You can: " in environment.step("<think>hm</think><action>look</action>")
        with pytest.raises(UnreadableAnswer):
            environment.step("look")
        assert environment.get_reward() == 0.0  # the model's error, not the environment's
    with pytest.raises(ValueError, match="found one that numbers actions"):
        TRLEnvironments(lambda: gym.make("sandboxgym/ALFWorld-v0"), prompt=Choice())
    with pytest.raises(ValueError, match="found history=2"):
        TRLEnvironments(lambda: gym.make("sandboxgym/ALFWorld-v0"), prompt=React(history=2))
