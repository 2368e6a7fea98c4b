"""`SWEBenchEnv` with full snapshots: forks in which a server continues."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from components import missing

from sandboxgym.errors import SnapshotNotSupported
from sandboxgym.sandbox.checkpoint import criu
from sandboxgym.sandbox.sandbox import Sandbox
from sandboxgym.sandbox.snapshot import SandboxSnapshot

pytestmark = pytest.mark.slow

TASK = "northpine__slugline-4"
Maker = Callable[..., Any]
SERVE = "python3 -m http.server 8000 >/dev/null 2>&1 &"
GET = "python3 -c 'import urllib.request as r; print(r.urlopen(\"http://127.0.0.1:8000/note\").read().decode())'"


@pytest.fixture(scope="module", autouse=True)
def _criu(official_code: None) -> None:
    if reason := criu.why_unavailable():
        missing("criu", reason)


def output(step: tuple[Any, ...]) -> str:
    return str(step[0]).partition("<output>\n")[2].removesuffix("</output>").strip()


@pytest.mark.parametrize("snapshot", ["auto", "full"])
def test_a_server_is_forked_restored_and_graded(snapshot: str, make_env: Maker, tmp_path: Path) -> None:
    env = make_env(snapshot=snapshot, strict=True)
    assert env.unwrapped.snapshot_spec.processes
    env.reset(options={"instance_id": TASK})
    env.step(f"cd /tmp; echo first >note; {SERVE}")
    assert output(env.step(f"until {GET} 2>/dev/null; do sleep 0.05; done")) == "first"
    snap = env.snapshot()
    assert snap.kind == "full"
    with pytest.raises(SnapshotNotSupported, match="running processes"):
        snap.save(tmp_path / "snap")
    children = env.fork(2)
    for name, one in zip(("a", "b", "parent"), (*children, env)):
        one.step(f"echo {name} >note")
        step = one.step(GET)
        assert output(step) == name
        assert step[4]["lossy"] == []
    assert env.unwrapped.grade().reason == "no patch"
    assert output(env.step("kill %1; wait %1; echo $?")) == "143"
    env.restore(snap)
    assert output(env.step(GET)) == "first"
    children[0].close()
    assert output(children[1].step(GET)) == "b"
    children[1].close()


def test_forks_are_twins_unless_they_are_seeded(make_env: Maker) -> None:
    env = make_env(snapshot="full")
    env.reset(options={"instance_id": TASK})
    env.step("sandboxgym_reseed() { told=$1; }; sleep 1000 &")
    draw = "echo $RANDOM $RANDOM ${told:+told}"
    twins, seeded = env.fork(2), env.fork(2, seed=5)
    drawn = [output(one.step(draw)) for one in (*twins, *seeded)]
    assert drawn[0] == drawn[1] == output(env.step(draw))
    assert len({*drawn[1:]}) == 3
    assert [text.endswith("told") for text in drawn] == [False, False, True, True]
    for one in (*twins, *seeded):
        one.close()


def test_another_backend_is_refused(make_env: Maker) -> None:
    with pytest.raises(ValueError, match="snapshot='full' needs backend='overlay'"):
        make_env(snapshot="full", backend="docker")
    with pytest.raises(ValueError, match="snapshot: expected one of"):
        make_env(snapshot="everything")


def test_the_matrix_of_hidden_state(monkeypatch: pytest.MonkeyPatch) -> None:
    from sandboxgym.conformance.runner import run
    from sandboxgym.conformance.subject import Subject
    from sandboxgym.envs.swebench import conformance_hooks

    arguments = {"snapshot": "full", "instances": ["tally-12"]}
    subject = Subject.named(
        "sandboxgym/SWEBench-v0", arguments, actions=conformance_hooks.actions, shell=conformance_hooks.shell
    )
    taken, lost = Sandbox.snapshot, []  # what a snapshot could not hold is the reason if the test fails

    def snapshot(self: Sandbox, **options: Any) -> SandboxSnapshot:
        snap = taken(self, **options)
        lost.extend(snap.lossy)
        return snap

    monkeypatch.setattr(Sandbox, "snapshot", snapshot)
    report = run(subject, only=["probes.matrix"])
    assert {result.id: result.message for result in report.failures} == {}
    (result,) = [result for result in report.results if result.id == "probes.matrix"]
    rows = {row["probe"]: row["measured"] for row in result.evidence["matrix"]}
    for name in ("process.background", "process.server", "shell.descriptor", "identity.shell_pid", "shell.function"):
        assert rows[name] == "kept", (name, rows, lost)
