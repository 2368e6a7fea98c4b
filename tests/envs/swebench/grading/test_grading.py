"""Verdicts on recorded logs, equal to the official code's, and on made-up logs of infrastructure failures."""

from __future__ import annotations

import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from components import missing

from sandboxgym.envs.swebench.grading import verdict as grading
from sandboxgym.envs.swebench.rows import recipes as columns
from sandboxgym.envs.swebench.rows.check_record import RowCheck
from sandboxgym.envs.swebench.rows.tasks import Task, TaskError, TaskSet, from_row

pytestmark = pytest.mark.usefixtures("official_code")


@pytest.fixture(scope="module")
def logs(parity_data: Path) -> dict[str, str]:
    """Logs of the official harness, by kind of patch and instance."""
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
    from swebench.harness.grading import get_eval_report

    assert len(logs) >= 40
    reasons: Counter[str] = Counter()
    for name, text in logs.items():
        instance_id = name.rpartition("/")[2]
        task = verified[verified.index(instance_id)]
        verdict = grading.grade_log(task, text, "patch")
        path = tmp_path / "log.txt"
        path.write_text(text, encoding="utf-8")
        prediction = {"instance_id": instance_id, "model_name_or_path": "x", "model_patch": "patch"}
        spec = grading.official().make_test_spec(task.row())
        report = get_eval_report(spec, prediction, str(path), include_tests_status=True)[instance_id]
        assert verdict.suspicious == (), name
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
        # All of this a patch can print, also before the tests begin: from setup.py, or as a line of its difference.
        (printed("OSError: [Errno 12] Cannot allocate memory"), "no test results"),
        (printed(f"{BROKEN}\nsocket.gaierror: [Errno -2] Name or service not known"), "tests fail"),
        (printed("PASSED t.py::test_old", before="Failed to establish a new connection\n"), "tests fail"),
        (printed(BROKEN, before="Error response from daemon\nCould not resolve host: pypi.org\n"), "tests fail"),
        (printed("curl: (6) Could not resolve host: example.org"), "no test results"),
        ("Cannot connect to the Docker daemon\nKilled\n", "no test results"),
    ],
)
def test_reasons(log: str, reason: str) -> None:
    verdict = grading.grade_log(make_task(), log, "patch")
    assert verdict.reason == reason
    assert verdict.resolved == (reason == "resolved")
    assert not verdict.needs_network and not verdict.infra_failure


def checked(task: Task, **changes: Any) -> RowCheck:
    """Row check, as `check` may have made it of a task."""
    seen: dict[str, Any] = {"backend": "overlay", "image": "host", "image_id": "host:1", "network": False}
    seen |= {"resolves": True, "empty_resolves": False, "needs_network": False, "flaky": False, "seconds": 1.0}
    seen |= {"gold": ("resolved",), "empty": ("tests fail",), "date": "2026-01-01", "version": "0"}
    return RowCheck(instance_id=task.instance_id, task=task.digest, **{**seen, **changes})


@pytest.mark.parametrize("log, otherwise", [(printed(BROKEN), "tests fail"), ("cut", "no test results")])
def test_what_was_checked_decides_whose_fault_it_is(log: str, otherwise: str) -> None:
    task = make_task()

    def graded(text: str = log, network: bool = False, **seen: Any) -> grading.PatchVerdict:
        return grading.grade_log(task, text, "patch", network=network, checked=checked(task, **seen))

    assert graded().reason == otherwise
    assert graded(needs_network=True).reason == "needs network" and graded(needs_network=True).needs_network
    assert graded(needs_network=True, network=True).reason == otherwise
    broken = {"resolves": False, "gold": ("tests fail",)}
    found = graded(**broken)
    assert found.reason == "infra failure" and "2026-01-01" in found.infra_failure and not found.final
    assert graded(**broken, flaky=True).reason == otherwise
    assert grading.grade_log(task, log, "", network=True, checked=checked(task, **broken)).reason == otherwise
    assert graded(printed(BOTH), **broken).reason == "resolved"


def test_with_a_network_a_failure_is_a_failure() -> None:
    known = make_task(instance_id="psf__requests-2317")
    assert grading.grade_log(known, printed(BROKEN), "patch").reason == "needs network"
    assert grading.grade_log(known, printed(BROKEN), "patch", network=True).reason == "tests fail"


def test_only_lasting_verdicts_are_final() -> None:
    assert grading.grade_log(make_task(), printed(BOTH), "patch").final
    assert grading.grade_log(make_task(), printed("Cannot allocate memory"), "patch").final


def test_a_task_that_cannot_be_graded_is_refused() -> None:
    with pytest.raises(TaskError, match=r"column 'log_parser': there is no 'parse_nothing' among .* near: parse_log_"):
        grading.check_gradable(make_task(log_parser="parse_nothing"))
    with pytest.raises(TaskError, match=r"column 'eval_type': expected pass_and_fail or .* found 'sometimes'"):
        grading.check_gradable(make_task(eval_type="sometimes"))
