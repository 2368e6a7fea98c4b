"""A player that runs a task's own solution and submits, for demonstrations."""

from __future__ import annotations

import base64
import json
import random
import shlex
from collections.abc import Callable, Iterator

from sandboxgym.envs.harbor.grading import exported
from sandboxgym.envs.harbor.tasks import HarborTask, TaskError, is_below
from sandboxgym.sandbox.agent.tools import ToolSet

_NOISE = ("cat missing.txt", "ls missing", "pwd", "whoami", "lss -l")


class Expert:
    """A player that writes ``solution/`` into the sandbox, runs ``solve.sh``, and submits.

    Args:
        playing: function that returns the task being played.
        tools: set of tools in whose format the actions are written.
        rng: random stream of its useless actions; by default one with a fixed seed.
        noise: probability of a useless action before each action of the solution.

    Raises:
        ValueError: ``noise`` is no probability below 1.
    """

    noisy = False
    """True if the last action was useless."""

    def __init__(
        self,
        playing: Callable[[], HarborTask],
        *,
        tools: ToolSet = "bash",
        rng: random.Random | None = None,
        noise: float = 0.0,
    ) -> None:
        if not 0 <= noise < 1:
            raise ValueError(f"noise: expected a probability below 1, found {noise!r}")
        self._playing, self._tools, self._noise = playing, tools, noise
        self._rng = random.Random(0) if rng is None else rng
        self._left: Iterator[str] = iter(())

    def reset(self, observation: str) -> None:
        """Begin an episode; call it after the environment's ``reset``."""
        self._left = iter(actions(self._playing()))

    def act(self, observation: str) -> str:
        """The next action."""
        self.noisy = self._rng.random() < self._noise
        command = self._rng.choice(_NOISE) if self.noisy else next(self._left, "submit")
        if self._tools == "bash":
            return command
        submits = command == "submit"
        return json.dumps(
            {"name": "submit" if submits else "bash", "arguments": {} if submits else {"command": command}}
        )


def actions(task: HarborTask) -> list[str]:
    """Commands that solve a task: one to write each file of the solution, and one to run it.

    Raises:
        NotImplementedError: the task has no solution.
        TaskError: a link leads out of the solution's directory.
    """
    folder = task.solution
    if folder is None:
        raise NotImplementedError(f"{task.path} has no solution/solve.sh")
    commands = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if not is_below(path, folder):
            raise TaskError(f"{path}: expected a part of the solution, found a link that leads out of it")
        name = f"/solution/{path.relative_to(folder).as_posix()}"
        parent = shlex.quote(name.rpartition("/")[0])
        commands.append(f"mkdir -p {parent} && {_written(path.read_bytes(), shlex.quote(name))}")
    commands.append(f"{exported(task.solution_env)}bash /solution/solve.sh")
    return commands


def _written(content: bytes, name: str) -> str:
    """Command that writes a file, readable if the file is text."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = "\0"
    if "\0" not in text and "\r" not in text and text.endswith("\n") and "END_OF_FILE" not in text:
        return f"cat > {name} << 'END_OF_FILE'\n{text}END_OF_FILE"
    return f"base64 -d > {name} << 'END_OF_FILE'\n{base64.encodebytes(content).decode()}END_OF_FILE"
