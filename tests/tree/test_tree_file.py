"""Trees as files and pages."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from components import missing

from sandboxgym.tree import Action, Context, Envs, ForkAt, RolloutTree, Schedule, rollout
from sandboxgym.tree.files import (
    TreeFile,
    TreeFileError,
    files_of_run,
    from_json,
    load_trees,
    read_trees,
    save_trees,
    to_json,
    update_file,
)
from sandboxgym.tree.page import main, mean_return, outline, page, page_of_updates

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


def test_the_option_may_stand_before_the_file(tmp_path, capsys):
    file = tmp_path / "trees.json"
    save_trees([], file)
    assert main(["--html", str(file)]) == 0 and (tmp_path / "trees.html").exists()
    with pytest.raises(SystemExit) as stopped:
        main(["--html"])
    assert stopped.value.code == 2 and "expected a file of trees" in capsys.readouterr().err


# Where the trees are from, and paths that were stopped


ABOUT = {"algo": "bpo", "schedule": "split", "rule": "forks where it pays", "update": 20}


def credited() -> RolloutTree:
    """Two root paths. The first survived a roulette at step 1 and wins; of its two siblings at step 2, copies of its
    own action, one wins and one is stopped; the other root path loses.
    """
    with Envs(lambda: gym.make("toys/Dice-v0")) as envs:

        def policy(contexts: Sequence[Context]) -> list[Action]:
            return [
                Action(
                    context.path[1][-1] if context.depth == 0 else 1,
                    entropy=0.1 + context.depth,
                    logp=math.log(0.25),
                )
                for context in contexts
            ]

        (tree,) = rollout(envs, policy, ForkAt([2], width=3, roots=2), tasks=["dice"])
    for number, edge in enumerate(tree.edges()):
        edge.reward, edge.advantage, edge.value, edge.weight = 0.0, (-1) ** number / 4, 0.5, 0.5
        edge.parent.value = 0.25
    first, other, *siblings = sorted(tree.paths, key=lambda path: (len(path.key), path.key))
    for path in (first, siblings[0]):
        path.edges[-1].reward, path.edges[-1].success, path.edges[-1].truncated = 1.0, True, False
    other.edges[-1].reward = 0.0
    first.edges[0].child.survival = 0.5
    stopped = siblings[1].edges[-1]
    stopped.truncated, stopped.child.stopped, stopped.child.survival, stopped.child.value = True, True, 0.5, 0.125
    return tree


def test_a_file_says_where_its_trees_are_from_and_which_paths_were_stopped(tmp_path: Path) -> None:
    save_trees([credited()], tmp_path / "trees.json", about=ABOUT)
    found = read_trees(tmp_path / "trees.json")
    assert found.about == ABOUT
    ends = [path.edges[-1].child for path in found.trees[0].paths]
    assert sorted(end.stopped for end in ends) == [False, False, False, True]
    assert to_json(found.trees, found.about) == to_json([credited()], ABOUT)


def test_a_file_from_before_paths_could_be_stopped_still_opens() -> None:
    content = json.loads(json.dumps(to_json([credited()])))
    for node in content["trees"][0]["nodes"]:
        del node["stopped"], node["survival"]
    (tree,) = from_json(content)
    assert not any(path.edges[-1].child.stopped for path in tree.paths)


def test_a_stopped_path_is_no_failure_in_the_outline_nor_in_the_mean() -> None:
    text = outline(credited())
    assert "stopped by roulette, V̂ 0.125, after" in text and text.count("return 0,") == 1
    # the first root path counts 1/2 · 1/q = 1, each of its three siblings a third; the second root path counts 1/2
    assert mean_return(credited()) == pytest.approx((1 / 3 + 1 / 3) / (2 / 3 + 1 / 2))
    assert "weighted mean return of the 3 that ended 0.571" in text


# The trees of a run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "trees").mkdir(parents=True)
    for update in (5, 20):
        save_trees([credited()], update_file(folder, update), about={**ABOUT, "update": update})
    save_trees([credited()], folder / "trees.json", about=ABOUT)
    return folder


def test_a_run_is_shown_by_update_and_task(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [file.name for file in files_of_run(run)] == ["update-000005.json", "update-000020.json"]
    assert main([str(run)]) == 0
    assert capsys.readouterr().out.startswith("algo bpo, schedule split, update 20 (forks where it pays)\ntask dice")
    assert main([str(run), "--update", "5", "--task", "dice"]) == 0
    assert "update 5" in capsys.readouterr().out
    for wrong, expected in [("--update=7", "no trees of update 7; there are: 5, 20"), ("--task=x", "there are: dice")]:
        with pytest.raises(SystemExit) as exit_:
            main([str(run), wrong])
        assert exit_.value.code == 1 and expected in capsys.readouterr().err


def test_the_page_of_a_run_has_every_update(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--html"]) == 0
    assert "2 trees of 2 updates" in capsys.readouterr().out
    text = (run / "trees.html").read_text()
    assert re.findall(r'data-update="(\d+)"', text) == ["5", "20"] and "<title>run</title>" in text


def test_a_folder_without_trees_is_told_what_was_expected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert "expected the folder of a run, with trees/update-*.json or trees.json" in capsys.readouterr().err


def test_a_folder_of_runs_names_them(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(run.parent)])
    assert f"these are runs: {run}" in capsys.readouterr().err


def test_a_text_that_names_a_place_of_the_template_stays_text(trees: list[RolloutTree]) -> None:
    trees[0].root.observation = "@TITLE@ @DATA@"
    assert "@TITLE@ @DATA@" in page(trees, title='a "title" @DATA@')


# The page in a browser


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens trees as a page, in a browser without a network in which any error or request fails the test."""
    wrong: list[str] = []
    context = browser.new_context(viewport={"width": 1200, "height": 800}, offline=True)

    def open_(updates: Sequence[TreeFile], anchor: str = "") -> Any:
        (tmp_path / "page.html").write_text(page_of_updates(updates))
        tab = context.new_page()
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("console", lambda message: wrong.append(message.text))
        tab.on("dialog", lambda dialog: wrong.append(dialog.message))
        tab.on("request", lambda request: wrong.append(request.url) if "page.html" not in request.url else None)
        tab.goto(f"file://{tmp_path / 'page.html'}{anchor}")
        return tab

    yield open_
    context.close()
    assert wrong == []


