"""Gymnasium environments that can be snapshotted, restored and forked at any step.

>>> import gymnasium as gym
>>> import sandboxgym
>>> env = gym.make("sandboxgym/ALFWorld-v0")
>>> observation, info = env.reset(seed=0)
>>> snap = env.snapshot()
>>> observation, info = env.restore(snap)
>>> children = env.fork(4, seed=0)
"""

from sandboxgym.codecs import Adapter, WrapperCodec, register_wrapper
from sandboxgym.core import (
    Layer,
    Snapshot,
    SnapshotEnv,
    SnapshotSpec,
    SupportsSnapshot,
    Transition,
)
from sandboxgym.errors import (
    ResetNeeded,
    SnapshotCorrupt,
    SnapshotError,
    SnapshotMismatch,
    SnapshotNotSupported,
    SnapshotReleased,
)
from sandboxgym.randomness import sibling_seed
from sandboxgym.registration import register_envs
from sandboxgym.spaces import Unicode
from sandboxgym.wrappers import SnapshotWrapper, fork, restore, snapshot

__version__ = "0.1.0"

__all__ = [
    "Adapter",
    "Layer",
    "ResetNeeded",
    "Snapshot",
    "SnapshotCorrupt",
    "SnapshotEnv",
    "SnapshotError",
    "SnapshotMismatch",
    "SnapshotNotSupported",
    "SnapshotReleased",
    "SnapshotSpec",
    "SnapshotWrapper",
    "SupportsSnapshot",
    "Transition",
    "Unicode",
    "WrapperCodec",
    "fork",
    "register_wrapper",
    "restore",
    "sibling_seed",
    "snapshot",
]

register_envs()
