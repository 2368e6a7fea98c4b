"""Runs of the suite on specimens of the zoo, each in a separate process, with the results in a journal.

A journal is a file with one line of JSON per run. The verdict of a check is kept while the digests of the check and of
the specimen stay the same (`sources`). Hours of runs can be interrupted, and if only one check changes, only that one
runs again.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.pool
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

import sources  # noqa: E402  (found beside this file)
import zoo  # noqa: E402
from zoo import Good, Mutant  # noqa: E402

from sandboxgym.conformance import Budget, Subject, Verdict, run  # noqa: E402
from sandboxgym.conformance.check import Check, Result  # noqa: E402
from sandboxgym.conformance.digest import suite_digest  # noqa: E402
from sandboxgym.conformance.runner import all_checks  # noqa: E402
from sandboxgym.conformance.supervision import scratch  # noqa: E402
from sandboxgym.system import run_directories  # noqa: E402

CHECKS = all_checks()
PREREQUISITES = frozenset(id for check in CHECKS for id in check.after)
suite_digest()  # once: every process of a run is a fork of one that has imported this
gc.collect()  # checks collect garbage dozens of times a run: modules, which stay, need not be looked through each time
gc.freeze()
IMPORTED_IN = os.getpid()
"""Process that imported this: for the processes of a run, their server."""
NAMED = ("named",)
"""In a job, used instead of ids of checks: the checks of the mutant's ``killed_by``; see `hunt`."""
SEEDS_BUDGET = replace(
    Budget.named("quick"), traces=2, steps=30, repeats=20, forks=3, cycles=10, depth=10, samples=200, seconds=0.5
)
"""Budget of many short runs of known-good environments."""
Job = tuple[str, str | Budget, int, Collection[str] | None]
"""Name of a specimen, budget, seed, ids of checks (None: all; `NAMED`)."""


@dataclass(frozen=True)
class Row:
    """Results of the checks of one specimen.

    Attributes:
        name: of the specimen.
        seed: of the run.
        verdicts: by check id.
        messages: messages by check id, of the checks that gave one.
        took: seconds by check id.
    """

    name: str
    seed: int
    verdicts: dict[str, Verdict]
    messages: dict[str, str]
    took: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.took.values())

    @property
    def failed(self) -> frozenset[str]:
        return frozenset(id for id, verdict in self.verdicts.items() if verdict is Verdict.FAIL)


def specimen(name: str) -> Mutant | Good:
    """A specimen of the zoo by its name."""
    found: dict[str, Mutant | Good] = {s.name: s for s in (*zoo.MUTANTS, *zoo.KNOWN_GOOD)}
    try:
        return found[name]
    except KeyError:
        raise SystemExit(f"expected a specimen of the zoo ({', '.join(found)}), found {name!r}") from None


def examine(
    name: str,
    *,
    budget: str | Budget = "quick",
    seed: int = 0,
    only: Collection[str] | None = None,
    known: Mapping[str, Result] | None = None,
) -> Row:
    """Run the suite on one specimen, in this process; checks with known results are not run again.

    If ``only`` is None, a mutant is run against the checks that its row of the kill matrix needs; see `needless`.
    """
    kept = specimen(name)
    hooks = {"actions": kept.actions, "observe_state": kept.observe_state, "shell": kept.shell, "limits": kept.limits}
    subject = Subject(kept.make, name=name, **hooks)
    chosen = None if only is None else {check.id for check in CHECKS} & set(only)
    without = needless(kept) if only is None and isinstance(kept, Mutant) else None
    report = run(subject, budget=budget, seed=seed, only=chosen, shrink=False, known=known, needless=without)
    return Row(
        name,
        seed,
        {result.id: result.verdict for result in report.results},
        {result.id: result.message for result in report.results if result.message},
        {result.id: result.seconds for result in report.results},
    )


