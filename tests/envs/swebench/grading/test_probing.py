"""Hooks of the conformance suite in a SWE-bench environment."""

from __future__ import annotations

import numpy as np

from sandboxgym.envs.swebench import conformance_hooks
from sandboxgym.envs.swebench.rows.tasks import open_tasks


def test_some_runs_come_to_their_end_and_some_are_long() -> None:
    """Slow environments are only recorded for runs of 8 steps, and the end of an episode must be among them."""
    rng = np.random.default_rng(0)
    assert conformance_hooks.PATIENCE < 8
    late = {
        task.instance_id: conformance_hooks.actions(
            "", {"task_id": task.instance_id, "steps": conformance_hooks.PATIENCE}, rng
        )
        for task in open_tasks("mini")
    }
    hasty = {name for name, action in late.items() if action == "submit"}
    assert 1 < len(hasty) < len(late) / 2
    early = [conformance_hooks.actions("", {"task_id": name, "steps": 0}, rng) for name in late for _ in range(50)]
    assert early.count("submit") < 20
    assert len(set(early)) > 15
