"""A tokenizer and a small transformer built in code: whole training runs without a download.

What this module promises:

1. `decode(encode(text)) == text`, so an action reads back exactly as it was spelled ("put pan 1 in/on stoveburner 2",
   "search[red shoes]"): with `tiny_tokenizer` for every text with single spaces whose pieces are in the vocabulary,
   with `tiny_bpe_tokenizer` for every text.
2. Token ids and initial weights are functions of the arguments alone; the global random state is left as it was.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypedDict

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPACE = "▁"  # begins every piece that follows a space or begins a text; "in/on" is "▁in", "/", "on"
PAD, UNK, END = "<pad>", "<unk>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content }}"
    "{% if message.role == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


class TinySize(TypedDict):
    """Shape options of `tiny_model`."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int


TINY_SIZES: dict[str, TinySize] = {  # named by the number of parameters with a vocabulary of about 120 pieces
    "0.2M": TinySize(hidden=96, layers=2, heads=4, kv_heads=2, ffn=256),
    "1M": TinySize(hidden=160, layers=4, heads=4, kv_heads=2, ffn=384),
    "3M": TinySize(hidden=256, layers=4, heads=8, kv_heads=4, ffn=704),
}


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    """Build the splitter of texts into words, marks such as [SEP], punctuation and line breaks, with leading spaces."""
    pattern = Regex(rf"{SPACE}?\[[A-Z]+\]|{SPACE}?\w+|{SPACE}?[^\w\s{SPACE}]|\s|{SPACE}")
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(SPACE, prepend_scheme="always"), pre_tokenizers.Split(pattern, "isolated")]
    )


def words_of(texts: Iterable[str], *, numbers: int = 32) -> list[str]:
    """The sorted vocabulary of `texts`, with the numbers below `numbers` as words: names such as "drawer 17" are
    counted differently in every game, so the texts at hand seldom show all of them.
    """
    pre_tokenizer = _pre_tokenizer()
    pieces = {f"{SPACE}{number}" for number in range(numbers)}
    for text in texts:
        pieces.update(piece for piece, _ in pre_tokenizer.pre_tokenize_str(text))
    return sorted(pieces)


def tiny_tokenizer(words: Iterable[str]) -> PreTrainedTokenizerFast:
    """A word-level chat tokenizer over `words`, pieces as `words_of` cuts them; any other piece becomes `<unk>`.

    Chat turns cost three tokens beyond their text: `<|user|>observation<|assistant|>action<|end|>`.
    """
    specials = [PAD, UNK, END, *ROLES]
    vocabulary = {word: index for index, word in enumerate(specials + sorted(set(words) - set(specials)))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = _pre_tokenizer()
    tokenizer.decoder = decoders.Metaspace(SPACE, prepend_scheme="always")
    return _chat_tokenizer(tokenizer)


def tiny_bpe_tokenizer(texts: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    """A byte-level chat tokenizer of `size` pieces learned on `texts`: common words are one, any text can be written.

    For free text: queries, shell commands, patches. Spaces, line breaks and unknown words come back as they were.
    """
    specials = [PAD, UNK, END, *ROLES]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if size < len(specials) + len(alphabet):
        raise ValueError(f"expected at least {len(specials) + len(alphabet)} pieces (every byte), found {size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=specials, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _chat_tokenizer(tokenizer)


def _chat_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNK,
        eos_token=END,
        additional_special_tokens=list(ROLES),
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def tiny_model(
    tokenizer: PreTrainedTokenizerFast,
    *,
    hidden: int = 96,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    ffn: int = 256,
    max_position_embeddings: int = 1024,
    seed: int = 0,
) -> LlamaForCausalLM:
    """A Llama with tied embeddings and fp32 weights drawn from `seed`: `tiny_model(tokenizer, **TINY_SIZES["1M"])`.

    Not a Qwen2: for that model type `AutoTokenizer` ignores the tokenizer class saved beside the weights and rebuilds
    Qwen's own, which reads our vocabulary as nonsense without an error (transformers 5).
    """
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=ffn,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which reseeds every GPU as well
        return LlamaForCausalLM(config).eval()  # as models that are loaded
