"""Settings from the command line: flags with and without a value, configurations by their bare names."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from bpo_ref.args import Args, command_line, parse_args
from bpo_ref.config import CONFIGS, ConfigError, find_config, packaged, parse
from bpo_ref.running.environments import refuse_before_loading


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], False),
        (["--resume"], True),
        (["--no-resume"], False),
        (["--resume", "True"], True),
        (["--resume", "False"], False),
        (["--resume=True"], True),
        (["--resume", "--seed", "3"], True),
        (["--seed", "3", "--resume"], True),
    ],
)
def test_a_flag_may_stand_alone(words: list[str], expected: bool) -> None:
    assert parse(Args, words).resume is expected


def test_flags_of_two_words_and_defaults_that_are_true() -> None:
    assert parse(Args, ["--gradient-checkpointing"]).gradient_checkpointing is True
    assert parse(Args, ["--gradient_checkpointing"]).gradient_checkpointing is True
    assert parse(Args, ["--no-gradient-checkpointing"]).gradient_checkpointing is False


def test_a_packaged_configuration_has_a_bare_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    whole = parse(Args, ["--config", str(CONFIGS / "alfworld-tiny.yaml")])
    for name in ("alfworld-tiny", "alfworld-tiny.yaml"):
        assert parse(Args, ["--config", name]) == whole
    assert "alfworld-tiny" in packaged() and len(packaged()) >= 10
    Path("alfworld-tiny").write_text("seed: 12\n")
    assert find_config("alfworld-tiny") == Path("alfworld-tiny"), "a file that is there comes first"


def test_an_unknown_configuration_is_told_what_there_is() -> None:
    with pytest.raises(
        ConfigError, match=r"one of alfworld-.*, found 'alfworld-tinny'; did you mean 'alfworld-tiny'\?"
    ):
        parse(Args, ["--config", "alfworld-tinny"])
    with pytest.raises(ConfigError, match=r"runs/none.yaml: there is no such file"):
        parse(Args, ["--config", "runs/none.yaml"])
    with pytest.raises(ConfigError, match=r"--config: expected a YAML file, or one of alfworld"):
        parse(Args, ["--config"])


SLOW = ("torch", "transformers", "accelerate")
"""Packages that take seconds to import."""
PROGRAM = """
import atexit, runpy, sys
atexit.register(lambda: print("imported:", [name for name in {slow} if name in sys.modules], file=sys.stderr))
sys.argv = {words}
{start}
"""


@pytest.mark.parametrize(
    ("module", "words", "shown"),
    [
        ("bpo_ref.train", ["--help"], "--sft-steps"),
        ("bpo_ref.train", ["--algo", "ppoo"], "ppoo"),
        ("bpo_ref.train", ["--config", "alfworld-tinny"], "did you mean 'alfworld-tiny'"),
        ("bpo_ref.train", ["--lr", "0"], "lr: expected more than 0"),
        ("bpo_ref.train", ["--algo", "grpo", "--roots", "1"], "two or more independent rollouts"),
        ("bpo_ref.train", ["--env-kwargs", "games"], "env_kwargs: expected NAME=VALUE"),
        ("bpo_ref.train", ["--env-id", "ALFWord-v0"], "Did you mean: `ALFWorld-v0`?"),
        ("bpo_ref.train", ["--env-id", "ALFWord-v0", "--envs", "ray"], "env_id: cannot make ALFWord-v0"),
        (
            "bpo_ref.train",
            ["--env-kwargs", "gmes=train"],
            "env_kwargs: cannot make sandboxgym/ALFWorld-v0: there is no",
        ),
        ("bpo_ref.train", ["--eval-kwargs", "games=trian"], "found 'trian'; did you mean 'train'?"),
        ("bpo_ref.train", ["--env-id", "WebShop-v0", "--env-kwargs", "split=tset"], "found 'tset'"),
        ("bpo_ref.train", ["--model", "tiny:2M"], "model: expected tiny: with one of 0.2M, 1M, 3M, found tiny:2M"),
        ("bpo_ref.train", ["--model", "./none"], "model: there is no folder ./none"),
        ("bpo_ref.train", ["--init-from", "runs/none/checkpoint"], "init_from: there is no folder"),
        ("bpo_ref.train", ["--init-from", str(CONFIGS)], "holds no model of transformers"),
        ("bpo_ref.train", ["--sft-data", "none.jsonl"], "sft_data: there is no file none.jsonl"),
        ("bpo_ref.eval", ["--checkpoint", "./none"], "checkpoint: there is no folder ./none"),
        ("bpo_ref.eval", ["--checkpoint", "a/b", "--env-id", "ALFWord-v0"], "env_id: cannot make ALFWord-v0"),
        ("bpo_ref.eval", ["--help"], "--checkpoint"),
        ("bpo_ref.study", ["--help"], "--seeds"),
        ("bpo_ref.compare", ["--help"], "usage"),
        ("bpo_ref.variance", ["--help"], "--methods"),
        ("sandboxgym", ["train", "--help"], "--sft-steps"),
        ("sandboxgym", ["train", "--algo", "grpo", "--roots", "1"], "two or more independent rollouts"),
        ("sandboxgym", ["eval", "--checkpoint", "none", "--help"], "--checkpoint"),
    ],
)
def test_help_and_wrong_settings_need_no_pytorch(module: str, words: list[str], shown: str) -> None:
    start = f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    program = PROGRAM.format(slow=SLOW, words=["program", *words], start=start)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert shown in done.stdout + done.stderr
    assert done.stderr.splitlines()[-1] == "imported: []"
    assert (done.returncode == 0) == ("--help" in words)


def test_an_environment_of_another_module_may_be_on_a_ray_cluster(tmp_path: Path, monkeypatch: Any) -> None:
    entry = "gymnasium.envs.classic_control:CartPoleEnv"
    (tmp_path / "far_env.py").write_text(f"import gymnasium\ngymnasium.register('Far-v0', entry_point={entry!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    refuse_before_loading(Args(env_id="far_env:Far-v0", envs="ray", model="tiny:0.2M", out=str(tmp_path / "run")))
    with pytest.raises(ConfigError, match=r"^env_id: cannot make near_env:Far-v0: there is no module near_env in "):
        refuse_before_loading(Args(env_id="near_env:Far-v0", envs="ray", model="tiny:0.2M", out=str(tmp_path / "run")))


@pytest.mark.parametrize(
    ("words", "module", "said"),
    [
        (
            ["--env-id", "WebShop-v0", "--env-kwargs"],
            "regex",
            "env_kwargs: .*WebShop-v0: .*install 'sandboxgym.webshop",
        ),
        (["--envs", "ray", "--prompts", "1"], "ray", r"envs: .*need Ray: pip install 'sandboxgym\[ray\]'"),
        (["--envs", "process", "--env-store", "s3://a/b"], "fsspec", r"env_store: .*needs fsspec: pip install fsspec"),
    ],
)
def test_a_missing_package_is_said_under_the_setting_that_needs_it(
    words: list[str], module: str, said: str, tmp_path: Path
) -> None:
    start = f"sys.modules[{module!r}] = None\nrunpy.run_module('bpo_ref.train', run_name='__main__', alter_sys=True)"
    program = PROGRAM.format(slow=(), words=["program", *words, "--out", str(tmp_path / "run")], start=start)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1 and re.search(said, done.stderr) and "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "run").exists()


def test_the_script_reads_its_settings_before_it_imports_pytorch() -> None:
    start = f"runpy.run_path({str(CONFIGS.with_name('train.py'))!r}, run_name='__main__')"
    program = PROGRAM.format(slow=SLOW, words=["train.py", "--help"], start=start)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "--sft-steps" in done.stdout and done.stderr.splitlines()[-1] == "imported: []"


def test_help_has_every_setting_once_under_headings_with_its_default_and_no_markup(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match=r"^0$"):
        parse_args(["--config", "alfworld-tiny", "--help"])
    shown = capsys.readouterr().out
    assert re.findall(r"^  --([\w-]+)", shown, re.MULTILINE) == [f.name.replace("_", "-") for f in fields(Args)]
    headings = re.findall(r"^\n^(\w.*)\n  --", shown, re.MULTILINE)
    assert headings[:3] == ["Run", "Environment", "Policy"] and len(headings) >= 8
    assert "``" not in shown and max(map(len, shown.splitlines())) <= 80
    assert "  --resume, --no-resume\n" in shown and "  --lr-decay {constant, linear, cosine}\n" in shown
    assert "(default: games=embedded:train)" in " ".join(shown.split()), "the configuration's value"


def test_what_depends_on_the_environment_is_left_to_the_run() -> None:
    assert command_line(["--algo", "rloo", "--baseline", "pooled"]).baseline == "pooled"  # needs a progress_key
    words = ["--algo", "bpo", "--baseline", "turn", "--refusals"]  # also wrong with bpo-forest
    with pytest.raises(SystemExit, match="refusals: goes with a baseline of"):
        command_line(words)
    # without a progress_key, bpo is bpo-forest, which has no roulette
    assert command_line(["--algo", "bpo", "--roulette", "0.5"]).roulette == 0.5


def test_environments_of_this_package_go_by_their_short_names() -> None:
    assert parse_args(["--env-id", "ALFWorld-v0"]).env_id == "sandboxgym/ALFWorld-v0"
    assert parse_args(["--env-id", "elsewhere/ALFWorld-v0"]).env_id == "elsewhere/ALFWorld-v0"


def test_of_several_processes_only_the_first_looks_at_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}")
    monkeypatch.setenv("RANK", "1")  # the first one may have begun to write by now
    assert command_line(["--out", str(tmp_path)]).out == str(tmp_path)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit, match="holds a run"):
        command_line(["--out", str(tmp_path)])
