"""The environment of Harbor tasks: episodes, grading, forks, snapshots."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from components import missing
from task_folders import TOML, why_not, write_task

import sandboxgym
from sandboxgym import Snapshot, SnapshotWrapper
from sandboxgym.envs.harbor.dockerfile import DockerfileError, put
from sandboxgym.envs.harbor.needs import PREFIX, STAND_INS, Needs, stand_ins
from sandboxgym.envs.harbor.tasks import MINI, TaskError
from sandboxgym.errors import ResetNeeded, SnapshotMismatch
from sandboxgym.sandbox.base import SandboxUnavailable
from sandboxgym.sandbox.sandbox import make_sandbox

ALL = sorted(path.name for path in MINI.iterdir())


def toy(folder: Path, **arguments: Any) -> SnapshotWrapper:
    """An environment of one toy task, on this machine's tool chain."""
    return sandboxgym.make("Harbor-v0", tasks=folder, image="host", **arguments)


@pytest.fixture
def env(sandboxes: None, tmp_path: Path) -> Iterator[SnapshotWrapper]:
    made = toy(write_task(tmp_path / "toy"))
    yield made
    made.close()


def solved(env: gym.Env[Any, Any], task: str) -> tuple[float, dict[str, Any]]:
    """Reward and info at the end of the expert's episode."""
    observation, info = env.reset(options={"task": task})
    expert = env.unwrapped.expert()  # type: ignore[attr-defined]
    expert.reset(observation)
    while True:
        observation, reward, terminated, _, info = env.step(expert.act(observation))
        if terminated:
            return float(reward), info


def check_solution_and_nothing(env: gym.Env[Any, Any], task: str) -> None:
    env.reset(options={"task": task})
    _, reward, terminated, _, info = env.step("submit")
    assert (reward, terminated, info["verdict"]) == (0.0, True, "failed"), env.unwrapped.verdict  # type: ignore[attr-defined]
    reward, info = solved(env, task)
    assert (reward, info["success"], info["verdict"]) == (1.0, True, "passed"), env.unwrapped.verdict  # type: ignore[attr-defined]


def test_the_solution_earns_the_reward_and_nothing_earns_none(sandboxes: None) -> None:
    env = sandboxgym.make("Harbor-v0", instances=["counter-server"])
    check_solution_and_nothing(env, "counter-server")  # the server that it leaves behind answers the tests
    env.close()


@pytest.mark.slow
@pytest.mark.parametrize("task", ALL)
@pytest.mark.parametrize("backend", ["overlay", "overlay-rootless"])
def test_every_embedded_task_is_solved_by_its_solution_only(backend: str, task: str) -> None:

    if reason := why_not(backend == "overlay-rootless"):
        missing("overlay", reason)
    env = sandboxgym.make("Harbor-v0", backend=backend, instances=[task])
    try:
        check_solution_and_nothing(env, task)
    finally:
        env.close()


def test_the_first_observation_is_the_instruction(env: SnapshotWrapper) -> None:
    observation, info = env.reset(seed=1)
    row = env.unwrapped.tasks()[0]  # type: ignore[attr-defined]
    assert observation.startswith("Write done into /app/answer.") and "You are in /app" in observation
    assert (info["task_id"], info["task_type"]) == (row.id, row.type) == ("toy", "toys")
    assert row.instruction in observation


def test_tests_and_solution_are_never_seen_before_or_after_grading(env: SnapshotWrapper) -> None:
    env.reset()
    look = "ls -A / /logs/verifier; cat /tests/test.sh /solution/solve.sh; find / -xdev -newer /logs -name test.sh"
    before = env.step(look)[0]
    assert "tests" not in before.split("</output>")[0].split("cat:")[0]
    with env.snapshot() as start:
        assert env.step("echo done > answer; echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")[1:3] == (1.0, True)
        env.restore(start)
        env.step("echo done > answer")
        assert env.unwrapped.grade().reward == 1.0  # type: ignore[attr-defined]
        after = env.step(look)[0]
        assert after.replace("answer", "") == before.replace("answer", "")
        assert env.step("submit")[1:3] == (1.0, True)
        with pytest.raises(ResetNeeded, match="the episode is over"):
            env.step("ls")
        with env.snapshot() as end:
            twin = env.fork(1)[0]
            sandbox = twin.unwrapped._live().sandbox  # type: ignore[attr-defined]
            assert "test.sh" not in sandbox.run("ls / /tests /logs/verifier 2>/dev/null").output
            assert sandbox.run("cat /app/answer").output == "done\n"
            twin.close()
            assert end is not None


