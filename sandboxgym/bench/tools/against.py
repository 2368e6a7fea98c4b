"""Comparison of two checkouts, measured in turn in one run: the cost of a change, even on a busy machine.

Children of both (`cost`) live at the same time and are measured one after the other, the first and the second of a pair
taking turns, so that each ratio is of two moments close to each other. The median of the ratios is reported.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import subprocess
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from sandboxgym.bench.tools import cost
from sandboxgym.system import interpreter

BACKENDS = ("overlay", "overlay-rootless")
HERE = Path(__file__).resolve().parents[3]
_PATIENCE = 900.0
"""Seconds that a child may live."""
_SURE = 1.645
"""Quantile of the normal distribution with 5 % of it on either side, in standard deviations."""
Kind = Literal["seconds", "bytes"]
Pairs = dict[tuple[Kind, str], list[tuple[float, float]]]
"""Pairs (before, after) of measurements, by kind and operation."""


class Unavailable(Exception):
    """Raised if the backend is not available in one of the checkouts; the message says why."""


def checkout(path: str | Path) -> Path:
    """Find the folder of a checkout.

    Raises:
        ValueError: there is no such package in it.
    """
    folder = Path(path).resolve()
    if not (folder / "sandboxgym" / "__init__.py").exists():
        raise ValueError(f"expected a checkout with a folder sandboxgym, found {path}")
    return folder


def revision(folder: Path) -> str:
    """Commit that is checked out, or the folder's name where there is no repository."""
    if (folder / ".git").exists():
        command = ["git", "--no-optional-locks", "-C", str(folder), "describe", "--always", "--dirty"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            return done.stdout.strip()
    return folder.name


class CheckoutProcess:
    """A child process that measures one checkout.

    Raises:
        Unavailable: there is no such backend.
        RuntimeError: it failed; so do its methods.
    """

    def __init__(self, folder: Path, backend: str, rootfs: str, boxes: int) -> None:
        run = f"import runpy; runpy.run_path({cost.__file__!r}, run_name='__main__')"
        command = interpreter.command(
            f"sys.path.insert(0, {str(folder)!r})\n{run}", str(folder), backend, rootfs, str(boxes)
        )
        self._name = f"{folder}, {backend}"
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (close() does)
        self._process = subprocess.Popen(
            command,
            env=interpreter.environment(),
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._timer = threading.Timer(_PATIENCE, self._process.kill)
        self._timer.daemon = True
        self._timer.start()
        try:
            reason = self._answer()
            if reason is not None:
                raise Unavailable(reason)
        except BaseException:
            self.close()
            raise

    def ask(self, kind: Kind) -> dict[str, float]:
        """Make one measurement of everything."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer says so
            self._process.stdin.write(f"{kind}\n")
            self._process.stdin.flush()
        found: dict[str, float] = self._answer()
        return found

    def close(self) -> None:
        """End the child with its sandboxes."""
        self._timer.cancel()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._process.wait()
        self._errors.close()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        self._process.wait()
        self._errors.seek(0)
        words = self._errors.read().decode(errors="replace").strip()
        raise RuntimeError(f"{self._name}: ended with {self._process.returncode}: {words[-2000:]}")


@contextlib.contextmanager
def children(folders: Sequence[Path], backend: str, rootfs: str, boxes: int) -> Iterator[list[CheckoutProcess]]:
    """Start a child for each checkout."""
    with contextlib.ExitStack() as opened:
        yield [
            opened.enter_context(contextlib.closing(CheckoutProcess(path, backend, rootfs, boxes))) for path in folders
        ]


def compare(before: Path, after: Path, backend: str, rootfs: str, *, rounds: int, repeats: int, boxes: int) -> Pairs:
    """Measure both checkouts in turn; new children in each round.

    Raises:
        Unavailable: there is no such backend.
        RuntimeError: a child failed.
    """
    pairs: Pairs = defaultdict(list)
    times: list[Kind] = ["seconds"]
    asked: list[Kind] = [*times * repeats, "bytes"]
    for _ in range(rounds):
        with children((before, after), backend, rootfs, boxes) as (old, new):
            for number, kind in enumerate(asked):
                first, second = (old, new) if number % 2 == 0 else (new, old)
                found = {first: first.ask(kind), second: second.ask(kind)}
                for name, value in found[old].items():
                    if name in found[new]:
                        pairs[kind, name].append((value, found[new][name]))
    return pairs


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Confidence interval of the median, 90 %, for any distribution (order statistics); of few values, their range.

    >>> interval([3.0, 1.0, 2.0]), interval([float(n) for n in range(101)])
    ((1.0, 3.0), (41.0, 59.0))
    """
    ordered = sorted(values)
    low = math.floor(len(ordered) / 2 - _SURE * math.sqrt(len(ordered)) / 2) - 1
    low = max(0, low)
    return ordered[low], ordered[-1 - low]


def table(pairs: Pairs) -> list[str]:
    """Format both measurements and their ratio as Markdown."""
    lines = ["| median | before | after | after / before (90 % interval of the median) |", "|---|---|---|---|"]
    for (kind, name), both in pairs.items():
        scale, form = (1e3, "{:.2f} ms") if kind == "seconds" else (1e-3, "{:.0f} kB")
        cells = [form.format(statistics.median(values) * scale) for values in zip(*both)]
        lines.append(f"| {name} | {' | '.join(cells)} | {_ratio(both)} |")
    return [*lines, ""]


def _ratio(both: Sequence[tuple[float, float]]) -> str:
    if any(old <= 0 or new <= 0 for old, new in both):  # more sandboxes took less memory: noise of the whole machine
        return ""
    ratios = [new / old for old, new in both]
    low, high = interval(ratios)
    return f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})"


def tables(other: Path, backends: Sequence[str], rootfs: str, *, rounds: int, repeats: int, boxes: int) -> list[str]:
    """Compare another checkout with this one in all tables.

    Args:
        other: the earlier checkout.
        backends: names of `make_sandbox`, or `cost.FULL`.
        rootfs: root file system of all sandboxes.
        rounds: pairs of children.
        repeats: of each operation in each child.
        boxes: idle sandboxes whose memory is counted, once in each child.
    """
    lines = [
        f"Before: {revision(other)}. After: {revision(HERE)}. {rounds} pairs of processes, in each {repeats} times "
        f"every operation in turn; memory is of one of {boxes} idle sandboxes with a shell. What is started, restored "
        "or forked counts until it has run a command.",
        "",
    ]
    for backend in backends:
        lines += [f"### {backend}", ""]
        try:
            lines += table(compare(other, HERE, backend, rootfs, rounds=rounds, repeats=repeats, boxes=boxes))
        except Unavailable as error:
            lines += [f"Not here: {error}", ""]
    return lines
