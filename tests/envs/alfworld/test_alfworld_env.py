"""ALFWorld through ``gym.make``: its public behaviour, and the recordings with snapshots in between."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from gymnasium.error import DependencyNotInstalled

import sandboxgym
from sandboxgym import Snapshot, SnapshotCorrupt, SnapshotMismatch
from sandboxgym.envs.alfworld.game import GameError
from sandboxgym.envs.alfworld.games.library import DataNotFound, GameNotFound

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
    from sandboxgym.envs.alfworld.games.generated import generate_game

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
    late = len(env.snapshot().to_bytes())
    assert late < early + 200 and max(early, late) < 2048


def test_the_other_verb_for_placing_is_an_alias() -> None:
    plain, env = make(), make(aliases=True)
    for each in (plain, env):
        _, info = each.reset(options={"task": 0})
        for command in each.unwrapped.game.walkthrough:
            if command.startswith("move "):
                break
            _, _, _, _, info = each.step(command)
    thing, place = command.removeprefix("move ").split(" to ")
    alias = f"put {thing} in/on {place}"
    assert alias not in info["admissible_commands"] and command in info["admissible_commands"]
    assert plain.step(alias)[0] == "Nothing happens."
    snap = env.snapshot()
    for wrong in (alias.replace(thing, "moon 1"), alias.upper(), f"put {thing} on {place}", "put"):
        assert not env.step(wrong)[4]["valid_action"]
    step = env.step(f" {alias}")
    assert step[1] == 1.0 and step[4]["valid_action"]
    env.restore(snap)
    assert env.step(command) == step
    with pytest.raises(SnapshotMismatch, match="aliases"):
        plain.restore(snap)


@pytest.mark.slow
def test_aliases_in_the_older_grammar(alfworld_games: Path) -> None:
    file = next((alfworld_games / "old_grammar" / "valid_seen").glob("pick_and_place_simple-*/*/game.tw-pddl"))
    env = make(games=[str(file)], aliases=True)
    env.reset()
    verbs = set()
    for command in env.unwrapped.solve():
        verbs.add(command.split()[0])
        if command.startswith("put "):
            thing, place = command.removeprefix("put ").split(" in/on ")
            command = f"move {thing} to {place}"
        _, reward, _, _, info = env.step(command)
        assert info["valid_action"]
    assert reward == 1.0 and "put" in verbs


CONDITIONS = {
    "pick_and_place_simple": 1,
    "look_at_obj_in_light": 2,
    "pick_clean_then_place_in_recep": 3,
    "pick_heat_then_place_in_recep": 3,
    "pick_cool_then_place_in_recep": 3,
    "pick_two_obj_and_place": 2,
}


@pytest.mark.parametrize("task_type", CONDITIONS)
def test_goal_conditions_are_counted_as_in_alfred(task_type: str) -> None:
    env = make(task_types=[task_type])
    for task in range(5):
        _, info = env.reset(options={"task": task})
        shares = [info["goal_condition_success_rate"]]
        for command in env.unwrapped.solve():
            _, _, _, _, info = env.step(command)
            shares.append(info["goal_condition_success_rate"])
        total = CONDITIONS[task_type]
        assert all(round(share * total) / total == share for share in shares)
        assert max(shares[:-1]) < shares[-1] == 1.0 == info["goal_condition"]


def test_a_treated_thing_elsewhere_and_another_in_place_are_two_conditions_of_three() -> None:
    """ALFRED: one is in place, one is treated, but none is both. Ours: half of what any one of them needs."""
    env = make(task_types=["pick_clean_then_place_in_recep"])
    for task in range(40):
        env.reset(options={"task": task})
        game = env.unwrapped.game
        goals = [{str(game.planner.facts[n]) for n in range(len(game.planner.facts)) if pos >> n & 1}
                 for pos, _ in game.planner.goal]  # fmt: skip
        clean = {fact for goal in goals for fact in goal if fact.startswith("clean")}
        if len(clean) > 1:
            break
    one, other = sorted(clean)[:2]
    placed = next(fact for goal in goals if other in goal for fact in goal if fact.startswith("inside"))
    start = game.facts(game.initial())
    inside = {fact for fact in start if fact.startswith("inside")}
    moved = {fact for fact in inside if fact.startswith(placed.partition(",")[0])}
    facts = (start - moved) | {one, placed}
    progress = game.progress(game.state_of(facts, facts, moves=0))
    assert (progress.conditions_met, progress.conditions) == (2, 3)
    assert (progress.met, progress.total) == (1, 2)


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ValueError, match="found 'unity'"):
        make(engine="unity")


def test_a_missing_original_is_one_clear_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        DependencyNotInstalled, match=r"needs textworld.*pip install 'sandboxgym\[alfworld-reference\]'"
    ):
        make(engine="textworld")


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


@pytest.mark.parametrize("changes", [{"s": -1}, {"s": 1 << 5000}, {"t": -1}, {"t": 1 << 9000}, {"moves": -1}])
def test_a_state_that_no_game_has_is_refused(changes: dict[str, int]) -> None:
    env = make()
    before = env.reset(options={"task": 0})
    base = env.unwrapped
    blob = dict(Snapshot.from_bytes(base.snapshot().to_bytes())._sections())
    state = base._capture()
    blob["state"] = base._encode(replace(state, state=replace(state.state, **changes)))
    with pytest.raises(SnapshotCorrupt, match="expected a state of"):
        base.restore(Snapshot(base.snapshot().header, None, blob=blob))
    assert (base.last.observation, base.last.info) == before
