"""Reports of a fleet's owners and workers on themselves, as far as they need no cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import gymnasium as gym
import pytest
import worker_envs
from components import missing

from sandboxgym.cli import main
from sandboxgym.cli.fleet import lines_of
from sandboxgym.workers import meters
from sandboxgym.workers.env_host import Host, HostCounts
from sandboxgym.workers.fleet_status import FleetNode, FleetStatus, Owner, Usage
from sandboxgym.workers.kept import KeptLease

worker_envs.register()
PAGE = Path(__file__).parents[2] / "docs" / "fleet.md"
OWNER = Owner(
    "host:1", "toys/Dice-v0", 5.0, 60.0, 1, 2, {"aa" * 16: Usage(2, 8, 4, 3, 4096)}, 9, 100, 12.5, 2048,
    {"WorkerDied": 3}, {"snapshot": 2, "fork": 1}, 1,
)  # fmt: skip


def test_a_report_is_read_as_it_was_written() -> None:
    assert Owner.from_json(OWNER.to_json()) == OWNER


def test_a_report_of_a_later_version_is_read_without_what_is_new() -> None:
    row = json.loads(OWNER.to_json())
    row["invented"] = row["nodes"]["aa" * 16]["invented"] = 1
    assert Owner.from_json(json.dumps(row).encode()) == OWNER


def test_the_state_as_text_has_every_node_and_owner() -> None:
    usage = OWNER.nodes["aa" * 16]
    nodes = [
        FleetNode("bb" * 16, "10.0.0.1", True, True, 8.0, 16_000_000_000, {}, Usage()),
        FleetNode("aa" * 16, "10.0.0.2", False, True, 4.0, 10**9, {"sandbox": 8.0}, usage),
        FleetNode("cc" * 16, "10.0.0.3", False, False, 0.0, 0, {}, Usage()),
    ]
    status = FleetStatus(nodes, [OWNER])
    assert status.usage == usage
    assert "\n".join(line.rstrip() for line in lines_of(status)) == (
        "nodes alive: 2 (1 gone), owners: 1, environments: 8, steps/s: 12.5\n\n"
        "node      address   state  cores  memory   workers  environments  in use  snapshots  bytes\n"
        "bbbbbbbb  10.0.0.1  head   8      16.0 GB  0        0             0       0          0 B\n"
        "aaaaaaaa  10.0.0.2  alive  4      1.0 GB   2        8             4       3          4.1 kB\n"
        "cccccccc  10.0.0.3  gone   0      0 B      0        0             0       0          0 B\n\n"
        "owner   environment   workers  starting  replaced  created  steps  steps/s  to store\n"
        "host:1  toys/Dice-v0  2        1         2         9        100    12.5     2.0 kB\n\n"
        "host:1: failures: WorkerDied 3; recoveries: fork 1, snapshot 2; paths dropped: 1"
    )
    assert list(lines_of(FleetStatus(nodes, [])))[-1].strip() == "no owner of environments reports to this cluster"


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host(keep=2, ships=True)
    yield made
    made.close_all()


def test_a_worker_counts_what_it_does_and_holds(host: Host) -> None:
    host.make(1, lambda: gym.make("toys/Dice-v0"))
    host.reset(1, 0, None)
    one, _, _ = (host.snapshot(1), host.step(1, 1), host.step(1, 1))
    host.restore(1, one, None)
    host.fork(1, [2, 3], None, None)
    done = host.execute(3, (0, None), None, None, None, True, (1,))
    counts = host.counts()
    assert counts == HostCounts(3, 2, 1, 2, 3, 0, 3, 2, len(one.data or b"") + len(done.shipped.data))  # type: ignore
    host.snapshot(1)
    host.snapshot(2)
    host.close(2)
    assert host.counts()[-3:-1] == (2, 2) and host.counts().snapshots == 4
    assert counts.ended().plus(counts) == HostCounts(6, 4, 2, 4, 6, 0, *counts[-3:])


def test_a_worker_with_a_store_counts_the_snapshots_it_keeps(host: Host, tmp_path: Path) -> None:
    lease = KeptLease(tmp_path, every=10**6, bandwidth=None)
    try:
        host.make(1, lambda: gym.make("toys/Dice-v0"), lease.keeping)
        host.reset(1, 0, None)
        key = host.snapshot(1).key
        host.store_now(1, key)
        kept = host.counts()
        assert kept.kept == 1 and kept.kept_bytes > 0 and kept.written > 0
        host.snapshot(1, False, None, [key])
        after = host.counts()
        assert (after.kept, after.written) == (1, kept.written) and after.kept_bytes == 0
    finally:
        lease.close()


def test_the_page_names_every_metric_as_it_is_exported() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name, _ in [*meters.COUNTERS.values(), *meters.EVENTS.values()]:
        assert f"`ray_{name}_total`" in text
    for name, _ in [*meters.GAUGES.values(), meters.SECONDS]:
        assert f"`ray_{name}`" in text


def test_a_cluster_that_is_not_there_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        import ray
    except ModuleNotFoundError:
        missing("ray", "Ray is not installed")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    assert main(["fleet", "status", "--address", "127.0.0.1:1"]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("sandboxgym fleet: expected a Ray cluster at 127.0.0.1:1 (")
    assert printed.err.count("\n") == 1 and not printed.out


@pytest.mark.parametrize("watch", ["0", "-1", "nan", "soon"])
def test_a_period_that_is_none_is_a_usage_error(capsys: pytest.CaptureFixture[str], watch: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["fleet", "status", "--watch", watch])
    assert "--watch" in capsys.readouterr().err
