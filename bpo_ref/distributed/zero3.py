"""Weights sharded over processes by DeepSpeed's ZeRO-3 engine, with the promises of `fsdp2`.

``accelerate launch`` with a DEEPSPEED configuration asks for it. The number of processes and ZeRO's settings (bucket
sizes) come from that file; precision, clipping and the optimizer are the trainer's. The engine is
made here and not by accelerate, which would have transformers load every model, references included, in parts.

What this module promises:

1. `Sharded.gathered` fills a plain twin of the model with the full weights: nothing is communicated while it is used,
   and DeepSpeed's hooks, which gather and release layer by layer, are not in its way.
2. Outside, every process has to run the same number of forward and backward passes (`Zero3.accumulate` sees to it).
3. `Sharded.full_state` and `Sharded.optimizer_state` have the form of those in `fsdp2`, whatever the number of
   processes: a run may be continued with another number of them, or with FSDP2.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from accelerate.utils import DeepSpeedPlugin
from torch import Tensor, nn

from bpo_ref.config import ConfigError
from bpo_ref.distributed.strategy import Item, MakeOptimizer, Strategy, in_step
from bpo_ref.learning.models import CausalLM

MOMENTS = ("exp_avg", "exp_avg_sq")


def wanted() -> bool:
    """Tell whether the launcher asked for DeepSpeed (accelerate's environment variable)."""
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() in ("1", "true")


def check(*, adapters: bool, critic: bool) -> None:
    """Refuse a launcher's configuration that this strategy cannot honour.

    Raises:
        ConfigError: it is not ZeRO-3 on GPUs for a policy whose weights are all trained, or DeepSpeed is not installed.
    """
    zero = _settings()
    if zero["stage"] != 3:
        raise ConfigError(f"the launcher asked for DeepSpeed with zero_stage {zero['stage']}: expected 3")
    for part in ("offload_optimizer", "offload_param"):
        device = (zero.get(part) or {}).get("device", "none")
        if device != "none":
            raise ConfigError(f"the launcher asked for DeepSpeed with {part}_device {device}: expected none")
    for found, what in ((adapters, "lora_r: adapters"), (critic, "baseline, credit: a value head")):
        if found:
            raise ConfigError(f"{what} cannot be trained with DeepSpeed; bpo_ref/configs/accelerate/fsdp2.yaml can")
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError('the launcher asked for DeepSpeed, not installed: pip install "sandboxgym[deepspeed]"')


def _settings() -> dict[str, Any]:
    """Read ZeRO's settings from the launcher's file; "auto" values become DeepSpeed's defaults."""
    given: dict[str, Any] = DeepSpeedPlugin().deepspeed_config["zero_optimization"]
    return {name: value for name, value in given.items() if value != "auto"}


class Sharded:
    """A causal model whose weights are sharded over all processes, with a twin for the full ones while `gathered`.

    Called, it is the twin while there is one, and else the engine.
    """

    def __init__(
        self, model: Any, optimizer: torch.optim.Optimizer | None = None, *, dtype: torch.dtype, clip: float = 0.0
    ) -> None:
        """Shard the weights, in place.

        Args:
            model: a transformers model; every process holds the same weights.
            optimizer: AdamW over its parameters; None: it is not trained.
            dtype: compute dtype. Trained weights are also kept in fp32; gradients are reduced and added up in
                fp32.
            clip: largest norm of a gradient; 0: any.
        """
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        if not torch.cuda.is_available():  # else operators that CPUs can do without are compiled, for minutes
            deepspeed.ops.__compatible_ops__ = {}
        self.whole = _twin(model, dtype)
        given = {name: parameter.data for name, parameter in model.named_parameters()}
        config = {
            "train_micro_batch_size_per_gpu": 1,  # means nothing here: batches are the trainer's
            "gradient_accumulation_steps": 1,
            "gradient_clipping": clip,
            "bf16": {"enabled": dtype == torch.bfloat16},
            "communication_data_type": "fp32",
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_optimization": _settings(),
        }
        self.engine, self._optimizer, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        self.whole.to(self.engine.device)
        self._gathered = False
        if optimizer is not None and dtype != torch.float32:  # the engine has made its fp32 weights of rounded ones
            for name, parameter in self._trained():
                self._set(parameter, given[name])

    @property
    def module(self) -> Any:
        """The module that forward passes run through."""
        return self.whole if self._gathered else self.engine.module

    def __call__(self, **inputs: Any) -> Any:
        """Run a forward pass."""
        return (self.whole if self._gathered else self.engine)(**inputs)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Hold the full weights in the twin; all processes have to enter."""
        from deepspeed.runtime.zero import GatheredParameters

        mine = dict(self.whole.named_parameters())
        for name, parameter in self.engine.module.named_parameters():
            with GatheredParameters([parameter]):
                mine[name].data = parameter.data.clone()
        self._gathered = True
        try:
            yield
        finally:
            self._gathered = False
            for parameter in mine.values():
                parameter.data = parameter.data.new_empty(0)

    # Optimizer steps.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the optimizer."""
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        return groups

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Accumulate the gradient of the loss, averaged over the processes.

        Args:
            loss: scalar.
            last: whether `step` comes next.
        """
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss)

    def step(self) -> float:
        """Make an optimizer step; returns the norm of the gradient before clipping.

        Infinite where the gradient was not finite; the weights are then lost, for DeepSpeed makes its step.
        """
        self.engine.step()
        return float(self.engine.get_global_grad_norm())

    def forget(self) -> None:
        """Reset the optimizer to one that has made no step."""
        self._optimizer.optimizer.state.clear()

    # State.

    def full_state(self) -> dict[str, Tensor]:
        """Collect the full weights in fp32 on the CPU of the first process; all processes have to call it."""
        return self._collect()

    def optimizer_state(self) -> dict[str, Any]:
        """Collect the full optimizer state by weight name on the first process's CPU; all processes have to call it."""
        group = {name: value for name, value in self.param_groups[0].items() if name != "params"}
        group["params"] = [name for name, _ in self._trained()]
        state: dict[str, Any] = {}
        for flat in list(self._optimizer.optimizer.state.values())[:1]:  # none before the first step
            moments = {moment: self._collect(moment) for moment in MOMENTS}
            for name in moments[MOMENTS[0]]:
                state[name] = {"step": flat["step"].cpu().clone(), **{m: moments[m][name] for m in MOMENTS}}
        return {"state": state, "param_groups": [group]}

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Load the result of `optimizer_state` on every process."""
        trained = [(parameter, state["state"][name]) for name, parameter in self._trained() if state["state"]]
        for flat in self._optimizer.fp32_partitioned_groups_flat if trained else ():
            zeros = {moment: torch.zeros_like(flat, requires_grad=False) for moment in MOMENTS}
            self._optimizer.optimizer.state[flat] = {"step": trained[0][1]["step"].clone(), **zeros}
        for parameter, saved in trained:
            for moment in MOMENTS:
                self._set(parameter, saved[moment], moment)

    def _trained(self) -> list[tuple[str, Any]]:
        return [(name, p) for name, p in self.engine.module.named_parameters() if p.requires_grad]

    def _collect(self, moment: str | None = None) -> dict[str, Tensor]:
        """Collect full weights in fp32, or moments of their gradients."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        found = {}
        for name, parameter in self._trained():
            whole = safe_get_full_optimizer_state(parameter, moment) if moment else safe_get_full_fp32_param(parameter)
            if torch.distributed.get_rank() == 0:
                found[name] = whole.cpu().clone()
        return found

    def _set(self, parameter: Any, whole: Tensor, moment: str | None = None) -> None:
        """Set this process's shard of a weight in fp32, or of a moment of its gradient.

        All parts are of one length, the last one padded, which DeepSpeed's functions for whole tensors do not see to.
        """
        from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

        size = parameter.ds_tensor.numel()
        part = whole.flatten()[size * torch.distributed.get_rank() :][:size]
        part = nn.functional.pad(part, (0, size - len(part)))
        if moment:
            safe_set_local_optimizer_state(parameter, part, moment)
        else:
            safe_set_local_fp32_param(parameter, part)


@contextmanager
def gathered(*models: Sharded) -> Iterator[None]:
    """Hold the full weights of several sharded models inside the block."""
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(model.gathered())
        yield


def _twin(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Copy the model with empty weights, tied where the model's are."""
    empty = {id(p): nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False) for p in model.parameters()}
    return copy.deepcopy(model, empty)


class Zero3(Strategy):
    """Weights, gradients and optimizer sharded over the processes by DeepSpeed's engine, which also makes the steps."""

    sharded = True
    model: Sharded

    def check(self, *, adapters: bool, critic: bool) -> None:
        """Refuse configurations with the module's `check`."""
        check(adapters=adapters, critic=critic)

    def place(self, network: CausalLM, make_optimizer: MakeOptimizer) -> None:
        """Shard the network; its twin takes its place."""
        self.model = self.optimizer = Sharded(network, make_optimizer(network), dtype=self.dtype, clip=self.clip)
        self.network = self.model.whole

    def frozen(self, model: CausalLM) -> CausalLM:
        """Shard a frozen model with an engine of its own."""
        return Sharded(model, dtype=self.dtype, clip=self.clip)

    def gathered(self, *others: CausalLM) -> AbstractContextManager[None]:
        """Gather the full weights into the models' twins."""
        return gathered(self.model, *others)

    def accumulate(
        self, batches: Sequence[Sequence[Item]], backward: Callable[[Sequence[Item]], None], *, idle: Item
    ) -> None:
        """Accumulate with the same number of passes on every process; the engine is told which one is the last."""

        def told(batch: Sequence[Item], last: bool) -> None:
            self._last = last
            backward(batch)

        in_step(self.accelerator, batches, told, idle)

    def backward(self, loss: Tensor) -> None:
        """Accumulate a gradient through the engine."""
        self.model.backward(loss * self.accelerator.num_processes, last=self._last)

    def step(self) -> float:
        """Step through the engine, always: after a gradient that is not finite, the weights are lost."""
        return self.model.step()

    def restart(self, make_optimizer: MakeOptimizer) -> None:
        """Reset the engine's optimizer."""
        self.model.forget()

    def whole(self, policy: CausalLM) -> dict[str, Any] | None:
        """Collect the trained weights on the CPU of the first process."""
        return self.model.full_state()

    def value_head(self) -> dict[str, Any]:
        """Raise NotImplementedError: `check` refuses value heads."""
        raise NotImplementedError("no value head is trained with DeepSpeed")

    def optimizer_state(self) -> dict[str, Any]:
        """Collect the optimizer state by weight name."""
        return self.model.optimizer_state()

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Load the optimizer state on every process."""
        self.model.load_optimizer_state(state)
