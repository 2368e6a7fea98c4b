"""Views of rollout trees: ``sandboxgym tree FILE`` prints them, ``--html`` writes one self-contained page.

The page needs no network and no server. It has a row per path and a square per step, coloured by entropy, advantage, V̂
or weight, a ring at branch points, and the return at the end. At a branch point a table compares the actions; below it
is the text of the episode. For the folder of a run the page has every saved update.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

from sandboxgym.system.atomic import write_atomic
from sandboxgym.tree import Path as TreePath
from sandboxgym.tree import RolloutTree
from sandboxgym.tree.files import TreeFile, TreeFileError, files_of_run, read_trees, to_json


def write_page(
    trees: Sequence[RolloutTree],
    path: str | os.PathLike[str],
    *,
    title: str = "Rollout trees",
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write the page atomically."""
    write_atomic(path, page(trees, title=title, about=about).encode())


def page(trees: Sequence[RolloutTree], *, title: str = "Rollout trees", about: Mapping[str, Any] | None = None) -> str:
    """The HTML page of some trees; ``about`` is their origin (`TreeFile.about`)."""
    return page_of_updates([TreeFile(list(trees), dict(about or {}))], title=title)


def page_of_updates(updates: Sequence[TreeFile], *, title: str = "Rollout trees") -> str:
    """One HTML page of several updates of a run; it opens at the last one and parses the others when chosen."""
    template = (files("sandboxgym.tree") / "page.html").read_text(encoding="utf-8")
    parts = {"@TITLE@": _escape(title), "@DATA@": "\n".join(map(_data, updates))}
    return re.sub("@TITLE@|@DATA@", lambda found: parts[found[0]], template)


def mean_return(tree: RolloutTree) -> float:
    """Mean return of the paths that have ended; NaN if none has.

    Siblings share the weight of the path they were forked from; a path that survived a roulette of probability q counts
    1/q; paths that it stopped are left out.
    """
    ended = [path for path in tree.paths if not _stopped(path)]
    weights = [_share(path) for path in ended]
    total = sum(weight * path.total_reward for weight, path in zip(weights, ended))
    return total / sum(weights) if ended else math.nan


def outline(tree: RolloutTree, *, width: int = 100) -> str:
    """The tree as text: the actions of each path, forks indented under the step they start from."""
    heading = f"task {tree.task}" + (f" ({tree.kind})" if tree.kind else "")
    mean = mean_return(tree)
    lines = [
        f"{heading}: {len(tree.paths)} paths, {tree.env_steps} steps, {tree.snapshots} snapshots"
        + ("" if math.isnan(mean) else f", {_mean_name(tree)} {mean:.3g}")
    ]
    for path in sorted(tree.paths, key=lambda path: path.key):
        if not path.edges:
            continue
        indent = "  " * (len(path.key) // 2)
        lines.append(
            f"{indent}{'root path' if len(path.key) == 2 else 'fork'} {path.key[-1]} at step {path.start.depth}: "
            f"{_outcome(path)} after {len(path.from_root())} steps"
        )
        for edge in path.edges:
            mark = "*" if len(edge.parent.children) > 1 else " "
            entropy = "" if edge.action.entropy != edge.action.entropy else f"  H {edge.action.entropy:.2f}"
            text = " ".join(str(edge.action.text).split())
            lines.append(f"{indent} {mark}{edge.parent.depth:3d} {text}"[: max(20, width - len(entropy))] + entropy)
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="sandboxgym tree",
        description="Show rollout trees of a run, or of a file written by sandboxgym.tree.files.save_trees.",
    )
    parser.add_argument("file", nargs="?", metavar="RUN|FILE", help="a run's folder, or a JSON file of trees")
    parser.add_argument(
        "--html",
        nargs="?",
        const="",
        metavar="OUT",
        help="write a page instead (default: FILE with .html, RUN/trees.html); for a run it has all updates",
    )
    parser.add_argument("--update", type=int, metavar="N", help="only this update of the run (text: the last)")
    parser.add_argument("--task", metavar="TASK", help="only the trees of this task")
    arguments = parser.parse_args(argv)
    if arguments.file is None and arguments.html:  # as in `--html trees.json`
        arguments.file, arguments.html = arguments.html, ""
    if arguments.file is None:
        parser.error("expected a file of trees, or a run's folder")
    source = Path(arguments.file)
    try:
        updates = _chosen(source, arguments.update, arguments.task, every=arguments.html is not None)
    except (OSError, TreeFileError) as error:
        parser.exit(1, f"sandboxgym tree: {error}\n")
    if arguments.html is None:
        print("\n\n".join(_heading(update) + "\n\n".join(map(outline, update.trees)) for update in updates))
        return 0
    folder = source.is_dir()
    out = Path(arguments.html) if arguments.html else source / "trees.html" if folder else source.with_suffix(".html")
    write_atomic(out, page_of_updates(updates, title=source.resolve().name if folder else source.stem).encode())
    said = f" of {len(updates)} updates" if len(updates) > 1 else ""
    print(f"{sum(len(update.trees) for update in updates)} trees{said}: {out}")
    return 0


