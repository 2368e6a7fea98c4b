"""Attempts to use more than the limits allow, or to take resources without limits from neighbours.

Memory and disk count as passed if they are still held, in a sandbox that still runs, seconds after more than the limit
was taken: some limits are only checked a few times a second.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from sandboxgym.attack.attempt import Attempt, NotApplicable, Observed, blocked, either, leaves_open, passed, unlimited
from sandboxgym.attack.inside.disk import WAYS
from sandboxgym.attack.inside.load import MEANS
from sandboxgym.attack.prober import ARCHIVE, FOLDER, SOURCES, Prober, ProberLost
from sandboxgym.attack.stage import FULL, MIB, Stage
from sandboxgym.sandbox.base import CONTROL, Capabilities, Limits, SandboxError
from sandboxgym.sandbox.sandbox import Sandbox

LIMITS_ATTEMPTS: list[Attempt] = []
_DISK, _MEMORY, _PROCESSES = 24, 64, 40
_LOOK_SECONDS = 2.0
"""Seconds after which a limit that is checked periodically has been checked, even on a busy machine."""


def _ended(sandbox: Sandbox, seconds: float) -> bool:
    """Tell whether a sandbox is ended within this many seconds."""
    deadline = time.monotonic() + seconds
    while sandbox.backend.live:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _why(sandbox: Sandbox) -> str:
    try:
        sandbox.run("true", timeout=5)
    except SandboxError as error:
        return f"{type(error).__name__}: {error}"[:160]
    return "it still runs"


# Memory


def _memory(how: str) -> Callable[[Stage], Observed]:
    def run(stage: Stage) -> Observed:
        megabytes = 160
        with stage.alone(memory=_MEMORY * MIB, processes=400) as prober:
            try:
                reply = prober.ask("take_memory", how=how, megabytes=megabytes, seconds=15)
            except ProberLost as lost:
                return blocked(f"the program was killed: {lost}"[:120])
            if reply.worked and not _ended(prober.sandbox, 0.5):
                return passed(f"{reply.detail}, {_MEMORY} are allowed")
            reply.need()
            return blocked(reply.detail if not reply.worked else _why(prober.sandbox))

    return run


for _how in MEANS:
    LIMITS_ATTEMPTS.append(
        Attempt(
            f"limits/memory-{_how.replace(':/', '-').replace('/', '-').replace('.', '')}",
            f"has more memory than the limit, by {_how}",
            _memory(_how),
            unlimited("memory"),
            tried_if_declared=False,
        )
    )

# Disk


def _disk(how: str, folder: str) -> Callable[[Stage], Observed]:
    def run(stage: Stage) -> Observed:
        with stage.alone(disk=_DISK * MIB, memory=256 * MIB) as prober:
            return _judge_disk(prober, "take_disk", {"how": how, "folder": folder, "megabytes": 96, "pause": 0.05})

    return run


def _judge_disk(prober: Prober, do: str, arguments: dict[str, object]) -> Observed:
    try:
        reply = prober.ask(do, seconds=20, **arguments)
    except ProberLost:
        if _ended(prober.sandbox, 1.0):
            return blocked(_why(prober.sandbox))
        raise
    reply.need()
    if not reply.worked:
        return blocked(reply.detail)
    if _ended(prober.sandbox, _LOOK_SECONDS):
        return blocked(_why(prober.sandbox))
    return passed(f"{reply.detail}, and the sandbox still runs")


for _folder in ("/root", "/dev/shm", CONTROL):
    for _how in WAYS if _folder != "/dev/shm" else ("plain", "deleted", "nameless"):
        LIMITS_ATTEMPTS.append(
            Attempt(
                f"limits/disk-{_how}{_folder.replace('/', '-').replace('.', '')}",
                f"has more bytes on the host's disk than the limit, {_how} in {_folder}",
                _disk(_how, _folder),
                unlimited("disk"),
                tried_if_declared=False,
                not_on=frozenset({FULL}) if _how not in ("plain", "deleted", "nameless") else frozenset(),
            )
        )


def _attributes(stage: Stage) -> Observed:
    with stage.alone(disk=_DISK * MIB) as prober:
        return _judge_disk(prober, "attributes", {"folder": "/root", "megabytes": 72})


LIMITS_ATTEMPTS.append(
    Attempt(
        "limits/disk-attributes",
        "has more bytes on the host's disk than the limit, in extended attributes",
        _attributes,
        unlimited("disk"),
        tried_if_declared=False,
    )
)


def _at_once(keep_size: bool) -> Callable[[Stage], Observed]:
    def run(stage: Stage) -> Observed:
        with stage.alone(disk=_DISK * MIB) as prober:
            try:
                reply = prober.ask("at_once", folder="/root", megabytes=192, keep_size=keep_size)
            except ProberLost:
                return passed("192 MiB by one call; the sandbox was ended after it")
            return reply.seen()

    return run


for _keep in (False, True):
    LIMITS_ATTEMPTS.append(
        Attempt(
            f"limits/disk-at-once{'-keep-size' if _keep else ''}",
            "takes many times the limit by one call, before anybody looks",
            _at_once(_keep),
            either(leaves_open("burst"), unlimited("disk")),
            tried_if_declared=False,
        )
    )


def _unlimited_files(capabilities: Capabilities) -> bool:
    """Tell whether this version has a limit of files that this backend does not enforce."""
    return "files" not in capabilities.limits and (
        "disk" not in capabilities.limits or any(field.name == "files" for field in fields(Limits))
    )


def _files(what: str) -> Callable[[Stage], Observed]:
    def run(stage: Stage) -> Observed:
        with stage.alone(disk=64 * MIB, files=2000) as prober:
            return _judge_disk(prober, "many_files", {"folder": "/root", "number": 4000, "what": what})

    return run


for _what in ("files", "directories", "links"):
    LIMITS_ATTEMPTS.append(
        Attempt(
            f"limits/entries-{_what}",
            f"makes any number of {_what}, until the host's disk has no room for another",
            _files(_what),
            _unlimited_files,
            tried_if_declared=False,
            not_on=frozenset({FULL}),
        )
    )


def _innocent(folder: str) -> Callable[[Stage], Observed]:
    """Run a neighbour that keeps to its limit, while another writes more than its own."""

    def run(stage: Stage) -> Observed:
        innocent = stage.sandbox(disk=_DISK * MIB)
        try:
            innocent.run("head -c 15000000 /dev/urandom > /root/mine")
            with stage.alone(disk=_DISK * MIB) as prober:
                seen = _judge_disk_quietly(prober, folder)
                time.sleep(0.3)
                if not innocent.backend.live:
                    return passed(f"the neighbour was ended: {_why(innocent)}")
                return blocked(f"the neighbour still runs ({seen})")
        finally:
            stage.drop(innocent)

    return run


def _judge_disk_quietly(prober: Prober, folder: str) -> str:
    try:
        arguments = {"how": "plain", "folder": folder, "megabytes": 72, "pause": 0.05}
        return prober.ask("take_disk", seconds=20, **arguments).detail
    except ProberLost:
        return "the attacker was ended"


for _folder in ("/root", CONTROL):
    LIMITS_ATTEMPTS.append(
        Attempt(
            f"limits/innocent{_folder.replace('/', '-').replace('.', '')}",
            f"has a neighbour ended for what it writes in {_folder}",
            _innocent(_folder),
        )
    )

# Processes


def _processes(how: str) -> Callable[[Stage], Observed]:
    def run(stage: Stage) -> Observed:
        with stage.alone(processes=_PROCESSES) as prober:
            try:
                reply = prober.ask("take_processes", how=how, at_most=120, seconds=10)
                outside = len(prober.sandbox.backend.processes())
            except (ProberLost, SandboxError) as error:
                return blocked(f"{type(error).__name__}: {error}"[:120])
            reply.need()
            most = max(int(reply.facts.get("had", 0)), outside)
            detail = f"{most} at one time, {_PROCESSES} are allowed"
            return passed(detail) if most > _PROCESSES + 4 else blocked(detail)

    return run


for _how in ("forks", "sessions", "zombies", "threads", "bomb"):
    LIMITS_ATTEMPTS.append(
        Attempt(
            f"limits/processes-{_how}",
            f"has more processes than the limit ({_how})",
            _processes(_how),
            unlimited("processes"),
            tried_if_declared=False,
        )
    )

# Time


def _alive(word: str) -> list[int]:
    """Find processes of the host with a word in their command lines."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # it ended
            continue
    return found


