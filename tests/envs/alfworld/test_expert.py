import json
import random

import pytest

from sandboxgym.envs.alfworld.expert import Errand, Expert, parse_task, play_expert
from sandboxgym.envs.alfworld.games.library import open_library

SENTENCES = {
    "put a pencil in shelf": Errand("pencil", "shelf"),
    "put some watch on safe": Errand("watch", "safe"),
    "put a clean mug in coffeemachine": Errand("mug", "coffeemachine", "clean"),
    "clean some cloth and put it in drawer": Errand("cloth", "drawer", "clean"),
    "put a hot apple in fridge": Errand("apple", "fridge", "heat"),
    "heat some egg and put it in garbagecan": Errand("egg", "garbagecan", "heat"),
    "put a cool pan in stoveburner": Errand("pan", "stoveburner", "cool"),
    "cool some bread and put it in countertop": Errand("bread", "countertop", "cool"),
    "put two book in desk": Errand("book", "desk", None, 2),
    "find two cd and put them in safe": Errand("cd", "safe", None, 2),
    "look at vase under the desklamp": Errand("vase", "desklamp"),
    "examine the pillow with the floorlamp": Errand("pillow", "floorlamp"),
    "move a pen to a desk": Errand("pen", "desk"),
    "heat a mug and move it to a table": Errand("mug", "table", "heat"),
    "move two soap to a bin": Errand("soap", "bin", None, 2),
    "take a book and use a lamp": Errand("book", "lamp"),
}


def success(library, numbers, **options):
    return sum(play_expert(library.load(number), **options).won for number in numbers) / len(numbers)


@pytest.mark.parametrize("sentence", SENTENCES)
def test_task_sentences(sentence):
    assert parse_task(f"You are in a room. You see desk 1.\n\nYour task is to: {sentence}.") == SENTENCES[sentence]


def test_a_text_without_a_task_is_refused():
    with pytest.raises(ValueError, match="expected a task"):
        Expert().reset("You are in a room.")


@pytest.mark.parametrize("split", ["train", "seen", "unseen"])
def test_it_wins_the_embedded_games(split):
    assert success(open_library(f"embedded:{split}"), range(120)) >= 0.98


def test_it_recovers_from_random_commands():
    assert success(open_library("embedded"), range(120), rng=random.Random(0), noise=0.2) >= 0.95


def test_demonstrations_are_reproducible_and_mark_noise():
    game = open_library("embedded").load(8)
    first, again = (play_expert(game, rng=random.Random(3), noise=0.3) for _ in range(2))
    assert first == again
    assert 0 < sum(turn.noisy for turn in first.turns) < len(first.turns)
    assert first.turns[0].observation == game.intro()
    assert not any(turn.noisy for turn in play_expert(game).turns)


def test_a_fork_knows_what_the_player_knew_and_has_noise_of_its_own():
    text = "You see bed 1, desk 1, drawer 1. Your task is to: put a pen in desk 1."
    player = Expert(random.Random(0), noise=0.0)
    player.reset(text)
    first = player.act(text)
    forks = [player.fork(random.Random(0)) for _ in range(2)]
    commands = [fork.act("Nothing happens.") for fork in forks]
    assert commands[0] == commands[1] == player.act("Nothing happens.") != first, "forking changed nothing"
    noisy = Expert(random.Random(0), noise=1.0)
    noisy.reset(text)
    assert len({noisy.fork(random.Random(seed)).act(text) for seed in range(20)}) > 1


def test_it_stops_at_the_step_limit():
    demonstration = play_expert(open_library("embedded").load(0), max_steps=2)
    assert len(demonstration.turns) == 2 and not demonstration.won


def test_it_goes_on_when_nothing_ever_works():
    expert = Expert()
    expert.reset("You are in a room. You see shelf 1, desk 1.\n\nYour task is to: move a pen to a desk.")
    commands = [expert.act("Nothing happens.") for _ in range(60)]
    assert max(commands.count(command) for command in commands) < 50


def test_it_finds_what_stands_beside():
    """A piece beside the one we stand at cannot be gone to; the expert examines it instead."""
    expert = Expert()
    intro = "You are in a room. You see drawer 1, shelf 1.\n\nYour task is to: move a book to a drawer."
    expert.reset(intro)
    assert expert.act(intro) == "go to shelf 1"
    assert expert.act("You reach shelf 1. You see nothing.") == "go to drawer 1"
    assert expert.act("Nothing happens.") == "examine drawer 1"
    assert expert.act("It is closed.") == "open drawer 1"


def test_it_learns_the_older_verb():
    expert = Expert()
    intro = "You are in a room. You see a desk 1, and a shelf 1.\n\nYour task is to: put a book in desk."
    expert.reset(intro)
    assert expert.act(intro) == "go to shelf 1"
    assert expert.act("You arrive at loc 3. On the shelf 1, you see a book 2.") == "take book 2 from shelf 1"
    assert expert.act("You pick up the book 2 from the shelf 1.") == "go to desk 1"
    assert expert.act("You arrive at loc 5. On the desk 1, you see nothing.") == "put book 2 in/on desk 1"


@pytest.mark.slow
def test_it_wins_most_official_games(alfworld_games):
    library = open_library("valid_seen", data=alfworld_games)
    assert success(library, range(len(library))) >= 0.95


@pytest.mark.slow
def test_it_wins_most_games_in_the_older_grammar(alfworld_games):
    files = sorted((alfworld_games / "old_grammar").rglob("game.tw-pddl"))
    library = open_library([file for file in files if json.loads(file.read_bytes())["solvable"]])
    assert success(library, range(len(library))) >= 0.9
