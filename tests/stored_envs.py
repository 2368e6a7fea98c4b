"""Environments for the tests of stored snapshots, importable in other processes: their states are made of pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sandboxgym import SnapshotEnv, Unicode, serialization
from sandboxgym.sandbox.sandbox import Sandbox
from sandboxgym.sandbox.snapshot import SandboxSnapshot
from sandboxgym.serialization import Piece

CHUNK = 10_000


class Notebook(SnapshotEnv[str, str]):
    """Environment that keeps pages; each is a piece of its snapshots."""

    def __init__(self) -> None:
        self.observation_space = Unicode()
        self.action_space = Unicode()
        self.pages: list[bytes] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.pages = []
        return "0", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.pages.append(action.encode().ljust(CHUNK, b"."))
        return str(len(self.pages)), 0.0, False, False, {}

    def _capture(self) -> Any:
        return tuple(self.pages)

    def _apply(self, state: Any) -> None:
        self.pages = list(state)

    @classmethod
    def _encode(cls, state: Any) -> bytes:
        return serialization.pack({"pages": b"".join(state)})

    @classmethod
    def _encode_pieces(cls, state: Any) -> Sequence[Piece]:
        return serialization.pack_around(lambda pages: {"pages": pages}, [Piece.of(page) for page in state])

    @classmethod
    def _decode(cls, data: bytes) -> Any:
        pages = serialization.unpack(data)["pages"]
        return tuple(pages[at : at + CHUNK] for at in range(0, len(pages), CHUNK))


class Shell(SnapshotEnv[str, str]):
    """Environment of one sandbox."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.observation_space = Unicode()
        self.action_space = Unicode()
        self.sandbox = sandbox

    immutable_state = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return self.sandbox.execute(action).output, 0.0, False, False, {}

    def _config(self) -> dict[str, Any]:
        return {}

    def _capture(self) -> SandboxSnapshot:
        return self.sandbox.snapshot()

    def _apply(self, state: SandboxSnapshot | bytes) -> None:
        self.sandbox.restore(self.sandbox.unpack(state) if isinstance(state, bytes) else state)

    @classmethod
    def _encode(cls, state: SandboxSnapshot) -> bytes:
        return state.pack()

    @classmethod
    def _encode_pieces(cls, state: SandboxSnapshot) -> Sequence[Piece]:
        return state.pieces()

    @classmethod
    def _decode(cls, data: bytes) -> Any:
        return data


def three_pages() -> Notebook:
    """A notebook in mid-episode, of three pages."""
    env = Notebook()
    env.reset(seed=0)
    for page in ("one", "two", "three"):
        env.step(page)
    return env
