"""Imports of modules that a user has named, with errors that say where it was looked for and how to mend it."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast


def import_named(module: str) -> ModuleType:
    """Import a module.

    Raises:
        ModuleNotFoundError: there is none, or it needs one that is missing; the message says which, where it was looked
            for and how to get it.
        ImportError: it fails in another way.
    """
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise explained(module, error) from error
    if is_bare(found):
        del sys.modules[module]  # or it would hide the package once that is installed
        raise missing(module)
    return found


def import_callable(target: str) -> Callable[..., Any]:
    """Import a function or class.

    Args:
        target: ``module:name``; dots in the name lead into classes.

    Raises:
        ImportError: as of `import_named`.
        AttributeError: the module has no such name.
        ValueError: the text is no ``module:name``, or what it names cannot be called.
    """
    module, _, path = target.partition(":")
    if not module or not path:
        raise ValueError(f"expected module:function, found {target!r}")
    found: Any = import_named(module)
    for part in path.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"expected a function or class, found {found!r} as {target}")
    return cast("Callable[..., Any]", found)


def explained(module: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The clearer error for one that the import of a module raised, or `gymnasium.make` of an id that names it."""
    name = error.name or getattr(error.__cause__, "name", None)  # Gymnasium raises an error of its own, without a name
    if not name:
        return ModuleNotFoundError(str(error))
    if name == module or module.startswith(f"{name}."):
        return missing(module)
    said = f"{module} needs the module {name}, which is not installed in {sys.prefix}: add it there with pip"
    return ModuleNotFoundError(said, name=name)


def missing(module: str) -> ModuleNotFoundError:
    """The error for a module that is not found: where it was looked for, and how it can be made importable."""
    package = module.partition(".")[0]
    parent = sys.modules.get(package)
    if package != module and parent is not None and not is_bare(parent):
        return ModuleNotFoundError(f"the package {package} ({parent.__file__}) has no module {module}", name=module)
    project = _project_of(package)
    todo = (
        f"install its package with `pip install -e {project}`"
        if project is not None
        else "install its package, as with `pip install -e FOLDER` for the folder of its pyproject.toml, or start in "
        f"the folder that contains {f'{package}/' if package != module else f'{package}.py or {package}/__init__.py'}"
    )
    return ModuleNotFoundError(f"there is no module {module} in {', '.join(_places())}: {todo}", name=module)


def is_bare(module: ModuleType | None) -> bool:
    """True for a folder without ``__init__.py``, which Python imports as an empty package by its name."""
    return module is not None and getattr(module, "__file__", None) is None and hasattr(module, "__path__")


def _places() -> list[str]:
    """Folders in which modules are looked for: up to three of the user's, this one first, and the installation."""
    here = os.getcwd()
    folders = dict.fromkeys(map(os.path.abspath, sys.path))
    installed = (sys.prefix, sys.base_prefix)
    own = [path for path in folders if path == here or not any(map(Path(path).is_relative_to, installed))]
    own.sort(key=lambda path: path != here)
    return [*own[:3], f"the packages of {sys.prefix}"]


def _project_of(package: str) -> Path | None:
    """The folder, this one or one below, of a project with a package, as ``sandboxgym init`` makes them; else None."""
    for folder in (Path(), Path(package), Path(package.replace("_", "-"))):
        if (folder / "pyproject.toml").is_file() and any((folder / at / package).is_dir() for at in ("src", "")):
            return folder
    return None
