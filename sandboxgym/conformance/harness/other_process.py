"""Replays in other processes: another interpreter, hash seed, working directory and environment.

Jobs and answers are pickled files in a folder of this process; neither side reads pickles from anywhere else. The child
gets this process's import path and makes the environment by name.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandboxgym.conformance.subject import MakeSpec, Op, Outcome, Subject
from sandboxgym.conformance.supervision import scratch
from sandboxgym.system import interpreter
from sandboxgym.system.atomic import atomic_file

TIMEOUT = 120
"""Seconds that a child may take."""
_GLANCE = 0.002  # seconds between two tests whether the other side is there


class Unreachable(Exception):
    """Another process cannot make the environment or be sent the calls; the message says why."""


class Broken(Exception):
    """The child failed; the message has its traceback, or says that there was no answer."""


@dataclass(frozen=True)
class Job:
    """Calls for a new environment: ``ops`` after its spaces were seeded; first ``restored``, if given."""

    seed: int
    ops: tuple[Op, ...]
    restored: Any = None
    """A snapshot as made by `carried`."""
    points: tuple[int, ...] = ()
    """Numbers of calls after which a snapshot is saved, for `save`."""
    meeting: str = ""
    """Folder of `meet`, in which each call waits for the other side; if empty, no call waits."""


@dataclass(frozen=True)
class Child:
    """Settings in which the other process differs: hash seed, working directory, environment variables."""

    hash_seed: str = "0"
    folder: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


def run(
    subject: Subject, jobs: Sequence[Job], child: Child = Child(), *, separate: bool = False
) -> list[list[Outcome]]:
    """Run jobs in one child, or each in a new fork of it (``separate``), and return the outcomes of each job.

    If a job has a snapshot, its first outcome is that of ``restore``.

    Raises:
        Unreachable: the factory has no importable name, or a job cannot be pickled.
        Broken: something raised in the child, or it gave no answer.
    """
    return finish(start(subject, jobs, child, separate=separate))


Started = tuple["subprocess.Popen[bytes]", "tempfile.TemporaryDirectory[str]"]


def start(
    subject: Subject, jobs: Sequence[Job], child: Child, *, separate: bool = False, role: Sequence[str] = ()
) -> Started:
    """Start the child of `run`, whose outcomes `finish` returns; ``role`` selects another task of `main`.

    Raises:
        Unreachable: the factory has no importable name, or a job cannot be pickled.
    """
    if subject.make_spec is None:
        raise Unreachable("the factory has no importable name (give make_spec)")
    folder = scratch.folder()
    try:
        hooks = {name: getattr(subject, name) for name in ("normalize",) if getattr(subject, name) is not None}
        content = (subject.make_spec, registered(subject.make_spec), list(jobs), hooks, separate)
        Path(folder.name, "job").write_bytes(pickle.dumps(content))
    except Exception as error:
        folder.cleanup()
        raise Unreachable(f"the calls cannot be sent to another process: {error}") from error
    where = child.folder or os.getcwd()
    return popen([folder.name, *role], child.hash_seed, where, child.variables), folder


def popen(
    arguments: Sequence[str],
    hash_seed: str = "0",
    folder: str | None = None,
    variables: Mapping[str, str] | None = None,
    **options: Any,
) -> subprocess.Popen[bytes]:
    """Start a new interpreter that runs this module with this process's import path."""
    environment = {**interpreter.environment(), **(variables or {}), "PYTHONHASHSEED": hash_seed}
    command = interpreter.module_command("sandboxgym.conformance.harness.other_process", *arguments)
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL}
    return subprocess.Popen(command, env=environment, cwd=folder, **{**pipes, **options})


def finish(started: Started) -> list[list[Outcome]]:
    """Wait for the child of `start` and return the outcomes of its jobs; it raises as `run` does."""
    process, folder = started
    with folder:
        try:
            process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise Broken(f"no answer within {TIMEOUT} s") from None
        answer = Path(folder.name, "answer")
        if not answer.exists():
            raise Broken(f"the other process ended with status {process.returncode} and no answer")
        kind, content = pickle.loads(answer.read_bytes())
    return _answer(kind, content)


def abandon(started: Started) -> None:
    """End the child of `start` and discard its outcomes."""
    process, folder = started
    with folder:
        process.kill()
        process.wait()


def meet(meeting: str, number: int) -> None:
    """Report, in the child, that call ``number`` is next, and wait until it is allowed.

    Raises:
        TimeoutError: it is not allowed within `TIMEOUT` seconds.
    """
    Path(meeting, f"next-{number}").touch()
    limit = time.monotonic() + TIMEOUT
    while not Path(meeting, f"allowed-{number}").exists():
        if time.monotonic() > limit:
            raise TimeoutError(f"call {number} was not allowed within {TIMEOUT} s")
        time.sleep(_GLANCE)


