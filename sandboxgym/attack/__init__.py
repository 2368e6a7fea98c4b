"""Attacks on the sandboxes of this machine: what ``sandboxgym doctor --attack`` runs.

1. Every attempt is made against throw-away sandboxes, by programs that are given nothing but the sandbox, and judged
   from outside where it has an effect there. What was not made is not counted as blocked.
2. An attempt that succeeds does no harm: it changes little, for a moment, and that is put back; it writes at most
   200 MB and ends in time. Nothing is sent over a network.
3. What gets through is ``declared`` if the backend's `Capabilities` say so, else it has ``passed``; then the promise is
   broken, and that is a fault worth a report.
4. Nothing is left: no sandbox, process, container, image or file.
"""

from __future__ import annotations

from sandboxgym.attack.attempt import GROUPS, VERDICTS, Attempt, NotApplicable, Outcome
from sandboxgym.attack.report import Report
from sandboxgym.attack.run import BACKENDS, SAMPLE, attack, attempts, matching

__all__ = [
    "BACKENDS",
    "GROUPS",
    "SAMPLE",
    "VERDICTS",
    "Attempt",
    "NotApplicable",
    "Outcome",
    "Report",
    "attack",
    "attempts",
    "matching",
]
