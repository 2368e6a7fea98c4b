"""``sandboxgym swebench prepare|images|check``: prepare SWE-bench rows for training.

1. ``prepare`` puts rows into the cache of prepared tasks; existing entries are verified and kept.
2. ``images`` reports which images are on this machine, and gets those that are missing.
3. ``check`` grades the solution and an empty change, and records the results for environments; with ``--report`` it
   runs nothing and prints the records.

A row that fails does not stop the others: all failures are listed at the end, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sandboxgym.cli import FAILED, OK, CommandError
from sandboxgym.cli.support.printing import harmless, nbytes_text
from sandboxgym.cli.support.progress import progress
from sandboxgym.cli.support.swebench_jobs import EvaluationJob, JobAnswer, carry_out
from sandboxgym.envs.swebench.rows import check_record
from sandboxgym.envs.swebench.rows.tasks import HOST, DataNotFound, Task, TaskError, TaskNotFound, open_tasks
from sandboxgym.sandbox import backends
from sandboxgym.sandbox.agent import arguments
from sandboxgym.sandbox.base import SandboxError, SandboxUnavailable
from sandboxgym.system import interpreter


def main(argv: Sequence[str]) -> int:
    """Run ``sandboxgym swebench``; returns the exit status."""
    options = _parser().parse_args(argv)
    if getattr(options, "jobs", 1) < 1 or getattr(options, "repeat", 1) < 1:
        raise CommandError("--jobs and --repeat: expected at least 1", status=2)
    if getattr(options, "report", False):
        return _print_recorded(options)
    try:
        arguments.seconds("--timeout", getattr(options, "timeout", 1.0))
        arguments.image(getattr(options, "image", None))
    except ValueError as error:
        raise CommandError(harmless(str(error)), status=2) from error
    try:
        tasks = _tasks(options)
    except (TaskNotFound, TaskError, DataNotFound, TypeError, ImportError) as error:
        raise CommandError(harmless(str(error))) from error
    command = {"prepare": _prepare, "images": _images, "check": _check}[options.command]
    return command(options, tasks)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sandboxgym swebench", description="Get SWE-bench rows ready to be played.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    rows = argparse.ArgumentParser(add_help=False)
    rows.add_argument("rows", nargs="*", metavar="ROW", help="instance ids, or unique endings of them; default: all")
    rows.add_argument("--dataset", default="mini", help="mini, verified, lite, full, or a file (default: mini)")
    rows.add_argument("--image", help="image for rows that run on this machine's tool chain")
    boxes = argparse.ArgumentParser(add_help=False)
    boxes.add_argument("--backend", default="auto", choices=("auto", *backends.names()))
    boxes.add_argument("--jobs", type=int, default=1, metavar="N", help="parallel rows (default: 1)")
    boxes.add_argument("--network", action="store_true", help="allow the network, as network=True does")
    boxes.add_argument("--allow-unsafe", action="store_true", help="permit a backend that isolates nothing")
    commands.add_parser("prepare", parents=[rows, boxes], help="put rows into the cache of prepared tasks")
    images = commands.add_parser("images", parents=[rows], help="list images: present, their size, missing")
    images.add_argument("--json", action="store_true", help="print JSON, for programs")
    get = images.add_mutually_exclusive_group()
    get.add_argument("--pull", action="store_true", help="pull missing images from their registries")
    get.add_argument(
        "--build",
        metavar="TASK_REPO",
        help="build missing images with the official builder, from a repository of tasks: a directory or OWNER/NAME",
    )
    get.add_argument(
        "--fleet",
        metavar="ADDRESS",
        help="bring images to all nodes of a Ray cluster instead (auto: one that runs here), each layer from its "
        "registry once",
    )
    images.add_argument("--jobs", type=int, default=1, metavar="N", help="parallel builds (default: 1)")
    check = commands.add_parser(
        "check", parents=[rows, boxes], help="grade the solution and an empty change, and record the results"
    )
    check.add_argument(
        "--repeat", type=int, default=1, metavar="N", help="runs per row, to find flaky ones (default: 1)"
    )
    check.add_argument("--timeout", type=float, default=1800.0, metavar="SECONDS", help="time limit of the tests")
    check.add_argument("--missing", action="store_true", help="only rows without a record")
    check.add_argument(
        "--report", action="store_true", help="run nothing: print a table of the records, for all rows or these"
    )
    check.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help=f"default: ${check_record.VARIABLE}, else a file beside the data sets",
    )
    return parser


def _tasks(options: argparse.Namespace) -> list[Task]:
    found = list(open_tasks(options.dataset, instances=options.rows or None))
    return list({task.instance_id: task for task in found}.values())


def _job(options: argparse.Namespace, work: str, **more: Any) -> EvaluationJob:
    return EvaluationJob(
        work,
        options.dataset if not os.path.exists(options.dataset) else os.path.abspath(options.dataset),
        options.backend,
        options.image,
        options.network,
        options.allow_unsafe,
        **more,
    )


def _answers(job: EvaluationJob, rows: Sequence[str], jobs: int) -> Iterator[JobAnswer]:
    """Yield answers with a progress bar; failures come at the end, on standard output like the rest."""
    bar = progress(unit="rows")
    bar.start(job.work, 0, len(rows))
    try:
        with contextlib.closing(carry_out(job, rows, jobs=jobs)) as answers:  # type: ignore[type-var]
            for answer in answers:
                yield answer
                bar.advance(1)
    finally:
        bar.finish()


def _prepare(options: argparse.Namespace, tasks: list[Task]) -> int:
    from sandboxgym.envs.swebench.workspaces import prepared

    if not prepared.limit():
        raise CommandError(f"{prepared.VARIABLE}=0 is set: nothing is kept on disk")
    failed: list[JobAnswer] = []
    made = already = 0
    began = time.monotonic()
    for answer in _answers(_job(options, "prepare"), [task.instance_id for task in tasks], options.jobs):
        if answer.error:
            failed.append(answer)
            continue
        already += answer.result["already"]
        made += not answer.result["already"]
        state = "was there" if answer.result["already"] else "prepared"
        print(harmless(f"{answer.instance_id}: {state} ({nbytes_text(answer.result['nbytes'])})"), flush=True)
        for note in answer.notes:
            print(harmless(f"  {note}"))
    entries = prepared.listed()
    held = f"{nbytes_text(sum(entry.nbytes for entry in entries))} of {nbytes_text(prepared.limit())}"
    print(f"{made} prepared, {already} were there, {len(failed)} failed, in {time.monotonic() - began:.0f} s")
    print(f"{prepared.directory()}: {len(entries)} rows, {held}")
    return _report(failed)


def _report(failed: list[JobAnswer]) -> int:
    for answer in failed:
        print(harmless(f"failed: {answer.instance_id}: {answer.error}"))
    return FAILED if failed else OK


def _recorded(options: argparse.Namespace) -> tuple[Path, dict[str, check_record.RowCheck]]:
    path = options.record or check_record.default_path()
    try:
        return path, check_record.read(path)
    except (check_record.RecordError, OSError) as error:
        raise CommandError(harmless(str(error))) from error


def _print_recorded(options: argparse.Namespace) -> int:
    path, known = _recorded(options)
    wanted = options.rows or list(known)
    found = [check for name, check in known.items() if any(name.endswith(row) for row in wanted)]
    missing = [row for row in wanted if not any(name.endswith(row) for name in known)]
    if found:
        print("\n".join(harmless(line) for line in report(found)))
    else:
        print(harmless(f"nothing is recorded in {path}"))
    for row in missing:
        print(harmless(f"not recorded: {row}"))
    return FAILED if missing else OK


def report(checks: Sequence[check_record.RowCheck]) -> list[str]:
    """Records of rows in Markdown: a table, and a list of rows for each known property."""
    lines = [
        "| row | the solution | no change | seconds | backend | image | checked |",
        "|---|---|---|---|---|---|---|",
    ]
    for check in checks:
        solution = ", ".join(dict.fromkeys(check.gold))
        facts = [fact for fact, holds in _facts(check).items() if holds]
        cells = (
            *(check.instance_id, "; ".join([solution, *facts]), ", ".join(dict.fromkeys(check.empty))),
            *(f"{check.seconds:.1f}", f"{check.backend}{', network' if check.network else ''}"),
            *(f"{check.image} ({check.image_id.removeprefix('sha256:'):.12})", f"{check.date}, {check.version}"),
        )
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    seconds = [check.seconds for check in checks]
    lines += [
        "",
        f"{len(checks)} rows; the tests of a solution take {statistics.median(seconds):.1f} s at the median, "
        f"{max(seconds):.1f} s at most, {sum(seconds):.0f} s together.",
        "",
    ]
    for fact in _facts(checks[0]):
        known = [check.instance_id for check in checks if _facts(check)[fact]]
        lines.append(f"- {fact}: {', '.join(known) or 'none'}")
    return lines


def _facts(check: check_record.RowCheck) -> dict[str, bool]:
    """Known properties of a row, by their description."""
    return {
        "needs network": check.needs_network,
        "flaky": check.flaky,
        "infra failure": check.broken,
        "no change resolves": check.empty_resolves,
    }


def _check(options: argparse.Namespace, tasks: list[Task]) -> int:
    path, known = _recorded(options)
    if options.missing:
        of = {name: check.task for name, check in known.items() if options.backend in ("auto", check.backend)}
        tasks = [task for task in tasks if of.get(task.instance_id) != task.digest]
    failed: list[JobAnswer] = []
    job = _job(options, "check", repeat=options.repeat, timeout=options.timeout)
    for answer in _answers(job, [task.instance_id for task in tasks], options.jobs):
        if answer.error:
            failed.append(answer)
            continue
        content = {**answer.result, "gold": tuple(answer.result["gold"]), "empty": tuple(answer.result["empty"])}
        seen = check_record.RowCheck(**content)
        try:
            check_record.write(path, [seen])
        except (check_record.RecordError, OSError) as error:
            raise CommandError(harmless(f"nothing can be recorded: {error}")) from error
        print(harmless(f"{seen.instance_id}: {_told(seen)}"), flush=True)
    print(f"{len(tasks) - len(failed)} checked, {len(failed)} failed; recorded in {path}")
    return _report(failed)


def _told(seen: check_record.RowCheck) -> str:
    if seen.needs_network:
        gold = "the solution needs the network"
    else:
        gold = "the solution resolves" if seen.resolves else f"the solution does not resolve ({', '.join(seen.gold)})"
    found = [gold, "no change resolves, too" if seen.empty_resolves else "no change does not"]
    if seen.flaky:
        found.append("flaky")
    if seen.note:
        found.append(seen.note)
    return f"{'; '.join(found)} ({seen.seconds:.1f} s)"


# Images.


@dataclass(frozen=True, slots=True)
class ImageState:
    """State of a row's image on this machine."""

    instance_id: str
    image: str
    present: bool
    nbytes: int | None = None
    """Size in bytes, including layers shared with others; None if unknown."""
    error: str = ""


