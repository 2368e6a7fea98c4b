"""Run directories: temporary resources of a process, cleared by the next process if their owner was killed.

1. `claim` makes a *run directory* for resources that must not outlive this process: mount points, container ids,
   scratch files. It appears complete, with an ``owner.json`` inside, or not at all, and is removed when the process
   exits.
2. `reap` removes the run directories whose owner is gone. It is cheap where there are none (one directory listing), so
   that a process can call it when it starts.
3. A run directory of a living process is never removed: a process id alone is no proof, for ids are reused, so the
   start time, the boot and the id's namespace are compared too; where an owner cannot be judged from here, its run
   directory stays.
4. A kind of run directory that holds more than files names a reaper (`register_reaper`), which unmounts or removes the
   recorded resources before the files are deleted. A directory with something still mounted under it is never deleted.
5. Files that a sandbox's processes wrote there can be removed: trees of any depth, any names and modes.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib
import json
import logging
import os
import re
import shutil
import socket
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from sandboxgym.system import directories, proc

try:
    import fcntl
except ImportError:  # not on Windows, which then has no protection against two at once
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger("sandboxgym")

OWNER = "owner.json"
STALE_SECONDS = 24 * 3600
"""Age in seconds at which a file that no owner is recorded for counts as left behind."""

Reaper = Callable[[Path], None]
_reapers: dict[str, Reaper | str] = {  # a process that has not imported what claims them must reap them, too
    "sandbox": "sandboxgym.sandbox.overlay.reaper:clear",
    "copy": "sandboxgym.sandbox.copy.processes:reap",
    "docker": "sandboxgym.sandbox.docker.images:reap",
    "browser": "sandboxgym.envs.webshop.web.chromium:reap",
    "served": "sandboxgym.sandbox.copy.processes:reap",
    "conformance": "sandboxgym.conformance.supervision.scratch:clear",
}
_claimed: dict[Path, int] = {}
_changing: dict[object, tuple[int, int]] = {}
"""Process and thread of each call that makes or removes a directory just now."""
_ends: tuple[int, int] | None = None
"""Process and thread in which this process began to end; its other threads may not know yet."""
_PATIENCE = 10.0
"""Seconds that the end of the process waits for `_changing`."""
_reaped_by: set[int] = set()
"""Process ids that have made their first claim: this one's, and in a fork its parent's too."""
_CLAIM = ".claim-"
"""Prefix of an incomplete run directory's name; its maker's identity follows, not yet recorded elsewhere."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Identity of a process, unambiguous although process ids are reused."""

    pid: int
    started: str
    """Start time as the kernel gives it; compared, never computed with."""
    boot: str
    namespace: str
    """The process-id namespace: the same id means another process elsewhere."""
    host: str

    @classmethod
    def me(cls) -> ProcessIdentity:
        """The calling process."""
        return cls(os.getpid(), _started(os.getpid()) or "", _boot(), _namespace(), socket.gethostname())

    @classmethod
    def read(cls, directory: Path) -> ProcessIdentity:
        """The owner of a run directory.

        Raises:
            ValueError: no intact ``owner.json``.
            OSError: it cannot be read.
        """
        content = json.loads((directory / OWNER).read_bytes())
        try:
            return cls(**{name: kind(content[name]) for name, kind in _FIELDS.items()})
        except (KeyError, TypeError) as error:
            raise ValueError(f"expected the fields {', '.join(_FIELDS)}, found {content!r:.100}") from error

    def gone(self) -> bool:
        """True if the process is known to have ended; False also where that cannot be told from here."""
        if self.host != socket.gethostname():
            return False
        if self.boot != _boot():
            return True
        return self.namespace == _namespace() and _started(self.pid) != self.started


_FIELDS: dict[str, type] = {"pid": int, "started": str, "boot": str, "namespace": str, "host": str}


@dataclass(frozen=True, slots=True)
class Leftover:
    """A resource left behind by its owner."""

    path: Path
    what: str
    nbytes: int
    removed: bool
    note: str = ""
    """Reason why it was kept, if its removal failed."""


def runtime_dir(*, create: bool = True) -> Path:
    """Parent of the run directories: ``$SANDBOXGYM_RUNTIME``, by default one per user below the temporary directory.

    Raises:
        PermissionError: it belongs to somebody else, who could plant things there.
    """
    user = os.geteuid() if hasattr(os, "geteuid") else 0
    path = Path(os.environ.get("SANDBOXGYM_RUNTIME") or Path(tempfile.gettempdir(), f"sandboxgym-{user}"))
    if create:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or (hasattr(os, "geteuid") and status.st_uid != user):
            raise PermissionError(f"{path} is not a directory of this user: set SANDBOXGYM_RUNTIME to one that is")
    return path


