"""Programs of resets, steps, snapshots, restores, forks and closes: executed against controls, saved, replayed.

A program is a list of instructions, which are JSON values. Every environment of a program has a control that reached
the same state by ``reset`` and actions alone; each call is made on both and must give equal outcomes. After a restore
or fork with a seed, if draws matter, the control is another environment restored from a snapshot taken at that moment.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sandboxgym.conformance.check import Failed
from sandboxgym.conformance.harness.scenario import Scene, choose, outcome_difference, seed_spaces
from sandboxgym.conformance.subject import AnyEnv, MakeSpec, Op, Outcome, Subject, restore
from sandboxgym.conformance.supervision import scratch
from sandboxgym.errors import SnapshotNotSupported

SCHEMA = 1
"""Version of the saved form."""
ALIVE = 5
"""Most environments alive at once, not counting their controls."""

Instruction = dict[str, Any]
"""One call as JSON values. Numbers of environments and snapshots are taken modulo their count."""


# Actions as JSON.


def encode(value: Any) -> Any:
    """An action or an option as JSON values.

    Raises:
        TypeError: the value has no JSON form.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        return {"numpy": value.dtype.str, "shape": list(value.shape), "values": np.asarray(value).ravel().tolist()}
    if isinstance(value, (tuple, list)):
        return {type(value).__name__: [encode(item) for item in value]}
    if isinstance(value, Mapping):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    raise TypeError(f"cannot write a {type(value).__qualname__} as JSON")


def decode(value: Any) -> Any:
    """Decode the JSON values of `encode`."""
    if not isinstance(value, dict):
        return value
    if "numpy" in value:
        array = np.array(value["values"], dtype=value["numpy"]).reshape(value["shape"])
        return array if value["shape"] else array[()]
    if "dict" in value:
        return {decode(key): decode(item) for key, item in value["dict"]}
    kind, items = next(iter(value.items()))
    return {"tuple": tuple, "list": list}[kind](decode(item) for item in items)


# Programs.


@dataclass
class Run:
    """A live environment and its control."""

    env: AnyEnv
    control: AnyEnv
    origin: Origin
    history: tuple[Op, ...] = ()
    expected: Outcome = field(default_factory=Outcome)
    raw: tuple[Any, Any] = (None, {})
    """Last output: observation and info."""


@dataclass(frozen=True)
class Origin:
    """Start of a history: a new environment, or a snapshot restored in one."""

    spaces: int
    snap: Any = None


@dataclass
class Taken:
    """A snapshot, and the run at that moment."""

    snap: Any
    origin: Origin
    history: tuple[Op, ...]
    expected: Outcome
    raw: tuple[Any, Any]


