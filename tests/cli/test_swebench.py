"""``sandboxgym swebench``: rows are prepared, their images looked for, their solutions run; failures do not stop it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from components import missing

from sandboxgym.cli import swebench, swebench_jobs
from sandboxgym.cli.screen import harmless
from sandboxgym.envs.swebench import mini, prepared, record

ROOT = Path(__file__).parents[2]
UNSAFE = ("--backend", "copy", "--allow-unsafe")
ROWS = ("northpine__slugline-4", "oakline__errands-14")

pytestmark = pytest.mark.usefixtures("with_this_package")


@pytest.fixture
def with_this_package(monkeypatch):
    pytest.importorskip("swebench")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def rows_file(tmp_path):
    """Rows of which one has no image, and one no such commit."""
    first, second = list(mini.tasks())[:2]
    image = "example.invalid/sandboxgym/\x1b[31mnothing:1"
    rows = [
        first.row(),
        second.row() | {"instance_id": "a__b-1", "history": "", "base_commit": "0" * 40},
        second.row() | {"instance_id": "a__b-2", "history": "", "image": "example.invalid/sandboxgym/nothing:1"},
        second.row() | {"instance_id": "a__b-3", "history": "", "image": image},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_are_prepared_and_the_next_call_goes_on(run):
    status, out, err = run("swebench", "prepare", "slugline-4", *UNSAFE)
    assert status == 0 and f"{ROWS[0]}: prepared (" in out and "1 of 1 rows" in err
    status, out, _ = run("swebench", "prepare", *ROWS, *UNSAFE, "--jobs", "2")
    assert status == 0 and f"{ROWS[0]}: was there" in out and f"{ROWS[1]}: prepared" in out
    assert "1 prepared, 1 were there, 0 failed" in out
    assert len(prepared.listed()) == 2
    entry = prepared.listed()[0].path
    (entry / "packed").write_bytes(b"x")
    status, out, _ = run("swebench", "prepare", *ROWS, *UNSAFE)
    assert status == 0 and "is damaged and made again" in out and (entry / "packed").stat().st_size > 100


def test_a_row_that_fails_stops_no_other(run, rows_file):
    status, out, _ = run("swebench", "prepare", "--dataset", str(rows_file), *UNSAFE, "--jobs", "2")
    assert status == 1 and "1 prepared, 0 were there, 3 failed" in out
    assert "failed: a__b-1: a__b-1, column 'base_commit': 'host' has no commit" in out
    assert "\x1b" not in out and len(prepared.listed()) == 1
    assert sorted(path.name for path in prepared.directory().iterdir() if path.name[0] == ".") == []


def test_wrong_calls_are_said(run, tmp_path, monkeypatch):
    assert run("swebench")[0] == 2
    status, _, err = run("swebench", "prepare", "nobody-1")
    assert status == 1 and "there is no task 'nobody-1'" in err
    assert run("swebench", "prepare", "--jobs", "0")[0] == 2
    status, _, err = run("swebench", "images", "--dataset", str(tmp_path / "none.jsonl"))
    assert status == 1 and "none.jsonl" in err
    monkeypatch.setenv(prepared.VARIABLE, "0")
    status, _, err = run("swebench", "prepare", *UNSAFE)
    assert status == 1 and "nothing is kept on disk" in err


def test_a_worker_that_dies_costs_one_row(run, monkeypatch):
    started = []
    start = swebench_jobs._start

    def dying(job, said):
        process = start(job, said)
        if not started:
            process.kill()
            process.wait()
        started.append(process)
        return process

    monkeypatch.setattr(swebench_jobs, "_start", dying)
    status, out, _ = run("swebench", "prepare", *ROWS, *UNSAFE)
    assert status == 1 and "1 prepared, 0 were there, 1 failed" in out and "its worker was killed by signal 9" in out


@pytest.mark.slow
def test_an_interruption_takes_everything_down(own_directories):
    code = """
import sys
from sandboxgym.cli import main, swebench_jobs
work = swebench_jobs.carry_out
def told(*arguments, **options):
    for number, answer in enumerate(work(*arguments, **options)):
        print("one", flush=True)
        yield answer
