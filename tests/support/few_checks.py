"""A plugin for a pytest within a test: tests that ask for the whole conformance suite get a few checks of it.

    python -m pytest -p few_checks        # with this folder on PYTHONPATH

For packages that another test certifies by all checks.
"""

from __future__ import annotations

from functools import partial

from sandboxgym import conformance

FEW = ("api.protocol", "restore.trace_equality", "fork.isolation", "durable.cross_process")

conformance.check_snapshot = partial(conformance.check_snapshot, only=FEW)
