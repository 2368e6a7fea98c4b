"""Published rows of Verified: each loads in each format, and runs in the image that it names."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from envs.swebench.conftest import check_backend

from sandboxgym.envs.swebench.rows import recipes as columns
from sandboxgym.envs.swebench.rows.tasks import TaskSet, open_tasks
from sandboxgym.envs.swebench.workspaces import prepared
from sandboxgym.envs.swebench.workspaces.workspace import WorkspaceSettings, forget_prepared, pristine
from sandboxgym.sandbox.base import SandboxUnavailable

ID = f"pallets__flask-{10**7 + os.getpid()}"
"""An instance of this process alone, since others that run these tests have images with the same daemon."""
PREPARE = r"""set -e
mkdir -p /opt/miniconda3/bin /testbed/tests
echo 'conda() { echo "$@" > /tmp/conda; export CONDA_DEFAULT_ENV=$2; }' > /opt/miniconda3/bin/activate
cd /testbed
git init -q -b main .
git config user.email a@b && git config user.name a
echo 'def greet(name): return "hello " + name' > greeting.py
printf 'import greeting\n\ndef test_old(): assert greeting.greet("you") == "hello you"\n' > tests/test_greeting.py
touch conftest.py && git add -A && git commit -qm first && git rev-parse HEAD
echo 'def greet(name): return "hello " + (name or "nobody")' > greeting.py
git diff > /tmp/gold && git checkout -q .
printf '\ndef test_new(): assert greeting.greet("") == "hello nobody"\n' >> tests/test_greeting.py
git diff > /tmp/tests && git commit -qam solution && git checkout -q HEAD~1 && echo ---
cat /tmp/gold && echo --- && cat /tmp/tests && rm /tmp/gold /tmp/tests
"""


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet"])
@pytest.mark.parametrize("old", [True, False], ids=["old", "new"])
def test_every_row_loads_in_every_format(
    suffix: str, old: bool, verified_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verified: TaskSet
) -> None:
    rows = [json.loads(line) for line in verified_file.open(encoding="utf-8")]
    for row in rows:
        row.setdefault("difficulty", None)  # a table has all columns
        if old:  # as they were before swebench 5: without its columns, tests as JSON strings
            for name in columns.COLUMNS:
                del row[name]
        else:
            row |= {name: json.loads(row[name]) for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    path = tmp_path / "swebench" / f"verified{suffix}"
    path.parent.mkdir()
    if suffix == ".parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)) if suffix == ".jsonl" else json.dumps(rows))
    monkeypatch.setenv("SANDBOXGYM_DATA", str(tmp_path))
    assert list(open_tasks("verified")) == list(verified)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["overlay", "docker"])
def test_a_row_without_its_image_says_what_to_pull(backend: str, docker_image: str, verified: TaskSet) -> None:
    check_backend(backend)
    for task in verified:
        with pytest.raises(SandboxUnavailable, match=f"no Docker image '{task.image}' .* docker pull {task.image}"):
            pristine(task, WorkspaceSettings(backend=backend))


@pytest.fixture(scope="module")
def named_image(docker_image: str) -> Iterator[dict[str, Any]]:
    """A row in the old format, whose image is named as the harness names it."""

    def docker(*words: str) -> str:
        return subprocess.run(["docker", *words], check=True, capture_output=True, text=True).stdout

    container = docker("run", "--detach", "--network=none", docker_image, "sleep", "1000").strip()
    try:
        base, gold, tests = docker("exec", container, "bash", "-c", PREPARE).split("---\n")
        name = columns.image_name(ID)
        docker("commit", container, name)
    finally:
        docker("rm", "-f", container)
    row = {"instance_id": ID, "repo": "pallets/flask", "version": "2.3", "base_commit": base.strip()}
    row |= {"patch": gold, "test_patch": tests, "problem_statement": "Greet nobody."}
    file = "tests/test_greeting.py"
    yield {**row, "FAIL_TO_PASS": f'["{file}::test_new"]', "PASS_TO_PASS": f'["{file}::test_old"]'}
    forget_prepared()  # images on top of it
    prepared.clear()
    docker("rmi", "-f", name)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["overlay", "overlay-rootless", "docker"])
def test_verified_is_played_in_the_image_that_the_harness_names(
    backend: str,
    named_image: dict[str, Any],
    backend_of: Callable[[str], dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_backend(backend)
    (tmp_path / "swebench").mkdir()
    (tmp_path / "swebench" / "verified.jsonl").write_text(json.dumps(named_image))
    monkeypatch.setenv("SANDBOXGYM_DATA", str(tmp_path))
    env = gym.make("sandboxgym/SWEBench-v0", dataset="verified", backend=backend, max_episode_steps=3)
    try:
        observation, _ = env.reset(options={"instance_id": ID.partition("__")[2]})
        assert "Greet nobody." in observation
        seen = env.step("echo $CONDA_DEFAULT_ENV; git log --all --format=%s; git status --short")[0]
        assert seen.split("\n")[2:4] == ["testbed", "first"], seen
        snap = env.snapshot()  # type: ignore[attr-defined]
        _, reward, terminated, _, info = env.step("submit")
        assert (reward, terminated, info["verdict"]) == (0, True, "no patch")
        env.restore(snap)  # type: ignore[attr-defined]
        env.step("""sed -i 's/+ name/+ (name or "nobody")/' greeting.py""")
        _, reward, _, truncated, info = env.step("true")
        assert (reward, truncated, info["verdict"]) == (1, True, "resolved"), info
        assert info["tests_status"]["PASS_TO_PASS"]["success"] == ["tests/test_greeting.py::test_old"]
    finally:
        env.close()
