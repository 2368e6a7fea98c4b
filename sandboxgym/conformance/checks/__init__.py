"""The checks, one module per theme; `sandboxgym.conformance.runner.all_checks` imports them in order."""
