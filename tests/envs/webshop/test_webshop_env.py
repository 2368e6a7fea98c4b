"""WebShop through ``gym.make``: its public behaviour."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from little_shop import LAMP, MUG, RUG, nouns, write

from sandboxgym import Snapshot, SnapshotCorrupt, SnapshotMismatch
from sandboxgym.envs.webshop.env import TaskNotFound
from sandboxgym.envs.webshop.shop_state import ShopPage, ShopState

ID = "sandboxgym/WebShop-v0"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("little"))


@pytest.fixture(scope="module")
def many_goals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same products, but 40 x 50 kinds of mug: enough goals for the official splits."""
    directory = write(tmp_path_factory.mktemp("many"))
    file = directory / "items_shuffle_60.json"
    products = json.loads(file.read_text())
    products[0]["customization_options"] = {
        "color": [{"value": f"shade {number}"} for number in range(40)],
        "size": [{"value": f"{number} cm"} for number in range(50)],
    }
    file.write_text(json.dumps(products))
    return directory


def make(directory: Path, **arguments: Any) -> gym.Env[str, str]:
    return gym.make(ID, catalogue=str(directory), **{"pos": nouns, **arguments})


def mug_task(env: gym.Env[str, str]) -> str:
    """The task of the small red mug."""
    goals = env.unwrapped.shop.goals
    return next(goal.goal_id for goal in goals if dict(goal.options) == {"color": "red", "size": "small"})


BUY = ("search[striped mug]", f"click[{MUG.lower()}]", "click[red]", "click[small]", "click[buy now]")


def test_info_describes_the_page(directory: Path) -> None:
    env = make(directory)
    observation, info = env.reset(options={"task": mug_task(env)})
    instruction = info["instruction"]
    assert observation == f"WebShop [SEP] Instruction: [SEP] {instruction} [SEP] Search"
    assert info["available_actions"] == {"has_search_bar": True, "clickables": []}
    assert info["admissible_commands"] == [f"search[{instruction}]"]
    assert (info["page_type"], info["success"], info["valid_action"]) == ("search", False, True)
    hashes, pages = {info["state_hash"]}, ["search"]
    for action in BUY[:-1]:
        assert action in info["admissible_commands"] or action.startswith("search")
        _, reward, terminated, truncated, info = env.step(action)
        assert (reward, terminated, truncated, info["valid_action"]) == (0.0, False, False, True)
        assert "reward_info" not in info
        hashes.add(info["state_hash"])
        pages.append(info["page_type"])
    assert len(hashes) == 5 and pages == ["search", "results", "item", "item", "item"]
    assert info["progress_key"] == "item goal 2/2"
    _, reward, terminated, truncated, info = env.step(BUY[-1])
    assert (reward, terminated, truncated, info["success"], info["page_type"]) == (1.0, True, False, True, "done")
    assert info["admissible_commands"] == []
    parts = info["reward_info"]
    assert parts["r_type"] == parts["r_att"] == parts["r_option"] == 1.0 and parts["r_price"] is True
    assert parts["w_att"] + parts["w_option"] + parts["w_price"] == 1.0
    assert parts["nouns"] == "callable:nouns"


def test_a_wrong_action_changes_nothing(directory: Path) -> None:
    env = make(directory)
    before, info = env.reset(seed=1)
    for action in ("click[buy now]", "click[search]", "think[hm]", "search[ ]", "search", ""):
        observation, reward, terminated, truncated, after = env.step(action)
        assert (observation, reward, terminated, truncated) == (before, 0.0, False, False)
        assert after == {**info, "valid_action": False}


def test_upstream_lists_the_search_button(directory: Path) -> None:
    env = make(directory, compat="upstream")
    _, info = env.reset(seed=1)
    assert info["available_actions"] == {"has_search_bar": True, "clickables": ["search"]}
    assert info["admissible_commands"] == [f"search[{info['instruction']}]"]
    observation, *_, info = env.step("click[search]")
    assert not info["valid_action"] and observation.startswith("WebShop [SEP]")


def test_progress_key_can_tell_what_buying_now_would_earn(directory: Path) -> None:
    env = make(directory, progress="worth")
    _, info = env.reset(options={"task": mug_task(env)})
    keys, reward = [info["progress_key"]], 0.0
    for action in BUY:
        _, reward, *_, info = env.step(action)
        keys.append(info["progress_key"])
    assert reward == 1.0
    assert (keys[0], keys[-2:]) == ("search", ["item 1.0", "done 1.0"])
    worths = [float(key.split()[1]) for key in keys[2:]]
    assert worths == sorted(worths) and worths[0] < 1.0  # it rises with every option
    assert keys[1].startswith("results ") and 0.0 < float(keys[1].split()[1]) < 1.0
    env.reset(options={"task": mug_task(env)})
    assert env.step("search[zzzz]")[4]["progress_key"] == "results 0.0"
    with pytest.raises(ValueError, match="expected progress to be one of"):
        make(directory, progress="price")


