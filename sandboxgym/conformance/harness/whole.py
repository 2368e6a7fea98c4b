"""Control runs of whole episodes, for fast environments whose usual control runs stop before the end."""

from __future__ import annotations

import pickle

from sandboxgym.conformance.check import Budget
from sandboxgym.conformance.harness.scenario import record
from sandboxgym.conformance.subject import Control, Subject

LONGEST = {"quick": 5000, "full": 20_000}
"""Most steps of an episode, by budget."""
SECONDS = {"quick": 0.5, "full": 5.0}
"""Seconds that playing the episode once may take."""
ROOM = 2**26
"""Most bytes that the outcomes of an episode may have when pickled."""
RUNS = 2
"""Number of recorded runs: one on-policy, one off-policy."""


def affordable(subject: Subject, budget: Budget) -> int:
    """Most steps of an episode, by the time and the size of an outcome in the first control run."""
    control = subject.control(0, budget.steps)
    size = len(pickle.dumps(control.outcomes)) / len(control.outcomes)
    seconds = SECONDS.get(budget.name, SECONDS["quick"]) / max(control.seconds / len(control.ops), 1e-7)
    return int(min(LONGEST.get(budget.name, LONGEST["quick"]), seconds, ROOM / max(size, 1)))


def whole_episodes(subject: Subject, budget: Budget) -> tuple[Control, ...]:
    """Runs up to an end that the usual ones do not reach, recorded at the first request; none where that takes long."""
    key = (budget.name, budget.steps)
    if key not in subject._whole:
        found: list[Control] = []
        plain = [subject.control(index, budget.steps) for index in range(min(RUNS, budget.traces))]
        most = affordable(subject, budget) if any(control.ended is None for control in plain) else 0
        if most > budget.steps:
            found = [control if control.ended else record(subject, index, most) for index, control in enumerate(plain)]
        subject._whole[key] = tuple(found)
    return subject._whole[key]
