"""Snapshots through any stack of wrappers: the functions `snapshot`, `restore` and `fork`, and `SnapshotWrapper`.

A wrapper that can change a later observation, reward or flag is part of the environment's state: restoring the base
alone would give a `TimeLimit` the wrong deadline. `snapshot`, `restore` and `fork` walk the whole stack, whatever is
around the environment; `SnapshotWrapper`, which ``gym.make`` puts outermost around every environment of this
package, offers them as methods. What each class of wrappers needs is in `codecs` and `gymnasium`; a stateful
wrapper without a codec is refused by name, never skipped.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import types
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Self, TypeVar, cast

import gymnasium as gym
import numpy as np

from sandboxgym import randomness, serialization
from sandboxgym.brief import brief
from sandboxgym.core import (
    ATOMS,
    Layer,
    Snapshot,
    SnapshotEnv,
    SnapshotSpec,
    SupportsSnapshot,
    Transition,
    comparable,
    tried,
)
from sandboxgym.errors import (
    ResetNeeded,
    SnapshotCorrupt,
    SnapshotError,
    SnapshotMismatch,
    SnapshotNotSupported,
    from_outside,
)
from sandboxgym.wrappers import gymnasium as gymnasium_codecs
from sandboxgym.wrappers.codecs import (
    OUTPUT,
    AnyWrapper,
    WrapperCodec,
    attributes,
    class_name,
    codec_of,
    name_of,
    output,
    register_wrapper,
    walk,
)

__all__ = [
    "SnapshotWrapper",
    "StackSnapshot",
    "WrapperCodec",
    "fork",
    "register_wrapper",
    "restore",
    "snapshot",
    "successors",
]

gymnasium_codecs.register()


def _explain_missing(wrapper: AnyWrapper, name: str) -> Any:
    """Raise what Python would, and say which function includes the wrapper."""
    if name not in ("snapshot", "restore", "fork", "successors"):
        return object.__getattribute__(wrapper, name)  # again: a property may have raised this, for a reason of its own
    raise AttributeError(
        f"{type(wrapper).__name__!r} object has no attribute {name!r}: call sandboxgym.{name}(env, …) on it, which "
        "includes all wrappers",
        name=name,
        obj=wrapper,
    )


# Methods of the environment cannot be reached through somebody else's wrapper, and `unwrapped` would leave the wrappers
# out. Gymnasium has no place to say so but its class; nothing changes except the text of the error.
if not hasattr(gym.Wrapper, "__getattr__"):
    setattr(gym.Wrapper, "__getattr__", _explain_missing)  # noqa: B010  (a type checker knows of none)

AnyEnv = gym.Env[Any, Any]
Env = TypeVar("Env", bound=AnyEnv)
Output = tuple[Any, dict[str, Any]]


def snapshot(env: AnyEnv) -> Snapshot:
    """Capture ``env`` with every wrapper around it.

    Returns:
        A `Snapshot`; a `StackSnapshot` where the base is a third party's with a handle of its own.

    Raises:
        SnapshotNotSupported: naming the wrapper or the base environment that cannot be captured.
        ResetNeeded: before the first ``reset``.
    """
    wrappers, base = _stack(env)
    layers = tuple([_simple(wrapper, codec) or _capture(wrapper, codec) for wrapper, codec in wrappers])
    if isinstance(base, SnapshotEnv) and type(base).snapshot is SnapshotEnv.snapshot:
        return base._snapshot(layers)
    handle = base.snapshot()
    if not isinstance(handle, Snapshot):  # a third party's, typed as ours: what is done with one is done with the other
        return cast(Snapshot, StackSnapshot(base, handle, layers) if layers else handle)
    if not layers:
        return handle
    return handle.layered(layers + handle.layers if _captures_stack(base) else layers)


def restore(env: AnyEnv, snap: Any, *, seed: int | None = None) -> Output:
    """Return to the captured state, in place, wrappers included; see `SnapshotEnv.restore`.

    Returns:
        The (observation, info) that ``env``, its outermost wrapper included, had last returned when captured.

    Raises:
        SnapshotMismatch: the stack of wrappers differs from the captured one, or the base does.
        SnapshotReleased, SnapshotCorrupt: the snapshot was released, or is damaged.
        SnapshotNotSupported: naming the wrapper or the base environment that cannot be captured.
        TypeError: ``snap`` is not a snapshot.
    """
    wrappers, base = _stack(env)
    whole = _captures_stack(base)
    if not isinstance(snap, Snapshot) and (isinstance(base, SnapshotEnv) or whole):
        raise TypeError(f"expected a Snapshot, found {type(snap).__qualname__}")
    layers: tuple[Layer, ...] = snap.layers if isinstance(snap, (Snapshot, StackSnapshot)) else ()
    layers, inner = (layers[: len(wrappers)], layers[len(wrappers) :]) if whole else (layers, ())
    trusted = not isinstance(snap, Snapshot) or snap._body is not None
    changing = _changing(wrappers, layers, trusted=trusted)
    before = [(wrapper, _held(wrapper, codec)) for wrapper, codec, _ in changing]
    told: list[tuple[Callable[..., None], AnyWrapper, Output]] = []  # to wrappers that need what they returned last

    def through(observation: Any, info: dict[str, Any]) -> Output:
        for wrapper, codec in reversed(wrappers):
            if codec.remember or codec.observe is not None:
                try:
                    observation, info = output(wrapper, codec, observation, info)
                except Exception as error:  # a wrapper may raise anything on content that lies
                    _refuse(name_of(wrapper), error, trusted=trusted)
                    raise
            if codec.after is not None:
                told.append((codec.after, wrapper, (observation, info)))
        return observation, info

    try:
        try:
            _apply(changing, seed)
        except Exception as error:  # a codec may raise anything on content that lies
            _refuse("the stack of wrappers", error, trusted=trusted)
            raise
        if seed is not None:
            _reseed(wrappers, seed)
        if isinstance(base, SnapshotEnv) and type(base).restore is SnapshotEnv.restore and not inner:
            result = base._restore(snap, seed, through)
        else:
            handle: Any = snap
            if isinstance(snap, Snapshot):
                handle = snap.layered(inner) if layers else snap
            elif isinstance(snap, StackSnapshot):
                handle = snap.handle
            result = _restore_foreign(base, handle, seed, through, undoable=any(c.observe for _, c in wrappers))
    except BaseException:
        for wrapper, held in before:
            _put_back(wrapper, held)
        raise
    for tell, wrapper, transition in told:
        tell(wrapper, transition)
    return result


def fork(env: Env, k: int, *, seed: int | None = None) -> list[Env]:
    """Create ``k`` new environments at this state, each in an equal stack of wrappers; see `SnapshotEnv.fork`.

    Raises:
        SnapshotNotSupported: naming the wrapper that cannot be captured, or copied.
        TypeError, ValueError: ``k`` is no integer, or below 1.
        ResetNeeded: before the first ``reset``.
    """
    wrappers, base = _stack(env)
    for wrapper, _ in wrappers:
        _materialise(wrapper)
    bases: Sequence[AnyEnv] = base.fork(k, seed=seed)
    try:
        children = [_rewrap(env, child) for child in bases]
        if seed is not None:
            for index, child in enumerate(children):
                _reseed(_stack(child)[0], randomness.sibling_seed(seed, index))
    except BaseException:
        for child in bases:
            child.close()
        raise
    return children  # type: ignore[return-value]


_WATCHING = (gym.wrappers.PassiveEnvChecker, gym.wrappers.OrderEnforcing)
"""Wrappers that return every result unchanged."""


def successors(env: AnyEnv, actions: Sequence[Any]) -> list[Transition]:
    """Results of ``env.step`` for each of these actions, wrappers included; the state stays unchanged.

    From a snapshot: step, restore, and so on. What wrappers only record (`RecordEpisodeStatistics`) is not rewound.
    Where the base environment computes them without taking them (its ``successors`` is its own), and nothing but a
    `TimeLimit` is around it, that is done instead.

    Args:
        env: at the state to try them from.
        actions: each by itself, in any number.

    Raises:
        SnapshotNotSupported: naming the wrapper or the base environment that cannot be captured.
        ResetNeeded: before the first ``reset``.
        Exception: whatever ``step`` raises; the environment is as it was then, too.
    """
    wrappers, base = _stack(env)
    if (
        isinstance(base, SnapshotEnv)
        and type(base).successors is not SnapshotEnv.successors
        and _only_limited(wrappers)
    ):
        return _limited(wrappers, base.successors(actions))
    lineage = getattr(base, "_lineage", None)
    try:
        return tried(env, actions, snapshot(env), partial(restore, env))
    finally:
        if isinstance(base, SnapshotEnv):
            base._lineage = lineage


def outcomes(env: AnyEnv, actions: Sequence[Any]) -> list[Transition]:
    """`successors` without observations, where the base environment can leave them out: `SnapshotEnv.outcomes`."""
    wrappers, base = _stack(env)
    if isinstance(base, SnapshotEnv) and type(base).outcomes is not SnapshotEnv.outcomes and _only_limited(wrappers):
        return _limited(wrappers, base.outcomes(actions))
    return successors(env, actions)


def _only_limited(wrappers: Sequence[tuple[Any, Any]]) -> bool:
    """True if no wrapper but a `TimeLimit` changes the results of the base environment."""
    return all(type(wrapper) in (*_WATCHING, gym.wrappers.TimeLimit) for wrapper, _ in wrappers)


def _limited(wrappers: Sequence[tuple[Any, Any]], found: Sequence[Transition]) -> list[Transition]:
    limits = [wrapper for wrapper, _ in wrappers if type(wrapper) is gym.wrappers.TimeLimit]
    late = any((limit._elapsed_steps or 0) + 1 >= limit._max_episode_steps for limit in limits)
    return [one._replace(truncated=one.truncated or late) for one in found]


class SnapshotWrapper(gym.Wrapper[Any, Any, Any, Any], gym.utils.RecordConstructorArgs):
    """Outermost wrapper of ``gym.make``: ``env.snapshot()``, ``env.restore(snap)``, ``env.fork(k)``.

    It has no state; wrap it further as you like and call the functions of this module, which see the whole stack. The
    base environment is told of the ``TimeLimit`` inside, for its own ``spec`` does not: `SnapshotEnv.step_limit`.
    """

    def __init__(self, env: AnyEnv) -> None:
        gym.utils.RecordConstructorArgs.__init__(self)
        gym.Wrapper.__init__(self, env)
        limits = [wrapper._max_episode_steps for wrapper in walk(env) if isinstance(wrapper, gym.wrappers.TimeLimit)]
        if limits and isinstance(env.unwrapped, SnapshotEnv):
            env.unwrapped.step_limit = min(limits)

    @property
    def snapshot_spec(self) -> SnapshotSpec:
        """Spec of the snapshots of the base environment."""
        spec: SnapshotSpec = _base(self).snapshot_spec
        return spec

    def snapshot(self) -> Snapshot:
        """See `sandboxgym.snapshot`."""
        return snapshot(self)

    def restore(self, snap: Any, *, seed: int | None = None) -> Output:
        """See `sandboxgym.restore`."""
        return restore(self, snap, seed=seed)

    def fork(self, k: int, *, seed: int | None = None) -> list[SnapshotWrapper]:
        """See `sandboxgym.fork`."""
        return fork(self, k, seed=seed)

    def successors(self, actions: Sequence[Any]) -> list[Transition]:
        """See `sandboxgym.successors`."""
        return successors(self, actions)

    def __deepcopy__(self, memo: dict[int, Any]) -> SnapshotWrapper:
        try:
            return self.fork(1)[0]
        except ResetNeeded:
            return _rewrap(self, copy.deepcopy(_base(self), memo))  # type: ignore[return-value]

    def __copy__(self) -> SnapshotWrapper:
        raise TypeError("a shallow copy of an environment would share its state: use fork(), or copy.deepcopy")


class StackSnapshot:
    """A third party's snapshot handle with the wrappers' states; lives in memory only.

    It has the attributes of `Snapshot` except ``header``; ``digest`` and ``nbytes`` only where the handle has them.
    """

    def __init__(self, base: AnyEnv, handle: Any, layers: tuple[Layer, ...]) -> None:
        self.id: str = getattr(handle, "id", None) or uuid.uuid4().hex
        self.parent: str | None = getattr(handle, "parent", None)
        self.env_id: str = base.spec.id if base.spec else type(base).__qualname__
        self.kind: str = base.snapshot_spec.kind  # type: ignore[attr-defined]
        self.handle = handle
        self.layers = layers

    @property
    def digest(self) -> str:
        """sha256 over the handle's digest and the wrappers' states."""
        digest: str = self.handle.digest
        return hashlib.sha256(digest.encode() + _packed(self.layers)).hexdigest()

    @property
    def nbytes(self) -> int:
        """Bytes held by the handle and the wrappers."""
        nbytes: int = self.handle.nbytes
        return nbytes + len(_packed(self.layers))

    @property
    def released(self) -> bool:
        """True if the handle was released, where it can be."""
        return bool(getattr(self.handle, "released", False))

    def save(self, path: Any) -> None:
        """Raise `SnapshotNotSupported`: only the environment knows its handle's durable form."""
        raise SnapshotNotSupported(
            f"{self.env_id} has snapshots of its own ({type(self.handle).__qualname__}), which cannot be saved "
            "together with wrappers: save env.unwrapped.snapshot(), or derive the environment from SnapshotEnv"
        )

    def to_bytes(self) -> bytes:
        """Raise `SnapshotNotSupported`, like `save`."""
        self.save(None)
        raise AssertionError("unreachable")

    def release(self) -> None:
        """Release the handle, where it can be."""
        getattr(self.handle, "release", lambda: None)()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _packed(layers: tuple[Layer, ...]) -> bytes:
    return serialization.pack([[layer.name, layer.config, layer.state] for layer in layers])


