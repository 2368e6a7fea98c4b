"""The snapshot contract: what every environment of this suite promises beyond the Gymnasium API.

1. Fidelity. After a restore, the same actions yield the same observations, rewards, flags and infos until the episode
   ends.
2. Non-interference. Taking a snapshot changes nothing: no state, no random stream, no step count.
3. Any order, any time. A snapshot restores any number of times: nested, after ``reset``, after the episode ended,
   after the environment that took it was closed, in another process.
4. Isolation. Forks never see each other's effects, nor those of the environment they came from.
5. The whole environment. Random streams (the environment's and its spaces') and the wrappers around it
   (``wrappers/stack.py``) are part of its state; state that cannot be captured is refused, or listed in
   ``info["lossy"]`` by environments that declare losses.
6. Freshness. ``restore`` returns the observation and info of the captured moment; ``last`` is the whole transition.
7. Randomness. ``restore(snap)`` is exact; ``restore(snap, seed=S)`` and ``fork(k, seed=S)`` give fresh streams.
8. Durable. ``Snapshot.save`` and ``load`` use a format that never executes code (``serialization.py``); a mismatch is
   refused with a typed error (``errors.py``), in time and memory proportional to the file's size (``bounds.py``), and
   the environment stays as it was. Errors that do not come from the file (an interrupt, an exit, a time limit raised by
   a signal, a full disk) pass unchanged.
9. All or nothing. A failed ``fork`` leaves no child behind, a failed ``restore`` no half-restored environment.

An author of an environment derives from `SnapshotEnv` and writes `_capture` and `_apply`. An environment that shares
no code with this package qualifies through the `SupportsSnapshot` protocol.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import inspect
import json
import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import (
    Any,
    ClassVar,
    Protocol,
    Self,
    TypeVar,
    runtime_checkable,
)

import gymnasium as gym
import numpy as np

from sandboxgym import randomness, serialization
from sandboxgym.brief import brief
from sandboxgym.errors import (
    ResetNeeded,
    SnapshotCorrupt,
    SnapshotError,
    SnapshotMismatch,
    from_outside,
)
from sandboxgym.serialization import Piece
from sandboxgym.snapshots import Body, Header, Kind, Layer, Snapshot, SnapshotSpec, Transition, as_dict
from sandboxgym.taken import TakenNames

__all__ = [
    "ATOMS",
    "Header",
    "Kind",
    "Layer",
    "Snapshot",
    "SnapshotEnv",
    "SnapshotSpec",
    "SupportsSnapshot",
    "Through",
    "Transition",
    "comparable",
    "constructor_signature",
    "copied",
    "tried",
]

ObsT = TypeVar("ObsT")
ActT = TypeVar("ActT")

Through = Callable[[Any, dict[str, Any]], tuple[Any, dict[str, Any]]]
"""Maps the (observation, info) of an environment to that of the wrappers around it."""
Seeded = tuple[np.random.Generator, int]
"""A random stream that nobody used, and its seed."""


@runtime_checkable
class SupportsSnapshot(Protocol):
    """Protocol of snapshotable environments, required by the conformance suite and the stack-walking functions."""

    snapshot_spec: SnapshotSpec

    def snapshot(self) -> Any:
        """Capture the state without changing it."""

    def restore(self, snap: Any, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Return to the captured state, in place."""

    def fork(self, k: int, *, seed: int | None = None) -> Sequence[gym.Env[Any, Any]]:
        """Create new environments at this state."""


def tried(env: gym.Env[Any, Any], actions: Sequence[Any], here: Any, restore: Callable[[Any], Any]) -> list[Transition]:
    """Try each action by itself from the present state, whose snapshot ``here`` is released at the end.

    Args:
        env: to step.
        actions: in any number.
        here: of the state that ``env`` is in.
        restore: back to it; called after every step, also one that raises.
    """
    found = []
    try:
        for action in actions:
            try:
                observation, reward, terminated, truncated, info = env.step(action)
            finally:
                restore(here)
            found.append(Transition(observation, float(reward), bool(terminated), bool(truncated), info))
        return found
    finally:
        getattr(here, "release", lambda: None)()


