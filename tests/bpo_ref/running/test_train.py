"""Whole runs of a tiny policy on a text game of four turns: configuration, resuming, processes."""

from __future__ import annotations

import enum
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import several
import torch
import wordgame
from accelerate import Accelerator
from safetensors.torch import load_file
from tiny_runs import (  # noqa: F401 - fixtures
    TINY,
    TRAIN,
    _signals,
    assert_same_weights,
    config_file,
    finished,
    launch,
    metrics,
    results_of,
    trained,
    weights,
)
from wordgame import Keyed

from bpo_ref import eval as evaluation
from bpo_ref import train
from bpo_ref.args import Args, parse_args, resolved
from bpo_ref.baselines import TaskSpread
from bpo_ref.config import ConfigError
from bpo_ref.learning.checkpoint import load_checkpoint
from bpo_ref.learning.models import load_policy
from bpo_ref.presets import PRESETS
from bpo_ref.running.environments import opened
from bpo_ref.running.run_progress import learning_rate_factor
from bpo_ref.sampling.env_source import labels_of, limits_of, needs_of
from bpo_ref.sampling.policy import collect_demonstrations
from bpo_ref.sampling.selection import draw_tasks
from bpo_ref.session import TrainingSession
from bpo_ref.train import Trainer
from sandboxgym.tree import Envs
from sandboxgym.tree.files import files_of_run, load_trees, read_trees
from sandboxgym.workers.nodes.limits import Limits as NodeLimits

# ruff: noqa: F402, F811


# Runs.


@pytest.mark.parametrize("critic", [False, True])
def test_an_update_whose_rows_are_computed_in_parts_is_the_same(tmp_path: Path, critic: bool) -> None:
    """In one batch of few tokens per pass, with the values and the log-probabilities that are measured before it."""
    options: dict[str, Any] = {"updates": 1, "sft_steps": 1, "tis": 2.0, "kl": 0.1, "lr": 1e-4, "eval_untrained": False}
    options |= {"algo": "ppo", "roots": 2, "minibatches": 1} if critic else {"algo": "bpo-forest"}
    whole, parts = (trained(tmp_path / str(most), micro_tokens=most, **options) for most in (16384, 20))
    lines = (metrics(tmp_path / str(most)) for most in (16384, 20))
    mine, theirs = (next(line for line in found if "update/loss" in line) for found in lines)
    assert parts.session.counters["tokens"] == whole.session.counters["tokens"]
    for name in ("update/grad_norm", "update/loss", "update/kl"):
        assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6)


def test_a_run_leaves_its_results(finished: Path) -> None:
    results = results_of(finished)
    assert list(results["scores"]) == ["untrained", "sft", "bpo@2", "bpo@4", "bpo@5"]
    assert 5 * 4 * 4 <= results["counters"]["returns"] <= 5 * 4 * 32  # 4 root paths a task, three splits of all
    assert (finished / "learning_curve.png").stat().st_size > 1000
    assert "after bpo" in (finished / "results.md").read_text()
    assert "> " in (finished / "samples.txt").read_text()
    trees = load_trees(finished / "trees.json")
    assert trees and all(e.action.logp <= 0 <= e.action.entropy for t in trees for e in t.edges())
    assert "bpo, update" in (finished / "trees.html").read_text()
    files = [read_trees(file) for file in files_of_run(finished)]
    assert [file.about["update"] for file in files] == [2, 4, 5] and files[0].about["schedule"] == "split"
    assert [line["step"] for line in metrics(finished) if "update/loss" in line] == [1, 2, 3, 4, 5]


def test_a_run_that_has_nothing_to_learn_is_a_start_all_the_same(tmp_path: Path, finished: Path) -> None:
    trained(tmp_path / "start", algo="sft", sft_steps=0, init_from=str(finished / "checkpoint"))
    assert_same_weights(tmp_path / "start", finished)
    assert results_of(tmp_path / "start")["counters"]["tokens"] == 0


def test_a_run_without_any_evaluation_says_so_and_has_no_curve(tmp_path: Path) -> None:
    trained(tmp_path, sft_steps=0, updates=0, eval_untrained=False)
    assert results_of(tmp_path)["scores"] == {} and "was not evaluated" in (tmp_path / "results.md").read_text()
    assert not (tmp_path / "learning_curve.png").exists()


