from __future__ import annotations

import copy
import gzip
import itertools
import json
import random
import subprocess
import sys

import numpy as np
import pytest

from sandboxgym.envs.webshop import goals as goals_module
from sandboxgym.envs.webshop.catalogues.catalogue import (
    CatalogueNotFound,
    HumanInstruction,
    MemoryCatalogue,
    load_catalogue,
)
from sandboxgym.envs.webshop.catalogues.official_data import make_products
from sandboxgym.envs.webshop.goals import OFFICIAL_SPLITS, PRODUCT_SPLITS, goals, prices, shuffled, split


def product(asin, *, pricing="$15", options=None, instruction=None, attributes=()):
    item = {
        "asin": asin,
        "name": f"Title of {asin}",
        "full_description": "",
        "small_description": [],
        "pricing": pricing,
        "images": [""],
        "product_category": "A › B",
        "customization_options": {group: [{"value": value} for value in values] for group, values in options.items()}
        if options
        else "",
        "category": "garden",
        "query": "things",
    }
    instructions = {} if instruction is None else {"instruction": instruction, "instruction_attributes": attributes}
    return next(make_products([(0, item)], {asin: {"attributes": [], **instructions}}, source="test"))


def catalogue(*products, human=None):
    return MemoryCatalogue(products, name="test", human_instructions=lambda: human or {})


def in_the_words_of_the_original(goal):
    return {
        "asin": goal.asin,
        "category": goal.category,
        "query": goal.query,
        "name": goal.name,
        "product_category": goal.product_category,
        "instruction_text": goal.instruction,
        "attributes": list(goal.attributes),
        "price_upper": goal.price_upper,
        "goal_options": dict(goal.options) if goal.kind == "synthetic" else list(goal.options),
        "weight": goal.weight,
    }


@pytest.fixture(scope="module")
def recordings(parity_data):
    return parity_data / "webshop"


def test_prices_equal_the_recorded_ones(recordings):
    recorded = json.loads((recordings / "golden_meta.json").read_text())["product_prices"]
    assert len(recorded) == 1000
    assert dict(prices(load_catalogue(recordings), 0)) == recorded
    assert dict(prices(load_catalogue(recordings), 1)) != recorded


def test_synthetic_goals_equal_the_recorded_ones_in_their_order(recordings):
    found = goals(load_catalogue(recordings), "synthetic")
    with gzip.open(recordings / "goals_synthetic_seed233.jsonl.gz", "rt") as file:
        recorded = [json.loads(line) for line in file]
    assert len(recorded) == 6910 == len(found)
    assert [in_the_words_of_the_original(goal) for goal in found] == recorded


def test_human_goals_equal_the_recorded_ones_in_their_order(recordings):
    found = goals(load_catalogue(recordings), "human")
    recorded = [json.loads(line) for line in (recordings / "goals_human_1000.jsonl").open()]
    assert len(recorded) == 13
    assert [in_the_words_of_the_original(goal) for goal in found] == recorded


def test_prices_and_caps_come_from_one_stream():
    shop = catalogue(
        product("A", pricing="$10 - $20", instruction="Find a", attributes=["x"]),
        product("B", pricing="$30 - $90"),
        product("C", pricing="$15", instruction="Find c", attributes=["x"]),
    )
    rng = random.Random(5)
    expected = {"A": rng.uniform(10, 20), "B": rng.uniform(30, 90), "C": 15.0}
    assert dict(prices(shop, 5)) == expected
    caps = {}
    for asin in "AC":
        above = [cap for cap in map(float, range(10, 1000, 10)) if cap > expected[asin]][:4]
        caps[asin] = max(rng.sample(above, 2))
    found = goals(shop, price_seed=5)
    assert {goal.asin: goal.price_upper for goal in found} == caps
    assert dict(found.prices) == expected
    assert {goal.instruction for goal in found} == {
        f"Find {asin.lower()}, and price lower than {cap:.2f} dollars" for asin, cap in caps.items()
    }


