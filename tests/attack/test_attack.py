"""The attacks detect leaking sandboxes, report what they could not try, and undo their changes."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from components import missing

from sandboxgym import attack as package
from sandboxgym.attack import BACKENDS, GROUPS, AttackReport, AttemptOutcome, attempts
from sandboxgym.attack import run as running
from sandboxgym.attack.attempt import Attempt, NotApplicable, blocked, leaves_open, passed, unlimited
from sandboxgym.attack.inside import answers
from sandboxgym.attack.prober import Prober, Reply
from sandboxgym.attack.run import chosen, made
from sandboxgym.cli import main
from sandboxgym.sandbox.base import Capabilities
from sandboxgym.sandbox.sandbox import make_sandbox

pytestmark = pytest.mark.xdist_group("attack")  # they load the machine, and look at what others leave

INSIDE = Path(package.__file__).parent / "inside"
CAPABILITIES = Capabilities("toy", True, True, True, "constant", frozenset({"memory"}), frozenset())


def stage(capabilities: Capabilities = CAPABILITIES, **more: Any) -> Any:
    """Stand-in for the stage of attempts, without a sandbox."""
    return SimpleNamespace(backend="toy", capabilities=capabilities, forget=lambda _: None, **more)


def attempt(run: Any, **more: Any) -> Attempt:
    return Attempt("escape/toy", "leaves the toy", run, **more)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_is_attacked_by_150_attempts_and_more(backend: str) -> None:
    found = Counter(one.group for one in chosen(backend, "*"))
    assert found.total() >= 150
    assert all(found[group] >= 20 for group in GROUPS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_parts_are_the_whole(backend: str) -> None:
    parts = [one for part in (*running.PARTS, "shared") for one in chosen(backend, "*", part)]
    assert sorted(one.name for one in parts) == sorted(one.name for one in chosen(backend, "*"))


def test_attempts_have_names_of_their_own_and_say_what_they_do() -> None:
    names = Counter(one.name for one in attempts())
    assert not [name for name, count in names.items() if count > 1]
    assert all(one.about and one.about[0].islower() and not one.about.endswith(".") for one in attempts())


def test_what_gets_through_has_passed_unless_the_backend_declares_it() -> None:
    leak = attempt(lambda _: passed("out"), declared=leaves_open("locks"))
    assert made(leak, stage()).verdict == "passed"
    open_ones = Capabilities(
        "toy", True, True, True, "constant", frozenset(), frozenset(), leaves_open=frozenset({"locks"})
    )
    assert made(leak, stage(open_ones)).verdict == "declared"
    assert (
        made(attempt(lambda _: blocked("EPERM"), declared=leaves_open("locks")), stage(open_ones)).verdict == "blocked"
    )


def test_a_limit_that_a_backend_does_not_hold_is_declared_and_not_tried() -> None:
    def never(_: Any) -> Any:
        raise AssertionError("it was tried")

    disk = attempt(never, declared=unlimited("disk"), tried_if_declared=False)
    assert made(disk, stage()).verdict == "declared"


@pytest.mark.parametrize("error", [NotApplicable("no Python"), OSError("no room"), package.run.ProberLost("gone")])
def test_what_could_not_be_made_is_not_blocked(error: Exception) -> None:
    def run(_: Any) -> Any:
        raise error

    outcome = made(attempt(run), stage())
    assert (outcome.verdict, str(error) in outcome.detail) == ("not applicable", True)


@pytest.mark.parametrize("verdict", ["absent", "late"])
def test_an_attempt_that_did_not_run_inside_is_not_blocked(verdict: str) -> None:
    with pytest.raises(NotApplicable):
        Reply(verdict, "it did not run", {}).seen()


def outcomes(*verdicts: str) -> tuple[AttemptOutcome, ...]:
    return tuple(AttemptOutcome("toy", f"escape/{n}", "escape", v, "leaves", "seen") for n, v in enumerate(verdicts))  # type: ignore[arg-type]


def test_the_status_tells_what_was_found() -> None:
    assert AttackReport(outcomes("blocked", "declared", "not applicable")).status == 0
    assert AttackReport(outcomes("blocked", "passed")).status == 1
    assert AttackReport(outcomes("not applicable")).status == 2
    assert AttackReport(()).status == 2


def test_the_report_names_what_passed_in_every_form() -> None:
    report = AttackReport(outcomes("blocked", "passed", "declared"))
    assert "escape/1 (toy): leaves: seen" in report.text()
    assert "escape/0 (" not in report.text() and "escape/0 (" in report.text(verbose=True)
    assert "| toy | escape | 1 | 1 | 1 | 0 |" in report.markdown()
    assert json.loads(report.json())["counts"]["toy"]["escape"] == {"blocked": 1, "passed": 1, "declared": 1}


def test_copy_is_declared_and_never_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "Stage", None)
    report = package.attack(["copy"], jobs=1)
    assert {outcome.verdict for outcome in report.outcomes} == {"declared"} and len(report.outcomes) >= 150


def test_the_program_inside_is_python_3_6_and_imports_nothing_else() -> None:
    import ast

    for source in INSIDE.glob("*.py"):
        tree = ast.parse(source.read_text(), feature_version=(3, 6))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                assert node.module and node.module.partition(".")[0] in sys.stdlib_module_names
            if isinstance(node, ast.Import):
                assert {name.name.partition(".")[0] for name in node.names} <= sys.stdlib_module_names


def test_an_attempt_that_hangs_or_is_killed_inside_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    import signal
    import time

    monkeypatch.setitem(answers.ATTEMPTS, "hang", lambda: time.sleep(60))
    monkeypatch.setitem(answers.ATTEMPTS, "die", lambda: os.kill(os.getpid(), signal.SIGSYS))
    assert json.loads(answers._run({"do": "hang", "seconds": 0.2})[0])["verdict"] == "late"
    assert json.loads(answers._run({"do": "die"})[0])["verdict"] == answers.REFUSED


def test_the_command_lists_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--list", "--attempt", "escape/device-full-*"]) == 0
    assert "escape/device-full-mode: changes the mode of the host's /dev/full" in capsys.readouterr().out
    assert main(["doctor", "--attack", "--backend", "nothing"]) == 2
    assert main(["doctor", "--attack", "--attempt", "nothing"]) == 2


def test_the_command_ends_with_the_status_of_what_it_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for verdict, status in (("blocked", 0), ("passed", 1), ("not applicable", 2)):
        monkeypatch.setattr(package, "attack", lambda *_, found=verdict, **__: AttackReport(outcomes(found)))
        assert main(["doctor", "--attack", "--json"]) == status
        assert json.loads(capsys.readouterr().out)["status"] == status


@pytest.fixture
def overlay() -> str:
    from sandboxgym.sandbox.overlay.backend import why_unavailable

    kind = "overlay" if os.geteuid() == 0 else "overlay-rootless"
    if reason := why_unavailable(rootless=kind == "overlay-rootless"):
        missing("overlay", reason)
    return kind


def test_a_selection_is_made_on_overlay_and_what_it_changes_is_put_back(overlay: str) -> None:
    before = os.stat("/dev/full")
    report = package.attack([overlay], only="escape/[dmu]*", jobs=1)
    after = os.stat("/dev/full")
    assert stat.S_IMODE(after.st_mode) == stat.S_IMODE(before.st_mode)
    assert (after.st_uid, after.st_mtime_ns) == (before.st_uid, before.st_mtime_ns)
    by_name = {outcome.name: outcome for outcome in report.outcomes}
    assert by_name["escape/mount-tmpfs"].verdict == by_name["escape/unshare-user"].verdict == "blocked"
    assert len(report.outcomes) > 40


def test_a_sandbox_that_leaks_is_found_out(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program inside is run on the host: files, processes, ports and routes are then within reach."""

    class Leaky(Prober):
        def __init__(self, sandbox: Any, *, restored: bool = False) -> None:
            self.sandbox, self._pending = sandbox, b""
            self._process = subprocess.Popen(
                [sys.executable, "-m", "inside"],
                cwd=INSIDE.parent,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
            )
            self._requests = os.dup(self._process.stdin.fileno())
            self._process.stdin.close()
            self._answers = self._process.stdout.fileno()
            assert self._answer(300).verdict == "ready"

        def close(self) -> None:
            os.close(self._requests)
            self._process.wait()
            self._process.stdout.close()

    monkeypatch.setattr("sandboxgym.attack.stage.Prober", Leaky)
    for name in ("files-path-plain", "host-process-visible", "network-loopback", "network-abstract", "system-v-shm"):
        (outcome,) = package.attack([overlay], only=f"escape/{name}", jobs=1).outcomes
        assert outcome.verdict == "passed", outcome


