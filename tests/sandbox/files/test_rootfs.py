"""Root file systems: what they show and what they hide."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from components import missing
from sandbox.docker_image import docker_image  # noqa: F401 - a fixture

import sandboxgym
from sandboxgym import data
from sandboxgym.sandbox.base import RootFS, SandboxUnavailable, clean_environment
from sandboxgym.sandbox.files import rootfs

linux = pytest.mark.skipif(sys.platform != "linux", reason="the host's tool chain is bound on Linux only")


def look(root: RootFS, command: str, folder: Path) -> str:
    """Output of a command in a root file system, mounted for it alone."""
    if os.geteuid() != 0:
        missing("overlay", "mounting a root file system needs root")
    point, upper, work = (folder / name for name in ("point", "upper", "work"))
    for path in (point, upper, work):
        path.mkdir(parents=True, exist_ok=True)
    lowers = ":".join(str(path) for path in root.lowers)
    lines = [
        "set -e",
        "mount --make-rprivate /",
        f"mount -t overlay -o lowerdir={lowers},upperdir={upper},workdir={work} none {point}",
        *(f"mount --bind {shlex.quote(str(path))} {shlex.quote(f'{point}{to}')}" for path, to in root.binds),
        f"mkdir -p {point}/proc {point}/dev; mount -t proc none {point}/proc; mount -t tmpfs none {point}/dev",
        f"mknod -m 666 {point}/dev/null c 1 3; mknod -m 666 {point}/dev/urandom c 1 9",
        f"exec {shutil.which('chroot')} {point} /bin/bash -c {shlex.quote(f'cd /root; {command}')}",
    ]
    done = subprocess.run(
        ["unshare", "-m", "-p", "-n", "-f", "sh", "-c", "\n".join(lines)],
        env=clean_environment(root),
        capture_output=True,
        text=True,
    )
    if "mount" in done.stderr and "permitted" in done.stderr:
        missing("overlay", f"overlays cannot be mounted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def host() -> RootFS:
    if sys.platform != "linux":
        pytest.skip("the host's tool chain is bound on Linux only")
    return rootfs.host()


def test_the_tool_chain_works(host: RootFS, tmp_path: Path) -> None:
    command = """
    git init -q repo && cd repo && git config user.email a@b && git config user.name n
    printf 'def test_it():\\n    import ssl, sqlite3, ctypes, zlib\\n    assert 1 + 1 == 2\\n' >test_it.py
    git add . && git commit -qm first && git log --oneline | wc -l
    python -m pytest -q -p no:cacheprovider 2>&1 | tail -1
    pytest --version; python -c 'import sys; print(sys.prefix, sys.version_info[:2])'
    id -un; hostname -f >/dev/null 2>&1; echo $HOME; ls /bin/sh
    """
    shown = look(host, command, tmp_path).splitlines()
    assert shown[0] == "1" and shown[1].startswith("1 passed") and shown[2].startswith("pytest ")
    assert shown[3] == f"/opt/python {sys.version_info[:2]}"
    assert shown[4:] == ["root", "/root", "/bin/sh"]


def test_nothing_else_of_the_host_is_visible(host: RootFS, tmp_path: Path) -> None:
    ours = "find / -xdev '(' -iname '*sandboxgym*' -o -iname '*bpo_ref*' ')'"
    assert look(host, f"{ours}; ls -A /home /tmp /mnt /run", tmp_path).split() == ["/home:", "/mnt:", "/run:", "/tmp:"]
    for path in (Path(sandboxgym.__file__).parent, data.cache_dir(), data.data_dir(), Path(__file__), Path.cwd()):
        assert look(host, f"test ! -e {shlex.quote(str(path))} && echo hidden", tmp_path) == "hidden\n"
    names = "'sandboxgym', 'bpo_ref', 'numpy', 'torch'"
    program = f"import importlib.util as u; print([n for n in ({names}) if u.find_spec(n)])"
    assert look(host, f"python -c {shlex.quote(program)}", tmp_path) == "[]\n"
    assert look(host, "find / -xdev -type s; ls -d /etc/shadow /root/.ssh 2>/dev/null; echo none", tmp_path) == "none\n"


def test_the_interpreters_own_packages_are_hidden(host: RootFS, tmp_path: Path) -> None:
    base = Path(sys.base_prefix).resolve()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = base / "lib" / version / "site-packages"
    if not packages.is_dir():
        pytest.skip(f"this interpreter has no {packages}")
    assert (
        look(host, f"ls -A {packages} | wc -l; ls {base / 'lib' / version / 'json'} | head -1", tmp_path).split()[0]
        == "0"
    )


def test_this_package_is_hidden_where_it_is_installed_among_the_tools(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tools = tmp_path / "usr"
    for name in ("lib/python3.9/dist-packages/sandboxgym/envs", "local/lib/python3.12/site-packages/bpo_ref", "data"):
        (tools / name).mkdir(parents=True)
    (tools / "lib/python3.9/dist-packages/apt").mkdir()
    monkeypatch.setenv("SANDBOXGYM_DATA", str(tools / "data"))
    hidden = rootfs._hidden([tools])
    assert set(hidden) == {
        tools / "lib/python3.9/dist-packages/sandboxgym",
        tools / "local/lib/python3.12/site-packages/bpo_ref",
        tools / "data",
    }


@linux
def test_only_the_tool_chain_of_the_host_is_bound(host: RootFS) -> None:
    allowed = [
        Path(path) for path in ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ssl/certs")
    ]
    allowed += [Path("/etc/pki"), data.cache_dir(), Path(sys.base_prefix).resolve()]
    for path, _ in host.binds:
        assert any(path.is_relative_to(top) for top in allowed), path
        assert path != Path(sys.base_prefix).resolve() or path.is_relative_to("/usr")


def test_extra_binds_are_shown(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/inside").write_text("in a folder\n")
    (tmp_path / "file").write_text("a file\n")
    root = rootfs.host(extra_binds=[(tmp_path / "folder", "/data/set"), (tmp_path / "file", "/srv/one")])
    assert look(root, "cat /data/set/inside /srv/one", tmp_path / "mount") == "in a folder\na file\n"


@linux
def test_the_id_is_that_of_the_tools(host: RootFS, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rootfs.host() == host
    bare = rootfs.host(packages=())
    assert bare.id != host.id and bare.lowers != host.lowers
    with pytest.raises(SandboxUnavailable, match="pip install no-such-thing"):
        rootfs.host(packages=["no-such-thing"])


@linux
def test_an_interpreter_outside_the_tool_chain_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SandboxUnavailable, match="outside the host's tool chain"):
        rootfs._check_visible([Path("/proc")])


def test_a_directory_is_identified_by_what_it_holds(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "etc").mkdir(parents=True)
        (tmp_path / name / "etc/file").write_text("same")
    one, two = rootfs.directory(tmp_path / "one"), rootfs.directory(str(tmp_path / "two"))
    assert one.id == two.id and one.lowers == (tmp_path / "one",)
    (tmp_path / "two/etc/file").chmod(0o600)
    assert rootfs.directory(tmp_path / "two").id != one.id


def test_specs_are_resolved(tmp_path: Path) -> None:
    assert rootfs.resolve(str(tmp_path)) == rootfs.resolve(tmp_path) == rootfs.directory(tmp_path)
    made = RootFS("mine", (tmp_path,))
    assert rootfs.resolve(made) is made
    with pytest.raises(ValueError, match="expected 'host', 'docker:IMAGE' or the path"):
        rootfs.resolve("/no/such/directory")
    with pytest.raises(ValueError, match="directory"):
        rootfs.directory(tmp_path / "missing")


def test_what_two_make_at_once_is_made_once(tmp_path: Path) -> None:
    made = []

    def make(folder: Path) -> None:
        made.append(threading.get_ident())
        (folder / "content").write_text("whole")

    threads = [threading.Thread(target=rootfs._once, args=(tmp_path / "target", make)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and (tmp_path / "target/content").read_text() == "whole"


def test_what_failed_or_was_killed_is_made_anew(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("disk full")

    with pytest.raises(SandboxUnavailable, match="disk full"):
        rootfs._once(tmp_path / "target", fail)
    (tmp_path / ".target.0123abcd").mkdir()  # of a process that was killed
    (tmp_path / ".target.0123abcd/half").touch()
    rootfs._once(tmp_path / "target", lambda folder: (folder / "whole").touch())
    assert [path.name for path in (tmp_path / "target").iterdir()] == ["whole"]
    assert {path.name for path in tmp_path.iterdir()} == {"target", "target.lock"}


@pytest.mark.slow
def test_an_image_brings_its_files_environment_and_directory(docker_image: str, tmp_path: Path) -> None:  # noqa: F811
    root = rootfs.resolve(f"docker:{docker_image}")
    assert root.id.startswith("sha256:") and root.workdir == "/root" and not root.binds
    assert clean_environment(root)["IMAGE_SAYS"] == "hello"
    assert look(root, "python -c 'print(6 * 7)'; git --version | cut -c1-3", tmp_path) == "42\ngit\n"


@pytest.mark.slow
def test_layers_are_stacked_topmost_first(docker_image: str, tmp_path: Path) -> None:  # noqa: F811
    if os.geteuid() != 0:
        missing("overlay", "the layers of an image are readable by root only")
    name = f"{docker_image}-layered"
    command = "echo upper >/etc/hostname.own; rm /etc/shells"
    container = subprocess.check_output(["docker", "run", "-d", docker_image, "sh", "-c", command], text=True).strip()
    try:
        subprocess.run(["docker", "wait", container], check=True, capture_output=True)
        subprocess.run(["docker", "commit", container, name], check=True, capture_output=True)
        root = rootfs.image(name)
        if len(root.lowers) == 1:
            pytest.skip("this daemon does not show its layers")
        assert look(root, "cat /etc/hostname.own; test ! -e /etc/shells && echo gone", tmp_path) == "upper\ngone\n"
    finally:
        subprocess.run(["docker", "rm", "-f", container], capture_output=True)
        subprocess.run(["docker", "rmi", "-f", name], capture_output=True)


@pytest.mark.slow
def test_an_image_whose_layers_cannot_be_read_is_unpacked_once(
    docker_image: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    listed = ["docker", "ps", "-aq", "--filter", f"ancestor={docker_image}"]
    before = set(subprocess.check_output(listed, text=True).split())  # of other tests in this process
    direct = rootfs.image(docker_image)
    monkeypatch.setenv("SANDBOXGYM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(rootfs, "_layers", lambda attributes: ())
    unpacked = rootfs.image(docker_image)
    assert unpacked == dataclasses.replace(direct, lowers=unpacked.lowers)
    assert unpacked.lowers[0].is_relative_to(tmp_path / "cache")
    assert (unpacked.lowers[0] / "tmp").stat().st_mode & 0o7777 == 0o1777
    assert look(unpacked, "python -c 'print(6 * 7)'; readlink /bin", tmp_path / "mount") == "42\nusr/bin\n"
    monkeypatch.setattr(rootfs, "_export", lambda *_: pytest.fail("unpacked twice"))
    assert rootfs.image(docker_image) == unpacked
    assert set(subprocess.check_output(listed, text=True).split()) <= before


@pytest.mark.parametrize(
    "driver",
    [
        {},
        {"GraphDriver": None},
        {"GraphDriver": {"Name": "overlayfs", "Data": None}},
        {"GraphDriver": {"Name": "vfs", "Data": {"UpperDir": "/"}}},
        {"GraphDriver": {"Name": "overlay2", "Data": {"UpperDir": "/in/a/virtual/machine", "LowerDir": "/a:/b"}}},
    ],
    ids=json.dumps,
)
def test_layers_that_cannot_be_used_are_not(driver: dict[str, object]) -> None:
    assert rootfs._layers(driver) == ()


@pytest.mark.slow
def test_a_missing_image_is_named_with_the_command_that_gets_it(docker_image: str) -> None:  # noqa: F811
    with pytest.raises(SandboxUnavailable, match="docker pull no/such-image:1"):
        rootfs.image("no/such-image:1")


def test_a_missing_daemon_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("docker")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(SandboxUnavailable, match=r"no Docker daemon answers at unix://.*none.sock: start it"):
        rootfs.image("anything")


def test_a_missing_library_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "docker", None)
    with pytest.raises(SandboxUnavailable, match=r"pip install 'sandboxgym\[sandbox\]'"):
        rootfs.image("anything")


@pytest.mark.slow
def test_an_image_whose_layers_are_there_needs_no_client_library(
    docker_image: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its import takes longer than all else that a reset in a new process does."""
    expected = rootfs.image(docker_image)
    if (os.geteuid(), expected.lowers[0].name) != (0, "diff"):
        missing("docker", "the daemon's layers cannot be used from here")
    monkeypatch.setitem(sys.modules, "docker", None)
    assert rootfs.image(docker_image) == expected


def test_a_full_disk_is_said_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOXGYM_CACHE", str(tmp_path))
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        missing("mount", "this process may not mount")
    try:
        with pytest.raises(SandboxUnavailable, match="No space left on device; set SANDBOXGYM_CACHE to a directory"):
            rootfs.host()
        assert [path.suffix for path in (tmp_path / "sandbox").iterdir()] == [".lock"]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_cache_that_cannot_be_made_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SANDBOXGYM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(SandboxUnavailable, match="Not a directory; set SANDBOXGYM_CACHE"):
        rootfs.host()
