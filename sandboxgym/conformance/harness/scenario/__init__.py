"""Control runs and scenes: calls on environments, compared, with a script that reproduces a difference.

1. A `Scene` performs calls on environments and writes each down as a line of Python. When a comparison fails, these
   lines, followed by the same calls on an uninterrupted environment, are the counterexample.
2. A scene closes all its environments and releases all its snapshots, whatever happens.
3. Futures are compared whole: the rest of the episode, two steps after its end, and the start of the next episode,
   each with observation, reward, flags and info, types and dtypes included.
"""

from __future__ import annotations

from sandboxgym.conformance.harness.scenario.control import choose, comparable, control_seed, noise, record, replay
from sandboxgym.conformance.harness.scenario.environments import opened, quiet, release
from sandboxgym.conformance.harness.scenario.outcomes import first_difference, outcome_difference, show_outcome
from sandboxgym.conformance.harness.scenario.scene import Scene, Walk
from sandboxgym.conformance.harness.scenario.script import folded, written
from sandboxgym.conformance.harness.scenario.streams import known_seed, renew_streams, seed_spaces, seeding, streams

__all__ = [
    "Scene",
    "Walk",
    "choose",
    "comparable",
    "control_seed",
    "first_difference",
    "folded",
    "known_seed",
    "noise",
    "opened",
    "outcome_difference",
    "quiet",
    "record",
    "release",
    "renew_streams",
    "replay",
    "seed_spaces",
    "seeding",
    "show_outcome",
    "streams",
    "written",
]
