"""The two generic ways to snapshot any environment, which certificates are compared with."""

from __future__ import annotations

import pytest

from sandboxgym import Snapshot
from sandboxgym.conformance import check_snapshot
from sandboxgym.conformance.baselines import ReplaySnapshots, deep_copied

EXACT = ["restore.trace_equality", "restore.seeded", "restore.random_streams", "fork.seeded_independent"]


@pytest.mark.parametrize("make", [deep_copied, ReplaySnapshots])
def test_a_restored_episode_goes_on_with_the_same_draws(make):
    env = make("FrozenLake-v1")
    env.reset(seed=3)
    env.step(2)
    snap = env.snapshot()
    once = [env.step(action)[0] for action in (1, 2, 1, 2, 0, 1)]
    env.restore(snap)
    assert [env.step(action)[0] for action in (1, 2, 1, 2, 0, 1)] == once
    other = env.fork(1)[0]
    other.restore(snap)
    assert [other.step(action)[0] for action in (1, 2, 1, 2, 0, 1)] == once


def test_a_replay_can_be_saved(tmp_path):
    env = ReplaySnapshots("CartPole-v1")
    env.reset(seed=1)
    env.step(0)
    env.restore(env.snapshot(), seed=5)
    env.snapshot().save(tmp_path / "snapshot")
    expected = [env.step(1)[0].tolist() for _ in range(3)]
    other = ReplaySnapshots("CartPole-v1")
    other.restore(Snapshot.load(tmp_path / "snapshot"))
    assert [other.step(1)[0].tolist() for _ in range(3)] == expected


@pytest.mark.slow
def test_replays_of_a_stochastic_environment_are_exact():
    report = check_snapshot(ReplaySnapshots, make_kwargs={"id": "FrozenLake-v1"}, only=EXACT)
    assert len(report.results) == len(EXACT)
