"""`ALFWorldEnv`: a thin Gymnasium layer over a `GameEngine` and a small immutable state value."""

from __future__ import annotations

import os
import random
import re
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal, Self, SupportsIndex, get_args

from sandboxgym import serialization as durable
from sandboxgym.brief import brief
from sandboxgym.core import Transition
from sandboxgym.envs.alfworld.card import CARD
from sandboxgym.envs.alfworld.expert import Expert
from sandboxgym.envs.alfworld.game import Game, GameState, GoalProgress
from sandboxgym.envs.alfworld.game_engine import EngineName, GameEngine, load, snapshot_spec
from sandboxgym.envs.alfworld.games.library import GameLibrary, GameNotFound, GameRef, instruction_of, open_library
from sandboxgym.envs.alfworld.solver import least_commands, shortest_plan
from sandboxgym.envs.alfworld.textworld_engine import TextWorldState
from sandboxgym.errors import SnapshotCorrupt, SnapshotMismatch, SnapshotNotSupported
from sandboxgym.spaces import Unicode
from sandboxgym.task_env import Task, TaskEnv, TaskRows

HARMLESS = ("look", "inventory")
"""Commands that every game understands; the action space samples them."""
ProgressKey = Literal["goals", "distance"]
_OTHER_VERB = (
    (re.compile("put (.+) in/on (.+)"), r"move \1 to \2"),
    (re.compile("move (.+) to (.+)"), r"put \1 in/on \2"),
)


_MAX_STATE = 2**18  # bytes of an unpacked state: a kilobyte of zlib data can expand to a megabyte
_MAX_MOVES, _MAX_COMMANDS = 2**31, 10_000
_USUAL_TEXT = (  # zlib dictionary: text common to encoded states; changing it requires a new `state_version`
    b"You reach furniture 1. You take the item 1 from the furniture 1. You move the item 1 to the furniture 1. "
    b"a book 1, a pen 1, a phone 1, a mug 1, a pencil 1, a cellphone 1, a keychain 1, a creditcard 1, a soapbar 1, "
    b"a spraybottle 1, a toiletpaper 1, a cloth 1, a candle 1, a pan 1, a pot 1, a plate 1, a bowl 1, a cup 1, "
    b"a butterknife 1, a spatula 1, a dishsponge 1, a saltshaker 1, a peppershaker 1, a lettuce 1, a tomato 1, "
    b"a potato 1, a bread 1, a apple 1, a egg 1, a knife 1, a fork 1, a spoon 1, and a winebottle 1. "
    b"coffeemachine toaster garbagecan sinkbasin microwave fridge dresser sidetable coffeetable diningtable armchair "
    b"sofa bed safe desk shelf stoveburner countertop cabinet drawer In it, you see nothing. "
    b"You are facing the desk 1. Next to it, you see nothing. There's nothing special about item 1. "
    b"You turn on the desklamp 1. You heat the apple 1 using the microwave 1. You are carrying: a  "
    b"You pick up the item 1 from the furniture 1. You open the drawer 1. The drawer 1 is open. It is closed. "
    b"train/valid_seen/valid_unseen/look_at_obj_in_light-pick_and_place_simple-pick_clean_then_place_in_recep-"
    b"pick_heat_then_place_in_recep-pick_cool_then_place_in_recep-pick_two_obj_and_place-None-DeskLamp-CounterTop-"
    b"Drawer-Cabinet-Shelf-30/trial_T20190909_0/game.tw-pddl embedded/train/ Nothing happens. "
    b"You arrive at cabinet 1. On the countertop 1, you see a "
)


@dataclass(frozen=True, slots=True)
class EpisodeState:
    """State of an episode: the whole content of a snapshot of `ALFWorldEnv`."""

    task_id: str
    game_digest: str
    state: GameState
    """State of the game; with the original engine a `TextWorldState`."""
    feedback: str | None
    """Output of the last command; None right after reset (the game's introduction)."""
    valid_action: bool


