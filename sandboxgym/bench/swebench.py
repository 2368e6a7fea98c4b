"""Benchmark of SWE-bench on a large repository: steps, resets, snapshots and verdicts, by backend and official harness.

sandboxgym bench swebench [--files 6000] [--repeats 30] [--few 5] [--seconds 300] [--image IMAGE]
    [--backends overlay overlay-rootless docker copy] [--write docs/results/details/swebench.md]

The repository is that of an embedded task, with this many files of generated code around it and a history that changes
them. ``--image`` names an image on this machine with bash, coreutils, git and a Python with pytest: the task's image is
based on it, and the overlay backends, Docker and the harness run on that; without one, the overlay backends run on this
machine's tool chain, and Docker and the harness are left out. ``copy`` always uses this machine's.

Times are wall-clock: fastest, median and 95th percentile. In each repetition all backends do everything in turn, so
that other work of the machine affects all of them; one that has used up its time makes no more repetitions. Prepared
tasks are kept in a directory of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gymnasium as gym

import sandboxgym
from sandboxgym.bench.sandbox import Times, why_no_docker
from sandboxgym.bench.tools import result_page
from sandboxgym.cli.support.printing import nbytes_text
from sandboxgym.envs.swebench import mini
from sandboxgym.envs.swebench.grading import parsing
from sandboxgym.envs.swebench.grading import verdict as grading
from sandboxgym.envs.swebench.rows import recipes as columns
from sandboxgym.envs.swebench.rows.tasks import HOST, Task, open_tasks
from sandboxgym.envs.swebench.workspaces import prepared
from sandboxgym.envs.swebench.workspaces.workspace import WorkspaceSettings, forget_prepared, pristine
from sandboxgym.sandbox import backends
from sandboxgym.sandbox.base import SandboxError
from sandboxgym.system import interpreter, run_directories

BACKENDS = ("overlay", "overlay-rootless", "docker", "copy")
STEP, RESET = 3.0, 0.2
"""Limits: cost of a step relative to a command, and seconds of a reset to a prepared row."""
COMMITS = 20
"""Number of commits of the repository after the first; each changes a hundredth of the files."""
STEPS = 10
"""Number of `true` commands in a row, in each repetition."""
TAG = "sandboxgym-bench-row"
"""Name of the built image; its tag is the id of this process."""
_IDENTITY = ("-c", "user.name=Bench", "-c", "user.email=bench@example.invalid", "-c", "gc.auto=0")
_TIMEOUT = 600.0
_NEW_PROCESS = """
import json, time
import gymnasium, sandboxgym.envs.swebench.env
env = gymnasium.make("sandboxgym/SWEBench-v0", **json.loads(sys.argv[1]))
began, busy = time.perf_counter(), time.process_time()
env.reset(options={"task": 0})
reset, busy = time.perf_counter() - began, time.process_time() - busy
env.step("true")
print(json.dumps([reset, busy, time.perf_counter() - began]))
env.close()
"""


@dataclass
class SWEBenchRow:
    """Measurements on one backend."""

    prepare: Times = field(default_factory=Times)
    reset: Times = field(default_factory=Times)
    begin: Times = field(default_factory=Times)
    """Time of a reset and the first step, ``true``."""
    reset_new: Times = field(default_factory=Times)
    """Time of a reset in a process that has imported the environment and done nothing else."""
    busy: Times = field(default_factory=Times)
    """CPU time of this process in such a reset, which other work of the machine hardly changes."""
    begin_new: Times = field(default_factory=Times)
    execute: Times = field(default_factory=Times)
    step: Times = field(default_factory=Times)
    execute_writing: Times = field(default_factory=Times)
    step_writing: Times = field(default_factory=Times)
    snapshot: Times = field(default_factory=Times)
    """Time of a snapshot and the next step."""
    restore: Times = field(default_factory=Times)
    """Time of a restore and the next step."""
    fork: Times = field(default_factory=Times)
    """Time of a fork and its first step."""
    verdict: Times = field(default_factory=Times)
    nbytes: int = 0
    """Bytes of the prepared task on disk."""


# The repository


def build(folder: Path, files: int) -> dict[str, Any]:
    """Make the repository, and the row of a task on it.

    Args:
        folder: where; empty.
        files: of generated code, beside the task's own.
    """
    source = mini.repository_of(mini.REPOSITORIES[0])
    number = next(number for number, commit in enumerate(source.commits) if commit.issue is not None)
    recorded = next(
        row for row in mini.rows() if row["instance_id"] == mini.instance_id_of(source, source.commits[number])
    )
    contents = dict(source.commits[number - 1].files)
    contents |= {_name(index): _module(index) for index in range(files)}
    for path, text in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    _git(folder, "init", "--quiet", "--initial-branch=main")
    _commit(folder, "All of it")
    for commit in range(COMMITS):
        for index in range(commit, files, 100):
            with open(folder / _name(index), "a", encoding="utf-8") as file:
                file.write(f"\n\nCHANGED_{commit} = {index}\n")
        _commit(folder, f"Change {commit}")
    base = _git(folder, "rev-parse", "HEAD").strip()
    script = columns.eval_script(base_commit=base, test_patch=recorded["test_patch"], test=mini.TEST_COMMAND)
    return {**recorded, "base_commit": base, "environment_setup_commit": base, "history": "", "eval_script": script}


def _name(index: int) -> str:
    return f"modules/group_{index // 60:03}/part_{index % 60:02}.py"


def _module(index: int) -> str:
    """Generate a file of 1 to 5 kB of code."""
    lines = [f'"""Part {index} of the generated code."""', ""]
    for number in range(5 + index * 7 % 20):
        lines += ["", f"def value_{number}(scale={index % 97}):", f'    """The value {number} at a scale."""']
        lines += [f"    total = sum(range({number * 13 + index % 11}))", f"    return total * scale + {number}", ""]
    return "\n".join(lines)


def _commit(folder: Path, message: str) -> None:
    _git(folder, "add", "--all", "--force")
    _git(folder, *_IDENTITY, "commit", "--quiet", "--message", message)


def _git(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    environment |= dict.fromkeys(("GIT_AUTHOR_DATE", "GIT_COMMITTER_DATE"), "2024-01-01T00:00:00Z")
    command = ["git", "-C", os.fspath(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout


@contextlib.contextmanager
def image_of(base: str, repository: Path) -> Iterator[str]:
    """Build an image with the repository at ``/testbed``, removed at the end."""
    import docker

    client = docker.from_env(timeout=int(_TIMEOUT))
    name = f"{TAG}:{os.getpid()}"
    with contextlib.closing(client):
        container = client.containers.create(base, ["true"], network_disabled=True)
        try:
            with tempfile.TemporaryFile() as archive:
                with tarfile.open(fileobj=archive, mode="w") as tar:
                    tar.add(repository, "testbed", filter=_of_root)
                archive.seek(0, io.SEEK_SET)
                container.put_archive("/", archive)
            container.commit(repository=TAG, tag=str(os.getpid()))
        finally:
            container.remove(force=True)
        try:
            yield name
        finally:
            client.images.remove(name, force=True)


def _of_root(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = "root"
    return info


# One backend


class Bench:
    """The task on one backend: an environment in which everything is measured repeatedly.

    Raises:
        SandboxError: there is no such sandbox here.
    """

    def __init__(self, backend: str, row: dict[str, Any], folder: Path) -> None:
        dataset = folder / f"{backend}.jsonl"
        dataset.write_text(json.dumps(row) + "\n", encoding="utf-8")
        self.row = SWEBenchRow()
        self.arguments: dict[str, Any] = {"dataset": str(dataset), "backend": backend, "allow_unsafe": True}
        self.env: Any = gym.make("sandboxgym/SWEBench-v0", **self.arguments, grade_at=0, max_episode_steps=10**9)
        self._numbers = iter(range(10**9))
        (self.task,) = open_tasks(dataset)
        self.settings = WorkspaceSettings(backend=backend, allow_unsafe=True)
        try:
            with self.settings.box(self.task) as box:  # compiles, unpacks, starts what all sandboxes share
                box.run("true")
            self.env.reset(options={"task": 0})
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close its sandboxes."""
        self.env.close()

    def prepare(self) -> None:
        """Measure one preparation from nothing: another environment variable makes another entry of the cache."""
        settings = replace(self.settings, env=(("SANDBOXGYM_BENCH", f"{next(self._numbers)}"),))
        with self.row.prepare.one():
            start = pristine(self.task, settings)
        self.row.nbytes = start.snapshot.nbytes

    def resets(self) -> None:
        """Measure resets to the prepared task, in this process."""
        with self.row.begin.one():
            with self.row.reset.one():
                self.env.reset(options={"task": 0})
            self._step("true")

    def resets_elsewhere(self) -> None:
        """Measure resets to the prepared task, in new processes."""
        command = interpreter.command(_NEW_PROCESS, json.dumps(self.arguments))
        environment = interpreter.environment()
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment, timeout=_TIMEOUT)
        reset, busy, begin = json.loads(done.stdout)
        self.row.reset_new.seconds.append(reset)
        self.row.busy.seconds.append(busy)
        self.row.begin_new.seconds.append(begin)

    def steps(self) -> None:
        """Measure commands, and the same as steps: without writing, and with a file of the repository written.

        Each in a row of its kind, the first of which does not count: bash writes its state down after a command, which
        whoever comes next waits for, the next command or the step that reads it.
        """
        sandbox = self.env.unwrapped._live().sandbox
        self._row(lambda: sandbox.execute("true"), self.row.execute, STEPS)
        self._row(lambda: self._step("true"), self.row.step, STEPS)
        writing = "echo more >> README.md"
        self._row(lambda: sandbox.execute(writing), self.row.execute_writing, 1)
        self._row(lambda: self._step(writing), self.row.step_writing, 1)

    def _row(self, call: Callable[[], object], times: Times, number: int) -> None:
        call()
        for _ in range(number):
            with times.one():
                call()

    def snapshots(self) -> None:
        """Measure snapshots, restores and forks, each until a step was made."""
        self._step("echo more >> README.md")
        with self.row.snapshot.one():
            snap = sandboxgym.snapshot(self.env)
            self._step("true")
        self._step("echo other >> README.md")
        with self.row.restore.one():
            self.env.restore(snap)
            self._step("true")
        (child,) = self.env.fork(1)
        with contextlib.closing(child), self.row.fork.one():
            child.step("true")
        snap.release()

    def verdict(self) -> str:
        """Measure the verdict on the solution and a new file, so that no patch is tested twice; returns the patch."""
        self.env.reset(options={"task": 0})
        self._step(f"git apply - <<'END'\n{self.task.patch}\nEND\necho {next(self._numbers)} > NOTES.{os.getpid()}")
        began = time.perf_counter()
        info = self.env.step("submit")[-1]
        self.row.verdict.seconds.append(time.perf_counter() - began)
        if info["verdict"] != "resolved":
            raise RuntimeError(f"the solution's verdict is {info['verdict']!r}: {info['tests_status']}")
        self.env.reset(options={"task": 0})
        return str(info["patch"])

    def _step(self, action: str) -> None:
        info = self.env.step(action)[-1]
        if info["returncode"] != 0:
            raise RuntimeError(f"{action!r}: {info['returncode']}")


