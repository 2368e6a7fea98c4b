"""The environments of this package pass the conformance suite.

``pytest conformance/ --sandboxgym-env ID`` certifies another one (test_certify.py), with one item per check.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

import sandboxgym  # noqa: F401  # registers the ids
from sandboxgym.conformance import Budget, Subject, Verdict, all_checks, run

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from components import missing

ENVS = ["sandboxgym/ALFWorld-v0", "sandboxgym/WebShop-v0"]
REASONS = (
    "no randomness seen",
    "no shell hook",
    "the environment gives no action_mask",
    "neither actions nor reset options can be changed in place",
    "reset() looks up no options",
)
"""Reasons for which a check may be skipped."""


@pytest.mark.slow
@pytest.mark.parametrize("target", ENVS)
def test_no_check_fails(target: str) -> None:
    untimed = [check.id for check in all_checks() if not check.id.startswith("cost.")]
    report = run(Subject.named(target), only=untimed)
    assert {result.id: result.message for result in report.failures} == {}
    assert len(report.of(Verdict.PASS)) >= 50
    untold = {id: reason for id, reason in report.not_tested if id in untimed and not reason.startswith(REASONS)}
    if late := [id for id, reason in untold.items() if "in the time" in reason]:  # on a busy machine
        patient = replace(Budget.named("quick"), seconds=5 * Budget.named("quick").seconds)
        again = run(Subject.named(target), only=["api.protocol", *late], budget=patient)
        assert {result.id: result.message for result in again.failures} == {}
        untold = {id: reason for id, reason in untold.items() if id not in late or id in dict(again.not_tested)}
    assert untold == {}


CONTAINER_CHECKS = (
    "api.protocol",
    "api.spec",
    "api.snapshot_before_reset",
    "restore.trace_equality",
    "snapshot.noninterference",
    "freshness.last_info",
    "fork.unseeded_exact",
    "probes.matrix",
    "probes.losses",
    "durable.round_trip",
    "resources.killed_owner",
)
"""A sample: the whole suite takes a quarter of an hour where every step is a process (docs/conformance/certify.sh)."""


@pytest.mark.slow
@pytest.mark.timeout(1800)  # every step is a process: minutes, and more on a busy machine
def test_the_sandboxed_environment_holds_to_the_contract() -> None:
    from sandboxgym.envs.swebench import conformance_hooks
    from sandboxgym.sandbox.overlay.backend import why_unavailable

    if reason := why_unavailable():
        missing("overlay", reason)
    arguments = {"backend": "overlay", "instances": ["tally-12"]}
    subject = Subject.named(
        "sandboxgym/SWEBench-v0", arguments, actions=conformance_hooks.actions, shell=conformance_hooks.shell
    )
    report = run(subject, only=CONTAINER_CHECKS, budget=replace(Budget.named("quick"), traces=2))
    assert {result.id: result.message for result in report.failures} == {}
    assert len(report.of(Verdict.PASS)) >= len(CONTAINER_CHECKS) - 1
