"""After the time limit all processes that a command started are gone, and no others."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from components import missing
from sandbox.docker_image import docker_image  # noqa: F401 - fixture
from sandbox.sandboxes import check

from sandboxgym.sandbox.base import ProcessInfo, Result
from sandboxgym.sandbox.overlay.backend import OverlayBackend
from sandboxgym.sandbox.sandbox import Sandbox, make_sandbox
from sandboxgym.sandbox.shell.aftermath import Moment, birth_of, end_started, started_since
from sandboxgym.sandbox.shell.exec import Stop

# fixtures of another module are arguments of the tests below

CHAIN = """
import os, time
while True:
    if os.fork():
        os._exit(0)
    os.setsid()
    time.sleep(0.0003)
"""
"""Each process lives for a moment, in a session of its own, and its parent is gone."""
FLIGHT = f"""
cat > /tmp/chain.py <<'END'{CHAIN}END
python3 -S -E /tmp/chain.py &
(setsid sleep 7771 &)
setsid sleep 7772 &
while :; do sleep 7773; done &
sleep 7774 & kill -STOP $!
bash -c 'trap "" INT TERM HUP; while :; do sleep 7775; done' &
python3 -S -E -c 'import ctypes, threading, time
threading.Thread(target=time.sleep, args=(7776,)).start()
ctypes.CDLL(None).pthread_exit(0)' &
sleep 0.2
sleep 7777
"""
"""A chain, an orphan, a daemon, loops, one that is stopped, one that ignores signals, one without its first thread."""


@pytest.fixture(scope="module", params=["overlay", "overlay without a freezer", "overlay-rootless", "docker"])
def box(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """A sandbox with two background jobs, one of which has lost its parents."""
    kind, _, without = request.param.partition(" without ")
    check(kind)
    rootfs = f"docker:{request.getfixturevalue('docker_image')}" if kind == "docker" else "host"
    with make_sandbox(kind, rootfs=rootfs) as sandbox:
        if sandbox.run("command -v python3 setsid >/dev/null").exit_code:
            missing("overlay", "there is no python3 or setsid in the sandbox")
        sandbox.execute("while :; do sleep 0.05; done & looping=$!; (setsid sleep 8888 &); sleep 0.1")
        if without:
            assert isinstance(sandbox.backend, OverlayBackend) and sandbox.backend.container is not None
            sandbox.backend.container.group, kept = None, sandbox.backend.container.group
        yield sandbox
        if without:
            sandbox.backend.container.group = kept  # type: ignore[attr-defined]


def left(sandbox: Sandbox) -> set[str]:
    """Command lines of all that runs and was not there before; looked for again and again, as they may be short."""
    found: set[str] = set()
    # For a moment, what is about to be another program, or has just ended; for longer, what has lost its first thread.
    nameless: Counter[int] = Counter()
    for _ in range(20):
        infos = sandbox.backend.processes()
        found |= {info.command for info in infos if " " in info.command}
        nameless.update(info.pid for info in infos if " " not in info.command)
        time.sleep(0.002)
    found |= {f"nameless {pid}" for pid, times in nameless.items() if times > 10}
    mine = ("bash --norc --noprofile --noediting -i", "sleep 0.05", "sleep 8888")
    return {command for command in found if command not in mine}


def attempt(sandbox: Sandbox, way: str) -> Result:
    if way == "execute":
        return sandbox.execute(FLIGHT, timeout=0.6)
    if way == "run":
        return sandbox.run(FLIGHT, timeout=0.6)
    if way == "stop":
        stop = Stop()
        threading.Timer(0.6, stop.set).start()
        return sandbox.run(FLIGHT, timeout=600, stop=stop)
    assert sandbox.interact(FLIGHT, timeout=0.6).running
    return sandbox.interrupt()


@pytest.mark.parametrize("way", ["execute", "run", "stop", "interact"])
def test_nothing_that_a_command_started_outlives_its_limit(box: Sandbox, way: str) -> None:
    for _ in range(2):
        assert attempt(box, way).timed_out
        assert left(box) == set()
    assert box.execute("kill -0 $looping").exit_code == 0, "an earlier job was killed"
    assert any(info.command == "sleep 8888" for info in box.backend.processes()), "an earlier job was killed"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["execute", "run", "interact"])
def test_many_chains_leave_nothing(box: Sandbox, way: str) -> None:
    survivors = 0
    for _ in range(30 if way == "execute" else 10):
        assert attempt(box, way).timed_out
        survivors += bool(left(box))
    assert survivors == 0
    assert any(info.command == "sleep 8888" for info in box.backend.processes()), "an earlier job was killed"


def test_a_command_whose_end_was_asked_for_before_is_killed_at_once(box: Sandbox) -> None:
    stop = Stop()
    stop.set()
    stop.set()
    assert box.run("sleep 7777", timeout=600, stop=stop).timed_out
    assert box.run("echo x", stop=Stop()).output == "x\n"


def test_nothing_runs_while_a_sandbox_is_paused(box: Sandbox) -> None:
    box.execute("(while :; do echo x >> /tmp/ticks; done) & ticking=$!; until [ -s /tmp/ticks ]; do sleep 0.01; done")
    try:
        with box.backend.paused():
            time.sleep(0.05)  # what was written before may only show now
            before = box.backend.processes()
            size = None if box.backend.capabilities.name == "docker" else len(box.read_file("/tmp/ticks"))
            time.sleep(0.1)
            assert {info.pid for info in box.backend.processes()} == {info.pid for info in before}
            assert size is None or len(box.read_file("/tmp/ticks")) == size
    finally:
        box.execute("kill $ticking; wait $ticking; rm /tmp/ticks")
    assert box.execute("echo goes on").output == "goes on\n"


def test_what_is_older_is_spared_with_all_that_descends_from_it() -> None:
    me, since = os.getpid(), Moment.now()
    new = ProcessInfo(2**22 + 1, me, "child of an older one")
    grandchild = ProcessInfo(2**22 + 3, 2**22 + 1, "grandchild")
    orphan = ProcessInfo(2**22 + 2, 1, "orphan")
    infos = [grandchild, ProcessInfo(me, 1, "older"), new, orphan]
    assert started_since(infos, Moment(since.ticks + 1), older={}, shell=None).keys() == {orphan.pid}
    assert started_since(infos, since, older={}, shell=me).keys() == {new.pid, grandchild.pid, orphan.pid}


def test_a_process_is_told_from_another_of_its_number() -> None:
    me = os.getpid()
    infos = [ProcessInfo(me, 1, "new")]
    assert not started_since(infos, Moment(0), older={me: birth_of(me)}, shell=None)
    assert started_since(infos, Moment(0), older={me: "1"}, shell=None).keys() == {me}


def test_a_sandbox_that_is_gone_has_nothing_to_end() -> None:
    check("overlay")
    with make_sandbox("overlay") as sandbox:
        since = Moment.now()
        sandbox.start()
        sandbox.backend.close()
        end_started(sandbox.backend, since)


def test_output_is_not_read_for_longer_than_the_command_lives() -> None:
    check("overlay")
    with make_sandbox("overlay") as sandbox:
        began = time.monotonic()
        result = sandbox.run("setsid yes & sleep 0.2", timeout=300)
        assert not result.timed_out and time.monotonic() - began < 150