# The alternatives


class Harness:
    """The official harness on the same image: one run of it per patch, as its command line does it."""

    def __init__(self, task: Task, folder: Path) -> None:
        import docker
        from swebench.harness.run_evaluation import run_instance

        self._run, self._task, self._folder = run_instance, task, folder
        self._client = docker.from_env(timeout=int(_TIMEOUT))
        self._spec = grading.official().make_test_spec(task.row())
        self.times = Times()

    def verdict(self, patch: str) -> None:
        """Measure the verdict on a patch that resolves the issue."""
        name = self._task.instance_id
        prediction = {"instance_id": name, "model_name_or_path": "bench", "model_patch": patch}
        run = f"bench-{os.getpid()}-{len(self.times.seconds)}"
        with contextlib.chdir(self._folder), contextlib.redirect_stdout(io.StringIO()), self.times.one():
            found = self._run(self._spec, prediction, self._client, run, int(_TIMEOUT))
        if found is None or not found[1][name]["resolved"]:
            raise RuntimeError(f"the harness does not resolve the solution: {found}")

    def close(self) -> None:
        """Close the connection to the daemon."""
        self._client.close()


class Exec:
    """``docker exec`` of a fresh bash per command in a running container, as in scaffolds without a session."""

    def __init__(self, image: str) -> None:
        import docker

        self._client = docker.from_env(timeout=int(_TIMEOUT))
        self._container = self._client.containers.run(image, ["sleep", "100000"], detach=True, network_disabled=True)
        self.times = Times()

    def one(self) -> None:
        """Run ``true``."""
        with self.times.one():
            self._container.exec_run(["bash", "-c", "true"], workdir="/testbed")

    def close(self) -> None:
        """Remove the container."""
        self._container.remove(force=True)
        self._client.close()


