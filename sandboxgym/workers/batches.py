"""Jobs of many environments in workers: one message there per worker, whatever the number of its environments."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from sandboxgym.workers.env_host import CallTimedOut, EnvFailure, NotKept, WorkerDied
from sandboxgym.workers.remote import RemoteEnv
from sandboxgym.workers.worker import Worker
from sandboxgym.wrappers.jobs import EnvJob, EnvResult

Answer = EnvResult | Exception


def execute_all(jobs: Sequence[EnvJob]) -> list[Answer]:
    """Execute jobs on `RemoteEnv`s, each its own: their results in order, an exception in a result's place.

    Workers execute their jobs side by side, each worker one after the other. If a worker dies or is ended by a timeout,
    the job under way gets that error, and those after it on the same worker `WorkerDied`.

    Args:
        jobs: without look-ahead.
    """
    by_worker: dict[int, tuple[Worker, list[int]]] = {}
    for index, job in enumerate(jobs):
        assert isinstance(job.env, RemoteEnv)
        worker = job.env.worker
        by_worker.setdefault(id(worker), (worker, []))[1].append(index)
    answers: dict[int, Answer] = {}
    for index, job in enumerate(jobs):
        if job.restore is None:
            continue
        try:
            env_of(job).prepare_snapshot(job)
        except Exception as error:  # is the answer of this job; the others continue
            answers[index] = error
    with ExitStack() as locks:
        batches = []
        for _, (worker, indices) in sorted(by_worker.items()):  # one order, so that two callers cannot block each other
            locks.enter_context(worker.lock)
            batches.append(_Batch(worker, {index: jobs[index] for index in indices}, answers))
        try:
            for batch in batches:
                batch.post()
            for batch in batches:
                batch.collect()
        except BaseException:
            for answer in answers.values():
                if isinstance(answer, EnvResult):
                    answer.drop()
            raise
        finally:
            for batch in batches:
                batch.worker.settle()
        for batch in batches:
            batch.repeat()
    return [answers[index] for index in range(len(jobs))]


class _Batch:
    """The jobs of one worker, whose lock is held."""

    def __init__(self, worker: Worker, jobs: dict[int, EnvJob], answers: dict[int, Answer]) -> None:
        self.worker, self.jobs, self.answers = worker, jobs, answers
        self.posted: list[int] = []
        self.unknown: list[int] = []
        """Jobs whose snapshot the worker turned out not to keep."""

    def post(self) -> None:
        """Send the jobs of the environments that live, after those that begin anew have been made where needed."""
        for index, job in self.jobs.items():
            if index in self.answers or (job.reset is None and job.restore is None):
                continue
            try:
                env_of(job).prepare(job)
            except Exception as error:  # is the answer of this job; the others continue
                self.answers[index] = error
        calls = []
        for index, job in self.jobs.items():
            if index in self.answers:
                continue
            try:
                calls.append(env_of(job).packed(job))
                self.posted.append(index)
            except Exception as error:  # it was lost with its worker, was closed, or its snapshot was released
                self.answers[index] = error
        if calls:
            self.worker.post(calls)

    def collect(self) -> None:
        """Take the outcomes."""
        lost: EnvFailure | None = None
        for index in self.posted:
            env = env_of(self.jobs[index])
            if lost is not None:
                self.answers[index] = WorkerDied(f"{env} was lost with its worker: {lost}")
                continue
            try:
                outcome = self.worker.take(env.timeout_of(self.jobs[index]))
            except (WorkerDied, CallTimedOut) as error:
                self.answers[index] = lost = error
                continue
            if isinstance(outcome.error, NotKept):
                self.unknown.append(index)
            elif outcome.error is None:
                self.answers[index] = env.unpacked(outcome.value)
            elif isinstance(outcome.error, Exception):
                self.answers[index] = outcome.error
            else:  # SystemExit in an environment
                raise outcome.error

    def repeat(self) -> None:
        """Execute the jobs whose snapshot the worker did not keep once more, with its bytes."""
        for index in self.unknown:
            job = self.jobs[index]
            assert job.restore is not None
            self.worker.forget(job.restore[0])
            again = _Batch(self.worker, {index: job}, self.answers)
            again.post()
            again.collect()
            assert not again.unknown


def env_of(job: EnvJob) -> RemoteEnv:
    """The environment of a job."""
    assert isinstance(job.env, RemoteEnv)
    return job.env
