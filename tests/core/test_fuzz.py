"""Random programs of snapshots, restores and forks, against environments that replay the same actions without any.

``SANDBOXGYM_FUZZ_STEPS=100000`` runs until this many environment steps were taken (default: a few seconds).
"""

from __future__ import annotations

import copy
import os
import pickle
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import wrappers as w
from gymnasium.utils import seeding
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from traces import plain

import sandboxgym
from sandboxgym import Snapshot, SnapshotCorrupt, SnapshotError, SnapshotReleased, serialization, sibling_seed
from sandboxgym.randomness import capture, capture_spaces

ALFWORLD = "sandboxgym/ALFWorld-v0"
STEPS = int(os.environ.get("SANDBOXGYM_FUZZ_STEPS", "0"))


def statistics(env):
    return w.RecordEpisodeStatistics(env)


STACKS: dict[str, Callable[[], gym.Env[Any, Any]]] = {
    "corridor": lambda: gym.make("toys/Corridor-v0"),
    "corridor, unlimited and bare": lambda: gym.make("toys/Corridor-v0").unwrapped,
    "dice, counted": lambda: statistics(gym.make("toys/Dice-v0", max_episode_steps=7)),
    "dice, late and sticky": lambda: w.DelayObservation(w.StickyAction(gym.make("toys/Dice-v0"), 0.3, (1, 3)), 2),
    "drift": lambda: gym.make("toys/Drift-v0", max_episode_steps=9),
    "drift, normalized frames": lambda: w.FrameStackObservation(
        w.NormalizeReward(w.NormalizeObservation(gym.make("toys/Drift-v0", max_episode_steps=9))), 3
    ),
    "drift, drawn, reset by itself": lambda: w.Autoreset(
        w.AddRenderObservation(w.AddWhiteNoise(gym.make("toys/Drift-v0", render_mode="rgb_array"), 0.3))
    ),
    "drift, timed and skipped": lambda: w.MaxAndSkipObservation(
        w.TimeAwareObservation(statistics(gym.make("toys/Drift-v0", max_episode_steps=9))), 2
    ),
    "alfworld": lambda: gym.make(ALFWORLD, max_episode_steps=20),
    "alfworld, sticky, repeated, counted": lambda: statistics(
        w.RepeatAction(w.StickyAction(gym.make(ALFWORLD, max_episode_steps=15), 0.2), 2)
    ),
    "alfworld, reset by itself": lambda: w.Autoreset(gym.make(ALFWORLD, max_episode_steps=3)),
}


def timeless(value: Any) -> Any:
    """`plain`, without wall-clock times."""
    value = plain(value)
    if "episode" in value[-1]:
        del value[-1]["episode"]["t"]
    return value


def options_of(stack: str, task: int) -> dict[str, Any] | None:
    if stack.startswith("alfworld"):
        return {"task": task % 5}
    return {"cell": task % 3} if stack.startswith("corridor") else None


def action_for(stack: str, choice: int, info: dict[str, Any]) -> Any:
    """An action that depends on nothing but the choice and what was last returned."""
    if not stack.startswith("alfworld"):
        return choice % (4 if stack.startswith("drift") else 2)
    commands = [*info["admissible_commands"], "nonsense"]
    return commands[choice % len(commands)]


def reseeded(env: gym.Env[Any, Any], seed: int) -> None:
    """Do to the environment what a seed given to restore or fork means, without snapshots."""
    env.unwrapped._np_random, env.unwrapped._np_random_seed = seeding.np_random(seed)


def perform(env: gym.Env[Any, Any], event: tuple[Any, ...]) -> Any:
    kind, *arguments = event
    if kind == "reset":
        return timeless(env.reset(seed=arguments[0], options=arguments[1]))
    if kind == "seed":
        return reseeded(env, *arguments)
    return timeless(env.step(*arguments))


