"""``sandboxgym list`` and ``sandboxgym info``; functions by which all commands name and make environments."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import os
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec, load_env_creator

from sandboxgym import data
from sandboxgym.arguments import parse_arguments
from sandboxgym.cli import OK, USAGE, CommandError
from sandboxgym.cli.support.printing import Screen
from sandboxgym.core import SnapshotSpec, constructor_signature
from sandboxgym.registration import card_of, check_arguments, is_wrapped, registered_id, similar_id
from sandboxgym.system.modules import import_named

SENTENCES: dict[str, dict[Any, str]] = {
    "kind": {
        "memory": "the state is plain values in memory",
        "filesystem": "the files of the sandbox are captured, not its processes",
        "full": "files and running processes are captured",
        "logical": "the state is captured in another system's terms (a page, a query)",
        "replay": "a restore repeats the recorded actions from the start",
    },
    "cost": {
        "constant": "a snapshot costs the same at any step",
        "written": "the cost of a snapshot grows with the data written since the start",
        "steps": "the cost of a snapshot or its restore grows with the length of the episode",
    },
    "rng": {
        True: "random streams are captured: a restore repeats the same draws",
        False: "random streams are not captured: what follows a restore may differ",
    },
    "processes": {
        True: "running processes of the sandbox are captured",
        False: "no running processes are captured",
    },
    "clock": {
        True: "time inside continues from the captured moment",
        False: "time inside follows the host's clock",
    },
    "cross_process": {
        True: "a saved snapshot restores in another process",
        False: "a snapshot only restores in its own process",
    },
    "cross_host": {
        True: "a saved snapshot restores on another machine",
        False: "a saved snapshot only restores on its own machine",
    },
}


def add_kwargs(parser: argparse.ArgumentParser) -> None:
    """Add the option for an environment's arguments, the same in every command."""
    parser.add_argument(
        "--env-kwargs",
        "--kwargs",
        dest="kwargs",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="arguments of the environment; values are JSON where they parse as such, else text (games=train limit=5)",
    )


def parse_kwargs(texts: Sequence[str]) -> dict[str, Any]:
    """Call `parse_arguments` and turn its error into a `CommandError`."""
    try:
        return parse_arguments(texts)
    except ValueError as error:
        raise CommandError(str(error), status=USAGE) from error


def make(env_id: str, kwargs: dict[str, Any], *, ansi: bool = False) -> gym.Env[Any, Any]:
    """Call ``gym.make``, with errors that a user can act on.

    Args:
        env_id: an id; also ``package.module:Name-v0``, which imports the module first, and ``Name`` for this package's.
        kwargs: arguments of the environment.
        ansi: render as text if the environment can.
    """
    spec = find_spec(env_id)
    if ansi and "render_mode" not in kwargs and "ansi" in _metadata(spec).get("render_modes", ()):
        kwargs = {**kwargs, "render_mode": "ansi"}
    try:
        check_arguments(spec.id, kwargs)
        return gym.make(spec, **kwargs)
    except (TypeError, ValueError, LookupError, OSError, gym.error.Error, ImportError) as error:
        raise CommandError(f"{spec.id} could not be made: {error}") from error


def find_spec(env_id: str) -> EnvSpec:
    """The registered environment; this package's without namespace, others with a module to import."""
    module, _, env_id = env_id.rpartition(":")
    if module:
        import_modules([module])
    try:
        return gym.spec(registered_id(env_id))
    except (gym.error.Error, ImportError) as error:
        near = similar_id(env_id)
        hint = f"; did you mean {near!r}?" if near else ""
        elsewhere = "sandboxgym list shows them; another package's is PACKAGE.MODULE:ID"
        raise CommandError(f"no environment {env_id!r}{hint} ({elsewhere}): {error}", status=USAGE) from error


def snapshot_kind(spec: EnvSpec) -> str:
    """Kind of an environment's snapshots; an environment is made only if its class does not declare it."""
    declared = getattr(_creator(spec), "snapshot_spec", None)
    if isinstance(declared, SnapshotSpec):
        return declared.kind
    try:
        env = gym.make(spec)
        try:
            return f"{env.unwrapped.snapshot_spec.kind} by default"  # type: ignore[attr-defined]
        finally:
            env.close()
    except Exception:  # an extra may be missing, or an argument required; the others must still be listed
        return "unknown"


