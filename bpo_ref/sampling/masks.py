"""Episodes that say nothing: left out of the loss and of every baseline, and counted.

An environment says so of an episode's end by ``info["masked"]``: its reward is not for what was done (a sandbox that
ended, a machine at fault). Whether such ends depend on what the policy does cannot be known from here: a policy that
ends its sandboxes is not taught that by them, and shows in the counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sandboxgym.tree import RolloutTree

VERDICTS = {"infra_failures": "infra failure", "sandbox_ended": "sandbox ended"}
"""Counts of their own, and the ``info["verdict"]`` of an episode's end that they count."""


def end_counts(trees: Iterable[RolloutTree]) -> dict[str, float]:
    """How many episodes there are, ended masked, with each of `VERDICTS`, and in a suspicious way."""
    ends = [path.edges[-1] for tree in trees for path in tree.paths if path.edges]
    counts = {name: float(sum(end.verdict == verdict for end in ends)) for name, verdict in VERDICTS.items()}
    masked, suspicious = sum(end.masked for end in ends), sum(end.suspicious for end in ends)
    return {"episodes": float(len(ends)), "masked": float(masked), "suspicious": float(suspicious), **counts}


def without_masked(trees: Sequence[RolloutTree]) -> list[RolloutTree]:
    """The trees without the paths that ended masked and what was forked off these; those with no path left are out."""
    for tree in trees:
        for key in [path.key for path in tree.paths if path.edges and path.edges[-1].masked]:
            tree.remove(tree.offspring(key))
    return [tree for tree in trees if tree.paths]
