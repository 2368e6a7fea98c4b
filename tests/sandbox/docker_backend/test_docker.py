"""Containers as sandboxes: what a tree keeps and declares lost, what a container may do, and leftovers."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tarfile
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sandbox.docker_image import docker_image  # noqa: F401 - a fixture

from sandboxgym.bench.faults import Relay
from sandboxgym.errors import SnapshotMismatch
from sandboxgym.sandbox.base import CONTROL, Backend, FileTree, Limits, SandboxClosed, SandboxFull, SandboxUnavailable
from sandboxgym.sandbox.docker import backend as docker_backend
from sandboxgym.sandbox.docker import exec as docker_exec
from sandboxgym.sandbox.docker import images as docker_images
from sandboxgym.sandbox.docker.backend import DockerBackend, DockerTree
from sandboxgym.sandbox.files.portable import ArchiveHeader, ArchiveWriter, Reader
from sandboxgym.system import run_directories

pytestmark = pytest.mark.slow
ENVIRONMENT = dict(os.environ)  # of before the tests that name another daemon
PATH = {"PATH": "/opt/python/bin:/usr/bin:/bin"}


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SANDBOXGYM_RUNTIME", str(tmp_path / "runtime"))
    # what another file's tests still hold has its own connection and its own images
    monkeypatch.setattr(docker_images, "_current", weakref.WeakValueDictionary())
    yield
    gc.collect()
    ours = [path.name for path in (tmp_path / "runtime").glob("docker-*")]
    left = [item for run in ours for item in (*containers(run), *images(run))]
    assert left == [], "a test must close its backends and release its trees"


def docker(*arguments: str) -> str:
    return subprocess.run(["docker", *arguments], check=True, capture_output=True, text=True, env=ENVIRONMENT).stdout


def containers(run: str) -> list[str]:
    return docker("ps", "-aq", "--filter", f"label={docker_images.LABEL}={run}").split()


def images(run: str) -> list[str]:
    return docker("images", "-q", "--filter", f"label={docker_images.LABEL}={run}").split()


@pytest.fixture
def backend(docker_image: str) -> Iterator[DockerBackend]:  # noqa: F811
    backend = DockerBackend(docker_image)
    backend.start()
    yield backend
    backend.close()


def run(backend: DockerBackend, command: str, **options: Any) -> tuple[int, str]:
    process = backend.spawn(["bash", "-c", command], env=PATH, **options)
    assert process.output is not None
    chunks = []
    while chunk := os.read(process.output, 1 << 16):
        chunks.append(chunk)
    status = process.wait(300)
    process.close()
    assert status is not None
    return status, b"".join(chunks).decode()


def until(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("it did not happen within 60 s")


def test_it_follows_the_protocol(backend: DockerBackend) -> None:
    typed: Backend = backend
    tree: FileTree = backend.base()
    assert typed.live and isinstance(tree, FileTree) and tree.nbytes == 0


def test_processes_have_no_power_over_the_machine(backend: DockerBackend) -> None:
    _, output = run(backend, "grep -E '^(CapEff|CapBnd|NoNewPrivs|Seccomp):' /proc/self/status; ls /sys/class/net")
    fields = dict(line.split() for line in output.splitlines()[:4])
    allowed = sum(1 << bit for bit in (0, 1, 3, 4, 5, 6, 7, 10))
    assert int(fields["CapEff:"], 16) == int(fields["CapBnd:"], 16) == allowed
    assert (fields["NoNewPrivs:"], fields["Seccomp:"]) == ("1", "2")
    assert output.splitlines()[4:] == ["lo"]
    device = "import os; os.mknod('/tmp/disk', 0o60600, os.makedev(254, 0))"
    assert "not permitted" in run(backend, f'python -c "{device}"')[1]
    pids = run(backend, "ls -d /proc/[0-9]* | wc -l")[1]
    assert int(pids) < 10, "it sees processes of the host"


def test_the_network_is_there_only_if_it_is_asked_for(docker_image: str) -> None:  # noqa: F811
    backend = DockerBackend(docker_image, network=True)
    backend.start()
    assert "eth0" in run(backend, "ls /sys/class/net")[1]
    backend.close()


def test_output_status_environment_and_directory(backend: DockerBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "12345")
    status, output = run(backend, "pwd; echo oops >&2; echo fine; env; exit 7", cwd="/tmp")
    assert status == 7 and output.splitlines()[:3] == ["/tmp", "oops", "fine"]
    assert "12345" not in output and "IMAGE_SAYS" not in output
    assert run(backend, "exit", cwd="/no/such")[0] == 126
    missing = backend.spawn(["no-such-program"], env=PATH)
    assert missing.wait(300) == 127
    missing.close()


def test_the_first_output_of_a_quick_program_is_never_lost(backend: DockerBackend) -> None:
    for number in range(15):
        assert run(backend, f"echo {number}") == (0, f"{number}\n")


def test_much_output_arrives_whole(backend: DockerBackend) -> None:
    status, output = run(backend, "seq 300000; seq 300000 >&2")
    assert status == 0 and len(output) == 2 * len("".join(f"{n}\n" for n in range(1, 300001)))


def test_stdin(backend: DockerBackend) -> None:
    read, write = os.pipe()
    os.write(write, b"from outside")
    os.close(write)
    assert run(backend, "cat", stdin=read) == (0, "from outside")
    os.close(read)
    assert run(backend, "cat") == (0, "")


def test_a_terminal(backend: DockerBackend) -> None:
    process = backend.spawn(["bash", "--norc"], env={**PATH, "PS1": ""}, terminal=True)
    assert process.terminal is not None and process.output is None
    os.write(process.terminal, b"tty; stty size; echo to-$((40+2)) >/dev/tty; exit 3\n")
    shown = b""
    while chunk := os.read(process.terminal, 4096):
        shown += chunk
    assert process.wait(300) == 3
    lines = shown.decode().replace("\r", "").splitlines()
    assert "/dev/pts/0" in lines and "24 200" in lines and "to-42" in lines
    assert b"$((40+2))" not in shown
    process.close()


def test_a_killed_process_and_what_it_started(backend: DockerBackend) -> None:
    process = backend.spawn(["bash", "-c", "setsid sleep 321 & sleep 322 & echo; wait"], env=PATH)
    assert process.output is not None and os.read(process.output, 10) == b"\n"
    assert process.wait(0.01) is None
    process.kill()
    process.kill()
    assert process.wait() == 128 + signal.SIGKILL
    assert backend.processes() == []
    process.close()
    assert run(backend, "kill -TERM $$")[0] == 128 + signal.SIGTERM


def test_the_end_of_a_process_ends_its_session(backend: DockerBackend) -> None:
    assert run(backend, "sleep 323 >/dev/null 2>&1 & exit 4")[0] == 4
    assert backend.processes() == []


def test_processes_tells_what_runs_and_which_files_it_holds(backend: DockerBackend) -> None:
    assert backend.processes() == []
    process = backend.spawn(["bash", "-c", "exec 7>/tmp/log; sleep 324 & (sleep 325 &); echo; wait"], env=PATH)
    assert process.output is not None and os.read(process.output, 10) == b"\n"
    until(lambda: {"sleep 324", "sleep 325"} <= {info.command for info in backend.processes()})
    found = {info.command: info for info in backend.processes()}
    shell = next(info for command, info in found.items() if command.startswith("bash -c"))
    assert shell.pid == process.pid and found["sleep 324"].parent == shell.pid
    assert found["sleep 325"].parent != shell.pid, "an orphan"
    if os.geteuid() == 0:
        assert "7 -> /tmp/log" in shell.descriptors
    backend.kill([found["sleep 324"].pid, found["sleep 325"].pid, os.getpid(), 1])
    until(lambda: not {"sleep 324", "sleep 325"} & {info.command for info in backend.processes()})
    process.kill()
    process.close()


def test_an_ordinary_user_kills_through_the_daemon(backend: DockerBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pids: object) -> None:
        raise PermissionError

    monkeypatch.setattr("sandboxgym.sandbox.docker.exec.kill_all", refuse)
    process = backend.spawn(["sleep", "326"], env=PATH)
    until(lambda: [info.command for info in backend.processes()] == ["sleep 326"])
    process.kill()
    assert process.wait(300) == 128 + signal.SIGKILL
    process.close()


def test_orphans_are_collected(backend: DockerBackend) -> None:
    run(backend, "for i in 1 2 3; do (sleep 0.01 &); done; sleep 0.2")
    until(lambda: run(backend, "cat /proc/[0-9]*/stat | grep -c ') Z ' || :")[1].strip() == "0")


def test_files(backend: DockerBackend) -> None:
    data = bytes(range(256)) * 1000
    backend.write_file("/work/deep/file", data, mode=0o750)
    assert backend.read_file("/work/deep/file") == data
    assert run(backend, "stat -c '%a %u %s' /work/deep/file; stat -c %a /work")[1] == f"750 0 {len(data)}\n755\n"
    run(backend, "mkdir -m 711 /dir; ln -s ../work/deep/file /dir/link; ln -s /dir /way; ln -s l1 /l2; ln -s l2 /l1")
    assert backend.read_file("/way/link") == data
    backend.write_file("/way/link", b"through links")
    assert backend.read_file("/work/deep/file") == b"through links"
    backend.write_file("/way/new/one", b"1")
    _, output = run(backend, "cat /dir/new/one; stat -c %a /dir; readlink /way /dir/link")
    assert output == "1711\n/dir\n../work/deep/file\n"
    for path, error in (("/missing", FileNotFoundError), ("/etc", IsADirectoryError), ("/l1", OSError)):
        with pytest.raises(error):
            backend.read_file(path)
    with pytest.raises(NotADirectoryError):
        backend.write_file("/work/deep/file/below", b"")
    with pytest.raises(IsADirectoryError):
        backend.write_file("/etc", b"")
    run(backend, "mkfifo /pipe; echo shared >/dev/shm/file")
    with pytest.raises(OSError, match="not a regular file"):
        backend.read_file("/pipe")
    assert backend.read_file("/dev/shm/file") == b"shared\n"
    with pytest.raises(FileNotFoundError):
        backend.read_file("/dev/shm/missing")
    with pytest.raises(PermissionError):
        backend.write_file("/dev/shm/file", b"")


def test_the_control_directory_is_shared(backend: DockerBackend) -> None:
    (backend.control / "from-outside").write_text("out")
    os.mkfifo(backend.control / "pipe")
    (backend.control / "pipe").chmod(0o666)
    reader = os.open(backend.control / "pipe", os.O_RDWR)
    command = f"cd {CONTROL}; cat from-outside; echo in >from-inside; echo fifo >pipe"
    assert run(backend, command) == (0, "out")
    assert (backend.control / "from-inside").read_text() == "in\n" and os.read(reader, 10) == b"fifo\n"
    os.close(reader)


CHANGES = r"""
cd /; mkdir work; cd work
printf 'new\n' >new; chmod 0705 new; chown 12:34 new; touch -d '2001-02-03 04:05:06.123456789' new
ln new hard; ln -s new soft; ln -s missing dangling; mkdir -p empty/dir; mkdir locked; chmod 0500 locked
printf odd >"odd name
with newline"; printf 'not utf-8' >$'\xff\xfe'; mkfifo pipe; truncate -s 1M sparse
rm /etc/shells; echo changed >/etc/hostname.own; printf tmp >/tmp/kept; printf home >/root/kept
rm -r /etc/alternatives; mkdir /etc/alternatives; echo only >/etc/alternatives/only
rm -r /etc/ld.so.conf.d; echo file >/etc/ld.so.conf.d; rm /etc/services; mkdir -p /etc/services/below
touch -d '2003-02-03 04:05:06.123456789' empty
"""
DESCRIBE = r"""
import hashlib, os
found = []
for top in ("/work", "/etc", "/tmp", "/root"):
    for folder, folders, files in os.walk(top):
        folders[:] = sorted(set(folders) - {".pyenv"})
        for name in sorted(folders + files):
            path = os.path.join(folder, name)
            if path in ("/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/etc/mtab"): continue
            s = os.lstat(path)
            link = os.readlink(path) if os.path.islink(path) else None
            regular = s.st_mode & 0o170000 == 0o100000
            content = hashlib.sha1(open(path, "rb").read()).hexdigest() if regular else None
            size = None if os.path.isdir(path) else s.st_nlink
            found.append((os.fsencode(path), s.st_mode, s.st_uid, s.st_gid, int(s.st_mtime), size, link, content))
