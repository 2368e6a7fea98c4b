"""Trials of all faults, the most easily detected ones first, until the time is up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from sandboxgym.conformance.check import REGISTRY, Budget, Result, Verdict
from sandboxgym.conformance.harness.scenario import opened, quiet
from sandboxgym.conformance.harness.unrestored import unrestored
from sandboxgym.conformance.reports.verdicts import UNRESTORED
from sandboxgym.conformance.strength.clock import Clock
from sandboxgym.conformance.strength.faults import Fault, faults_of
from sandboxgym.conformance.strength.fields import FIELDS, name
from sandboxgym.conformance.strength.states import Seen
from sandboxgym.conformance.strength.trials import FIELD_FAULTS, Strength, Trial
from sandboxgym.conformance.subject import Subject

CHECKS = (
    "restore.trace_equality",
    "snapshot.immutable",
    "restore.random_streams",
    "freshness.observation",
    "freshness.last_info",
    "fork.isolation",
    "restore.other_env",
    "restore.after_reset",
    "restore.after_done",
    "restore.diverge",
    "freshness.render",
    "restore.whole_episode",
)
"""Checks that are run against a fault, in this order."""
FIRST = {"shared": ("snapshot.immutable",), "stream": ("restore.random_streams",)}
"""Checks most likely to detect a kind of fault; for other kinds `VALUES`."""
VALUES = ("restore.trace_equality", "freshness.last_info", "restore.after_done", "freshness.observation")
LIKELY = 4
"""Number of checks that are run against each fault in the first round."""
SHARE = 0.25
"""Additional time, as a share of the time that the checks took."""
LEAST_SECONDS = 2.0


def measure(subject: Subject, budget: Budget, results: Mapping[str, Result], *, seed: int, seconds: float) -> Strength:
    """Put faults into the environment and run the checks that it passed.

    Args:
        subject: the certified subject.
        budget: budget of the certificate.
        results: results of the certificate, by id.
        seed: seed of the certificate.
        seconds: time limit, after which no check is started: processor seconds, or half of the wall time if the
            environment is slow. It is doubled if fields are undecided when it has passed.

    Returns:
        The strength; it has a reason instead of trials if the state cannot be read or no restore check passed.
    """
    passed = [id for id in CHECKS if id in REGISTRY and id in results and results[id].verdict is Verdict.PASS]
    if not any(id.startswith("restore.") for id in passed):
        return Strength(reason="no check passed that compares what follows a restore")
    clock = Clock(seconds, waits=budget.waits)
    try:
        with quiet():
            seen = Seen.of(subject, budget, clock)
            faults = list(faults_of(subject, seen))
            lost = _lost(subject, seen, clock)
    except Exception as error:
        return Strength(reason=f"its state cannot be looked at: {type(error).__qualname__}: {error}")
    trials = [
        Trial(name(path), "left out", "never varied", f"the same in {seen.count} snapshots of {seen.episodes} episodes")
        for path in seen.constant
    ]
    trials += [
        Trial(name(path), "not captured", "unseen", f"{UNRESTORED}: differs after a restore {where}")
        for path, where in list(lost.items())[:FIELDS]
    ]
    if not faults and not trials:
        return Strength(reason="its state is out of reach: it is no SnapshotEnv, and no attribute of it changes")
    reasons = _explanations(subject)
    quick = replace(budget, traces=min(budget.traces, 2), seconds=budget.seconds / 4)
    # Fields come first, except those that are explained as unobservable: a field that no check sees is run against all
    # checks, which takes the time of ten others.
    left = sorted(faults, key=lambda fault: (fault.name[0] in reasons, fault.kind != "left out"))
    for among, how in ((LIKELY, quick), (len(passed), quick), (len(passed), budget)):
        undecided: list[Fault] = []
        if clock.over and any(fault.kind == "left out" and fault.name[0] not in reasons for fault in left):
            clock.limit = max(clock.limit, 2 * seconds)  # undecided fields are worth more time
        for fault in left:
            first = sorted(passed, key=_likely(fault.kind))
            trial = (
                None if clock.over else _trial(seen.first(fault.path, subject), fault, first[:among], how, seed, clock)
            )
            if trial is None:
                undecided.append(fault)
            else:
                trials.append(trial)
        left = undecided
    trials += [_missed(fault, clock, passed) for fault in left]
    trials = [
        replace(trial, outcome="explained", note=reasons[trial.field])
        if trial.fault in FIELD_FAULTS
        and trial.outcome in ("unseen", "never varied", "not tried")
        and trial.field in reasons
        else trial
        for trial in trials
    ]
    order = [fault.name for fault in faults]
    trials.sort(key=lambda t: order.index((t.field, t.fault)) if (t.field, t.fault) in order else -1)
    return Strength(tuple(trials), seconds=clock.spent, layered=seen.layered)


def _lost(subject: Subject, seen: Seen, clock: Clock) -> dict[tuple[str, ...], str]:
    """Result of `unrestored`; empty where the environment's attributes cannot be read."""
    try:
        return unrestored(subject, seen.runs[:LIKELY], lambda: clock.spent > clock.limit / 2)
    except Exception:  # what is wrong with its restores is for the checks to find
        return {}


def _likely(kind: str) -> Callable[[str], int]:
    """Order in which a kind of fault meets the checks."""
    first = FIRST.get(kind, VALUES)
    return lambda id: first.index(id) if id in first else len(first)


def _explanations(subject: Subject) -> Mapping[str, str]:
    """The environment's explanations of fields that show nowhere."""
    with opened(subject) as env:
        told = (env.unwrapped.metadata or {}).get("unobservable")
        return dict(told) if isinstance(told, Mapping) else {}


def _trial(
    subject: Subject, fault: Fault, passed: Sequence[str], budget: Budget, seed: int, clock: Clock
) -> Trial | None:
    """Trial of a fault; None where no check detected it, or the time was up."""
    from sandboxgym.conformance.runner import run_check  # which imports this one

    fault.tried = 0
    mutant = fault.subject(subject)
    for id in passed:
        if clock.over:
            return None
        result = run_check(REGISTRY[id], mutant, budget, seed)
        if result.verdict is Verdict.FAIL:
            return Trial(*fault.name, "caught", id)
        fault.tried += 1
    return None


def _missed(fault: Fault, clock: Clock, passed: Sequence[str]) -> Trial:
    if fault.tried < len(passed):
        return Trial(*fault.name, "not tried", f"the time was up after {clock.spent:.0f} s")
    if fault.effects:
        note = f"{fault.effects} restores were wrong, and nothing that followed showed it"
        return Trial(*fault.name, "unseen", note)
    note = "no restore found another value where it came"
    return Trial(*fault.name, "never varied" if fault.kind == "left out" else "without effect", note)
