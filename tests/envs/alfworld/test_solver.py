"""Shortest plans win, and no shorter plan does."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import gymnasium as gym
import pytest

import sandboxgym
from sandboxgym.envs.alfworld.game import Game, GameState
from sandboxgym.envs.alfworld.games.library import open_library
from sandboxgym.envs.alfworld.solver import SolverBudgetExceeded, Unsolvable, shortest_plan

SKIPPED = ("look", "inventory", "help", "examine")
"""Commands that change nothing that a goal or another command asks for."""


def check(game: Game, state: GameState, plan: tuple[str, ...]) -> None:
    """The plan wins with its last command."""
    for command in plan:
        assert not game.won(state)
        state, _, valid = game.step(state, command)
        assert valid, command
    assert game.won(state)


def breadth_first(game: Game, state: GameState, limit: int) -> int | None:
    """The number of commands to the goal by brute force; None if it is more than ``limit``."""
    layer, seen = [state], {state.s}
    for depth in range(limit + 1):
        if any(game.won(state) for state in layer):
            return depth
        following = []
        for state in layer:
            for operator in game.planner.operators(state.s):
                s = operator.apply(state.s)
                if s not in seen and not game.command(operator).startswith(SKIPPED):
                    seen.add(s)
                    following.append(GameState(s, 0, 0))
        layer = following
    return None


def wander(game: Game, steps: int, seed: int) -> GameState:
    rng = random.Random(seed)
    state = game.initial()
    for _ in range(steps):
        state, _, _ = game.step(state, rng.choice(game.admissible(state)))
    return state


@pytest.mark.parametrize("split", ["train", "unseen"])
def test_plans_win_and_are_no_longer_than_walkthroughs(split: str) -> None:
    library = open_library(f"embedded:{split}")
    for number in range(60):
        game = library.load(number)
        plan = shortest_plan(game)
        check(game, game.initial(), plan)
        assert len(plan) <= len(game.walkthrough or plan)


@pytest.mark.parametrize("steps", [0, 12])
def test_as_short_as_brute_force_finds(steps: int) -> None:
    """From the start, and from states with something in the hand, doors open and things misplaced."""
    library = open_library("embedded")
    compared = 0
    for number in itertools.count():
        game = library.load(number)
        state = wander(game, steps, seed=number)
        plan = shortest_plan(game, state)
        check(game, state, plan)
        if len(plan) <= 6:
            assert breadth_first(game, state, len(plan)) == len(plan), game.name
            compared += 1
        if compared == 12:
            return


def test_a_won_game_needs_nothing() -> None:
    game = open_library("embedded").load(2)
    state = game.initial()
    for command in shortest_plan(game):
        state, _, _ = game.step(state, command)
    assert shortest_plan(game, state) == ()


def test_budgets_are_kept() -> None:
    game = open_library("embedded").load(3)
    with pytest.raises(SolverBudgetExceeded, match="1 nodes"):
        shortest_plan(game, max_nodes=1)
    with pytest.raises(SolverBudgetExceeded, match="0 s"):
        shortest_plan(game, max_seconds=0)


def test_a_dead_end_is_named() -> None:
    game = open_library("embedded").load(0)
    with pytest.raises(Unsolvable, match="embedded/train/0"):
        shortest_plan(game, GameState(0, 0, 0))


def test_an_environment_solves_from_where_it_is() -> None:
    env = gym.make("sandboxgym/ALFWorld-v0")
    env.reset(options={"task": 4})
    whole = env.unwrapped.solve()
    env.step(whole[0])
    snap = sandboxgym.snapshot(env)
    assert env.unwrapped.solve() == whole[1:]
    for command in env.unwrapped.solve():
        _, reward, terminated, _, _ = env.step(command)
    assert (reward, terminated) == (1.0, True)
    env.restore(snap)
    assert len(env.unwrapped.solve()) == len(whole) - 1


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 25])
def test_official_games(steps: int, alfworld_games: Path) -> None:
    library = open_library("valid_seen", data=alfworld_games)
    for number in range(0, len(library), 7):
        game = library.load(number)
        state = wander(game, steps, seed=number)
        try:
            plan = shortest_plan(game, state)
        except Unsolvable:  # some things can be picked up, but put nowhere, and then the hand is full for good
            held = next(fact for fact in game.facts(state) if fact.startswith("holds("))
            thing = held.rpartition(",")[2].rstrip(")")
            assert not any(op.action == "putobject" and thing in op.args for op in game.planner.all_operators())
            continue
        check(game, state, plan)
        if not steps:
            assert len(plan) <= len(game.walkthrough or plan)
        if len(plan) <= 4:
            assert breadth_first(game, state, len(plan)) == len(plan)
