"""Recipes of test runs: the columns that swebench 5.x reads (image, script, parser, type), derived for older rows.

The derivation is that of swebench 4.1.0 for the Python repositories of SWE-bench Verified; what differs between their
versions is a small table. It needs no network and no repository. A row of another repository or version is refused with
a sentence that names the columns it must have.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

COLUMNS = ("image", "eval_script", "log_parser", "eval_type")
"""Columns that swebench 5.x reads in addition to the original ones."""
WORKDIR = "/testbed"
"""Path of the repository in every image."""

_HEREDOC = "EOF_114329324912"
_NOT_TESTS = (".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")
_EDITABLE = "python -m pip install -e ."
ACTIVATE = ("source /opt/miniconda3/bin/activate", "conda activate testbed")
"""First commands of a script in SWE-bench's images."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Test setup of some versions of a repository."""

    versions: frozenset[str]
    test: str
    install: str = _EDITABLE
    before: tuple[str, ...] = ()
    """Commands between the activation of the environment and the others."""


@dataclass(frozen=True, slots=True)
class RepositoryRecipes:
    """The harness's knowledge of a repository."""

    parser: str
    recipes: tuple[Recipe, ...]
    modules: bool = field(default=False)
    """True if tests are named as dotted modules below ``tests``, not as files."""


def _recipe(versions: str, test: str = "pytest -rA", install: str = _EDITABLE, before: tuple[str, ...] = ()) -> Recipe:
    return Recipe(frozenset(versions.split()), test, install, before)


_DJANGO = "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1"
_LANG, _LANGUAGE, _ALL = "export LANG=en_US.UTF-8", "export LANGUAGE=en_US:en", "export LC_ALL=en_US.UTF-8"
_UTF8 = (_LANG, _ALL, "export PYTHONIOENCODING=utf8", _LANGUAGE)
_LOCALE = ("sed -i '/en_US.UTF-8/s/^# //g' /etc/locale.gen && locale-gen", _LANG, _LANGUAGE, _ALL)
_SETUP_PY = "python setup.py install"

REPOSITORIES: dict[str, RepositoryRecipes] = {
    "astropy/astropy": RepositoryRecipes(
        "parse_log_pytest_v2",
        (
            _recipe("3.0 3.1 3.2 4.1 4.2 4.3 5.0 5.1 5.2 v5.3", install="python -m pip install -e .[test] --verbose"),
            _recipe(
                "0.1 0.2 0.3 0.4 1.1 1.2 1.3",
                "pytest -rA -vv -o console_output_style=classic --tb=no",
                "python -m pip install -e .[test] --verbose",
            ),
        ),
    ),
    "django/django": RepositoryRecipes(
        "parse_log_django",
        (
            _recipe("1.4 1.5 1.6", _DJANGO, _SETUP_PY),
            _recipe("1.7 1.8 1.10 1.11 2.0 2.1 2.2", _DJANGO, _SETUP_PY, _UTF8),
            _recipe("1.9", "./tests/runtests.py --verbosity 2", _SETUP_PY, _UTF8),
            _recipe("3.0 3.1 3.2", _DJANGO, before=_LOCALE),
            _recipe("4.0 4.1 4.2 5.0 5.1 5.2", _DJANGO),
        ),
        modules=True,
    ),
    "matplotlib/matplotlib": RepositoryRecipes(
        "parse_log_matplotlib",
        (
            _recipe("3.0 3.1 3.2 3.3 3.4 3.5 3.6 3.7"),
            _recipe("3.8 3.9", install='python -m pip install --no-build-isolation -e ".[dev]"'),
            _recipe("1.0 1.1 1.2 1.3 1.4 1.5 2.0 2.1 2.2", install="python setup.py build; python setup.py install"),
        ),
    ),
    "mwaskom/seaborn": RepositoryRecipes(
        "parse_log_seaborn",
        (
            _recipe("0.11", "pytest --no-header -rA"),
            _recipe("0.12 0.13 0.14", "pytest --no-header -rA", "python -m pip install -e .[dev]"),
        ),
    ),
    "pallets/flask": RepositoryRecipes("parse_log_pytest", (_recipe("2.0 2.1 2.2 2.3 3.0 3.1"),)),
    "psf/requests": RepositoryRecipes(
        "parse_log_pytest_options",
        (
            _recipe(
                "0.7 0.8 0.9 0.11 0.13 0.14 1.1 1.2 2.0 2.2 2.3 2.4 2.5 2.7 2.8 2.9 2.10 2.11 2.12 2.17 2.18 2.19 2.22 "
                "2.25 2.26 2.27 2.31 3.0",
                install="python -m pip install .",
            ),
        ),
    ),
    "pydata/xarray": RepositoryRecipes(
        "parse_log_pytest", (_recipe("0.12 0.18 0.19 0.20 2022.03 2022.06 2022.09 2023.07 2024.05"),)
    ),
    "pylint-dev/pylint": RepositoryRecipes(
        "parse_log_pytest_options", (_recipe("2.8 2.9 2.10 2.11 2.13 2.14 2.15 2.16 2.17 3.0 3.1 3.2 3.3 4.0"),)
    ),
    "pytest-dev/pytest": RepositoryRecipes(
        "parse_log_pytest",
        (_recipe("4.4 4.5 4.6 5.0 5.1 5.2 5.3 5.4 6.0 6.2 6.3 7.0 7.1 7.2 7.4 8.0 8.1 8.2 8.3 8.4"),),
    ),
    "scikit-learn/scikit-learn": RepositoryRecipes(
        "parse_log_pytest_v2",
        (
            _recipe(
                "0.20 0.21 0.22 1.3 1.4 1.5 1.6",
                install="python -m pip install -v --no-use-pep517 --no-build-isolation -e .",
            ),
        ),
    ),
    "sphinx-doc/sphinx": RepositoryRecipes(
        "parse_log_pytest_v2",
        (
            _recipe(
                "1.5 1.6 1.7 1.8 2.0 2.1 2.2 2.3 2.4 3.0 3.1 3.2 3.3 3.4 3.5 4.0 4.1 4.2 4.3 4.4 4.5 5.0 5.1 5.2 5.3 "
                "6.0 6.2 7.0 7.1 7.2 7.3 7.4 8.0 8.1",
                "tox --current-env -epy39 -v --",
                "python -m pip install -e .[test]",
            ),
        ),
    ),
    "sympy/sympy": RepositoryRecipes(
        "parse_log_sympy",
        (
            _recipe(
                "0.7 1.0 1.1 1.2 1.4 1.5 1.6 1.7 1.8 1.9 1.10 1.11 1.12 1.13 1.14",
                "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C --verbose",
            ),
        ),
    ),
}


