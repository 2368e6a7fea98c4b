"""docs/eight-gpus.md: the trainer and the evaluation accept its command lines."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from bpo_ref.args import parse_args, resolved

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "eight-gpus.md").read_text(encoding="utf-8")


def servers(address: re.Match[str]) -> str:
    """The shell's {8000..8007}."""
    return " ".join(f"{address[1]}{port}" for port in range(8000, 8008))


def test_the_trainer_takes_its_command_lines() -> None:
    lines = re.findall(r"\baccelerate launch --config_file (\S+) .*?-m bpo_ref.train ([^'\n]*)", PAGE)
    lines = [(file, words.replace("$out", "runs/x")) for file, words in lines]
    lines = [(file, re.sub(r"(\S+){8000..8007}", servers, words)) for file, words in lines]
    assert len(lines) == 6
    for file, words in lines:
        assert (ROOT / file).is_file()
        args = resolved(parse_args(shlex.split(words)))
        assert args.model == "Qwen/Qwen2.5-7B-Instruct" and args.algo == "bpo" and args.dtype == "bfloat16"
        assert (args.backend == "vllm") == ("serving-node" in words) and len(args.server) in (0, 8)
    assert parse_args([*shlex.split(lines[1][1]), "--resume"]).resume


def test_the_other_files_and_options_are_there() -> None:
    for name in re.findall(r"bpo_ref/configs/[\w./-]+\.yaml", PAGE):
        assert (ROOT / name).is_file(), name
    source = (ROOT / "bpo_ref" / "args.py").read_text(encoding="utf-8")
    for option in re.findall(r"`--([\w-]+)", PAGE):
        assert re.search(rf"^    {option.replace('-', '_')}:", source, re.MULTILINE), option


SCRIPT = re.compile(r'^```bash title="train.sbatch"\n(.*?)^```', re.DOTALL | re.MULTILINE)
LAUNCHER = """#!/bin/bash
echo "${@: -1}" >> starts
echo $$ > launcher
case "$(cat fate)" in
    fails) exit 1;;
    ends) exit 0;;
esac
saved=runs/alfworld-7b-bpo/checkpoint
trap 'mkdir -p $saved; sleep 0.3; touch $saved/trainer_state.pt $saved/../stopped.json; exit 1' TERM
[ "$(cat fate)" != "waits, then fails" ] || trap 'exit 1' TERM
touch waiting
while true; do sleep 0.05; done
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A folder with the script of the page, and stand-ins for the launcher and for Slurm's commands.

    `tests/bpo_ref/distributed/test_slurm.py` has real ones.
    """
    (tmp_path / "bin").mkdir()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    (tmp_path / "train.sbatch").write_text(SCRIPT.search(PAGE)[1])  # type: ignore[index]
    stand_ins = {
        "accelerate": LAUNCHER,
        "scontrol": '#!/bin/bash\nif [ "$1" = show ]; then echo here; else echo "$@" >> requeued; fi\n',
        "srun": '#!/bin/bash\nwhile [ "${1:0:1}" = - ]; do shift; done\nexec "$@"\n',
        "scancel": '#!/bin/bash\necho "$@" >> signalled; [ "$1" = --signal=TERM ] && kill -TERM "$(cat launcher)"\n',
    }
    for name, text in stand_ins.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def submitted(folder: Path, fate: str, **more: str) -> int:
    """Run the job, and send it Slurm's signal if it waits for one; its exit status."""
    (folder / "fate").write_text(fate)
    env = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    env |= {"SLURM_JOB_ID": "7", **more, "SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "here"}
    process = subprocess.Popen(["bash", "train.sbatch"], cwd=folder, env=env)
    while fate.startswith("waits") and not (folder / "waiting").exists():
        time.sleep(0.01)
    if fate.startswith("waits"):
        process.send_signal(signal.SIGUSR1)
    return process.wait(timeout=120)


def test_a_job_at_its_time_limit_saves_is_put_back_and_continues(job: Path) -> None:
    assert submitted(job, "waits") == 1
    assert (job / "runs/alfworld-7b-bpo/checkpoint/trainer_state.pt").exists(), "it was waited for"
    assert (job / "requeued").read_text() == "requeue 7\n"
    assert submitted(job, "ends") == 0
    assert (job / "starts").read_text().split() == ["--resume-if-saved"] * 2
    assert (job / "requeued").read_text() == "requeue 7\n", "a finished run is not started again"


def test_a_job_that_fails_by_itself_is_not_put_back(job: Path) -> None:
    assert submitted(job, "fails") == 1 and not (job / "requeued").exists()


def test_a_job_that_fails_after_the_signal_without_saving_is_not_put_back(job: Path) -> None:
    assert submitted(job, "waits, then fails") == 1 and not (job / "requeued").exists()


def test_a_job_that_was_put_back_and_fails_at_its_start_is_not_put_back_again(job: Path) -> None:
    assert submitted(job, "waits") == 1
    assert submitted(job, "fails") == 1
    assert (job / "requeued").read_text() == "requeue 7\n"


def test_a_job_of_an_array_puts_back_itself_and_not_the_array(job: Path) -> None:
    assert submitted(job, "waits", SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="1") == 1
    assert (job / "signalled").read_text() == "--signal=TERM 7_1\n"
    assert (job / "requeued").read_text() == "requeue 7_1\n"


def test_a_controller_that_does_not_answer_is_asked_again(job: Path) -> None:
    scontrol = job / "bin" / "scontrol"
    once = 'if [ "$1" = requeue ] && [ ! -e asked ]; then touch asked; exit 1; fi\n'
    scontrol.write_text(scontrol.read_text().replace("#!/bin/bash\n", f"#!/bin/bash\n{once}"))
    (job / "bin" / "sleep").write_text("#!/bin/bash\n")
    (job / "bin" / "sleep").chmod(0o755)
    assert submitted(job, "waits") == 1
    assert (job / "asked").exists() and (job / "requeued").read_text() == "requeue 7\n"


@pytest.mark.parametrize("status", [0, 3])
def test_the_status_of_a_run_that_ends_while_the_signal_is_sent_is_that_of_the_job(job: Path, status: int) -> None:
    scancel = job / "bin" / "scancel"
    scancel.write_text(f"{scancel.read_text()}sleep 1\n")
    launcher = job / "bin" / "accelerate"
    launcher.write_text(launcher.read_text().replace("trap 'exit 1' TERM", f"trap 'exit {status}' TERM"))
    assert submitted(job, "waits, then fails") == status and not (job / "requeued").exists()