def list_main(argv: Sequence[str]) -> int:
    """Run ``sandboxgym list``; returns the exit status."""
    parser = argparse.ArgumentParser(prog="sandboxgym list", description="List the environments of this package.")
    parser.add_argument("--all", action="store_true", help="also those of other packages that use SnapshotWrapper")
    parser.add_argument(
        "--import", dest="modules", nargs="+", default=[], metavar="MODULE", help="modules that register environments"
    )
    options = parser.parse_args(argv)
    import_modules(options.modules)
    specs = [spec for name, spec in gym.registry.items() if name.startswith("sandboxgym/")]
    if options.all or options.modules:
        specs += [s for s in gym.registry.values() if s not in specs and is_wrapped(s)]
    rows = [(spec.id, snapshot_kind(spec), _ready(spec), _data_line(spec.id)) for spec in specs]
    head = ("environment", "snapshots", "ready", "data")
    wide = [max(len(row[column]) for row in [head, *rows]) for column in range(3)]
    screen = Screen(sys.stdout)
    for row in [head, *rows]:
        line = "  ".join((*(f"{cell:<{width}}" for cell, width in zip(row, wide)), row[3]))
        screen.line(screen.style(line, "bold") if row is head else line)
    return OK


def info_main(argv: Sequence[str]) -> int:
    """Run ``sandboxgym info``; returns the exit status."""
    parser = argparse.ArgumentParser(prog="sandboxgym info", description="Show all facts about one environment.")
    parser.add_argument("env_id", metavar="ENV_ID", help="sandboxgym/ALFWorld-v0, ALFWorld-v0 or package.module:Id-v0")
    add_kwargs(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    options = parser.parse_args(argv)
    about = describe(options.env_id, parse_kwargs(options.kwargs))
    if options.json:
        print(json.dumps(about, indent=2, default=str))
    else:
        _print_info(about, Screen(sys.stdout))
    return OK


def see_this_folder() -> None:
    """Make modules in the current folder importable, with lowest priority: a local json.py must not shadow json."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def import_modules(names: Sequence[str]) -> None:
    """Import modules that register environments; those of the present folder are found, too.

    Raises:
        CommandError: one cannot be imported; the message says how that is mended.
    """
    if names:
        see_this_folder()
    for name in names:
        try:
            import_named(name)
        except ModuleNotFoundError as error:
            raise CommandError(str(error), status=USAGE) from error
        except ImportError as error:
            raise CommandError(f"cannot import {name}: {error}", status=USAGE) from error


def describe(env_id: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Output of ``info`` as JSON values."""
    env = make(env_id, kwargs)
    try:
        base, spec = env.unwrapped, env.spec
        kind = type(base)
        snapshots = getattr(base, "snapshot_spec", None)
        wrappers = []
        layer: gym.Env[Any, Any] = env
        while isinstance(layer, gym.Wrapper):
            wrappers.append(type(layer).__name__)
            layer = layer.env
        env_name = env_id if spec is None else spec.id
        return {
            "id": env_name,
            "class": f"{kind.__module__}.{kind.__qualname__}",
            "about": _summary(inspect.getdoc(kind) or ""),
            "observation_space": str(env.observation_space),
            "action_space": str(env.action_space),
            "max_episode_steps": None if spec is None else spec.max_episode_steps,
            "wrappers": wrappers,
            "arguments": _arguments(kind),
            "snapshots": asdict(snapshots) if isinstance(snapshots, SnapshotSpec) else None,
            "data": [_data_facts(dataset) for dataset in card_of(env_name).data_sets],
        }
    finally:
        env.close()


def _print_info(about: dict[str, Any], screen: Screen) -> None:
    def head(text: str) -> None:
        screen.line()
        screen.line(screen.style(text, "bold"))

    screen.line(screen.style(about["id"], "bold") + f"  {about['class']}")
    screen.text(about["about"])
    head("Spaces")
    screen.text(f"observations  {about['observation_space']}", indent="  ", hanging=" " * 16)
    screen.text(f"actions       {about['action_space']}", indent="  ", hanging=" " * 16)
    screen.line(f"  step limit    {about['max_episode_steps'] or 'none'}")
    screen.text(f"wrappers      {' > '.join(about['wrappers']) or 'none'}", indent="  ", hanging=" " * 16)
    head("Arguments")
    for argument in about["arguments"]:
        default = "" if argument["required"] else f" = {argument['default']}"
        screen.line(f"  {argument['name']}{default}")
        if argument["about"]:
            screen.text(argument["about"].replace("``", ""), "dim", indent="      ")
    head("Snapshots")
    if about["snapshots"] is None:
        screen.line("  none: it has no snapshot_spec")
    for name, value in (about["snapshots"] or {}).items():
        said, meaning = _declared(name, value)
        screen.text(f"{name:<14}{said:<10} {meaning}", indent="  ", hanging=" " * 27)
    for dataset in about["data"]:
        head(f"Data: {dataset['name']}")
        screen.text(dataset["about"], indent="  ")
        screen.text(f"looked for in {dataset['directory']}", indent="  ", hanging="    ")
        found = ", ".join(dataset["found"])
        screen.text(f"found: {found}" if found else f"not there: {dataset['command']}", indent="  ", hanging="    ")


def _declared(name: str, value: Any) -> tuple[str, str]:
    """Value of a `SnapshotSpec` field, and its meaning."""
    if name == "loses":
        return ("nothing", "of what such snapshots usually hold") if not value else (", ".join(value), "are not held")
    return str(value), SENTENCES[name][value]


def _arguments(kind: type[Any]) -> list[dict[str, Any]]:
    described = _described_arguments(inspect.getdoc(kind) or "")
    return [
        {
            "name": name,
            "required": parameter.default is parameter.empty,
            "default": None if parameter.default is parameter.empty else repr(parameter.default),
            "about": described.get(name, ""),
        }
        for name, parameter in constructor_signature(kind).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def _summary(docstring: str) -> str:
    """The first line that is no heading; Gymnasium's own environments begin with ``## Description``."""
    lines = (line.strip() for line in docstring.splitlines())
    return next((line for line in lines if line and not line.startswith("#")), "")


def _described_arguments(docstring: str) -> dict[str, str]:
    """The list under "## Arguments": ``- ``name``: text`` entries, as in Gymnasium's own environments."""
    section = docstring.partition("## Arguments")[2].partition("\n## ")[0]
    described: dict[str, str] = {}
    for entry in textwrap.dedent(section).split("\n- ")[1:]:
        names, _, text = entry.partition(":")
        for name in names.replace("`", "").split(","):
            described[name.strip()] = " ".join(text.split())
    return described


def _data_facts(dataset: data.DataSet) -> dict[str, Any]:
    return {
        "name": dataset.name,
        "about": dataset.about,
        "directory": str(data.directory(dataset)),
        "found": data.parts_found(dataset),
        "command": f"sandboxgym download {dataset.name}",
    }


def _ready(spec: EnvSpec) -> str:
    card = card_of(spec.id)
    if card.module and importlib.util.find_spec(card.module) is None:
        return f"pip install 'sandboxgym[{card.extra}]'" if card.extra else f"no: it needs the module {card.module}"
    return "yes" if _creator(spec) is not None else "no: its module cannot be imported"


def _data_line(env_id: str) -> str:
    for dataset in card_of(env_id).data_sets:
        found = data.parts_found(dataset)
        state = f"found ({', '.join(found)})" if found else f"not here: sandboxgym download {dataset.name}"
        return f"embedded; {dataset.name} {state}"
    return card_of(env_id).ready


def _creator(spec: EnvSpec) -> Any:
    try:
        return load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
    except ImportError:
        return None


def _metadata(spec: EnvSpec) -> dict[str, Any]:
    metadata: dict[str, Any] = getattr(_creator(spec), "metadata", None) or {}
    return metadata
