"""Measurements made with the trainer: comparisons, tables, plots, benchmarks. The trainer imports none of them."""
