"""`SnapshotVectorEnv`, and what `gym.make_vec` does with the same environments."""

from __future__ import annotations

import os
import signal

import gymnasium as gym
import numpy as np
import pytest
import traces
import worker_envs
from gymnasium.vector import AutoresetMode
from worker_envs import Said, Trouble

import sandboxgym
from sandboxgym.workers import infos as infos_module
from sandboxgym.workers.env_host import CallTimedOut, EnvFailure, WorkerDied
from sandboxgym.workers.infos import batch_infos
from sandboxgym.workers.vector import EpisodeOver, NotEnoughIdle, SnapshotVectorEnv

worker_envs.register()
MODES = ("sync", "thread", "process")


@pytest.fixture
def vector():
    made = []

    def make(env="toys/Trouble-v0", n=3, mode="sync", **arguments):
        made.append(SnapshotVectorEnv.make(env, n, mode, **arguments))
        return made[-1]

    yield make
    for vec in made:
        vec.close()


# One thing, three modes.


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("env_id", traces.TOYS)
def test_every_mode_gives_what_single_envs_give(vector, mode, env_id):
    n, singles = 3, [gym.make(env_id) for _ in range(3)]
    vec = vector(env_id, n, mode, workers=2)
    observations, _ = vec.reset(seed=5)
    want = [env.reset(seed=5 + i) for i, env in enumerate(singles)]
    assert traces.plain(list(observations)) == traces.plain([np.asarray(observation) for observation, _ in want])
    assert traces.plain(vec.infos_list) == traces.plain([info for _, info in want])
    for action in traces.ACTIONS[env_id][:5]:
        observations, rewards, terminated, truncated, _ = vec.step([action] * n)
        steps = [env.step(action) for env in singles]
        assert traces.plain(list(observations)) == traces.plain([np.asarray(step[0]) for step in steps])
        assert rewards.tolist() == [step[1] for step in steps]
        assert terminated.tolist() == [step[2] for step in steps]
        assert truncated.tolist() == [step[3] for step in steps]
        assert traces.plain(vec.infos_list) == traces.plain([step[4] for step in steps])
    for env, snap in zip(singles, vec.snapshot()):
        future = traces.trace(env, traces.ACTIONS[env_id][5:])
        env.restore(snap)
        assert traces.trace(env, traces.ACTIONS[env_id][5:]) == future


def test_snapshots_go_from_every_mode_to_every_other_and_to_single_envs(vector):
    vecs = [vector("toys/Dice-v0", 2, mode) for mode in MODES]
    single = gym.make("toys/Dice-v0")
    single.reset(seed=1)
    single.step(0)
    snaps = [single.snapshot()]
    for i, vec in enumerate(vecs):
        vec.reset(seed=10 * i)
        vec.step([0, 1])
        snaps += vec.snapshot()
    for snap in snaps:
        observation, _ = single.restore(snap, seed=7)
        want = [observation] + [single.step(0)[0] for _ in range(3)]
        for vec in vecs:
            observations, _ = vec.restore({0: snap, 1: snap}, seeds={0: 7, 1: 7})
            found = [observations] + [vec.step([0, 0])[0] for _ in range(3)]
            assert [row.tolist() for row in found] == [[value, value] for value in want]


@pytest.mark.parametrize("mode", MODES)
def test_it_is_gymnasiums_vector_env(vector, mode):
    vec = vector("toys/Corridor-v0", 4, mode, workers=2, length=7)
    assert isinstance(vec, gym.vector.VectorEnv)
    assert vec.metadata["autoreset_mode"] is AutoresetMode.DISABLED
    assert vec.num_envs == 4
    observations, _ = vec.reset(seed=0)
    assert vec.observation_space.contains(observations)
    assert vec.single_observation_space == gym.make("toys/Corridor-v0", length=7).observation_space
    observations, rewards, *_ = vec.step(vec.action_space.sample())
    assert observations.shape == (4, 2)
    assert rewards.dtype == np.float64
    assert vec.get_attr("length") == (7,) * 4
    recorded = gym.wrappers.vector.RecordEpisodeStatistics(vec)
    recorded.reset(seed=0)
    recorded.step([1] * 4)


