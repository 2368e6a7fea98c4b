"""The checks, one module a theme; `sandboxgym.conformance.runner.checks` imports them in order."""
