"""Test of CRIU on this machine, as a program of its own: ``python -m sandboxgym.sandbox.checkpoint.checkpointer``."""

from __future__ import annotations

from sandboxgym.sandbox.checkpoint import criu


def _main() -> int:
    """Print, for ``sandboxgym doctor``, the CRIU that works, or why none does."""
    program = criu.find()
    if program is None:
        print("; ".join(criu.failures()))
        return 1
    memory = "bit by bit" if criu.brings_pages(program) else f"as a whole, for {criu.NO_PAGES}"
    print(f"version {criu.version(program)} at {program}; much memory is restored {memory}")
    return 0


if __name__ == "__main__":
    raise SystemExit(_main())
