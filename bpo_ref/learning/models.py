"""The policy's network: built in code, or loaded; with a value head where an algorithm wants a critic."""

from __future__ import annotations

import copy
import ctypes
import functools
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from bpo_ref.config import TINY, ConfigError
from bpo_ref.learning.tiny import TINY_SIZES, tiny_bpe_tokenizer, tiny_model, tiny_tokenizer, words_of

CausalLM: TypeAlias = Any  # of transformers, bare or wrapped by accelerate


LOWERED = nn.Linear, Conv1D
"""Layer types whose products autocast computes in the compute dtype (GPT-2's are of the second type)."""

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's malloc.h


def settle_cpu(threads: int) -> None:
    """Configure PyTorch on the CPU: the number of threads, and memory kept for the next step.

    Left alone, glibc hands every large block back when it is freed, and the pages of the next step's have to be faulted
    in one by one again. Other C libraries are left as they are.

    Args:
        threads: threads of PyTorch; 0: its choice.
    """
    if torch.cuda.is_available():
        # PyTorch sets OpenMP's threads again at a library's first parallel work in a thread. Where that is not the
        # number which they had, a compilation in which it happens stops: so both are made the same here.
        torch.set_num_threads(torch.get_num_threads())
        return
    if threads:
        torch.set_num_threads(threads)
    if sys.platform == "linux" and (tune := getattr(ctypes.CDLL(None), "mallopt", None)):
        tune(_M_MMAP_MAX, 0)
        tune(_M_TRIM_THRESHOLD, 2**31 - 1)


class Output(NamedTuple):
    """Output of `ActorCritic`: logits of tokens and values of states."""

    logits: Tensor
    """Logits [B, T, vocabulary]."""
    values: Tensor
    """Value [B, T], fp32, of the state after each token."""


class ActorCritic(nn.Module):
    """A causal model with a linear value head on its last hidden states, initialised to 0."""

    def __init__(self, policy: CausalLM) -> None:
        super().__init__()
        self.policy = policy
        self.value_head = nn.Linear(policy.config.hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, **inputs: Any) -> Output:
        """Compute the policy's logits and the values."""
        output = self.policy(**inputs, output_hidden_states=True)
        return Output(output.logits, self.value_head(output.hidden_states[-1].float())[..., 0])


def policy_of(model: CausalLM) -> CausalLM:
    """The causal model within an `ActorCritic`."""
    return model.policy if isinstance(model, ActorCritic) else model


def build_tiny(
    size: str, texts: Iterable[str], *, vocabulary: int, context: int, seed: int
) -> tuple[CausalLM, PreTrainedTokenizerBase]:
    """Build a small transformer and a tokenizer for these texts.

    Args:
        size: one of `TINY_SIZES`.
        texts: examples of the text to read and write.
        vocabulary: pieces of a byte-level tokenizer learned on the texts, which can encode anything; 0: a word-level
            one that knows the words of the texts and nothing else.
        context: largest number of tokens of an episode.
        seed: seed of the weights.

    Raises:
        ConfigError: there is no such size.
    """
    if size not in TINY:
        raise ConfigError(f"model: expected tiny: with one of {', '.join(TINY)}, found tiny:{size}")
    tokenizer = tiny_bpe_tokenizer(texts, vocabulary) if vocabulary else tiny_tokenizer(words_of(texts))
    return tiny_model(tokenizer, **TINY_SIZES[size], max_position_embeddings=context, seed=seed), tokenizer


def load_policy(
    folder: str | Path, *, dtype: str = "float32", device: torch.device | None = None, setting: str = "model"
) -> tuple[CausalLM, PreTrainedTokenizerBase]:
    """Load a transformers causal model and its tokenizer from a folder or the hub.

    Files are memory-mapped. On the CPU, weights of the file's own dtype stay mapped; those of another are copied. For
    another device they are moved one by one, so that the CPU's memory never holds all of them.

    A folder with adapters alone is their base model (named in the folder; if that folder was moved, it is looked for
    beside this one) with the adapters merged into it, in fp32 before the weights take ``dtype``.

    Args:
        folder: path, or a name on the hub.
        dtype: dtype of the weights.
        device: device of the weights. Default: the CPU.
        setting: name of the setting with the folder, for errors.

    Raises:
        ConfigError: it cannot be loaded.
    """
    adapter, wanted = Path(folder, "adapter_config.json"), getattr(torch, dtype)
    there = {} if device is None or device.type == "cpu" else {"device_map": {"": device}}
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        if adapter.exists():
            base = json.loads(adapter.read_text())["base_model_name_or_path"]
            beside = Path(folder).parent / Path(base).name
            model, _ = load_policy(base if Path(base).exists() or not beside.exists() else beside, device=device)
        else:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=wanted, **there)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{setting}: cannot load {folder} as a transformers causal model: {error}") from error
    if adapter.exists():
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
        for parameter in model.parameters():  # not the buffers: rotary frequencies stay fp32, as when loading in dtype
            parameter.data = parameter.data.to(wanted)
    return model, tokenizer


