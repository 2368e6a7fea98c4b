"""Marks in every writable place, and the search for them."""

import contextlib
import os

from .answers import AttemptAnswer, attempt, worked

_MORE = ("/root", "/tmp", "/var/tmp", "/run", "/etc", "/dev", "/dev/shm", "/dev/pts", "/dev/mqueue", "/run/.sandboxgym")


def _folders() -> "list[str]":
    """List every mount point, the usual places, and two levels below the control directory and the mount points."""
    with open("/proc/self/mountinfo") as file:
        points = [line.split()[4].replace("\\040", " ") for line in file]
    found = []
    for point in dict.fromkeys(points + list(_MORE)):
        if (
            not os.path.isdir(point)
            or point == "/proc"
            or (point.startswith("/proc/") and not os.access(point, os.W_OK))
        ):
            continue
        found.append(point)
        try:
            names = sorted(os.listdir(point))[:40]
        except OSError:
            continue
        found.extend(
            path
            for path in (os.path.join(point, name) for name in names)
            if os.path.isdir(path) and not os.path.islink(path)
        )
    return [path for path in dict.fromkeys(found) if not path.startswith("/proc/") or not path[6:7].isdigit()]


@attempt
def _mark(mark: str) -> AttemptAnswer:
    places = []
    for folder in _folders():
        path = os.path.join(folder, mark)
        try:
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600))
            places.append(path)
        except OSError:
            pass
        with contextlib.suppress(OSError, AttributeError):
            os.setxattr(folder, "user.attack", mark.encode())
    return worked(f"{len(places)} marks", places=places)


@attempt
def _find_mark(mark: str, places: "list[str]") -> AttemptAnswer:
    paths = dict.fromkeys(list(places) + [os.path.join(folder, mark) for folder in _folders()])
    found = [path for path in paths if os.path.lexists(path)]
    for folder in _folders():
        try:
            if os.getxattr(folder, "user.attack") == mark.encode():
                found.append(os.path.join(folder, "(attribute)"))
        except (OSError, AttributeError):
            pass
    return worked(f"{len(found)} marks", places=found)