@dataclass
class Run:
    """A live environment, and one that came to the same state by replay alone."""

    env: gym.Env[Any, Any]
    control: gym.Env[Any, Any]
    history: list[tuple[Any, ...]]
    last: Any = None

    def do(self, event: tuple[Any, ...]) -> None:
        self.history = [*self.history, event]
        expected = perform(self.control, event)
        if event[0] != "seed":
            assert perform(self.env, event) == expected
            self.last = [expected[0], expected[-1]]

    def check(self) -> None:
        assert capture(self.env.unwrapped._np_random) == capture(self.control.unwrapped._np_random)
        assert self.env.unwrapped._np_random_seed == self.control.unwrapped._np_random_seed


@dataclass
class Taken:
    """A snapshot, where it was taken, and what was last returned there."""

    snap: Snapshot
    history: list[tuple[Any, ...]]
    last: Any


@dataclass
class Program:
    """Counters of what the machine did."""

    steps: int = 0
    replayed: int = 0
    rules: dict[str, int] = field(default_factory=dict)


PROGRAM = Program()


some = st.lists(st.integers(0, 99), min_size=1, max_size=8)
seeds = st.none() | st.integers(0, 3)


class Machine(RuleBasedStateMachine):
    """Every live environment is compared with its control at every step."""

    stack: str
    folder: Path

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[Run] = []
        self.taken: list[Taken] = []

    def replayed(self, env: gym.Env[Any, Any], history: list[tuple[Any, ...]], last: Any) -> Run:
        control = STACKS[self.stack]()
        for event in history:
            perform(control, event)
        PROGRAM.replayed += len(history)
        run = Run(env, control, history, last)
        run.check()
        return run

    def run_at(self, index: int) -> Run:
        return self.runs[index % len(self.runs)]

    def put(self, index: int, run: Run) -> None:
        self.runs[index % len(self.runs)].control.close()
        self.runs[index % len(self.runs)] = run

    def go_on(self, run: Run, choices: list[int]) -> None:
        for choice in choices:
            run.do(("step", action_for(self.stack, choice, run.last[-1])))
        PROGRAM.steps += len(choices)

    def count(self, name: str) -> None:
        PROGRAM.rules[name] = PROGRAM.rules.get(name, 0) + 1

    @initialize(seed=st.integers(0, 3), task=st.integers(0, 4))
    def begin(self, seed: int, task: int) -> None:
        self.add(seed, task)

    @precondition(lambda self: len(self.runs) < 5)
    @rule(seed=st.integers(0, 3), task=st.integers(0, 4))
    def add(self, seed: int, task: int) -> None:
        run = Run(STACKS[self.stack](), STACKS[self.stack](), [])
        run.do(("reset", seed, options_of(self.stack, task)))
        self.runs.append(run)

    @rule(at=st.integers(0, 9), choices=some)
    def step(self, at: int, choices: list[int]) -> None:
        self.go_on(self.run_at(at), choices)

    @rule(at=st.integers(0, 9), seed=st.none() | st.integers(0, 3), task=st.integers(0, 4))
    def reset(self, at: int, seed: int | None, task: int) -> None:
        self.run_at(at).do(("reset", seed, options_of(self.stack, task)))

    @rule(at=st.integers(0, 9))
    def snapshot(self, at: int) -> None:
        self.count("snapshot")
        run = self.run_at(at)
        self.taken.append(Taken(sandboxgym.snapshot(run.env), run.history, run.last))
        run.check()

    @precondition(lambda self: self.taken)
    @rule(at=st.integers(0, 9), which=st.integers(0, 99), seed=seeds, fresh=st.booleans(), choices=some)
    def restore(self, at: int, which: int, seed: int | None, fresh: bool, choices: list[int]) -> None:
        self.count("restore")
        taken = self.taken[which % len(self.taken)]
        env = STACKS[self.stack]() if fresh else self.run_at(at).env
        assert timeless(sandboxgym.restore(env, taken.snap, seed=seed)) == taken.last
        history = taken.history if seed is None else [*taken.history, ("seed", seed)]
        self.put(at, self.replayed(env, history, taken.last))
        self.go_on(self.run_at(at), choices)

    @rule(at=st.integers(0, 9), detour=some, fresh=st.booleans(), choices=some)
    def come_back(self, at: int, detour: list[int], fresh: bool, choices: list[int]) -> None:
        self.count("come back")
        self.snapshot(at)
        self.go_on(self.run_at(at), detour)
        self.restore(at, len(self.taken) - 1, None, fresh, choices)

    @precondition(lambda self: len(self.runs) < 5)
    @rule(at=st.integers(0, 9), k=st.integers(1, 2), seed=seeds, choices=some)
    def fork(self, at: int, k: int, seed: int | None, choices: list[int]) -> None:
        self.count("fork")
        run = self.run_at(at)
        children = sandboxgym.fork(run.env, k, seed=seed)
        run.check()
        for index, child in enumerate(children):
            history = run.history
            if seed is not None:
                again = STACKS[self.stack]()
                sandboxgym.restore(again, sandboxgym.snapshot(run.env), seed=sibling_seed(seed, index))
                assert capture_spaces(child.action_space) == capture_spaces(again.action_space)
                history = [*history, ("seed", sibling_seed(seed, index))]
            self.runs.append(self.replayed(child, history, run.last))
            self.go_on(self.runs[-1], choices)

    @precondition(lambda self: len(self.runs) < 5)
    @rule(at=st.integers(0, 9))
    def deepcopy(self, at: int) -> None:
        run = self.run_at(at)
        if type(run.env) is sandboxgym.SnapshotWrapper or run.env is run.env.unwrapped:
            self.runs.append(self.replayed(copy.deepcopy(run.env), run.history, run.last))

    @precondition(lambda self: self.taken)
    @rule(which=st.integers(0, 99), how=st.sampled_from(["bytes", "pickle", "file", "copy"]))
    def travel(self, which: int, how: str) -> None:
        self.count(how)
        taken = self.taken[which % len(self.taken)]
        if how == "file":
            path = Path(self.folder) / "state.snap"
            taken.snap.save(path)
            taken.snap = Snapshot.load(path)
        else:
            through = {
                "bytes": lambda snap: Snapshot.from_bytes(snap.to_bytes()),
                "pickle": lambda snap: pickle.loads(pickle.dumps(snap)),
                "copy": copy.deepcopy,
            }
            taken.snap = through[how](taken.snap)

    @precondition(lambda self: len(self.taken) > 3)
    @rule(which=st.integers(0, 99), at=st.integers(0, 9))
    def release(self, which: int, at: int) -> None:
        taken = self.taken.pop(which % len(self.taken))
        if any(other.snap is taken.snap for other in self.taken):
            return
        taken.snap.release()
        with pytest.raises(SnapshotReleased):
            sandboxgym.restore(self.run_at(at).env, taken.snap)
        self.run_at(at).check()

    @precondition(lambda self: len(self.runs) > 1)
    @rule(at=st.integers(0, 9))
    def close(self, at: int) -> None:
        run = self.runs.pop(at % len(self.runs))
        run.env.close()
        run.control.close()

    def teardown(self) -> None:
        for run in self.runs:
            run.check()
            self.go_on(run, [0, 1, 2])
            run.env.close()
            run.control.close()


