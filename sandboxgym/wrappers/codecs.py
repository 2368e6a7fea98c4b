"""Codecs of wrapper classes: the attributes that are state, and the reconstruction of a wrapper's last output.

1. A registered wrapper's state is captured as plain data and restored; its settings must be equal to restore.
2. `restore` returns the wrapper's last output: recomputed from its restored state (`WrapperCodec.observe`) or, where
   that is impossible, remembered by the wrapper from then on (`WrapperCodec.remember`).
3. A wrapper whose class is not registered is taken as stateless if it has no attributes of its own; otherwise it is
   refused by name.

`gymnasium` registers the wrappers of Gymnasium; `stack` walks the stack.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import gymnasium as gym

from sandboxgym.core import copied
from sandboxgym.errors import SnapshotNotSupported

AnyWrapper = gym.Wrapper[Any, Any, Any, Any]


@dataclass(frozen=True, slots=True)
class Adapter:
    """Conversion of an attribute that is not plain data to plain data and back.

    Attributes:
        read: from the attribute to plain data that shares nothing mutable with it; None if the attribute is plain data.
        write: from the present attribute and plain data to the attribute; changes neither. None as for ``read``.
        fits: tells whether plain data, from an untrusted file perhaps, can be written where the present attribute is.
    """

    read: Callable[[Any], Any] | None
    write: Callable[[Any, Any], Any] | None
    fits: Callable[[Any, Any], bool]


@dataclass(frozen=True, slots=True, eq=False)
class WrapperCodec:
    """The attributes of a wrapper that are state, and those that must be equal for a snapshot to fit.

    Attributes:
        state: names of attributes that are captured and restored.
        config: names of attributes compared on restore, as `sandboxgym.core.comparable` sees them.
        types: of those state attributes that are checked before they are restored.
        adapters: for state attributes that are not plain data, or need more than a check of their type.
        fits: tells whether plain values of all state attributes, by name and from an untrusted file perhaps, can be
            those of a wrapper; called after each was checked by itself.
        observe: from the wrapper, with its state restored, and the ``(observation, info)`` that the environment
            inside returned last, to the one that the wrapper returned last. Must not change the wrapper.
        remember: the last ``(observation, info)`` cannot be recomputed, so the wrapper keeps a copy of it from each
            ``reset`` and ``step``. Default: True if neither this nor ``observe`` is given and the class has a
            ``reset`` or ``step`` of its own, or an ``observation`` method and state. Without any of these, a wrapper
            returns ``observation(inner observation)`` where it is an ``ObservationWrapper``, else what is inside.
        after: called with the wrapper and the restored ``(observation, info)`` once all is in place; must not fail.
        refused: why wrappers of this class cannot be captured, and what to do instead.
        simple: from a wrapper to its own two spaces and the values of its ``config`` and ``state`` attributes, in this
            order, if they may be all that there is to capture; else None. Made from the others.
    """

    state: tuple[str, ...] = ()
    config: tuple[str, ...] = ()
    types: Mapping[str, Any] = field(default_factory=dict)
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    fits: Callable[[Any, Mapping[str, Any]], bool] | None = None
    observe: Callable[[Any, Any, dict[str, Any]], tuple[Any, dict[str, Any]]] | None = None
    remember: bool | None = None
    after: Callable[[Any, tuple[Any, dict[str, Any]]], None] | None = None
    refused: str | None = None
    simple: Callable[[Any], tuple[Any, ...]] | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        names = *self.config, *self.state
        other = any(adapter.read or adapter.write for adapter in self.adapters.values()) or any("." in n for n in names)
        simple = operator.attrgetter("_action_space", "_observation_space", *names)  # it would follow dots
        object.__setattr__(self, "simple", None if other or self.remember else simple)


CODECS: dict[type[Any], WrapperCodec] = {}
BY_NAME: dict[str, WrapperCodec] = {}
"""Codecs of classes that are not imported unless the user does."""


def register_wrapper(wrapper: type[AnyWrapper], codec: WrapperCodec = WrapperCodec()) -> None:
    """Register a wrapper class for the stack walk; without a codec it is declared stateless.

    The class alone is meant, not its subclasses. Register before environments are wrapped in it: see
    `WrapperCodec.remember`. A class that has no state needs it only if its ``step`` or ``reset`` changes observations
    or infos, for `restore` to return them as changed.

    Example:
        >>> class Counter(gym.Wrapper):
        ...     count = 0
        >>> register_wrapper(Counter, WrapperCodec(state=("count",)))
    """
    CODECS[wrapper] = _completed(wrapper, codec)


def codec_of(wrapper: AnyWrapper) -> WrapperCodec:
    """The codec that captures ``wrapper``.

    Raises:
        SnapshotNotSupported: naming the wrapper, if there is none, or if its class is refused.
    """
    kind = type(wrapper)
    codec = CODECS.get(kind)
    if codec is None:
        codec = BY_NAME.get(name_of(wrapper))
    if codec is None:
        own = sorted(attributes(wrapper).keys() - _INHERITED)
        if own:
            raise SnapshotNotSupported(
                f"the wrapper {name_of(wrapper)} may be stateful (it holds {', '.join(own)}) and no codec says how to "
                "capture it: sandboxgym.register_wrapper(cls, WrapperCodec(state=(…,)))"
            )
        return _implied(cast(Any, kind))
    if codec.refused is not None:
        raise SnapshotNotSupported(f"snapshots do not go through {name_of(wrapper)}: {codec.refused}")
    return codec


def name_of(wrapper: AnyWrapper) -> str:
    """Module and qualified name of a wrapper's class."""
    return class_name(cast(Any, type(wrapper)))


