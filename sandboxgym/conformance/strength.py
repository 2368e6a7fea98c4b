"""Strength of a certificate: the share of faults put into the user's own environment that its checks detect.

1. The faults are generic: a restore leaves out one field of the captured state, makes it coarser, shares it with the
   environment instead of copying it, or leaves a random stream or a wrapper unrestored; a snapshot is one step old.
2. The fields are those of the value that ``_capture`` returns; for an environment that is not a `SnapshotEnv`, the
   attributes that change during play. Only behaviour decides: a fault is caught when a check that the certificate
   passed fails with it.
3. A field that was equal in all snapshots is not exercised, whatever the checks do: that is reported without a trial. A
   fault that changed nothing when it was tried is no fault, and is not counted.
4. It ends within a given processor time; trials not made by then are listed.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import gymnasium as gym
import numpy as np

from sandboxgym import randomness
from sandboxgym.conformance.check import REGISTRY, Budget, Result, Verdict
from sandboxgym.conformance.harness.canonical import canonical
from sandboxgym.conformance.harness.scenario import opened, quiet, release
from sandboxgym.conformance.harness.unrestored import unrestored
from sandboxgym.conformance.reports.verdicts import UNRESTORED
from sandboxgym.conformance.subject import AnyEnv, Control, Subject, declaration, fork, restore, snapshot
from sandboxgym.core import SnapshotEnv
from sandboxgym.wrappers import stack as wrappers

Path = tuple[Any, ...]
"""Keys, indices and names of attributes that lead to a field."""

CHECKS = (
    "restore.trace_equality",
    "snapshot.immutable",
    "restore.random_streams",
    "freshness.observation",
    "freshness.last_info",
    "fork.isolation",
    "restore.other_env",
    "restore.after_reset",
    "restore.after_done",
    "restore.diverge",
    "freshness.render",
    "restore.whole_episode",
)
"""Checks that a fault meets, in this order."""
FIRST = {"shared": ("snapshot.immutable",), "stream": ("restore.random_streams",)}
"""Checks most likely to detect a kind of fault; for other kinds `VALUES`."""
VALUES = ("restore.trace_equality", "freshness.last_info", "restore.after_done", "freshness.observation")
LIKELY = 4
"""Checks that a fault meets in the first round over all faults."""
SHARE = 0.25
"""Additional time, as a share of the time that the checks took."""
LEAST_SECONDS = 2.0
DEPTH, WIDTH, FIELDS = 4, 32, 64
"""Limits of the search for fields: depth, fields per value, fields in total."""

_FIELDS = ("left out", "not captured")
_STREAMS = {"np_random", "_np_random", "_np_random_seed"}
_SPACES = {"action_space", "observation_space", "_action_space", "_observation_space"}
_INERT = {"spec", "metadata", "render_mode", "_metadata", "_cached_spec", *_STREAMS, *_SPACES}
"""Attributes of an environment that are no state, or streams, which have trials of their own."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A fault and the result of its trial."""

    field: str
    """Field of the state; or the name of a stream or a wrapper; ``the whole`` for a snapshot one step old."""
    fault: str
    """``left out``, ``coarser``, ``shared``, ``stale``, ``stream``, ``wrapper``; or ``not captured``, of an attribute
    that changes in play and that a restore does not bring back: nothing was put in there."""
    outcome: str
    """``caught``, ``unseen``, ``never varied``, ``explained`` (no check saw it, and the environment's metadata
    say why: ``unobservable``), ``without effect`` or ``not tried``."""
    note: str
    """The check that detected it, or the reason why none did."""


