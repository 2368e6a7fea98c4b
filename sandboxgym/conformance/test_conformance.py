"""The test that the plugin `sandboxgym_pytest` runs for each environment and check; import it to use it elsewhere."""

from __future__ import annotations

from typing import Any

import pytest


def test_conformance(snapshot_result: Any) -> None:
    """A check of the conformance suite passes."""
    if snapshot_result.verdict == "FAIL":
        lines = [f"{snapshot_result.id}: {snapshot_result.message}"]
        for name, value in snapshot_result.evidence.items():
            if name == "difference":
                different = [row for row in value if row["differs"]]
                lines += [f"  {row['field']}: expected {row['expected']}, found {row['found']}" for row in different]
            elif "difference" not in snapshot_result.evidence or name not in ("expected", "found"):
                lines.append(f"  {name}: {value}")
        if snapshot_result.counterexample:
            lines += ["", snapshot_result.counterexample]
        pytest.fail("\n".join(lines), pytrace=False)
    if snapshot_result.verdict in ("SKIP", "INCONCLUSIVE"):
        pytest.skip(f"{snapshot_result.verdict}: {snapshot_result.message}")
