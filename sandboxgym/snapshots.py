"""The snapshot as a handle: captured state in memory or as bytes, with the declarations that belong to it.

`SnapshotEnv` (``core.py``) takes and applies snapshots. A handle never changes; its content is the environment's state,
random streams and last transition, and the states of the wrappers through which it was taken.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, SupportsFloat

import numpy as np

from sandboxgym import randomness, serialization
from sandboxgym.brief import brief
from sandboxgym.errors import SnapshotCorrupt, SnapshotError, SnapshotReleased, from_outside
from sandboxgym.serialization import Piece
from sandboxgym.system.atomic import write_atomic

Kind = Literal["memory", "filesystem", "full", "logical", "replay"]


class Transition(NamedTuple):
    """Result of the last ``reset`` (reward 0, flags False) or ``step``."""

    observation: Any
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SnapshotSpec:
    """Declaration of the state that an environment's snapshots cover; the conformance suite measures each claim."""

    kind: Kind = "memory"
    """Form of the captured state: ``memory``; ``filesystem``: files; ``full``: files and processes; ``logical``: the
    state in another system's own terms; ``replay``: the actions so far, which a restore repeats."""
    cost: Literal["constant", "written", "steps"] = "constant"
    """Growth of one snapshot's cost: none, with the writes so far, or with the steps so far."""
    rng: bool = True
    """Random streams are captured, so a restore repeats the same draws."""
    processes: bool = False
    """Running processes of the sandbox are captured."""
    clock: bool = False
    """Time as seen inside continues from the captured moment."""
    cross_process: bool = True
    """A saved snapshot restores in another process."""
    cross_host: bool = True
    """A saved snapshot restores on another machine."""
    loses: tuple[str, ...] = ()
    """State that is lost although this ``kind`` usually keeps it, by names of the suite's probes (``file.xattr``)."""


class Layer(NamedTuple):  # made with every snapshot, in a third of the time of a frozen dataclass
    """Captured state of one wrapper: its class name, the settings that must match on restore, and its state."""

    name: str
    config: dict[str, Any]
    state: Any


@dataclass(frozen=True, slots=True)
class Header:
    """Identity of the environment that a snapshot fits."""

    env_id: str | None
    env_class: str
    state_version: int
    config: dict[str, Any]
    kind: str


