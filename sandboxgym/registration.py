"""Ids of this package's environments, one line each, and the cards of all environments.

Registered on ``import sandboxgym``; nothing heavy is imported then. `cards` and `card_of` answer for environments of
other packages too, once these have registered them (``gym.register``, with `SnapshotWrapper` outermost).
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import logging
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec, load_env_creator

from sandboxgym.core import constructor_signature
from sandboxgym.data import SANDBOX_CACHE, DataSet
from sandboxgym.system.modules import explained, is_bare, missing
from sandboxgym.task_env import EnvCard
from sandboxgym.wrappers import SnapshotWrapper

_ENVS = {  # entry point and card, both below sandboxgym.envs, and step limit
    # The original's limit; the BPO paper uses 40.
    "sandboxgym/ALFWorld-v0": ("alfworld.env:ALFWorldEnv", "alfworld.card:CARD", 50),
    "sandboxgym/WebShop-v0": ("webshop.env:WebShopEnv", "webshop.card:CARD", 50),  # the BPO paper's
    "sandboxgym/WebShopBrowser-v0": ("webshop.browser:WebShopBrowserEnv", "webshop.card:BROWSER_CARD", 50),
    "sandboxgym/SWEBench-v0": ("swebench.env:SWEBenchEnv", "swebench.card:CARD", 25),  # the BPO paper's
    "sandboxgym/Harbor-v0": ("harbor.env:HarborEnv", "harbor.card:CARD", 50),
}

log = logging.getLogger("sandboxgym")


def register_envs() -> None:
    """Register every id; each is made with `SnapshotWrapper` outermost. Idempotent."""
    for name, (entry_point, _, max_episode_steps) in _ENVS.items():
        if name not in gym.registry:
            gym.register(
                name,
                entry_point=f"sandboxgym.envs.{entry_point}",
                max_episode_steps=max_episode_steps,
                additional_wrappers=(SnapshotWrapper.wrapper_spec(),),
            )


def registered_id(env_id: str) -> str:
    """The registered id that a name stands for: this package's go without ``sandboxgym/`` (``ALFWorld-v0``).

    A name that is not registered, or that names its module (``package.module:Name-v0``), is returned as it is.
    """
    return f"sandboxgym/{env_id}" if env_id not in gym.registry and f"sandboxgym/{env_id}" in gym.registry else env_id


def similar_id(env_id: str) -> str | None:
    """The registered id that a misspelled one probably means, this package's without ``sandboxgym/``; else None."""
    ours = [name for name in gym.registry if name.startswith("sandboxgym/")]
    lower = {name.lower(): name for name in [*gym.registry, *(name.partition("/")[2] for name in ours)]}
    env_id = env_id.rpartition(":")[2].lower()
    near = difflib.get_close_matches(env_id, lower, n=1) or [
        name for name in lower if name.rpartition("-")[0] == env_id
    ]
    return lower[near[0]] if near else None


@contextlib.contextmanager
def nearest_named(env_id: str) -> Iterator[None]:
    """Add to an error of `gymnasium.make` how it is mended: the id that was probably meant, or how to get its module.

    Gymnasium looks for a similar name in one namespace only, and does not say where it has looked for a module.

    Args:
        env_id: an id, also ``package.module:Id-v0``; or ``module:function``.
    """
    module = env_id.rpartition(":")[0]
    try:
        yield
    except ModuleNotFoundError as error:
        if not module:
            raise
        raise explained(module, error) from error
    except gym.error.NameNotFound as error:
        if is_bare(sys.modules.get(module)):
            raise missing(module) from error
        near = similar_id(env_id)
        if near is None or "Did you mean" in str(error):
            raise
        raise gym.error.NameNotFound(f"{error} Did you mean: `{near}`?") from None


def cards() -> dict[str, EnvCard]:
    """The cards of this package's environments and of all others registered with `SnapshotWrapper`, by id.

    The class of an environment of another package is imported for it; one that cannot be has no card.
    """
    others = [spec.id for spec in gym.registry.values() if spec.id not in _ENVS and is_wrapped(spec)]
    found = {name: card_of(name) for name in (*_ENVS, *others)}
    return {name: card for name, card in found.items() if card != EnvCard()}


