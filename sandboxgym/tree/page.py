"""Look at rollout trees: ``sandboxgym tree FILE`` prints them, ``--html`` writes one self-contained page.

The page needs no network and no server: one row a path (the first is the backbone), one square a step, darker where
the policy was less certain, a ring where paths branch, the return at the end; a click shows the text of the episode.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from sandboxgym.serialization import write_atomic
from sandboxgym.tree import RolloutTree
from sandboxgym.tree.files import TreeFileError, load_trees, to_json


def write_page(trees: Sequence[RolloutTree], path: str | os.PathLike[str], *, title: str = "Rollout trees") -> None:
    """Write the page, atomically."""
    write_atomic(path, page(trees, title=title).encode())


def page(trees: Sequence[RolloutTree], *, title: str = "Rollout trees") -> str:
    """The HTML page of some trees."""
    data = json.dumps(to_json(trees), allow_nan=False)
    template = (files("sandboxgym.tree") / "page.html").read_text(encoding="utf-8")
    # "<" only occurs inside of JSON strings: written as an escape, no text of an observation can end the script
    return template.replace("@DATA@", data.replace("<", "\\u003c")).replace("@TITLE@", _escape(title))


def outline(tree: RolloutTree, *, width: int = 100) -> str:
    """The tree as text: the actions of each path, forks indented under the step they start from."""
    heading = f"task {tree.task}" + (f" ({tree.kind})" if tree.kind else "")
    lines = [f"{heading}: {len(tree.paths)} paths, {tree.env_steps} steps, {tree.snapshots} snapshots"]
    for path in sorted(tree.paths, key=lambda path: path.key):
        indent = "  " * (len(path.key) // 2)
        last = path.edges[-1]
        outcome = "success" if last.success else "truncated" if last.truncated else "ended"
        lines.append(
            f"{indent}{'root path' if len(path.key) == 2 else 'fork'} {path.key[-1]} at step {path.start.depth}: "
            f"return {path.total_reward:g}, {outcome} after {len(path.from_root())} steps"
        )
        for edge in path.edges:
            mark = "*" if len(edge.parent.children) > 1 else " "
            entropy = "" if edge.action.entropy != edge.action.entropy else f"  H {edge.action.entropy:.2f}"
            text = " ".join(str(edge.action.text).split())
            lines.append(f"{indent} {mark}{edge.parent.depth:3d} {text}"[: max(20, width - len(entropy))] + entropy)
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="sandboxgym tree", description="Show rollout trees saved by sandboxgym.tree.files.save_trees."
    )
    parser.add_argument("file", nargs="?", help="JSON file of trees")
    parser.add_argument(
        "--html", nargs="?", const="", metavar="OUT", help="write a page instead (default: FILE with .html)"
    )
    arguments = parser.parse_args(argv)
    if arguments.file is None and arguments.html:  # as in `--html trees.json`
        arguments.file, arguments.html = arguments.html, ""
    if arguments.file is None:
        parser.error("expected a file of trees")
    try:
        trees = load_trees(arguments.file)
    except (OSError, TreeFileError) as error:
        parser.exit(1, f"sandboxgym tree: {error}\n")
    if arguments.html is None:
        print("\n\n".join(outline(tree) for tree in trees))
    else:
        out = Path(arguments.html) if arguments.html else Path(arguments.file).with_suffix(".html")
        write_page(trees, out, title=Path(arguments.file).stem)
        print(f"{len(trees)} trees: {out}")
    return 0


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
