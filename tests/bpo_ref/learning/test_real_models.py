"""Checkpoints of the families that people train: small and random, but loaded and trained as the real ones."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import forked
import gymnasium as gym
import numpy as np
import pytest
import several
import torch
import wordgame
import yaml
from checkpoints import FAMILIES, small_checkpoint, tokenizer_of
from components import missing
from tiny_runs import (
    ENVIRONMENT,
    TRAIN,
    _signals,  # noqa: F401 - a fixture
    assert_same_weights,
    ctrl_c,
    interrupt,
    launch,
    launcher,
    metrics,
    results_of,
)

from bpo_ref import session as session_module
from bpo_ref.args import Args, resolved
from bpo_ref.config import ConfigError
from bpo_ref.learning.batch import rows_of
from bpo_ref.learning.checkpoint import CheckpointError, load_checkpoint
from bpo_ref.learning.models import WithoutAdapter, add_adapter, checkpoint_layers, compute_in, eos_ids, load_policy
from bpo_ref.sampling.chat_format import ChatFormat, TemplateError
from bpo_ref.sampling.generate import Generator, token_logps
from bpo_ref.sampling.policy import ChatPolicy, collect_demonstrations
from bpo_ref.train import Trainer
from sandboxgym.adapters.prompts import make_prompt
from sandboxgym.tree import Envs

needs_peft = pytest.mark.usefixtures("peft")

SETTINGS: dict[str, Any] = {
    "env_id": wordgame.ENV_ID,
    "max_turns": 4,
    "context": 256,
    "max_new_tokens": 4,
    "updates": 2,
    "prompts": 4,
    "width": 2,
    "eval_episodes": 2,
    "eval_every": 9,
    "save_every": 1,
    "lr": 1e-3,
}
LORA = {"lora_r": 4, "lora_alpha": 8, "dtype": "bfloat16", "gradient_checkpointing": True, "kl": 0.1}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: small_checkpoint(family, root / family) for family in (*FAMILIES, "opened")}


@pytest.fixture
def peft() -> None:
    if importlib.util.find_spec("peft") is None:
        missing("peft", "the package peft is not installed: pip install 'sandboxgym[lora]'")


def trainer_of(out: Path, model: Path, **options: Any) -> Trainer:
    return Trainer(Args(**{**SETTINGS, "out": str(out), "model": str(model), **options}))


def trained(out: Path, model: Path, **options: Any) -> Trainer:
    trainer = trainer_of(out, model, **options)
    trainer.run()
    return trainer


# Tokens.


@pytest.mark.parametrize("family", [*FAMILIES, "opened"])
def test_what_is_trained_on_is_what_was_sampled(folders: dict[str, Path], tmp_path: Path, family: str) -> None:
    """Turn by turn: the template's ids, the sampled ids; and the trainer's log-probabilities are the sampler's."""
    trainer = trainer_of(tmp_path, folders[family], algo="bpo-tree", entropy_skip=0)
    trees = trainer._rollouts((0, 1))
    tokenizer, chat = trainer.session.tokenizer, trainer.session.chat
    assert len({len(path.edges) for tree in trees for path in tree.paths}) > 0
    for tree in trees:
        for path in tree.paths:
            ids: list[int] = []
            for edge in path.from_root():
                memory, text = edge.action.memory, str(edge.parent.observation)
                turn = chat.turn(text, truncated=memory.before.truncated) if ids else chat.start(text)
                assert memory.prompt == turn
                ids += memory.prompt
                assert edge.action.position == len(ids)
                ids += memory.sampled
                assert memory.truncated == (memory.sampled[-1] not in chat.stop_ids)
            assert ids == path.edges[-1].action.memory.ids()
            rows = torch.tensor([ids])
            logps = token_logps(trainer.session.policy, rows, torch.tensor([len(ids)]))[0][0]
            for edge in path.from_root():
                span = slice(edge.action.position - 1, edge.action.position - 1 + edge.action.tokens)
                np.testing.assert_allclose(logps[span].detach(), edge.action.data.logps, atol=2e-5)
    assert tokenizer.pad_token_id is not None  # eos or not: no id is ever taken for padding
    trainer.session.close()


