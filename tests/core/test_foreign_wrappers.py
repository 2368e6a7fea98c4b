"""Snapshots through environments and wrappers of other packages, which only keep the protocol."""

from __future__ import annotations

import types
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from traces import plain, started, trace

import sandboxgym
from sandboxgym import (
    SnapshotNotSupported,
    SnapshotSpec,
    SnapshotWrapper,
)
from sandboxgym.wrappers import StackSnapshot


class Handle(NamedTuple):
    state: tuple
    steps: int | None


class ForeignPole(CartPoleEnv):
    """Shares no code with this package: the four names of the protocol are all it has."""

    snapshot_spec = SnapshotSpec()
    last = "a name of its own"

    def snapshot(self):
        return Handle(tuple(self.state), self.steps_beyond_terminated)

    def restore(self, snap, *, seed=None):
        self.reset(seed=seed)
        self.state, self.steps_beyond_terminated = snap
        return self._observation(), {}

    def fork(self, k, *, seed=None):
        children = [ForeignPole() for _ in range(k)]
        for child in children:
            child.restore(self.snapshot())
            child.spec = self.spec
        return children

    def _observation(self):
        return np.array(self.state, dtype=np.float32)


class TestThirdParties:
    @pytest.fixture
    def env(self):
        gym.register(
            "toys/ForeignPole-v0",
            entry_point=ForeignPole,
            max_episode_steps=8,
            additional_wrappers=(SnapshotWrapper.wrapper_spec(),),
        )
        env = gym.make("toys/ForeignPole-v0")
        env.reset(seed=1)
        trace(env, [0, 1, 0])
        yield env
        del gym.registry["toys/ForeignPole-v0"]

    def test_snapshots_go_through_its_wrappers(self, env):
        snap, (child,) = env.snapshot(), env.fork(1)
        expected = trace(env, [1, 0] * 9)
        assert len(expected) == 5  # the time limit
        fresh = gym.make("toys/ForeignPole-v0")
        for one in (env, fresh):
            one.restore(snap)
            assert trace(one, [1, 0] * 9) == expected
        assert trace(child, [1, 0] * 9) == expected

    def test_its_handle_alone_goes_through_the_bare_environment(self, env):
        handle = sandboxgym.snapshot(env.unwrapped)
        assert isinstance(handle, Handle)
        assert plain(sandboxgym.restore(env.unwrapped, handle)[1]) == {}

    def test_its_snapshot_has_the_attributes_of_ours(self, env):
        with env.snapshot() as snap:
            assert (snap.kind, snap.parent, snap.env_id) == ("memory", None, "toys/ForeignPole-v0")
            assert isinstance(snap.id, str)
            assert not hasattr(snap, "digest")  # its handle has none
        handle = types.SimpleNamespace(digest="d", nbytes=5, parent="p", id="i")
        other = StackSnapshot(env.unwrapped, handle, snap.layers)
        assert (other.id, other.parent, len(other.digest)) == ("i", "p", 64)
        assert other.nbytes > 5
        with pytest.raises(SnapshotNotSupported, match="SnapshotEnv"):
            other.to_bytes()

    def test_a_wrapper_that_fails_on_what_it_restores_leaves_no_trace(self, env):
        def brittle(observation):
            if fail:
                raise ZeroDivisionError("brittle")
            return observation

        fail = False
        outer = gym.wrappers.TransformObservation(env, brittle, None)
        snap = sandboxgym.snapshot(outer)
        expected = trace(sandboxgym.fork(outer, 1)[0], [1, 0])
        outer.step(0)
        before = trace(sandboxgym.fork(outer, 1)[0], [1, 0])
        fail = True
        with pytest.raises(ZeroDivisionError):
            sandboxgym.restore(outer, snap)
        fail = False
        assert trace(sandboxgym.fork(outer, 1)[0], [1, 0]) == before
        sandboxgym.restore(outer, snap)
        assert trace(outer, [1, 0]) == expected

    def test_saving_is_refused_with_advice(self, env, tmp_path):
        with pytest.raises(SnapshotNotSupported, match="SnapshotEnv"):
            env.snapshot().save(tmp_path / "state.snap")
        assert list(tmp_path.iterdir()) == []

    def test_its_snapshot_does_not_fit_an_environment_of_ours(self, env):
        with pytest.raises(TypeError, match="expected a Snapshot, found StackSnapshot"):
            started("toys/Dice-v0").restore(env.snapshot())

    def test_the_spec_is_the_base_environments(self, env):
        assert env.snapshot_spec is ForeignPole.snapshot_spec
