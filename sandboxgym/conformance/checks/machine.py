"""Level 2: random programs of resets, steps, snapshots, restores, forks and closes, against replayed controls.

Every live environment has a control that reached the same state by ``reset`` and actions alone; each call is made on
both and must give equal outcomes. (After a restore or fork with a seed, if draws matter, the control is another
environment restored from a snapshot taken at that moment.) A failing program is shrunk and reported as a Python script
and as data that `programs.replay` runs again. The regression corpus consists of such data.

Equal seeds give equal programs, unless the time runs out.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sandboxgym.conformance.check import Budget, Failed, Inconclusive, Skipped, check
from sandboxgym.conformance.harness.programs import ALIVE, Instruction, Program, encode, entry, save
from sandboxgym.conformance.subject import Subject
from sandboxgym.conformance.supervision import scratch
from sandboxgym.conformance.supervision.clock import Stopwatch

CORPUS = "SANDBOXGYM_CONFORMANCE_CORPUS"
"""Environment variable: the directory in which minimal failing programs are saved."""
SHRINKING = 5.0
"""Seconds for hypothesis to make a failing program smaller, and again for omitting its calls one by one."""

LEAST_PROGRAMS = 10
"""Fewest programs of a meaningful search; it is multiplied by `Budget.share`, and 2 if calls are slow."""


class _TimeUp(BaseException):
    """Ends a search from inside; hypothesis lets it through."""


@dataclass
class _Search:
    subject: Subject
    noisy: bool
    end: float
    watch: Stopwatch = field(default_factory=Stopwatch)
    counts: Counter[str] = field(default_factory=Counter)
    programs: int = 0
    best: Failed | None = None
    over: bool = False

    def __post_init__(self) -> None:
        self.last = self.end

    def look(self) -> None:
        """Stop the search when the time is up; a failure adds time for shrinking."""
        if self.watch.elapsed > (self.last if self.best is not None else self.end):
            self.over = True
            raise _TimeUp

    def found(self, failure: Failed) -> None:
        if self.best is None:
            self.last = self.watch.elapsed + SHRINKING
        if self.best is None or _size(failure) < _size(self.best):
            self.best = failure


def _size(failure: Failed) -> tuple[int, int, str]:
    program = failure.evidence["program"]
    text = json.dumps(program).replace("null", "")  # no seed is simpler than a seed
    return len(program), len(text), text


def _minimal(subject: Subject, failure: Failed, *, noisy: bool, seconds: float) -> Failed:
    """Failure of the smallest program found by omitting and simplifying single instructions."""
    watch = Stopwatch()
    smaller = True
    while smaller:
        smaller = False
        for candidate in _simpler(failure.evidence["program"]):
            if watch.elapsed > seconds:
                return failure
            try:
                with Program(subject, noisy=noisy) as program:
                    for instruction in candidate:
                        program.perform(instruction)
            except Failed as error:
                if _size(error) < _size(failure):
                    failure, smaller = error, True
                    break
    return failure


def _simpler(program: list[Instruction]) -> Iterator[list[Instruction]]:
    """Programs without one or two of the instructions, later ones first, then with smaller arguments."""
    numbers = range(len(program))
    for left_out in (*itertools.combinations(reversed(numbers), 1), *itertools.combinations(reversed(numbers), 2)):
        yield [instruction for index, instruction in enumerate(program) if index not in left_out]
    for index, instruction in enumerate(program):
        for name, simple in (
            ("seed", 0),
            ("seed", None),
            ("task", 0),
            ("new", False),
            ("k", 1),
            ("env", 0),
            ("snap", 0),
        ):
            if (
                name in instruction
                and instruction[name] != simple
                and not (simple is None and instruction["op"] == "make")
            ):
                yield [*program[:index], {**instruction, name: simple}, *program[index + 1 :]]


def _machine(search: _Search) -> type:
    """Rules for hypothesis, as a class made for one search."""
    from hypothesis import strategies as st
    from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

    index = st.integers(0, 9)
    seeds = st.integers(0, 3)
    options = st.integers(0, 3)

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            search.look()
            search.programs += 1
            self.failed = False
            self.program = Program(search.subject, noisy=search.noisy)
            self.program.__enter__()

        def do(self, **instruction: Any) -> None:
            search.look()
            search.counts[instruction["op"]] += 1
            try:
                self.program.perform(instruction)
            except Failed as failure:
                self.failed = True
                search.found(failure)
                raise

        @initialize(seed=seeds, task=options)
        def begin(self, seed: int, task: int) -> None:
            self.do(op="make", seed=seed, task=task)

        @rule(seed=seeds, task=options)
        def make(self, seed: int, task: int) -> None:
            self.do(op="make", seed=seed, task=task)

        @rule(at=index, choices=st.lists(st.integers(0, 99), min_size=1, max_size=6))
        def step(self, at: int, choices: list[int]) -> None:
            for choice in choices:
                self.do(op="step", env=at, action=encode(self.program.action(at, choice)))

        @rule(at=index, seed=seeds, task=options)
        def reset(self, at: int, seed: int, task: int) -> None:
            self.do(op="reset", env=at, seed=seed, task=task)

        @rule(at=index)
        def snapshot(self, at: int) -> None:
            self.do(op="snapshot", env=at)

        @precondition(lambda self: self.program.taken)
        @rule(at=index, snap=index, seed=st.none() | seeds, new=st.booleans())
        def restore(self, at: int, snap: int, seed: int | None, new: bool) -> None:
            self.do(op="restore", env=at, snap=snap, seed=seed, new=new)

        @precondition(lambda self: self.program.taken)
        @rule(at=index, snap=index)
        def restore_and_snapshot(self, at: int, snap: int) -> None:
            self.do(op="restore", env=at, snap=snap, seed=None, new=False)
            self.do(op="snapshot", env=at)

        @precondition(lambda self: len(self.program.runs) < ALIVE)
        @rule(at=index, k=st.integers(1, 2), seed=st.none() | seeds)
        def fork(self, at: int, k: int, seed: int | None) -> None:
            self.do(op="fork", env=at, k=k, seed=seed)

        @precondition(lambda self: len(self.program.runs) > 1)
        @rule(at=index)
        def close(self, at: int) -> None:
            self.do(op="close", env=at)

        @precondition(lambda self: self.program.taken)
        @rule(snap=index)
        def save(self, snap: int) -> None:
            self.do(op="save", snap=snap)

        @precondition(lambda self: len(self.program.taken) > 2)
        @rule(snap=index)
        def release(self, snap: int) -> None:
            self.do(op="release", snap=snap)

        def teardown(self) -> None:
            try:
                if not self.failed:
                    self.program.finish()
            except Failed as failure:
                search.found(failure)
                raise
            finally:
                self.program.__exit__(None, None, None)

    return Machine


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Run hypothesis without output, and with a temporary directory for its files."""
    from hypothesis.configuration import set_hypothesis_home_dir
    from hypothesis.reporting import with_reporter

    with scratch.folder() as folder:
        set_hypothesis_home_dir(folder)
        try:
            with with_reporter(lambda text: None):
                yield
        finally:
            set_hypothesis_home_dir(None)


