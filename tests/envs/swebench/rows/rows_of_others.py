"""Rows of other training sets, and the small repository that they are about."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

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
