"""A run is watched from another process: no environment can prevent its end and its report."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sandboxgym.conformance.__main__ import main
from sandboxgym.conformance.check import Verdict
from sandboxgym.conformance.runner import all_checks
from sandboxgym.conformance.supervision import janitor, supervised
from sandboxgym.system import run_directories

HERE = Path(__file__).parent
CALL_LIMIT = ["--call-limit", "30"]
"""Far more than a start takes on a busy machine: what hangs here hangs for ever."""


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))


def certified(target, *arguments, status, tmp_path):
    """The results by id, and the whole report."""
    file = tmp_path / "report.json"
    assert main([f"unruly:{target}", "--quiet", "--json", str(file), *arguments]) == status
    report = json.loads(file.read_text())
    return {result["id"]: result for result in report["results"]}, report


@pytest.mark.slow
def test_a_correct_environment_has_the_report_of_a_run_in_process(tmp_path, capsys):
    only = ["--only", "api.protocol,restore.trace_equality,fork.invalid", "--strength"]
    watched, report = certified("Counter", *only, status=0, tmp_path=tmp_path)
    inside, other = certified("Counter", *only, "--in-process", status=0, tmp_path=tmp_path)
    assert list(watched) == list(inside) and report["strength"]["fields"] == other["strength"]["fields"] == 2
    assert {id: result["verdict"] for id, result in watched.items()} == dict.fromkeys(watched, "PASS")
    for name in ("target", "capabilities", "budget", "levels", "seed", "versions"):
        assert report[name] == other[name]


@pytest.mark.slow
def test_a_check_of_arguments_sees_those_of_the_factory(tmp_path):
    only = ["--only", "fork.arguments,durable.mismatch"]
    watched, _ = certified("Adjustable", *only, status=0, tmp_path=tmp_path)
    inside, _ = certified("Adjustable", *only, "--in-process", status=0, tmp_path=tmp_path)
    for id, result in inside.items():
        assert result["verdict"] == watched[id]["verdict"] == "PASS"
        assert "start=1 instead of 0" in str(result["evidence"]) and result["evidence"] == watched[id]["evidence"]


@pytest.mark.slow
@pytest.mark.parametrize(("target", "where"), [("Hangs", "restore"), ("HangsWhenMade", "__init__")])
def test_a_call_that_never_returns(target, where, tmp_path):
    only = ["--only", "api.protocol,restore.many"]
    found, _ = certified(target, *only, *CALL_LIMIT, status=1, tmp_path=tmp_path)
    assert found["api.protocol"]["verdict"] == "FAIL" and found["restore.many"]["verdict"] == "SKIP"
    assert f"no call returned within 30 s; it was in {where} (unruly.py" in found["api.protocol"]["message"]


@pytest.mark.slow
def test_a_crash_is_the_finding(tmp_path):
    found, report = certified("Aborts", "--only", "api.protocol,restore.many", status=1, tmp_path=tmp_path)
    message = found["api.protocol"]["message"]
    assert "ended by SIGABRT" in message and "step (unruly.py" in message
    assert "unruly.py" in found["api.protocol"]["evidence"]["traceback"]
    assert found["restore.many"]["message"].startswith("not run: ") and report["exit_code"] == 1


@pytest.mark.slow
def test_after_a_crash_the_other_checks_run(tmp_path):
    only = "api.protocol,restore.many,fork.invalid,fork.crowd,fork.deepcopy,durable.round_trip"
    found, report = certified("AbortsInCrowds", "--only", only, status=1, tmp_path=tmp_path)
    assert {id for id, result in found.items() if result["verdict"] != "PASS"} == {"fork.crowd"}
    assert "ended by SIGABRT" in found["fork.crowd"]["message"]
    assert report["capabilities"]["kind"] == "memory"


@pytest.mark.slow
def test_too_many_crashes_end_the_run(tmp_path):
    only = "restore.many,fork.trace_equality,fork.isolation,fork.close_order,fork.diverge,fork.crowd"
    found, _ = certified("AbortsAlways", "--only", only, status=1, tmp_path=tmp_path)
    verdicts = [result["verdict"] for result in found.values()]
    assert verdicts.count("FAIL") == supervised.DEATHS and found["restore.many"]["verdict"] == "PASS"
    skipped = [result["message"] for result in found.values() if result["verdict"] == "SKIP"]
    assert skipped and all("had to be ended for the 3. time" in message for message in skipped)


@pytest.mark.slow
def test_leaving_the_interpreter_is_no_pass(tmp_path):
    found, _ = certified("Leaves", "--only", "api.protocol", status=1, tmp_path=tmp_path)
    assert "ended with exit status 0" in found["api.protocol"]["message"]


def test_sys_exit_ends_its_check_only(tmp_path):
    only = ["--only", "restore.many,fork.isolation,durable.round_trip", "--in-process"]
    found, _ = certified("Exits", *only, status=1, tmp_path=tmp_path)
    assert {id: result["verdict"] for id, result in found.items()} == {
        "restore.many": "PASS",
        "fork.isolation": "FAIL",
        "durable.round_trip": "PASS",
    }
    assert "SystemExit" in found["fork.isolation"]["message"]


@pytest.mark.slow
def test_what_is_printed_is_no_part_of_the_report(capfd):
    assert main(["unruly:Talks", "--quiet", "--only", "api.protocol", "--json", "-"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["counts"]["PASS"] == 1 and "a step was taken" in err


@pytest.mark.slow
def test_a_flood_of_output_ends_the_run(capfd):
    report = supervise("Prints", "api.protocol", output=32 << 20)
    assert report["api.protocol"].verdict is Verdict.FAIL
    assert "more than 32 MiB were printed" in report["api.protocol"].message
    assert len(capfd.readouterr().err) < 2 * supervised.SHOWN


@pytest.mark.slow
def test_too_much_memory_is_inconclusive(tmp_path):
    only = "api.protocol,restore.nested,fork.crowd"
    found, report = certified("Large", "--only", only, "--memory-limit", "0.625", status=2, tmp_path=tmp_path)
    assert found["api.protocol"]["verdict"] == "PASS" and found["fork.crowd"]["verdict"] == "INCONCLUSIVE"
    assert "more than 640 MiB of memory were held" in found["fork.crowd"]["message"]
    assert report["exit_code"] == 2


@pytest.mark.slow
def test_a_snapshot_that_is_too_large_is_the_finding_and_bounds_hold(tmp_path, monkeypatch):
    """A quarter of the limit each. Beyond it is only what is taken between two looks at the memory."""
    monkeypatch.setenv("UNRULY_MIB", "128")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), *sys.path]))
    file, begun, peak = tmp_path / "report.json", time.monotonic(), 0
    command = [
        sys.executable,
        "-m",
        "sandboxgym.conformance",
        "unruly:TwoGigabytes",
        "--quiet",
        "--memory-limit",
        "0.5",
    ]
    process = subprocess.Popen([*command, "--level", "1", "--json", str(file)], stdout=subprocess.PIPE, text=True)
    while process.poll() is None:
        peak = max(peak, supervised.memory([process.pid, *supervised.offspring(process.pid)]))
        time.sleep(0.05)
    assert process.wait() == 2 and time.monotonic() - begun < 300
    assert 0.75 * 2**29 < peak < 2 * 2**29
    report = json.loads(file.read_text())
    large = "more than 512 MiB of memory were held, where a snapshot takes 128 MiB"
    ended = [result for result in report["results"] if result["verdict"] == "INCONCLUSIVE"]
    assert len(ended) == supervised.DEATHS and all(large in result["message"] for result in ended)
    left = [result["message"] for result in report["results"] if result["message"].startswith("not run: ")]
    total = len(report["results"])
    headline = (
        f"Not certified: {len(left)} of {total} checks did not run, for {ended[-1]['id']} had to be ended for the 3. "
    )
    assert left and f"{headline}time ({large})" in process.communicate()[0]


@pytest.mark.slow
def test_processes_of_a_killed_run_are_ended(tmp_path, monkeypatch):
    pid = tmp_path / "pid"
    monkeypatch.setenv("UNRULY_PID", str(pid))
    certified("LeavesAChild", "--only", "api.protocol", *CALL_LIMIT, status=1, tmp_path=tmp_path)
    assert until(lambda: gone(int(pid.read_text())))


@pytest.mark.slow
def test_a_terminated_run_leaves_nothing(tmp_path, monkeypatch):
    pid = tmp_path / "pid"
    environment = {**os.environ, "UNRULY_PID": str(pid), "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    command = [sys.executable, "-m", "sandboxgym.conformance", "unruly:LeavesAChild", "--quiet"]
    process = subprocess.Popen(command, env=environment)
    while not (pid.exists() and pid.read_text()):
        assert process.poll() is None
        time.sleep(0.1)
    (child,) = supervised.offspring(process.pid)[:1]
    time.sleep(2 * supervised.TICK)  # in which it looks for processes
    process.terminate()
    assert process.wait() == 128 + 15
    for number in (child, int(pid.read_text())):
        assert until(lambda number=number: gone(number))


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["the watching process", "the run", "a run that nobody watches"])
def test_a_killed_run_leaves_nothing(killed, tmp_path, monkeypatch):
    """Not its folders, nor run directories that the environment claimed in them."""
    temporary, told = tmp_path / "tmp", tmp_path / "told"
    temporary.mkdir()
    for name, value in {"TMPDIR": temporary, "UNRULY_PID": told}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("SANDBOXGYM_RUNTIME", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), *sys.path]))
    inside = ["--in-process"] if killed == "a run that nobody watches" else []
    command = [sys.executable, "-m", "sandboxgym.conformance", "unruly:WaitsInAFolder", "--quiet", *inside]
    process = subprocess.Popen([*command, "--only", "resources.dropped"])
    while not (told.exists() and told.read_text()):
        assert process.poll() is None
        time.sleep(0.1)
    (folder,) = temporary.glob("sandboxgym-conformance-*")
    assert folder in Path(told.read_text()).parents
    children = supervised.offspring(process.pid)
    os.kill(next(each for each in children if runs(each)) if killed == "the run" else process.pid, signal.SIGKILL)
    assert process.wait(300) == (1 if killed == "the run" else -signal.SIGKILL)
    if inside:
        assert folder.exists()
        run_directories.reap(temporary / f"sandboxgym-{os.getuid()}")
    assert until(lambda: not folder.exists() and not list(temporary.glob("sandboxgym-*/[!.]*")))
    assert until(lambda: not any(map(supervised.started, children)))


def gone(pid):
    """True if a process has ended, if only as a zombie of somebody else's."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def runs(pid):
    """True if a process runs the suite, rather than waits for another's end."""
    return "python" in Path(f"/proc/{pid}/comm").read_text()


