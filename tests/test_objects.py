"""Snapshots on two nodes of a cluster each: what is lost, copied and ended, with keepers in this process."""

from __future__ import annotations

import pytest
from keepers import Cluster, pretended
from stored_envs import Notebook, three_pages

from sandboxgym.errors import SnapshotMissing, StoreFull
from sandboxgym.workers.env_host import FleetError
from sandboxgym.workers.nodes import objects
from sandboxgym.workers.nodes.objects import COPIES, RayObjects, ranked
from sandboxgym.workers.store import SnapshotStore


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return pretended(monkeypatch)


def holders(cluster: Cluster, name: str) -> set[str]:
    return {key.rpartition("/")[2] for key, handle in cluster.keepers.items() if handle.keeper.find(name)}


@pytest.fixture
def env() -> Notebook:
    return three_pages()


def test_a_snapshot_survives_the_loss_of_any_one_node_and_of_the_next_after_a_look(
    cluster: Cluster, env: Notebook
) -> None:
    store = SnapshotStore("ray-objects://run")
    lease = store.lease("owner")
    snap = env.snapshot()
    key = store.put(snap, lease=lease, name="last").key
    names = [found.name for folder in ("blobs", "snapshots", "names", "leases") for found in store._blobs.list(folder)]
    assert len(names) > 3 and all(len(holders(cluster, name)) == COPIES for name in names)
    other = SnapshotStore("ray-objects://run")
    for lost in ("b", "a"):
        cluster.lose(lost)
        assert other.existing_lease("owner").named("last") == key
        assert other.get(key).to_bytes() == snap.to_bytes()
        cluster.alive |= {"d"}
        cluster.look()
        assert all(holders(cluster, name) == {"c", "d"} for name in names) or lost == "b"
        assert all(len(holders(cluster, name)) == COPIES for name in names)


def test_what_both_nodes_had_is_missing_and_written_again_by_the_next_that_needs_it(
    cluster: Cluster, env: Notebook
) -> None:
    store = SnapshotStore("ray-objects://run")
    snap = env.snapshot()
    key = store.put(snap).key
    for node in sorted(holders(cluster, f"snapshots/{key}")):
        cluster.lose(node)
    with pytest.raises(SnapshotMissing, match="ray-objects://run has no snapshot"):
        store.get(key)
    assert store.put(snap).key == key
    assert store.get(key).to_bytes() == snap.to_bytes()