@pytest.mark.parametrize(
    ("mode", "start"),
    [
        ("text", "WebShop [SEP] Instruction:"),
        ("text_rich", "WebShop\nInstruction: \n"),
        ("url", "http://127.0.0.1:3000/0"),
        ("html", "<!DOCTYPE html>\n"),
    ],
)
def test_observation_modes(directory: Path, mode: str, start: str) -> None:
    env = make(directory, observation_mode=mode, compat="upstream")
    assert env.reset(options={"goal": 0})[0].startswith(start)
    with pytest.raises(ValueError, match="'text_rich'"):
        make(directory, observation_mode="pixels")


def test_render_shows_the_page(directory: Path) -> None:
    env = make(directory, render_mode="ansi")
    env.reset(seed=0)
    assert env.render().endswith("[button] Search [button_]\n")


def test_tasks_are_chosen_by_position_id_or_index_of_the_goal(many_goals: Path) -> None:
    env = make(many_goals, split="eval")
    assert env.unwrapped.num_tasks == 1000
    for options in ({"task": 7}, {"task": np.int64(7)}, {"task": "synthetic/507"}, {"goal": 507}):
        assert env.reset(options=options)[1]["task_id"] == "synthetic/507"
    for wrong in (
        {"task": 1000},
        {"task": -1},
        {"task": "synthetic/3"},
        {"task": "human/507"},
        {"task": "mug"},
        {"goal": 7},
    ):
        with pytest.raises(TaskNotFound, match=r"expected a (task|goal)"):
            env.reset(options=wrong)
    for strange in ({"session": 7}, {"task": 1, "goal": 1}):
        with pytest.raises(ValueError, match="'goal' and 'task'"):
            env.reset(options=strange)


def test_some_goals_of_a_split(many_goals: Path) -> None:
    env = make(many_goals, split="eval", tasks=[9, "synthetic/507", 7, 2])
    assert env.unwrapped.num_tasks == 3
    ids = [env.reset(options={"task": task})[1]["task_id"] for task in range(3)]
    assert ids == ["synthetic/502", "synthetic/507", "synthetic/509"]
    assert {env.reset(seed=seed)[1]["task_id"] for seed in range(30)} == set(ids)
    with pytest.raises(TaskNotFound, match="expected a task from 0 to 2"):
        env.reset(options={"task": 3})
    with pytest.raises(TaskNotFound, match="expected a task from 0 to 999, found 1000"):
        make(many_goals, split="eval", tasks=[1000])
    for wrong, message in (([], "expected at least one"), ("synthetic/5", "expected a list"), (3, "expected a list")):
        with pytest.raises(ValueError, match=message):
            make(many_goals, tasks=wrong)


def test_goals_are_drawn_from_the_split_by_seed(many_goals: Path) -> None:
    env, other = make(many_goals, split="test"), make(many_goals, split="test")
    drawn = [env.reset(seed=5)[1]["task_id"]] + [env.reset()[1]["task_id"] for _ in range(30)]
    again = [other.reset(seed=5)[1]["task_id"]] + [other.reset()[1]["task_id"] for _ in range(30)]
    assert drawn == again and len(set(drawn)) > 20
    assert all(int(task.partition("/")[2]) < 500 for task in drawn)


def test_upstream_draws_by_weight_and_never_the_first_goal(directory: Path) -> None:
    env = make(directory, compat="upstream")
    env.reset(seed=0)
    shop, drawn = env.unwrapped.shop, []
    for _ in range(3000):
        drawn.append(int(env.reset()[1]["task_id"].partition("/")[2]))
    weights = shop.goals.weights()
    expected = np.array([0.0, *weights[:-2], weights[-2] + weights[-1]]) / weights.sum()
    assert np.abs(np.bincount(drawn, minlength=len(weights)) / 3000 - expected).max() < 0.03
    assert 0 not in drawn


LIST_GOALS = """
import sys, gymnasium as gym, sandboxgym
seed, directory = int(sys.argv[1]), sys.argv[2]
lists = []
for split in ("test", "eval", "train", "product-train"):
    env = gym.make("sandboxgym/WebShop-v0", catalogue=directory, split=split)
    env.reset(seed=seed)
    inner = env.unwrapped
    lists.append([inner.shop.goals[goal].instruction for goal in inner.goals_here])
    assert [env.reset(options={"task": task})[1]["instruction"] for task in range(3)] == lists[-1][:3]
import hashlib
print(*[hashlib.sha256(repr(each).encode()).hexdigest() for each in lists], *map(len, lists))
"""


def test_splits_are_the_same_for_every_seed_and_worker(many_goals: Path) -> None:
    """A trainer that shuffled the goals by each worker's seed trained on its validation goals (verl-agent #262)."""
    outputs = set()
    for seed, hash_seed in ((0, "1"), (1000, "2")):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", LIST_GOALS, str(seed), str(many_goals)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        outputs.add(done.stdout)
    assert len(outputs) == 1
    sizes = outputs.pop().split()[4:]
    assert [int(size) for size in sizes[:3]] == [500, 1000, 2012 - 1500]


