"""The use of forks in a search: four ways to spend the same environment steps on a game of ALFWorld.

Scripted policy: any command that may change something. The last two methods choose where to go on by progress.
"""

import argparse
import math
import random

import gymnasium as gym


class Search:
    """One game, a policy and a budget of steps."""

    def __init__(self, env, game, budget, seed):
        self.env, self.left, self.success, self.rng = env, budget, False, random.Random(f"{seed} {game}")
        self.info, self.root = env.reset(seed=seed, options={"task": game})[1], env.snapshot()

    def commands(self):
        """Those that may change something, in random order: the policy."""
        commands = [c for c in self.info["admissible_commands"] if not c.startswith(("look", "inv", "help", "exam"))]
        return self.rng.sample(commands, len(commands))

    def play(self, start, length, command=None):
        """Go to a snapshot and play on, `command` first; after each step: goals met, a needed thing in the hand."""
        self.info = self.env.restore(start)[1]
        while length and self.left and not self.success:
            _, _, self.success, _, self.info = self.env.step(command or self.commands()[0])
            length, self.left, command = length - 1, self.left - 1, None
            yield 0.6 * self.info["goal_condition"] + 0.3 * self.info["progress_key"].endswith("held")


def rollouts(search, *, forked=False, length=20):
    """Best of N from the root; `forked`: every other one from midway, the most advanced state met so far."""
    best, midway = 0.0, search.root
    while search.left and not search.success:
        for start in (search.root, midway)[: 1 + forked]:
            for progress in search.play(start, length):
                if progress > best:
                    best, midway = progress, search.env.snapshot()


def mcts(search, *, playout=2, explore=0.1):
    """UCT: try an untried command, play on, back up the best progress. Constants chosen on games 1000 to 1039."""

    def node():
        return argparse.Namespace(snap=search.env.snapshot(), untried=search.commands(), children=[], visits=0, value=0)

    root = node()
    while search.left and not search.success:
        path = [root]
        while not path[-1].untried:
            log = math.log(path[-1].visits)
            path.append(max(path[-1].children, key=lambda n: n.value / n.visits + explore * math.sqrt(log / n.visits)))
        values = list(search.play(path[-1].snap, 1, path[-1].untried.pop()))
        path[-1].children.append(child := node())
        values += search.play(child.snap, playout)
        for n in (*path, child):
            n.visits, n.value = n.visits + 1, n.value + max(values)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for option, default in [("--games", 40), ("--budget", 400), ("--seed", 0)]:
        parser.add_argument(option, type=int, default=default)
    args = parser.parse_args()
    env = gym.make("sandboxgym:sandboxgym/ALFWorld-v0", max_episode_steps=-1)  # the budget is the limit
    for name, method in [
        ("one rollout of 50 steps", lambda search: list(search.play(search.root, 50))),
        ("best of N from the root", rollouts),
        ("best of N, forked midway", lambda search: rollouts(search, forked=True)),
        ("MCTS, a snapshot a node", mcts),
    ]:
        solved = steps = 0
        for game in range(args.games):
            method(search := Search(env, game, args.budget, args.seed))
            solved, steps = solved + search.success, steps + args.budget - search.left
        print(f"{name:25} solved {solved:3} of {args.games}, {steps / args.games:5.0f} steps a game")
