"""Sandboxes of Inspect (inspect_ai) that can be snapshotted, restored and forked: ``sandbox="sandboxgym"``.

Inspect finds it by itself once both packages are installed. ``sandbox=("sandboxgym", "docker:IMAGE")`` names a root
file system, ``("sandboxgym", SandboxConfig(...))`` more. In a solver, the `Sandbox` of the sample is
``sandbox().as_type(SandboxgymEnvironment).sandbox``.

1. Every sample has a sandbox of its own, closed after it. Commands run as root of the sandbox, without this machine's
   network unless it is asked for.
2. Calls of one sample run one after the other, also where they are made at the same time. A command is killed with all
   that it started at its time limit, and when its call is cancelled, as by a sample's time limit or Ctrl-C.
3. Samples do not wait for each other, nor does a sandbox that is being made hold up the others.
"""

from __future__ import annotations

import os
import posixpath
import uuid
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    SandboxUnavailableError,
    SandboxUserUnsupportedError,
    sandboxenv,
)
from pydantic import BaseModel, ConfigDict

from sandboxgym.sandbox.base import FileTooLarge, Limits, SandboxError
from sandboxgym.sandbox.sandbox import Sandbox, make_sandbox
from sandboxgym.sandbox.shell.exec import Stop

_NO_DIRECTORY = 126  # the exit code of Docker's exec
_RUN = """\
mapfile -d '' -t words < {folder}/words
if [[ -z $(type -P -- "${{words[0]}}") && ! -e ${{words[0]}} ]]; then
    echo "sandboxgym: ${{words[0]}}: command not found" > {folder}/err; exit 127
fi
exec "${{words[@]}}" < {stdin} > {folder}/out 2> {folder}/err
"""


