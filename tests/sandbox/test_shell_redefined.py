"""A shell whose user redefined what its own lines could have called."""

from __future__ import annotations

import pytest
from sandbox.sandboxes import box, kind, make  # noqa: F401 - fixtures

from sandboxgym.sandbox.sandbox import Sandbox

# fixtures of another module are arguments of the tests below
# ruff: noqa: F811

NAMES = ": builtin printf eval command read declare export trap set unset cd exec return local source kill wait enable"


@pytest.mark.parametrize(
    ("setting", "question", "answer"),
    [
        (
            "; ".join(f"function {name} {{ echo {name} >>~/called; }}" for name in NAMES.split()),
            "type -t : builtin printf eval enable unset return",
            "function\n" * 7,
        ),
        ("alias " + " ".join(f"{name}=false" for name in NAMES.split()), "type -t eval builtin", "alias\nalias\n"),
        ("alias {='echo brace' }='echo end' if='echo if' then=x fi=y '[[=echo test'", "type -t { if", "alias\nalias\n"),
        (
            "enable -n builtin eval unset return",
            "enable -n",
            "".join(f"enable -n {name}\n" for name in ("builtin", "eval", "return", "unset")),
        ),
        ("enable -n . unset set trap mapfile", "type -t . unset set trap mapfile", ""),
        ("enable -n enable", "compgen -A disabled", "enable\n"),
    ],
)
def test_what_is_redefined_stays_so_and_hinders_nothing(box: Sandbox, setting: str, question: str, answer: str) -> None:
    assert box.execute(setting, timeout=20).exit_code == 0
    for number in range(2):
        result = box.execute(f"x={number}; echo out; false", timeout=20)
        assert (result.output, result.exit_code, result.ended) == ("out\n", 1, False)
        assert box.execute(question, timeout=20).output == answer
    snap = box.snapshot()
    box.restore(snap)
    snap.release()
    assert box.execute('echo "$x"', timeout=20).output == "1\n"
    assert box.execute(question, timeout=20).output == answer
    assert box.execute("cat ~/called", timeout=20).exit_code == 1
