"""Fork look-ahead: unbiased by comparison with exact gradients, for any V̂; and tests of its parts."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tabular import MDP, Credit, TabularEnv, TabularPolicy, compare, gradients, random_mdp
from torch import Tensor

import sandboxgym
from bpo_ref.args import Args, resolved
from bpo_ref.baselines import Memory, ValueTable, features, mean_value, refusals, state_key, summarize
from bpo_ref.config import ConfigError
from bpo_ref.learning.tiny import tiny_model, tiny_tokenizer
from bpo_ref.lookahead import Candidate, Ids, LookAhead, scored
from bpo_ref.sampling.chat_format import ChatFormat
from bpo_ref.sampling.generate import Generation, Generator, forward
from bpo_ref.sampling.policy import ChatPolicy, Turn
from bpo_ref.schedules import make_schedule
from bpo_ref.train import assign_credit
from sandboxgym.adapters.prompts import Prompt, React, make_prompt
from sandboxgym.core import Transition
from sandboxgym.tree import Action, Context, Edge, Envs, Node, RolloutTree, Schedule, rollout
from sandboxgym.wrappers import outcomes

SPARSE, DENSE = random_mdp(seed=244), random_mdp(seed=244, dense=True)
TASKS = (0, 1, 0, 1)
FAST = 400  # batches of 4 trees
MANY = int(os.environ.get("SANDBOXGYM_TREES", 0)) // 4
COMMON: dict[str, Any] = {"prompts": 4, "spacing": 1, "width": 2, "points": 3, "max_turns": 5, "value_decay": 1.0}


def settings(algo: str, **options: Any) -> Args:
    return resolved(Args(algo=algo, **{**COMMON, "lookahead": True, **options}))  # type: ignore[arg-type]


class ListedEnv(TabularEnv):
    """Names its actions, or some of them."""

    def __init__(self, mdp: MDP, listed: Sequence[int]) -> None:
        super().__init__(mdp)
        self.listed = list(listed)

    def successors(self, actions: Sequence[int]) -> list[Transition]:
        before, stream, found = self.state, self.np_random.bit_generator.state, []
        for action in actions:
            found.append(Transition(*TabularEnv.step(self, action)))
            self.state, self.np_random.bit_generator.state = before, stream
        return found

    def _info(self) -> dict[str, Any]:
        t, state, _ = self.state
        told = [float(state == other) for other in range(len(self.mdp.logits))]
        return {**super()._info(), "admissible_commands": self.listed, "features": (*told, t / self.mdp.horizon)}


class TokenPolicy(TabularPolicy):
    """Says what it does in one token, behind a context that is the state."""

    def _act(self, context: Context) -> Action:
        action = super()._act(context)
        action.data = Generation([action.text], [], [], False)
        action.memory = Turn(None, [context.observation], [action.text], False)
        return action


class OneToken:
    """A tokenizer of numbers; nothing but the action ends a turn."""

    stop_ids: Sequence[int] = ()
    thinks = False

    def answer_ids(self, text: Any) -> list[int]:
        return [text]

    def text(self, ids: Sequence[int]) -> str:
        return str(list(ids))


class Bare(LookAhead):
    """Whose answers have no stop token."""

    def _writings(self, answer: Any, thought: Ids, room: int) -> list[Ids]:
        return [(answer,)]


def batches_of(
    mdp: MDP, args: Args, memory: Memory, *, batches: int, listed: Sequence[int], teach: bool = False
) -> Iterator[tuple[list[RolloutTree], LookAhead, Callable[[Any], list[float]]]]:
    envs, policy = Envs(lambda: ListedEnv(mdp, listed)), TokenPolicy(mdp)
    log = np.log(mdp.policy)

    def score(asked: Sequence[tuple[Ids, Ids]], log: np.ndarray = log) -> list[float]:
        return [float(log[context[-1], answer[0]]) for context, answer in asked]

    for batch in range(batches):
        number = batch + teach * 10**6
        ahead = Bare(args, Prompt(), OneToken(), memory.values, memory.network)
        schedule = make_schedule(args, (9, number), memory, tasks=TASKS)
        trees = rollout(envs, policy, schedule, tasks=TASKS, seed=(number,), look=ahead)
        ahead.set_controls(trees, score)
        yield trees, ahead, score
    envs.close()


def taught(mdp: MDP, args: Args) -> Memory:
    memory = Memory.of(args)
    for trees, *_ in batches_of(mdp, args, memory, batches=60, listed=(0, 1), teach=True):
        memory.observe(trees, assign_credit(trees, args, memory), args)
    return memory


def briefly(mdp: MDP, args: Args) -> Memory:
    """Taught a network, by fewer batches."""
    memory = Memory.of(args)
    for trees, *_ in batches_of(mdp, args, memory, batches=8, listed=(0, 1), teach=True):
        memory.observe(trees, assign_credit(trees, args, memory), args)
    assert memory.network is not None and memory.network.known
    return memory


def nonsense(mdp: MDP, args: Args) -> Memory:
    """V̂ of numbers that mean nothing."""
    memory, rng = taught(mdp, args), np.random.default_rng(3)
    for entry in memory.values._sums.values():
        entry[1] = entry[0] * rng.normal()
    return memory


ROULETTE: dict[str, Any] = {"roulette": 0.5, "roulette_below": 0.4}
CASES: dict[str, tuple[MDP, Args, Callable[[MDP, Args], Memory], Sequence[int]]] = {
    "rloo": (SPARSE, settings("rloo", roots=4), taught, (0, 1)),
    "rloo-pooled": (SPARSE, settings("rloo-pooled", roots=4), taught, (0, 1)),
    "rloo-pooled, V̂ of nonsense": (SPARSE, settings("rloo-pooled", roots=4), nonsense, (0, 1)),
    "rloo-pooled, one action listed": (SPARSE, settings("rloo-pooled", roots=4), taught, (1,)),
    "rloo-key, rewards on the way": (DENSE, settings("rloo-key", roots=4, gamma=0.8), taught, (0, 1)),
    "rloo-turn": (SPARSE, settings("rloo-turn", roots=4), taught, (0, 1)),
    "rloo-value": (SPARSE, settings("rloo-value", roots=4), taught, (0, 1)),
    "bpo-forest": (SPARSE, settings("bpo-forest", roots=4, points=1), taught, (0, 1)),
    "bpo-tree": (SPARSE, settings("bpo-tree", width=3, points=2, step_weight_power=1.0), taught, (0, 1)),
    "bpo-split": (SPARSE, settings("bpo-split"), taught, (0, 1)),
    "bpo-split, siblings": (SPARSE, settings("bpo-split", baseline="none", fork_baseline="siblings"), taught, (0, 1)),
    "bpo": (SPARSE, settings("bpo", **ROULETTE), taught, (0, 1)),
    "bpo, V̂ of nonsense": (SPARSE, settings("bpo", roulette=1.0), nonsense, (0, 1)),
    "bpo, rewards on the way": (DENSE, settings("bpo", gamma=0.8, roulette=0.5, roulette_below=0.3), taught, (0, 1)),
    "bpo, one action listed": (SPARSE, settings("bpo", **ROULETTE), taught, (0,)),
    "bpo, by refusals": (replace(SPARSE, refused=(2, 4)), settings("bpo", refusals=True, **ROULETTE), taught, (0, 1)),
    "rloo-pooled, network": (SPARSE, settings("rloo-pooled", roots=4, network="both"), briefly, (0, 1)),
    "rloo-value, network in the baseline": (
        SPARSE,
        settings("rloo-value", roots=4, network="baseline"),
        briefly,
        (0, 1),
    ),
    "bpo, network and splits by fair variance, rewards on the way": (
        DENSE,
        settings("bpo", gamma=0.8, network="both", split_variance="fair"),
        briefly,
        (0, 1),
    ),
    "bpo, splits by fair variance": (SPARSE, settings("bpo", split_variance="fair", **ROULETTE), taught, (0, 1)),
    "bpo, small differences left out": (SPARSE, settings("bpo", lookahead_least=0.1, **ROULETTE), taught, (0, 1)),
    "uneven roots": (SPARSE, settings("rloo-pooled", roots=4, allocation="spread"), taught, (0, 1)),
}


def own_luck_too(trees: Sequence[RolloutTree], args: Args, memory: Memory, *_: Any) -> None:
    assign_credit(trees, args, memory)
    for edge in edges_of(trees):
        edge.advantage -= edge.control


def probabilities_of_other_weights(
    trees: Sequence[RolloutTree], args: Args, memory: Memory, ahead: LookAhead, score: Any
) -> None:
    ahead.set_controls(trees, lambda asked: [0.3 * value for value in score(asked)])
    assign_credit(trees, args, memory)
    ahead.set_controls(trees, score)


def luck_of_earlier_decisions(trees: Sequence[RolloutTree], args: Args, memory: Memory, *_: Any) -> None:
    """What is taken off is the luck that led to a state, not that which came after it."""
    assign_credit(trees, args, memory)
    for edge in edges_of(trees):
        edge.advantage += edge.luck - edge.control * 2


def sampled_action_left_out(trees: Sequence[RolloutTree], args: Args, memory: Memory, *_: Any) -> None:
    """As if what was drawn had never been listed."""
    kept = [(edge, edge.control) for edge in edges_of(trees)]
    for edge, control in kept:
        edge.control = min(control, 0.0)
    assign_credit(trees, args, memory)
    for edge, control in kept:
        edge.control = control


def own_return_in_the_baseline(trees: Sequence[RolloutTree], args: Args, memory: Memory, *_: Any) -> None:
    """As if the residual at a state counted the path itself among the others."""
    assign_credit(trees, args, memory)
    for edge in edges_of(trees):
        edge.advantage -= (edge.value - edge.luck) / 5


PLANTED: dict[str, tuple[str, Callable[..., None]]] = {
    "own return in the baseline": ("rloo-pooled, network", own_return_in_the_baseline),
    "own luck too": ("rloo-pooled", own_luck_too),
    "own luck too, forks": ("bpo", own_luck_too),
    "probabilities of other weights": ("rloo-pooled", probabilities_of_other_weights),
    "luck of earlier decisions": ("rloo-pooled", luck_of_earlier_decisions),
    "sampled action left out": ("rloo-pooled", sampled_action_left_out),
}


def edges_of(trees: Sequence[RolloutTree]) -> Iterator[Edge]:
    return (edge for tree in trees for edge in tree.edges())


@functools.cache
def estimates(case: str, batches: int) -> dict[str, np.ndarray]:
    """Sample gradients with the correction, without it, and with the errors planted in it."""
    mdp, args, teach, listed = CASES[case]
    memory = teach(mdp, args)
    now: list[Any] = []

    def sampled() -> Iterator[list[RolloutTree]]:
        for trees, *rest in batches_of(mdp, args, memory, batches=batches, listed=listed):
            now[:] = rest
            yield trees

    def without(trees: Sequence[RolloutTree]) -> None:
        kept = [(edge, edge.control) for edge in edges_of(trees)]
        for edge, _ in kept:
            edge.control = 0.0
        assign_credit(trees, args, memory)
        for edge, control in kept:
            edge.control = control

    credits: dict[str, Credit] = {
        "with": lambda trees: assign_credit(trees, args, memory) and None,
        "without": without,
    }
    for name, (where, error) in PLANTED.items():
        if where == case:
            credits[name] = lambda trees, error=error: error(trees, args, memory, *now)
    return gradients(mdp, sampled(), credits)


def noise(samples: np.ndarray) -> float:
    return float(samples.var(axis=0).sum())


EVERY = [pytest.param(case, marks=pytest.mark.xdist_group(f"look-ahead, {case}")) for case in CASES]


@pytest.mark.parametrize("case", EVERY)
def test_look_ahead_is_unbiased(case: str) -> None:
    mdp, args, *_ = CASES[case]
    samples = estimates(case, FAST)
    found = compare(samples["with"], mdp.gradient(args.gamma))
    relative = noise(samples["with"]) / noise(samples["without"])
    print(f"{case}: max|z| {found.z:.2f} of {found.critical:.2f}, noise {relative:.2f} of that without")
    assert not found.biased, found
    assert relative != 1.0  # something was taken off


@pytest.mark.slow
@pytest.mark.skipif(not MANY, reason="a study of half an hour: SANDBOXGYM_TREES=20000 runs it")
@pytest.mark.parametrize("case", EVERY)
def test_look_ahead_is_unbiased_over_many_trees(case: str) -> None:
    mdp, args, *_ = CASES[case]
    found = compare(estimates(case, MANY)["with"], mdp.gradient(args.gamma))
    print(f"{case}: max|z| {found.z:.2f} of {found.critical:.2f}, relative error {found.bias:.3f}")
    assert not found.biased, found
    assert found.bias < 0.05, found


@pytest.mark.parametrize("case", ["rloo", "rloo-pooled", "bpo-split", "bpo"])
def test_look_ahead_takes_noise_off(case: str) -> None:
    samples = estimates(case, FAST)
    assert noise(samples["with"]) < 0.95 * noise(samples["without"])


@pytest.mark.parametrize("error", PLANTED)
def test_planted_error_is_caught(error: str) -> None:
    case, _ = PLANTED[error]
    mdp, args, *_ = CASES[case]
    found = compare(estimates(case, FAST)[error], mdp.gradient(args.gamma))
    print(f"{error}: max|z| {found.z:.1f}, relative bias {found.bias:.2f}")
    assert found.biased, found


# What no gradient shows.


def test_values_are_those_before_the_batch_whatever_is_learnt_of_it() -> None:
    args = settings("rloo-pooled", roots=4)
    memory = taught(SPARSE, args)
    for trees, ahead, score in batches_of(SPARSE, args, memory, batches=3, listed=(0, 1)):
        before = [edge.control for edge in edges_of(trees)]
        memory.observe(trees, assign_credit(trees, args, memory), args)
        ahead.set_controls(trees, score)
        assert [edge.control for edge in edges_of(trees)] == before
        assert any(before)


def test_a_network_is_that_before_the_batch_whatever_is_learnt_of_it() -> None:
    args = settings("rloo-pooled", roots=4, network="both")
    memory = briefly(SPARSE, args)
    for trees, ahead, score in batches_of(SPARSE, args, memory, batches=2, listed=(0, 1)):
        before = [edge.control for edge in edges_of(trees)]
        told = memory.network.values([features(trees[0].root, "")]) if memory.network else []
        memory.observe(trees, assign_credit(trees, args, memory), args)
        assert memory.network and memory.network.values([features(trees[0].root, "")]) != told  # it has learned
        ahead.set_controls(trees, score)
        assert [edge.control for edge in edges_of(trees)] == before
        assert any(before)


def test_fair_squares_are_of_returns_less_luck() -> None:
    """Of flat rollouts the mean square at the root is that of each path's return less the luck of all its decisions."""
    args = settings("rloo-pooled", roots=4)
    memory = taught(SPARSE, args)
    for trees, *_ in batches_of(SPARSE, args, memory, batches=2, listed=(0, 1)):
        assign_credit(trees, args, memory)
        for tree in trees:
            less = [sum(edge.reward - edge.control for edge in path.edges) for path in tree.paths]
            squares = [square for _, square in summarize(tree, "key", fair=True).returns]
            assert squares == pytest.approx([value**2 for value in less])
            plain = [square for _, square in summarize(tree, "key").returns]
            assert plain == pytest.approx([path.total_reward**2 for path in tree.paths])


