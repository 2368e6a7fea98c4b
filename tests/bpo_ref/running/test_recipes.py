"""docs/recipes.md: the trainer accepts every command line of the page, with the settings that its row states."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from bpo_ref.args import Args, parse_args, resolved

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "recipes.md").read_text()
FLAGS = dict(re.findall(r"^\| ([^|`]+) \| `(--algo [^`]+)` \|", PAGE, re.MULTILINE))
OPTIONS = re.findall(r"^\| `(--[^`]+)` \|", PAGE, re.MULTILINE)
CONFIGS = [ROOT / "bpo_ref" / "configs" / f"alfworld-{name}.yaml" for name in ("tiny", "qwen2.5-7b")]


def settled(words: str, config: Path = CONFIGS[0]) -> Args:
    return resolved(parse_args(["--config", str(config), *shlex.split(words)]))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("recipe", FLAGS)
def test_the_flags_of_a_recipe_are_settings_and_fit_the_batch(recipe: str, config: Path) -> None:
    args = settled(FLAGS[recipe], config)
    assert args.minibatches and args.prompts % args.minibatches == 0


@pytest.mark.parametrize("option", OPTIONS)
def test_the_other_options_are_settings(option: str) -> None:
    plain = "--algo grpo" if "--algo" not in option else " ".join(option.split()[:2])
    assert settled(f"{plain} {option}") != settled(plain)


def test_the_commands_of_the_page_are_parsed() -> None:
    commands = re.findall(r"^python bpo_ref/train\.py (.+)$", PAGE, re.MULTILINE)
    assert commands
    for command in commands:
        words = shlex.split(command)
        words[words.index("--config") + 1] = str(ROOT / words[words.index("--config") + 1])
        resolved(parse_args(words))


def test_every_recipe_is_there_and_none_is_another_ones() -> None:
    expected = {"GRPO (DeepSeekMath)", "Dr. GRPO", "DAPO", "GSPO", "RLOO (TRL)", "PPO (verl)", "VinePPO", "GiGPO"}
    assert FLAGS.keys() >= expected | {"BPO as printed"} and len(OPTIONS) >= 4
    assert len({settled(words) for words in FLAGS.values()}) == len(FLAGS)


def test_recipes_are_what_their_rows_say() -> None:
    assert settled(FLAGS["BPO as printed"]).kl == 0.05
    gigpo = settled(FLAGS["GiGPO"])
    assert (gigpo.credit, gigpo.omega, gigpo.omega_gamma, gigpo.roots) == ("gigpo", 1.0, 0.95, 8)
    ppo = settled(FLAGS["PPO (verl)"])
    assert (ppo.gae_steps, ppo.gae_lam, ppo.epochs, ppo.minibatches, ppo.dual_clip) == ("token", 1.0, 1, 4, 3.0)
    vine = settled(FLAGS["VinePPO"])
    assert (vine.mc_rollouts, vine.mc_turns, vine.epochs, vine.minibatches, vine.kl) == (9, 0, 2, 8, 1e-4)
    assert settled(FLAGS["VinePPO, cheaper"]).mc_turns == 2
    assert settled(FLAGS["RLOO (TRL)"]).kl_estimator == "k1"
