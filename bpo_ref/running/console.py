"""What a run tells while it trains, on stderr: a bar where that is a terminal, else a line for each step of progress.

A log file is read line by line, so it gets no bar: one line per update and per evaluation, twenty for a stage of many
small steps.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

if TYPE_CHECKING:
    from bpo_ref.args import Args


def say(text: str) -> None:
    """A line of its own; above the bar where there is one.

    Where nobody reads any more it is lost: Ctrl-C ends the reader of a pipe too (``… 2>&1 | tee log``), and the run has
    to be saved all the same.
    """
    try:
        tqdm.write(text, file=sys.stderr)
        sys.stderr.flush()
    except BrokenPipeError:  # what is still to be written would fail again at exit, and change the exit status
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stderr.fileno())
        os.close(nowhere)


def say_from_signal(text: str) -> None:
    """As `say`, from a handler of signals, which may have interrupted a write."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n{text}\n".encode())


class Progress:
    """How far a stage is.

    Args:
        label: of the stage.
        total: where it ends.
        done: where it begins.
        shown: in one process only.
        lines: most lines that a log file gets of it; None: one for each `advance`.
    """

    def __init__(
        self, label: str, total: int, *, done: float = 0, shown: bool = True, lines: int | None = None
    ) -> None:
        self.label, self.total, self.done = label, total, done
        self._lines, self._start, self._began = lines, done, time.monotonic()
        terminal = shown and sys.stderr.isatty()
        self._bar: Any = tqdm(desc=label, total=total, initial=done, file=sys.stderr) if terminal else None
        self._logs = shown and not terminal

    def advance(self, to: float, **numbers: str) -> None:
        """It is there now, with these numbers to show."""
        before, self.done = self.done, to
        if self._bar is not None:
            self._bar.set_postfix(numbers, refresh=False)
            self._bar.update(to - self._bar.n)
            if self._lines is None:  # few steps, each worth showing
                self._bar.refresh()
        if self._logs and (self._lines is None or to >= self.total or self._part(before) != self._part(to)):
            shown = ", ".join(f"{name} {value}" for name, value in numbers.items())
            at = f"{to:.0f}" if to == int(to) else f"{to:.1f}"
            say(f"{self.label} {at}/{self.total}{': ' if shown else ''}{shown} [{self._times()}]")

    def close(self) -> None:
        """The stage is over."""
        if self._bar is not None:
            self._bar.close()

    def _part(self, at: float) -> int:
        return int(at * (self._lines or 1) / max(1, self.total))

    def _times(self) -> str:
        """Time taken, and what is left at that pace."""
        taken, gone = time.monotonic() - self._began, self.done - self._start
        left = tqdm.format_interval(taken * (self.total - self.done) / gone) if gone > 0 else "?"
        return f"{tqdm.format_interval(taken)}<{left}"


def header(args: Args, *, device: str, processes: int, resumed: str) -> str:
    """What trains on what and where, in a few lines; `model_line` follows, once there is a model.

    Args:
        args: with the preset filled in.
        device: of the first process.
        processes: that train.
        resumed: where the run was; empty for a new one.
    """
    played, judged = (" ".join(words) for words in (args.env_kwargs, args.eval_kwargs))
    spent = f"until {args.budget:,} {args.match} are spent"
    learning = f"{args.algo}, {args.prompts} tasks per update, {spent if args.budget else f'{args.updates:,} updates'}"
    supervised = f"{args.sft_steps:,} supervised steps" if args.sft_steps and not args.init_from else ""
    stages = [supervised, "" if args.algo == "sft" else learning]
    lines = {
        "environment": " ".join(filter(None, (args.env_id, played))),
        "evaluated": f"on {args.eval_episodes} episodes{f' of {judged}' if judged else ''}",
        "training": ", then ".join(filter(None, stages)) + f"; seed {args.seed}",
        "device": f"{device}, {args.dtype}, {processes} process{'es' * (processes > 1)}",
        "output": args.out + (f", continued from {resumed}" if resumed else ""),
    }
    return "\n".join(f"{name:<12} {value}" for name, value in lines.items())


def model_line(args: Args, parameters: int, trained: int) -> str:
    """The model, how many parameters it has, and how many of them learn."""
    share = "all trained" if trained == parameters else f"{count(trained)} trained"
    return f"{'model':<12} {args.init_from or args.model}, {count(parameters)} parameters, {share}"


def count(number: int) -> str:
    """As 0.207 M, 7.62 B."""
    size, unit = (1e9, "B") if number >= 1e8 else (1e6, "M")
    return f"{number / size:.3g} {unit}"