@pytest.mark.parametrize(("price", "capped"), [(979.99, True), (980, False), (1500, False)])
def test_without_two_caps_above_the_price_there_is_none(price, capped):
    (goal,) = goals(catalogue(product("A", pricing=f"${price}", instruction="Find a", attributes=["x"])))
    assert (goal.price_upper == 990.0) == capped
    assert (goal.price_upper == 1_000_000) != capped
    assert goal.instruction == ("Find a, and price lower than 990.00 dollars" if capped else "Find a")


def test_every_combination_of_options_is_a_goal():
    options = {"Size": ["S", "M"], "Color": ["Red", "Blue", "Green"]}
    found = goals(catalogue(product("A", options=options, instruction="Find a", attributes=["x"])))
    expected = [
        (("color", color), ("size", size)) for color, size in itertools.product(("red", "blue", "green"), ("s", "m"))
    ]
    assert sorted(goal.options for goal in found) == sorted(expected)
    assert [found[place].options for place in np.argsort(shuffled(6))] == expected  # before it was shuffled
    cap = f", and price lower than {found[0].price_upper:.2f} dollars"
    for goal in found:
        (_, color), (_, size) = goal.options
        assert goal.instruction == f"Find a with color: {color}, and size: {size}{cap}"


def test_an_empty_group_of_options_gives_no_goal_but_draws_a_cap():
    empty = product("A", options={"Size": []}, instruction="Find a", attributes=["x"])
    other = product("B", instruction="Find b", attributes=["x"])
    found = goals(catalogue(empty, other))
    assert [goal.asin for goal in found] == ["B"]
    rng = random.Random(0)
    rng.sample(range(4), 2)
    assert found[0].price_upper == 20.0 + 10 * max(rng.sample(range(4), 2))


def test_weights_are_larger_for_rare_attributes():
    shop = catalogue(
        product("A", options={"Size": ["S", "M", "L"]}, instruction="Find a", attributes=["common", "rare"]),
        product("B", instruction="Find b", attributes=["common"]),
    )
    found = goals(shop)
    for goal in found:
        assert goal.weight == ((1 / 4 + 1 / 3) / 2 if goal.asin == "A" else 1 / 4)
    assert found.weights().tolist() == [goal.weight for goal in found]


def test_human_goals_leave_out_other_products_and_instructions_without_attributes():
    human = {
        "Z": (HumanInstruction("Z", "not here", ("x",), ()),),
        "B": (HumanInstruction("B", "i want b.", ("x",), ("red",)), HumanInstruction("B", "nothing", (), ())),
        "A": (HumanInstruction("A", "..a..", ("y", "z"), ()),),
    }
    found = goals(catalogue(product("A"), product("B"), human=human), "human")
    assert {(goal.asin, goal.attributes, goal.options, goal.weight) for goal in found} == {
        ("A", ("y", "z"), (), 1.0),
        ("B", ("x",), ("red",), 1.0),
    }
    assert {goal.instruction.split(",")[0] for goal in found} == {"a", "i want b"}
    assert found.weights().tolist() == [1, 1]


def test_goals_are_a_sequence_with_stable_ids():
    found = goals(load_catalogue())
    assert [goal.goal_id for goal in found[:3]] == ["synthetic/0", "synthetic/1", "synthetic/2"]
    assert found[-1] == found[len(found) - 1]
    assert found[np.int64(3)] is found[3]
    assert list(found[5:2:-1]) == [found[5], found[4], found[3]]
    assert goals(load_catalogue()) is found is copy.deepcopy(found)
    for index in (len(found), -len(found) - 1):
        with pytest.raises(IndexError, match="expected a goal from 0 to"):
            found[index]


