"""Rows of SWE-smith, SWE-Gym, SWE-rebench and R2E-Gym: parsed, and run in images made here without leaks."""

from __future__ import annotations

import json
import re
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

from sandboxgym.envs.swebench.grading import parsers
from sandboxgym.envs.swebench.rows import datasets
from sandboxgym.envs.swebench.rows.row_files import TaskError
from sandboxgym.envs.swebench.rows.tasks import DataNotFound, Task, TaskNotFound, from_row, open_tasks
from sandboxgym.envs.swebench.workspaces import hiding
from sandboxgym.envs.swebench.workspaces.workspace import Settings, forget_prepared, pristine
from sandboxgym.sandbox.base import SandboxUnavailable

GOOD = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def top(self):
        return self.items[len(self.items) - 1]

    def size(self):
        return len(self.items)
"""
SECRET = "self.items[len(self.items) - 1]"
BAD = GOOD.replace(SECRET, "self.items[0]")
TEST_TOP = """from shelf.stack import Stack

def test_top():
    stack = Stack()
    stack.push(1)
    stack.push(2)
    assert stack.top() == 2

class TestOne:
    def test_one(self):
        stack = Stack()
        stack.push(1)
        assert stack.top() == 1
"""
TEST_SIZE = "from shelf.stack import Stack\n\ndef test_size(): assert Stack().size() == 0\n"
NAME = "src/shelf/stack.py"
FIX = "sed -i 's/self.items.0./self.items[-1]/' src/shelf/stack.py"
WRONG = "sed -i 's/self.items.0./self.items[1:2]/' src/shelf/stack.py"
SMITH_ID = "northpine__shelf.1234abcd.lm_rewrite__abc"


def git(folder: Path, *words: str) -> str:
    names = [word for name in ("author", "committer") for word in ("-c", f"{name}.name=a", "-c", f"{name}.email=a@b")]
    command = ["git", "-C", str(folder), *names, "-c", "init.defaultBranch=main", *words]
    return subprocess.run(command, check=True, capture_output=True).stdout.decode()


def commit(folder: Path, message: str, **files: str) -> str:
    """Write files, commit all, and give the commit."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", message)
    return git(folder, "rev-parse", "HEAD").strip()


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


def parsed_commit(patch: str, old: str, new: str) -> str:
    """A commit as R2E-Gym describes it, from a patch that changes files."""
    changes = []
    for section in re.split(r"^diff --git ", patch, flags=re.MULTILINE)[1:]:
        head, *hunks = re.split(r"^@@ -", section, flags=re.MULTILINE)
        name = re.match(r"a/(.*) b/", head)[1]  # type: ignore[index]
        index = re.search(r"^index (\w+)\.\.(\w+) ?(\d*)$", head, re.MULTILINE)
        described = []
        for hunk in hunks:
            first, *lines = hunk.removesuffix("\n").split("\n")
            ranges, _, section_name = first.partition(" @@")
            sides = [list(map(int, side.split(","))) for side in ranges.split(" +")]
            kinds = {" ": "context", "+": "added", "-": "deleted"}
            described.append(
                {
                    "descriptor": {
                        "old_range": {"start": sides[0][0], "length": sides[0][1] if len(sides[0]) > 1 else None},
                        "new_range": {"start": sides[1][0], "length": sides[1][1] if len(sides[1]) > 1 else None},
                        "section": section_name.strip(),
                    },
                    "line_group": {"all_lines": [{"content": line[1:], "type": kinds[line[0]]} for line in lines]},
                }
            )
        changes.append(
            {
                "header": {"file": {"path": name}, "misc_line": None},
                "index_line": {"old_commit_hash": index[1], "new_commit_hash": index[2], "mode": index[3]},  # type: ignore[index]
                "minus_file": {"path": f"a/{name}"},
                "plus_file": {"path": f"b/{name}"},
                "hunks": described,
            }
        )
    return json.dumps({"file_diffs": changes, "old_commit_hash": old, "new_commit_hash": new, "commit_message": "m"})


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
        pristine(from_row(row), Settings(backend="overlay"))
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
    """What `hiding.prepare` asks first."""

    shares_root = True


# Rows, without an image.