class Program:
    """Executor of instructions that compares each with a control. Use it as a context manager."""

    def __init__(self, subject: Subject, *, noisy: bool) -> None:
        self.subject = subject
        self.noisy = noisy
        """True if draws matter: seeds change futures."""
        self.scene = Scene(subject)
        self.runs: list[Run] = []
        self.taken: list[Taken] = []
        self.done: list[Instruction] = []
        self._controls: list[AnyEnv] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Program:
        self.scene.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        with contextlib.ExitStack() as stack:
            for control in self._controls:
                stack.callback(control.close)
            if self._folder is not None:
                stack.callback(self._folder.cleanup)
            stack.callback(self.scene.__exit__, *error)

    def perform(self, instruction: Instruction) -> None:
        """Execute one instruction; one that does not apply has no effect.

        Raises:
            Failed: the environment and its control differ, or a call raised; it has the script.
        """
        kind = instruction["op"]
        if kind != "make" and not self.runs:
            return
        self.done.append(instruction)
        try:
            getattr(self, f"_{kind}")(instruction)
        except Failed as failure:  # of the scene, too
            failure.evidence["program"] = list(self.done)
            raise
        except Exception as error:
            message = f"{kind} raised {type(error).__qualname__}: {error}"
            raise Failed(message[:300], {"program": list(self.done)}, self.scene.script()) from error

    def action(self, at: int, choice: int) -> Any:
        """Action for environment ``at``, determined by ``choice`` and the environment's last output."""
        run = self._run(at)
        rng = np.random.default_rng(choice)
        space = copy.deepcopy(run.control.action_space)
        space.seed(choice)
        return choose(self.subject, space, run.raw[0], run.raw[1] or {}, rng, choice % 2 == 0)

    def finish(self) -> None:
        """Step all environments a few more times, so that damage by calls on other environments shows."""
        for index in range(len(self.runs)):
            for choice in range(3):
                self.perform({"op": "step", "env": index, "action": encode(self.action(index, choice))})

    # Instructions.

    def _make(self, instruction: Instruction) -> None:
        if len(self.runs) >= ALIVE:
            return
        seed = instruction["seed"]
        env = self.scene.make()
        self.scene.seed_spaces(env, seed)
        run = Run(env, self._control(), Origin(seed))
        seed_spaces(run.control, seed)
        self.runs.append(run)
        self._call(run, Op("reset", (seed, self.subject.options(instruction["task"]))))

    def _reset(self, instruction: Instruction) -> None:
        options = self.subject.options(instruction["task"])
        self._call(self._run(instruction["env"]), Op("reset", (instruction["seed"], options)))

    def _step(self, instruction: Instruction) -> None:
        self._call(self._run(instruction["env"]), Op("step", decode(instruction["action"])))

    def _snapshot(self, instruction: Instruction) -> None:
        run = self._run(instruction["env"])
        self.taken.append(Taken(self.scene.snapshot(run.env), run.origin, run.history, run.expected, run.raw))

    def _restore(self, instruction: Instruction) -> None:
        if not self.taken:
            return
        taken = self.taken[instruction["snap"] % len(self.taken)]
        run = self._run(instruction["env"])
        if instruction["new"]:
            self._end(run)
            run.env = self.scene.make()
        else:
            self._drop_control(run)
        observation, info = self.scene.restore(run.env, taken.snap, seed=instruction["seed"])
        self._compare_returned(run.env, taken, observation, info)
        self._continue(run, taken.origin, taken.history, instruction["seed"])
        run.expected, run.raw = taken.expected, taken.raw

    def _fork(self, instruction: Instruction) -> None:
        k = instruction["k"]
        if len(self.runs) + k > ALIVE:
            return
        run = self._run(instruction["env"])
        children = self.scene.fork(run.env, k, instruction["seed"])
        for child in children:
            twin = Run(child, run.control, run.origin, expected=run.expected, raw=run.raw)
            self._continue(twin, run.origin, run.history, instruction["seed"])
            self.runs.append(twin)

    def _close(self, instruction: Instruction) -> None:
        if len(self.runs) > 1:
            run = self._run(instruction["env"])
            self.runs.remove(run)
            self._end(run)

    def _save(self, instruction: Instruction) -> None:
        if not self.taken:
            return
        taken = self.taken[instruction["snap"] % len(self.taken)]
        if not callable(getattr(taken.snap, "save", None)) or not callable(getattr(type(taken.snap), "load", None)):
            return
        if self._folder is None:
            self._folder = scratch.folder()
        path = os.path.join(self._folder.name, "saved.snapshot")
        name = self.scene.snap_name(taken.snap)
        try:
            taken.snap.save(path)
        except SnapshotNotSupported:
            return
        self.scene.note(f'{name}.save("saved.snapshot")')
        taken.snap = self.scene.adopt(type(taken.snap).load(path), f'type({name}).load("saved.snapshot")')

    def _release(self, instruction: Instruction) -> None:
        if self.taken:
            taken = self.taken.pop(instruction["snap"] % len(self.taken))
            if all(other.snap is not taken.snap for other in self.taken):
                self.scene.drop(taken.snap)

    # What they are made of.

    def _run(self, index: int) -> Run:
        return self.runs[index % len(self.runs)]

    def _control(self) -> AnyEnv:
        control = self.subject.make_env()
        self._controls.append(control)
        return control

    def _end(self, run: Run) -> None:
        self.scene.forget(run.env)
        self._drop_control(run)

    def _drop_control(self, run: Run) -> None:
        run.control.close()
        self._controls = [control for control in self._controls if control is not run.control]

    def _continue(self, run: Run, origin: Origin, history: tuple[Op, ...], seed: int | None) -> None:
        """Make a new control for an environment that was just restored or forked."""
        if seed is not None and self.noisy:
            origin, history = Origin(origin.spaces, self.scene.snapshot(run.env)), ()
        run.origin, run.history = origin, history
        run.control = self._control()
        if origin.snap is not None:
            restore(run.control, origin.snap)
        else:
            seed_spaces(run.control, origin.spaces)
        for op in history:
            self.subject.call(run.control, op)

    def _call(self, run: Run, op: Op) -> None:
        found = self.scene.call(run.env, op)
        expected, raw = self.subject.call(run.control, op)
        run.history = (*run.history, op)
        run.expected = expected
        if raw is not None:
            run.raw = (raw[0], raw[4])
        if found != expected:
            self._differ(run, op, outcome_difference(expected, found))

    def _compare_returned(self, env: AnyEnv, taken: Taken, observation: Any, info: Any) -> None:
        expected = taken.expected
        if expected.raised is not None or (self.subject.normalize is not None and expected.info is None):
            return
        found = self.subject.outcome(env, observation, 0.0, False, False, info)
        found = found._replace(reward=expected.reward, terminated=expected.terminated, truncated=expected.truncated)
        if found != expected:
            self.scene.lines[-1] = f"print({self.scene.lines[-1]})"
            difference = outcome_difference(expected, found)
            raise Failed(f"restore returned something else: {difference}", None, self.scene.script())

    def _differ(self, run: Run, op: Op, difference: str) -> None:
        scene = self.scene
        scene.lines[-1] = f"found = {scene.lines[-1]}"
        scene.note("")
        scene.note(
            "# the control: never snapshotted, restored or forked" if run.origin.snap is None else "# the control"
        )
        control = scene.make()
        if run.origin.snap is not None:
            scene.restore(control, run.origin.snap)
        else:
            scene.seed_spaces(control, run.origin.spaces)
        scene.play(control, run.history)
        scene.lines[-1] = f"expected = {scene.lines[-1]}"
        scene.note('print("expected", expected)')
        scene.note('print("found   ", found)')
        what = f"{op.kind} number {len(run.history)} of an environment differs from its control: {difference}"
        raise Failed(what, None, scene.script())