def test_a_pad_token_that_ends_turns_is_neither_lost_nor_learnt(folders: dict[str, Path]) -> None:
    model, tokenizer = load_policy(folders["llama"])
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    chat = ChatFormat(tokenizer, stop_ids=eos_ids(model))
    short, long = (chat.demonstration(["go"], [text])[0] for text in ("a", "open the drawer and look into it"))
    assert short[-1] == tokenizer.pad_token_id
    ids = torch.full((2, len(long)), tokenizer.pad_token_id)
    ids[0, : len(short)], ids[1] = torch.tensor(short), torch.tensor(long)
    both = token_logps(model, ids, torch.tensor([len(short), len(long)]))[0]
    alone = token_logps(model, torch.tensor([short]), torch.tensor([len(short)]))[0]
    torch.testing.assert_close(both[0, : len(short) - 1], alone[0])
    assert both[0, len(short) - 2] != 0 and not both[0, len(short) - 1 :].any()


def test_every_token_that_the_model_ends_with_stops_a_turn(folders: dict[str, Path]) -> None:
    model, tokenizer = load_policy(folders["qwen2"])
    chat = ChatFormat(tokenizer, stop_ids=eos_ids(model))
    assert sorted(tokenizer.convert_ids_to_tokens(chat.stop_ids)) == ["<|endoftext|>", "<|im_end|>"]


def test_a_turn_that_is_cut_off_is_context_for_the_next(folders: dict[str, Path]) -> None:
    model, tokenizer = load_policy(folders["qwen2"])
    chat = ChatFormat(tokenizer)
    generator = Generator(model, stop_ids=chat.stop_ids, max_new_tokens=1, context_limit=200)
    session = generator.open([chat.start("go")])
    (generation,) = session.generate([0], [np.random.default_rng(0)])
    assert generation.truncated
    told = chat.turn("on", truncated=True)
    assert told[0] == chat.end_id and told[1:] == chat.turn("on", truncated=False)


# Templates.


def test_reasoning_that_a_template_hides_stays_in_the_conversation() -> None:
    tokenizer = tokenizer_of("thinking")
    chat = ChatFormat(tokenizer)
    answer = "<think>\nhm\n</think>\n\ngo to desk 3"
    sampled = [*tokenizer(answer, add_special_tokens=False)["input_ids"], chat.end_id]
    ids = chat.start("You see a desk 3.") + sampled + chat.turn("Nothing happens.", truncated=False)
    told = [("user", "You see a desk 3."), ("assistant", answer), ("user", "Nothing happens.")]
    messages = [{"role": role, "content": content} for role, content in told]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert "hm" not in rendered and "go to desk 3" in rendered
    assert tokenizer.decode(ids) == rendered.replace("go to desk 3", answer)
    assert ids[: len(chat.start("You see a desk 3."))] == chat.start("You see a desk 3.")


def test_reasoning_that_a_template_opens_is_closed_in_demonstrations() -> None:
    chat = ChatFormat(tokenizer_of("opened"))
    assert chat.action(chat.start("Hello.")).endswith("<think>")
    ids, weights = chat.demonstration(["Hello.", "Again."], ["look", "go"])
    learnt = [token for token, weight in zip(ids, weights, strict=True) if weight]
    assert chat.action(learnt[:-1]) == "</think>\n\nlook<|im_end|>\n</think>\n\ngo"


def test_a_template_that_is_not_append_only_is_named() -> None:
    tokenizer = tokenizer_of("qwen2")
    tokenizer.name_or_path = "someone/some-model"
    tokenizer.chat_template = tokenizer.chat_template.replace("m.role + '\n'", "m.role ~ loop.index ~ '\n'")
    with pytest.raises(TemplateError, match=r"chat template of someone/some-model: three turns .* after \d+ tokens"):
        ChatFormat(tokenizer)


