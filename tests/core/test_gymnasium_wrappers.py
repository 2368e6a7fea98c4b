"""Snapshots through every wrapper that Gymnasium exports, compared with runs without snapshots."""

from __future__ import annotations

import copy
import importlib.util
import sys
import types
import warnings

import gymnasium as gym
import numpy as np
import pytest
from components import missing
from gymnasium import wrappers as w
from toy_envs import Drift
from traces import fresh_interpreter, plain

import sandboxgym
from sandboxgym import Snapshot, SnapshotCorrupt, SnapshotMismatch, SnapshotNotSupported, serialization
from sandboxgym.wrappers import gymnasium as gymnasium_codecs
from sandboxgym.wrappers.codecs import CODECS
from sandboxgym.wrappers.stack import _capture, _simple, _stack

STEPS = 30


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*precision lowered by casting")  # Gymnasium's own, of its bounds
        warnings.filterwarnings("ignore", message="overflow encountered in cast")
        yield


def crop(image, size, interpolation=None):
    """Stands in for OpenCV's ``resize``."""
    return image[: size[1], : size[0]].copy()


@pytest.fixture(autouse=True)
def _opencv(monkeypatch):
    monkeypatch.setitem(sys.modules, "cv2", types.SimpleNamespace(resize=crop, INTER_AREA=3))


