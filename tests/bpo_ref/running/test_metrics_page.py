"""docs/metrics.md explains every metric that the trainer logs, and no other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import trained

from bpo_ref.eval import VERDICTS

ROOT = Path(__file__).parents[3]
KINDS = "eval|rollout|update|sft|lookahead|time|memory|total"
NAME = re.compile(rf"[\"'`]((?:{KINDS})/[a-z_]+)[\"'`]")


def logged() -> set[str]:
    sources = [
        path.read_text(encoding="utf-8") for path in (ROOT / "bpo_ref").rglob("*.py") if "experiments" not in path.parts
    ]
    names = {name for source in sources for name in NAME.findall(source)}
    loss = (ROOT / "bpo_ref" / "train.py").read_text(encoding="utf-8")
    names |= {f"update/{name}" for name in re.findall(r"stats\[\"(\w+)\"\]", loss)}
    (block,) = re.findall(r"    stats = \{\n(.*?)\n    \}", loss, re.DOTALL)
    names |= {f"update/{name}" for name in re.findall(r"\"(\w+)\":", block)}
    names -= {"update/tokens"}  # what the others are divided by
    names |= {"update/loss", "update/value_loss"}
    names |= {f"{kind}/{name}" for kind in ("rollout", "eval") for name in ("masked", *VERDICTS)}
    return names | {f"total/{name}" for name in ("returns", "env_steps", "tokens", "seconds")}


def explained() -> set[str]:
    return set(NAME.findall((ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")))


def test_every_metric_is_on_the_page_and_no_other() -> None:
    assert explained() == logged()
    assert len(explained()) > 50


@pytest.mark.parametrize(
    "options",
    [
        {"algo": "bpo", "kl": 0.1, "tis": 2.0, "mask_truncated": True},
        {"algo": "ppo"},
        {"algo": "grpo", "dynamic_sampling": 1.5},
    ],
    ids=["bpo", "ppo", "grpo"],
)
def test_whatever_a_run_logs_is_on_the_page(tmp_path: Path, options: dict[str, Any]) -> None:
    trained(tmp_path, updates=1, **options)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    names = {name for line in lines for name in line}
    assert names - explained() == {"stage", "step"}
    assert {"update/lr", "sft/lr", "time/tokens_per_second", "rollout/truncated_turns"} <= names