def simple(style: str) -> dict[str, Any]:
    """A row of a style, for what is read only."""
    patch = "diff --git a/a.py b/a.py\nindex 1..2 100644\n--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-good\n+bad\n"
    lists = {"FAIL_TO_PASS": ["tests/test_a.py::test_a"], "PASS_TO_PASS": ["tests/test_b.py::test_b"]}
    bench = {"instance_id": "o__r-1", "repo": "getmoto/moto", "version": "4.1", "base_commit": "a" * 40, **lists}
    bench |= {"problem_statement": "s", "patch": patch, "test_patch": patch.replace("a.py", "tests/test_a.py")}
    config = {"test_cmd": "pytest -rA", "log_parser": "parse_log_pytest_v2"}
    return {
        "swe-bench": {**bench, "repo": "pallets/flask", "version": "2.3"},
        "swe-gym": bench,
        "swe-rebench": {**bench, "repo": "o/r", "install_config": config},
        "swe-smith": {
            "instance_id": "o__r.12345678.x__1",
            "repo": "swesmith/o__r.12345678",
            "image_name": "swebench/swesmith.x86_64.o_1776_r.12345678",
            "problem_statement": "s",
            "patch": patch,
            **lists,
        },
        "r2e-gym": {
            "repo_name": "sympy",
            "commit_hash": "b" * 40,
            "docker_image": "namanjain12/sympy_final:bbb",
            "problem_statement": "s",
            "parsed_commit_content": parsed_commit(patch, "a" * 40, "b" * 40),
            "expected_output_json": '{"test_a": "PASSED"}',
        },
    }[style]


def test_what_a_row_of_each_style_becomes() -> None:
    task = from_row(simple("swe-smith"))
    assert (task.style, task.image) == ("swe-smith", "swebench/swesmith.x86_64.o_1776_r.12345678")
    assert task.bug == simple("swe-smith")["patch"]
    assert "-bad\n+good\n" in task.patch
    assert task.hidden == ("tests/test_a.py",)
    assert "git checkout HEAD --" in task.eval_script and "tests/test_b.py" in task.eval_script
    assert "\npytest --disable-warnings --color=no --tb=no --verbose\n" in task.eval_script

    task = from_row(simple("swe-gym"))
    assert (task.style, task.image) == ("swe-gym", "xingyaoww/sweb.eval.x86_64.o_s_r-1:latest")
    assert "\npytest -n0 -rA tests/test_a.py\n" in task.eval_script
    assert task.log_parser == "parse_log_pytest"

    task = from_row(simple("swe-rebench"))
    assert (task.style, task.image) == ("swe-rebench", "swerebench/sweb.eval.x86_64.o_1776_r-1:latest")
    assert "\npytest -rA tests/test_a.py\n" in task.eval_script
    assert task.log_parser == "parse_log_pytest_v2"

    task = from_row(simple("r2e-gym"))
    assert (task.style, task.instance_id) == ("r2e-gym", f"sympy__{'b' * 12}")
    assert task.base_commit == "a" * 40
    assert task.patch == simple("swe-smith")["patch"]
    assert task.expected == (("test_a", "PASSED"),)
    assert task.fail_to_pass == ("test_a",)


@pytest.mark.parametrize("style", [datasets.BENCH, datasets.SMITH, datasets.GYM, datasets.REBENCH, datasets.R2E])
def test_each_style_goes_through_our_own_rows(style: str) -> None:
    task = from_row(simple(style))
    assert task.style == style
    assert from_row(json.loads(json.dumps(task.row()))) == task
    assert from_row(task.row()).digest == task.digest


@pytest.mark.parametrize("style", [datasets.SMITH, datasets.GYM, datasets.REBENCH, datasets.R2E])
def test_a_missing_column_is_named_with_what_it_is_for(style: str) -> None:
    known_by = {"swe-smith": (), "swe-rebench": ("install_config",), "swe-gym": ("repo",)}.get(style, ())
    for name, why in datasets.WHY[style].items():
        if name in known_by:
            continue
        with pytest.raises(TaskError, match=rf"the column '{name}' is missing, {why}"):
            from_row({key: value for key, value in simple(style).items() if key != name}, where="row 7")


def test_a_row_of_no_style_says_what_each_would_need() -> None:
    with pytest.raises(
        TaskError, match=r"row 3: its columns fit no style: .*swe-smith \(.*patch.*\).*r2e-gym"
    ) as error:
        from_row({"question": "?", "answer": "!"} | {f"column {n}": "x" * 1000 for n in range(1000)}, where="row 3")
    assert len(str(error.value)) < 2500