# Text.


@pytest.mark.parametrize("mode", MODES)
def test_observations_are_what_the_environments_said_last(vector, mode):
    vec = vector(n=2, mode=mode)
    vec.reset(seed=0, options=[{"task": "one"}, {"task": "two"}])
    assert vec.observations == ("one 1", "two 1")
    words = ("", "new\nline \0", "\U0001f600 קו \u202e", "ｗｉｄｅ" * 1000)
    for count, word in enumerate(words, 2):
        observations, *_ = vec.step([word, word + "!"])
        assert observations == (f"{word} {count}", f"{word}! {count}")


@pytest.mark.parametrize("mode", MODES)
def test_text_spaces_of_gymnasium_are_not_stale(vector, mode):
    vec = vector("toys/Said-v0", 2, mode)
    assert vec.reset(seed=0)[0] == ("begin", "begin")
    assert vec.step(["a", "b"])[0] == ("a1", "b1")
    assert vec.step(["a", "b"])[0] == ("a2", "b2")


def test_gymnasium_returns_stale_text_from_shared_memory():
    """If this fails, Gymnasium has mended it: say so in docs/vector.md."""
    vec = gym.make_vec("toys/Said-v0", 2, vectorization_mode="async", vector_kwargs={"context": "spawn"})
    try:
        first, _ = vec.reset(seed=0)
        second, *_ = vec.step(["a", "b"])
    finally:
        vec.close()
    assert first == second != ("a1", "b1")


# Restoring what has ended.


@pytest.mark.parametrize("mode", MODES)
def test_a_finished_environment_is_restored_and_goes_on(vector, mode):
    vec = vector("toys/Said-v0", 2, mode)
    vec.reset(seed=0)
    vec.step(["a", "b"])
    snap = vec.snapshot([0])[0]
    for _ in range(2):
        _, _, terminated, *_ = vec.step(["a", "b"])
    assert terminated.all()
    ended = vec.snapshot([1])[0]
    observations, _ = vec.restore({0: snap, 1: snap})
    assert observations == ("a1", "a1")
    assert vec.step(["x", "y"])[0] == ("x2", "y2"), "the action is not dropped"
    vec.restore({1: ended})
    assert vec.observations == ("x2", "b3")


def test_gymnasium_drops_the_action_after_such_a_restore():
    """If this fails, Gymnasium has mended it: say so in docs/vector.md."""
    vec = gym.make_vec("toys/Said-v0", 1, vectorization_mode="sync")
    vec.reset(seed=0)
    vec.step(["a"])
    snap = vec.call("snapshot")[0]
    vec.step(["a"])
    assert vec.step(["a"])[2].all()
    vec.call("restore", snap)
    assert vec.step(["x"])[0] == ("begin",)
    vec.close()


def test_gymnasium_asserts_after_it_without_autoreset():
    off = {"autoreset_mode": "Disabled"}
    vec = gym.make_vec("toys/Said-v0", 1, vectorization_mode="sync", vector_kwargs=off)
    vec.reset(seed=0)
    snap = vec.call("snapshot")[0]
    for _ in range(3):
        vec.step(["a"])
    vec.call("restore", snap)
    with pytest.raises(AssertionError):
        vec.step(["x"])
    vec.close()


def test_make_vec_without_shared_memory_steps_and_snapshots():
    """The statements of docs/vector.md hold: the same actions everywhere, snapshots of all by one call."""
    for mode, settings in (("sync", {}), ("async", {"shared_memory": False, "context": "spawn"})):
        vec = gym.make_vec("toys/Said-v0", 2, vectorization_mode=mode, vector_kwargs=settings)
        try:
            assert vec.reset(seed=0)[0] == ("begin", "begin")
            assert vec.step(("a", "b"))[0] == ("a1", "b1")
            snaps = vec.call("snapshot")
            vec.step(("a", "b"))
            assert [observation for observation, _ in vec.call("restore", snaps[1])] == ["b1", "b1"]
            assert vec.step(("x", "y"))[0] == ("x2", "y2")
        finally:
            vec.close()


