"""Full snapshots: sandboxes that fork with their running processes."""

from __future__ import annotations

import gc
import itertools
import os
import sys
from typing import Any

import pytest
from full_sandboxes import COUNTER, GAPS, LONG, WAIT, Everywhere, container, said, typed

from sandboxgym.sandbox.layers.store import OverlayTree
from sandboxgym.sandbox.sandbox import Sandbox

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's"),
    pytest.mark.usefixtures("criu_found"),
]


# What survives


SHELL = r"""
plain=1; declare -A table=([key]='a b'); list=(1 '2 3'); export EXPORTED=yes; declare -ri fixed=7
greet() { echo "hello $1"; }
trap 'echo bye' EXIT; trap 'echo usr1' USR1
umask 027; ulimit -Sn 200; shopt -s nullglob; set -o noclobber; alias ll='ls -l'
cd /tmp; pushd /usr >/dev/null; history -s first; history -s second
RANDOM=5
"""
ASK = r"""
echo $plain "${table[key]}" "${list[1]}" $EXPORTED $fixed $(greet you); trap -p EXIT USR1
umask; ulimit -Sn; shopt -p nullglob; set +o | grep noclobber; alias ll; dirs; history | grep -c -e first -e second
echo $RANDOM $RANDOM; kill -USR1 $$
"""


def test_the_state_of_the_shell(box: Sandbox, everywhere: Everywhere) -> None:
    said(box, SHELL)
    answers = [said(one, ASK) for one in everywhere(box)]
    assert answers[0] == answers[1] == answers[2]
    assert answers[0].startswith("1 a b 2 3 yes 7 hello you\ntrap -- 'echo bye' EXIT\n")
    assert "\n/usr /tmp\n2\n" in answers[0]
    assert answers[0].endswith("usr1\n")


def test_jobs(box: Sandbox, everywhere: Everywhere) -> None:
    said(box, "sleep 1000 & (sleep 1000; exit 3) & first=$!")
    for one in everywhere(box):
        assert said(one, "jobs -p | wc -l") == "2\n"
        assert said(one, "kill %1; wait %1; echo $?; kill -0 $first && echo alive") == "143\nalive\n"


def test_a_stopped_job_stays_stopped(box: Sandbox, everywhere: Everywhere) -> None:
    said(box, "sleep 1000 & job=$!; kill -STOP $job; " + WAIT % "grep -q ') T' /proc/$job/stat")
    for one in everywhere(box):
        assert said(one, "grep -c ') T' /proc/$job/stat") == "1\n"


def test_process_ids(box: Sandbox, everywhere: Everywhere) -> None:
    pid = said(box, "sleep 1000 & echo $$ $!")
    copies = everywhere(box)
    assert [said(one, "echo $$ $!") for one in copies] == [pid] * 3
    following = {said(one, "true & echo $!; wait $!") for one in copies[:2]}
    assert len(following) == 1
    assert int(following.pop()) < 1000


def test_descriptors_keep_their_offsets(box: Sandbox, everywhere: Everywhere) -> None:
    said(box, "seq 5 >/tmp/in; exec 7</tmp/in 8>/tmp/out; read -r a <&7; read -r a <&7; echo $a >&8")
    for one in everywhere(box):
        assert said(one, "read -r a <&7; echo $a >&8; cat /tmp/out") == "2\n3\n"


def test_a_server_answers_in_every_copy(box: Sandbox, everywhere: Everywhere) -> None:
    said(box, "mkdir /tmp/site; cd /tmp/site; echo before >page; python3 -m http.server 8000 >/dev/null 2>&1 &")
    get = "python3 -c 'import urllib.request as r; print(r.urlopen(\"http://127.0.0.1:8000/page\").read().decode())'"
    assert said(box, WAIT % f"{get} 2>/dev/null") == "before\n\n"
    for number, one in enumerate(everywhere(box)):
        said(one, f"echo {number} >page")
        assert said(one, get) == f"{number}\n\n"


def test_data_in_a_fifo_and_in_a_pipe(box: Sandbox, everywhere: Everywhere) -> None:
    said(box, "mkfifo /tmp/queue; exec 7<>/tmp/queue; echo waiting >&7; exec 8< <(echo piped; sleep 1000)")
    for one in everywhere(box):
        assert said(one, "read -r a <&7; read -r b <&8; echo $a $b") == "waiting piped\n"


def test_orphans_belong_to_the_shell(box: Sandbox, everywhere: Everywhere) -> None:
    count = "pgrep -fc '^sleep 1234'"
    said(box, "(setsid -f sleep 1234); (sleep 1234 &); " + WAIT % f"[[ $({count}) == 2 ]]")
    assert [said(one, count) for one in everywhere(box)] == ["2\n"] * 3


def test_a_command_in_the_middle_of_a_loop(box: Sandbox, everywhere: Everywhere) -> None:
    loop = "for i in 1 2 3 4; do echo ask $i; read -r answer; echo got $answer; done; echo done"
    typed(box, loop, until="ask 1")
    typed(box, "a\n", until="ask 2")
    copies = everywhere(box)
    for name, one in zip("xyz", copies):
        assert f"got {name}\nask 3" in typed(one, f"{name}\n", until="ask 3")
    for one in copies:
        typed(one, "b\n", until="ask 4")
        last = one.interact("c\n", timeout=LONG)
        assert (last.exit_code, last.running, last.output) == (0, False, "got c\ndone\n")
        assert said(one, "echo $i $answer") == "4 c\n"