def attributes(wrapper: AnyWrapper) -> dict[str, Any]:
    """All attributes of a wrapper, those in ``__slots__`` included."""
    slots = [name for name in _slots(cast(Any, type(wrapper))) if hasattr(wrapper, name)]
    return {**vars(wrapper), **{name: getattr(wrapper, name) for name in slots}}


@functools.cache
def class_name(kind: Any) -> str:
    """Module and qualified name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


@functools.cache
def _slots(kind: Any) -> tuple[str, ...]:
    names: list[str] = []
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


# The last output.

OUTPUT = "_sandboxgym_output"
"""The attribute that holds a private copy of the last (observation, info), never mutated."""

_INHERITED = vars(gym.Wrapper(gym.Env())).keys() | {"_saved_kwargs", OUTPUT}
_PLAIN = (gym.Wrapper, gym.ObservationWrapper, gym.ActionWrapper, gym.RewardWrapper)


def output(
    wrapper: AnyWrapper, codec: WrapperCodec, observation: Any, info: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Last output of ``wrapper`` in a restored state, sharing nothing mutable with it."""
    if codec.remember:
        return copied(getattr(wrapper, OUTPUT))  # type: ignore[no-any-return]
    return (observation, info) if codec.observe is None else codec.observe(wrapper, observation, info)


def observation_of(wrapper: Any, observation: Any, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Last output of an ``ObservationWrapper`` whose method ``observation`` changes nothing."""
    return wrapper.observation(observation), info


def _completed(kind: type[Any], codec: WrapperCodec) -> WrapperCodec:
    """Fill in the defaults of `WrapperCodec.remember`, and make the class remember."""
    observe, remember = codec.observe, codec.remember
    if observe is None and remember is None and codec.refused is None:
        observes = issubclass(kind, gym.ObservationWrapper)
        remember = not _is_plain(kind) or (observes and codec.state != ())
        observe = observation_of if observes and not remember else None
    if remember:
        for name in ("reset", "step"):
            method = getattr(kind, name)
            if not hasattr(method, "remembers"):
                setattr(kind, name, _remembering(method))
    return dataclasses.replace(codec, observe=observe, remember=bool(remember))


@functools.cache
def _implied(kind: Any) -> WrapperCodec:
    """Codec implied by a class without attributes of its own, which cannot have been made to remember in time."""
    observes = _is_plain(kind) and issubclass(kind, gym.ObservationWrapper)
    return WrapperCodec(observe=observation_of if observes else None, remember=False)


def _is_plain(kind: type[Any]) -> bool:
    """True if ``reset`` and ``step`` are those of Gymnasium's base classes."""
    owners = [next(base for base in kind.__mro__ if name in vars(base)) for name in ("reset", "step")]
    return all(owner in _PLAIN for owner in owners)


def _remembering(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def remembering(self: AnyWrapper, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        if hasattr(self.unwrapped, "snapshot"):  # where nothing can be captured, nothing is paid
            vars(self)[OUTPUT] = (copied(result[0]), copied(result[-1]))
        return result

    remembering.remembers = True  # type: ignore[attr-defined]
    return remembering


def walk(env: Any) -> Iterator[AnyWrapper]:
    """Iterate over the wrappers around an environment, outermost first."""
    while isinstance(env, gym.Wrapper):
        yield env
        env = env.env
