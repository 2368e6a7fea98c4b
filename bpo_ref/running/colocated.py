"""vLLM servers that a run starts on its own machine, one for each of its processes (``--server colocate``).

What this module promises:

1. A server is there for its process alone: it listens on a Unix socket in a folder that no other user can enter, so no
   port has to be free, and two runs on a machine do not meet.
2. It ends with its process, however that ends, and leaves neither processes nor files but its log (`keeper`). If both
   processes of the keeper are killed as well, the next run on the machine ends what is left, or ``sandboxgym gc``.
3. A server that does not start, or ends, ends the run with a sentence that names its log.
4. On a GPU it is on its process's own, and sleeps whenever nothing is sampled.

The engine is a process of its own: vLLM requires the versions of PyTorch and transformers that it was built for, which
may be others than the trainer's; a fault in its kernels ends a process; and only its HTTP API tells the version of the
weights of every token.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bpo_ref.config import ConfigError
from bpo_ref.learning.checkpoint import writing
from bpo_ref.running import keeper
from bpo_ref.sampling.engine import EngineError, EngineUnavailable
from bpo_ref.sampling.vllm import DEVELOPER, RUNTIME_ADAPTERS, VllmEngine
from bpo_ref.sampling.weights import write_weights
from sandboxgym.sandbox.base import SandboxError
from sandboxgym.sandbox.copy import processes
from sandboxgym.system import run_directories
from sandboxgym.tree.envs import described

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedTokenizerBase

    from bpo_ref.args import Args
    from bpo_ref.learning.models import CausalLM

logger = logging.getLogger("sandboxgym")

KIND = "served"
run_directories.register_reaper(KIND, "sandboxgym.sandbox.copy.processes:reap")

LONGEST_START = 10.0
"""A server may take this many times ``server_timeout`` to start."""
LONGEST_SOCKET = 107
"""Bytes of the longest path of a Unix socket on Linux."""
OWN_SOCKETS = 36
"""Bytes of the names of vLLM's own sockets, in its temporary folder: UUIDs."""
RANKS = (8, 16, 32, 64, 128, 256)
"""Ranks of adapters that a vLLM server can be started for."""
ON_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # with it a process more, which spins between turns
}
"""Environment of a server without a GPU, where the user's says nothing else: small, for trying things out."""
OF_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH")
"""Variables of the trainer that mean something else to vLLM."""


class ColocatedEngine(VllmEngine):
    """A server that a process of this run has started.

    Args:
        url: of its socket.
        log: file with what it has printed.
    """

    def __init__(self, url: str, log: Path) -> None:
        super().__init__(url)
        self.log = log

    def _call(self, *given: Any, **named: Any) -> Any:
        try:
            return super()._call(*given, **named)
        except EngineUnavailable as error:
            if isinstance(error.__cause__, ConnectionRefusedError | FileNotFoundError):  # nobody starts it again
                raise EngineError(f"{self.name}: the server has ended{last_words(self.log)}") from error
            raise


class OwnServer:
    """A vLLM server that this process has started, with its keeper.

    Args:
        command: its program and arguments; the socket is added.
        environment: of the program.
        log: file for what it prints.

    Raises:
        ConfigError: it cannot be started here.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        folder = run_directories.claim(KIND)
        path, temporary = folder / "socket", folder / "t"
        self.log, self.url = log, f"unix://{path}"
        try:
            if (length := len(os.fsencode(temporary)) + 1 + OWN_SOCKETS) > LONGEST_SOCKET:
                raise ConfigError(
                    f"server: vLLM's sockets in {temporary} would have paths of {length} bytes, and Linux allows "
                    f"{LONGEST_SOCKET}: set SANDBOXGYM_RUNTIME to a folder with a shorter path"
                )
            log.parent.mkdir(parents=True, exist_ok=True)
            temporary.mkdir()
            with log.open("ab") as file:
                self._keeper = subprocess.Popen(
                    [sys.executable, keeper.__file__, str(os.getpid()), str(folder), *command, "--uds", str(path)],
                    env={**environment, "TMPDIR": str(temporary), processes.MARK: folder.name},  # for the reaper
                    cwd=folder,  # Python looks for modules in it
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,  # Ctrl-C is for the trainer, which ends the server when it has saved
                )
        except OSError as error:
            run_directories.give_back(folder)
            raise ConfigError(
                f"server: colocate cannot start a server with the log {log} ({described(error)})"
            ) from error
        except BaseException:
            run_directories.give_back(folder)
            raise
        self.close = weakref.finalize(self, _end, self._keeper, folder, os.getpid())
        """End the server, if it has not ended; also called when the interpreter ends."""

    def wait(self, seconds: float) -> None:
        """Wait until it answers.

        Raises:
            ConfigError: it has ended, or does not answer within that time.
        """
        end, engine = time.monotonic() + seconds, VllmEngine(self.url)
        while True:
            if (status := self._keeper.poll()) is not None:
                told = last_words(self.log)
                raise ConfigError(f"server: colocate: the server ended with status {status} while it started{told}")
            with suppress(EngineError):
                engine.health(seconds=5.0)
                return
            if time.monotonic() > end:
                told = last_words(self.log)
                raise ConfigError(f"server: colocate: the server did not start within {seconds:g} s{told}")
            time.sleep(0.2)


def _end(process: subprocess.Popen[bytes], folder: Path, owner: int) -> None:
    if os.getpid() != owner:  # a fork
        return
    process.terminate()
    try:
        process.wait(keeper.POLITE + 20.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    try:
        run_directories.give_back(folder)  # the reaper ends what a keeper that was killed has left
    except (OSError, SandboxError) as error:
        logger.warning("a server of this run is left, for `sandboxgym gc` to end: %s", error)


def last_words(log: Path) -> str:
    """The last line that a server has printed, and where the others are."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 2**14))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    errors = [line for line in lines if "Error" in line] or lines
    return (f": {errors[-1][:300]}" if errors else "") + f" (its log: {log})"