def is_met(started: Started, meeting: str, number: int) -> bool:
    """Wait until the child is about to make a call; False if it ends before, or does not come to it."""
    limit = time.monotonic() + TIMEOUT
    while not Path(meeting, f"next-{number}").exists():
        if started[0].poll() is not None or time.monotonic() > limit:
            return False
        time.sleep(_GLANCE)
    return True


def allow(meeting: str, number: int) -> None:
    """Let the child make call ``number``, before which it waits."""
    Path(meeting, f"allowed-{number}").touch()


def _answer(kind: str, content: Any) -> list[Any]:
    if kind == "unreachable":
        raise Unreachable(content)
    if kind == "broken":
        raise Broken(content)
    return content  # type: ignore[no-any-return]


@contextlib.contextmanager
def saver(
    subject: Subject, jobs: Sequence[Job], folder: Path, *, closes: bool, stays: bool, variables: Mapping[str, str]
) -> Iterator[tuple[list[tuple[list[tuple[str, str, Any]], list[Outcome]]], Callable[[], None]]]:
    """Context of another process that plays jobs and saves their snapshots.

    It yields the saved snapshots and the outcomes of the calls, by job, and a function that kills the process.

    Args:
        subject: the subject, which is made anew in the process.
        jobs: jobs with the points of their snapshots. After the last point, two more calls of a job are made, so that
            its environment moves on.
        folder: folder for the files.
        closes: close the environments at the end.
        stays: the process lives until it is killed; else it ends before the context is entered.
        variables: environment variables of the process.

    Raises:
        Unreachable: the factory has no importable name, or snapshots cannot be carried over.
        Broken: something raised in the process, or it gave no answer.
    """
    role = ["save", str(folder), "closes" if closes else "", "stays" if stays else ""]
    process, place = start(subject, jobs, Child(variables=variables), role=role)
    answer = Path(place.name, "answer")

    def end() -> None:
        process.kill()
        process.wait()

    with place:
        try:
            limit = time.monotonic() + TIMEOUT
            while process.poll() is None and not (stays and answer.exists()):
                if time.monotonic() > limit:
                    raise Broken(f"no answer within {TIMEOUT} s")
                time.sleep(0.02)
            if not answer.exists():
                raise Broken(f"the other process ended with status {process.returncode} and no answer")
            yield _answer(*pickle.loads(answer.read_bytes())), end
        finally:
            end()


def registered(spec: MakeSpec) -> Any:
    """Registration of an id, for a process in which it is missing; None for factories."""
    import gymnasium as gym

    return gym.registry.get(spec.target) if spec.is_id else None


