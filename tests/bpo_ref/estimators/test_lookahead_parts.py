"""Parts of fork look-ahead: what is listed, and in which ids; settings, environments, a shop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from lookahead_cases import edges_of, settings
from torch import Tensor

import sandboxgym
from bpo_ref.args import Args, resolved
from bpo_ref.baselines import ValueTable, refusals, state_key
from bpo_ref.config import ConfigError
from bpo_ref.learning.tiny import tiny_model, tiny_tokenizer
from bpo_ref.lookahead import Candidate, Ids, LookAhead, scored
from bpo_ref.sampling.chat_format import ChatFormat
from bpo_ref.sampling.generate import Generation, Generator, forward
from bpo_ref.sampling.policy import ChatPolicy, Turn
from sandboxgym.adapters.prompts import Prompt, React, make_prompt
from sandboxgym.tree import Action, Edge, Envs, Node, Schedule, rollout
from sandboxgym.wrappers import outcomes


class Letters:
    """A token a letter; 0 and 1 end a turn."""

    stop_ids: Sequence[int] = (0, 1)
    thinks = False

    def answer_ids(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def text(self, ids: Sequence[int]) -> str:
        return "".join(chr(i) for i in ids if i > 1)


def table(**values: float) -> ValueTable:
    """V̂ by key, the same in every half-turn of five."""
    sums = [((key, half), [1e9, 1e9 * value, 0.0]) for key, value in values.items() for half in range(3)]
    return ValueTable(state={"sums": sums, "overall": [1.0, 0.5, 0.5], "low": [0.0, 0.0]})


def decided(node: Node, said: str, *, prompt: Sequence[int] = (7, 7, 7), stop: Sequence[int] = (0,)) -> Edge:
    ids = [*map(ord, said), *stop]
    edge = Edge((0, node.depth), node, Action(said, tokens=len(ids)))
    edge.action.data = Generation(ids, [], [], not stop)
    edge.action.memory = Turn(None, list(prompt), ids, not stop)
    edge.child = Node(node.depth + 1, None, None, owner=(0, 0), parent=edge)
    node.children.append(edge)
    return edge


def controls(
    node: Node, values: ValueTable, prompt: Prompt | None = None, writer: Letters | None = None, **options: Any
) -> tuple[list[float], dict[tuple[Ids, Ids], float]]:
    """δ of a node's edges, with probabilities that fall with every answer asked about; and these probabilities."""
    args = replace(settings("rloo-pooled"), **{"max_new_tokens": 40, "context": 100, **options})
    ahead = LookAhead(args, prompt or Prompt(), writer or Letters(), values)
    asked: dict[tuple[Ids, Ids], float] = {}

    def score(pairs: Sequence[tuple[Ids, Ids]]) -> list[float]:
        for pair in pairs:
            asked.setdefault(pair, 0.4 / 2 ** len(asked))
        return [math.log(asked[pair]) for pair in pairs]

    ahead._set(score, ahead._states(node, ""))
    return [edge.control for edge in node.children], asked


def ids_of(text: str, *stop: int) -> Ids:
    return (*map(ord, text), *stop)


def test_every_stop_token_counts_and_other_writings_are_not_listed() -> None:
    node = Node(0, None, "far", owner=(), ahead=(Candidate("go", 0.0, "near", False),))
    for said, stop in (("go", (0,)), ("go", (1,)), ("go ", (0,)), ("look", (0,))):
        decided(node, said, stop=stop)
    found, asked = controls(node, table(near=0.9, far=0.2))
    assert set(asked) == {((7, 7, 7), ids_of("go", 0)), ((7, 7, 7), ids_of("go", 1))}
    mean = sum(asked.values()) * 0.7
    assert found == pytest.approx([0.7 - mean, 0.7 - mean, -mean, -mean])


def test_actions_that_are_written_alike_are_one() -> None:
    class Unknowing(Letters):
        def answer_ids(self, text: str) -> list[int]:
            return [ord("?") if letter.isdigit() else ord(letter) for letter in text]

    ahead = (Candidate("go 1", 0.0, "near", False), Candidate("go 2", 1.0, None, True))
    node = Node(0, None, "far", owner=(), ahead=ahead)
    decided(node, "go ?"), decided(node, "look")
    found, asked = controls(node, table(near=0.9, far=0.2), writer=Unknowing())
    p = sum(asked.values())
    assert len(asked) == len(Letters.stop_ids)
    assert found == pytest.approx([0.7 * (1 - p), -0.7 * p])


def test_an_answer_with_a_stop_token_inside_cannot_be_written() -> None:
    class Stopping(Letters):
        def answer_ids(self, text: str) -> list[int]:
            return [0 if letter == "|" else ord(letter) for letter in text]

    node = Node(0, None, "far", owner=(), ahead=(Candidate("a|b", 0.0, "near", False),))
    decided(node, "a")
    found, asked = controls(node, table(near=0.9, far=0.2), writer=Stopping())
    assert not asked and found == [0.0]


