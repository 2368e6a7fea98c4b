"""Level 4: declared limits of a sandbox, tested with commands that try to exceed them.

The commands are defined in ``attacks.py``. A limit that is not declared (`Subject.limits`), or is larger than a check
can try in seconds, is skipped with the reason.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from sandboxgym.conformance.check import Budget, Failed, Skipped, check
from sandboxgym.conformance.sandbox_probes import attacks
from sandboxgym.conformance.sandbox_probes import places as place_probes
from sandboxgym.conformance.sandbox_probes.places import Place
from sandboxgym.conformance.sandbox_probes.shell import located
from sandboxgym.conformance.sandbox_probes.yard import Untyped, yard_of
from sandboxgym.conformance.subject import AnyEnv, Subject

_SETTLE = 2.0
"""Seconds for a sandbox to notice the writes."""
_ROUNDS = 3
"""Repetitions, since a chain of forks may be caught by chance."""


@check(
    "hostile.disk",
    level=4,
    after=("api.protocol",),
    hazard="The disk limit misses deleted open files, files that never had a name, deep directories or millions of "
    "small files: they fill the machine's disk, and then an innocent sandbox is ended for it.",
    blind="Limits that are not declared (Subject.limits), or outside the range that is tried; what a file system keeps "
    "for itself. Without Subject.shell, everything.",
)
def disk(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Writes two and a half times the declared disk limit in several ways, each in a new environment.
    Meanwhile a neighbouring sandbox holds a file of 60 % of its own limit. Fails if more than one and a half times the
    limit is still there up to two seconds later, if the neighbour or its file is gone, or if a sandbox raises one of
    Python's exception types instead of its own. If a limit on the number of files is declared, does the same with twice
    as many empty files.
    """
    with yard_of(subject) as yard:
        neighbour = yard.opened(seed=5)
        declared = yard.declared(neighbour)
        limit, files = declared.get("disk"), declared.get("files")
        _tried(limit, "disk", attacks.SMALLEST, attacks.LARGEST, "bytes")
        assert limit is not None
        settle = min(_SETTLE, (declared.get("seconds") or 60.0) / 8)
        size = int(limit * 0.6) >> 20
        made = 'cd "$B" && dd if=/dev/zero of=own bs=1048576 count=%d 2>/dev/null; cd "$OLDPWD"; wc -c < "$B/own"'
        if yard.type(neighbour, located(made % size)).split()[-1:] != [str(size << 20)]:
            raise Failed(f"a sandbox cannot have {size} MiB though its limit is {limit:.0f} bytes")
        rows: list[dict[str, Any]] = []
        wrong: list[str] = []

        def attacked(way: str, command: Callable[[AnyEnv], str], most: float, unit: str) -> None:
            env = yard.opened(seed=6)
            said: list[str] = []
            try:
                refused = yard.refused(lambda: said.append(attacks.told(yard.type(env, command(env)))))
            except Untyped as error:
                refused = str(error)
                wrong.append(f"{way}: {error}")
            number, _, where = (said or [""])[0].partition(" ")
            reached = int(number) if number.isdigit() else None
            passed = reached is not None and reached > most
            if passed:
                wrong.append(f"{way}: {reached} {unit} where {most / 1.5:.0f} are allowed{f' ({where})' * bool(where)}")
            held = "absent" if number == "absent" else "passed" if passed else "held"
            rows.append({"probe": way, "measured": held, "reached": reached, "refused": refused})
            with contextlib.suppress(Exception):
                yard.type(env, located('rm -rf "$B/h"'))
            with contextlib.suppress(Exception):
                yard.scene.close(env)
            seen: list[str] = []
            with contextlib.suppress(Exception):
                seen = yard.type(neighbour, located('wc -c < "$B/own"')).split()[-1:]
            if seen != [str(size << 20)] and not any("neighbour" in one for one in wrong):
                wrong.append(f"{way}: the neighbour, which keeps within its limit, is gone")

        mib = limit / attacks.MIB * 1.5
        for way in attacks.WRITING:
            attacked(way, lambda env, way=way: attacks.writing(way, int(limit), settle=settle), mib, "MiB")  # type: ignore[misc]
        mounts: list[Place] = []

        def other_mounts(env: AnyEnv) -> str:
            ask, token = yard.asks(env), yard.token
            with place_probes.own_folders() as folders:
                shared = place_probes.shares_files(ask, folders)
            found = place_probes.walk(ask, token, "before", shared=shared)
            place_probes.remove(ask, found, token)
            mounts[:] = [place for place in found if place.disk and not place.own and not shared][:4]
            if not mounts:
                return "echo '@@absent@@'"
            return attacks.elsewhere(mounts, token, int(limit), settle=settle)

        attacked("other mounts", other_mounts, mib, "MiB")
        if files is not None and files <= attacks.MOST_FILES:
            command = attacks.counting(int(files), settle=settle)
            attacked("empty files", lambda env: command, 1.5 * files, "files")
        evidence = {"limit": limit, "files": files, "other mounts": [p.path for p in mounts], "matrix": rows}
        if wrong:
            raise Failed("; ".join(wrong), evidence)
    return evidence


