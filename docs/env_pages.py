"""The reference at the end of every environment's page, from the docstring of its class.

    python docs/env_pages.py          # writes docs/envs anew

It stands between marks that nobody sees, ``<!-- reference: sandboxgym/ALFWorld-v0 -->`` and
``<!-- end of reference -->``, so that the page can be read in the repository as well as on the site.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import gymnasium as gym

import sandboxgym  # noqa: F401  (registers the environments)

PAGES = Path(__file__).parent / "envs"
MARK = re.compile(r"(<!-- reference: (\S+) -->\n).*?(<!-- end of reference -->)", re.DOTALL)
SPAN = re.compile(r"(?<!`)``(?!`)(.+?)(?<!`)``(?!`)", re.DOTALL)


def reference(env_id: str) -> str:
    """The class's docstring without its first line, in Markdown, its headings one level further down."""
    module, _, name = str(gym.spec(env_id).entry_point).partition(":")
    lines = inspect.cleandoc(getattr(importlib.import_module(module), name).__doc__ or "").splitlines()
    text = re.sub(r"^## ", "### ", "\n".join(lines[1:]).strip(), flags=re.MULTILINE)
    return SPAN.sub(lambda span: span[0] if "`" in span[1] else f"`{span[1]}`", text)


def filled(page: str) -> str:
    """A page's text with the references that its marks name."""
    return MARK.sub(lambda found: f"{found[1]}\n{reference(found[2])}\n\n{found[3]}", page)


def main() -> None:
    """Command line."""
    for page in sorted(PAGES.glob("*.md")):
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
