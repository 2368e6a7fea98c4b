"""Look-ahead in whole runs of the trainer: on WebShop's clicks, with a V̂ that has never seen the batch."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bpo_ref import train
from bpo_ref.args import parse_args
from bpo_ref.baselines import Memory, ValueTable
from bpo_ref.lookahead import LookAhead, Score
from bpo_ref.train import Trainer
from sandboxgym.tree import RolloutTree

CONFIGS = Path(train.__file__).parent / "configs"
SMALL = {
    "prompts": 2, "roots": 2, "updates": 2, "max_turns": 4, "sft_steps": 1, "sft_episodes": 8, "sft_reward": 0.0,
    "eval_episodes": 1, "eval_every": 9, "eval_untrained": False, "algo": "rloo-pooled",
    "invalid_penalty": 0.1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """A trainer takes over SIGINT and SIGTERM."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_values_of_an_update_are_those_learned_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No gradient test notices a V̂ that has seen the batch; here the trainer itself is watched, on WebShop's clicks."""
    learned: list[Any] = [(ValueTable().state(), 0)]
    used: list[Any] = []
    observed = Memory.observe

    def observe(memory: Memory, *batch: Any) -> None:
        observed(memory, *batch)
        assert memory.network is not None
        learned.append((memory.values.state(), memory.network.state()["batches"]))

    class Watched(LookAhead):
        def set_controls(self, trees: Sequence[RolloutTree], score: Score) -> None:
            super().set_controls(trees, score)
            used.append((self._values.state(), self._network.state()["batches"] if self._network else 0))

    monkeypatch.setattr(Memory, "observe", observe)
    monkeypatch.setattr(train, "LookAhead", Watched)
    given = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    config = ["--config", str(CONFIGS / "webshop-tiny.yaml"), "--env-kwargs", "split=product-train", "features=true"]
    Trainer(parse_args([*config, "--lookahead=True", "--network=both", *given, f"--out={tmp_path / 'run'}"])).run()
    assert used == learned[:-1]
    assert all(one != other for one, other in pairwise(learned))  # every update has taught V̂ something
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    first, second = (line for line in lines if "lookahead/steps" in line)
    assert first["lookahead/steps"] > 0
    assert second["lookahead/scored_tokens"] > 0  # what was refused before is worth less than a search
