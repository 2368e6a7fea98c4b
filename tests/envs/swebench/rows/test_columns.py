"""The columns derived for old rows, against rows whose columns swebench 4.1.0 derived."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sandboxgym.envs.swebench.rows import recipes as columns

DERIVED_FROM = ("repo", "version", "instance_id", "base_commit", "test_patch")
PATCH = """diff --git a/tests/admin_docs/test_views.py b/tests/admin_docs/test_views.py
--- a/tests/admin_docs/test_views.py
+++ b/tests/admin_docs/test_views.py
@@ -1,2 +1,2 @@
 import x
--- a/not/a/file
+++ b/not/a/file
diff --git a/tests/data.json b/tests/data.json
new file mode 100644
--- /dev/null
+++ b/tests/data.json
@@ -0,0 +1 @@
+{}
diff --git a/tests/old name.py b/tests/new.py
similarity index 100%
rename from tests/old name.py
rename to tests/new.py
"""


def test_equal_to_what_the_harness_derived(verified_file: Path) -> None:
    rows = [json.loads(line) for line in verified_file.open(encoding="utf-8")]
    assert len(rows) >= 92
    for row in rows:
        derived = columns.derive(**{name: row[name] for name in DERIVED_FROM})
        assert derived == {name: row[name] for name in columns.COLUMNS}, row["instance_id"]


def test_files_before_a_patch() -> None:
    assert columns.modified_files(PATCH) == ["tests/admin_docs/test_views.py", "tests/old name.py"]


def test_what_the_tests_are_called_with() -> None:
    assert columns.directives(PATCH) == ["tests/admin_docs/test_views.py", "tests/new.py"]
    assert columns.directives(PATCH, modules=True) == ["admin_docs.test_views", "new"]


def test_image_names_have_no_double_underscore() -> None:
    assert columns.image_name("Django__django-1") == "swebench/sweb.eval.x86_64.django_1776_django-1:latest"


@pytest.mark.parametrize(
    "repo, version, message",
    [
        ("nobody/nothing", "1.0", "cannot be derived for 'nobody/nothing'"),
        ("django/django", "9.9", "version '9.9' of django"),
    ],
)
def test_what_is_not_known_is_said(repo: str, version: str, message: str) -> None:
    with pytest.raises(LookupError, match=message):
        columns.derive(repo=repo, version=version, instance_id="a__b-1", base_commit="0", test_patch="")


def test_every_repository_of_verified_is_known() -> None:
    names = "astropy django matplotlib seaborn flask requests xarray pylint pytest scikit-learn sphinx sympy"
    assert {repo.split("/")[1] for repo in columns.REPOSITORIES} == set(names.split())
    for repository in columns.REPOSITORIES.values():
        versions = [version for recipe in repository.recipes for version in recipe.versions]
        assert len(versions) == len(set(versions))
