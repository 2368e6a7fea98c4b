"""Grounded games on disk are reused, never trusted, and never cause failures."""

from __future__ import annotations

import hashlib
import logging
import os
import random
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import msgpack
import platformdirs
import pytest

from sandboxgym import data
from sandboxgym.envs.alfworld import game as game_module
from sandboxgym.envs.alfworld import grounding_cache as cache_module
from sandboxgym.envs.alfworld.game import Game
from sandboxgym.envs.alfworld.games import library
from sandboxgym.envs.alfworld.games.generated import generate_game
from sandboxgym.envs.alfworld.games.library import open_library
from sandboxgym.envs.alfworld.grounding_cache import GroundingCache


@pytest.fixture
def cache(tmp_path: Path) -> GroundingCache:
    return GroundingCache(tmp_path / "cache")


def entries(cache: GroundingCache) -> list[Path]:
    return sorted(cache.directory.iterdir())


def compile_game(number: int, cache: GroundingCache | None) -> Game:
    return Game.from_json(generate_game("train", number), name=str(number), cache=cache)


def transcript(game: Game, steps: int = 40) -> list[object]:
    rng = random.Random(0)
    state, seen = game.initial(), [game.intro(), sorted(game.facts(game.initial()))]
    for _ in range(steps):
        state, text, _ = game.step(state, rng.choice(game.admissible(state)))
        seen += [text, state, game.progress(state), game.state_hash(state)]
    return seen


@pytest.mark.parametrize("number", range(6))
def test_a_game_from_the_cache_plays_the_same(
    number: int, cache: GroundingCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = transcript(compile_game(number, None))
    compile_game(number, cache)
    monkeypatch.setattr(game_module, "ground", None)  # not worked out again
    assert transcript(compile_game(number, cache)) == compiled


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: content[:50] + bytes([content[50] ^ 1]) + content[51:],
        lambda content: b"pickle" + content,
        lambda content: content + b"more",
    ],
    ids=["empty", "truncated", "a bit", "other magic", "too long"],
)
def test_a_damaged_entry_is_ignored_and_replaced(
    damage: object, cache: GroundingCache, caplog: pytest.LogCaptureFixture
) -> None:
    compile_game(0, cache)
    (path,) = entries(cache)
    intact = path.read_bytes()
    path.write_bytes(damage(intact))  # type: ignore[operator]
    with caplog.at_level(logging.WARNING, logger="sandboxgym"):
        assert transcript(compile_game(0, cache)) == transcript(compile_game(0, None))
    assert str(path) in caplog.text
    assert path.read_bytes() == intact


@pytest.mark.parametrize(
    "change",
    [
        lambda parts: parts[5].append(["warm", 1, [0]]),
        lambda parts: parts[4].append(["inside", 1, [0, 10**6]]),
        lambda parts: parts[4].append(["inside", 1, [0, -1]]),
        lambda parts: parts[1].append("dragon"),
        lambda parts: parts[7].clear(),
        lambda parts: parts.__setitem__(6, b"\xff" * 300),
        lambda parts: parts[8].pop("holds"),
        lambda parts: parts[9].update({1: "text"}),
        lambda parts: parts.pop(),
        lambda parts: parts.__setitem__(8, []),
        lambda parts: parts.__setitem__(9, []),
    ],
    ids=[
        *("predicate", "object", "negative", "type", "no goal", "wide mask", "fluents", "operators", "fields"),
        *("fluents in a list", "operators in a list"),
    ],
)
def test_an_entry_that_does_not_fit_its_game_is_ignored(change: object, cache: GroundingCache) -> None:
    for _ in range(2):
        compile_game(0, cache)
    (path,) = entries(cache)
    parts = msgpack.unpackb(zlib.decompress(path.read_bytes()[40:]), strict_map_key=False)
    change(parts)  # type: ignore[operator]
    packed = zlib.compress(msgpack.packb(parts))
    seal = cache_module._seal(compile_game(0, None).digest)
    path.write_bytes(path.read_bytes()[:8] + hashlib.sha256(seal + packed).digest() + packed)
    game = compile_game(0, cache)
    assert transcript(game) == transcript(compile_game(0, None))


