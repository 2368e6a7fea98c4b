"""Training on turns of servers: they have the trainer's weights, proven after each update, or the run stops."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from components import missing
from fake_engine import FakeServer, Fault, wait_until
from safetensors import SafetensorError
from served_runs import (
    SMALL,
    assert_greedy_trees_are_equal,
    greedily,
    pretrained,
    same,
    server_of,
    trainer_of,
    weights_of,
)
from tiny_runs import ENVIRONMENT
from transformers import AutoModelForCausalLM

from bpo_ref.config import ConfigError
from bpo_ref.eval import defaults
from bpo_ref.learning.checkpoint import STATE, save_checkpoint
from bpo_ref.learning.models import add_adapter, load_policy
from bpo_ref.learning.tiny import TINY_SIZES, tiny_model
from bpo_ref.run_log import RunLog
from bpo_ref.running import servers
from bpo_ref.sampling import weights as weights_module
from bpo_ref.sampling.engine import EngineError
from bpo_ref.sampling.generate import score
from bpo_ref.sampling.vllm import LOADING
from bpo_ref.sampling.weights import plain_weights, rolled, shaken, write_weights
from bpo_ref.session import TrainingFailed
from bpo_ref.train import Trainer

TRAIN = Path(__file__).parents[3] / "bpo_ref/train.py"
CONFIGS = TRAIN.parent / "configs/accelerate"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    pretrained(folder, size="0.2M")
    return folder


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """Everything that runs log about their updates."""
    found: list[dict[str, float]] = []
    scalars = RunLog.scalars

    def note(self: RunLog, values: Any, stage: Any, step: int) -> None:
        found.append(dict(values))
        scalars(self, values, stage, step)

    monkeypatch.setattr(RunLog, "scalars", note)
    return found


@pytest.mark.parametrize(
    "options",
    [{}, {"algo": "bpo-paper"}, {"algo": "ppo", "width": None}, {"algo": "bpo", "tis": 2.0}, {"temperature": 0.7}],
    ids=["forest", "entropies", "critic", "split", "tempered"],
)
def test_a_run_learns_from_turns_of_servers(
    folder: Path, tmp_path: Path, logged: list[dict[str, float]], options: dict[str, Any]
) -> None:
    """Each update samples from its own weights: the logged mismatch of server and trainer is rounding."""
    with server_of(folder) as one, server_of(folder) as other:
        trainer = trainer_of(folder, tmp_path, one, other, **options)
        before = weights_of(trainer)
        trainer.run()
        assert not same(before, weights_of(trainer))
        updates = [entry for entry in logged if "rollout/sampler_mismatch" in entry]
        assert len(updates) == 2
        assert all(entry["rollout/sampler_mismatch"] < 1e-5 for entry in updates)
        for server in (one, other):
            assert server.loads == 4, "rolled weights, the first ones, and those of two updates"
            salts = [request["cache_salt"] for request in server.requests]
            assert len(set(salts)) == 4 and salts == sorted(salts)
    assert not (tmp_path / "served").exists() or not list((tmp_path / "served").iterdir())


@pytest.mark.parametrize("algo", ["bpo-forest", "bpo-paper"])
def test_greedy_trees_are_those_of_the_sampler_in_the_process(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algo: str
) -> None:
    greedily(monkeypatch)
    with server_of(folder) as one, server_of(folder) as other:
        here = trainer_of(folder, tmp_path / "here", algo=algo, backend="hf")
        there = trainer_of(folder, tmp_path / "there", one, other, algo=algo)
        assert_greedy_trees_are_equal(here, there)


PARTS = ["lm_head", "embed_tokens", "layers.0.self_attn.q_proj", "layers.1.mlp.down_proj", "model.norm", "layernorm"]


@pytest.mark.parametrize("part", PARTS)
def test_weights_that_a_server_silently_keeps_stop_the_run_before_it_begins(
    folder: Path, tmp_path: Path, part: str
) -> None:
    """vLLM 0.32 keeps a tied output layer; the step here is too small for a difference of probabilities to show it."""
    with server_of(folder, keeps=lambda name: part in name) as server:
        trainer = trainer_of(folder, tmp_path, server, lr=1e-12)
        before = weights_of(trainer)
        with pytest.raises(TrainingFailed, match=rf"{server.url} says that it has loaded.*kept some of its weights"):
            trainer.run()
        assert same(before, weights_of(trainer)), "the weights that were rolled are as they were"
        assert trainer.session.counters["tokens"] == 0


def test_an_update_that_a_server_does_not_take_stops_the_run(folder: Path, tmp_path: Path) -> None:
    with server_of(folder) as server:
        server.keeps = lambda name: server.loads > 2
        trainer = trainer_of(folder, tmp_path, server, lr=0.1, save_every=1)
        with pytest.raises(TrainingFailed, match=r"log-probabilities of 64 tokens differ.*up to rl step 1 is in"):
            trainer.run()
        assert trainer.session.step == 1


def test_a_loading_that_fails_is_repeated_and_half_loaded_weights_have_no_version(folder: Path, tmp_path: Path) -> None:
    with server_of(folder, load_fault=lambda number: number == 0) as server:
        trainer_of(folder, tmp_path / "once", server, updates=1).run()
        server.load_fault = lambda number: True
        with pytest.raises(TrainingFailed, match=r"the file ended early.*asked 2 times"):
            trainer_of(folder, tmp_path / "always", server).run()
        assert server.version == LOADING
        assert not server.paused, "others may use it"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error: full")])
def test_weights_that_cannot_be_written_stop_all_processes_with_a_sentence(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise error

    told: list[Any] = []
    with server_of(folder) as server:
        trainer = trainer_of(folder, tmp_path, server)
        monkeypatch.setattr(weights_module, "write_weights", full)
        monkeypatch.setattr(servers, "broadcast_object_list", lambda things: told.append(things) or things)
        with pytest.raises(TrainingFailed, match=r"server_weights: the weights cannot be written to .*served"):
            trainer.run()
    trainer = types.SimpleNamespace(is_main_process=True, num_processes=2)
    publisher = types.SimpleNamespace(folder=tmp_path)
    several = servers.Servers(publisher, trainer, sharded=False, sleeps=False)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="server_weights: "):
        several._ask(full)
    assert told and told[-1][0][0].startswith("server_weights: "), "the others, which wait for the first one"
    error = KeyError("a mistake in the program")
    with pytest.raises(KeyError):
        several._ask(full)
    assert len(told) == 2


def test_a_disk_that_is_full_stops_the_run_which_more_room_resumes(
    folder: Path, tmp_path: Path, disk: Path, uninterrupted: dict[str, torch.Tensor]
) -> None:
    """Its 1 MiB have room for one set of weights (0.8 MB), and the file of the next one ends in the middle."""
    with server_of(folder) as server:
        options: dict[str, Any] = {"updates": 3, "save_every": 1, "server_weights": str(disk / "weights")}
        filler = disk / "filler"
        full = r"server_weights: the weights cannot be written to .*No space left on device.*"
        with pytest.raises(TrainingFailed, match=rf"{full}; nothing was saved before"):
            trainer_of(folder, tmp_path, server, **options).run()
        assert server.loads == 1 and not list((disk / "weights").iterdir())
        subprocess.run(["mount", "-o", "remount,size=3m", disk], check=True)
        trainer = trainer_of(folder, tmp_path, server, **options, overwrite=True)
        optimize = trainer._optimize

        def filled(trees: Any) -> dict[str, float]:
            if trainer.session.step == 1:
                filler.write_bytes(bytes(1_800_000))
            return optimize(trees)

        trainer._optimize = filled  # type: ignore[method-assign]
        with pytest.raises(TrainingFailed, match=rf"{full}up to rl step 2 is in .*--resume continues"):
            trainer.run()
        assert server.loads == 1 + 3, "nothing of the file that ends early is loaded"
        assert not list((disk / "weights").iterdir())
        filler.unlink()
        again = trainer_of(folder, tmp_path, server, **options, resume=True)
        again.run()
    assert same(weights_of(again), uninterrupted)


def test_a_checkpoint_without_room_leaves_the_one_before(folder: Path, tmp_path: Path, disk: Path) -> None:
    """A disk is full while any of these is written: weights, the tokenizer or the trainer's state."""
    model, tokenizer = load_policy(folder)
    state = {"optimizer": torch.zeros(100_000)}
    subprocess.run(["mount", "-o", "remount,size=4m", disk], check=True)
    save_checkpoint(disk / "checkpoint", model, tokenizer, state)
    size = sum(path.stat().st_blocks for path in (disk / "checkpoint").iterdir()) * 512
    full = set()
    for room in (400_000, 854_000, 1_100_000):
        (disk / "filler").write_bytes(bytes(4 * 2**20 - size - room))
        with pytest.raises(OSError) as error:
            save_checkpoint(disk / "checkpoint", model, tokenizer, state)
        full.add(type(error.value.__cause__))
        assert load_checkpoint_of(disk / "checkpoint") == 100_000
        assert {path.name for path in disk.iterdir()} == {"checkpoint", "filler"}
    assert len(full) == 3, "by three libraries"
    with server_of(folder) as server:
        trainer = trainer_of(folder, disk / "out", server, save_every=1, server_weights=str(tmp_path))
        with pytest.raises(
            TrainingFailed, match=r"out: .*out/checkpoint cannot be written \(.*nothing was saved before"
        ):
            trainer.run()


