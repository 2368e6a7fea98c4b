"""Checks of the arguments of environments with sandboxes: errors are raised at once and name the argument.

Each function returns the argument in the form that is used, and raises TypeError or ValueError with one sentence:
the expected value, and the one found.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from sandboxgym.brief import brief
from sandboxgym.sandbox.base import MOST_SECONDS, Limits


def flag(name: str, value: object) -> bool:
    """Check a boolean; text is refused, because ``"no"`` would count as true."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, found {brief(value, 80)}")
    return value


def seconds(name: str, value: object) -> float:
    """Check a time limit in seconds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: expected a number of seconds, found {brief(value, 80)}")
    if math.isnan(value) or not 0 < value <= MOST_SECONDS:
        raise ValueError(f"{name}: expected more than 0 and at most {MOST_SECONDS:,} seconds, found {brief(value, 80)}")
    return value


def step_number(name: str, value: object) -> int | None:
    """Check a number of steps, or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected a number of steps or None, found {brief(value, 80)}")
    if value < 0:
        raise ValueError(f"{name}: expected 0 or more steps, found {brief(value, 80)}")
    return value


def limits(value: Limits | Mapping[str, Any] | None) -> Limits:
    """Check limits, given as such or as a mapping of some of their fields."""
    if isinstance(value, Limits):
        return value
    names = [field.name for field in fields(Limits)]
    if value is not None and not isinstance(value, Mapping):
        raise TypeError(f"limits: expected Limits or a mapping of {', '.join(names)}, found {brief(value, 80)}")
    given = dict(value or {})
    unknown = [name for name in given if name not in names]
    if unknown:
        raise ValueError(f"limits: expected some of {', '.join(names)}, found {brief(unknown[0], 80)}")
    return Limits(**given)


def prompt(value: object, names: Sequence[str]) -> str:
    """Check the introduction of a task, a text to be filled in with values of these names."""
    if not isinstance(value, str):
        raise TypeError(f"prompt: expected a text, found {brief(value, 80)}")
    try:
        value.format(**dict.fromkeys(names, ""))
    except (LookupError, ValueError, AttributeError) as error:
        wanted = ", ".join(f"{{{name}}}" for name in names)
        raise ValueError(
            f"prompt: expected a text with no fields but {wanted}, and {{{{ for a brace ({brief(error, 80)})"
        ) from None
    return value


def image(value: object) -> str | None:
    """Check the name of an image, ``"dir:/path"``, or None; a directory must exist."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise TypeError(f"image: expected the name of an image or 'dir:/path', found {brief(value, 80)}")
    if not value.strip() or "\0" in value or not _is_encodable(value):
        raise ValueError(f"image: expected the name of an image or 'dir:/path', found {brief(value, 80)}")
    folder = value.removeprefix("dir:")
    if folder != value and (not os.path.isdir(folder) or os.path.samefile(folder, "/")):
        found = "this machine's own" if os.path.isdir(folder) else "no directory"
        raise ValueError(
            f"image: expected the directory of an unpacked root file system, found {found}: {value[:200]!r}"
        )
    return value


def environment(value: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    """Check environment variables; returns a value that can be compared."""
    if value is not None and not isinstance(value, Mapping):
        raise TypeError(f"env: expected a mapping of names to texts, found {brief(value, 80)}")
    pairs = tuple((value or {}).items())
    for name, text in pairs:
        if not isinstance(name, str) or not isinstance(text, str):
            raise TypeError(f"env: expected a mapping of names to texts, found {brief({name: text}, 80)}")
        if not name or "=" in name or "\0" in name + text or not _is_encodable(name + text):
            raise ValueError(
                f"env: expected names without '=' and texts without null characters, found {brief({name: text}, 80)}"
            )
    return tuple(sorted(pairs))


def instances(value: Iterable[str] | None) -> list[str] | None:
    """Check the names of tasks that an environment is restricted to."""
    if value is None:
        return None
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise TypeError(f"instances: expected a list of ids of tasks, found {brief(value, 80)}")
    names = list(value)
    odd = [name for name in names if not isinstance(name, str)]
    if odd:
        raise TypeError(f"instances: expected a list of ids of tasks, found {brief(odd[0], 80)} in it")
    if not names:
        raise ValueError("instances: expected at least one id of a task, found none")
    return names


def _is_encodable(text: str) -> bool:
    """Tell whether text can be passed to the system: lone surrogates stand for bytes, but not all do."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True
