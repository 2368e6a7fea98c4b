"""``sandboxgym webshop build DIR``: make what WebShop keeps on disk of a catalogue before an environment needs it.

``gymnasium.make`` makes the same by itself and shows no progress. Files that are there and intact are kept, so an
interrupted build continues with the step at which it was; processes that are started meanwhile wait for it.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gymnasium.error import DependencyNotInstalled

from sandboxgym.cli import OK, CommandError
from sandboxgym.cli.support.printing import harmless, nbytes_text
from sandboxgym.cli.support.progress import progress
from sandboxgym.data import cache_dir
from sandboxgym.envs.webshop.catalogues import catalogue as catalogues
from sandboxgym.envs.webshop.catalogues.memory_mapped import open_store
from sandboxgym.envs.webshop.catalogues.official_data import find_files
from sandboxgym.envs.webshop.retrieval import search
from sandboxgym.envs.webshop.retrieval.analysis import check_installed
from sandboxgym.envs.webshop.retrieval.index_build import IndexingFailed
from sandboxgym.envs.webshop.shop import open_shop
from sandboxgym.system.run_directories import tree_nbytes


def main(argv: Sequence[str]) -> int:
    """Run ``sandboxgym webshop``; returns the exit status."""
    parser = argparse.ArgumentParser(prog="sandboxgym webshop", description="Prepare WebShop's catalogues.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    build = commands.add_parser("build", help="make what is kept on disk of a catalogue: products, index, goals")
    build.add_argument("catalogue", metavar="DIR", help="the official files, as in gymnasium.make(…, catalogue=DIR)")
    build.add_argument("--goals", choices=("synthetic", "human"), default="synthetic", help="kind of goals")
    build.add_argument("--price-seed", type=int, default=0, metavar="SEED", help="seed of prices (default: 0)")
    options = parser.parse_args(argv)
    try:
        return _build(options)
    except (ValueError, IndexingFailed, DependencyNotInstalled, OSError) as error:
        raise CommandError(harmless(str(error))) from error


def _build(options: argparse.Namespace) -> int:
    check_installed()
    began = time.monotonic()
    files = find_files(Path(os.path.abspath(options.catalogue)))
    size = files.products.stat().st_size
    large = size > catalogues.IN_MEMORY_BYTES
    if large:
        with _shown("products", size, "B") as told:
            open_store(files, told=told)
    products = catalogues.load_catalogue(options.catalogue)
    if len(products) > search.IN_MEMORY:
        with _shown("index", len(products), "products") as told:
            search.build_index(products, told=told)
    shop = open_shop(options.catalogue, options.goals, price_seed=options.price_seed)
    kept = [path for path in (products.directory, cache_dir() / "webshop" / products.digest[:32]) if path is not None]
    nbytes = sum(tree_nbytes(path) for path in kept if path.is_dir())
    where = f"{nbytes_text(nbytes)} under {cache_dir() / 'webshop'}" if nbytes else "small enough to be kept in memory"
    counts = f"{len(products):,} products, {len(shop.goals):,} {options.goals} goals"
    print(f"{harmless(products.name)}: {counts}, {where}; {time.monotonic() - began:.0f} s")
    return OK


@contextmanager
def _shown(what: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Yield a function that shows how much is done; nothing is shown of what was made before."""
    bar, done = progress(unit=unit), 0

    def told(now: int) -> None:
        nonlocal done
        if not done:
            bar.start(what, 0, total)
        bar.advance(max(now, 1) - done)
        done = max(now, 1)

    try:
        yield told
        if done:
            bar.advance(total - done)
    finally:
        bar.finish()