def test_make_vec_refuses_shared_memory_for_our_text_space():
    with pytest.raises(ValueError, match="shared_memory"):
        gym.make_vec("toys/Trouble-v0", 2, vectorization_mode="async", vector_kwargs={"context": "spawn"})


# Masks.


@pytest.mark.parametrize("mode", MODES)
def test_masks_leave_the_others_as_they_were(vector, mode):
    vec = vector(mode=mode, workers=2)
    vec.reset(seed=0)
    vec.step(["a", "b", "c"])
    observations, rewards, _, _, infos = vec.step(["x", None, "z"], mask=[True, False, True])
    assert observations == ("x 3", "b 2", "z 3")
    assert rewards.tolist() == [3.0, 2.0, 3.0]
    assert infos["_count"].tolist() == [True, False, True]
    assert [info["count"] for info in vec.infos_list] == [2, 1, 2]
    observations, infos = vec.reset(mask=np.array([False, True, False]), options={"task": "again"})
    assert observations == ("x 3", "again 1", "z 3")
    assert infos["_count"].tolist() == [False, True, False]
    same, _ = vec.reset(options={"reset_mask": np.array([True, False, False]), "task": "gym"})
    assert same == ("gym 1", "again 1", "z 3")
    with pytest.raises(ValueError, match="3 bools"):
        vec.step(["a"] * 3, mask=[0, 2])


class Odd(gym.Env):
    """Its action is what it answers; it empties the list of all actions."""

    observation_space = action_space = gym.spaces.Discrete(2)
    actions: list = []

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        self.actions.clear()
        return 0, *action, {}


def test_odd_rewards_flags_and_lists_change_no_later_step():
    """A masked step finds what a step of all environments in this thread kept."""
    vec = SnapshotVectorEnv([Odd, Odd])
    vec.reset(seed=0)
    reward, flag = np.array(0.5), np.array(False)
    Odd.actions = [(reward, [], flag), (0.25, (), False)]
    _, rewards, terminated, truncated, _ = vec.step(Odd.actions)
    assert rewards.tolist() == [0.5, 0.25] and not terminated.any() and not truncated.any()
    with pytest.raises(ValueError):
        vec.step([(0.5, [0], False), (0.25, False, False)])
    assert vec.active.tolist() == [True, True]
    reward[...], flag[...] = 99, True
    _, rewards, terminated, truncated, _ = vec.step([None, (np.float32(2), 1, 0)], mask=np.array([False, True]))
    assert rewards.tolist() == [0.5, 2.0]
    assert terminated.tolist() == [False, True] and truncated.tolist() == [False, False]
    assert vec.active.tolist() == [True, False]


def test_what_is_not_active_is_not_stepped(vector):
    vec = vector()
    assert vec.observations == ("", "", "")
    with pytest.raises(EpisodeOver, match=r"\[0, 1, 2\]"):
        vec.step(["a"] * 3)
    vec.reset(seed=0)
    _, _, terminated, *_ = vec.step(["a", "end", "c"])
    assert terminated.tolist() == [False, True, False]
    assert vec.active.tolist() == [True, False, True]
    with pytest.raises(EpisodeOver, match=r"environments \[1\]"):
        vec.step(["a"] * 3)
    assert vec.observations == ("a 2", "end 2", "c 2"), "none was stepped"
    observations, _, terminated, *_ = vec.step(["a"] * 3, mask=vec.active)
    assert observations == ("a 3", "end 2", "a 3")
    assert terminated[1], "its last transition stays in the batch"


@pytest.mark.parametrize("mode", MODES)
def test_autoreset_in_the_same_step_as_gymnasium_does_it(vector, mode):
    vec = vector(n=2, mode=mode, autoreset=True)
    assert vec.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    theirs = gym.make_vec("toys/Trouble-v0", 2, vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP})
    for each in (vec, theirs):
        each.reset(seed=0)
    for actions in (("a", "b"), ("end", "b"), ("a", "end"), ("end", "end")):
        mine, other = vec.step(actions), theirs.step(actions)
        assert traces.plain(mine[:4]) == traces.plain(other[:4])
        assert mine[4].keys() == other[4].keys()
        for key in ("final_obs", "_final_obs", "count", "_count"):
            assert traces.plain(mine[4].get(key)) == traces.plain(other[4].get(key))
        if "final_info" in other[4]:
            assert traces.plain(mine[4]["final_info"]["count"]) == traces.plain(other[4]["final_info"]["count"])
    theirs.close()


