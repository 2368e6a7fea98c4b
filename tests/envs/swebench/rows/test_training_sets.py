"""Rows of SWE-smith, SWE-Gym, SWE-rebench and R2E-Gym: parsed, and run in images made here without leaks."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from docker_image import fill
from envs.swebench.conftest import check_backend
from rows_of_others import (
    BAD,
    FIX,
    GOOD,
    NAME,
    SECRET,
    SMITH_ID,
    TEST_SIZE,
    TEST_TOP,
    WRONG,
    commit,
    git,
    parsed_commit,
    simple,
)

from sandboxgym.envs.swebench.rows.row_files import TaskError
from sandboxgym.envs.swebench.rows.tasks import from_row
from sandboxgym.envs.swebench.workspaces import hiding
from sandboxgym.envs.swebench.workspaces.workspace import WorkspaceSettings, forget_prepared, pristine
from sandboxgym.sandbox.base import SandboxUnavailable


@pytest.fixture(scope="module")
def new_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """Makes root file systems of this machine's programs, with a repository without commits at /testbed."""
    folder = tmp_path_factory.mktemp("roots")
    fill(folder / "base")
    for name in ("python", "pytest"):
        (folder / "base/usr/bin" / name).symlink_to(f"/opt/python/bin/{name}")

    def make(name: str) -> Path:
        subprocess.run(["cp", "-al", str(folder / "base"), str(folder / name)], check=True)
        testbed = folder / name / "testbed"
        testbed.mkdir()
        git(testbed, "init", "-q")
        (testbed / "conftest.py").write_text("import sys\n\nsys.path.insert(0, 'src')\n")
        return folder / name

    yield make
    forget_prepared()
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def smith(new_root: Callable[[str], Path]) -> dict[str, Any]:
    """A row of SWE-smith, whose image holds the repository without the bug, built and installed."""
    root = new_root("smith")
    testbed = root / "testbed"
    files = {NAME: GOOD, "src/shelf/__init__.py": "", "tests/test_top.py": TEST_TOP, "tests/test_size.py": TEST_SIZE}
    clean = commit(testbed, "Initial commit", **files)
    (testbed / NAME).write_text(BAD)
    bug = git(testbed, "diff")
    commit(testbed, "Bug Patch")
    (testbed / "tests/test_top.py").unlink()
    head = commit(testbed, "Remove F2P Tests")
    git(testbed, "update-ref", f"refs/remotes/origin/{SMITH_ID}", head)
    git(testbed, "reset", "-q", "--hard", clean)
    for place in (testbed / "build/lib/shelf", root / "usr/lib/site-packages/shelf"):
        place.mkdir(parents=True)
        (place / "stack.py").write_text(GOOD)
        (place / "__init__.py").write_text("")
    compiled = testbed / "src/shelf/__pycache__/stack.cpython-311.pyc"
    compiled.parent.mkdir()
    compiled.write_bytes(b"compiled " + SECRET.encode())
    (testbed / ".git/info/exclude").write_text("build\n__pycache__\n")
    return {
        "instance_id": SMITH_ID,
        "repo": "swesmith/northpine__shelf.1234abcd",
        "patch": bug,
        "FAIL_TO_PASS": ["tests/test_top.py::test_top"],
        "PASS_TO_PASS": ["tests/test_top.py::TestOne::test_one", "tests/test_size.py::test_size"],
        "created_at": "2025-05-01T00:00:00",
        "image_name": f"dir:{root}",
        "problem_statement": "top() gives the item at the bottom",
    }


@pytest.fixture(scope="module")
def bench(new_root: Callable[[str], Path]) -> dict[str, Any]:
    """A row in the schema that SWE-Gym and SWE-rebench share with SWE-bench, but for the image."""
    root = new_root("bench")
    testbed = root / "testbed"
    base = commit(testbed, "first", **{NAME: BAD, "src/shelf/__init__.py": "", "tests/test_size.py": TEST_SIZE})
    (testbed / NAME).write_text(GOOD)
    patch = git(testbed, "diff")
    git(testbed, "checkout", "-q", ".")
    (testbed / "tests/test_top.py").write_text(TEST_TOP)
    git(testbed, "add", "-A")
    test_patch = git(testbed, "diff", "--cached")
    (testbed / NAME).write_text(GOOD)
    commit(testbed, "solution")
    git(testbed, "checkout", "-q", base)
    return {
        "instance_id": "pydantic__pydantic-1",
        "repo": "pydantic/pydantic",
        "version": "2.6",
        "base_commit": base,
        "problem_statement": "top() gives the item at the bottom",
        "patch": patch,
        "test_patch": test_patch,
        "FAIL_TO_PASS": ["tests/test_top.py::test_top"],
        "PASS_TO_PASS": ["tests/test_top.py::TestOne::test_one"],
        "root": f"dir:{root}",
    }


