"""The embedded tasks: their content, and that only their solutions resolve them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from sandboxgym.envs.swebench import mini
from sandboxgym.envs.swebench.mini.source import SourceError, git_patch, parse
from sandboxgym.envs.swebench.rows.tasks import Task

TASKS = list(mini.tasks())
BACKENDS = ("overlay", "overlay-rootless", "copy", "docker")
EASY = ["northpine__slugline-4", "oakline__errands-14"]


def test_there_are_enough_of_them() -> None:
    assert len(TASKS) == 22
    assert len({task.repo for task in TASKS}) == 9
    assert {task.difficulty for task in TASKS} == {"one-line", "small", "medium", "multi-file"}
    assert len({task.problem_statement for task in TASKS}) == len(TASKS)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.instance_id)
def test_every_task_is_whole(task: Task) -> None:
    assert task.fail_to_pass and task.pass_to_pass
    assert not set(task.fail_to_pass) & set(task.pass_to_pass)
    assert "tests/" not in task.patch and "tests/" in task.test_patch
    touched = re.findall(r"^diff --git a/(\S+)", task.patch, re.MULTILINE)
    assert (len(touched) > 1) == (task.difficulty == "multi-file") or task.difficulty == "small"
    assert len(task.base_commit) == 40


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.instance_id)
def test_the_history_does_not_tell_the_solution(task: Task) -> None:
    added = {line[1:] for line in task.patch.split("\n") if re.match(r"\+(?!\+\+)\s*\S{12}", line)}
    hidden = {line[1:] for line in task.test_patch.split("\n") if re.match(r"\+def test", line)}
    assert hidden
    known = set(task.history.split("\n"))
    assert not hidden & known
    assert not added or not added <= known


def test_sources_that_do_not_fit_are_named() -> None:
    start = "@@@ repository a/b\n@@@ commit 2020-01-01T00:00:00Z A <a@b>\nfirst\n@@@ file f\none\none\n"
    with pytest.raises(SourceError, match="f holds 2 times"):
        parse(start + "@@@ edit f\n<<<<<<<\none\n=======\ntwo\n>>>>>>>\n", name="x")
    with pytest.raises(SourceError, match="does not exist"):
        parse(start + "@@@ edit g\n<<<<<<<\none\n=======\ntwo\n>>>>>>>\n", name="x")
    with pytest.raises(SourceError, match="expected repository, commit"):
        parse(start + "@@@ surprise\n", name="x")
    with pytest.raises(SourceError, match="its action"):
        parse(start + "@@@ action\nls\n", name="x")


def test_patches_are_in_gits_format() -> None:
    assert git_patch({"a": "1\n2\n"}, {"a": "1\n3\n", "b": "new\n"}) == (
        "diff --git a/a b/a\n--- a/a\n+++ b/a\n@@ -1,2 +1,2 @@\n 1\n-2\n+3\n"
        "diff --git a/b b/b\nnew file mode 100644\n--- /dev/null\n+++ b/b\n@@ -0,0 +1 @@\n+new\n"
    )


def wrong(patch: str) -> str:
    """A patch that applies and does nothing useful: what it adds becomes comments of the same lines."""
    return "".join(
        f"+# {line[1:]}" if line.startswith("+") and not line.startswith("+++") else line
        for line in patch.splitlines(keepends=True)
    )


def new_file(path: str, line: str) -> str:
    """A patch that makes a file of one line."""
    head = f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n"
    return f"{head}@@ -0,0 +1 @@\n+{line}\n"


def check_verdicts(task: Task, arguments: dict[str, Any]) -> None:
    from sandboxgym.envs.swebench.grading import verdict as grading
    from sandboxgym.envs.swebench.workspaces.workspace import WorkspaceSettings, pristine

    settings = WorkspaceSettings(**arguments)
    start = pristine(task, settings)

    def verdict(patch: str) -> grading.PatchVerdict:
        return grading.grade(start.snapshot, start, task, settings, patch=patch, timeout=120, counterchecked=True)

    gold = verdict(task.patch)
    assert gold.resolved and gold.suspicious == (), (gold.suspicious, gold.log)
    assert gold.tests_status is not None
    assert not gold.tests_status["FAIL_TO_PASS"]["failure"] and not gold.tests_status["PASS_TO_PASS"]["failure"]
    assert grading.grade(start.snapshot, start, task, settings).reason == "no patch"
    assert not verdict(wrong(task.patch)).resolved
    package = task.repo.split("/")[1]
    assert verdict(new_file(f"{package}/new.py", "harmless = True")).reason == "tests fail"
    assert verdict(task.patch + new_file(f"{package}/__init__.py", "x = 1")).reason == "patch does not apply"
    assert not verdict(task.patch + new_file("conftest.py", "def (:")).resolved


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", EASY)
def test_only_the_solution_resolves(name: str, backend: str, backend_of: Callable[[str], dict[str, Any]]) -> None:
    tasks = mini.tasks()
    check_verdicts(tasks[tasks.index(name)], backend_of(backend))


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.instance_id)
def test_only_the_solution_resolves_any_task(task: Task, quick_backend: dict[str, Any]) -> None:
    check_verdicts(task, quick_backend)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS[::4], ids=lambda task: task.instance_id)
def test_what_is_recorded_is_what_is_found(task: Task, quick_backend: dict[str, Any]) -> None:
    from sandboxgym.envs.swebench.mini import record

    index = TASKS.index(task)
    found = record.record(quick_backend, only=[task.instance_id])[task.instance_id]
    row = mini.rows()[index]
    assert found == {name: row[name] for name in ("base_commit", "FAIL_TO_PASS", "PASS_TO_PASS")}
