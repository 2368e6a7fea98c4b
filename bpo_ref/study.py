"""Variants of an algorithm over several seeds: the command `python -m bpo_ref.study`, of `experiments/sweep.py`."""

from bpo_ref.experiments.sweep import main

if __name__ == "__main__":
    main()
