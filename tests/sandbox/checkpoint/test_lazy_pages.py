"""Forks of large processes, whose memory is loaded page by page as they touch it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from components import missing
from full_sandboxes import REAP
from sandbox.overlay_boxes import python

from sandboxgym.sandbox.base import SandboxClosed
from sandboxgym.sandbox.checkpoint import criu
from sandboxgym.sandbox.checkpoint.restore import await_pages
from sandboxgym.sandbox.overlay.processes import readable
from sandboxgym.sandbox.sandbox import Sandbox, make_sandbox

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's"),
    pytest.mark.usefixtures("criu_found"),
]

LONG = 300.0
"""Seconds that anything may take on a busy machine."""
DIGEST = "hashlib.sha256(x).hexdigest()\n"

Maker = Callable[..., Sandbox]


@pytest.fixture(scope="module", autouse=True)
def _brings_pages(criu_found: None) -> None:
    program = criu.find()
    assert program is not None
    if not criu.brings_pages(program):
        missing("userfaultfd", criu.NO_PAGES)


@pytest.fixture
def make() -> Iterator[Maker]:
    """Makes sandboxes in which a Python holds so many MB, closed at the end."""
    made: list[Sandbox] = []

    def maker(size: int = 100, **arguments: Any) -> Sandbox:
        made.append(make_sandbox("overlay", snapshot="full", **arguments))
        typed(made[-1], "python3 -q -i")
        typed(made[-1], f"import hashlib, os; x = os.urandom({size} * 10**6)\n")
        return made[-1]

    yield maker
    for sandbox in made:
        sandbox.close()


@pytest.fixture
def fork() -> Iterator[Callable[[Sandbox], Sandbox]]:
    """A fork, started, with the rest of its memory still coming; closed at the end."""
    made: list[Sandbox] = []

    def forked(sandbox: Sandbox) -> Sandbox:
        made.extend(sandbox.fork(1, strict=True, start=True))
        return made[-1]

    yield forked
    for child in made:
        child.close()


Fork = Callable[[Sandbox], Sandbox]


def typed(sandbox: Sandbox, text: str) -> str:
    """Answer of a Python to a line that is typed to it."""
    answer = sandbox.interact(text, timeout=LONG, until=">>> $")
    assert answer.running, answer
    return answer.output


def box_of(sandbox: Sandbox) -> Any:
    backend: Any = sandbox.backend
    return backend.container


def bringers() -> set[int]:
    """The processes that bring memory to a box of this process."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().split(b"\0")
                parents = [parent_of(int(entry.name))]
            except OSError:
                continue
            while parents[-1] > 1:
                try:
                    parents.append(parent_of(parents[-1]))
                except OSError:
                    break
            if b"lazy-pages" in line and os.getpid() in parents:
                found.add(int(entry.name))
    return found


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_the_memory_of_two_forks(make: Maker, fork: Fork) -> None:
    box = make(200)
    digest = typed(box, DIGEST)
    children = [fork(box), fork(box)]
    assert all(box_of(child).pages >= 0 for child in children)
    assert [typed(child, DIGEST) for child in children] == [digest, digest]
    typed(children[0], "x = b''\n")
    assert typed(children[1], DIGEST) == typed(box, DIGEST) == digest
    assert box_of(box).pages < 0  # only forks get it so: it was left running


@pytest.mark.parametrize("lazy_pages", [None, 2**30])
def test_as_a_whole(make: Maker, fork: Fork, lazy_pages: int | None) -> None:
    box = make(lazy_pages=lazy_pages)
    child = fork(box)
    assert box_of(child).pages < 0
    assert typed(child, DIGEST) == typed(box, DIGEST)


