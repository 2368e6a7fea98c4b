"""Messages of envd in both encodings, against the library's own, and bytes that are no messages."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandboxgym.e2b.messages import ENUMS, MESSAGES, BadMessage, decode, encode, format_time

_SCALARS = {
    "string": st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    "bytes": st.binary(max_size=20).map(lambda data: base64.b64encode(data).decode()),
    "uint32": st.integers(0, 2**32 - 1),
    "sint32": st.integers(-(2**31), 2**31 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1).map(str),
    "bool": st.booleans(),
    "map": st.dictionaries(st.text("abc=", max_size=3), st.text("xyz é", max_size=5), max_size=3),
}


def messages(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    @st.composite
    def build(draw: st.DrawFn) -> dict[str, Any]:
        made: dict[str, Any] = {}
        unions: set[str] = set()
        for field in MESSAGES[kind]:
            if field.union in unions or field.kind == "time" or draw(st.booleans()):
                continue
            value = _value(field.kind)
            made[field.name] = draw(st.lists(value, min_size=1, max_size=3) if field.many else value)
            if field.kind == "map" and not made[field.name]:
                del made[field.name]  # as good as absent
            unions |= {field.union} - {""}
        return made

    return build()


def _value(kind: str) -> st.SearchStrategy[Any]:
    if kind in ENUMS:
        return st.sampled_from(sorted(ENUMS[kind]))
    return _SCALARS[kind] if kind in _SCALARS else messages(kind)


@pytest.mark.parametrize("kind", sorted(MESSAGES))
@pytest.mark.parametrize("binary", [False, True])
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_what_was_written_is_read_again(kind: str, binary: bool, data: st.DataObject) -> None:
    message = data.draw(messages(kind))
    assert decode(kind, encode(kind, message, binary=binary), binary=binary) == message


@pytest.mark.parametrize("binary", [False, True])
def test_the_library_reads_what_is_written_here_and_the_other_way_round(binary: bool) -> None:
    process_pb = pytest.importorskip("e2b.envd.process.process_pb")
    filesystem_pb = pytest.importorskip("e2b.envd.filesystem.filesystem_pb")

    def theirs(kind: Any, data: bytes) -> Any:
        return kind.from_binary(data) if binary else kind.from_json(data)

    event = {"event": {"end": {"exitCode": -3, "exited": True, "status": "s", "error": "é"}}}
    read = theirs(process_pb.StartResponse, encode("StartResponse", event, binary=binary))
    assert (read.event.event.value.exit_code, read.event.event.value.error) == (-3, "é")
    config = process_pb.ProcessConfig(cmd="/bin/bash", args=["-l", "-c", "x"], envs={"A": "b"}, cwd="/")
    request = process_pb.StartRequest(process=config, stdin=False)
    data = request.to_binary() if binary else request.to_json().encode()
    found = decode("StartRequest", data, binary=binary)
    assert found["process"] == {"cmd": "/bin/bash", "args": ["-l", "-c", "x"], "envs": {"A": "b"}, "cwd": "/"}
    assert found["stdin"] is False
    entry = {"name": "n", "type": "FILE_TYPE_FILE", "path": "/n", "size": "5", "modifiedTime": format_time(1.5)}
    stat = theirs(filesystem_pb.StatResponse, encode("EntryResponse", {"entry": entry}, binary=binary)).entry
    assert (stat.name, stat.size, stat.modified_time.seconds, stat.modified_time.nanos) == ("n", 5, 1, 500_000_000)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(MESSAGES)), st.binary(max_size=60), st.booleans())
def test_bytes_are_a_message_or_a_bad_message(kind: str, data: bytes, binary: bool) -> None:
    try:
        message = decode(kind, data, binary=binary)
    except BadMessage as error:
        assert str(error)
    else:
        assert set(message) <= {field.name for field in MESSAGES[kind]}


@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        ("StartRequest", [], "StartRequest: expected an object"),
        ("StartRequest", {"stdin": "yes"}, "StartRequest.stdin: expected a value of type bool"),
        ("StartRequest", {"process": {"args": "x"}}, "ProcessConfig.args: expected a list"),
        ("StartRequest", {"process": {"envs": {"A": 1}}}, "ProcessConfig.envs: expected a value of type map"),
        ("StartRequest", {"process": {"cmd": "\ud800"}}, "ProcessConfig.cmd: expected a value of type string"),
        ("ProcessSelector", {"pid": 1, "tag": "x"}, "expected one of the fields of selector"),
        ("ProcessSelector", {"pid": -1}, "ProcessSelector.pid: expected a value of type uint32"),
        ("SendSignalRequest", {"signal": "SIGNAL_SIGFOO"}, "SendSignalRequest.signal"),
        ("ProcessInput", {"stdin": "not base64!"}, "ProcessInput.stdin: expected a value of type bytes"),
    ],
)
def test_a_field_of_another_type_is_named(kind: str, value: Any, says: str) -> None:
    with pytest.raises(BadMessage, match=says.replace(".", r"\.")):
        decode(kind, json.dumps(value).encode(), binary=False)


def test_unknown_fields_are_dropped_and_both_spellings_are_read() -> None:
    data = json.dumps({"path": "/", "include_entry": True, "later": [1]}).encode()
    assert decode("WatchRequest", data, binary=False) == {"path": "/", "includeEntry": True}
    assert decode("PathRequest", b"\x0a\x01/\xfa\x07\x01x", binary=True) == {"path": "/"}


def test_deeply_nested_json_is_refused() -> None:
    with pytest.raises(BadMessage):
        decode("StartRequest", b"[" * 100_000, binary=False)
