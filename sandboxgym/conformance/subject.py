"""The subject of a certificate: a function that makes the environment, a source of actions, and declarations.

1. Checks call the protocol (``snapshot``, ``restore``, ``fork``, ``snapshot_spec``), Gymnasium's methods and the
   optional hooks given here. Some also read attributes: to find random generators, and to name what differs.
2. A `Control` is a recorded run without any snapshot: the reference for restored environments. Each is replayed once in
   a new environment, so that differences without snapshots are known before a snapshot is blamed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import gymnasium as gym
import numpy as np

import sandboxgym
from sandboxgym.conformance.harness.canonical import Canonical, canonical
from sandboxgym.conformance.supervision import pulse
from sandboxgym.core import SnapshotSpec, Transition
from sandboxgym.system.modules import import_callable

AnyEnv = gym.Env[Any, Any]
Policy = Literal["on", "off"]

_VERSIONED = re.compile(r"-v\d+$")


@dataclass(frozen=True, slots=True)
class MakeSpec:
    """Name and arguments by which another process makes the environment.

    Attributes:
        target: a Gymnasium id (``namespace/Name-v0``, ``package.module:Name-v0``) or a factory (``module:function``).
        kwargs: keyword arguments for `gymnasium.make` or the factory.
    """

    target: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_id(self) -> bool:
        """True if the target is a Gymnasium id."""
        return bool(_VERSIONED.search(self.target))

    def factory(self) -> Callable[[], AnyEnv]:
        """A function that makes the environment; an unknown id raises only when it is called.

        Raises:
            ValueError: the target is neither an id nor ``module:function``.
            ImportError, AttributeError: there is no such module or function.
        """
        if self.is_id:
            return functools.partial(gym.make, self.target, **self.kwargs)
        module, _, name = self.target.partition(":")
        if not module or not name:
            raise ValueError(f"expected a Gymnasium id (…-v0) or module:function, found {self.target!r}")
        return functools.partial(import_callable(self.target), **self.kwargs)

    def source(self) -> str:
        """Python source that defines ``make_env``."""
        arguments = "".join(f", {name}={value!r}" for name, value in self.kwargs.items())
        if self.is_id:
            return f"def make_env():\n    return gym.make({self.target!r}{arguments})\n"
        module, _, name = self.target.partition(":")
        call = f"{name}({arguments[2:]})"
        return f"from {module} import {name.partition('.')[0]}\n\n\ndef make_env():\n    return {call}\n"


class Op(NamedTuple):
    """One call on an environment: ``("reset", (seed, options))`` or ``("step", action)``."""

    kind: Literal["reset", "step"]
    value: Any


class Outcome(NamedTuple):
    """Output of a call, in canonical form; if the call raised, ``raised`` is the type of the exception."""

    observation: Canonical = None
    reward: Canonical = None
    terminated: Canonical = None
    truncated: Canonical = None
    info: Canonical = None
    raised: str | None = None
    state: Canonical = None
    """Result of `Subject.observe_state` after the call, in canonical form; None without that hook."""


@dataclass(frozen=True, slots=True)
class Control:
    """An uninterrupted run: an episode, two steps after its end, and the start of the next episode."""

    name: str
    seed: int
    ops: tuple[Op, ...]
    outcomes: tuple[Outcome, ...]
    ended: int | None
    """Number of ops in the first episode, its reset included; None if the end was not reached."""
    repeatable: bool
    """True if a replay in a new environment gave equal outcomes."""
    differs: str
    """First difference of the replay; empty if there is none."""
    seconds: float
    """Seconds of one run, the smaller of the recording and its replay."""

    @property
    def last(self) -> int:
        """Number of ops until the first episode ended, or until the recording stopped."""
        if self.ended is not None:
            return self.ended
        return next((index for index, op in enumerate(self.ops) if index and op.kind == "reset"), len(self.ops))


@dataclass(eq=False)
class Subject:
    """An environment to certify.

    Attributes:
        make_env: makes the environment as its user gets it, wrappers included.
        name: name in reports.
        actions: function of (observation, info, rng) that returns an action. Default: one of
            ``info["admissible_commands"]`` if there are any, else a sample of the action space, under the
            ``action_mask`` if there is one. Off-policy runs use it for about half of their actions and sample the
            action space for the others.
        observe_state: function of the environment that returns its hidden state, as a value that compares with ``==``.
        normalize: function that removes from a `Transition` the parts that are declared nondeterministic.
        reset_options: options of every ``reset``; from a list, each control run takes the next one, in turn.
        make_spec: how another process makes the environment; default: derived if ``make_env`` can be imported by name.
        declared: coverage of the snapshots; default: the environment's ``snapshot_spec``.
        shell: function of (environment, command) that runs a POSIX shell command, possibly of several lines, in the
            sandbox as an agent would, and returns its output.
        lossy: function of (environment, snapshot), called after the snapshot was restored in the environment; it
            returns texts that say what the snapshot does not hold. Default: ``info["lossy"]`` of the restore.
        limits: function of an environment after a reset. It returns the limits of the whole sandbox: ``disk`` (bytes),
            ``files`` (their number) and ``seconds`` (of one command). A missing or None limit is not declared.
        seed: seed of the control runs; `run` sets it to its own seed.
        source: Python source that defines ``make_env``, for scripts; default: from ``make_spec``.
    """

    make_env: Callable[[], AnyEnv]
    name: str = ""
    actions: Callable[[Any, dict[str, Any], np.random.Generator], Any] | None = None
    observe_state: Callable[[AnyEnv], Any] | None = None
    normalize: Callable[[Transition], Any] | None = None
    reset_options: dict[str, Any] | list[dict[str, Any]] | None = None
    make_spec: MakeSpec | None = None
    declared: SnapshotSpec | None = None
    shell: Callable[[AnyEnv, str], str] | None = None
    lossy: Callable[[AnyEnv, Any], Sequence[str]] | None = None
    limits: Callable[[AnyEnv], Mapping[str, float | None]] | None = None
    seed: int = 0
    source: str | None = None
    _controls: dict[tuple[int, int], Control] = field(default_factory=dict, repr=False)
    _whole: dict[tuple[str, int], tuple[Control, ...]] = field(default_factory=dict, repr=False)
    """Control runs of `whole`; not in ``_controls``, whose runs every check plays."""

    def __post_init__(self) -> None:
        if self.make_spec is None:
            self.make_spec = named_factory(self.make_env)
        if self.source is None and self.make_spec is not None:
            self.source = self.make_spec.source()
        if not self.name:
            self.name = self.make_spec.target if self.make_spec else _name(self.make_env)

    @classmethod
    def named(cls, target: str, make_kwargs: Mapping[str, Any] | None = None, **hooks: Any) -> Subject:
        """The subject for a Gymnasium id or a factory ``module:function``.

        Args:
            target: the id, which needs no namespace if it is one of this package; or the factory.
            make_kwargs: keyword arguments for `gymnasium.make` or the factory.
            hooks: other attributes of `Subject`.

        Raises:
            ValueError: the target is neither an id nor ``module:function``.
            ImportError, AttributeError: there is no such module or function.
        """
        short = f"sandboxgym/{target}"
        target = short if target not in gym.registry and short in gym.registry else target
        spec = MakeSpec(target, dict(make_kwargs or {}))
        return cls(spec.factory(), name=hooks.pop("name", "") or target, make_spec=spec, **hooks)

    @functools.cached_property
    def capabilities(self) -> SnapshotSpec:
        """Declared capabilities, with defaults for missing attributes; the environment is made to read them.

        Raises:
            AttributeError: the environment has no ``snapshot_spec``, and ``declared`` is not given.
        """
        if self.declared is not None:
            return self.declared
        env = self.make_env()
        try:
            return as_spec(declaration(env))
        finally:
            env.close()

    def reseed(self, seed: int) -> None:
        """Set the seed of all later draws, and forget recorded runs if it is another one."""
        if seed != self.seed:
            self.seed = seed
            self._controls.clear()
            self._whole.clear()
            self.__dict__.pop("noise", None)

    def options(self, index: int) -> dict[str, Any] | None:
        """Reset options of the ``index``-th control run."""
        if isinstance(self.reset_options, list):
            return self.reset_options[index % len(self.reset_options)] if self.reset_options else None
        return self.reset_options

    def call(self, env: AnyEnv, op: Op) -> tuple[Outcome, tuple[Any, ...] | None]:
        """Perform ``op`` with a copy of its arguments; return its output, canonical and raw (None if it raised)."""
        return self.call_with(env, op.kind, copy.deepcopy(op.value))

    def call_with(self, env: AnyEnv, kind: str, value: Any) -> tuple[Outcome, tuple[Any, ...] | None]:
        """Perform a call as `call` does, but pass ``value`` itself, not a copy."""
        raw: tuple[Any, ...]
        pulse.beat()
        try:
            if kind == "reset":
                seed, options = value
                observation, info = env.reset(seed=seed, options=options)
                raw = (observation, 0.0, False, False, info)
            else:
                raw = env.step(value)
                if not isinstance(raw, tuple) or len(raw) != 5:
                    raise TypeError(f"expected 5 values of step(), found {raw!r:.200}")
        except (Exception, SystemExit) as error:
            return Outcome(raised=type(error).__qualname__, state=self._state(env)), None
        return self.outcome(env, *raw), raw

    def outcome(
        self, env: AnyEnv, observation: Any, reward: Any, terminated: Any, truncated: Any, info: Any
    ) -> Outcome:
        """A transition in canonical form, without the parts to ignore."""
        if isinstance(info, dict):
            info = without_clocks(env, info)
        fields: Any = (observation, reward, terminated, truncated, info)
        if self.normalize is not None:
            fields = self.normalize(Transition(*copy.deepcopy(fields)))
            if not isinstance(fields, tuple) or len(fields) != 5:
                return Outcome(observation=canonical(fields), state=self._state(env))
        return Outcome._make([*map(canonical, fields), None, self._state(env)])

    def _state(self, env: AnyEnv) -> Canonical:
        return None if self.observe_state is None else canonical(self.observe_state(env))

    def control(self, index: int, steps: int) -> Control:
        """The ``index``-th control run, recorded at the first request; runs with an odd index are off-policy."""
        key = (index, steps)
        if key not in self._controls:
            self._controls[key] = self._record(index, steps)
        return self._controls[key]

    @property
    def controls(self) -> tuple[Control, ...]:
        """All control runs recorded so far."""
        return tuple(self._controls.values())

    def _record(self, index: int, steps: int) -> Control:
        from sandboxgym.conformance.harness.scenario import record  # which needs this module

        return record(self, index, steps)

    @functools.cached_property
    def noise(self) -> str:
        """First difference between runs with one seed, or with other random draws; empty if there is none."""
        from sandboxgym.conformance.harness.scenario import noise

        return noise(self)


# The protocol, called through any stack of wrappers.


def methods(env: Any) -> bool:
    """True if the outermost layer has the protocol's methods itself."""
    return all(callable(getattr(env, name, None)) for name in ("snapshot", "restore", "fork"))


