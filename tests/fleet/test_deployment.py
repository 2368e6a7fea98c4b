"""The script of docs/examples/fleet that starts nodes on machines of one's own: two of them on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from components import missing
from ports import free_port

ROOT = Path(__file__).parents[2]
FILES = ROOT / "docs" / "examples" / "fleet"
NODE = FILES / "node.sh"
LATER = {"RAY_prestart_worker_first_driver": "0"}
"""Nodes start no process before something is placed on them."""


def test_the_page_names_every_file() -> None:
    text = (ROOT / "docs" / "fleet.md").read_text(encoding="utf-8")
    assert {path.name for path in FILES.iterdir() if path.is_file()} == set(
        re.findall(r"examples/fleet/([\w.]+)\)", text)
    )


def told(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Output of the script of a node."""
    return subprocess.run(
        [str(NODE), *arguments], env={**os.environ, **variables}, capture_output=True, text=True, timeout=120
    )


def test_the_script_of_a_node_is_one() -> None:
    assert os.access(NODE, os.X_OK)
    assert subprocess.run(["bash", "-n", str(NODE)]).returncode == 0


@pytest.mark.parametrize("arguments", [[], ["stop"], ["head", "6379"], ["join"], ["join", "a:1", "b:1"]])
def test_wrong_usage_of_the_script_is_told(arguments: list[str]) -> None:
    done = told(*arguments)
    assert done.returncode == 2 and done.stderr.startswith("usage: node.sh head")


def test_what_a_node_lacks_is_one_sentence(tmp_path: Path) -> None:
    assert told("join", "head").stderr == "node.sh: expected HOST:PORT of the head, found head\n"
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "env"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    bare = told("head", PATH=str(tools))
    assert bare.returncode == 1
    assert bare.stderr == "node.sh: expected Ray on this machine: pip install 'sandboxgym[ray]'\n"
    (tools / "ray").write_text("#!/bin/sh\n")
    (tools / "python3").write_text("#!/bin/sh\nexit 1\n")
    for tool in ("ray", "python3"):
        (tools / tool).chmod(0o755)
    assert told("head", PATH=str(tools)).stderr.startswith("node.sh: expected sandboxgym on this machine")
    (tools / "python3").write_text("#!/bin/sh\n")
    lonely = told("join", "head:6379", PATH=str(tools), HOME=str(tmp_path), RAY_AUTH_TOKEN="", RAY_AUTH_TOKEN_PATH="")
    assert lonely.returncode == 1
    assert lonely.stderr.startswith(f"node.sh: expected the head's token in {tmp_path}/.ray/auth_token")


