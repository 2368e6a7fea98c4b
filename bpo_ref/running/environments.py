"""A run's environments: where they come from, and what can be refused before PyTorch is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym

from bpo_ref.config import TINY, ConfigError
from bpo_ref.running import folder
from bpo_ref.sampling.env_source import ask, env_source
from sandboxgym.arguments import parse_arguments
from sandboxgym.errors import SnapshotError
from sandboxgym.registration import check_arguments, nearest_named
from sandboxgym.system.modules import import_named
from sandboxgym.tree import Envs
from sandboxgym.workers.env_host import FleetError

if TYPE_CHECKING:
    from bpo_ref.args import Args


def envs_of(args: Args, kwargs: Sequence[str]) -> Envs:
    """The source of environments that the settings name; see `env_source`."""
    return env_source(
        args.env_id,
        kwargs,
        max_turns=args.max_turns,
        place=args.envs,
        workers=args.env_workers,
        timeout=args.env_timeout,
        address=args.ray_address,
        resources=args.env_resources,
        labels=args.env_labels,
        limits=args.env_limits,
        store=args.env_store,
        store_every=args.env_store_every,
        store_bandwidth=args.env_store_bandwidth,
        threads=args.env_threads,
    )


def opened(args: Args, name: str) -> Envs:
    """The source of environments with the arguments of a setting, after one has been made.

    Raises:
        ConfigError: there is no place for environments, or they cannot be made.
    """
    with refused(args.env_id, name):
        try:
            envs = envs_of(args, getattr(args, name))
        except gym.error.DependencyNotInstalled as error:  # of the place: no environment has been made
            raise ConfigError(f"{'env_store' if args.envs == 'process' else 'envs'}: {error}") from error
        except SnapshotError as error:  # a store of another version, or with files of others, or without room
            raise ConfigError(f"env_store: {error}") from error
        try:
            envs.give(envs.take())
        except BaseException:
            envs.close()
            raise
    return envs


@contextmanager
def refused(env_id: str, name: str) -> Iterator[None]:
    """Turn what goes wrong when an environment is made into a `ConfigError` that names the setting at fault."""
    try:
        with nearest_named(env_id):
            yield
    except ConfigError:
        raise
    except FleetError as error:
        raise ConfigError(f"envs: {error}") from error
    except gym.error.UnregisteredEnv as error:
        raise ConfigError(f"env_id: cannot make {env_id}: {error} (`sandboxgym list` shows some)") from error
    except ImportError as error:
        raise ConfigError(f"env_id: cannot make {env_id}: {error}") from error
    except (OSError, ValueError, TypeError, LookupError, gym.error.Error) as error:
        raise ConfigError(f"{name}: cannot make {env_id}: {error}") from error


def refuse_before_loading(args: Args) -> None:
    """Refuse what is wrong with a run's environments, model and files as far as it can be seen without PyTorch.

    Of several processes the first one looks at the folder and makes the environments, those on other machines excepted:
    another one may be late, and see what the first has begun to write.

    Raises:
        ConfigError: the message names the setting.
    """
    size = args.model.removeprefix("tiny:")
    if args.model.startswith("tiny:") and size not in TINY:
        raise ConfigError(f"model: expected tiny: with one of {', '.join(TINY)}, found {args.model}")
    for name in ("model", "init_from"):
        refuse_missing_folder(name, getattr(args, name))
    if args.sft_data is not None and not Path(args.sft_data).is_file():
        raise ConfigError(f"sft_data: there is no file {args.sft_data}")
    if os.environ.get("RANK", "0") != "0":
        return
    if reason := folder.refusal(folder.named(args)):
        raise ConfigError(reason)
    if args.envs == "ray":
        with refused(args.env_id, "env_id"):
            module, _, name = args.env_id.rpartition(":")
            if module:
                import_named(module)
            gym.spec(name)
        return
    for name in ("env_kwargs", "eval_kwargs")[: 2 if args.eval_kwargs != args.env_kwargs else 1]:
        refuse_environment(args.env_id, getattr(args, name), args.max_turns, name)


def refuse_environment(env_id: str, kwargs: Sequence[str], max_turns: int, name: str = "env_kwargs") -> None:
    """Make an environment once, and close it.

    Raises:
        ConfigError: it cannot be made; the message names the setting, ``env_id`` or ``name``.
    """
    with refused(env_id, name):
        arguments = parse_arguments(kwargs)
        check_arguments(env_id, arguments)
        gym.make(env_id, max_episode_steps=max_turns, **arguments).close()


def refuse_missing_folder(name: str, where: str | None) -> None:
    """Raise `ConfigError` for a path without a model; what may be a name on the hub is left to transformers."""
    if not where or where.startswith("tiny:"):
        return
    path = Path(where)
    is_path = path.is_absolute() or where.startswith((".", "~")) or len(path.parts) > 2
    if is_path and not path.is_dir():
        raise ConfigError(f"{name}: there is no folder {where}")
    if path.is_dir() and not any((path / config).is_file() for config in ("config.json", "adapter_config.json")):
        raise ConfigError(f"{name}: {where} holds no model of transformers: it has no config.json")


def gives_key(envs: Envs) -> bool:
    """True if the environment's ``info`` holds a ``progress_key``; see `plain_key` for valid ones."""
    from bpo_ref.baselines import plain_key  # loads PyTorch

    return plain_key(first_info(envs).get("progress_key")) is not None


def first_info(envs: Envs) -> dict[str, Any]:
    """First ``info`` of an episode."""
    return ask(envs, lambda env: env.reset(seed=0)[1])
