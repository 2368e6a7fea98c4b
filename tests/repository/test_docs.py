"""The documentation is correct: its code runs, in order, and the site builds without a warning."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from components import missing
from traces import fresh_interpreter

from sandboxgym.sandbox.overlay.backend import why_unavailable
from sandboxgym.tree.files import files_of_run, read_trees

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = [
    path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if BLOCK.search(path.read_text())
]
OUTPUT = re.compile(r'\n*^```text title="Output"\n(.*?)^```$', re.DOTALL | re.MULTILINE)
RUN = (
    f"OUTPUT = {OUTPUT.pattern!r}"
    + """
import io, re, sys
from contextlib import redirect_stdout
from pathlib import Path
page = Path(sys.argv[1])
text, names = page.read_text(encoding="utf-8"), {"__name__": "__main__"}
for block in re.finditer(sys.argv[2], text, re.DOTALL | re.MULTILINE):
    line, printed = text.count("\\n", 0, block.start(1)), io.StringIO()
    with redirect_stdout(printed):
        exec(compile("\\n" * line + block[1], page, "exec"), names)
    if shown := re.compile(OUTPUT, re.DOTALL | re.MULTILINE).match(text, block.end()):
        pattern = re.escape(shown[1].strip()).replace("…", ".*?")
        where = f"{page}:{line + 1} prints\\n{printed.getvalue()}\\nand the page shows\\n{shown[1]}"
        assert re.fullmatch(pattern, printed.getvalue().strip(), re.DOTALL), where
"""
)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_code_of_a_page_runs_in_order(page: Path, tmp_path: Path) -> None:
    """And prints what the page shows below it as its output; … stands for anything."""
    if page.name == "harbor.md":  # the only one whose sandboxes have to be isolated
        why_not = [why_unavailable(rootless=rootless) for rootless in (os.geteuid() != 0, True)]
        if all(why_not):
            missing("overlay", str(why_not[0]))
    fresh_interpreter(RUN, page, BLOCK.pattern, cwd=tmp_path)


@pytest.mark.parametrize("page", ["README.md", "docs/tree.md"])
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


def test_a_page_that_shows_other_output_fails(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text('```python\nprint("a" * 3)\n```\n\n```text title="Output"\na…a\n```\n')
    fresh_interpreter(RUN, page, BLOCK.pattern, cwd=tmp_path)
    page.write_text(page.read_text().replace("a…a", "b"))
    with pytest.raises(AssertionError, match="the page shows"):
        fresh_interpreter(RUN, page, BLOCK.pattern, cwd=tmp_path)


def test_every_output_that_a_page_shows_follows_a_block_that_prints_it() -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        shown = sum(1 for block in BLOCK.finditer(text) if OUTPUT.match(text, block.end()))
        assert shown == text.count('```text title="Output"'), page


def test_there_are_pages_with_code() -> None:
    assert {"README.md", "quickstart.md", "own-env.md", "tree.md", "alfworld.md", "webshop.md"} <= {
        page.name for page in PAGES
    }


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.stem)
def test_a_block_of_python_runs_or_says_that_it_does_not(page: Path) -> None:
    """The site shows a fence with other words after the language as running text, and all that follows it."""
    fences = re.findall(r"^``` *(?:python|py)\b.*$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(fences) <= {"```python", "```python { .no-run }"}


def script(name: str) -> ModuleType:
    """A program of docs/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_on_an_environments_page_is_its_docstring() -> None:
    env_pages, ids = script("env_pages"), set()
    for page in env_pages.PAGES.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        ids |= {found[2] for found in env_pages.MARK.finditer(text)}
        assert text == env_pages.filled(text), f"{page}: python docs/env_pages.py writes it"
    assert ids == {f"sandboxgym/{name}-v0" for name in ("ALFWorld", "WebShop", "WebShopBrowser", "SWEBench", "Harbor")}


@pytest.mark.parametrize("name", ["alfworld", "webshop", "webshop-browser", "swebench"])
def test_the_page_of_an_environment_begins_with_how_to_install_and_make_it(name: str) -> None:
    text = (ROOT / "docs" / "envs" / f"{name}.md").read_text(encoding="utf-8")
    parts = [
        "pip install",
        "| make it | `sandboxgym.make(",
        "| observation |",
        '```text title="Output"',
        "## Reference",
    ]
    places = [text.find(part) for part in parts]
    assert min(places) > -1 and places == sorted(places)


def test_a_page_is_described_by_its_first_paragraph() -> None:
    description = script("site_hooks").description
    text = "# Title\n\n```bash\nrun\n```\n\n![p](a.png)\n\nIt has `env.step` and **forks**; [see](x.md).\n\nMore.\n"
    assert description(text) == "Title: It has env.step and forks; see."
    assert description("# A\n\n" + "Short one. " * 40).endswith("one.")
    assert len(description("# A\n\n" + "word " * 100)) <= 162
    assert description("# A\n") == "A"


def test_the_site_links_to_the_repository_where_it_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = script("site_hooks")
    monkeypatch.setattr(hooks, "ROOT", tmp_path)
    for urls, found in (
        ("", (None, None)),
        ('urls = {Repository = "https://x.org/r"}', ("https://x.org/r", "edit/main/docs/")),
    ):
        (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "a"\n{urls}\n')
        config = hooks.on_config(SimpleNamespace(repo_url=None, edit_uri=None))
        assert (config.repo_url, config.edit_uri) == found


def test_every_page_has_a_description_of_its_own() -> None:
    pages = [page for page in (ROOT / "docs").rglob("*.md") if not page.name.endswith("-table.md")]
    found = {page: script("site_hooks").description(page.read_text(encoding="utf-8")) for page in pages}
    assert not [page for page, words in found.items() if len(words) < 50]
    assert len(set(found.values())) == len(found)


MADE = ROOT / "docs" / "tree-example" / "index.html"
"""The one page that only the site has: its build makes it from the trees in that folder."""
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s#]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize(
    "page", [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda p: str(p.relative_to(ROOT))
)
def test_what_a_page_links_to_is_in_the_repository(page: Path) -> None:
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    links = [link for link in LINK.findall(text) if "://" not in link and not link.startswith("mailto:")]
    places = {link: (page.parent / link).resolve() for link in links}
    assert [link for link, place in places.items() if place != MADE and not place.exists()] == []


@pytest.mark.slow
@pytest.mark.xdist_group("type checker")
def test_the_readme_passes_a_type_checker(tmp_path: Path, type_check: Any) -> None:
    program = tmp_path / "readme.py"
    program.write_text("".join(BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))), encoding="utf-8")
    result = type_check(program)
    assert result.returncode == 0, result.stdout + result.stderr
    program.write_text(program.read_text() + "\nenv.snapshott()\n", encoding="utf-8")
    assert "snapshott" in type_check(program).stdout, "it looks at these types"


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
