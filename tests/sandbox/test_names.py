"""Host names in sandboxes: `localhost` and the own name, for every image, and changes to their files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox.docker_image import docker_image  # noqa: F401 - a fixture
from sandbox.sandboxes import check

from sandboxgym.sandbox.base import SandboxFull
from sandboxgym.sandbox.docker.backend import DockerBackend
from sandboxgym.sandbox.files import name_files
from sandboxgym.sandbox.sandbox import Sandbox, make_sandbox

# fixtures of another module are arguments of the tests below
# ruff: noqa: F811

BOTH = ("localhost", name_files.HOST)
SERVED = """
import http.server, socket, threading, urllib.request
server = http.server.HTTPServer(("0.0.0.0", 0), http.server.BaseHTTPRequestHandler)
threading.Thread(target=server.serve_forever, daemon=True).start()
for name in ("localhost", socket.gethostname()):
    try:
        urllib.request.urlopen(f"http://{name}:{server.server_port}/")
    except urllib.error.HTTPError as error:
        print(name, error.code)
"""


@pytest.fixture(params=["overlay", "overlay-rootless"])
def kind(request: pytest.FixtureRequest) -> str:
    check(request.param)
    return str(request.param)


@pytest.fixture
def box(kind: str) -> Iterator[Sandbox]:
    with make_sandbox(kind, allow_unsafe=True) as sandbox:
        yield sandbox


def served(box: Sandbox) -> str:
    return box.execute(f"python3 - 2>/dev/null <<'END'\n{SERVED}\nEND").output


def test_a_server_is_reached_by_both_names(box: Sandbox) -> None:
    assert served(box) == f"localhost 501\n{name_files.HOST} 501\n"
    assert box.execute("hostname; cat /etc/hostname; cat /etc/resolv.conf").output == f"{name_files.HOST}\n" * 2
    assert box.execute("getent hosts localhost >/dev/null && echo found").output == "found\n"


def test_with_the_hosts_network_its_resolver_is_asked(kind: str) -> None:
    with make_sandbox(kind, network=True, allow_unsafe=True) as box:
        assert box.run("cat /etc/resolv.conf").output == Path("/etc/resolv.conf").read_text()
        assert served(box) == f"localhost 501\n{name_files.HOST} 501\n"


def test_what_is_written_is_part_of_the_files(box: Sandbox) -> None:
    box.execute("true")
    first = box.snapshot()
    box.execute("echo 127.0.0.9 other >>/etc/hosts; rm /etc/hostname")
    second = box.snapshot()
    question = "getent hosts other | cut -d' ' -f1; ls /etc/hostname 2>/dev/null"
    (fork,) = box.fork(1)
    with fork:
        assert fork.execute(question).output == "127.0.0.9\n"
    box.restore(first)
    assert box.execute(question).output == "/etc/hostname\n"
    box.restore(second)
    assert box.execute(question).output == "127.0.0.9\n"


@pytest.mark.parametrize(
    "link",
    [
        "/etc/hosts -> {}",
        "/etc/resolv.conf -> ../../../../{}",
        "/etc -> usr/etc",
        "/etc -> /../../usr/etc",
        "/etc -> etc",
    ],
)
def test_a_link_of_the_image_leads_nowhere_outside(kind: str, link: str, tmp_path: Path) -> None:
    """On the lowest layers alone, since what is asked is where the files are put."""
    precious = tmp_path / "precious"
    precious.write_text("kept")
    root = tmp_path / "root"
    (root / "usr" / "etc").mkdir(parents=True, mode=0o750)
    name, _, target = link.partition(" -> ")
    (root / "etc").mkdir() if name != "/etc" else None
    (root / name.strip("/")).symlink_to(target.format(precious))
    before = sorted(path for path in tmp_path.rglob("*"))
    made = name_files.layer(tmp_path, (root,), name_files.contents(network=False))
    after = sorted(path for path in tmp_path.rglob("*") if not path.is_relative_to(made))
    assert after == before and precious.read_text() == "kept"
    folder = made / ("usr/etc" if target.endswith("usr/etc") else "etc")
    assert sorted(os.listdir(folder)) == ["hostname", "hosts", "resolv.conf"]
    assert not any((folder / file).is_symlink() for file in os.listdir(folder))
    if target.endswith("usr/etc"):
        assert folder.stat().st_mode == (root / "usr" / "etc").stat().st_mode
        assert not (made / "etc").exists(), "the link must not be hidden"


def test_deleted_and_replaced_directories_of_lower_layers_are_not_seen(tmp_path: Path) -> None:
    (tmp_path / "top" / "etc").mkdir(parents=True, mode=0o711)
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "etc").symlink_to("elsewhere")
    made = name_files.layer(tmp_path, (tmp_path / "top", tmp_path / "below"), name_files.contents(network=False))
    assert os.listdir(made) == ["etc"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["overlay", "overlay-rootless", "docker"])
def test_an_image_without_these_files(docker_image: str, backend: str) -> None:
    check(backend)
    with make_sandbox(backend, rootfs=f"docker:{docker_image}", allow_unsafe=True) as box:
        assert served(box) == f"localhost 501\n{name_files.HOST} 501\n"
        usual = name_files.contents(network=False)
        assert {name: box.read_file(f"/etc/{name}") for name in name_files.FILES} == usual


def test_without_isolation_they_are_the_machines() -> None:
    with make_sandbox("copy", allow_unsafe=True) as box:
        assert served(box).startswith("localhost 501\n")
        assert box.execute("cat /etc/hosts").output == Path("/etc/hosts").read_text()


@pytest.fixture
def container(docker_image: str) -> Iterator[Sandbox]:
    with make_sandbox("docker", rootfs=f"docker:{docker_image}") as sandbox:
        yield sandbox


HELD = "cat /etc/hosts | tail -n 1; cat /etc/hostname /etc/resolv.conf"
USUAL = f"{name_files.OWN_ADDRESS}\t{name_files.HOST}\n{name_files.HOST}\n"
LOOKED_UP = "import socket; print(socket.gethostbyname('other'))"


@pytest.mark.slow
def test_a_tree_of_a_container_keeps_what_they_hold(container: Sandbox) -> None:
    assert container.execute(HELD).output == USUAL
    first = container.snapshot()
    container.execute(
        "echo 127.0.0.9 other >>/etc/hosts; echo renamed >/etc/hostname; echo nameserver ::1 >/etc/resolv.conf"
    )
    changed = "127.0.0.9 other\nrenamed\nnameserver ::1\n"
    second = container.snapshot()
    assert container.execute(HELD).output == changed, "it goes on as it was"
    (fork,) = container.fork(1)
    with fork:
        assert fork.execute(HELD).output == changed
        assert fork.execute(f'python3 -c "{LOOKED_UP}"').output == "127.0.0.9\n"
        fork.execute("echo 127.0.0.8 third >>/etc/hosts")
    assert container.execute(HELD).output == changed, "a fork has files of its own"
    container.restore(first)
    assert container.execute(HELD).output == USUAL
    loaded = container.unpack(second.pack())
    assert container.execute(HELD).output == USUAL, "unpacking changes nothing that runs"
    for snapshot in (second, loaded):
        container.restore(first)
        container.restore(snapshot)
        assert container.execute(HELD).output == changed
    container.execute("echo 127.0.1.1 >/etc/hosts; echo more >/tmp/file")
    third = container.snapshot()
    container.restore(third)
    assert container.execute(HELD).output == "127.0.1.1\nrenamed\nnameserver ::1\n", "a snapshot of what was restored"


@pytest.mark.slow
def test_they_are_written_from_outside_too(container: Sandbox) -> None:
    container.execute("ln -s /etc/hosts /tmp/link")
    container.write_file("/tmp/link", b"127.0.0.9 other\n")
    assert container.execute("cat /etc/hosts").output == "127.0.0.9 other\n"
    assert container.read_file("/etc/hosts") == b"127.0.0.9 other\n"


@pytest.mark.slow
def test_what_is_too_large_to_be_kept_is_refused(container: Sandbox) -> None:
    container.execute(f"head -c {name_files.LONGEST + 1} /dev/zero >/etc/hosts")
    with pytest.raises(SandboxFull, match="/etc/hosts cannot be kept"):
        container.snapshot()
    container.execute(f"truncate -s {name_files.LONGEST} /etc/hosts")
    container.snapshot().release()


@pytest.mark.slow
def test_with_a_network_the_daemons_resolver_is_kept_only_where_it_was_changed(docker_image: str) -> None:
    with make_sandbox("docker", rootfs=f"docker:{docker_image}", network=True) as box:
        usual = box.execute("cat /etc/resolv.conf").output
        assert served(box) == f"localhost 501\n{name_files.HOST} 501\n"
        backend = box.backend
        assert isinstance(backend, DockerBackend)
        tree = backend.commit(keep_processes=True)
        assert tree.image.names() == {}
        tree.release()
        box.execute("echo nameserver 127.0.0.9 >/etc/resolv.conf")
        changed = box.snapshot()
        box.restore(changed)
        assert box.execute("cat /etc/resolv.conf").output == "nameserver 127.0.0.9\n" != usual
        again = box.snapshot()
        box.restore(again)
        assert box.execute("cat /etc/resolv.conf").output == "nameserver 127.0.0.9\n"
