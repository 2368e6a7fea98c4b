"""A sandbox of files and processes, and faults of such sandboxes.

`Shell` keeps a temporary directory, a working directory, variables and background jobs, and understands a few commands
as well as any line of ``sh``. Its captured state is plain data: it can be saved, and nothing on disk is shared. Every
mutant has one method changed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sandboxgym import SnapshotEnv, SnapshotSpec, Unicode
from sandboxgym.system import run_directories
from zoo.mutant import good, mutant

Output = tuple[str, dict[str, Any]]
Tree = list[tuple[str, str, int, int, bytes]]
"""Path, kind (``dir``, ``file``, ``link``), mode, mtime in ns, and content, of everything below the root."""

ROOT = "root"
EPOCH = 1_000_000_000
TURNS = 30


def listing(env: Any) -> Any:
    """The oracle: what is really in the directory of an environment, read past its API."""
    shell = env.unwrapped
    if shell.root is None:
        return None
    return [(path, kind, oct(mode), content) for path, kind, mode, _, content in read_tree(shell.root)]


def read_tree(root: Path) -> Tree:
    """Everything below ``root``, sorted; symbolic links are not followed."""
    tree: Tree = []
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        kind = "link" if path.is_symlink() else "dir" if path.is_dir() else "file"
        content = b"" if kind == "dir" else os.readlink(path).encode() if kind == "link" else path.read_bytes()
        tree.append((str(path.relative_to(root)), kind, stat.S_IMODE(status.st_mode), status.st_mtime_ns, content))
    return tree


def write_tree(root: Path, tree: Tree) -> None:
    """The inverse of `read_tree` for an empty directory; times last, for writing into a directory changes its own."""
    for name, kind, _, _, content in tree:
        path = root / name
        if kind == "dir":
            path.mkdir()
        elif kind == "link":
            path.symlink_to(content.decode())
        else:
            path.write_bytes(content)
    for name, kind, mode, mtime, _ in reversed(tree):
        if kind != "link":
            (root / name).chmod(mode)
        os.utime(root / name, ns=(mtime, mtime), follow_symlinks=False)


def empty(root: Path) -> None:
    """Delete what is in a directory."""
    for path in root.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def start_job() -> subprocess.Popen[bytes]:
    """A background process that does nothing, and ends with the process that holds the other end of its pipe."""
    null = subprocess.DEVNULL
    return subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True)


def stop_job(job: subprocess.Popen[bytes]) -> None:
    """Kill a background process and collect it."""
    job.kill()
    job.wait()
    if job.stdin is not None:
        job.stdin.close()


def clear(roots: list[Path], jobs: dict[str, subprocess.Popen[bytes]]) -> None:
    """Stop jobs and remove folders: for `Shell.close`, garbage collection and the interpreter's exit."""
    for job in jobs.values():
        stop_job(job)
    jobs.clear()
    while roots:
        path = roots.pop()
        run_directories.give_back(path.parent) if path.name == ROOT else shutil.rmtree(path, ignore_errors=True)


