"""``sandboxgym init``: the package that it writes works under any name; names that cannot be are refused."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
from functools import partial
from pathlib import Path

import pytest

import sandboxgym
from sandboxgym.cli import init
from sandboxgym.system.modules import import_named

ROOT = Path(__file__).parents[2]


@pytest.fixture
def package(tmp_path, monkeypatch, run) -> Path:
    monkeypatch.chdir(tmp_path)
    status, out, err = run("init", "two_rooms")
    assert status == 0 and "pip install -e" in out and "two_rooms:TwoRoomsEnv-v0" in out, err
    return tmp_path / "two_rooms"


def within(package: Path, *command: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "support", package / "src"))),
        "NO_COLOR": "1",
    }
    program = [sys.executable, "-m", *command]
    return subprocess.run(program, cwd=package, env=env, capture_output=True, text=True, timeout=timeout)


def test_the_package_is_whole_and_has_its_name_everywhere(package):
    files = {path.relative_to(package).as_posix(): path for path in package.rglob("*") if path.is_file()}
    assert set(files) == {
        ".github/workflows/tests.yml",
        ".gitignore",
        "README.md",
        "badge.svg",
        "pyproject.toml",
        "src/two_rooms/__init__.py",
        "src/two_rooms/env.py",
        "src/two_rooms/py.typed",
        "tests/test_two_rooms.py",
    }
    assert not any("my_env" in path.read_text() or "MyEnv" in path.read_text() for path in files.values())
    assert tomllib.loads(files["pyproject.toml"].read_text())["project"]["name"] == "two_rooms"
    assert "not certified yet" in files["badge.svg"].read_text()
    assert [path.name for path in package.parent.iterdir()] == ["two_rooms"], "nothing else is left"


def test_the_workflow_runs_the_tests_certifies_and_keeps_the_certificate(package):
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((package / ".github/workflows/tests.yml").read_text())["jobs"]["tests"]
    commands = [step.get("run", "") for step in job["steps"]]
    assert "pytest" in commands
    (certify,) = [command for command in commands if command.startswith("sandboxgym conformance")]
    kept = job["steps"][-1]["with"]["path"].split()
    assert all(f"--{Path(name).suffix[1:]} {name}" in certify.replace("--badge", "--svg") for name in kept)
    assert " ".join(certify.split()).partition(" --json")[0] in (package / "README.md").read_text()


def test_its_own_tests_pass(package):
    done = within(package, "pytest", "-q", "-p", "no:cacheprovider", "-k", "not test_snapshots")
    assert done.returncode == 0 and "11 passed" in done.stdout, done.stdout + done.stderr


def test_its_snapshots_are_checked_and_the_badge_says_how_many_checks_that_were(package):
    target = ("sandboxgym", "conformance", "two_rooms:TwoRoomsEnv-v0", "--badge", "badge.svg", "--quiet")
    done = within(package, *target, "--only", "restore.trace_equality", "--only", "fork")
    assert done.returncode == 0, done.stdout + done.stderr
    badge = (package / "badge.svg").read_text()
    assert " checks pass, 20" in badge and "two_rooms:TwoRoomsEnv-v0" in badge


@pytest.mark.slow
def test_its_test_of_snapshots_asks_the_suite(package):
    """With a few of the checks. All are passed, for the same tasks, in the next test."""
    assert 'check_snapshot("two_rooms:TwoRoomsEnv-v0", reset_options=[{"task": 0}, {"task": 3}])' in "".join(
        path.read_text() for path in package.glob("tests/*.py")
    )
    test = ("pytest", "-q", "-p", "no:cacheprovider", "-p", "few_checks", "-k", "test_snapshots")
    done = within(package, *test)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
    (module,) = package.glob("src/*/env.py")
    text = module.read_text()
    assert text.count("def _apply") == 1
    module.write_text(text.replace("def _apply", "def _apply_nothing"))
    done = within(package, *test)
    assert done.returncode == 1 and "1 failed" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_the_whole_suite_certifies_it(package):
    tasks = ("--reset-options", '{"task": 0}', "--reset-options", '{"task": 3}')
    done = within(package, "sandboxgym", "conformance", "two_rooms:TwoRoomsEnv-v0", *tasks, "--badge", "badge.svg")
    assert done.returncode == 0 and "Snapshots faithful" in done.stdout, done.stdout + done.stderr
    assert "4 of 4 fields" in done.stdout
    untested = [line.strip() for line in done.stdout.splitlines() if "NOT tested:" in line]
    assert len(untested) == 1 and "no picture was compared" in untested[0], "it renders in no mode, all else is tested"


COMMANDS = {
    "play": ("play", "{}"),
    "info": ("info", "{}"),
    "eval": ("eval", "{}", "--base-url", "http://localhost:1/v1", "--model", "m"),
    "eval of a class": ("eval", "two_rooms.env:TwoRoomsEnv", "--base-url", "http://localhost:1/v1", "--model", "m"),
    "list": ("list", "--import", "two_rooms"),
    "download": ("download", "--import", "two_rooms"),
    "serve": ("serve", "openenv", "{}"),
    "conformance": ("conformance", "{}", "--only", "api.spec"),
    "train": ("train", "--env-id", "{}", "--model", "tiny:0.2M", "--out", "run"),
}


@pytest.mark.parametrize(
    ("command", "within", "install"),
    [(name, ".", "pip install -e two_rooms") for name in COMMANDS] + [("play", "two_rooms", "pip install -e .")],
)
def test_every_command_says_how_to_install_it(package, run, monkeypatch, command, within, install):
    monkeypatch.chdir(package.parent / within)
    if command == "train":
        pytest.importorskip("accelerate")
    if command == "serve":
        pytest.importorskip("starlette")
    try:
        status, _, err = run(*(word.format("two_rooms:TwoRoomsEnv-v0") for word in COMMANDS[command]))
    finally:
        sys.modules.pop("two_rooms", None)
    assert status in (1, 2, 3) and "there is no module two_rooms" in err and "Traceback" not in err
    assert f"`{install}`" in err and str(Path.cwd()) in err


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (
            "not_there_at_all",
            "or start in the folder that contains not_there_at_all.py or not_there_at_all/__init__.py",
        ),
        ("json.not_there", r"the package json \(.*json/__init__.py\) has no module json.not_there$"),
        ("needy", f"needy needs the module not_there_at_all, which is not installed in {sys.prefix}"),
    ],
)
def test_a_module_that_cannot_be_imported_is_told_with_what_to_do(tmp_path, monkeypatch, module, said):
    (tmp_path / "needy.py").write_text("import not_there_at_all")
    monkeypatch.syspath_prepend(tmp_path)
    for attempt in (partial(import_named, module), partial(sandboxgym.make, f"{module}:Name-v0")):
        with pytest.raises(ModuleNotFoundError, match=said):
            attempt()


def test_it_can_be_installed_without_a_network(package, tmp_path):
    pytest.importorskip("hatchling")
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    site = next(venv.glob("lib/python*/site-packages"))
    (site / "ours.pth").write_text(f"{ROOT}\n{sysconfig.get_path('purelib')}\n")
    python = venv / "bin/python"
    options = ("--quiet", "--no-index", "--no-build-isolation", "--no-deps")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), "-m", "pip", "install", *options, "-e", str(package)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    code = (
        "import sandboxgym; env = sandboxgym.make('two_rooms:TwoRoomsEnv-v0'); env.reset(seed=0); "
        "env.restore(env.snapshot()); print(type(env.unwrapped).__module__)"
    )
    done = subprocess.run([str(python), "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout == "two_rooms.env\n", done.stderr


def test_it_is_linted(package):
    rules = ("--line-length", "120", "--no-cache")
    done = within(package, "ruff", "check", "--isolated", "--select", "E,F,I,UP,B,SIM", *rules)
    assert done.returncode == 0, done.stdout
    done = within(package, "ruff", "format", "--isolated", "--check", *rules)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.xdist_group("type checker")
def test_it_is_typed(package, type_check):
    done = type_check(package / "src")
    assert done.returncode == 0, done.stdout + done.stderr
    (module,) = package.glob("src/*/env.py")
    module.write_text(module.read_text() + "\nTwoRoomsEnv().snapshott()\n")
    assert "snapshott" in type_check(package / "src").stdout, "it looks at these types"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("my-env", "my_env would do"),
        ("My Env", "my_env would do"),
        ("3d", "expected lower-case letters"),
        ("é", "expected lower-case letters"),
        ("", "expected lower-case letters"),
        ("../up", "expected lower-case letters"),
        ("_x", "expected lower-case letters"),
        ("a__b", "a_b would do"),
        ("class", "a keyword of Python"),
        ("match", "a keyword of Python"),
        ("json", "standard library"),
        ("numpy", "there is a module 'numpy' already"),
        ("sandboxgym", "there is a module"),
        ("tests", "there is a module"),
        ("x" * 41, "at most 40"),
    ],
)
def test_a_name_that_cannot_be_one_is_refused_in_a_sentence(run, tmp_path, monkeypatch, name, said):
    monkeypatch.chdir(tmp_path)
    status, out, err = run("init", name)
    assert (status, out) == (2, "") and said in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_is_there_is_never_overwritten(run, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    there = tmp_path / "my_rooms"
    if kind == "folder":
        there.mkdir()
    elif kind == "file":
        there.write_text("mine")
    else:
        there.symlink_to(tmp_path / "nowhere")
    status, _, err = run("init", "my_rooms")
    assert status == 1 and "exists already, and nothing was changed" in err
    assert [path.name for path in tmp_path.iterdir()] == ["my_rooms"]


def test_a_folder_that_cannot_be_written_is_named(run, tmp_path):
    (tmp_path / "file").write_text("")
    status, _, err = run("init", "my_rooms", "--directory", str(tmp_path / "file"))
    assert status == 1 and "my_rooms cannot be written" in err and "Traceback" not in err


def test_class_names_end_with_env():
    assert [init.class_name(name) for name in ("my_env", "chess", "env", "any")] == [
        "MyEnv",
        "ChessEnv",
        "Env",
        "AnyEnv",
    ]
