"""The snapshot contract on the bare mechanism: fidelity, isolation, durability, typed errors."""

from __future__ import annotations

import copy
import json
import os
import pickle
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from toy_envs import Corridor, Dice
from traces import ACTIONS, IDS, TOYS, control, fresh_interpreter, future, plain, started, streams, trace

import sandboxgym
from sandboxgym import (
    ResetNeeded,
    Snapshot,
    SnapshotCorrupt,
    SnapshotEnv,
    SnapshotMismatch,
    SnapshotNotSupported,
    SupportsSnapshot,
)
from sandboxgym.core import constructor_signature
from sandboxgym.envs.alfworld.env import ALFWorldEnv

every_env = pytest.mark.parametrize("env_id", IDS)
every_toy = pytest.mark.parametrize("env_id", TOYS)


class TestFidelity:
    @every_env
    @pytest.mark.parametrize("steps", [0, 1, 2, 5, 11])
    def test_the_future_after_restore_is_that_of_an_uninterrupted_run(self, env_id, steps):
        expected = control(env_id, steps)
        env = started(env_id, steps=steps)
        snap = env.snapshot()
        assert future(env, env_id, steps) == expected
        env.restore(snap)
        assert future(env, env_id, steps) == expected
        other = gym.make(env_id, max_episode_steps=12)  # never reset
        other.restore(snap)
        assert future(other, env_id, steps) == expected

    @every_env
    def test_a_snapshot_before_every_step_changes_nothing(self, env_id):
        watched, free = started(env_id), started(env_id)
        for action in ACTIONS[env_id]:
            before = streams(watched)
            watched.snapshot()
            assert streams(watched) == before
            expected = plain(free.step(action))
            assert plain(watched.step(action)) == expected
            if expected[2] or expected[3]:
                break
        assert streams(watched) == streams(free)

    @every_env
    def test_snapshots_restore_in_any_order_and_often(self, env_id):
        env = started(env_id)
        snaps = []
        for action in ACTIONS[env_id][:4]:
            snaps.append(env.snapshot())
            env.step(action)
        for steps in (2, 0, 3, 3, 1, 0, 2):
            env.restore(snaps[steps])
            assert future(env, env_id, steps) == control(env_id, steps)

    @every_env
    def test_a_snapshot_of_a_restored_state_is_that_state(self, env_id):
        env = started(env_id, steps=3)
        first = env.snapshot()
        trace(env, ACTIONS[env_id][3:5])
        env.restore(first)
        second = env.snapshot()
        assert second.digest == first.digest
        assert (second.parent, second.id == first.id) == (first.id, False)
        trace(env, ACTIONS[env_id][3:])
        env.restore(second)
        assert future(env, env_id, 3) == control(env_id, 3)

    @every_env
    def test_restore_after_reset_after_the_end_and_after_close(self, env_id):
        env = started(env_id, steps=2)
        snap = env.snapshot()
        env.reset(seed=77)
        env.restore(snap)
        assert future(env, env_id, 2) == control(env_id, 2)
        env.restore(snap)  # un-done
        assert future(env, env_id, 2) == control(env_id, 2)
        env.close()
        other = gym.make(env_id, max_episode_steps=12)
        other.restore(snap)
        assert future(other, env_id, 2) == control(env_id, 2)

    @every_env
    def test_a_finished_episode_restores_as_finished(self, env_id):
        env = started(env_id, steps=12)
        last, snap = env.unwrapped.last, env.snapshot()
        assert last.terminated
        env.reset(seed=5)
        env.restore(snap)
        assert plain(env.unwrapped.last) == plain(last)

    @every_env
    def test_restore_returns_the_captured_observation_and_info(self, env_id):
        env = started(env_id, steps=2)
        returned = env.step(ACTIONS[env_id][2])
        snap = env.snapshot()
        trace(env, ACTIONS[env_id][3:])
        observation, info = env.restore(snap)
        assert plain((observation, info)) == plain((returned[0], returned[4]))
        assert plain(env.unwrapped.last) == plain(returned)
        assert observation in env.observation_space

    @pytest.mark.parametrize("env_id", [i for i in IDS if i != "toys/Dice-v0"])
    def test_render_after_restore_shows_the_restored_state(self, env_id):
        env = started(env_id, steps=4, render_mode="ansi")
        frame, snap = env.render(), env.snapshot()
        env.step(ACTIONS[env_id][4])
        assert env.render() != frame
        env.restore(snap)
        assert env.render() == frame

    def test_the_lineage_names_the_snapshot_last_taken_or_restored(self):
        env = started("toys/Dice-v0")
        first = env.snapshot()
        second, child = env.snapshot(), env.fork(1)[0]
        assert (first.parent, second.parent) == (None, first.id)
        assert child.snapshot().parent == second.id
        assert env.snapshot().parent == second.id  # a fork leaves no trace in the lineage
        env.restore(first)
        assert env.snapshot().parent == first.id

    def test_an_environment_mixed_in_from_elsewhere_is_recorded_too(self):
        class Pole(SnapshotEnv, CartPoleEnv):
            def _capture(self):
                return (tuple(map(float, self.state)), self.steps_beyond_terminated)

            def _apply(self, state):
                self.state, self.steps_beyond_terminated = np.array(state[0]), state[1]

        env = Pole()
        env.reset(seed=1)
        snap, expected = env.snapshot(), trace(env, [0, 1, 1])
        env.restore(snap)
        assert trace(env, [0, 1, 1]) == expected
        assert plain(env.last) == expected[-1]


