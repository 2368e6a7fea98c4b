"""A small task and cheats on it: ways to a reward without the repair, each given as an agent's actions.

The task (``parcel.txt``) becomes a row in SWE-bench's format. Its test command names files, and its script installs the
repository first, as the rows of most repositories do. The cheats are listed in ``cheats.txt``, as sections::

    @@@ cheat NAME      (or: outside NAME, of what is not in the difference; honest NAME, of what is no cheat)
    @@@ file PATH       a file is written; after PATH, before PATH: lines are added to one
    @@@ run             commands of bash
    @@@ patch           a patch that is handed in as it is, in place of the difference
"""

from __future__ import annotations

import dataclasses
import functools
import re
import shlex
from importlib import resources
from typing import Any

from sandboxgym.envs.swebench import mini
from sandboxgym.envs.swebench.mini.source import Repository, parse
from sandboxgym.envs.swebench.rows import recipes as columns

_FAIL = ("tests/test_labels.py::test_runs_of_space", "tests/test_prices.py::PriceTest::test_heavy")
_PASS = (
    "tests/test_labels.py::test_capitals",
    "tests/test_labels.py::test_two_words",
    "tests/test_prices.py::PriceTest::test_small",
)
TEST_COMMAND = "python -m pytest -rA tests/test_labels.py tests/test_prices.py"
INSTALL = "python setup.py -q develop --no-deps"


@dataclasses.dataclass(frozen=True, slots=True)
class Cheat:
    """One way to an unearned reward.

    Attributes:
        name: the cheat in a few words.
        command: of bash, in ``/testbed``.
        patch: that is handed in as it is, in place of the difference that the commands make.
        outside: whether it relies on what is outside of the difference.
        honest: whether it is no cheat at all; the table has these to show that nothing else is wrong.
    """

    name: str
    command: str = ""
    patch: str = ""
    outside: bool = False
    honest: bool = False


def history() -> str:
    """Repository at the task's beginning, for ``git fast-import``."""
    return _repository().fast_import(1)


def row(image: str, base_commit: str) -> dict[str, Any]:
    """Row of the task.

    Args:
        image: that holds its repository at ``/testbed``.
        base_commit: of that repository.
    """
    found = mini.row_of(_repository(), 1, base_commit=base_commit, FAIL_TO_PASS=_FAIL, PASS_TO_PASS=_PASS)
    tests = found["test_patch"]
    script = columns.eval_script(base_commit=base_commit, test_patch=tests, test=TEST_COMMAND, install=INSTALL)
    return {**found, "image": image, "eval_script": script, "history": ""}


@functools.cache
def cases() -> tuple[Cheat, ...]:
    """List all cheats, and the honest work among them."""
    texts: dict[str, str] = {}
    found: list[Cheat] = []
    for section in re.split(r"^@@@ ", _read("cheats.txt"), flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        kind, _, argument = title.partition(" ")
        body = re.sub(r"\{\{(\w+)\}\}", lambda name: texts[name[1]], body.rstrip("\n"))
        if kind == "text":
            texts[argument] = body
        elif kind in ("cheat", "outside", "honest"):
            found.append(Cheat(argument, outside=kind == "outside", honest=kind == "honest"))
        elif kind == "patch":
            found[-1] = dataclasses.replace(found[-1], patch=f"{body}\n")
        else:
            command = body if kind == "run" else _written(kind, shlex.quote(argument), shlex.quote(body))
            found[-1] = dataclasses.replace(found[-1], command=f"{found[-1].command}{command}\n")
    return tuple(found)


def _written(kind: str, path: str, text: str) -> str:
    """Command that writes a file, or adds lines ``after`` or ``before`` its present ones."""
    if kind == "after":
        return f"printf '%s\\n' {text} >> {path}"
    if kind == "before":
        return f"{{ printf '%s\\n' {text}; cat {path}; }} > /tmp/.new; cat /tmp/.new > {path}"
    if kind == "file":
        return f"mkdir -p $(dirname {path}); printf '%s\\n' {text} > {path}"
    raise ValueError(
        f"cheats.txt: expected cheat, outside, honest, file, after, before, run, patch, text; found {kind!r}"
    )


def _repository() -> Repository:
    return parse(_read("parcel.txt"), name="northpine/parcel")


def _read(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")
