"""Level 1: after ``restore`` the future equals the uninterrupted one, for every way to the restore."""

from __future__ import annotations

from sandboxgym.conformance.checks.restore import again, diverging, lasting, live_source, refused, reseeded

__all__ = ["again", "diverging", "lasting", "live_source", "refused", "reseeded"]
