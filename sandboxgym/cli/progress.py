"""Progress of a transfer: a bar on a terminal that has tqdm, else a plain line now and then."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from sandboxgym.cli.screen import nbytes_text

SECONDS = 5.0


class PlainProgress:
    """One line at the start, every few seconds, and at the end."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._name: str | None = None
        self._done, self._total, self._printed = 0, None, 0.0

    def start(self, name: str, done: int, total: int | None) -> None:
        """See `transfer.Progress`."""
        self._name, self._done, self._total = name, done, total
        self._print()

    def advance(self, nbytes: int) -> None:
        """See `transfer.Progress`."""
        self._done += nbytes
        if time.monotonic() - self._printed > SECONDS:
            self._print()

    def finish(self) -> None:
        """See `transfer.Progress`."""
        if self._name is not None:
            self._print()
            self._name = None

    def _print(self) -> None:
        self._printed = time.monotonic()
        of = f" of {nbytes_text(self._total)} ({self._done / max(1, self._total):.0%})" if self._total else ""
        print(f"  {self._name}: {nbytes_text(self._done)}{of}", file=self._out, flush=True)

    _total: int | None


class BarProgress:
    """A bar of tqdm's."""

    def __init__(self, tqdm: Any, out: TextIO) -> None:
        self._tqdm, self._out, self._bar = tqdm, out, None

    def start(self, name: str, done: int, total: int | None) -> None:
        """See `transfer.Progress`."""
        self._bar = self._tqdm(
            desc=name, initial=done, total=total, unit="B", unit_scale=True, file=self._out, dynamic_ncols=True
        )

    def advance(self, nbytes: int) -> None:
        """See `transfer.Progress`."""
        if self._bar is not None:
            self._bar.update(nbytes)

    def finish(self) -> None:
        """See `transfer.Progress`."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    _bar: Any


def progress(out: TextIO | None = None) -> PlainProgress | BarProgress:
    """What suits where it is printed, by default standard error."""
    out = out or sys.stderr
    if out.isatty():
        try:
            from tqdm import tqdm
        except ImportError:
            pass
        else:
            return BarProgress(tqdm, out)
    return PlainProgress(out)
