"""``sandboxgym play``: play any environment with snapshots in the terminal, with undo and branches.

A line is an action, the number of an admissible command, or, with a colon, a command to the player itself (``:help``
lists them). Lines from a pipe are echoed, so that the output reads like a terminal session.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import random
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from sandboxgym.cli import INTERRUPTED, OK, CommandError
from sandboxgym.cli.environments import add_kwargs, find_spec, import_modules, make, parse_kwargs
from sandboxgym.cli.support.history import CannotGo, Exploration, HistoryNode, draw
from sandboxgym.cli.support.printing import Screen
from sandboxgym.errors import SnapshotError
from sandboxgym.registration import card_of
from sandboxgym.spaces import Unicode
from sandboxgym.task_env import TaskEnv

PROMPT = "> "
LISTED_ROWS = 8


def main(argv: Sequence[str]) -> int:
    """Run ``sandboxgym play``; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="sandboxgym play",
        description="Play an environment in the terminal. Every step takes a snapshot: :undo, :goto and :tree move "
        "between them, :save and :load keep them in files. :help lists the commands.",
    )
    parser.add_argument("env_id", metavar="ENV_ID", help="sandboxgym/ALFWorld-v0, ALFWorld-v0 or package.module:Id-v0")
    add_kwargs(parser)
    parser.add_argument("--task", help="task to play: an index, an id, or any other value that the environment accepts")
    parser.add_argument("--seed", type=int, help="seed of the first reset")
    parser.add_argument(
        "--import", dest="modules", nargs="+", default=[], metavar="MODULE", help="modules to import first"
    )
    parser.add_argument("--no-list", action="store_true", help="do not list the admissible commands at every step")
    options = parser.parse_args(argv)
    import_modules(options.modules)
    kwargs = {**card_of(find_spec(options.env_id).id).played_with, **parse_kwargs(options.kwargs)}
    env = make(options.env_id, kwargs, ansi=True)
    task = None if options.task is None else {"task": parse_task(options.task)}
    try:
        exploration = Exploration(env, seed=options.seed, options=task)
    except Exception as error:  # environments raise any type of error for unknown tasks or seeds
        env.close()
        raise CommandError(f"{options.env_id} could not be started: {error}") from error
    player = Player(exploration, Screen(sys.stdout), listing=not options.no_list)
    try:
        return player.run()
    finally:
        exploration.close()