def test_a_fork_half_way_has_the_work_and_goes_its_own_way(env: SnapshotWrapper) -> None:
    env.reset()
    env.step("cd /tmp; export WORD=done; echo draft > /app/answer")
    left, right = env.fork(2)
    assert "draft" in left.step("pwd; cat /app/answer")[0]
    assert left.step("echo $WORD > /app/answer; submit")[4]["returncode"] == 127
    assert left.step("submit")[1] == 1.0
    assert right.step("submit")[1] == 0.0
    assert env.step("cat /app/answer")[0].count("draft") == 1
    left.close(), right.close()


def test_equal_states_have_equal_hashes_and_progress_is_told(env: SnapshotWrapper) -> None:
    start = env.reset()[1]
    assert start["state_hash"] and start["progress_key"] == "unchanged, tests not run"
    assert env.step("true")[4]["state_hash"] == start["state_hash"]
    draft = env.step("echo draft > answer; echo '1 passed in 0.01s'")[4]
    assert draft["state_hash"] != start["state_hash"] and draft["progress_key"] == "edited, tests passed"
    with env.snapshot() as snap:
        data = snap.to_bytes()
        assert env.step("cd /tmp")[4]["state_hash"] not in (draft["state_hash"], start["state_hash"])
        back = env.step("cd /app; rm answer; cd /app")[4]
        assert (back["progress_key"], env.restore(snap)[1]) == ("unchanged, tests passed", draft)
    assert env.step("nonsense() {")[4]["state_hash"] == draft["state_hash"]
    with Snapshot.from_bytes(data) as loaded:
        env.restore(loaded)
    assert env.step("true")[4]["state_hash"] == draft["state_hash"]
    assert env.step("echo '1 failed in 0.01s'")[4]["progress_key"] == "edited, tests failed"


def test_a_saved_snapshot_continues_in_another_environment(env: SnapshotWrapper, tmp_path: Path) -> None:
    env.reset(seed=3)
    env.step("echo done > answer")
    with env.snapshot() as snap:
        data = snap.to_bytes()
    other = toy(tmp_path / "toy")
    _, info = other.restore(Snapshot.from_bytes(data))
    assert info["steps"] == 1 and info["task_id"] == "toy"
    assert other.step("submit")[1] == 1.0
    other.close()
    (tmp_path / "toy" / "tests" / "test.sh").write_text("true\n")
    changed = toy(tmp_path / "toy")
    with pytest.raises(SnapshotMismatch, match="the task toy has digest"):
        changed.restore(Snapshot.from_bytes(data))
    changed.close()


def test_work_is_graded_at_the_step_limit(sandboxes: None, tmp_path: Path) -> None:
    env = toy(write_task(tmp_path / "toy"), max_episode_steps=2)
    env.reset()
    assert env.step("echo done > answer")[1:4] == (0.0, False, False)
    _, reward, terminated, truncated, info = env.step("ls")
    assert (reward, terminated, truncated, info["verdict"]) == (1.0, False, True, "passed")
    env.close()


