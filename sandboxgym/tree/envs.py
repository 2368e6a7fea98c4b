"""Live environments for rollouts: their sources, and jobs on several at once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, runtime_checkable

import gymnasium as gym

from sandboxgym.wrappers.jobs import EnvJob, EnvResult, execute

if TYPE_CHECKING:
    from sandboxgym.tree.policies import Failure, Recovery

T = TypeVar("T")
logger = logging.getLogger("sandboxgym")


class EnvSource(Protocol):
    """Source of live environments for `rollout`: `Envs`, or a pool of workers (`sandboxgym.workers.pool`)."""

    def take(self) -> gym.Env[Any, Any]:
        """A live environment in any state, to be reset or restored."""

    def give(self, env: gym.Env[Any, Any], /) -> None:
        """Return an environment, for use by the next path."""

    def discard(self, env: gym.Env[Any, Any], /) -> None:
        """Close an environment that failed, whatever state it is in."""

    def call(self, jobs: Sequence[Callable[[], T]], /) -> list[T]:
        """Run jobs, each on an environment of its own, and return their results in order."""

    def execute_all(self, jobs: Sequence[EnvJob], /) -> list[EnvResult | Exception]:
        """Execute jobs, each on an environment of its own: their results in order, an exception in a result's place.

        As `call` would with a function per job; a source whose environments are elsewhere sends those that share a
        worker in one message.
        """


@runtime_checkable
class NearSource(EnvSource, Protocol):
    """Source of environments in several places, some of which a snapshot is cheaper to restore in."""

    def take_near(self, snap: Any, /) -> gym.Env[Any, Any]:
        """A live environment in any state, to be restored to a snapshot."""


@runtime_checkable
class ToldSource(EnvSource, Protocol):
    """Source of environments that is told what rollouts lost, and how they went on."""

    def note(self, event: Failure | Recovery, /) -> None:
        """Count a failed environment, or a path that continues with another."""


class Envs:
    """Live environments for rollouts, made on demand and reused.

    Args:
        make: makes one.
        threads: number of environments that work at the same time. More than 1 pays for those that wait: sandboxes,
            browsers, remote ones; pure Python ones (ALFWorld) are faster one by one.
    """

    def __init__(self, make: Callable[[], gym.Env[Any, Any]], *, threads: int = 1) -> None:
        if threads < 1:
            raise ValueError(f"expected at least one thread, found threads={threads}")
        self.threads = threads
        self._make = make
        self._made: list[gym.Env[Any, Any]] = []
        self._idle: list[gym.Env[Any, Any]] = []
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="sandboxgym-envs") if threads > 1 else None
        self._alone = threading.Lock()  # one environment at a time, whoever calls

    def take(self) -> gym.Env[Any, Any]:
        """A live environment in any state, to be reset or restored."""
        if not self._idle:
            self._made.append(self._make())
            self._idle.append(self._made[-1])
        return self._idle.pop()

    def give(self, env: gym.Env[Any, Any]) -> None:
        """Return an environment, for use by the next path."""
        self._idle.append(env)

    def discard(self, env: gym.Env[Any, Any]) -> None:
        """Close an environment that failed, whatever state it is in."""
        self._made = [made for made in self._made if made is not env]
        try:
            env.close()
        except Exception as error:  # it has failed already, and may raise anything
            logger.warning("an environment that had failed could not be closed: %s", described(error))

    def call(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Run jobs, each on an environment of its own, and return their results in order.

        All have ended when this returns or raises the first job's error.
        """
        if self._executor is None:
            with self._alone:
                return [job() for job in jobs]
        futures = [self._executor.submit(job) for job in jobs]
        wait(futures)
        return [future.result() for future in futures]

    def execute_all(self, jobs: Sequence[EnvJob]) -> list[EnvResult | Exception]:
        """Execute jobs, each on an environment of its own: their results in order, an exception in a result's place."""
        done: list[EnvResult] = []

        def carry_out(job: EnvJob) -> EnvResult:
            result = execute(job)
            done.append(result)
            return result

        try:
            return self.call([partial(guarded, partial(carry_out, job)) for job in jobs])
        except BaseException:  # Ctrl-C: nobody gets the results of the others
            for result in done:
                result.drop()
            raise

    def close(self) -> None:
        """Close all environments made here."""
        if self._executor is not None:
            self._executor.shutdown()
        with ExitStack() as stack:  # all, also where one fails to
            for env in self._made:
                stack.callback(env.close)
            self._made, self._idle = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def guarded(job: Callable[[], T]) -> T | Exception:
    """Result of a job, or the exception that it raised."""
    try:
        return job()
    except Exception as error:  # is the job's result; the others continue
        return error


def described(error: BaseException) -> str:
    """An error as one line of text."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]
