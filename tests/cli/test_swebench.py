"""``sandboxgym swebench``: rows are prepared, images are found, solutions are graded; failures do not stop it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import pytest
from components import missing

from sandboxgym.cli import swebench
from sandboxgym.cli.support import swebench_jobs
from sandboxgym.cli.support.printing import harmless
from sandboxgym.envs.swebench import mini
from sandboxgym.envs.swebench.rows import check_record
from sandboxgym.envs.swebench.workspaces import prepared

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


@pytest.mark.parametrize(
    "words",
    [
        ("prepare", "--jobs", "0"),
        ("prepare", "--jobs", "x"),
        ("check", "--repeat", "-1"),
        ("check", "--timeout", "nan"),
        ("check", "--timeout", "-5"),
        ("prepare", "--image", "dir:/"),
        ("images", "--image", ""),
        ("images", "--dataset", ""),
    ],
)
def test_arguments_that_cannot_be_are_refused_before_a_row_is_worked_on(words, run):
    code, out, err = run("swebench", *words)
    assert code != 0 and "Traceback" not in err and "slugline" not in out
    assert f"argument {words[1]}" in err or f"{words[1].removeprefix('--')}" in err, err


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


def test_a_worker_ends_with_its_owner_however_that_ended():
    code = """
import sys, time
from sandboxgym.cli.support import swebench_jobs
def work(*_):
    try:
        print("works", flush=True)
        time.sleep(3600)
    finally:
        print("cleaned up", flush=True)
swebench_jobs._work = work
swebench_jobs.serve()
"""
    job = json.dumps(dataclasses.asdict(swebench_jobs.EvaluationJob("prepare", "mini")))
    worker = subprocess.Popen(
        [sys.executable, "-c", code, job],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert worker.stdin is not None and worker.stderr is not None
    worker.stdin.write('"a__b-1"\n')
    worker.stdin.flush()
    assert worker.stderr.readline() == "works\n"
    worker.stdin.close()  # as the kernel does for a killed owner
    assert worker.stderr.readline() == "cleaned up\n"
    assert worker.wait(timeout=120) == 130
    worker.stderr.close()


@pytest.mark.slow
def test_processes_prepare_at_the_same_time_what_is_then_there_once(own_directories):
    command = [sys.executable, "-m", "sandboxgym", "swebench", "prepare", *ROWS, *UNSAFE, "--jobs", "2"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for _ in range(3)
    ]
    said = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    lines = "".join(said).splitlines()
    for row in ROWS:
        assert sum(line.startswith(f"{row}: prepared") for line in lines) == 1, lines
        assert sum(line.startswith(f"{row}: was there") for line in lines) == 2, lines
    assert len([path for path in prepared.directory().iterdir() if path.name != "locks"]) == len(ROWS)


@pytest.mark.slow
def test_an_interruption_takes_everything_down(own_directories):
    code = """
import sys
from sandboxgym.cli import main; from sandboxgym.cli.support import swebench_jobs
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
    _, said = process.communicate(timeout=300)
    assert process.returncode == 130 and "interrupted" in said and "Traceback" not in said
    assert not [path.name for path in prepared.directory().iterdir() if path.name[0] == "."]
    left = [path.name for path in (own_directories / "runtime").iterdir() if path.name[0] != "."]
    assert left == []


@pytest.mark.slow
def test_what_is_seen_is_recorded_and_only_the_rest_is_done_again(run, tmp_path, rows_file):
    path = tmp_path / "seen.jsonl"
    status, out, _ = run("swebench", "check", ROWS[0], *UNSAFE, "--repeat", "2", "--record", str(path))
    assert status == 0 and f"{ROWS[0]}: the solution resolves; no change does not (" in out
    (seen,) = check_record.read(path).values()
    assert seen.resolves and seen.gold == ("resolved", "resolved") and seen.backend == "copy" and seen.seconds > 0
    status, out, _ = run("swebench", "check", ROWS[0], *UNSAFE, "--missing", "--record", str(path))
    assert status == 0 and "0 checked, 0 failed" in out
    status, out, _ = run("swebench", "check", "b-1", "--dataset", str(rows_file), *UNSAFE, "--record", str(path))
    assert status == 1 and "failed: a__b-1" in out and list(check_record.read(path)) == [ROWS[0]]
    status, out, _ = run("swebench", "check", "--report", "--record", str(path))
    assert status == 0 and out.startswith("| row |") and f"| {ROWS[0]} | resolved | tests fail |" in out
    path.write_text("{")
    assert "line 1" in run("swebench", "check", ROWS[0], *UNSAFE, "--record", str(path))[2]


def checked(name, **more):
    usual = check_record.RowCheck(
        **dict.fromkeys(("task", "image_id"), "sha256:0123456789abcdef"),
        **dict.fromkeys(("network", "empty_resolves", "needs_network", "flaky"), False),
        instance_id=name,
        backend="overlay",
        image="example:1",
        resolves=True,
        gold=("resolved", "resolved"),
        empty=("tests fail",),
        seconds=2.0,
        date="2026-11-24",
        version="0.1.0",
    )
    return dataclasses.replace(usual, **more)