class Player:
    """Loop of the player: reads lines, moves in the exploration, prints."""

    def __init__(self, exploration: Exploration, screen: Screen, *, listing: bool = True) -> None:
        self.exploration = exploration
        self.screen = screen
        self.listing = listing
        self.words: dict[str, tuple[Callable[[str], None], str, str]] = {
            "undo": (self._undo, "[N]", "back by one step, or N"),
            "redo": (self._redo, "[N]", "forward again"),
            "mark": (self._mark, "[NAME]", "name this state"),
            "branch": (self._mark, "NAME", "the same: a place to come back to"),
            "goto": (self._goto, "NAME|N", "to a marked state, or one numbered in :tree"),
            "tree": (self._tree, "", "everything visited, and where you are"),
            "save": (self._save, "FILE", "write this state to a file"),
            "load": (self._load, "FILE", "go to a saved state"),
            "actions": (self._actions, "[TEXT]", "the admissible commands, or those with this text"),
            "random": (self._random, "", "an admissible command, or a sample of the action space"),
            "info": (self._info, "", "what the environment says beside the observation"),
            "look": (self._look, "", "the observation again"),
            "task": (self._task, "TASK", "a new episode of this task"),
            "reset": (self._reset, "[SEED]", "a new episode; the old ones stay in :tree"),
            "help": (self._help, "", "this list"),
            "quit": (self._quit, "", "leave; so does the end of the input"),
        }
        self._leaving = False
        self._rng = random.Random()

    def run(self) -> int:
        """Play until the end of the input; returns the exit status."""
        here = self.exploration.here
        self.screen.line(self.screen.style(f"{self.exploration.env.spec and self.exploration.env.spec.id}", "bold"))
        self.screen.line(self.screen.style("An action, a number, or :help.", "dim"))
        self._show(here)
        interrupted = False
        with _completing(self._candidates) if sys.stdin.isatty() else contextlib.nullcontext():
            while not self._leaving:
                try:
                    line = self._read()
                    if line is None:
                        break
                    self.do(line)
                    interrupted = False
                except KeyboardInterrupt:
                    self.screen.line()
                    if interrupted:
                        return INTERRUPTED
                    interrupted = True
                    self.screen.line(self.screen.style("Interrupted; once more to leave.", "dim"))
        return OK

    def do(self, line: str) -> None:
        """Carry out one line; if it is impossible, say so and change nothing."""
        line = line.strip()
        try:
            if line.startswith(":") and not line.startswith("::"):
                self._say(line[1:])
            elif line:
                literal = line.startswith(":")
                action = parse_action(self.exploration.env.action_space, line[1:]) if literal else self._action(line)
                self._show(self.exploration.step(action))
        except (CannotGo, SnapshotError, OSError) as error:
            self.screen.text(str(error), "yellow")

    # Reading.

    def _read(self) -> str | None:
        self.screen.line(self.screen.style(self._status(self.exploration.here), "cyan"))
        if sys.stdin.isatty():
            try:
                return input(PROMPT)
            except EOFError:
                self.screen.line()
                return None
        line = sys.stdin.readline()
        if not line:
            return None
        self.screen.line(PROMPT + line.rstrip("\n"))
        return line

    def _say(self, line: str) -> None:
        word, _, rest = line.strip().partition(" ")
        matches = [known for known in self.words if known.startswith(word)] if word else ["help"]
        if word in self.words:
            matches = [word]
        if len(matches) != 1:
            choice = f"could be {', '.join(matches)}" if matches else "is not known; :help lists the words"
            raise CannotGo(f":{word} {choice}")
        self.words[matches[0]][0](rest.strip())

    def _action(self, line: str) -> Any:
        space, commands = self.exploration.env.action_space, self._commands()
        if commands and line.isdigit():
            if int(line) < len(commands):
                return commands[int(line)]
            raise CannotGo(f"the commands are numbered 0 to {len(commands) - 1}")
        if commands and line not in commands and line.partition(" ")[0] in self.words:
            raise CannotGo(f"{line!r} is no admissible command; did you mean :{line}? (::{line} sends it all the same)")
        return parse_action(space, line)

    def _commands(self) -> list[str]:
        return [str(command) for command in self.exploration.here.info.get("admissible_commands") or ()]

    def _candidates(self) -> list[str]:
        return [*self._commands(), *(f":{word}" for word in self.words)]

    # Commands.

    def _undo(self, rest: str) -> None:
        self._show(self.exploration.undo(_count(rest)))

    def _redo(self, rest: str) -> None:
        self._show(self.exploration.redo(_count(rest)))

    def _mark(self, rest: str) -> None:
        taken = {node.label for node in self.exploration.nodes}
        name = rest or next(f"m{number}" for number in range(len(taken) + 1) if f"m{number}" not in taken)
        if name.removeprefix("#").isdigit():
            raise CannotGo("a name, not a number: numbers are the tree's")
        node = self.exploration.mark(name)
        self.screen.line(f"#{node.number} is now {name!r}")

    def _goto(self, rest: str) -> None:
        if not rest:
            raise CannotGo(":goto NAME, or a number of :tree")
        self._show(self.exploration.goto(self.exploration.named(rest)))

    def _tree(self, _: str) -> None:
        line = {id(node) for node in self.exploration.here.line()}
        for before, node in draw(self.exploration):
            name = node.origin if node.parent is None else str(node.action)
            notes = []
            if node.label:
                notes.append(f"[{node.label}]")
            if node.reward:
                notes.append(f"reward {node.reward:g}")
            if node.over:
                notes.append("terminated" if node.terminated else "truncated")
            if node is self.exploration.here:
                notes.append("<- here")
            after = "".join(f"  {note}" for note in notes)
            name = f"#{node.number} {name}"
            room = max(12, self.screen.width - len(before) - len(after))
            text = (name if len(name) <= room else f"{name[: room - 1]}…") + after
            styles = ("bold", "cyan") if node is self.exploration.here else ("bold",) if id(node) in line else ()
            self.screen.line(self.screen.style(before, "dim") + self.screen.style(text, *styles))

    def _save(self, rest: str) -> None:
        self.exploration.save(_filename(rest, ":save FILE"))
        self.screen.line(f"saved #{self.exploration.here.number} to {rest}")

    def _load(self, rest: str) -> None:
        self._show(self.exploration.load(_filename(rest, ":load FILE")))

    def _actions(self, rest: str) -> None:
        commands = self._commands()
        if not commands:
            self.screen.text(f"any of {self.exploration.env.action_space}")
            return
        cells = [f"{number:>3} {name}" for number, name in enumerate(commands) if rest.lower() in name.lower()]
        if not cells:
            raise CannotGo(f"no admissible command with {rest!r}")
        self.screen.columns(cells)

    def _random(self, _: str) -> None:
        commands = self._commands()
        if commands:
            action: Any = self._rng.choice(commands)
        else:  # from a copy: the space's stream is part of the state and would repeat its draws after every :undo
            space = copy.deepcopy(self.exploration.env.action_space)
            space.seed(self._rng.randrange(2**31))
            action = space.sample()
        self.screen.line(f"{action}")
        self._show(self.exploration.step(action))

    def _info(self, _: str) -> None:
        for name, value in self.exploration.here.info.items():
            if name != "admissible_commands":
                self.screen.text(f"{name}: {_short(value)}", hanging="    ")

    def _look(self, _: str) -> None:
        self._show(self.exploration.here)

    def _reset(self, rest: str) -> None:
        self._show(self.exploration.reset(seed=_count(rest, smallest=0) if rest else None))

    def _task(self, rest: str) -> None:
        if not rest:
            raise CannotGo(":task TASK")
        self._show(self.exploration.reset(task=parse_task(rest)))

    def _help(self, _: str) -> None:
        self.screen.text("A line is an action, the number of an admissible command, or one of:")
        for word, (_call, takes, about) in self.words.items():
            self.screen.text(f":{word + ' ' + takes:<17}{about}", indent="  ", hanging=" " * 20)
        self.screen.text(
            "Words may be shortened (:u); an action that begins with a colon gets a second one. The space of actions: "
            + str(self.exploration.env.action_space)
        )

    def _quit(self, _: str) -> None:
        self._leaving = True

    # Printing.

    def _show(self, node: HistoryNode) -> None:
        self.screen.line()
        if isinstance(node.observation, str):
            self.screen.text(node.observation)
        else:
            picture = _picture(self.exploration.env)
            if picture is not None:
                self.screen.line(picture)
            self.screen.text(f"observation {_short(node.observation)}", *(("dim",) if picture else ()))
        task = self._instruction(node)
        if task and task not in " ".join(str(node.observation).split()):
            self.screen.line(self.screen.style(textwrap.shorten(f"Task: {task}", self.screen.width), "dim"))
        if node.info.get("valid_action") is False:
            self.screen.line(self.screen.style("(not a valid action)", "yellow"))
        commands = self._commands()
        if self.listing and commands and not node.over:
            cells = [f"{number:>3} {name}" for number, name in enumerate(commands)]
            shown = self.screen.columns(cells, rows=LISTED_ROWS)
            if shown < len(cells):
                self.screen.line(self.screen.style(f"    … and {len(cells) - shown} more: :actions", "dim"))
        if node.over:
            won = node.info.get("success")
            how = "terminated" if node.terminated else "truncated: the step limit"
            outcome = "" if won is None else ", success" if won else ", no success"
            self.screen.line(
                self.screen.style(f"The episode is over ({how}{outcome}).", "bold", "green" if won else "yellow")
            )

    def _instruction(self, node: HistoryNode) -> str:
        """Task of the node's episode, on one line; empty where the environment does not say it."""
        given, name = node.info.get("instruction"), node.info.get("task_id")
        base = self.exploration.env.unwrapped
        if given is None and isinstance(base, TaskEnv) and isinstance(name, str):
            with contextlib.suppress(LookupError, OSError, ValueError):
                given = base.tasks()[base.task_index(name)].instruction
        return " ".join(str(given or "").split())

    def _status(self, node: HistoryNode) -> str:
        limit = self.exploration.limit
        parts = [f"step {node.step}" + (f"/{limit}" if limit else ""), f"reward {node.reward:g}"]
        if node.total != node.reward:
            parts.append(f"return {node.total:g}")
        if node.over:
            parts.append("done")
        parts.append(f"#{node.number}" + (f" {node.label}" if node.label else ""))
        return "[" + " | ".join(parts) + "]"


