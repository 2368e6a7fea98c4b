"""Control runs of whole episodes, where the usual ones stop before the end and a step is fast."""

from __future__ import annotations

import pickle

from sandboxgym.conformance.check import Budget
from sandboxgym.conformance.harness.scenario import record
from sandboxgym.conformance.subject import Control, Subject

LONGEST = {"quick": 5000, "full": 20_000}
"""Steps of an episode, by budget."""
SECONDS = {"quick": 0.5, "full": 5.0}
"""Seconds that playing the episode once may take."""
ROOM = 2**26
"""Bytes that the outputs of its calls may have."""
RUNS = 2
"""Recorded runs: one with the chosen actions, one mixed with others."""


def affordable(subject: Subject, budget: Budget) -> int:
    """Number of steps that an episode may have, by the time of a call in the first control run."""
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