def test_the_report_says_what_is_recorded_and_runs_nothing(run, tmp_path):
    path = tmp_path / "seen.jsonl"
    status, out, _ = run("swebench", "check", "--report", "--record", str(path))
    assert status == 0 and "nothing is recorded in" in out
    failed = {"resolves": False, "gold": ("tests fail",)}
    check_record.write(
        path,
        [
            checked("a__a-1"),
            checked("a__a-2", **failed, needs_network=True, seconds=60.0),
            checked("a__a-3", resolves=False, flaky=True, gold=("resolved", "tests fail")),
            checked("a__b-4", **failed, image="x|\x1b[31m"),
            checked("a__b-5", empty_resolves=True, empty=("resolved",), network=True),
        ],
    )
    status, out, _ = run("swebench", "check", "--report", "--record", str(path))
    assert status == 0
    assert "| a__a-1 | resolved | tests fail | 2.0 | overlay | example:1 (0123456789ab) | 2026-11-24, 0.1.0 |" in out
    assert "| a__a-3 | resolved, tests fail; flaky |" in out and "| a__b-5 |" in out and "overlay, network" in out
    assert "5 rows; the tests of a solution take 2.0 s at the median, 60.0 s at most, 68 s together." in out
    assert "- needs network: a__a-2\n- flaky: a__a-3\n- infra failure: a__b-4\n- no change resolves: a__b-5\n" in out
    assert "x\\|" in out and "\x1b" not in out, "an image's name neither breaks the table nor controls a terminal"
    status, out, _ = run("swebench", "check", "b-5", "c-1", "--report", "--record", str(path))
    assert status == 1 and "a__b-5" in out and "a__a-1" not in out and "not recorded: c-1" in out
    path.write_text("{")
    assert "line 1" in run("swebench", "check", "--report", "--record", str(path))[2]


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
def test_images_of_the_daemon_are_listed(run, tmp_path, rows_file):
    name = f"sandboxgym-test-cli:{os.getpid()}"
    (tmp_path / "file").write_bytes(bytes(50_000))
    archive = subprocess.run(["tar", "-C", tmp_path, "-c", "file"], check=True, capture_output=True).stdout
    made = subprocess.run(["docker", "import", "-", name], input=archive, capture_output=True)
    if made.returncode:
        missing("docker", f"no Docker daemon: {made.stderr.decode()}")
    try:
        status, out, _ = run("swebench", "images", "slugline-4", "--image", name, "--json")
        (state,) = json.loads(out)
        assert status == 0 and state["present"] and state["nbytes"] >= 50_000 and state["image"] == name
        status, out, _ = run("swebench", "images", "--dataset", str(rows_file))
        assert status == 1 and "a__b-2                 missing" in out and "--pull" in out and "\x1b" not in out
        status, out, _ = run("swebench", "images", "a__b-2", "--dataset", str(rows_file), "--json", "--pull")
        (state,) = json.loads(out)
        assert status == 1 and not state["present"] and state["error"] and "\n" not in state["error"], state
        assert "Traceback" not in state["error"]
        assert "a__b" not in docker("images", "--all", "--format", "{{.Repository}}:{{.Tag}}")
    finally:
        docker("rmi", "-f", name)


@pytest.fixture
def registry(tmp_path):
    """The address of a registry of this test's own."""
    program = shutil.which("docker-registry")
    if program is None:
        missing("registry", "there is no docker-registry (Debian's package of that name)")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"localhost:{found.getsockname()[1]}"
    configuration = {
        "version": 0.1,
        "storage": {"filesystem": {"rootdirectory": str(tmp_path / "registry")}},
        "http": {"addr": address},
    }
    (tmp_path / "registry.yml").write_text(json.dumps(configuration))
    with open(tmp_path / "registry.log", "w") as log:
        process = subprocess.Popen([program, "serve", str(tmp_path / "registry.yml")], stdout=log, stderr=log)
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{address}/v2/", timeout=5):
                break
            assert process.poll() is None, (tmp_path / "registry.log").read_text()
            time.sleep(0.1)
        yield address
    finally:
        process.kill()
        process.wait()


def made_image(name: str, folder: Path, content: bytes) -> None:
    """An image with one file."""
    (folder / "file").write_bytes(content)
    archive = subprocess.run(["tar", "-C", folder, "-c", "file"], check=True, capture_output=True).stdout
    made = subprocess.run(["docker", "import", "-", name], input=archive, capture_output=True)
    if made.returncode:
        missing("docker", f"no Docker daemon: {made.stderr.decode()}")


