"""Task directories: what is read of them, and what is refused with which words."""

from __future__ import annotations

import doctest
import os
import shutil
from pathlib import Path

import pytest
from task_folders import TOML, write_task

from sandboxgym import TaskNotFound
from sandboxgym.envs.harbor import dockerfile, grading, needs
from sandboxgym.envs.harbor.dockerfile import DockerfileError, parse
from sandboxgym.envs.harbor.expert import actions
from sandboxgym.envs.harbor.needs import Needs
from sandboxgym.envs.harbor.tasks import MINI, TaskError, TaskUnsupported, open_tasks, read_task


def test_the_fields_of_both_versions_of_the_format_are_read(tmp_path: Path) -> None:
    old = read_task(write_task(tmp_path / "old"))
    assert (old.id, old.type, old.memory, old.disk) == ("old", "toys", 512 * 2**20, 2**30)
    assert (old.agent_seconds, old.verifier_seconds, old.build_seconds) == (20.0, 30.0, 600.0)
    assert old.instruction.strip() == "Write done into /app/answer."
    toml = TOML.replace('memory = "512M"\nstorage = "1G"', "memory_mb = 512\nstorage_mb = 1024\nworkdir = '/srv'")
    new = read_task(write_task(tmp_path / "new", toml=f"{toml}[environment.env]\nMODE = 'a'\nKEY = '${{KEY:-none}}'\n"))
    assert (new.memory, new.disk, new.workdir) == (old.memory, old.disk, "/srv")
    assert new.env == {"MODE": "a", "KEY": "none"}


def test_the_embedded_tasks_are_complete() -> None:
    tasks = open_tasks("mini")
    assert len(tasks) == 10 and len({task.type for task in tasks}) >= 6
    for task in tasks:
        assert task.instruction and task.solution and not task.unsupported
        assert task.memory == 2**30 and task.disk == 2**29


def test_a_folder_of_tasks_one_task_and_some_of_them_can_be_opened(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        write_task(tmp_path / name)
    (tmp_path / "notes").mkdir()
    assert [task.id for task in open_tasks(tmp_path)] == ["a", "b", "c"]
    assert [task.id for task in open_tasks(tmp_path / "b")] == ["b"]
    some = open_tasks(str(tmp_path), instances=["c", "a"])
    assert [task.id for task in some] == ["c", "a"] and some.index("a") == 1 == some.index(1)
    with pytest.raises(TaskNotFound, match="'aa'; near: a"):
        open_tasks(tmp_path, instances=["aa"])
    with pytest.raises(TaskNotFound, match="tasks 0 to 1, not 2"):
        some.index(2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            ("timeout_sec = 20.0", "timeout_sec = 'soon'"),
            r"task\.toml: \[agent\] timeout_sec: expected a number.*'soon'",
        ),
        (("timeout_sec = 30.0", "timeout_sec = 0"), r"\[verifier\] timeout_sec: expected more than 0.*found 0"),
        (('memory = "512M"', 'memory = "much"'), r"\[environment\] memory: expected a size such as .*'much'"),
        (('storage = "1G"', "storage_mb = -1"), r"\[environment\] storage_mb: expected a number of at least 0.*-1"),
        (('storage = "1G"', "docker_image = 7"), r"\[environment\] docker_image: expected a text, found 7"),
        (('storage = "1G"', "workdir = 'app'"), r"\[environment\] workdir: expected an absolute path, found 'app'"),
        (('storage = "1G"', "env = {KEY = '${KEY}'}"), r"\[environment\] env\.KEY: expected .* with a default"),
        (("[agent]", "[agent"), r"task\.toml: expected TOML, found"),
        (("[metadata]", "metadata = 3\n[other]"), r"task\.toml: metadata: expected a table \[metadata\], found 3"),
    ],
)
def test_a_malformed_field_is_refused_with_its_file_and_name(
    tmp_path: Path, change: tuple[str, str], words: str
) -> None:
    assert change[0] in TOML
    write_task(tmp_path / "bad", toml=TOML.replace(*change, 1))
    with pytest.raises(TaskError, match=words):
        open_tasks(tmp_path)


@pytest.mark.parametrize(
    ("gone", "words"),
    [
        ("instruction.md", r"instruction\.md: expected a file, found none"),
        ("tests/test.sh", r"expected tests/test\.sh, found none"),
        ("environment/Dockerfile", r"expected environment/Dockerfile, or docker_image in \[environment\]"),
        ("task.toml", r"expected a task\.toml in"),
    ],
)
def test_a_missing_file_is_named(tmp_path: Path, gone: str, words: str) -> None:
    (write_task(tmp_path / "bad") / gone).unlink()
    with pytest.raises(TaskError, match=words):
        open_tasks(tmp_path)


def test_what_is_no_folder_of_tasks_is_refused(tmp_path: Path) -> None:
    for wrong, kind in ((tmp_path, TaskError), (tmp_path / "none", TaskError), (b"x", TypeError), (3, TypeError)):
        with pytest.raises(kind, match="tasks: expected"):
            open_tasks(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    ["task.toml", "instruction.md", "tests", "tests/test.sh", "environment", "environment/Dockerfile", "solution"],
)
def test_what_leads_out_of_a_task_is_refused(tmp_path: Path, name: str) -> None:
    folder, outside = write_task(tmp_path / "toy"), tmp_path / "outside"
    (folder / name).rename(outside)
    (folder / name).symlink_to(outside)
    with pytest.raises(TaskError, match=f"{name}.*: expected a part of the task, found a link that leads out of it"):
        open_tasks(folder)


