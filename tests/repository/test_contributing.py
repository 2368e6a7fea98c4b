"""The recipes of CONTRIBUTING.md work, and the files that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from test_docs import BLOCK, RUN
from traces import fresh_interpreter

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_the_recipes_work_when_they_are_followed(tmp_path: Path) -> None:
    recipes = re.findall(r"^## Add (.*)$", TEXT, re.MULTILINE)
    assert recipes == ["an environment", "a sandbox backend", "a schedule", "a conformance check", "a command"]
    assert len(BLOCK.findall(TEXT)) == 4, "the backend's is on the page of sandboxes"
    fresh_interpreter(RUN, ROOT / "CONTRIBUTING.md", BLOCK.pattern, cwd=tmp_path)


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
        ("tests/sandbox/sandboxes.py", "def kind"),
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
