"""Cache of prepared tasks on disk, shared by all processes of the machine: a sandbox's files and shell, with notes.

1. An entry appears complete or not at all. Two processes that need a missing one make it once; the unfinished entry of
   a killed process is removed by the next that makes, or evicts, anything.
2. An entry that has changed is removed and made again, which is logged: names, kinds, modes, owners, sizes and times
   are compared whenever it is loaded, contents once after each boot and on request.
3. The overlay backend loads an entry without a copy: its sandboxes mount the entry's directory. The docker backend
   starts from an image; the copy backend unpacks an archive.
4. All entries together take a bounded part of the disk; the least recently used ones are removed first, except those
   in use by a living process.
5. If the cache cannot be written, nothing is cached, with one warning.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import logging
import operator
import os
import shutil
import stat
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandboxgym import data
from sandboxgym import serialization as durable
from sandboxgym.errors import SnapshotError
from sandboxgym.sandbox.base import RootFS, SandboxError
from sandboxgym.sandbox.layers.squash import duplicate_layer, squash
from sandboxgym.sandbox.layers.store import FILES, OverlayTree, StoredLayer
from sandboxgym.sandbox.overlay.backend import OverlayBackend
from sandboxgym.sandbox.sandbox import Sandbox
from sandboxgym.sandbox.shell.state import ShellState
from sandboxgym.sandbox.snapshot import SandboxSnapshot
from sandboxgym.system import run_directories
from sandboxgym.system.atomic import atomic_folder, write_atomic
from sandboxgym.system.once import file_lock
from sandboxgym.system.run_directories import Leftover

log = logging.getLogger("sandboxgym")

VERSION = 1
"""Version of the entries' format."""
VARIABLE = "SANDBOXGYM_PREPARED_GB"
"""Environment variable with the limit in gigabytes of all entries; with 0 nothing is cached."""
DEFAULT = 20e9
"""Default limit in bytes of all entries, but never more than a tenth of the disk."""
FLOOR = 2**30
"""Bytes of the disk that stay free."""
REPOSITORY = "sandboxgym-prepared"
"""Repository name of the docker backend's images; their tags are keys."""
LABEL = "sandboxgym.prepared"
"""Label of these images with their entry."""

_USED, _ABOUT, _LAYERS, _PACKED, _CHECKED = "used", "about", "layers", "packed", "checked"
"""Files of an entry: its lock, with last use and size; description; layers; archive; boot of the last check."""
_PARTIAL, _GONE, _LOCKS = ".partial-", ".gone-", "locks"


@dataclass(frozen=True, slots=True)
class PreparedState:
    """State of a sandbox, kept under a key."""

    snapshot: SandboxSnapshot
    notes: dict[str, Any] = field(default_factory=dict)
    """Plain data kept with the entry."""


@dataclass(frozen=True, slots=True)
class ListedState:
    """One entry in a list."""

    path: Path
    nbytes: int
    used: float
    """Time of last use, in seconds since the epoch."""


class _Damaged(Exception):
    """Raised if an entry is not as it was made."""


def directory() -> Path:
    """Path of the entries' directory, which is not created here."""
    return data.cache_dir() / "swebench" / "prepared"


def limit() -> float:
    """Limit in bytes of all entries together.

    Raises:
        ValueError: the environment variable `VARIABLE` is not a number.
    """
    text = os.environ.get(VARIABLE)
    if text:
        try:
            wanted = float(text)
        except ValueError:
            wanted = -1.0
        if not 0 <= wanted < float("inf"):
            raise ValueError(f"{VARIABLE}: expected a number of gigabytes, found {text!r:.80}")
        return wanted * 1e9
    existing = next(path for path in (directory(), *directory().parents) if path.exists())
    return min(DEFAULT, shutil.disk_usage(existing).total / 10)


