"""Small episodic MDPs whose policy gradient is known exactly: the ground truth for credit, weights and schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from gymnasium import spaces

from sandboxgym import SnapshotEnv
from sandboxgym.core import Transition
from sandboxgym.tree import Action, Context, Envs, RolloutTree, Schedule, rollout


@dataclass(frozen=True)
class MDP:
    """An MDP with states 0..S-1 and the end as state S. An episode is truncated after ``horizon`` steps."""

    transitions: np.ndarray  # [S, A, S + 1]
    rewards: np.ndarray  # [S, A, S + 1]
    logits: np.ndarray  # [S, A] of the softmax policy
    horizon: int
    starts: tuple[int, ...] = (0,)  # start state of each task
    refused: tuple[int, ...] = ()  # states that say of the action which led there that it was refused

    @property
    def policy(self) -> np.ndarray:
        """Action probabilities [S, A]."""
        exp = np.exp(self.logits - self.logits.max(axis=1, keepdims=True))
        return exp / exp.sum(axis=1, keepdims=True)

    @property
    def entropies(self) -> np.ndarray:
        """Entropy of the action distribution in every state [S], in nats."""
        return -(self.policy * np.log(self.policy)).sum(axis=1)

    def action_values(self, gamma: float = 1.0) -> np.ndarray:
        """Action values Q[t, s, a] by dynamic programming from the horizon backwards."""
        states, actions = self.logits.shape
        values = np.zeros((self.horizon + 1, states + 1))
        q = np.zeros((self.horizon, states, actions))
        for t in reversed(range(self.horizon)):
            q[t] = (self.transitions * (self.rewards + gamma * values[t + 1])).sum(axis=2)
            values[t, :-1] = (self.policy * q[t]).sum(axis=1)
        return q

    def occupancy(self) -> np.ndarray:
        """State probabilities P(s_t = s), [t, s], averaged over tasks."""
        visits = np.zeros((self.horizon, len(self.logits)))
        for start in self.starts:
            visits[0, start] += 1 / len(self.starts)
        for t in range(1, self.horizon):
            visits[t] = np.einsum("s,sa,san->n", visits[t - 1], self.policy, self.transitions)[:-1]
        return visits

    def gradient(self, gamma: float = 1.0) -> np.ndarray:
        """Exact gradient E Σ_t ∇log π(a_t|s_t) A_t(s_t, a_t), [S, A]; for γ = 1 the gradient of the expected return.

        As in every published trainer the state distribution is not discounted (no factor γ^t).
        """
        q = self.action_values(gamma)
        advantages = q - (self.policy * q).sum(axis=2, keepdims=True)
        return np.einsum("ts,sa,tsa->sa", self.occupancy(), self.policy, advantages)


class TabularEnv(SnapshotEnv[int, int]):
    """One of the tasks of an `MDP`; its transitions are drawn from the environment's own stream."""

    metadata = {"render_modes": []}
    immutable_state = True

    def __init__(self, mdp: MDP) -> None:
        self.mdp = mdp
        self.observation_space = spaces.Discrete(len(mdp.logits) + 1)
        self.action_space = spaces.Discrete(mdp.logits.shape[1])
        self._cumulative = mdp.transitions.cumsum(axis=2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.state = (0, self.mdp.starts[(options or {}).get("task", 0)], 0.0)
        return self.state[1], self._info()

    def step(self, action: int):
        t, state, _ = self.state
        successor = int(np.searchsorted(self._cumulative[state, action], self.np_random.random(), side="right"))
        self.state = (t + 1, successor, float(self.mdp.rewards[state, action, successor]))
        return tuple(self._transition())

    def _info(self) -> dict[str, Any]:
        return {"progress_key": self.state[1] % 3, "valid_action": self.state[1] not in self.mdp.refused}

    def _transition(self) -> Transition:
        t, state, reward = self.state
        ended = state == len(self.mdp.logits)
        return Transition(state, reward, ended, not ended and t == self.mdp.horizon, self._info())

    def _capture(self) -> tuple[int, int, float]:
        return self.state

    def _apply(self, state: tuple[int, int, float]) -> None:
        self.state = state

    def _config(self) -> dict[str, Any]:
        return {}


class TabularPolicy:
    """The softmax policy of an `MDP` as a `sandboxgym.tree.Policy`; a decision is one token, at position t."""

    def __init__(self, mdp: MDP) -> None:
        self._cumulative = mdp.policy.cumsum(axis=1)
        self._entropies = mdp.entropies.tolist()

    def __call__(self, contexts: Sequence[Context]) -> list[Action]:
        return [self._act(context) for context in contexts]

    def _act(self, context: Context) -> Action:
        state = context.observation
        drawn = min(
            int(np.searchsorted(self._cumulative[state], context.rng.random(), side="right")),
            self._cumulative.shape[1] - 1,
        )
        return Action(drawn, entropy=self._entropies[state], position=context.depth, tokens=1, memory=state)


def random_mdp(*, seed: int = 0, states: int = 5, actions: int = 2, horizon: int = 5, dense: bool = False) -> MDP:
    """Episodes of 2 to ``horizon`` steps, from states of different entropy; ``dense`` rewards every step.

    States 0 and 1, where tasks start, are never entered again: their gradient is that of the first step alone.
    """
    rng = np.random.default_rng(seed)
    transitions = rng.dirichlet(np.full(states + 1, 0.5), size=(states, actions))
    transitions[:, :, :2] = 0.0
    transitions[:2, :, -1] = 0.0
    transitions /= transitions.sum(axis=2, keepdims=True)
    rewards = np.zeros_like(transitions)
    rewards[:, :, -1] = rng.integers(0, 2, size=(states, actions))
    if dense:
        rewards += rng.normal(scale=0.3, size=rewards.shape)
    logits = rng.normal(size=(states, actions)) * np.linspace(0.3, 2.0, states)[:, None]
    return MDP(transitions, rewards, logits, horizon, starts=(0, 1))


def telling_mdp() -> MDP:
    """Make an MDP whose later state's entropy reveals the first action, which decides the return.

    Action 0 leads to state 1 (nearly uniform) and reward 1, action 1 to state 2 (nearly certain) and reward 0: ranking
    a finished path's steps by entropy picks state 1 after action 0, and the root after action 1.
    """
    transitions, rewards = np.zeros((3, 2, 4)), np.zeros((3, 2, 4))
    transitions[0, 0, 1] = transitions[0, 1, 2] = 1.0
    transitions[1:, :, 3] = 1.0
    rewards[1, :, 3] = 1.0
    logits = np.array([[0.2, -0.2], [0.05, -0.05], [2.0, -2.0]])
    return MDP(transitions, rewards, logits, horizon=2, starts=(0, 0))


Credit = Callable[[Sequence[RolloutTree]], None]
"""Function that sets a batch's advantages and weights: `bpo_ref.train.assign_credit`, or a faulty version."""


def batches_of(
    mdp: MDP, schedule: Callable[[int], Schedule], *, batches: int, prompts: int = 4, first: int = 0
) -> Iterator[list[RolloutTree]]:
    """Roll out batches of trees, the tasks in turn; ``schedule`` makes that of a batch, ``first`` is its number."""
    envs, policy = Envs(lambda: TabularEnv(mdp)), TabularPolicy(mdp)
    tasks = [i % len(mdp.starts) for i in range(prompts)]
    for batch in range(first, first + batches):
        yield rollout(envs, policy, schedule(batch), tasks=tasks, seed=(batch,))
    envs.close()


def gradients(
    mdp: MDP, batches: Iterable[Sequence[RolloutTree]], credits: Mapping[str, Credit]
) -> dict[str, np.ndarray]:
    """g = Σ_edges weight x advantage x ∇log π / trees of every batch, [batches, S, A], under each of ``credits``."""
    policy, actions = mdp.policy, mdp.logits.shape[1]
    result: dict[str, list[np.ndarray]] = {name: [] for name in credits}
    for trees in batches:
        edges = [edge for tree in trees for edge in tree.edges()]
        state = np.array([edge.parent.observation for edge in edges])
        score = np.eye(actions)[[edge.action.text for edge in edges]] - policy[state]
        for name, credit in credits.items():
            credit(trees)
            g = np.zeros_like(mdp.logits)
            signal = np.array([edge.weight * edge.advantage for edge in edges]) / len(trees)
            np.add.at(g, state, signal[:, None] * score)
            result[name].append(g)
    return {name: np.array(samples) for name, samples in result.items()}


@dataclass(frozen=True)
class Comparison:
    """Sample gradients against the exact one."""

    z: float
    """Largest |z| of all parameters."""
    critical: float
    """Bound that ``z`` exceeds with probability ``alpha`` or less if there is no bias (normal, Bonferroni)."""
    bias: float
    """Relative bias ‖mean - exact‖ / ‖exact‖, Monte Carlo error included."""

    @property
    def biased(self) -> bool:
        return self.z > self.critical


def compare(samples: np.ndarray, exact: np.ndarray, *, alpha: float = 1e-3) -> Comparison:
    """Test independent samples [n, …] for the mean ``exact``; actions' gradients sum to 0, so one is left out."""
    free = samples[..., 1:].reshape(len(samples), -1)
    mean, error = free.mean(axis=0), free.std(axis=0, ddof=1) / np.sqrt(len(free))
    apart = mean - exact[..., 1:].ravel()
    moving = error > 1e-12
    assert np.allclose(apart[~moving], 0.0), "a parameter without noise is off"
    critical = NormalDist().inv_cdf(1 - alpha / (2 * max(1, moving.sum())))
    size = np.linalg.norm(exact)
    bias = float(np.linalg.norm(samples.mean(axis=0) - exact) / size) if size else float("inf")
    return Comparison(float(np.abs(apart[moving] / error[moving]).max()), critical, bias)
