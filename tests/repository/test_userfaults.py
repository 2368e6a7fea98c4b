"""Bytes of an image that a process gets when it touches its memory, whatever became of that memory meanwhile."""

from __future__ import annotations

import errno
import os
import random
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="userfaultfd is Linux's")
if sys.platform == "linux":
    from sandboxgym.system import userfaults
    from sandboxgym.system.userfaults import ProcessMemory, ranges_of

PAGE = os.sysconf("SC_PAGESIZE") if hasattr(os, "sysconf") else 4096
SOURCE = 1 << 40
FAULT, FORK, REMAP, REMOVE, UNMAP = range(0x12, 0x17)


def number(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def image(folder: Path, *messages: dict[int, int]) -> str:
    """A map of pages, as CRIU writes it."""
    data = b"magic of" + b"".join(
        len(content).to_bytes(4, "little") + content
        for message in messages
        for content in [b"".join(number(field << 3) + number(value) for field, value in message.items())]
    )
    (folder / "pagemap-7.img").write_bytes(data)
    return str(folder)


def test_the_map_of_pages(tmp_path: Path) -> None:
    lazy, present, absent = 6, 4, 2
    folder = image(
        tmp_path,
        {1: 3},
        {1: 64 * PAGE, 2: 0, 4: lazy, 5: 2},
        {1: 70 * PAGE, 2: 0, 4: present, 5: 3},
        {1: 80 * PAGE, 2: 0, 4: absent, 5: 9},
        {1: 1 << 46, 2: 1, 4: lazy},  # as older versions count
    )
    assert ranges_of(folder, 7) == (3, [(64 * PAGE, 66 * PAGE, 0), (1 << 46, (1 << 46) + PAGE, 5 * PAGE)])
    with pytest.raises(ValueError, match="expected all pages of process 7"):
        ranges_of(image(tmp_path, {1: 3}, {1: 64 * PAGE, 4: 1, 5: 2}), 7)


class Simulated:
    """A process as its kernel sees it: the page of the image that belongs at each address, and what is there."""

    def __init__(self, belongs: dict[int, int | None], there: dict[int, int | None] | None = None) -> None:
        self.belongs, self.there = belongs, there or {}
        self.reader, self.writer = os.pipe2(os.O_NONBLOCK)
        self.memory: ProcessMemory
        self.busy = False

    def tell(self, event: int, *values: int) -> None:
        os.write(self.writer, struct.pack("=BxxxxxxxQQQ", event, *values, *[0] * (3 - len(values))))
        self.busy = event != FAULT

    def ioctl(self, request: int, answer: bytearray, draw: random.Random) -> None:
        if request == userfaults._WAKE:
            return
        if self.busy:
            answer[-8:] = (-errno.EAGAIN).to_bytes(8, "little", signed=True)
            raise OSError(errno.EAGAIN, "reports are waiting")
        target, source, length, *_ = struct.unpack("=QQQQq", answer.ljust(40, b"\0"))
        if target not in self.belongs:
            answer[-8:] = (-errno.ENOENT).to_bytes(8, "little", signed=True)
            raise OSError(errno.ENOENT, "not mapped")
        if request == userfaults._ZERO:
            if target in self.there:
                answer[-8:] = (-errno.EEXIST).to_bytes(8, "little", signed=True)
                raise OSError(errno.EEXIST, "it is there")
            assert self.belongs[target] is None
            self.there[target] = None
            return
        done = 0
        most = draw.choice([length, PAGE, 3 * PAGE])  # it may stop anywhere
        while done < min(length, most) and target + done not in self.there and target + done in self.belongs:
            self.there[target + done] = (source - SOURCE + done) // PAGE
            done += PAGE
        answer[-8:] = (done or -errno.EEXIST).to_bytes(8, "little", signed=True)
        if done < length:
            raise OSError(errno.EAGAIN if done else errno.EEXIST, "a part")

    def close(self) -> None:
        os.close(self.reader)
        os.close(self.writer)


@pytest.fixture(params=range(20))
def draw(request: pytest.FixtureRequest) -> random.Random:
    return random.Random(request.param)


@pytest.fixture
def processes(draw: random.Random, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Simulated]]:
    """One process with three ranges."""
    belongs: dict[int, int | None] = {}
    ranges = []
    for base, offset in ((100, 40), (160, 0), (400, 90)):
        size = draw.randrange(1, 40)
        ranges.append((base * PAGE, (base + size) * PAGE, offset * PAGE))
        belongs |= {(base + at) * PAGE: offset + at for at in range(size)}
    made = [Simulated(belongs)]
    made[0].memory = ProcessMemory(made[0].reader, ranges, SOURCE)

    def ioctl(descriptor: int, request: int, answer: bytearray, mutate: bool) -> None:
        (one,) = (one for one in made if one.reader == descriptor)
        one.ioctl(request, answer, draw)

    monkeypatch.setattr("fcntl.ioctl", ioctl)
    yield made
    for one in made:
        one.close()


