"""Masked episodes are excluded from the loss and from baselines, and counted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import (  # noqa: F401 - fixtures
    _signals,
    assert_same_weights,
    metrics,
    trained,
)
from wordgame import Masking, Perishing, WordGame

from bpo_ref.eval import evaluate
from bpo_ref.sampling.masks import end_counts, without_masked
from bpo_ref.session import TrainingFailed
from sandboxgym.tree import Action, Envs, ForkAt, rollout

ENV_ID = "wordgame:toys/Masking-v0"


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for owner, name in ((Masking, "fate"), (Masking, "suspected"), (Perishing, "fate")):
        monkeypatch.setattr(owner, name, vars(owner)[name])
    monkeypatch.setattr(Masking, "mark", True)
    yield


def doomed(env: WordGame, action: str) -> bool:
    """All of one task, and some paths of another; none at the root, whose forks are nobody's."""
    return (env.state[0] == 3 and env.state[1] == 1) or (
        env.state[0] == 1 and env.state[1] == 2 and len(action) % 3 == 0
    )


def seen(folder: Path) -> list[dict[str, float]]:
    """The log but for what is counted otherwise where environments raise, which captures nothing at a fatal step."""
    lost = (
        "rollout/prefilled_tokens",
        "rollout/reused_tokens",
        "rollout/snapshots",
        *(f"rollout/{name}" for name in ("env_failures", "dropped_paths", "masked", "sandbox_ended")),
        "eval/",
    )
    return [{k: v for k, v in line.items() if not k.startswith(lost)} for line in metrics(folder)]


@pytest.mark.parametrize("algo", ["bpo", "bpo-forest", "bpo-split", "grpo", "ppo", "rloo-key", "vineppo"])
def test_masked_episodes_are_learnt_from_as_if_they_had_never_been(tmp_path: Path, algo: Any) -> None:
    """The same happens to paths whose environments raise."""
    options: dict[str, Any] = {"algo": algo, "updates": 3, "sft_steps": 0, "eval_untrained": False, "eval_every": 9}
    Masking.fate = staticmethod(lambda env, action: "sandbox ended" if doomed(env, action) else "")
    trained(tmp_path / "masked", env_id=ENV_ID, **options)
    Perishing.fate = staticmethod(doomed)
    trained(tmp_path / "dropped", env_id="wordgame:toys/Perishing-v0", env_retries=1, **options)
    assert seen(tmp_path / "masked") == seen(tmp_path / "dropped")
    assert_same_weights(tmp_path / "masked", tmp_path / "dropped")
    mine = metrics(tmp_path / "masked")
    assert sum(line.get("rollout/masked", 0) for line in mine) > 0
    assert all(line["rollout/masked"] == line["rollout/sandbox_ended"] for line in mine if "rollout/masked" in line)


def test_a_verdict_alone_masks_nothing(tmp_path: Path) -> None:
    Masking.mark = False
    Masking.fate = staticmethod(lambda env, action: "tests fail" if doomed(env, action) else "")
    trained(tmp_path, env_id=ENV_ID, updates=1, sft_steps=0, eval_untrained=False)
    (line,) = (line for line in metrics(tmp_path) if "rollout/masked" in line)
    assert line["rollout/masked"] == line["rollout/infra_failures"] == line["rollout/sandbox_ended"] == 0
    assert line["rollout/dropped_paths"] == 0


def test_ends_are_counted_in_every_update_and_evaluation(tmp_path: Path) -> None:
    verdicts = {2: "sandbox ended", 3: "infra failure", 4: "needs network"}
    Masking.fate = staticmethod(lambda env, action: verdicts.get(env.state[0], "") if env.state[1] == 1 else "")
    Masking.suspected = staticmethod(lambda env: env.state[0] == 0)
    trainer = trained(
        tmp_path, algo="rloo", env_id=ENV_ID, updates=1, sft_steps=0, prompts=6, roots=2, eval_untrained=False
    )
    lines = metrics(tmp_path)
    (update,) = (line for line in lines if "rollout/masked" in line)
    expected = {"masked": 6, "infra_failures": 2, "sandbox_ended": 2, "suspicious": 2 / 12}
    assert {name: update[f"rollout/{name}"] for name in expected} == pytest.approx(expected)
    assert update["total/returns"] == 6
    evaluation = next(line for line in lines if "eval/success" in line)
    expected = {"masked": 3, "infra_failures": 1, "sandbox_ended": 1, "suspicious": 1 / 6}
    assert {name: evaluation[f"eval/{name}"] for name in expected} == pytest.approx(expected)
    (score,) = trainer.session.scores.values()
    assert score.ends == {"masked": 3, "infra_failures": 1, "sandbox_ended": 1, "suspicious": 1} and score.n == 6
    told = json.loads((tmp_path / "results.json").read_text())["scores"]["rloo@1"]
    assert told["ends"] == score.ends


def test_where_every_episode_is_masked_the_run_ends_and_says_why(tmp_path: Path) -> None:
    Masking.fate = staticmethod(lambda env, action: "" if action == "word" else "infra failure")  # the expert's
    with pytest.raises(TrainingFailed, match=r"all \d+ episodes .* masked \(infra failures: \d+, sandbox ended: 0\)"):
        trained(tmp_path, env_id=ENV_ID, sft_steps=0, eval_untrained=False)


def say(contexts: Any) -> list[Action]:
    return [Action("a" * int(context.rng.integers(1, 7)), data=None) for context in contexts]


def test_what_was_forked_off_a_masked_path_goes_with_it() -> None:
    Masking.fate = staticmethod(
        lambda env, action: "sandbox ended" if env.state[0] == 1 and env.state[1] == 3 and len(action) > 3 else ""
    )
    with Envs(Masking) as envs:
        trees = rollout(envs, say, ForkAt([1, 2], width=3, roots=2), tasks=[0, 1, 2], seed=(5,))
        counts = end_counts(trees)
        masked = {path.key for path in trees[1].paths if path.edges[-1].masked}
        assert masked and counts["masked"] == len(masked) == counts["sandbox_ended"]
        gone = {key for one in masked for key in trees[1].offspring(one)}
        before = {path.key for path in trees[1].paths}
        kept = without_masked(trees)
        assert (kept[0].index, kept[-1].index) == (0, 2)
        left = {path.key for tree in kept if tree.index == 1 for path in tree.paths}
        assert left == before - gone
        for tree in kept:
            held = {id(edge) for edge in tree.edges()}
            nodes = [tree.root, *(edge.child for edge in tree.edges())]
            assert {id(edge) for node in nodes for edge in node.children} == held
            assert not end_counts([tree])["masked"]


def test_an_evaluation_counts_masked_episodes_as_not_solved() -> None:
    Masking.fate = staticmethod(lambda env, action: "infra failure" if env.state[0] == 2 else "")
    with Envs(Masking) as envs:
        score = evaluate(lambda contexts: [Action("word") for _ in contexts], envs, 6)
    assert score.outcomes == (1, 1, 0, 1, 1, 1) and score.ends["infra_failures"] == score.ends["masked"] == 1
