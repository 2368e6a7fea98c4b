"""All random generators that an environment's attributes lead to: their paths, their bits, new bits for them.

1. The walk follows attributes (instance dictionaries, ``__slots__``), containers, closures, defaults, bound methods and
   partial functions. It calls nothing of the environment's: no property, no ``__getattr__``, no ``__iter__`` but those
   of built-in containers.
2. It enters no module and no class, goes in the order of distance, and stops after a number of objects; `Found.whole`
   says whether it did. The number is `NEAR` where many walks follow each other (for draws from other bits), and `FAR`
   where a walk decides a verdict.
3. A generator is identified by its bit generator: two `numpy.random.Generator` over one are one stream. Those of a
   space and the process's global ones are excluded: `scenario.streams` and `process_globals.global_streams` cover
   these.
"""

from __future__ import annotations

import collections
import functools
import itertools
import random
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from sandboxgym.conformance.harness.canonical import Canonical, canonical

NEAR, FAR = 20_000, 500_000
"""Objects that a walk visits at most; numbers, texts and the like do not count."""
WIDEST = 500_000
"""Items of one container that a walk looks at, at most."""
_MORE = object()
"""Stands for the items of a container beyond these."""

_ATOMS = (str, bytes, bytearray, int, float, complex, bool, type(None), type, types.ModuleType, range, slice)
_CONTAINERS: tuple[type[Any], ...] = (list, tuple, collections.deque, set, frozenset)
_LEGACY = np.random.RandomState
_FRAMES = {types.GeneratorType: "gi_frame", types.CoroutineType: "cr_frame", types.AsyncGeneratorType: "ag_frame"}
"""Attributes by which suspended generators and coroutines lead to their variables."""


@dataclass(frozen=True)
class Stream:
    """A generator, and the path by which it was found."""

    path: str
    kind: str
    source: Any
    """Holder of the bits: two paths lead to one stream if this is one object."""

    def bits(self) -> Canonical:
        """State of the generator."""
        if self.kind == "python":
            return canonical(self.source.getstate())
        if self.kind == "torch":
            return bytes(self.source.get_state().numpy().tobytes())
        if self.kind == "jax":
            return _key_bytes(self.source)
        return canonical(self.source.state)

    @property
    def renewable(self) -> bool:
        """True if its bits can be replaced in place; a key of jax is a value."""
        return self.kind != "jax"

    def renew(self, seed: int) -> None:
        """Replace the bits in place."""
        if self.kind == "python":
            self.source.seed(seed)
        elif self.kind == "torch":
            self.source.manual_seed(seed)
        elif self.kind == "numpy":
            self.source.state = type(self.source)(seed).state

    def save(self) -> Any:
        """The state for `load`."""
        if self.kind == "python":
            return self.source.getstate()
        return self.source.get_state() if self.kind == "torch" else self.source.state

    def load(self, state: Any) -> None:
        """Set a saved state in place."""
        if self.kind == "python":
            self.source.setstate(state)
        elif self.kind == "torch":
            self.source.set_state(state)
        elif self.kind == "numpy":
            self.source.state = state


class Found(dict[str, Stream]):
    """Generators by path."""

    whole = True
    """False if the walk stopped before it had looked at all objects."""


def find(env: Any, only: Collection[str] | None = None, *, most: int = NEAR) -> Found:
    """Find the generators that an environment leads to, by path; one with several paths is under the nearest.

    Args:
        env: start of the walk.
        only: paths; the walk ends when a generator is found under each of them, and ``most`` is then `FAR`.
        most: number of objects after which the walk ends.
    """
    found = Found()
    known = _global()
    seen = {id(env)}
    keep: list[Any] = [env]  # so that no id is used twice
    kinds = _Kinds()
    queue: collections.deque[tuple[str, Any]] = collections.deque([(type(env).__name__, env)])
    missing = None if only is None else set(only)
    most = most if only is None else FAR
    while queue and (missing is None or missing):
        path, value = queue.popleft()
        kind = kinds[type(value)]
        stream = _stream(path, value) if kind.perhaps_stream else None
        if stream is not None:
            if id(stream.source) not in known:
                known.add(id(stream.source))
                keep.append(stream.source)
                while path in found:  # of a set
                    path += "'"
                found[path] = stream
                if missing is not None:
                    missing.discard(path)
            continue
        for place, item in kind.inside(path, value):
            if kinds[type(item)].atom or id(item) in seen:
                continue
            if item is _MORE or len(seen) >= most:
                found.whole = False
                break
            seen.add(id(item))
            keep.append(item)
            queue.append((place, item))
    return found


