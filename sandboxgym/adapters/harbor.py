"""Harbor's trials in this package's sandboxes: an environment for ``harbor run``, with snapshots and branches.

    harbor run -p TASKS -a oracle --environment-import-path sandboxgym.adapters.harbor:SandboxEnvironment

1. Images are those of `HarborEnv`: built by the Docker daemon, or, with ``--ek image=host`` (or a directory), carried
   out in a sandbox. Without a network the sandbox has none; Harbor's allow lists cannot be enforced and are refused.
   What the tests would install from it is in the image then, as in `HarborEnv`.
2. `SandboxEnvironment.snapshot` captures the trial under a name, in this process and as a file in ``snapshots/`` of the
   trial's directory; `SandboxEnvironment.branch` makes further environments at the present state, which end with
   the trial.
3. Calls of one trial take turns. A call that Harbor gives up, as at an agent's time limit, ends its command, and the
   next call waits for that: agent and verifier are never at work at the same time.
4. Needs Harbor (tried: 0.25, 0.26), hence Python 3.12 or newer.
"""

from __future__ import annotations

import asyncio
import copy
import io
import logging
import os
import secrets
import shlex
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from sandboxgym.brief import brief
from sandboxgym.sandbox.sandbox import Sandbox
from sandboxgym.sandbox.shell.exec import Stop
from sandboxgym.sandbox.snapshot import SandboxSnapshot

try:
    from harbor.environments.base import BaseEnvironment, ExecResult
    from harbor.environments.capabilities import EnvironmentCapabilities
    from harbor.models.task.config import NetworkMode
except ImportError:  # said when one is made, so that the module can be looked at
    BaseEnvironment = None

_T = TypeVar("_T")
log = logging.getLogger("sandboxgym")
_NO_DIRECTORY = 126  # the exit code of Docker's exec
_TESTS = "/tests/test.sh"  # which Harbor runs when the agent has ended
_LARGEST = 2**30  # bytes that are downloaded
_PATIENCE = 86_400.0  # seconds of a command without a limit: trials have limits of their own


