"""Progress of a run on stderr: a bar on a terminal, lines elsewhere.

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
    """Print a line, above the bar if there is one.

    If stderr is a closed pipe the line is lost: Ctrl-C also ends the reader of a pipe (``… 2>&1 | tee log``), and the
    run still has to be saved.
    """
    try:
        tqdm.write(text, file=sys.stderr)
        sys.stderr.flush()
    except BrokenPipeError:  # what is still to be written would fail again at exit, and change the exit status
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stderr.fileno())
        os.close(nowhere)


def say_from_signal(text: str) -> None:
    """`say` for signal handlers, which may have interrupted a write."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n{text}\n".encode())


class StageProgress:
    """Progress of a stage of training, as a bar or as lines.

    Args:
        label: name of the stage.
        total: position at its end.
        done: position at its beginning.
        shown: whether this process shows it; only one should.
        lines: maximum number of lines in a log file; None: one for each `advance`.
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
        """Move to a position and show these numbers."""
        before, self.done = self.done, to
        if self._bar is not None:
            self._bar.set_postfix(numbers, refresh=False)
            self._bar.update(to - self._bar.n)
            if self._lines is None:  # few steps: show each
                self._bar.refresh()
        if self._logs and (self._lines is None or to >= self.total or self._part(before) != self._part(to)):
            shown = ", ".join(f"{name} {value}" for name, value in numbers.items())
            at = f"{to:.0f}" if to == int(to) else f"{to:.1f}"
            say(f"{self.label} {at}/{self.total}{': ' if shown else ''}{shown} [{self._times()}]")

    def close(self) -> None:
        """End the stage."""
        if self._bar is not None:
            self._bar.close()

    def _part(self, at: float) -> int:
        return int(at * (self._lines or 1) / max(1, self.total))

    def _times(self) -> str:
        """Elapsed time, and the remaining time at that pace."""
        taken, gone = time.monotonic() - self._began, self.done - self._start
        left = tqdm.format_interval(taken * (self.total - self.done) / gone) if gone > 0 else "?"
        return f"{tqdm.format_interval(taken)}<{left}"


def header(args: Args, *, device: str, processes: int, resumed: str) -> str:
    """Header of a run: algorithm, environment, device and folder in a few lines; `model_line` follows later.

    Args:
        args: settings with the preset filled in.
        device: device of the first process.
        processes: number of training processes.
        resumed: position of a resumed run; empty for a new one.
    """
    played, judged = (" ".join(words) for words in (args.env_kwargs, args.eval_kwargs))
    spent = f"until {args.budget:,} {args.match} are spent"
    length = spent if args.budget else f"{args.updates:,} update{'s' * (args.updates != 1)}"
    learning = f"{args.algo}, {args.prompts} tasks per update, {length}"
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
    """The model, its number of parameters, and how many of them are trained."""
    share = "all trained" if trained == parameters else f"{count(trained)} trained"
    return f"{'model':<12} {args.init_from or args.model}, {count(parameters)} parameters, {share}"


def count(number: int) -> str:
    """A number of parameters as text, such as 0.207 M or 7.62 B."""
    size, unit = (1e9, "B") if number >= 1e8 else (1e6, "M")
    return f"{number / size:.3g} {unit}"
