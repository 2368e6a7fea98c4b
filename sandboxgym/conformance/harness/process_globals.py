"""State shared by environments of one process, as comparable values: class attributes, globals, files, settings.

Such a change alone is no fault (a cache may fill). Where the behaviour of a sibling changed, it names the cause.
"""

from __future__ import annotations

import contextlib
import decimal
import functools
import gc
import hashlib
import locale
import logging
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sandboxgym.conformance.harness.canonical import Canonical, canonical
from sandboxgym.conformance.subject import AnyEnv, layers
from sandboxgym.conformance.supervision import scratch

_OURS = ("gymnasium", "numpy", "sandboxgym.core", "sandboxgym.wrappers", "builtins", "abc", "typing", "collections")
_LARGEST = 1 << 20
"""Bytes above which files are compared by size and time only."""


def classes(env: AnyEnv) -> list[type[Any]]:
    """Classes of all layers and their bases, without those of Gymnasium and of the protocol."""
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
    """State of the whole process: variables, directory, umask, import path, handlers, limits, settings of libraries."""
    mask = os.umask(0o022)
    os.umask(mask)
    found: dict[str, Canonical] = {f"os.environ[{name!r}]": value for name, value in os.environ.items()}
    found |= {f"handler of {signal.Signals(number).name}": repr(handler) for number, handler in _handlers().items()}
    found |= {f"limit {name}": resource.getrlimit(number) for name, number in _limits().items()}
    decimals = decimal.getcontext()
    found |= {
        "working directory": os.getcwd(),
        "umask": mask,
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "processors": tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else (),
        "process group and session": (os.getpgrp(), os.getsid(0)),
        "root directory": _root(),
        "blocked signals": tuple(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))),
        "timer": signal.getitimer(signal.ITIMER_REAL)[0] > 0,
        "sys.path": tuple(sys.path),
        "sys.meta_path": tuple(map(_name, sys.meta_path)),
        "sys.argv": tuple(sys.argv),
        "standard streams": (id(sys.stdin), id(sys.stdout), id(sys.stderr)),
        "sys.excepthook": (_name(sys.excepthook), _name(threading.excepthook)),
        "switch interval": sys.getswitchinterval(),
        "recursion limit": sys.getrecursionlimit(),
        "digits of an int": sys.get_int_max_str_digits(),
        "trace function": (_name(sys.gettrace()), _name(sys.getprofile())),
        "locale": locale.setlocale(locale.LC_ALL),
        "time zone": time.tzname,
        "garbage collection": (gc.isenabled(), gc.get_threshold(), gc.get_debug()),
        "warnings": (tuple(map(repr, warnings.filters)), _name(warnings.showwarning)),
        "decimal context": repr(decimals).partition(", flags=")[0] + repr(sorted(map(str, decimals.traps.items()))),
        "NumPy's error handling": canonical(np.geterr()),
        "NumPy's error function": _name(np.geterrcall()),
        "NumPy's way of printing": canonical(np.get_printoptions()),
        "logging": _logging(),
        "socket timeout": _of("socket", lambda module: module.getdefaulttimeout()),
        "folder for temporary files": tempfile.gettempdir(),
        "start method of multiprocessing": _of("multiprocessing", lambda m: m.get_start_method(allow_none=True)),
        "asyncio": _of("asyncio.events", _asyncio),
        "PyTorch's settings": _of("torch", _torch),
    }
    return found


def _limits() -> dict[str, int]:
    return {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}


def _root() -> Canonical:
    try:
        status = os.stat("/")
    except OSError:
        return None
    return (status.st_dev, status.st_ino)


def _name(value: Any) -> str:
    """A function or an object, identified by its nature rather than by its address in memory."""
    kind = type(value)
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', kind.__qualname__)}"


def _of(module: str, look: Callable[[Any], Canonical]) -> Canonical:
    """A setting of a module; None if the module is not loaded."""
    loaded = sys.modules.get(module)
    try:
        return None if loaded is None else look(loaded)
    except (AttributeError, RuntimeError, ValueError):
        return None


def _logging() -> Canonical:
    root = logging.getLogger()
    return (root.level, root.disabled, tuple(map(_name, root.handlers)), root.manager.disable, logging.raiseExceptions)


def _asyncio(events: Any) -> Canonical:
    policy = getattr(events, "_event_loop_policy", None)  # get_event_loop() may make one
    loop = getattr(getattr(policy, "_local", None), "_loop", None)
    return (_name(policy), _name(loop), loop is not None and id(loop), events._get_running_loop() is not None)


