"""Snapshots through stacks of wrappers: those of gym.make, those of users, and refused ones."""

from __future__ import annotations

import copy
import importlib
import tracemalloc
import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit, TransformReward
from toy_envs import Corridor, Dice
from traces import ACTIONS, IDS, LIMIT, TOYS, future, plain, started, trace

import sandboxgym
from sandboxgym import (
    ResetNeeded,
    Snapshot,
    SnapshotCorrupt,
    SnapshotMismatch,
    SnapshotNotSupported,
    SnapshotWrapper,
    WrapperCodec,
    register_wrapper,
    serialization,
)
from sandboxgym.registration import check_arguments
from sandboxgym.wrappers.codecs import CODECS

every_env = pytest.mark.parametrize("env_id", IDS)


@pytest.fixture(autouse=True)
def _no_warnings_and_no_codecs_left():
    known = dict(CODECS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    CODECS.clear()
    CODECS.update(known)


@every_env
def test_gymnasiums_checker_finds_nothing(env_id):
    check_env(gym.make(env_id).unwrapped)


class TestMadeByGymnasium:
    def test_the_stack_is_the_usual_one_with_snapshots_outermost(self):
        stack = str(gym.make("toys/Dice-v0"))
        assert stack.startswith("<SnapshotWrapper<TimeLimit<OrderEnforcing<PassiveEnvChecker<Dice")

    @pytest.mark.parametrize("fresh", [False, True])
    def test_the_time_limit_strikes_at_the_same_step(self, fresh):
        env = started("toys/Corridor-v0", steps=5, max_episode_steps=9)
        snap = env.snapshot()
        trace(env, [0, 0, 0])
        if fresh:
            env = gym.make("toys/Corridor-v0", max_episode_steps=9)
        env.restore(snap)
        assert [step[3] for step in trace(env, [0] * 9)] == [False, False, False, True]

    @every_env
    @pytest.mark.parametrize("steps", [0, 1, 2, 3])
    def test_a_fresh_environment_takes_over_without_warnings(self, env_id, steps):
        snap = started(env_id, steps=steps, render_mode=None).snapshot()
        env = gym.make(env_id, max_episode_steps=12)
        with pytest.raises(ResetNeeded):
            env.step(ACTIONS[env_id][0])
        env.restore(snap)
        assert future(env, env_id, steps) == future(started(env_id, steps=steps), env_id, steps)
        env.reset()

    @pytest.mark.parametrize("how", ["restore", "fork"])
    def test_the_passive_checker_goes_on_looking_for_reused_data(self, how):
        class Reusing(Dice):
            info: dict = {"shared": []}

            def step(self, action):
                return (*super().step(action)[:4], self.info)

        env = SnapshotWrapper(PassiveEnvChecker(Reusing()))
        env.reset(seed=1)
        snap, (child,) = env.snapshot(), env.fork(1)
        if how == "restore":
            child = SnapshotWrapper(PassiveEnvChecker(Reusing()))
            child.restore(snap)
        child.step(0)  # compared with a copy of what reset returned
        with pytest.warns(UserWarning, match="infos returned by .* share an object"):
            child.step(0)

    @every_env
    def test_forks_keep_the_stack_and_count_for_themselves(self, env_id):
        env = started(env_id, steps=2)
        children = env.fork(2)
        assert [str(child) for child in children] == [str(env)] * 2
        assert [child.spec for child in children] == [env.spec] * 2
        trace(children[0], ACTIONS[env_id][2:7])
        for one in (children[1], env):
            assert future(one, env_id, 2) == future(started(env_id, steps=2), env_id, 2)

    def test_the_passive_checker_compares_with_what_it_returned_itself(self):
        class Same(gym.ObservationWrapper):
            """Returns one and the same array, which a checker around it must find."""

            array = np.zeros(2, np.int64)

            def observation(self, observation):
                self.array[:] = observation
                return self.array

        make = lambda: PassiveEnvChecker(Same(Corridor()))  # noqa: E731
        env = make()
        env.reset(seed=1)
        snap, fresh = sandboxgym.snapshot(env), make()
        observation, _ = sandboxgym.restore(fresh, snap)
        assert plain(observation) == plain(fresh._previous_data[0])
        assert fresh._previous_data[0] is not observation
        with pytest.warns(UserWarning, match="share"):
            fresh.step(0)
            fresh.step(0)

    def test_ten_thousand_forks_fit_anywhere(self):
        env = started("sandboxgym/ALFWorld-v0", steps=3)
        env.fork(1)
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            children = env.fork(200)
            each = (tracemalloc.get_traced_memory()[0] - before) / len(children)
        finally:
            tracemalloc.stop()
        assert each < 10_000

    def test_the_spec_rebuilds_the_stack(self):
        env = gym.make("toys/Dice-v0")
        spec = gym.envs.registration.EnvSpec.from_json(gym.make("sandboxgym/ALFWorld-v0").spec.to_json())
        assert "SnapshotWrapper" in str(spec.make())
        assert str(env.spec.make()) == str(env)

    @pytest.mark.parametrize("env_id", TOYS)
    def test_deepcopy_is_a_fork_and_copy_is_refused(self, env_id):
        env = started(env_id, steps=3)
        twin = copy.deepcopy(env)
        trace(env, ACTIONS[env_id][3:6])
        assert future(twin, env_id, 3) == future(started(env_id, steps=3), env_id, 3)
        with pytest.raises(TypeError, match="fork"):
            copy.copy(env)


@every_env
def test_deepcopy_before_reset_is_a_fresh_environment_in_the_same_stack(env_id):
    env = gym.make(env_id, max_episode_steps=LIMIT)
    twin = copy.deepcopy(env)
    assert str(twin) == str(env)
    for ask in (twin.snapshot, lambda: twin.step(ACTIONS[env_id][0])):
        with pytest.raises(ResetNeeded):
            ask()
    env.reset(seed=9)
    for one in (twin, gym.make(env_id, max_episode_steps=LIMIT)):
        one.action_space.seed(3)
        one.observation_space.seed(3)
        one.reset(seed=3, options={"game": 0})
    assert future(twin, env_id) == future(started(env_id), env_id)


class Counting(gym.Wrapper):
    """Its count is in the observation: state that a snapshot must hold; its log is a mere record."""

    def __init__(self, env):
        super().__init__(env)
        self.action_space = gym.spaces.Discrete(50)
        self.count = 0
        self.log = []
        self.roll = env.unwrapped.step

    def step(self, action):
        self.count += 1
        self.log.append(self.count)
        _, *rest = self.env.step(action)
        return self.count, *rest


class Slotted(gym.Wrapper):
    """Keeps its state where ``vars`` does not see it."""

    __slots__ = ("hidden",)

    def __init__(self, env):
        super().__init__(env)
        self.hidden = 0


class Tagged(gym.Wrapper):
    """Has an attribute."""

    tag: object = 0


class Loud(gym.Wrapper):
    """Has nothing of its own."""

    def step(self, action):
        observation, reward, *rest = self.env.step(action)
        return observation, 10 * reward, *rest


def counting(env):
    register_wrapper(Counting, WrapperCodec(state=("count",)))
    return Counting(env)


def counted(*, steps=0):
    """Wrapped, then some steps into the episode of `ACTIONS`."""
    env = counting(started("toys/Dice-v0"))
    env.reset(seed=3)
    trace(env, ACTIONS["toys/Dice-v0"][:steps])
    return env


class Summing(gym.Wrapper):
    """Observes the sum of the observations so far; its codec says how to tell the last one from the state."""

    total = 0

    def reset(self, **arguments):
        observation, info = self.env.reset(**arguments)
        self.total = int(observation)
        return self.total, info

    def step(self, action):
        observation, *rest = self.env.step(action)
        self.total += int(observation)
        return self.total, *rest


class Shifted(gym.ObservationWrapper):
    """Stateless, and its output can be computed anew."""

    shift = 100

    def observation(self, observation):
        return observation + self.shift


PACKAGE = """
import gymnasium as gym
import sandboxgym

class Echo(gym.Wrapper):
    def __init__(self, env, times):
        super().__init__(env)
        self.times = times
        self.heard = []

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.heard = [*self.heard, observation][-self.times:]
        return observation, reward, terminated, truncated, {**info, "heard": list(self.heard)}

sandboxgym.register_wrapper(Echo, sandboxgym.WrapperCodec(state=("heard",), config=("times",), types={"heard": list}))
"""


class TestFreshness:
    """`restore` returns what the outermost wrapper returned last."""

    @staticmethod
    def check(env, steps=4):
        last = plain(env.reset(seed=1))
        for step in range(steps):
            snap = sandboxgym.snapshot(env)
            env.step(2)
            for one in (env, sandboxgym.fork(env, 1)[0]):
                for form in (snap, Snapshot.from_bytes(snap.to_bytes())):
                    assert plain(sandboxgym.restore(one, form)) == last, step
            transition = plain(env.step(0))
            last = [transition[0], transition[-1]]

    def test_of_a_wrapper_with_a_step_of_its_own(self):
        self.check(counting(started("toys/Dice-v0")))

    def test_of_a_wrapper_that_says_how_to_compute_it(self):
        observe = lambda wrapper, observation, info: (wrapper.total, info)  # noqa: E731
        register_wrapper(Summing, WrapperCodec(state=("total",), observe=observe))
        self.check(Summing(started("toys/Dice-v0")))
        assert not hasattr(Summing.step, "remembers")

    def test_of_a_stateless_observation_wrapper_nobody_registered(self):
        self.check(Shifted(counting(Shifted(started("toys/Dice-v0")))))

    def test_of_a_registered_subclass_of_one_that_remembers(self):
        class Twice(gym.wrappers.DelayObservation):
            def step(self, action):
                observation, *rest = super().step(action)
                return 2 * observation, *rest

        inherited = CODECS[gym.wrappers.DelayObservation]
        register_wrapper(Twice, inherited)
        self.check(Twice(started("toys/Dice-v0"), 1))

    def test_of_a_wrapper_in_a_package_of_its_own(self, tmp_path, monkeypatch):
        (tmp_path / "echoes").mkdir()
        (tmp_path / "echoes" / "__init__.py").write_text(PACKAGE)
        monkeypatch.syspath_prepend(tmp_path)
        echoes = importlib.import_module("echoes")
        self.check(echoes.Echo(started("toys/Dice-v0"), 2))
        snap = sandboxgym.snapshot(self.begun(echoes.Echo(started("toys/Dice-v0"), 2)))
        with pytest.raises(SnapshotMismatch, match=r"echoes\.Echo has .*3.*2"):
            sandboxgym.restore(self.begun(echoes.Echo(started("toys/Dice-v0"), 3)), snap)

    @staticmethod
    def begun(env):
        env.reset(seed=1)
        return env


class TestUsersWrappers:
    @pytest.mark.parametrize(
        ("wrap", "name"),
        [
            (Counting, "Counting may be stateful .*count"),
            (Slotted, "Slotted may be stateful .*hidden"),
        ],
        ids=["attributes", "slots"],
    )
    def test_a_stateful_wrapper_nobody_taught_us_is_refused_by_name(self, wrap, name):
        env = wrap(started("toys/Corridor-v0"))
        env.reset()
        for ask in (lambda: sandboxgym.snapshot(env), lambda: sandboxgym.fork(env, 1)):
            with pytest.raises(SnapshotNotSupported, match=name):
                ask()

    def test_a_subclass_does_not_inherit_its_parents_codec(self):
        class Longer(TimeLimit):
            pass

        with pytest.raises(SnapshotNotSupported, match="Longer"):
            sandboxgym.snapshot(Longer(started("toys/Dice-v0"), 99))

    @pytest.mark.parametrize("fresh", [False, True])
    def test_a_registered_wrapper_is_part_of_the_state(self, fresh):
        env = counting(started("toys/Dice-v0"))
        trace(env, [0, 0])
        snap = Snapshot.from_bytes(sandboxgym.snapshot(env).to_bytes())
        expected = trace(env, [0, 0])
        if fresh:
            env = counting(gym.make("toys/Dice-v0", max_episode_steps=12))
        sandboxgym.restore(env, snap)
        assert trace(env, [0, 0]) == expected
        assert expected[0][0] == 3

    @pytest.mark.parametrize("tag", [1, True, None, 1.0, -0.0, np.int64(1), [1], "1"], ids=repr)
    def test_an_attribute_is_captured_and_restored_as_what_it_is(self, tag):
        register_wrapper(Tagged, WrapperCodec(state=("tag",), remember=False))
        env = Tagged(started("toys/Dice-v0"))
        for other in (1, True, 0.0, 1.0):  # equal to some of them
            env.tag = other
            sandboxgym.snapshot(env)
        env.tag = tag
        snap = sandboxgym.snapshot(env)
        assert repr(snap.layers[0].state[0]) == repr({"tag": tag})
        env.tag = "another"
        sandboxgym.restore(env, snap)
        assert repr(env.tag) == repr(tag)

    def test_a_name_that_no_attribute_can_have_is_refused_by_the_first_snapshot(self):
        register_wrapper(Tagged, WrapperCodec(state=("tag.real",), remember=False))
        with pytest.raises(AttributeError, match=r"tag\.real"):  # a restore could not set it
            sandboxgym.snapshot(Tagged(started("toys/Dice-v0")))

    def test_wrappers_whose_state_is_a_few_numbers_share_layers_by_state(self):
        env, twin = started("toys/Dice-v0", steps=2), started("toys/Dice-v0", steps=2)
        one, two = env.snapshot(), twin.snapshot()
        assert [layer.name.rpartition(".")[2] for layer in one.layers] == [
            "TimeLimit",
            "OrderEnforcing",
            "PassiveEnvChecker",
        ]
        assert all(mine is theirs for mine, theirs in zip(one.layers, two.layers, strict=True))
        env.step(0)
        assert [layer is before for layer, before in zip(env.snapshot().layers, one.layers)] == [False, True, True]
        twin.env._max_episode_steps += 1
        with pytest.raises(SnapshotMismatch, match=r"13.*12"):
            twin.restore(two)

    def test_a_wrapper_with_nothing_of_its_own_needs_no_codec(self):
        env = Loud(started("toys/Corridor-v0", steps=2))
        snap = sandboxgym.snapshot(env)
        expected = trace(env, [1] * 9)
        assert expected[-1][1] == 10.0
        sandboxgym.restore(env, snap)
        assert trace(env, [1] * 9) == expected

    def test_forks_of_a_wrapped_stack_share_nothing_mutable(self):
        env = counting(Loud(started("toys/Dice-v0")))
        env.step(0)
        env.action_space.seed(3)
        one, other = sandboxgym.fork(env, 2)
        trace(one, [0, 0])
        assert (one.count, other.count, env.count) == (3, 1, 1)
        assert (one.log, other.log, env.log) == ([1, 2, 3], [1], [1])
        draws = [[each.action_space.sample() for _ in range(3)] for each in (one, other, env)]
        assert draws[0] == draws[1] == draws[2]
        assert one.roll.__self__ is one.unwrapped  # a reference to the base is one to the fork's

    def test_seeded_forks_draw_differently_from_the_wrappers_spaces_too(self):
        env = counting(started("toys/Dice-v0"))
        draws = [[child.action_space.sample() for _ in range(9)] for child in sandboxgym.fork(env, 3, seed=1)]
        assert len({tuple(one) for one in draws}) == 3
        again = sandboxgym.fork(env, 3, seed=1)
        assert [[child.action_space.sample() for _ in range(9)] for child in again] == draws

    def test_a_seeded_child_is_a_restore_with_the_siblings_seed(self):
        env = counted(steps=2)
        snap, children = sandboxgym.snapshot(env), sandboxgym.fork(env, 2, seed=8)
        for index, child in enumerate(children):
            sandboxgym.restore(env, snap, seed=sandboxgym.sibling_seed(8, index))
            assert future(env, "toys/Dice-v0", 2) == future(child, "toys/Dice-v0", 2)

    def test_a_fork_that_cannot_be_wrapped_leaves_no_child_open(self, monkeypatch):
        closed = []
        monkeypatch.setattr(Dice, "close", lambda self: closed.append(self), raising=False)
        env = counting(started("toys/Dice-v0", steps=2))
        env.generator = (i for i in range(3))
        with pytest.raises(SnapshotNotSupported, match=r"Counting holds, but its generator cannot be copied"):
            sandboxgym.fork(env, 3)
        assert len(closed) == 3
        assert env.unwrapped not in closed

    def test_wrapping_by_hand_works_without_gym_make(self):
        env = TimeLimit(OrderEnforcing(Corridor()), 6)
        env.reset()
        trace(env, [0, 0])
        snap, (child,) = sandboxgym.snapshot(env), sandboxgym.fork(env, 1)
        expected = trace(env, [0] * 9)
        assert len(expected) == 4
        assert trace(child, [0] * 9) == expected
        sandboxgym.restore(env, snap)
        assert trace(env, [0] * 9) == expected


def rebuilt(snap, change):
    """The snapshot with its wrappers' states changed and all checksums right."""
    header, content = serialization.loads(snap.to_bytes())
    layers = serialization.unpack(content["layers"])
    change(layers)
    content["layers"] = serialization.pack(layers)
    header["digest"] = serialization.content_digest(content)
    return Snapshot.from_bytes(serialization.dumps(header, content))


STREAM = {"bit_generator": "PCG64", "state": {}, "seed_sequence": None}
LIES = {
    "no state": lambda layers: layers[0].__setitem__(2, None),
    "no attributes": lambda layers: layers[0].__setitem__(2, [[], []]),
    "names for attributes": lambda layers: layers[0].__setitem__(2, [["_elapsed_steps"], []]),
    "another attribute": lambda layers: layers[0].__setitem__(2, [{"env": 3}, []]),
    "one more attribute": lambda layers: layers[0][2][0].__setitem__("env", 3),
    "steps that are text": lambda layers: layers[0][2][0].__setitem__("_elapsed_steps", "five"),
    "a flag that is a number": lambda layers: layers[2][2][0].__setitem__("checked_step", 1),
    "streams that are none": lambda layers: layers[1][2].__setitem__(1, 3),
    "settings that are an array": lambda layers: layers[0][1].__setitem__("_max_episode_steps", np.zeros(2)),
    "streams that are an array": lambda layers: layers[1][2].__setitem__(1, np.array(["a", "b"])),
    "a stream too many": lambda layers: layers[1][2].__setitem__(1, [STREAM]),
}


class TestErrors:
    @pytest.fixture
    def env(self):
        """Checked afterwards: what was refused left no trace."""
        env = started("toys/Dice-v0", steps=2)
        yield env
        assert future(env, "toys/Dice-v0", 2) == future(started("toys/Dice-v0", steps=2), "toys/Dice-v0", 2)

    @pytest.mark.parametrize("lie", LIES.values(), ids=list(LIES))
    def test_wrappers_states_that_lie(self, env, lie):
        snap = rebuilt(started("toys/Dice-v0", steps=5).snapshot(), lie)
        with pytest.raises((SnapshotCorrupt, SnapshotMismatch)):
            env.restore(snap)

    def test_a_bad_base_rolls_the_wrappers_back(self, env):
        header, content = serialization.loads(started("toys/Dice-v0", steps=5).snapshot().to_bytes())
        content["rng"] = serialization.pack({})
        header["digest"] = serialization.content_digest(content)
        with pytest.raises(SnapshotCorrupt):
            env.restore(Snapshot.from_bytes(serialization.dumps(header, content)))

    @pytest.mark.parametrize("thing", [None, "snapshot", {}])
    def test_what_is_not_a_snapshot(self, env, thing):
        with pytest.raises(TypeError, match="expected a Snapshot"):
            env.restore(thing)

    def test_another_time_limit(self, env):
        with pytest.raises(SnapshotMismatch, match=r"12.*99"):
            env.restore(started("toys/Dice-v0", max_episode_steps=99).snapshot())

    @pytest.mark.parametrize(
        "other",
        [
            lambda: sandboxgym.snapshot(Loud(started("toys/Dice-v0"))),
            lambda: started("toys/Dice-v0").unwrapped.snapshot(),
            lambda: started("toys/Dice-v0", disable_env_checker=True).snapshot(),
        ],
        ids=["more", "none", "fewer"],
    )
    def test_another_stack(self, env, other):
        with pytest.raises(SnapshotMismatch, match="wrapped in"):
            env.restore(other())

    def test_a_wrapped_snapshot_does_not_fit_the_bare_environment(self, env):
        for bare in (env.unwrapped.restore, lambda snap: sandboxgym.restore(env.unwrapped, snap)):
            with pytest.raises(SnapshotMismatch, match="TimeLimit"):
                bare(env.snapshot())

    def test_another_environment(self, env):
        with pytest.raises(SnapshotMismatch, match=r"Dice.*Corridor"):
            env.restore(started("toys/Corridor-v0").snapshot())

    @pytest.mark.parametrize("seed", [-1, "seed"])
    def test_what_is_not_a_seed(self, env, seed):
        with pytest.raises((ValueError, TypeError, gym.error.Error)):
            env.restore(env.snapshot(), seed=seed)

    def test_a_released_snapshot(self, env):
        snap = env.snapshot()
        snap.release()
        with pytest.raises(sandboxgym.SnapshotReleased):
            env.restore(snap)

    def test_a_plain_environment_is_refused_with_advice(self):
        env = gym.make("CartPole-v1")
        for ask in (lambda: sandboxgym.snapshot(env), lambda: sandboxgym.restore(env, None)):
            with pytest.raises(SnapshotNotSupported, match=r"CartPole.*SnapshotEnv"):
                ask()

    def test_what_is_not_an_environment(self):
        with pytest.raises(TypeError, match=r"expected a gymnasium\.Env, found str"):
            sandboxgym.snapshot("toys/Dice-v0")


class Proxy(Dice):
    """Stands for an environment with a wrapper in another process: its snapshots include the wrapper inside."""

    captures_stack = True

    def __init__(self):
        super().__init__()
        self.far = TimeLimit(Dice(), 12)

    def reset(self, *, seed=None, options=None):
        return self.far.reset(seed=seed, options=options)

    def step(self, action):
        return self.far.step(action)

    def snapshot(self):
        return sandboxgym.snapshot(self.far)

    def restore(self, snap, *, seed=None):
        return sandboxgym.restore(self.far, snap, seed=seed)

    def fork(self, k, *, seed=None):
        children = [Proxy() for _ in range(k)]
        for child, far in zip(children, sandboxgym.fork(self.far, k, seed=seed), strict=True):
            child.far = far
        return children


class TestProxies:
    """Their snapshots are those of the whole stack, whichever part of it is on this side."""

    @pytest.fixture
    def env(self):
        env = counting(Proxy())
        env.reset(seed=3)
        trace(env, [0, 1, 0])
        return env

    def test_the_layers_of_both_sides_are_captured_and_restored(self, env):
        snap, (child,) = sandboxgym.snapshot(env), sandboxgym.fork(env, 1)
        assert [layer.name.rpartition(".")[2] for layer in snap.layers] == ["Counting", "TimeLimit"]
        expected = trace(env, [0] * 12)
        local = counting(TimeLimit(Dice(), 12))  # all on one side
        fresh = counting(Proxy())
        for one in (env, fresh, local):
            assert plain(sandboxgym.restore(one, Snapshot.from_bytes(snap.to_bytes())))[0] == 3
            assert trace(one, [0] * 12) == expected
        assert trace(child, [0] * 12) == expected

    def test_a_snapshot_without_this_sides_layers_does_not_fit(self, env):
        before = env.count
        for other in (env.unwrapped.snapshot(), sandboxgym.snapshot(env.env)):
            with pytest.raises(SnapshotMismatch, match=r"wrapped in .*Counting.*TimeLimit"):
                sandboxgym.restore(env, other)
        with pytest.raises(TypeError, match="expected a Snapshot, found str"):
            sandboxgym.restore(env, "snapshot")
        assert env.count == before


# Typed, in one call.


def test_make_takes_ids_with_and_without_the_namespace():
    for id in ("ALFWorld-v0", "sandboxgym/ALFWorld-v0"):
        env = sandboxgym.make(id, max_episode_steps=3)
        assert isinstance(env, sandboxgym.SnapshotWrapper) and env.spec.id == "sandboxgym/ALFWorld-v0"
        env.reset(seed=0)
        assert isinstance(env.snapshot(), sandboxgym.Snapshot)
        (child,) = env.fork(1)
        assert isinstance(child, sandboxgym.SnapshotWrapper)
        child.close(), env.close()


def test_make_refuses_what_has_no_snapshots():
    with pytest.raises(TypeError, match=r"CartPole-v1: expected an environment with snapshot, restore and fork"):
        sandboxgym.make("CartPole-v1")
    with pytest.raises(gym.error.NameNotFound, match="ALFWorld"):
        sandboxgym.make("sandboxgym/ALFWord-v0")


class TestMethodsThroughAForeignWrapper:
    """Gymnasium's wrappers pass no methods on: the error says what to call instead."""

    @pytest.mark.parametrize(("name", "arguments"), [("snapshot", ()), ("restore", (None,)), ("fork", (2,))])
    def test_the_error_names_the_function(self, name, arguments):
        env = TransformReward(started("toys/Dice-v0"), float)
        with pytest.raises(AttributeError, match=rf"no attribute '{name}': call sandboxgym\.{name}\(env"):
            getattr(env, name)(*arguments)
        assert not hasattr(env, name) and not env.has_wrapper_attr("no_such_attribute")
        assert not isinstance(env, sandboxgym.SupportsSnapshot)

    def test_other_errors_stay_as_they_were(self):
        class Broken(gym.Wrapper):
            @property
            def gear(self):
                raise AttributeError("the gear is stuck")

        env = Broken(started("toys/Dice-v0"))
        with pytest.raises(AttributeError, match="the gear is stuck"):
            _ = env.gear
        with pytest.raises(AttributeError, match="'Broken' object has no attribute 'wheel'"):
            _ = env.wheel
        with pytest.raises(AttributeError, match="no attribute"):
            _ = Broken.__new__(Broken).env

    def test_a_wrapper_may_have_one_of_its_own(self):
        class Camera(gym.Wrapper):
            def snapshot(self):
                return "click"

        assert Camera(started("toys/Dice-v0")).snapshot() == "click"
        env = TransformReward(started("toys/Dice-v0"), float)
        env.snapshot = "mine"
        assert env.snapshot == "mine" and copy.copy(env).snapshot == "mine"


def test_an_argument_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(TypeError, match=r"no argument 'gmes'; did you mean 'games'\? There are games, task_types"):
        sandboxgym.make("ALFWorld-v0", gmes="train")
    with pytest.raises(TypeError, match=r"no argument 'colour'\. There are games"):
        sandboxgym.make("sandboxgym/ALFWorld-v0", colour="red")
    # what gym.make itself takes, and what another package's environment may do with others, is no business of ours
    sandboxgym.make("ALFWorld-v0", max_episode_steps=3, disable_env_checker=True).close()
    check_arguments("CartPole-v1", {"sutton_barto_reward": True})
    check_arguments("no-such-env", {"x": 1})