@pytest.mark.parametrize(
    ("test", "reason", "reward"),
    [
        ("echo 0.25 > /logs/verifier/reward.txt", "failed", 0.25),
        ("""echo '{"reward": 1, "style": 0.5}' > /logs/verifier/reward.json""", "passed", 1.0),
        ("""echo '{"a": 1, "b": 0}' > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt""", "failed", 0.5),
        ("echo no tests", "no reward", 0.0),
        ("echo nan > /logs/verifier/reward.txt", "no reward", 0.0),
        ("""echo '{"status": "pass"}' > /logs/verifier/reward.json""", "no reward", 0.0),
        ("ln -s /dev/zero /logs/verifier/reward.txt", "no reward", 0.0),
        (f"""echo '{{"reward": 1{"0" * 400}}}' > /logs/verifier/reward.json""", "no reward", 0.0),
        ("""echo '{"a": 1e308, "b": 1e308}' > /logs/verifier/reward.json""", "no reward", 0.0),
        ("echo 1e308 > /logs/verifier/reward.txt", "no reward", 0.0),
        ("""echo '{"reward": 0.5, "tokens": 1e9}' > /logs/verifier/reward.json""", "failed", 0.5),
        ("sleep 60", "tests time out", 0.0),
    ],
)
def test_rewards_are_read_as_harbor_reads_them(
    sandboxes: None, tmp_path: Path, test: str, reason: str, reward: float
) -> None:
    toml = TOML.replace("timeout_sec = 30.0", "timeout_sec = 1.0")
    env = toy(write_task(tmp_path / "toy", toml=toml, test=f"#!/bin/bash\n{test}\n"))
    env.reset()
    env.step("echo 1 > /logs/verifier/reward.txt")  # forged: deleted before the tests
    _, found, _, _, info = env.step("submit")
    assert (found, info["verdict"], info["masked"]) == (reward, reason, False)
    env.close()


@pytest.mark.parametrize(
    "left",
    [
        "mkdir -p /tmp/.files.tar/x",
        "rm -rf /tmp; echo > /tmp",
        "ln -s /dev/full /logs/verifier/test-stdout.txt",  # `grep -q` with errors that cannot be written says yes
        "rm -rf /logs; echo > /logs",
        "rm -rf /logs; mkdir /app/logs; ln -s /app/logs /logs; mkdir -m 0 -p /app/logs/verifier/reward.txt",
        "rm -rf /logs/verifier; ln -s /dev /logs/verifier",
        "echo > /tests",
    ],
)
def test_what_an_agent_leaves_in_the_place_of_the_tests_earns_nothing(
    sandboxes: None, tmp_path: Path, left: str
) -> None:
    test = "#!/bin/bash\ngrep -qx done /app/answer\necho $((!$?)) > /logs/verifier/reward.txt\n"
    env = toy(write_task(tmp_path / "toy", test=test))
    env.reset()
    env.step(left)
    _, reward, _, _, info = env.step("submit")
    assert (reward, info["verdict"], info["masked"]) == (0.0, "failed", False), env.unwrapped.verdict  # type: ignore[attr-defined]
    env.close()


@pytest.mark.parametrize(
    "left",
    [
        "printf '#!/bin/sh\\nexit 3\\n' > bin/tar; chmod +x bin/tar",
        "printf '#!/bin/sh\\n' > bin/rm; chmod +x bin/rm; echo '{\"reward\": 1}' > /logs/verifier/reward.json",
        "printf '#!/bin/sh\\nexit 3\\n' > bin/mkdir; chmod +x bin/mkdir",
        "rm -rf /app",
    ],
)
def test_programs_that_an_agent_breaks_earn_nothing_and_do_not_hide_the_failure(
    sandboxes: None, tmp_path: Path, left: str
) -> None:
    env = toy(write_task(tmp_path / "toy", dockerfile="FROM a\nWORKDIR /app\nRUN mkdir bin\nENV PATH=/app/bin:$PATH\n"))
    env.reset()
    env.step(left)
    assert env.unwrapped.grade().reason == "no reward"  # type: ignore[attr-defined]
    _, reward, _, _, info = env.step("submit")
    assert (reward, info["verdict"], info["masked"]) == (0.0, "no reward", False), env.unwrapped.verdict  # type: ignore[attr-defined]
    env.close()


@pytest.mark.parametrize(
    "write",
    [
        "echo 1 > $reward",
        "echo 1 > /app/one; mv -f /app/one $reward",
        "[[ -s $reward ]] && echo 1 > $reward",
        "[[ -s $reward ]] && echo 1 > /app/one && mv -f /app/one $reward",
        "[[ -s $reward ]] && echo 1 > /logs/verifier/reward.json",
    ],
)
def test_a_process_that_keeps_writing_rewards_earns_none(sandboxes: None, tmp_path: Path, write: str) -> None:
    env = toy(write_task(tmp_path / "toy"))
    env.reset()
    env.step(f"reward=/logs/verifier/reward.txt; (while :; do {write}; done) > /dev/null 2>&1 &")
    _, reward, _, _, info = env.step("submit")
    assert (reward, info["verdict"], info["masked"]) == (0.0, "no reward", False), env.unwrapped.verdict  # type: ignore[attr-defined]
    env.close()


