"""The command line and the pytest plugin, as users call them."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sandboxgym.conformance.__main__ import main as command
from sandboxgym.conformance.__main__ import parse_levels, parse_only, parse_reset_options
from sandboxgym.conformance.reports import formats as reports

HERE = Path(__file__).parents[1]


def main(arguments):
    """The command in this process, which is quicker; in one of its own it is tried in test_supervised."""
    return command([*arguments, "--in-process"])


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))


def test_exit_codes(capsys):
    assert main(["faulty:deep_copied", "--level", "0"]) == 0
    assert main(["faulty:Unseeded", "--only", "restore.random_streams"]) == 1
    assert "restore.random_streams failed" in capsys.readouterr().out
    assert main(["faulty:nothing"]) == 3
    assert main(["no/Such-v0"]) == 3
    assert main(["nonsense"]) == 3
    assert main(["faulty:Unseeded", "--level", "9"]) == 3
    assert main(["faulty:Unseeded", "--json", "/no/such/folder/x.json"]) == 3
    for wrong in ([], ["a", "b"], ["a", "--budget", "huge"]):
        with pytest.raises(SystemExit) as caught:
            main(wrong)
        assert caught.value.code == 3


def test_hooks_are_named_on_the_command_line(capsys):
    assert main(["faulty:deep_copied", "--only", "api.repeatable", "--hook", "actions=faulty:no_action"]) == 1
    assert "no action today" in capsys.readouterr().out
    for wrong in ("actions", "acts=faulty:no_action", "actions=faulty:nothing", "actions=faulty:NUMBER"):
        assert main(["faulty:deep_copied", "--level", "0", "--hook", wrong]) == 3


def test_inconclusive_only_is_two(monkeypatch, capsys):
    from sandboxgym.conformance import runner
    from sandboxgym.conformance.check import Check, Inconclusive, Level

    def unsure(*_):
        raise Inconclusive("too few samples")

    monkeypatch.setitem(runner.REGISTRY, "api.spec", Check("api.spec", Level.API, unsure, (), (), "", ""))
    assert main(["faulty:deep_copied", "--only", "api.spec"]) == 2
    assert "too few samples" in capsys.readouterr().out


def test_a_report_for_people_and_one_for_programs(tmp_path, capsys):
    file = tmp_path / "report.json"
    assert main(["faulty:deep_copied", "--make-kwargs", "id=Blackjack-v1", "--level", "0", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "NOT tested" in out and "pass  api.protocol" in out and "\x1b" not in out
    content = json.loads(file.read_text())
    assert content["make_kwargs"] == {"id": "Blackjack-v1"} and content["target"] == "faulty:deep_copied"
    assert main(["faulty:deep_copied", "--level", "0", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == 1


def test_two_ways_of_making_it_side_by_side(tmp_path, capsys):
    files = {name: tmp_path / name for name in ("json", "html", "markdown")}
    written = [f"--{name}={path}" for name, path in files.items()]
    ways = ["--make-kwargs", "id=Blackjack-v1", "--beside", "id=FrozenLake-v1"]
    assert main(["faulty:deep_copied", *ways, "--only", "api.spec", *written]) == 0
    out, progress = capsys.readouterr()
    assert "[2/2] pass api.spec" in progress
    assert "id=Blackjack-v1  id=FrozenLake-v1" in out and "  api.spec" in out
    content = json.loads(files["json"].read_text())
    assert [one["make_kwargs"]["id"] for one in (content, *content["beside"])] == ["Blackjack-v1", "FrozenLake-v1"]
    for name in ("html", "markdown"):
        assert "id=FrozenLake-v1" in files[name].read_text()
    assert main(["faulty:deep_copied", *ways[:2], "--beside", "id=NoSuchEnv-v0", "--only", "api.spec"]) == 3


def test_a_failure_beside_counts(capsys):
    assert main(["faulty:dice", "--beside", "correct=false", "--only", "restore.random_streams"]) == 1
    out = capsys.readouterr().out
    assert "correct by default" in out and "correct=False: restore.random_streams failed" in out


def test_colour_is_for_terminals(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert reports.coloured(Terminal()) and not reports.coloured(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not reports.coloured(Terminal())


def test_progress_is_a_line_a_check_where_nobody_watches(capsys):
    assert main(["faulty:deep_copied", "--only", "api.protocol", "--only", "api.spec"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\[1/2\] pass api\.protocol \d+\.\d s", lines[0]) and lines[1].startswith(
        "[2/2] pass api.spec"
    )
    assert main(["faulty:deep_copied", "--only", "api.spec", "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_the_list_of_checks(capsys):
    assert main(["--list"]) == 0
    out = capsys.readouterr().out
    assert "restore.trace_equality (level 1, needs exact)" in out and "hazard:" in out and "blind:" in out


def test_arguments():
    assert parse_levels(None) == (0, 1, 2, 3, 4, 5, 6)
    assert parse_levels(["0-2", "5"]) == (0, 1, 2, 5)
    assert "restore.many" in (parse_only(["restore"]) or [])
    for wrong in (["x"], ["3-9"], ["-1"]):
        with pytest.raises(ValueError):
            parse_levels(wrong)
    with pytest.raises(ValueError):
        parse_only(["restore.nothing"])


def test_levels_by_name():
    assert parse_levels(["exact"]) == (1,) and parse_levels(["api,isolation"]) == (0, 2)
    from sandboxgym.conformance import check_snapshot

    assert {result.id.partition(".")[0] for result in check_snapshot("faulty:deep_copied", levels=["api"]).results} == {
        "api"
    }
    with pytest.raises(ValueError, match="expected levels among"):
        check_snapshot("faulty:deep_copied", levels=["excat"])


def test_reset_options_on_the_command_line(capsys):
    assert parse_reset_options([]) is None
    assert parse_reset_options(['{"cell": 1}']) == {"cell": 1}
    assert parse_reset_options(['{"cell": 1}', '{"cell": 2}']) == [{"cell": 1}, {"cell": 2}]
    told = "options={'cell': 3}"
    only = ["--only", "restore.trace_equality", "--no-strength"]
    assert main(["faulty:Shared", *only]) == 1 and told not in capsys.readouterr().out
    assert main(["faulty:Shared", *only, "--reset-options", '{"cell": 3}']) == 1
    assert told in capsys.readouterr().out
    for wrong in ("cell=3", "[1]"):
        assert main(["faulty:Shared", *only, "--reset-options", wrong]) == 3
        assert "--reset-options" in capsys.readouterr().err


def test_short_ids_and_the_names_of_options_are_those_of_the_other_commands(capsys):
    assert main(["ALFWorld-v0", "--only", "api.spec", "--kwargs", "limit=2", "stop_when_won=true"]) == 0
    assert "Conformance of sandboxgym/ALFWorld-v0" in capsys.readouterr().out
    assert main(["Nothing-v9", "--only", "api.spec"]) == 3
    assert (
        main(["faulty:deep_copied", "--env-kwargs", "id=Blackjack-v1", "--import", "faulty", "--only", "api.spec"]) == 0
    )
    assert main(["faulty:deep_copied", "--import", "no_such_module", "--only", "api.spec"]) == 3


def test_what_was_not_asked_for_is_one_line_and_a_resource_failure_is_not_unfaithful(capsys, monkeypatch):
    from sandboxgym.conformance import runner
    from sandboxgym.conformance.check import Check, Failed, Level

    def leaks(*_):
        raise Failed("a folder remains")

    monkeypatch.setitem(
        runner.REGISTRY, "resources.depth", Check("resources.depth", Level.DURABLE, leaks, (), (), "", "")
    )
    assert main(["toy_envs:Corridor", "--only", "restore.trace_equality", "--only", "resources.depth"]) == 1
    out = capsys.readouterr().out
    assert out.count("asked for") == 1 and "Snapshots faithful; 1 resource check failed" in out
    assert main(["faulty:Shared", "--only", "restore.trace_equality"]) == 1
    assert "Not faithful: 1 of 1 checks fail" in capsys.readouterr().out


def test_the_strength_is_in_the_head_of_every_report(tmp_path, capsys):
    files = {name: tmp_path / name for name in ("json", "html", "markdown")}
    written = [f"--{name}={path}" for name, path in files.items()]
    assert main(["toy_envs:Corridor", "--only", "restore.trace_equality", "--strength", *written]) == 0
    text = "2 of 2 fields of the state exercised"
    assert f"strength: {text}" in capsys.readouterr().out.splitlines()[2]
    assert json.loads(files["json"].read_text())["strength"]["exercised"] == 2
    assert text in files["html"].read_text() and text in files["markdown"].read_text()


def run_pytest(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(HERE), str(HERE.parent / "support"), str(HERE.parents[1])))
    loaded = [] if _installed() else ["-p", "sandboxgym_pytest"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", *loaded, *arguments]
    environment = {**os.environ, "PYTHONPATH": path, "NO_COLOR": "1"}
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)


def _installed() -> bool:
    from importlib.metadata import entry_points

    return any(entry.value == "sandboxgym_pytest" for entry in entry_points(group="pytest11"))


def test_the_plugin_makes_one_item_a_check(tmp_path):
    options = (
        "--sandboxgym-env",
        "faulty:Unseeded",
        "--sandboxgym-env",
        "toy_envs:Corridor",
        "--sandboxgym-level",
        "0",
    )
    result = run_pytest(tmp_path, "--pyargs", "sandboxgym.conformance.test_conformance", *options)
    assert result.returncode == 0, result.stdout
    assert re.search(r"PASSED .*test_conformance\[faulty:Unseeded-api\.protocol\]", result.stdout)
    assert re.search(r"PASSED .*test_conformance\[toy_envs:Corridor-api\.protocol\]", result.stdout)


def test_the_plugin_takes_reset_options_and_short_ids(tmp_path):
    environment = ["--sandboxgym-env", "ALFWorld-v0", "--sandboxgym-kwargs", "limit=2"]
    options = [*environment, "--sandboxgym-reset-options", '{"task": 1}', "--sandboxgym-level", "api"]
    result = run_pytest(tmp_path, "--pyargs", "sandboxgym.conformance.test_conformance", *options, "-k", "api.spec")
    assert result.returncode == 0, result.stdout
    wrong = [*environment, "--sandboxgym-reset-options", "task=1", "-k", "api.spec"]
    result = run_pytest(tmp_path, "--pyargs", "sandboxgym.conformance.test_conformance", *wrong)
    assert result.returncode != 0 and "--reset-options is not JSON" in result.stdout + result.stderr


def test_the_plugin_is_silent_without_the_option(tmp_path):
    result = run_pytest(tmp_path, "--pyargs", "sandboxgym.conformance.test_conformance")
    assert result.returncode == 5 and "no tests ran" in result.stdout


def test_the_plugin_imports_nothing_until_it_is_used(tmp_path):
    (tmp_path / "test_theirs.py").write_text("def test_something(): ...\n")
    (tmp_path / "conftest.py").write_text(
        "import sys\n"
        "def pytest_sessionfinish():\n"
        "    print('imported:', sorted(name for name in sys.modules if name.startswith('sandboxgym')))\n"
    )
    result = run_pytest(tmp_path, "--collect-only", "-s", "-q")
    assert result.returncode == 0, result.stdout
    assert "imported: ['sandboxgym_pytest']" in result.stdout


def test_the_plugin_refuses_an_unknown_environment(tmp_path):
    options = ("--sandboxgym-env", "faulty:nothing", "--sandboxgym-level", "0")
    result = run_pytest(tmp_path, "--pyargs", "sandboxgym.conformance.test_conformance", *options)
    assert result.returncode != 0 and "faulty:nothing" in result.stdout + result.stderr


def test_a_module_of_ones_own_overrides_the_subject(tmp_path):
    (tmp_path / "test_mine.py").write_text(
        "import faulty, pytest\n"
        "from sandboxgym.conformance import Subject\n"
        "from sandboxgym.conformance.test_conformance import test_conformance\n"
        "@pytest.fixture(scope='session')\n"
        "def snapshot_subject():\n"
        "    return Subject(faulty.Unseeded)\n"
    )
    result = run_pytest(tmp_path, "test_mine.py", "--sandboxgym-level", "1", "-k", "streams or api")
    assert result.returncode == 1
    assert re.search(r"FAILED .*test_conformance\[restore\.random_streams\]", result.stdout), result.stdout
    assert "env.restore(snap)" in result.stdout or ".restore(snap0)" in result.stdout
