"""Terminal output of a program as bounded plain text, in time that grows with its length, whatever it is."""

from __future__ import annotations

import re

# CSI, OSC and other string sequences, character sets, and the rest of two bytes; `[K` is needed for `_line`.
_CSI, _STRING, _SHORT = r"\[[0-?]*[ -/]*(?P<final>[@-~])", r"[\]PX^_].*?(?:\x07|\x1b\\)", r"[ -/]+[0-~]|[0-Z\\^-~]"
_ESCAPE = re.compile(rf"\x1b(?:{_CSI}|{_STRING}|{_SHORT})", re.DOTALL)
_STRINGLESS = re.compile(rf"\x1b(?:{_CSI}|{_SHORT})")
_ENDS = ("\x07", "\x1b\\")
_ERASE = "\x1bK"
_MOVING = re.compile(f"[\r\x08]|{_ERASE}")


class Capture:
    """The first and the last half of a stream of bytes; the middle is counted and dropped.

    Args:
        limit: bytes that are kept.
        begin: mark before the stream; everything before it is dropped. Empty if it begins at once.
        end: mark after the stream; everything after it is dropped. Empty if it has no end.
        raw: bytes of its beginning that are kept beside these halves.
    """

    def __init__(self, limit: int, *, begin: bytes = b"", end: bytes = b"", raw: int = 0) -> None:
        self._half = max(limit // 2, 1)
        self._raw = raw
        self._begin, self._end = begin, end
        self.begun = not begin
        """True if ``begin`` was seen."""
        self._carry = b""
        self._head, self._tail = bytearray(), bytearray()
        self.beginning = bytearray()
        """The first ``raw`` bytes."""
        self.elided = 0
        """Bytes dropped from the middle so far."""
        self.complete = False
        """True if ``end`` was seen."""

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the program's output."""
        if self.complete:
            return
        data = self._carry + chunk if self._carry else chunk
        if not self.begun:
            at = data.find(self._begin)
            if at < 0:
                self._carry = data[-(len(self._begin) - 1) :]
                return
            self.begun, data = True, data[at + len(self._begin) :]
        if self._end:
            at = data.find(self._end)
            self.complete = at >= 0
            cut = at if self.complete else max(len(data) - len(self._end) + 1, 0)
            data, self._carry = data[:cut], b"" if self.complete else data[cut:]
        else:
            self._carry = b""
        self._keep(data)

    def drain(self) -> tuple[bytes, int]:
        """Kept bytes not yet taken, with a line in place of the dropped ones, and the number of these."""
        if self.begun and not self.complete:
            # An end mark may be on its way in pieces: what could be its beginning stays.
            for length in range(len(self._carry), 0, -1):
                if self._end.startswith(self._carry[-length:]):
                    break
            else:
                length = 0
            cut = len(self._carry) - length
            self._keep(self._carry[:cut])
            self._carry = self._carry[cut:]
        # Half of the limit is not a limit for what is short enough in all.
        excess = max(len(self._tail) - self._half, 0)
        elided = self.elided + excess
        middle = b"\n[... %d bytes elided ...]\n" % elided if elided else b""
        kept = bytes(self._head) + middle + bytes(self._tail[excess:])
        self._head, self._tail, self.elided = bytearray(), bytearray(), 0
        return kept, elided

    def _keep(self, data: bytes) -> None:
        if len(self.beginning) < self._raw:
            self.beginning += data[: self._raw - len(self.beginning)]
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data
            if len(self._tail) > 4 * self._half + (1 << 16):  # not at every chunk: it moves the whole tail
                excess = len(self._tail) - self._half
                self.elided += excess
                del self._tail[:excess]


def decode(data: bytes) -> str:
    """Decode UTF-8, with backslash escapes for other bytes."""
    return data.decode("utf-8", "backslashreplace")


def encode(text: str) -> bytes:
    """Encode as UTF-8; the surrogates of `os.fsdecode` become their original bytes, others stay."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def plain_text(data: bytes) -> str:
    """Lines as a terminal finally shows them: no escape sequences, progress bars in their last state."""
    text = decode(data).replace("\r\n", "\n")
    if "\x1b" in text:
        # After the last end of a string sequence none is looked for: each beginning would look through all the rest.
        last = max((at + len(end) for end in _ENDS if (at := text.rfind(end)) >= 0), default=0)
        text = _ESCAPE.sub(_erasing, text[:last]) + _STRINGLESS.sub(_erasing, text[last:])
    if "\r" in text or "\x08" in text or _ERASE in text:
        text = "\n".join(
            _line(line) if "\r" in line or "\x08" in line or _ERASE in line else line for line in text.split("\n")
        )
    return text


def _erasing(match: re.Match[str]) -> str:
    return _ERASE if match["final"] == "K" else ""


def _line(line: str) -> str:
    """One line with carriage returns, backspaces and erasures applied."""
    shown: list[str] = []
    length = 0
    for part in reversed(line.split("\r")):  # each shows only where those after it end
        written = _without_backspaces(part) if "\x08" in part else part
        kept = written.replace(_ERASE, "")
        if len(kept) > length:
            shown.append(kept[length:])
            length = len(kept)
        if _ERASE in written:  # which leaves nothing of those before
            break
    return "".join(shown)


def _without_backspaces(part: str) -> str:
    """Text in which each backspace removes the character before it."""
    first, *others = part.split("\x08")
    kept = list(first)
    for text in others:
        if kept:
            kept.pop()
        kept += text
    return "".join(kept)
