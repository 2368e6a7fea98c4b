"""Differences of two snapshots by their archives, on each backend."""

from __future__ import annotations

import pytest
from sandbox.sandboxes import Maker, box, kind, make  # noqa: F401 - fixtures

from sandboxgym.sandbox.base import SandboxError
from sandboxgym.sandbox.files.differences import Differences, differences
from sandboxgym.sandbox.sandbox import Sandbox


def changed(sandbox: Sandbox, command: str) -> Differences:
    """Differences that a command makes in the directory /root/d."""
    before = sandbox.snapshot()
    result = sandbox.execute(f"mkdir -p ~/d && cd ~/d && {{ {command}\n}}")
    assert result.exit_code == 0, result.output
    after = sandbox.snapshot()
    return differences(before.tree.pack(), after.tree.pack())


FILES = "for name in a b c; do echo $name > $name; done; mkdir -p e/f; ln -s a soft; true"


@pytest.mark.parametrize(
    ("command", "written", "gone"),
    [
        ("true", [], []),
        ("touch a; echo b > b; cat c > /dev/null", [], []),
        ("echo more >> b", ["b"], []),
        ("chmod 600 b", ["b"], []),
        ("rm b", [], ["b"]),
        ("mv b new", ["new"], ["b"]),
        ("ln -sf b soft", ["soft"], []),
        ("rm b; mkdir b", ["b"], []),
        ("rmdir e/f; echo 1 > e/f", ["e/f"], []),
        ("chmod 700 e", ["e"], []),
        ("mkdir empty", ["empty"], []),
        ("rm -r e/f", [], ["e/f"]),
        ("mkdir -p x/y/z; echo 1 > x/y/1", ["x/y/1", "x/y/z"], []),
        (r"echo 1 > $'odd\xff\n'", ["odd\\xff\n"], []),
        ("truncate -s 1M b", ["b"], []),
    ],
)
def test_each_change_is_one_path(box: Sandbox, command: str, written: list[str], gone: list[str]) -> None:  # noqa: F811
    changed(box, FILES)
    found = changed(box, command)
    assert found == Differences(*(tuple(f"/root/d/{name}" for name in names) for names in (written, gone)))


def test_files_of_the_root_file_system_that_are_deleted_are_gone(make: Maker, kind: str) -> None:  # noqa: F811
    if kind == "copy":
        pytest.skip("there is no root file system below")
    sandbox = make()
    before = sandbox.snapshot()
    assert sandbox.execute("rm /etc/passwd; echo x >> /etc/group").exit_code == 0
    after = sandbox.snapshot()
    found = differences(before.tree.pack(), after.tree.pack())
    assert found == Differences(("/etc/group",), ("/etc/passwd",))
    back = differences(after.tree.pack(), before.tree.pack())
    assert "/etc/group" in back.gone and "/etc/passwd" not in back.gone  # as the root file system has it, again


def test_another_form_of_archive_is_refused(box: Sandbox) -> None:  # noqa: F811
    import io
    import tarfile

    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("else"))
    with pytest.raises(SandboxError, match="cannot be compared"):
        differences(data.getvalue(), box.snapshot().tree.pack())