def claim(kind: str) -> Path:
    """Make a new run directory of this process.

    Args:
        kind: a name in lower case; `reap` hands the directory to the reaper registered for it.

    Returns:
        Its path; it is removed by `give_back`, when the process exits, or by the next `reap`.

    The first claim of a process reaps what others left, whatever their kind.

    Raises:
        RuntimeError: another thread is ending the process.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", kind):
        raise ValueError(f"expected a kind such as 'namespace' or 'docker', found {kind!r}")
    if os.getpid() not in _reaped_by:
        _reaped_by.add(os.getpid())
        reap()
    root, owner = runtime_dir(), ProcessIdentity.me()
    with _change():
        if ending():
            raise RuntimeError("this process is ending: what it claims now would be left behind")
        staging = Path(tempfile.mkdtemp(prefix=f"{_CLAIM}{_name(owner)}-", dir=root))
        try:
            (staging / OWNER).write_text(json.dumps(asdict(owner)), encoding="utf-8")
            path = root / f"{kind}-{owner.pid}-{staging.name.rpartition('-')[2]}"
            os.rename(staging, path)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        _claimed[path] = owner.pid
    return path


def give_back(path: Path) -> None:
    """Remove a run directory of this process, through its reaper. Idempotent."""
    with _change():
        _claimed.pop(path, None)
        if path.exists():
            _remove_run(path)


def ending() -> bool:
    """True in a thread of a process that another of its threads is ending."""
    return _ends is not None and _ends[0] == os.getpid() and _ends[1] != threading.get_ident()


def begin_end() -> None:
    """Refuse claims of other threads from now on: this one ends the process."""
    global _ends
    _ends = os.getpid(), threading.get_ident()


@contextlib.contextmanager
def _change() -> Iterator[None]:
    """Have the end of the process wait, if another thread ends it."""
    token = object()
    _changing[token] = os.getpid(), threading.get_ident()
    try:
        yield
    finally:
        del _changing[token]


def register_reaper(kind: str, reaper: Reaper | str) -> None:
    """Register the function that clears the resources recorded in a kind of run directory.

    Args:
        kind: as given to `claim`.
        reaper: called with the directory before its files are deleted; it must bear being called twice, also after
            half of its work was done. A string ``"module:function"`` is imported only when it is needed.
    """
    _reapers[kind] = reaper


def reap(root: Path | None = None, *, dry_run: bool = False) -> list[Leftover]:
    """Remove the run directories whose owner is gone; a directory that another process is reaping is left to it.

    Args:
        root: their parent directory; by default `runtime_dir`.
        dry_run: only say what would be removed.
    """
    try:
        root = root or runtime_dir(create=False)
    except PermissionError as error:
        log.warning("%s", error)
        return []
    if not root.is_dir():
        return []
    with open(root / ".lock", "ab") as lock:
        if not try_lock(lock):
            return []
        return [_reap_one(path, dry_run) for path in sorted(root.iterdir()) if _is_left(path)]


def try_lock(file: IO[Any]) -> bool:
    """Lock an open file for as long as it is open, in every process; False if another holds it."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def is_locked(path: Path) -> bool:
    """True if some process holds the lock of a file (`try_lock`), or that cannot be told; False if there is no file."""
    try:
        with open(path, "rb") as file:
            return not try_lock(file)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # another user's
        return True


def older_than(path: Path, seconds: float) -> bool:
    """True if a file or directory was last modified at least that long ago."""
    return time.time() - path.lstat().st_mtime > seconds


def tree_nbytes(path: Path) -> int:
    """Size in bytes of a file, or of all files below a directory of any depth, without files deleted meanwhile."""
    if not path.is_dir() or path.is_symlink():
        return path.lstat().st_size
    total = 0
    for entry in directories.walk(os.fspath(path)):
        with contextlib.suppress(OSError):
            if not entry.is_dir(follow_symlinks=False):
                total += entry.stat(follow_symlinks=False).st_size
    return total


def remove_tree(path: Path) -> None:
    """Delete a file, or a directory of any depth with all its entries, whatever the modes are.

    Raises:
        OSError: something is mounted under it, or it cannot be deleted; what can be is gone all the same.
    """
    if path.is_dir() and not path.is_symlink():
        _check_unmounted(path)
    directories.remove(os.fspath(path))


