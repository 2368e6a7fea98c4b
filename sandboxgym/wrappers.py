"""Snapshots through any stack of wrappers.

A wrapper that can change a later observation, reward or flag is part of the environment's state: restoring the base
alone would give a `TimeLimit` the wrong deadline. `snapshot`, `restore` and `fork` walk the whole stack, whatever is
around the environment; `SnapshotWrapper`, which ``gym.make`` puts outermost around every environment of this
package, offers them as methods. A stateful wrapper without a codec is refused by name, never skipped.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import gymnasium as gym
from gymnasium.wrappers.common import OrderEnforcing, PassiveEnvChecker, TimeLimit

from sandboxgym import randomness
from sandboxgym.core import Layer, Snapshot, SnapshotEnv, SnapshotSpec, SupportsSnapshot
from sandboxgym.errors import SnapshotCorrupt, SnapshotMismatch, SnapshotNotSupported

AnyEnv = gym.Env[Any, Any]
AnyWrapper = gym.Wrapper[Any, Any, Any, Any]
Env = TypeVar("Env", bound=AnyEnv)


@dataclass(frozen=True, slots=True)
class WrapperCodec:
    """Which attributes of a wrapper are state, and which must be equal for a snapshot to fit.

    Attributes:
        state: names of attributes that are captured and restored.
        config: names of attributes compared on restore.
        types: of those state attributes that are checked before they are restored.
        after: called with the wrapper and the restored ``(observation, info)`` once its state is in place.
    """

    state: tuple[str, ...] = ()
    config: tuple[str, ...] = ()
    types: Mapping[str, Any] = field(default_factory=dict)
    after: Callable[[Any, tuple[Any, dict[str, Any]]], None] | None = None


def _compare_with_restored(checker: Any, transition: tuple[Any, dict[str, Any]]) -> None:
    """`PassiveEnvChecker` compares its next transition with the one before, which it only has after its own reset."""
    checker._previous_data = None if checker.checked_data_reuse else copy.deepcopy(transition)


_CHECKED = ("checked_reset", "checked_step", "checked_render", "checked_data_reuse")
_CODECS: dict[type[Any], WrapperCodec] = {
    TimeLimit: WrapperCodec(
        state=("_elapsed_steps",), config=("_max_episode_steps",), types={"_elapsed_steps": int | None}
    ),
    OrderEnforcing: WrapperCodec(
        state=("_has_reset",), config=("_disable_render_order_enforcing",), types={"_has_reset": bool}
    ),
    PassiveEnvChecker: WrapperCodec(
        state=_CHECKED,
        types=dict.fromkeys(_CHECKED, bool),
        after=_compare_with_restored,
    ),
}


def register_wrapper(wrapper: type[AnyWrapper], codec: WrapperCodec = WrapperCodec()) -> None:
    """Teach the stack walk a wrapper class; without a codec it is declared stateless.

    Example:
        >>> class Counter(gym.Wrapper):
        ...     count = 0
        >>> register_wrapper(Counter, WrapperCodec(state=("count",)))
    """
    _CODECS[wrapper] = codec


def snapshot(env: AnyEnv) -> Any:
    """Capture ``env`` with every wrapper around it.

    Returns:
        A `Snapshot`; a `StackSnapshot` where the base is a third party's with a handle of its own.

    Raises:
        SnapshotNotSupported: naming the wrapper or the base environment that cannot be captured.
        ResetNeeded: before the first ``reset``.
    """
    wrappers, base = _stack(env)
    layers = tuple(_capture(wrapper) for wrapper in wrappers)
    handle = base.snapshot()
    if not layers:
        return handle
    return handle.layered(layers) if isinstance(handle, Snapshot) else StackSnapshot(base, handle, layers)


def restore(env: AnyEnv, snap: Any, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
    """Go to the captured state, in place, wrappers included; see `SnapshotEnv.restore`.

    Raises:
        SnapshotMismatch: the stack of wrappers differs from the captured one, or the base does.
        TypeError: ``snap`` is not a snapshot.
    """
    wrappers, base = _stack(env)
    if isinstance(base, SnapshotEnv) and not isinstance(snap, Snapshot):
        raise TypeError(f"expected a Snapshot, found {type(snap).__qualname__}")
    layers: tuple[Layer, ...] = snap.layers if isinstance(snap, (Snapshot, StackSnapshot)) else ()
    _check_layers(wrappers, layers)
    before = tuple(_capture(wrapper) for wrapper in wrappers)
    try:  # the base last: it is all or nothing by itself
        _apply(wrappers, layers, seed)
        if isinstance(snap, Snapshot):
            transition = base.restore(snap.layered(()) if layers else snap, seed=seed)
        else:
            transition = base.restore(snap.handle if isinstance(snap, StackSnapshot) else snap, seed=seed)
    except BaseException:
        _apply(wrappers, before, None)
        raise
    _notify(wrappers, transition)
    return transition  # type: ignore[no-any-return]


def fork(env: Env, k: int, *, seed: int | None = None) -> list[Env]:
    """``k`` new environments at this state, each in the same stack of wrappers; see `SnapshotEnv.fork`."""
    wrappers, base = _stack(env)
    layers = tuple(_capture(wrapper) for wrapper in wrappers)
    bases: Sequence[AnyEnv] = base.fork(k, seed=seed)
    try:
        return [_rewrap(env, child, layers, seed, index) for index, child in enumerate(bases)]  # type: ignore[misc]
    except BaseException:
        for child in bases:
            child.close()
        raise


class SnapshotWrapper(gym.Wrapper[Any, Any, Any, Any], gym.utils.RecordConstructorArgs):
    """Outermost wrapper of ``gym.make``: ``env.snapshot()``, ``env.restore(snap)``, ``env.fork(k)``.

    It has no state; wrap it further as you like and call the functions of this module, which see the whole stack.
    """

    def __init__(self, env: AnyEnv) -> None:
        gym.utils.RecordConstructorArgs.__init__(self)
        gym.Wrapper.__init__(self, env)

    @property
    def snapshot_spec(self) -> SnapshotSpec:
        """What snapshots of the base environment cover."""
        spec: SnapshotSpec = _stack(self)[1].snapshot_spec
        return spec

    def snapshot(self) -> Any:
        """See `sandboxgym.snapshot`."""
        return snapshot(self)

    def restore(self, snap: Any, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """See `sandboxgym.restore`."""
        return restore(self, snap, seed=seed)

    def fork(self, k: int, *, seed: int | None = None) -> list[SnapshotWrapper]:
        """See `sandboxgym.fork`."""
        return fork(self, k, seed=seed)

    def __deepcopy__(self, memo: dict[int, Any]) -> SnapshotWrapper:
        return self.fork(1)[0]

    def __copy__(self) -> SnapshotWrapper:
        raise TypeError("a shallow copy of an environment would share its state: use fork(), or copy.deepcopy")


class StackSnapshot:
    """A third party's snapshot handle together with the wrappers' states; lives in memory only."""

    def __init__(self, base: AnyEnv, handle: Any, layers: tuple[Layer, ...]) -> None:
        self.id = getattr(handle, "id", uuid.uuid4().hex)
        self.env_id = base.spec.id if base.spec else type(base).__qualname__
        self.handle = handle
        self.layers = layers

    def save(self, path: Any) -> None:
        """Refused: only the environment knows its handle's durable form."""
        raise SnapshotNotSupported(
            f"{self.env_id} has snapshots of its own ({type(self.handle).__qualname__}), which cannot be saved "
            "together with wrappers: save env.unwrapped.snapshot(), or derive the environment from SnapshotEnv"
        )

    def release(self) -> None:
        """Release the handle, where it can be."""
        getattr(self.handle, "release", lambda: None)()


