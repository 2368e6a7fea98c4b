"""``sandboxgym serve mcp`` as a process: real clients of the library ``mcp``, hostile ones, and what is left of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from components import missing
from sandbox.sandboxes import check

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def library() -> Any:
    try:
        import mcp
    except ImportError:
        missing("mcp", "the package mcp is not installed")
    return mcp


@pytest.fixture(params=["overlay", "copy"])
def backend(request: pytest.FixtureRequest) -> str:
    check(request.param)
    return str(request.param)


def command(backend: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "sandboxgym", "serve", "mcp", "--backend", backend, "--allow-unsafe", *options]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "runtime").mkdir()
    return {"PYTHONPATH": str(ROOT), "SANDBOXGYM_RUNTIME": str(tmp_path / "runtime")}


class Agent:
    """A client of the library, with one method for calls that succeed and one for those that do not."""

    def __init__(self, client: Any) -> None:
        self.client = client

    async def __call__(self, tool: str, /, **arguments: Any) -> Any:
        result = await self.client.call_tool(tool, arguments)
        assert not result.is_error, result.content[0].text
        assert json.loads(result.content[0].text) == result.structured_content
        return result.structured_content

    async def refused(self, tool: str, /, **arguments: Any) -> str:
        result = await self.client.call_tool(tool, arguments)
        assert result.is_error
        return str(result.content[0].text)

    async def says(self, command: str, branch: str = "main") -> str:
        return str((await self("execute", command=command, branch=branch))["output"])


@pytest.fixture
def play(library: Any, environment: dict[str, str], tmp_path: Path) -> Callable[..., str]:
    """Run a script of an agent against a server process of its own; returns what that logs."""

    def run(script: Callable[[Agent], Awaitable[None]], backend: str, *options: str) -> str:
        arguments = ["-c", 'exec "$@" 2>>log', "bash", *command(backend, *options)]
        server = library.StdioServerParameters(command="bash", args=arguments, env=environment, cwd=tmp_path)

        async def main() -> None:
            async with library.Client(server) as client:
                await script(Agent(client))

        asyncio.run(asyncio.wait_for(main(), 300))
        logged = (tmp_path / "log").read_text()
        assert "Traceback" not in logged
        assert not leftovers(tmp_path / "runtime")
        return logged

    return run


def test_a_restored_branch_is_as_it_was(play: Callable[..., None], backend: str) -> None:
    async def script(agent: Agent) -> None:
        await agent.says("cd; mkdir d; cd d; echo one > notes; NAME=first")
        before = await agent.says("pwd; ls -la --time-style=full-iso; cat notes; echo $NAME")
        assert await agent("snapshot", name="start") == {"snapshot": "start", "branch": "main", "lost": []}
        await agent.says("echo two >> notes; touch more; NAME=second; cd ..")
        assert (await agent.says("echo $NAME; cat d/notes")) == "second\none\ntwo\n"
        assert (await agent("restore", snapshot="start"))["branch"] == "main"
        assert await agent.says("pwd; ls -la --time-style=full-iso; cat notes; echo $NAME") == before

    play(script, backend)


def test_branches_go_their_own_ways(play: Callable[..., None], backend: str) -> None:
    async def script(agent: Agent) -> None:
        await agent.says("cd; echo one > notes; NAME=main")
        await agent("snapshot")
        await agent.says("echo two >> notes")
        assert (await agent("fork", into=["left", "right"]))["branches"] == ["left", "right"]
        assert (await agent("fork", into=["earlier"], source="s1"))["source"] == "s1"
        await asyncio.gather(
            agent.says("echo left >> notes; NAME=left", "left"), agent.says("echo right >> notes; NAME=right", "right")
        )
        told = [await agent.says("cat notes; echo $NAME", name) for name in ("main", "left", "right", "earlier")]
        assert told == ["one\ntwo\nmain\n", "one\ntwo\nleft\nleft\n", "one\ntwo\nright\nright\n", "one\nmain\n"]
        await agent("snapshot", branch="left", name="best")
        await agent("restore", snapshot="best")
        assert await agent.says("cat notes") == "one\ntwo\nleft\n"
        overview = await agent("list")
        assert [(one["name"], one["source"]) for one in overview["branches"]] == [
            ("main", ""),
            ("left", "main"),
            ("right", "main"),
            ("earlier", "s1"),
        ]
        assert [(one["name"], one["branch"]) for one in overview["snapshots"]] == [("s1", "main"), ("best", "left")]
        await agent("discard", names=["left", "right", "s1"])
        assert "expected a branch (main, earlier), found 'left'" in await agent.refused(
            "execute", command="true", branch="left"
        )

    play(script, backend)


def test_a_diff_names_the_files_that_changed(play: Callable[..., None], backend: str) -> None:
    async def script(agent: Agent) -> None:
        await agent.says("cd; mkdir -p d/e; for name in kept changed moded deleted touched; do echo 1 > d/$name; done")
        await agent("snapshot", name="start")
        await agent.says(r"cd d; echo 2 > changed; chmod 700 moded; rm deleted; touch touched; echo 1 > $'new\xff'")
        found = await agent("diff", since="start")
        assert found["written"] == ["/root/d/changed", "/root/d/moded", "/root/d/new\\xff"]
        assert found["gone"] == ["/root/d/deleted"]
        await agent("snapshot", name="later")
        assert await agent("diff", since="start", of="later") == {**found, "after": "later"}
        back = await agent("diff", since="later", of="start")
        assert (back["written"], back["gone"]) == (
            ["/root/d/changed", "/root/d/deleted", "/root/d/moded"],
            ["/root/d/new\\xff"],
        )
        assert (await agent("diff", since="later"))["written"] == []
        await agent.says("mkdir many; cd many; touch $(seq 500)")
        found = await agent("diff", since="later")
        assert len(found["written"]) == 200 and found["written_omitted"] == 300

    play(script, backend)


def test_files_are_read_and_written(play: Callable[..., None]) -> None:
    check("overlay")

    async def script(agent: Agent) -> None:
        assert (await agent("write_file", path="/root/a/b", text="é\n"))["bytes"] == 3
        assert (await agent("read_file", path="/root/a/b"))["text"] == "é\n"
        await agent.says(r"printf 'a\xff' > /root/bytes; head -c 300000 /dev/zero > /root/large")
        assert await agent("read_file", path="/root/bytes") == {
            "branch": "main",
            "path": "/root/bytes",
            "text": "a\\xff",
            "exact": False,
        }
        assert "at most 262,144 bytes are read" in await agent.refused("read_file", path="/root/large")
        assert "No such file" in await agent.refused("read_file", path="/root/none")
        assert "absolute path" in await agent.refused("write_file", path="root", text="")

    play(script, "overlay")


def test_what_a_snapshot_loses_is_told(play: Callable[..., None], backend: str) -> None:
    async def script(agent: Agent) -> None:
        await agent.says("sleep 61.5 &")
        assert (await agent("snapshot"))["lost"] == ["background: sleep 61.5"]

    play(script, backend)


def test_a_refused_call_is_an_error_in_words(play: Callable[..., str]) -> None:
    check("overlay")

    async def script(agent: Agent) -> None:
        for tool, arguments, said in [
            ("sing", {}, "expected a tool (execute, "),
            ("execute", {}, "missing: command"),
            ("execute", {"command": "true", "brunch": "main"}, "found 'brunch'"),
            ("execute", {"command": 3}, "command: expected a value of type string, found 3"),
            ("execute", {"command": "x" * 5_000_000}, "command: expected at most 200000 characters"),
            ("execute", {"command": "true", "branch": "b" * 1_000_000}, "branch: expected a name"),
            ("execute", {"command": "true", "branch": "main\n"}, "expected a branch (main)"),
            ("execute", {"command": "true", "timeout": 1e9}, "timeout: expected at most 20"),
            ("execute", {"command": "true", "timeout": -1}, "timeout: expected at least 0.1"),
            ("execute", {"command": "true", **{f"no{number}": 1 for number in range(100_000)}}, "no arguments but"),
            ("snapshot", {"name": "../../etc"}, "name: expected a name"),
            ("snapshot", {"name": "main"}, "the name 'main' is taken"),
            ("snapshot", {"branch": "other"}, "expected a branch (main), found 'other'"),
            ("restore", {"snapshot": "s9"}, "expected a snapshot (none yet), found 's9'"),
            ("restore", {"snapshot": "main"}, "expected a snapshot (none yet), found 'main'"),
            ("fork", {"into": []}, "into: expected at least 1 items"),
            ("fork", {"into": ["a", "a"]}, "found 'a' twice"),
            ("fork", {"into": ["a", "main"]}, "the name 'main' is taken"),
            ("fork", {"into": ["a", "b", "c", "d"]}, "at most 4 are kept"),
            ("fork", {"into": ["a"], "source": "nowhere"}, "found 'nowhere'"),
            ("diff", {"since": "main"}, "expected a snapshot"),
            ("discard", {"names": ["main"]}, "cannot be discarded"),
            ("discard", {"names": ["x"]}, "found 'x'"),
            ("write_file", {"path": "/x", "text": "é" * 200_000}, "expected at most 262,144 bytes"),
        ]:
            message = await agent.refused(tool, **arguments)
            assert said in message and len(message) < 500
        assert [one["name"] for one in (await agent("list"))["branches"]] == ["main"]
        for _ in range(2):
            await agent("snapshot")
        assert "at most 2 are kept" in await agent.refused("snapshot")
        assert (await agent("fork", into=["a", "b", "c"]))["branches"] == ["a", "b", "c"]
        assert "at most 4 are kept" in await agent.refused("fork", into=["d"], source="s1")
        assert await agent.says("echo still here") == "still here\n"

    logged = play(script, "overlay", "--branches", "4", "--snapshots", "2", "--timeout", "20")
    assert logged.count("refused the client: a call: ") == 1, logged


@pytest.mark.slow
def test_commands_are_bounded_in_time_and_output(play: Callable[..., None], backend: str) -> None:
    async def script(agent: Agent) -> None:
        slow = await agent("execute", command="sleep 60", timeout=0.3)
        assert slow["timed_out"] and slow["exit_code"] == 124
        long = await agent("execute", command="seq 100000")
        assert len(long["output"]) < 31_000 and long["omitted_bytes"] > 500_000
        assert (await agent("execute", command="exit 3"))["shell_replaced"]
        assert (await agent("execute", command="kill -9 $$"))["exit_code"] == 137
        assert await agent.says("echo still here") == "still here\n"

    play(script, backend)


@pytest.mark.slow
def test_calls_on_one_branch_wait_for_each_other_and_not_for_other_branches(play: Callable[..., None]) -> None:
    check("overlay")

    async def script(agent: Agent) -> None:
        await agent("fork", into=["other"])
        calls = [agent.says(f"sleep 0.05; echo {number} >> /root/log; cat /root/log") for number in range(10)]
        assert (await asyncio.gather(*calls))[-1] == "".join(f"{number}\n" for number in range(10))
        slow = [
            asyncio.create_task(agent.client.call_tool("execute", {"command": "sleep 100", "branch": "other"}))
            for _ in range(20)
        ]
        refused = [(await call).content[0].text for call in slow[16:]]
        assert all("'other' is busy: 16 calls" in text for text in refused)
        assert await agent.says("echo quick") == "quick\n"
        assert not any(call.done() for call in slow[:16])
        await agent("discard", names=["other"])
        ended = [await call for call in slow[:16]]
        assert all(call.is_error for call in ended)
        assert "discarded before the call had its turn" in ended[-1].content[0].text
        assert (await agent("fork", into=["other"]))["branches"] == ["other"]

    play(script, "overlay")


def test_every_tool_is_described(play: Callable[..., None]) -> None:
    async def script(agent: Agent) -> None:
        tools = {tool.name: tool for tool in (await agent.client.list_tools()).tools}
        assert set(tools) == {
            *("execute", "snapshot", "restore", "fork", "diff", "list", "discard", "read_file", "write_file")
        }
        for tool in tools.values():
            assert len(tool.description) > 40
            assert tool.input_schema["additionalProperties"] is False and tool.output_schema["required"]
        assert tools["execute"].input_schema["properties"]["timeout"]["maximum"] == 120

    play(script, "copy")


@pytest.mark.slow
def test_the_program_of_the_page_prints_what_differs(
    library: Any, environment: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check("overlay")
    page = (ROOT / "docs" / "mcp.md").read_text(encoding="utf-8")
    block = page.partition("```python { .no-run }\n")[2].partition("```")[0]
    there = 'command="sandboxgym", args=["serve", "mcp"]'
    assert there in block and "from mcp import Client" in block
    program, *arguments = command("overlay")
    here = f"command={program!r}, args={arguments!r}, env={environment!r}, cwd={str(tmp_path)!r}"
    source = "async def main():\n" + "".join(f"    {line}\n" for line in block.replace(there, here).splitlines())
    names: dict[str, Any] = {}
    exec(source, names)
    asyncio.run(asyncio.wait_for(names["main"](), 300))
    assert capsys.readouterr().out == "['/root/notes']\n"


class Line:
    """A client that writes lines itself: what it sends, and when it goes, is up to the test."""

    def __init__(self, backend: str, environment: dict[str, str], folder: Path, *options: str) -> None:
        self.process = subprocess.Popen(
            command(backend, *options),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **environment},
            cwd=folder,
        )
        self.answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.ask(
            "initialize",
            protocolVersion="2025-06-18",
            capabilities={},
            clientInfo={"name": "line", "version": "1"},
        )
        assert self.answer()["result"]["serverInfo"]["name"] == "sandboxgym"
        self.send(json.dumps({"jsonrpc": "2.0", "method": "notifications/initialized"}).encode())

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.answers.put(json.loads(line))
        self.answers.put(None)

    def send(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def ask(self, method: str, number: int = 1, **params: Any) -> None:
        self.send(json.dumps({"jsonrpc": "2.0", "id": number, "method": method, "params": params}).encode())

    def execute(self, text: str, number: int = 1) -> None:
        self.ask("tools/call", number, name="execute", arguments={"command": text})

    def answer(self) -> dict[str, Any]:
        """The next answer to a request."""
        while True:
            found = self.answers.get(timeout=60)
            assert found is not None, self.process.stderr and self.process.stderr.read().decode()
            if "id" in found and found["id"] is not None:
                return found


@pytest.fixture
def line(library: Any, environment: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., Line]]:
    made: list[Line] = []

    def make(backend: str, *options: str) -> Line:
        made.append(Line(backend, environment, tmp_path, *options))
        return made[-1]

    yield make
    for one in made:
        one.process.kill()
        one.process.wait()


def running(text: str) -> bool:
    """True if a process has this in its command line."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in path.read_bytes().replace(b"\0", b" "):
                return True
        except OSError:
            continue
    return False