class Snapshot:
    """Immutable captured state of an environment and of the wrappers through which it was taken.

    Attributes:
        id: unique to this capture.
        parent: the id of the snapshot that the environment last took or restored, or None.
        header: identity of what the snapshot fits (environment id and class, configuration, kind).
        layers: the wrappers' states, outermost first; empty when taken from the bare environment.
    """

    __slots__ = ("_blob", "_body", "_encode", "_pieces", "header", "id", "layers", "parent")

    def __init__(
        self,
        header: Header,
        body: Body | None,
        *,
        encode: Callable[[Any], bytes] | None = None,
        pieces: Callable[[Any], Sequence[Piece]] | None = None,
        blob: dict[str, bytes] | None = None,
        layers: tuple[Layer, ...] = (),
        id: str | None = None,
        parent: str | None = None,
    ) -> None:
        self.id = id or os.urandom(16).hex()
        self.parent = parent
        self.header = header
        self.layers = layers
        self._body = body
        self._encode = encode
        self._pieces = pieces
        self._blob = blob  # the encoded sections; made when first asked for

    @property
    def env_id(self) -> str:
        """The Gymnasium id, or the class path of an environment that was not made from one."""
        return self.header.env_id or self.header.env_class

    @property
    def kind(self) -> str:
        """Kind of the snapshot; see `SnapshotSpec.kind`."""
        return self.header.kind

    @property
    def digest(self) -> str:
        """SHA-256 digest of the captured content; equal states have equal digests.

        Raises:
            SnapshotReleased, SnapshotNotSupported: as by `save`.
        """
        return serialization.content_digest(self._sections())

    @property
    def nbytes(self) -> int:
        """Size of the encoded content in bytes."""
        return sum(map(len, self._sections().values()))

    def layered(self, layers: tuple[Layer, ...]) -> Snapshot:
        """A copy of this capture with other wrapper states around it."""
        blob = None if self._blob is None else {**self._blob, "layers": _pack_layers(layers)}
        return Snapshot(
            self.header,
            self._body,
            encode=self._encode,
            pieces=self._pieces,
            blob=blob,
            layers=layers,
            id=self.id,
            parent=self.parent,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the snapshot to a file, atomically.

        Raises:
            SnapshotReleased: it was released.
            SnapshotNotSupported: the state, or a wrapper's, is not plain data.
        """
        write_atomic(path, self.to_bytes())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Snapshot:
        """Read a saved snapshot. Safe on untrusted files.

        Raises:
            SnapshotCorrupt: the file is not an intact snapshot; the message names it.
            OSError: the file cannot be read.
        """
        try:
            return cls.from_bytes(Path(path).read_bytes())
        except SnapshotCorrupt as error:
            raise SnapshotCorrupt(f"{os.fspath(path)}: {error}") from error

    def to_bytes(self) -> bytes:
        """The snapshot as the bytes that `save` writes.

        Raises:
            SnapshotReleased, SnapshotNotSupported: as by `save`.
        """
        return serialization.dumps(self._fields(), self._sections())

    @classmethod
    def from_bytes(cls, data: bytes) -> Snapshot:
        """Decode a snapshot from the bytes of `to_bytes`. Safe on untrusted bytes.

        Raises:
            SnapshotCorrupt: they are not those of an intact snapshot.
        """
        return cls.from_sections(*serialization.loads(data))

    def to_pieces(self) -> tuple[dict[str, Any], dict[str, Sequence[Piece]]]:
        """The snapshot for a store that keeps equal bytes once: a small header, and sections as pieces.

        The pieces of a section, joined, are arguments of `from_sections`. An environment that has no `_encode_pieces`
        has one piece per section.

        Raises:
            SnapshotReleased, SnapshotNotSupported: as by `save`.
        """
        self._check_held()
        header = {**self._fields(), "format": serialization.FORMAT_VERSION}
        if self._body is None or self._pieces is None:
            return header, {name: [Piece.of(data, alone=True)] for name, data in self._sections().items()}
        sections: dict[str, Sequence[Piece]] = {"state": self._pieces(self._body.state)}
        small = {name: [Piece.of(data, alone=True)] for name, data in self._small_sections().items()}
        return header, sections | small

    @classmethod
    def from_sections(cls, header: dict[str, Any], sections: dict[str, bytes]) -> Snapshot:
        """Decode a snapshot from its header and sections, whose bytes were verified.

        Raises:
            SnapshotCorrupt: they are not those of a snapshot.
        """
        try:
            fits = Header(**{name: header[name] for name in Header.__slots__})
            for name, kind in _HEADER_TYPES.items():
                if not isinstance(header[name], kind) or (isinstance(header[name], str) and len(header[name]) > _NAME):
                    raise TypeError(f"expected {name} to be {kind}, found {brief(header[name], 80)}")
            layers = tuple(Layer(*layer) for layer in serialization.unpack(sections["layers"]))
            if not all(isinstance(layer.name, str) and isinstance(layer.config, dict) for layer in layers):
                raise TypeError("expected the name and the configuration of every wrapper")
            blob = {name: sections[name] for name in ("state", "rng", "transition", "layers")}
            if header["format"] not in (1, serialization.FORMAT_VERSION):
                expected = f"expected snapshot format {serialization.FORMAT_VERSION} or 1"
                raise SnapshotCorrupt(f"{expected}, found {brief(header['format'], 40)}")
            if header["format"] == 1:  # as it is written today: equal content has an equal digest
                blob["rng"] = _rng_of_format_1(blob["rng"])
            return cls(fits, None, blob=blob, layers=layers, id=header["id"], parent=header["parent"])
        except (KeyError, TypeError) as error:
            raise SnapshotCorrupt(f"the header or the list of wrappers is incomplete: {brief(error)}") from error

    def release(self) -> None:
        """Release the resources that the snapshot holds. Idempotent; later use raises `SnapshotReleased`."""
        release = getattr(self._body.state, "release", None) if self._body else None
        self._body = self._blob = None
        if release is not None:
            release()

    @property
    def released(self) -> bool:
        """True after `release` was called."""
        return self._body is None and self._blob is None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return (Snapshot.from_bytes, (self.to_bytes(),))

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __repr__(self) -> str:
        through = "".join(f" through {layer.name.rpartition('.')[2]}" for layer in self.layers)
        released = " (released)" if self.released else ""
        return f"<Snapshot {self.id[:8]} of {self.env_id[:200]}{through[:1000]}{released}>"

    def _check_held(self) -> None:
        if self.released:
            raise SnapshotReleased(f"{self!r} cannot be used after release()")

    def _sections(self) -> dict[str, bytes]:
        self._check_held()
        if self._blob is None:
            assert self._body is not None and self._encode is not None
            self._blob = {"state": self._encode(self._body.state), **self._small_sections()}
        return self._blob

    def _small_sections(self) -> dict[str, bytes]:
        assert self._body is not None
        return {
            "rng": serialization.pack(randomness.compact(self._body.rng)),
            "transition": serialization.pack(self._body.transition and list(self._body.transition)),
            "layers": _pack_layers(self.layers),
        }

    def _fields(self) -> dict[str, Any]:
        return {**as_dict(self.header), "id": self.id, "parent": self.parent}

    def _open(self, decode: Callable[[bytes], Any]) -> Body:
        """The captured body, decoded by the environment's own decoder if it came from bytes."""
        self._check_held()
        if self._body is not None:
            return self._body
        assert self._blob is not None
        last = _decode_transition(self._blob["transition"])
        try:
            state = decode(self._blob["state"])
        except SnapshotError:
            raise
        except Exception as error:  # an author's decoder may raise anything on content that lies
            if from_outside(error):
                raise
            raise SnapshotCorrupt(
                f"{self!r} does not hold a state of {self.header.env_class}: {brief(error)}"
            ) from error
        return Body(state, randomness.expanded(serialization.unpack(self._blob["rng"])), last)


class Body(NamedTuple):
    """Content of a snapshot that was not encoded."""

    state: Any
    rng: dict[str, Any]
    transition: Transition | None  # None where the environment recomputes it from the state


_NAME = 10_000


_HEADER_TYPES: dict[str, Any] = {
    "env_id": str | None,
    "env_class": str,
    "state_version": int,
    "config": dict,
    "kind": str,
    "id": str,
    "parent": str | None,
}


def _pack_layers(layers: tuple[Layer, ...]) -> bytes:
    return serialization.pack([[layer.name, layer.config, layer.state] for layer in layers])


def _rng_of_format_1(data: bytes) -> bytes:
    """Random streams in their present encoding; what is none is left to be refused where it is used."""
    streams = serialization.unpack(data)
    try:
        return serialization.pack(randomness.compact(streams))
    except Exception as error:  # NumPy raises many types on content that lies
        if from_outside(error):
            raise
        return data


def _decode_transition(data: bytes) -> Transition | None:
    content = serialization.unpack(data)
    if content is None:
        return None
    kinds: tuple[Any, ...] = (object, SupportsFloat, (bool, np.bool_), (bool, np.bool_), dict)
    if not isinstance(content, list) or len(content) != len(kinds) or not all(map(isinstance, content, kinds)):
        raise SnapshotCorrupt(f"expected the fields of a Transition, found {brief(content)}")
    try:
        float(content[1])
    except Exception as error:  # any type of content may stand there
        if from_outside(error):
            raise
        raise SnapshotCorrupt(f"expected a number as the reward of a Transition, found {brief(content[1])}") from error
    return Transition(*content)


def as_dict(header: Header) -> dict[str, Any]:
    """Return the fields of a header by name."""
    return {name: getattr(header, name) for name in Header.__slots__}
