"""Verdicts: of recorded logs as the official code gives them, and of made-up ones that are nobody's fault."""

from __future__ import annotations

import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from components import missing

from sandboxgym.envs.swebench import columns, grading
from sandboxgym.envs.swebench.tasks import Task, TaskSet, from_row

pytestmark = pytest.mark.usefixtures("official_code")


@pytest.fixture(scope="module")
def logs(parity_data: Path) -> dict[str, str]:
    """What the official harness printed, by kind of patch and instance."""
    archive = parity_data / "swebench" / "harness_logs.tar.xz"
    if not archive.is_file():
        missing("data", f"{archive} is not there")
    with tarfile.open(archive) as tar:
        return {
            member.name.removesuffix("_test_output.txt"): tar.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in tar
            if member.isfile()
        }


def test_recorded_logs_are_graded_as_the_official_code_grades_them(
    logs: dict[str, str], verified: TaskSet, tmp_path: Path
) -> None:
    assert len(logs) >= 40
    reasons: Counter[str] = Counter()
    for name, text in logs.items():
        instance_id = name.rpartition("/")[2]
        task = verified[verified.index(instance_id)]
        verdict = grading.grade_log(task, text, "patch")
        path = tmp_path / "log.txt"
        path.write_text(text, encoding="utf-8")
        prediction = {"instance_id": instance_id, "model_name_or_path": "x", "model_patch": "patch"}
        official = grading.official()
        spec = official.make_test_spec(task.row())
        report = official.get_eval_report(spec, prediction, str(path), include_tests_status=True)[instance_id]
        assert verdict.resolved == report["resolved"], name
        if "tests_status" in report:
            expected = {key: report["tests_status"][key] for key in ("FAIL_TO_PASS", "PASS_TO_PASS")}
            assert verdict.tests_status == expected, name
        else:
            assert verdict.tests_status is None, name
        reasons[verdict.reason] += 1
        if name.startswith("gold"):
            assert verdict.resolved, name
    assert reasons == {"resolved": 11, "tests fail": 19, "no test results": 10}


def make_task(**changes: Any) -> Task:
    row = {
        "repo": "a/b",
        "instance_id": "a__b-1",
        "version": "1",
        "base_commit": "0" * 40,
        "patch": "",
        "test_patch": "",
        "problem_statement": "",
        "FAIL_TO_PASS": ["t.py::test_new"],
        "PASS_TO_PASS": ["t.py::test_old"],
        "image": "host",
        "eval_script": columns.eval_script(base_commit="0" * 40, test_patch="", test="true"),
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
    }
    return from_row({**row, **changes})


def printed(tests: str, *, before: str = "", exit_code: int | None = None) -> str:
    code = "" if exit_code is None else f">>>>> Test Exit Code: {exit_code}\n"
    return f"{before}+ : '>>>>> Start Test Output'\n{tests}\n+ : '>>>>> End Test Output'\n{code}"


BOTH = "PASSED t.py::test_new\nPASSED t.py::test_old"
BROKEN = "FAILED t.py::test_new - requests.exceptions.ConnectionError\nPASSED t.py::test_old"


@pytest.mark.parametrize(
    "log, reason",
    [
        (printed(BOTH), "resolved"),
        (printed(BOTH, exit_code=0), "resolved"),
        (printed(BOTH, exit_code=1), "no test results"),  # it prints its own results
        (printed("PASSED t.py::test_new\nFAILED t.py::test_old"), "tests fail"),
        (printed("PASSED t.py::test_old\nSKIPPED t.py::test_new"), "tests fail"),
        (printed("PASSED t.py::test_new\nSKIPPED t.py::test_old"), "resolved"),
        (printed("ImportError: no module"), "no test results"),
        ("the script did not get that far", "no test results"),
        (printed("OSError: [Errno 12] Cannot allocate memory"), "infra failure"),
        (printed(f"{BROKEN}\nsocket.gaierror: [Errno -2] Name or service not known"), "needs network"),
        (printed("PASSED t.py::test_old", before="Failed to establish a new connection\n"), "tests fail"),  # pip's
        (printed("curl: (6) Could not resolve host: example.org"), "needs network"),
    ],
)
def test_reasons(log: str, reason: str) -> None:
    verdict = grading.grade_log(make_task(), log, "patch")
    assert verdict.reason == reason
    assert verdict.resolved == (reason == "resolved")
    assert verdict.needs_network == (reason == "needs network")
    assert bool(verdict.infra_failure) == (reason == "infra failure")


def test_with_a_network_a_failure_is_a_failure() -> None:
    log = printed(f"{BROKEN}\nsocket.gaierror: [Errno -2] Name or service not known")
    assert grading.grade_log(make_task(), log, "patch", network=True).reason == "tests fail"
    known = make_task(instance_id="psf__requests-2317")
    assert grading.grade_log(known, printed(BROKEN), "patch").reason == "needs network"
    assert grading.grade_log(known, printed(BROKEN), "patch", network=True).reason == "tests fail"


def test_only_lasting_verdicts_are_final() -> None:
    assert grading.grade_log(make_task(), printed(BOTH), "patch").final
    assert not grading.grade_log(make_task(), printed("Cannot allocate memory"), "patch").final


def test_a_task_that_cannot_be_graded_is_refused() -> None:
    with pytest.raises(ValueError, match="column 'log_parser': swebench has no 'parse_nothing'"):
        grading.check_gradable(make_task(log_parser="parse_nothing"))
    with pytest.raises(ValueError, match="sometimes"):
        grading.check_gradable(make_task(eval_type="sometimes"))
