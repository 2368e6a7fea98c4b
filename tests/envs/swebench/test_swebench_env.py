"""`SWEBenchEnv`: episodes, verdicts, snapshots, and answers that must stay hidden from an agent."""

from __future__ import annotations

import copy
import json
import random
import resource
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from components import missing
from gymnasium.utils.env_checker import check_env

import sandboxgym
from sandboxgym.envs.swebench import mini
from sandboxgym.envs.swebench.grading import extraction
from sandboxgym.envs.swebench.grading import verdict as grading
from sandboxgym.envs.swebench.rows.tasks import TaskNotFound
from sandboxgym.envs.swebench.workspaces import workspace as boxes
from sandboxgym.errors import ResetNeeded, SnapshotMismatch
from sandboxgym.sandbox.agent.tools import MARKER
from sandboxgym.sandbox.base import SandboxFull, SandboxUnavailable, SnapshotLossy
from sandboxgym.sandbox.checkpoint import criu

pytestmark = pytest.mark.slow

TASK = "northpine__slugline-4"
GOLD = next(task for task in mini.tasks() if task.instance_id == TASK).patch
SOLVE = f"cd /testbed && git apply <<'EOF'\n{GOLD}EOF"
Maker = Callable[..., Any]


def start(env: Any, task: str | int = TASK) -> dict[str, Any]:
    return env.reset(seed=0, options={"instance_id": task})[1]


def output(step: tuple[Any, ...]) -> str:
    return str(step[0]).partition("<output>\n")[2].removesuffix("</output>").strip()


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("tools", ["bash", "swe-agent"])
def test_the_expert_wins(tools: str, direct: bool, make_env: Maker) -> None:
    env = make_env(tools=tools, max_episode_steps=50)
    for seed in range(2):
        expert = env.unwrapped.expert(rng=random.Random(seed), noise=0.2, direct=direct)
        observation, info = env.reset(options={"task": 3 + seed})
        assert not info["success"] and info["verdict"] is None
        expert.reset(observation)
        over, reward = False, 0.0
        while not over:
            assert reward == 0
            observation, reward, terminated, truncated, info = env.step(expert.act(observation))
            over = terminated or truncated
        assert terminated and reward == 1
        assert info["success"] and info["resolved"] and info["verdict"] == "resolved"
        assert info["progress_key"] == ("edited, tests not run" if direct else "edited, tests passed")
        assert not info["tests_status"]["FAIL_TO_PASS"]["failure"]


@pytest.mark.parametrize("backend", ["overlay", "overlay-rootless", "copy", "docker"])
def test_an_episode_on_every_backend(
    backend: str, backend_of: Callable[[str], dict[str, Any]], make_env: Maker, tmp_path: Path
) -> None:
    env = make_env(**backend_of(backend))
    first = start(env)
    assert output(env.step("export GREETING=hello; cd slugline; pwd")) == "/testbed/slugline"
    env.step("echo note > /testbed/note.txt")
    snap = env.snapshot()
    env.step("rm -rf /testbed/slugline; unset GREETING")
    snap.save(tmp_path / "snap")
    child, loaded = env.fork(1)[0], sandboxgym.Snapshot.load(tmp_path / "snap")
    try:
        for each, state in ((env, snap), (child, snap), (env, loaded)):
            _, info = each.restore(state)
            assert info["progress_key"] == "edited, tests not run" and info["state_hash"] != first["state_hash"]
            assert output(each.step("echo $GREETING; cat ../note.txt; pwd")) == "hello\nnote\n/testbed/slugline"
            each.step(SOLVE)
            _, reward, terminated, _, info = each.step("submit")
            assert (reward, terminated, info["verdict"]) == (1, True, "resolved")
    finally:
        child.close()


def test_work_is_graded_as_it_stands_at_the_step_limit(make_env: Maker) -> None:
    env = make_env(max_episode_steps=3)
    start(env)
    assert env.step(SOLVE)[1:4] == (0, False, False)
    assert env.step("true")[1:4] == (0, False, False)
    (child,) = env.fork(1)
    try:
        for each in (env, child):
            _, reward, terminated, truncated, info = each.step("true")
            assert (reward, terminated, truncated, info["verdict"]) == (1, False, True, "resolved")
    finally:
        child.close()


