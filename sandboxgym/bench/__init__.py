"""Benchmarks, ``sandboxgym bench NAME`` or ``python -m sandboxgym.bench NAME``: ratios of one run, never times alone.

Each module measures one thing beside its alternatives and prints Markdown; ``docs/results/details/`` holds what they
printed.
"""

NAMES = {
    "snapshots": "snapshot, restore and fork against replaying the prefix",
    "alfworld": "ALFWorld against the original engine",
    "webshop": "WebShop's text environment against the original",
    "browser": "WebShop in a real browser against its text environment",
    "search": "WebShop's search: ranking and latency, up to 1.18 million products",
    "swebench": "SWE-bench on a large repository: steps, resets, snapshots, verdicts against the official harness",
    "sandbox": "sandboxes: snapshots, commands and forks against Docker and others",
    "full": "full snapshots: sandboxes forked with what runs in them, against files alone, replay and Docker",
    "fidelity": "what a sandbox's snapshot keeps, loses and leaks, on every backend",
    "cheats": "cheats on SWE-bench tasks: the verdicts here and of the official harness, and what is named",
    "faults": "what sandboxes survive, and what is left of them",
    "pool": "a pool of workers stepping many environments",
}
"""Benchmarks, each a module of that name, and what they measure; the first is the default."""
