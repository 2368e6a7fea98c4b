"""Differences between two packed trees: which files were written, and which are gone.

1. A packed tree (`FileTree.pack`) holds what was written since the root file system. So two of them tell how a sandbox
   changed between two instants, or how two forks of it differ, without starting anything.
2. Files are compared by content, kind, mode, owner, link target and extended attributes. Times alone are no difference.
3. The root file system itself is not looked at: a file that one tree wrote and the other did not is ``gone`` there,
   whether it does not exist or is the root file system's again.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from tarfile import DIRTYPE, LNKTYPE

from sandboxgym.sandbox.base import SandboxError
from sandboxgym.sandbox.files import members as checked
from sandboxgym.sandbox.files.members import Member

_HEADS = {"sandboxgym.json": True, ".sandboxgym-tree.json": False}
"""First members of the two forms of an archive; whether its files lie below a directory for each layer."""
_END = "sandboxgym.end"
_OWN = "SANDBOXGYM."
_PREFIXES = (_OWN, "SCHILY.xattr.", "LIBARCHIVE.xattr.")
_TIMES = frozenset(["mtime", "atime", "ctime", f"{_OWN}mtime"])
_NAMES = frozenset(["path", "linkpath"])
_DELETED = "deleted"
_FOLDER = "directory"


@dataclass(frozen=True, slots=True)
class Differences:
    """Absolute paths, sorted; bytes that are not UTF-8 as backslash escapes."""

    written: tuple[str, ...]
    """Added, or changed."""
    gone: tuple[str, ...]
    """Deleted, or as the root file system has them again."""


def differences(before: bytes, after: bytes) -> Differences:
    """Compare two packed trees over one root file system.

    A directory is listed only where something else than its content differs, where it is empty, or was deleted.

    Raises:
        SandboxError: an archive has another form than those of the built-in backends.
    """
    old, new = _facts(before), _facts(after)
    parents = {name.rpartition("/")[0] or "/" for facts in (old, new) for name in facts}
    written = [
        name
        for name, fact in new.items()
        if fact != _DELETED
        and fact != old.get(name)
        and not (name in parents and fact.startswith(_FOLDER) and old.get(name) is None)
    ]
    gone = [
        name
        for name, fact in old.items()
        if fact != _DELETED and name not in new and not (name in parents and fact.startswith(_FOLDER))
    ]
    gone += [name for name, fact in new.items() if fact == _DELETED and old.get(name) != _DELETED]
    return Differences(*(tuple(sorted(map(_shown, names))) for names in (written, gone)))


def _shown(name: str) -> str:
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _facts(data: bytes) -> dict[str, str]:
    """Facts about each file of an archive that are compared, by its absolute path."""
    members = checked.read(data, prefixes=_PREFIXES)
    head = members[0].name if members else ""
    if head not in _HEADS:
        raise SandboxError("the snapshots of this backend cannot be compared: they are packed in a form of its own")
    in_layers = _HEADS[head]
    facts: dict[str, str] = {}
    if not in_layers:
        content = json.loads(data[members[0].start : members[0].start + members[0].size])
        facts = {f"/{name}": _DELETED for name in content["deleted"]}
    originals: dict[str, str] = {}
    for member in members[1:]:
        if member.name == _END:
            continue
        # layers/0/etc/hosts: the topmost layer is the first.
        name = "/" + ("/".join(member.name.split("/")[2:]) if in_layers else member.name)
        fact = originals[member.linkname] if member.kind == LNKTYPE else _fact(data, member)
        originals[member.name] = fact
        if not in_layers or name not in facts:
            facts[name] = fact
    return facts


def _fact(data: bytes, member: Member) -> str:
    if f"{_OWN}whiteout" in member.headers:
        return _DELETED
    headers = {key: value for key, value in member.headers.items() if key not in _TIMES | _NAMES}
    content = hashlib.sha256(memoryview(data)[member.start : member.start + member.size]).hexdigest()
    kind = _FOLDER if member.kind == DIRTYPE else member.kind.decode()
    return f"{kind} {member.mode:o} {member.uid}:{member.gid} {member.linkname!r} {sorted(headers.items())} {content}"
