"""Every mutant is killed by a check that names its hazard; the known-good environments raise no alarm.

Here each mutant only runs against the checks that must detect it, and each known-good environment gets one short run
of a quarter of the checks; ``killmatrix.py`` and ``falsealarms.py`` run all specimens against all checks. Verdicts on
code that has not changed since are taken from a file; see ``verdicts.py``.
"""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import examining  # noqa: E402  (found beside this file)
import falsealarms  # noqa: E402
import killmatrix  # noqa: E402
import sources  # noqa: E402
import verdicts  # noqa: E402
import zoo  # noqa: E402

from sandboxgym.conformance import Verdict  # noqa: E402
from sandboxgym.conformance.check import Result  # noqa: E402

sys.path.append(str(HERE.parent / "tests" / "support"))
from components import missing  # noqa: E402

pytestmark = pytest.mark.slow


def possible(kept: zoo.Mutant | zoo.Good) -> None:
    """Skip a specimen that this machine's kernel does not support."""
    if kept.make.__module__ == zoo.jail.__name__ and (reason := zoo.jail.why_unavailable()):
        missing("namespaces", reason)


@pytest.mark.parametrize("mutant", zoo.MUTANTS, ids=lambda mutant: mutant.name)
def test_killed_by_a_check_that_names_the_hazard(mutant: zoo.Mutant) -> None:
    possible(mutant)
    row = verdicts.row_of(verdicts.job_of(mutant))
    assert examining.killed(mutant, row), f"{mutant.hazard}: {mutant.note}\n{row.verdicts}\n{row.messages}"


@pytest.mark.parametrize("good", zoo.KNOWN_GOOD, ids=lambda good: good.name)
def test_known_good_raises_no_alarm(good: zoo.Good) -> None:
    possible(good)
    row = verdicts.row_of(verdicts.job_of(good))
    assert not row.failed, row.messages
    assert row.verdicts["restore.many"] is Verdict.PASS or good.name in ("entropy", "uncaptured")


def test_every_check_meets_many_known_good_environments() -> None:
    met = [id for good in zoo.KNOWN_GOOD for id in verdicts.share_of(good)]
    assert min(met.count(check.id) for check in examining.CHECKS) >= len(zoo.KNOWN_GOOD) // verdicts.SHARES - 1


def test_a_verdict_is_taken_from_the_file_while_it_holds_and_not_on_its_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = zoo.MUTANTS[[mutant.name for mutant in zoo.MUTANTS].index("done-lost")]
    file, monday = tmp_path / "verdicts", datetime.date(2026, 11, 23)
    days = [monday + datetime.timedelta(days) for days in range(verdicts.DAYS)]
    (today,) = [day for day in days if verdicts.due(kept.name, day)]
    other = next(day for day in days if day != today)
    job = verdicts.job_of(kept)
    verdicts.write([job], file, processes=1)
    examined: list[str] = []

    def examine(jobs: list[examining.Job], *, processes: int) -> list[examining.Row]:
        examined.extend(job[0] for job in jobs)
        return [examining.Row(kept.name, 0, {}, {}, {})]

    monkeypatch.setattr(examining, "in_own_process", examine)
    assert verdicts.as_expected(verdicts.row_of(job, file=file, day=other)) and not examined
    verdicts.row_of(job, file=file, day=today)
    verdicts.row_of(job, file=tmp_path / "none", day=other)
    assert examined == [kept.name] * 2
    text = file.read_text()
    assert '"FAIL"' in text
    file.write_text(text.replace('"FAIL"', '"PASS"'))
    verdicts.row_of(job, file=file, day=other)
    assert len(examined) == 3, "what is not as it should be is examined"
    file.write_text(text)
    monkeypatch.setattr(sources, "check_digest", lambda id: "another check")
    verdicts.row_of(job, file=file, day=other)
    assert len(examined) == 4


def test_every_specimen_has_its_day() -> None:
    monday = datetime.date(2026, 11, 23)
    each = Counter(
        day
        for kept in zoo.MUTANTS
        for day in range(verdicts.DAYS)
        if verdicts.due(kept.name, monday + datetime.timedelta(day))
    )
    assert each.total() == len(zoo.MUTANTS)
    assert len(each) == verdicts.DAYS and max(each.values()) < 2 * len(zoo.MUTANTS) / verdicts.DAYS


@pytest.mark.parametrize("name", verdicts.QUICK)
def test_known_good_with_the_quick_budget(name: str) -> None:
    """Some of each kind: ``falsealarms.py`` runs them all."""
    row = verdicts.row_of(verdicts.quick_job_of(name))
    assert not row.failed, row.messages
    assert list(row.verdicts.values()).count(Verdict.PASS) > len(row.verdicts) // 2


