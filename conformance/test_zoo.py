"""The suite has teeth: every mutant is killed by a check that names its hazard; the known-good raise no alarm.

Here each mutant meets only the checks that must find it, and each known-good environment one short run;
``killmatrix.py`` runs everything with everything.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import killmatrix  # noqa: E402  (found beside this file)
import zoo  # noqa: E402

from sandboxgym.conformance import Verdict  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("mutant", zoo.MUTANTS, ids=lambda mutant: mutant.name)
def test_killed_by_a_check_that_names_the_hazard(mutant: zoo.Mutant) -> None:
    (row,) = killmatrix.in_own_process([(mutant.name, mutant.budget, 0, killmatrix.NAMED)], processes=1)
    assert killmatrix.killed(mutant, row), f"{mutant.hazard}: {mutant.note}\n{row.verdicts}\n{row.messages}"


@pytest.mark.parametrize("good", zoo.KNOWN_GOOD, ids=lambda good: good.name)
def test_known_good_raises_no_alarm(good: zoo.Good) -> None:
    ids = [check.id for check in killmatrix.CHECKS if not check.id.startswith(killmatrix.SLOW_ALARMS)]
    (row,) = killmatrix.in_own_process([(good.name, killmatrix.SEEDS_BUDGET, 1, ids)], processes=1)
    assert not row.failed, row.messages
    assert row.verdicts["restore.many"] is Verdict.PASS or good.name == "entropy"


def test_known_good_with_the_quick_budget() -> None:
    untimed = [check.id for check in killmatrix.CHECKS if not check.id.startswith("cost.")]
    jobs = [(good.name, "quick", 0, untimed) for good in zoo.KNOWN_GOOD]
    rows = killmatrix.in_own_process(jobs, processes=os.cpu_count() or 1)
    assert {row.name: row.messages for row in rows if row.failed} == {}


def test_specimens_are_well_described() -> None:
    names = [kept.name for kept in (*zoo.MUTANTS, *zoo.KNOWN_GOOD)]
    assert len(set(names)) == len(names)
    assert len(zoo.MUTANTS) >= 50
    assert len({mutant.family for mutant in zoo.MUTANTS}) >= 4
    known = {check.id for check in killmatrix.CHECKS}
    for mutant in zoo.MUTANTS:
        assert mutant.killed_by <= known, mutant.name
        assert mutant.hazard and mutant.note, mutant.name


def test_every_family_of_checks_has_a_mutant() -> None:
    named = {id.partition(".")[0] for mutant in zoo.MUTANTS for id in mutant.killed_by}
    assert set(killmatrix.families()) - named <= {"probes", "machine"}


def test_the_command_writes_a_page(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "kill-matrix.md"
    command = [sys.executable, str(HERE / "killmatrix.py"), "--only", "done-lost", "corridor"]
    chosen = ["--checks", "restore.trace_equality", "restore.after_done", "--markdown", str(page)]
    done = subprocess.run([*command, *chosen], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    text = page.read_text(encoding="utf-8")
    assert "1 of 1 mutants killed" in text and "| corridor: done-lost | the done flag is lost |" in text
    assert "| corridor | 1 | 0 |" in text


def test_a_third_party_package_certifies_itself_in_one_line() -> None:
    package = HERE / "example_package"
    sources = [path.read_text(encoding="utf-8") for path in (package / "src").rglob("*.py")]
    assert sources and not any("sandboxgym" in source for source in sources)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, cwd=package, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