def until(condition: Callable[[], bool], seconds: float = 300) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "terminated", "interrupted", "client gone"])
def test_nothing_is_left_of_a_server_that_ends_in_the_middle(
    line: Callable[..., Line], environment: dict[str, str], backend: str, how: str, tmp_path: Path
) -> None:
    client = line(backend, "--timeout", "600")
    sleep = f"sleep 600.{os.getpid()}{len(how)}"
    client.ask("tools/call", 2, name="snapshot", arguments={})
    client.ask("tools/call", 3, name="fork", arguments={"into": ["other"]})
    assert {client.answer()["id"], client.answer()["id"]} == {2, 3}
    client.execute(f"{sleep} & {sleep}", 4)
    assert until(lambda: running(sleep))
    assert leftovers(tmp_path / "runtime")
    if how == "client gone":
        assert client.process.stdin is not None
        client.process.stdin.close()
    else:
        signals = {"killed": signal.SIGKILL, "terminated": signal.SIGTERM, "interrupted": signal.SIGINT}
        client.process.send_signal(signals[how])
    statuses = {"killed": -9, "terminated": 143, "interrupted": 130, "client gone": 0}
    assert client.process.wait(timeout=300) == statuses[how]
    if (backend, how) != ("copy", "killed"):  # there a hangup ends most, and the next owner the rest
        assert until(lambda: not running(sleep))
    if how == "killed":  # the next start clears what is left, and so does this
        clear = [sys.executable, "-m", "sandboxgym", "gc"]
        subprocess.run(clear, env={**os.environ, **environment}, cwd=tmp_path, check=True, capture_output=True)
    assert until(lambda: not running(sleep))
    assert not leftovers(tmp_path / "runtime")