def spoil(info: dict) -> None:
    for value in info.values():
        if isinstance(value, list):
            value.clear()
    info.clear()


class TestIsolation:
    @every_env
    def test_interleaved_forks_run_as_if_alone(self, env_id):
        parent = started(env_id, steps=3)
        forks = [parent, *parent.fork(3)]
        runs: list[list] = [[] for _ in forks]
        for action in ACTIONS[env_id][3:]:
            for run, env in zip(runs, forks, strict=True):
                if not (run and (run[-1][2] or run[-1][3])):
                    run.extend(trace(env, [action]))
        solo = trace(started(env_id, steps=3), ACTIONS[env_id][3:])
        assert runs == [solo] * 4

    @every_env
    def test_a_fork_does_not_disturb_its_parent(self, env_id):
        parent = started(env_id, steps=3)
        for child in parent.fork(2, seed=9):
            future(child, env_id, 3)
        assert future(parent, env_id, 3) == control(env_id, 3)

    @every_env
    def test_closing_in_any_order_hurts_no_other(self, env_id):
        parent = started(env_id, steps=3)
        first, second, third = parent.fork(3)
        parent.close()
        second.close()
        assert future(third, env_id, 3) == control(env_id, 3)
        third.close()
        assert future(first, env_id, 3) == control(env_id, 3)

    @every_env
    def test_what_users_write_into_returned_values_reaches_nobody(self, env_id):
        env = started(env_id, steps=2)
        _, _, _, _, returned = env.step(ACTIONS[env_id][2])
        snap = env.snapshot()
        (child,) = env.fork(1)
        for info in (returned, env.unwrapped.last.info, env.restore(snap)[1], child.unwrapped.last.info):
            spoil(info)
        env.restore(snap)
        assert env.unwrapped.last.info
        for one in (env, child):
            assert future(one, env_id, 3) == control(env_id, 3)

    @every_env
    @pytest.mark.parametrize("steps", [0, 2])
    def test_what_users_wrote_before_a_snapshot_is_not_in_it(self, env_id, steps):
        env = started(env_id, steps=steps)
        info = env.step(ACTIONS[env_id][steps])[4] if steps else env.reset(seed=3, options={"game": 0})[1]
        expected = plain(info)
        for written in (info, env.unwrapped.last.info):
            spoil(written)
        assert plain(env.restore(env.snapshot())[1]) == plain(env.unwrapped.last.info) == expected

    def test_mutable_state_is_shared_with_no_snapshot_and_no_sibling(self):
        env = started("toys/Corridor-v0", steps=3)
        snap, (one, other) = env.snapshot(), env.fork(2)
        expected = copy.deepcopy(env.unwrapped.state)
        for mutated in (env, one):
            mutated.unwrapped.state["visited"].append(99)
        assert other.unwrapped.state == expected
        env.restore(snap)
        env.unwrapped.state["visited"].append(99)
        env.restore(snap)
        assert env.unwrapped.state == expected

    def test_forks_share_no_random_stream_even_where_spaces_are_class_attributes(self):
        class Shared(Dice):
            observation_space = gym.spaces.Discrete(64)
            action_space = gym.spaces.Discrete(1000)

            def __init__(self):
                pass

        parent = Shared()
        parent.reset(seed=0)
        parent.action_space.seed(1)
        children = parent.fork(2)
        first = [child.action_space.sample() for child in children for _ in range(3)]
        assert first[:3] == first[3:] == [parent.action_space.sample() for _ in range(3)]
        parent.action_space.seed(1)
        parent.fork(1, seed=4)
        assert parent.action_space.sample() == first[0]

    def test_deepcopy_before_reset_is_a_fresh_environment_with_the_same_streams(self):
        class Shared(Dice):
            action_space = gym.spaces.Discrete(1000)
            observation_space = gym.spaces.Discrete(64)

            def __init__(self):
                pass

        env = Shared()
        env.action_space.seed(3)
        env.np_random = np.random.default_rng(4)
        twin = copy.deepcopy(env)
        with pytest.raises(ResetNeeded):
            twin.snapshot()
        draws = [(one.action_space.sample(), one.np_random.random()) for one in (env, twin)]
        assert draws[0] == draws[1]

    def test_returned_values_that_hold_themselves_are_recorded(self):
        class Circular(Dice):
            def step(self, action):
                *rest, info = super().step(action)
                info["self"] = info
                return *rest, info

        env = Circular()
        env.reset(seed=1)
        env.step(0)
        info = env.last.info
        assert info["self"] is info

    @every_toy
    def test_deepcopy_is_a_fork_and_copy_is_refused(self, env_id):
        env = started(env_id, steps=3).unwrapped
        twin = copy.deepcopy(env)
        expected = future(started(env_id, steps=3).unwrapped, env_id, 3)
        assert future(twin, env_id, 3) == expected == future(env, env_id, 3)
        with pytest.raises(TypeError, match="fork"):
            copy.copy(env)


