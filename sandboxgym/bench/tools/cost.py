"""Child of ``sandboxgym bench sandbox --against``, which measures the costs of one checkout's sandboxes.

It is run as a file of this checkout, with the package of the measured checkout, so that both are measured by the same
code. From the package it uses only `make_sandbox` and the methods of a sandbox, which both have.

    python cost.py CHECKOUT BACKEND ROOTFS BOXES

Each line of standard input, ``seconds`` or ``bytes``, is answered with a line of JSON, after a first one that says
whether there is such a backend (``null``), or why not.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

WORK = "mkdir -p /tmp/work; for i in {1..100}; do echo $i > /tmp/work/$i; done; cat /tmp/work/* > /tmp/all"
"""Command that makes files and reads them."""
_NUMBER, _PROCESSES = "processes", "processes, their shares of memory"
_KERNEL = ("SUnreclaim", "KernelStack", "PageTables", "Percpu")
FULL = "overlay-full"
"""Name of the overlay backend with snapshots of files and processes."""


def main(arguments: list[str]) -> None:
    """Measure what standard input requests, until it ends."""
    folder, backend, rootfs, boxes = arguments
    import sandboxgym

    if Path(folder) not in Path(sandboxgym.__file__).resolve().parents:
        raise SystemExit(f"expected the sandboxgym of {folder}, found {sandboxgym.__file__}")
    from sandboxgym.sandbox.base import SandboxUnavailable
    from sandboxgym.sandbox.sandbox import make_sandbox

    options: dict[str, Any] = {"rootfs": rootfs, "allow_unsafe": backend == "copy"}
    if backend == FULL:
        backend, options["snapshot"] = "overlay", "full"

    def make() -> Any:
        return make_sandbox(backend, **options)

    try:
        with make() as sandbox:  # the first one compiles, looks for programs, starts the zygote
            sandbox.execute("true")
    except (SandboxUnavailable, ImportError) as error:
        print(json.dumps(f"{error}"), flush=True)
        return
    print(json.dumps(None), flush=True)
    for line in sys.stdin:
        answer = seconds(make) if line.strip() == "seconds" else memory(make, int(boxes))
        print(json.dumps(answer), flush=True)


def seconds(make: Any) -> dict[str, float]:
    """Wall-clock seconds of each operation; started, restored and forked sandboxes have run a command by then."""
    found: dict[str, float] = {}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        found[name] = time.perf_counter() - began

    with timed("start"):
        sandbox = make()
        sandbox.execute("true")
    with timed("`execute` of `true`"):
        sandbox.execute("true")
    with timed("`run` of `true`"):
        sandbox.run("true")
    with timed("100 files written and read"):
        sandbox.execute(WORK)
    with timed("snapshot"):
        snap = sandbox.snapshot()
    sandbox.execute("rm -r /tmp/work")
    with timed("restore"):
        sandbox.restore(snap)
        sandbox.execute("true")
    with timed("fork"):
        (child,) = sandbox.fork(1)
        child.execute("true")
    child.close()
    with timed("close"):
        sandbox.close()
    snap.release()
    return found


def memory(make: Any, boxes: int) -> dict[str, float]:
    """Bytes that each of many idle sandboxes with a shell takes; only measures that this machine offers."""
    if not Path("/proc/self/smaps_rollup").exists():
        return {}
    with ExitStack() as opened:
        opened.enter_context(make()).start()  # what all share is there before
        before = _counted()
        for _ in range(boxes):
            opened.enter_context(make()).start()
        time.sleep(min(1.0, 0.05 * boxes))  # for the next box to be made ahead, as it was before
        after = _counted()
    counted = {name: (after[name] - before[name]) / boxes for name in before if name in after}
    if counted.pop(_NUMBER) < 1:  # they descend from a daemon, not from this process
        counted.pop(_PROCESSES)
    return counted


def _counted() -> dict[str, int]:
    """Bytes now, by measure; and the number of processes."""
    mine = {str(os.getpid())}
    parents = {pid: text.rpartition(")")[2].split()[1] for pid in _pids() if (text := _read(f"/proc/{pid}/stat"))}
    while more := {pid for pid, parent in parents.items() if parent in mine} - mine:
        mine |= more
    groups = {group for pid in mine for group in _groups(pid)} - set(_groups("self"))
    found = {
        _NUMBER: len(mine),
        _PROCESSES: sum(_kilobytes(f"/proc/{pid}/smaps_rollup", "Pss") for pid in mine),
        "kernel memory of the whole machine": sum(_kilobytes("/proc/meminfo", name) for name in _KERNEL),
    }
    charged = [int(text) for group in groups if (text := _read(group).strip()).isdigit()]
    return {**found, **({"charged to control groups": sum(charged)} if charged else {})}


def _groups(pid: str) -> Iterator[str]:
    """Files with the memory charged to a process's control group."""
    for line in _read(f"/proc/{pid}/cgroup").splitlines():
        _, kind, path = line.split(":", 2)
        if kind == "memory":
            yield f"/sys/fs/cgroup/memory{path}/memory.usage_in_bytes"
        elif not kind:
            yield f"/sys/fs/cgroup{path}/memory.current"


def _pids() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit()]


def _kilobytes(path: str, name: str) -> int:
    lines = [line for line in _read(path).splitlines() if line.startswith(f"{name}:")]
    return sum(int(line.split()[1]) * 1024 for line in lines)


def _read(path: str) -> str:
    """Read a file; empty if it is gone, as those of processes may be."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


if __name__ == "__main__":
    main(sys.argv[1:])