def test_the_editor_works_without_the_directory_of_the_task(sandboxes: None, tmp_path: Path) -> None:
    env = toy(write_task(tmp_path / "toy"), tools="swe-agent")
    env.reset()
    env.step(
        json.dumps({"name": "bash", "arguments": {"command": "rm -rf /app; mkdir -p /srv/files; touch /srv/files/a"}})
    )
    view = {"name": "str_replace_editor", "arguments": {"command": "view", "path": "/srv"}}
    observation, _, terminated, _, _ = env.step(json.dumps(view))
    assert "/srv/files/a" in observation and not terminated
    env.close()


def test_an_image_without_tar_is_not_the_fault_of_the_work(sandboxes: None, tmp_path: Path) -> None:
    broken = "FROM a\nRUN mkdir -p /app/bin && printf '#!/bin/sh\\nexit 3\\n' > /app/bin/tar && chmod +x /app/bin/tar\n"
    env = toy(write_task(tmp_path / "toy", dockerfile=f"{broken}ENV PATH=/app/bin:$PATH\n"))
    env.reset()
    *_, info = env.step("submit")
    assert (info["verdict"], info["masked"]) == ("infra failure", True)
    env.close()


def test_names_of_rewards_that_are_no_text_can_be_kept(sandboxes: None, tmp_path: Path) -> None:
    test = """#!/bin/bash\necho '{"\\ud800": 1}' > /logs/verifier/reward.json\n"""
    env = toy(write_task(tmp_path / "toy", test=test))
    env.reset()
    *_, info = env.step("submit")
    assert info["rewards"] == {"\\ud800": 1.0}
    snapshot = Snapshot.from_bytes(env.snapshot().to_bytes())
    assert env.restore(snapshot)[1]["rewards"] == info["rewards"]
    env.close()


def test_limits_come_from_the_task_and_can_be_replaced(sandboxes: None, tmp_path: Path) -> None:
    env = toy(write_task(tmp_path / "toy"), limits={"seconds": 1.0})
    env.reset()
    limits = env.unwrapped.limits[0]  # type: ignore[attr-defined]
    assert (limits.seconds, limits.memory, limits.disk) == (1.0, 512 * 2**20, 2**30)
    info = env.step("sleep 30")[4]
    assert info["timed_out"] and info["returncode"] == 124
    env.close()


def test_a_lost_sandbox_ends_the_episode_without_an_error(env: SnapshotWrapper) -> None:
    env.reset()
    env.step("ls")
    env.unwrapped._space.opened().close()  # type: ignore[attr-defined]
    _, reward, terminated, _, info = env.step("ls")
    assert (reward, terminated, info["verdict"], info["masked"]) == (0.0, True, "sandbox ended", True)
    env.reset()
    assert not env.step("ls")[2]