# Forks.


@pytest.mark.parametrize("mode", MODES)
def test_forks_take_idle_slots_and_are_the_forks_of_a_single_env(vector, mode):
    vec = vector("toys/Dice-v0", 4, mode, workers=2)
    single = gym.make("toys/Dice-v0")
    single.reset(seed=1)
    single.step(0)
    snap = single.snapshot()
    assert vec.fork(snap, 3, seed=9) == [0, 1, 2]
    assert vec.observations.tolist() == [single.unwrapped.total] * 3 + [0]
    mask = vec.active
    assert mask.tolist() == [True] * 3 + [False]
    want = [[child.step(0)[0] for _ in range(2)] for child in single.fork(3, seed=9)]
    found = [vec.step([0] * 4, mask)[0][:3].tolist() for _ in range(2)]
    assert found == [list(column) for column in zip(*want)]
    with pytest.raises(NotEnoughIdle, match=r"expected 2 idle environments to fork onto, found 1: \[3\]"):
        vec.fork(snap, 2)
    vec.idle([1])
    assert vec.fork(snap, 2) == [1, 3]


@pytest.mark.parametrize("mode", ["sync", "process"])
def test_a_fork_that_fails_leaves_the_slots_idle(vector, mode):
    vec = vector(n=2, mode=mode)
    other = gym.make("toys/Dice-v0")
    other.reset(seed=1)
    with pytest.raises(sandboxgym.SnapshotMismatch):
        vec.fork(other.snapshot(), 2)
    assert not vec.active.any()


# Failures.


@pytest.mark.parametrize("mode", MODES)
def test_an_exception_ends_one_episode_only(vector, mode):
    vec = vector(mode=mode, workers=2)
    vec.reset(seed=0)
    observations, rewards, terminated, truncated, infos = vec.step(["a", "raise", "c"])
    assert observations == ("a 2", "start 1", "c 2")
    assert rewards.tolist() == [2, 0, 2]
    assert (terminated.tolist(), truncated.tolist()) == ([False] * 3, [False, True, False])
    assert infos["_error"].tolist() == [False, True, False]
    failure = infos["error"][1]
    assert isinstance(failure, EnvFailure)
    assert (failure.index, failure.during) == (1, "step")
    assert "RuntimeError: the sandbox is gone" in str(failure)
    assert isinstance(failure.__cause__, RuntimeError)
    assert ("worker_envs.py" in failure.remote_traceback) is (mode == "process")
    assert vec.errors == {1: failure}
    assert vec.step(["a"] * 3, mask=vec.active)[0] == ("a 3", "start 1", "a 3")
    vec.reset(mask=[False, True, False])
    assert not vec.errors
    vec.step(["a"] * 3)


@pytest.mark.parametrize("mode", ["sync", "process"])
def test_a_failed_reset_or_restore_is_reported(vector, mode):
    vec = vector(n=2, mode=mode)
    _, infos = vec.reset(options=[{"do": "raise"}, None], seed=0)
    assert infos["_error"].tolist() == [True, False]
    assert vec.active.tolist() == [False, True]
    vec.reset(seed=0)
    other = gym.make("toys/Dice-v0")
    other.reset(seed=1)
    _, infos = vec.restore({1: other.snapshot()})
    assert isinstance(infos["error"][1].__cause__, sandboxgym.SnapshotMismatch)
    assert vec.active.tolist() == [True, False]


def test_raising_instead_of_reporting(vector):
    vec = vector(on_error="raise")
    vec.reset(seed=0)
    with pytest.raises(EnvFailure, match="environment 1 failed in step"):
        vec.step(["a", "raise", "c"])
    assert vec.observations == ("a 2", "start 1", "c 2"), "the others were stepped"


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_one_that_hangs_does_not_stop_the_others(vector, mode):
    vec = vector(mode=mode, timeout=3.0, reset_timeout=120)
    vec.reset(seed=0)
    snap = vec.snapshot([1])[0]
    vec.step(["a", "b", "c"])
    observations, _, _, truncated, infos = vec.step(["a", "hang", "c"])
    assert truncated.tolist() == [False, True, False]
    assert isinstance(infos["error"][1], CallTimedOut)
    assert infos["recovered"][1] == snap.id
    assert observations == ("a 3", "start 1", "c 3")
    assert vec.step(["a", "on", "c"])[0] == ("a 4", "on 2", "c 4")


