"""Models that the stages of a run start from: initial weights, adapters, how they compute; and their optimizer."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerBase

from bpo_ref.learning import packing
from bpo_ref.learning.models import (
    CausalLM,
    add_adapter,
    build_tiny,
    checkpoint_layers,
    compute_in,
    load_adapter,
    load_policy,
    policy_of,
)

if TYPE_CHECKING:
    from bpo_ref.args import Args


@dataclass(frozen=True)
class InitialModels:
    """Models of a run's stages (``sft``, ``rl``), each made anew by every call."""

    args: Args
    """Settings with the preset filled in."""
    device: torch.device
    """Device on which weights are loaded."""
    sharded: bool
    """True if training shards the weights over processes."""
    demonstrations: Sequence[Mapping[str, Any]]
    """Expert episodes, whose words a tiny policy's tokenizer knows."""

    def trained(self, stage: str, *, resuming: bool) -> tuple[CausalLM, PreTrainedTokenizerBase]:
        """Build the policy for training: weights in fp32, or frozen ones in ``dtype`` with adapters in fp32."""
        args, checkpoint = self.args, Path(self.args.out) / "checkpoint"
        if args.lora_r:
            base, tokenizer = self.initial(stage, args.dtype)
            model = self.adapted(stage, base)
            if resuming:
                load_adapter(model, checkpoint)
            return model, tokenizer
        if resuming:
            model, tokenizer = load_policy(checkpoint, device=self.device)
        else:
            model, tokenizer = self.initial(stage, "float32")
        self._configure(model)
        return model, tokenizer

    def initial(self, stage: str, dtype: str) -> tuple[CausalLM, PreTrainedTokenizerBase]:
        """Initial model and tokenizer of a stage."""
        args = self.args
        if self._start(stage) == args.model and args.model.startswith("tiny:"):
            texts = (text for d in self.demonstrations for text in d["observations"] + d["actions"])
            size = args.model.removeprefix("tiny:")
            return build_tiny(size, texts, vocabulary=args.tiny_vocabulary, context=args.context, seed=args.seed)
        setting = "init_from" if args.init_from else "model"
        return load_policy(self._start(stage), dtype=dtype, device=self.device, setting=setting)

    def adapted(self, stage: str, base: CausalLM) -> CausalLM:
        """Add new adapters to a stage's initial model, for training."""
        args = self.args
        model = add_adapter(base, r=args.lora_r, alpha=args.lora_alpha, seed=args.seed, base=self._start(stage))
        self._configure(model)
        return model

    def merged(self) -> CausalLM:
        """The SFT policy with its adapters merged, from the folder of the adapters, which is removed."""
        folder = Path(self.args.out) / "adapter"
        merged, _ = load_policy(folder, dtype=self.args.dtype)
        shutil.rmtree(folder)
        return merged

    def _start(self, stage: str) -> str:
        """Folder or name of a stage's initial weights."""
        args = self.args
        if args.init_from:
            return args.init_from
        return str(Path(args.out) / "sft") if args.sft_steps and stage == "rl" else args.model

    def _configure(self, model: CausalLM) -> None:
        if self.args.pack == "tree":
            packing.enable(model)
        if self.args.gradient_checkpointing:
            checkpoint_layers(model)
        if self.args.dtype != "float32" and not self.sharded:  # shards are gathered in that type
            compute_in(model, getattr(torch, self.args.dtype))


def adamw(model: CausalLM, args: Args) -> torch.optim.AdamW:
    """AdamW; the value head's learning rate stays in proportion to the policy's, and only matrices decay."""
    learnt = [parameter for parameter in policy_of(model).parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [{"params": learnt, "scale": 1.0, "weight_decay": args.weight_decay}]
    if args.weight_decay:
        groups[0]["params"] = [parameter for parameter in learnt if parameter.ndim > 1]
        vectors = [parameter for parameter in learnt if parameter.ndim < 2]  # norms and biases
        groups.append({"params": vectors, "scale": 1.0, "weight_decay": 0.0})
    if args.critic:
        head = list(model.value_head.parameters())
        groups.append({"params": head, "scale": args.value_lr / args.lr, "weight_decay": 0.0})
    return torch.optim.AdamW(groups, lr=args.lr, betas=args.betas, eps=args.adam_eps)
