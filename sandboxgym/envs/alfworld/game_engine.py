"""The engine interface of `ALFWorldEnv`: one game, played as pure functions on small immutable states.

There are two: the compiled `Game` of this package (``native``), and the original, TextWorld with alfworld
(``textworld``, see :mod:`.textworld_engine`). A state belongs to the engine that made it.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, get_args

from sandboxgym.core import SnapshotSpec
from sandboxgym.envs.alfworld.game import Game, GameState, GoalProgress
from sandboxgym.envs.alfworld.games.library import GameLibrary

EngineName = Literal["native", "textworld"]


class GameEngine(Protocol):
    """One game, playable from any of its states by any number of environments."""

    digest: str
    """Digest of the game file's content: games with equal digests play alike."""

    @property
    def compiled(self) -> Game:
        """The game as this package compiles it."""

    def initial(self) -> Any:
        """State at reset, a `GameState`."""

    def intro(self) -> str:
        """Observation at reset."""

    def admissible(self, state: Any) -> tuple[str, ...]:
        """Commands that do something in ``state``, sorted."""

    def step(self, state: Any, command: str) -> tuple[Any, str, bool]:
        """Play a command: the next state, the game's answer, and whether the command was admissible."""

    def won(self, state: Any) -> bool:
        """Tell whether the goal holds."""

    def progress(self, state: GameState) -> GoalProgress:
        """Progress towards the goal."""

    def state_hash(self, state: GameState) -> str:
        """Hash of the game and its facts, the same for equal states."""

    def resume(self, state: Any) -> Any:
        """Convert a state from another process to one that this engine can continue from."""


def load(engine: EngineName, library: GameLibrary, number: int) -> GameEngine:
    """Load game ``number`` of ``library``, shared with all its players in the process."""
    if engine == "native":
        return library.load(number)
    from sandboxgym.envs.alfworld import textworld_engine

    return textworld_engine.load(library, number)


def snapshot_spec(engine: EngineName) -> SnapshotSpec:
    """Snapshot spec of an environment with this engine.

    The original cannot be saved: its states are numbers in the memory of a C library. In the process that took a
    snapshot, it goes back to such a number; anywhere else, it replays the commands so far, so its kind is ``replay``.

    Raises:
        ValueError: there is no such engine.
        DependencyNotInstalled: this engine's packages are missing; the message has the install command.
    """
    if engine not in get_args(EngineName):
        raise ValueError(f"expected an engine of {get_args(EngineName)}, found {engine!r}")
    if engine == "native":
        return SnapshotSpec()
    from sandboxgym.envs.alfworld import textworld_engine

    textworld_engine.check_installed()
    return SnapshotSpec(kind="replay", cost="steps")
