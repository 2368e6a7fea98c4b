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
    "full": "full snapshots: forks with running processes, against files alone, replay and Docker",
    "e2b": "twenty live forks of a sandbox with a large process, in this process and by E2B's API",
    "fidelity": "state that a sandbox's snapshot keeps, loses and leaks, on every backend",
    "cheats": "cheats on SWE-bench tasks: our verdicts, the official harness's, and the findings",
    "faults": "faults that sandboxes survive, and the traces they leave",
    "pool": "a pool of workers stepping many environments",
    "fleet": "a Ray cluster: steps, forks, recovery, many environments; simulated for a thousand nodes",
    "rollouts": "rollouts whose paths advance by themselves, against lockstep",
    "table": "all of it in a quarter of an hour: one row per operation, beside what a user would do instead",
    "compare": "two such tables: what became slower by more than the noise",
}
"""Benchmarks with their subjects; the first is the default."""
MODULES = {"fleet": "fleet.run", "table": "table.run", "compare": "table.compare"}
"""Modules of the benchmarks that are not in one of their own name."""