def test_a_checkpoint_is_evaluated_as_in_training(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = results_of(finished)["scores"]["bpo@5"]
    evaluation.main(["--checkpoint", str(finished / "checkpoint"), "--json", str(tmp_path / "score.json")])
    written = json.loads((tmp_path / "score.json").read_text())
    assert {name: written["score"][name] for name in expected} == expected
    assert evaluation.defaults("somewhere/else").max_turns == evaluation.EvalArgs("").max_turns
    evaluation.main(
        ["--checkpoint", str(finished / "checkpoint"), "--episodes", "2", "--json", str(tmp_path / "two.json")]
    )
    assert json.loads((tmp_path / "two.json").read_text())["score"]["n"] == 2


def test_evaluation_has_a_temperature_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(Args(**{**TINY, "out": str(tmp_path), "temperature": 0.7, "eval_temperature": 0.3}))
    told: list[float] = []
    player = trainer.session.player
    monkeypatch.setattr(trainer.session, "player", lambda temperature: told.append(temperature) or player(temperature))
    trainer.session.evaluate("start")
    assert told == [0.3]
    trainer.session.close()


def test_the_last_weights_are_saved_whatever_the_interval(finished: Path) -> None:
    assert load_checkpoint(finished / "checkpoint")["step"] == 5
    before = load_file(finished / "sft" / "model.safetensors")
    assert any(not torch.equal(value, before[name]) for name, value in weights(finished).items())


def test_the_same_seed_gives_the_same_run(finished: Path, tmp_path: Path) -> None:
    trained(tmp_path)
    assert metrics(tmp_path) == metrics(finished)
    assert_same_weights(tmp_path, finished)


@pytest.mark.slow
def test_environments_in_worker_processes_give_the_same_run(finished: Path, tmp_path: Path) -> None:
    trained(tmp_path, envs="process", env_workers=2, env_timeout=60.0)
    assert metrics(tmp_path) == metrics(finished)
    assert_same_weights(tmp_path, finished)


@pytest.mark.slow
def test_snapshots_that_stay_in_worker_processes_give_the_same_run(finished: Path, tmp_path: Path) -> None:
    store: dict[str, Any] = {"env_store": str(tmp_path / "store"), "env_store_every": 2, "env_store_bandwidth": 1e5}
    trained(tmp_path / "run", envs="process", env_workers=2, **store)
    assert metrics(tmp_path / "run") == metrics(finished)
    assert_same_weights(tmp_path / "run", finished)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"env_workers": 2}, "env_workers"),
        ({"env_timeout": 9.0}, "env_timeout"),
        ({"env_store": "snapshots"}, "env_store"),
        ({"env_store_every": 2}, "env_store_every"),
        ({"env_store_bandwidth": 1e6}, "env_store_bandwidth"),
        ({"ray_address": "auto"}, "ray_address"),
        ({"env_resources": ("sandbox=1",)}, "env_resources"),
        ({"env_labels": ("zone=a",)}, "env_labels"),
        ({"env_limits": ("environments=9",)}, "env_limits"),
    ],
)
def test_settings_of_workers_are_refused_where_there_are_none(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}: .*envs"):
        resolved(Args(**settings))


@pytest.mark.parametrize("content", ["thesis.tex", "format.json"])
def test_a_store_that_is_none_of_this_version_is_refused_with_a_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / content).write_text('{"format": "sandboxgym-snapshots", "version": 99}')
    args = Args(**TINY, envs="process", env_workers=1, env_store=str(tmp_path))
    with pytest.raises(ConfigError, match=rf"^env_store: expected [^\n]* {tmp_path}[^\n]*$"):
        opened(args, "env_kwargs")


@pytest.mark.parametrize(
    ("field", "text", "reason"),
    [
        ("env_resources", "sandbox", "expected NAME=VALUE"),
        ("env_resources", "sandbox=-1", "expected sandbox to be a number above 0, found -1"),
        ("env_resources", "sandbox=many", "expected sandbox to be a number above 0, found 'many'"),
        ("env_resources", "CPU=NaN", "expected CPU to be a number above 0, found nan"),
        ("env_resources", "CPU=1.5", "expected CPU to be a whole number, found 1.5"),
        ("env_resources", "memory=0.5", "expected memory to be a whole number, found 0.5"),
        ("env_resources", "GPU=1", "expected CPU, memory or resources .*, found GPU"),
        ("env_labels", "zone=5", "expected zone to be v, .*, found 5"),
        ("env_labels", "zone=in(a", "expected zone to be v, .*, found 'in.a'"),
        ("env_limits", "nodes=2", "expected creations_per_second, environments, snapshot_bytes, found nodes"),
        ("env_limits", "environments=true", "expected environments to be a number above 0, found True"),
    ],
)
def test_needs_and_limits_that_cannot_be_are_refused_with_a_sentence(field: str, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}: {reason}[^\n]*$"):
        resolved(Args(envs="ray", **{field: ("sandbox=1", text) if field == "env_resources" else (text,)}))


