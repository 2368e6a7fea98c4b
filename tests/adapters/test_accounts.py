"""Users as ``docker exec --user`` finds them in two files."""

from __future__ import annotations

import pytest

from sandboxgym.adapters.accounts import Account, NoSuchAccount, find_account

PASSWD = """\
root:x:0:0:root:/root:/bin/bash

not a line
bad:x:one:two::/:/bin/sh
ann:x:1000:100:Ann:/home/ann:/bin/sh
bob:x:1001:1001::
eve:x:1000:5::/home/eve:/bin/sh
2000:x:2001:2001::/named:/bin/sh
"""
GROUP = """\
root:x:0:
users:x:100:bob
lab:x:300:ann,bob
annex:x:301:annie
odd:x:many:ann
"""


@pytest.mark.parametrize(
    ("user", "found"),
    [
        ("root", Account("root", 0, 0, (0,), "/root")),
        ("ann", Account("ann", 1000, 100, (100, 300), "/home/ann")),
        ("1000", Account("ann", 1000, 100, (100, 300), "/home/ann")),
        ("bob", Account("bob", 1001, 1001, (100, 300, 1001), "/")),
        ("ann:users", Account("ann", 1000, 100, (100,), "/home/ann")),
        ("ann:301", Account("ann", 1000, 301, (301,), "/home/ann")),
        ("1001:77", Account("bob", 1001, 77, (77,), "/")),
        ("2000", Account("2000", 2001, 2001, (2001,), "/named")),
        ("3000", Account("3000", 3000, 0, (0,), "/")),
        ("3000:lab", Account("3000", 3000, 300, (300,), "/")),
        ("2147483647", Account("2147483647", 2**31 - 1, 0, (0,), "/")),
    ],
)
def test_users_are_found(user: str, found: Account) -> None:
    assert find_account(user, PASSWD, GROUP) == found


@pytest.mark.parametrize(
    "user", ["ghost", "bad", "", ":lab", "-1", "2147483648", "4294967295", "²", "٣", " 5", "1e3", "9" * 5000]
)
def test_a_missing_user_is_named(user: str) -> None:
    with pytest.raises(NoSuchAccount, match=r"no user '.*' in /etc/passwd") as caught:
        find_account(user, PASSWD, GROUP)
    assert repr(user.split(":")[0]) in str(caught.value)


@pytest.mark.parametrize("group", ["ghosts", "odd", "-1", "4294967295"])
def test_a_missing_group_is_named(group: str) -> None:
    with pytest.raises(NoSuchAccount, match=f"no group '{group}' in /etc/group"):
        find_account(f"ann:{group}", PASSWD, GROUP)


def test_numbers_need_no_files() -> None:
    assert find_account("5:6", "", "") == Account("5", 5, 6, (6,), "/")