# Walking the stack.

_Coded = tuple[AnyWrapper, WrapperCodec]
_Changing = tuple[AnyWrapper, WrapperCodec, Layer]


def _base(env: AnyEnv) -> Any:
    """The base environment of a stack."""
    if not isinstance(env, gym.Env):
        raise TypeError(f"expected a gymnasium.Env, found {type(env).__qualname__}")
    while isinstance(env, gym.Wrapper):
        env = env.env
    if not isinstance(env, (SnapshotEnv, SupportsSnapshot)):
        raise SnapshotNotSupported(
            f"{env} has no snapshot(), restore(), fork() and snapshot_spec: derive it from sandboxgym.SnapshotEnv"
        )
    return env


def _stack(env: AnyEnv) -> tuple[list[_Coded], Any]:
    """The relevant wrappers with their codecs, outermost first, and the base environment."""
    wrappers = []
    inner: Any = env
    while isinstance(inner, gym.Wrapper):
        if not isinstance(inner, SnapshotWrapper):
            wrappers.append(inner)
        inner = inner.env
    base = inner if isinstance(inner, SnapshotEnv) else _base(inner)
    return [(wrapper, codec_of(wrapper)) for wrapper in wrappers], base


def _captures_stack(base: Any) -> bool:
    """True if the snapshots of ``base`` include wrappers inside it: a proxy of an environment in another process."""
    return bool(getattr(base, "captures_stack", False))