def test_a_template_that_shows_the_date_shows_the_same_one_every_day() -> None:
    tokenizer = tokenizer_of("llama")
    shown = tokenizer.decode(ChatFormat(tokenizer).start("Hello."))
    assert "Today Date: 26 Jul 2024" in shown
    assert "26 Jul 2024" not in tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)


# Prompts.


def test_with_a_window_every_turn_is_a_row_of_what_was_shown(folders: dict[str, Path], tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, folders["qwen2"], history=1, spacing=0, algo="bpo-tree")
    trees = trainer._rollouts((0, 1))
    chat, tokenizer = trainer.session.chat, trainer.session.tokenizer
    for tree in trees:
        rows = rows_of([tree])
        assert len(rows) == tree.env_steps > len(tree.paths)
        for row in rows:
            (edge,) = row.edges
            memory = edge.action.memory
            assert memory.before is None
            assert row.ids == chat.start(memory.past[-1].shown) + memory.sampled
            assert row.ids[edge.action.position :] == edge.action.data.ids
        for edge in tree.paths[0].from_root():
            depth = edge.parent.depth
            shown = tokenizer.decode(edge.action.memory.prompt)
            assert "turn 0 say" in shown and f"turn {depth} say" in shown
            assert (f"[{depth - 1} turn" in shown) == (depth > 1)
            assert depth < 3 or f"turn {depth - 2} say" not in shown
    trainer._optimize(trees)
    trainer.session.close()