@pytest.mark.slow
def test_missing_images_are_pulled(run, tmp_path, registry):
    rows = [task.row() | {"history": ""} for task in list(mini.tasks())[:3]]
    for number, row in enumerate(rows):
        row["image"] = f"{registry}/sandboxgym/test:{number}"
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    images = [row["image"] for row in rows]
    try:
        for image in images[:2]:
            made_image(image, tmp_path, os.urandom(3_000_000))
            docker("push", image)
        docker("rmi", images[1])
        arguments = ("swebench", "images", "--dataset", str(path))
        status, out, _ = run(*arguments, "--json")
        assert status == 1 and [state["present"] for state in json.loads(out)] == [True, False, False]
        status, out, err = run(*arguments, "--pull")
        assert status == 1 and out.count("present") == 2, out + err  # the third is nowhere
        assert f"pulling {images[1]}" in err and "not found" in out.lower(), out
        status, out, _ = run(*arguments[:2], rows[1]["instance_id"], *arguments[2:], "--json")
        (state,) = json.loads(out)
        assert status == 0 and state["present"] and state["nbytes"] >= 3_000_000
    finally:
        subprocess.run(["docker", "rmi", "-f", *images], capture_output=True)


# Debian's docker.io has no buildx: this one is the daemon's own builder under that name.
BUILDX = """#!/bin/sh
case "$1" in
docker-cli-plugin-metadata)
    echo '{"SchemaVersion":"0.1.0","Vendor":"a test","Version":"v0","ShortDescription":"docker build"}'; exit ;;
esac
shift; [ "$1" = version ] && exit
shift
for word; do shift; case "$word" in --load | --progress=* | --platform=*) ;; *) set -- "$@" "$word" ;; esac; done
DOCKER_BUILDKIT=0 exec docker build "$@"
"""


def test_no_build_without_the_program_that_the_builder_calls(run, tmp_path, rows_file, monkeypatch):
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(
        swebench, "_states", lambda named: [swebench.ImageState(*pair, False) for pair in named.items()]
    )
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    status, _, err = run("swebench", "images", "a__b-2", "--dataset", str(rows_file), "--build", str(tmp_path))
    assert status == 1 and "there is no `docker buildx` here" in err and "Traceback" not in err


@pytest.mark.slow
def test_missing_images_are_built_by_the_official_builder(run, tmp_path, monkeypatch):
    plugin = tmp_path / "config/cli-plugins/docker-buildx"
    plugin.parent.mkdir(parents=True)
    plugin.write_text(BUILDX)
    plugin.chmod(0o755)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "config"))
    base = f"sandboxgym-test-cli-base:{os.getpid()}"
    names = [f"a__b{os.getpid()}-{number}" for number in range(2)]
    images = [f"swebench/sweb.eval.x86_64.{name}:latest".replace("__", "_1776_") for name in names]
    repository = tmp_path / "tasks-of-a-test"
    for name, image in zip(names, images, strict=True):
        task = repository / "tasks" / name
        task.mkdir(parents=True)
        about = {"instance_id": name, "repo": "a/b", "version": "1", "base_commit": "0" * 40, "split": "test"}
        about |= {"image": image, "log_parser": "pytest", "eval_type": "pass_and_fail", "datasets": ["a/test"]}
        (task / "task.yaml").write_text(json.dumps(about))
        (task / "tests.json").write_text(json.dumps({"FAIL_TO_PASS": ["one"], "PASS_TO_PASS": []}))
        (task / "eval.sh").write_text(": '>>>>> Start Test Output'\n: '>>>>> End Test Output'\n")
        for file in ("gold.patch", "test.patch", "problem_statement.md"):
            (task / file).write_text("")
        (task / "Dockerfile").write_text(f"FROM {base}\nCOPY task.yaml /task.yaml\n")
    (repository / "tasks" / names[1] / "Dockerfile").write_text(f"FROM {base}\nCOPY nothing /there\n")
    (repository / "sweb.yaml").write_text(json.dumps({"datasets": ["a/test"], "splits": ["test"]}))
    row = next(iter(mini.tasks())).row() | {"history": ""}
    path = tmp_path / "rows.jsonl"
    rows = [row | {"instance_id": name, "image": image} for name, image in zip(names, images, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made_image(base, tmp_path, b"a base")
    arguments = ("swebench", "images", "--dataset", str(path), "--json", "--build")
    try:
        for state in json.loads(run(*arguments, str(tmp_path / "no repository"))[1]):
            assert not state["present"] and "no repository" in state["error"] and "\n" not in state["error"], state
        status, out, _ = run(*arguments, str(repository))
        one, other = json.loads(out)
        assert status == 1 and one["present"] and not other["present"], out
        assert "nothing" in other["error"] and "\n" not in other["error"]
        logs = f"sandboxgym-build-*/logs/image_builder/*/a_1776_b{os.getpid()}-*"
        assert not list(Path(tempfile.gettempdir()).glob(logs))
    finally:
        subprocess.run(["docker", "rmi", "-f", *images, base], capture_output=True)


def test_text_of_others_controls_no_terminal():
    assert harmless("a\x1b[31mb\r\udc80é") == "a\\x1b[31mb\\r\\udc80é"


def test_the_table_needs_no_row_to_have_a_size(capsys):
    swebench._print_table([swebench.ImageState("a__b-1", "host", True)])
    assert "1 of 1 images are here (0 B" in capsys.readouterr().out