# The corpus.


def entry(subject: Subject, message: str, program: list[Instruction], script: str | None) -> dict[str, Any]:
    """A failing program as JSON values, complete enough to run it again.

    Raises:
        TypeError: the options of ``reset`` are not plain data.
    """
    spec = subject.make_spec
    options = subject.reset_options
    return {
        "schema": SCHEMA,
        "target": spec.target if spec else None,
        "make_kwargs": encode(dict(spec.kwargs)) if spec else None,
        "reset_options": [encode(item) for item in options] if isinstance(options, list) else encode(options),
        "found": message,
        "program": program,
        "script": script,
    }


def save(found: Mapping[str, Any], folder: str | os.PathLike[str]) -> Path:
    """Save a failing program in a corpus, named by its content."""
    import zlib

    name = str(found["target"] or "factory").rpartition(":")[2].rpartition("/")[2]
    stem = "".join(letter if letter.isalnum() else "-" for letter in name).lower()
    path = Path(folder, f"{stem}-{zlib.crc32(json.dumps(found['program'], sort_keys=True).encode()):08x}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def replay(found: Mapping[str, Any], subject: Subject | None = None) -> None:
    """Run a saved program, on its own environment or on a given one.

    Raises:
        Failed: the program fails again.
        ValueError: the program has another schema, or there is neither a target nor a subject.
    """
    if found.get("schema") != SCHEMA:
        raise ValueError(f"expected a program of schema {SCHEMA}, found {found.get('schema')!r}")
    if subject is None:
        if not found["target"]:
            raise ValueError("the program names no environment: give a subject")
        spec = MakeSpec(found["target"], decode(found["make_kwargs"]))
        options = found["reset_options"]
        given = [decode(item) for item in options] if isinstance(options, list) else decode(options)
        subject = Subject(spec.factory(), make_spec=spec, reset_options=given)
    with Program(subject, noisy=bool(subject.noise)) as program:
        for instruction in found["program"]:
            program.perform(instruction)
