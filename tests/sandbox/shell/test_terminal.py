"""Output of terminals as bounded plain text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxgym.sandbox.shell.terminal import Capture, plain_text


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        (b"\x1b[1;31mred\x1b[0m \x1b[?2004hplain\x1b[?2004l", "red plain"),
        (b"\x1b]0;a title\x07text \x1b]8;;http://a\x1b\\link\x1b]8;;\x1b\\", "text link"),
        (b"\x1b(Bcharset\x1b=\x1b>", "charset"),
        (b"a\r\nb\r\n", "a\nb\n"),
        (b" 10%\r 50%\r100%\ndone\n", "100%\ndone\n"),
        (b"a long line\rshort", "shortg line"),
        (b"a long line\r\x1b[Kshort", "short"),
        (b"match \x1b[01;31m\x1b[Kword\x1b[m\x1b[K rest", "match word rest"),
        (b"spin|\b/\b-\b\\", "spin\\"),
        (b"caf\xc3\xa9 \xff\xfe", "café \\xff\\xfe"),
        (b"", ""),
    ],
)
def test_the_lines_as_they_stand_in_the_end(printed: bytes, shown: str) -> None:
    assert plain_text(printed) == shown


@given(st.text(alphabet=st.characters(exclude_characters="\r\x08\x1b", exclude_categories=["Cs"])))
def test_plain_text_stays_as_it_is(text: str) -> None:
    assert plain_text(text.encode()) == text


@given(
    st.binary(max_size=50).filter(lambda data: b"<" not in data and b">" not in data),
    st.integers(1, 7),
    st.booleans(),
)
def test_only_what_is_between_the_marks_in_whichever_pieces(data: bytes, size: int, drain: bool) -> None:
    capture = Capture(1000, begin=b"<<a", end=b"b>>")
    stream = b"noise<<<a" + data + b"b>>noise b>>"
    kept = b""
    for at in range(0, len(stream), size):
        capture.feed(stream[at : at + size])
        if drain:
            kept += capture.drain()[0]
    assert capture.complete
    assert kept + capture.drain()[0] == data


@given(st.binary(min_size=1, max_size=300), st.integers(2, 400), st.integers(1, 50))
def test_the_first_and_the_last_half_are_kept_and_the_rest_counted(data: bytes, limit: int, size: int) -> None:
    capture = Capture(limit)
    for at in range(0, len(data), size):
        capture.feed(data[at : at + size])
    kept, elided = capture.drain()
    half = limit // 2
    if len(data) <= 2 * half:
        assert (kept, elided) == (data, 0)
    else:
        assert elided == len(data) - 2 * half
        assert kept == data[:half] + b"\n[... %d bytes elided ...]\n" % elided + data[-half:]


def test_memory_stays_bounded() -> None:
    capture = Capture(1000, end=b"never")
    for _ in range(2000):
        capture.feed(b"x" * 4096)
    assert len(capture._tail) + len(capture._head) < 100_000
    assert capture.drain()[1] == 2000 * 4096 - 1000