def test_programs_of_attempts_side_by_side_answer_as_one(overlay: str) -> None:
    report = package.attack([overlay, "copy"], only="*/unshare-[mn]*")
    assert [(o.backend, o.verdict) for o in report.outcomes] == [(overlay, "blocked")] * 2 + [("copy", "declared")] * 2


def test_nothing_of_an_attack_is_left(overlay: str) -> None:
    code = f"""
from sandboxgym.attack import attack
report = attack([{overlay!r}], only="leftovers/[ck]*-plain", jobs=1)
assert [outcome.verdict for outcome in report.outcomes] == ["blocked"] * 2, report.outcomes
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    deadline = time.monotonic() + 300  # somebody else's attack has such files until it ends, a leak for ever
    while names := [name for name in os.listdir("/dev/shm") if name.startswith("sandboxgym-attack-")]:
        assert time.monotonic() < deadline, names
        time.sleep(0.2)


@pytest.mark.parametrize("what", ["message queues", "shared memory segments"])
def test_what_the_host_is_asked_for_goes_with_who_asked(what: str) -> None:
    code = f"""
import ctypes, os, sys
from inside import answers, libc, shared
shared.THINGS[{what!r}]()
try:
    libc.check("mq_open", ctypes.create_string_buffer(b"attack-%d-1" % os.getpid()), os.O_RDWR, 0, None)
    sys.exit("the queue has a name")
except answers.AttemptAnswer as error:
    assert "ENOENT" in str(error)
    print(os.getpid())
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(package.__file__).parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    creators = [line.split()[4] for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]]
    assert done.stdout.strip() not in creators


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["overlay", "overlay-rootless", "full", "docker"])
def test_nothing_passes(backend: str) -> None:
    report = package.attack([backend], only=package.SAMPLE)
    if backend in report.unavailable:
        missing("docker" if backend == "docker" else "overlay", report.unavailable[backend])
    # What an owner was kept from by other tests of this machine, and not by an attack, does not pass by itself.
    again = [package.attack([backend], only=outcome.name) for outcome in report.named("passed")]
    assert not [f"{one.name}: {one.detail}" for found in again for one in found.named("passed")]


def test_the_sandbox_of_a_prober_may_lack_python(overlay: str) -> None:
    with make_sandbox(overlay, env={"PATH": "/nowhere:/usr/local/none"}) as sandbox, pytest.raises(NotApplicable):
        sandbox.run = lambda *_, **__: SimpleNamespace(output="")  # type: ignore[method-assign,assignment]
        Prober(sandbox)
