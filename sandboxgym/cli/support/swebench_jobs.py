"""Jobs on rows in several processes: each worker is an interpreter of its own that takes one row after the other.

1. A row that fails is one answer with an error; a worker that dies costs its present row, and another one continues.
2. An interruption ends the workers properly, so that they remove their sandboxes; one that does not end is killed.
3. A worker whose owner is gone, however it ended, is interrupted in the same way.
4. Rows go to a worker, and answers come back, as lines of JSON.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from types import FrameType
from typing import IO, Any, NoReturn

from sandboxgym.system import interpreter, run_directories

_PATIENCE = 60.0
"""Seconds that an interrupted worker has to clean up."""


@dataclass(frozen=True, slots=True)
class EvaluationJob:
    """Job to be done with each row."""

    work: str
    """Kind of work, ``"prepare"`` or ``"check"``."""
    dataset: str
    backend: str = "auto"
    image: str | None = None
    network: bool = False
    allow_unsafe: bool = False
    repeat: int = 1
    timeout: float = 1800.0


@dataclass(frozen=True, slots=True)
class JobAnswer:
    """Result of a job on a row."""

    instance_id: str
    result: dict[str, Any]
    """Result; empty if the job failed."""
    error: str = ""
    notes: tuple[str, ...] = ()
    """Warnings that were logged meanwhile."""


def carry_out(job: EvaluationJob, rows: Sequence[str], *, jobs: int) -> Iterator[JobAnswer]:
    """Work on rows; answers come in the order in which they are done."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for row in rows:
        waiting.put(row)
    answers: queue.SimpleQueue[JobAnswer | BaseException] = queue.SimpleQueue()
    workers = [_Worker(job, waiting, answers) for _ in range(max(1, min(jobs, len(rows))))]
    try:
        for worker in workers:
            worker.thread.start()
        for _ in rows:
            answer = answers.get()
            if isinstance(answer, BaseException):
                raise answer
            yield answer
    finally:
        for worker in workers:
            worker.stop()
        for worker in workers:
            worker.end()
        run_directories.reap()  # of those that were killed, or interrupted before they had noted what they made


class _Worker:
    """A thread that hands rows to a process of its own."""

    def __init__(
        self,
        job: EvaluationJob,
        waiting: queue.SimpleQueue[str],
        answers: queue.SimpleQueue[JobAnswer | BaseException],
    ) -> None:
        self.job, self.waiting, self.answers = job, waiting, answers
        self.thread = threading.Thread(target=self._run, daemon=True)
        self._lock = threading.Lock()
        self._stopped = False
        self._process: subprocess.Popen[str] | None = None

    def stop(self) -> None:
        """Ask the process to end at once, but with its cleanup."""
        with self._lock:
            self._stopped = True
            if self._process is not None and self._process.poll() is None:
                self._process.send_signal(signal.SIGINT)

    def end(self) -> None:
        """Wait some seconds for the worker's end."""
        process = self._process
        if process is not None:
            try:
                process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self.thread.ident is not None:
            self.thread.join(_PATIENCE)

    def _run(self) -> None:
        try:
            with tempfile.TemporaryFile("w+") as said:
                while not self._stopped:
                    try:
                        row = self.waiting.get_nowait()
                    except queue.Empty:
                        break
                    self.answers.put(self._asked(row, said))
                self._let_go()
        except BaseException as error:  # or the caller waits for ever
            self.answers.put(error)

    def _asked(self, row: str, said: IO[str]) -> JobAnswer:
        with self._lock:
            if self._stopped:
                return JobAnswer(row, {}, "interrupted")
            if self._process is None:
                self._process = _start(self.job, said)
            process = self._process
        assert process.stdin is not None and process.stdout is not None
        line = ""
        with contextlib.suppress(OSError):
            process.stdin.write(json.dumps(row) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        if line:
            answer = json.loads(line)
            return JobAnswer(row, answer["result"], answer["error"], tuple(answer["notes"]))
        status = process.wait()
        self._process = None
        said.seek(0)
        last = said.read().strip().rpartition("\n")[2]
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return JobAnswer(row, {}, f"its worker {how}: {last}" if last else f"its worker {how}")

    def _let_go(self) -> None:
        process = self._process
        if process is not None:
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                with contextlib.suppress(OSError):
                    stream.close()
            process.wait()


def _start(job: EvaluationJob, said: IO[str]) -> subprocess.Popen[str]:
    code = "from sandboxgym.cli.support import swebench_jobs; swebench_jobs.serve()"
    # In a session of its own: the owner alone is interrupted by the terminal.
    return subprocess.Popen(
        interpreter.command(code, json.dumps(asdict(job))),
        env=interpreter.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=said,
        text=True,
        start_new_session=True,
    )


# In a worker.


class _Notes(logging.Handler):
    """Log handler that keeps warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.kept: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one warning."""
        self.kept.append(record.getMessage())


def serve() -> None:
    """Serve the owner until it closes its end."""
    job = EvaluationJob(**json.loads(sys.argv[1]))
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    notes = _Notes()
    logging.getLogger("sandboxgym").addHandler(notes)
    busy = threading.Event()
    signal.signal(signal.SIGINT, _interrupted)
    threading.Thread(target=_follow_owner, args=(busy,), daemon=True).start()
    try:
        for line in sys.stdin:
            row = json.loads(line)
            notes.kept.clear()
            answer: dict[str, Any] = {"result": {}, "error": ""}
            busy.set()
            try:
                answer["result"] = _work(job, row)
            except Exception as error:  # of any type, in a row's data or its tests: the other rows are worked on
                answer["error"] = f"{error}" if str(error) else type(error).__name__
            busy.clear()
            out.write(json.dumps({**answer, "notes": notes.kept}) + "\n")
            out.flush()
    except (KeyboardInterrupt, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
        sys.exit(130)


def _interrupted(number: int, frame: FrameType | None) -> NoReturn:
    """Begin to clean up. A second interruption, by an owner that ends meanwhile, say, must not cut that short."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _follow_owner(busy: threading.Event) -> None:
    """Interrupt this process when no one holds the other end of its input any more, while it works on a row."""
    owner = select.poll()
    owner.register(0, 0)  # of its end there is always word
    owner.poll()
    if busy.is_set():
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)  # to that thread: it may wait for something


def _work(job: EvaluationJob, row: str) -> dict[str, Any]:
    from sandboxgym.envs.swebench.rows.tasks import open_tasks
    from sandboxgym.envs.swebench.workspaces.workspace import WorkspaceSettings, forget_prepared, pristine

    settings = WorkspaceSettings(
        backend=job.backend, image=job.image, network=job.network, allow_unsafe=job.allow_unsafe
    )
    (task,) = open_tasks(job.dataset, instances=[row])
    if job.work == "prepare":
        try:
            start = pristine(task, settings, verify=True)
            return {"already": not start.made, "nbytes": start.snapshot.nbytes}
        finally:
            forget_prepared()  # who holds none prevents no eviction
    from sandboxgym.envs.swebench.rows import checking

    try:
        return asdict(checking.check(task, settings, repeat=job.repeat, timeout=job.timeout))
    finally:
        forget_prepared()
