"""Reports as pages and Markdown show what happened and what was not tested; hostile text stays text."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from sandboxgym.conformance.reports import comparison, html, markdown

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


def test_prose_and_missing_values_are_for_people(report: dict[str, Any]) -> None:
    report["results"][0]["does"] = "Calls ``restore(snap)`` <twice>."
    report["results"][4]["evidence"]["matrix"][0]["fork"] = None
    page = html.page(report)
    assert "Calls <code>restore(snap)</code> &lt;twice&gt;." in page
    assert "null" not in page


def test_the_banner_and_title_follow_the_verdicts(report: dict[str, Any]) -> None:
    assert "Not faithful: 1 of 5 checks fail" in html.page(report)
    assert "<title>some/Env-v0: FAIL</title>" in html.page(report)
    passed = copy.deepcopy(report)
    passed["results"] = [r for r in report["results"] if r["verdict"] in ("PASS", "SKIP")]
    passed["counts"] = {"PASS": 2, "FAIL": 0, "SKIP": 1, "INCONCLUSIVE": 0}
    assert ">Restored states were not compared: no check fails <" in html.page(passed)
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


def test_the_page_marks_what_differs_and_groups_what_has_one_cause(report: dict[str, Any]) -> None:
    table = [
        {"field": "reward", "expected": "1.0", "found": "1.0", "differs": False},
        {"field": "info['<b>']", "expected": "1", "found": "2", "differs": True},
    ]
    first = report["results"][1]
    first["evidence"] = {"difference": table, "expected": "long", "found": "long"}
    report["results"].insert(2, {**first, "id": "restore.nested"})
    page = html.page(report)
    assert "Probably one cause: <code>info[&#x27;&lt;b&gt;&#x27;]</code>, in 2 checks" in page
    assert "<tr class=differs><td>info[&#x27;&lt;b&gt;&#x27;]</td><td><code>1</code></td><td><code>2</code>" in page
    assert page.count(" open>") == 1 and ">Copy</button>" in page


def test_the_page_says_how_strong_a_pass_is_and_how_busy_the_machine_was(report: dict[str, Any]) -> None:
    report["results"][0] |= {"id": "restore.many", "evidence": {"restores of one": 400}}
    report["results"][4] |= {"evidence": {"power": {"TV": 0.2, "at least": 0.9995, "detectable TV": 0.17}}}
    report["machine"] = {"load before": 9.5, "load after": 10.0, "cores": 2, "seconds per call": 0.0012}
    page = html.page(report)
    assert "<td>400 restores of one</td><td>1 in 58</td>" in page
    assert "total variation 0.2 seen with 0.9995" in page
    assert "A call takes 1.2 ms" in page and "Load 9.5 to 10.0 on 2 cores: a busy machine" in page
    assert "would show a fault of 1 in 58" in markdown.text(report)


@pytest.fixture
def compared(report: dict[str, Any]) -> dict[str, Any]:
    """Two ways of making an environment, one of which keeps more."""
    other = copy.deepcopy(report)
    for one, measured in ((report, "lost"), (other, "kept")):
        rows = [{"probe": "process.log", "measured": measured}, {"probe": "file.mode", "measured": "kept"}]
        one["results"][4]["evidence"]["matrix"] = rows
    report["make_kwargs"], other["make_kwargs"] = {"a": 1, "mode": "files"}, {"a": 1, "mode": "all"}
    other["results"][1] |= {"verdict": "PASS", "message": ""}
    other["counts"] |= {"PASS": 3, "FAIL": 0}
    return {**report, "beside": [other]}


def test_side_by_side_names_what_differs(compared: dict[str, Any]) -> None:
    assert comparison.labels(compared) == ["mode=files", "mode=all"]
    rows = {row.name: row for row in comparison.matrices(compared)["probes.matrix"]}
    assert rows["process.log"].cells == ("lost", "kept") and rows["process.log"].differs
    assert not rows["file.mode"].differs
    assert [row.name for row in comparison.verdicts(compared) if row.differs] == ["restore.many"]


def test_a_probe_that_one_report_lacks_differs(compared: dict[str, Any]) -> None:
    del compared["beside"][0]["results"][4]["evidence"]["matrix"][1]
    rows = {row.name: row for row in comparison.matrices(compared)["probes.matrix"]}
    assert rows["file.mode"].cells == ("kept", "") and rows["file.mode"].differs


def test_pages_have_both_columns(compared: dict[str, Any]) -> None:
    text = markdown.text(compared)
    assert "| | `mode=files` | `mode=all` |" in text
    assert "| `process.log` | **lost** | **kept** |" in text and "| `file.mode` | kept | kept |" in text
    page = html.page(compared)
    assert "<th>differs</th><th>mode=files</th><th>mode=all</th>" in page
    row = '<td>process.log</td><td><b class="inconclusive">lost</b></td><td><b class="pass">kept</b></td>'
    assert row in page


def test_a_failure_beside_is_no_success(compared: dict[str, Any]) -> None:
    swapped = {**compared["beside"][0], "beside": [{**compared, "beside": []}]}
    page = html.page(swapped)
    assert "<title>some/Env-v0: FAIL</title>" in page and "mode=files: restore.many" in page
    assert "`mode=files`, `restore.many`" in markdown.text(swapped)
