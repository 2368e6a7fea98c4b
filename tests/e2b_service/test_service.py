"""E2B's own client library against ``sandboxgym serve e2b``: its usual calls, forks with processes, limits."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from e2b_service.conftest import KEYS, Server, point, start

COUNT = "i=0; while :; do echo $((i++)); sleep 0.05; done"


def numbers(handle: Any, many: int) -> list[int]:
    """The next numbers that a command prints."""
    found: list[int] = []
    for out, _, _ in handle:
        found += map(int, (out or "").split())
        if len(found) >= many:
            return found
    raise AssertionError(f"it ended after {found}")


def test_commands_have_output_exit_codes_and_environments(e2b: Any, box: Any) -> None:
    heard: list[str] = []
    command = "echo out; echo err >&2; pwd; echo $NAME $E2B_SANDBOX_ID"
    result = box.commands.run(command, envs={"NAME": "a b"}, on_stdout=heard.append, on_stderr=heard.append)
    assert result.stdout == f"out\n/home/user\na b {box.sandbox_id}\n"
    assert result.stderr == "err\n" and sorted("".join(heard)) == sorted(result.stdout + "err\n")
    with pytest.raises(e2b.CommandExitException) as failed:
        box.commands.run("exit 7")
    assert failed.value.exit_code == 7
    assert box.commands.run("pwd", cwd="/tmp").stdout == "/tmp\n"
    with pytest.raises(e2b.InvalidArgumentException, match="cwd: expected a directory"):
        box.commands.run("pwd", cwd="/nowhere")
    assert len(box.commands.run("seq 200000").stdout.split()) == 200_000
    for _ in range(10):  # one that ends before anybody could listen loses nothing
        assert box.commands.run("echo x").stdout == "x\n"


def test_background_commands_are_listed_typed_to_and_killed(e2b: Any, box: Any) -> None:
    handle = box.commands.run("cat; echo done", background=True, stdin=True)
    assert [info.args[-1] for info in box.commands.list()] == ["cat; echo done"]
    second = box.commands.connect(handle.pid)
    box.commands.send_stdin(handle.pid, "one\n")
    box.commands.stream_input(handle.pid, ["two\n", "x" * 200_000 + "\n"])
    handle.close_stdin()
    assert handle.wait().stdout == "one\ntwo\n" + "x" * 200_000 + "\ndone\n"
    assert second.wait().stdout == handle.wait().stdout
    with pytest.raises(e2b.NotFoundException):
        box.commands.send_stdin(handle.pid, "late")
    sleeper = box.commands.run("sleep 1000 & sleep 1000", background=True)
    assert box.commands.kill(sleeper.pid) is True
    with pytest.raises(e2b.CommandExitException):
        sleeper.wait()
    assert box.commands.kill(sleeper.pid) is False
    assert "sleep" not in box.commands.run("cat /proc/[0-9]*/comm").stdout


def test_a_command_ends_at_the_time_limit_and_not_with_its_client(e2b: Any, box: Any) -> None:
    with pytest.raises(e2b.TimeoutException):
        box.commands.run("sleep 1000", timeout=0.5)
    handle = box.commands.run(COUNT, background=True)
    handle.disconnect()
    assert numbers(box.commands.connect(handle.pid), 3)
    end = time.monotonic() + 300  # the client gives up by its own clock, maybe before the server ends the command
    while (listed := [info.args[-1] for info in box.commands.list()]) != [COUNT] and time.monotonic() < end:
        time.sleep(0.02)
    assert listed == [COUNT]


def test_files_are_written_read_listed_moved_and_watched(e2b: Any, box: Any) -> None:
    files = box.files
    assert files.write("a/b.txt", "text é").path == "/home/user/a/b.txt"
    data = bytes(range(256)) * 1000
    files.write_files([{"path": "/tmp/one", "data": data}, {"path": "two", "data": "2"}])
    assert files.read("a/b.txt") == "text é" and files.read("/tmp/one", format="bytes") == data
    assert b"".join(files.read("/tmp/one", format="stream")) == data
    files.write("/tmp/zipped", data, gzip=True)
    assert files.read("/tmp/zipped", format="bytes") == data
    box.commands.run("ln -s /etc/passwd link; chmod 600 two")
    assert [(one.name, one.type.value) for one in files.list(".", depth=2)] == [
        ("a", "dir"), ("b.txt", "file"), ("link", "symlink"), ("two", "file")
    ]  # fmt: skip
    info = files.get_info("two")
    assert (info.size, info.mode, info.permissions, info.owner) == (1, 0o600, "rw-------", "root")
    assert files.get_info("link").symlink_target == "/etc/passwd"
    assert files.rename("two", "c/three").path == "/home/user/c/three"
    assert files.exists("c/three") and not files.exists("two")
    assert files.make_dir("d/e") is True and files.make_dir("d/e") is False
    watch = files.watch_dir(".", recursive=True)
    files.write("new", "1")
    files.remove("d")
    events = [(event.name, event.type.value) for event in watch.get_new_events()]
    assert events == [("d", "remove"), ("d/e", "remove"), ("new", "create"), ("new", "write")]
    assert watch.get_new_events() == []
    watch.stop()
    for call in (lambda: files.read("gone"), lambda: files.list("gone"), lambda: files.get_info("gone")):
        with pytest.raises(e2b.NotFoundException):
            call()
    with pytest.raises(e2b.InvalidArgumentException):
        files.read("/tmp")


def test_paths_and_links_stay_inside(e2b: Any, box: Any, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the host")
    box.commands.run(f"ln -s / root; ln -s {secret} away; ln -s /proc/1/root deep; mkdir -p /tmp/x")
    for path in (str(secret), f"../../../../..{secret}", f"root{secret}", "away", f"deep{secret}"):
        with pytest.raises(e2b.SandboxException):
            box.files.read(path)
    box.files.write("../../../../../../escaped", "x")
    assert box.files.exists("/escaped") and not Path("/escaped").exists()
    box.files.write(f"root{tmp_path}/mine", "inside")
    assert not (tmp_path / "mine").exists()
    for path in ("/proc/self/environ", "/proc/sys/kernel/core_pattern"):
        with pytest.raises(e2b.SandboxException):
            box.files.read(path)
        with pytest.raises(e2b.SandboxException):
            box.files.write(path, "x")
    with pytest.raises(e2b.InvalidArgumentException):
        box.files.remove("/")


def test_signed_urls_are_for_one_path_and_operation(box: Any, service: Server) -> None:
    box.files.write("a", "signed")
    url = box.download_url("a", use_signature_expiration=60)
    assert httpx.get(url, headers={"E2b-Sandbox-Id": box.sandbox_id}).text == "signed"
    for other in (url.replace("path=a", "path=b"), url.replace("v1_", "v1_x")):
        assert httpx.get(other, headers={"E2b-Sandbox-Id": box.sandbox_id}).status_code == 401
    assert httpx.post(url, headers={"E2b-Sandbox-Id": box.sandbox_id}).status_code == 401


def test_sandboxes_are_listed_described_and_end_in_time(e2b: Any, service: Server) -> None:
    one = e2b.Sandbox.create(timeout=60, metadata={"of": "one"})
    two = e2b.Sandbox.create(timeout=60, metadata={"of": "two"}, lifecycle={"on_timeout": "pause"})
    found = e2b.Sandbox.list(query=e2b.SandboxQuery(metadata={"of": "one"})).next_items()
    assert [info.sandbox_id for info in found] == [one.sandbox_id]
    pages = e2b.Sandbox.list(limit=1)
    assert {pages.next_items()[0].sandbox_id, pages.next_items()[0].sandbox_id} == {one.sandbox_id, two.sandbox_id}
    assert not pages.has_next
    info = one.get_info()
    assert info.metadata == {"of": "one"} and 55 < (info.end_at - info.started_at).total_seconds() < 65
    assert one.get_metrics()[0].mem_used > 0
    two.files.write("kept", "x")
    one.set_timeout(0)
    two.set_timeout(0)
    for _ in range(1200):
        if not one.is_running() and not two.is_running():
            break
        time.sleep(0.05)
    assert not one.is_running()
    with pytest.raises(e2b.SandboxNotFoundException):
        one.get_info()
    with pytest.raises(e2b.TimeoutException):
        one.commands.run("true")
    for _ in range(1200):
        if two.get_info().state.value == "paused":
            break
        time.sleep(0.05)
    assert e2b.Sandbox.connect(two.sandbox_id).files.read("kept") == "x"
    assert e2b.Sandbox.kill(two.sandbox_id) is True and e2b.Sandbox.kill(two.sandbox_id) is False


def test_forks_continue_the_processes_and_go_their_own_ways(box: Any, live: Server) -> None:
    handle = box.commands.run(COUNT, background=True)
    before = numbers(handle, 3)
    box.files.write("f", "source")
    children = box.fork(count=2, timeout=60)
    children[0].files.write("f", "first")
    assert numbers(handle, 2)[0] == before[-1] + 1  # the source loses and repeats nothing
    for child, text in zip(children, ("first", "source"), strict=True):
        own = child.commands.connect(handle.pid)
        assert numbers(own, 2)[0] > before[-1]
        assert child.files.read("f") == text
    assert children[0].commands.kill(handle.pid)
    assert not children[0].commands.list() and children[1].commands.list()
    assert numbers(handle, 1)


@pytest.mark.slow
def test_commands_that_begin_and_end_during_forks_lose_nothing(box: Any, live: Server) -> None:
    found: list[str] = []

    def run() -> None:
        for number in range(25):
            found.append(box.commands.run(f"echo {number}; sleep 0.0{number % 9}; echo end", timeout=60).stdout)

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive():
        (child,) = box.fork(timeout=60)
        assert child.commands.run("echo x").stdout == "x\n"
        child.kill()
    assert found == [f"{number}\nend\n" for number in range(25)]
    assert box.commands.list() == []


@pytest.mark.slow
def test_a_paused_sandbox_continues_with_its_processes(e2b: Any, box: Any, live: Server) -> None:
    slowly = COUNT.replace("0.05", "0.5")  # it counts on until the pause, which takes its time beside other tests
    handle = box.commands.run(slowly, background=True)
    last = numbers(handle, 3)[-1]
    assert box.pause() is True and box.pause() is False
    with pytest.raises(e2b.SandboxException):
        handle.wait()
    assert box.get_info().state.value == "paused"
    resumed = e2b.Sandbox.connect(box.sandbox_id, timeout=60)
    assert last < numbers(resumed.commands.connect(handle.pid), 1)[0] < last + 40
    resumed.pause(mode="filesystem")
    assert e2b.Sandbox.connect(box.sandbox_id).commands.list() == []
    lifecycle = {"on_timeout": "pause", "auto_resume": True}
    asleep = e2b.Sandbox.create(timeout=60, lifecycle=lifecycle)
    sleeper = asleep.commands.run("sleep 1000", background=True)
    asleep.pause()
    assert [info.pid for info in asleep.commands.list()] == [sleeper.pid]  # a call wakes it up
    assert asleep.get_info().state.value == "running"


@pytest.mark.slow
def test_sandboxes_are_made_from_snapshots(e2b: Any, box: Any, live: Server) -> None:
    box.files.write("f", "old")
    handle = box.commands.run("sleep 1000", background=True)
    full = box.create_snapshot(name="mine")
    files = box.create_snapshot(mode="filesystem")
    box.files.write("f", "new")
    assert full.names == ["mine"]
    assert {one.snapshot_id for one in e2b.Sandbox.list_snapshots().next_items()} == {
        full.snapshot_id, files.snapshot_id
    }  # fmt: skip
    named, bare = e2b.Sandbox.create("mine", timeout=60), e2b.Sandbox.create(files.snapshot_id, timeout=60)
    assert named.files.read("f") == bare.files.read("f") == "old"
    assert [info.pid for info in named.commands.list()] == [handle.pid] and bare.commands.list() == []
    assert e2b.Sandbox.delete_snapshot(full.snapshot_id) is True
    assert e2b.Sandbox.delete_snapshot(full.snapshot_id) is False
    assert named.files.read("f") == "old"
    with pytest.raises(e2b.SandboxException, match="not found"):
        e2b.Sandbox.create("mine")


def test_another_key_sees_nothing_and_an_unknown_one_is_refused(e2b: Any, box: Any) -> None:
    kept = box.create_snapshot()
    other = {"api_key": KEYS[1]}
    assert e2b.Sandbox.list(**other).next_items() == [] and e2b.Sandbox.kill(box.sandbox_id, **other) is False
    for call in (
        lambda: e2b.Sandbox.connect(box.sandbox_id, **other),
        lambda: e2b.Sandbox.create(kept.snapshot_id, **other),
    ):
        with pytest.raises(e2b.SandboxException, match="not found"):
            call()
    assert e2b.Sandbox.delete_snapshot(kept.snapshot_id, **other) is False
    with pytest.raises(e2b.AuthenticationException):
        e2b.Sandbox.create(api_key="e2b_unknown")
    assert box.is_running()


@pytest.mark.slow
def test_more_sandboxes_and_snapshots_than_allowed_are_refused(e2b: Any, box: Any) -> None:
    with pytest.raises(e2b.RateLimitException, match="at most 12 sandboxes"):
        box.fork(count=12)
    assert len(e2b.Sandbox.list().next_items()) == 1
    for _ in range(6):
        box.create_snapshot()
    with pytest.raises(e2b.RateLimitException, match="at most 6 snapshots"):
        box.create_snapshot()
    with pytest.raises(e2b.SandboxException, match="timeout: expected 0 to 86,400 seconds"):
        e2b.Sandbox.create(timeout=10**6)


def test_what_is_not_served_is_refused_in_words(e2b: Any, service: Server, box: Any) -> None:
    for call, says in (
        (lambda: e2b.Sandbox.create("nothing"), "template 'nothing' not found; templates here: base"),
        (lambda: e2b.Sandbox.create(network={"deny_out": ["8.8.8.8"]}), "network rules are not supported"),
        (lambda: box.pty.create(e2b.PtySize(rows=1, cols=1)), "terminals are not served"),
    ):
        with pytest.raises(e2b.SandboxException, match=says):
            call()


@pytest.mark.slow
def test_two_clients_use_one_sandbox_at_a_time(e2b: Any, box: Any) -> None:
    second = e2b.Sandbox.connect(box.sandbox_id)
    failed: list[BaseException] = []

    def use(client: Any, name: str) -> None:
        try:
            for number in range(5):
                client.files.write(f"{name}/{number}", name)
                assert client.commands.run(f"cat {name}/{number}").stdout == name
        except BaseException as error:
            failed.append(error)

    threads = [
        threading.Thread(target=use, args=(client, name)) for client, name in ((box, "a"), (second, "b"), (box, "c"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not failed
    assert len(box.files.list(".", depth=2)) == 18


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_server_that_ends(
    e2b: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, server: Server
) -> None:
    own = start(tmp_path, "--backend", "overlay")
    point(monkeypatch, own)
    box = e2b.Sandbox.create(timeout=60, envs={"E2B_TEST": str(tmp_path)})
    handle = box.commands.run("(setsid sleep 1000 &) ; sleep 1000", background=True)
    assert own._is_mine(_host_pid(own))
    began = time.monotonic()
    own.end(number)
    assert time.monotonic() - began < 60
    assert own.leftovers() == []
    with pytest.raises(e2b.SandboxException) as raised:
        handle.wait()
    if number != signal.SIGKILL:
        assert "the sandbox ended before the command" in str(raised.value)


def _host_pid(server: Server) -> str:
    import os

    for _ in range(1200):
        for pid in os.listdir("/proc"):
            if pid.isdigit() and server._is_mine(pid):
                return pid
        time.sleep(0.05)
    raise AssertionError("no process of the sandbox is seen")


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--backend", "overlay-rootless"), ("--snapshot", "filesystem")])
def test_without_criu_files_are_forked_and_the_answer_names_what_is_lost(
    e2b: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], server: Server
) -> None:
    own = start(tmp_path, *options)
    try:
        assert "keep files only" in own.says
        point(monkeypatch, own)
        box = e2b.Sandbox.create(timeout=60)
        box.commands.run("sleep 1000", background=True)
        box.files.write("f", "x")
        answer = httpx.post(
            f"{own.url}/sandboxes/{box.sandbox_id}/fork", json={"count": 1}, headers={"X-API-Key": KEYS[0]}, timeout=60
        )
        assert answer.status_code == 201 and "sleep 1000" in answer.headers["x-sandboxgym-lost"]
        (child,) = box.fork()
        assert child.files.read("f") == "x" and child.commands.list() == []
        assert len(box.commands.list()) == 1
        with pytest.raises(e2b.SandboxException, match="files only"):
            box.pause(mode="full")
        box.pause()
        assert e2b.Sandbox.connect(box.sandbox_id).files.read("f") == "x"
    finally:
        own.end()


@pytest.mark.slow
def test_without_a_key_only_requests_to_this_machine_are_served(
    e2b: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server
) -> None:
    own = start(tmp_path, "--no-key", "--backend", "overlay", "--template", "other=host")
    try:
        point(monkeypatch, own)
        monkeypatch.setenv("E2B_API_KEY", "anything")
        assert e2b.Sandbox.list().next_items() == []
        box = e2b.Sandbox.create("other", timeout=60)
        assert box.get_info().template_id == "other"
        (child,) = box.fork()
        assert child.commands.run("echo x").stdout == "x\n"
        for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
            assert httpx.get(f"{own.url}/v2/sandboxes", headers=headers).status_code == 403
    finally:
        own.end()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--no-key", "--host", "0.0.0.0"), "--no-key: expected a --host of the loopback"),
        (("--keys", "/nowhere"), "--keys: "),
        (("--backend", "copy"), "invalid choice: 'copy'"),
        (("--template", "x"), "--template: expected NAME=ROOTFS, found x"),
        (("--sandboxes", "0"), "--sandboxes: expected more than 0"),
    ],
)
def test_options_that_cannot_be_are_refused_in_a_sentence(e2b: Any, options: tuple[str, ...], says: str) -> None:
    command = [sys.executable, "-m", "sandboxgym", "serve", "e2b", "--port", "0", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    assert done.returncode in (1, 2) and says in done.stderr and "Traceback" not in done.stderr


def test_a_resumption_that_is_cancelled_ends_its_sandbox_and_stays_cancelled() -> None:
    pytest.importorskip("starlette")
    from sandboxgym.e2b import service

    ended: list[str] = []

    async def work(function: Callable[..., Any], *arguments: Any) -> Any:
        if function is service._restored:  # the state is large, and the client leaves meanwhile
            await asyncio.Event().wait()
        return function(*arguments)

    async def template(name: str) -> tuple[Any, None]:
        child = SimpleNamespace(close=lambda: ended.append("sandbox"))
        return SimpleNamespace(fork=lambda count: [child]), None

    held = SimpleNamespace(release=lambda: ended.append("snapshot"))
    kept = SimpleNamespace(template="base", snapshot=SimpleNamespace(retain=lambda: held))
    here = SimpleNamespace(work=work, _template=template, _templates_lock=asyncio.Lock(), _reserve=lambda *_: None)
    box = SimpleNamespace(paused=kept, sandbox=None, tenant=SimpleNamespace(reserved=1))

    async def left() -> None:
        async with asyncio.timeout(0):
            await service.Service._resume(here, box, 60)  # type: ignore[arg-type]

    with pytest.raises(TimeoutError):  # of the timeout, which makes it of the cancellation
        asyncio.run(left())
    assert ended == ["sandbox", "snapshot"] and box.paused is kept and box.tenant.reserved == 0