@pytest.fixture(scope="module")
def gym_row(bench: dict[str, Any]) -> dict[str, Any]:
    return {**bench, "image": bench["root"]}


@pytest.fixture(scope="module")
def rebench(bench: dict[str, Any]) -> dict[str, Any]:
    config = {"python": "3.9", "test_cmd": "pytest --no-header -rA --tb=line", "log_parser": "parse_log_pytest"}
    row = {**bench, "install_config": config, "docker_image": bench["root"], "repo": "northpine/shelf"}
    return {**row, "instance_id": "northpine__shelf-1", "version": None}


@pytest.fixture(scope="module")
def r2e(new_root: Callable[[str], Path]) -> dict[str, Any]:
    """A row of R2E-Gym, whose image holds the tests, the future and the answer."""
    root = new_root("r2e")
    testbed = root / "testbed"
    sources = {NAME: BAD, "src/shelf/__init__.py": "", "tests/test_stack.py": TEST_SIZE}
    old = commit(testbed, "first", **sources)
    new = commit(testbed, "solution", **{NAME: GOOD, "tests/test_stack.py": TEST_SIZE + TEST_TOP})
    patch = git(testbed, "diff", old, new)
    git(testbed, "tag", "v2")
    git(testbed, "checkout", "-q", old)
    (root / "r2e_tests").mkdir()
    (root / "r2e_tests/test_1.py").write_text(TEST_TOP + "\ndef test_never(): assert Stack().size()\n")
    (testbed / "run_tests.sh").write_text(".venv/bin/python -W ignore -m pytest -rA r2e_tests")
    programs = testbed / ".venv/bin"
    programs.mkdir(parents=True)
    (programs / "python").write_text('#!/bin/bash\nexec /opt/python/bin/python "$@"\n')
    (programs / "python").chmod(0o755)
    (programs / "activate").write_text("export PATH=/testbed/.venv/bin:$PATH VIRTUAL_ENV=/testbed/.venv\n")
    (testbed / ".venv/.gitignore").write_text("*\n")
    (testbed / "expected_test_output.json").write_text("{}")
    (testbed / "install.sh").write_text("true\n")
    before = "== short test summary info ==\nPASSED r2e_tests/test_1.py::TestOne::test_one\nFAILED x.py::test_top - a\n"
    return {
        "repo_name": "shelf",
        "commit_hash": new,
        "docker_image": f"dir:{root}",
        "parsed_commit_content": parsed_commit(patch, old, new),
        "execution_result_content": json.dumps({"old_commit_res_stdout": before}),
        "expected_output_json": json.dumps(
            {"test_top": "PASSED", "TestOne.test_one": "PASSED", "\x1b[1mtest_never\x1b[0m - assert 0": "FAILED"}
        ),
        "problem_statement": "Asked:\n[ISSUE]top() gives the item at the bottom[/ISSUE]",
        "modified_files": [NAME],
        "prompt": "",
    }


def play(row: dict[str, Any], folder: Path, **options: Any) -> Any:
    check_backend("overlay")
    path = folder / "rows.jsonl"
    path.write_text(json.dumps({name: value for name, value in row.items() if name != "root"}) + "\n")
    options = {"backend": "overlay", **options}
    return gym.make("sandboxgym/SWEBench-v0", dataset=path, max_episode_steps=20, **options)


STYLES = ("smith", "gym_row", "rebench", "r2e")


@pytest.fixture(params=STYLES)
def row(request: pytest.FixtureRequest, official_code: None) -> dict[str, Any]:
    value: dict[str, Any] = request.getfixturevalue(request.param)
    return value


