"""Parsers of test logs for the training sets beyond Verified, which the official code does not have.

They are named and called like the official ones, with the log and a specification that they do not need; `PARSERS` is
added to the official registry. Each is linear in the length of the log.

- SWE-smith (``swesmith.profiles.python``): one line of ``pytest --verbose`` per test; four repositories have their own.
- SWE-Gym (``swegym.harness.log_parsers``): the official ones, except pydantic's.
- R2E-Gym (``r2egym.repo_analysis.execution_log_parser``): the short summary of pytest, by names without files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

_STATUSES = ("FAILED", "PASSED", "SKIPPED", "ERROR", "XFAIL")
_ANY = "|".join(_STATUSES)
_VERBOSE = re.compile(rf"(\S+)\s+({_ANY})")
_SUMMARY = re.compile(rf"({_ANY})\s(\S+)")
_WORKER = re.compile(rf"\[gw\d\]\s({_ANY})\s(\S+)")
_UNITTEST = re.compile(r"([\w\-,.\s()']+)\s\.{3}\s(ok|FAIL|ERROR)$", re.ASCII)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_HEADING = "short test summary info"


def _by_line(log: str, pattern: re.Pattern[str], name: int, status: int) -> dict[str, str]:
    matches = (pattern.match(line) for line in log.split("\n"))
    return {match[name]: match[status] for match in matches if match}


def pytest_verbose(log: str, _: Any = None) -> dict[str, str]:
    r"""Statuses of ``pytest --verbose``.

    >>> pytest_verbose("tests/test_a.py::test_one PASSED   [ 50%]\ntests/test_a.py::test_two FAILED   [100%]")
    {'tests/test_a.py::test_one': 'PASSED', 'tests/test_a.py::test_two': 'FAILED'}
    """
    return _by_line(log, _VERBOSE, 1, 2)


def pytest_summary(log: str, _: Any = None) -> dict[str, str]:
    """Statuses of the summary of ``pytest -rA``, with names up to the first blank."""
    return _by_line(log, _SUMMARY, 2, 1)


def pytest_workers(log: str, _: Any = None) -> dict[str, str]:
    """Statuses as the workers of pytest-xdist report them."""
    return _by_line(log, _WORKER, 2, 1)


def unittest_verbose(log: str, _: Any = None) -> dict[str, str]:
    r"""Statuses of ``unittest --verbose``, the name as it is printed.

    >>> unittest_verbose("test_a (t.A) ... ok\ntest_b (t.A) ... FAIL")
    {'test_a (t.A)': 'PASSED', 'test_b (t.A)': 'FAILED'}
    """
    words = {"ok": "PASSED", "FAIL": "FAILED", "ERROR": "ERROR"}
    return {name: words[word] for name, word in _by_line(log, _UNITTEST, 1, 2).items()}


def tornado(log: str, _: Any = None) -> dict[str, str]:
    """Statuses of ``python -m tornado.test --verbose``; a test with an error counts as failed."""
    found = {}
    for line in log.split("\n"):
        if line.endswith("... ok"):
            found[line.split(" ... ")[0]] = "PASSED"
        elif " ... skipped " in line:
            found[line.split(" ... ")[0]] = "SKIPPED"
        elif line.startswith(("ERROR:", "FAIL:")):
            found[" ".join(line.split()[1:3])] = "FAILED"
    return found


def mypy_cases(log: str, _: Any = None) -> dict[str, str]:
    """Statuses of mypy's data-driven cases: the test is the last word of a line with its status."""
    found = {}
    for line in log.split("\n"):
        status = next((status for status in ("PASSED", "FAILED") if status in line), None)
        if status:
            found[line.split()[-1]] = status
    return found


def pydantic(log: str, _: Any = None) -> dict[str, str]:
    r"""Statuses of pydantic's tests, whose runner prints colours, and the progress between ``FAILED`` and the name.

    >>> pydantic("FAILED [ 3%] tests/test_a.py::test_one - assert 1\ntests/test_a.py::test_two PASSED")
    {'tests/test_a.py::test_one': 'FAILED', 'tests/test_a.py::test_two': 'PASSED'}
    """
    found = {}
    for line in log.split("\n"):
        line = re.sub(r"[\x01-\x1f]", "", re.sub(r"\[\d+m", "", line))
        line = re.sub(r"^FAILED\s*\[[^]]*\]", "FAILED", line)
        if line.startswith("FAILED"):
            line = line.replace(" - ", " ")
        words = line.split()
        if len(words) >= 2 and line.startswith(_STATUSES):
            found[words[1]] = words[0]
        elif len(words) >= 2 and line.endswith(_STATUSES):
            found[words[0]] = words[1]
    return found


def r2e(log: str, _: Any = None) -> dict[str, str]:
    r"""Statuses of the short summary of pytest, by names without files: ``TestClass.test_name``.

    >>> r2e("= short test summary info =\nPASSED r2e_tests/test_1.py::TestA::test_b\nFAILED a.py::test_c - x - y")
    {'TestA.test_b': 'PASSED', 'test_c': 'FAILED'}
    """
    log = _COLOURS.sub("", log).replace("\r", "")
    parts = log.split(_HEADING, 2)
    found = {}
    for line in parts[1].strip().split("\n") if len(parts) > 1 else ():
        status = next((status for status in ("PASSED", "FAILED", "ERROR") if status in line), None)
        if status:
            name = ".".join(line.split("::")[1:])
            found[name if status == "PASSED" else name.split(" - ")[0]] = status
    return without_reasons(found)


def without_reasons(statuses: Mapping[str, str]) -> dict[str, str]:
    """Statuses by names without colours and without what follows ``-``, as R2E-Gym compares them."""
    plain = {_COLOURS.sub("", name): status for name, status in statuses.items()}
    return {name.split(" - ")[0]: plain[name] for name in sorted(plain)}


PARSERS: dict[str, Callable[[str, Any], dict[str, str]]] = {
    "sandboxgym_pytest_verbose": pytest_verbose,
    "sandboxgym_pytest_summary": pytest_summary,
    "sandboxgym_pytest_workers": pytest_workers,
    "sandboxgym_unittest_verbose": unittest_verbose,
    "sandboxgym_tornado": tornado,
    "sandboxgym_mypy_cases": mypy_cases,
    "sandboxgym_pydantic": pydantic,
    "sandboxgym_r2e": r2e,
}
"""Parsers by the names that the column ``log_parser`` may have in addition to the official ones."""
