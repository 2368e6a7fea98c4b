"""Calls sent to all workers side by side, and their outcomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sandboxgym.workers.env_host import Call, CallOutcome, EnvFailure
from sandboxgym.workers.worker import InlineWorker, Worker


def exchange(
    calls: Mapping[int, Call], workers: Sequence[Worker], timeout: float | None
) -> tuple[dict[int, CallOutcome], dict[int, EnvFailure]]:
    """Execute calls, the workers side by side, each its own calls one after the other.

    Args:
        calls: by index of the environment.
        workers: the worker of every environment.
        timeout: seconds for each call.

    Returns:
        Outcomes, and for every worker that died or timed out the environment that it was executing.
    """
    outcomes: dict[int, CallOutcome] = {}
    lost: dict[int, EnvFailure] = {}
    shares = _by_worker(calls, workers)
    if all(isinstance(worker, InlineWorker) for worker, _ in shares):
        for worker, indices in shares:
            assert isinstance(worker, InlineWorker)
            outcomes.update(worker.execute({index: calls[index] for index in indices}))
        return outcomes, lost
    try:
        for worker, indices in shares:
            worker.post([calls[index] for index in indices])
        for worker, indices in shares:
            for index in indices:
                try:
                    outcomes[index] = worker.take(timeout)
                except EnvFailure as failure:
                    lost[index] = failure
                    break
    finally:
        for worker, _ in shares:
            worker.settle()
    return outcomes, lost


def _by_worker(calls: Mapping[int, Call], workers: Sequence[Worker]) -> list[tuple[Worker, list[int]]]:
    """Workers with the environments among the calls that are theirs, in order."""
    shares: dict[int, tuple[Worker, list[int]]] = {}
    for index in sorted(calls):
        worker = workers[index]
        shares.setdefault(id(worker), (worker, []))[1].append(index)
    return list(shares.values())