def needless(mutant: Mutant) -> Callable[[Check, Mapping[str, Result]], bool]:
    """A function that is true of checks which cannot change a mutant's row of the kill matrix, given earlier results.

    If a check of a family has failed, the others of the family cannot change the row. Checks that must find the mutant,
    and checks whose failure makes others skip, are always run.
    """

    def cannot_matter(check: Check, results: Mapping[str, Result]) -> bool:
        if check.id in mutant.killed_by or check.id in PREREQUISITES:
            return False
        return any(r.verdict is Verdict.FAIL and family(id) == family(check.id) for id, r in results.items())

    return cannot_matter


def family(id: str) -> str:
    """The part of a check's id before the dot."""
    return id.partition(".")[0]


def hunt(mutant: Mutant, *, budget: str | Budget = "quick", seed: int = 0) -> Row:
    """Run the checks that must find a mutant, one after the other, until one fails."""
    rows: list[Row] = []
    for check in CHECKS:
        if check.id in mutant.killed_by:
            rows.append(examine(mutant.name, budget=budget, seed=seed, only={check.id}))
            if rows[-1].failed:
                break
    return Row(
        mutant.name,
        seed,
        {id: verdict for row in rows for id, verdict in row.verdicts.items()},
        {id: message for row in rows for id, message in row.messages.items()},
        {id: seconds for row in rows for id, seconds in row.took.items()},
    )


def killed(mutant: Mutant, row: Row) -> bool:
    """True if a check that names the hazard failed."""
    return bool(mutant.killed_by & row.failed)


def in_own_process(
    jobs: Sequence[Job], *, processes: int, known: Mapping[str, Mapping[str, Result]] | None = None
) -> Iterable[Row]:
    """Examine each specimen in a new process, whose temporary and working directories are removed afterwards.

    Args:
        jobs: the jobs to do.
        processes: number of processes at once.
        known: results of checks that are not run again, by `key_of` of their job.
    """
    with pool(processes) as started:
        yield from started.imap_unordered(
            _examine_rest, [(job, known[key_of(job)] if known and key_of(job) in known else {}) for job in jobs]
        )