def test_an_answer_of_maximal_length_has_no_stop_token_and_a_longer_one_cannot_be_written() -> None:
    ahead = tuple(Candidate(answer, 0.0, "near", False) for answer in ("abc", "abcd", "abcde"))
    for options in ({"max_new_tokens": 4}, {"context": 7}):
        node = Node(0, None, "far", owner=(), ahead=ahead)
        decided(node, "abcd", stop=())
        found, asked = controls(node, table(near=0.9, far=0.2), **options)
        answers = {answer for _, answer in asked}
        assert answers == {ids_of("abc", 0), ids_of("abc", 1), ids_of("abcd")}
        assert found == pytest.approx([0.7 - 0.7 * sum(asked.values())])


def test_equal_values_need_no_probability() -> None:
    same = (Candidate("go", 0.0, "near", False), Candidate("wait", 0.0, "far", False))
    node = Node(0, None, "far", owner=(), ahead=same)
    decided(node, "go"), decided(node, "wait")
    found, asked = controls(node, table(near=0.2, far=0.2))
    assert not asked
    assert found == [0.0, 0.0]


def test_nothing_happening_leads_to_the_next_half_turn() -> None:
    """Keys go by half the turn: at an odd turn whatever happens is valued by the next half."""
    sums = [(("far", 0), [1e9, 0.8e9, 0.0]), (("far", 1), [1e9, 0.3e9, 0.0]), (("near", 1), [1e9, 0.9e9, 0.0])]
    values = ValueTable(state={"sums": sums, "overall": [1.0, 0.5, 0.5], "low": [0.0, 0.0]})
    node = Node(1, None, "far", owner=(), ahead=(Candidate("go", 0.0, "near", False),))
    decided(node, "go")
    found, asked = controls(node, values)
    assert found == pytest.approx([0.6 * (1 - sum(asked.values()))])


def test_small_differences_count_as_none_sampled_or_not() -> None:
    ahead = (Candidate("go", 0.0, "near", False), Candidate("run", 0.0, "by", False))
    node = Node(0, None, "far", owner=(), ahead=ahead)
    decided(node, "go"), decided(node, "run"), decided(node, "look")
    found, asked = controls(node, table(near=0.9, by=0.25, far=0.2), lookahead_least=0.1)
    p = sum(asked.values())
    assert {answer[:-1] for _, answer in asked} == {ids_of("go")}
    assert found == pytest.approx([0.7 * (1 - p), -0.7 * p, -0.7 * p])


def test_at_the_last_turn_only_rewards_count() -> None:
    """The limit is ``max_turns``: what is not rewarded there is worth nothing, and so is what is not listed."""
    ahead = (Candidate("win", 1.0, None, True), Candidate("lose", 0.0, None, True))
    node = Node(4, None, "far", owner=(), ahead=ahead)
    decided(node, "win"), decided(node, "lose"), decided(node, "look")
    found, asked = controls(node, table(near=0.9, far=0.2))
    p = sum(asked.values())
    assert {answer[:-1] for _, answer in asked} == {ids_of("win")}
    assert found == pytest.approx([1 - p, -p, -p])
    earlier = Node(1, None, "far", owner=(), ahead=ahead)
    decided(earlier, "lose")
    lost, asked = controls(earlier, table(near=0.9, far=0.2))
    by_answer = {answer: p for (_, answer), p in asked.items()}
    expected = -0.2 - sum((0.8 if answer[:-1] == ids_of("win") else -0.2) * p for answer, p in by_answer.items())
    assert lost == pytest.approx([expected])


def test_behind_a_thought_only_the_action_is_listed() -> None:
    node = Node(0, None, "far", owner=(), ahead=(Candidate("<action>go</action>", 0.0, "near", False),))
    for said in (
        "hm<action>go</action>", "hm<action>look</action>", "ah<action>go</action>", "nothing to do", "hm<action>go",
    ):  # fmt: skip
        decided(node, said)
    found, asked = controls(node, table(near=0.9, far=0.2), React())
    stems = {context[3:] for context, _ in asked}
    assert stems == {ids_of("hm<action"), ids_of("ah<action")}  # as far as the tag can be told, and no further
    assert {answer[:-1] for _, answer in asked} == {ids_of(">go</action>")}
    p = {stem: sum(q for (context, _), q in asked.items() if context[3:] == stem) for stem in stems}
    hm, ah = (0.7 * p[ids_of(f"{thought}<action")] for thought in ("hm", "ah"))
    assert found == pytest.approx([0.7 - hm, -hm, 0.7 - ah, 0.0, -hm])