def test_a_row_may_bring_what_is_else_known_by_heart() -> None:
    row = {**simple("swe-smith"), "image": "own:1", "eval_script": "go test", "log_parser": "parse_log_gotest"}
    task = from_row({**row, "FAIL_TO_PASS": ["TestA"], "PASS_TO_PASS": []})
    assert (task.image, task.eval_script, task.log_parser) == ("own:1", "go test", "parse_log_gotest")
    with pytest.raises(TaskError, match="rows of other languages must bring eval_script and log_parser"):
        from_row({**simple("swe-smith"), "FAIL_TO_PASS": ["TestA"]})


def test_the_digest_tells_what_is_done_to_the_image() -> None:
    task = from_row(simple("swe-bench"))
    for change in ({"bug": "x"}, {"hidden": ["x"]}, {"removed": ["x"]}, {"expected": {"x": "PASSED"}}):
        changed = from_row({**simple("swe-bench"), **change})
        assert changed.digest != task.digest
        assert from_row(changed.row()) == changed


def test_a_source_file_is_not_hidden_for_the_tests_in_it() -> None:
    row = {**simple("swe-smith"), "FAIL_TO_PASS": ["a.py::a", "lib/x.py::x", "tests/test_a.py::test_a"]}
    assert from_row(row).hidden == ("tests/test_a.py",)


@pytest.mark.parametrize(
    "repository, ids, words",
    [
        ("sympy__sympy", ["sympy/a.py::t"], "--verbose sympy/a.py tests/test_b.py\n"),
        (
            "python__mypy",
            ["mypy/test/testcheck.py::Suite::testOne", "a.py::B::testTwo"],
            "-rA -k 'testOne or testTwo or test_b'\n",
        ),
        ("tornadoweb__tornado", ["test_a (tornado.test.web_test.A)"], "\npython -m tornado.test --verbose\n"),
        ("paramiko__paramiko", ["tests/test_a.py::test_a"], "\npytest -rA --color=no --disable-warnings\n"),
    ],
)
def test_commands_of_swe_smith(repository: str, ids: list[str], words: str) -> None:
    row = {**simple("swe-smith"), "repo": f"swesmith/{repository}.12345678", "FAIL_TO_PASS": ids}
    assert words in from_row(row).eval_script


@pytest.mark.parametrize("version, command", [("1.6", "pytest -n0 -rA -k"), ("1.10", "pytest -rA -k")])
def test_cases_of_mypy_in_swe_gym(version: str, command: str) -> None:
    test_patch = "diff --git a/test-data/x.test b/test-data/x.test\n+[case testOne]\n+[case testTwo]\n"
    row = {**simple("swe-gym"), "repo": "python/mypy", "version": version, "test_patch": test_patch}
    assert f'\n{command} "testOne or testTwo"\n' in from_row(row).eval_script


PATCHES = {
    "a change": ({"a": "1\n2\n3\n"}, {"a": "1\n4\n5\n3\n"}),
    "no newline at the end": ({"a": "1\n2"}, {"a": "1\n3\n"}),
    "and the other way round": ({"a": "1\n3\n"}, {"a": "1\n2"}),
    "a new file": ({}, {"b": "1\n"}),
    "a deleted file": ({"b c": "1\n"}, {}),
    "two hunks": ({"a": "\n".join(map(str, range(50)))}, {"a": "\n".join(map(str, [*range(5), *range(6, 45), 7]))}),
    "a renamed file": ({"old": "1\n2\n3\n4\n"}, {"new": "1\n2\n3\n5\n"}),
    "two files": ({"a": "1\r\n", "b": "-- x\n"}, {"a": "2\r\n", "b": "++ y\n"}),
    "no letters of ours": ({"ä": "1\n"}, {"ä": "2\n"}),
    "a renamed file of such": ({"ä": "1\n2\n3\n4\n"}, {"ö": "1\n2\n3\n5\n"}),
}


