"""The embedded tasks: small repositories of our own, with a history, in SWE-bench's row format.

1. Each ``.txt`` file here is a repository as a list of its commits (`source`). A commit that closes an issue is a
   task, made as SWE-bench makes them: the commit before it is the base, its changes under ``tests/`` are the test
   patch, its other changes are the solution.
2. A task's history ends with its base: later commits, solutions and tests are no part of it.
3. Base commits and lists of tests are recorded in ``recorded.json`` by
   ``python -m sandboxgym.envs.swebench.mini.record``, which runs every task with and without its solution.
4. In the last three tasks (`SERVICES`) a running process holds the information that the repair needs: the server that
   refused and deleted jobs, the session with a search under way, the watcher that saw files before they were
   overwritten. Their demonstrations ask that process; with the files alone the same commands solve nothing.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from sandboxgym.envs.swebench.mini.source import Commit, Repository, git_patch, parse
from sandboxgym.envs.swebench.rows import recipes as columns
from sandboxgym.envs.swebench.rows.tasks import HOST, TaskSet, from_row

SERVICES = ("letterbox", "framelink", "pressroom")
REPOSITORIES = ("slugline", "tally", "spans", "errands", "braid", "hoard", *SERVICES)
TEST_COMMAND = "python -m pytest -rA tests"


@functools.cache
def tasks() -> TaskSet:
    """List all embedded tasks."""
    return TaskSet((from_row(row, where=f"mini, row {number}") for number, row in enumerate(rows())), source="mini")


def rows() -> list[dict[str, Any]]:
    """List the rows of the embedded tasks, in the format of a data set."""
    recorded = json.loads((resources.files(__package__) / "recorded.json").read_text(encoding="utf-8"))
    return [
        row_of(repository, number, **recorded[instance_id])
        for repository in map(repository_of, REPOSITORIES)
        for number, commit in enumerate(repository.commits)
        if (instance_id := instance_id_of(repository, commit))
    ]


def repository_of(name: str) -> Repository:
    """Read one of `REPOSITORIES` with all its commits."""
    return parse((resources.files(__package__) / f"{name}.txt").read_text(encoding="utf-8"), name=name)


def instance_id_of(repository: Repository, commit: Commit) -> str | None:
    """Name of the task that a commit solves; None if it closes no issue."""
    return f"{repository.name.replace('/', '__')}-{commit.issue.number}" if commit.issue else None


def row_of(
    repository: Repository,
    number: int,
    *,
    base_commit: str,
    FAIL_TO_PASS: Sequence[str] = (),
    PASS_TO_PASS: Sequence[str] = (),
) -> dict[str, Any]:
    """Row of the task that the commit of this number solves, with its recorded columns."""
    commit, base = repository.commits[number], repository.commits[number - 1]
    assert commit.issue is not None
    patches = {
        is_test: git_patch(
            {path: text for path, text in base.files.items() if path.startswith("tests/") == is_test},
            {path: text for path, text in commit.files.items() if path.startswith("tests/") == is_test},
        )
        for is_test in (False, True)
    }
    return {
        "repo": repository.name,
        "instance_id": instance_id_of(repository, commit),
        "base_commit": base_commit,
        "patch": patches[False],
        "test_patch": patches[True],
        "problem_statement": commit.issue.text,
        "hints_text": "",
        "created_at": commit.date,
        "version": f"0.{number}",
        "FAIL_TO_PASS": list(FAIL_TO_PASS),
        "PASS_TO_PASS": list(PASS_TO_PASS),
        "environment_setup_commit": base_commit,
        "difficulty": commit.issue.difficulty,
        "image": HOST,
        "eval_script": columns.eval_script(base_commit=base_commit, test_patch=patches[True], test=TEST_COMMAND),
        "log_parser": "parse_log_pytest_v2",
        "eval_type": "pass_and_fail",
        "history": repository.fast_import(number),
        "demonstration": list(commit.issue.actions),
    }
