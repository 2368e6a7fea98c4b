"""Placement of workers on nodes, and limits of what a node holds; without a cluster."""

from __future__ import annotations

from typing import Any

import pytest

from sandboxgym.workers.fleet_status import Usage
from sandboxgym.workers.nodes.limits import FleetFull, Gate, Limits
from sandboxgym.workers.nodes.placement import eligible, moves


def node(name: str, *, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeID": name, "Alive": alive, "Resources": resources}


def test_a_node_can_hold_a_worker_if_it_lives_stays_and_has_all_it_needs() -> None:
    nodes = [node("a", CPU=4.0, env=1.0), node("b", CPU=4.0), node("c", CPU=4.0, env=1.0, alive=False)]
    nodes += [node("d", CPU=4.0, env=1.0), node("e", CPU=0.0, env=1.0)]
    assert eligible(nodes, {"CPU": 0.1, "env": 0.5}, ["d"]) == ["a"]


@pytest.mark.parametrize(
    ("workers", "nodes", "expected"),
    [
        ({"a": [0, 1], "b": [2, 3]}, ["a", "b"], []),
        ({"a": [0, 1], "b": [2, 3]}, ["a", "b", "c"], [(0, "c")]),
        ({"a": [3, 1, 0, 2]}, ["a", "b"], [(3, "b"), (1, "b")]),
        ({"a": [0], "b": [1]}, ["a", "b", "c"], []),  # fewer workers than nodes: nobody moves
        ({"a": [0, 1, 2]}, ["a", "b"], [(0, "b")]),
        ({"a": [0]}, [], []),
    ],
)
def test_nodes_that_join_get_their_share_of_the_workers_and_nothing_else_moves(
    workers: dict[str, list[int]], nodes: list[str], expected: list[tuple[int, str]]
) -> None:
    assert moves(workers, nodes) == expected


class Time:
    """A clock that only sleeping advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def gate_of(limits: Limits, usage: dict[str, Usage], time: Time, deadline: float | None = 5.0) -> Gate:
    return Gate(limits, lambda: usage, deadline=deadline, clock=time.clock, sleep=time.sleep)


def test_an_environment_goes_where_there_is_room_or_an_idle_one() -> None:
    usage = {"a": Usage(environments=3), "b": Usage(environments=2), "c": Usage(environments=9, snapshot_bytes=10)}
    gate = gate_of(Limits(environments=3, snapshot_bytes=10), usage, Time())
    assert gate.admitted(lambda: [(0, "a", False), (1, "b", False), (2, "c", True)]) == [1, 2]
    assert "keeps 10 of 10 bytes" in gate.refusal("d", {"d": Usage(snapshot_bytes=10)})


def test_a_caller_waits_until_there_is_room_and_the_log_says_for_what(caplog: pytest.LogCaptureFixture) -> None:
    usage, time = {"a": Usage(environments=2)}, Time()
    gate = gate_of(Limits(environments=2), usage, time)

    def places() -> list[tuple[int, str, bool]]:
        if time.now > 2.0:
            usage["a"] = Usage(environments=1)
        return [(0, "a", False)]

    assert gate.admitted(places) == [0] and 2.0 < gate.waited < 2.2
    assert [record.message for record in caplog.records] == [
        "an environment waits for room: node a has 2 of 2 environments"
    ]


def test_after_the_deadline_there_is_an_error_that_names_the_limit() -> None:
    gate = gate_of(Limits(environments=2), {"a": Usage(environments=2)}, Time())
    with pytest.raises(FleetFull, match=r"within 5 s, found none: node a has 2 of 2 environments\. Raise the limits"):
        gate.admitted(lambda: [(0, "a", False)])


def test_environments_are_made_at_the_rate_of_the_limit() -> None:
    time = Time()
    gate, made = gate_of(Limits(creations_per_second=4.0), {}, time), []
    for _ in range(20):
        assert gate.admitted(lambda: [(0, "a", False)]) == [0]
        gate.created("a")
        made.append(time.now)
    assert made[3] == 0.0  # a second's worth at once
    assert all(sum(start <= at < start + 1.0 for at in made) <= 8 for start in made)
    assert 3.8 < made[-1] < 4.5
    assert not gate.refusal("b", {})


@pytest.mark.parametrize("name", ["creations_per_second", "environments", "snapshot_bytes"])
def test_a_limit_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"expected {name} to be above 0, or None, found 0"):
        Limits(**{name: 0})
