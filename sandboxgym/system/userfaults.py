"""Memory of restored processes, given to each when it touches it, from the images that CRIU wrote.

A restoring CRIU connects to ``lazy-pages.socket`` in its working directory, and sends the id and the userfaultfd of
each process. The kernel then reports every touch of a page that is not there, and waits. Standard library only.

1. Pages are copied from the image in pieces around the touched one, `FIRST` bytes at first and twice as many each time
   up to `MOST`. Who touches little gets little; the image itself lies in memory once, however many read it.
2. The kernel also reports forks and what becomes of ranges: moved, unmapped, given up. Until such a report is read it
   refuses to copy, so that no page comes to where it no longer belongs.
3. What is left of a process is brought at once when it is no more than `SMALL`: the kernel reports nothing of a process
   that has it all, and so delays none of its forks. `MemoryServer.complete` brings what is left of each.
"""

from __future__ import annotations

import _socket
import bisect
import ctypes
import errno
import fcntl
import mmap
import os
import select
import struct

FIRST, MOST = 1 << 16, 1 << 21
"""Bytes that are brought at once."""
SMALL = 1 << 22
"""Bytes of a process that are not left to be touched."""
SOCKET = "lazy-pages.socket"

_PAGE = mmap.PAGESIZE
_FINISHED = 0x52535446
_FAULT, _FORK, _REMAP, _REMOVE, _UNMAP = range(0x12, 0x17)
_COPY, _ZERO, _WAKE = 0xC028AA03, 0xC020AA04, 0x8010AA02
_MESSAGE = 32
_NOWHERE = 1 << 16
"""The lowest address that a process can have a mapping at, and has none."""
_TRIAL = struct.pack("=QQQq", _NOWHERE, _PAGE, 0, 0)
"""A request that changes nothing."""
_SWEEP = 64
"""Number of processes at which it is looked for ended ones first."""
_PARENT, _LAZY, _PRESENT = 1, 2, 4  # flags of an entry in a map of pages
_NUMBER, _ADDRESS, _OLD_COUNT, _IN_PARENT, _FLAGS, _COUNT = 1, 1, 2, 3, 4, 5  # fields of its messages

Range = tuple[int, int, int]
"""Start and end of a piece of memory, and where it begins in the image."""


class Changing(Exception):
    """Reports of the kernel must be read before anything can be copied."""


class Ended(Exception):
    """The process has ended, or executed another program."""


def ranges_of(images: str, pid: int) -> tuple[int, list[Range]]:
    """The map of a process's pages: the number of the file they are in, and those that are brought when touched.

    Args:
        images: directory of CRIU's images.
        pid: of the process, as it was captured.

    Raises:
        ValueError: some of the pages are in other images.
    """
    with open(f"{images}/pagemap-{pid}.img", "rb") as file:
        data = file.read()
    messages, at = [], 8
    while at < len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        messages.append(_numbers(data[at + 4 : end]))
        at = end
    found: list[Range] = []
    offset = 0
    for entry in messages[1:]:
        flags, start = entry.get(_FLAGS, _PRESENT), entry[_ADDRESS]
        size = entry.get(_COUNT, entry.get(_OLD_COUNT, 0)) * _PAGE
        if flags & _PARENT or entry.get(_IN_PARENT):
            raise ValueError(f"expected all pages of process {pid} in {images}, found some that are elsewhere")
        if flags & _PRESENT:
            if flags & _LAZY:
                found.append((start, start + size, offset))
            offset += size
    return messages[0][_NUMBER], sorted(found)


def _numbers(message: bytes) -> dict[int, int]:
    """Fields of a message that has numbers only."""
    fields, values = dict[int, int](), list[int]()
    value = shift = 0
    for byte in message:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            values.append(value)
            value = shift = 0
    for key, number in zip(values[::2], values[1::2], strict=True):
        fields[key >> 3] = number
    return fields


class Supposed:
    """Pieces of memory that seem to have gone from where they are.

    Args:
        pieces: which.
        place: start and end of what was moved away with them; None if it was unmapped.
    """

    def __init__(self, pieces: list[Range], place: tuple[int, int] | None) -> None:
        self.pieces = pieces
        self.place = place

    def outside(self, low: int, high: int) -> Supposed:
        """Copy without what lies between two addresses."""
        return Supposed(_outside(self.pieces, low, high), self.place)


