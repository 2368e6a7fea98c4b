import os
import pickle
import random
import shutil
import threading

import numpy as np
import pytest

from sandboxgym.envs.alfworld.game import GameError
from sandboxgym.envs.alfworld.games import library as library_module
from sandboxgym.envs.alfworld.games.generated import generate_game
from sandboxgym.envs.alfworld.games.library import DataNotFound, GameNotFound, GameRef, _Cache, open_library

GAMES = {
    "pick_and_place_simple-Pen-None-Desk-1/trial_b": 0,
    "pick_and_place_simple-Pen-None-Desk-1/trial_a": 6,
    "look_at_obj_in_light-Book-None-DeskLamp-2/trial_c": 1,
    "pick_two_obj_and_place-AppleSliced-None-Fridge-3/trial_d": 5,
    "pick_two_obj_and_place_movable-Cup-None-Shelf-3/trial_e": 5,
}
IDS = [
    "valid_seen/look_at_obj_in_light-Book-None-DeskLamp-2/trial_c/game.tw-pddl",
    "valid_seen/pick_and_place_simple-Pen-None-Desk-1/trial_a/game.tw-pddl",
    "valid_seen/pick_and_place_simple-Pen-None-Desk-1/trial_b/game.tw-pddl",
]


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A data set as alfworld-download leaves it, with generated games."""
    for path, index in GAMES.items():
        directory = tmp_path / "json_2.1.1" / "valid_seen" / path
        directory.mkdir(parents=True)
        (directory / "game.tw-pddl").write_bytes(generate_game("train", index))
        (directory / "traj_data.json").write_text("{}")
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    return tmp_path


def ids(library):
    return [ref.task_id for ref in library]


def test_embedded_libraries():
    train = open_library("embedded")
    assert len(train) == 2000
    assert train[17] == GameRef("embedded/train/17", "pick_two_obj_and_place", "embedded/train/17")
    assert len(open_library("embedded:unseen")) == 500
    assert len(open_library("embedded:train:5000")) == 5000
    assert train.index("embedded/train/17") == 17 == train.index(np.int64(17))
    assert train.load(17).task_type == "pick_two_obj_and_place"
    for wrong in ("embedded:test", "embedded:train:many", "embedded:train:5:6"):
        with pytest.raises(ValueError, match="expected embedded"):
            open_library(wrong)


def test_a_split_is_sorted_and_leaves_unplayable_tasks_out(data):
    library = open_library("valid_seen")
    assert ids(library) == IDS
    assert [ref.task_type for ref in library] == ["look_at_obj_in_light", *["pick_and_place_simple"] * 2]
    assert all(os.path.isabs(ref.gamefile) and os.path.exists(ref.gamefile) for ref in library)


def test_ids_do_not_depend_on_where_the_data_lies_or_how_it_was_opened(data, tmp_path):
    split = data / "json_2.1.1" / "valid_seen"
    assert ids(open_library(split)) == IDS
    assert ids(open_library(data / "json_2.1.1")) == IDS
    assert ids(open_library([split.parent / task_id for task_id in IDS])) == IDS
    assert ids(open_library("valid_seen", data=data / "json_2.1.1")) == IDS


def test_ids_outside_the_official_splits_are_relative(tmp_path):
    directory = tmp_path / "mine" / "room" / "trial"
    directory.mkdir(parents=True)
    (directory / "game.tw-pddl").write_bytes(generate_game("train", 0))
    assert ids(open_library(tmp_path / "mine")) == ["room/trial/game.tw-pddl"]
    assert open_library(directory / "game.tw-pddl")[0].task_type == "unknown"


def test_a_name_finds_the_games_whose_path_ends_in_its_parts_whatever_is_kept_to_find_them(tmp_path, monkeypatch):
    """Compared with looking at every game; the names include odd ones, which end in all games or in none."""
    directories = [
        "valid_seen/room-1/trial_a",
        "valid_seen/room-1/trial_b",
        "valid_seen/room-2/trial_a",
        "game.tw-pddl/trial_c",
    ]
    for number, path in enumerate(directories):
        (tmp_path / path).mkdir(parents=True)
        (tmp_path / path / "game.tw-pddl").write_bytes(generate_game("train", number))
    (tmp_path / "one.json").write_bytes(generate_game("train", 5))
    library = open_library([*(tmp_path / path / "game.tw-pddl" for path in directories), tmp_path / "one.json"])
    monkeypatch.chdir(tmp_path)

    def looked_through(name):
        same_file = [ref for ref in library if ref.gamefile == os.path.abspath(name)]
        by_id = [ref for ref in library if library_module._ends_with(ref.task_id, name)]
        by_file = [ref for ref in library if library_module._ends_with(ref.gamefile, name)]
        return [library.index(ref.task_id) for ref in same_file or by_id or by_file]

    whole = [path for ref in library for path in (ref.task_id, ref.gamefile)]
    parts = [path.split("/") for path in whole]
    names = {"/".join(part[begin:end]) for part in parts for begin in range(len(part)) for end in range(len(part) + 1)}
    names |= {f"{name}/" for name in names} | {f"./{name}" for name in names} | {".", "//", "rial_a", "one.json/x"}
    for name in names:
        numbers = looked_through(name)
        if name in whole or len(numbers) == 1:
            assert library.index(name) == (ids(library).index(name) if name in ids(library) else numbers[0]), name
        else:
            with pytest.raises(GameNotFound, match="games of" if numbers else "has no game"):
                library.index(name)


def test_finding_a_game_by_its_path_takes_no_look_at_the_other_games(monkeypatch):
    library = open_library("embedded:train:2000")
    looked = []
    ends_with = library_module._ends_with
    monkeypatch.setattr(library_module, "_ends_with", lambda *paths: looked.append(paths) or ends_with(*paths))
    assert library.index("train/1234") == 1234
    assert len(looked) == 1


def test_task_types_and_limit(data):
    library = open_library("valid_seen", task_types=["pick_and_place_simple"], limit=1)
    assert ids(library) == [IDS[1]]
    assert len(open_library("embedded", task_types=["look_at_obj_in_light"], limit=10)) == 10
    with pytest.raises(ValueError, match="pick_and_fly"):
        open_library("embedded", task_types=["pick_and_fly"])


def test_a_game_is_found_by_number_id_path_and_ending(data):
    library = open_library("valid_seen")
    path = data / "json_2.1.1" / IDS[2]
    for name in (2, IDS[2], path, str(path), "trial_b/game.tw-pddl", "trial_b", IDS[2].removesuffix("/game.tw-pddl")):
        assert library.index(name) == 2


def test_an_unknown_game_is_refused_with_near_ones(data):
    library = open_library("valid_seen")
    with pytest.raises(GameNotFound, match=r"trial_z.*near: .*trial_"):
        library.index(IDS[0].replace("trial_c", "trial_z"))
    with pytest.raises(GameNotFound, match="0 to 2, not 3"):
        library.index(3)
    with pytest.raises(GameNotFound, match="3 games"):
        library.index("game.tw-pddl")


def test_missing_data_says_what_to_set(tmp_path, monkeypatch):
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    with pytest.raises(DataNotFound, match=r"sandboxgym download alfworld.*set ALFWORLD_DATA"):
        open_library("train")
    with pytest.raises(DataNotFound, match=r"json_2\.1\.1/train or "):
        open_library("train", data=tmp_path)
    with pytest.raises(DataNotFound, match="nowhere"):
        open_library(tmp_path / "nowhere")
    with pytest.raises(DataNotFound, match=r"no game\.tw-pddl"):
        open_library(tmp_path)
    with pytest.raises(DataNotFound, match=r"gone\.tw-pddl"):
        open_library([tmp_path / "gone.tw-pddl"])


def test_the_index_of_a_directory_is_reused(data, monkeypatch):
    first = open_library("valid_seen")
    monkeypatch.setattr(os, "scandir", None)
    assert ids(open_library("valid_seen", limit=2)) == ids(first)[:2]


def test_games_added_and_removed_at_any_depth_are_noticed(data):
    split = data / "json_2.1.1" / "valid_seen"
    open_library("valid_seen")
    for directory in (
        split / "pick_and_place_simple-Pen-None-Desk-1" / "trial_new",
        split / "new" / "room" / "trial_n",
    ):
        directory.mkdir(parents=True)
        assert len(open_library("valid_seen")) == 3
        (directory / "game.tw-pddl").write_bytes(generate_game("train", 12))
        assert len(open_library("valid_seen")) == 4
        shutil.rmtree(directory)
        assert ids(open_library("valid_seen")) == IDS


def test_what_is_kept_in_memory_is_bounded():
    library = open_library("embedded")
    cache = _Cache(5 * library.compile(0).footprint())
    for number in range(20):
        cache.get(number, lambda number=number: library.compile(number))
    kept = len(cache._games)
    assert 1 < kept < 10 and 19 in cache._games
    game = cache.get(19, lambda: None)
    state, rng = game.initial(), random.Random(0)
    for _ in range(300):  # a game grows while it is played
        state, _, _ = game.step(state, rng.choice(game.admissible(state)))
    cache.get(20, lambda: library.compile(20))
    assert len(cache._games) < kept


def test_compiled_games_are_shared_and_follow_the_file(data):
    one, other = open_library("valid_seen"), open_library("valid_seen", limit=1)
    game = one.load(0)
    assert other.load(0) is game
    assert one.load(0, digest=game.digest) is game
    with pytest.raises(GameError, match="expected the game with digest abc"):
        one.load(0, digest="abc")
    shutil.copy(one[1].gamefile, one[0].gamefile)
    os.utime(one[0].gamefile, ns=(1, 1))
    assert one.load(0).digest == one.load(1).digest != game.digest


def test_threads_share_one_game():
    library = open_library("embedded:train:600")
    found = []
    threads = [threading.Thread(target=lambda: found.append(library.load(599))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len({id(game) for game in found}) == 1


def test_bad_files_are_named(data):
    library = open_library("valid_seen")
    with open(library[0].gamefile, "w") as file:
        file.write("{}")
    with pytest.raises(GameError, match="trial_c"):
        library.load(0)
    os.remove(library[1].gamefile)
    with pytest.raises(DataNotFound, match="trial_a"):
        library.load(1)


def test_the_same_game_twice_is_refused(data):
    path = data / "json_2.1.1" / IDS[0]
    with pytest.raises(ValueError, match="two games have the id"):
        open_library([path, path])


def test_libraries_pickle(data):
    library = pickle.loads(pickle.dumps(open_library("valid_seen")))
    assert ids(library) == IDS


@pytest.mark.slow
def test_official_data(alfworld_games):
    library = open_library("valid_seen", data=alfworld_games)
    assert len(library) == 140
    assert library.load(0).task_type == library[0].task_type == "look_at_obj_in_light"


def test_copies_of_a_split_beside_each_other_have_ids_of_their_own(data):
    copy = data / "old" / "valid_seen"
    copy.parent.mkdir()
    (data / "json_2.1.1" / "valid_seen").rename(data / "valid_seen")
    shutil.copytree(data / "valid_seen", copy)
    library = open_library(data)
    ids = [ref.task_id for ref in library]
    assert len(set(ids)) == len(ids)
    old = next(number for number, ref in enumerate(library) if ref.gamefile.startswith(str(copy)))
    assert ids[old].startswith("old/valid_seen/") and library.index(ids[old]) == old
    assert library.index(ids[old].removeprefix("old/")) != old
    assert len(open_library([ref.gamefile for ref in library])) == len(library)


def test_downloaded_games_are_found_without_the_fields_own_variable(tmp_path, monkeypatch):
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    monkeypatch.setenv("SANDBOXGYM_DATA", str(tmp_path))
    with pytest.raises(DataNotFound, match="sandboxgym download alfworld"):
        open_library("valid_seen")
    game = tmp_path / "alfworld" / "json_2.1.1" / "valid_seen" / "task" / "trial" / "game.tw-pddl"
    game.parent.mkdir(parents=True)
    game.write_bytes(generate_game("train", 0))
    assert open_library("valid_seen")[0].task_id == "valid_seen/task/trial/game.tw-pddl"
