"""The tables and pictures of the results pages, made again from the raw data that are committed beside them.

    python -m bpo_ref.experiments.pages            # writes docs/results anew

Each table stands between two comments, which a reader does not see; this command replaces the text between them::

    <!-- table: alfworld-main ends -->
    <!-- end of table -->

The first word names the data: ``docs/results/data/NAME/scores.jsonl``, or ``docs/results/details/NAME.json`` of
`bpo_ref.variance`. The second word names the table: ``ends``, ``metrics``, ``differences`` (a third word names a
baseline other than grpo) or ``overhead``, and for gradient estimators ``costs``. Runs that were evaluated at the end
only are drawn as gains, others as learning curves. ``study`` names the registered study, followed by a domain and then
``areas``, ``comparisons`` or ``ends``. ``phase`` names the data of `bpo_ref.experiments.phase`, whose tables are
``rule``, ``chain``, ``alfworld`` and ``settings``.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from bpo_ref.experiments import registered
from bpo_ref.experiments.plots import Plot
from bpo_ref.experiments.study_archive import unpack
from bpo_ref.experiments.tables import beside, efficiency, grouped, overhead, summary, write

MARK = re.compile(r"(<!-- table: ([^>]+?) -->\n).*?(<!-- end of table -->)", re.DOTALL)
KINDS = ("rule", "chain", "alfworld", "settings")
"""Tables of the phase diagram."""
STUDY = "results/data/study"
"""The registered study's runs."""
PATHS = ("results/data/{}/scores.jsonl", "results/details/{}.json")


class PageError(ValueError):
    """A mark that names no table; the message says which."""


def archives(docs: Path) -> list[Path]:
    """The committed scores of runs."""
    return sorted(docs.glob("results/data/*/scores.jsonl"))


def studies(docs: Path) -> list[Path]:
    """The committed measurements of gradient estimators."""
    return sorted(docs.glob("results/details/variance-*.json"))


def table_of(docs: Path, words: str) -> str:
    """The table that a mark's words name.

    Raises:
        PageError: there is none.
    """
    name, kind, *rest = words.split()
    scores, lines = (docs / path.format(name) for path in PATHS)
    if kind == "costs" and lines.exists():
        from bpo_ref.experiments.variance import read_lines, table

        return table(read_lines(lines))
    if name == "phase" and kind in KINDS:
        from bpo_ref.experiments.phase.diagram import table as phase_table

        return phase_table(docs, kind)
    if name == "study" and kind in registered.DOMAINS and rest and rest[0] in registered.TABLES:
        return registered.table(docs / STUDY, kind, rest[0])
    made = _tables(scores, *rest) if scores.exists() else {}
    if not made.get(kind):
        raise PageError(f"table: {words}: expected data of docs/results, and ends, metrics, differences or overhead")
    return made[kind]


@cache
def _tables(scores: Path, baseline: str = "grpo") -> dict[str, str]:
    with TemporaryDirectory() as folder:
        groups = grouped(unpack(scores, Path(folder)))
        return {
            "ends": summary(groups),
            "metrics": efficiency(groups),
            "differences": beside(groups, baseline),
            "overhead": overhead(groups),
        }


def filled(page: str, docs: Path) -> str:
    """A page's text with the tables that its marks name."""
    return MARK.sub(lambda found: f"{found[1]}\n{table_of(docs, found[2])}\n\n{found[3]}", page)


def marked(docs: Path) -> Iterator[Path]:
    """The pages that have marks."""
    return (page for page in sorted(docs.rglob("*.md")) if MARK.search(page.read_text(encoding="utf-8")))


def draw(docs: Path) -> None:
    """Write NAME-table.md and NAME.png of all scores, and all other pictures.

    These are the pictures of the estimators, of the registered study and of the phase diagram.
    """
    from bpo_ref.experiments.variance import plot, read_lines

    for scores in archives(docs):
        with TemporaryDirectory() as folder:
            runs = unpack(scores, Path(folder))
            evaluations = max(len(run.scores) for group in grouped(runs).values() for run in group)
            kind: Plot = "gains" if evaluations == 2 else "curves"
            write(runs, docs / "results" / scores.parent.name, plot=kind)
    for study in studies(docs):
        plot(read_lines(study), study.with_suffix(".png"))
    for domain in registered.DOMAINS:
        registered.draw(docs / STUDY, domain, docs / "results" / f"study-{domain}.png")
    if (docs / "results" / "data" / "phase").exists():
        from bpo_ref.experiments.phase import diagram

        diagram.plot(docs, docs / diagram.PICTURE)


def main() -> None:
    """Make the tables and pictures of the results pages again from the committed data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("docs", nargs="?", type=Path, default=Path("docs"), help="folder of the pages")
    docs = parser.parse_args().docs
    draw(docs)
    for page in marked(docs):
        page.write_text(filled(page.read_text(encoding="utf-8"), docs), encoding="utf-8")


if __name__ == "__main__":
    main()
