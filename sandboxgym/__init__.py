"""Gymnasium environments that can be snapshotted, restored and forked at any step.

>>> import sandboxgym
>>> env = sandboxgym.make("ALFWorld-v0")  # gymnasium.make("sandboxgym/ALFWorld-v0"), typed
>>> observation, info = env.reset(seed=0)
>>> snap = env.snapshot()
>>> observation, info = env.restore(snap)
>>> children = env.fork(4, seed=0)
"""

import importlib
from typing import TYPE_CHECKING, Any

from sandboxgym.core import Layer, Snapshot, SnapshotEnv, SnapshotSpec, SupportsSnapshot, Transition
from sandboxgym.errors import (
    ResetNeeded,
    SnapshotCorrupt,
    SnapshotError,
    SnapshotMismatch,
    SnapshotNotSupported,
    SnapshotReleased,
)
from sandboxgym.randomness import sibling_seed
from sandboxgym.registration import make, register_envs
from sandboxgym.spaces import Unicode
from sandboxgym.task_env import EnvCard, Expert, Task, TaskEnv, TaskInfo, TaskNotFound, TaskRows
from sandboxgym.wrappers import SnapshotWrapper, fork, restore, snapshot, successors
from sandboxgym.wrappers.codecs import Adapter, WrapperCodec, register_wrapper

if TYPE_CHECKING:
    from sandboxgym.workers.pool import EnvPool, PooledEnvs
    from sandboxgym.workers.remote import RemoteEnv
    from sandboxgym.workers.vector import SnapshotVectorEnv

__version__ = "0.1.0"

__all__ = [
    "Adapter",
    "EnvCard",
    "EnvPool",
    "Expert",
    "Layer",
    "PooledEnvs",
    "RemoteEnv",
    "ResetNeeded",
    "Snapshot",
    "SnapshotCorrupt",
    "SnapshotEnv",
    "SnapshotError",
    "SnapshotMismatch",
    "SnapshotNotSupported",
    "SnapshotReleased",
    "SnapshotSpec",
    "SnapshotVectorEnv",
    "SnapshotWrapper",
    "SupportsSnapshot",
    "Task",
    "TaskEnv",
    "TaskInfo",
    "TaskNotFound",
    "TaskRows",
    "Transition",
    "Unicode",
    "WrapperCodec",
    "fork",
    "make",
    "register_wrapper",
    "restore",
    "sibling_seed",
    "snapshot",
    "successors",
]

_ON_DEMAND = {"EnvPool": "pool", "PooledEnvs": "pool", "RemoteEnv": "remote", "SnapshotVectorEnv": "vector"}


def __getattr__(name: str) -> Any:
    """Import the functions for many environments on first use, because they take longer to import than the rest."""
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.workers.{_ON_DEMAND[name]}"), name)


register_envs()