def test_specimens_are_well_described() -> None:
    names = [kept.name for kept in (*zoo.MUTANTS, *zoo.KNOWN_GOOD)]
    assert len(set(names)) == len(names)
    assert len(zoo.MUTANTS) >= 280 and len(zoo.KNOWN_GOOD) >= 27
    assert len({mutant.family for mutant in zoo.MUTANTS}) >= 4
    known = {check.id for check in examining.CHECKS}
    for mutant in zoo.MUTANTS:
        assert mutant.killed_by <= known, mutant.name
        assert mutant.hazard and mutant.note, mutant.name
        assert not mutant.follows or re.fullmatch(r"[\w.-]+/[\w.-]+#[1-9]\d*", mutant.follows), mutant.name
    assert len({mutant.follows for mutant in zoo.MUTANTS} - {""}) >= 60


def test_every_family_of_checks_has_a_mutant() -> None:
    named = {id.partition(".")[0] for mutant in zoo.MUTANTS for id in mutant.killed_by}
    assert set(killmatrix.families()) - named <= {"probes", "machine"}


def test_processes_of_a_run_have_imported_the_suite_before_they_start() -> None:
    before = dict(os.environ)
    with examining.pool(1) as pool:
        assert os.environ == before
        assert pool.apply(eval, ("__import__('examining').IMPORTED_IN",)) == pool.apply(os.getppid)


def test_an_interrupted_command_is_resumed(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    jobs: list[examining.Job] = [("corridor", "quick", seed, ["api.protocol"]) for seed in range(2)]
    (first,) = examining.journaled(jobs[:1], journal, processes=1)
    assert [row for row in examining.journaled(jobs, journal, processes=0)] == [first]
    assert [row.seed for row in examining.journaled(jobs, journal, processes=1)] == [0, 1]
    assert len(journal.read_text().splitlines()) == 2


def test_a_check_that_changed_is_run_again_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = tmp_path / "journal"
    jobs: list[examining.Job] = [("done-lost", "quick", 0, ["api.protocol", "restore.random_streams"])]
    (first,) = examining.journaled(jobs, journal, processes=1)
    real = sources.check_digest
    monkeypatch.setattr(sources, "check_digest", lambda id: "" if id == "restore.random_streams" else real(id))
    assert list(examining.journaled(jobs, journal, processes=0)) == []
    (second,) = examining.journaled(jobs, journal, processes=1)
    assert second.verdicts == first.verdicts
    assert second.took["api.protocol"] == first.took["api.protocol"]
    assert second.took["restore.random_streams"] != first.took["restore.random_streams"]
    assert list(examining.journaled(jobs, journal, processes=0)) == [second]
    (third,) = examining.journaled(jobs, journal, processes=1, anew=True)
    assert third.took["api.protocol"] != first.took["api.protocol"]


def test_code_of_a_specimen_is_all_that_it_refers_to_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(name: str, module: str = "", old: str = "", new: str = "") -> str:
        text = sources._text
        with monkeypatch.context() as patch:
            if module:
                assert old in text(module)
                patch.setattr(
                    sources, "_text", lambda name: text(name).replace(old, new) if name == module else text(name)
                )
            for cached in (sources._index, sources._imports, sources._outside):
                cached.cache_clear()
            found = sources.specimen_digest(examining.specimen(name))
        for cached in (sources._index, sources._imports, sources._outside):
            cached.cache_clear()
        return found

    limit, other = ("zoo.corridor", "annotations\n", "annotations\nMORE = 1\n"), "class DoneSticks("
    first = digest("done-lost")
    assert digest("done-lost", *limit) == first, "nothing uses the new constant"
    assert digest("done-lost", "zoo.corridor", "class DoneLost(", "class DoneLost(object, ") != first
    assert digest("done-lost", "zoo.corridor", "class Corridor(", "class Corridor(object, ") != first
    assert digest("done-lost", "zoo.corridor", other, "class DoneSticks(object, ") == first
    assert digest("done-lost", "sandboxgym.core", "import copy\n", "import copy\nMORE = 1\n") != first
    home = ("sandboxgym.envs.alfworld.env", "annotations\n", "annotations\nMORE = 1\n")
    assert digest("alfworld", *home) != digest("alfworld")
    assert digest("done-lost", *home) == first
    read = Path.read_bytes
    before = digest("alfworld")
    monkeypatch.setattr(Path, "read_bytes", lambda path: b"" if path.name == "domain.pddl" else read(path))
    assert digest("alfworld") != before, "its games are made of it"
    assert digest("done-lost") == first


def test_results_are_found_again_by_a_process_with_other_hashes_of_text() -> None:
    script = f"""import sys; sys.path.insert(0, {str(HERE)!r}); import sources, zoo
print([sources.specimen_digest(one) for one in (*zoo.KNOWN_GOOD, *zoo.MUTANTS)])"""
    command = [sys.executable, "-c", script]
    texts = [
        subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True)
        for seed in ("1", "2")
    ]
    assert texts[0].stdout == texts[1].stdout and len(texts[0].stdout) > 1000