def test_official_splits_are_disjoint_and_complete(many_goals: Path) -> None:
    parts = [list(make(many_goals, split=name).unwrapped.goals_here) for name in ("test", "eval", "train")]
    assert [*parts[0], *parts[1], *parts[2]] == list(range(make(many_goals).unwrapped.num_tasks))
    with pytest.raises(ValueError, match="'product-test'"):
        make(many_goals, split="dev")


def test_human_goals(directory: Path) -> None:
    env = make(directory, goals="human")
    _, info = env.reset()
    assert info["task_id"] == "human/0" and info["instruction"].startswith("i want a woven rug")
    env.step("search[woven rug]")
    env.step(f"click[{RUG.lower()}]")
    assert env.step("click[buy now]")[1] == 1.0


def test_the_step_limit_can_be_changed(directory: Path) -> None:
    for arguments, limit in (({}, 50), ({"max_episode_steps": 3}, 3)):
        env = make(directory, **arguments)
        env.reset(seed=0)
        assert [env.step("click[x]")[3] for _ in range(limit)] == [False] * (limit - 1) + [True]


def test_an_action_is_a_string(directory: Path) -> None:
    env = make(directory, disable_env_checker=True)
    env.reset(seed=0)
    with pytest.raises(TypeError, match="found 3"):
        env.step(3)  # type: ignore[arg-type]


def test_before_the_first_reset(directory: Path) -> None:
    env = make(directory).unwrapped
    for use in (lambda: env.step("search[mug]"), env.snapshot, lambda: env.session):
        with pytest.raises(ResetNeeded):
            use()


def test_a_snapshot_restores_at_any_point_of_an_episode(directory: Path) -> None:
    env = make(directory)
    env.reset(options={"task": mug_task(env)})
    snaps = [env.snapshot()]
    steps = []
    for action in BUY:
        steps.append(env.step(action))
        snaps.append(env.snapshot())
    for number, snap in reversed(list(enumerate(snaps))):
        observation, info = env.restore(snap)
        if number:
            assert (observation, info) == (steps[number - 1][0], steps[number - 1][4])
            assert env.unwrapped.last == steps[number - 1]
        assert [env.step(action) for action in BUY[number:]] == steps[number:]


def test_forks_shop_on_their_own(directory: Path) -> None:
    env = make(directory)
    env.reset(options={"task": mug_task(env)})
    for action in BUY[:3]:
        env.step(action)
    small, large = env.fork(2)
    small.step("click[small]")
    large.step('click[large 3"]')
    assert small.step("click[buy now]")[1] == 1.0
    assert large.step("click[buy now]")[1] == 0.75
    assert env.unwrapped.session.place.options == (("color", "red"),)
    assert small.unwrapped.shop is env.unwrapped.shop


def test_random_products_are_part_of_the_state(directory: Path) -> None:
    env = make(directory, compat="upstream")
    env.reset(seed=0)
    env.step("search[<r>]")
    snap = env.snapshot()
    following = env.step("click[next >]")[0]
    assert env.restore(snap)[0] == env.unwrapped.last.observation
    assert env.step("click[next >]")[0] == following, "the random stream is restored, too"
    others = {child.step("click[next >]")[0] for child in env.fork(3, seed=1)}
    assert len(others | {following}) == 4


def test_a_snapshot_is_small(directory: Path) -> None:
    env = make(directory, max_episode_steps=10_000)
    env.reset(options={"task": mug_task(env)})
    for _ in range(200):
        env.step("search[bowl mug lamp rug hook tray rack]")
        env.step(env.unwrapped.shop.page(env.unwrapped.session).commands[5])
        env.step("click[< prev]")
        env.step("click[back to search]")
    for action in BUY[:-1]:
        env.step(action)
    assert len(env.unwrapped.session.encode()) < 300
    assert len(env.snapshot().to_bytes()) < 2048


def test_snapshots_fit_equal_shops_and_no_others(directory: Path, many_goals: Path, tmp_path: Path) -> None:
    env = make(directory)
    env.reset(seed=3)
    env.step("search[desk lamp]")
    file = tmp_path / "snapshot"
    env.snapshot().save(file)
    snap = Snapshot.load(file)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert make(write(elsewhere)).restore(snap)[0] == env.unwrapped.last.observation
    for other, what in (
        (make(many_goals), "catalogue"),
        (make(directory, price_seed=1), "price_seed"),
        (make(directory, compat="upstream"), "compat"),
        (make(directory, observation_mode="html"), "observation_mode"),
        (make(directory, progress="worth"), "progress"),
        (make(directory, pos="embedded"), "nouns"),
        (make(directory, goals="human"), "goals"),
    ):
        with pytest.raises(SnapshotMismatch, match=what):
            other.restore(snap)


def test_a_snapshot_with_an_impossible_page_is_refused(directory: Path) -> None:
    env, other = make(directory).unwrapped, make(directory).unwrapped
    env.reset(seed=3)
    env.step("search[desk lamp]")
    before = env.last
    other.reset(seed=3)
    other._session = ShopState(0, ShopPage("item", "lamp", 1, LAMP, (("width", "90"),)))
    with pytest.raises(SnapshotCorrupt, match="no option"):
        env.restore(Snapshot.from_bytes(other.snapshot().to_bytes()))
    assert env.last == before