class Beside:
    """Load of the machine, sampled in each repetition."""

    def __init__(self) -> None:
        self.loop, self.interpreter = Times(), Times()
        self.loads: list[float] = []

    def look(self) -> None:
        """Sample the machine's load, and time a loop and a new interpreter."""
        self.loads.append(os.getloadavg()[0])
        with self.loop.one():
            sum(range(1_000_000))
        with self.interpreter.one():
            subprocess.run([sys.executable, "-I", "-c", "pass"], check=True)

    def __str__(self) -> str:
        low, high = min(self.loads), max(self.loads)
        return (
            f"Beside it, in each repetition: a loop that always does the same took {self.loop} ms, a Python that does "
            f"nothing {self.interpreter} ms; the machine's load was {low:.1f} to {high:.1f}, on {os.cpu_count()} cores."
        )


# Everything


def measure(
    wanted: Sequence[str], files: int, image: str | None, *, repeats: int, few: int, seconds: float
) -> list[str]:
    """Measure everything; returns the tables."""
    notes: list[str] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sandboxgym-bench-")))
        repository = folder / "root" / "testbed"
        repository.mkdir(parents=True)
        row = build(repository, files)
        reason = why_no_docker(image)
        theirs = None if reason or image is None else stack.enter_context(image_of(image, repository))
        stack.enter_context(_own_cache(folder / "cache"))  # cleared before the image goes that its images are made of
        grading.official()  # takes a second, once in a process
        parsing.warm_up()
        benches: dict[str, Bench] = {}
        for name in wanted:
            try:
                benches[name] = Bench(name, _on(name, row, theirs, repository), folder)
                stack.callback(benches[name].close)
            except SandboxError as error:
                notes.append(f"`{name}` was not measured: {error}")
        if not benches:
            raise SystemExit("\n".join(notes))
        harness = exec_ = None
        if theirs is not None:
            (task,) = open_tasks(Path(next(iter(benches.values())).arguments["dataset"]))
            harness = stack.enter_context(contextlib.closing(Harness(task, folder)))
            exec_ = stack.enter_context(contextlib.closing(Exec(theirs)))
        else:
            notes.append(f"Docker and the official harness were not measured: {reason}.")
        beside = Beside()
        spent = dict.fromkeys(benches, 0.0)
        for number in range(max(repeats, few)):
            try:
                for name, bench in benches.items():
                    began = time.perf_counter()
                    if number == 0 or (number < few and spent[name] < seconds):
                        bench.prepare()
                        bench.resets_elsewhere()
                        patch = bench.verdict()
                    if number == 0 or spent[name] < seconds:
                        bench.resets()
                        bench.steps()
                        bench.snapshots()
                    spent[name] += time.perf_counter() - began
                if harness is not None and number < few:
                    harness.verdict(patch)
                if exec_ is not None:
                    exec_.one()
                beside.look()
            except KeyboardInterrupt:
                if number == 0:  # not everything was measured once
                    raise
                notes.append(f"It was interrupted in repetition {number + 1}.")
                break
        rows = {name: bench.row for name, bench in benches.items()}
        return [
            *tables(rows, exec_.times if exec_ else None, harness.times if harness else None),
            *limits(rows),
            *notes,
            str(beside),
        ]