class ALFWorldEnv(TaskEnv[str, str]):
    """Household tasks in text: find, clean, heat, cool and place objects, or look at them under a lamp.

    ## Description
    Re-implementation of ALFWorld's text environment (Shridhar et al., 2021). The engine runs the PDDL and the grammar
    inside each ``game.tw-pddl``; text, admissible commands, reward and flags are exactly those of the original.
    ``engine="textworld"`` runs the original itself behind the same interface for comparison, hundreds of times slower.

    ``env.unwrapped.solve()`` returns the shortest sequence of commands that wins from the current state,
    ``env.unwrapped.expert()`` a rule-based player that sees only what an agent sees.

    ## Action Space
    A string: a command such as ``go to shelf 1``, ``open drawer 2``, ``take mug 1 from desk 1``,
    ``move mug 1 to shelf 1`` (games of 2022 and before: ``put mug 1 in/on shelf 1``), ``clean mug 1 with sinkbasin 1``,
    ``heat … with microwave 1``, ``cool … with fridge 1``, ``use desklamp 1``, ``examine …``, ``look``,
    ``inventory``, ``help``. It must be one of ``info["admissible_commands"]`` exactly; anything else prints
    ``Nothing happens.`` and changes nothing. With ``aliases=True`` a game also accepts the other verb for placing
    (``put … in/on …`` for ``move … to …``, and the reverse).

    ## Observation Space
    A string: the output of the game. The first one describes the room and states the task.

    ## Rewards
    1 in every state in which the goal holds, else 0.

    ## Starting State
    ``reset(seed=…, options={"game": …})`` plays that game: an index, a task id, a path or a unique ending of one
    (``"task"`` is a synonym). Without it a game is drawn from the environment's random stream.

    ## Episode End
    Terminated when the goal holds (``stop_when_won=False``: never). Truncated by the step limit of ``gym.make``, 50 as
    in the original.

    ## Information
    ``admissible_commands`` (sorted list), ``success`` and ``won``, ``task_id``, ``gamefile``, ``task_type``,
    ``progress_key`` and ``features`` (see the arguments ``progress`` and ``features``), ``state_hash`` (equal if
    and only if the game and its facts are), ``valid_action`` (the command, or its alias, was admissible), ``moves``
    (number of valid commands so far), and two measures of progress towards the goal, which the original only has for
    its THOR environment:

    - ``goal_condition_success_rate``: ALFRED's measure, the fraction of conditions met. There is 1 condition for
      placing an object, 2 for placing two (in the same receptacle) and for looking at one under a lamp (it is held; the
      lamp was used), 3 for placing a cleaned, heated or cooled one (one is in place; one is treated; one is both).
      Unlike in THOR, a lamp once used counts permanently, as it does for the goal.
    - ``goal_condition``: the largest fraction of the goal's literals that hold for one choice of objects (a measure of
      this package). Placing has 1 literal, placing two and treating have 2, looking has 3 (being at the lamp is one).
      For example, if a heated apple is held and another apple is on the table, this is 1/2 and the one above is 2/3.
      Both are 1 if and only if the game is won.

    ## Arguments
    - ``games``: ``"embedded"`` (generated games of this package; ``"embedded:seen"``, ``"embedded:unseen"``), a split
      of the official data under ``$ALFWORLD_DATA`` (``train``, ``valid_train``, ``valid_seen``, ``valid_unseen``), a
      directory, a file, or a list of files.
    - ``task_types``: only games of these types.
    - ``limit``: number of games to use, from the start of the list.
    - ``stop_when_won``: end the episode when the goal holds.
    - ``aliases``: accept the other verb for placing. It prints the same as the game's own verb, ``valid_action`` is
      true and ``admissible_commands`` do not change. Off by default, because the original refuses it.
    - ``progress``: content of ``progress_key``. ``"goals"``: goal literals met and whether a goal object is held.
      ``"distance"``: the same, plus a lower bound on the number of commands left to win; for baselines and schedules,
      not for policies.
    - ``features``: whether to give ``info["features"]``, numbers from which a trainer may learn state values: the
      fractions of literals and of conditions met, whether a goal object is held, and a tenth of the lower bound on the
      commands left. Privileged: they reveal where things are, so no policy may see them.
    - ``engine``: ``"native"``, or ``"textworld"`` for the original (``pip install 'sandboxgym[alfworld-reference]'``):
      the same observations and infos, but it takes 0.5 to 3 s to load a game, and per step 16 ms in embedded games and
      up to 70 ms in official ones on a busy machine. Its snapshots are of kind ``replay``. In the process that took
      them, forks included, they restore at once while the game stays loaded, as it does while an environment plays it;
      elsewhere the commands so far are replayed and the resulting facts are compared. A snapshot takes 100 to 200 kB of
      memory, and a few bytes per command on disk. All environments of a process that play the same game share one copy
      of the engine; its 4 to 16 MB are not freed, but reused for the next game. Neither engine restores the other's
      snapshots.

    ## Version History
    - v0: first version.
    """

    metadata: ClassVar[dict[str, Any]] = {  # type: ignore[misc]
        "render_modes": ["ansi"],
        "render_fps": 4,
        "unobservable": {"_game._hash_of": "hashes that are kept for later, and computed again where they are missing"},
    }
    card = CARD
    immutable_state = True
    apply_draws = False
    state_version = 2

    def __init__(
        self,
        games: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = "embedded",
        *,
        task_types: Sequence[str] | None = None,
        limit: int | None = None,
        stop_when_won: bool = True,
        aliases: bool = False,
        engine: EngineName = "native",
        progress: ProgressKey = "goals",
        features: bool = False,
        render_mode: str | None = None,
    ) -> None:
        if progress not in get_args(ProgressKey):
            raise ValueError(f"expected progress to be one of {get_args(ProgressKey)}, found {progress!r}")
        self.progress: ProgressKey = progress
        self.features = features
        self.snapshot_spec = snapshot_spec(engine)
        if engine != "native":
            self.metadata = {**self.metadata, "snapshot": asdict(self.snapshot_spec)}  # type: ignore[misc]
        self.engine = engine
        self.library: GameLibrary = open_library(games, task_types=task_types, limit=limit)
        self._task_types = task_types
        self.stop_when_won = stop_when_won
        self.aliases = aliases
        self.render_mode = render_mode
        self.observation_space = Unicode()
        self.action_space = Unicode(HARMLESS)
        self._game: GameEngine | None = None
        self._ref: GameRef | None = None
        self._state: EpisodeState | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start a game; see *Starting State*.

        Raises:
            GameNotFound: ``games`` has no such game, or several that match.
            GameError: the game's file is malformed or unsolvable.
            DataNotFound: the game's file is gone.
            ValueError: an option is unknown.
        """
        super().reset(seed=seed)
        self._enter(self.chosen_task(options, "game"))
        assert self._game is not None and self._ref is not None
        self._state = self._episode(self._game.initial(), feedback=None, valid_action=True)
        transition = self._transition()
        return transition.observation, transition.info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Send a command to the game."""
        self._state = self._following(action)
        return self._transition()

    def successors(self, actions: Sequence[str]) -> list[Transition]:
        """The result of each of these commands in the current state, which stays as it is."""
        return [self._shown(self._following(action)) for action in actions]

    def outcomes(self, actions: Sequence[str]) -> list[Transition]:
        """The results of `successors` without observations and with fewer info keys, in about a tenth of the time."""
        game, episode = self._playing()
        if not isinstance(game, Game):
            return self.successors(actions)
        found = []
        for action in actions:
            if not isinstance(action, str):
                raise TypeError(f"expected a command as a string, found {action!r}")
            state, valid = game.following(episode.state, self._translate(action) if self.aliases else action)
            won = game.won(state)
            info = {**self._measures(state, game.progress(state)), "success": won, "valid_action": valid}
            found.append(Transition(None, float(won), won and self.stop_when_won, False, info))
        return found

    def _following(self, action: str) -> EpisodeState:
        """The state after a command."""
        if not isinstance(action, str):
            raise TypeError(f"expected a command as a string, found {action!r}")
        game, episode = self._playing()
        command = self._translate(action) if self.aliases else action
        following, feedback, valid = game.step(episode.state, command)
        return self._episode(following, feedback=feedback, valid_action=valid)

    def _translate(self, action: str) -> str:
        """``action``, or its form with the other verb for placing if only that form is admissible."""
        game, episode = self._playing()
        command, admissible = action.strip(), game.admissible(episode.state)
        if command not in admissible:
            for pattern, other in _OTHER_VERB:
                if (match := pattern.fullmatch(command)) and (alias := match.expand(other)) in admissible:
                    return alias
        return action

    def render(self) -> str | None:  # type: ignore[override]
        """The last observation, in mode ``ansi``."""
        return self._transition().observation if self.render_mode == "ansi" else None

    def tasks(self, split: str | None = None) -> TaskRows:
        """The games as rows; a game's file is read only when its row's instruction is read.

        Args:
            split: a value of ``games``, such as ``"valid_seen"`` or ``"embedded:unseen"``, with the same
                ``task_types``.
        """
        library = self.library if split is None else open_library(split, task_types=self._task_types)
        return TaskRows(len(library), lambda number: _row(library[number]))

    def task_index(self, task: str | SupportsIndex) -> int:
        """Position of a game, given by position, id, path, or a unique ending of its id or path.

        Raises:
            GameNotFound: no game, or more than one, matches; the message has the nearest ids.
        """
        return self.library.index(task)

    def expert(self, *, rng: random.Random | None = None, noise: float = 0.0, **options: Any) -> Expert:
        """The rule-based player of these games; it sees observations only."""
        return Expert(rng=rng, noise=noise, **options)

    def solve(self, *, max_nodes: int = 1_000_000, max_seconds: float = 60.0) -> tuple[str, ...]:
        """The shortest sequence of commands that wins from the current state; see `solver.shortest_plan`.

        Raises:
            SolverBudgetExceeded: the search took more nodes or time.
            Unsolvable: no commands win from here.
        """
        return shortest_plan(self.game, self.game_state, max_nodes=max_nodes, max_seconds=max_seconds)

    @property
    def game(self) -> Game:
        """The compiled game being played."""
        return self._playing()[0].compiled

    @property
    def game_state(self) -> GameState:
        """The state of the game being played."""
        return self._playing()[1].state

    def _episode(self, state: GameState, *, feedback: str | None, valid_action: bool) -> EpisodeState:
        game, ref = self._game, self._ref
        assert game is not None and ref is not None
        return EpisodeState(ref.task_id, game.digest, state, feedback, valid_action)

    def _playing(self) -> tuple[GameEngine, EpisodeState]:
        self._check_reset("a step")
        assert self._game is not None and self._state is not None
        return self._game, self._state

    def _enter(self, index: int) -> None:
        self._game, self._ref = load(self.engine, self.library, index), self.library[index]

    def _transition(self) -> Transition:
        assert self._state is not None
        return self._shown(self._state)

    def _shown(self, episode: EpisodeState) -> Transition:
        """Observation, reward, flags and info of a state."""
        game, ref = self._game, self._ref
        assert game is not None and ref is not None
        state = episode.state
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
            "goal_condition_success_rate": progress.conditions_met / (progress.conditions or 1),
            **self._measures(state, progress),
            "state_hash": game.state_hash(state),
            "valid_action": episode.valid_action,
            "moves": state.moves,
        }
        observation = game.intro() if episode.feedback is None else episode.feedback
        return Transition(observation, float(won), won and self.stop_when_won, False, info)

    def _measures(self, state: GameState, progress: GoalProgress) -> dict[str, Any]:
        """Info keys for state values."""
        assert self._game is not None
        key = f"{progress.met}/{progress.total}{' held' if progress.held else ''}"
        if not self.features and self.progress == "goals":
            return {"progress_key": key}
        left = least_commands(self._game.compiled, state)
        found: dict[str, Any] = {"progress_key": f"{key} {left}" if self.progress == "distance" else key}
        if self.features:
            shares = progress.met / (progress.total or 1), progress.conditions_met / (progress.conditions or 1)
            found["features"] = (*shares, float(progress.held), left / 10)
        return found

    def _capture(self) -> EpisodeState:
        assert self._state is not None
        return self._state

    def _apply(self, state: EpisodeState) -> None:
        game, ref = self._game, self._ref
        if game is None or ref is None or (state.task_id, state.game_digest) != (ref.task_id, game.digest):
            try:
                index = self.library.index(state.task_id)
            except GameNotFound as error:
                raise SnapshotMismatch(f"the snapshot is of a game that is not available here: {error}") from error
            game, ref = load(self.engine, self.library, index), self.library[index]
            if game.digest != state.game_digest:
                here, there = game.digest[:16], state.game_digest[:16]
                raise SnapshotMismatch(f"the game {state.task_id} has digest {here}…, in the snapshot {there}…")
        resumed = game.resume(state.state)
        self._game, self._ref = game, ref
        self._state = state if resumed is state.state else replace(state, state=resumed)

    @classmethod
    def _encode(cls, state: EpisodeState) -> bytes:
        game = state.state
        digest = bytes.fromhex(state.game_digest)
        values = [state.task_id, digest, game.s, game.t, game.moves, state.feedback, state.valid_action]
        packed = durable.pack([*values, list(game.commands)] if isinstance(game, TextWorldState) else values)
        if len(packed) > _MAX_STATE or (isinstance(game, TextWorldState) and len(game.commands) > _MAX_COMMANDS):
            raise SnapshotNotSupported(
                f"cannot encode a state of {len(packed)} bytes, at most {_MAX_STATE} and {_MAX_COMMANDS} commands"
            )
        deflate = zlib.compressobj(9, zlib.DEFLATED, -15, zdict=_USUAL_TEXT)
        return deflate.compress(packed) + deflate.flush()

    @classmethod
    def _decode(cls, data: bytes) -> EpisodeState:
        inflate = zlib.decompressobj(-15, zdict=_USUAL_TEXT)
        packed = inflate.decompress(data, _MAX_STATE + 1)
        if not inflate.eof or inflate.unused_data:
            raise SnapshotCorrupt(f"expected a compressed state, found {len(data)} other bytes")
        values = durable.unpack(packed)
        kinds: tuple[Any, ...] = (str, bytes, int, int, int, str | None, bool, list)
        if (
            not isinstance(values, list)
            or len(values) not in (7, 8)
            or not all(isinstance(v, k) for v, k in zip(values, kinds))
        ):
            raise SnapshotCorrupt(f"expected the fields of EpisodeState, found {brief(values)}")
        task_id, digest, s, t, moves, feedback, valid_action, *commands = values
        if moves > _MAX_MOVES:
            raise SnapshotCorrupt(f"expected at most {_MAX_MOVES} moves, found {brief(moves)}")
        if commands and not (len(commands[0]) <= _MAX_COMMANDS and all(isinstance(c, str) for c in commands[0])):
            raise SnapshotCorrupt(f"expected at most {_MAX_COMMANDS} commands, found {brief(commands[0])}")
        state = TextWorldState(s, t, moves, tuple(commands[0])) if commands else GameState(s, t, moves)
        return EpisodeState(task_id, digest.hex(), state, feedback, valid_action)

    def _config(self) -> dict[str, Any]:
        # The list of games is left out: a snapshot fits every list that has its game.
        config = {"engine": self.engine, "stop_when_won": self.stop_when_won, "aliases": self.aliases}
        told = {"progress": self.progress, "features": self.features}
        usual = {"progress": "goals", "features": False}  # omitted, so that older snapshots stay valid
        return config | {name: value for name, value in told.items() if value != usual[name]}

    def _blank(self) -> Self:
        child = type(self).__new__(type(self))
        child.__dict__.update(self.__dict__)  # the library and the compiled game are immutable and shared
        child.action_space, child.observation_space = Unicode(HARMLESS), Unicode()
        child._np_random = child._np_random_seed = None
        child._state, child._was_reset, child._lineage = None, False, None
        return child


def _row(ref: GameRef) -> Task:
    return Task(ref.task_id, lambda: instruction_of(ref), ref.task_type)
