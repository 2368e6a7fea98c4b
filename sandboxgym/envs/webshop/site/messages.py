"""HTTP messages of the website: the small part of HTTP/1.1 that a shop needs.

1. `parse` takes any bytes: it raises `Refused`, with a status and a sentence, for anything that it does not understand
   or that two readers could understand in two ways. It never raises anything else.
2. No size is trusted: a line, the fields and a form are bounded, and a number is checked as text before it is
   converted.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus

from sandboxgym.envs.webshop.site import markup

MOST_LINE = 2**16
"""Limit in bytes of the request line."""
MOST_FIELDS = 2**15
"""Limit in bytes of all header fields."""
MOST_FORM = 2**16
"""Limit in bytes of a form, which is read and ignored: the address alone identifies a purchase."""
_COUNT = 100
"""Limit of the number of header fields."""
_METHODS = ("GET", "HEAD", "POST")
_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([^\x00-\x20\x7f]+) HTTP/([0-9])\.([0-9])")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[0-9A-Za-z._-]+)(?::[0-9]{0,5})?")
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self' 'unsafe-inline'; img-src data:; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class VisitorRequest:
    """A visitor's request."""

    method: str
    target: str
    """Path and query string of the request."""
    host: str | None
    """Host name in the request, without the port; None where HTTP/1.0 does not send it."""
    length: int
    """Number of bytes of the body."""
    expects: bool
    """True if the visitor waits for "100 Continue" before it sends the body."""
    lasting: bool
    """True if the connection stays open for further requests."""


@dataclass(frozen=True, slots=True)
class Response:
    """A response of the website."""

    status: HTTPStatus
    body: str = ""
    location: str | None = None
    content_type: str = "text/html; charset=utf-8"
    lasting: bool = False
    """True if a browser may cache it; not pages, because "back" has to ask again."""

    def as_bytes(self, *, method: str = "GET", close: bool) -> bytes:
        """Encode the response. It names no version and no program."""
        content = self.body.encode("utf-8", "backslashreplace")
        fields = {
            "Date": formatdate(usegmt=True),
            **({} if self.location is None else {"Location": self.location}),
            "Content-Type": self.content_type,
            "Content-Length": str(len(content)),
            "Cache-Control": "max-age=86400, immutable" if self.lasting else "no-store",
            **_HEADERS,
            **({"Connection": "close"} if close else {}),
        }
        lines = [f"HTTP/1.1 {self.status.value} {self.status.phrase}", *(f"{k}: {v}" for k, v in fields.items())]
        head = "".join(f"{line}\r\n" for line in lines).encode("ascii", "backslashreplace")
        return head + b"\r\n" + (b"" if method == "HEAD" else content)


class Refused(Exception):
    """Raised for a request that is not answered with a page of the shop; the connection ends with it."""

    def __init__(self, status: HTTPStatus, sentence: str) -> None:
        super().__init__(sentence)
        self.response = problem(status, sentence)


def problem(status: HTTPStatus, sentence: str) -> Response:
    """Response with an error page."""
    return Response(status, markup.problem(sentence))


def parse(head: bytes) -> VisitorRequest:
    r"""Parse a request from its line and fields, up to the empty line.

    Raises:
        Refused: the bytes are not a request, or not one that this site answers.

    >>> parse(b"GET /start?goal=1 HTTP/1.1\r\nHost: localhost:3000\r\n").host
    'localhost'
    """
    line, _, rest = head.partition(b"\n")
    found = _LINE.fullmatch(line.removesuffix(b"\r"))
    if found is None:
        raise _malformed("Its first line is not one of HTTP")
    method, target, major, minor = (part.decode("latin-1") for part in found.groups())
    if major != "1":
        raise Refused(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, f"HTTP/1.1 is spoken here, not HTTP/{major}.{minor}.")
    fields = _fields(rest)
    if method not in _METHODS:
        raise Refused(HTTPStatus.NOT_IMPLEMENTED, f"Pages are asked for with {', '.join(_METHODS)}, nothing else.")
    if not target.startswith("/"):
        raise _malformed("What it asks for is not a path")
    modern = minor != "0"
    expected = [value.lower() for value in fields["expect"]]
    if expected not in ([], ["100-continue"]):
        raise Refused(HTTPStatus.EXPECTATION_FAILED, "Nothing else than a page can be expected here.")
    words = {word.strip().lower() for value in fields["connection"] for word in value.split(",")}
    lasting = modern and "close" not in words
    return VisitorRequest(
        method, target, _host(fields["host"], modern), _length(fields), bool(expected) and modern, lasting
    )


def _fields(lines: bytes) -> defaultdict[str, list[str]]:
    found = defaultdict[str, list[str]](list)
    split = lines.split(b"\n")
    if len(split) > _COUNT + 1:
        raise Refused(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"More than {_COUNT} header fields are too many.")
    for line in split:
        if line := line.removesuffix(b"\r"):
            field = _FIELD.fullmatch(line)
            if field is None:
                raise _malformed("A header field is not one of HTTP")
            found[field[1].decode("ascii").lower()].append(field[2].decode("latin-1").strip(" \t"))
    return found


def _host(given: list[str], modern: bool) -> str | None:
    if not given and not modern:
        return None
    found = _HOST.fullmatch(given[0]) if len(given) == 1 else None
    if found is None:
        raise _malformed("It does not say, in one field Host, which site it is for")
    return found[1]


def _length(fields: defaultdict[str, list[str]]) -> int:
    if fields["transfer-encoding"]:
        raise Refused(HTTPStatus.LENGTH_REQUIRED, "Forms are sent here with their length, not in chunks.")
    given = {part.strip(" \t") for value in fields["content-length"] for part in value.split(",")}
    if not given:
        return 0
    text = given.pop()
    if given or not (text.isascii() and text.isdigit()):
        raise _malformed("The length that it states is not a number of bytes")
    digits = text.lstrip("0") or "0"
    if len(digits) > len(str(MOST_FORM)) or int(digits) > MOST_FORM:
        raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "That is more than any form here sends.")
    return int(digits)


def _malformed(what: str) -> Refused:
    return Refused(HTTPStatus.BAD_REQUEST, f"This request cannot be understood. {what}.")
