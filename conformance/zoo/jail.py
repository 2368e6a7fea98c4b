"""A sandbox of namespaces for hostile commands, and faults of such sandboxes.

`Jail` is a root file system in memory (tmpfs, so that the kernel limits its bytes and files) in user, mount, process
and network namespaces. Every command ends with all that it started. A snapshot is an archive of the files; a restore
puts it into a new jail, so that nothing of the old one can survive. It needs no privileges, but a kernel that lets
users have namespaces; see `why_unavailable`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sandboxgym import SnapshotEnv, SnapshotSpec, Unicode
from sandboxgym.system import run_directories
from zoo.mutant import good, mutant

Output = tuple[str, dict[str, Any]]

MIB = 2**20
DISK = 8 * MIB
FILES = 4000
SECONDS = 4.0
"""Time limit of one command: long enough for the suite's own ones on a busy machine."""
DEEPEST = 3500
"""Bytes of a path that an archive is unpacked with."""
TURNS = 60
NEVER_MORE = 64 * MIB
"""Bytes that a mutant may write which limits less than it should."""

_NAMESPACES = ("--user", "--map-root-user", "--mount", "--uts", "--ipc", "--net", "--fork", "--kill-child", "--pid")
_ENTERED = ("--user", "--mount", "--uts", "--ipc", "--net", "--pid")
_SETUP = """set -e
r=$1
mount -t tmpfs -o size=$2,nr_inodes=$3,mode=755 none "$r"
cd "$r"
mkdir -p work tmp run root home/agent var/tmp var/lib/.hidden dev/shm proc etc usr
for d in bin sbin lib lib32 lib64; do
  if [ -h "/$d" ]; then cp -P "/$d" "$d"
  elif [ -d "/$d" ]; then mkdir "$d"; mount --bind "/$d" "$d"; mount -o remount,bind,ro,nosuid,nodev "$d"; fi
done
if [ -d /etc/alternatives ]; then cp -a /etc/alternatives etc; fi
mount --bind /usr usr
mount -o remount,bind,ro,nosuid,nodev usr
for n in null zero full random urandom; do
  : > dev/$n; mount --bind /dev/$n dev/$n; mount -o remount,bind,ro,nosuid,noexec dev/$n
done
mount -t proc none proc
shift 3
while [ $# -gt 0 ]; do
  if [ -d "$1" ]; then mkdir -p ".$2"; else : > ".$2"; fi
  mount --bind "$1" ".$2"; shift 2
done
exec chroot . sh -c 'echo ready; exec env --ignore-signal=CHLD cat'
"""
"""The first process of a jail: it lasts as long as its owner holds the pipe, and collects its orphans."""
_NODES = tuple(f"./dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "dice"))
_LEFT_OUT = ("./proc", "./usr", "./bin", "./sbin", "./lib", "./lib32", "./lib64", *_NODES)


class JailError(Exception):
    """A jail refused a call; the message says why."""


@functools.cache
def why_unavailable() -> str:
    """Reason why there can be no jail on this machine; empty if there can."""
    if missing := [name for name in ("unshare", "nsenter", "mount", "chroot", "tar") if not shutil.which(name)]:
        return f"there is no {missing[0]}"
    env = Jail()
    try:
        env.reset()
        return ""
    except JailError as error:
        return str(error)
    finally:
        env.close()


class Cell:
    """One jail's processes and files."""

    def __init__(self, folder: Path, disk: int, files: int, binds: Mapping[str, str]) -> None:
        places = [text for pair in binds.items() for text in pair]
        command = ["unshare", *_NAMESPACES, "sh", "-c", _SETUP, "jail", str(folder), str(disk), str(files), *places]
        self.launcher = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        assert self.launcher.stdout is not None and self.launcher.stderr is not None
        if self.launcher.stdout.readline() != b"ready\n":
            self.launcher.kill()
            said = self.launcher.stderr.read().decode(errors="replace").strip()
            self.end()
            raise JailError(f"there can be no such namespaces here: {said}")
        children = Path(f"/proc/{self.launcher.pid}/task/{self.launcher.pid}/children").read_text().split()
        self.pid = int(children[0])

    @property
    def root(self) -> Path:
        """Its files, as the machine sees them."""
        return Path(f"/proc/{self.pid}/root")

    def enter(self, *command: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start a command in it."""
        enter = ["nsenter", f"--target={self.pid}", *_ENTERED, "--root", "--preserve-credentials", "--", *command]
        return subprocess.Popen(enter, start_new_session=True, **options)

    def kill_all(self) -> None:
        """End all processes but the first, at one instant: none can fork away from it."""
        null = subprocess.DEVNULL
        self.enter("sh", "-c", "[ -d /work ] && kill -9 -1", stdin=null, stdout=null, stderr=null).wait()

    def end(self) -> None:
        """End it, with everything in it."""
        self.launcher.kill()
        self.launcher.wait()
        for pipe in (self.launcher.stdin, self.launcher.stdout, self.launcher.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def clear(cells: list[Cell], folders: list[Path]) -> None:
    """End cells and give back folders: for `Jail.close`, garbage collection and the interpreter's exit."""
    while cells:
        cells.pop().end()
    while folders:
        run_directories.give_back(folders.pop())


def shell(env: Any, command: str) -> str:
    """The hook of this name."""
    return str(env.unwrapped.sh(command))


def limits(env: Any) -> dict[str, float]:
    """The hook of this name."""
    jail = env.unwrapped
    return {"disk": jail.disk, "files": jail.files, "seconds": jail.seconds}


@good(shell=shell, limits=limits)
class Jail(SnapshotEnv[str, str]):
    """Commands in namespaces of their own, with limits of bytes, files and seconds that the kernel holds."""

    metadata = {"render_modes": []}
    snapshot_spec = SnapshotSpec(kind="filesystem", cost="written", loses=("file.xattr",))
    disk, files, seconds = DISK, FILES, SECONDS

    def __init__(self, render_mode: str | None = None) -> None:
        self.observation_space = Unicode()
        self.action_space = Unicode(("ls", "cat task"))
        self.cell: Cell | None = None
        self.cells: list[Cell] = []
        self.folders: list[Path] = []
        self.finalizer = weakref.finalize(self, clear, self.cells, self.folders)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        super().reset(seed=seed)
        task = (options or {}).get("task")
        self.task = int(self.np_random.integers(1000)) if task is None else int(task)
        self.begin("reset")
        self.clock = 0
        self.sh(f"echo task {self.task} > task; touch -d 2001-01-01 task")
        return f"task {self.task}", self.info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.clock += 1
        output = self.sh(action)
        return output, float(len(output) % 2), False, self.clock >= TURNS, self.info()

    def info(self) -> dict[str, Any]:
        commands = ["ls", "cat task", "echo a >> a", "cat a", "rm -f a", "mkdir -p d", "rmdir d", "wc -c < a", "ls d"]
        return {"admissible_commands": commands, "success": False, "task_id": str(self.task)}

    def close(self) -> None:
        clear(self.cells, self.folders)
        self.cell = None

    # The jail.

    @property
    def started(self) -> Cell:
        """The jail that there must be."""
        if self.cell is None:
            raise JailError("the jail has ended: reset() or restore() makes another")
        return self.cell

    def begin(self, why: str) -> None:
        """A new jail with empty directories; ``why`` is ``reset`` or ``restore``."""
        if self.cell is not None:
            self.end()
        if not self.folders:
            run_directories.reap()
            self.folders.append(run_directories.claim("zoo"))
            (self.folders[0] / "root").mkdir()
        self.cell = Cell(self.folders[0] / "root", self.size(), self.files_held(), self.binds(why))
        self.cells.append(self.cell)

    def end(self) -> None:
        """End the jail, until the next reset or restore."""
        if self.cell is not None:
            self.cells.remove(self.cell)
            self.cell.end()
            self.cell = None

    def size(self) -> int:
        """Bytes that the kernel gives to its files."""
        return self.disk

    def files_held(self) -> int:
        """Files that the kernel gives to it; 0: any number."""
        return self.files

    def binds(self, why: str) -> dict[str, str]:
        """Places of the machine that show in it, and where."""
        return {}

    def sh(self, line: str) -> str:
        """Run a command."""
        cell = self.started
        with tempfile.TemporaryFile() as output:
            process = cell.enter(
                "env", "-C", "/work", "sh", "-c", line,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"},
            )  # fmt: skip
            with contextlib.ExitStack() as stack:
                self.watched(cell, stack)
                try:
                    process.wait(self.seconds)
                except subprocess.TimeoutExpired:
                    self.stop(cell, process)
                    process.wait()
                else:
                    self.stop(cell, process)
            if self.cell is None:
                raise JailError(f"more than {self.disk} bytes were written: the jail has ended")
            output.seek(0)
            return output.read(MIB).decode(errors="replace")

    def watched(self, cell: Cell, stack: contextlib.ExitStack) -> None:
        """Watch what a command writes, where the kernel does not."""

    def stop(self, cell: Cell, process: subprocess.Popen[bytes]) -> None:
        """End what a command started, in time or not."""
        cell.kill_all()

    # The state.

    def _capture(self) -> Any:
        pipe = subprocess.PIPE
        process = self.started.enter(
            "env", "-C", "/", "sh", "-c", self.archive(), stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe
        )
        files, said = process.communicate()
        if process.returncode:
            raise JailError(f"its files cannot be captured: {said.decode(errors='replace').strip()[-200:]}")
        return {"files": files, "task": self.task, "clock": self.clock}

    def archive(self) -> str:
        """The command that writes all files to its output, or refuses to."""
        left_out = " ".join(f"--exclude={name}" for name in _LEFT_OUT)
        return f"""n=$(find . -xdev 2>/dev/null | awk 'length > m {{ m = length }} END {{ print m + 0 }}')
if [ "$n" -gt {DEEPEST} ]; then echo "a path of $n bytes" >&2; exit 1; fi
exec tar --format=posix --one-file-system {left_out} -cf - ."""

    def _apply(self, state: Any) -> None:
        self.task, self.clock = state["task"], state["clock"]
        self.begin("restore")
        process = self.started.enter(
            "env", "-C", "/", "tar", "-xpf", "-", stdin=subprocess.PIPE, stderr=subprocess.PIPE
        )
        _, said = process.communicate(state["files"])
        if process.returncode:
            raise JailError(f"its files cannot be restored: {said.decode(errors='replace').strip()[-200:]}")


# What survives in a directory of the sandbox's own.


class Control(Jail):
    """A directory of the machine at ``/run/.control``, of each environment its own; a new one at each start."""

    where = "/run/.control"

    def binds(self, why: str) -> dict[str, str]:
        return {str(self.control(why)): self.where}

    def control(self, why: str) -> Path:
        """The directory to show now."""
        return self.fresh()

    def fresh(self) -> Path:
        """A new directory, in the run directory of this environment."""
        return Path(tempfile.mkdtemp(prefix="control-", dir=self.folders[0]))

    kept: Path | None = None

    def keep(self, fresh: bool) -> Path:
        """The directory of last time, unless it is to be a new one."""
        if self.kept is None or fresh or not self.kept.exists():
            self.kept = self.fresh()
        return self.kept


PLACES = "hostile.places"


@mutant("the control directory survives a restore", PLACES, shell=shell, limits=limits)
class ControlSurvivesRestore(Control):
    """A directory of the sandbox's own, writable from inside, is a new one at each reset only."""

    def control(self, why: str) -> Path:
        return self.keep(why == "reset")


@mutant("the control directory survives a reset", PLACES, shell=shell, limits=limits)
class ControlSurvivesReset(Control):
    """It is a new one at each restore, and at the first reset only."""

    def control(self, why: str) -> Path:
        return self.keep(why == "restore")


@mutant("the control directory reaches the next task", PLACES, shell=shell, limits=limits)
class ControlReachesNextTask(Control):
    """It is a new one where the same task starts again."""

    before: int | None = None

    def control(self, why: str) -> Path:
        same, self.before = self.before == self.task, self.task
        return self.keep(why == "restore" or same)


@mutant("siblings share a control directory", PLACES, shell=shell, limits=limits)
class ControlReachesSibling(Control):
    """Forks get their source's; all starts get a new one."""

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        _inherited.append(self.keep(False))
        try:
            return super().fork(k, seed=seed)
        finally:
            _inherited.pop()

    def control(self, why: str) -> Path:
        if _inherited:
            self.kept = _inherited[-1]
            return self.kept
        return self.keep(True)


_inherited: list[Path] = []


@mutant("a directory is used again by the next environment", PLACES, shell=shell, limits=limits)
class ControlUsedAgain(Control):
    """Closed sandbox that leaves its hidden directory below /var/lib to the next one, as it is."""

    where = "/var/lib/.hidden/state"

    def fresh(self) -> Path:
        if _spare:
            return _spare.pop()
        return Path(tempfile.mkdtemp(prefix="zoo-spare-"))

    def control(self, why: str) -> Path:
        return self.keep(True)

    def close(self) -> None:
        super().close()
        if self.kept is not None:
            _spare.append(self.kept)
            self.kept = None


_spare: list[Path] = []


@mutant("a device node is shared with its metadata", "hostile.devices", shell=shell, limits=limits)
class SharesDevice(Jail):
    """Modes, owners and times of ``/dev/dice`` are those of one node for all sandboxes."""

    def binds(self, why: str) -> dict[str, str]:
        return {_node(): "/dev/dice"}


def _node() -> str:
    path = Path(tempfile.gettempdir(), f"zoo-device-{os.getpid()}")
    if not path.exists():
        try:
            os.mknod(path, 0o020666, os.makedev(1, 7))
        except OSError:  # an ordinary user's is a file, with the same metadata
            path.touch()
    return str(path)


# What a disk limit misses.

DISKS = "hostile.disk"


class Walked(Jail):
    """The limit is held by counting while a command runs; here as the kernel counts, and rightly."""

    def size(self) -> int:
        return NEVER_MORE

    def used(self, cell: Cell) -> int:
        """Bytes that its files take."""
        found = os.statvfs(cell.root)
        return (found.f_blocks - found.f_bfree) * found.f_frsize

    def watched(self, cell: Cell, stack: contextlib.ExitStack) -> None:
        over = threading.Event()

        def watch() -> None:
            while not over.wait(0.05):
                with contextlib.suppress(OSError):
                    if self.used(cell) > self.disk:
                        self.enforce()
                        return

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        stack.callback(thread.join)
        stack.callback(over.set)

    def enforce(self) -> None:
        """End the jail that has written too much."""
        self.end()


def named(root: Path, *, deep: bool) -> Iterator[os.stat_result]:
    """All files that have a name, by descriptors, however deep; or by paths, as long as those may be."""
    if not deep:
        pending = [root]
        while pending:
            with contextlib.suppress(OSError), os.scandir(pending.pop()) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    if status.st_dev == os.stat(root).st_dev:
                        yield status
                        if entry.is_dir(follow_symlinks=False):
                            pending.append(Path(entry.path))
        return
    device = os.stat(root).st_dev
    stack = [(os.open(root, os.O_RDONLY | os.O_DIRECTORY), iter(()))]
    stack[0] = (stack[0][0], iter(os.listdir(stack[0][0])))
    try:
        while stack:
            here, names = stack[-1]
            for name in names:
                with contextlib.suppress(OSError):
                    status = os.stat(name, dir_fd=here, follow_symlinks=False)
                    if status.st_dev != device:
                        continue
                    yield status
                    if status.st_mode & 0o170000 == 0o040000:
                        inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
                        stack.append((inner, iter(os.listdir(inner))))
                        break
            else:
                os.close(stack.pop()[0])
    finally:
        for descriptor, _ in stack:
            os.close(descriptor)


def blocks(files: Iterator[os.stat_result]) -> int:
    """Bytes on disk."""
    return sum(status.st_blocks * 512 for status in files)


@mutant("the disk limit misses deleted files", DISKS, shell=shell, limits=limits)
class MissesDeleted(Walked):
    """Files are counted by their names; an open one may have none."""

    def used(self, cell: Cell) -> int:
        return blocks(named(cell.root, deep=True))


@mutant("the disk limit misses deep directories", DISKS, shell=shell, limits=limits)
class MissesDeep(Walked):
    """Disk limit that misses files below paths too long for a system call, but counts deleted ones."""

    def used(self, cell: Cell) -> int:
        unseen = blocks(named(cell.root, deep=True)) - blocks(named(cell.root, deep=False))
        return super().used(cell) - max(0, unseen)


@mutant("the disk limit misses many small files", DISKS, shell=shell, limits=limits)
class MissesSmall(Walked):
    """Lengths are counted, not what files of one byte take."""

    def used(self, cell: Cell) -> int:
        files = list(named(cell.root, deep=True))
        return super().used(cell) - blocks(iter(files)) + sum(min(f.st_size, f.st_blocks * 512) for f in files)


@mutant("the declared number of files does not hold", DISKS, shell=shell, limits=limits)
class MissesNumber(Jail):
    """The kernel was not told."""

    def files_held(self) -> int:
        return 0


@mutant("a control directory is not counted", DISKS, shell=shell, limits=limits)
class MissesControl(Control):
    """Disk limit that misses files in ``/run/.control``, which lie on the machine's disk."""


@mutant("the neighbour is ended for what another one wrote", DISKS, shell=shell, limits=limits)
class KillsNeighbour(Walked):
    """When one is over the limit, the one is ended whose named files are the largest."""

    def begin(self, why: str) -> None:
        super().begin(why)
        _running.add(self)

    def close(self) -> None:
        _running.discard(self)
        super().close()

    def enforce(self) -> None:
        alive = [env for env in _running if env.cell is not None]
        max(alive, key=lambda env: blocks(named(env.started.root, deep=True))).end()
        self.end()


_running: weakref.WeakSet[KillsNeighbour] = weakref.WeakSet()


# What outlives a command.

TIMES = "hostile.time_limit"


def of_cell(cell: Cell) -> list[int]:
    """The processes of a jail, but its first."""
    own = os.readlink(f"/proc/{cell.pid}/ns/mnt")
    spared = (cell.pid, cell.launcher.pid)
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit() and int(entry) not in spared and os.readlink(f"/proc/{entry}/ns/mnt") == own:
                found.append(int(entry))
    return found


@mutant("the time limit misses a session of its own", TIMES, shell=shell, limits=limits)
class MissesSetsid(Jail):
    """The command's process group is killed, and what left it goes on."""

    def stop(self, cell: Cell, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@mutant("the time limit misses a chain of forks", TIMES, shell=shell, limits=limits)
class MissesForkChain(Jail):
    """Processes are listed, and then killed: each link of a chain is gone by then, and the next one is not listed."""

    def stop(self, cell: Cell, process: subprocess.Popen[bytes]) -> None:
        for pid in of_cell(cell):
            time.sleep(0.005)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@mutant("the time limit is a request", TIMES, shell=shell, limits=limits)
class AsksPolitely(Jail):
    """SIGTERM, which a process may ignore, or get when it is continued."""

    def stop(self, cell: Cell, process: subprocess.Popen[bytes]) -> None:
        for pid in of_cell(cell):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        try:
            process.wait(1)
        except subprocess.TimeoutExpired:
            process.kill()


@mutant("the time limit does not hold", TIMES, shell=shell, limits=limits)
class WaitsForEver(Jail):
    """It is declared, and a command is waited for."""

    def sh(self, line: str) -> str:
        self.seconds = 600.0
        try:
            return super().sh(line)
        finally:
            del self.seconds


# Deep directories.


@mutant("deep directories raise RecursionError", "hostile.deep_trees", shell=shell, limits=limits)
class DeepRaises(Jail):
    """Capture that first measures the files by a recursive function."""

    def _capture(self) -> Any:
        def count(folder: int) -> int:
            total = 0
            for name in os.listdir(folder):
                with contextlib.suppress(OSError):
                    inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
                    try:
                        total += 1 + count(inner)
                    finally:
                        os.close(inner)
            return total

        work = os.open(self.started.root / "work", os.O_RDONLY | os.O_DIRECTORY)
        try:
            count(work)
        finally:
            os.close(work)
        return super()._capture()


@mutant("deep directories are cut off", "hostile.deep_trees", shell=shell, limits=limits)
class DeepCut(Jail):
    """Directories are captured to a depth of 12, without a word."""

    def archive(self) -> str:
        left_out = " ".join(f"-path {name} -prune -o" for name in _LEFT_OUT)
        return (
            f"find . -xdev -maxdepth 12 {left_out} -print0 | exec tar --format=posix --no-recursion --null -T - -cf -"
        )


@mutant("deep directories stay behind after close", "hostile.leftovers", shell=shell, limits=limits)
class DeepLeft(Control):
    """The working directory is one of the machine, and is deleted by a function that calls itself."""

    where = "/work"

    def fresh(self) -> Path:
        self.made = [*getattr(self, "made", ()), Path(tempfile.mkdtemp(prefix="zoo-work-"))]
        return self.made[-1]

    def close(self) -> None:
        super().close()
        for folder in getattr(self, "made", ()):
            with contextlib.suppress(RecursionError):
                shutil.rmtree(folder, ignore_errors=True)


@mutant("processes stay behind after close", "hostile.leftovers", shell=shell, limits=limits)
class ProcessesLeft(MissesSetsid):
    """Closed sandbox that is only forgotten; its processes run as long as the program that made it."""

    def end(self) -> None:
        if self.cell is not None:
            _forgotten.append(self.cell)
            self.cells.remove(self.cell)
            self.cell = None

    def close(self) -> None:
        self.end()


_forgotten: list[Cell] = []
