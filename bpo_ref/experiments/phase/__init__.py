"""A phase diagram of gradient estimators (docs/results/phase-diagram.md): when a baseline is enough, when forks pay."""
