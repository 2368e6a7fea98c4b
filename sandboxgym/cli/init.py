"""``sandboxgym init my_env``: write a package with an environment with snapshots, tests, a workflow and a badge.

The source is ``template/``, a complete package named ``my_env`` whose files end in ``.txt``; it is copied under another
name, completely or not at all.
"""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from sandboxgym.cli import OK, USAGE, CommandError

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_RESERVED = frozenset({"src", "tests", "conftest", "bpo_ref", "sandboxgym", "sandboxgym_pytest"})
LONGEST = 40


def main(argv: Sequence[str]) -> int:
    """Run ``sandboxgym init``; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="sandboxgym init",
        description="Write a package for your own environment: a small example that passes the conformance suite, "
        "to be changed into yours, with tests, a workflow for GitHub Actions that certifies it, and a badge.",
    )
    parser.add_argument("name", metavar="NAME", help="name of the package, such as my_env")
    parser.add_argument("--directory", default=".", metavar="DIR", help="parent of its folder (default: here)")
    options = parser.parse_args(argv)
    check_name(options.name)
    folder = Path(options.directory) / options.name
    made = write(folder, options.name)
    env_id = f"{options.name}:{class_name(options.name)}-v0"
    print(f"{folder}:")
    for path in made:
        print(f"  {path}")
    print(f"\n  cd {folder}\n  pip install -e '.[test]'\n  pytest\n  sandboxgym play {env_id}")
    print(f"  sandboxgym conformance {env_id} --badge badge.svg")
    return OK


def check_name(name: str) -> None:
    """Check the name of a package.

    Raises:
        CommandError: the name is invalid; the message says why.
    """
    if not _NAME.fullmatch(name):
        better = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_").lstrip("0123456789_")
        hint = f"; {better} would do" if len(better) > 2 and _NAME.fullmatch(better) else ""
        expected = "expected lower-case letters, digits and single underscores, beginning with a letter"
        raise CommandError(f"{name!r} is not the name of a package: {expected}{hint}", status=USAGE)
    if len(name) > LONGEST:
        raise CommandError(
            f"{name!r} is not the name of a package: expected at most {LONGEST} characters", status=USAGE
        )
    if keyword.iskeyword(name) or keyword.issoftkeyword(name):
        raise CommandError(f"{name!r} is not the name of a package: it is a keyword of Python", status=USAGE)
    if name in sys.stdlib_module_names:
        raise CommandError(f"{name!r} is a module of Python's standard library; choose another name", status=USAGE)
    if name in _RESERVED or importlib.util.find_spec(name) is not None:
        raise CommandError(f"there is a module {name!r} already; choose another name", status=USAGE)


def class_name(name: str) -> str:
    """Class name for a package, ``MyEnv`` for ``my_env``; "Env" is appended to names without it.

    >>> class_name("my_env"), class_name("chess")
    ('MyEnv', 'ChessEnv')
    """
    words = "".join(word.capitalize() for word in name.split("_"))
    return words if words.endswith("Env") else f"{words}Env"


def write(folder: Path, name: str) -> list[str]:
    """Write the package; returns its files, relative to its folder.

    Raises:
        CommandError: the folder exists, or it cannot be written.
    """
    if folder.exists() or folder.is_symlink():
        raise CommandError(f"{folder} exists already, and nothing was changed")
    made = []
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=folder.parent) as temporary:
            work = Path(temporary) / name
            for path, text in contents(name):
                made.append(path)
                (work / path).parent.mkdir(parents=True, exist_ok=True)
                (work / path).write_text(text, encoding="utf-8")
            if folder.exists():  # created in the meantime
                raise FileExistsError(17, "it exists already")
            shutil.move(work, folder)
    except OSError as error:
        raise CommandError(f"{folder} cannot be written: {error.strerror or error}") from error
    return sorted(made)


def contents(name: str) -> Iterator[tuple[str, str]]:
    """Paths and texts of the package's files."""
    from sandboxgym.conformance.reports.badge import badge

    for path, source in _walk(files("sandboxgym.cli") / "template", ""):
        text = source.read_text(encoding="utf-8")
        yield _renamed(path.removesuffix(".txt"), name), _renamed(text, name)
    yield "badge.svg", badge(None)


def _walk(folder: Traversable, within: str) -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _walk(entry, f"{within}{entry.name}/")
        elif entry.name.endswith(".txt"):
            yield f"{within}{entry.name}", entry


def _renamed(text: str, name: str) -> str:
    return text.replace("my_env", name).replace("MyEnv", class_name(name))
