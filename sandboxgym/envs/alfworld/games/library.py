"""Libraries of games: the embedded ones, a split of the official data set, a directory, or files.

What this module promises:

1. The order of games and their ids depend on the games alone: never on the file system's order, the machine or where
   the data lies. An id is the path from the split directory on ("valid_seen/…/game.tw-pddl"), or, outside the
   official splits, from the directory that was given; "embedded/train/17" for embedded games.
2. Opening a library reads directories, not games; the index of a directory is kept until anything is added to or
   removed from it, at any depth.
3. A compiled game is shared by everything in the process that plays it. Unused ones are kept up to `CACHED_BYTES`; a
   file that changed on disk is compiled again. The expensive part of compiling is also kept on disk
   (`grounding_cache`). Any thread may load.
"""

from __future__ import annotations

import difflib
import operator
import os
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path, PurePosixPath
from typing import SupportsIndex, overload

from sandboxgym.brief import brief
from sandboxgym.data import find
from sandboxgym.envs.alfworld.card import GAMES
from sandboxgym.envs.alfworld.game import Game, GameError
from sandboxgym.envs.alfworld.games.generated import SPLITS, TASK_TYPES, generate_game, task_type_of
from sandboxgym.envs.alfworld.grounding_cache import GroundingCache, default_cache
from sandboxgym.task_env import TaskNotFound

OFFICIAL_SPLITS = ("train", "valid_train", "valid_seen", "valid_unseen")
EMBEDDED_SIZES = {"train": 2000, "seen": 500, "unseen": 500}
GAME_FILE = "game.tw-pddl"
_INSTRUCTION = re.compile(rb"Your task is to: ([^\"\\\n]+)")
CACHED_BYTES = 256 * 2**20
"""Approximate memory limit of compiled games that are not in use; an official game takes 1 to 3 MB."""
DOWNLOAD = "`sandboxgym download alfworld` gets the official games"


class GameNotFound(TaskNotFound):
    """Raised if no game, or more than one, matches the given task."""


class DataNotFound(FileNotFoundError):
    """Raised if the requested games are not on this machine; the message says what to set or download."""


@dataclass(frozen=True, slots=True)
class GameRef:
    """A game that can be loaded."""

    task_id: str
    """Stable name, the same on every machine."""
    task_type: str
    """Official name of the task type; "unknown" where neither path nor generator gives it."""
    gamefile: str
    """Path of the file; the task id for an embedded game."""