_SIMPLE = frozenset({type(None), bool, int})


def _simple(wrapper: AnyWrapper, codec: WrapperCodec) -> Layer | None:
    """Layer that `_capture` would make, in a fraction of its time, if it is of a few numbers and flags; else None.

    Wrappers in equal states share one layer, so that one which is still in the state of a snapshot has the very same.
    """
    if codec.simple is None:
        return None
    kind: Any = type(wrapper)
    try:
        return _shared(codec, kind, *codec.simple(wrapper))
    except TypeError:  # there is something else; perhaps it cannot be hashed
        return None


@functools.lru_cache(1024, typed=True)  # typed: True equals 1
def _shared(codec: WrapperCodec, kind: Any, action_space: None, observation_space: None, *values: Any) -> Layer:
    if action_space is not None or observation_space is not None or not _SIMPLE.issuperset(map(type, values)):
        raise TypeError("expected a few numbers and flags, and no spaces")
    named = list(zip((*codec.config, *codec.state), values, strict=True))
    config, state = dict(named[: len(codec.config)]), dict(named[len(codec.config) :])
    return Layer(class_name(kind), config, [state, []])


def _capture(wrapper: AnyWrapper, codec: WrapperCodec) -> Layer:
    values = {name: getattr(wrapper, name) for name in codec.state}
    for name, value in values.items():
        adapter = codec.adapters.get(name)
        if adapter is not None and adapter.read is not None:
            values[name] = adapter.read(value)
        elif type(value) not in ATOMS:
            values[name] = copy.deepcopy(value)
    streams = []
    if not _adds_no_space(wrapper):
        _materialise(wrapper)
        streams = randomness.capture_spaces(*_spaces_of(wrapper), but=_inside(wrapper))
    state = [values, streams]
    if codec.remember:
        last = vars(wrapper).get(OUTPUT)  # a private copy that nobody changes
        if last is None:
            raise ResetNeeded(f"{name_of(wrapper)} has returned nothing yet: call reset() through it before a snapshot")
        state.append(last)
    return Layer(name_of(wrapper), _config(wrapper, codec), state)