@dataclass(frozen=True)
class Strength:
    """Faults that a certificate would have caught."""

    trials: tuple[Trial, ...] = ()
    reason: str = ""
    """Reason why there are no trials."""
    seconds: float = 0.0
    layered: bool = False
    """The fields are attributes, not those of the value of ``_capture``."""

    @property
    def fields(self) -> tuple[Trial, ...]:
        """Trials that tell whether a field was exercised."""
        return tuple(trial for trial in self.trials if trial.fault in _FIELDS)

    @property
    def unexercised(self) -> tuple[Trial, ...]:
        """Fields that a restore can leave out undetected, without an explanation."""
        return tuple(trial for trial in self.fields if trial.outcome not in ("caught", "explained"))

    @property
    def exercised(self) -> int:
        """Number of fields whose omission is detected."""
        return sum(trial.outcome == "caught" for trial in self.fields)

    @property
    def unseen(self) -> tuple[Trial, ...]:
        """Other faults that had an effect and that no check detected."""
        return tuple(trial for trial in self.trials if trial.fault not in _FIELDS and trial.outcome == "unseen")

    @property
    def unrestored(self) -> tuple[str, ...]:
        """Attributes that change in play, are not captured and differ after a restore, without an explanation."""
        return tuple(trial.field for trial in self.unexercised if trial.fault == "not captured")

    def __str__(self) -> str:
        if self.reason:
            return f"not measured: {self.reason}"
        tried = [t for t in self.trials if t.outcome in ("caught", "unseen") and t.fault != "not captured"]
        caught = sum(trial.outcome == "caught" for trial in tried)
        explained = sum(trial.outcome == "explained" for trial in self.fields)
        text = f"{self.exercised} of {len(self.fields)} fields of the state exercised"
        text += f" ({explained} explained)" if explained else ""
        text += f", {caught} of {len(tried)} faults caught"
        text += "" if self.layered else " (in captured fields only)"
        missed = [trial.field for trial in self.unexercised if trial.fault == "left out"]
        missed += [f"{t.field} ({t.fault})" for t in self.unseen]
        text += f"; never exercised: {', '.join(missed)}" if missed else ""
        return text + (f"; {UNRESTORED}: {', '.join(self.unrestored)}" if self.unrestored else "")

    def to_json(self) -> dict[str, Any]:
        """The strength as JSON values."""
        return {
            "summary": str(self),
            "fields": len(self.fields),
            "exercised": self.exercised,
            "unrestored": list(self.unrestored),
            "trials": [asdict(trial) for trial in self.trials],
            "reason": self.reason,
            "seconds": round(self.seconds, 2),
        }


def measure(subject: Subject, budget: Budget, results: Mapping[str, Result], *, seed: int, seconds: float) -> Strength:
    """Put faults into the environment and run the checks that it passed.

    Args:
        subject: that was certified.
        budget: that of the certificate.
        results: those of the certificate, by id.
        seed: that of the certificate.
        seconds: of the processor, or, of a slow environment, half of those on the wall; what would begin later is
            left out.
    """
    passed = [id for id in CHECKS if id in REGISTRY and id in results and results[id].verdict is Verdict.PASS]
    if not any(id.startswith("restore.") for id in passed):
        return Strength(reason="no check passed that compares what follows a restore")
    clock = _Clock(seconds, waits=budget.waits)
    try:
        with quiet():
            seen = _Seen.of(subject, budget, clock)
            faults = list(_faults(subject, seen))
            lost = _lost(subject, seen, clock)
    except Exception as error:
        return Strength(reason=f"its state cannot be looked at: {type(error).__qualname__}: {error}")
    trials = [
        Trial(name(path), "left out", "never varied", f"the same in {seen.count} snapshots of {seen.episodes} episodes")
        for path in seen.constant
    ]
    trials += [
        Trial(name(path), "not captured", "unseen", f"{UNRESTORED}: differs after a restore {where}")
        for path, where in list(lost.items())[:FIELDS]
    ]
    if not faults and not trials:
        return Strength(reason="its state is out of reach: it is no SnapshotEnv, and no attribute of it changes")
    reasons = _explanations(subject)
    quick = replace(budget, traces=min(budget.traces, 2), seconds=budget.seconds / 4)
    # Fields first, those last of which it is known that nothing shows them: a field that no check sees takes all of
    # them, and the time of ten others.
    left = sorted(faults, key=lambda fault: (fault.name[0] in reasons, fault.kind != "left out"))
    for among, how in ((LIKELY, quick), (len(passed), quick), (len(passed), budget)):
        undecided: list[_Fault] = []
        if clock.over and any(fault.kind == "left out" and fault.name[0] not in reasons for fault in left):
            clock.limit = max(clock.limit, 2 * seconds)  # a field of which nothing is known is worth it
        for fault in left:
            first = sorted(passed, key=_likely(fault.kind))
            trial = None if clock.over else _trial(seen.first(fault, subject), fault, first[:among], how, seed, clock)
            if trial is None:
                undecided.append(fault)
            else:
                trials.append(trial)
        left = undecided
    trials += [_missed(fault, clock, passed) for fault in left]
    trials = [
        replace(trial, outcome="explained", note=reasons[trial.field])
        if trial.fault in _FIELDS
        and trial.outcome in ("unseen", "never varied", "not tried")
        and trial.field in reasons
        else trial
        for trial in trials
    ]
    order = [fault.name for fault in faults]
    trials.sort(key=lambda t: order.index((t.field, t.fault)) if (t.field, t.fault) in order else -1)
    return Strength(tuple(trials), seconds=clock.spent, layered=seen.layered)


