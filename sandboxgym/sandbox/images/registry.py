"""Read images from a registry that speaks the OCI distribution protocol (Docker's registry API, version 2)."""

from __future__ import annotations

import hashlib
import http.client
import json
import platform
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sandboxgym.sandbox.base import SandboxUnavailable

_KINDS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_BLOCK = 1 << 20
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_BROKEN = (OSError, http.client.HTTPException)
"""Errors of an answer that does not come, or not as a whole."""
_UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, RecursionError)
"""Errors of an answer that is something other than was asked for."""


class ImageError(SandboxUnavailable):
    """An image cannot be had from its registry; the message says what was expected."""


@dataclass(frozen=True, slots=True)
class Blob:
    """A part of an image: its settings or one layer."""

    digest: str
    """``sha256:`` and 64 digits."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class Image:
    """The parts of an image, as its registry names them."""

    name: str
    """Name as it was asked for: ``HOST[:PORT]/NAME[:TAG]``, or a name at Docker Hub."""
    config: Blob
    layers: tuple[Blob, ...]
    """Lowest first."""

    @property
    def blobs(self) -> tuple[Blob, ...]:
        """All parts of the image: its configuration and its layers."""
        return (self.config, *self.layers)


class Registry:
    """One registry, read anonymously.

    Args:
        name: of an image there; its host is the registry, Docker Hub if it has none.
        timeout: seconds that the registry has for each answer.
    """

    def __init__(self, name: str, *, timeout: float = 60.0) -> None:
        head, slash, rest = name.partition("/")
        local = slash and ("." in head or ":" in head or head == "localhost")
        host, path = (head, rest) if local else ("registry-1.docker.io", name if slash else f"library/{name}")
        path, at, digest = path.partition("@")
        repository, colon, tag = path.rpartition(":")
        self._repository, self._reference = (repository, tag) if colon else (path, "latest")
        self._reference = digest if at else self._reference
        plain = host.partition(":")[0] in ("localhost", "127.0.0.1")
        self._base = f"{'http' if plain else 'https'}://{host}/v2/{self._repository}"
        self._name, self._timeout, self._token = name, timeout, ""

    def image(self) -> Image:
        """The parts of the image, for this machine where there are several.

        Raises:
            ImageError: the registry does not answer, or has no such image.
        """
        try:
            found = self._manifest(self._reference)
            if "manifests" in found:
                machine = _MACHINES.get(platform.machine(), platform.machine())
                several = [(one["digest"], one["platform"]) for one in found["manifests"]]
                here = {"os": "linux", "architecture": machine}.items()
                fitting = [str(digest) for digest, kind in several if here <= kind.items()]
                if not fitting:
                    raise ImageError(f"expected {self._name} for linux/{machine}, found none")
                check_digest(fitting[0])
                found = self._manifest(fitting[0])
            parts = [Blob(str(part["digest"]), int(part["size"])) for part in (found["config"], *found["layers"])]
        except _UNREADABLE as error:
            raise ImageError(f"expected the parts of {self._name} from its registry, found {error!r:.200}") from error
        for part in parts:
            check_digest(part.digest)
            if part.nbytes < 0:
                raise ImageError(f"expected sizes of the parts of {self._name}, found {part.nbytes}")
        return Image(self._name, parts[0], tuple(parts[1:]))

    def blob(self, digest: str) -> Iterator[bytes]:
        """Bytes of a part, in blocks.

        Raises:
            ImageError: the registry does not answer, or does not have it.
        """
        try:
            with self._open(f"blobs/{digest}") as answer:
                while block := answer.read(_BLOCK):
                    yield block
        except _BROKEN as error:
            raise ImageError(f"expected all of {digest} of {self._name} from its registry: {error!r}") from error

    def _manifest(self, reference: str) -> dict[str, Any]:
        if ":" in reference:
            check_digest(reference)
        try:
            with self._open(f"manifests/{reference}", ", ".join(_KINDS)) as answer:
                data = answer.read(4 * _BLOCK)
        except _BROKEN as error:
            raise ImageError(f"expected {reference} of {self._name} from its registry: {error!r}") from error
        if reference.startswith("sha256:") and f"sha256:{hashlib.sha256(data).hexdigest()}" != reference:
            raise ImageError(f"expected {reference} of {self._name}, found other content")
        found: dict[str, Any] = json.loads(data)
        return found

    def _open(self, path: str, accept: str = "*/*") -> Any:
        for attempt in range(2):
            try:
                request = urllib.request.Request(f"{self._base}/{path}", headers={"Accept": accept})
                if self._token:  # not for where a registry redirects to: stores refuse it beside a signed address
                    request.add_unredirected_header("Authorization", f"Bearer {self._token}")
                return urllib.request.urlopen(request, timeout=self._timeout)
            except urllib.error.HTTPError as error:
                asked = error.headers.get("WWW-Authenticate", "")
                if error.code == 401 and asked.startswith("Bearer ") and not attempt:
                    self._token = self._authorised(asked)
                    continue
                raise ImageError(f"expected {path} of {self._name}, its registry answered {error}") from error
            except _BROKEN as error:
                raise ImageError(f"expected an answer of the registry of {self._name}: {error}") from error
        raise AssertionError

    def _authorised(self, asked: str) -> str:
        """An anonymous token, from where the registry says that they are."""
        fields = dict(re.findall(r'(\w+)="([^"]*)"', asked))
        query = urllib.parse.urlencode({name: fields[name] for name in ("service", "scope") if name in fields})
        place, plain = fields.get("realm", ""), self._base.startswith("http:")
        if not place.startswith(("https://", "http://") if plain else "https://"):  # urllib reads files, too
            raise ImageError(f"expected the registry of {self._name} to give tokens at https://, found {place!r:.100}")
        try:
            with urllib.request.urlopen(f"{place}?{query}", timeout=self._timeout) as answer:
                found = json.loads(answer.read(_BLOCK))
            return str(found.get("token") or found["access_token"])
        except (*_BROKEN, *_UNREADABLE) as error:
            raise ImageError(f"expected a token of the registry of {self._name}: {error!r:.200}") from error


def check_digest(digest: str) -> None:
    """Raise ImageError unless this is a digest by SHA-256, which is also a safe file name."""
    if not _DIGEST.fullmatch(digest):
        raise ImageError(f"expected a digest sha256:…, found {digest[:100]!r}")
