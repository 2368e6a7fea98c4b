"""Progress of a transfer or of a number of items: a bar on a terminal if tqdm is installed, else occasional lines."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from sandboxgym.cli.support.printing import nbytes_text

SECONDS = 5.0


class PlainProgress:
    """Progress as lines: at the start, every few seconds, and at the end."""

    def __init__(self, out: TextIO, unit: str = "B") -> None:
        self._out = out
        self._unit = unit
        self._name: str | None = None
        self._done, self._total, self._printed = 0, None, 0.0

    def start(self, name: str, done: int, total: int | None) -> None:
        """See `transfer.TransferProgress`."""
        self._name, self._done, self._total = name, done, total
        self._print()

    def advance(self, nbytes: int) -> None:
        """See `transfer.TransferProgress`."""
        self._done += nbytes
        if time.monotonic() - self._printed > SECONDS:
            self._print()

    def finish(self) -> None:
        """See `transfer.TransferProgress`."""
        if self._name is not None:
            self._print()
            self._name = None

    def _print(self) -> None:
        self._printed = time.monotonic()
        share = f" ({self._done / max(1, self._total):.0%})" if self._total else ""
        if self._unit == "B":
            so_far = nbytes_text(self._done) + (f" of {nbytes_text(self._total)}" if self._total else "")
        else:
            so_far = f"{self._done:,}" + (f" of {self._total:,} " if self._total else " ") + self._unit
        print(f"  {self._name}: {so_far}{share}", file=self._out, flush=True)

    _total: int | None


class BarProgress:
    """Progress as a bar of tqdm."""

    def __init__(self, tqdm: Any, out: TextIO, unit: str = "B") -> None:
        self._tqdm, self._out, self._bar = tqdm, out, None
        self._unit = {"unit": unit, "unit_scale": unit == "B"}

    def start(self, name: str, done: int, total: int | None) -> None:
        """See `transfer.TransferProgress`."""
        self._bar = self._tqdm(desc=name, initial=done, total=total, **self._unit, file=self._out, dynamic_ncols=True)

    def advance(self, nbytes: int) -> None:
        """See `transfer.TransferProgress`."""
        if self._bar is not None:
            self._bar.update(nbytes)

    def finish(self) -> None:
        """See `transfer.TransferProgress`."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    _bar: Any


def progress(out: TextIO | None = None, *, unit: str = "B") -> PlainProgress | BarProgress:
    """Make the progress display that suits the output (default: standard error), for bytes or for items of ``unit``."""
    out = out or sys.stderr
    if out.isatty():
        try:
            from tqdm import tqdm
        except ImportError:
            pass
        else:
            return BarProgress(tqdm, out, unit)
    return PlainProgress(out, unit)
