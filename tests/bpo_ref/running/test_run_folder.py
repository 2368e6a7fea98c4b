"""A folder that holds a run is not overwritten, and a run reports its settings, its progress and how it ended."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import forked
import pytest
from tiny_runs import ENVIRONMENT, TINY, TRAIN, assert_same_weights, config_file, launcher, metrics, trained

from bpo_ref import train
from bpo_ref.args import Args, parse_args
from bpo_ref.config import CONFIGS, ConfigError
from bpo_ref.running import console, folder
from bpo_ref.session import TrainingSession
from bpo_ref.train import Trainer


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def files(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


# The folder.


def test_a_second_run_in_a_folder_is_refused_with_one_sentence_and_changes_nothing(tmp_path: Path) -> None:
    trained(tmp_path, updates=1)
    before = files(tmp_path)
    with pytest.raises(ConfigError) as refused:
        trained(tmp_path, updates=1, algo="rloo")
    assert str(refused.value) == (
        f"out: {tmp_path} holds a run: continue it with --resume, replace it with --overwrite, "
        "or choose another folder with --out"
    )
    assert files(tmp_path) == before


@pytest.mark.parametrize("left", ["metrics.jsonl", "scores.jsonl", "results.json", "sft/x", "checkpoint.old/x"])
def test_whatever_was_learned_or_measured_is_a_run(tmp_path: Path, left: str) -> None:
    assert not folder.holds_run(tmp_path)
    path = tmp_path / left
    path.parent.mkdir(exist_ok=True)
    path.touch()
    assert folder.holds_run(tmp_path) == (path.parent != tmp_path), "an empty log holds nothing"
    path.write_text("{}")
    assert folder.holds_run(tmp_path)
    told = folder.refusal(Args(out=str(tmp_path))) or ""
    assert "--overwrite" in told and ("--resume" in told) == left.startswith("checkpoint")


def test_what_was_stopped_before_anything_was_learned_is_no_run(tmp_path: Path) -> None:
    for name in ("settings.yaml", "demonstrations.jsonl", "notes.txt"):
        (tmp_path / name).write_text("x")
    assert not folder.holds_run(tmp_path)
    trained(tmp_path, updates=1)
    assert (tmp_path / "notes.txt").read_text() == "x"


def test_overwriting_clears_the_files_of_the_run_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    trained(tmp_path / "run", updates=3, seed=5)
    trained(tmp_path / "run", updates=2, overwrite=True)
    trained(tmp_path / "new", updates=2)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "new")
    assert_same_weights(tmp_path / "run", tmp_path / "new")
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"
    for stage in ("sft", "rl"):
        assert len(list((tmp_path / "run" / "tensorboard" / stage).iterdir())) == 1, "no curve through another"


@pytest.mark.parametrize("how", ["overwritten", "started again"])
def test_what_a_killed_run_wrote_for_servers_elsewhere_is_removed_and_nothing_else(tmp_path: Path, how: str) -> None:
    out, shared = tmp_path / "out", tmp_path / "shared [7B]"
    out.mkdir()
    mine, another = "0123456789ab", "ba9876543210"
    for name in (f"{mine}-0", f"{mine}-1.new", f"start-{mine}.old", mine, f"{another}-0", "data"):
        (shared / name).mkdir(parents=True)
        (shared / name / "model.safetensors").write_text("weights")
    folder.published(out, shared / f"{mine}-", shared / f"start-{mine}", tmp_path / "none" / f"{mine}-", shared / "d")
    if how == "overwritten":
        folder.clear(out)
    else:
        folder.remove_published(out)
        folder.remove_published(out)  # there is no note any more
    assert sorted(path.name for path in shared.iterdir()) == [mine, f"{another}-0", "data"]
    assert not list(out.iterdir())


def test_everything_that_a_run_writes_is_known_as_its_own(tmp_path: Path) -> None:
    trained(tmp_path, updates=2)
    assert {path.name for path in tmp_path.iterdir()} <= {*folder.OWN, folder.LOCK}
    folder.clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [folder.LOCK]


@pytest.mark.parametrize("name", ["init_from", "model", "sft_data"])
def test_overwriting_what_the_run_starts_from_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "sft").mkdir()
    given: dict[str, Any] = {"out": str(tmp_path), "overwrite": True, name: str(tmp_path / "sft" / "part")}
    with pytest.raises(ConfigError, match=rf"^overwrite: would clear {tmp_path}/sft, which {name} names"):
        Trainer(Args(**{**TINY, **given}))
    assert (tmp_path / "sft").exists()
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match=r"^overwrite: the launcher starts .* again"):
        patch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        (tmp_path / "metrics.jsonl").write_text("{}")
        Trainer(Args(**{**TINY, "out": str(tmp_path), "overwrite": True}))
    with pytest.raises(ConfigError, match=r"^overwrite: does not go with resume"):
        Trainer(Args(**{**TINY, "out": str(tmp_path), "overwrite": True, "resume": True}))


def test_two_processes_do_not_train_in_one_folder(tmp_path: Path) -> None:
    hold = "import sys; from pathlib import Path; from bpo_ref.running.folder import lock\n"
    hold += "file = lock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", hold, str(tmp_path)]
    with subprocess.Popen(command, env=ENVIRONMENT, stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        for resume in (False, True):
            with pytest.raises(ConfigError, match=rf"^out: another process trains in {tmp_path} at this moment"):
                Trainer(Args(**{**TINY, "out": str(tmp_path), "resume": resume}))
        other.communicate("")
    trained(tmp_path, updates=1)


def test_the_packaged_configurations_name_a_folder_for_each_algorithm_and_seed() -> None:
    outs = set()
    for path in CONFIGS.glob("*.yaml"):
        for algo, seed in (("bpo", "0"), ("rloo", "0"), ("rloo", "1")):
            args = folder.named(parse_args(["--config", str(path), "--algo", algo, "--seed", seed]))
            assert args.out == f"runs/{path.stem}/{algo}-seed{seed}"
            outs.add(args.out)
    assert len(outs) == 3 * len(list(CONFIGS.glob("*.yaml")))


def test_names_in_braces_are_filled_in_and_others_refused() -> None:
    assert folder.named(Args()).out == "runs/alfworld/bpo-seed0"
    assert folder.named(Args(env_id="wordgame:toys/Keyed-v0", algo="ppo", seed=3)).out == "runs/keyed/ppo-seed3"
    assert folder.named(Args(out="/data/a b/{seed}")).out == "/data/a b/0"
    with pytest.raises(ConfigError, match=r"^out: expected \{env\}, \{algo\} or \{seed\} in braces, found \{sed\}"):
        folder.named(Args(out="runs/{sed}"))


# The settings.


def test_the_settings_are_in_the_folder_from_the_start_and_are_a_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {**TINY, "out": str(tmp_path / "run"), "sft_reward": None, "lr": 3e-5, "kl": 0.1}
    options |= {"env_kwargs": (), "algo": "grpo", "betas": (0.8, 0.9), "system": "Say: “yes”\n# and no more"}
    written: list[str] = []

    def collected(self: TrainingSession) -> Any:
        written.append((self.out / "settings.yaml").read_text())
        raise InterruptedError

    with monkeypatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr(TrainingSession, "_load_demonstrations", collected)
        Trainer(Args(**options, overwrite=True))
    (text,) = written
    again = parse_args(["--config", str(tmp_path / "run" / "settings.yaml")])
    assert again == Args(**options)
    assert "# credit: group" in text and "with 1 process." in text


def test_a_run_is_continued_by_its_own_settings(tmp_path: Path) -> None:
    trained(tmp_path / "run", updates=2)
    settings = str(tmp_path / "run" / "settings.yaml")
    train.main(["--config", settings, "--resume", "--updates", "4"])
    trained(tmp_path / "whole", updates=4)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert parse_args(["--config", settings]).updates == 4
    with pytest.raises(SystemExit, match="holds a run"):
        train.main(["--config", settings])


def test_a_job_that_is_started_again_continues_from_what_was_saved_or_begins_anew(tmp_path: Path) -> None:
    trained(tmp_path / "whole", updates=3)
    out = tmp_path / "run"
    out.mkdir()
    (out / "metrics.jsonl").write_text("{}")  # of a run that was killed before it saved
    (out / "checkpoint.new").mkdir()
    (out / "notes.txt").write_text("mine")
    trained(out, updates=1, resume_if_saved=True)
    trained(out, updates=2, resume_if_saved=True)
    (out / "checkpoint").rename(out / "checkpoint.old")  # killed while it put the new one in its place
    trained(out, updates=3, resume_if_saved=True)
    steps = [row["step"] for row in metrics(out) if "update/loss" in row and row["stage"] == 1]
    assert steps == [1, 2, 3], "each update once"
    assert_same_weights(out, tmp_path / "whole")
    assert "resume" not in (out / "settings.yaml").read_text().replace("--resume", "")
    assert (out / "notes.txt").read_text() == "mine"


def test_a_job_that_is_started_again_keeps_what_it_begins_with(tmp_path: Path) -> None:
    trained(tmp_path / "first", updates=1)
    out = tmp_path / "run"
    for log in ("", "{}"):  # a folder that holds no run; and the log of one that was killed before it saved
        shutil.rmtree(out, ignore_errors=True)
        (out / "trees").mkdir(parents=True)
        (out / "trees" / "thesis.txt").write_text("mine")
        (out / "metrics.jsonl").write_text(log)
        shutil.copy(tmp_path / "first" / "demonstrations.jsonl", out)
        if log:
            with pytest.raises(ConfigError, match=r"resume_if_saved: would clear .*, which sft_data names"):
                trained(out, updates=1, resume_if_saved=True, sft_data=str(out / "demonstrations.jsonl"))
        else:
            trained(out, updates=1, resume_if_saved=True)
            assert (out / "checkpoint").is_dir()
        assert (out / "trees" / "thesis.txt").exists() and (out / "demonstrations.jsonl").exists()


@pytest.mark.parametrize("left", ["sft/x", "sft.old/x", "adapter/x", "results.json"])
def test_what_was_learned_without_a_checkpoint_is_not_cleared(tmp_path: Path, left: str) -> None:
    (tmp_path / left).parent.mkdir(exist_ok=True)
    (tmp_path / left).write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match=r"holds what a run has learned or measured, but no checkpoint"):
        trained(tmp_path, updates=1, resume_if_saved=True)
    assert (tmp_path / left).exists()


def test_a_job_that_is_started_again_clears_nothing_that_was_learned(tmp_path: Path) -> None:
    trained(tmp_path, updates=1)
    shutil.rmtree(tmp_path / "checkpoint")
    before = files(tmp_path)
    with pytest.raises(ConfigError, match=r"holds what a run has learned or measured, but no checkpoint; choose ano"):
        trained(tmp_path, updates=1, resume_if_saved=True)
    with pytest.raises(ConfigError, match=r"overwrite: does not go with resume"):
        trained(tmp_path, updates=1, resume_if_saved=True, overwrite=True)
    assert files(tmp_path) == before


# What is told.


def test_a_header_says_what_trains_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = trained(tmp_path, updates=1)
    told = capsys.readouterr().err
    parameters = sum(parameter.numel() for parameter in trainer.session.network.parameters())
    for line in (
        "environment  wordgame:toys/WordGame-v0",
        "evaluated    on 6 episodes",
        "training     3 supervised steps, then bpo, 4 tasks per update, 1 update; seed 0",
        "device       cpu, float32, 1 process",
        f"output       {tmp_path}",
        f"model        tiny:0.2M, {parameters / 1e6:.3g} M parameters, all trained",
    ):
        assert line in told.splitlines()
    trained(tmp_path, updates=2, resume=True, budget=0)
    assert f"output       {tmp_path}, continued from rl step 1" in capsys.readouterr().err


def test_a_log_file_gets_a_line_for_each_update_and_evaluation_and_no_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path, updates=3, sft_steps=45)
    captured = capsys.readouterr()
    assert "\r" not in captured.err and "\r" not in captured.out
    lines = captured.err.splitlines()
    for start, number in {"bpo ": 3, "evaluation ": 4, "SFT ": 20}.items():
        assert len([line for line in lines if line.startswith(start)]) == number, start
    assert any(re.match(r"bpo 2/3: success \d\.\d\d, entropy \d\.\d\d, tokens \d+k \[", line) for line in lines)


def test_a_terminal_gets_a_bar_and_the_evaluations_above_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    trained(tmp_path, updates=2)
    told = terminal.getvalue()
    assert "\r" in told and "bpo: 100%" in told
    assert re.search(r"[\r\n]evaluation bpo@2: success \d+\.\d% \(\d of 6\), mean reward", told)
    assert "bpo 1/2" not in told


def test_only_the_first_process_tells(capsys: pytest.CaptureFixture[str]) -> None:
    bar = console.StageProgress("rollouts", 4, shown=False)
    bar.advance(4)
    bar.close()
    assert capsys.readouterr().err == ""


def test_a_reader_that_has_gone_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends both sides of ``… 2>&1 | tee log``."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as gone:
        monkeypatch.setattr(sys, "stderr", gone)
        bar = console.StageProgress("rollouts", 4)
        for at in range(4):
            bar.advance(at)
        console.say("saved")
        monkeypatch.undo()


def test_sizes_of_models_are_read_at_a_glance() -> None:
    assert [console.count(n) for n in (206_848, 1_543_714_304, 7_615_616_512)] == ["0.207 M", "1.54 B", "7.62 B"]


# Signals.


def signalled(command: list[str], out: Path, *, forks: bool, number: int, group: bool) -> tuple[int, str]:
    """Exit status and output of a run that gets a signal after an update."""
    logs, said = out / "metrics.jsonl", out.parent / "log.txt"
    process: forked.Process | subprocess.Popen[bytes]
    if forks:
        process = forked.start(command[1:], ENVIRONMENT, said=said)
    else:
        with said.open("w") as log:
            process = subprocess.Popen(command, env=ENVIRONMENT, stdout=-3, stderr=log, start_new_session=True)
    deadline = time.monotonic() + 240
    try:
        while not (logs.exists() and '"rl", "step": 1,' in logs.read_text()) and time.monotonic() < deadline:
            assert process.poll() is None, said.read_text()
            time.sleep(0.05)
        (os.killpg if group else os.kill)(process.pid, number)
        status = process.wait(timeout=120)
    except BaseException:
        process.terminate()
        process.wait()
        raise
    while "stopped at" not in said.read_text() and time.monotonic() < deadline:
        time.sleep(0.1)  # a launcher does not wait
    return status, said.read_text()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_run_with_the_status_that_shells_expect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, status: int
) -> None:
    optimize = Trainer._optimize

    def signalling(self: Trainer, *given: Any) -> Any:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # at once once more, as launchers do: the same one
        return optimize(self, *given)

    monkeypatch.setattr(Trainer, "_optimize", signalling)
    config = config_file(tmp_path)
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    with pytest.raises(SystemExit) as stopped:
        train.main(["--config", str(config), "--out", str(tmp_path / "run")])
    for each, handler in before.items():
        signal.signal(each, handler)
    assert stopped.value.code == status
    where, name = tmp_path / "run" / "checkpoint", signal.Signals(number).name
    assert f"stopped at rl step 1 by {name}, saved in {where}; continue with --resume\n" in capsys.readouterr().err
    mark = tmp_path / "run" / folder.STOPPED
    assert json.loads(mark.read_text()) == {"signal": name, "saved_at": "rl step 1"}
    monkeypatch.undo()
    trained(tmp_path / "run", updates=2, resume=True)
    assert not mark.exists()


def test_a_second_ctrl_c_stops_at_once_and_says_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def impatient(self: Trainer, *_: Any) -> Any:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
        raise AssertionError("it went on")

    monkeypatch.setattr("bpo_ref.session.SAME_SIGNAL_SECONDS", 0.01)
    monkeypatch.setattr(Trainer, "_optimize", impatient)
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    with pytest.raises(SystemExit) as stopped:
        train.main(["--config", str(config_file(tmp_path)), "--out", str(tmp_path / "run")])
    for each, handler in before.items():
        signal.signal(each, handler)
    assert stopped.value.code == 130
    told = capsys.readouterr().err
    assert f"stopped at once; what was learned up to rl step 0 is in {tmp_path}/run/checkpoint (--resume" in told


@pytest.mark.slow
@pytest.mark.parametrize("group", [True, False], ids=["the terminal's group", "the launcher alone"])
@pytest.mark.parametrize("processes", [1, 2])
def test_below_a_launcher_a_signal_saves_and_ends_the_run_too(tmp_path: Path, processes: int, group: bool) -> None:
    out = tmp_path / "run"
    config = config_file(tmp_path, updates=100_000)
    command = [*launcher(TRAIN, processes), "--config", str(config), "--out", str(out)]
    number = signal.SIGINT if group else signal.SIGTERM
    status, told = signalled(command, out, forks=processes > 1, number=number, group=group)
    assert status != 0 and "stopped at rl step" in told
    state = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    assert f"stopped at rl step {state['step']} by" in told
    mark = json.loads((out / folder.STOPPED).read_text())
    assert mark == {"signal": signal.Signals(number).name, "saved_at": f"rl step {state['step']}"}