def key(*parts: object) -> str:
    """Key of an entry that depends on these values."""
    return hashlib.sha256(repr((VERSION, parts)).encode("utf-8", "surrogateescape")).hexdigest()[:40]


def provide(name: str, sandbox: Sandbox, make: Callable[[], PreparedState], *, verify: bool = False) -> PreparedState:
    """Load the entry of a key, making it if it is missing.

    Args:
        name: key of the entry, as `key` returns it.
        sandbox: a sandbox that is not started; the state can be restored in it, and in others of its kind.
        make: function that starts the sandbox and returns the state to keep.
        verify: also compare the contents of an existing entry's files.
    """
    if not limit():
        return make()
    place = directory() / name
    found = _load(place, sandbox, verify=verify)
    if found is not None:
        return found
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_alone(name))
        except OSError as error:
            _do_without(error)
            return make()
        found = _load(place, sandbox)  # which another process may have made meanwhile
        if found is not None:
            return found
        made = make()
        try:
            _save(place, sandbox, made)
            evict(keep=place)
        except (OSError, SandboxError) as error:
            _do_without(error)
            return made
        found = _load(place, sandbox)
        if found is None:
            return made
        made.snapshot.release()
        return found


def listed() -> list[ListedState]:
    """List the entries, the least recently used first."""
    found = []
    for path in _folders(""):
        with contextlib.suppress(OSError, ValueError):
            used = path / _USED
            found.append(ListedState(path, int(used.read_text(encoding="ascii")), used.stat().st_mtime))
    return sorted(found, key=lambda entry: (entry.used, entry.path.name))


def evict(*, keep: Path | None = None) -> list[ListedState]:
    """Remove the least recently used entries until the rest fits, and what killed processes left; returns them."""
    _clear_leavings()
    present = listed()
    total = sum(entry.nbytes for entry in present)
    room = min(limit(), max(0, total + shutil.disk_usage(directory()).free - FLOOR))
    gone = []
    for entry in present:
        if total <= room:
            break
        if entry.path != keep and _remove(entry.path):
            log.info("the prepared task %s was evicted (%d bytes)", entry.path.name, entry.nbytes)
            total -= entry.nbytes
            gone.append(entry)
    return gone


def clear(*, dry_run: bool = False) -> list[Leftover]:
    """Remove every entry that no living process uses; returns the result for each entry."""
    if not directory().is_dir():
        return []
    if not dry_run:
        _clear_leavings()
    found = []
    for entry in listed():
        used = run_directories.is_locked(entry.path / _USED)
        removed = not used and not dry_run and _remove(entry.path)
        note = "a living process uses it" if used else ""
        found.append(Leftover(entry.path, "prepared task", entry.nbytes, removed=removed, note=note))
    if not dry_run:
        _remove_lost_images()
    return found


# One entry.


