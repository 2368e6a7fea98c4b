"""Runs side by side, as tables and a plot: the command `python -m bpo_ref.compare`, of `experiments/tables.py`."""

from bpo_ref.experiments.tables import main

if __name__ == "__main__":
    main()
