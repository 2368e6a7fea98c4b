"""Cache of grounded games and their operators on disk, so that a game is compiled and played faster the second time.

What this module promises:

1. An entry's key is the digest of the game and of the code that grounds games and writes commands, so that neither a
   changed game nor a new version of this package ever reads a stale one.
2. An entry is plain data with a checksum that covers its key; reading one never executes code. An entry that is
   damaged, under another game's name, or does not fit the domain, counts as missing. Operators are decoded when they
   are played; those that do not fit the game are instantiated instead. But whoever can write the directory can compute
   checksums too, and decide what happens in a game.
3. Writing is atomic, and a failure (a full or read-only disk, no home directory) is no error. The directory is kept
   below a size: the least recently used entries are removed first.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import pkgutil
import stat
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress
from operator import eq
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from sandboxgym.data import NoHomeDirectory, cache_dir
from sandboxgym.envs.alfworld.grounding import Conditional, Grounding, Operator
from sandboxgym.envs.alfworld.pddl import Atom, Domain
from sandboxgym.system.atomic import is_temporary, write_atomic

logger = logging.getLogger("sandboxgym")

MAX_BYTES = 256 * 2**20
"""Size limit of the directory: room for all official games, of some 50 kB each with their operators."""
_MAX_ENTRY = 4 * 2**20
"""Bytes of an entry before it is compressed. A game with more is compiled each time it is loaded."""
_MAGIC = b"SBXALF\x00\x01"
_SUFFIX = ".grounding"
_WRITES_BETWEEN_SWEEPS = 64
_STALE_SECONDS = 3600.0
_CODE = ("pddl.py", "relations.py", "grounding.py", "grounding_cache.py", "grammar.py", "game.py")
_unpack_bits = functools.partial(int.from_bytes, byteorder="little")


class StoredBucket:
    """`Bucket` of encoded operators with their commands; an operator is decoded when it is first played.

    Args:
        conditions: sets of facts, encoded, and for each operator the numbers of two of them: the facts that must be
            true, and all facts that it looks at. Those of a contradiction are not among the latter: then nothing equals
            the true ones.
        effects: sets of facts, encoded, whose numbers are in ``rows``.
        rows: the rest of each operator, encoded.
        commands: command of each operator.
        names: objects of the game, by number.
        arities: number of arguments of each action.
    """

    __slots__ = ("_arities", "_effects", "_looked_at", "_made", "_names", "_pos", "_rows", "commands")

    def __init__(
        self,
        conditions: tuple[Sequence[bytes], Sequence[int], Sequence[int]],
        effects: Sequence[bytes],
        rows: Sequence[bytes],
        commands: Sequence[str],
        names: Mapping[int, str],
        arities: Mapping[str, int],
    ) -> None:
        masks, pos, looked_at = conditions
        if not len(pos) == len(looked_at) == len(rows):
            raise ValueError("expected conditions for each operator")
        if rows and min(*pos, *looked_at) < 0:  # which would mean something in a list
            raise ValueError("expected numbers of sets of facts")
        decoded = [*map(int.from_bytes, masks)]
        self._pos = [*map(decoded.__getitem__, pos)]
        self._looked_at = [*map(decoded.__getitem__, looked_at)]
        self._effects = effects
        self._rows = rows
        self.commands = commands
        self._names = names
        self._arities = arities
        self._made: dict[int, Operator] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def applicable(self, state: int) -> list[int]:
        """See `Bucket.applicable`."""
        hold = map(eq, map(state.__and__, self._looked_at), self._pos)
        return [*compress(range(len(self._pos)), hold)]

    def operator(self, at: int) -> Operator | None:
        """See `Bucket.operator`."""
        if at in self._made:
            return self._made[at]
        try:
            action, numbers, changes, conditional = msgpack.unpackb(self._rows[at])
            add, delete, listed_add, listed_delete = map(self._effect, changes)
            args = tuple([self._names[number] for number in numbers])
            effects = tuple([Conditional(*map(self._effect, effect)) for effect in conditional])
            if len(args) != self._arities[action]:
                raise ValueError(f"expected {self._arities[action]} arguments of {action}")
        except (ValueError, LookupError, TypeError) as error:
            logger.warning("ignored a damaged operator of the game cache: %s", error)
            return None
        pos = self._pos[at]
        neg = self._looked_at[at] ^ pos
        made = self._made[at] = Operator(action, args, pos, neg, add, delete, effects, listed_add, listed_delete)
        return made

    def _effect(self, number: Any) -> int:
        return int.from_bytes(self._effects[_natural(number)])


class StoredOperators:
    """Operators of a game with their commands, encoded apart for each fact that they are filed under.

    Args:
        packed: encoded operators by the number of their fact plus 1; 0 for those filed under no fact.
        names: objects of the game, sorted.
        width: number of facts that can change.
        arities: number of arguments of each action.
    """

    def __init__(
        self, packed: Mapping[int, bytes], names: Sequence[str], width: int, arities: Mapping[str, int]
    ) -> None:
        self.packed = packed
        self._arities = arities
        self._names = dict(enumerate(names))
        self._bytes = (width + 7) // 8
        self.nbytes = sum(map(len, packed.values()))

    @classmethod
    def of(
        cls, grounding: Grounding, filed: Mapping[int, Sequence[tuple[Operator, str]]], domain: Domain
    ) -> StoredOperators:
        """Encode operators with their commands, given by the bit of the fact that they are filed under."""
        names = sorted(grounding.objects)
        number = {name: at for at, name in enumerate(names)}
        packed = {bucket.bit_length(): _pack_operators(found, number) for bucket, found in filed.items()}
        return cls(packed, names, len(grounding.facts), arities_of(domain))

    def none(self) -> StoredOperators:
        """The same game without its operators, which are instantiated as they are needed."""
        return type(self)({}, [*self._names.values()], 8 * self._bytes, self._arities)

    def read(self, bucket: int) -> StoredBucket | None:
        """Decode the operators filed under the fact with bit ``bucket``; None if they are missing or do not fit."""
        packed = self.packed.get(bucket.bit_length())
        if packed is None:
            return None
        try:
            conditions, effects, rows, commands = msgpack.unpackb(packed)
            if max(map(len, (*conditions[0], *effects)), default=0) > self._bytes or len(rows) != len(commands):
                raise ValueError("expected masks of the facts, and a command for each operator")
            if not isinstance(commands, list) or not isinstance("".join(commands), str):
                raise ValueError("expected commands")
            return StoredBucket(conditions, effects, rows, commands, self._names, self._arities)
        except (ValueError, LookupError, TypeError) as error:
            logger.warning("ignored damaged operators of the game cache: %s", error)
            return None


def arities_of(domain: Domain) -> Mapping[str, int]:
    """Number of arguments of each action."""
    return {action.name: len(action.parameters) for action in domain.actions}


class CachedGame(NamedTuple):
    """Content of an entry; its operators are None until the game is compiled for the second time."""

    grounding: Grounding
    operators: StoredOperators | None


class GroundingCache:
    """Directory of cached entries, by default ``alfworld`` under `sandboxgym.data.cache_dir`.

    Args:
        directory: path of the directory, which is created when the first entry is written.
        max_bytes: limit in bytes of all entries together.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None, *, max_bytes: int = MAX_BYTES) -> None:
        self.directory = Path(directory) if directory is not None else cache_dir() / "alfworld"
        self._max_bytes = max_bytes

    def get(self, digest: str, domain: Domain) -> CachedGame | None:
        """Read the entry of the game with this digest; None if there is no usable one."""
        try:
            path = self._path(digest)
            content = _read(path)
        except OSError:
            return None
        try:
            entry = _decode(content, domain, _seal(digest))
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, zlib.error) as error:
            logger.warning("ignored a damaged entry of the game cache, %s: %s", path, error)
            return None
        with contextlib.suppress(OSError):  # mark it as used; in a read-only directory nothing is swept either
            os.utime(path)
        return entry

    def put(self, digest: str, entry: CachedGame) -> None:
        """Write an entry, if the disk allows it, without operators that make it too large, and none that still is."""
        try:
            path = self._path(digest)
            path.parent.mkdir(parents=True, exist_ok=True)
            content = _encode(entry, _seal(digest))
            if content is None and entry.operators is not None:
                content = _encode(CachedGame(entry.grounding, entry.operators.none()), _seal(digest))
            if content is None:
                return
            write_atomic(path, content, durable=False)  # its checksum is compared when it is read
        except OSError as error:
            logger.debug("the game cache cannot be written: %s", error)
            _full.add(str(self.directory))
            return
        if int(digest[:8], 16) % _WRITES_BETWEEN_SWEEPS == 0:  # without a counter that processes would have to share
            self.sweep()

    def takes_more(self) -> bool:
        """True if an entry that was read may be replaced by one with operators, which take time to encode."""
        return str(self.directory) not in _full and os.access(self.directory, os.W_OK)

    def sweep(self) -> None:
        """Remove the least recently used entries until the rest fits, and the files of killed writers."""
        entries: list[tuple[float, int, str]] = []
        with contextlib.suppress(OSError), os.scandir(self.directory) as found:
            for entry in found:
                status = entry.stat(follow_symlinks=False)
                if is_temporary(entry.name):
                    if time.time() - status.st_mtime > _STALE_SECONDS:
                        _remove(entry.path)
                elif entry.name.endswith(_SUFFIX):
                    entries.append((status.st_mtime, status.st_size, entry.path))
        excess = sum(size for _, size, _ in entries) - self._max_bytes
        for _, size, path in sorted(entries):
            if excess <= 0:
                return
            _remove(path)
            excess -= size

    def _path(self, digest: str) -> Path:
        return self.directory / f"{digest[:32]}-{_code_digest()}{_SUFFIX}"


