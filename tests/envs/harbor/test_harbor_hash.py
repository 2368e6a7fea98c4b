"""The script that hashes a task's files says nothing where it could not read them, not that they are as any others."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sandboxgym.envs.harbor.box import TaskBox
from sandboxgym.sandbox.agent.box import HASHED

READERS = ("bash", "find", "sort", "head", "tr", "xargs", "stat", "sha256sum")


def told(place: Path, programs: Path) -> str:
    """Output of the script for a directory, with the programs of another one."""
    sandbox: Any = SimpleNamespace(workdir=str(place))
    env = {"PATH": str(programs), "TMPDIR": f"{place}/none", "HOME": f"{place}/none"}
    command = [str(programs / "bash"), "-c", TaskBox(sandbox)._script(None)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60).stdout


@pytest.mark.parametrize("missing", [None, *READERS[1:]])
def test_a_program_that_is_missing_makes_no_states_equal(missing: str | None, tmp_path: Path) -> None:
    (programs := tmp_path / "bin").mkdir()
    (place := tmp_path / "work").mkdir()
    for name in READERS:
        found = shutil.which(name)
        assert found is not None
        if name != missing:
            (programs / name).symlink_to(found)
    said = []
    for content in ("one", "two"):
        (place / "file").write_text(content)
        said.append(told(place, programs))
    if missing is None:
        assert said[0].endswith(f"{HASHED}\n") and said[1].endswith(f"{HASHED}\n") and said[0] != said[1]
    else:
        assert not any(text.endswith(f"{HASHED}\n") for text in said)


def test_files_that_cannot_be_read_and_odd_names_are_no_obstacle(tmp_path: Path) -> None:
    (place := tmp_path / "work").mkdir()
    (place / "nowhere").symlink_to("missing")
    (place / "two\nlines").write_text("x")
    (place / " -n 'odd' ").write_text("x")
    assert told(place, Path("/usr/bin")).endswith(f"{HASHED}\n")