def _lost(subject: Subject, seen: _Seen, clock: _Clock) -> dict[tuple[str, ...], str]:
    """Result of `unrestored`; empty where the environment's attributes cannot be read."""
    try:
        return unrestored(subject, seen.runs[:LIKELY], lambda: clock.spent > clock.limit / 2)
    except Exception:  # what is wrong with its restores is for the checks to find
        return {}


def _likely(kind: str) -> Callable[[str], int]:
    """Order in which a kind of fault meets the checks."""
    first = FIRST.get(kind, VALUES)
    return lambda id: first.index(id) if id in first else len(first)


def _explanations(subject: Subject) -> Mapping[str, str]:
    """The environment's explanations of fields that show nowhere."""
    with opened(subject) as env:
        told = (env.unwrapped.metadata or {}).get("unobservable")
        return dict(told) if isinstance(told, Mapping) else {}


class _Clock:
    def __init__(self, limit: float, *, waits: bool) -> None:
        self.limit, self.waits = limit, waits
        self.busy, self.start = time.process_time(), time.perf_counter()

    @property
    def spent(self) -> float:
        waited = (time.perf_counter() - self.start) / 2 if self.waits else 0.0
        return max(time.process_time() - self.busy, waited)

    @property
    def over(self) -> bool:
        return self.spent > self.limit


def _trial(
    subject: Subject, fault: _Fault, passed: Sequence[str], budget: Budget, seed: int, clock: _Clock
) -> Trial | None:
    """Trial of a fault; None where no check detected it, or the time was up."""
    from sandboxgym.conformance.runner import run_check  # which offers this module's result

    fault.tried = 0
    mutant = fault.subject(subject)
    for id in passed:
        if clock.over:
            return None
        result = run_check(REGISTRY[id], mutant, budget, seed)
        if result.verdict is Verdict.FAIL:
            return Trial(*fault.name, "caught", id)
        fault.tried += 1
    return None


def _missed(fault: _Fault, clock: _Clock, passed: Sequence[str]) -> Trial:
    if fault.tried < len(passed):
        return Trial(*fault.name, "not tried", f"the time was up after {clock.spent:.0f} s")
    if fault.effects:
        note = f"{fault.effects} restores were wrong, and nothing that followed showed it"
        return Trial(*fault.name, "unseen", note)
    note = "no restore found another value where it came"
    return Trial(*fault.name, "never varied" if fault.kind == "left out" else "without effect", note)


# The state and its fields.


def name(path: Path) -> str:
    """A path as readable text: ``inventory.keys``, ``[2].name``."""
    text = "".join(f".{part}" if isinstance(part, str) else f"[{part}]" for part in path).lstrip(".")
    return text or "the state"