def _config(wrapper: AnyWrapper, codec: WrapperCodec) -> dict[str, Any]:
    if not codec.config:
        return {}
    return {name: comparable(getattr(wrapper, name)) for name in codec.config}


def _apply(wrappers: Sequence[_Changing], seed: int | None) -> None:
    for wrapper, codec, layer in wrappers:
        values, streams = layer.state[:2]
        for name, value in values.items():
            adapter = codec.adapters.get(name)
            if adapter is not None and adapter.write is not None:
                value = adapter.write(getattr(wrapper, name), value)
            elif type(value) not in ATOMS:
                value = copy.deepcopy(value)
            setattr(wrapper, name, value)
        if len(layer.state) > 2:
            vars(wrapper)[OUTPUT] = tuple(layer.state[2])
        if seed is None and (streams != [] or not _adds_no_space(wrapper)):
            randomness.restore_spaces(streams, *_spaces_of(wrapper), but=_inside(wrapper))


_Held = tuple[dict[str, Any], Any, list[Any]]


def _held(wrapper: AnyWrapper, codec: WrapperCodec) -> _Held:
    """The attributes that `_apply` replaces, for a rollback: by reference, since it changes none of them in place."""
    streams = [] if _adds_no_space(wrapper) else randomness.capture_spaces(*_spaces_of(wrapper), but=_inside(wrapper))
    return {name: getattr(wrapper, name) for name in codec.state}, vars(wrapper).get(OUTPUT), streams


