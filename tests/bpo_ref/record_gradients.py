"""Trains as bpo_ref/train.py does and writes the gradients of every optimizer step, before AdamW has seen them."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from bpo_ref.train import Trainer, parse_args


class Recorder(Trainer):
    def _optimizer_step(self) -> None:
        model = self.accelerator.unwrap_model(self.model)
        learnt = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert all(isinstance(parameter, DTensor) == self.sharded for parameter in learnt.values())
        gradients = {
            name: parameter.grad.full_tensor() if self.sharded else parameter.grad.clone()
            for name, parameter in learnt.items()
        }
        if self.accelerator.is_main_process:
            torch.save(gradients, self.out / f"gradients-{self.stage}-{self.step}.pt")
        super()._optimizer_step()


if __name__ == "__main__":
    Recorder(parse_args()).run()
