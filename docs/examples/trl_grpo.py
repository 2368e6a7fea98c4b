"""TRL's GRPOTrainer on ALFWorld: all generations of a prompt start from one fork point, deep inside an episode.

An expert plays all but its last move; the model goes on from there. This model is tiny and random: its whole turn is
taken as the command (`RESPONSE`), read leniently (`NearestCommand`). An instruct model needs neither: TRL parses its
tool calls. The reward logged per step, the share of the 16 rollouts that made the last move, rises from a quarter to
nearly all in 16 steps, two minutes (other seeds: more): a fork point memorised, no game learned. Needs sandboxgym[trl].
"""

import argparse
import difflib

import gymnasium as gym
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import sandboxgym
from bpo_ref.learning.tiny import tiny_model, tiny_tokenizer, words_of
from sandboxgym.adapters.trl import TRLEnvironments, show

TEMPLATE = """{% for m in messages %}{{ ('<|assistant|>' if m.role == 'assistant' else '<|user|>') + m.content -}}
{% for call in m.tool_calls or [] %}{{ call.function.name ~ ' ' ~ call.function.arguments }}{% endfor -%}
{% if m.role == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor -%}
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
CALL = {"type": "function", "function": {"name": "step", "arguments": {"action": "{content}"}}}
TURN = {"close_pattern": r"<\|end\|>|$", "content": "text", "repeats": True, "transform": CALL}
RESPONSE = {"defaults": {"role": "assistant"}, "start_anchor": "<|assistant|>", "fields": {"tool_calls": TURN}}
given = []  # every reward of an environment to the model


class NearestCommand(gym.Wrapper):
    """Plays the admissible command whose letters match the text best."""

    def step(self, action):
        """Any text will do."""
        commands = self.unwrapped.last.info["admissible_commands"]
        transition = self.env.step(*difflib.get_close_matches(action, commands, n=1, cutoff=0))
        given.append(transition[1])
        return transition


def near_the_goal(env, row):
    """The fork point: one move of the expert before the goal."""
    env = env.env  # without NearestCommand: these are not the model's moves
    intro, info = env.reset(options={"task": row["task"]})
    observation, snaps, expert = intro, [], env.unwrapped.expert()
    expert.reset(intro)
    while not info["success"]:
        snaps.append(sandboxgym.snapshot(env))
        observation, *_, info = env.step(expert.act(observation))
    return f"{intro}\n{show(*sandboxgym.restore(env, snaps[-1]))}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps")
    parser.add_argument("--generations", type=int, default=16, help="rollouts of a prompt")
    parser.add_argument("--out", default="runs/trl", help="folder of the trainer")
    args = parser.parse_args()
    rows = [{"prompt": [{"role": "user", "content": ""}], "task": 1}] * args.steps
    with TRLEnvironments(
        lambda: NearestCommand(gym.make("sandboxgym/ALFWorld-v0")), start=near_the_goal, generations=args.generations
    ) as factory:
        tokenizer = tiny_tokenizer(words_of(factory().reset(**row) for row in rows))
        tokenizer.chat_template, tokenizer.response_template = TEMPLATE, RESPONSE
        sizes = {"num_generations": args.generations, "per_device_train_batch_size": args.generations}
        rate = {"learning_rate": 0.01, "lr_scheduler_type": "constant"}
        turns = {"max_tool_calling_iterations": 6, "generation_kwargs": {"max_new_tokens": 6}}
        plain = {"output_dir": args.out, "save_strategy": "no", "report_to": "none", "logging_steps": 1}
        trainer = GRPOTrainer(
            tiny_model(tokenizer),
            args=GRPOConfig(max_steps=args.steps, use_cpu=True, **sizes, **rate, **turns, **plain),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            environment_factory=factory,
        )
        trainer.train()
    logged = [round(log["reward"], 3) for log in trainer.state.log_history if "reward" in log]
    total = len(rows) * args.generations
    print(f"{len(given)} steps, {sum(given):.0f} of {total} rollouts reached the goal, {logged=}")