def _torch(torch: Any) -> Canonical:
    return (
        str(torch.get_default_dtype()),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_anomaly_enabled(),
        str(torch.get_default_device()) if hasattr(torch, "get_default_device") else "",
    )


def _handlers() -> dict[int, Any]:
    known = (number for number in signal.valid_signals() if number in set(signal.Signals))
    return {int(number): signal.getsignal(number) for number in known}


@contextlib.contextmanager
def put_back() -> Iterator[None]:
    """Restore the parts of `surroundings` that a check may leave changed, as far as a process can."""
    folder, variables, path = os.getcwd(), dict(os.environ), sys.path[:]
    handlers = _handlers()
    undo: list[Callable[[], Any]] = [
        functools.partial(gc.enable if gc.isenabled() else gc.disable),
        functools.partial(gc.set_threshold, *gc.get_threshold()),
        functools.partial(sys.setrecursionlimit, sys.getrecursionlimit()),
        functools.partial(sys.setswitchinterval, sys.getswitchinterval()),
        functools.partial(sys.set_int_max_str_digits, sys.get_int_max_str_digits()),
        functools.partial(_again, _locale, _locale(), _locale),
        functools.partial(decimal.setcontext, decimal.getcontext().copy()),
        functools.partial(signal.pthread_sigmask, signal.SIG_SETMASK, signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        functools.partial(logging.disable, logging.getLogger().manager.disable),
        functools.partial(logging.getLogger().setLevel, logging.getLogger().level),
        functools.partial(setattr, sys, "excepthook", sys.excepthook),
        functools.partial(setattr, threading, "excepthook", threading.excepthook),
        functools.partial(setattr, tempfile, "tempdir", tempfile.tempdir),
        *(functools.partial(_limit, number, resource.getrlimit(number)) for number in _limits().values()),
    ]
    errors, printing = np.geterr(), np.get_printoptions()
    torch = sys.modules.get("torch")
    if torch is not None:
        undo += [
            functools.partial(torch.set_default_dtype, torch.get_default_dtype()),
            functools.partial(_again, torch.set_num_threads, torch.get_num_threads(), torch.get_num_threads),
            functools.partial(torch.set_grad_enabled, torch.is_grad_enabled()),
            functools.partial(torch.set_rng_state, torch.get_rng_state()),
        ]
    mask = os.umask(0o022)
    os.umask(mask)
    try:
        yield
    finally:
        os.umask(mask)
        os.chdir(folder)
        if dict(os.environ) != variables:
            for name in os.environ.keys() - variables.keys():
                del os.environ[name]
            os.environ.update(variables)
        sys.path[:] = path
        np.seterr(**errors)
        np.set_printoptions(**printing)
        for action in undo:
            action()
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                if handler is not None and signal.getsignal(number) is not handler:
                    signal.signal(number, handler)


def _again(write: Callable[[Any], Any], wanted: Any, read: Callable[[], Any]) -> None:
    """Write a setting only if it differs, because writing has side effects."""
    if read() != wanted:
        write(wanted)


def _locale(wanted: str | None = None) -> str:
    return locale.setlocale(locale.LC_ALL, wanted)


def _limit(number: int, wanted: tuple[int, int]) -> None:
    if resource.getrlimit(number) != wanted:
        with contextlib.suppress(ValueError, OSError):  # a hard limit that was lowered stays
            resource.setrlimit(number, wanted)


def global_streams() -> dict[str, Canonical]:
    """The global random streams of Python, NumPy and, where it is loaded, PyTorch."""
    kind, keys, *rest = np.random.get_state()
    found = {"random": hash(random.getstate()), "numpy.random": canonical([kind, np.asarray(keys), *rest])}
    if (torch := sys.modules.get("torch")) is not None:
        found["torch"] = torch.get_rng_state().numpy().tobytes()
    return found


def places() -> list[Path]:
    """Usual places of this process's files: temporary folders and the working directory."""
    found = [Path(tempfile.gettempdir()), Path("/dev/shm"), Path.cwd()]
    return [path for path in dict.fromkeys(found) if path.is_dir()]


def names(paths: list[Path]) -> set[Path]:
    """Entries of some folders, without those of subfolders."""
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
    """Context with a temporary folder for this process alone, so that other processes' files are not counted."""
    made = scratch.folder()
    path = Path(made.name)
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
        made.cleanup()