class SandboxConfig(BaseModel):  # type: ignore[misc]
    """Arguments of `make_sandbox`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: str = "auto"
    rootfs: str = "host"
    network: bool = False
    allow_unsafe: bool = False
    limits: Limits = Limits(seconds=86_400)  # Inspect gives each command its own time


@sandboxenv(name="sandboxgym")  # type: ignore[untyped-decorator]
class SandboxgymEnvironment(SandboxEnvironment):  # type: ignore[misc]
    """Environment of Inspect over a `Sandbox`, its attribute ``sandbox``."""

    def __init__(self, sandbox: Sandbox, directory: str) -> None:
        super().__init__()
        self.sandbox = sandbox
        self.directory = directory
        self._turn = anyio.Lock()

    @classmethod
    async def start(cls, sandbox: Sandbox) -> SandboxgymEnvironment:
        """An environment over a sandbox, such as a fork; relative paths are those of its starting directory."""
        result = await anyio.to_thread.run_sync(lambda: sandbox.start().run("pwd"))
        return cls(sandbox, result.output.rstrip("\n"))

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        """The configuration from a log or a file."""
        return SandboxConfig(**config)

    @classmethod
    async def sample_init(cls, task_name: str, config: Any, metadata: dict[str, str]) -> dict[str, SandboxEnvironment]:
        """Make one sandbox, ``default``."""
        given = SandboxConfig(rootfs=config) if isinstance(config, str) else config or SandboxConfig()
        arguments = {name: getattr(given, name) for name in SandboxConfig.model_fields}
        sandbox = await anyio.to_thread.run_sync(lambda: make_sandbox(**arguments))
        try:
            return {"default": await cls.start(sandbox)}
        except BaseException:  # one that is cancelled, too
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(sandbox.close)
            raise

    @classmethod
    async def sample_cleanup(
        cls, task_name: str, config: Any, environments: dict[str, SandboxEnvironment], interrupted: bool
    ) -> None:
        """Close the sandboxes."""
        with anyio.CancelScope(shield=True):
            for environment in environments.values():
                await anyio.to_thread.run_sync(environment.as_type(cls).sandbox.close)

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Run a command; its words and its input travel as files."""
        if user not in (None, "root", "0"):
            raise SandboxUserUnsupportedError(f"expected no user, or root, found {user!r}: a sandbox has no others")
        if any("\0" in word for word in cmd):  # as in Inspect's own; the file would take it for two words
            raise ValueError("expected a command without null bytes")
        stop = Stop()
        return await self._in_turn(self._run, cmd, input, self._path(cwd or "."), env or {}, timeout, stop, stop=stop)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Write a file; a file that exists keeps its mode."""
        path, data = self._path(file), contents.encode() if isinstance(contents, str) else contents
        await self._in_turn(self.sandbox.write_file, path, data)

    async def read_file(self, file: str, text: bool = True) -> Any:
        """Read a file, within Inspect's limit."""
        try:
            data = await self._in_turn(self._read, self._path(file), SandboxEnvironmentLimits.MAX_READ_FILE_SIZE)
        except FileTooLarge as error:
            limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR
            raise OutputLimitExceededError(limit_str=limit, truncated_output=None) from error
        return data.decode() if text else data

    def default_polling_interval(self) -> float:
        """Seconds: a command takes milliseconds to start."""
        return 0.2

    async def _in_turn(self, work: Callable[..., Any], *arguments: Any, stop: Stop | None = None) -> Any:
        """Call something that blocks, and wait for its end also when cancelled, which ``stop`` brings about."""

        async def set_when_cancelled() -> None:
            try:
                await anyio.sleep_forever()
            finally:
                if stop is not None:
                    stop.set()

        async with self._turn:
            failed: Exception | None = None
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(set_when_cancelled)
                try:
                    return await anyio.to_thread.run_sync(work, *arguments)
                except Exception as error:  # the group would raise one of groups
                    failed = error
                finally:
                    tasks.cancel_scope.cancel()
            await anyio.lowlevel.checkpoint_if_cancelled()  # a command that was stopped is no failure
            raise failed

    def _path(self, file: str) -> str:
        return posixpath.normpath(posixpath.join(self.directory, file))

    def _read(self, path: str, limit: int) -> bytes:
        return self.sandbox.read_file(path, limit=limit)

    def _run(
        self,
        cmd: list[str],
        input: str | bytes | None,
        cwd: str,
        env: dict[str, str],
        timeout: int | None,
        stop: Stop,
    ) -> ExecResult[str]:
        folder = f"/tmp/.sandboxgym-{uuid.uuid4().hex}"
        try:
            self.sandbox.write_file(f"{folder}/words", b"".join(os.fsencode(word) + b"\0" for word in cmd))
            if input is not None:
                data = input.encode() if isinstance(input, str) else input
                self.sandbox.write_file(f"{folder}/in", data)
            script = _RUN.format(folder=folder, stdin="/dev/null" if input is None else f"{folder}/in")
            result = self.sandbox.run(script, timeout=timeout, env=env, cwd=cwd, keep=True, stop=stop)
            if result.timed_out:
                raise TimeoutError(f"the command was killed after {timeout} seconds")
            out, err = (self._output(f"{folder}/{name}") for name in ("out", "err"))
        except (FileNotFoundError, NotADirectoryError) as error:  # the directory: it may have been removed
            return ExecResult(False, _NO_DIRECTORY, "", f"the command could not be run: {error}")
        except SandboxError as error:
            raise SandboxUnavailableError(str(error)) from error
        finally:
            if not self.sandbox.closed:
                self.sandbox.run(f"rm -rf {folder}", timeout=60, cwd="/")
        if result.exit_code == 126 and "ermission denied" in err + result.output:
            raise PermissionError(f"{cmd[0]}: {(err + result.output).strip()[-300:]}")
        return ExecResult(result.exit_code == 0, result.exit_code, out, err + result.output)

    def _output(self, path: str) -> str:
        """A command's output; its end, where it is more than Inspect's limit."""
        limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        try:
            data = self._read(path, limit)
        except FileNotFoundError:  # it was never started
            return ""
        except FileTooLarge:
            self.sandbox.run(f"tail -c {limit} {path} > {path}.end", timeout=60, cwd="/")
            data = self._read(f"{path}.end", limit)
        return data.decode("utf-8", "replace")
