"""Fleets whose nodes are drained, join or fail: with workers in this process and a pretended cluster."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from components import missing
from worker_envs import Trouble

from sandboxgym.sandbox.base import SandboxUnavailable
from sandboxgym.tree import Action, Envs, Failure, ForkAt, rollout
from sandboxgym.workers import fleet, fleet_status
from sandboxgym.workers.env_host import CallOutcome, FleetError, HostCounts
from sandboxgym.workers.fleet import RayEnvs
from sandboxgym.workers.fleet_status import Owner, Reporter, Usage
from sandboxgym.workers.nodes.worker import RayWorker
from sandboxgym.workers.remote import RemoteEnv, WorkerSlots
from sandboxgym.workers.worker import InlineWorker
from sandboxgym.wrappers.jobs import EnvJob


class Cluster:
    """Nodes with room for some workers each, in place of Ray."""

    def __init__(self) -> None:
        self.room = {"a": 9}
        self.labels: dict[str, dict[str, str]] = {}
        self.draining: set[str] = set()
        self.workers: list[Pretended] = []
        self.here: str | None = None
        """Node of the worker whose call is under way."""

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": name, "Alive": True, "Resources": {"CPU": 4.0}, "Labels": self.labels.get(name, {})}
            for name in self.room
        ]

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 4.0}

    def place(self, worker: Pretended) -> str | None:
        """The wished-for node, else the emptiest, of those with room."""
        used = [other.node for other in self.workers if other.alive]
        free = {name: used.count(name) for name, room in self.room.items() if used.count(name) < room}
        free = {name: count for name, count in free.items() if name not in worker.avoided}
        return worker.wanted if worker.wanted in free else min(free, key=free.__getitem__, default=None)


CLUSTER = Cluster()


class Pretended(InlineWorker):
    """A worker in this process, on a pretended node."""

    unfit = ""
    address = "here"

    def __init__(self, *, node: str | None = None, avoid: Any = tuple, **_: Any) -> None:
        super().__init__()
        self.wanted, self._avoid = node, avoid
        self.node: str | None = None
        self.asked = False
        self.counts = HostCounts()
        CLUSTER.workers.append(self)

    @property
    def alive(self) -> bool:
        return self.asked

    @property
    def ready(self) -> bool:
        if self.asked and self.node is None:
            self.node = CLUSTER.place(self)
        return self.asked and self.node is not None

    def restart(self) -> None:
        self.start()

    def kill(self) -> None:
        super().kill()
        self.asked, self.node = False, None

    def _take(self, timeout: float | None) -> CallOutcome:
        CLUSTER.here = self.node
        return super()._take(timeout)

    def _start(self) -> None:
        super()._start()
        self.asked, self.avoided = True, set(self._avoid())


class Silent:
    """A reporter that does not."""

    key = ""

    def close(self) -> None: ...


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    CLUSTER.__init__()  # type: ignore[misc]
    monkeypatch.setattr(fleet, "ray", CLUSTER)
    monkeypatch.setattr(fleet, "RayWorker", Pretended)
    monkeypatch.setattr(fleet, "connect", lambda address=None: None)
    monkeypatch.setattr(fleet, "draining", lambda: set(CLUSTER.draining))
    monkeypatch.setattr(fleet, "reporter_of", lambda *_: Silent())
    yield CLUSTER
    for worker in CLUSTER.workers:
        worker.kill()


def places(cluster: Cluster) -> list[str | None]:
    return sorted((worker.node for worker in cluster.workers if worker.ready), key=str)


def test_a_fleet_whose_only_node_was_drained_serves_again_once_that_is_undone(cluster: Cluster) -> None:
    with RayEnvs(Trouble, 2, create_timeout=0.0) as envs:
        envs.give(envs.take())
        cluster.draining = {"a"}
        envs.tend()
        with pytest.raises(FleetError, match="expected one of 4 workers to run"):
            envs.take()
        cluster.draining = set()
        envs.tend()
        assert envs.take()
        assert places(cluster) == ["a", "a"] and sum(worker.alive for worker in cluster.workers) == 2


def test_a_new_owner_puts_nothing_on_a_node_that_is_drained(cluster: Cluster) -> None:
    cluster.room, cluster.draining = {"a": 9, "b": 9}, {"a"}
    with RayEnvs(Trouble, 2):
        assert places(cluster) == ["b", "b"]


def test_a_worker_that_is_asked_for_anew_keeps_away_from_its_node_if_that_is_drained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if fleet.ray is None:
        missing("ray", "Ray is not installed")
    asked: list[dict[str, Any]] = []

    class Remote:
        def remote(self, *_: Any) -> Remote:
            return self

        ready = property(lambda self: self)

        def options(self, **options: Any) -> Remote:
            asked.append(options)
            return self

    monkeypatch.setattr(fleet, "connect", lambda: None)
    monkeypatch.setattr(fleet.ray, "remote", lambda _: Remote())
    left: set[str] = set()
    worker = RayWorker(node="a" * 56, avoid=lambda: left)
    worker._start()
    left.add("a" * 56)
    worker._start()
    assert asked[0]["scheduling_strategy"].node_id == "a" * 56
    assert (asked[1]["scheduling_strategy"], asked[1]["label_selector"]) == (
        "SPREAD",
        {"ray.io/node-id": f"!in({'a' * 56})"},
    )


def test_workers_stay_on_the_nodes_that_are_preferred(cluster: Cluster) -> None:
    cluster.room = {"a": 9, "b": 9}
    with RayEnvs(Trouble, 4, prefer={"a": 5.0, "b": 1.0}) as envs:
        assert places(cluster) == ["a"] * 4
        envs.tend()
        assert not envs._leaving and len(cluster.workers) == 4


def test_a_node_that_joined_without_room_or_label_is_not_tried_all_the_time(cluster: Cluster) -> None:
    with RayEnvs(Trouble, 2, labels={"images": "in(swebench, small)"}) as envs:
        cluster.labels["a"] = {"images": "small"}
        assert places(cluster) == ["a", "a"]
        cluster.room["b"] = 9
        envs.tend()
        assert len(cluster.workers) == 2  # it has not the label
        cluster.labels["b"], cluster.room["b"] = {"images": "swebench"}, 0
        for _ in range(5):
            places(cluster)
            envs.tend()
        assert len(cluster.workers) == 3 and places(cluster) == ["a", "a"]


def test_an_environment_that_cannot_be_made_on_another_node_stays_and_steps_once(cluster: Cluster) -> None:
    cluster.room = {"a": 9, "b": 9}
    lacking: set[str | None] = set()

    class Here(Trouble):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

        def restore(self, snap: Any, *, seed: int | None = None) -> Any:
            if lacking:
                raise SandboxUnavailable("there is no image on this node")
            return super().restore(snap, seed=seed)

        def close(self) -> None:
            closed.append(self)

    made: list[Any] = []
    closed: list[Any] = []
    with RayEnvs(Here, 2) as envs:
        env = envs.take()
        env.reset(seed=0)
        assert isinstance(env, RemoteEnv)
        first: Any = env.worker
        cluster.draining, lacking = {first.node}, {"b"}
        envs.tend()
        results = envs.execute_all([EnvJob(env, step=("x",))])
        assert [result.stepped[0] for result in results if not isinstance(result, Exception)] == ["x 2"]
        assert env.worker is first and closed == made[1:] and len(made) == 2
        lacking = set()
        results = envs.execute_all([EnvJob(env, step=("y",))])
        assert [result.stepped[0] for result in results if not isinstance(result, Exception)] == ["y 3"]
        assert env.worker is not first and envs.moved == 1 and closed == made[1:2] + made[:1]


def test_a_worker_whose_snapshots_cannot_be_stored_ends_all_the_same(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.room = {"a": 9, "b": 9}
    with RayEnvs(Trouble, 2) as envs:
        assert len(places(cluster)) == 2
        for worker in cluster.workers:
            worker.keeping = object()  # type: ignore[assignment]

        def fails(*_: Any, **__: Any) -> None:
            raise OSError("the store is away")

        first = next(worker for worker in cluster.workers if worker.node == "a")
        first.call = fails  # type: ignore[method-assign]
        cluster.draining = {"a"}
        envs.tend()
        assert not first.alive and "the store is away" in caplog.text
        assert places(cluster) == ["b", "b"]


def test_a_fleet_that_is_being_closed_asks_for_no_worker(cluster: Cluster) -> None:
    class Late(Trouble):
        def close(self) -> None:
            cluster.draining = {"a"}
            envs.tend()

    envs = RayEnvs(Late, 2)
    envs.give(envs.take())
    envs.close()
    assert len(cluster.workers) == 2 and not any(worker.alive for worker in cluster.workers)


def test_an_owner_reports_while_it_looks_at_its_nodes_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, looks, rows = threading.Event(), threading.Event(), threading.Semaphore(0)

    class Table:
        def _internal_kv_put(self, *_: Any, **__: Any) -> None:
            rows.release()

        def _internal_kv_del(self, *_: Any, **__: Any) -> None: ...

    class Ray:
        def is_initialized(self) -> bool:
            return True

    class Envs:
        def tend(self) -> None:
            looks.set()
            goes_on.wait(60.0)

        def measured(self) -> tuple[Owner, HostCounts]:
            return Owner("", "", 0.0, 0.0, nodes={"a": Usage(workers=1)}), HostCounts()

    monkeypatch.setattr(fleet_status, "internal_kv", Table())
    monkeypatch.setattr(fleet_status, "ray", Ray())
    monkeypatch.setattr(fleet_status, "PERIOD", 0.01)
    envs = Envs()
    reporter: Reporter = fleet_status.reporter_of(envs, "x")
    try:
        assert looks.wait(60.0)
        assert all(rows.acquire(timeout=60.0) for _ in range(3))
    finally:
        goes_on.set()
        reporter.close()


def test_a_report_that_cannot_be_read_ends_no_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    class Table:
        def _internal_kv_list(self, *_: Any, **__: Any) -> list[bytes]:
            return [b"fleet/a", b"fleet/b"]

        def _internal_kv_get(self, key: bytes, **__: Any) -> bytes:
            return b"[]" if key == b"fleet/a" else b"{"

    monkeypatch.setattr(fleet_status, "internal_kv", Table())
    assert fleet_status.reports() == []


def test_an_environment_that_fails_to_move_is_as_it_was(cluster: Cluster) -> None:
    first, second = (WorkerSlots(InlineWorker(), keep_on=True) for _ in range(2))
    env = RemoteEnv(Trouble, shared=first)
    env.reset(seed=0)
    env.action_space.seed(3)
    env.snapshot()
    spaces, slots = env.action_space, set(second.slots)

    def fails(*_: Any, **__: Any) -> None:
        raise OSError("away")

    second.worker.restore = fails  # type: ignore[method-assign]
    with pytest.raises(OSError, match="away"):
        env.move_to(second)
    assert env.action_space is spaces and env.worker is first.worker and second.slots == slots
    host = second.worker._host  # type: ignore[attr-defined]
    assert host.counts().environments == 0 and env.step("x")[0] == "x 2"
    for shared in (first, second):
        shared.worker.close()


def test_a_node_where_environments_cannot_begin_gets_no_more_of_them(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    class Begins(Trouble):
        def reset(self, **options: Any) -> Any:
            if cluster.here == "a":
                raise SandboxUnavailable("this kernel makes no sandboxes")
            return super().reset(**options)

    def grown(envs: Envs, failures: list[Failure]) -> Any:
        def policy(contexts: Any) -> Any:
            return [Action("end" if context.depth == 2 else "a") for context in contexts]

        trees = rollout(envs, policy, ForkAt([1], width=2), tasks=range(8), seed=(1,), retries=1, failures=failures)
        return [[(path.key, [edge.child.observation for edge in path.edges]) for path in tree.paths] for tree in trees]

    cluster.room = {"a": 9, "b": 9}
    failures: list[Failure] = []
    with RayEnvs(Begins, 4) as envs:
        assert places(cluster) == ["a", "a", "b", "b"]
        there = grown(envs, failures)
        assert places(cluster) == ["a", "a", "b", "b"]  # what is there may go on
        cluster.room = {"a": 9}
        for worker in cluster.workers:
            if worker.node == "b":
                worker.kill()
        assert envs.take()  # since there is no other
    assert failures and not any(failure.dropped for failure in failures)
    assert caplog.text.count("is passed over for 60 s: this kernel makes no sandboxes") == 1
    with Envs(Trouble) as here:
        assert there == grown(here, [])


def test_the_idle_environments_of_a_lost_worker_are_closed_once(cluster: Cluster) -> None:
    """By whoever holds the lock, also of those that leave its node at the same time."""
    alone: list[bool] = []

    class Watched(list[Any]):
        def __getitem__(self, place: Any) -> Any:
            alone.append(envs._moving._is_owned())  # type: ignore[attr-defined]
            return super().__getitem__(place)

    with RayEnvs(Trouble, 2) as envs:
        envs.give(envs.take())
        envs._free = Watched(envs._free)
        cluster.workers[0].kill()
        assert envs.take()
        assert alone and all(alone) and len(envs._made) == 1


class Table:
    """The table of a cluster's head in place of Ray's, and a clock that goes on only while it is waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: dict[bytes, bytes] = {}
        self.now = 1000.0
        self.lives: dict[bytes, float] = {}
        """Owners that report, each with how far its clock is ahead."""
        clock = SimpleNamespace(time=lambda: 5e8 + self.now, monotonic=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(fleet_status, "time", clock)
        monkeypatch.setattr(fleet_status, "internal_kv", self)
        monkeypatch.setattr(fleet_status, "_seen", {})
        self.report()

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.report()

    def report(self) -> None:
        for key, ahead in self.lives.items():
            self.rows[key] = Owner("", "", 5e8 + self.now + ahead, 0.0).to_json()

    def _internal_kv_list(self, prefix: str, **_: Any) -> list[bytes]:
        return [key for key in self.rows if key.startswith(prefix.encode())]

    def _internal_kv_get(self, key: bytes, **_: Any) -> bytes | None:
        return self.rows.get(key)

    def _internal_kv_put(self, key: str, row: bytes, **_: Any) -> None:
        self.rows[key.encode()] = row

    def _internal_kv_del(self, key: str, **_: Any) -> None:
        del self.rows[key.encode()]


def test_an_owner_whose_clock_differs_lives_until_it_reports_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(monkeypatch)
    table.lives = {b"fleet/ahead": 300.0, b"fleet/behind": -300.0, b"fleet/agrees": 0.0}
    table.report()
    before = table.now
    for _ in range(30):
        assert {key for key, _ in fleet_status.reports()} == {"fleet/ahead", "fleet/behind", "fleet/agrees"}
        table.sleep(1.0)
    assert table.now - before == 30 + 2 * fleet_status.PERIOD  # it waited once
    table.lives = {}
    assert len(fleet_status.reports()) == 3
    table.sleep(fleet_status.STALE + 1.0)
    assert not fleet_status.reports() and not table.rows
    table.rows[b"fleet/killed"] = Owner("", "", 5e8, 0.0).to_json()
    assert not fleet_status.reports() and not table.rows  # also for one who has never seen it


def test_the_mark_of_a_drained_node_goes_with_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(monkeypatch)
    nodes = [{"NodeID": name, "Alive": name != "gone"} for name in ("here", "gone", "other")]
    monkeypatch.setattr(fleet_status, "ray", SimpleNamespace(nodes=lambda: nodes))
    for name in ("here", "gone", "unknown"):
        fleet_status.drain(name)
    assert fleet_status.draining() == {"here"}
    assert list(table.rows) == [b"drain/here"]