def _images(options: argparse.Namespace, tasks: list[Task]) -> int:
    named = {task.instance_id: _image_of(options, task) for task in tasks}
    if options.fleet is not None:
        return _to_nodes(options.fleet, sorted({image for image in named.values() if _is_docker(image)}))
    states = _states(named)
    wanted = {state.image for state in states if not state.present and not state.error and _is_docker(state.image)}
    if wanted and options.pull:
        refused = _pull(sorted(wanted))
        states = [
            replace(state, error=refused.get(state.image, state.error)) if not state.present else state
            for state in _states(named)
        ]
    elif wanted and options.build:
        missing = [state.instance_id for state in states if state.image in wanted]
        errors = _build(options.build, missing, jobs=options.jobs)
        states = [
            state if state.present or state.error else replace(state, error=errors(state)) for state in _states(named)
        ]
    if options.json:
        print(json.dumps([asdict(state) for state in states], indent=1))
    else:
        _print_table(states)
    return OK if all(state.present for state in states) else FAILED


def _to_nodes(address: str, images: Sequence[str]) -> int:
    """Bring images to all nodes of a cluster, and print how much of them each has then."""
    from gymnasium.error import DependencyNotInstalled

    from sandboxgym.workers.env_host import FleetError
    from sandboxgym.workers.nodes.cluster import connect
    from sandboxgym.workers.nodes.images import FleetImages

    try:
        connect(address)
        with contextlib.closing(FleetImages()) as fleet:
            fleet.prefetch(images)
            there = fleet.holders(images)
    except (FleetError, SandboxError, DependencyNotInstalled) as error:
        raise CommandError(harmless(str(error))) from error
    for node, nbytes in there.items():
        print(f"node {node[:8]}: images {len(images)}, {nbytes_text(nbytes)}")
    return OK


