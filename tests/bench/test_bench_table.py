"""The table of speeds: rows that fail cost nothing but themselves; a comparison finds what became slower."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sandboxgym.bench.table import compare, measure, run
from sandboxgym.bench.table.measure import Measured
from sandboxgym.bench.table.row import Options, Pair, in_turns
from sandboxgym.bench.table.rows import ROWS
from sandboxgym.cli import main as sandboxgym_main


@pytest.fixture(autouse=True)
def _rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SOURCES", ("bench_rows", "no_such_module"))
    monkeypatch.setattr(measure, "START", 30.0)


def measured(name: str, seconds: float = 0.2, options: Options | None = None) -> Measured:
    source, row = measure.all_rows()[0][f"test.{name}"]
    return measure.measure(source, row, options or Options(), seconds)


def test_a_row_is_measured_in_a_process_of_its_own() -> None:
    found = measured("steady")
    assert found.reason is None
    assert len(found.pairs) >= 3
    assert found.pairs[:3] == [(1.0, 2.0), (1.0, 2.1), (1.0, 2.2)]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("few", "1 measurements in 30 s; at least 3 are needed"),
        ("missing", "no image debian"),
        ("failing", "ended with 1: ValueError: on the way"),
        ("dying", "ended with 7: no message"),
    ],
)
def test_a_row_without_enough_measurements_says_why(name: str, reason: str) -> None:
    assert measured(name, options=Options(image="debian")).reason == reason


def test_temporary_files_of_a_killed_row_are_removed() -> None:
    reason = measured("littering").reason
    assert reason is not None and reason.startswith("ended with 7: ")
    folder = Path(reason.removeprefix("ended with 7: "))
    assert folder.is_absolute() and not folder.exists() and not folder.parent.exists()


def test_a_row_that_hangs_ends_with_its_time_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = measure._lines

    def once_it_hangs(pipe: Any) -> Any:
        """Its time begins when it does nothing any more, however long its start takes."""
        found, end = lines(pipe), time.monotonic() + 300
        while not (tmp_path / "left").exists():
            assert time.monotonic() < end
            time.sleep(0.05)
        return found

    monkeypatch.setattr(measure, "_lines", once_it_hangs)
    monkeypatch.setattr(measure, "START", 5.0)
    found = measured("hanging", options=Options(games=str(tmp_path)))
    assert found.reason == "0 measurements in 5 s; at least 3 are needed"
    assert not (tmp_path / "left").exists()
    pid, patience = int((tmp_path / "pid").read_text()), time.monotonic() + 300
    while os.path.exists(f"/proc/{pid}") and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < patience
        time.sleep(0.05)


def test_both_ways_take_turns_in_beginning() -> None:
    calls: list[str] = []
    pairs = in_turns(lambda: calls.append("ours"), lambda: calls.append("instead"), calls=(1, 1))
    for _ in range(4):
        assert len(next(pairs)) == 2
    assert calls[2:] == ["ours", "instead", "instead", "ours"] * 2


def test_every_row_has_a_name_of_its_own_that_begins_with_its_subject() -> None:
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
    assert {name.split(".")[0] for name in names} == {
        "alfworld", "webshop", "sandbox", "full", "store", "workers", "rollouts", "cli",
    }  # fmt: skip


# Files and pages


def noisy(ratio: float, *, seed: int, number: int = 60, noise: float = 0.1, load: float = 1.0) -> list[Pair]:
    """Pairs of a machine whose speed varies, by a factor that both sides of a pair share."""
    rng = np.random.default_rng(seed)
    shared = load * np.exp(rng.normal(0, 1, number))
    return [(float(s), float(s * ratio * np.exp(e))) for s, e in zip(shared, rng.normal(0, noise, number), strict=True)]


def content_of(pairs: str) -> str:
    row = f'{{"what": "", "instead": "", "unit": "seconds", "clock": "wall", "reason": null, "pairs": {pairs}}}'
    return f'{{"format": 1, "machine": "", "commit": "", "load": 0, "seconds": 1, "rows": {{"a": {row}}}}}'


def file_of(path: Path, **pairs: list[Pair]) -> Path:
    head = {"machine": "2 cores", "commit": "abc", "load": 0.5, "seconds": 20.0}
    run.write_json(path, head, {name: Measured(name, "other", "seconds", "wall", p) for name, p in pairs.items()})
    return path


def test_a_comparison_finds_what_became_slower_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = file_of(tmp_path / "a", same=noisy(3, seed=1), slow=noisy(3, seed=2), fast=noisy(3, seed=3))
    after = file_of(
        tmp_path / "b",
        same=noisy(3, seed=4, load=5.0),
        slow=noisy(3 / 1.2, seed=5, load=5.0),
        fast=noisy(3 * 1.2, seed=6, load=5.0),
        new=noisy(1, seed=7),
    )
    assert compare.main([str(before), str(after)]) == 1
    text = capsys.readouterr().out
    assert "| slow | slower |" in text and "| same | as before |" in text and "| fast | faster |" in text
    assert text.endswith("Not measured in both, or not in the same way: new\n\nSlower: slow\n")
    assert compare.main([str(before), str(before)]) == 0
    assert compare.main([str(before), str(after), "--least", "0.5"]) == 0


def test_rows_that_changed_are_not_compared_and_odd_costs_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    free, dear = [(0.0, 1.0)] * 3, [(1.0, 0.0)] * 3
    before = file_of(tmp_path / "a", free=free, dear=dear, dearer=free, changed=noisy(3, seed=1))
    after = file_of(tmp_path / "b", free=free, dear=dear, dearer=dear, changed=noisy(2, seed=1))
    content = json.loads(after.read_text())
    content["rows"]["changed"]["instead"] = "something else"
    after.write_text(json.dumps(content))
    assert compare.main([str(before), str(after)]) == 1
    text = capsys.readouterr().out
    assert "| free | as before | 1.00 |" in text and "| dear | as before | 1.00 |" in text
    assert text.endswith("Not measured in both, or not in the same way: changed\n\nSlower: dearer\n")


def test_all_rows_together_keep_to_the_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[float] = []
    clock = [0.0]

    def slow(source: str, row: object, options: Options, seconds: float) -> Measured:
        given.append(seconds)
        clock[0] += 30 + seconds  # 30 s to get ready
        return Measured("", "", "seconds", "wall", [(1.0, 2.0)] * 3)

    monkeypatch.setattr(run, "measure", slow)
    monkeypatch.setattr(run.time, "monotonic", lambda: clock[0])
    assert run.main(["--minutes", "5"]) == 0
    assert len(given) == 7 and given[0] == 20.0 and min(given) > 5 and sum(given) + 7 * 30 <= 5 * 60.01


def test_noise_alone_is_seldom_told_as_a_change() -> None:
    def rows(seed: int) -> dict[str, Measured]:
        return {str(n): Measured("", "", "seconds", "wall", noisy(2, seed=1000 * seed + n)) for n in range(200)}

    verdicts = [verdict for _, verdict, *_ in compare.compared(rows(1), rows(2), least=0.0)]
    assert len(verdicts) == 200
    assert sum(verdict != "as before" for verdict in verdicts) <= 10


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("[]", "expected what"),
        ("{", "expected what"),
        ('{"format": 2, "rows": {}}', "another format"),
        ('{"format": 1, "rows": {"a": {"pairs": []}}}', "expected what"),
        ('{"format": 1, "rows": {}, "machine": 3}', "no machine"),
        ("[" * 100_000, "expected what"),
        (content_of("[[1, 1e999], [1, 1], [1, 1]]"), "without bound"),
        (content_of("[[NaN, 1], [1, 1], [1, 1]]"), "without bound"),
        (content_of("[[1, -1], [1, 1], [1, 1]]"), "below 0"),
        (content_of("[[1, 1" + "0" * 400 + "], [1, 1], [1, 1]]"), "expected what"),
        (content_of("[[1, 2], [1, 2]]"), "2 measurements"),
        (content_of("[[1, 2, 3], [1, 2], [1, 2]]"), "expected what"),
    ],
)
def test_what_is_no_table_is_refused(
    content: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "table.json"
    if content is not None:
        path.write_text(content)
    good = file_of(tmp_path / "good", a=noisy(1, seed=1))
    for files in ((path, good), (good, path)):
        with pytest.raises(SystemExit) as leave:
            compare.main([str(each) for each in files])
        assert leave.value.code == 2
        assert words in capsys.readouterr().err


def test_a_page_is_made_from_measurements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "table.json"
    head = {"machine": "2 cores", "commit": "abc", "load": 0.5, "seconds": 20.0}
    rows = {
        "a.quick": Measured("A, quick", "slow", "seconds", "wall", [(1e-5, 2e-5)] * 5),
        "b.small": Measured("B, small", "large", "bytes", "processor", [(300.0, 6e5)] * 5),
        "c.away": Measured("C", "other", "seconds", "wall", reason="no such thing here"),
    }
    run.write_json(source, head, rows)
    page = tmp_path / "page.md"
    assert sandboxgym_main(["bench", "table", "--from", str(source), "--write", str(page)]) == 0
    text = page.read_text()
    assert "| **2** (2 to 2) | A, quick | slow | 10 µs | 20 µs | wall |" in text
    assert "| **2,000** (2,000 to 2,000) | B, small | large | 300 B | 600 kB |  |" in text
    assert "- `c.away`, C: no such thing here" in text
    assert "commit abc" in text
    capsys.readouterr()


def test_the_command_measures_writes_and_tells_of_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "new" / "table.json"
    words = ["bench", "table", "--seconds", "0.1", "--json", str(target)]
    assert sandboxgym_main([*words, "--only", "test.steady", "test.missing"]) == 0
    said = capsys.readouterr()
    assert "no_such_module: its rows are left out" in said.err
    assert json.loads(target.read_text())["rows"]["test.missing"]["reason"] == "no image None"
    assert sandboxgym_main([*words, "--only", "test.failing"]) == 1
    assert "ended with 1" in capsys.readouterr().err
    for wrong in (["--only", "nothing"], ["--seconds", "0"], ["--seconds", "nan"]):
        with pytest.raises(SystemExit) as leave:
            sandboxgym_main([*words, *wrong])
        assert leave.value.code == 2