def _chosen(source: Path, update: int | None, task: str | None, *, every: bool) -> list[TreeFile]:
    """The requested trees: those of a file, or of every update or the last one in a run's folder."""
    paths = files_of_run(source) if source.is_dir() else [source]
    if not paths:
        inside = [str(file.parent) for file in sorted(source.glob("*/trees.json"))]
        hint = f"; these are runs: {', '.join(inside)}" if inside else ""
        raise TreeFileError(
            f"{source}: expected the folder of a run, with trees/update-*.json or trees.json; found neither{hint}"
        )
    if not every and update is None:
        paths = paths[-1:]
    found = [read_trees(path) for path in paths]
    if update is not None:
        known = [str(each.about.get("update", "not said")) for each in found]
        found = [each for each in found if each.about.get("update") == update]
        if not found:
            _refuse(source, "update", update, known)
    if task is None:
        return found
    tasks = dict.fromkeys(str(tree.task) for each in found for tree in each.trees)
    kept = [TreeFile([tree for tree in each.trees if str(tree.task) == task], each.about) for each in found]
    if task not in tasks:
        _refuse(source, "task", task, list(tasks))
    return [each for each in kept if each.trees]


def _refuse(source: Path, what: str, wanted: Any, known: Sequence[str]) -> NoReturn:
    raise TreeFileError(f"{source}: no trees of {what} {wanted}; there are: {', '.join(known)}")


def _heading(update: TreeFile) -> str:
    about = update.about
    said = [f"{name} {about[name]}" for name in ("algo", "schedule", "update") if about.get(name) is not None]
    rule = f" ({about['rule']})" if about.get("rule") else ""
    return f"{', '.join(said)}{rule}\n" if said else ""


def _mean_name(tree: RolloutTree) -> str:
    stopped = sum(map(_stopped, tree.paths))
    weighted = stopped or any(len(path.key) > 2 for path in tree.paths)
    return f"{'weighted ' * bool(weighted)}mean return" + f" of the {len(tree.paths) - stopped} that ended" * bool(
        stopped
    )


def _outcome(path: TreePath) -> str:
    last = path.edges[-1]
    if _stopped(path):
        return f"stopped by roulette, V̂ {last.child.value:.3g},"
    ending = "success" if last.success else "truncated" if last.truncated else "ended"
    return f"return {path.total_reward:g}, {ending}"


def _stopped(path: TreePath) -> bool:
    return bool(path.edges) and path.edges[-1].child.stopped


def _share(path: TreePath) -> float:
    share = 1.0
    for edge in path.from_root():
        share /= len(edge.parent.children) * edge.child.survival
    return share


def _data(update: TreeFile) -> str:
    """A script element with an update.

    "<" only occurs inside JSON strings; it is escaped there, so that no text of an environment or a policy can end the
    element.
    """
    text = json.dumps(to_json(update.trees, update.about), allow_nan=False, separators=(",", ":"))
    name = _escape(str(update.about.get("update", "")))
    return (
        f'<script class="data" type="application/json" data-update="{name}">'
        + text.replace("<", "\\u003c")
        + "</script>"
    )


def _escape(text: str) -> str:
    text = text.encode(errors="replace").decode()
    return text.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