def _put_back(wrapper: AnyWrapper, held: _Held) -> None:
    values, last, streams = held
    for name, value in values.items():
        setattr(wrapper, name, value)
    vars(wrapper).pop(OUTPUT, None)
    if last is not None:
        vars(wrapper)[OUTPUT] = last
    randomness.restore_spaces(streams, *_spaces_of(wrapper), but=_inside(wrapper))


def _spaces_of(wrapper: AnyWrapper) -> tuple[gym.Space[Any] | None, gym.Space[Any] | None]:
    """The spaces that a wrapper shows in place of those of the environment inside it."""
    return wrapper._action_space, wrapper._observation_space


def _adds_no_space(wrapper: AnyWrapper) -> bool:
    return wrapper._action_space is None and wrapper._observation_space is None


def _inside(wrapper: AnyWrapper) -> set[int]:
    """The spaces of the environment inside the wrapper, by id; they may be parts of its own."""
    if _adds_no_space(wrapper):
        return set()
    return {id(space) for space in randomness.spaces_in(wrapper.env.action_space, wrapper.env.observation_space)}


def _materialise(wrapper: AnyWrapper) -> None:
    """Create streams that were never drawn from, else every restore would create its own."""
    if not _adds_no_space(wrapper):
        randomness.materialise(*_spaces_of(wrapper), but=_inside(wrapper))


