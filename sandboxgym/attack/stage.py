"""Stage of the attempts: throw-away sandboxes of one backend, and objects of the host that they must not reach.

Everything made here is removed by `Stage.close`, or after a crash by the next ``run_directories.reap``.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from sandboxgym.attack.attempt import NotApplicable
from sandboxgym.attack.prober import Prober, ProberLost
from sandboxgym.sandbox.base import Capabilities, Limits, SandboxError, SandboxUnavailable
from sandboxgym.sandbox.sandbox import Sandbox, make_sandbox
from sandboxgym.system import interpreter

MIB = 2**20
KILL_BYTES = 500 * MIB
"""Memory that an owner process may take beyond what it had, before it is killed."""
LIMITS = Limits(seconds=20, memory=192 * MIB, processes=64, disk=24 * MIB)
"""Limits of every attacked sandbox, unless an attempt needs others."""
FULL = "full"
"""Name of the overlay backend as root, attacked after its processes came back from a snapshot."""


def limits_with(**changes: Any) -> Limits:
    """Change some of `LIMITS`; those that this version does not have are left out."""
    known = {field.name for field in fields(Limits)}
    current = {name: getattr(LIMITS, name) for name in known}
    return Limits(**{**current, **{name: value for name, value in changes.items() if name in known}})


class HostThings:
    """Objects of the host that a sandbox must not reach: a file, services, a process, shared objects.

    Attributes:
        token: what they all say.
        secret: path of a file that everybody on the host may read.
        port, abstract: of a service on the loopback device, and on an abstract socket.
        socket_path: of a service in the file system.
        process: process of this user, with the token in its command line.
        key: key of a shared memory segment, a message queue and semaphores; 0 if there can be none.
    """

    def __init__(self) -> None:
        self.token = secrets.token_hex(12)
        self._folder = tempfile.mkdtemp(prefix="sandboxgym-attack-", dir="/tmp")
        os.chmod(self._folder, 0o755)
        self.secret = os.path.join(self._folder, "secret")
        Path(self.secret).write_text(self.token)
        os.chmod(self.secret, 0o644)
        self.shared = Path("/dev/shm", f"sandboxgym-attack-{self.token}")
        self.shared.write_text(self.token)
        self.abstract = f"sandboxgym-attack-{self.token}"
        self.socket_path = os.path.join(self._folder, "socket")
        self._listeners = [self._listen(socket.AF_INET, ("127.0.0.1", 0))]
        self.port: int = self._listeners[0].getsockname()[1]
        self._listeners.append(self._listen(socket.AF_UNIX, f"\0{self.abstract}"))
        self._listeners.append(self._listen(socket.AF_UNIX, self.socket_path))
        os.chmod(self.socket_path, 0o777)
        code = f"import time; time.sleep(600)  # {self.token}"
        self.process = subprocess.Popen([sys.executable, "-I", "-S", "-c", code], env={"ATTACK": self.token})
        self.key = self._make_system_v()

    def _listen(self, family: int, address: Any) -> socket.socket:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.bind(address)
        listener.listen(16)

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, contextlib.suppress(OSError):
                        connection.sendall(self.token.encode())

        threading.Thread(target=serve, daemon=True).start()
        return listener

    def _make_system_v(self) -> int:
        self._libc = ctypes.CDLL(None)
        key = secrets.randbelow(2**30) + 2**29
        self._segment: int = self._libc.shmget(key, 4096, 0o1000 | 0o666)
        self._queue: int = self._libc.msgget(key, 0o1000 | 0o666)
        self._semaphores: int = self._libc.semget(key, 1, 0o1000 | 0o666)
        return key if min(self._segment, self._queue, self._semaphores) >= 0 else 0

    @property
    def segment(self) -> int:
        """Id of the shared memory segment."""
        return self._segment

    def close(self) -> None:
        """Remove all objects."""
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self.process.kill()
        self.process.wait()
        if self.key:
            self._libc.shmctl(self._segment, 0, None)
            self._libc.msgctl(self._queue, 0, None)
            self._libc.semctl(self._semaphores, 0, 0)
        self.shared.unlink(missing_ok=True)
        shutil.rmtree(self._folder, ignore_errors=True)


class OwnerProcess:
    """An owner process of one backend, watched."""

    def __init__(self, backend: str, image: str | None) -> None:
        self.process = subprocess.Popen(
            interpreter.module_command("sandboxgym.attack.owner", backend, image or ""),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=interpreter.environment(),
        )
        self.answer(seconds=30, most=KILL_BYTES)

    @property
    def resident(self) -> int:
        """Bytes of memory that the process has now."""
        try:
            with open(f"/proc/{self.process.pid}/statm") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
        except (OSError, IndexError):
            return 0

    def tell(self, *words: str) -> None:
        """Send the owner process a task."""
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(words).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, *, seconds: float, most: int) -> dict[str, Any]:
        """Read its answer; taking too long or too much is an answer too, and gets it killed."""
        assert self.process.stdout is not None
        deadline, before = time.monotonic() + seconds, self.resident
        while not select.select([self.process.stdout], [], [], 0.05)[0]:
            grown = self.resident - before
            if grown > most or time.monotonic() > deadline:
                self.kill()
                what = f"took {grown // MIB} MiB of memory" if grown > most else f"waited for more than {seconds:.0f} s"
                return {"verdict": "passed", "detail": f"the owner {what}, and was killed"}
        line = self.process.stdout.readline()
        if not line:
            return {"verdict": "passed", "detail": f"the owner ended with status {self.process.wait()}"}
        found: dict[str, Any] = json.loads(line)
        return found

    def kill(self) -> None:
        """Kill it with SIGKILL, as a machine that runs out of memory would."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Let the owner process end, and remove everything. Idempotent."""
        if self.process.poll() is None:
            try:
                self.process.communicate(timeout=15)
            except subprocess.TimeoutExpired:
                self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


