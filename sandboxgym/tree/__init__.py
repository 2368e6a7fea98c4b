"""Rollout trees for any policy: fork the environment where a schedule says so, and keep the data needed for credit.

>>> import gymnasium as gym
>>> import sandboxgym
>>> envs = Envs(lambda: gym.make("sandboxgym/ALFWorld-v0"))
>>> def policy(contexts):
...     return [Action(context.rng.choice(context.info["admissible_commands"])) for context in contexts]
>>> (tree,) = rollout(envs, policy, ForkAt([2, 5], width=3), tasks=[7])
>>> len(tree.paths), [node.depth for node in tree.branch_nodes]
(5, [2, 5])
>>> envs.close()

A *node* is a state at which the policy acts, an *edge* one action with its reward, a *leaf* a finished episode; a
node with several edges is a *branch node*. A *path* is the run of edges sampled in one go, from where it was started
(the root, or a fork at a branch node) to its end. Independent rollouts are paths that all start at the root; a
backbone with siblings is one independent rollout with further paths started at its branch nodes; forks of forks nest.

Every path has its own random streams, for the policy and for the environment, keyed by (seed, task, path): what is
sampled on a path does not depend on which other paths are rolled out, in which order or in which process.
"""

from sandboxgym.tree.asynchronous import AsyncPolicy
from sandboxgym.tree.envs import Envs, EnvSource
from sandboxgym.tree.nodes import Action, Edge, Node, Path, PathKey, RolloutTree
from sandboxgym.tree.policies import Clock, Context, Failure, Look, Policy, Recovery
from sandboxgym.tree.rollout import rollout, rollout_async
from sandboxgym.tree.schedules import ForkAt, Schedule, TopEntropy

__all__ = [
    "Action",
    "AsyncPolicy",
    "Clock",
    "Context",
    "Edge",
    "EnvSource",
    "Envs",
    "Failure",
    "ForkAt",
    "Look",
    "Node",
    "Path",
    "PathKey",
    "Policy",
    "Recovery",
    "RolloutTree",
    "Schedule",
    "TopEntropy",
    "rollout",
    "rollout_async",
]
