from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import wordgame
from PIL import Image
from scipy.stats import binomtest

from bpo_ref.eval import Score, evaluate, make_env, results_table
from bpo_ref.experiments import plots
from bpo_ref.experiments.plots import COLOURS, algorithm_of, colours_of, gains, learning_curve, read_scores
from bpo_ref.presets import PRESETS
from sandboxgym.tree import Action, Context, Envs


def scored(successes: int, n: int) -> Score:
    return Score(successes, n, turns=3.0, tokens=9.0, invalid=0.25, by_type={})


@pytest.mark.parametrize(("successes", "n"), [(0, 10), (10, 10), (1, 1), (3, 10), (180, 256), (1, 1000)])
def test_interval_is_wilsons(successes: int, n: int) -> None:
    expected = binomtest(successes, n).proportion_ci(0.95, method="wilson")
    assert scored(successes, n).interval == pytest.approx((expected.low, expected.high), abs=1e-4)


class Talker:
    """Says one or two letters, or rarely nothing."""

    def __call__(self, contexts: Sequence[Context]) -> list[Action]:
        return [Action("ab"[: int(c.rng.choice(3, p=(0.05, 0.6, 0.35)))], tokens=2) for c in contexts]


@pytest.fixture
def envs() -> Iterator[Envs]:
    made = Envs(lambda: make_env(wordgame.ENV_ID, (), 10))
    yield made
    made.close()


def test_the_panel_is_the_first_tasks_with_fixed_seeds(envs: Envs) -> None:
    score = evaluate(Talker(), envs, 60)
    assert score == evaluate(Talker(), envs, 60)
    assert score != evaluate(Talker(), envs, 60, seed=(1,))
    assert 0 < score.successes < score.n == 60
    assert score.by_type.keys() == {"even", "odd"}
    assert sum(n for _, n in score.by_type.values()) == 60
    assert sum(won for won, _ in score.by_type.values()) == score.successes
    assert score.tokens == pytest.approx(2 * score.turns)
    assert 0 < score.invalid < 0.2


def test_a_panel_shared_by_processes_is_the_whole_panel(envs: Envs) -> None:
    collected: list[object] = []

    def gather(outcomes: list[object]) -> list[object]:
        collected.extend(outcomes)
        return collected

    for rank in range(3):
        score = evaluate(Talker(), envs, 20, part=(rank, 3), gather=gather)
    assert score == evaluate(Talker(), envs, 20)


def test_environment_arguments_are_written_as_everywhere() -> None:
    env = make_env("toys/Corridor-v0", ["length=3"], 7)
    assert env.unwrapped.length == 3
    assert env.spec is not None and env.spec.max_episode_steps == 7
    with pytest.raises(ValueError, match=r"NAME=VALUE.*length"):
        make_env("toys/Corridor-v0", ["length"], 7)


def test_results_table_has_a_line_a_policy() -> None:
    lines = results_table({"before": scored(1, 4), "after": scored(3, 4)}).splitlines()
    assert len(lines) == 4
    assert lines[3].startswith("| after | 75.0% (3/4) | 30.1% to 95.4% | 3.0 | 25.0% |")


