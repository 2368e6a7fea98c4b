"""The original engine (TextWorld's ``PddlEnv`` with alfworld's names), playable from any of its states.

What this module promises:

1. Texts, admissible commands, reward and validity are TextWorld's answers, not this package's computations. Values that
   TextWorld lacks (`GoalProgress`, the state hash) are computed from its facts.
2. Nothing is imported from textworld, alfworld or fast_downward before a game is loaded.
3. A `TextWorldState` is restored at once in the process, and for the loaded game, that it comes from:
   Fast Downward keeps every state that it visited under a number, and TextWorld's own facts, which differ from Fast
   Downward's, are kept beside it. Elsewhere the commands so far are replayed, and the resulting facts are compared with
   those captured.
4. One loaded game serves all environments of the process, forks included. A copy of Fast Downward's library (34 MB on
   disk, 4 to 16 MB of memory with a game) is never given back to the operating system, so it is used again for another
   game as soon as its present one is not in use: there are never more copies than games played at a time, and
   `KEPT_GAMES`.

TextWorld is not thread-safe (it replaces ``sys.stdout`` and ``sys.argv`` for a moment): one lock guards all calls.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

from gymnasium.error import DependencyNotInstalled

from sandboxgym.envs.alfworld.game import Game, GameState, GoalProgress
from sandboxgym.envs.alfworld.games.library import GameLibrary, content_of, file_key
from sandboxgym.errors import SnapshotCorrupt

KEPT_GAMES = 4
"""Number of loaded games kept when not in use; loading takes a second or two."""
PACKAGES = ("textworld", "fast_downward", "alfworld")


@dataclass(frozen=True, slots=True, eq=False)
class TextWorldMoment:
    """Data that bring TextWorld back to a state, 100 to 200 kB; never changed."""

    loading: object
    """Identifies the loaded game that the planner's number belongs to."""
    number: int
    """Number of the state in Fast Downward's registry."""
    facts: dict[Any, set[Any]]
    variables: tuple[dict[str, Any], dict[str, set[Any]], Counter[Any]]
    operators: dict[int, Any]
    seen: Any
    """TextWorld's ``GameState``: feedback, commands, won…"""
    last_action: Any


@dataclass(frozen=True, slots=True)
class TextWorldState(GameState):
    """A state of the original: its facts, the valid commands so far, and a way back while the game is loaded."""

    commands: tuple[str, ...] = ()
    moment: TextWorldMoment | None = field(default=None, compare=False, repr=False)


class TextWorldGame:
    """A game in the original engine; a `GameEngine`. Get it with :func:`load`."""

    def __init__(self, compiled: Game, content: bytes) -> None:
        self.compiled = compiled
        self.digest = compiled.digest
        with _lock:
            self._host = _idle.pop() if _idle else _Host()
            release = weakref.finalize(self, _idle.append, self._host)
            release.atexit = False
            self._loading = object()
            self._host.load(json.loads(content), self._loading)
            self._initial = self._state(())

    def initial(self) -> TextWorldState:
        """State at reset. The original grounds the game again for it, with the same result each time."""
        return self._initial

    def intro(self) -> str:
        """Observation at reset."""
        return str(self._moment(self._initial).seen.feedback)

    def admissible(self, state: TextWorldState) -> tuple[str, ...]:
        """Admissible commands, as the original lists them."""
        return tuple(self._moment(state).seen.admissible_commands)

    def won(self, state: TextWorldState) -> bool:
        """Tell whether the original says that the game is won."""
        return bool(self._moment(state).seen.won)

    def step(self, state: TextWorldState, command: str) -> tuple[TextWorldState, str, bool]:
        """Play ``command`` in ``state`` in the original engine."""
        with _lock:
            self._host.go_to(self._moment(state))
            self._host.step(command)
            valid = self._host.last_action is not None  # TextWorld's only sign of an inadmissible command
            following = self._state((*state.commands, command.strip()) if valid else state.commands)
            return following, str(self._moment(following).seen.feedback), valid

    def progress(self, state: GameState) -> GoalProgress:
        """Progress computed from the original's facts; see `GoalProgress`."""
        return self.compiled.progress(state)

    def state_hash(self, state: GameState) -> str:
        """Hash of the original's facts: the same as the native engine's in an equal state."""
        return self.compiled.state_hash(state)

    def resume(self, state: TextWorldState) -> TextWorldState:
        """Convert ``state`` to one with a moment of this loaded game, by a replay if it has none.

        Raises:
            SnapshotCorrupt: the commands do not lead to the captured facts.
        """
        if state.moment is not None and state.moment.loading is self._loading:
            return state
        reached = self.initial()
        for command in state.commands:
            reached, feedback, valid = self.step(reached, command)
            if not valid:
                raise SnapshotCorrupt(f"the replay of {self.compiled.name} failed at {command!r}: {feedback}")
        if reached != state:
            raise SnapshotCorrupt(
                f"the replay of {len(state.commands)} commands of {self.compiled.name} led to other facts than captured"
            )
        return reached

    def _moment(self, state: TextWorldState) -> TextWorldMoment:
        if state.moment is None or state.moment.loading is not self._loading:
            raise ValueError("expected a state of this loaded game; pass others to resume() first")
        return state.moment

    def _state(self, commands: tuple[str, ...]) -> TextWorldState:
        moment = self._host.moment()
        text_facts = (f"{fact.name}({','.join(v.name for v in fact.arguments)})" for fact in moment.seen["_facts"])
        found = self.compiled.state_of(self._host.planner_facts(), text_facts, moves=int(moment.seen.moves))
        return TextWorldState(found.s, found.t, found.moves, commands, moment)


