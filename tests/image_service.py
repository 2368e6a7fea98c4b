"""A registry in a process of its own, with one small image, for the tests of images."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import socket
import subprocess
import tarfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from components import missing


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def layer(name: str, text: str) -> tuple[bytes, bytes]:
    """A layer of one file: as it is stored, and unpacked."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo(name)
        info.size = len(text)
        archive.addfile(info, io.BytesIO(text.encode()))
    return gzip.compress(buffer.getvalue(), mtime=0), buffer.getvalue()


class Service:
    """A registry in a process of its own, with one image of three layers, or ``empty``."""

    def __init__(self, folder: Path, *, empty: bool = False) -> None:
        program = shutil.which("docker-registry")
        if program is None:
            missing("registry", "there is no docker-registry command")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        settings = {"version": 0.1, "storage": {"filesystem": {"rootdirectory": str(folder / "data")}}}
        settings |= {"http": {"addr": f"127.0.0.1:{port}"}, "log": {"level": "error"}}
        (folder / "settings.yml").write_text(json.dumps(settings))
        self.base = f"http://127.0.0.1:{port}/v2/tools/small"
        self.name = f"127.0.0.1:{port}/tools/small:1"
        self.process = subprocess.Popen(
            [program, "serve", str(folder / "settings.yml")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 300
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/").close()
                break
            except OSError:
                assert time.monotonic() < deadline and self.process.poll() is None
                time.sleep(0.05)
        if not empty:
            self._push()

    def _push(self) -> None:
        layers = [layer(f"file-{index}", f"content {index} of {os.getpid()}" * 1000) for index in range(3)]
        config = {"architecture": "amd64", "os": "linux", "config": {"Env": ["PATH=/bin"], "WorkingDir": "/work"}}
        config |= {"rootfs": {"type": "layers", "diff_ids": [digest_of(plain) for _, plain in layers]}}
        parts = [json.dumps(config).encode(), *(packed for packed, _ in layers)]
        for part in parts:
            with self._send("POST", f"{self.base}/blobs/uploads/", b"") as answer:
                place = answer.headers["Location"]
            self._send("PUT", f"{place}&digest={digest_of(part)}", part).close()
        kind = "application/vnd.docker.distribution.manifest.v2+json"
        told = [{"digest": digest_of(part), "size": len(part)} for part in parts]
        told[0]["mediaType"] = "application/vnd.docker.container.image.v1+json"
        for one in told[1:]:
            one["mediaType"] = "application/vnd.docker.image.rootfs.diff.tar.gzip"
        manifest = {"schemaVersion": 2, "mediaType": kind, "config": told[0], "layers": told[1:]}
        self._send("PUT", f"{self.base}/manifests/1", json.dumps(manifest).encode(), kind).close()

    def _send(self, method: str, url: str, data: bytes, kind: str = "application/octet-stream") -> Any:
        request = urllib.request.Request(url, data=data, method=method, headers={"Content-Type": kind})
        return urllib.request.urlopen(request)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
