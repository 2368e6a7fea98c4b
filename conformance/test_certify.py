"""Certifies environments named on the command line: ``pytest conformance/ --sandboxgym-env sandboxgym/ALFWorld-v0``.

One test for each environment and check; nothing without the option.
"""

from __future__ import annotations

from sandboxgym.conformance.test_conformance import test_conformance as test_conformance
