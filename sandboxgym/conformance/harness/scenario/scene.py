"""Scenes: calls on environments, written down, and compared with a control run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from sandboxgym.conformance.check import Failed
from sandboxgym.conformance.harness.canonical import rows
from sandboxgym.conformance.harness.scenario.control import comparable
from sandboxgym.conformance.harness.scenario.environments import quiet, release
from sandboxgym.conformance.harness.scenario.outcomes import outcome_difference, show_outcome
from sandboxgym.conformance.harness.scenario.script import folded, written
from sandboxgym.conformance.harness.scenario.streams import seed_spaces, seeding
from sandboxgym.conformance.subject import AnyEnv, Control, Op, Outcome, Subject, fork, methods, restore, snapshot
from sandboxgym.conformance.supervision.clock import Stopwatch


@dataclass
class Walk:
    """A run with snapshots on the way."""

    env: AnyEnv
    control: Control
    snaps: dict[int, Any]
    """Snapshots by the number of calls before each."""
    outcomes: list[Outcome]
    expected: Sequence[Outcome]
    """The control's outcomes where it is repeatable, else this run's own."""

    end: int
    """Number of comparable calls; if streams are not captured, those before the next episode starts."""

    @property
    def points(self) -> list[int]:
        """Numbers of calls at which the snapshots were taken."""
        return sorted(self.snaps)


@dataclass
class Scene:
    """Environments, snapshots and the calls made on them. Use it as a context manager."""

    subject: Subject
    lines: list[str] = field(default_factory=list)
    _envs: dict[int, tuple[AnyEnv, str]] = field(default_factory=dict)
    _snaps: dict[int, tuple[Any, str]] = field(default_factory=dict)
    _earlier: dict[int, list[str]] = field(default_factory=dict)
    """Other names of snapshots: equal states may have the same handle."""
    _closed: set[int] = field(default_factory=set)
    _made: int = 0
    _taken: int = 0
    watch: Stopwatch = field(default_factory=Stopwatch)
    _loop: int = 0
    _released: set[int] = field(default_factory=set)
    _pending: str = ""
    """The call that has not returned."""

    def __enter__(self) -> Self:
        self._quiet = quiet()
        self._quiet.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Failed) and not hasattr(error, "counterexample"):
            with contextlib.suppress(Exception):
                error.counterexample = self.script()  # type: ignore[attr-defined]
                error.called = self._called()  # type: ignore[attr-defined]
        try:
            failed = self._leave()
        finally:
            self._quiet.__exit__(None, None, None)
        if failed is not None and error is None:
            raise failed

    def _leave(self) -> BaseException | None:
        failed: BaseException | None = None
        for snap, _ in list(self._snaps.values()):
            try:
                if id(snap) not in self._released:
                    release(snap)
            except Exception as error:
                failed = failed or error
        for env, _ in list(self._envs.values()):
            if id(env) not in self._closed:
                try:
                    env.close()
                except Exception as error:
                    failed = failed or error
        return failed

    # Calls.

    def make(self) -> AnyEnv:
        """Make a new environment."""
        with self._calling("make_env()"):
            env = self.subject.make_env()
        self.lines.append(f"{self._named(env)} = make_env()")
        return env

    def start(self, control: Control) -> AnyEnv:
        """Make an environment at the start of a control run, its spaces seeded, before the first call."""
        env = self.make()
        self.seed_spaces(env, control.seed)
        return env

    def seed_spaces(self, env: AnyEnv, seed: int) -> None:
        """Seed the spaces of all layers."""
        seed_spaces(env, seed)
        self.lines.append(seeding(self.name(env), env, seed))

    def call(self, env: AnyEnv, op: Op) -> Outcome:
        """Perform one call."""
        self._write_op(env, op)
        return self.subject.call(env, op)[0]

    def perform(self, env: AnyEnv, op: Op) -> tuple[Outcome, tuple[Any, ...] | None]:
        """Perform one call; its output, canonical and raw (None if it raised)."""
        self._write_op(env, op)
        return self.subject.call(env, op)

    def play(self, env: AnyEnv, ops: Sequence[Op]) -> list[Outcome]:
        """Perform calls."""
        return [self.call(env, op) for op in ops]

    def reset(self, env: AnyEnv, seed: int | None = None, options: dict[str, Any] | None = None) -> Outcome:
        """Start another episode."""
        return self.call(env, Op("reset", (seed, options)))

    def snapshot(self, env: AnyEnv) -> Any:
        """Take a snapshot."""
        name = f"snap{self._taken}"
        source = self.name(env)
        call = f"{source}.snapshot()" if methods(env) else f"sandboxgym.snapshot({source})"
        self.lines.append(f"{name} = {call}")
        with self._calling(call):
            snap = snapshot(env)
        self._hold(snap, name)
        return snap

    def adopt(self, snap: Any, expression: str) -> Any:
        """Take over a snapshot that was made in another way, such as by loading; ``expression`` is its source."""
        name = f"snap{self._taken}"
        self.lines.append(f"{name} = {expression}")
        self._hold(snap, name)
        return snap

    def _hold(self, snap: Any, name: str) -> None:
        self._taken += 1
        if id(snap) in self._snaps:
            self._earlier.setdefault(id(snap), []).append(self.snap_name(snap))
        self._snaps[id(snap)] = (snap, name)

    def restore(self, env: AnyEnv, snap: Any, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Restore a snapshot; the output of ``restore``."""
        named = "" if seed is None else f", seed={seed}"
        name = self.name(env)
        handle = self.snap_name(snap)
        own = f"{name}.restore({handle}{named})"
        call = own if methods(env) else f"sandboxgym.restore({name}, {handle}{named})"
        self.lines.append(call)
        with self._calling(call):
            result = restore(env, snap, seed)
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
            self.fail(f"restore() must return (observation, info), it returned {result!r:.200}")
        return result

    def fork(self, env: AnyEnv, k: int, seed: int | None = None) -> list[AnyEnv]:
        """Fork an environment."""
        named = "" if seed is None else f", seed={seed}"
        name = self.name(env)
        call = f"{name}.fork({k}{named})" if methods(env) else f"sandboxgym.fork({name}, {k}{named})"
        with self._calling(call):
            children = fork(env, k, seed)
        names = ", ".join(self._named(child) for child in children)
        self.lines.append(f"{names}{',' if len(children) == 1 else ''} = {call}")
        if len(children) != k:
            self.fail(f"fork({k}) returned {len(children)} environments")
        return children

    def close(self, env: AnyEnv) -> None:
        """Close an environment."""
        call = f"{self.name(env)}.close()"
        self.lines.append(call)
        self._closed.add(id(env))
        with self._calling(call):
            env.close()

    def release(self, snap: Any) -> None:
        """Release a snapshot, where it can be."""
        if hasattr(snap, "release"):
            self.lines.append(f"{self.snap_name(snap)}.release()")
        if id(snap) not in self._released:
            self._released.add(id(snap))
            with self._calling(f"{self.snap_name(snap)}.release()"):
                release(snap)

    def forget(self, env: AnyEnv) -> None:
        """Close an environment and drop all references to it, so that thousands can be made in turn."""
        self.close(env)
        self._envs.pop(id(env))
        self._closed.discard(id(env))

    def drop(self, snap: Any, *, released: bool = True) -> None:
        """Drop a snapshot, after releasing it if ``released``; of a handle that was taken twice, drop only one name."""
        if earlier := self._earlier.get(id(snap)):
            self._snaps[id(snap)] = (snap, earlier.pop())
            return
        if released:
            self.release(snap)
        else:
            self.lines.append(f"del {self.snap_name(snap)}")
        self._snaps.pop(id(snap), None)
        self._released.discard(id(snap))

    def note(self, line: str) -> None:
        """Add a line to the script."""
        self.lines.append(line)

    @contextlib.contextmanager
    def iteration(self, index: int) -> Iterator[None]:
        """Context of iteration ``index`` (from 0) of equal ones; those that passed become one loop in the script."""
        if index == 0:
            self._loop = len(self.lines)
        mark = self._loop + bool(index)
        made, taken, live = self._made, self._taken, (len(self._envs), len(self._snaps))
        yield
        body = "\n".join(f"    {line}" for line in "\n".join(folded(self.lines[mark:])).splitlines())
        self.lines[self._loop :] = [f"for _ in range({index + 1}):\n{body}"]
        if live == (len(self._envs), len(self._snaps)):
            self._made, self._taken = made, taken

    @contextlib.contextmanager
    def _calling(self, call: str) -> Iterator[None]:
        """Context of a call that may raise; if it does, the script and the message name it."""
        self._pending = call
        yield
        self._pending = ""

    def _called(self) -> str:
        """The call that raised and the one before it, for a message; empty if none was under way."""
        if not self._pending:
            return ""
        earlier = "\n".join(self.lines).splitlines()
        if earlier and earlier[-1].endswith(self._pending):
            earlier.pop()
        before = next(
            (line.strip() for line in reversed(earlier) if line.strip() and not line.startswith(("#", "import "))), ""
        )
        return f"{self._pending[:120]} after {before[:120]}" if before else self._pending[:120]

    # Composite.

    def walk(
        self, control: Control, points: Iterable[int], *, seed_spaces: bool = False, until: int | None = None
    ) -> Walk:
        """Play a control run and take snapshots on the way.

        Args:
            control: the run to play.
            points: numbers of calls after which snapshots are taken.
            seed_spaces: seed the spaces before each snapshot.
            until: number of calls after which to stop, which only a repeatable run allows; default: all calls.
        """
        wanted = set(points)
        last = len(control.ops) if until is None else until
        env = self.start(control)
        snaps: dict[int, Any] = {}
        outcomes: list[Outcome] = []
        for count in range(last + 1):
            if count in wanted:
                if seed_spaces:
                    self.seed_spaces(env, control.seed)
                snaps[count] = self.snapshot(env)
            if count < last:
                outcomes.append(self.call(env, control.ops[count]))
        return Walk(env, control, snaps, outcomes, self.expected(control, outcomes), comparable(self.subject, control))

    def expected(self, control: Control, outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
        """Expected outcomes: the control's where it is repeatable, else those of the run itself."""
        return control.outcomes if control.repeatable else outcomes

    def alone(self, control: Control, point: int, suffix: Sequence[Op]) -> Walk:
        """Play a control's calls up to ``point`` and then ``suffix``, in a new environment without snapshots."""
        env = self.start(control)
        ops = (*control.ops[:point], *suffix)
        outcomes = self.play(env, ops)
        other = Control(
            f"{control.name}, other actions from {point}", control.seed, ops, tuple(outcomes), None, True, "", 0
        )
        return Walk(env, other, {}, outcomes, outcomes, len(ops))

    def followed(self, control: Control, following: Control, calls: int | None = None) -> Walk:
        """Play a control run, or its first ``calls``, and then the first episode of another one, without snapshots."""
        return self.alone(control, len(control.ops) if calls is None else calls, following.ops[: following.last])

    def expect(self, env: AnyEnv, walk: Walk, point: int, what: str, *, calls: int | None = None) -> int:
        """Play the control run's calls from ``point`` on; fail where the outcomes differ from the expected ones.

        Returns:
            The number of calls that were compared.

        Raises:
            Failed: an outcome differs.
        """
        end = walk.end if calls is None else min(point + calls, walk.end)
        for index in range(point, end):
            found = self.call(env, walk.control.ops[index])
            if found != walk.expected[index]:
                self.differ(walk, env, index, found, what, point)
        return end - point

    def expect_raw(self, env: AnyEnv, walk: Walk, index: int, what: str) -> tuple[tuple[Any, ...], Outcome] | None:
        """Perform one call, which must give the expected outcome; return it raw and canonical (None if it raised)."""
        op = walk.control.ops[index]
        self._write_op(env, op)
        found, raw = self.subject.call(env, op)
        if found != walk.expected[index]:
            self.differ(walk, env, index, found, what, index)
        return None if raw is None else (raw, found)

    def expect_returned(
        self, env: AnyEnv, walk: Walk, point: int, result: tuple[Any, dict[str, Any]], what: str
    ) -> None:
        """Fail unless ``restore`` returned the observation and info of the call before ``point``."""
        expected = walk.expected[point - 1]
        if expected.raised is not None:
            return
        found = self.subject.outcome(env, result[0], 0.0, False, False, result[1])
        found = found._replace(reward=expected.reward, terminated=expected.terminated, truncated=expected.truncated)
        if self.subject.normalize is not None and expected.info is None:
            return  # the normaliser returns another type, which includes the reward and the flags
        if found != expected:
            self.fail(f"{what}: {outcome_difference(expected, found)}", {"snapshot after calls": point})

    def differ(self, walk: Walk, env: AnyEnv, index: int, found: Outcome, what: str, point: int | None = None) -> None:
        """Fail because of the outcome of call ``index``."""
        evidence: dict[str, Any] = {
            "control run": walk.control.name,
            "call": index,
            "expected": show_outcome(walk.expected[index]),
            "found": show_outcome(found),
            "difference": rows(walk.expected[index]._asdict(), found._asdict()),
            "compared with": "an uninterrupted run" if walk.control.repeatable else "the original environment",
        }
        if point is not None:
            evidence["snapshot after calls"] = point
        text = outcome_difference(walk.expected[index], found)
        after = "" if point is None else f", {index - point + 1} calls after the restored moment"
        raise Failed(f"{what}: call {index} differs{after}: {text}", evidence, self.script(walk, env, index))

    def fail(self, message: str, evidence: dict[str, Any] | None = None) -> None:
        """Fail, with the calls so far as the counterexample."""
        raise Failed(message, evidence, self.script())

    # Names and the script.

    def name(self, env: AnyEnv) -> str:
        """Name of an environment in the script."""
        return self._envs[id(env)][1]

    def snap_name(self, snap: Any) -> str:
        """Name of a snapshot in the script."""
        return self._snaps[id(snap)][1]

    def rename(self, snap: Any, name: str) -> None:
        """Set another expression for a snapshot in the script."""
        self._snaps[id(snap)] = (snap, name)

    def _named(self, env: AnyEnv) -> str:
        if id(env) in self._envs:  # a fork that is its own source, say
            return self._envs[id(env)][1]
        name = f"env{self._made}"
        self._made += 1
        self._envs[id(env)] = (env, name)
        return name

    def _write_op(self, env: AnyEnv, op: Op) -> None:
        self.lines.append(written(self.name(env), op))

    def script(self, walk: Walk | None = None, env: AnyEnv | None = None, index: int | None = None) -> str:
        """The calls so far, as runnable Python."""
        head = ["", "import sandboxgym", ""]
        if self.subject.source is not None:
            head += self.subject.source.splitlines()
        else:
            head += [f"def make_env():  # {self.subject.name}", "    ...  # the factory that was given to the suite"]
        head += ["", ""]
        lines = self.lines[:]
        tail: list[str] = []
        if walk is not None and env is not None and index is not None:
            lines, last = lines[:-1], lines[-1]
            tail = [f"found = {last}"]
            if walk.control.repeatable:
                tail += ["", "control = make_env()  # never interrupted"]
                seed = walk.control.seed
                tail.append(seeding("control", walk.env, seed))
                tail += [written("control", op) for op in walk.control.ops[:index]]
                tail.append(f"expected = {written('control', walk.control.ops[index])}")
                tail += ['print("expected", expected)']
            else:
                tail.append(f"# expected: {show_outcome(walk.expected[index])}")
            tail += ['print("found   ", found)']
        body = [*head, *folded(lines), *folded(tail)]
        numpy = ["import numpy as np"] if any("np." in line for line in body) else []
        return "\n".join(["import gymnasium as gym", *numpy, *body]) + "\n"
