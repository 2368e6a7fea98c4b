"""Mounts of a container: its layers, ``/proc``, ``/dev``, the control directory, and directories of the host.

1. No inode of the host can be changed or locked through them. Device nodes are the container's own, or on a read-only
   mount. A directory of the host is shown through an overlay of its own, whose inodes are the container's; where that
   is impossible (a single file, a directory with mounts below it), through a read-only mount.
2. With private ids (`ids`) files have on disk the owners that they have inside: the layers below the overlay are
   mounted with mapped ids.
3. The control directory is in memory, of a bounded size, and made for one container. It is read-only inside but for the
   files that the shell writes to, which can be neither replaced nor removed.

Standard library only; runs in the init of a container, before anything else does.
"""

from __future__ import annotations

import os
import stat

from sandboxgym.sandbox.overlay import kernel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

NODES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
"""Devices in ``/dev``, with their numbers."""
OVERLAY, BIND, EMPTY = "overlay", "bind", "empty"
"""Ways of showing a directory or file of the host."""
SHELL, WRITABLE = "shell.0", ("state.0", "state.1", "syntax", "limits")
"""Parts of the control directory: the shell's directory, and the files there that the shell writes to."""
CONTROL_BYTES = 56 * 2**20
"""Room in the control directory: three times a shell's largest state and some."""
DEV_PLACE, NOTHING_PLACE, EMPTY_PLACE, BIND_PLACE = "dev", "nothing", "empty", "bind-{}"
"""Places made by `for_criu`: ``/dev``, an empty file, an empty directory, and the bind mounts by number."""

_FOLDERS = ("shm", "pts")
_LINKS = {
    "ptmx": "pts/ptmx",
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
}
_HIDDEN_FILES = (
    *("kcore", "keys", "timer_list", "timer_stats", "sched_debug", "latency_stats", "interrupts", "kmsg"),
    # Of the machine as a whole, and of use to nobody inside:
    *("iomem", "kpagecgroup", "kpagecount", "kpageflags", "pagetypeinfo", "slabinfo", "vmallocinfo"),
)
_HIDDEN_FOLDERS = ("acpi", "asound", "scsi")
_FIXED = ("bus", "fs", "irq", "sys", "sysrq-trigger")
_SAFE = kernel.NOSUID | kernel.NODEV
_TERMINALS = 64
_LINKED = 64  # inodes of a control directory


class Ids:
    """User namespace of a container, as a descriptor, and the first of its ids outside."""

    def __init__(self, descriptor: int, base: int) -> None:
        self.descriptor = descriptor
        self.base = base


def special(stage: str, *, rootless: bool, owner: int = 0) -> tuple[int, int]:
    """``/proc`` and ``/dev`` of a container, to be attached later.

    Args:
        stage: a directory to mount upon meanwhile.
        rootless: there are no privileges outside.
        owner: of device nodes.
    """
    _open_stage(stage)
    proc, dev = os.path.join(stage, "proc"), os.path.join(stage, "dev")
    os.mkdir(proc)
    os.mkdir(dev)
    kernel.mount("proc", proc, attributes=_SAFE | kernel.NOEXEC)
    for name in _FIXED:
        if os.path.exists(path := os.path.join(proc, name)):
            kernel.bind(path, path, attributes=_SAFE | kernel.NOEXEC | kernel.RDONLY)
    for name in _HIDDEN_FILES:
        if os.path.exists(path := os.path.join(proc, name)):
            kernel.bind(os.path.join(stage, "nothing"), path, attributes=_SAFE | kernel.NOEXEC | kernel.RDONLY)
    for name in _HIDDEN_FOLDERS:
        if os.path.exists(path := os.path.join(proc, name)):
            kernel.bind(os.path.join(stage, "empty"), path, attributes=_SAFE | kernel.NOEXEC | kernel.RDONLY)
    _make_dev(dev, rootless=rootless, owner=owner)
    # The kernel limits the terminals of the whole machine: without a limit of its own a container could take them all.
    options = [("newinstance", None), ("ptmxmode", "0666"), ("mode", "0620"), ("max", str(_TERMINALS))]
    kernel.mount("devpts", os.path.join(dev, "pts"), options=options, attributes=kernel.NOSUID | kernel.NOEXEC)
    mounts = kernel.copy_mount(proc), kernel.copy_mount(dev)
    # Devices on a read-only mount can be written to, but their modes, owners and times cannot be changed.
    kernel.set_attributes(mounts[1], kernel.RDONLY, recursive=False)
    kernel.unmount(stage)
    return mounts