@pytest.mark.parametrize("name", PATCHES)
def test_patches_are_turned_round_as_git_does(name: str, tmp_path: Path) -> None:
    before, after = PATCHES[name]
    git(tmp_path, "init", "-q")
    for files in (before, after):
        for path in tmp_path.iterdir():
            if path.name != ".git":
                path.unlink()
        for path, content in files.items():  # type: ignore[assignment]
            (tmp_path / path).write_bytes(content.encode())
        git(tmp_path, "add", "-A")
        git(tmp_path, "commit", "-q", "--allow-empty", "-m", "x")
    forward, backward = (git(tmp_path, "diff", "-M", *pair) for pair in (("HEAD~1", "HEAD"), ("HEAD", "HEAD~1")))
    made = datasets.reversed_patch(forward)
    assert datasets.reversed_patch(made) == forward
    (tmp_path / ".git/reversed").write_text(made, newline="")
    git(tmp_path, "apply", "--index", ".git/reversed")
    assert git(tmp_path, "diff", "--cached", "HEAD~1") == ""
    if name != "two hunks":  # what git says after @@ is a matter of the old side
        assert made == backward


@pytest.mark.parametrize("patch", ["", "no patch", "diff --git a/x b/x\nGIT binary patch\nliteral 1\nx\n"])
def test_what_cannot_be_turned_round_is_refused(patch: str) -> None:
    with pytest.raises(TaskError, match="column 'patch'"):
        from_row({**simple("swe-smith"), "patch": patch})


@pytest.mark.parametrize(
    "parser, log, found",
    [
        ("pytest_verbose", "a.py::b ERROR [ 1%]\nx\nPASSED a.py::c", {"a.py::b": "ERROR"}),
        (
            "pytest_summary",
            "PASSED a.py::b\nFAILED a.py::c - x\na.py::d PASSED",
            {"a.py::b": "PASSED", "a.py::c": "FAILED"},
        ),
        ("pytest_workers", "[gw1] PASSED a.py::b\nPASSED a.py::c", {"a.py::b": "PASSED"}),
        ("tornado", "test_a (t.A) ... ok\nFAIL: test_b (t.B)", {"test_a (t.A)": "PASSED", "test_b (t.B)": "FAILED"}),
        ("mypy_cases", "PASSED mypy/a.test::testA", {"mypy/a.test::testA": "PASSED"}),
        ("r2e", "PASSED a.py::b", {}),
        ("r2e", "short test summary info\nERROR a.py - x\nSKIPPED [1] b\n1 passed", {"": "ERROR"}),
    ],
)
def test_parsers(parser: str, log: str, found: dict[str, str]) -> None:
    assert getattr(parsers, parser)(log) == found


@pytest.mark.parametrize("name", datasets.NAMES)
def test_data_sets_are_found_by_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOXGYM_DATA", str(tmp_path))
    with pytest.raises(DataNotFound, match=f"no {name}.parquet, .jsonl or .json in .*, nor a directory {name}"):
        open_tasks(name)
    (tmp_path / "swebench").mkdir()
    (tmp_path / "swebench" / f"{name}.jsonl").write_text(json.dumps(simple(name)))
    assert open_tasks(name)[0].style == name


def test_a_directory_of_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "swebench" / "swe-smith" / "data"
    folder.mkdir(parents=True)
    for number in range(3):
        rows = [{**simple("swe-smith"), "instance_id": f"o__r.12345678.x__{number}{more}"} for more in range(10)]
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"train-0000{number}-of-00003.parquet")
    monkeypatch.setenv("SANDBOXGYM_DATA", str(tmp_path))
    tasks = open_tasks("swe-smith")
    assert [task.instance_id[-2:] for task in tasks] == [f"{n // 10}{n % 10}" for n in range(30)]
    assert open_tasks(folder.parent, instances=["x__12"])[0].instance_id == "o__r.12345678.x__12"
    names: list[Task] = list(tasks)
    assert names[0].fail_to_pass[0] is names[1].fail_to_pass[0]  # thousands of rows share them


def test_instances_of_rows_without_a_name_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([simple("r2e-gym"), {**simple("r2e-gym"), "commit_hash": "c" * 40}]))
    assert [task.instance_id for task in open_tasks(path, instances=["c" * 12])] == [f"sympy__{'c' * 12}"]
    with pytest.raises(TaskNotFound, match="has none of x"):
        open_tasks(path, instances=["x"])


DEEP = "[" * 100_000
LONG = 33 * 2**20