from sandboxgym.cli import swebench
swebench.carry_out = told
sys.exit(main(["swebench", "prepare", "--jobs", "2", "--backend", "copy", "--allow-unsafe"]))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "one\n"
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130 and "interrupted" in said and "Traceback" not in said
    assert not [path.name for path in prepared.directory().iterdir() if path.name[0] == "."]
    left = [path.name for path in (own_directories / "runtime").iterdir() if path.name[0] != "."]
    assert left == []


@pytest.mark.slow
def test_what_is_seen_is_recorded_and_only_the_rest_is_done_again(run, tmp_path, rows_file):
    path = tmp_path / "seen.jsonl"
    status, out, _ = run("swebench", "check", ROWS[0], *UNSAFE, "--repeat", "2", "--record", str(path))
    assert status == 0 and f"{ROWS[0]}: the solution resolves; no change does not (" in out
    (seen,) = record.read(path).values()
    assert seen.resolves and seen.gold == ("resolved", "resolved") and seen.backend == "copy" and seen.seconds > 0
    status, out, _ = run("swebench", "check", ROWS[0], *UNSAFE, "--missing", "--record", str(path))
    assert status == 0 and "0 checked, 0 failed" in out
    status, out, _ = run("swebench", "check", "b-1", "--dataset", str(rows_file), *UNSAFE, "--record", str(path))
    assert status == 1 and "failed: a__b-1" in out and list(record.read(path)) == [ROWS[0]]
    path.write_text("{")
    assert "line 1" in run("swebench", "check", ROWS[0], *UNSAFE, "--record", str(path))[2]


def test_images_that_are_not_docker_s_need_no_daemon(run, tmp_path):
    rows = [task.row() for task in list(mini.tasks())[:3]]
    (tmp_path / "there").mkdir()
    rows[1]["image"], rows[2]["image"] = f"dir:{tmp_path}/there", f"dir:{tmp_path}/gone"
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    status, out, _ = run("swebench", "images", "--dataset", str(path))
    assert status == 1 and out.count("present") == 2 and "there is no such directory" in out
    status, out, _ = run("swebench", "images", "--dataset", str(path), "--json")
    assert [state["present"] for state in json.loads(out)] == [True, True, False]


def docker(*words: str) -> str:
    answer = subprocess.run(["docker", *words], capture_output=True, text=True)
    if answer.returncode:
        missing("docker", f"no Docker daemon: {answer.stderr.strip()}")
    return answer.stdout


@pytest.mark.slow
def test_images_of_the_daemon_are_listed_pulled_and_built(run, tmp_path, rows_file):
    name = f"sandboxgym-test-cli:{os.getpid()}"
    (tmp_path / "file").write_bytes(bytes(50_000))
    archive = subprocess.run(["tar", "-C", tmp_path, "-c", "file"], check=True, capture_output=True).stdout
    made = subprocess.run(["docker", "import", "-", name], input=archive, capture_output=True)
    if made.returncode:
        missing("docker", f"no Docker daemon: {made.stderr.decode()}")
    before = docker("images", "--all", "--quiet")
    try:
        status, out, _ = run("swebench", "images", "slugline-4", "--image", name, "--json")
        (state,) = json.loads(out)
        assert status == 0 and state["present"] and state["nbytes"] >= 50_000 and state["image"] == name
        status, out, _ = run("swebench", "images", "--dataset", str(rows_file))
        assert status == 1 and "a__b-2                 missing" in out and "--pull" in out and "\x1b" not in out
        for way in (("--pull",), ("--build", str(tmp_path / "no repository"))):
            status, out, _ = run("swebench", "images", "a__b-2", "--dataset", str(rows_file), "--json", *way)
            (state,) = json.loads(out)
            assert status == 1 and not state["present"] and state["error"] and "\n" not in state["error"], state
            assert "Traceback" not in state["error"]
        assert docker("images", "--all", "--quiet") == before
    finally:
        docker("rmi", "-f", name)


def test_text_of_others_controls_no_terminal():
    assert harmless("a\x1b[31mb\r\udc80é") == "a\\x1b[31mb\\r\\udc80é"


def test_the_table_needs_no_row_to_have_a_size(capsys):
    swebench._print_table([swebench.ImageState("a__b-1", "host", True)])
    assert "1 of 1 images are here (0 B" in capsys.readouterr().out
