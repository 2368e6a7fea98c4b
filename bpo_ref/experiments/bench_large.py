"""Speed of the trainer's optimizations at sizes that need a GPU: random weights in the shapes of real models.

python -m bpo_ref.experiments.bench_large update|forks|generation|run|trl [--shape 1B] [--repeats 5]
python -m bpo_ref.experiments.bench_large server --server http://node7:8000 … [--shape …] [--repeats 5]

Shapes of more than 900 million parameters use bf16 and adapters of rank 32, smaller ones fp32 and all weights. Variants
take turns in one process, except for ``trl``. Time is wall-clock time until the device has finished; memory is the
device's peak. ``--shape check`` is small enough for a CPU and only shows that the commands work. ``server`` measures
vLLM servers that already run (`vllm.SERVE`), with the weights that they have.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

import sandboxgym
from bpo_ref.args import parse_args, resolved
from bpo_ref.experiments.bench import GROUP, WORDS, paths_of
from bpo_ref.experiments.gpu_memory import SHAPES, Shape, memory
from bpo_ref.learning import packing
from bpo_ref.learning.models import CausalLM, add_adapter, checkpoint_layers
from bpo_ref.learning.tiny import tiny_bpe_tokenizer, tiny_tokenizer
from bpo_ref.sampling.backends import SamplingBackend
from bpo_ref.sampling.continuous import ContinuousGenerator
from bpo_ref.sampling.generate import Generation, Generator, forward
from bpo_ref.sampling.served import Fleet, ServedBackend
from bpo_ref.sampling.vllm import VllmEngine
from bpo_ref.train import Trainer
from sandboxgym.system import interpreter

ALL_SHAPES = {
    "check": Shape(32, 2, 2, 1, 16, 64, 1024, qkv_bias=True),
    "100M": Shape(768, 12, 12, 12, 64, 2048, 32_000),
    "1B": Shape(2048, 22, 32, 4, 64, 5632, 32_000),
    **SHAPES,
}
LARGE = 900_000_000
"""Number of parameters above which only adapters are trained, in bf16."""


@dataclass
class Spent:
    """Time and memory of one call."""

    seconds: float
    peak_gib: float
    """Peak of the device's memory; on a CPU, of the process."""