def test_checks_that_cannot_change_a_row_are_left_out() -> None:
    mutant = next(m for m in zoo.MUTANTS if m.killed_by == {"restore.after_done"})
    without = examining.needless(mutant)
    checks = {check.id: check for check in examining.CHECKS}
    failed = {"restore.many": Result("restore.many", Verdict.FAIL)}
    assert not without(checks["restore.nested"], {})
    assert not without(checks["restore.nested"], {"restore.many": Result("restore.many", Verdict.PASS)})
    assert without(checks["restore.nested"], failed)
    assert not without(checks["restore.after_done"], failed), "it must find the fault"
    for id in examining.PREREQUISITES:
        other = next(other for other in checks if examining.family(other) == examining.family(id) and other != id)
        assert not without(checks[id], {other: Result(other, Verdict.FAIL)}), "others are skipped where it fails"
    assert not without(checks["fork.crowd"], failed)


def test_the_command_writes_a_page(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "kill-matrix.md"
    command = [sys.executable, str(HERE / "killmatrix.py"), "--only", "done-lost", "corridor"]
    chosen = ["--checks", "restore.trace_equality", "restore.after_done", "--markdown", str(page)]
    done = subprocess.run([*command, *chosen], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    text = page.read_text(encoding="utf-8")
    assert "1 of 1 mutants killed" in text and "| corridor: done-lost | the done flag is lost |" in text
    assert "| corridor | 0 |" in text


def test_what_a_mutant_writes_beside_the_program_goes_with_its_process(tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "killmatrix.py"), "--only", "file-besides", "--named"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


def test_folders_of_a_killed_run_go_with_the_next(tmp_path: Path) -> None:
    def examine(what: str) -> subprocess.CompletedProcess[str]:
        code = f"import os, examining; examining.examine = {what}; examining._examine(('corridor', 'quick', 0, None))"
        environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent}"}
        environment.pop("SANDBOXGYM_RUNTIME", None)
        command = [sys.executable, "-c", code]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)

    def left() -> list[str]:
        return [path.name for path in tmp_path.rglob("*") if path.name.startswith(("kept", "sandboxgym-conformance"))]

    kill = "lambda *_, **__: (open(os.environ['TMPDIR'] + '/kept', 'w').close(), os.kill(os.getpid(), 9))"
    assert examine(kill).returncode == -9
    assert len(left()) == 3, "the file and the two folders"
    done = examine("lambda *_, **__: None")
    assert done.returncode == 0, done.stderr
    assert left() == []


def test_false_alarms_are_looked_for_where_it_is_asked() -> None:
    goods = [good.name for good in zoo.KNOWN_GOOD]
    jobs = falsealarms.jobs(5, ["limited", "dice"], rest=1)
    chosen = [goods[index] for index in sorted((goods.index("limited"), goods.index("dice")))]
    assert [job[0] for job in jobs[:5]] == [chosen[index % 2] for index in range(5)]
    assert sorted(job[0] for job in jobs[5:]) == sorted(set(goods) - set(chosen))
    assert [job[2] for job in jobs] == list(range(1, len(jobs) + 1))
    assert [job[0] for job in falsealarms.jobs(len(goods))] == goods
    with pytest.raises(SystemExit, match="found dicee"):
        falsealarms.jobs(1, ["dicee"])


def test_a_third_party_package_certifies_itself_in_one_line() -> None:
    """By a few checks here: tests/conformance/reports/test_documented_examples.py runs all of them on it."""
    package = HERE / "example_package"
    sources = [path.read_text(encoding="utf-8") for path in (package / "src").rglob("*.py")]
    assert sources and not any("sandboxgym" in source for source in sources)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "few_checks", "tests"]
    path = os.pathsep.join([str(HERE.parent / "tests" / "support"), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=package, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
