"""Commands that pass their arguments, unparsed, to another module's command line."""

from __future__ import annotations

import contextlib
import importlib
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence

from sandboxgym.bench import MODULES, NAMES
from sandboxgym.cli import FAILED, OK, USAGE, CommandError
from sandboxgym.cli.environments import see_this_folder


def bench_main(argv: Sequence[str]) -> int:
    """Run one benchmark; without a name, the first."""
    arguments = list(argv)
    name = next(iter(NAMES))
    if arguments and not arguments[0].startswith("-"):
        name = arguments.pop(0)
    elif "-h" in arguments or "--help" in arguments:
        print("usage: sandboxgym bench [NAME] [options]\n")
        for known, about in NAMES.items():
            print(f"  {known:<10} {about}")
        print(f"\nWithout a name: {name}. sandboxgym bench NAME --help lists a benchmark's options.")
        return OK
    if name not in NAMES:
        print(f"sandboxgym bench: no benchmark {name!r}; there are: {', '.join(NAMES)}", file=sys.stderr)
        return USAGE
    module = importlib.import_module(f"sandboxgym.bench.{MODULES.get(name, name)}")
    with _argv(f"sandboxgym bench {name}", *arguments):
        status: int | None = module.main()
    return OK if status is None else status


def conformance_main(argv: Sequence[str]) -> int:
    """Run ``python -m sandboxgym.conformance`` with these arguments."""
    with _argv("sandboxgym conformance", *argv):
        try:
            runpy.run_module("sandboxgym.conformance", run_name="__main__", alter_sys=False)
        except SystemExit as leave:
            if isinstance(leave.code, str):
                print(leave.code, file=sys.stderr)
                return 1
            return leave.code or OK
    return OK


def train_main(argv: Sequence[str]) -> int:
    """Run ``python -m bpo_ref.train`` with these arguments, in one process; `accelerate launch` starts several."""
    _require_trainer()
    see_this_folder()
    settings = importlib.import_module("bpo_ref.args")

    def train() -> None:
        args = settings.command_line()  # before `bpo_ref.train` imports PyTorch, which takes seconds
        importlib.import_module("bpo_ref.train").train(args)

    return _status("train", argv, train)


def eval_main(argv: Sequence[str]) -> int:
    """Run ``python -m bpo_ref.eval`` with these arguments."""
    _require_trainer()
    see_this_folder()
    return _status("eval", argv, importlib.import_module("bpo_ref.eval").main)


def _require_trainer() -> None:
    try:
        importlib.import_module("bpo_ref")
    except ModuleNotFoundError as error:
        raise CommandError(str(error)) from None


def _status(name: str, argv: Sequence[str], program: Callable[[], object]) -> int:
    """Run a program under a command's name; returns its exit status."""
    with _argv(f"sandboxgym {name}", *argv):
        try:
            program()
        except SystemExit as leave:
            if isinstance(leave.code, str):
                print(leave.code, file=sys.stderr)
                return FAILED
            return leave.code or OK
    return OK


@contextlib.contextmanager
def _argv(*arguments: str) -> Iterator[None]:
    """Set the process's command line within the context, because argparse takes the program's name from it."""
    before, sys.argv = sys.argv, list(arguments)
    try:
        yield
    finally:
        sys.argv = before
