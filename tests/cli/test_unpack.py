"""Archives cannot write outside their directory."""

from __future__ import annotations

import io
import stat
import tarfile
import zipfile

import pytest

from sandboxgym.cli.support.unpack import UnsafeArchive, merge, unpack


def zip_of(path, members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members:
            archive.writestr(name, content)
    return path


def tar_of(path, *members):
    with tarfile.open(path, "w:gz") as archive:
        for member, content in members:
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def files_under(path):
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_zip_and_tar_give_the_same_files(quiet, tmp_path):
    members = [("a/b.txt", b"one"), ("c.txt", b"two")]
    zipped = zip_of(tmp_path / "x.zip", members)
    tarred = tar_of(tmp_path / "x.tar.gz", *((tarfile.TarInfo(name), content) for name, content in members))
    for archive in (zipped, tarred):
        assert unpack(archive, tmp_path / "out", progress=quiet) == 2
        assert files_under(tmp_path / "out") == dict(members)


@pytest.mark.parametrize("name", ["/etc/evil", "../evil", "a/../../evil", "C:/evil", "a\\..\\..\\evil"])
def test_names_that_lead_outside_are_refused(quiet, tmp_path, name):
    for archive in (
        zip_of(tmp_path / "x.zip", [("good", b""), (name, b"evil")]),
        tar_of(tmp_path / "x.tar.gz", (tarfile.TarInfo("good"), b""), (tarfile.TarInfo(name), b"evil")),
    ):
        with pytest.raises(UnsafeArchive, match="does not stay"):
            unpack(archive, tmp_path / "out", progress=quiet)
        assert files_under(tmp_path / "out") == {}
    assert not (tmp_path / "evil").exists()


def test_links_and_devices_are_refused(quiet, tmp_path):
    link = zipfile.ZipInfo("link")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with pytest.raises(UnsafeArchive, match="link"):
        unpack(zip_of(tmp_path / "x.zip", [(link, "/etc")]), tmp_path / "out", progress=quiet)
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE):
        member = tarfile.TarInfo("special")
        member.type, member.linkname = kind, "/etc/passwd"
        with pytest.raises(UnsafeArchive, match="special"):
            unpack(tar_of(tmp_path / "x.tar.gz", (member, b"")), tmp_path / "out", progress=quiet)


@pytest.mark.parametrize("content", [b"", b"no archive at all", b"PK\x03\x04 and then nothing"])
def test_what_is_no_archive_is_said(quiet, tmp_path, content):
    (tmp_path / "x.zip").write_bytes(content)
    with pytest.raises(UnsafeArchive, match=r"x\.zip"):
        unpack(tmp_path / "x.zip", tmp_path / "out", progress=quiet)


def test_a_flipped_bit_is_found(quiet, tmp_path):
    archive = zip_of(tmp_path / "x.zip", [("a", b"content" * 100)])
    damaged = bytearray(archive.read_bytes())
    damaged[60] ^= 1
    archive.write_bytes(damaged)
    with pytest.raises(UnsafeArchive, match="CRC"):
        unpack(archive, tmp_path / "out", progress=quiet)


def test_merging_joins_directories_and_replaces_files(tmp_path):
    for name, content in (("new/d/a", b"new"), ("new/d/b", b"b"), ("old/d/a", b"old"), ("old/d/c", b"c")):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    merge(tmp_path / "new", tmp_path / "old")
    assert files_under(tmp_path / "old") == {"d/a": b"new", "d/b": b"b", "d/c": b"c"}
    assert not (tmp_path / "new").exists()
