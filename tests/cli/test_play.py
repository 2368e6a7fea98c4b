"""`play` with lines from a pipe, as in scripts: moves, undo, branches, files; the state is the environment's own."""

from __future__ import annotations

import io
import re

import gymnasium as gym
import numpy as np
import pytest
import toy_envs
from gymnasium import spaces

import sandboxgym
from sandboxgym import Unicode
from sandboxgym.cli.play import Player, parse_action
from sandboxgym.cli.support.history import CannotGo, Exploration, draw
from sandboxgym.cli.support.printing import Screen


def statuses(out: str) -> list[str]:
    return re.findall(r"^\[(step .*)\]$", out, re.MULTILINE)


def play(run, *lines: str, env="toys/Corridor-v0", options=()):
    status, out, err = run("play", env, *options, lines=lines)
    assert (status, err) == (0, ""), err
    return out


def test_steps_undo_and_redo_show_step_limit_and_reward(run):
    out = play(run, "1", "1", "1", ":undo 2", ":redo 2", "1", "1", ":undo")
    assert statuses(out) == [
        "step 0/12 | reward 0 | #0",
        "step 1/12 | reward 0 | #1",
        "step 2/12 | reward 0 | #2",
        "step 3/12 | reward 0 | #3",
        "step 1/12 | reward 0 | #1",
        "step 3/12 | reward 0 | #3",
        "step 4/12 | reward 1 | done | #4",
        "step 4/12 | reward 1 | done | #4",
        "step 3/12 | reward 0 | #3",
    ]
    assert "the episode is over: :undo" in out and "(terminated)" in out
    assert out.count("...A.\n") == 3  # rendered after a step, after a redo, after an undo


def test_branches_are_drawn_and_marks_lead_back(run):
    out = play(run, "1", ":branch fork", "1", "1", ":goto fork", "0", ":mark", ":tree", ":goto 2", ":tree")
    first, second = re.findall(r"(#0 start\n(?:.*\n)*?)\[", out)
    assert first.splitlines() == [
        "#0 start",
        "#1 1  [fork]",
        "├─ #2 1",
        "│  #3 1",
        "└─ #4 0  [m0]  <- here",
    ]
    assert second.splitlines()[2] == "├─ #2 1  <- here"


def test_a_saved_state_is_loaded_in_another_game_with_its_step_count(run, tmp_path):
    play(run, "1", "1", f":save '{tmp_path}/a b.snap'")
    out = play(run, f":load '{tmp_path}/a b.snap'", "1", "1", ":tree")
    assert statuses(out)[1:4] == [
        "step 2/12 | reward 0 | #1",
        "step 3/12 | reward 0 | #2",
        "step 4/12 | reward 1 | done | #3",
    ]
    assert "#1 loaded from a b.snap" in out


def test_a_loaded_end_of_an_episode_is_one(run, tmp_path):
    play(run, *["0"] * 12, f":save {tmp_path}/end.snap")
    out = play(run, f":load {tmp_path}/end.snap", "1")
    assert statuses(out)[1] == "step 12/12 | reward 0 | done | #1" and "truncated: the step limit" in out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("2", "expected an action of Discrete(2), found '2'"),
        ("left", "expected an action of Discrete(2)"),
        (":undo", "there are only 0 steps to undo"),
        (":undo x", "expected a number from 1 on"),
        (":redo", "nothing to redo"),
        (":goto nowhere", "numbers go from 0 to 0, the marks are: none"),
        (":goto", ":goto NAME"),
        (":mark 7", "a name, not a number"),
        (":load /no/such.snap", "No such file"),
        (":save", ":save FILE"),
        (":save 'a", "No closing quotation"),
        (":frobnicate", "is not known"),
        (":r", "could be redo, random, reset"),
    ],
)
def test_what_cannot_be_done_is_said_and_changes_nothing(run, line, message):
    out = play(run, line)
    assert message in out and statuses(out) == ["step 0/12 | reward 0 | #0"] * 2


def test_a_file_that_is_no_snapshot_changes_nothing(run, tmp_path):
    (tmp_path / "x.snap").write_bytes(b"nothing")
    out = play(run, "1", f":load {tmp_path}/x.snap")
    assert "x.snap" in out and statuses(out)[-1] == "step 1/12 | reward 0 | #1"


def test_words_may_be_shortened_and_help_lists_them(run):
    out = play(run, "1", ":u", ":h", ":", ":q", "1")
    assert statuses(out)[2] == "step 0/12 | reward 0 | #0" and len(statuses(out)) == 5
    assert out.count(":goto NAME|N") == 2


