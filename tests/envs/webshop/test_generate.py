from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter
from statistics import mean

import pytest

from sandboxgym.envs.webshop.catalogues import generated
from sandboxgym.envs.webshop.catalogues.catalogue import CATEGORIES, load_catalogue
from sandboxgym.envs.webshop.goals import goals
from sandboxgym.envs.webshop.reward import reward
from sandboxgym.envs.webshop.words.nouns import open_nouns


@pytest.fixture(scope="module")
def shop():
    return load_catalogue("embedded")


def test_the_embedded_catalogue_is_as_large_as_the_small_official_one(shop):
    assert len(shop) == 1000
    assert 3000 <= len(goals(shop)) <= 7000
    assert 1400 <= len(goals(shop, "human")) <= 1700
    assert 0.35 < mean(product.instruction is not None for product in shop.products()) < 0.55
    assert {product.category for product in shop.products()} == set(CATEGORIES)


def test_it_is_the_same_in_every_process(shop):
    program = "from sandboxgym.envs.webshop.catalogues.catalogue import load_catalogue; print(load_catalogue().digest)"
    for seed in ("1", "2"):
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == shop.digest


def test_a_product_depends_on_its_number_alone():
    few, more = (list(generated.records(count)) for count in (60, 200))
    assert more[:60] == few
    assert len({record.item["asin"] for record in more}) == 200


def test_asins_are_like_the_originals():
    asins = [generated._asin(number) for number in range(20_000)]
    assert len(set(asins)) == len(asins)
    assert all(len(asin) == 10 and asin.isalnum() and asin.upper() == asin for asin in asins)


def test_as_files_it_is_the_same_catalogue(tmp_path, shop):
    generated.write_files(tmp_path)
    again = load_catalogue(tmp_path)
    assert again.digest == shop.digest
    assert {asin: texts for asin, texts in again.human_instructions().items() if texts} == shop.human_instructions()
    assert list(goals(again)) == list(goals(shop))
    assert list(goals(again, "human")) == list(goals(shop, "human"))
    generated.write_files(tmp_path / "empty", 0)
    assert all(not json.loads(path.read_text()) for path in (tmp_path / "empty").iterdir())


def test_products_are_complete(shop):
    for product in shop.products():
        assert product.title.isprintable()
        assert 10 < len(product.title) < 200
        assert product.bullets
        assert product.attributes
        assert len(product.attributes) == len(set(product.attributes))
        assert set(product.instruction_attributes) <= set(product.attributes)
        assert min(product.pricing) > 0
        assert list(product.pricing) == sorted(product.pricing)
        assert product.query == product.query.lower()
        values = list(itertools.chain(*product.options.values()))
        assert len(values) == len(set(values))
        assert all(len(group) >= 2 for group in product.options.values())
    assert len({product.title for product in shop.products()}) > 950
    assert {len(product.pricing) for product in shop.products()} == {1, 2}
    assert 20 < sum(product.price_text == "$100.0" for product in shop.products()) < 100
    assert any(not product.description for product in shop.products())


def test_no_product_contradicts_itself(shop):
    for product in shop.products():
        for group in generated._assortment().excluding:
            assert len(set(group) & set(product.attributes)) <= 1


def test_attributes_can_be_read_on_the_pages(shop):
    said = [
        attribute in " ".join((product.title, product.description, *product.bullets)).lower()
        for product in shop.products()
        for attribute in product.attributes
    ]
    assert mean(said) > 0.9


def test_many_products_share_a_query_but_few_meet_a_goal(shop):
    queries = Counter(product.query for product in shop.products())
    assert len(queries) > 45
    assert min(queries.values()) >= 15
    nouns = open_nouns("embedded")
    found = goals(shop)
    totals, perfect = [], []
    for goal in found[:300]:
        wanted = dict(goal.options)
        others = [shop[asin] for asin in shop.in_query(goal.query) if asin != goal.asin]
        rewards = [
            reward(
                goal,
                product,
                price=found.prices[product.asin],
                options={group: value for group, value in wanted.items() if value in product.options.get(group, ())},
                nouns=nouns,
            ).total
            for product in others
        ]
        totals += rewards
        perfect.append(sum(total == 1 for total in rewards))
    assert 0.2 < mean(totals) < 0.6
    assert mean(perfect) < 1


def test_instructions_name_what_the_goal_asks_for(shop):
    for goal in goals(shop):
        assert all(attribute in goal.instruction for attribute in goal.attributes)
        assert goal.query in goal.instruction
    human = goals(shop, "human")
    for goal in human:
        assert all(value in goal.instruction for value in goal.options)
        product = shop[goal.asin]
        assert set(goal.attributes) <= set(product.attributes)
        assert all(any(value in values for values in product.options.values()) for value in goal.options)
    literal = [attribute in goal.instruction for goal in human for attribute in goal.attributes]
    assert 0.4 < mean(literal) < 0.8  # the others are paraphrased
    assert len({goal.instruction for goal in human}) > 0.95 * len(human)
