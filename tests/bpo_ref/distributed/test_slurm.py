"""The job script of docs/eight-gpus.md under a real Slurm of two nodes, which are two daemons of this machine.

Needs root and the programs of Debian's ``slurm-wlm``. Sizes, the model and the launcher's devices are replaced; all
other lines of the script are those of the page.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from components import missing
from ports import reserved_port

ROOT = Path(__file__).parents[3]
SCRIPT = re.compile(r'^```bash title="train.sbatch"\n(.*?)^```', re.DOTALL | re.MULTILINE)
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPort={ports[0]}
ReturnToService=2
{nodes}
PartitionName=all Nodes=one,two Default=YES MaxTime=INFINITE State=UP
"""
NODES = ("one", "two")
SIZES = "--sft-steps 1 --sft-episodes 40 --prompts 4 --eval-episodes 2 --updates 1000 --save-every 1000"


def until(what: str, holds: Callable[[], object], seconds: float) -> None:
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.2)


class Cluster:
    """Two nodes of this machine, and the folder with their files and the job's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def call(self, *command: str) -> str:
        """Run one of Slurm's commands in the job's folder; its output."""
        done = subprocess.run(command, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """State of a job: PENDING, RUNNING, CANCELLED…"""
        return re.search(r"JobState=(\w+)", self.call("scontrol", "show", "job", job))[1]  # type: ignore[index]

    def until(self, what: str, job: str, holds: Callable[[], object]) -> None:
        """Wait until something holds, while a job has not failed."""

        def met() -> bool:
            assert self.state(job) != "FAILED", f"before {what}:\n{self.output()[-6000:]}"
            return bool(holds())

        until(what, met, 500)

    def log(self, node: str) -> str:
        """Return the log of a node's daemon so far."""
        return (self.folder / f"slurmd-{node}.log").read_text(errors="replace")

    def output(self) -> str:
        """Return the output of the jobs so far."""
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("alfworld-*.log")))


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Start Slurm with its own key, sockets and ports; it ends with the test, and its jobs with it."""
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons want root")
    if lacking := [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]:
        missing("slurm", f"there is no {lacking[0]}: apt-get install slurm-wlm")
    tmp_path = Path(tempfile.mkdtemp(prefix="slurm-"))  # a short path, for it is that of a socket
    ports = reserved_port(), reserved_port(), reserved_port()
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs={os.cpu_count()}"
        for name, port in zip(NODES, ports[1:], strict=True)
    )
    for name in ("state", "spool-one", "spool-two"):
        (tmp_path / name).mkdir()
    (tmp_path / "munge.key").write_bytes(os.urandom(1024))
    (tmp_path / "munge.key").chmod(0o400)
    filled = CONFIGURATION.format(
        host=socket.gethostname(), user=getpass.getuser(), folder=tmp_path, ports=ports, nodes=nodes
    )
    (tmp_path / "slurm.conf").write_text(filled)
    found = Cluster(tmp_path)
    munge = [f"--{name}={tmp_path}/munge.{kind}" for name, kind in (("socket", "socket"), ("key-file", "key"))]
    munge += [f"--{name}={tmp_path}/munge.{name}" for name in ("pid-file", "log-file", "seed-file")]
    commands = [
        ["munged", "--foreground", "--force", *munge],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", "one"],
        ["slurmd", "-D", "-N", "two"],
    ]
    processes = []
    try:
        for command in commands:
            path = shutil.which(command[0], path=f"{os.environ['PATH']}:/usr/sbin") or command[0]
            with open(tmp_path / f"{len(processes)}-{command[0]}.out", "wb") as file:
                processes.append(subprocess.Popen([path, *command[1:]], env=found.env, stdout=file, stderr=file))
            if command[0] == "munged":
                until("munged listens", (tmp_path / "munge.socket").exists, 30)
        until("two idle nodes", lambda: found.call("sinfo", "-h", "-t", "idle", "-o", "%D") == "2", 60)
        yield found
        subprocess.run(["scancel", "--user", getpass.getuser()], env=found.env, check=False, timeout=60)
        until("no job is left", lambda: not found.call("squeue", "-h", "-t", "running,completing"), 60)
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in reversed(processes):
            process.wait(30)
        shutil.rmtree(tmp_path)


def script(cluster: Cluster) -> None:
    """Write the page's script, with sizes of a test."""
    (text,) = SCRIPT.findall((ROOT / "docs/eight-gpus.md").read_text(encoding="utf-8"))
    for before, after in (
        ("--nodes=1 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=64 ", "--nodes=2 --ntasks-per-node=1 "),
        ("8 * SLURM_NNODES", "1 * SLURM_NNODES"),
        ("accelerate launch", f"{sys.executable} -m accelerate.commands.accelerate_cli launch"),
        ("bpo_ref/configs/accelerate/fsdp2.yaml", f"{ROOT}/bpo_ref/configs/accelerate/ddp.yaml"),
        ('"$first" --main', "127.0.0.1 --main"),
        (". .venv/bin/activate\n", ""),
        ("$((10000 + SLURM_JOB_ID % 20000))", str(reserved_port())),
        ("--config alfworld-qwen2.5-7b --algo bpo ", f"--config alfworld-tiny {SIZES} --algo bpo "),
    ):
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    (cluster.folder / "train.sbatch").write_text(text)
    cluster.env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_of_two_nodes_is_stopped_continues_on_both_and_is_cancelled(cluster: Cluster) -> None:
    script(cluster)
    job = cluster.call("sbatch", "--parsable", "train.sbatch")
    cluster.until("the first update", job, lambda: "bpo 1/1000" in cluster.output())
    assert "2 processes" in cluster.output()
    cluster.call("scancel", "--signal=USR1", "--batch", job)  # as Slurm does ten minutes before the limit
    cluster.until("it is put back", job, lambda: cluster.state(job) == "PENDING")
    assert "by SIGTERM, saved in runs/alfworld-7b-bpo/checkpoint" in cluster.output()
    done = int(re.findall(r"bpo (\d+)/1000", cluster.output())[-1])
    # Slurm waits for two minutes. One that begins at once may meet, and fail of, what is left of the run before.
    cluster.until("its steps have ended", job, lambda: all(f"[{job}.0] done" in cluster.log(name) for name in NODES))
    cluster.call("scontrol", "update", f"JobId={job}", "StartTime=now")
    cluster.until("it continues", job, lambda: f"bpo {done + 1}/1000" in cluster.output())
    cluster.call("scancel", job)
    cluster.until("its processes have ended", job, lambda: not cluster.call("squeue", "-h", "-j", job))
    assert cluster.state(job) == "CANCELLED", "it was not put back"
    assert cluster.output().count("bpo 1/1000") == 1, "nothing was started from the beginning"