def test_a_dockerfile_is_carried_out_as_it_says(sandboxes: None, tmp_path: Path) -> None:
    dockerfile = """FROM debian:bookworm
ARG NAME=world
ENV GREETING="hello $NAME" OTHER=2
WORKDIR /srv
WORKDIR app
COPY data/ ./copied/
COPY --chmod=755 tool /opt/tool
COPY <<EOF one.txt
$HOME
EOF
RUN ["sh", "-c", "echo $GREETING > said"]
RUN <<EOF
echo $OTHER >> said
pwd >> said
EOF
RUN echo "$GREETING" \\
    >> said
CMD ["bash"]
"""
    files = {"environment/data/a/b": "deep\n", "environment/tool": "#!/bin/sh\necho tool\n"}
    env = toy(write_task(tmp_path / "toy", dockerfile=dockerfile, files=files))
    env.reset()
    shown = env.step("pwd; cat said copied/a/b one.txt; /opt/tool; echo $GREETING $OTHER; ls -1d /logs/*")[0]
    assert shown.splitlines()[2:-1] == [
        *("/srv/app", "hello world", "2", "/srv/app", "hello world", "deep", "$HOME", "tool", "hello world 2"),
        *("/logs/agent", "/logs/artifacts", "/logs/verifier"),
    ]
    env.close()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("RUN false", r"Dockerfile:2: RUN failed, exit code 1"),
        ("COPY nothing /x", r"Dockerfile:2: COPY: environment/ has no 'nothing'"),
        ("COPY ../task.toml /x", r"Dockerfile:2: COPY: expected files below environment/"),
        ("FROM other", r"Dockerfile:2: FROM: expected one stage"),
        ("COPY etc/hostname /x", r"Dockerfile:2: COPY: expected files below environment/, found .* behind a link"),
        ("COPY etc/host* /x", r"Dockerfile:2: COPY: expected files below environment/, found .* behind a link"),
        ("COPY --chmod=u+x etc /x", r"Dockerfile:2: COPY: '--chmod=u\+x'"),
        ("COPY --chmod=77777 etc /x", r"Dockerfile:2: COPY: '--chmod=77777'"),
        ("ENV =value", r"Dockerfile:2: ENV: expected NAME=VALUE, found '=value'"),
        ("ENV NAME=\0", r"Dockerfile: expected a text without null characters"),
        ("USER nobody", r"Dockerfile:2: USER: expected root, found 'nobody'"),
        ("ADD https://example.org/x /x", r"Dockerfile:2: ADD: expected files of the task, found an address"),
        ("SHELL ['x']", r"Dockerfile:2: SHELL: .* without a daemon; .*build='docker'"),
    ],
)
def test_what_a_dockerfile_may_not_say_is_named_with_its_line(
    sandboxes: None, tmp_path: Path, line: str, words: str
) -> None:
    folder = write_task(tmp_path / "toy", dockerfile=f"FROM debian\n{line}\n")
    (folder / "environment" / "etc").symlink_to("/etc")
    env = toy(folder)
    with pytest.raises(DockerfileError, match=words):
        env.reset()
    env.close()


def test_commands_and_places_are_read_as_docker_reads_them(sandboxes: None, tmp_path: Path) -> None:
    dockerfile = """FROM debian
WORKDIR /srv/app
ENV PATH=/srv/app/bin:$PATH
RUN [ -e missing ] || touch made
RUN bash -c 'cat <<< "hello" > said'
COPY one ../two
ADD <<END /srv/three
three
END
"""
    env = toy(write_task(tmp_path / "toy", dockerfile=dockerfile, files={"environment/one": "two\n"}))
    env.reset()
    shown = env.step("cat made said ../two /srv/three; [[ $PATH == /srv/app/bin:?*/bin* ]] && echo found")[0]
    assert shown.splitlines()[2:-1] == ["hello", "two", "three", "found"]
    env.close()


def test_stand_ins_run_what_the_image_has_in_place_of_an_installation(sandboxes: None) -> None:
    with make_sandbox("auto") as sandbox:
        put(sandbox, list(stand_ins(Needs(python=("pytest",))).items()), mode=0o755)
        put(sandbox, [(f"{PREFIX}/bin/pytest", b'#!/bin/sh\necho "ran $@"\n')], mode=0o755)
        done = sandbox.run(
            f"set -e; PATH={STAND_INS}:$PATH; apt-get update; apt-get install -y curl\n"
            "curl -LsSf https://astral.sh/uv/0.9.5/install.sh | sh\n"
            "uvx -p 3.13 -w pytest==8.4.1 --with x pytest --ctrf out /tests/t.py -rA\nuv run --no-sync pytest one\n"
            "cd /tmp; uv venv; uv pip install pytest; .venv/bin/pytest two\n"
            "uvx -w pip pytest three | cat; uvx sh -c 'command -v pytest'"
        )
    said = "ran --ctrf out /tests/t.py -rA\nran one\nran two\nran three\n"
    assert done.output == f"{said}{PREFIX}/bin/pytest\n" and done.exit_code == 0


