"""Weights on their way to an engine, and the proof that they arrived.

    python -m bpo_ref.sampling.weights MODEL FOLDER    # write a folder that a server can be started with

What this module promises:

1. What is written is a plain model in safetensors: adapters merged, and without tied weights. A model with tied ones is
   saved without an output layer; vLLM 0.32 then answers that it has loaded the file, and keeps the old output layer.
2. An adapter that travels alone is written as PEFT does; below it engines have the weights that they were started with.
3. `Proof` compares log-probabilities of the engine with the trainer's, on tokens that the engine samples, and refuses
   an engine that differs by more than a tolerance. A small step changes too little to show that an engine has kept an
   old weight. So before the first weights of a run an engine gets `rolled` weights, or `shaken` adapters: any weight or
   layer that it fails to replace then changes its log-probabilities visibly.
"""

from __future__ import annotations

import argparse
import json
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from bpo_ref.config import ConfigError
from bpo_ref.learning.checkpoint import replaced, writing
from bpo_ref.learning.models import CausalLM, load_policy
from bpo_ref.sampling.engine import Engine, EngineError, Sent, TurnRequest, checked
from bpo_ref.sampling.generate import evaluating, score, weights_version
from bpo_ref.sampling.served import Fleet, Verify
from sandboxgym.tree.envs import described


def plain_weights(model: CausalLM, *, adapted: bool = True) -> tuple[CausalLM, dict[str, Tensor]]:
    """The transformers model, without adapters, and its weights with the adapters added to them if ``adapted``."""
    return _bare(model), dict(_plain(model, adapted=adapted))


def _bare(model: CausalLM) -> CausalLM:
    return model.get_base_model() if hasattr(model, "peft_config") else model


def _plain(model: CausalLM, *, adapted: bool = True) -> Iterator[tuple[str, Tensor]]:
    """The weights of `plain_weights`, one by one."""
    bare = _bare(model)
    layers = {name: module for name, module in bare.named_modules() if hasattr(module, "get_delta_weight")}
    for name, tensor in _state(bare):
        if any(f".{part}" in name for part in ("lora_A", "lora_B", "lora_embedding", "lora_magnitude")):
            continue
        name = name.replace(".base_layer.", ".")
        module, _, kind = name.rpartition(".")
        if adapted and kind == "weight" and module in layers:
            change = layers[module].get_delta_weight("default")
            tensor = (tensor.float() + change.float()).to(tensor.dtype)
        yield name, tensor.detach()


def _tied(bare: CausalLM) -> tuple[str, str] | None:
    """Names of the embeddings and of the output layer, if they are one tensor."""
    if not bare.config.tie_word_embeddings:
        return None
    inputs, outputs = (
        next(f"{name}.weight" for name, module in bare.named_modules() if module is wanted)
        for wanted in (bare.get_input_embeddings(), bare.get_output_embeddings())
    )
    return inputs, outputs


