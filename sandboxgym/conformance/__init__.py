"""The conformance suite: certifies that the snapshots of an environment are faithful.

One core of framework-free checks (`check`, `runner`, ``checks/``) with three front ends:

- ``python -m sandboxgym.conformance ENV_ID``;
- ``pytest --pyargs sandboxgym.conformance --sandboxgym-env ENV_ID`` (`plugin`);
- `check_snapshot` for one line in a test.

>>> from sandboxgym.conformance import check_snapshot
>>> report = check_snapshot("sandboxgym/ALFWorld-v0", only=["api.protocol"])
>>> [str(result.verdict) for result in report.results]
['PASS']

Any environment qualifies that has ``snapshot()``, ``restore(snap, *, seed=None)``, ``fork(k, *, seed=None)`` and
``snapshot_spec``; it need not share code with this package.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from sandboxgym.conformance.check import Budget, Check, Level, Result, Verdict
from sandboxgym.conformance.runner import Report, all_checks, run
from sandboxgym.conformance.subject import AnyEnv, MakeSpec, Subject

__all__ = [
    "Budget",
    "Check",
    "ConformanceError",
    "Level",
    "MakeSpec",
    "Report",
    "Result",
    "Subject",
    "Verdict",
    "all_checks",
    "check_snapshot",
    "run",
]


class ConformanceError(AssertionError):
    """Checks failed; the message lists them. ``report`` has the whole `Report`."""

    def __init__(self, report: Report) -> None:
        lines = [f"{len(report.failures)} of {len(report.results)} conformance checks of {report.name} failed:"]
        for cause in report.causes:
            lines.append(f"  {cause.root}: {report[cause.root].message}")
            if others := cause.checks[1:]:
                where = f" ({cause.what})" if cause.what else ""
                lines.append(f"    probably of the same cause{where}: {', '.join(others)}")
        first = next((text for cause in report.causes if (text := report[cause.root].counterexample)), None)
        if first:
            lines += ["", "The first counterexample:", "", first]
        super().__init__("\n".join(lines))
        self.report = report


def check_snapshot(
    make_env: Callable[[], AnyEnv] | str | Subject,
    *,
    make_kwargs: Mapping[str, Any] | None = None,
    levels: Collection[int | str] = tuple(Level),
    budget: str | Budget = "quick",
    seed: int = 0,
    only: Collection[str] | None = None,
    strength: bool = False,
    **hooks: Any,
) -> Report:
    """Run the suite on an environment, in one line of a test.

    Args:
        make_env: makes the environment; or a Gymnasium id, ``module:function``, or a `Subject`.
        make_kwargs: keyword arguments for ``make_env``.
        levels: which `Level`s, by number or name (``["exact", "isolation"]``).
        budget: ``"quick"`` or ``"full"``.
        seed: of all that the suite draws.
        only: ids of the only checks to run.
        strength: put faults into the environment's snapshots afterwards, and say in the report which of them this run
            would have seen; it takes a quarter of the time in addition.
        hooks: ``actions``, ``observe_state``, ``normalize``, ``reset_options``, ``make_spec``, ``declared``, ``shell``,
            ``lossy`` and ``name`` of `Subject`.

    Returns:
        The report, also of what was skipped or stayed inconclusive.

    Raises:
        ConformanceError: an `AssertionError` that lists the failed checks.
    """
    if isinstance(make_env, Subject):
        subject = make_env
    elif isinstance(make_env, str):
        subject = Subject.named(make_env, make_kwargs, **hooks)
    else:
        import functools

        factory = functools.partial(make_env, **make_kwargs) if make_kwargs else make_env
        subject = Subject(factory, **hooks)
    report = run(subject, levels=levels, budget=budget, seed=seed, only=only, strength=strength)
    if report.failures:
        raise ConformanceError(report)
    return report