def test_the_expert_speaks_both_sets_of_tools_and_marks_its_mistakes(sandboxes: None, tmp_path: Path) -> None:
    files = {"solution/data.bin": "done"}
    env = toy(write_task(tmp_path / "toy", files=files, solve="cp /solution/data.bin /app/answer\n"), tools="swe-agent")
    reward, info = solved(env, "toy")
    assert reward == 1.0 and info["steps"] == 4
    noisy = env.unwrapped.expert(noise=0.9)  # type: ignore[attr-defined]
    observation, _ = env.reset()
    noisy.reset(observation)
    actions = [(json.loads(noisy.act(observation))["name"], noisy.noisy) for _ in range(10)]
    assert ("bash", True) in actions
    env.close()


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"backend": "copy"}, ValueError, "paths such as /app"),
        ({"backend": "chroot"}, ValueError, "backend: expected one of auto, overlay"),
        ({"build": "podman"}, ValueError, "build: expected one of auto, docker, sandbox"),
        ({"tools": "vim"}, ValueError, "tools: expected 'bash' or 'swe-agent'"),
        ({"snapshot": "full", "backend": "docker"}, ValueError, "needs backend='overlay'"),
        ({"network": "no"}, TypeError, "network: expected True or False"),
        ({"limits": {"cpu": 1}}, ValueError, "limits: expected some of"),
        ({"image": 3}, TypeError, "image: expected 'host'"),
    ],
)
def test_arguments_are_refused_at_once(arguments: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        sandboxgym.make("Harbor-v0", **arguments)


def test_a_dockerfile_for_the_sandbox_needs_a_root_file_system(tmp_path: Path) -> None:
    env = sandboxgym.make("Harbor-v0", tasks=write_task(tmp_path / "toy"), build="sandbox")
    with pytest.raises(SandboxUnavailable, match="build='sandbox' needs image="):
        env.reset()
    env.close()


@pytest.mark.slow
def test_running_processes_are_in_a_fork_with_full_snapshots(with_criu: None) -> None:
    env = sandboxgym.make("Harbor-v0", snapshot="full", instances=["counter-server"])
    base: Any = env.unwrapped
    env.reset()
    address = "http://127.0.0.1:8701/add?n={}"
    call = f"python3 -c \"import urllib.request as u; u.urlopen(u.Request('{address}', method='POST'))\""
    env.step("setsid nohup python3 /app/counter 8701 > /dev/null 2>&1 < /dev/null & sleep 1")
    env.step(call.format(20))
    assert env.step(call.format(20))[4]["lossy"] == []
    right, wrong = env.fork(2)
    right.step(call.format(2)), wrong.step(call.format(3))
    assert base.grade().reward == 0.0
    assert (right.step("submit")[1], wrong.step("submit")[1]) == (1.0, 0.0)
    env.step(call.format(2))
    assert base.grade().reward == 1.0 and base.grade().lossy == ()
    for one in (env, right, wrong):
        one.close()


@pytest.mark.slow
@pytest.mark.xdist_group("harbor-images")  # one after the other: each removes the images that are newer than its base
@pytest.mark.parametrize("backend", ["auto", "docker"])
def test_images_are_built_by_the_docker_daemon(docker_image: str, tmp_path: Path, backend: str) -> None:
    dockerfile = f"FROM {docker_image}\nENV WORD=done\nWORKDIR /app\nCOPY . /app/\n"
    folder = write_task(tmp_path / "toy", dockerfile=dockerfile, solve='echo "$WORD" > /app/answer\n')
    env = sandboxgym.make("Harbor-v0", tasks=folder, backend=backend)
    try:
        check_solution_and_nothing(env, "toy")
        (folder / "environment" / "Dockerfile").write_text(f"FROM {docker_image}\nRUN false\n")
        broken = sandboxgym.make("Harbor-v0", tasks=folder, backend=backend)
        with pytest.raises(TaskError, match="docker build failed"):
            broken.reset()
        broken.close()
        listed = ["docker", "ps", "--all", "--filter", "label=sandboxgym.test=1", "--format", "{{.Command}}"]
        assert "/bin/sh -c false" not in subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    finally:
        env.close()
        remove_built_images(docker_image)


def remove_built_images(base: str) -> None:
    """Remove the names of this test's images; those that others depend on go when these do."""
    from sandboxgym.envs.harbor.images import REPOSITORY, forget_starts

    forget_starts()
    listed = subprocess.run(
        ["docker", "images", "--filter", f"since={base}", "--format", "{{.Repository}}:{{.Tag}}", REPOSITORY],
        capture_output=True,
        text=True,
    )
    for name in listed.stdout.split():
        subprocess.run(["docker", "rmi", name], capture_output=True)
