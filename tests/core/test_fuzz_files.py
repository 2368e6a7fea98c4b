"""Mutated files of snapshots and sandboxes: refused with a typed error in bounded time, nothing executed, nothing half
restored.

``SANDBOXGYM_FUZZ_FILES=100000`` sets the number of files (default: about one minute of tests); each has its own seed,
which the message of a failure names.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import wrappers as w
from gymnasium.error import ResetNeeded

import sandboxgym
from sandboxgym import Snapshot, SnapshotCorrupt, SnapshotError, serialization
from sandboxgym.sandbox.base import RootFS, SandboxFull
from sandboxgym.sandbox.files import archive
from sandboxgym.sandbox.files.portable import ArchiveHeader, ArchiveWriter, Reader, entries
from sandboxgym.sandbox.layers.store import LayerStore, OverlayTree

FILES = int(os.environ.get("SANDBOXGYM_FUZZ_FILES", "12000"))
SECONDS = 10.0
"""Processor time that no file of some kilobytes may take."""

FORBIDDEN = ("exec", "pickle.find_class", "os.system", "subprocess.Popen", "os.exec", "os.fork", "socket.connect")
SEEN: list[str] = []
WATCHED = [False]


def audit(event: str, _: tuple[Any, ...]) -> None:
    if WATCHED[0] and event in FORBIDDEN:
        SEEN.append(event)


sys.addaudithook(audit)

STACKS: dict[str, Callable[[], gym.Env[Any, Any]]] = {
    "alfworld": lambda: gym.make("sandboxgym/ALFWorld-v0", max_episode_steps=20),
    "alfworld, wrapped": lambda: w.RecordEpisodeStatistics(
        w.StickyAction(gym.make("sandboxgym/ALFWorld-v0", max_episode_steps=20), 0.2)
    ),
    "webshop": lambda: gym.make("sandboxgym/WebShop-v0", max_episode_steps=20),
    "toy": lambda: gym.make("toys/Dice-v0", max_episode_steps=7),
    "toy, wrapped": lambda: w.FrameStackObservation(
        w.NormalizeReward(w.NormalizeObservation(gym.make("toys/Drift-v0", max_episode_steps=9))), 3
    ),
}
ACTIONS: dict[str, list[Any]] = {
    "alfworld": ["look", "inventory", "go to desk 1", "nonsense"],
    "webshop": ["search[red lamp]", "click[Next >]", "click[< Prev]", "click[Back to Search]", "click[Buy Now]"],
    "toy": [1, 0, 1],
}
CHECKED = ("alfworld", "webshop")
"""Environments that check every state; a toy's `_apply` takes what it is given."""

JUNK: list[Any] = [
    *(None, True, False, 0, -1, 2**31, 2**63, 2**64, -(2**70), 2**5000, 0.5, float("nan"), float("inf")),
    *("", "x", "\0", "x" * 300, b"", b"\xff" * 9, [], [[]], [0] * 200, {}, {"a": 1}, {1: {}}, (), ((),), set()),
    *(
        np.zeros(()),
        np.zeros(2),
        np.zeros((0, 3)),
        np.array(["a"]),
        np.float32("nan"),
        np.int64(-1),
        np.array("NaT", "M8[s]"),
    ),
]


def mutated(data: bytes, draw: random.Random) -> bytes:
    """Bits flipped, pieces cut out, doubled, moved and filled."""
    content = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4, 8))):
        if not content:
            break
        low = draw.randrange(len(content))
        high = min(len(content), low + draw.choice((1, 1, 2, 4, 16, 64, 512)))
        kind = draw.randrange(7)
        if kind == 0:
            content[low] ^= 1 << draw.randrange(8)
        elif kind == 1:
            content[low] = draw.choice((0, 1, 0x7F, 0x80, 0x90, 0xC1, 0xC7, 0xC9, 0xD4, 0xDB, 0xDD, 0xDF, 0xFF))
        elif kind == 2:
            del content[low:high]
        elif kind == 3:
            content[low:low] = content[low:high]
        elif kind == 4:
            at = draw.randrange(len(content))
            content[at : at + high - low] = content[low:high]
        elif kind == 5:
            content[low:high] = bytes([draw.choice((0, 0xFF, 0x39, 0x5B))]) * (high - low)
        else:
            content[low:low] = draw.randbytes(draw.choice((1, 2, 4, 9)))
    return bytes(content)


def parts_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(parts_of, value.values()))
    return 1 + sum(map(parts_of, value)) if isinstance(value, (list, tuple)) else 1


