"""``sandboxgym serve mcp``: a sandbox with snapshots and forks, for agents that speak the Model Context Protocol."""

from __future__ import annotations

import argparse
import contextlib
import socket
from collections.abc import Sequence

from sandboxgym.cli import OK, CommandError

LONGEST_OUTPUT = 30_000
"""Bytes of a command's output that an agent is shown."""


def main(argv: Sequence[str]) -> int:
    """Serve until the client closes its end, or until interrupted."""
    parser = argparse.ArgumentParser(prog="sandboxgym serve mcp", description=__doc__)
    parser.add_argument(
        "--backend",
        default="auto",
        help="backend of the sandbox: overlay, overlay-rootless, docker, copy (default: auto)",
    )
    parser.add_argument(
        "--rootfs",
        default="host",
        help="root file system: docker:IMAGE, or an unpacked root file system (default: host, read-only)",
    )
    parser.add_argument("--network", action="store_true", help="give commands this machine's network (default: none)")
    parser.add_argument("--allow-unsafe", action="store_true", help="permit a backend that isolates nothing")
    parser.add_argument(
        "--http", type=int, metavar="PORT", help="serve at http://127.0.0.1:PORT/mcp; with 0 at a free port"
    )
    parser.add_argument("--timeout", type=float, default=120, help="time limit of a command in seconds (default: 120)")
    parser.add_argument(
        "--branches", type=int, default=8, help="maximum number of live branches, main included (default: 8)"
    )
    parser.add_argument("--snapshots", type=int, default=32, help="maximum number of snapshots kept (default: 32)")
    options = parser.parse_args(argv)
    for name in ("branches", "snapshots"):
        if not 1 <= getattr(options, name) <= 1000:
            parser.error(f"--{name}: expected 1 to 1000, found {getattr(options, name)}")

    try:
        import mcp.server.lowlevel  # noqa: F401
    except ImportError as error:
        raise CommandError("needs mcp 2.0 or newer: pip install 'sandboxgym[mcp]'") from error

    from sandboxgym.adapters.branches import Branches
    from sandboxgym.adapters.mcp import run_http, run_stdio
    from sandboxgym.sandbox.base import Limits, SandboxError
    from sandboxgym.sandbox.sandbox import make_sandbox
    from sandboxgym.system.serving import leave

    with contextlib.ExitStack() as stack:
        listening = None if options.http is None else stack.enter_context(listen(options.http))
        try:
            sandbox = make_sandbox(
                options.backend,
                rootfs=options.rootfs,
                limits=Limits(seconds=options.timeout, output=LONGEST_OUTPUT),
                network=options.network,
                allow_unsafe=options.allow_unsafe,
            )
            if listening is not None and not sandbox.backend.capabilities.isolated:
                sandbox.close()
                raise CommandError(
                    f"expected a backend that isolates for --http, found {sandbox.backend.capabilities.name}: every "
                    "user and program of this machine could run commands as you"
                )
            sandbox.start()
        except (SandboxError, OSError, ValueError, TypeError, ImportError) as error:
            raise CommandError(str(error)) from error
        branches = Branches(sandbox, most_branches=options.branches, most_snapshots=options.snapshots)
        status = OK
        with contextlib.suppress(KeyboardInterrupt):  # the way to end it
            if listening is None:
                number = run_stdio(branches)
                status = 128 + number if number else OK
            else:
                url = f"http://127.0.0.1:{listening.getsockname()[1]}/mcp"
                told = f"{sandbox.backend.capabilities.name} sandbox: {url} (Ctrl-C ends it)"
                run_http(branches, listening, lambda: print(told, flush=True))
        if not branches.close():
            leave(status)  # the thread of a command that cannot be ended would be waited for
    return status


def listen(port: int, *, host: str = "127.0.0.1") -> socket.socket:
    """Open a listening socket."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CommandError(f"cannot listen on {host}:{port}: {reason}") from error