def leftovers(runtime: Path) -> list[str]:
    """Run directories: of a server that runs, or that left them behind."""
    return [path.name for path in runtime.iterdir() if path.is_dir()]


def test_a_server_survives_what_is_no_request(line: Callable[..., Line]) -> None:
    check("overlay")
    client = line("overlay")
    for junk in (
        b"",
        b"null",
        b"not json",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"jsonrpc": "2.0", "id": 7}',
        b'{"jsonrpc": "2.0", "id": 8, "method": "tools/call", "params": {"name": "execute", "arguments": [1]}}',
        b'{"jsonrpc": "2.0", "id": 9, "method": "tools/call", "params": 3}',
        rb'{"jsonrpc": "2.0", "id": 10, "method": "tools/call", "params": {"name": "execute", "arguments": '
        rb'{"command": "echo \ud800"}}}',
        b'{"jsonrpc": "2.0", "id": 11, "method": "tools/call", "params": {"name": "execute", "arguments": '
        b'{"command": "true", "timeout": NaN}}}',
        b'{"jsonrpc": "2.0", "id": 12, "method": "no/such"}',
    ):
        client.send(junk)
    client.execute("echo still here", 99)
    while (found := client.answer())["id"] != 99:
        assert "error" in found or found["result"]["isError"], found
    assert found["result"]["structuredContent"]["output"] == "still here\n"


