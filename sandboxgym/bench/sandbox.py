"""Benchmark of overlay sandboxes: snapshots, forks and commands against Docker and copies of files, in one run.

sandboxgym bench sandbox [--repeats 40] [--boxes 300] [--nested 60] [--image IMAGE]
    [--write docs/results/details/sandbox.md]
sandboxgym bench sandbox --against CHECKOUT [--rounds 6] [--repeats 20] [--boxes 40]
    [--backends overlay overlay-rootless overlay-full docker]

All variants snapshot the same amounts of written data. Times are wall-clock: fastest, median and 95th percentile in
milliseconds; a variant that this machine lacks is left out. ``--against`` compares this checkout with another one:
the same operations in children of both, in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sandboxgym.bench.tools import against, cost, result_page
from sandboxgym.sandbox import backends
from sandboxgym.sandbox.base import RootFS
from sandboxgym.sandbox.files.rootfs import resolve
from sandboxgym.sandbox.overlay.backend import OverlayBackend
from sandboxgym.sandbox.sandbox import make_sandbox
from sandboxgym.sandbox.shell.bash import ARGV
from sandboxgym.system import proc

AMOUNTS = (
    ("1 file", "echo 1 > /root/f"),
    ("300 files", "mkdir -p /root/d; for i in {1..300}; do echo $i > /root/d/$i; done"),
    ("a file of 200 MB", "head -c 200000000 /dev/zero > /root/big"),
)
"""Data written before a snapshot, as bash commands."""


@dataclass
class Times:
    """Wall-clock times in seconds."""

    seconds: list[float] = field(default_factory=list)

    @contextmanager
    def one(self) -> Iterator[None]:
        """Measure the block as one call."""
        began = time.perf_counter()
        yield
        self.seconds.append(time.perf_counter() - began)

    @property
    def median(self) -> float:
        """Median in seconds."""
        return statistics.median(self.seconds)

    def __str__(self) -> str:
        late = sorted(self.seconds)[min(len(self.seconds) - 1, int(0.95 * len(self.seconds)))]
        return f"{min(self.seconds) * 1e3:.1f} / {self.median * 1e3:.1f} / {late * 1e3:.1f}"


def shell(backend: OverlayBackend, command: str) -> None:
    """Run a command in a box."""
    process = backend.spawn(["bash", "-c", command], env=backend.env)
    assert process.output is not None
    while os.read(process.output, 1 << 16):
        pass
    if process.wait() != 0:
        raise RuntimeError(f"{command!r} failed")
    process.close()


def _backend() -> str:
    return "overlay" if os.geteuid() == 0 else "overlay-rootless"


# One snapshot


def layers(rootfs: RootFS, command: str, repeats: int) -> dict[str, Times]:
    """Measure the commit of a container, and a start from its files, against the usual ways of copying."""
    times = {name: Times() for name in ("commit", "start", "tar", "cp -a", "cp --reflink")}
    backend = OverlayBackend(rootfs)
    with contextlib.closing(backend), tempfile.TemporaryDirectory(dir=backend.runtime.directory) as folder:
        for number in range(repeats):
            backend.start()
            shell(backend, command)
            with times["commit"].one():
                tree = backend.commit()
            time.sleep(0.005)
            with times["start"].one():
                backend.start(tree)
            files = str(tree.layers[0].files)
            if number < max(3, repeats // 8):
                with tempfile.TemporaryDirectory(dir=folder) as copies:
                    _time_command(times["tar"], ["tar", "-C", files, "-cf", f"{copies}/tar", "."])
                    _time_command(times["cp -a"], ["cp", "-a", "--reflink=never", files, f"{copies}/copy"])
                    linked = ["cp", "-a", "--reflink=always", files, f"{copies}/link"]
                    if not _time_command(times["cp --reflink"], linked):
                        times["cp --reflink"].seconds.clear()
            tree.release()
    return {name: value for name, value in times.items() if value.seconds}


def _time_command(times: Times, command: Sequence[str]) -> bool:
    with times.one():
        return subprocess.run(command, capture_output=True).returncode == 0


def sandboxes(rootfs: RootFS, command: str, repeats: int) -> dict[str, Times]:
    """Measure the same with a persistent shell, whose state is kept: until the next command has run."""
    times = {name: Times() for name in ("snapshot", "restore", "snapshot and go on", "fork")}
    with make_sandbox(_backend(), rootfs=rootfs) as sandbox:
        sandbox.execute("cd /root; A=1")
        for _ in range(repeats):
            start = sandbox.snapshot()
            sandbox.execute(command)
            with times["snapshot and go on"].one():
                with times["snapshot"].one():
                    snap = sandbox.snapshot()
                sandbox.execute("true")
            with times["restore"].one():
                sandbox.restore(snap)
                sandbox.execute("true")
            with times["fork"].one():
                (child,) = sandbox.fork(1)
                child.execute("true")
            child.close()
            sandbox.restore(start)
            snap.release()
            start.release()
    return times


def docker(image: str, command: str, repeats: int) -> dict[str, Times]:
    """Measure ``docker commit``, and ``docker run`` of the committed image, through the daemon's interface."""
    client = _docker()
    times = {name: Times() for name in ("commit", "run")}
    for _ in range(repeats):
        with contextlib.ExitStack() as made:
            container = made.enter_context(running(client, image))
            container.exec_run(["bash", "-c", command])
            with times["commit"].one():
                committed = container.commit()
            made.callback(client.images.remove, committed.id, force=True)
            with times["run"].one():
                copy = made.enter_context(running(client, committed.id))
                copy.exec_run(["true"])
    return times