def parse_task(text: str) -> str | int:
    """Parse a typed task: an index, or another name that the environment accepts."""
    return int(text) if text.isdigit() else text


def parse_action(space: gym.Space[Any], line: str) -> Any:
    """Parse a typed action of the space: text, a number, numbers, or JSON.

    Raises:
        CannotGo: the text is not an action; the message says what the space takes.
    """
    if isinstance(space, (Unicode, spaces.Text)):
        return line
    try:
        value = json.loads(line)
    except ValueError:
        try:
            value = [json.loads(number) for number in line.replace(",", " ").split()]
        except ValueError as error:
            raise CannotGo(f"expected an action of {space}, found {line!r}") from error
    try:
        action = _member(space, value)
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError) as error:
        raise CannotGo(f"expected an action of {space}, found {line!r}: {error}") from error
    if not space.contains(action):
        raise CannotGo(f"expected an action of {space}, found {line!r}")
    return action


def _member(space: gym.Space[Any], value: Any) -> Any:
    """Convert a JSON value to the form of the space's members."""
    if isinstance(space, spaces.Dict):
        return {name: _member(space[name], content) for name, content in value.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_member(inner, content) for inner, content in zip(space, value, strict=True))
    if isinstance(space, spaces.Discrete):
        if type(value) is not int:  # True is an int in Python, but not meant as a number
            raise TypeError("expected a whole number")
        return value
    if isinstance(space, (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)):
        return np.asarray(value, dtype=space.dtype).reshape(space.shape)
    return value if isinstance(value, str) else space.from_jsonable([value])[0]


