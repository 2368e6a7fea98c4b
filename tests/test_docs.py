"""The documentation is true: its code runs, in order, and the site builds without a warning."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from components import missing
from traces import fresh_interpreter

from sandboxgym.tree.files import files_of_run, read_trees

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = [
    path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if BLOCK.search(path.read_text())
]
RUN = """
import re, sys
from pathlib import Path
page = Path(sys.argv[1])
text, names = page.read_text(encoding="utf-8"), {"__name__": "__main__"}
for block in re.finditer(sys.argv[2], text, re.DOTALL | re.MULTILINE):
    line = text.count("\\n", 0, block.start(1))
    exec(compile("\\n" * line + block[1], page, "exec"), names)
"""


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_code_of_a_page_runs_in_order(page: Path, tmp_path: Path) -> None:
    fresh_interpreter(RUN, page, BLOCK.pattern, cwd=tmp_path)


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/tree.md"])
def test_the_trees_of_an_example_have_returns_that_differ(page: str, tmp_path: Path) -> None:
    code = RUN + "\nprint('returns', sorted({path.total_reward for path in names['trees'][0].paths}))"
    assert "returns [0.0, 1.0]" in fresh_interpreter(code, ROOT / page, BLOCK.pattern, cwd=tmp_path)


def test_the_live_page_shows_several_updates_with_wins_losses_and_stopped_paths() -> None:
    paths = files_of_run(ROOT / "docs" / "tree-example")
    assert sum(path.stat().st_size for path in paths) < 300_000
    updates = [read_trees(path) for path in paths]
    assert [update.about["update"] for update in updates] == [5, 10, 15, 20]
    for update in updates:
        ends = [path.edges[-1] for tree in update.trees for path in tree.paths]
        assert {end.success for end in ends} == {True, False} and any(end.child.stopped for end in ends)
        assert update.about["schedule"] == "split" and update.about["rule"]


def test_there_are_pages_with_code() -> None:
    assert {"README.md", "index.md", "own-env.md", "tree.md"} <= {page.name for page in PAGES}


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.stem)
def test_a_block_of_python_runs_or_says_that_it_does_not(page: Path) -> None:
    """The site shows a fence with other words after the language as running text, and all that follows it."""
    fences = re.findall(r"^``` *(?:python|py)\b.*$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(fences) <= {"```python", "```python { .no-run }"}


@pytest.mark.slow
def test_the_readme_passes_a_type_checker(tmp_path: Path) -> None:
    program = tmp_path / "readme.py"
    program.write_text("".join(BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))), encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", "", "--cache-dir", str(tmp_path / "cache")]
    result = subprocess.run(
        [*command, "--follow-imports", "silent", str(program)], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    program.write_text(program.read_text() + "\nenv.snapshott()\n", encoding="utf-8")
    wrong = subprocess.run(
        [*command, "--follow-imports", "silent", str(program)], cwd=ROOT, capture_output=True, text=True
    )
    assert "snapshott" in wrong.stdout, "it looks at these types"


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    try:
        import material  # noqa: F401
    except ImportError:
        missing("docs", "mkdocs-material is not installed: pip install 'sandboxgym[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "site" / "index.html").stat().st_size > 5000
    assert 'href="tree-example/"' in (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert 'data-update="20"' in (tmp_path / "site" / "tree-example" / "index.html").read_text(encoding="utf-8")
