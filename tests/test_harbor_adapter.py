"""Harbor's trials in our sandboxes."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import logging
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from components import missing

from sandboxgym.adapters.harbor import SandboxEnvironment, unpack

sys.path.insert(0, str(Path(__file__).parent / "envs" / "harbor"))
from task_folders import write_task


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
        with pytest.raises(TimeoutError, match="more than 1 seconds"):
            await trial.exec("sleep 30", timeout_sec=1)
        await trial.exec("rm -rf /app")
        assert (await trial.exec("pwd")).return_code == 126
        assert (await trial.exec("pwd", cwd="/")).stdout == "/\n"
        await trial.stop(delete=True)

    asyncio.run(play())


def test_a_trial_has_named_snapshots_and_branches(trial: Any) -> None:
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
        for one in (trial, left, right):
            await one.stop(delete=True)

    asyncio.run(play())
