"""The conformance suite: certifies that the snapshots of an environment are faithful.

The checks (`check`, `runner`, ``checks/``) depend on no test framework. They can be run in three ways:

- on the command line: ``python -m sandboxgym.conformance ENV_ID``;
- by pytest, with the plugin `sandboxgym_pytest`: ``pytest --pyargs sandboxgym.conformance --sandboxgym-env ENV_ID``;
- by one line in a test: `check_snapshot`.

>>> from sandboxgym.conformance import check_snapshot
>>> report = check_snapshot("sandboxgym/ALFWorld-v0", only=["api.protocol"])
>>> [str(result.verdict) for result in report.results]
['PASS']

The suite takes any environment that has ``snapshot()``, ``restore(snap, *, seed=None)``, ``fork(k, *, seed=None)``
and ``snapshot_spec``; it need not share code with this package.
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
    """Some checks failed; the message lists them.

    Attributes:
        report: the whole `Report`.
    """

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
    """Run the suite on an environment, and raise if a check fails: one line in a test.

    Args:
        make_env: function that makes the environment; or a Gymnasium id, ``module:function``, or a `Subject`, with
            which ``make_kwargs`` and ``hooks`` are ignored.
        make_kwargs: keyword arguments for ``make_env``.
        levels: the `Level`s to run, by number or name (``["exact", "isolation"]``).
        budget: ``"quick"``, ``"full"`` or a `Budget`.
        seed: seed of everything that the suite draws.
        only: ids of the checks to run; default: all checks of the levels.
        strength: after the checks, put faults into the environment's snapshots and report which of them this run would
            have detected. It adds about a quarter of the time (2 seconds at least), or twice as much if some fields are
            then still undecided.
        hooks: other attributes of `Subject`: ``actions``, ``observe_state``, ``normalize``, ``reset_options``,
            ``declared``, ``shell``, ``lossy``, ``limits``, ``source`` and ``name``; also ``make_spec`` where
            ``make_env`` is a function.

    Returns:
        The report, which includes the checks that were skipped or stayed inconclusive.

    Raises:
        ConformanceError: some checks failed; it is an `AssertionError` that lists them.
        TypeError: there is no such hook.
        ValueError: there is no such level, budget or check, or ``make_env`` is text of another form.
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
