"""`RepositoryBox.digest` only reads after something was written, and equals a digest that reads each time."""

from __future__ import annotations

import contextlib
import random
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from components import missing

import sandboxgym
from sandboxgym.envs.swebench.workspaces import workspace as boxes
from sandboxgym.sandbox.checkpoint import criu

pytestmark = pytest.mark.slow

TASK = "northpine__slugline-4"
Maker = Callable[..., Any]
OPERATIONS = (
    "true",
    "cat README.md",
    "echo {n} > {f}",
    "echo -n {n} > {f}; echo -n {m} > {f}",
    "touch -d 2001-01-01 {f}",
    "cp -p {f} /tmp/kept; echo {n} > {f}; touch -r /tmp/kept {f}",
    "ln -f {f} {g}",
    "ln -sf {f} {g}",
    "mv -f {f} {g}",
    "rm -f {f}",
    "chmod {mode} {f}",
    "rm -rf slugline; mkdir slugline; echo {n} > slugline/new.py",
    "rm -rf slugline; mkdir slugline",
    "git checkout -q -- . 2>/dev/null",
    "git clean -fdq",
    "git add -A; git commit -qm {n}",
    "git stash -q -u",
    "git reset -q --hard HEAD",
    "mv tests moved; mv moved tests",
    "mv tests tests{n}",
    "mkdir -p /tmp/d; echo {n} > /tmp/d/{m}",
    "rm -rf /tmp/d",
    "echo {n} > ~/note",
    "truncate -s {n} /tmp/sparse",
    'python3 -c \'import mmap; f = open("{f}", "r+b"); m = mmap.mmap(f.fileno(), 0); m[0:1] = b"{digit}"\'',
    "exec 7>>{f}; echo {n} >&7; exec 7>&-",
    "(sleep 0.05; echo {n} > {f}) &",
    "git reset -q --soft HEAD~1",
    "git rm -q --cached {f}",
    "git add -N -f {f}",
    "git update-index --assume-unchanged {f}; echo {n} > {f}",
    "echo '{f}' >> .gitignore",
    "rm -f .gitignore",
    "echo '*.txt' > .git/info/exclude",
    "rm .git/info/exclude",
    "rm -f .git/index",
    "git config core.fileMode false",
    "git checkout -q -b b{n}{m}; git status",
    "mkdir -p build/sub; echo {n} > build/sub/x.pyc; echo {m} > build/sub/y",
    "mv slugline kept{m}; ln -s kept{m} slugline",
    "chmod 000 tests",
    "chmod 755 tests",
    "python3 -c 'import slugline'",
    "mkdir -p sub; git init -q sub; echo {n} > sub/z",
    "echo '[core] excludesFile = /tmp/none' > ~/.gitconfig",
    "echo '[' > .git/config",
    "rm -rf ~; ln -s /tmp ~",
    "mv .git .gone; mv .gone .git",
    "touch 'a b' $'c\td' '*'; git add '*'",
    "echo {n} > /opt/x",
    "( for i in 1 2 3 4 5 6; do echo $i > {f}; sleep 0.02; done ) & sleep 0.03",
)
FILES = ("README.md", "slugline/core.py", "new.txt", "setup.cfg", "/tmp/x", "/root/y")


@pytest.fixture(params=["overlay", "overlay-rootless"])
def env(request: pytest.FixtureRequest, backend_of: Any, make_env: Maker) -> Iterator[Any]:
    yield make_env(**backend_of(request.param), max_episode_steps=10_000)


