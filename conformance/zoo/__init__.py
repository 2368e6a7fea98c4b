"""The zoo: environments with exactly one fault each, and the correct ones they were made from.

It proves that the conformance suite has teeth: every mutant is failed by a check that names its hazard, and the
known-good environments raise no alarm. Each module holds one correct environment and its mutants.
"""

from __future__ import annotations

from zoo import corridor, dice, known_good, quest, shell, wrapped
from zoo.mutant import KNOWN_GOOD, MUTANTS, Good, Mutant, where

__all__ = [
    "KNOWN_GOOD",
    "MUTANTS",
    "Good",
    "Mutant",
    "corridor",
    "dice",
    "known_good",
    "quest",
    "shell",
    "where",
    "wrapped",
]
