"""Benchmark of fidelity: state that sandbox snapshots keep, lose and leak on every backend here, declared and measured.

sandboxgym bench fidelity [--image IMAGE] [--write docs/results/details/sandbox-fidelity.md]

The measurement is the conformance suite's (``conformance/checks/probes.py``): each piece of hidden state is changed by
a command before a snapshot and again after it, then read in forks, in a sibling that outlives a changed one, after a
restore, and in a sandbox of its own. It is taken twice: with only an idle shell, where files are frozen in place, and
with processes in the background, where they are copied. The worst result counts.
"""

from __future__ import annotations

import argparse
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sandboxgym.bench.tools import result_page
from sandboxgym.conformance.checks.sandbox.probes import ABSENT, DISTURBED, KEPT, LEAKED, LOST, Session, measure
from sandboxgym.conformance.harness.scenario import Scene
from sandboxgym.conformance.sandbox_probes import process_state
from sandboxgym.conformance.sandbox_probes.shell import NEEDS_PROCESSES, PROBES
from sandboxgym.conformance.subject import Subject
from sandboxgym.core import SnapshotEnv, SnapshotSpec
from sandboxgym.sandbox.backends import NAMES
from sandboxgym.sandbox.base import Capabilities, RootFS, SandboxUnavailable
from sandboxgym.sandbox.files.rootfs import resolve
from sandboxgym.sandbox.sandbox import Sandbox, make_sandbox
from sandboxgym.sandbox.snapshot import SandboxSnapshot
from sandboxgym.spaces import Unicode

REPORTED = "lost, reported"
"""Verdict on state that a snapshot names in its ``lossy``; with ``strict=True`` the snapshot is refused."""
_WORST = (LEAKED, DISTURBED, LOST, KEPT, ABSENT)


@dataclass(frozen=True, slots=True)
class Aspect:
    """A line of the matrix.

    Attributes:
        title: the state in words.
        probes: names of `PROBES`.
        keeps: the word of `Capabilities.keeps` that declares it kept.
        always: verdict declared of every backend, if there is one.
        outside: whether it lies where a backend without isolation has nothing to itself.
    """

    title: str
    probes: tuple[str, ...]
    keeps: str = ""
    always: str = ""
    outside: bool = False


ROWS = (
    Aspect("contents, symbolic links, pipes", ("file.content", "file.changed", "file.binary", "file.large",
        "file.symlink", "file.fifo"), always=KEPT),
    Aspect("modes", ("file.mode", "file.setgid"), "modes"),
    Aspect("owners", ("file.owner",), "owners"),
    Aspect("extended attributes", ("file.xattr",), "xattrs"),
    Aspect("hard links", ("file.hardlink",), "hardlinks"),
    Aspect("sparse files stay sparse", ("file.sparse",), "sparse"),
    Aspect("modification times", ("file.mtime",), "mtimes"),
    Aspect("deletions, replacements, renamed directories", ("directory.deleted_file", "directory.replaced",
        "directory.becomes_file", "directory.renamed"), always=KEPT),
    Aspect("empty directories", ("directory.empty",), always=KEPT),
    Aspect("odd names (new lines, bytes that are no text)", ("file.special_names",), always=KEPT),
    Aspect("/tmp", ("file.tmp",), "tmp"),
    Aspect("/dev/shm", ("file.shm",), "shm", outside=True),
    Aspect("git's index, reflog and stash", ("git.index", "git.history"), always=KEPT),
    Aspect("shell: directory, variables, functions, aliases, options, umask, limits", ("shell.cwd", "shell.exported",
        "shell.timezone", "shell.locale", "shell.variable", "shell.function", "shell.alias", "shell.option",
        "shell.ulimit", "shell.umask", "shell.trap"), always=KEPT),
    Aspect("background processes, servers", ("process.background", "process.server", "process.http", "process.log"),
        always=REPORTED, outside=True),
    Aspect("what a running program holds: memory, connections, deleted files, locks, …", ("process.repl",
        *(f"held.{name}" for name in process_state.MAKERS)), always=REPORTED),
    Aspect("processes started after the snapshot are gone", ("process.later",), always=KEPT),
    Aspect("open descriptors and jobs of the shell", ("shell.descriptor", "shell.offset", "shell.job"),
        always=REPORTED),
    Aspect("the shell's history", ("shell.history",), always=KEPT),
    Aspect("clocks are set back", ("clock.wall", "clock.monotonic"), always=LOST),
    Aspect("the sequence of `$RANDOM`", ("shell.random",), always=LOST),
)  # fmt: skip
"""Rows of the matrix. Nothing is declared of state without a row."""


def declared(row: Aspect, capabilities: Capabilities) -> str:
    """Declared fate of a row's state on a backend, in the words of `measured`."""
    if row.outside and not capabilities.isolated:
        return LEAKED
    if row.always:
        return row.always
    if row.keeps == "owners" and not capabilities.owners:
        return ABSENT
    return KEPT if row.keeps in capabilities.keeps else LOST


