"""Cache of grounded games on disk, so that a game compiles faster the second time.

What this module promises:

1. An entry's key is the digest of the game and of the code that grounds games, so that neither a changed game nor a
   new version of this package ever reads a stale one.
2. An entry is plain data with a checksum; reading one never executes code. An entry that is damaged, or
   does not fit the domain, counts as missing.
3. Writing is atomic, and a failure (a full or read-only disk) is no error. The directory is kept below a size: the
   least recently used entries are removed first.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import pkgutil
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack

from sandboxgym.data import cache_dir
from sandboxgym.envs.alfworld.grounding import Grounding
from sandboxgym.envs.alfworld.pddl import Atom, Domain
from sandboxgym.system.atomic import is_temporary, write_atomic

logger = logging.getLogger("sandboxgym")

MAX_BYTES = 64 * 2**20
"""Size limit of the directory: room for twice the official games."""
_MAX_ENTRY = 4 * 2**20
_MAGIC = b"SBXALF\x00\x01"
_SUFFIX = ".grounding"
_WRITES_BETWEEN_SWEEPS = 64
_STALE_SECONDS = 3600.0
_CODE = ("pddl.py", "relations.py", "grounding.py", "grounding_cache.py")


class GroundingCache:
    """Directory of cached entries, by default ``alfworld`` under `sandboxgym.data.cache_dir`.

    Args:
        directory: made when the first entry is written.
        max_bytes: limit of the size of all entries together.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None, *, max_bytes: int = MAX_BYTES) -> None:
        self.directory = Path(directory) if directory is not None else cache_dir() / "alfworld"
        self._max_bytes = max_bytes

    def get(self, digest: str, domain: Domain) -> Grounding | None:
        """Read the entry of the game with this digest; None if there is no usable one."""
        path = self._path(digest)
        try:
            with open(path, "rb") as file:
                content = file.read(_MAX_ENTRY + 1)
        except OSError:
            return None
        try:
            grounding = _decode(content, domain)
        except (ValueError, KeyError, IndexError, TypeError, OverflowError, zlib.error) as error:
            logger.warning("ignored a damaged entry of the game cache, %s: %s", path, error)
            return None
        with contextlib.suppress(OSError):  # mark it as used; in a read-only directory nothing is swept either
            os.utime(path)
        return grounding

    def put(self, digest: str, grounding: Grounding) -> None:
        """Write ``grounding``, if the disk allows it."""
        path = self._path(digest)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, _encode(grounding), durable=False)  # its checksum is compared when it is read
        except OSError as error:
            logger.debug("the game cache cannot be written: %s", error)
            return
        if int(digest[:8], 16) % _WRITES_BETWEEN_SWEEPS == 0:  # without a counter that processes would have to share
            self.sweep()

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


def _encode(grounding: Grounding) -> bytes:
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
    ]
    packed = zlib.compress(msgpack.packb(content), 1)
    return _MAGIC + hashlib.sha256(packed).digest() + packed


def _decode(content: bytes, domain: Domain) -> Grounding:
    packed = content[len(_MAGIC) + 32 :]
    if content[: len(_MAGIC) + 32] != _MAGIC + hashlib.sha256(packed).digest():
        raise ValueError("expected an intact entry, found other bytes")
    inflate = zlib.decompressobj()
    plain = inflate.decompress(packed, _MAX_ENTRY)
    if not inflate.eof:
        raise ValueError(f"expected at most {_MAX_ENTRY} bytes of content")
    names, kinds, kind_of, mentioned, facts, constants, initial, goal, crowds = msgpack.unpackb(plain)
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
        initial=int.from_bytes(initial, "little"),
        goal=tuple((int.from_bytes(pos, "little"), int.from_bytes(neg, "little")) for pos, neg in goal),
        crowds=crowds,
    )
    masks = [grounding.initial, *(mask for pair in grounding.goal for mask in pair)]
    if not goal or len(grounding.objects) != width or max(masks) >> len(grounding.facts):
        raise ValueError("expected masks of the facts, and different names")
    return grounding


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
    for predicate, count, numbers in runs:
        arity = domain.arities[predicate]
        if count * arity != len(numbers) or (numbers and min(numbers) < 0):
            raise ValueError(f"expected {count} facts of {predicate}")
        if not arity:
            yield from [Atom(predicate, ())] * count
            continue
        args = [names[number] for number in numbers]
        yield from map(functools.partial(Atom, predicate), zip(*[iter(args)] * arity))
