"""Attacking program: ``python -m sandboxgym.attack.attacker BACKEND PART PATTERN IMAGE``; see ``run.py``."""

from __future__ import annotations

import logging
import sys

from sandboxgym.attack.run import work

if __name__ == "__main__":
    logging.getLogger("sandboxgym").addHandler(logging.NullHandler())  # attacked sandboxes warn of much
    work(*sys.argv[1:])
