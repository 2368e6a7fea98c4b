"""Random settings are either refused at once, with the name of the setting, or make one update on the word game."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import wordgame

from bpo_ref.args import Args, resolved
from bpo_ref.config import ConfigError
from bpo_ref.learning.checkpoint import CheckpointError
from bpo_ref.session import TrainingFailed, TrainingSession
from bpo_ref.train import Trainer

BASE: dict[str, Any] = {
    "env_id": wordgame.ENV_ID, "max_turns": 5, "context": 160, "max_new_tokens": 3, "sft_episodes": 2, "updates": 1,
    "prompts": 4, "eval_episodes": 1, "eval_untrained": False, "trackers": (), "lr": 1e-2, "dtype": "float32",
}  # fmt: skip

DRAWN: dict[str, tuple[Any, ...]] = {
    "seed": (0, 1, 7), "env_workers": (0,) * 9 + (1,), "env_timeout": (None,) * 9 + (60.0,),
    "env_threads": (1, 2), "env_overlap": (False, True), "env_retries": (0, 2),
    "max_live": (1, 3, 1024), "max_turns": (1, 3, 5), "tiny_vocabulary": (0, 300), "dtype": ("float32", "bfloat16"),
    "lora_r": (0, 0, 0, 2), "gradient_checkpointing": (False, True), "prompt": ("plain", "react", "choice"),
    "list_actions": (False, True), "history": (0, 0, 0, 1, 2), "system": (None, "task turn"), "context": (30, 90, 160),
    "observation_tokens": (0, 4), "max_new_tokens": (1, 3, 8), "entropy_skip": (None, 0, 1),
    "temperature": (1.0, 0.7, 2.0), "sft_steps": (0, 0, 1), "sft_noise": (0.0, 0.2), "sft_batch": (1, 4),
    "sft_reward": (None, 0.5), "match": ("returns", "env-steps", "tokens"), "budget": (0, 0, 1),
    "prompts": (1, 2, 4, 6), "lr_decay": ("constant", "linear", "cosine"), "warmup": (0, 2),
    "weight_decay": (0.0, 0.1), "epochs": (1, 2), "minibatches": (1, 2, 3), "micro_tokens": (16, 16384),
    "pack": ("tree", "flat"), "width": (None, 2, 3), "points": (None, 1, 1.5, 2, 0), "roots": (None, 1, 2, 3),
    "allocation": ("equal", "equal", "spread"), "forks": (None, "backbone", "roots", "all"),
    "root_branch": (None, "always", "free", "never"), "spacing": (8, 0, 1, 200), "fill": ("none", "widen"),
    "subsample_returns": (0, 0, 1, 3), "advantage_norm": (None, "none", "batch"), "group_std": (True, False),
    "fork_baseline": (None, "siblings", "shrunk", "parent"), "step_weight_power": (None, 0.0, 0.75, 1.0),
    "baseline": (None, None, "none", "turn", "key", "value", "pooled", "critic"), "roulette": (None, None, 0.5, 1.0),
    "credit": (None, None, None, "paper", "sibling", "tree", "group", "gigpo", "gae", "mc"),
    "schedule": (None, None, "none", "entropy", "entropy-online", "random", "spaced", "lowest", "root",
                 "value-oracle", "explained", "split", "mc"),
    "value_decay": (0.9, 0.0, 1.0), "mc_rollouts": (1, 2), "mc_turns": (0, 1, 9), "lam": (0.95, 0.0, 1.0),
    "gamma": (1.0, 0.5), "invalid_penalty": (0.0, 0.1), "gae_steps": ("turn", "token"), "gae_lam": (None, 0.0, 1.0),
    "value_clip": (0.2, 0.0), "ratio": ("token", "step", "sequence"), "clip_high": (0.2, 0.28), "dual_clip": (0.0, 3.0),
    "kl": (0.0, 0.0, 0.1), "kl_estimator": (None, None, "k1", "k2", "k3"), "kl_in": ("loss", "reward"),
    "aggregation": ("token", "path", "constant"), "omega": (1.0, 0.0, 0.5), "omega_gamma": (0.95, 0.0, 1.0),
    "dynamic_sampling": (0.0, 0.0, 0.5, 1.5, 3.0), "tis": (0.0, 0.0, 0.5, 2.0), "mask_truncated": (False, True),
    "tis_level": ("token", "token", "episode"), "staleness": (0, 0, 1), "long_rows": ("split", "whole", "refuse"),
    "refusals": (False, True), "lookahead": (False, False, True), "roulette_below": (0.02, 0.0, 0.5),
    "clip_low": (0.2, 0.0, 1.5), "value_lr": (1e-3, 0.1), "value_weight": (0.5, 0.0), "lr": (1e-2, 1e-4),
    "betas": ((0.9, 0.95), (0.0, 0.0), (0.9, 1.0)), "adam_eps": (1e-8, 0.0, 1e-3), "max_grad_norm": (1.0, 1e-3, 0.0),
    "updates": (1, 1, 2), "lora_alpha": (32, 1), "threads": (1, 2), "process_timeout": (24.0, 0.5, 0.0),
    "backend": ("hf", "hf", "hf", "transformers-continuous", "vllm"), "model": ("tiny:0.2M", "tiny:0.2M", "tiny:none"),
    "init_from": (None, None, "./no-such-folder"), "resume": (False, False, True),
    "resume_if_saved": (False, False, True), "overwrite": (False, False, True),
    "trackers": ((), ("none-such",)), "server": ((), (), ("node7:8000",), ("colocate",)),
    "server_timeout": (300.0, 5.0, 0.0), "server_retries": (6, 0), "server_tolerance": (None, None, 0.1),
    "server_weights": (None, None, "./weights"),
    "server_sends": ("weights", "weights", "adapters", "nccl"), "server_sleeps": (False, False, True),
    "server_python": (None, None, "/none/such"), "server_memory": (0.4, 0.4, 0.9),
    "env_id": (wordgame.ENV_ID, wordgame.ENV_ID, wordgame.ENV_ID, "no-such/Env-v0"),
    "env_kwargs": ((), (), ("no_such=1",), ("no equals sign",)), "eval_kwargs": ((), (), ("no_such=1",)),
    "expert_kwargs": ((), (), ("no equals sign",)), "sft_data": (None, None, "./no-such-file.jsonl"),
    "sft_episodes": (2, 5), "sft_lr": (3e-3, 0.0), "sft_observation_weight": (0.2, 0.0, 1.0),
    "eval_episodes": (1, 3), "eval_untrained": (False, True), "eval_every": (1, 10), "save_every": (1, 10),
    "eval_temperature": (1.0, 0.5, 0.0), "lookahead_least": (0.0, 0.1, 10.0),
    "network": ("none", "none", "lookahead", "baseline", "both"), "split_variance": ("returns", "returns", "fair"),
    "journal": ("exact", "quick", "off"), "env_capture_every": (0, 2), "rollout_timeout": (0.0, 600.0),
    "driver": ("auto", "auto", "lockstep", "async"),
}  # fmt: skip
"""Values that look valid, and some that are not, by field."""
APART = {
    "algo": "drawn every time",
    "out": "a folder of the test",
    "envs": "other processes: test_train.py, fleet/test_runs.py",
    "env_store": "the same",
    "env_store_every": "the same",
    "env_store_bandwidth": "the same",
    "ray_address": "the same",
    "env_resources": "the same",
    "env_labels": "the same",
    "env_limits": "the same",
}
"""Fields that are not among them, and why."""


def test_every_setting_is_drawn() -> None:
    """With two values at least, one of them a change from the small run: a setting that is added is tried as well."""
    fields = {field.name: BASE.get(field.name, field.default) for field in dataclasses.fields(Args)}
    assert fields.keys() == DRAWN.keys() | APART.keys()
    assert not DRAWN.keys() & APART.keys()
    same = [name for name, values in DRAWN.items() if all(value == fields[name] for value in values)]
    assert not same
    hints = get_type_hints(Args)
    names = {name: set(get_args(hint)) for name, hint in hints.items() if get_origin(hint) is Literal}
    missing = {name: values - set(DRAWN[name]) for name, values in names.items() if name in DRAWN}
    assert not any(missing.values()), missing


def drawn(seed: int, *, changed: int, names: Sequence[str] | None = None) -> dict[str, Any]:
    """An algorithm, and so many settings, or these, in which it is to differ from the small run."""
    rng = np.random.default_rng([44, seed])
    names = [str(name) for name in rng.choice(list(DRAWN), changed, replace=False)] if names is None else names
    algos = get_args(get_type_hints(Args)["algo"])
    options = {name: DRAWN[name][rng.integers(len(DRAWN[name]))] for name in names}
    return {**BASE, "algo": algos[rng.integers(len(algos))], **options}


def every_setting(seed: int, *, changed: int) -> list[dict[str, Any]]:
    """Draws in which every setting takes, once, a value that is not the small run's."""
    rng = np.random.default_rng([45, seed])
    fields = {field.name: BASE.get(field.name, field.default) for field in dataclasses.fields(Args)}
    names = [str(name) for name in rng.permutation(list(DRAWN))]
    draws = []
    for i in range(0, len(names), changed):
        options = drawn(seed + i, changed=changed, names=names[i : i + changed])
        for name in names[i : i + changed]:
            others = [value for value in DRAWN[name] if value != fields[name]]
            options[name] = others[rng.integers(len(others))]
        draws.append(options)
    return draws


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without plots, samples, checkpoints and evaluation: what is looked at is the update."""
    monkeypatch.setattr("bpo_ref.train.write_samples", lambda *_, **__: None)
    monkeypatch.setattr(TrainingSession, "report", lambda self: None)
    monkeypatch.setattr(TrainingSession, "save", lambda self, folder, **_: None)
    monkeypatch.setattr(TrainingSession, "evaluate", lambda self, name: SimpleNamespace(rate=0.0))


def outcome(options: dict[str, Any], out: Path) -> str:
    """``refused`` with a field's name, or ``updated``; anything else is an error."""
    fields = {field.name for field in dataclasses.fields(Args)}
    try:
        trainer = Trainer(Args(**{**options, "out": str(out)}))
        trainer.session.enter_rl() if trainer.session.stage == "sft" else None
    except CheckpointError as error:
        assert options.get("resume") and "expected the state of a run to resume" in str(error)
        return "refused: resume"
    except ConfigError as error:
        named = str(error).partition(":")[0]
        assert named in fields, f"the message begins with no field: {error}"
        return f"refused: {named}"
    logged: list[dict[str, float]] = []
    trainer.session.log.scalars = lambda metrics, stage, step: logged.append(dict(metrics))  # type: ignore[method-assign]
    try:
        if trainer.args.algo == "sft":
            return "updated"
        before = {name: value.detach().clone() for name, value in trainer.session.network.state_dict().items()}
        trainer._reinforce()
    except TrainingFailed as error:  # of rollouts that come to nothing, which no setting tells before
        assert "too long" in str(error) or "masked" in str(error) or "room" in str(error), error
        return "failed"
    finally:
        trainer.session.close()
    assert logged and all(math.isfinite(v) for m in logged for k, v in m.items() if k.startswith("update/")), logged
    assert all(("update/grad_norm" in m) != ("update/skipped" in m) for m in logged), logged
    if logged[0].get("update/grad_norm", 0.0) > 1e-6 and trainer.args.warmup == 0:
        assert any(not value.equal(before[name]) for name, value in trainer.session.network.state_dict().items())
    return "updated"