class ProcessMemory:
    """Memory of one process, as far as it is not there yet.

    Args:
        descriptor: its userfaultfd.
        ranges: that are to be brought.
        source: address of the image in this process.
    """

    def __init__(self, descriptor: int, ranges: list[Range], source: int) -> None:
        self.descriptor = descriptor
        self.ranges = ranges
        self.left = sum(end - start for start, end, _ in ranges)
        """Bytes that are not there yet."""
        self.source = source
        self.waiting: list[int] = []
        """Addresses of touched pages."""
        self._size = FIRST
        # Threads report what they did when they get to it, which may be in another order. Until no report is missing:
        self._left: list[tuple[int, int]] = []
        """Old places of what was moved: the kernel reports them as unmapped as well."""
        self._arrived: list[tuple[int, int]] = []
        """Places that something was moved to."""
        self._aside: list[Range] = []
        """Contents of those places from before: they had been moved or unmapped, but that is not reported yet."""
        self._perhaps: list[Supposed] = []
        """Pieces that arrived there and are reported as gone; the report may be of those before them."""

    def read(self) -> list[ProcessMemory]:
        """Read what the kernel reports; returns the memory of processes that were forked."""
        try:
            data = os.read(self.descriptor, 64 * _MESSAGE)
        except BlockingIOError:
            return []
        forked = []
        for at in range(0, len(data), _MESSAGE):
            event, first, second, third = struct.unpack_from("=BxxxxxxxQQQ", data, at)
            if event == _FAULT:
                self.waiting.append(second - second % _PAGE)
            elif event == _FORK:
                child = ProcessMemory(first & 0xFFFFFFFF, list(self.ranges), self.source)
                child._perhaps = [Supposed(one.pieces, one.place) for one in self._perhaps]
                forked.append(child)
            elif event == _UNMAP and (first, second) in self._left:
                self._left.remove((first, second))  # what is there now was moved there since
                for one in self._perhaps:
                    one.place = None if one.place == (first, second) else one.place
            elif event == _REMOVE:
                self._give_up(first, second)
            elif event == _UNMAP:
                self._take(first, second)
            elif event == _REMAP:
                self._moved(first, second, third)
        return forked

    def _give_up(self, low: int, high: int) -> None:
        """Forget the addresses of memory that the process gives up, so that nothing is brought there."""
        self._cut(low, high)
        self._perhaps = [one.outside(low, high) for one in self._perhaps]

    def _moved(self, old: int, new: int, size: int) -> None:
        """Note that the memory between ``old`` and ``old + size`` was moved to ``new``."""
        moved = self._take(old, old + size, place=(old, old + size))
        self._perhaps = [one.outside(new, new + size) for one in self._perhaps]
        self._aside += self._cut(new, new + size)
        self._put([(low - old + new, high - old + new, at) for low, high, at in moved])
        self._left.append((old, old + size))
        self._arrived.append((new, new + size))

    def _take(self, low: int, high: int, *, place: tuple[int, int] | None = None) -> list[Range]:
        """Remove what was between two addresses when a thread did what it reports, as far as is known; returns it."""
        self._perhaps = [one.outside(low, high) for one in self._perhaps]
        if taken := [one for one in self._aside if low <= one[0] < high]:
            self._aside = [one for one in self._aside if one not in taken]
            return taken + self._cut_old(low, high)
        for start, end in self._arrived:
            start, end = max(start, low), min(end, high)
            if start < end and (pieces := self._cut(start, end)):
                self._perhaps.append(Supposed(pieces, place))
                taken += pieces
        return taken + self._cut(low, high)

    def _put(self, pieces: list[Range]) -> None:
        """Add ranges."""
        self.ranges = sorted([*self.ranges, *pieces])
        self.left += sum(high - low for low, high, _ in pieces)

    def _restore(self, pieces: list[Range]) -> None:
        """Put back what was supposed to have gone, wherever it is now."""
        for low, high, at in pieces:
            for start, end, offset in [one for one in self.ranges if max(one[2], at) < min(_end(one), at + high - low)]:
                self._cut(max(start, start + at - offset), min(end, start + at - offset + high - low))
        self._put(pieces)

    def _cut_old(self, low: int, high: int) -> list[Range]:
        """Remove what lies between two addresses, but nothing where something has arrived; returns it."""
        cut, at = list[Range](), low
        for start, end in sorted(self._arrived):
            if start < high and end > at:
                cut += self._cut(at, max(start, at))
                at = end
        return cut + self._cut(at, max(at, high))

    def _settle(self) -> None:
        """Find out from the kernel what has not gone as it seemed: one page of it is brought, or refused."""
        if self._perhaps:
            self._ask(_ZERO, _TRIAL)  # no report is missing
        while self._perhaps:
            pieces, place = self._perhaps[-1].pieces, self._perhaps[-1].place
            if pieces and place is None:  # else its old place stays mapped, as no report says otherwise
                start, _, offset = pieces[0]
                code, _ = self._ask(_COPY, struct.pack("=QQQQq", start, self.source + offset, _PAGE, 0, 0))
                if code == errno.ENOENT:
                    self._ask(_ZERO, _TRIAL)  # see `_copy`
                else:
                    self._restore(pieces)
                    self._cut(start, start + _PAGE)
            self._perhaps.pop()

    def bring_waiting(self) -> None:
        """Bring the touched pages, each with its surroundings.

        Raises:
            Changing: `read` first.
            Ended: there is nobody to bring them to.
        """
        self._settle()
        while self.waiting:
            address = self.waiting[-1]
            index = bisect.bisect_right(self.ranges, address, key=lambda one: one[0]) - 1
            if index >= 0 and address < self.ranges[index][1]:
                start, end, _ = self.ranges[index]
                low = max(start, address - address % self._size)
                self._copy(low, min(end, low + self._size), address)
                self._size = min(2 * self._size, MOST)
            else:
                self._ask(_ZERO, struct.pack("=QQQq", address, _PAGE, 0, 0))
                self._ask(_WAKE, struct.pack("=QQ", address, _PAGE))
            self.waiting.pop()

    def bring_more(self) -> None:
        """Bring the next pages that nobody has touched.

        Raises:
            Changing: `read` first.
            Ended: there is nobody to bring them to.
        """
        start, end, _ = self.ranges[0]
        self._copy(start, min(end, start + MOST), start)

    def is_whole(self) -> bool:
        """True if all is there, and no report can bring back what seemed to have gone."""
        return not (self.ranges or self.waiting or self._perhaps or self._aside)

    def ended(self) -> bool:
        """True if the process has ended, or executed another program: the kernel does not report that."""
        try:
            self._ask(_ZERO, _TRIAL)
        except Ended:
            return True
        except Changing:
            pass
        return False

    def _copy(self, low: int, high: int, wanted: int) -> None:
        """Bring the pages of a part of one range, of which one may be waited for."""
        while low < high:
            index = bisect.bisect_right(self.ranges, low, key=lambda one: one[0]) - 1
            start, _, offset = self.ranges[index]
            code, done = self._ask(
                _COPY, struct.pack("=QQQQq", low, self.source + offset + low - start, high - low, 0, 0)
            )
            if code == errno.ENOENT:  # perhaps it was moved meanwhile: that is refused only from the next request on
                self._ask(_ZERO, _TRIAL)
            if done <= 0 and code in (errno.ENOENT, errno.EINVAL) and high - low > _PAGE:
                # It reaches beyond a mapping: the page that is waited for must come, the others one by one.
                for page in range(low, high, _PAGE):
                    self._copy(page, page + _PAGE, wanted)
                return
            done = max(done, _PAGE)  # else it is there already, or no longer mapped
            self._cut(low, low + done)
            low += done
        self._ask(_WAKE, struct.pack("=QQ", wanted, _PAGE))

    def _ask(self, request: int, content: bytes) -> tuple[int, int]:
        """Ask the kernel; returns its error number and the last number of the answer."""
        answer = bytearray(content)
        code = 0
        try:
            fcntl.ioctl(self.descriptor, request, answer, True)
        except OSError as error:
            code = error.errno or errno.EIO
        done = int.from_bytes(answer[-8:], "little", signed=True)
        if code == errno.EAGAIN and done <= 0:
            raise Changing
        self._left, self._arrived, self._aside = [], [], []  # no report is missing
        if code == errno.ESRCH:
            raise Ended
        if code not in (0, errno.EAGAIN, errno.EEXIST, errno.ENOENT, errno.EINVAL):
            raise OSError(code, os.strerror(code))
        return code, done

    def _cut(self, low: int, high: int) -> list[Range]:
        """Remove what lies between two addresses from the ranges; returns it."""
        kept, cut = list[Range](), list[Range]()
        first = max(bisect.bisect_right(self.ranges, low, key=lambda one: one[0]) - 1, 0)
        last = bisect.bisect_left(self.ranges, high, key=lambda one: one[0])
        for start, end, offset in self.ranges[first:last]:
            a, b = max(start, low), min(end, high)
            if a >= b:
                kept.append((start, end, offset))
                continue
            cut.append((a, b, offset + a - start))
            kept += _outside([(start, end, offset)], low, high)
        self.ranges[first:last] = kept
        self.left -= sum(end - start for start, end, _ in cut)
        return cut


