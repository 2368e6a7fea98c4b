"""The hidden-state probes on a real sandbox of files and a shell: a correct one, and faulty ones."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from sandboxgym import ResetNeeded, SnapshotSpec, Unicode
from sandboxgym.conformance import Subject, Verdict
from sandboxgym.conformance.check import Budget
from sandboxgym.conformance.runner import all_checks, run_check
from sandboxgym.conformance.sandbox_probes.shell import MARK, PROBES, Probe, parse, same, script

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("bash"), reason="the sandbox is bash on Linux"
)


PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
OURS = f"probed-sandbox-{os.getpid()}-"  # other workers make their own


@dataclass
class Taken:
    folder: Path
    cwd: str
    variables: dict[str, str]


class Sandbox(gym.Env[str, str]):
    """bash in a directory of its own; the directory, the working directory and exported variables are captured.

    Every command is a bash of its own, which ends with all that it started. Paths below ``/dev/shm`` are in the
    directory, too: a stand-in for a mount.
    """

    snapshot_spec: Any = SnapshotSpec(kind="filesystem", cost="written", rng=False)
    copy = ("cp", "-a")

    def __init__(self) -> None:
        self.action_space = self.observation_space = Unicode(("ls",))
        self.folders: list[Path] = []
        self.root: Path | None = None

    def folder(self) -> Path:
        path = Path(tempfile.mkdtemp(prefix=OURS))
        self.folders.append(path)
        return path

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.close()
        self.root = self.folder()
        self.cwd, self.variables = "work", {}
        for name in ("work", "tmp", "shm"):
            (self.root / name).mkdir()
        return "", {}

    def temporary(self) -> str:
        return f"{self.root}/tmp"

    def step(self, action: str):
        saved = self.root / "shell"
        tail = f'\n__status=$?\npwd > "{saved}"; env -0 >> "{saved}"; exit $__status'
        process = subprocess.Popen(
            ["bash", "-c", action.replace("/dev/shm/", f"{self.root}/shm/") + tail],
            cwd=self.root / self.cwd,
            env={"PATH": PATH, "HOME": str(self.root), "TMPDIR": self.temporary(), **self.variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        output = process.communicate(timeout=300)[0].decode(errors="replace")
        self.after_command(process.pid)
        folder, _, variables = saved.read_bytes().partition(b"\n")
        saved.unlink()
        self.cwd = os.path.relpath(folder.decode(), self.root)
        own = {"PATH", "HOME", "TMPDIR", "PWD", "SHLVL", "_", "OLDPWD"}
        pairs = [item.decode(errors="replace").partition("=") for item in variables.split(b"\0") if item]
        self.variables = {name: value for name, _, value in pairs if name not in own}
        return output, 0.0, False, False, {}

    def after_command(self, group: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)

    def snapshot(self) -> Taken:
        if self.root is None:
            raise ResetNeeded("no episode")
        folder = self.folder()
        subprocess.run([*self.copy, f"{self.root}/.", str(folder)], check=True)
        return Taken(folder, self.cwd, dict(self.variables))

    def restore(self, snap: Taken, *, seed: int | None = None):
        if self.root is not None:
            shutil.rmtree(self.root, ignore_errors=True)
        self.root = self.folder()
        subprocess.run([*self.copy, f"{snap.folder}/.", str(self.root)], check=True)
        self.cwd, self.variables = snap.cwd, dict(snap.variables)
        return "", {}

    def fork(self, k: int, *, seed: int | None = None) -> list[Sandbox]:
        snap = self.snapshot()
        children = [type(self)() for _ in range(k)]
        for child in children:
            child.restore(snap)
        return children

    def close(self) -> None:
        while self.folders:
            shutil.rmtree(self.folders.pop(), ignore_errors=True)


class Careless(Sandbox):
    """Modes and times of files, links, and what was deleted are lost."""

    copy = ("cp", "-r", "-L", "--no-preserve=all")

    def restore(self, snap: Taken, *, seed: int | None = None):
        if self.root is None:
            self.root = self.folder()
        subprocess.run([*self.copy, f"{snap.folder}/.", str(self.root)], check=False, stderr=subprocess.DEVNULL)
        self.cwd, self.variables = "work", dict(snap.variables)
        return "", {}

    def snapshot(self) -> Taken:
        folder = self.folder()
        command = [*self.copy, f"{self.root}/.", str(folder)]
        subprocess.run(command, check=False, stderr=subprocess.DEVNULL, timeout=60)
        return Taken(folder, self.cwd, dict(self.variables))


class Shared(Sandbox):
    """All of them have one temporary directory, and one table of processes, which go on after a command."""

    groups: list[int] = []
    everything: list[Path] = []
    common = ""

    def folder(self) -> Path:
        path = super().folder()
        self.everything.append(path)
        return path

    def temporary(self) -> str:
        return self.common

    def after_command(self, group: int) -> None:
        self.groups.append(group)


class Boastful(Sandbox):
    """Declares processes captured, though functions of the shell are gone with the next command; and clocks."""

    snapshot_spec = SnapshotSpec(kind="full", cost="written", rng=False, clock=True)


def shell(env: Any, command: str) -> str:
    return env.step(command)[0]


def probed(make: Callable[[], Any], **hooks: Any) -> Any:
    (check,) = all_checks(only=["probes.matrix"])
    return run_check(check, Subject(make, shell=shell, **hooks), Budget.named("quick"), 0)


def states(result: Any) -> dict[str, str]:
    return {row["probe"]: row["measured"] for row in result.evidence["matrix"]}


@pytest.fixture(scope="module")
def correct() -> Any:
    return probed(Sandbox)


def left_behind() -> set[str]:
    shm = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    return {name for name in {*os.listdir(tempfile.gettempdir()), *shm} if MARK in name or name.startswith(OURS)}


@pytest.fixture(autouse=True)
def _leaves_nothing():
    before = left_behind()
    yield
    left = left_behind() - before
    until = time.monotonic() + 300
    while left and time.monotonic() < until:  # other workers leave such marks for a moment
        time.sleep(0.1)
        left &= left_behind()
    assert not left


def test_a_correct_sandbox_passes_with_its_matrix(correct):
    result = correct
    assert result.verdict is Verdict.PASS, result.message
    found = states(result)
    for probe in ("file.content", "file.mode", "file.mtime", "file.symlink", "file.hardlink", "file.special_names",
                  "directory.empty", "directory.deleted_file", "directory.replaced", "file.tmp", "file.shm",
                  "shell.cwd", "shell.exported", "shell.timezone"):  # fmt: skip
        assert found[probe] == "kept", probe
    assert found["file.ctime"] == found["clock.wall"] == "lost"  # neither is declared
    assert {"file.ctime", "clock.wall"} <= set(result.evidence["lost and not declared"])
    assert found["shell.function"] == found["process.background"] == "n/a"  # ends with the command that made it
    assert not result.evidence["leaked"]


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_a_repository_is_kept_with_index_stash_and_reflog(correct):
    found = states(correct)
    assert found["git.index"] == found["git.history"] == "kept"


def test_what_is_declared_and_lost_fails_by_name():
    result = probed(Careless)
    assert result.verdict is Verdict.FAIL
    lost = result.message.partition("declared and lost: ")[2]
    for probe in ("file.mode", "file.mtime", "file.symlink", "directory.empty", "directory.replaced", "shell.cwd"):
        assert probe in lost
    assert "file.content" not in lost and "shell.exported" not in lost
    assert "shell(env0, " in result.counterexample


def test_what_is_said_to_be_lost_may_be_lost():
    lost = probed(Careless).message.partition("declared and lost: ")[2].partition(";")[0].split(", ")
    result = probed(Careless, declared=dataclasses.replace(Careless.snapshot_spec, loses=tuple(lost)))
    assert result.verdict is Verdict.PASS, result.message
    assert set(lost) <= set(result.evidence["lost and not declared"])


@pytest.mark.slow
def test_leaks_between_siblings_fail_by_name(tmp_path):
    Shared.common = str(tmp_path)
    try:
        result = probed(Shared)
    finally:
        for group in Shared.groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        for folder in Shared.everything:  # its processes went on writing while it was closed
            shutil.rmtree(folder, ignore_errors=True)
        Shared.groups.clear(), Shared.everything.clear()
    assert result.verdict is Verdict.FAIL
    leaked = result.evidence["leaked"]
    assert {"file.tmp", "process.background"} <= set(leaked)
    assert "file.content" not in leaked and "file.shm" not in leaked
    assert result.message.startswith("leaks: ")


def test_a_clock_that_is_declared_and_goes_on_fails():
    result = probed(Boastful)
    assert result.verdict is Verdict.FAIL
    assert result.message == "declared and lost: clock.wall, clock.monotonic"


def test_without_a_shell_the_probes_are_skipped():
    (check,) = all_checks(only=["probes.matrix"])
    result = run_check(check, Subject(Sandbox), Budget.named("quick"), 0)
    assert result.verdict is Verdict.SKIP and "no shell hook" in result.message


def test_a_shell_that_understands_nothing_is_inconclusive():
    (check,) = all_checks(only=["probes.matrix"])
    result = run_check(check, Subject(Sandbox, shell=lambda env, command: "?"), Budget.named("quick"), 0)
    assert result.verdict is Verdict.INCONCLUSIVE


def test_names_are_unique_and_scripts_are_posix():
    assert len({probe.name for probe in PROBES}) == len(PROBES)
    for shell_name in ("sh", "bash"):
        if shutil.which(shell_name):
            for phase in ("prepare", "one", "two", "read"):
                text = script(PROBES, phase, "token")
                assert "@V@" not in text and "@N@" not in text and "@F@" not in text
                assert subprocess.run([shell_name, "-n"], input=text, text=True, capture_output=True).stderr == ""


def test_readings_are_parsed_with_their_lines():
    output = "noise\n\n@@a.one@\nfirst\nsecond\n\n@@a.two@\n\n@@@\n"
    assert parse(output) == {"a.one": "first\nsecond", "a.two": ""}


def test_a_clock_is_kept_when_it_goes_on_from_the_captured_moment():
    clock = Probe("clock.wall", "", "", need="clock")
    assert same(clock, "100.0", "100.2", 1.5)
    assert not same(clock, "100.0", "101.6", 1.5)
    assert not same(clock, "100.0", "", 1.5)
