"""Third-party checkpointers: a backend that captures the running processes it knows, without CRIU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest

from sandboxgym.errors import SnapshotMismatch, SnapshotNotSupported
from sandboxgym.sandbox import backends, make_sandbox
from sandboxgym.sandbox.base import (
    Backend,
    Checkpoint,
    Checkpointer,
    FileTree,
    Limits,
    NotCaptured,
    RootFS,
    SandboxUnavailable,
    SnapshotLossy,
    clean_environment,
)
from sandboxgym.sandbox.copy.backend import CopyBackend
from sandboxgym.sandbox.overlay.backend import criu_checkpointer
from sandboxgym.sandbox.sandbox import Sandbox
from sandboxgym.sandbox.shell.bash_session import Shell

SECONDS = 60.0
START = 'coproc COUNTER {{ n={}; while read -r word; do [[ $word ]] || ((++n)); echo "$n"; done; }}'
NEXT = 'echo >&"${COUNTER[1]}"; read -r n <&"${COUNTER[0]}"; echo "$n"'
PEEK = NEXT.replace("echo >", "echo peek >", 1)


class Count:
    """Number that the counter of a sandbox had reached: all there is of its process."""

    nbytes = 1000
    seconds = 0.0
    held: ClassVar[list[Count]] = []
    """Holds that were not given up."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.held.append(self)

    def retain(self) -> Count:
        return Count(self.number)

    def release(self) -> None:
        if self in self.held:
            self.held.remove(self)


class Counters(Checkpointer):
    """Captures the counter of a shell, and starts it again where it was."""

    prepared: ClassVar[list[int | None]] = []

    def __init__(self, backend: CopyBackend) -> None:
        self.backend = backend

    def prepare(self, lazy_pages: int | None) -> None:
        if lazy_pages == 7:
            raise SandboxUnavailable("seven is not counted on this machine")
        self.prepared.append(lazy_pages)

    def obstacles(self, shell: Shell) -> tuple[str, ...]:
        return () if shell.execute(PEEK, timeout=SECONDS).output.strip().isdigit() else ("no counter answers",)

    def capture(self, shell: Shell) -> tuple[FileTree, Count]:
        if reasons := self.obstacles(shell):
            raise NotCaptured(reasons)
        number = int(shell.execute(PEEK, timeout=SECONDS).output)
        return self.backend.commit(keep_processes=True), Count(number)

    def restore(
        self, tree: FileTree, checkpoint: Checkpoint, *, env: Mapping[str, str], cwd: str, output: int
    ) -> Shell:
        assert isinstance(checkpoint, Count)
        self.backend.start(tree)  # type: ignore[arg-type]
        shell = Shell(self.backend, env=env, cwd=cwd, output=output)
        shell.execute(START.format(checkpoint.number), timeout=SECONDS)
        return shell


class Counting(CopyBackend):
    """Plain processes, of which a counter survives."""

    @property
    def checkpointer(self) -> Counters:
        return Counters(self)


class Plain(CopyBackend):
    """Plain processes, none of which survives."""


def _factory(kind: type[CopyBackend]) -> backends.Factory:
    def make(request: backends.Request) -> backends.Made:
        backend = kind(limits=request.limits, allow_unsafe=request.allow_unsafe, env=request.env)
        return backends.Made(backend, clean_environment(RootFS("host", ()), request.env), "/")

    return make


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    kinds = {"counting": Counting, "plain": Plain}
    for name, kind in kinds.items():
        backends.register(name, _factory(kind))
    Count.held.clear()
    yield
    for name in kinds:
        backends.unregister(name)
    assert not Count.held


@pytest.fixture
def box() -> Iterator[Sandbox]:
    """A sandbox with full snapshots and a counter."""
    limits = Limits(seconds=SECONDS)
    with make_sandbox("counting", allow_unsafe=True, snapshot="full", lazy_pages=5, limits=limits) as sandbox:
        said(sandbox, START.format(0))
        yield sandbox


