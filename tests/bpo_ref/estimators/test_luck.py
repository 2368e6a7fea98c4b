"""The luck that look-ahead subtracts: errors of `experiments.luck`, and its arithmetic on made-up rollouts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bpo_ref.args import Args, resolved
from bpo_ref.experiments import luck
from bpo_ref.experiments.variance import VarianceStudy


def path(reward: float, *controls: float) -> Any:
    return SimpleNamespace(total_reward=reward, edges=[SimpleNamespace(control=control) for control in controls])


def test_luck_of_later_decisions_is_subtracted_and_that_of_the_first_stays() -> None:
    tree = SimpleNamespace(paths=[path(1.0, 0.3, 0.5), path(0.0, -0.3, -0.5)])
    study = VarianceStudy(checkpoint="", config="", pilot=0, repeats=1)
    laboratory: Any = SimpleNamespace(study=study, tasks=[0], _batch=lambda *_: [tree])
    args = resolved(Args(algo="rloo-pooled", lookahead=True))
    plain, fair, own = luck.parts(laboratory, args)
    assert (plain, fair, own) == pytest.approx((0.5, 0.0, 0.09))


@pytest.mark.parametrize("method", ["bpo:lookahead=true", "rloo-pooled", "rloo-pooled:lookahead=true,gamma=0.9"])
def test_forks_and_methods_without_look_ahead_are_refused(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    algo, _, options = method.partition(":")
    args = resolved(
        Args(algo=algo, lookahead="lookahead" in options, gamma=0.9 if "gamma" in options else 1.0)  # type: ignore[arg-type]
    )
    monkeypatch.setattr(luck, "Laboratory", lambda study: SimpleNamespace(settings=lambda method: args))
    with pytest.raises(ValueError, match="expected schedule=none, lookahead=true and gamma=1"):
        luck.run(VarianceStudy(checkpoint="", config="", methods=(method,)))
