"""``--server colocate``: a run's own servers start, sleep and end with it, however it ends, and leave nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from fake_engine import wait_until
from served_runs import SMALL, pretrained, same, server_of, trainer_of, weights_of

from bpo_ref.args import Args, resolved
from bpo_ref.config import ConfigError
from bpo_ref.experiments.gpu_memory import SHAPES, shortage
from bpo_ref.running import colocated, keeper
from bpo_ref.running.colocated import OwnServer, command_of, environment_of
from bpo_ref.session import TrainingFailed
from bpo_ref.train import Trainer
from sandboxgym.system import proc, run_directories

HERE = Path(__file__).parent
TRAIN = HERE.parents[2] / "bpo_ref/train.py"
COLOCATE: dict[str, Any] = {"server": ("colocate",)}
ALL = 4
"""Processes of a server: two of its keeper, the server, its child."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    pretrained(folder, size="0.2M")
    return folder


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of sockets, whose path all servers of a test have in their environment; all of it is to be gone."""
    runtime = Path(tempfile.mkdtemp(prefix="run-"))  # the names of sockets are short
    monkeypatch.setenv("SANDBOXGYM_RUNTIME", str(runtime))
    monkeypatch.setenv("SANDBOXGYM_VLLM", str(python_in(tmp_path)))
    monkeypatch.setenv(forked.ADDRESS, forked.address())
    yield runtime
    wait_until(lambda: not alive(runtime), 60)
    assert not [path for path in runtime.glob("*-*")], "a folder is left"
    shutil.rmtree(runtime)


def python_in(folder: Path) -> Path:
    """A Python in which vLLM is a stand-in."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{HERE / "fake_vllm.py"}" "$@"\n')
    path.chmod(0o700)
    return path


