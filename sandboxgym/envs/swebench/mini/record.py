"""Recorder of the embedded tasks' base commits and of their failing and passing tests, found by running them.

``python -m sandboxgym.envs.swebench.mini.record`` runs the tests of every task without and with its solution, and
writes ``recorded.json`` in place. Run it when a task was added or changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sandboxgym.envs.swebench import mini
from sandboxgym.envs.swebench.grading import verdict as grading
from sandboxgym.envs.swebench.rows.recipes import WORKDIR
from sandboxgym.envs.swebench.rows.tasks import Task, from_row
from sandboxgym.envs.swebench.workspaces.workspace import WorkspaceSettings, pristine


def record(settings: Mapping[str, Any], *, only: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """Run all tasks; returns their records.

    Args:
        settings: settings of the sandboxes, as `WorkspaceSettings` takes them.
        only: these tasks.

    Raises:
        RuntimeError: a solution does not apply, or a test fails with it.
    """
    recorded = {}
    for repository in map(mini.repository_of, mini.REPOSITORIES):
        for number, commit in enumerate(repository.commits):
            name = mini.instance_id_of(repository, commit)
            if name is not None and (only is None or name in only):
                task = from_row(mini.row_of(repository, number, base_commit="HEAD"))
                recorded[name] = _record(task, WorkspaceSettings(**settings))
    return recorded


def _record(task: Task, settings: WorkspaceSettings) -> dict[str, Any]:
    with settings.box(task) as box:
        box.restore(pristine(task, settings).snapshot)
        base_commit = box.run(f"cd {WORKDIR} && git rev-parse HEAD").output.strip()
    before, after = _outcomes(task, settings, _HARMLESS), _outcomes(task, settings, task.patch)
    if failed := [name for name, outcome in after.items() if outcome != "PASSED"]:
        raise RuntimeError(f"{task.instance_id}: with its solution these tests do not pass: {', '.join(failed)}")
    passed = {name for name, outcome in before.items() if outcome == "PASSED"}
    return {
        "base_commit": base_commit,
        "FAIL_TO_PASS": sorted(after.keys() - passed),
        "PASS_TO_PASS": sorted(after.keys() & passed),
    }


_HARMLESS = "diff --git a/harmless b/harmless\nnew file mode 100644\n--- /dev/null\n+++ b/harmless\n@@ -0,0 +1 @@\n+\n"


def _outcomes(task: Task, settings: WorkspaceSettings, patch: str) -> dict[str, str]:
    start = pristine(task, settings)
    verdict = grading.grade(start.snapshot, start, task, settings, patch=patch)
    constants = grading.official().constants
    tests = verdict.log.partition(constants.START_TEST_OUTPUT)[2].partition(constants.END_TEST_OUTPUT)[0]
    if not tests:
        raise RuntimeError(f"{task.instance_id}: {verdict.reason}: {verdict.log[-1000:]}")
    outcomes: dict[str, str] = grading.official().parsers[task.log_parser](tests, None)
    return outcomes


def main() -> None:
    """Write ``recorded.json``."""
    path = Path(__file__).with_name("recorded.json")
    path.write_text(json.dumps(record({}), indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