@pytest.mark.parametrize(
    "style, change, message",
    [
        (
            "swe-smith",
            {"patch": "x" * LONG},
            r"column 'patch': expected at most 33,554,432 characters, found 34,603,008",
        ),
        ("swe-bench", {"problem_statement": "x" * LONG}, r"column 'problem_statement': expected at most"),
        ("swe-bench", {"FAIL_TO_PASS": DEEP}, r"column 'FAIL_TO_PASS': expected a JSON list of tests, .* too deep"),
        ("swe-bench", {"FAIL_TO_PASS": ["x" * LONG]}, r"column 'FAIL_TO_PASS': expected at most"),
        ("swe-bench", {"patch": "\ud800"}, r"column 'patch': not valid Unicode"),
        ("swe-bench", {"instance_id": "x" * 10**6}, r"column 'instance_id': expected a name, found 'xxx"),
        ("swe-bench", {"image": "a\n b"}, r"column 'image': expected the name of an image"),
        ("swe-smith", {"image_name": 3}, r"column 'image': expected text, found 3"),
        ("swe-smith", {"FAIL_TO_PASS": ["../../etc/passwd.py::a"]}, r"expected tests of files in the repository"),
        ("swe-smith", {"FAIL_TO_PASS": {"a": 1}}, r"column 'FAIL_TO_PASS': expected a list of tests"),
        ("swe-rebench", {"install_config": "{"}, r"column 'install_config': expected an object in JSON"),
        ("swe-rebench", {"install_config": []}, r"column 'install_config': expected an object, found list"),
        (
            "swe-rebench",
            {"install_config": {}},
            r"'install_config': the column 'test_cmd' is missing, which runs the tests",
        ),
        ("r2e-gym", {"parsed_commit_content": DEEP}, r"column 'parsed_commit_content': expected a commit.* too deep"),
        ("r2e-gym", {"parsed_commit_content": "[]"}, r"column 'parsed_commit_content': expected a commit"),
        ("r2e-gym", {"parsed_commit_content": '{"file_diffs": [{}]}'}, r"expected a commit as R2E-Gym describes it"),
        ("r2e-gym", {"expected_output_json": '{"a": 1}'}, r"expected the status of each test"),
        ("r2e-gym", {"expected_output_json": "{}"}, r"expected the status of each test"),
        ("r2e-gym", {"commit_hash": None}, r"column 'commit_hash': expected text, found None"),
        ("swe-gym", {"version": 3}, r"column 'version': expected text, found 3"),
    ],
)
def test_malformed_columns(style: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message) as error:
        from_row({**simple(style), **change}, where="row 3")
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("rows.parquet", b"", "expected parquet, found"),
        ("rows.parquet", b"PAR1" + b"x" * 100 + b"PAR1", "expected parquet, found"),
        ("rows.jsonl", b"", "has no rows"),
        ("rows.json", b"", "expected json, found"),
        ("rows.jsonl", b'{"a": "\xff"}\n', "line 1: expected a row in JSON, found .*utf-8"),
        ("rows.json", b"\xff\xfe[\x00", "expected json, found .*utf-8"),
        ("rows.json", DEEP.encode(), "found JSON that is nested too deep"),
        ("rows.jsonl", b'{"a":' * 100_000, "found JSON that is nested too deep"),
        ("rows.jsonl", b"[1]\n", "expected an object with the columns"),
        ("rows.jsonl.xz", b"\xfd7zXZ", r"expected a file whose name ends in .parquet, .jsonl, .json"),
    ],
)
def test_damaged_files(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(TaskError, match=message) as error:
        open_tasks(path)
    assert len(str(error.value)) < 1000


def test_names_in_errors_are_printable() -> None:
    row = {**simple("swe-bench"), "instance_id": "a\x1b[31m\nb", "\x1b[2Jmore": 1, "patch": 3}
    with pytest.raises(TaskError, match="column 'patch'") as error:
        from_row(row)
    assert str(error.value).isprintable()
    del row["patch"]
    with pytest.raises(TaskError, match="column 'patch' is missing") as error:
        from_row(row)
    assert str(error.value).isprintable()


def test_a_directory_without_rows(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="expected a directory with files of rows"):
        open_tasks(tmp_path)


def test_a_column_that_unpacks_to_much_more(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{**simple("swe-bench"), "patch": "x" * 200_000_000}]), path)
    assert path.stat().st_size < 20_000_000
    with pytest.raises(TaskError, match=r"row 0 .*, column 'patch': expected at most .* found 200,000,000"):
        open_tasks(path)
