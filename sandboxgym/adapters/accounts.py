"""Users of a root file system, from its ``/etc/passwd`` and ``/etc/group``, as ``docker exec --user`` takes them.

Nothing of the file system runs for it. Lines that are none are passed over.
"""

from __future__ import annotations

from dataclasses import dataclass

_LARGEST = 2**31 - 1  # of all numbers, the last one means to the kernel that nothing is to change


class NoSuchAccount(LookupError):
    """There is no such user or group."""


@dataclass(frozen=True, slots=True)
class Account:
    """A user, by numbers."""

    name: str
    """The number, where it has no name."""
    uid: int
    gid: int
    groups: tuple[int, ...]
    """All of them, ``gid`` among them."""
    home: str


def find_account(user: str, passwd: str, group: str) -> Account:
    """Find a user.

    Args:
        user: ``USER`` or ``USER:GROUP``, each a name or a number. A number needs no entry: its group is 0 then, and its
            home ``/``. With ``GROUP`` there are no other groups.
        passwd: text of ``/etc/passwd``.
        group: text of ``/etc/group``.

    Raises:
        NoSuchAccount: there is no such user or group.
    """
    who, _, which = user.partition(":")
    members = [fields for fields in _entries(group, 4) if _is_number(fields[2])]
    for name, _, uid, gid, _, home in _entries(passwd, 6):
        if who in (name, uid) and _is_number(uid) and _is_number(gid):
            others = {int(fields[2]) for fields in members if name in fields[3].split(",")}
            found = Account(name, int(uid), int(gid), tuple(sorted({int(gid), *others})), home or "/")
            break
    else:
        if not _is_number(who):
            raise NoSuchAccount(f"no user {who!r} in /etc/passwd")
        found = Account(who, int(who), 0, (0,), "/")
    if not which:
        return found
    numbers = [fields[2] for fields in members if which in (fields[0], fields[2])]
    if not numbers and not _is_number(which):
        raise NoSuchAccount(f"no group {which!r} in /etc/group")
    number = int((numbers or [which])[0])
    return Account(found.name, found.uid, number, (number,), found.home)


def _entries(text: str, fields: int) -> list[list[str]]:
    lines = (line.split(":") for line in text.split("\n"))
    return [line[:fields] for line in lines if len(line) >= fields]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 10 and int(text) <= _LARGEST
