"""The recipes of CONTRIBUTING.md work when they are followed, and the files that it names exist."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
RECIPES = dict(re.findall(r"^## Add ([^\n]*)\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL))
STEP = re.compile(r'^```(python|bash)(?: title="([^"]*)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
PARTS = ("sandboxgym", "sandboxgym_pytest", "bpo_ref", "conformance", "tests", "pyproject.toml")
"""Parts of the repository that a recipe can touch or run."""


def write(house: Path, title: str, code: str) -> Path:
    """Write a piece of code where its title says: a new file, or ``FILE, before|in NAME``, or ``FILE, at the end``."""
    name, _, place = title.partition(", ")
    path = house / name
    if not place:
        assert not path.exists(), path
        path.parent.mkdir(exist_ok=True)
        path.write_text(code, encoding="utf-8")
        return path
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    if place == "at the end":
        lines.append(f"\n\n{code}")
    else:
        where, name = place.split()
        (node,) = (node for node in ast.parse(text).body if name in names(node))
        if where == "before":
            lines.insert(node.lineno - 1, f"{code}\n\n")
        else:
            assert where == "in" and node.end_lineno
            last = node.body[-1].lineno if isinstance(node, ast.FunctionDef) else node.end_lineno
            lines.insert(last - 1, code)
    path.write_text("".join(lines), encoding="utf-8")
    return path


def names(node: ast.stmt) -> set[str]:
    """Names that a statement at the top of a module gives to something."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)} | {getattr(node, "name", "")}


def execute(house: Path, language: str, code: str) -> str:
    """Run a block of the page in the copy of the repository; returns its output."""
    if language == "python":
        commands = [[sys.executable, "-c", f"import sandboxgym, sys\nsys.stdout.write(sandboxgym.__file__)\n{code}"]]
    else:
        programs = {"python": [sys.executable], "sandboxgym": [sys.executable, "-m", "sandboxgym"]}
        words = [shlex.split(line) for line in code.splitlines()]
        commands = [[*programs[program], *arguments] for program, *arguments in words]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    output = ""
    for command in commands:
        done = subprocess.run(
            command, cwd=house, env={**own, "PYTHONPATH": str(house)}, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{code}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        output += done.stdout
    return output


def test_there_is_a_recipe_for_each_of_five_additions() -> None:
    assert list(RECIPES) == ["an environment", "a sandbox backend", "a schedule", "a conformance check", "a command"]
    for text in RECIPES.values():
        assert {bool(title) for _, title, _ in STEP.findall(text)} == {True, False}, "steps, and a check of the result"


@pytest.mark.parametrize(
    ("recipe", "shown"),
    [
        pytest.param("an environment", [], marks=pytest.mark.slow),
        pytest.param("a sandbox backend", ["passed"], marks=pytest.mark.slow),
        pytest.param("a schedule", ["2 passed"], marks=pytest.mark.slow),
        pytest.param(
            "a conformance check",
            ["had 16 characters, restored it has 2", "1 runs of known-good environments, 0 alarms"],
            marks=pytest.mark.slow,
        ),
        ("a command", ["hello world"]),
    ],
)
def test_a_recipe_works_when_it_is_followed(recipe: str, shown: list[str], tmp_path: Path) -> None:
    """In a copy of the repository, in which the recipe touches what it says and nothing else."""
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, tmp_path / part)
    output, touched, ran = "", [], 0
    for language, title, code in STEP.findall(RECIPES[recipe]):
        if title:
            touched.append(write(tmp_path, title, code))
        else:
            output += execute(tmp_path, language, code)
            ran += language == "python"
    assert output.count(str(tmp_path / "sandboxgym" / "__init__.py")) == ran >= 1, "another copy was imported"
    assert all(words in output for words in shown), output
    for arguments in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *arguments, "--quiet", "--no-cache", *map(str, touched)]
        found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert found.returncode == 0, found.stdout


def test_a_step_is_written_where_its_title_says(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "X: dict[str, int] = {\n    'a': 1,\n}\n\n\ndef f() -> int:\n    x = 1\n    return x\n"
    )
    write(tmp_path, "a.py, in X", "    'b': 2,\n")
    write(tmp_path, "a.py, in f", "    x += X['b']\n")
    write(tmp_path, "a.py, before f", "Y = 3\n")
    write(tmp_path, "a.py, at the end", "Z = f()\n")
    found: dict[str, object] = {}
    exec((tmp_path / "a.py").read_text(), found)
    assert (found["X"], found["Y"], found["Z"]) == ({"a": 1, "b": 2}, 3, 3)
    with pytest.raises(AssertionError):
        write(tmp_path, "a.py", "X = 1\n")
    with pytest.raises(ValueError, match="unpack"):
        write(tmp_path, "a.py, in NOTHING", "1\n")


def test_what_the_page_names_is_there() -> None:
    for name in re.findall(
        r"`((?:sandboxgym|bpo_ref|tests|conformance|docs)/[\w./-]*|pyproject\.toml|\.ci/run)`", TEXT
    ):
        assert (ROOT / name).exists(), name
    for file, name in [
        ("sandboxgym/sandbox/backends.py", "_OWN"),
        ("bpo_ref/args.py", "ScheduleName"),
        ("bpo_ref/schedules.py", "class Forks"),
        ("bpo_ref/schedules.py", "def _make"),
        ("sandboxgym/cli/__init__.py", "COMMANDS"),
        ("tests/sandbox/sandboxes.py", "KINDS"),
    ]:
        assert name in (ROOT / file).read_text(encoding="utf-8"), (file, name)


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md"])
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / page).read_text(encoding="utf-8")):
        assert (ROOT / target).exists(), target


def test_the_public_ci_runs_what_the_project_runs() -> None:
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    runs = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert "make lint test" in runs and ".ci/run" in runs
