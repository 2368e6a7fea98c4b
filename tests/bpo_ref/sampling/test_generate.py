from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from bpo_ref.experiments.gpu_memory import keys_and_values, shape_of
from bpo_ref.learning.models import ActorCritic
from bpo_ref.learning.tiny import tiny_model, tiny_tokenizer, words_of
from bpo_ref.sampling.chat_format import ChatFormat
from bpo_ref.sampling.generate import (
    JOINED,
    ContextOverflow,
    Generator,
    SamplingSession,
    StaleSession,
    cache_name,
    forward,
    score,
    token_logps,
)

VOCABULARY = 40
STOPS = (2, 7, 11)  # an untrained model ends about one turn in five at a given token
TEMPERATURE = 0.7
SHAPE = {"vocab_size": VOCABULARY, "eos_token_id": 2, "pad_token_id": 2}


def llama() -> LlamaForCausalLM:
    model = tiny_model(tiny_tokenizer(words_of([], numbers=VOCABULARY - 6)), hidden=32, ffn=64)
    return sharpened(model)


def qwen2() -> Qwen2ForCausalLM:
    shape = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 1, "intermediate_size": 48}
    return sharpened(Qwen2ForCausalLM(Qwen2Config(hidden_size=32, **shape, **SHAPE)))


def gpt2() -> GPT2LMHeadModel:
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=96, bos_token_id=2, **SHAPE)
    return sharpened(GPT2LMHeadModel(config)).eval()  # it has dropout


