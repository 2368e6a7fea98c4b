"""Fork look-ahead: the luck of later decisions, estimated by trying every listed action one step ahead in a fork.

A return is as noisy as the decisions after the one it is credited to. The luck of a decision can be estimated without
sampling anything: the environment tries the state's other actions too, the policy's own probabilities of them are
exact, and V̂, learned from earlier batches, values the states that they lead to:

    Q̂(s, a) = r(s, a) + γ V̂(s')                       V̂ of an end is 0
    V̄(s)    = Q̂₀ + Σ_a π(a|s) (Q̂(s, a) - Q̂₀)          Q̂₀: of whatever is not listed, as if nothing had happened
    δ(s, a) = Q̂(s, a) - V̄(s)                          E[δ | s] = 0, whatever V̂ is

`Edge.control` is δ; `train.back_up` subtracts the δ of all decisions after an action from its return (never its own,
which is what the gradient is about). Trajectory-wise control variates (Pankov, 2018; Cheng et al., 2020,
"Trajectory-wise control variates for variance reduction in policy gradient methods") and doubly robust policy
gradients (Huang & Jiang, 2020) need a model of what actions lead to: here that is the forked environment, an exact one.

What this module promises:

1. No estimate is biased, whatever V̂ knows, as long as it has not seen the batch: `LookAhead` keeps a copy of V̂ made
   before the batch is rolled out.
2. Actions that change nothing that V̂ depends on (Q̂ = Q̂₀) need no probability and are not scored.
3. An answer is a listed action if its token ids are those of the action's own spelling; any other spelling counts as
   not listed, on both sides. Of actions with the same ids (words that the tokenizer does not know) the first counts.
4. Training data must not be selected by outcome: with dynamic sampling, for example, δ would not be 0 on average.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import gymnasium as gym
import torch
from torch import Tensor

from bpo_ref.baselines import StateKey, ValueTable, plain_key
from bpo_ref.config import ConfigError
from bpo_ref.learning.batch import by_length
from bpo_ref.learning.packing import by_prefix
from bpo_ref.learning.value_network import Features, ValueNetwork, told_of
from sandboxgym.adapters.prompts import Prompt
from sandboxgym.tree import Edge, Node, RolloutTree
from sandboxgym.wrappers import outcomes

if TYPE_CHECKING:
    from bpo_ref.args import Args

Ids: TypeAlias = tuple[int, ...]
Score: TypeAlias = Callable[[Sequence[tuple[Ids, Ids]]], Sequence[float]]
"""Function from pairs (context, answer) of token ids to log π(answer | context), in nats, under the sampling policy."""
Logps: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function from ids [B, T], lengths [B] and a mask [B, T-1] to log-probabilities [B, T-1] of the masked tokens."""


class Writer(Protocol):
    """Conversion of answers to token ids and back (`ChatFormat`)."""

    @property
    def stop_ids(self) -> Sequence[int]:
        """Tokens that end an answer."""

    @property
    def thinks(self) -> bool:
        """True if a turn begins inside a block of reasoning."""

    def answer_ids(self, text: str) -> list[int]:
        """Ids of an answer, without a stop token."""

    def text(self, ids: Sequence[int]) -> str:
        """Decode token ids to the text of an answer."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A listed action that changes a state's V̂, or is rewarded."""

    answer: str
    """The policy's spelling of the action."""
    reward: float
    key: StateKey
    """Plain progress key of the next state; None if the episode is over then."""
    ended: bool
    features: tuple[float, ...] | None = None
    """``info["features"]`` of the next state, where the environment gives them."""


def check_prompt(prompt: Prompt, writer: Writer) -> None:
    """Refuse prompts whose answers do not mark where the action begins.

    Raises:
        ConfigError: thoughts come before actions, and nothing marks their end.
    """
    if writer.thinks and not prompt.decision:
        raise ConfigError(
            "lookahead: the chat template opens a block of reasoning, and only prompt=react marks where the action "
            "begins after it; set prompt to react"
        )


