"""Train as bpo_ref/train.py does and write, for every optimizer step, the gradients before AdamW uses them, and the
number of batches that each process made of its part."""

from __future__ import annotations

from typing import Any

import several
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from bpo_ref.args import parse_args
from bpo_ref.distributed.zero3 import Zero3
from bpo_ref.session import TrainingSession
from bpo_ref.train import Trainer


class Recorder(TrainingSession):
    def accumulate(self, batches: Any, backward: Any, *, idle: Any) -> None:
        rank = self.accelerator.process_index
        (self.out / f"batches-{self.stage}-{self.step}-{rank}.txt").write_text(str(len(batches)))
        super().accumulate(batches, backward, idle=idle)

    def optimizer_step(self) -> None:
        gradients = self._of_the_engine() if isinstance(self.strategy, Zero3) else self._of_weights()
        if self.accelerator.is_main_process:
            torch.save(gradients, self.out / f"gradients-{self.stage}-{self.step}.pt")
        super().optimizer_step()

    def _of_weights(self) -> dict[str, Tensor]:
        learnt = {name: parameter for name, parameter in self.network.named_parameters() if parameter.requires_grad}
        assert all(isinstance(parameter, DTensor) == self.strategy.sharded for parameter in learnt.values())
        return {
            name: parameter.grad.full_tensor() if self.strategy.sharded else parameter.grad.clone()
            for name, parameter in learnt.items()
        }

    def _of_the_engine(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_grad

        learnt = dict(self.model.engine.module.named_parameters())
        large = [p for p in learnt.values() if p.ds_numel > 100_000]  # DeepSpeed keeps smaller ones on every process
        assert large and all(p.numel() == 0 and p.ds_tensor.numel() == p.ds_numel // 2 for p in large)
        return {name: safe_get_full_grad(parameter).clone() for name, parameter in learnt.items()}


if __name__ == "__main__":
    for given in several.arguments():
        trainer = Trainer(parse_args(given), Recorder)
        trainer.run()
        trainer.session.accelerator.free_memory()
    trainer.session.leave()