def alive(runtime: Path) -> set[int]:
    """Processes that were started for servers, with their keepers: they have the folder in their environment."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            text = path.joinpath("environ").read_bytes()
            ended = proc.stat(int(path.name)).state == "Z"
        except OSError:
            continue
        if f"TMPDIR={runtime}".encode() in text and not ended:
            found.add(int(path.name))
    return found


def own_trainer(folder: Path, out: Path, **options: Any) -> Trainer:
    return trainer_of(folder, out, **{**COLOCATE, **options})


def program(folder: Path, out: Path, **options: Any) -> forked.Process:
    """A run as a process of its own, in a session of its own."""
    config = out.with_suffix(".json")
    given = {**SMALL, **options, "server": ["colocate"], "model": str(folder), "trackers": [], "out": str(out)}
    config.write_text(json.dumps(given))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
    return forked.start([str(TRAIN), "--config", str(config)], environment, said=out.with_suffix(".said"))


def learns(out: Path) -> bool:
    """True if the run has metrics of an update; the file alone exists before signals are caught."""
    path = out / "metrics.jsonl"
    return path.exists() and path.stat().st_size > 0


def asked(out: Path) -> dict[str, Any]:
    """Options and environment with which the server of the first process was started."""
    found: dict[str, Any] = json.loads((out / "servers/0.log").read_text().splitlines()[0])
    return found


def test_a_run_with_its_own_server_learns_what_one_with_another_server_does(
    runtime: Path, folder: Path, tmp_path: Path
) -> None:
    with server_of(folder) as server:
        theirs = trainer_of(folder, tmp_path / "theirs", server)
        theirs.run()
    mine = own_trainer(folder, tmp_path / "mine")
    assert len(alive(runtime)) == ALL, "keepers, server, its child"
    assert not list((tmp_path / "mine/served").glob("start-*/*.safetensors")), "read, and as large as the model"
    (claimed,) = runtime.glob("served-*")
    assert claimed.stat().st_mode & 0o077 == 0, "others cannot reach the server"
    mine.run()
    assert same(weights_of(mine), weights_of(theirs))
    assert not alive(runtime), "it ends with the run, not later"
    assert not list((tmp_path / "mine/served").iterdir())


@pytest.mark.slow
def test_adapters_alone_reach_its_own_server(runtime: Path, folder: Path, tmp_path: Path) -> None:
    """The server was started with the weights below the adapters, also when the run is resumed."""
    options: dict[str, Any] = {"lora_r": 3, "lora_alpha": 8, "lr": 0.05, "server_sends": "adapters"}
    own_trainer(folder, tmp_path / "out", updates=1, **options).run()
    given = asked(tmp_path / "out")["options"]
    assert given[given.index("--max-lora-rank") + 1] == "8"
    own_trainer(folder, tmp_path / "out", resume=True, **options).run()
    with server_of(folder, rank=8) as server:
        trainer_of(folder, tmp_path / "whole", server, **options).run()
    mine, theirs = (json.loads((tmp_path / out / "results.json").read_text()) for out in ("out", "whole"))
    assert mine["scores"]["bpo-forest@2"] == theirs["scores"]["bpo-forest@2"]
    assert mine["counters"]["tokens"] == theirs["counters"]["tokens"]


@pytest.mark.slow
def test_two_runs_on_a_machine_do_not_meet(runtime: Path, folder: Path, tmp_path: Path) -> None:
    one, other = (own_trainer(folder, tmp_path / name) for name in ("one", "other"))
    assert len(alive(runtime)) == 2 * ALL
    one.run()
    assert len(alive(runtime)) == ALL
    other.run()
    assert same(weights_of(one), weights_of(other))


@pytest.mark.parametrize(
    ("python", "kind", "message"),
    [
        ("/none/such", "", r"ended with status 127 while it started: /none/such: No such file"),
        (sys.executable, "", r"ended with status 1 while it started: .*No module named '?vllm"),
        (None, "broken", r"ended with status 1 while it started: ValueError: no such model \(its log: .*0\.log\)"),
        (None, "hangs", r"did not start within 2 s"),
    ],
)
def test_a_server_that_does_not_start_refuses_the_run(
    runtime: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: str, kind: str, message: str
) -> None:
    monkeypatch.setenv("FAKE_VLLM", kind)
    monkeypatch.setattr(keeper, "POLITE", 0.1)
    options = {"server_timeout": 0.2} if kind == "hangs" else {}
    with pytest.raises(ConfigError, match=f"server: colocate: .*{message}"):
        own_trainer(folder, tmp_path / "out", server_python=python, **options)
    assert not alive(runtime)


def test_a_log_that_cannot_be_written_refuses_the_run(runtime: Path, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/servers").write_text("not a folder")
    with pytest.raises(ConfigError, match=r"server: colocate cannot start a server with the log .*servers"):
        own_trainer(folder, tmp_path / "out")


def test_a_disk_without_room_for_the_first_weights_refuses_the_run(
    runtime: Path, folder: Path, tmp_path: Path, disk: Path
) -> None:
    (disk / "filler").write_bytes(bytes(500_000))
    with pytest.raises(ConfigError, match=r"server: colocate: the weights cannot be written to .*No space left"):
        own_trainer(folder, tmp_path / "out", server_weights=str(disk / "weights"))
    assert not list((disk / "weights").iterdir())


def test_a_socket_of_too_long_a_path_is_refused(
    runtime: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SANDBOXGYM_RUNTIME", str(runtime / ("long" * 20)))
    with pytest.raises(ConfigError, match=r"paths of \d+ bytes, and Linux allows 107: set SANDBOXGYM_RUNTIME"):
        own_trainer(folder, tmp_path / "out")


def test_a_server_that_cannot_serve_the_run_is_ended(
    runtime: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "bpo_ref.running.servers.difference", lambda *_, **__: "server: expected something else, found this"
    )
    with pytest.raises(ConfigError, match="expected something else"):
        own_trainer(folder, tmp_path / "out")
    assert not alive(runtime)


@pytest.mark.slow
def test_a_server_that_is_killed_in_a_rollout_ends_the_run_at_once(runtime: Path, folder: Path, tmp_path: Path) -> None:
    """Without the minutes that repetitions take: nobody starts it again. What is saved continues with another one."""
    trainer = own_trainer(folder, tmp_path / "out", updates=3, save_every=1, server_retries=9)
    rollouts, took = trainer._rollouts, []

    def killed(seed: tuple[int, ...]) -> Any:
        if trainer.session.step == 1:
            server = next(pid for pid in alive(runtime) if b"fake_vllm" in Path(f"/proc/{pid}/cmdline").read_bytes())
            threading.Timer(0.05, os.kill, (server, signal.SIGKILL)).start()
            took.append(time.monotonic())
        return rollouts(seed)

    trainer._rollouts = killed  # type: ignore[method-assign]
    with pytest.raises(TrainingFailed, match=r"the server has ended.*its log: .*0\.log.*--resume continues"):
        trainer.run()
    assert time.monotonic() - took[0] < 400
    assert not alive(runtime)
    again = own_trainer(folder, tmp_path / "out", updates=3, save_every=1, resume=True)
    again.run()
    whole = own_trainer(folder, tmp_path / "whole", updates=3, save_every=1)
    whole.run()
    assert same(weights_of(again), weights_of(whole))


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["starting", "ready", "stubborn"])
def test_nothing_outlives_a_trainer_that_is_killed(
    runtime: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """The fixture looks for processes and folders that are left."""
    monkeypatch.setenv("FAKE_VLLM", {"starting": "hangs", "stubborn": "stubborn"}.get(phase, ""))
    process = program(folder, tmp_path / "out", updates=1000)
    wait_until(lambda: len(alive(runtime)) == ALL)
    if phase != "starting":
        wait_until(lambda: learns(tmp_path / "out"))
    process.kill()
    process.wait(120)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["starting", "learning"])
def test_ctrl_c_ends_the_server_with_the_run(
    runtime: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "hangs" if phase == "starting" else "")
    process = program(folder, tmp_path / "out", updates=1000)
    wait_until(lambda: len(alive(runtime)) == ALL)
    if phase == "learning":
        wait_until(lambda: learns(tmp_path / "out"))
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    status = process.wait(120)
    told = (tmp_path / "out.said").read_text()
    assert status in (130, -signal.SIGINT), told
    assert not alive(runtime)
    if phase == "learning":
        assert "continue with --resume" in told


def test_a_server_whose_keeper_is_killed_is_not_left(runtime: Path, folder: Path, tmp_path: Path) -> None:
    trainer = own_trainer(folder, tmp_path / "out")
    own = trainer.session._servers._own  # type: ignore[union-attr]
    assert own is not None
    own._keeper.kill()
    with pytest.raises(TrainingFailed, match="the server has ended"):
        trainer.run()
    assert not alive(runtime)


OWNER = """
import os, sys, time
from pathlib import Path
from bpo_ref.running.colocated import OwnServer
own = OwnServer(sys.argv[2:], os.environ, Path(sys.argv[1]))
time.sleep(1000)
"""


def owner(log: Path, *command: str, environment: Mapping[str, str] = os.environ) -> subprocess.Popen[bytes]:
    """A trainer that has only just started its server."""
    whole = [sys.executable, "-c", OWNER, str(log), *command]
    environment = {**environment, "PYTHONPATH": str(TRAIN.parents[1])}
    return subprocess.Popen(whole, env=environment, start_new_session=True)


def keepers_of(process: subprocess.Popen[bytes], runtime: Path) -> tuple[int, int]:
    """Both processes of a trainer's keeper, the second of which is a child of the first."""
    (first,) = (pid for pid in alive(runtime) if proc.stat(pid).parent == process.pid)
    (second,) = (pid for pid in alive(runtime) if proc.stat(pid).parent == first)
    return first, second