class LookAhead:
    """Look-ahead of one batch: a `sandboxgym.tree.Look` while it is rolled out, `set_controls` afterwards.

    Args:
        args: ``gamma``, ``max_turns``, ``max_new_tokens``, ``context``, ``network`` and ``lookahead_least`` are used.
        prompt: format of the actions.
        writer: converter of answers to tokens.
        values: V̂ of earlier batches; copied, so that nothing of this batch can come to be known to it.
        network: the same by features, where ``network`` says so; copied, too.

    Raises:
        ConfigError: see `check_prompt`.
    """

    def __init__(
        self, args: Args, prompt: Prompt, writer: Writer, values: ValueTable, network: ValueNetwork | None = None
    ) -> None:
        check_prompt(prompt, writer)
        self._args, self._prompt, self._writer = args, prompt, writer
        self._values = values.copy()
        used = network is not None and network.known and args.network in ("lookahead", "both")
        self._network = network.copy() if network is not None and used else None
        self._told: dict[Features, float] = {}
        self._ids: dict[str, Ids] = {}
        self._tried: dict[str, tuple[Candidate, ...]] = {}
        self._lock = threading.Lock()
        self.steps = 0
        """Number of actions tried in forks."""
        self.scored_tokens = 0
        """Number of tokens of the answers that were scored."""
        self.seconds = 0.0
        """Seconds spent on both."""

    def __call__(self, env: gym.Env[Any, Any], info: dict[str, Any]) -> tuple[Candidate, ...]:
        """Try the listed actions of the environment's state, and keep those that change V̂ or are rewarded.

        A state that was met before in the batch, by ``info["state_hash"]``, is not tried again.
        """
        state = info.get("state_hash")
        if isinstance(state, str) and state in self._tried:
            return self._tried[state]
        began = time.perf_counter()
        commands = list(dict.fromkeys(info.get("admissible_commands") or ()))
        here = plain_key(info.get("progress_key")), info.get("features")
        found, late = [], False
        for command, after in zip(commands, outcomes(env, commands), strict=True):
            ended, late = after.terminated or after.truncated, late or after.truncated
            key = None if ended else plain_key(after.info.get("progress_key"))
            features = None if ended else after.info.get("features")
            if after.reward or after.terminated or (not ended and (key, features) != here):
                answer = self._prompt.write(command, info)
                found.append(Candidate(answer, float(after.reward), key, ended, features))
        with self._lock:
            self.steps += len(commands)
            self.seconds += time.perf_counter() - began
            if isinstance(state, str) and not late:
                self._tried[state] = tuple(found)
        return tuple(found)

    def counts(self) -> dict[str, float]:
        """Costs of the look-ahead, for the log of this process."""
        return {
            "lookahead/steps": float(self.steps),
            "lookahead/scored_tokens": float(self.scored_tokens),
            "time/lookahead": self.seconds,
        }

    def set_controls(self, trees: Sequence[RolloutTree], score: Score) -> None:
        """Set `Edge.control` = δ(s, a) of every action taken.

        Args:
            trees: rolled out with this object as ``look``.
            score: under the weights and at the temperature that have sampled.
        """
        began = time.perf_counter()
        nodes = [(node, tree.kind) for tree in trees for node in _acted_in(tree)]
        self._ask_network(nodes)
        self._set(score, [state for node, kind in nodes for state in self._states(node, kind)])
        self.seconds += time.perf_counter() - began

    def _set(self, score: Score, states: Sequence[_State]) -> None:
        # Paths that have said the same so far are in the same state: it is asked for once.
        asked = list(dict.fromkeys((state.context, ids) for state in states for ids in state.listed))
        self.scored_tokens += sum(len(ids) for _, ids in asked)
        told = dict(zip(asked, score(asked), strict=True))
        for state in states:
            mean = math.fsum(math.exp(told[state.context, ids]) * gain for ids, gain in state.listed.items())
            for edge, rest in state.edges:
                edge.control = state.listed.get(rest, 0.0) - mean

    def _states(self, node: Node, kind: str) -> list[_State]:
        """List the decisions taken at a node: one, or one for each thought that came before the action."""
        args = self._args
        gains = {}
        for candidate in node.ahead or ():
            value = self._worth(candidate, node, kind) - self._worth(self._nothing(node), node, kind)
            if abs(value) > args.lookahead_least:
                gains[candidate.answer] = value
        states: dict[Ids, _State] = {}
        for edge in node.children if gains else ():
            ids = tuple(edge.action.data.ids)
            thought = self._thought(ids)
            if thought is None:
                continue
            if thought not in states:
                said = tuple(edge.action.memory.ids())
                context = said[: len(said) - len(ids)]
                room = min(args.max_new_tokens, args.context - len(context))
                listed: dict[Ids, float] = {}
                for answer, gain in gains.items():
                    for writing in self._writings(answer, thought, room):
                        listed.setdefault(writing, gain)
                states[thought] = _State(context + thought, listed, [])
            states[thought].edges.append((edge, ids[len(thought) :]))
        return list(states.values())

    def _nothing(self, node: Node) -> Candidate:
        """Q̂₀, the value of an action that changes nothing."""
        return Candidate("", 0.0, plain_key(node.key), False, node.features)

    def _worth(self, candidate: Candidate, node: Node, kind: str) -> float:
        """Q̂ of an action at a node."""
        if candidate.ended or node.depth + 1 >= self._args.max_turns:
            return candidate.reward
        if self._network is not None:
            following = self._told[_following(candidate, node, kind)]
        else:
            following = self._values.value((candidate.key, (node.depth + 1) // 2), kind)
        return candidate.reward + self._args.gamma * following

    def _ask_network(self, nodes: Sequence[tuple[Node, str]]) -> None:
        """Value the states that candidates lead to with the network, each state once."""
        if self._network is None:
            return
        states = dict.fromkeys(
            _following(candidate, node, kind)
            for node, kind in nodes
            if node.ahead
            for candidate in (*node.ahead, self._nothing(node))
            if not candidate.ended
        )
        self._told = dict(zip(states, self._network.values(list(states)), strict=True))

    def _thought(self, ids: Ids) -> Ids | None:
        """Find the tokens sampled before the action began; None where there were none.

        It ends at the first token with which the tag that opens an action begins to be seen: a rule that looks at
        nothing behind it, or δ would not be 0 in expectation.
        """
        opening = self._prompt.decision
        if not opening:
            return ()
        low, high = 0, len(ids)
        if opening not in self._writer.text(ids):
            return None
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if opening in self._writer.text(ids[:middle]) else (middle + 1, high)
        return ids[:low]

    def _writings(self, answer: str, thought: Ids, room: int) -> Iterable[Ids]:
        """List the ids that end an answer with this thought, one for each token that can end a turn."""
        rest = self._rest(answer, thought)
        if rest is None or len(thought) + len(rest) > room or not set(rest).isdisjoint(self._writer.stop_ids):
            return ()
        if len(thought) + len(rest) == room:  # it is cut before its end
            return (rest,)
        return tuple((*rest, stop) for stop in self._writer.stop_ids)

    def _rest(self, answer: str, thought: Ids) -> Ids | None:
        """Ids of an answer behind a thought; None where the thought has begun another action."""
        if not thought:
            if answer not in self._ids:  # the same few actions are possible in most states
                self._ids[answer] = tuple(self._writer.answer_ids(answer))
            return self._ids[answer]
        said, opening = self._writer.text(thought), self._prompt.decision
        before, begun = said[: said.index(opening)], said[said.index(opening) :]
        if not answer.startswith(begun):
            return None
        whole = tuple(self._writer.answer_ids(before + answer))
        if whole[: len(thought)] == thought:
            return whole[len(thought) :]
        return tuple(self._writer.answer_ids(answer[len(begun) :]))


def _following(candidate: Candidate, node: Node, kind: str) -> Features:
    """State after an action, as if it was not refused: actions that change no feature then need no probability."""
    return Features(told_of(candidate.features), node.depth + 1, 0, kind)


@dataclass(slots=True)
class _State:
    """A decision point: a node, and the thought before the action."""

    context: Ids
    listed: dict[Ids, float]
    """Q̂ - Q̂₀ by the ids of the answer, of the candidates that change it."""
    edges: list[tuple[Edge, Ids]]
    """Actions decided there, with their ids."""


def _acted_in(tree: RolloutTree) -> list[Node]:
    """Nodes in which something was tried, each once."""
    return list({id(edge.parent): edge.parent for edge in tree.edges()}.values())


def scored(logps: Logps, args: Args, device: torch.device) -> Score:
    """Make a `Score`: log π of answers, in batches of at most ``micro_tokens``; ``pack`` reads shared contexts once.

    Args:
        logps: of the policy that has sampled, at its temperature.
        args: ``pack`` and ``micro_tokens`` are used.
        device: device of the tensors that it is given.
    """

    def score(asked: Sequence[tuple[Ids, Ids]]) -> list[float]:
        rows = range(len(asked))

        def whole(i: int) -> Ids:
            return asked[i][0] + asked[i][1]

        if args.pack == "tree":
            batches = by_prefix(rows, whole, args.micro_tokens)
        else:
            batches = by_length(rows, lambda i: len(whole(i)), args.micro_tokens)
        told = [0.0] * len(asked)
        for batch in batches:
            lengths = torch.tensor([len(whole(i)) for i in batch], device=device)
            ids = torch.zeros(len(batch), int(lengths.max()), dtype=torch.long)
            where = torch.zeros(len(batch), ids.shape[1] - 1, dtype=torch.bool)
            for row, i in enumerate(batch):
                ids[row, : len(whole(i))] = torch.tensor(whole(i))
                where[row, len(asked[i][0]) - 1 : len(whole(i)) - 1] = True
            with torch.no_grad():
                sums = logps(ids.to(device), lengths, where.to(device)).double().sum(dim=1).tolist()
            for i, value in zip(batch, sums, strict=True):
                told[i] = value
        return told

    return score
