"""Environments that are closed, snapshots that are released, and calls without warnings."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import gymnasium as gym

from sandboxgym.conformance.subject import AnyEnv, Subject


@contextlib.contextmanager
def opened(subject: Subject) -> Iterator[AnyEnv]:
    """A new environment, closed at the end of the context."""
    with quiet():
        env = subject.make_env()
        try:
            yield env
        finally:
            env.close()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings: those of ``step`` after the end of an episode are provoked."""
    level = gym.logger.min_level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gym.logger.min_level = gym.logger.ERROR
        try:
            yield
        finally:
            gym.logger.min_level = level


def release(snap: Any) -> None:
    """Release a snapshot, if it has a ``release``."""
    getattr(snap, "release", lambda: None)()