def _image_of(options: argparse.Namespace, task: Task) -> str:
    return options.image if options.image is not None and task.image == HOST else task.image


def _is_docker(image: str) -> bool:
    return image != HOST and not image.startswith("dir:")


def _states(named: dict[str, str]) -> list[ImageState]:
    """State of each row's image; each image is asked for once."""
    found: dict[str, ImageState] = {}
    with contextlib.ExitStack() as stack:
        client = None
        for image in dict.fromkeys(named.values()):
            if image == HOST:
                found[image] = ImageState("", image, True)
            elif image.startswith("dir:"):
                there = os.path.isdir(image.removeprefix("dir:"))
                found[image] = ImageState("", image, there, error="" if there else "there is no such directory")
            else:
                if client is None:
                    client = stack.enter_context(_client())
                found[image] = _state(client, image)
    return [
        ImageState(name, image, found[image].present, found[image].nbytes, found[image].error)
        for name, image in named.items()
    ]


@contextlib.contextmanager
def _client() -> Iterator[Any]:
    from sandboxgym.sandbox.docker.client import connect

    try:
        client = connect(timeout=600.0)
    except SandboxError as error:
        raise CommandError(str(error)) from error
    with contextlib.closing(client):
        yield client


def _state(client: Any, image: str) -> ImageState:
    import docker.errors

    from sandboxgym.sandbox.docker.client import daemon_errors

    try:
        with daemon_errors():
            return ImageState("", image, True, int(client.api.inspect_image(image)["Size"]))
    except SandboxUnavailable as error:
        if isinstance(error.__cause__, docker.errors.ImageNotFound):
            return ImageState("", image, False)
        return ImageState("", image, False, error=str(error))