class Terminal(SnapshotEnv[str, str]):
    """A sandbox as an environment: actions are commands, observations their output."""

    snapshot_spec = SnapshotSpec(kind="filesystem", cost="written", rng=False, cross_host=False)
    immutable_state = True

    def __init__(self, backend: str, rootfs: RootFS | str) -> None:
        self.observation_space, self.action_space = Unicode(), Unicode(("true",))
        self._backend, self._rootfs = backend, rootfs
        self._sandbox: Sandbox | None = None

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox, made on first use."""
        if self._sandbox is None:
            env = {"PAGER": "cat"}
            self._sandbox = make_sandbox(self._backend, rootfs=self._rootfs, allow_unsafe=True, env=env)
        return self._sandbox

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an empty sandbox."""
        super().reset(seed=seed)
        self.close()
        return self.sandbox.execute("cd").output, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Run a command."""
        return self.sandbox.execute(action).output, 0.0, False, False, {}

    def close(self) -> None:
        """End the sandbox. Idempotent."""
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None

    def _capture(self) -> SandboxSnapshot:
        return self.sandbox.snapshot()

    def _apply(self, state: SandboxSnapshot) -> None:
        self.sandbox.restore(state)


def measured(backend: str, rootfs: RootFS | str = "host") -> dict[str, str]:
    """Measure the fate of each of `ROWS` on a backend: kept, lost (reported or not), leaked, disturbed, or n/a.

    Raises:
        SandboxUnavailable: it cannot run here.
    """
    subject = Subject(lambda: Terminal(backend, rootfs), shell=lambda env, command: str(env.step(command)[0]))
    quiet = [probe for probe in PROBES if not probe.name.startswith(NEEDS_PROCESSES)]
    found: dict[str, set[str]] = {}
    for probes in (quiet, PROBES):
        with Scene(subject) as scene:
            for result in measure(Session(subject, scene, secrets.token_hex(6)), probes):
                found.setdefault(result.probe.name, set()).add(result.measured)
    reported = _reported(backend, rootfs)
    outcomes = {}
    for row in ROWS:
        seen = set().union(*(found[name] - ({ABSENT} if len(found[name]) > 1 else set()) for name in row.probes))
        worst = next(state for state in _WORST if state in seen)
        outcomes[row.title] = REPORTED if worst == LOST and row.title in reported else worst
    return outcomes


def _reported(backend: str, rootfs: RootFS | str) -> set[str]:
    """Titles of the rows whose loss a snapshot reports."""
    with make_sandbox(backend, rootfs=rootfs, allow_unsafe=True) as sandbox:
        sandbox.execute("cd; sleep 100 & exec 8>descriptor")
        lossy = sandbox.snapshot().lossy
    seen = {"process.background": "background: ", "process.repl": "background: ", "shell.descriptor": "fd 8 -> "}
    said = {name for name, text in seen.items() if any(item.startswith(text) for item in lossy)}
    return {row.title for row in ROWS if said.intersection(row.probes)}


def matrix(backends: Sequence[str], image: str | None) -> list[str]:
    """Make the table, with the differences between declared and measured."""
    columns: dict[str, tuple[dict[str, str], Capabilities]] = {}
    left_out = []
    for backend in backends:
        rootfs = f"docker:{image}" if backend == "docker" else "host" if backend == "copy" else resolve("host")
        try:
            if backend == "docker" and not image:
                raise SandboxUnavailable("no image was given")
            with make_sandbox(backend, rootfs=rootfs, allow_unsafe=True) as sandbox:
                capabilities = sandbox.backend.capabilities
            columns[backend] = measured(backend, rootfs), capabilities
        except SandboxUnavailable as error:
            left_out.append(f"- `{backend}` was not measured: {error}.")
    lines = [f"| | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    differing = []
    for row in ROWS:
        cells = []
        for backend, (outcomes, capabilities) in columns.items():
            cell, expected = outcomes[row.title], declared(row, capabilities)
            if cell != expected:
                differing.append(f"- {backend}, {row.title}: declared {expected}, measured {cell}.")
            cells.append(f"{cell}, declared" if cell == expected and cell in (LOST, LEAKED) else cell)
        lines.append(f"| {row.title} | {' | '.join(cells)} |")
    return [*lines, "", *(differing or ["Nothing differs from what is declared."]), *left_out]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line: prints a Markdown page."""
    parser = argparse.ArgumentParser(
        prog="sandboxgym bench fidelity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--image", help="a local Docker image, for the backend docker")
    parser.add_argument(
        "--backends", nargs="+", default=list(NAMES), choices=NAMES, help="backends to measure (default: all)"
    )
    parser.add_argument("--write", metavar="FILE", help="file to write the page to")
    arguments = parser.parse_args(argv)
    lines = [
        *result_page.head("Sandboxes: what a snapshot keeps", "fidelity", argv),
        f"{result_page.machine()}; {'root' if os.geteuid() == 0 else 'an ordinary user'}.",
        "",
        "Each cell is the worst result of its row's probes: after a restore, in forks, in a sibling and in another",
        "sandbox; each with the files frozen (only an idle shell runs) and with the files copied (something runs",
        "beside it).",
        "",
        "- *kept*: the state is as it was. *lost, declared*: it is not, and the documentation of the backend says so.",
        "- *lost, reported*: each snapshot that loses it says so in `lossy`, or is refused with `strict=True`.",
        "- *leaked*: a change in one sandbox shows in another one, or after a restore. This happens only with `copy`,",
        "  which isolates nothing, says so, and is never chosen without `allow_unsafe=True`.",
        "- *n/a*: a command cannot change it on this backend (the sandbox has only one user).",
        "",
        *matrix(arguments.backends, arguments.image),
    ]
    result_page.publish(lines, arguments.write)


if __name__ == "__main__":
    main()