def _reseed(wrappers: Sequence[_Coded], seed: int) -> None:
    for index, (wrapper, _) in enumerate(wrappers):
        if not _adds_no_space(wrapper):
            sibling = randomness.sibling_seed(seed, index)
            randomness.reseed_spaces(sibling, *_spaces_of(wrapper), but=_inside(wrapper))


def _restore_foreign(
    base: Any, handle: Any, seed: int | None, through: Callable[[Any, dict[str, Any]], Output], *, undoable: bool
) -> Output:
    """Restore a third party's base; roll it back if the wrappers then fail."""
    undo = None
    if undoable:
        with contextlib.suppress(ResetNeeded):
            undo = base.snapshot()
    try:
        observation, info = base.restore(handle, seed=seed)
        try:
            return through(observation, info)
        except BaseException:
            if undo is not None:
                base.restore(undo)
            raise
    finally:
        getattr(undo, "release", lambda: None)()


def _changing(wrappers: Sequence[_Coded], layers: Sequence[Layer], *, trusted: bool) -> list[_Changing]:
    """The wrappers that are not in the state of their layers, with these, all of which fit."""
    found = []
    fits = len(wrappers) == len(layers)
    for (wrapper, codec), layer in zip(wrappers, layers):
        now = _simple(wrapper, codec)
        if now is not layer:
            found.append((wrapper, codec, layer))
            fits = fits and layer.name == name_of(wrapper)
    if not fits:
        names, theirs = [name_of(wrapper) for wrapper, _ in wrappers], [layer.name for layer in layers]
        raise SnapshotMismatch(
            f"this environment is wrapped in {names}, the snapshot was taken through {brief(theirs, 1000)}"
        )
    for wrapper, codec, layer in found:
        _check_layer(wrapper, codec, layer, trusted=trusted)
    return found


def _check_layer(wrapper: AnyWrapper, codec: WrapperCodec, layer: Layer, *, trusted: bool) -> None:
    """Check that a layer fits, and that one from a file holds the types of `_capture`."""
    config = _config(wrapper, codec)
    if (config or layer.config) and not _is_same(config, layer.config):
        raise SnapshotMismatch(f"{layer.name} has {brief(config, 1000)}, in the snapshot {brief(layer.config, 1000)}")
    if trusted:
        return
    try:
        fits = _is_state(wrapper, codec, layer.state)
    except Exception as error:  # a codec may raise anything on content that lies
        _refuse(layer.name, error, trusted=False)
        raise
    if not fits:
        raise SnapshotCorrupt(f"expected the attributes {codec.state} of {layer.name}, found {brief(layer.state)}")


def _refuse(who: str, error: Exception, *, trusted: bool) -> None:
    """Raise SnapshotCorrupt in place of what untrusted content made ``who`` raise; otherwise the caller raises it."""
    if not (trusted or isinstance(error, SnapshotError) or from_outside(error)):
        raise SnapshotCorrupt(f"{who} cannot take over its state: {brief(error)}") from error


