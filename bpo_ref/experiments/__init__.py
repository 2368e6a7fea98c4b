"""Everything that is measured with the trainer and is no part of it: comparisons, tables, plots, benchmarks."""