SUPPRESSED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("stack", STACKS)
def test_random_programs_run_as_if_nothing_was_ever_captured(stack, tmp_path):
    class Here(Machine):
        pass

    Here.stack, Here.folder = stack, tmp_path
    options = {"deadline": None, "suppress_health_check": SUPPRESSED, "database": None}
    quick = settings(max_examples=12, stateful_step_count=25, derandomize=True, **options)
    long = settings(max_examples=100, stateful_step_count=60, **options)
    began = PROGRAM.steps
    run_state_machine_as_test(Here, settings=long if STEPS else quick)
    while PROGRAM.steps - began < STEPS / len(STACKS):
        run_state_machine_as_test(Here, settings=long)
    if STEPS:
        print(PROGRAM, flush=True)
    assert PROGRAM.steps > began


# Bytes that lie.

FUTURE = [7, 3, 1, 2, 0, 5]


def begun(stack: str, seed: int, steps: int) -> gym.Env[Any, Any]:
    env = STACKS[stack]()
    _, info = env.reset(seed=seed, options=options_of(stack, seed))
    for choice in range(steps):
        info = env.step(action_for(stack, choice, info))[-1]
    return env


def future(stack: str, env: gym.Env[Any, Any], info: dict[str, Any]) -> list[Any]:
    transitions = []
    for choice in FUTURE:
        transitions.append(timeless(env.step(action_for(stack, choice, info))))
        info = transitions[-1][-1]
    return [*transitions, capture(env.unwrapped._np_random)]


