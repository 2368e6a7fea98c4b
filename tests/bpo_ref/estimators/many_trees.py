"""Mean gradients with look-ahead over many trees, compared with exact ones: every case of `test_lookahead.py`.

    python tests/bpo_ref/estimators/many_trees.py --trees 20000 --out docs/results/data/lookahead-exact.jsonl

Appends a line per case and prints the table of all lines; cases that the file has are not repeated, so that an
interrupted study continues. 20,000 trees take about half a minute of processor time per case.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from lookahead_cases import CASES, batches_of  # noqa: E402
from tabular import compare, gradients  # noqa: E402

from bpo_ref.train import assign_credit  # noqa: E402


def measured(case: str, trees: int) -> dict[str, object]:
    """Largest |z| and relative error of a case's mean gradient; `batches_of` makes batches of four trees."""
    mdp, args, teach, listed = CASES[case]
    began, memory = time.process_time(), teach(mdp, args)
    sampled = (batch for batch, *_ in batches_of(mdp, args, memory, batches=trees // 4, listed=listed))
    samples = gradients(mdp, sampled, {"": lambda trees: assign_credit(trees, args, memory) and None})[""]
    found = compare(samples, mdp.gradient(args.gamma))
    told = {"z": round(found.z, 3), "critical": round(found.critical, 3), "error": round(found.bias, 4)}
    return {"case": case, "trees": 4 * len(samples), **told, "seconds": round(time.process_time() - began)}


def table(lines: list[dict[str, object]]) -> str:
    """Format the results as a Markdown table."""
    rows = ["| estimator | trees | largest \\|z\\| | bound | relative error |", "|---|---|---|---|---|"]
    return "\n".join(
        rows + [f"| {d['case']} | {d['trees']} | {d['z']} | {d['critical']} | {d['error']} |" for d in lines]
    )


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", type=int, default=20000)
    parser.add_argument("--only", nargs="+", default=list(CASES), metavar="CASE")
    parser.add_argument("--out", type=Path, default=Path("runs/lookahead-exact.jsonl"))
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    for case in options.only:
        if any(line["case"] == case and line["trees"] == options.trees for line in lines):
            continue
        lines.append(measured(case, options.trees))
        with options.out.open("a") as file:
            file.write(json.dumps(lines[-1], ensure_ascii=False) + "\n")
    print(table(lines))


if __name__ == "__main__":
    main()
