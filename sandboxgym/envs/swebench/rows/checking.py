"""Check of a row on this machine: its solution and an empty patch are tested one or more times.

1. Every run has a fresh sandbox on the prepared files; no verdict is cached.
2. The output of the solution's tests is trusted, because no agent could forge it: a solution that fails is tested with
   the network too, and its messages about unresolved host names count.
"""

from __future__ import annotations

import re
import statistics
import time
from dataclasses import replace

from sandboxgym import __version__
from sandboxgym.envs.swebench.grading import verdict as grading
from sandboxgym.envs.swebench.grading.verdict import PatchVerdict
from sandboxgym.envs.swebench.rows.check_record import RowCheck
from sandboxgym.envs.swebench.rows.tasks import Task
from sandboxgym.envs.swebench.workspaces.workspace import WorkspaceSettings, pristine

_NO_NETWORK = re.compile(
    r"Could not resolve host|Temporary failure in name resolution|Name or service not known|Network is unreachable"
    r"|No address associated with hostname|Failed to establish a new connection|getaddrinfo failed"
)


def check(task: Task, settings: WorkspaceSettings, *, repeat: int = 1, timeout: float = grading.TIMEOUT) -> RowCheck:
    """Check a row.

    Args:
        task: the row.
        settings: settings of the sandboxes; without network, a failing solution is tested with it once more.
        repeat: number of runs of the solution, and of an empty patch.
        timeout: limit in seconds of the tests in each run.

    Raises:
        SandboxError: a sandbox failed, which says nothing about the row.
        TaskError: the row cannot be prepared.
        ValueError: ``repeat`` is below 1.
    """
    if repeat < 1:
        raise ValueError(f"repeat: expected at least 1, found {repeat}")
    start = pristine(task, settings)
    gold, seconds = [], []
    for _ in range(repeat):
        began = time.perf_counter()
        gold.append(grading.attempt(start, task, settings, task.patch, timeout=timeout))
        seconds.append(time.perf_counter() - began)
    empty = [grading.attempt(start, task, settings, "", timeout=timeout) for _ in range(repeat)]
    resolves = all(verdict.resolved for verdict in gold)
    needs_network, note = False, ""
    if not resolves and not settings.network:
        connected = replace(settings, network=True)
        other = grading.attempt(pristine(task, connected), task, connected, task.patch, timeout=timeout)
        if other.resolved and not any(verdict.resolved for verdict in gold):
            needs_network, resolves = True, True
        elif not any(verdict.resolved for verdict in gold) and any(map(_asks_for_network, gold)):
            needs_network, note = True, "its tests say that they miss the network; with it, if there is any, they fail"
        else:
            note = f"with the network: {other.reason}"
    with settings.box(task) as box:
        backend = box.sandbox.backend.capabilities.name
    return RowCheck(
        instance_id=task.instance_id,
        task=task.digest,
        backend=backend,
        image=settings.image_of(task),
        image_id=start.snapshot.tree.base,
        network=settings.network,
        resolves=resolves,
        empty_resolves=any(verdict.resolved for verdict in empty),
        needs_network=needs_network,
        flaky=_differ(gold) or _differ(empty),
        gold=tuple(verdict.reason for verdict in gold),
        empty=tuple(verdict.reason for verdict in empty),
        seconds=round(statistics.median(seconds), 2),
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        version=__version__,
        note=note,
    )


def _differ(verdicts: list[PatchVerdict]) -> bool:
    return any((one.reason, one.tests_status) != (verdicts[0].reason, verdicts[0].tests_status) for one in verdicts)


def _asks_for_network(verdict: PatchVerdict) -> bool:
    """Tell whether the tests themselves tried to use the network; pip's attempts before them do not count."""
    constants = grading.official().constants
    tests = verdict.log.partition(constants.START_TEST_OUTPUT)[2].partition(constants.END_TEST_OUTPUT)[0]
    return _NO_NETWORK.search(tests) is not None