def test_a_timeout_is_refused_where_it_cannot_be_kept(vector):
    with pytest.raises(ValueError, match="timeout"):
        vector(timeout=1.0)


def test_killed_workers_are_replaced_and_their_envs_taken_back(vector):
    """Worker 0 has environments 0 and 1, of which only 0 was captured."""
    vec = vector(n=4, mode="process", workers=2)
    vec.reset(seed=0)
    vec.step(["a", "b", "c", "d"])
    snap = vec.snapshot([0])[0]
    expected = vec.step(["next"] * 4)[4]["draw"][0]
    snap.release()  # the vector environment keeps its own
    os.kill(vec.pids[0], signal.SIGKILL)
    observations, rewards, _, truncated, infos = vec.step(["x"] * 4)
    assert observations == ("a 2", "next 3", "x 4", "x 4")
    assert truncated.tolist() == [True, True, False, False]
    assert rewards.tolist() == [0, 0, 4, 4]
    assert [type(error) for error in infos["error"]] == [WorkerDied, WorkerDied, type(None), type(None)]
    assert infos["recovered"].tolist() == [snap.id, None, None, None]
    assert infos["count"].tolist() == [1, 0, 3, 3]
    assert vec.active.tolist() == [True, False, True, True]
    _, _, _, truncated, infos = vec.step(["next"] * 4, mask=vec.active)
    assert infos["draw"][0] == expected, "it goes on exactly from there"
    assert truncated.tolist() == [False, True, False, False]
    vec.reset(mask=[False, True, False, False])
    vec.step(["all"] * 4)


def test_a_worker_that_dies_in_reset_or_restore_gets_a_second_try(vector):
    vec = vector(n=2, mode="process", workers=1)
    vec.reset(seed=0)
    snap = vec.snapshot([0])[0]
    os.kill(vec.pids[0], signal.SIGKILL)
    observations, infos = vec.restore({0: snap, 1: snap})
    assert observations == ("start 1", "start 1")
    assert "error" not in infos
    os.kill(vec.pids[0], signal.SIGKILL)
    _, infos = vec.reset(seed=1, mask=[False, True])
    assert infos["_error"].tolist() == [True, False], "environment 0 was taken back, which its owner must know"
    assert infos["recovered"][0] == snap.id
    _, infos = vec.reset(options={"do": "die"})
    assert [type(error) for error in infos["error"]] == [WorkerDied, WorkerDied]
    vec.reset(seed=0)
    assert vec.step(["a", "b"])[0] == ("a 2", "b 2")


def test_checkpoints_of_its_own(vector):
    vec = vector(n=2, mode="process", checkpoint_every=2)
    vec.reset(seed=0)
    for word in ("one", "two", "three"):
        vec.step([word] * 2)
    observations, _, _, truncated, _ = vec.step(["die", "four"])
    assert observations == ("two 3", "four 5")
    assert truncated.tolist() == [True, False]
    vec.reset(seed=0)
    assert vec.step(["die", "x"])[0] == ("start 1", "x 2"), "never back into the episode before"


def test_a_snapshot_of_a_dead_environment_raises(vector):
    vec = vector(n=2, mode="process")
    with pytest.raises(sandboxgym.ResetNeeded):
        vec.snapshot()
    vec.reset(seed=0)
    os.kill(vec.pids[1], signal.SIGKILL)
    with pytest.raises(WorkerDied):
        vec.snapshot()
    assert vec.active.tolist() == [True, False]
    assert list(vec.errors) == [1]


# The rest.


@pytest.mark.parametrize("mode", MODES)
def test_making_fails_as_a_whole(mode):
    def fails():
        raise RuntimeError("no such sandbox")

    with pytest.raises(RuntimeError, match="no such sandbox"):
        SnapshotVectorEnv([Trouble, fails], mode)
    with pytest.raises(ValueError, match="spaces"):
        SnapshotVectorEnv([Trouble, Said], mode)