def _is_left(path: Path) -> bool:
    try:
        if path.name.startswith(_CLAIM):
            return _is_abandoned(path)
        if path.name.startswith(".") or not path.is_dir():
            return False
        if not any(path.iterdir()):  # killed while removing it: a claim appears with its owner inside
            return re.fullmatch(r"[a-z][a-z0-9_]*-\d+-\w+", path.name) is not None
        return ProcessIdentity.read(path).gone()
    except (OSError, ValueError):
        return False  # not of our making, or going away just now


def _is_abandoned(path: Path) -> bool:
    """True if the owner of a run directory ended before it could complete it."""
    here, _, rest = path.name.removeprefix(_CLAIM).partition("-")
    pid, _, rest = rest.partition("-")
    if here != _digest(_boot(), _namespace(), socket.gethostname()) or not pid.isdigit():
        return older_than(path, STALE_SECONDS)
    return rest.partition("-")[0] != _digest(_started(int(pid)))


def _name(owner: ProcessIdentity) -> str:
    """Part of a file name that identifies a process: namespace, id, start time."""
    return f"{_digest(owner.boot, owner.namespace, owner.host)}-{owner.pid}-{_digest(owner.started)}"


def _digest(*what: str | None) -> str:
    """Part of a file name that stands for these values."""
    return hashlib.sha256(repr(what).encode()).hexdigest()[:12]


def _reap_one(path: Path, dry_run: bool) -> Leftover:
    what = f"run directory ({_kind(path)})"
    try:
        nbytes = tree_nbytes(path)
        if not dry_run:
            _remove_run(path)
    except Exception as error:  # a reaper may raise anything, and the others must still be reaped
        log.warning("could not clear %s: %s", path, error)
        return Leftover(path, what, 0, removed=False, note=str(error))
    return Leftover(path, what, nbytes, removed=not dry_run)


def _remove_run(path: Path) -> None:
    reaper = _reapers.get(_kind(path))
    if isinstance(reaper, str):
        module, _, name = reaper.partition(":")
        reaper = getattr(importlib.import_module(module), name)
    if reaper is not None:
        assert callable(reaper)
        reaper(path)
    _check_unmounted(path)
    if not path.name.startswith(_CLAIM) and (path / OWNER).exists():
        # Under a name that says whose it is, as its owner's record goes with the rest; and threads of a process that
        # ends, which write there by its path, no longer find it.
        owner, suffix = ProcessIdentity.read(path), path.name.rpartition("-")[2]
        path = path.rename(path.with_name(f"{_CLAIM}{_name(owner)}-{suffix}"))
    with contextlib.suppress(FileNotFoundError):  # another process may have reaped it just now
        remove_tree(path)


def _check_unmounted(path: Path) -> None:
    whole = os.path.realpath(path)
    for point in mount_points():
        if is_within(point, whole):
            raise OSError(f"{point} is still mounted")


def _kind(path: Path) -> str:
    return "unfinished" if path.name.startswith(".") else path.name.split("-")[0]


def _started(pid: int) -> str | None:
    """Start time of a process; None if there is none, or it is a zombie."""
    try:
        found = proc.stat(pid)
    except OSError:
        return None if Path("/proc/self/stat").exists() else _started_by_ps(pid)
    alone = found.threads == 1  # else other threads continue without the first
    return None if found.state in "ZX" and alone else found.started


def _started_by_ps(pid: int) -> str | None:
    done = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True)
    return done.stdout.strip() or None


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


_ESCAPED = re.compile(rb"\\([0-7]{3})")


def mount_points() -> list[str]:
    """Mount points that this process sees: absolute paths, as text, for they are compared at every removal."""
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            points = [line.split(b" ", 5)[4] for line in file]
    except OSError:
        return []
    return [os.fsdecode(_ESCAPED.sub(lambda octal: bytes([int(octal[1], 8)]), point)) for point in points]


def is_within(path: str, directory: str) -> bool:
    """True if an absolute path without links is a directory or something in it."""
    return path == directory or path.startswith(directory.rstrip("/") + "/")


@atexit.register
def _give_back_all() -> None:
    """Remove what this process claimed, and wait for its threads that make or remove such directories now."""
    begin_end()
    me, end = (os.getpid(), threading.get_ident()), time.monotonic() + _PATIENCE
    while True:
        # Before the table is read: what a thread claims meanwhile is in it.
        busy = [who for who in list(_changing.values()) if who[0] == me[0] and who != me]
        left = [path for path, pid in list(_claimed.items()) if pid == me[0]]  # a fork inherits its parent's
        for path in left:
            with contextlib.suppress(Exception):  # the others are given back all the same
                give_back(path)
        if not left and (not busy or time.monotonic() > end):
            return
        time.sleep(0.01 if busy else 0)