print(found)
"""


def describe(backend: DockerBackend) -> str:
    status, output = run(backend, f"python -c {shlex.quote(DESCRIBE)}")
    assert status == 0, output
    return output


@pytest.mark.parametrize("keep_processes", [False, True])
def test_a_tree_keeps_the_files_exactly(backend: DockerBackend, keep_processes: bool) -> None:
    assert run(backend, CHANGES) == (0, "")
    before = describe(backend)
    tree = backend.commit(keep_processes=keep_processes)
    assert backend.live is keep_processes
    backend.start(tree)
    assert describe(backend) == before
    assert tree.nbytes >= 2**20
    tree.release()


@pytest.mark.slow
def test_a_packed_tree_of_several_layers_is_the_same(backend: DockerBackend) -> None:
    assert run(backend, CHANGES) == (0, "")
    first = backend.commit()
    backend.start(first)
    run(backend, "cd /work; rm soft 'odd name\nwith newline'; rm -r empty; echo new >empty; ln empty third")
    run(backend, "rm /etc/ld.so.conf.d; mkdir /etc/shells")
    before = describe(backend)
    second = backend.commit()
    archive = second.pack()
    reader = Reader(archive, base=second.base)
    names = {info.name for info in reader.members}
    others = {info.name for info in reader.members if info.kind != tarfile.DIRTYPE and "__pycache__" not in info.name}
    assert "work/new" in names and not any(name.startswith(("usr", "opt", "run/")) for name in others)
    restored = backend.unpack(archive)
    backend.start(restored)
    assert describe(backend) == before
    assert restored.pack() is not None and {i.name for i in Reader(restored.pack(), base=second.base).members} == names
    for tree in (first, second, restored):
        tree.release()


def test_what_a_tree_loses_is_what_is_declared(backend: DockerBackend) -> None:
    backend.write_file("/file", b"")
    setting = "import os; os.setxattr('/file', 'user.colour', b'blue'); open('/dev/shm/file', 'w')"
    sparse = "f = open('/sparse', 'w'); f.truncate(2**24); f.close(); os.utime('/sparse', ns=(5, 7))"
    assert run(backend, f'python -c "{setting}; {sparse}"')[0] == 0
    tree = backend.commit()
    backend.start(tree)
    reading = """
