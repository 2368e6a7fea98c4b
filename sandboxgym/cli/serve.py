"""``sandboxgym serve webshop``: serve the shop as a website for people.

``sandboxgym serve openenv`` serves environments to trainers, ``sandboxgym serve mcp`` a sandbox to agents, and
``sandboxgym serve e2b`` sandboxes to programs that use E2B's client library; see their ``--help``.
"""

from __future__ import annotations

import argparse
import contextlib
import threading
from collections.abc import Sequence

from sandboxgym.cli import OK, CommandError


def main(argv: Sequence[str]) -> int:
    """Run ``sandboxgym serve`` until interrupted."""
    if argv[:1] == ["mcp"]:
        from sandboxgym.cli import serve_mcp

        return serve_mcp.main(argv[1:])
    if argv[:1] == ["openenv"]:
        from sandboxgym.cli import serve_openenv

        return serve_openenv.main(argv[1:])
    if argv[:1] == ["e2b"]:
        from sandboxgym.cli import serve_e2b

        return serve_e2b.main(argv[1:])
    parser = argparse.ArgumentParser(prog="sandboxgym serve", description=(__doc__ or "").replace("``", ""))
    parser.add_argument("what", choices=("webshop",), help="site to serve")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)"
    )
    parser.add_argument("--port", type=int, default=3000, help="port to listen on; 0: a free one (default: 3000)")
    parser.add_argument(
        "--name",
        action="append",
        default=[],
        metavar="HOST",
        help="host name by which visitors reach it; may be repeated (always: localhost, and the address itself)",
    )
    parser.add_argument(
        "--catalogue", default="embedded", metavar="DIR", help="folder of the official files (default: embedded)"
    )
    parser.add_argument(
        "--goals", choices=("synthetic", "human"), default="synthetic", help="instructions (default: synthetic)"
    )
    parser.add_argument(
        "--split", default=None, help="split of the tasks: test, eval, train, product-test, … (default: all tasks)"
    )
    options = parser.parse_args(argv)

    from sandboxgym.envs.webshop.goals import split
    from sandboxgym.envs.webshop.shop import open_shop
    from sandboxgym.envs.webshop.site.server import Server, Site

    try:
        shop = open_shop(options.catalogue, options.goals)
        site = Site(shop, split(shop.goals, options.split))
    except (OSError, ValueError, LookupError, ImportError) as error:
        raise CommandError(str(error)) from error
    try:
        server = Server(site, host=options.host, port=options.port, names=options.name)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CommandError(f"cannot listen on {options.host}:{options.port}: {reason}") from error
    with server, contextlib.suppress(KeyboardInterrupt):  # the way to end it
        print(f"{len(site.goals):,} tasks, {len(shop.catalogue):,} products: {server.url} (Ctrl-C ends it)", flush=True)
        threading.Event().wait()
    return OK