@torch.no_grad()
def untied_weights(model: CausalLM, *, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Weights of a model one by one, as `write_weights` writes them, where they are."""
    tied = _tied(_bare(model))
    for name, tensor in _plain(model):
        if tied is None or name != tied[1]:
            yield name, tensor.to(dtype)
        if tied is not None and name == tied[0]:
            yield tied[1], tensor.to(dtype)


def _state(model: CausalLM) -> Iterator[tuple[str, Tensor]]:
    """The entries of a model's ``state_dict``, which of a sharded model would not be the gathered weights."""
    yield from model.named_parameters(remove_duplicate=False)
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


@torch.no_grad()
def write_weights(model: CausalLM, folder: Path, *, dtype: torch.dtype, adapted: bool = True) -> None:
    """Write a model's weights and its config, as a model of its own without tied weights.

    Args:
        model: with or without adapters, all of its weights in this process.
        folder: replaced, if it is there.
        dtype: of the weights as written.
        adapted: add adapters to the weights.
    """
    bare, weights = plain_weights(model, adapted=adapted)
    weights = {name: tensor.to("cpu", dtype, copy=True) for name, tensor in weights.items()}
    if tied := _tied(bare):
        inputs, outputs = tied
        weights[outputs] = weights[inputs].clone()
    with replaced(folder) as fresh:
        bare.save_pretrained(fresh, state_dict=weights)
        path = fresh / "config.json"
        config = json.loads(path.read_text())
        config |= {"tie_word_embeddings": False, "dtype": str(dtype).removeprefix("torch.")}
        path.write_text(json.dumps(config, indent=2))


def write_adapter(model: CausalLM, folder: Path) -> None:
    """Write a model's adapters, and nothing else.

    Args:
        model: with adapters, all of whose weights are in this process.
        folder: replaced, if it is there.
    """
    with replaced(folder) as fresh:
        # The state is passed because asking a sharded model for it would shard it again; `save_embedding_layers=False`
        # keeps PEFT from asking the Hub about the base model.
        model.save_pretrained(fresh, state_dict=dict(model.named_parameters()), save_embedding_layers=False)


@contextmanager
def rolled(model: CausalLM) -> Iterator[None]:
    """Have the rows of every weight moved by one within the context: another function, and exactly undone."""
    weights = [weight for weight in model.parameters() if weight.ndim]

    @torch.no_grad()
    def move(rows: int) -> None:
        for weight in weights:
            weight.copy_(weight.roll(rows, 0))

    move(1)
    try:
        yield
    finally:
        move(-1)


@contextmanager
def shaken(model: CausalLM) -> Iterator[None]:
    """Have random adapters within the context, each as large as the weight that it is added to; exactly undone."""
    weights = [weight for name, weight in model.named_parameters() if ".lora_" in name]
    kept = [weight.detach().clone() for weight in weights]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in weights:
            weight.copy_(torch.randn(weight.shape, generator=generator))
        for module in model.modules():
            if hasattr(module, "get_delta_weight"):
                change, base = module.get_delta_weight("default"), module.get_base_layer().weight
                module.lora_B["default"].weight.mul_(base.float().norm() / change.float().norm())
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, old in zip(weights, kept, strict=True):
                weight.copy_(old)


@dataclass(frozen=True)
class Proof:
    """Check that an engine has the weights of a model.

    Args:
        rows: token ids of the prompts that the engine continues.
        temperature: temperature of the sampling.
        tolerance: largest mean difference of log-probabilities, in nats.
        seconds: deadline of an answer.
        tokens: tokens sampled for each prompt.
    """

    rows: Sequence[Sequence[int]]
    temperature: float
    tolerance: float
    seconds: float
    tokens: int = 16

    def __call__(self, engine: Engine, model: CausalLM, version: str, *, adapter: bool = False) -> float:
        """Return the mean difference.

        Args:
            engine: to be checked.
            model: the weights that it should have.
            version: of the weights.
            adapter: whether only an adapter was sent.

        Raises:
            EngineError: it is larger than the tolerance.
        """
        apart: list[float] = []
        for seed, row in enumerate(self.rows):
            key = uuid.uuid4().hex
            request = TurnRequest(list(row), version, (), self.tokens, self.temperature, seed, key, adapter)
            answer = engine.generate(request, seconds=self.seconds)
            checked(answer, request, engine=engine.name, vocabulary=model.config.vocab_size)
            with torch.no_grad(), evaluating(model):
                logps, _ = score(model, [[*row, *answer.ids]], temperature=self.temperature)
            apart += (logps[0, len(row) - 1 :].double().cpu() - torch.tensor(answer.logps).double()).abs().tolist()
        mean = float(np.mean(apart))
        if not mean <= self.tolerance:
            raise EngineError(
                f"{engine.name} says that it has loaded the weights {version}, but its log-probabilities of "
                f"{len(apart)} tokens differ from the trainer's by {mean:.2g} nats on average (largest: "
                f"{max(apart):.2g}), and server_tolerance is {self.tolerance:g}: it serves another model, has kept "
                "some of its weights (start it with a folder that python -m bpo_ref.sampling.weights writes"
                f"{', of the model that this run began with' if adapter else ''}), or computes in another dtype"
            )
        return mean


class Publisher:
    """Weights of a run on their way to its engines.

    Args:
        fleet: the engines.
        folder: shared with the engines, who see it under the same path.
        proof: that they have the weights.
        dtype: of the weights as written.
        adapters: send adapters alone, to engines that were started with the weights below them.
        device: GPU from which weights are sent over NCCL, instead of being written; None: they are written.
        pinned: the engines go on with these weights while the model's change: one that has to get them again is
            compared with what is written.
    """

    def __init__(
        self,
        fleet: Fleet,
        folder: Path,
        proof: Proof,
        *,
        dtype: torch.dtype,
        adapters: bool = False,
        pinned: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self.device = device
        self.fleet, self.folder, self.proof, self.dtype = fleet, folder.resolve(), proof, dtype
        self.adapters, self.pinned = adapters, pinned
        self._name = uuid.uuid4().hex[:12]
        self._count = 0
        self._published: tuple[CausalLM, int] | None = None

    @property
    def writes(self) -> Path:
        """Beginning of the paths of all folders that it writes."""
        return self.folder / f"{self._name}-"

    def current(self, model: CausalLM) -> bool:
        """True if the engines have these weights."""
        found = self._published
        return found is not None and found[0] is model and found[1] == weights_version(model)

    def publish(self, model: CausalLM) -> str:
        """Write the weights, have every engine load them, and prove it; returns their version.

        Raises:
            EngineError: an engine does not have them.
        """
        if self._published is None:
            with shaken(model) if self.adapters else rolled(model):
                self._serve(model)
        version = self._serve(model)
        self._published = model, weights_version(model)
        return version

    def follow(self, model: CausalLM, version: str) -> None:
        """Note what another process has published."""
        verify = self._verify_again(model, version)
        serve = partial(self.fleet.serve, str(self.folder / version), version, verify, load=False)
        serve(adapter=self.adapters, sent=self._sent(model))
        self._published = model, weights_version(model)

    def close(self) -> None:
        """Remove the weights: no engine will need them again."""
        for folder in self.folder.glob(f"{self._name}-*"):
            shutil.rmtree(folder, ignore_errors=True)

    def _serve(self, model: CausalLM) -> str:
        version = f"{self._name}-{self._count}"
        self._count += 1
        if self.device is not None:
            (self.folder / version).mkdir(parents=True)  # for the locks of processes that find an engine without them
        elif self.adapters:
            write_adapter(model, self.folder / version)
        else:
            write_weights(model, self.folder / version, dtype=self.dtype)
        verify, again = self._verify(model, version), self._verify_again(model, version)
        serve = partial(self.fleet.serve, str(self.folder / version), version, verify, again=again)
        serve(adapter=self.adapters, sent=self._sent(model))
        for folder in self.folder.glob(f"{self._name}-*"):
            if folder.name != version:
                shutil.rmtree(folder, ignore_errors=True)
        return version

    def _sent(self, model: CausalLM) -> Sent | None:
        """Weights that are sent over NCCL; None: they are written."""
        return None if self.device is None else Sent(partial(untied_weights, model, dtype=self.dtype), self.device)

    def _verify(self, model: CausalLM, version: str) -> Verify:
        def verify(engine: Engine) -> None:
            self.proof(engine, model, version, adapter=self.adapters)

        return verify

    def _verify_again(self, model: CausalLM, version: str) -> Verify:
        """Check of an engine that gets the weights again, maybe while those of the model change."""
        if not self.pinned:
            return self._verify(model, version)

        def verify(engine: Engine) -> None:
            # First in fp32: another type would for a moment be PyTorch's default, in the thread that learns as well.
            written = AutoModelForCausalLM.from_pretrained(self.folder / version, dtype=torch.float32)
            for parameter in written.parameters():
                parameter.data = parameter.data.to(self.dtype)
            self.proof(engine, written.eval(), version)

        return verify


def prompts_of(ids: Sequence[int], *, vocabulary: int, room: int, count: int = 4) -> list[list[int]]:
    """Prompts for a `Proof`: the beginning of a conversation, continued by random tokens."""
    rng = np.random.default_rng(0)
    rest = max(1, min(48, room - len(ids)))
    return [[*ids[: max(1, room - rest)], *rng.integers(vocabulary, size=rest).tolist()] for _ in range(count)]


def main(argv: Sequence[str] | None = None) -> None:
    """Write the folder that a server is started with."""
    parser = argparse.ArgumentParser(prog="python -m bpo_ref.sampling.weights", description=main.__doc__)
    parser.add_argument("model", help="folder or Hub name of a transformers causal model")
    parser.add_argument("folder", help="folder to write, which must not be there yet")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="dtype of the weights")
    args = parser.parse_args(argv)
    folder = Path(args.folder)
    if folder.exists():
        raise SystemExit(f"error: folder: expected one that is not there yet, found {folder}")
    try:
        model, tokenizer = load_policy(args.model, dtype=args.dtype)
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from error
    try:
        with writing():
            write_weights(model, folder, dtype=getattr(torch, args.dtype))
            tokenizer.save_pretrained(folder)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise SystemExit(f"error: folder: {folder} cannot be written ({described(error)})") from error
    print(f"wrote {folder}")


if __name__ == "__main__":
    main()
