"""Train as bpo_ref/train.py does and write how the weights were placed. A random model's answers are all wrong, so the
reward here is drawn by their first tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence

import several
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from bpo_ref.args import parse_args
from bpo_ref.distributed.zero3 import Sharded
from bpo_ref.train import Trainer
from sandboxgym.tree import RolloutTree


class Rewarded(Trainer):
    def _rollouts(self, seed: Sequence[int]) -> list[RolloutTree]:
        trees = super()._rollouts(seed)
        for edge in (edge for tree in trees for edge in tree.edges()):
            edge.reward += edge.action.data.ids[0] % 2
        return trees


def kind_of(trainer: Trainer) -> str:
    learnt = [parameter for parameter in trainer.session.network.parameters() if parameter.requires_grad]
    if isinstance(trainer.session.model, Sharded):
        return "zero3"
    if learnt and all(isinstance(parameter, DTensor) for parameter in learnt):
        return "fsdp2"
    return "ddp" if isinstance(trainer.session.model, DistributedDataParallel) else "one process"


if __name__ == "__main__":
    for given in several.arguments():
        trainer = Rewarded(parse_args(given))
        kind = kind_of(trainer)
        trainer.run()
        if trainer.session.accelerator.is_main_process:
            told = trainer.session.tokenizer.decode(trainer.session.chat.start("x"))
            (trainer.session.out / "told.json").write_text(json.dumps({"kind": kind, "start": told}))
        trainer.session.accelerator.free_memory()
