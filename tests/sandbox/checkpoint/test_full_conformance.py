"""The conformance suite's probes on sandboxes with full snapshots, and on some that are almost full."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from sandboxgym.bench.fidelity import Terminal
from sandboxgym.conformance import Subject, Verdict
from sandboxgym.conformance.check import Budget, Result
from sandboxgym.conformance.checks.sandbox import probes
from sandboxgym.conformance.runner import all_checks, run_check
from sandboxgym.conformance.sandbox_probes import process_state
from sandboxgym.conformance.sandbox_probes.shell import MARK, NEEDS_PROCESSES, PROBES
from sandboxgym.core import SnapshotSpec
from sandboxgym.sandbox.sandbox import Sandbox, make_sandbox
from sandboxgym.sandbox.snapshot import SandboxSnapshot

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's"),
    pytest.mark.usefixtures("criu_found"),
]


class Whole(Terminal):
    """A sandbox that is captured with its processes."""

    snapshot_spec = SnapshotSpec(kind="full", cost="written", processes=True, rng=False, cross_process=False)

    def __init__(self, network: bool = False) -> None:
        super().__init__("overlay", "host")
        self.network = network

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox; made when it is first needed."""
        if self._sandbox is None:
            self._sandbox = make_sandbox("overlay", network=self.network, snapshot="full", env={"PAGER": "cat"})
        return self._sandbox


class Torn(Whole):
    """The files are of a later instant than the processes: one more line was written to the log."""

    def _apply(self, state: SandboxSnapshot) -> None:
        super()._apply(state)
        log = f"/root/{MARK}/process.log.log"
        self.sandbox.run(f"if [ -e {log} ]; then n=$(tail -n 1 {log}); echo $((n + 1)) >>{log}; fi")


class Drained(Whole):
    """Fault: bytes on their way in pipes and connections, and locks, are lost: all descriptors are closed."""

    def _apply(self, state: SandboxSnapshot) -> None:
        super()._apply(state)
        self.sandbox.run(f"cd /root/{MARK}/held && echo 'os.closerange(3, 500)' 1<>in")


class Unreported(Whole):
    """Falls back to files without saying so."""

    immutable_state = True

    def _capture(self) -> SandboxSnapshot:
        snap = super()._capture()
        snap.lossy = ()
        return snap


def probed(id: str, make: Any, names: Iterable[str] = (), **hooks: Any) -> tuple[Result, dict[str, str]]:
    (check,) = all_checks(only=[id])
    chosen = tuple(probe for probe in PROBES if not names or probe.name.startswith(tuple(names)))
    subject = Subject(make, shell=lambda env, command: str(env.step(command)[0]), **hooks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probes, "PROBES", chosen)
        patch.setattr(probes.measure, "__defaults__", (chosen,))
        result = run_check(check, subject, Budget.named("quick"), 0)
    return result, {row["probe"]: row["measured"] for row in result.evidence.get("matrix", ())}


def lost(env: Any, snap: Any) -> tuple[str, ...]:
    return env.sandbox.lost


def test_all_that_runs_is_kept() -> None:
    result, found = probed("probes.matrix", Whole)
    assert result.verdict is Verdict.PASS, result.message
    assert {f"held.{name}" for name in process_state.MAKERS} <= found.keys()
    running = {name: found[name] for name in found if name.startswith((*NEEDS_PROCESSES, "shell.", "identity.shell"))}
    assert set(running.values()) == {"kept"}, running


def test_files_of_another_instant_are_found_out() -> None:
    result, found = probed("probes.matrix", Torn, ("process.background", "process.log", "file.content"))
    assert found == {"process.background": "kept", "process.log": "lost", "file.content": "kept"}
    assert result.verdict is Verdict.FAIL and result.message == "declared and lost: process.log"


def test_lost_queues_and_files_are_found_out() -> None:
    result, found = probed("probes.matrix", Drained, ("process.background", "process.repl", "held."))
    kept = {name.removeprefix("held.") for name, state in found.items() if state == "kept"}
    assert kept == {"process.background", "process.repl", "memory", "random", "shared_memory", "pid", "threads"}
    assert result.verdict is Verdict.FAIL


def test_what_cannot_be_captured_is_declared() -> None:
    result, found = probed("probes.losses", lambda: Whole(network=True), lossy=lost)
    assert result.verdict is Verdict.PASS, result.message
    other_user = found.pop("snag.other_user")
    assert other_user in ("kept", "declared")
    assert found == {
        **dict.fromkeys(("snag.io_uring", "snag.outer_fifo"), "skipped"),
        **dict.fromkeys(("snag.user_namespace", "snag.pid_namespace", "snag.net_namespace"), "skipped"),
        **dict.fromkeys(("snag.outer_tcp", "snag.outer_unix", "snag.traced", "snag.detached"), "declared"),
    }
    seen = {row["probe"]: row["seen"] for row in result.evidence["matrix"]}
    assert "Operation not permitted" in seen["snag.io_uring"]
    assert "one outside" in seen["snag.outer_unix"]


def test_a_silent_fallback_is_found_out() -> None:
    result, found = probed("probes.losses", Unreported, lossy=lost)
    assert found["snag.traced"] == found["snag.detached"] == "silent"
    assert result.verdict is Verdict.FAIL


def test_without_processes_the_losses_are_those_that_are_declared() -> None:
    class Files(Whole):
        snapshot_spec = replace(Whole.snapshot_spec, kind="filesystem", processes=False)
        immutable_state = True

        def _capture(self) -> SandboxSnapshot:
            return self.sandbox.snapshot(mode="filesystem")

    result, found = probed("probes.matrix", Files, NEEDS_PROCESSES)
    assert result.verdict is Verdict.PASS, result.message
    assert set(found.values()) == {"lost", "kept"}
    assert {name for name in found if found[name] == "kept"} == {"process.later"}