class GameLibrary(Sequence[GameRef]):
    """An ordered set of games. Made by `open_library`."""

    def __init__(self, refs: Sequence[GameRef], *, source: str) -> None:
        self._refs = tuple(refs)
        self._source = source
        self._by_id = {ref.task_id: number for number, ref in enumerate(self._refs)}
        if len(self._by_id) < len(self._refs):
            twice = next(ref.task_id for number, ref in enumerate(self._refs) if self._by_id[ref.task_id] != number)
            raise ValueError(f"{source}: two games have the id {twice!r}")

    def __len__(self) -> int:
        return len(self._refs)

    def __iter__(self) -> Iterator[GameRef]:
        return iter(self._refs)

    @overload
    def __getitem__(self, number: int) -> GameRef: ...
    @overload
    def __getitem__(self, number: slice) -> tuple[GameRef, ...]: ...
    def __getitem__(self, number: int | slice) -> GameRef | tuple[GameRef, ...]:
        return self._refs[number]

    def __repr__(self) -> str:
        return f"GameLibrary({self._source!r}, {len(self)} games)"

    def index(self, task: str | SupportsIndex | os.PathLike[str], *_: object) -> int:
        """Find the number of a game, given as number, id, path of its file, or a unique ending of its id or path.

        Raises:
            GameNotFound: no game, or more than one, matches; the message has the nearest ids.
        """
        if not isinstance(task, (str, os.PathLike)):
            if not hasattr(task, "__index__"):  # isinstance() takes longer than a reset
                raise TypeError(f"expected the number, id or path of a game, found {brief(task, 80)}")
            if 0 <= (number := operator.index(task)) < len(self):
                return number
            raise GameNotFound(f"{self._source} has games 0 to {len(self) - 1}, not {task}")
        name = Path(task).as_posix() if isinstance(task, os.PathLike) else task
        if name in self._by_id:
            return self._by_id[name]
        matches = (
            self._by_file.get(name)
            or self._by_file.get(os.path.abspath(name))
            or self._ending(self._by_id_tail, name, lambda ref: ref.task_id)
            or self._ending(self._by_file_tail, name, lambda ref: ref.gamefile)
        )
        if len(matches) == 1:
            return matches[0]
        if matches:
            near = [self._refs[number].task_id for number in matches[:3]]
            raise GameNotFound(f"{len(matches)} games of {self._source} end in {name!r}, such as {', '.join(near)}")
        near = difflib.get_close_matches(name, self._by_id, n=3, cutoff=0.3)
        raise GameNotFound(f"{self._source} has no game {name!r}" + (f"; near: {', '.join(near)}" if near else ""))

    @cached_property
    def _by_file(self) -> dict[str, list[int]]:
        return _grouped(ref.gamefile for ref in self._refs)

    @cached_property
    def _by_id_tail(self) -> dict[str, list[int]]:
        return _grouped(_tail(ref.task_id) for ref in self._refs)

    @cached_property
    def _by_file_tail(self) -> dict[str, list[int]]:
        return _grouped(_tail(ref.gamefile) for ref in self._refs)

    def _ending(self, by_tail: dict[str, list[int]], ending: str, path: Callable[[GameRef], str]) -> list[int]:
        """The games whose path ends in ``ending``, out of those that have the same tail."""
        tail = _tail(PurePosixPath(ending).as_posix())
        candidates = by_tail.get(tail, ()) if tail else range(len(self))
        return [number for number in candidates if _ends_with(path(self._refs[number]), ending)]

    def load(self, number: int, *, digest: str | None = None) -> Game:
        """Load the compiled game, shared with everyone who loads it.

        Args:
            number: index of the game.
            digest: digest that the game must have, if given.

        Raises:
            GameError: the file is not a game, or has another digest; the message names it.
            DataNotFound: the file is gone.
        """
        ref = self._refs[number]
        game = _load(ref)
        if digest is not None and game.digest != digest:
            raise GameError(f"{ref.gamefile}: expected the game with digest {digest}, found {game.digest}")
        return game

    def compile(self, number: int) -> Game:
        """Compile the game for one user alone; `load` shares and caches, in memory and on disk."""
        return _compile(self._refs[number])