def device() -> torch.device:
    """A GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def measured(call: Callable[[], Any]) -> Spent:
    """Run a call and measure it."""
    cuda = device().type == "cuda"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    call()
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Spent(seconds, (torch.cuda.max_memory_allocated() if cuda else rss) / 2**30)


def in_turns(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, Spent]:
    """Medians of calls that take turns; the first round is not counted (kernels are compiled in it)."""
    rounds: list[dict[str, Spent]] = []
    for number in range(repeats + 1):
        rounds.append({})
        for name, call in calls.items():
            rounds[-1][name] = spent = measured(call)
            print(
                f"round {number}, {name}: {spent.seconds:.2f} s, {spent.peak_gib:.2f} GiB", file=sys.stderr, flush=True
            )
    del rounds[0]
    return {
        name: Spent(
            statistics.median(r[name].seconds for r in rounds), statistics.median(r[name].peak_gib for r in rounds)
        )
        for name in calls
    }


def model_of(name: str, *, context: int) -> CausalLM:
    """Make random weights of that shape, on the device."""
    shape = ALL_SHAPES[name]
    large = shape.parameters > LARGE
    kind = Qwen2Config if shape.qkv_bias else LlamaConfig
    config = kind(
        hidden_size=shape.hidden, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, intermediate_size=shape.ffn,
        vocab_size=shape.vocabulary, max_position_embeddings=context, tie_word_embeddings=shape.tied,
        bos_token_id=None, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    with device():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if large else torch.float32)
    return model


def folder_of_models() -> tempfile.TemporaryDirectory[str]:
    """A temporary folder for the weights of large shapes.

    If TMPDIR is not set, it is in /dev/shm (which is kept in memory) if that has more free space than the default.
    """
    places = [
        tempfile.gettempdir(),
        *(["/dev/shm"] if "TMPDIR" not in os.environ and os.path.isdir("/dev/shm") else []),
    ]
    return tempfile.TemporaryDirectory(dir=max(places, key=lambda place: shutil.disk_usage(place).free))


def write_model(name: str, folder: str, *, context: int) -> None:
    """Write random weights of that shape, in files of at most 2 GB: writing a single file of 15 GB has failed."""
    model_of(name, context=context).save_pretrained(folder, max_shard_size="2GB")


def bench_update(name: str, repeats: int) -> list[str]:
    """Compare forward and backward passes of a tree of 13 paths: packed, flat, and flat one row at a time."""
    small = name == "check"
    lengths_of_tree = {"prompt": 30, "turns": 5, "turn": 6} if small else {"prompt": 600, "turns": 20, "turn": 120}
    ids, where = (part.to(device()) for part in paths_of(1, points=4, width=4, **lengths_of_tree))
    model = model_of(name, context=ids.shape[1])
    packing.enable(model)
    checkpoint_layers(model)
    if ALL_SHAPES[name].parameters > LARGE:
        model = add_adapter(model, r=32, alpha=32, seed=0).to(device())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    lengths = torch.full((len(ids),), ids.shape[1], device=device())
    gradients: dict[str, torch.Tensor] = {}

    tokens = packing.pack(ids, lengths).ids.shape[1]
    ways = {"flat": {"packed": False}, "packed": {"packed": True}, "in parts": {"packed": True, "most": tokens // 4}}

    def update(way: str) -> None:
        for parameter in trained:
            parameter.grad = None
        rows = [slice(None)] if way != "flat" else [slice(i, i + 1) for i in range(len(ids))]
        for row in rows:
            logps, *_ = forward(model, ids[row], lengths[row], where=where[row], **ways[way])  # type: ignore[arg-type]
            (logps.sum() / len(ids)).backward()  # type: ignore[no-untyped-call]
        gradients[way] = torch.cat([p.grad.flatten().float() for p in trained])  # type: ignore[union-attr]

    spent = in_turns({way: partial(update, way) for way in ways}, repeats)
    flat = gradients["flat"].norm()
    apart = max(float((gradients[way] - gradients["flat"]).norm() / flat) for way in ways)
    times = " | ".join(f"{spent[way].seconds:.2f}" for way in ways)
    peaks = " | ".join(f"{spent[way].peak_gib:.1f}" for way in ways)
    return [
        "| shape | paths | tokens flat | packed | flat / packed | s flat | packed | in four parts | GiB flat | packed "
        "| in four parts | gradients differ by |",
        "|---|" + "---|" * 11,
        f"| {name} | {len(ids)} of {ids.shape[1]} | {ids.numel():,} | {tokens:,} "
        f"| **{spent['flat'].seconds / spent['packed'].seconds:.2f}** | {times} | {peaks} | {apart:.0e} |",
    ]


def bench_forks(name: str, repeats: int) -> list[str]:
    """Compare three forks of a path up to their first token, with its keys and values kept and with it read again."""
    start, longer = (30, 10) if name == "check" else (3000, 500)
    ids = np.random.default_rng(0).integers(3, 100, start).tolist()
    model = model_of(name, context=start + longer + 8)
    session = Generator(model, stop_ids=[2], max_new_tokens=1).open([ids + ids[:longer]])
    session.prefill([0])

    def begin(shared: bool) -> None:
        rows = [session.fork(0, length=start) if shared else session.add(ids) for _ in range(3)]
        session.generate(rows, [np.random.default_rng(i) for i in range(3)])
        session.drop(rows)

    spent = in_turns({"again": partial(begin, False), "shared": partial(begin, True)}, repeats)
    ratio = spent["again"].seconds / spent["shared"].seconds
    return [
        "| shape | tokens of the path | read again / shared | ms shared |",
        "|---|---|---|---|",
        f"| {name} | {start:,} | **{ratio:.1f}** | {1000 * spent['shared'].seconds:.1f} |",
    ]


def bench_generation(name: str, repeats: int) -> list[str]:
    """Compare ways to sample turns of 64 rows with contexts of different lengths.

    ``hf`` puts keys and values side by side for a whole turn where they fit into `generate.JOINED`; here also never
    (layer by layer, at every token) and always.
    """
    rows, longest, turn, turns = (4, 30, 4, 1) if name == "check" else (64, 3000, 32, 3)
    rng = np.random.default_rng(0)
    contexts = [rng.integers(3, 100, int(n)).tolist() for n in rng.integers(longest // 3, longest, rows)]
    limit = longest + turns * turn + 8
    model = model_of(name, context=limit)
    told: list[int] = []

    def turns_of(sampler: SamplingBackend) -> None:
        session = sampler.open()
        places = [session.add(context) for context in contexts]
        for number in range(turns):
            said = session.generate(places, [np.random.default_rng([number, i]) for i in range(rows)])
            told.append(sum(len(generation.ids) for generation in said))
        session.drop(places)

    common: dict[str, Any] = {"stop_ids": [], "max_new_tokens": turn, "context_limit": limit}
    ways: dict[str, SamplingBackend] = {
        "hf": Generator(model, **common),
        "hf, layer by layer": Generator(model, joined=0, **common),
        "hf, side by side": Generator(model, joined=2**50, **common),
        "transformers-continuous": ContinuousGenerator(model, **common),
    }
    spent = in_turns({way: partial(turns_of, sampler) for way, sampler in ways.items()}, repeats)
    tokens = turns * statistics.fmean(told)
    lines = [
        "| shape | backend | rows | turns | tokens per second, contexts read included | GiB |",
        "|---|" + "---|" * 5,
    ]
    return lines + [
        f"| {name} | {way} | {rows} | {turns} of {turn} | {tokens / cost.seconds:,.0f} | {cost.peak_gib:.1f} |"
        for way, cost in spent.items()
    ]


def bench_server(name: str, repeats: int, urls: Sequence[str]) -> list[str]:
    """Measure servers on turns of 16 conversations of different lengths with three forks each, of several drivers.

    Args:
        name: ``check``: fewer and shorter ones.
        repeats: rounds; each has conversations of its own, which no cache knows.
        urls: addresses of the servers.

    Returns:
        Lines of a table with a row for each driver: ``lockstep`` requests the turns of all rows together, ``async`` the
        turns of each row one after the other, without waiting for other rows.

    Raises:
        SystemExit: the servers have different weights.
    """
    rows, longest, turn, turns = (2, 30, 4, 2) if name == "check" else (16, 3000, 64, 4)
    engines = [VllmEngine(url) for url in urls]
    fleet = Fleet(engines, vocabulary=2**31, seconds=600.0, retries=0)
    versions = {engine.version(seconds=60.0) for engine in engines}
    if len(versions) > 1:
        raise SystemExit(f"error: server: expected all of them to have the same weights, found versions {versions}")
    fleet.serve("", versions.pop(), lambda engine: None, load=False)
    backend = ServedBackend(
        fleet, torch.nn.Linear(1, 1), stop_ids=[2], max_new_tokens=turn, temperature=1.0, context_limit=2 * longest
    )
    rng, told = np.random.default_rng(), {"lockstep": [0, 0, 0], "async": [0, 0, 0]}

    def play(driver: str) -> None:
        session = backend.open()
        starts = [session.add(rng.integers(3, 100, int(n)).tolist()) for n in rng.integers(longest // 3, longest, rows)]
        forks = starts + [session.fork(start) for start in starts for _ in range(3)]
        streams = [np.random.default_rng(i) for i in forks]

        said = read = 0

        def counted(sent: Sequence[int], answers: Sequence[Generation]) -> None:
            nonlocal said, read
            said, read = said + sum(len(answer.ids) for answer in answers), read + sum(sent)

        async def by_itself(row: int) -> None:
            for _ in range(turns):
                sent = len(session.context(row))
                counted([sent], [await session.turn(row, streams[row])])

        async def together() -> None:
            await asyncio.gather(*map(by_itself, forks))

        if driver == "async":
            asyncio.run(together())
        for _ in range(turns if driver == "lockstep" else 0):
            counted([len(session.context(row)) for row in forks], session.generate(forks, streams))
        told[driver] = [old + new for old, new in zip(told[driver], (said, read, session.reused or 0), strict=True)]

    spent = in_turns({driver: partial(play, driver) for driver in told}, repeats)
    lines = ["| shape | driver | rows | turns | tokens per second, contexts read included | cached, of the contexts |"]
    lines.append("|---|---|---|---|---|---|")
    for driver, (said, read, reused) in told.items():
        rate, share = said / (repeats + 1) / spent[driver].seconds, reused / read
        lines.append(f"| {name} | {driver} | {4 * rows} | {turns} | {rate:,.0f} | {share:.2f} |")
    return lines


def bench_run(name: str, repeats: int) -> list[str]:
    """Train on ALFWorld's embedded games with the settings of the 7B configuration, but short episodes and few tasks.

    The policy is random, so every turn takes all its tokens and every episode all its turns. Memory is compared with
    what `gpu_memory` computes for these settings.
    """
    sizes = {"prompts": 8, "max_turns": 4, "max_new_tokens": 48, "context": 1536, "micro_tokens": 16384}
    if name == "check":
        sizes = {"prompts": 2, "max_turns": 2, "max_new_tokens": 4, "context": 1024, "micro_tokens": 2048}
    large = ALL_SHAPES[name].parameters > LARGE
    with folder_of_models() as folder:
        with sandboxgym.make("sandboxgym/ALFWorld-v0", games="embedded") as env:
            texts = [env.reset(seed=seed)[0] for seed in range(20)]
        tokenizer = tiny_bpe_tokenizer(texts, 1000)
        write_model(name, folder, context=4096)
        tokenizer.save_pretrained(folder)
        given = ["--config", "alfworld-qwen2.5-7b", "--model", folder, "--out", f"{folder}/run"]
        given += ["--env-kwargs", "games=embedded", "--eval-kwargs", "games=embedded", "--eval-untrained", "False"]
        given += [f"--{option.replace('_', '-')}={size}" for option, size in sizes.items()]
        given += [f"--updates={repeats + 1}", "--eval-episodes=2", *(["--lora-r=32"] if large else [])]
        args = parse_args(given)
        Trainer(args).run()
        lines = [json.loads(line) for line in Path(f"{folder}/run/metrics.jsonl").read_text().splitlines()]
    updates = [line for line in lines if "time/rollout" in line]
    totals = [0, *(int(line["total/tokens"]) for line in updates)]
    told = [(late - soon, line) for soon, late, line in zip(totals, totals[1:], updates)][1:]
    sampled = statistics.median(tokens / line["time/rollout"] for tokens, line in told)
    seconds = [statistics.median(line[f"time/{part}"] for _, line in told) for part in ("rollout", "update")]
    share = statistics.median(line["time/env"] + line["time/snapshots"] for _, line in told) / seconds[0]
    computed = memory(resolved(args), ALL_SHAPES[name], layout="ddp", gpus=1)
    cells = []
    for phase in ("rollout", "update"):
        found = max((line.get(f"memory/{phase}", 0.0) for _, line in told), default=0.0)
        parts = [size for part, size in computed.items() if ":" not in part or part.startswith(phase)]
        cells.append(f"{found:.1f} / {sum(parts) / 2**30:.1f}")
    return [
        "| shape | paths per update | tokens sampled | per second | s rollout | of it environments | s update "
        "| GiB of rollouts: measured / computed | of updates |",
        "|---|" + "---|" * 8,
        f"| {name} | {told[0][1]['total/returns'] / 2:.0f} | {told[0][0]:,} | {sampled:,.0f} | {seconds[0]:.1f} "
        f"| {share:.1%} | {seconds[1]:.1f} | {' | '.join(cells)} |",
    ]


def bench_trl(name: str, repeats: int) -> list[str]:
    """Run `bpo_ref.experiments.bench.bench_trl` at this shape: each trainer in its own process, wall-clock time."""
    tokenizer = tiny_tokenizer(WORDS)
    large = ALL_SHAPES[name].parameters > LARGE
    found: dict[str, list[dict[str, float]]] = {"ours": [], "trl": []}
    with folder_of_models() as folder:
        write_model(name, folder, context=256)
        tokenizer.save_pretrained(folder)
        for repeat in range(repeats):
            for side, runs in found.items():
                arguments = ("--side", side, "--folder", folder, "--out", f"{folder}/{side}{repeat}")
                command = interpreter.module_command("bpo_ref.experiments.bench", "trl-side", *arguments)
                command += ["--adapters"] if large else []
                out = subprocess.run(command, env=interpreter.environment(), capture_output=True, text=True)
                if out.returncode:
                    raise RuntimeError(f"{side} failed:\n{out.stderr[-3000:]}")
                runs.append(json.loads(out.stdout.splitlines()[-1]))
    rates = {side: statistics.median(run["tokens"] / run["wall"] for run in runs) for side, runs in found.items()}
    peaks = {side: statistics.median(run["peak_mb"] / 1024 for run in runs) for side, runs in found.items()}
    lines = ["| shape | trainer | tokens per second | GiB |", "|---|---|---|---|"]
    lines += [f"| {name} | {side} | {rates[side]:,.0f} | {peaks[side]:.1f} |" for side in found]
    return [*lines, "", f"bpo_ref / TRL, groups of {GROUP}: **{rates['ours'] / rates['trl']:.2f}** tokens per second"]


BENCHES: dict[str, Callable[[str, int], list[str]]] = {
    "update": bench_update,
    "forks": bench_forks,
    "generation": bench_generation,
    "run": bench_run,
    "trl": bench_trl,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the results as Markdown."""
    parser = argparse.ArgumentParser(
        prog="python -m bpo_ref.experiments.bench_large", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("name", choices=[*BENCHES, "server"])
    parser.add_argument("--server", nargs="+", default=(), metavar="URL", help="for server: addresses")
    parser.add_argument("--shape", choices=list(ALL_SHAPES), default="Qwen/Qwen2.5-7B-Instruct")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(argv)
    if options.name == "server":
        if not options.server:
            parser.error("--server: expected addresses of servers")
        print("\n".join(bench_server(options.shape, options.repeats, options.server)))
        return
    where = torch.cuda.get_device_name() if device().type == "cuda" else f"CPU ({platform.machine()})"
    print(f"{where}, torch {torch.__version__}, {ALL_SHAPES[options.shape].parameters:,} parameters\n")
    print("\n".join(BENCHES[options.name](options.shape, options.repeats)))


if __name__ == "__main__":
    main()
