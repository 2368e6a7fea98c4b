"""A hostile policy: no step raises, no verdict is lost, nothing is left behind."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sandboxgym
from sandboxgym.envs.swebench.grading import verdict as grading
from sandboxgym.envs.swebench.workspaces import workspace as boxes
from sandboxgym.sandbox.agent.tools import MARKER
from sandboxgym.sandbox.base import SandboxClosed, SandboxError, SandboxUnavailable
from sandboxgym.sandbox.copy.processes import processes_of
from sandboxgym.sandbox.overlay.processes import offspring

Maker = Callable[..., Any]
Policy = Callable[[random.Random, str], str]
TASK = "northpine__slugline-4"
LIMITS = {"seconds": 0.4, "processes": 48, "disk": 24 * 2**20, "files": 5000, "memory": 256 * 2**20, "output": 20_000}

PLAIN = ("ls", "cd /tmp", "cd /testbed", "git status", "echo $$; jobs", "export A=b", "cat README.md", "true", "false")
HEAVY = (
    ":(){ :|:& };:",
    "while :; do sleep 100 & done 2>/dev/null",
    "for i in $(seq 60); do sleep 1000 & done",
    "kill -STOP $$",
    "kill -STOP -1",
    "exec 0<&- 1>&- 2>&-",
    "trap 'echo trapped; cat' EXIT DEBUG ERR RETURN",
    "set -n",
    "enable -n builtin eval printf read",
    "PROMPT_COMMAND='sleep 100'",
    "readonly PATH IFS PROMPT_COMMAND",
    "eval() { :; }; printf() { :; }; builtin() { :; }",
    "unset -f $(compgen -A function); unset PROMPT_COMMAND",
    "ulimit -u 1; ulimit -n 4; ulimit -v 1000",
    "cat /dev/zero",
    "cat",
    "sleep 30",
    "yes | head -c 30000000",
    "rm -f /bin/bash /usr/bin/bash /bin/sh",
    "chmod 000 /bin /usr /lib",
    "rm -rf --no-preserve-root / 2>/dev/null",
    "mkfifo .git/index .git/HEAD",
    "git config core.fsmonitor 'sleep 100'; git config core.worktree /",
    "head -c 60000000 /dev/zero > /tmp/big",
    "dd if=/dev/zero of=/dev/shm/big bs=1M count=40",
    "mkdir -p /tmp/many; cd /tmp/many; for i in $(seq 6000); do : > $i; done",
    "kill -9 -1",
    "rm -rf /tmp /root; mkfifo /tmp",
    "mv /testbed /elsewhere; ln -s /proc/self/root /testbed",
    "rm -rf /tmp; ln -s / /tmp",
    "(trap '' TERM INT HUP; while :; do :; done) &",
    "setsid bash -c 'while :; do echo x >> /tmp/x; sleep 0.01; done' & disown",
    "python3 -c 'x = bytearray(10**9)'",
    "d=/tmp/deep; for i in $(seq 300); do d=$d/dddddddddddddddd; mkdir -p $d 2>/dev/null || break; done",
)
"""Those that take until a limit, of time, processes or the disk."""
HARM = (
    "kill -9 $$",
    "pkill -9 bash; killall5",
    "exit",
    "exit 3; echo no",
    "exec true",
    "exec </dev/null >/dev/null 2>&1",
    "exec 7>/tmp/open",
    "set -e; false",
    "set -u; echo $nothing",
    "set -xv",
    "trap '' INT",
    ':() { echo "$*" >> /tmp/colon; }',
    "alias ls=rm; shopt -s expand_aliases",
    "PATH=/nowhere; HOME=/proc; IFS=x",
    "head -c 300000 /dev/urandom",
    "printf '\\033[2J\\033]0;title\\007\\0\\x1e{\\x1e'",
    "head -c 100000 /dev/zero | tr '\\0' a",
    "rm -rf /testbed",
    "rm -rf /testbed/.git",
    "chmod -R 000 /testbed /tmp",
    "touch .git/index.lock; mkdir sub; git init -q sub",
    "rm -rf /run/.sandboxgym/*; head -c 100000 /dev/urandom > /run/.sandboxgym/shell/status",
    "mount -t tmpfs x /tmp; unshare -Ur true; chroot /",
    "cat <<EOF\nno end",
    "echo 'unbalanced",
    'echo "$(',
    "if true; then",
    "} ; fi ; done )",
    f"echo {MARKER}",
    f"echo {MARKER}; head -c 5000 /dev/urandom",
    f"echo {MARKER}; git diff",
    "submit",
    "x" * 3_000_000,
    "echo " + "y" * 200_000,
    "a\0b",
    "",
    "```bash\nls\n```\n```bash\npwd\n```",
    '{"command": ["ls"]}',
    '{"name": "bash", "arguments": "{"}',
    "[" * 5000,
    '{"command": ' * 3000,
    "\ud800 lone",
    "\x1b[31m\u202e\x07\x7f",
    "ls\r\npwd\r",
)
EDITS = (
    "str_replace_editor view /testbed/README.md",
    "str_replace_editor view /dev/zero",
    "str_replace_editor create /testbed/a.py --file_text 'x'",
    "str_replace_editor view /proc/kcore",
    "str_replace_editor insert /testbed/README.md --insert_line -5 --new_str y",
    '{"name": "str_replace_editor", "arguments": {"command": "create", "path": "/tmp", "file_text": "\\u0000"}}',
    '{"name": "str_replace_editor", "arguments": {"command": "view", "path": "../..\\u0000", "view_range": [9, -9]}}',
    '{"name": "submit", "arguments": {}}',
)


SPARING_PLAIN = ("ls", "cd /testbed", "git status", "echo $$; jobs", "export A=b", "cat README.md", "true", "false")
SPARING_HARM = (
    *("kill -9 $$", "kill -STOP $$", "exit", "exit 3; echo no", "exec true", "exec </dev/null >/dev/null 2>&1"),
    *("exec 0<&- 1>&- 2>&-", "set -e; false", "set -u; echo $nothing", "set -xv", "set -n", "trap '' INT"),
    "trap 'echo trapped; cat' EXIT DEBUG ERR RETURN",
    "enable -n builtin eval printf read",
    "PROMPT_COMMAND='sleep 100'",
    "readonly PATH IFS PROMPT_COMMAND",
    "eval() { :; }; printf() { :; }; builtin() { :; }",
    "unset -f $(compgen -A function); unset PROMPT_COMMAND",
    "ulimit -n 4; ulimit -v 1000",
    "PATH=/nowhere; IFS=x",
    *("cat", "sleep 30", "sleep 1000 & sleep 1000 & setsid sleep 1000 &", "cat <<EOF\nno end"),
    "(trap '' TERM INT HUP; sleep 1000) &",
    *("rm -rf /testbed", "rm -rf /testbed/.git", "chmod -R 000 /testbed", "mv /testbed /testbed-elsewhere"),
    "cd /testbed && touch .git/index.lock && mkdir sub && git init -q sub",
    "cd /testbed && rm .git/index && mkfifo .git/index",
    "head -c 300000 /dev/urandom",
    "yes | head -c 3000000",
    "printf '\\033[2J\\033]0;title\\007\\0\\x1e{\\x1e'",
    *("echo 'unbalanced", 'echo "$(', "if true; then", "} ; fi ; done )"),
    *(f"echo {MARKER}", f"echo {MARKER}; head -c 5000 /dev/urandom", f"echo {MARKER}; git diff", "submit"),
    *("x" * 3_000_000, "a\0b", "", '{"command": ["ls"]}', "[" * 5000, "\ud800 lone", "\x1b[31m\u202e\x07\x7f"),
)
"""For a backend that isolates nothing: what reaches only its own shell and the repository, whatever part of it runs."""


def drawn(rng: random.Random, tools: str) -> str:
    """An action: one of the above, two of them in a line, a part of one, or noise."""
    kind = rng.random()
    if tools == "swe-agent" and kind < 0.25:
        return rng.choice(EDITS)
    if kind < 0.5:
        return rng.choice(PLAIN)
    first = rng.choice(HEAVY if rng.random() < 0.04 else HARM)
    if kind < 0.75:
        return first
    if kind < 0.85:
        return f"{first}\n{rng.choice(PLAIN)}"
    if kind < 0.93:
        return first[: rng.randrange(1, 80)]
    return noise(rng)


def sparing(rng: random.Random, tools: str) -> str:
    """Draw a command as `drawn`, where nothing is isolated: no bomb, and no part of anything that names a path."""
    kind = rng.random()
    if kind < 0.4:
        return rng.choice(SPARING_PLAIN)
    first = rng.choice(SPARING_HARM)
    if kind < 0.8:
        return first
    if kind < 0.9:
        return f"{first}\n{rng.choice(SPARING_PLAIN)}"
    if kind < 0.95:
        return first if "/" in first or "rm" in first else first[: rng.randrange(1, 80)]
    return "".join(character for character in noise(rng) if not character.isascii() or character in "\0\x1b'\"({)}[]`$")


def noise(rng: random.Random) -> str:
    """Bytes at random."""
    return bytes(rng.randrange(256) for _ in range(rng.randrange(1, 60))).decode("latin-1")


def play(env: Any, *, seed: int, steps: int, tools: str, policy: Policy) -> dict[str, int]:
    """Verdicts of so many steps; each of the environment's promises is looked at on the way."""
    rng = random.Random(seed)
    verdicts: dict[str, int] = {}
    played: list[str] = []
    episode = 0
    try:
        env.reset(seed=seed, options={"task": TASK})
        for _ in range(steps):
            action = policy(rng, tools)
            played.append(action)
            observation, reward, terminated, truncated, info = env.step(action)
            assert isinstance(observation, str) and env.observation_space.contains(observation)
            assert isinstance(info["state_hash"], str) and isinstance(info["progress_key"], str)
            observation.encode()  # what holds no lone surrogate
            assert reward == 0
            if not (terminated or truncated):
                assert info["verdict"] is None and not info["masked"]
                continue
            verdict = info["verdict"]
            verdicts[verdict] = verdicts.get(verdict, 0) + 1
            if verdict in ("sandbox ended", "infra failure"):
                assert terminated and info["masked"] and info["infra_failure"]
            if episode % 5 == 0:  # an end is a state like any other
                with sandboxgym.snapshot(env) as snap:
                    (child,) = env.fork(1)
                    child.close()
                    assert {**env.restore(snap)[1], "lossy": []} == {**info, "lossy": []}  # capturing may tell more
                assert env.unwrapped.grade().resolved is False
                env.render()
            episode += 1
            played.clear()
            env.reset(options={"task": TASK})
        played.append("the last reset")
        env.reset(options={"task": TASK})
        assert "README.md" in env.step("cd /testbed; ls")[0]
    except BaseException:
        print(f"seed {seed}; this episode:", *(f"  {action[:300]!a}" for action in played), sep="\n")
        raise
    return verdicts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "steps", "tools"),
    [
        ("overlay", 900, "bash"),
        ("overlay", 800, "swe-agent"),
        ("overlay-rootless", 300, "bash"),
        ("docker", 40, "bash"),
        ("copy", 60, "bash"),
    ],
)
def test_a_hostile_policy_never_makes_a_step_raise(
    backend: str, steps: int, tools: str, backend_of: Callable[[str], dict[str, Any]], make_env: Maker
) -> None:
    """2,100 steps in all."""
    limits = {**LIMITS, "seconds": 1.0} if backend == "docker" else LIMITS
    env = make_env(
        **backend_of(backend), limits=limits, tools=tools, max_episode_steps=8, grade_at=0, grade_timeout=5.0
    )
    policy = sparing if backend == "copy" else drawn
    verdicts = play(env, seed=20, steps=steps, tools=tools, policy=policy)
    assert verdicts and "resolved" not in verdicts
    check_nothing_is_left(env)


