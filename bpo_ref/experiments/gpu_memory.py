"""GPU memory of a configuration, computed from the shape of its model.

    python -m bpo_ref.experiments.gpu_memory --config bpo_ref/configs/alfworld-qwen2.5-7b.yaml

Computed, not measured. Weights, gradients and optimizer states are exact; activations are what a Llama-like layer
keeps. Keys and values are an upper bound (every row fills its context and shares none of it), and so are logits (every
token of an update was sampled). Not counted: the CUDA context, buffers of NCCL, fragmentation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bpo_ref.args import Args, parse_args, resolved
from bpo_ref.baselines import TaskSpread
from bpo_ref.sampling.generate import JOINED, SLACK

Layout = Literal["ddp", "fsdp2", "zero3"]
NAMES: dict[Layout, str] = {"ddp": "DDP", "fsdp2": "FSDP2", "zero3": "ZeRO-3"}
LIVE, BUCKET = 10**9, 5 * 10**8  # stage3_max_live_parameters and reduce_bucket_size, as DeepSpeed sets them
GIB = 2**30


@dataclass(frozen=True)
class Shape:
    """Shape of a Llama-like causal model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    qkv_bias: bool = False
    tied: bool = False

    @property
    def linears(self) -> list[tuple[int, int]]:
        """(in, out) features of the linear layers of one block."""
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = [(self.hidden, wide), (self.hidden, narrow), (self.hidden, narrow), (wide, self.hidden)]
        return [*attention, (self.hidden, self.ffn), (self.hidden, self.ffn), (self.ffn, self.hidden)]

    @property
    def parameters(self) -> int:
        """Total number of weights."""
        bias = (self.heads + 2 * self.kv_heads) * self.head_dim * self.qkv_bias
        block = sum(a * b for a, b in self.linears) + bias + 2 * self.hidden
        return self.layers * block + self.hidden + self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def embeddings(self) -> int:
        """Number of weights of the embeddings, 0 where they are tied to the output layer."""
        return 0 if self.tied else self.vocabulary * self.hidden

    def adapters(self, r: int) -> int:
        """Number of weights of rank-r adapters beside every linear layer of every block."""
        return self.layers * sum(r * (a + b) for a, b in self.linears)

    @property
    def keys_per_token(self) -> int:
        """Numbers in the keys and values of a token, over all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim

    @property
    def kept(self) -> int:
        """Number of values per token that a block keeps for its backward pass.

        They are the inputs of its norms, of its linear layers, of attention (queries, keys, values, output), and of the
        gated product.
        """
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return 4 * self.hidden + 2 * wide + 2 * narrow + 4 * self.ffn


SHAPES = {  # as in the config.json of these checkpoints
    "Qwen/Qwen2.5-7B-Instruct": Shape(3584, 28, 28, 4, 128, 18944, 152064, qkv_bias=True),
    "meta-llama/Llama-3.1-8B-Instruct": Shape(4096, 32, 32, 8, 128, 14336, 128256),
}


def shape_of(config: Any) -> Shape:
    """Read the shape from a transformers configuration of a Llama-like model.

    Raises:
        AttributeError: the configuration lacks one of the sizes, so the model is not Llama-like.
    """
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Shape(
        config.hidden_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        head_dim,
        config.intermediate_size,
        config.vocab_size,
        qkv_bias=config.model_type == "qwen2",
        tied=config.tie_word_embeddings,
    )


def keys_and_values(shape: Shape, *, rows: int, tokens: int, size: int, joined: int = JOINED) -> tuple[int, int]:
    """Bytes of keys and values that sampling holds: in the store, and copied from it for attention (`generate`).

    The copies are contiguous keys and values: of all layers that fit into ``joined``, and of one more layer if any is
    left. If several heads share keys and values, one layer is also held with a copy for each head.

    Args:
        shape: shape of the model.
        rows: number of rows sampled at the same time.
        tokens: number of tokens per row, none of them shared.
        size: bytes of a number.
        joined: limit in bytes of the contiguous copy, as `generate.JOINED`.
    """
    layer = rows * tokens * 2 * shape.kv_heads * shape.head_dim * size
    whole = min(joined // layer, shape.layers)
    again = (whole < shape.layers) + (shape.heads // shape.kv_heads if shape.heads > shape.kv_heads else 0)
    return shape.layers * layer * (SLACK + 1) // SLACK, (whole + again) * layer


def memory(args: Args, shape: Shape, *, layout: Layout, gpus: int) -> dict[str, int]:
    """Bytes on each GPU, by purpose.

    Args:
        args: settings of the run, resolved.
        shape: shape of the model.
        layout: ``ddp`` holds everything on every GPU, ``fsdp2`` and ``zero3`` a part of it.
        gpus: number of GPUs.
    """
    low = 2 if args.dtype == "bfloat16" else 4
    parts = gpus if layout != "ddp" else 1
    weights = shape.parameters
    trained = shape.adapters(args.lora_r) if args.lora_r else weights
    residual = low if layout != "ddp" else 4  # autocast adds up what blocks give in fp32
    whole = low * (weights if layout == "fsdp2" or not args.lora_r else 0)
    if layout == "zero3":  # and gradients on their way, in a bucket that is copied to fp32
        whole = low * min(weights, LIVE) + (low + 4) * min(weights, BUCKET)
    blocks = shape.layers if not args.gradient_checkpointing else 1
    long = args.context > args.micro_tokens
    split = long and args.long_rows == "split" and args.pack == "tree" and layout == "ddp"
    tokens = args.context if long and not split else args.micro_tokens
    # Keys and values of the tree that is computed in parts, and their gradients.
    held = 2 * low * tree_tokens(args.context, most_rows(args), shared=0.5) * shape.keys_per_token if split else 0
    rows = min(args.max_live, -(-args.prompts // gpus) * most_rows(args))
    store, attention = keys_and_values(shape, rows=rows, tokens=args.context, size=low)
    frozen = low * weights if args.lora_r or (layout == "zero3" and low < 4) else 0
    if (
        layout == "ddp" and not args.lora_r and low < 4 and args.backend == "hf"
    ):  # cast for sampling (`models.lowered_twin`)
        frozen = low * (weights - shape.embeddings)
    return {
        "weights": (frozen + 4 * trained) // parts,
        "gradients": 4 * trained // parts,
        "optimizer": 8 * trained // parts,
        "reference": low * weights // parts if args.kl and not args.lora_r else 0,
        "update: gathered or cast": whole,
        "update: blocks": tokens * (shape.layers * shape.hidden * residual + blocks * shape.kept * low) + held,
        "update: logits": tokens * shape.vocabulary * 2 * low + 4096 * shape.vocabulary * 3 * 4,
        "rollout: gathered": low * weights if layout != "ddp" else 0,
        "rollout: keys and values": store,
        "rollout: attention": attention,
    }


def tree_tokens(context: int, leaves: int, *, shared: float) -> int:
    """Number of tokens of a tree whose rows are all full, each sharing a part ``shared`` with the row before."""
    return context + (leaves - 1) * math.ceil(context * (1.0 - shared))


def long_contexts(args: Args, shape: Shape, *, leaves: int) -> list[str]:
    """Lines of a Markdown table: GiB that a tree of full contexts needs of a server, and of a GPU in the update.

    A server holds the keys and values of tokens that rows share only once. An update that computes rows in parts holds
    keys and values with their gradients, and the activations of one part; any other holds the activations of a row.
    """
    low = 2 if args.dtype == "bfloat16" else 4
    lines = [LONG_HEADER]
    blocks = shape.layers if not args.gradient_checkpointing else 1
    each = shape.layers * shape.hidden * 4 + blocks * shape.kept * low + shape.vocabulary * 2 * low
    for shared in (0.0, 0.5, 0.9):
        tokens = tree_tokens(args.context, leaves, shared=shared)
        server = tokens * shape.keys_per_token * low
        cells = [server, 2 * server if shared >= 0.5 else 2 * args.context * shape.keys_per_token * low]
        cells += [min(args.micro_tokens, args.context) * each, args.context * each]
        shown = " | ".join(f"{size / GIB:.1f}" for size in cells)
        lines.append(f"| {args.context} | {leaves} | {shared:.0%} | {tokens} | {shown} |")
    return lines


LONG_HEADER = (
    "| context | leaves | shared | tokens | server: keys and values | update: keys and values, with gradients "
    "| update: activations of a part | update: activations of a whole row |\n" + "|---|" + "---|" * 7
)


def shortage(
    args: Args, config: Any, *, layout: Layout, gpus: int, available: int, weights: int | None = None
) -> str | None:
    """Explain why a GPU is too small for a run, by the computed memory that it holds all the time.

    Args:
        args: settings of the run, resolved.
        config: a transformers configuration; nothing is known about models that are not Llama-like.
        layout: as for `memory`.
        gpus: number of GPUs.
        available: bytes of one.
        weights: number of the model's weights; nothing is known about one that has fewer than its shape tells.

    Returns:
        The reason in words, or None if memory suffices or nothing is known about the model.
    """
    try:
        shape = shape_of(config)
    except AttributeError:
        return None
    if weights is not None and weights < shape.parameters:
        return None
    parts = memory(args, shape, layout=layout, gpus=gpus)
    needed = sum(size for name, size in parts.items() if ":" not in name)
    server = int(args.server_memory * available) if args.colocated else 0
    if needed <= available and needed + server > available:
        return (
            f"server_memory: {needed / GIB:.1f} GiB are needed on each of {gpus} GPUs for weights, gradients, optimizer"
            f" and reference alone, beside a server of {server / GIB:.1f} GiB ({args.server_memory:g} of "
            f"{available / GIB:.1f} GiB): lower server_memory, set lora_r, or shard the weights (FSDP2, ZeRO-3)"
        )
    if needed <= available:
        return None
    return (
        f"model: {needed / GIB:.1f} GiB are needed on each of {gpus} GPUs for weights, gradients, optimizer and "
        f"reference alone, and {available / GIB:.1f} GiB are available: set lora_r, or shard the weights (FSDP2, "
        "ZeRO-3)"
    )


def most_rows(args: Args) -> int:
    """Upper bound on a task's paths sampled at one time: independent rollouts, then forks, then forks of these."""
    assert args.roots is not None and args.width is not None and args.points is not None
    roots = args.roots * (TaskSpread.MOST if args.allocation == "spread" else 1)
    if args.schedule in ("none", "mc"):
        values = roots * (args.mc_turns or args.max_turns) * args.mc_rollouts
        return values if args.schedule == "mc" else roots
    points, paths = math.ceil(args.points), 1 if args.forks == "backbone" else roots
    waves = range(1, points + 1 if args.forks == "all" else 2)
    return max(roots, *(int(paths * math.comb(points, n) * (args.width - 1) ** n) for n in waves))