def _open_stage(stage: str) -> None:
    """A directory in memory to prepare mounts in, with an empty file and an empty directory."""
    kernel.mount("tmpfs", stage, options=[("mode", "0755")])
    os.close(os.open(os.path.join(stage, "nothing"), os.O_CREAT | os.O_CLOEXEC, 0o444))
    os.mkdir(os.path.join(stage, "empty"), 0o555)


def _make_dev(path: str, *, rootless: bool, owner: int = 0) -> None:
    """Make a ``/dev`` without terminals, on a mount that is still to be made read-only."""
    kernel.mount("tmpfs", path, options=[("mode", "0755"), ("size", "64k")], attributes=kernel.NOSUID | kernel.NOEXEC)
    os.chown(path, owner, owner)
    for name, (major, minor) in NODES.items():
        node = os.path.join(path, name)
        try:
            if rootless:  # a device in a file system of theirs is none
                raise PermissionError
            os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(major, minor))
            os.chmod(node, 0o666)
            os.chown(node, owner, owner)
        except PermissionError:  # or in a container without the right to make any
            os.close(os.open(node, os.O_CREAT | os.O_CLOEXEC, 0o666))
            attributes = kernel.NOSUID | kernel.NOEXEC | kernel.RDONLY
            kernel.bind(f"/dev/{name}", node, attributes=attributes)
    for name in _FOLDERS:
        os.mkdir(os.path.join(path, name))
    for name, target in _LINKS.items():
        os.symlink(target, os.path.join(path, name))


