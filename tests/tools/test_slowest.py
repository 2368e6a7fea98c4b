"""The list of tests that `make test` leaves out: how it is made, and that it names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import slowest

ROOT = Path(__file__).parents[2]
REPORT = """<testsuites><testsuite name="pytest">
<testcase classname="tests.tools.test_slowest" name="test_a[x-1.5]" time="4.5" />
<testcase classname="tests.tools.test_slowest.TestB" name="test_b" time="1.25" />
<testcase classname="tests.tools.test_slowest" name="test_c" time="0.5" />
<testcase classname="tests.no_such_module" name="test_d" time="9" />
</testsuite></testsuites>"""


def test_times_are_read_by_the_ids_that_pytest_gives(tmp_path: Path) -> None:
    (tmp_path / "run.xml").write_text(REPORT)
    module = "tests/tools/test_slowest.py"
    assert slowest.times(tmp_path / "run.xml") == {
        f"{module}::test_a[x-1.5]": 4.5,
        f"{module}::TestB::test_b": 1.25,
        f"{module}::test_c": 0.5,
    }


@pytest.mark.parametrize(
    ("limit", "listed"), [(10, []), (6, ["a"]), (2, ["a"]), (1.9, ["a", "b"]), (0, ["a", "b", "c"])]
)
def test_the_slowest_are_listed_until_the_rest_is_short_enough(limit: float, listed: list[str]) -> None:
    times = {"tests/c": 0.5, "tests/a": 4.5, "tests/b": 1.5}
    assert slowest.listed(times, limit) == [f"tests/{name}" for name in listed]


def test_what_is_listed_exists() -> None:
    for name in slowest.read():
        module, *_, function = name.split("::")
        bare = re.escape(function.partition("[")[0].rpartition(".")[2])
        source = (ROOT / module).read_text(encoding="utf-8")
        assert re.search(rf"\b(def|class) {bare}\b", source), f"{name} is gone: take it out of tests/tools/slowest.txt"
