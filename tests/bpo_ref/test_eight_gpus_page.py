"""docs/eight-gpus.md: the trainer and the evaluation accept its command lines."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from bpo_ref.args import parse_args, resolved

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "eight-gpus.md").read_text(encoding="utf-8")


def test_the_trainer_takes_its_command_lines() -> None:
    lines = re.findall(r"^accelerate launch --config_file (\S+) -m bpo_ref.train (.*)$", PAGE, re.MULTILINE)
    assert len(lines) == 2
    for file, words in lines:
        assert (ROOT / file).is_file()
        args = resolved(parse_args(shlex.split(words)))
        assert args.model == "Qwen/Qwen2.5-7B-Instruct" and args.algo == "bpo" and args.dtype == "bfloat16"
    assert parse_args([*shlex.split(lines[1][1]), "--resume"]).resume


def test_the_other_files_and_options_are_there() -> None:
    for name in re.findall(r"bpo_ref/configs/[\w./-]+\.yaml", PAGE):
        assert (ROOT / name).is_file(), name
    source = (ROOT / "bpo_ref" / "args.py").read_text(encoding="utf-8")
    for option in re.findall(r"`--([\w-]+)", PAGE):
        assert re.search(rf"^    {option.replace('-', '_')}:", source, re.MULTILINE), option
