"""Benchmark of forks with running processes, against files alone, against replaying the commands, and against Docker.

sandboxgym bench full [--repeats 12] [--forks 40] [--nested 60] [--image IMAGE]
    [--write docs/results/details/full-snapshots.md]

Times are wall-clock: fastest, median and 95th percentile in milliseconds. A snapshot is timed until the sandbox has
answered its next command, in turns with another sandbox that each snapshot replaces by a copy; a fork and a restore
until they have answered their first one. The text under "What the numbers say" is kept when a page is rewritten.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

from sandboxgym.bench.sandbox import Times, memory_of, why_no_docker
from sandboxgym.bench.tools import result_page
from sandboxgym.sandbox.overlay.backend import REPLACED, OverlayBackend, criu_checkpointer
from sandboxgym.sandbox.sandbox import LAZY_PAGES, Sandbox, make_sandbox

LONG = 300.0
_SERVE = "cd /tmp; python3 -m http.server 8000 >/dev/null 2>&1 & until python3 -c 'import socket; "
_SERVE += 'socket.create_connection(("127.0.0.1", 8000))\' 2>/dev/null; do sleep 0.01; done'
_HOLD = 'python3 -c \'import os, time; x = os.urandom({size} << 20); open("/tmp/ready", "w"); time.sleep(100000)\' & '
_HOLD += "until [[ -e /tmp/ready ]]; do sleep 0.01; done"
_READ = 'python3 -q -i -c "x = bytes([7]) * ({size} << 20)"'
_TREE = "touch /tmp/log; tail -f /tmp/log >/dev/null 2>&1 & sleep 100000 & sleep 100000 & "
_TREE += "(while :; do date >>/tmp/log; sleep 0.2; done) & "
WORKS = {
    "an idle bash": "true",
    "a Python of 13 MB": _HOLD.format(size=5),
    "an http.server": _SERVE,
    "a tree of 7 processes": _TREE + _SERVE,
    "a process of 64 MiB": _HOLD.format(size=64),
    "a process of 200 MB": _HOLD.format(size=190),
}
"""Workloads that run when the snapshot is taken, as bash commands that return once the workload runs."""
TREE, MIDDLE, LARGE = "a tree of 7 processes", "a process of 64 MiB", "a process of 200 MB"
CAPTURED, LIVE, FORK, LARGE_FORK = 40.0, 80.0, 60.0, 80.0
"""Limits in milliseconds of medians: until the tree is captured, until it continues, for a fork of it, and for a
fork of the large process with its memory brought as it is touched."""


@dataclass
class FullSnapshotRow:
    """Measurements with one workload."""

    capture: Times = field(default_factory=Times)
    """Time until the processes are captured, during most of which they are stopped."""
    snapshot: Times = field(default_factory=Times)
    replaced: Times = field(default_factory=Times)
    """Time of a snapshot that replaces the sandbox by a copy of it, until the copy has answered."""
    fork: Times = field(default_factory=Times)
    files: Times = field(default_factory=Times)
    """Time of a snapshot of files and shell in the same sandbox, which loses the processes."""
    files_fork: Times = field(default_factory=Times)
    replay: Times = field(default_factory=Times)
    """Time of a fresh sandbox in which the command is run again."""
    nbytes: int = 0


def measure(command: str, repeats: int, *, lazy_pages: int | None = LAZY_PAGES) -> FullSnapshotRow:
    """Measure one workload."""
    row = FullSnapshotRow()
    with (
        make_sandbox("overlay", snapshot="full", lazy_pages=lazy_pages) as sandbox,
        make_sandbox("overlay", snapshot="full", lazy_pages=lazy_pages) as replaced,
    ):
        cast(OverlayBackend, replaced.backend).copied = REPLACED
        do(sandbox, command)
        do(replaced, command)
        for _ in range(repeats):
            with row.replaced.one():
                snap = replaced.snapshot(strict=True)
                do(replaced, "true")
            snap.release()
            with row.snapshot.one():
                snap = sandbox.snapshot(strict=True)
                do(sandbox, "true")
            assert snap.checkpoint is not None
            row.capture.seconds.append(snap.checkpoint.seconds)
            row.nbytes = snap.checkpoint.nbytes
            snap.release()
            (child,) = sandbox.fork(1, strict=True)
            with child, row.fork.one():
                do(child, "true")
            with row.files.one():
                snap = sandbox.snapshot(mode="filesystem")
                do(sandbox, "true")
            with make_sandbox("overlay") as other:
                other.start()
                with row.files_fork.one():
                    other.restore(snap)
                    do(other, "true")
            snap.release()
            with make_sandbox("overlay") as other, row.replay.one():
                do(other, command)
    return row


def do(sandbox: Sandbox, command: str) -> str:
    """Run a command to its end."""
    result = sandbox.execute(command, timeout=LONG)
    if result.timed_out or result.exit_code:
        raise RuntimeError(f"{command!r}: {result}")
    return result.output


def until_read(size: int, repeats: int, *, lazy_pages: int | None) -> Times:
    """Time of a fork of a process of ``size`` MiB until it has read all of them."""
    times = Times()
    with make_sandbox("overlay", snapshot="full", lazy_pages=lazy_pages) as sandbox:
        ask(sandbox, _READ.format(size=size))
        for _ in range(repeats):
            (child,) = sandbox.fork(1, strict=True)
            with child, times.one():
                if ask(child, "x.count(7) == len(x)\n") != "True\n>>> ":
                    raise RuntimeError("a fork has other memory")
    return times


def ask(sandbox: Sandbox, text: str) -> str:
    """Type to a Python; returns its output up to the next prompt."""
    answer = sandbox.interact(text, timeout=LONG, until=">>> $")
    if not answer.running:
        raise RuntimeError(f"{text!r}: {answer}")
    return answer.output


def at_once(command: str, number: int, repeats: int, *, threads: int, lazy_pages: int | None = LAZY_PAGES) -> Times:
    """Time of many forks, all alive, until each has answered, started by some threads."""
    times = Times()
    with (
        make_sandbox("overlay", snapshot="full", lazy_pages=lazy_pages) as sandbox,
        ThreadPoolExecutor(threads) as pool,
    ):
        do(sandbox, command)
        for _ in range(repeats):
            with forks(sandbox, number) as children, times.one():
                list(pool.map(do, children, ["true"] * number))
    return times


@contextmanager
def forks(sandbox: Sandbox, number: int) -> Iterator[list[Sandbox]]:
    """Make forks that are not started, and closed at the end."""
    children = sandbox.fork(number, strict=True)
    try:
        yield children
    finally:
        for child in children:
            child.close()


def chain(command: str, length: int) -> list[Times]:
    """Time a chain of snapshots, each of a sandbox restored by the one before: by quarters."""
    quarters = [Times() for _ in range(4)]
    with make_sandbox("overlay", snapshot="full") as sandbox:
        do(sandbox, command)
        for number in range(length):
            do(sandbox, f"echo {number} >>/tmp/lines")
            with quarters[number * 4 // length].one():
                snap = sandbox.snapshot(strict=True)
                sandbox.restore(snap)
                do(sandbox, "true")
            snap.release()
        if do(sandbox, "wc -l </tmp/lines").strip() != str(length):
            raise RuntimeError("a line was lost")
    return quarters


def memory(command: str, number: int, *, lazy_pages: int | None = LAZY_PAGES) -> float:
    """MiB that a live fork takes: the proportional share of all its processes."""
    with make_sandbox("overlay", snapshot="full", lazy_pages=lazy_pages) as sandbox:
        do(sandbox, command)
        with forks(sandbox, number) as children:
            for child in children:
                do(child, "true")
            return memory_of([cast(OverlayBackend, child.backend) for child in children])[0] / number / 2**20


def docker(image: str, repeats: int) -> tuple[Times, Times]:
    """Time ``docker commit`` and ``docker run`` of the committed image until it answers; no process is kept."""
    commit, run = Times(), Times()
    with make_sandbox("docker", rootfs=f"docker:{image}") as sandbox:
        do(sandbox, "echo 1 >/root/f; sleep 100000 &")
        for _ in range(repeats):
            with commit.one():
                snap = sandbox.snapshot()
            (child,) = sandbox.fork(1)
            with child, run.one():
                do(child, "true")
            snap.release()
    return commit, run


def works(repeats: int) -> tuple[list[str], dict[str, FullSnapshotRow]]:
    """Make the table of the costs of each workload, and its rows by name."""
    lines = [
        "| ms, min / p50 / p95 | captured | snapshot, sandbox goes on | a copy takes its place | ratio | fork | MiB | "
        "files only: snapshot | files only: restore | replayed | fork to replay |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    ways: list[tuple[str, str, int | None]] = [
        (name, command, LAZY_PAGES) for name, command in WORKS.items() if name not in (MIDDLE, LARGE)
    ]
    ways += [(f"{LARGE}, as a whole", WORKS[LARGE], None), (f"{LARGE}, as it is touched", WORKS[LARGE], LAZY_PAGES)]
    rows: dict[str, FullSnapshotRow] = {}
    for name, command, lazy_pages in ways:
        row = rows[name] = measure(command, repeats, lazy_pages=lazy_pages)
        ratio, left = row.replay.median / row.fork.median, row.snapshot.median / row.replaced.median
        lines.append(
            f"| {name} | {row.capture} | {row.snapshot} | {row.replaced} | {left:.2f} | {row.fork} | "
            f"{row.nbytes / 2**20:.1f} | {row.files} | "
            f"{row.files_fork} | {row.replay} | 1 : {ratio:.1f} |"
        )
    return lines, rows


def bounds(rows: dict[str, FullSnapshotRow]) -> list[str]:
    """Make the table of limits and measurements."""
    lines = ["| | at most, ms | median, ms | |", "|---|---|---|---|"]
    for what, most, times in (
        (f"{TREE}, captured", CAPTURED, rows[TREE].capture),
        (f"{TREE}, the sandbox goes on", LIVE, rows[TREE].snapshot),
        (f"{TREE}, fork", FORK, rows[TREE].fork),
        (f"{LARGE}, fork, as it is touched", LARGE_FORK, rows[f"{LARGE}, as it is touched"].fork),
    ):
        told = "kept" if times.median * 1e3 <= most else "more"
        lines.append(f"| {what} | {most:.0f} | {times.median * 1e3:.1f} | {told} |")
    return lines


def many(repeats: int, length: int, number: int) -> list[str]:
    """Make the table of many forks and of chains, with the memory of a live fork."""
    lines = ["| | ms, min / p50 / p95 |", "|---|---|"]
    for how, threads in (("one after another", 1), ("at once", 8)):
        lines.append(f"| 8 forks of the tree, {how} | {at_once(WORKS[TREE], 8, repeats, threads=threads)} |")
    for how, least in (("as a whole", None), ("as it is touched", LAZY_PAGES)):
        times = at_once(WORKS[MIDDLE], 20, repeats, threads=20, lazy_pages=least)
        share = memory(WORKS[MIDDLE], 20, lazy_pages=least)
        lines.append(f"| 20 forks of {MIDDLE}, at once, {how}: {share:.1f} MiB each | {times} |")
    for how, least in (("as a whole", None), ("as it is touched", LAZY_PAGES)):
        lines.append(f"| a fork until it has read its 190 MiB, {how} | {until_read(190, repeats, lazy_pages=least)} |")
    for quarter, times in enumerate(chain(WORKS["an http.server"], length), 1):
        lines.append(f"| {length} snapshots in a row, each restored, an http.server, quarter {quarter} | {times} |")
    return [
        *lines,
        "",
        f"{number} forks of a bash with a `sleep`, all alive: {memory('sleep 100000 &', number):.2f} MiB each, by "
        "proportional share of memory.",
    ]


def against_docker(image: str | None, repeats: int) -> list[str]:
    """Make the table of Docker, or say why there is none."""
    if reason := why_no_docker(image):
        return [f"Not measured: {reason}."]
    assert image is not None
    commit, run = docker(image, repeats)
    return [
        "| ms, min / p50 / p95; every process is lost | docker commit | docker run, `true` |",
        "|---|---|---|",
        f"| a bash with a `sleep` | {commit} | {run} |",
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line: measure, print, and write the page if asked to."""
    parser = argparse.ArgumentParser(prog="sandboxgym bench full", description=__doc__)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--forks", type=int, default=40, help="number of forks that live at the same time")
    parser.add_argument("--nested", type=int, default=60, help="length of the chain of snapshots")
    parser.add_argument("--image", help="Docker image with bash; without it Docker is left out")
    parser.add_argument("--write", metavar="FILE", help="file to write the page to")
    arguments = parser.parse_args(argv)
    checkpointer = criu_checkpointer()
    if reason := checkpointer.why_unavailable():
        raise SystemExit(f"full snapshots are not available here: {reason}")
    if reason := checkpointer.why_not_lazy():
        raise SystemExit(f"memory cannot be loaded on demand here: {reason}")
    few = max(3, arguments.repeats // 3)
    where = f"{result_page.machine(f'CRIU {checkpointer.version()}')}; load {os.getloadavg()[0]:.1f} at the start."
    table, rows = works(arguments.repeats)
    lines = [
        *result_page.head("Full snapshots: sandboxes forked with what runs in them", "full", argv),
        f"{where} Compare within this page only.",
        "",
        *table,
        "",
        "### What it may take",
        "",
        *bounds(rows),
        "",
        "### Many",
        "",
        *many(few, arguments.nested, arguments.forks),
        "",
        "### Docker",
        "",
        *against_docker(arguments.image, few),
    ]
    result_page.publish(lines, arguments.write)


if __name__ == "__main__":
    main()
