"""The editor, on files of this machine instead of a sandbox's."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from sandboxgym.sandbox.agent.editor import AROUND, SHOWN, UNDO, Editor
from sandboxgym.sandbox.agent.tools import Edit
from sandboxgym.sandbox.base import Result


class HostFiles:
    def read_file(self, path: str) -> bytes:
        return Path(path).read_bytes()

    def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(data)
        Path(path).chmod(mode)

    def run(self, command: str) -> Result:
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        return Result(done.stdout, done.returncode, 0.0)


class Session:
    """An editor and what it last said."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.editor = Editor()
        self.said, self.done = "", True

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def do(self, command: str, name: str, **arguments: Any) -> str:
        call = Edit(command, self.path(name), arguments)
        self.editor, self.said, self.done = self.editor.edited(call, HostFiles())
        return self.said

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def text(self, name: str) -> str:
        return (self.folder / name).read_text()


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(tmp_path)


def numbered(*lines: tuple[int, str]) -> str:
    return "\n".join(f"{number:6}\t{line}" for number, line in lines)


def test_view_numbers_lines(session: Session) -> None:
    session.write("a.txt", "one\ntwo\nthree")
    assert numbered((1, "one"), (2, "two"), (3, "three")) in session.do("view", "a.txt")
    assert (
        session.do("view", "a.txt", view_range=(2, -1)).split(":\n", 1)[1] == numbered((2, "two"), (3, "three")) + "\n"
    )


@pytest.mark.parametrize("wanted", [(0, 2), (4, 5), (2, 1), (1, 9)])
def test_view_range_must_be_in_the_file(session: Session, wanted: tuple[int, int]) -> None:
    session.write("a.txt", "one\ntwo\nthree")
    assert "Invalid `view_range`" in session.do("view", "a.txt", view_range=wanted)
    assert not session.done


def test_view_of_a_directory(session: Session) -> None:
    (session.folder / "d/e/f").mkdir(parents=True)
    for name in ("d/x", "d/.hidden", "d/e/y", "d/e/f/z"):
        session.write(name, "")
    listing = session.do("view", "d").split("\n")[1:]
    assert listing[:-1] == [session.path(name) for name in ("d", "d/e", "d/e/f", "d/e/y", "d/x")]
    assert "not allowed" in session.do("view", "d", view_range=(1, 2))


def test_long_files_are_clipped(session: Session) -> None:
    session.write("a.txt", "x" * (SHOWN + 1))
    assert len(session.do("view", "a.txt")) < SHOWN + 300
    assert "<response clipped>" in session.said


def test_long_python_files_are_outlined(session: Session) -> None:
    body = "".join(f"    value_{number} = {number}\n" for number in range(400))
    session.write("a.py", f'def long():\n    """What it does."""\n{body}\n\ndef short():\n    return 1\n' + "#" * SHOWN)
    said = session.do("view", "a.py")
    assert "def long():" in said and "def short():" in said and "left out ..." in said and "value_200" not in said


def test_paths_must_be_absolute_and_exist(session: Session) -> None:
    _, said, done = Editor().edited(Edit("view", "a.txt"), HostFiles())
    assert "not absolute" in said and not done
    assert "does not exist" in session.do("view", "none.txt")
    assert "does not exist" in session.do("str_replace", "none.txt", old_str="a", new_str="b")


def test_create_refuses_existing_files(session: Session) -> None:
    assert (
        session.do("create", "new/a.txt", file_text="text\n")
        == f"File created successfully at: {session.path('new/a.txt')}"
    )
    assert session.text("new/a.txt") == "text\n"
    assert "File already exists" in session.do("create", "new/a.txt", file_text="other")
    assert session.text("new/a.txt") == "text\n" and not session.done


def test_str_replace_shows_what_is_around(session: Session) -> None:
    lines = [f"line {number}" for number in range(1, 21)]
    session.write("a.txt", "\n".join(lines))
    said = session.do("str_replace", "a.txt", old_str="line 10", new_str="ten\nand a half")
    assert session.text("a.txt") == "\n".join([*lines[:9], "ten", "and a half", *lines[10:]])
    shown = [line.split("\t")[1] for line in said.split("\n") if "\t" in line]
    assert shown == [*lines[9 - AROUND : 9], "ten", "and a half", *lines[10 : 10 + AROUND]]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"old_str": "missing", "new_str": "x"}, "old_str `missing` did not appear verbatim in"),
        ({"old_str": "twice", "new_str": "x"}, "Multiple occurrences of old_str `twice` in lines [1, 3]"),
        ({"old_str": "once", "new_str": "once"}, "is the same as new_str"),
        ({"old_str": "", "new_str": "x"}, "is empty"),
    ],
)
def test_str_replace_must_be_unambiguous(session: Session, arguments: dict[str, str], message: str) -> None:
    session.write("a.txt", "twice\nonce\ntwice\n")
    assert message in session.do("str_replace", "a.txt", **arguments)
    assert session.text("a.txt") == "twice\nonce\ntwice\n" and not session.done


