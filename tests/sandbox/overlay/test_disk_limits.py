"""The disk limits against attempts to bypass them; and only a sandbox over its own limit is ended."""

from __future__ import annotations

import marshal
import os
import sys
import time
from pathlib import Path

import pytest
from sandbox.overlay_boxes import CHECKOUT, Maker, make, python, rootless, runtime_folder, sh  # noqa: F401 - fixtures

from sandboxgym.sandbox.base import Limits, SandboxFull
from sandboxgym.sandbox.layers import accountant
from sandboxgym.sandbox.layers.accountant import FLOOR, NONE, Watch, hold_to_limits, nameless, unexplained
from sandboxgym.sandbox.overlay.backend import OverlayBackend

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the disk is limited by overlay sandboxes only")
# ruff: noqa: F811

MIB = 2**20
SMALL = Limits(disk=24 * MIB, files=2000)

PROLOGUE = """
import array, ctypes, mmap, os, socket, sys, threading, time
def fill(descriptor):
    for _ in range(8):
        os.write(descriptor, os.urandom(2**20))
    return descriptor
def hidden():
    path = f"/tmp/hidden{time.monotonic_ns()}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    os.unlink(path)
    return fill(descriptor)
def rights(descriptors):
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
"""
EVASIONS = {
    "open": "kept = [hidden() for _ in range(6)]",
    "unnamed": "kept = [fill(os.open('/tmp', os.O_RDWR | os.O_TMPFILE)) for _ in range(6)]",
    "read only": """
kept = []
for _ in range(6):
    one = hidden()
    kept.append(os.open(f"/proc/self/fd/{one}", os.O_RDONLY))
    os.close(one)
""",
    "mapped": """
kept = []
for _ in range(6):
    one = hidden()
    kept.append(mmap.mmap(one, 2**23))
    os.close(one)
""",
    "below a long path": """
for _ in range(60):
    os.mkdir("d" * 200)
    os.chdir("d" * 200)
for number in range(6):
    fill(os.open(str(number), os.O_WRONLY | os.O_CREAT))
""",
    "locked": """
os.mkdir("locked")
os.chmod("locked", 0)
for number in range(6):
    fill(os.open(f"locked/{number}", os.O_WRONLY | os.O_CREAT))
""",
    "reserved": """
for number in range(6):
    os.posix_fallocate(os.open(str(number), os.O_WRONLY | os.O_CREAT), 0, 2**23)
""",
    "moving": """
os.makedirs("a/" * 50)
for number in range(6):
    fill(os.open(f"a/{'a/' * 40}{number}", os.O_WRONLY | os.O_CREAT))
while True:
    for one, other in (("a/a/a/a", "b"), ("b", "a/a/a/a")):
        os.rename(one, other)
""",
    "threads": """
kept = []
def hold():
    kept.extend(hidden() for _ in range(6))
    time.sleep(1000)
threading.Thread(target=hold).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)
""",
    "in flight": """
one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
kept = [hidden() for _ in range(6)]
one.sendmsg([b"x"], rights(kept))
[os.close(each) for each in kept]
""",
    "in flight, several messages": """
one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
one.send(b"first")
for _ in range(6):
    kept = hidden()
    one.sendmsg([b"x"], rights([kept]))
    os.close(kept)
""",
    "in flight, not accepted": """
listener = socket.socket(socket.AF_UNIX)
listener.bind("socket")
listener.listen(20)
kept = []
for _ in range(6):
    one = hidden()
    kept.append(socket.socket(socket.AF_UNIX))
    kept[-1].connect("socket")
    kept[-1].sendmsg([b"x"], rights([one]))
    os.close(one)
""",
    "in flight in sockets in flight": """
kept, inner = [], []
for _ in range(6):
    one, other = socket.socketpair()
    each = hidden()
    one.sendmsg([b"x"], rights([each]))
    os.close(each)
    one.close()
    inner.append(other)
outer, end = socket.socketpair()
outer.sendmsg([b"x"], rights([each.fileno() for each in inner]))
[each.close() for each in inner]
""",
}
MANY = {
    "directories": "os.mkdir(f'{number}')",
    "links": "os.symlink('x', f'{number}')",
    "empty files": "os.close(os.open(f'{number}', os.O_CREAT))",
    "pipes": "os.mkfifo(f'{number}')",
    "small and nameless": "kept.append(os.open('/tmp', os.O_RDWR | os.O_TMPFILE))",
}