@good(observe_state=listing)
class Shell(SnapshotEnv[str, str]):
    """Files, modes, links, times, variables, a working directory and background jobs, all of them captured."""

    metadata = {"render_modes": []}
    snapshot_spec = SnapshotSpec(kind="filesystem", cost="written", processes=True)

    def __init__(self, turns: int = TURNS, render_mode: str | None = None) -> None:
        self.turns = turns
        self.observation_space = Unicode()
        self.action_space = Unicode(("ls", "jobs"))
        self.root: Path | None = None
        self.roots: list[Path] = []
        self.jobs: dict[str, subprocess.Popen[bytes]] = {}
        self.finalizer = weakref.finalize(self, clear, self.roots, self.jobs)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        super().reset(seed=seed)
        self.begin()
        task = (options or {}).get("task")
        secret = int(self.np_random.integers(1000)) if task is None else int(task)
        self.cwd, self.clock = ".", 0
        self.variables: dict[str, str] = {"TASK": str(secret)}
        self.write("readme", f"task {secret}\n")
        return f"task {secret}", self.info()

    def begin(self) -> None:
        """An empty directory and no jobs."""
        for job in self.jobs.values():
            stop_job(job)
        self.jobs.clear()
        if self.root is None:
            self.root = self.folder()
        else:
            empty(self.root)

    def folder(self) -> Path:
        """Recorded with its owner, so that the next process can delete it if this one is killed."""
        run_directories.reap()
        root = run_directories.claim("zoo") / ROOT
        root.mkdir()
        self.roots.append(root)
        return root

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.clock += 1
        verb, _, rest = action.partition(" ")
        command: Callable[..., str] | None = getattr(self, f"do_{verb}", None)
        try:
            output = self.sh(action) if command is None else command(*(rest.split(" ", 1) if rest else ()))
        except (OSError, TypeError, ValueError) as error:
            output = f"{verb}: {os.strerror(error.errno) if isinstance(error, OSError) and error.errno else 'usage'}"
        done = self.clock >= self.turns
        reward = float(done and len(self.present()) % 2)
        return output, reward, done, False, self.info()

    def info(self) -> dict[str, Any]:
        return {"admissible_commands": self.admissible(), "success": False, "task_id": self.variables["TASK"]}

    def admissible(self) -> list[str]:
        """Commands that have an effect here, so that a short random walk gets around."""
        names = {path.name for path in self.here().iterdir()}
        commands = ["write a one", "write b two", "append a another", "set K v", "set K w", "echo K", "newest", "ls"]
        commands += ["journal", "stop worker" if "worker" in self.jobs else "start worker", "jobs"]
        if "a" in names:
            commands += ["cat a", "rm a", "chmod 600 a", "chmod 755 a", "rm s" if "s" in names else "link a s"]
        commands += ["cd d", "mkdir d/e", "rmdir d/e"] if "d" in names else ["mkdir d"]
        return commands if self.cwd == "." else [*commands, "cd .."]

    def close(self) -> None:
        clear(self.roots, self.jobs)
        self.root = None

    # Commands.

    def here(self) -> Path:
        assert self.root is not None
        return self.root / self.cwd

    def present(self) -> list[str]:
        assert self.root is not None
        return sorted(str(path.relative_to(self.root)) for path in self.root.rglob("*"))

    def tick(self, path: Path) -> None:
        """Times are counted in steps: the file system's clock would differ from run to run."""
        moment = (EPOCH + self.clock) * 10**9
        for touched in (path, path.parent):
            with contextlib.suppress(FileNotFoundError):
                os.utime(touched, ns=(moment, moment), follow_symlinks=False)

    def write(self, name: str, text: str, mode: str = "w") -> None:
        path = self.here() / name
        with open(path, mode, encoding="utf-8") as file:
            file.write(text)
        self.tick(path)

    def do_write(self, name: str, text: str) -> str:
        self.write(name, f"{text}\n")
        return ""

    def do_append(self, name: str, text: str) -> str:
        self.write(name, f"{text}\n", "a")
        return ""

    def do_cat(self, name: str) -> str:
        return (self.here() / name).read_text(encoding="utf-8", errors="replace")

    def do_rm(self, name: str) -> str:
        (self.here() / name).unlink()
        self.tick(self.here() / name)
        return ""

    def do_mkdir(self, name: str) -> str:
        (self.here() / name).mkdir()
        self.tick(self.here() / name)
        return ""

    def do_rmdir(self, name: str) -> str:
        (self.here() / name).rmdir()
        self.tick(self.here() / name)
        return ""

    def do_chmod(self, mode: str, name: str) -> str:
        (self.here() / name).chmod(int(mode, 8))
        return ""

    def do_link(self, target: str, name: str) -> str:
        (self.here() / name).symlink_to(target)
        self.tick(self.here() / name)
        return ""

    def do_cd(self, name: str) -> str:
        assert self.root is not None
        target = (self.here() / name).resolve()
        root = self.root.resolve()
        if not target.is_dir():
            raise NotADirectoryError(20, "")
        self.cwd = str(target.relative_to(root)) if target.is_relative_to(root) else "."
        return self.cwd

    def do_set(self, name: str, value: str) -> str:
        self.variables[name] = value
        return ""

    def do_echo(self, name: str = "") -> str:
        return self.variables.get(name, "")

    def do_ls(self, name: str = ".") -> str:
        lines = []
        for path in sorted((self.here() / name).iterdir()):
            kind = "l" if path.is_symlink() else "d" if path.is_dir() else "-"
            lines.append(f"{kind}{stat.S_IMODE(path.lstat().st_mode):o} {path.name}")
        return "\n".join(lines)

    def do_newest(self) -> str:
        found = [(path.lstat().st_mtime_ns, path.name) for path in self.here().iterdir()]
        return " ".join(name for moment, name in sorted(found, reverse=True))

    def do_start(self, name: str) -> str:
        if name not in self.jobs:
            self.jobs[name] = start_job()
        return name

    def do_stop(self, name: str) -> str:
        job = self.jobs.pop(name, None)
        if job is not None:
            stop_job(job)
        return name

    def do_jobs(self) -> str:
        return " ".join(sorted(name for name, job in self.jobs.items() if job.poll() is None))

    def do_journal(self, text: str = "read") -> str:
        self.write("journal", f"{self.clock}\n", "a")
        return self.do_cat("journal")

    def sh(self, line: str) -> str:
        """Anything else is for the system's shell, in this directory and with these variables."""
        variables = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(self.root), **self.variables}
        done = subprocess.run(
            ["sh", "-c", line], cwd=self.here(), env=variables, capture_output=True, text=True, errors="replace"
        )
        return (done.stdout + done.stderr).replace(str(self.root), "~")

    # The state.

    def _capture(self) -> Any:
        assert self.root is not None
        return {
            "tree": read_tree(self.root),
            "cwd": self.cwd,
            "clock": self.clock,
            "variables": self.variables,
            "jobs": sorted(name for name, job in self.jobs.items() if job.poll() is None),
        }

    def _apply(self, state: Any) -> None:
        self.apply_jobs(state["jobs"])
        self.apply_tree(state["tree"])
        self.cwd, self.clock, self.variables = state["cwd"], state["clock"], state["variables"]

    def apply_tree(self, tree: Tree) -> None:
        if self.root is None:
            self.root = self.folder()
        empty(self.root)
        write_tree(self.root, tree)

    def apply_jobs(self, names: list[str]) -> None:
        for name in set(self.jobs) - set(names):
            stop_job(self.jobs.pop(name))
        for name in names:
            if name not in self.jobs or self.jobs[name].poll() is not None:
                self.jobs[name] = start_job()