import os
status = os.stat("/sparse")
kept = {"xattrs": os.listxattr("/file"), "shm": os.listdir("/dev/shm"), "sparse": status.st_blocks < 2**10}
print(*(name for name, value in {**kept, "mtimes": status.st_mtime_ns == 7}.items() if value))
"""
    shown = run(backend, f"python -c {shlex.quote(reading)}")[1].split()
    assert set(shown) == backend.capabilities.keeps & {"xattrs", "shm", "sparse", "mtimes"}
    tree.release()


def test_a_tree_restores_any_number_of_times_after_any_detour(backend: DockerBackend) -> None:
    run(backend, "echo one >/file")
    first = backend.commit()
    backend.start(first)
    run(backend, "echo two >/file; rm -r /opt/python/lib")
    second = backend.commit()
    for tree, expected in ((first, b"one\n"), (second, b"two\n"), (first, b"one\n")):
        backend.start(tree)
        assert backend.read_file("/file") == expected
        run(backend, "echo detour >/file")
    backend.start()
    with pytest.raises(FileNotFoundError):
        backend.read_file("/file")
    first.release()
    second.release()


@pytest.mark.slow
def test_twins_do_not_see_each_other(backend: DockerBackend) -> None:
    run(backend, "echo parent >/file")
    tree = backend.commit(keep_processes=True)
    twin = backend.sibling()
    twin.start(tree)
    run(twin, "echo child >/file; echo child >/tmp/file; echo x >/dev/shm/file")
    assert backend.read_file("/file") == b"parent\n"
    assert run(backend, "ls /tmp /dev/shm")[1] == "/dev/shm:\n\n/tmp:\n"
    backend.close()
    assert twin.read_file("/file") == b"child\n"
    tree.release()
    assert twin.read_file("/file") == b"child\n", "a container holds its image"
    twin.close()


@pytest.mark.slow
def test_freezing_with_processes_disturbs_none(backend: DockerBackend) -> None:
    command = "cd /tmp; while :; do echo $((i++)) >count.new; mv count.new count; done"
    process = backend.spawn(["bash", "-c", command], env=PATH)
    until(lambda: run(backend, "test -s /tmp/count")[0] == 0)
    tree = backend.commit(keep_processes=True)
    later = int(backend.read_file("/tmp/count"))
    until(lambda: int(backend.read_file("/tmp/count")) > later)
    assert process.wait(0) is None
    twin = backend.sibling()
    twin.start(tree)
    assert int(twin.read_file("/tmp/count")) <= later and twin.processes() == []
    twin.close()
    tree.release()
    process.kill()
    process.close()


@pytest.mark.slow
def test_images_go_with_the_last_tree_and_the_base_stays(backend: DockerBackend, docker_image: str) -> None:  # noqa: F811
    run(backend, "echo one >/one")
    first = backend.commit()
    backend.start(first)
    run(backend, "echo two >/two")
    second = backend.commit()
    name = backend._ownership.path.name
    assert len(images(name)) == 2 and containers(name) == []
    other = first.retain()
    first.release()
    first.release()
    with pytest.raises(SandboxClosed, match="released"):
        backend.start(first)
    other.release()
    assert len(images(name)) == 2, "the second is made from the first"
    backend.start(second)
    assert backend.read_file("/one") == b"one\n"
    second.release()
    assert len(images(name)) == 2, "it runs"
    backend.close()
    assert images(name) == [] == containers(name)
    assert docker("images", "-q", docker_image)


@pytest.mark.slow
def test_what_is_forgotten_goes_too(docker_image: str) -> None:  # noqa: F811
    backend = DockerBackend(docker_image)
    backend.start()
    tree: DockerTree | None = backend.commit(keep_processes=True)
    name = backend._ownership.path.name
    assert len(images(name)) == len(containers(name)) == 1
    del backend, tree
    gc.collect()
    assert images(name) == [] == containers(name)


@pytest.mark.slow
def test_deep_stacks_are_squashed(backend: DockerBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker_backend, "_MAX_LAYERS", 3)
    depths = []
    for number in range(5):
        run(backend, f"echo {number} >/tmp/{number}; rm -f /tmp/{number - 2}; chmod 7{number}0 /root")
        tree = backend.commit()
        depths.append(len(tree.image.attributes()["RootFS"]["Layers"]))
        backend.start(tree)
        tree.release()
    assert max(depths) == 3 and depths[-1] < 5
    assert run(backend, "cd /tmp; cat *; stat -c %a /root")[1] == "3\n4\n740\n"


def test_limits_hold(docker_image: str) -> None:  # noqa: F811
    backend = DockerBackend(docker_image, limits=Limits(memory=64 * 2**20, processes=30, disk=4 * 2**20))
    backend.start()
    assert run(backend, "python -c 'x = bytearray(2**27)'")[0] == 128 + signal.SIGKILL
    assert "Resource temporarily unavailable" in run(backend, "for i in {1..60}; do sleep 5 & done; wait")[1]
    assert run(backend, "head -c 5000000 /dev/zero >/big")[0] != 0
    assert len(backend.read_file("/big")) <= 4 * 2**20
    assert backend.live
    run(backend, "cp /big /big2")
    with pytest.raises(SandboxFull, match="limit is 4194304"):
        backend.commit()
    assert backend.live and run(backend, "rm /big /big2")[0] == 0
    backend.commit().release()
    backend.close()


def test_a_removed_container_is_a_typed_error(backend: DockerBackend) -> None:
    process = backend.spawn(["sleep", "327"], env=PATH)
    docker("rm", "-f", *containers(backend._ownership.path.name))
    assert not backend.live
    for use in (
        lambda: backend.spawn(["true"], env=PATH),
        lambda: backend.commit(),
        lambda: backend.read_file("/etc/passwd"),
        lambda: process.wait(5),
    ):
        with pytest.raises(SandboxClosed):
            use()
    process.kill()
    process.close()
    backend.start()
    assert run(backend, "echo again") == (0, "again\n")


def test_what_is_closed_or_committed_says_so(backend: DockerBackend) -> None:
    tree = backend.commit()
    with pytest.raises(SandboxClosed, match="committed"):
        backend.processes()
    backend.close()
    backend.close()
    with pytest.raises(SandboxClosed, match="was closed"):
        backend.start(tree)
    tree.release()


def test_archives_of_another_base_are_refused(backend: DockerBackend) -> None:
    with pytest.raises(SnapshotMismatch, match="other"):
        backend.unpack(ArchiveWriter(ArchiveHeader("other")).finish())


OWNER = """
import os, signal, sys
from sandboxgym.sandbox.docker.backend import DockerBackend
backend = DockerBackend(sys.argv[1])
backend.start()
trees = [backend.commit(keep_processes=True)]
twin = backend.sibling()
twin.start(trees[0])
trees.append(twin.commit(keep_processes=True))
print(backend._ownership.path.name, flush=True)
if "exit" in sys.argv:
    sys.exit()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "exit"])
