"""Components that a machine may lack, and the skipping of tests that need them."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

REQUIRED = {name for name in os.environ.get("SANDBOXGYM_REQUIRE", "").split(",") if name}


def missing(component: str, reason: str) -> NoReturn:
    """Skip, with the reason; fail if ``SANDBOXGYM_REQUIRE`` lists the component."""
    if component in REQUIRED:
        pytest.fail(f"SANDBOXGYM_REQUIRE lists {component!r}, but {reason}")
    pytest.skip(reason)
