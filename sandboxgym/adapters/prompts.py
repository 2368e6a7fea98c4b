"""What a model is told of an episode and how its answers are read: one object for training, evaluation and adapters.

>>> prompt = make_prompt("react", "sandboxgym/ALFWorld-v0", list_actions=True)
>>> print(prompt.show("You see a desk 1.", {"admissible_commands": ["go to desk 1", "look"]}))
You see a desk 1.
You can: go to desk 1, look
>>> prompt.read("<think>The mug may be there.</think><action>go to desk 1</action>", {})
'go to desk 1'

What this module promises:

1. An answer is read whole or not at all: without exactly one action it raises `UnreadableAnswer`, whose message tells
   the model what is expected. Nothing is guessed, and what was thought is never carried out.
2. ``read(write(action, info), info)`` is the action, for `React` without white space around it and if it holds none of
   the tags, for `Choice` if it is no bare number.
3. What is shown of a step depends on the episode so far alone, so that forks are told what their path was told.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from sandboxgym.registration import card_of

PromptName = Literal["plain", "react", "choice"]

_ACTION = re.compile(r"<action>(.*)</action>", re.DOTALL)

FORMAT = """Answer in this form, every time:
<think>what you know by now, what is still missing, and what to do next</think>
<action>one action</action>
Only the action is carried out, exactly as you write it. You are then told what came of it."""
ANYWHERE = "You act in an environment that answers in text, one action a turn."
"""What an agent is told of an environment whose card has no system prompt."""


class UnreadableAnswer(ValueError):
    """An answer without exactly one action. Its message is meant for the model."""


@dataclass(frozen=True)
class Exchange:
    """One turn of a conversation that is over."""

    observation: str
    """Of the environment."""
    shown: str
    """The message that it was shown in."""
    answer: str
    """What the model said to it."""
    action: str
    """What was carried out; empty if the answer could not be read."""
    complaint: str = ""
    """Why it could not."""


@dataclass(frozen=True)
class Prompt:
    """The plain prompt: a message is the observation, an answer is the action. For policies made for one environment.

    Args:
        system: system prompt; None for what the chat template does without one.
        list_actions: name the actions that are possible, where ``info["admissible_commands"]`` does.
        history: 0: the conversation grows turn by turn. k > 0: every turn is a conversation of its own, one message
            with the first observation and the last k turns, however long the episode. What was sampled before is then
            not part of the context, so in training each turn is a row of its own and shares nothing with the others.

    Raises:
        ValueError: ``history`` is negative.
    """

    system: str | None = None
    list_actions: bool = False
    history: int = 0

    opening: ClassVar[str] = ""
    """What an answer begins with before anything is decided."""
    decision: ClassVar[str] = ""
    """What stands before the action in an answer; empty where the action is all of it."""

    def __post_init__(self) -> None:
        if self.history < 0:
            raise ValueError(f"history: expected 0 (all turns) or more, found {self.history}")

    def show(self, observation: Any, info: Mapping[str, Any], *, complaint: str = "") -> str:
        """An observation with what goes with it: what was wrong with the last answer, and what can be done."""
        commands = info.get("admissible_commands") if self.list_actions else None
        offered = f"You can: {', '.join(commands)}" if commands else ""
        return "\n".join([*filter(None, [complaint]), str(observation), *filter(None, [offered])])

    def message(self, past: Sequence[Exchange], observation: Any, info: Mapping[str, Any]) -> str:
        """The user's message of a turn: `show`, or with a ``history`` the episode in short.

        Args:
            past: the episode's turns so far.
            observation: of the environment, now.
            info: likewise.
        """
        complaint = past[-1].complaint if past else ""
        if not self.history or not past:
            return self.show(observation, info, complaint=complaint)
        recent = past[-self.history :]
        after = [*(exchange.observation for exchange in recent[1:]), str(observation)]
        lines = [past[0].observation]
        if left_out := len(past) - len(recent):
            lines.append(f"[{left_out} {'turn' if left_out == 1 else 'turns'} left out]")
        for exchange, following in zip(recent, after, strict=True):
            lines += [f"> {exchange.action}", following]
        return self.show("\n".join(lines), info, complaint=complaint)

    def messages(self, past: Sequence[Exchange], observation: Any, info: Mapping[str, Any]) -> list[dict[str, str]]:
        """The whole conversation as chat messages, up to the user's message of this turn."""
        chat = [{"role": "system", "content": self.system}] if self.system else []
        for exchange in () if self.history else past:
            chat.append({"role": "user", "content": exchange.shown})
            chat.append({"role": "assistant", "content": exchange.answer})
        return [*chat, {"role": "user", "content": self.message(past, observation, info)}]

    def read(self, answer: str, info: Mapping[str, Any]) -> str:
        """The action in an answer.

        Args:
            answer: of the model.
            info: of the environment, as it was when the model was asked.

        Raises:
            UnreadableAnswer: there is none, or there are several.
        """
        return answer

    def hear(self, answer: str, info: Mapping[str, Any]) -> tuple[str, str]:
        """`read` for loops that go on: (action, "") or ("", complaint).

        The empty action is none: this package's environments call it invalid, and nothing changes by it.
        """
        try:
            return self.read(answer, info), ""
        except UnreadableAnswer as error:
            return "", str(error)

    def write(self, action: str, info: Mapping[str, Any]) -> str:
        """An answer with this action: what a demonstration teaches."""
        return action