class Arcade(Drift):
    """Has what `AtariPreprocessing` asks of an emulator."""

    _frameskip = 1

    def __init__(self):
        super().__init__("image")

    @property
    def ale(self):
        return self

    def lives(self):
        return 3 - min(self.steps // 9, 2)

    def get_action_meanings(self):
        return ["NOOP"]

    def getScreenGrayscale(self, buffer):
        buffer[:] = self.render()[..., 0]


def limited(env, steps=11):
    return w.TimeLimit(env, steps)


def drift(**options):
    return Drift(**options)


def frames():
    return drift(render_mode="rgb_array")


def doubled(observation):
    return 2 * observation


def inverted(action):
    return 3 - action


CASES = {
    "TimeLimit": lambda: limited(drift(), 4),
    "OrderEnforcing": lambda: w.OrderEnforcing(drift()),
    "PassiveEnvChecker": lambda: w.PassiveEnvChecker(drift()),
    "Autoreset": lambda: w.Autoreset(limited(drift(), 3)),
    "RecordEpisodeStatistics": lambda: w.RecordEpisodeStatistics(limited(drift(), 5)),
    "FrameStackObservation": lambda: w.FrameStackObservation(drift(), 3),
    "FrameStackObservation, zero": lambda: w.FrameStackObservation(drift(observe="dict"), 3, padding_type="zero"),
    "DelayObservation": lambda: w.DelayObservation(drift(), 2),
    "DelayObservation, dict": lambda: w.DelayObservation(drift(observe="dict"), 3),
    "TimeAwareObservation": lambda: w.TimeAwareObservation(limited(drift())),
    "TimeAwareObservation, dict": lambda: w.TimeAwareObservation(
        limited(drift(observe="dict")), flatten=False, normalize_time=True
    ),
    "NormalizeObservation": lambda: w.NormalizeObservation(drift()),
    "NormalizeReward": lambda: w.NormalizeReward(drift()),
    "StickyAction": lambda: w.StickyAction(drift(), 0.4, (1, 3)),
    "StickyAction, boxed": lambda: w.StickyAction(drift(boxed=True), 0.4),
    "MaxAndSkipObservation": lambda: w.MaxAndSkipObservation(drift(), 3),
    "RenderCollection": lambda: w.RenderCollection(frames(), pop_frames=False),
    "AtariPreprocessing": lambda: w.AtariPreprocessing(
        Arcade(), noop_max=5, frame_skip=2, screen_size=(6, 4), terminal_on_life_loss=True
    ),
    "RepeatAction": lambda: w.RepeatAction(drift(), 2),
    "TransformObservation": lambda: w.TransformObservation(drift(), doubled, None),
    "DiscretizeObservation": lambda: w.DiscretizeObservation(drift(), 7),
    "DtypeObservation": lambda: w.DtypeObservation(drift(), np.float64),
    "FilterObservation": lambda: w.FilterObservation(drift(observe="dict"), ["point"]),
    "FlattenObservation": lambda: w.FlattenObservation(drift(observe="dict")),
    "GrayscaleObservation": lambda: w.GrayscaleObservation(drift(observe="image")),
    "RescaleObservation": lambda: w.RescaleObservation(drift(), -1.0, 1.0),
    "ReshapeObservation": lambda: w.ReshapeObservation(drift(), (2, 1)),
    "ResizeObservation": lambda: w.ResizeObservation(drift(observe="image"), (3, 3)),
    "AddRenderObservation": lambda: w.AddRenderObservation(frames(), render_only=False),
    "AddRenderObservation, only": lambda: w.AddRenderObservation(frames()),
    "AddWhiteNoise": lambda: w.AddRenderObservation(w.AddWhiteNoise(frames(), 0.5)),
    "ObstructView": lambda: w.AddRenderObservation(w.ObstructView(frames(), 0.5, 2)),
    "TransformAction": lambda: w.TransformAction(drift(), inverted, gym.spaces.Discrete(4)),
    "ClipAction": lambda: w.ClipAction(drift(boxed=True)),
    "DiscretizeAction": lambda: w.DiscretizeAction(drift(boxed=True), 3),
    "RescaleAction": lambda: w.RescaleAction(drift(boxed=True), -0.5, 0.5),
    "TransformReward": lambda: w.TransformReward(drift(), doubled),
    "ClipReward": lambda: w.ClipReward(drift(), -1, 0.5),
    "stack: statistics of normalized frames": lambda: w.RecordEpisodeStatistics(
        w.NormalizeReward(w.FrameStackObservation(w.NormalizeObservation(limited(drift())), 2))
    ),
    "stack: delayed, timed, sticky": lambda: w.DelayObservation(
        w.FlattenObservation(w.TimeAwareObservation(limited(w.StickyAction(drift(), 0.3)), flatten=False)), 1
    ),
    "stack: skipped, repeated, reset by itself": lambda: w.Autoreset(
        w.RecordEpisodeStatistics(w.MaxAndSkipObservation(limited(w.RepeatAction(drift(), 2)), 2))
    ),
    "stack: made by gym.make": lambda: w.FrameStackObservation(
        w.RescaleObservation(gym.make("toys/Drift-v0", max_episode_steps=7), 0.0, 1.0), 4
    ),
}
every_wrapper = pytest.mark.parametrize("make", CASES.values(), ids=list(CASES))


def timeless(value):
    """`plain`, without the wall-clock times that `RecordEpisodeStatistics` reports."""
    value = plain(value)
    info = value[-1]
    if "episode" in info:
        assert info["episode"].pop("t") >= 0
    return value


def begin(make):
    env = make()
    env.action_space.seed(5)
    env.observation_space.seed(6)
    env.np_random = np.random.default_rng(7)
    return env, [timeless(env.reset(seed=3))]


def act(env, done):
    """One transition, and whether the episode is over; actions come from the action space's own stream."""
    if done and not any(isinstance(layer, w.Autoreset) for layer in sandboxgym.wrappers.codecs.walk(env)):
        return timeless(env.reset()), False
    transition = timeless(env.step(env.action_space.sample()))
    return transition, transition[2] or transition[3]


def play(env, steps, done=False):
    """Transitions through the ends of episodes, and whether the last one ended an episode."""
    transitions = []
    for _ in range(steps):
        transition, done = act(env, done)
        transitions.append(transition)
    return transitions, done


def future(env, done):
    """The rest, and what the random streams and the screen give after it."""
    rest, _ = play(env, STEPS, done)
    frames = plain(env.render()) if env.render_mode else None
    return [*rest, frames, *(plain(draw) for draw in (env.np_random.random(2), env.observation_space.sample()))]


class Control:
    """A run in which no snapshot is taken: what each moment returned, and what follows it."""

    def __init__(self, make, steps):
        env, self.transitions = begin(make)
        more, self.done = play(env, steps)
        self.transitions += more
        self.last = [self.transitions[-1][0], self.transitions[-1][-1]]
        self.future = future(env, self.done)


def reached(make, steps):
    env, _ = begin(make)
    _, done = play(env, steps)
    return env, done


@every_wrapper
@pytest.mark.parametrize("steps", [0, 1, 2, 6, 11])
class TestEveryWrapper:
    def test_restores_exactly_into_the_same_and_a_fresh_environment(self, make, steps):
        control = Control(make, steps)
        env, done = reached(make, steps)
        snap = sandboxgym.snapshot(env)
        assert future(env, done) == control.future
        for snap_ in (snap, Snapshot.from_bytes(snap.to_bytes())):
            for one in (env, make()):
                assert timeless(sandboxgym.restore(one, snap_)) == control.last
                assert future(one, done) == control.future

    def test_forks_are_at_the_same_state_and_share_nothing(self, make, steps):
        control = Control(make, steps)
        env, done = reached(make, steps)
        for child in sandboxgym.fork(env, 2):
            assert timeless(sandboxgym.restore(child, sandboxgym.snapshot(child))) == control.last
            assert future(child, done) == control.future
        assert future(env, done) == control.future

    def test_seeded_forks_are_restores_with_the_siblings_seeds(self, make, steps):
        env, done = reached(make, steps)
        snap = sandboxgym.snapshot(env)
        for index, child in enumerate(sandboxgym.fork(env, 2, seed=4)):
            again = make()
            sandboxgym.restore(again, snap, seed=sandboxgym.sibling_seed(4, index))
            assert future(child, done) == future(again, done)


@every_wrapper
def test_a_layer_of_few_numbers_is_what_the_long_way_captures(make):
    env, _ = reached(make, 3)
    for wrapper, codec in _stack(env)[0]:
        simple = _simple(wrapper, codec)
        assert simple is None or repr(simple) == repr(_capture(wrapper, codec))
        if type(wrapper) in (w.TimeLimit, w.OrderEnforcing, w.PassiveEnvChecker):
            assert simple is not None


def test_every_wrapper_of_gymnasium_is_classified():
    on_demand = {name.rpartition(".")[2] for name in gymnasium_codecs.ON_DEMAND}
    eager = {*gymnasium_codecs.CAPTURED, *gymnasium_codecs.STATELESS, *gymnasium_codecs.REFUSED}
    assert {*w.__all__} - {"vector"} == {kind.__name__ for kind in eager} | on_demand
    assert on_demand == set(w._wrapper_to_class)
    assert eager <= CODECS.keys()
    tested = {name.partition(",")[0] for name in CASES}
    assert {kind.__name__ for kind in {*gymnasium_codecs.CAPTURED, *gymnasium_codecs.STATELESS}} <= tested


def test_importing_the_package_imports_no_wrapper_that_needs_other_libraries(tmp_path):
    code = "import sys, sandboxgym; print([n for n in ('jax', 'torch', 'gymnasium.wrappers.array_conversion') "
    assert fresh_interpreter(code + "if n in sys.modules])", cwd=tmp_path).strip() == "[]"


class TestConversions:
    def test_the_converted_output_is_what_restore_returns(self):
        if not importlib.util.find_spec("array_api_compat") or not importlib.util.find_spec("torch"):
            missing("torch", "Gymnasium's array conversion needs array-api-compat and torch")
        import torch

        env = w.NumpyToTorch(drift(boxed=True))
        env.reset(seed=1)
        last = env.step(torch.zeros(2))
        snap, (child,) = sandboxgym.snapshot(env), sandboxgym.fork(env, 1)
        following = env.step(torch.ones(2))
        observation, _ = sandboxgym.restore(env, snap)
        assert isinstance(observation, torch.Tensor)
        assert torch.equal(observation, last[0])
        for one in (env, child):
            assert torch.equal(one.step(torch.ones(2))[0], following[0])


class TestRecords:
    def test_queues_and_counts_are_not_rewound(self):
        env = w.RecordEpisodeStatistics(limited(drift(), 2))
        env.reset(seed=1)
        snap = sandboxgym.snapshot(env)
        for _ in range(3):
            sandboxgym.restore(env, snap)
            for _ in range(2):
                *_, info = env.step(0)
        assert info["episode"]["l"] == 2
        assert (env.episode_count, len(env.return_queue)) == (3, 3)

    def test_time_spent_elsewhere_is_no_part_of_the_episode(self, monkeypatch):
        now = [1000.0]
        monkeypatch.setattr("time.perf_counter", lambda: now[0])
        env = w.RecordEpisodeStatistics(limited(drift(), 2))
        env.reset(seed=1)
        now[0] += 5
        env.step(0)
        data = sandboxgym.snapshot(env).to_bytes()
        now[0] = 3.0  # another process: its clock began later
        other = w.RecordEpisodeStatistics(limited(drift(), 2))
        sandboxgym.restore(other, Snapshot.from_bytes(data))
        now[0] += 2
        assert other.step(0)[4]["episode"]["t"] == 7

    @pytest.mark.parametrize(
        ("kind", "attributes"), [(w.RecordVideo, {"recorded_frames": []}), (w.HumanRendering, {"window": None})]
    )
    def test_what_writes_to_the_outside_is_refused_by_name_with_advice(self, kind, attributes):
        env = kind.__new__(kind)  # their constructors need moviepy and a screen
        gym.Wrapper.__init__(env, frames())
        vars(env).update(attributes)
        env.env.reset(seed=1)
        for ask in (lambda: sandboxgym.snapshot(env), lambda: sandboxgym.fork(env, 1)):
            with pytest.raises(SnapshotNotSupported, match=rf"{kind.__name__}: .*\.env"):
                ask()
        sandboxgym.restore(env.env, sandboxgym.snapshot(env.env))


class TestIsolation:
    def test_what_users_write_into_returned_observations_reaches_nobody(self):
        for name in (
            "DelayObservation",
            "FrameStackObservation",
            "MaxAndSkipObservation",
            "AddRenderObservation, only",
        ):
            control = Control(CASES[name], 6)
            env, done = reached(CASES[name], 6)
            snap = sandboxgym.snapshot(env)
            for _ in range(2):
                observation, info = sandboxgym.restore(env, snap)
                observation[...] = 0
                info.clear()
                observation, *_, info = env.step(env.action_space.sample())
                observation[...] = 0
                info.clear()
            assert timeless(sandboxgym.restore(env, snap)) == control.last
            assert future(env, done) == control.future

    def test_what_outer_wrappers_add_to_the_info_is_not_what_inner_ones_returned(self):
        env = w.RecordEpisodeStatistics(w.MaxAndSkipObservation(limited(drift(), 4), 2))
        env.reset(seed=1)
        env.step(0)
        env.step(0)
        snap = sandboxgym.snapshot(env)
        assert "episode" in sandboxgym.restore(env, snap)[1]
        inner = sandboxgym.restore(env.env, sandboxgym.snapshot(env.env))
        assert "episode" not in inner[1]

    def test_a_fork_that_renders_its_observation_renders_itself(self):
        env, _ = reached(CASES["AddRenderObservation"], 2)
        (child,) = sandboxgym.fork(env, 1)
        cells = child.func.__closure__
        assert all(cell.cell_contents is not env for cell in cells)
        assert any(cell.cell_contents is child for cell in cells)

    def test_functions_of_users_see_the_fork(self):
        base = drift()
        env = w.TransformObservation(base, lambda observation: observation + env.unwrapped.steps, None)
        env.reset(seed=1)
        (child,) = sandboxgym.fork(env, 1)
        for _ in range(3):
            env.step(0)
        observation = child.step(0)[0]
        assert observation == pytest.approx(child.unwrapped.point + 1, abs=1e-5)

    def test_a_space_that_is_part_of_another_stays_so_in_a_fork(self):
        env, _ = reached(lambda: w.TimeAwareObservation(limited(drift()), flatten=False), 2)
        (child,) = sandboxgym.fork(env, 1)
        assert env.observation_space["obs"] is env.unwrapped.observation_space
        assert child.observation_space["obs"] is child.unwrapped.observation_space

    def test_running_statistics_are_shared_with_no_fork(self):
        env, _ = reached(CASES["NormalizeObservation"], 3)
        (child,) = sandboxgym.fork(env, 1)
        assert child.obs_rms is not env.obs_rms
        before = copy.deepcopy(vars(env.obs_rms))
        play(child, 3)
        assert plain(vars(env.obs_rms)) == plain(before)


class TestErrors:
    @pytest.mark.parametrize(
        ("mine", "theirs"),
        [
            (lambda: w.DelayObservation(drift(), 2), lambda: w.DelayObservation(drift(), 3)),
            (lambda: w.RescaleObservation(drift(), 0.0, 1.0), lambda: w.RescaleObservation(drift(), 0.0, 2.0)),
            (lambda: w.TransformReward(drift(), abs), lambda: w.TransformReward(drift(), doubled)),
            (lambda: w.FrameStackObservation(drift(), 2), lambda: w.FrameStackObservation(drift(), 3)),
            (lambda: w.NormalizeReward(drift(), gamma=0.9), lambda: w.NormalizeReward(drift(), gamma=0.8)),
        ],
    )
    def test_other_settings_do_not_fit(self, mine, theirs):
        env, _ = reached(mine, 2)
        with pytest.raises(SnapshotMismatch, match="in the snapshot"):
            sandboxgym.restore(env, sandboxgym.snapshot(reached(theirs, 2)[0]))

    @pytest.mark.parametrize(
        ("name", "attribute", "lie"),
        [
            ("DelayObservation", "observation_queue", 3),
            ("FrameStackObservation", "obs_queue", []),
            ("FrameStackObservation", "obs_queue", ["a", "b", "c"]),
            ("FrameStackObservation", "obs_queue", [np.zeros(3)] * 3),
            ("NormalizeObservation", "obs_rms", [0, 1, 2]),
            ("NormalizeObservation", "obs_rms", [np.zeros(2), np.ones(2), "1"]),
            ("NormalizeObservation", "obs_rms", [np.array(["a", "b"]), np.ones(2), 1.0]),
            ("NormalizeReward", "discounted_reward", np.zeros(2)),
            ("RecordEpisodeStatistics", "episode_start_time", float("nan")),
            ("RecordEpisodeStatistics", "episode_returns", "much"),
            ("MaxAndSkipObservation", "_obs_buffer", np.zeros((2, 3))),
            ("AtariPreprocessing", "obs_buffer", [np.zeros(2)]),
            ("StickyAction", "is_sticky_actions", 1),
            ("RenderCollection", "frame_list", None),
            ("TimeAwareObservation", "timesteps", 1.5),
        ],
    )
    def test_states_that_lie_are_refused_and_leave_no_trace(self, name, attribute, lie):
        control = Control(CASES[name], 4)
        env, done = reached(CASES[name], 4)
        header, content = serialization.loads(sandboxgym.snapshot(reached(CASES[name], 2)[0]).to_bytes())
        layers = serialization.unpack(content["layers"])
        assert attribute in layers[0][2][0]
        layers[0][2][0][attribute] = lie
        content["layers"] = serialization.pack(layers)
        header["digest"] = serialization.content_digest(content)
        with pytest.raises(SnapshotCorrupt, match=name):
            sandboxgym.restore(env, Snapshot.from_bytes(serialization.dumps(header, content)))
        assert future(env, done) == control.future

    @pytest.mark.parametrize("fresh", [False, True])
    def test_a_function_that_fails_on_the_restored_observation_leaves_no_trace(self, fresh):
        def brittle(observation):
            if fail:
                raise ZeroDivisionError("brittle")
            return observation

        def make():
            return w.TransformObservation(w.FrameStackObservation(drift(), 2), brittle, None)

        fail = False
        control = Control(make, 4)
        snap = sandboxgym.snapshot(reached(make, 2)[0])
        env, done = (make(), True) if fresh else reached(make, 4)
        fail = True
        with pytest.raises(ZeroDivisionError):
            sandboxgym.restore(env, snap)
        with pytest.raises(SnapshotCorrupt, match=r"TransformObservation.*brittle"):
            sandboxgym.restore(env, Snapshot.from_bytes(snap.to_bytes()))
        fail = False
        if fresh:
            with pytest.raises(sandboxgym.ResetNeeded):
                sandboxgym.snapshot(env)
        else:
            assert future(env, done) == control.future

    def test_a_wrapper_that_returned_nothing_yet_has_nothing_to_restore(self):
        base = drift()
        base.reset(seed=1)
        env = w.DelayObservation(base, 1)
        with pytest.raises(sandboxgym.ResetNeeded, match="DelayObservation has returned nothing yet"):
            sandboxgym.snapshot(env)
        (child,) = sandboxgym.fork(env, 1)
        assert plain(child.step(0)) == plain(env.step(0))


def test_classes_that_remember_stay_what_they_were():
    env = w.DelayObservation(drift(), 1)
    assert env.step.__name__ == "step"
    assert env.reset.__doc__ == "Resets the environment, clearing the observation queue."
    step = w.DelayObservation.step
    sandboxgym.register_wrapper(w.DelayObservation, gymnasium_codecs.CAPTURED[w.DelayObservation])
    assert w.DelayObservation.step is step  # not wrapped twice


def test_environments_that_cannot_be_captured_pay_nothing():
    env = w.DelayObservation(gym.make("CartPole-v1"), 1)
    env.reset(seed=1)
    assert sandboxgym.wrappers.codecs.OUTPUT not in vars(env)