def _tried(value: float | None, name: str, least: float, most: float, unit: str) -> None:
    if value is None:
        raise Skipped(f"no limit is declared: Subject.limits gives {name!r} of an environment")
    if not least <= value <= most:
        raise Skipped(
            f"the limit {name!r} is {value:.0f} {unit}; {least:.0f} to {most:.0f} are tried: make the environment with "
            "such a one"
        )


@check(
    "hostile.time_limit",
    level=4,
    after=("api.protocol",),
    hazard="Processes outlive the time limit of the command that started them: they write during the next command, and "
    "use the machine's processors for the rest of the night.",
    blind="Limits that are not declared (Subject.limits), or are longer than is tried; chains of forks that the "
    "sandbox caught only by chance. Without Subject.shell, everything.",
)
def time_limit(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Runs, three times, a command that starts processes and then waits for longer than its time limit.
    The processes leave its group, session and parents, ignore signals, are stopped, clear their environment variables,
    or fork in chains. Fails if the sandbox waits for the command to end, or if one of them is alive when the next
    command looks; a sandbox that ended with an exception of its own passes.
    """
    with yard_of(subject) as yard:
        env = yard.opened()
        limit = yard.declared(env).get("seconds")
        _tried(limit, "seconds", 0.0, attacks.LONGEST, "seconds")
        assert limit is not None
        alive: dict[str, int] = {}
        taken: list[float] = []
        ended = ""
        for number in range(_ROUNDS):
            token = f"{yard.token}{number}"
            try:
                begin = time.perf_counter()
                said: list[str] = []
                refused = yard.refused(lambda: said.append(yard.type(env, attacks.outliving(token, limit))))  # noqa: B023
                taken.append(round(time.perf_counter() - begin, 2))
                if said and attacks.told(said[0]) == "outlived":
                    raise Failed(
                        f"a command was waited for that took {taken[-1]:.0f} s; it may take {limit:g}",
                        {"seconds": taken},
                    )
                looked: list[str] = []
                ended = refused or yard.refused(lambda: looked.append(yard.type(env, attacks.survived(token))))  # noqa: B023
                for way in attacks.survivors(looked[0]) if looked else ():
                    alive[way] = alive.get(way, 0) + 1
                if not ended:
                    yard.type(env, attacks.ended(token))
            except Untyped as error:
                raise Failed(f"after a command's time was up: {error}", {"seconds": taken}) from error
            finally:
                attacks.end_visible(token)
            if ended:  # another one for the next round
                yard.scene.close(env)
                env = yard.opened()
        evidence = {
            "limit": limit,
            "seconds": taken,
            "ended": ended,
            "matrix": [
                {"probe": way, "measured": "outlived" if way in alive else "ended", "of rounds": alive.get(way, 0)}
                for way in attacks.SURVIVORS
            ],
        }
        if alive:
            told = ", ".join(f"{way} ({count} of {_ROUNDS})" for way, count in alive.items())
            raise Failed(f"processes outlive the time limit of {limit:g} s: {told}", evidence)
    return evidence