def _stack(env: AnyEnv) -> tuple[list[AnyWrapper], Any]:
    """The wrappers that matter, outermost first, and the base environment."""
    if not isinstance(env, gym.Env):
        raise TypeError(f"expected a gymnasium.Env, found {type(env).__qualname__}")
    wrappers: list[AnyWrapper] = []
    while isinstance(env, gym.Wrapper):
        if not isinstance(env, SnapshotWrapper):
            wrappers.append(env)
        env = env.env
    if not isinstance(env, SupportsSnapshot):
        raise SnapshotNotSupported(
            f"{env} has no snapshot(), restore(), fork() and snapshot_spec: derive it from sandboxgym.SnapshotEnv"
        )
    return wrappers, env


def _name(wrapper: AnyWrapper) -> str:
    return f"{type(wrapper).__module__}.{type(wrapper).__qualname__}"


def _codec(wrapper: AnyWrapper) -> WrapperCodec:
    codec = _CODECS.get(type(wrapper))
    if codec is not None:
        return codec
    inherited = vars(gym.Wrapper(wrapper.env)).keys() | {"_saved_kwargs"}
    own = sorted(vars(wrapper).keys() - inherited)
    if not own:
        return WrapperCodec()  # nothing of its own to remember
    raise SnapshotNotSupported(
        f"the wrapper {_name(wrapper)} may be stateful (it holds {', '.join(own)}) and no codec says how to "
        "capture it: sandboxgym.register_wrapper(cls, WrapperCodec(state=(…,)))"
    )


