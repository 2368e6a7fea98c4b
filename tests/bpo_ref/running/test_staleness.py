"""Rollouts one update ahead: whose they are, that they are corrected for, and that runs continue exactly."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import torch
from fake_engine import FakeServer, Fault
from served_runs import SMALL, pretrained, same, server_of, trainer_of, weights_of
from tabular import MDP, Comparison, compare
from tabular_loop import LR, LoopTrainer
from tiny_runs import ENVIRONMENT, launch

from bpo_ref import train
from bpo_ref.args import Args, resolved
from bpo_ref.config import ConfigError
from bpo_ref.distributed.replicated import Replicated
from bpo_ref.learning.models import load_policy
from bpo_ref.run_log import RunLog
from bpo_ref.running.ahead import StoppablePolicy, _Pending
from bpo_ref.session import TrainingFailed
from bpo_ref.train import Trainer
from sandboxgym.tree import RolloutTree

TRAIN = Path(__file__).parents[3] / "bpo_ref/train.py"
KILLED = Path(__file__).with_name("killed_in_update.py")
STALE: dict[str, Any] = {"staleness": 1, "tis": 2.0}


# The correction, against exact gradients. Every comparison has a false-alarm rate of at most 1e-3.


def chain(*logits: float) -> MDP:
    """Three states in a row: going on to the end earns 1, leaving the first 0.3; these are the logits of going on."""
    transitions, rewards = np.zeros((3, 2, 4)), np.zeros((3, 2, 4))
    for state in range(3):
        transitions[state, 0, state + 1] = transitions[state, 1, 3] = 1.0
    rewards[2, 0, 3], rewards[0, 1, 3] = 1.0, 0.3
    return MDP(transitions, rewards, np.array([[logit, 0.0] for logit in logits]), horizon=3)


SAMPLER, LEARNER = chain(0.0, 0.0, 0.0), chain(1.5, -1.5, -1.5)


def surrogate(sampler: MDP, learner: MDP) -> np.ndarray:
    """Gradient at the learner's policy of Σ_t Σ_s d(s) Σ_a π(a|s) Q(s, a), with d and Q of the sampler, [S, A]."""
    q, policy = sampler.action_values(), learner.policy
    advantages = q - (policy * q).sum(axis=2, keepdims=True)
    return np.einsum("ts,sa,tsa->sa", sampler.occupancy(), policy, advantages)


FORKS: dict[str, Any] = {"algo": "bpo-forest", "width": 2, "points": 1.0, "roots": 3, "fork_baseline": "siblings"}
CASES: dict[str, tuple[dict[str, Any], Callable[[MDP, MDP], np.ndarray]]] = {
    "tokens": ({"algo": "rloo", "roots": 3}, surrogate),
    "episodes": ({"algo": "rloo", "roots": 3, "tis_level": "episode"}, lambda _, learner: learner.gradient()),
    "episodes of trees": ({**FORKS, "tis_level": "episode"}, lambda _, learner: learner.gradient()),
}


def stale_gradient(
    name: str, tmp_path: Path, *, corrected: bool, updates: int, exact: Callable[[MDP, MDP], np.ndarray] | None = None
) -> Comparison:
    """Mean change of a learner's weights by the trainer's loop, where another policy samples; against the exact one.

    Without the correction the sampler does not tell its log-probabilities.
    """
    chosen, claimed = CASES[name]
    args = Args(
        out=str(tmp_path), prompts=8, max_turns=5, context=64, spacing=1, lr=LR, max_grad_norm=1e9, tis=1e6,
        aggregation="constant", eval_every=10**9, updates=updates, **chosen,
    )  # fmt: skip
    trainer = LoopTrainer(args, SAMPLER, silent=not corrected)
    logits = torch.tensor(LEARNER.logits, dtype=torch.float32)
    trainer.session.model.load_state_dict({"logits": logits})
    trainer.session.start["logits"] = logits.clone()
    found = compare(trainer.sampled()["logits"], (exact or claimed)(SAMPLER, LEARNER))
    print(f"{name}: max|z| {found.z:.1f} of {found.critical:.1f}, off by {found.bias:.3f}")
    return found


@pytest.fixture
def _no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "write_samples", lambda *_, **__: None)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("_no_samples")
def test_the_gradient_of_an_earlier_policys_samples_is_exact(name: str, tmp_path: Path) -> None:
    found = stale_gradient(name, tmp_path, corrected=True, updates=60)
    assert not found.biased, found


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("_no_samples")
def test_it_is_wrong_without_the_correction(name: str, tmp_path: Path) -> None:
    found = stale_gradient(name, tmp_path, corrected=False, updates=60)
    assert found.biased, found


