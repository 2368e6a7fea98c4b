"""The copy backend: what its trees keep, where its paths lead, and what ends with it."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import shlex
import signal
import stat
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandboxgym.errors import SnapshotCorrupt, SnapshotMismatch
from sandboxgym.sandbox.base import Backend, FileTree, Limits, RootFS, SandboxClosed, SandboxUnavailable
from sandboxgym.sandbox.copy import backend as plain
from sandboxgym.sandbox.copy.backend import CopyBackend
from sandboxgym.sandbox.files.portable import ArchiveHeader, ArchiveWriter, Reader
from sandboxgym.system import run_directories


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "runtime"
    monkeypatch.setenv("SANDBOXGYM_RUNTIME", str(folder))
    yield folder


@pytest.fixture
def unpacked(tmp_path: Path) -> RootFS:
    root = tmp_path / "unpacked"
    (root / "etc").mkdir(parents=True)
    (root / "etc/issue").write_text("a root file system\n")
    (root / "etc/old").write_text("old\n")
    return RootFS("directory:test", (root,))


@pytest.fixture
def backend(unpacked: RootFS) -> Iterator[CopyBackend]:
    backend = CopyBackend(unpacked, allow_unsafe=True)
    backend.start()
    yield backend
    backend.close()


def run(backend: CopyBackend, command: str, **options: object) -> tuple[int, str]:
    process = backend.spawn(["sh", "-c", command], env={"PATH": os.environ["PATH"]}, **options)  # type: ignore[arg-type]
    assert process.output is not None
    with os.fdopen(os.dup(process.output), "rb") as stream:
        output = stream.read().decode()
    status = process.wait(300)
    process.close()
    assert status is not None
    return status, output


def until(condition: Callable[[], bool]) -> None:
    for _ in range(12_000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it did not happen within 60 s")


def test_it_follows_the_protocol(backend: CopyBackend) -> None:
    typed: Backend = backend
    tree: FileTree = backend.base()
    assert typed.live and isinstance(tree, FileTree)


def test_it_is_refused_unless_the_caller_accepts_that_nothing_is_isolated() -> None:
    with pytest.raises(SandboxUnavailable, match="allow_unsafe=True"):
        CopyBackend(None)


def test_it_warns_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(plain, "_warned", False)
    with caplog.at_level(logging.WARNING, "sandboxgym"):
        CopyBackend(None, allow_unsafe=True).close()
        CopyBackend(None, allow_unsafe=True).close()
    assert len([record for record in caplog.records if "isolates nothing" in record.message]) == 1


def test_an_image_of_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailable, match="2 layers"):
        CopyBackend(RootFS("image", (tmp_path, tmp_path)), allow_unsafe=True)


def test_the_host_gives_an_empty_root(tmp_path: Path) -> None:
    host = RootFS("host:1", (tmp_path,), binds=((Path("/usr"), "/usr"),))
    backend = CopyBackend(host, allow_unsafe=True)
    backend.start()
    assert sorted(os.listdir(backend.root)) == ["home", "root", "tmp"]
    backend.close()


def test_commands_run_under_the_root_with_their_own_home(backend: CopyBackend) -> None:
    status, output = run(backend, "cat issue; pwd; echo $HOME; echo $TMPDIR; echo oops >&2; exit 7", cwd="/etc")
    root = backend.root
    assert status == 7
    assert output.splitlines() == ["a root file system", f"{root}/etc", f"{root}/root", f"{root}/tmp", "oops"]


def test_the_hosts_environment_does_not_leak(backend: CopyBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "12345")
    assert "12345" not in run(backend, "env")[1]


def test_a_terminal_is_the_controlling_one_and_does_not_echo(backend: CopyBackend) -> None:
    process = backend.spawn(["sh"], env={"PATH": os.environ["PATH"]}, terminal=True)
    assert process.terminal is not None and process.output is None
    os.write(process.terminal, b"echo to-$((40+2)) >/dev/tty; stty size; exit 3\n")
    shown = b""
    while b"200" not in shown:
        shown += os.read(process.terminal, 4096)
    assert process.wait(300) == 3
    assert b"to-42" in shown and b"$((40+2))" not in shown
    process.close()


def test_stdin(backend: CopyBackend) -> None:
    read, write = os.pipe()
    os.write(write, b"from outside")
    os.close(write)
    assert run(backend, "cat", stdin=read) == (0, "from outside")
    os.close(read)
    assert run(backend, "cat") == (0, "")


def test_a_killed_process_has_the_shells_status(backend: CopyBackend) -> None:
    process = backend.spawn(["sleep", "60"], env={"PATH": os.environ["PATH"]})
    assert process.wait(0.01) is None
    process.kill()
    assert process.wait() == 128 + signal.SIGKILL
    process.close()
    assert run(backend, "kill -TERM $$")[0] == 128 + signal.SIGTERM


def test_the_end_of_a_process_ends_its_session(backend: CopyBackend) -> None:
    status, _ = run(backend, "sleep 300 >/dev/null 2>&1 & echo $! >child; exit 0", cwd="/tmp")
    child = int(backend.read_file("/tmp/child"))
    assert status == 0
    until(lambda: not is_running(child))


def test_files_are_read_and_written_under_the_root(backend: CopyBackend, tmp_path: Path) -> None:
    backend.write_file("/work/deep/file", b"\0data", mode=0o750)
    assert backend.read_file("/work/deep/file") == b"\0data"
    assert backend.read_file(f"{backend.root}/work/deep/file") == b"\0data"
    assert stat.S_IMODE((backend.root / "work/deep/file").stat().st_mode) == 0o750
    with pytest.raises(FileNotFoundError):
        backend.read_file("/missing")
    with pytest.raises(IsADirectoryError):
        backend.read_file("/etc")
    with pytest.raises(ValueError, match="absolute"):
        backend.read_file("etc/issue")
    outside = tmp_path / "outside"
    outside.write_text("mine")
    (backend.root / "way-out").symlink_to(outside)
    with pytest.raises(PermissionError, match="outside"):
        backend.write_file("/way-out", b"theirs")
    assert outside.read_text() == "mine"


CHANGES = """
printf 'new\\n' >etc/new; chmod 0705 etc/new; touch -d '2001-02-03 04:05:06.123456789' etc/new
rm etc/old; mkdir -p empty/dir; ln etc/new etc/hard; ln -s issue etc/soft; ln -s missing dangling
truncate -s 1M sparse; printf x | dd of=sparse bs=1 seek=600000 conv=notrunc 2>/dev/null
printf odd >'odd name
with newline'; mkfifo pipe; printf tmp >tmp/kept; mkdir locked; chmod 0500 locked
"""


def describe(root: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for folder, folders, files in os.walk(root):
        for name in folders + files:
            path = Path(folder, name)
            status = path.lstat()
            link = os.readlink(path) if path.is_symlink() else None
            content = path.read_bytes() if stat.S_ISREG(status.st_mode) else None
            found[str(path.relative_to(root))] = (status.st_mode, status.st_mtime_ns, status.st_nlink, link, content)
    return found


@pytest.mark.parametrize("keep_processes", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_a_tree_keeps_the_files_exactly(backend: CopyBackend, keep_processes: bool, packed: bool) -> None:
    assert run(backend, CHANGES)[0] == 0
    if hasattr(os, "setxattr"):
        os.setxattr(backend.root / "etc/new", "user.colour", b"\xff\0blue")
    before = describe(backend.root)
    tree = backend.commit(keep_processes=keep_processes)
    assert backend.live is keep_processes
    if packed:
        tree = backend.unpack(tree.pack())
    backend.start(tree)
    assert describe(backend.root) == before
    new, hard = (backend.root / name for name in ("etc/new", "etc/hard"))
    assert new.stat().st_ino == hard.stat().st_ino
    assert (backend.root / "sparse").stat().st_blocks * 512 < 2**20
    if hasattr(os, "getxattr"):
        assert os.getxattr(new, "user.colour") == b"\xff\0blue"


def test_a_tree_restores_any_number_of_times_after_any_detour(backend: CopyBackend) -> None:
    run(backend, "echo one >file")
    first = backend.commit()
    backend.start(first)
    run(backend, "echo two >file; rm -r etc")
    second = backend.commit()
    for tree, expected in ((first, b"one\n"), (second, b"two\n"), (first, b"one\n")):
        backend.start(tree)
        assert backend.read_file("/file") == expected
        run(backend, "echo detour >file")


def test_twins_do_not_see_each_other_not_even_through_absolute_links(backend: CopyBackend) -> None:
    run(backend, 'echo parent >file; ln -s "$SANDBOX_ROOT/file" link')
    tree = backend.commit(keep_processes=True)
    twin = backend.sibling()
    twin.start(tree)
    run(twin, "echo child >link")
    assert twin.read_file("/file") == b"child\n"
    assert backend.read_file("/file") == b"parent\n"
    assert twin.relocate(f"cd {backend.root}/etc", tree) == f"cd {twin.root}/etc"
    backend.close()
    assert twin.read_file("/file") == b"child\n"
    twin.close()


def test_freezing_with_processes_disturbs_none(backend: CopyBackend) -> None:
    process = backend.spawn(
        ["sh", "-c", "i=0; while :; do i=$((i+1)); echo $i >count.new; mv count.new count; done"],
        env={"PATH": os.environ["PATH"]},
        cwd="/tmp",
    )
    until(lambda: (backend.root / "tmp/count").exists())
    tree = backend.commit(keep_processes=True)
    frozen = int((tree.path / "tmp/count").read_text())
    until(lambda: int(backend.read_file("/tmp/count")) > frozen)
    assert process.wait(0) is None
    process.kill()
    process.close()


def test_processes_tells_what_runs_and_which_files_it_holds(backend: CopyBackend) -> None:
    process = backend.spawn(
        ["sh", "-c", "exec 7>log; setsid sleep 311 & sleep 312 & echo ready; wait"],
        env={"PATH": os.environ["PATH"]},
        cwd="/tmp",
    )
    until(lambda: {"sleep 311", "sleep 312"} <= {info.command for info in backend.processes()})
    found = {info.command: info for info in backend.processes()}
    shell = next(info for command, info in found.items() if command.startswith("sh -c"))
    assert shell.pid == process.pid and found["sleep 312"].parent == shell.pid
    if sys.platform == "linux":
        assert f"7 -> {backend.root}/tmp/log" in shell.descriptors
    backend.kill([found["sleep 312"].pid, os.getpid()])
    until(lambda: "sleep 312" not in {info.command for info in backend.processes()})
    process.kill()
    until(lambda: not any(info.command == "sh" for info in backend.processes()))
    assert "sleep 311" in {info.command for info in backend.processes()}, "it left the session of its parent"
    pids = [info.pid for info in backend.processes()]
    backend.start()
    assert backend.processes() == [] and not any(is_running(pid) for pid in pids)
    process.close()


def test_closing_ends_daemons_and_deletes_all_but_held_trees(backend: CopyBackend, runtime: Path) -> None:
    daemon = "setsid sh -c 'trap \"\" TERM HUP; echo $$ >daemon; sleep 313' >/dev/null 2>&1 &"
    run(backend, f"{daemon} until [ -s daemon ]; do sleep 0.01; done", cwd="/tmp")
    number = int(backend.read_file("/tmp/daemon"))
    assert is_running(number)
    tree = backend.commit(keep_processes=True)
    other = tree.retain()
    backend.close()
    backend.close()
    assert not is_running(number) and not backend.live
    tree.release()
    tree.release()
    assert (other.path / "tmp/daemon").exists()
    with pytest.raises(SandboxClosed, match="released"):
        tree.pack()
    del other
    assert [path.name for path in runtime.iterdir() if not path.name.startswith(".")] == []
    for use in (backend.start, backend.processes, lambda: backend.read_file("/tmp/daemon")):
        with pytest.raises(SandboxClosed):
            use()


def test_memory_of_a_process_is_limited() -> None:
    if sys.platform != "linux":
        pytest.skip("no address space limit on this system")
    backend = CopyBackend(None, limits=Limits(memory=256 * 2**20, disk=2**20), allow_unsafe=True)
    backend.start()
    program = "try:\n x = bytearray(2**29)\nexcept MemoryError:\n print('refused')"
    assert run(backend, f"{shlex.quote(sys.executable)} -c {shlex.quote(program)}")[1] == "refused\n"
    assert run(backend, "head -c 4000000 /dev/zero >big")[0] != 0
    assert (backend.root / "big").stat().st_size <= 2**20
    backend.close()


OWNER = """
import os, signal, sys
from sandboxgym.sandbox.copy.backend import CopyBackend
backend = CopyBackend(None, allow_unsafe=True)
backend.start()
tree = backend.commit(keep_processes=True)
child = backend.spawn(["sh", "-c", "setsid sleep 314 & sleep 315 & env -i sleep 316 & echo ready; wait"],
                      env={"PATH": os.environ["PATH"]})
