"""Mutation test of the trainer's fast tests: one changed line at a time, in a copy, until a test fails.

    python conformance/mutants_of_the_trainer.py [--only NAME ...] [--jobs 1] [--journal FILE]
        [--markdown docs/conformance/trainer-mutants.md]

Each mutant is run against the fast tests for its part of the trainer, until the first failure. These tests are run once
without a mutant first. A mutant whose line does not occur exactly once is an error that names it: the code has changed,
and the mutant has to be adapted. Mutants marked equivalent, with the reason, are not run. ``--journal`` skips mutants
that an earlier run killed. Exit codes: 0 all killed, 1 some survived, 2 a mutant's line is missing, or the tests fail
without mutants.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import pytest
from trainer_mutants import MUTANTS, TESTS, Mutant

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("bpo_ref", "sandboxgym", "sandboxgym_pytest", "tests", "pyproject.toml")
IMPORTED = ("torch", "transformers", "accelerate", "transformers.models.llama", "peft", "tyro", "sandboxgym.tree")
SECONDS = 900.0
"""Time limit of a mutant's tests in seconds; a mutant that exceeds it counts as killed."""

LONGER = "mean_change or unbiased or planted or biases or variance or ranking or allotted or trains or run or resume"
"""Words in the names of fast tests that take a second or more; these run after the others have passed."""
STAGES = (f"not ({LONGER})", LONGER)


@dataclass(frozen=True)
class Fate:
    """Result of a mutant's trial: killed or not, and by which test."""

    mutant: Mutant
    killed: bool
    by: str
    """The test that failed."""
    seconds: float


class GoneError(LookupError):
    """The line of a mutant does not occur exactly once in the package."""


def place(mutant: Mutant, package: Path) -> Path:
    """The file of ``bpo_ref`` that has a mutant's line.

    Raises:
        GoneError: no file has the line, or it occurs more than once.
    """
    found = [(path, path.read_text(encoding="utf-8").count(mutant.line)) for path in sorted(package.glob("**/*.py"))]
    found = [(path, times) for path, times in found if times]
    if [times for _, times in found] != [1]:
        where = ", ".join(f"{path.name} ({times} times)" for path, times in found) or "nowhere"
        raise GoneError(f"{mutant.part}: {mutant.name}: expected once in bpo_ref, found {where}: {mutant.line!r}")
    return found[0][0]


def plant(mutant: Mutant, copy: Path) -> tuple[Path, str]:
    """Put the mutant into the copy; returns its file and the text that was there."""
    path = place(mutant, copy / "bpo_ref")
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(mutant.line, mutant.changed), encoding="utf-8")
    return path, text


@dataclass
class Trial:
    """Tests in a process that was forked when everything but the trainer had been imported."""

    mutant: Mutant | None
    """Mutant to plant; None: the tests run without one."""
    copy: Path
    names: Sequence[str]
    stage: int = 0
    began: float = 0.0
    pid: int = 0
    output: TextIO | None = None

    def start(self) -> None:
        """Start the next stage of the tests."""
        self.output = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - the child's, and read after it
        self.began = self.began or time.perf_counter()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os._exit(self._run())

    def _run(self) -> int:
        assert self.output is not None
        os.setsid()
        for descriptor in (1, 2):
            os.dup2(self.output.fileno(), descriptor)
        os.chdir(self.copy)
        os.environ |= {"PYTHONPATH": str(self.copy), "PYTHONDONTWRITEBYTECODE": "1"}
        os.environ["SANDBOXGYM_SLOWEST"] = ""  # all tests without the mark, also those that take some seconds
        sys.path.insert(0, str(self.copy))
        sys.dont_write_bytecode = True
        files = [str(next((self.copy / "tests" / "bpo_ref").rglob(name))) for name in self.names]
        options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow", "-k", STAGES[self.stage]]
        code = int(pytest.main([*options, *files]))
        sys.stdout.flush()
        return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else code

    def ended(self) -> int | None:
        """Exit code of this stage: -1 if it ran out of time, None if it has not ended."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if self.mutant is None or time.perf_counter() - self.began < SECONDS:
            return None
        os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        return -1

    def told(self) -> str:
        """Output of the tests so far."""
        assert self.output is not None
        self.output.seek(0)
        return self.output.read()


def fate_of(trial: Trial, code: int) -> Fate:
    """Result of a trial, from the exit code of its last stage and the output of its tests."""
    assert trial.mutant is not None
    lines = [line.split(" ")[1] for line in trial.told().splitlines() if line.startswith(("FAILED ", "ERROR "))]
    by = lines[0].rpartition("/")[2] if lines else "it did not end" if code == -1 else f"exit code {code}"
    return Fate(trial.mutant, code != 0, by if code else "", time.perf_counter() - trial.began)


def run(trials: Sequence[Trial], copies: list[Path]) -> Iterator[tuple[Trial, int]]:
    """Run trials, as many at a time as there are copies; yield each that has ended, with its exit code."""
    waiting = list(trials)
    running: dict[int, tuple[Trial, tuple[Path, str] | None]] = {}
    while waiting or running:
        while waiting and copies:
            trial = waiting.pop(0)
            trial.copy = copies.pop()
            before = plant(trial.mutant, trial.copy) if trial.mutant else None
            trial.start()
            running[trial.pid] = (trial, before)
        time.sleep(0.1)
        for pid, (trial, before) in list(running.items()):
            if (code := trial.ended()) is None:
                continue
            del running[pid]
            if code == 0 and trial.stage + 1 < len(STAGES):
                trial.stage += 1
                trial.start()
                running[trial.pid] = (trial, before)
                continue
            if before is not None:
                before[0].write_text(before[1], encoding="utf-8")
            copies.append(trial.copy)
            yield trial, code


def journaled(journal: Path | None) -> list[Fate]:
    """Kills of earlier runs, for mutants that have not changed since."""
    if journal is None or not journal.exists():
        return []
    rows = [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]
    fates = [Fate(Mutant(**row["mutant"]), row["killed"], row["by"], row["seconds"]) for row in rows]
    return list({fate.mutant: fate for fate in fates if fate.killed and fate.mutant in MUTANTS}.values())


def import_all() -> None:
    """Import everything that tests import and mutants do not change, which takes most of the time of a quick test."""
    sys.path.insert(0, str(ROOT))
    for name in IMPORTED:
        importlib.import_module(name)
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)  # threads do not survive a fork


def copied(folder: Path) -> Path:
    """A copy of what the tests need."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"), symlinks=True)
        else:
            shutil.copy(source, folder / name)
    return folder