def test_random_actions_differ_after_undo_and_leave_the_environments_stream_alone():
    env = gym.make("toys/Dice-v0")
    exploration = Exploration(env, seed=0)
    before = env.action_space.np_random.bit_generator.state
    player = Player(exploration, Screen(io.StringIO(), width=80))
    drawn = set()
    for _ in range(40):
        player.do(":random")
        drawn.add(int(exploration.here.action))
        player.do(":undo")
    assert drawn == {0, 1, 2}
    player.do(":random")
    assert env.action_space.np_random.bit_generator.state == before
    exploration.close()


def test_redo_follows_the_line_that_was_gone_to():
    exploration = Exploration(toy_envs.Corridor())
    first = exploration.step(1)
    exploration.undo()
    exploration.step(0)
    exploration.goto(first)
    exploration.undo()
    assert exploration.redo() is first
    exploration.close()


def test_undo_brings_back_the_dice():
    exploration = Exploration(gym.make("toys/Dice-v0"), seed=3)
    first = [exploration.step(0).observation for _ in range(4)]
    exploration.goto(exploration.nodes[0])
    assert [exploration.step(0).observation for _ in range(4)] == first
    assert len(exploration.nodes) == 9  # no state_hash says that they are the same
    exploration.close()


def test_an_action_taken_again_leads_to_the_known_state():
    exploration = Exploration(gym.make("sandboxgym/ALFWorld-v0"), options={"task": 0})
    command = exploration.here.info["admissible_commands"][0]
    node = exploration.step(command)
    exploration.undo()
    assert exploration.step(command) is node and len(exploration.nodes) == 2
    exploration.close()


def test_a_step_that_raises_leaves_the_state():
    class Fragile(toy_envs.Corridor):
        def step(self, action):
            result = super().step(action)
            if self.state["cell"] == 2:
                self.state["cell"] = 77
                raise RuntimeError("out of order")
            return result

    exploration = Exploration(Fragile())
    exploration.step(1)
    with pytest.raises(CannotGo, match="out of order"):
        exploration.step(1)
    assert exploration.env.state["cell"] == 1 and exploration.step(0).observation[0] == 0
    exploration.close()


def test_a_third_partys_environment_without_our_base_class_is_played(run):
    class Foreign(gym.Env):
        observation_space = action_space = Unicode(("a",))
        snapshot_spec = sandboxgym.SnapshotSpec(cross_process=False)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.said = []
            return "say something", {}

        def step(self, action):
            self.said.append(action)
            return ",".join(self.said), 0.5, False, False, {}

        def snapshot(self):
            return tuple(self.said)

        def restore(self, snap, *, seed=None):
            self.said = list(snap)
            return ",".join(snap), {}

        def fork(self, k, *, seed=None):
            raise NotImplementedError

    if "toys/Foreign-v0" not in gym.registry:
        gym.register("toys/Foreign-v0", entry_point=Foreign, max_episode_steps=9)
    out = play(run, "a", "b", ":undo", "c", "::x", ":save /tmp/never.snap", env="toys/Foreign-v0")
    assert "a,c,:x" in out and "step 3/9 | reward 0.5 | return 1.5" in out
    assert "cannot be saved together with wrappers" in " ".join(out.split())


def test_numbers_pick_admissible_commands_and_actions_filters_them(run):
    out = play(
        run, "0", ":actions GO TO", ":actions nothing like it", "999", env="ALFWorld-v0", options=("--task", "0")
    )
    assert re.search(r"^> 0\n\nYou ", out, re.MULTILINE)
    assert "no admissible command with 'nothing like it'" in out and "the commands are numbered 0 to" in out
    filtered = out.partition("> :actions GO TO")[2].partition("[step")[0]
    assert "go to" in filtered and "inventory" not in filtered
    assert all(len(line) <= 100 for line in out.splitlines())


def test_seed_and_task_choose_the_start(run):
    one = play(run, ":info", env="ALFWorld-v0", options=("--task", "embedded/train/7", "--kwargs", "limit=9"))
    assert "task_id: embedded/train/7" in one
    seeded = [play(run, ":info", env="ALFWorld-v0", options=("--seed", "3")) for _ in range(2)]
    assert seeded[0] == seeded[1]


