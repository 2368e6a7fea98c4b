"""Sandboxes of Inspect (inspect_ai) that can be snapshotted, restored and forked: ``sandbox="sandboxgym"``.

Inspect finds it by itself once both packages are installed. ``sandbox=("sandboxgym", "docker:IMAGE")`` names a root
file system, ``("sandboxgym", SandboxConfig(...))`` more. In a solver, the `Sandbox` of the sample is
``sandbox().as_type(SandboxgymEnvironment).sandbox``.

1. Every sample has a sandbox of its own, closed after it, without this machine's network unless it is asked for.
2. Commands run as root of the sandbox, or as the user that the call or the configuration names (see `find_account`)
   where the backend has users and the root file system ``setpriv`` (of util-linux). Files are read and written as the
   configuration's user.
3. Calls of one sample run one after the other, also where they are made at the same time. A command is killed with all
   that it started at its time limit, and when its call is cancelled, as by a sample's time limit or Ctrl-C.
4. Samples do not wait for each other, nor does a sandbox that is being made hold up the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import posixpath
import shlex
import uuid
from collections.abc import Callable, Iterator
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

from sandboxgym.adapters.accounts import Account, NoSuchAccount, find_account
from sandboxgym.sandbox.base import FileTooLarge, Limits, Result, SandboxError, SandboxUnavailable
from sandboxgym.sandbox.sandbox import Sandbox, make_sandbox
from sandboxgym.sandbox.shell.exec import Stop

_NOT_STARTED = 126  # the exit code of Docker's exec
_FILE_SECONDS = 600  # in which a user has read or written a file
_SYSTEM = "/usr/sbin:/usr/bin:/sbin:/bin"
"""PATH of the adapter's own programs: that of an image may hold a user's directory, whose programs root would run."""
_BASH = ("bash", "--norc", "--noprofile", "-c")
_FACTS = f"""printf '\\0%s' "$PWD" "$EUID" "$PATH" "$(PATH={_SYSTEM}; type -P bash)"
"""
_RUN = """\
{path}
mapfile -d '' -t words < {folder}/words
if [[ ! -x . ]]; then echo "sandboxgym: $PWD: Permission denied" > {folder}/err; exit 126; fi
if [[ -z $(type -P -- "${{words[0]}}") && ! -e ${{words[0]}} ]]; then
    echo "sandboxgym: ${{words[0]}}: command not found" > {folder}/err; exit 127
