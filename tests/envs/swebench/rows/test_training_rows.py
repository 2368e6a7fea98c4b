"""Rows of other training sets, without an image: what they become, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rows_of_others import (  # noqa: F401 - fixtures
    commit,
    git,
    simple,
)

from sandboxgym.envs.swebench.grading import parsers
from sandboxgym.envs.swebench.rows import datasets
from sandboxgym.envs.swebench.rows.row_files import TaskError
from sandboxgym.envs.swebench.rows.tasks import DataNotFound, Task, TaskNotFound, from_row, open_tasks


def test_what_a_row_of_each_style_becomes() -> None:
    task = from_row(simple("swe-smith"))
    assert (task.style, task.image) == ("swe-smith", "swebench/swesmith.x86_64.o_1776_r.12345678")
    assert task.bug == simple("swe-smith")["patch"]
    assert "-bad\n+good\n" in task.patch
    assert task.hidden == ("tests/test_a.py",)
    assert "git checkout HEAD --" in task.eval_script and "tests/test_b.py" in task.eval_script
    assert "\npytest --disable-warnings --color=no --tb=no --verbose\n" in task.eval_script

    task = from_row(simple("swe-gym"))
    assert (task.style, task.image) == ("swe-gym", "xingyaoww/sweb.eval.x86_64.o_s_r-1:latest")
    assert "\npytest -n0 -rA tests/test_a.py\n" in task.eval_script
    assert task.log_parser == "parse_log_pytest"

    task = from_row(simple("swe-rebench"))
    assert (task.style, task.image) == ("swe-rebench", "swerebench/sweb.eval.x86_64.o_1776_r-1:latest")
    assert "\npytest -rA tests/test_a.py\n" in task.eval_script
    assert task.log_parser == "parse_log_pytest_v2"

    task = from_row(simple("r2e-gym"))
    assert (task.style, task.instance_id) == ("r2e-gym", f"sympy__{'b' * 12}")
    assert task.base_commit == "a" * 40
    assert task.patch == simple("swe-smith")["patch"]
    assert task.expected == (("test_a", "PASSED"),)
    assert task.fail_to_pass == ("test_a",)


@pytest.mark.parametrize("style", [datasets.BENCH, datasets.SMITH, datasets.GYM, datasets.REBENCH, datasets.R2E])
def test_each_style_goes_through_our_own_rows(style: str) -> None:
    task = from_row(simple(style))
    assert task.style == style
    assert from_row(json.loads(json.dumps(task.row()))) == task
    assert from_row(task.row()).digest == task.digest


@pytest.mark.parametrize("style", [datasets.SMITH, datasets.GYM, datasets.REBENCH, datasets.R2E])
def test_a_missing_column_is_named_with_what_it_is_for(style: str) -> None:
    known_by = {"swe-smith": (), "swe-rebench": ("install_config",), "swe-gym": ("repo",)}.get(style, ())
    for name, why in datasets.WHY[style].items():
        if name in known_by:
            continue
        with pytest.raises(TaskError, match=rf"the column '{name}' is missing, {why}"):
            from_row({key: value for key, value in simple(style).items() if key != name}, where="row 7")


def test_a_row_of_no_style_says_what_each_would_need() -> None:
    with pytest.raises(
        TaskError, match=r"row 3: its columns fit no style: .*swe-smith \(.*patch.*\).*r2e-gym"
    ) as error:
        from_row({"question": "?", "answer": "!"} | {f"column {n}": "x" * 1000 for n in range(1000)}, where="row 3")
    assert len(str(error.value)) < 2500


def test_a_row_may_bring_what_is_else_known_by_heart() -> None:
    row = {**simple("swe-smith"), "image": "own:1", "eval_script": "go test", "log_parser": "parse_log_gotest"}
    task = from_row({**row, "FAIL_TO_PASS": ["TestA"], "PASS_TO_PASS": []})
    assert (task.image, task.eval_script, task.log_parser) == ("own:1", "go test", "parse_log_gotest")
    with pytest.raises(TaskError, match="rows of other languages must bring eval_script and log_parser"):
        from_row({**simple("swe-smith"), "FAIL_TO_PASS": ["TestA"]})


def test_the_digest_tells_what_is_done_to_the_image() -> None:
    task = from_row(simple("swe-bench"))
    for change in ({"bug": "x"}, {"hidden": ["x"]}, {"removed": ["x"]}, {"expected": {"x": "PASSED"}}):
        changed = from_row({**simple("swe-bench"), **change})
        assert changed.digest != task.digest
        assert from_row(changed.row()) == changed


def test_a_source_file_is_not_hidden_for_the_tests_in_it() -> None:
    row = {**simple("swe-smith"), "FAIL_TO_PASS": ["a.py::a", "lib/x.py::x", "tests/test_a.py::test_a"]}
    assert from_row(row).hidden == ("tests/test_a.py",)


@pytest.mark.parametrize(
    "repository, ids, words",
    [
        ("sympy__sympy", ["sympy/a.py::t"], "--verbose sympy/a.py tests/test_b.py\n"),
        (
            "python__mypy",
            ["mypy/test/testcheck.py::Suite::testOne", "a.py::B::testTwo"],
            "-rA -k 'testOne or testTwo or test_b'\n",
        ),
        ("tornadoweb__tornado", ["test_a (tornado.test.web_test.A)"], "\npython -m tornado.test --verbose\n"),
        ("paramiko__paramiko", ["tests/test_a.py::test_a"], "\npytest -rA --color=no --disable-warnings\n"),
    ],
)
def test_commands_of_swe_smith(repository: str, ids: list[str], words: str) -> None:
    row = {**simple("swe-smith"), "repo": f"swesmith/{repository}.12345678", "FAIL_TO_PASS": ids}
    assert words in from_row(row).eval_script


@pytest.mark.parametrize("version, command", [("1.6", "pytest -n0 -rA -k"), ("1.10", "pytest -rA -k")])
def test_cases_of_mypy_in_swe_gym(version: str, command: str) -> None:
    test_patch = "diff --git a/test-data/x.test b/test-data/x.test\n+[case testOne]\n+[case testTwo]\n"
    row = {**simple("swe-gym"), "repo": "python/mypy", "version": version, "test_patch": test_patch}
    assert f'\n{command} "testOne or testTwo"\n' in from_row(row).eval_script


PATCHES = {
    "a change": ({"a": "1\n2\n3\n"}, {"a": "1\n4\n5\n3\n"}),
    "no newline at the end": ({"a": "1\n2"}, {"a": "1\n3\n"}),
    "and the other way round": ({"a": "1\n3\n"}, {"a": "1\n2"}),
    "a new file": ({}, {"b": "1\n"}),
    "a deleted file": ({"b c": "1\n"}, {}),
    "two hunks": ({"a": "\n".join(map(str, range(50)))}, {"a": "\n".join(map(str, [*range(5), *range(6, 45), 7]))}),
    "a renamed file": ({"old": "1\n2\n3\n4\n"}, {"new": "1\n2\n3\n5\n"}),
    "two files": ({"a": "1\r\n", "b": "-- x\n"}, {"a": "2\r\n", "b": "++ y\n"}),
    "no letters of ours": ({"ä": "1\n"}, {"ä": "2\n"}),
    "a renamed file of such": ({"ä": "1\n2\n3\n4\n"}, {"ö": "1\n2\n3\n5\n"}),
}


@pytest.mark.parametrize("name", PATCHES)
def test_patches_are_turned_round_as_git_does(name: str, tmp_path: Path) -> None:
    before, after = PATCHES[name]
    git(tmp_path, "init", "-q")
    for files in (before, after):
        for path in tmp_path.iterdir():
            if path.name != ".git":
                path.unlink()
        for path, content in files.items():  # type: ignore[assignment]
            (tmp_path / path).write_bytes(content.encode())
        git(tmp_path, "add", "-A")
        git(tmp_path, "commit", "-q", "--allow-empty", "-m", "x")
    forward, backward = (git(tmp_path, "diff", "-M", *pair) for pair in (("HEAD~1", "HEAD"), ("HEAD", "HEAD~1")))
    made = datasets.reversed_patch(forward)
    assert datasets.reversed_patch(made) == forward
    (tmp_path / ".git/reversed").write_text(made, newline="")
    git(tmp_path, "apply", "--index", ".git/reversed")
    assert git(tmp_path, "diff", "--cached", "HEAD~1") == ""
    if name != "two hunks":  # what git says after @@ is a matter of the old side
        assert made == backward


@pytest.mark.parametrize("patch", ["", "no patch", "diff --git a/x b/x\nGIT binary patch\nliteral 1\nx\n"])
def test_what_cannot_be_turned_round_is_refused(patch: str) -> None:
    with pytest.raises(TaskError, match="column 'patch'"):
        from_row({**simple("swe-smith"), "patch": patch})


@pytest.mark.parametrize(
    "parser, log, found",
    [
        ("pytest_verbose", "a.py::b ERROR [ 1%]\nx\nPASSED a.py::c", {"a.py::b": "ERROR"}),
        (
            "pytest_summary",
            "PASSED a.py::b\nFAILED a.py::c - x\na.py::d PASSED",
            {"a.py::b": "PASSED", "a.py::c": "FAILED"},
        ),
        ("pytest_workers", "[gw1] PASSED a.py::b\nPASSED a.py::c", {"a.py::b": "PASSED"}),
        ("tornado", "test_a (t.A) ... ok\nFAIL: test_b (t.B)", {"test_a (t.A)": "PASSED", "test_b (t.B)": "FAILED"}),
        ("mypy_cases", "PASSED mypy/a.test::testA", {"mypy/a.test::testA": "PASSED"}),
        ("r2e", "PASSED a.py::b", {}),
        ("r2e", "short test summary info\nERROR a.py - x\nSKIPPED [1] b\n1 passed", {"": "ERROR"}),
    ],
)
def test_parsers(parser: str, log: str, found: dict[str, str]) -> None:
    assert getattr(parsers, parser)(log) == found


@pytest.mark.parametrize("name", datasets.NAMES)
def test_data_sets_are_found_by_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOXGYM_DATA", str(tmp_path))
    with pytest.raises(DataNotFound, match=f"no {name}.parquet, .jsonl or .json in .*, nor a directory {name}"):
        open_tasks(name)
    (tmp_path / "swebench").mkdir()
    (tmp_path / "swebench" / f"{name}.jsonl").write_text(json.dumps(simple(name)))
    assert open_tasks(name)[0].style == name


def test_a_directory_of_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "swebench" / "swe-smith" / "data"
    folder.mkdir(parents=True)
    for number in range(3):
        rows = [{**simple("swe-smith"), "instance_id": f"o__r.12345678.x__{number}{more}"} for more in range(10)]
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"train-0000{number}-of-00003.parquet")
    monkeypatch.setenv("SANDBOXGYM_DATA", str(tmp_path))
    tasks = open_tasks("swe-smith")
    assert [task.instance_id[-2:] for task in tasks] == [f"{n // 10}{n % 10}" for n in range(30)]
    assert open_tasks(folder.parent, instances=["x__12"])[0].instance_id == "o__r.12345678.x__12"
    names: list[Task] = list(tasks)
    assert names[0].fail_to_pass[0] is names[1].fail_to_pass[0]  # thousands of rows share them


def test_instances_of_rows_without_a_name_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([simple("r2e-gym"), {**simple("r2e-gym"), "commit_hash": "c" * 40}]))
    assert [task.instance_id for task in open_tasks(path, instances=["c" * 12])] == [f"sympy__{'c' * 12}"]
    with pytest.raises(TaskNotFound, match="has none of x"):
        open_tasks(path, instances=["x"])


DEEP = "[" * 100_000
LONG = 33 * 2**20


@pytest.mark.parametrize(
    "style, change, message",
    [
        (
            "swe-smith",
            {"patch": "x" * LONG},
            r"column 'patch': expected at most 33,554,432 characters, found 34,603,008",
        ),
        ("swe-bench", {"problem_statement": "x" * LONG}, r"column 'problem_statement': expected at most"),
        ("swe-bench", {"FAIL_TO_PASS": DEEP}, r"column 'FAIL_TO_PASS': expected a JSON list of tests, .* too deep"),
        ("swe-bench", {"FAIL_TO_PASS": ["x" * LONG]}, r"column 'FAIL_TO_PASS': expected at most"),
        ("swe-bench", {"patch": "\ud800"}, r"column 'patch': not valid Unicode"),
        ("swe-bench", {"instance_id": "x" * 10**6}, r"column 'instance_id': expected a name, found 'xxx"),
        ("swe-bench", {"image": "a\n b"}, r"column 'image': expected the name of an image"),
        ("swe-smith", {"image_name": 3}, r"column 'image': expected text, found 3"),
        ("swe-smith", {"FAIL_TO_PASS": ["../../etc/passwd.py::a"]}, r"expected tests of files in the repository"),
        ("swe-smith", {"FAIL_TO_PASS": {"a": 1}}, r"column 'FAIL_TO_PASS': expected a list of tests"),
        ("swe-rebench", {"install_config": "{"}, r"column 'install_config': expected an object in JSON"),
        ("swe-rebench", {"install_config": []}, r"column 'install_config': expected an object, found list"),
        (
            "swe-rebench",
            {"install_config": {}},
            r"'install_config': the column 'test_cmd' is missing, which runs the tests",
        ),
        ("r2e-gym", {"parsed_commit_content": DEEP}, r"column 'parsed_commit_content': expected a commit.* too deep"),
        ("r2e-gym", {"parsed_commit_content": "[]"}, r"column 'parsed_commit_content': expected a commit"),
        ("r2e-gym", {"parsed_commit_content": '{"file_diffs": [{}]}'}, r"expected a commit as R2E-Gym describes it"),
        ("r2e-gym", {"expected_output_json": '{"a": 1}'}, r"expected the status of each test"),
        ("r2e-gym", {"expected_output_json": "{}"}, r"expected the status of each test"),
        ("r2e-gym", {"commit_hash": None}, r"column 'commit_hash': expected text, found None"),
        ("swe-gym", {"version": 3}, r"column 'version': expected text, found 3"),
    ],
)
def test_malformed_columns(style: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message) as error:
        from_row({**simple(style), **change}, where="row 3")
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("rows.parquet", b"", "expected parquet, found"),
        ("rows.parquet", b"PAR1" + b"x" * 100 + b"PAR1", "expected parquet, found"),
        ("rows.jsonl", b"", "has no rows"),
        ("rows.json", b"", "expected json, found"),
        ("rows.jsonl", b'{"a": "\xff"}\n', "line 1: expected a row in JSON, found .*utf-8"),
        ("rows.json", b"\xff\xfe[\x00", "expected json, found .*utf-8"),
        ("rows.json", DEEP.encode(), "found JSON that is nested too deep"),
        ("rows.jsonl", b'{"a":' * 100_000, "found JSON that is nested too deep"),
        ("rows.jsonl", b"[1]\n", "expected an object with the columns"),
        ("rows.jsonl.xz", b"\xfd7zXZ", r"expected a file whose name ends in .parquet, .jsonl, .json"),
    ],
)
def test_damaged_files(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(TaskError, match=message) as error:
        open_tasks(path)
    assert len(str(error.value)) < 1000


def test_names_in_errors_are_printable() -> None:
    row = {**simple("swe-bench"), "instance_id": "a\x1b[31m\nb", "\x1b[2Jmore": 1, "patch": 3}
    with pytest.raises(TaskError, match="column 'patch'") as error:
        from_row(row)
    assert str(error.value).isprintable()
    del row["patch"]
    with pytest.raises(TaskError, match="column 'patch' is missing") as error:
        from_row(row)
    assert str(error.value).isprintable()


def test_a_directory_without_rows(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="expected a directory with files of rows"):
        open_tasks(tmp_path)


def test_a_column_that_unpacks_to_much_more(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{**simple("swe-bench"), "patch": "x" * 200_000_000}]), path)
    assert path.stat().st_size < 20_000_000
    with pytest.raises(TaskError, match=r"row 0 .*, column 'patch': expected at most .* found 200,000,000"):
        open_tasks(path)
