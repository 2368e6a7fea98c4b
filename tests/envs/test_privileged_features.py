"""State features for trainers: their values, and that no prompt shows them."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

import sandboxgym
from sandboxgym.adapters.prompts import make_prompt
from sandboxgym.envs.alfworld.games.library import open_library
from sandboxgym.envs.alfworld.solver import least_commands, shortest_plan

ENVS = ("ALFWorld", "WebShop")


def made(name: str, **options: object) -> gym.Env:
    return gym.make(f"sandboxgym/{name}-v0", max_episode_steps=20, **options)


@pytest.mark.parametrize("name", ENVS)
def test_features_are_asked_for_and_change_nothing_else(name: str) -> None:
    plain, told = made(name), made(name, features=True)
    rng = np.random.default_rng(0)
    for task in range(3):
        one, other = (env.reset(seed=0, options={"task": task})[1] for env in (plain, told))
        for _ in range(8):
            features = other.pop("features")
            assert one == other
            assert all(isinstance(number, float) for number in features)
            command = one["admissible_commands"][int(rng.integers(len(one["admissible_commands"])))]
            ahead = dict(zip(other["admissible_commands"], sandboxgym.successors(told, other["admissible_commands"])))
            *_, ended, _, one = plain.step(command)
            other = told.step(command)[4]
            assert ahead[command].info == other
            if ended:
                break
    plain.close(), told.close()


@pytest.mark.parametrize("name", ENVS)
def test_snapshots_of_environments_without_features_stay_what_they_were(name: str) -> None:
    env = made(name)
    assert "features" not in env.unwrapped._config()
    assert made(name, features=True).unwrapped._config()["features"] is True
    env.close()


@pytest.mark.parametrize("name", ENVS)
@pytest.mark.parametrize("prompt", ["plain", "react", "choice"])
def test_no_prompt_shows_them(name: str, prompt: str) -> None:
    env = made(name, features=True)
    observation, info = env.reset(seed=0, options={"task": 0})
    shown = make_prompt(prompt, f"sandboxgym/{name}-v0", list_actions=True)
    without = {key: value for key, value in info.items() if key != "features"}
    assert shown.show(observation, info) == shown.show(observation, without)
    env.close()


@pytest.mark.parametrize("split", ["train", "unseen"])
def test_least_commands_are_never_too_many(split: str) -> None:
    library, rng = open_library(f"embedded:{split}"), np.random.default_rng(0)
    exact = 0
    for number in range(12):
        game = library.load(number)
        state = game.initial()
        for _ in range(4):
            least, plan = least_commands(game, state), shortest_plan(game, state)
            assert least <= len(plan)
            exact += least == len(plan)
            for command in plan[: int(rng.integers(3))]:
                state = game.step(state, command)[0]
    assert exact > 24  # of 48
    for command in shortest_plan(game, state):
        state = game.step(state, command)[0]
    assert least_commands(game, state) == 0


def test_keys_by_distance_tell_how_far_it_is() -> None:
    env = made("ALFWorld", progress="distance")
    _, info = env.reset(seed=0, options={"task": 0})
    keys = [info["progress_key"]]
    for command in env.unwrapped.solve():
        keys.append(env.step(command)[4]["progress_key"])
    left = [int(key.split()[-1]) for key in keys]
    assert left[-1] == 0 and left == sorted(left, reverse=True)
    with pytest.raises(ValueError, match="expected progress to be one of"):
        made("ALFWorld", progress="far")
    env.close()


def test_a_shop_tells_what_its_page_may_earn() -> None:
    """Buying with the goal's options chosen is never worth less than with what is chosen now, and somewhere more."""
    env = made("WebShop", features=True)
    gains = []
    for task in range(6):
        _, info = env.reset(seed=0, options={"task": task})
        assert info["features"] == (0.0, 0.0, 0.0, 0.0, 0.0)
        *_, info = env.step(info["admissible_commands"][0])
        assert info["features"][:3] == (1.0, 0.0, 0.0)
        product = next(c for c in info["admissible_commands"] if c not in ("click[back to search]", "click[next >]"))
        *_, info = env.step(product)
        page, (now, best) = info["features"][:3], info["features"][3:]
        assert page == (0.0, 1.0, 0.0) and now <= best
        gains.append(best - now)
        _, reward, *_ = env.step("click[buy now]")
        assert reward == pytest.approx(now)
    assert max(gains) > 0
    env.close()