class SandboxEnvironment(BaseEnvironment or object):  # type: ignore[misc]
    """A trial's environment in a sandbox.

    Args:
        arguments, options: of `BaseEnvironment`.
        backend: of `make_sandbox`.
        image: root file system on which the Dockerfile is carried out; None: the Docker daemon builds.
        snapshots: what snapshots hold: ``"filesystem"``, ``"auto"`` or ``"full"``.
    """

    def __init__(
        self,
        *arguments: Any,
        backend: str = "auto",
        image: str | None = None,
        snapshots: str = "filesystem",
        **options: Any,
    ) -> None:
        if BaseEnvironment is None:
            raise ImportError("this environment is one of Harbor's: pip install harbor (Python 3.12 or newer)")
        self._settings = {"backend": backend, "image": image, "snapshot": snapshots}
        self._sandbox: Sandbox | None = None
        self._stand_ins: dict[str, bytes] = {}
        self._busy = asyncio.Lock()
        self._held: dict[str, SandboxSnapshot] = {}
        self._branches: list[SandboxEnvironment] = []
        self._place = Path("snapshots")
        super().__init__(*arguments, **options)

    @staticmethod
    def type() -> str:
        """Name of this kind of environment in Harbor's results."""
        return "sandboxgym"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        """Abilities that Harbor may ask for."""
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        if not self.task_env_config.docker_image and not (self.environment_dir / "Dockerfile").is_file():
            raise FileNotFoundError(f"expected {self.environment_dir}/Dockerfile, or docker_image in task.toml")

    async def start(self, force_build: bool) -> None:
        """Build the image if it is missing, and start the sandbox."""
        await self._in_thread(self._start)
        await self.ensure_dirs(["/logs/agent", "/logs/verifier", "/logs/artifacts"])

    def _start(self) -> None:
        from sandboxgym.envs.harbor.images import HarborSettings, start_of
        from sandboxgym.envs.harbor.needs import stand_ins
        from sandboxgym.envs.harbor.tasks import read_task

        task = read_task(Path(self.environment_dir).absolute().parent)
        online = self.network_policy.network_mode != NetworkMode.NO_NETWORK
        settings = HarborSettings(
            network=online,
            offline_tests=not online,
            limits={"seconds": _PATIENCE},
            **self._settings,  # type: ignore[arg-type]
        )
        begin = start_of(task, settings)
        self._sandbox = begin.sandbox(task, settings)
        self._sandbox.restore(begin.snapshot)
        self._stand_ins = stand_ins(settings.needs_of(task))

    async def stop(self, delete: bool) -> None:
        """End the sandbox and its branches, and drop the snapshots of this process; their files stay."""
        await self._in_thread(self._end)
        for branch in self._branches:
            await branch.stop(delete)

    def _end(self) -> None:
        for snapshot in self._held.values():
            snapshot.release()
        self._held = {}
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command; what it leaves in the background continues, such as a server.

        What it prints to standard error is in ``stdout``, in its order, as with Harbor's own Docker environment.
        """
        if self._stand_ins and _TESTS in command:
            from sandboxgym.envs.harbor.dockerfile import put
            from sandboxgym.envs.harbor.needs import USE_STAND_INS

            await self._in_thread(lambda: put(self._live, list(self._stand_ins.items()), mode=0o755))
            command = f"{USE_STAND_INS}\n{command}"
        user = self._resolve_user(user)
        if user not in (None, 0, "0", "root"):
            command = f"exec runuser -u {shlex.quote(str(user))} -- bash -c {shlex.quote(command)}"
        where, variables, stop = cwd or self.task_env_config.workdir, self._merge_env(env), Stop()
        try:
            done = await self._in_thread(
                lambda: self._live.run(command, cwd=where, env=variables, timeout=timeout_sec, keep=True, stop=stop),
                stop,
            )
        except (FileNotFoundError, NotADirectoryError) as error:  # the agent may have removed the directory
            return ExecResult(stdout="", stderr=f"the command could not be run: {error}", return_code=_NO_DIRECTORY)
        if done.timed_out:
            raise TimeoutError(f"the command took more than {timeout_sec} seconds: {command[:200]}")
        return ExecResult(stdout=done.output, stderr="", return_code=done.exit_code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Write a file of this machine into the sandbox."""
        await self._upload([(target_path, Path(source_path))])

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Write the files below a directory of this machine into one of the sandbox."""
        top = Path(source_dir)
        await self._upload([(f"{target_dir}/{path.relative_to(top).as_posix()}", path) for path in top.rglob("*")])

    async def _upload(self, members: list[tuple[str, Path]]) -> None:
        from sandboxgym.envs.harbor.dockerfile import put

        await self._in_thread(lambda: put(self._live, sorted(members)))

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Write a file of the sandbox to this machine."""
        content = await self._in_thread(lambda: self._live.read_file(source_path, limit=_LARGEST))
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        Path(target_path).write_bytes(content)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Write the files below a directory of the sandbox to this machine; none leaves ``target_dir``."""
        name = f"/.download-{secrets.token_hex(8)}.tar"  # where nobody put something
        stop = Stop()

        def fetch() -> bytes:
            sandbox = self._live  # none, where the start failed
            try:
                packed = sandbox.run(f"tar -C {shlex.quote(source_dir)} -cf {name} .", cwd="/", stop=stop)
                if packed.exit_code:
                    raise RuntimeError(f"{source_dir} cannot be read: {packed.output}")
                return sandbox.read_file(name, limit=_LARGEST)
            finally:  # also of what was too large
                sandbox.run(f"rm -f {name}", cwd="/")

        unpack(await self._in_thread(fetch, stop), Path(target_dir))

    # Beyond Harbor's interface.

    async def snapshot(self, name: str) -> Path:
        """Capture the present state under a name; returns its file, for `Sandbox.unpack`.

        What commands have left running is in no snapshot; a warning names it.

        Raises:
            SnapshotNotSupported: it holds running processes, which no file can; `restore` has it all the same.
        """
        if not name.replace("-", "").replace("_", "").isalnum():
            raise ValueError(f"expected a name of letters, digits, - and _, found {name!r}")
        taken = await self._in_thread(lambda: self._live.snapshot())
        _warn(taken.lossy)
        if name in self._held:
            self._held[name].release()
        self._held[name] = taken
        place = Path(self.trial_paths.trial_dir) / self._place / f"{name}.sandbox"
        packed = await self._in_thread(taken.pack)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(packed)
        return place

    async def restore(self, name: str) -> None:
        """Return to the state of a snapshot of this trial, by its name."""
        if name not in self._held:
            raise KeyError(f"expected a snapshot of {sorted(self._held)}, found {name!r}")
        await self._in_thread(lambda: self._live.restore(self._held[name]))

    async def branch(self, count: int) -> list[SandboxEnvironment]:
        """Further environments at the present state, each with a sandbox of its own.

        Each ends by its `stop`, or with this environment. Files of their snapshots are in ``branch-1``, ``branch-2``, …
        beside those of this one. What commands have left running is in none of them; a warning names it.
        """

        def fork() -> list[SandboxEnvironment]:
            _warn(self._live.lossy())
            branches = []
            for number, sandbox in enumerate(self._live.fork(count), len(self._branches) + 1):
                twin = copy.copy(self)
                twin._sandbox, twin._busy, twin._held, twin._branches = sandbox, asyncio.Lock(), {}, []
                twin._place = self._place / f"branch-{number}"
                branches.append(twin)
            self._branches += branches
            return branches

        return await self._in_thread(fork)

    @property
    def _live(self) -> Sandbox:
        if self._sandbox is None:
            raise RuntimeError("this environment is not started")
        return self._sandbox

    async def _in_thread(self, call: Callable[[], _T], stop: Stop | None = None) -> _T:
        """Call something that blocks; one at a time, for a sandbox is not thread-safe.

        A caller that is cancelled goes at once, and the call ends by itself, soon if there is a ``stop``. The next one
        waits for that.
        """
        await self._busy.acquire()
        try:
            work = asyncio.get_running_loop().run_in_executor(None, call)
        except BaseException:
            self._busy.release()
            raise
        work.add_done_callback(lambda done: self._busy.release())
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            if stop is not None:
                stop.set()
            raise


def _warn(lost: tuple[str, ...]) -> None:
    if lost:
        log.warning("not in the snapshot: %s", brief("; ".join(lost), 500))


def unpack(content: bytes, target: Path) -> None:
    """Write the members of an archive below a directory, but those that lead out of it, and what is no file.

    An agent's link to ``/etc`` in its log directory must neither be followed nor end the trial.
    """

    def harmless(member: tarfile.TarInfo, place: str) -> tarfile.TarInfo | None:
        if member.islnk() and not os.path.lexists(os.path.join(place, member.linkname)):
            return None  # tarfile would write what was left out in its place
        try:
            return tarfile.data_filter(member, place)
        except tarfile.FilterError as error:
            log.warning("not downloaded: %s", brief(str(error), 200))
            return None

    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        archive.extractall(target, filter=harmless)
