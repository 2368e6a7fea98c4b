"""A real vLLM server on the CPU samples what the trainer would, also after it was killed and started again.

``make test-vllm`` makes the environment of vLLM, whose python SANDBOXGYM_VLLM names, and runs these tests.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from components import missing
from fake_engine import wait_until
from over_sockets import SocketGroup
from safetensors.torch import load_file, save_file
from served_runs import assert_greedy_trees_are_equal, greedily, moved, pretrained, told, trainer_of
from test_colocated import alive, command_line, keepers_of, killed_at_once, owner

from bpo_ref.args import Args
from bpo_ref.config import ConfigError
from bpo_ref.running import servers
from bpo_ref.running.colocated import command_of, environment_of
from bpo_ref.sampling import nccl, served, vllm, weights
from bpo_ref.sampling.nccl import described
from bpo_ref.session import TrainingFailed

PYTHON = os.environ.get("SANDBOXGYM_VLLM", "")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("vllm")]
VLLM = ("-m", "vllm.entrypoints.cli.main")
OPTIONS = (
    "--enable-scale-out", "--enable-prefix-caching", "--enable-prompt-tokens-details", "--dtype", "float32",
    "--logprobs-mode", "processed_logprobs", "--enforce-eager", "--block-size", "32",
    "--max-model-len", "160", "--host", "127.0.0.1",
)  # fmt: skip
SETTINGS = {
    "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1",
}  # fmt: skip
"""Without the last two a server on a CPU has a process more, as one on a GPU has not: it takes half as long again to
start, and spins between turns."""


class Server:
    """A server process of its own session, which can be killed with all of its children."""

    def __init__(self, folder: Path, log: Path, *more: str, program: tuple[str, ...] = VLLM) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.folder, self.log, self.more, self.program = folder, log, more, program
        self.start()
        try:
            self.ready()
        except BaseException:  # also the limit of a test: nobody else would end it
            self.kill()
            raise

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [
            PYTHON,
            *self.program,
            "serve",
            str(self.folder),
            *OPTIONS,
            *self.more,
            "--port",
            str(self.port),
        ]
        path = f"{Path(PYTHON).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, env={**environment, **SETTINGS, "PATH": path}, stdout=log, stderr=log, start_new_session=True
            )

    def ready(self) -> None:
        end = time.monotonic() + 600
        while True:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < end, self.log.read_text()[-3000:]
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.5)

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def post(self, path: str, body: Any) -> None:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60):
            pass

    def turns(self) -> int:
        """Number of turns that it has sampled."""
        return self.log.read_text(errors="replace").count("POST /inference/v1/generate HTTP/1.1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of heads that vLLM can compute on a CPU (32 numbers each), with tied embeddings."""
    folder = tmp_path_factory.mktemp("model")
    pretrained(folder, size="3M")
    return folder