def test_needs_and_labels_of_workers_are_read_as_ray_takes_them() -> None:
    texts = ["CPU=0.5", "memory=4e9", "sandbox=1", '{"accelerator_type:none": 0.1}']
    resources = {"sandbox": 1, "accelerator_type:none": 0.1}
    assert needs_of(texts) == {"cpus": 0.5, "memory": 4_000_000_000, "resources": resources}
    assert needs_of([]) == {"resources": {}} and limits_of([]) is None
    found = labels_of(["zone=!in(a,b)", "images=swebench", 'rack="5"'])
    assert found == {"zone": "!in(a,b)", "images": "swebench", "rack": "5"}
    assert limits_of(["environments=2"]) == NodeLimits(environments=2)


@pytest.mark.slow
def test_sampling_while_environments_step_plays_the_same_episodes(finished: Path, tmp_path: Path) -> None:
    """Twice the same, bit by bit; and but for rounding the run in which one waits for the other."""
    for name in ("one", "two"):
        trained(tmp_path / name, env_overlap=True, env_threads=3, updates=2)
    assert metrics(tmp_path / "one") == metrics(tmp_path / "two")
    assert_same_weights(tmp_path / "one", tmp_path / "two")
    alone, overlapped = (
        next(line for line in metrics(out) if "rollout/turns" in line) for out in (finished, tmp_path / "one")
    )
    assert overlapped == pytest.approx(alone, rel=1e-4, abs=1e-6)
    logged = map(json.loads, (tmp_path / "one" / "metrics.jsonl").read_text().splitlines())
    assert all(0 < line["time/env_share"] < 1 for line in logged if "time/env_share" in line)


def test_another_seed_gives_another_run(finished: Path, tmp_path: Path) -> None:
    trained(tmp_path, seed=1, updates=1)
    assert metrics(tmp_path)[1] != metrics(finished)[1]


@pytest.mark.parametrize("algo", sorted(PRESETS))
def test_every_preset_trains(tmp_path: Path, algo: Any) -> None:
    trainer = trained(tmp_path, algo=algo, updates=2, kl=0.1 if algo == "grpo" else 0.0, minibatches=2, epochs=2)
    assert f"{algo}@2" in trainer.session.scores or algo == "sft"
    assert all(torch.isfinite(value).all() for value in weights(tmp_path).values())


def test_branching_only_the_root_trains_like_rloo(tmp_path: Path) -> None:
    common = {"updates": 3, "width": 4, "points": 1, "step_weight_power": 1.0, "baseline": "none"}
    trained(tmp_path / "root", algo="bpo-tree", schedule="root", **common)
    trained(tmp_path / "rloo", algo="rloo", **common)
    assert_same_weights(tmp_path / "root", tmp_path / "rloo")


def test_without_a_supervised_stage_the_reference_is_the_initial_policy(tmp_path: Path) -> None:
    (tmp_path / "sft").mkdir()  # of an earlier run
    trainer = Trainer(resolved(Args(**{**TINY, "out": str(tmp_path), "sft_steps": 0, "kl": 0.1})))
    theirs = trainer.session.reference.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in trainer.session.model.state_dict().items())


def test_a_run_starts_from_another_runs_weights(finished: Path, tmp_path: Path) -> None:
    trainer = Trainer(resolved(Args(**{**TINY, "out": str(tmp_path), "init_from": str(finished / "checkpoint")})))
    assert trainer.session.stage == "rl"
    saved, mine = weights(finished), trainer.session.model.state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in mine.items() if name in saved)


def test_a_value_head_leaves_a_plain_policy_behind(tmp_path: Path) -> None:
    """Its checkpoint loads as any causal model's, and starts a run of another algorithm."""
    trained(tmp_path / "ppo", algo="ppo", updates=1)
    assert not any("value_head" in name for name in weights(tmp_path / "ppo"))
    start = str(tmp_path / "ppo" / "checkpoint")
    trainer = trained(tmp_path / "rloo", algo="rloo", sft_steps=0, init_from=start, updates=1)
    assert trainer.session.scores["start"].n == 6