def pool(processes: int) -> multiprocessing.pool.Pool:
    """Processes for one task each, all forks of a server that has imported this module."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["examining"])
    given = os.environ.get("PYTHONPATH")
    with _found_by_new_interpreters():
        multiprocessing.forkserver.ensure_running()
    return context.Pool(processes, maxtasksperchild=1, initializer=_set, initargs=("PYTHONPATH", given))


@contextlib.contextmanager
def _found_by_new_interpreters() -> Iterator[None]:
    """Context in which new interpreters find the modules of this folder, and none in the working directory first.

    Before Python 3.12.8 and 3.13.1 the server has no `sys.path` yet while it imports what its forks are to have, and it
    passes over what it does not find (python/cpython#117378): each process would spend half a second importing.
    """
    path, safe = os.environ.get("PYTHONPATH"), os.environ.get("PYTHONSAFEPATH")
    _set("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parent), *([path] if path else [])]))
    _set("PYTHONSAFEPATH", "1")
    try:
        yield
    finally:
        _set("PYTHONPATH", path)
        _set("PYTHONSAFEPATH", safe)


def _set(variable: str, value: str | None) -> None:
    """Set a variable of this process, or unset it."""
    if value is None:
        os.environ.pop(variable, None)
    else:
        os.environ[variable] = value


@contextlib.contextmanager
def own_folders() -> Iterator[tuple[str, str]]:
    """Context of a temporary and a working directory for a run; if it is killed, the next run removes them."""
    claimed = run_directories.claim(scratch.KIND).absolute()
    scratch.use(claimed)
    try:
        with scratch.folder() as temporary, scratch.folder() as working:
            yield temporary, working
    finally:
        run_directories.give_back(claimed)


def _examine_rest(job: tuple[Job, Mapping[str, Result]]) -> Row:
    return _examine(*job)


def _examine(job: Job, known: Mapping[str, Result] | None = None) -> Row:
    name, budget, seed, only = job
    with own_folders() as (temporary, working):
        os.environ["TMPDIR"] = temporary
        tempfile.tempdir = None
        os.chdir(working)
        with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
            try:
                kept = specimen(name)
                if only == NAMED and isinstance(kept, Mutant):
                    return hunt(kept, budget=budget, seed=seed)
                return examine(name, budget=budget, seed=seed, only=only, known=known)
            finally:
                os.chdir("/")


# The journal.


def journaled(jobs: Sequence[Job], journal: Path | None, *, processes: int, anew: bool = False) -> Iterator[Row]:
    """The rows of all jobs: those that the journal has, then the others, each written to it when it is there.

    Args:
        jobs: jobs whose rows are wanted.
        journal: file of the journal; None: there is none.
        processes: number of processes at once; 0: return only the rows of the journal.
        anew: take nothing from the journal.
    """
    told = {} if journal is None or anew or not journal.exists() else _read(journal, jobs)
    finished = [job for job in jobs if _complete(job, told.get(key_of(job), {}))]
    yield from (_row(job, told[key_of(job)]) for job in finished)
    left = [job for job in jobs if job not in finished]
    keys = {(job[0], job[2]): key_of(job) for job in left}
    for row in in_own_process(left, processes=processes, known=told) if left and processes else ():
        if journal is not None:
            made_by = {id: sources.check_digest(id) for id in row.verdicts}
            with journal.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": keys[row.name, row.seed], "checks": made_by, "row": asdict(row)}) + "\n")
        yield row


def _read(journal: Path, jobs: Sequence[Job]) -> dict[str, dict[str, Result]]:
    """Results of the journal that still hold, by `key_of` of their job."""
    found: dict[str, dict[str, Result]] = {key_of(job): {} for job in jobs}
    for line in journal.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if entry["key"] not in found:
            continue
        row, results = entry["row"], found[entry["key"]]
        for check in CHECKS:  # in order: what is skipped because of another check depends on that one
            id, verdicts = check.id, row["verdicts"]
            holds = id in verdicts and entry["checks"][id] == sources.check_digest(id)
            if holds and all(earlier in results or earlier not in verdicts for earlier in check.after):
                message, seconds = row["messages"].get(id, ""), row["took"][id]
                results[id] = Result(id, Verdict(verdicts[id]), message, seconds=seconds)
    return found


def _complete(job: Job, results: Mapping[str, Result]) -> bool:
    """True if these results are all that a job asks for."""
    name, _, _, only = job
    kept = specimen(name)
    if only == NAMED and isinstance(kept, Mutant):
        failed = any(result.verdict is Verdict.FAIL for result in results.values())
        return failed or kept.killed_by <= results.keys()
    without = needless(kept) if only is None and isinstance(kept, Mutant) else None
    return all(
        check.id in results or (without is not None and without(check, results))
        for check in CHECKS
        if only is None or check.id in only
    )


def _row(job: Job, results: Mapping[str, Result]) -> Row:
    verdicts = {id: result.verdict for id, result in results.items()}
    messages = {id: result.message for id, result in results.items() if result.message}
    return Row(job[0], job[2], verdicts, messages, {id: result.seconds for id, result in results.items()})


def key_of(job: Job) -> str:
    """Specimen, what it does, budget, seed and kind of a run: results of equal keys are comparable, check by check."""
    name, budget, seed, only = job
    ids = None if only is None else set(only)
    if ids is None or ids >= {check.id for check in CHECKS}:
        what = "all"
    else:
        what = hashlib.sha256(repr(sorted(ids)).encode()).hexdigest()[:8]
    size = budget if isinstance(budget, str) else hashlib.sha256(repr(budget).encode()).hexdigest()[:8]
    return f"{sources.specimen_digest(specimen(name))} {name} {size} {seed} {what}"
