"""Training sets beyond SWE-bench: rows of other schemas, converted to rows that `tasks` accepts.

1. A row's style is recognised by its columns (`style_of`); a file needs no flag, and may mix styles. A row that fits no
   style is refused with the columns that each style would need.
2. What their own harnesses hard-code for a repository (images, commands, parsers) is in the tables here, as in their
   public code of 2025; a row may bring ``image``, ``eval_script`` and ``log_parser`` of its own instead.
3. In a converted row, the columns ``bug``, ``hidden`` and ``removed`` describe the changes to the image before an agent
   may see it (`hiding`), and ``expected`` the statuses that make a verdict.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from sandboxgym.envs.swebench.grading.parsers import r2e, without_reasons
from sandboxgym.envs.swebench.rows import recipes as columns
from sandboxgym.envs.swebench.rows.recipes import WORKDIR
from sandboxgym.envs.swebench.rows.row_files import TaskError, columns_of, parsed, text, texts

NAMES = ("swe-smith", "swe-gym", "swe-rebench", "r2e-gym")
"""Names of data sets whose files are looked for beside those of SWE-bench."""
BENCH, SMITH, GYM, REBENCH, R2E = "swe-bench", "swe-smith", "swe-gym", "swe-rebench", "r2e-gym"

_BENCH_WHY = {
    "instance_id": "which names the task",
    "repo": "by which it is known how its tests are run",
    "version": "by which it is known how its tests are run",
    "base_commit": "at which the agent starts",
    "problem_statement": "which the agent is asked to resolve",
    "patch": "which is the solution",
    "test_patch": "which brings in the tests that decide",
    "FAIL_TO_PASS": "which lists tests that the solution has to turn",
    "PASS_TO_PASS": "which lists tests that have to stay as they are",
}
_LISTS = {name: _BENCH_WHY[name] for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}
WHY: dict[str, dict[str, str]] = {
    BENCH: _BENCH_WHY,
    GYM: _BENCH_WHY,
    REBENCH: {
        **{name: why for name, why in _BENCH_WHY.items() if name != "version"},
        "install_config": "which holds how its tests are run",
    },
    SMITH: {
        "instance_id": "which names the task",
        "repo": "by which it is known how its tests are run",
        "image_name": "which names the image with the repository",
        "problem_statement": "which the agent is asked to resolve",
        "patch": "which brings the bug into the repository",
        **_LISTS,
    },
    R2E: {
        "repo_name": "which names the repository",
        "commit_hash": "which names the commit that solves it",
        "docker_image": "which names the image with the repository and the tests",
        "problem_statement": "which the agent is asked to resolve",
        "parsed_commit_content": "which holds the solution",
        "expected_output_json": "which says how each test has to end",
    },
}
"""Columns that a row of each style must have, with their use."""


def style_of(row: Mapping[str, Any], where: str) -> str:
    """Recognise the style of a row by its columns.

    Raises:
        TaskError: the row fits no style.
    """
    if isinstance(row.get("style"), str) and row["style"] in WHY:
        return BENCH  # it has been turned into a row of ours
    if "parsed_commit_content" in row or {"repo_name", "docker_image"} <= row.keys():
        return R2E
    if row.get("install_config") is not None:
        return REBENCH
    smith = str(row.get("repo")).startswith("swesmith/")
    if smith or ("image_name" in row and "test_patch" not in row and "image" not in row):
        return SMITH
    if sum(name in row for name in _BENCH_WHY) < 4:
        styles = (
            f"{style} ({', '.join(name for name in needed if name not in row)} missing)"
            for style, needed in WHY.items()
            if style != GYM
        )
        raise TaskError(f"{where}: its columns fit no style: {'; '.join(styles)} (found: {columns_of(row)})")
    brought = all(row.get(name) for name in columns.COLUMNS)
    return GYM if not brought and str(row.get("repo")).lower() in _GYM else BENCH


def converted(row: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Convert a row of any style; only the columns that are used are checked.

    Raises:
        TaskError: a column is missing or malformed, or the row fits no style.
    """
    style = style_of(row, where)
    if style == BENCH:
        return row
    for name, why in WHY[style].items():
        if name not in row:
            raise TaskError(
                f"{where}, a row of {style}: the column {name!r} is missing, {why} (found: {columns_of(row)})"
            )
    made = {SMITH: _smith, GYM: _gym, REBENCH: _rebench, R2E: _r2e}[style](row, where)
    own = {name: row[name] for name in columns.COLUMNS if row.get(name)}
    kept = {name: row[name] for name in ("difficulty", "history", "demonstration") if row.get(name) is not None}
    return {**made, **kept, **own, "style": style}


