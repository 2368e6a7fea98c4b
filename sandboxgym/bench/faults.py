"""Benchmark of faults in sandboxes: whether they survive real ones, and which processes, mounts and others are left.

sandboxgym bench faults [--image IMAGE] [--kills 5] [--write docs/results/details/sandbox-faults.md]

Each fault happens to an owner of sandboxes in a process of its own, whose traces are counted (`traces`) while it runs
and after its end. Resource bombs run in a sandbox with small limits; "survived" means that the same sandbox answers
afterwards and can be restored to its earlier state.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from sandboxgym.bench.tools import result_page
from sandboxgym.bench.tools.traces import Folder, Traces
from sandboxgym.sandbox.backends import NAMES
from sandboxgym.sandbox.base import Limits, SandboxClosed, SandboxFull, SandboxUnavailable
from sandboxgym.sandbox.sandbox import Sandbox, make_sandbox
from sandboxgym.sandbox.snapshot import SandboxSnapshot

MIB = 2**20
PATIENCE = 300.0
"""Timeout in seconds of a fault, for a busy machine."""


# What happens, in the process of an owner.

Fault = Callable[[Sandbox], str]


def fork_bomb(sandbox: Sandbox) -> str:
    """Start processes that double until nothing more can be started."""
    done = sandbox.execute("bomb() { bomb | bomb & }; bomb; while :; do :; done", timeout=2)
    return f"exit code {done.exit_code}, timed out: {done.timed_out}"


def memory_bomb(sandbox: Sandbox) -> str:
    """Allocate a gigabyte where an eighth of one is allowed."""
    done = sandbox.execute("python3 -c 'x = bytearray(2**30); print(len(x))'")
    if done.exit_code == 0:
        raise AssertionError("it got its memory")
    return f"exit code {done.exit_code}"


def disk_fill(sandbox: Sandbox) -> str:
    """Write files of 1 MB until something stops it."""
    try:
        done = sandbox.execute("for i in {1..2000}; do head -c 1M /dev/zero > ~/full-$i || break; sleep 0.01; done")
        for _ in range(200):
            sandbox.execute("sleep 0.1")
    except (SandboxFull, SandboxClosed) as error:
        return type(error).__name__
    raise AssertionError(f"nothing stopped it: exit code {done.exit_code}")


def output_flood(sandbox: Sandbox) -> str:
    """Print 100 MB to the terminal."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    done = sandbox.execute("head -c 100000000 /dev/zero | tr '\\0' x", timeout=PATIENCE / 3)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    if len(done.output) > sandbox.limits.output + 100 or grown > 64:  # a note says how much is missing
        raise AssertionError(f"{len(done.output):,} characters were kept, the owner grew by {grown:.0f} MB")
    return f"{len(done.output):,} characters kept, {done.elided:,} bytes dropped"


def hung_command(sandbox: Sandbox) -> str:
    """Run a command that ignores signals, with a child that left its session."""
    command = "trap '' INT TERM HUP; setsid sleep 1000 & (trap '' INT TERM; sleep 1000) & while :; do :; done"
    done = sandbox.execute(command, timeout=1)
    if not done.timed_out or sandbox.lossy():
        raise AssertionError(f"timed out: {done.timed_out}, still there: {sandbox.lossy()}")
    return "ended after its time with all that it started"


def killed_processes(sandbox: Sandbox) -> str:
    """Kill the shell and everything else inside from outside."""
    said = []
    for _ in range(3):
        sandbox.backend.kill([info.pid for info in sandbox.backend.processes()])
        said.append(sandbox.execute("true").exit_code)
    return f"a new shell each time, exit codes {said}"


class Relay:
    """A relay to the Docker daemon's socket, which can be cut without affecting the daemon's other users."""

    def __init__(self, path: Path, target: str) -> None:
        self.path, self._target = path, target
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen()
        self._ends: list[socket.socket] = []
        self._lock = threading.Lock()
        self._is_cut = False
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            with self._lock:
                if self._is_cut:
                    near.close()
                    far.close()
                    return
                self._ends += [near, far]
            try:
                far.connect(self._target)
            except OSError:  # no daemon, or cut in between
                near.close()
                far.close()
                continue
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=_copy, args=(source, sink), daemon=True).start()

    def cut(self) -> None:
        """Stop relaying answers."""
        self.path.unlink()
        with self._lock:
            self._is_cut = True
            for end in (self._server, *self._ends):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while block := source.recv(1 << 16):
            sink.sendall(block)
        sink.shutdown(socket.SHUT_WR)


