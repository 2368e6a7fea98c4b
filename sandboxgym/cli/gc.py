"""``sandboxgym gc``: remove leftovers of killed processes, and nothing that a running process uses.

1. Run directories whose owner is gone (`run_directories.reap`).
2. Partial downloads and half-unpacked archives that are unlocked and have not changed for a day.
3. Temporary files of interrupted atomic writes, older than a day, in the directories of this package.
4. With ``--all``, the caches, which are rebuilt when needed. Prepared tasks that a running process uses stay.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sandboxgym import data
from sandboxgym.cli import FAILED, OK
from sandboxgym.cli.download import LOCK, SCRATCH
from sandboxgym.cli.support.printing import nbytes_text
from sandboxgym.registration import caches as cache_directories
from sandboxgym.registration import cards, data_sets, hook
from sandboxgym.system import run_directories
from sandboxgym.system.atomic import is_temporary
from sandboxgym.system.run_directories import Leftover

_TREES = ("root", "files")
"""Directories in caches with file systems of sandboxes, whose hidden files are left alone."""


def main(argv: Sequence[str]) -> int:
    """Run ``sandboxgym gc``; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="sandboxgym gc", description="Remove leftovers of killed processes. Files in use stay."
    )
    parser.add_argument("--dry-run", action="store_true", help="only report what would be removed")
    parser.add_argument("--all", action="store_true", help="also remove caches (compiled games, indices)")
    options = parser.parse_args(argv)
    found = run_directories.reap(dry_run=options.dry_run)
    clearing = {name: card.clear_cache for card in cards().values() if card.clear_cache for name in card.caches}
    for path, what in stale_files():
        found.append(_remove(path, what, options.dry_run))
    for path, what in caches() if options.all else ():
        if path.name in clearing:
            found += _remove_unused(path, what, clearing[path.name], options.dry_run)
        else:
            found.append(_remove(path, what, options.dry_run))
    for item in found:
        verb = "removed" if item.removed else "would remove" if options.dry_run and not item.note else "kept"
        note = f": {item.note}" if item.note else ""
        print(f"{verb} {item.what} {item.path} ({nbytes_text(item.nbytes)}){note}")
    gone = [item for item in found if item.removed or (options.dry_run and not item.note)]
    print(
        f"{'would remove' if options.dry_run else 'removed'} {len(gone)}, "
        f"{nbytes_text(sum(item.nbytes for item in gone))}"
    )
    return FAILED if any(item.note for item in found) else OK


def stale_files() -> Iterator[tuple[Path, str]]:
    """Leftovers of interrupted downloads and writes, older than a day and not in use."""
    roots = {data.directory(dataset) for dataset in data_sets().values()}
    for root in sorted(roots):
        scratch = root / SCRATCH
        if not scratch.is_dir() or run_directories.is_locked(scratch / LOCK):
            continue
        yield from ((path, "interrupted download") for path in sorted(scratch.iterdir()) if _is_stale(path))
    for root in sorted({*roots, data.data_dir(), data.cache_dir(), run_directories.runtime_dir(create=False)}):
        yield from ((path, "temporary file") for path in _temporaries(root, is_temporary))
    for cache, _ in caches():
        for folder, folders, _ in os.walk(cache):  # written only by this package: hidden files are temporary
            folders[:] = [name for name in folders if name not in _TREES]
            yield from ((path, "temporary file") for path in _temporaries(Path(folder), _is_hidden))


def caches() -> Iterator[tuple[Path, str]]:
    """Existing caches."""
    for name, holds in cache_directories().items():
        path = data.cache_dir() / name
        if path.is_dir() and not path.is_symlink():
            yield path, f"cache ({holds})"


def _is_hidden(name: str) -> bool:
    return name.startswith(".")


def _temporaries(folder: Path, is_one: Callable[[str], bool]) -> Iterator[Path]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if is_one(path.name) and path.is_file() and not path.is_symlink() and _is_stale(path):
            yield path


def _is_stale(path: Path) -> bool:
    try:
        return run_directories.older_than(path, run_directories.STALE_SECONDS)
    except FileNotFoundError:
        return False


def _remove_unused(path: Path, what: str, clear: str, dry_run: bool) -> list[Leftover]:
    """Remove the unused entries of a cache that processes or a daemon may use, or the whole cache if none is used."""
    found: list[Leftover] = hook(clear)(dry_run=dry_run)
    used = [item for item in found if item.note]
    if used:
        return used if dry_run else found
    return [*(() if dry_run else found), _remove(path, what, dry_run)]


def _remove(path: Path, what: str, dry_run: bool) -> Leftover:
    try:
        nbytes = run_directories.tree_nbytes(path)
        if not dry_run:
            run_directories.remove_tree(path)
        return Leftover(path, what, nbytes, removed=not dry_run)
    except OSError as error:
        return Leftover(path, what, 0, removed=False, note=str(error))