def killed_at_once(*pids: int) -> None:
    """They are stopped first, so that none of them sees the end of another one."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)


@pytest.mark.parametrize("killed", ["first", "second", "group", "both"])
def test_nothing_outlives_a_trainer_and_a_keeper_killed_at_the_same_moment(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: str
) -> None:
    """The fixture looks for what is left. The server's child has a session of its own."""
    monkeypatch.setenv("FAKE_VLLM", "stubborn" if killed == "first" else "hangs")
    program = os.environ["SANDBOXGYM_VLLM"]
    process = owner(tmp_path / "log", program, "-m", "vllm.entrypoints.cli.main", "serve", "none")
    try:
        wait_until(lambda: any(command_line(pid).startswith(b"sleep") for pid in alive(runtime)))
    except AssertionError:
        process.kill()
        raise
    (child,) = (pid for pid in alive(runtime) if command_line(pid).startswith(b"sleep"))
    assert os.getsid(child) == child and len(alive(runtime)) == ALL
    first, second = keepers_of(process, runtime)
    groups = {"first": [first], "second": [second], "group": [-first], "both": [first, second]}
    killed_at_once(process.pid, *groups[killed])
    process.wait()
    if killed == "both":
        wait_until(lambda: alive(runtime) == {child})
        (left,) = run_directories.reap()
        assert left.removed
        assert not alive(runtime)


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.slow
def test_each_of_two_processes_has_a_server(runtime: Path, folder: Path, tmp_path: Path) -> None:
    from tiny_runs import ENVIRONMENT, launcher

    given = {**SMALL, "server": ["colocate"], "model": str(folder), "trackers": []}
    config = tmp_path / "config.json"
    config.write_text(json.dumps(given))
    named = {name: os.environ[name] for name in ("SANDBOXGYM_RUNTIME", "SANDBOXGYM_VLLM")}
    command = [*launcher(TRAIN, 2)[1:], "--config", str(config), "--out", str(tmp_path / "out")]
    done = forked.run(command, {**ENVIRONMENT, **named})
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(path.name for path in (tmp_path / "out/servers").iterdir()) == ["0.log", "1.log"]
    alone = own_trainer(folder, tmp_path / "alone")
    alone.run()
    two, one = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("out", "alone"))
    assert two["processes"] == 2 and two["scores"] == one["scores"]
    environment = asked(tmp_path / "out")["environment"]
    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & environment.keys()