def stateless(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Outcomes without the states of `Subject.observe_state`, a hook that other processes do not have."""
    return [outcome._replace(state=None) for outcome in outcomes]


# How a snapshot travels.


def carried(snap: Any, folder: str | Path, name: str) -> tuple[str, str, Any]:
    """A snapshot in transit: by its ``save`` and ``load``, else by ``to_bytes`` and ``from_bytes``, else pickled.

    Raises:
        Unreachable: none of these works; the message says why.
    """
    kind = type(snap)
    reasons = []
    if callable(getattr(snap, "save", None)) and callable(getattr(kind, "load", None)):
        path = Path(folder, name)
        try:
            snap.save(path)
            return ("load", f"{kind.__module__}:{kind.__qualname__}", str(path))
        except Exception as error:
            reasons.append(f"save(): {error}")
    if callable(getattr(snap, "to_bytes", None)) and callable(getattr(kind, "from_bytes", None)):
        try:
            return ("from_bytes", f"{kind.__module__}:{kind.__qualname__}", snap.to_bytes())
        except Exception as error:
            reasons.append(f"to_bytes(): {error}")
    try:
        return ("pickle", "", pickle.dumps(snap))
    except Exception as error:
        reasons.append(f"pickle: {error}")
    raise Unreachable("; ".join(reasons))


def pickled(snap: Any) -> tuple[str, str, Any] | None:
    """A snapshot in transit as a pickle, as pools of workers send it; None if it cannot be pickled."""
    try:
        return ("pickle", "", pickle.dumps(snap))
    except Exception:
        return None


def arrived(parcel: tuple[str, str, Any]) -> Any:
    """The snapshot in a parcel of `carried`."""
    way, kind, content = parcel
    if way == "pickle":
        return pickle.loads(content)
    module, _, name = kind.partition(":")
    target: Any = importlib.import_module(module)
    for part in name.split("."):
        target = getattr(target, part)
    return getattr(target, way)(content)


# The child.


def main(arguments: Sequence[str]) -> None:
    """Entry point of the child: do the job in a folder."""
    folder = Path(arguments[0])
    if len(arguments) > 1 and arguments[1] == "hold":
        hold(folder)
        return
    answer: tuple[str, Any]
    kept: list[Any] = []
    try:
        spec, registration, jobs, hooks, separate = pickle.loads((folder / "job").read_bytes())
        subject = subject_of(spec, registration, hooks)
        if arguments[1:2] == ["save"]:
            answer = ("saved", [_save(subject, job, Path(arguments[2]), kept) for job in jobs])
        else:
            found = [_in_fork(subject, job) if separate else list(_outcomes(subject, job)) for job in jobs]
            answer = ("outcomes", found)
    except Unreachable as error:
        answer = ("unreachable", str(error))
    except Exception:
        answer = ("broken", traceback.format_exc()[-4000:])
    with atomic_file(folder / "answer", durable=False) as part:
        part.write_bytes(pickle.dumps(answer))
        if "closes" in arguments[3:]:
            for env in kept:
                env.close()
    if "stays" in arguments[3:]:
        time.sleep(TIMEOUT)


def _save(
    subject: Subject, job: Job, folder: Path, kept: list[Any]
) -> tuple[list[tuple[str, str, Any]], list[Outcome]]:
    """Play a job in an environment that is kept, with snapshots saved on the way."""
    from sandboxgym.conformance.harness.scenario import quiet, seed_spaces
    from sandboxgym.conformance.subject import snapshot

    with quiet():
        env = subject.make_env()
        kept.append(env)
        seed_spaces(env, job.seed)
        parcels, outcomes = [], []
        for count, op in enumerate(job.ops[: max(job.points) + 2], start=1):
            outcomes.append(subject.call(env, op)[0])
            if count in job.points:
                parcels.append(carried(snapshot(env), folder, f"saved-{len(kept)}-{count}"))
        return parcels, outcomes


def _in_fork(subject: Subject, job: Job) -> list[Outcome]:
    if not hasattr(os, "fork"):
        raise Unreachable("this platform cannot fork a process")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        answer: tuple[str, Any]
        try:
            os.close(reading)
            try:
                answer = ("outcomes", list(_outcomes(subject, job)))
            except Exception:
                answer = ("unreachable", f"it fails in a forked process: {traceback.format_exc()[-4000:]}")
            with os.fdopen(writing, "wb") as pipe:
                pickle.dump(answer, pipe)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        content = pipe.read()
    os.waitpid(child, 0)
    if not content:
        raise Unreachable("the environment does not work in a forked process")
    return _answer(*pickle.loads(content))


def subject_of(spec: MakeSpec, registration: Any, hooks: Mapping[str, Any]) -> Subject:
    """The subject, made by name."""
    import gymnasium as gym

    try:
        if registration is not None and spec.target not in gym.registry:
            gym.registry[spec.target] = registration
        return Subject(spec.factory(), name=spec.target, make_spec=spec, **hooks)
    except Exception as error:
        raise Unreachable(f"{type(error).__name__}: {error}") from error


def _outcomes(subject: Subject, job: Job) -> Iterator[Outcome]:
    from sandboxgym.conformance.harness.scenario import opened, seed_spaces
    from sandboxgym.conformance.subject import restore

    with opened(subject) as env:
        seed_spaces(env, job.seed)
        if job.restored is not None:
            observation, info = restore(env, arrived(job.restored))
            yield subject.outcome(env, observation, 0.0, False, False, info)
        for number, op in enumerate(job.ops):
            if job.meeting:
                meet(job.meeting, number)
            yield subject.call(env, op)[0]


def hold(folder: Path) -> None:
    """Make an environment, snapshots and forks, report that, and wait to be killed; or close all and end."""
    spec, registration, jobs, hooks, _ = pickle.loads((folder / "job").read_bytes())
    from sandboxgym.conformance.subject import fork, snapshot

    try:
        subject = subject_of(spec, registration, hooks)
        env = subject.make_env()
        for op in jobs[0].ops:
            subject.call(env, copy.deepcopy(op))
        if (folder / "brief").exists():
            env.close()
            (folder / "ready").write_text("ready")
            return
        snaps = [snapshot(env)]
        children = fork(env, 2)
        for child in children:
            subject.call(child, jobs[0].ops[-1] if jobs[0].ops[-1].kind == "step" else jobs[0].ops[0])
            snaps.append(snapshot(child))
        (folder / "ready").write_text("ready")
    except BaseException:
        (folder / "failed").write_text(traceback.format_exc()[-2000:])
        return
    with contextlib.suppress(KeyboardInterrupt):
        time.sleep(TIMEOUT)


if __name__ == "__main__":
    main(sys.argv[1:])
