"""Compiled games, on a small one made for the tests; the real ones are in `test_parity`."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sandboxgym.envs.alfworld.game import Game, GameError, GameState

DOMAIN = """
(define (domain tiny)
 (:types agent spot item)
 (:predicates (at ?a - agent ?s - spot) (lies ?i - item ?s - spot) (holds ?a - agent ?i - item) (free ?a - agent)
   (on ?i - item) (waited ?a - agent))
 (:action go :parameters (?a - agent ?from - spot ?to - spot)
  :precondition (at ?a ?from) :effect (and (not (at ?a ?from)) (at ?a ?to)))
 (:action take :parameters (?a - agent ?s - spot ?i - item)
  :precondition (and (at ?a ?s) (lies ?i ?s) (free ?a))
  :effect (and (not (lies ?i ?s)) (holds ?a ?i) (not (free ?a))))
 (:action drop :parameters (?a - agent ?s - spot ?i - item)
  :precondition (and (at ?a ?s) (holds ?a ?i))
  :effect (and (lies ?i ?s) (not (holds ?a ?i)) (free ?a)))
 (:action switch :parameters (?a - agent ?i - item)
  :precondition (holds ?a ?i)
  :effect (and (when (on ?i) (not (on ?i))) (when (not (on ?i)) (on ?i))))
 (:action wait :parameters (?a - agent) :effect (waited ?a)))
"""
GRAMMAR = '''
grammar :: """{
  "intro": [{"rhs": "#here#\\n\\nYour task is to: move both lamps to the hall."}],
  "here": [
    {"condition": "at(a:agent, s:spot) & lies(i:item, s:spot)", "rhs": "You see [{i.name | lies(i:item, s:spot)}]."},
    {"condition": "on(i:item)", "rhs": "It is bright."},
    {"condition": "not_on(i:item)", "rhs": "It is dark again."},
    {"rhs": "You see nothing."}],
  "list_empty": [{"rhs": "nothing"}],
  "list_separator": [{"rhs": ", "}],
  "list_last_separator": [{"rhs": ", and "}]}""";
action go { template :: "go to {to}"; feedback :: "At {to.name}: [{i.name | lies(i:item, to:spot)}]."; }
action take { template :: "take {i}"; feedback :: "Taken."; }
action drop { template :: "drop {i}"; feedback :: "Dropped."; }
action switch { template :: "switch {i}"; feedback :: "#here#"; }
action wait { template :: "wait"; feedback :: "Time passes."; }
'''
PROBLEM = """
(define (problem p) (:domain tiny)
 (:objects me - agent hall_bar_1 attic_bar_1 - spot lamp_bar_1 lamp_bar_2 sink_bar_1_bar_basin - item)
 (:init (at me attic_bar_1) (free me) (lies lamp_bar_1 hall_bar_1) (lies lamp_bar_2 attic_bar_1)
   (lies sink_bar_1_bar_basin attic_bar_1))
 (:goal (and (lies lamp_bar_1 hall_bar_1) (lies lamp_bar_2 hall_bar_1))))