def test_a_cancelled_call_that_waits_never_runs(line: Callable[..., Line]) -> None:
    check("overlay")
    client = line("overlay")
    client.execute("sleep 3", 2)
    client.execute("echo no > /root/no", 3)
    cancel = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 3}}
    client.send(json.dumps(cancel).encode())
    client.execute("ls /root", 4)
    while (found := client.answer())["id"] != 4:
        pass
    assert found["result"]["structuredContent"]["output"] == ""


@pytest.mark.slow
def test_http_serves_this_machine_and_no_web_site(library: Any, environment: dict[str, str], tmp_path: Path) -> None:
    check("overlay")
    import urllib.error
    import urllib.request

    server = subprocess.Popen(
        command("overlay", "--http", "0"),
        stdout=subprocess.PIPE,
        stderr=(tmp_path / "log").open("w"),
        env={**os.environ, **environment},
        cwd=tmp_path,
    )
    try:
        assert server.stdout is not None
        words = server.stdout.readline().decode().split()
        url = next(word for word in words if word.startswith("http://127.0.0.1:"))

        async def main() -> None:
            async with library.Client(url) as client:
                assert await Agent(client).says("echo hello > /root/a; cat /root/a") == "hello\n"
            async with library.Client(url) as client:  # the branches are the server's
                assert await Agent(client).says("cat /root/a") == "hello\n"

        asyncio.run(asyncio.wait_for(main(), 300))
        request = urllib.request.Request(url, b"{}", {"Host": "evil.example", "Content-Type": "application/json"})
        with pytest.raises(urllib.error.HTTPError, match="421"):
            urllib.request.urlopen(request, timeout=60)
        request = urllib.request.Request(
            url, b"{}", {"Origin": "http://evil.example", "Content-Type": "application/json"}
        )
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(request, timeout=60)
        half_closed(url)

        async def beside() -> None:
            async with library.Client(url) as client:
                assert await Agent(client).says("echo alive") == "alive\n"
                assert "found 'x'" in await Agent(client).refused("discard", names=["x"])

        asyncio.run(asyncio.wait_for(beside(), 300))

        async def in_the_middle() -> None:
            async with library.Client(url) as client:
                call = asyncio.create_task(Agent(client).refused("execute", command=f"sleep 600.{os.getpid()}"))
                while not running(f"sleep 600.{os.getpid()}"):
                    await asyncio.sleep(0.05)
                server.send_signal(signal.SIGINT)
                assert await call == "the server ends, and with it the call"

        asyncio.run(asyncio.wait_for(in_the_middle(), 300))
        assert server.wait(300) == 0
    finally:
        server.kill()
        server.wait()
    assert not leftovers(tmp_path / "runtime") and not running(f"sleep 600.{os.getpid()}")
    logged = (tmp_path / "log").read_text()
    assert "Traceback" not in logged, logged
    for said in ("status 421: ", "status 403: ", "a call: "):
        assert logged.count(f"refused 127.0.0.1: {said}") == 1, logged