def eos_ids(model: CausalLM) -> tuple[int, ...]:
    """Token ids that the model says end its output; often more than the tokenizer's one."""
    config = getattr(model, "generation_config", None) or model.config
    found = config.eos_token_id
    return tuple(found) if isinstance(found, list | tuple) else () if found is None else (found,)


def add_adapter(model: CausalLM, *, r: int, alpha: int, seed: int, base: str | None = None) -> CausalLM:
    """Freeze the model and add low-rank adapters in fp32 to every linear layer but the output layer (LoRA; Hu et al.,
    2021). Their product starts at 0, so that at first nothing changes.

    Args:
        model: a transformers model.
        r: rank.
        alpha: their product is scaled by alpha / r.
        seed: seed of the weights.
        base: the folder or name that the model was loaded from, for those who load the adapters.

    Raises:
        ConfigError: PEFT is not installed.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ConfigError('lora_r: needs the package peft: pip install "sandboxgym[lora]"') from error
    config = LoraConfig(r=r, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        adapted = get_peft_model(model, config)
    if base is not None:
        folder = Path(base)
        adapted.peft_config["default"].base_model_name_or_path = str(folder.resolve()) if folder.exists() else base
    return adapted


def load_adapter(model: CausalLM, folder: Path) -> None:
    """Load the weights of the adapters that a checkpoint holds."""
    from peft import load_peft_weights, set_peft_model_state_dict

    set_peft_model_state_dict(model, load_peft_weights(str(folder), device="cpu"))


class WithoutAdapter:
    """The model without its adapters: the reference policy, without a second copy of the weights."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the output without the adapters."""
        with self._model.disable_adapter():
            return self._model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def trained_weights(model: CausalLM) -> dict[str, Tensor]:
    """Copy the weights that are trained, to the CPU."""
    named = model.named_parameters()
    return {name: weight.detach().to("cpu", copy=True) for name, weight in named if weight.requires_grad}


@torch.no_grad()
def put_weights(model: CausalLM, weights: Mapping[str, Tensor]) -> None:
    """Set the weights that `trained_weights` has copied."""
    parameters = dict(model.named_parameters())
    for name, weight in weights.items():
        parameters[name].copy_(weight)


def checkpoint_layers(model: CausalLM) -> None:
    """Keep only the input of each layer for the backward pass, which computes the layer again.

    transformers does so in training mode alone, where a model may have dropout: it is switched off, because with it the
    log-probabilities of the sampler would not recur.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:  # its name in older versions
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    model.train()


def lowered_twin(model: CausalLM, dtype: torch.dtype) -> CausalLM:
    """Copy a model with its weights cast to the compute dtype once: the forward passes of `compute_in` at less cost.

    Autocast casts the weights of every linear layer in every pass, which for one token of a few rows takes longer than
    the pass itself. Here they are cast once, in `refresh`; all other weights are the model's own, in fp32, so that the
    result is the same.
    """
    own: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    twin = copy.deepcopy(model, own)
    twin.__dict__.pop("forward", None)  # which computes with the model's weights
    for layer in twin.modules():
        if isinstance(layer, LOWERED):
            for name, parameter in list(layer.named_parameters(recurse=False)):
                low = nn.Parameter(torch.empty_like(parameter, dtype=dtype), requires_grad=False)
                setattr(layer, name, low)
    compute_in(twin, dtype)
    refresh(twin, model)
    return twin


@torch.no_grad()
def refresh(twin: CausalLM, model: CausalLM) -> None:
    """Update the cast weights of a `lowered_twin` after an optimizer step."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in twin.named_parameters(remove_duplicate=False):
        if parameter is not weights[name]:
            parameter.copy_(weights[name])


def compute_in(model: CausalLM, dtype: torch.dtype) -> None:
    """Run forward passes in a compute dtype of lower precision; weights and gradients keep their own.

    Weights in bfloat16 would not learn: at a learning rate of 1e-6 most steps are less than half the distance to the
    next number of theirs.
    """
    forward = model.forward

    @functools.wraps(forward)
    def lowered(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(model.device.type, dtype):  # one a pass: it caches casts of weights, which then go stale
            return forward(*args, **kwargs)

    model.forward = lowered