def _time(how: str, by: str) -> Callable[[Stage], Observed]:
    def run(stage: Stage) -> Observed:
        chain = "chain" in how
        sandbox = stage.prober().sandbox
        word = f"outlive-{how}-{by}-{stage.host.token}"
        command = f"cd {FOLDER} && exec 2>/dev/null; PYTHONPATH={ARCHIVE} python3 -m inside.load {how} {word}"
        if by == "execute":
            command = f"({command})"
        try:
            for _ in range(3 if chain else 1):
                began = time.monotonic()
                result = getattr(sandbox, by)(command, timeout=0.6)
                if time.monotonic() - began > 8:
                    return passed(f"the command took {time.monotonic() - began:.0f} s, 0.6 were allowed")
            deadline = time.monotonic() + (2.5 if chain else 0.4)
            while found := _alive(word):
                if time.monotonic() > deadline:
                    stage.forget()
                    return passed(f"{len(found)} processes of the command still run after its end")
                time.sleep(0.1)
        except SandboxError:
            stage.forget()
            raise
        return blocked(f"exit status {result.exit_code}, nothing of it is left")

    return run


for _how in (
    "chain",
    "wide-chain",
    "session",
    "double-fork",
    "stopped",
    "deaf",
    "clean-environment",
    "thread-leader",
    "many",
):
    for _by in ("execute", "run"):
        LIMITS_ATTEMPTS.append(
            Attempt(
                f"limits/time-{_how}-{_by}",
                f"still runs after the time limit ({_how}, started by {_by})",
                _time(_how, _by),
                unlimited("seconds"),
            )
        )

