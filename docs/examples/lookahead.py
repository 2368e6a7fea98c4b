"""Fork look-ahead in a trainer of your own: take off every return what the decisions after its action were lucky by.

A shopper that clicks at random, so that its probabilities are known. V̂ is a mean by progress key, of earlier batches
only. Printed is the variance of the returns that the first decision would be credited with.
"""

import statistics
from collections import defaultdict

import gymnasium as gym

import sandboxgym
from sandboxgym.tree import Action, Envs, Schedule, rollout


def policy(contexts):
    """Any listed action, each as likely as the others."""
    return [Action(context.rng.choice(context.info["admissible_commands"])) for context in contexts]


def look(env, info):
    """`rollout` asks this at every state: (action, reward, progress; None at an end) of all that could be done."""
    commands = info["admissible_commands"]
    tried = zip(commands, sandboxgym.successors(env, commands))
    return [(c, t.reward, None if t.terminated or t.truncated else t.info["progress_key"]) for c, t in tried]


def luck(edge, means):
    """Q̂(s, a) - Σ π(a'|s) Q̂(s, a'): 0 in expectation whatever `means` holds, if it has not seen this episode."""
    worth = {command: reward + means.get(key, 0.0) for command, reward, key in edge.parent.ahead}
    return worth[edge.action.text] - statistics.fmean(worth.values())


envs = Envs(lambda: gym.make("sandboxgym/WebShop-v0", max_episode_steps=8))
known = defaultdict(list)
for batch in range(4):
    trees = rollout(envs, policy, Schedule(roots=8), tasks=range(16), seed=(batch,), look=look)
    means = {key: statistics.fmean(returns) for key, returns in known.items()}
    returns, corrected = [], []
    for path in (path for tree in trees for path in tree.paths):
        returns.append(sum(edge.reward for edge in path.edges))
        # Of the decisions after the first: its own luck is what its gradient is about.
        corrected.append(returns[-1] - sum(luck(edge, means) for edge in path.edges[1:]))
        for edge in path.edges:  # rewarded at the end alone, so it is the return from each of its states
            known[edge.parent.key].append(returns[-1])
    before, after = statistics.variance(returns), statistics.variance(corrected)
    print(f"batch {batch}: variance of returns {before:.4f}, without luck {after:.4f}")
envs.close()
