"""A chain of decisions whose lateness and quality of V̂ are known exactly, and the variance formula for it.

An episode has ``steps`` decisions between two actions. Those of a window count: the episode is won with ``need``
successes there. All others decide nothing, but have a score like any other.

- *Lateness* L = Σ_u s_u E_≤u / (σ² E): the share of RLOO's noise that is left with exact state values. It is the place,
  as a share of the episode's squared score, at which the return is decided on average: 0 the start, 1 the end.
- *Quality* ρ = 1 - Σ_t e_t E(V̂ - V)² / Σ_t e_t E(v̄ - V)²: the share of the rest that V̂ removes. 0 is the mean return, 1
  exact values. A state's key names the right state with probability √ρ, and otherwise one drawn at random from those
  of its turn; V̂ is the exact mean return of each key, v̄ + √ρ (V - v̄) with V the value of the state that it names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from bpo_ref.args import Args
from bpo_ref.baselines import Memory, ValueTable
from sandboxgym import SnapshotEnv
from sandboxgym.core import Transition
from sandboxgym.tree import Action, Context, RolloutTree

MANY = 1e9
"""Number of rollouts that V̂ counts as seen, so large that its pseudo-counts have no effect."""


@dataclass(frozen=True)
class Chain:
    """A chain of decisions; a state is (turn, successes in the window so far)."""

    first: int
    """Turn of the window's first decision."""
    length: int = 3
    """Decisions in the window."""
    need: int = 2
    """Successes that win."""
    steps: int = 12
    """Decisions of an episode."""
    chance: float = 0.5
    """Probability of a success."""
    forced: tuple[int, ...] = ()
    """Turns without a choice, which have no score."""

    @cached_property
    def occupancy(self) -> NDArray[np.float64]:
        """Probability of c successes before turn t, [steps + 1, length + 1]."""
        found = np.zeros((self.steps + 1, self.length + 1))
        for t in range(self.steps + 1):
            n = min(max(t - self.first, 0), self.length)
            for c in range(n + 1):
                found[t, c] = math.comb(n, c) * self.chance**c * (1 - self.chance) ** (n - c)
        return found

    @cached_property
    def values(self) -> NDArray[np.float64]:
        """Exact probability to win with c successes before turn t, [steps + 1, length + 1]."""
        found = np.zeros((self.steps + 1, self.length + 1))
        found[-1] = np.arange(self.length + 1) >= self.need
        for t in reversed(range(self.steps)):
            found[t] = found[t + 1]
            if self.counts(t):
                found[t, :-1] += self.chance * np.diff(found[t + 1])
        return found

    def counts(self, turn: int) -> bool:
        """Tell whether the decision of a turn is one of the window's."""
        return self.first <= turn < self.first + self.length

    @property
    def decided(self) -> NDArray[np.float64]:
        """Variance of the return that each state's decision decides, δ² on average, [steps, length + 1]."""
        found = np.zeros((self.steps, self.length + 1))
        for t in filter(self.counts, range(self.steps)):
            found[t, :-1] = self.chance * (1 - self.chance) * np.diff(self.values[t + 1]) ** 2
        return found

    @cached_property
    def scores(self) -> NDArray[np.float64]:
        """e: mean squared score of each turn's decision, by two logits per state, [steps]."""
        free = ~np.isin(np.arange(self.steps), self.forced)
        return np.asarray(2 * self.chance * (1 - self.chance) * free)

    @property
    def mean(self) -> float:
        """Mean return v̄ of the chain's policy."""
        return float(self.values[0, 0])

    @property
    def spread(self) -> float:
        """Variance σ² of the return."""
        return self.mean * (1 - self.mean)

    @property
    def lateness(self) -> float:
        """L: the share of RLOO's noise that exact values leave."""
        per_turn = (self.occupancy[:-1] * self.decided).sum(axis=1)
        return float(per_turn @ self.scores.cumsum()) / (float(self.scores.sum()) * self.spread)

    def believed(self, quality: float) -> NDArray[np.float64]:
        """V̂ of every key, [steps + 1, length + 1]: the exact mean return of the states that show it."""
        right = math.sqrt(quality)
        return right * self.values + (1 - right) * self.mean

    def wrong(self, quality: float) -> NDArray[np.float64]:
        """Mean squared error of V̂ at every state, over the keys that it shows, [steps + 1, length + 1]."""
        right, believed = math.sqrt(quality), self.believed(quality)
        others = (self.occupancy * believed**2).sum(axis=1, keepdims=True)
        mean = (self.occupancy * believed).sum(axis=1, keepdims=True)
        other = others - 2 * mean * self.values + self.values**2
        return np.asarray(right * (believed - self.values) ** 2 + (1 - right) * other)