def from_scratch(box: boxes.RepositoryBox, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    with monkeypatch.context() as forgetful:
        forgetful.setattr(type(box.sandbox), "written", lambda self, **_: None)
        return box.digest()


@pytest.mark.parametrize("seed", [7, 8, 9])
def test_it_is_as_if_all_were_read_at_every_step(env: Any, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    env.reset(options={"task": TASK})
    assert env.unwrapped._start.whereabouts
    kept: list[tuple[Any, str]] = []
    for number in range(70):
        if kept and rng.random() < 0.1:
            snap, expected = rng.choice(kept)
            assert env.restore(snap)[1]["state_hash"] == expected
            assert (
                env.unwrapped._live().digest()[0] == from_scratch(env.unwrapped._space.box, monkeypatch)[0] == expected
            )
            continue
        if rng.random() < 0.05:  # much of it leaves a repository in which everything is read
            env.reset(options={"task": TASK})
            continue
        command = rng.choice(OPERATIONS).format(
            n=rng.randrange(1, 99), m=rng.randrange(9), digit=rng.randrange(9), mode=rng.choice(("600", "755")),
            f=rng.choice(FILES), g=rng.choice(FILES),
        )  # fmt: skip
        info = env.step(command)[4]
        if "&" in command.split(";")[-1] or command.endswith("sleep 0.03"):  # it writes while it is looked at
            info = env.step("wait")[4]
        box = env.unwrapped._space.box
        assert info["state_hash"] == from_scratch(box, monkeypatch)[0], (number, command)
        if rng.random() < 0.15:
            kept.append((sandboxgym.snapshot(env), info["state_hash"]))
            after = env.step("true")[4]
            assert after["state_hash"] == from_scratch(env.unwrapped._live(), monkeypatch)[0]
    for snap, _ in kept:
        snap.release()


def until_remembered(env: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Wait until what was written is known: on a busy machine something may be about to end after a step.

    Returns:
        What is read from now on.
    """
    reads: list[str] = []
    run = boxes.RepositoryBox.run
    monkeypatch.setattr(
        boxes.RepositoryBox, "run", lambda self, command, **more: reads.append(command) or run(self, command, **more)
    )
    deadline = time.monotonic() + 300
    while True:
        reads.clear()
        env.step("true")
        if not reads:
            return reads
        assert time.monotonic() < deadline


def test_nothing_is_read_where_nothing_was_written(env: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _nothing_is_read(env, monkeypatch)


def test_nothing_is_read_after_a_full_snapshot(make_env: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := criu.why_unavailable():
        missing("criu", reason)
    _nothing_is_read(make_env(snapshot="full", max_episode_steps=10_000), monkeypatch)


def _nothing_is_read(env: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    env.reset(options={"task": TASK})
    env.step("echo more >> README.md")
    reads = until_remembered(env, monkeypatch)
    hashes = {
        env.step(command)[4]["state_hash"] for command in ("true", "cat README.md > /dev/null", "ls / >/dev/null")
    }
    assert not reads and len(hashes) == 1
    with sandboxgym.snapshot(env) as snap:  # what was written lies in another layer now
        (child,) = env.fork(1)
        try:
            assert {each.step("true")[4]["state_hash"] for each in (env, child)} == hashes
            env.restore(snap)
            assert {env.step("true")[4]["state_hash"]} == hashes
            assert not reads
        finally:
            child.close()
    assert env.step("echo even more >> README.md")[4]["state_hash"] not in hashes
    assert reads
    reads = until_remembered(env, monkeypatch)
    (child,) = env.fork(1)
    child.close()
    env.step("A=b")
    assert not reads and env.unwrapped.last.info["state_hash"] not in hashes  # the shell's state counts


@pytest.mark.parametrize("backend", ["docker", "copy"])
def test_containers_and_copies_are_looked_at_too(
    backend: str, backend_of: Any, make_env: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = make_env(**backend_of(backend), max_episode_steps=10_000)
    env.reset(options={"task": TASK})
    commands = (
        "true", "echo more > README.md", "true", "cp -p README.md kept; echo x > README.md; touch -r kept README.md",
        "rm kept", "mkdir new; echo 1 > new/file", "mv new moved", "chmod +x slugline/slug.py",
        "git add -A; git commit -qm x", "echo 1 > ~/note", "ln -sf nowhere README.md",
    )  # fmt: skip
    hashes = []
    for command in commands:
        hashes.append(env.step(command)[4]["state_hash"])
        assert hashes[-1] == from_scratch(env.unwrapped._space.box, monkeypatch)[0], command
    assert hashes[1] == hashes[2] and len(set(hashes)) == len(hashes) - 1
    with sandboxgym.snapshot(env) as snap:
        env.step("rm -rf slugline")
        assert env.restore(snap)[1]["state_hash"] == hashes[-1]
        assert env.step("true")[4]["state_hash"] == hashes[-1]
    reads = until_remembered(env, monkeypatch)
    assert env.step("ls -R /testbed")[4]["state_hash"] == hashes[-1] and not reads
    env.step("sleep 100 &")
    assert env.unwrapped._space.box.sandbox.written() is None


@pytest.mark.parametrize("backend", ["overlay", "overlay-rootless", "docker"])
def test_git_looks_only_at_what_was_written(
    backend: str, backend_of: Any, make_env: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = make_env(**backend_of(backend), max_episode_steps=10_000)
    env.reset(options={"task": TASK})
    env.step("true")
    box = env.unwrapped._space.box

    def told() -> str:
        return box._told(box.sandbox.written())

    env.step("echo more >> README.md")
    assert "paths=(.git README.md)" in told() and "known_beside=" in told() and "base=" not in told()
    snap = sandboxgym.snapshot(env)
    env.step("mkdir -p new/inner; echo > new/inner/file; rm slugline/slug.py; echo 1 > /tmp/x")
    new = re.search(r"paths=\(\.git README\.md (new\S*) slugline/slug\.py\)", told())
    assert new is not None and new[1] in ("new", "new/inner", "new/inner/file") and "known" not in told()
    env.step("git add -A; git commit -qm x")
    assert "base=" in told()
    env.restore(snap)
    env.step("echo 1 > /tmp/x")
    assert "paths=(.git README.md)" in told() and "known" not in told()
    (child,) = env.fork(1)
    with contextlib.closing(child):
        child.step("rm -rf tests")
        box = child.unwrapped._space.box
        assert "paths=(.git README.md tests)" in told()
    env.reset(options={"task": TASK})
    env.step("echo 1 > /tmp/x")
    box = env.unwrapped._space.box
    assert "known_repository=" in told()
    for command in (
        "echo x > .gitignore",
        "mkdir -p .git/info; echo > .git/info/exclude",
        "echo > ~/.gitconfig",
        "rm -rf /testbed",
    ):
        env.step(command)
        assert told() == "", command
        env.reset(options={"task": TASK})
        env.step("true")
        box = env.unwrapped._space.box
    snap.release()


def test_a_running_process_is_never_trusted(env: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may write to a file that it has mapped, of which the times tell late."""
    env.reset(options={"task": TASK})
    writer = (
        "import mmap, os, time\n"
        "f = open('README.md', 'r+b'); m = mmap.mmap(f.fileno(), 0); m[0:1] = b'0'\n"
        "os.mkfifo('/tmp/go'); open('/tmp/ready', 'w').close()\n"
        "for line in open('/tmp/go'): m[0:1] = line[:1].encode(); open('/tmp/done' + line[:1], 'w').close()\n"
    )
    env.step(f"cat > /tmp/w.py <<'E'\n{writer}E\npython3 /tmp/w.py & until [ -e /tmp/ready ]; do :; done")
    env.step("exec 8>/tmp/go")
    first = env.step("echo 1 >&8; until [ -e /tmp/done1 ]; do :; done; rm /tmp/done1; sleep 0.1")[4]["state_hash"]
    second = env.step("echo 2 >&8; until [ -e /tmp/done2 ]; do :; done; rm /tmp/done2")[4]["state_hash"]
    assert first != second
    assert second == from_scratch(env.unwrapped._space.box, monkeypatch)[0]


def test_where_no_process_can_be_started_the_hash_is_empty(env: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    env.reset(options={"task": TASK})
    spawn = type(env.unwrapped._live().sandbox.backend).spawn

    def crowded(self: Any, argv: Any, **more: Any) -> Any:
        if argv[-1].endswith(boxes._HASH):
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return spawn(self, argv, **more)

    monkeypatch.setattr(type(env.unwrapped._space.box.sandbox.backend), "spawn", crowded)
    *_, terminated, _, info = env.step("echo x > /tmp/x")
    assert not terminated and info["state_hash"] == "" and info["progress_key"].startswith("unknown")


def test_a_shell_whose_state_is_too_large_has_no_hash_and_ends_nothing(env: Any) -> None:
    env.reset(options={"task": TASK})
    info = env.step("large=$(head -c 6000000 /dev/zero | tr '\\0' a)")[4]
    assert info["state_hash"] == ""
    with env.snapshot() as snap:
        assert env.step("unset large")[4]["state_hash"]
        env.restore(snap)
        observation, *_, info = env.step('echo "${large-left out}"')
    assert "left out" in observation and info["state_hash"]