def test_memory_learns_plain_returns() -> None:
    args = settings("bpo", **ROULETTE)
    memory, plain = taught(SPARSE, args), taught(SPARSE, args)
    for trees, *_ in batches_of(SPARSE, args, memory, batches=3, listed=(0, 1)):
        memory.observe(trees, assign_credit(trees, args, memory), args)
        assert any(edge.control for edge in edges_of(trees))
        for edge in edges_of(trees):
            edge.control = 0.0
        plain.observe(trees, assign_credit(trees, args, plain), args)
        assert memory.values.state() == plain.values.state()


def test_luck_is_backed_up_as_values_are() -> None:
    args = settings("bpo", **ROULETTE)
    memory = taught(SPARSE, args)
    for trees, *_ in batches_of(SPARSE, args, memory, batches=3, listed=(0, 1)):
        assign_credit(trees, args, memory)
        for edge in edges_of(trees):
            node = edge.child
            if node.children and node.survival == 1.0:
                mean = sum(child.value - child.luck - child.control for child in node.children) / len(node.children)
                assert node.value - node.luck == pytest.approx(mean)
                assert node.value == pytest.approx(mean_value(node))
            elif not node.children:
                assert node.luck == 0.0


def test_without_controls_credit_is_what_it_was() -> None:
    args = settings("bpo", **ROULETTE)
    memory = taught(SPARSE, args)
    plain = replace(args, lookahead=False)
    for trees, *_ in batches_of(SPARSE, args, memory, batches=2, listed=(0, 1)):
        for edge in edges_of(trees):
            edge.control = 0.0
        assign_credit(trees, args, memory)
        found = [(edge.advantage, edge.luck) for edge in edges_of(trees)]
        assign_credit(trees, plain, memory)
        assert found == [(edge.advantage, 0.0) for edge in edges_of(trees)]


# What is listed, and in which ids.


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