def test_with_a_window_what_a_turn_begins_with_is_not_read_again(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """System prompt and first observation come from the turn before, and the samples are the same."""
    found, costs = [], []
    for name in ("taken over", "read again"):
        if name == "read again":
            monkeypatch.setattr(ChatPolicy, "_fork", lambda self, row, ids: self._session.add(ids))
        trainer = trainer_of(tmp_path / name, folders["qwen2"], history=1, spacing=0, algo="bpo-tree")
        found.append([edge.action.data for tree in trainer._rollouts((0, 1)) for edge in tree.edges()])
        costs.append(trainer.rollout_costs)
        trainer.session.close()
    assert len(found[0]) == len(found[1]) > 20
    for mine, theirs in zip(*found):
        assert mine.ids == theirs.ids
        np.testing.assert_allclose(mine.logps, theirs.logps, atol=2e-5)
    read, reused = ([cost[f"rollout/{what}_tokens"] for cost in costs] for what in ("prefilled", "reused"))
    assert read[0] < 0.6 * read[1] and reused == [read[1] - read[0], 0]


def test_answers_that_cannot_be_read_are_invalid_actions(folders: dict[str, Path], tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, folders["qwen2"], prompt="react", invalid_penalty=0.25, algo="rloo")
    assert "<action>one action</action>" in trainer.session.tokenizer.decode(trainer.session.chat.start("x"))
    edges = [edge for tree in trainer._rollouts((0, 1)) for edge in tree.edges()]
    assert edges and all((edge.action.text, edge.valid, edge.reward) == ("", False, -0.25) for edge in edges)
    assert trainer.session.player(1.0)._skip == trainer.session.chat.length("<think>") > 0
    trainer.session.close()


def test_demonstrations_are_written_as_answers_are_read(tmp_path: Path) -> None:
    prompt = make_prompt("react", wordgame.ENV_ID)
    with Envs(lambda: gym.make(wordgame.ENV_ID, max_episode_steps=6)) as envs:
        whole = collect_demonstrations(envs, 4, noise=0.0, seed=0, prompt=prompt)
        turns = collect_demonstrations(envs, 4, noise=0.0, seed=0, prompt=make_prompt("react", "x-v0", history=2))
    assert [prompt.read(answer, {}) for answer in whole[0]["actions"]] == ["word"] * 4
    assert len(turns) == 4 * len(whole) and all(len(turn["observations"]) == 1 for turn in turns)
    assert "> word\n" in turns[1]["observations"][0]


@pytest.mark.parametrize(
    ("options", "field"),
    [({"aggregation": "path"}, "aggregation"), ({"ratio": "sequence"}, "ratio"), ({"spacing": 8}, "spacing")],
)
def test_what_speaks_of_whole_paths_is_refused_with_a_window(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}: with history=2 every turn is a row"):
        resolved(Args(**{"history": 2, "spacing": 0, **options}))


# Precision and memory.


def gradients(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    token_logps(model, ids, torch.tensor([ids.shape[1]]))[0].mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_computed_again_give_the_same_gradients(folders: dict[str, Path], family: str) -> None:
    model, _ = load_policy(folders[family])
    ids = torch.randint(5, 300, (1, 24), generator=torch.Generator().manual_seed(0))
    kept = gradients(model, ids)
    checkpoint_layers(model)
    calls: list[str] = []
    layer = model.get_decoder().layers[0]
    layer.mlp.register_forward_pre_hook(lambda *_: calls.append("mlp"))
    again = gradients(model, ids)
    assert len(calls) == 2  # forward, and once more for the backward pass
    assert kept.keys() == again.keys()
    for name, gradient in kept.items():
        torch.testing.assert_close(gradient, again[name], msg=name)


@pytest.mark.slow
def test_bfloat16_computes_low_and_learns_high(folders: dict[str, Path], tmp_path: Path) -> None:
    trainer = trained(tmp_path, folders["qwen2"], dtype="bfloat16", lr=1e-6, algo="rloo")
    policy, (start, _) = trainer.session.policy, load_policy(folders["qwen2"])
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    assert policy(input_ids=torch.tensor([[5, 6]])).logits.dtype == torch.bfloat16
    moved = [(name, p.detach(), start.get_parameter(name)) for name, p in policy.named_parameters()]
    assert any((p != old).any() for _, p, old in moved)
    lost = [(p.bfloat16() == old.bfloat16()).float().mean() for _, p, old in moved if old.any()]
    assert min(lost) > 0.8  # weights kept in bfloat16 would have stayed where they were
    assert load_policy(tmp_path / "checkpoint")[0].dtype == torch.float32
    assert {p.dtype for p in load_policy(tmp_path / "checkpoint", dtype="bfloat16")[0].parameters()} == {torch.bfloat16}


def test_the_frozen_reference_is_kept_in_the_lower_type(folders: dict[str, Path], tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, folders["qwen2"], dtype="bfloat16", kl=0.1)
    assert {p.dtype for p in trainer.session.reference.parameters()} == {torch.bfloat16}
    trainer.session.close()


def test_log_probabilities_in_bfloat16_are_near_those_in_float32(folders: dict[str, Path]) -> None:
    ids = torch.randint(5, 300, (1, 32), generator=torch.Generator().manual_seed(1))
    exact, low = (load_policy(folders["llama"])[0] for _ in range(2))
    compute_in(low, torch.bfloat16)
    a, b = (token_logps(model, ids, torch.tensor([32]))[0] for model in (exact, low))
    assert 0 < (a - b).abs().max() < 0.05


# Adapters.


@pytest.mark.slow
@needs_peft
def test_a_run_with_adapters_trains_them_alone_and_refers_to_the_model_without(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    trainer = trained(tmp_path, folders["qwen2"], **LORA, algo="rloo")
    base, _ = load_policy(folders["qwen2"], dtype="bfloat16")
    learnt = {name: p for name, p in trainer.session.policy.named_parameters() if p.requires_grad}
    assert learnt and all("lora_" in name and p.dtype == torch.float32 for name, p in learnt.items())
    assert any(p.any() for name, p in learnt.items() if "lora_B" in name)
    assert isinstance(trainer.session.reference, WithoutAdapter)
    ids = torch.tensor([[7, 8, 9, 10, 11]])
    with torch.no_grad():
        theirs = base(input_ids=ids).logits.float()
        torch.testing.assert_close(
            trainer.session.reference(input_ids=ids).logits.float(), theirs, atol=0.05, rtol=0.05
        )
        assert not torch.equal(
            trainer.session.policy(input_ids=ids).logits.float(), trainer.session.reference(input_ids=ids).logits
        )
    saved = {path.name for path in (tmp_path / "checkpoint").iterdir()}
    assert "adapter_model.safetensors" in saved and "model.safetensors" not in saved


@needs_peft
def test_adapters_that_have_not_learnt_change_nothing(folders: dict[str, Path]) -> None:
    model, _ = load_policy(folders["llama"])
    ids = torch.tensor([[7, 8, 9, 10, 11]])
    before = model(input_ids=ids).logits
    adapted = add_adapter(model, r=4, alpha=8, seed=0)
    assert torch.equal(adapted(input_ids=ids).logits, before)
    for name, p in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.ones_(p)
    assert not torch.equal(adapted(input_ids=ids).logits, before)
    assert torch.equal(WithoutAdapter(adapted)(input_ids=ids).logits, before)


@pytest.mark.slow
@needs_peft
def test_a_checkpoint_of_adapters_loads_as_any_policy(folders: dict[str, Path], tmp_path: Path) -> None:
    trainer = trained(tmp_path / "run", folders["qwen2"], lora_r=4, algo="rloo", lr=1e-2)
    merged, _ = load_policy(tmp_path / "run" / "checkpoint")
    ids = torch.tensor([[7, 8, 9, 10, 11]])
    with torch.no_grad():
        torch.testing.assert_close(merged(input_ids=ids).logits, trainer.session.policy(input_ids=ids).logits)
    again = trainer_of(tmp_path / "next", folders["qwen2"], lora_r=4, init_from=str(tmp_path / "run" / "checkpoint"))
    with torch.no_grad():  # the next run's adapters start at nothing, beside what the first one learnt
        torch.testing.assert_close(again.session.policy(input_ids=ids).logits, merged(input_ids=ids).logits)
    again.session.close()


@pytest.mark.slow
@needs_peft
def test_a_checkpoint_of_adapters_has_what_was_learnt_before_them(folders: dict[str, Path], tmp_path: Path) -> None:
    """The supervised stage, or the run that this one started from; also once the folder has been moved."""
    sft = {"sft_steps": 3, "sft_episodes": 4, "sft_batch": 2, "sft_lr": 1e-2}
    ids = torch.tensor([[7, 8, 9, 10, 11]])
    first = trained(tmp_path / "run", folders["qwen2"], lora_r=4, algo="rloo", lr=1e-2, **sft)
    second = trained(
        tmp_path / "next",
        folders["qwen2"],
        lora_r=4,
        algo="rloo",
        lr=1e-2,
        init_from=str(tmp_path / "run" / "checkpoint"),
    )
    with torch.no_grad():
        for trainer, folder in ((first, "run"), (second, "next")):
            loaded, _ = load_policy(tmp_path / folder / "checkpoint")
            torch.testing.assert_close(loaded(input_ids=ids).logits, trainer.session.policy(input_ids=ids).logits)
        (tmp_path / "run").rename(tmp_path / "moved")
        loaded, _ = load_policy(tmp_path / "moved" / "checkpoint")
        torch.testing.assert_close(loaded(input_ids=ids).logits, first.session.policy(input_ids=ids).logits)


@pytest.mark.slow
@needs_peft
def test_adapters_of_the_supervised_stage_are_part_of_the_reference(folders: dict[str, Path], tmp_path: Path) -> None:
    options = {"lora_r": 4, "kl": 0.1, "sft_steps": 2, "sft_episodes": 4, "sft_batch": 2, "sft_lr": 1e-2}
    trainer = trained(tmp_path, folders["qwen2"], **options, algo="rloo")
    (warm, _), (start, _) = load_policy(tmp_path / "sft"), load_policy(folders["qwen2"])
    ids = torch.tensor([[7, 8, 9, 10, 11]])
    with torch.no_grad():
        reference = trainer.session.reference(input_ids=ids).logits
        torch.testing.assert_close(reference, warm(input_ids=ids).logits)
        assert not torch.allclose(reference, start(input_ids=ids).logits, atol=1e-3)
    assert not (tmp_path / "adapter").exists()


@pytest.mark.slow
@needs_peft
def test_a_run_with_adapters_resumes_bitwise(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**LORA, "algo": "ppo", "sft_steps": 1, "sft_episodes": 4, "sft_batch": 2}
    trained(tmp_path / "whole", folders["thinking"], **options)
    with monkeypatch.context() as patch:
        interrupt(patch, "_optimize", 1, ctrl_c)
        trained(tmp_path / "parts", folders["thinking"], **options)
    trained(tmp_path / "parts", folders["thinking"], **options, resume=True)
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    assert_same_weights(tmp_path / "parts", tmp_path / "whole")


def test_adapters_of_a_tiny_policy_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"lora_r: goes with a pretrained model, found model=tiny:"):
        resolved(Args(lora_r=4))


def test_adapters_without_peft_are_a_clear_error(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r'lora_r: .*pip install "sandboxgym\[lora\]"'):
        add_adapter(load_policy(folders["llama"])[0], r=4, alpha=8, seed=0)


# Processes.

FSDP2 = Path(session_module.__file__).parent / "configs" / "accelerate" / "fsdp2.yaml"
RECORDER = Path(__file__).parents[1] / "record_gradients.py"


def config_file(folder: Path, model: Path, **options: Any) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**SETTINGS, "model": str(model), **options}))
    return path


