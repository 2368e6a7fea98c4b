"""Run trainers in processes that need not import: forks of a server that has imported what trainers import.

    done = forked.run(["-m", "accelerate.commands.accelerate_cli", "launch", …], env=…)

A new interpreter spends five seconds of the processor on PyTorch and transformers, accelerate's launcher two and a
half: a run of two processes, a dozen before its first step. Here accelerate and torchrun start processes as ever, with
their variables and in sessions of their own, but ask the server for forks instead of new interpreters. Launches in
earnest are those of test_configs.py, with the file of each launcher, and those that tests kill.

The server ends with the process that has started it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ADDRESS = "TESTS_FORKED_ADDRESS"
"""Variable that tells processes where the server listens."""
LARGEST = 1 << 20
"""Bytes of a request: arguments and variables."""


class Process:
    """A fork of the server that runs a script or module; what `subprocess.Popen` offers, as far as it is needed."""

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str], stdout: int, stderr: int) -> None:
        """Start it.

        Args:
            arguments: of an interpreter: a script or ``-m`` and a module, and theirs.
            env: all its variables.
            stdout: file descriptor.
            stderr: file descriptor.
        """
        self.returncode: int | None = None
        self._one_asks = threading.Lock()
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.connect(env[ADDRESS])
        request = json.dumps({"arguments": list(arguments), "env": dict(env), "cwd": os.getcwd()}).encode()
        socket.send_fds(self._server, [request], [stdout, stderr])
        self.pid: int = json.loads(self._server.recv(LARGEST))

    def poll(self) -> int | None:
        """The exit status as Python tells it, None while it runs."""
        if self._one_asks.acquire(blocking=False):  # else another thread waits for it
            try:
                self._hear(socket.MSG_DONTWAIT)
            except BlockingIOError:
                pass
            finally:
                self._one_asks.release()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status.

        Raises:
            subprocess.TimeoutExpired: the process runs still.
        """
        with self._one_asks:
            try:
                if self.returncode is None:
                    self._server.settimeout(timeout)
                self._hear(0)
            except TimeoutError:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0) from None
        assert self.returncode is not None
        return self.returncode

    def children(self) -> list[int]:
        """Process ids of the forks that it has asked for itself and that run; a launcher's ranks."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
            server.connect(address())
            server.send(json.dumps({"children of": self.pid}).encode())
            return list(json.loads(server.recv(LARGEST)))

    def _hear(self, flags: int) -> None:
        if self.returncode is None:
            self.returncode = json.loads(self._server.recv(LARGEST, flags))
            self._server.close()

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, unless it is known to have ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def run(arguments: Sequence[str], env: Mapping[str, str], *, timeout: float = 1800) -> subprocess.CompletedProcess[str]:
    """Run an interpreter with these arguments, as `subprocess.run` does, and capture its output.

    Raises:
        subprocess.TimeoutExpired: it took longer; it has been killed, with what it had started through the server.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = Process(arguments, {**env, ADDRESS: address()}, out.fileno(), err.fileno())
        try:
            status = process.wait(timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return subprocess.CompletedProcess(list(arguments), status, *texts)


def start(arguments: Sequence[str], env: Mapping[str, str], *, said: Path | None = None) -> Process:
    """Start an interpreter with these arguments, in a session of its own. What it prints is in a file, or nowhere."""
    with open(said or os.devnull, "wb") as file:
        return Process(arguments, {**env, ADDRESS: address()}, file.fileno(), file.fileno())


@functools.cache
def address() -> str:
    """Start the server of this process; where it listens."""
    folder = tempfile.TemporaryDirectory(prefix="forked-")
    address = os.path.join(folder.name, "socket")
    here = Path(__file__).resolve()
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(here.parent), str(here.parents[2])]),
        "PYTHONSAFEPATH": "",  # the first folder to import from is that of the script
        "OMP_NUM_THREADS": "1",  # read when PyTorch is imported
        "CUDA_VISIBLE_DEVICES": "",
    }
    server = subprocess.Popen([sys.executable, str(here), address], stdin=-1, env=variables)
    assert server.stdin is not None

    def end(theirs: int = os.getpid()) -> None:
        if os.getpid() == theirs:
            server.stdin.close()
            server.wait()
            folder.cleanup()

    atexit.register(end)
    while not os.path.exists(address):
        assert server.poll() is None, "the server of forks has ended"
        time.sleep(0.05)
    return address