def test_another_task_is_another_root_and_an_unknown_one_changes_nothing(run):
    out = play(
        run, "look", ":task 5", ":task 99999", "look", ":reset", ":info", env="ALFWorld-v0", options=("--task", "3")
    )
    assert "no game" in " ".join(out.split()) or "has games 0 to" in " ".join(out.split())
    assert [line.rpartition("#")[2] for line in statuses(out)] == ["0", "1", "2", "2", "3", "4", "4"]
    assert "task_id: embedded/train/5" in out


def test_a_task_that_does_not_exist_is_an_error_with_the_reason(run):
    status, _, err = run("play", "ALFWorld-v0", "--task", "embedded/train/99999")
    assert status == 1 and "no game" in err


def test_an_environment_without_snapshots_is_refused(run):
    status, _, err = run("play", "CartPole-v1")
    assert status == 1 and "snapshot" in err


@pytest.mark.parametrize(
    ("space", "line", "action"),
    [
        (Unicode(), "go to 3", "go to 3"),
        (spaces.Discrete(3, start=-1), "-1", -1),
        (spaces.Box(-1, 1, (2,)), "0.5, -1", [0.5, -1]),
        (spaces.Box(-1, 1, (1, 2)), "[[0.5, 0]]", [[0.5, 0]]),
        (spaces.MultiDiscrete([2, 5]), "1 4", [1, 4]),
        (spaces.MultiBinary(3), "0 1 1", [0, 1, 1]),
        (spaces.Tuple((spaces.Discrete(2), spaces.Discrete(3))), "[1, 2]", (1, 2)),
        (spaces.Dict(a=spaces.Discrete(2)), '{"a": 1}', {"a": 1}),
    ],
    ids=str,
)
def test_actions_of_every_space_can_be_typed(space, line, action):
    parsed = parse_action(space, line)
    assert space.contains(parsed)
    assert np.array_equal(parsed, action) if isinstance(parsed, np.ndarray) else parsed == action


@pytest.mark.parametrize("space", [spaces.Discrete(2), spaces.Box(0, 1, (2,)), spaces.Dict(a=spaces.Discrete(2))])
@pytest.mark.parametrize("line", ["", "x", "7", "1 2 3", '{"b": 1}', "[]", "true", "null", "1e999"])
def test_what_is_no_action_is_said(space, line):
    with pytest.raises(CannotGo, match="expected an action of"):
        parse_action(space, line)


def test_a_long_episode_is_drawn_without_recursion():
    exploration = Exploration(toy_envs.Corridor(length=5000))
    for _ in range(1500):
        exploration.step(1)
    lines = list(draw(exploration))
    assert len(lines) == 1501 and all(before == "" for before, _ in lines)
    exploration.close()


def test_colour_is_for_terminals_only(monkeypatch, tmp_path):
    class Terminal:
        def isatty(self):
            return True

    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    assert Screen(Terminal()).style("x", "bold") == "\033[1mx\033[0m"
    with open(tmp_path / "file", "w") as file:
        assert Screen(file).style("x", "bold") == "x"
    monkeypatch.setenv("TERM", "dumb")
    assert Screen(Terminal()).style("x", "bold") == "x"
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "")
    assert Screen(Terminal()).style("x", "bold") == "x"


def test_a_word_without_its_colon_is_no_step(run):
    out = play(run, "undo", "quit 2", "look", "::undo", env="ALFWorld-v0", options=("--task", "3"))
    words = " ".join(out.split())
    assert "'undo' is no admissible command; did you mean :undo? (::undo sends it all the same)" in words
    assert "did you mean :quit 2?" in out
    assert [line.partition(" | ")[0] for line in statuses(out)] == [
        "step 0/50", "step 0/50", "step 0/50", "step 1/50", "step 2/50"
    ]  # fmt: skip


def test_the_task_is_shown_wherever_the_observation_does_not_say_it(run):
    out = play(run, "0", "1", ":undo", ":goto 0", env="ALFWorld-v0", options=("--task", "3"))
    shown = re.findall(r"^(?:Task: (.*)|Your task is to: .*)$", out, re.MULTILINE)
    assert shown[0] == shown[-1] == "" and len(shown) == 5
    assert set(shown[1:4]) == {sandboxgym.make("ALFWorld-v0").unwrapped.tasks()[3].instruction}


def test_webshop_is_played_in_the_form_for_people_unless_another_is_asked_for(run):
    assert "[button] Search [button_]" in play(run, env="WebShop-v0") and "[SEP]" not in play(run, env="WebShop-v0")
    assert "[SEP]" in play(run, env="WebShop-v0", options=("--kwargs", "observation_mode=text"))