@dataclass(frozen=True)
class React(Prompt):
    """Thoughts between ``<think>`` tags, then one action between ``<action>`` tags (in the manner of ReAct; Yao et al.,
    2023).

    Thoughts may be missing: models with a reasoning block of their own have had them before. All up to the last
    ``</think>`` is thought; white space around the action is not part of it.
    """

    opening: ClassVar[str] = "<think>"
    decision: ClassVar[str] = "<action"

    def read(self, answer: str, info: Mapping[str, Any]) -> str:
        """The text between the tags."""
        found = _ACTION.search(answer.rpartition("</think>")[2])
        if found is None or not found[1].strip():
            raise UnreadableAnswer("Your answer had no action. Write one between <action> and </action>.")
        if "<action>" in found[1] or "</action>" in found[1]:
            raise UnreadableAnswer("Your answer had several actions. Write one between <action> and </action>.")
        return found[1].strip()

    def write(self, action: str, info: Mapping[str, Any]) -> str:
        """Without a thought: scripted experts have none."""
        return f"<action>{action}</action>"


@dataclass(frozen=True)
class Choice(Prompt):
    """The possible actions are numbered, and a number is an answer: what would be long to spell takes one word.

    An answer that is no bare number is an action in words, so that what no list can hold (another query) remains
    possible. Where the environment names no actions, this is the plain prompt.
    """

    def show(self, observation: Any, info: Mapping[str, Any], *, complaint: str = "") -> str:
        """An observation, and under it one line for each possible action."""
        offered = [f"{number}: {command}" for number, command in enumerate(_commands(info), 1)]
        return "\n".join([*filter(None, [complaint]), str(observation), *offered])

    def read(self, answer: str, info: Mapping[str, Any]) -> str:
        """The action of that number, or the answer itself."""
        commands, text = _commands(info), answer.strip()
        if not commands or not (text.isascii() and text.isdigit()):
            return answer
        if not 1 <= int(text) <= len(commands):
            raise UnreadableAnswer(f"There is no action {text}. Choose from 1 to {len(commands)}.")
        return commands[int(text) - 1]

    def write(self, action: str, info: Mapping[str, Any]) -> str:
        """Its number, if it has one."""
        commands = _commands(info)
        return str(commands.index(action) + 1) if action in commands else action


def _commands(info: Mapping[str, Any]) -> list[str]:
    return list(info.get("admissible_commands") or ())


def make_prompt(
    name: PromptName, env_id: str, *, system: str | None = None, list_actions: bool = False, history: int = 0
) -> Prompt:
    """The prompt of that name for an environment.

    Args:
        name: ``"plain"``, ``"react"`` or ``"choice"``.
        env_id: its Gymnasium id. ``react`` tells what the environment's card has for it (`EnvCard`), and little of an
            environment without one.
        system: in place of what it would tell.
        list_actions: see `Prompt`; ``choice`` lists them anyway.
        history: see `Prompt`.

    Raises:
        ValueError: there is no such prompt, or ``history`` is negative.
    """
    if name == "plain":
        return Prompt(system, list_actions, history)
    if name == "choice":
        return Choice(system, True, history)
    if name != "react":
        raise ValueError(f"prompt: expected plain, react or choice, found {name!r}")
    if system is None:
        system = f"{card_of(env_id).system_prompt or ANYWHERE}\n\n{FORMAT}"
    return React(system, list_actions, history)
