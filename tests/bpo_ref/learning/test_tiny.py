from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bpo_ref.learning.tiny import TINY_SIZES, tiny_bpe_tokenizer, tiny_model, tiny_tokenizer, words_of

COMMANDS = [
    "look",
    "inventory",
    "go to shelf 2",
    "move mug 1 to shelf 2",
    "put pan 1 in/on stoveburner 2",
    "take toiletpaper 1 from toiletpaperhanger 17",
    "clean soapbar 4 with sinkbasin 1",
    "examine side-table 3",
    "search[red shoes, size 9.5]",
    "click[< Prev]",
    "think: it isn't here; I'd try shelf_2!",
    "edit 'a.py': x = (1 + 2) * 3",
]
OBSERVATION = (
    "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. Looking quickly around you, you see a "
    "shelf 2, and a mug 1.\n\nYour task is to: put a clean mug in/on the shelf."
)
WORDS = words_of([*COMMANDS, OBSERVATION])


@pytest.mark.parametrize("text", [*COMMANDS, OBSERVATION, "move pan 31 to shelf 0"])
def test_known_texts_decode_to_themselves(text: str) -> None:
    tokenizer = tiny_tokenizer(WORDS)
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text


def test_a_command_costs_one_token_a_word() -> None:
    tokenizer = tiny_tokenizer(WORDS)
    assert len(tokenizer("take toiletpaper 1 from toiletpaperhanger 17")["input_ids"]) == 6


def test_words_are_sorted_and_hold_the_numbers() -> None:
    words = words_of(["go to shelf 40", "look"], numbers=12)
    assert words == sorted(set(words))
    decode = tiny_tokenizer(words).decode
    assert {decode([i]) for i in range(6, 6 + len(words))} == {*map(str, range(12)), "go", "to", "shelf", "40", "look"}


def test_ids_do_not_depend_on_the_order_of_words() -> None:
    assert tiny_tokenizer(WORDS).get_vocab() == tiny_tokenizer([*reversed(WORDS), *WORDS]).get_vocab()


def test_unknown_words_and_case_are_told_apart() -> None:
    tokenizer = tiny_tokenizer(words_of(["go to shelf 1"]))
    assert tokenizer.decode(tokenizer("Go to xyzzy 1")["input_ids"]) == "<unk> to<unk> 1"


def test_special_tokens_are_distinct() -> None:
    tokenizer = tiny_tokenizer(WORDS)
    assert len({tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.eos_token_id}) == 3
    text = "<|user|>look<|assistant|>go to shelf 2<|end|>"
    messages = [{"role": "user", "content": "look"}, {"role": "assistant", "content": "go to shelf 2"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == text
    assert len(tokenizer(text)["input_ids"]) == 3 + 5


def test_save_and_load(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(WORDS)
    model = tiny_model(tokenizer)
    tokenizer.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)  # takes the model type from the weights' config into account
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.chat_template == tokenizer.chat_template
    assert all(loaded.decode(loaded(text)["input_ids"]) == text for text in COMMANDS)
    weights = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())


@pytest.mark.parametrize(("size", "millions"), [("0.2M", 0.2), ("1M", 1.0), ("3M", 3.0)])
def test_sizes_are_what_their_names_say(size: str, millions: float) -> None:
    model = tiny_model(tiny_tokenizer(words_of([], numbers=114)), **TINY_SIZES[size])
    assert model.num_parameters() == pytest.approx(millions * 1e6, rel=0.1)


def test_weights_depend_on_the_seed_alone() -> None:
    tokenizer = tiny_tokenizer(WORDS)
    first = tiny_model(tokenizer, seed=1).lm_head.weight
    state = torch.get_rng_state()
    again, other = tiny_model(tokenizer, seed=1).lm_head.weight, tiny_model(tokenizer, seed=2).lm_head.weight
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    "text", [*COMMANDS, OBSERVATION, "  two  spaces\n\ttab\r\n", "naïve 猫 🙂 \x00", "<|unseen|>", ""]
)
def test_byte_level_texts_decode_to_themselves(text: str) -> None:
    tokenizer = tiny_bpe_tokenizer(COMMANDS, 300)
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text


def test_byte_level_pieces_are_learnt_saved_and_the_same_again(tmp_path: Path) -> None:
    tokenizer = tiny_bpe_tokenizer(COMMANDS * 5, 400)
    assert len(tokenizer("take toiletpaper 1 from toiletpaperhanger 17")["input_ids"]) < 15
    assert tiny_bpe_tokenizer(COMMANDS * 5, 400).get_vocab() == tokenizer.get_vocab()
    tokenizer.save_pretrained(tmp_path)
    tiny_model(tokenizer, hidden=32, ffn=64, layers=1).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert all(loaded(text)["input_ids"] == tokenizer(text)["input_ids"] for text in COMMANDS)
    with pytest.raises(ValueError, match="every byte"):
        tiny_bpe_tokenizer(COMMANDS, 200)


_FAULTS = """
import resource, torch
from bpo_ref.learning.models import settle_cpu

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(64, 2**20).exp().sum()  # 256 MB, twice
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print([faults() for _ in range(2)][-1])
settle_cpu(1)
print([faults() for _ in range(6)][-1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_memory_of_a_step_is_kept_for_the_next() -> None:
    without_gpu = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", _FAULTS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=without_gpu)
    left_alone, settled = map(int, done.stdout.split())
    assert settled * 20 < left_alone


_COMPILED = """
import ctypes, sys, torch
from bpo_ref.learning.models import settle_cpu

[openmp] = {line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line}
ctypes.CDLL(openmp).omp_set_num_threads(torch.get_num_threads() + 3)  # as another library may
if "settled" in sys.argv:
    real, torch.cuda.is_available = torch.cuda.is_available, lambda: True
    settle_cpu(0)
    torch.cuda.is_available = real

def backend(graph, inputs):
    torch.init_num_threads()  # as each of PyTorch's libraries does at its first parallel work in a thread
    return graph.forward

torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks OpenMP up in Linux's list of loaded files")
def test_models_are_compiled_where_another_library_has_set_the_number_of_threads() -> None:
    """The trainer does this on a GPU; left alone, PyTorch's compiler stops, as it did in runs on one."""
    command = [sys.executable, "-c", _COMPILED]
    left_alone = subprocess.run(command, capture_output=True, text=True)
    assert "num_threads state changed" in left_alone.stderr
    settled = subprocess.run([*command, "settled"], capture_output=True, text=True)
    assert settled.returncode == 0, settled.stderr