def test_an_entry_under_the_name_of_another_game_or_version_is_ignored(
    cache: GroundingCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    games = [compile_game(number, cache) for number in (0, 1)]
    paths = [cache._path(game.digest) for game in games]
    for number, other in ((0, 1), (1, 0)):
        compile_game(other, cache)
        paths[number].write_bytes(paths[other].read_bytes())
        assert transcript(compile_game(number, cache)) == transcript(compile_game(number, None))
    old = paths[0].read_bytes()
    monkeypatch.setattr(cache_module, "_code_digest", lambda: "another version")
    cache._path(games[0].digest).write_bytes(old)
    assert cache.get(games[0].digest, games[0]._domain) is None


def test_something_else_than_a_file_is_ignored(cache: GroundingCache) -> None:
    cache.directory.mkdir()
    path = cache._path(compile_game(0, None).digest)
    for make in (os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")):
        make(path)
        assert transcript(compile_game(0, cache)) == transcript(compile_game(0, None))
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink()


def test_what_is_too_large_for_an_entry_is_left_out(cache: GroundingCache, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_game(0, cache)
    (path,) = entries(cache)
    without = len(zlib.decompress(path.read_bytes()[40:]))
    monkeypatch.setattr(cache_module, "_MAX_ENTRY", without + 10)
    for _ in range(3):  # the first of these finds no room for operators, and says so once and for all
        assert transcript(compile_game(0, cache)) == transcript(compile_game(0, None))
    written = path.stat().st_mtime_ns, path.read_bytes()
    monkeypatch.setattr(Game, "_all_operators", None)
    assert transcript(compile_game(0, cache)) == transcript(compile_game(0, None))
    assert path.read_bytes() == written[1]
    path.unlink()
    monkeypatch.setattr(cache_module, "_MAX_ENTRY", without - 10)
    compile_game(0, cache)
    assert entries(cache) == []


def test_operators_are_not_encoded_where_they_cannot_be_written(
    cache: GroundingCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_game(0, cache)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(Game, "_all_operators", None)
    assert transcript(compile_game(0, cache)) == transcript(compile_game(0, None))


def raising() -> str:
    raise RuntimeError("could not determine the home directory")


@pytest.mark.parametrize("answer", [raising, lambda: "~/.cache/sandboxgym"], ids=["now", "in older versions"])
def test_games_are_played_without_a_home_directory(monkeypatch: pytest.MonkeyPatch, answer: Callable[[], str]) -> None:
    def homeless(*_: object, **__: object) -> str:
        return answer()  # as platformdirs does

    monkeypatch.delenv("SANDBOXGYM_CACHE", raising=False)
    monkeypatch.setattr(platformdirs, "user_cache_dir", homeless)
    with pytest.raises(FileNotFoundError, match=r"expected SANDBOXGYM_CACHE to name a directory"):
        data.cache_dir()
    monkeypatch.setattr(library, "_cache", library._Cache(library.CACHED_BYTES))
    assert transcript(open_library("embedded").load(1)) == transcript(compile_game(1, None))


def test_entries_belong_to_the_code_that_wrote_them(cache: GroundingCache, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_game(0, cache)
    monkeypatch.setattr(cache_module, "_code_digest", lambda: "another version")
    compile_game(0, cache)
    assert len(entries(cache)) == 2


def test_a_directory_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert transcript(compile_game(0, GroundingCache(tmp_path / "file" / "cache"))) == transcript(compile_game(0, None))


def test_a_full_disk_leaves_nothing_behind(cache: GroundingCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    compile_game(0, cache)
    assert entries(cache) == []
    monkeypatch.undo()
    compile_game(0, cache)
    monkeypatch.setattr(Game, "_all_operators", None)  # not encoded again and again
    assert transcript(compile_game(0, cache)) == transcript(compile_game(0, None))


def test_the_entries_not_used_for_longest_go_first(tmp_path: Path) -> None:
    cache = GroundingCache(tmp_path)
    for number in range(6):
        compile_game(number, cache)
    paths = entries(cache)
    for age, path in enumerate(paths):
        os.utime(path, (time.time() - 1000 + age, time.time() - 1000 + age))
    number = next(n for n in range(6) if cache._path(compile_game(n, None).digest) == paths[0])
    compile_game(number, cache)  # used again
    left = (tmp_path / ".a.grounding.0123abcd", tmp_path / ".b.grounding.4567cdef", tmp_path / "notes.txt")
    for path in left:
        path.write_bytes(b"x")
    os.utime(left[0], (1, 1))
    GroundingCache(tmp_path, max_bytes=sum(path.stat().st_size for path in (paths[0], *paths[3:]))).sweep()
    assert sorted(tmp_path.iterdir()) == sorted([paths[0], *paths[3:], *left[1:]])


@pytest.mark.parametrize("number", range(3))
def test_operators_from_the_cache_are_those_that_are_instantiated(number: int, cache: GroundingCache) -> None:
    plain = compile_game(number, None)
    expected = [(operator, plain.command(operator)) for operator in plain.planner.all_operators()]
    compile_game(number, cache)
    for _ in range(2):  # written, and read
        stored = compile_game(number, cache)
        assert stored._stored is not None
        commands = [
            command
            for bucket in stored.planner.buckets()
            for command in stored.planner._bucket(bucket).commands  # the cache's own
        ]
        assert list(zip(stored.planner.all_operators(), commands, strict=True)) == expected


def fewer(row: bytes) -> bytes:
    """An encoded operator with an argument less, or one more where there is none."""
    action, args, *rest = msgpack.unpackb(row)
    return bytes(msgpack.packb([action, args[:-1] if args else [0], *rest]))


@pytest.mark.parametrize(
    "change",
    [
        lambda conditions, effects, rows, commands: b"none",
        lambda conditions, effects, rows, commands: [conditions, effects, rows],
        lambda conditions, effects, rows, commands: [
            [[b"\xff" * 300, *conditions[0]], *conditions[1:]],
            effects,
            rows,
            commands,
        ],
        lambda conditions, effects, rows, commands: [conditions, [b"\xff" * 300, *effects], rows, commands],
        lambda conditions, effects, rows, commands: [
            [conditions[0], *[[-1] * len(rows)] * 2],
            effects,
            rows,
            commands,
        ],
        lambda conditions, effects, rows, commands: [
            [conditions[0], *[[999] * len(rows)] * 2],
            effects,
            rows,
            commands,
        ],
        lambda conditions, effects, rows, commands: [conditions[:2], effects, rows, commands],
        lambda conditions, effects, rows, commands: [conditions, effects, rows[:-1], commands],
        lambda conditions, effects, rows, commands: [conditions, effects, rows, [7] * len(rows)],
        lambda conditions, effects, rows, commands: [conditions, effects, [b"\xc1"] * len(rows), commands],
        lambda conditions, effects, rows, commands: [
            conditions,
            effects,
            [b"\x94\x01\x90\x90\x90"] * len(rows),
            commands,
        ],
        lambda conditions, effects, rows, commands: [conditions, [], rows, commands],
        lambda conditions, effects, rows, commands: [conditions, effects, rows, dict.fromkeys(commands)],
        lambda conditions, effects, rows, commands: [conditions, effects, [*map(fewer, rows)], commands],
    ],
    ids=[
        *("bytes", "fields", "wide condition", "wide effect", "negative", "too large", "columns", "rows", "commands"),
        *("row", "action", "no effects", "a map of commands", "an argument less"),
    ],
)
def test_stored_operators_that_do_not_fit_are_instantiated(
    change: Callable[..., object], cache: GroundingCache, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        compile_game(0, cache)
    game, plain = compile_game(0, cache), compile_game(0, None)
    assert game._stored is not None
    packed = {key: msgpack.unpackb(value) for key, value in game._stored.packed.items()}
    game._stored.packed = {key: msgpack.packb(change(*parts)) for key, parts in packed.items() if parts[2]}
    with caplog.at_level(logging.WARNING, logger="sandboxgym"):
        assert list(game.planner.all_operators()) == list(plain.planner.all_operators())
        assert transcript(game) == transcript(plain)
    assert "damaged" in caplog.text


def test_a_library_uses_it_for_files_and_embedded_games(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOXGYM_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "game.tw-pddl"
    file.write_bytes(generate_game("train", 900))
    for games, number in (("embedded", 1901), (file, 0)):
        open_library(games).load(number)
    assert len(list((tmp_path / "cache" / "alfworld").iterdir())) == 2
