"""Faults put into an environment: in a restored field, in a snapshot, in a random stream, in a wrapper."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import gymnasium as gym
import numpy as np

from sandboxgym import randomness
from sandboxgym.conformance.harness import generators
from sandboxgym.conformance.harness.scenario import opened, release
from sandboxgym.conformance.strength.fields import Path, field_of, name, trace, with_field
from sandboxgym.conformance.strength.states import Seen, is_immutable, owner_of
from sandboxgym.conformance.subject import AnyEnv, Subject, declaration, fork, restore, snapshot
from sandboxgym.wrappers import stack as wrappers


@dataclass(eq=False)
class Fault:
    """A fault, and the number of times that it took effect."""

    label: str
    kind: str
    path: Path | None = None
    subclass: Callable[[type[Any], Fault], dict[str, Any]] | None = None
    """Maps the class of a `SnapshotEnv` to the members of a faulty subclass."""
    around: Callable[[AnyEnv, Fault], Callable[[], None]] | None = None
    """Called before a restore; its result is called after it."""
    effects: int = 0
    tried: int = 0

    @property
    def name(self) -> tuple[str, str]:
        """Field and kind of the fault, as a trial shows them."""
        return self.label, self.kind

    def subject(self, subject: Subject) -> Subject:
        """The subject with this fault in its environments, and with the control runs of the subject without it."""

        def made() -> AnyEnv:  # has no name by which another process could make it
            return self.put_into(subject.make_env())

        mutant = replace(subject, make_env=made, make_spec=None, declared=subject.capabilities)
        mutant.__dict__["noise"] = subject.noise
        return mutant

    def put_into(self, env: AnyEnv) -> AnyEnv:
        """The environment with this fault: of another class, or in a wrapper."""
        if self.subclass is None:
            return _Around(env, self)
        base: Any = env.unwrapped
        kind = type(base)
        members = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, **self.subclass(kind, self)}
        base.__class__ = type(kind.__name__, (kind,), members)
        return env


class _Around(gym.Wrapper[Any, Any, Any, Any]):
    """A wrapper with faulty restores, or snapshots."""

    def __init__(self, env: AnyEnv, fault: Fault) -> None:
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


def faults_of(subject: Subject, seen: Seen) -> Iterator[Fault]:
    """All faults that can be put into an environment and may change something."""
    with opened(subject) as env:
        env.reset(seed=subject.seed, options=copy.deepcopy(subject.options(0)))
        shared = not seen.layered and not is_immutable(env)
        coded = [] if env is env.unwrapped else _coded(env)
        streams = [each for each in ("np_random", "action_space", "observation_space") if subject.capabilities.rng]
        own = [path for path in generators.find(env) if not path.endswith("._np_random")] if streams else []
        named = [type(wrapper).__name__ for wrapper in coded]
    for path in seen.varied:
        yield _leaving_out(path, seen.layered)
    for path in seen.varied + seen.constant:
        if any(trace(coarser(value)) != trace(value) for value in seen.values[path]):
            yield _coarsening(path, seen.layered)
    for path in seen.varied + seen.constant if shared else ():
        if isinstance(seen.values[path][-1], (dict, list, set, bytearray, np.ndarray)):
            yield _sharing(path)
    yield Fault("the whole", "stale")
    for stream in streams:
        yield Fault(stream, "stream", around=_stream(stream))
    for each in own:
        yield Fault(each, "stream", around=_own_stream(each))
    for index, label in enumerate(named):
        yield Fault(label, "wrapper", around=_wrapper(index))


def _leaving_out(path: Path, layered: bool) -> Fault:
    def members(kind: type[Any], fault: Fault) -> dict[str, Any]:
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

    def around(env: AnyEnv, fault: Fault) -> Callable[[], None]:
        mine = copy.deepcopy(field_of(*owner_of(env.unwrapped, path)))

        def after() -> None:
            owner, rest = owner_of(env.unwrapped, path)
            fault.effects += trace(field_of(owner, rest)) != trace(mine)
            _write(owner, rest, mine)

        return after

    return Fault(name(path), "left out", path, None if layered else members, around if layered else None)


def _write(owner: Any, path: Path, value: Any) -> None:
    setattr(owner, path[0], with_field(getattr(owner, path[0]), path[1:], value))


def _coarsening(path: Path, layered: bool) -> Fault:
    def members(kind: type[Any], fault: Fault) -> dict[str, Any]:
        def apply(self: Any, state: Any) -> None:
            value = field_of(state, path)
            fault.effects += trace(coarser(value)) != trace(value)
            kind._apply(self, with_field(state, path, coarser(value)))

        return {"_apply": apply}

    def around(env: AnyEnv, fault: Fault) -> Callable[[], None]:
        def after() -> None:
            owner, rest = owner_of(env.unwrapped, path)
            value = field_of(owner, rest)
            fault.effects += trace(coarser(value)) != trace(value)
            _write(owner, rest, coarser(value))

        return after

    return Fault(name(path), "coarser", path, None if layered else members, around if layered else None)


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


def _sharing(path: Path) -> Fault:
    taken: dict[int, tuple[Any, Any]] = {}

    def members(kind: type[Any], fault: Fault) -> dict[str, Any]:
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

    return Fault(name(path), "shared", path, members)


def _stream(stream: str) -> Callable[[AnyEnv, Fault], Callable[[], None]]:
    def around(env: AnyEnv, fault: Fault) -> Callable[[], None]:
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


def _own_stream(path: str) -> Callable[[AnyEnv, Fault], Callable[[], None]]:
    """Fault: a restore leaves a generator that is found by its path as it is."""

    def around(env: AnyEnv, fault: Fault) -> Callable[[], None]:
        held = generators.find(env, [path]).get(path)
        if held is None or not held.renewable:
            return lambda: None
        mine, bits = held.save(), held.bits()

        def after() -> None:
            now = generators.find(env, [path]).get(path)
            if now is not None and now.kind == held.kind:
                fault.effects += now.bits() != bits
                now.load(mine)

        return after

    return around


def _wrapper(index: int) -> Callable[[AnyEnv, Fault], Callable[[], None]]:
    def around(env: AnyEnv, fault: Fault) -> Callable[[], None]:
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