def half_closed(url: str) -> None:
    """Connections of clients that say no more, and then go: in the middle of a request, of a call, of a stream."""
    import socket
    from urllib.parse import urlsplit

    ask = {"jsonrpc": "2.0", "id": 1, "method": "tools/call"}
    sleep = {"name": "execute", "arguments": {"command": f"sleep 600.{os.getpid()}", "timeout": 1}}
    body = json.dumps({**ask, "params": sleep}).encode()
    open_ones = []
    for method, sent, length in (
        ("POST", b"", 100),
        ("POST", body[:20], len(body)),
        ("POST", body, len(body)),
        ("POST", body, len(body) + 5),
        ("GET", b"", 0),
    ):
        one = socket.create_connection(("127.0.0.1", urlsplit(url).port))
        accepts = "Accept: application/json, text/event-stream\r\nContent-Type: application/json\r\n"
        head = f"{method} {urlsplit(url).path} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n{accepts}"
        one.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode() + sent)
        one.shutdown(socket.SHUT_WR)
        open_ones.append((one, length > len(sent)))
    for one, cut in open_ones:
        one.settimeout(60)
        said = b""
        with contextlib.suppress(ConnectionError):
            while some := one.recv(65536):  # until the other end has closed it, too
                said += some
        one.close()
        if cut:
            head, _, content = said.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400 ") and json.loads(content)["error"]["data"] == {"status": 400}, said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--backend", "none"], "expected a backend of auto"),
        (["--backend", "copy"], "allow_unsafe"),
        (["--backend", "copy", "--allow-unsafe", "--http", "0"], "expected a backend that isolates for --http"),
        (["--rootfs", "/nowhere"], "/nowhere"),
        (["--timeout", "0"], "Limits.seconds"),
        (["--http", "70000"], "127.0.0.1:70000"),
    ],
)
def test_what_cannot_be_served_is_a_sentence(
    library: Any, environment: dict[str, str], tmp_path: Path, options: list[str], said: str
) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "sandboxgym", "serve", "mcp", *options],
        env={**os.environ, **environment},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    message = result.stderr.splitlines()[-1]
    assert result.returncode == 1 and message.startswith("sandboxgym serve: ") and said in message
    assert "Traceback" not in result.stderr and not result.stdout


def test_without_the_library_the_command_says_what_to_install(tmp_path: Path) -> None:
    code = "import sys; sys.modules['mcp'] = None; from sandboxgym.cli import main; sys.exit(main(['serve', 'mcp']))"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "sandboxgym serve: needs mcp 2.0 or newer: pip install 'sandboxgym[mcp]'\n"
