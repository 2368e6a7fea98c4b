"""Runs of the suite on specimens of the zoo, each in a separate process, with the results in a journal.

A journal is a file with one line of JSON per run. Runs that it already has for the same sources (suite and zoo) are not
repeated, so that hours of runs can be interrupted and resumed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

import zoo  # noqa: E402  (found beside this file)
from zoo import Good, Mutant  # noqa: E402

from sandboxgym.conformance import Budget, Subject, Verdict, run  # noqa: E402
from sandboxgym.conformance.digest import suite_digest  # noqa: E402
from sandboxgym.conformance.runner import all_checks  # noqa: E402
from sandboxgym.conformance.supervision import scratch  # noqa: E402
from sandboxgym.system import run_directories  # noqa: E402

CHECKS = all_checks()
NAMED = ("named",)
"""In place of ids of checks: those of the mutant's ``killed_by``, see `hunt`."""
SEEDS_BUDGET = replace(
    Budget.named("quick"), traces=2, steps=30, repeats=20, forks=3, cycles=10, depth=10, samples=200, seconds=0.5
)
"""Of many runs of known-good environments: short ones."""
Job = tuple[str, str | Budget, int, Collection[str] | None]
"""Name of a specimen, budget, seed, ids of checks (None: all; `NAMED`)."""


@dataclass(frozen=True)
class Row:
    """What became of one specimen.

    Attributes:
        name: of the specimen.
        seed: of the run.
        verdicts: by check id.
        messages: of failed and inconclusive checks.
        seconds: of the whole run.
    """

    name: str
    seed: int
    verdicts: dict[str, Verdict]
    messages: dict[str, str]
    seconds: float

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


def examine(name: str, *, budget: str | Budget = "quick", seed: int = 0, only: Collection[str] | None = None) -> Row:
    """Run the suite on one specimen, in this process."""
    kept = specimen(name)
    hooks = {"actions": kept.actions, "observe_state": kept.observe_state, "shell": kept.shell, "limits": kept.limits}
    subject = Subject(kept.make, name=name, **hooks)
    known = None if only is None else {check.id for check in CHECKS} & set(only)
    report = run(subject, budget=budget, seed=seed, only=known, shrink=False)
    return Row(
        name,
        seed,
        {result.id: result.verdict for result in report.results},
        {r.id: r.message for r in report.results if r.verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE)},
        report.seconds,
    )


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
        sum(row.seconds for row in rows),
    )


def killed(mutant: Mutant, row: Row) -> bool:
    """Whether a check that names the hazard failed."""
    return bool(mutant.killed_by & row.failed)


def in_own_process(jobs: Sequence[Job], *, processes: int) -> Iterable[Row]:
    """`examine` each in a new process; what one leaves in its temporary and its working directory goes with it."""
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # or the server would import from the working directory first
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["examining"])
    with context.Pool(processes, maxtasksperchild=1) as pool:
        yield from pool.imap_unordered(_examine, jobs)


@contextlib.contextmanager
def own_folders() -> Iterator[tuple[str, str]]:
    """A temporary and a working directory for a run; if it is killed, the next one clears them."""
    claimed = run_directories.claim(scratch.KIND).absolute()
    scratch.use(claimed)
    try:
        with scratch.folder() as temporary, scratch.folder() as working:
            yield temporary, working
    finally:
        run_directories.give_back(claimed)


def _examine(job: Job) -> Row:
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
                return examine(name, budget=budget, seed=seed, only=only)
            finally:
                os.chdir("/")


# The journal.


@functools.cache
def sources(name: str) -> str:
    """A digest of the source of the suite and of a specimen: results of other sources are not these ones' results."""
    own = Path(sys.modules[specimen(name).make.__module__].__file__ or "")
    found = hashlib.sha256(suite_digest().encode())
    texts = {path: path.read_text(encoding="utf-8") for path in sorted((HERE / "zoo").glob("*.py"))}
    shared = {match for text in texts.values() for match in re.findall(r"^from zoo\.(\w+) import", text, re.MULTILINE)}
    for path, text in texts.items():
        if path == own or path.stem in shared | {"streams"}:
            found.update(text.encode())
    return found.hexdigest()[:16]


def journaled(jobs: Sequence[Job], journal: Path | None, *, processes: int) -> Iterator[Row]:
    """The rows of all jobs: those that the journal has, then the others, each written to it when it is there."""
    if journal is None:
        yield from in_own_process(jobs, processes=processes)
        return
    known: dict[str, Row] = {}
    if journal.exists():
        for line in journal.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            verdicts = {id: Verdict(verdict) for id, verdict in entry["row"]["verdicts"].items()}
            known[entry["key"]] = Row(**{**entry["row"], "verdicts": verdicts})
    yield from (known[_key(job)] for job in jobs if _key(job) in known)
    left = [job for job in jobs if _key(job) not in known]
    keys = {(job[0], job[2]): _key(job) for job in left}
    for row in in_own_process(left, processes=processes) if left and processes else ():
        with journal.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": keys[row.name, row.seed], "row": asdict(row)}) + "\n")
        yield row


def _key(job: Job) -> str:
    name, budget, seed, only = job
    what = "all" if only is None else hashlib.sha256(repr(sorted(only)).encode()).hexdigest()[:8]
    size = budget if isinstance(budget, str) else hashlib.sha256(repr(budget).encode()).hexdigest()[:8]
    return f"{sources(name)} {name} {size} {seed} {what}"