def launch_sharded(
    script: Path, out: Path, config: Path, *more: str, file: Path = FSDP2, forks: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a script in two processes by a file of accelerate's: by forks (`forked`), or as the command line does."""
    command = ["-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", str(file)]
    command += ["--num_processes", "2", "--main_process_port", "0", str(script), "--config", str(config)]
    command += ["--out", str(out), *more]
    if forks:
        return forked.run(command, ENVIRONMENT)
    command.insert(0, sys.executable)
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=1800, check=False)


def assert_same_gradients(one: Path, two: Path, *, bound: float = 2e-5) -> None:
    names = sorted(path.name for path in one.glob("gradients-*.pt"))
    assert names and names == sorted(path.name for path in two.glob("gradients-*.pt"))
    for file in names:
        mine, theirs = torch.load(one / file), torch.load(two / file)
        assert mine.keys() == theirs.keys()
        size = torch.cat([gradient.flatten() for gradient in mine.values()]).norm()
        assert size > 1e-4
        for name, gradient in mine.items():
            assert (gradient - theirs[name]).norm() < bound * size, (file, name)


def batches_of(out: Path, step: str) -> list[int]:
    """Number of batches that each of two processes has made of its part, as recorded."""
    return [int((out / f"batches-{step}-{rank}.txt").read_text()) for rank in (0, 1)]


