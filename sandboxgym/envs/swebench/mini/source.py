"""Format of the embedded repositories, a list of commits, with converters to patches and ``git fast-import`` streams.

A file of this format is a sequence of sections, each opened by a line that begins with ``@@@``::

    @@@ repository owner/name
    @@@ commit 2021-02-03T09:12:00Z Ines Duarte <ines@northpine.example>
    the commit's message
    @@@ task 4 one-line
    the issue that the commit closes: a title, an empty line, the text
    @@@ action
    a command that the issue's demonstration runs (none, as a rule)
    @@@ file path/of/a/new/file
    its content
    @@@ edit path/of/a/file
    replacements

A replacement is written as git writes a conflict: a line of seven ``<``, text that occurs once in the file, a line of
seven ``=``, its replacement, a line of seven ``>``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime

_EDIT = re.compile(r"^<<<<<<<\n(.*?)^=======\n(.*?)^>>>>>>>\n", re.MULTILINE | re.DOTALL)


class SourceError(ValueError):
    """Raised for a file that is not in this format; the message says where."""


@dataclass(frozen=True, slots=True)
class Issue:
    """An issue that a commit closes."""

    number: int
    difficulty: str
    text: str
    actions: tuple[str, ...] = ()
    """Commands that solve it, if reading and editing are not enough."""


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit, with all files after it."""

    date: str
    author: str
    message: str
    files: Mapping[str, str]
    issue: Issue | None


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository: a name as on GitHub, and a linear history."""

    name: str
    commits: tuple[Commit, ...]

    def fast_import(self, count: int) -> str:
        """Write the first ``count`` commits as a stream that puts them on the branch ``main``."""
        lines: list[str] = []
        before: Mapping[str, str] = {}
        for commit in self.commits[:count]:
            seconds = int(datetime.fromisoformat(commit.date).timestamp())
            lines.append("commit refs/heads/main")
            lines += [f"{role} {commit.author} {seconds} +0000" for role in ("author", "committer")]
            lines.append(_data(commit.message))
            for path, text in commit.files.items():
                if before.get(path) != text:
                    lines += [f"M 100644 inline {path}", _data(text)]
            before = commit.files
        return "".join(f"{line}\n" for line in lines)


def parse(text: str, *, name: str) -> Repository:
    """Parse a file to its repository.

    Args:
        text: content of the file.
        name: name of the file in errors.

    Raises:
        SourceError: a section is unknown or out of place, or an edit does not apply.
    """
    sections = re.split(r"^@@@ ", text, flags=re.MULTILINE)[1:]
    repository, commits = "", list[Commit]()
    head, files, issue = None, dict[str, str](), None

    def finish() -> None:
        if head is not None:
            commits.append(Commit(*head, dict(files), issue))

    for section in sections:
        title, _, body = section.partition("\n")
        kind, _, argument = title.partition(" ")
        body = body.rstrip("\n") + "\n"
        if kind == "repository":
            repository = argument
        elif kind == "commit":
            finish()
            date, _, author = argument.partition(" ")
            head, issue = (date, author, body), None
        elif kind == "task":
            number, _, difficulty = argument.partition(" ")
            issue = Issue(int(number), difficulty, body)
        elif kind == "action" and issue is not None:
            issue = replace(issue, actions=(*issue.actions, body.removesuffix("\n")))
        elif kind == "file":
            files[argument] = body
        elif kind == "edit":
            files[argument] = _edited(files, argument, body, name)
        else:
            raise SourceError(f"{name}: expected repository, commit, task, its action, file or edit, found {title!r}")
    finish()
    return Repository(repository, tuple(commits))


def git_patch(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Write the patch from some files to others, in git's format; no file is deleted."""
    patch = []
    for path in sorted(after):
        old, new = before.get(path), after[path]
        if old == new:
            continue
        patch.append(f"diff --git a/{path} b/{path}\n")
        if old is None:
            patch.append("new file mode 100644\n")
        names = ("/dev/null" if old is None else f"a/{path}", f"b/{path}")
        patch += difflib.unified_diff(_lines(old or ""), _lines(new), *names)
    return "".join(patch)


def _edited(files: Mapping[str, str], path: str, body: str, name: str) -> str:
    if path not in files:
        raise SourceError(f"{name}: edit of {path}, which does not exist")
    text, edits = files[path], _EDIT.findall(body)
    if not edits or _EDIT.sub("", body).strip():
        raise SourceError(f"{name}: expected <<<<<<<, =======, >>>>>>> in the edit of {path}, found {body!r:.80}")
    for old, new in edits:
        if text.count(old) != 1:
            raise SourceError(f"{name}: {path} holds {text.count(old)} times what an edit replaces: {old!r:.200}")
        text = text.replace(old, new)
    return text


def _lines(text: str) -> list[str]:
    return [f"{line}\n" for line in text.removesuffix("\n").split("\n")] if text else []


def _data(text: str) -> str:
    return f"data {len(text.encode())}\n{text}"
