"""Snapshots of a container's files and running processes at one instant, which any number of copies continue from.

1. The container is frozen, where it has a control group for that and none of its processes is stopped; then the shell
   and all its descendants are stopped and captured by CRIU (`capture`).
2. Where the container has written little since its start (`OverlayBackend.copied`), its layer is copied before CRIU
   lets the processes go: they continue as if nothing had been, and the copy becomes part of the tree.
3. Where it has written more, the processes stay stopped. The layer they wrote to becomes part of the tree as it is, and
   the container is replaced by a new one (``restore.py``), for its layer is frozen now; only then the stopped processes
   are ended. If that fails, `resume` lets them continue, and nothing was lost. The next snapshot is of the first kind.
4. CRIU's images (``image.py``) are kept in the store of layers, held and given back like a layer.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from sandboxgym.sandbox.base import CONTROL, NotCaptured, SandboxError, SandboxUnavailable
from sandboxgym.sandbox.checkpoint.criu import DUMP, Criu, CriuError, Value
from sandboxgym.sandbox.checkpoint.image import (
    OPTIONS,
    Content,
    CriuCheckpoint,
    ProcessImage,
    control_of,
    copy_control,
    images_of,
)
from sandboxgym.sandbox.checkpoint.restore import RestoreTarget, await_pages, revive
from sandboxgym.sandbox.layers.squash import copy_layer
from sandboxgym.sandbox.layers.store import OverlayTree
from sandboxgym.sandbox.overlay.mounts import BIND_PLACE, DEV_PLACE, EMPTY_PLACE, NOTHING_PLACE, attached_points
from sandboxgym.sandbox.overlay.processes import descendants, offspring, send, state
from sandboxgym.sandbox.shell.bash_session import Shell, ShellSession, number_inside

if TYPE_CHECKING:
    from sandboxgym.sandbox.overlay.backend import OverlayBackend
    from sandboxgym.sandbox.overlay.runtime import Container

_STOPPED_IN = ("do_signal_stop", "ptrace_stop")
GHOST_LIMIT = 64 * 2**20
"""Bytes of a deleted file that is still open, up to which it is captured."""


class Capturer:
    """A CRIU beside a live container, and a layer to whose directory it writes.

    Args:
        backend: with a live container.
        program: CRIU.

    Raises:
        SandboxUnavailable: there can be none.
    """

    def __init__(self, backend: OverlayBackend, program: str) -> None:
        assert backend.container is not None
        self._store = backend.runtime.store
        self.layer = self._store.new()
        self.images = images_of(self.layer.path)
        try:
            self.images.mkdir()
            self.criu = Criu(backend.runtime.capturer(program, backend.container), self.images)
        except BaseException:
            self._store.drop([self.layer])
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.criu.close()
        self._store.drop([self.layer])


def snapshot(
    backend: OverlayBackend, shell: Shell, program: str, *, obstacles: Callable[[], tuple[str, ...]] = tuple
) -> tuple[OverlayTree, CriuCheckpoint]:
    """Capture files and processes of a live container at one instant; it continues, or a copy in its place.

    Args:
        backend: with a live container.
        shell: in it; all that runs descends from its bash.
        program: CRIU.
        obstacles: looks for what is in the way, while CRIU starts.

    Raises:
        NotCaptured: there are obstacles.
        CriuError: it cannot be done; everything continues, as if nothing had been tried.
        SandboxFull: there is no room for it; as above.
        SandboxClosed: the container was ended, for its memory could not be loaded.
    """
    leader, container = shell.pid, backend.container
    if leader is None:
        raise CriuError("no shell was started")
    assert container is not None
    await_pages(container)
    _freeze(container)
    try:
        store = backend.runtime.store
        written = container.layer.extent(*backend.copied)
        with Capturer(backend, program) as capturer, contextlib.ExitStack() as stack:
            target = stack.enter_context(RestoreTarget(backend, program)) if written is None else None
            if found := obstacles():
                raise NotCaptured(found)
            store.check_room(((container.group.memory() if container.group else None) or 0) + (written or 0))
            if target is None:
                return _left_running(backend, shell, leader, capturer)
            return _replaced(backend, shell, leader, capturer, target)
    except SandboxUnavailable as error:
        raise CriuError(str(error)) from error
    finally:
        container.thaw()


def _freeze(container: Container) -> None:
    """Freeze the container before a CRIU is among its processes, which they could see and kill.

    Not where something is stopped, for CRIU cannot seize what is stopped and frozen.
    """
    members = descendants(container.pid)
    if any(state(pid) in "Tt" for pid in members) or not container.freeze():
        return
    if any(_waits_in(pid) in _STOPPED_IN for pid in descendants(container.pid)):  # since the look
        container.thaw()


def _waits_in(pid: int) -> str:
    """Name of the kernel function that a process waits in, as far as the kernel shows it."""
    try:
        return Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        return ""


def _left_running(
    backend: OverlayBackend, shell: Shell, leader: int, capturer: Capturer
) -> tuple[OverlayTree, CriuCheckpoint]:
    """Capture processes that continue, with a copy of the layer they write to."""
    container, below, store = backend.container, backend.below, backend.runtime.store
    assert container is not None and below is not None
    layer, sessions = store.new(), list[ShellSession]()

    def stopped() -> None:
        copy_layer(container.layer, layer, rootless=backend.rootless)
        sessions.append(shell.session())

    try:
        image = capture(backend, capturer, leader, leave_running=True, stopped=stopped)
        tree = OverlayTree(store, backend.rootfs, (layer, *below.layers), rootless=backend.rootless)
        return tree, CriuCheckpoint(image, *sessions)
    finally:
        store.drop([layer])


def _replaced(
    backend: OverlayBackend, shell: Shell, leader: int, capturer: Capturer, target: RestoreTarget
) -> tuple[OverlayTree, CriuCheckpoint]:
    """Capture processes that a copy takes the place of, with the layer they wrote to."""
    container, below = backend.container, backend.below
    assert container is not None and below is not None
    jobs = stopped_jobs(leader)
    image = capture(backend, capturer, leader)
    tree = OverlayTree(
        backend.runtime.store, backend.rootfs, (container.layer, *below.layers), rootless=backend.rootless
    )
    left = backend.part()
    try:
        session = shell.session()
        # As a whole, and not as it is touched, as a fork may be: the stopped processes are ended when this is done.
        process = revive(backend, tree, image, target)
    except BaseException as error:
        backend.settle(container, below)
        resume(backend, but=jobs)
        image.release()
        tree.release()
        if isinstance(error, SandboxError):
            raise CriuError(str(error)) from error
        raise
    shell.move(process, session)
    left.give_back()
    return tree, CriuCheckpoint(image, session)


def capture(
    backend: OverlayBackend,
    capturer: Capturer,
    leader: int,
    *,
    leave_running: bool = False,
    stopped: Callable[[], None] = lambda: None,
) -> ProcessImage:
    """Stop the processes of a live container and write them to images.

    Args:
        backend: with a live container.
        capturer: in it.
        leader: the shell, as the host numbers it.
        leave_running: let them go then; else they stay stopped.
        stopped: called when all is written, while all are stopped.

    Raises:
        CriuError: it cannot be done, or ``stopped`` failed; the processes continue, as if nothing had been tried.
    """
    mounts = _foreign_mounts(backend, leader)
    images, layer = capturer.images, capturer.layer
    options: dict[str, Value] = {
        **OPTIONS,
        "images_dir": os.fspath(images),
        "log_file": "dump.log",
        "pid": _inside(leader),
        "leave_running": leave_running,
        "leave_stopped": not leave_running,  # so that `resume` can undo the capture
        "notify_scripts": True,
        # An open file that lost the name it was opened by, but has another, gets a link beside it, in the layer. It is
        # removed after the notification, if the processes are left running.
        "link_remap": True,
        "ghost_limit": GHOST_LIMIT,
        # Watches of inotify are captured by file handles, which an overlay without nfs_export cannot open: CRIU then
        # looks for the files below these directories.
        "force_irmap": True,
        "irmap_scan_paths": ["/tmp", "/root", "/testbed", "/run"],
        "external": [f"mnt[{point}]:{point}" for point in mounts],
    }
    container = backend.container
    if container is not None and container.group is not None and container.frozen:
        options["freeze_cgroup"] = os.fspath(container.group.folders["freezer"])
    last_pid = 0

    def notified(script: str) -> None:
        nonlocal last_pid
        if script != "post-dump":
            return
        try:
            last_pid = max(map(_inside, (leader, *(info.pid for info in offspring(leader)))))
            copy_control(backend.control, control_of(layer.path))
            stopped()
        except (OSError, SandboxError) as error:
            raise CriuError(f"what the processes wrote could not be copied: {error}") from error

    try:
        began = time.monotonic()
        capturer.criu.ask(DUMP, options, notified=notified)
        content = Content(
            leader=_inside(leader),
            last_pid=last_pid,
            mounts=mounts,
            resident=sum(file.stat().st_size for file in images.glob("pages-*.img")),
            seconds=time.monotonic() - began,
        )
        return ProcessImage(backend.runtime.store, layer, content)
    except BaseException as error:
        if not (leave_running or isinstance(error, CriuError)):
            resume(backend)
        raise


def stopped_jobs(leader: int) -> frozenset[int]:
    """The stopped descendants of a shell, which `resume` must leave stopped."""
    return frozenset(info.pid for info in offspring(leader) if state(info.pid) in "Tt")


def resume(backend: OverlayBackend, *, but: frozenset[int] = frozenset()) -> None:
    """Continue captured processes; the shell last, for it is notified of its children."""
    assert backend.container is not None
    for info in reversed(offspring(backend.container.pid)):
        if info.pid not in but:
            send(info.pid, signal.SIGCONT)


def _inside(pid: int) -> int:
    number = number_inside(pid)
    if number is None:
        raise SandboxError(f"process {pid} of the sandbox is gone")
    return number


def _foreign_mounts(backend: OverlayBackend, leader: int) -> dict[str, str]:
    """Mounts of a container that CRIU does not make: mount point inside, and place of the mounted files."""
    rows = []
    for line in Path(f"/proc/{leader}/mountinfo").read_text(errors="surrogateescape").splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        rows.append((fields[2], _unescaped(fields[4]), after.split()[0]))
    own = {device for device, point, kind in rows if point in ("/", "/dev/pts") or kind == "proc"}
    bound = attached_points(backend.runtime.shown(backend.rootfs), CONTROL)
    found: dict[str, str] = {}
    for device, point, _ in rows:
        if device in own:
            continue
        if point == "/dev":
            found[point] = DEV_PLACE
        elif point.startswith("/proc/"):
            found[point] = EMPTY_PLACE if os.path.isdir(f"/proc/{leader}/root{point}") else NOTHING_PLACE
        elif point in bound:
            found[point] = BIND_PLACE.format(bound.index(point))
        elif not any(point.startswith(f"{above}/") for above in bound):  # what is mounted below comes along
            raise CriuError(f"expected a mount that the sandbox was made with, found one at {point}")
    return found


def _unescaped(path: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(code, character)
    return path
