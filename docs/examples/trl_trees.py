"""Trees in TRL's GRPOTrainer: every episode is forked at several steps, and every turn has its own advantage.

The shop pays for a purchase by how well it fits. This model is tiny and random, so any text is some command
(`AnyCommand`). An instruct model needs no such wrapper, but a prompt: `make_prompt("react", SHOP)`. For each tree its
rows, branch points and returns are printed, and those differ. In so few updates nothing is learned. Needs
sandboxgym[trl].
"""

import argparse

import gymnasium as gym
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import sandboxgym  # noqa: F401 - registers the environments
from bpo_ref.adapters.algorithm import TreeAlgorithm
from bpo_ref.args import Args
from bpo_ref.learning.tiny import tiny_model, tiny_tokenizer, words_of
from sandboxgym.adapters.trl import TreeRollouts, tree_return, tree_trainer
from sandboxgym.tree import Envs

SHOP, TURNS, ROWS = "sandboxgym/WebShop-v0", 8, 12
"""Environment, turns of an episode, rows per task: two rollouts, each forked at two steps into three, are 10."""


class AnyCommand(gym.Wrapper):
    """Takes any text for a command: the one whose number its letters add up to."""

    def step(self, action):
        """Any text will do."""
        commands = self.unwrapped.last.info["admissible_commands"]
        return self.env.step(commands[sum(map(ord, action)) % len(commands)])


class Told(TreeAlgorithm):
    """Prints what each batch of trees found."""

    def credit(self, trees):
        """Print, and assign credit."""
        for tree in trees:
            returns = sorted(round(path.total_reward, 2) for path in tree.paths)
            print(f"task {tree.task}: {len(tree.paths)} rows, {len(tree.branch_nodes)} branch points, {returns=}")
        return super().credit(trees)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps")
    parser.add_argument("--tasks", type=int, default=4, help="tasks per step")
    parser.add_argument("--out", default="runs/trl-trees", help="folder of the trainer")
    args = parser.parse_args()
    with Envs(lambda: AnyCommand(gym.make(SHOP, max_episode_steps=TURNS))) as envs:
        env = envs.take()
        texts = [env.reset(options={"task": task})[0] for task in range(args.tasks)]
        envs.give(env)
        tokenizer = tiny_tokenizer(words_of([*texts, "search buy now click back to next"]))
        rows = [{"prompt": [{"role": "user", "content": str(task)}]} for task in range(args.tasks)]
        trees = {"schedule": "random", "forks": "roots", "roots": 2, "width": 3, "points": 2}
        rule = Told(Args(algo="bpo-forest", env_id=SHOP, max_turns=TURNS, **trees))
        rollouts = TreeRollouts(envs, rule, tokenizer, context=1024, max_new_tokens=4, observation_tokens=64)
        sizes = {"num_generations": ROWS, "per_device_train_batch_size": ROWS * args.tasks, "max_steps": args.steps}
        plain = {"output_dir": args.out, "save_strategy": "no", "report_to": "none", "logging_steps": 1}
        trainer = tree_trainer(GRPOTrainer)(
            tiny_model(tokenizer, max_position_embeddings=1024),
            args=GRPOConfig(use_cpu=True, bf16=False, learning_rate=0.003, **sizes, **plain),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            reward_funcs=[tree_return],
            rollout_func=rollouts,
        )
        trainer.train()
