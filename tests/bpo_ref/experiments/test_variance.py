"""The measurement of estimators: its arithmetic on made-up gradients, and a small complete study."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import wordgame
import yaml
from tiny_runs import TINY

from bpo_ref.args import Args
from bpo_ref.experiments.laboratory import Laboratory, run
from bpo_ref.experiments.variance import Samples, VarianceStudy, compare, read_method
from bpo_ref.train import Trainer

TRUE = np.zeros((12, 40))
TRUE[:, :5] = 1.0  # E g of every task: squared norm 5


def made(name: str, *, scale: float, noise: float, tokens: float, repeats: int = 60, seed: int = 0) -> Samples:
    """Normal gradients around ``scale`` times the true one, with Tr Cov = 40 noise²."""
    rng = np.random.default_rng(seed)
    gradients = scale * TRUE + noise * rng.normal(size=(repeats, *TRUE.shape))
    spent = np.tile([8.0, 50.0, tokens], (repeats, len(TRUE), 1))
    return Samples(name, gradients, spent, moving=0.5, seconds=1.0)


def test_costs_scale_and_cosine_of_known_gradients() -> None:
    reference = made("reference", scale=1.0, noise=1.0, tokens=100, seed=1)
    methods = [
        made("first", scale=1.0, noise=1.0, tokens=100, seed=2),
        made("cheap", scale=1.0, noise=0.5, tokens=50, seed=3),
        made("half", scale=0.5, noise=1.0, tokens=100, seed=4),
    ]
    first, cheap, half = compare(methods, reference, bootstrap=200, minibatch=4, seed=0)
    assert first.cost["tokens"].value == 1.0
    assert first.noise_to_signal.value == pytest.approx(40 / 12 / 5, rel=0.1)
    assert cheap.cost["tokens"].value == pytest.approx(0.25 * 0.5, rel=0.1)
    assert cheap.cost["returns"].value == pytest.approx(0.25, rel=0.1)
    assert cheap.cost["env_steps"].value == pytest.approx(0.25, rel=0.1)
    for line in (first, cheap):
        assert line.aims and line.scale.low < 1 < line.scale.high
        assert line.cosine.value == pytest.approx(1.0, abs=0.05) and line.bias.value < 0.2
    assert not half.aims
    assert half.scale.value == pytest.approx(0.5, abs=0.05)
    assert half.bias.value == pytest.approx(0.5, abs=0.05)
    assert half.cost["tokens"].value == pytest.approx(4.0, rel=0.2)  # at its own scale
    assert half.norm_variance < first.norm_variance  # the paper's number mixes in the scale


def test_intervals_hold_the_value() -> None:
    reference = made("reference", scale=1.0, noise=1.0, tokens=100, seed=1)
    line = compare(
        [reference, made("a", scale=1.0, noise=2.0, tokens=100)], reference, bootstrap=300, minibatch=4, seed=0
    )
    cost = line[1].cost["tokens"]
    assert cost.low < cost.value < cost.high
    assert cost.low < 4.0 < cost.high * 1.1


@pytest.mark.slow
def test_a_study_of_a_small_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(Args(**{**TINY, "out": str(tmp_path / "start"), "algo": "sft"}))
    trainer.run()
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({**TINY, "env_id": wordgame.ENV_ID, "eval_kwargs": []}))
    study = VarianceStudy(
        checkpoint=str(tmp_path / "start" / "checkpoint"),
        config=str(config),
        methods=("rloo:roots=8", "rloo-turn:roots=8", "bpo-split", "bpo-split:roulette=0.5", "bpo-paper:width=4"),
        tasks=6,
        repeats=24,
        pilot=2,
        reference=256,
        bootstrap=200,
        out=str(tmp_path / "variance"),
    )
    lines = {line.name: line for line in run(study)}
    for name in ("rloo:roots=8", "rloo-turn:roots=8", "bpo-split"):
        assert lines[name].cosine.high > 0.9, lines[name]
        assert lines[name].scale.low < 1.15 and lines[name].scale.high > 0.85, lines[name]
    assert lines["rloo:roots=8"].spent["returns"] == 8
    assert "| `bpo-split` |" in (tmp_path / "variance.md").read_text()
    assert len(json.loads((tmp_path / "variance.json").read_text())) == 5
    assert (tmp_path / "variance.png").stat().st_size > 1000

    def measure(self: Laboratory, method: str, **_: object) -> Samples:
        raise AssertionError(f"{method} is measured again")

    monkeypatch.setattr(Laboratory, "measure", measure)  # what was measured is kept
    again = run(replace(study, methods=study.methods[:3], bootstrap=100))
    assert [line.cost["tokens"].value for line in again] == [
        lines[name].cost["tokens"].value for name in study.methods[:3]
    ]
    with pytest.raises(AssertionError, match="is measured again"):
        run(replace(study, seed=1))


def test_methods_that_sample_alike_share_their_trees_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(Args(**{**TINY, "out": str(tmp_path / "start"), "algo": "sft", "sft_steps": 1}))
    trainer.run()
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({**TINY, "env_id": wordgame.ENV_ID, "eval_kwargs": []}))
    study = VarianceStudy(
        checkpoint=str(tmp_path / "start" / "checkpoint"), config=str(config), tasks=3, repeats=2, pilot=1, sketch=64,
        methods=("rloo:roots=2",),
    )  # fmt: skip
    methods = ("rloo:roots=3", "rloo-key:roots=3", "rloo-pooled:roots=3", "bpo-split:roots=2")
    sampled = []
    whole = Laboratory._sampled

    def counted(self: Laboratory, args: Args, *rest: Any) -> Any:
        sampled.append(args.algo)
        return whole(self, args, *rest)

    monkeypatch.setattr(Laboratory, "_sampled", counted)
    together = Laboratory(study)
    found = {method: together.measure(method).gradients for method in methods}
    # two batches of the first; the pilot that others need beside them; all of another schedule's
    assert sampled == ["rloo", "rloo", "rloo-key", "bpo-split", "bpo-split", "bpo-split"]
    for method in methods:
        alone = Laboratory(study)
        assert (alone.measure(method).gradients == found[method]).all(), method
        alone.envs.close()
    together.envs.close()


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("rloo", {}),
        ("rloo:roots=8,network=none", {"roots": 8, "network": "none"}),
        ("bpo-split:roulette=5e-1,lookahead=true", {"roulette": 0.5, "lookahead": True}),
        ("ppo:betas=[0.5,0.9],width=null", {"betas": (0.5, 0.9), "width": None}),
    ],
)
def test_a_method_is_read_like_arguments_on_command_lines(method: str, settings: dict[str, Any]) -> None:
    assert read_method(method) == (method.partition(":")[0], settings)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("rlo", "rlo: expected one of .*, found rlo"),
        ("rloo:colour=red", "rloo:colour=red: there is no setting 'colour'"),
        ("rloo:root=8", "there is no setting 'root'; did you mean 'roots'"),
        ("rloo:roots", "rloo:roots: expected NAME=VALUE"),
        ("rloo:lookahead=yes", "lookahead: expected true or false, found 'yes'"),
        ("rloo:roots=8.5", "roots: expected a whole number or null, found 8.5"),
    ],
)
def test_a_method_that_cannot_be_read_is_named(method: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_method(method)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("ppo", "ppo: a learned value head"),
        ("rloo:baseline=critic", "a learned value head"),
        ("bpo-tree:schedule=value-oracle", "the value oracle"),
        ("bpo-split:roulette=2", "roulette: expected a probability"),
        ("rloo:allocation=spread", "the study must have all tasks: expected tasks=6, found 24"),
    ],
)
def test_methods_that_are_not_measured_are_named_before_anything_is(
    tmp_path: Path, method: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(Args(**{**TINY, "out": str(tmp_path / "start"), "algo": "sft", "sft_steps": 1}))
    trainer.run()
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({**TINY, "env_id": wordgame.ENV_ID, "eval_kwargs": []}))
    monkeypatch.setattr(Laboratory, "measure", None)
    study = VarianceStudy(
        checkpoint=str(tmp_path / "start" / "checkpoint"), config=str(config), methods=("rloo", method)
    )
    with pytest.raises(ValueError, match=message):
        run(study)
