"""Trees as files and pages."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from components import missing

from sandboxgym.tree import Action, Context, Envs, ForkAt, RolloutTree, Schedule, rollout
from sandboxgym.tree_file import TreeFileError, from_json, load_trees, save_trees, to_json
from sandboxgym.tree_page import main, outline, page, write_page

HOSTILE = 'café </script><script>document.title = "broken"</script> & <b>bold</b>'


class NestedForks(Schedule):
    def now(self, tree: RolloutTree, path: Any, node: Any, action: Action) -> int:
        return 2 * (len(path.edges) == 1 and len(path.key) <= 4)


@pytest.fixture(params=[ForkAt([1, 3], width=3), NestedForks(2)], ids=["backbone", "nested"])
def trees(request: pytest.FixtureRequest) -> list[RolloutTree]:
    def policy(contexts: Sequence[Context]) -> list[Action]:
        return [
            Action(int(context.rng.integers(2)), entropy=0.1 * context.depth, logp=-0.5, position=7, tokens=2, data={1})
            for context in contexts
        ]

    with Envs(lambda: gym.make("toys/Dice-v0")) as envs:
        grown = rollout(envs, policy, request.param, tasks=[None, "second"])
    for number, edge in enumerate(grown[0].edges()):
        edge.advantage, edge.child.observation = number / 3, np.array([1.5, number])
    grown[1].root.observation = HOSTILE
    next(grown[1].edges()).action.entropy = math.nan
    return grown


def structure(tree: RolloutTree) -> list[Any]:
    return [
        (
            (path.key, path.start.depth, path.start.owner, path.start.width, path.total_reward),
            [(e.path, e.action.text, e.action.logp, e.advantage, e.child.depth, e.terminated) for e in path.edges],
            [e.child.parent is e for e in path.edges],
            [[child.path for child in e.parent.children] for e in path.edges],
        )
        for path in tree.paths
    ]


def test_a_saved_tree_loads_as_it_was(trees: list[RolloutTree], tmp_path: Path) -> None:
    save_trees(trees, tmp_path / "trees.json")
    loaded = load_trees(tmp_path / "trees.json")
    assert [structure(tree) for tree in loaded] == [structure(tree) for tree in trees]
    for one, other in zip(loaded, trees):
        assert (one.task, one.snapshots, one.env_steps, one.tokens) == (
            other.task,
            other.snapshots,
            other.env_steps,
            other.tokens,
        )
        assert [node.depth for node in one.branch_nodes] == [node.depth for node in other.branch_nodes]
        assert [e for path in one.paths for e in path.from_root()]
    assert next(loaded[0].edges()).child.observation == [1.5, 0.0]
    assert math.isnan(next(loaded[1].edges()).action.entropy)
    assert loaded[1].root.observation == HOSTILE
    assert to_json(loaded) == to_json(trees)


def test_a_saved_tree_keeps_which_paths_roulette_stopped_and_files_without_load_too(
    trees: list[RolloutTree], tmp_path: Path
) -> None:
    end = trees[0].paths[0].edges[-1].child
    end.survival, end.stopped, end.value = 0.25, True, 0.125
    save_trees(trees, tmp_path / "trees.json")
    loaded = load_trees(tmp_path / "trees.json")
    ends = [path.edges[-1].child for path in loaded[0].paths]
    assert (ends[0].survival, ends[0].stopped, ends[0].value) == (0.25, True, 0.125)
    assert not any(end.stopped for end in ends[1:])
    content = json.loads(json.dumps(to_json(trees)))
    for node in (node for tree in content["trees"] for node in tree["nodes"]):
        del node["survival"], node["stopped"]
    (old, *_) = from_json(content)
    assert [(path.edges[-1].child.survival, path.edges[-1].child.stopped) for path in old.paths] == [
        (1.0, False) for _ in old.paths
    ]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"not json", "expected rollout trees as JSON, .* line 1, column 1 on: Expecting value"),
        (b"[]", r"expected rollout trees in the format 'sandboxgym.tree/1', found \[\]"),
        (b'{"format": "sandboxgym.tree/9"}', "found 'sandboxgym.tree/9'"),
        (b'{"format": "sandboxgym.tree/1", "trees": [{"task": 1}]}', "incomplete"),
        (b"[" * 100_000, "recursion|nest|Expecting|depth"),
    ],
)
def test_what_is_no_tree_is_refused_by_name(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(TreeFileError, match=rf"x\.json: .*({expected})"):
        load_trees(tmp_path / "x.json")


def test_a_path_that_refers_to_no_node_is_refused(trees: list[RolloutTree]) -> None:
    content = json.loads(json.dumps(to_json(trees)))
    content["trees"][0]["paths"][0]["edges"][0]["child"] = 10**6
    with pytest.raises(TreeFileError, match="incomplete"):
        from_json(content)


def test_the_outline_names_every_path_and_marks_branch_points(trees: list[RolloutTree]) -> None:
    text = outline(trees[0])
    assert text.count(" at step ") == len(trees[0].paths)
    assert text.count("*") == sum(len(node.children) for node in trees[0].branch_nodes)
    assert "H 0.10" in text and "nan" not in outline(trees[1])


def test_the_command_prints_writes_a_page_and_explains_a_wrong_file(
    trees: list[RolloutTree], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_trees(trees, tmp_path / "run.json")
    assert main([str(tmp_path / "run.json")]) == 0
    assert capsys.readouterr().out == "\n\n".join(map(outline, trees)) + "\n"
    assert main([str(tmp_path / "run.json"), "--html"]) == 0
    assert (tmp_path / "run.html").read_text() == page(load_trees(tmp_path / "run.json"), title="run")
    with pytest.raises(SystemExit) as exit_:
        main([str(tmp_path / "none.json")])
    assert exit_.value.code == 1
    assert "none.json" in capsys.readouterr().err


def test_the_page_needs_nothing_else_and_text_stays_text(trees: list[RolloutTree]) -> None:
    text = page(trees, title="<i>")
    assert "<script>document.title" not in text and "&lt;i>" in text
    for outside in ("http://", "https://", "src=", "<link", "@import", "url("):
        assert outside not in text.replace("http://www.w3.org/2000/svg", "")


def chromium() -> str:
    found = os.environ.get("SANDBOXGYM_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if not found:
        missing("browser", "no Chromium was found")
    return str(found)


@pytest.mark.slow
def test_a_browser_draws_every_step_and_shows_the_text(trees: list[RolloutTree], tmp_path: Path) -> None:
    write_page(trees[1:], tmp_path / "page.html")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    command = [chromium(), *flags, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    result = subprocess.run([*command, f"file://{tmp_path / 'page.html'}"], capture_output=True, text=True, timeout=120)
    drawn = result.stdout
    assert drawn.count('class="step"') == trees[1].env_steps
    assert drawn.count('class="branch"') == len(trees[1].branch_nodes)
    assert drawn.count('class="turn') == len(trees[1].paths[0].edges) + 1
    assert "<title>Rollout trees</title>" in drawn
    assert "café &lt;/script&gt;" in drawn


def test_the_option_may_stand_before_the_file(tmp_path, capsys):
    file = tmp_path / "trees.json"
    save_trees([], file)
    assert main(["--html", str(file)]) == 0 and (tmp_path / "trees.html").exists()
    with pytest.raises(SystemExit) as stopped:
        main(["--html"])
    assert stopped.value.code == 2 and "expected a file of trees" in capsys.readouterr().err
