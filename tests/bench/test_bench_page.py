"""Pages of results: what is rewritten, and what is kept of an earlier page."""

from pathlib import Path

import pytest

from sandboxgym.bench.tools import result_page


def test_a_page_names_its_command_and_keeps_its_remarks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "page.md"
    lines = [
        *result_page.head("Title", "pool", ["--repeats", "3", "--write", str(target), "--envs", "2"]),
        result_page.machine("extra"),
    ]
    assert lines[:5] == ["# Title", "", "```bash", "sandboxgym bench pool --repeats 3 --envs 2", "```"]
    assert ", extra, Python 3." in lines[-1]
    result_page.publish([*lines, "first", ""], target)
    assert capsys.readouterr().out == target.read_text()
    with target.open("a") as file:
        file.write(f"\n{result_page.REMARKS}\n\nBy hand.\n")
    result_page.publish([*lines, "second"], target)
    assert target.read_text().endswith(f"second\n\n{result_page.REMARKS}\n\nBy hand.\n")
    assert "first" not in target.read_text() and "By hand" not in capsys.readouterr().out
    result_page.publish(lines, None)