def until(condition, seconds=300):
    end = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.1)
    return met


@pytest.mark.slow
def test_what_cannot_be_made_is_told(capsys):
    for target in ("unruly:nothing", "no/Such-v0", "nonsense"):
        assert main([target, "--quiet"]) == 3
        assert "error: " in capsys.readouterr().err


def supervise(target, only, **limits):
    """A watched run with other limits."""
    arguments = [f"unruly:{target}", "--only", only]
    made = supervised.Limits(**limits)
    return supervised.supervise(arguments, 1, all_checks(only=only.split(",")), name=target, limits=made)


def test_wrong_limits_are_refused():
    for wrong in ("0", "-1", "nan", "inf", "x"):
        for option in ("--call-limit", "--memory-limit"):
            with pytest.raises(SystemExit) as caught:
                main(["unruly:Counter", option, wrong])
            assert caught.value.code == 3


def test_the_place_is_that_of_the_environment():
    library = os.path.dirname(os.__file__)
    trace = (
        "Fatal Python error: Aborted\n\n"
        'Thread 0x1 (most recent call first):\n  File "/a/b.py", line 1 in worker\n\n'
        f'Current thread 0x2 (most recent call first):\n  File "{library}/threading.py", line 9 in wait\n'
        '  File "/home/me/mine.py", line 32 in restore\n  File "/x/sandboxgym/conformance/subject.py", line 5 in put\n'
    )
    assert supervised._place(trace) == "restore (mine.py, line 32)"
    assert supervised._place("") == ""


