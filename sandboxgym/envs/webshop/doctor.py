"""Requirements of the browser environment, for ``sandboxgym doctor``."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from sandboxgym.system.findings import Finding, package_version


def browser() -> Finding:
    """Look for Playwright and a Chromium for it; neither is started."""
    enables = "WebShop in a real browser"
    version = package_version("playwright")
    chromium = _chromium()
    if version is None:
        found = f"; Chromium at {chromium}" if chromium else ""
        fix = "pip install playwright && playwright install --with-deps chromium"
        return Finding("browser", "missing", f"Playwright is not installed{found}", enables, fix)
    if chromium is None:
        fix = "playwright install --with-deps chromium"
        return Finding("browser", "missing", f"Playwright {version}, but no Chromium", enables, fix)
    return Finding("browser", "ok", f"Playwright {version}, Chromium at {chromium}", enables)


def _chromium() -> str | None:
    named = os.environ.get("PLAYWRIGHT_BROWSERS_PATH")
    folders = [Path(named)] if named and named != "0" else []
    folders += [Path.home() / ".cache/ms-playwright", Path.home() / "Library/Caches/ms-playwright"]
    for folder in folders:
        found = sorted(folder.glob("chromium*"))
        if found:
            return str(found[-1])
    for name in ("chromium", "chromium-browser", "google-chrome"):
        command = shutil.which(name)
        if command:
            return command
    return None


PROBES = (browser,)
