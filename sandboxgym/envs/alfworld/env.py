"""`ALFWorldEnv`: the thin Gymnasium shell around a compiled `Game` and a small immutable state value."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, ClassVar, Self

from sandboxgym import format as durable
from sandboxgym.core import SnapshotEnv, Transition
from sandboxgym.envs.alfworld.expert import Expert
from sandboxgym.envs.alfworld.game import Game, GameState
from sandboxgym.envs.alfworld.library import GameLibrary, GameNotFound, GameRef, open_library
from sandboxgym.errors import SnapshotCorrupt, SnapshotMismatch
from sandboxgym.spaces import Unicode

HARMLESS = ("look", "inventory")
"""Commands that any game understands: what the action space samples."""


@dataclass(frozen=True, slots=True)
class EpisodeState:
    """Where an episode is: all that a snapshot of `ALFWorldEnv` holds."""

    task_id: str
    game_digest: str
    facts: int
    """Planner facts as a bit set (`GameState.s`)."""
    text_facts: int
    """Facts as the text engine sees them (`GameState.t`)."""
    moves: int
    """Valid commands so far."""
    feedback: str | None
    """What the last command printed; None right after reset (the game's introduction)."""
    valid_action: bool


class ALFWorldEnv(SnapshotEnv[str, str]):
    """Household tasks in text: find, clean, heat, cool and place objects, or look at them under a lamp.

    ## Description
    Re-implementation of ALFWorld's text environment (Shridhar et al., 2021). The engine runs the PDDL and the grammar
    inside each ``game.tw-pddl``; text, admissible commands, reward and flags are those of the original, to the letter.

    ## Action Space
    A string: a command such as ``go to shelf 1``, ``open drawer 2``, ``take mug 1 from desk 1``,
    ``move mug 1 to shelf 1`` (games of 2022 and before: ``put mug 1 in/on shelf 1``), ``clean mug 1 with sinkbasin 1``,
    ``heat … with microwave 1``, ``cool … with fridge 1``, ``use desklamp 1``, ``examine …``, ``look``,
    ``inventory``, ``help``. It must be one of ``info["admissible_commands"]`` exactly; anything else prints
    ``Nothing happens.`` and changes nothing.

    ## Observation Space
    A string: what the game prints. The first one describes the room and states the task.

    ## Rewards
    1 in every state in which the goal holds, else 0.

    ## Starting State
    ``reset(seed=…, options={"game": …})`` plays that game: an index, a task id, a path or a unique ending of one
    (``"task"`` means the same). Without it a game is drawn from the environment's random stream.

    ## Episode End
    Terminated when the goal holds (``stop_when_won=False``: never). Truncated by the step limit of ``gym.make``, 50 as
    in the original.

    ## Information
    ``admissible_commands`` (sorted list), ``success`` and ``won``, ``task_id``, ``gamefile``, ``task_type``,
    ``goal_condition`` (share of the goal's literals that hold, over its best grounding; our definition, see
    `Game.progress`), ``progress_key`` (goal literals met and whether a goal object is held), ``state_hash`` (equal if
    and only if the game and its state are), ``valid_action``, ``moves`` (valid commands so far).

    ## Arguments
    - ``games``: ``"embedded"`` (generated games of this package; ``"embedded:seen"``, ``"embedded:unseen"``), a split
      of the official data under ``$ALFWORLD_DATA`` (``train``, ``valid_train``, ``valid_seen``, ``valid_unseen``), a
      directory, a file, or a list of files.
    - ``task_types``: only games of these types.
    - ``limit``: only the first so many games.
    - ``stop_when_won``: end the episode when the goal holds.

    ## Version History
    - v0: first version.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"], "render_fps": 4}  # type: ignore[misc]
    immutable_state = True

    def __init__(
        self,
        games: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = "embedded",
        *,
        task_types: Sequence[str] | None = None,
        limit: int | None = None,
        stop_when_won: bool = True,
        render_mode: str | None = None,
    ) -> None:
        self.library: GameLibrary = open_library(games, task_types=task_types, limit=limit)
        self.stop_when_won = stop_when_won
        self.render_mode = render_mode
        self.observation_space = Unicode()
        self.action_space = Unicode(HARMLESS)
        self._game: Game | None = None
        self._ref: GameRef | None = None
        self._state: EpisodeState | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start a game; see *Starting State*.

        Raises:
            GameNotFound: no such game in ``games``.
            GameError: its file is malformed or unsolvable.
        """
        super().reset(seed=seed)
        options = options or {}
        unknown = options.keys() - {"game", "task"}
        if unknown:
            raise ValueError(f"expected the options 'game' or 'task', found {sorted(unknown)}")
        wanted = options.get("game", options.get("task"))
        index = int(self.np_random.integers(len(self.library))) if wanted is None else self.library.index(wanted)
        self._enter(index)
        assert self._game is not None and self._ref is not None
        self._state = self._episode(self._game.initial(), feedback=None, valid_action=True)
        transition = self._transition()
        return transition.observation, transition.info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Give the game a command."""
        if not isinstance(action, str):
            raise TypeError(f"expected a command as a string, found {action!r}")
        game, state = self._playing()
        following, feedback, valid = game.step(GameState(state.facts, state.text_facts, state.moves), action)
        self._state = self._episode(following, feedback=feedback, valid_action=valid)
        return self._transition()

    def render(self) -> str | None:  # type: ignore[override]
        """The last observation, in mode ``ansi``."""
        return self._transition().observation if self.render_mode == "ansi" else None

    @property
    def num_tasks(self) -> int:
        """How many games there are to reset to."""
        return len(self.library)

    def expert(self, *, rng: random.Random | None = None, noise: float = 0.0) -> Expert:
        """The rule-based player of these games; it sees observations only."""
        return Expert(rng=rng, noise=noise)

    @property
    def game(self) -> Game:
        """The compiled game being played."""
        return self._playing()[0]

    @property
    def game_state(self) -> GameState:
        """The state of the game being played."""
        state = self._playing()[1]
        return GameState(state.facts, state.text_facts, state.moves)

    def _episode(self, state: GameState, *, feedback: str | None, valid_action: bool) -> EpisodeState:
        game, ref = self._game, self._ref
        assert game is not None and ref is not None
        return EpisodeState(ref.task_id, game.digest, state.s, state.t, state.moves, feedback, valid_action)

    def _playing(self) -> tuple[Game, EpisodeState]:
        self._check_reset("a step")
        assert self._game is not None and self._state is not None
        return self._game, self._state

    def _enter(self, index: int) -> None:
        self._game, self._ref = self.library.load(index), self.library[index]

    def _transition(self) -> Transition:
        game, episode, ref = self._game, self._state, self._ref
        assert game is not None and episode is not None and ref is not None
        state = GameState(episode.facts, episode.text_facts, episode.moves)
        won = game.won(state)
        progress = game.progress(state)
        info = {
            "admissible_commands": list(game.admissible(state)),
            "success": won,
            "won": won,
            "task_id": ref.task_id,
            "gamefile": ref.gamefile,
            "task_type": ref.task_type,
            "goal_condition": progress.met / progress.total if progress.total else float(won),
            "progress_key": f"{progress.met}/{progress.total}{' held' if progress.held else ''}",
            "state_hash": game.state_hash(state),
            "valid_action": episode.valid_action,
            "moves": episode.moves,
        }
        observation = game.intro() if episode.feedback is None else episode.feedback
        return Transition(observation, float(won), won and self.stop_when_won, False, info)

    def _capture(self) -> EpisodeState:
        return self._playing()[1]

    def _apply(self, state: EpisodeState) -> None:
        if self._state is None or (state.task_id, state.game_digest) != (self._state.task_id, self._state.game_digest):
            try:
                index = self.library.index(state.task_id)
            except GameNotFound as error:
                raise SnapshotMismatch(f"the snapshot plays a game that is not here: {error}") from error
            game = self.library.load(index)
            if game.digest != state.game_digest:
                here, there = game.digest[:16], state.game_digest[:16]
                raise SnapshotMismatch(f"the game {state.task_id} has digest {here}…, in the snapshot {there}…")
            self._game, self._ref = game, self.library[index]
        self._state = state

    @classmethod
    def _encode(cls, state: EpisodeState) -> bytes:
        return durable.pack(list(astuple(state)))

    @classmethod
    def _decode(cls, data: bytes) -> EpisodeState:
        values = durable.unpack(data)
        kinds: tuple[Any, ...] = (str, str, int, int, int, str | None, bool)
        if len(values) != len(fields(EpisodeState)) or not all(isinstance(v, k) for v, k in zip(values, kinds)):
            raise SnapshotCorrupt(f"expected the fields of EpisodeState, found {values!r:.200}")
        return EpisodeState(*values)

    def _config(self) -> dict[str, Any]:
        return {"stop_when_won": self.stop_when_won}  # not the list of games: any that has this game will do

    def _blank(self) -> Self:
        child = type(self).__new__(type(self))
        child.__dict__.update(self.__dict__)  # the library and the compiled game are immutable and shared
        child.action_space, child.observation_space = Unicode(HARMLESS), Unicode()
        child._np_random = child._np_random_seed = None
        child._state, child._was_reset, child._lineage = None, False, None
        return child
