"""The first hour of a new user of the wheel: each path through the docs, with the commands in the docs."""

from __future__ import annotations

import json
import os
import re
import shlex
import site
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SHOWN = re.compile(r'^```bash\n(sandboxgym [^\n]*)\n```\n\n```text title="What it prints"\n(.*?)^```', re.DOTALL | re.M)
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)

pytestmark = pytest.mark.slow


class Newcomer:
    """Somebody with the wheel in a fresh virtual environment, in an empty directory.

    The dependencies come from the interpreter that runs the tests, whose own installation of the package is not seen.
    """

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.home = folder / "home"
        self.home.mkdir()
        place = folder / "venv"
        venv.create(place, with_pip=False)
        self.bin = place / "bin"
        (packages,) = place.glob("lib/python*/site-packages")
        pip = [sys.executable, "-m", "pip", "--python", str(self.bin / "python")]
        install = [*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
        subprocess.run(install, check=True, capture_output=True)
        # Directories in .pth files are searched after the wheel; the .pth files in them are not read, and so no
        # editable installation is found.
        shared = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()}
        (packages / "dependencies.pth").write_text("\n".join(sorted(shared)) + "\n")

    def run(self, command: str, timeout: float = 400) -> subprocess.CompletedProcess[str]:
        """A command of the docs, as a shell would run it; fails with its output unless it succeeds."""
        left_out = ("PYTHONPATH", "SANDBOXGYM_DATA", "SANDBOXGYM_REQUIRE")
        env = {name: value for name, value in os.environ.items() if name not in left_out}
        env |= {"PATH": f"{self.bin}:{env['PATH']}", "HOME": str(self.home), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            shlex.split(command), cwd=self.home, env=env, capture_output=True, text=True, timeout=timeout
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return done

    def python(self, code: str) -> str:
        """Output of a program."""
        (self.home / "program.py").write_text(code)
        return self.run("python program.py").stdout


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Newcomer:
    return Newcomer(tmp_path_factory.mktemp("newcomer"), wheel)


def code_of(page: str) -> list[str]:
    blocks = BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))
    assert blocks
    return blocks


def masked(line: str) -> str:
    """A line without what differs between machines: times, and measured numbers with a point or a k."""
    return " ".join(re.sub(r"\[[\d:<]+\]|\d+\.\d+|\d+k", "…", line).split())


def assert_prints_what_the_page_shows(newcomer: Newcomer, page: str) -> None:
    """Run the command of a page whose output is below it."""
    ((command, shown),) = SHOWN.findall((DOCS / page).read_text(encoding="utf-8"))
    done = newcomer.run(command)
    printed = {masked(line) for line in (done.stdout + done.stderr).splitlines()}
    assert [line for line in shown.splitlines() if masked(line) not in printed] == []


def test_the_wheel_is_what_is_imported(newcomer: Newcomer) -> None:
    found = newcomer.python("import bpo_ref, sandboxgym; print(sandboxgym.__file__); print(bpo_ref.__file__)").split()
    assert [Path(path).is_relative_to(newcomer.bin.parent) for path in found] == [True, True]


def test_somebody_who_wants_the_environments(newcomer: Newcomer) -> None:
    newcomer.python("\n".join(code_of("quickstart.md")))
    assert "ALFWorld" in newcomer.run("sandboxgym doctor").stdout
    assert "sandboxgym/ALFWorld-v0" in newcomer.run("sandboxgym list").stdout


def test_somebody_who_looks_at_what_certifies_an_environment(newcomer: Newcomer) -> None:
    (newcomer.home / "notes.py").write_text(code_of("own-env.md")[0])
    assert_prints_what_the_page_shows(newcomer, "own-env.md")


def test_somebody_who_wants_an_environment_of_their_own_certified(newcomer: Newcomer) -> None:
    (newcomer.home / "notes.py").write_text(code_of("own-env.md")[0])
    some = "".join(f" --only {name}" for name in ("api", "restore.trace_equality", "fork.isolation", "durable"))
    done = newcomer.run(f"sandboxgym conformance notes:Notes --json notes.json{some}")  # test_documented_examples: all
    assert "aithful" in done.stdout
    verdicts = {result["verdict"] for result in json.loads((newcomer.home / "notes.json").read_text())["results"]}
    assert "PASS" in verdicts and "FAIL" not in verdicts


def test_somebody_who_wants_to_train(newcomer: Newcomer) -> None:
    pytest.importorskip("torch")
    assert_prints_what_the_page_shows(newcomer, "bpo.md")
    run = newcomer.home / "runs/alfworld-tiny/bpo-seed0"
    assert (run / "results.json").exists() and list(run.glob("trees*"))
    newcomer.run(f"sandboxgym eval --checkpoint {run}/checkpoint --episodes 4 --json scores.json")
    assert json.loads((newcomer.home / "scores.json").read_text())
