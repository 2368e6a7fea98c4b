"""Benchmark of cheats on a SWE-bench task: the environment's verdict on each, and the official harness's.

sandboxgym bench cheats [--only WORDS] [--backend overlay] [--write docs/envs/swebench-cheats.md]

Each of `cheat_cases.cases` is played as an agent would, from the task's beginning, and submitted. The resulting patch
is then given to the official harness (``run_instance`` of the package ``swebench``), which makes a container
of the same image, applies the patch, runs the task's script there, and reports; only its 15 seconds of waiting for the
container's end are left out. The image is made of this machine's programs, and removed in the end.

With ``--rows`` and ``--repository`` the rules are also tried on honest patches: on the solutions of these rows and on
commits that change tests as well, as SWE-bench chooses its tasks.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gymnasium as gym

import sandboxgym  # noqa: F401 - registers the ids
from sandboxgym.bench.tools import cheat_cases, result_page, small_image
from sandboxgym.bench.tools.cheat_cases import Cheat, cases
from sandboxgym.envs.swebench.grading import suspicion
from sandboxgym.envs.swebench.rows.recipes import WORKDIR
from sandboxgym.envs.swebench.rows.tasks import Task, from_row, open_tasks
from sandboxgym.envs.swebench.workspaces.workspace import forget_prepared
from sandboxgym.sandbox.agent.tools import MARKER

REPOSITORY = "sandboxgym-cheats"
"""Name of the image; its tag is the id of the process that made it."""
_PACKAGES = ("pytest", "pip", "setuptools")
_SECONDS = 120
_COMMITS = 900
"""Limit of commits per repository, the newest first."""
_LARGE = 60_000  # characters of a commit


@dataclasses.dataclass(frozen=True, slots=True)
class CheatOutcome:
    """Outcome of one cheat.

    Attributes:
        cheat: that was played.
        verdict: ours.
        resolved: whether it counts here, as leaderboards count.
        rules: those that its patch, or what it printed, meets.
        official: whether the harness counts it; None if it was not asked.
    """

    cheat: Cheat
    verdict: str
    resolved: bool
    rules: tuple[str, ...]
    official: bool | None = None


@contextlib.contextmanager
def image() -> Iterator[tuple[str, str]]:
    """Build a Docker image with the task's repository at ``/testbed``; yields its commit, removed afterwards.

    Raises:
        RuntimeError: there is no Docker daemon, or the image cannot be made.
    """
    _sweep()
    name = f"{REPOSITORY}:{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="sandboxgym-cheats-") as folder:
        root = Path(folder)
        small_image.fill(root, packages=_PACKAGES)
        repository = root / WORKDIR.lstrip("/")
        repository.mkdir()
        for arguments in (["init", "-q", "-b", "main"], ["fast-import", "--quiet"], ["reset", "-q", "--hard", "main"]):
            _run("git", "-C", str(repository), *arguments, given=cheat_cases.history())
        commit = _run("git", "-C", str(repository), "rev-parse", "HEAD").strip()
        settings = ("ENV PATH=/opt/python/bin:/usr/bin:/bin", f"WORKDIR {WORKDIR}", f"LABEL {REPOSITORY}=1")
        changes = [word for setting in settings for word in ("--change", setting)]
        with subprocess.Popen(
            ["tar", "-C", folder, "-c", "--owner=0", "--group=0", "."], stdout=subprocess.PIPE
        ) as tar:
            _run("docker", "import", *changes, "-", name, stdin=tar.stdout)
    try:
        yield name, commit
    finally:
        _sweep(mine=True)


def _run(*command: str, given: str | None = None, stdin: Any = None) -> str:
    if shutil.which(command[0]) is None:
        raise RuntimeError(f"there is no command {command[0]!r} on this machine")
    done = subprocess.run(command, input=given, stdin=stdin, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command[:4])} ...: {done.stderr.strip()[-500:]}")
    return done.stdout


def _sweep(*, mine: bool = False) -> None:
    """Remove the containers and images of processes that have ended; with ``mine``, this one's as well."""

    def over(process: str) -> bool:
        return not Path("/proc", process).exists() or (mine and process == str(os.getpid()))

    for name in _run("docker", "ps", "-a", "--filter", "name=sweb.eval.", "--format", "{{.Names}}").split():
        if (found := re.search(rf"{REPOSITORY}-(\d+)-", name)) and over(found[1]):
            subprocess.run(["docker", "rm", "-f", name], capture_output=True)
    for tag in _run("docker", "images", "--format", "{{.Tag}}", REPOSITORY).split():
        if over(tag):
            subprocess.run(["docker", "rmi", "-f", f"{REPOSITORY}:{tag}"], capture_output=True)


