"""Declarations of state that snapshots cannot hold: sandboxes that declare it, and those that stay silent or break."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_probes import Sandbox, Taken, pytestmark, shell  # noqa: F401 - the mark is for this module too

from sandboxgym import SnapshotSpec
from sandboxgym.conformance import Subject, Verdict
from sandboxgym.conformance.check import Budget
from sandboxgym.conformance.runner import all_checks, run_check
from sandboxgym.conformance.sandbox_probes import declared_losses

INSIDE = ("traced", "other_user", "detached")
OUTSIDE = ("outer_tcp", "outer_unix", "outer_fifo")
"""All of these can be reached: the sandbox isolates nothing."""


class Honest(Sandbox):
    """Processes go on after the command that started them, and a snapshot says that it does not hold them."""

    snapshot_spec = SnapshotSpec(kind="full", cost="written", rng=False, processes=True)
    everything: list[Path] = []

    def folder(self) -> Path:
        self.everything.append(super().folder())
        return self.everything[-1]

    def step(self, action: str) -> Any:
        return ("", 0.0, False, False, {}) if action == "exit" else super().step(action)

    def after_command(self, group: int) -> None:
        pass

    def restore(self, snap: Taken, *, seed: int | None = None) -> Any:
        super().restore(snap, seed=seed)
        return "", {"lossy": ["all processes"]}

    def running(self) -> list[int]:
        """Those that tell their number below this sandbox's folder."""
        return [int(path.read_text()) for path in self.root.rglob("pid")]


class Silent(Honest):
    """The notice is dropped."""

    def restore(self, snap: Taken, *, seed: int | None = None) -> Any:
        super().restore(snap, seed=seed)
        return "", {}


class Undeclared(Silent):
    """Processes were never promised."""

    snapshot_spec = Sandbox.snapshot_spec


class Same(Silent):
    """A restored copy is the sandbox itself."""

    def restore(self, snap: Taken, *, seed: int | None = None) -> Any:
        self.root, self.cwd, self.variables = snap.folder, snap.cwd, dict(snap.variables)
        return "", {}

    def snapshot(self) -> Taken:
        return Taken(self.root, self.cwd, dict(self.variables))


class Harmful(Honest):
    """The attempt to capture the processes ends them."""

    def snapshot(self) -> Taken:
        for pid in self.running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                while state(pid) not in "ZX":
                    pass
        return super().snapshot()


class NotPossible(Exception):
    """A sandbox's own."""


class Refusing(Honest):
    """No snapshot while anything runs."""

    error: type[Exception] = NotPossible

    def snapshot(self) -> Taken:
        if self.running():
            raise self.error("something runs")
        return super().snapshot()


class Crashing(Refusing):
    """The same, by accident."""

    error = KeyError


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    yield
    for folder in Honest.everything:
        assert not folder.exists()
    Honest.everything.clear()


def measured(make: Any, kinds: tuple[str, ...], **hooks: Any) -> tuple[Any, dict[str, str]]:
    chosen = tuple(snag for snag in declared_losses.SNAGS if snag.kind in kinds)
    (check,) = all_checks(only=["probes.losses"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(declared_losses, "SNAGS", chosen)
        result = run_check(check, Subject(make, shell=shell, **hooks), Budget.named("quick"), 0)
    return result, {row["probe"].removeprefix("snag."): row["measured"] for row in result.evidence.get("matrix", ())}


def expected(kinds: tuple[str, ...], word: str) -> dict[str, str]:
    usable = os.geteuid() == 0
    return {kind: "skipped" if kind == "other_user" and not usable else word for kind in kinds}


def test_what_is_declared_passes() -> None:
    result, found = measured(Honest, INSIDE + OUTSIDE)
    assert result.verdict is Verdict.PASS, result.message
    assert found == expected(INSIDE + OUTSIDE, "declared")


def test_a_dropped_notice_fails() -> None:
    result, found = measured(Silent, ("traced", "outer_tcp"))
    assert found == {"traced": "silent", "outer_tcp": "silent"}
    assert result.verdict is Verdict.FAIL and "silent: traced (the copy says: no such process)" in result.message


def test_processes_that_were_not_promised_are_no_silent_loss() -> None:
    assert measured(Undeclared, ("traced",))[1] == {"traced": "declared"}


def test_a_connection_cannot_be_kept_twice() -> None:
    result, found = measured(Same, ("outer_fifo", "traced"))
    assert found == {"outer_fifo": "silent", "traced": "kept"}
    assert "two of them cannot have one connection" in result.message


def test_a_sandbox_that_does_not_go_on_fails() -> None:
    result, found = measured(Harmful, ("traced",))
    assert found == {"traced": "harmed"}
    assert result.verdict is Verdict.FAIL


def test_only_an_error_of_its_own_is_a_refusal() -> None:
    assert measured(Refusing, ("traced",))[1] == {"traced": "refused"}
    result, found = measured(Crashing, ("traced",))
    assert found == {"traced": "crashed"} and "KeyError" in result.message


def test_a_hook_tells_of_losses() -> None:
    found = measured(Silent, ("traced",), lossy=lambda env, snap: [f"the processes of {snap.folder.name[:6]}"])[1]
    assert found == {"traced": "declared"}


def test_what_cannot_be_set_up_is_skipped_with_the_reason() -> None:
    result, _ = measured(Sandbox, ("traced",))  # all ends with its command
    assert result.verdict is Verdict.SKIP
    assert result.message.startswith("nothing could be set up, such as traced: ")


@pytest.mark.skipif(sys.platform != "linux", reason="bash on Linux")
def test_every_kind_is_there_or_has_a_reason() -> None:
    _, found = measured(Honest, tuple(snag.kind for snag in declared_losses.SNAGS))
    assert found.keys() == set(declared_losses.uncapturable.MAKERS)
    assert set(found.values()) <= {"declared", "skipped"}
