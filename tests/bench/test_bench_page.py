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


def test_an_introduction_by_hand_is_kept_where_the_program_has_none(tmp_path: Path) -> None:
    target = tmp_path / "page.md"
    block = ["```bash", "sandboxgym bench pool", "```", ""]
    target.write_text("# Old\n\nBy hand,\ntwo lines.\n\n```bash\nold\n```\n\nold text\n\n```\nmore\n```\n")
    for number in (1, 2):
        result_page.publish(["# Title", "", *block, f"text {number}"], target)
        assert (
            target.read_text()
            == f"# Title\n\nBy hand,\ntwo lines.\n\n```bash\nsandboxgym bench pool\n```\n\ntext {number}\n"
        )
    result_page.publish(["# Title", "", "By the program.", "", *block], target)
    assert target.read_text() == "# Title\n\nBy the program.\n\n```bash\nsandboxgym bench pool\n```\n"
    result_page.publish(["# Title", "", "no block"], target)
    assert target.read_text() == "# Title\n\nno block\n"
    result_page.publish(["# Title", "", *block], target)
    assert target.read_text() == "# Title\n\n```bash\nsandboxgym bench pool\n```\n"
