"""Settings from a YAML file and the command line."""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro
import yaml

Settings = TypeVar("Settings")

TINY = ("0.2M", "1M", "3M")
"""Sizes of the models that are built in code; see `bpo_ref.learning.tiny`."""


class ConfigError(ValueError):
    """Settings that contradict each other or cannot be read; the message names the field."""


def parse(settings: type[Settings], argv: Sequence[str] | None = None) -> Settings:
    """Read settings: defaults, then the YAML file of ``--config``, then the command line.

    Args:
        settings: a dataclass with defaults.
        argv: the command line (default: this process's). A Boolean setting is given as a flag (``--resume``,
            ``--no-resume``) or with a value (``--resume True``).

    Raises:
        ConfigError: the file cannot be read, or has a field that does not exist or a value of another type; the message
            names both.
        SystemExit: ``--help`` was asked for, or the command line cannot be read.
    """
    given = sys.argv[1:] if argv is None else argv
    argv = [part for word in given for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    argv = _with_values(settings, argv)
    values: dict[str, Any] = {}
    if "--config" in argv:
        at = argv.index("--config")
        if at + 1 == len(argv):
            raise ConfigError(f"--config: expected a YAML file, or one of {', '.join(packaged())}")
        values = read_config(settings, find_config(argv[at + 1]))
        del argv[at : at + 2]
    if "-h" in argv or "--help" in argv:
        print(help_text(settings, settings(**values)))
        sys.exit(0)
    return tyro.cli(settings, default=settings(**values), args=argv, config=(tyro.conf.FlagConversionOff,))


def help_text(settings: type[Settings], default: Settings) -> str:
    """Options of a settings class under the headings that are comments in its source, with their defaults.

    Args:
        settings: a dataclass whose fields have docstrings below them.
        default: the values to show as defaults.
    """
    source = inspect.getsource(settings)
    lines, hints, (made,) = source.splitlines(), get_type_hints(settings), ast.parse(source).body
    assert isinstance(made, ast.ClassDef)
    width = max(60, min(110, shutil.get_terminal_size().columns))
    about = (inspect.getdoc(settings) or "").replace("``", "`")
    shown = [f"usage: {Path(sys.argv[0]).name} [--config FILE|NAME] [OPTIONS]", "", *textwrap.wrap(about, width)]
    config = f"--config is a YAML file with these settings, or one of {', '.join(packaged())}."
    shown += ["", *textwrap.wrap(config, width, break_on_hyphens=False), "", "Run"]
    before = made.lineno
    for field, told in pairwise(made.body):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        headings = [
            line.strip("# ").replace("``", "`")
            for line in lines[before : field.lineno - 1]
            if line.strip().startswith("# ")
        ]
        shown += ["", *headings] if headings else []
        before = field.end_lineno or field.lineno
        if not (isinstance(told, ast.Expr) and isinstance(told.value, ast.Constant)):
            continue
        name, value = field.target.id, getattr(default, field.target.id)
        flag, text = f"--{name.replace('_', '-')}", " ".join(str(told.value.value).replace("``", "`").split())
        if hints[name] is bool:
            option = f"{flag}, --no-{flag[2:]}"
        else:
            choices = _choices(hints[name])
            kind = ast.unparse(field.annotation).removesuffix(" | None").upper()
            several = kind.removeprefix("TUPLE[").partition(",")[0]
            kind = f"[{several} ...]" if kind != several and not choices else kind
            option = f"{flag} {'{' + ', '.join(choices) + '}' if choices else kind}"
        shown += textwrap.wrap(option, width, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False)
        words = (" ".join(map(str, value)) or "none") if isinstance(value, tuple) else str(value)
        given = "" if value is None else f" (default: {words})"
        shown += textwrap.wrap(text + given, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(shown)


def _choices(hint: Any) -> list[str]:
    """The values of a literal type, or of the one in a union."""
    found = hint if get_origin(hint) is Literal else next((h for h in get_args(hint) if get_origin(h) is Literal), None)
    return [str(each) for each in get_args(found)] if found is not None else []


def _with_values(settings: type[Any], argv: Sequence[str]) -> list[str]:
    """The command line with a value after every Boolean setting."""
    flags = {f"--{name.replace('_', '-')}" for name, hint in get_type_hints(settings).items() if hint is bool}
    words: list[str] = []
    for word, following in zip(argv, (*argv[1:], "--")):
        name = word.replace("_", "-")
        if name in flags and following.lower() not in ("true", "false"):
            words += [word, "True"]
        elif name.startswith("--no-") and f"--{name[5:]}" in flags:
            words += [f"--{name[5:]}", "False"]
        else:
            words.append(word)
    return words


CONFIGS = Path(__file__).with_name("configs")


def packaged() -> list[str]:
    """Names of the packaged configurations."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def find_config(name: str) -> Path:
    """Find a configuration file by its path, or a packaged one by its bare name, such as ``alfworld-tiny``.

    Raises:
        ConfigError: there is none; the message lists the packaged names.
    """
    path = Path(name)
    if path.exists() or path.name != name:
        return path
    own = CONFIGS / f"{name.removesuffix('.yaml')}.yaml"
    if own.exists():
        return own
    near = difflib.get_close_matches(name.removesuffix(".yaml"), packaged(), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"--config: expected a YAML file, or one of {', '.join(packaged())}, found {name!r}{hint}")


def read_config(settings: type[Any], path: Path) -> dict[str, Any]:
    """Read fields of a dataclass from a YAML file; those named ``…_kwargs`` may be written as a mapping."""
    try:
        values = yaml.safe_load(path.read_text()) or {}
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: there is no such file") from error
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected lines of the form name: value, found {values!r:.80}")
    for name, value in values.items():
        if str(name).endswith("_kwargs") and isinstance(value, dict):
            values[name] = tuple(f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in value.items())
    try:
        return checked(settings, values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def checked(settings: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of fields of a dataclass, with tuples for lists.

    Raises:
        ConfigError: there is no such field, or it has another type.
    """
    known = get_type_hints(settings)
    found = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    for name, value in found.items():
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "see --help for those that are"
            raise ConfigError(f"there is no setting {name!r}; {hint}")
        if not _fits(value, known[name]):
            raise ConfigError(f"{name}: expected {_described(known[name])}, found {values[name]!r}")
    return found


def _described(hint: Any) -> str:
    """Type of a field in words."""
    options = get_args(hint)
    if get_origin(hint) is Literal:
        return f"one of {', '.join(options)}"
    if get_origin(hint) is tuple:
        return "a list" if options[-1] is ... else f"a list of {len(options)}"
    if options:
        return " or ".join(map(_described, options))
    number = "a number (5e-4 is text in YAML, 5.0e-4 a number)"
    return {bool: "true or false", int: "a whole number", float: number, str: "a text"}.get(hint, "null")


def _fits(value: Any, hint: Any) -> bool:
    """True if a value has the type of a field."""
    options = get_args(hint)
    if get_origin(hint) is Literal:
        return value in options
    if get_origin(hint) is tuple:
        if not isinstance(value, tuple):
            return False
        wanted = options[:1] * len(value) if options[-1] is ... else options
        return len(value) == len(wanted) and all(map(_fits, value, wanted))
    if options:
        return any(_fits(value, option) for option in options)
    return type(value) is hint or (hint is float and type(value) is int)
