"""SWE-bench tasks in worker processes that keep their snapshots: trees are the local ones, and little is written."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from sandboxgym.tree import Action, Context, Envs, Failure, ForkAt, RolloutTree, rollout
from sandboxgym.workers.pool import PooledEnvs
from sandboxgym.workers.store import SnapshotStore

COMMANDS = [
    ["cd /testbed && export V=1 && yes 0123456789abcde | head -c 3000000 > large"],
    ["echo one >> README.md", "echo two >> README.md", "sed -i 1d README.md"],
    ["mkdir -p new && echo $V > new/file", "rm large", "mv README.md moved"],
    ["git status --short; cat README.md moved new/file 2>&1 | md5sum; ls | wc -l"],
    ["pwd; echo $V"],
]


def decide(contexts: Sequence[Context]) -> list[Action]:
    return [Action(str(context.rng.choice(COMMANDS[context.depth]))) for context in contexts]


def shown(trees: Sequence[RolloutTree]) -> Any:
    return [
        [(path.key, [(e.action.text, e.reward, e.child.observation, e.child.state_hash) for e in path.edges])]
        for tree in trees
        for path in tree.paths
    ]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["overlay", "copy"])
def test_trees_of_tasks_are_the_local_ones_also_where_a_worker_is_killed(
    backend: str, backend_of: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    arguments = {"dataset": "mini", "max_episode_steps": len(COMMANDS), **backend_of(backend)}
    schedule: dict[str, Any] = {"tasks": [0, 1], "seed": (2,)}
    with Envs(lambda: gym.make("sandboxgym/SWEBench-v0", **arguments)) as envs:
        expected = shown(rollout(envs, decide, ForkAt([1, 2], width=3), **schedule))
    failures: list[Failure] = []
    with PooledEnvs("sandboxgym/SWEBench-v0", 2, store=tmp_path / "store", **arguments) as pool:
        assert shown(rollout(pool, decide, ForkAt([1, 2], width=3), **schedule)) == expected
        calls = iter(range(100))

        def doomed(contexts: Sequence[Context]) -> list[Action]:
            if next(calls) == 3:
                pid = pool._slots[0].worker.pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
            return decide(contexts)

        found = shown(rollout(pool, doomed, ForkAt([1, 2], width=3), retries=3, failures=failures, **schedule))
        assert found == expected
        assert all(shared.worker.snapshots_shipped == 0 for shared in pool._slots)
    assert failures and not any(failure.dropped for failure in failures)
    assert SnapshotStore(tmp_path / "store").nbytes() < 4_500_000 * (1 if backend == "overlay" else 2)