@dataclass(frozen=True)
class _Kind:
    """Treatment of the instances of a class by a walk: found out once for each class, for there are many instances."""

    atom: bool
    """They lead to nothing."""
    perhaps_stream: bool
    inside: Callable[[str, Any], Iterable[tuple[str, Any]]]
    """Function from the path of an instance, and the instance, to what it holds, with paths."""


class _Kinds(dict[type[Any], _Kind]):
    """Classes that a walk has met; it ends with the walk, and so keeps none alive."""

    def __missing__(self, kind: type[Any]) -> _Kind:
        self[kind] = found = _Kind(issubclass(kind, _ATOMS), _perhaps_stream(kind), _inside(kind))
        return found


def _perhaps_stream(kind: type[Any]) -> bool:
    # An array of jax is one by its metaclass, and a proxy by what it says of its class.
    return issubclass(kind, (np.random.Generator, np.random.BitGenerator, _LEGACY, random.Random)) or any(
        "__class__" in vars(base) or str(base.__module__).startswith(("jax", "torch"))
        for base in kind.__mro__
        if base is not object
    )


def _stream(path: str, value: Any) -> Stream | None:
    try:
        if isinstance(value, np.random.Generator):
            return _numpy(path, value.bit_generator)
        if isinstance(value, np.random.BitGenerator):
            return _numpy(path, value)
        if isinstance(value, _LEGACY):
            return _numpy(path, value._bit_generator)  # type: ignore[attr-defined]
        if isinstance(value, random.Random):
            value.getstate()  # SystemRandom has none
            return Stream(path, "python", value)
        if (torch := sys.modules.get("torch")) is not None and isinstance(value, torch.Generator):
            value.get_state()  # that of some devices cannot be read
            return Stream(path, "torch", value)
        if (jax := sys.modules.get("jax")) is not None and isinstance(value, jax.Array):
            return Stream(path, "jax", value) if _is_key(jax, path, value) else None
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return None
    return None


def _numpy(path: str, bits: Any) -> Stream | None:
    _ = bits.state  # a user's own bit generator may have none
    return Stream(path, "numpy", bits)


def _is_key(jax: Any, path: str, value: Any) -> bool:
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return True
    name = path.rpartition(".")[2].lower()
    return value.dtype == np.uint32 and value.shape in ((2,), (4,)) and ("key" in name or "rng" in name)


def _key_bytes(value: Any) -> bytes:
    jax = sys.modules["jax"]
    return np.asarray(value if value.dtype == np.uint32 else jax.random.key_data(value)).tobytes()


def _global() -> set[int]:
    """Ids of the streams of the process."""
    legacy: Any = np.random.mtrand
    known = {id(random._inst), id(legacy._rand._bit_generator)}  # type: ignore[attr-defined]
    if (torch := sys.modules.get("torch")) is not None:
        known.add(id(torch.default_generator))
        for device in (torch.cuda, torch.xpu):
            known.update(map(id, device.default_generators))
    return known