def replaced(value: Any, place: list[int], thing: Any) -> Any:
    """The value with one of its parts replaced; ``place`` counts down."""
    place[0] -= 1
    if place[0] < 0:
        return thing if place[0] == -1 else value
    if isinstance(value, dict):
        return {key: replaced(item, place, thing) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([replaced(item, place, thing) for item in value])
    return value


def lied(content: bytes, draw: random.Random) -> bytes:
    """An encoding with one part that is something else."""
    try:
        value = serialization.unpack(content)
    except SnapshotCorrupt:  # an encoding of the environment's own
        return mutated(content, draw)
    return serialization.pack(replaced(value, [draw.randrange(parts_of(value))], draw.choice(JUNK)))


def alfworld_lied(content: bytes, draw: random.Random) -> bytes:
    """A state of ALFWorld that is packed as one, with a part that is something else."""
    import zlib

    from sandboxgym.envs.alfworld import env

    inflate = zlib.decompressobj(-15, zdict=env._USUAL_TEXT)
    packed = inflate.decompress(content)
    packed = lied(packed, draw) if draw.random() < 0.7 else mutated(packed, draw)
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15, zdict=env._USUAL_TEXT)
    return deflate.compress(packed) + deflate.flush()


class Victim:
    """A live environment that is shown files that lie."""

    def __init__(self, stack: str) -> None:
        self.kind = stack.partition(",")[0]
        other, self.env = STACKS[stack](), STACKS[stack]()
        other.reset(seed=1)
        for action in ACTIONS[self.kind][:3]:
            other.step(action)
        self.data = sandboxgym.snapshot(other).to_bytes()
        self.env.reset(seed=2)
        self.env.step(ACTIONS[self.kind][0])
        self.here = sandboxgym.snapshot(self.env)
        self.timed = "wrapped" in stack and self.kind == "alfworld"

    def file(self, draw: random.Random) -> bytes:
        how = draw.random()
        if how < 0.1:
            return mutated(self.data, draw)
        header, sections = serialization.loads(self.data)
        if how < 0.2:
            name = draw.choice(["env_id", "env_class", "state_version", "config", "kind", "id", "parent"])
            thing = draw.choice([None, True, 5, "", "x" * 300, [], {"a": [1]}, [[[]]], 10**30])
            return serialization.dumps({**header, name: thing}, sections)
        name = draw.choice(["state", "state", "rng", "transition", "layers"])
        if name == "state" and self.kind == "alfworld" and how < 0.8:
            sections[name] = alfworld_lied(sections[name], draw)
        else:
            sections[name] = (lied if how < 0.6 else mutated)(sections[name], draw)
        return serialization.dumps(header, sections)

    def digest(self) -> str:
        """Digest of all that it holds, but for a wrapper that measures times."""
        env = self.env.env if self.timed else self.env
        return str(sandboxgym.snapshot(env).digest)

    def shown(self, data: bytes) -> str:
        """Result of loading the file: refused, or accepted; anything else raises."""
        before = self.digest()
        try:
            sandboxgym.restore(self.env, Snapshot.from_bytes(data))
        except SnapshotError:
            assert self.digest() == before, "half restored"
            return "refused"
        if self.kind in CHECKED:
            with contextlib.suppress(ResetNeeded):  # `OrderEnforcing` was told that nobody reset it
                for action in ACTIONS[self.kind]:
                    self.env.step(action)
            sandboxgym.snapshot(self.env).to_bytes()
        sandboxgym.restore(self.env, self.here)
        return "accepted"


