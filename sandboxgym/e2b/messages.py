"""Messages of envd, the daemon of E2B's sandboxes: their fields, checked, as JSON and as protobuf.

1. A message is a dictionary in the JSON mapping of Protocol Buffers: names in lowerCamelCase, bytes in base64, 64-bit
   integers as strings, enumeration values by name. Both encodings are read into it and written from it.
2. What is read is checked against `MESSAGES`: the type of every field, at most one field of a union. Unknown fields are
   dropped, as the protocol demands, so that newer clients can be served.
3. Nothing that is read can take more memory than a constant times its bytes, or more stack than messages nest.
"""

from __future__ import annotations

import base64
import binascii
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sandboxgym.brief import brief

Message = dict[str, Any]


class BadMessage(ValueError):
    """The bytes are no such message; the text says what was expected and found."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a message."""

    number: int
    name: str
    """In JSON; with underscores it is accepted too."""
    kind: str
    """A scalar type, ``time`` (a timestamp), ``map`` (of strings), or the name of a message or of an enumeration."""
    many: bool = False
    union: str = ""
    """Name of the union it is a member of."""


ENUMS: dict[str, dict[str, int]] = {
    "Signal": {"SIGNAL_UNSPECIFIED": 0, "SIGNAL_SIGTERM": 15, "SIGNAL_SIGKILL": 9},
    "FileType": {"FILE_TYPE_UNSPECIFIED": 0, "FILE_TYPE_FILE": 1, "FILE_TYPE_DIRECTORY": 2, "FILE_TYPE_SYMLINK": 3},
    "EventType": {
        "EVENT_TYPE_UNSPECIFIED": 0,
        "EVENT_TYPE_CREATE": 1,
        "EVENT_TYPE_WRITE": 2,
        "EVENT_TYPE_REMOVE": 3,
        "EVENT_TYPE_RENAME": 4,
        "EVENT_TYPE_CHMOD": 5,
    },
}


def _fields(*rows: str) -> tuple[Field, ...]:
    """Fields from rows of ``NUMBER NAME KIND [many|UNION]``."""
    made = []
    for row in rows:
        number, name, kind, *rest = row.split()
        made.append(Field(int(number), name, kind, many=rest == ["many"], union="".join(rest).replace("many", "")))
    return tuple(made)


_PATH = _fields("1 path string")
_ENTRY = _fields("1 entry EntryInfo")
_WATCH = _fields("1 path string", "2 recursive bool", "3 includeEntry bool", "4 allowNetworkMounts bool")
_PROCESS = _fields("1 process ProcessSelector")
MESSAGES: dict[str, tuple[Field, ...]] = {
    "Empty": (),
    "Size": _fields("1 cols uint32", "2 rows uint32"),
    "PTY": _fields("1 size Size"),
    "ProcessConfig": _fields("1 cmd string", "2 args string many", "3 envs map", "4 cwd string"),
    "ProcessInfo": _fields("1 config ProcessConfig", "2 pid uint32", "3 tag string"),
    "ProcessSelector": _fields("1 pid uint32 selector", "2 tag string selector"),
    "ListResponse": _fields("1 processes ProcessInfo many"),
    "StartRequest": _fields("1 process ProcessConfig", "2 pty PTY", "3 tag string", "4 stdin bool"),
    "UpdateRequest": _fields("1 process ProcessSelector", "2 pty PTY"),
    "StartEvent": _fields("1 pid uint32"),
    "DataEvent": _fields("1 stdout bytes output", "2 stderr bytes output", "3 pty bytes output"),
    "EndEvent": _fields("1 exitCode sint32", "2 exited bool", "3 status string", "4 error string"),
    "ProcessEvent": _fields(
        "1 start StartEvent event", "2 data DataEvent event", "3 end EndEvent event", "4 keepalive Empty event"
    ),
    "StartResponse": _fields("1 event ProcessEvent"),
    "ConnectRequest": _PROCESS,
    "ProcessInput": _fields("1 stdin bytes input", "2 pty bytes input"),
    "SendInputRequest": _fields("1 process ProcessSelector", "2 input ProcessInput"),
    "InputStart": _PROCESS,
    "InputData": _fields("2 input ProcessInput"),
    "StreamInputRequest": _fields("1 start InputStart event", "2 data InputData event", "3 keepalive Empty event"),
    "SendSignalRequest": _fields("1 process ProcessSelector", "2 signal Signal"),
    "CloseStdinRequest": _PROCESS,
    "MoveRequest": _fields("1 source string", "2 destination string"),
    "PathRequest": _PATH,
    "EntryResponse": _ENTRY,
    "EntryInfo": _fields(
        "1 name string",
        "2 type FileType",
        "3 path string",
        "4 size int64",
        "5 mode uint32",
        "6 permissions string",
        "7 owner string",
        "8 group string",
        "9 modifiedTime time",
        "10 symlinkTarget string",
    ),
    "ListDirRequest": _fields("1 path string", "2 depth uint32"),
    "ListDirResponse": _fields("1 entries EntryInfo many"),
    "WatchRequest": _WATCH,
    "FilesystemEvent": _fields("1 name string", "2 type EventType"),
    "WatchDirResponse": _fields("1 start Empty event", "2 filesystem FilesystemEvent event", "3 keepalive Empty event"),
    "WatcherRequest": _fields("1 watcherId string"),
    "WatcherResponse": _fields("1 watcherId string"),
    "WatcherEvents": _fields("1 events FilesystemEvent many"),
}
_BOUNDS = {"uint32": (0, 2**32 - 1), "sint32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1)}
_WIRES = {"string": 2, "bytes": 2, "map": 2, "time": 2}
_MAP = _fields("1 key string", "2 value string")


def decode(kind: str, data: bytes, *, binary: bool) -> Message:
    """Read a message.

    Args:
        kind: name of it in `MESSAGES`.
        data: its bytes.
        binary: they are protobuf; else JSON.

    Raises:
        BadMessage: they are no such message.
    """
    if binary:
        return _read(MESSAGES[kind], memoryview(data), kind)
    try:
        value = json.loads(data or b"{}")
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"expected JSON, found {brief(data, 80)}: {brief(str(error), 80)}") from error
    return _checked(kind, value)


