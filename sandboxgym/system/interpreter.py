"""Command lines and environments for other Python interpreters with the import path of this one.

1. The child never searches the working directory or a relative entry of ``PYTHONPATH`` for modules, unless this
   interpreter does. Plain ``python -c`` and ``python -m`` search the working directory first: a ``json.py`` in another
   user's folder would run with the rights of whoever starts a worker there.
2. The child gets this interpreter's import path explicitly, as it is now and in its order, with relative entries (and
   ``""``, which means the working directory) made absolute: what a script, a notebook or ``sys.path.append`` made
   importable here is importable there. It is set after the child's ``site`` has run, so that no ``sitecustomize`` is
   imported from entries that were added here later.
3. What this interpreter was told to leave alone (``-E``, ``-I``, ``-s``, ``-S``), the child leaves alone, too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

_PATH = "PYTHONPATH"


def import_path() -> list[str]:
    """Absolute import path of this interpreter, in order."""
    return [os.path.abspath(entry) for entry in sys.path]


def command(code: str, *arguments: str) -> list[str]:
    """A command line that runs code in a new interpreter; start it with `environment`.

    Args:
        code: lines of Python.
        arguments: ``sys.argv[1:]`` of the child.

    >>> command("print(sys.argv[1])", "x")[-1]
    'x'
    """
    # A literal, for any module that could read the path from an argument would have to be imported before it is set.
    return [sys.executable, *_options(), "-c", f"import sys; sys.path[:] = {import_path()!r}\n{code}", *arguments]


def module_command(module: str, *arguments: str) -> list[str]:
    """A command line that runs a module as ``python -m`` does; start it with `environment`."""
    return command(f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)", *arguments)


def environment() -> dict[str, str]:
    """Environment variables for the child: those of this process, to which it may add.

    A relative entry of ``PYTHONPATH`` is one of the folder in which this interpreter started, not of the one that it
    has gone to since: it stays, absolute, where it is on this interpreter's path, and is left out where it is not.
    """
    ignored = sys.flags.ignore_environment  # dropped here, for with -E the child would not see what a caller adds
    made = {name: value for name, value in os.environ.items() if not (ignored and name.startswith("PYTHON"))}
    if entries := made.pop(_PATH, ""):
        searched = set(import_path())
        kept = [
            os.path.abspath(entry)
            for entry in entries.split(os.pathsep)
            if os.path.isabs(entry) or os.path.abspath(entry) in searched
        ]
        if kept:
            made[_PATH] = os.pathsep.join(kept)
    return made


def _options() -> Iterator[str]:
    yield "-P"
    if sys.flags.no_user_site:
        yield "-s"
    if sys.flags.no_site:
        yield "-S"