def snapshot(env: AnyEnv) -> Any:
    """Take a snapshot of ``env`` with its wrappers."""
    pulse.beat()
    method: Callable[[], Any] = env.snapshot if methods(env) else functools.partial(sandboxgym.snapshot, env)  # type: ignore[attr-defined]
    return pulse.weigh(method)


def restore(env: AnyEnv, snap: Any, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
    """Restore ``snap`` in ``env``; return the observation and info."""
    pulse.beat()
    if methods(env):  # without the keyword where it is not needed: a fault in it has a check of its own
        result = env.restore(snap) if seed is None else env.restore(snap, seed=seed)  # type: ignore[attr-defined]
    else:
        result = sandboxgym.restore(env, snap, seed=seed)
    return result  # type: ignore[no-any-return]


def fork(env: AnyEnv, k: int, seed: int | None = None) -> list[AnyEnv]:
    """Fork ``env``; return its ``k`` children."""
    pulse.beat()
    if methods(env):
        return list(env.fork(k) if seed is None else env.fork(k, seed=seed))  # type: ignore[attr-defined]
    return list(sandboxgym.fork(env, k, seed=seed))


def layers(env: Any) -> Iterator[Any]:
    """All layers: the wrappers from the outermost on, then the base environment."""
    while isinstance(env, gym.Wrapper):
        yield env
        env = env.env
    yield env


def declaration(env: AnyEnv) -> Any:
    """The ``snapshot_spec`` of the outermost layer that has one.

    Raises:
        AttributeError: no layer has one.
    """
    for layer in layers(env):
        spec = getattr(layer, "snapshot_spec", None)
        if spec is not None:
            return spec
    raise AttributeError(f"{env} has no snapshot_spec, which declares what its snapshots cover")


def as_spec(value: Any) -> SnapshotSpec:
    """Convert a declaration, which may be any object with the attributes of a `SnapshotSpec`, to a `SnapshotSpec`."""
    if isinstance(value, SnapshotSpec):
        return value
    names = SnapshotSpec.__dataclass_fields__
    return SnapshotSpec(**{name: getattr(value, name) for name in names if hasattr(value, name)})


def without_clocks(env: AnyEnv, info: dict[str, Any]) -> dict[str, Any]:
    """``info`` without the elapsed seconds that Gymnasium's `RecordEpisodeStatistics` writes into it."""
    for layer in layers(env):
        if isinstance(layer, gym.wrappers.RecordEpisodeStatistics):
            key = getattr(layer, "_stats_key", "episode")
            if isinstance(info.get(key), dict) and "t" in info[key]:
                info = {**info, key: {name: value for name, value in info[key].items() if name != "t"}}
    return info


def named_factory(factory: Any) -> MakeSpec | None:
    """Return how another process makes what a factory makes; None if the factory cannot be imported by name."""
    kwargs: dict[str, Any] = {}
    while isinstance(factory, functools.partial):
        if factory.args:
            if factory.func is gym.make and len(factory.args) == 1 and isinstance(factory.args[0], str):
                return MakeSpec(factory.args[0], {**factory.keywords, **kwargs})
            return None
        kwargs = {**factory.keywords, **kwargs}
        factory = factory.func
    module, name = getattr(factory, "__module__", None), getattr(factory, "__qualname__", "")
    if not module or not name or "<" in name or module == "__main__":
        return None
    with contextlib.suppress(Exception):
        spec = MakeSpec(f"{module}:{name}", kwargs)
        found = spec.factory()
        if isinstance(found, functools.partial) and found.func == factory:
            return spec
    return None


def _name(factory: Any) -> str:
    return getattr(factory, "__qualname__", None) or type(factory).__qualname__
