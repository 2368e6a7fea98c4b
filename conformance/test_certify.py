"""Certify environments named on the command line: ``pytest conformance/ --sandboxgym-env sandboxgym/ALFWorld-v0``.

One test per environment and check; no tests without the option.
"""

from __future__ import annotations

from sandboxgym.conformance.test_conformance import test_conformance as test_conformance
