"""Masked episodes, which carry no signal: left out of the loss and of every baseline, and counted.

An environment marks an episode's end by ``info["masked"]`` if its reward says nothing of the actions (a sandbox that
ended, a machine at fault). Whether the policy caused such an end cannot be known here: a policy that ends its sandboxes
learns nothing from it, but the counts show it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sandboxgym.tree import RolloutTree

VERDICTS = {"infra_failures": "infra failure", "sandbox_ended": "sandbox ended"}
"""Names of verdicts that are counted, the values of ``info["verdict"]`` at an episode's end."""


def end_counts(trees: Iterable[RolloutTree]) -> dict[str, float]:
    """Count episodes: all, those ended masked, those with each of `VERDICTS`, and suspicious ones."""
    ends = [path.edges[-1] for tree in trees for path in tree.paths if path.edges]
    counts = {name: float(sum(end.verdict == verdict for end in ends)) for name, verdict in VERDICTS.items()}
    masked, suspicious = sum(end.masked for end in ends), sum(end.suspicious for end in ends)
    return {"episodes": float(len(ends)), "masked": float(masked), "suspicious": float(suspicious), **counts}


def without_masked(trees: Sequence[RolloutTree]) -> list[RolloutTree]:
    """Drop paths that ended masked, with the forks off them; trees without any path left are dropped too."""
    for tree in trees:
        for key in [path.key for path in tree.paths if path.edges and path.edges[-1].masked]:
            tree.remove(tree.offspring(key))
    return [tree for tree in trees if tree.paths]