@dataclass(frozen=True)
class ChainCosts:
    """Noise of a task's gradient, and the tokens of its tree."""

    noise: float
    tokens: float


def predicted(chain: Chain, args: Args, quality: float) -> ChainCosts:
    """The variance formula, Σ e_t P_t / n_t + Σ s_u E_≤u / n_u, with a number n of paths that depends on the state.

    For `rloo` P_t is the squared error of the mean of the other rollouts. For estimators with the pooled baseline it
    is that of V̂: the other rollouts at a key, which the baseline mixes in, are left out. Also left out is the square
    of the mean gradient. With splits, n is the density of paths: W at first, doubled by a split, halved by roulette.

    Args:
        chain: the environment and its policy.
        args: resolved settings: ``schedule`` none or split; ``baseline`` none or pooled.
        quality: ρ of V̂.
    """
    assert args.roots is not None
    scores, past = chain.scores, chain.scores.cumsum()
    if args.baseline == "none":
        return ChainCosts(past[-1] * chain.spread / (args.roots - 1), float(args.roots * chain.steps))
    error, decided, occupancy = chain.wrong(quality), chain.decided, chain.occupancy
    if args.schedule == "none":
        noise = sum(occupancy[t] @ (scores[t] * error[t] + past[t] * decided[t]) for t in range(chain.steps))
        return ChainCosts(float(noise) / args.roots, float(args.roots * chain.steps))
    noise = tokens = 0.0
    survival, believed = _survival(chain, args, quality), chain.believed(quality)
    mass = {(0, 0, False): 1.0}  # of (successes, splits, has met the roulette)
    for t in range(chain.steps):
        following: dict[tuple[int, int, bool], float] = {}
        for (c, splits, met), share in mass.items():
            for key, chance in _shown(chain, t, c, quality):
                deep, gone, p = splits, met, share * chance
                wide = args.roots * 2.0**deep * (survival if gone else 1.0)
                if not gone and _splits(chain, args, t, float(believed[t, key]), deep):
                    deep, wide = deep + 1, 2 * wide
                missed = (chain.values[t, c] - believed[t, key]) ** 2
                if not gone and survival < 1 and t >= 2 and believed[t, key] <= args.roulette_below:
                    noise += p / wide * (1 / survival - 1) * (past[t] - scores[t]) * missed
                    gone, wide = True, wide * survival
                noise += p / wide * (scores[t] * missed + past[t] * decided[t, c])
                tokens += p * wide
                for gained, q in ((1, chain.chance), (0, 1 - chain.chance)):
                    to = (c + gained * chain.counts(t), deep, gone)
                    following[to] = following.get(to, 0.0) + p * q
        mass = following
    return ChainCosts(float(noise), float(tokens))


def _shown(chain: Chain, t: int, c: int, quality: float) -> list[tuple[int, float]]:
    """Keys that a state shows, with their probabilities."""
    right = math.sqrt(quality)
    chances = (1 - right) * chain.occupancy[t]
    chances[c] += right
    return [(key, float(chance)) for key, chance in enumerate(chances) if chance > 0]


def _splits(chain: Chain, args: Args, t: int, believed: float, splits: int) -> bool:
    """The rule of `schedules.Split`, for returns of 0 or 1."""
    assert args.points is not None
    importance = max(0.0, believed * (1 - believed)) * (t + 1) / (chain.steps - t)
    return t > 0 and splits < args.points and importance >= 4 ** (splits + 1) * chain.spread / chain.steps


