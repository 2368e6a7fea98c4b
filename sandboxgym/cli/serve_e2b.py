"""``sandboxgym serve e2b``: the sandboxes of this machine, with forks, for programs that use E2B's client library."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path

from sandboxgym.cli import OK, CommandError
from sandboxgym.cli.serve_mcp import listen

KEYS = "SANDBOXGYM_E2B_KEYS"
"""Environment variable with API keys, separated by commas."""


def main(argv: Sequence[str]) -> int:
    """Serve sandboxes with E2B's API until interrupted."""
    parser = argparse.ArgumentParser(prog="sandboxgym serve e2b", description=(__doc__ or "").replace("``", ""))
    parser.add_argument("--host", default="127.0.0.1", help="interface (default: 127.0.0.1, this machine only)")
    parser.add_argument("--port", type=int, default=3000, help="0: a free port (default: 3000)")
    parser.add_argument(
        "--backend", choices=("auto", "overlay", "overlay-rootless"), default="auto", help="(default: auto)"
    )
    parser.add_argument(
        "--rootfs", default="host", help="of the template base: docker:IMAGE, or an unpacked root file system"
    )
    parser.add_argument(
        "--template", action="append", default=[], metavar="NAME=ROOTFS", help="one more template; may be repeated"
    )
    parser.add_argument(
        "--snapshot",
        choices=("auto", "full", "filesystem"),
        default=None,
        help="what pauses and forks keep beside files: running processes (auto, full; needs CRIU), or nothing "
        "(filesystem; default: auto where that is possible, else filesystem)",
    )
    parser.add_argument("--network", action="store_true", help="give sandboxes this machine's network (default: none)")
    parser.add_argument("--keys", metavar="FILE", help=f"API keys, one per line (default: ${KEYS}, else a new one)")
    parser.add_argument("--no-key", action="store_true", help="accept any API key; on the loopback only")
    parser.add_argument("--sandboxes", type=int, default=20, help="live at one time per key (default: 20)")
    parser.add_argument("--snapshots", type=int, default=100, help="kept at one time per key (default: 100)")
    parser.add_argument("--requests", type=float, default=100, help="per second and key (default: 100)")
    parser.add_argument("--creations", type=float, default=20, help="sandboxes per second and key (default: 20)")
    parser.add_argument("--longest", type=int, default=86_400, help="seconds of a sandbox at most (default: 86400)")
    options = parser.parse_args(argv)
    for name in ("sandboxes", "snapshots", "requests", "creations", "longest"):
        if not 0 < getattr(options, name) <= 10_000_000:
            parser.error(f"--{name}: expected more than 0, found {getattr(options, name)}")
    if options.no_key and not _is_loopback(options.host):
        parser.error(f"--no-key: expected a --host of the loopback, found {options.host}")
    templates = {"base": options.rootfs}
    for text in options.template:
        name, equals, rootfs = text.partition("=")
        if not (name and equals and rootfs):
            parser.error(f"--template: expected NAME=ROOTFS, found {text}")
        templates[name] = rootfs

    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise CommandError("needs starlette and uvicorn: pip install 'sandboxgym[e2b]'") from error

    from sandboxgym.e2b.app import run
    from sandboxgym.e2b.quotas import Quotas
    from sandboxgym.e2b.service import Service
    from sandboxgym.sandbox.base import SandboxError

    keys, new = _keys(options.keys, none=options.no_key)
    with listen(options.port, host=options.host) as listening:
        # asyncio sets it only where the protocol was named when the socket was made; else answers take 40 ms.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        quotas = Quotas(options.sandboxes, options.snapshots, options.requests, options.creations, options.longest)
        try:
            service = Service(
                templates,
                keys,
                backend=options.backend,
                mode=options.snapshot,
                network=options.network,
                quotas=quotas,
            )
            asyncio.run(service.prepare())
        except (SandboxError, OSError, ValueError) as error:
            raise CommandError(str(error)) from error
        url = f"http://{options.host}:{listening.getsockname()[1]}"
        keeps = "files only" if service.mode == "filesystem" else "files and running processes"
        shown = "any" if keys is None else new or "one of yours"

        def tell() -> None:
            print(f"E2B API at {url} ({service.backend}; pauses and forks keep {keeps}; Ctrl-C ends it)")
            print(f"export E2B_API_URL={url} E2B_SANDBOX_URL={url} E2B_API_KEY={shown}", flush=True)

        with contextlib.suppress(KeyboardInterrupt):  # the way to end it
            run(service, listening, local_only=options.no_key, started=tell)
    return OK


def _is_loopback(host: str) -> bool:
    return host in ("127.0.0.1", "localhost", "::1")


def _keys(file: str | None, *, none: bool) -> tuple[frozenset[str] | None, str]:
    """The API keys to accept, None for any; and one that was made because there was none."""
    if none:
        return None, ""
    try:
        text = Path(file).read_text() if file is not None else os.environ.get(KEYS, "").replace(",", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"--keys: {error}") from error
    keys = frozenset(line.strip() for line in text.splitlines() if line.strip())
    if keys:
        return keys, ""
    if file is not None:
        raise CommandError(f"--keys: expected API keys, one per line, found none in {file}")
    new = f"e2b_{secrets.token_hex(20)}"
    return frozenset({new}), new