# Files.

FILES = ("restore.trace_equality", "isolation.files", "probes.matrix")


def _but(tree: Tree, change: Callable[[str, str, int, int, bytes], tuple[str, str, int, int, bytes] | None]) -> Tree:
    return [new for entry in tree if (new := change(*entry)) is not None]


@mutant("a file's mode is lost", *FILES, observe_state=listing)
class ModeLost(Shell):
    """Files come back with the mode that new files have."""

    def apply_tree(self, tree: Tree) -> None:
        super().apply_tree(_but(tree, lambda n, k, m, t, c: (n, k, 0o644 if k == "file" else m, t, c)))


@mutant("a deleted file comes back", *FILES, "restore.any_order", "restore.many", observe_state=listing)
class DeletedComesBack(Shell):
    """An earlier snapshot of this environment is merged into a later one, as layers without whiteouts are."""

    below: Tree

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        self.below = []
        return super().reset(seed=seed, options=options)

    def _capture(self) -> Any:
        state = super()._capture()
        state["tree"] = _merged(getattr(self, "below", []), state["tree"])
        self.below = state["tree"]
        return state

    def _apply(self, state: Any) -> None:
        super()._apply(state)
        self.below = state["tree"]


def _merged(below: Tree, above: Tree) -> Tree:
    found = {entry[0] for entry in above}
    folders = {entry[0] for entry in above if entry[1] == "dir"} | {"."}
    kept = [e for e in below if e[0] not in found and e[1] != "dir" and str(Path(e[0]).parent) in folders]
    return sorted([*above, *kept])


@mutant("a file made later stays", *FILES, "restore.any_order", "restore.many", observe_state=listing)
class LaterFileStays(Shell):
    """A restore writes the captured files over what is there and deletes nothing."""

    def apply_tree(self, tree: Tree) -> None:
        if self.root is None:
            return super().apply_tree(tree)
        return super().apply_tree(_merged(read_tree(self.root), tree))


@mutant("an empty directory is lost", *FILES, observe_state=listing)
class EmptyDirLost(Shell):
    """Only files are captured, and the directories above them."""

    def _capture(self) -> Any:
        state = super()._capture()
        parents = {str(parent) for entry in state["tree"] for parent in Path(entry[0]).parents}
        parents.add(state["cwd"])
        state["tree"] = [entry for entry in state["tree"] if entry[1] != "dir" or entry[0] in parents]
        return state


@mutant("a symbolic link becomes a file", *FILES, observe_state=listing)
class LinkBecomesFile(Shell):
    """Links are followed when captured."""

    def _capture(self) -> Any:
        state = super()._capture()
        files = {entry[0]: entry for entry in state["tree"]}

        def follow(name: str, kind: str, mode: int, mtime: int, content: bytes) -> Any:
            target = files.get(str(Path(name).parent / content.decode())) if kind == "link" else None
            if target is None or target[1] != "file":
                return name, kind, mode, mtime, content
            return name, "file", target[2], mtime, target[4]

        state["tree"] = _but(state["tree"], follow)
        return state


