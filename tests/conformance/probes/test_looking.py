"""State that the suite inspects: generators, process-wide state, created files, masks; and time on a busy machine."""

from __future__ import annotations

import functools
import itertools
import os
import random
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faulty
import gymnasium as gym
import numpy as np
import pytest
import toy_envs
from gymnasium import spaces

from sandboxgym.conformance import Subject, run
from sandboxgym.conformance.check import Budget
from sandboxgym.conformance.harness import generators, masks, process_globals
from sandboxgym.conformance.supervision import clock, processes, watching

SMALL = Budget("small", traces=2, steps=30, repeats=30, forks=3, cycles=5, depth=20, samples=50, seconds=0.2)


# Generators.


class Slotted:
    __slots__ = ("drops",)

    def __init__(self) -> None:
        self.drops = np.random.RandomState(3)


class Booby:
    """Whoever looks by anything but its dictionary is found out."""

    def __init__(self) -> None:
        self.held = random.Random(1)

    @property
    def trap(self) -> Any:
        raise AssertionError("a property was called")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")

    def __iter__(self) -> Any:
        raise AssertionError("it was iterated over")


def test_generators_are_found_wherever_they_are_kept():
    def drawing() -> Any:
        hidden = np.random.default_rng(4)
        while True:
            yield hidden.random()

    light, told = np.random.default_rng(5), drawing()
    next(told)
    holder = SimpleNamespace(
        slot=Slotted(),
        booby=Booby(),
        nested={"a": [({"b": deque([random.Random(2)])},)]},
        closure=lambda: light.random(),
        part=functools.partial(print, random.Random(6)),
        method=random.Random(7).random,
        coroutine=told,
        bits=np.random.PCG64(8),
    )
    holder.itself = holder
    found = generators.find(holder)
    ends = ("drops", "held", "[0]", "<light>", "args[0]", "__self__", "<hidden>", "bits")
    assert len(found) == len(ends)
    for end in ends:
        assert any(path.endswith(end) for path in found), (end, list(found))


def test_a_class_that_lies_of_its_module_and_a_proxy_are_walked_through():
    class Nowhere:
        __module__ = property(lambda self: 1 / 0)  # type: ignore[assignment]

    class Proxy:
        """Says to be a generator, and is read as one."""

        def __init__(self, held: Any) -> None:
            self.held = held

        __class__ = property(lambda self: type(self.held))  # type: ignore[assignment]
        bit_generator = property(lambda self: self.held.bit_generator)

    one, other = Nowhere(), Proxy(np.random.default_rng(2))
    one.draws = np.random.default_rng(1)  # type: ignore[attr-defined]
    found = generators.find(SimpleNamespace(one=one, other=other))
    assert list(found) == ["SimpleNamespace.other", "SimpleNamespace.one.draws"]


def test_global_generators_spaces_modules_and_classes_are_left_out():
    class Held:
        stream = np.random.default_rng(0)

    holder = SimpleNamespace(draw=random.random, module=random, kind=Held, space=spaces.Discrete(3, seed=1))
    holder.legacy = np.random.mtrand._rand
    assert generators.find(holder) == {}


def test_two_generators_over_one_source_are_one_stream():
    bits = np.random.PCG64(1)
    holder = SimpleNamespace(one=np.random.Generator(bits), other=np.random.Generator(bits))
    assert len(generators.find(holder)) == 1


@pytest.mark.parametrize("make", [lambda: random.Random(1), lambda: np.random.default_rng(1), lambda: Slotted().drops])
def test_bits_can_be_replaced_and_compared(make):
    one, other = (generators.find(SimpleNamespace(held=make())) for _ in range(2))
    (one,), (other,) = one.values(), other.values()
    assert one.bits() == other.bits()
    one.renew(5)
    assert one.bits() != other.bits()
    other.renew(5)
    assert one.bits() == other.bits()


def test_a_walk_is_bounded_and_says_whether_it_saw_everything():
    chain: Any = [random.Random(1)]
    for _ in range(generators.NEAR):
        chain = [chain]
    holder = SimpleNamespace(chain=chain, wide=list(range(10**6)))
    found = generators.find(holder)
    assert found == {} and not found.whole
    holder.wide = [[] for _ in range(50)] * 1000  # 50 objects
    for only, most in ((None, generators.FAR), (["SimpleNamespace.chain" + "[0]" * (generators.NEAR + 1)], 1)):
        found = generators.find(holder, only, most=most)
        assert len(found) == 1 and found.whole


def test_a_generator_is_found_behind_many_objects():
    holder = SimpleNamespace(rows=[{"name": str(number), "tags": []} for number in range(30_000)])
    holder.rows.append({"draws": np.random.default_rng(1)})
    assert not generators.find(holder)
    assert list(generators.find(holder, most=generators.FAR)) == ["SimpleNamespace.rows[30000]['draws']"]


