"""Command line of the conformance suite; see the package's docstring for what is coming."""

from __future__ import annotations

import sys

import sandboxgym.conformance


def main() -> int:
    """Say what is coming; exit status 3 (usage), for nothing was checked."""
    print(sandboxgym.conformance.__doc__, file=sys.stderr)
    return 3


if __name__ == "__main__":
    sys.exit(main())
