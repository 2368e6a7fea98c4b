"""The command line ``sandboxgym COMMAND …``: one module per command, imported only when it is needed.

Exit statuses: 0 success; 1 failure, or something required is missing (the reason is on standard error); 2 usage error;
130 interrupted. ``conformance`` has its own, see its ``--help``.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

COMMANDS = {
    "list": ("sandboxgym.cli.environments:list_main", "list the environments, what their snapshots keep, their data"),
    "info": ("sandboxgym.cli.environments:info_main", "describe an environment: spaces, wrappers, arguments, data"),
    "play": ("sandboxgym.cli.play:main", "play an environment in the terminal, with undo and branches"),
    "download": ("sandboxgym.cli.download:main", "download a data set, or install it from a file"),
    "swebench": ("sandboxgym.cli.swebench:main", "prepare and check SWE-bench rows, get their images"),
    "webshop": ("sandboxgym.cli.support.webshop_build:main", "build WebShop's files for a catalogue, with progress"),
    "serve": (
        "sandboxgym.cli.serve:main",
        "serve environments (OpenEnv), a sandbox to agents (MCP), sandboxes (E2B), WebShop",
    ),
    "tree": ("sandboxgym.tree.page:main", "show rollout trees of a run or a file, as text or as a page"),
    "train": ("sandboxgym.cli.passing:train_main", "train a language model with rollout trees (bpo_ref)"),
    "eval": ("sandboxgym.cli.evaluation:main", "evaluate a model behind an endpoint, or a checkpoint, on tasks"),
    "init": ("sandboxgym.cli.init:main", "write a package for your own environment, with tests and a certificate"),
    "conformance": ("sandboxgym.cli.passing:conformance_main", "check that an environment's snapshots are faithful"),
    "bench": ("sandboxgym.cli.passing:bench_main", "measure what snapshots cost"),
    "fleet": ("sandboxgym.cli.fleet:main", "show the environments on a Ray cluster"),
    "doctor": ("sandboxgym.cli.doctor:main", "show what this machine can run, and what to install for the rest"),
    "gc": ("sandboxgym.cli.gc:main", "remove what killed processes left behind"),
}


class CommandError(Exception):
    """Failure of a command; the message is for the user, the status for the shell."""

    def __init__(self, message: str, *, status: int = FAILED) -> None:
        super().__init__(message)
        self.status = status


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return OK if arguments else USAGE
    name, rest = arguments[0], arguments[1:]
    if name in ("-V", "--version"):
        from sandboxgym import __version__

        print(f"sandboxgym {__version__}")
        return OK
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        print(f"sandboxgym: no command {name!r}{hint}\n\n{usage()}", file=sys.stderr)
        return USAGE
    return _run(name, rest)


def usage() -> str:
    """The text of ``sandboxgym --help``."""
    lines = [f"  {name:<12} {about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join(
        (
            "usage: sandboxgym COMMAND [options]",
            "",
            "Gymnasium environments that can be snapshotted, restored and forked at any step.",
            "",
            *lines,
            "",
            "sandboxgym COMMAND --help says more. Exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted.",
        )
    )


def _run(name: str, arguments: list[str]) -> int:
    module, _, function = COMMANDS[name][0].partition(":")
    try:
        command = getattr(importlib.import_module(module), function)
        status: int | None = command(arguments)
        sys.stdout.flush()
    except CommandError as error:
        print(f"sandboxgym {name}: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        print(f"\nsandboxgym {name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `sandboxgym list | head`: point stdout elsewhere, or the interpreter complains at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except Exception as error:  # all but what is missing here is raised again
        if not _is_missing(error):
            raise
        print(f"sandboxgym {name}: {error}", file=sys.stderr)
        return FAILED
    return OK if status is None else status


def _is_missing(error: Exception) -> bool:
    """Check whether an error says that a package, a sandbox or a directory is missing here, and what to do."""
    from gymnasium.error import DependencyNotInstalled

    from sandboxgym.data import NoHomeDirectory
    from sandboxgym.sandbox.base import SandboxUnavailable

    return isinstance(error, (DependencyNotInstalled, SandboxUnavailable, NoHomeDirectory))