def write_run(folder: Path, algo: str, successes: Sequence[float]) -> Path:
    folder.mkdir()
    names = ["untrained", "sft", *(f"{algo}@{10 * (i + 1)}" for i in range(len(successes) - 1))]
    records = [
        {"step": i, "name": name, "tokens": 100 * max(0, i - 1), "success": success}
        for i, (name, success) in enumerate(zip(names, [0.0, *successes]))
    ]
    (folder / "scores.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_scores_start_where_reinforcement_learning_does(tmp_path: Path) -> None:
    records = read_scores(write_run(tmp_path / "run", "bpo", [0.4, 0.5, 0.6]))
    assert [(record["update"], record["success"]) for record in records] == [(0, 0.4), (10, 0.5), (20, 0.6)]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are drawn."""
    figures: list[Any] = []
    monkeypatch.setattr(plots.plt, "close", figures.append)
    return figures


def words(figure: Any) -> str:
    """All that is written on a picture."""
    return " | ".join(text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text")))


def test_learning_curve_of_two_algorithms_and_two_seeds(tmp_path: Path, drawn: list[Any]) -> None:
    runs = [
        write_run(tmp_path / f"{algo}-{seed}", algo, [0.4, 0.5 + 0.1 * seed, 0.6, *([0.7] * seed)])
        for algo in ("bpo", "rloo")
        for seed in (0, 1)
    ]
    learning_curve(runs, tmp_path / "curve.png")
    with Image.open(tmp_path / "curve.png") as image:
        assert image.format == "PNG"
        assert image.size == (1380, 480)
        assert len(image.convert("RGB").getcolors(10**6)) > 10
    curves, ends = drawn[0].axes
    assert {line.get_color() for line in curves.lines} == {COLOURS["bpo"], COLOURS["rloo"]}
    assert "success on the evaluation set" in words(drawn[0]) and "mean ± standard error" in words(drawn[0])
    assert [label.get_text() for label in ends.get_yticklabels()] == ["bpo (2)", "rloo (2)"]


def test_the_curve_of_one_run_has_the_interval_of_every_evaluation(tmp_path: Path, drawn: list[Any]) -> None:
    run = write_run(tmp_path / "bpo-seed0", "bpo", [0.25, 0.5])
    records = [json.loads(line) for line in (run / "scores.jsonl").read_text().splitlines()]
    (run / "scores.jsonl").write_text(
        "".join(json.dumps({**record, "outcomes": [0] * 100}) + "\n" for record in records)
    )
    args = {"env_id": "sandboxgym/ALFWorld-v0", "env_kwargs": ["games=a"], "eval_kwargs": ["games=b"]}
    (run / "results.json").write_text(json.dumps({"args": args}))
    learning_curve([run], tmp_path / "curve.png")
    (axis,) = drawn[0].axes
    (bars,) = [bars for bars in axis.containers if bars.has_yerr]
    (low, high) = bars.lines[2][0].get_segments()[0][:, 1]
    assert (low, high) == pytest.approx(tuple(binomtest(25, 100).proportion_ci(0.95, method="wilson")), abs=1e-3)
    assert "95 % interval of an evaluation" in words(drawn[0])
    assert axis.get_ylabel() == "success on the held-out games"
    assert axis.get_xlabel() == "generated tokens since the supervised start"


def test_gains_are_drawn_where_they_are(tmp_path: Path, drawn: list[Any]) -> None:
    ends = {("bpo", 0): 0.7, ("bpo", 1): 0.5, ("rloo", 0): 0.3}
    runs = [write_run(tmp_path / f"{label}-seed{n}", "bpo", [0.4, 0.9, end]) for (label, n), end in ends.items()]
    gains(runs, tmp_path / "gains.png")
    (axis,) = drawn[0].axes
    shown = [line for line in axis.lines if line.get_label() == "_run"]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in shown] == [
        (pytest.approx(x), y) for x, y in ((0.3, 0), (0.1, 0), (-0.1, 1))
    ]
    assert [line.get_color() for line in shown] == [COLOURS["bpo"], COLOURS["bpo"], COLOURS["rloo"]]
    shapes = [line.get_marker() for line in shown]
    assert shapes[0] == shapes[2] != shapes[1]  # the seed's
    means = [bars.lines[0].get_xdata()[0] for bars in axis.containers if len(bars.lines[0].get_xdata())]
    assert means == pytest.approx([0.2, -0.1])
    assert [label.get_text() for label in axis.get_yticklabels()] == ["bpo", "rloo"]
    assert axis.get_xlabel() == "final minus initial success rate on the evaluation set"
    assert "mean ± standard error" in words(drawn[0])
    assert (tmp_path / "gains.png").stat().st_size > 1000


def test_labels_of_gains_do_not_overlap_beside_long_names(tmp_path: Path, drawn: list[Any]) -> None:
    ends = {("bpo-paper-entropy-online", 0): 0.318, ("bpo-tree-root", 1): 0.467, ("bpo-tree-root", 2): 0.44}
    runs = [write_run(tmp_path / f"{label}-seed{n}", "bpo", [0.4, end]) for (label, n), end in ends.items()]
    gains(runs, tmp_path / "gains.png")
    (axis,) = drawn[0].axes
    drawn[0].canvas.draw()
    low, high = axis.get_xlim()
    boxes = [
        label.get_window_extent()
        for label, place in zip(axis.get_xticklabels(), axis.get_xticks())
        if low <= place <= high
    ]
    assert len(boxes) >= 3
    assert all(left.x1 + 3 < right.x0 for left, right in pairwise(boxes))


def test_every_algorithm_has_a_colour_of_its_own() -> None:
    assert set(COLOURS) == set(PRESETS)
    assert len(set(COLOURS.values())) == len(COLOURS)
    own = {name: name for name in COLOURS}
    assert {name: algorithm_of(name) for name in COLOURS} == own
    assert {name: algorithm_of(f"{name}-K4") for name in COLOURS} == own
    assert {name: algorithm_of(f"{name}:roots=8") for name in COLOURS} == own
    assert algorithm_of("bpo-split:baseline=pooled,roulette=0.5") == "bpo"
    assert algorithm_of("grpoesque") == algorithm_of("mine") == ""


def test_a_label_that_names_no_algorithm_has_a_colour_that_none_has() -> None:
    found = colours_of(["mine", "grpo", "theirs", "grpo-half"])
    assert found["grpo"] == found["grpo-half"] == COLOURS["grpo"]
    assert len(set(found.values())) == 3 and found["mine"] not in COLOURS.values()


def test_two_variants_of_an_algorithm_are_told_apart_by_their_lines(tmp_path: Path, drawn: list[Any]) -> None:
    runs = [write_run(tmp_path / f"{label}-seed0", "bpo", [0.4, 0.5]) for label in ("bpo-paper", "bpo-paper-kl0")]
    learning_curve(runs, tmp_path / "curve.png")
    lines = [line for line in drawn[0].axes[0].lines if len(line.get_xdata())]
    assert len({line.get_color() for line in lines}) == 1 and len({line.get_linestyle() for line in lines}) == 2


def test_learning_curve_of_a_run_that_only_learned_from_demonstrations(tmp_path: Path) -> None:
    learning_curve([write_run(tmp_path / "sft", "sft", [0.4])], tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 1000


@pytest.mark.parametrize("kind", ["curves", "gains"])
def test_runs_without_evaluations_are_left_out_and_only_such_runs_are_refused(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "scores.jsonl").touch()
    done, out = write_run(tmp_path / "bpo-seed0", "bpo", [0.4, 0.5]), tmp_path / "plot.png"
    plots.PLOTS[kind]([tmp_path / "new", done], out, "success")
    assert out.stat().st_size > 1000
    for folder, said in (("new", "evalu.*found none"), ("nowhere", "No such file")):
        monkeypatch.setattr("sys.argv", ["plots", "--plot", kind, "--out", str(out), str(tmp_path / folder)])
        with pytest.raises(SystemExit, match="1"):
            plots.main()
        told = capsys.readouterr().err
        assert re.search(said, told) and told.count("\n") == 1