def _survival(chain: Chain, args: Args, quality: float) -> float:
    return (args.roulette or 1.0) if memory_of(chain, args, quality).values.trusts(args.roulette_below) else 1.0


def memory_of(chain: Chain, args: Args, quality: float) -> Memory:
    """Memory whose V̂ is exact for every key, as if learned from `MANY` rollouts."""
    sums: list[tuple[Any, list[float]]] = []
    low = np.zeros(2)
    believed = chain.believed(quality)
    for t, c in np.argwhere(chain.occupancy[:-1] > 0).tolist():
        n, value = MANY * chain.occupancy[t, c], float(believed[t, c])
        sums.append((((t, c), t // 2), [n, n * value, n * value]))
        if value <= args.roulette_below:
            low += (n, n * value)
    overall = [MANY, MANY * chain.mean, MANY * chain.mean]
    memory = Memory.of(args)
    memory.values = ValueTable(1.0, state={"sums": sums, "overall": overall, "low": low.tolist()})
    return memory


class ChainEnv(SnapshotEnv[int, int]):
    """A `Chain` as an environment; action 1 is the success. Its key is wrong as often as ``quality`` says."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]
    immutable_state = True

    def __init__(self, chain: Chain, quality: float) -> None:
        self.chain, self._right = chain, math.sqrt(quality)
        self.observation_space: spaces.Space[Any] = spaces.Discrete((chain.steps + 1) * (chain.length + 1))
        self.action_space: spaces.Space[Any] = spaces.Discrete(2)
        self._cumulative = chain.occupancy.cumsum(axis=1)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Start at turn 0."""
        super().reset(seed=seed)
        self.state = (0, 0, 0)
        transition = self._transition()
        return transition.observation, transition.info

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        """Decide; the key shown is drawn from the environment's own stream."""
        t, c, _ = self.state
        t, c = t + 1, c + int(action) * self.chain.counts(t)
        shown = c
        if self.np_random.random() >= self._right:
            shown = int(np.searchsorted(self._cumulative[t], self.np_random.random() * (1 - 1e-12), side="right"))
        self.state = (t, c, shown)
        return tuple(self._transition())  # type: ignore[return-value]

    def _transition(self) -> Transition:
        t, c, shown = self.state
        ended = t == self.chain.steps
        reward = float(ended and c >= self.chain.need)
        return Transition(t * (self.chain.length + 1) + c, reward, ended, False, {"progress_key": (t, shown)})

    def _capture(self) -> tuple[int, int, int]:
        return self.state

    def _apply(self, state: tuple[int, int, int]) -> None:
        self.state = state

    def _config(self) -> dict[str, Any]:
        return {}


class Coin:
    """Policy that succeeds with the chain's chance."""

    def __init__(self, chain: Chain) -> None:
        self._chance = chain.chance

    def __call__(self, contexts: Sequence[Context]) -> list[Action]:
        """Toss a coin for every path."""
        return [Action(int(c.rng.random() < self._chance), position=c.depth, tokens=1) for c in contexts]


def gradient(tree: RolloutTree, chain: Chain) -> NDArray[np.float64]:
    """Gradient of one tree with credit assigned, by two logits per state, flattened."""
    edges = list(tree.edges())
    state = np.array([edge.parent.observation for edge in edges])
    score = np.array([edge.action.text for edge in edges]) - chain.chance
    signal = np.array([edge.weight * edge.advantage for edge in edges]) * score
    found = np.zeros(chain.steps * (chain.length + 1))
    np.add.at(found, state, signal)
    return np.concatenate([found, -found])


def exact_gradient(chain: Chain) -> NDArray[np.float64]:
    """The gradient that `gradient` estimates."""
    apart = np.zeros((chain.steps, chain.length + 1))
    for t in filter(chain.counts, range(chain.steps)):
        apart[t, :-1] = np.diff(chain.values[t + 1])
    found = (chain.occupancy[:-1] * apart * chain.chance * (1 - chain.chance)).ravel()
    return np.concatenate([found, -found])
