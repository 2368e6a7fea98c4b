"""Worker processes and threads, and `RemoteEnv`: an environment in a worker behaves like a local one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import pytest
import traces
import worker_envs
from worker_envs import Trouble, Unpicklable

import sandboxgym
from sandboxgym.workers.env_host import CallTimedOut, RemoteTraceback, WorkerDied
from sandboxgym.workers.remote import RemoteEnv
from sandboxgym.workers.worker import InlineWorker, ProcessWorker, ThreadWorker

worker_envs.register()


@pytest.fixture(scope="module")
def process():
    worker = ProcessWorker(keep=2)
    yield worker
    worker.close()


@pytest.fixture
def remote():
    made = []

    def make(env="toys/Trouble-v0", **arguments):
        made.append(RemoteEnv(env, **arguments))
        return made[-1]

    yield make
    for env in made:
        env.close()


def gone(pid: int, seconds: float = 45.0) -> bool:
    """True if the process ends; as a zombie of somebody else's it has ended too."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("kind", [InlineWorker, ThreadWorker, ProcessWorker])
def test_outcomes_in_order_with_exceptions_among_them(kind):
    from sandboxgym.workers.env_host import Call

    worker = kind()
    try:
        worker.call(0, "make", Trouble)
        worker.call(0, "reset", 1, None)
        worker.post([Call(0, "step", ("one",)), Call(0, "step", ("raise",)), Call(0, "step", ("two",))])
        first, second, third = (worker.take() for _ in range(3))
        assert first.get()[0] == "one 2"
        with pytest.raises(RuntimeError, match="the sandbox is gone"):
            second.get()
        assert third.get()[0] == "two 3"
        with pytest.raises(AttributeError, match="nothing_like_it"):
            worker.call(0, "attribute", "nothing_like_it", (), {})
    finally:
        worker.close()
        worker.close()
    assert not worker.alive


def test_exceptions_keep_their_type_and_carry_the_remote_traceback(process):
    process.call(1, "make", Trouble)
    with pytest.raises(RuntimeError, match="the sandbox is gone") as caught:
        process.call(1, "reset", None, {"do": "raise"})
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert "worker_envs.py" in str(caught.value.__cause__)
    with pytest.raises(SystemExit):  # does not end the worker
        process.call(1, "reset", None, {"do": "exit"})
    assert process.call(1, "reset", 1, None)[0] == "start 1"


def test_an_exception_that_cannot_be_pickled_arrives_by_name(process):
    def raises():
        raise Unpicklable(1, 2)

    with pytest.raises(sandboxgym.workers.env_host.EnvFailure, match="Unpicklable: 1 and 2"):
        process.call(2, "make", raises)


def test_lambdas_and_local_classes_reach_the_worker(process):
    class Local(Trouble):
        def _text(self):
            return "local"

    process.call(3, "make", lambda: Local())
    assert process.call(3, "reset", None, None)[0] == "local"


@pytest.mark.parametrize("kind", [ThreadWorker, ProcessWorker])
def test_a_call_that_takes_too_long(kind):
    worker = kind()
    try:
        worker.call(0, "make", lambda: Trouble(pause=0.5))
        worker.call(0, "reset", 1, None)
        generation = worker.generation
        with pytest.raises(CallTimedOut, match=r"longer than 0\.05 s"):
            worker.call(0, "step", "look", timeout=0.05)
        assert not worker.alive
        worker.call(0, "make", Trouble)
        assert worker.generation == generation + 1
        assert worker.call(0, "reset", 1, None)[0] == "start 1"
    finally:
        worker.close()


def test_an_interrupted_call_does_not_answer_the_next_one(process):
    process.call(4, "make", Trouble)
    process.call(4, "reset", 1, None)
    process.post([sandboxgym.workers.env_host.Call(4, "step", ("late",))])
    process.settle()  # what a KeyboardInterrupt while waiting leads to
    process.call(4, "make", Trouble)
    assert process.call(4, "reset", 1, None)[0] == "start 1"