def test_str_replace_can_delete(session: Session) -> None:
    session.write("a.txt", "a\nb\nc\n")
    session.do("str_replace", "a.txt", old_str="b\n")
    assert session.text("a.txt") == "a\nc\n"


@pytest.mark.parametrize("after, expected", [(0, "new\na\nb\n"), (1, "a\nnew\nb\n"), (2, "a\nb\nnew\n")])
def test_insert(session: Session, after: int, expected: str) -> None:
    session.write("a.txt", "a\nb\n")
    session.do("insert", "a.txt", insert_line=after, new_str="new")
    assert session.text("a.txt") == expected


def test_insert_beyond_the_end(session: Session) -> None:
    session.write("a.txt", "a\n")
    assert "Invalid `insert_line`: 9" in session.do("insert", "a.txt", insert_line=9, new_str="x")


def test_undo_goes_back_step_by_step(session: Session) -> None:
    session.write("a.txt", "1")
    session.do("str_replace", "a.txt", old_str="1", new_str="2")
    session.do("str_replace", "a.txt", old_str="2", new_str="3")
    assert "undone successfully" in session.do("undo_edit", "a.txt")
    assert session.text("a.txt") == "2"
    session.do("undo_edit", "a.txt")
    assert session.text("a.txt") == "1"
    assert "No edit history found" in session.do("undo_edit", "a.txt")


def test_history_is_a_value(session: Session) -> None:
    session.write("a.txt", "1")
    session.do("str_replace", "a.txt", old_str="1", new_str="2")
    before = session.editor
    session.do("str_replace", "a.txt", old_str="2", new_str="3")
    assert before.history == {session.path("a.txt"): ("1",)}
    assert Editor.from_plain(session.editor.plain()) == session.editor


def test_history_is_bounded(session: Session) -> None:
    session.write("a.txt", "0")
    for number in range(UNDO + 5):
        session.do("str_replace", "a.txt", old_str=str(number), new_str=str(number + 1))
    assert len(session.editor.history[session.path("a.txt")]) == UNDO


@pytest.mark.parametrize("value", [[], {"a": "text"}, {"a": [1]}, {1: []}])
def test_a_history_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="edited files"):
        Editor.from_plain(value)


def test_mode_and_odd_bytes_stay(session: Session) -> None:
    path = session.folder / "run.sh"
    path.write_bytes(b"#!/bin/sh\n# caf\xe9 \xff\r\necho a\n")
    path.chmod(0o755)
    assert "\\xe9" in session.do("view", "run.sh")
    session.do("str_replace", "run.sh", old_str="echo a", new_str="echo b")
    assert path.read_bytes() == b"#!/bin/sh\n# caf\xe9 \xff\r\necho b\n"
    assert path.stat().st_mode & 0o777 == 0o755


def test_directories_are_not_edited(session: Session) -> None:
    (session.folder / "d").mkdir()
    for command, arguments in (
        ("create", {"file_text": ""}),
        ("str_replace", {"old_str": "a"}),
        ("insert", {"insert_line": 0, "new_str": ""}),
    ):
        assert "directory" in session.do(command, "d", **arguments)
        assert not session.done


LONE = "\ud800"
CALLS: dict[str, dict[str, Any]] = {
    "view": {},
    "create": {"file_text": "x\n"},
    "str_replace": {"old_str": "a", "new_str": "b"},
    "insert": {"insert_line": 0, "new_str": "b"},
    "undo_edit": {},
}
NAMES = (f"a{LONE}", "a\udcff", "a\0b", "a" * 300, "/".join(["d" * 200] * 30), "x" * 2**20)


@pytest.mark.parametrize("command", CALLS)
@pytest.mark.parametrize("number", range(len(NAMES)))
def test_a_path_that_cannot_be_is_refused_in_words(session: Session, command: str, number: int) -> None:
    said = session.do(command, NAMES[number], **CALLS[command])
    assert not session.done and len(said) < SHOWN + 300
    said.encode()  # what is shown holds no lone surrogate
    assert list(session.folder.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "argument"),
    [("create", "file_text"), ("str_replace", "old_str"), ("str_replace", "new_str"), ("insert", "new_str")],
)
@pytest.mark.parametrize("text", [f"one{LONE}", "one\udcff"])
def test_a_text_that_is_none_is_refused_in_words(session: Session, command: str, argument: str, text: str) -> None:
    session.write("a.txt", "one\n")
    name = "new.txt" if command == "create" else "a.txt"
    said = session.do(command, name, **{**CALLS[command], "old_str": "one", argument: text})
    assert not session.done and f"`{argument}` holds half of a character (U+D" in said
    assert session.text("a.txt") == "one\n" and not (session.folder / "new.txt").exists()


def test_slashes_at_the_beginning_make_no_other_file(session: Session) -> None:
    session.write("a.txt", "one\n")
    session.do("str_replace", "a.txt", old_str="one", new_str="two")
    session.editor, said, done = session.editor.edited(Edit("undo_edit", f"/{session.path('a.txt')}"), HostFiles())
    assert done and session.text("a.txt") == "one\n", said