def test_a_dead_owners_containers_and_images_go(docker_image: str, how: str, tmp_path: Path) -> None:  # noqa: F811
    done = subprocess.run([sys.executable, "-c", OWNER, docker_image, how], capture_output=True, text=True)
    name = done.stdout.strip()
    assert name, done.stderr
    if how == "killed":
        assert len(containers(name)) == len(images(name)) == 2
        assert {item.removed for item in run_directories.reap()} == {True}
    assert images(name) == [] == containers(name)
    assert list((tmp_path / "runtime").glob("docker-*")) == []
    assert docker("images", "-q", docker_image)


def test_a_killed_owners_run_directory_stays_until_a_daemon_answers(
    docker_image: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_directory = run_directories.claim(docker_images.KIND)
    owner = json.loads((run_directory / run_directories.OWNER).read_text())
    (run_directory / run_directories.OWNER).write_text(json.dumps({**owner, "started": "1"}))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    (kept,) = run_directories.reap()
    assert not kept.removed and "no Docker daemon answers" in kept.note and run_directory.exists()
    monkeypatch.setenv("DOCKER_HOST", ENVIRONMENT.get("DOCKER_HOST", ""))
    (gone,) = run_directories.reap()
    assert gone.removed and not run_directory.exists()


def test_a_missing_daemon_image_and_permission_are_said(
    docker_image: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(SandboxUnavailable, match="docker pull no/such:1"):
        DockerBackend("no/such:1")
    gc.collect()
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(SandboxUnavailable, match="no Docker daemon answers"):
        DockerBackend(docker_image)


def test_a_daemon_that_dies_meanwhile_is_a_typed_error(
    docker_image: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Through a relay to the daemon, which can be cut without hurting the daemon's other users."""
    relay = Relay(tmp_path / "relay.sock", "/var/run/docker.sock")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{relay.path}")
    backend = DockerBackend(docker_image)
    backend.start()
    process = backend.spawn(["sleep", "328"], env=PATH)
    tree = backend.commit(keep_processes=True)
    relay.cut()
    for use in (
        lambda: backend.spawn(["true"], env=PATH),
        lambda: backend.commit(),
        lambda: backend.start(tree),
        lambda: process.wait(5),
    ):
        with pytest.raises(SandboxUnavailable, match="no Docker daemon answers"):
            use()
    process.close()
    monkeypatch.delenv("DOCKER_HOST")
    name = backend._ownership.path.name
    docker_images.reap(backend._ownership.path)
    assert images(name) == [] == containers(name)
    tree.release()
    backend.close()


def test_what_is_given_up_leaves_no_connection_to_the_daemon(
    docker_image: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the daemon answers once and not again, or the process can claim no directory."""

    def connections() -> int:
        gc.collect()
        with os.scandir("/proc/self/fd") as opened:
            return sum(os.readlink(entry.path).startswith("socket:") for entry in opened)

    before = connections()
    backend = DockerBackend(docker_image)
    client = backend._ownership.client
    assert connections() > before
    backend.close()
    del backend
    assert connections() == before, "closed with the last backend, by itself and not by the garbage collector"
    with monkeypatch.context() as patch:
        patch.setattr("docker.DockerClient.ping", lambda self: self.api.inspect_image("no such image"))
        with pytest.raises(SandboxUnavailable):
            DockerBackend(docker_image)
    with monkeypatch.context() as patch:
        patch.setattr(run_directories, "claim", lambda kind: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(OSError, match="full"):
            DockerBackend(docker_image)
    assert connections() == before and client is not None


def test_a_relay_that_is_cut_while_it_connects_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that arrives during the cut is closed as well."""
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(tmp_path / "daemon"))
        daemon.listen()
        for _ in range(50):
            relay = Relay(tmp_path / "relay", str(tmp_path / "daemon"))
            clients = [socket.socket(socket.AF_UNIX) for _ in range(5)]
            for client in clients:
                client.connect(str(tmp_path / "relay"))
            relay.cut()
            for client in clients:
                client.settimeout(60)
                with contextlib.suppress(ConnectionError):
                    assert client.recv(1) == b""
                client.close()


def test_a_pause_that_the_runtime_gives_up_is_tried_again(
    backend: DockerBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine it cannot freeze what multiplies, and says so after some seconds."""
    import docker.errors

    api = backend._ownership.api
    tried: list[str] = []
    pause = api.pause

    def giving_up(container: str) -> None:
        tried.append(container)
        if len(tried) < 3:
            reason = "Cannot pause container: OCI runtime pause failed: unable to freeze: unknown"
            raise docker.errors.APIError("500 Server Error", explanation=reason)
        pause(container)

    monkeypatch.setattr(api, "pause", giving_up)
    with backend.paused():
        assert len(tried) == 3
    assert run(backend, "echo on") == (0, "on\n")
    monkeypatch.setattr(docker_exec, "_FREEZING", 0.0)
    tried.clear()
    with pytest.raises(SandboxUnavailable, match="unable to freeze"), backend.paused():
        pass