class Victim:
    """A live environment that is shown bytes that lie, and what its future was before."""

    def __init__(self, stack: str) -> None:
        self.stack = stack
        self.data = sandboxgym.snapshot(begun(stack, 1, 4)).to_bytes()
        self.env = begun(stack, 2, 3)
        self.here = sandboxgym.snapshot(self.env)
        self.info = sandboxgym.restore(self.env, self.here)[1]
        self.future = future(stack, begun(stack, 2, 3), self.info)

    def shown(self, data: bytes) -> bool:
        """True if the data were taken for a snapshot; if not, nothing happened."""
        accepted = False
        with warnings.catch_warnings(), watched() as seen:
            warnings.simplefilter("ignore")
            try:
                sandboxgym.restore(self.env, Snapshot.from_bytes(data))
                accepted = True
            except SnapshotError:
                pass
        assert seen == []
        if accepted:
            sandboxgym.restore(self.env, self.here)
        assert future(self.stack, self.env, self.info) == self.future
        sandboxgym.restore(self.env, self.here)
        return accepted


_SEEN: list[list[str]] = []
_FORBIDDEN = ("exec", "pickle.find_class", "os.system", "subprocess.Popen", "os.exec", "os.fork", "socket.connect")


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _SEEN and event in _FORBIDDEN:
        _SEEN[-1].append(event)


class watched:
    """Lists what code was executed, files unpickled and programs started meanwhile."""

    installed = False

    def __enter__(self) -> list[str]:
        if not watched.installed:
            sys.addaudithook(_audit)
            watched.installed = True
        _SEEN.append([])
        return _SEEN[-1]

    def __exit__(self, *_: object) -> None:
        _SEEN.clear()


def test_the_watch_sees_code_that_is_executed():
    with watched() as seen:
        exec("pass")
        pickle.loads(pickle.dumps(np.float64))
    assert seen == ["exec", "pickle.find_class"]


VICTIMS = ("corridor", "dice, late and sticky", "drift, normalized frames", "drift, drawn, reset by itself", "alfworld")
victims: dict[str, Victim] = {}


def victim(stack: str) -> Victim:
    """One for all examples: each leaves it as it was."""
    if stack not in victims:
        victims[stack] = Victim(stack)
    return victims[stack]


EXAMPLES = 60 if not STEPS else max(60, STEPS // 50)
fuzzed = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=not STEPS,
    database=None,
    suppress_health_check=SUPPRESSED,
)

cuts = st.tuples(st.floats(0, 1), st.floats(0, 1))
mutations = st.lists(
    st.one_of(
        st.tuples(st.just("flip"), st.floats(0, 1), st.integers(0, 255)),
        st.tuples(st.just("cut"), cuts),
        st.tuples(st.just("insert"), st.floats(0, 1), st.binary(max_size=9)),
        st.tuples(st.just("move"), cuts, st.floats(0, 1)),
    ),
    min_size=1,
    max_size=4,
)


