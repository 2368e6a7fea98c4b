"""Our own environments hold to the contract, by the command that we offer to others.

``pytest conformance/ --sandboxgym-env ID`` certifies another one (test_certify.py): one item a check.
"""

from __future__ import annotations

import pytest

import sandboxgym  # noqa: F401  # registers the ids
from sandboxgym.conformance import Subject, Verdict, all_checks, run

ENVS = ["sandboxgym/ALFWorld-v0"]
REASONS = ("no randomness seen", "no shell hook")  # why a check may be skipped


@pytest.mark.slow
@pytest.mark.parametrize("target", ENVS)
def test_no_check_fails(target: str) -> None:
    untimed = [check.id for check in all_checks() if not check.id.startswith("cost.")]
    report = run(Subject.named(target), only=untimed)
    assert {result.id: result.message for result in report.failures} == {}
    assert len(report.of(Verdict.PASS)) >= 50
    untold = {id: reason for id, reason in report.not_tested if id in untimed and not reason.startswith(REASONS)}
    assert untold == {}