def load_checkpoint_of(folder: Path) -> int:
    return len(torch.load(folder / STATE, weights_only=True)["optimizer"])


def test_the_folder_for_a_server_on_a_disk_without_room_is_refused_and_not_left(folder: Path, disk: Path) -> None:
    filler = disk / "filler"
    for size in (500_000, 183_000):  # too much for the weights, and for the tokenizer beside them
        filler.write_bytes(bytes(size))
        with pytest.raises(SystemExit, match=r"error: folder: .*served cannot be written \(.*No space left on device"):
            weights_module.main([str(folder), str(disk / "served")])
        assert list(disk.iterdir()) == [filler]


KILLED = Path(__file__).with_name("killed_while_writing.py")
LEARNING = TRAIN.parents[1] / "tests/bpo_ref/running/killed_in_update.py"


@pytest.mark.parametrize("phase", ["it learns", "it writes weights", "the server loads them"])
def test_a_run_that_is_killed_continues_with_weights_that_are_proven(
    folder: Path, tmp_path: Path, uninterrupted: dict[str, torch.Tensor], phase: str
) -> None:
    with server_of(folder) as server:
        args = {**SMALL, "updates": 3, "save_every": 1, "model": str(folder), "out": str(tmp_path / "out")}
        args |= {"server": [server.url], "server_weights": str(tmp_path / "served")}
        program = LEARNING if phase == "it learns" else KILLED
        step = 9 if phase == "the server loads them" else 1
        process = forked.start([str(program), json.dumps(args), str(step)], ENVIRONMENT)

        def strike(number: int) -> bool:
            """In the middle of the second update's weights: nobody names their version or ends the pause."""
            if process.poll() is None and phase == "the server loads them" and number == 2:
                process.kill()
                process.wait()
                return True
            return False

        server.load_fault = strike
        assert process.wait(300) == -signal.SIGKILL
        left = list((tmp_path / "served").iterdir())
        assert len(left) == (1 if phase == "it learns" else 2)
        wait_until(lambda: phase != "the server loads them" or (server.paused and server.version == LOADING))
        again = trainer_of(
            folder,
            tmp_path / "out",
            server,
            updates=3,
            save_every=1,
            resume=True,
            server_weights=args["server_weights"],
        )
        assert again.session.step == 1
        assert not any(path.exists() for path in left), "as large as the model, and nobody's"
        again.run()
        assert not server.paused
    assert same(weights_of(again), uninterrupted)
    assert not list((tmp_path / "served").iterdir())


