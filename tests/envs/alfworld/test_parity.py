"""The engine equals recordings of the original exactly (textworld 1.7.0 with alfworld 0.4.2).

The recordings are five files in ``$SANDBOXGYM_PARITY_DATA/alfworld``: random play with inadmissible commands thrown in,
walkthroughs, alfworld's hand-written expert, dense play that goes on after winning, and the grammar of 2021.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from sandboxgym.envs.alfworld.game import Game, GameState

pytestmark = pytest.mark.slow

RECORDINGS = {
    "golden_expert": 4,
    "golden_random": 16,
    "golden_random_oldgrammar": 4,
    "golden_rich": 3,
    "golden_walkthrough": 4,
}
OFFICIAL_GAMES = 3893


def compile_game(games: Path, name: str) -> Game:
    return Game.from_json((games / name).read_bytes(), name=name)


def observed(game: Game, state: GameState, observation: str) -> dict[str, Any]:
    """A step in the words of the recordings."""
    facts = sorted(game.facts(state))
    won = game.won(state)
    return {
        "obs": observation,
        "admissible": list(game.admissible(state)),
        "reward": float(won),
        "won": won,
        "done": won,
        "moves": state.moves,
        "n_facts": len(facts),
        "facts_md5": hashlib.md5("\n".join(facts).encode()).hexdigest(),
    }


def replay(
    game: Game, actions: list[str | None], carry_over: Callable[[Game, GameState], tuple[Game, GameState]]
) -> Iterator[tuple[dict[str, Any], frozenset[str]]]:
    """Play ``actions`` (the first, None, is the reset); ``carry_over`` is applied after each."""
    state = game.initial()
    observation = game.intro()
    for action in actions:
        if action is not None:
            before = state
            state, observation, valid = game.step(state, action)
            assert state.moves == before.moves + valid
            assert valid or state == before
        game, state = carry_over(game, state)
        yield observed(game, state, observation), game.facts(state)


@pytest.mark.parametrize("reborn", [False, True], ids=["plain", "reborn"])
@pytest.mark.parametrize("recording", RECORDINGS)
def test_same_as_the_original(recording: str, reborn: bool, parity_data: Path, alfworld_games: Path) -> None:
    """``reborn``: between any two steps the state passes through plain integers to another compiled instance."""
    episodes = [json.loads(line) for line in (parity_data / "alfworld" / f"{recording}.jsonl").open()]
    assert len(episodes) >= RECORDINGS[recording]
    for episode in episodes:
        game = compile_game(alfworld_games, episode["game"])
        twins = [game, compile_game(alfworld_games, episode["game"])]

        def carry_over(game: Game, state: GameState, twins: list[Game] = twins) -> tuple[Game, GameState]:
            if not reborn:
                return game, state
            return twins[game is twins[0]], GameState(**json.loads(json.dumps(asdict(state))))

        assert game.task_type == episode["task_type"]
        expected = episode["steps"]
        played = list(replay(game, [step["action"] for step in expected], carry_over))
        for number, (step, (got, _)) in enumerate(zip(expected, played, strict=True)):
            wanted = {key: step[key] for key in got}
            assert got == wanted, f"{episode['game']}, step {number}, action {step['action']!r}"
        assert sorted(played[0][1]) == episode["initial_facts"]
        assert sorted(played[-1][1]) == episode["final_facts"]


@pytest.mark.timeout(1800)  # every game: minutes
def test_every_walkthrough_wins(alfworld_games: Path) -> None:
    paths = sorted(path for path in alfworld_games.glob("*/*/*/game.tw-pddl") if path.parts[-4] != "old_grammar")
    assert len(paths) == OFFICIAL_GAMES
    for path in paths:
        game = compile_game(alfworld_games, str(path.relative_to(alfworld_games)))
        state = game.initial()
        assert game.walkthrough
        assert not game.won(state)
        for command in game.walkthrough:
            state, _, valid = game.step(state, command)
            assert valid, f"{game.name}: {command!r} is not admissible"
        progress = game.progress(state)
        assert game.won(state) and progress.met == progress.total > 0, game.name
