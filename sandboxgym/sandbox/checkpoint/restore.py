"""Restore containers from an image: new namespaces, a new layer, the captured processes, a terminal of their own.

1. `RestoreTarget` is such a container before the image to restore is known: its CRIU starts meanwhile.
2. A large memory is restored lazily (`fork`): the processes get pages as they touch them, and a container continues
   after the same short time whatever its size. A process outside the container does that (``system/userfaults.py``).
   It ends when all pages are restored, and with the container; its images are not deleted before; if it fails the
   container is ended.
3. Pages that are not restored yet cannot be captured: `await_pages` has them brought, and waits.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from sandboxgym.sandbox.base import Process, SandboxClosed, SandboxUnavailable
from sandboxgym.sandbox.checkpoint import criu
from sandboxgym.sandbox.checkpoint.criu import RESTORE, SECONDS, Criu, CriuError, Value
from sandboxgym.sandbox.checkpoint.image import OPTIONS, ProcessImage, copy_control
from sandboxgym.sandbox.layers.squash import squash
from sandboxgym.sandbox.layers.store import OverlayTree
from sandboxgym.sandbox.overlay.cgroups import rlimits
from sandboxgym.sandbox.overlay.criu_process import DONE
from sandboxgym.sandbox.overlay.processes import NamespaceProcess, readable
from sandboxgym.sandbox.overlay.runtime import Container

if TYPE_CHECKING:
    from sandboxgym.sandbox.overlay.backend import OverlayBackend

LARGEST = 2**31 - 1
"""Bytes of memory up to which pages are restored lazily; more was not tried."""

_WORK = "criu"
_LOG, _PAGES_LOG = "restore.log", "pages.log"


class RestoreTarget:
    """A container like those of ``backend`` in which CRIU waits for an image to restore; discarded if that fails.

    Args:
        backend: live or not.
        program: CRIU.

    Raises:
        SandboxUnavailable: there can be none.
    """

    def __init__(self, backend: OverlayBackend, program: str) -> None:
        self._shared = backend.runtime
        self.container = self._shared.container(backend.flavour)
        self.work = self.container.layer.path / _WORK
        try:
            self.work.mkdir()
            self.criu = Criu(self._shared.restorer(program, self.container, self.work), self.work)
        except BaseException as error:
            self._shared.discard(self.container)
            if isinstance(error, EOFError | OSError):
                raise SandboxUnavailable(f"no sandbox can be made for captured processes: {error}") from error
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.criu.close()
        if error is not None:
            self._shared.discard(self.container)


def fork(backend: OverlayBackend, tree: OverlayTree, image: ProcessImage, program: str) -> Process:
    """Start a backend on ``tree`` with the processes of ``image``; returns the shell, with its terminal.

    Args:
        backend: not live.
        tree: captured with ``image``.
        image: of a container of the same kind.
        program: CRIU.

    Raises:
        SandboxUnavailable, SandboxFull: it could not be done, and the backend is still not live.
    """
    with RestoreTarget(backend, program) as target:
        return revive(backend, tree, image, target, lazy=_is_lazy(backend, image, program))


def _is_lazy(backend: OverlayBackend, image: ProcessImage, program: str) -> bool:
    """True if memory is restored lazily: not if CRIU cannot, or if copies of it may exceed the limit."""
    least, most = backend.lazy_pages, min(LARGEST, backend.limits.memory or LARGEST)
    return least is not None and least <= image.content.resident <= most and criu.brings_pages(program)


def revive(
    backend: OverlayBackend, tree: OverlayTree, image: ProcessImage, target: RestoreTarget, *, lazy: bool = False
) -> Process:
    """Restore as `fork` does, with a CRIU that was started before.

    Args:
        backend: not live.
        tree: captured with ``image``.
        image: of a container of the same kind.
        target: of ``backend``; discarded by whoever made it if this fails.
        lazy: have memory brought as it is touched.

    Raises:
        SandboxUnavailable, SandboxFull: it could not be done, and the backend is still not live.
    """
    shared = backend.runtime
    shared.store.check_room()
    squash(tree)
    below = tree.retain()
    try:
        process = _restored(backend, below, image, target, lazy=lazy)
    except BaseException as error:
        below.release()
        if isinstance(error, CriuError | EOFError | OSError):
            raise SandboxUnavailable(f"the captured processes could not be restored: {error}") from error
        raise
    backend.settle(target.container, below)
    shared.watch(target.container, backend.limits)
    shared.prepare(backend.flavour)
    return process


def _restored(
    backend: OverlayBackend, below: OverlayTree, image: ProcessImage, target: RestoreTarget, *, lazy: bool
) -> NamespaceProcess:
    container, work, stage = target.container, target.work, backend.runtime.directory / "stage"
    ready = _begin_to_bring(backend, image, target) if lazy else -1
    try:
        _mount(backend, below, container)
        copy_control(image.control, Path(f"/proc/self/fd/{container.control}"))
        if lazy and not (readable(ready, SECONDS) and os.read(ready, 1)):
            raise CriuError(f"the memory cannot be loaded{criu.errors(work / _PAGES_LOG)}")
    finally:
        if lazy:
            os.close(ready)
    options: dict[str, Value] = {
        **OPTIONS,
        "images_dir": os.fspath(image.files),
        "log_file": _LOG,
        "root": os.fspath(backend.runtime.directory / "root"),
        "external": [f"mnt[{point}]:{stage / place}" for point, place in image.content.mounts.items()],
        "notify_scripts": True,  # the terminal comes with a notification
        "lazy_pages": lazy,
    }
    status, report = os.pipe()
    terminal: tuple[int, ...] = ()
    kept: list[int] = []
    try:
        terminal = target.criu.ask(RESTORE, options).descriptors
        if len(terminal) != 1:
            raise CriuError(f"expected the terminal of one shell from CRIU, found {len(terminal)}")
        target.criu.wait()
        kept = container.ask("adopt", {"pid": image.content.leader}, [report])
        grouped = frozenset(container.group.folders) if container.group else frozenset()
        request = {"last_pid": image.content.last_pid, "rlimits": rlimits(backend.limits, grouped=grouped)}
        (container.root,) = container.ask("enter", request, kept)
    except BaseException:
        for descriptor in (status, *terminal, *kept):
            os.close(descriptor)
        raise
    finally:
        os.close(report)
    if not lazy:  # else it is in use, and goes with the layer
        shutil.rmtree(work)
    os.set_inheritable(terminal[0], False)
    return NamespaceProcess(kept[0], status, terminal[0], None)


def _begin_to_bring(backend: OverlayBackend, image: ProcessImage, target: RestoreTarget) -> int:
    return backend.runtime.bring_pages(target.container, layer=image.path, images=image.files, work=target.work)


def _mount(backend: OverlayBackend, below: OverlayTree, container: Container) -> None:
    """Mount, where CRIU sees it, everything that the processes are restored upon."""
    if container.group:
        container.group.limit(backend.limits)
    request = backend.mounts(container, below)
    container.layer.dress(Path(request["lowers"][0]))
    container.answer()
    (container.control,) = container.ask("mount", request)


def await_pages(container: Container) -> None:
    """Have all memory of the processes in a container restored, and wait until it is.

    Raises:
        CriuError: that takes too long.
        SandboxClosed: it could not be loaded, and the container was ended.
    """
    if container.pages < 0:
        return
    with contextlib.suppress(OSError):  # all is there already, or will never be: which reading tells
        os.write(container.pages, b"+")
    if not readable(container.pages, SECONDS):
        raise CriuError(f"the memory of the processes was not complete after {SECONDS:.0f} s")
    complete = os.read(container.pages, 1) == DONE
    os.close(container.pages)
    container.pages = -1
    if not complete:
        log = criu.errors(container.layer.path / _WORK / _PAGES_LOG)
        container.kill()
        raise SandboxClosed(f"the memory of restored processes could not be loaded, and they were ended{log}")