@pytest.mark.slow
def test_a_row_of_each_style_is_played(row: dict[str, Any], tmp_path: Path) -> None:
    env = play(row, tmp_path)
    try:
        observation, _ = env.reset(seed=0)
        assert "top() gives the item at the bottom" in observation and "ISSUE" not in observation
        start = env.unwrapped.snapshot()
        task = env.unwrapped.task
        own = f"printf 'def test_top(): pass\\n' > {'r2e_tests' if task.expected else 'tests'}/test_top.py"
        for command, reason in (
            ("true", "no patch"),
            (WRONG, "tests fail"),
            (f"mkdir -p r2e_tests; {own}; {WRONG}", "tests fail"),
            (FIX, "resolved"),
            (f"git apply <<'EOF'\n{task.patch}EOF", "resolved"),
        ):
            env.unwrapped.restore(start)
            output, *_, info = env.step(command)
            assert info["returncode"] == 0, output
            _, reward, *_, info = env.step("submit")
            log = env.unwrapped.grade().log[-3000:]
            assert (info["verdict"], reward) == (reason, reason == "resolved"), (command, log)
        assert info["tests_status"]["FAIL_TO_PASS"] == {"success": list(task.fail_to_pass), "failure": []}
        assert task.fail_to_pass and task.pass_to_pass
        env.unwrapped.restore(start)
        expert = env.unwrapped.expert()
        expert.reset(observation)
        over = False
        while not over:
            observation, _, terminated, truncated, info = env.step(expert.act(observation))
            over = terminated or truncated
        assert info["verdict"] == "resolved"
    finally:
        env.close()


@pytest.mark.slow
def test_nothing_in_the_sandbox_tells_the_solution(row: dict[str, Any], tmp_path: Path) -> None:
    env = play(row, tmp_path)
    try:
        env.reset(seed=0)
        env.step("true")
        env.unwrapped.grade()
        everywhere = f"grep -rlF {shlex.quote(SECRET)} / --exclude-dir=proc --exclude-dir=sys --exclude-dir=dev"
        assert "stack.py" not in (found := env.step(f"{everywhere} 2>/dev/null; true")[0]), found
        assert "pyc" not in found
        objects = (
            "git cat-file --batch-all-objects --batch-check='%(objectname) %(objecttype)' | grep blob | cut -c1-40"
        )
        each = f"for name in $({objects}); do git cat-file -p $name | grep -F {shlex.quote(SECRET)}; done; echo done"
        assert SECRET not in env.step(each)[0]
        assert "test_top" not in env.step("grep -rl 'def test_to[p]' / --include='*.py' -s; echo done")[0]
        log = env.step("git log --all --format=%s; git tag; git branch -a; git reflog; git status --short")[0]
        assert "solution" not in log and "Bug Patch" not in log and SMITH_ID not in log and "v2" not in log, log
        ls = env.step("ls / /testbed /root -a")[0]
        assert env.step("echo $VIRTUAL_ENV")[0].count("/testbed/.venv") == (row.get("commit_hash") is not None)
        assert "r2e_tests" not in ls and "run_tests.sh" not in ls and "expected_test_output" not in ls, ls
    finally:
        env.close()


@pytest.mark.slow
def test_copies_of_the_sources_have_the_bug_too(smith: dict[str, Any], official_code: None, tmp_path: Path) -> None:
    env = play(smith, tmp_path)
    try:
        env.reset(seed=0)
        for place in ("build/lib", "/usr/lib/site-packages"):
            said = env.step(f"cat {place}/shelf/stack.py; wc -c < {place}/shelf/__init__.py")[0]
            assert "return self.items[0]" in said and "\n0\n" in said, said
        assert "test_top" not in (said := env.step("git show --stat HEAD | cat")[0]) and "test_size" in said, said
    finally:
        env.close()


@pytest.mark.slow
def test_tests_that_stay_cannot_be_changed(smith: dict[str, Any], official_code: None, tmp_path: Path) -> None:
    env = play(smith, tmp_path)
    try:
        env.reset(seed=0)
        env.step("sed -i 's/return len/return 1 + len/' src/shelf/stack.py")
        env.step("sed -i 's/size() == 0/size() == 1/' tests/test_size.py")
        env.step(FIX)
        info = env.step("submit")[-1]
        assert info["verdict"] == "tests fail"
        assert info["tests_status"]["PASS_TO_PASS"]["failure"] == ["tests/test_size.py::test_size"]
    finally:
        env.close()