class Prepared:
    """Mounts of one container that depend on its specification, until they are attached.

    Args:
        stage: a directory to mount upon meanwhile.
        request: ``store``, the directory in which layers are; ``lowers``, ``upper`` and ``work``; ``shown``, what is
            shown of the host: path, how, and path inside; ``control_inside``.
        rootless: there are no privileges outside.
        ids: of the container, if it has its own.
    """

    def __init__(self, stage: str, request: dict[str, Any], *, rootless: bool, ids: Ids | None) -> None:
        self._stage = stage
        self._request = request
        self._rootless = rootless
        self._ids = -1 if ids is None else ids.descriptor
        self._used = 0
        _open_stage(stage)
        self.control = self._make_control(0 if ids is None else ids.base)
        """Mount of the control directory, for the owner."""
        if ids is not None:
            kernel.act_on_files_as(ids.base)
        try:
            self.root = self._layers()
            self.binds = [(self._shown(path, how), inside) for path, how, inside in request["shown"]]
            """Mounts to attach, each with its path inside."""
        finally:
            if ids is not None:
                kernel.act_on_files_as(0)
        self.binds += self._control_mounts()

    def close(self) -> None:
        """Unmount what was needed for preparation only."""
        kernel.unmount(self._stage)

    def _place(self) -> str:
        self._used += 1
        path = os.path.join(self._stage, str(self._used))
        os.mkdir(path)
        return path

    def _layers(self) -> int:
        """The layers as one file system that is mounted nowhere yet.

        Paths of any length and form are given by descriptors, which also say nothing about the host to whoever reads
        the table of mounts inside.
        """
        request = self._request
        paths = [*request["lowers"], request["upper"], request["work"]]
        opened = [os.open(path, os.O_PATH | os.O_CLOEXEC | os.O_DIRECTORY) for path in self._mapped(paths)]
        try:
            named = [f"/proc/self/fd/{descriptor}" for descriptor in opened]
            options: list[tuple[str, str | None]] = [("lowerdir+", name) for name in named[:-2]]
            options += [("upperdir", named[-2]), ("workdir", named[-1]), ("volatile", None)]
            # A directory of a lower layer can then be renamed as one of the upper layer can: taking a snapshot changes
            # nothing. The kernel forbids it to users without privileges. Metacopy would leave the data of a file whose
            # mode was changed in the layer below, and an index ties a layer to those it was first mounted over.
            privileged: list[tuple[str, str | None]] = [("redirect_dir", "on"), ("metacopy", "off"), ("index", "off")]
            # Overlayfs's own attributes are trusted.* by default, which only root of the machine may set.
            options += [("userxattr", None)] if self._rootless else privileged
            return kernel.new_mount("overlay", options, attributes=_SAFE)
        finally:
            for descriptor in opened:
                os.close(descriptor)

    def _mapped(self, paths: Sequence[str]) -> list[str]:
        """Places of the layers with the ids of the container: one mount for all that are in the store."""
        if self._ids < 0:
            return list(paths)
        store = self._request["store"]
        shown = self._attached(store)
        inside = f"{store}/"
        return [
            os.path.join(shown, path[len(inside) :]) if path.startswith(inside) else self._attached(path)
            for path in paths
        ]

    def _attached(self, path: str) -> str:
        """Attach a directory with mapped ids at a place of its own: kernels before 6.15 accept only attached layers."""
        place = self._place()
        mounted = kernel.copy_mount(path, ids=self._ids, recursive=False)
        kernel.attach(mounted, place)
        os.close(mounted)
        return place

    def _shown(self, path: str, how: str) -> int:
        """Read-only mount of a directory or file of the host."""
        attributes = _SAFE | kernel.RDONLY
        if how == EMPTY:
            return kernel.copy_mount(os.path.join(self._stage, "empty"), attributes=attributes)
        if how == OVERLAY:
            try:
                return self._covered(path, attributes)
            except OSError:  # on an overlay that lies on an overlay itself, say
                pass
        try:
            return kernel.copy_mount(path, attributes=attributes, ids=self._ids)
        except OSError:  # another file system below, whose ids cannot be mapped: its files are nobody's then
            return kernel.copy_mount(path, attributes=attributes)

    def _covered(self, path: str, attributes: int) -> int:
        below = self._attached(path) if self._ids >= 0 else path
        options: list[tuple[str, str | None]] = []
        opened = []
        try:
            for folder in (below, os.path.join(self._stage, "empty")):  # one layer alone is no overlay
                opened.append(os.open(folder, os.O_PATH | os.O_CLOEXEC | os.O_DIRECTORY))
                options.append(("lowerdir+", f"/proc/self/fd/{opened[-1]}"))
            return kernel.new_mount("overlay", options, attributes=attributes)
        finally:
            for descriptor in opened:
                os.close(descriptor)

    def _make_control(self, user: int) -> int:
        """Make a control directory with files for the shell owned by root inside, which is ``user`` outside."""
        place = self._place()
        options = [("mode", "0755"), ("size", str(CONTROL_BYTES)), ("nr_inodes", str(_LINKED))]
        kernel.mount("tmpfs", place, options=options, attributes=_SAFE | kernel.NOEXEC)
        folder = os.path.join(place, SHELL)
        os.mkdir(folder)
        for name in WRITABLE:
            path = os.path.join(folder, name)
            os.close(os.open(path, os.O_CREAT | os.O_CLOEXEC, 0o600))
            os.chown(path, user, user)
        os.chmod(folder, 0o700)
        os.chown(folder, user, user)
        self._control_place = place
        return os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def _control_mounts(self) -> list[tuple[int, str]]:
        inside = self._request["control_inside"]
        attributes = _SAFE | kernel.NOEXEC
        mounts = [(kernel.copy_mount(self._control_place, attributes=attributes | kernel.RDONLY), inside)]
        for name in WRITABLE:
            path = os.path.join(self._control_place, SHELL, name)
            mounts.append((kernel.copy_mount(path, attributes=attributes), f"{inside}/{SHELL}/{name}"))
        return mounts


def attached_points(shown: Sequence[tuple[str, str, str]], control_inside: str) -> list[str]:
    """Mount points inside of `Prepared.binds`, in their order."""
    writable = [f"{control_inside}/{SHELL}/{name}" for name in WRITABLE]
    return [*(inside for _, _, inside in shown), control_inside, *writable]


def for_criu(stage: str, root: str, request: dict[str, Any]) -> int:
    """Mount, where CRIU sees it, the layers, and in ``stage`` all other mounts by places.

    Args:
        stage: a directory to mount upon.
        root: another one, for the layers.
        request: as for `Prepared`.

    Returns:
        A descriptor of the control directory.
    """
    prepared = Prepared(stage, request, rootless=False, ids=None)
    for number, (mounted, _) in enumerate(prepared.binds):
        place = os.path.join(stage, BIND_PLACE.format(number))
        if stat.S_ISDIR(os.fstat(mounted).st_mode):
            os.mkdir(place)
        else:
            os.close(os.open(place, os.O_CREAT | os.O_CLOEXEC, 0o600))
        kernel.attach(mounted, place)
        os.close(mounted)
    dev = os.path.join(stage, DEV_PLACE)
    os.mkdir(dev)
    _make_dev(dev, rootless=False)
    descriptor = os.open(dev, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    kernel.set_attributes(descriptor, kernel.RDONLY, recursive=False)
    os.close(descriptor)
    kernel.attach(prepared.root, root)
    os.close(prepared.root)
    return prepared.control
