"""A file over HTTP: received parts are kept, and an incomplete file is never taken for a complete one."""

from __future__ import annotations

import random

import pytest

from sandboxgym.cli.support.transfer import TransferError, fetch

CONTENT = random.Random(0).randbytes(300_000)


@pytest.fixture
def get(quiet):
    def call(server, part, **options):
        fetch(f"{server.url}/file.bin", part, progress=quiet, pause=lambda seconds: None, **options)
        return quiet

    return call


@pytest.fixture
def part(tmp_path, server):
    server.content["file.bin"] = CONTENT
    return tmp_path / "file.bin.part"


def test_a_file_arrives_whole(get, server, part):
    seen = get(server, part)
    assert part.read_bytes() == CONTENT
    assert seen.begun == [(0, len(CONTENT))] and seen.arrived == len(CONTENT)


def test_cut_connections_are_taken_up_where_they_were_cut(get, server, part):
    server.cut_after = [100_000, 50_000, 0, 20_000]
    get(server, part)
    assert part.read_bytes() == CONTENT
    assert server.asked == [None, "bytes=100000-", "bytes=150000-", "bytes=150000-", "bytes=170000-"]
    assert server.sent == len(CONTENT)


def test_attempts_that_bring_something_are_not_counted(get, server, part):
    server.cut_after = [30_000] * 8
    get(server, part, attempts=2)
    assert part.read_bytes() == CONTENT and server.sent == len(CONTENT)


def test_a_later_call_goes_on_with_the_part(get, server, part):
    server.cut_after = [100_000, 0, 0]
    with pytest.raises(TransferError, match="2 attempts"):
        get(server, part, attempts=2)
    assert part.stat().st_size == 100_000
    get(server, part)
    assert part.read_bytes() == CONTENT and server.sent == len(CONTENT)


def test_a_server_without_ranges_is_read_from_the_start(get, server, part):
    server.ranges, server.cut_after = False, [100_000]
    get(server, part)
    assert part.read_bytes() == CONTENT


@pytest.mark.parametrize(("tags", "new"), [(True, b"new" + CONTENT), (True, CONTENT[::-1]), (False, b"new" + CONTENT)])
def test_a_file_that_changed_at_the_source_is_not_joined_to_the_old_part(get, server, part, tags, new):
    server.tags = tags
    server.cut_after = [100_000, 0]
    with pytest.raises(TransferError):
        get(server, part, attempts=1)
    server.cut_after = []
    server.content["file.bin"] = new
    get(server, part)
    assert part.read_bytes() == new


def test_a_part_of_another_address_is_not_continued(get, server, part):
    part.write_bytes(b"something else")
    get(server, part)
    assert part.read_bytes() == CONTENT


def test_a_complete_part_is_not_fetched_again(get, server, part):
    get(server, part)
    get(server, part)
    assert part.read_bytes() == CONTENT and server.sent == len(CONTENT)


def test_an_overloaded_server_is_asked_again_and_a_refusal_is_final(get, server, part):
    server.failures = [503, 429]
    get(server, part)
    assert part.read_bytes() == CONTENT
    server.failures = [403]
    with pytest.raises(TransferError, match="HTTP 403"):
        get(server, part.with_name("other.part"))
    assert len(server.asked) == 4


def test_a_web_page_is_not_taken_for_the_file(get, server, part):
    server.media = "text/html"
    with pytest.raises(TransferError, match="web page"):
        get(server, part)


def test_no_room_is_found_out_before_anything_is_written(get, server, part):
    def no_room(nbytes):
        raise TransferError(f"no room for {nbytes}")

    with pytest.raises(TransferError, match=f"no room for {len(CONTENT)}"):
        get(server, part, check_room=no_room)
    assert part.stat().st_size == 0


def test_nobody_answering_is_said_with_the_address(quiet, part):
    with pytest.raises(TransferError, match=r"http://127.0.0.1:9/file.bin: .*2 attempts"):
        fetch("http://127.0.0.1:9/file.bin", part, progress=quiet, attempts=2, pause=lambda seconds: None)


def test_a_machine_without_a_network_is_told_at_once(quiet, part):
    pauses = []
    with pytest.raises(TransferError, match="cannot be resolved; is this machine online"):
        fetch("http://no-such-host.invalid/file.bin", part, progress=quiet, pause=pauses.append)
    assert pauses == []