def _inside(kind: type[Any]) -> Callable[[str, Any], Iterable[tuple[str, Any]]]:
    """Function from the path of an instance, and the instance, to values that it holds, with paths; of a space none."""
    if issubclass(kind, gym.Space):
        return lambda path, value: ()
    if issubclass(kind, np.ndarray):
        return _in_array
    if kind is types.FunctionType:
        return _in_function
    if kind in (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType):
        return _in_method
    if issubclass(kind, functools.partial):
        return lambda path, value: ((f"{path}.{name}", getattr(value, name)) for name in ("func", "args", "keywords"))
    if kind in _FRAMES:
        return _in_frame
    attributes = _attributes(kind)
    items: Callable[[str, Any], Iterable[tuple[str, Any]]]
    if issubclass(kind, dict):
        items = _in_dict
    elif base := next((base for base in _CONTAINERS if issubclass(kind, base)), None):
        items = functools.partial(_in_set if base in (set, frozenset) else _in_sequence, base)
    else:
        return attributes
    if kind.__module__ == "builtins":  # without attributes
        return items
    return lambda path, value: itertools.chain(items(path, value), attributes(path, value))


def _in_dict(path: str, value: Any) -> Iterable[tuple[str, Any]]:
    return _items(path, dict.items(value), _named)


def _in_sequence(base: Any, path: str, value: Any) -> Iterable[tuple[str, Any]]:
    return _items(path, enumerate(base.__iter__(value)))


def _in_set(base: Any, path: str, value: Any) -> Iterable[tuple[str, Any]]:
    return _items(path, ((None, item) for item in base.__iter__(value)))


def _in_array(path: str, value: Any) -> Iterable[tuple[str, Any]]:
    return _items(path, enumerate(value.flat)) if value.dtype.hasobject and value.dtype.kind == "O" else ()


def _in_function(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
        try:
            yield f"{path}.<{name}>", cell.cell_contents
        except ValueError:  # not yet filled
            continue
    for number, item in enumerate(value.__defaults__ or ()):
        yield f"{path}.<default {number}>", item
    for name, item in (value.__kwdefaults__ or {}).items():
        yield f"{path}.<default {name}>", item


def _in_method(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value.__self__, types.ModuleType):
        yield f"{path}.__self__", value.__self__


def _in_frame(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Variables of a suspended generator or coroutine."""
    frame = getattr(value, _FRAMES[type(value)])
    for name, item in frame.f_locals.items() if frame is not None else ():
        yield f"{path}.<{name}>", item


def _items(path: str, items: Iterable[tuple[Any, Any]], named: Callable[[Any], str] = str) -> Iterator[tuple[str, Any]]:
    """Items of a container with paths; those of a set have no key."""
    for number, (key, item) in enumerate(items):
        if number >= WIDEST:
            yield path, _MORE
            return
        if not isinstance(item, _ATOMS):  # before the path is written: there may be many numbers
            yield f"{path}{{}}" if key is None else f"{path}[{named(key)}]", item


def _attributes(kind: type[Any]) -> Callable[[str, Any], Iterable[tuple[str, Any]]]:
    """Function that reads dictionaries and slots of a class's instances, which runs no code of the class."""
    kinds = types.GetSetDescriptorType, types.MemberDescriptorType
    dictionaries = (vars(base).get("__dict__") for base in kind.__mro__)  # a class may hide the instance's
    dictionary: Any = next((found for found in dictionaries if isinstance(found, kinds)), None)
    slots = [
        descriptor
        for base in kind.__mro__
        for descriptor in vars(base).values()
        if isinstance(descriptor, types.MemberDescriptorType) and descriptor.__name__ != "__dict__"
    ]

    def inside(path: str, value: Any) -> Iterator[tuple[str, Any]]:
        own = _read(dictionary, value)
        for name, item in dict.items(own) if isinstance(own, dict) else ():
            yield f"{path}.{name}" if isinstance(name, str) else path, item
        for slot in slots:
            yield f"{path}.{slot.__name__}", _read(slot, value)

    return inside


def _read(descriptor: Any, value: Any) -> Any:
    """Value that an instance holds there; None if there is none."""
    try:
        return descriptor.__get__(value, type(value)) if descriptor is not None else None
    except (AttributeError, TypeError):
        return None


def _named(key: Any) -> str:
    return repr(key)[:40] if type(key) in (str, int, float, bytes) else type(key).__name__