class _Lease:
    """A lease of an entry by this process: no one removes the entry while its lock is held."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._holds = 1

    def hold(self, user: object) -> None:
        """Hold the entry until an object is garbage-collected."""
        self._holds += 1
        weakref.finalize(user, self.drop).atexit = False

    def is_of(self, place: Path) -> bool:
        """Tell whether the entry is in this directory."""
        return _is_same(self._descriptor, place / _USED)

    def drop(self) -> None:
        """Release one use."""
        self._holds -= 1
        if not self._holds:
            os.close(self._descriptor)


@contextlib.contextmanager
def _leased(place: Path) -> Iterator[_Lease | None]:
    """Take a lease of an entry; None if there is no entry."""
    try:
        descriptor = os.open(place / _USED, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        yield None
        return
    lease = _Lease(descriptor)
    try:
        locked = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        except OSError:  # a file system without locks
            locked = False
        yield lease if locked and _is_same(descriptor, place / _USED) else None  # None: the entry was just removed
    finally:
        lease.drop()


def _is_same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _load(place: Path, sandbox: Sandbox, *, verify: bool = False) -> PreparedState | None:
    """Load an entry; None if there is none, or if it was damaged and is removed."""
    with _leased(place) as lease:
        if lease is None:
            return None
        try:
            found = _read(place, sandbox, lease, verify=verify)
        except (_Damaged, SnapshotError, OSError, SandboxError) as error:
            log.warning("a prepared task is damaged and made again: %s: %s", place, error)
            _discard(place, lease)
            return None
        with contextlib.suppress(OSError):  # a cache that is read-only
            os.utime(place / _USED)
        return found


def _read(place: Path, sandbox: Sandbox, lease: _Lease, *, verify: bool) -> PreparedState:
    about = _about(place)
    tree_base = sandbox.backend.base()
    try:
        base = tree_base.base
    finally:
        tree_base.release()
    if about["base"] != base:
        raise _Damaged(f"expected one over {base}, found one over {about['base']}")
    boot = _boot()
    contents = verify or _checked_after(place) != boot
    if about["kind"] == "packed":
        snapshot = sandbox.unpack(_packed(place, about["digest"]))
    elif about["kind"] == "image":
        from sandboxgym.sandbox.docker.backend import DockerBackend

        backend = sandbox.backend
        assert isinstance(backend, DockerBackend)
        tree = backend.published(about["image"])
        lease.hold(tree.image)
        snapshot = _snapshot(tree, about)
    else:
        folders = [place / _LAYERS / str(number) for number in range(about["depth"])]
        found = _listing(folders, contents=contents)
        if found[0] != about["listing"]:
            raise _Damaged("its files are not those that were kept")
        if contents and found[1] != about["contents"]:
            raise _Damaged("the contents of its files are not those that were kept")
        snapshot = _snapshot(_stacked(folders, sandbox, lease), about)
    if contents:
        with contextlib.suppress(OSError):
            write_atomic(place / _CHECKED, boot.encode())
    return PreparedState(snapshot, about["notes"])


def _snapshot(tree: Any, about: dict[str, Any]) -> SandboxSnapshot:
    shell = None if about["shell"] is None else ShellState.from_plain(about["shell"])
    return SandboxSnapshot(tree, shell, tuple(about["lossy"]))


def _about(place: Path) -> dict[str, Any]:
    head, _, content = (place / _ABOUT).read_bytes().partition(b"\n")
    if hashlib.sha256(content).hexdigest().encode() != head:
        raise _Damaged("its description does not have the digest that it was written with")
    about = durable.unpack(content)
    if not isinstance(about, dict) or about.get("version") != VERSION:
        raise _Damaged(f"expected a description of version {VERSION}")
    return about


def _packed(place: Path, digest: str) -> bytes:
    content = (place / _PACKED).read_bytes()
    if hashlib.sha256(content).hexdigest() != digest:
        raise _Damaged("its archive does not have the digest that it was written with")
    return content


def _stacked(folders: list[Path], sandbox: Sandbox, lease: _Lease) -> OverlayTree:
    """Stack an entry's layers; copies of them in the store if a sandbox could not show their owners."""
    backend = sandbox.backend
    assert isinstance(backend, OverlayBackend)
    store = backend.runtime.store
    layers: list[StoredLayer] = []
    try:
        if _can_be_shown(backend, directory()):
            for folder in folders:
                layers.append(store.borrow(folder))
                lease.hold(layers[-1])
        else:
            store.check_room()
            for folder in folders:
                layers.append(store.new())
                duplicate_layer(str(folder / FILES), str(layers[-1].files), rootless=backend.rootless)
        return OverlayTree(store, backend.rootfs, layers, rootless=backend.rootless)
    finally:
        store.drop(layers)


def _can_be_shown(backend: OverlayBackend, folder: Path) -> bool:
    same = os.stat(folder).st_dev == os.stat(backend.runtime.directory).st_dev
    return same or not backend.private or not backend.runtime.why_not_private(RootFS("prepared", (folder,)))


