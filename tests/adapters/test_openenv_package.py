"""OpenEnv's own package, and verifiers, as clients and server: each in an environment of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from chat_stub import chat_stub
from components import missing
from page_blocks import block, replaced
from served_openenv import (  # noqa: F401 - fixtures
    Server,
    arguments,
    env,
    packages,
    refused,
    server,
)

from sandboxgym.adapters.openenv import Client, ServerError

# ruff: noqa: F811


# OpenEnv's own package, in an environment of its own: SANDBOXGYM_OPENENV names its python.


@pytest.fixture(scope="module")
def python() -> str:
    found = os.environ.get("SANDBOXGYM_OPENENV") or (sys.executable if importlib.util.find_spec("openenv") else None)
    if found is None:
        missing("openenv", "the package openenv is not installed, and SANDBOXGYM_OPENENV names no python that has it")
    return found


def theirs(python: str, program: str, *arguments: str) -> str:
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [python, "-c", program, *arguments], capture_output=True, text=True, timeout=240, env=outside, cwd="/"
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


def test_openenv_validates_the_server(server: Server, python: str) -> None:
    program = "import sys; from openenv.cli.__main__ import main; sys.argv[0] = 'openenv'; main()"
    report = json.loads(theirs(python, program, "validate", "--url", server.url, "--json"))
    assert report["passed"] and report["summary"]["passed_count"] == report["summary"]["total_count"] == 6
    assert report["mode"] == "simulation" and report["standard_profile"] == "openenv-http/1.x"


THEIR_CLIENT = """
import sys
from openenv.core import GenericEnvClient
from openenv.core.env_server.types import *

with GenericEnvClient(base_url=sys.argv[1]).sync() as env:
    result = env.reset(seed=0, task=0, episode_id="theirs")
    assert result.observation["observation"].startswith("task 0") and result.reward is None and not result.done
    result = env.step({"action": "one"})
    assert result.reward == 1.0 and result.observation["info"]["said"] == ["one"]
    assert env.step({"action": "end"}).done
    assert env.state()["episode_id"] == "theirs" and env.state()["step_count"] == 2
    State.model_validate(env.state())
    for wrong in ({"message": "x"}, {"action": 3}):
        try:
            env.step(wrong)
        except RuntimeError as error:
            assert "VALIDATION_ERROR" in str(error), error
        else:
            raise AssertionError(wrong)
"""


def test_the_client_of_openenv_plays_an_episode(server: Server, python: str) -> None:
    theirs(python, THEIR_CLIENT, server.url)
    server.wait_for_live(0)


THEIR_TOOLS = """
import asyncio, sys
from openenv.core.mcp_client import MCPToolClient

async def main():
    async with MCPToolClient(base_url=sys.argv[1], mode="production") as env:
        names = {tool.name for tool in await env.list_tools()}
        assert names == {"begin", "act", "snapshot", "restore", "fork", "discard"}, names
        first = await env.call_tool("begin", task=1, seed=0)
        assert first["observation"]["info"]["task_id"] == "task 1"
        kept = await env.call_tool("snapshot")
        told = await env.call_tool("act", action="one")
        assert told["observation"]["info"]["said"] == ["one"], told
        assert await env.call_tool("restore", snapshot=kept["snapshot"]) == first
        assert await env.call_tool("act", action="one") == told

asyncio.run(main())
"""


def test_the_tool_client_of_openenv_undoes_a_step(server: Server, python: str) -> None:
    theirs(python, THEIR_TOOLS, server.url)
    server.wait_for_live(0)


# Verifiers, whose taskset `openenv` plays on any such server: SANDBOXGYM_VERIFIERS names a python that has it.


def test_verifiers_rolls_out_the_episodes_of_the_page(server: Server, tmp_path: Path) -> None:
    chosen = os.environ.get("SANDBOXGYM_VERIFIERS")
    if chosen is None:
        missing("verifiers", "SANDBOXGYM_VERIFIERS names no python with verifiers[openenv] and uv")

    def answer(request: dict[str, Any]) -> bytes:
        turn = sum(message["role"] == "assistant" for message in request["messages"])
        parts = [({"role": "assistant", "content": ("one", "two", "end")[min(turn, 2)]}, None), ({}, "stop")]
        head = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "stub"}
        chunks = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": end}]} for delta, end in parts]
        body = "".join(f"data: {text}\n\n" for text in [*map(json.dumps, chunks), "[DONE]"])
        return f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n{body}".encode()

    with chat_stub(answer) as stub:
        urls = ("http://127.0.0.1:8000", server.url), ("http://127.0.0.1:9000/v1", stub.url)
        (tmp_path / "eval.toml").write_text(replaced(block("adapters.md", "toml", '"openenv"'), *urls))
        folder = str(Path(chosen).parent)
        env = {**os.environ, "OPENAI_API_KEY": "none", "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
        env.pop("PYTHONPATH", None)
        command = [f"{folder}/vf-eval", "@", "eval.toml", "-o", "out"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=280, env=env, cwd=tmp_path)
    (traces,) = tmp_path.rglob("traces.jsonl")
    episodes = [json.loads(line) for line in traces.read_text().splitlines()]
    assert result.returncode == 0 and [one["ok"] for one in episodes] == [True] * 2, (
        result.stdout[-2000:] + traces.read_text()[:3000]
    )
    assert "openenv_reward 3.00" in result.stdout
    first = [sent["messages"][-1]["content"] for sent in stub.requests if len(sent["messages"]) < 3]
    assert sorted(re.findall(r"task \d, draw", " ".join(first))) == ["task 0, draw", "task 1, draw"]
    server.wait_for_live(0)


THEIR_SERVER = """
import sys, uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app

class Say(Action):
    word: str

class Heard(Observation):
    words: list[str] = []

class Echo(Environment):
    def __init__(self):
        super().__init__()
        self.words = []

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.words = []
        return Heard()

    def step(self, action, timeout_s=None, **kwargs):
        self.words.append(action.word)
        return Heard(words=self.words, reward=1.0, done=action.word == "end", metadata={"n": len(self.words)})

    @property
    def state(self):
        return State(episode_id="e", step_count=len(self.words))

uvicorn.run(create_app(Echo, Say, Heard), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""


def test_our_client_plays_on_a_server_of_openenv(python: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen([python, "-c", THEIR_SERVER, str(port)], env=outside, cwd="/")
    try:
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + 300
        while True:
            try:
                env = Client(url, timeout=30)
                break
            except ServerError:
                assert process.poll() is None and time.monotonic() < end
                time.sleep(0.2)
        with env:
            assert env.reset(seed=0).observation["words"] == []
            assert env.send({"word": "one"}).observation["words"] == ["one"]
            last = env.send({"word": "end"})
            assert last.done and last.reward == 1.0 and last.info == {"n": 2}
            assert env.state()["step_count"] == 2
            with refused("VALIDATION_ERROR", "Invalid message: "):
                env.step("one")
            with refused("UNKNOWN_TYPE", "snapshot"):
                env.snapshot()
    finally:
        process.terminate()
        process.wait(120)