class Stage:
    """Throw-away sandboxes of one backend.

    Args:
        backend: a name of `sandboxgym.sandbox.backends.NAMES`, or ``"full"``.
        image: for the docker backend.

    Raises:
        SandboxUnavailable: there can be none; nothing is left.
    """

    def __init__(self, backend: str, *, image: str | None = None) -> None:
        self.backend = backend
        self.image = image
        self._made: list[Sandbox] = []
        self._probers: dict[str, Prober] = {}
        self._host: HostThings | None = None
        self._owner: OwnerProcess | None = None
        self.notes: dict[str, Any] = {}
        """Findings that several attempts share."""
        probe = self._new(LIMITS)
        try:
            probe.run("true")
            self.capabilities: Capabilities = probe.backend.capabilities
        finally:
            self.drop(probe)

    @property
    def host(self) -> HostThings:
        """Objects of the host, made on first use."""
        if self._host is None:
            self._host = HostThings()
        return self._host

    def _new(self, limits: Limits) -> Sandbox:
        if self.backend == "docker":
            sandbox = make_sandbox("docker", rootfs=f"docker:{self.image}", limits=limits)
        elif self.backend == FULL:
            sandbox = make_sandbox("overlay", limits=limits, snapshot="full")
        else:
            sandbox = make_sandbox(self.backend, limits=limits)
        self._made.append(sandbox)
        return sandbox

    def sandbox(self, **limits: Any) -> Sandbox:
        """Make a live sandbox, with its own limits; for ``full`` one whose processes came back from a snapshot."""
        sandbox = self._new(limits_with(**limits))
        if self.backend == FULL:
            sandbox.execute("sleep 1000 &", timeout=20)
            snapshot = sandbox.snapshot()
            try:
                if snapshot.checkpoint is None:
                    raise SandboxUnavailable(f"processes could not be captured: {'; '.join(snapshot.lossy)}")
                sandbox.restore(snapshot)
            finally:
                snapshot.release()
        else:
            sandbox.run("true")
        return sandbox

    def drop(self, sandbox: Sandbox) -> None:
        """Close a sandbox that is no longer needed."""
        sandbox.close()
        if sandbox in self._made:
            self._made.remove(sandbox)

    @contextlib.contextmanager
    def alone(self, **limits: Any) -> Iterator[Prober]:
        """Start the program inside a sandbox of its own, for attempts that may end it."""
        sandbox = self.sandbox(**limits)
        try:
            prober = Prober(sandbox, restored=self.backend == FULL)
            try:
                yield prober
            finally:
                prober.close()
        finally:
            self.drop(sandbox)

    def prober(self, name: str = "attacker") -> Prober:
        """Get the program inside a sandbox that many attempts share; a new one if that has ended."""
        found = self._probers.get(name)
        if found is not None:
            try:
                found.let_go()
                return found
            except (ProberLost, SandboxError, OSError):
                self.forget(name)
        prober = self._probers[name] = Prober(self.sandbox(), restored=self.backend == FULL)
        return prober

    def forget(self, name: str = "attacker") -> None:
        """End a shared sandbox, so that it cannot affect the next attempt."""
        prober = self._probers.pop(name, None)
        if prober is not None:
            prober.close()
            self.drop(prober.sandbox)

    def owner(self) -> OwnerProcess:
        """Get an owner process that attempts share; a new one if that was killed."""
        if self._owner is None:
            self._owner = OwnerProcess(self.backend, self.image)
        return self._owner

    def forget_owner(self) -> None:
        """End the owner process."""
        if self._owner is not None:
            self._owner.close()
            self._owner = None

    def close(self) -> None:
        """Close everything. Idempotent."""
        self.forget_owner()
        for name in list(self._probers):
            self.forget(name)
        for sandbox in list(self._made):
            self.drop(sandbox)
        if self._host is not None:
            self._host.close()
            self._host = None

    def only_on(self, *backends: str) -> None:
        """Check that an attempt makes sense here.

        Raises:
            NotApplicable: it does not.
        """
        if self.backend not in backends:
            raise NotApplicable(f"makes sense on {' and '.join(backends)} only")
