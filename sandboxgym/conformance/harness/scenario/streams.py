"""Random streams of all layers of an environment and of their spaces: seeded, renewed, read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np

from sandboxgym.conformance.harness import generators
from sandboxgym.conformance.harness.canonical import Canonical, canonical
from sandboxgym.conformance.subject import AnyEnv, layers


def renew_streams(env: AnyEnv, seed: int) -> None:
    """Reseed ``np_random`` and every other generator that the environment leads to, except those of its spaces.

    Raises:
        AttributeError, TypeError: ``np_random`` cannot be replaced, and no generator was found.
    """
    try:
        env.unwrapped.np_random = np.random.default_rng(seed)
    except (AttributeError, TypeError):
        if not generators.find(env):
            raise
    replaced = id(getattr(env.unwrapped.np_random, "bit_generator", None))
    for number, stream in enumerate(generators.find(env).values()):
        if id(stream.source) != replaced:
            stream.renew(int(np.random.SeedSequence([seed, number]).generate_state(1)[0]))


def seed_spaces(env: AnyEnv, seed: int) -> None:
    """Seed the spaces of every layer, all differently: with equal seeds, a mix-up in a restore would not show."""
    for _, space, offset in _spaces_of_layers(env):
        space.seed(seed + offset)


def seeding(name: str, env: AnyEnv, seed: int) -> str:
    """Line of a script that does the work of `seed_spaces`."""
    return ", ".join(f"{name}.{path}.seed({seed + offset})" for path, _, offset in _spaces_of_layers(env))


def _spaces_of_layers(env: AnyEnv) -> Iterator[tuple[str, gym.Space[Any], int]]:
    """Each space once, with its path from the outermost layer and the offset of its seed.

    A wrapper that changes the space of observations hides the one below, whose stream is captured too.
    """
    seen: list[gym.Space[Any]] = []
    for depth, layer in enumerate(layers(env)):
        for name in ("action_space", "observation_space"):
            space = getattr(layer, name, None) if depth else getattr(layer, name)
            if isinstance(space, gym.Space) and not any(space is other for other in seen):
                yield ".".join(["env"] * depth + [name]), space, len(seen)
                seen.append(space)


def streams(env: AnyEnv) -> dict[str, Canonical]:
    """Bit states of all random streams of all layers and their spaces; None for those not yet made."""
    found: dict[str, Canonical] = {}
    for depth, layer in enumerate(layers(env)):
        name = f"{type(layer).__name__}#{depth}"
        found[f"{name}.np_random"] = _bits(_own_stream(layer))
        for attribute in ("action_space", "observation_space"):
            space = getattr(layer, attribute, None)
            for place, inner in _spaces(space, attribute):
                found[f"{name}.{place}"] = _bits(getattr(inner, "_np_random", None))
    return found


def known_seed(env: AnyEnv) -> Any:
    """The public ``np_random_seed`` of the base environment, without making a stream; None where there is none yet."""
    base = env.unwrapped
    if (
        getattr(base, "_np_random_seed", None) is None
        and getattr(type(base), "np_random_seed", None) is gym.Env.np_random_seed
    ):
        return None  # reading it would replace np_random
    try:
        return canonical(base.np_random_seed)
    except Exception:  # an author's own property, before it has any
        return None


def _own_stream(layer: Any) -> Any:
    """A layer's ``np_random`` if it is made: Gymnasium's attribute, or a property of the author's own."""
    own = vars(layer).get("_np_random") if hasattr(layer, "__dict__") else None
    if own is None and getattr(type(layer), "np_random", None) not in (gym.Env.np_random, gym.Wrapper.np_random):
        with contextlib.suppress(Exception):  # before the first reset it may have none
            return layer.np_random
    return own


def _spaces(space: Any, place: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(space, gym.Space):
        return
    yield place, space
    inner = getattr(space, "spaces", None)
    items: Iterable[Any] = inner.items() if isinstance(inner, dict) else enumerate(inner) if inner is not None else ()
    for key, item in items:
        yield from _spaces(item, f"{place}[{key!r}]")


def _bits(generator: Any) -> Canonical:
    return canonical(generator.bit_generator.state) if isinstance(generator, np.random.Generator) else None
