"""Attempts to leave traces: in the sandbox after a restore, in a sibling or neighbour, on the host after the end.

Marks are left in every place that the program inside can write to. After the end of a sandbox, or of its owner by
SIGKILL, the host is searched: processes, mounts, control groups, run directories, containers.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sandboxgym.attack.attempt import Attempt, NotApplicable, Observed, blocked, passed
from sandboxgym.attack.limits import _alive
from sandboxgym.attack.prober import Prober
from sandboxgym.attack.stage import MIB, OwnerProcess, Stage
from sandboxgym.attack.starvation import clear, run_directories
from sandboxgym.sandbox.base import CONTROL, SandboxError
from sandboxgym.sandbox.layers.disk import remove_directories
from sandboxgym.sandbox.sandbox import Sandbox
from sandboxgym.sandbox.snapshot import SandboxSnapshot
from sandboxgym.system import run_directories as leftovers

LEFTOVERS: list[Attempt] = []
_PLACES = (
    "/",
    "/root",
    "/tmp",
    "/var/tmp",
    "/run",
    "/etc",
    "/dev",
    "/dev/shm",
    "/dev/pts",
    "/dev/mqueue",
    CONTROL,
    "elsewhere",
)
_ENDS = {
    "restore": "the same sandbox after a restore",
    "reset": "the same sandbox after a restore of its beginning",
    "sibling": "another child of the same fork",
    "neighbour": "another sandbox",
}
_GONE_SECONDS = 15.0
_DEEP = 'python3 -c \'import os\nfor _ in range(3000): os.mkdir("d"); os.chdir("d")\''
_LONG = "n=$(printf 'd%.0s' {1..200}); for i in {1..40}; do mkdir $n; cd -P $n; done"


# Marks


def _marked(sandbox: Sandbox, mark: str) -> list[str]:
    """Leave a mark in every possible place; returns the places."""
    prober = Prober(sandbox)
    try:
        found = prober.ask("mark", mark=mark, seconds=20)
        found.need()
        return [str(place) for place in found.facts["places"]]
    finally:
        prober.close()


def _found(sandbox: Sandbox, mark: str, places: list[str]) -> list[str]:
    prober = Prober(sandbox)
    try:
        found = prober.ask("find_mark", mark=mark, places=places, seconds=20)
        found.need()
        return [str(place) for place in found.facts["places"]]
    finally:
        prober.close()


def _search(stage: Stage, end: str) -> tuple[list[str], list[str]]:
    """Search for marks; returns the places where they could be left, and those where they were found."""
    known = stage.notes.get(f"marks-{end}")
    if known is None:
        mark = f"attack-mark-{secrets.token_hex(6)}"
        sandbox = stage.sandbox(disk=64 * MIB, memory=256 * MIB)
        others: list[Sandbox] = []
        try:
            snapshot = sandbox.snapshot()
            if end == "restore":
                sandbox.run("echo more > /root/more")
                snapshot.release()
                snapshot = sandbox.snapshot()
            if end == "sibling":
                others = sandbox.fork(2)
                left = _marked(others[0], mark)
                again = sorted({*_found(others[1], mark, left), *_found(sandbox, mark, left)})
            else:
                left = _marked(sandbox, mark)
                if end == "neighbour":
                    others = [stage.sandbox(disk=64 * MIB, memory=256 * MIB)]
                    again = _found(others[0], mark, left)
                else:
                    again = _restored(sandbox, snapshot, mark, left)
            snapshot.release()
        finally:
            for other in others:
                other.close()
            stage.drop(sandbox)
        known = stage.notes[f"marks-{end}"] = (left, again)
    return known  # type: ignore[no-any-return]


def _restored(sandbox: Sandbox, snapshot: SandboxSnapshot, mark: str, left: list[str]) -> list[str]:
    try:
        sandbox.restore(snapshot)
    except SandboxError:
        raise
    except Exception as error:  # untyped: the marks themselves are in its way, and for good
        name = type(error).__name__
        return [path + f" (the restore failed: {name})" for path in left if os.path.dirname(path) == CONTROL]
    return _found(sandbox, mark, left)


def _of(place: str, paths: list[str]) -> list[str]:
    """Choose the paths that are in a place and in none below it."""
    named = [name for name in _PLACES if name != "elsewhere"]
    best = {path: max((n for n in named if _within(path, n)), key=len) for path in paths}
    if place == "elsewhere":
        return [path for path in paths if best[path] == "/" and os.path.dirname(path) != "/"]
    return [path for path in paths if best[path] == place and (place != "/" or os.path.dirname(path) == "/")]


def _within(path: str, place: str) -> bool:
    return path.startswith(place.rstrip("/") + "/")


def _mark(place: str, end: str) -> Callable[[Stage], Observed]:
    def run(stage: Stage) -> Observed:
        left, again = _search(stage, end)
        mine, back = _of(place, left), _of(place, again)
        if back:
            return passed(f"{len(back)} of {len(mine)} marks were found again: {', '.join(back[:3])}")
        if not mine:
            raise NotApplicable(f"nothing can be written there: {place}")
        return blocked(f"none of {len(mine)} marks was found again")

    return run


for _end, _words in _ENDS.items():
    for _place in _PLACES:
        LEFTOVERS.append(
            Attempt(
                f"leftovers/{_end}-{_place.strip('/').replace('/', '-').replace('.', '') or 'root-directory'}",
                f"leaves a file ({_place}) for {_words}",
                _mark(_place, _end),
            )
        )

# State that is no file

_STATE = {
    "process": ("(exec -a left-{w} sleep 500) &", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"),
    "session": ("setsid -f bash -c 'exec -a left-{w} sleep 500'", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"),
    "variable": ("export LEFT=left-{w}", "echo $LEFT"),
    "function": ("f() {{ echo left-{w}; }}", "f"),
    "directory": ("mkdir -p /tmp/left-{w}; cd /tmp/left-{w}", "pwd"),
    "changed-file": ("echo left-{w} >> /etc/passwd", "cat /etc/passwd"),
    "profile": (
        "echo 'echo left-{w}' | tee /root/.bashrc /root/.bash_profile /etc/profile /etc/bash.bashrc",
        "cat /root/.bashrc",
    ),
    "deleted-file": ("rm -f /etc/passwd", "test -e /etc/passwd || echo left-{w}"),
    "mode": ("chmod 4755 /etc/passwd", "test -u /etc/passwd && echo left-{w}"),
    "attribute": (
        'python3 -c \'import os; os.setxattr("/etc/passwd", "user.left", b"left-{w}")\'',
        'python3 -c \'import os; print(os.getxattr("/etc/passwd", "user.left"))\'',
    ),
    "hidden-folder": ("mkdir -p /etc/new && mv /etc/passwd /etc/new/left-{w}", "ls /etc/new"),
    "trap": ("trap 'echo left-{w}' DEBUG", "true"),
    "alias": ("shopt -s expand_aliases; alias true='echo left-{w}'", "true"),
    "history": ("history -s left-{w}", "history"),
    "limit": ("ulimit -n 77", "test $(ulimit -n) = 77 && echo left-{w}"),
    "host-name": ("hostname left-{w}", "hostname; cat /proc/sys/kernel/hostname"),
    "program": (
        "printf '#!/bin/sh\\necho left-{w}' > /tmp/ls; chmod +x /tmp/ls; hash -p /tmp/ls ls",
        "ls",
    ),
}


def _state(kind: str) -> Callable[[Stage], Observed]:
    def run(stage: Stage) -> Observed:
        key = "left-state"
        sandbox: Sandbox | None = stage.notes.get(key)
        if sandbox is None or sandbox.closed:
            sandbox = stage.notes[key] = stage.sandbox(disk=64 * MIB)
            sandbox.execute("true", timeout=10)
            stage.notes["left-snapshot"] = sandbox.snapshot()
        word = secrets.token_hex(6)
        leave, look = (text.format(w=word) for text in _STATE[kind])
        sandbox.execute(leave, timeout=8)
        before = sandbox.execute(look, timeout=8).output
        sandbox.restore(stage.notes["left-snapshot"])
        after = sandbox.execute(look, timeout=8).output
        if f"left-{word}" in after:
            return passed("it is there after a restore")
        if f"left-{word}" not in before:
            raise NotApplicable(f"it cannot be left here: {before.strip()[-80:]!r}")
        return blocked("it is gone after a restore")

    return run


for _kind in _STATE:
    LEFTOVERS.append(
        Attempt(
            f"leftovers/state-{_kind}",
            f"leaves a {_kind.replace('-', ' ')} for the time after a restore",
            _state(_kind),
        )
    )

# After the end


_HOSTILE = {
    "plain": "echo x > /root/x",
    "processes": "for i in {{1..20}}; do setsid -f bash -c 'exec -a {w} sleep 500'; done",
    "stopped": "for i in {{1..5}}; do setsid -f bash -c 'exec -a {w} sleep 500'; done; sleep 0.2; pkill -STOP sleep || kill -STOP -1",  # noqa: E501
    "deep": f"cd /root; {_DEEP.replace('{', '{{').replace('}', '}}')}",
    "long": f"cd /root; {_LONG.replace('{', '{{').replace('}', '}}')}",
    "deep-control": f"cd {CONTROL}; {_DEEP.replace('{', '{{').replace('}', '}}')}",
    "long-control": f"cd {CONTROL}; {_LONG.replace('{', '{{').replace('}', '}}')}",
    "closed": f"mkdir -p /root/c/d {CONTROL}/c/d; touch /root/c/d/x {CONTROL}/c/d/x; chmod -R 0 /root/c {CONTROL}/c",
    "other-user": f"mkdir -p /root/o {CONTROL}/o; touch /root/o/x {CONTROL}/o/x; chown -R 1234:1234 /root/o {CONTROL}/o; chmod 1777 /root/o",  # noqa: E501
    "special": f"cd {CONTROL}; mkfifo p; ln -s / l; ln -s l m; touch $'a\\nb' $'\\xff'; cd /root; mkfifo p; ln -s / l",
    "files": f"cd {CONTROL}; for i in {{{{1..1500}}}}; do : > f$i; done; cd /root; for i in {{{{1..1500}}}}; do : > f$i; done",  # noqa: E501
}


def _attack(sandbox: Sandbox, kind: str, word: str) -> None:
    with contextlib.suppress(SandboxError):
        sandbox.execute(_HOSTILE[kind].format(w=word), timeout=15)


def _groups(directories: list[Path]) -> list[str]:
    found = []
    for directory in directories:
        with contextlib.suppress(OSError):
            found += (directory / "groups").read_text().split("\n")
    return [path for path in found if path]


def _mounted(names: list[str]) -> list[str]:
    with open("/proc/self/mountinfo") as file:
        return [line.split()[4] for line in file if any(name in line for name in names)]


def _until(gone: Callable[[], list[Any]], seconds: float) -> list[Any]:
    deadline = time.monotonic() + seconds
    while (left := gone()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _containers(names: list[str]) -> list[str]:
    from sandboxgym.sandbox.docker.client import connect

    with contextlib.closing(connect()) as client:
        return [
            container["Id"][:12]
            for name in names
            for container in client.api.containers(all=True, filters={"label": f"sandboxgym.run={name}"})
        ]


def _after_close(kind: str) -> Callable[[Stage], Observed]:
    def run(stage: Stage) -> Observed:
        word = f"left-{secrets.token_hex(6)}"
        sandbox = stage.sandbox(disk=64 * MIB, processes=200)
        control = Path(sandbox.backend.control)
        box = getattr(sandbox.backend, "container", None)
        layer = None if box is None else box.layer.path
        groups = [] if box is None or box.group is None else list(box.group.paths)
        _attack(sandbox, kind, word)
        box = getattr(sandbox.backend, "container", None)
        stage.drop(sandbox)
        if left := _until(lambda: _alive(word), 5):
            return passed(f"{len(left)} processes still run")
        paths = [path for path in (control, layer) if path is not None]
        if left := _until(lambda: [path for path in paths if os.path.lexists(path)], _GONE_SECONDS):
            remove_directories([os.fspath(path) for path in left])
            return passed(f"{left[0]} stays")
        if left := _until(lambda: [path for path in groups if os.path.isdir(path)], 5):
            return passed(f"the control group {left[0]} stays")
        if left := _mounted([control.name]) if len(control.name) > 8 else []:
            return passed(f"{left[0]} is still mounted")
        return blocked("processes, files and control groups are gone")

    return run


def _after_kill(kind: str) -> Callable[[Stage], Observed]:
    def run(stage: Stage) -> Observed:
        owner = OwnerProcess(stage.backend, stage.image)
        try:
            owner.tell("hold", kind)
            found = owner.answer(seconds=40, most=1024 * MIB)
            if found["verdict"] != "held":
                raise NotApplicable(f"the owner could not be made ready: {found['detail']}")
            directories = run_directories(owner.process.pid)
            groups, names = _groups(directories), [path.name for path in directories]
        finally:
            owner.kill()
            owner.close()
        try:
            return _look(stage, str(found["detail"]), directories, groups, names)
        finally:
            clear(owner.process.pid)

    return run


def _look(stage: Stage, word: str, directories: list[Path], groups: list[str], names: list[str]) -> Observed:
    if stage.backend != "docker" and (left := _until(lambda: _alive(word), _GONE_SECONDS)):
        return passed(f"{len(left)} processes still run after their owner")
    # Another process may be reaping just now, and is then left to it.
    deadline, notes = time.monotonic() + _GONE_SECONDS, ""
    while (left_directories := [path for path in directories if path.exists()]) and time.monotonic() < deadline:
        notes = "; ".join(item.note for item in leftovers.reap() if item.path in left_directories and not item.removed)
        if notes:
            break
        time.sleep(0.1)
    if left_directories := [path for path in directories if path.exists()]:
        return passed(f"{left_directories[0].name} is not cleared: {notes}"[:200])
    if left := _until(lambda: _alive(word), 3):
        return passed(f"{len(left)} processes still run after their owner")
    if left := [path for path in groups if os.path.isdir(path)]:
        return passed(f"the control group {left[0]} stays")
    if left := _mounted(names):
        return passed(f"{left[0]} is still mounted")
    if stage.backend == "docker" and (left := _containers(names)):
        return passed(f"the container {left[0]} stays")
    return blocked("processes, files, mounts and control groups are gone")


def prepare(stage: Stage, kind: str) -> dict[str, str]:
    """Prepare a sandbox with something hostile in it, in an owner process that will be killed."""
    word = f"left-{secrets.token_hex(6)}"
    sandbox = stage.sandbox(disk=64 * MIB, processes=200)
    sandbox.execute(f"(exec -a {word} sleep 500) &", timeout=10)
    _attack(sandbox, kind, word)
    stage.notes["held"] = sandbox
    return {"verdict": "held", "detail": word}


for _kind in _HOSTILE:
    LEFTOVERS.append(
        Attempt(
            f"leftovers/close-{_kind}", f"leaves something on the host after its end ({_kind})", _after_close(_kind)
        )
    )
    LEFTOVERS.append(
        Attempt(
            f"leftovers/kill-{_kind}",
            f"leaves something on the host after its owner was killed ({_kind})",
            _after_kill(_kind),
        )
    )
