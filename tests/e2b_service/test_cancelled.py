"""The service of ``serve e2b`` without a server: calls that are given up, captures, clocks that are set, refusals."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette")

import httpx

from sandboxgym.e2b import service as module
from sandboxgym.e2b.app import make_app
from sandboxgym.e2b.commands import Commands
from sandboxgym.e2b.quotas import Quotas, RequestRefused
from sandboxgym.e2b.service import LiveSandbox, Service
from sandboxgym.sandbox.base import SandboxError
from sandboxgym.system import refusals
from sandboxgym.system.serving import telling


async def let_others_run() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def make_service(**quotas: int) -> Service:
    return Service({"base": "host"}, None, quotas=Quotas(**quotas))


def make_box(service: Service, name: str = "one") -> LiveSandbox:
    commands = Commands(os.open)
    return LiveSandbox(name, service.tenant(None), "base", "base", SimpleNamespace(), commands, {}, {})  # type: ignore[arg-type]


def test_a_call_that_is_given_up_keeps_its_sandbox_until_its_thread_has_ended() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(sandbox: Any) -> None:
        begun.set()
        assert go_on.wait(300)

    async def play() -> None:
        service = make_service()
        box = make_box(service)

        async def use() -> None:
            async with asyncio.timeout(60), service.using(box) as sandbox:
                await service.work(slow, sandbox)

        for ends in (go_on.set, service._over.set):
            begun.clear()
            go_on.clear()
            call = asyncio.create_task(use())
            await asyncio.to_thread(begun.wait, 60)
            call.cancel()
            await let_others_run()
            call.cancel()
            await let_others_run()
            assert box.lock.locked() and not call.done()
            ends()
            await asyncio.wait([call])
            assert call.cancelled() and not box.lock.locked()
        go_on.set()

    asyncio.run(play())


def test_nothing_is_read_or_written_while_a_sandbox_is_captured(tmp_path: Path) -> None:
    folder = tmp_path / "var/lib/e2b/1"
    folder.mkdir(parents=True)
    for name in ("in", "out", "err", "tell"):
        os.mkfifo(folder / name)

    def open_pipe(path: str, *, write: bool = False) -> int:
        return os.open(f"{tmp_path}{path}", os.O_RDWR | os.O_NONBLOCK)

    async def play() -> None:
        commands = Commands(open_pipe)
        command = commands.new({}, tag=None, takes_input=True)
        command.started.set()
        commands.listen()
        client = commands.join(command)
        ends = {name: os.open(folder / name, os.O_RDWR | os.O_NONBLOCK) for name in ("in", "out")}
        commands.deafen()
        os.write(ends["out"], b"output")
        commands.leave(command, commands.join(command))
        writing = asyncio.create_task(commands.write(command, b"input"))
        await let_others_run()
        assert client.empty(), "it will be read again from the copy"
        with pytest.raises(BlockingIOError):
            os.read(ends["in"], 10)  # it could be lost with the old container
        commands.go_on(replaced=False)
        await writing
        assert os.read(ends["in"], 10) == b"input"
        assert (await client.get())["data"] == {"stdout": "b3V0cHV0"}
        for end in ends.values():
            os.close(end)
        commands.end_all()

    asyncio.run(play())


def test_a_sandbox_ends_in_time_though_the_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        service = make_service()
        ended: asyncio.Queue[str] = asyncio.Queue()

        async def kill(box: LiveSandbox) -> None:
            ended.put_nowait(box.id)

        monkeypatch.setattr(service, "kill", kill)
        first, second = make_box(service, "first"), make_box(service, "second")
        for box in (first, second):
            service.set_deadline(box, 0)
        old = second.due
        service.set_deadline(second, 600)
        service.extend(second, 1)
        await service._expire(second, old)  # as one does that was about to when the limit was changed
        monkeypatch.setattr(module.time, "time", lambda: 0.0)
        async with asyncio.timeout(60):
            assert await ended.get() == "first"
        assert ended.empty() and second.timer is not None
        second.timer.cancel()

    asyncio.run(play())


def test_snapshots_at_the_same_time_stay_within_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> list[Any]:
        service = make_service(kept=1)

        async def capture(box: LiveSandbox, sandbox: Any, *, fully: bool | None) -> Any:
            await let_others_run()
            return SimpleNamespace(snapshot=SimpleNamespace(release=lambda: None))

        monkeypatch.setattr(service, "_capture", capture)
        boxes = [make_box(service, name) for name in ("one", "two")]
        return await asyncio.gather(*(service.snapshot(box, None, fully=None) for box in boxes), return_exceptions=True)

    first, second = asyncio.run(play())
    assert not isinstance(first, BaseException) and isinstance(second, RequestRefused) and second.status == 429


def test_a_creation_that_is_cancelled_closes_its_sandboxes(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    async def play() -> None:
        service = make_service()

        async def work(function: Callable[..., Any], *arguments: Any) -> Any:
            if function is module._restored:
                await asyncio.Event().wait()
            return function(*arguments)

        async def template(name: str) -> tuple[Any, None]:
            return SimpleNamespace(
                fork=lambda count: [
                    SimpleNamespace(close=lambda number=number: closed.append(f"sandbox {number}"))
                    for number in range(count)
                ]
            ), None

        monkeypatch.setattr(service, "work", work)
        monkeypatch.setattr(service, "_template", template)
        held = SimpleNamespace(release=lambda: closed.append("snapshot"))
        snap = SimpleNamespace(template="base", snapshot=SimpleNamespace(retain=lambda: held))
        starting = asyncio.create_task(service._start(service.tenant(None), snap, 2, seconds=60, settings={}))  # type: ignore[arg-type]
        await let_others_run()
        starting.cancel()
        await asyncio.wait([starting])
        assert starting.cancelled() and service.tenant(None).reserved == 0

    asyncio.run(play())
    assert closed == ["sandbox 0", "sandbox 1", "snapshot"]


def test_a_creation_that_is_under_way_when_the_service_ends_leaves_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    async def play() -> None:
        service = make_service()
        going = asyncio.Event()

        async def work(function: Callable[..., Any], *arguments: Any) -> Any:
            if function is module._restored:
                await going.wait()
                return None
            return await Service.work(service, function, *arguments)

        async def template(name: str) -> tuple[Any, None]:
            return SimpleNamespace(fork=lambda count: [SimpleNamespace(close=lambda: closed.append("sandbox"))]), None

        monkeypatch.setattr(service, "work", work)
        monkeypatch.setattr(service, "_template", template)
        monkeypatch.setattr(module.Commands, "of", lambda *given: Commands(os.open))
        held = SimpleNamespace(release=lambda: None, retain=lambda: held)
        snap = SimpleNamespace(template="base", snapshot=held, commands=[], number=0)
        settings = {"template": "base", "metadata": {}, "envs": {}}
        starting = asyncio.create_task(service._start(service.tenant(None), snap, 1, seconds=60, settings=settings))  # type: ignore[arg-type]
        await let_others_run()
        await service.end()
        going.set()
        with pytest.raises(RequestRefused, match="closing") as refused:
            await starting
        assert refused.value.status == 503 and not service.tenant(None).boxes
        await service.close()
        with pytest.raises(RequestRefused, match="closing"):
            await Service.work(service, print)

    asyncio.run(play())
    assert closed == ["sandbox"]


@pytest.mark.parametrize(
    ("path", "headers", "content", "said"),
    [
        ("/files", {}, b"", "status 401: "),
        ("/process.Process/Start", {"x-access-token": "right"}, b"\0\0\0\0\2{}", "invalid_argument: "),
        ("/process.Process/List", {"x-access-token": "right", "connect-timeout-ms": "x"}, b"", "status 400: "),
        ("/v2/sandboxes", {}, b"", "status 401: "),
    ],
)
def test_what_is_refused_is_logged_once(
    path: str,
    headers: dict[str, str],
    content: bytes,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(refusals, "_REFUSALS", refusals.Refusals())
    caplog.set_level("WARNING")

    async def ask() -> None:
        service = Service({"base": "host"}, frozenset({"key"}))
        box = make_box(make_service())
        box.token = "right"

        async def lives(box: LiveSandbox) -> bool:
            return False

        monkeypatch.setattr(service, "find", lambda tenant, name: box)
        monkeypatch.setattr(service, "has_ended", lives)
        transport = httpx.ASGITransport(telling(make_app(service, local_only=True)), client=("1.2.3.4", 5))
        about = {} if path.startswith("/v2") else {"e2b-sandbox-id": "one"}
        kind = f"application/{'connect+' if path.endswith('Start') else ''}json"
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:1") as client:
            for _ in range(2):
                await client.post(path, content=content, headers={**about, **headers, "content-type": kind})

    asyncio.run(ask())
    assert [record.getMessage()[: len(said) + 17] for record in caplog.records] == [f"refused 1.2.3.4: {said}"]


def test_a_sandbox_that_fails_where_nobody_expects_it_is_an_answer_in_the_protocols_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def ask() -> httpx.Response:
        service = make_service()
        box = make_box(service)
        monkeypatch.setattr(service, "find", lambda tenant, name: box)

        async def fail(box: LiveSandbox) -> bool:
            raise SandboxError("its mounts are gone")

        monkeypatch.setattr(service, "has_ended", fail)
        transport = httpx.ASGITransport(make_app(service, local_only=True), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:1") as client:
            return await client.get("/files", headers={"e2b-sandbox-id": "one"})

    answer = asyncio.run(ask())
    assert answer.status_code == 500
    assert answer.json() == {"code": 500, "message": "the sandbox: its mounts are gone", "sandboxId": "one"}
