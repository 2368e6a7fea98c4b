"""The file system of a sandbox as envd's methods show it: entries, changes of names, comparison of listings.

Everything is done by programs inside the sandbox, or below its root: no path and no link leads out of it, and what the
programs of the sandbox report is only ever shown to its owner.
"""

from __future__ import annotations

import base64
import os
import posixpath
import shlex
import stat
from collections.abc import Mapping

from sandboxgym.brief import brief
from sandboxgym.e2b.commands import failures, resolved
from sandboxgym.e2b.connect import ServiceError
from sandboxgym.e2b.messages import Message, format_time
from sandboxgym.sandbox.sandbox import Sandbox

MOST_ENTRIES = 20_000
"""Entries of one listing."""
DEEPEST = 100
"""Levels of one listing."""
_SECONDS = 20.0
_OUTPUT = 16 * 2**20
_FORMAT = r"%y\0%s\0%m\0%u\0%g\0%T@\0%l\0%i\0%p\0"
_FIELDS = 9
_TYPES = {"f": "FILE_TYPE_FILE", "d": "FILE_TYPE_DIRECTORY", "l": "FILE_TYPE_SYMLINK"}
_MISSING, _NO_DIRECTORY, _EXISTS, _NO_FILE = 81, 82, 83, 84

Listing = Mapping[str, tuple[str, ...]]
"""Facts found at each path, for `changes`."""


def _run(sandbox: Sandbox, script: str, path: str) -> str:
    with failures():
        result = sandbox.run(f"export LC_ALL=C\n{script}", timeout=_SECONDS, output=_OUTPUT, most=_OUTPUT, cwd="/")
    match result.exit_code:
        case 0 if not result.elided:
            return result.output
        case code if code == _MISSING:
            raise ServiceError("not_found", f"path not found: {brief(path, 300)}")
        case code if code == _NO_DIRECTORY:
            raise ServiceError("invalid_argument", f"path is not a directory: {brief(path, 300)}")
        case code if code == _EXISTS:
            raise ServiceError("already_exists", f"directory already exists: {brief(path, 300)}")
        case code if code == _NO_FILE:
            raise ServiceError("invalid_argument", f"path already exists but it is not a directory: {brief(path, 300)}")
        case 127:
            raise ServiceError(
                "unimplemented", f"a program is missing in the sandbox: {brief(result.output.strip(), 200)}"
            )
        case _ if result.timed_out or result.elided:
            raise ServiceError("resource_exhausted", f"too much, or too slow to be listed: {brief(path, 300)}")
    raise ServiceError("internal", brief(result.output.strip(), 300))


def _found(sandbox: Sandbox, path: str, options: str, *, follow: str = "-H") -> list[tuple[str, ...]]:
    """Rows of `_FORMAT` for what ``find`` finds."""
    word = shlex.quote(path)
    check = f"[[ -e {word} || -L {word} ]] || exit {_MISSING}\n"
    if "-mindepth" in options:
        check += f"[[ -d {word} ]] || exit {_NO_DIRECTORY}\n"
    # A directory that vanishes or is locked meanwhile is no reason to fail.
    text = _run(sandbox, f"{check}set -o pipefail\nfind {follow} {word} {options} | base64 -w0", path)
    fields = base64.b64decode(text).decode("utf-8", "replace").split("\0")[:-1]
    if len(fields) > MOST_ENTRIES * _FIELDS:
        raise ServiceError("resource_exhausted", f"expected at most {MOST_ENTRIES:,} entries, found more")
    return [tuple(fields[at : at + _FIELDS]) for at in range(0, len(fields) - _FIELDS + 1, _FIELDS)]


def _entry(row: tuple[str, ...]) -> Message:
    kind, size, mode, owner, group, modified, target, _, path = row
    bits = int(mode, 8)
    entry = {
        "name": posixpath.basename(path) or "/",
        "type": _TYPES.get(kind, "FILE_TYPE_UNSPECIFIED"),
        "path": path,
        "size": size,
        "mode": bits,
        "permissions": stat.filemode(bits)[1:],
        "owner": owner,
        "group": group,
        "modifiedTime": format_time(float(modified)),
    }
    return {**entry, "symlinkTarget": target} if kind == "l" else entry