# SWE-smith: a patch that adds a bug to a repository whose history is one commit.


@dataclass(frozen=True, slots=True)
class _Profile:
    """Test setup of a repository of SWE-smith."""

    test: str = "pytest --disable-warnings --color=no --tb=no --verbose"
    parser: str = "sandboxgym_pytest_verbose"
    some: bool = False
    """True if only the test files named in the row are run, because there are too many in all."""
    cases: bool = False
    """True if tests are chosen by name, not by file."""


_SOME = _Profile(some=True)
_PROFILES: dict[str, _Profile] = {
    **dict.fromkeys(
        (
            "conan-io/conan",
            "dask/dask",
            "getmoto/moto",
            "iterative/dvc",
            "modin-project/modin",
            "pandas-dev/pandas",
            "project-monai/monai",
            "scrapy/scrapy",
            "sqlfluff/sqlfluff",
            "sunpy/sunpy",
            "sympy/sympy",
            "tobymao/sqlglot",
        ),
        _SOME,
    ),
    "hips/autograd": _Profile(parser="sandboxgym_pytest_workers"),
    "jax-ml/jax": _Profile(test="pytest --disable-warnings --color=no --tb=no --verbose -n auto", some=True),
    "mido/mido": _Profile(test="pytest --disable-warnings --color=no --tb=no --verbose -rs -c /dev/null"),
    "paramiko/paramiko": _Profile("pytest -rA --color=no --disable-warnings", "sandboxgym_pytest_summary"),
    "pydantic/pydantic": _Profile("/root/.local/bin/uv run pytest --disable-warnings --color=no --tb=no --verbose"),
    "python/mypy": _Profile("pytest --color=no -rA -k", "sandboxgym_mypy_cases", cases=True),
    "tkrajina/gpxpy": _Profile("pytest test.py --verbose --color=no --tb=no --disable-warnings"),
    "tornadoweb/tornado": _Profile("python -m tornado.test --verbose", "sandboxgym_tornado"),
    "un33k/python-slugify": _Profile("python test.py --verbose", "sandboxgym_unittest_verbose"),
}
"""Profiles by mirrored repository; for all others, all tests are run with pytest."""
_LONGEST_ARGUMENT = 100_000
"""Characters that Linux accepts as one argument, at least."""
_PYTEST_NAMED = re.compile(r"[^:]+\.(py|pyi|txt|rst|md|pyx|test)(::|$)")


