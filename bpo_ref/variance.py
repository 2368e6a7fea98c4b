"""The quality of gradient estimators: the command `python -m bpo_ref.variance`, of `experiments/variance.py`."""

from bpo_ref.experiments.variance import main

if __name__ == "__main__":
    main()
