"""Snapshots that environments refuse: damaged, foreign, released, too early."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from toy_envs import Corridor, Dice
from traces import TOYS, control, future, started, streams

import sandboxgym
from sandboxgym import (
    ResetNeeded,
    Snapshot,
    SnapshotCorrupt,
    SnapshotMismatch,
    SnapshotReleased,
    Transition,
    serialization,
)
from sandboxgym.randomness import expanded

every_toy = pytest.mark.parametrize("env_id", TOYS)


def saved(env_id: str = "toys/Dice-v0", **sections: object) -> Snapshot:
    """A snapshot with right checksums whose content was replaced."""
    header, content = serialization.loads(started(env_id, steps=5).unwrapped.snapshot().to_bytes())
    content.update({name: serialization.pack(value) for name, value in sections.items()})
    header["digest"] = serialization.content_digest(content)
    return Snapshot.from_bytes(serialization.dumps(header, content))


def streams_with(**changes: object) -> dict:
    _, content = serialization.loads(started("toys/Dice-v0").snapshot().to_bytes())
    return {**expanded(serialization.unpack(content["rng"])), **changes}


MERSENNE = np.random.MT19937(1)
LIES = {
    "transition of another length": {"transition": [1, 2]},
    "no transition": {"transition": None},
    "empty transition": {"transition": []},
    "info that is no dict": {"transition": [1, 0.0, False, False, "info"]},
    "flags that are no flags": {"transition": [1, 0.0, "no", 3, {}]},
    "reward that is no number": {"transition": [1, "much", False, False, {}]},
    "streams that are no dict": {"rng": 3},
    "streams without names": {"rng": {}},
    "a pool that would take forever to mix": {
        "rng": streams_with(
            np_random={
                "bit_generator": "PCG64",
                "state": np.random.PCG64(1).state,
                "seed_sequence": {"entropy": 1, "spawn_key": (), "pool_size": 2**20, "n_children_spawned": 0},
            }
        )
    },
    "unknown generator": {"rng": streams_with(np_random={"bit_generator": "os", "state": {}, "seed_sequence": None})},
    "stream that is no stream": {"rng": streams_with(np_random="a stream")},
    "seed that is no seed": {"rng": streams_with(np_random_seed="7")},
    "spaces that are none": {"rng": streams_with(spaces=7)},
    "too many spaces": {"rng": streams_with(spaces=[None] * 9)},
    "position outside of the buffer": {
        "rng": streams_with(
            np_random={
                "bit_generator": "MT19937",
                "state": {**MERSENNE.state, "state": {**MERSENNE.state["state"], "pos": 10**6}},
                "seed_sequence": None,
            }
        )
    },
}


class TestErrors:
    """Each is typed, says what was expected and found, and leaves the environment as it was."""

    def refused(self, snap, error, *, env_id="toys/Dice-v0", match=None, **options):
        env = started(env_id, steps=2)
        with pytest.raises(error, match=match):
            env.unwrapped.restore(snap, **options)
        assert future(env, env_id, 2) == control(env_id, 2)
        self.refused_before_reset(snap, error, env_id, options)

    @staticmethod
    def refused_before_reset(snap, error, env_id, options):
        env, control_env = (gym.make(env_id) for _ in range(2))
        for one in (env, control_env):
            one.action_space.seed(5)
        with pytest.raises(error):
            env.unwrapped.restore(snap, **options)
        assert streams(env) == streams(control_env)
        with pytest.raises(ResetNeeded):
            env.snapshot()

    def test_before_the_first_reset_there_is_nothing_to_ask_for(self):
        env = gym.make("toys/Dice-v0")
        for ask in (env.snapshot, lambda: env.fork(1), lambda: env.unwrapped.last, env.unwrapped.snapshot):
            with pytest.raises(ResetNeeded, match="reset"):
                ask()

    @pytest.mark.parametrize("thing", [None, "snapshot", b"bytes", {}, 3])
    def test_what_is_not_a_snapshot(self, thing):
        self.refused(thing, TypeError, match="expected a Snapshot")

    @pytest.mark.parametrize("k", [0, -1])
    def test_no_forks(self, k):
        with pytest.raises(ValueError, match=f"k={k}"):
            started("toys/Dice-v0").fork(k)

    def test_another_environment(self):
        self.refused(started("toys/Corridor-v0").unwrapped.snapshot(), SnapshotMismatch, match=r"Dice-v0.*Corridor-v0")

    @pytest.mark.parametrize(("mine", "theirs"), [({}, {"length": 7}), ({"length": 7}, {"length": 8})])
    def test_another_configuration(self, mine, theirs):
        snap = started("toys/Corridor-v0", **theirs).snapshot()
        env = started("toys/Corridor-v0", **mine)
        with pytest.raises(SnapshotMismatch, match="config"):
            env.restore(snap)

    def test_a_default_spelled_out_is_the_same_configuration(self):
        snap = started("toys/Corridor-v0", length=5).snapshot()
        started("toys/Corridor-v0").restore(snap)

    @pytest.mark.parametrize(
        ("mine", "theirs"),
        [
            (np.arange(3), np.arange(4)),
            (np.float32(1), np.float32(2)),
            (max, min),
            (Corridor, Dice),
            (Path("here"), Path("there")),
            ({1, 2}, {1, 3}),
            (b"a", b"b"),
            ([np.arange(2)], [np.arange(3)]),
            ({"a": {"b": max}}, {"a": {"b": min}}),
            (Transition, Transition(0, 0.0, False, False, {})),
            (sandboxgym.SnapshotSpec(), sandboxgym.SnapshotSpec(rng=False)),
            (1.0, float("nan")),
        ],
        ids=repr,
    )
    def test_arguments_that_are_not_json_are_compared_too(self, mine, theirs):
        class Configured(Dice):
            def __init__(self, setting):
                super().__init__()

        env, equal, other = (Configured(copy.deepcopy(setting)) for setting in (mine, mine, theirs))
        for one in (env, equal, other):
            one.reset(seed=0)
        for snap in (equal.snapshot(), Snapshot.from_bytes(equal.snapshot().to_bytes())):
            env.restore(snap)
        with pytest.raises(SnapshotMismatch, match="config"):
            env.restore(other.snapshot())

    def test_of_other_arguments_the_type_is_compared(self):
        class Engine:
            pass

        class Configured(Dice):
            def __init__(self, engine):
                super().__init__()

        env, other, none = Configured(Engine()), Configured(Engine()), Configured(None)
        for one in (env, other, none):
            one.reset(seed=0)
        env.restore(other.snapshot())
        with pytest.raises(SnapshotMismatch, match="Engine"):
            env.restore(none.snapshot())

    def test_not_a_number_is_a_setting_like_any_other(self):
        class Configured(Dice):
            def __init__(self, limit=float("nan")):
                super().__init__()

        env = Configured()
        env.reset(seed=0)
        env.restore(Snapshot.from_bytes(env.snapshot().to_bytes()))

    def test_another_render_mode_fits(self):
        started("toys/Corridor-v0", render_mode="ansi").restore(started("toys/Corridor-v0").snapshot())

    def test_another_state_version(self):
        class Versioned(Dice):
            state_version = 1

        env = Versioned()
        env.reset(seed=0)
        snap = env.snapshot()
        Versioned.state_version = 2
        with pytest.raises(SnapshotMismatch, match=r"state_version = 2.*1"):
            Versioned().restore(snap)

    def test_a_released_snapshot(self, tmp_path):
        with started("toys/Dice-v0", steps=4).unwrapped.snapshot() as snap:
            assert not snap.released
        snap.release()
        self.refused(snap, SnapshotReleased, match="release")
        for use in (lambda: snap.save(tmp_path / "state"), lambda: snap.digest, lambda: snap.nbytes):
            with pytest.raises(SnapshotReleased):
                use()

    @pytest.mark.parametrize("seed", [-1, "seed", 1.5, 2**4096])
    def test_what_is_not_a_seed(self, seed):
        self.refused(saved(), gym.error.Error, seed=seed)

    @pytest.mark.parametrize("lie", LIES.values(), ids=list(LIES))
    def test_content_that_lies(self, lie):
        self.refused(saved(**lie), SnapshotCorrupt)

    @pytest.mark.parametrize("state", [None, 3, "state", [], ["embedded/train/0"], ["x", "y", "1", 2, 3, None, True]])
    def test_a_state_that_lies(self, state):
        env_id = "sandboxgym/ALFWorld-v0"
        self.refused(saved(env_id, state=state), SnapshotCorrupt, env_id=env_id)

    def test_a_state_whose_transition_cannot_be_recomputed(self):
        class Recomputed(Dice):
            def _transition(self):
                return Transition("abcdef"[self.total], 0.0, False, False, {})

        env = Recomputed()
        env.reset(seed=0)
        header, content = serialization.loads(env.snapshot().to_bytes())
        content["state"] = serialization.pack(99)
        with pytest.raises(SnapshotCorrupt, match="IndexError"):
            env.restore(Snapshot.from_bytes(serialization.dumps(header, content)))
        assert (env.total, env.last.observation) == (0, "a")

    @pytest.mark.parametrize("layers", [3, ["abc"], [[1, {}, []]], [["name", 3, []]], [["name"]], {"a": 1}])
    def test_wrappers_that_lie(self, layers):
        with pytest.raises(SnapshotCorrupt):
            saved(layers=layers)

    @pytest.mark.parametrize("gone", ["env_id", "config", "id", "parent", "sections", "format"])
    def test_a_header_without_a_field(self, gone):
        header, content = serialization.loads(saved().to_bytes())
        del header[gone]
        packed = serialization._packed(json.dumps(header).encode() + b"\n" + b"".join(content.values()))
        checksum = serialization.hashlib.sha256(packed).digest()
        prefix = serialization._PREFIX.pack(serialization.MAGIC, len(packed), checksum)
        with pytest.raises(SnapshotCorrupt):
            Snapshot.from_bytes(prefix + packed)

    @every_toy
    def test_every_truncation_is_found(self, env_id):
        data = started(env_id, steps=2).snapshot().to_bytes()
        for length in {*range(0, len(data), 7), *range(60), len(data) - 1}:
            with pytest.raises(SnapshotCorrupt):
                Snapshot.from_bytes(data[:length])
        with pytest.raises(SnapshotCorrupt):
            Snapshot.from_bytes(data + b"\0")

    @every_toy
    def test_every_flipped_bit_is_found(self, env_id):
        data = started(env_id, steps=2).snapshot().to_bytes()
        for position in {*range(60), *range(60, len(data), 5)}:
            flipped = bytearray(data)
            flipped[position] ^= 1 << position % 8
            with pytest.raises(SnapshotCorrupt):
                Snapshot.from_bytes(bytes(flipped))