@mutant("times of files are lost", *FILES, observe_state=listing)
class TimesLost(Shell):
    """All files are as old as the restore."""

    def apply_tree(self, tree: Tree) -> None:
        now = (EPOCH + 10**6) * 10**9
        super().apply_tree(_but(tree, lambda n, k, m, t, c: (n, k, m, now, c)))


@mutant("large files are cut off", *FILES, observe_state=listing)
class LongFilesCut(Shell):
    """Files are captured up to 9 bytes, which a short one doesn't show."""

    def _capture(self) -> Any:
        state = super()._capture()
        state["tree"] = _but(state["tree"], lambda n, k, m, t, c: (n, k, m, t, c[:9]))
        return state


# The rest of the sandbox.


@mutant("an environment variable is lost", "restore.trace_equality", "probes.matrix", observe_state=listing)
class VariableLost(Shell):
    """Variables are not captured but for the task's own."""

    def _capture(self) -> Any:
        return {**super()._capture(), "variables": {"TASK": self.variables["TASK"]}}


@mutant("the working directory is lost", "restore.trace_equality", "probes.matrix", observe_state=listing)
class CwdLost(Shell):
    """A restore goes to the root."""

    def _apply(self, state: Any) -> None:
        super()._apply({**state, "cwd": "."})


@mutant("variables are those of the process", "isolation.environment", "fork.isolation", observe_state=listing)
class ProcessVariables(Shell):
    """Variables are set in ``os.environ``; captured and restored well for one environment at a time."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        os.environ.pop("ZOO_K", None)
        return super().reset(seed=seed, options=options)

    def do_set(self, name: str, value: str) -> str:
        os.environ[f"ZOO_{name}"] = value
        return ""

    def do_echo(self, name: str = "") -> str:
        return os.environ.get(f"ZOO_{name}", "")

    def _capture(self) -> Any:
        return {**super()._capture(), "process": os.environ.get("ZOO_K")}

    def _apply(self, state: Any) -> None:
        super()._apply(state)
        os.environ.pop("ZOO_K", None)
        if state["process"] is not None:
            os.environ["ZOO_K"] = state["process"]


@mutant("the working directory is that of the process", "isolation.environment", "isolation.globals", "fork.isolation")
class ProcessCwd(Shell):
    """``cd`` changes the directory of the whole process, which a restore and a reset put right."""

    def do_cd(self, name: str) -> str:
        cwd = super().do_cd(name)
        os.chdir(self.here())
        return cwd

    def here(self) -> Path:
        current = Path.cwd()
        assert self.root is not None
        return current if current.is_relative_to(self.root) else super().here()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        os.chdir(tempfile.gettempdir())
        return super().reset(seed=seed, options=options)

    def _apply(self, state: Any) -> None:
        os.chdir(tempfile.gettempdir())
        super()._apply(state)

    def close(self) -> None:
        os.chdir(tempfile.gettempdir())
        super().close()


@mutant("the umask is that of the process", "isolation.environment", "isolation.globals", "restore.trace_equality")
class ProcessUmask(Shell):
    """Setting a variable tightens the umask of the process, and new files show it."""

    def do_set(self, name: str, value: str) -> str:
        os.umask(0o077 if value == "v" else 0o022)
        return super().do_set(name, value)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        os.umask(0o022)
        return super().reset(seed=seed, options=options)

    def _apply(self, state: Any) -> None:
        super()._apply(state)
        os.umask(0o077 if state["variables"].get("K") == "v" else 0o022)

    def close(self) -> None:
        os.umask(0o022)
        super().close()


@mutant("forks share a file outside", "isolation.files", "fork.isolation", observe_state=listing)
class SharedTempFile(Shell):
    """The journal is one file in the temporary directory; captured and restored well for one at a time."""

    @property
    def shared(self) -> Path:
        return Path(tempfile.gettempdir(), f"zoo-journal-{os.getpid()}")

    def do_journal(self, text: str = "read") -> str:
        with open(self.shared, "a", encoding="utf-8") as file:
            file.write(f"{self.clock}\n")
        return self.shared.read_text(encoding="utf-8")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        self.shared.unlink(missing_ok=True)
        return super().reset(seed=seed, options=options)

    def _capture(self) -> Any:
        kept = self.shared.read_text(encoding="utf-8") if self.shared.exists() else None
        return {**super()._capture(), "journal": kept}

    def _apply(self, state: Any) -> None:
        super()._apply(state)
        self.shared.unlink(missing_ok=True)
        if state["journal"] is not None:
            self.shared.write_text(state["journal"], encoding="utf-8")


@mutant("a fork shares its source's open file", "isolation.files", "fork.isolation", observe_state=listing)
class SharedDescriptor(Shell):
    """The journal is kept in an open file, and children get a duplicate of the descriptor."""

    journal: Any = None

    def begin(self) -> None:
        super().begin()
        self.reopen("")

    def reopen(self, text: str) -> None:
        if self.journal is not None:
            self.journal.close()
        self.journal = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.journal.write(text)

    def text(self) -> str:
        self.journal.flush()
        self.journal.seek(0)
        return str(self.journal.read())

    def do_journal(self, text: str = "read") -> str:
        self.text()
        self.journal.write(f"{self.clock}\n")
        return self.text()

    def _capture(self) -> Any:
        return {**super()._capture(), "journal": self.text()}

    def _apply(self, state: Any) -> None:
        super()._apply(state)
        self.reopen(state["journal"])

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        for child in children:
            child.journal.close()
            child.journal = os.fdopen(os.dup(self.journal.fileno()), "w+")
        return children

    def close(self) -> None:
        if self.journal is not None:
            self.journal.close()
            self.journal = None
        super().close()


@mutant("closing a child deletes its parent's files", "fork.close_order")
class ClosesParent(Shell):
    """A child takes over the list of directories to delete."""

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        for child in children:
            child.roots.extend(self.roots)
        return children


@mutant("closing the parent ends its children", "fork.close_order")
class ClosesChildren(Shell):
    """The parent keeps its children's directories and deletes them when it is closed."""

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        for child in children:
            self.roots.extend(child.roots)
        return children


