"""Reports as pages and Markdown: they say what happened, what was not tested, and hostile text stays text."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from sandboxgym.conformance import html, markdown

HOSTILE = "</script><script>alert(1)</script> | `x`"


def result(id: str, verdict: str, level: int, **more: Any) -> dict[str, Any]:
    fields = {
        "message": "",
        "evidence": {},
        "counterexample": None,
        "seconds": 0.5,
        "hazard": "h",
        "does": "d",
        "blind": "b",
    }
    return {"id": id, "verdict": verdict, "level": level, **fields, **more}


@pytest.fixture
def report() -> dict[str, Any]:
    matrix = [{"probe": "file content", "restore": "kept"}, {"probe": "background process", "restore": "leaked"}]
    results = [
        result("api.protocol", "PASS", 0, evidence={"base": "Env"}),
        result("restore.many", "FAIL", 1, message=HOSTILE, evidence={"differs": "a\nb"}, counterexample="import x"),
        result("stochastic.coupled", "SKIP", 3, message="no randomness seen"),
        result("stochastic.siblings", "INCONCLUSIVE", 3, message="power 0.4"),
        result("probes.matrix", "PASS", 4, evidence={"matrix": matrix, "probes": 2}),
    ]
    return {
        "name": "some/Env-v0",
        "make_kwargs": {"a": 1},
        "capabilities": {"kind": "memory", "rng": True},
        "budget": "quick",
        "seed": 3,
        "started": "2026-01-01T00:00:00+00:00",
        "seconds": 12.0,
        "versions": {"gymnasium": "1.4.0"},
        "platform": "Linux",
        "counts": {"PASS": 2, "FAIL": 1, "SKIP": 1, "INCONCLUSIVE": 1},
        "results": results,
        "not_tested": [{"id": "stochastic.coupled", "reason": "no randomness seen"}],
    }


@pytest.mark.parametrize("render", [html.page, markdown.text])
def test_everything_that_happened_is_told(report: dict[str, Any], render: Any) -> None:
    text = render(report)
    for entry in report["results"]:
        assert entry["id"] in text
    for told in ("some/Env-v0", "import x", "no randomness seen", "power 0.4", "file content", "leaked", "memory"):
        assert told in text


def test_the_page_stands_alone_and_hostile_text_stays_text(report: dict[str, Any]) -> None:
    page = html.page(report)
    assert "<script" not in page and "&lt;script&gt;" in page
    assert not any(outside in page for outside in ("http://", "https://", "src=", "<link", "@import", "url("))


def test_the_banner_and_title_follow_the_verdicts(report: dict[str, Any]) -> None:
    assert "Not faithful: 1 of 5 checks fail" in html.page(report)
    assert "<title>some/Env-v0: FAIL</title>" in html.page(report)
    passed = copy.deepcopy(report)
    passed["results"] = [r for r in report["results"] if r["verdict"] in ("PASS", "SKIP")]
    passed["counts"] = {"PASS": 2, "FAIL": 0, "SKIP": 1, "INCONCLUSIVE": 0}
    assert ">No check fails <" in html.page(passed)
    passed["counts"]["INCONCLUSIVE"] = 1
    assert "some could not tell" in html.page(passed)


def test_failures_are_open_and_every_tile_leads_somewhere(report: dict[str, Any]) -> None:
    page = html.page(report)
    assert page.count("<details") == 5 and page.count(" open>") == 1
    for entry in report["results"]:
        assert f'href="#{entry["id"]}"' in page and f'id="{entry["id"]}"' in page


def test_a_table_row_in_markdown_is_one_line(report: dict[str, Any]) -> None:
    (row,) = [line for line in markdown.text(report).splitlines() if line.startswith("| `restore.many`")]
    assert row.count(" | ") == 2 and "\\|" in row