class Overlay:
    """A store of layers that is shown archives that lie."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "store").mkdir(parents=True)
        self.gone: list[str] = []
        self.store = LayerStore(folder / "store", remove=self.gone.extend)
        self.rootfs = RootFS("test", (folder,))
        self.rootless = os.geteuid() != 0
        layer = self.store.new()
        (layer.files / "d").mkdir()
        (layer.files / "d" / "file").write_bytes(b"x" * 700)
        (layer.files / "d" / ("n" * 150)).write_bytes(b"y")
        os.link(layer.files / "d/file", layer.files / "hard")
        os.symlink("/etc/passwd", layer.files / "soft")
        os.mkfifo(layer.files / "pipe")
        with open(layer.files / "holes", "wb") as file:
            file.seek(100_000)
            file.write(b"end")
        tree = OverlayTree(self.store, self.rootfs, [layer], rootless=self.rootless)
        self.data = archive.pack(tree)

    def file(self, draw: random.Random) -> bytes:
        return tar_mutated(self.data, draw)

    def shown(self, data: bytes) -> str:
        self.gone.clear()
        try:
            tree = archive.unpack(data, self.store, self.rootfs, rootless=self.rootless, limit=2**22)
        except (SnapshotError, SandboxFull):
            outcome = "refused"
        else:
            tree.release()
            outcome = "accepted"
        for path in self.gone:
            shutil.rmtree(path)
        assert len(list((self.folder / "store/layers").iterdir())) == 1, "something was left"
        assert sorted(os.listdir(self.folder)) == ["store"], "something was written outside"
        return outcome


class Copy:
    """A directory that is shown archives that lie."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        source = folder.with_name(folder.name + "-source")
        (source / "d").mkdir(parents=True)
        (source / "d" / "file").write_bytes(b"x" * 700)
        (source / "d" / ("é" * 90)).write_bytes(b"y")
        os.link(source / "d/file", source / "hard")
        os.symlink("../../..", source / "soft")
        os.mkfifo(source / "pipe")
        writer = ArchiveWriter(ArchiveHeader("empty", ("gone", "d/gone"), {"root": "/somewhere/root"}))
        for name, _ in entries(source):
            writer.file(source, name)
        self.data = writer.finish()
        folder.mkdir()

    def file(self, draw: random.Random) -> bytes:
        return tar_mutated(self.data, draw)

    def shown(self, data: bytes) -> str:
        root = self.folder / "root"
        root.mkdir()
        try:
            reader = Reader(data, base="empty")
            assert reader.nbytes <= len(data) + 4096 * len(reader.members) * 2
            reader.extract(root)
            outcome = "accepted"
        except (SnapshotError, SandboxFull):
            outcome = "refused"
        shutil.rmtree(root)
        assert os.listdir(self.folder) == [], "something was written outside"
        return outcome


FIELDS = [(0, 100), (100, 8), (108, 8), (124, 12), (136, 12), (156, 1), (157, 100), (345, 155)]
"""Places and lengths in a header."""


def tar_mutated(data: bytes, draw: random.Random) -> bytes:
    """Changed bytes, mostly with the checksums of headers right again."""
    content = bytearray(mutated(data, draw) if draw.random() < 0.3 else data)
    headers = [at for at in range(0, len(content) - 511, 512) if content[at + 257 : at + 262] == b"ustar"]
    for _ in range(draw.choice((0, 1, 1, 2, 3)) if headers else 0):
        at = draw.choice(headers)
        field, length = draw.choice(
            [(0, 100), (100, 8), (108, 8), (124, 12), (136, 12), (156, 1), (157, 100), (345, 155)]
        )
        kind = draw.randrange(4)
        if kind == 0:
            content[at + field + draw.randrange(length)] = draw.randrange(256)
        elif kind == 1:
            content[at + field : at + field + length] = content[
                (other := draw.choice(headers)) + field : other + field + length
            ]
        elif kind == 2:
            content[at + 156 : at + 157] = draw.choice(
                [b"0", b"\0", b"1", b"2", b"3", b"5", b"6", b"7", b"S", b"L", b"g", b"x"]
            )
        else:
            word = draw.choice([b"/", b"..", b"../../x", b"a/../../b", b"77777777777", b"\x80\xff", b"-1"])[:length]
            content[at + field : at + field + len(word)] = word
    if draw.random() < 0.6:
        for word, new in ((b"mtime=", b"mtime=9"), (b'"layers": ', b'"layers": 9'), (b'"root": ', b'"root": 5')):
            if draw.random() < 0.1 and (at := content.find(word)) >= 0:
                content[at : at + len(new)] = new
    for at in headers:
        if draw.random() < 0.97:
            content[at + 148 : at + 156] = b" " * 8
            content[at + 148 : at + 156] = b"%06o\0 " % sum(content[at : at + 512])
    return bytes(content)


TARGETS = [*STACKS, "overlay", "copy"]


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_no_mutated_file_does_more_than_be_refused(name: str, tmp_path: Path) -> None:
    target: Any = {"overlay": Overlay, "copy": Copy}[name](tmp_path / "here") if name not in STACKS else Victim(name)
    for _ in range(2):  # the second finds every module imported
        assert target.shown(target.data) == "accepted"
    outcomes: Counter[str] = Counter()
    slowest = 0.0
    for number in range(FILES // len(TARGETS)):
        data = target.file(random.Random(f"{name} {number}"))
        began = time.thread_time()
        SEEN.clear()
        WATCHED[0] = True
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                outcomes[target.shown(data)] += 1
        except Exception as error:
            raise AssertionError(f"file {number} of {name}: {error!r}") from error
        finally:
            WATCHED[0] = False
        taken = time.thread_time() - began
        slowest = max(slowest, taken)
        assert SEEN == [], f"file {number} of {name}"
        assert taken < SECONDS, f"file {number} of {name}"
    print(f"{name}: {dict(outcomes)}, slowest {slowest:.3f} s", flush=True)
    assert outcomes["refused"] > FILES // len(TARGETS) // 3
