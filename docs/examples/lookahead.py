"""Fork look-ahead in a trainer of your own: subtract from each return how lucky the decisions after its action were.

The policy clicks at random, so its probabilities are known; V̂ is a mean by progress key, of earlier batches only.
"""

import statistics
from collections import defaultdict

import gymnasium as gym

import sandboxgym
from sandboxgym.tree import Action, Envs, Schedule, rollout


def look(env, info):
    """`rollout` asks this at every state: what each action would bring, and where it would lead."""
    tried = zip(info["admissible_commands"], sandboxgym.successors(env, info["admissible_commands"]))
    return [(a, t.reward, None if t.terminated or t.truncated else t.info["progress_key"]) for a, t in tried]


def luck(edge, means):
    """Q̂(s, a) - Σ π(a'|s) Q̂(s, a'): 0 on average, whatever `means` holds of earlier batches."""
    worth = {action: reward + means.get(key, 0.0) for action, reward, key in edge.parent.ahead}
    return worth[edge.action.text] - statistics.fmean(worth.values())


with Envs(lambda: gym.make("sandboxgym/WebShop-v0", max_episode_steps=8)) as envs:
    known, policy = defaultdict(list), lambda cs: [Action(c.rng.choice(c.info["admissible_commands"])) for c in cs]
    for batch in range(4):
        trees = rollout(envs, policy, Schedule(roots=8), tasks=range(16), seed=(batch,), look=look)
        paths, means = [p for t in trees for p in t.paths], {key: statistics.fmean(g) for key, g in known.items()}
        returns = [path.total_reward for path in paths]  # what the first decision is credited with; its own luck stays
        corrected = [g - sum(luck(edge, means) for edge in path.edges[1:]) for g, path in zip(returns, paths)]
        for g, path in zip(returns, paths):
            for edge in path.edges:  # rewarded at the end alone, so g is the return from each of its states
                known[edge.parent.key].append(g)
        before, after = statistics.variance(returns), statistics.variance(corrected)
        print(f"batch {batch}: variance of returns {before:.4f}, without luck {after:.4f}")