def attack(backend: OverlayBackend, program: str, *, seconds: float = 300.0) -> str:
    """Reason why a box was ended that runs a program in an empty directory of its own."""
    process = backend.spawn(
        ["python3", "-c", f"{PROLOGUE}\nos.mkdir('/tmp/x'); os.chdir('/tmp/x')\n{program}\ntime.sleep(1000)"],
        env=backend.env,
    )
    deadline = time.monotonic() + seconds
    while backend.live and time.monotonic() < deadline and process.wait(0) in (None, 137):
        time.sleep(0.02)
    assert process.wait(0) in (None, 137), os.read(process.output or -1, 10_000)
    process.close()
    with pytest.raises(SandboxFull) as caught:
        backend.spawn(["true"], env=backend.env)
    return str(caught.value)


@pytest.mark.parametrize("evasion", EVASIONS)
def test_the_disk_limit_cannot_be_evaded(make: Maker, evasion: str) -> None:
    backend = make(limits=SMALL)
    backend.start()
    assert "(Limits.disk)" in attack(backend, EVASIONS[evasion])


@pytest.mark.parametrize("kind", MANY)
def test_the_number_of_files_is_limited(make: Maker, kind: str) -> None:
    backend = make(limits=Limits(disk=200 * MIB, files=300))
    backend.start()
    assert "300 are allowed" in attack(backend, f"kept = []\nfor number in range(700):\n    {MANY[kind]}")


def test_directories_count_as_bytes(make: Maker) -> None:
    backend = make(limits=Limits(disk=4 * MIB))
    backend.start()
    program = "[os.mkdir(f'{number}') for number in range(5000)]"
    assert "4,194,304 are allowed" in attack(backend, program)


_UNPRIVILEGED = """
import os, sys
sys.path[:0] = [sys.argv[1]]
from pathlib import Path
from sandbox.overlay import test_disk_limits as tests
from sandbox.overlay_boxes import make_rootfs
from sandboxgym.sandbox.overlay.backend import OverlayBackend
rootfs = make_rootfs(Path(os.environ["HOME"], "lower"))
for evasion in sys.argv[2:]:
    backend = OverlayBackend(rootfs, limits=tests.SMALL)
    backend.start()
    print(evasion, "(Limits.disk)" in tests.attack(backend, tests.EVASIONS[evasion]))
    backend.close()
"""