@pytest.mark.parametrize(
    ("match", "counter"), [("returns", "returns"), ("env-steps", "env_steps"), ("tokens", "tokens")]
)
def test_a_budget_ends_the_run_whatever_the_number_of_updates(tmp_path: Path, match: Any, counter: str) -> None:
    first = trained(tmp_path / "one", algo="rloo", updates=1).session.counters[counter]
    budget = int(2.5 * first)
    trainer = trained(tmp_path / "run", algo="rloo", match=match, budget=budget, updates=4, lr_decay="linear")
    spent = [line[f"total/{counter}"] for line in metrics(tmp_path / "run") if "update/loss" in line]
    assert spent[-2] < budget <= spent[-1] == trainer.session.counters[counter]
    assert trainer.session.step == len(spent)
    evaluated = [name for name in trainer.session.scores if "@" in name]
    assert evaluated[-1] == f"rloo@{trainer.session.step}" and len(evaluated) == 2  # updates / eval_every


def test_returns_that_are_left_out_are_counted_but_not_trained_on(tmp_path: Path) -> None:
    trainer = Trainer(Args(**{**TINY, "out": str(tmp_path), "algo": "bpo-paper", "width": 4, "sft_steps": 0}))
    trees = trainer._rollouts((0, 0))
    train.assign_credit(trees, trainer.args, trainer.session.memory)
    train.leave_out(trees, replace(trainer.args, subsample_returns=3), (0, 1))
    assert all(len(tree.paths) == 7 for tree in trees)
    assert len(train.rows_of(trees)) == 3 * len(trees)
    trainer.session.close()


def test_the_oracles_probes_leave_the_rollout_as_it_would_have_been(tmp_path: Path) -> None:
    common = {"algo": "bpo-tree", "root_branch": "never", "roots": 1, "points": 1, "sft_steps": 0}
    backbones = []
    for schedule in ("value-oracle", "root"):
        trainer = Trainer(Args(**{**TINY, "out": str(tmp_path), "schedule": schedule, **common}))
        trees = trainer._rollouts((0, 7))
        backbones.append([[edge.action.text for edge in tree.paths[0].edges] for tree in trees])
        for row in train.rows_of(trees):
            for edge in row.edges:
                here = slice(edge.action.position, edge.action.position + edge.action.tokens)
                assert row.ids[here] == edge.action.data.ids
        trainer.session.close()
    assert backbones[0] == backbones[1]


def test_bpo_splits_with_a_progress_key_and_is_a_forest_without(tmp_path: Path) -> None:
    keyed = Trainer(Args(**{**TINY, "out": str(tmp_path / "keyed")}))
    assert (keyed.args.schedule, keyed.args.baseline) == ("split", "pooled")
    free = {**TINY, "out": str(tmp_path / "free"), "env_id": wordgame.FREE_TEXT_ID, "tiny_vocabulary": 300}
    other = Trainer(Args(**free))
    assert (other.args.schedule, other.args.baseline) == ("explained", "turn")
    for trainer in (keyed, other):
        trainer.session.close()
    with pytest.raises(ConfigError, match=r"baseline: needs info.'progress_key'., which .*FreeText"):
        Trainer(Args(**{**free, "algo": "rloo-key"}))


def test_free_text_is_learnt_from_and_acted_in(tmp_path: Path) -> None:
    """Nothing but reset, step and an expert: words unseen, several lines, observations too long to read in full."""
    options = {"env_id": wordgame.FREE_TEXT_ID, "tiny_vocabulary": 300, "context": 256, "observation_tokens": 24}
    trainer = trained(tmp_path, **options, max_new_tokens=16, updates=2)
    assert trainer.session.scores["bpo@2"].n == 6 and trainer.session.scores["bpo@2"].reward >= 0
    encoded = trainer.session.tokenizer("say[é0xunseen]\n\t  # done")["input_ids"]
    assert trainer.session.tokenizer.decode(encoded) == "say[é0xunseen]\n\t  # done"
    (tree,) = load_trees(tmp_path / "trees.json")[:1]
    assert all(edge.valid == str(edge.action.text).startswith("say[") for edge in tree.edges())


def test_deliberate_mistakes_of_the_expert_are_shown_but_not_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    def act(expert: Any, observation: str) -> str:
        expert.noisy = "turn 1" in observation
        return "word"

    monkeypatch.setattr(wordgame.Expert, "act", act)
    with Envs(wordgame.WordGame) as envs:
        (episode,) = collect_demonstrations(envs, 1, noise=0.5, seed=0)
    assert episode["learn"] == [True, False, True, True]