# How it would be on GPUs.


def test_on_a_gpu_a_server_has_its_process_s_own_and_can_sleep(tmp_path: Path) -> None:
    args = Args(backend="vllm", server=("colocate",), server_memory=0.3, dtype="bfloat16", context=900)
    command = " ".join(command_of(args, tmp_path, cuda=True))
    assert "--enable-sleep-mode --gpu-memory-utilization 0.3" in command
    assert "--dtype bfloat16 --max-model-len 900" in command and "--enforce-eager" not in command
    device = torch.device("cuda", 1)
    assert environment_of(args, device, {"CUDA_VISIBLE_DEVICES": "4,GPU-a7"})["CUDA_VISIBLE_DEVICES"] == "GPU-a7"
    assert environment_of(args, device, {})["CUDA_VISIBLE_DEVICES"] == "1"
    assert environment_of(args, device, {})["VLLM_SERVER_DEV_MODE"] == "1"
    assert "VLLM_CPU_KVCACHE_SPACE" not in environment_of(args, device, {})
    assert environment_of(args, torch.device("cpu"), {"VLLM_CPU_KVCACHE_SPACE": "4"})["VLLM_CPU_KVCACHE_SPACE"] == "4"


def test_processes_of_several_machines_are_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(colocated.platform, "node", iter(["node1"]).__next__)
    args = Args(backend="vllm", server=("colocate",), out=str(tmp_path))
    with pytest.raises(ConfigError, match="one machine, found node1, node2"):
        colocated.started(args, None, None, None, lambda mine: [*mine, "node2"])  # type: ignore[arg-type]


def test_a_gpu_too_small_for_trainer_and_server_is_refused_with_both_numbers() -> None:
    shape = SHAPES["Qwen/Qwen2.5-7B-Instruct"]
    config = type("Config", (), {
        "hidden_size": shape.hidden, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "intermediate_size": shape.ffn, "vocab_size": shape.vocabulary,
        "model_type": "qwen2", "tie_word_embeddings": False,
    })  # fmt: skip
    given = {"backend": "vllm", "server": ("colocate",), "model": "Qwen/Qwen2.5-7B-Instruct", "lora_r": 32}
    known: dict[str, Any] = {"layout": "ddp", "gpus": 1, "available": 24 * 2**30}
    args = resolved(Args(**given, dtype="bfloat16", server_memory=0.4))  # type: ignore[arg-type]
    told = shortage(args, config, **known)
    assert told is not None and "beside a server of 9.6 GiB (0.4 of 24.0 GiB): lower server_memory" in told
    args = resolved(Args(**given, dtype="bfloat16", server_memory=0.2))  # type: ignore[arg-type]
    assert shortage(args, config, **known) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"server": ("colocate", "http://a:1")}, "server: expected addresses, or colocate alone"),
        ({"server": ("colocate",), "server_sleeps": True}, "server_sleeps: .*leave it out"),
        ({"server": ("http://a:1",), "server_memory": 0.2}, "server_memory: expected it with server=colocate"),
        ({"server": ("http://a:1",), "server_python": "python3"}, "server_python: expected it with server=colocate"),
        ({"server": ("colocate",), "server_memory": 1.5}, "server_memory: expected more than 0"),
        ({"server": ("colocate",), "staleness": 1, "tis": 2.0}, "staleness: .*does not go with server=colocate"),
        ({"server": ("colocate",), "backend": "hf"}, "server: expected addresses with backend=vllm alone"),
    ],
)
def test_settings_that_contradict_it_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(Args(**{"algo": "bpo-forest", "backend": "vllm", **options}))


def test_a_server_ends_when_nobody_knows_it_any_more(runtime: Path, tmp_path: Path) -> None:
    """This happens to a session that fails later while it is made."""
    command = [os.environ["SANDBOXGYM_VLLM"], "-m", "vllm.entrypoints.cli.main", "serve", "none"]
    own = OwnServer(command, os.environ | {"FAKE_VLLM": "hangs"}, tmp_path / "log")
    wait_until(lambda: len(alive(runtime)) == ALL)
    del own
    assert not alive(runtime)