RESTORE_AND_RUN = """
import json, sys
import gymnasium as gym, toy_envs
import traces
from sandboxgym import Snapshot
toy_envs.register()
env_id, path = sys.argv[1:]
env = gym.make(env_id, max_episode_steps=12)
env.restore(Snapshot.load(path))
print(json.dumps(traces.future(env, env_id, 3)))
"""


class TestDurability:
    @every_env
    def test_a_saved_snapshot_restores_in_a_fresh_interpreter(self, env_id, tmp_path):
        env = started(env_id, steps=3)
        env.snapshot().save(tmp_path / "state.snap")
        env.close()
        (tmp_path / "elsewhere").mkdir()
        printed = fresh_interpreter(
            RESTORE_AND_RUN, env_id, tmp_path / "state.snap", cwd=tmp_path / "elsewhere", PYTHONHASHSEED="12345"
        )
        assert json.loads(printed) == json.loads(json.dumps(control(env_id, 3)))

    @every_env
    @pytest.mark.parametrize("travel", [pickle.dumps, Snapshot.to_bytes], ids=["pickle", "bytes"])
    def test_encoding_keeps_everything(self, env_id, travel):
        env = started(env_id, steps=3)
        snap = env.snapshot()
        data = travel(snap)
        back = Snapshot.from_bytes(data) if travel is Snapshot.to_bytes else pickle.loads(data)
        for name in ("id", "parent", "env_id", "kind", "header", "digest", "nbytes", "layers"):
            assert getattr(back, name) == getattr(snap, name)
        env.restore(back)
        assert future(env, env_id, 3) == control(env_id, 3)

    @every_env
    def test_equal_states_have_equal_digests(self, env_id):
        one, same, other = (started(env_id, steps=steps).snapshot() for steps in (3, 3, 4))
        assert one.digest == same.digest != other.digest
        assert one.nbytes > 0

    def test_a_constructor_argument_that_json_changes_still_fits_after_loading(self):
        class Sized(Dice):
            def __init__(self, size=(1, 2)):
                super().__init__()
                self.size = size

        env = Sized((3, 4))
        env.reset(seed=0)
        snap = Snapshot.from_bytes(env.snapshot().to_bytes())
        env.restore(snap)
        with pytest.raises(SnapshotMismatch, match="config"):
            Sized((5, 4)).restore(snap)

    def test_save_replaces_the_file_and_leaves_no_other(self, tmp_path):
        path = tmp_path / "state.snap"
        path.write_bytes(b"old")
        snap = started("toys/Dice-v0").snapshot()
        snap.save(str(path))
        assert Snapshot.load(path).id == snap.id
        assert list(tmp_path.iterdir()) == [path]

    @pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
    def test_saved_files_have_the_permissions_of_any_file(self, tmp_path, umask, mode):
        before = os.umask(umask)
        try:
            started("toys/Dice-v0").snapshot().save(tmp_path / "state.snap")
        finally:
            os.umask(before)
        assert (tmp_path / "state.snap").stat().st_mode & 0o777 == mode

    def test_load_names_the_file_that_is_corrupt(self, tmp_path):
        path = tmp_path / "not a snapshot"
        path.write_bytes(b"something else entirely, and long enough to hold a whole prefix")
        with pytest.raises(SnapshotCorrupt, match="not a snapshot"):
            Snapshot.load(path)

    def test_a_state_that_is_not_plain_data_restores_but_is_not_saved(self, tmp_path):
        class Opaque(Dice):
            def _capture(self):
                return {self.total: object}

            def _apply(self, state):
                (self.total,) = state

        env = Opaque()
        env.reset(seed=0)
        snap = env.snapshot()
        env.restore(snap)
        with pytest.raises(SnapshotNotSupported, match="type"):
            snap.save(tmp_path / "state.snap")
        assert list(tmp_path.iterdir()) == []


