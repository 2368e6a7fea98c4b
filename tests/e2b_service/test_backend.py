"""``make_sandbox("e2b")`` against ``sandboxgym serve e2b``, by E2B's own library."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from e2b_service.conftest import Server

from sandboxgym.errors import SnapshotCorrupt, SnapshotMismatch, SnapshotReleased
from sandboxgym.sandbox.base import FileTooLarge, SandboxClosed, SandboxUnavailable
from sandboxgym.sandbox.sandbox import make_sandbox


@pytest.fixture
def sandbox(service: Server) -> Any:
    with make_sandbox("e2b") as made:
        yield made


def test_the_shell_keeps_its_state_from_command_to_command(sandbox: Any) -> None:
    first = sandbox.execute("mkdir -p ~/d; cd ~/d; NAME='a  b'; export LIST=1; f() { echo f $1; }; alias q='echo q'")
    assert (first.exit_code, first.output) == (0, "")
    second = sandbox.execute('echo "$NAME" $LIST; f 1\nq\npwd; shopt -s nullglob; exit 7')
    assert (second.exit_code, second.output) == (7, "a  b 1\nf 1\nq\n/home/user/d\n")
    assert sandbox.execute("shopt -q nullglob; echo $? $NAME; (exit 3)").output == "0 a b\n"
    assert sandbox.run("echo out; echo err >&2; echo [$NAME]; pwd").output == "out\nerr\n[]\n/home/user\n"
    late = sandbox.execute("echo early; sleep 1000 & sleep 1000", timeout=0.5)
    assert (late.timed_out, late.exit_code, late.output) == (True, 124, "early\n")
    assert "sleep" not in sandbox.run("cat /proc/[0-9]*/comm").output
    assert sandbox.execute("if").exit_code == 2


def test_snapshots_restore_and_fork_at_the_service(e2b: Any, sandbox: Any) -> None:
    sandbox.execute("cd; echo one > notes; NAME=first")
    snap = sandbox.snapshot()
    assert snap.lossy == ()
    sandbox.execute("echo two >> notes; NAME=second")
    left, right = sandbox.fork(2)
    with left, right:
        left.execute("echo left >> notes")
        assert right.execute("echo $NAME; cat notes").output == "second\none\ntwo\n"
        sandbox.restore(snap)
        assert sandbox.execute("echo $NAME; cat notes").output == "first\none\n"
        assert left.execute("cat notes").output == "one\ntwo\nleft\n"
        assert len(e2b.Sandbox.list().next_items()) == 3
    assert len(e2b.Sandbox.list().next_items()) == 1
    again = snap.retain()
    snap.release()
    with pytest.raises(SnapshotReleased):
        sandbox.restore(snap)
    sandbox.restore(again)
    again.release()
    sandbox.close()
    assert e2b.Sandbox.list().next_items() == [] and e2b.Sandbox.list_snapshots().next_items() == []
    with pytest.raises(SandboxClosed):
        sandbox.execute("true")


@pytest.mark.slow
def test_running_processes_are_named_as_lost(sandbox: Any) -> None:
    sandbox.execute("sleep 1000 &")
    assert [item for item in sandbox.lossy() if "sleep 1000" in item]
    (child,) = sandbox.fork(1)
    with child:
        assert "sleep" in child.lost[0] and child.lossy() == ()
        assert child.execute("true").exit_code == 0


@pytest.mark.slow
def test_a_packed_snapshot_is_its_name_at_the_service(e2b: Any, sandbox: Any) -> None:
    sandbox.write_file("/home/user/f", b"\0packed")
    snap = sandbox.snapshot()
    data = snap.pack()
    snap.release()
    assert len(data) < 300 and len(e2b.Sandbox.list_snapshots().next_items()) == 1
    with make_sandbox("e2b") as other:
        loaded = other.unpack(data)
        other.restore(loaded)
        assert other.read_file("/home/user/f") == b"\0packed"
        other.restore(other.unpack(sandbox.snapshot().pack()))
        with pytest.raises(SnapshotCorrupt):
            other.backend.unpack(b"e2b-snapshot:../x y")
    with make_sandbox("e2b", rootfs="template:other") as stranger, pytest.raises(SnapshotMismatch):
        stranger.unpack(data)


def test_files_have_limits_and_the_usual_errors(sandbox: Any) -> None:
    sandbox.write_file("/tmp/x/y", b"12345", mode=0o600)
    assert sandbox.read_file("/tmp/x/y") == b"12345"
    assert sandbox.run("stat -c %a /tmp/x/y").output == "600\n"
    with pytest.raises(FileTooLarge):
        sandbox.read_file("/tmp/x/y", limit=4)
    with pytest.raises(FileNotFoundError):
        sandbox.read_file("/tmp/none")
    with pytest.raises(OSError) as failed:
        sandbox.read_file("/tmp")
    assert failed.value.errno == errno.EIO


@pytest.mark.slow
def test_a_sandbox_that_the_service_ended_is_closed(e2b: Any, sandbox: Any) -> None:
    sandbox.execute("true")
    e2b.Sandbox.kill(sandbox.backend.remote.sandbox_id)
    with pytest.raises(SandboxClosed, match="ended the sandbox"):
        sandbox.execute("true")


def test_what_cannot_be_had_is_refused_in_a_sentence(
    service: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(SandboxUnavailable, match="rootfs='template:NAME'"):
        make_sandbox("e2b", rootfs="docker:x")
    with pytest.raises(SandboxUnavailable, match="checkpointer"):
        make_sandbox("e2b", snapshot="full")
    with make_sandbox("e2b", rootfs="template:other") as made, pytest.raises(SandboxUnavailable, match="not found"):
        made.execute("true")
    with make_sandbox("e2b") as made, pytest.raises(Exception, match="no terminal"):
        made.interact("cat", timeout=1)
    monkeypatch.setenv("E2B_API_KEY", "e2b_unknown")
    with make_sandbox("e2b") as made, pytest.raises(SandboxUnavailable, match="not known"):
        made.execute("true")
    monkeypatch.setenv("E2B_API_URL", "http://127.0.0.1:9")
    with make_sandbox("e2b") as made, pytest.raises(SandboxUnavailable, match="E2B service"):
        made.execute("true")