def said(sandbox: Sandbox, command: str) -> str:
    result = sandbox.execute(command)
    assert not result.timed_out, result
    return result.output.strip()


def test_copies_continue_with_what_the_checkpointer_captured(box: Sandbox) -> None:
    assert [said(box, NEXT) for _ in range(2)] == ["1", "2"]
    said(box, "echo two > ~/file")
    assert box.lossy() == ()
    snap = box.snapshot(strict=True)
    assert isinstance(snap.checkpoint, Count) and snap.lossy == ()
    assert snap.nbytes == snap.tree.nbytes + Count.nbytes
    assert said(box, f"echo three > ~/file; {NEXT}") == "3"
    children = box.fork(2, strict=True)
    for child in children:
        assert isinstance(child.backend, Counting)
        assert said(child, f"{NEXT}; {NEXT}; cat ~/file") == "4\n5\nthree"
        child.close()
    for _ in range(2):
        box.restore(snap)
        assert said(box, f"{NEXT}; cat ~/file") == "3\ntwo"
    with pytest.raises(SnapshotNotSupported, match="running processes"):
        snap.pack()
    snap.release()


def test_each_sandbox_prepares_its_own_checkpointer(box: Sandbox) -> None:
    before = len(Counters.prepared)
    for child in box.fork(2):
        child.close()
    assert Counters.prepared[before - 1 :] == [5, 5, 5]


def test_what_it_cannot_capture_is_lost_with_its_reasons(box: Sandbox) -> None:
    said(box, "kill $COUNTER_PID; wait $COUNTER_PID; sleep 1000 &")
    assert box.lossy()[0] == "no counter answers"
    with pytest.raises(SnapshotLossy, match=r"would lose no counter answers; background: sleep 1000"):
        box.snapshot(strict=True)
    snap = box.snapshot()
    assert snap.checkpoint is None and snap.lossy[0] == "no counter answers"
    snap.release()
    assert said(box, "jobs -pr | wc -l") == "1"


def test_files_alone_are_restored_where_processes_are_not(box: Sandbox) -> None:
    said(box, "echo one > ~/file")
    snap = box.snapshot(strict=True)
    with make_sandbox("counting", allow_unsafe=True) as other:
        with pytest.raises(SnapshotMismatch, match="found one with running processes"):
            other.restore(snap)
        files = snap.files()
        other.restore(files)
        files.release()
        assert said(other, "cat ~/file; jobs -p | wc -l") == "one\n0"
    snap.release()


def test_a_checkpointer_that_cannot_work_here_says_why() -> None:
    with pytest.raises(SandboxUnavailable, match="snapshot='auto' is not available here: seven is not counted on this"):
        make_sandbox("counting", allow_unsafe=True, snapshot="auto", lazy_pages=7)


@pytest.mark.parametrize("mode", ["auto", "full"])
@pytest.mark.parametrize("name", ["plain", "copy"])
def test_a_backend_without_a_checkpointer_is_refused(name: str, mode: str) -> None:
    found = r"Plain \(copy\)" if name == "plain" else r"CopyBackend \(copy\)"
    needs = f"^snapshot='{mode}' needs the overlay backend as root, or another with a checkpointer, found {found}$"
    with pytest.raises(SandboxUnavailable, match=needs):
        make_sandbox(name, allow_unsafe=True, snapshot=mode)  # type: ignore[arg-type]


def test_processes_of_another_kind_are_refused() -> None:
    plain: Any = Plain(allow_unsafe=True)
    tree, count = plain.base(), Count(1)
    with pytest.raises(SnapshotMismatch, match=r"expected processes captured by CRIU, found .*Count"):
        criu_checkpointer()(plain).restore(tree, count, env={}, cwd="/", output=100)
    for held in (tree, count):
        held.release()
    plain.close()


def test_a_backend_that_lacks_a_method_is_refused_by_its_name() -> None:
    class Half(Backend):
        """Only its base."""

        def base(self) -> FileTree:
            raise NotImplementedError

    with pytest.raises(TypeError, match=r"abstract.* processes"):
        Half()  # type: ignore[abstract]