def encode(kind: str, message: Message, *, binary: bool) -> bytes:
    """Write a message that has only fields of its kind."""
    if binary:
        return _written(MESSAGES[kind], message)
    return json.dumps(message, separators=(",", ":")).encode()


def _checked(kind: str, value: object) -> Message:
    if not isinstance(value, dict):
        raise BadMessage(f"{kind}: expected an object, found {brief(value, 80)}")
    found: Message = {}
    unions: set[str] = set()
    for field in MESSAGES[kind]:
        given = value.get(field.name)
        if given is None:
            given = value.get(_underscored(field.name))
        if given is None:
            continue
        if field.union:
            if field.union in unions:
                raise BadMessage(f"{kind}: expected one of the fields of {field.union}, found several")
            unions.add(field.union)
        where = f"{kind}.{field.name}"
        if field.many:
            if not isinstance(given, list):
                raise BadMessage(f"{where}: expected a list, found {brief(given, 80)}")
            found[field.name] = [_value(field.kind, item, where) for item in given]
        else:
            found[field.name] = _value(field.kind, given, where)
    return found


def _underscored(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)


def _value(kind: str, value: object, where: str) -> Any:
    match kind:
        case "string" if isinstance(value, str) and _encodable(value):
            return value
        case "bool" if isinstance(value, bool):
            return value
        case "bytes" if isinstance(value, str):
            try:
                base64.b64decode(value, validate=True)
                return value
            except (binascii.Error, ValueError):
                pass
        case "map" if isinstance(value, dict):
            if all(isinstance(one, str) and _encodable(one) for item in value.items() for one in item):
                return dict(value)
        case "uint32" | "sint32" | "int64":
            return _integer(kind, value, where)
        case _ if kind in ENUMS:
            if isinstance(value, str) and value in ENUMS[kind]:
                return value
            for name, number in ENUMS[kind].items():
                if not isinstance(value, bool) and value == number:
                    return name
        case _ if kind in MESSAGES:
            return _checked(kind, value)
    raise BadMessage(f"{where}: expected a value of type {kind}, found {brief(value, 80)}")


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def _integer(kind: str, value: object, where: str) -> int | str:
    least, most = _BOUNDS[kind]
    number = value
    if isinstance(value, str) and value.lstrip("-").isdecimal() and len(value) <= 20:
        number = int(value)
    if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
        raise BadMessage(f"{where}: expected a value of type {kind}, found {brief(value, 80)}")
    return str(number) if kind == "int64" else number


