"""Requirements of ALFWorld's reference engine, for ``sandboxgym doctor``."""

from __future__ import annotations

import shutil

from sandboxgym.system.findings import Finding, package_version


def textworld() -> Finding:
    """Look for the original ALFWorld engine and, if it is absent, for the requirements of its build."""
    enables = "ALFWorld's original engine, as a reference"
    versions = {name: package_version(name) for name in ("textworld", "fast-downward-textworld", "alfworld")}
    missing = [name for name, version in versions.items() if version is None]
    if not missing:
        return Finding("textworld", "ok", ", ".join(f"{n} {v}" for n, v in versions.items()), enables)
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    cxx = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    tools = {"a C compiler": compiler, "a C++ compiler": cxx, "cmake": shutil.which("cmake")}
    absent = [name for name, path in tools.items() if path is None]
    fix = "pip install 'textworld[pddl]' alfworld"
    if absent:
        return Finding(
            "textworld",
            "missing",
            f"without {', '.join(missing)}, nor {', '.join(absent)} to build them",
            enables,
            f"apt-get install build-essential cmake && {fix}",
        )
    return Finding("textworld", "missing", f"without {', '.join(missing)}; the compilers are there", enables, fix)


PROBES = (textworld,)
