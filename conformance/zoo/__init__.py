"""The zoo: environments with exactly one fault each, and the correct ones they were made from.

It proves that the conformance suite detects faults: every mutant fails a check that names its hazard, and the
known-good environments raise no alarm. A module has one correct environment and its mutants, or mutants of several
environments with another common property.
"""

from __future__ import annotations

from zoo import (
    ahead,
    composed,
    corridor,
    dice,
    drift,
    engines,
    hosts,
    jail,
    keyed,
    known_good,
    lasting,
    late,
    offered,
    printed,
    process_wide,
    quest,
    remembered,
    reported,
    shell,
    uncommon,
    wrapped,
)
from zoo.mutant import KNOWN_GOOD, MUTANTS, Good, Mutant, where

__all__ = [
    "KNOWN_GOOD",
    "MUTANTS",
    "Good",
    "Mutant",
    "ahead",
    "composed",
    "corridor",
    "dice",
    "drift",
    "engines",
    "hosts",
    "jail",
    "keyed",
    "known_good",
    "lasting",
    "late",
    "offered",
    "printed",
    "process_wide",
    "quest",
    "remembered",
    "reported",
    "shell",
    "uncommon",
    "where",
    "wrapped",
]
