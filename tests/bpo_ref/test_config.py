"""Settings from the command line: flags with and without a value, configurations by their bare names."""

from __future__ import annotations

from pathlib import Path

import pytest

from bpo_ref.args import Args
from bpo_ref.config import CONFIGS, ConfigError, find_config, packaged, parse


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
