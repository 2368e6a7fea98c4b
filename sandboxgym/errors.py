"""Typed errors of the snapshot contract. Messages say what was expected and what was found."""

from __future__ import annotations

from gymnasium.error import ResetNeeded

__all__ = [
    "ResetNeeded",
    "SnapshotCorrupt",
    "SnapshotError",
    "SnapshotMismatch",
    "SnapshotNotSupported",
    "SnapshotReleased",
]


class SnapshotError(Exception):
    """Base class of everything that can go wrong with a snapshot."""


class SnapshotNotSupported(SnapshotError):
    """The environment, or a wrapper around it, cannot be captured faithfully."""


class SnapshotMismatch(SnapshotError):
    """The snapshot was taken from another environment, configuration or wrapper stack."""


class SnapshotReleased(SnapshotError):
    """The snapshot was released; what it held is gone."""


class SnapshotCorrupt(SnapshotError):
    """The bytes are not an intact snapshot: bad magic, version, length, checksum or content."""
