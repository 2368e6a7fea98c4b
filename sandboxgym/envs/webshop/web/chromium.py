"""The Chromium of a process: found, launched once, driven from a thread of its own, gone with its last user.

1. Playwright's objects belong to the event loop that they were made in. That loop has its own thread, so environments
   can be used from any thread, from several at once, and where another event loop is running.
2. All users in a process share one browser process tree; each has a context of its own (`Chromium.open`).
3. A context reaches one address and nothing else: all other requests go to a proxy that does not exist.
4. However the process ends, the browser ends too: its driver sees the pipe to the process close, and the browser that
   to the driver. If all are killed at once, the profile's directory is left; it is recorded in a run directory and
   removed by the next `sandboxgym.system.run_directories.reap`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gymnasium.error import DependencyNotInstalled

from sandboxgym.envs.webshop.web.leases import Leases
from sandboxgym.system import proc, run_directories

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext, Playwright

T = TypeVar("T")
VARIABLE = "SANDBOXGYM_CHROMIUM"
"""Environment variable with the path of the executable."""
ON_PATH = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
)
"""Names of executables on the PATH, a headless shell first: without windows, a context costs a sixth of the work."""
KIND = "browser"
_PROFILE = "playwright_chromiumdev_profile-"
_PROFILES = "profiles.txt"
_FLAGS = (
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-domain-reliability",
    "--disable-sync",
    "--disable-smooth-scrolling",
    "--font-render-hinting=none",
    "--no-first-run",
)
_PATIENCE = 120_000
"""Timeout in milliseconds, long enough for a busy machine."""
_NOWHERE = "http://127.0.0.1:1"
_INSTALL = f"playwright install chromium, or install your system's package and set {VARIABLE} to the executable"

run_directories.register_reaper(KIND, "sandboxgym.envs.webshop.web.chromium:reap")


class BrowserError(RuntimeError):
    """Raised if the browser failed; the environment is as before the call and can be used again."""


def chosen_executable(named: str | os.PathLike[str] | None) -> str:
    """Executable chosen by argument or by ``$SANDBOXGYM_CHROMIUM``; "" if none was.

    Raises:
        DependencyNotInstalled: there is no such file.
    """
    path = os.fspath(named) if named is not None else os.environ.get(VARIABLE, "")
    if not path:
        return ""
    found = shutil.which(path)
    if found is None:
        who = "the argument executable" if named is not None else f"${VARIABLE}"
        raise DependencyNotInstalled(f"{who} names {path!r}, which is not executable. Run: {_INSTALL}")
    return found


class Chromium:
    """A running browser; use `leases` to share one within the process.

    Args:
        executable: "" takes Playwright's own, else the first of `ON_PATH`.

    Raises:
        DependencyNotInstalled: Playwright or a browser is missing, or the browser does not start.
    """

    def __init__(self, executable: str) -> None:
        try:
            import playwright.async_api
        except ImportError as error:
            raise DependencyNotInstalled("the browser needs Playwright: pip install 'sandboxgym[browser]'") from error
        self._errors = (playwright.async_api.Error, playwright.async_api.TimeoutError)
        self._playwright: Playwright | None = None
        self._browser: Browser | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="sandboxgym-browser")
        run_directories.reap()
        self._record = run_directories.claim(KIND)
        self._thread.start()
        try:
            self.call(self._start(executable))
        except BaseException:
            self.close()
            raise

    @property
    def alive(self) -> bool:
        """Tell whether the browser is still running."""
        return self._browser is not None and self._browser.is_connected()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the browser's thread and wait for it.

        Raises:
            BrowserError: Playwright reported an error.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except self._errors as error:
            raise BrowserError(str(error).partition("\nCall log:")[0]) from error
        except BaseException:
            future.cancel()
            raise

    async def open(self, address: str, viewport: tuple[int, int], storage: Any = None) -> BrowserContext:
        """Open a context that reaches one address only.

        Args:
            address: host and port.
            viewport: width and height in pixels.
            storage: cookies and local storage, in the form that ``BrowserContext.storage_state`` returns.
        """
        assert self._browser is not None
        context = await self._browser.new_context(
            viewport={"width": viewport[0], "height": viewport[1]},
            device_scale_factor=1,
            locale="en-US",
            timezone_id="UTC",
            color_scheme="light",
            reduced_motion="reduce",
            service_workers="block",
            accept_downloads=False,
            proxy={"server": _NOWHERE, "bypass": address},
            storage_state=storage,
        )
        context.set_default_timeout(_PATIENCE)
        return context

    def close(self) -> None:
        """End the browser and its driver. Idempotent."""
        if self._thread.is_alive():
            with contextlib.suppress(
                Exception
            ):  # the browser may be gone: its thread and driver are ended all the same
                asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(timeout=30)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
        run_directories.give_back(self._record)

    async def _start(self, executable: str) -> None:
        from playwright.async_api import async_playwright

        self._playwright = await async_playwright().start()
        chromium = self._playwright.chromium
        root = hasattr(os, "geteuid") and os.geteuid() == 0
        flags = [*_FLAGS, *(("--no-sandbox",) if root else ())]
        on_path = [path for path in map(shutil.which, ON_PATH) if path][:1]
        # Quirk: a launch of Playwright's own that was never installed leaves an empty profile behind.
        own = [None] if any(Path(chromium.executable_path).parents[2].glob("chromium*")) else []
        for path in [executable] if executable else [*own, *on_path]:
            try:
                self._browser = await chromium.launch(
                    executable_path=path,
                    args=flags,
                    proxy={"server": _NOWHERE},
                    handle_sigint=False,  # an interrupted program ends the browser itself
                    handle_sigterm=False,
                    handle_sighup=False,
                )
                break
            except self._errors as error:
                if path is None and "Executable doesn't exist" in str(error):
                    continue  # Playwright's own was never installed
                fatal = re.search(r"FATAL:\S* (.*)", str(error))
                why = fatal[1] if fatal else str(error).strip().partition("\n")[0]
                what = path or "Playwright's Chromium"
                raise DependencyNotInstalled(f"{what} does not start ({why}). To get another: {_INSTALL}") from error
        else:
            raise DependencyNotInstalled(f"no Chromium was found. Run: {_INSTALL}")
        (self._record / _PROFILES).write_text("\n".join(_profiles()), encoding="utf-8")

    async def _stop(self) -> None:
        with contextlib.suppress(Exception):  # the browser may have crashed: its driver is ended all the same
            if self._browser is not None:
                await self._browser.close()
        if self._playwright is not None:
            await self._playwright.stop()


leases: Leases[str, Chromium] = Leases(Chromium)
"""Leases of browsers, by executable."""


def reap(directory: Path) -> None:
    """Delete the profiles that a run directory records, if they still exist."""
    record = directory / _PROFILES
    lines = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
    for path in map(Path, lines):
        if path.name.startswith(_PROFILE) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)


def _profiles() -> list[str]:
    """Find the profile directories of the browsers under this process, where ``/proc`` tells."""
    profiles = set()
    for pid in proc.descendants(os.getpid()):
        with contextlib.suppress(OSError):
            for word in Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace").split("\0"):
                name, _, profile = word.partition("=")
                here = os.path.dirname(profile) == os.path.realpath(tempfile.gettempdir())
                if name == "--user-data-dir" and here and os.path.basename(profile).startswith(_PROFILE):
                    profiles.add(profile)
    return sorted(profiles)