# What the kernel counts for each user, or for the machine


_ONE_MORE = """
import sys
sys.path.insert(0, sys.argv[1])
from inside import answers, shared
print("ready", flush=True)
sys.stdin.readline()
try:
    print(shared._one_more(sys.argv[2]).verdict, flush=True)
except (answers.AttemptAnswer, OSError) as error:
    print("none:", error, flush=True)
"""


def _exhaust(what: str, at_most: int, processes: int) -> Callable[[Stage], Observed]:
    def run(stage: Stage) -> Observed:
        neighbour = stage.prober("neighbour")
        probe = "one asynchronous I/O context" if "asynchronous" in what else what
        before = neighbour.ask("one_more", what=probe)
        if not before.worked:
            return blocked(f"no sandbox has any: {before.detail}")
        host = subprocess.Popen(
            [sys.executable, "-I", "-c", _ONE_MORE, str(SOURCES.parent), probe],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert host.stdin is not None and host.stdout is not None
        try:
            if host.stdout.readline() != "ready\n":
                raise NotApplicable("the host's own trial cannot be made")
            with stage.alone(memory=256 * MIB) as prober:
                try:
                    reply = prober.ask("exhaust", what=what, at_most=at_most, processes=processes, seconds=15)
                except ProberLost as lost:
                    return blocked(f"the attacker was ended: {lost}"[:120])
                after = neighbour.ask("one_more", what=probe)
                host.stdin.write("\n")
                host.stdin.flush()
                said = host.stdout.readline().strip()
            reply.need()
            if not after.worked:
                return passed(f"{reply.detail}; then a neighbour got none: {after.detail}")
            if said != "worked":
                return passed(f"{reply.detail}; then this user got none on the host: {said}")
            return blocked(f"{reply.detail}; the neighbour and the host got theirs")
        finally:
            host.kill()
            host.communicate()

    return run


for _what, _at_most, _number in (
    ("inotify instances", 300, 2),
    ("asynchronous I/O contexts", 200, 2),
    ("pseudo-terminals", 1200, 4),
    ("queued signals", 40000, 3),
    ("timers", 40000, 3),
    ("message queues", 30, 2),
    ("descriptors in flight", 150, 2),
    ("shared memory segments", 300, 1),
    ("pages in pipes", 40, 4),
):
    LIMITS_ATTEMPTS.append(
        Attempt(
            f"limits/share-{_what.replace(' ', '-').replace('/', '')}",
            f"takes all {_what}, so that a neighbour or the host has none",
            _exhaust(_what, _at_most, _number),
            leaves_open("quotas"),
            tried_if_declared=False,
        )
    )