def check_nothing_is_left(env: Any) -> None:
    """Close it: no container, process or mount of its sandbox stays."""
    backend = env.unwrapped._space.box.sandbox.backend
    name = backend.capabilities.name
    if name == "docker":
        container = backend._container
        env.close()
        with pytest.raises(Exception, match="No such container"):
            container.api.inspect_container(container.id)
    elif name == "copy":
        root = backend.root
        env.close()
        assert not root.exists() and not processes_of(root.parent.name, [])
    else:
        box, store = backend.container, str(backend.runtime.directory)
        env.close()
        assert box.ended and not offspring(box.pid)
        assert not [line for line in Path("/proc/self/mounts").read_text().splitlines() if store in line]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "again", "verdict"),
    [
        (SandboxError("these 3 processes do not end: 1, 2, 3"), None, "sandbox ended"),
        (SandboxClosed("the processes of the sandbox were killed from outside"), None, "sandbox ended"),
        (BlockingIOError(11, "Resource temporarily unavailable"), None, "sandbox ended"),
        (TimeoutError("no answer"), None, "sandbox ended"),
        (RuntimeError("what nobody thought of \x1b[2J"), None, "sandbox ended"),
        (SandboxUnavailable("the daemon is gone"), SandboxUnavailable("the daemon is gone"), "infra failure"),
        (OSError(28, "No space left on device"), OSError(28, "No space left on device"), "infra failure"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_what_a_sandbox_raises_is_a_verdict(
    error: Exception, again: Exception | None, verdict: str, make_env: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise error

    def cannot(*_: Any, **__: Any) -> Any:
        assert again is not None
        raise again

    env = make_env()
    start = env.reset(options={"task": TASK})[1]
    env.step("echo more >> README.md")
    with monkeypatch.context() as broken:
        broken.setattr(boxes.RepositoryBox, "execute", fails)
        if again is not None:
            broken.setattr(boxes.RepositoryBox, "restore", cannot)
        observation, reward, terminated, _, info = env.step("true")
        assert (reward, terminated, info["verdict"], info["masked"]) == (0, True, verdict, True)
        assert info["infra_failure"].isprintable() and "\x1b" not in observation
        assert info["state_hash"] == start["state_hash"]
        assert env.unwrapped.grade().reason == verdict
        with sandboxgym.snapshot(env) as snap:
            assert env.restore(snap)[1] == info
            env.fork(1)[0].close()
    env.reset(options={"task": TASK})
    assert "README.md" in env.step("ls")[0]


@pytest.mark.slow
def test_what_fails_while_work_is_graded_is_a_verdict(make_env: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    env = make_env()
    env.reset(options={"task": TASK})

    def fails(*_: Any, **__: Any) -> Any:
        raise MemoryError("a log of all memory")

    monkeypatch.setattr(grading, "grade", fails)
    assert env.unwrapped.grade().reason == "infra failure"
    _, reward, terminated, _, info = env.step("submit")
    assert (reward, terminated, info["verdict"], info["masked"]) == (0, True, "infra failure", True)


@pytest.mark.slow
def test_a_users_time_limit_is_not_taken_for_the_policys(make_env: Maker) -> None:
    import signal

    class TooLong(Exception):
        pass

    def alarm(*_: Any) -> None:
        raise TooLong

    env = make_env()
    env.reset(options={"task": TASK})
    before = signal.signal(signal.SIGALRM, alarm)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(TooLong):
            env.step("sleep 20")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