def sharpened(model: Any) -> Any:
    """Larger weights: an untrained model is so close to uniform that a wrong context would go unnoticed."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    return model


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def generator_of(model: Any, **options: Any) -> Generator:
    return Generator(model, **{"stop_ids": STOPS, "max_new_tokens": 6, "temperature": TEMPERATURE, **options})


def contexts_of(count: int, *, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, rng.integers(1, 20)).tolist() for _ in range(count)]


def streams(count: int, *, seed: int = 0) -> list[np.random.Generator]:
    return [np.random.default_rng([seed, row]) for row in range(count)]


class Recorder:
    """A session that remembers what was sampled at which position of which row."""

    def __init__(self, generator: Generator, contexts: list[list[int]]) -> None:
        self.model = generator.model
        self.session = generator.open(contexts)
        self.sampled: dict[int, list[tuple[int, float, float]]] = {row: [] for row in range(len(contexts))}

    def turn(self, rows: list[int], rngs: list[np.random.Generator] | None) -> list[list[int]]:
        turns = self.session.generate(rows, rngs)
        for row, turn in zip(rows, turns, strict=True):
            start = len(self.session.context(row)) - len(turn.ids)
            steps = zip(turn.ids, turn.logps, turn.entropies, strict=True)
            for position, (token, logp, entropy) in enumerate(steps, start):
                assert self.session.context(row)[position] == token
                self.sampled[row].append((position, logp, entropy))
        return [turn.ids for turn in turns]

    def check(self, *, atol: float = 1e-5) -> None:
        """Compare what the sampler reported with what the trainer computes for the whole context."""
        rows = [row for row, steps in self.sampled.items() if steps]
        with torch.no_grad():
            logps, entropies = score(self.model, [self.session.context(row) for row in rows], temperature=TEMPERATURE)
        for i, row in enumerate(rows):
            for position, logp, entropy in self.sampled[row]:
                assert logps[i, position - 1].item() == pytest.approx(logp, abs=atol)
                assert entropies[i, position - 1].item() == pytest.approx(entropy, abs=atol)


@pytest.mark.parametrize("build", [llama, qwen2, gpt2])
@pytest.mark.parametrize("max_rows", [256, 3])
def test_sampler_agrees_with_the_trainer(build: Callable[[], Any], max_rows: int) -> None:
    """Ragged rows, turns cut short, rows that pause, leave, join late and fork: all score as they were sampled."""
    model = build()
    recorder = Recorder(generator_of(model, max_rows=max_rows), contexts_of(7))
    session, rng = recorder.session, np.random.default_rng(5)

    def observe(rows: list[int]) -> None:
        for row in rows:
            session.extend(row, rng.integers(0, VOCABULARY, rng.integers(0, 9)).tolist())

    recorder.turn([0, 1, 2, 3, 4, 5, 6], streams(7))
    observe([0, 1, 2, 4, 5, 6])
    recorder.turn([6, 0, 1], streams(3, seed=1))
    branch = len(session.context(0)) - 2
    forks = [session.fork(0, length=branch), session.fork(0), session.fork(3), session.fork(1, length=1)]
    late = session.add([3, 1, 4])
    recorder.sampled.update({row: [] for row in [*forks, late]})
    assert session.context(forks[0]) == session.context(0)[:branch]
    observe([0, forks[1]])
    recorder.turn([0, 2, late, *forks], streams(7, seed=2))
    recorder.check()
    for row in (0, 5):
        recorder.sampled.pop(row)
    session.drop([0, 5])
    rows = [1, 2, 3, 4, 6, late, *forks]
    observe(rows)
    recorder.turn(rows, streams(10, seed=3))
    recorder.check()
    assert session.generate([], []) == []


def test_sampler_agrees_with_the_trainer_after_an_optimizer_step() -> None:
    model = llama()
    generator = generator_of(model)
    session = generator.open(contexts_of(4))
    session.generate(range(4), streams(4))
    logps, _ = score(model, contexts_of(4), temperature=TEMPERATURE)
    logps.sum().backward()
    torch.optim.AdamW(model.parameters(), lr=0.05).step()
    with pytest.raises(StaleSession):
        session.generate(range(4), streams(4))
    recorder = Recorder(generator, [session.context(row) for row in range(4)])
    recorder.turn([0, 1, 2, 3], streams(4))
    recorder.check()


def test_tokens_do_not_depend_on_the_batch() -> None:
    contexts = contexts_of(12)

    def episode(rows: list[int]) -> list[list[int]]:
        session = generator_of(llama()).open([contexts[row] for row in rows])
        rngs = [np.random.default_rng([9, row]) for row in rows]
        for turn in range(4):
            session.generate(range(len(rows)), rngs)
            for i, row in enumerate(rows):
                session.extend(i, [row, turn])
        return [session.context(i) for i in range(len(rows))]

    together = episode(list(range(12)))
    assert episode([11, 4, 0]) == [together[11], together[4], together[0]]
    assert [episode([row])[0] for row in range(12)] == together
    assert len({tuple(ids) for ids in together}) == 12


def test_one_uniform_a_token_inverts_the_cumulative_distribution() -> None:
    model = qwen2()
    context = contexts_of(1)[0]
    (turn,) = generator_of(model).open([context]).generate([0], [np.random.default_rng(3)])
    uniforms = np.random.default_rng(3).random(len(turn.ids))
    ids = list(context)
    for token, uniform in zip(turn.ids, uniforms, strict=True):
        logits = model(torch.tensor([ids])).logits[0, -1].double() / TEMPERATURE
        assert token == int((logits.softmax(-1).cumsum(-1) <= uniform).sum())
        ids.append(token)


def test_sampled_frequencies_match_the_distribution() -> None:
    model, count = llama(), 4000
    session = generator_of(model, max_new_tokens=1, max_rows=count).open([[5, 6, 7]] * count)
    turns = session.generate(range(count), streams(count))
    frequencies = np.bincount([turn.ids[0] for turn in turns], minlength=VOCABULARY) / count
    with torch.no_grad():
        probabilities = (model(torch.tensor([[5, 6, 7]])).logits[0, -1] / TEMPERATURE).softmax(-1).numpy()
    errors = np.sqrt(probabilities * (1 - probabilities) / count)
    assert np.all(np.abs(frequencies - probabilities) < 5 * errors + 1e-3)


def test_greedy_turns_take_the_most_probable_tokens() -> None:
    model = llama()
    session = generator_of(model).open(contexts_of(5))
    turns = session.generate(range(5))
    for row, turn in enumerate(turns):
        logits = model(torch.tensor([session.context(row)])).logits[0]
        start = len(session.context(row)) - len(turn.ids)
        assert turn.ids == logits[start - 1 : -1].argmax(-1).tolist()


def test_truncation_is_the_lack_of_a_stop_token() -> None:
    session = generator_of(llama()).open(contexts_of(64))
    turns = session.generate(range(64), streams(64))
    assert {turn.truncated for turn in turns} == {False, True}
    for turn in turns:
        assert not set(turn.ids[:-1]) & set(STOPS)
        assert turn.truncated == (turn.ids[-1] not in STOPS)
        assert not turn.truncated or len(turn.ids) == 6


def test_a_full_context_truncates_and_then_overflows() -> None:
    model = gpt2()  # its learned positions make one token too many an error
    session = generator_of(model, stop_ids=()).open([[1] * 93, [1] * 10, [2] * 12])
    assert [session.room(row) for row in range(3)] == [3, 86, 84]
    turns = session.generate(range(3), streams(3))
    assert [len(turn.ids) for turn in turns] == [3, 6, 6]
    assert all(turn.truncated for turn in turns)
    assert session.room(0) == 0
    score(model, [session.context(0)])
    with pytest.raises(ContextOverflow, match=r"rows \[0\]"):
        session.generate([1, 0], streams(2))
    assert session.room(1) == 80
    assert generator_of(model, context_limit=50).open([[1]]).room(0) == 49


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
def test_training_mode_is_left_as_it_was_and_not_used() -> None:
    model = gpt2().train()  # with dropout 0.1
    model.gradient_checkpointing_enable()
    recorder = Recorder(generator_of(model), contexts_of(3))
    recorder.turn([0, 1, 2], streams(3))
    assert model.training
    model.eval()
    recorder.check()


def test_half_precision_runs() -> None:
    recorder = Recorder(generator_of(llama().bfloat16()), contexts_of(3))
    for turn in range(3):
        recorder.turn([0, 1, 2], streams(3, seed=turn))
        recorder.session.extend(0, [1, 2, 3])
    recorder.check(atol=0.2)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Generator(llama(), stop_ids=(), max_new_tokens=1, temperature=0.0),
        lambda: generator_of(llama()).open([[]]),
        lambda: generator_of(llama()).open([[1, 2]]).fork(0, length=0),
    ],
    ids=["temperature", "empty context", "empty fork"],
)
def test_meaningless_arguments_are_refused(build: Callable[[], Generator | SamplingSession | int]) -> None:
    with pytest.raises(ValueError, match=r"positive|at least one token"):
        build()


def test_sliding_windows_are_refused() -> None:
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 8}
    config = MistralConfig(hidden_size=8, sliding_window=4, **shape, **SHAPE)
    with pytest.raises(NotImplementedError, match="full attention"):
        generator_of(MistralForCausalLM(config))


def test_token_logps_ignore_padding_and_chunks() -> None:
    model = llama()
    rows = contexts_of(5, seed=4)
    logps, entropies = score(model, rows, temperature=TEMPERATURE, chunk=7)
    width = max(map(len, rows))
    assert logps.shape == entropies.shape == (5, width - 1)
    loss = (logps - 0.1 * entropies).sum()
    loss.backward()
    gradient = model.model.embed_tokens.weight.grad.clone()
    model.zero_grad()
    naive = torch.zeros(())
    for i, row in enumerate(rows):
        distribution = (model(torch.tensor([row])).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        naive_logps = distribution[range(len(row) - 1), row[1:]]
        naive_entropies = -(distribution.exp() * distribution).sum(-1)
        torch.testing.assert_close(logps[i, : len(row) - 1], naive_logps)
        torch.testing.assert_close(entropies[i, : len(row) - 1], naive_entropies)
        assert not logps[i, len(row) - 1 :].any() and not entropies[i, len(row) - 1 :].any()
        naive = naive + (naive_logps - 0.1 * naive_entropies).sum()
    naive.backward()
    torch.testing.assert_close(gradient, model.model.embed_tokens.weight.grad)

    lengths = torch.tensor([len(row) for row in rows])
    eos_padded = torch.tensor([row + [2] * (width - len(row)) for row in rows])
    again, _ = token_logps(model, eos_padded, lengths, temperature=TEMPERATURE)
    torch.testing.assert_close(again, logps)


@pytest.mark.parametrize("critic", [False, True])
def test_logits_are_computed_only_where_they_count(critic: bool) -> None:
    model = tiny_model(tiny_tokenizer(["word"]), hidden=32, ffn=64, seed=1)
    whole = ActorCritic(model) if critic else model
    ids, lengths = torch.randint(5, (3, 9)), torch.tensor([9, 4, 7])
    where = torch.rand(3, 8, generator=torch.Generator().manual_seed(0)) < 0.4
    gradients = []
    shapes: list[torch.Size] = []
    hook = model.lm_head.register_forward_hook(lambda _, __, logits: shapes.append(logits.shape))
    for named in (None, where):
        logps, entropies, values = forward(whole, ids, lengths, where=named)
        assert (values is not None) == critic
        model.zero_grad()
        (logps * where).sum().backward()
        gradients.append(model.model.embed_tokens.weight.grad.clone())
    inside = where & (torch.arange(1, 9) < lengths[:, None])
    assert shapes[-1] == (1, int(inside.sum()), model.config.vocab_size)
    hook.remove()
    full, full_entropies, _ = forward(whole, ids, lengths)
    torch.testing.assert_close(logps, full * inside)
    torch.testing.assert_close(entropies, full_entropies * inside)
    torch.testing.assert_close(*gradients)
    nothing, _, _ = forward(whole, ids, lengths, where=torch.zeros(3, 8, dtype=torch.bool))
    nothing.sum().backward()
    assert not nothing.any()
    assert model(ids).logits.shape == (3, 9, model.config.vocab_size)  # nothing stays behind


def test_a_chat_from_text_to_scored_tokens() -> None:
    tokenizer = tiny_tokenizer(words_of(["You see a mug 1.", "take mug 1 from shelf 2", "Nothing happens."], numbers=5))
    chat, model = ChatFormat(tokenizer), sharpened(tiny_model(tokenizer, hidden=32, ffn=64))
    generator = generator_of(model, stop_ids=chat.stop_ids, max_new_tokens=8)
    recorder = Recorder(generator, [chat.start("You see a mug 1.")] * 6)
    for _ in range(3):
        for row, ids in enumerate(recorder.turn(list(range(6)), streams(6))):
            truncated = ids[-1] not in chat.stop_ids
            recorder.session.extend(row, chat.turn("Nothing happens.", truncated=truncated))
            assert tokenizer.eos_token not in chat.action(ids)
    recorder.check()
    context = recorder.session.context(0)
    assert tokenizer.decode(context).count("<|end|>") == tokenizer.decode(context).count("<|user|>") - 1


def test_rows_read_ahead_are_forked_without_reading_again() -> None:
    recorder = Recorder(generator_of(llama(), max_rows=2), [*contexts_of(3), [5]])
    session = recorder.session
    lengths = [len(session.context(row)) for row in range(4)]
    session.prefill(range(4))
    session.prefill(range(4))
    assert session.prefilled == sum(lengths) - 4
    forks = [session.fork(row) for row in (0, 0, 1, 3)]
    assert session.reused == 2 * (lengths[0] - 1) + lengths[1] - 1
    recorder.sampled.update({row: [] for row in forks})
    recorder.turn([*range(4), *forks], streams(8))
    assert session.prefilled == sum(lengths) - 4 + 8  # the last token of each
    recorder.check()


def tokens_held(session: SamplingSession) -> int:
    """Tokens whose keys and values a layer has memory for; the storages of all layers are of this size."""
    sizes = {}
    for part in (part for parts in session._store.parts for part in parts):
        sizes[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes() // part[0].nbytes
    assert len(sizes) == 2 * len(session._store.parts)  # keys and values of each layer, and nothing beside
    (size,) = set(sizes.values())
    return size


def distinct(session: SamplingSession) -> int:
    """Tokens that rows have read, those that they share counted once."""
    read = (tuple(session.context(row)[: session._rows[row].cached]) for row in session._rows)
    return len({ids[: n + 1] for ids in read for n in range(len(ids))})


@pytest.mark.parametrize("joined", [JOINED, 0], ids=["joined", "by layer"])
def test_forks_share_keys_and_values_until_they_are_dropped(joined: int) -> None:
    """Forks of a long path and forks of forks, twenty turns on: what they share is held once."""
    recorder = Recorder(generator_of(llama(), max_new_tokens=3, context_limit=400, joined=joined), contexts_of(1))
    session, rng = recorder.session, np.random.default_rng(0)

    def play(rows: list[int], turns: int) -> None:
        for turn in range(turns):
            recorder.turn(rows, streams(len(rows), seed=len(session.context(rows[0])) + turn))
            for row in rows:
                session.extend(row, rng.integers(0, VOCABULARY, 2).tolist())

    play([0], 20)
    forks = [session.fork(0) for _ in range(8)]
    recorder.sampled.update({row: [] for row in forks})
    play([0, *forks], 20)
    assert tokens_held(session) <= 1.3 * distinct(session)
    late, early = session.fork(forks[3], length=len(session.context(forks[3])) - 4), session.fork(forks[0], length=30)
    recorder.sampled.update({late: [], early: []})
    session.drop([0, *forks[:3]])  # a parent and a grandparent of what goes on
    for row in (0, *forks[:3]):
        recorder.sampled.pop(row)
    play([late, early, *forks[3:]], 3)
    recorder.check()
    before = tokens_held(session)
    play([late, early, *forks[3:]], 2)
    assert tokens_held(session) == before  # in the places of what was dropped
    owners = session._store._owners
    listed = np.concatenate([session._rows[row].places for row in session._rows])
    np.testing.assert_array_equal(np.bincount(listed, minlength=len(owners))[1:], owners[1:])
    session.drop([late, early, *forks[3:]])
    assert not any(session._store.parts)


@pytest.mark.parametrize("build", [llama, qwen2, gpt2])
def test_layers_put_together_at_every_token_sample_the_same(build: Callable[[], Any]) -> None:
    model = build()
    layer = 7 * 20 * 32 * 2 * 4  # bytes of one, roughly
    found = []
    for joined in (JOINED, 4 * layer, 0):
        session = generator_of(model, joined=joined, max_rows=5).open(contexts_of(7))
        turns = []
        for seed in range(4):
            turns += session.generate(range(7), streams(7, seed=seed))
            session.extend(seed, [1, 2, 3])
            session.drop([session.fork(2, length=3)])
        found.append(turns)
    for turns in found[1:]:
        assert [turn.ids for turn in turns] == [turn.ids for turn in found[0]]
        for one, other in zip(turns, found[0]):
            assert one.logps == pytest.approx(other.logps, abs=1e-6)


def test_padding_is_a_place_of_zeros() -> None:
    """It is masked, but 0 times what was there has to be a number."""
    recorder = Recorder(generator_of(llama(), joined=0), [[1], contexts_of(9)[8] * 3])
    recorder.turn([0, 1], streams(2))
    assert not any(part[0].any() for parts in recorder.session._store.parts for part in parts)
    recorder.check()


def test_a_row_without_room_is_not_read_ahead() -> None:
    session = generator_of(gpt2(), context_limit=8).open([[1] * 8, [1] * 7])
    session.prefill([0, 1])
    assert session.prefilled == 6


class Census(TorchDispatchMode):
    """The most bytes that tensors made within it have held at a time, storage by storage."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.now = 0
        self.storages: dict[int, tuple[int, int]] = {}  # bytes, and tensors that are alive
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in pytree.tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in self.known:
                self.known.add(id(tensor))  # made before, as weights are
                weakref.finalize(tensor, self.known.discard, id(tensor))
        made = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in self.known:
                self.count(tensor)
        return made

    def count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        at, size = storage.data_ptr(), storage.nbytes()
        before = self.storages.get(at, (0, 0))
        self.storages[at] = max(size, before[0]), before[1] + 1
        self.now += self.storages[at][0] - before[0]
        self.peak = max(self.peak, self.now)
        self.known.add(id(tensor))
        weakref.finalize(tensor, self.forget, at, id(tensor))

    def forget(self, at: int, tensor: int) -> None:
        size, alive = self.storages[at]
        self.known.discard(tensor)
        if alive > 1:
            self.storages[at] = size, alive - 1
        else:
            del self.storages[at]
            self.now -= size


