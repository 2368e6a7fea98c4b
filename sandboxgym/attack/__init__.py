"""Attacks on the sandboxes of this machine, run by ``sandboxgym doctor --attack``.

1. Every attempt is made against throw-away sandboxes, by programs that have only the sandbox, and judged from outside
   where it has an effect there. Attempts that were not made do not count as blocked.
2. An attempt that succeeds does no harm: it changes little, for a moment, and restores it; it writes at most 200 MB and
   ends in time. Nothing is sent over a network.
3. A successful attempt is ``declared`` if the backend's `Capabilities` say so, else ``passed``: then a promise is
   broken, and that is a bug worth a report.
4. Nothing is left: no sandbox, process, container, image or file.
"""

from __future__ import annotations

from sandboxgym.attack.attempt import GROUPS, VERDICTS, Attempt, AttemptOutcome, NotApplicable
from sandboxgym.attack.report import AttackReport
from sandboxgym.attack.run import BACKENDS, SAMPLE, attack, attempts, matching

__all__ = [
    "BACKENDS",
    "GROUPS",
    "SAMPLE",
    "VERDICTS",
    "AttackReport",
    "Attempt",
    "AttemptOutcome",
    "NotApplicable",
    "attack",
    "attempts",
    "matching",
]
