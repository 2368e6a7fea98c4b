"""Level 1: after ``restore`` the future equals the uninterrupted one, whatever happened before the restore."""

from __future__ import annotations

from sandboxgym.conformance.checks.restore import again, diverging, lasting, live_source, refused, reseeded

__all__ = ["again", "diverging", "lasting", "live_source", "refused", "reseeded"]