def test_chats_from_a_file_take_the_experts_place(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    talk = [("system", "s"), ("user", "task 0 turn 0 say a word"), ("assistant", "word"), ("user", "over")]
    path.write_text(json.dumps({"messages": [{"role": role, "content": text} for role, text in talk]}) + "\n")
    trainer = Trainer(Args(**{**TINY, "out": str(tmp_path / "run"), "sft_data": str(path)}))
    assert trainer.session.demonstrations == [
        {"observations": ["task 0 turn 0 say a word"], "actions": ["word"], "learn": [True]}
    ]
    trainer.session.close()
    path.write_text('{"messages": [{"role": "assistant", "content": "word"}]}\n')
    with pytest.raises(ConfigError, match=rf"sft_data: {path}:1: expected user and assistant in turn"):
        Trainer(Args(**{**TINY, "out": str(tmp_path / "run"), "sft_data": str(path)}))
    for content in (b"", b"\xff", None):
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"^sft_data: "):
            Trainer(Args(**{**TINY, "out": str(tmp_path / "run"), "sft_data": str(path)}))


# Other processes.

COMPARED: dict[str, dict[str, Any]] = {
    "split": {"algo": "bpo", "sft_steps": 0},
    "forest": {"algo": "bpo-forest", "sft_steps": 0, "aggregation": "path"},
    "value head": {"algo": "ppo", "sft_steps": 0, "epochs": 1, "minibatches": 1},
    "supervised": {"algo": "ppo", "sft_steps": 1, "updates": 0, "minibatches": 1},
    "gigpo": {"algo": "gigpo", "sft_steps": 0, "dynamic_sampling": 1.5, "mask_truncated": True, "tis": 2.0},
}
EPISODES: dict[str, Any] = {"updates": 2, "minibatches": 2, "kl": 0.05, "lr": 1e-3}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders ``1`` and ``2``: runs of `COMPARED` and `EPISODES` with their gradients, by one process and by two."""
    folder = tmp_path_factory.mktemp("recorded")
    runs = {}
    for name, options in {**COMPARED, "episodes": EPISODES}.items():
        (folder / "configs" / name).mkdir(parents=True)
        config = config_file(folder / "configs" / name, **{"updates": 1, "prompts": 8, **options})
        runs[name] = ["--config", str(config)]
    script = Path(__file__).parents[1] / "record_gradients.py"
    for processes in (1, 2):
        launch(script, folder / str(processes), processes, several.write(folder / "runs.json", runs))
    return folder


@pytest.mark.slow
@pytest.mark.xdist_group("gradients of two processes")
@pytest.mark.parametrize("name", COMPARED)
def test_gradients_of_two_processes_are_those_of_one(recorded: Path, name: str) -> None:
    """Compared before AdamW, which turns rounding into steps where a gradient is about 0."""
    folders = [recorded / str(processes) / name for processes in (1, 2)]
    assert [results_of(folder)["processes"] for folder in folders] == [1, 2]
    (one,), (two,) = (sorted(folder.glob("gradients-*.pt")) for folder in folders)
    mine, theirs = torch.load(one), torch.load(two)
    size = torch.cat([gradient.flatten() for gradient in mine.values()]).norm()
    assert size > 1e-4
    for weights, gradient in mine.items():
        assert (gradient - theirs[weights]).norm() < 2e-5 * size, weights


@pytest.mark.slow
@pytest.mark.xdist_group("gradients of two processes")
def test_runs_of_one_and_two_processes_play_the_same_episodes(recorded: Path) -> None:
    folders = [recorded / str(processes) / "episodes" for processes in (1, 2)]
    one, two = map(results_of, folders)
    assert (one["processes"], two["processes"]) == (1, 2)
    assert one["scores"] == two["scores"]
    for name in ("returns", "tokens", "env_steps"):
        assert one["counters"][name] == two["counters"][name]
    for mine, theirs in zip(*map(metrics, folders), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-5)


def test_every_process_shares_out_the_root_paths_of_the_whole_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(Args(**{**TINY, "out": str(tmp_path), "algo": "rloo", "roots": 4, "allocation": "spread"}))
    tasks = range(wordgame.WordGame.num_tasks)
    known = [(task, (1000, 500 if task % 2 else 999, 500 if task % 2 else 999)) for task in tasks]
    trainer.session.memory.spread = TaskSpread(1.0, known)
    roots: dict[int, list[tuple[Any, int, int]]] = {}
    for processes in (1, 2):
        for process in range(processes):
            with monkeypatch.context() as patch:
                patch.setattr(Accelerator, "process_index", process)
                patch.setattr(Accelerator, "num_processes", processes)
                trees = trainer._rollouts((0, 2, 7))
            roots.setdefault(processes, []).extend((tree.task, tree.index, len(tree.paths)) for tree in trees)
    assert sorted(roots[1]) == sorted(roots[2])
    numbers = {task % 2: n for task, _, n in roots[1]}
    assert numbers[0] < 4 < numbers[1], roots
    trainer.session.close()


def test_a_task_or_an_argument_of_the_expert_that_is_not_there_is_named(tmp_path: Path) -> None:
    shop = {**TINY, "env_id": "sandboxgym/WebShop-v0", "out": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"env_kwargs: cannot make .*expected a task from 0 to \d+, found 99999"):
        Trainer(Args(**{**shop, "env_kwargs": ("tasks=[99999]",)}))
    for wrong, message in (("careful=1", "unexpected keyword argument"), ("careless=2", "careless: expected a prob")):
        with pytest.raises(ConfigError, match=f"expert_kwargs: .*{message}"):
            Trainer(Args(**{**shop, "expert_kwargs": (wrong,)}))


def test_a_launcher_that_starts_too_few_processes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingSession, "check_processes", lambda self: monkeypatch.setenv("WORLD_SIZE", "2"))
    trainer = Trainer(resolved(Args(**{**TINY, "out": str(tmp_path)})))
    monkeypatch.undo()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="wanted 2 processes, accelerate runs 1"):
        trainer.session.check_processes()


# Settings.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 1}, "width: .*at least 2 children.*width=1"),
        ({"points": 0}, "points: .*at least one branch point"),
        ({"algo": "bpo-tree", "points": 0.5}, "points: a root that always branches is one already"),
        ({"spacing": 768}, "spacing: 768 tokens .*context of 768"),
        ({"algo": "rloo", "points": 1.5, "width": 2}, "roots: .*2.5 is not a whole number"),
        ({"algo": "grpo", "schedule": "entropy"}, "credit: group .*schedule=entropy"),
        ({"algo": "grpo", "roots": 1}, "credit: group .*roots=1"),
        ({"algo": "bpo-paper", "baseline": "turn"}, "baseline: turn goes with credit=tree, found credit=paper"),
        ({"algo": "rloo", "roots": 1, "prompts": 1}, "roots: .*nothing to be compared with"),
        ({"algo": "grpo", "allocation": "spread"}, "allocation: spread does not go with credit=group"),
        ({"algo": "bpo-paper", "allocation": "spread", "credit": "tree", "roots": 3}, "allocation: .*root_branch=free"),
        ({"algo": "bpo", "allocation": "spread", "roots": 1}, "allocation: .*roots=1 and baseline=pooled"),
        ({"algo": "rloo", "allocation": "spread", "roots": 2}, "allocation: .*roots=2 and baseline=none"),
        ({"algo": "bpo", "allocation": "spread", "aggregation": "path"}, "allocation: .*aggregation=path"),
        ({"algo": "bpo", "allocation": "spread", "subsample_returns": 4}, "allocation: .*subsample_returns=4"),
        ({"minibatches": 17}, "minibatches: 17 of 16 prompts"),
        ({"tis": 0.5}, "tis: a cap below 1"),
        ({"tis": 2.0, "ratio": "sequence"}, "tis: .*ratio=token, found sequence"),
        ({"dynamic_sampling": 0.5}, "dynamic_sampling: expected 1 or more, found 0.5"),
        ({"algo": "rloo", "roots": 1, "dynamic_sampling": 1.5}, "dynamic_sampling: one return .*roots=1"),
        ({"max_new_tokens": 768}, "max_new_tokens: 768 do not fit"),
        ({"updates": -1}, "updates: expected 0 or more, found -1"),
        ({"roots": 0}, "roots: expected at least 1, found 0"),
        ({"gamma": 0.0}, "gamma: expected more than 0"),
        ({"temperature": 0.0}, "temperature: expected more than 0"),
    ],
)
def test_settings_that_contradict_each_other_name_the_field(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        resolved(Args(**options))


@pytest.mark.parametrize("algo", sorted(PRESETS))
def test_every_field_of_a_preset_is_a_setting_and_is_filled_in(algo: Any) -> None:
    assert PRESETS[algo].keys() <= Args.__dataclass_fields__.keys()
    args = resolved(Args(algo=algo))
    assert None not in (args.roots, args.schedule, args.root_branch, args.credit, args.baseline, args.step_weight_power)


def test_a_given_setting_wins_over_the_preset() -> None:
    assert (resolved(Args(algo="bpo-paper")).kl, resolved(Args(algo="bpo-paper", kl=0.0)).kl) == (0.05, 0.0)
    assert resolved(Args(algo="bpo", baseline="turn")).baseline == "turn"
    assert resolved(Args(algo="bpo", roulette=0.25)).roulette == 0.25


def test_ppo_takes_several_minibatches_where_the_batch_allows() -> None:
    for prompts, minibatches in ((16, 4), (6, 2), (5, 1)):
        args = resolved(Args(algo="ppo", prompts=prompts))
        assert (args.epochs, args.minibatches) == (4, minibatches)
    assert resolved(Args(algo="ppo", minibatches=3)).minibatches == 3
    assert (resolved(Args(algo="grpo")).epochs, resolved(Args(algo="grpo")).minibatches) == (1, 1)


def test_bpo_is_splitting_with_the_pooled_baseline_and_roulette_or_a_forest() -> None:
    split = resolved(Args(algo="bpo"))
    assert split == replace(resolved(Args(algo="bpo-split", baseline="pooled", roulette=0.5)), algo="bpo")
    assert resolved(Args(algo="bpo"), keyed=False) == replace(resolved(Args(algo="bpo-forest")), algo="bpo")
    # roulette needs V̂ where it is played: another schedule goes without
    assert resolved(Args(algo="bpo", schedule="random")).roulette == 1.0


@pytest.mark.parametrize(
    ("algo", "roots"), [("rloo", 7), ("ppo", 7), ("grpo", 7), ("bpo-key", 4), ("bpo-tree", 4), ("bpo-paper", 1)]
)
def test_all_algorithms_spend_the_same_returns(algo: Any, roots: int) -> None:
    assert resolved(Args(algo=algo, width=4, points=2)).roots == roots


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rate: 1", "there is no setting 'learning_rate'"),
        ("lr: 5e-4", "lr: expected a number .*found '5e-4'"),
        ("wdith: 2", "there is no setting 'wdith'; did you mean 'width'"),
        ("1: 2", "there is no setting 1"),
        ("algo: a2c", "algo: expected one of sft, .*bpo-tree.*found 'a2c'"),
        ("width: 2.5", "width: expected a whole number or null, found 2.5"),
        ("resume: 1", "resume: expected true or false, found 1"),
        ("betas: [0.9]", r"betas: expected a list of 2, found \[0.9\]"),
        ("trackers: wandb", "trackers: expected a list, found 'wandb'"),
        ("- 1", "expected lines of the form name: value"),
        ("{", "cannot be read as YAML"),
    ],
)
def test_a_wrong_config_file_names_file_and_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"{path}: {message}"):
        parse_args(["--config", str(path)])
    with pytest.raises(SystemExit, match=f"error: {path}"):
        train.main(["--config", str(path)])


def test_a_missing_config_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path}/none.yaml: there is no such file"):
        parse_args(["--config", str(tmp_path / "none.yaml")])


def test_the_command_line_wins_over_the_config_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("lr: 1.0e-3\nwidth: 3\nenv_kwargs: {games: embedded:train}\nbetas: [0.5, 0.9]")
    args = parse_args(["--config", str(path), "--width", "5", "--algo", "rloo-key"])
    assert (args.lr, args.width, args.algo, args.betas) == (1e-3, 5, "rloo-key", (0.5, 0.9))
    assert args.env_kwargs == ("games=embedded:train",)


@pytest.mark.parametrize("path", sorted((TRAIN.parent / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_committed_configs_are_valid(path: Path) -> None:
    args = parse_args(["--config", str(path)])
    resolved(args)
    if "SWEBench" in args.env_id:
        assert "reject_suspicious=true" in [setting.lower() for setting in args.env_kwargs], (
            "forged rewards are refused"
        )


@pytest.mark.parametrize("content", [None, "{}", "nonsense"])
def test_an_unreadable_model_is_a_config_error(tmp_path: Path, content: str | None) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    if content is not None:
        (folder / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=f"model: cannot load {folder}"):
        load_policy(folder)


@pytest.mark.parametrize("name", ["env_kwargs", "eval_kwargs"])
@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("games=/nowhere", "cannot make sandboxgym/ALFWorld-v0"),
        ("games", ".*expected NAME=VALUE"),
        ("colour=red", "cannot make sandboxgym/ALFWorld-v0"),
    ],
)
def test_an_environment_that_cannot_be_made_is_a_config_error(tmp_path: Path, name: str, words: str, told: str) -> None:
    settings = {"out": str(tmp_path), "env_kwargs": (), "eval_kwargs": (), name: (words,)}
    with pytest.raises(ConfigError, match=f"{name}: {told}"):
        Trainer(resolved(Args(**settings)))


def test_an_unknown_tiny_size_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model: expected tiny: with one of 0.2M, .*found tiny:7B"):
        Trainer(resolved(Args(**{**TINY, "out": str(tmp_path), "model": "tiny:7B"})))


@pytest.mark.parametrize(
    ("decay", "factors"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.8535534, 0.5, 0.1464466]),
    ],
)
def test_learning_rate_warms_up_and_decays(decay: Any, factors: list[float]) -> None:
    args = Args(warmup=2, updates=6, lr_decay=decay)
    assert [learning_rate_factor(update, args) for update in range(6)] == pytest.approx(factors)


def test_tasks_of_a_batch_differ_while_there_are_enough() -> None:
    env = wordgame.WordGame()
    assert sorted(draw_tasks(env, 6, (0, 1))) == list(range(6))
    assert len(draw_tasks(env, 10, (0, 1))) == 10
    assert draw_tasks(env, 10, (0, 1)) == draw_tasks(env, 10, (0, 1)) != draw_tasks(env, 10, (0, 2))


def test_norms_and_biases_do_not_decay(tmp_path: Path) -> None:
    trainer = Trainer(Args(**{**TINY, "out": str(tmp_path), "weight_decay": 0.1, "algo": "ppo"}))
    try:
        decay = {
            id(p): group["weight_decay"]
            for group in trainer.session.strategy.optimizer.param_groups
            for p in group["params"]
        }
        named = list(trainer.session.network.named_parameters())
        assert len(decay) == len(named)
        assert {decay[id(p)] for name, p in named if p.ndim > 1 and "value_head" not in name} == {0.1}
        assert {decay[id(p)] for name, p in named if p.ndim < 2 or "value_head" in name} == {0.0}
    finally:
        trainer.session.close()


def test_how_long_processes_wait_for_each_other_is_a_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def accelerator(**given: Any) -> Any:
        seen.extend(given["kwargs_handlers"])
        raise InterruptedError

    monkeypatch.setattr("bpo_ref.session.Accelerator", accelerator)
    for options in ({}, {"process_timeout": 0.5}):
        with pytest.raises(InterruptedError):
            Trainer(Args(**{**TINY, "out": str(tmp_path), **options}))
    assert [handler.timeout.total_seconds() / 3600 for handler in seen] == [24.0, 0.5]


class Stage(enum.Enum):
    EVEN = 0
    ODD = 1


@pytest.mark.parametrize(
    "key",
    [lambda n: frozenset((n, "seen")), lambda n: np.int64(n), lambda n: Stage(n), lambda n: (n, (np.str_("a"), None))],
    ids=["frozenset", "numpy", "enum", "nested"],
)
def test_progress_keys_of_any_plain_kind_are_saved_and_loaded(
    tmp_path: Path, key: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Keyed, "key", staticmethod(key))
    options = {"algo": "bpo", "env_id": "wordgame:toys/Keyed-v0", "sft_steps": 0, "save_every": 1}
    trained(tmp_path / "whole", updates=2, **options)
    trained(tmp_path / "parts", updates=1, **options)
    trained(tmp_path / "parts", updates=2, resume=True, **options)
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")


def test_progress_keys_that_could_not_be_saved_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Keyed, "key", staticmethod(lambda n: object()))
    with pytest.raises(ConfigError, match=r"info\['progress_key'\]: expected text, .* found object"):
        Trainer(Args(**{**TINY, "algo": "bpo", "env_id": "wordgame:toys/Keyed-v0", "out": str(tmp_path)}))


def test_shares_of_turns_and_episodes_that_were_cut_are_logged(finished: Path) -> None:
    lines = [line for line in metrics(finished) if "rollout/truncated_turns" in line]
    assert lines and all(0 <= line["rollout/truncated_turns"] <= 1 for line in lines)
    assert all(0 <= line["rollout/truncated_episodes"] <= 1 for line in lines)


@pytest.mark.parametrize(("context", "algo", "most"), [(160, "bpo", 0.0), (40, "rloo", 1.0)])
def test_episodes_that_outgrow_the_context_count_as_truncated(
    tmp_path: Path, context: int, algo: str, most: float
) -> None:
    trained(tmp_path, updates=1, sft_steps=0, context=context, algo=algo)
    (line,) = (line for line in metrics(tmp_path) if "rollout/truncated_turns" in line)
    assert most / 2 <= line["rollout/truncated_episodes"] <= most
