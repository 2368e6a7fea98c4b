"""``sandboxgym serve openenv``: serve environments to clients of OpenEnv, with snapshots, restores and forks."""

from __future__ import annotations

import argparse
import functools
import logging
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym

from sandboxgym.cli import OK, USAGE, CommandError
from sandboxgym.cli.environments import add_kwargs, find_spec, import_modules, parse_kwargs

LOCAL = frozenset({"127.0.0.1", "localhost", "::1"})


def main(argv: Sequence[str]) -> int:
    """Serve environments with OpenEnv's protocol until interrupted."""
    parser = argparse.ArgumentParser(prog="sandboxgym serve openenv", description=(__doc__ or "").replace("``", ""))
    parser.add_argument(
        "env_ids",
        nargs="+",
        metavar="ENV_ID",
        help="environment; one is served at /, several at /NAME each (ALFWorld-v0)",
    )
    add_kwargs(parser)
    parser.add_argument(
        "--import", dest="modules", nargs="+", default=[], metavar="MODULE", help="modules to import first"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)"
    )
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0: a free one (default: 8000)")
    parser.add_argument(
        "--sessions", type=int, default=16, help="maximum number of sessions, of all environments (default: 16)"
    )
    parser.add_argument(
        "--snapshots", type=int, default=64, help="maximum number of snapshots of a session (default: 64)"
    )
    parser.add_argument(
        "--idle", type=float, default=600, help="seconds without a call after which a session ends (default: 600)"
    )
    parser.add_argument("--timeout", type=float, default=300, help="time limit of a call in seconds (default: 300)")
    parser.add_argument("--verbose", action="store_true", help="log refused calls as well")
    options = parser.parse_args(argv)
    for name, most in (("sessions", 10_000), ("snapshots", 100_000), ("idle", 10_000_000), ("timeout", 100_000)):
        if not 1 <= getattr(options, name) <= most:
            parser.error(f"--{name}: expected 1 to {most}, found {getattr(options, name)}")

    try:
        import jsonschema  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
        import websockets  # noqa: F401
    except ImportError as error:
        raise CommandError(f"needs {error.name}: pip install 'sandboxgym[openenv]'") from error

    from sandboxgym.adapters.openenv_server.application import application, run
    from sandboxgym.adapters.openenv_server.sessions import Limits
    from sandboxgym.system.serving import leave

    level = logging.INFO if options.verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    import_modules(options.modules)
    kwargs = parse_kwargs(options.kwargs)
    makers: dict[str, Callable[[], gym.Env[Any, Any]]] = {}
    for spec in map(find_spec, options.env_ids):
        name = spec.id.rpartition("/")[2]
        if name in makers:
            raise CommandError(f"expected different environments, found {name} twice", status=USAGE)
        # Gymnasium's checker refuses every later step where the first one failed, as a client's first action may.
        makers[name] = functools.partial(gym.make, spec, disable_env_checker=True, **kwargs)
    limits = Limits(sessions=options.sessions, snapshots=options.snapshots, idle=options.idle, call=options.timeout)
    with _listen(options.host, options.port) as listening:
        try:
            hosts = LOCAL if options.host in LOCAL else None
            app = application(makers, limits=limits, hosts=hosts)
        except (TypeError, ValueError, LookupError, OSError, gym.error.Error, ImportError) as error:
            raise CommandError(f"{' '.join(options.env_ids)} could not be served: {error}") from error
        host, port = listening.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        shown = ", ".join(f"{url}/{name}" for name in makers) if len(makers) > 1 else f"{next(iter(makers))}: {url}"
        if not run(app, listening, lambda: print(f"{shown} (Ctrl-C ends it)", flush=True)):
            leave(OK)  # a thread that cannot be ended would be waited for
    return OK


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CommandError(f"cannot listen on {host}:{port}: {reason}") from error
