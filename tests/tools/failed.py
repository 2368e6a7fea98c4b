"""Prepare ``pytest --last-failed`` after a run with ``--dist loadgroup``: without workers ids have no group.

The names stay in a file, which `.ci/run` shows at its end. What passes alone depends on what else runs: a fault, too.
Exits with a message unless one to three tests failed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from slowest import ungrouped

CACHE = Path(".pytest_cache/v/cache/lastfailed")
NAMED = Path(".pytest_cache/failed_beside_others.txt")
"""File with the names of what is run again, one per line."""
MOST = 3


def main() -> str | None:
    """Rewrite what pytest remembers; returns what to exit with."""
    if not CACHE.exists():
        return "pytest has not said which tests failed: it was stopped before its end"
    failed = {ungrouped(name): True for name in json.loads(CACHE.read_text())}
    if not 0 < len(failed) <= MOST:
        return f"{len(failed)} tests failed"
    CACHE.write_text(json.dumps(failed, indent=2))
    NAMED.write_text("".join(f"{name}\n" for name in failed))
    return None


if __name__ == "__main__":
    sys.exit(main())