@pytest.fixture(scope="module")
def uninterrupted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Weights of a run of three updates that nothing disturbs."""
    with server_of(folder) as server:
        trainer = trainer_of(folder, tmp_path_factory.mktemp("run"), server, updates=3)
        trainer.run()
        return weights_of(trainer)


def test_a_server_that_is_killed_in_a_rollout_and_started_again_gets_the_weights_again(
    folder: Path, tmp_path: Path, uninterrupted: dict[str, torch.Tensor]
) -> None:
    with server_of(folder) as server:
        count = len(server.requests)
        trainer = trainer_of(folder, tmp_path, server, updates=3, server_retries=5)
        reached, struck = threading.Event(), threading.Event()

        def waiting(number: int) -> Fault:
            if server.loads != 3 or number < count + 22 or struck.is_set():
                return Fault()
            reached.set()
            return Fault(latency=300.0)  # until it is stopped

        def restart() -> None:
            assert reached.wait(300)
            struck.set()
            server.stop()
            server.start()

        server.fault = waiting

        thread = threading.Thread(target=restart)
        thread.start()
        trainer.run()
        thread.join()
        assert server.loads > 5
        assert same(weights_of(trainer), uninterrupted)


def test_a_server_that_stays_dead_ends_the_run_which_another_server_resumes(
    folder: Path, tmp_path: Path, uninterrupted: dict[str, torch.Tensor]
) -> None:
    with server_of(folder) as server:
        trainer = trainer_of(folder, tmp_path, server, updates=3, save_every=1, server_retries=0)
        server.fault = lambda number: Fault(drop=server.loads > 3)
        with pytest.raises(TrainingFailed, match=rf"{server.url}: cannot be reached.*rl step 2.*--resume continues"):
            trainer.run()
    with server_of(folder) as server:
        trainer = trainer_of(folder, tmp_path, server, updates=3, save_every=1, resume=True)
        trainer.run()
    assert same(weights_of(trainer), uninterrupted)


def test_another_run_on_the_same_server_is_noticed(folder: Path, tmp_path: Path) -> None:
    """Whose weights it then has: neither run learns from the other's."""
    with server_of(folder) as server:
        mine = trainer_of(folder, tmp_path / "mine", server)
        mine.session.player(1.0)
        theirs = trainer_of(folder, tmp_path / "theirs", server)
        with torch.no_grad():
            theirs.session.policy.model.norm.weight.mul_(2.0)
        theirs.session.player(1.0)
        loads = server.loads
        trees = mine._rollouts((0,))
        assert server.loads == loads + 1
        edges = [edge for tree in trees for edge in tree.edges()]
        assert all(e.action.data.sampler_logps == pytest.approx(e.action.data.logps, abs=1e-4) for e in edges)
        for trainer in (mine, theirs):
            trainer.session.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 100}, "server: http.*expected a context of at least 160 tokens, found 100"),
        ({"tokenizer": lambda text, **_: {"input_ids": [1, 2]}}, r"server: .*another tokenizer: .*found \[1, 2\]"),
        ({"missing": ("/weight_info",)}, "server: .*VLLM_SERVER_DEV_MODE=1"),
    ],
)
def test_a_server_of_something_else_is_refused_at_the_start(
    folder: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    model, tokenizer = load_policy(folder)
    with FakeServer(model, **{"tokenizer": tokenizer, **options}) as server, pytest.raises(ConfigError, match=message):
        trainer_of(folder, tmp_path, server)


@pytest.mark.parametrize(
    ("shape", "message"),
    [({"hidden": 64}, "failed with status 500.*must match"), ({"layers": 3}, "says that it has loaded")],
)
def test_another_model_of_the_same_tokenizer_is_refused(
    folder: Path, tmp_path: Path, shape: dict[str, int], message: str
) -> None:
    """Weights of other shapes cannot be loaded; a layer more stays as it was."""
    _, tokenizer = load_policy(folder)
    model = tiny_model(tokenizer, **{**TINY_SIZES["0.2M"], **shape})  # type: ignore[arg-type]
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4.0 if weight.ndim > 1 else 1.0)
    with FakeServer(model, tokenizer) as server:
        trainer = trainer_of(folder, tmp_path, server)
        with pytest.raises(TrainingFailed, match=message):
            trainer.run()


