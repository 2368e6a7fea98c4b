from __future__ import annotations

import math
import random

import pytest

from bpo_ref.experiments import queries
from bpo_ref.experiments.queries import QueryPolicy, bought, score, shop, train, words_of


def logp(policy: QueryPolicy, words: list[str], taken: list[bool]) -> float:
    chances = [policy.probability(word) for word in words]
    return sum(math.log(p if t else 1 - p) for p, t in zip(chances, taken))


def test_a_step_follows_the_gradient() -> None:
    words, taken = ["red", "shoes", "red", "for"], [True, False, False, True]
    policy = QueryPolicy(0.3, {"red": -0.5, "shoes": 1.0})
    slopes = {}
    for word in ("red", "shoes", "for"):
        ends = []
        for change in (-1e-5, 1e-5):
            moved = QueryPolicy(0.3, {**policy.own, word: policy.own.get(word, 0.0) + change})
            ends.append(logp(moved, words, taken))
        slopes[word] = (ends[1] - ends[0]) / 2e-5
    before = dict(policy.own)
    policy.learn(words, taken, 1e-6)  # a word that occurs twice moves twice
    assert {word: (policy.own[word] - before.get(word, 0.0)) / 1e-6 for word in policy.own} == pytest.approx(slopes)
    assert (policy.any - 0.3) / 1e-6 == pytest.approx(sum(slopes.values()) / 4)


def test_words_are_those_of_the_instruction() -> None:
    page = "WebShop [SEP] Instruction: [SEP] Find me a Red 2x3 rug, and price lower than 30.00 dollars [SEP] Search"
    assert words_of(page) == [
        "find",
        "me",
        "a",
        "red",
        "2x3",
        "rug",
        "and",
        "price",
        "lower",
        "than",
        "30",
        "00",
        "dollars",
    ]


def test_a_query_of_no_words_leads_to_a_poor_purchase() -> None:
    env = shop("product-test")
    observation, _ = env.reset(seed=0, options={"task": 0})
    reward, success = bought(env, observation, [])
    assert reward < 0.2 and not success
    env.close()


@pytest.mark.slow
def test_what_is_learned_holds_for_products_never_seen() -> None:
    """The generated catalogue can be searched better by learning from the reward alone."""
    policy = QueryPolicy()
    before, _ = score(policy, panel=100)
    train(policy, tasks=600, forks=4)
    after, _ = score(policy, panel=100)
    assert after > before + 0.2  # 0.48 to 0.83


def test_the_command_prints_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    queries.main(["--tasks", "3", "--forks", "2", "--panel", "4", "--seeds", "0"])
    said = capsys.readouterr().out
    assert said.count("|\n") == 7 and "learned, seed 0 (6 episodes)" in said and "most wanted" in said


def test_draws_are_by_the_probabilities() -> None:
    rng, policy = random.Random(0), QueryPolicy(0.0, {"red": 50.0, "shoes": -50.0})
    assert all(policy(["red", "shoes"], rng) == ["red"] for _ in range(50))
