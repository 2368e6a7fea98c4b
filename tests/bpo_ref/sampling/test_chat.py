from __future__ import annotations

import copy
from functools import cache

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from bpo_ref.learning.tiny import tiny_tokenizer, words_of
from bpo_ref.sampling.chat_format import ChatFormat, TemplateError

OBSERVATIONS = ["You see a mug 1.\n\nYour task: move it.", "\nYou pick up the mug 1.  ", "Nothing happens."]
ACTIONS = ["take mug 1 from shelf 2", "go to desk 1"]
CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{{ m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def byte_level(template: str, *, specials: list[str], **named: str) -> PreTrainedTokenizerBase:
    """A byte-level BPE with the pattern of Qwen and Llama 3, trained on a few lines, newline merges included."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=specials, show_progress=False
    )
    tokenizer.train_from_iterator([*OBSERVATIONS, *ACTIONS, "user\n\nassistant\nsystem\n\n\n"] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **named)


@cache
def tokenizer_of(family: str) -> PreTrainedTokenizerBase:
    if family == "tiny":
        return tiny_tokenizer(words_of([*OBSERVATIONS, *ACTIONS]))
    if family == "chatml":
        specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        return byte_level(CHATML, specials=specials, eos_token="<|im_end|>", pad_token="<|im_end|>")
    specials = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    named = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>", "pad_token": "<|end_of_text|>"}
    return byte_level(LLAMA3, specials=specials, **named)


FAMILIES = ["tiny", "chatml", "llama3"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("system", [None, "You are in a house."])
def test_appended_turns_equal_the_whole_conversation(family: str, system: str | None) -> None:
    tokenizer = tokenizer_of(family)
    chat = ChatFormat(tokenizer, system=system)
    ids = chat.start(OBSERVATIONS[0])
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": OBSERVATIONS[0]})
    for action, observation in zip(ACTIONS, OBSERVATIONS[1:], strict=True):
        assert ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        sampled = [*tokenizer(action, add_special_tokens=False)["input_ids"], chat.end_id]
        assert chat.action(sampled) == action
        ids += sampled + chat.turn(observation, truncated=False)
        messages += [{"role": "assistant", "content": action}, {"role": "user", "content": observation}]
    assert ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_demonstration_is_what_sampling_would_have_left(family: str) -> None:
    tokenizer = tokenizer_of(family)
    chat = ChatFormat(tokenizer)
    ids, mask = chat.demonstration(OBSERVATIONS[:2], ACTIONS)
    sampled = [[*tokenizer(action, add_special_tokens=False)["input_ids"], chat.end_id] for action in ACTIONS]
    between = chat.turn(OBSERVATIONS[1], truncated=False)
    assert ids == chat.start(OBSERVATIONS[0]) + sampled[0] + between + sampled[1]
    assert [token for token, learned in zip(ids, mask, strict=True) if learned] == sampled[0] + sampled[1]
    with pytest.raises(ValueError, match="shorter"):
        chat.demonstration(OBSERVATIONS, ACTIONS)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_truncated_turn_is_ended_by_the_context(family: str) -> None:
    chat = ChatFormat(tokenizer_of(family))
    ended, truncated = (chat.turn("Nothing happens.", truncated=flag) for flag in (False, True))
    assert truncated == [chat.end_id, *ended]


def test_stop_ids_are_end_of_turn_and_eos() -> None:
    for family, ends in {
        "tiny": ["<|end|>"],
        "chatml": ["<|im_end|>"],
        "llama3": ["<|eot_id|>", "<|end_of_text|>"],
    }.items():
        tokenizer = tokenizer_of(family)
        chat = ChatFormat(tokenizer)
        assert sorted(chat.stop_ids) == sorted(tokenizer.convert_tokens_to_ids(ends))
        assert tokenizer.convert_ids_to_tokens(chat.end_id) == ends[0]


def test_special_tokens_inside_an_action_stay_visible() -> None:
    tokenizer = tokenizer_of("tiny")
    chat = ChatFormat(tokenizer)
    ids = tokenizer("go<|user|>to desk 1<|end|>")["input_ids"]
    assert chat.action(ids) != "go to desk 1"
    assert "<|user|>" in chat.action(ids)
    assert chat.action([]) == chat.action([chat.end_id]) == ""


def forgeries(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Control tokens, several of them, one in another, and parts that are one beside what stands around them."""
    tokens = [token.content for token in tokenizer.added_tokens_decoder.values()]
    several = ["".join(tokens), "a ".join(tokens), *(f" {token}\n\n" for token in tokens)]
    return [*tokens, *several, *(f"{t[:-1]}{t}" for t in tokens), *(t[1:] for t in tokens), *(t[:-1] for t in tokens)]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_an_environment_says_is_never_a_control_token(family: str) -> None:
    tokenizer = tokenizer_of(family)
    chat = ChatFormat(tokenizer)
    controls = tokenizer.added_tokens_decoder.keys() - {tokenizer.unk_token_id}

    def controls_in(ids: list[int]) -> list[int]:
        return [token for token in ids if token in controls]

    for forged in forgeries(tokenizer):
        for text in (forged, f"cat README: {forged} and more"):
            assert controls_in(chat.start(text)) == controls_in(chat.start("plain")), text
            assert controls_in(chat.turn(text, truncated=True)) == controls_in(chat.turn("plain", truncated=True))
            if family != "tiny":  # which knows words only
                assert text.strip() in tokenizer.decode(chat.start(text))


def test_tags_that_are_tokens_of_some_models_stay_text_too() -> None:
    tokenizer = copy.deepcopy(tokenizer_of("chatml"))
    tokenizer.add_tokens(["<think>", "</think>", "word"])
    chat = ChatFormat(tokenizer)
    think, close, word = tokenizer.convert_tokens_to_ids(["<think>", "</think>", "word"])
    ids = chat.start("<think>no</think> word")
    assert think not in ids and close not in ids and word in ids
    answered, _ = chat.demonstration(["say"], ["<think>yes</think> go"])  # an expert's own answer may have them
    assert think in answered and close in answered


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        (CHATML.replace("m.content", "(m.content if m.role == 'user' or loop.last else '')"), "drops or changes"),
        (CHATML.replace("m.content", "m.content | upper"), "drops or changes"),
        (CHATML.replace("'<|im_end|>' + ", ""), "must end in a special token"),
        (CHATML.replace("m.role", "(loop.index ~ m.role)"), "at once differ"),
    ],
    ids=["hides earlier turns", "changes texts", "no end of turn", "renders by position"],
)
def test_templates_that_are_not_append_only_are_refused(template: str, complaint: str) -> None:
    tokenizer = byte_level(template, specials=["<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>")
    with pytest.raises(TemplateError, match=complaint):
        ChatFormat(tokenizer)


def test_the_middle_of_a_long_observation_is_left_out() -> None:
    tokenizer = tiny_tokenizer(words_of([*OBSERVATIONS, *ACTIONS, "…"]))
    text = " ".join(["take"] * 30 + ["mug"] * 30)
    whole, cut = ChatFormat(tokenizer), ChatFormat(tokenizer, observation_tokens=9)
    assert cut.start(OBSERVATIONS[2]) == whole.start(OBSERVATIONS[2])  # short enough
    shortened = " ".join(["take"] * 4 + ["…"] + ["mug"] * 5)
    assert cut.start(text) == whole.start(shortened)
    assert cut.turn(text, truncated=True) == whole.turn(shortened, truncated=True)
    assert cut.demonstration([text], ["go"]) == whole.demonstration([shortened], ["go"])
