"""The environment of docs/own-env.md can be trained on as it is: the trainer only uses the protocol."""

from __future__ import annotations

import importlib
import json
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import gymnasium as gym
import pytest

from bpo_ref.args import Args
from bpo_ref.train import Trainer
from sandboxgym.registration import card_of

ROOT = Path(__file__).parents[3]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The id of the page's environment, in a module that holds the page's code."""
    text = (ROOT / "docs/own-env.md").read_text(encoding="utf-8")
    (tmp_path / "notes_of_the_page.py").write_text("\n".join(BLOCK.findall(text)), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield "notes_of_the_page:Notes-v0"
    for number, handler in before.items():  # a trainer takes them over
        signal.signal(number, handler)
    sys.modules.pop("notes_of_the_page", None)
    gym.registry.pop("Notes-v0", None)


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["bpo", "grpo"])
def test_the_documented_environment_trains(notes: str, tmp_path: Path, algo: str) -> None:
    settings = {"sft_steps": 2, "sft_episodes": 8, "sft_noise": 0.0, "tiny_vocabulary": 320, "updates": 1, "prompts": 3}
    sizes = {"max_turns": 8, "context": 400, "max_new_tokens": 16, "eval_episodes": 5}
    Trainer(Args(env_id=notes, out=str(tmp_path / "run"), algo=algo, **settings, **sizes)).run()  # type: ignore[arg-type]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any("update/loss" in line for line in lines) and any("sft/loss" in line for line in lines)


def test_its_expert_solves_every_task_of_it(notes: str) -> None:
    importlib.import_module("notes_of_the_page")
    env = gym.make("Notes-v0")
    base = env.unwrapped
    for row in base.tasks():  # type: ignore[attr-defined]
        observation, info = env.reset(seed=1, options={"task": row.id})
        player, over = base.expert(), False  # type: ignore[attr-defined]
        assert info["task_id"] == row.id and row.instruction in observation
        player.reset(observation)
        while not over:
            observation, _, over, _, info = env.step(player.act(observation))
        assert info["success"]
    assert card_of(notes).system_prompt.startswith("You work in a directory of notes")
    env.close()