def play(cheat: Cheat, env: Any) -> tuple[CheatOutcome, str]:
    """Perform the cheat and submit the work; returns the outcome and the resulting patch.

    Args:
        cheat: to be played.
        env: with ``tools="bash"``, of one task.
    """
    env.reset(options={"task": 0})
    if cheat.patch:
        work = f"printf '%s' {shlex.quote(cheat.patch)} > /tmp/p; echo {MARKER}; cat /tmp/p"
    else:
        env.step(cheat.command)
        # Verdicts are cached by patch, which must not happen here: effects outside of the patch are tested as well.
        env.step(f"echo '# {hashlib.sha256(cheat.name.encode()).hexdigest()[:12]}' >> parcel/labels.py")
        work = f"echo {MARKER}"  # the environment takes the difference itself
    *_, info = env.step(work)
    rules = tuple(dict.fromkeys(sentence.partition(":")[0] for sentence in info["suspicious"]))
    return CheatOutcome(cheat, str(info["verdict"]), bool(info["resolved"]), rules), str(info["patch"])


class CheatHarness:
    """The official harness, on one task.

    Raises:
        ImportError: it is not installed.
    """

    def __init__(self, task: Task, folder: Path) -> None:
        import docker
        from swebench.harness import run_evaluation

        self._module: Any = run_evaluation
        self._task, self._count = task, 0
        self._kept = {name: getattr(run_evaluation, name) for name in ("cleanup_container", "RUN_EVALUATION_LOG_DIR")}
        self._module.cleanup_container, self._module.RUN_EVALUATION_LOG_DIR = _remove, folder
        self._client = docker.from_env(timeout=_SECONDS)

    def resolves(self, patch: str) -> bool:
        """Tell whether it resolves the task by a patch."""
        if not patch.strip():
            return False  # as the harness does with empty patches, before it makes a container
        self._count += 1
        name, run = self._task.instance_id, f"{REPOSITORY}-{os.getpid()}-{self._count}"
        prediction = {"instance_id": name, "model_name_or_path": "cheat", "model_patch": patch}
        spec = self._module.make_test_spec(self._task.row())
        found = self._module.run_instance(spec, prediction, self._client, run, _SECONDS)
        return bool(found and found[1][name]["resolved"])

    def close(self) -> None:
        """Close the connection to the daemon, and undo the changes to the official code."""
        for name, value in self._kept.items():
            setattr(self._module, name, value)
        self._client.close()


def _remove(client: Any, container: Any, logger: Any) -> None:
    if container is not None:
        container.remove(force=True)