def _is_same(mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
    try:
        return mine == theirs
    except ValueError:  # theirs holds an array, which `comparable` never gives
        return False


def _is_state(wrapper: AnyWrapper, codec: WrapperCodec, content: Any) -> bool:
    if not isinstance(content, list) or len(content) != 2 + bool(codec.remember) or not isinstance(content[0], dict):
        return False
    values, streams = content[:2]
    if values.keys() != set(codec.state) or not isinstance(streams, list):
        return False
    for name, kind in codec.types.items():
        if not isinstance(values[name], kind):
            return False
    for name, adapter in codec.adapters.items():
        if not adapter.fits(getattr(wrapper, name), values[name]):
            return False
    if codec.fits is not None and not codec.fits(wrapper, values):
        return False
    last = content[2] if codec.remember else (None, {})
    return isinstance(last, (list, tuple)) and len(last) == 2 and isinstance(last[1], dict)


# Twins of wrappers around forks.


def _rewrap(env: AnyEnv, base: AnyEnv) -> AnyEnv:
    """Rebuild the stack around ``env`` around ``base``, in an equal state, with nothing mutable shared.

    What refers to an environment, wrapper or space of the original refers to its twin then, also from within
    functions: those that wrappers make of themselves would otherwise show the original to its forks.
    """
    originals = list(walk(env))
    original = originals[-1].env if originals else env
    memo: dict[int, Any] = {id(original): base}  # deepcopy's
    if isinstance(original, SnapshotEnv) and isinstance(base, SnapshotEnv):
        base.step_limit = original.step_limit
    for space, twin in zip(_spaces(original), _spaces(base)):
        memo[id(space)] = twin
    twins: list[AnyWrapper] = [type(wrapper).__new__(type(wrapper)) for wrapper in originals]
    for wrapper, twin_ in zip(originals, twins):
        memo[id(wrapper)] = twin_
    for wrapper, twin_ in zip(reversed(originals), reversed(twins)):
        for name, value in attributes(wrapper).items():
            # what describes the wrapper is never changed, and so is its private copy of what it returned
            shared = type(value) in ATOMS or name in ("_saved_kwargs", "_cached_spec", OUTPUT)
            try:
                object.__setattr__(twin_, name, value if shared else _twin(value, memo))
            except TypeError as error:  # a lock, a socket, a generator
                raise SnapshotNotSupported(
                    f"forks need a copy of what {name_of(wrapper)} holds, but its {name} cannot be copied: {error}"
                ) from error
    return twins[0] if twins else base


def _spaces(env: AnyEnv) -> Iterator[gym.Space[Any]]:
    return randomness.spaces_in(getattr(env, "action_space", None), getattr(env, "observation_space", None))


def _twin(value: Any, memo: dict[int, Any]) -> Any:
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, types.FunctionType):
        return _rebound(value, memo)
    if isinstance(value, (types.ModuleType, np.dtype)):
        return value
    return copy.deepcopy(value, memo)


def _rebound(function: types.FunctionType, memo: dict[int, Any]) -> types.FunctionType:
    """The function with copies in place of the originals in its closure."""
    memo[id(function)] = function  # it may close over itself
    cells = [_rebound_cell(cell, memo) for cell in function.__closure__ or ()]
    if all(new is old for new, old in zip(cells, function.__closure__ or ())):
        return function
    code, name, defaults = function.__code__, function.__name__, function.__defaults__
    twin = types.FunctionType(code, function.__globals__, name, defaults, tuple(cells))
    twin.__kwdefaults__, twin.__qualname__ = function.__kwdefaults__, function.__qualname__
    memo[id(function)] = twin
    return twin


def _rebound_cell(cell: types.CellType, memo: dict[int, Any]) -> types.CellType:
    try:
        content = cell.cell_contents
    except ValueError:  # not assigned yet
        return cell
    twin = content
    if id(content) in memo:
        twin = memo[id(content)]
    elif isinstance(content, types.FunctionType):
        twin = _rebound(content, memo)
    elif isinstance(content, types.MethodType) and id(content.__self__) in memo:
        twin = types.MethodType(content.__func__, memo[id(content.__self__)])
    return cell if twin is content else types.CellType(twin)