def field_of(value: Any, path: Path) -> Any:
    """Value at a path.

    Raises:
        LookupError, AttributeError: there is no such field.
    """
    for part in path:
        value = value[part] if isinstance(value, (dict, list, tuple)) and not _named(value) else getattr(value, part)
    return value


def with_field(value: Any, path: Path, new: Any) -> Any:
    """A copy with another value at a path; only containers on the path are copied, nothing is changed.

    Raises:
        LookupError, AttributeError: there is no such field.
    """
    if not path:
        return new
    part, *rest = path
    inner = with_field(field_of(value, (part,)), tuple(rest), new)
    if _named(value):
        return value._replace(**{part: inner})
    if isinstance(value, dict):
        return type(value)({**value, part: inner}) if type(value) is dict else _set(copy.copy(value), part, inner)
    if isinstance(value, (list, tuple)):
        return type(value)([*value[:part], inner, *value[part + 1 :]])
    other = copy.copy(value)
    object.__setattr__(other, part, inner)
    return other


def _set(value: Any, part: Any, inner: Any) -> Any:
    value[part] = inner
    return value


def _named(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def paths(values: Sequence[Any], *, depth: int = DEPTH, root: bool = True) -> list[Path]:
    """Fields common to these values: leaves of nested dicts, dataclasses, named tuples; items of the root."""
    first = values[0]
    parts: list[Any] = []
    if depth and all(type(value) is type(first) for value in values):
        if dataclasses.is_dataclass(first) and not isinstance(first, type):
            parts = [each.name for each in dataclasses.fields(first)]
        elif _named(first):
            parts = list(first._fields)
        elif isinstance(first, dict) and all(isinstance(key, str) for key in first):
            parts = list(first) if all(value.keys() == first.keys() for value in values) else []
        elif root and isinstance(first, (list, tuple)) and all(len(value) == len(first) for value in values):
            parts = list(range(len(first)))
    if not 0 < len(parts) <= WIDTH:
        return [()]
    inside = [paths([field_of(value, (part,)) for value in values], depth=depth - 1, root=False) for part in parts]
    return [(part, *path) for part, found in zip(parts, inside) for path in found]


def trace(value: Any) -> Any:
    """Fingerprint of a field; of an object that is not plain data, its identity."""
    if isinstance(value, (np.ndarray, np.generic, dict, list, tuple, set, frozenset, str, bytes, int, float)):
        return canonical(value)
    if value is None or dataclasses.is_dataclass(value):
        return canonical(value)
    return ("object", id(value))


@dataclass
class _Seen:
    """Fields of the states that the control runs pass through."""

    varied: list[Path]
    constant: list[Path]
    values: dict[Path, list[Any]]
    count: int
    runs: list[Control]
    rich: dict[Path, list[int]]
    """Numbers of control runs, from that in which a field has the most values to that in which it has the fewest."""
    steps: int
    layered: bool
    """The fields are attributes: there is no ``_capture`` to ask."""

    @property
    def episodes(self) -> int:
        """Number of episodes read."""
        return len(self.runs)

    @classmethod
    def of(cls, subject: Subject, budget: Budget, clock: _Clock) -> _Seen:
        """Fields of the certificate's recorded control runs, within a third of the time."""
        states: list[Any] = []
        held: list[Any] = []
        numbers: list[int] = []
        layered = True
        runs: list[Control] = []
        recorded = [control for control in subject.controls if len(control.ops) > 1]
        try:
            for control in recorded or [subject.control(index, budget.steps) for index in range(budget.traces)]:
                if len(runs) >= 2 and clock.spent > clock.limit / 3:
                    break
                with opened(subject) as env:
                    layered = not isinstance(env.unwrapped, SnapshotEnv)
                    for state in _along(subject, env, control):
                        held.append(state)
                        states.append(state if _immutable(env) or _holds(state) else copy.deepcopy(state))
                        numbers.append(len(runs))
                runs.append(control)
            found = paths(states, depth=10 if layered else DEPTH)[:FIELDS]
            values = {path: [field_of(state, path) for state in states] for path in found}
            traces = {path: [repr(trace(value)) for value in values[path]] for path in found}
        finally:
            for state in held:
                release(state)
        varied = [path for path in found if len(set(traces[path])) > 1]
        rich = {path: _richest(traces[path], numbers) for path in found}
        constant = [] if layered else [path for path in found if path not in varied]
        return cls(varied, constant, values, len(states), runs, rich, budget.steps, layered)

    def first(self, fault: _Fault, subject: Subject) -> Subject:
        """The subject, with its control runs in the order in which they are likely to show a fault."""
        order = self.rich.get(fault.path, range(len(self.runs))) if fault.path is not None else range(len(self.runs))
        runs = {(index, self.steps): self.runs[number] for index, number in enumerate(order)}
        return replace(subject, declared=subject.capabilities, _controls={**subject._controls, **runs})


def _richest(values: Sequence[str], numbers: Sequence[int]) -> list[int]:
    """Numbers of runs, those with the most different values first."""
    found: dict[int, set[str]] = {number: set() for number in numbers}
    for value, number in zip(values, numbers):
        found[number].add(value)
    return sorted(found, key=lambda number: -len(found[number]))


def _along(subject: Subject, env: AnyEnv, control: Control) -> Iterator[Any]:
    """States at some moments of a control run, the start of the next episode included."""
    every = max(1, len(control.ops) // 8)
    for index, op in enumerate(control.ops):
        subject.call(env, op)
        if index % every == 0 or index == len(control.ops) - 1:
            yield _state(env)


def _state(env: AnyEnv) -> Any:
    base = env.unwrapped
    return base._capture() if isinstance(base, SnapshotEnv) else _attributes(base)


def _attributes(env: AnyEnv, depth: int = 8) -> dict[str, Any]:
    """Copyable attributes of an environment, and of environments inside it."""
    found: dict[str, Any] = {}
    for key, value in vars(env).items():
        if key in _INERT or isinstance(value, (gym.Space, type)) or callable(value):
            continue
        if isinstance(value, gym.Env):
            if depth:
                found[key] = _attributes(value, depth - 1)
            continue
        try:
            found[key] = copy.deepcopy(value)
        except Exception:  # a process, a lock: what cannot be copied cannot be left out either
            continue
    return found


def _owner(env: Any, path: Path) -> tuple[Any, Path]:
    """The innermost environment on a path of attributes, and the rest of the path."""
    while len(path) > 1 and isinstance(getattr(env, path[0]), gym.Env):
        env, path = getattr(env, path[0]), path[1:]
    return env, path


def _immutable(env: AnyEnv) -> bool:
    return bool(getattr(env.unwrapped, "immutable_state", False))


def _holds(state: Any) -> bool:
    """True if a state holds a resource that must be released, which a copy would release twice."""
    return callable(getattr(state, "release", None))


# The faults.


@dataclass(eq=False)
class _Fault:
    """A fault, and the number of times that it took effect."""

    label: str
    kind: str
    path: Path | None = None
    subclass: Callable[[type[Any], _Fault], dict[str, Any]] | None = None
    """Maps the class of a `SnapshotEnv` to the members of a faulty subclass."""
    around: Callable[[AnyEnv, _Fault], Callable[[], None]] | None = None
    """Called before a restore; its result is called after it."""
    effects: int = 0
    tried: int = 0

    @property
    def name(self) -> tuple[str, str]:
        return self.label, self.kind

    def subject(self, subject: Subject) -> Subject:
        """The environment with this fault, and the control runs of the one without."""

        def made() -> AnyEnv:  # has no name by which another process could make it
            return self.put_into(subject.make_env())

        mutant = replace(subject, make_env=made, make_spec=None, declared=subject.capabilities)
        mutant.__dict__["noise"] = subject.noise
        return mutant

    def put_into(self, env: AnyEnv) -> AnyEnv:
        if self.subclass is None:
            return _Around(env, self)
        base: Any = env.unwrapped
        kind = type(base)
        members = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, **self.subclass(kind, self)}
        base.__class__ = type(kind.__name__, (kind,), members)
        return env


class _Around(gym.Wrapper[Any, Any, Any, Any]):
    """A wrapper with faulty restores, or snapshots."""

    def __init__(self, env: AnyEnv, fault: _Fault) -> None:
        super().__init__(env)
        self.fault = fault
        self.before: Any = None

    @property
    def snapshot_spec(self) -> Any:
        return declaration(self.env)

    def step(self, action: Any) -> Any:
        if self.fault.kind == "stale":
            self._forget()
            self.before = snapshot(self.env)
        return super().step(action)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._forget()
        return super().reset(seed=seed, options=options)

    def snapshot(self) -> Any:
        if self.before is None:
            return snapshot(self.env)
        stale, self.before = self.before, None
        self.fault.effects += 1
        return stale

    def restore(self, snap: Any, *, seed: int | None = None) -> Any:
        self._forget()
        after = self.fault.around(self.env, self.fault) if self.fault.around else lambda: None
        result = restore(self.env, snap, seed)
        after()
        return result

    def fork(self, k: int, *, seed: int | None = None) -> list[_Around]:
        return [_Around(child, self.fault) for child in fork(self.env, k, seed)]

    def close(self) -> None:
        self._forget()
        super().close()

    def _forget(self) -> None:
        if self.before is not None:
            release(self.before)
            self.before = None


def _faults(subject: Subject, seen: _Seen) -> Iterator[_Fault]:
    """All faults that can be put into an environment and may change something."""
    with opened(subject) as env:
        env.reset(seed=subject.seed, options=copy.deepcopy(subject.options(0)))
        shared = not seen.layered and not _immutable(env)
        coded = [] if env is env.unwrapped else _coded(env)
        streams = [each for each in ("np_random", "action_space", "observation_space") if subject.capabilities.rng]
        named = [type(wrapper).__name__ for wrapper in coded]
    for path in seen.varied:
        yield _leaving_out(path, seen.layered)
    for path in seen.varied + seen.constant:
        if any(trace(coarser(value)) != trace(value) for value in seen.values[path]):
            yield _coarsening(path, seen.layered)
    for path in seen.varied + seen.constant if shared else ():
        if isinstance(seen.values[path][-1], (dict, list, set, bytearray, np.ndarray)):
            yield _sharing(path)
    yield _Fault("the whole", "stale")
    for stream in streams:
        yield _Fault(stream, "stream", around=_stream(stream))
    for index, label in enumerate(named):
        yield _Fault(label, "wrapper", around=_wrapper(index))


def _leaving_out(path: Path, layered: bool) -> _Fault:
    def members(kind: type[Any], fault: _Fault) -> dict[str, Any]:
        def apply(self: Any, state: Any) -> None:
            if not self._was_reset:  # there is nothing that could stay
                return kind._apply(self, state)  # type: ignore[no-any-return]
            held = self._capture()
            try:
                mine = field_of(held, path)
                fault.effects += trace(mine) != trace(field_of(state, path))
                state = with_field(state, path, mine if self.immutable_state else copy.deepcopy(mine))
                kind._apply(self, state)
            finally:
                release(held)
            return None

        return {"_apply": apply}

    def around(env: AnyEnv, fault: _Fault) -> Callable[[], None]:
        mine = copy.deepcopy(field_of(*_owner(env.unwrapped, path)))

        def after() -> None:
            owner, rest = _owner(env.unwrapped, path)
            fault.effects += trace(field_of(owner, rest)) != trace(mine)
            _write(owner, rest, mine)

        return after

    return _Fault(name(path), "left out", path, None if layered else members, around if layered else None)


def _write(owner: Any, path: Path, value: Any) -> None:
    setattr(owner, path[0], with_field(getattr(owner, path[0]), path[1:], value))


def _coarsening(path: Path, layered: bool) -> _Fault:
    def members(kind: type[Any], fault: _Fault) -> dict[str, Any]:
        def apply(self: Any, state: Any) -> None:
            value = field_of(state, path)
            fault.effects += trace(coarser(value)) != trace(value)
            kind._apply(self, with_field(state, path, coarser(value)))

        return {"_apply": apply}

    def around(env: AnyEnv, fault: _Fault) -> Callable[[], None]:
        def after() -> None:
            owner, rest = _owner(env.unwrapped, path)
            value = field_of(owner, rest)
            fault.effects += trace(coarser(value)) != trace(value)
            _write(owner, rest, coarser(value))

        return after

    return _Fault(name(path), "coarser", path, None if layered else members, around if layered else None)


def coarser(value: Any) -> Any:
    """A number, text or array rounded as by a narrower type, in its original type."""
    if isinstance(value, bool) or value is None:
        return value
    if type(value) is float:
        return float(np.float32(value))
    if type(value) is int:
        return (value + 2**31) % 2**32 - 2**31
    if type(value) is str:
        return value.encode("ascii", "replace").decode()
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype in (np.float64, np.int64):
        narrow = np.float32 if value.dtype == np.float64 else np.int32
        return value.astype(narrow).astype(value.dtype)
    if type(value) in (list, tuple):
        return type(value)(coarser(item) for item in value)
    if type(value) is dict:
        return {key: coarser(item) for key, item in value.items()}
    return value


def _sharing(path: Path) -> _Fault:
    taken: dict[int, tuple[Any, Any]] = {}

    def members(kind: type[Any], fault: _Fault) -> dict[str, Any]:
        def capture(self: Any) -> Any:
            state = kind._capture(self)
            value = field_of(state, path)
            taken[id(value)] = value, trace(value)
            return with_field(copy.deepcopy(state), path, value)

        def apply(self: Any, state: Any) -> None:
            value = field_of(state, path)
            fault.effects += id(value) in taken and taken[id(value)][1] != trace(value)
            kind._apply(self, with_field(copy.deepcopy(state), path, value))

        return {"_capture": capture, "_apply": apply, "immutable_state": True}

    return _Fault(name(path), "shared", path, members)


def _stream(stream: str) -> Callable[[AnyEnv, _Fault], Callable[[], None]]:
    def around(env: AnyEnv, fault: _Fault) -> Callable[[], None]:
        if stream == "np_random":
            mine = randomness.capture(env.unwrapped.np_random)

            def after() -> None:
                base = env.unwrapped
                fault.effects += randomness.capture(base.np_random) != mine
                found = randomness.restored(mine, vars(base).get("_np_random"))
                if found is not None and found is not base.np_random:
                    base.np_random = found
        else:
            randomness.materialise(getattr(env, stream))
            kept = randomness.capture_spaces(getattr(env, stream))

            def after() -> None:
                space = getattr(env, stream)
                fault.effects += randomness.capture_spaces(space) != kept
                randomness.restore_spaces(kept, space)

        return after

    return around


def _wrapper(index: int) -> Callable[[AnyEnv, _Fault], Callable[[], None]]:
    def around(env: AnyEnv, fault: _Fault) -> Callable[[], None]:
        wrapper, codec = [each for each in wrappers._stack(env)[0] if each[1].state][index]
        held = wrappers._held(wrapper, codec)

        def after() -> None:
            fault.effects += any(trace(getattr(wrapper, key)) != trace(value) for key, value in held[0].items())
            wrappers._put_back(wrapper, held)

        return after

    return around


def _coded(env: AnyEnv) -> list[Any]:
    """The stateful wrappers of a stack."""
    try:
        return [wrapper for wrapper, codec in wrappers._stack(env)[0] if codec.state]
    except Exception:  # an unknown wrapper: wrappers.* says so
        return []
