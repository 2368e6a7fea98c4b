"""Runner of every attempt against every backend of this machine, with several attacking programs side by side."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cache

from sandboxgym.attack.attempt import Attempt, AttemptOutcome, NotApplicable, Verdict
from sandboxgym.attack.docker_image import own_image
from sandboxgym.attack.prober import ProberLost
from sandboxgym.attack.report import AttackReport, machine_facts
from sandboxgym.attack.stage import FULL, Stage
from sandboxgym.sandbox.base import Capabilities, SandboxError, SandboxUnavailable
from sandboxgym.system import interpreter

BACKENDS = ("overlay", "overlay-rootless", FULL, "docker", "copy")
SHARED = "limits/share-*"
"""Attempts that take from every user of the machine: made last, when nothing else is running."""

PARTS = ("starvation.0", "starvation.1", "starvation.2", "limits", "leftovers", "escape")
"""Parts of the attempts, one per attacking program: a class, or every third attempt of the slowest class."""

Told = Callable[[AttemptOutcome], None]


@cache
def attempts() -> tuple[Attempt, ...]:
    """List every attempt, class by class."""
    from sandboxgym.attack import escape_kernel  # noqa: F401
    from sandboxgym.attack.escape import ESCAPES
    from sandboxgym.attack.leftovers import LEFTOVERS
    from sandboxgym.attack.limits import LIMITS_ATTEMPTS
    from sandboxgym.attack.starvation import STARVATIONS

    return (*ESCAPES, *LIMITS_ATTEMPTS, *STARVATIONS, *LEFTOVERS)


SAMPLE = "sample"
"""Name of a sample, in place of a pattern: all escapes, every second limit, every fourth of the slow rest."""
_EVERY = {"limits": 2, "starvation": 4, "leftovers": 4}


def matching(only: str) -> list[Attempt]:
    """List the attempts whose names match a pattern, or those of `SAMPLE`."""
    if only != SAMPLE:
        return [attempt for attempt in attempts() if fnmatch.fnmatchcase(attempt.name, only)]
    by_group: dict[str, list[Attempt]] = {}
    for attempt in attempts():
        by_group.setdefault(attempt.group, []).append(attempt)
    return [attempt for group, found in by_group.items() for attempt in found[:: _EVERY.get(group, 1)]]


def chosen(backend: str, only: str, part: str = "all") -> list[Attempt]:
    """Filter the attempts of `matching`: those of one of `PARTS`, ``"shared"`` or ``"all"``."""
    found = [attempt for attempt in matching(only) if attempt.made_on(backend)]
    if part == "all":
        return found
    if part == "shared":
        return [attempt for attempt in found if fnmatch.fnmatchcase(attempt.name, SHARED)]
    group, _, third = part.partition(".")
    mine = [a for a in found if a.group == group and not fnmatch.fnmatchcase(a.name, SHARED)]
    return mine[int(third) :: 3] if third else mine


def attack(
    backends: Sequence[str] = BACKENDS,
    *,
    only: str = "*",
    image: str | None = None,
    told: Told = lambda _: None,
    jobs: int | None = None,
) -> AttackReport:
    """Attack throw-away sandboxes of this machine.

    Args:
        backends: of `BACKENDS`.
        only: a pattern of names of attempts, as in a shell, ``"escape/device-*"``, or `SAMPLE`.
        image: for the docker backend, with bash and, for most attempts, Python 3; default: one made for this.
        told: called with each outcome when it is there.
        jobs: number of programs at a time; 1: in this process, one attempt after the other.

    Raises:
        ValueError: no such backend.
    """
    unknown = [name for name in backends if name not in BACKENDS]
    if unknown:
        raise ValueError(f"expected backends of {', '.join(BACKENDS)}, found {unknown[0]!r}")
    began = time.monotonic()
    outcomes: list[AttemptOutcome] = []
    unavailable: dict[str, str] = {}
    facts = machine_facts()
    lock = threading.Lock()

    def tell(outcome: AttemptOutcome) -> None:
        with lock:
            outcomes.append(outcome)
            told(outcome)

    with contextlib.ExitStack() as stack:
        wanted = list(dict.fromkeys(backends))
        if "docker" in wanted:
            try:
                facts["Docker"] = _daemon()
                image = image or stack.enter_context(own_image())
            except (SandboxUnavailable, ImportError) as error:
                unavailable["docker"] = str(error)
                wanted.remove("docker")
        if jobs == 1:
            for backend in wanted:
                try:
                    for outcome in attacked(backend, chosen(backend, only), image):
                        tell(outcome)
                except SandboxUnavailable as error:
                    unavailable[backend] = str(error)
        else:
            unavailable |= _side_by_side(wanted, only, image, tell, jobs or 4 * (os.cpu_count() or 1))
    order = {attempt.name: at for at, attempt in enumerate(attempts())}
    outcomes.sort(key=lambda outcome: (BACKENDS.index(outcome.backend), order[outcome.name]))
    return AttackReport(tuple(outcomes), unavailable, facts, time.monotonic() - began)


def _side_by_side(backends: Sequence[str], only: str, image: str | None, tell: Told, jobs: int) -> dict[str, str]:
    """Run the attacking programs side by side; returns the backends that are not available, with the reason."""
    # The longest first.
    parts = [(b, g) for g in PARTS for b in backends if chosen(b, only, g)]
    last = [(b, "shared") for b in backends if chosen(b, only, "shared")]
    with ThreadPoolExecutor(jobs) as pool:
        reasons = list(pool.map(lambda part: _worker(part[0], part[1], only, image, tell), parts))
    reasons += [_worker(part[0], part[1], only, image, tell) for part in last]
    return {backend: reason for (backend, _), reason in zip([*parts, *last], reasons, strict=True) if reason}


def _worker(backend: str, part: str, only: str, image: str | None, tell: Told) -> str:
    """Run an attacking program for a part of the attempts; returns why the backend is not available, if it is not."""
    waiting = {attempt.name: attempt for attempt in chosen(backend, only, part)}
    command = interpreter.module_command("sandboxgym.attack.attacker", backend, part, only, image or "")
    environment = interpreter.environment()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            content = json.loads(line)
            if "unavailable" in content:
                return str(content["unavailable"])
            outcome = AttemptOutcome(**content)
            del waiting[outcome.name]
            tell(outcome)
        process.wait()  # before its input is closed, which would end it while it clears up
    for attempt in waiting.values():
        detail = f"the program that makes the attempts ended with status {process.returncode}"
        tell(AttemptOutcome(backend, attempt.name, attempt.group, "not applicable", attempt.about, detail))
    return ""


def attacked(backend: str, some: Sequence[Attempt], image: str | None) -> Iterator[AttemptOutcome]:
    """Make attempts on one backend, in this process.

    Raises:
        SandboxUnavailable: it cannot run here.
    """
    if backend == "copy":
        for attempt in some:
            detail = "nothing is isolated: it was not tried"
            yield AttemptOutcome(backend, attempt.name, attempt.group, "declared", attempt.about, detail)
        return
    stage = Stage(backend, image=image)
    try:
        for attempt in some:
            yield made(attempt, stage)
    finally:
        stage.close()


def made(attempt: Attempt, stage: Stage) -> AttemptOutcome:
    """Make one attempt on one backend; returns its outcome."""
    began = time.monotonic()
    verdict, detail = _judged(attempt, stage, stage.capabilities)
    seconds = round(time.monotonic() - began, 2)
    return AttemptOutcome(stage.backend, attempt.name, attempt.group, verdict, attempt.about, detail, seconds)


def _judged(attempt: Attempt, stage: Stage, capabilities: Capabilities) -> tuple[Verdict, str]:
    declared = attempt.declared(capabilities)
    if declared and not attempt.tried_if_declared:
        return "declared", f"{capabilities.name} says so: it was not tried"
    try:
        seen = attempt.run(stage)
    except NotApplicable as error:
        return "not applicable", str(error)
    except (ProberLost, SandboxError, OSError) as error:
        for name in ("attacker", "neighbour"):
            stage.forget(name)
        return "not applicable", f"it could not be made: {type(error).__name__}: {error}"[:200]
    if not seen.passed:
        return "blocked", seen.detail
    return ("declared" if declared else "passed"), seen.detail


def _daemon() -> str:
    from sandboxgym.sandbox.docker.client import connect

    with contextlib.closing(connect()) as client:
        return str(client.version().get("Version", "of unknown version"))


def work(backend: str, part: str, only: str, image: str) -> None:
    """Run as an attacking program: one line of JSON per outcome."""
    assert part in (*PARTS, "shared")
    threading.Thread(target=_end_with_owner, daemon=True).start()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        for outcome in attacked(backend, chosen(backend, only, part), image or None):
            print(json.dumps(asdict(outcome)), file=out, flush=True)
    except SandboxUnavailable as error:
        print(json.dumps({"unavailable": str(error)}), file=out, flush=True)


def _end_with_owner() -> None:
    """End this program when the process that started it ends, however that was."""
    os.read(0, 1)
    os._exit(1)
