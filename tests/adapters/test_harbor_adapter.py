"""Harbor's trials in our sandboxes."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import logging
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest
from components import missing
from task_folders import TOML, write_task

from sandboxgym.adapters.harbor import SandboxEnvironment, unpack


def test_without_harbor_it_says_what_to_install() -> None:
    if importlib.util.find_spec("harbor") is not None:
        pytest.skip("harbor is installed")
    with pytest.raises(ImportError, match="pip install harbor"):
        SandboxEnvironment()


def test_what_leads_out_of_a_download_is_left_out(tmp_path: Path) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, kind, link in [
            ("./file", tarfile.REGTYPE, ""),
            ("../escaped", tarfile.REGTYPE, ""),
            ("link", tarfile.SYMTYPE, "/etc/hostname"),
            ("up", tarfile.SYMTYPE, ".."),
            ("up/through", tarfile.REGTYPE, ""),
            ("hard", tarfile.LNKTYPE, "../escaped"),
            ("hard-link", tarfile.LNKTYPE, "link"),
            ("pipe", tarfile.FIFOTYPE, ""),
        ]:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, link
            archive.addfile(member)
    unpack(stream.getvalue(), tmp_path / "down")
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == [
        *("down", "down/file", "down/up", "down/up/through"),
    ]


@pytest.mark.parametrize(
    ("change", "gone"),
    [
        (("timeout_sec = 20.0", "timeout_sec = 'soon'"), ""),
        (('memory = "512M"', 'memory = "much"'), ""),
        (('storage = "1G"', "docker_image = 7"), ""),
        (("[agent]", "[agent"), ""),
        (("[metadata]", "metadata = 3\n[other]"), ""),
        (("", ""), "instruction.md"),
        (("", ""), "tests/test.sh"),
        (("", ""), "task.toml"),
    ],
)
def test_malformed_tasks_that_harbor_refuses_are_refused_here(
    tmp_path: Path, change: tuple[str, str], gone: str
) -> None:
    if importlib.util.find_spec("harbor") is None:
        missing("harbor", "harbor is not installed (it needs Python 3.12)")
    from harbor.models.task.task import Task

    from sandboxgym.envs.harbor.tasks import TaskError, open_tasks

    folder = write_task(tmp_path / "good")
    assert Task(folder) is not None and len(open_tasks(folder)) == 1
    folder = write_task(tmp_path / "bad", toml=TOML.replace(*change, 1))
    if gone:
        (folder / gone).unlink()
    with pytest.raises((ValueError, FileNotFoundError)):  # TOMLDecodeError and ValidationError are of the first kind
        Task(folder)
    with pytest.raises(TaskError):
        open_tasks(folder)


def test_a_trial_that_cannot_start_is_an_error_in_words_and_leaves_nothing(trial: Any, tmp_path: Path) -> None:
    toml = trial.environment_dir.parent / "task.toml"
    toml.write_text(toml.read_text().replace('storage = "1G"', "workdir = 'app'"))

    async def play() -> None:
        from sandboxgym.envs.harbor.tasks import TaskError

        with pytest.raises(
            TaskError, match=r"task\.toml: \[environment\] workdir: expected an absolute path, found 'app'"
        ):
            await trial.start(force_build=False)
        for call in (trial.exec("true"), trial.download_dir("/logs", tmp_path / "logs")):  # Harbor does the latter
            with pytest.raises(RuntimeError, match="not started") as failed:
                await call
            assert failed.value.__context__ is None
        await trial.stop(delete=True)

    asyncio.run(play())
    assert trial._sandbox is None


@pytest.fixture
def trial(tmp_path: Path) -> Any:
    """An environment of a trial, not started."""
    if importlib.util.find_spec("harbor") is None:
        missing("harbor", "harbor is not installed (it needs Python 3.12)")
    from harbor.models.task.config import EnvironmentConfig, NetworkMode, NetworkPolicy
    from harbor.models.trial.paths import TrialPaths

    folder = write_task(tmp_path / "toy", dockerfile="FROM debian\nENV WORD=done\nWORKDIR /app\n")
    paths = TrialPaths(trial_dir=tmp_path / "trial")
    paths.mkdir()
    return SandboxEnvironment(
        environment_dir=folder / "environment",
        environment_name="toy",
        session_id="toy__1__env",
        trial_paths=paths,
        task_env_config=EnvironmentConfig(),
        logger=logging.getLogger("test"),
        network_policy=NetworkPolicy(network_mode=NetworkMode.NO_NETWORK),
        image="host",
    )


def test_files_and_commands_go_in_and_out(trial: Any, tmp_path: Path) -> None:
    async def play() -> None:
        await trial.start(force_build=False)
        (tmp_path / "up" / "deep").mkdir(parents=True)
        (tmp_path / "up" / "deep" / "file").write_text("content")
        await trial.upload_dir(tmp_path / "up", "/data")
        await trial.upload_file(tmp_path / "up" / "deep" / "file", "/one")
        done = await trial.exec("cat /data/deep/file /one; echo; echo $WORD $MORE; pwd; exit 3", env={"MORE": "x"})
        assert (done.stdout, done.return_code) == ("contentcontent\ndone x\n/app\n", 3)
        assert (await trial.exec("pwd", cwd="/tmp")).stdout == "/tmp\n"
        await trial.download_dir("/data", tmp_path / "down")
        await trial.download_file("/one", tmp_path / "down" / "one")
        assert (tmp_path / "down" / "deep" / "file").read_text() == (tmp_path / "down" / "one").read_text() == "content"
        await trial.exec("ln -s /etc/hostname /data/host; mkfifo /data/pipe; mkdir -p /tmp/.download.tar/x")
        await trial.download_dir("/data", tmp_path / "again")
        assert [path.name for path in (tmp_path / "again").iterdir()] == ["deep"]
        await trial.exec("sleep 1000 > /dev/null 2>&1 & echo $! > server")  # as the solution of a task starts one
        assert (await trial.exec("kill $(cat server)")).return_code == 0
        with pytest.raises(TimeoutError, match="more than 1 seconds"):
            await trial.exec("sleep 30", timeout_sec=1)
        await trial.exec("rm -rf /app")
        assert (await trial.exec("pwd")).return_code == 126
        assert (await trial.exec("pwd", cwd="/")).stdout == "/\n"
        await trial.stop(delete=True)

    asyncio.run(play())


def test_tests_find_what_they_would_install_from_the_network(trial: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sandboxgym.envs.harbor.needs import PREFIX, Needs

    script = trial.environment_dir.parent / "tests" / "test.sh"
    script.write_text("set -e\napt-get install -y curl\nsource $HOME/.local/bin/env\nuvx -w pytest==8.4.1 pytest one\n")
    monkeypatch.setattr(Needs, "dockerfile", lambda needs: "")  # what it installs comes from the network

    async def play() -> None:
        await trial.start(force_build=False)
        await trial.exec(f"mkdir -p {PREFIX}/bin; printf '#!/bin/sh\\necho ran $@' > {PREFIX}/bin/pytest")
        await trial.exec(f"chmod +x {PREFIX}/bin/pytest")
        assert (await trial.exec("command -v uvx")).return_code == 1, "not for the agent"
        await trial.upload_dir(script.parent, "/tests")
        done = await trial.exec("bash /tests/test.sh")
        assert (done.return_code, done.stdout) == (0, "ran one\n")
        await trial.stop(delete=True)

    asyncio.run(play())


def test_a_trial_has_named_snapshots_and_branches(trial: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        await trial.start(force_build=False)
        await trial.exec("echo draft > answer")
        place = await trial.snapshot("draft")
        assert place == trial.trial_paths.trial_dir / "snapshots" / "draft.sandbox" and place.stat().st_size
        left, right = await trial.branch(2)
        await left.exec("echo left > answer")
        await trial.exec("rm answer")
        assert (await right.exec("cat answer")).stdout == "draft\n"
        await trial.restore("draft")
        assert (await trial.exec("cat answer")).stdout == "draft\n"
        with pytest.raises(KeyError, match="found 'other'"):
            await trial.restore("other")
        with pytest.raises(ValueError, match="expected a name of letters"):
            await trial.snapshot("../up")
        assert "not in the snapshot" not in caplog.text
        await trial.exec("exec > /dev/null 2>&1; sleep 1000 &")
        await trial.snapshot("served")
        branches = await trial.branch(1)
        assert caplog.text.count("not in the snapshot: 'background: ") == 2
        for one in (trial, left, right, *branches):
            await one.stop(delete=True)

    asyncio.run(play())


def test_a_call_that_is_given_up_ends_its_command_and_the_next_waits(trial: Any) -> None:
    async def play() -> None:
        await trial.start(force_build=False)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await trial.exec("echo begun > /begun; sleep 77777; echo late > /late")
        done = await trial.exec("cat /begun; ls /late; cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        assert done.stdout.startswith("begun\n") and "sleep 77777" not in done.stdout
        assert "cannot access" in done.stdout or "No such file" in done.stdout
        given_up = asyncio.create_task(trial.exec("sleep 77777"))
        await asyncio.sleep(0)  # it waits in a thread, or will
        given_up.cancel()
        assert (await trial.exec("echo next")).stdout == "next\n"
        await trial.stop(delete=True)

    asyncio.run(play())


def test_a_start_that_is_given_up_leaves_no_sandbox(trial: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    start, made = trial._start, []

    def slowly() -> None:
        begun.set()
        assert go_on.wait(300)
        start()
        made.append(trial._sandbox)

    monkeypatch.setattr(trial, "_start", slowly)

    async def play() -> None:
        starting = asyncio.create_task(trial.start(force_build=False))
        await asyncio.to_thread(begun.wait, 60)
        starting.cancel()
        await asyncio.wait([starting])
        ending = asyncio.create_task(trial.stop(delete=True))
        await asyncio.sleep(0)
        go_on.set()
        await ending

    asyncio.run(play())
    assert made[0].closed and trial._sandbox is None


def test_branches_have_files_of_their_own_and_end_with_the_trial(trial: Any, tmp_path: Path) -> None:
    async def play() -> None:
        await trial.start(force_build=False)
        (left,) = await trial.branch(1)
        (right,) = await trial.branch(1)
        (below,) = await right.branch(1)
        places = [await one.snapshot("same") for one in (trial, left, right, below)]
        top = trial.trial_paths.trial_dir / "snapshots"
        assert places == [
            top / "same.sandbox",
            top / "branch-1" / "same.sandbox",
            top / "branch-2" / "same.sandbox",
            top / "branch-2" / "branch-1" / "same.sandbox",
        ]
        sandboxes = [one._sandbox for one in (trial, left, right, below)]
        await left.stop(delete=True)
        await trial.stop(delete=True)
        assert all(sandbox.closed for sandbox in sandboxes)

    asyncio.run(play())


def test_what_is_too_large_to_download_leaves_no_archive(trial: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("sandboxgym.adapters.harbor._LARGEST", 100)

    async def play() -> None:
        await trial.start(force_build=False)
        with pytest.raises(OSError, match="100 bytes"):
            await trial.download_dir("/logs", tmp_path / "down")
        assert ".download" not in (await trial.exec("ls -A /")).stdout
        await trial.stop(delete=True)

    asyncio.run(play())