def open_library(
    games: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    data: str | os.PathLike[str] | None = None,
    task_types: Sequence[str] | None = None,
    limit: int | None = None,
) -> GameLibrary:
    """Open the library that ``games`` names.

    Args:
        games: "embedded" (the same as "embedded:train"), "embedded:seen", "embedded:unseen", each with an optional
            size as in "embedded:train:5000"; an official split (`OFFICIAL_SPLITS`); a directory, searched for
            ``game.tw-pddl``; a file; or a sequence of files, whose order is kept.
        data: root of the official data; default ``$ALFWORLD_DATA``, else where ``sandboxgym download`` puts it.
        task_types: keep games of these types only.
        limit: keep only the first ``limit`` of these games.

    Raises:
        DataNotFound: a split, directory or file is not there, or holds no game.
        ValueError: an embedded split or a task type is unknown.
    """
    for task_type in task_types or ():
        if task_type not in TASK_TYPES:
            raise ValueError(f"expected task types of {TASK_TYPES}, found {task_type!r}")
    refs: Sequence[GameRef]
    if not isinstance(games, (str, os.PathLike)):
        files = [_file_ref(Path(path)) for path in games]
        refs, source = _distinct(files, [ref.gamefile for ref in files]), f"{len(games)} files"
    elif isinstance(games, str) and games.split(":")[0] == "embedded":
        refs, source = _embedded(games), games
    elif isinstance(games, str) and games in OFFICIAL_SPLITS:
        refs, source = _directory(_split_directory(games, data)), games
    else:
        path = Path(games)
        if isinstance(games, str) and not path.exists() and len(path.parts) == 1 and path.suffix == "":
            known = [*(f"embedded:{split}" for split in SPLITS), *OFFICIAL_SPLITS]
            near = difflib.get_close_matches(games, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise DataNotFound(f"expected games of {', '.join(known)}, a directory or a file, found {games!r}{hint}")
        refs, source = _directory(path) if path.is_dir() else (_file_ref(path),), os.fspath(games)
    if task_types is not None:
        refs = [ref for ref in refs if ref.task_type in task_types]
    return GameLibrary(refs if limit is None else refs[:limit], source=source)


@lru_cache(maxsize=16)  # thousands of names, which each environment of a process would write again
def _embedded(games: str) -> tuple[GameRef, ...]:
    _, split, size, *rest = (*games.split(":"), "", "")
    split = split or "train"
    if split not in SPLITS or not (size.isdigit() or not size) or any(rest):
        raise ValueError(f"expected embedded[:{'|'.join(SPLITS)}[:size]], found {games!r}")
    return tuple(
        GameRef(f"embedded/{split}/{number}", task_type_of(number), f"embedded/{split}/{number}")
        for number in range(int(size) if size else EMBEDDED_SIZES[split])
    )


def _split_directory(split: str, data: str | os.PathLike[str] | None) -> Path:
    root = data if data is not None else find(GAMES)
    if not root:
        raise DataNotFound(
            f"the official split {split!r} needs the ALFWorld data: {DOWNLOAD}; or set ALFWORLD_DATA to the directory "
            f"that alfworld-download filled (it holds json_2.1.1/{split}), or use games='embedded'"
        )
    candidates = (Path(root, "json_2.1.1", split), Path(root, split))
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise DataNotFound(
        f"no split {split!r} under {os.fspath(root)}: expected the directory {' or '.join(map(str, candidates))}; "
        f"{DOWNLOAD}; or set ALFWORLD_DATA to the directory that alfworld-download filled"
    )


def _directory(root: Path) -> tuple[GameRef, ...]:
    root = Path(os.path.abspath(root))
    known = _indexes.get(root)
    if known is None or known.stale():
        known = _indexes[root] = _index(root)
        if len(_indexes) > _MAX_INDEXES:
            _indexes.pop(next(iter(_indexes)))
    if not known.refs:
        raise DataNotFound(f"no {GAME_FILE} anywhere under {root}; {DOWNLOAD}")
    return known.refs


@dataclass(frozen=True, slots=True)
class _Index:
    """Index of the games under a directory, with the times at which its directories last changed."""

    refs: tuple[GameRef, ...]
    changed: tuple[tuple[str, int], ...]

    def stale(self) -> bool:
        try:  # a stat of each directory takes a tenth of the time of reading them
            return any(os.stat(directory).st_mtime_ns != mtime for directory, mtime in self.changed)
        except OSError:
            return True


_MAX_INDEXES = 32
_indexes: dict[Path, _Index] = {}


def _index(root: Path) -> _Index:
    found = []
    changed = []
    pending = [(os.fspath(root), "")]
    while pending:
        directory, relative = pending.pop()
        changed.append((directory, os.stat(directory).st_mtime_ns))  # before reading: a later change is seen next time
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.name == GAME_FILE:
                    found.append(relative + entry.name)
                # The original leaves these tasks out: its text engine cannot play them.
                elif "movable" not in entry.name and "Sliced" not in entry.name and entry.is_dir():
                    pending.append((entry.path, f"{relative}{entry.name}/"))
    paths = sorted(found)
    return _Index(_distinct([_ref(root / path, path) for path in paths], paths), tuple(changed))


def _file_ref(path: Path) -> GameRef:
    path = Path(os.path.abspath(path))
    if not path.is_file():
        raise DataNotFound(f"no such game file or directory: {path}")
    return _ref(path, "/".join(path.parts[-3:]))


def _ref(path: Path, relative: str) -> GameRef:
    parts = path.parts
    split = max((at for at, part in enumerate(parts) if part in OFFICIAL_SPLITS), default=None)
    task_id = relative if split is None else "/".join(parts[split:])
    task_type = next((name for name in TASK_TYPES if name in task_id), "unknown")
    return GameRef(task_id, task_type, os.fspath(path))


def _distinct(refs: Sequence[GameRef], longer: Sequence[str]) -> tuple[GameRef, ...]:
    """Give games longer ids where two would have the same, as in copies of a split."""
    count = Counter(ref.task_id for ref in refs)
    return tuple(
        replace(ref, task_id=name) if count[ref.task_id] > 1 else ref for ref, name in zip(refs, longer, strict=True)
    )


def _grouped(names: Iterable[str]) -> dict[str, list[int]]:
    numbers: dict[str, list[int]] = {}
    for number, name in enumerate(names):
        numbers.setdefault(name, []).append(number)
    return numbers


def _tail(path: str) -> str:
    """The last part of a normalised path, not counting the name that all game files have."""
    head, _, last = path.rpartition("/")
    return head.rpartition("/")[2] if last == GAME_FILE else last


def _ends_with(task_id: str, ending: str) -> bool:
    wanted = PurePosixPath(ending).parts
    parts = PurePosixPath(task_id).parts
    if parts[-1] == GAME_FILE and wanted[-1:] != (GAME_FILE,):
        parts = parts[:-1]
    return bool(wanted) and parts[-len(wanted) :] == wanted


class _Cache:
    """The most recently used compiled games of the process."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._games: OrderedDict[Hashable, Game] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, compile_game: Callable[[], Game]) -> Game:
        # Compiling holds the lock: pure Python gains nothing from two threads, and no game is compiled twice.
        with self._lock:
            if key not in self._games:
                self._games[key] = compile_game()
                excess = sum(game.footprint() for game in self._games.values()) - self._nbytes
                while excess > 0 and len(self._games) > 1:
                    excess -= self._games.popitem(last=False)[1].footprint()
            self._games.move_to_end(key)
            return self._games[key]


_cache = _Cache(CACHED_BYTES)
if hasattr(os, "register_at_fork"):  # another thread may hold the lock at the moment of a fork
    os.register_at_fork(after_in_child=lambda: setattr(_cache, "_lock", threading.Lock()))


def _load(ref: GameRef) -> Game:
    return _cache.get(file_key(ref), lambda: _compile(ref, default_cache()))


def file_key(ref: GameRef) -> Hashable:
    """Key that stays equal as long as the game's file is the same.

    Raises:
        DataNotFound: the file is gone.
    """
    if _is_embedded(ref):
        return ref.gamefile
    try:
        status = os.stat(ref.gamefile)
    except OSError as error:
        raise DataNotFound(f"game file is gone: {ref.gamefile}; {DOWNLOAD}") from error
    return ref.gamefile, status.st_ino, status.st_ctime_ns, status.st_mtime_ns, status.st_size


def content_of(ref: GameRef) -> bytes:
    """Read the content of the game's file."""
    if not _is_embedded(ref):
        return Path(ref.gamefile).read_bytes()
    _, split, number = ref.gamefile.split("/")
    return generate_game(split, int(number))


def instruction_of(ref: GameRef) -> str:
    """Instruction of a game, the text after "Your task is to:"; the file is read, but the game is not compiled."""
    found = _INSTRUCTION.search(content_of(ref))
    return "" if found is None else found[1].decode("utf-8", "replace").strip()


def check_data(root: Path) -> list[str]:
    """List the official data found under a directory, one line per split; the first game of each is compiled.

    Raises:
        ValueError: there is no official data, or the first game of a split cannot be played.
    """
    lines = []
    for split in OFFICIAL_SPLITS:
        try:
            library = open_library(split, data=root)
            library.compile(0)
        except DataNotFound:
            continue
        except GameError as error:
            raise ValueError(f"{split} does not hold games that can be played: {error}") from error
        lines.append(f"{split}: {len(library)} games")
    if not lines and any(root.rglob("traj_data.json")):
        return ["annotations are there; the games are another part: sandboxgym download alfworld"]
    if not lines:
        raise ValueError(f"no split of {', '.join(OFFICIAL_SPLITS)} under {root}")
    return lines


def _compile(ref: GameRef, cache: GroundingCache | None = None) -> Game:
    return Game.from_json(content_of(ref), name=ref.gamefile, task_type=ref.task_type, cache=cache)


def _is_embedded(ref: GameRef) -> bool:
    return ref.gamefile.startswith("embedded/")