def _save(place: Path, sandbox: Sandbox, made: PreparedState) -> None:
    """Write an entry; `_alone` is held."""
    tree, shell = made.snapshot.tree, made.snapshot.shell
    about: dict[str, Any] = {
        "version": VERSION,
        "base": tree.base,
        "shell": None if shell is None else shell.to_plain(),
        "lossy": list(made.snapshot.lossy),
        "notes": made.notes,
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    partial = place.with_name(_PARTIAL + place.name)
    run_directories.remove_tree(partial)
    with atomic_folder(place, temporary=partial):
        if isinstance(tree, OverlayTree):
            about |= _save_layers(partial, tree)
        elif sandbox.backend.capabilities.name == "docker":
            about |= _save_image(place, sandbox, tree)
        else:
            packed = made.snapshot.pack()
            (partial / _PACKED).write_bytes(packed)
            about |= {"kind": "packed", "digest": hashlib.sha256(packed).hexdigest(), "nbytes": len(packed)}
        content = durable.pack(about)
        (partial / _ABOUT).write_bytes(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
        (partial / _USED).write_text(str(about["nbytes"]), encoding="ascii")
        (partial / _CHECKED).write_text(_boot(), encoding="ascii")


def _save_layers(partial: Path, tree: OverlayTree) -> dict[str, Any]:
    squash(tree, deepest=1, kept=0)
    layers = tree.layers
    folders = [partial / _LAYERS / str(number) for number in range(len(layers))]
    for layer, folder in zip(layers, folders, strict=True):
        (folder / FILES).mkdir(parents=True)
        duplicate_layer(str(layer.files), str(folder / FILES), rootless=tree.rootless)
    names, contents = _listing(folders, contents=True)
    nbytes = sum(layer.nbytes for layer in layers)
    return {"kind": "layers", "depth": len(layers), "listing": names, "contents": contents, "nbytes": nbytes}


def _save_image(place: Path, sandbox: Sandbox, tree: Any) -> dict[str, Any]:
    from sandboxgym.sandbox.docker.backend import DockerBackend

    backend = sandbox.backend
    assert isinstance(backend, DockerBackend)
    identity = backend.publish(f"{REPOSITORY}:{place.name}", {LABEL: os.fspath(place)})
    return {"kind": "image", "image": identity, "nbytes": tree.nbytes}


def _listing(folders: list[Path], *, contents: bool) -> tuple[str, str]:
    """Digest of the metadata of all files of some layers, and digest of their contents."""
    names, inside = hashlib.sha256(), hashlib.sha256()
    for folder in folders:
        lines: list[str] = []
        top = os.fspath(folder / FILES)
        for path, status in _walk(top):
            mode, more, size = status.st_mode, "", status.st_rdev
            if stat.S_ISREG(mode):
                size = status.st_size
                if contents:
                    with open(path, "rb") as file:
                        inside.update(hashlib.file_digest(file, "sha256").digest())
            elif stat.S_ISLNK(mode):
                more = os.readlink(path)
            elif stat.S_ISDIR(mode):  # an opaque one says so in an attribute
                more = repr([(key, os.getxattr(path, key)) for key in sorted(os.listxattr(path))])
            owner = f"{status.st_uid} {status.st_gid}"
            lines.append(f"{path[len(top) :]}\0{mode} {owner} {size} {status.st_mtime_ns} {more}\0")
        names.update(f"{len(lines)}\0{''.join(lines)}".encode("utf-8", "surrogateescape"))
    return names.hexdigest(), inside.hexdigest()


def _walk(top: str) -> Iterator[tuple[str, os.stat_result]]:
    """Walk through a directory, in an order that depends on names only."""
    yield top, os.lstat(top)
    pending = [top]
    while pending:
        with os.scandir(pending.pop()) as found:
            for entry in sorted(found, key=_name):
                yield entry.path, entry.stat(follow_symlinks=False)
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)


_name = operator.attrgetter("name")


def _boot() -> str:
    """Identity of this boot of the machine, because files written before a crash may be incomplete."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _checked_after(place: Path) -> str:
    try:
        return (place / _CHECKED).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


# Making, removing.


@contextlib.contextmanager
def _alone(name: str) -> Iterator[None]:
    """Lock an entry, so that no other process makes it at the same time."""
    locks = directory() / _LOCKS
    locks.mkdir(mode=0o755, parents=True, exist_ok=True)
    directory().chmod(0o700)  # it holds programs from images, with their original modes
    with file_lock(locks / name, waiting=lambda: log.info("another process prepares %s", name)):
        yield


def _folders(prefix: str) -> list[Path]:
    """List directories of the cache with a prefix; without one, the entries."""
    try:
        found = list(directory().iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    begins = [path for path in found if (path.name.startswith(prefix) if prefix else path.name[0] != ".")]
    return [path for path in begins if path.name != _LOCKS and path.is_dir()]


def _remove(place: Path) -> bool:
    """Remove an entry that no one uses; returns whether it is gone."""
    try:
        with open(place / _USED, "rb") as used:
            if not run_directories.try_lock(used) or not _is_same(used.fileno(), place / _USED):
                return False
            gone = _put_aside(place)  # processes that wait for the lock see that the file has changed
        _delete(gone)
    except OSError as error:
        log.info("the prepared task %s was not removed: %s", place, error)
        return False
    return True


def _discard(place: Path, lease: _Lease) -> None:
    """Move a damaged entry away, unless another process has; its files are deleted when no one uses them (`evict`)."""
    try:
        if lease.is_of(place):
            _put_aside(place)
    except OSError as error:  # another process was faster, or the cache is read-only
        log.info("the prepared task %s was not removed: %s", place, error)


def _put_aside(place: Path) -> Path:
    gone = place.with_name(f"{_GONE}{place.name}-{os.urandom(4).hex()}")
    place.rename(gone)
    return gone


def _delete(gone: Path) -> None:
    with contextlib.suppress(_Damaged, SnapshotError, OSError):
        about = _about(gone)
        if about["kind"] == "image":
            _remove_image(about["image"])
    run_directories.remove_tree(gone)


def _remove_image(identity: str) -> None:
    from sandboxgym.sandbox.docker.client import connect, daemon_errors

    with contextlib.suppress(SandboxError):  # gone, or in use: the daemon keeps it then
        client = connect()
        with contextlib.closing(client), daemon_errors():
            api: Any = client.api
            api.remove_image(identity, force=False, noprune=True)


def _remove_lost_images() -> None:
    """Remove images of entries of this cache that no longer exist, because someone deleted them."""
    from sandboxgym.sandbox.docker.client import connect, daemon_errors

    with contextlib.suppress(SandboxError):  # no daemon, no images
        client = connect()
        with contextlib.closing(client), daemon_errors():
            api: Any = client.api
            for image in api.images(filters={"label": LABEL}):
                place = Path(image["Labels"].get(LABEL, ""))
                if place.parent == directory() and not place.exists():
                    _remove_image(image["Id"])


def _clear_leavings() -> None:
    """Remove entries that were moved away while in use, and those left unfinished by killed processes."""
    for path in _folders(_GONE):
        if not run_directories.is_locked(path / _USED):
            with contextlib.suppress(OSError):
                _delete(path)
    for path in _folders(_PARTIAL):
        with contextlib.suppress(OSError), open(directory() / _LOCKS / path.name.removeprefix(_PARTIAL), "ab") as lock:
            if run_directories.try_lock(lock):
                run_directories.remove_tree(path)


@functools.cache
def _do_without_once(where: str, why: str) -> None:
    log.warning("prepared tasks are not kept on disk, each process prepares its own: %s: %s", where, why)


def _do_without(error: Exception) -> None:
    why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else type(error).__name__
    _do_without_once(str(directory()), why)
