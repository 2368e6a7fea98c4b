"""Runner of the checks: runs them on a subject and collects their results.

1. Checks do not affect each other through the process: global random streams, the working directory and environment
   variables are restored after each.
2. A check that does not apply is a SKIP with its reason; the report lists it under "NOT tested".
3. Equal seeds give equal calls, except that in a slow environment runs are shorter and time limits end loops earlier.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import os
import platform
import random
import time
import traceback
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from sandboxgym.conformance.check import (
    REGISTRY,
    SHORTEST,
    Budget,
    Check,
    Failed,
    Inconclusive,
    Level,
    Result,
    Skipped,
    Verdict,
    as_levels,
)
from sandboxgym.conformance.digest import suite_digest
from sandboxgym.conformance.harness import process_globals
from sandboxgym.conformance.harness.scenario import opened, quiet, release
from sandboxgym.conformance.harness.shrink import shrunk
from sandboxgym.conformance.reports.causes import Cause, causes
from sandboxgym.conformance.reports.caveats import caveats, reset_options
from sandboxgym.conformance.strength import LEAST_SECONDS, SHARE, Strength, measure
from sandboxgym.conformance.subject import Control, Subject, restore, snapshot
from sandboxgym.conformance.supervision.clock import Stopwatch

SCHEMA = 1
"""Version of the JSON of a report; raised when a field changes its meaning."""

SHRINKING_IN_ALL = 40.0
"""Seconds after which the runner starts to shorten no further counterexample."""
SHRINKING = 5.0
"""Most processor seconds for shortening one script."""

THEMES = (
    "api",
    "restore",
    "snapshot",
    "freshness",
    "interface",
    "wrappers",
    "fork",
    "isolation",
    "machine",
    "streams",
    "stochastic",
    "probes",
    "hostile",
    "durable",
    "resources",
    "concurrency",
    "cost",
)
_ROOMS = {"streams": "chance.", "stochastic": "chance.", "probes": "sandbox.", "hostile": "sandbox."}

Listener = Callable[[Check, Result | None], None]
"""Function called before each check, with None, and after it, with its result."""


@dataclass(frozen=True)
class Report:
    """Results of a run."""

    name: str
    target: str | None
    make_kwargs: dict[str, Any]
    capabilities: dict[str, Any]
    results: tuple[Result, ...]
    budget: str
    """Name of the budget, and how it was reduced if the environment is slow."""
    levels: tuple[int, ...]
    seed: int
    started: str
    seconds: float
    versions: dict[str, str] = field(default_factory=dict)
    platform: str = ""
    strength: Strength | None = None
    """Strength of the certificate; None if it was not measured."""
    machine: dict[str, float | None] = field(default_factory=dict)
    """Load averages of one minute before and after the run, cores, and seconds per call of the environment."""
    reset_options: str = ""
    """Text that names the reset options that the environment reads and that were not given."""
    beside: tuple[Report, ...] = ()
    """Reports of the same checks on the environment made in other ways."""

    def __getitem__(self, id: str) -> Result:
        for result in self.results:
            if result.id == id:
                return result
        raise KeyError(id)

    def of(self, verdict: Verdict) -> tuple[Result, ...]:
        """The results with a verdict."""
        return tuple(result for result in self.results if result.verdict is verdict)

    @property
    def failures(self) -> tuple[Result, ...]:
        """The failed checks."""
        return self.of(Verdict.FAIL)

    @property
    def causes(self) -> list[Cause]:
        """The failures, grouped by probable cause."""
        return causes([{**asdict(result), "evidence": plain(result.evidence)} for result in self.failures])

    @property
    def not_tested(self) -> tuple[tuple[str, str], ...]:
        """Ids and reasons of checks that were skipped, inconclusive or not asked for, omitted levels included."""
        ran = {result.id for result in self.results}
        left_out = [
            (
                check.id,
                f"level {int(check.level)} was not asked for"
                if int(check.level) not in self.levels
                else "not asked for",
            )
            for check in all_checks()
            if check.id not in ran
        ]
        unknown = [(r.id, r.message) for r in self.results if r.verdict in (Verdict.SKIP, Verdict.INCONCLUSIVE)]
        return (*unknown, *left_out)

    @property
    def exit_code(self) -> int:
        """Exit status over all reports side by side: 1 some FAIL; 2 no FAIL, but some INCONCLUSIVE; 0 neither."""
        codes = {other.exit_code for other in self.beside}
        if self.failures or 1 in codes:
            return 1
        return 2 if self.of(Verdict.INCONCLUSIVE) or 2 in codes else 0

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        known = {check.id: check for check in all_checks()}
        results = []
        for result in self.results:
            check = known.get(result.id)
            entry = {**asdict(result), "verdict": str(result.verdict), "evidence": plain(result.evidence)}
            if check is not None:
                entry |= {
                    "level": int(check.level),
                    "hazard": check.hazard,
                    "does": check.summary,
                    "blind": check.blind,
                    "needs": list(check.needs),
                    "after": list(check.after),
                }
            results.append(entry)
        told = {
            "schema": SCHEMA,
            "name": self.name,
            "target": self.target,
            "make_kwargs": plain(self.make_kwargs),
            "capabilities": self.capabilities,
            "budget": self.budget,
            "levels": list(self.levels),
            "seed": self.seed,
            "started": self.started,
            "seconds": round(self.seconds, 3),
            "versions": self.versions,
            "platform": self.platform,
            "machine": self.machine,
            "counts": {str(verdict): len(self.of(verdict)) for verdict in Verdict},
            "exit_code": self.exit_code,
            "strength": self.strength and self.strength.to_json(),
            "causes": [{**cause._asdict(), "checks": list(cause.checks)} for cause in self.causes],
            "results": results,
            "not_tested": [{"id": id, "reason": reason} for id, reason in self.not_tested],
            "reset_options": self.reset_options,
            "beside": [other.to_json() for other in self.beside],
        }
        return {**told, "caveats": caveats(told)}


def all_checks(*, levels: Collection[int | str] | None = None, only: Collection[str] | None = None) -> list[Check]:
    """All checks, in the order in which they run; with ``levels`` or ``only``, the checks that match both.

    Raises:
        ValueError: there is no check with such an id, or no such level.
    """
    wanted = None if levels is None else as_levels(levels)
    for theme in THEMES:
        importlib.import_module("sandboxgym.conformance.checks." + _ROOMS.get(theme, "") + theme)
    if only is not None and (unknown := sorted(set(only) - REGISTRY.keys())):
        raise ValueError(f"expected ids of checks ({', '.join(REGISTRY)}), found {', '.join(unknown)}")
    return [
        check
        for check in sorted(REGISTRY.values(), key=_theme)
        if (wanted is None or int(check.level) in wanted) and (only is None or check.id in only)
    ]


def _theme(check: Check) -> int:
    theme = check.id.partition(".")[0]
    return THEMES.index(theme) if theme in THEMES else len(THEMES)


def run(
    subject: Subject,
    *,
    levels: Collection[int | str] = tuple(Level),
    budget: str | Budget = "quick",
    seed: int = 0,
    only: Collection[str] | None = None,
    listener: Listener | None = None,
    strength: bool = False,
    shrink: bool = True,
    known: Mapping[str, Result] | None = None,
    needless: Callable[[Check, Mapping[str, Result]], bool] | None = None,
    on_start: Callable[[Report], None] | None = None,
    on_checked: Callable[[], None] | None = None,
) -> Report:
    """Run checks on a subject, in this process.

    Args:
        subject: the subject to check.
        levels: the `Level`s to run, by number or name.
        budget: limits on the effort, or their name.
        seed: seed of everything that the suite draws.
        only: ids of the checks to run, among those of the levels; default: all of them.
        listener: called before and after each check that runs.
        strength: after the checks, put faults into the environment and report which of them this run would have
            detected.
        shrink: shorten the scripts of failures.
        known: results by id of checks that are not run again.
        needless: function of a check and the results before it; if it returns True, the check is left out. Default:
            none is left out.
        on_start: called with the report without results before the first check.
        on_checked: called after the last check, before scripts are shortened and the strength is measured.

    Returns:
        The report. Failed checks do not raise.

    Raises:
        ValueError: there is no check with such an id, no such level or no such budget.
    """
    if isinstance(budget, str):
        budget = Budget.named(budget)
    subject.reseed(seed)
    chosen = all_checks(levels=levels, only=only)
    _load_libraries(subject)
    call = pace(subject)
    budget = budget.paced(call)
    load = _load()
    start, watch = time.perf_counter(), Stopwatch()
    spec = subject.make_spec
    try:
        with preserved(), quiet():  # an environment is made and closed for it
            capabilities = asdict(subject.capabilities)
    except (Exception, SystemExit):
        capabilities = {}
    try:
        with preserved(), quiet():  # here too: what closing changes for good could not be seen to change afterwards
            unasked = reset_options(subject)
    except (Exception, SystemExit):  # what is wrong with it is for the checks to find
        unasked = ""
    report = replace(
        bare(subject.name),
        target=spec.target if spec else None,
        make_kwargs=dict(spec.kwargs) if spec else {},
        capabilities=capabilities,
        budget=str(budget),
        levels=as_levels(levels),
        seed=seed,
        reset_options=unasked,
        machine={"load before": load, "load after": load, "cores": os.cpu_count() or 1, "seconds per call": call},
    )
    if on_start is not None:
        on_start(report)
    results: dict[str, Result] = {}
    for place, check in enumerate(chosen):
        if known is not None and check.id in known:
            results[check.id] = known[check.id]
            continue
        if needless is not None and needless(check, results):
            continue
        if listener is not None:
            listener(check, None)
        spent = max(watch.busy, watch.elapsed / 2) if budget.waits else watch.busy
        now = budget.sharing(spent, len(chosen) - place)
        results[check.id] = result = run_check(check, subject, now, seed, results)
        if listener is not None:
            listener(check, result)
    if on_checked is not None:
        on_checked()
    if shrink:
        shrinking = Stopwatch()
        for id, result in results.items():
            if not shrinking.spent(SHRINKING_IN_ALL):
                results[id] = shortened(subject, result, budget)
    measured = None
    if strength:
        spent = max(watch.busy, watch.elapsed / 2 if budget.waits else 0)
        seconds = max(LEAST_SECONDS, SHARE * spent)
        with preserved():
            measured = measure(subject, budget, results, seed=seed, seconds=seconds)
    return replace(
        report,
        results=tuple(results.values()),
        seconds=time.perf_counter() - start,
        strength=measured,
        machine={**report.machine, "load after": _load()},
    )


def bare(name: str) -> Report:
    """A report without results, with the present time as its start."""
    return Report(
        name=name,
        target=None,
        make_kwargs={},
        capabilities={},
        results=(),
        budget="",
        levels=tuple(map(int, Level)),
        seed=0,
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        seconds=0.0,
        versions=versions(),
        platform=f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
    )


def _load() -> float | None:
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def shortened(subject: Subject, result: Result, budget: Budget) -> Result:
    """A failure with the shortest script found that shows it, and the values that differ; other results unchanged."""
    if result.verdict is not Verdict.FAIL or not result.counterexample:
        return result
    try:
        found = shrunk(subject, result.counterexample, seconds=min(SHRINKING, budget.seconds))
    except Exception:  # an environment that fails may fail in any way
        return result
    if found is None:
        return result
    evidence = {**result.evidence, "difference": found.difference}
    return replace(result, counterexample=found.script, evidence=evidence)


def _load_libraries(subject: Subject) -> None:
    """Make an environment once, so that settings of the libraries that it loads are among what is put back."""
    with contextlib.suppress(Exception), preserved(), quiet():  # the checks report why that fails
        subject.make_env().close()


def pace(subject: Subject) -> float:
    """Seconds of processor or waiting per call, a snapshot's included: the longer of a step and a snapshot.

    Resets count as calls; 0 if the environment cannot even be made.
    """
    try:
        with preserved(), quiet():
            control = subject.control(0, SHORTEST)
            call = control.seconds / len(control.ops)
            return max(call, _snapshot_seconds(subject, control))
    except (Exception, SystemExit):  # what is wrong with it is for the checks to find
        return 0.0


def _snapshot_seconds(subject: Subject, control: Control) -> float:
    """Half the seconds of a snapshot and its restore in an environment in use; the smallest of three measurements."""
    with opened(subject) as env:
        for op in control.ops[:2]:
            subject.call(env, op)
        seconds = []
        for _ in range(3):
            watch = Stopwatch()
            snap = snapshot(env)
            restore(env, snap)
            seconds.append(watch.elapsed / 2)
            release(snap)
    return min(seconds)


def run_check(
    check: Check, subject: Subject, budget: Budget, seed: int, before: dict[str, Result] | None = None
) -> Result:
    """Run one check and return its result.

    It is a SKIP if a capability is missing, or if a check that this one comes ``after`` failed in ``before``, or was
    skipped there because of a failure.
    """
    start = time.perf_counter()

    def result(verdict: Verdict, message: str = "", evidence: Any = None, script: str | None = None) -> Result:
        return Result(check.id, verdict, _printable(message), evidence or {}, script, time.perf_counter() - start)

    reason = _unable(check, subject, before or {})
    if reason:
        return result(Verdict.SKIP, reason)
    rng = np.random.default_rng([seed, zlib.crc32(check.id.encode())])
    try:
        with preserved(), quiet():
            measured = check.function(subject, budget, rng)
    except Failed as error:
        return result(Verdict.FAIL, str(error), error.evidence, error.counterexample)
    except Skipped as error:
        return result(Verdict.SKIP, str(error))
    except Inconclusive as error:
        return result(Verdict.INCONCLUSIVE, str(error), error.evidence)
    except (Exception, SystemExit) as error:  # an environment that ends the interpreter ends its check only
        text = "".join(traceback.format_exception(error)[-12:])
        return result(Verdict.FAIL, _raised(error)[:500], {"traceback": text}, getattr(error, "counterexample", None))
    return result(Verdict.PASS, evidence=measured)


def _raised(error: BaseException) -> str:
    """An exception, for a message, with the call that raised it if that can be told."""
    message = f"{type(error).__qualname__}: {error}" if str(error) else type(error).__qualname__
    called = getattr(error, "called", "") or _outermost(error)
    return f"{called} raised {message}" if called else message


def _outermost(error: BaseException) -> str:
    """Name of the outermost function outside the suite that raised an exception; empty if there is none."""
    suite, name = str(Path(__file__).parent), ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if code.co_filename.startswith(suite):
            name = ""
        elif not name and not code.co_filename.endswith("contextlib.py"):
            name = f"{code.co_name}()"
    return name


def _unable(check: Check, subject: Subject, before: dict[str, Result]) -> str | None:
    """Reason why a check cannot run, or None."""
    for id in check.after:
        earlier = before.get(id)
        if earlier is not None and earlier.verdict is Verdict.FAIL:
            return f"{id} failed"
        if earlier is not None and earlier.verdict is Verdict.SKIP and earlier.message.endswith(" failed"):
            return earlier.message
    try:
        with preserved(), quiet():
            for need in check.needs:
                if reason := missing(subject, need):
                    return reason
    except (Exception, SystemExit) as error:
        if check.id.startswith("api."):
            return None
        return f"what it needs cannot be found out: {_raised(error)}"
    return None


def missing(subject: Subject, need: str) -> str | None:
    """Reason why a capability is missing, or None."""
    spec = subject.capabilities
    if need == "exact":
        if spec.rng or not subject.noise:
            return None
        return f"random streams are not declared captured (snapshot_spec.rng), and {subject.noise}"
    if need == "save":
        from sandboxgym.conformance.checks.durable import savable

        return savable(subject)
    return None if getattr(spec, need) else f"not declared: snapshot_spec.{need} is False"


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Context that restores the global random streams and everything that `process_globals.put_back` covers."""
    streams = random.getstate(), np.random.get_state()
    try:
        with process_globals.put_back():
            yield
    finally:
        random.setstate(streams[0])
        np.random.set_state(streams[1])


def versions() -> dict[str, str]:
    """Versions that a result may depend on; that of the suite is a digest of its modules that decide verdicts."""
    found = {"suite": suite_digest()}
    for package in ("sandboxgym", "gymnasium", "numpy", "hypothesis", "scipy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def plain(value: Any) -> Any:
    """A value converted to JSON types."""
    if isinstance(value, dict):
        return {_printable(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, float) and value != value:
        return "nan"
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return _printable(str(value))


def _printable(text: str) -> str:
    """Text that any stream can encode: file names may hold bytes that are not valid UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()
