"""Fixtures shared by all tests: the toy environments and the data of the parity tests."""

from __future__ import annotations

import gc
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Folders with modules that tests of other folders import, by their bare names.
TESTS = Path(__file__).parent
SHARED = (
    *("", "fleet", "support", "tools", "repository", "sandbox", "tree"),
    *("bpo_ref", "bpo_ref/adapters", "bpo_ref/distributed", "bpo_ref/estimators"),
    *("bpo_ref/learning", "bpo_ref/running", "bpo_ref/sampling"),
    *("conformance", "conformance/probes", "envs/harbor", "envs/swebench/rows", "envs/webshop"),
)
sys.path[:0] = [str(TESTS / room) for room in SHARED]

import in_time  # noqa: E402
import slowest  # noqa: E402
import toy_envs  # noqa: E402
from components import missing as missing  # noqa: E402  # for test modules too
from in_time import pytest_configure as pytest_configure  # noqa: E402
from in_time import pytest_runtest_setup as pytest_runtest_setup  # noqa: E402
from in_time import pytest_terminal_summary as pytest_terminal_summary  # noqa: E402

from sandboxgym.system import directories  # noqa: E402

toy_envs.register()

try:
    from hypothesis import HealthCheck, settings

    # An example that is slow beside other tests is no fault of what it shows.
    settings.register_profile(
        "beside others",
        settings.get_profile(settings.get_current_profile_name()),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("beside others")
except ImportError:
    pass

gc.disable()  # until `pytest_collection_finish`: what is collected stays


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name long parameters by their beginning and a digest.

    pytest exports the name of the running test, and no process starts with a variable of more than 128 KiB.
    """
    if not isinstance(val, str | bytes) or len(val) <= 200:
        return None
    content = val if isinstance(val, bytes) else val.encode(errors="surrogatepass")
    return f"{val[:40]!r}-{len(val)}-{hashlib.sha256(content).hexdigest()[:8]}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests in `slowest.txt`, which `make test` leaves out; an empty SANDBOXGYM_SLOWEST leaves them fast."""
    slow = slowest.read() if os.environ.get("SANDBOXGYM_SLOWEST", "left out") else frozenset()
    for item in items:
        if slowest.ungrouped(item.nodeid) in slow:
            item.add_marker(pytest.mark.slow)
    in_time.pytest_collection_modifyitems(items)


@pytest.fixture(autouse=True)
def _variables_of_python() -> Iterator[None]:
    """Undo what a test does to the variables of Python, which the processes of later tests would inherit."""
    before = _of_python()
    yield
    for name in _of_python():
        if name not in before:
            del os.environ[name]
    os.environ.update(before)


def _of_python() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("PYTHON")}


def pytest_collection_finish() -> None:
    """Spare the garbage collector what lives as long as the session: modules and collected tests, a million objects.

    A whole collection among them takes most of a second, and the conformance suite makes dozens in each of its runs.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


# A shell ignores Ctrl-C for what it starts in the background, and so would every program that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def cache_of_this_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep compiled games in a directory of the test session, not in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SANDBOXGYM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def no_deep_trees_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Move trees deeper than Python's recursion limit here: pytest fails when it deletes them, three sessions later."""
    yield
    for folder, below, _ in os.walk(tmp_path_factory.getbasetemp()):
        if folder.count("/") > 300 or len(folder) > 2000:
            below.clear()
            directories.remove(folder)


@pytest.fixture(scope="session")
def parity_data() -> Path:
    """Folder with recordings of the original environments."""
    folder = os.environ.get("SANDBOXGYM_PARITY_DATA")
    if not folder:
        missing("data", "SANDBOXGYM_PARITY_DATA is not set (it names the folder with the recordings)")
    path = Path(folder).resolve()
    if not path.is_dir():
        missing("data", f"SANDBOXGYM_PARITY_DATA={folder} is not a directory")
    return path


@pytest.fixture(scope="session")
def alfworld_games(parity_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Official games, unpacked: ``train``, ``valid_train``, ``valid_seen`` and the 16 in the old grammar."""
    target = tmp_path_factory.mktemp("alfworld")
    for archive in sorted((parity_data / "alfworld").glob("games_*.tar.xz")):
        with tarfile.open(archive) as tar:
            tar.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.3 and older have none
            tar.extractall(target)
    yield target
    import shutil

    shutil.rmtree(target, ignore_errors=True)  # 350 MB; pytest would keep three of them


TypeCheck = Callable[[Path], subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def type_check(tmp_path_factory: pytest.TempPathFactory) -> TypeCheck:
    """Check the types of a file or folder strictly. One cache: mypy reads NumPy and Gymnasium for 13 seconds."""
    cache = tmp_path_factory.mktemp("mypy")

    def check(path: Path) -> subprocess.CompletedProcess[str]:
        options = ["--strict", "--config-file", "", "--cache-dir", str(cache), "--follow-imports", "silent"]
        command = [sys.executable, "-m", "mypy", *options, str(path)]
        return subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)

    return check


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from this checkout without isolation: nothing is downloaded."""
    pytest.importorskip("hatchling")
    pytest.importorskip("build")
    out = tmp_path_factory.mktemp("dist")
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(out),
        str(Path(__file__).parents[1]),
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder]).returncode:
        missing("mount", "this process cannot mount a disk")
    yield folder
    gc.collect()  # errors hold the open files that they are about
    subprocess.run(["umount", folder], check=True)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A Chromium without windows; each test opens contexts of its own in it."""
    found = os.environ.get("SANDBOXGYM_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if not found:
        missing("browser", "no Chromium was found")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("browser", "playwright is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()
