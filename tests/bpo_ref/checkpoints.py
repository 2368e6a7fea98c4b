"""Small random checkpoints in the form of the hub's: architecture, tokenizer class, chat template, special tokens.

The templates are written for these tests: they lay out turns as the model families' own do, traps included.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
)

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
SAMPLE = [
    "You are in the middle of a room. Looking quickly around you, you see a drawer 1, a shelf 2, and a desk 3.",
    "Your task is to: put a mug in desk. You can: go to desk 3, look, inventory. Nothing happens.",
    "You act in an environment that answers in text, one action a turn. task 0 turn 1 say a word",
    "<think>what to do next</think>\n<action>take mug 1 from shelf 2</action>\n\nuser\n\nassistant\nsystem\n\n\n",
]

QWEN2 = (  # without a system message the template brings its own
    "{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are of help.<|im_end|>\n' }}{% endif %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (  # it trims, and states a date that is today's unless given
    "{{ bos_token }}{% set given = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% set date = date_string if date_string is defined else strftime_now('%d %b %Y') %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + date + '\n\n' + given + '<|eot_id|>' }}"
    "{% for m in messages if m.role != 'system' %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{{ m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
THINKING = (  # it hides the reasoning of all turns but the last answer's
    "{% set last = namespace(user=0) %}{% for m in messages if m.role == 'user' %}"
    "{% set last.user = loop.length * 2 - 2 + (messages[0].role == 'system') %}{% endfor %}"
    "{% for m in messages %}{% set text = m.content %}"
    "{% if m.role == 'assistant' and loop.index0 < last.user %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
OPENED = THINKING.replace("'<|im_start|>assistant\n' }}{% endif", "'<|im_start|>assistant\n<think>\n' }}{% endif")

FAMILIES = ("qwen2", "llama", "thinking")


def trained(texts: list[str], size: int, specials: list[str]) -> Tokenizer:
    """Train a byte-level BPE with the pattern of Qwen and Llama 3, newline merges included."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=specials,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts * 3, trainer)
    return tokenizer


def tokenizer_of(family: str, *, size: int = 500) -> PreTrainedTokenizerBase:
    """Make a tokenizer: ``qwen2``, ``llama``, ``thinking``, or ``opened``, whose template begins the reasoning."""
    if family == "llama":
        specials = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
        return PreTrainedTokenizerFast(
            tokenizer_object=trained(SAMPLE, size, specials),
            bos_token="<|begin_of_text|>",
            eos_token="<|eot_id|>",
            pad_token="<|eot_id|>",  # as is often set, for there is no pad token
            chat_template=LLAMA3,
        )
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bpe = json.loads(trained(SAMPLE, size, specials).to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=bpe["vocab"],
        merges=[tuple(merge) for merge in bpe["merges"]],
        eos_token="<|im_end|>",
        additional_special_tokens=specials,
    )
    if family != "qwen2":
        tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = {"qwen2": QWEN2, "thinking": THINKING, "opened": OPENED}[family]
    return tokenizer


def small_checkpoint(family: str, folder: Path, *, seed: int = 0, positions: int = 4096, hidden: int = 32) -> Path:
    """Make a folder that transformers loads like the real ones."""
    tokenizer = tokenizer_of(family)
    shape = {
        "vocab_size": len(tokenizer) + 12,  # the real ones are padded, too
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
        "eos_token_id": tokenizer.eos_token_id,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if family == "llama":
            model = LlamaForCausalLM(LlamaConfig(**shape))
        elif family == "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(**shape))
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=8))
    if family != "llama":  # more than the template's own end of a turn
        model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
