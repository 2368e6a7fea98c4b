"""One update by verl's own training worker on the CPU, on rows of trees: run as a program, which prints what changed.

verl comes with platforms for GPUs and NPUs, for which its engines are registered, and takes further ones as plugins. So
this registers a platform for the CPU, and verl's engine for FSDP2 with it: no code of verl is replaced. It is a program
of its own because verl has one platform per process.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

FIELDS = ("prompts", "responses", "input_ids", "position_ids", "response_mask", "loss_mask")


class CPU:
    """The CPU as a device of verl; a mixin, since verl's base class is imported later."""

    device_name = "cpu"
    vendor_name = "any"

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "SANDBOXGYM_NO_DEVICES"

    def nvtx_range(self, msg: str) -> Any:
        return nullcontext()

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    class device_module:
        """In the place of ``torch.cuda``."""

        @staticmethod
        def get_device_name() -> str:
            return "CPU"

        @staticmethod
        def mem_get_info() -> tuple[int, int]:
            return 0, 0

        @staticmethod
        def memory_allocated() -> int:
            return 0

        memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated


def nothing(self: Any, *args: Any, **options: Any) -> None:
    """Do nothing: a CPU has no seeds of its own, caches or profilers."""


def register_cpu() -> None:
    """Register the CPU with verl, and verl's engine for it."""
    from verl.plugin.platform.platform_base import PlatformBase
    from verl.plugin.platform.platform_manager import set_platform

    rest = {name: nothing for name in PlatformBase.__abstractmethods__ if not hasattr(CPU, name)}
    set_platform(type("PlatformCPU", (CPU, PlatformBase), rest)())
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp import FSDPEngineWithLMHead

    EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")(FSDPEngineWithLMHead)


def worker(folder: str, rate: float) -> Any:
    """verl's worker with the model of a folder, plain gradient descent and nothing in half precision."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker

    model = HFModelConfig(
        path=folder,
        use_remove_padding=False,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "eager"},
    )
    precise = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine = FSDPEngineConfig(
        strategy="fsdp2",
        mixed_precision=precise,
        use_torch_compile=False,
        use_orig_params=True,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=4,
    )
    optimizer = FSDPOptimizerConfig(
        optimizer="SGD", lr=rate, weight_decay=0.0, clip_grad=1e9, lr_warmup_steps=0, total_training_steps=1
    )
    made = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=model,
            engine_config=engine,
            optimizer_config=optimizer,
            checkpoint_config=CheckpointConfig(),
        )
    )
    made.reset()
    return made


def main(algo: str) -> None:
    """Print the largest difference from our gradient, the largest gradient, and verl's metrics."""
    register_cpu()
    import verl.trainer.ppo.v1  # noqa: F401 - imports the real queue
    from test_token_trees import mean_loss
    from test_verl import asked
    from tree_players import algorithm, players
    from verl.trainer.ppo.padding_utils import construct_minimal_padding_template
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    from sandboxgym.adapters.tokens.trees import token_rows
    from sandboxgym.adapters.verl import verl_row

    rate = 0.1
    with players() as player, tempfile.TemporaryDirectory() as folder:
        player.model.save_pretrained(folder)
        player.tokenizer.save_pretrained(folder)
        trees, _ = player.grow(algorithm(algo))
        rows = token_rows(trees)
        fields = [verl_row(row, asked(trees)[row.tree]) for row in rows]
        padding, _ = construct_minimal_padding_template(fields[0], fields[0]["tag"], player.tokenizer.eos_token_id)
        fields += [padding] * (-len(fields) % 4)
        logps = [old_logps(player.model, row) for row in fields]
        batch = tu.list_of_dict_to_tensordict(
            [
                {
                    **{name: row[name] for name in FIELDS},
                    "old_log_probs": logps[i],
                    "advantages": torch.tensor(rows[i].advantages) if i < len(rows) else torch.zeros(len(logps[i])),
                }
                for i, row in enumerate(fields)
            ]
        )
        actor = FSDPActorConfig(strategy="fsdp2", loss_agg_mode="token-mean", rollout_n=1, use_dynamic_bsz=True)
        made = worker(folder, rate)
        made.set_loss_fn(partial(ppo_loss, config=actor))
        weights, _ = made.engine.get_per_tensor_param()
        before = {name: weight.clone() for name, weight in weights}
        tu.assign_non_tensor(
            batch, global_batch_size=len(fields), mini_batch_size=len(fields), epochs=1, seed=0, temperature=1.0
        )
        metrics = tu.get(made.train_mini_batch(batch), "metrics")
        weights, _ = made.engine.get_per_tensor_param()
        found = {name: (before[name] - weight) / rate for name, weight in weights}
        names, parameters = zip(*player.model.named_parameters(), strict=True)
        gradients = torch.autograd.grad(mean_loss(player.model, rows), parameters)
        expected = dict(zip(names, gradients, strict=True))
        assert set(expected) <= set(found), sorted(found)
        difference = max(float((found[name] - expected[name]).abs().max()) for name in names)
        largest = max(float(gradient.abs().max()) for gradient in gradients)
        print(json.dumps({"difference": difference, "largest": largest, "metrics": sorted(metrics)}))


def old_logps(model: Any, row: dict[str, Any]) -> torch.Tensor:
    """Log-probabilities of a row's response."""
    ids = row["input_ids"][None]
    with torch.no_grad():
        found = torch.log_softmax(model(ids).logits[0].float(), -1)
    return found[:-1].gather(1, ids[0, 1:, None])[len(row["prompts"]) - 1 :, 0]


if __name__ == "__main__":
    sys.modules["trl"] = None  # type: ignore[assignment] # optional for verl, which patches a release from before ours
    # verl's worker would name the CPU twice when it makes its process group; it takes one that is there.
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # read, not used
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    main(*sys.argv[1:])
