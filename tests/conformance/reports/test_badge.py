"""The badge says what the certificate says, and no more."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

from sandboxgym.conformance.__main__ import main
from sandboxgym.conformance.check import Level
from sandboxgym.conformance.reports.badge import badge
from sandboxgym.conformance.runner import all_checks, run
from sandboxgym.conformance.subject import Subject

GREEN, RED, AMBER, GREY = "#2e7d32", "#c62828", "#b26a00", "#757575"


def said(svg: str) -> tuple[str, str]:
    """The words after "snapshots", and the colour behind them."""
    root = ElementTree.fromstring(svg)
    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "snapshots"
    return texts[1], [element.get("fill") or "" for element in root.iter("{http://www.w3.org/2000/svg}rect")][1]


def test_a_badge_counts_the_checks_that_passed_among_all_and_names_the_day(tmp_path, capsys):
    files = [str(tmp_path / name) for name in ("badge.svg", "report.json")]
    asked = ["--only", "api.repeatable", "--in-process", "--badge", files[0], "--json", files[1]]
    assert main(["faulty:deep_copied", *asked]) == 0
    report = json.loads(Path(files[1]).read_text())
    words, colour = said(Path(files[0]).read_text())
    assert words == f"1 of {len(all_checks())} checks pass, {report['started'][:10]}"
    assert colour == AMBER, "a part of the suite is no certificate"
    assert "faulty:deep_copied: " in Path(files[0]).read_text() and "sandboxgym" in Path(files[0]).read_text()


def test_a_failure_is_red_also_of_one_that_ran_beside():
    good = run(Subject.named("faulty:deep_copied"), only=["api.repeatable"])
    bad = run(Subject.named("faulty:Unseeded"), only=["restore.random_streams"])
    words, colour = said(badge(bad))
    assert words.startswith(f"1 of {len(all_checks())} checks fail, 20") and colour == RED
    assert said(badge(replace(good, beside=(bad,))))[1] == RED


def test_only_a_whole_run_is_green():
    part = run(Subject.named("faulty:deep_copied"), only=["api.repeatable"])
    whole = replace(
        part, levels=tuple(map(int, Level)), results=tuple(replace(part.results[0], id=c.id) for c in all_checks())
    )
    assert said(badge(whole))[1] == GREEN
    assert said(badge(replace(whole, results=whole.results[1:])))[1] == AMBER


def test_without_a_run_nothing_is_claimed_and_names_are_no_markup():
    assert said(badge(None)) == ("not certified yet", GREY)
    report = replace(run(Subject.named("faulty:deep_copied"), only=["api.repeatable"]), name="<script>&\"'")
    assert "<script>" not in badge(report) and said(badge(report))


def test_a_folder_that_is_missing_is_found_before_the_run(capsys):
    assert main(["faulty:deep_copied", "--in-process", "--badge", "/no/such/folder/badge.svg"]) == 3
    assert "there is no folder" in capsys.readouterr().err