"""
WALKTHROUGH = ("take lamp 1", "go to hall 1", "drop lamp 1")


def content(**changes: Any) -> str:
    data = {"pddl_domain": DOMAIN, "grammar": GRAMMAR, "pddl_problem": PROBLEM, "walkthrough": WALKTHROUGH}
    return json.dumps({key: value for key, value in (data | changes).items() if value is not None})


def play(game: Game, *commands: str) -> tuple[GameState, str]:
    state, answer = game.initial(), game.intro()
    for command in commands:
        state, answer, valid = game.step(state, command)
        assert valid, command
    return state, answer


@pytest.fixture
def game() -> Game:
    return Game.from_json(content())


def test_names_fall_along_the_sorted_ids(game: Game) -> None:
    """Commands are sorted, things in texts are not: they come in the order of their ids."""
    assert game.admissible(game.initial()) == ("go to hall 1", "take lamp 1", "take sinkbasin 1", "wait")
    assert game.intro().startswith("You see lamp 2, lamp 1, and sinkbasin 1.")
    assert game.task == "move both lamps to the hall."


def test_only_exact_commands_count(game: Game) -> None:
    start = game.initial()
    for wrong in ("go to hall", "Wait", "go  to hall 1", ""):
        assert game.step(start, wrong) == (start, "Nothing happens.", False)
    assert game.step(start, " wait\n")[2]


def test_moves_count_valid_commands_only(game: Game) -> None:
    state, _ = play(game, "wait", "wait")
    assert game.step(state, "sing")[0].moves == state.moves == 2


def test_winning_is_about_the_present(game: Game) -> None:
    state, _ = play(game, *WALKTHROUGH)
    assert game.won(state)
    state, _, _ = game.step(state, "take lamp 1")
    assert not game.won(state)


def test_progress(game: Game) -> None:
    seen = []
    for n in range(len(WALKTHROUGH) + 1):
        progress = game.progress(play(game, *WALKTHROUGH[:n])[0])
        seen.append((progress.met, progress.total, progress.held))
    assert seen == [(1, 2, False), (1, 2, True), (1, 2, True), (2, 2, False)]
    assert not game.progress(play(game, "take sinkbasin 1")[0]).held


def test_texts_ignore_the_conditions_of_effects(game: Game) -> None:
    """After the first switching the planner has the lamp on, TextWorld has recorded both and the deletion last."""
    hall = ("go to hall 1", "take lamp 2", "go to attic 1", "drop lamp 2", "take lamp 2", "go to hall 1")
    state, answer = play(game, *hall, "switch lamp 2")
    assert answer == "It is dark again."
    assert "not_on(lamp_bar_1)" in game.facts(state)
    assert "on(lamp_bar_1)" not in game.facts(state)


def test_a_false_fact_is_no_not_fact_before_its_first_deletion(game: Game) -> None:
    assert not [fact for fact in game.facts(game.initial()) if fact.startswith("not_")]
    state, answer = play(game, "go to hall 1")
    assert "not_at(me,attic_bar_1)" in game.facts(state)
    assert answer == "At hall 1: lamp 2."


def test_the_hash_is_of_the_facts(game: Game) -> None:
    here, there = play(game, "wait")[0], play(game, "wait", "wait")[0]
    assert game.state_hash(here) == game.state_hash(there) != game.state_hash(game.initial())
    assert len(game.state_hash(here)) == 16
    other = Game.from_json(content(grammar=GRAMMAR.replace("Taken", "Got it")))
    assert other.digest != game.digest
    assert other.state_hash(here) != game.state_hash(here)


def test_states_travel_between_instances(game: Game) -> None:
    twin = Game.from_json(content(walkthrough=None))
    assert (twin.digest, twin.walkthrough) == (game.digest, None)
    for n in range(len(WALKTHROUGH) + 1):
        state = play(game, *WALKTHROUGH[:n])[0]
        assert twin.admissible(state) == game.admissible(state)
        assert twin.state_hash(state) == game.state_hash(state)
        assert twin.facts(state) == game.facts(state)


def test_threads_share_a_game() -> None:
    game = Game.from_json(content())
    commands = ("go to hall 1", "take lamp 2", "switch lamp 2", "drop lamp 2", "go to attic 1") * 20
    alone = play(Game.from_json(content()), *commands)
    with ThreadPoolExecutor(8) as pool:
        assert all(result == alone for result in pool.map(lambda _: play(game, *commands), range(32)))


def test_many_states_do_not_pile_up(game: Game, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandboxgym.envs.alfworld.game._CACHED_STATES", 2)
    assert game.won(play(game, *WALKTHROUGH)[0])
    assert len(game._choices_of) <= 2


@pytest.mark.parametrize(
    ("name", "task_type"),
    [
        ("train/pick_two_obj_and_place-Mug-None-Desk-308/trial_T1/game.tw-pddl", "pick_two_obj_and_place"),
        ("/data/look_at_obj_in_light-CD-None-DeskLamp-308/trial_T1/game.tw-pddl", "look_at_obj_in_light"),
        ("games/mine.tw-pddl", "unknown"),
    ],
)
def test_the_task_type_is_in_the_path(name: str, task_type: str) -> None:
    assert Game.from_json(content(), name=name).task_type == task_type
    assert Game.from_json(content(), name=name, task_type="mine").task_type == "mine"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grammar": None}, "grammar is missing"),
        ({"pddl_problem": 3}, "pddl_problem, expected a string, found int"),
        ({"solvable": False}, "solvable, the file says that this game can't be won"),
        ({"walkthrough": "look"}, "walkthrough, expected a list of commands"),
        ({"pddl_domain": DOMAIN.replace("(at ?a ?from) :eff", "(forall (?x - spot) (at ?a ?x)) :eff")},
         "pddl_domain, action go: 'forall' is not supported"),
        ({"pddl_problem": PROBLEM.replace("(free me)", "(free you)")},
         r"pddl_problem, :init: free\(you\): unknown object 'you'"),
        ({"grammar": GRAMMAR.replace("intro", "outro")}, "grammar, there is no rule 'intro'"),
        ({"grammar": GRAMMAR.replace("action wait", "action rest")}, "grammar, there is no text for the action wait"),
        ({"grammar": GRAMMAR.replace('"go to {to}"', '"go to {to}[{i | holds(a:agent, i:item)}]"')},
         "grammar, action go: a command can't depend on 'holds', which changes"),
        ({"grammar": GRAMMAR.replace('"not_on(i:item)"', '"not_lit(i:item)"')},
         "grammar, rule here: unknown predicate 'not_lit'"),
        ({"grammar": GRAMMAR.replace('"on(i:item)"', '"on(i:thing)"')}, "grammar, rule here: unknown type 'thing'"),
        ({"grammar": GRAMMAR.replace('"on(i:item)"', '"on(i:item, s:spot)"')}, "'on' takes 1 arguments, not 2"),
    ],
)  # fmt: skip
def test_what_a_game_must_not_contain(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(GameError, match=f"^some/game.tw-pddl: .*{message}"):
        Game.from_json(content(**changes), name="some/game.tw-pddl")


@pytest.mark.parametrize("text", ["{", "[]", b"\xff"])
def test_what_is_no_game_at_all(text: str | bytes) -> None:
    with pytest.raises(GameError, match="<game>: expected"):
        Game.from_json(text)


def test_a_text_that_cannot_be_written_names_the_game() -> None:
    game = Game.from_json(content(grammar=GRAMMAR.replace("Taken.", "{x.name} taken.")), name="mine")
    with pytest.raises(GameError, match="mine: grammar, 'x' stands for nothing here"):
        game.step(game.initial(), "take lamp 1")
