import hashlib
import itertools
import json
import os
import re
import subprocess
import sys

import pytest

from sandboxgym.envs.alfworld.game import Game
from sandboxgym.envs.alfworld.games.generated import SPLITS, TASK_TYPES, draw_game, generate_game, layouts, task_type_of

FIRST_DIGESTS = {
    "train": "e9437b8160afd83c0274a02fd532b0e71f62a692794084625b68d02ed81820e9",
    "seen": "10f4e42aecd77875442bbad6857a9ddaaa758ae66c155989b01e23abe70f69b0",
    "unseen": "71057e0f33ce5ad765bdea5b35c1b3614336e6a07fb308a9b8f1cca40976a0e7",
}


def compiled(split, index):
    return Game.from_json(generate_game(split, index), name=f"{split}/{index}", task_type=task_type_of(index))


def play(game, commands):
    """Texts of an episode and its last state; every command must be admissible."""
    state, texts = game.initial(), [game.intro()]
    for command in commands:
        assert command in game.admissible(state), (game.name, command)
        assert not game.won(state), "the walkthrough goes on after winning"
        state, feedback, valid = game.step(state, command)
        assert valid
        texts.append(feedback)
    return texts, state


@pytest.mark.parametrize("split", SPLITS)
def test_every_walkthrough_wins(split):
    for index in range(150):
        game = compiled(split, index)
        assert 3 <= len(game.walkthrough) <= 11
        _, state = play(game, game.walkthrough)
        assert game.won(state), (split, index)


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_every_walkthrough_wins_in_a_thousand_games(split):
    for index in range(150, 1150):
        game = compiled(split, index)
        assert game.won(play(game, game.walkthrough)[1]), (split, index)


def test_task_types_take_turns():
    games = [draw_game("train", index) for index in range(12)]
    assert [game.task_type for game in games] == [*TASK_TYPES, *TASK_TYPES]


@pytest.mark.parametrize("split", SPLITS)
def test_games_are_the_same_everywhere(split):
    assert hashlib.sha256(generate_game(split, 0)).hexdigest() == FIRST_DIGESTS[split]


def test_games_do_not_depend_on_hash_seed_or_order_of_calls():
    code = (
        "import hashlib; from sandboxgym.envs.alfworld.games.generated import generate_game;"
        "print(*(hashlib.sha256(generate_game(s, i)).hexdigest() for i in (7, 3) for s in ('unseen', 'train')))"
    )
    runs = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        runs.add(subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout)
    here = " ".join(hashlib.sha256(generate_game(s, i)).hexdigest() for i in (7, 3) for s in ("unseen", "train"))
    assert runs == {f"{here}\n".encode()}


def test_games_are_distinct():
    assert len({draw_game("train", index).problem() for index in range(3000)}) == 3000


def test_splits_share_no_game_and_unseen_shares_no_layout():
    games = {split: [draw_game(split, index) for index in range(500)] for split in SPLITS}
    problems = {split: {game.problem() for game in games[split]} for split in SPLITS}
    assert not any(problems[one] & problems[other] for one, other in itertools.combinations(SPLITS, 2))
    used = {split: {game.layout for game in games[split]} for split in SPLITS}
    assert used["seen"] == used["train"]
    assert not used["unseen"] & used["train"]
    assert not set(layouts("unseen")) & set(layouts("train"))


@pytest.mark.parametrize("split", SPLITS)
def test_games_are_small(split):
    for index in range(300):
        game = draw_game(split, index)
        assert 6 <= len(game.layout.furniture) <= 9
        assert 6 <= len(game.places) <= 10
        numbers = [int(name.split()[1]) for name in (*(p.name for p in game.layout.furniture), *dict(game.places))]
        assert min(numbers) == 1
        assert max(numbers) <= 4


def test_names_are_numbered_as_the_walkthrough_says():
    """Engines number identifiers downwards, so this fails if identifiers are handed out upwards."""
    game, drawn = compiled("train", 5), draw_game("train", 5)
    for name, piece in drawn.places:
        state, _, _ = game.step(game.initial(), f"go to {piece.name}")
        if not piece.open:
            state, _, _ = game.step(state, f"open {piece.name}")
        assert f"take {name} from {piece.name}" in game.admissible(state)


def test_the_vocabulary_is_compact():
    words = set()
    for index in range(240):
        game = compiled("train", index)
        texts, state = play(game, game.walkthrough)
        commands = [*game.admissible(game.initial()), *game.admissible(state), *game.walkthrough]
        for command in ("look", "inventory", "help", "nonsense"):
            texts.append(game.step(state, command)[1])
        words.update(re.findall(r"\w+|[^\w\s]", " ".join([*texts, *commands])))
    assert len(words) < 110, sorted(words)


def test_the_reset_text_ends_with_the_task():
    game = compiled("train", 2)
    *_, last = game.intro().splitlines()
    assert re.fullmatch(r"Your task is to: clean a \w+ and move it to a \w+\.", last)
    assert last == f"Your task is to: {draw_game('train', 2).task}."


def test_the_file_has_the_official_keys():
    assert list(json.loads(generate_game("train", 0))) == [
        "pddl_domain", "grammar", "pddl_problem", "solvable", "walkthrough",
    ]  # fmt: skip


def test_bad_requests_are_refused():
    with pytest.raises(ValueError, match="valid_seen"):
        generate_game("valid_seen", 0)
    with pytest.raises(ValueError, match="-1"):
        generate_game("train", -1)
