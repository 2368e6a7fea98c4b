"""Sandboxes: files, processes and shell together; snapshots, restores, forks; losses and leftovers."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import pytest
from sandbox.sandboxes import Maker, box, kind, make  # noqa: F401 - fixtures

from sandboxgym import serialization
from sandboxgym.errors import SnapshotCorrupt, SnapshotMismatch, SnapshotReleased
from sandboxgym.sandbox.base import Limits, SandboxClosed, SandboxUnavailable, SnapshotLossy
from sandboxgym.sandbox.sandbox import Sandbox, make_sandbox

# fixtures of another module are arguments of the tests below
# ruff: noqa: F811


@pytest.fixture
def home(box: Sandbox) -> Sandbox:
    """A sandbox whose shell stands in its own, snapshotted directory."""
    box.execute("mkdir -p ~/work && cd ~/work")
    return box


def files(sandbox: Sandbox) -> str:
    return sandbox.execute("cd ~/work && cat * 2>/dev/null").output


def test_a_snapshot_leaves_history_and_stack_of_directories(home: Sandbox) -> None:
    home.execute("pushd /tmp; history -s first; history -s $'two\\nlines'")
    seen = home.execute("dirs; history").output
    snap = home.snapshot()
    assert home.execute("dirs; history").output == seen
    home.execute("popd; history -c; history -s later")
    home.restore(snap)
    assert home.execute("dirs; history").output == seen
    assert "first" in seen and seen.startswith("/tmp ")
    snap.release()


def test_a_run_knows_nothing_of_the_shell(home: Sandbox) -> None:
    home.execute("export X=1; echo text >file")
    result = home.run(
        'echo out; echo err >&2; echo "${X-unset} $EXTRA"; cat ~/work/file; exit 3', env={"EXTRA": "more"}
    )
    assert (result.exit_code, result.output) == (3, "out\nerr\nunset more\ntext\n")
    assert home.run("test -t 1 || echo pipe; cat").output == "pipe\n"
    assert home.execute("echo $X").output == "1\n"


def test_a_run_that_does_not_end(home: Sandbox) -> None:
    result = home.run("echo before; sleep 1000 & sleep 1000", timeout=0.3)
    assert (result.exit_code, result.timed_out, result.output) == (124, True, "before\n")
    assert home.lossy() == ()


def test_what_a_run_leaves_ends_with_it_or_goes_on(home: Sandbox, kind: str) -> None:
    leave = "sleep 1000 & echo $!"
    gone, kept = int(home.run(leave).output), int(home.run(leave, keep=True).output)
    alive = home.run(f"for one in {gone} {kept}; do kill $one 2> /dev/null && echo $one; done").output.split()
    contained = home.backend.capabilities.isolated  # other backends have no container whose processes could be ended
    assert alive == [str(kept)] if contained else alive[-1:] == [str(kept)]
    ended = home.run("echo $0; echo err >&2; cat; kill -9 $$", keep=True)
    assert (ended.exit_code, ended.output) == (137, "bash\nerr\n")
    late = home.run(f"{leave} > last; sleep 1000", keep=True, timeout=0.5, cwd="/tmp")
    dead = "! kill -0 $(cat last) || grep -q '^State:.Z' /proc/$(cat last)/status"
    assert late.timed_out and home.run(dead, cwd="/tmp").exit_code == 0
    assert home.lossy() == ()


def test_a_run_ends_with_its_command_not_with_its_pipe(home: Sandbox) -> None:
    began = time.monotonic()
    assert home.run("sleep 1000 & echo started").output == "started\n"
    assert home.run("exec >&- 2>&-; (exit 4)").exit_code == 4
    assert time.monotonic() - began < 400


def test_output_of_a_run_is_bounded(make: Maker) -> None:
    box = make(limits=Limits(output=1000))
    result = box.run("for ((i = 0; i < 10000; i++)); do echo $i; done")
    assert result.elided > 40_000
    assert result.output.startswith("0\n1\n")
    assert result.output.endswith("9999\n")


def test_files_are_read_and_written(home: Sandbox) -> None:
    path = home.execute("echo ~/work").output.strip()
    home.write_file(f"{path}/a/b", b"\x00\xff data", mode=0o755)
    assert home.read_file(f"{path}/a/b") == b"\x00\xff data"
    assert home.execute("test -x a/b && wc -c <a/b").output.strip() == "7"
    with pytest.raises(FileNotFoundError):
        home.read_file(f"{path}/none")


def test_a_snapshot_restores_files_and_shell(home: Sandbox) -> None:
    home.execute("echo 1 >file; x=1; mkdir sub; cd sub; set -u; (exit 9)")
    snap = home.snapshot()
    assert snap.lossy == ()
    home.execute("echo 2 >../file; rm -r ~/work/sub; x=2; cd /; set +u; f() { :; }")
    home.restore(snap)
    assert home.execute("echo $?").output == "9\n"
    assert home.execute("basename $PWD; cat ../file; echo $x; type -t f; echo $-").output.startswith("sub\n1\n1\n")
    assert "u" in home.execute("echo $-").output


def test_taking_a_snapshot_changes_nothing(home: Sandbox) -> None:
    home.execute("echo 1 >file; x=1; f() { echo $x; }; alias a='echo alias'; (exit 5)")
    home.snapshot()
    assert home.execute("echo $?; pwd | xargs basename; cat file; f; a").output == "5\nwork\n1\n1\nalias\n"
    home.execute("x=2; echo 2 >>file")
    home.snapshot()
    home.snapshot()
    assert home.execute("f; cat file").output == "2\n1\n2\n"


def test_snapshots_restore_any_number_of_times_in_any_order(home: Sandbox) -> None:
    snaps = []
    for number in range(5):
        home.execute(f"echo {number} >>file; x={number}; touch f{number}")
        snaps.append(home.snapshot())
    for number in [4, 0, 2, 2, 1, 3, 0, 4]:
        home.restore(snaps[number])
        expected = "".join(f"{i}\n" for i in range(number + 1))
        assert home.execute("cat file; echo x$x; ls | wc -l").output.split() == [
            *expected.split(),
            f"x{number}",
            str(number + 2),
        ]
        home.execute("echo detour >>file; x=detour; rm -f f[0-9]")
    nested = home.snapshot()
    home.restore(snaps[1])
    home.restore(nested)
    assert home.execute("echo $x; tail -n 1 file").output == "detour\ndetour\n"


def test_a_snapshot_of_what_was_never_started(make: Maker) -> None:
    box = make()
    snap = box.snapshot()
    assert box.lossy() == ()
    box.execute("x=1; echo 1 >~/file")
    box.restore(snap)
    assert box.execute("echo x$x; ls ~/file 2>/dev/null").output == "x\n"


def test_a_restored_sandbox_is_snapshotted_without_being_used(home: Sandbox) -> None:
    home.execute("x=1; echo 1 >file")
    first = home.snapshot()
    second = home.snapshot()
    home.execute("x=2; echo 2 >file")
    home.restore(second)
    third = home.snapshot()
    home.restore(first)
    home.restore(third)
    assert home.execute("echo $x; cat file").output == "1\n1\n"


def test_forks_are_independent(home: Sandbox) -> None:
    home.execute("echo base >file; x=base; f() { echo f$x; }")
    children = home.fork(3)
    try:
        for number, child in enumerate(children):
            assert child.execute("f").output == "fbase\n"
            child.execute(f"echo {number} >~/work/file; x={number}; touch ~/work/only-{number}; sleep 100 &")
        home.execute("x=parent; echo parent >file")
        for number, child in enumerate(children):
            assert child.execute("echo $x; cat ~/work/file; cd ~/work; ls -1").output == (
                f"{number}\n{number}\nfile\nonly-{number}\n"
            )
            assert child.lossy() == ("background: sleep 100",)
        children[0].close()
        assert children[1].execute("echo $x").output == "1\n"
        assert home.execute("echo $x; cat file; ls -1").output == "parent\nparent\nfile\n"
        assert home.lossy() == ()
    finally:
        for child in children:
            child.close()


def test_forks_of_forks_outlive_their_parents(home: Sandbox) -> None:
    home.execute("echo 1 >file; x=1")
    (child,) = home.fork(1)
    child.execute("echo 2 >>~/work/file; x=$((x + 1))")
    (grandchild,) = child.fork(1)
    home.close()
    child.close()
    with grandchild:
        assert grandchild.execute("cat ~/work/file; echo $x").output == "1\n2\n2\n"


def test_an_unused_fork_starts_nothing(home: Sandbox) -> None:
    children = home.fork(2)
    assert not any(child.backend.live for child in children)
    for child in children:
        child.close()


def test_a_fork_is_all_or_nothing(home: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    home.execute("echo 1 >file; x=1")
    kind_of_backend = type(home.backend)
    made: list[object] = []
    original = kind_of_backend.start

    def start(self: object, tree: object = None) -> None:
        made.append(self)
        if len(made) == 3:
            raise SandboxUnavailable("no more")
        original(self, tree)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(kind_of_backend, "start", start)
        with pytest.raises(SandboxUnavailable, match="no more"):
            home.fork(3, start=True)
    assert len(made) == 3
    assert not any(backend.live for backend in made)  # type: ignore[attr-defined]
    assert home.execute("echo $x; cat file").output == "1\n1\n"
    with pytest.raises(ValueError):
        home.fork(-1)
    assert home.fork(0) == []


def test_background_processes_are_reported_and_go_on(home: Sandbox) -> None:
    home.execute("x=1; (while :; do date +%N >tick; sleep 0.02; done) & sleep 101 &")
    home.execute("while [ ! -s tick ]; do sleep 0.01; done")
    lost = home.lossy()
    assert "background: sleep 101" in lost
    with pytest.raises(SnapshotLossy, match="sleep 101"):
        home.snapshot(strict=True)
    snap = home.snapshot()
    assert "background: sleep 101" in snap.lossy
    shell = home._parts.shell
    assert shell is not None
    number = shell.pid
    first = home.execute("cat tick").output
    while home.execute("cat tick").output in ("", first):
        pass
    assert "background: sleep 101" in home.lossy()
    assert shell.pid == number
    with pytest.raises(SnapshotLossy):
        home.fork(1, strict=True)
    (child,) = home.fork(1)
    with child:
        assert "background: sleep 101" in child.lost
    home.execute("x=2")
    home.restore(snap)
    assert home.lost == snap.lossy
    assert home.lossy() == ()
    assert home.execute("echo $x; ls").output == "1\ntick\n"


def test_what_is_too_large_is_reported_before_a_snapshot_as_by_one(home: Sandbox) -> None:
    home.execute("big=$(head -c 5000000 /dev/zero | tr '\\0' x); small=1")
    lost = home.lossy()
    assert len(lost) == 1 and "big" in lost[0]
    with pytest.raises(SnapshotLossy, match="big"):
        home.snapshot(strict=True)
    assert home.snapshot().lossy == lost


def test_open_descriptors_are_reported_and_go_on(home: Sandbox) -> None:
    home.execute("exec 7>log; echo 1 >&7")
    (lost,) = home.lossy()
    assert lost.startswith("fd 7 -> ")
    assert lost.endswith("/log")
    with pytest.raises(SnapshotLossy, match="fd 7"):
        home.snapshot(strict=True)
    snap = home.snapshot()
    home.execute("echo 2 >&7; exec 7>&-")
    assert home.execute("cat log").output == "1\n2\n"
    assert home.lossy() == ()
    assert home.snapshot(strict=True).lossy == ()
    home.restore(snap)
    assert home.execute("cat log").output == "1\n"
    assert home.execute("echo 3 >&7").exit_code != 0


def test_a_redirected_shell_is_reported(home: Sandbox) -> None:
    home.execute("exec 2>errors")
    assert any(item.startswith("fd 2 -> ") for item in home.lossy())


def test_a_coprocess_is_reported(home: Sandbox) -> None:
    home.execute("coproc cat")
    lost = home.lossy()
    assert "background: cat" in lost
    assert any(item.startswith("fd ") for item in lost)


def test_what_was_started_a_moment_ago_is_named_by_its_program(home: Sandbox) -> None:
    for _ in range(40):  # each is a fork of the shell first
        home.execute("sleep 1001 & sleep 1002 &")
        assert sorted(home.lossy()) == ["background: sleep 1001", "background: sleep 1002"]
        home.execute("kill %1 %2; wait")


def test_an_unanswered_program_is_reported(home: Sandbox) -> None:
    home.execute("x=1")
    assert home.interact("x=2; echo set; cat", timeout=60, until="set").running
    while "background: cat" not in home.lossy():
        pass
    snap = home.snapshot()
    assert home.interact("hello\n", timeout=60, until="hello").running
    home.interrupt()
    assert home.execute("echo $x").output == "2\n"
    home.restore(snap)
    assert home.execute("echo $x").output == "1\n"


def test_a_released_snapshot_is_refused(home: Sandbox) -> None:
    home.execute("x=1; echo 1 >file")
    snap = home.snapshot()
    kept = snap.retain()
    snap.release()
    snap.release()
    with pytest.raises(SnapshotReleased):
        home.restore(snap)
    home.execute("x=2; echo 2 >file")
    home.restore(kept)
    assert home.execute("echo $x; cat file").output == "1\n1\n"
    assert kept.nbytes > 0
    assert "released" in repr(snap)


def test_a_snapshot_outlives_its_sandbox(make: Maker, home: Sandbox) -> None:
    home.execute("x=1; echo 1 >file")
    snap = home.snapshot()
    home.close()
    other = make()
    other.restore(snap)
    assert other.execute("echo $x; cat ~/work/file").output == "1\n1\n"


def test_a_packed_snapshot_restores_in_another_sandbox(make: Maker, home: Sandbox) -> None:
    home.execute("x=$'\\xff'; echo 1 >file; rm -f none; mkdir empty; ln -s file link; f() { echo f; }; exec 7>log")
    data = home.snapshot().pack()
    home.close()
    other = make()
    snap = other.unpack(data)
    assert len(snap.lossy) == 1
    other.restore(snap)
    assert other.execute("f; [[ $x == $'\\xff' ]] && cd ~/work && ls -1; readlink link").output == (
        "f\nempty\nfile\nlink\nlog\nfile\n"
    )


def test_what_was_not_packed_here_is_refused(home: Sandbox) -> None:
    home.execute("x=1")
    data = home.snapshot().pack()
    content = serialization.unpack(data)
    for wrong in (
        b"",
        b"not packed",
        data[:-10],
        serialization.pack([1]),
        serialization.pack({**content, "version": 99}),
        serialization.pack({**content, "shell": {"cwd": 1}}),
        serialization.pack({**content, "tree": b"no archive"}),
        serialization.pack({**content, "tree": 1}),
        serialization.pack({name: value for name, value in content.items() if name != "lossy"}),
    ):
        with pytest.raises(SnapshotCorrupt):
            home.unpack(wrong)
    with pytest.raises(SnapshotMismatch, match="other"):
        home.unpack(serialization.pack({**content, "base": "other"}))
    assert home.execute("echo $x").output == "1\n"


def test_another_root_file_system_is_refused(make: Maker, home: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "root/etc").mkdir(parents=True)
    other = make(rootfs=tmp_path / "root")
    home.execute("x=1")
    with pytest.raises(SnapshotMismatch):
        home.restore(other.snapshot())
    assert home.execute("echo $x").output == "1\n"


def test_a_root_file_system_without_bash(make: Maker, tmp_path: Path) -> None:
    (tmp_path / "root/etc").mkdir(parents=True)
    box = make(rootfs=tmp_path / "root")
    if box.backend.capabilities.isolated:
        with pytest.raises(SandboxUnavailable, match="bash"):
            box.execute("true")


def test_a_closed_sandbox_says_so(make: Maker) -> None:
    box = make()
    box.execute("true")
    box.close()
    box.close()
    for use in (box.start, box.snapshot, box.lossy, lambda: box.execute("true"), lambda: box.run("true")):
        with pytest.raises(SandboxClosed):
            use()
    assert "closed" in repr(box)


def test_a_forgotten_sandbox_is_ended(make: Maker, kind: str) -> None:
    box = make_sandbox(kind, allow_unsafe=True)
    box.execute("sleep 1000 &")
    backend = box.backend
    del box
    gc.collect()
    assert not backend.live


def test_a_name_that_is_none() -> None:
    with pytest.raises(ValueError, match="overlay"):
        make_sandbox("chroot")
    with pytest.raises(SandboxUnavailable, match="docker:IMAGE"):
        make_sandbox("docker", rootfs="host")
    with pytest.raises(SandboxUnavailable, match="allow_unsafe"):
        make_sandbox("copy")


def test_environment_and_directory(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_HOST", "1")
    box = make(env={"PAGER": "cat"}, workdir="/tmp")
    for result in (box.execute("env; pwd"), box.run("env; pwd")):
        lines = result.output.splitlines()
        assert "PAGER=cat" in lines
        assert lines[-1].endswith("/tmp")
        assert not any("SECRET_OF_THE_HOST" in line for line in lines)


def test_a_directory_that_was_removed_stops_neither_a_restore_nor_another_shell(make: Maker) -> None:
    made = make()
    made.execute("mkdir -p work")
    start = made.snapshot()
    box = make(workdir="/work")
    box.restore(start)
    box.execute("export KEPT=yes; cd work; rm -rf ../work")
    box.execute("exit")
    assert box.execute("echo $KEPT").output == "yes\n"
    gone = box.snapshot()
    box.execute("KEPT=no")
    box.restore(gone)
    assert box.execute("echo $KEPT").output == "yes\n"
    box.restore(start)
    box.execute("rm -rf work; exit")
    assert box.execute("echo $KEPT").output == "\n"
    start.release()
    gone.release()