def test_the_pipe_carries_any_text(process):
    text = "zero \0 \U0001f600 \u202e קו\n" + "x" * 300_000
    process.call(5, "make", Trouble)
    process.call(5, "reset", 1, None)
    assert process.call(5, "step", text)[0] == f"{text} 2"


def test_a_snapshot_is_shipped_once_and_again_when_it_was_forgotten(process):
    local = gym.make("toys/Trouble-v0")
    local.reset(seed=1)
    snaps = []
    for word in "abc":
        local.step(word)
        snaps.append(local.snapshot())
    process.call(6, "make", sandboxgym.workers.env_host.env_maker("toys/Trouble-v0"))
    before = process.snapshots_shipped
    for snap in (snaps[0], snaps[0], snaps[1], snaps[0]):
        process.restore(6, snap, None)
    assert process.snapshots_shipped - before == 2
    process.restore(6, snaps[2], None)  # the worker keeps two
    assert process.restore(6, snaps[1], None)[0] == "b 3"
    assert process.snapshots_shipped - before == 4
    other = ProcessWorker(keep=1)  # believes to hold more than it does
    try:
        other.call(0, "make", sandboxgym.workers.env_host.env_maker("toys/Trouble-v0"))
        other._keep = 9
        for snap in (*snaps, *snaps):
            assert other.restore(0, snap, None)[0] == snap_text(local, snap)
    finally:
        other.close()


def snap_text(env, snap):
    return env.restore(snap)[0]


@pytest.mark.parametrize("env_id", traces.TOYS)
def test_a_remote_env_is_the_env(remote, env_id):
    """The same episode, snapshot and random streams, and snapshots that go both ways."""
    local = traces.started(env_id, steps=2)
    there = remote(env_id, max_episode_steps=traces.LIMIT)
    there.action_space.seed(3)
    there.observation_space.seed(3)
    there.reset(seed=3, options={"game": 0})
    traces.trace(there, traces.ACTIONS[env_id][:2])
    mine, theirs = local.snapshot(), there.snapshot()
    assert theirs.digest == mine.digest
    assert theirs.env_id == env_id
    assert there.spec.id == env_id

    def rest(env):
        steps = traces.trace(env, traces.ACTIONS[env_id][2:])
        return steps, env.action_space.sample(), traces.plain(env.observation_space.sample())

    want = rest(local)
    assert rest(there) == want
    for env, snap in ((there, mine), (local, theirs), (there, theirs), (local, mine)):
        env.restore(snap)
        assert rest(env) == want


def test_wrappers_around_a_remote_env_are_captured_too(remote):
    there = gym.wrappers.TimeLimit(remote("toys/Trouble-v0"), 3)
    there.reset(seed=1)
    there.step("one")
    snap = sandboxgym.snapshot(there)
    there.step("two")
    assert there.step("three")[3], "truncated by the outer limit"
    sandboxgym.restore(there, snap)
    assert [there.step(word)[3] for word in ("two", "three")] == [False, True]
    bare = remote("toys/Trouble-v0")
    with pytest.raises(sandboxgym.SnapshotMismatch):
        sandboxgym.restore(bare, snap)


@pytest.mark.parametrize("fork_to", ["process", "worker"])
def test_forks_of_a_remote_env_are_those_of_the_env(remote, fork_to):
    local = gym.make("toys/Dice-v0")
    there = remote("toys/Dice-v0", fork_to=fork_to)
    for env in (local, there):
        env.reset(seed=1)
        env.step(0)
    mine, theirs = local.fork(2, seed=5), there.fork(2, seed=5)
    try:
        assert [[c.step(0)[0] for _ in range(3)] for c in theirs] == [[c.step(0)[0] for _ in range(3)] for c in mine]
        assert there.step(0)[0] == local.step(0)[0], "the source goes on untouched"
        pids = {child._slots.worker.pid for child in (there, *theirs)}
        assert len(pids) == (3 if fork_to == "process" else 1)
        there.close()
        assert theirs[0].step(0)[0] == mine[0].step(0)[0], "closing one hurts no other"
    finally:
        for child in theirs:
            child.close()
    assert all(gone(pid) for pid in pids)