@pytest.mark.usefixtures("_no_samples")
def test_correcting_tokens_alone_is_not_enough_for_the_learners_own_gradient(tmp_path: Path) -> None:
    found = stale_gradient("tokens", tmp_path, corrected=True, updates=60, exact=lambda _, learner: learner.gradient())
    assert found.biased, found


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("_no_samples")
def test_the_gradient_of_an_earlier_policys_samples_is_exact_over_many_updates(name: str, tmp_path: Path) -> None:
    found = stale_gradient(name, tmp_path, corrected=True, updates=700)
    assert not found.biased, found


# Whose rollouts they are.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    pretrained(folder, size="0.2M")
    return folder


def stale_trainer(folder: Path, out: Path, *servers: FakeServer, **options: Any) -> Trainer:
    """A trainer of three updates that samples one ahead, on servers if there are any."""
    backend = "vllm" if servers else "hf"
    return trainer_of(folder, out, *servers, **{"updates": 3, "backend": backend, **STALE, **options})


def logps_of(trainer: Trainer, weights: dict[str, torch.Tensor], tree: RolloutTree) -> list[list[float]]:
    """Log-probabilities of a tree's turns under weights."""
    from bpo_ref.sampling.generate import score

    now, found = weights_of(trainer), []
    trainer.session.policy.load_state_dict(weights)
    with torch.no_grad():
        for edge in tree.edges():
            ids = edge.action.memory.ids()
            logps, _ = score(trainer.session.policy, [ids])
            found.append(logps[0, -edge.action.tokens :].tolist())
    trainer.session.policy.load_state_dict(now)
    return found


@pytest.mark.parametrize("served", [False, True], ids=["here", "served"])
def test_an_updates_rollouts_are_sampled_with_the_weights_of_the_one_before(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: bool
) -> None:
    """And told so: the sampler's log-probabilities are of the weights before, the trainer's of the present ones."""
    with server_of(folder) as server:
        trainer = stale_trainer(folder, tmp_path, *([server] if served else []))
        seen: list[dict[str, torch.Tensor]] = []
        optimize = trainer._optimize

        def watched(trees: list[RolloutTree]) -> dict[str, float]:
            seen.append(weights_of(trainer))
            for tree in trees:
                sampler, learner = (logps_of(trainer, weights, tree) for weights in (seen[-2:][0], seen[-1]))
                for edge, before, now in zip(tree.edges(), sampler, learner, strict=True):
                    assert edge.action.data.sampler_logps == pytest.approx(before, abs=1e-4)
                    assert edge.action.data.logps == pytest.approx(now, abs=1e-4)
            return optimize(trees)

        monkeypatch.setattr(trainer, "_optimize", watched)
        logged: list[dict[str, float]] = []
        monkeypatch.setattr(RunLog, "scalars", lambda self, values, stage, step: logged.append(dict(values)))
        trainer.run()
        updates = [entry for entry in logged if "rollout/sampler_mismatch" in entry]
        assert [entry["rollout/sampler_mismatch"] > 1e-3 for entry in updates] == [False, True, True]
        assert [entry["rollout/staleness"] for entry in updates] == [0.0, 1.0, 1.0]
        assert [entry["rollout/sampler_effective"] < 0.999 for entry in updates] == [False, True, True]
        assert len(seen) == 3 and not same(seen[0], seen[1])


