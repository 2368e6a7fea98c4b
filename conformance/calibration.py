"""A/A calibration: how often the statistical tests reject when both samples come from one distribution.

    python conformance/calibration.py --runs 2000 [--markdown docs/conformance/calibration.md]

Each run draws two samples of one distribution and applies every test to them, at the sample sizes that the suite uses.
A test may reject no more often than its level. If the page was made with the same arguments and the same code of tests
and draws, it is kept; ``--all`` makes it anew. Exit codes: 0 all tests keep their levels, 1 some don't.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sandboxgym.conformance.digest import source_digest
from sandboxgym.conformance.stats import tests as st

LEVELS = (0.001, 0.01, 0.05, 0.2)
SIZE = 60
"""Futures per side, in most of the tests."""
DRAWS = 1999
"""Most permutations of a test; its smallest p-value is 1 in 2000."""
TESTS = {
    "few": "homogeneity (χ²), three categories",
    "many": "homogeneity (χ²), a long tail of categories merged into six",
    "strata": "homogeneity (χ²) within strata of another distribution each",
    "ranks": "Wilcoxon's rank sum, heavy tails",
    "energy": "energy distance of pairs of numbers, heavy tails",
    "dependence": "agreement of siblings",
    "any, by Holm": "any of these six, adjusted by Holm's procedure",
}


def simulated(rng: np.random.Generator) -> dict[str, float]:
    """The p-values of one comparison of samples from one distribution, by test."""
    few = rng.choice(3, size=2 * SIZE, p=[0.7, 0.2, 0.1])
    many = st.merged(rng.geometric(0.05, size=2 * SIZE) - 1, 6)
    rows = rng.normal(size=(2 * SIZE, 2)) ** 3
    strata = rng.integers(3, size=2 * SIZE)
    shifted = (few + strata) % 3  # depends on the stratum, and on nothing else
    p = {
        "few": st.homogeneity("", few, SIZE, rng, DRAWS).p,
        "many": st.homogeneity("", many, SIZE, rng, DRAWS).p,
        "strata": st.homogeneity("", shifted, SIZE, rng, DRAWS, strata=strata).p,
        "ranks": st.ranks("", rows[:, 0], SIZE, rng, DRAWS).p,
        "energy": st.energy("", rows[:SIZE], SIZE // 2, rng, DRAWS).p,
        "dependence": st.dependence("", rng.choice(3, size=(SIZE // 3, 3)), rng, DRAWS).p,
    }
    return {**p, "any, by Holm": min(st.holm(p).values())}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="How often the tests reject where there is nothing to find.")
    parser.add_argument("--runs", type=int, default=2000, help="simulated comparisons; default 2000")
    parser.add_argument("--seed", type=int, default=0, help="of all draws; default 0")
    parser.add_argument("--all", action="store_true", help="make the page anew, whatever made it")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the page here")
    options = parser.parse_args(arguments)
    if options.markdown is not None and options.markdown.exists() and not options.all:
        made = options.markdown.read_text(encoding="utf-8")
        if made_by(options.runs, options.seed) in made and "Every test keeps every level" in made:
            print(f"{options.markdown} is kept: the same tests made it")
            return 0
    rng = np.random.default_rng(options.seed)
    start = time.perf_counter()
    rejected = {name: dict.fromkeys(LEVELS, 0) for name in TESTS}
    for run in range(options.runs):
        for name, p in simulated(rng).items():
            for level in LEVELS:
                rejected[name][level] += p <= level
        if (run + 1) % 100 == 0:
            print(f"{run + 1}/{options.runs}, {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    page, kept = report(rejected, options.runs, options.seed)
    print(page)
    if options.markdown is not None:
        options.markdown.write_text(page, encoding="utf-8")
    return 0 if kept else 1


def made_by(runs: int, seed: int) -> str:
    """Line of the page that names the code and the arguments that made it."""
    sources = [source_digest(Path(file).read_text(encoding="utf-8")) for file in (st.__file__, __file__)]
    code = hashlib.sha256("".join(sources).encode()).hexdigest()[:8]
    return f"Tests and draws of version {code}, {runs} runs, seed {seed}, NumPy {np.__version__}."


def report(rejected: dict[str, dict[float, int]], runs: int, seed: int) -> tuple[str, bool]:
    """The page, and whether every 99.9 % interval allows the level."""
    kept = True
    lines = [
        "# A/A calibration",
        "",
        "The statistical checks compare samples. Here both samples of every comparison come from one distribution, so",
        "each rejection is a false alarm: at a level of 0.05 there may be 5 % of them, and few more by chance.",
        "",
        f"`python conformance/calibration.py --runs {runs} --seed {seed}` on {platform.system()} with {os.cpu_count()}",
        f"cores, Python {platform.python_version()}, NumPy {np.__version__}, {time.strftime('%Y-%m-%d')}: {runs}",
        f"comparisons of {SIZE} a side. Rejections of {runs}, and their 95 % interval (Clopper and Pearson):",
        "",
        made_by(runs, seed),
        "",
        "| test | " + " | ".join(f"level {level}" for level in LEVELS) + " |",
        "|---" * (len(LEVELS) + 1) + "|",
    ]
    for name, what in TESTS.items():
        cells = []
        for level, count in rejected[name].items():
            low, high = st.proportion_interval(count, runs)
            cells.append(f"{count} ({low:.2%} to {high:.2%})")
            kept &= st.proportion_interval(count, runs, 0.999)[0] <= level
        lines.append(f"| {what} | {' | '.join(cells)} |")
    told = "Every test keeps every level" if kept else "**Some test rejects too often**"
    lines += ["", f"{told}: the 99.9 % interval of no count lies above its level.", ""]
    return "\n".join(lines), kept


if __name__ == "__main__":
    sys.exit(main())
