"""Specimens of the zoo, and how a class or a factory becomes one.

A `Mutant` is a correct environment with exactly one fault, and the checks that must detect that fault. Another check
may detect it too, but a report that doesn't fail one of ``killed_by`` would mislead its reader. A `Good` has no fault,
and no check may raise an alarm on it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import gymnasium as gym

Make = Callable[[], gym.Env[Any, Any]]
MakeT = TypeVar("MakeT", bound=Callable[..., Any])
Budget = Literal["quick", "full"]


@dataclass(frozen=True)
class Mutant:
    """An environment with one fault.

    Attributes:
        name: unique, in kebab case.
        hazard: what is wrong, in the words of a report's reader.
        make: a module-level class or function without required arguments, so that another process finds it too.
        killed_by: ids of the checks that name this hazard; at least one must fail.
        observe_state: an oracle that reads the state past the API, as ``Subject`` takes it.
        actions: an action source, as ``Subject`` takes it.
        shell: runs commands in it, as ``Subject`` takes it.
        limits: what it declares to hold, as ``Subject`` takes it.
        budget: the smallest budget that must find it.
        family: the correct environment that it was made from.
        note: how the fault was put in.
        follows: the report of such a fault in a real project, as ``owner/repository#number``; empty if it follows none.
    """

    name: str
    hazard: str
    make: Make
    killed_by: frozenset[str]
    observe_state: Callable[[Any], Any] | None = None
    actions: Callable[..., Any] | None = None
    shell: Callable[[Any, str], str] | None = None
    limits: Callable[[Any], dict[str, float]] | None = None
    budget: Budget = "quick"
    family: str = ""
    note: str = ""
    follows: str = ""


@dataclass(frozen=True)
class Good:
    """An environment without a fault; the fields are those of `Mutant`."""

    name: str
    make: Make
    observe_state: Callable[[Any], Any] | None = None
    actions: Callable[..., Any] | None = None
    shell: Callable[[Any, str], str] | None = None
    limits: Callable[[Any], dict[str, float]] | None = None
    note: str = ""


MUTANTS: list[Mutant] = []
KNOWN_GOOD: list[Good] = []


def mutant(
    hazard: str,
    *killed_by: str,
    budget: Budget = "quick",
    observe_state: Callable[[Any], Any] | None = None,
    actions: Callable[..., Any] | None = None,
    shell: Callable[[Any, str], str] | None = None,
    limits: Callable[[Any], dict[str, float]] | None = None,
    follows: str = "",
) -> Callable[[MakeT], MakeT]:
    """Enter the decorated class or factory into `MUTANTS`; its docstring becomes the note."""

    def enter(make: MakeT) -> MakeT:
        assert killed_by, f"{make.__name__} names no check that must find it"
        specimen = Mutant(
            name=kebab(make.__name__),
            hazard=hazard,
            make=make,
            killed_by=frozenset(killed_by),
            observe_state=observe_state,
            actions=actions,
            shell=shell,
            limits=limits,
            budget=budget,
            family=make.__module__.rpartition(".")[2],
            note=" ".join((make.__doc__ or "").split()),
            follows=follows,
        )
        MUTANTS.append(specimen)
        return make

    return enter


def good(
    *,
    observe_state: Callable[[Any], Any] | None = None,
    actions: Callable[..., Any] | None = None,
    shell: Callable[[Any, str], str] | None = None,
    limits: Callable[[Any], dict[str, float]] | None = None,
) -> Callable[[MakeT], MakeT]:
    """Enter the decorated class or factory into `KNOWN_GOOD`."""

    def enter(make: MakeT) -> MakeT:
        note = " ".join((make.__doc__ or "").split())
        KNOWN_GOOD.append(Good(kebab(make.__name__), make, observe_state, actions, shell, limits, note))
        return make

    return enter


def kebab(name: str) -> str:
    """``SnapshotByReference`` and ``snapshot_by_reference`` as ``snapshot-by-reference``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).replace("_", "-").lower()


def where(make: Make) -> str:
    """``module:name`` of a factory, for another process to find it by."""
    return f"{make.__module__}:{make.__qualname__}"
