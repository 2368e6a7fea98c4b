"""Requirements of grading, for ``sandboxgym doctor``."""

from __future__ import annotations

from sandboxgym.system.findings import Finding, package_version


def swebench() -> Finding:
    """Look for the official grading code."""
    enables = "grading SWE-bench by the official code"
    version = package_version("swebench")
    if version is None:
        return Finding("swebench", "missing", "not installed", enables, "pip install 'swebench>=5'")
    if not version.startswith(("5.", "6.")):
        return Finding("swebench", "limited", f"{version}, expected 5 or newer", enables, "pip install 'swebench>=5'")
    return Finding("swebench", "ok", version, enables)


PROBES = (swebench,)
