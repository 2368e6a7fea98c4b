from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandboxgym.envs.webshop.catalogues.catalogue import load_catalogue
from sandboxgym.envs.webshop.catalogues.product import Product
from sandboxgym.envs.webshop.goals import Goal, goals
from sandboxgym.envs.webshop.reward import reward
from sandboxgym.envs.webshop.words.fuzzy import THRESHOLD, normalize_color, same, token_set_ratio
from sandboxgym.envs.webshop.words.nouns import CachedNouns, open_nouns

NOUNS = CachedNouns(lambda title: title.lower().split(), name="every word")

PRODUCT = Product(
    asin="B1",
    title="Oak Wall Shelf",
    description="Finished with Natural Oil.",
    bullets=("Holds many books", "Easy to mount"),
    attributes=("solid wood", "wall mounted"),
    options={"color": ("red", "light blue"), "size": ("small", "large")},
    query="wall shelves",
    product_category="Home › Furniture › Shelves",
    category="garden",
    pricing=(20.0,),
    price_text="$20.0",
    image="",
    instruction=None,
    instruction_attributes=(),
)
GOAL = Goal(
    asin="B1",
    category="garden",
    query="wall shelves",
    name="Oak Wall Shelf",
    product_category="Home › Furniture › Shelves",
    instruction="Find me a shelf",
    attributes=("solid wood", "wall mounted"),
    price_upper=30.0,
    options=(("color", "red"), ("size", "large")),
    weight=1.0,
    kind="synthetic",
    goal_id="synthetic/0",
)


def buy(goal=GOAL, product=PRODUCT, *, price=20.0, options=None, nouns=NOUNS):
    chosen = {"color": "red", "size": "large"} if options is None else options
    return reward(goal, product, price=price, options=chosen, nouns=nouns)


def goal_of(record):
    options = record["goal_options"]
    return Goal(
        asin=record["asin"],
        category=record["category"],
        query=record["query"],
        name=record["name"],
        product_category=record["product_category"],
        instruction=record["instruction_text"],
        attributes=tuple(record["attributes"]),
        price_upper=record["price_upper"],
        options=tuple(options.items()) if isinstance(options, dict) else tuple(options),
        weight=record["weight"],
        kind="synthetic" if isinstance(options, dict) else "human",
        goal_id="",
    )


@pytest.fixture(scope="module")
def recordings(parity_data):
    return parity_data / "webshop"


def test_rewards_equal_the_recorded_ones(recordings):
    shop = load_catalogue(recordings)
    rows = [json.loads(line) for line in (recordings / "reward_golden.jsonl").open()]
    assert len(rows) >= 150
    for row in rows:
        product = shop[row["asin"]]
        known = {row["goal"]["name"]: row["nouns_goal"], product.title: row["nouns_purchased"]}
        nouns = CachedNouns(known.__getitem__, name="recorded")
        goal = goal_of(row["goal"])
        found = reward(goal, product, price=row["price"], options=row["options"], nouns=nouns)
        assert found.total == row["reward"]
        assert found.base == row["base"]
        breakdown = dict(row["info"])
        for part in ("r_option", "w_option"):
            breakdown.setdefault(part, {"r_option": None, "w_option": 0}[part])
        assert {name: getattr(found, name) for name in breakdown} == breakdown
        other = reward(goal, product, price=row["price"], options=row["options"], nouns=open_nouns("embedded"))
        assert other.base == row["base"]


def test_rewards_of_purchases_by_people(recordings):
    bought = 0
    for path in sorted((recordings / "human_trajs").glob("*.jsonl")):
        last = json.loads(path.read_text().splitlines()[-1])
        info, content = last["reward_info"], last["content"]
        goal = goal_of(last["goal"])
        options = content["options"] if isinstance(content["options"], dict) else {}
        found = buy(goal, price=content["price"], options=options)
        assert found.r_option == info.get("r_option")
        assert found.r_price == info["r_price"]
        parts = found.w_att * info["r_att"] + found.w_option * (found.r_option or 0) + found.w_price * found.r_price
        assert info["r_type"] * parts == pytest.approx(last["reward"])
        bought += 1
    assert bought >= 25


def test_what_was_asked_for_gives_one():
    found = buy()
    assert (found.total, found.base, found.r_type, found.r_att, found.r_option, found.r_price) == (1, 1, 1, 1, 1, True)
    assert (found.w_att, found.w_option, found.w_price) == (0.4, 0.4, 0.2)
    assert (found.query_match, found.category_match, found.title_score) == (True, True, 1)


def test_the_price_is_one_part_and_may_reach_the_cap():
    assert buy(price=30.0).r_price is True
    assert buy(price=30.01).r_price is False
    assert buy(price=30.01).total == 0.8


def test_attributes_are_also_found_in_title_features_and_description():
    goal = replace(GOAL, attributes=("wall shelf", "books easy to", "natural oil", "brass"))
    found = buy(goal)
    assert found.r_att == 0.75
    assert buy(replace(GOAL, attributes=("Natural Oil",))).r_att == 0  # only the product's text is lowered


def test_nearly_equal_attributes_count():
    assert buy(replace(GOAL, attributes=("solid woods",))).r_att == 1
    assert buy(replace(GOAL, attributes=("solid",))).r_att == 1
    assert buy(replace(GOAL, attributes=("solid gold",))).r_att == 0


def test_options_are_compared_without_regard_to_their_group():
    assert buy(options={"size": "red", "color": "large"}).r_option == 1
    assert buy(options={"color": "red"}).r_option == 0.5
    assert buy(options={}).r_option == 0
    assert buy(replace(GOAL, options=())).r_option is None
    assert buy(replace(GOAL, options=())).w_option == 0
    assert buy(replace(GOAL, options=()), options={}).total == 1