@needs_peft
@pytest.mark.slow
def test_gradients_of_adapters_are_those_of_one_process(folders: dict[str, Path], tmp_path: Path) -> None:
    """Compared before AdamW, which makes a step of the size of the learning rate out of any rounding."""
    options = {**LORA, "dtype": "float32", "updates": 1, "prompts": 8, "algo": "rloo"}
    config = config_file(tmp_path, folders["llama"], **options)
    for processes in (1, 2):
        launch(RECORDER, tmp_path / str(processes), processes, config)
        assert results_of(tmp_path / str(processes))["processes"] == processes
    assert_same_gradients(tmp_path / "1", tmp_path / "2")


SHARDED: dict[str, Any] = {
    "algo": "bpo-tree", "baseline": "critic", "kl": 0.1, "updates": 1,
    "sft_steps": 1, "sft_episodes": 4, "sft_batch": 3, "gradient_checkpointing": True,
    "points": 1.5, "seed": 3, "long_rows": "whole",
    "micro_tokens": 150,  # so that each process has batches of another number
}  # fmt: skip


@pytest.fixture(scope="module")
def sharded(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of runs of one update, resumed for a second, and of two at once: of all weights, and of adapters."""
    folder = tmp_path_factory.mktemp("sharded")
    runs = {}
    kinds: dict[str, dict[str, Any]] = {"all weights": {}, "adapters": {"lora_r": 4, "lora_alpha": 8}}
    for name, adapters in kinds.items():
        if not adapters or importlib.util.find_spec("peft"):
            (folder / "configs" / name).mkdir(parents=True)
            config = config_file(folder / "configs" / name, folders["qwen2"], **SHARDED, **adapters)
            runs[name] = ["--config", str(config)]
    listed = several.write(folder / "runs.json", runs)
    launch(RECORDER, folder / "1", 1, listed)
    for out, more in (("2", []), ("longer", ["--resume", "True", "--updates", "2"]), ("straight", ["--updates", "2"])):
        if out == "longer":
            shutil.copytree(folder / "2", folder / out)
        done = launch_sharded(RECORDER, folder / out, listed, *more)  # which asserts that the weights are shards
        assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without distributed")
@pytest.mark.xdist_group("sharded weights")
@pytest.mark.parametrize("kind", ["all weights", "adapters"])
def test_sharded_weights_have_the_gradients_of_one_process_and_resume(
    folders: dict[str, Path], request: pytest.FixtureRequest, kind: str
) -> None:
    """Both stages, a reference, a value head; processes with unlike numbers of batches; the launcher's own file."""
    if kind == "adapters":
        request.getfixturevalue("peft")
    runs = request.getfixturevalue("sharded")
    one, two, longer, straight = (runs / name / kind for name in ("1", "2", "longer", "straight"))
    assert results_of(two)["processes"] == 2
    assert batches_of(two, "sft-0") == [2, 1] and batches_of(two, "rl-0") == [4, 5]
    assert_same_gradients(one, two, bound=1e-4)
    whole, _ = load_policy(two / "checkpoint")
    alone, _ = load_policy(one / "checkpoint")
    assert whole.state_dict().keys() == alone.state_dict().keys()
    saved = load_checkpoint(two / "checkpoint")
    assert saved["sharded"] and saved["value_head"]["weight"].shape == (1, 32)

    mine, theirs = ([line for line in metrics(out) if "update/loss" in line] for out in (longer, straight))
    assert mine == theirs and len(mine) == 2
    assert_same_weights(longer, straight)

    options = SHARDED | ({"lora_r": 4, "lora_alpha": 8} if kind == "adapters" else {})
    with pytest.raises(CheckpointError, match="was made with sharded weights, now there are whole weights"):
        trainer_of(two, folders["qwen2"], **options, resume=True)


@needs_peft
@pytest.mark.slow
def test_two_killed_processes_go_on_bitwise(folders: dict[str, Path], tmp_path: Path) -> None:
    """SIGKILL to the launcher and both processes, while they train."""
    options = {**LORA, "updates": 4, "algo": "rloo"}
    config = config_file(tmp_path, folders["llama"], **options)
    launch(TRAIN, tmp_path / "whole", 2, config)
    out = tmp_path / "parts"
    process = forked.start([*launcher(TRAIN, 2)[1:], "--config", str(config), "--out", str(out)], ENVIRONMENT)
    deadline = time.monotonic() + 900
    while not (out / "checkpoint").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    ranks = process.children()  # in sessions of their own
    assert len(ranks) == 2
    for pid in (process.pid, *ranks):
        os.kill(pid, signal.SIGKILL)
    process.wait(timeout=120)
    deadline = time.monotonic() + 300
    while any(Path(f"/proc/{rank}").exists() for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not (out / "results.json").exists()
    launch(TRAIN, out, 2, config, "--resume", "True")
    assert metrics(out) == metrics(tmp_path / "whole")
    assert_same_weights(out, tmp_path / "whole")