def in_home(home: str) -> dict[int, str]:
    """Processes with this home directory, by id."""
    found = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            with contextlib.suppress(OSError):
                if f"HOME={home}".encode() in (process / "environ").read_bytes().split(b"\0"):
                    found[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")
    return found


@pytest.fixture
def home() -> Iterator[str]:
    made = tempfile.mkdtemp(prefix="fleet-", dir="/tmp")  # Ray has sockets in it, whose paths must be short
    yield made
    for process in in_home(made):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    shutil.rmtree(made, ignore_errors=True)


@contextlib.contextmanager
def node(variables: Mapping[str, str], *arguments: str, host: Sequence[str] = ()) -> Iterator[None]:
    """A node that runs as the script starts it, behind the command of a host, and is ended by SIGTERM.

    It says that it runs before anybody asks: `sandboxgym fleet status` takes seconds of a processor.
    """
    with tempfile.TemporaryFile() as said:
        running = subprocess.Popen([*host, str(NODE), *arguments], env=dict(variables), stdout=said, stderr=said)
        try:
            await_true(
                lambda: b"Ray runtime started" in os.pread(said.fileno(), 1 << 20, 0) or running.poll() is not None
            )
            yield
        finally:
            running.terminate()
            running.wait(300)
            print(os.pread(said.fileno(), 9999, 0).decode(errors="replace"))  # shown if the test fails


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_two_nodes_started_by_the_script_hold_a_rollout_and_leave_nothing(home: str) -> None:
    try:
        import ray  # noqa: F401
    except ModuleNotFoundError:
        missing("ray", "Ray is not installed")
    address = f"127.0.0.1:{free_port()}"
    removed = ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE")
    variables = {name: value for name, value in os.environ.items() if name not in removed}
    variables |= {"HOME": home, "RAY_TMPDIR": f"{home}/ray", "PYTHONPATH": str(ROOT), "NODE_IP": "127.0.0.1", **LATER}
    variables["PATH"] = f"{Path(sys.executable).parent}:{variables['PATH']}"
    client = {**variables, "RAY_AUTH_MODE": "token", "RAY_ADDRESS": address}

    def output(*command: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command], env={**client, **more}, capture_output=True, text=True, timeout=200
        )

    def state() -> dict[str, Any] | None:
        done = output("-m", "sandboxgym", "fleet", "status", "--json")
        return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None

    with node({**variables, "PORT": address.partition(":")[2]}, "head"):
        await_true(lambda: state() is not None)
        assert Path(home, ".ray", "auth_token").stat().st_mode & 0o077 == 0
        with node({**variables, "CPUS": "4", "SANDBOXES": "8"}, "join", address):
            await_true(lambda: len((state() or {"nodes": []})["nodes"]) == 2)
            found = state()
            assert found is not None
            head, worker = found["nodes"]
            assert (head["head"], head["cores"], worker["cores"]) == (True, 0, 4)
            assert worker["resources"] == {"sandbox": 8}
            played = output(str(FILES / "rollout.py"))
            assert played.returncode == 0, played.stderr[-2000:]
            assert re.search(r"^\d+ paths on 1 nodes, the same as in this process$", played.stdout, re.M)
            stranger = output("-m", "sandboxgym", "fleet", "status", RAY_AUTH_TOKEN="x" * 64)
            assert stranger.returncode == 1 and "expected a Ray cluster at" in stranger.stderr
            ended = state()
            assert ended is not None and not ended["owners"]
        watching = subprocess.Popen(
            [sys.executable, "-m", "sandboxgym", "fleet", "status", "--watch", "1"],
            env=client,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert watching.stdout is not None and watching.stdout.readline()
    _, said = watching.communicate(timeout=50)  # Ray itself would end it after a minute
    assert watching.returncode == 1
    assert re.fullmatch(rf"sandboxgym fleet: the Ray cluster at {address} does not answer any more: .*\n", said)
    await_true(lambda: not in_home(home))


PLAY = """
import sys, time
from pathlib import Path
import rollout as example
from sandboxgym.workers.fleet import RayEnvs
asked, nodes, policy = [], [], example.policy
def patient(contexts):
    asked.append(0)
    if len(asked) == 3:  # every path is under way
        nodes.append(sorted({envs._worker(place).node for place in envs._present() if envs._taken[place]}))
        Path("under_way").touch()
        while not Path("cut").exists():
            time.sleep(0.05)
    return policy(contexts)
example.policy = patient
with RayEnvs("sandboxgym/ALFWorld-v0", 4, timeout=10, create_timeout=300, max_episode_steps=20) as envs:
    while len({envs._worker(place).node for place in envs._targets()}) < 2:
        envs._running()
        time.sleep(0.1)
    there = example.grown(envs)
    nodes.append({shared.worker.node for shared in envs._slots} - {None})
example.policy = policy
with example.Envs(lambda: example.gym.make("sandboxgym/ALFWorld-v0", max_episode_steps=20)) as envs:
    print(*map(len, nodes), example.rewards(there) == example.rewards(example.grown(envs)))
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)  # beside four busy loops it takes nine minutes
@pytest.mark.xdist_group("ray")
def test_a_host_that_loses_its_network_is_replaced_and_the_trees_are_the_same(home: str) -> None:
    try:
        import ray  # noqa: F401
    except ModuleNotFoundError:
        missing("ray", "Ray is not installed")
    address = "10.213.7.1:6379"
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    variables |= {"HOME": home, "RAY_TMPDIR": f"{home}/ray", "PYTHONPATH": f"{ROOT}{os.pathsep}{FILES}", "CPUS": "2"}
    variables |= {**LATER, "RAY_AUTH_MODE": "token", "PATH": f"{Path(sys.executable).parent}:{variables['PATH']}"}
    with contextlib.ExitStack() as stack:
        head, first, second = stack.enter_context(hosts(3))
        stack.enter_context(node({**variables, "NODE_IP": "10.213.7.1", "CPUS": "0"}, "head", host=head))

        def nodes() -> int:
            command = [*head, sys.executable, "-m", "sandboxgym", "fleet", "status", "--json"]
            done = subprocess.run(
                command, env={**variables, "RAY_ADDRESS": address}, capture_output=True, text=True, timeout=200
            )
            found = [
                line for line in done.stdout.splitlines() if line.startswith("{")
            ]  # Ray has empty lines of its own
            return len(json.loads(found[-1])["nodes"]) if done.returncode == 0 else 0

        await_true(lambda: nodes() == 1)
        for number, host in ((2, first), (3, second)):
            own = {"NODE_IP": f"10.213.7.{number}"}
            stack.enter_context(node({**variables, **own}, "join", address, host=host))
            await_true(lambda number=number: nodes() == number)  # type: ignore[misc]  # at once they get in each other's way
        command = [*head, sys.executable, "-c", PLAY]
        with subprocess.Popen(
            command, cwd=home, env={**variables, "RAY_ADDRESS": address}, stdout=subprocess.PIPE, text=True
        ) as playing:
            await_true(lambda: Path(home, "under_way").exists() or playing.poll() is not None)
            subprocess.run([*second, "ip", "link", "set", "eth0", "down"], check=True)
            Path(home, "cut").touch()
            said, _ = playing.communicate(timeout=900)
        assert (playing.returncode, said) == (0, "2 1 True\n"), said
    await_true(lambda: not in_home(home))


@contextlib.contextmanager
def hosts(number: int) -> Iterator[list[list[str]]]:
    """Hosts with networks of their own, 10.213.7.1 and so on: for each, a command in front of those that run there.

    They are network namespaces, joined by a bridge in the first, and end with a process in each.
    """
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "nsenter"))):
        missing("namespaces", "hosts with networks of their own need root, ip, unshare and nsenter")
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(number):
            keeper = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
            stack.callback(keeper.wait)
            stack.callback(keeper.kill)
            own = os.readlink("/proc/self/ns/net")
            await_true(lambda keeper=keeper, own=own: os.readlink(f"/proc/{keeper.pid}/ns/net") != own)  # type: ignore[misc]
            found.append((keeper.pid, ["nsenter", f"--net=/proc/{keeper.pid}/ns/net"]))

        def ip(host: list[str], command: str) -> None:
            done = subprocess.run([*host, "ip", *command.split()], capture_output=True, text=True)
            if done.returncode != 0:
                missing("namespaces", f"ip {command}: {done.stderr.strip()}")

        bridge = found[0][1]
        ip(bridge, "link add eth0 type bridge")
        for place, (process, host) in enumerate(found):
            if place:
                ip(bridge, f"link add to{place} type veth peer name eth0 netns {process}")
                ip(bridge, f"link set to{place} master eth0 up")
            ip(host, f"address add 10.213.7.{place + 1}/24 dev eth0")
            ip(host, "link set eth0 up")
            ip(host, "link set lo up")
        yield [host for _, host in found]


def await_true(condition: Any, seconds: float = 400.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.5)
