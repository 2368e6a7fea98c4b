"""``compat="upstream"`` compared with the original's Python code, on deliberately odd catalogues.

``$SANDBOXGYM_WEBSHOP_ORIGINAL`` names a checkout of princeton-nlp/WebShop; it needs ``flask``, ``beautifulsoup4`` and
``thefuzz==0.19.0``. Search and nouns are ours on both sides: those have tests of their own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from components import missing
from little_shop import PRODUCTS, shop_in, write

from sandboxgym.bench.webshop import original
from sandboxgym.envs.webshop.shop import Shop
from sandboxgym.envs.webshop.shop_state import ShopState

pytestmark = pytest.mark.slow

BUTTONS = (
    "description",
    "features",
    "reviews",
    "attributes",
    "buy now",
    "next >",
    "< prev",
    "back to search",
    "search",
)
PLACES = ("search_results", "item_page", "item_sub_page", "done")
ODD = (*BUTTONS, *PLACES, "size", "red", "red", "café", "Ünïcode ﬀ", 'a "quote"', "it's", "a[b]", "x]", "[y")
ODD += ("<b>bold</b>", "&amp; co", "x &lt; y &nbsp;", "a\nb", "tab\there", "a  b", " lead", "trail \n")
BLANK = ("", " ", "\n", " \n ", "\t\t", "\xa0", "\x0b", "\u2003", "\x1c")
QUERIES = (
    "mug",
    "bowl filler",
    " ",
    "  ",
    "zzz",
    '"red"',
    '"size" mug',
    "café ☕",
    "<c> beauty",
    "<c>  x",
    "<c>",
    "<a> b",
)
QUERIES += ("<q> rugs", "<q>", "<q> Kitchen Things", "a/b", "..", "+", "tab\tbed", "ŞIIİ", *PLACES)
WRAPPED = ("{}", "{}", "{}", "{}", "{}", "{} x", "{}]", " {}", "{}\nmore", "more\n{}", "x{}", "[{}]")


@pytest.fixture(scope="module")
def checkout() -> Path:
    folder = os.environ.get("SANDBOXGYM_WEBSHOP_ORIGINAL")
    if not folder:
        missing("webshop-original", "SANDBOXGYM_WEBSHOP_ORIGINAL is not set (it names a checkout of WebShop)")
    for package in ("flask", "bs4", "thefuzz"):
        if importlib.util.find_spec(package) is None:
            missing("webshop-original", f"{package} is not installed")
    return Path(folder)


def odd_catalogue(directory: Path, seed: int) -> Path:
    """The little shop with odd options and texts in half of its products."""
    rng = random.Random(seed)
    products = json.loads(json.dumps(PRODUCTS))
    for product in products:
        if rng.random() < 0.5:
            groups = rng.sample(("Size", "color", "description", "<i>g</i>", *BLANK[:3]), rng.randint(1, 3))
            product["customization_options"] = {
                group: [{"value": value} for value in rng.choices(ODD + BLANK[:2], k=rng.randint(1, 4))]
                for group in groups
            }
        if rng.random() < 0.5:
            product["name"] = rng.choice(ODD + BLANK)
            product["full_description"] = rng.choice(ODD + BLANK)
            product["small_description"] = rng.choice((rng.choices(ODD + BLANK, k=3), [], "just text"))
    write(directory)
    (directory / "items_shuffle_60.json").write_text(json.dumps(products))
    return directory


def an_action(rng: random.Random, clickables: Sequence[str], instruction: str) -> str:
    if "buy now" in clickables and rng.random() < 0.15:
        action = "click[buy now]"
    elif clickables and rng.random() < 0.75:
        products = [name for name in clickables if name.startswith("b0")]
        name = rng.choice(products if products and rng.random() < 0.6 else clickables)
        action = f"click[{name.upper() if rng.random() < 0.1 else name}]"
    else:
        words = " ".join(rng.choices((*QUERIES[:6], *PLACES), k=rng.randint(1, 3)))
        action = f"search[{rng.choice((instruction, words, *QUERIES))}]"
    return rng.choice(WRAPPED).format(action)


def ours(shop: Shop, session: ShopState) -> dict[str, Any]:
    place, page = session.place, shop.page(session)
    return {
        **{mode: shop.observe(session, mode) for mode in ("text", "text_rich", "url")},
        "actions": {"has_search_bar": page.view.has_search_bar, "clickables": list(page.clickables)},
        "reward": session.reward,
        "done": session.done,
        "place": (place.query and place.query.split(" "), place.number, place.asin, dict(place.options)),
        "visited": set(session.visited),
        "counts": dict(session.actions),
    }


def theirs(env: Any, goal: int, status: tuple[float, bool] = (0.0, False)) -> dict[str, Any]:
    state = env.server.user_sessions[str(goal)]
    observations = {}
    for env.observation_mode in ("url", "text_rich", "text"):
        observations[env.observation_mode] = env.observation
    return {
        **observations,
        "actions": env.get_available_actions(),
        "reward": status[0],
        "done": status[1],
        "place": (state["keywords"], state["page"], state["asin"], state["options"]),
        "visited": state["asins"],
        "counts": dict(state["actions"]),
    }


@pytest.mark.parametrize("kind", ["synthetic", "human"])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.filterwarnings("ignore")
def test_random_play_on_odd_catalogues(checkout: Path, tmp_path: Path, seed: int, kind: str) -> None:
    directory = odd_catalogue(tmp_path, seed)
    shop = shop_in(directory, goals=kind, compat="upstream", show_attributes=seed == 1)
    rng, pages = random.Random(seed), set()
    with original(checkout, directory, shop) as env:
        for _ in range(10):
            goal = rng.randrange(len(shop.goals))
            env.reset(session=goal)
            session = shop.start(goal)
            assert ours(shop, session) == theirs(env, goal)
            for _ in range(20):
                action = an_action(rng, shop.page(session).clickables, shop.goals[goal].instruction)
                before, session = session, shop.act(session, action, draw=int)
                try:
                    _, reward, done, _ = env.step(action)
                except (IndexError, TypeError):  # nothing happens here
                    assert (session.place, session.valid_action) == (before.place, False)
                    del env.server.user_sessions[str(goal)]
                    break
                assert ours(shop, session) == theirs(env, goal, (reward, done)), action
                pages.add(session.place.sub_page or session.place.page)
    assert pages >= {"search", "results", "item", "done"}