@pytest.mark.slow
def test_a_browser_draws_every_step_and_shows_the_text(trees: list[RolloutTree], opened: Callable[..., Any]) -> None:
    tab = opened([TreeFile(trees[1:])])
    assert tab.locator(".step").count() == trees[1].env_steps
    assert tab.locator("svg .branch").count() == len(trees[1].branch_nodes)
    assert tab.locator(".turn").count() == len(trees[1].paths[0].edges) + 1
    assert tab.title() == "Rollout trees"
    assert "café </script>" in tab.locator("#episode").inner_text()


@pytest.mark.slow
def test_a_branch_point_compares_its_actions(opened: Callable[..., Any]) -> None:
    tab = opened([TreeFile([credited()], ABOUT)])
    tab.get_by_role("button", name="next branch point").click()
    panel = tab.locator("#branch")
    assert "step 2 of root path 0" in panel.inner_text()
    assert "step 2 of root path 0. All 3 took the same action" in tab.get_by_role("status").inner_text()
    assert "schedule split, which forks where it pays" in panel.inner_text()
    assert panel.locator("thead th").all_inner_texts()[2:] == ["return", "advantage", "Q̂", "probability", "weight"]
    rows = panel.locator("tbody tr")
    assert rows.count() == 3
    assert [f"copy {i + 1} of 3" in rows.nth(i).inner_text() for i in range(3)] == [True] * 3
    assert rows.nth(2).locator("td.return").inner_text() == "–", "a stopped path has no return"
    assert {cell for cell in panel.locator("td.probability").all_inner_texts()} == {"0.25"}
    panel.get_by_role("button", name="B: show sibling 1 forked at step 2 off root path 0").click()
    assert "Episode of sibling 1 forked at step 2 off root path 0: ✓ 1 success" in tab.locator("#episode").inner_text()


@pytest.mark.slow
def test_a_stopped_path_is_shown_as_stopped(opened: Callable[..., Any]) -> None:
    tab = opened([TreeFile([credited()], ABOUT)])
    assert "1 stopped by roulette" in tab.locator("#facts").inner_text()
    assert "weighted mean return of the 3 that ended 0.571" in tab.locator("#facts").inner_text()
    ends = tab.locator("svg[role=grid] text", has_text="stopped by roulette, V̂ 0.125")
    assert ends.count() == 1 and ends.get_attribute("class") == ""


