"""What environments of one process share, as values to compare: class attributes, module globals, files, the process.

A change of these alone is no fault (a cache may fill). It names the hazard where the behaviour of a sibling changed.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import locale
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sandboxgym.conformance.subject import AnyEnv, layers
from sandboxgym.conformance.values import Canonical, canonical

_OURS = ("gymnasium", "numpy", "sandboxgym.core", "sandboxgym.wrappers", "builtins", "abc", "typing", "collections")
_LARGEST = 1 << 20
"""Files larger than so many bytes are compared by size and time only."""


def classes(env: AnyEnv) -> list[type[Any]]:
    """The classes of all layers and their bases, without those of Gymnasium and of the protocol."""
    found: dict[type[Any], None] = {}
    for layer in layers(env):
        for kind in type(layer).__mro__:
            if not any(kind.__module__ == name or kind.__module__.startswith(f"{name}.") for name in _OURS):
                found[kind] = None
    return list(found)


def class_attributes(env: AnyEnv) -> dict[str, Canonical]:
    """The data among the attributes of these classes."""
    return {
        f"{kind.__qualname__}.{name}": summary(value)
        for kind in classes(env)
        for name, value in vars(kind).items()
        if not name.startswith("__") and not name.startswith("_abc_") and _is_data(value)
    }


def module_globals(env: AnyEnv) -> dict[str, Canonical]:
    """The data among the globals of the modules of these classes."""
    modules = {kind.__module__ for kind in classes(env)}
    return {
        f"{module}.{name}": summary(value)
        for module in sorted(modules)
        for name, value in vars(sys.modules.get(module, types.ModuleType(module))).items()
        if not name.startswith("__") and _is_data(value)
    }


def _is_data(value: Any) -> bool:
    if isinstance(value, (types.ModuleType, staticmethod, classmethod, property)):
        return False
    return not callable(value)


def summary(value: Any) -> str:
    """A digest of a value that may be large."""
    return hashlib.sha256(repr(canonical(value)).encode("utf-8", "backslashreplace")).hexdigest()[:16]


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names whose values differ."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def surroundings() -> dict[str, Canonical]:
    """What a process has one of: variables, working directory, umask, import path, signal handlers, settings."""
    mask = os.umask(0o022)
    os.umask(mask)
    found: dict[str, Canonical] = {f"os.environ[{name!r}]": value for name, value in os.environ.items()}
    found |= {f"handler of {signal.Signals(number).name}": repr(handler) for number, handler in _handlers().items()}
    return found | {
        "working directory": os.getcwd(),
        "umask": mask,
        "sys.path": tuple(sys.path),
        "locale": locale.setlocale(locale.LC_ALL),
        "garbage collection": gc.isenabled(),
        "recursion limit": sys.getrecursionlimit(),
        "NumPy's error handling": canonical(np.geterr()),
    }


def _handlers() -> dict[int, Any]:
    known = (number for number in signal.valid_signals() if number in set(signal.Signals))
    return {int(number): signal.getsignal(number) for number in known}


@contextlib.contextmanager
def put_back() -> Iterator[None]:
    """Puts back working directory, environment variables, import path, signal handlers and garbage collection."""
    folder, variables, path = os.getcwd(), dict(os.environ), sys.path[:]
    handlers, collecting = _handlers(), gc.isenabled()
    try:
        yield
    finally:
        os.chdir(folder)
        if dict(os.environ) != variables:
            for name in os.environ.keys() - variables.keys():
                del os.environ[name]
            os.environ.update(variables)
        sys.path[:] = path
        (gc.enable if collecting else gc.disable)()
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                if handler is not None and signal.getsignal(number) is not handler:
                    signal.signal(number, handler)


def global_streams() -> dict[str, Canonical]:
    """The global random streams of Python, NumPy and, where it is loaded, PyTorch."""
    kind, keys, *rest = np.random.get_state()
    found = {"random": hash(random.getstate()), "numpy.random": canonical([kind, np.asarray(keys), *rest])}
    if (torch := sys.modules.get("torch")) is not None:
        found["torch"] = torch.get_rng_state().numpy().tobytes()
    return found


def places() -> list[Path]:
    """Where files of this process usually are: temporary folders and the working directory."""
    found = [Path(tempfile.gettempdir()), Path("/dev/shm"), Path.cwd()]
    return [path for path in dict.fromkeys(found) if path.is_dir()]


def names(paths: list[Path]) -> set[Path]:
    """The entries of some folders, not of those inside."""
    entries: set[Path] = set()
    for path in paths:
        try:
            entries.update(path.iterdir())
        except OSError:
            continue
    return entries


def contents(paths: set[Path], limit: int = 2000) -> dict[str, Any]:
    """Size and digest of the files at or under some paths, at most ``limit``."""
    found: dict[str, Any] = {}
    for path in sorted(paths):
        for file in _files(path):
            if len(found) >= limit:
                return found
            try:
                status = file.lstat()
                data = file.read_bytes() if file.is_file() and status.st_size <= _LARGEST else b""
            except OSError:
                continue
            found[str(file)] = (status.st_mode, status.st_size, hashlib.sha256(data).hexdigest())
    return found


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir() and not path.is_symlink():
        for folder, _, files in os.walk(path):
            yield from (Path(folder) / name for name in files)
    else:
        yield path


@contextlib.contextmanager
def private_temporary() -> Iterator[Path]:
    """Temporary files of this process go to a folder of its own, so that other processes are not counted."""
    path = Path(tempfile.mkdtemp(prefix="sandboxgym-conformance-"))
    before, variable = tempfile.tempdir, os.environ.get("TMPDIR")
    tempfile.tempdir = os.environ["TMPDIR"] = str(path)
    try:
        yield path
    finally:
        tempfile.tempdir = before
        if variable is None:
            os.environ.pop("TMPDIR", None)
        else:
            os.environ["TMPDIR"] = variable
        shutil.rmtree(path, ignore_errors=True)
