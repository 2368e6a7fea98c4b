"""Level 2: forks start at their source's state, and are independent from then on."""

from __future__ import annotations

from sandboxgym.conformance.checks.fork import alike, draws, look_ahead, protocol, siblings, whole_copies

__all__ = ["alike", "draws", "look_ahead", "protocol", "siblings", "whole_copies"]