def test_a_node_that_joins_or_is_drained_gets_and_gives_its_share(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = RayObjects("run")
    data = {f"blobs/{number}": bytes(number) for number in range(0, 300, 10)}
    assert blobs.write(data.items()) == sum(map(len, data.values()))
    cluster.alive.add("d")
    for handle in list(cluster.keepers.values()):
        handle.keeper.look()
    found = {name: holders(cluster, name) for name in data}
    assert all(found[name] == set(ranked(name, "abcd")[:COPIES]) for name in data)
    assert any("d" in nodes for nodes in found.values())
    monkeypatch.setattr(objects, "draining", lambda: {"a"})
    cluster.look()
    assert all("a" not in holders(cluster, name) and len(holders(cluster, name)) == COPIES for name in data)
    assert {name: RayObjects("run").read(name) for name in data} == data
    assert {found.name for found in blobs.list("blobs")} == set(data)


def test_a_frozen_node_is_left_alone_and_another_has_the_copy(cluster: Cluster) -> None:
    name = "blobs/x"
    first, second, third = ranked(name, "abc")
    RayObjects("run").write([(name, b"1"), ("blobs/y", b"2"), ("blobs/z", b"3")])
    cluster.frozen = {first}
    blobs = RayObjects("run")
    assert blobs.read(name) == b"1" and first not in blobs.nodes()
    blobs.write([(name, b"1")])
    assert holders(cluster, name) == {first, second, third}
    cluster.frozen = {"a", "b", "c"}
    with pytest.raises(FleetError, match="expected a node of the cluster that takes snapshots for ray-objects://run"):
        blobs.write([(name, b"1")])


def test_keepers_end_with_the_last_lease(cluster: Cluster, env: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SnapshotStore("ray-objects://run")
    one, other = store.lease("one"), store.lease("other")
    store.put(env.snapshot(), lease=one)
    one.release()
    store.close()
    assert cluster.keepers
    monkeypatch.setattr(objects, "_IDLE", -1.0)
    cluster.look()
    assert cluster.keepers  # some of them have no lease, but ask the others
    other.release()
    store.close()
    assert not cluster.keepers
    abandoned = store.lease("abandoned", seconds=-1.0)
    assert not abandoned.live and cluster.keepers
    cluster.look()
    cluster.look()
    assert not cluster.keepers


def test_a_node_without_room_is_told(cluster: Cluster, env: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SnapshotStore("ray-objects://run")

    def full(_: bytes) -> None:
        raise cluster.exceptions.OutOfDiskError("the local disk is full\nsee there")

    monkeypatch.setattr(cluster, "put", full)
    with pytest.raises(StoreFull, match=r"ray-objects://run has no room for a snapshot on node [abc]: OutOfDiskError"):
        store._blobs.write([("blobs/x", bytes(1000))])


def test_a_collection_deletes_what_no_lease_holds(cluster: Cluster, env: Notebook) -> None:
    store = SnapshotStore("ray-objects://run")
    lease = store.lease("owner")
    key = store.put(env.snapshot(), lease=lease).key
    assert store.collect(grace=0.0).snapshots == 0 and key in store
    lease.release()
    assert store.collect(grace=-1.0).snapshots == 1 and key not in store


def test_a_place_that_cannot_be_is_told(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="expected ray-objects://NAME"):
        SnapshotStore("ray-objects://a/b")
    monkeypatch.setattr(cluster, "is_initialized", lambda: False)
    with pytest.raises(FleetError, match="expected a process that is connected to a Ray cluster"):
        SnapshotStore("ray-objects://run")


def test_keepers_that_ended_are_replaced_by_the_next_write(
    cluster: Cluster, env: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes are not at fault: idle keepers end, and an owner that closes ends those of one that has just opened."""
    store, other = SnapshotStore("ray-objects://run"), SnapshotStore("ray-objects://run")
    snap = env.snapshot()
    store.put(snap, lease=store.lease("one"))
    for ended in ("idle", "closed", "killed"):
        if ended == "idle":
            store.existing_lease("one").release()
            with monkeypatch.context() as patch:
                patch.setattr(objects, "_IDLE", -1.0)
                cluster.look()
        elif ended == "closed":
            store.existing_lease("one").release()
            other.close()
        else:
            cluster.keepers.clear()
        assert not cluster.keepers
        key = store.put(snap, lease=store.lease("one")).key
        names = [found.name for folder in ("blobs", "snapshots", "leases") for found in store._blobs.list(folder)]
        assert len(names) > 3 and all(len(holders(cluster, name)) == COPIES for name in names)
        assert other.get(key).to_bytes() == snap.to_bytes()


def test_a_node_that_takes_nothing_keeps_no_copies_from_the_others(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = RayObjects("run")
    names = [f"blobs/{number}" for number in range(40)]
    blobs.write([(name, b"1") for name in names])
    cluster.look()
    cluster.lose("c")
    cluster.alive |= {"d"}
    cluster.frozen = {"a"}
    for _ in range(2):
        cluster.keepers["run/b"].keeper.look()
    assert all("d" in holders(cluster, name) for name in names if "b" in holders(cluster, name))
    assert {"b", "d"} <= {node for name in names for node in holders(cluster, name)}


def test_a_keeper_that_ends_without_its_node_is_noticed(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    RayObjects("run").write([("blobs/x", b"1")])
    cluster.look()
    for node in ranked("blobs/x", "abc")[:COPIES]:
        del cluster.keepers[f"run/{node}"]
        monkeypatch.setattr(objects, "_CHECK", -1.0)
        cluster.look()
        assert len(holders(cluster, "blobs/x")) == COPIES


def test_drained_nodes_are_read_until_others_have_what_they_had(
    cluster: Cluster, env: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SnapshotStore("ray-objects://run")
    lease = store.lease("owner")
    key = store.put(env.snapshot(), lease=lease).key
    monkeypatch.setattr(objects, "draining", lambda: holders(cluster, "leases/owner/until"))
    assert lease.live and store.collect(grace=-1.0).snapshots == 0
    monkeypatch.setattr(objects, "draining", lambda: holders(cluster, f"snapshots/{key}"))
    assert store.get(key).digest == env.snapshot().digest


def test_nothing_is_deleted_nor_ended_while_a_node_does_not_answer(cluster: Cluster, env: Notebook) -> None:
    """The leases that it has would be taken for ended, and the pieces of its lists for needless."""
    store, other = SnapshotStore("ray-objects://run"), SnapshotStore("ray-objects://run")
    key = store.put(env.snapshot(), lease=store.lease("owner")).key
    cluster.frozen = holders(cluster, "leases/owner/until")
    for _ in range(2):
        with pytest.raises(FleetError, match="answer"):
            other.collect(grace=-1.0)
    other.close()
    cluster.frozen = set()
    assert store.existing_lease("owner").live and store.get(key).digest == env.snapshot().digest
    assert other.collect(grace=-1.0).snapshots == 0


def test_a_copy_replaces_nothing_that_was_written_meanwhile(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs, name = RayObjects("run"), "names/owner/last"
    first, *_ = ranked(name, "abc")
    blobs.write([(name, b"old")])
    lost = ranked(name, "abc")[1]
    cluster.lose(lost)
    read = objects._Keeper.read

    def reading(keeper: objects._Keeper, of: str) -> bytes | None:
        data = read(keeper, of)
        monkeypatch.setattr(objects._Keeper, "read", read)
        RayObjects("run").write([(name, b"new")])
        return data

    monkeypatch.setattr(objects._Keeper, "read", reading)
    cluster.keepers[f"run/{first}"].keeper.look()
    found = [cluster.keepers[f"run/{node}"].keeper.read(name) for node in holders(cluster, name)]
    assert found == [b"new"] * COPIES


def test_an_object_store_that_is_full_here_is_told(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = RayObjects("run")
    get = cluster.get

    def full(answer: object, timeout: float | None = None) -> object:
        if timeout is not None and timeout > 9.0 and answer == "":
            raise cluster.exceptions.ObjectStoreFullError("no room")
        return get(answer, timeout)

    monkeypatch.setattr(cluster, "get", full)
    with pytest.raises(StoreFull, match="ObjectStoreFullError"):
        blobs.write([("blobs/x", b"1")])


def test_a_frozen_node_deletes_what_was_deleted_meanwhile_when_it_goes_on(cluster: Cluster, env: Notebook) -> None:
    store = SnapshotStore("ray-objects://run")
    lease = store.lease("owner")
    store.put(env.snapshot(), lease=lease, name="last")
    cluster.frozen = {sorted(holders(cluster, "leases/owner/until"))[0]}
    with pytest.raises(FleetError, match="answer"):
        store.collect(grace=-1.0)
    lease.release()
    cluster.thaw()
    names = {name for handle in cluster.keepers.values() for name in handle.keeper._held}
    assert len(names) > 2 and not [name for name in names if name.startswith(("leases/", "names/"))]


def test_bytes_that_ray_lost_are_copied_back(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs, names = RayObjects("run"), [f"blobs/{number}" for number in range(9)]
    blobs.write([(name, bytes(1000)) for name in names])
    cluster.look()
    lost = {id(held[0]) for held in cluster.keepers["run/a"].keeper._held.values()}
    get = cluster.get

    def getting(answer: object, timeout: float | None = None) -> object:
        if id(answer) in lost:
            raise cluster.exceptions.ObjectLostError("00", None, "")
        return get(answer, timeout)

    monkeypatch.setattr(cluster, "get", getting)
    monkeypatch.setattr(objects, "_CHECK", -1.0)
    assert lost and all(blobs.read(name) == bytes(1000) for name in names)
    for _ in range(2):
        cluster.look()
    lost.clear()
    assert all(len(holders(cluster, name)) == COPIES for name in names)
    assert all(handle.keeper.read(name) for handle in cluster.keepers.values() for name in handle.keeper._held)
