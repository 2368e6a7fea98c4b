"""``sandboxgym fleet``: look at the environments on a Ray cluster, empty a node, end what killed owners hold."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from sandboxgym.cli import OK, CommandError
from sandboxgym.cli.support.printing import nbytes_text

if TYPE_CHECKING:
    from sandboxgym.workers.fleet_status import FleetStatus, Owner

_CLEAR = "\x1b[H\x1b[J"


def main(argv: Sequence[str]) -> int:
    """Run ``sandboxgym fleet``; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="sandboxgym fleet", description="Look at the environments on a Ray cluster, or empty one of its nodes."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    status = commands.add_parser(
        "status",
        help="show nodes, live environments, snapshots, failures and rates",
        description="Show the nodes of a Ray cluster and what all owners of environments have there.",
    )
    status.add_argument(
        "--address", help="of the cluster: HOST:PORT or ray://HOST:10001 (default: $RAY_ADDRESS, or one here)"
    )
    status.add_argument(
        "--watch",
        nargs="?",
        type=_seconds,
        const=2.0,
        metavar="SECONDS",
        help="show it again every SECONDS (2), until Ctrl-C",
    )
    status.add_argument("--json", action="store_true", help="print one JSON object per line instead of tables")
    leave = commands.add_parser(
        "drain",
        help="move everything from a node to others, and give it no new work",
        description="Have all owners move their environments away from a node, and wait until nothing is there.",
    )
    leave.add_argument("node", metavar="NODE", help="id of the node, or its beginning, or its address")
    leave.add_argument("--address", help="of the cluster, as for status")
    leave.add_argument("--undo", action="store_true", help="let the node have new work again")
    leave.add_argument(
        "--timeout", type=_seconds, default=600.0, metavar="SECONDS", help="wait no longer than this (600)"
    )
    release = commands.add_parser(
        "release",
        help="end the leases that killed owners have in a store of snapshots",
        description="Show the leases in a store of snapshots; or end some, and delete what nothing holds then. A lease "
        "of an owner that was killed ends by itself after an hour. One whose owner lives must not be ended: that owner "
        "could not read its durable copies any more.",
    )
    release.add_argument("store", metavar="STORE", help="directory, URL or ray-objects://NAME, as for RayEnvs(store=…)")
    release.add_argument("leases", metavar="LEASE", nargs="*", help="names of leases to end")
    release.add_argument("--all", action="store_true", help="end all leases: no owner uses the store")
    release.add_argument("--address", help="of the cluster, for ray-objects://NAME, as for status")
    options = parser.parse_args(argv)
    if options.command == "release":
        return release_leases(options.store, options.leases, options.address, everything=options.all)
    if options.command == "drain":
        return drain_node(options.node, options.address, undo=options.undo, timeout=options.timeout)
    return show_status(options.address, watch=options.watch, as_json=options.json)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"expected more than 0 seconds, found {text}")
    return seconds


def show_status(address: str | None, *, watch: float | None, as_json: bool) -> int:
    """Print the state of a cluster, once or again and again."""
    from sandboxgym.workers.env_host import FleetError
    from sandboxgym.workers.fleet_status import fleet_status
    from sandboxgym.workers.nodes.cluster import connect, expect_alive

    place = address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        connect(place)
        while True:
            expect_alive(place)
            found = fleet_status()
            if as_json:
                print(json.dumps(found.to_dict()), flush=True)
            else:
                clear = _CLEAR if watch is not None and sys.stdout.isatty() else ""
                print(clear + "\n".join(lines_of(found)), flush=True)
            if watch is None:
                return OK
            time.sleep(watch)
    except FleetError as error:
        raise CommandError(str(error)) from error


def drain_node(name: str, address: str | None, *, undo: bool = False, timeout: float = 600.0) -> int:
    """Have everything moved away from a node; wait until nothing is there.

    Raises:
        CommandError: no such node, or something is still there after the timeout.
    """
    from sandboxgym.workers.env_host import FleetError
    from sandboxgym.workers.fleet_status import PERIOD, drain, fleet_status
    from sandboxgym.workers.nodes.cluster import connect, expect_alive

    place = address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        connect(place)
    except FleetError as error:
        raise CommandError(str(error)) from error
    nodes = [node for node in fleet_status().nodes if node.alive and (node.id.startswith(name) or node.address == name)]
    if len(nodes) != 1:
        known = ", ".join(f"{node.id[:8]} ({node.address})" for node in nodes or fleet_status().nodes if node.alive)
        raise CommandError(f"expected the id or the address of one node that lives, found {name!r}: there is {known}")
    node = nodes[0].id
    drain(node, undo=undo)
    began = time.monotonic()
    while not undo:
        try:
            expect_alive(place)
        except FleetError as error:
            raise CommandError(str(error)) from error
        there = next((n for n in fleet_status().nodes if n.id == node and n.usage.workers), None)
        # Owners look at the nodes every so often: one that does not know it yet may still ask for workers there.
        if there is None and time.monotonic() > began + 2 * PERIOD:
            break
        if there is not None and time.monotonic() > began + timeout:
            raise CommandError(
                f"node {node[:8]} still has {there.usage.workers} workers with {there.usage.in_use} environments in "
                f"use after {timeout:g} s; it gets no new work"
            )
        time.sleep(0.5)
    print(f"node {node[:8]} may have new work again" if undo else f"nothing is on node {node[:8]} any more")
    return OK