@contextlib.contextmanager
def running(client: Any, image: str) -> Iterator[Any]:
    """Run a container that waits, and remove it; Ctrl-C waits until the daemon has said what it created."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        container = client.containers.create(image, ["sleep", "1000"], network_disabled=True)
    except BaseException:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        raise
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        container.start()
        yield container
    finally:
        container.remove(force=True)


def _docker() -> Any:
    import docker

    return docker.from_env()


def why_no_docker(image: str | None) -> str | None:
    """Reason why Docker cannot be measured; None if it can."""
    if not image:
        return "no image was given"
    if importlib.util.find_spec("docker") is None:
        return "the docker package is not installed"
    try:
        _docker().images.get(image)
    except Exception as error:  # whatever the package raises where there is no daemon
        return f"no daemon, or no such image ({type(error).__name__})"
    return None


def snapshot_tables(rootfs: RootFS, image: str | None, repeats: int) -> list[str]:
    """Make one table per amount of data."""
    lines = []
    for what, command in AMOUNTS:
        files = layers(rootfs, command, repeats)
        whole = sandboxes(rootfs, command, repeats)
        rows: list[tuple[str, Times | None, Times | None, str]] = [
            ("files: commit; start on it", files["commit"], files["start"], "5 / 8 ms"),
            ("with a shell: snapshot; restore and `true`", whole["snapshot"], whole["restore"], "12 / 30 ms"),
            ("with a shell: snapshot and `true` in the same", whole["snapshot and go on"], None, ""),
            ("with a shell: fork(1) and `true` in the child", None, whole["fork"], "20 ms"),
        ]
        if image:
            theirs = docker(image, command, max(3, repeats // 8))
            rows.append(("docker commit; docker run and `true`", theirs["commit"], theirs["run"], ""))
        rows += [
            (f"{name} of the files alone", files[name], None, "") for name in files if name not in ("commit", "start")
        ]
        ours = whole["snapshot"].median + whole["restore"].median
        lines += [
            f"### After writing {what}",
            "",
            "| ms, min / p50 / p95 | snapshot | restore | x ours | at most |",
            "|---|---|---|---|---|",
        ]
        for name, first, second, most in rows:
            total = (first.median if first else 0) + (second.median if second else 0)
            ratio = f"{total / ours:.1f}" if name.startswith("docker") else ""
            lines.append(f"| {name} | {first or ''} | {second or ''} | {ratio} | {most} |")
        lines.append("")
    return lines


# Commands


def commands(rootfs: RootFS, image: str | None, repeats: int) -> list[str]:
    """Make a table of the time to run ``true``."""
    rows: list[tuple[str, Times, str]] = []

    def measure(name: str, call: Callable[[], Any], number: int = repeats, most: str = "") -> None:
        call()
        times = Times()
        for _ in range(number):
            with times.one():
                call()
        rows.append((name, times, most))

    backend = OverlayBackend(rootfs)
    with contextlib.closing(backend):
        backend.start()

        def spawn() -> None:
            process = backend.spawn(["true"], env=backend.env)
            process.wait()
            process.close()

        measure("spawn of `true`", spawn, most="1.5 ms")
        measure("spawn of `bash -c true`", lambda: shell(backend, "true"))
    with make_sandbox(_backend(), rootfs=rootfs) as sandbox:
        measure("`execute` in the persistent shell", lambda: sandbox.execute("true"), most="3 ms")
        measure("`run`, a fresh bash", lambda: sandbox.run("true"))
    if image:
        container = _docker().containers.run(image, ["sleep", "1000"], detach=True, network_disabled=True)
        try:
            measure(
                "docker exec, through the daemon's interface",
                lambda: container.exec_run(["true"]),
                max(5, repeats // 4),
            )
        finally:
            container.remove(force=True)
    lines = ["### Running `true`", "", "| | ms, min / p50 / p95 | x spawn | at most |", "|---|---|---|---|"]
    first = rows[0][1].median
    lines += [f"| {name} | {times} | {times.median / first:.1f} | {most} |" for name, times, most in rows]
    return [*lines, ""]


# Many boxes


def memory_of(boxes: Sequence[OverlayBackend]) -> tuple[int, int, int]:
    """Memory in bytes: proportional shares of all processes of these containers, their groups' charge, available."""
    shares = charged = 0
    for backend in boxes:
        box = backend.container
        if box is not None:
            pids = [box.pid, *(info.pid for info in backend.processes())]
            shares += sum(proc.nbytes(f"/proc/{pid}/smaps_rollup", "Pss") for pid in pids)
            charged += (box.group and box.group.memory()) or 0
    return shares, charged, proc.nbytes("/proc/meminfo", "MemAvailable")


