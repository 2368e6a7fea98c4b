"""The benchmark of sandboxes: what it deletes, and alternating measurements of two checkouts."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from components import missing

from sandboxgym.bench import sandbox
from sandboxgym.bench.tools import against
from sandboxgym.bench.tools.against import Unavailable, compare, interval, revision, table
from sandboxgym.sandbox.overlay.backend import why_unavailable

ROOT = Path(__file__).parents[2]
FAKE = """
    import time

    class Sandbox:
        def __init__(self, backend):
            if backend == "boom":
                raise RuntimeError("no such luck")
            self.backend = backend

        def execute(self, command):
            time.sleep({pause})

        run = execute

        def start(self):
            return self

        snapshot = start

        def restore(self, snap):
            pass

        def fork(self, k):
            return [Sandbox(self.backend) for _ in range(k)]

        def release(self):
            pass

        def close(self):
            if self.backend == "dies":
                raise SystemExit("it died")

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    def make_sandbox(backend, *, rootfs, allow_unsafe=False, snapshot="filesystem"):
        from sandboxgym.sandbox.base import SandboxUnavailable
        if backend == "docker":
            raise SandboxUnavailable("there is no daemon")
        assert rootfs == "host"
        return Sandbox(backend)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Callable[[str, float], Path]:
    """Makes checkouts whose sandboxes take so many seconds for a command."""

    def make(name: str, pause: float) -> Path:
        package = tmp_path / name / "sandboxgym" / "sandbox"
        package.mkdir(parents=True)
        (package.parent / "__init__.py").touch()
        (package / "__init__.py").touch()
        (package / "base.py").write_text("class SandboxUnavailable(Exception):\n    pass\n")
        (package / "sandbox.py").write_text(textwrap.dedent(FAKE).format(pause=pause))
        return tmp_path / name

    return make


SMALL = {"rounds": 2, "repeats": 3, "boxes": 1}


def test_each_checkout_is_measured_with_its_own_package(tree: Callable[[str, float], Path]) -> None:
    fast, slow = tree("fast", 0.0), tree("slow", 0.02)
    for before, after in ((fast, slow), (slow, fast)):
        pairs = compare(before, after, "overlay", "host", **SMALL)
        both = pairs["seconds", "`execute` of `true`"]
        assert len(both) == 6 and all((new > old) == (after is slow) for old, new in both)
        assert not any("processes" in name for _, name in pairs), "these sandboxes have none"
    assert {name for kind, name in pairs if kind == "seconds"} >= {"start", "snapshot", "restore", "fork", "close"}


def test_a_backend_that_is_not_there_is_said_in_the_table(tree: Callable[[str, float], Path]) -> None:
    one = tree("one", 0.0)
    with pytest.raises(Unavailable, match="there is no daemon"):
        compare(one, one, "docker", "host", **SMALL)
    lines = against.tables(one, ["docker"], "host", **SMALL)
    assert "Not here: there is no daemon" in lines and not any(line.startswith("|") for line in lines)


@pytest.mark.parametrize(("backend", "said"), [("boom", "no such luck"), ("dies", "it died")])
def test_a_child_that_fails_says_why(backend: str, said: str, tree: Callable[[str, float], Path]) -> None:
    one = tree("one", 0.0)
    with pytest.raises(RuntimeError, match=said):
        compare(one, one, backend, "host", **SMALL)


def test_a_table_tells_medians_ratios_and_how_sure_they_are() -> None:
    times = [(0.001 * n, 0.002 * n) for n in range(1, 10)]
    lines = table({("seconds", "start"): times, ("bytes", "kernel"): [(4e3, 5e3), (-1e3, 2e3)]})
    assert "| start | 5.00 ms | 10.00 ms | 2.00 (2.00 to 2.00) |" in lines
    assert "| kernel | 2 kB | 4 kB |  |" in lines, "no ratio where the machine's noise is larger than what is measured"
    assert interval([5.0]) == (5.0, 5.0) and interval([1.0, 9.0]) == (1.0, 9.0)


def test_this_checkout_against_itself(tmp_path: Path) -> None:
    """With copies, which every machine can make."""
    target = tmp_path / "page.md"
    arguments = ["--against", str(ROOT), "--rounds", "1", "--repeats", "1", "--boxes", "1", "--backends", "copy"]
    sandbox.main([*arguments, "--write", str(target)])
    page = target.read_text()
    assert "--against CHECKOUT" in page and str(ROOT) not in page
    assert f"Before: {revision(ROOT)}. After: {revision(ROOT)}." in page
    assert "| snapshot |" in page and "| start |" in page
    assert "| processes, their shares of memory |" in page or not Path("/proc/self/smaps_rollup").exists()


def test_what_is_no_checkout_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sandbox.main(["--against", str(tmp_path)])
    assert "expected a checkout" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        sandbox.main(["--against", str(ROOT), "--backends", "docker"])
    assert "needs --image" in capsys.readouterr().err


LAYERS = """
    import sys
    from sandboxgym.bench import sandbox
    from sandboxgym.sandbox.files.rootfs import resolve
    times = sandbox.layers(resolve("host"), "echo 1 > /root/f", 1)
    assert times["tar"].seconds and times["cp -a"].seconds, times
"""


def test_a_run_directory_with_a_space_in_its_name_takes_no_other_with_it(tmp_path: Path) -> None:
    """Text between blanks was once a word of its own for ``rm -rf``."""
    if os.geteuid() != 0:
        missing("overlay", "this process is not root")
    if reason := why_unavailable():
        missing("overlay", reason)
    precious = tmp_path / "a"
    precious.mkdir()
    (precious / "file").write_text("precious")
    runtime = tmp_path / "a b; touch c" / "rt"
    runtime.mkdir(parents=True)
    environment = {**os.environ, "SANDBOXGYM_RUNTIME": str(runtime), "PYTHONPATH": str(ROOT)}
    environment["SANDBOXGYM_INIT"] = "python"  # no compiler, which takes longer than all the rest
    command = [sys.executable, "-c", textwrap.dedent(LAYERS)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (precious / "file").read_text() == "precious" and not (tmp_path / "c").exists()
    assert not [path for path in runtime.iterdir() if path.is_dir()]