def entry(sandbox: Sandbox, path: str) -> Message:
    """One ``EntryInfo``; of a link, not of what it leads to."""
    rows = _found(sandbox, path, f"-maxdepth 0 -printf {shlex.quote(_FORMAT)}", follow="-P")
    if not rows:
        raise ServiceError("not_found", f"path not found: {brief(path, 300)}")
    return _entry(rows[0])


def entries(sandbox: Sandbox, path: str, depth: int) -> list[Message]:
    """Entries of a directory, so many levels deep."""
    options = f"-mindepth 1 -maxdepth {min(max(depth, 1), DEEPEST)} -printf {shlex.quote(_FORMAT)}"
    return [_entry(row) for row in sorted(_found(sandbox, path, options), key=lambda row: row[-1])]


def listing(sandbox: Sandbox, path: str, *, recursive: bool) -> Listing:
    """Content of a directory, to be compared with later."""
    options = f"-mindepth 1 -maxdepth {DEEPEST if recursive else 1} -printf {shlex.quote(_FORMAT)}"
    rows = _found(sandbox, path, options)
    return {posixpath.relpath(row[-1], path): row[:-1] for row in rows}


def changes(before: Listing, after: Listing) -> list[Message]:
    """Differences of two listings as ``FilesystemEvent``."""
    events = [{"name": name, "type": "EVENT_TYPE_REMOVE"} for name in sorted(before.keys() - after.keys())]
    for name, (kind, size, mode, owner, group, modified, target, inode) in sorted(after.items()):
        old = before.get(name)
        if old is None or (old[0], old[7]) != (kind, inode):
            if old is not None:
                events.append({"name": name, "type": "EVENT_TYPE_REMOVE"})
            events.append({"name": name, "type": "EVENT_TYPE_CREATE"})
            written = kind == "f" and size != "0"
        else:
            written = kind != "d" and (old[1], old[5], old[6]) != (size, modified, target)
            if old[2:5] != (mode, owner, group):
                events.append({"name": name, "type": "EVENT_TYPE_CHMOD"})
        if written:
            events.append({"name": name, "type": "EVENT_TYPE_WRITE"})
    return events


def make_directory(sandbox: Sandbox, path: str) -> Message:
    """Make a directory and those above it."""
    word = shlex.quote(path)
    _run(
        sandbox,
        f"[[ -d {word} ]] && exit {_EXISTS}\n[[ -e {word} || -L {word} ]] && exit {_NO_FILE}\nmkdir -p -- {word}",
        path,
    )
    return entry(sandbox, path)


def move(sandbox: Sandbox, source: str, destination: str) -> Message:
    """Give an entry another name, in the place of what has it."""
    word, other = shlex.quote(source), shlex.quote(destination)
    script = f"[[ -e {word} || -L {word} ]] || exit {_MISSING}\nmkdir -p -- {shlex.quote(os.path.dirname(destination))}"
    _run(sandbox, f"{script} && mv -T -- {word} {other}", source)
    return entry(sandbox, destination)


def remove(sandbox: Sandbox, path: str) -> None:
    """Remove an entry, with all below it; it may be gone already."""
    if path == "/":
        raise ServiceError("invalid_argument", "the root directory cannot be removed")
    _run(sandbox, f"rm -rf -- {shlex.quote(path)}", path)


def home_of(user: str | None) -> str:
    """Home directory of a user that a client names.

    Raises:
        ServiceError: that can be no user.
    """
    if user in (None, "", "user"):
        return "/home/user"
    if user == "root":
        return "/root"
    raise ServiceError("unauthenticated", f"expected the user user or root, found {brief(user, 80)}")


def inside(path: str | None, user: str | None) -> str:
    """Absolute path of what a client names."""
    return resolved(path or "", home_of(user))
