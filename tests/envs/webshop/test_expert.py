"""The rule-based shopper: it usually buys the right product, and recovers from actions that are not its own."""

from __future__ import annotations

import random
import statistics

import gymnasium as gym
import pytest

import sandboxgym  # noqa: F401  # registers the ids
from sandboxgym.envs.webshop.expert import Expert, read_order


def play(env: gym.Env, task: int, expert: Expert) -> tuple[list[str], float, int]:
    """Its actions, the reward, and how many of the actions did nothing though it meant them."""
    observation, _ = env.reset(seed=0, options={"task": task})
    expert.reset(observation)
    actions, refused, over, reward = [], 0, False, 0.0
    while not over:
        actions.append(expert.act(observation))
        observation, reward, terminated, truncated, info = env.step(actions[-1])
        refused += not info["valid_action"] and not expert.noisy
        over = terminated or truncated
    return actions, float(reward), refused


@pytest.mark.parametrize("goals, least", [("synthetic", 0.75), ("human", 0.7)])
def test_it_buys_what_was_asked_for(goals, least):
    env = gym.make("sandboxgym/WebShop-v0", goals=goals)
    tasks = random.Random(1).sample(range(env.unwrapped.num_tasks), 40)
    played = [play(env, task, env.unwrapped.expert()) for task in tasks]
    assert statistics.mean(reward for _, reward, _ in played) > least
    assert all(actions[-1] == "click[buy now]" for actions, _, _ in played)
    assert sum(refused for _, _, refused in played) == 0


def test_both_texts_say_the_same_to_it():
    for task in range(8):
        played = [
            play(gym.make("sandboxgym/WebShop-v0", observation_mode=mode), task, Expert())[0]
            for mode in ("text", "text_rich")
        ]
        assert played[0] == played[1]


def test_less_patience_makes_shorter_episodes():
    env = gym.make("sandboxgym/WebShop-v0")
    short = [len(play(env, task, Expert(candidates=1, reads=False))[0]) for task in range(10)]
    long = [len(play(env, task, Expert())[0]) for task in range(10)]
    assert max(short) <= 7 and statistics.mean(short) < statistics.mean(long)


def asked(env, **options):
    """Ten episodes of an expert, step by step: what it sees, what is possible, what it does, what comes of it."""
    for task in range(10):
        observation, info = env.reset(seed=0, options={"task": task})
        expert, over = Expert(candidates=1, reads=False, **options), False
        expert.reset(observation)
        while not over:
            action = expert.act(observation)
            before = observation, info["admissible_commands"]
            observation, _, over, _, info = env.step(action)
            yield *before, action, info


def test_copies_write_only_what_the_page_shows():
    for observation, _, action, info in asked(gym.make("sandboxgym/WebShop-v0"), copies=True):
        name = action.partition("[")[2].removesuffix("]")
        shown = observation if action.startswith("click") and name != " buy now" else observation.lower()
        assert name in shown, action
        assert info["valid_action"], action


def test_listed_actions_are_all_offered():
    for _, possible, action, info in asked(gym.make("sandboxgym/WebShop-v0"), listed=True):
        assert action in possible
        assert info["valid_action"], action


def test_an_option_of_ten_letters_is_no_product():
    expert = Expert(candidates=1, copies=True)
    order = "Find me gum with flavor: strawberry, and price lower than 9.00 dollars"
    expert.reset(f"WebShop [SEP] Instruction: [SEP] {order} [SEP] Search")
    page = " [SEP] flavor [SEP] strawberry [SEP] Gum [SEP] Price: $5.0 [SEP] Rating: N.A. [SEP] Buy Now"
    assert expert.act(f"Instruction: [SEP] {order} [SEP] Back to Search [SEP] < Prev{page}") == "click[ strawberry]"
    shown = page.replace("strawberry", "strawberry (selected)")
    assert expert.act(f"Instruction: [SEP] {order} [SEP] Back to Search [SEP] < Prev{shown}") == "click[ buy now]"


def test_it_recovers_from_random_actions():
    env = gym.make("sandboxgym/WebShop-v0")
    played = [play(env, task, env.unwrapped.expert(rng=random.Random(task), noise=0.3)) for task in range(20)]
    assert all(actions[-1] == "click[buy now]" for actions, _, _ in played)
    assert statistics.mean(reward for _, reward, _ in played) > 0.5
    again = play(env, 3, env.unwrapped.expert(rng=random.Random(3), noise=0.3))
    assert again == played[3]


def test_it_needs_an_instruction():
    with pytest.raises(ValueError, match="mode text"):
        Expert().reset("http://127.0.0.1:3000/0")


def test_orders():
    order = read_order("i am looking for men's dark bronze sneakers, in size 11, and price lower than 70.00 dollars")
    assert order.cap == 70 and order.pairs == () and {"bronze", "sneaker", "11"} <= order.words
    plain = read_order("Find me long lasting perfume with scent: rose, and size: 3 fl oz | 88 ml")
    assert plain.cap == float("inf") and plain.pairs == (("scent", "rose"), ("size", "3 fl oz | 88 ml"))


def test_a_careless_shopper_errs_in_two_ways():
    env = gym.make("sandboxgym/WebShop-v0", split="train", tasks=[2])

    def shops(seed, careless):
        return play(env, 0, Expert(random.Random(seed), candidates=1, reads=False, listed=True, careless=careless))

    assert shops(0, 0.0)[1] == 1.0
    wrong = [shops(seed, 1.0) for seed in range(12)]
    assert {reward for _, reward, _ in wrong} == {5 / 7, 6 / 7} and len({tuple(each[0]) for each in wrong}) == 2
    assert sum(refused for _, _, refused in wrong) == 0
    assert 10 < [shops(seed, 0.5)[1] for seed in range(40)].count(1.0) < 30
    with pytest.raises(ValueError, match="careless: expected a probability, found 2"):
        Expert(careless=2)