def python_of(args: Args) -> str:
    """Path of the Python that has vLLM."""
    return args.server_python or os.environ.get("SANDBOXGYM_VLLM") or sys.executable


def command_of(args: Args, folder: Path, *, cuda: bool) -> list[str]:
    """Command line that starts a vLLM server for a run, without its socket.

    Args:
        args: settings of the run.
        folder: with the model that it is started with.
        cuda: whether it has a GPU.
    """
    command = [python_of(args), "-m", "vllm.entrypoints.cli.main", "serve", str(folder), "--enable-scale-out"]
    command += ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
    command += ["--logprobs-mode", "processed_logprobs", "--disable-uvicorn-access-log"]
    command += ["--dtype", args.dtype, "--max-model-len", str(args.context)]
    if cuda:
        command += ["--enable-sleep-mode", "--gpu-memory-utilization", str(args.server_memory)]
    else:
        command += ["--enforce-eager"]  # to compile takes minutes
    if args.server_sends == "adapters":
        rank = next((rank for rank in RANKS if rank >= args.lora_r), args.lora_r)
        command += ["--enable-lora", "--max-lora-rank", str(rank)]
    return command


def environment_of(args: Args, device: torch.device, environment: Mapping[str, str]) -> dict[str, str]:
    """Environment of a server on this device, from that of the trainer."""
    kept = {
        name: value
        for name, value in environment.items()
        if name not in OF_LAUNCHER and not name.startswith(("TORCHELASTIC_", "ACCELERATE_", "FSDP_"))
    }
    for setting in (DEVELOPER, RUNTIME_ADAPTERS):
        name, _, value = setting.partition("=")
        kept[name] = value
    kept["PATH"] = os.pathsep.join(filter(None, (str(Path(python_of(args)).parent), kept.get("PATH"))))
    kept["VLLM_NO_USAGE_STATS"] = "1"
    if device.type != "cuda":
        return {**ON_CPU, **kept}
    visible = [name for name in kept.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    kept["CUDA_VISIBLE_DEVICES"] = visible[device.index or 0] if visible else str(device.index or 0)
    return kept


def start_folder(args: Args) -> Path:
    """Folder with the model that servers are started with; runs that share ``server_weights`` have one each."""
    name = hashlib.sha256(str(Path(args.out).resolve()).encode()).hexdigest()[:12]
    return Path(args.server_weights or Path(args.out) / "served").resolve() / f"start-{name}"


def started(
    args: Args,
    model: CausalLM,
    tokenizer: PreTrainedTokenizerBase,
    accelerator: Accelerator,
    gather: Callable[[list[Any]], list[Any]],
) -> tuple[OwnServer, list[ColocatedEngine]]:
    """Start a server in each process; all processes have to call it.

    Args:
        args: settings of the run.
        model: that servers are started with, whole; which weights they have does not matter, unless adapters alone
            will be sent.
        tokenizer: of the model.
        accelerator: the processes of the run.
        gather: collects the lists of all processes.

    Returns:
        This process's own, and all of them.

    Raises:
        ConfigError: in all processes, if one of the servers does not start, or the processes are on several machines.
    """
    if len(hosts := set(gather([platform.node()]))) > 1:
        raise ConfigError(
            f"server: colocate is for the processes of one machine, found {', '.join(sorted(hosts))}: start a server "
            "per GPU there, and name their addresses"
        )
    folder = start_folder(args)
    own: OwnServer | None = None
    try:
        _together(gather, partial(_write, args, model, tokenizer, folder) if accelerator.is_main_process else _nothing)
        cuda = accelerator.device.type == "cuda"

        def start() -> None:
            nonlocal own
            log = Path(args.out).resolve() / "servers" / f"{accelerator.process_index}.log"
            environment = environment_of(args, accelerator.device, os.environ)
            own = OwnServer(command_of(args, folder, cuda=cuda), environment, log)
            own.wait(LONGEST_START * args.server_timeout)

        _together(gather, start)
        assert own is not None
        for path in folder.glob("*.safetensors") if accelerator.is_main_process else ():
            path.unlink()  # as large as the model, and read
        return own, [ColocatedEngine(url, log) for url, log in gather([(own.url, own.log)])]
    except BaseException:
        if own is not None:
            own.close()
        raise


def _nothing() -> None:
    """Do nothing, as all processes but the first."""


def _write(args: Args, model: CausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    try:
        with writing():
            write_weights(model, folder, dtype=getattr(torch, args.dtype), adapted=args.server_sends != "adapters")
            tokenizer.save_pretrained(folder)
    except OSError as error:
        raise ConfigError(
            f"server: colocate: the weights cannot be written to {folder} ({described(error)})"
        ) from error


def _together(gather: Callable[[list[Any]], list[Any]], action: Callable[[], object]) -> None:
    """Do something in each process; raises in all of them what the first one that fails says."""
    refusal: str | None = None
    try:
        action()
    except ConfigError as error:
        refusal = str(error)
    if told := [reason for reason in gather([refusal]) if reason is not None]:
        raise ConfigError(told[0])