@mutant("siblings share a background process", "fork.isolation", "fork.close_order", "fork.source_untouched")
class SharedProcess(Shell):
    """A child's job is the process of its parent, so that one of them ends it for both."""

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        for child in children:
            for name, job in self.jobs.items():
                stop_job(child.jobs[name])
                child.jobs[name] = job
        return children


@mutant("a background process survives a restore", "restore.any_order", "restore.many", "restore.trace_equality")
class ProcessSurvives(Shell):
    """A job that was started later goes on after a restore to before its start."""

    def apply_jobs(self, names: list[str]) -> None:
        super().apply_jobs(sorted({*names, *self.jobs}))


@mutant("processes are declared captured and lost", "restore.trace_equality", "probes.matrix", observe_state=listing)
class ProcessesLost(Shell):
    """No job is started again, though the spec says that processes are captured."""

    def apply_jobs(self, names: list[str]) -> None:
        super().apply_jobs([])


# What stays behind.


@mutant("temporary files leak on close", "resources.baseline")
class FilesLeak(Shell):
    """The directories of forks are not deleted when they are closed."""

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        children = super().fork(k, seed=seed)
        for child in children:
            child.roots.clear()
        return children


@mutant("a process leaks on close", "resources.baseline")
class ProcessLeaks(Shell):
    """Every fork starts a process of its own that nobody ends."""

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        start_job().returncode = 0  # not waited for, and no ResourceWarning either
        return super().fork(k, seed=seed)


@mutant("a failed fork leaks its children", "concurrency.partial_fork", "fork.invalid")
class PartialForkLeaks(Shell):
    """When the second child cannot be made, the first one stays, with its directory and process."""

    def fork(self, k: int, *, seed: int | None = None) -> list[Any]:
        if k < 1:
            raise ValueError(f"expected at least 1 fork, found k={k}")
        children = [super(PartialForkLeaks, self).fork(1)[0] for _ in range(k)]
        _adrift.extend(children)
        if seed is not None:
            for index, child in enumerate(children):
                child.restore(child.snapshot(), seed=_offset(seed, index))
        del _adrift[:]
        return children


_adrift: list[Any] = []


def _offset(seed: int, index: int) -> int:
    return seed + 1000 * index + 1


@mutant("a killed owner leaves its files and processes behind", "resources.killed_owner")
class NothingReaped(Shell):
    """Directories and processes that nobody takes care of after a ``kill -9`` of their owner."""

    def folder(self) -> Path:
        root = Path(tempfile.mkdtemp(prefix="zoo-shell-"))
        self.roots.append(root)
        return root
