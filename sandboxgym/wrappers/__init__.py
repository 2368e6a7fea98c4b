"""Snapshots through any stack of Gymnasium wrappers."""

from sandboxgym.wrappers.codecs import Adapter, WrapperCodec, register_wrapper
from sandboxgym.wrappers.stack import SnapshotWrapper, StackSnapshot, fork, outcomes, restore, snapshot, successors

__all__ = [
    "Adapter",
    "SnapshotWrapper",
    "StackSnapshot",
    "WrapperCodec",
    "fork",
    "outcomes",
    "register_wrapper",
    "restore",
    "snapshot",
    "successors",
]