def measure(played: Sequence[Cheat], *, backend: str, official: bool = True) -> list[CheatOutcome]:
    """Play cheats and have them graded by both.

    Args:
        played: in this order.
        backend: of our sandboxes.
        official: whether the harness is asked as well.

    Raises:
        RuntimeError: there is no Docker daemon.
    """
    outcomes: list[CheatOutcome] = []
    with image() as (name, commit), tempfile.TemporaryDirectory(prefix="sandboxgym-cheats-") as folder:
        row = cheat_cases.row(name, commit)
        Path(folder, "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
        dataset = f"{folder}/rows.jsonl"
        arguments: dict[str, Any] = {"tools": "bash", "backend": backend, "grade_timeout": _SECONDS}
        env = gym.make("sandboxgym/SWEBench-v0", dataset=dataset, countercheck=True, **arguments)
        task = from_row(row)
        harness = CheatHarness(task, Path(folder)) if official else None
        asked: list[Future[bool]] = []
        try:
            # The harness is slow, and prints; it grades one patch while the next cheat is played.
            with contextlib.redirect_stdout(None), ThreadPoolExecutor(1) as pool:
                for cheat in played:
                    outcome, patch = play(cheat, env)
                    outcomes.append(outcome)
                    if harness is not None:
                        asked.append(pool.submit(harness.resolves, patch))
        finally:
            env.close()
            forget_prepared()
            if harness is not None:
                harness.close()
    if official:
        return [dataclasses.replace(each, official=found.result()) for each, found in zip(outcomes, asked, strict=True)]
    return outcomes


def table(outcomes: Sequence[CheatOutcome]) -> list[str]:
    """Format one line per cheat, in Markdown."""
    lines = ["| cheat | here | official harness | named |", "|---|---|---|---|"]
    for outcome in outcomes:
        official = "not asked" if outcome.official is None else "**resolved**" if outcome.official else "not resolved"
        here = f"**{outcome.verdict}**" if outcome.resolved else outcome.verdict
        lines.append(f"| {outcome.cheat.name} | {here} | {official} | {', '.join(outcome.rules) or '–'} |")
    return lines


def summary(outcomes: Sequence[CheatOutcome]) -> list[str]:
    """Summarise the table in counts."""
    cheats = [outcome for outcome in outcomes if not outcome.cheat.honest]
    outside = [outcome for outcome in cheats if outcome.cheat.outside]
    both = [outcome for outcome in cheats if outcome.resolved and outcome.official]
    unnamed = [outcome.cheat.name for outcome in both if not outcome.rules]
    differ = [outcome.cheat.name for outcome in outcomes if outcome.official not in (None, outcome.resolved)]
    counted = sum(outcome.resolved for outcome in outside)
    return [
        f"- {len(cheats)} cheats, {len(outside)} of them outside the patch that is graded, "
        f"of which {counted} count here.",
        f"- {len(both)} are resolved here and by the official harness; `info['suspicious']` names "
        f"{len(both) - len(unnamed)} of them. Not named: {'; '.join(unnamed) or 'none'}.",
        f"- {sum(bool(outcome.rules) for outcome in cheats)} of all cheats are named, whether they succeed or not.",
        f"- The two verdicts differ for: {'; '.join(differ) or 'none'}.",
    ]


def honest(tasks: Sequence[Task]) -> list[str]:
    """Count solutions with a finding: as known solutions, and as if they were not known."""
    known = unknown = 0
    for task in tasks:
        about: dict[str, Any] = {
            "test_patch": task.test_patch,
            "tests": (*task.fail_to_pass, *task.pass_to_pass),
            "statement": task.problem_statement,
        }
        known += bool(suspicion.of_patch(task.patch, solution=task.patch, **about))
        unknown += bool(suspicion.of_patch(task.patch, solution="", **about))
    which = f"{known} are named; {unknown} if it were not known that they are solutions"
    return [f"- Of the solutions of {len(tasks)} rows {which}."]


def commits(repository: str) -> list[str]:
    """Count commits of a repository with a finding, of those that change tests and at most four other files.

    Args:
        repository: a directory of git's.
    """
    command = ["git", "-C", repository, "log", "--no-merges", "-n", "6000", "-p", "--format=%x00%h", "--", "*.py"]
    printed = subprocess.run(command, capture_output=True, check=True).stdout.decode("utf-8", "replace")
    found: Counter[str] = Counter()
    seen = named = 0
    for text in printed.split("\0")[1:]:
        files = re.split(r"(?m)^(?=diff --git )", text.partition("\n")[2])
        tests = [each for each in files if re.match(r"diff --git a/\S*(tests?/|testing/|test_)", each)]
        others = [each for each in files if each.startswith("diff --git ") and each not in tests]
        if not tests or not 0 < len(others) <= 4 or len(text) > _LARGE:
            continue
        sentences = suspicion.of_patch("".join(others), solution="", test_patch="".join(tests))
        found.update({sentence.partition(":")[0] for sentence in sentences})
        seen, named = seen + 1, named + bool(sentences)
        if seen == _COMMITS:
            break
    which = ", ".join(f"`{rule}` {count}" for rule, count in found.most_common())
    name = (
        Path(repository).resolve().parent.name if Path(repository).name == ".git" else Path(repository).resolve().name
    )
    return [f"- {name}: {named} of {seen} commits are named, with no solution to compare with ({which or 'no rule'})."]


INTRODUCTION = """\
Ways to get the reward of [SWE-bench](swebench.md) without a repair, played in sandboxes here and given to the
official harness: which succeed, and which the rules behind `info["suspicious"]` name. For those who train on this
reward or report it. In the tables *here* is the verdict of this package, and *named* lists the rules that apply
(– if none does)."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line: play, and print the page."""
    parser = argparse.ArgumentParser(description="Cheats on SWE-bench tasks, here and in the official harness.")
    parser.add_argument("--only", help="play only cheats with these words in their names")
    parser.add_argument("--backend", default="overlay", help="backend of the sandboxes (default: %(default)s)")
    parser.add_argument("--rows", help="rows on whose solutions to test the rules: a file, or verified")
    parser.add_argument("--repository", nargs="*", default=[], help="clones on whose commits to test the rules")
    parser.add_argument("--write", help="file to write the Markdown page to")
    arguments = parser.parse_args(argv)
    chosen = [cheat for cheat in cases() if arguments.only is None or arguments.only in cheat.name]
    if not chosen:
        parser.error(f"--only: no cheat has {arguments.only!r} in its name")
    outcomes = measure(chosen, backend=arguments.backend)
    false_alarms = honest([*(open_tasks(arguments.rows) if arguments.rows else ()), *open_tasks("mini")])
    for repository in arguments.repository:
        false_alarms += commits(repository)
    heading, *command = result_page.head("Cheats on SWE-bench", "cheats", argv)
    lines = [
        heading,
        "",
        INTRODUCTION,
        *command,
        result_page.machine(f"sandboxes: {arguments.backend}"),
        "",
        *summary(outcomes),
        *false_alarms,
        "",
    ]
    for title, shown in (
        ("Honest work", [each for each in outcomes if each.cheat.honest]),
        ("In the patch", [each for each in outcomes if not each.cheat.honest and not each.cheat.outside]),
        ("Outside the patch", [each for each in outcomes if each.cheat.outside]),
    ):
        if shown:
            lines += [f"## {title}", "", *table(shown), ""]
    result_page.publish(lines, arguments.write)


if __name__ == "__main__":
    main()
