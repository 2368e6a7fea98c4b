"""The quality of gradient estimators: the command `python -m bpo_ref.variance`, of `experiments/variance.py`."""

from __future__ import annotations

import tyro

from bpo_ref.experiments.variance import VarianceStudy, table


def main() -> None:
    """Run the command ``python -m bpo_ref.variance``."""
    study = tyro.cli(VarianceStudy, config=(tyro.conf.FlagConversionOff,))
    from bpo_ref.experiments.laboratory import run  # imports PyTorch, which takes seconds: --help needs none of it

    try:
        print(table(run(study)))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