def test_servers_sleep_while_the_policy_learns(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with server_of(folder, sleeps=True) as server:
        learn, asleep = Trainer._optimize, []

        def noted(self: Trainer, trees: Any) -> dict[str, float]:
            asleep.append(server.asleep)
            return learn(self, trees)

        monkeypatch.setattr(Trainer, "_optimize", noted)
        trainer_of(folder, tmp_path, server, server_sleeps=True).run()
        assert asleep == [True, True]
        assert server.slept == 3, "after each rollout, and after the evaluation"
        assert server.loads == 4
    with server_of(folder) as server, pytest.raises(ConfigError, match=r"can sleep .*--enable-sleep-mode"):
        trainer_of(folder, tmp_path / "other", server, server_sleeps=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "options"),
    [("fsdp2", {}), ("fsdp2", {"lora_r": 2, "server_sends": "adapters"}), ("zero3", {})],
    ids=["fsdp2", "fsdp2-adapters", "zero3"],
)
def test_servers_get_weights_that_are_sharded(
    folder: Path, tmp_path: Path, launcher: str, options: dict[str, Any]
) -> None:
    """The servers' weights are proven after each update, by the gathered weights of the first process."""
    from test_real_models import launch_sharded

    if launcher == "zero3" and importlib.util.find_spec("deepspeed") is None:
        missing("deepspeed", "the package deepspeed is not installed")
    with server_of(folder, rank=8) as server:
        given = {**SMALL, **options, "server": [server.url], "model": str(folder), "trackers": []}
        config = tmp_path / "config.json"
        config.write_text(json.dumps(given))
        done = launch_sharded(TRAIN, tmp_path / "out", config, file=CONFIGS / f"{launcher}.yaml")
        assert done.returncode == 0, done.stderr[-3000:]
        assert server.loads == 4
    updates = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    apart = [update["rollout/sampler_mismatch"] for update in updates if "rollout/sampler_mismatch" in update]
    assert len(apart) == 2 and max(apart) < 1e-5
    assert json.loads((tmp_path / "out/results.json").read_text())["processes"] == 2