def _pull(images: Sequence[str]) -> dict[str, str]:
    """Pull images one after the other; returns the errors. The daemon resumes interrupted pulls."""
    errors = {}
    with _client() as client:
        for image in images:
            try:
                _pull_one(client, image)
            except SandboxError as error:
                errors[image] = " ".join(str(error).split())
    return errors


def _pull_one(client: Any, image: str) -> None:
    from docker.utils import parse_repository_tag

    from sandboxgym.sandbox.docker.client import daemon_errors

    repository, tag = parse_repository_tag(image)
    bar = progress()
    layers: dict[str, tuple[int, int]] = {}
    shown = 0
    try:
        with daemon_errors():
            bar.start(f"pulling {harmless(image)}", 0, None)
            for event in client.api.pull(repository, tag=tag or "latest", stream=True, decode=True):
                if event.get("error"):
                    raise SandboxUnavailable(f"it cannot be pulled: {event['error']}")
                detail = event.get("progressDetail") or {}
                if event.get("status") == "Downloading" and "current" in detail:
                    layers[event.get("id", "")] = detail["current"], detail.get("total", 0)
                    done = sum(current for current, _ in layers.values())
                    bar.advance(max(0, done - shown))
                    shown = max(shown, done)
    finally:
        bar.finish()


class _BuildErrors:
    """Reasons why the builder made no image of a row.

    Args:
        said: message of the builder as a whole.
        logs: logs by image.
    """

    def __init__(self, said: str, logs: dict[str, str]) -> None:
        self._said, self._logs = said, logs

    def __call__(self, state: ImageState) -> str:
        return self._logs.get(_file_name(state.image)) or self._said or "the builder made no image of this name"


