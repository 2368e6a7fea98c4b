"""The benchmark of SWE-bench on a large repository: what it builds, and that it measures every number."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandboxgym.bench import swebench
from sandboxgym.bench.sandbox import Times
from sandboxgym.envs.swebench.workspaces import prepared


def test_the_repository_is_the_same_each_time_and_has_as_many_files_as_are_wanted(tmp_path: Path) -> None:
    rows = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        rows.append(swebench.build(tmp_path / name, 130))
        assert len(list((tmp_path / name / "modules").rglob("*.py"))) == 130
    assert rows[0] == rows[1]
    assert rows[0]["base_commit"] in rows[0]["eval_script"] and not rows[0]["history"]
    (tmp_path / "one" / "file").write_text(rows[0]["patch"])
    swebench._git(tmp_path / "one", "apply", "--check", "file")  # the solution is one of this repository


def test_what_took_more_than_it_may_is_said() -> None:
    quick, slow = swebench.SWEBenchRow(), swebench.SWEBenchRow()
    for row, step, reset in ((quick, 0.003, 0.2), (slow, 0.031, 0.35)):
        row.execute, row.step = Times([0.001]), Times([step])
        row.reset = row.reset_new = row.busy = Times([reset])
    lines = swebench.limits({"quick": quick, "slow": slow})
    assert "| a step of `true`, in commands | 3 | 3.0 | 31.0, more |" in lines
    assert "| a reset to a prepared row, ms | 200 | 200 | 350, more |" in lines


@pytest.mark.slow
@pytest.mark.usefixtures("official_code")
def test_all_is_measured_and_nothing_is_left(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SANDBOXGYM_RUNTIME", str(tmp_path_factory.mktemp("runtime")))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    before = os.environ.get("SANDBOXGYM_CACHE")
    lines = swebench.measure(["copy", "docker"], 40, None, repeats=2, few=1, seconds=0.0)
    text = "\n".join(lines)
    assert f"| copy: `true` | {swebench.STEPS} |" in text, "a backend that has taken its time makes no more repetitions"
    assert "`docker` was not measured: no image was given" in text
    assert "the official harness were not measured: no image was given." in text
    assert os.environ.get("SANDBOXGYM_CACHE") == before
    assert not list(tmp_path.iterdir()) and not [entry for entry in prepared.listed() if tmp_path in entry.path.parents]
