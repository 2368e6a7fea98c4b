"""docs/metrics.md explains every metric that the trainer logs, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from bpo_ref.eval import VERDICTS

ROOT = Path(__file__).parents[2]
KINDS = "eval|rollout|update|sft|lookahead|time|total"
NAME = re.compile(rf"[\"'`]((?:{KINDS})/[a-z_]+)[\"'`]")


def logged() -> set[str]:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "bpo_ref").glob("*.py")]
    names = {name for source in sources for name in NAME.findall(source)}
    loss = (ROOT / "bpo_ref" / "train.py").read_text(encoding="utf-8")
    names |= {f"update/{name}" for name in re.findall(r"stats\[\"(\w+)\"\]", loss)}
    (block,) = re.findall(r"    stats = \{\n(.*?)\n    \}", loss, re.DOTALL)
    names |= {f"update/{name}" for name in re.findall(r"\"(\w+)\":", block)}
    names -= {"update/tokens"}  # what the others are divided by
    names |= {"update/loss", "update/value_loss"}
    names |= {f"{kind}/{name}" for kind in ("rollout", "eval") for name in ("masked", *VERDICTS)}
    return names | {f"total/{name}" for name in ("returns", "env_steps", "tokens", "seconds")}


def test_every_metric_is_on_the_page_and_no_other() -> None:
    told = set(NAME.findall((ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")))
    assert told == logged()
    assert len(told) > 50