def release_leases(place: str, names: Sequence[str], address: str | None, *, everything: bool = False) -> int:
    """End leases in a store of snapshots; print those that there are if none is named.

    Raises:
        CommandError: there is no such store or lease.
    """
    from gymnasium.error import DependencyNotInstalled

    from sandboxgym.errors import SnapshotError
    from sandboxgym.workers.env_host import FleetError
    from sandboxgym.workers.nodes.cluster import connect
    from sandboxgym.workers.store import SnapshotStore

    if "://" not in place and not os.path.isdir(place):
        raise CommandError(f"expected a store of snapshots, found no directory {place}")
    try:
        if place.startswith("ray-objects://"):
            connect(address or os.environ.get("RAY_ADDRESS") or "auto")
        with contextlib.closing(SnapshotStore(place)) as store:
            found = store.leases()
            if unknown := sorted(set(names) - set(found)):
                raise CommandError(f"expected leases among {', '.join(found) or 'none'}, found {', '.join(unknown)}")
            ended = list(found) if everything else names
            if not ended:
                for name, seconds in found.items():
                    held = len(store.existing_lease(name).keys())
                    ends = f"ends in {seconds / 60:.0f} min" if seconds > 0 else "has ended"
                    print(f"{name}: {ends}, snapshots {held}")
                print(f"{len(found)} leases in {store.place}, which holds {nbytes_text(store.nbytes())}")
                return OK
            gone, left = store.release(ended), store.nbytes()
    except (FleetError, SnapshotError, DependencyNotInstalled, ValueError, OSError) as error:
        raise CommandError(str(error)) from error
    print(f"ended {len(ended)} leases, deleted {gone.snapshots} snapshots, {nbytes_text(gone.nbytes)}")
    if left:
        print(f"{nbytes_text(left)} stay: others use the store, who delete what was held an hour after it was written")
    return OK


def lines_of(found: FleetStatus) -> Iterator[str]:
    """The state of a fleet as lines of text."""
    alive, usage = sum(node.alive for node in found.nodes), found.usage
    gone = f" ({len(found.nodes) - alive} gone)" if alive < len(found.nodes) else ""
    rate = sum(owner.steps_per_second for owner in found.owners)
    summary = f"owners: {len(found.owners)}, environments: {usage.environments}, steps/s: {rate:.1f}"
    yield f"nodes alive: {alive}{gone}, {summary}"
    yield ""
    rows: list[tuple[str, ...]] = [
        ("node", "address", "state", "cores", "memory", "workers", "environments", "in use", "snapshots", "bytes")
    ]
    for node in found.nodes:
        here = node.usage
        state = "gone" if not node.alive else "draining" if node.draining else "head" if node.head else "alive"
        place = (node.id[:8], node.address, state, f"{node.cores:g}", nbytes_text(node.memory))
        counted = (here.workers, here.environments, here.in_use, here.snapshots)
        rows.append((*place, *map(str, counted), nbytes_text(here.snapshot_bytes)))
    yield from _table(rows)
    if not found.owners:
        yield "\nno owner of environments reports to this cluster"
        return
    yield ""
    rows = [("owner", "environment", "workers", "starting", "replaced", "created", "steps", "steps/s", "to store")]
    for owner in found.owners:
        workers = sum(there.workers for there in owner.nodes.values())
        numbers = (workers, owner.starting, owner.replaced, owner.created, owner.steps)
        rate_text = f"{owner.steps_per_second:.1f}"
        rows.append((owner.name, owner.env or "-", *map(str, numbers), rate_text, nbytes_text(owner.store_bytes)))
    yield from _table(rows)
    yield ""
    for owner in found.owners:
        yield f"{owner.name}: {events_of(owner)}"


def events_of(owner: Owner) -> str:
    """Failures and recoveries of an owner as text."""

    def told(counts: Mapping[str, int]) -> str:
        return ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items())) or "none"

    return f"failures: {told(owner.failures)}; recoveries: {told(owner.recoveries)}; paths dropped: {owner.dropped}"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
