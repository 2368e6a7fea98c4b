"""Report of attacks: a table, the names of successful attempts, JSON, Markdown, an exit status."""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

from sandboxgym.attack.attempt import GROUPS, VERDICTS, AttemptOutcome

BEGIN, END = "<!-- doctor --attack: begin -->", "<!-- doctor --attack: end -->"
"""Marks of the part of a page that `AttackReport.markdown` writes."""


@dataclass(frozen=True, slots=True)
class AttackReport:
    """Outcomes of all attempts."""

    outcomes: tuple[AttemptOutcome, ...]
    unavailable: Mapping[str, str] = field(default_factory=dict)
    """Backends that cannot run here, with the reason."""
    machine: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def status(self) -> int:
        """Exit status. 0: nothing passed; 1: something passed; 2: nothing could be tried."""
        verdicts = {outcome.verdict for outcome in self.outcomes}
        if "passed" in verdicts:
            return 1
        return 0 if verdicts - {"not applicable"} else 2

    @property
    def backends(self) -> list[str]:
        """Attacked backends, in order."""
        return list(dict.fromkeys(outcome.backend for outcome in self.outcomes))

    def count(self, backend: str, group: str) -> Counter[str]:
        """Number of attempts by verdict."""
        found = (o.verdict for o in self.outcomes if o.backend == backend and o.group == group)
        return Counter(found)

    def named(self, verdict: str) -> list[AttemptOutcome]:
        """Outcomes with a verdict."""
        return [outcome for outcome in self.outcomes if outcome.verdict == verdict]

    def json(self) -> str:
        """Report as JSON, for programs."""
        content = {
            "status": self.status,
            "machine": dict(self.machine),
            "seconds": round(self.seconds, 1),
            "unavailable": dict(self.unavailable),
            "counts": {b: {g: dict(self.count(b, g)) for g in GROUPS} for b in self.backends},
            "outcomes": [asdict(outcome) for outcome in self.outcomes],
        }
        return json.dumps(content, indent=2)

    def rows(self) -> list[tuple[str, ...]]:
        """Rows of backend, class and the number of each verdict."""
        return [
            (backend, group, *(str(self.count(backend, group)[verdict]) for verdict in VERDICTS))
            for backend in self.backends
            for group in GROUPS
            if self.count(backend, group)
        ]

    def text(self, *, verbose: bool = False) -> str:
        """Report as text: the table, then every successful attempt."""
        head = ("backend", "class", *VERDICTS)
        rows = [head, *self.rows()]
        wide = [max(len(row[at]) for row in rows) for at in range(len(head))]
        lines = ["  ".join(_cell(text, at, wide[at]) for at, text in enumerate(row)).rstrip() for row in rows]
        for backend, reason in self.unavailable.items():
            lines.append(f"{backend}: cannot run here: {reason}")
        for verdict in ("passed", "declared", *(("blocked", "not applicable") if verbose else ())):
            if found := _merged(self.named(verdict), verbose=verbose):
                lines += ["", f"{verdict}:"]
                lines += [f"  {name} ({', '.join(backends)}): {about}" for name, backends, about in found]
        lines += ["", self.summary()]
        return "\n".join(lines)

    def summary(self) -> str:
        """Summary in one sentence."""
        counts = Counter(outcome.verdict for outcome in self.outcomes)
        parts = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)
        return f"{len(self.outcomes)} attempts in {self.seconds:.0f} s: {parts}"

    def markdown(self) -> str:
        """Report as Markdown, for a page."""
        head = ("backend", "class", *VERDICTS)
        lines = [BEGIN, ""]
        facts = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        lines += [f"{self.summary()} ({facts}).", "", _row(head), _row(["---"] * 2 + ["---:"] * len(VERDICTS))]
        lines += [_row(row) for row in self.rows()]
        for verdict in ("passed", "declared"):
            if found := _merged([o for o in self.named(verdict) if o.backend != "copy"], verbose=False):
                lines += ["", f"{verdict.capitalize()}:", ""]
                lines += [f"- `{name}` ({', '.join(backends)}): {about}" for name, backends, about in found]
        return "\n".join([*lines, "", END, ""])


def _cell(text: str, at: int, wide: int) -> str:
    return f"{text:<{wide}}" if at < 2 else f"{text:>{wide}}"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _merged(outcomes: list[AttemptOutcome], *, verbose: bool) -> list[tuple[str, list[str], str]]:
    """One line per attempt with all its backends; those without isolation are named together."""
    found: dict[str, list[AttemptOutcome]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.name, []).append(outcome)
    rows = []
    for name, some in found.items():
        if [outcome.backend for outcome in some] == ["copy"] and not verbose:
            continue
        details = dict.fromkeys(outcome.detail for outcome in some)
        rows.append((name, [outcome.backend for outcome in some], f"{some[0].about}: {'; '.join(details)}"))
    if not verbose and any(outcome.backend == "copy" for outcome in outcomes):
        number = sum(outcome.backend == "copy" for outcome in outcomes)
        rows.append((f"{number} attempts", ["copy"], "nothing is isolated, so nothing was tried"))
    return rows


def machine_facts() -> dict[str, str]:
    """Facts about the machine that the figures belong to."""
    user = "root" if os.geteuid() == 0 else "an ordinary user"
    groups = "2" if os.path.exists("/sys/fs/cgroup/cgroup.controllers") else "1"
    return {"Linux": platform.release(), "on": platform.machine(), "as": user, "control groups of version": groups}