class Fragile(Corridor):
    """`_apply` fails midway when told to."""

    broken: int | None = None
    applied = 0
    closed = 0

    def _apply(self, state):
        self.state = {"cell": state["cell"], "visited": []}
        Fragile.applied += 1
        if Fragile.applied == Fragile.broken:
            raise OSError("no space left on device")
        self.state = state

    def close(self):
        Fragile.closed += 1


class TestNamesTaken:
    @pytest.mark.parametrize(
        ("name", "value"),
        [("_put", lambda self, card: card), ("_body", lambda self: "torso"), ("_streams", []), ("_last", "word")],
    )
    def test_a_class_with_a_name_of_the_mechanism_for_something_else_is_refused(self, name, value):
        with pytest.raises(TypeError, match=rf"Cards defines {name}, but SnapshotEnv uses {name} itself: .* _restore"):
            type("Cards", (Corridor,), {name: value})
        mixin = type("Mixin", (), {name: value})
        with pytest.raises(TypeError, match=f"Mixin defines {name}"):
            type("Cards", (mixin, Corridor), {})
        type("Cards", (Corridor, mixin), {})  # it hides nothing there

    def test_a_method_of_the_mechanism_can_be_extended(self):
        class Told(Corridor):
            def _put(self, body, seed, *, own=False):
                super()._put(body, seed, own=own)
                self.told = self.last.observation

        env = Told()
        observation, _ = env.reset(seed=0)
        snap = env.snapshot()
        env.step(env.action_space.sample())
        env.restore(snap)
        assert plain(env.told) == plain(observation)

    @pytest.mark.parametrize(("name", "value"), [("_streams", []), ("_last", "word"), ("_arguments", {})])
    def test_an_attribute_with_a_name_of_the_mechanism_is_refused_by_the_first_reset_or_step(self, name, value):
        class Sets(Corridor):
            def reset(self, *, seed=None, options=None):
                if options:
                    setattr(self, name, value)
                return super().reset(seed=seed)

        with pytest.raises(TypeError, match=rf"Sets sets self\.{name} to .*, but SnapshotEnv uses {name} itself"):
            Sets().reset(seed=0, options={"clash": True})

    def test_a_step_that_overwrites_the_last_transition_is_refused(self):
        class Forgets(Corridor):
            def step(self, action):
                result = super().step(action)
                self._last = action
                return result

        env = Forgets()
        env.reset(seed=0)
        with pytest.raises(TypeError, match=r"sets self\._last to"):
            env.step(env.action_space.sample())


