"""Writes the list of tests that are too slow for `make test`, from a run's times.

    python -m pytest -n 3 --dist loadgroup --junitxml run.xml     # on a machine that does nothing else
    python tests/tools/slowest.py run.xml --minutes 8

The list is `slowest.txt` beside this file; `conftest.py` marks its tests as slow. The slowest tests are listed until
those that remain take no longer than asked for, added up over the workers. Tests that have the mark in their source
are not listed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("slowest.txt")


def ungrouped(name: str) -> str:
    """Return the id of a test without its group, which pytest-xdist adds: ``test_x.py::test_y[z]@group``."""
    return name.rpartition("@")[0] if name.rfind("@") > name.rfind("]") else name


def times(report: Path) -> dict[str, float]:
    """Seconds of each test of a JUnit report, set-up included, by its pytest id."""
    found: dict[str, float] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        parts = str(case.get("classname")).split(".")
        for length in range(len(parts), 0, -1):  # a class of tests follows the module's name
            module = "/".join(parts[:length]) + ".py"
            if (ROOT / module).exists():
                name = ungrouped("::".join([module, *parts[length:], str(case.get("name"))]))
                found[name] = found.get(name, 0.0) + float(case.get("time") or 0)
                break
    return found


def listed(seconds: Mapping[str, float], limit: float) -> list[str]:
    """The slowest tests, without which the rest takes at most ``limit`` seconds, sorted by name."""
    total, chosen = sum(seconds.values()), []
    for name in sorted(seconds, key=lambda name: -seconds[name]):
        if total <= limit:
            break
        if not name.startswith(("tests/", "conformance/")):  # an example in a docstring
            continue
        total -= seconds[name]
        chosen.append(name)
    return sorted(chosen)


def read() -> frozenset[str]:
    """The ids in the list."""
    return frozenset(LIST.read_text(encoding="utf-8").splitlines()) if LIST.exists() else frozenset()


def fast(seconds: Mapping[str, float]) -> Iterator[str]:
    """Tests without the mark in their source: those that pytest collects when this list is empty."""
    import subprocess

    before = LIST.read_text(encoding="utf-8") if LIST.exists() else ""
    LIST.write_text("", encoding="utf-8")
    try:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", "-m", "not slow"]
        printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    finally:
        LIST.write_text(before, encoding="utf-8")
    collected = set(printed.splitlines())
    return (name for name in seconds if name in collected)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="JUnit report of a run")
    parser.add_argument("--minutes", type=float, default=8.0, help="of processor time that the fast tests may take")
    arguments = parser.parse_args()
    seconds = times(arguments.report)
    seconds = {name: seconds[name] for name in fast(seconds)}
    chosen = listed(seconds, 60 * arguments.minutes)
    LIST.write_text("".join(f"{name}\n" for name in chosen), encoding="utf-8")
    left = sum(seconds.values()) - sum(seconds[name] for name in chosen)
    print(f"{len(chosen)} of {len(seconds)} tests are listed; the others took {left:.0f} s")


if __name__ == "__main__":
    main()
