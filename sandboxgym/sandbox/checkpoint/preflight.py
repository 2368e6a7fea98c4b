"""Obstacles to capturing a container with its processes, found before CRIU tries.

Each obstacle found here would make CRIU fail, or worse, capture half of a connection whose other end is outside. All
other cases CRIU refuses by itself, and the container continues unharmed.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Collection, Iterable
from pathlib import Path

from sandboxgym.sandbox.checkpoint.unix_sockets import unix_sockets
from sandboxgym.sandbox.overlay.processes import offspring

_REFUSED_FILES = re.compile(r"anon_inode:\[?(io_uring|perf_event|bpf[\w-]*|userfaultfd|fanotify)\]?$")
_DEVICES = re.compile(r"/dev/(nvidia|kfd|dri/|accel/)")
_SOCKET = re.compile(r"socket:\[(\d+)\]$")
_PIPE = re.compile(r"pipe:\[(\d+)\]$")
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")
_RESOURCE = 24  # CAP_SYS_RESOURCE


def obstacles(init: int, leader: int, *, network: bool) -> tuple[str, ...]:
    """Reasons why the processes of a container cannot be captured; empty if none is known.

    Args:
        init: of the container, as the host numbers it, and so below.
        leader: the shell; it is captured with all that descends from it.
        network: the container shares the host's network.
    """
    found = _look(init, leader, network=network)
    # Processes come and go meanwhile: what is not seen twice was half a look at one of them.
    return tuple(sorted(set(found) & set(_look(init, leader, network=network)))) if found else ()


def _look(init: int, leader: int, *, network: bool) -> list[str]:
    infos = offspring(init)
    commands = {info.pid: info.command for info in infos}
    parents = {info.pid: info.parent for info in infos}
    inside = {leader}
    while more := {pid for pid, parent in parents.items() if parent in inside} - inside:
        inside |= more
    found = [f"not a descendant of the shell: {command}" for pid, command in commands.items() if pid not in inside]
    namespaces = _namespaces(leader)
    outside = _held_pipes((os.getpid(), init))
    connections = _connections(leader) if network else set()
    files = {pid: _files(pid) for pid in sorted(inside)}
    connected_outside = _connected_outside(
        leader, {match[1] for held in files.values() for _, target in held if (match := _SOCKET.match(target))}
    )
    root = _root_mount(leader)
    may_limit = _capabilities(os.getpid()) >> _RESOURCE & 1
    for pid, held in files.items():
        what = commands.get(pid, "?")
        status = _status(pid)
        if status.get("TracerPid", "0").strip() != "0":
            found.append(f"traced by another process: {what}")
        if not may_limit and set(status.get("Uid", "0").split()) - {"0"}:
            found.append(f"of another user, which needs CAP_SYS_RESOURCE here: {what}")
        own = _namespaces(pid)
        if own and own != namespaces:
            found.append(f"in namespaces of its own: {what}")
        for number, target in held:
            if refused := _REFUSED_FILES.match(target):
                found.append(f"holds {refused[1]} (fd {number}): {what}")
            elif _DEVICES.match(target):
                found.append(f"holds {target} (fd {number}): {what}")
            elif ((match := _PIPE.match(target)) and match[1] in outside) or _is_outer_fifo(pid, number, target, root):
                found.append(f"a pipe leads outside (fd {number}): {what}")
            elif (match := _SOCKET.match(target)) and match[1] in connections:
                found.append(f"a socket of the host's network (fd {number}): {what}")
            elif match and match[1] in connected_outside:
                found.append(f"a unix socket is connected with one outside (fd {number}): {what}")
    return found


def _namespaces(pid: int) -> list[str]:
    """Namespaces of a process; empty for one that ended, or is about to."""
    try:
        return [os.readlink(f"/proc/{pid}/ns/{name}") for name in _NAMESPACES]
    except OSError:
        return []


def _files(pid: int) -> list[tuple[str, str]]:
    found = []
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.append((number, os.readlink(f"/proc/{pid}/fd/{number}")))
    return found


def _held_pipes(pids: Iterable[int]) -> set[str]:
    """Numbers of the pipes that these processes hold an end of."""
    return {match[1] for pid in pids for _, target in _files(pid) if (match := _PIPE.match(target))}


def _connections(pid: int) -> set[str]:
    """Numbers of the internet sockets in a process's network namespace."""
    found: set[str] = set()
    for name in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6", "icmp", "icmp6"):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
            found |= {line.split()[9] for line in lines}
    return found


def _connected_outside(pid: int, held: Collection[str]) -> set[str]:
    """Unix sockets held by these processes that are connected with a socket that none of them holds."""
    if not held:
        return set()
    numbers = _unix_numbers(pid)
    # One that was accepted belongs to the network of who connected.
    outside = set(held) & (_unix_numbers(os.getpid()) - numbers)
    if not numbers.isdisjoint(held):
        with contextlib.suppress(OSError):  # then CRIU will refuse
            own = [one for one in unix_sockets(pid).values() if str(one.number) in held]
            waiting = {number for one in own for number in one.waiting}
            outside |= {
                str(one.number)
                for one in own
                if (str(one.peer) not in held if one.peer else one.connected and one.number not in waiting)
            }
    return outside


def _unix_numbers(pid: int) -> set[str]:
    """Numbers of the unix sockets in a process's network namespace."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/net/unix").read_text(errors="replace").splitlines()[1:]
        return {line.split(maxsplit=7)[6] for line in lines}
    return set()


def _root_mount(pid: int) -> str | None:
    """Number of the mount that a process sees at ``/``."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/mountinfo").read_text(errors="replace").splitlines():
            fields = line.split()
            if fields[4] == "/":
                return fields[0]
    return None


def _is_outer_fifo(pid: int, number: str, target: str, root: str | None) -> bool:
    """True if a descriptor is of a FIFO outside the sandbox's own files: others may hold its other end."""
    with contextlib.suppress(OSError):
        if target.startswith("/") and stat.S_ISFIFO(os.stat(f"/proc/{pid}/fd/{number}").st_mode):
            lines = Path(f"/proc/{pid}/fdinfo/{number}").read_text().splitlines()
            return f"mnt_id:\t{root}" not in lines
    return False


def _status(pid: int) -> dict[str, str]:
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
        return dict(line.partition(":")[::2] for line in lines)
    return {}


def _capabilities(pid: int) -> int:
    return int(_status(pid).get("CapEff", "0"), 16)
