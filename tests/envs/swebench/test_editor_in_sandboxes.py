"""The editor on the files of sandboxes: odd calls get an error message, and it sees no more than commands inside."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

BACKENDS = ("overlay", "overlay-rootless", "copy", "docker")
SECRET = "what only the owner of the sandboxes knows"


@pytest.fixture(params=BACKENDS)
def env(
    request: pytest.FixtureRequest,
    backend_of: Callable[[str], dict[str, Any]],
    make_env: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    monkeypatch.setenv("SANDBOXGYM_TEST_SECRET", SECRET)
    made = make_env(**backend_of(request.param), tools="swe-agent", max_episode_steps=-1)
    made.reset(options={"task": 0})
    return made


def edit(env: Any, **arguments: Any) -> tuple[str, dict[str, Any]]:
    observation, _, terminated, _, info = env.step(json.dumps({"name": "str_replace_editor", "arguments": arguments}))
    assert not terminated, observation
    observation.encode()
    return observation, info


def shell(env: Any, command: str) -> str:
    observation: str = env.step(json.dumps({"name": "bash", "arguments": {"command": command}}))[0]
    return observation.partition("\n")[2]


def test_no_call_ends_the_episode(env: Any) -> None:
    names = ("/testbed/a\ud800", "/testbed/\udcff", "/testbed/a\0b", "/testbed/" + "a" * 300, "/d" + "/dddddddd" * 600)
    for path in names:
        for arguments in (
            {"command": "view"},
            {"command": "create", "file_text": "x"},
            {"command": "str_replace", "old_str": "a", "new_str": "b"},
            {"command": "insert", "insert_line": 0, "new_str": "x"},
            {"command": "undo_edit"},
        ):
            observation, info = edit(env, path=path, **arguments)
            assert not info["valid_action"] and "Input/output error" not in observation
    for arguments in (
        {"command": "create", "path": "/testbed/new", "file_text": "a\ud800"},
        {"command": "insert", "path": "/testbed/README.md", "insert_line": 0, "new_str": "\ud800"},
        {"command": "insert", "path": "/testbed/README.md", "insert_line": 10**30, "new_str": "x"},
    ):
        assert not edit(env, **arguments)[1]["valid_action"]
    assert shell(env, "cd /testbed && git status --porcelain") in (
        "",
        "Your command ran successfully and printed nothing.",
    )


def test_proc_shows_no_more_than_those_inside_may_see(env: Any) -> None:
    name = env.unwrapped._opened().sandbox.backend.capabilities.name
    process = shell(env, "echo $$").strip()
    links = "ln -s /proc /testbed/p; ln -s /proc/self/environ /testbed/e; ln -s /proc/self /testbed/s"
    shell(env, f"{links}; cat /proc/1/stack /proc/1/maps > /tmp/allowed")
    places = ["/proc/self/environ", "/proc/1/environ", "/testbed/e", "/testbed/s/environ", "/testbed/s/cwd/README.md"]
    places += [f"/proc/{process}/root/etc/passwd", "/testbed/p/1/stack", "/proc/1/maps", "/proc/1/auxv"]
    for path in places:
        observation, info = edit(env, command="view", path=path)
        assert SECRET not in observation
        if name != "docker":  # which asks a program inside
            assert not info["valid_action"], (path, observation)


def test_proc_is_not_written(env: Any) -> None:
    process = shell(env, "echo $$").strip()
    shell(env, f"ln -s /proc/{process} /testbed/p; ln -s /proc/self /testbed/s; ln -s /proc/{process}/comm /testbed/c")
    before = shell(env, f"cat /proc/{process}/oom_score_adj /proc/{process}/comm")
    for path in ("/testbed/p/comm", "/testbed/s/comm", "/testbed/c", "/testbed/s/new", "/testbed/p/root/tmp/new"):
        for arguments in (
            {"command": "create", "file_text": "x"},
            {"command": "insert", "insert_line": 0, "new_str": "x"},
        ):
            observation, info = edit(env, path=path, **arguments)
            assert not info["valid_action"], (path, observation)
    score, number = "/testbed/p/oom_score_adj", before.split()[0]
    assert not edit(env, command="str_replace", path=score, old_str=number, new_str="-900")[1]["valid_action"]
    assert shell(env, f"cat /proc/{process}/oom_score_adj /proc/{process}/comm") == before


def test_what_is_edited_through_a_link_is_what_commands_see(env: Any) -> None:
    """Or it is refused: over what is mounted there may be other files than below it."""
    shell(env, "cd /testbed; mkdir here; ln -s here there; ln -s /dev/shm shm; ln -s /dev dev; mkdir -p /dev/shm/s4")
    for path in ("/testbed/there/a", "/testbed/shm/s4/a", "/testbed/dev/shm/s4/b", "/testbed/shm/s4/deep/c"):
        _, info = edit(env, command="create", path=path, file_text="written\n")
        seen = shell(env, f"cat {path}; true").strip()
        assert (seen == "written") == info["valid_action"], (path, seen)
        shell(env, f"rm -rf {path}; echo inside > {path}")
        shown, _ = edit(env, command="view", path=path)
        assert "\tinside" in shown or "leads outside of the root" in shown or "does not exist" in shown
    assert "\tinside" in edit(env, command="view", path="/testbed/there/a")[0]
    shell(env, "rm -r /dev/shm/s4")