def test_a_dead_worker_is_a_typed_error_and_restore_revives(remote):
    there = remote("toys/Trouble-v0")
    there.reset(seed=1)
    there.step("one")
    snap = there.snapshot()
    with pytest.raises(WorkerDied, match="signal 9"):
        there.step("die")
    with pytest.raises(WorkerDied, match="reset"):
        there.step("two")
    assert there.restore(snap)[0] == "one 2"
    assert there.step("two")[0] == "two 3"


def test_typed_errors_of_a_remote_env(remote):
    there = remote("toys/Trouble-v0")
    with pytest.raises(sandboxgym.ResetNeeded):
        there.snapshot()
    there.reset(seed=1)
    snap = there.snapshot()
    snap.release()
    with pytest.raises(sandboxgym.SnapshotReleased):
        there.restore(snap)
    other = gym.make("toys/Dice-v0")
    other.reset(seed=1)
    with pytest.raises(sandboxgym.SnapshotMismatch):
        there.restore(other.snapshot())
    assert there.step("on")[0] == "on 2", "a refused restore changes nothing"
    with pytest.raises(AttributeError, match="worker"):
        _ = there.np_random
    there.close()
    there.close()
    with pytest.raises(gym.error.ClosedEnvironmentError):
        there.reset()


OWNER = """
import os, sys, threading, time
from sandboxgym.workers.worker import ProcessWorker
workers = [ProcessWorker() for _ in range(2)]
class Local:  # neither importable nor guarded by `if __name__ == "__main__"`
    pass
import worker_envs
for worker in workers:
    worker.call(0, "make", lambda: worker_envs.Trouble())
    worker.call(0, "reset", 1, None)
"""


def owner(code: str) -> subprocess.Popen[str]:
    path = os.pathsep.join((str(Path(__file__).parents[2]), os.path.dirname(worker_envs.__file__)))
    command = [sys.executable, "-c", OWNER + code]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})


PRINT = "print(*(worker.pid for worker in workers), flush=True)\n"


@pytest.mark.parametrize("forked", [False, True], ids=["alone", "with a fork that holds the pipes open"])
def test_no_worker_outlives_a_killed_owner(forked):
    """One is idle, the other in the middle of a step of a minute."""
    fork = "child = os.fork()\nif not child: time.sleep(600); os._exit(0)\n" if forked else "child = 0\n"
    busy = "threading.Thread(target=workers[0].call, args=(0, 'step', 'hang'), daemon=True).start()\ntime.sleep(.2)\n"
    process = owner(fork + busy + PRINT + "print(child, flush=True)\ntime.sleep(600)")
    with process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        child = int(process.stdout.readline())
        assert len(pids) == 2
        process.kill()
        try:
            assert all(gone(pid) for pid in pids)
        finally:
            if child:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("end", ["", "import sys; sys.exit(3)", "raise ValueError"])
def test_an_owner_that_exits_without_close_leaves_nothing(end):
    with owner(PRINT + end) as process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        process.wait(120)
    assert len(pids) == 2
    assert all(gone(pid) for pid in pids)


def test_a_fork_of_the_owner_does_not_end_its_workers():
    code = """
if not os.fork():
    sys.exit(0)
os.wait()
print([worker.call(0, "step", "alive")[0] for worker in workers])
"""
    with owner(code) as process:
        output, _ = process.communicate(timeout=300)
    assert output == "['alive 2', 'alive 2']\n"


def test_an_interrupt_from_the_keyboard_does_not_reach_the_environments(process):
    process.call(7, "make", Trouble)
    process.call(7, "reset", 1, None)
    os.kill(process.pid, signal.SIGINT)
    assert process.call(7, "step", "on")[0] == "on 2"