def peak(parts: dict[str, int]) -> int:
    """Bytes of the larger of the two phases, sampling and update, which never hold their parts at the same time."""
    always = sum(size for name, size in parts.items() if ":" not in name)
    phases = [sum(size for name, size in parts.items() if name.startswith(phase)) for phase in ("update", "rollout")]
    return always + max(phases)


def table(name: str, args: Args, shape: Shape, *, gpus: int) -> list[str]:
    """Lines of a Markdown table: GiB on each GPU, with adapters on every GPU and with sharded weights."""
    lines = []
    rank = args.lora_r or 32
    layouts: list[tuple[Layout, int]] = [("ddp", rank), ("fsdp2", rank), ("fsdp2", 0), ("zero3", 0)]
    for layout, r in layouts:
        chosen = Args(**{**vars(args), "lora_r": r})
        parts = memory(chosen, shape, layout=layout, gpus=gpus)
        kind = f"{NAMES[layout]}, " + (f"adapters of rank {r}" if r else "all weights")
        cells = [f"{size / GIB:.1f}" for size in (*parts.values(), peak(parts))]
        lines.append(f"| {name} | {kind} | {' | '.join(cells)} |")
    return lines


HEADER = [
    "| configuration | layout | weights | gradients | optimizer | reference | update: gathered or cast "
    "| update: blocks | update: logits | rollout: gathered | rollout: keys and values "
    "| rollout: attention | peak |",
    "|---|---|" + "---|" * 11,
]


def main(argv: Sequence[str] | None = None, *, gpus: int = 8) -> None:
    """Print the table of a configuration, or of all in ``bpo_ref/configs`` whose model is in `SHAPES`."""
    import sys

    given = list(sys.argv[1:] if argv is None else argv)
    folder = Path(__file__).parents[1] / "configs"
    files = [] if given else sorted(folder.glob("*.yaml"))
    runs = [(file.stem, parse_args(["--config", str(file)])) for file in files] or [("this", parse_args(given))]
    print("\n".join(HEADER))
    for name, args in runs:
        if args.model.startswith("tiny:"):
            continue
        if args.model in SHAPES:
            shape = SHAPES[args.model]
        else:
            from transformers import AutoConfig

            shape = shape_of(AutoConfig.from_pretrained(args.model))
        print("\n".join(table(name, resolved(args), shape, gpus=gpus)))
        if given:
            print("\n".join(["", *long_contexts(args, shape, leaves=most_rows(resolved(args)))]))


if __name__ == "__main__":
    main()