def test_a_link_to_a_task_is_one(tmp_path: Path) -> None:
    write_task(tmp_path / "stored" / "toy")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "linked").symlink_to(tmp_path / "stored" / "toy")
    assert open_tasks(tmp_path / "tasks")[0].id == "linked"


def test_solutions_hold_no_file_from_elsewhere(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "toy")
    (folder / "solution" / "key").symlink_to("/etc/hostname")
    with pytest.raises(TaskError, match="key: expected a part of the solution, found a link that leads out of it"):
        actions(open_tasks(folder)[0])


def test_what_is_no_file_is_neither_waited_for_nor_copied(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "toy")
    os.mkfifo(folder / "tests" / "pipe")
    with pytest.raises(TaskError, match="pipe: expected a file, a directory or a link"):
        _ = open_tasks(folder)[0].digest
    (folder / "instruction.md").unlink()
    os.mkfifo(folder / "instruction.md")
    with pytest.raises(TaskError, match=r"instruction\.md: expected a file of at most"):
        open_tasks(folder)


def test_names_and_numbers_that_cannot_be_kept_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="expected the name of a task in UTF-8"):
        open_tasks(write_task(tmp_path / os.fsdecode(b"toy\xff")))
    with pytest.raises(TaskError, match="expected TOML, found 'Exceeds the limit"):
        open_tasks(write_task(tmp_path / "toy", toml=f"{TOML}number = {'9' * 5000}\n"))


def test_a_task_that_needs_more_than_there_is_does_not_spoil_its_folder(tmp_path: Path) -> None:
    from sandboxgym.envs.harbor.images import HarborSettings, start_of

    write_task(tmp_path / "fine")
    write_task(tmp_path / "compose", files={"environment/docker-compose.yaml": "services: {}\n"})
    write_task(tmp_path / "gpu", toml=f"{TOML}gpus = 1\n")
    write_task(tmp_path / "steps", toml=f"{TOML}[[steps]]\nname = 'one'\n")
    write_task(tmp_path / "version", toml=TOML.replace('version = "1.0"', 'schema_version = "2.0"'))
    tasks = open_tasks(tmp_path)
    assert [bool(task.unsupported) for task in tasks] == [True, False, True, True, True]
    assert tasks[4].unsupported == "version '2.0' of task.toml (1.0 to 1.4 are read)"
    with pytest.raises(TaskUnsupported, match=r"docker-compose\.yaml: several containers cannot be had here"):
        start_of(tasks[0], HarborSettings(image="host"))


def test_the_digest_knows_the_tests_and_not_the_solution(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "task")
    first = read_task(folder).digest
    (folder / "solution/solve.sh").write_text("true\n")
    assert read_task(folder).digest == first
    (folder / "tests/test.sh").write_text("true\n")
    second = read_task(folder).digest
    (folder / "environment/Dockerfile").chmod(0o755)
    assert len({first, second, read_task(folder).digest}) == 3


def test_instructions_are_parsed_with_continued_lines_comments_and_here_documents() -> None:
    text = "# a\nFROM x\nRUN one && \\\n# between\n  two\ncopy <<EOF /f\nline\nEOF\nRUN <<'END'\necho $1\nEND\n"
    found = parse(text, "Dockerfile")
    assert [(one.line, one.name) for one in found] == [(2, "FROM"), (3, "RUN"), (6, "COPY"), (9, "RUN")]
    assert found[1].text.split() == ["one", "&&", "two"]
    assert found[2].documents == (("EOF", "line\n"),) and found[3].documents == (("END", "echo $1\n"),)
    with pytest.raises(DockerfileError, match=r"Dockerfile:2: expected EOF at the end"):
        parse("FROM x\nRUN cat <<EOF\nx\n", "Dockerfile")


def test_all_embedded_dockerfiles_are_in_the_subset_and_their_tests_install_nothing() -> None:
    for task in open_tasks("mini"):
        assert task.dockerfile is not None
        assert {one.name for one in parse(task.dockerfile.read_text(), "")} <= {"FROM", "RUN", "WORKDIR", "COPY"}
        assert not needs.needs_of(task)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("apt-get update\napt-get install -y curl tmux 2>&1", Needs(apt=("curl", "tmux"))),
        (
            "curl -LsSf https://astral.sh/uv/0.9.5/install.sh | sh\nuvx \\\n -p 3.13 \\\n -w pytest==8.4.1 \\\n"
            " -w pytest-json-ctrf==0.3.5 \\\n  pytest --ctrf /logs/verifier/ctrf.json /tests/test_outputs.py -rA",
            Needs(python=("pytest==8.4.1", "pytest-json-ctrf==0.3.5")),
        ),
        ("uvx --with requests==2.32.3 pytest /tests/t.py", Needs(python=("requests==2.32.3", "pytest"))),
        ("if ! uv run --with=numpy python /tests/t.py; then", Needs(python=("numpy",))),
        ("pip3 install -q --break-system-packages pytest==8.4.1 || true", Needs(pip=("pytest==8.4.1",))),
        ("python3 /tests/check && echo 1 > /logs/verifier/reward.txt", Needs()),
    ],
)
def test_what_tests_install_is_found(script: str, expected: Needs) -> None:
    assert needs.parse(script) == expected
    assert bool(expected) == bool(expected.dockerfile())


def test_examples_hold() -> None:
    for module in (dockerfile, grading, needs):
        assert doctest.testmod(module).failed == 0


def test_the_embedded_tasks_are_no_python_that_tools_would_import() -> None:
    assert not list(MINI.rglob("*.py")) and shutil.which("bash")