IN_A_SANDBOX: dict[str, tuple[Fault, str]] = {
    "fork bomb": (fork_bomb, "processes"),
    "memory bomb": (memory_bomb, "memory"),
    "disk fill": (disk_fill, "disk"),
    "output flood": (output_flood, "seconds"),
    "hung command": (hung_command, "seconds"),
    "shell and programs killed": (killed_processes, "seconds"),
}
"""Faults inside a sandbox, with the limit that a backend must declare for each to be tried."""
SMALL = Limits(seconds=60, memory=128 * MIB, processes=60, disk=24 * MIB, output=100_000)


def suffer(fault: str, backend: str, rootfs: str) -> str:
    """Let a fault happen to a sandbox, then use it; returns the observation."""
    happen, limit = IN_A_SANDBOX[fault]
    with make_sandbox(backend, rootfs=rootfs, limits=SMALL, allow_unsafe=True) as sandbox:
        if limit not in sandbox.backend.capabilities.limits:
            return f"not tried: {limit} is not limited, which is declared"
        sandbox.execute("cd; echo before > file; x=1")
        snap = sandbox.snapshot()
        sandbox.execute("echo after > file; x=2")
        seen = happen(sandbox)
        if "Sandbox" not in seen and sandbox.execute("echo $x", timeout=30).output != "2\n":
            raise AssertionError("the sandbox does not answer any more")
        sandbox.restore(snap)
        answer = sandbox.execute("echo $x; cat file").output
        if answer != "1\nbefore\n":
            raise AssertionError(f"restored, it says {answer!r}")
    return seen