def test_a_kernel_that_cannot(make: Maker, fork: Fork, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(criu, "brings_pages", lambda program: False)
    box = make()
    child = fork(box)
    assert box_of(child).pages < 0
    for one in (box, child):
        assert any("userfaultfd" in note for note in one.backend.capabilities.notes)
    assert typed(child, DIGEST) == typed(box, DIGEST)


def test_a_snapshot_of_a_fork_that_has_hardly_begun(make: Maker, fork: Fork) -> None:
    box = make()
    child = fork(box)
    grandchild = fork(child)
    assert typed(grandchild, DIGEST) == typed(child, DIGEST) == typed(box, DIGEST)


def test_what_it_is_brought_from_stays_until_it_is_there(make: Maker) -> None:
    box = make()
    digest = typed(box, DIGEST)
    snap = box.snapshot(strict=True)
    assert snap.checkpoint is not None
    place = snap.checkpoint.image.path
    box.restore(snap)
    snap.release()
    backend: Any = box.backend
    assert typed(box, DIGEST) == digest
    assert place.exists()
    await_pages(box_of(box))
    deadline = time.monotonic() + LONG
    while place.exists() or bringers():
        assert time.monotonic() < deadline
        time.sleep(0.002)
    assert backend.live and typed(box, DIGEST) == digest


def test_memory_that_nobody_touches_is_not_brought(make: Maker, fork: Fork) -> None:
    box = make()
    children = [fork(box), fork(box)]
    assert [typed(child, "len(x)\n") for child in children] == ["100000000\n>>> "] * 2
    assert resident(box) > 100e6
    assert [resident(child) < 30e6 for child in children] == [True, True]
    assert typed(children[0], "x[50 * 10**6:] == x[50 * 10**6:]\n") == "True\n>>> "
    assert 50e6 < resident(children[0]) < 220e6
    assert resident(children[1]) < 30e6
    for child in children:
        assert typed(child, DIGEST) == typed(box, DIGEST)


def test_processes_that_come_and_go_are_forgotten(make: Maker, fork: Fork) -> None:
    box, before = make(), bringers()  # of sandboxes that were closed a moment ago
    child = fork(box)
    (server,) = bringers() - before
    program = "for _ in range(300):\n    pid = os.fork()\n    if pid == 0: os._exit(x[0] * 0)\n    os.waitpid(pid, 0)\n"
    typed(child, f"exec({program!r})\n")
    assert len(os.listdir(f"/proc/{server}/fd")) < 250
    assert resident(child) < 30e6


def resident(sandbox: Sandbox) -> int:
    """Bytes of memory of the processes of a sandbox that are there, by proportional share."""
    backend: Any = sandbox.backend
    total = 0
    for info in backend.processes():
        text = Path(f"/proc/{info.pid}/smaps_rollup").read_text()
        total += int(re.findall(r"^Pss: +(\d+) kB", text, re.MULTILINE)[0]) * 1024
    return total


def test_memory_that_is_given_up_moved_or_copied_meanwhile(make: Maker, fork: Fork) -> None:
    box = make()
    typed(box, "y = bytearray(x); z = list(range(10**6))\n")
    program = "r, w = os.pipe(); pid = os.fork()\nif pid == 0: os.write(w, str(x == y).encode()); os._exit(0)\n"
    child = fork(box)
    assert typed(child, f"exec({program!r}); os.read(r, 9), os.waitpid(pid, 0)[1]\n") == "(b'True', 0)\n>>> "
    child = fork(box)
    assert typed(child, "del x; x = bytearray(len(y)); x.count(0) == len(y)\n") == "True\n>>> "
    child = fork(box)
    assert typed(child, "y.extend(bytes(10**8)); y[:len(x)] == x, not any(y[len(x):])\n") == "(True, True)\n>>> "
    child = fork(box)
    assert typed(child, "z.extend(z); sum(z)\n") == "999999000000\n>>> "


def test_a_sandbox_whose_memory_does_not_come_is_ended(make: Maker, fork: Fork) -> None:
    box = make(200)
    for _ in range(30):
        child = fork(box)
        for pid in bringers():
            with contextlib.suppress(ProcessLookupError):  # it has brought everything
                os.kill(pid, signal.SIGKILL)
        readable(box_of(child).pages, LONG)
        if os.read(box_of(child).pages, 1) == b"":
            break
        child.close()  # it had it all before
    else:
        pytest.fail("the memory was there each time before its coming could be stopped")
    deadline = time.monotonic() + LONG
    while child.backend.live:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(SandboxClosed):
        child.interact(DIGEST, timeout=LONG, until=">>> $")
    assert typed(box, "len(x)\n") == "200000000\n>>> "


def test_nothing_is_left_of_what_brings_it(make: Maker, fork: Fork) -> None:
    box = make()
    children = [fork(box), fork(box)]
    for child in children:
        child.close()
    deadline = time.monotonic() + LONG
    while bringers():
        assert time.monotonic() < deadline
        time.sleep(0.01)


OWNER = """
import os, sys
os.environ["SANDBOXGYM_CRIU"] = sys.argv[1]
from sandboxgym.sandbox.overlay.runtime import runtime
from sandboxgym.sandbox.sandbox import make_sandbox
box = make_sandbox("overlay", snapshot="full")
box.interact("python3 -q -i", timeout=300, until=">>> $")
box.interact("x = bytes([7]) * (200 << 20)\\n", timeout=300, until=">>> $")
(child,) = box.fork(1, strict=True, start=True)
pids = [info.pid for one in (box, child) for info in one.backend.processes()]
assert child.backend.container.pages >= 0
print(runtime().directory, runtime().process.pid, *pids, flush=True)
os.kill(os.getpid(), 9)
"""


def test_nothing_outlives_a_killed_owner(runtime_folder: Path) -> None:
    owner = python(runtime_folder, OWNER, criu.find() or "")
    out, _ = owner.communicate(timeout=LONG)
    assert re.match(r"/.* \d+ \d+", out), out
    directory, *pids = out.split()
    deadline = time.monotonic() + LONG
    while any(Path(f"/proc/{pid}").exists() for pid in pids) or commands_with(directory):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    out, _ = python(runtime_folder, REAP).communicate(timeout=LONG)
    assert out == "1\n"
    assert not Path(directory).exists()


def commands_with(text: str) -> list[str]:
    """The command lines of processes in which a text occurs."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if text in line:
                found.append(line)
    return found
