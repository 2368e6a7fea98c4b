"""Exit statuses of a training program."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from bpo_ref.config import ConfigError
from bpo_ref.learning.checkpoint import CheckpointError
from bpo_ref.session import TrainingFailed
from sandboxgym.sandbox.base import SandboxUnavailable
from sandboxgym.workers.env_host import FleetError, WorkerDied


@contextmanager
def exits_for_errors() -> Iterator[None]:
    """Context that turns errors of settings, checkpoints, workers and training into exits with a message.

    Raises:
        SystemExit: with the reason; or, after Ctrl-C, with the status 130, as in shells.
    """
    try:
        yield
    except (
        ConfigError,
        CheckpointError,
        TrainingFailed,
        FleetError,
        WorkerDied,
        TimeoutError,
        SandboxUnavailable,
    ) as error:
        raise SystemExit(f"error: {error}") from error
    except KeyboardInterrupt:  # before the first step, or the second time
        raise SystemExit(128 + signal.SIGINT) from None
