"""``python -m sandboxgym.bench NAME``."""

import sys

from sandboxgym.cli import main

sys.exit(main(["bench", *sys.argv[1:]]))
