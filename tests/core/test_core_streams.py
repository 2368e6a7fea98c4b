"""Random streams in snapshots: exact after a restore, changed by a seed, compact in files."""

from __future__ import annotations

import base64
import copy
import json
import pickle
import threading
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from toy_envs import Dice
from traces import ACTIONS, IDS, future, plain, started, streams, trace

import sandboxgym
from sandboxgym import (
    Snapshot,
    SnapshotCorrupt,
    SnapshotNotSupported,
    serialization,
    sibling_seed,
)
from sandboxgym.envs.alfworld.env import ALFWorldEnv
from sandboxgym.randomness import capture, compact, expanded

every_env = pytest.mark.parametrize("env_id", IDS)


def set_anew(owner):
    mine = np.random.default_rng(5)  # whoever has it may draw from it, without asking the environment
    owner._np_random = mine
    return mine.random


def with_a_copy(owner):
    if isinstance(owner, gym.Env):
        return owner.np_random.random
    return copy.copy(owner).np_random.random  # a shallow copy has the same stream


# Each is called before the use, and returns what uses the stream.
USES = {
    "drawn from": lambda owner: lambda: owner.np_random.random(),
    "drawn from by who got it before": lambda owner: owner.np_random.random,
    "half a word": lambda owner: lambda: owner.np_random.integers(5, dtype=np.uint16),
    "set to a state": lambda owner: (
        lambda: setattr(owner.np_random.bit_generator, "state", np.random.default_rng(9).bit_generator.state)
    ),
    "spawned from": lambda owner: lambda: owner.np_random.spawn(1),
    "set anew": set_anew,
    "drawn from by a shallow copy": with_a_copy,
    "seeded": lambda owner: lambda: owner.reset(seed=3) if isinstance(owner, gym.Env) else owner.seed(3),
}


def drawn(*calls):
    generator = np.random.default_rng(3)
    for call in calls:
        call(generator)
    return generator


STREAMS = {
    "none": None,
    "unused": drawn(),
    "unused, of much entropy": np.random.default_rng(2**400),
    "used": drawn(lambda g: g.random(5)),
    "half a word used": drawn(lambda g: g.integers(5, dtype=np.uint16)),
    "spawned from": drawn(lambda g: g.spawn(2)),
    "spawned": np.random.default_rng(1).spawn(2)[1],
    "of several numbers": np.random.default_rng([1, 2, 3]),
    "of a larger pool": np.random.Generator(np.random.PCG64(np.random.SeedSequence(1, pool_size=8))),
    "of no sequence": pickle.loads(pickle.dumps(np.random.default_rng(1))),
    "another kind": np.random.Generator(np.random.SFC64(1)),
    "Mersenne": np.random.Generator(np.random.MT19937(1)),
}


@pytest.mark.parametrize("name", STREAMS)
def test_streams_come_back_from_their_compact_form_and_equal_ones_have_equal_forms(name):
    state = capture(STREAMS[name])
    streams = {"np_random": state, "np_random_seed": 3, "spaces": [state, None, capture(drawn())]}
    data = serialization.pack(compact(streams))
    found = expanded(serialization.unpack(data))
    assert plain(found) == plain(streams)
    assert serialization.pack(compact(found)) == data
    assert expanded(streams) is streams  # as it was in files of format 1


def test_a_usual_stream_takes_40_bytes_and_its_entropy_and_an_unused_one_its_entropy():
    one, other = (
        serialization.pack(compact({"np_random": capture(STREAMS[name]), "np_random_seed": 3, "spaces": []}))
        for name in ("used", "unused")
    )
    assert len(one) - len(other) == 42  # with the two bytes that say that bytes follow
    assert len(other) < 8


@pytest.mark.parametrize(
    "lie",
    [
        None,
        3,
        [],
        [[1], 2],
        [[1], 2, 3],
        [[], 2, []],
        [[1, b"short"], 2, []],
        [[1, "text"], 2, []],
        [[1, b"0" * 40, 3], 2, []],
        [["1"], 2, []],
        [[-1], 2, []],
        [[True], 2, []],
        [[1 << 5000], 2, []],
    ],
)
def test_compact_streams_that_lie_are_corrupt(lie):
    with pytest.raises(SnapshotCorrupt, match="expected"):
        expanded(lie)


