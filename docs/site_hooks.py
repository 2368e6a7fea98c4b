"""Additions to the pages of the site: descriptions for search engines, room for wide tables, pages of the repository.

MkDocs calls these functions (`hooks` in mkdocs.yml).
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
WIDE = ("results/", "conformance/")
"""Pages without a table of contents beside the text, for their tables need the width."""
FROM_ROOT = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
"""Pages of the site that stand at the top of the repository."""
LONGEST = 160  # characters of a description that search engines show


def on_config(config: Any) -> Any:
    """Link to the repository, if pyproject.toml knows where it is."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    if url := project.get("urls", {}).get("Repository"):
        config.repo_url = url
        config.edit_uri = config.edit_uri or "edit/main/docs/"
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that stand at the top of the repository."""
    for uri, name in FROM_ROOT.items():
        text = (
            (ROOT / name)
            .read_text(encoding="utf-8")
            .replace("](docs/", "](")
            .replace("](SECURITY.md)", "](security.md)")
        )
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Describe a page by its first paragraph, where it does not say otherwise; see to wide tables."""
    page.meta.setdefault("description", description(markdown))
    if page.file.src_uri.startswith(WIDE):
        page.meta.setdefault("hide", ["toc"])
    return markdown


def description(markdown: str) -> str:
    """The title and the first paragraph of prose, as plain words, cut after a sentence or a word."""
    title = re.search(r"^# (.+)$", markdown, re.MULTILINE)
    unfenced = re.sub(r"^```.*?^```", "", markdown, flags=re.DOTALL | re.MULTILINE)
    prose = (block for block in re.split(r"\n\s*\n", unfenced) if re.match(r"\s*(\*\*|[A-Za-zΑ-ω`\[])", block))
    text = ": ".join(filter(None, [title[1].strip() if title else "", next(prose, "")])).replace("?: ", "? ")
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)(\{[^}]*\})?", r"\1", text)
    text = " ".join(re.sub(r"[`*_]{1,2}(?=\S)|(?<=\S)[`*]{1,2}", "", text).split())
    if len(text) <= LONGEST:
        return text
    end = text.rfind(". ", 0, LONGEST)
    return text[: end + 1] if end > LONGEST // 2 else text[: text.rfind(" ", 0, LONGEST)] + " …"
