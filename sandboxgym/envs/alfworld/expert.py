"""A rule-based expert that knows the games only through their texts.

What this module promises:

1. The expert sees what an agent sees: the reset text and the feedback to its own commands. No state, no list of
   admissible commands, no game file.
2. It plays the embedded games and the official ones, with either verb for putting things down ("move O to R",
   "put O in/on R"). It relies on names being a word and a number, and on closed furniture being called closed.
3. It searches where things usually are (`priors.weight`), cheapest and likeliest piece of furniture first.
4. It never repeats a refused command forever, and recovers from the random commands that ``noise`` mixes in.
   It is deterministic except for ``noise``.
"""

from __future__ import annotations

import copy
import random
import re
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from sandboxgym.envs.alfworld.game import Game
from sandboxgym.envs.alfworld.games.priors import weight

REFUSED = "Nothing happens"
NAME = re.compile(r"\b([a-z]+) (\d+)\b")
TASK = re.compile(r"your task is to:?\s*(.*)", re.IGNORECASE | re.DOTALL)
ARTICLES_AND_LINKS = ("a", "an", "the", "some", "two", "it", "them", "and", "in", "on", "under", "with", "to", "at")
FILLERS = frozenset((*ARTICLES_AND_LINKS, "put", "move", "find", "take", "use", "look", "examine"))
TREATMENT_WORDS = {"clean": "clean", "heat": "heat", "hot": "heat", "cool": "cool", "cold": "cool"}
APPLIANCES = {"clean": ("sink", "sinkbasin"), "heat": ("microwave",), "cool": ("fridge",)}
DOORS = frozenset(("cupboard", "cabinet", "drawer", "fridge", "microwave", "safe"))


@dataclass(frozen=True, slots=True)
class Errand:
    """Target, treatment and destination that a task sentence asks for."""

    target: str
    destination: str
    treatment: str | None = None
    count: int = 1

    @property
    def by_lamp(self) -> bool:
        """True if the target has to be held next to a lamp (the destination), not put somewhere."""
        return self.destination.endswith("lamp")


def parse_task(observation: str) -> Errand:
    """Parse the task in a reset text, by the official templates and those of the embedded games.

    Each has two names (thing, place or lamp) among a few filler words, and at most one word for a treatment.

    Raises:
        ValueError: the text has no such sentence.
    """
    match = TASK.search(observation)
    words = re.findall(r"[a-z]+", match[1].lower()) if match else []
    names = [word for word in words if word not in FILLERS and word not in TREATMENT_WORDS]
    if len(names) != 2:
        raise ValueError(f"expected a task with a thing and a place, found {' '.join(words) or observation!r}")
    treatment = next((TREATMENT_WORDS[word] for word in words if word in TREATMENT_WORDS), None)
    return Errand(names[0], names[1], treatment, 2 if "two" in words else 1)