def search(subject: Subject, *, programs: int, length: int, seconds: float, seed: int, noisy: bool) -> _Search:
    """Run random programs until one fails, and shrink it."""
    from hypothesis import HealthCheck, Phase, Verbosity, settings
    from hypothesis import seed as seeded
    from hypothesis.stateful import run_state_machine_as_test

    state = _Search(subject, noisy, seconds)
    chosen = settings(
        max_examples=programs,
        stateful_step_count=length,
        deadline=None,
        database=None,
        print_blob=False,
        report_multiple_bugs=False,
        verbosity=Verbosity.quiet,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    machine = seeded(seed)(_machine(state))
    with _silent(), contextlib.suppress(_TimeUp):
        try:
            run_state_machine_as_test(machine, settings=chosen)
        except Exception:  # its own too, of flaky failures and of programs cut short: what was found is reported
            if state.best is None and not state.over:
                raise
    return state


@check(
    "machine.random_walk",
    level=2,
    needs=("exact",),
    after=("api.protocol",),
    hazard="A search makes a combination of calls that nobody tested, such as a fork of a restored fork, and gets a "
    "wrong state.",
    blind="Combinations longer than the programs or too rare for their number; state that shows in no transition.",
)
def random_walk(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Runs random programs of calls on up to five environments at once and compares what they return with controls.
    Calls are make, reset, step, snapshot, restore, fork, save, release and close. A control is another environment that
    reached the same state by resets and actions alone (after a restore or fork with a seed, if draws matter, from a
    snapshot of that moment). A failing program is shrunk to a minimal script, and saved if the environment variable
    ``SANDBOXGYM_CONFORMANCE_CORPUS`` names a directory.
    """
    if importlib.util.find_spec("hypothesis") is None:
        raise Skipped("random programs need hypothesis: pip install 'sandboxgym[conformance]'")
    control = subject.control(0, budget.steps)
    if not control.repeatable:
        raise Skipped(f"a replay, which would be the control, differs by itself: {control.differs}")
    quick = budget.name == "quick"
    chosen = int(rng.integers(2**31))

    def searched(noisy: bool) -> _Search:
        seconds = (4 if quick else 2) * budget.seconds
        lengths = {"programs": 100 if quick else 500, "length": 20 if quick else 40}
        return search(subject, **lengths, seconds=seconds, seed=chosen, noisy=noisy)

    found = searched(bool(subject.noise))
    if found.best is not None and not found.noisy and _by_seeds_alone(subject, found.best):
        found = searched(noisy=True)
    if found.best is not None:
        _report(subject, found)
    evidence = {"programs": found.programs, "calls": dict(sorted(found.counts.items()))}
    least = 2 if budget.waits else max(2, round(LEAST_PROGRAMS * budget.share))
    if found.over and found.programs < least:
        raise Inconclusive(f"{found.programs} programs were run in the time, at least {least} are asked for", evidence)
    return evidence


def _by_seeds_alone(subject: Subject, failure: Failed) -> bool:
    """True if a program fails only when its seeds are assumed to change nothing, so that unrecognised draws explain it.

    Whether seeds may change what they did is for restore.seeded and fork.seeded_independent.
    """
    program = failure.evidence["program"]
    if all(each["op"] not in ("restore", "fork") or each["seed"] is None for each in program):
        return False
    try:
        with Program(subject, noisy=True) as again:
            for instruction in program:
                again.perform(instruction)
    except Failed:
        return False
    return True


def _report(subject: Subject, found: _Search) -> None:
    assert found.best is not None
    failure = _minimal(subject, found.best, noisy=found.noisy, seconds=SHRINKING)
    evidence = {**failure.evidence, "programs": found.programs, "calls": len(failure.evidence["program"])}
    folder = os.environ.get(CORPUS)
    if folder:
        with contextlib.suppress(TypeError):
            written = entry(subject, str(failure), evidence["program"], failure.counterexample)
            evidence["saved"] = str(save(written, folder))
    raise Failed(str(failure), evidence, failure.counterexample)