def memory(rootfs: RootFS, number: int) -> list[str]:
    """Measure the memory of live containers, idle and with a shell."""
    first = OverlayBackend(rootfs)
    first.start()
    shell(first, "mkdir -p /root/d; for i in {1..50}; do echo $i > /root/d/$i; done")
    tree = first.commit()
    boxes = [first, *(first.sibling() for _ in range(number - 1))]
    times = Times()
    try:
        before = memory_of(())
        for box in boxes:
            with times.one():
                box.start(tree)
        idle = memory_of(boxes)
        shells = [box.spawn(ARGV, env=box.env, terminal=True) for box in boxes]
        time.sleep(2)
        busy = memory_of(boxes)
        for process in shells:
            process.close()
    finally:
        for box in boxes:
            box.close()

    lines = [f"### {number} live boxes", "", f"Started one after the other on one tree: {times} ms each.", ""]
    lines += [
        "| MB each | proportional share of memory | charged to the control group | less available | at most |",
        "|---|---|---|---|---|",
    ]
    for name, (shares, charged, left) in (("idle", idle), ("with an interactive bash", busy)):
        less = (before[2] - left) / number / 1e6
        lines.append(f"| {name} | {shares / number / 1e6:.2f} | {charged / number / 1e6:.2f} | {less:.2f} | 1 |")
    lines += ["", "What is less available on the whole machine depends on whatever else runs there."]
    return [*lines, ""]