def _on(backend: str, row: dict[str, Any], image: str | None, repository: Path) -> dict[str, Any]:
    """Convert the row to one that a backend can play."""
    if backend == "copy":
        return {**row, "image": f"dir:{repository.parent}"}
    if image is not None:
        return {**row, "image": image}
    if backend == "docker":
        raise SandboxError("no image was given")
    return {**row, "image": HOST, "history": _git(repository, "fast-export", "--all")}


@contextlib.contextmanager
def _own_cache(folder: Path) -> Iterator[None]:
    """Use a cache of this run alone, so that preparation begins with nothing."""
    name = "SANDBOXGYM_CACHE"
    before = os.environ.get(name)
    os.environ[name] = os.fspath(folder)
    try:
        yield
    finally:
        forget_prepared()
        prepared.clear()
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
        if folder.exists():
            run_directories.remove_tree(folder)


def tables(rows: dict[str, SWEBenchRow], exec_: Times | None, harness: Times | None) -> list[str]:
    """Make the tables of all measurements."""
    lines = [
        "### Steps",
        "",
        "| ms, min / p50 / p95 | n | the command alone | as a step | p50 / p50 |",
        "|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        for what, command, step in (
            ("`true`", row.execute, row.step),
            ("a file of the repository is written", row.execute_writing, row.step_writing),
        ):
            ratio = f"{step.median / command.median:.1f}"
            lines.append(f"| {name}: {what} | {len(step.seconds)} | {command} | {step} | {ratio} |")
    if exec_ is not None:
        lines.append(f"| `docker exec` of `bash -c true` | {len(exec_.seconds)} | {exec_} | | |")
    lines += [
        "",
        "### Preparing and resets",
        "",
        "| ms, min / p50 / p95 | n | prepared from nothing | kept | reset | and the first step | reset, new process | "
        "of it processor time | and the first step |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        times = f"{len(row.prepare.seconds)}, {len(row.reset.seconds)}"
        lines.append(
            f"| {name} | {times} | {row.prepare} | {nbytes_text(row.nbytes)} | {row.reset} | {row.begin} | "
            f"{row.reset_new} | {row.busy} | {row.begin_new} |"
        )
    lines += ["", "### Snapshots", "", "| ms, min / p50 / p95 | n | snapshot | restore | fork |"]
    lines.append("|---|---|---|---|---|")
    for name, row in rows.items():
        lines.append(f"| {name} | {len(row.fork.seconds)} | {row.snapshot} | {row.restore} | {row.fork} |")
    lines += ["", "### Verdicts on the solution", "", "| ms, min / p50 / p95 | n | verdict | harness p50 / p50 |"]
    lines.append("|---|---|---|---|")
    for name, row in rows.items():
        ratio = f"{harness.median / row.verdict.median:.1f}" if harness is not None else ""
        lines.append(f"| {name} | {len(row.verdict.seconds)} | {row.verdict} | {ratio} |")
    if harness is not None:
        lines.append(f"| the official harness | {len(harness.seconds)} | {harness} | |")
    return [*lines, ""]


def limits(rows: dict[str, SWEBenchRow]) -> list[str]:
    """Make the table of limits and measurements."""
    head = "| at the median | at most | " + " | ".join(rows) + " |"
    lines = ["### What it may take", "", head, "|---|---|" + "---|" * len(rows)]
    ratios = [row.step.median / row.execute.median for row in rows.values()]
    lines.append(f"| a step of `true`, in commands | {STEP:g} | {_told(ratios, STEP, '{:.1f}')} |")
    for what, times in (
        ("a reset to a prepared row, ms", [row.reset for row in rows.values()]),
        ("the same in a new process, ms", [row.reset_new for row in rows.values()]),
        ("of that its processor time, ms", [row.busy for row in rows.values()]),
    ):
        taken = [one.median * 1e3 for one in times]
        lines.append(f"| {what} | {RESET * 1e3:.0f} | {_told(taken, RESET * 1e3, '{:.0f}')} |")
    return [*lines, ""]


def _told(values: Sequence[float], most: float, form: str) -> str:
    return " | ".join(form.format(value) + ("" if value <= most else ", more") for value in values)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line: measure, print, and write the page if asked to."""
    parser = argparse.ArgumentParser(
        prog="sandboxgym bench swebench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=6000, help="number of files in the repository (default: 6000)")
    parser.add_argument(
        "--repeats", type=int, default=30, help="repetitions of steps, resets and snapshots (default: 30)"
    )
    parser.add_argument("--few", type=int, default=5, help="repetitions of measurements that take seconds (default: 5)")
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="time after which a backend makes no more repetitions"
    )
    parser.add_argument("--image", help="base of the task's image; without it Docker and the harness are left out")
    parser.add_argument("--backends", nargs="+", default=BACKENDS, choices=backends.NAMES, metavar="BACKEND")
    parser.add_argument("--write", metavar="FILE", help="file to write the page to")
    arguments = parser.parse_args(argv)
    if min(arguments.files, arguments.repeats, arguments.few) < 1:
        parser.error("--files, --repeats and --few: expected at least 1")
    load = os.getloadavg()[0]
    found = measure(
        arguments.backends,
        arguments.files,
        arguments.image,
        repeats=arguments.repeats,
        few=arguments.few,
        seconds=arguments.seconds,
    )
    lines = [
        *result_page.head("SWE-bench: steps, resets, snapshots and verdicts on a large repository", "swebench", argv),
        f"{result_page.machine()}; load {load:.1f} at the start. {arguments.files:,} files of code, "
        f"{COMMITS + 1} commits. "
        "n is the number of measurements; where it has two numbers, the first is for preparing and for resets in new "
        "processes, the second for resets in this process. Snapshot, restore and fork are timed until the next step, "
        '`true`, has ended. "p50 / p50" is the ratio of two medians. Compare within this page only.',
        "",
        *found,
    ]
    result_page.publish(lines, arguments.write)


if __name__ == "__main__":
    main()
