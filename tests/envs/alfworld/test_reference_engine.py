"""The native engine and the original, side by side through ``gym.make``: equal at every step.

Equal means everything that ``reset``, ``step`` and ``restore`` return: observation, reward, flags, and all of the info,
whose ``state_hash`` is one of the planner's and the text engine's facts.
"""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from components import missing

import sandboxgym
from sandboxgym import Snapshot, SnapshotCorrupt, SnapshotMismatch
from sandboxgym.envs.alfworld import textworld_engine
from sandboxgym.envs.alfworld.games.library import open_library

pytestmark = pytest.mark.slow

WRONG = ("LOOK", "", "go to nowhere 1", "take all", "look  around", "put mug 1 on desk 1")


@pytest.fixture(autouse=True)
def original() -> None:
    for package in textworld_engine.PACKAGES:
        if importlib.util.find_spec(package) is None:
            missing("textworld", f"{package} is not installed: pip install 'sandboxgym[alfworld-reference]'")


def make(**arguments: Any) -> gym.Env[str, str]:
    return gym.make("sandboxgym/ALFWorld-v0", **arguments)


def walk_both(games: Any, tasks: Sequence[int], steps: int, *, seed: int = 0) -> int:
    """Random play on both engines, with inadmissible commands, detours and restores; the number of compared steps."""
    native, reference = (
        make(games=games, stop_when_won=False, max_episode_steps=1000, engine=engine)
        for engine in ("native", "textworld")
    )
    compared = 0
    for task in tasks:
        rng = random.Random(f"{seed} {task}")
        here = native.reset(options={"task": task})
        assert here == reference.reset(options={"task": task})
        for step in range(steps):
            if step % 4 == 1:
                snapshots = native.snapshot(), reference.snapshot()
                for _ in range(2):
                    command = rng.choice(native.unwrapped.last.info["admissible_commands"])
                    assert native.step(command) == reference.step(command)
                last = here[0], here[-1]
                assert native.restore(snapshots[0]) == reference.restore(snapshots[1]) == last
            commands = WRONG if rng.random() < 0.1 else here[-1]["admissible_commands"]
            if rng.random() < 0.3 and not native.unwrapped.last.info["won"]:
                commands = native.unwrapped.solve()[:1]  # random play alone hardly ever treats or places anything
            command = rng.choice(commands)
            here = native.step(command)
            assert here == reference.step(command), (task, step, command)
            compared += 1
    return compared


def test_embedded_games() -> None:
    assert walk_both("embedded", range(8), 12) == 8 * 12


def test_official_games(alfworld_games: Path) -> None:
    assert walk_both(str(alfworld_games / "valid_seen"), (3, 120), 8) == 16


def test_the_older_grammar(alfworld_games: Path) -> None:
    file = next((alfworld_games / "old_grammar" / "valid_seen").glob("pick_cool*/*/game.tw-pddl"))
    assert walk_both([str(file)], [0], 8) == 8


def test_the_same_plan_wins_in_the_original() -> None:
    env = make(engine="textworld")
    for task in range(6, 12):
        _, info = env.reset(options={"task": task})
        plan = env.unwrapped.solve()
        assert info["task_type"] == env.unwrapped.game.task_type
        for command in plan:
            _, reward, terminated, _, info = env.step(command)
        assert (reward, terminated, info["won"], info["goal_condition"]) == (1.0, True, True, 1.0)


def test_forks_share_the_loaded_game_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    env = make(engine="textworld")
    env.reset(options={"task": 1})
    env.step("look")
    monkeypatch.setattr(textworld_engine._Host, "load", None)  # nothing is loaded or replayed from here on
    children = env.fork(3, seed=0)
    rngs = [random.Random(number) for number in range(3)]
    alone = []
    for child, rng in zip(children, rngs):
        commands = []
        for _ in range(5):
            commands.append(rng.choice(child.unwrapped.last.info["admissible_commands"]))
            child.step(commands[-1])
        alone.append((commands, child.unwrapped.last))
    together = env.fork(3, seed=0)
    for turn in range(5):
        for child, (commands, _) in zip(together, alone):
            child.step(commands[turn])
    assert [child.unwrapped.last for child in together] == [last for _, last in alone]
    assert env.unwrapped.last.info["moves"] == 1
    children[0].close()
    assert env.step("inventory")[4]["moves"] == 2


def test_a_saved_snapshot_is_replayed_and_checked() -> None:
    env = make(engine="textworld")
    env.reset(options={"task": 2})
    for command in (*env.unwrapped.solve()[:3], "nonsense"):
        env.step(command)
    data = env.snapshot().to_bytes()
    last = env.unwrapped.last
    assert last.observation == "Nothing happens." and not last.info["valid_action"]
    env.reset(options={"task": 3})
    assert env.restore(Snapshot.from_bytes(data)) == (last.observation, last.info)
    other = make(engine="textworld")
    assert other.restore(Snapshot.from_bytes(data)) == (last.observation, last.info)
    assert other.step("inventory") == env.step("inventory")


@pytest.mark.parametrize("commands", [["go to the moon"], ["look"]], ids=["inadmissible", "elsewhere"])
def test_a_replay_that_goes_wrong_is_refused(commands: list[str]) -> None:
    env = make(engine="textworld")
    env.reset(options={"task": 2})
    env.step(env.unwrapped.solve()[0])
    base = env.unwrapped
    state, before = base._capture(), base.last
    lying = textworld_engine.TextWorldState(state.state.s, state.state.t, 1, tuple(commands))
    blob = dict(Snapshot.from_bytes(base.snapshot().to_bytes())._sections())
    blob["state"] = base._encode(replace(state, state=lying))
    with pytest.raises(SnapshotCorrupt, match=r"replay of"):
        base.restore(Snapshot(base.snapshot().header, None, blob=blob))
    assert base.last == before


def test_engines_do_not_mix() -> None:
    native, reference = make(), make(engine="textworld")
    native.reset(options={"task": 0})
    reference.reset(options={"task": 0})
    for env, snap in ((reference, native.snapshot()), (native, reference.snapshot())):
        with pytest.raises(SnapshotMismatch, match="engine"):
            env.restore(snap)


def test_what_its_snapshots_cover_is_declared() -> None:
    env = make(engine="textworld")
    assert (env.snapshot_spec.kind, env.snapshot_spec.cost) == ("replay", "steps")
    assert env.unwrapped.metadata["snapshot"]["kind"] == "replay"
    assert make().snapshot_spec.kind == "memory" == make().unwrapped.metadata["snapshot"]["kind"]


def test_the_process_is_left_as_it_was() -> None:
    arguments, output = sys.argv, sys.stdout
    library = open_library("embedded")
    made = len(textworld_engine._idle)
    for number in range(20, 30):  # one after the other: they take turns in the same few copies of the planner
        textworld_engine.load(library, number)
    textworld_engine._recent.clear()
    assert len(textworld_engine._idle) <= max(made, textworld_engine.KEPT_GAMES + 1) + textworld_engine.KEPT_GAMES
    assert sys.argv is arguments and sys.stdout is output


def test_nothing_of_the_original_is_imported_without_need() -> None:
    code = (
        "import sys, gymnasium as gym, sandboxgym; env = gym.make('sandboxgym/ALFWorld-v0'); env.reset(seed=0); "
        "env.step('look'); sys.exit(any(m in sys.modules for m in ('textworld', 'alfworld', 'fast_downward')))"
    )
    root = str(Path(sandboxgym.__file__).parents[1])
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": root}).returncode == 0
