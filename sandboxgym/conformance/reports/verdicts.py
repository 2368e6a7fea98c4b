"""One-line summary of a report, and the weight of each PASS."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from sandboxgym.conformance.reports.caveats import unended

ASIDE = {
    "api": "API check",
    "resources": "resource check",
    "cost": "cost check",
    "hostile": "check of hostile commands",
}
"""Themes whose failures do not show that a restored state is wrong."""
COMPARE = ("restore.", "fork.", "durable.round_trip", "durable.cross_process", "durable.saver_gone")
"""Checks, by the beginning of their names, that compare restored states with what they should be."""
COUNTS = (
    "restores of one",
    "restores",
    "forks of one state",
    "forks",
    "snapshots",
    "snapshots of restored states",
    "points",
    "rounds",
    "programs",
    "cycles",
    "drawn orders",
    "restores with one seed",
    "forks with one seed",
    "last transitions",
)
"""Measurements that count independent trials, the most informative first."""
SURE = 0.999
NOT_RUN = "not run: "
"""Prefix of the message of a check that was left out because the run had to be ended."""
UNRESTORED = "changes in play, not restored"
"""Note on attributes that no snapshot holds; see `strength`."""


class Headline(NamedTuple):
    """Verdict on the whole run."""

    text: str
    kind: str
    """``pass``, ``fail`` or ``inconclusive``."""


class Weight(NamedTuple):
    """Weight of a PASS."""

    trials: str
    """Number of trials: ``400 restores``."""
    rate: str
    """Rarest fault that the trials would have shown with a probability of `SURE`: ``1 in 58``."""
    power: str
    """Smallest difference that a statistical test detects, and the probability of detecting it."""


def headline(report: Mapping[str, Any]) -> Headline:
    """Headline of a report in JSON form: whether restores are faithful, other failures, or why there is no verdict."""
    failed = [result["id"].partition(".")[0] for result in report["results"] if result["verdict"] == "FAIL"]
    aside = [theme for theme in failed if theme in ASIDE]
    total = sum(report["counts"].values())
    if len(aside) < len(failed):
        return Headline(f"Not faithful: {len(failed)} of {total} checks fail", "fail")
    reasons = [result["message"] for result in report["results"] if result["message"].startswith(NOT_RUN)]
    if reasons:
        why = reasons[0].removeprefix(NOT_RUN)
        text = f"Not certified: {len(reasons)} of {total} checks did not run, for {why}"
        return Headline(text, "fail" if failed else "inconclusive")
    compared = any(result["id"].startswith(COMPARE) and result["verdict"] == "PASS" for result in report["results"])
    faithful = "Snapshots faithful" if compared else "Restored states were not compared"
    if aside:
        kinds = {theme: aside.count(theme) for theme in ASIDE if theme in aside}
        told = ", ".join(f"{count} {ASIDE[theme]}{'s' * (count > 1)} failed" for theme, count in kinds.items())
        return Headline(f"{faithful}; {told}", "fail")
    but = _but(report) if compared else ""
    if report["counts"].get("INCONCLUSIVE"):
        return Headline(f"{faithful}: no check fails, but some could not tell{but}", "inconclusive")
    return Headline(f"{faithful}: no check fails{but}", "pass")


def _but(report: Mapping[str, Any]) -> str:
    """Reservation for those who read only the headline."""
    ended = unended({result["id"]: result for result in report["results"]})
    lost = (report.get("strength") or {}).get("unrestored", ())
    text = f"; {ended}: what happens after the end was not tested" if ended else ""
    return text + (f"; {UNRESTORED}: {', '.join(lost)}" if lost else "")


def weight(result: Mapping[str, Any]) -> Weight:
    """Weight of a result in its JSON form; parts that its measurements do not tell are empty."""
    evidence = result["evidence"]
    name, count = next(
        ((name, evidence[name]) for name in COUNTS if type(evidence.get(name)) is int and evidence[name]), ("", 0)
    )
    power = evidence.get("power")
    told = ""
    if isinstance(power, Mapping) and {"TV", "at least"} <= power.keys():
        told = f"total variation {power['TV']} seen with {power['at least']:.4g}"
    return Weight(f"{count} {name}" if count else "", f"1 in {rarest(count)}" if count else "", told)


def rarest(trials: int) -> int:
    """The number ``n`` for which ``trials`` independent trials show a fault of one in ``n`` with probability `SURE`."""
    return max(1, int(1 / (1 - (1 - SURE) ** (1 / max(1, trials)))))