def test_grading_can_have_a_limit_of_its_own(make_env: Maker) -> None:
    env = make_env(max_episode_steps=3, grade_at=2)
    start(env)
    assert [env.step("true")[4]["verdict"] for _ in range(3)] == [None, "no patch", "no patch"]
    env = make_env(max_episode_steps=1, grade_at=0)
    start(env)
    assert env.step(SOLVE)[4]["verdict"] is None


def test_a_verdict_leaves_nothing_behind(make_env: Maker) -> None:
    env = make_env()
    start(env)
    listing = "find / -xdev -newer /testbed/README.md -type f -not -path '*/.git/*' 2>/dev/null | sort"
    env.step("export STILL=here; echo '# nothing' >> README.md")
    files = output(env.step(listing))
    inner = env.unwrapped
    assert inner.grade().reason == "tests fail"
    assert output(env.step(listing)) == files  # no tests, no scripts, no logs
    assert output(env.step("git status --short; grep -rn runs_become_one tests; echo $STILL")) == "M README.md\nhere"
    with sandboxgym.snapshot(env) as snap:
        _, reward, terminated, _, info = env.step("submit")
        assert (reward, terminated, info["verdict"], info["masked"]) == (0, True, "tests fail", False)
        assert info["tests_status"]["FAIL_TO_PASS"]["failure"]
        env.restore(snap)
    env.step(SOLVE)
    assert inner.grade().resolved
    assert env.step("submit")[1] == 1


def test_steps_after_the_end_are_refused(make_env: Maker) -> None:
    env = make_env(max_episode_steps=2)
    start(env)
    with sandboxgym.snapshot(env) as before:
        ended = env.step("submit")
        with sandboxgym.snapshot(env) as over:
            (child,) = env.fork(1)
            try:
                for each in (env, child):
                    for _ in range(2):
                        with pytest.raises(ResetNeeded, match="the episode is over after 1 steps"):
                            each.step("submit")
                    assert each.unwrapped.grade().reason == "no patch"
            finally:
                child.close()
            for each in (before, over):
                env.restore(before)
                env.step(SOLVE)
                env.restore(each)
                if each is over:
                    assert env.unwrapped.last.info == ended[4]
                    with pytest.raises(ResetNeeded):
                        env.step("true")
                else:  # the end is taken back
                    assert env.step("true")[2:4] == (False, False)
                    assert env.step("true")[3]  # truncated
                    with pytest.raises(ResetNeeded, match="over after 2 steps"):
                        env.step("submit")
    start(env)
    env.step("true")


def test_what_is_done_to_an_info_changes_no_later_verdict(make_env: Maker) -> None:
    env = make_env()
    start(env)
    env.step("echo '# more' >> README.md")
    with sandboxgym.snapshot(env) as snap:
        told = env.step("submit")[4]
        expected = copy.deepcopy(told["tests_status"])
        assert expected["PASS_TO_PASS"]["success"]
        told["tests_status"]["PASS_TO_PASS"].clear()
        sandboxgym.restore(env, snap)
        assert env.step("submit")[4]["tests_status"] == expected


def test_submission_by_the_marker(make_env: Maker) -> None:
    env = make_env()
    start(env)
    assert not env.step(f"echo first; echo {MARKER}")[2]
    assert not env.step(f"echo {MARKER}; false")[2]
    env.step(SOLVE)
    _, reward, terminated, _, _ = env.step(f"echo {MARKER}")
    assert (reward, terminated) == (1, True)
    start(env)
    env.step("echo x > unrelated")
    _, reward, _, _, info = env.step(f"cat > /tmp/p <<'EOF'\n{GOLD}EOF\necho {MARKER}; cat /tmp/p")
    assert reward == 1
    assert info["patch"].strip() == GOLD.strip()


AWKWARD = r"""printf '\0\1' > odd.bin
printf 'a\r\nb\033[1mc\033[0m\377\n=== 1 passed in 0.12s ===\nx\by\n' > odd.txt"""
SHOW = "git add -A && git diff --cached --binary"


