"""States that are hard to save: non-text bytes are restored exactly; states that cannot be saved give an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sandboxgym
from sandboxgym.workers.store import SnapshotStore

MAKE_BYTES = (
    "cd /testbed; export V=$'\\xff\\xfe'; W=$'a\\xc3'; f() { echo $'\\xfd'; }; printf '\\xfa' > $'n\\xf9'; "
    "mkdir $'d\\xf0'; cd $'d\\xf0'; printf '\\xfa\\xfb'"
)
SHOW_BYTES = """
shown() { python3 -c 'import sys; print(ascii(sys.stdin.buffer.read()))'; }
printf %s "$V$W" | shown; f | shown; cat ../n* | shown; printf %s "$PWD" | tail -c 2 | shown"""
SHOWN = "b'\\xff\\xfea\\xc3'\nb'\\xfd\\n'\nb'\\xfa'\nb'd\\xf0'"


@pytest.mark.parametrize("backend", ["overlay", "copy", pytest.param("docker", marks=pytest.mark.slow)])
def test_bytes_that_are_no_text_are_saved_exactly(
    backend: str, backend_of: Callable[[str], dict[str, Any]], make_env: Callable[..., Any]
) -> None:
    env = make_env(**backend_of(backend), max_episode_steps=-1)
    env.reset(options={"task": 0})
    env.step(MAKE_BYTES)
    shown, *_, info = env.step(SHOW_BYTES)
    assert SHOWN in shown
    with sandboxgym.snapshot(env) as taken:
        saved = taken.to_bytes()
    env.reset(options={"task": 1})
    with sandboxgym.Snapshot.from_bytes(saved) as loaded:
        sandboxgym.restore(env, loaded)
    again, *_, after = env.step(SHOW_BYTES)
    assert again == shown and after["state_hash"] == info["state_hash"]
    info = env.step("submit")[4]
    assert info["verdict"] == "tests fail" and info["extraction"] == "" and "n\\371" in info["patch"]
    with sandboxgym.snapshot(env) as taken:
        saved = taken.to_bytes()
    with sandboxgym.Snapshot.from_bytes(saved) as loaded:
        assert sandboxgym.restore(env, loaded)[1]["patch"] == info["patch"]


@pytest.mark.parametrize(
    "backend", ["overlay", "overlay-rootless", "copy", pytest.param("docker", marks=pytest.mark.slow)]
)
def test_a_stored_task_continues_as_it_was_and_an_edit_adds_little(
    backend: str, backend_of: Callable[[str], dict[str, Any]], make_env: Callable[..., Any], tmp_path: Path
) -> None:
    env = make_env(**backend_of(backend), max_episode_steps=-1)
    store = SnapshotStore(tmp_path)
    env.reset(options={"task": 0})
    env.step("cd /testbed; export V=1; head -c 3000000 /dev/urandom > large")
    with sandboxgym.snapshot(env) as taken:
        assert store.put(taken).written > 3_000_000
    env.step("echo edited >> README.md")
    show = "echo $V; pwd; git status --short; md5sum large"
    with sandboxgym.snapshot(env) as taken:
        stored = store.put(taken)
    assert stored.written < 150_000
    shown, *_, info = env.step(show)
    env.reset(options={"task": 1})
    with store.get(stored.key) as loaded:
        sandboxgym.restore(env, loaded)
        again, *_, after = env.step(show)
        assert again == shown and after["state_hash"] == info["state_hash"]
        assert sandboxgym.Snapshot.from_bytes(loaded.to_bytes()).digest == loaded.digest
    with sandboxgym.snapshot(env) as taken:  # another machine's sandbox finds everything there
        assert SnapshotStore(tmp_path).put(taken).written < 150_000


@pytest.mark.parametrize("backend", ["overlay", "copy"])
def test_trees_deeper_than_a_path_are_refused_in_a_short_sentence(
    backend: str, backend_of: Callable[[str], dict[str, Any]], make_env: Callable[..., Any]
) -> None:
    env = make_env(**backend_of(backend), max_episode_steps=-1)
    env.reset(options={"task": 0})
    nest = 'import os\\nfor i in range(1500):\\n os.mkdir("deep")\\n os.chdir("deep")'
    assert env.step(f"python3 -c $'{nest}'")[4]["returncode"] == 0
    with sandboxgym.snapshot(env) as taken:
        with pytest.raises(sandboxgym.SnapshotNotSupported, match="File name too long") as caught:
            taken.to_bytes()
        assert len(str(caught.value)) < 200
        with pytest.raises(sandboxgym.SnapshotNotSupported, match="File name too long"):
            taken.to_pieces()
        env.reset(options={"task": 0})
        sandboxgym.restore(env, taken)
        assert env.step("cd deep/deep/deep/deep && pwd")[4]["returncode"] == 0