def test_memory_and_offspring_are_those_of_the_processes():
    child = subprocess.Popen(
        [sys.executable, "-c", "x = bytearray(64 << 20); print(flush=True); input()"], stdin=-1, stdout=-1
    )
    try:
        assert child.stdout is not None and child.stdout.readline()
        assert child.pid in supervised.offspring(os.getpid())
        assert supervised.memory([child.pid]) > 64 << 20
        assert supervised.started(child.pid) and supervised.available() > 1 << 20
    finally:
        child.communicate(b"\n")
    assert supervised.started(child.pid) == "" and supervised.memory([child.pid]) == 0


def test_what_has_the_id_of_an_ended_process_is_none_of_the_run():
    sleeper = subprocess.Popen(["sleep", "1000"])
    try:
        child = object.__new__(supervised._Child)
        child.process = sleeper
        other = os.getppid()
        child.kin = {other: "of a process that has ended", os.getpid(): supervised.started(os.getpid())}
        child.look()
        assert other not in child.kin and os.getpid() in child.kin
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_process_that_ends_while_it_is_looked_at_has_no_offspring():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert janitor.offspring(child.pid) == []
    inner = subprocess.Popen(["sh", "-c", "sleep 30 & wait"])
    try:
        while not (found := janitor.offspring(inner.pid)):
            time.sleep(0.01)
        assert found and set(found) <= set(janitor.offspring(os.getpid()))
    finally:
        inner.terminate()
        inner.wait()
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)


@pytest.mark.parametrize("error", [FileNotFoundError, ProcessLookupError])
def test_a_process_that_ends_between_two_looks_has_no_offspring(monkeypatch, error):
    def gone(path):
        raise error(path)

    monkeypatch.setattr(os, "listdir", gone)
    monkeypatch.setattr(os, "scandir", gone)
    assert janitor.offspring(os.getpid()) == []
