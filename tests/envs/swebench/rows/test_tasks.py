"""Rows in every published format, and errors for rows that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sandboxgym.envs.swebench.rows import recipes as columns
from sandboxgym.envs.swebench.rows.tasks import DataNotFound, TaskError, TaskNotFound, TaskSet, from_row, open_tasks

OLD: dict[str, Any] = {
    "repo": "pallets/flask",
    "instance_id": "pallets__flask-5014",
    "base_commit": "7ee9ceb71e868944a46e1ff00b506772a53a4f1d",
    "patch": "diff --git a/src/a.py b/src/a.py\n--- a/src/a.py\n+++ b/src/a.py\n@@ -1 +1 @@\n-a\n+b\n",
    "test_patch": "diff --git a/tests/t.py b/tests/t.py\n--- a/tests/t.py\n+++ b/tests/t.py\n@@ -1 +1 @@\n-a\n+b\n",
    "problem_statement": "Names may not be empty",
    "hints_text": "",
    "created_at": "2023-03-04T18:36:21Z",
    "version": "2.3",
    "FAIL_TO_PASS": '["tests/t.py::test_name"]',
    "PASS_TO_PASS": '["tests/t.py::test_other", "tests/t.py::test_third"]',
    "environment_setup_commit": "182ce3dd15dfa3537391c3efaf9c3ff407d134d4",
}


def new_row() -> dict[str, Any]:
    lists = {name: json.loads(OLD[name]) for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    return {**OLD, **lists, **{name: f"own {name}" for name in columns.COLUMNS}}


def test_old_rows_get_the_new_columns() -> None:
    task = from_row(OLD)
    assert task.fail_to_pass == ("tests/t.py::test_name",)
    assert task.pass_to_pass == ("tests/t.py::test_other", "tests/t.py::test_third")
    assert task.log_parser == "parse_log_pytest"
    assert "pytest -rA tests/t.py\n" in task.eval_script


def test_columns_of_a_row_are_kept() -> None:
    task = from_row(new_row())
    assert [getattr(task, name) for name in columns.COLUMNS] == [f"own {name}" for name in columns.COLUMNS]


def test_only_missing_columns_are_derived() -> None:
    task = from_row({**OLD, "image": "mine:1", "eval_script": None})
    assert task.image == "mine:1"
    assert task.log_parser == "parse_log_pytest"


def test_a_row_goes_through_the_new_format() -> None:
    for row in (OLD, {**OLD, "demonstration": ["ls", "cat a"]}):
        assert from_row(from_row(row).row()) == from_row(row)


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet"])
def test_files(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows{suffix}"
    rows = [OLD, {**OLD, "instance_id": "pallets__flask-1"}]
    if suffix == ".json":
        path.write_text(json.dumps(rows))
    elif suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    else:
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist([{**row, "PASS_TO_PASS": ["a", "b"]} for row in rows]), path)
    tasks = open_tasks(path)
    assert [task.instance_id for task in tasks] == ["pallets__flask-5014", "pallets__flask-1"]
    assert tasks[0].patch == OLD["patch"]
    if suffix == ".parquet":
        assert tasks[0].pass_to_pass == ("a", "b")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"patch": None}, r"row 3 \(pallets__flask-5014\), column 'patch': expected text, found None"),
        (
            {"FAIL_TO_PASS": "[1"},
            r"row 3 \(pallets__flask-5014\), column 'FAIL_TO_PASS': expected a JSON list of tests",
        ),
        ({"PASS_TO_PASS": [1]}, r"column 'PASS_TO_PASS': expected a list of tests, found \[1\]"),
        ({"demonstration": "ls"}, r"column 'demonstration': expected a JSON list of commands"),
        ({"instance_id": "a b"}, r"column 'instance_id': expected a name"),
        ({"image": 3}, r"column 'image': expected text, found 3"),
        ({"version": "77"}, r"row 3 .* lacks the columns image, eval_script, log_parser, eval_type: .*version '77'"),
    ],
)
def test_malformed_rows_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        from_row({**OLD, **change}, where="row 3")


@pytest.mark.parametrize("name", ["repo", "instance_id", "test_patch", "FAIL_TO_PASS"])
def test_a_missing_column_is_named(name: str) -> None:
    with pytest.raises(TaskError, match=f"the column '{name}' is missing"):
        from_row({key: value for key, value in OLD.items() if key != name})


@pytest.mark.parametrize("content", ["not json", "3", "[]", '["text"]', json.dumps([OLD, OLD])])
def test_malformed_files(content: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(content)
    with pytest.raises(TaskError, match=r"rows\.json"):
        open_tasks(path)


def test_a_malformed_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(OLD) + "\n{\n")
    with pytest.raises(TaskError, match=r"rows\.jsonl"):
        open_tasks(path)


def test_tasks_by_name() -> None:
    tasks = TaskSet([from_row(OLD), from_row({**OLD, "instance_id": "pallets__flask-4014"})], source="rows")
    assert tasks.index(1) == 1
    assert tasks.index("pallets__flask-5014") == 0
    assert tasks.index("flask-4014") == 1
    with pytest.raises(TaskNotFound, match="2 tasks end in '014'"):
        tasks.index("014")
    with pytest.raises(TaskNotFound, match="near: pallets__flask-5014"):
        tasks.index("pallets__flask-5015")
    with pytest.raises(TaskNotFound, match="tasks 0 to 1, not 2"):
        tasks.index(2)


def test_only_some_instances(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(OLD) + "\n" + json.dumps({"instance_id": "broken__row-1"}))
    assert len(open_tasks(path, instances=["flask-5014"])) == 1
    with pytest.raises(TaskNotFound):
        open_tasks(path, instances=["flask-9"])


def test_data_that_is_not_there_is_said_how_to_get(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SANDBOXGYM_DATA", str(tmp_path))
    with pytest.raises(DataNotFound, match="sandboxgym download swebench --part verified"):
        open_tasks("verified")
    with pytest.raises(DataNotFound, match="expected 'mini'"):
        open_tasks(tmp_path / "none.json")


def test_verified_is_found_where_it_is_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SANDBOXGYM_DATA", str(tmp_path))
    (tmp_path / "swebench").mkdir()
    (tmp_path / "swebench" / "verified.jsonl").write_text(json.dumps(OLD))
    assert open_tasks("verified")[0].instance_id == OLD["instance_id"]


def test_the_digest_tells_tasks_apart() -> None:
    task = from_row(OLD)
    assert task.digest == from_row(dict(OLD)).digest
    for change in ({"FAIL_TO_PASS": "[]"}, {"problem_statement": "other"}, {"image": "other:1"}):
        assert from_row({**OLD, **change}).digest != task.digest


def test_real_rows(verified: TaskSet) -> None:
    assert len(verified) >= 92
    assert sum(task.needs_network for task in verified) >= 2
    assert all(task.fail_to_pass for task in verified)