def _file_name(image: str) -> str:
    return image.lower().replace(":", "__")


def _build(task_repo: str, rows: Sequence[str], *, jobs: int) -> _BuildErrors:
    """Build images with the official builder, under the harness's names; existing ones are skipped."""
    why = (
        subprocess.run(["docker", "buildx", "version"], capture_output=True, text=True)
        if shutil.which("docker")
        else None
    )
    if why is None or why.returncode:
        raise CommandError(
            "--build: the official builder calls `docker buildx build`, and there is no `docker buildx` here"
        )
    repository = os.path.abspath(task_repo) if os.path.isdir(task_repo) else task_repo
    arguments = ["images", "build", repository, "--namespace", "swebench", "--workers", str(jobs)]
    arguments += [word for row in rows for word in ("--instance", row)]
    command = interpreter.command("from swebench.cli.cli import main\nmain()", *arguments)
    with tempfile.TemporaryDirectory(prefix="sandboxgym-build-") as folder:  # it logs into the working directory
        top = Path(folder, "logs", "image_builder")
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            process = subprocess.Popen(
                command, cwd=folder, env=interpreter.environment(), stdout=output, stderr=subprocess.STDOUT, text=True
            )
            with _ended(process):
                bar = progress(unit="images")
                bar.start("build", 0, len(rows))
                try:
                    done = 0
                    while process.poll() is None:
                        with contextlib.suppress(subprocess.TimeoutExpired):
                            process.wait(0.5)
                        ended = sum(_BUILT in log or _NOT_BUILT in log for log in _build_logs(top).values())
                        bar.advance(ended - done)
                        done = ended
                finally:
                    bar.finish()
            output.seek(0)
            said = _last_line(output.read(), of="error") if process.returncode else ""
        logs = {name: _why_not_built(log) for name, log in _build_logs(top).items()}
    return _BuildErrors(f"the official builder failed: {said}" if said else "", logs)


_BUILT, _NOT_BUILT = "Image built successfully", "failed with exit code"
"""Last line of the official builder's log of an image."""


def _build_logs(top: Path) -> dict[str, str]:
    """Logs of the official builder so far, by the image's `_file_name`."""
    return {
        os.fspath(path.parent.relative_to(top)): path.read_text(encoding="utf-8", errors="replace")
        for path in top.rglob("build_image.log")
    }


def _why_not_built(log: str) -> str:
    """Last message of docker, above the builder's own "failed with exit code"."""
    return _last_line("\n".join(line for line in log.splitlines() if _NOT_BUILT not in line))


@contextlib.contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """End a child with the block; an interruption at the terminal reaches the child as well, so wait for it."""
    try:
        yield
    finally:
        if process.poll() is None:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait()


def _last_line(text: str, *, of: str = "") -> str:
    """The last line that contains a word, or else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if of in line.lower()), lines[-1] if lines else "")


def _print_table(states: Sequence[ImageState]) -> None:
    wide = max(len(state.instance_id) for state in states)
    for state in states:
        size = "" if state.nbytes is None else nbytes_text(state.nbytes)
        print(
            harmless(
                f"{state.instance_id:<{wide}}  {'present' if state.present else 'missing'}  {size:>7}  {state.image}"
            )
        )
        if state.error:
            print(harmless(f"  {state.error}"))
    images = {state.image: state for state in states}.values()
    here = [state for state in images if state.present]
    print(
        f"{len(here)} of {len(images)} images are here ({nbytes_text(sum(state.nbytes or 0 for state in here))}, what "
        "they share counted for each)"
    )
    if any(not state.present and _is_docker(state.image) for state in images):
        print("--pull gets what is missing from its registry, --build TASK_REPO makes it with the official builder")