def test_the_order_depends_on_the_number_of_goals_alone():
    expected = list(range(100))
    random.seed(233)
    random.shuffle(expected)
    assert shuffled(100).tolist() == expected
    assert shuffled(0).tolist() == []
    first, second = (goals(load_catalogue(), price_seed=seed) for seed in (0, 1))
    assert [(goal.asin, goal.options) for goal in first] == [(goal.asin, goal.options) for goal in second]
    assert [goal.price_upper for goal in first] != [goal.price_upper for goal in second]
    with pytest.raises(ValueError, match="read-only"):
        shuffled(100)[0] = 1


def test_other_processes_have_the_same_order_and_splits():
    # Workers that shuffle for themselves mix training and test tasks (verl-agent, issue 262).
    program = (
        "import random; random.seed({0}); from sandboxgym.envs.webshop.catalogues.catalogue import load_catalogue;"
        "from sandboxgym.envs.webshop.goals import goals, split; g = goals(load_catalogue());"
        "print([g[i].instruction for i in split(g, 'test')[:50]], list(split(g, 'product-test')))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program.format(seed)],
            env={"PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in (1, 2)
    }
    found = goals(load_catalogue())
    here = [found[i].instruction for i in split(found, "test")[:50]], list(split(found, "product-test"))
    assert outputs == {f"{here[0]} {here[1]}\n"}


def test_a_long_order_is_kept_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("SANDBOXGYM_CACHE", str(tmp_path))
    monkeypatch.setattr(goals_module, "_LONG", 50)
    shuffled.cache_clear()
    expected = shuffled(100).tolist()
    (kept,) = (tmp_path / "webshop").iterdir()
    shuffled.cache_clear()
    assert isinstance(shuffled(100).base, np.memmap)
    assert shuffled(100).tolist() == expected
    kept.write_bytes(b"damaged")
    shuffled.cache_clear()
    assert shuffled(100).tolist() == expected
    shuffled.cache_clear()


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """The embedded catalogue as one that is kept on disk."""
    products = load_catalogue()
    here = MemoryCatalogue(products.products(), name="stored", human_instructions=products.human_instructions)
    here.directory = tmp_path / "store"
    here.directory.mkdir()
    return here


@pytest.mark.parametrize("kind", ["synthetic", "human"])
def test_the_draws_for_a_catalogue_on_disk_are_made_once_and_equal_those_in_memory(stored, monkeypatch, kind):
    make = {"synthetic": goals_module.SyntheticGoals, "human": goals_module.HumanGoals}[kind]
    expected = {seed: make(load_catalogue(), seed) for seed in (0, 1)}
    for seed in (0, 1):
        make(stored, seed)  # makes the files
    assert len(list(stored.directory.iterdir())) == 2
    monkeypatch.setattr(goals_module, "_draw_prices", None)
    monkeypatch.setattr(goals_module, "_draw_cap", None)
    for seed, before in expected.items():
        found = make(stored, seed)
        assert not found._caps.flags.writeable  # memory-mapped
        assert [(goal.price_upper, goal.instruction) for goal in found] == [
            (goal.price_upper, goal.instruction) for goal in before
        ]
        assert type(found[0].price_upper) is float
        assert found.prices.by_position.tolist() == before.prices.by_position.tolist()


def test_kept_draws_that_do_not_fit_are_made_again(stored):
    expected = [goal.price_upper for goal in goals_module.SyntheticGoals(stored, 3)]
    (kept,) = stored.directory.iterdir()
    whole = kept.read_bytes()
    for damaged in (b"", whole[:-8], b"other bytes"):
        kept.write_bytes(damaged)
        assert [goal.price_upper for goal in goals_module.SyntheticGoals(stored, 3)] == expected
        assert kept.read_bytes() == whole


def test_a_new_version_of_the_draws_and_a_full_store_do_not_read_or_write_them(stored, monkeypatch):
    goals_module.SyntheticGoals(stored, 0)
    monkeypatch.setattr(goals_module, "_DRAWS_FORMAT", -1)
    goals_module.SyntheticGoals(stored, 0)
    assert len(list(stored.directory.iterdir())) == 2
    monkeypatch.setattr(goals_module, "_KEPT_DRAWS", 2)
    assert goals_module.SyntheticGoals(stored, 1)[0] == goals_module.SyntheticGoals(load_catalogue(), 1)[0]
    assert len(list(stored.directory.iterdir())) == 2


def test_a_store_that_cannot_be_written_costs_time_only(stored):
    stored.directory.rmdir()
    stored.directory.touch()
    assert goals_module.SyntheticGoals(stored, 1)[0] == goals_module.SyntheticGoals(load_catalogue(), 1)[0]


@pytest.mark.parametrize("kind", ["synthetic", "human"])
def test_official_splits_are_by_index(kind):
    found = goals(load_catalogue() if kind == "synthetic" else _with_many_human_goals(), kind)
    assert list(split(found, "test")) == list(range(500))
    assert list(split(found, "eval")) == list(range(500, 1500))
    assert list(split(found, "train")) == list(range(1500, len(found)))
    assert list(split(found)) == list(range(len(found)))


@pytest.mark.parametrize("kind", ["synthetic", "human"])
def test_product_splits_share_no_product(kind):
    found = goals(load_catalogue(), kind)
    indices = {name: split(found, name) for name in PRODUCT_SPLITS}
    assert sorted(itertools.chain(*indices.values())) == list(range(len(found)))
    assert all(list(chosen) == sorted(chosen) for chosen in indices.values())
    assert all(isinstance(index, int) for index in indices["product-test"])
    asins = {name: {found[index].asin for index in chosen} for name, chosen in indices.items()}
    for one, other in itertools.combinations(asins.values(), 2):
        assert one
        assert not one & other
    assert len(indices["product-train"]) > len(found) / 2


def test_the_official_splits_share_products():
    # Why there are splits by product.
    found = goals(load_catalogue())
    test, train = ({found[index].asin for index in split(found, name)} for name in ("test", "train"))
    assert len(test & train) > len(test) / 2


def test_a_product_is_in_the_same_split_for_both_kinds_of_goals():
    shop = load_catalogue()
    for name in PRODUCT_SPLITS:
        others = {other for other in PRODUCT_SPLITS if other != name}
        synthetic = {goals(shop)[index].asin for index in split(goals(shop), name)}
        human = goals(shop, "human")
        for other in others:
            assert not synthetic & {human[index].asin for index in split(human, other)}


def test_wrong_names_and_empty_splits_are_explained():
    found = goals(catalogue(product("A", instruction="Find a", attributes=["x"])))
    with pytest.raises(ValueError, match="split 'eval' is empty: test has only 1 synthetic goals"):
        split(found, "eval")
    with pytest.raises(ValueError, match=r"expected a split out of 'test', 'eval', .* found 'dev'"):
        split(found, "dev")
    with pytest.raises(ValueError, match="expected goals of kind 'synthetic' or 'human', found 'robot'"):
        goals(found.catalogue, "robot")
    with pytest.raises(ValueError, match="test has no human goals"):
        goals(found.catalogue, "human")
    assert set(OFFICIAL_SPLITS) | set(PRODUCT_SPLITS) == set(goals_module.Split.__args__)


def test_missing_human_instructions_are_not_the_same_as_no_goals(tmp_path, recordings):
    for name in ("items_shuffle_1000.json", "items_ins_v2_1000.json"):
        (tmp_path / name).symlink_to(recordings / name)
    shop = load_catalogue(tmp_path)
    assert len(goals(shop)) == 6910
    with pytest.raises(CatalogueNotFound, match="human goals need"):
        goals(shop, "human")


def _with_many_human_goals():
    human = {
        f"P{number}": tuple(HumanInstruction(f"P{number}", f"i want {n}", ("x",), ()) for n in range(40))
        for number in range(50)
    }
    return catalogue(*(product(asin) for asin in human), human=human)
