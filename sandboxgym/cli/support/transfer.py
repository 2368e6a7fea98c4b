"""Transfer of one file over HTTP that survives cut connections and killed processes.

1. Received bytes stay in ``NAME.part`` with a note of their source; the next attempt, even by another process, asks for
   the rest (HTTP Range), and starts over if the file at the source has changed.
2. A part is never mistaken for the whole: the length is compared with the server's.
3. The caller ensures that no two processes write one part.

The standard library does it: pooch, the field's choice for data files, starts over after every interruption.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from sandboxgym.system.atomic import write_atomic

CHUNK = 2**20
_RANGE = re.compile(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)")


class TransferError(Exception):
    """Raised if a file could not be fetched; the message says why."""


class ChecksumMismatch(TransferError):
    """Raised if the content is not the expected one."""


class TransferProgress(Protocol):
    """Receiver of a transfer's progress."""

    def start(self, name: str, done: int, total: int | None) -> None:
        """Begin the transfer of ``name``, with this many bytes already there."""

    def advance(self, nbytes: int) -> None:
        """Add this many bytes."""

    def finish(self) -> None:
        """End the transfer, complete or given up."""


@dataclass(slots=True)
class _Source:
    """Source of a part."""

    url: str
    validator: str | None
    """ETag or date by which the server recognises the same content."""
    total: int | None


def fetch(
    url: str,
    part: Path,
    *,
    progress: TransferProgress,
    check_room: Callable[[int], None] = lambda nbytes: None,
    attempts: int = 5,
    timeout: float = 30.0,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Fetch the file at ``url`` into ``part``, continuing from its present content.

    Args:
        url: http or https; proxies are taken from the environment.
        part: where to write; beside it, ``part.json`` says what it is a part of.
        progress: is told of every chunk.
        check_room: called with the number of bytes still to come, once the server has said it; may raise.
        attempts: in a row without a single byte, before giving up.
        timeout: in seconds, for connecting and for every read.
        pause: function that waits for a number of seconds before the next attempt.

    Raises:
        TransferError: not reachable, refused, or not a file. The part stays.
    """
    part.parent.mkdir(parents=True, exist_ok=True)
    with open(part, "ab") as file:
        failures = 0
        while True:
            before = file.tell()
            try:
                if _attempt(url, file, part, progress, check_room, timeout):
                    os.fsync(file.fileno())
                    return
                problem: Exception = TransferError("the connection was cut")
            except urllib.error.HTTPError as error:
                error.close()  # it holds the connection
                if error.code < 500 and error.code not in (408, 429):
                    raise TransferError(f"{url}: HTTP {error.code} {error.reason}") from error
                problem = error
            except (OSError, http.client.HTTPException) as error:
                if isinstance(getattr(error, "reason", None), socket.gaierror):
                    raise TransferError(f"{url}: its host cannot be resolved; is this machine online?") from error
                problem = error
            finally:
                progress.finish()
            failures = 1 if file.tell() > before else failures + 1
            if failures >= attempts:
                reason = getattr(problem, "reason", problem)
                raise TransferError(f"{url}: {reason} ({attempts} attempts)") from problem
            pause(min(30.0, 2.0 ** (failures - 1)))


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def forget(part: Path) -> None:
    """Delete a part and the note beside it."""
    part.unlink(missing_ok=True)
    _note(part).unlink(missing_ok=True)


def _attempt(
    url: str, file: IO[bytes], part: Path, progress: TransferProgress, check_room: Callable[[int], None], timeout: float
) -> bool:
    """Make one request; returns whether the whole file is there afterwards."""
    known = _read_note(part)
    if known is None or known.url != url:
        file.truncate(0)
        known = _Source(url, None, None)
    file.seek(0, os.SEEK_END)
    have = file.tell()
    request = urllib.request.Request(url, headers={"User-Agent": "sandboxgym", "Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
        if known.validator:
            request.add_header("If-Range", known.validator)
    try:
        response = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        if error.code != 416:
            raise
        error.close()
        if _total(error.headers) == have and known.total == have:
            return True
        file.truncate(0)
        return False
    with response:
        if response.headers.get_content_type() == "text/html" and not part.name.endswith(".html.part"):
            raise TransferError(f"{url} answered with a web page in place of the file (a quota, or a sign-in?)")
        begin = _begin(response.headers) if response.status == 206 else 0
        total = _total(response.headers) if response.status == 206 else _length(response.headers)
        if begin not in (0, have) or (begin and known.total not in (None, total)):
            file.truncate(0)  # the rest of some other content
            return False
        if begin == 0:
            file.truncate(0)
            file.seek(0)
            have = 0
        _write_note(part, _Source(url, _validator(response.headers), total))
        if total is not None:
            check_room(total - have)
        progress.start(part.name.removesuffix(".part"), have, total)
        while chunk := response.read1(CHUNK):  # what is there, at once: a kill must not lose it
            file.write(chunk)
            file.flush()
            progress.advance(len(chunk))
        return total is None or file.tell() == total


def _validator(headers: Any) -> str | None:
    tag: str | None = headers.get("ETag")
    # A weak tag says "equivalent", which is not enough to join two halves.
    date: str | None = headers.get("Last-Modified")
    return tag if tag and not tag.startswith("W/") else date


def _length(headers: Any) -> int | None:
    text = headers.get("Content-Length")
    return int(text) if text and text.isdigit() else None


def _begin(headers: Any) -> int:
    match = _RANGE.match(headers.get("Content-Range") or "")
    return int(match[1]) if match and match[1] else -1


def _total(headers: Any) -> int | None:
    match = _RANGE.match(headers.get("Content-Range") or "")
    return int(match[2]) if match and match[2] != "*" else None


def _note(part: Path) -> Path:
    return part.with_name(part.name + ".json")


def _read_note(part: Path) -> _Source | None:
    try:
        content = json.loads(_note(part).read_bytes())
        return _Source(content["url"], content["validator"], content["total"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_note(part: Path, source: _Source) -> None:
    content = {"url": source.url, "validator": source.validator, "total": source.total}
    write_atomic(_note(part), json.dumps(content).encode())