# The server.


def serve(address: str) -> dict[str, Any] | None:
    """Fork for each connection and tell it the process and how that ends, until stdin is closed.

    There is one thread only, so that a fork may do whatever a new process may.

    Returns:
        In a fork, what was asked for; None in the server.
    """
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(f"{address}.new")
    listening.listen(64)
    os.rename(f"{address}.new", address)
    ended, wake = os.pipe()
    os.set_blocking(ended, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it gets Ctrl-C too, and ends it
    running: dict[int, socket.socket] = {}
    asked_by: dict[int, int] = {}
    with selectors.DefaultSelector() as ready:
        for file in (listening.fileno(), ended, 0):
            ready.register(file, selectors.EVENT_READ)
        while 0 not in (events := [key.fd for key, _ in ready.select()]):
            if ended in events:
                os.read(ended, 1 << 16)
                for pid in list(running):
                    found, status = os.waitpid(pid, os.WNOHANG)
                    if found:
                        asked_by.pop(pid)
                        with running.pop(pid) as connection, contextlib.suppress(OSError):  # nobody may listen
                            connection.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())
            if listening.fileno() in events:
                connection, _ = listening.accept()
                request, files, _, _ = socket.recv_fds(connection, LARGEST, 2)
                if not files:
                    with connection:
                        parent = json.loads(request)["children of"]
                        connection.send(json.dumps([pid for pid, by in asked_by.items() if by == parent]).encode())
                    continue
                pid = os.fork()
                if not pid:
                    for other in (listening, connection, *running.values()):
                        other.close()
                    signal.set_wakeup_fd(-1)
                    os.close(ended)
                    os.close(wake)
                    return {**json.loads(request), "files": files}
                for file in files:
                    os.close(file)
                running[pid] = connection
                asked_by[pid] = _peer(connection)
                connection.send(json.dumps(pid).encode())
    for pid in running:
        os.killpg(pid, signal.SIGKILL)
    return None


def _peer(connection: socket.socket) -> int:
    """Process at the other end."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", found)[0])


def become(arguments: Sequence[str], env: Mapping[str, str], cwd: str, files: Sequence[int]) -> None:
    """Do in this fork what a new interpreter with these arguments does."""
    os.setsid()
    for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), *files)):
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")


def popen(handler: Any, arguments: Sequence[str], env: Mapping[str, str]) -> Process:
    """Start a process of torchrun, in place of ``SubprocessHandler._popen``."""
    python, unbuffered, *rest = arguments
    assert (python, unbuffered) == (sys.executable, "-u"), arguments
    outputs = [file.fileno() if file else number for number, file in ((1, handler._stdout), (2, handler._stderr))]
    return Process(rest, env, *outputs)


def prepare() -> None:
    """Import what trainers and their launchers import, at once or later, and have torchrun ask for forks."""
    import accelerate.commands.accelerate_cli  # noqa: F401
    import torch.distributed.run
    import torch.utils.tensorboard  # noqa: F401
    import transformers.conversion_mapping
    import typeguard  # noqa: F401 - by tyro, to read arguments
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    import bpo_ref.experiments.plots
    import bpo_ref.train  # noqa: F401

    with contextlib.suppress(ImportError):  # by transformers, when it saves a model
        import deepspeed  # noqa: F401
    transformers.conversion_mapping.get_checkpoint_conversion_mapping("llama")  # makes that of all families, once

    SubprocessHandler._popen = popen
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    prepare()
    if (asked := serve(sys.argv[1])) is not None:
        become(**asked)
