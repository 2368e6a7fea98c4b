"""Failures grouped by their probable cause.

Failures have one probable cause if they show in one place: the same fields of a transition, or the same line of the
environment's code in a traceback. If a restore loses random streams, that explains futures that differ.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_FIELD = re.compile(r"\b(observation|reward|terminated|truncated|info|state|last)((?:\[[^\]:]*\])*): ")
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_STREAM = "random stream"
_FUTURE = "the future"
"""Place of a failure that names no field."""
CLEAR = 30
"""Lines of a script that a person reads at a glance."""


class Cause(NamedTuple):
    """Failures with one probable cause."""

    checks: tuple[str, ...]
    """Ids of the failed checks, the most informative first."""
    what: str
    """Common place of the failures; empty where there is none."""

    @property
    def root(self) -> str:
        """The check to look at first."""
        return self.checks[0]


def causes(failures: Sequence[Mapping[str, Any]]) -> list[Cause]:
    """Group failed results, in their JSON form; groups and their members are in the order of the results."""
    signs = [signature(result) for result in failures]
    lost = any(f"{_STREAM} np_random" in found for found in signs)
    groups: list[list[int]] = []  # of the numbers of results
    for index, found in enumerate(signs):
        follows = lost and any(not sign.startswith(("line ", "the ")) for sign in found)
        joined = [
            group
            for group in groups
            if found & set().union(*(signs[other] for other in group))
            or (follows and any(_follows(signs[other]) for other in group))
        ]
        if found == {_FUTURE}:
            telling = [group for group in groups if any(_follows(signs[other]) for other in group)]
            joined = sorted(telling, key=len)[-1:]
        groups = [group for group in groups if group not in joined] + [
            [*(each for group in joined for each in group), index]
        ]
    return [_cause(sorted(group), failures, signs) for group in sorted(groups, key=min)]


def _follows(found: set[str]) -> bool:
    return any(sign.startswith(_STREAM) or _FIELD.match(f"{sign}: ") for sign in found)


def _cause(group: Sequence[int], failures: Sequence[Mapping[str, Any]], signs: Sequence[set[str]]) -> Cause:
    def clarity(index: int) -> tuple[bool, int]:
        lines = (failures[index].get("counterexample") or "").count("\n")
        return not 0 < lines <= CLEAR, index

    order = sorted(group, key=clarity)
    shared = Counter(sign for index in group for sign in signs[index] - {_FUTURE})
    best = max(shared.values(), default=0)
    streams = sorted(sign for sign in shared if sign.startswith(_STREAM))
    first = streams or sorted(signs[order[0]] - {_FUTURE}, key=lambda sign: (-shared[sign], sign))
    what = first[0] if first and (len(group) == 1 or best > 1 or streams) else ""
    return Cause(tuple(failures[index]["id"] for index in order), what)


def signature(result: Mapping[str, Any]) -> set[str]:
    """Texts that describe the place of a failure; failures with one cause have some of them in common."""
    evidence = result["evidence"]
    if isinstance(stream := evidence.get("stream"), str):
        return {f"{_STREAM} {stream.rpartition('.')[2].lstrip('_')}"}
    if isinstance(table := evidence.get("difference"), list):
        found = {_general(row["field"]) for row in table if row.get("differs")}
        if found:
            return found
    found = {_general("".join(match)) for match in _FIELD.findall(result["message"])}
    if found:
        return found
    frames = [frame for frame in _FRAME.findall(evidence.get("traceback", "")) if "conformance" not in frame[0]]
    if frames:
        file, line, function = frames[-1]
        return {f"line {line} of {file.rpartition('/')[2]} ({function})"}
    return {_FUTURE} if "future" in result["message"] or "goes on" in result["message"] else set()


def _general(place: str) -> str:
    """A place without its numbers, because the index of the first array element that differs is random."""
    return re.sub(r"\[\d+\]", "", place)
