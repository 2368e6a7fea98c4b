"""The sandboxes of a service, by their ids: created, paused, forked, ended in time; templates, snapshots, quotas.

1. Every sandbox and snapshot belongs to the API key that made it. Another key does not see it.
2. A sandbox ends at its deadline: killed, or paused if its creator said so. `Service.close` ends all that are left.
3. One thread at a time uses a sandbox; calls on it wait for each other, calls on different ones run side by side.
4. A fork, a pause and a snapshot take one instant of files and, where the service was made for it, of processes. What
   could not be kept is told (`Snap.lost`), and refused where the caller insisted on processes.
5. A call that exceeds a quota or a rate changes nothing and raises `RequestRefused` with the status 429.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import string
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

import anyio

from sandboxgym.brief import brief
from sandboxgym.e2b.commands import FOLDER, HOME, Command, Commands
from sandboxgym.e2b.quotas import Quotas, Rate, RequestRefused
from sandboxgym.errors import SnapshotError
from sandboxgym.sandbox.base import Limits, SandboxError, SandboxFull
from sandboxgym.sandbox.overlay.backend import OverlayBackend
from sandboxgym.sandbox.sandbox import Sandbox, SnapshotMode, make_sandbox
from sandboxgym.sandbox.snapshot import SandboxSnapshot

log = logging.getLogger("sandboxgym")

DEFAULT_TEMPLATE = "base"
"""Template of a sandbox whose creator names none."""
THREADS = 16
"""Threads that work on sandboxes at one time."""
MOST_TRANSFERS = 8
"""Files of one API key that are read or written at one time, each of which is in memory; further ones wait."""
_LETTERS = string.ascii_lowercase + string.digits
_PREPARE = (
    f"mkdir -p {HOME} {FOLDER} /etc/profile.d; "
    "printf 'export PATH=%q\\n' \"$PATH\" > /etc/profile.d/00-path.sh; cd /"
)  # a login shell, as the SDK starts one, would forget the programs of the root file system


@dataclass(eq=False)
class Snap:
    """A kept state: a snapshot, or the state of a paused sandbox."""

    snapshot: SandboxSnapshot
    template: str
    commands: list[Command]
    number: int
    """Number of the last command."""

    @property
    def full(self) -> bool:
        """True if the snapshot has the processes, or there were none."""
        return not self.lost

    @property
    def lost(self) -> tuple[str, ...]:
        """Names of what the snapshot lacks."""
        return tuple(self.snapshot.lossy)


@dataclass(eq=False)
class ClientSnapshot:
    """A snapshot that a client made."""

    id: str
    names: list[str]
    snap: Snap
    box: str
    """Id of its sandbox."""
    at: float = field(default_factory=time.time)


@dataclass(eq=False)
class LiveSandbox:
    """One sandbox of the service."""

    id: str
    tenant: Tenant
    template: str
    """Name told to clients: of a template, or a snapshot."""
    root: str
    """The template below."""
    sandbox: Sandbox | None
    commands: Commands
    metadata: Mapping[str, str]
    envs: Mapping[str, str]
    pauses: bool = False
    """True to pause it at its deadline, rather than to kill it."""
    pauses_fully: bool | None = None
    resumes: bool = False
    """True to resume it when a call for it arrives."""
    paused: Snap | None = None
    token: str = field(default_factory=lambda: secrets.token_hex(20))
    started: float = field(default_factory=time.time)
    ends: float = 0.0
    """Deadline as clients are told it, by the wall clock; `due` is the same on the clock that nobody sets."""
    due: float = 0.0
    timer: asyncio.TimerHandle | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    closed: bool = False
    watchers: dict[str, Any] = field(default_factory=dict)

    @property
    def state(self) -> Literal["running", "paused"]:
        """State as clients are told it."""
        return "running" if self.paused is None else "paused"


@dataclass(eq=False)
class Tenant:
    """The owner of an API key."""

    requests: Rate
    creations: Rate
    boxes: dict[str, LiveSandbox] = field(default_factory=dict)
    kept: dict[str, ClientSnapshot] = field(default_factory=dict)
    reserved: int = 0
    """Sandboxes that are being made."""
    keeping: int = 0
    """Snapshots and paused sandboxes that are being made."""
    transfers: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MOST_TRANSFERS))
    made: dict[str, asyncio.Task[LiveSandbox]] = field(default_factory=dict)
    """Sandboxes by the idempotency keys of their creation."""


class Service:
    """All sandboxes of a server.

    Args:
        templates: root file systems by name; `DEFAULT_TEMPLATE` among them.
        keys: API keys that are accepted; None: any is, and all share one tenant.
        backend: ``overlay`` or ``overlay-rootless``, or ``auto`` for the first of them that works here.
        mode: what snapshots keep, as for `make_sandbox`; None: ``"auto"`` where that is possible, else
            ``"filesystem"``.
        limits: of each sandbox.
        network: sandboxes have this machine's network.
        quotas: of each key.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        keys: frozenset[str] | None,
        *,
        backend: str = "auto",
        mode: SnapshotMode | None = None,
        limits: Limits | None = None,
        network: bool = False,
        quotas: Quotas | None = None,
    ) -> None:
        self.quotas = quotas or Quotas()
        self.limits = limits or Limits()
        self.mode: SnapshotMode | None = mode
        """Kind of state that snapshots keep; known once a template was prepared, and so is `backend`."""
        self.network = network
        self.backend = backend
        self._rootfs = dict(templates)
        self._tenants = None if keys is None else {key: self._tenant() for key in keys}
        self._everybody = self._tenant()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="e2b")
        self._templates: dict[str, tuple[Sandbox, Snap]] = {}
        self._templates_lock = asyncio.Lock()
        self._boxes: dict[str, LiveSandbox] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._over = asyncio.Event()

    def _tenant(self) -> Tenant:
        return Tenant(Rate(self.quotas.requests), Rate(self.quotas.creations))

    def tenant(self, key: str | None) -> Tenant:
        """The owner of a key.

        Raises:
            RequestRefused: nobody has it.
        """
        if self._tenants is None:
            return self._everybody
        if not key:
            raise RequestRefused(401, "expected an API key in the header X-API-Key, found none")
        for known, tenant in self._tenants.items():
            if secrets.compare_digest(known.encode(), key.encode()):
                return tenant
        raise RequestRefused(401, "the API key is not known here")

    async def work(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a function in one of the service's threads.

        A caller that is cancelled, as by a client's time limit, waits for its end, and keeps its lock: no two threads
        use one sandbox. Only the end of the service is not held up.
        """
        loop = asyncio.get_running_loop()
        try:
            thread = loop.run_in_executor(self._pool, lambda: function(*arguments, **options))
        except RuntimeError as error:  # the threads are no more
            raise RequestRefused(503, "the server is closing") from error
        try:
            return await asyncio.shield(thread)
        except asyncio.CancelledError:
            with anyio.CancelScope(shield=True):  # of Starlette's scopes, which cancel again and again
                over = loop.create_task(self._over.wait())
                while not (thread.done() or over.done()):
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait((thread, over), return_when=asyncio.FIRST_COMPLETED)
                over.cancel()
            raise

    # Templates

    async def prepare(self, name: str = DEFAULT_TEMPLATE) -> Sandbox:
        """Make a template ready; returns a sandbox on it that is never started, to be forked.

        Raises:
            RequestRefused: there is no such template.
            SandboxError: it cannot run here.
        """
        return (await self._template(name))[0]

    async def _template(self, name: str) -> tuple[Sandbox, Snap]:
        if name not in self._rootfs:
            known = ", ".join(self._rootfs)
            raise RequestRefused(404, f"template {brief(name, 80)} not found; templates here: {known}")
        async with self._templates_lock:
            if name not in self._templates:
                self._templates[name] = await self.work(self._make_template, name)
            return self._templates[name]

    def _make_template(self, name: str) -> tuple[Sandbox, Snap]:
        reasons: list[str] = []
        modes: tuple[SnapshotMode, ...] = (self.mode,) if self.mode else ("auto", "filesystem")
        for backend in ("overlay", "overlay-rootless") if self.backend == "auto" else (self.backend,):
            for mode in modes:
                try:
                    sandbox = make_sandbox(
                        backend,
                        rootfs=self._rootfs[name],
                        limits=self.limits,
                        network=self.network,
                        snapshot=mode,
                    )
                except (SandboxError, OSError, ValueError) as error:
                    reasons.append(f"{backend} ({mode}): {error}")
                    continue
                with sandbox:
                    if not isinstance(sandbox.backend, OverlayBackend):
                        raise SandboxError(f"expected the backend overlay or overlay-rootless, found {backend}")
                    try:
                        result = sandbox.execute(_PREPARE)
                    except SandboxError as error:
                        reasons.append(f"{backend} ({mode}): {error}")
                        continue
                    if result.exit_code:
                        raise SandboxError(f"the template {name!r} cannot be prepared: {result.output}")
                    self.backend, self.mode = backend, mode
                    snapshot = sandbox.snapshot(mode="filesystem")
                    (pristine,) = sandbox.fork(1)
                    return pristine, Snap(snapshot, name, [], 0)
        raise SandboxError("; ".join(reasons))

    def join(self, seconds: float) -> bool:
        """Wait until no thread works on a sandbox any more, after `close`; returns False if one still does."""
        deadline = time.monotonic() + seconds
        threads: set[threading.Thread] = set(self._pool._threads)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    # Sandboxes

    def find(self, tenant: Tenant | None, name: str) -> LiveSandbox:
        """A sandbox by its id.

        Args:
            tenant: whose it must be; None: anybody's.
            name: its id.

        Raises:
            RequestRefused: there is none.
        """
        box = self._boxes.get(name) if tenant is None else tenant.boxes.get(name)
        if box is None or box.closed:
            raise RequestRefused(404, f"sandbox {brief(name, 80)} not found")
        return box

    def name_by_token(self, token: str) -> str | None:
        """Id of the sandbox with an access token."""
        return next(
            (box.id for box in self._boxes.values() if secrets.compare_digest(box.token.encode(), token.encode())), None
        )

    async def create(
        self,
        tenant: Tenant,
        template: str,
        *,
        seconds: int,
        metadata: Mapping[str, str],
        envs: Mapping[str, str],
        pauses: bool = False,
        pauses_fully: bool | None = None,
        resumes: bool = False,
        once: str | None = None,
    ) -> LiveSandbox:
        """Make a sandbox from a template or snapshot.

        Args:
            tenant: its owner.
            template: name of a template, or id or name of a snapshot.
            seconds: until its deadline.
            metadata: kept for its owner.
            envs: environment variables of its commands.
            pauses: see `LiveSandbox`, and so the next two.
            pauses_fully: see there.
            resumes: see there.
            once: key by which the same request, repeated, gets the same sandbox.
        """
        self.check_seconds(seconds)

        async def make() -> LiveSandbox:
            kept = self._kept(tenant, template)
            snap = kept.snap if kept else (await self._template(template))[1]
            (box,) = await self._start(
                tenant,
                snap,
                1,
                seconds=seconds,
                settings={
                    "template": kept.id if kept else template,
                    "metadata": dict(metadata),
                    "envs": dict(envs),
                    "pauses": pauses,
                    "pauses_fully": pauses_fully,
                    "resumes": resumes,
                },
            )
            if isinstance(box, Exception):
                raise box
            return box

        if once is None:
            return await make()
        task = tenant.made.get(once)
        if task is None:
            task = tenant.made[once] = asyncio.ensure_future(make())
            while len(tenant.made) > 1000:
                del tenant.made[next(iter(tenant.made))]
        try:
            box = await asyncio.shield(task)
        except Exception:  # of any type: it is raised, and the next request with this key tries again
            tenant.made.pop(once, None)
            raise
        if box.closed:
            raise RequestRefused(409, "the sandbox of this idempotency key has ended")
        return box

    def check_seconds(self, seconds: int) -> None:
        """Refuse a time limit that is too long."""
        if not 0 <= seconds <= self.quotas.longest:
            raise RequestRefused(400, f"timeout: expected 0 to {self.quotas.longest:,} seconds, found {seconds:,}")

    async def _start(
        self, tenant: Tenant, snap: Snap, count: int, *, seconds: int, settings: Mapping[str, Any]
    ) -> list[LiveSandbox | Exception]:
        """Make sandboxes from one state, side by side."""
        self._reserve(tenant, count)
        try:
            pristine, _ = await self._template(snap.template)
            held = snap.snapshot.retain()
            children: list[Sandbox] = []
            try:
                async with self._templates_lock:
                    children = await self.work(pristine.fork, count)
                started = await asyncio.gather(
                    *(self.work(_restored, child, held) for child in children), return_exceptions=True
                )
            except BaseException:  # a call that is cancelled, too, leaves no sandbox behind
                await asyncio.gather(*(self.work(child.close) for child in children))
                raise
            finally:
                held.release()
            made: list[LiveSandbox | Exception] = []
            for child, error in zip(children, started, strict=True):
                if isinstance(error, BaseException):
                    await self.work(child.close)
                    made.append(refusal(error))
                    continue
                commands = Commands.of(child, snap.commands, snap.number)
                box = LiveSandbox(_name("i"), tenant, root=snap.template, sandbox=child, commands=commands, **settings)
                commands.listen()
                self._boxes[box.id] = tenant.boxes[box.id] = box
                self.set_deadline(box, seconds)
                made.append(box)
            if self._over.is_set():
                await asyncio.gather(*(self.kill(box) for box in made if isinstance(box, LiveSandbox)))
                raise RequestRefused(503, "the server is closing")
            return made
        finally:
            tenant.reserved -= count

    def _reserve(self, tenant: Tenant, count: int) -> None:
        if self._over.is_set():
            raise RequestRefused(503, "the server is closing")
        live = sum(box.paused is None for box in tenant.boxes.values()) + tenant.reserved
        if live + count > self.quotas.sandboxes:
            raise RequestRefused(
                429,
                f"at most {self.quotas.sandboxes} sandboxes run at one time: {live} do, {count} more were asked for",
            )
        tenant.creations.take(count)
        tenant.reserved += count

    def set_deadline(self, box: LiveSandbox, seconds: float) -> None:
        """Let a sandbox end that many seconds from now."""
        if box.timer is not None:
            box.timer.cancel()
        loop = asyncio.get_running_loop()
        box.ends, box.due = time.time() + seconds, loop.time() + seconds

        def expire(due: float) -> None:
            task = loop.create_task(self._expire(box, due))
            self._tasks.add(task)  # or it could be collected before it is done
            task.add_done_callback(self._tasks.discard)

        box.timer = loop.call_at(box.due, expire, box.due)

    def extend(self, box: LiveSandbox, seconds: float) -> None:
        """Let a sandbox live for that many seconds from now, unless it does anyway."""
        if asyncio.get_running_loop().time() + seconds > box.due:
            self.set_deadline(box, seconds)

    async def _expire(self, box: LiveSandbox, due: float) -> None:
        if box.closed or box.paused is not None or box.due != due:  # it was given more time
            return
        try:
            if box.pauses:
                await self.pause(box, fully=False if box.pauses_fully is False else None)
            else:
                await self.kill(box)
        except Exception as error:  # of any type: nobody waits for it, and a sandbox must not outlive its time
            log.warning("the sandbox %s is killed, for it could not be paused: %s", box.id, error)
            await self.kill(box)

    async def has_ended(self, box: LiveSandbox) -> bool:
        """True if a sandbox ended by itself, as by its disk limit; it is given up then."""
        backend = None if box.sandbox is None else box.sandbox.backend
        container = backend.container if isinstance(backend, OverlayBackend) else None
        if container is None or not container.ended:
            return False
        async with box.lock:  # what replaces one container by another, as a snapshot does, has come to its end
            backend = None if box.sandbox is None else box.sandbox.backend
            container = backend.container if isinstance(backend, OverlayBackend) else None
            if container is None or not container.ended:
                return False
        await self.kill(box)
        return True

    @contextlib.asynccontextmanager
    async def using(self, box: LiveSandbox, *, resume: bool = False) -> Any:
        """The live sandbox of a box, for one caller at a time.

        Raises:
            RequestRefused: it has ended, or is paused.
        """
        async with box.lock:
            if resume and box.paused is not None and box.resumes and not box.closed:
                await self._resume(box, max(60, int(box.ends - box.started)))
            if box.closed or box.sandbox is None:
                raise RequestRefused(
                    404, f"sandbox {box.id} not found" if box.closed else f"sandbox {box.id} is paused"
                )
            yield box.sandbox

    async def kill(self, box: LiveSandbox) -> None:
        """End a sandbox. Idempotent."""
        if box.closed:
            return
        box.closed = True
        self._boxes.pop(box.id, None)
        box.tenant.boxes.pop(box.id, None)
        if box.timer is not None:
            box.timer.cancel()
        box.commands.end_all()
        async with box.lock:
            box.commands.end_all()  # what was being started
            if box.sandbox is not None:
                await self.work(box.sandbox.close)
            if box.paused is not None:
                box.paused.snapshot.release()

    # Snapshots

    async def _capture(self, box: LiveSandbox, sandbox: Sandbox, *, fully: bool | None) -> Snap:
        """The state of a sandbox that the caller uses.

        Args:
            box: its box.
            sandbox: live.
            fully: processes must be kept (True), are not wanted (False), or are kept if they can be (None).
        """
        if fully and self.mode == "filesystem":
            raise RequestRefused(
                400, "this server keeps files only: expected no demand for memory (see --snapshot full)"
            )
        backend = sandbox.backend
        assert isinstance(backend, OverlayBackend)
        before = backend.container
        twins, number = box.commands.twins()
        box.commands.deafen()
        try:
            snapshot = await self.work(_snapshot, sandbox, files_only=fully is False)
        except (SandboxError, SnapshotError) as error:
            raise refusal(error) from error
        finally:
            if not box.closed:
                box.commands.go_on(replaced=backend.container is not before)
        if fully and snapshot.lossy:
            lost = "; ".join(snapshot.lossy)
            snapshot.release()
            raise RequestRefused(409, f"running processes cannot be kept: {brief(lost, 400)}")
        return Snap(snapshot, box.root, twins if snapshot.checkpoint is not None else [], number)

    async def pause(self, box: LiveSandbox, *, fully: bool | None) -> Snap:
        """End a sandbox's processes and keep its state under its id."""
        async with self.using(box) as sandbox:
            with self._keeping(box.tenant):
                snap = await self._capture(box, sandbox, fully=fully)
            box.commands.end_all()
            box.sandbox, box.paused = None, snap
            await self.work(sandbox.close)
            if box.timer is not None:
                box.timer.cancel()
            return snap

    async def resume(self, box: LiveSandbox, seconds: int, *, files_only: bool = False) -> bool:
        """Continue a paused sandbox, or let a live one live longer.

        Returns:
            True if it was paused.
        """
        self.check_seconds(seconds)
        async with box.lock:
            if box.closed:
                raise RequestRefused(404, f"sandbox {box.id} not found")
            if box.paused is None:
                self.extend(box, seconds)
                return False
            await self._resume(box, seconds, files_only=files_only)
            return True

    async def _resume(self, box: LiveSandbox, seconds: int, *, files_only: bool = False) -> None:
        snap = box.paused
        assert snap is not None
        self._reserve(box.tenant, 1)
        try:
            pristine, _ = await self._template(snap.template)
            async with self._templates_lock:
                (child,) = await self.work(pristine.fork, 1)
            held = snap.snapshot.files() if files_only else snap.snapshot.retain()
            try:
                await self.work(_restored, child, held)
            except BaseException as error:  # a call that is cancelled, too, leaves no sandbox behind
                await self.work(child.close)
                if isinstance(error, Exception):
                    raise refusal(error) from error
                raise
            finally:
                held.release()
            box.sandbox, box.paused = child, None
            box.commands = Commands.of(child, [] if files_only else snap.commands, snap.number)
            box.commands.listen()
            snap.snapshot.release()
            self.set_deadline(box, seconds)
        finally:
            box.tenant.reserved -= 1

    async def fork(
        self, box: LiveSandbox, count: int, seconds: int
    ) -> tuple[list[LiveSandbox | Exception], tuple[str, ...]]:
        """Make sandboxes that continue from a live or paused one as it is now; with what they lack."""
        self.check_seconds(seconds)
        if not 1 <= count <= 100:
            raise RequestRefused(400, f"count: expected 1 to 100, found {count:,}")
        async with box.lock:
            if box.closed:
                raise RequestRefused(404, f"sandbox {box.id} not found")
            snap = box.paused
            if snap is None:
                assert box.sandbox is not None
                snap = await self._capture(box, box.sandbox, fully=None)
            else:
                snap = Snap(snap.snapshot.retain(), snap.template, snap.commands, snap.number)
        try:
            settings = {
                "template": box.template,
                "metadata": dict(box.metadata),
                "envs": dict(box.envs),
                "pauses": box.pauses,
                "pauses_fully": box.pauses_fully,
                "resumes": box.resumes,
            }
            return await self._start(box.tenant, snap, count, seconds=seconds, settings=settings), snap.lost
        finally:
            snap.snapshot.release()

    async def snapshot(self, box: LiveSandbox, name: str | None, *, fully: bool | None) -> ClientSnapshot:
        """Keep the state of a sandbox, which continues, for new ones."""
        async with box.lock:
            if box.closed:
                raise RequestRefused(404, f"sandbox {box.id} not found")
            with self._keeping(box.tenant):
                if box.paused is not None:
                    old = box.paused
                    snap = Snap(old.snapshot.retain(), old.template, old.commands, old.number)
                else:
                    assert box.sandbox is not None
                    snap = await self._capture(box, box.sandbox, fully=fully)
        if name is not None:
            for other in box.tenant.kept.values():
                if name in other.names:
                    other.names.remove(name)
        kept = ClientSnapshot(_name("snap"), [] if name is None else [name], snap, box.id)
        box.tenant.kept[kept.id] = kept
        return kept

    def _kept(self, tenant: Tenant, name: str) -> ClientSnapshot | None:
        return tenant.kept.get(name) or next((kept for kept in tenant.kept.values() if name in kept.names), None)

    def forget(self, tenant: Tenant, name: str) -> None:
        """Delete a snapshot; sandboxes that were made from it stay."""
        kept = self._kept(tenant, name)
        if kept is None:
            raise RequestRefused(404, f"snapshot {brief(name, 80)} not found")
        del tenant.kept[kept.id]
        kept.snap.snapshot.release()

    @contextlib.contextmanager
    def _keeping(self, tenant: Tenant) -> Iterator[None]:
        """Count a snapshot against the quota while it is taken."""
        number = len(tenant.kept) + sum(box.paused is not None for box in tenant.boxes.values()) + tenant.keeping
        if number >= self.quotas.kept:
            raise RequestRefused(429, f"at most {self.quotas.kept} snapshots and paused sandboxes are kept at one time")
        tenant.keeping += 1
        try:
            yield
        finally:
            tenant.keeping -= 1

    async def end(self) -> None:
        """End all sandboxes of the service, whose clients are told, and refuse new ones; calls under way go on."""
        self._over.set()
        await asyncio.gather(*(self.kill(box) for box in list(self._boxes.values())), return_exceptions=True)

    async def close(self) -> None:
        """End all sandboxes of the service, and release its snapshots. No call is under way any more."""
        await self.end()
        for tenant in [self._everybody, *(self._tenants or {}).values()]:
            for name in list(tenant.kept):
                self.forget(tenant, name)
        for pristine, snap in self._templates.values():
            snap.snapshot.release()
            await self.work(pristine.close)
        self._templates = {}
        self._pool.shutdown(wait=False)


def _restored(child: Sandbox, snapshot: SandboxSnapshot) -> None:
    child.restore(snapshot)
    if snapshot.checkpoint is None:  # pipes of commands that are not there
        child.execute(f"rm -rf {FOLDER}/*")


def _snapshot(sandbox: Sandbox, *, files_only: bool) -> SandboxSnapshot:
    return sandbox.snapshot(mode="filesystem" if files_only else None)


def _name(prefix: str) -> str:
    return prefix + "".join(secrets.choice(_LETTERS) for _ in range(20 - len(prefix)))


def refusal(error: BaseException) -> RequestRefused:
    """An error of a sandbox as an answer."""
    if isinstance(error, RequestRefused):
        return error
    if isinstance(error, SandboxFull):
        return RequestRefused(507, str(error))
    if isinstance(error, SandboxError | SnapshotError | OSError):
        return RequestRefused(500, f"the sandbox: {error}")
    log.error("a sandbox failed", exc_info=error)
    return RequestRefused(500, f"the server failed: {type(error).__name__}: {brief(str(error), 200)}")