def derive(*, repo: str, version: str, instance_id: str, base_commit: str, test_patch: str) -> dict[str, str]:
    """Derive the columns of `COLUMNS` for a row that has only the original ones.

    Raises:
        LookupError: there is no recipe for this repository or version.
    """
    known = REPOSITORIES.get(repo)
    if known is None:
        raise LookupError(f"the harness columns cannot be derived for {repo!r} (known: {', '.join(REPOSITORIES)})")
    recipe = next((recipe for recipe in known.recipes if version in recipe.versions), None)
    if recipe is None:
        versions = sorted(version for recipe in known.recipes for version in recipe.versions)
        raise LookupError(
            f"the harness columns cannot be derived for version {version!r} of {repo} (known: {', '.join(versions)})"
        )
    return {
        "image": image_name(instance_id),
        "eval_script": eval_script(
            base_commit=base_commit,
            test_patch=test_patch,
            test=" ".join((recipe.test, *directives(test_patch, modules=known.modules))),
            activate=ACTIVATE,
            before=recipe.before,
            install=recipe.install,
        ),
        "log_parser": known.parser,
        "eval_type": "pass_and_fail",
    }


def image_name(instance_id: str) -> str:
    """Name of an instance's published image; two underscores are not allowed in it."""
    return f"swebench/sweb.eval.x86_64.{instance_id.lower()}:latest".replace("__", "_1776_")


def eval_script(
    *,
    base_commit: str,
    test_patch: str,
    test: str,
    activate: tuple[str, ...] = (),
    before: tuple[str, ...] = (),
    install: str | None = None,
) -> str:
    """Write the script that puts the tests in place and runs them, in the harness's form."""
    reset = f"git checkout {base_commit} {' '.join(modified_files(test_patch))}"
    lines = [
        "#!/bin/bash",
        "set -uxo pipefail",
        *activate,
        f"cd {WORKDIR}",
        *before,
        f"git config --global --add safe.directory {WORKDIR}",
        f"cd {WORKDIR}",
        "git status",
        "git show",
        f"git -c core.fileMode=false diff {base_commit}",
        *activate,
        *([install] if install else []),
        reset,
        f"git apply -v - <<'{_HEREDOC}'\n{test_patch}\n{_HEREDOC}",
        ": '>>>>> Start Test Output'",
        test,
        ": '>>>>> End Test Output'",
        reset,
    ]
    return "\n".join(lines) + "\n"


def directives(test_patch: str, *, modules: bool = False) -> list[str]:
    """Arguments of the test command: the files that the test patch touches, without data files."""
    files = re.findall(r"diff --git a/.* b/(.*)", test_patch)
    files = [name for name in files if not name.endswith(_NOT_TESTS)]
    if modules:
        return [name.removesuffix(".py").removeprefix("tests/").replace("/", ".") for name in files]
    return files


def modified_files(patch: str) -> list[str]:
    """Files that a patch in git's format changes, by their names before it, without new files."""
    files = []
    for section in re.split(r"^diff --git ", patch, flags=re.MULTILINE)[1:]:
        head = section.split("\n@@ ", 1)[0]
        named = re.search(r"^rename from (.*)$", head, re.MULTILINE) or re.search(
            r"^--- a/([^\t\n]*)", head, re.MULTILINE
        )
        if named:
            files.append(named[1])
        elif "\nnew file mode " not in head:  # only its mode changes, or it is binary
            files.append(re.match(r"a/(.*) b/", head)[1])  # type: ignore[index]
    return files
