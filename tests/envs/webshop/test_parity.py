"""``compat="upstream"`` equals recordings of the original with Lucene exactly.

The recordings are in ``$SANDBOXGYM_PARITY_DATA/webshop``: random play, purchases of the goal's and of the first
product, and scripts of what is odd (bad actions, pages past the end, acting after a purchase, the search for
categories, …) on the first 1,000 products, with the nouns of titles that the recordings had.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

import sandboxgym
from sandboxgym.envs.webshop.shop import Shop, open_shop
from sandboxgym.envs.webshop.shop_state import ShopState

pytestmark = pytest.mark.slow

RECORDINGS = {"golden_synthetic": ("synthetic", 30), "golden_human": ("human", 10)}


@pytest.fixture(scope="module")
def folder(parity_data: Path) -> Path:
    return parity_data / "webshop"


@pytest.fixture
def shop(folder: Path, recording: str) -> Shop:
    kind, _ = RECORDINGS[recording]
    return open_shop(folder, kind, nouns=folder / "title_nouns.json", compat="upstream")


def episodes(folder: Path, recording: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / f"{recording}.jsonl").open()]
    assert len(found) >= RECORDINGS[recording][1]
    return found


def is_random(action: str) -> bool:
    return action.startswith("search[<r>")


def observed(shop: Shop, session: ShopState) -> dict[str, Any]:
    """A page in the words of the recordings."""
    view = shop.view(session)
    return {
        "obs": shop.observe(session, "text"),
        "obs_rich": shop.observe(session, "text_rich"),
        "url": shop.observe(session, "url"),
        "avail": {"has_search_bar": view.has_search_bar, "clickables": list(view.clickables)},
    }


def stepped(shop: Shop, session: ShopState) -> dict[str, Any]:
    """A step in the words of the recordings."""
    place = session.place
    state = {
        "keywords": None if place.query is None else place.query.split(" "),
        "page": place.number,
        "asin": place.asin,
        "asins": sorted(session.visited),
        "options": dict(place.options),
        "actions": dict(session.actions),
    }
    return {**observed(shop, session), "reward": session.reward, "done": session.done, "session_state": state}


def comparable(step: dict[str, Any], keys: Iterator[str]) -> dict[str, Any]:
    found = {key: step[key] for key in keys}
    if "session_state" in found:  # the rest is left over from an earlier episode of the same session
        state = found["session_state"]
        names = ("keywords", "page", "asin", "asins", "options", "actions")
        found["session_state"] = {**{name: state[name] for name in names}, "asins": sorted(state["asins"])}
    return found


@pytest.mark.parametrize("reborn", [False, True], ids=["plain", "reborn"])
@pytest.mark.parametrize("recording", RECORDINGS)
def test_same_as_the_original(folder: Path, shop: Shop, recording: str, reborn: bool) -> None:
    """``reborn``: between any two steps the session passes through bytes."""
    steps = 0
    for episode in episodes(folder, recording):
        session = shop.start(episode["session"])
        assert observed(shop, session) == episode["init"]
        for number, step in enumerate(episode["steps"]):
            if is_random(step["action"]):
                break  # what the original's global random stream gave cannot be told
            session = shop.act(session, step["action"], draw=int)
            if reborn:
                session = ShopState.decode(session.encode())
                shop.check(session)
            got = stepped(shop, session)
            assert got == comparable(step, iter(got)), f"{episode['name']}, step {number}, {step['action']!r}"
            steps += 1
    assert steps > 200


@pytest.mark.parametrize("recording", RECORDINGS)
def test_the_environment_gives_the_same(folder: Path, recording: str) -> None:
    """The recordings again through ``gym.make``, with a snapshot, a detour and a restore before every step."""
    kind, _ = RECORDINGS[recording]
    arguments = {"goals": kind, "nouns": str(folder / "title_nouns.json"), "compat": "upstream"}
    env = gym.make("sandboxgym/WebShop-v0", catalogue=str(folder), max_episode_steps=1_000_000, **arguments)
    for episode in episodes(folder, recording):
        observation, info = env.reset(options={"goal": episode["session"]})
        assert (observation, info["available_actions"]) == (episode["init"]["obs"], episode["init"]["avail"])
        for step in episode["steps"]:
            if is_random(step["action"]):
                break
            snap = sandboxgym.snapshot(env)
            env.step("search[detour]")
            sandboxgym.restore(env, snap)
            observation, reward, terminated, truncated, info = env.step(step["action"])
            wanted = (step["obs"], step["reward"], step["done"], step["avail"])
            assert (observation, reward, terminated, info["available_actions"]) == wanted
            assert not truncated
        if episode["kind"] == "buy_goal":
            breakdown = {"r_option": None, "w_option": 0.0} | episode["reward_breakdown"]
            assert {key: info["reward_info"][key] for key in breakdown} == breakdown
            assert info["reward_info"]["nouns"].startswith("file:title_nouns.json")


@pytest.mark.parametrize("recording", RECORDINGS)
def test_default_pays_the_same(folder: Path, recording: str) -> None:
    """Defaults differ in how the shop is used, not in what a purchase is worth."""
    kind, _ = RECORDINGS[recording]
    shop = open_shop(folder, kind, nouns=folder / "title_nouns.json")
    compared = 0
    for episode in episodes(folder, recording):
        if not episode["kind"].startswith("buy"):
            continue
        session = shop.start(episode["session"])
        for step in episode["steps"]:
            session = shop.act(session, step["action"], draw=int)
            if not session.valid_action:  # a value that needs its group's name here
                break
        else:
            assert (session.reward, session.done) == (episode["steps"][-1]["reward"], True)
            compared += 1
    assert compared >= 5
