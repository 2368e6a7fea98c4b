"""Findings about this machine, which ``sandboxgym doctor`` prints: what is there, and what to install for the rest."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "limited", "missing"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One component of this machine."""

    name: str
    status: Status
    detail: str
    """Version or state of the component, or the reason why it does not work."""
    enables: str
    fix: str = ""
    """The command or setting that adds it; empty where nothing is missing."""


def package_version(name: str) -> str | None:
    """Version of an installed distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
