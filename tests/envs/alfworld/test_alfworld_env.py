"""ALFWorld through ``gym.make``: what users see of it, and the recordings once more with snapshots in between."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

import sandboxgym
from sandboxgym import SnapshotMismatch
from sandboxgym.envs.alfworld.game import GameError
from sandboxgym.envs.alfworld.library import DataNotFound, GameNotFound

ID = "sandboxgym/ALFWorld-v0"


def make(**arguments: Any) -> gym.Env[str, str]:
    return gym.make(ID, **arguments)


def test_info_describes_the_state() -> None:
    env = make()
    _, info = env.reset(options={"game": 3})
    assert info["admissible_commands"] == sorted(info["admissible_commands"])
    assert (info["success"], info["won"], info["goal_condition"] < 1) == (False, False, True)
    assert info["task_id"] == info["gamefile"] == "embedded/train/3"
    assert info["valid_action"] and info["moves"] == 0
    hashes = {info["state_hash"]}
    for command in env.unwrapped.game.walkthrough:
        _, reward, terminated, _, info = env.step(command)
        hashes.add(info["state_hash"])
    assert (reward, terminated, info["won"], info["goal_condition"]) == (1.0, True, True, 1.0)
    assert info["moves"] == len(env.unwrapped.game.walkthrough) == len(hashes) - 1


def test_an_inadmissible_command_changes_nothing() -> None:
    env = make()
    _, before = env.reset(seed=1)
    observation, reward, terminated, truncated, info = env.step("LOOK")
    assert (observation, reward, terminated, truncated) == ("Nothing happens.", 0.0, False, False)
    assert not info["valid_action"]
    assert {k: v for k, v in info.items() if k != "valid_action"} == {k: before[k] for k in info if k != "valid_action"}


def test_white_space_around_a_command_is_ignored() -> None:
    env = make()
    env.reset(seed=1)
    assert env.step("  look\n")[4]["valid_action"]


def test_the_episode_can_go_on_after_winning() -> None:
    env = make(stop_when_won=False)
    env.reset(options={"task": 0})
    for command in env.unwrapped.game.walkthrough:
        _, reward, terminated, _, info = env.step(command)
    assert (reward, terminated, info["success"]) == (1.0, False, True)


def test_reset_draws_games_by_seed_and_keeps_drawing() -> None:
    env, other = make(), make()
    drawn = [env.reset(seed=5)[1]["task_id"]] + [env.reset()[1]["task_id"] for _ in range(5)]
    again = [other.reset(seed=5)[1]["task_id"]] + [other.reset()[1]["task_id"] for _ in range(5)]
    assert drawn == again and len(set(drawn)) > 3


@pytest.mark.parametrize("word", ["game", "task"])
@pytest.mark.parametrize("wanted", [7, "embedded/train/7", "train/7"])
def test_a_game_is_chosen_by_number_id_or_ending(word: str, wanted: int | str) -> None:
    assert make().reset(options={word: wanted})[1]["task_id"] == "embedded/train/7"


def test_the_step_limit_is_the_originals() -> None:
    env = make()
    env.reset(seed=0)
    truncated = [env.step("inventory")[3] for _ in range(50)]
    assert truncated == [False] * 49 + [True]


def test_snapshots_fit_any_list_of_games_that_has_the_game() -> None:
    env, other = make(games="embedded:train:20"), make(games="embedded:train:30")
    env.reset(options={"game": 11})
    snap = env.snapshot()
    observation, info = other.restore(snap)
    assert info["task_id"] == "embedded/train/11" and observation == env.unwrapped.last.observation
    with pytest.raises(SnapshotMismatch, match="embedded/train/11"):
        make(games="embedded:train:10").restore(snap)


def test_a_changed_game_file_is_a_mismatch(tmp_path: Path) -> None:
    from sandboxgym.envs.alfworld.generate import generate_game

    file = tmp_path / "game.tw-pddl"
    file.write_bytes(generate_game("train", 0))
    env = make(games=[str(file)])
    env.reset()
    snap = env.snapshot()
    file.write_bytes(generate_game("train", 6))
    with pytest.raises(SnapshotMismatch, match="digest"):
        make(games=[str(file)]).restore(snap)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "expected JSON"),
        ("{}", "pddl_domain is missing"),
        ('{"pddl_domain": "", "grammar": "", "pddl_problem": "", "solvable": false}', "solvable"),
        ('{"pddl_domain": "(define", "grammar": "", "pddl_problem": ""}', "pddl_domain"),
    ],
)
def test_a_bad_game_file_is_named_with_its_fault(content: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "game.tw-pddl"
    file.write_text(content)
    with pytest.raises(GameError, match=words) as error:
        make(games=[str(file)]).reset()
    assert str(file) in str(error.value)


def test_what_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    with pytest.raises(DataNotFound, match="ALFWORLD_DATA"):
        make(games="valid_seen")
    with pytest.raises(DataNotFound, match="nowhere"):
        make(games=[str(tmp_path / "nowhere" / "game.tw-pddl")])
    with pytest.raises(GameNotFound, match="no such game"):
        make().reset(options={"game": "no such game"})
    with pytest.raises(ValueError, match="level"):
        make().reset(options={"level": 3})


def test_an_action_is_a_string() -> None:
    env = make(disable_env_checker=True)
    env.reset(seed=0)
    with pytest.raises(TypeError, match="found 3"):
        env.step(3)  # type: ignore[arg-type]


def test_a_snapshot_is_small_whatever_the_length_of_the_episode() -> None:
    env = make(max_episode_steps=1000)
    env.reset(seed=0)
    early = len(env.snapshot().to_bytes())
    for _ in range(300):
        env.step("inventory")
    assert len(env.snapshot().to_bytes()) < early + 200 < 2048


@pytest.mark.slow
@pytest.mark.parametrize("recording", ["expert", "random", "random_oldgrammar", "rich", "walkthrough"])
def test_same_as_the_original_with_a_snapshot_and_restore_before_every_step(
    recording: str, parity_data: Path, alfworld_games: Path
) -> None:
    env = make(games=str(alfworld_games), stop_when_won=False, max_episode_steps=10_000)
    for line in (parity_data / "alfworld" / f"golden_{recording}.jsonl").open():
        episode = json.loads(line)
        observation, info = env.reset(options={"game": episode["game"]})
        reward = 0.0
        for number, step in enumerate(episode["steps"]):
            if number:
                snap = sandboxgym.Snapshot.from_bytes(env.snapshot().to_bytes())
                env.step(info["admissible_commands"][number % len(info["admissible_commands"])])  # a detour
                assert env.restore(snap) == (observation, info)
                observation, reward, _, _, info = env.step(step["action"])
            expected = [step[name] for name in ("obs", "admissible", "reward", "won", "moves")]
            assert [observation, info["admissible_commands"], reward, info["won"], info["moves"]] == expected