def test_a_generator_of_another_device_is_found():
    torch = pytest.importorskip("torch")

    class OnCard(torch.Generator):  # type: ignore[misc, name-defined]
        device = property(lambda self: torch.device("cuda", 0))

    (stream,) = generators.find(SimpleNamespace(noise=OnCard())).values()
    before = stream.bits()
    stream.renew(3)
    assert stream.kind == "torch" and stream.bits() != before


def test_what_a_walk_did_not_reach_is_no_pass(monkeypatch):
    class Furnished(faulty.Foreign):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            self.furniture = [[number] for number in range(100)]

    def examined() -> Any:
        return run(Subject(Furnished), only=["streams.exact"], budget=SMALL)["streams.exact"]

    assert examined().verdict == "PASS"
    monkeypatch.setattr(generators, "FAR", 60)
    found = examined()
    assert found.verdict == "INCONCLUSIVE" and "more than 60 objects" in found.message, found


def test_an_environment_without_a_generator_is_skipped_and_not_passed():
    class Bare(faulty.Foreign):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            result = super().reset(seed=seed, options=options)
            self._np_random = None
            return result

        def restore(self, snap: Any, *, seed: int | None = None) -> Any:
            result = super().restore(snap, seed=seed)
            self._np_random = None
            return result

    for id in ("streams.seeded", "streams.unshared"):
        found = run(Subject(Bare), only=[id], budget=SMALL)[id]
        assert found.verdict == "SKIP", found


def test_clones_that_draw_alike_are_found_though_runs_from_one_seed_vary():
    """All that is random is captured, and no seed changes it: every child of a snapshot repeats the others."""

    class Clones(toy_envs.Dice):
        snapshot_spec = replace(toy_envs.Dice.snapshot_spec, rng=False)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            result = super().reset(seed=seed, options=options)
            self._np_random = np.random.default_rng()
            return result

        def restore(self, snap: Any, *, seed: int | None = None) -> Any:
            return super().restore(snap)

    found = run(Subject(Clones), only=["streams.seeded"], budget=SMALL)["streams.seeded"]
    assert found.verdict == "FAIL" and "decides what happens" in found.message, found


@pytest.mark.parametrize("make", [toy_envs.Corridor, toy_envs.Dice, faulty.deep_copied, faulty.Foreign])
def test_streams_of_correct_environments_pass(make):
    report = run(Subject(make), only=["streams.exact", "streams.seeded", "streams.unshared"], budget=SMALL)
    assert not report.failures, report.failures


# The process.


def test_what_a_check_changed_is_put_back():
    import decimal
    import logging

    before = process_globals.surroundings()
    with process_globals.put_back():
        os.umask(0o077)
        decimal.getcontext().prec = 5
        np.seterr(divide="raise")
        np.set_printoptions(precision=2)
        logging.disable(logging.CRITICAL)
        sys.setrecursionlimit(sys.getrecursionlimit() + 10)
        threading.excepthook = lambda *_: None
        assert len(process_globals.changed(before, process_globals.surroundings())) == 7
    assert process_globals.changed(before, process_globals.surroundings()) == []


# Files.


def test_only_what_this_process_makes_is_noted(tmp_path: Path):
    apart = tmp_path / "apart"
    apart.mkdir()
    with watching.watched(apart) as doings:
        (tmp_path / "mine").write_text("")
        (tmp_path / "folder").mkdir()
        (apart / "unseen").write_text("")
        (tmp_path / "gone").write_text("")
        (tmp_path / "gone").unlink()
        (tmp_path / "mine").read_text()
        subprocess.run(["touch", str(tmp_path / "others")], check=True)
        assert doings.remaining() == {str(tmp_path / "mine"), str(tmp_path / "folder")}
        assert doings.children == 1 and not doings.containers
    (tmp_path / "later").write_text("")
    assert str(tmp_path / "later") not in doings.paths


_BUSY = """
import itertools, os, sys, time
for number in itertools.count():
    open(os.path.join(sys.argv[1], f"sandboxgym-test-noise-{os.getpid()}-{number}"), "w").close()
    time.sleep(0.01)
"""


def test_other_programs_files_fail_nothing(monkeypatch, tmp_path):
    """Somebody makes a file in /tmp every 10 ms, while the environment starts child processes."""

    class Starting(toy_envs.Corridor):
        def reset(self, **arguments: Any) -> Any:
            subprocess.run(["true"], check=True)
            return super().reset(**arguments)

    noise = subprocess.Popen([sys.executable, "-c", _BUSY, "/tmp"])
    try:
        found = run(Subject(Starting), only=["resources.baseline"], budget=SMALL)["resources.baseline"]
    finally:
        noise.kill()
        noise.wait()
        for path in Path("/tmp").glob(f"sandboxgym-test-noise-{noise.pid}-*"):
            path.unlink()
    assert found.verdict != "FAIL", found