def found(draws: Sequence[dict[str, Any]], tmp_path: Path) -> list[str]:
    outcomes = []
    for number, options in enumerate(draws):
        told = {name: value for name, value in options.items() if BASE.get(name, ...) != value}
        try:
            outcomes.append(outcome(options, tmp_path / str(number)))
        except Exception as error:
            raise AssertionError(f"draw {number}: {told}: {type(error).__name__}: {error}") from error
    return outcomes


def test_random_settings_train_or_are_refused_by_name(tmp_path: Path) -> None:
    draws = every_setting(0, changed=3)
    assert len(draws) < 50
    outcomes = found(draws, tmp_path)
    assert outcomes.count("updated") >= 10, outcomes


@pytest.mark.slow
@pytest.mark.parametrize("changed", [3, 6, 10, 20])
def test_many_random_settings_train_or_are_refused_by_name(tmp_path: Path, changed: int) -> None:
    assert "updated" in found([drawn(1000 * changed + i, changed=changed) for i in range(50)], tmp_path)


# Numbers that mean nothing.


def numbers() -> list[str]:
    """Fields that hold a number."""
    hints = get_type_hints(Args)
    kinds = {name: set(get_args(hint)) or {hint} for name, hint in hints.items() if get_origin(hint) is not Literal}
    return sorted(name for name, kind in kinds.items() if kind & {int, float} and get_origin(hints[name]) is not tuple)


@pytest.mark.parametrize("name", numbers())
def test_every_number_has_bounds(name: str) -> None:
    integer = int in (set(get_args(get_type_hints(Args)[name])) or {get_type_hints(Args)[name]})
    wrong = [math.nan] if name == "sft_reward" else [-1] if integer else [-1.0, math.nan]
    for value in wrong:
        with pytest.raises(ConfigError, match=rf"^{name}: "):
            resolved(Args(**{"algo": "rloo", name: value}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"lr": 0.0}, "lr"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"gamma": 1.5}, "gamma"),
        ({"value_decay": 1.1}, "value_decay"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"dual_clip": 0.5}, "dual_clip"),
        ({"algo": "vineppo", "subsample_returns": 4}, "subsample_returns"),
        ({"algo": "bpo", "aggregation": "path"}, "aggregation"),
    ],
)
def test_settings_that_would_compute_something_else_are_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}: "):
        resolved(Args(**options))