_full: set[str] = set()
"""Directories that this process could not write to: on a full disk, say."""


def default_cache() -> GroundingCache | None:
    """The cache of this user; None without a home directory."""
    try:
        return GroundingCache()
    except NoHomeDirectory as error:
        logger.debug("games are not cached: %s", error)
        return None


def _read(path: Path) -> bytes:
    """Read an entry, or more bytes than any has.

    Raises:
        OSError: there is none, or something else than a file, such as a pipe.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise FileNotFoundError(f"{path} is no file")
        return file.read(_MAX_ENTRY + 1)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):  # someone else's sweep was faster
        os.unlink(path)


@functools.cache
def _code_digest() -> str:
    """Digest of the modules that an entry depends on, which replaces a version number."""
    digest = hashlib.sha256()
    for name in _CODE:
        digest.update(pkgutil.get_data(__package__, name) or b"")
    return digest.hexdigest()[:16]


def _seal(digest: str) -> bytes:
    """Game and version that an entry belongs to, as its checksum covers them."""
    return f"{digest}-{_code_digest()}\n".encode()


def _encode(entry: CachedGame, seal: bytes) -> bytes | None:
    """Bytes of an entry; None if it is too large."""
    grounding, operators = entry
    names = sorted(grounding.objects)
    kinds = sorted(set(grounding.objects.values()))
    number = {name: at for at, name in enumerate(names)}
    content = [
        names,
        kinds,
        [kinds.index(grounding.objects[name]) for name in names],
        [number[name] for name in grounding.mentioned],
        list(_pack_atoms(grounding.facts, number)),
        list(_pack_atoms(grounding.constants, number)),
        _pack_bits(grounding.initial),
        [[_pack_bits(pos), _pack_bits(neg)] for pos, neg in grounding.goal],
        grounding.crowds,
        None if operators is None else operators.packed,
    ]
    plain = msgpack.packb(content)
    if len(plain) > _MAX_ENTRY:
        return None
    packed = zlib.compress(plain, 1)
    return _MAGIC + hashlib.sha256(seal + packed).digest() + packed


def _decode(content: bytes, domain: Domain, seal: bytes) -> CachedGame:
    packed = content[len(_MAGIC) + 32 :]
    if content[: len(_MAGIC) + 32] != _MAGIC + hashlib.sha256(seal + packed).digest():
        raise ValueError("expected an intact entry, found other bytes")
    inflate = zlib.decompressobj()
    plain = inflate.decompress(packed, _MAX_ENTRY)
    if not inflate.eof:
        raise ValueError(f"expected at most {_MAX_ENTRY} bytes of content")
    names, kinds, kind_of, mentioned, facts, constants, initial, goal, crowds, operators = msgpack.unpackb(
        plain, strict_map_key=False
    )
    if not all(isinstance(name, str) for name in (*names, *kinds)) or len(names) != len(kind_of):
        raise ValueError("expected objects with their types")
    if not crowds.keys() == set(domain.fluents) or not all(isinstance(crowd, int) for crowd in crowds.values()):
        raise ValueError("expected the fluents of the domain")
    for kind in kinds:
        domain.check_type(kind, "cache")
    width = len(names)
    grounding = Grounding(
        objects={name: kinds[_natural(kind)] for name, kind in zip(names, kind_of)},
        mentioned=tuple([names[_natural(number)] for number in mentioned]),
        facts=tuple(_unpack_atoms(facts, names, domain)),
        constants=tuple(_unpack_atoms(constants, names, domain)),
        initial=_unpack_bits(initial),
        goal=tuple((_unpack_bits(pos), _unpack_bits(neg)) for pos, neg in goal),
        crowds=crowds,
    )
    masks = [grounding.initial, *(mask for pair in grounding.goal for mask in pair)]
    if not goal or len(grounding.objects) != width or max(masks) >> len(grounding.facts):
        raise ValueError("expected masks of the facts, and different names")
    if operators is None:
        return CachedGame(grounding, None)
    if not all(isinstance(packed, bytes) for packed in operators.values()):
        raise ValueError("expected operators")
    return CachedGame(grounding, StoredOperators(operators, names, len(grounding.facts), arities_of(domain)))


def _pack_operators(found: Sequence[tuple[Operator, str]], number: Mapping[str, int]) -> bytes:
    """Encode operators and commands for a `StoredBucket`."""
    seen: dict[int, int] = {}
    changed: dict[int, int] = {}

    def numbers(of: dict[int, int], *all_bits: int) -> list[int]:
        return [of.setdefault(bits, len(of)) for bits in all_bits]

    columns: tuple[list[int], list[int]] = [], []
    rows = []
    for operator, _ in found:
        for column, at in zip(columns, numbers(seen, operator.pos, operator.pos ^ operator.neg), strict=True):
            column.append(at)
        changes = numbers(changed, operator.add, operator.delete, operator.listed_add, operator.listed_delete)
        args = [number[arg] for arg in operator.args]
        effects = [numbers(changed, *effect) for effect in operator.conditional]
        rows.append(msgpack.packb([operator.action, args, changes, effects]))
    conditions = [_big_endian(seen), *columns]
    return bytes(msgpack.packb([conditions, _big_endian(changed), rows, [command for _, command in found]]))


def _big_endian(masks: Iterable[int]) -> list[bytes]:
    return [bits.to_bytes((bits.bit_length() + 7) // 8) for bits in masks]


def _natural(number: Any) -> int:
    if not isinstance(number, int) or number < 0:
        raise ValueError(f"expected the number of an object or type, found {number!r}")
    return number


def _pack_bits(mask: int) -> bytes:
    return mask.to_bytes((mask.bit_length() + 7) // 8, "little")


def _pack_atoms(atoms: Iterable[Atom], number: dict[str, int]) -> Iterator[list[Any]]:
    """Group facts by predicate: its name, and the arguments of all its facts in one list."""
    run: list[Any] = []
    for predicate, args in atoms:
        if not run or run[0] != predicate:
            if run:
                yield run
            run = [predicate, 0, []]
        run[1] += 1
        run[2] += [number[arg] for arg in args]
    if run:
        yield run


def _unpack_atoms(runs: Iterable[Any], names: Sequence[str], domain: Domain) -> Iterator[Atom]:
    for predicate, count, given in runs:
        arity = domain.arities[predicate]
        if count * arity != len(given) or (given and min(given) < 0):
            raise ValueError(f"expected {count} facts of {predicate}")
        if not arity:
            yield from [Atom(predicate, ())] * count
            continue
        args = [names[number] for number in given]
        yield from map(functools.partial(Atom, predicate), zip(*[iter(args)] * arity))
