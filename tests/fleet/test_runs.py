"""Training runs with environments on a Ray cluster end with the weights of a local run."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
from ray_nodes import TINY, WORDS, Nodes, await_all, elsewhere, staying, stored_files, until, used_node, workers_of

from sandboxgym.tree import Context
from sandboxgym.workers import fleet_status as state_of_fleet
from sandboxgym.workers.fleet import RayEnvs
from sandboxgym.workers.nodes.limits import Limits

try:
    import ray
except ModuleNotFoundError:
    ray = None  # type: ignore[assignment]

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("ray_installed")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of a run whose environments are in its process."""
    from bpo_ref.args import Args
    from bpo_ref.train import Trainer

    out = tmp_path_factory.mktemp("runs") / "undisturbed"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(WORDS)
        Trainer(Args(**TINY, out=str(out))).run()
        yield out


def outcome(out: Path) -> Any:
    """Weights, trees of the last update, scores and numbers of a run, without what the clock says or was lost."""
    weights = (out / "checkpoint" / "model.safetensors").read_bytes()
    trees = {file.name: file.read_bytes() for file in (out / "trees").iterdir()}
    scores = json.loads((out / "results.json").read_text())["scores"]
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    untold = ("time/", "rollout/env_failures")
    numbers = [{k: v for k, v in row.items() if not k.startswith(untold) and "seconds" not in k} for row in rows]
    return weights, trees, scores, numbers


def test_a_run_whose_node_is_killed_in_the_middle_ends_with_the_weights_of_one_that_was_not(
    nodes: Nodes, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bpo_ref.args import Args
    from bpo_ref.sampling.policy import ChatPolicy
    from bpo_ref.train import Trainer

    doomed = nodes.with_two()[0]
    trainer = Trainer(Args(**TINY, envs="ray", env_workers=2, out=str(tmp_path)))
    envs, act, calls = trainer.session.envs, ChatPolicy.__call__, 0
    assert isinstance(envs, RayEnvs)

    def decide(policy: ChatPolicy, contexts: Sequence[Context]) -> Any:
        nonlocal calls
        calls += trainer.session.stage == "rl"
        if calls == 3 and doomed in nodes.nodes:
            nodes.kill(doomed, workers_of(envs))
        return act(policy, contexts)

    monkeypatch.setattr(ChatPolicy, "__call__", decide)
    await_all(envs)
    trainer.run()
    assert doomed not in nodes.nodes
    rows = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert sum(row.get("rollout/env_failures", 0) for row in rows) > 0
    assert outcome(tmp_path) == outcome(undisturbed)


def test_paths_that_ask_servers_by_themselves_on_nodes_one_of_which_is_killed_give_the_weights_of_a_local_run(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from served_runs import pretrained, server_of, trainer_of

    from bpo_ref.sampling.policy import AsyncChatPolicy
    from bpo_ref.train import Trainer

    monkeypatch.syspath_prepend(WORDS)
    nodes.with_two()
    pretrained(tmp_path / "model", size="0.2M")
    options: dict[str, Any] = {"driver": "async", "algo": "bpo", "tis": 2.0, "prompts": 4, "env_retries": 3}
    act, calls, killed = AsyncChatPolicy.__call__, 0, False

    def run(name: str, **more: Any) -> Trainer:
        with server_of(tmp_path / "model") as server:
            trainer = trainer_of(tmp_path / "model", tmp_path / name, server, **options, **more)
            if isinstance(trainer.session.envs, RayEnvs):
                await_all(trainer.session.envs)
                monkeypatch.setattr(AsyncChatPolicy, "__call__", partialmethod(decide, trainer))
            trainer.run()
        return trainer

    async def decide(policy: AsyncChatPolicy, trainer: Trainer, context: Context) -> Any:
        nonlocal calls, killed
        calls += trainer.session.stage == "rl" and trainer.session.step == 1
        if calls >= 5 and not killed:
            killed, envs = True, trainer.session.envs
            assert isinstance(envs, RayEnvs)
            nodes.kill(used_node(nodes, envs), workers_of(envs))
        return await act(policy, context)

    run("local")
    run("ray", envs="ray", env_workers=2, ray_address=nodes.address)
    assert killed
    rows = map(json.loads, (tmp_path / "ray" / "metrics.jsonl").read_text().splitlines())
    assert sum(row.get("rollout/env_failures", 0) for row in rows) > 0
    assert outcome(tmp_path / "ray") == outcome(tmp_path / "local")


@pytest.mark.parametrize(
    "settings",
    [{"env_resources": ("sandbox=1", "CPU=0.5", "memory=1e7")}, {"env_labels": ("zone=a",)}],
    ids=["resource", "label"],
)
def test_a_run_has_its_workers_on_nodes_with_what_they_need(
    nodes: Nodes, third: Any, undisturbed: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    from bpo_ref.args import Args
    from bpo_ref.train import Trainer

    settings |= {"envs": "ray", "env_workers": 2, "env_limits": ("environments=64",), "out": str(tmp_path)}
    trainer = Trainer(Args(**TINY, **settings))
    for envs in (trainer.session.envs, trainer.session.eval_envs):
        assert isinstance(envs, RayEnvs)
        await_all(envs)
        envs.tend()
        assert [worker.node for worker in staying(envs)] == [third.node_id] * 2
        assert envs._gate is not None and envs._gate.limits == Limits(environments=64)
    if "env_resources" in settings:

        def left() -> tuple[float, float]:
            there = ray._private.state.available_resources_per_node()[third.node_id]
            return there.get("sandbox", 0.0), there["CPU"]

        until(lambda: left() == (0.0, 2.0))  # Ray's table is some time behind
    trainer.run()
    assert outcome(tmp_path) == outcome(undisturbed)


def test_a_trainer_that_is_killed_within_an_update_ends_with_the_weights_and_trees_of_one_that_was_not(
    nodes: Nodes, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bpo_ref.args import Args
    from bpo_ref.train import Trainer

    nodes.with_two()
    out, store = tmp_path / "run", tmp_path / "store"
    options: dict[str, Any] = {"envs": "ray", "env_workers": 2, "env_store": str(store)}
    options |= {"ray_address": nodes.address, "out": str(out)}
    killed = elsewhere("trainer", json.dumps(options), "5")
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    assert (out / "inflight" / "update-1.0").stat().st_size > 1000
    durable, restored = RayEnvs.durable, []

    def counted(envs: RayEnvs, reference: Any) -> Any:
        snap = durable(envs, reference)
        restored.append(reference)
        return snap

    monkeypatch.setattr(RayEnvs, "durable", counted)
    Trainer(Args(**TINY, **options, resume=True)).run()
    assert restored
    assert outcome(out) == outcome(undisturbed)
    assert not (out / "inflight").exists()
    monkeypatch.setattr(state_of_fleet, "STALE", 3.0)
    until(lambda: not nodes.left())
    assert not stored_files(store)
