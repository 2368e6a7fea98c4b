"""Failures in the middle of a run: environments, numbers, memory, processes."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from tiny_runs import (  # noqa: F401 - fixtures
    ENVIRONMENT,
    TINY,
    TRAIN,
    _signals,
    assert_same_weights,
    config_file,
    finished,
    launcher,
    metrics,
    trained,
)
from wordgame import Perishing, Talkative, WordGame

from bpo_ref import supervised, train
from bpo_ref.args import Args
from bpo_ref.eval import evaluate
from bpo_ref.learning.checkpoint import load_checkpoint
from bpo_ref.sampling.env_source import ask, env_source
from bpo_ref.sampling.policy import collect_demonstrations
from bpo_ref.session import TrainingFailed, TrainingSession
from sandboxgym.sandbox.base import Limits, SandboxUnavailable
from sandboxgym.task_env import task_count
from sandboxgym.tree import Action, Envs
from sandboxgym.tree.lockstep import Lockstep
from sandboxgym.workers.env_host import CallTimedOut, FleetError, WorkerDied
from sandboxgym.workers.pool import PooledEnvs

FATES = "wordgame:toys/Perishing-v0"


@pytest.fixture
def perishing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[WordGame, str], bool]], None]]:
    """Decides on the fate."""
    yield lambda fate: monkeypatch.setattr(Perishing, "fate", staticmethod(fate))


def logged(folder: Path, name: str) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines if name in line]


# Environments.


@pytest.mark.parametrize("algo", ["ppo", "grpo", "bpo", "bpo-paper", "vineppo"])
def test_tasks_whose_beginning_is_too_long_are_left_out(tmp_path: Path, algo: Any) -> None:
    options = {"algo": algo, "updates": 3, "sft_steps": 0, "env_id": "wordgame:toys/Talkative-v0", "prompts": 6}
    trainer = trained(tmp_path, **options)
    assert logged(tmp_path, "rollout/too_long") == [2.0] * 3
    assert not any(logged(tmp_path, "rollout/env_failures"))
    scores = trainer.session.scores.values()
    assert scores and all(score.dropped == score.n // 3 for score in scores)


def test_where_every_beginning_is_too_long_the_run_says_what_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"updates": 3, "sft_steps": 0, "env_id": "wordgame:toys/Talkative-v0", "eval_untrained": False}
    monkeypatch.setattr(Talkative, "long", frozenset(range(6)))
    with pytest.raises(TrainingFailed, match=r"no room to act .* a larger --context"):
        trained(tmp_path, **options)


@pytest.mark.parametrize("algo", ["bpo", "bpo-forest", "bpo-paper", "bpo-split", "vineppo"])
def test_environments_that_die_by_chance_change_nothing(tmp_path: Path, algo: Any, perishing: Any) -> None:
    options = {"algo": algo, "updates": 2, "sft_steps": 0, "env_id": FATES}
    perishing(lambda env, action: False)
    trained(tmp_path / "whole", **options)
    steps = iter(range(10**9))
    perishing(lambda env, action: next(steps) % 50 == 30)
    trained(tmp_path / "perishing", **options)
    assert sum(logged(tmp_path / "perishing", "rollout/env_failures")) > 0
    assert sum(logged(tmp_path / "perishing", "rollout/dropped_paths")) == 0
    mine, theirs = metrics(tmp_path / "perishing"), metrics(tmp_path / "whole")
    for line in (*mine, *theirs):
        line.pop("rollout/env_failures", None)
    assert mine == theirs
    assert_same_weights(tmp_path / "perishing", tmp_path / "whole")


@pytest.mark.parametrize("algo", ["bpo", "bpo-paper", "vineppo"])
def test_a_run_goes_on_without_what_its_deadline_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algo: Any
) -> None:
    """All forks of an update, which come last; then everything, with which it ends."""
    monkeypatch.setattr(Lockstep, "passed", lambda self: bool(self.deadline and self.cohorts and not self.live_paths()))
    options: dict[str, Any] = {"algo": algo, "sft_steps": 0, "env_id": FATES, "rollout_timeout": 600.0, "updates": 2}
    trainer = trained(tmp_path, **options)
    assert trainer.session.step == 2 and max(logged(tmp_path, "rollout/dropped_paths")) > 0
    assert all(torch.isfinite(value).all() for value in trainer.session.policy.state_dict().values())
    monkeypatch.setattr(Lockstep, "passed", lambda self: bool(self.deadline))
    with pytest.raises(TrainingFailed, match=r"took longer than 600.0 s"):
        trained(tmp_path / "other", **options)


@pytest.mark.parametrize(
    "options",
    [
        *({"algo": algo} for algo in ("ppo", "rloo", "rloo-key", "vineppo", "bpo", "bpo-forest", "bpo-split")),
        {"algo": "grpo", "kl": 0.1},
        {"algo": "bpo-paper", "schedule": "value-oracle"},
    ],
    ids=lambda options: options["algo"],
)
def test_paths_that_cannot_be_saved_are_left_out(tmp_path: Path, options: dict[str, Any], perishing: Any) -> None:
    """Some of a group, or all of a task; what is learnt stays finite."""
    perishing(lambda env, action: env.state[0] == 3 or (len(action) == 3 and env.state[1] == 2))
    trainer = trained(tmp_path, updates=2, sft_steps=0, env_id=FATES, minibatches=2, env_retries=1, **options)
    assert trainer.session.step == 2
    assert sum(logged(tmp_path, "rollout/dropped_paths")) > 0
    assert all(torch.isfinite(value).all() for value in trainer.session.policy.state_dict().values())
    assert load_checkpoint(tmp_path / "checkpoint")["step"] == 2


def test_where_every_environment_dies_the_run_ends_and_says_why(tmp_path: Path, perishing: Any) -> None:
    perishing(lambda env, action: action != "word")  # the expert's
    with pytest.raises(SystemExit, match=r"every environment of .* failed: ConnectionError: the sandbox is gone"):
        train.main(["--config", str(config_file(tmp_path, env_id=FATES, sft_steps=0, eval_untrained=False)),
                    "--out", str(tmp_path)])  # fmt: skip


@pytest.mark.parametrize(("retries", "kept"), [(0, None), (1, 3), (2, 4)])
def test_an_expert_episode_is_played_again(perishing: Any, retries: int, kept: int | None) -> None:
    lost = iter((False, False, True, True))  # in its first turns
    perishing(lambda env, action: env.state[1] == 0 and next(lost, False))
    with Envs(Perishing) as envs:
        if kept is None:
            with pytest.raises(ConnectionError, match="the sandbox is gone"):
                collect_demonstrations(envs, 4, noise=0.0, seed=0, retries=retries)
        else:
            assert len(collect_demonstrations(envs, 4, noise=0.0, seed=0, retries=retries)) == kept


@pytest.mark.parametrize("where", ["step", "reset", "make"])
def test_where_every_environment_fails_before_training_the_run_ends_and_says_why(
    tmp_path: Path, perishing: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def gone(*_: Any, **__: Any) -> Any:
        raise ConnectionError("the sandbox is gone")

    perishing(lambda env, action: True)
    said = "every environment of .* failed: ConnectionError: the sandbox is gone .the first of "
    if where == "reset":
        monkeypatch.setattr(Perishing, "reset", gone)
        said = "Perishing-v0 cannot be reset: ConnectionError: the sandbox is gone "
    elif where == "make":  # once the first one has failed
        discard = Envs.discard
        monkeypatch.setattr(Envs, "discard", lambda envs, env: (discard(envs, env), setattr(envs, "_make", gone)))
    closed: list[Any] = []
    close = Envs.close
    monkeypatch.setattr(Envs, "close", lambda envs: (closed.append(envs), close(envs)))
    with pytest.raises(SystemExit, match=rf"^error: .*{said}.*env-retries 0 shows where"):
        train.main(["--config", str(config_file(tmp_path, env_id=FATES)), "--out", str(tmp_path / "run")])
    assert len(set(map(id, closed))) == 2  # of training and of evaluation


def test_without_retries_a_dead_environment_ends_the_run(tmp_path: Path, perishing: Any) -> None:
    perishing(lambda env, action: True)
    with pytest.raises(ConnectionError, match="the sandbox is gone"):
        trained(tmp_path, env_id=FATES, sft_steps=0, eval_untrained=False, env_retries=0)


@pytest.mark.slow
def test_workers_killed_right_after_a_run_opened_its_environments_change_nothing(
    finished: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    args = {**TINY, "envs": "process", "env_workers": 2, "env_retries": 0, "out": str(tmp_path)}
    trainer = train.Trainer(Args(**args))
    opened = [source for source in vars(trainer.session).values() if isinstance(source, PooledEnvs)]
    pids = [shared.worker.pid for source in opened for shared in source._slots]
    assert len(pids) == 4 and all(pids)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    trainer.run()
    assert metrics(tmp_path) == metrics(finished)
    assert_same_weights(tmp_path, finished)


@pytest.fixture
def pooled() -> Iterator[PooledEnvs]:
    with PooledEnvs(WordGame, 2) as envs:
        yield envs


@pytest.mark.parametrize("known", [False, True], ids=["unnoticed", "noticed"])
def test_a_question_is_answered_by_an_environment_that_was_not_lost(pooled: PooledEnvs, known: bool) -> None:
    expected = ask(pooled, task_count)
    assert expected
    worker = pooled._slots[0].worker
    assert worker.pid
    os.kill(worker.pid, signal.SIGKILL)
    if known:
        worker.kill()
    assert ask(pooled, lambda env: env.num_tasks) == expected  # type: ignore[attr-defined]
    assert pooled._taken == [0, 0]


def test_a_question_that_ends_every_worker_is_given_up(pooled: PooledEnvs) -> None:
    asked = []

    def fatal(env: Any) -> None:
        asked.append(env)
        os.kill(env.worker.pid, signal.SIGKILL)
        env.reset()

    with pytest.raises(WorkerDied, match="killed by signal 9"):
        ask(pooled, fatal)
    assert len(set(map(id, asked))) == 3 and pooled._taken == [0, 0]


def test_an_error_in_a_question_is_the_askers(pooled: PooledEnvs) -> None:
    with pytest.raises(ZeroDivisionError):
        ask(pooled, lambda env: 1 // 0)
    assert pooled._taken == [0, 0] and sum(map(len, pooled._free)) == 1


def test_on_a_cluster_every_call_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr("sandboxgym.workers.fleet.RayEnvs", lambda *_, **options: made.append(options))
    options: dict[str, Any] = {"kwargs": (), "max_turns": 5, "place": "ray"}
    for env, timeout in (("ALFWorld", None), ("SWEBench", None), ("ALFWorld", 7.0), ("ALFWorld", 0.0)):
        env_source(f"sandboxgym/{env}-v0", timeout=timeout, **options)
    found = [(each["timeout"], each.get("reset_timeout")) for each in made]
    assert found == [(60.0, 600.0), (Limits().seconds + 2 * 1800.0 + 60.0,) * 2, (7.0, None), (None, None)]


@pytest.mark.parametrize("error", [WorkerDied("it was lost"), FleetError("no node"), CallTimedOut("it took long")])
def test_environments_that_are_lost_for_good_end_a_run_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def lost(self: train.Trainer) -> None:
        raise error

    monkeypatch.setattr(train.Trainer, "run", lost)
    with pytest.raises(SystemExit, match=f"^error: {error}$"):
        train.train(Args(**{**TINY, "out": str(tmp_path)}))


def test_an_episode_without_an_end_counts_as_not_solved(perishing: Any) -> None:
    def even(contexts: Any) -> list[Action]:
        return [Action("word") for _ in contexts]

    with Envs(Perishing) as envs:
        perishing(lambda env, action: env.state[0] in (1, 4))
        score = evaluate(even, envs, 6, retries=1)
        assert (score.successes, score.n, score.dropped) == (4, 6, 2)
        assert score.outcomes == (1, 0, 1, 1, 0, 1)
        assert (score.reward, score.turns) == (1.0, 4.0)  # of those that ended: a 0 is no reward of the others
        perishing(lambda env, action: True)
        with pytest.raises(RuntimeError, match="none of 6 episodes ended"):
            evaluate(even, envs, 6, retries=1)


# Numbers and memory.


def not_a_number(losses: torch.Tensor) -> torch.Tensor:
    return losses * torch.nan


def no_memory(losses: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory")


def no_memory_on_a_cpu(losses: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (not_a_number, r"gradient of rl step 4 has the norm nan.*try a smaller lr"),
        (no_memory, r"out of memory in rl step 4: smaller --micro-tokens"),
        (no_memory_on_a_cpu, r"out of memory in rl step 4: smaller --micro-tokens"),
    ],
)
def test_a_failing_update_tells_where_to_go_on(
    finished: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[torch.Tensor], torch.Tensor],
    message: str,
) -> None:
    original = train.policy_loss

    def failing(logps: torch.Tensor, batch: Any, args: Args, reference: Any = None) -> Any:
        losses, stats = original(logps, batch, args, reference)
        return (fault(losses) if sessions[0].step == 3 else losses), stats

    sessions: list[TrainingSession] = []
    with monkeypatch.context() as patch, pytest.raises(TrainingFailed, match=message) as error:
        patch.setattr(train, "policy_loss", failing)
        patch.setattr(TrainingSession, "catch_signals", lambda self: sessions.append(self))
        trained(tmp_path)
    assert f"what was learned up to rl step 2 is in {tmp_path / 'checkpoint'}" in str(error.value)
    trained(tmp_path, resume=True)
    assert metrics(tmp_path) == metrics(finished)
    assert_same_weights(tmp_path, finished)


def test_an_early_failure_says_that_nothing_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "supervised_step", lambda session, rows: no_memory(torch.zeros(1)))
    with pytest.raises(TrainingFailed, match=r"out of memory in sft step 1.*nothing was saved before"):
        trained(tmp_path)


def test_other_errors_are_not_dressed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("sizes of tensors must match")

    monkeypatch.setattr(supervised, "supervised_step", broken)
    with pytest.raises(RuntimeError, match="sizes of tensors must match"):
        trained(tmp_path)


# Processes.


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the ranks in /proc")
def test_a_killed_rank_ends_the_run_which_can_be_resumed(tmp_path: Path) -> None:
    config = config_file(tmp_path, updates=10_000, prompts=8, eval_every=10_000, save_every=1)
    command = [*launcher(TRAIN, 2)[1:], "--config", str(config), "--out", str(tmp_path)]
    log = tmp_path / "log"
    process = forked.start(command, ENVIRONMENT, said=log)
    try:
        deadline = time.monotonic() + 300
        while not (tmp_path / "checkpoint").exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        ranks = process.children()
        assert len(ranks) == 2, log.read_text()[-3000:]
        os.kill(ranks[1], signal.SIGKILL)
        assert process.wait(timeout=300) != 0
    finally:
        process.kill()
        process.wait()
    deadline = time.monotonic() + 300
    while any(Path(f"/proc/{rank}").exists() for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
    assert "SIGKILL" in log.read_text()
    step = load_checkpoint(tmp_path / "checkpoint")["step"]
    trainer = trained(tmp_path, updates=step + 1, prompts=8, eval_every=10_000, save_every=1, resume=True)
    assert trainer.session.step == step + 1


def test_a_sandbox_that_cannot_be_made_ends_a_run_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable(*_: Any, **__: Any) -> Any:
        raise SandboxUnavailable("there is no image")

    trainer = train.Trainer(Args(**{**TINY, "sft_steps": 0, "env_retries": 0}, out=str(tmp_path / "later")))
    monkeypatch.setattr(WordGame, "reset", unavailable)
    with pytest.raises(TrainingFailed, match=r"there is no image.*; nothing was saved before$"):
        trainer.run()
    with pytest.raises(SystemExit, match=r"^error: there is no image$"):
        train.train(Args(**TINY, out=str(tmp_path / "at once")))