@pytest.mark.slow
def test_two_processes_share_the_servers(folder: Path, tmp_path: Path) -> None:
    """The first publishes weights for both; the trees are those of one process."""
    from tiny_runs import launch

    found = {}
    for processes in (1, 2):
        with server_of(folder) as server:
            out = tmp_path / str(processes)
            given = {**SMALL, "server": [server.url], "model": str(folder), "out": str(out), "trackers": []}
            config = tmp_path / f"{processes}.json"
            config.write_text(json.dumps(given))
            launch(TRAIN, out, processes, config)
            assert server.loads == 4
            found[processes] = json.loads((out / "results.json").read_text())
    assert found[2]["processes"] == 2
    assert found[1]["scores"] == found[2]["scores"]
    assert {name: found[1]["counters"][name] for name in ("returns", "tokens")} == {
        name: found[2]["counters"][name] for name in ("returns", "tokens")
    }


def test_an_evaluation_of_such_a_run_samples_in_its_own_process(folder: Path, tmp_path: Path) -> None:
    with server_of(folder) as server:
        trainer_of(folder, tmp_path, server, updates=1).run()
    assert defaults(str(tmp_path / "checkpoint")).backend == "hf"


# Weights as they are written.


def test_rolled_weights_are_another_function_and_exactly_undone(folder: Path) -> None:
    model, _ = load_policy(folder)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    rows = [[1, 2, 3, 4, 5]]
    with torch.no_grad():
        logps, _ = score(model, rows)
        with rolled(model):
            others, _ = score(model, rows)
            assert all(not weight.equal(before[name]) for name, weight in model.state_dict().items())
    assert (logps - others).abs().mean() > 0.1
    assert same(before, model.state_dict())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("adapted", [True, False])
def test_written_weights_are_a_model_of_their_own_without_ties(
    folder: Path, tmp_path: Path, tied: bool, adapted: bool
) -> None:
    model, _ = load_policy(folder)
    if not tied:
        write_weights(model, tmp_path / "untied", dtype=torch.float32)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "untied", dtype=torch.float32)
        assert not model.config.tie_word_embeddings
    if adapted:
        model = add_adapter(model, r=2, alpha=8, seed=0)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight.normal_()
    rows = [[1, 2, 3, 4, 5], [6, 7, 8]]
    with torch.no_grad():
        expected, _ = score(model, rows)
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        write_weights(model, tmp_path / "written", dtype=torch.float32)
        assert same(before, model.state_dict())
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "written", dtype=torch.float32)
        found, _ = score(loaded, rows)
    assert not loaded.config.tie_word_embeddings
    assert (found - expected).abs().max() < 1e-4
    names = set(plain_weights(model)[1]) | {"lm_head.weight"}
    assert {name for name, _ in loaded.named_parameters()} == names


def test_a_run_with_adapters_is_served_merged(folder: Path, tmp_path: Path, logged: list[dict[str, float]]) -> None:
    with server_of(folder) as server:
        trainer_of(folder, tmp_path, server, lora_r=2, lr=0.05).run()
    mismatches = [entry["rollout/sampler_mismatch"] for entry in logged if "rollout/sampler_mismatch" in entry]
    assert len(mismatches) == 2 and max(mismatches) < 1e-4


# Adapters alone.

ADAPTERS: dict[str, Any] = {"lora_r": 2, "lora_alpha": 8, "lr": 0.05, "server_sends": "adapters"}