def test_sampling_beside_the_update_gives_what_sampling_before_it_does(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread is made to wait until the update has changed the weights."""
    found, held = [], []
    with server_of(folder) as server:
        trainer = stale_trainer(folder, tmp_path / "beside", server)
        moved, step, sample = threading.Event(), trainer.session.optimizer_step, trainer._sample

        def after(*given: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                held.append(moved.wait(300))
                moved.clear()
            return sample(*given)

        def moving() -> None:
            step()
            moved.set()

        trainer.ahead._sample = after
        monkeypatch.setattr(trainer.session, "optimizer_step", moving)
        trainer.run()
        found.append(weights_of(trainer))
    with server_of(folder) as server:
        start = _Pending.start
        monkeypatch.setattr(_Pending, "start", lambda self, **_: start(self, beside=False))
        trainer = stale_trainer(folder, tmp_path / "before", server)
        trainer.run()
        found.append(weights_of(trainer))
    assert held == [True, True]
    assert same(*found)


def test_a_server_that_is_started_again_beside_an_update_gets_the_weights_before_it(
    folder: Path, tmp_path: Path
) -> None:
    """They are proven against what was written: the trainer's own have changed."""
    found = []
    for broken in (False, True):
        with server_of(folder) as server:
            trainer = stale_trainer(folder, tmp_path / str(broken), server, server_retries=5)
            step, sample, moved = trainer.session.optimizer_step, trainer._sample, threading.Event()

            def restarted(*given: Any, sample: Any = sample, moved: Any = moved, server: Any = server) -> Any:
                if threading.current_thread() is not threading.main_thread() and not moved.is_set():
                    assert moved.wait(300)
                    server.stop()
                    server.start()
                return sample(*given)

            def moving(step: Any = step, moved: Any = moved) -> None:
                step()
                moved.set()

            trainer.ahead._sample = restarted if broken else sample
            trainer.session.optimizer_step = moving  # type: ignore[method-assign]
            trainer.run()
            found.append(weights_of(trainer))
            assert server.loads == (5 if broken else 4)
    assert same(*found)


def test_servers_keep_their_weights_until_all_processes_have_their_rollouts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may still be sampling when the first one has its own."""
    events: list[str] = []
    with server_of(folder) as server:
        trainer = stale_trainer(folder, tmp_path, server, eval_every=2)
        session, join = trainer.session, _Pending.join
        assert session._servers is not None
        publisher = session._servers._publisher
        publish, wait = publisher.publish, session.accelerator.wait_for_everyone
        monkeypatch.setattr(publisher, "publish", lambda model: events.append("publish") or publish(model))
        monkeypatch.setattr(session.accelerator, "wait_for_everyone", lambda: events.append("all") or wait())
        monkeypatch.setattr(_Pending, "join", lambda self, *given: join(self, *given) or events.append("mine"))
        trainer.run()
    published = [at for at, event in enumerate(events) if event == "publish" and "mine" in events[:at]]
    assert len(published) == 2 + 1, events  # before the third update's rollouts, and for two evaluations
    for at in published:
        since = events[:at][::-1]
        assert since.index("all") < since.index("mine"), events


def test_what_is_written_is_loaded_without_a_change_of_the_default_type(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is loaded beside the update, whose thread would make numbers of that type."""
    model, tokenizer = load_policy(folder)
    with FakeServer(model.to(torch.bfloat16), tokenizer) as server:
        trainer = stale_trainer(folder, tmp_path, server, dtype="bfloat16", server_tolerance=10.0)
        session, kinds = trainer.session, set()
        assert session._servers is not None
        fleet = session._servers.fleet(session.policy, 0)
        default = torch.set_default_dtype
        monkeypatch.setattr(torch, "set_default_dtype", lambda kind: kinds.add(kind) or default(kind))
        fleet._verify_again(fleet.engines[0])
        session.close()
    assert kinds == {torch.float32}


# Going on, and ending.


@pytest.mark.parametrize("served", [False, True], ids=["here", "served"])
@pytest.mark.parametrize("algo", ["bpo-forest", "bpo"])
def test_a_run_that_was_killed_continues_exactly(folder: Path, tmp_path: Path, served: bool, algo: str) -> None:
    """By SIGKILL in the middle of the third update, whose rollouts were sampled ahead and are lost."""
    options: dict[str, Any] = {"algo": algo, "updates": 4, "eval_every": 2, "save_every": 1}
    if algo == "bpo":
        options |= {"tis_level": "episode", "roots": None}
    with server_of(folder) as server:
        servers = [server] if served else []
        whole = stale_trainer(folder, tmp_path / "whole", *servers, **options)
        whole.run()
        args = {**SMALL, **STALE, **options, "model": str(folder), "out": str(tmp_path / "parts")}
        args |= {"server": [server.url for server in servers], "backend": "vllm" if served else "hf"}
        killed = forked.run([str(KILLED), json.dumps(args), "2"], ENVIRONMENT, timeout=300)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        rest = stale_trainer(folder, tmp_path / "parts", *servers, **options, resume=True)
        assert rest.session.step == 2
        rest.run()
    assert same(weights_of(rest), weights_of(whole))
    assert rest.session.scores == whole.session.scores
    mine, theirs = ({**t.session.counters, "seconds": 0.0} for t in (rest, whole))
    assert mine == theirs


def test_checkpoints_and_evaluations_are_of_the_trained_weights(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server_of(folder) as server:
        trainer = stale_trainer(folder, tmp_path, server, eval_every=1, save_every=1)
        evaluate, played = trainer.session.evaluate, []

        def watched(name: str) -> Any:
            found = evaluate(name)
            served = server.weights.state_dict()
            played.append(all(served[key].equal(weight) for key, weight in weights_of(trainer).items()))
            return found

        monkeypatch.setattr(trainer.session, "evaluate", watched)
        trainer.run()
        assert played == [True] * 3
        saved, _ = load_policy(tmp_path / "checkpoint")
        assert same(dict(saved.state_dict()), weights_of(trainer))


def test_what_fails_beside_an_update_ends_the_run_with_its_reason(folder: Path, tmp_path: Path) -> None:
    with server_of(folder) as server:
        trainer = stale_trainer(folder, tmp_path, server, server_retries=0, save_every=1)
        server.fault = lambda number: Fault(drop=server.loads > 2)
        with pytest.raises(TrainingFailed, match=rf"{server.url}: cannot be reached.*--resume continues"):
            trainer.run()
        assert trainer.session.step == 1


def test_an_update_that_fails_ends_the_rollouts_beside_it(folder: Path, tmp_path: Path) -> None:
    with server_of(folder) as server:
        trainer = stale_trainer(folder, tmp_path, server)

        def fail(trees: list[RolloutTree]) -> dict[str, float]:
            raise TrainingFailed("the gradient is not finite")

        trainer._optimize = fail  # type: ignore[method-assign]
        with pytest.raises(TrainingFailed, match="not finite"):
            trainer.run()
    assert not [thread for thread in threading.enumerate() if thread.name == "sandboxgym-ahead"]


def test_a_stopped_policy_decides_nothing_any_more() -> None:
    policy = StoppablePolicy(lambda contexts: [None] * len(contexts))
    assert policy([]) == []
    policy.stopped.set()
    with pytest.raises(Exception, match=r"^$"):
        policy([])


# Settings.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"staleness": 2, "tis": 2.0}, "staleness: expected 0 to 1, found 2"),
        ({"staleness": 1}, "staleness: an earlier policy samples, so the loss must be corrected; set tis"),
        ({**STALE, "algo": "bpo", "lookahead": True}, "staleness: .*does not go with lookahead"),
        ({**STALE, "schedule": "value-oracle"}, "staleness: .*does not go with schedule=value-oracle"),
        ({**STALE, "algo": "bpo-paper", "backend": "vllm", "server": ("http://x",)}, "staleness: .*schedule=entropy"),
        ({**STALE, "ratio": "step"}, "tis: corrects tokens"),
        ({"algo": "rloo", "tis_level": "episode"}, "tis_level: episode goes with tis and credit=tree"),
        ({**STALE, "algo": "grpo", "tis_level": "episode"}, "tis_level: .*found tis=2.0, credit=group"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(Args(**{"algo": "bpo-tree", **options}))


def test_sharded_weights_are_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replicated, "sharded", True)
    with pytest.raises(ConfigError, match="staleness: needs whole weights"):
        stale_trainer(folder, tmp_path)


def test_rows_too_long_for_sharded_weights_are_refused_with_both_numbers(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Replicated, "sharded", True)
    given: dict[str, Any] = {**SMALL, "backend": "hf", "model": str(folder), "micro_tokens": 159}
    with pytest.raises(ConfigError, match=r"long_rows: rows of up to 160 tokens .* parts of 159"):
        Trainer(Args(**given, out=str(tmp_path / "split")))
    for more in ({"micro_tokens": 160}, {"long_rows": "whole"}):
        trainer = Trainer(Args(**given | more, out=str(tmp_path / "-".join(more))))
        assert trainer.args.long_rows == "whole"
        trainer.session.close()


@pytest.mark.slow
@pytest.mark.parametrize("served", [False, True], ids=["here", "served"])
def test_two_processes_learn_as_one(folder: Path, tmp_path: Path, served: bool) -> None:
    found: dict[int, Any] = {}
    for processes in (1, 2):
        with server_of(folder) as server:
            out = tmp_path / str(processes)
            given = {**SMALL, **STALE, "updates": 3, "model": str(folder), "out": str(out), "trackers": []}
            given["micro_tokens"] = 24  # rows are computed in parts, too
            given |= {"server": [server.url]} if served else {"backend": "hf"}
            config = tmp_path / f"{processes}.json"
            config.write_text(json.dumps(given))
            launch(TRAIN, out, processes, config)
            found[processes] = json.loads((out / "results.json").read_text())
    assert found[2]["processes"] == 2
    assert found[1]["scores"] == found[2]["scores"]
    counts = [{name: found[n]["counters"][name] for name in ("returns", "tokens")} for n in (1, 2)]
    assert counts[0] == counts[1]