def _capture(wrapper: AnyWrapper) -> Layer:
    codec = _codec(wrapper)
    values = {name: copy.deepcopy(getattr(wrapper, name)) for name in codec.state}
    spaces = randomness.capture_spaces(wrapper._action_space, wrapper._observation_space)
    return Layer(_name(wrapper), {name: getattr(wrapper, name) for name in codec.config}, [values, spaces])


def _apply(wrappers: Sequence[AnyWrapper], layers: Sequence[Layer], seed: int | None) -> None:
    for index, (wrapper, layer) in enumerate(zip(wrappers, layers, strict=True)):
        values, spaces = layer.state
        for name, value in values.items():
            setattr(wrapper, name, copy.deepcopy(value))
        own = (wrapper._action_space, wrapper._observation_space)
        if seed is None:
            randomness.restore_spaces(spaces, *own)
        else:
            randomness.reseed_spaces(randomness.sibling_seed(seed, index), *own)


def _notify(wrappers: Sequence[AnyWrapper], transition: tuple[Any, dict[str, Any]]) -> None:
    for wrapper in wrappers:
        after = _codec(wrapper).after
        if after is not None:
            after(wrapper, transition)


def _check_layers(wrappers: Sequence[AnyWrapper], layers: Sequence[Layer]) -> None:
    mine, theirs = [_name(w) for w in wrappers], [layer.name for layer in layers]
    if mine != theirs:
        raise SnapshotMismatch(f"this environment is wrapped in {mine}, the snapshot was taken through {theirs}")
    for wrapper, layer in zip(wrappers, layers, strict=True):
        codec = _codec(wrapper)
        config = {name: getattr(wrapper, name) for name in codec.config}
        if config != layer.config:
            raise SnapshotMismatch(f"{layer.name} has {config}, in the snapshot {layer.config}")
        if not _is_state(layer.state, codec):
            raise SnapshotCorrupt(f"expected the attributes {codec.state} of {layer.name}, found {layer.state!r:.200}")


def _is_state(content: Any, codec: WrapperCodec) -> bool:
    if not isinstance(content, list) or len(content) != 2 or not isinstance(content[0], dict):
        return False
    values = content[0]
    if values.keys() != set(codec.state):
        return False
    return all(isinstance(values[name], kind) for name, kind in codec.types.items())


def _rewrap(env: AnyEnv, base: AnyEnv, layers: tuple[Layer, ...], seed: int | None, index: int) -> AnyEnv:
    """The stack around ``env`` rebuilt around ``base``: the same wrappers' settings, nothing mutable shared."""
    chain: list[AnyWrapper] = []
    while isinstance(env, gym.Wrapper):
        chain.append(env)
        env = env.env
    child = base
    twins: dict[int, Any] = {id(env): base}  # deepcopy's memo: a reference to an original becomes one to its twin
    for wrapper in reversed(chain):
        child = twins[id(wrapper)] = type(wrapper).__new__(type(wrapper))
        twins[id(wrapper._cached_spec)] = wrapper._cached_spec
        child.__dict__.update(copy.deepcopy(vars(wrapper), twins))
    wrappers, _ = _stack(child)
    _apply(wrappers, layers, None if seed is None else randomness.sibling_seed(seed, index))
    last = base.last if isinstance(base, SnapshotEnv) else None
    _notify(wrappers, (last.observation, last.info) if last is not None else (None, {}))
    return child