def card_of(env_id: str) -> EnvCard:
    """The card of an environment; an empty one where it has none or is not registered.

    Args:
        env_id: with or without its version and, for this package's, ``sandboxgym/``; also ``package.module:id``, of
            which the module is not imported.
    """
    name = env_id.rpartition(":")[2]
    known = [*_ENVS, *gym.registry]
    versions = {one.rpartition("-v")[0]: one for one in reversed(known)}
    unversioned = name.rpartition("-v")[0] or name
    for wanted in (name, f"sandboxgym/{name}", versions.get(unversioned), versions.get(f"sandboxgym/{unversioned}")):
        if wanted in _ENVS:
            card: EnvCard = hook(f"sandboxgym.envs.{_ENVS[wanted][1]}")
            return card
        if wanted in gym.registry:
            return _declared(gym.registry[wanted])
    return EnvCard()


def _declared(spec: EnvSpec) -> EnvCard:
    """The card of the class that a registered environment is made of."""
    try:
        creator = load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
    except Exception as error:  # of another package, which may fail in any way: the others must still be told of
        log.debug("no card of %s: %s", spec.id, error)
        return EnvCard()
    card = getattr(creator, "card", None)
    return card if isinstance(card, EnvCard) else EnvCard()


def is_wrapped(spec: EnvSpec) -> bool:
    """True if ``gym.make`` puts a `SnapshotWrapper` around an environment."""
    return any(wrapper.name == SnapshotWrapper.__name__ for wrapper in spec.additional_wrappers)


def data_sets() -> dict[str, DataSet]:
    """The data sets that the cards declare, by name."""
    return {dataset.name: dataset for card in cards().values() for dataset in card.data_sets}


def data_set(name: str) -> DataSet:
    """The data set of that name.

    Raises:
        KeyError: no card declares it; the message has those that there are.
    """
    known = data_sets()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise KeyError(f"no data set {name!r}; there are: {', '.join(known)}{hint}")
    return known[name]


def caches() -> dict[str, str]:
    """The directories under `data.cache_dir` and what they hold; ``sandboxgym gc --all`` deletes these, no others."""
    return {name: holds for card in cards().values() for name, holds in card.caches.items()} | SANDBOX_CACHE


def hook(name: str) -> Any:
    """Object that ``package.module:name`` names; the module is imported."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


_GYMNASIUM = ("max_episode_steps", "disable_env_checker", "render_mode", "vectorization_mode")  # arguments of its make


def check_arguments(env_id: str, kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments that an environment does not have, with those that it has.

    Only an environment made from a class or function that lists its arguments is checked; what cannot be looked at is
    left to ``gym.make``.

    Raises:
        TypeError: there is no such argument; the message has the nearest one and all others.
    """
    spec = gym.registry.get(registered_id(env_id.rpartition(":")[2]))
    if spec is None or not set(kwargs) - {*_GYMNASIUM, *spec.kwargs}:
        return
    try:
        creator = load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
        signature = constructor_signature(creator) if isinstance(creator, type) else inspect.signature(creator)  # type: ignore[arg-type]
    except Exception:  # of another package, which may fail in any way: making it tells
        return
    known = signature.parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return
    for name in kwargs:
        if name not in known and name not in _GYMNASIUM:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise TypeError(f"there is no argument {name!r}{hint} There are {', '.join(known) or 'none'}")


def make(id: str, **kwargs: Any) -> SnapshotWrapper:
    """`gymnasium.make`, typed: the environment has ``snapshot``, ``restore`` and ``fork``.

    Args:
        id: of this package with or without ``sandboxgym/``, or any other registered one whose environment has the
            protocol; that one is wrapped.
        kwargs: of `gymnasium.make` and of the environment, such as ``max_episode_steps`` and ``games``.

    Raises:
        gymnasium.error.NameNotFound: there is no such id; the message has the nearest one.
        TypeError: an argument does not exist; or an environment without the protocol was made, and closed again.
    """
    check_arguments(id, kwargs)
    with nearest_named(id):
        env = gym.make(registered_id(id), **kwargs)
    if isinstance(env, SnapshotWrapper):
        return env
    if not all(callable(getattr(env.unwrapped, name, None)) for name in ("snapshot", "restore", "fork")):
        env.close()
        raise TypeError(f"{id}: expected an environment with snapshot, restore and fork, found {type(env.unwrapped)}")
    return SnapshotWrapper(env)
