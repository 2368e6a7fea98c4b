"""The work is read despite damage to git's files and /tmp, and without waiting for pipes."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import pytest

import sandboxgym

LONG = 400.0
"""Seconds of a command, of which none is waited for."""
REPLACED = {
    "index": "rm .git/index; mkfifo .git/index",
    "HEAD": "rm .git/HEAD; mkfifo .git/HEAD",
    "refs": "rm -rf .git/refs; mkfifo .git/refs",
    "objects": "rm -rf .git/objects; mkfifo .git/objects",
    "all of it": "rm -rf .git; mkfifo .git",
    "alternates": "mkdir -p .git/objects/info; mkfifo .git/objects/info/alternates",
    "an object": 'for f in $(find .git/objects -type f); do rm -f "$f"; mkfifo "$f"; done',
    "a device": 'for f in $(find .git/objects -type f); do rm -f "$f"; ln -s /dev/zero "$f"; done',
}
TAKEN_OVER = ("alternates", "an object", "a device", "all of it")


def repair(env: Any) -> None:
    encoded = base64.b64encode(env.unwrapped.task.patch.encode()).decode()
    decode = f"python3 -c 'import base64, sys; sys.stdout.buffer.write(base64.b64decode(\"{encoded}\"))'"
    assert env.step(f"cd /testbed && {decode} > /tmp/p && git apply /tmp/p && rm /tmp/p")[4]["returncode"] == 0


@pytest.mark.parametrize("what", REPLACED)
def test_a_pipe_in_place_of_gits_files_is_not_waited_for(what: str, make_env: Callable[..., Any]) -> None:
    env = make_env(limits={"seconds": LONG}, max_episode_steps=-1)
    env.reset(options={"task": 0})
    repair(env)
    info = env.step(REPLACED[what])[4]
    assert not info["timed_out"] and env.unwrapped.timing["total"] < LONG / 2
    _, reward, terminated, _, info = env.step("submit")
    assert terminated and reward == 1 and info["verdict"] == "resolved", info["extraction"]
    assert env.unwrapped.timing["total"] < LONG / 2
    if what in TAKEN_OVER:
        assert "no file: " in info["extraction"] and ".git" in info["extraction"]
        assert "taken over" in info["extraction"]


@pytest.mark.parametrize("backend", ["overlay", "overlay-rootless", pytest.param("docker", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "damage",
    [
        "rm -rf /tmp; echo x > /tmp",
        "rm -rf /tmp",
        "chmod 555 /tmp",
        "rm -rf /tmp; ln -s /proc /tmp",
        "rm -rf /tmp; ln -s /nowhere /tmp",
        "rm -rf /tmp; mkfifo /tmp",
        "dd if=/dev/zero of=/tmp/filled bs=1M count=24",
    ],
)
def test_the_work_is_read_whatever_became_of_tmp(
    damage: str, backend: str, backend_of: Callable[[str], dict[str, Any]], make_env: Callable[..., Any]
) -> None:
    env = make_env(**backend_of(backend), limits={"disk": 32 * 2**20}, max_episode_steps=-1)
    env.reset(options={"task": 0})
    repair(env)
    env.step(damage)
    _, reward, _, _, info = env.step("submit")
    assert reward == 1, (info["verdict"], info["extraction"], info["infra_failure"])


@pytest.mark.parametrize("backend", ["overlay", pytest.param("docker", marks=pytest.mark.slow)])
@pytest.mark.parametrize("damage", ["rm -rf /usr/bin", "rm -rf /lib64 /usr/lib64"])
def test_equal_states_without_programs_have_one_verdict(
    damage: str, backend: str, docker_image: str, make_env: Callable[..., Any]
) -> None:
    """The shell that removed them may still live, or the state was restored: this is nobody else's fault."""
    env = make_env(backend=backend, image=docker_image, max_episode_steps=-1)
    env.reset(options={"task": 0})
    repair(env)
    assert not env.step(damage)[2]
    with sandboxgym.snapshot(env) as snap:
        found = [env.unwrapped.grade().reason, env.step("submit")[4]["verdict"]]
        sandboxgym.restore(env, snap)
        found += [env.unwrapped.grade().reason, env.step("submit")[4]["verdict"]]
    assert found == ["sandbox ended"] * 4
    env.reset(options={"task": 0})
    assert env.step("true")[4]["returncode"] == 0