def test_what_a_child_process_leaves_in_tmp_is_found():
    made = f"/tmp/sandboxgym-test-left-{os.getpid()}-"

    class Leaving(toy_envs.Corridor):
        def restore(self, snap: Any, *, seed: int | None = None) -> Any:
            subprocess.run(["mktemp", f"{made}XXXXXXXX"], check=True, stdout=subprocess.DEVNULL)
            return super().restore(snap, seed=seed)

    try:
        found = run(Subject(Leaving), only=["resources.baseline"], budget=SMALL)["resources.baseline"]
    finally:
        for path in Path("/tmp").glob(f"{Path(made).name}*"):
            path.unlink()
    told = found.message + str(found.evidence.get("of other programs", ""))
    assert "files of child processes" in told, found  # on a machine where others write to /tmp, as theirs, perhaps


def test_mounts_are_told_by_number_and_place():
    assert processes.mounts() and all(len(mount.split(" ")) == 2 for mount in processes.mounts())


# Time.


def test_waiting_for_a_processor_is_no_time(monkeypatch):
    lost = [0.0]
    monkeypatch.setattr(clock, "delayed", lambda: lost[0])
    monkeypatch.setattr(clock, "perf_counter", lambda: time.perf_counter() + lost[0])
    watch = clock.Stopwatch(_delayed=0.0)
    lost[0] = 100.0
    assert watch.elapsed < 5.0 and not watch.spent(5.0)
    assert clock.timed(lambda: lost.__setitem__(0, 200.0)) < 5.0


def test_other_waiting_is_time(monkeypatch):
    passed = [0.0]
    monkeypatch.setattr(clock, "perf_counter", lambda: time.perf_counter() + passed[0])
    watch = clock.Stopwatch()
    passed[0] = 100.0
    assert watch.elapsed >= 99.0 * watch.share and watch.spent(0.5)


def test_beside_other_programs_it_is_waited_longer(monkeypatch):
    monkeypatch.setattr(clock, "_processors", lambda: 2)
    for running, share in ((1, 1.0), (3, 1.0), (9, 0.25), (1000, clock.LEAST_SHARE)):
        monkeypatch.setattr(clock.Path, "read_text", lambda _, running=running: f"1.0 1.0 1.0 {running}/99 123")
        assert clock.fair_share() == share
    monkeypatch.setattr(clock.Path, "read_text", lambda _: "unknown")
    assert clock.fair_share() == 1.0

    monkeypatch.setattr(clock, "fair_share", lambda: 0.25)
    monkeypatch.setattr(processes, "perf_counter", itertools.count().__next__)
    seen = []
    assert not processes.until(lambda: seen.append(0), 1.0)
    assert len(seen) == 5, "four times as long beside eight programs on two processors"


# Masks.


def test_masks_of_every_space_are_honoured():
    space = spaces.Dict(
        {
            "doors": spaces.MultiDiscrete([3, 2]),
            "pair": spaces.Tuple((spaces.Discrete(4), spaces.Box(0.0, 1.0, (1,)))),
            "one": spaces.Discrete(3),
        },
        seed=1,
    )
    mask = {"doors": ([0, 1, 0], [True, False]), "pair": (np.array([0, 0, 0, 1]), None), "one": [0, 0, 1]}
    for _ in range(20):
        action = masks.sample(space, mask)
        assert action["doors"].tolist() == [1, 0] and action["pair"][0] == 3 and action["one"] == 2
    flat = spaces.MultiDiscrete([3, 2], seed=1)
    assert {tuple(masks.sample(flat, np.array([0, 0, 1, 0, 1])).tolist()) for _ in range(9)} == {(2, 1)}


@pytest.mark.parametrize(
    ("space", "mask"),
    [
        (spaces.Discrete(3), [0, 0, 0]),
        (spaces.Discrete(3), [1, 1]),
        (spaces.Discrete(3), [0.5, 0.5, 0.0]),
        (spaces.MultiDiscrete([2, 2]), [1, 1, 1]),
        (spaces.Box(0.0, 1.0, (2,)), [1, 1]),
        (spaces.Dict(a=spaces.Discrete(2)), {"b": [1, 1]}),
    ],
)
def test_a_mask_of_something_else_is_refused_and_not_used(space: gym.Space[Any], mask: Any):
    with pytest.raises(ValueError):
        masks.understood(space, mask)
    assert masks.sample(space, mask) in space