def test_an_ordinary_users_boxes_are_held_to_it_too(runtime_folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("the tests above are of an ordinary user then")
    tried = ["open", "mapped", "locked", "below a long path", "in flight", "in flight, several messages"]
    output, _ = python(runtime_folder, _UNPRIVILEGED, str(CHECKOUT / "tests"), *tried, nobody=True).communicate(
        timeout=600
    )
    assert output.splitlines() == [f"{evasion} True" for evasion in tried], output


# Who is not ended


HUGE = Limits(disk=1 << 50)
"""For the zygote, to which growth of this disk that nothing explains may be anything."""


def enforce(
    limits: dict[OverlayBackend, int],
    *,
    free: int,
    bases: dict[int, int] | None = None,
    suspects: list[int] | None = None,
) -> tuple[dict[int, int], list[int]]:
    """One look at boxes with these limits of bytes; what is known then."""
    watched = {}
    for backend, nbytes in limits.items():
        box = backend.container
        assert box is not None
        init, groups = _whose(backend)
        watched[init] = Watch(str(box.layer.files), nbytes=nbytes, files=NONE, pidfd=box.pidfd, groups=groups)
    report = os.memfd_create("report")
    try:
        hold_to_limits(watched, free, {}, dict(bases or {}), suspects or [], report)
        os.lseek(report, 0, os.SEEK_SET)
        _, bases, suspects = marshal.loads(os.read(report, 1 << 16))
    finally:
        os.close(report)
    return bases, suspects


def ended(backend: OverlayBackend) -> bool:
    """True if a box was killed, which takes a moment."""
    deadline = time.monotonic() + 300
    note = Path(backend.container.layer.path, accountant.FULL)  # type: ignore[union-attr]
    while note.exists() and backend.live and time.monotonic() < deadline:
        time.sleep(0.01)
    return not backend.live


def test_nobody_is_ended_for_what_others_write(make: Maker) -> None:
    neighbour, other = make(limits=HUGE), make(limits=HUGE)
    boxes = {neighbour: 100 * MIB, other: 24 * MIB}
    for backend in boxes:
        backend.start()
    sh(neighbour, "head -c 40M /dev/zero > /f")
    sh(other, "head -c 1M /dev/zero > /f")
    bases, _ = enforce(boxes, free=1 << 40)
    for _ in range(2):
        bases, suspects = enforce(boxes, free=FLOOR - 1, bases=bases)  # a terabyte went elsewhere
        assert suspects == []
    assert not ended(neighbour) and not ended(other)


def test_who_hides_growth_is_ended_and_not_the_largest(make: Maker) -> None:
    neighbour, hiding = make(limits=HUGE), make(limits=HUGE)
    boxes = {neighbour: 100 * MIB, hiding: 24 * MIB}
    for backend in boxes:
        backend.start()
    sh(neighbour, "head -c 40M /dev/zero > /f")
    bases, _ = enforce(boxes, free=1 << 40)
    program = f"{PROLOGUE}\nos.chdir('/tmp')\n{EVASIONS['in flight, several messages']}".replace("range(8)", "[]")
    process = hiding.spawn(["python3", "-c", f"{program}\nprint(1, flush=True)\ntime.sleep(1000)"], env=hiding.env)
    assert process.output is not None and os.read(process.output, 1) == b"1"
    assert nameless(*_whose(hiding)).unseen == 5  # all but those of the first message with any
    assert enforce(boxes, free=(1 << 40) - 20 * MIB, bases=bases)[1] == []
    _, suspects = enforce(boxes, free=(1 << 40) - 30 * MIB, bases=bases)
    assert suspects == [_whose(hiding)[0]] and not ended(hiding)
    enforce(boxes, free=(1 << 40) - 30 * MIB, bases=bases, suspects=suspects)
    assert ended(hiding) and not ended(neighbour)
    with pytest.raises(SandboxFull, match="nothing else explains"):
        hiding.spawn(["true"], env=hiding.env)
    process.close()


def _whose(backend: OverlayBackend) -> tuple[int, list[str]]:
    box = backend.container
    assert box is not None
    return box.pid, box.group.paths if box.group else []


def test_a_box_without_a_limit_is_ended_before_the_disk_is_full(make: Maker) -> None:
    limited, small, large = make(limits=HUGE), make(limits=HUGE), make(limits=HUGE)
    boxes = {limited: 100 * MIB, small: NONE, large: NONE}
    for backend in boxes:
        backend.start()
    sh(limited, "head -c 4M /dev/zero > /f")
    sh(small, "head -c 1M /dev/zero > /f")
    sh(large, "head -c 2M /dev/zero > /f")
    enforce(boxes, free=FLOOR + 1)
    assert large.live
    enforce(boxes, free=FLOOR - 1)
    assert ended(large) and small.live and limited.live
    with pytest.raises(SandboxFull, match="none of its own"):
        large.spawn(["true"], env=large.env)


def test_what_is_not_on_the_disk_does_not_count(make: Maker) -> None:
    backend = make(limits=SMALL)
    backend.start()
    program = """
one, other = socket.socketpair()
kept = [fill(os.memfd_create("x")) for _ in range(4)] + [mmap.mmap(-1, 2**25) for _ in range(2)]
one.sendmsg([b"x"], rights(kept[:4]))
[os.close(each) for each in kept[:4]]
usual = hidden()
again = [os.dup(usual) for _ in range(20)], [mmap.mmap(usual, 2**23) for _ in range(5)]
print(1, flush=True)
time.sleep(1000)
"""
    process = backend.spawn(["python3", "-c", PROLOGUE + program], env=backend.env)
    assert process.output is not None and os.read(process.output, 1) == b"1"
    taken = nameless(*_whose(backend))
    assert taken.unseen == 0 and taken.files == 1
    assert 8 * MIB <= taken.nbytes < 9 * MIB
    process.kill()
    process.close()


def test_what_a_box_kept_stays_explained() -> None:
    before = unexplained(1000 * MIB, {"one": 10 * MIB, "two": 0})
    assert unexplained(990 * MIB, {"one": 20 * MIB, "two": 0}) == before
    assert unexplained(980 * MIB, {"one": 20 * MIB, "two": 0}) == before + 10 * MIB