def test_each_page_gets_what_belongs_there(processes: list[Simulated], draw: random.Random) -> None:
    for step in range(150):
        one = draw.choice(processes)
        event = draw.choice([FAULT] * 8 + [REMOVE, UNMAP, REMAP, FORK])
        low = draw.choice(sorted(one.belongs) or [0])
        high = low + draw.randrange(1, 12) * PAGE
        touched = [page for page in range(low, high, PAGE) if page in one.belongs]
        if event == FAULT:
            if low in one.belongs and low not in one.there:
                one.tell(FAULT, 0, low + draw.randrange(PAGE))
        elif event == REMOVE:
            one.tell(REMOVE, low, high)
            for page in touched:
                one.there.pop(page, None)
                one.belongs[page] = None
        elif event == UNMAP:
            one.tell(UNMAP, low, high)
            for page in touched:
                one.there.pop(page, None)
                del one.belongs[page]
        elif event == REMAP:
            to = (1000 + 100 * step) * PAGE
            one.tell(REMAP, low, to, high - low)
            for page in touched:
                one.belongs[page - low + to] = one.belongs.pop(page)
                if page in one.there:
                    one.there[page - low + to] = one.there.pop(page)
        elif len(processes) < 4:
            child = Simulated(dict(one.belongs), dict(one.there))
            one.tell(FORK, child.reader)
            processes.append(child)
        forked = one.memory.read()
        if one.memory.waiting and draw.random() < 0.5:  # the next report comes before the page is brought
            other = draw.choice(sorted(one.belongs))
            one.tell(REMOVE, other, other + PAGE)
            one.there.pop(other, None)
            one.belongs[other] = None
            with pytest.raises(userfaults.Changing):
                one.memory.bring_waiting()
            one.memory.read()
        one.busy = False
        if event == FORK and forked:
            processes[-1].memory = forked[0]
        one.memory.bring_waiting()
        if event == FAULT and low in one.belongs:
            assert low in one.there
        for each in processes:
            assert {page: each.belongs[page] for page in each.there} == each.there
    for one in processes:
        while one.memory.ranges:
            one.memory.bring_more()
        assert one.memory.left == 0
        wanted = {page: content for page, content in one.belongs.items() if content is not None}
        assert {page: one.there.get(page) for page in wanted} == wanted


