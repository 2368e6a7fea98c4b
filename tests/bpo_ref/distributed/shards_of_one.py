"""Train as bpo_ref/train.py does; sharded by FSDP2 where the launcher asks for it, even with one process.

One process has nothing to shard, so the trainer leaves the weights whole; here the code of many processes is run.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from torch.distributed.tensor import DTensor

from bpo_ref import session
from bpo_ref.args import parse_args
from bpo_ref.distributed import Strategy, fsdp2
from bpo_ref.distributed.replicated import Replicated
from bpo_ref.train import Trainer

if __name__ == "__main__":

    def chosen(accelerator: Any, **options: Any) -> Strategy:
        kind = fsdp2.Fsdp2 if fsdp2.wanted() else Replicated
        return kind(accelerator, **options)

    session.chosen = chosen  # type: ignore[assignment]
    trainer = Trainer(parse_args(sys.argv[1:]))
    weights = [weight for weight in trainer.session.network.parameters() if weight.requires_grad]
    told = {
        "kind": type(trainer.session.strategy).__name__,
        "device": trainer.session.accelerator.device.type,
        "dtensors": all(isinstance(weight, DTensor) for weight in weights),
    }
    trainer.run()
    (trainer.session.out / "told.json").write_text(json.dumps(told))