@pytest.fixture(scope="module")
def untied(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model that servers are started with."""
    if not PYTHON:
        missing("vllm", "SANDBOXGYM_VLLM names no python with vLLM (make test-vllm makes one)")
    untied = tmp_path_factory.mktemp("served") / "untied"
    weights.main([str(folder), str(untied)])
    return untied


@pytest.fixture(scope="module")
def server(untied: Path) -> Iterator[Server]:
    found = Server(untied, untied.parent / "log")
    yield found
    found.kill()


@pytest.mark.parametrize(("embeddings", "driver"), [("tied", "async"), ("untied", "async"), ("tied", "lockstep")])
def test_greedy_trees_are_those_of_the_sampler_in_the_process(
    server: Server,
    folder: Path,
    untied: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    embeddings: str,
    driver: str,
) -> None:
    greedily(monkeypatch)
    model = folder if embeddings == "tied" else untied
    here = trainer_of(model, tmp_path / "here", backend="hf", algo="bpo-paper")
    there = trainer_of(model, tmp_path / "there", server, algo="bpo-paper", driver=driver)
    assert there.session.policy.config.tie_word_embeddings == (embeddings == "tied")
    assert_greedy_trees_are_equal(here, there)


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.7}, {"lora_r": 2}, {"untied": True}],
    ids=["full", "tempered", "adapters", "untied"],
)
def test_a_run_learns_from_its_turns(
    server: Server, folder: Path, untied: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    given = dict(options)
    trainer_of(untied if given.pop("untied", False) else folder, tmp_path, server, **given).run()
    assert_little_mismatch(tmp_path)
    for update in updates_of(tmp_path):  # later turns begin with what the server has read for earlier ones
        assert update["rollout/prefilled_tokens"] > 0 and update["rollout/reused_tokens"] > 0


def assert_little_mismatch(out: Path) -> None:
    """Two updates learned from turns of the trainer's own weights."""
    apart = [update["rollout/sampler_mismatch"] for update in updates_of(out)]
    assert len(apart) == 2 and max(apart) < 1e-4


def updates_of(out: Path) -> list[dict[str, float]]:
    """Numbers that a run has logged of its updates."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "rollout/sampler_mismatch" in line]


def test_rollouts_are_sampled_beside_an_update(server: Server, folder: Path, tmp_path: Path) -> None:
    """With the weights from before it: after the first update they are not the trainer's any more."""
    trainer_of(folder, tmp_path, server, updates=3, lr=0.1, staleness=1, tis=2.0).run()
    first, second, third = updates_of(tmp_path)
    assert first["rollout/staleness"] == 0 and second["rollout/staleness"] == third["rollout/staleness"] == 1
    assert first["rollout/sampler_mismatch"] < 1e-4 < third["rollout/sampler_mismatch"]


def test_the_same_streams_give_the_same_turns(server: Server, folder: Path, tmp_path: Path) -> None:
    trainer = trainer_of(folder, tmp_path, server)
    first, second, other = (told(trainer._rollouts((seed,))) for seed in (0, 0, 1))
    trainer.session.close()
    assert first == second != other


def test_an_output_layer_that_is_not_in_the_file_is_noticed(
    server: Server, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault of vLLM 0.32: it answers that it has loaded the weights, and keeps what the file does not hold."""
    write = weights.write_weights

    def without_head(model: Any, folder: Path, *, dtype: torch.dtype) -> None:
        write(model, folder, dtype=dtype)
        path = folder / "model.safetensors"
        kept = {name: weight.clone() for name, weight in load_file(path).items() if name != "lm_head.weight"}
        save_file(kept, path, metadata={"format": "pt"})

    monkeypatch.setattr(weights, "write_weights", without_head)
    with pytest.raises(TrainingFailed, match="says that it has loaded the weights"):
        trainer_of(folder, tmp_path, server, lr=1e-12).run()


def test_weights_of_another_version_are_replaced_before_anything_is_learned(
    server: Server, folder: Path, tmp_path: Path
) -> None:
    trainer = trainer_of(folder, tmp_path, server, server_retries=3)
    trainer.session.player(1.0)
    server.post("/update_weight_version", {"new_version": "of somebody else"})
    edges = [edge for tree in trainer._rollouts((0,)) for edge in tree.edges()]
    trainer.session.close()
    assert edges
    for edge in edges:
        assert edge.action.data.sampler_logps == pytest.approx(edge.action.data.logps, abs=1e-4)


def test_a_server_that_a_killed_trainer_has_left_in_the_middle_of_loading_is_taken_up_again(
    server: Server, folder: Path, tmp_path: Path
) -> None:
    server.post("/pause?mode=wait", {})
    server.post("/update_weight_version", {"new_version": vllm.LOADING})
    trainer_of(folder, tmp_path, server).run()
    assert_little_mismatch(tmp_path)


def test_a_run_that_does_not_fit_is_refused(server: Server, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a context of at least 161 tokens, found 160"):
        trainer_of(folder, tmp_path, server, context=161)


def test_adapters_alone_are_served_on_top_of_the_weights_that_the_server_was_started_with(
    untied: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedily(monkeypatch)
    adapters: dict[str, Any] = {"lora_r": 2, "lora_alpha": 8, "lr": 0.05}
    other = Server(untied, tmp_path / "log", "--enable-lora", "--max-lora-rank", "8")
    try:
        here = trainer_of(folder, tmp_path / "here", backend="hf", **adapters)
        there = trainer_of(folder, tmp_path / "there", other, server_sends="adapters", **adapters)
        assert_greedy_trees_are_equal(here, there, adapters=True)
        trainer_of(folder, tmp_path / "run", other, server_sends="adapters", **adapters).run()
        with pytest.raises(ConfigError, match=r"expected adapters of rank 16 .* found rank 8 at most"):
            trainer_of(folder, tmp_path / "large", other, server_sends="adapters", lora_r=16)
    finally:
        other.kill()
    assert_little_mismatch(tmp_path / "run")


def test_the_run_s_own_server_learns_and_ends_with_it(
    folder: Path, untied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`test_colocated` has all the ways in which it can end, with a stand-in."""
    runtime = Path(tempfile.mkdtemp(prefix="run-"))  # the names of sockets are short
    monkeypatch.setenv("SANDBOXGYM_RUNTIME", str(runtime))
    trainer_of(folder, tmp_path / "out", server=("colocate",), server_timeout=60.0).run()
    assert_little_mismatch(tmp_path / "out")
    assert not alive(runtime) and not list(runtime.glob("served-*"))
    shutil.rmtree(runtime)


def test_nothing_of_its_own_server_outlives_a_trainer_and_a_keeper_killed_at_the_same_moment(
    untied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the engine in processes of its own, as on a GPU, which outlive the server if nobody ends them."""
    runtime = Path(tempfile.mkdtemp(prefix="run-"))
    monkeypatch.setenv("SANDBOXGYM_RUNTIME", str(runtime))
    args = Args(backend="vllm", server=("colocate",), context=160, server_python=PYTHON)
    environment = environment_of(args, torch.device("cpu"), os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    process = owner(tmp_path / "log", *command_of(args, untied, cuda=False), environment=environment)
    try:
        wait_until(lambda: any(command_line(pid).startswith(b"VLLM::EngineCore") for pid in alive(runtime)), 300)
        killed_at_once(process.pid, keepers_of(process, runtime)[0])
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not alive(runtime) and not list(runtime.glob("served-*")), 60)
    shutil.rmtree(runtime)


def test_weights_arrive_as_over_nccl_and_a_server_without_it_is_refused(
    server: Server, folder: Path, untied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of vLLM's receiving side, but for sockets in the place of NCCL."""
    with pytest.raises(ConfigError, match="nccl sends from a GPU, and this process has cpu"):
        trainer_of(folder, tmp_path / "none", server, server_sends="nccl")
    for module in (vllm, servers):
        monkeypatch.setattr(module, "NCCL_DEVICES", ("cpu",))
    monkeypatch.setattr(nccl, "NcclGroup", SocketGroup)
    with pytest.raises(ConfigError, match=r"weights over NCCL \(start it with --weight-transfer-config .* none"):
        trainer_of(folder, tmp_path / "other", server, server_sends="nccl")
    program, option = (str(Path(__file__).with_name("over_sockets.py")),), '{"backend": "nccl"}'
    other = Server(untied, tmp_path / "log", "--weight-transfer-config", option, program=program)
    try:
        trainer_of(folder, tmp_path / "out", other, server_sends="nccl").run()
        trainer_of(folder, tmp_path / "lora", other, server_sends="nccl", lora_r=2, lr=0.05).run()
        assert SocketGroup.opened == SocketGroup.closed == 8, "a group per update: rolled weights, and three versions"
        assert not list((tmp_path / "out/served").glob("*/*.safetensors"))
        monkeypatch.setattr(nccl, "described", lambda weights: {**described(weights), "names": ["model.norm.weight"]})
        with pytest.raises(TrainingFailed, match="failed with status"):
            trainer_of(folder, tmp_path / "garbled", other, server_sends="nccl").run()
    finally:
        other.kill()
    for name in ("out", "lora"):
        assert_little_mismatch(tmp_path / name)


def test_a_server_that_is_killed_in_a_rollout_and_started_again_gets_the_weights_again(
    server: Server, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test: it takes another start of the server, for which requests wait up to ten minutes."""
    monkeypatch.setattr(served, "LONGEST_PAUSE", 2.0)
    trainer = trainer_of(folder, tmp_path, server, server_retries=300, prompts=8)
    moved(trainer, 0)
    trainer.session.player(1.0)
    before = server.turns()

    def restart() -> None:
        wait_until(lambda: server.turns() > before + 8, 300)
        server.kill()
        server.start()

    thread = threading.Thread(target=restart)
    thread.start()
    trees = trainer._rollouts((0,))
    thread.join()
    trainer.session.close()
    edges = [edge for tree in trees for edge in tree.edges()]
    assert len(trees) == 8
    for edge in edges:
        assert edge.action.data.sampler_logps == pytest.approx(edge.action.data.logps, abs=1e-4)
    assert server.log.read_text(errors="replace").count("Application startup complete") == 2