def markdown(fates: Sequence[Fate], command: str) -> str:
    """The whole page."""
    run = {fate.mutant: fate for fate in fates}
    survived = [fate.mutant.name for fate in fates if not fate.killed]
    equivalent = [mutant for mutant in MUTANTS if mutant.equivalent]
    lines = [
        "# Mutants of the trainer",
        "",
        "Each row is a mutant: one line of `bpo_ref` is changed in a copy, and the fast tests chosen for that part run",
        "until one fails. A mutant that survives is a fault that they would miss. The list is",
        "`conformance/trainer_mutants.py`.",
        "",
        f"- {len(fates) - len(survived)} of {len(fates)} mutants killed"
        + (f"; **survived: {', '.join(survived)}**" if survived else ""),
        f"- {len(equivalent)} more change nothing that can be tested, for the reason given",
        f"- `{command}` on {platform.system()} with {os.cpu_count()} cores, Python {platform.python_version()},"
        f" {time.strftime('%Y-%m-%d')}, {sum(fate.seconds for fate in fates) / 60:.0f} minutes of tests",
        "",
        "| part | mutant | killed by |",
        "|---|---|---|",
    ]
    for mutant in MUTANTS:
        if mutant.equivalent:
            verdict = f"equivalent: {mutant.equivalent}"
        elif mutant in run:
            verdict = f"`{run[mutant].by.replace('|', chr(92) + '|')}`" if run[mutant].killed else "**survived**"
        else:
            continue
        lines.append(f"| {mutant.part} | {mutant.name} | {verdict} |")
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Which changed line of the trainer its fast tests notice.")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="mutants, or parts; default all")
    parser.add_argument("--jobs", type=int, default=1, help="at once, each in a copy of its own; default 1")
    parser.add_argument("--untested", action="store_true", help="the tests are known to pass without a mutant")
    parser.add_argument("--journal", type=Path, metavar="FILE", help="keep results here, and take the kills it has")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the page here")
    options = parser.parse_args(arguments)
    try:
        for mutant in MUTANTS:
            place(mutant, ROOT / "bpo_ref")
    except GoneError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    known = {mutant.name for mutant in MUTANTS} | set(TESTS)
    if wrong := [name for name in options.only or () if name not in known]:
        parser.error(f"--only: expected names or parts of mutants, found {', '.join(wrong)}")
    chosen = [
        mutant
        for mutant in MUTANTS
        if not mutant.equivalent and (not options.only or {mutant.name, mutant.part} & set(options.only))
    ]
    fates = [fate for fate in journaled(options.journal) if fate.mutant in chosen]
    chosen = [mutant for mutant in chosen if mutant not in {fate.mutant for fate in fates}]
    import_all()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = [copied(Path(folder) / str(number)) for number in range(options.jobs)]
        names = list(dict.fromkeys(name for mutant in chosen for name in TESTS[mutant.part]))
        alone = [Trial(None, copies[0], names)] if chosen and not options.untested else []
        for trial, code in run(alone, copies):
            if code:
                print(f"error: the tests fail without any mutant:\n{trial.told()[-2000:]}", file=sys.stderr)
                return 2
        trials = [Trial(mutant, copies[0], TESTS[mutant.part]) for mutant in chosen]
        for count, (trial, code) in enumerate(run(trials, copies), 1):
            found = fate_of(trial, code)
            fates.append(found)
            if options.journal is not None:
                with options.journal.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(found)) + "\n")
            verdict = f"killed by {found.by}" if found.killed else "SURVIVED"
            print(f"{count}/{len(chosen)} {found.mutant.part}: {found.mutant.name}: {verdict} {found.seconds:.0f} s")
            sys.stdout.flush()
    survived = [found.mutant.name for found in fates if not found.killed]
    print(f"{len(fates) - len(survived)} of {len(fates)} killed; survived: {', '.join(survived) or 'none'}")
    if options.markdown is not None:
        given = sys.argv[1:] if arguments is None else arguments
        command = shlex.join(["python", "conformance/mutants_of_the_trainer.py", *given])
        options.markdown.write_text(markdown(fates, command), encoding="utf-8")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
