"""The shell and snapshots on Docker, where a terminal is a socket: the same as on other backends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sandbox.docker_image import docker_image  # noqa: F401 - fixture
from sandbox.files.test_deep_trees import BOTTOM, dig, look

from sandboxgym.sandbox.base import SnapshotLossy
from sandboxgym.sandbox.sandbox import Sandbox, make_sandbox

# the fixture of another module is an argument of the one below
# ruff: noqa: F811

pytestmark = pytest.mark.slow


@pytest.fixture
def box(docker_image: str) -> Iterator[Sandbox]:
    with make_sandbox("docker", rootfs=f"docker:{docker_image}") as sandbox:
        yield sandbox


def test_commands(box: Sandbox) -> None:
    assert box.execute("pwd; echo $IMAGE_SAYS; x=1; cd /tmp; (exit 3)").output == "/root\nhello\n"
    assert box.execute("echo $? $x; pwd").output == "3 1\n/tmp\n"
    assert box.execute("if").syntax_error
    assert box.run("echo out; exit 4").exit_code == 4


def test_commands_that_end_the_shell_or_do_not_end(box: Sandbox) -> None:
    box.execute("x=1; cd /tmp")
    result = box.execute("exit 7")
    assert (result.exit_code, result.ended) == (7, True)
    result = box.execute("echo start; x=2; sh -c 'trap \"\" INT; sleep 100'; touch /tmp/after", timeout=0.5)
    assert (result.exit_code, result.timed_out, result.output[:6]) == (124, True, "start\n")
    assert box.execute("echo $x; pwd; ls").output == "2\n/tmp\n"
    assert box.lossy() == ()


def test_snapshots_and_forks(box: Sandbox) -> None:
    box.execute("cd /tmp; echo 1 >file; x=1; sleep 100 & exec 7>log")
    snap = box.snapshot()
    assert sorted(snap.lossy) == ["background: sleep 100", "fd 7 -> /tmp/log"]
    assert sorted(box.lossy()) == ["background: sleep 100", "fd 7 -> /tmp/log"]
    box.execute("echo 2 >file; x=2; exec 7>&-; kill %1")
    (child,) = box.fork(1)
    with child:
        child.execute("echo 3 >file; x=3")
        assert box.execute("cat file; echo $x").output == "2\n2\n"
        assert child.execute("cat file; echo $x").output == "3\n3\n"
    box.restore(snap)
    assert box.execute("cat file; echo $x").output == "1\n1\n"


def test_a_shell_that_was_stopped_or_broken_by_its_user_is_not_waited_for(box: Sandbox) -> None:
    result = box.execute("x=1; kill -STOP $$; echo out; false", timeout=60)
    assert (result.output, result.exit_code, result.timed_out, result.ended) == ("out\n", 1, False, False)
    result = box.execute("set -r", timeout=60)
    assert (result.ended, result.timed_out) == (True, False)
    box.execute("readonly __sg_nonce", timeout=60)
    result = box.execute('echo "$x"; false', timeout=60)
    assert (result.output, result.exit_code, result.replaced) == ("1\n", 1, True)
    box.execute("alias {=x if=y; enable -n builtin eval; enable() { false; }", timeout=60)
    assert box.execute('echo "$x"; (exit 3)', timeout=60).exit_code == 3


@pytest.mark.parametrize("seen", [True, False], ids=["layer seen", "layer not seen"])
def test_what_the_daemon_leaves_out_is_said_to_be_lost(
    box: Sandbox, seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves out what no path leads to, without a word."""
    deepest = 800
    dig(box, depth=700)
    box.execute("echo beside > /tmp/beside")
    container = box.backend._live()  # type: ignore[attr-defined]
    monkeypatch.setattr(container, "layer", container.layer if seen else None)
    snap = box.snapshot(strict=True)
    assert snap.lossy == ()
    dig(box, folder="/tmp/deep", depth=deepest, name="more")
    lost = "nested deeper than a path can be long"
    with pytest.raises(SnapshotLossy, match=lost):
        box.snapshot(strict=True)
    partly = box.snapshot()
    assert [text.partition(":")[0] for text in partly.lossy] == [lost]
    assert partly.lossy[0].startswith(f"{lost}: '/tmp/deep/") or not seen
    (child,) = box.fork(1)
    with child:
        assert child.lost == partly.lossy
        assert child.execute("cat /tmp/beside").output == "beside\n"
    assert look(box, "/tmp/deep", depth=deepest, name="more") == BOTTOM
    again = box.unpack(partly.pack())
    assert again.lossy == partly.lossy
    box.restore(again)
    assert look(box, depth=700) == BOTTOM and box.execute("cat /tmp/beside").output == "beside\n"
    box.restore(snap)
    assert look(box, depth=700) == BOTTOM