assert os.read(child.output, 100)
print(*[info.pid for info in backend.processes()], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_after_the_owner_was_killed_nothing_is_left(runtime: Path) -> None:
    done = subprocess.run([sys.executable, "-c", OWNER], capture_output=True, text=True)
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) >= 4, done.stderr
    assert all(is_running(pid) for pid in pids)
    assert {item.removed for item in run_directories.reap()} == {True}
    until(lambda: not any(is_running(pid) for pid in pids))
    assert [path.name for path in runtime.iterdir() if not path.name.startswith(".")] == []


def archive_with(info: tarfile.TarInfo, *, before: tarfile.TarInfo | None = None) -> bytes:
    writer = ArchiveWriter(ArchiveHeader("directory:test"))
    stream = writer._tar
    for member in (before, info):
        if member is not None:
            stream.addfile(member, io.BytesIO(b"x" * member.size))
    return writer.finish()


def member(name: str, **fields: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(info, field, value)
    return info


@pytest.mark.parametrize(
    "info",
    [
        member("/etc/passwd"),
        member("../outside"),
        member("a/../../outside"),
        member("device", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
        member("setuid", mode=0o4755),
        member("hard", type=tarfile.LNKTYPE, linkname="/etc/passwd"),
        member("hard", type=tarfile.LNKTYPE, linkname="etc/issue"),
        member("sparse", type=tarfile.GNUTYPE_SPARSE),
        member("attribute", pax_headers={"SCHILY.xattr.security.capability": "x"}),
        member("etc/old/below"),
    ],
    ids=lambda info: f"{info.name}-{info.type.decode()}",
)
def test_an_archive_with_a_member_that_is_not_accepted_writes_nothing(
    backend: CopyBackend, tmp_path: Path, info: tarfile.TarInfo
) -> None:
    before = describe(tmp_path / "unpacked")
    with pytest.raises(SnapshotCorrupt, match=info.name):
        backend.unpack(archive_with(info))
    assert describe(tmp_path / "unpacked") == before
    assert not (tmp_path / "outside").exists() and not (tmp_path / "runtime/outside").exists()


def test_an_archive_with_a_member_below_a_link_is_refused(backend: CopyBackend, tmp_path: Path) -> None:
    link = member("way", type=tarfile.SYMTYPE, linkname=str(tmp_path))
    with pytest.raises(SnapshotCorrupt, match="below a link"):
        backend.unpack(archive_with(member("way/planted", size=1), before=link))
    with pytest.raises(SnapshotCorrupt, match="twice"):
        backend.unpack(archive_with(member("way", type=tarfile.DIRTYPE), before=link))
    assert not (tmp_path / "planted").exists()


def test_damaged_archives_and_those_of_another_base_are_refused(backend: CopyBackend) -> None:
    run(backend, "echo change >file")
    archive = backend.commit(keep_processes=True).pack()
    for damaged in (b"", b"junk" * 500, archive[:700]):
        with pytest.raises(SnapshotCorrupt):
            backend.unpack(damaged)
    other = CopyBackend(None, allow_unsafe=True)
    with pytest.raises(SnapshotMismatch, match=r"directory:test.*empty"):
        other.unpack(archive)
    other.close()


def test_a_packed_tree_is_only_what_changed(backend: CopyBackend) -> None:
    run(backend, "echo change >file; rm etc/old")
    reader = Reader(backend.commit(keep_processes=True).pack(), base="directory:test")
    assert "etc/old" in reader.header.deleted
    names = {info.name for info in reader.members}
    assert "file" in names and "etc/issue" not in names


def test_setuid_is_dropped_with_a_warning(backend: CopyBackend, caplog: pytest.LogCaptureFixture) -> None:
    run(backend, "touch tool; chmod 4755 tool")
    with caplog.at_level(logging.WARNING, "sandboxgym"):
        backend.start(backend.unpack(backend.commit(keep_processes=True).pack()))
    assert stat.S_IMODE((backend.root / "tool").stat().st_mode) == 0o755
    assert "tool" in caplog.text


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    with open(__file__, "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker's tests start programs of the same names
        yield
        names = [f"sleep {number}" for number in range(311, 317)]
        listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout.splitlines()
        assert [line for line in listed if line.strip() in names] == []