def test_only_adapters_reach_a_server_and_no_old_one_answers(
    folder: Path, tmp_path: Path, logged: list[dict[str, float]]
) -> None:
    with server_of(folder, rank=8) as one, server_of(folder, rank=8) as other:
        before = {name: weight.clone() for name, weight in one.weights.state_dict().items()}
        trainer_of(folder, tmp_path, one, other, **ADAPTERS).run()
        for server in (one, other):
            assert same(before, server.weights.state_dict())
            assert server.loads == 4, "shaken adapters, the first ones, and those of two updates"
            named = [request["model"] for request in server.requests]
            assert named == [request["cache_salt"] for request in server.requests] and len(set(named)) == 4
            assert list(server.adapters) == [named[-1]] == [server.version]
    mismatches = [entry["rollout/sampler_mismatch"] for entry in logged if "rollout/sampler_mismatch" in entry]
    assert len(mismatches) == 2 and max(mismatches) < 1e-4


@pytest.mark.parametrize("part", ["layers.0.self_attn.q_proj", "layers.0.self_attn.o_proj", "layers.1.mlp.down_proj"])
def test_an_adapter_that_a_server_takes_in_part_stops_the_run_before_it_begins(
    folder: Path, tmp_path: Path, part: str
) -> None:
    with server_of(folder, rank=8, keeps=lambda name: part in name) as server:
        trainer = trainer_of(folder, tmp_path, server, **{**ADAPTERS, "lr": 1e-12})
        before = weights_of(trainer)
        with pytest.raises(TrainingFailed, match=rf"{server.url} says that it has loaded.*kept some of its weights"):
            trainer.run()
        assert same(before, weights_of(trainer)), "the adapters that were shaken are as they were"


def test_a_server_that_was_started_with_other_weights_is_refused(folder: Path, tmp_path: Path) -> None:
    with server_of(folder, rank=8) as server:
        with torch.no_grad():
            server.weights.model.layers[1].mlp.down_proj.weight.mul_(1.1)
        with pytest.raises(TrainingFailed, match="of the model that this run began with"):
            trainer_of(folder, tmp_path, server, **ADAPTERS).run()


def test_a_server_that_is_started_again_gets_the_adapter_again(folder: Path, tmp_path: Path) -> None:
    with server_of(folder, rank=8) as server:
        trainer = trainer_of(folder, tmp_path, server, **ADAPTERS)
        trainer.session.player(1.0)
        server.stop()
        server.start()
        edges = [edge for tree in trainer._rollouts((0,)) for edge in tree.edges()]
        assert server.loads == 3
        server.version = "of somebody else"  # who changed the weights below
        edges += [edge for tree in trainer._rollouts((1,)) for edge in tree.edges()]
        assert server.loads == 4
        trainer.session.close()
    assert all(e.action.data.sampler_logps == pytest.approx(e.action.data.logps, abs=1e-4) for e in edges)


def test_a_server_that_takes_no_such_adapters_is_refused_at_the_start(folder: Path, tmp_path: Path) -> None:
    for rank, found in (0, "none"), (1, "rank 1 at most"):
        with (
            server_of(folder, rank=rank) as server,
            pytest.raises(ConfigError, match=f"expected adapters of rank 2 .*--enable-lora.* found {found}"),
        ):
            trainer_of(folder, tmp_path, server, **ADAPTERS)
    with server_of(folder, rank=8, missing=("/v1/load_lora_adapter",)) as server:
        with pytest.raises(TrainingFailed, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
            trainer_of(folder, tmp_path, server, **ADAPTERS).run()
        assert not server.paused


def test_shaken_adapters_change_every_layer_and_are_exactly_undone(folder: Path) -> None:
    model = add_adapter(load_policy(folder)[0], r=2, alpha=8, seed=0)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with shaken(model):
        for module in model.modules():
            if hasattr(module, "get_delta_weight"):
                change, base = module.get_delta_weight("default"), module.get_base_layer().weight
                assert change.norm().item() == pytest.approx(base.norm().item(), rel=1e-3)
    assert same(before, model.state_dict())


def test_the_folder_for_a_server_is_written_once(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bpo_ref.sampling.weights", str(folder), str(tmp_path / "served")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.endswith(f"wrote {tmp_path / 'served'}\n")
    model, tokenizer = load_policy(tmp_path / "served")
    assert not model.config.tie_word_embeddings and tokenizer("say a word")["input_ids"]
    with pytest.raises(SystemExit, match="folder: expected one that is not there yet"):
        weights_module.main(command[-2:])
    with pytest.raises(SystemExit, match="cannot load"):
        weights_module.main([str(tmp_path / "none"), str(tmp_path / "other")])