def mutated(data: bytes, changes: list[Any]) -> bytes:
    """Bits flipped, pieces cut out, put in and copied elsewhere."""
    content = bytearray(data)
    for kind, *arguments in changes:
        size = len(content)
        where = arguments[0]
        if kind == "flip" and size:
            content[min(int(where * size), size - 1)] ^= arguments[1]
        elif kind == "insert":
            content[int(where * size) : int(where * size)] = arguments[1]
        elif kind in ("cut", "move"):
            low, high = sorted(int(part * size) for part in where)
            piece = content[low:high]
            if kind == "cut":
                del content[low:high]
            else:
                position = int(arguments[1] * size)
                content[position : position + len(piece)] = piece
    return bytes(content)


@fuzzed
@given(stack=st.sampled_from(VICTIMS), changes=mutations)
def test_no_changed_file_is_taken_for_a_snapshot(stack, changes):
    one = victim(stack)
    data = mutated(one.data, changes)
    assert one.shown(data) == (data == one.data)


def rehashed(data: bytes, name: str, change: Callable[[bytes], bytes]) -> bytes:
    """The file with one section changed and all checksums right."""
    header, sections = serialization.loads(data)
    sections[name] = change(sections[name])
    return serialization.dumps(header, sections)


sections = st.sampled_from(["state", "rng", "transition", "layers"])


@fuzzed
@given(stack=st.sampled_from(VICTIMS), section=sections, changes=mutations)
def test_bytes_that_lie_under_right_checksums_are_refused_or_undone(stack, section, changes):
    one = victim(stack)
    one.shown(rehashed(one.data, section, lambda content: mutated(content, changes)))


junk = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.just([]),
    st.just({}),
    st.just(()),
    st.builds(np.zeros, st.sampled_from([(), (2,), (3, 2), (0,)])),
    st.just(np.array(["a", "b"])),
    st.just(np.float32("nan")),
)


def replaced(value: Any, place: int, thing: Any) -> tuple[Any, int]:
    """The value with its ``place``-th part replaced, and how many parts are left to go."""
    if place == 0:
        return thing, -1
    place -= 1
    if isinstance(value, dict):
        result: Any = {}
        for key, item in value.items():
            result[key], place = replaced(item, place, thing) if place >= 0 else (item, place)
        return result, place
    if isinstance(value, (list, tuple)):
        items = []
        for item in value:
            new, place = replaced(item, place, thing) if place >= 0 else (item, place)
            items.append(new)
        return type(value)(items), place
    return value, place


@fuzzed
@given(stack=st.sampled_from(VICTIMS), section=sections, place=st.integers(0, 80), thing=junk)
def test_values_that_lie_under_right_checksums_are_refused_or_undone(stack, section, place, thing):
    one = victim(stack)

    def change(content: bytes) -> bytes:
        try:
            value = serialization.unpack(content)
        except SnapshotCorrupt:  # an encoding of the environment's own
            value = None
        return serialization.pack(replaced(value, place, thing)[0])

    one.shown(rehashed(one.data, section, change))


@fuzzed
@given(
    stack=st.sampled_from(VICTIMS),
    name=st.sampled_from(["env_id", "env_class", "state_version", "config", "kind", "id", "parent", "sections"]),
    thing=st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.just([]) | st.just({"a": [1]}),
)
def test_headers_that_lie_are_refused_or_undone(stack, name, thing):
    one = victim(stack)
    header, content = serialization.loads(one.data)
    one.shown(serialization.dumps({**header, name: thing}, content))


@pytest.mark.parametrize("stack", VICTIMS)
def test_an_unchanged_file_is_taken_for_a_snapshot(stack):
    assert victim(stack).shown(victim(stack).data)


def test_random_bytes_are_no_snapshot():
    with pytest.raises(SnapshotCorrupt):
        Snapshot.from_bytes(os.urandom(200))