def _count(text: str, *, smallest: int = 1) -> int:
    if not text:
        return 1
    if not text.isdigit() or int(text) < smallest:
        raise CannotGo(f"expected a number from {smallest} on, found {text!r}")
    return int(text)


def _filename(text: str, usage: str) -> str:
    try:
        names = shlex.split(text)
    except ValueError as error:
        raise CannotGo(f"{usage}: {error}") from error
    if len(names) != 1:
        raise CannotGo(usage)
    return names[0]


def _picture(env: gym.Env[Any, Any]) -> str | None:
    if env.render_mode != "ansi":
        return None
    picture: object = env.render()
    return str(picture).rstrip("\n") if isinstance(picture, str) else None


def _short(value: Any, length: int = 400) -> str:
    text = str(value)
    return text if len(text) <= length else f"{text[:length]}… ({len(text)} characters)"


@contextlib.contextmanager
def _completing(candidates: Callable[[], list[str]]) -> Iterator[None]:
    """Enable tab completion and editing of whole lines if readline is available; restore its settings afterwards."""
    try:
        import readline
    except ImportError:
        yield
        return

    def complete(text: str, state: int) -> str | None:
        matches = [name for name in candidates() if name.lower().startswith(text.lower())]
        return matches[state] if state < len(matches) else None

    before = readline.get_completer(), readline.get_completer_delims()
    readline.set_completer(complete)
    readline.set_completer_delims("")  # actions contain blanks and are completed as a whole
    libedit = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")
    try:
        yield
    finally:
        readline.set_completer(before[0])
        readline.set_completer_delims(before[1])