OLD = json.loads(Path(__file__).with_name("snapshots_of_format_1.json").read_text())


@pytest.mark.parametrize("name", OLD)
def test_a_file_of_format_1_still_restores(name):
    """Written by the last version that wrote it; the digest is that of the same state captured today."""
    old = OLD[name]
    snap = Snapshot.from_bytes(base64.b64decode(old["bytes"]))
    env = gym.make(old["env_id"])
    for one in (snap, Snapshot.from_bytes(snap.to_bytes())):
        observation, info = env.restore(one)
        assert (observation, info["state_hash"]) == (old["observation"], old["state_hash"])
        again = env.snapshot()
        assert again.digest == one.digest
        base = env.unwrapped
        draws = [base.np_random.random(), *(space.np_random.integers(10**9) for space in _spaces(base))]
        assert draws == old["drawn"]
    replayed = gym.make(old["env_id"])
    observation, info = replayed.reset(seed=old["seed"])
    for action in old["actions"]:
        observation, *_, info = replayed.step(action)
    assert (observation, info) == env.restore(again)
    assert len(snap.to_bytes()) < 700


def _spaces(env):
    return env.action_space, env.observation_space


class TestRandomness:
    def test_restoring_with_a_seed_twice_is_equal_and_seeds_differ(self):
        env = started("toys/Dice-v0", steps=2)
        snap = env.snapshot()
        futures = []
        for seed in (1, 1, 2, 3):
            env.restore(snap, seed=seed)
            assert env.np_random_seed == seed
            futures.append(future(env, "toys/Dice-v0", 2))
        assert futures[0] == futures[1]
        assert len({repr(one) for one in futures}) == 3

    def test_a_seeded_child_is_a_restore_with_the_siblings_seed(self):
        env = started("toys/Dice-v0", steps=2)
        snap, children = env.snapshot(), env.fork(4, seed=11)
        seen = set()
        for index, child in enumerate(children):
            env.restore(snap, seed=sibling_seed(11, index))
            assert streams(child) == streams(env)
            expected = future(env, "toys/Dice-v0", 2)
            assert future(child, "toys/Dice-v0", 2) == expected
            seen.add(repr(expected))
        assert len(seen) == 4

    @every_env
    def test_unseeded_children_have_the_parents_streams(self, env_id):
        env = started(env_id, steps=2)
        assert all(streams(child) == streams(env) for child in env.fork(3))

    def test_restores_are_exact_even_if_reset_was_not_seeded(self):
        env = gym.make("toys/Dice-v0")
        env.reset()
        snap, children = env.snapshot(), env.fork(2)
        runs = [trace(one, ACTIONS["toys/Dice-v0"]) for one in (env, *children)]
        env.restore(snap)
        assert trace(env, ACTIONS["toys/Dice-v0"]) == runs[0] == runs[1] == runs[2]

    @pytest.mark.parametrize("how", ["restore", "fork"])
    def test_spaces_that_were_never_seeded_draw_exactly_too(self, how):
        class Nested(Dice):
            def __init__(self):
                super().__init__()
                self.action_space = gym.spaces.Dict(a=gym.spaces.Discrete(1000), b=gym.spaces.Discrete(1000))
                self.action_space["a"].seed(3)

        env = Nested()
        env.reset(seed=1)
        seeded = Nested().action_space["a"].sample()
        snap, (child,) = env.snapshot(), env.fork(1)
        draws = [plain(env.action_space.sample()) for _ in range(3)]
        assert draws[0]["a"] == plain(seeded)  # a stream that was seeded is not made anew
        for _ in range(2):
            env.restore(snap)
            one = env if how == "restore" else child
            assert [plain(one.action_space.sample()) for _ in range(3)] == draws
            if how == "fork":
                break

    def test_snapshots_share_the_state_of_streams_that_nobody_used(self):
        env = gym.make("sandboxgym/ALFWorld-v0")
        env.reset(seed=0, options={"task": 0})
        one, two = env.snapshot(), env.snapshot()
        assert one._body.rng is two._body.rng
        env.unwrapped.np_random.random()
        three = env.snapshot()
        assert three._body.rng["spaces"][0] is one._body.rng["spaces"][0]
        env.restore(one)
        assert env.snapshot()._body.rng is one._body.rng
        env.restore(three)
        assert env.snapshot()._body.rng is three._body.rng

    @pytest.mark.parametrize("way", USES)
    @pytest.mark.parametrize("whose", ["env", "action_space", "observation_space"])
    def test_a_stream_is_captured_and_restored_whoever_used_it_and_how(self, way, whose):
        env = gym.make("sandboxgym/ALFWorld-v0").unwrapped
        env.reset(seed=0, options={"task": 0})
        env.snapshot()  # every stream is known from here on
        owner = env if whose == "env" else getattr(env, whose)
        before = env.snapshot()
        use = USES[way](owner)
        for _ in range(2):
            use()
            expected = streams(env)
            after = env.snapshot()
            assert streams(env) == expected
            env.restore(before)
            assert streams(env) != expected
            env.restore(after)
            assert streams(env) == expected
            fork = env.fork(1)[0]
            assert streams(fork) == expected
            use = USES[way](owner)

    @pytest.mark.parametrize("kind", ["PCG64", "MT19937"])
    def test_a_stream_that_environment_and_space_share_is_shared_after_a_restore_too(self, kind):
        class Shared(Dice):
            def reset(self, *, seed=None, options=None):
                super().reset(seed=seed)
                self.np_random = np.random.Generator(getattr(np.random, kind)(seed))
                self.action_space = gym.spaces.Discrete(1000, seed=self.np_random)
                return super().reset()

            def step(self, action):
                self.action_space.sample()
                return super().step(action)

        env, other, loading = Shared(), Shared(), Shared()
        env.reset(seed=1), other.reset(seed=5)
        snap, child = env.snapshot(), env.fork(1)[0]
        expected = trace(env, [0] * 4)
        for one in (env, other, env):
            one.restore(snap)
            assert trace(one, [0] * 4) == expected
        loaded = Snapshot.from_bytes(snap.to_bytes())
        loading.restore(loaded)
        assert trace(loading, [0] * 4) == expected == trace(child, [0] * 4) and loaded.digest == snap.digest

    def test_streams_that_came_to_be_shared_are_parted_by_a_restore(self):
        env = started("toys/Dice-v0").unwrapped
        env.reset(seed=1)
        env.action_space.seed(1)  # as Gymnasium seeds both alike
        env.np_random.random()
        snap, expected = env.snapshot(), streams(env)
        env.action_space._np_random = env.np_random
        env.restore(snap)
        assert streams(env) == expected

    @pytest.mark.parametrize("number", [0, 1, -1, 2**70, True, 0.0])
    def test_a_number_of_a_stream_that_did_not_come_before_is_refused(self, number):
        env = started("toys/Dice-v0").unwrapped
        header, content = serialization.loads(env.snapshot().to_bytes())
        content["rng"] = serialization.pack([number, 0, [[1], [2]]])
        with pytest.raises(SnapshotCorrupt):
            env.restore(Snapshot.from_bytes(serialization.dumps(header, content)))

    @pytest.mark.parametrize("mixed_in", [False, True])
    def test_what_an_environment_declares_of_its_apply_does_not_hold_for_one_that_overrides_it(self, mixed_in):
        def apply(self, state):
            type(self).__mro__[1 + mixed_in]._apply(self, state)
            self.lamp = self.np_random.random()

        bases = (type("Mixin", (), {"_apply": apply}), ALFWorldEnv) if mixed_in else (ALFWorldEnv,)
        kind = type("Noisy", bases, {} if mixed_in else {"_apply": apply})
        env, other = kind(), kind()
        env.reset(seed=0, options={"task": 0})
        snap, expected = env.snapshot(), streams(env)
        for one in (env, env, other):
            one.restore(snap)
            assert streams(one) == expected
        assert not ALFWorldEnv.apply_draws and not type("Quiet", (kind,), {"apply_draws": False}).apply_draws

    def test_an_immutable_state_is_not_inherited_by_a_class_with_another_state(self):
        class Noting(ALFWorldEnv):
            def __init__(self):
                super().__init__()
                self.notes = []

            def _capture(self):
                return super()._capture(), self.notes

            def _apply(self, state):
                game, self.notes = state
                super()._apply(game)

        env = Noting()
        env.reset(seed=0)
        snap = env.snapshot()
        env.notes.append("after the snapshot")
        env.restore(snap)
        assert env.notes == []
        assert ALFWorldEnv.immutable_state and not Noting.immutable_state
        assert type("Same", (ALFWorldEnv,), {}).immutable_state

    def test_a_state_that_cannot_be_copied_says_what_to_declare(self):
        env = type("Locked", (Dice,), {"_capture": lambda self: threading.Lock()})()
        env.reset(seed=0)
        with pytest.raises(TypeError) as told:
            env.snapshot()
        assert "immutable_state = True" in told.value.__notes__[0]

    def test_what_is_declared_of_a_method_is_not_of_one_with_another_super(self):
        class Base(sandboxgym.SnapshotEnv):
            def _capture(self):
                return {}

            def _apply(self, state):
                pass

        class Counted(Base):
            immutable_state, apply_draws = True, False

            def _capture(self):
                return super()._capture(), 1

            def _apply(self, state):
                super()._apply(state[0])

        class Drawing(Base):
            def _capture(self):
                return self.__dict__.setdefault("notes", [])

            def _apply(self, state):
                self.notes = [*state, self.np_random.random()]

        both = type("Both", (Counted, Drawing), {})
        assert Counted.immutable_state and not Counted.apply_draws
        assert not both.immutable_state and both.apply_draws
        declared = type("Declared", (Counted, Drawing), {"immutable_state": True, "apply_draws": False})
        assert declared.immutable_state and not declared.apply_draws
        flags = type("Flags", (), {"immutable_state": True, "apply_draws": False})  # mixed in, without methods
        assert type("Mixed", (flags, Base), {}).immutable_state and not type("Mixed", (flags, Base), {}).apply_draws

    @pytest.mark.parametrize("spawned", [0, 2])
    def test_spawning_goes_on_exactly(self, spawned):
        env = started("toys/Dice-v0")
        env.np_random.spawn(spawned)
        snap = env.snapshot()
        expected = [stream.random() for stream in env.np_random.spawn(3)]
        env.restore(snap)
        assert [stream.random() for stream in env.np_random.spawn(3)] == expected

    @pytest.mark.parametrize("kind", ["MT19937", "Philox", "SFC64", "PCG64DXSM"])
    def test_the_users_own_generator_is_restored_in_kind(self, kind):
        env = started("toys/Dice-v0")
        env.unwrapped.np_random = np.random.Generator(getattr(np.random, kind)(np.array([1, 2])))
        env.np_random.integers(5, dtype=np.uint16)  # half-used words are state too
        snap = env.snapshot()
        expected = (trace(env, [0] * 4), env.np_random.random())
        fresh = gym.make("toys/Dice-v0", max_episode_steps=12)
        fresh.reset(seed=0)
        for one in (env, fresh):
            one.restore(Snapshot.from_bytes(snap.to_bytes()))
            assert (trace(one, [0] * 4), one.np_random.random()) == expected
            assert type(one.np_random.bit_generator).__name__ == kind
            assert one.np_random_seed == -1  # Gymnasium's word for a stream set by hand

    def test_a_bit_generator_of_unknown_make_is_refused(self):
        class Mine(np.random.PCG64):
            pass

        env = started("toys/Dice-v0")
        env.unwrapped.np_random = np.random.Generator(Mine(1))
        with pytest.raises(SnapshotNotSupported, match="Mine"):
            env.snapshot()

    def test_nested_spaces_go_on_drawing_exactly(self):
        class Nested(Dice):
            def __init__(self):
                super().__init__()
                inner = gym.spaces.Sequence(gym.spaces.Box(0, 1, (2,)))
                self.action_space = gym.spaces.Dict(a=gym.spaces.Tuple((gym.spaces.Discrete(9), inner)))

        env = Nested()
        env.reset(seed=1)
        env.action_space.seed(3)
        env.action_space.sample()
        snap, (child,) = env.snapshot(), env.fork(1)
        expected = [plain(env.action_space.sample()) for _ in range(3)]
        assert [plain(child.action_space.sample()) for _ in range(3)] == expected
        env.restore(snap)
        assert [plain(env.action_space.sample()) for _ in range(3)] == expected
