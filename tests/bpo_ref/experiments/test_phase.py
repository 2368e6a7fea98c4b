"""The phase diagram: its chain, its formula against closed forms and measurements, its games, its committed data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_presets import chain_mdp, decided

from bpo_ref.experiments.phase import diagram, household
from bpo_ref.experiments.phase.__main__ import main as phase_command
from bpo_ref.experiments.phase.chain import Chain, predicted
from bpo_ref.experiments.phase.measure import (
    COARSE,
    DECISIONS,
    FIRSTS,
    METHODS,
    QUALITIES,
    formula,
    measured,
    of_chain,
    of_games,
    read_cells,
    settings,
)
from bpo_ref.experiments.phase.placing import DiagramPlace, placed
from bpo_ref.experiments.variance import Estimate, VarianceStudy
from sandboxgym.tree import Schedule, rollout

DOCS = Path(__file__).parents[3] / "docs"
UNIFORM = Chain(0, length=12, need=7)


def test_the_formula_gives_the_theory_page_its_numbers() -> None:
    """The first two rows of the table on docs/theory.md: RLOO, and RLOO with exact values."""
    assert predicted(UNIFORM, settings("rloo", 12), 1.0).noise == pytest.approx(0.2034, abs=5e-5)
    assert predicted(UNIFORM, settings("rloo-pooled", 12), 1.0).noise == pytest.approx(0.1188, abs=5e-5)


def test_what_a_chain_decides_is_that_of_the_mdp_that_it_is() -> None:
    variance, scores = decided(chain_mdp(12, 0.5, 7))
    assert (UNIFORM.occupancy[:-1] * UNIFORM.decided).sum(axis=1) == pytest.approx(variance)
    assert UNIFORM.scores == pytest.approx(scores)
    assert variance.sum() == pytest.approx(UNIFORM.spread)


@pytest.mark.parametrize("chain", [UNIFORM, *map(Chain, FIRSTS), *map(household.chain_of, DECISIONS)])
def test_independent_rollouts_cost_what_the_two_knobs_say(chain: Chain) -> None:
    for quality in QUALITIES:
        error = (chain.occupancy * chain.wrong(quality)).sum(axis=1)[:-1] @ chain.scores
        nothing = (chain.occupancy * (chain.values - chain.mean) ** 2).sum(axis=1)[:-1] @ chain.scores
        assert error == pytest.approx((1 - quality) * nothing)
        expected = 7 / 8 * (1 - quality * (1 - chain.lateness))
        assert formula(chain, "rloo-pooled", quality) == pytest.approx(expected)
        assert formula(chain, "rloo", quality) == 1.0


def test_splits_that_never_come_cost_what_independent_rollouts_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bpo_ref.experiments.phase.chain._splits", lambda *args: False)
    monkeypatch.setattr("bpo_ref.experiments.phase.chain._survival", lambda *args: 1.0)
    for quality in QUALITIES:
        tree, flat = (predicted(Chain(3), settings(method, 12), quality) for method in ("bpo", "rloo-pooled"))
        assert tree.noise == pytest.approx(2 * flat.noise)  # of four rollouts, not eight
        assert tree.tokens == pytest.approx(flat.tokens / 2)


@pytest.mark.parametrize(("first", "quality", "trees"), [(6, 1.0, 60), (3, 0.0, 20)])
def test_the_trainers_trees_cost_what_the_formula_says(first: int, quality: float, trees: int) -> None:
    world = of_chain(first, quality, trees)
    cells = {cell.method: cell for cell in measured("chain", first, quality, world, seed=7)}
    for method in METHODS:
        args = settings(method, 12)
        assert cells[method].tokens == pytest.approx(predicted(Chain(first), args, quality).tokens, rel=0.04)
        assert cells[method].cost.value == pytest.approx(cells[method].formula, rel=0.2)
        assert cells[method].scale.value == pytest.approx(1.0, abs=0.15)


def test_who_takes_the_right_object_wins_and_keys_are_wrong_as_often_as_they_should_be() -> None:
    world = of_games(5, 0.25, 8)
    args = settings("rloo-pooled", household.TURNS)
    trees = rollout(world.envs, world.policy, Schedule(8), tasks=world.tasks, seed=(0,))
    world.envs.close()
    wrong = []
    for path in (path for tree in trees for path in tree.paths):
        chosen = path.edges[5].action.memory[1]
        assert len(path.edges) == household.TURNS and path.total_reward == chosen
        truth = (household.NOTHING, household.HELD)[chosen]
        wrong += [edge.child.key != truth for edge in path.edges[5:-1]]
        assert all(edge.child.key == household.NOTHING for edge in path.edges[:5])
    # one half of the keys are drawn anew, which agree with the truth in a share .3² + .7² of paths
    assert np.mean(wrong) == pytest.approx(0.5 * (1 - 0.3**2 - 0.7**2), abs=0.06)
    values = world.memory(args).values
    assert values.value((household.HELD, 4)) == pytest.approx(0.3 + 0.5 * 0.7, abs=1e-6)
    assert values.value((household.NOTHING, 4)) == pytest.approx(0.3 - 0.5 * 0.3, abs=1e-6)


def test_a_place_follows_from_the_three_squared_errors() -> None:
    a, c, d = (np.full((2, 5), value) for value in (8.0, 5.0, 3.0))
    found = placed(a, c, d, 0.5, 7.0, rollouts=8, study=VarianceStudy("", "", bootstrap=50))
    assert found.lateness.value == pytest.approx(3 / 7)
    assert found.quality.value == pytest.approx((7 - 5) / (7 - 3))
    assert found.pooled.value == pytest.approx(5 / 8)
    expected = 7 / 8 * (1 - found.quality.value * (1 - found.lateness.value))
    assert found.pooled.value == pytest.approx(expected)  # what the diagram predicts for rloo-pooled


def test_a_policy_of_ones_own_is_placed_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = DiagramPlace(Estimate(0.5, 0.4, 0.6), Estimate(0.45, 0.2, 0.7), Estimate(0.68, 0.5, 0.8), 0.31, 7.4)
    studies = []
    monkeypatch.setattr("bpo_ref.experiments.phase.placing.place", lambda study: studies.append(study) or found)
    command = ["phase", "--docs", str(tmp_path), "place", "mine", "--checkpoint", "c", "--config", "f", "--tasks", "5"]
    monkeypatch.setattr("sys.argv", command)
    phase_command()
    said = capsys.readouterr().out
    assert "mine: L = 0.50 [0.40, 0.60], ρ = 0.45 [0.20, 0.70] (90 % intervals over 5 tasks)" in said
    assert f"`rloo-pooled` {7 / 8 * (1 - 0.45 * 0.5):.2f}" in said
    assert studies[0].tasks == 5 and not list(tmp_path.iterdir())


def test_a_row_of_the_page_is_printed_from_its_data(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["phase", "place", "ALFWorld", "--checkpoint", "none", "--config", "none"])
    phase_command()
    assert "ALFWorld is a row of the page already; give another policy another name" in capsys.readouterr().out


@pytest.mark.parametrize("world", ["chain", "alfworld"])
def test_every_cell_is_committed_with_the_present_formula(world: str) -> None:
    cells = read_cells(DOCS / diagram.FOLDER / f"{world}.jsonl")
    firsts, qualities = (FIRSTS, QUALITIES) if world == "chain" else (DECISIONS, COARSE)
    wanted = {(first, quality, method) for first in firsts for quality in qualities for method in METHODS}
    assert {(cell.first, cell.quality, cell.method) for cell in cells} == wanted and len(cells) == len(wanted)
    for cell in cells:
        chain = Chain(cell.first) if world == "chain" else household.chain_of(cell.first)
        assert cell.formula == pytest.approx(formula(chain, cell.method, cell.quality), rel=1e-3)
        assert cell.lateness == pytest.approx(chain.lateness, rel=1e-3)
    assert (DOCS / diagram.PICTURE).exists()


def test_between_cells_costs_are_interpolated() -> None:
    late, costs = diagram.grid("bpo")
    assert diagram.cost_at("bpo", late[2], 0.5) == pytest.approx(costs[5, 2])
    assert diagram.cost_at("bpo", 0.0, 1.0) == pytest.approx(costs[-1, 0])
    middle = diagram.cost_at("rloo-pooled", 0.5, 0.45)
    assert middle == pytest.approx(7 / 8 * (1 - 0.45 * 0.5), rel=0.01)