def _smith(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    repo = text(row, "repo", where)
    mirrored = repo.removeprefix("swesmith/").rpartition(".")[0].replace("__", "/", 1) or repo
    profile = _PROFILES.get(mirrored.lower(), _Profile())
    turned, kept = (texts(row, name, where, of="tests") for name in ("FAIL_TO_PASS", "PASS_TO_PASS"))
    bug = text(row, "patch", where)
    solution = reversed_patch(bug, where)
    files = [_files_of(tests, mirrored.lower(), where) for tests in (turned, kept)]
    if "pytest" in profile.test and not profile.cases and not row.get("eval_script"):
        strange = [name for name in turned if not _PYTEST_NAMED.match(name)]
        if strange:
            raise TaskError(
                f"{where}, column 'FAIL_TO_PASS': expected tests as pytest names them, found {strange[0][:80]!r}: "
                "rows of other languages must bring eval_script and log_parser"
            )
    touched = set(columns.modified_files(bug)) | set(columns.modified_files(solution))
    hidden = [name for name in files[0] if _is_test(name) and name not in touched]
    test = profile.test
    if profile.cases:
        cases = " or ".join(dict.fromkeys(name.rpartition("::")[2] for name in (*turned, *kept)))
        test = f"{test} {shlex.quote(cases)}" if len(cases) < _LONGEST_ARGUMENT else test.removesuffix(" -k")
    elif profile.some:
        test = " ".join((test, *map(shlex.quote, dict.fromkeys((*files[0], *files[1])))))
    return {
        "instance_id": row["instance_id"],
        "repo": repo,
        "version": "",
        "base_commit": "HEAD",
        "problem_statement": row["problem_statement"],
        "patch": solution,
        "test_patch": "",
        "FAIL_TO_PASS": turned,
        "PASS_TO_PASS": kept,
        "image": row["image_name"],
        "eval_script": _script(test, reverted=[name for name in files[1] if name not in hidden]),
        "log_parser": profile.parser,
        "eval_type": "pass_and_fail",
        "bug": bug,
        "hidden": hidden,
    }


def _files_of(tests: tuple[str, ...], repository: str, where: str) -> list[str]:
    """List the files of tests, in the repository."""
    if repository == "un33k/python-slugify":
        return ["test.py"]
    if repository == "tornadoweb/tornado":
        modules = (match[1].split(".")[:-1] for name in tests if (match := re.search(r"\s\((.*)\)", name)))
        return sorted({"/".join(module) + ".py" for module in modules if module})
    files = {name.split("::", 1)[0].removeprefix("../dev/") for name in tests}
    for name in files:
        if name.startswith(("/", "-")) or ".." in PurePosixPath(name).parts or "\0" in name:
            raise TaskError(f"{where}: expected tests of files in the repository, found {name[:80]!r}")
    return sorted(name for name in files if name)


def _is_test(name: str) -> bool:
    path = PurePosixPath(name)
    named = path.name.lower().startswith("test") or path.stem.endswith("test")
    return named or bool({"test", "tests", "specs"} & set(path.parts[:-1]))


def _script(test: str, *, reverted: list[str] | None = None, before: tuple[str, ...] = ()) -> str:
    """Write a script that runs tests already in place. As in these sets' harnesses, its exit status has no meaning."""
    safe = f"git config --global --add safe.directory {WORKDIR}"
    lines = ["#!/bin/bash", "set -uxo pipefail", _ACTIVATE, safe, f"cd {WORKDIR}", *before]
    if reverted:  # only files that exist: git would fail as a whole for a missing one
        listed = " ".join(map(shlex.quote, reverted))
        lines.append(f"git ls-files -z -- {listed} | xargs -0 -r git checkout HEAD --")
    lines += [": '>>>>> Start Test Output'", test, "true", ": '>>>>> End Test Output'"]
    return "\n".join(lines) + "\n"


_CONDA = "/opt/miniconda3/bin/activate"
_ACTIVATE = f"if [ -f {_CONDA} ]; then set +u; source {_CONDA}; conda activate testbed; set -u; fi"


# SWE-Gym: SWE-bench's schema for eleven other repositories.


@dataclass(frozen=True, slots=True)
class _Recipe:
    """Test setup of a repository of SWE-Gym."""

    test: str = "pytest -n0 -rA"
    parser: str = "parse_log_pytest"
    before: tuple[str, ...] = ()
    old: tuple[str, str] | None = None
    """Pair of a pattern and a setting: versions that match the pattern are tested with the setting."""


_GYM: dict[str, _Recipe] = {
    "bokeh/bokeh": _Recipe("pytest -rA -n0"),
    "conan-io/conan": _Recipe(before=("export PYTHONPATH=${PYTHONPATH:-}:$(pwd)",)),
    "dask/dask": _Recipe("pytest -n0 -rA  --color=no"),
    "facebookresearch/hydra": _Recipe("pytest -rA --tb=long"),
    "getmoto/moto": _Recipe(),
    "iterative/dvc": _Recipe("pytest -rA"),
    "modin-project/modin": _Recipe(),
    "pandas-dev/pandas": _Recipe("pytest -rA --tb=long"),
    "project-monai/monai": _Recipe("pytest -rA"),
    "pydantic/pydantic": _Recipe(
        "pytest -rA --tb=short -vv -o console_output_style=classic --no-header", "sandboxgym_pydantic"
    ),
    "python/mypy": _Recipe("pytest -rA -k", old=(r"0\.|1\.[0-6]$", "pytest -n0 -rA -k")),
}


def _gym(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    recipe = _GYM[text(row, "repo", where).lower()]
    test_patch = text(row, "test_patch", where)
    test = recipe.test
    if recipe.old and re.match(recipe.old[0], text(row, "version", where)):
        test = recipe.old[1]
    if test.endswith(" -k"):
        cases = " or ".join(re.findall(r"\[case ([^\]]+)\]", test_patch))
        test = f'{test} "{cases}"'
    else:
        test = " ".join((test, *columns.directives(test_patch)))
    name = text(row, "instance_id", where).lower().replace("__", "_s_")
    return {
        **{name: row[name] for name in _BENCH_WHY},
        "image": f"xingyaoww/sweb.eval.x86_64.{name}:latest",
        "eval_script": columns.eval_script(
            base_commit=text(row, "base_commit", where),
            test_patch=test_patch,
            test=test,
            activate=columns.ACTIVATE,
            before=recipe.before,
        ),
        "log_parser": recipe.parser,
        "eval_type": "pass_and_fail",
    }


# SWE-rebench and SWE-bench-extra: SWE-bench's schema; each row also says how to install and test.


def _rebench(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    config = row["install_config"]
    if isinstance(config, str):
        config = parsed(config, "install_config", where, expected="an object in JSON")
    if not isinstance(config, Mapping):
        raise TaskError(f"{where}, column 'install_config': expected an object, found {type(config).__name__}")
    inner = f"{where}, column 'install_config'"
    if isinstance(config.get("test_cmd"), list):
        test = " && ".join(texts(config, "test_cmd", inner, of="commands"))
    else:
        test = text(config, "test_cmd", inner, why="which runs the tests")
    test_patch = text(row, "test_patch", where)
    instance_id = text(row, "instance_id", where)
    image = next((row[name] for name in ("docker_image", "image_name") if row.get(name)), None)
    if image is None:
        image = f"swerebench/sweb.eval.x86_64.{instance_id.lower().replace('__', '_1776_')}:latest"
    return {
        **{name: row[name] for name in _BENCH_WHY if name != "version"},
        "version": row.get("version") or "",
        "image": image,
        "eval_script": columns.eval_script(
            base_commit=text(row, "base_commit", where),
            test_patch=test_patch,
            test=" ".join((test, *columns.directives(test_patch))),
            activate=columns.ACTIVATE,
        ),
        "log_parser": config.get("log_parser") or "parse_log_pytest",
        "eval_type": "pass_and_fail",
    }


# R2E-Gym: a commit, and the result of each test after it.

R2E_TESTS = ("/r2e_tests", f"{WORKDIR}/r2e_tests", f"{WORKDIR}/run_tests.sh")
"""Directory of R2E-Gym's images with the tests and their runner."""
_R2E_ANSWERS = tuple(
    f"{folder}/{name}.json"
    for folder in (WORKDIR, "")
    for name in (
        "expected_test_output",
        "syn_issue",
        "execution_result",
        "parsed_commit",
        "modified_files",
        "modified_entities",
    )
)
"""Other files in these images that may reveal the solution."""
_R2E_PLACE = f"if [ -d {R2E_TESTS[0]} ]; then rm -rf r2e_tests; ln -s {R2E_TESTS[0]} r2e_tests; fi"


def _r2e(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    commit = parsed(
        text(row, "parsed_commit_content", where), "parsed_commit_content", where, expected="a commit in JSON"
    )
    inner = f"{where}, column 'parsed_commit_content'"
    try:
        solution = _r2e_patch(commit)
        base = commit["old_commit_hash"]
    except (KeyError, TypeError, AttributeError) as error:
        raise TaskError(f"{inner}: expected a commit as R2E-Gym describes it: {error!r:.80}") from None
    if not isinstance(base, str) or not re.fullmatch(r"[0-9a-f]{40}\^?|HEAD", base):
        base = "HEAD"
    ends = parsed(text(row, "expected_output_json", where), "expected_output_json", where, expected="statuses in JSON")
    if not isinstance(ends, Mapping) or not ends or not all(isinstance(end, str) for end in ends.values()):
        raise TaskError(f"{where}, column 'expected_output_json': expected the status of each test")
    expected = without_reasons(ends)
    before = _r2e_before(row)
    passing = [name for name, end in expected.items() if end == "PASSED"]
    turned = [name for name in passing if before.get(name) != "PASSED"]
    repo, end = text(row, "repo_name", where), text(row, "commit_hash", where)
    statement = text(row, "problem_statement", where)
    asked = re.search(r"\[ISSUE\](.*)\[/ISSUE\]", statement, re.DOTALL)
    return {
        "instance_id": row.get("instance_id") or f"{repo}__{end[:12]}",
        "repo": repo,
        "version": "",
        "base_commit": base,
        "problem_statement": asked[1] if asked else statement,
        "patch": solution,
        "test_patch": "",
        "FAIL_TO_PASS": turned,
        "PASS_TO_PASS": [name for name in passing if name not in set(turned)],
        "image": row["docker_image"],
        "eval_script": _script("bash run_tests.sh", before=(_R2E_PLACE,)),
        "log_parser": "sandboxgym_r2e",
        "eval_type": "pass_and_fail",
        "hidden": R2E_TESTS,
        "removed": _R2E_ANSWERS,
        "expected": expected,
    }


def _r2e_before(row: Mapping[str, Any]) -> dict[str, str]:
    """Statuses of the tests before the commit, as far as the row has them; used for the lists of tests only."""
    content = row.get("execution_result_content")
    if not isinstance(content, str):
        return {}
    try:
        result = parsed(content, "execution_result_content", "", expected="JSON")
    except TaskError:
        return {}
    printed = result.get("old_commit_res_stdout") if isinstance(result, Mapping) else None
    return r2e(printed) if isinstance(printed, str) else {}


def _r2e_patch(commit: Mapping[str, Any]) -> str:
    """Write the solution, the commit's changes to Python files that are no tests, in git's format."""
    sections = []
    for change in commit["file_diffs"]:
        path = change["header"]["file"]["path"]
        parts = PurePosixPath(path).parts
        test = path.endswith("_test.py") or parts[-1].startswith("test_") or path.startswith("test_")
        if test or {"tests", "Tests", "test", "Test"} & set(parts) or not path.endswith(".py"):
            continue
        sections.append("".join(f"{line}\n" for line in _r2e_lines(change, path)))
    return "".join(sections)


_SIGNS = {"context": " ", "added": "+", "deleted": "-", "note": "\\ "}


def _r2e_lines(change: Mapping[str, Any], path: str) -> Iterator[str]:
    yield f"diff --git a/{path} b/{path}"
    if change["header"].get("misc_line"):
        yield change["header"]["misc_line"]
    if index := change.get("index_line"):
        mode = f" {index['mode']}" if index.get("mode") else ""
        yield f"index {index['old_commit_hash']}..{index['new_commit_hash']}{mode}"
    if change.get("minus_file") and change.get("plus_file"):
        yield f"--- {change['minus_file']['path']}"
        yield f"+++ {change['plus_file']['path']}"
    for hunk in change.get("hunks") or ():
        where = hunk["descriptor"]
        old, new = (_range(where[name]) for name in ("old_range", "new_range"))
        yield f"@@ -{old} +{new} @@" + (f" {where['section']}" if where.get("section") else "")
        for line in hunk["line_group"]["all_lines"]:
            yield _SIGNS[line["type"]] + line["content"]


def _range(part: Mapping[str, Any]) -> str:
    length = part.get("length")
    return f"{int(part['start'])}" if length is None else f"{int(part['start'])},{int(length)}"


# Reversed patches.

_HUNK = re.compile(r"@@ -(\d+(?:,\d+)?) \+(\d+(?:,\d+)?) @@(.*)")
_HEAD: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"diff --git a/(.*) b/(.*)"), lambda found: f"diff --git a/{found[2]} b/{found[1]}"),
    (
        re.compile(r'diff --git "a/(.*)" "b/(.*)"'),
        lambda found: f'diff --git "a/{found[2]}" "b/{found[1]}"',
    ),
    (re.compile(r"index ([0-9a-f]+)\.\.([0-9a-f]+)(.*)"), lambda found: f"index {found[2]}..{found[1]}{found[3]}"),
    (re.compile(r"new file mode (.*)"), lambda found: f"deleted file mode {found[1]}"),
    (re.compile(r"deleted file mode (.*)"), lambda found: f"new file mode {found[1]}"),
)
_PAIRS = (("old mode ", "new mode "), ("rename from ", "rename to "), ("--- ", "+++ "))


def reversed_patch(patch: str, where: str = "patch") -> str:
    r"""Reverse a patch in git's format.

    Raises:
        TaskError: the text is not a patch, or has a change that cannot be reversed, to a copy or a binary file.

    Example:
        >>> old = "diff --git a/f b/f\nindex 1..2 100644\n--- a/f\n+++ b/f\n@@ -1,2 +1 @@ g\n a\n-b\n"
        >>> print(reversed_patch(old), end="")
        diff --git a/f b/f
        index 2..1 100644
        --- a/f
        +++ b/f
        @@ -1 +1,2 @@ g
         a
        +b
    """
    sections = re.split(r"^(?=diff --git )", patch, flags=re.MULTILINE)
    if sections[0].strip() or len(sections) == 1:
        raise TaskError(f"{where}, column 'patch': expected a patch in git's format, found {patch[:40]!r}")
    return "".join(_reversed_section(section, where) for section in sections[1:])


def _reversed_section(section: str, where: str) -> str:
    head, *hunks = re.split(r"^(?=@@ -)", section, flags=re.MULTILINE)
    lines = head.removesuffix("\n").split("\n")
    if any(line.startswith(("GIT binary patch", "Binary files", "copy from")) for line in lines):
        raise TaskError(f"{where}, column 'patch': a change of {lines[0][:80]!r} that cannot be reversed")
    swapped = []
    for line in lines:
        made = next((make(found) for pattern, make in _HEAD if (found := pattern.fullmatch(line))), line)
        swapped.append(made)
    for old, new in _PAIRS:
        places = [next((n for n, line in enumerate(swapped) if line.startswith(sign)), None) for sign in (old, new)]
        if places[0] is not None and places[1] is not None:
            before, after = (swapped[place].removeprefix(sign) for place, sign in zip(places, (old, new)))  # type: ignore[index]
            if old == "--- ":  # a/ and b/ are sides, not names
                before, after = _side(before, "b/"), _side(after, "a/")
            swapped[places[0]], swapped[places[1]] = old + after, new + before
    return "\n".join(swapped) + "\n" + "".join(_reversed_hunk(hunk, where) for hunk in hunks)


def _side(name: str, side: str) -> str:
    quote = '"' if name.startswith('"') else ""
    bare = name.removeprefix('"')
    return quote + side + bare[2:] if bare[:2] in ("a/", "b/") else name


def _reversed_hunk(hunk: str, where: str) -> str:
    first, *lines = hunk.removesuffix("\n").split("\n")
    found = _HUNK.fullmatch(first)
    if found is None:
        raise TaskError(f"{where}, column 'patch': expected a hunk, found {first[:80]!r}")
    made = [f"@@ -{found[2]} +{found[1]} @@{found[3]}"]
    gone: list[str] = []
    come: list[str] = []
    into = made
    for line in lines:
        if line.startswith("-"):
            into = come
            into.append("+" + line[1:])
        elif line.startswith("+"):
            into = gone
            into.append("-" + line[1:])
        elif line.startswith("\\"):  # about the line before
            into.append(line)
        else:
            made += gone + come
            gone, come, into = [], [], made
            made.append(line)
    return "\n".join(made + gone + come) + "\n"