def constructor_signature(kind: type[Any]) -> inspect.Signature:
    """Signature of a class, as its ``__init__`` has it.

    ``inspect.signature`` of Python 3.11.3 and older gives that of ``SnapshotEnv.__new__``, which takes anything.
    """
    if kind.__init__ is object.__init__:
        return inspect.signature(kind)
    whole = inspect.signature(kind.__init__)
    return whole.replace(parameters=list(whole.parameters.values())[1:], return_annotation=inspect.Signature.empty)


class SnapshotEnv(gym.Env[ObsT, ActT]):
    """An environment that can be snapshotted, restored and forked at any step.

    Authors write `_capture` and `_apply`, and where they pay off:

    - ``immutable_state = True`` if `_capture` returns a value that nothing ever mutates (no copy is made then); not
      inherited by a class that overrides `_capture`;
    - ``apply_draws = False`` if `_apply` neither draws from ``np_random`` or a space nor replaces one of them (streams
      that are where the snapshot has them are left alone then); not inherited by a class that overrides `_apply`;
    - `_transition`, if the last transition can be recomputed from the state (it is not stored then);
    - `_encode`/`_decode`, if the state is not plain data (None, bool, int, float, str, bytes, list, tuple, dict,
      set, NumPy arrays and scalars);
    - `_encode_pieces`, if the state is large and most of it is what earlier snapshots held;
    - `_config`, what else must be equal for a snapshot to fit (default: the constructor's arguments, as `comparable`
      sees them: of an object that is neither data, an array, a path, a class, a function nor a dataclass, only the
      type is compared);
    - `_blank`, to build a fork more cheaply than by the constructor;
    - `_reseed`, for randomness kept outside ``self.np_random``.
    """

    snapshot_spec: SnapshotSpec = SnapshotSpec()
    state_version: ClassVar[int] = 1
    """Version of the captured state's meaning; raise it with a change, and older snapshots are refused."""
    immutable_state: ClassVar[bool] = False
    apply_draws: ClassVar[bool] = True
    step_limit: int | None = None
    """Steps after which a ``TimeLimit`` ends an episode, if `SnapshotWrapper` finds one (``gym.make``)."""

    _last: Transition | None = None
    _was_reset: bool = False
    _lineage: str | None = None
    _fits: Header | None = None
    _known: randomness.KnownStreams | None = None
    _arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Record the constructor's arguments: `_blank` builds forks from them, `_config` compares them."""
        self = super().__new__(cls)
        self._arguments = (args, kwargs)
        return self

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Record the results of ``reset`` and ``step`` for subclasses, and declare the spec in the metadata.

        Raises:
            TypeError: the class has a name for itself that this class uses; an extension calls ``super()``.
        """
        super().__init_subclass__(**kwargs)
        _TAKEN.refuse_class(cls)
        for name, method in (("immutable_state", "_capture"), ("apply_draws", "_apply")):
            owner = cls.__mro__[_depth(cls, name)]
            known = owner.__mro__ if issubclass(owner, SnapshotEnv) else cls.__mro__
            others = any(method in vars(base) and base not in known for base in cls.__mro__)
            if others or _depth(cls, method) < _depth(cls, name):  # what was declared is not of all of these methods
                setattr(cls, name, getattr(SnapshotEnv, name))
        if isinstance(cls.snapshot_spec, SnapshotSpec):  # a property, where it depends on the instance
            cls.metadata = {**cls.metadata, "snapshot": asdict(cls.snapshot_spec)}
        for name, recording in (("reset", _recording_reset), ("step", _recording_step)):
            owner = cls.__mro__[_depth(cls, name)]
            if owner is cls or not (owner is gym.Env or issubclass(owner, SnapshotEnv)):  # own, or a mixed-in env's
                setattr(cls, name, recording(getattr(cls, name)))

    # What users call.

    @property
    def last(self) -> Transition:
        """The last transition, also right after a restore.

        Raises:
            ResetNeeded: before the first ``reset``.
        """
        self._check_reset("the last transition")
        if self._recomputes():
            return self._transition()
        assert self._last is not None
        return _copied_transition(self._last)

    def snapshot(self) -> Snapshot:
        """Capture this environment (without its wrappers; `sandboxgym.snapshot` takes those too).

        Raises:
            ResetNeeded: before the first ``reset``.
        """
        return self._snapshot(())

    def _snapshot(self, layers: tuple[Layer, ...]) -> Snapshot:
        """Capture this environment, with the states of the wrappers around it."""
        self._check_reset("a snapshot")
        kind = type(self)
        snap = Snapshot(
            self._header(),
            self._body(),
            encode=kind._encode,
            pieces=kind._encode_pieces,
            layers=layers,
            parent=self._lineage,
        )
        self._lineage = snap.id
        return snap

    def restore(self, snap: Snapshot, *, seed: int | None = None) -> tuple[ObsT, dict[str, Any]]:
        """Return to the captured state, in place.

        Args:
            snap: from this environment or any other of the same id and configuration.
            seed: None restores the random streams too; a seed gives this environment its own.

        Returns:
            The observation and info of the captured moment.

        Raises:
            SnapshotMismatch, SnapshotReleased, SnapshotCorrupt: the snapshot does not fit, was released, or is damaged.
            TypeError: ``snap`` is not a `Snapshot`.
            Exception: any other error, such as one that an alarm's handler raises (`sandboxgym.errors.from_outside`).
                After every exception the environment is as it was.
        """
        if isinstance(snap, Snapshot) and snap.layers:
            names = ", ".join(layer.name for layer in snap.layers)
            raise SnapshotMismatch(f"{snap!r} includes the state of wrappers ({names}): restore it through that stack")
        return self._restore(snap, seed, lambda observation, info: (observation, info))

    def successors(self, actions: Sequence[ActT]) -> list[Transition]:
        """Results of ``step`` for each of these actions, tried one by one from this state, which stays unchanged.

        This environment alone: `sandboxgym.successors` heeds the wrappers around it too. An environment that can
        compute a step without taking it overrides this.

        Raises:
            ResetNeeded: before the first ``reset``.
        """
        lineage = self._lineage
        try:
            return tried(self, actions, self.snapshot(), self.restore)
        finally:
            self._lineage = lineage

    def outcomes(self, actions: Sequence[ActT]) -> list[Transition]:
        """`successors` without observations: reward, end, and the keys of ``info`` that identify a state's value.

        An environment whose texts take longer than its steps overrides this: the observation may be None, and ``info``
        may hold ``progress_key``, ``features``, ``success`` and ``valid_action`` alone.
        """
        return self.successors(actions)

    def _restore(self, snap: Snapshot, seed: int | None, through: Through) -> tuple[ObsT, dict[str, Any]]:
        """Restore, and pass the result through the wrappers around; a failure there is rolled back too.

        The layers of the snapshot are not looked at: they are those of the wrappers.
        """
        if not isinstance(snap, Snapshot):
            raise TypeError(f"expected a Snapshot, found {type(snap).__qualname__}")
        seeded = None if seed is None else randomness.seeded(seed)
        self._check_fits(snap)
        body = snap._open(type(self)._decode)
        undo = self._body() if self._was_reset else None
        streams = self._streams() if undo is None else undo.rng
        before = (self._was_reset, self._last)
        try:
            self._put(body, seeded, own=snap._body is None)
            transition = self.last
            observation, info = through(transition.observation, transition.info)
        except BaseException as error:
            if undo is not None:
                self._put(undo, None)
            self._put_streams(streams)  # `_put` may have left them alone, and an environment never reset has some too
            self._was_reset, self._last = before
            if isinstance(error, SnapshotError) or snap._body is not None or from_outside(error):
                raise
            raise SnapshotCorrupt(f"{snap!r} cannot be applied: {brief(error)}") from error
        self._lineage = snap.id
        return observation, info

    def fork(self, k: int, *, seed: int | None = None) -> list[Self]:
        """Create ``k`` new environments at this state; this one stays unchanged.

        Args:
            k: number of environments, at least 1.
            seed: None clones the random streams (siblings share their noise); a seed gives each child its own.

        Raises:
            TypeError, ValueError: ``k`` is no integer, or below 1.
            ResetNeeded: before the first ``reset``.
        """
        if isinstance(k, bool) or not hasattr(k, "__index__"):
            raise TypeError(f"expected a number of forks, found k={brief(k, 80)}")
        if operator.index(k) < 1:
            raise ValueError(f"expected at least 1 fork, found k={brief(k, 80)}")
        lineage = self._lineage
        with self.snapshot() as snap:
            children: list[Self] = []
            try:
                for index in range(k):
                    child = self._blank()
                    children.append(child)
                    self._unshare_spaces(child)
                    child.restore(snap, seed=None if seed is None else randomness.sibling_seed(seed, index))
                    child._lineage = lineage  # nobody else ever sees this snapshot
            except BaseException:
                for child in children:
                    child.close()
                raise
            finally:
                self._lineage = lineage
        return children

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if self._was_reset:
            return self.fork(1)[0]
        twin = self._blank()
        self._unshare_spaces(twin)
        twin._put_streams(self._streams())
        return twin

    def __copy__(self) -> Self:
        raise TypeError(f"a shallow copy of {type(self).__name__} would share its state: use fork(), or copy.deepcopy")

    # What authors write.

    def _capture(self) -> Any:
        """Capture all state of this environment that can change its future, except ``np_random`` and the spaces."""
        raise NotImplementedError(f"{type(self).__name__} must define _capture()")

    def _apply(self, state: Any) -> None:
        """Apply a captured state to an environment in any state, or to a blank one."""
        raise NotImplementedError(f"{type(self).__name__} must define _apply(state)")

    def _transition(self) -> Transition:
        """The last transition, recomputed from the present state (optional)."""
        raise NotImplementedError

    @classmethod
    def _encode(cls, state: Any) -> bytes:
        return serialization.pack(state)

    @classmethod
    def _encode_pieces(cls, state: Any) -> Sequence[Piece]:
        """Encode a state as pieces whose concatenation `_decode` accepts (optional).

        For states that are large and mostly what an earlier snapshot held too: a store keeps each piece once.
        """
        return [Piece.of(cls._encode(state), alone=True)]

    @classmethod
    def _decode(cls, data: bytes) -> Any:
        return serialization.unpack(data)

    def _config(self) -> dict[str, Any]:
        args, kwargs = self._arguments
        bound = constructor_signature(type(self)).bind(*args, **kwargs)
        bound.apply_defaults()
        return {name: comparable(value) for name, value in bound.arguments.items() if name != "render_mode"}

    def _blank(self) -> Self:
        args, kwargs = self._arguments
        child = type(self)(*args, **kwargs)
        child.spec = self.spec
        return child

    def _reseed(self, seed: int) -> None:
        """Reseed all randomness outside ``np_random`` and the spaces."""

    # The mechanism.

    def _header(self) -> Header:
        if self._fits is not None and (self.spec is None) == (self._fits.env_id is None):
            return self._fits  # what it is made of does not change in an environment's life
        kind = type(self)
        self._fits = Header(
            env_id=self.spec.id if self.spec else None,
            env_class=f"{kind.__module__}.{kind.__qualname__}",
            state_version=kind.state_version,
            config=json.loads(json.dumps(self._config())),  # a loaded header has lists where this one had tuples
            kind=self.snapshot_spec.kind,
        )
        return self._fits

    def _check_fits(self, snap: Snapshot) -> None:
        if snap.header is self._header():
            return
        mine, theirs = as_dict(self._header()), as_dict(snap.header)
        if None in (mine["env_id"], theirs["env_id"]):  # built without gym.make: the class and its arguments decide
            mine["env_id"] = theirs["env_id"] = None
        for name, expected in mine.items():
            if theirs[name] != expected:
                here, there = _differing(expected, theirs[name])
                raise SnapshotMismatch(f"this environment has {name} = {brief(here)}, the snapshot {brief(there)}")

    def _body(self) -> Body:
        state = self._capture()
        if not self.immutable_state:
            try:
                state = copy.deepcopy(state)
            except TypeError as error:
                error.add_note("a state without copies needs immutable_state = True in the class that has its _capture")
                raise
        # Streams that nothing was drawn from yet are made now: else every restore would make its own.
        if self._np_random is None:
            _ = self.np_random
        spaces = randomness.all_spaces(self.action_space, self.observation_space)
        for space in spaces:
            if space._np_random is None:
                randomness.materialise(space)
        return Body(state, self._streams(spaces), None if self._recomputes() else self._last)

    def _streams(self, spaces: Sequence[gym.Space[Any]] | None = None) -> dict[str, Any]:
        """State of all random streams: the known one again if nobody used them since."""
        if spaces is None:
            spaces = randomness.all_spaces(self.action_space, self.observation_space)
        known = self._known
        if known is not None and known.are_of(self._np_random, spaces):
            return known.captured(self._np_random_seed)
        own, *theirs = randomness.capture_all([self._np_random, *[space._np_random for space in spaces]])
        content = {"np_random": own, "np_random_seed": self._np_random_seed, "spaces": theirs}
        self._known = randomness.known(self._np_random, spaces, content)
        return content

    def _put_streams(self, streams: dict[str, Any]) -> None:
        seed = streams["np_random_seed"]
        if not (seed is None or isinstance(seed, int)):
            raise SnapshotCorrupt(f"expected a seed or None, found {brief(seed)}")
        spaces = randomness.all_spaces(self.action_space, self.observation_space)
        states = streams["spaces"]
        if not isinstance(states, list) or len(spaces) != len(states):
            raise SnapshotCorrupt(f"expected the streams of {len(spaces)} spaces, found {brief(states)}")
        self._np_random_seed, known = seed, self._known
        if known is not None and known.are_of(self._np_random, spaces) and known.put(streams):
            return
        self._known = None
        own = streams["np_random"], randomness.restored(streams["np_random"], self._np_random)
        self._np_random = own[1]
        randomness.restore_spaces(states, self.action_space, self.observation_space, own=own)
        self._known = randomness.known(self._np_random, spaces, streams)

    def _put(self, body: Body, seeded: Seeded | None, *, own: bool = False) -> None:
        """Apply a captured body; ``own``: it was decoded for this call and is not shared.

        ``seeded``: a new stream for this environment, with its seed. None restores those that were captured; the
        current ones were captured just before (or are put back after it, where a restore failed).
        """
        self._apply(body.state if own or self.immutable_state else copy.deepcopy(body.state))
        self._last = body.transition  # private and never mutated, like the one in the snapshot
        self._was_reset = True
        if seeded is None:
            if self.apply_draws or self._known is None or not self._known.are_at(body.rng):
                self._put_streams(body.rng)
        else:
            self._np_random, seed = seeded
            self._np_random_seed = seed
            randomness.reseed_spaces(seed, self.action_space, self.observation_space)
            self._reseed(seed)

    def _unshare_spaces(self, child: Self) -> None:
        """Copy spaces that are class attributes or passed on by `_blank`: they would share their random streams."""
        if child.action_space is self.action_space:
            child.action_space = copy.deepcopy(self.action_space)
        if child.observation_space is self.observation_space:
            child.observation_space = copy.deepcopy(self.observation_space)

    def _check_reset(self, what: str) -> None:
        if not self._was_reset:
            raise ResetNeeded(f"{type(self).__name__} has no state yet: call reset() before asking for {what}")

    @classmethod
    def _recomputes(cls) -> bool:
        return cls._transition is not SnapshotEnv._transition


_TAKEN = TakenNames(
    SnapshotEnv,
    methods=(
        *("_snapshot", "_restore", "_header", "_check_fits", "_check_reset", "_body", "_streams", "_put_streams"),
        *("_put", "_unshare_spaces", "_recomputes"),
    ),
    attributes={
        "_last": Transition | None,
        "_was_reset": bool,
        "_lineage": str | None,
        "_fits": Header | None,
        "_known": randomness.KnownStreams | None,
        "_arguments": tuple,
    },
)


def _depth(kind: type[Any], name: str) -> int:
    """Position, in the order in which Python looks attributes up, of the class that an attribute comes from."""
    return next(depth for depth, base in enumerate(kind.__mro__) if name in vars(base))


def _recording_reset(reset: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(reset)
    def recorded(self: SnapshotEnv[Any, Any], *args: Any, **kwargs: Any) -> Any:
        observation, info = reset(self, *args, **kwargs)
        if not self._was_reset:
            _TAKEN.refuse_attributes(self)
        self._was_reset = True
        if not self._recomputes():  # a copy, for callers and wrappers write into what they are given
            self._last = _copied_transition(Transition(observation, 0.0, False, False, info))
        return observation, info

    return recorded


def _recording_step(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def recorded(self: SnapshotEnv[Any, Any], *args: Any, **kwargs: Any) -> Any:
        result = step(self, *args, **kwargs)
        if not isinstance(self._last, Transition | None):
            _TAKEN.refuse_attributes(self)
        if not self._recomputes():
            self._last = _copied_transition(Transition(*result))
        return result

    return recorded


def _differing(mine: Any, theirs: Any) -> tuple[Any, Any]:
    """The differing entries of two configurations, for a message; for other types both values."""
    if not isinstance(mine, dict) or not isinstance(theirs, dict):
        return mine, theirs
    names = [name for name in {**mine, **theirs} if mine.get(name, ...) != theirs.get(name, ...)]
    here, there = ({name: config[name] for name in names if name in config} for config in (mine, theirs))
    return here, there


def copied(value: Any) -> Any:
    """A deep copy of a value that an environment returned; quick on plain data.

    Unlike ``copy.deepcopy`` it does not preserve that two places hold the same object.
    """
    try:
        return _copied(value)
    except RecursionError:  # it holds itself
        return copy.deepcopy(value)


ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
"""Types of values that need no copy."""


def _copied(value: Any) -> Any:
    kind = type(value)
    if kind in ATOMS:
        return value
    if kind is dict:
        return {key: _copied(item) for key, item in value.items()}
    if kind is list:
        return [_copied(item) for item in value]
    if kind is tuple:
        return tuple([_copied(item) for item in value])
    if kind is np.ndarray and value.dtype.kind != "O":
        return value.copy(order="K")
    return copy.deepcopy(value)


def _copied_transition(transition: Transition) -> Transition:
    return Transition(*copied(tuple(transition)))


def comparable(value: Any) -> Any:
    """A JSON value that is equal for equal settings; objects that are not data are reduced to their type."""
    if isinstance(value, float):
        return value if value == value else "nan"  # which is not equal to itself
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [comparable(item) for item in value]
    if isinstance(value, dict):
        return {str(key): comparable(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((comparable(item) for item in value), key=json.dumps)
    if isinstance(value, np.generic):
        return comparable(value.item())
    if isinstance(value, np.ndarray) and value.dtype.kind != "O":
        return [str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: comparable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
