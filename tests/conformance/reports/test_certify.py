"""The script that writes the certificates keeps a page only as it was made, by the same code."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "docs" / "conformance" / "certify.sh"
SUITE = """#!/bin/sh
if [ "$1" = conformance/sources.py ]; then exec cat sources; fi
[ -e crash ] && exit 9
for page; do :; done
echo made >> made
printf '# Snapshot conformance of it\\n\\nresult\\n' > "$page"
"""


def test_a_page_is_kept_as_it_was_made_and_by_what_it_was_made(tmp_path: Path) -> None:
    (tmp_path / "docs" / "conformance").mkdir(parents=True)
    (suite := tmp_path / "suite").write_text(SUITE)
    suite.chmod(0o755)
    page = tmp_path / "docs" / "conformance" / "taxi-deepcopy.md"

    def made(*arguments: str) -> int:
        command = ["bash", str(SCRIPT), *arguments, "taxi-deepcopy"]
        done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHON": str(suite)}, capture_output=True)
        assert done.returncode == 0, done.stderr
        return len((tmp_path / "made").read_text().splitlines())

    (tmp_path / "sources").write_text("one\n")
    assert made() == 1 and made() == 1
    first = page.read_text()
    page.write_text(first.replace("result", "better result"))
    assert made() == 2 and page.read_text() == first
    page.write_text(f"{first}More.\n")
    assert made() == 3 and made("--all") == 4
    (tmp_path / "sources").write_text("two\n")
    (tmp_path / "crash").touch()
    assert made() == 4 and page.read_text() == first, "the old page stays until there is a new one"
    (tmp_path / "crash").unlink()
    assert made() == 5 and made() == 5 and page.read_text() != first
    assert not list(page.parent.glob("*.part"))
