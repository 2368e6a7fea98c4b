"""Measure what the loss of a node costs a rollout, on a cluster of nodes that are simulated on this machine."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sandboxgym.bench.pool import ALFWORLD
from sandboxgym.sandbox import process_table
from sandboxgym.tree import Action, Context, Failure, ForkAt, Recovery, rollout
from sandboxgym.workers.env_host import FleetError
from sandboxgym.workers.fleet import RayEnvs

WAYS = (("killed", signal.SIGKILL), ("frozen", signal.SIGSTOP))
TIMEOUT = 5.0
"""Seconds after which a step counts as lost."""
HEAD: dict[str, Any] = {
    "num_cpus": 0,
    "object_store_memory": 80_000_000,
    "include_log_monitor": False,
    "include_dashboard": False,
    "no_monitor": True,
    "_system_config": {"prestart_worker_first_driver": False},
}
"""Arguments of the head of a cluster on this machine: it has no room for workers, and none of the processes that nobody
asks here, which would take a tenth of a processor. Nodes start no processes before something is placed on them: one for
each of their processors, most of which would wait until the node is lost."""
_AT = 8
"""Step at which the node is lost."""
_STEPS = 12


@dataclass(frozen=True, slots=True)
class Loss:
    """Cost of one loss."""

    seconds: float
    """Duration of the step in which it was noticed and mended, beyond that of the other steps."""
    paths: int
    """Paths that were in flight."""
    lost: int
    """Environments that were lost."""
    recovered: Counter[str]
    """Paths that continued, by where the replay began."""
    repeated: int
    """Actions that were repeated for them."""
    dropped: int


class _Counted(RayEnvs):
    """A fleet that keeps what it is told."""

    def note(self, event: Failure | Recovery) -> None:
        """Keep an event."""
        self.events.append(event)
        super().note(event)

    events: list[Failure | Recovery]


def measured(signal_number: int, paths: int) -> Loss:
    """Lose one of two nodes in the middle of a rollout, whose paths are on both."""
    import ray
    from ray.cluster_utils import Cluster

    try:
        cluster = Cluster(initialize_head=True, head_node_args=HEAD)
        nodes = [cluster.add_node(num_cpus=2, object_store_memory=80_000_000) for _ in range(2)]
    except Exception as error:  # Ray raises no narrower type: each of them has 30 s
        raise FleetError(f"expected a cluster of simulated nodes to start, found: {error}") from error
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    times: list[float] = []
    live: list[int] = []
    struck: set[int] = set()

    def lose() -> None:
        root = nodes[0].all_processes["raylet"][0].process.pid
        struck.update(process_table.descendants(process_table.table(), {root}), {root})
        for pid in struck:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal_number)

    def policy(contexts: Sequence[Context]) -> list[Action]:
        times.append(time.perf_counter())
        live.append(len(contexts))
        if len(times) == _AT:
            lose()
        return [Action(str(context.rng.choice(context.info["admissible_commands"]))) for context in contexts]

    try:
        options: dict[str, Any] = {"timeout": TIMEOUT, "reset_timeout": 60.0, "max_episode_steps": _STEPS}
        with _Counted(ALFWORLD, 4, **options) as envs:
            envs.events = []
            while len(there := envs._running()) < 4 or len({envs._worker(place).node for place in there}) < 2:
                time.sleep(0.1)  # on a busy machine all may begin on one node, from which half of them move
            rollout(envs, policy, ForkAt([4], width=2), tasks=[0] * paths, seed=(0,), retries=5)
            events = envs.events
        gaps = np.diff(times).tolist()
        usual = statistics.median(gap for at, gap in enumerate(gaps) if at != _AT - 1)
        failures = [event for event in events if isinstance(event, Failure)]
        recoveries = [event for event in events if isinstance(event, Recovery)]
        return Loss(
            gaps[_AT - 1] - usual,
            live[_AT - 1],
            len(failures),
            Counter(event.kind for event in recoveries),
            sum(event.actions for event in recoveries),
            sum(event.dropped for event in failures),
        )
    finally:
        for pid in struck:
            with contextlib.suppress(ProcessLookupError):  # what the fleet or the kernel ended
                os.kill(pid, signal.SIGKILL)
        ray.shutdown()  # type: ignore[no-untyped-call]
        cluster.shutdown()  # type: ignore[no-untyped-call]


def losses(paths: int, repeats: int) -> None:
    """Print a row for each way to lose a node."""
    print(f"\nOne of two nodes is lost in the middle of a rollout of ALFWorld; a step has {TIMEOUT:g} s\n")
    print("| node | paths | of them lost | continued | actions repeated | dropped | s until all go on |")
    print("|---|---|---|---|---|---|---|")
    logging.getLogger("sandboxgym").setLevel(logging.ERROR)  # a line for each path that is lost and recovered
    for name, number in WAYS:
        found = [measured(number, paths) for _ in range(repeats)]
        last = found[-1]
        how = ", ".join(f"{kind} {count}" for kind, count in sorted(last.recovered.items()))
        seconds = sorted(loss.seconds for loss in found)
        print(
            f"| {name} | {last.paths} | {last.lost} | {how} | {last.repeated} | {last.dropped} "
            f"| {seconds[0]:.1f} to {seconds[-1]:.1f} |",
            flush=True,
        )