def test_a_late_report_does_not_take_what_was_moved_there_since(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Simulated({100 * PAGE: 1, 200 * PAGE: 2})
    one.memory = ProcessMemory(one.reader, [(page * PAGE, (page + 1) * PAGE, 0) for page in (100, 200)], SOURCE)
    monkeypatch.setattr("fcntl.ioctl", lambda *_: None)
    one.tell(REMAP, 100 * PAGE, 300 * PAGE, PAGE)
    one.tell(REMAP, 200 * PAGE, 100 * PAGE, PAGE)  # of another thread
    one.tell(UNMAP, 100 * PAGE, 101 * PAGE)  # belongs to the first
    one.memory.read()
    assert [start // PAGE for start, *_ in one.memory.ranges] == [100, 300]
    one.memory.waiting = [500 * PAGE]
    one.memory.bring_waiting()  # the kernel obeys, so it has nothing more to report
    one.tell(UNMAP, 100 * PAGE, 101 * PAGE)
    one.memory.read()
    assert [start // PAGE for start, *_ in one.memory.ranges] == [300]
    one.close()


def test_threads_may_report_in_another_order_than_they_acted(
    draw: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each acts on memory of its own, and may use a place that another has just left."""
    pieces = [(200 * (index + 1) * PAGE, draw.choice([3, 9, 9, 30])) for index in range(12)]
    offsets = {start: 50 * index for index, (start, _) in enumerate(pieces)}
    one = Simulated({start + at * PAGE: offsets[start] + at for start, size in pieces for at in range(size)})
    ranges = [(start, start + size * PAGE, offsets[start] * PAGE) for start, size in pieces]
    one.memory = ProcessMemory(one.reader, ranges, SOURCE)
    monkeypatch.setattr("fcntl.ioctl", lambda descriptor, request, answer, mutate: one.ioctl(request, answer, draw))
    monkeypatch.setattr(userfaults, "MOST", 4 * PAGE)
    one.memory._size = PAGE
    for window in range(30):
        one.busy = True
        reports: list[list[tuple[int, ...]]] = []
        free: list[int] = []
        for index in draw.sample(range(len(pieces)), draw.randrange(1, len(pieces) + 1) if pieces else 0):
            old, size = pieces[index]
            content = [(one.belongs.pop(page), one.there.pop(page, -1)) for page in range(old, old + size * PAGE, PAGE)]
            if draw.random() < 0.1:
                pieces[index] = (0, 0)
                reports.append([(UNMAP, old, old + size * PAGE)])
            else:
                new = free.pop() if free and draw.random() < 0.7 else (10_000 + 2000 * window + 100 * index) * PAGE
                pieces[index] = (new, size)
                reports.append([(REMAP, old, new, size * PAGE), (UNMAP, old, old + size * PAGE)])
                for at, (belongs, there) in enumerate(content):
                    one.belongs[new + at * PAGE] = belongs
                    if there != -1:
                        one.there[new + at * PAGE] = there
            if all(abs(start - old) >= 100 * PAGE for start, _ in pieces):
                free.append(old)
        while reports:
            thread = draw.choice(reports)
            one.tell(*thread.pop(0))
            reports = [waiting for waiting in reports if waiting]
            if draw.random() < 0.7:
                one.memory.read()
        one.memory.read()
        pieces = [piece for piece in pieces if piece[1]]
        one.busy = False
        if draw.random() < 0.5 and (absent := sorted(set(one.belongs) - set(one.there))):
            one.memory.waiting = [draw.choice(absent)]
        one.memory.bring_waiting()
        assert not one.memory.ended()
        assert {page: one.belongs[page] for page in one.there} == one.there
    while one.memory.ranges:
        one.memory.bring_more()
    assert one.memory.left == 0 and one.there == one.belongs
    one.close()


@pytest.mark.parametrize("reused", [False, True])
def test_what_arrived_may_be_moved_on(reused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the kernel obeys again; and its place be taken then."""
    draw = random.Random(0)
    one = Simulated({300 * PAGE: 1, (100 if reused else 400) * PAGE: 2})
    ranges = [(200 * PAGE, 201 * PAGE, PAGE), (400 * PAGE, 401 * PAGE, 2 * PAGE)]
    one.memory = ProcessMemory(one.reader, ranges, SOURCE)
    monkeypatch.setattr("fcntl.ioctl", lambda descriptor, request, answer, mutate: one.ioctl(request, answer, draw))
    for old, new in [(200, 100), (100, 300), *([(400, 100)] if reused else [])]:
        one.tell(REMAP, old * PAGE, new * PAGE, PAGE)
        one.memory.read()
    one.busy = False
    one.memory.bring_waiting()
    while one.memory.ranges:
        one.memory.bring_more()
    assert one.there == one.belongs
    one.close()


def test_a_process_that_has_ended_is_found_out_at_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Simulated({})
    one.memory = ProcessMemory(one.reader, [(100 * PAGE, 900 * PAGE, 0)], SOURCE)
    asked = []

    def ioctl(descriptor: int, request: int, answer: bytearray, mutate: bool) -> None:
        asked.append(request)
        raise OSError(errno.ESRCH, "no such process")

    monkeypatch.setattr("fcntl.ioctl", ioctl)
    with pytest.raises(userfaults.Ended):
        one.memory.bring_more()
    assert len(asked) == 1 and one.memory.ended()
    one.close()


def test_memory_is_not_whole_while_it_only_seems_to_have_gone() -> None:
    one = Simulated({})
    one.memory = ProcessMemory(one.reader, [(200 * PAGE, 201 * PAGE, 0)], SOURCE)
    one.tell(REMAP, 200 * PAGE, 100 * PAGE, PAGE)
    one.tell(UNMAP, 100 * PAGE, 101 * PAGE)  # perhaps of what was there before
    one.memory.read()
    assert not one.memory.ranges and not one.memory.is_whole()
    one.close()


def test_what_is_not_found_may_have_been_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Simulated({})
    one.memory = ProcessMemory(one.reader, [(100 * PAGE, 101 * PAGE, 0)], SOURCE)
    codes = [errno.ENOENT]

    def ioctl(descriptor: int, request: int, answer: bytearray, mutate: bool) -> None:
        code = codes.pop() if codes else errno.EAGAIN  # it looks for the mapping first, while that is moved
        answer[-8:] = (-code).to_bytes(8, "little", signed=True)
        raise OSError(code, "refused")

    monkeypatch.setattr("fcntl.ioctl", ioctl)
    with pytest.raises(userfaults.Changing):
        one.memory.bring_more()
    one.tell(REMAP, 100 * PAGE, 300 * PAGE, PAGE)
    one.memory.read()
    assert one.memory.ranges == [(300 * PAGE, 301 * PAGE, 0)]
    one.close()