def nested(rootfs: RootFS, number: int) -> list[str]:
    """Measure the cost of depth: a chain of snapshots, each after another change."""
    backend = OverlayBackend(rootfs)
    parts = [(Times(), Times(), Times(), Times()) for _ in range(4)]
    depth = []
    with contextlib.closing(backend):
        backend.start()
        for step in range(number):
            commits, starts, looks, walks = parts[step * 4 // number]
            shell(backend, f"mkdir -p /root/d; echo {step} >> /root/all; echo {step} > /root/d/{step}")
            with commits.one():
                tree = backend.commit()
            with starts.one():
                backend.start(tree)
            depth.append(len(tree.layers))
            with looks.one():
                shell(backend, "for i in {1..300}; do [ -e /root/d/not-$i ]; done; true")
            with walks.one():
                shell(backend, "find /root /etc > /dev/null")
        content = backend.read_file("/root/all").split()
        if content != [str(step).encode() for step in range(number)]:
            raise RuntimeError(f"the chain drifted: {content[:100]!r}")
    lines = [f"### {number} nested snapshots", ""]
    lines += [
        f"No drift: the file that every step appended to holds all {number} lines. Stacks of 48 layers are merged.",
        "",
    ]
    lines += [
        "| snapshots | layers at its end | commit | start | 300 look-ups of missing names | find |",
        "|---|---|---|---|---|---|",
    ]
    for at, columns in enumerate(parts):
        begin, end = at * number // 4, (at + 1) * number // 4
        lines.append(f"| {begin + 1} to {end} | {depth[end - 1]} | {' | '.join(map(str, columns))} |")
    return [*lines, ""]


def _compare(parser: argparse.ArgumentParser, arguments: argparse.Namespace, argv: Sequence[str] | None) -> None:
    """Compare this checkout with another one, on the host's files, or with ``--image`` on those of an image."""
    try:
        other = against.checkout(arguments.against)
    except ValueError as error:
        parser.error(str(error))
    repeats, boxes = arguments.repeats or 20, arguments.boxes or 40
    if min(arguments.rounds, repeats, boxes) < 1:
        parser.error("--rounds, --repeats, --boxes: expected at least 1")
    if "docker" in arguments.backends and not arguments.image:
        parser.error("--backends docker needs --image")
    given = list(sys.argv[1:] if argv is None else argv)
    shown = ["CHECKOUT" if word == arguments.against else word.replace(arguments.against, "CHECKOUT") for word in given]
    rootfs = f"docker:{arguments.image}" if arguments.image else "host"
    lines = [
        *result_page.head("Sandboxes: two checkouts", "sandbox", shown),
        f"{result_page.machine()}; {'root' if os.geteuid() == 0 else 'an ordinary user'}; "
        f"load {os.getloadavg()[0]:.1f}.",
        "",
        *against.tables(
            other,
            arguments.backends,
            rootfs,
            rounds=arguments.rounds,
            repeats=repeats,
            boxes=boxes,
        ),
    ]
    result_page.publish(lines, arguments.write)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line: prints Markdown tables."""
    parser = argparse.ArgumentParser(
        prog="sandboxgym bench sandbox",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--repeats", type=int, help="repetitions of each measurement, an eighth for slow variants (default: 40)"
    )
    parser.add_argument("--boxes", type=int, help="number of sandboxes that live at the same time (default: 300)")
    parser.add_argument("--nested", type=int, default=60, help="length of the chain of snapshots")
    parser.add_argument("--image", help="Docker image with bash, for our sandboxes and Docker's")
    parser.add_argument("--write", metavar="FILE", help="file to write the page to")
    parser.add_argument("--against", metavar="CHECKOUT", help="another checkout to compare this one with")
    parser.add_argument("--rounds", type=int, default=6, help="with --against: pairs of processes (default: 6)")
    parser.add_argument(
        "--backends",
        nargs="+",
        default=against.BACKENDS,
        choices=[*backends.NAMES, cost.FULL],
        metavar="NAME",
        help=f"with --against: {', '.join([*backends.NAMES, cost.FULL])} (default: {' '.join(against.BACKENDS)})",
    )
    arguments = parser.parse_args(argv)
    if arguments.against:
        _compare(parser, arguments, argv)
        return
    arguments.repeats, arguments.boxes = arguments.repeats or 40, arguments.boxes or 300
    image = arguments.image
    reason = why_no_docker(image)
    rootfs = resolve("host" if reason else f"docker:{image}")
    lines = [
        *result_page.head("Sandboxes: snapshots, commands, memory", "sandbox", argv),
        f"{result_page.machine()}; {'root' if os.geteuid() == 0 else 'rootless'}; "
        f"load {os.getloadavg()[0]:.1f} at the start. Compare within this page only."
        + (f" Without Docker: {reason}." if reason else ""),
        "",
        *snapshot_tables(rootfs, None if reason else image, arguments.repeats),
        *commands(rootfs, None if reason else image, 5 * arguments.repeats),
        *nested(rootfs, arguments.nested),
        *memory(rootfs, arguments.boxes),
    ]
    result_page.publish(lines, arguments.write)


if __name__ == "__main__":
    main()
