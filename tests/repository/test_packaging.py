"""Packaging: few imported modules, a complete wheel, a README whose example runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from traces import fresh_interpreter

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "transformers", "textworld", "docker", "playwright", "pytest", "hypothesis", "matplotlib", "scipy"}
LOADED = """
import json, sys
import gymnasium
before = {name.partition(".")[0] for name in sys.modules}
import sandboxgym
after = {name.partition(".")[0] for name in sys.modules}
print(json.dumps([sorted(after), sorted(after - before - sys.stdlib_module_names)]))
"""


def test_importing_the_package_loads_little_beyond_gymnasium(tmp_path):
    loaded, added = json.loads(fresh_interpreter(LOADED, cwd=tmp_path))
    assert not HEAVY & set(loaded)
    assert {name for name in added if not name.startswith("_")} == {"msgpack", "sandboxgym"}


def test_importing_the_package_does_not_load_an_environment(tmp_path):
    code = "import sys, sandboxgym; print([name for name in sys.modules if name.startswith('sandboxgym.envs')])"
    assert fresh_interpreter(code, cwd=tmp_path).strip() == "[]"


def test_making_an_environment_by_its_long_name_needs_no_import(tmp_path):
    code = "import gymnasium; print(gymnasium.make('sandboxgym:sandboxgym/ALFWorld-v0').reset(seed=0)[1]['success'])"
    assert fresh_interpreter(code, cwd=tmp_path).strip() == "False"


def test_every_public_name_exists():
    import sandboxgym

    assert sorted(set(sandboxgym.__all__)) == list(sandboxgym.__all__)
    assert all(hasattr(sandboxgym, name) for name in sandboxgym.__all__)


def test_the_conformance_command_asks_for_an_environment(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "sandboxgym.conformance"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stdout) == (3, "")
    assert "the environment is missing" in result.stderr


@pytest.mark.slow
def test_the_wheel_holds_both_packages_and_their_data(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for package in ("sandboxgym", "sandboxgym_pytest", "bpo_ref"):
        here = {
            path.relative_to(ROOT).as_posix()
            for path in (ROOT / package).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        assert here <= names
    expected = {"sandboxgym/py.typed", "sandboxgym/conformance/__main__.py", "bpo_ref/train.py"}
    assert expected <= names
    assert any(name.startswith("bpo_ref/configs/") for name in names)
    assert not any(name.startswith(("tests/", "docs/", "conformance/")) for name in names)


USE_INSTALLED = """
import sys
import gymnasium as gym
import bpo_ref, sandboxgym, sandboxgym.conformance
print(sandboxgym.__file__)
print(bpo_ref.__file__)
env = gym.make("sandboxgym/ALFWorld-v0")
env.reset(seed=0)
env.restore(env.snapshot())
"""


@pytest.mark.slow
def test_the_installed_wheel_works_from_another_directory(wheel, tmp_path):
    target = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    subprocess.run([*command, str(target), str(wheel)], check=True, capture_output=True)
    printed = subprocess.run(
        [sys.executable, "-c", USE_INSTALLED],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
    )
    assert printed.returncode == 0, printed.stderr
    assert [Path(line).is_relative_to(target) for line in printed.stdout.split()] == [True, True]


def test_the_checkout_can_be_imported_from_its_root():
    printed = fresh_interpreter("import sandboxgym, sandboxgym.conformance; print(sandboxgym.__file__)", cwd=ROOT)
    assert Path(printed.strip()).parent == ROOT / "sandboxgym"