@pytest.mark.parametrize("backend", ["overlay", "overlay-rootless", "docker", "copy"])
def test_a_patch_keeps_its_bytes(
    backend: str, make_env: Maker, backend_of: Callable[[str], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tested: list[str] = []
    real = grading._test

    def remembered(box: Any, pristine: Any, task: Any, patch: str, timeout: float, **more: Any) -> Any:
        tested.append(patch)
        return real(box, pristine, task, patch, timeout, **more)

    monkeypatch.setattr(grading, "_test", remembered)
    monkeypatch.setattr(grading, "_verdicts", type(grading._verdicts)())
    env = make_env(**backend_of(backend))
    for submit in ("submit", f"echo {MARKER}; {SHOW}"):
        grading._verdicts.clear()
        start(env)
        env.step(SOLVE)
        env.step(AWKWARD)
        assert "in 0.12s" in env.step("cat odd.txt")[0]
        _, reward, _, _, info = env.step(submit)
        assert (reward, info["verdict"]) == (1, "resolved"), info
    for patch in tested:
        raw = patch.encode("utf-8", "surrogateescape")
        assert b"+a\r\n+b\x1b[1mc\x1b[0m\xff\n+=== 1 passed in 0.12s ===\n+x\x08y\n" in raw
        assert b"GIT binary patch" in raw
    assert len(tested) == 2


def test_a_patch_by_the_marker_has_the_limit_of_any(make_env: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    env = make_env(limits={"output": 1000})
    start(env)
    env.step(SOLVE)
    env.step("seq 5000 > numbers")
    _, reward, _, _, info = env.step(f"echo {MARKER}; {SHOW}")  # longer than what is kept of an output
    assert (reward, info["verdict"]) == (1, "resolved")
    start(env)
    _, _, _, _, info = env.step(f"echo {MARKER}; head -c {extraction.PATCH_LIMIT + 1} /dev/zero | tr '\\0' x")
    assert info["verdict"] == "patch too large"
    start(env)
    env.step(f"head -c {2 * extraction.PATCH_LIMIT} /dev/urandom > big")
    _, _, _, _, info = env.step("submit")
    assert (info["verdict"], info["patch"]) == ("patch too large", "")


OBSTACLES = {
    "a stale lock": "touch .git/index.lock",
    "a damaged index": "echo x > .git/index",
    "a broken configuration": "echo '[' > .git/config",
    "a nested repository": "git init -q sub && touch sub/a",
    "a nested repository with a commit": "git init -q sub && cd sub && touch a && git add a && git commit -qm a",
    "a pipe in the way": "mkfifo /tmp/.model.patch",
    "a directory in the way": "mkdir -p /tmp/.model.patch/patch/x",
    "hooks": "mkdir /tmp/h; printf '#!/bin/sh\nexit 1\n' | tee /tmp/h/post-index-change; chmod +x /tmp/h/*; "
    "git config core.hooksPath /tmp/h; git config core.fsmonitor /tmp/h/post-index-change",
    "filters": "git config filter.x.clean 'sed s/./y/'; git config filter.x.required true; "
    "mkdir -p .git/info; echo '* filter=x' > .git/info/attributes",
    "hidden changes": "git update-index --assume-unchanged $(git ls-files); echo '*' > .git/info/exclude",
    "a pipe and a socket in the tree": "mkfifo pipe; python3 -c 'import socket; socket.socket(1).bind(\"s\")'; "
    "rm -f README.md; mkfifo README.md",
    "files without rights": "touch secret; chmod 000 secret",
    "a replaced git": "mkdir -p /tmp/b; printf '#!/bin/sh\nexit 1\n' > $(command -v git) || true",
    "no repository any more": "rm -rf .git",
    "a bare environment": "export GIT_DIR=/nowhere GIT_INDEX_FILE=/nowhere",
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_the_work_is_read_whatever_is_in_the_way(
    obstacle: str, make_env: Maker, docker_image: str, backend_of: Callable[[str], dict[str, Any]]
) -> None:
    env = make_env(**backend_of("overlay"), image=docker_image)  # a root of its own, where git can be replaced
    start(env)
    env.step(SOLVE)
    env.step(OBSTACLES[obstacle])
    _, reward, _, _, info = env.step("submit")
    assert (reward, info["verdict"]) == (1, "resolved"), info
    if obstacle in ("a replaced git", "no repository any more"):
        assert "its files were taken over" in info["extraction"]
    else:
        assert info["extraction"] == ""
    if obstacle.startswith("a nested"):
        assert "sub/a" in info["patch"] and "Subproject" not in info["patch"]


def test_work_that_cannot_be_read_is_named(make_env: Maker, docker_image: str, backend_of: Any) -> None:
    env = make_env(**backend_of("overlay"), image=docker_image)
    start(env)
    env.step(SOLVE)
    env.step("printf '#!/bin/sh\\nexit 3\\n' > /bin/tar; cp /bin/tar $(command -v git)")
    _, reward, _, _, info = env.step("submit")
    assert (reward, info["verdict"]) == (0, "no patch")
    assert "cannot be read" in info["extraction"] and "taken over" in info["extraction"]


def test_what_looks_forged_is_named_and_rejected_where_that_is_asked_for(make_env: Maker) -> None:
    forge = "printf 'def pytest_runtest_makereport(item, call): pass\\n' > conftest.py"
    for reject, reward, reason in ((False, 1, "resolved"), (True, 0, "suspicious")):
        env = make_env(reject_suspicious=reject)
        start(env)
        assert env.step(SOLVE)[4]["suspicious"] == []
        assert env.unwrapped.grade().suspicious == ()
        env.step("printf 'x = 1\\n' > conftest.py")
        verdict = env.unwrapped.grade()
        assert (verdict.resolved, verdict.reason) == (bool(reward), reason)
        _, earned, _, _, info = env.step("submit")
        assert (earned, info["verdict"], info["resolved"]) == (reward, reason, bool(reward))
        assert info["suspicious"] == ["conftest: conftest.py has a say in every test below it"]
        start(env)
        env.step(forge)
        assert "runner: conftest.py reaches into a test runner" in env.step("submit")[4]["suspicious"]


def test_commits_and_new_files_are_part_of_the_work(make_env: Maker) -> None:
    env = make_env()
    start(env)
    env.step(SOLVE)
    env.step("git commit -qam 'fix' && echo data > new.txt && printf '\\x00\\x01' > binary.bin && chmod +x new.txt")
    info = env.step("submit")[4]
    assert info["verdict"] == "resolved"
    assert "new.txt" in info["patch"] and "new file mode 100755" in info["patch"] and "binary.bin" in info["patch"]


def test_a_malformed_action_changes_nothing(make_env: Maker) -> None:
    env = make_env()
    before = start(env)
    observation, reward, terminated, _, info = env.step('{"command": 3}')
    assert not info["valid_action"] and "command" in observation and not terminated and reward == 0
    assert info["state_hash"] == before["state_hash"]
    with pytest.raises(TypeError, match="expected an action as a string"):
        env.unwrapped.step(3)


def test_equal_states_have_equal_hashes(make_env: Maker) -> None:
    env, other = make_env(), make_env()
    hashes = [start(env)["state_hash"]]
    for action in ("ls", "echo a > x", "export A=1", "rm x; unset A", "cd slugline", "cd ..", "cd ..; cd testbed"):
        hashes.append(env.step(action)[4]["state_hash"])
    assert hashes[0] == hashes[1]
    assert len({*hashes[1:5]}) >= 3
    start(other)
    other.step("export A=1 && echo a > x")
    start(env)
    env.step("echo a > x")
    assert env.step("export A=1")[4]["state_hash"] == other.step("ls")[4]["state_hash"]


def test_actions_are_deterministic(make_env: Maker) -> None:
    actions = [
        "python -m pytest -q",
        "echo a >> README.md; git commit -qam note; git log",
        "ls -A /tmp ~",
        "env | sort",
    ]
    first, second = make_env(), make_env()
    start(first), start(second)
    for action in actions:
        assert first.step(action) == second.step(action)


def test_forks_are_apart(make_env: Maker) -> None:
    env = make_env(tools="swe-agent")
    start(env)
    edit = {"command": "str_replace", "path": "/testbed/README.md", "old_str": "# slugline", "new_str": "# parent"}
    env.step(json.dumps({"name": "str_replace_editor", "arguments": edit}))
    children = env.fork(2, seed=1)
    try:
        children[0].step("echo child > /testbed/only; export WHO=child; touch /tmp/child")
        assert "parent" in children[1].step("cat /testbed/README.md; ls /testbed/only /tmp/child; echo $WHO")[0]
        assert "No such file" in env.step("ls /testbed/only")[0]
        for each in (env, *children):  # the editor's history is part of the state
            undo = {"command": "undo_edit", "path": "/testbed/README.md"}
            assert "undone" in each.step(json.dumps({"name": "str_replace_editor", "arguments": undo}))[0]
            assert not each.step(json.dumps({"name": "str_replace_editor", "arguments": undo}))[4]["valid_action"]
    finally:
        for child in children:
            child.close()


def test_snapshots_survive_their_environment_and_other_tasks(make_env: Maker) -> None:
    env, other = make_env(), make_env()
    start(env)
    env.step(SOLVE)
    snap = env.snapshot()
    start(env, "fenwick__hoard-1")
    env.step("submit")
    env.close()
    observation, info = other.restore(snap)
    assert info["task_id"] == TASK and "<returncode>0" in observation
    assert other.step("submit")[1] == 1
    other.restore(snap)
    assert other.step("git diff --stat | tail -n 1")[4]["progress_key"].startswith("edited")
    with pytest.raises(ResetNeeded):
        env.unwrapped.step("true")
    assert env.restore(snap)[1] == info
    assert env.step("git diff --stat | wc -l")[0] == "<returncode>0</returncode>\n<output>\n2\n</output>"
    snap.release()
    assert other.step("submit")[1] == 1  # it stands on its own by now


def test_a_snapshot_needs_its_task(make_env: Maker) -> None:
    env = make_env(instances=["fenwick__hoard-1"])
    start(env, 0)
    other = make_env(instances=[TASK])
    with pytest.raises(ResetNeeded):
        other.snapshot()
    start(other)
    with pytest.raises(SnapshotMismatch, match="a task that is not available here"):
        other.restore(env.snapshot())
    assert output(other.step("basename $PWD")) == "testbed"


def test_what_a_snapshot_would_lose_is_told(make_env: Maker) -> None:
    env = make_env(strict=True)
    start(env)
    assert env.step("true")[4]["lossy"] == []
    info = env.step("sleep 300 >/dev/null 2>&1 &")[4]
    assert info["lossy"] == ["background: sleep 300"]
    with pytest.raises(SnapshotLossy, match="sleep 300"):
        env.snapshot()
    assert "sleep" in output(env.step("jobs"))
    lenient = make_env()
    start(lenient)
    lenient.step("sleep 300 >/dev/null 2>&1 &")
    snap = lenient.snapshot()
    assert "sleep" in output(lenient.step("jobs"))
    lenient.restore(snap)
    assert lenient.step("jobs")[4]["lossy"] == []


def test_no_answer_can_be_found_inside(make_env: Maker) -> None:
    env = make_env()
    task = next(task for task in mini.tasks() if task.instance_id == TASK)
    start(env)
    everything = "git log --all --format=%s; for o in $(git cat-file --batch-all-objects --batch-check='%(objectname)')"
    objects = output(env.step(f"{everything}; do git cat-file -p $o; done > /tmp/all; grep -c . /tmp/all"))
    assert int(objects.split("\n")[-1]) > 50
    assert output(env.step("grep -e '(#4)' -e runs_become_one -e 'a-z0-9]+' /tmp/all")) == ""
    assert output(env.step("grep -rln runs_become_one /testbed /tmp /root /opt /home --include=*.py")) == ""
    assert "runs_become_one" in task.test_patch
    assert "No module named" in output(env.step("python -c 'import sandboxgym'"))
    assert output(env.step("git reflog; git remote -v; git tag; git stash list")) == ""


FUTURE = """commit refs/heads/main
mark :1
committer A <a@b> 1600000000 +0000
data 5
first
M 100644 inline f
data 2
1
commit refs/heads/main
mark :2
committer A <a@b> 1600000001 +0000
data 6
second
from :1
M 100644 inline f
data 2
2
commit refs/heads/main
mark :3
committer A <a@b> 1600000002 +0000
data 8
solution
from :2
M 100644 inline f
data 2
3
commit refs/heads/topic
mark :4
committer A <a@b> 1600000003 +0000
data 5
topic
from :1
M 100644 inline g
data 7
secret
reset refs/tags/v1
from :1

reset refs/tags/v3
from :3

reset refs/stash
from :4

"""


def test_the_future_of_a_repository_is_removed(quick_backend: dict[str, Any], tmp_path: Path) -> None:
    import subprocess
    from dataclasses import replace

    def git(*words: str, given: str | None = None) -> str:
        done = subprocess.run(["git", "-C", tmp_path, *words], input=given, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q", "-b", "main")
    git("fast-import", "--quiet", given=FUTURE)
    base, solution, topic = git("rev-parse", "main~1"), git("rev-parse", "main"), git("rev-parse", "topic")
    task = replace(mini.tasks()[0], instance_id="a__b-1", base_commit=base, history=FUTURE)
    settings = boxes.WorkspaceSettings(**quick_backend)
    with settings.box(task) as box:
        box.restore(boxes.pristine(task, settings).snapshot)
        said = box.run(
            "cd /testbed && git log --all --format=%s && git tag && cat f && git branch -a --format='%(refname)'"
        )
        assert said.output.split() == ["second", "first", "v1", "2", "refs/heads/main"]
        for commit in (solution, topic):
            assert box.run(f"cd /testbed && git cat-file -e {commit}").exit_code != 0
        objects = box.run("cd /testbed && git cat-file --batch-all-objects --batch-check='%(objectname)' | wc -l")
        assert int(objects.output) == 6  # a commit, a tree and a file, twice
        assert box.run("cd /testbed && git fsck --strict && git status --short").exit_code == 0


def test_the_gymnasium_checker_agrees(make_env: Maker) -> None:
    env = make_env(instances=[TASK])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_env(env.unwrapped, skip_render_check=True)


def test_nothing_is_started_before_a_reset(monkeypatch: pytest.MonkeyPatch, make_env: Maker) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise SandboxUnavailable("not on this machine")

    monkeypatch.setattr(boxes, "make_sandbox", refuse)
    boxes.forget_prepared()
    env = make_env()
    with pytest.raises(SandboxUnavailable, match="not on this machine"):
        start(env)
    env.close()
    env.close()


def test_wrong_arguments_are_said(make_env: Maker) -> None:
    with pytest.raises(ValueError, match="tools: expected 'bash' or 'swe-agent', found 'emacs'"):
        make_env(tools="emacs")
    with pytest.raises(ValueError, match="backend: expected one of"):
        make_env(backend="chroot")
    env = make_env()
    with pytest.raises(ValueError, match="expected the options 'instance_id' or 'task'"):
        env.reset(options={"game": 1})
    with pytest.raises(TaskNotFound):
        env.reset(options={"task": "nobody__nothing-1"})


def test_prompts_and_rendering(make_env: Maker) -> None:
    env = make_env(prompt="Do: {problem_statement}", render_mode="ansi")
    observation, _ = env.reset(options={"task": TASK})
    assert observation.startswith("Do: slugify leaves several separators")
    assert env.render() == observation
    snap = env.snapshot()
    assert env.step("echo hi")[0] == env.render() != observation
    env.restore(snap)
    assert env.render() == observation


def test_a_command_has_a_time_limit(make_env: Maker) -> None:
    env = make_env(limits={"seconds": 1.0})
    start(env)
    observation, _, _, _, info = env.step("echo before; sleep 30")
    assert info["timed_out"] and "before" in observation and "more than 1 seconds" in observation
    assert output(env.step("echo usable")) == "usable"


def test_a_full_disk_ends_the_episode(make_env: Maker, backend_of: Callable[[str], dict[str, Any]]) -> None:
    env = make_env(**backend_of("overlay"), limits={"disk": 20_000_000})
    start(env)
    env.step("head -c 200000000 /dev/zero > /testbed/big; sleep 20")
    _, reward, terminated, _, info = env.step("ls") if not env.unwrapped.last.terminated else env.unwrapped.last
    assert (reward, terminated, info["verdict"]) == (0, True, "sandbox ended")
    assert "disk" in info["infra_failure"]
    start(env)
    assert output(env.step("ls /testbed/big")) == "ls: cannot access '/testbed/big': No such file or directory"


@pytest.mark.parametrize(
    ("backend", "snapshot"), [("overlay", "filesystem"), ("overlay", "full"), ("overlay-rootless", "filesystem")]
)
def test_a_sandbox_that_ends_by_itself_is_a_state_like_any_other(
    backend: str, snapshot: str, make_env: Maker, backend_of: Callable[[str], dict[str, Any]]
) -> None:
    if snapshot == "full" and (reason := criu.why_unavailable()):
        missing("criu", reason)
    env = make_env(**backend_of(backend), limits={"disk": 20_000_000}, snapshot=snapshot)
    start(env)
    assert not env.step("(sleep 0.3; exec head -c 200000000 /dev/zero > /testbed/big) > /dev/null 2>&1 &")[2]
    inside = env.unwrapped._space.box.sandbox.backend
    for _ in range(200):
        try:
            inside.processes()
        except SandboxFull:
            break
        time.sleep(0.1)
    info = dict(env.unwrapped.last.info)
    snap = env.snapshot()
    (child,) = env.fork(1)
    assert env.unwrapped.last.info == info and not info["masked"]
    ways = [lambda: env, lambda: child]
    if snapshot == "filesystem":  # such snapshots leave their process
        loaded = sandboxgym.Snapshot.from_bytes(snap.to_bytes())
        ways.append(lambda: (env.restore(loaded), env)[1])
    ends = []
    for way in (*ways, lambda: (env.restore(snap), env)[1]):
        player = way()
        assert player.unwrapped.grade().reason == "sandbox ended"
        observation, reward, terminated, _, after = player.step("ls")
        assert (reward, terminated, after["verdict"], after["masked"]) == (0, True, "sandbox ended", True)
        assert "disk" in observation and "disk" in after["infra_failure"]
        ends.append((observation, after))
    assert all(end == ends[0] for end in ends)
    child.close()
    start(env)
    assert output(env.step("ls /testbed/big")) == "ls: cannot access '/testbed/big': No such file or directory"


def test_a_hidden_test_that_hangs_is_no_success(make_env: Maker) -> None:
    env = make_env(grade_timeout=3.0)
    start(env)
    env.step("printf 'import time\\ntime.sleep(60)\\n' > conftest.py")
    info = env.step("submit")[4]
    assert info["verdict"] == "tests time out" and not info["success"]


def test_a_vector_of_them(quick_backend: dict[str, Any]) -> None:
    from sandboxgym import SnapshotVectorEnv

    make = lambda: gym.make("sandboxgym/SWEBench-v0", **quick_backend)  # noqa: E731
    envs = SnapshotVectorEnv([make, make])
    try:
        envs.reset(seed=0, options={"task": TASK})
        snaps = envs.snapshot([0])
        envs.step([SOLVE, "true"])
        envs.restore({1: snaps[0]})
        _, rewards, terminated, _, _ = envs.step(["submit", "submit"])
        assert list(rewards) == [1, 0] and all(terminated)
    finally:
        envs.close()


@pytest.mark.slow
def test_a_gigabyte_of_log_and_a_large_patch_are_a_verdict(make_env: Maker) -> None:
    env = make_env(limits={"seconds": 120})
    start(env)
    env.step(SOLVE)
    env.step("""cat > conftest.py <<'EOF'
import atexit, os
def flood():
    for _ in range(1024):
        os.write(1, b"PASSED everything\\n" * 58255)
atexit.register(flood)
EOF""")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _, reward, _, _, info = env.step("submit")
    assert (reward, info["verdict"]) == (0, "too much output"), info["verdict"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # kilobytes
    start(env)
    env.step("head -c 200000000 /dev/urandom > big")
    _, reward, _, _, info = env.step("submit")
    assert (reward, info["verdict"], info["patch"]) == (0, "patch too large", "")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024