@pytest.mark.slow
def test_colours_are_those_that_the_file_has(opened: Callable[..., Any]) -> None:
    tab = opened([TreeFile([credited()], ABOUT)])
    choices = tab.locator("#colours label")
    assert choices.all_inner_texts() == ["entropy", "advantage", "V̂", "weight", "probability"]

    def fills() -> set[str]:
        return set(tab.eval_on_selector_all(".step", "all => all.map(one => getComputedStyle(one).fill)"))

    by_entropy = fills()
    choices.filter(has_text="advantage").click()
    assert len(fills()) == 2 and fills() != by_entropy
    assert "advantage of the action: −0.25" in tab.locator("#key").inner_text()
    tab.keyboard.press("Escape")
    tab.locator(".step").first.click()
    tab.keyboard.press("c")
    assert tab.locator("#colours :checked").get_attribute("value") == "value"
    bare = credited()
    for edge in bare.edges():
        edge.advantage, edge.value, edge.weight, edge.parent.value = 0.0, 0.0, 1.0, 0.0
        edge.action.entropy = edge.action.logp = math.nan
    tab = opened([TreeFile([bare])])
    assert tab.locator("#colours").is_hidden() and "no entropy" in tab.locator("#key").inner_text()
    assert tab.locator("thead th").all_inner_texts()[2:] == ["return"]


@pytest.mark.slow
def test_the_keyboard_reaches_steps_rows_and_branch_points(opened: Callable[..., Any]) -> None:
    tab = opened([TreeFile([credited()], ABOUT)])

    def at() -> tuple[str, str]:
        label = tab.evaluate("document.activeElement.getAttribute('aria-label')")
        match = re.match(r"step (\d+) of (.*?):", label)
        assert match, label
        return match[1], match[2]

    tab.keyboard.press("b")
    assert at() == ("2", "root path 0") and "branch point with 3 actions" in tab.evaluate(
        "document.activeElement.getAttribute('aria-label')"
    )
    tab.keyboard.press("ArrowRight")
    assert at() == ("3", "root path 0")
    tab.keyboard.press("ArrowDown")
    assert at() == ("3", "step 2 · sibling 1")
    tab.keyboard.press("Home")
    assert at()[0] == "0"
    tab.keyboard.press("Shift+B")
    assert at() == ("2", "root path 0")
    assert tab.locator(".step[tabindex='0']").count() == 1, "one tab stop, however many steps"


@pytest.mark.slow
def test_updates_are_browsed_and_the_address_keeps_what_is_shown(opened: Callable[..., Any]) -> None:
    files = [TreeFile([credited(), credited()], {**ABOUT, "update": update}) for update in (5, 10, 20)]
    tab = opened(files)
    assert tab.locator("#updates").input_value() == "2" and tab.locator("#later").is_disabled()
    tab.get_by_role("button", name="earlier update").click()
    tab.locator("#trees").select_option("1")
    tab.locator(".step").nth(4).click()
    assert "update=10&tree=1&row=0&step=4" in tab.url
    again = opened(files, "#" + tab.url.partition("#")[2])
    assert again.locator("#updates").input_value() == "1" and again.locator("#trees").input_value() == "1"
    assert "step 4" in again.locator(".turn.chosen").inner_text()


@pytest.mark.slow
def test_hostile_texts_do_nothing_and_are_seen(opened: Callable[..., Any]) -> None:
    nasty = "\"'><img src=x onerror=alert(1)></script><script>alert(2)</script>\0\x1b[31m\u202eevil\ud800\u2028&lt;"
    tree = credited()
    tree.task, tree.kind = nasty, nasty
    for edge in tree.edges():
        edge.child.observation, edge.action.text = nasty, nasty
    tree.root.observation = "x" * 1_000_000
    tree.paths[1].edges[0].action.text = {"tool": nasty}
    tab = opened([TreeFile([tree], {name: nasty for name in ("algo", "schedule", "rule", "env", "update")})] * 2)
    assert tab.locator("img").count() == 0 and tab.locator("script").count() == 3
    shown = tab.locator("#episode").inner_text()
    assert "␀␛[31m⟨U+202E⟩evil" in shown and "<img src=x onerror=alert(1)>" in shown
    assert len(shown) < 60_000
    tab.get_by_role("button", name="show all 1,000,000 characters").click()
    assert len(tab.locator("#episode pre").first.inner_text()) == 1_000_000
    for at in range(tab.locator(".step").count()):
        tab.locator(".step").nth(at).hover()
