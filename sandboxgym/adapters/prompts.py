"""Prompts: how a model is shown an episode and how its answers are read, for training, evaluation and adapters.

>>> prompt = make_prompt("react", "sandboxgym/ALFWorld-v0", list_actions=True)
>>> print(prompt.show("You see a desk 1.", {"admissible_commands": ["go to desk 1", "look"]}))
You see a desk 1.
You can: go to desk 1, look
>>> prompt.read("<think>The mug may be there.</think><action>go to desk 1</action>", {})
'go to desk 1'

What this module promises:

1. An answer without exactly one action raises `UnreadableAnswer`, whose message tells the model what is expected.
   Nothing is guessed, and thoughts are never carried out.
2. ``read(write(action, info), info)`` is the action; for `React` without surrounding white space and if it contains
   none of the tags, for `Choice` if it is not a bare number.
3. The text shown for a step depends only on the episode so far, so a fork sees the same as the path it comes from.
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
"""System prompt for an environment whose card has none."""


class UnreadableAnswer(ValueError):
    """An answer without exactly one action. The message is meant for the model."""


@dataclass(frozen=True)
class Exchange:
    """One past turn of a conversation."""

    observation: str
    """Observation of the environment."""
    shown: str
    """User message with the observation."""
    answer: str
    """Answer of the model."""
    action: str
    """Action that was carried out; empty if the answer could not be read."""
    complaint: str = ""
    """Reason why the answer could not be read."""


@dataclass(frozen=True)
class Prompt:
    """The plain prompt: a message is the observation, an answer is the action. For policies made for one environment.

    Args:
        system: system prompt; None: whatever the chat template does without one.
        list_actions: list the admissible actions, if ``info["admissible_commands"]`` gives them.
        history: 0: the conversation grows turn by turn. k > 0: every turn is a conversation of its own, one message
            with the first observation and the last k turns. Earlier sampled tokens are then not part of the context, so
            each turn is a training row of its own.

    Raises:
        ValueError: ``history`` is negative.
    """

    system: str | None = None
    list_actions: bool = False
    history: int = 0

    opening: ClassVar[str] = ""
    """Fixed beginning of every answer, before anything is decided."""
    decision: ClassVar[str] = ""
    """Text before the action in an answer; empty if the answer is the action."""

    def __post_init__(self) -> None:
        if self.history < 0:
            raise ValueError(f"history: expected 0 (all turns) or more, found {self.history}")

    def show(self, observation: Any, info: Mapping[str, Any], *, complaint: str = "") -> str:
        """An observation, with the complaint about the last answer and the admissible actions."""
        commands = info.get("admissible_commands") if self.list_actions else None
        offered = f"You can: {', '.join(commands)}" if commands else ""
        return "\n".join([*filter(None, [complaint]), str(observation), *filter(None, [offered])])

    def message(self, past: Sequence[Exchange], observation: Any, info: Mapping[str, Any]) -> str:
        """User message of a turn: `show`, or with a ``history`` a summary of the episode.

        Args:
            past: the episode's turns so far.
            observation: current observation of the environment.
            info: current info of the environment.
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
        """The whole conversation as chat messages, up to the user message of this turn."""
        chat = [{"role": "system", "content": self.system}] if self.system else []
        for exchange in () if self.history else past:
            chat.append({"role": "user", "content": exchange.shown})
            chat.append({"role": "assistant", "content": exchange.answer})
        return [*chat, {"role": "user", "content": self.message(past, observation, info)}]

    def read(self, answer: str, info: Mapping[str, Any]) -> str:
        """The action in an answer.

        Args:
            answer: answer of the model.
            info: info of the environment when the model was asked.

        Raises:
            UnreadableAnswer: there is none, or there are several.
        """
        return answer

    def hear(self, answer: str, info: Mapping[str, Any]) -> tuple[str, str]:
        """`read` without an exception: (action, "") or ("", complaint).

        The empty action does nothing: this package's environments treat it as invalid.
        """
        try:
            return self.read(answer, info), ""
        except UnreadableAnswer as error:
            return "", str(error)

    def write(self, action: str, info: Mapping[str, Any]) -> str:
        """An answer with this action, as in demonstrations."""
        return action


@dataclass(frozen=True)
class React(Prompt):
    """Prompt for thoughts between ``<think>`` tags, then one action between ``<action>`` tags.

    It follows ReAct (Yao et al., 2023). An answer may lack thoughts, because models with a reasoning block of their own
    write them there. Everything up to the last ``</think>`` is thought; white space around the action is ignored.
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
        """An answer with this action and no thought, because scripted experts have none."""
        return f"<action>{action}</action>"


@dataclass(frozen=True)
class Choice(Prompt):
    """Numbered admissible actions, chosen by their number, so that long actions have short answers.

    An answer that is not a bare number is an action in words, so that actions that cannot be listed (another query)
    remain possible. Without admissible actions this is the plain prompt.
    """

    def show(self, observation: Any, info: Mapping[str, Any], *, complaint: str = "") -> str:
        """An observation, followed by one line per admissible action."""
        offered = [f"{number}: {command}" for number, command in enumerate(_commands(info), 1)]
        return "\n".join([*filter(None, [complaint]), str(observation), *offered])

    def read(self, answer: str, info: Mapping[str, Any]) -> str:
        """The action with the answer's number, or the answer itself."""
        commands, text = _commands(info), answer.strip()
        if not commands or not (text.isascii() and text.isdigit()):
            return answer
        if not 1 <= int(text) <= len(commands):
            raise UnreadableAnswer(f"There is no action {text}. Choose from 1 to {len(commands)}.")
        return commands[int(text) - 1]

    def write(self, action: str, info: Mapping[str, Any]) -> str:
        """The number of an action, or the action itself if it has none."""
        commands = _commands(info)
        return str(commands.index(action) + 1) if action in commands else action


def _commands(info: Mapping[str, Any]) -> list[str]:
    return list(info.get("admissible_commands") or ())


def make_prompt(
    name: PromptName, env_id: str, *, system: str | None = None, list_actions: bool = False, history: int = 0
) -> Prompt:
    """Make a prompt by its name for an environment.

    Args:
        name: ``"plain"``, ``"react"`` or ``"choice"``.
        env_id: Gymnasium id of the environment. ``react`` uses the system prompt of the environment's card (`EnvCard`),
            or a generic one without a card.
        system: system prompt to use instead.
        list_actions: see `Prompt`; ``choice`` always lists them.
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