@pytest.mark.parametrize("joined", [JOINED, 0, 600_000], ids=["joined", "by layer", "some layers"])
def test_what_sampling_holds_is_what_is_counted(joined: int) -> None:
    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=12, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        intermediate_size=64, max_position_embeddings=256, **SHAPE,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    rows = 8
    session = generator_of(model, joined=joined, stop_ids=()).open([[1] * 16] * rows)
    with Census() as census:
        while session.room(0) > 0:
            session.generate(range(rows), streams(rows))
            for row in range(rows):
                session.extend(row, [3] * min(10, max(0, session.room(row) - 1)))
    assert session.room(0) == 0
    counted = sum(keys_and_values(shape_of(config), rows=rows, tokens=256, size=4, joined=joined))
    assert counted / 1.1 < census.peak < counted * 1.1


def test_the_argument_for_keys_and_values_has_the_name_that_the_model_gives_it() -> None:
    class Old:
        def forward(self, input_ids: Any, past_key_values: Any = None, **kwargs: Any) -> None: ...

    class New:
        def forward(self, input_ids: Any, cache: Any = None, **kwargs: Any) -> None: ...

    class Wrapped:
        def forward(self, *args: Any, **kwargs: Any) -> None: ...

        def get_base_model(self) -> New:
            return New()

    assert [cache_name(each()) for each in (Old, New, Wrapped)] == ["past_key_values", "cache", "cache"]
