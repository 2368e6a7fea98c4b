"""What `ALFWorldEnv` asks of an engine: to play one game as pure functions on small immutable states.

There are two: the compiled `Game` of this package (``native``), and the original, TextWorld with alfworld
(``textworld``, see :mod:`.textworld_engine`). A state belongs to the engine that made it.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, get_args

from sandboxgym.core import SnapshotSpec
from sandboxgym.envs.alfworld.game import Game, GameState, Progress
from sandboxgym.envs.alfworld.games.library import GameLibrary

EngineName = Literal["native", "textworld"]


class Engine(Protocol):
    """One game, playable from any of its states by any number of environments."""

    digest: str
    """Of the content of the game file: equal digests play alike."""

    @property
    def compiled(self) -> Game:
        """The game as this package compiles it."""

    def initial(self) -> Any:
        """The state at reset: a `GameState`."""

    def intro(self) -> str:
        """The observation at reset."""

    def admissible(self, state: Any) -> tuple[str, ...]:
        """The commands that do something in ``state``, sorted."""

    def step(self, state: Any, command: str) -> tuple[Any, str, bool]:
        """The following state, what the game prints, and whether the command was admissible."""

    def won(self, state: Any) -> bool:
        """Whether the goal holds."""

    def progress(self, state: GameState) -> Progress:
        """How near the goal is."""

    def state_hash(self, state: GameState) -> str:
        """Equal for equal games and facts."""

    def resume(self, state: Any) -> Any:
        """A state that came from elsewhere, as one that this engine can go on from."""


def load(engine: EngineName, library: GameLibrary, number: int) -> Engine:
    """Game ``number`` of ``library``, loaded or shared with whoever loaded it before."""
    if engine == "native":
        return library.load(number)
    from sandboxgym.envs.alfworld import textworld_engine

    return textworld_engine.load(library, number)


def snapshot_spec(engine: EngineName) -> SnapshotSpec:
    """What snapshots of an environment with this engine cover.

    The original cannot be saved: its states are numbers in the memory of a C library. In the process that took a
    snapshot it goes back to such a number; anywhere else it replays the commands so far, which is what is declared.

    Raises:
        ValueError: there is no such engine.
        DependencyNotInstalled: this engine needs packages that are not here; the message has the command.
    """
    if engine not in get_args(EngineName):
        raise ValueError(f"expected an engine of {get_args(EngineName)}, found {engine!r}")
    if engine == "native":
        return SnapshotSpec()
    from sandboxgym.envs.alfworld import textworld_engine

    textworld_engine.check_installed()
    return SnapshotSpec(kind="replay", cost="steps")