class _Host:
    """A TextWorld environment with its copy of the planner's library."""

    def __init__(self) -> None:
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
        from textworld import EnvInfos
        from textworld.envs.pddl.pddl import PddlEnv

        self._game = PddlEnv(EnvInfos(feedback=True, won=True, moves=True, admissible_commands=True))
        self._env = AlfredDemangler(self._game)
        self._at: TextWorldMoment | None = None
        self._loading: object = None

    def load(self, content: dict[str, Any], loading: object) -> None:
        self._at, self._loading = None, loading
        arguments = sys.argv
        try:  # the translator of Fast Downward puts its own there, and leaves them
            self._env.load(content)
            self._env.reset()
        finally:
            sys.argv = arguments

    def step(self, command: str) -> None:
        self._at = None  # until the step is over: an exception may leave it anywhere
        self._env.step(command)

    @property
    def last_action(self) -> Any:
        return self._game._last_action

    def moment(self) -> TextWorldMoment:
        """Capture the present moment."""
        if self._at is None:
            game = self._game
            state = game._pddl_state
            self._at = TextWorldMoment(
                loading=self._loading,
                number=game.downward_lib.get_state_id(),
                facts={signature: set(facts) for signature, facts in state._facts.items()},
                variables=_copied(state._vars_by_name, state._vars_by_type, state._var_counts),
                operators=state._operators,
                seen=game.state,
                last_action=game._last_action,
            )
        return self._at

    def go_to(self, moment: TextWorldMoment) -> None:
        """Go back to ``moment``, which is of the game loaded here."""
        if moment is self._at:
            return
        self._at = None
        game = self._game
        state = game._pddl_state
        game.downward_lib.set_state_id(moment.number)
        state._facts.clear()
        state._facts.update({signature: set(facts) for signature, facts in moment.facts.items()})
        by_name, by_type, counts = _copied(*moment.variables)
        state._vars_by_name, state._var_counts = by_name, counts
        state._vars_by_type.clear()
        state._vars_by_type.update(by_type)
        state._operators = moment.operators
        game.state, game.prev_state = moment.seen, None  # every step starts a new GameState and only reads the last
        game._last_action, game._moves = moment.last_action, moment.seen.moves
        self._at = moment

    def planner_facts(self) -> Iterator[str]:
        """Facts that are true for Fast Downward, without axioms."""
        from textworld.envs.pddl.logic import Atom

        library = self._game.downward_lib
        atoms = (Atom * library.get_state_size())()
        library.get_state(atoms)
        for atom in atoms:
            kind, _, fact = atom.name.partition(" ")
            if kind == "Atom" and not fact.startswith("new-axiom@"):
                yield fact.replace(", ", ",")


def _copied(
    by_name: dict[str, Any], by_type: dict[str, set[Any]], counts: Counter[Any]
) -> tuple[dict[str, Any], dict[str, set[Any]], Counter[Any]]:
    """Copy tables of variables, which TextWorld changes in place."""
    return dict(by_name), {kind: set(variables) for kind, variables in by_type.items()}, Counter(counts)


_lock = threading.RLock()
_idle: list[_Host] = []
_loaded: weakref.WeakValueDictionary[Hashable, TextWorldGame] = weakref.WeakValueDictionary()
_recent: deque[TextWorldGame] = deque(maxlen=KEPT_GAMES)


def _unlock() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # another thread may hold the lock at the moment of a fork
    os.register_at_fork(after_in_child=_unlock)


def check_installed() -> None:
    """Raise `gymnasium.error.DependencyNotInstalled`, with the install command, if the original is missing."""
    missing = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        raise DependencyNotInstalled(
            f"engine='textworld' runs the original and needs {', '.join(missing)}: "
            "pip install 'sandboxgym[alfworld-reference]'"
        )


def load(library: GameLibrary, number: int) -> TextWorldGame:
    """Load game ``number`` of ``library`` in the original engine, shared with all its players in the process.

    Raises:
        GameError, DataNotFound: as `GameLibrary.load`.
    """
    compiled = library.load(number)  # refuses, with a clear message, what is no game
    ref = library[number]
    key = file_key(ref)
    with _lock:
        game = _loaded.get(key)
        if game is None or game.digest != compiled.digest:
            game = _loaded[key] = TextWorldGame(compiled, content_of(ref))
        if game in _recent:
            _recent.remove(game)
        _recent.append(game)
        return game
