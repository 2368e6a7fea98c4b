"""Command line ``python -m sandboxgym``, equal to the console script ``sandboxgym``."""

from __future__ import annotations

import sys

from sandboxgym.cli import main

if __name__ == "__main__":
    sys.exit(main())
