"""A Ray cluster in place of Ray, for what keeps snapshots on its nodes: the keepers are in this process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from components import missing

from sandboxgym.workers.nodes import objects


class Cluster:
    """Nodes with keepers, in place of Ray."""

    def __init__(self, exceptions: Any) -> None:
        self.exceptions = exceptions
        self.alive = {"a", "b", "c"}
        self.keepers: dict[str, Handle] = {}
        self.frozen: set[str] = set()
        self.queued: list[Callable[[], Any]] = []
        """Calls to keepers of nodes that are frozen."""

    def is_initialized(self) -> bool:
        return True

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": name, "Alive": name in self.alive} for name in ("a", "b", "c", "d")]

    def get_actor(self, name: str, namespace: str) -> Handle:
        if name not in self.keepers:
            raise ValueError(f"there is no actor {name}")
        return self.keepers[name]

    def remote(self, kind: Any) -> Any:
        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=lambda *a: self.made(kind, options, a)))

    def made(self, kind: Any, options: dict[str, Any], arguments: Any) -> Handle:
        name = options["name"]
        assert (options["lifetime"], options["get_if_exists"], options["num_cpus"]) == ("detached", True, 0)
        assert options["scheduling_strategy"].node_id == name.rpartition("/")[2]
        if name not in self.keepers:
            self.keepers[name] = Handle(self, name)
            self.keepers[name].keeper = kind(*arguments)
        return self.keepers[name]

    def get(self, answer: Any, timeout: float | None = None) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer.data if isinstance(answer, SimpleNamespace) else answer

    def put(self, data: bytes) -> Any:
        return SimpleNamespace(data=data)

    def kill(self, handle: Handle) -> None:
        self.keepers.pop(handle.name, None)

    def lose(self, node: str) -> None:
        self.alive.discard(node)
        self.keepers = {name: handle for name, handle in self.keepers.items() if not name.endswith(f"/{node}")}

    def thaw(self) -> None:
        """Let nodes go on, which begin with what they were asked meanwhile."""
        self.frozen, calls, self.queued = set(), self.queued, []
        for call in calls:
            call()

    def look(self) -> None:
        for handle in list(self.keepers.values()):
            handle.keeper.look()


class Handle:
    """A keeper as others see it."""

    keeper: Any

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster, self.name = cluster, name

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: Any) -> Any:
            errors = self.cluster.exceptions
            if self.name.rpartition("/")[2] in self.cluster.frozen:
                self.cluster.queued.append(partial(getattr(self.keeper, method), *arguments))
                return errors.GetTimeoutError("it took too long")
            if self.cluster.keepers.get(self.name) is not self:
                return errors.RayActorError()
            return getattr(self.keeper, method)(*arguments)

        return SimpleNamespace(remote=remote)


def pretended(patch: pytest.MonkeyPatch) -> Cluster:
    """Let stores on a cluster find this one, whose keepers look at its nodes when they are told to."""
    if objects.ray is None:
        missing("ray", "Ray is not installed")
    made = Cluster(objects.ray.exceptions)
    patch.setattr(objects, "ray", made)
    patch.setattr(objects, "draining", set)
    strategy = "ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy"
    patch.setattr(strategy, lambda node, soft: SimpleNamespace(node_id=node))
    patch.setattr(objects, "_PERIOD", 0.0)
    patch.setattr(objects, "_SMALL", 100)
    patch.setattr(objects._Keeper, "_tend", lambda self: None)
    return made
