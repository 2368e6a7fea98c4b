"""Rollouts of an update: sampled with its own weights, or one update ahead (``staleness``).

What this module promises, with ``staleness`` 1:

1. The rollouts of update k + 1 are sampled with the weights and the statistics at the beginning of update k; those of a
   run's first update with its own.
2. A backend on servers samples in a thread while update k is learned. Others sample before it is: the same rollouts.
3. The thread exchanges nothing with other processes; what they have to do together is done before it starts, or when
   those of all processes have ended: a server that one still asks keeps its weights.
4. Weights and statistics that sampled are in every checkpoint (`TrainingSession.behind`). A run that is resumed samples
   the same rollouts from them again, so it continues as if it had not been interrupted.

Left out: more than one update ahead; sampling within the process at the same time as learning.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bpo_ref.baselines import Memory
from bpo_ref.learning.models import put_weights, trained_weights
from sandboxgym.tree import Clock, Failure, RolloutTree

if TYPE_CHECKING:
    from bpo_ref.lookahead import LookAhead
    from bpo_ref.session import TrainingSession

LONGEST_STOP = 10.0
"""Seconds for which the end of a run waits for a rollout that it has stopped; then the process ends without it."""


@dataclass
class Sampled:
    """Rollouts of an update on this process, as they were sampled."""

    trees: list[RolloutTree]
    policy: Any
    """The policy that sampled."""
    clock: Clock
    failures: list[Failure]
    seconds: float
    """Duration of the rollout."""
    look: LookAhead | None = None
    stale: int = 0
    """Updates that were learned since the weights which sampled."""


Sample = Callable[[Sequence[int], Any, Memory], Sampled]
"""Function that rolls out the tasks of a seed with a policy, by statistics of earlier batches."""


class Stopped(Exception):
    """Raised in a rollout that nobody waits for any more."""


class StoppablePolicy:
    """A policy that raises `Stopped` once it has been told to."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self.stopped = threading.Event()

    def __call__(self, asked: Any) -> Any:
        """Decide as the policy does, unless stopped."""
        if self.stopped.is_set():
            raise Stopped
        return self._policy(asked)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)


class Ahead:
    """The rollouts of a run, update by update.

    Args:
        session: state of the run.
        sample: rolls out an update's tasks.
    """

    def __init__(self, session: TrainingSession, sample: Sample) -> None:
        self._session, self._sample = session, sample
        self._next: _Pending | None = None

    def take(self, seed: Sequence[int]) -> Sampled:
        """Return the rollouts of this update, and begin those of the next one if they are to be sampled ahead.

        All processes have to call it.

        Args:
            seed: key of this update's random draws, whose last number is the update's.
        """
        args, session = self._session.args, self._session
        if not args.staleness:
            return self._sample(seed, session.player(args.temperature), session.memory)
        again = session.behind is not None  # also where this process was resumed
        batch = self._first(seed) if self._next is None else self._next.result()
        batch.stale = int(again)
        self._next = None
        session.accelerator.wait_for_everyone()  # before the first process gives servers other weights
        session.behind = {
            "weights": trained_weights(session.policy),
            "memory": copy.deepcopy(session.memory.state()),
        }
        if args.budget or session.step + 1 < args.updates:
            following = (*seed[:-1], seed[-1] + 1)
            memory = Memory.of(args, session.behind["memory"])
            policy = StoppablePolicy(session.player(args.temperature))
            self._next = _Pending(lambda: self._sample(following, policy, memory), policy)
            self._next.start(beside=args.backend == "vllm")
        return batch

    def wait(self) -> None:
        """Wait for the next update's rollouts of all processes, before their sampler gets other weights."""
        if self._next is not None:
            self._next.join()
            self._session.accelerator.wait_for_everyone()

    def stop(self) -> None:
        """Give up the next update's rollouts."""
        if self._next is not None:
            self._next.policy.stopped.set()
            self._next.join(LONGEST_STOP)
            self._next = None

    def _first(self, seed: Sequence[int]) -> Sampled:
        """Sample the first update of this process: with the weights of the checkpoint that belong to it, if any."""
        args, session = self._session.args, self._session
        if session.behind is None:
            return self._sample(seed, session.player(args.temperature), session.memory)
        present = trained_weights(session.policy)
        put_weights(session.policy, session.behind["weights"])
        try:
            memory = Memory.of(args, session.behind["memory"])
            return self._sample(seed, session.player(args.temperature), memory)
        finally:
            put_weights(session.policy, present)


class _Pending:
    """Rollouts that are being sampled."""

    def __init__(self, sample: Callable[[], Sampled], policy: StoppablePolicy) -> None:
        self.policy = policy
        self._sample = sample
        self._found: Sampled | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="sandboxgym-ahead", daemon=True)

    def start(self, *, beside: bool) -> None:
        """Sample, in a thread or at once."""
        if beside:
            self._thread.start()
        else:
            self._found = self._sample()

    def join(self, seconds: float | None = None) -> None:
        """Wait until all is sampled, for so long at most."""
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def result(self) -> Sampled:
        """Return what was sampled; raises what sampling has raised."""
        self.join()
        if self._error is not None:
            raise self._error
        assert self._found is not None
        return self._found

    def _run(self) -> None:
        try:
            self._found = self._sample()
        except BaseException as error:  # raised by whoever joins the thread
            self._error = error