fi
exec "${{words[@]}}" < {stdin} >> {folder}/out 2>> {folder}/err
"""
# The files are the user's, or /dev/stdin and /dev/stdout could not be opened; their folder is root's, or the user could
# have root read another file for it.
_BECOME = """\
: > {folder}/out && : > {folder}/err && chown {uid}:{gid} {folder}/* || exit 1
exec setpriv --reuid={uid} --regid={gid} --groups={groups} --inh-caps=-all -- bash --norc --noprofile -c {script}
"""
_REGULAR = """\
[[ ! -e $1 || -f $1 || -d $1 ]] || { echo "$1: Invalid argument" >&2; exit 1; }
"""
_READ = _REGULAR + 'exec head -c "$2" "$1"'
_WRITE = _REGULAR + 'mkdir -p "${1%/*}/" && exec cat > "$1"'


class SandboxConfig(BaseModel):  # type: ignore[misc]
    """Arguments of `make_sandbox`, and the default user.

    With a ``user``, commands start in the root file system's directory where that user may write there, else in
    ``/home/NAME``, which is made for them if it is missing.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: str = "auto"
    rootfs: str = "host"
    network: bool = False
    allow_unsafe: bool = False
    limits: Limits = Limits(seconds=86_400)  # Inspect gives each command its own time
    user: str | None = None


@sandboxenv(name="sandboxgym")  # type: ignore[untyped-decorator]
class SandboxgymEnvironment(SandboxEnvironment):  # type: ignore[misc]
    """Environment of Inspect over a `Sandbox`, its attribute ``sandbox``."""

    def __init__(
        self, sandbox: Sandbox, directory: str, *, user: str | None = None, uid: int = 0, path: str | None = None
    ) -> None:
        """Take over a sandbox.

        Args:
            sandbox: of the environment, which closes it.
            directory: that relative paths start from.
            user: whose commands and files these are by default; None: the sandbox's own.
            uid: number of the sandbox's own user.
            path: PATH of commands; None: that of the sandbox, where the adapter's own programs are looked up then, too.
        """
        super().__init__()
        self.sandbox = sandbox
        self.directory = directory
        self.user = user
        self._uid = uid
        self._search = path
        self._turn = anyio.Lock()

    @classmethod
    async def start(cls, sandbox: Sandbox, *, user: str | None = None) -> SandboxgymEnvironment:
        """An environment over a sandbox, with a default user; relative paths are those of its starting directory.

        Raises:
            NoSuchAccount: there is no such user.
            SandboxUserUnsupportedError: nothing can run as that user.
        """

        def made() -> SandboxgymEnvironment:
            output = sandbox.start().run(_FACTS).output
            if output.count("\0") < 4:
                raise SandboxUnavailableError(f"no command runs in this sandbox: {output}")
            directory, uid, path, bash = output.split("\0")[-4:]
            environment = cls(sandbox, directory, user=user, uid=int(uid), path=path if bash.strip() else None)
            environment._settle()
            return environment

        environment: SandboxgymEnvironment = await anyio.to_thread.run_sync(made)
        return environment

    async def fork(self, k: int) -> list[SandboxgymEnvironment]:
        """Environments over forks of the sandbox, with its user and directory; the caller closes their sandboxes."""
        children = await self._in_turn(self.sandbox.fork, k)
        shared: dict[str, Any] = {"user": self.user, "uid": self._uid, "path": self._search}
        return [type(self)(child, self.directory, **shared) for child in children]

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        """The configuration from a log or a file."""
        return SandboxConfig(**config)

    @classmethod
    async def sample_init(cls, task_name: str, config: Any, metadata: dict[str, str]) -> dict[str, SandboxEnvironment]:
        """Make one sandbox, ``default``."""
        given = SandboxConfig(rootfs=config) if isinstance(config, str) else config or SandboxConfig()
        arguments = {name: getattr(given, name) for name in SandboxConfig.model_fields if name != "user"}
        sandbox = await anyio.to_thread.run_sync(lambda: make_sandbox(**arguments))
        try:
            return {"default": await cls.start(sandbox, user=given.user)}
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
        """Run a command, as a user in the form that `find_account` takes; its words and its input travel as files."""
        stop = Stop()
        where = self._path(cwd or ".")
        return await self._in_turn(self._run, cmd, input, where, env or {}, user, timeout, stop, stop=stop)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Write a file as the default user. Without one, a file that exists gets mode 644, too."""
        path, data = self._path(file), contents.encode() if isinstance(contents, str) else contents
        if self.user is None:
            await self._in_turn(self.sandbox.write_file, path, data)
        else:
            stop = Stop()
            await self._in_turn(self._write_as_user, path, data, stop, stop=stop)

    async def read_file(self, file: str, text: bool = True) -> Any:
        """Read a file as the default user, within Inspect's limit."""
        stop = Stop()
        read = self._read if self.user is None else self._read_as_user
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        try:
            data = await self._in_turn(read, self._path(file), limit, stop, stop=stop)
        except FileTooLarge as error:
            limit_str = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR
            raise OutputLimitExceededError(limit_str=limit_str, truncated_output=None) from error
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

    def _read(self, path: str, limit: int, stop: Stop | None = None) -> bytes:
        return self.sandbox.read_file(path, limit=limit)

    def _read_as_user(self, path: str, limit: int, stop: Stop) -> bytes:
        with self._file_command(_READ, path, str(limit + 1), stop=stop) as folder:
            return self._read(f"{folder}/out", limit)

    def _write_as_user(self, path: str, data: bytes, stop: Stop) -> None:
        with self._file_command(_WRITE, path, input=data, stop=stop):
            pass

    @contextlib.contextmanager
    def _file_command(self, script: str, *words: str, input: bytes | None = None, stop: Stop) -> Iterator[str]:
        """Context of what the default user does with a file, the first word; gives the folder of its output.

        Raises:
            OSError: as `open` would.
        """
        env = {**self._own, "LC_ALL": "C"}
        cmd = [*_BASH, script, "bash", *words]
        with self._command(cmd, input, "/", env, None, _FILE_SECONDS, stop) as (result, folder):
            if result.exit_code:
                raise _os_error((self._output(f"{folder}/err") + result.output).strip(), words[0])
            yield folder

    def _run(
        self,
        cmd: list[str],
        input: str | bytes | None,
        cwd: str,
        env: dict[str, str],
        user: str | None,
        timeout: int | None,
        stop: Stop,
    ) -> ExecResult[str]:
        data = input.encode() if isinstance(input, str) else input
        try:
            with self._command(cmd, data, cwd, env, user, timeout, stop) as (result, folder):
                out, err = (self._output(f"{folder}/{name}") for name in ("out", "err"))
        except (FileNotFoundError, NotADirectoryError) as error:  # the directory: it may have been removed
            return ExecResult(False, _NOT_STARTED, "", f"the command could not be run: {error}")
        except NoSuchAccount as error:
            return ExecResult(False, _NOT_STARTED, "", f"the command could not be run: {error}")
        if result.exit_code == 126 and "ermission denied" in err + result.output:
            raise PermissionError(f"{cmd[0]}: {(err + result.output).strip()[-300:]}")
        return ExecResult(result.exit_code == 0, result.exit_code, out, err + result.output)

    @contextlib.contextmanager
    def _command(
        self,
        cmd: list[str],
        input: bytes | None,
        cwd: str,
        env: dict[str, str],
        user: str | None,
        timeout: int | None,
        stop: Stop,
    ) -> Iterator[tuple[Result, str]]:
        """Context of a command that has ended: its result, and the folder with its output in ``out`` and ``err``.

        Raises:
            NoSuchAccount: there is no such user.
        """
        if any("\0" in word for word in cmd):  # as in Inspect's own; the file would take it for two words
            raise ValueError("expected a command without null bytes")
        token = uuid.uuid4().hex
        folder = f"{self._temporary}/.sandboxgym-{token}"
        try:
            account = self._account(user)
            self.sandbox.write_file(f"{folder}/words", b"".join(os.fsencode(word) + b"\0" for word in cmd), mode=0o600)
            if input is not None:
                self.sandbox.write_file(f"{folder}/in", input, mode=0o600)
            path = env.get("PATH", self._search)
            quoted = shlex.quote(folder)
            script = _RUN.format(
                path="" if path is None else f"export PATH={shlex.quote(path)}",
                folder=quoted,
                stdin="/dev/null" if input is None else f"{quoted}/in",
            )
            if account is not None:
                groups = ",".join(map(str, account.groups))
                script = shlex.quote(f"echo {token}\n{script}")
                script = _BECOME.format(folder=quoted, uid=account.uid, gid=account.gid, groups=groups, script=script)
                env = {"HOME": account.home, "USER": account.name, "LOGNAME": account.name, **env}
            env = {**env, **self._own}
            result = self.sandbox.run(script, timeout=timeout, env=env, cwd=cwd, keep=True, stop=stop)
            if result.timed_out:
                raise TimeoutError(f"the command was killed after {timeout} seconds")
            yield (result if account is None else _started(result, token, account)), folder
        except SandboxError as error:
            raise SandboxUnavailableError(str(error)) from error
        finally:
            if not self.sandbox.closed:
                self._as_root(f"rm -rf {shlex.quote(folder)}")

    def _account(self, user: str | None) -> Account | None:
        """The user of a command; None: the sandbox's own, as which all commands start.

        Raises:
            NoSuchAccount: there is no such user.
            SandboxUserUnsupportedError: there are no others.
        """
        user = user or self.user
        if not user or user == str(self._uid) or (user == "root" and self._uid == 0):
            return None
        about = self.sandbox.backend.capabilities
        if not (about.isolated and about.owners):
            raise SandboxUserUnsupportedError(
                f"expected no user, or the sandbox's own, found {user!r}: the backend {about.name} has no others"
            )
        account = find_account(user, *(self._text(f"/etc/{name}") for name in ("passwd", "group")))
        return None if account.uid == self._uid and ":" not in user else account

    def _text(self, path: str) -> str:
        try:
            return self.sandbox.read_file(path).decode("utf-8", "replace")
        except OSError:  # an image may have none
            return ""

    def _settle(self) -> None:
        """Find the default user and a directory where that user may write, see `SandboxConfig`."""
        account = self._account(None)
        if account is None:
            self.user = None
            return
        look = [*_BASH, "[[ -w . ]]"]
        with self._command(look, None, self.directory, self._own, None, None, Stop()) as (result, _):
            if result.exit_code == 0:
                return
        self.directory = posixpath.normpath(f"/home/{account.name}")
        folder = shlex.quote(self.directory)
        self._as_root(f"[[ -e {folder} ]] || {{ mkdir -p {folder} && chown {account.uid}:{account.gid} {folder}; }}")

    @property
    def _temporary(self) -> str:
        return "/tmp" if self.sandbox.backend.capabilities.isolated else f"{self.directory}/tmp"

    @property
    def _own(self) -> dict[str, str]:
        """Environment in which the adapter's own programs are looked up."""
        return {} if self._search is None else {"PATH": _SYSTEM}

    def _as_root(self, script: str) -> None:
        self.sandbox.run(script, timeout=60, env=self._own, cwd="/")

    def _output(self, path: str) -> str:
        """A command's output; its end, where it is more than Inspect's limit."""
        limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        try:
            data = self._read(path, limit)
        except FileNotFoundError:  # it was never started
            return ""
        except FileTooLarge:
            self._as_root(f"tail -c {limit} {shlex.quote(path)} > {shlex.quote(path + '.end')}")
            data = self._read(f"{path}.end", limit)
        return data.decode("utf-8", "replace")


def _started(result: Result, token: str, account: Account) -> Result:
    """The result of a command that printed a token when it had become another user, without that.

    Raises:
        SandboxUserUnsupportedError: it could not become that user.
        SandboxUnavailable: it was ended before.
    """
    before, found, after = result.output.partition(f"{token}\n")
    if found:
        return dataclasses.replace(result, output=before + after)
    said = before.strip() or f"exit code {result.exit_code}"
    if result.exit_code in (1, 126, 127) and ("setpriv" in said or "chown" in said):
        raise SandboxUserUnsupportedError(
            f"no command can run as user {account.name!r} in this sandbox (by setpriv of util-linux and chown, in "
            f"{_SYSTEM}): {said}"
        )
    raise SandboxUnavailable(f"a command ended before it could run as user {account.name!r}: {said}")


def _os_error(said: str, path: str) -> OSError:
    """The error that a program printed last, in the language C."""
    for code in errno.errorcode:
        if said.endswith(f": {os.strerror(code)}"):
            return OSError(code, os.strerror(code), path)
    return OSError(errno.EIO, said[-300:], path)