# Protobuf's binary encoding


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise BadMessage("expected a variable-length integer, found the end or more than 64 bits")
        byte = data[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return number & (2**64 - 1), at


def _parts(data: memoryview) -> Iterator[tuple[int, int, int | memoryview]]:
    """Number, wire type and raw value of each field."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, wire, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise BadMessage(f"expected a wire type of 0, 1, 2 or 5, found {wire}")
        if number == 0 or size > len(data) - at:
            raise BadMessage(f"expected {size} more bytes of field {number}, found {len(data) - at}")
        yield number, wire, data[at : at + size]
        at += size


def _read(fields: tuple[Field, ...], data: memoryview, kind: str) -> Message:
    known = {field.number: field for field in fields}
    found: Message = {}
    for number, wire, raw in _parts(data):
        field = known.get(number)
        if field is None:
            continue
        if field.many and wire == 2 and _WIRES.get(field.kind, 2 if field.kind in MESSAGES else 0) == 0:
            raise BadMessage(f"{kind}.{field.name}: packed values are not expected")
        value = _from_wire(field, wire, raw, f"{kind}.{field.name}")
        if field.union:
            for other in fields:
                if other.union == field.union:
                    found.pop(other.name, None)
        if field.many:
            found.setdefault(field.name, []).append(value)
        elif field.kind == "map":
            found.setdefault(field.name, {}).update(value)
        else:
            found[field.name] = value
    return found


def _from_wire(field: Field, wire: int, raw: int | memoryview, where: str) -> Any:
    kind = field.kind
    if isinstance(raw, int):
        if kind == "bool":
            return bool(raw)
        if kind == "sint32":
            return _integer(kind, (raw >> 1) ^ -(raw & 1), where)
        if kind == "uint32":
            return raw & 0xFFFFFFFF
        if kind == "int64":
            return str(raw - 2**64 if raw >= 2**63 else raw)
        if kind in ENUMS:
            return next((name for name, number in ENUMS[kind].items() if number == raw), next(iter(ENUMS[kind])))
    elif wire == 2:
        if kind == "string":
            try:
                return str(raw, "utf-8")
            except UnicodeDecodeError as error:
                raise BadMessage(f"{where}: expected UTF-8, found {brief(bytes(raw[:40]), 80)}") from error
        if kind == "bytes":
            return base64.b64encode(raw).decode()
        if kind == "map":
            pair = _read(_MAP, raw, where)
            return {pair.get("key", ""): pair.get("value", "")}
        if kind in MESSAGES:
            return _read(MESSAGES[kind], raw, kind)
    raise BadMessage(f"{where}: expected a value of type {kind}, found wire type {wire}")


def _number(value: int) -> bytes:
    value &= 2**64 - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _written(fields: tuple[Field, ...], message: Message) -> bytes:
    out = bytearray()
    for field in fields:
        if field.name not in message:
            continue
        value = message[field.name]
        values = (
            value
            if field.many
            else [{"key": k, "value": v} for k, v in value.items()]
            if field.kind == "map"
            else [value]
        )
        for one in values:
            raw = _to_wire(field.kind, one)
            if isinstance(raw, int):
                out += _number(field.number << 3) + _number(raw)
            else:
                out += _number(field.number << 3 | 2) + _number(len(raw)) + raw
    return bytes(out)


def _to_wire(kind: str, value: Any) -> int | bytes:
    match kind:
        case "string":
            return str(value).encode()
        case "bytes":
            return base64.b64decode(value)
        case "sint32":
            return (int(value) << 1) ^ (int(value) >> 31)
        case "bool" | "uint32" | "int64":
            return int(value)
        case "time":
            seconds, nanos = parse_time(value)
            return _number(1 << 3) + _number(seconds) + _number(2 << 3) + _number(nanos)
        case "map":
            return _written(_MAP, value)
        case _ if kind in ENUMS:
            return ENUMS[kind][value]
    return _written(MESSAGES[kind], value)


def format_time(seconds: float) -> str:
    """A time since the epoch as the JSON mapping has it."""
    from datetime import UTC, datetime

    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def parse_time(text: str) -> tuple[int, int]:
    """Seconds and nanoseconds since the epoch of a time of `format_time`."""
    from datetime import datetime

    moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    return int(moment.timestamp() // 1), moment.microsecond * 1000


def envelope(data: bytes, flags: int = 0) -> bytes:
    """A message of a stream: flags, length, bytes."""
    return struct.pack(">BI", flags, len(data)) + data
