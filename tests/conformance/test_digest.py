"""The version of the suite: it changes with what the suite does, and with nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sandboxgym.conformance import digest

SOURCE = '''
"""A module."""
LIMIT = 3  # rounds
"""Rounds of a loop."""

@check("a.b", level=1, hazard="Harm.", blind="Much.")
def rounds(subject, budget, rng, *, least=0):
    """Count."""
    return [f"{index:{budget}}" for index in range(LIMIT)] or {**budget, "all": None}

class Row(Base):
    """A row."""
'''
SAME = '''
"""Another text."""
LIMIT = 3
@check(
    'a.b', level=1, hazard='Other harm.', blind='Little.'
)
def rounds(subject, budget, rng, *, least=0):
    # A comment.
    return ([f'{index:{budget}}' for index in range(LIMIT)]
            or {**budget, 'all': None})
class Row(Base):
    """Another row."""
'''


def test_prose_and_formatting_do_not_move_it() -> None:
    assert digest.source_digest(SAME) == digest.source_digest(SOURCE)


def test_it_is_the_same_under_every_version_of_python() -> None:
    assert digest.source_digest(SOURCE)[:8] == "f73af741"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("LIMIT = 3", "LIMIT = 4"),
        ("level=1", "level=2"),
        ('"a.b"', '"a.c"'),
        ("{index:{budget}}", "{index}"),
        (" or ", " and "),
        ('"all": None', '"all": "None"'),
        ("(Base)", ""),
        ("least=0", "least=0.0"),
    ],
)
def test_what_the_code_does_moves_it(one: str, other: str) -> None:
    assert one in SOURCE
    assert digest.source_digest(SOURCE.replace(one, other)) != digest.source_digest(SOURCE)


@pytest.mark.parametrize("call", ["draw({})", "self.check({})", "check('a.b', level=draw({}))"])
def test_an_argument_that_is_only_named_like_prose_moves_it(call: str) -> None:
    assert digest.source_digest(call.format("hazard=1")) != digest.source_digest(call.format("hazard=2"))


def test_modules_that_decide_on_verdicts_belong_to_the_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "conformance"
    shutil.copytree(digest.HOME, home, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(digest, "HOME", home)

    def after(name: str, text: str) -> str:
        path = home / name
        kept = path.read_text(encoding="utf-8") if path.exists() else ""
        path.write_text(kept + text, encoding="utf-8")
        digest.suite_digest.cache_clear()
        return digest.suite_digest()

    first = after("check.py", "")
    assert after("check.py", '\n# A comment.\n"""A text."""\n') == first
    assert after("strength/faults.py", "\nMORE = 1\n") == first
    assert after("reports/html.py", "\nMORE = 1\n") == first
    second = after("checks/fork/alike.py", "\nMORE = 1\n")
    assert second != first
    assert after("checks/new.py", "\n") != second
    digest.suite_digest.cache_clear()