def test_reasoning_that_nothing_ends_is_refused() -> None:
    class Thinking(Letters):
        thinks = True

    args = settings("rloo-pooled")
    with pytest.raises(ConfigError, match="prompt=react"):
        LookAhead(args, Prompt(), Thinking(), table())
    LookAhead(args, React(), Thinking(), table())


@pytest.mark.parametrize(
    ("algo", "options", "message"),
    [
        ("grpo", {}, "lookahead: goes with credit=tree"),
        ("bpo-paper", {}, "lookahead: goes with credit=tree"),
        ("ppo", {}, "lookahead: goes with credit=tree"),
        ("rloo", {"advantage_norm": "batch"}, "lookahead: goes with .* found advantage_norm=batch"),
        ("rloo", {"baseline": "critic"}, "lookahead: goes with .* found baseline=critic"),
        ("rloo", {"dynamic_sampling": 2.0}, "lookahead: goes with .* found dynamic_sampling=2.0"),
        ("rloo", {"mask_truncated": True}, "lookahead: goes with .* found mask_truncated=True"),
    ],
)
def test_settings_that_it_does_not_go_with_are_refused(algo: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(algo, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"network": "both", "lookahead": False}, "network: both goes with lookahead"),
        ({"network": "lookahead", "lookahead": False}, "network: lookahead goes with lookahead"),
        ({"network": "baseline", "baseline": "key"}, "network: baseline goes with a baseline of value or pooled"),
        ({"split_variance": "fair"}, "split_variance: fair goes with lookahead and schedule=split"),
        ({"lookahead_least": -0.1}, "lookahead_least: expected 0 or more"),
    ],
)
def test_settings_of_values_that_do_not_go_together_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings("rloo-pooled", **options)


def test_without_a_progress_key_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="lookahead: needs info"):
        resolved(Args(algo="rloo", lookahead=True), keyed=False)


# Environments.


@pytest.mark.parametrize("limit", [3, 50])
def test_what_is_tried_is_what_happens(limit: int) -> None:
    """ALFWorld computes its successors; they are those of snapshot, step and restore, and of the steps themselves."""
    env: Any = gym.make("sandboxgym/ALFWorld-v0", max_episode_steps=limit)
    slow: Any = gym.make("sandboxgym/ALFWorld-v0", max_episode_steps=limit)
    slow = sandboxgym.SnapshotWrapper(gym.wrappers.RecordEpisodeStatistics(slow))  # not known to change nothing
    rng = np.random.default_rng(0)
    for task in range(3):
        _, info = env.reset(seed=task, options={"task": task})
        slow.reset(seed=task, options={"task": task})
        over = False
        for _ in range(10):
            commands = [*info["admissible_commands"], "fly"]
            digest, mine, theirs = env.snapshot().digest, env.successors(commands), slow.successors(commands)
            assert env.snapshot().digest == digest
            for one, other in zip(mine, theirs, strict=True):
                other.info.pop("episode", None)
                assert one == other
            action = commands[int(rng.integers(len(commands)))]
            for one, brief in zip(mine, outcomes(env, commands), strict=True):
                assert (one.reward, one.terminated, one.truncated) == brief[1:4]
                assert brief.info.items() <= one.info.items()
            found = env.step(action)
            slow.step(action)
            assert tuple(found) == tuple(mine[commands.index(action)])
            info, over = found[4], found[2] or found[3]
            if over:
                break
        assert over == (limit == 3) or found[2]
    env.close(), slow.close()


def test_equal_states_are_tried_once_but_at_the_limit() -> None:
    env = gym.make("sandboxgym/ALFWorld-v0", max_episode_steps=3)
    _, info = env.reset(seed=0, options={"task": 0})
    ahead = LookAhead(settings("rloo-pooled"), Prompt(), Letters(), table())
    first, tried = ahead(env, info), ahead.steps
    assert tried == len(info["admissible_commands"])
    _, _, _, _, info = env.step("fly")  # refused: the same state, a turn later
    assert ahead(env, info) == first and ahead.steps == tried
    _, _, _, _, info = env.step("fly")
    assert ahead(env, info) == first  # the turn limit is known by the node's depth
    fresh = LookAhead(settings("rloo-pooled"), Prompt(), Letters(), table())
    fresh(env, info), fresh(env, info)
    assert fresh.steps == 2 * tried  # all of it is cut off here, which says nothing of the state at other turns
    env.close()


def test_an_action_that_raises_leaves_the_environment_as_it_was() -> None:
    env = gym.make("sandboxgym/WebShop-v0", max_episode_steps=9)
    _, info = env.reset(seed=0)
    digest = sandboxgym.snapshot(env).digest
    with pytest.raises(TypeError, match="expected an action"):
        sandboxgym.successors(env, [info["admissible_commands"][0], 3])
    assert sandboxgym.snapshot(env).digest == digest
    assert sandboxgym.successors(env, []) == []
    env.close()


# Refusals.


