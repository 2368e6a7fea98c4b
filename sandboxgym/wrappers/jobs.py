"""Several calls on one environment as one job, so that an environment elsewhere needs one message for them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym

from sandboxgym.wrappers.stack import restore, snapshot

Begun = tuple[Any, dict[str, Any]]
"""Observation and info, of a reset or a restore."""
Stepped = tuple[Any, Any, bool, bool, dict[str, Any]]
"""Result of ``env.step``."""


@dataclass(slots=True)
class EnvJob:
    """Calls on one environment that belong together: reset or restore, snapshot, look-ahead, step.

    They are executed in this order, each if it is asked for. The first that raises ends the job, and a snapshot that
    was taken in it is released.
    """

    env: gym.Env[Any, Any]
    reset: tuple[int | None, dict[str, Any] | None] | None = None
    """Seed and options of a reset."""
    restore: tuple[Any, int | None] | None = None
    """Snapshot and seed of a restore."""
    capture: bool = False
    look: Callable[[gym.Env[Any, Any], dict[str, Any]], Any] | None = None
    """Looks ahead from the state, given its info (``sandboxgym.tree.Look``)."""
    info: dict[str, Any] | None = None
    """Info of the state, where the job does not begin with a reset or a restore."""
    step: tuple[Any] | None = None
    """The action of a step."""


@dataclass(slots=True)
class EnvResult:
    """Results of an `EnvJob`; None for calls that it did not ask for."""

    begun: Begun | None = None
    snap: Any = None
    ahead: Any = None
    """Result of the look-ahead."""
    stepped: Stepped | None = None
    capturing: float = 0.0
    """Seconds spent on the snapshot and the restore."""
    stepping: float = 0.0
    """Seconds spent on the reset, the look-ahead and the step."""

    def drop(self) -> None:
        """Release the snapshot, which nobody will have, whatever comes of that."""
        if self.snap is not None:
            with contextlib.suppress(Exception):  # of any handle: what is raised is why it is dropped
                self.snap.release()


def execute(job: EnvJob) -> EnvResult:
    """Execute a job's calls on its environment, in the calling thread."""
    env, done = job.env, EnvResult()
    began = time.perf_counter()
    try:
        if job.reset is not None:
            seed, options = job.reset
            done.begun = env.reset(seed=seed, options=options)
        reset = time.perf_counter()
        if job.restore is not None:
            done.begun = restore(env, job.restore[0], seed=job.restore[1])
        if job.capture:
            done.snap = snapshot(env)
        captured = time.perf_counter()
        if job.look is not None:
            done.ahead = job.look(env, done.begun[1] if done.begun is not None else job.info or {})
        if job.step is not None:
            done.stepped = env.step(*job.step)  # type: ignore[assignment]
    except BaseException:
        done.drop()
        raise
    done.capturing = captured - reset
    done.stepping = reset - began + time.perf_counter() - captured
    return done