@pytest.mark.slow
def test_a_test_beyond_those_expected_is_a_difference(r2e: dict[str, Any], official_code: None, tmp_path: Path) -> None:
    ends = {**json.loads(r2e["expected_output_json"]), "test_more": "PASSED"}
    for changed in (ends, {**ends, "test_never": "PASSED"}, {"test_top": "PASSED"}):
        env = play({**r2e, "expected_output_json": json.dumps(changed)}, tmp_path)
        try:
            env.reset(seed=0)
            env.step(FIX)
            assert env.step("submit")[-1]["verdict"] == "tests fail"
        finally:
            env.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "style, change, message",
    [
        (
            "smith",
            {"patch": "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"},
            "column 'patch': .* is not",
        ),
        ("r2e", {"docker_image": "smith"}, "is not the image of this row: none of its tests is there"),
        ("gym_row", {"base_commit": "0" * 40}, "column 'base_commit': .* has no commit 0000"),
    ],
)
def test_the_wrong_image_is_refused(
    style: str, change: dict[str, Any], message: str, request: pytest.FixtureRequest, official_code: None
) -> None:
    check_backend("overlay")
    row = {**request.getfixturevalue(style), **change}
    if row.get("docker_image") == "smith":
        row["docker_image"] = request.getfixturevalue("smith")["image_name"]
    with pytest.raises(TaskError, match=message) as error:
        pristine(from_row(row), WorkspaceSettings(backend="overlay"))
    assert len(str(error.value)) < 1500


@pytest.mark.slow
def test_an_image_that_has_the_bug_already(smith: dict[str, Any], official_code: None, tmp_path: Path) -> None:
    root = Path(smith["image_name"].removeprefix("dir:"))
    here = root.with_name("smith-branch")
    subprocess.run(["cp", "-a", str(root), str(here)], check=True)
    git(here / "testbed", "checkout", "-q", "-f", f"refs/remotes/origin/{SMITH_ID}")
    env = play({**smith, "image_name": f"dir:{here}"}, tmp_path)
    try:
        env.reset(seed=0)
        assert "Initial commit" in env.step("git log --format=%s; cat src/shelf/stack.py; ls tests")[0]
        env.step(FIX)
        assert env.step("submit")[-1]["verdict"] == "resolved"
    finally:
        env.close()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["overlay", "copy"])
def test_a_row_that_brings_its_repository_along(backend: str, make_env: Callable[..., Any], tmp_path: Path) -> None:
    check_backend(backend)
    work = tmp_path / "work"
    work.mkdir()
    git(work, "init", "-q")
    files = {"conftest.py": "import sys\n\nsys.path.insert(0, 'src')\n", "tests/test_top.py": TEST_TOP}
    commit(work, "Initial commit", **{NAME: GOOD, "src/shelf/__init__.py": "", **files})
    history = git(work, "fast-export", "main")
    (work / NAME).write_text(BAD)
    row = {
        **simple("swe-smith"),
        "image_name": "host",
        "history": history,
        "patch": git(work, "diff"),
        "FAIL_TO_PASS": ["tests/test_top.py::test_top"],
        "PASS_TO_PASS": ["tests/test_top.py::TestOne::test_one"],
    }
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([row]))
    env = make_env(dataset=path, max_episode_steps=9, backend=backend)
    env.reset(seed=0)
    said = env.step("git log -p --all; ls tests; cat src/shelf/stack.py")[0]
    assert SECRET not in said and "test_top" not in said
    assert env.unwrapped.grade().reason == "no patch"
    env.step(WRONG)
    assert env.unwrapped.grade().reason == "tests fail"
    env.step(f"git checkout -q . && {FIX}")
    assert env.step("submit")[-1]["verdict"] == "resolved"


def test_tests_outside_of_the_repository_need_a_root(official_code: None) -> None:
    row = {**simple("r2e-gym"), "docker_image": "host", "history": "blob\n"}
    with pytest.raises(SandboxUnavailable, match="needs a sandbox with a root of its own"):
        hiding.prepare(Rootless(), from_row(row))  # type: ignore[arg-type]


class Rootless:
    """Stand-in for a sandbox, with the attribute that `hiding.prepare` asks first."""

    shares_root = True
