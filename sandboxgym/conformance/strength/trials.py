"""The result: one trial per fault, and the summary of a certificate."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sandboxgym.conformance.reports.verdicts import UNRESTORED

FIELD_FAULTS = ("left out", "not captured")
"""Faults whose trials tell whether a field was exercised."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A fault and the result of its trial."""

    field: str
    """Name of the field, the stream or the wrapper; ``the whole`` if the snapshot is one step old."""
    fault: str
    """``left out``, ``coarser``, ``shared``, ``stale``, ``stream``, ``wrapper``; or ``not captured`` for an attribute
    that changes during play and that a restore does not bring back, into which no fault was put."""
    outcome: str
    """``caught``, ``unseen``, ``never varied``, ``without effect``, ``not tried``, or ``explained``: no check detected
    it, and ``unobservable`` in the environment's metadata says why."""
    note: str
    """The check that detected it, or the reason why none did."""


@dataclass(frozen=True)
class Strength:
    """Result of all trials: which faults a certificate would have caught."""

    trials: tuple[Trial, ...] = ()
    reason: str = ""
    """Reason why there are no trials."""
    seconds: float = 0.0
    layered: bool = False
    """The fields are attributes, not those of the value of ``_capture``."""

    @property
    def fields(self) -> tuple[Trial, ...]:
        """Trials that tell whether a field was exercised."""
        return tuple(trial for trial in self.trials if trial.fault in FIELD_FAULTS)

    @property
    def unexercised(self) -> tuple[Trial, ...]:
        """Fields that a restore can leave out undetected, without an explanation."""
        return tuple(trial for trial in self.fields if trial.outcome not in ("caught", "explained"))

    @property
    def exercised(self) -> int:
        """Number of fields whose omission is detected."""
        return sum(trial.outcome == "caught" for trial in self.fields)

    @property
    def unseen(self) -> tuple[Trial, ...]:
        """Other faults that had an effect and that no check detected."""
        return tuple(trial for trial in self.trials if trial.fault not in FIELD_FAULTS and trial.outcome == "unseen")

    @property
    def unrestored(self) -> tuple[str, ...]:
        """Attributes that change in play, are not captured and differ after a restore, without an explanation."""
        return tuple(trial.field for trial in self.unexercised if trial.fault == "not captured")

    def __str__(self) -> str:
        if self.reason:
            return f"not measured: {self.reason}"
        tried = [t for t in self.trials if t.outcome in ("caught", "unseen") and t.fault != "not captured"]
        caught = sum(trial.outcome == "caught" for trial in tried)
        explained = sum(trial.outcome == "explained" for trial in self.fields)
        text = f"{self.exercised} of {len(self.fields)} fields of the state exercised"
        text += f" ({explained} explained)" if explained else ""
        text += f", {caught} of {len(tried)} faults caught"
        text += "" if self.layered else " (in captured fields only)"
        missed = [trial.field for trial in self.unexercised if trial.fault == "left out"]
        missed += [f"{t.field} ({t.fault})" for t in self.unseen]
        text += f"; never exercised: {', '.join(missed)}" if missed else ""
        return text + (f"; {UNRESTORED}: {', '.join(self.unrestored)}" if self.unrestored else "")

    def to_json(self) -> dict[str, Any]:
        """The strength as JSON values."""
        return {
            "summary": str(self),
            "fields": len(self.fields),
            "exercised": self.exercised,
            "unrestored": list(self.unrestored),
            "trials": [asdict(trial) for trial in self.trials],
            "reason": self.reason,
            "seconds": round(self.seconds, 2),
        }