def test_what_a_command_printed_is_heard_once(box: Sandbox, everywhere: Everywhere) -> None:
    command = "echo shown; until [[ -e /tmp/go ]]; do sleep 0.05; done; echo later"
    typed(box, command, until="shown")
    for one in everywhere(box):
        one.write_file("/tmp/go", b"")
        rest = one.interact("", timeout=LONG)
        assert (rest.output, rest.exit_code) == ("later\n", 0)


def test_files_and_processes_are_of_one_instant(both: Sandbox, everywhere: Everywhere) -> None:
    said(both, COUNTER)
    counts: list[list[int]] = []
    for _ in range(5):
        copies = everywhere(both)
        for one in copies:  # until each of them has written more
            said(one, "n=$(wc -l </tmp/log); until (( $(wc -l </tmp/log) > n + 10 )); do sleep 0.02; done")
        # Neither a number missing nor one twice, in the parent, whether it was replaced or not, and in the forks.
        counts.append([int(said(one, GAPS)) for one in copies])
    assert all(later[2] > sooner[2] for sooner, later in itertools.pairwise(counts))


def test_processes_that_come_and_go(box: Sandbox) -> None:
    # Half a look at a process that ends must not count as an obstacle, nor one that changes its parent.
    said(box, "(while :; do /bin/true; (/bin/true); done) &")
    for _ in range(100):
        assert box.lossy() == ()
    for _ in range(5):
        box.snapshot(strict=True).release()


def test_forks_and_parent_do_not_meet(box: Sandbox, everywhere: Everywhere) -> None:
    said(box, "sleep 1000 & echo before >/tmp/file")
    copies = everywhere(box)
    for number, one in enumerate(copies):
        said(one, f"echo {number} >>/tmp/file; own={number}; touch /tmp/{number}")
    for number, one in enumerate(copies):
        assert said(one, "cat /tmp/file; ls -1 /tmp; echo $own") == f"before\n{number}\n{number}\nfile\n{number}\n"
    said(copies[0], "kill %1")
    copies[1].close()
    assert said(box, "jobs -p | wc -l") == "1\n"


def test_a_snapshot_is_restored_in_any_order(box: Sandbox) -> None:
    said(box, "sleep 1000 & x=1")
    first = box.snapshot(strict=True)
    said(box, "kill %1; wait; x=2")
    second = box.snapshot(strict=True)
    for snap, answer in ((first, "1 1\n"), (second, "2 0\n"), (first, "1 1\n")):
        box.restore(snap)
        assert said(box, "echo $x $(jobs -pr | wc -l)") == answer
    first.release()
    box.restore(second)
    assert said(box, "echo $x") == "2\n"
    second.release()


def test_a_chain_of_snapshots(box: Sandbox) -> None:
    said(box, "sleep 1000 & exec 7>>/tmp/log")
    backend: Any = box.backend
    counts = []
    for number in range(60):
        said(box, f"echo {number} >&7; echo {number} >/tmp/{number}")
        snap = box.snapshot(strict=True)
        assert isinstance(snap.tree, OverlayTree)
        depth = len(snap.tree.layers)
        snap.release()
        if number in (2, 59):
            gc.collect()  # what other tests left to it
            backend.runtime.settle()
            open_here, layers = len(os.listdir("/proc/self/fd")), len(os.listdir(backend.runtime.directory / "layers"))
            inside = said(box, "fds=(/proc/$$/fd/*) pids=(/proc/[0-9]*); echo ${#fds[@]} ${#pids[@]}")
            counts.append((depth, open_here, layers, inside))
    assert counts[0] == counts[1]
    assert said(box, "wc -l </tmp/log; ls /tmp | wc -l; jobs -pr | wc -l") == "60\n61\n1\n"


def test_a_sandbox_that_wrote_little_is_left_running(box: Sandbox, everywhere: Everywhere) -> None:
    said(box, "sleep 1000 & echo 1 >/tmp/kept; git init -q /tmp/r; cd /tmp/r; touch f; git add f")
    before, status = container(box), said(box, "stat -c '%i %z' /tmp/kept")
    children = everywhere(box)[:2]
    assert container(box) is before
    assert said(box, "stat -c '%i %z' /tmp/kept; ls -a /tmp | grep -c link_remap") == f"{status}0\n"
    for child in children:
        # A copy has a later time of change, which git takes note of once.
        assert said(child, "git diff-files --name-only; git status --porcelain; git diff-files") == "f\nA  f\n"


@pytest.mark.parametrize("written", ["for i in {1..300}; do : >/tmp/$i; done", "head -c 40000000 /dev/zero >/tmp/1"])
def test_a_sandbox_that_wrote_much_is_replaced_once(box: Sandbox, everywhere: Everywhere, written: str) -> None:
    said(box, f"sleep 1000 & {written}; cksum /tmp/* >/tmp/sums")
    before = container(box)
    copies = everywhere(box)
    after = container(box)
    assert after is not before
    for one in copies:
        assert said(one, "cksum /tmp/[1-9]* | cmp - /tmp/sums; jobs -pr | wc -l") == "1\n"
    box.snapshot(strict=True).release()
    assert container(box) is after


def test_many_forks_at_once(box: Sandbox) -> None:
    said(box, "sleep 1000 &")
    children = box.fork(8, strict=True, start=True)
    try:
        assert [said(one, "jobs -pr | wc -l") for one in children] == ["1\n"] * 8
    finally:
        for child in children:
            child.close()


def test_each_fork_has_its_own_time_limit(box: Sandbox, everywhere: Everywhere) -> None:
    said(box, "sleep 4321 &")
    for one in everywhere(box):
        result = one.execute("sleep 1000", timeout=0.5)
        assert (result.timed_out, result.exit_code) == (True, 124)
        assert said(one, "jobs -pr | wc -l") == "1\n"
