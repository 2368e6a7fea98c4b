"""What the conformance suite does in a SWE-bench environment."""

from __future__ import annotations

import numpy as np

from sandboxgym.envs.swebench import probing


def test_every_run_comes_to_its_end() -> None:
    """Of a slow environment only runs of 8 steps are recorded, and the end of an episode must be among them."""
    rng = np.random.default_rng(0)
    assert probing.actions("", {"steps": probing.PATIENCE}, rng) == "submit"
    early = [probing.actions("", {"steps": step % probing.PATIENCE}, rng) for step in range(1000)]
    assert probing.PATIENCE < 8
    assert 0 < early.count("submit") < 100
    assert len(set(early)) > 15
