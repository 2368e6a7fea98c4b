"""Measure and draw the phase diagram.

    python -m bpo_ref.experiments.phase chain          # about 6 minutes of processor time
    python -m bpo_ref.experiments.phase alfworld       # about 3
    python -m bpo_ref.experiments.phase place ALFWorld --checkpoint runs/phase/alfworld/checkpoint \
        --config bpo_ref/configs/alfworld-tiny.yaml
    python -m bpo_ref.experiments.phase table

``chain`` and ``alfworld`` measure the cells that docs/results/data/phase does not have yet, and append them. ``place``
measures L and ρ of a policy and prints them with the costs predicted there. If the name that it is given is one of
`diagram.SETTINGS`, it also appends them to the data; if the data have them already, it only prints those. ``table``
prints the tables of measurements. `bpo_ref.experiments.pages` makes the page's tables and its figure.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from bpo_ref.experiments.phase.diagram import FOLDER, SETTINGS, DiagramSetting, cost_at, read_settings, table
from bpo_ref.experiments.phase.measure import rounded, sweep
from bpo_ref.experiments.variance import VarianceStudy

DOCS = Path("docs")


def place(given: argparse.Namespace) -> None:
    """Print a policy's place in the diagram, and the costs predicted there.

    If the name is that of a row of the page, the result is also appended to the page's data. A row that the data have
    already is printed and not measured again.
    """
    from bpo_ref.experiments.phase.placing import place as measured  # imports PyTorch

    for setting in read_settings(given.docs):
        if setting.name == given.name:
            print(f"{given.name} is a row of the page already; give another policy another name\n{_described(setting)}")
            return
    found = measured(
        VarianceStudy(
            given.checkpoint,
            given.config,
            env_kwargs=tuple(given.env_kwargs),
            methods=(),
            tasks=given.tasks,
            repeats=given.repeats,
            pilot=given.pilot,
            seed=given.seed,
        )
    )
    setting = DiagramSetting(
        given.name,
        found.lateness,
        found.quality,
        found.reward,
        found.turns,
        given.tasks,
        (given.repeats, given.pilot),
    )
    if given.name in SETTINGS:
        with (given.docs / FOLDER / "settings.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(rounded(asdict(setting))) + "\n")
    print(_described(setting))


def _described(setting: DiagramSetting) -> str:
    late, quality = setting.lateness, setting.quality
    costs = {method: cost_at(method, late.value, quality.value) for method in ("rloo-pooled", "bpo")}
    predicted = ", ".join(f"`{method}` {cost:.2f}" for method, cost in costs.items())
    return (
        f"{setting.name}: L = {late}, ρ = {quality} (90 % intervals over {setting.tasks} tasks), "
        f"mean return {setting.reward:.2f}, {setting.turns:.1f} turns\n"
        f"predicted by the chain's formula, tokens for equal gradient variance relative to RLOO: {predicted}"
    )


def main() -> None:
    """Run the command ``python -m bpo_ref.experiments.phase``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of the pages")
    commands = parser.add_subparsers(dest="command", required=True)
    for world in ("chain", "alfworld"):
        commands.add_parser(world, help="measure the cells that are missing")
    commands.add_parser("table", help="print the tables")
    placing = commands.add_parser("place", help="measure L and ρ of a policy")
    placing.add_argument("name", help="any; that of a row of the page is added to its data")
    placing.add_argument("--checkpoint", required=True)
    placing.add_argument("--config", required=True)
    placing.add_argument("--env-kwargs", nargs="*", default=[])
    placing.add_argument("--tasks", type=int, default=24)
    placing.add_argument("--repeats", type=int, default=2, help="batches measured")
    placing.add_argument("--pilot", type=int, default=4, help="batches that V̂ learns from")
    placing.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.command == "place":
        place(given)
    elif given.command == "table":
        print("\n\n".join(table(given.docs, kind) for kind in ("chain", "alfworld", "settings")))
    else:
        sweep(given.command, given.docs / FOLDER / f"{given.command}.jsonl")


if __name__ == "__main__":
    main()