class TestAllOrNothing:
    @pytest.fixture
    def env(self, monkeypatch):
        for name, value in (("broken", None), ("applied", 0), ("closed", 0)):
            monkeypatch.setattr(Fragile, name, value)
        env = Fragile()
        env.reset(seed=3)
        env.step(1)
        return env

    def test_a_restore_that_fails_midway_is_rolled_back(self, env):
        snap = env.snapshot()
        env.step(1)
        before, draws, last = copy.deepcopy(env.state), streams(env), plain(env.last)
        Fragile.broken = 1
        with pytest.raises(OSError, match="no space"):
            env.restore(snap, seed=4)
        assert (env.state, streams(env), plain(env.last)) == (before, draws, last)
        assert env.snapshot().parent == snap.id

    @pytest.mark.parametrize("seed", [None, 4])
    @pytest.mark.parametrize("used", [False, True])
    def test_streams_that_an_apply_leaves_alone_are_rolled_back_too(self, seed, used):
        class Broken(ALFWorldEnv):
            broken = False

            def _transition(self):
                if self.broken:
                    raise OSError("no space left on device")
                return super()._transition()

        env = Broken()
        env.reset(seed=0, options={"task": 0})
        snap = env.snapshot()
        if used:
            env.np_random.random(), env.action_space.sample()
        before, env.broken = streams(env), True
        with pytest.raises(OSError, match="no space"):
            env.restore(snap, seed=seed)
        assert not env.apply_draws and streams(env) == before

    def test_a_fork_that_fails_closes_its_children_and_spares_the_parent(self, env):
        snap = env.snapshot()
        before, draws = copy.deepcopy(env.state), streams(env)
        Fragile.broken = 2
        with pytest.raises(OSError, match="no space"):
            env.fork(3)
        assert Fragile.closed == 2
        assert (env.state, streams(env)) == (before, draws)
        assert env.snapshot().parent == snap.id


def test_the_protocol_is_what_the_environments_offer():
    assert isinstance(gym.make("toys/Dice-v0"), SupportsSnapshot)
    assert isinstance(Dice(), SupportsSnapshot)
    assert not isinstance(CartPoleEnv(), SupportsSnapshot)


def test_an_environment_without_capture_says_what_is_missing():
    class Unfinished(SnapshotEnv):
        observation_space = action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return 0, {}

    env = Unfinished()
    env.reset()
    with pytest.raises(NotImplementedError, match="Unfinished must define _capture"):
        env.snapshot()


def test_the_handle_is_small_and_readable():
    snap = started("toys/Dice-v0").snapshot()
    assert repr(snap).startswith(f"<Snapshot {snap.id[:8]} of toys/Dice-v0 through TimeLimit")
    assert copy.copy(snap) is copy.deepcopy(snap) is snap
    assert snap.nbytes < 2000
    assert Path(sandboxgym.__file__).with_name("py.typed").exists()


class TestDeclaration:
    @every_env
    def test_metadata_declares_what_snapshots_cover(self, env_id):
        env = gym.make(env_id)
        assert env.metadata["snapshot"]["kind"] == env.snapshot_spec.kind == "memory"
        assert env.metadata["snapshot"]["cross_process"] is True


def test_constructor_arguments_are_those_of_init_in_every_version_of_python() -> None:
    class Sized(SnapshotEnv[int, int]):
        def __init__(self, size: int, *, wide: bool = False) -> None:
            self.observation_space = self.action_space = gym.spaces.Discrete(size)

        def _capture(self) -> int:
            return 0

    assert list(constructor_signature(Sized).parameters) == ["size", "wide"]
    assert Sized(3)._config() == {"size": 3, "wide": False}
    assert Sized(size=3, wide=True)._config() == {"size": 3, "wide": True}
    with pytest.raises(TypeError, match="size"):
        constructor_signature(Sized).bind()