def test_a_pair_is_met_by_the_name_of_its_group():
    assert buy(replace(GOAL, options=(("size", "x-large"),)), options={"fit": "size"}).r_option == 1


def test_colours_are_reduced_to_their_name():
    human = replace(GOAL, options=("dark blue",), kind="human")
    assert buy(human, options={"color": "navy blue"}).r_option == 1
    assert buy(human, options={"color": "light blue"}).r_option == 1
    assert buy(human, options={"color": "green"}).r_option == 0
    # Of a pair only a value that is a colour's name is.
    assert buy(replace(GOAL, options=(("color", "gray wash"),)), options={"color": "gray wash"}).r_option == 0
    assert buy(replace(GOAL, options=(("color", "tan"),)), options={"style": "standard"}).r_option == 1
    assert normalize_color("standard") == "tan"
    assert normalize_color("dark blue") == "blue"
    assert normalize_color(("size", "dark blue")) == ("size", "dark blue")
    assert normalize_color(("color", "blue")) == "blue"
    assert normalize_color("plaid") == "plaid"


@pytest.mark.parametrize(
    ("title", "query", "category", "r_type", "title_score"),
    [
        ("Oak Wall Shelf", "lamps", "Toys", 1.0, 1.0),  # the title decides
        ("a b c d e", "wall shelves", "Toys", 0.0, 0.0),  # nothing in common: the query does not help
        ("oak x x x x x x x x", "lamps", "Toys", 0.5, 1 / 5),
        ("oak x x x x x x x x", "wall shelves", "Toys", 1.0, 1 / 5),
        ("oak x x x x x x x x", "lamps", "Shelves › Home", 1.0, 1 / 5),
        ("oak x x x x x x x x", "lamps", "Home › Home", 0.5, 1 / 5),
    ],
)
def test_the_type_of_the_product(title, query, category, r_type, title_score):
    goal = replace(GOAL, name="oak a1 a2 a3 a4" if title.startswith("oak") else GOAL.name)
    found = buy(goal, replace(PRODUCT, title=title, query=query, product_category=category))
    assert (found.r_type, found.title_score) == (r_type, title_score)
    assert found.total == found.base * r_type


def test_a_title_with_little_in_common_counts_a_tenth_whatever_matches():
    goal = replace(GOAL, name="oak " + " ".join(f"w{n}" for n in range(10)))
    found = buy(goal)
    assert found.title_score == 1 / 11
    assert found.query_match
    assert found.category_match
    assert found.r_type == 0.1


def test_repeated_nouns_make_the_goals_own_title_score_below_one():
    name = "Shelf Oak Shelf Shelf"
    assert buy(replace(GOAL, name=name), replace(PRODUCT, title=name)).title_score == 0.5


def test_a_title_without_nouns_scores_a_fifth():
    nouns = CachedNouns(lambda title: [], name="none")
    found = buy(nouns=nouns)
    assert (found.title_score, found.r_type) == (0.2, 1.0)
    assert buy(product=replace(PRODUCT, query="", product_category=""), nouns=nouns).r_type == 0.5


def test_texts_of_the_originals_tests():
    assert buy(
        replace(GOAL, options=("grey", "XL", "pack of 12")), options={"a": "pack of 12", "b": "blue", "c": "XL"}
    ).r_option == pytest.approx(2 / 3)
    assert (
        buy(
            replace(GOAL, options=("cool powder snow", "XL", "pack of 12")),
            options={"a": "pack of 12", "b": "powder snow", "c": "XL"},
        ).r_option
        == 1
    )
    tea = replace(PRODUCT, attributes=("tea tree", "essential oil", "natural ingredients"))
    assert buy(replace(GOAL, attributes=("tea tree", "essential oils", "natural ingredients")), tea).r_att == 1


@pytest.mark.parametrize(
    ("one", "other", "ratio"),
    [
        ("10x50 uhd binoculars", "8x40 uhd binoculars", 85),  # 87 with thefuzz 0.22
        ("essential oils", "essential oil", 96),
        ("Tea  Tree!", "tree, tea", 100),
        ("solid wood", "wood", 100),
        ("", "", 0),
        ("?!", "?!", 0),
        ("", "wood", 0),
        (("color", "red"), "red", 100),
        ("café", "caf", 100),  # the upper half of Latin-1 is dropped,
        ("жar", "ar", 80),  # other letters are not
        ("snake_case", "snake case", 50),
    ],
)
def test_token_set_ratios(one, other, ratio):
    assert token_set_ratio(one, other) == ratio
    assert same(one, other) == (ratio > THRESHOLD)


words = st.lists(st.sampled_from(["red", "reds", "oil", "oils", "x-large", "xlarge", "10x50", "8x40", "uhd", "é"]))


@settings(max_examples=300, deadline=None)
@given(words, words)
def test_same_is_the_ratio_above_the_threshold(one, other):
    first, second = " ".join(one), " ".join(other)
    ratio = token_set_ratio(first, second)
    assert same(first, second) == (ratio > THRESHOLD)
    assert 0 <= ratio <= 100
    assert (ratio == 100) >= bool(one and set(one) <= set(other) and set(one) != {"é"})


@pytest.mark.parametrize("kind", ["synthetic", "human"])
def test_every_goal_of_the_embedded_catalogue_can_be_met(kind):
    shop = load_catalogue()
    found = goals(shop, kind)
    nouns = open_nouns("embedded")
    for goal in found:
        product = shop[goal.asin]
        if kind == "synthetic":
            options = dict(goal.options)
        else:
            options = {
                next(group for group, values in product.options.items() if value in values): value
                for value in goal.options
            }
        assert reward(goal, product, price=found.prices[goal.asin], options=options, nouns=nouns).total == 1