def _end(one: Range) -> int:
    """Position in the image at which a range ends."""
    return one[2] + one[1] - one[0]


def _outside(pieces: list[Range], low: int, high: int) -> list[Range]:
    """List the parts of ranges that are not between two addresses."""
    before = [(start, min(end, low), at) for start, end, at in pieces if start < low]
    return before + [(max(start, high), end, at + max(start, high) - start) for start, end, at in pieces if end > high]


class MemoryServer:
    """Server of the memory of all processes that one CRIU restores.

    Args:
        images: directory of CRIU's images.
        work: working directory of CRIU, where it looks for the socket.
    """

    def __init__(self, images: str, work: str) -> None:
        self.images = images
        self.complete = False
        """True to bring all that is left."""
        self._listening = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        os.chdir(work)  # for paths of sockets are short
        self._listening.bind(SOCKET)
        self._listening.listen(1)
        self._criu: _socket.socket | None = None
        self._restored = False
        self._memories: dict[int, ProcessMemory] = {}
        self._sweep = _SWEEP
        self._sources: dict[int, tuple[mmap.mmap, int]] = {}

    def serve(self, control: int, *ends: int) -> bool:
        """Serve until all memory is there, or something ends.

        Args:
            control: a byte from it asks for all that is left.
            ends: descriptors that become readable when nobody needs the memory any more.

        Returns:
            True if all memory is there.
        """
        poll = select.poll()
        for descriptor in (control, self._listening.fileno(), *ends):
            poll.register(descriptor, select.POLLIN)
        again = False
        while not (self._restored and not self._memories):
            events = poll.poll(0 if again else None)
            again = False
            for descriptor, _ in events:
                if descriptor in ends:
                    return False
                if descriptor == control:
                    os.read(control, 1)
                    self.complete = True
                    poll.unregister(control)
                elif descriptor == self._listening.fileno():
                    connection, _ = self._listening._accept()  # type: ignore[attr-defined]
                    self._criu = _socket.socket(fileno=connection)
                    poll.register(connection, select.POLLIN)
                elif self._criu is not None and descriptor == self._criu.fileno():
                    if not self._hear(poll):
                        poll.unregister(descriptor)
                elif descriptor in self._memories:
                    for forked in self._memories[descriptor].read():
                        self._memories[forked.descriptor] = forked
                        poll.register(forked.descriptor, select.POLLIN)
            for descriptor, memory in list(self._memories.items()):
                try:
                    memory.bring_waiting()
                    if memory.ranges and self._restored and (self.complete or memory.left <= SMALL):
                        memory.bring_more()
                        again = True
                except Changing:
                    again = True
                except Ended:
                    self._forget(descriptor, poll)
                    continue
                if self._restored and memory.is_whole():
                    self._forget(descriptor, poll)  # from now on the kernel itself brings zeros
            if len(self._memories) > self._sweep:
                for descriptor in [number for number, memory in self._memories.items() if memory.ended()]:
                    self._forget(descriptor, poll)
                self._sweep = 2 * len(self._memories) + _SWEEP
        return True

    def _forget(self, descriptor: int, poll: select.poll) -> None:
        poll.unregister(descriptor)
        os.close(descriptor)
        del self._memories[descriptor]

    def _hear(self, poll: select.poll) -> bool:
        """Hear CRIU tell of a process, or that all are restored; False if it will tell no more."""
        assert self._criu is not None
        data = self._criu.recv(4, _socket.MSG_WAITALL)
        if len(data) < 4:
            return False
        (pid,) = struct.unpack("=i", data)
        if pid == _FINISHED:
            self._restored = True
            return False
        if pid > 0:  # else it is a process that has ended
            _, extra, _, _ = self._criu.recvmsg(1, _socket.CMSG_SPACE(4))
            (descriptor,) = struct.unpack("=i", extra[0][2][:4])
            number, ranges = ranges_of(self.images, pid)
            self._memories[descriptor] = ProcessMemory(descriptor, ranges, self._source(number))
            poll.register(descriptor, select.POLLIN)
        return True

    def _source(self, number: int) -> int:
        """Address of an image of pages; private, for the kernel hands out only memory that could be written to."""
        if number not in self._sources:
            with open(f"{self.images}/pages-{number}.img", "rb") as file:
                if not os.fstat(file.fileno()).st_size:
                    return 0
                mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
            self._sources[number] = mapped, ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        return self._sources[number][1]