class Expert:
    """Rule-based player: call `reset` with a new game's first observation, then `act` with it and each later one.

    With probability ``noise`` a command is not the expert's: half of these are plausible but random, half are slips
    that the game refuses, so that a learner sees how to continue after both. `noisy` tells whether the last one was.
    """

    def __init__(self, rng: random.Random | None = None, noise: float = 0.0) -> None:
        self._rng = rng or random.Random(0)
        self._noise = noise
        self.noisy = self._slipped = False

    def reset(self, observation: str) -> None:
        """Forget everything, then read the task and the furniture of a new game.

        Raises:
            ValueError: the text lacks one of them.
        """
        self._task = parse_task(observation)
        before_task = observation[: observation.lower().rfind("your task is to")]
        self._furniture = list(dict.fromkeys(_names(before_task)))
        if not self._furniture:
            raise ValueError(f"expected a text that names furniture, found {observation!r}")
        self._kinds = Counter(_kind(piece) for piece in self._furniture)
        self._contents: dict[str, list[str]] = {}  # what was seen where, updated by the expert's own commands
        self._closed: set[str] = set()
        self._beside: dict[str, set[str]] = {piece: {piece} for piece in self._furniture}
        self._at: str | None = None
        self._held: str | None = None
        self._origin: dict[str, str] = {}
        self._treated: dict[str, str] = {}
        self._useless: set[str] = set()  # things and furniture that refused what the task needs
        self._refusals: Counter[str] = Counter()
        self._put_words = "move", "to"
        self._put_known = False
        self._last: str | None = None
        self._steps = 0

    def fork(self, rng: random.Random) -> Expert:
        """A player that knows what this one knows and draws its noise from ``rng``: for a fork of the game."""
        other = copy.deepcopy(self)
        other._rng = rng
        return other

    def act(self, observation: str) -> str:
        """Choose the next command, given the feedback to the last one."""
        if self._last is not None and not (self._slipped and observation.startswith(REFUSED)):
            self._learn(self._last, observation)
        self._steps += 1
        self.noisy = self._rng.random() < self._noise
        self._slipped = self.noisy and self._rng.random() < 0.5
        if self._slipped:
            self._last = self._slip()
        else:
            self._last = self._random_command() if self.noisy else self._next_command()
        return self._last

    def _learn(self, command: str, feedback: str) -> None:
        verb, names = command.split()[0], _names(command)
        if feedback.startswith(REFUSED):
            self._refusals[command] += 1
            self._learn_refusal(verb, names)
            return
        self._refusals.pop(command, None)
        if verb == "go":
            self._at = names[0]
            self._see(names[0], feedback)
            if re.search(r"\bloc \d", feedback):  # only the older official grammar names locations
                self._put_words = "put", "in/on"
        elif verb in ("open", "examine"):
            self._see(names[0], feedback)
        elif verb == "close":
            self._closed.add(names[0])
        elif verb == "take":
            self._held = names[0]
            self._origin[names[0]] = names[1]
            self._forget(names[0])
        elif verb in ("move", "put"):
            self._held, self._put_known = None, True
            self._contents.setdefault(names[1], []).append(names[0])
        elif verb in APPLIANCES:
            self._treated[names[0]] = verb

    def _learn_refusal(self, verb: str, names: list[str]) -> None:
        if verb == "go":
            # "go to" is refused where the agent already is: the piece stands beside the present one.
            group = self._beside[names[0]] | (self._beside[self._at] if self._at else set())
            for piece in group:
                self._beside[piece] = group
            self._at = names[0]
        elif verb == "examine":
            self._useless.add(names[0])
        elif verb == "open":
            self._closed.discard(names[0])
        elif verb == "take":
            self._forget(names[0])
        elif verb in ("move", "put"):
            if self._put_known:
                self._useless.add(names[1])
            else:
                self._put_words = ("put", "in/on") if verb == "move" else ("move", "to")
        elif verb in APPLIANCES or verb == "use":
            self._useless.add(names[0])

    def _see(self, piece: str, feedback: str) -> None:
        if re.search(r"\bclosed\b", feedback):
            self._closed.add(piece)
            return
        self._closed.discard(piece)
        self._contents[piece] = [name for name in _names(feedback) if name != piece and not name.startswith("loc ")]

    def _forget(self, item: str) -> None:
        for items in self._contents.values():
            if item in items:
                items.remove(item)

    def _next_command(self) -> str:
        command = self._pursue()
        if self._refusals[command] < 2:
            return command
        # Beliefs do not fit the game: move on, to a different place each time.
        return f"go to {self._furniture[self._steps % len(self._furniture)]}"

    def _pursue(self) -> str:
        task, held = self._task, self._held
        if held is None:
            delivered = self._contents.get(self._destination(), []) if task.count > 1 else []
            return self._fetch(task.target, delivered) or self._search(task.target)
        if _kind(held) != task.target or held in self._useless:
            return self._drop(held)
        if task.by_lamp:
            return self._use_lamp()
        if task.treatment and self._treated.get(held) != task.treatment:
            appliance = self._of_kind(*APPLIANCES[task.treatment])[0]
            return self._approach(appliance) or f"{task.treatment} {held} with {appliance}"
        return self._put(held, self._destination())

    def _fetch(self, kind: str, delivered: list[str]) -> str | None:
        """Move towards taking a thing of this kind that was seen; None if none was."""
        found = [
            (not self._is_at(piece), item, piece)
            for piece, items in self._contents.items()
            for item in items
            if _kind(item) == kind and item not in delivered and item not in self._useless
        ]
        if not found:
            return None
        _, item, piece = min(found)
        return self._enter(piece) or f"take {item} from {piece}"

    def _use_lamp(self) -> str:
        for piece, items in self._contents.items():
            for item in items:
                if _kind(item) == self._task.destination and item not in self._useless:
                    return self._approach(piece) or f"use {item}"
        return self._search(self._task.destination)

    def _search(self, kind: str) -> str:
        """Move towards looking into the most promising piece of furniture that was not yet looked into."""
        unseen = [piece for piece in self._usable() if piece not in self._contents]
        if not unseen:
            # Everything was seen and the thing is nowhere: something was overlooked, so look again.
            self._contents.clear()
            return "look"
        best = max(unseen, key=lambda piece: self._promise(kind, piece))
        return self._enter(best) or "look"

    def _promise(self, kind: str, piece: str) -> float:
        """Chance of finding the thing in a piece of furniture per step that this takes, up to a factor."""
        closed = piece in self._closed or (_kind(piece) in DOORS and piece not in self._contents)
        steps = (not self._is_at(piece)) + (closed or self._is_at(piece))
        return (weight(kind, _kind(piece)) + 0.1) / self._kinds[_kind(piece)] / steps

    def _destination(self) -> str:
        """Choose the destination: a piece of the right kind, if possible the one that already has most targets."""

        def merit(piece: str) -> tuple[int, bool, bool]:
            targets = sum(_kind(item) == self._task.target for item in self._contents.get(piece, ()))
            return targets, self._is_at(piece), piece not in self._closed and piece in self._contents

        return max(self._of_kind(self._task.destination), key=merit)

    def _drop(self, held: str) -> str:
        here = [piece for piece in self._contents if self._is_at(piece) and piece not in self._closed]
        for piece in (*here, self._origin.get(held, "")):
            if piece and self._refusals[self._putting(held, piece)] < 2:
                return self._put(held, piece)
        return self._search(_kind(held))

    def _put(self, held: str, piece: str) -> str:
        return self._enter(piece) or self._putting(held, piece)

    def _putting(self, held: str, piece: str) -> str:
        return f"{self._put_words[0]} {held} {self._put_words[1]} {piece}"

    def _enter(self, piece: str) -> str | None:
        """Move towards standing at the piece, with it opened and looked into; None once that is done."""
        if not self._is_at(piece):
            return f"go to {piece}"
        if piece in self._closed:
            return f"open {piece}"
        # Going to a piece shows what is in it, but one that stands beside was not gone to.
        return None if piece in self._contents else f"examine {piece}"

    def _approach(self, piece: str) -> str | None:
        return None if self._is_at(piece) else f"go to {piece}"

    def _is_at(self, piece: str) -> bool:
        return self._at is not None and piece in self._beside[self._at]

    def _usable(self) -> list[str]:
        return [piece for piece in self._furniture if piece not in self._useless]

    def _of_kind(self, *kinds: str) -> list[str]:
        """Usable pieces of these kinds; all usable pieces if there are none."""
        return [piece for piece in self._usable() if _kind(piece) in kinds] or self._furniture

    def _slip(self) -> str:
        """A careless agent's mistake: an object that was not seen here, or a command with a word left out."""
        if self._rng.random() < 0.5:
            place = self._at or self._rng.choice(self._furniture)
            return f"take {self._task.target} {self._rng.randint(1, 3)} from {place}"
        words = self._next_command().split()
        del words[self._rng.randrange(len(words))]
        return " ".join(words) or "look"

    def _random_command(self) -> str:
        """A possible command that has nothing to do with the task."""
        elsewhere = [piece for piece in self._furniture if not self._is_at(piece)]
        commands = [f"go to {self._rng.choice(elsewhere or self._furniture)}", "look", "inventory"]
        if at := self._at:
            commands.append(f"examine {at}")
            if _kind(at) in DOORS:
                commands.append(f"{'open' if at in self._closed else 'close'} {at}")
            elif self._held:
                commands.append(self._putting(self._held, at))
            if not self._held and self._contents.get(at) and at not in self._closed:
                commands.append(f"take {self._rng.choice(self._contents[at])} from {at}")
        return self._rng.choice(commands)


class ExpertTurn(NamedTuple):
    """One exchange of a demonstration."""

    observation: str
    action: str
    noisy: bool
    """True if the action was random, not the expert's."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """An episode of the expert: its exchanges and outcome."""

    turns: tuple[ExpertTurn, ...]
    won: bool


def play_expert(
    game: Game, *, rng: random.Random | None = None, noise: float = 0.0, max_steps: int = 50
) -> Demonstration:
    """Let the expert play a game until it is won or ``max_steps`` commands were given."""
    expert = Expert(rng, noise)
    state, observation = game.initial(), game.intro()
    expert.reset(observation)
    turns: list[ExpertTurn] = []
    while not game.won(state) and len(turns) < max_steps:
        action = expert.act(observation)
        turns.append(ExpertTurn(observation, action, expert.noisy))
        state, observation, _ = game.step(state, action)
    return Demonstration(tuple(turns), game.won(state))


def _names(text: str) -> list[str]:
    return [match[0] for match in NAME.finditer(text)]


def _kind(name: str) -> str:
    return name.partition(" ")[0]