@pytest.mark.parametrize("mode", MODES)
def test_close(vector, mode):
    vec = vector(n=2, mode=mode)
    vec.reset(seed=0)
    vec.close()
    vec.close()
    with pytest.raises(gym.error.ClosedEnvironmentError):
        vec.reset()


def test_infos_in_gymnasiums_format_but_never_cast():
    column = batch_infos({0: {"a": 1, "n": {"x": 1.5}}, 2: {"a": 2, "s": "text"}}, 3)
    assert column["a"].tolist() == [1, 0, 2]
    assert column["_a"].tolist() == [True, False, True]
    assert column["n"]["x"].tolist() == [1.5, 0, 0]
    assert column["s"].tolist() == [None, None, "text"]
    mixed = batch_infos({0: {"a": 1, "b": 2**80, "c": np.zeros(2)}, 1: {"a": 0.5, "b": 1, "c": np.zeros(3)}}, 2)
    assert mixed["a"].tolist() == [1, 0.5]
    assert mixed["b"].tolist() == [2**80, 1]
    assert [value.shape for value in mixed["c"]] == [(2,), (3,)]


VALUES = {
    "bool": [True, False],
    "int": [1, -3],
    "long": [2**63, 1],
    "float": [0.5, float("nan")],
    "str": ["a", "bc"],
    "list": [["a", "b"], ["c", "d"]],
    "list of lists": [[["a"]], [["b"]]],
    "tuple": [(1, 2), (3, 4)],
    "none": [None, None],
    "mixed": [1, "a"],
    "mixed numbers": [1, 0.5],
    "array": [np.zeros(2), np.ones(2)],
    "arrays of two shapes": [np.zeros(2), np.ones(3)],
    "scalar": [np.float32(1), np.float32(2)],
    "dict": [{"x": 1, "y": "a"}, {"x": 2, "y": "b"}],
    "final_obs": ["a", "b"],
}


def as_plain(batch):
    return {
        key: as_plain(column) if isinstance(column, dict) else (column.dtype, column.shape, repr(column.tolist()))
        for key, column in batch.items()
    }


ONE_BY_ONE = {"long", "mixed", "mixed numbers"}
"""Values of which a column cannot be made together with others."""


@pytest.mark.parametrize(
    "left_out", [set(), ONE_BY_ONE, *({name} for name in VALUES), *(ONE_BY_ONE | {n} for n in VALUES)]
)
def test_infos_of_all_environments_are_batched_as_those_of_some(left_out):
    names = [name for name in VALUES if name not in left_out]
    infos = {index: {name: VALUES[name][index] for name in names} for index in (0, 1)}
    backwards = {1: dict(reversed(infos[1].items())), 0: infos[0]}
    whole, slowly = batch_infos(infos, 2), batch_infos(backwards, 2)
    assert list(whole) == [key for name in names for key in (name, f"_{name}")]
    assert as_plain(whole) == {key: as_plain(slowly)[key] for key in whole}
    assert (infos_module._equal_batch([*infos.values()]) is not None) == (left_out >= ONE_BY_ONE)
    whole["_bool" if "bool" not in left_out else "_int"][0] = False  # no two columns share their memory
    assert sum(not all(column) for key, column in whole.items() if key[0] == "_") == 1


@pytest.mark.parametrize("mode", MODES)
def test_alfworld_by_its_id(vector, mode):
    vec = vector("sandboxgym/ALFWorld-v0", 2, mode, max_episode_steps=traces.LIMIT)
    vec.reset(seed=3, options={"task": 0})
    for action in traces.ACTIONS["sandboxgym/ALFWorld-v0"][:3]:
        observations, _, _, _, infos = vec.step([action, action])
    single = traces.started("sandboxgym/ALFWorld-v0", steps=3)
    assert vec.snapshot([0])[0].header.config == single.snapshot().header.config
    assert observations[0] == observations[1] == single.unwrapped.last.observation
    assert infos["admissible_commands"][1] == single.unwrapped.last.info["admissible_commands"]
