"""Time of the trainer's rollouts, in lockstep and with paths that advance by themselves, in one run.

python tests/bpo_ref/sampling/served_costs.py [--scale 1] [--only rloo]

A server in this process takes 0.1 to 0.3 s for an answer; a step of an environment takes 50 ms to 5 s, as in
`sandboxgym bench rollouts`. All else is the trainer's own: policy, requests over HTTP with all their checks, trees. An
update has 8 tasks of 8 paths, 16 environments work at the same time. Durations are multiplied by the scale, and divided
by it again for the table; what the processor needs (some milliseconds a step, of server and trainer) is not.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1])]

import gymnasium as gym  # noqa: E402
import numpy as np  # noqa: E402
from fake_engine import FakeServer  # noqa: E402
from served_runs import SMALL  # noqa: E402
from test_driver import whole  # noqa: E402

from bpo_ref.args import Args  # noqa: E402
from bpo_ref.learning.models import build_tiny, load_policy  # noqa: E402
from bpo_ref.train import Trainer  # noqa: E402
from sandboxgym.bench.rollouts import Uneven  # noqa: E402

ENV_ID = "toys/Uneven-v0"
if ENV_ID not in gym.registry:
    gym.register(ENV_ID, entry_point=Uneven)
ROWS: dict[str, dict[str, Any]] = {
    "rloo: independent paths": {"algo": "rloo", "roots": 8},
    "bpo-forest: forks before the action": {"algo": "bpo-forest", "width": 4, "points": 1.0, "roots": 2},
    "forks once a path has ended": {"algo": "bpo-forest", "schedule": "random", "width": 4, "points": 1.0, "roots": 2},
}


class Quick(FakeServer):
    """A server that, once it has been compared with the trainer, makes its answers up, and takes its time."""

    scale: float | None = None

    def sampled(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.scale is None:
            return super().sampled(body)
        sampling = body["sampling_params"]
        rng = np.random.default_rng(sampling["seed"])
        time.sleep(self.scale * rng.uniform(0.1, 0.3))
        ids = [int(rng.integers(self.model.config.vocab_size)), sampling["stop_token_ids"][0]]
        ids = ids[-1:] if ids[0] in sampling["stop_token_ids"] else ids
        content = [{"token_id": token, "logprob": -1.0} for token in ids]
        versions = [{"version": self.version, "start": 0, "end": len(ids)}]
        choice = {"token_ids": ids, "logprobs": {"content": content}, "weight_versions": versions}
        return {"request_id": f"generate-tokens-{body['request_id']}", "usage": {}, "choices": [choice]}


def measure(folder: Path, options: dict[str, Any], scale: float) -> None:
    """Print the rows of one kind of tree."""
    settings: dict[str, Any] = {
        **SMALL, "env_id": ENV_ID, "env_kwargs": (f"scale={scale}",), "eval_kwargs": (f"scale={scale}",),
        "model": str(folder / "model"), "max_turns": 16, "context": 512, "prompts": 8, "max_live": 16,
        "env_threads": 16,
    }  # fmt: skip
    with Quick(*load_policy(folder / "model"), context=512) as server:
        trainer = Trainer(Args(**{**settings, **options, "server": (server.url,), "out": tempfile.mkdtemp(dir=folder)}))
        trainer.session.player(1.0)
        server.scale = scale
        first: Any = None
        for driver in ("lockstep", "async"):
            trainer.args = trainer.session.args = replace(trainer.args, driver=driver)
            player, began = trainer.session.player(1.0), time.process_time()
            found = trainer._sample((0,), player, trainer.session.memory)
            busy = time.process_time() - began
            first = first or found
            assert whole(found.trees) == whole(first.trees), "the trees are the same"
            paths, steps = (sum(each) for each in zip(*((len(t.paths), t.env_steps) for t in found.trees), strict=True))
            seconds = found.seconds / scale
            cells = (paths, steps, f"{busy:.1f}", f"{seconds:.0f}", f"{steps / seconds:.1f}")
            cells += (f"{first.seconds / found.seconds:.2f}",)
            print(f"| {driver} | {' | '.join(map(str, cells))} |", flush=True)
        trainer.session.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all durations")
    parser.add_argument("--only", default="", help="beginning of the name of a kind of trees: no others")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        texts = [f"{number}" for number in range(10)]
        model, tokenizer = build_tiny("0.2M", texts, vocabulary=0, context=512, seed=0)
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        columns = "| driver | paths | steps | processor, s | s | steps/s | x lockstep |"
        for name, options in ROWS.items():
            if name.startswith(given.only):
                print(
                    f"\n{name} (load {os.getloadavg()[0]:.1f})\n\n{columns}\n|---|---|---|---|---|---|---|", flush=True
                )
                measure(folder, options, given.scale)


if __name__ == "__main__":
    main()