@pytest.mark.parametrize(
    ("valid", "expected"),
    [((), 0), ((True,), 0), ((False,), 1), ((False, False), 2), ((False,) * 4, 2), ((False, True), 0),
     ((True, False), 1), ((False, True, False, False), 2)],
)  # fmt: skip
def test_refusals_in_a_row_are_told_up_to_two(valid: tuple[bool, ...], expected: int) -> None:
    node = Node(0, None, "far", owner=())
    for taken in valid:
        edge = decided(node, "go")
        edge.valid, node = taken, edge.child
        node.key = "far"
    assert refusals(node) == expected
    assert state_key(node, "refusals") == ("far", len(valid) // 2, expected)
    assert state_key(node, "key") == ("far", len(valid) // 2)


def test_refusals_go_with_a_baseline_by_progress() -> None:
    with pytest.raises(ConfigError, match="refusals: goes with a baseline of"):
        resolved(Args(algo="rloo", refusals=True))


# A shop.


def test_clicks_are_corrected_and_searches_in_other_words_are_not() -> None:
    env = gym.make("sandboxgym/WebShop-v0", max_episode_steps=9, progress="worth")
    _, info = env.reset(seed=0, options={"task": 0})
    args = replace(settings("rloo-pooled"), max_new_tokens=400, context=900)
    ahead = LookAhead(args, Prompt(), Letters(), table())
    (searched,) = ahead(env, info)  # the whole instruction is the one search that is listed
    assert searched.answer == info["admissible_commands"][0] and searched.key.startswith("results")
    values = table(search=0.2, **{searched.key: 0.5})
    node = Node(0, None, "search", owner=(), ahead=(searched,))
    decided(node, searched.answer), decided(node, "search[shoes]")
    found, asked = controls(node, values, max_new_tokens=400, context=900)
    assert found == pytest.approx([0.3 - 0.3 * sum(asked.values()), -0.3 * sum(asked.values())])
    # on the page of a product, buying is known exactly, an option by what buying would then earn
    _, _, _, _, info = env.step(searched.answer)
    product = next(c for c in info["admissible_commands"] if c not in ("click[back to search]", "click[next >]"))
    _, _, _, _, info = env.step(product)
    bought = {candidate.answer: candidate for candidate in ahead(env, info)}["click[buy now]"]
    assert bought.ended and bought.reward == pytest.approx(env.step("click[buy now]")[1])
    env.close()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chosen_numbers_are_scored_as_they_were_sampled(temperature: float) -> None:
    """The sampler's logits do not hold the probability that another number is the whole answer, so one pass does."""
    tokenizer = tiny_tokenizer([f"▁{number}" for number in range(12)])
    model = tiny_model(tokenizer, max_position_embeddings=2048)
    chat = ChatFormat(tokenizer, stop_ids=[tokenizer.eos_token_id])
    args = replace(settings("rloo-pooled", roots=16), max_new_tokens=2, context=2048, temperature=temperature)
    generator = Generator(
        model, stop_ids=chat.stop_ids, max_new_tokens=2, temperature=temperature, context_limit=args.context
    )
    prompt = make_prompt("choice", "sandboxgym/WebShop-v0")
    ahead = LookAhead(args, prompt, chat, ValueTable())
    envs = Envs(lambda: gym.make("sandboxgym/WebShop-v0", max_episode_steps=3, progress="worth"))
    trees = rollout(
        envs, ChatPolicy(generator, chat, prompt=prompt), Schedule(16), tasks=range(4), seed=(0,), look=ahead
    )
    keys = {node.key for tree in trees for node in (edge.parent for edge in tree.edges())}
    keys |= {candidate.key for tree in trees for edge in tree.edges() for candidate in edge.parent.ahead}
    rng = np.random.default_rng(0)
    ahead = LookAhead(args, prompt, chat, table(**{key: float(rng.random()) for key in sorted(keys - {None})}))

    def logps(ids: Tensor, lengths: Tensor, where: Tensor) -> Tensor:
        return forward(model, ids, lengths, where=where, temperature=temperature)[0]

    told: dict[tuple[Ids, Ids], float] = {}

    def score(asked: Sequence[tuple[Ids, Ids]]) -> list[float]:
        found = scored(logps, replace(args, pack="flat"), torch.device("cpu"))(asked)
        told.update(zip(asked, found, strict=True))
        return list(found)

    ahead.set_controls(trees, score)
    met = 0
    for edge in edges_of(trees):
        said, ids = tuple(edge.action.memory.ids()), tuple(edge.action.data.ids)
        if (said[: -len(ids)], ids) in told:
            met += 1
            assert told[said[: -len(ids)], ids] == pytest.approx(edge.action.logp, abs=1e-4)
    assert met > 0
    assert ahead.scored_tokens == sum(len(ids) for _, ids in told)
    envs.close()
