"""The tables and pictures of the results pages are those of the raw data beside them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from bpo_ref.experiments import pages, registered, tables
from bpo_ref.experiments.pages import MARK, PageError, archives, draw, filled, marked, studies
from bpo_ref.experiments.plots import COLOURS
from bpo_ref.experiments.variance import is_biased, read_lines, shown, table

DOCS = Path(__file__).parents[3] / "docs"
COMMITTED = archives(DOCS)
STUDIES = studies(DOCS)


@pytest.mark.parametrize("page", list(marked(DOCS)), ids=lambda page: page.stem)
def test_the_tables_of_a_page_are_those_of_the_committed_data(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == filled(page.read_text(encoding="utf-8"), DOCS), (
        "python -m bpo_ref.experiments.pages writes them"
    )


@pytest.mark.parametrize("data", [*COMMITTED, *STUDIES], ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_all_committed_data_are_on_a_page(data: Path) -> None:
    name = data.parent.name if data in COMMITTED else data.stem
    named = {
        found[1].split()[0]
        for page in marked(DOCS)
        for found in re.finditer(r"<!-- table: ([^>]+) -->", page.read_text())
    }
    assert name in named


@pytest.mark.parametrize("data", COMMITTED, ids=lambda path: path.parent.name)
def test_a_committed_table_is_that_of_the_committed_scores(data: Path, tmp_path: Path) -> None:
    tables.main([str(data), "--out", str(tmp_path / "table")])
    committed = DOCS / "results" / f"{data.parent.name}-table.md"
    assert (tmp_path / "table-table.md").read_text() == committed.read_text()
    assert committed.with_name(f"{data.parent.name}.png").exists()


def test_every_table_and_picture_of_runs_has_its_raw_scores() -> None:
    results = DOCS / "results"
    made = {path.name.removesuffix("-table.md") for path in results.glob("*-table.md")}
    made |= {path.stem for path in results.glob("*.png")}
    ended = [domain for domain in registered.DOMAINS if registered.by_start(DOCS / pages.STUDY, domain)]
    studied = {f"study-{domain}" for domain in ended}
    assert made == {data.parent.name for data in COMMITTED} | studied


def test_a_mark_that_names_no_table_is_an_error() -> None:
    for words in ("nowhere ends", "alfworld-main nothing", "alfworld-main differences nobody"):
        with pytest.raises(PageError, match=words):
            filled(f"<!-- table: {words} -->\n<!-- end of table -->", DOCS)


def test_what_is_between_marks_is_replaced(tmp_path: Path) -> None:
    shutil.copytree(DOCS / "results" / "data" / "make-train", tmp_path / "results" / "data" / "make-train")
    page = tmp_path / "page.md"
    page.write_text("# A\n\n<!-- table: make-train ends -->\nold\n<!-- end of table -->\n\nwords\n")
    page.write_text(filled(page.read_text(), tmp_path))
    assert "old" not in page.read_text() and "| bpo | 1 |" in page.read_text() and page.read_text().endswith("words\n")
    assert filled(page.read_text(), tmp_path) == page.read_text() and MARK.search(page.read_text())
    draw(tmp_path)
    assert {path.name for path in (tmp_path / "results").iterdir()} == {"data", "make-train-table.md", "make-train.png"}


def test_a_table_of_estimators_fits_a_page_and_is_read_back_from_its_data() -> None:
    lines = read_lines(DOCS / "results" / "details" / "variance-alfworld.json")
    head, _, first, *rest = table(lines).splitlines()
    assert head.count("|") == 8 and first.startswith("| `rloo:roots=8` | 1.00 [1.00, 1.00] |")
    assert any(row.startswith("| `bpo` | 0.36 [0.29, 0.44] | 0.57 [0.45, 0.70] |") for row in rest)
    assert shown("bpo-split:baseline=pooled,roulette=0.5,step_weight_power=0.75").count(", ") == 2


def test_what_is_biased_by_construction_is_told() -> None:
    biased = {name for name in COLOURS if is_biased(name)}
    assert {"bpo-paper", "bpo-sibling", "bpo-tree", "bpo-key"} <= biased
    assert not biased & {"rloo", "rloo-pooled", "rloo-value", "bpo", "bpo-split", "bpo-forest", "vineppo"}
    assert is_biased("bpo-split:step_weight_power=0.75") and not is_biased("bpo-split:roulette=0.5")


def test_pages_are_written_by_one_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "results" / "page.md"
    shutil.copytree(DOCS / "results" / "data" / "make-train", tmp_path / "results" / "data" / "make-train")
    page.write_text("<!-- table: make-train ends -->\n<!-- end of table -->\n")
    monkeypatch.setattr("sys.argv", ["pages", str(tmp_path)])
    pages.main()
    assert "| bpo | 1 |" in page.read_text()