def lose_the_daemon(rootfs: str) -> str:
    """Let the Docker daemon stop answering a working sandbox."""
    real = (os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock").removeprefix("unix://")
    with tempfile.TemporaryDirectory(prefix="sandboxgym-") as folder:
        relay = Relay(Path(folder, "relay.sock"), real)
        os.environ["DOCKER_HOST"] = f"unix://{relay.path}"
        sandbox = make_sandbox("docker", rootfs=rootfs)
        sandbox.execute("sleep 1000 &")
        relay.cut()
        said = []
        for use in (lambda: sandbox.run("true"), sandbox.snapshot, lambda: sandbox.fork(1, start=True)):
            try:
                use()
            except (SandboxUnavailable, SandboxClosed) as error:
                said.append(type(error).__name__)
            else:
                raise AssertionError("it continues without a daemon")
        sandbox.close()
        os.environ["DOCKER_HOST"] = f"unix://{real}"
    return ", ".join(said)


def work(backend: str, rootfs: str) -> None:
    """Use, snapshot and restore sandboxes until killed; prints a line per round."""
    sandboxes = [make_sandbox(backend, rootfs=rootfs, allow_unsafe=True) for _ in range(2)]
    snaps: list[SandboxSnapshot] = []
    for number in range(10**9):
        sandbox = sandboxes[number % 2]
        sandbox.execute(f"setsid sleep 1000 & echo {number} > ~/file-{number % 5}")
        snaps = [*snaps[-3:], sandbox.snapshot()]
        if number % 3 == 2:
            sandbox.restore(snaps[-1])
        print(number, flush=True)


# How it ends, seen from outside.


@dataclass(frozen=True, slots=True)
class FaultOutcome:
    """Outcome of a fault."""

    seen: str
    """Observation: what happened, or what went wrong."""
    survived: bool
    most: Traces
    left: Traces


def _settled(folder: Folder) -> Traces:
    """Count the remaining traces once killed processes had time to end."""
    deadline = time.monotonic() + 30
    while not (left := folder.count()).none and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _watched(folder: Folder, process: subprocess.Popen[str]) -> Traces:
    """Maximum of the traces until a process ended; it is killed if it takes too long."""
    most = folder.count()
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None:
        most = most.most(folder.count())
        if time.monotonic() > deadline:
            process.kill()
        time.sleep(0.1)
    return most


def one_fault(folder: Folder, *arguments: str) -> FaultOutcome:
    """Run a fault in an owner that then ends by itself."""
    process = folder.start(*arguments)
    most = _watched(folder, process)
    output, complaint = process.communicate()
    left = _settled(folder)
    if process.returncode:
        return FaultOutcome(complaint.strip().splitlines()[-1], False, most, left)
    return FaultOutcome(json.loads(output), True, most, left)


def killed_owner(folder: Folder, backend: str, rootfs: str, seed: int) -> FaultOutcome:
    """Kill an owner at a random moment; the next start removes its remains."""
    process = folder.start("work", backend, rootfs)
    assert process.stdout is not None
    process.stdout.readline()
    most = folder.count()
    moment = time.monotonic() + random.Random(seed).uniform(0, 1.5)
    while time.monotonic() < moment:
        most = most.most(folder.count())
    process.kill()
    process.communicate()
    cleared = folder.reap().communicate(timeout=PATIENCE)[0].strip()
    left = _settled(folder)
    return FaultOutcome(f"{cleared} run directories cleared", cleared.isdigit(), most, left)


def racing_owners(folder: Folder, backend: str, rootfs: str) -> FaultOutcome:
    """Kill one of two owners while three processes remove remains at once; the other owner works on."""
    doomed, living = (folder.start("work", backend, rootfs) for _ in range(2))
    assert doomed.stdout is not None and living.stdout is not None
    doomed.stdout.readline(), living.stdout.readline()
    most = folder.count()
    doomed.kill()
    doomed.communicate()
    racing = [folder.reap() for _ in range(3)]
    said = [process.communicate(timeout=PATIENCE) for process in racing]
    rounds = [living.stdout.readline() for _ in range(10)]
    went_on = living.poll() is None and all(line.strip().isdigit() for line in rounds)
    living.kill()
    living.communicate()
    folder.reap().communicate(timeout=PATIENCE)
    left = _settled(folder)
    clean = all(process.returncode == 0 for process in racing)
    seen = "the other one worked on" if went_on else f"the other one said {rounds[-1]!r}"
    return FaultOutcome(seen if clean else said[0][1].strip()[-200:], went_on and clean, most, left)


def faults_of(backend: str, rootfs: str, kills: int) -> dict[str, FaultOutcome]:
    """Run all faults on one backend."""
    docker = backend == "docker"
    with tempfile.TemporaryDirectory(prefix="sandboxgym-faults-") as name:
        folder = Folder(Path(name), docker=docker)
        outcomes = {fault: one_fault(folder, fault, backend, rootfs) for fault in IN_A_SANDBOX}
        for seed in range(kills):
            outcomes[f"owner killed (-9) at a random moment, {seed + 1}"] = killed_owner(folder, backend, rootfs, seed)
        outcomes["two owners, one killed, three clear up"] = racing_owners(folder, backend, rootfs)
        if docker:
            outcomes["the daemon stops to answer"] = one_fault(folder, "daemon", backend, rootfs)
    return outcomes


def tables(backends: Sequence[str], image: str | None, kills: int) -> list[str]:
    """Format one table per backend."""
    lines = []
    names = [field.name for field in fields(Traces)]
    for backend in backends:
        rootfs = f"docker:{image}" if backend == "docker" else "host"
        try:
            if backend == "docker" and not image:
                raise SandboxUnavailable("no image was given")
            make_sandbox(backend, rootfs=rootfs, allow_unsafe=True).close()
        except SandboxUnavailable as error:
            lines += [f"## {backend}", "", f"Not run: {error}.", ""]
            continue
        lines += [f"## {backend}", "", f"| what happens | | what was seen | most / left: {', '.join(names)} |"]
        lines += ["|---|---|---|---|"]
        for fault, outcome in faults_of(backend, rootfs, kills).items():
            tried = "not tried" not in outcome.seen
            good = "survived, nothing left" if outcome.survived and outcome.left.none else "**failed**"
            counts = ", ".join(map("{}/{}".format, astuple(outcome.most), astuple(outcome.left)))
            lines.append(f"| {fault} | {good if tried else ''} | {outcome.seen} | {counts} |")
        lines.append("")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line: prints a Markdown page."""
    parser = argparse.ArgumentParser(
        prog="sandboxgym bench faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--image", help="a local Docker image, for the backend docker")
    parser.add_argument(
        "--backends", nargs="+", default=list(NAMES), choices=NAMES, help="backends to test (default: all)"
    )
    parser.add_argument("--kills", type=int, default=5, help="owners to kill per backend")
    parser.add_argument("--write", metavar="FILE", help="file to write the page to")
    parser.add_argument("--inside", nargs=3, metavar=("FAULT", "BACKEND", "ROOTFS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.inside:
        fault, backend, rootfs = arguments.inside
        if fault == "work":
            work(backend, rootfs)
        print(json.dumps(lose_the_daemon(rootfs) if fault == "daemon" else suffer(fault, backend, rootfs)))
        return
    lines = [
        *result_page.head("Sandboxes: faults", "faults", argv),
        f"{result_page.machine()}; {'root' if os.geteuid() == 0 else 'an ordinary user'}.",
        "",
        "Each fault happens to real sandboxes of one process, their owner. The last column counts what belonged to the",
        "owner: the most while it ran, and what was left after it ended or, if it was killed, after the next owner had",
        "started. *Survived*: the sandbox answered afterwards and could be restored to its earlier state; where an",
        "owner was killed, its remains were cleared.",
        "",
        *tables(arguments.backends, arguments.image, arguments.kills),
    ]
    result_page.publish(lines, arguments.write)


if __name__ == "__main__":
    main()
