"""A run that is killed within an update continues in it, with the numbers of an undisturbed run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import TINY, _signals, assert_same_weights, metrics, trained  # noqa: F401 - a fixture
from wordgame import WordGame

from bpo_ref.learning.checkpoint import CheckpointError
from bpo_ref.running import journals
from bpo_ref.sampling.policy import ChatPolicy
from bpo_ref.train import Trainer
from sandboxgym.tree.journal import Journal

OPTIONS: dict[str, Any] = {
    "sft_steps": 1, "updates": 3, "eval_untrained": False, "eval_every": 100, "eval_episodes": 2, "trackers": ()
}  # fmt: skip


class Killed(BaseException):
    """The process ends here."""


@pytest.fixture
def killed_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Ends the process, so to speak, at the policy's N-th decision; None: never."""
    decide = ChatPolicy.__call__

    def set_limit(limit: int | None) -> None:
        calls: list[None] = []

        def counted(self: ChatPolicy, contexts: Any) -> Any:
            calls.append(None)
            if limit is not None and len(calls) > limit:
                raise Killed
            return decide(self, contexts)

        monkeypatch.setattr(ChatPolicy, "__call__", counted)

    return set_limit


@pytest.mark.parametrize(
    ("journal", "places"), [("exact", {}), ("quick", {}), ("exact", {"envs": "process", "env_workers": 1})]
)
def test_a_run_killed_within_an_update_continues_in_it(
    tmp_path: Path,
    journal: str,
    places: dict[str, Any],
    killed_after: Callable[[int | None], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {**OPTIONS, "journal": journal, **places}
    trained(tmp_path / "whole", **{**OPTIONS, "journal": "off"})
    assert not (tmp_path / "whole" / "inflight").exists()
    out = tmp_path / "killed"
    for limit in (7, 7, 8):  # the first dies in the first update, after SFT and its evaluation
        killed_after(limit)
        with pytest.raises(Killed):
            trained(out, **options, resume=out.exists())
        assert list((out / "inflight").iterdir())
    killed_after(None)
    steps: list[str] = []
    step = WordGame.step
    monkeypatch.setattr(WordGame, "step", lambda env, action: steps.append(action) or step(env, action))
    trainer = trained(out, **options, resume=True)
    assert places or len(steps) < trainer.session.counters["env_steps"]
    assert not (out / "inflight").exists()
    mine, theirs = ([line for line in metrics(each) if "update/loss" in line] for each in (out, tmp_path / "whole"))
    if journal == "exact":
        assert mine == theirs
        assert_same_weights(out, tmp_path / "whole")
    else:  # the same actions, but a conversation that is read again may be rounded otherwise
        totals = [name for name in mine[0] if name.startswith("total/")]
        assert len(totals) >= 3 and [mine[0][name] for name in totals] == [theirs[0][name] for name in totals]
        assert mine[0]["update/loss"] == pytest.approx(theirs[0]["update/loss"], rel=1e-3, abs=1e-5)


def test_a_journal_with_other_settings_is_refused_and_one_of_other_weights_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = {"settings": "a", "weights": "b"}
    journals.opened(tmp_path, head, (0, 2, 5), part=0, recall=False).close()
    with pytest.raises(CheckpointError, match="begun with other settings than the checkpoint's"):
        journals.opened(tmp_path, {**head, "settings": "other"}, (0, 2, 5), part=0, recall=False)
    journals.opened(tmp_path, {**head, "weights": "other"}, (0, 2, 5), part=0, recall=False).close()
    assert "begins anew" in caplog.text
    # the rest of a run of more processes, which has the first weights, does not end the journal of the second ones
    journals.opened(tmp_path, head, (0, 2, 5), part=7, recall=False).close()
    again = journals.opened(tmp_path, {**head, "weights": "other"}, (0, 2, 5), part=0, recall=False)
    again.note("a result", value=lambda: 1)
    again.flush()
    again.close()
    assert journals.opened(tmp_path, {**head, "weights": "other"}, (0, 2, 5), part=0, recall=False).found == 1
    with pytest.raises(CheckpointError):
        journals.opened(tmp_path, {**head, "settings": "c", "weights": "other"}, (0, 2, 5), part=1, recall=False)


def test_journals_are_kept_until_a_checkpoint_has_their_update(tmp_path: Path) -> None:
    for step in (3, 4, 5):
        journals.opened(tmp_path, {}, (0, 2, step), part=0, recall=False).close()
    journals.forget(tmp_path, before=5)
    assert [path.name for path in (tmp_path / "inflight").iterdir()] == ["update-5.0"]
    journals.forget(tmp_path, before=6)
    assert not (tmp_path / "inflight").exists()
    journals.forget(tmp_path, before=7)


def test_they_are_removed_before_other_processes_open_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the folder goes while another process makes its file in it."""
    trainer = Trainer(_args(tmp_path, sft_steps=0))
    session, kept = trainer.session, []
    session.stage, session.step = "rl", 1
    journals.opened(tmp_path, {}, (0, 2, 0), part=1, recall=False).close()
    monkeypatch.setattr(
        session.accelerator, "wait_for_everyone", lambda: kept.append((tmp_path / journals.FOLDER).exists())
    )
    session.save(tmp_path / "checkpoint")
    session.close()
    assert kept == [False]


def test_it_can_be_turned_off(tmp_path: Path) -> None:
    trainer = Trainer(_args(tmp_path / "off", journal="off"))
    with trainer.session.journal((0, 2, 0)) as journal:
        assert journal is None
    trainer.session.close()
    trainer = Trainer(_args(tmp_path / "on"))
    with pytest.raises(Killed), trainer.session.journal((0, 2, 0)) as journal:
        assert isinstance(journal, Journal) and journal._file is not None
        raise Killed
    assert journal._file is None
    trainer.session.close()


def _args(out: Path, **options: Any) -> Any:
    from bpo_ref.args import Args

    return Args(**{**TINY, **OPTIONS, "sft_steps": 0, "out": str(out), **options})
