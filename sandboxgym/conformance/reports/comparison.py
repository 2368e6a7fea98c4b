"""Comparison of reports on one environment made in several ways: verdicts, and the state kept, lost and leaked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a comparison."""

    name: str
    cells: tuple[str, ...]
    """One cell per report; empty where it has none."""

    @property
    def differs(self) -> bool:
        """True if the result depends on the way of making the environment."""
        return len(set(self.cells)) > 1


def labels(report: Mapping[str, Any]) -> list[str]:
    """Labels of reports: the arguments by which they differ."""
    made = [one["make_kwargs"] for one in _all(report)]
    names = [name for name in dict.fromkeys(name for kwargs in made for name in kwargs) if _vary(name, made)]
    return [
        ", ".join(f"{name}={kwargs[name]}" if name in kwargs else f"{name} by default" for name in names) or "the same"
        for kwargs in made
    ]


def _vary(name: str, made: Sequence[Mapping[str, Any]]) -> bool:
    return any(kwargs.get(name) != made[0].get(name) or (name in kwargs) != (name in made[0]) for kwargs in made)


def verdicts(report: Mapping[str, Any]) -> list[Row]:
    """Verdict of each check in each report."""
    return list(_rows([{one["id"]: one["verdict"] for one in each["results"]} for each in _all(report)]))


def matrices(report: Mapping[str, Any]) -> dict[str, list[Row]]:
    """Measurements of each probe in each report, by the id of the check."""
    found: dict[str, list[dict[str, str]]] = {}
    reports = _all(report)
    for index, each in enumerate(reports):
        for result in each["results"]:
            matrix = result["evidence"].get("matrix")
            if isinstance(matrix, list) and all(isinstance(row, Mapping) and "measured" in row for row in matrix):
                columns = found.setdefault(result["id"], [{} for _ in reports])
                columns[index] = {str(row["probe"]): str(row["measured"]) for row in matrix}
    return {id: list(_rows(columns)) for id, columns in found.items()}


def _rows(columns: Sequence[Mapping[str, str]]) -> Iterator[Row]:
    for name in dict.fromkeys(name for column in columns for name in column):
        yield Row(name, tuple(column.get(name, "") for column in columns))


def _all(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [report, *report.get("beside", ())]


def plain(value: Any) -> str:
    """A value of a report in words."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(plain, value)) or "nothing"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
