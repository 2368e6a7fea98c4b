"""Any OpenAI-compatible endpoint as a policy on ALFWorld, with siblings forked where the model was least certain.

    vllm serve Qwen/Qwen2.5-1.5B-Instruct &
    python openai_endpoint.py --base-url http://localhost:8000/v1 --model Qwen/Qwen2.5-1.5B-Instruct

Prints each game's paths, each as the actions after its fork, and compares backbones with the best of their siblings.
pip install "sandboxgym[openai]"
"""

import argparse

import gymnasium as gym

import sandboxgym  # noqa: F401  (registers the environments)
from sandboxgym.adapters.openai import ChatEndpoint
from sandboxgym.tree import Envs, TopEntropy, rollout

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--api-key", help="default: $OPENAI_API_KEY")
    parser.add_argument("--games", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20, help="an episode at most")
    parser.add_argument("--points", type=int, default=2, help="steps of an episode to fork at")
    parser.add_argument("--width", type=int, default=3, help="paths that leave each of these")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    endpoint = ChatEndpoint.connect(args.base_url, args.model, api_key=args.api_key, temperature=args.temperature)
    with endpoint as policy, Envs(lambda: gym.make("sandboxgym/ALFWorld-v0", max_episode_steps=args.steps)) as envs:
        schedule = TopEntropy(args.points, width=args.width)
        trees = rollout(envs, policy, schedule, tasks=range(args.games), seed=(args.seed,))
    for tree in trees:
        print(f"\ngame {tree.task}: {tree.root.observation.rpartition('Your task is to: ')[2]}")
        for path in tree.paths:
            print(f"  from step {path.start.depth}, return {path.total_reward:.0f}:")
            for edge in path.edges:
                print(f"    {edge.action.entropy:5.2f} nats  {edge.action.text}{'' if edge.valid else '  (refused)'}")
    backbones = [tree.paths[0].total_reward for tree in trees]
    best = [max(path.total_reward for path in tree.paths) for tree in trees]
    steps = sum(tree.env_steps for tree in trees)
    print(
        f"\nbackbones {sum(backbones):.0f}, best of the siblings {sum(best):.0f} of {len(trees)}; {steps} steps, ",
        end="",
    )
    print(f"{sum(tree.tokens for tree in trees)} tokens, {sum(tree.snapshots for tree in trees)} snapshots")
