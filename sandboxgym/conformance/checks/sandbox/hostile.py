"""Level 4: promises specific to sandboxes, tested with commands that try to break them.

The commands use no known security hole; they are commands that an agent may run by accident or for a reward. They are
defined in ``places.py`` and ``attacks.py``; checks of limits are in ``hostile_limits.py``. Every attack is bounded, and
its remains are removed afterwards.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sandboxgym.conformance.check import Budget, Failed, Inconclusive, Skipped, check
from sandboxgym.conformance.checks.sandbox import hostile_limits as hostile_limits  # registers its checks
from sandboxgym.conformance.harness import process_globals
from sandboxgym.conformance.sandbox_probes import attacks
from sandboxgym.conformance.sandbox_probes import places as place_probes
from sandboxgym.conformance.sandbox_probes.places import KINDS, Place
from sandboxgym.conformance.sandbox_probes.shell import located, start, stop
from sandboxgym.conformance.sandbox_probes.yard import Untyped, Yard, yard_of
from sandboxgym.conformance.subject import AnyEnv, Subject
from sandboxgym.conformance.supervision import processes
from sandboxgym.system import run_directories

_AFTER = ("api.protocol",)
_SHOWN = 40
_DEEPEST, _ENTRIES = 9, 50_000
"""Most levels and entries that are searched for leftovers."""
_PATIENCE = 10.0
"""Seconds within which another process may clear leftovers."""


# Places.


@dataclass
class Row:
    """Result of the marks in one place."""

    place: Place
    declared: bool
    leaks: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The row as JSON values, for the evidence."""
        measured = "leaked" if self.leaks else "lost" if self.lost else "kept"
        row: dict[str, Any] = {"probe": self.place.path, "declared": self.declared, "measured": measured}
        return row | ({"leaks": self.leaks} if self.leaks else {}) | ({"lost": self.lost} if self.lost else {})


@check(
    "hostile.places",
    level=4,
    after=_AFTER,
    hazard="A directory of the sandbox that no snapshot covers (a control directory, a mount, a hidden one) carries "
    "files to a sibling, to the next task or past a restore: rewards are then earned with what another episode found.",
    blind="Places where only existing files can be written, or that the bounded search does not reach; what is passed "
    "on by other means than files. Without Subject.shell, everything.",
)
def places(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Leaves a mark (a small file or directory) in every place found in the sandbox where one can be made, up to 400.
    Places are found from inside: mounts, hidden and well-known directories, those in variables and open descriptors.
    Marks are made before a snapshot, after it, in a fork, before a reset and before another task. Fails if a mark shows
    where it was not made (after a restore or reset, in a sibling, another environment, the next task, on this machine),
    or if one from before the snapshot is gone from the file system of the working directory and not declared lost.
    """
    with yard_of(subject) as yard, place_probes.own_folders() as folders:
        env = yard.opened()
        shared = place_probes.shares_files(yard.asks(env), folders)
        found: list[Place] = []
        reached: list[str] = []
        alive: list[AnyEnv] = [env]
        try:
            found += place_probes.walk(yard.asks(env), yard.token, "before", shared=shared)
            if not found:
                raise Inconclusive("a mark could be made nowhere: does Subject.shell run POSIX shell?")
            loses = subject.capabilities.loses
            gone = {"/dev/shm": "file.shm" in loses, "/tmp": "file.tmp" in loses}
            rows = [Row(place, place.own and not gone.get(place.path, False)) for place in found]
            _followed(yard, rows, env, alive)
        finally:
            for other in alive:
                with contextlib.suppress(Exception):
                    place_probes.remove(yard.asks(other), found, yard.token)
                    yard.type(other, stop(yard.token))
            reached += place_probes.remove_outside(found, yard.token)
        for row in rows:
            if row.place.path in reached and not shared:
                row.leaks.append("it is this machine's")
        evidence = _places_told(rows, shared)
        if leaks := [row for row in rows if row.leaks]:
            raise Failed(_leaks_told(leaks, shared), evidence)
        if lost := [row for row in rows if row.lost and row.declared]:
            names = ", ".join(row.place.path for row in lost[:8])
            raise Failed(f"files are lost in {len(lost)} places: {names} ({lost[0].lost[0]})", evidence)
    return evidence


def _leaks_told(leaks: Sequence[Row], shared: bool) -> str:
    by_way: dict[tuple[str, ...], list[str]] = {}
    for row in leaks:
        by_way.setdefault(tuple(row.leaks), []).append(row.place.path)
    parts = [f"{', '.join(paths[:8])}{' …' * (len(paths) > 8)}: {'; '.join(ways)}" for ways, paths in by_way.items()]
    note = " (the sandbox writes into this machine's own directories: it isolates no files)" if shared else ""
    return f"marks show where they were not made. {'. '.join(parts)}{note}"


def _places_told(rows: Sequence[Row], shared: bool) -> dict[str, Any]:
    return {
        "places": len(rows),
        "isolated": not shared,
        "lost and not declared": [row.place.path for row in rows if row.lost and not row.declared][:_SHOWN],
        "leaked": [row.place.path for row in rows if row.leaks][:_SHOWN],
        "matrix": [row.to_json() for row in sorted(rows, key=lambda row: not (row.leaks or row.lost))[:_SHOWN]],
    }


def _followed(yard: Yard, rows: Sequence[Row], env: AnyEnv, alive: list[AnyEnv]) -> None:
    """Make all marks and find where each of them shows; ``env`` has the marks from before the snapshot."""
    scene, token, found = yard.scene, yard.token, [row.place for row in rows]

    def look(who: AnyEnv, words: str, expected: str = "") -> None:
        for row, marks in zip(rows, place_probes.found(yard.asks(who), found, token)):
            strange = [KINDS[letter] for letter in marks if letter in KINDS and letter not in expected]
            if strange and len(row.leaks) < 4:
                row.leaks.append(f"{words} shows the mark made {_when(strange)}")
            if "b" in expected and "b" not in marks and "x" not in marks:
                row.lost.append(f"{words} lacks the mark made before the snapshot")
            elif "b" in expected and "x" in marks:
                row.declared = False  # the directory itself is one of each start

    def mark(who: AnyEnv, kind: str) -> None:
        place_probes.mark(yard.asks(who), found, token, kind)

    snap = scene.snapshot(env)
    changing, watching = scene.fork(env, 2)
    other = yard.opened(seed=2)
    alive += [changing, watching, other]
    mark(env, "after")
    mark(changing, "fork")
    look(env, "the parent, after a fork was marked,", "ba")
    look(watching, "a sibling", "b")
    look(other, "another environment")
    scene.restore(env, snap)
    look(env, "the environment itself, restored to before it,", "b")
    scene.restore(other, snap)
    look(other, "another environment that was restored", "b")
    mark(other, "reset")
    yard.reset(other, seed=2)
    look(other, "the environment itself, reset,")
    mark(env, "task")
    yard.reset(env, seed=3, task=1)
    look(env, "the next task")
    mark(env, "after")
    place_probes.found(yard.asks(env), found, token)
    alive.remove(env)
    scene.close(env)
    look(watching, "a sibling, when the parent was closed,", "b")
    late = yard.opened(seed=4)
    alive.append(late)
    look(late, "an environment that was made later")


def _when(kinds: Sequence[str]) -> str:
    words = {"before": "before the snapshot", "after": "after it", "fork": "in a fork", "task": "in the task before"}
    return " and ".join(words.get(kind, "before the reset") for kind in kinds)


@check(
    "hostile.devices",
    level=4,
    after=_AFTER,
    hazard="One sandbox's chmod or chown on /dev/null, which an innocent command in a build script may do, changes it "
    "for all others and for the machine.",
    blind="Devices whose time cannot be changed; block devices and terminals; if the sandbox shares this machine's "
    "files, all but /dev/full. Without Subject.shell, everything.",
)
def devices(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Changes the modification time of device nodes, and of single files that are mounted, where the sandbox lets it.
    Also sets their sticky bit, which has no effect. Fails if the new time shows in a sibling, in another environment
    or on this machine; puts all back.
    """
    with yard_of(subject) as yard:
        env = yard.opened()
        (watching,) = yard.scene.fork(env, 1)
        other = yard.opened(seed=2)
        leaks: dict[str, list[str]] = {}
        before = _outside()
        with place_probes.own_folders() as folders:
            nodes = _ONE if place_probes.shares_files(yard.asks(env), folders) else _ALL
        moment = 915_148_800 + int.from_bytes(secrets.token_bytes(3))
        try:
            listed = attacks.told(yard.type(env, _touching(moment, nodes))).split()
            changed = listed[1:]
            if listed[:1] != ["nodes:"]:
                raise Inconclusive("the sandbox's shell did not get through the list of devices")
            for who, words in ((watching, "a sibling"), (other, "another environment")):
                for name in set(attacks.told(yard.type(who, _touched(moment, nodes))).split()):
                    leaks.setdefault(name, []).append(words)
            for name in changed:
                if _mtime(name) == moment:
                    leaks.setdefault(name, []).append("this machine")
        finally:
            with contextlib.suppress(Exception):
                yard.type(env, _untouching())
            for name, (mode, accessed, modified) in before.items():
                if _mtime(name) == moment:  # the sandbox ended before it could put it back
                    os.chmod(name, mode)
                    os.utime(name, ns=(accessed, modified))
        evidence = {"changed inside": changed[:_SHOWN], "changed elsewhere": leaks}
        if leaks:
            where = ", ".join(dict.fromkeys(words for found in leaks.values() for words in found))
            raise Failed(f"changed metadata of {', '.join(sorted(leaks)[:12])} shows in {where}", evidence)
    return evidence


_NODES = """for f in $nodes; do
  case $f in /dev/pts/*|/dev/tty*|/dev/console) continue;; esac
  { [ -h "$f" ] || [ -d "$f" ] || [ -b "$f" ] || ! [ -e "$f" ]; } && continue
"""
_ALL, _ONE = "/dev/* $(cut -d' ' -f5 /proc/self/mountinfo)", "/dev/full"
"""Device nodes that are tried: all, or one harmless one if the sandbox isolates no files and they are the machine's."""


def _outside() -> dict[str, tuple[int, int, int]]:
    """Mode and times of this machine's device nodes."""
    found = {}
    for path in Path("/dev").iterdir() if Path("/dev").is_dir() else ():
        with contextlib.suppress(OSError):
            status = path.lstat()
            if stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
                found[str(path)] = (stat.S_IMODE(status.st_mode), status.st_atime_ns, status.st_mtime_ns)
    return found


def _mtime(name: str) -> int:
    try:
        return int(os.stat(name, follow_symlinks=False).st_mtime)
    except OSError:
        return 0


def _touching(moment: int, nodes: str) -> str:
    # A node may show under several names: what is put back is what the first one found.
    return located(f"""( set +f; : > "$B/nodes"; : > "$B/changed"; nodes=$(echo {nodes}); {_NODES}
  was=$(stat -c '%Y %a' "$f") || continue
  if [ "${{was%% *}}" != {moment} ]; then
    echo "$was $f" >> "$B/nodes"
    touch -c -d @{moment} "$f" && chmod +t "$f"
  fi
  if [ "$(stat -c %Y "$f")" = {moment} ]; then echo "$f" >> "$B/changed"; fi
done
echo "@@nodes: $(sort -u "$B/changed" | tr '\\n' ' ')@@" ) 2>/dev/null""")


def _touched(moment: int, nodes: str) -> str:
    script = f'if [ "$(stat -c %Y "$f")" = {moment} ]; then printf \'%s \' "$f"; fi'
    body = f"set +f; nodes=$(echo {nodes}); echo '@@'; {_NODES} {script}; done; echo '@@'"
    return f"( {body} ) 2>/dev/null | tr -d '\\n'; echo"


def _untouching() -> str:
    script = 'touch -c -d "@$time" "$f"; chmod "$mode" "$f"'
    return located(f'( while read -r time mode f; do {script}; done < "$B/nodes"; echo ) 2>/dev/null')


# Directories.


@check(
    "hostile.deep_trees",
    level=4,
    after=_AFTER,
    hazard="A loop of mkdir and cd makes snapshot, fork or reset end in RecursionError, or lose the files below, in "
    "the middle of training.",
    blind="Depths beyond those tried. Without Subject.shell, everything.",
)
def deep_trees(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Nests 1,500 directories, and elsewhere 40 with names of 200 letters; at the bottom of both lies a file.
    Then takes a snapshot, forks, restores it in another environment, restores an earlier one, resets and closes. Fails
    unless each call works or is refused with an exception type of the sandbox's own, no file is lost in silence, and
    the files are gone after the restore of the earlier snapshot and after the reset.
    """
    with yard_of(subject) as yard:
        env = yard.opened()
        base = yard.scene.snapshot(env)
        reached = attacks.told(yard.type(env, attacks.nesting(yard.token)))
        if attacks.told(yard.type(env, attacks.bottoms(yard.token))) != "2":
            raise Skipped(f"the sandbox does not let directories nest so deeply: {reached or 'no answer'}")
        calls: dict[str, str] = {}
        wrong: list[str] = []

        def called(name: str, function: Callable[[], Any]) -> list[Any]:
            results: list[Any] = []
            try:
                calls[name] = yard.refused(lambda: results.append(function())) or "works"
            except Untyped as error:
                calls[name] = str(error)
                wrong.append(f"{name}: {error}")
            return results

        def below(who: AnyEnv, name: str, expected: str) -> None:
            found = called(f"a look {name}", lambda: attacks.told(yard.type(who, attacks.bottoms(yard.token))))
            if found and found[0] != expected:
                what = "are lost" if expected == "2" else "are still there"
                seen = f"{found[0]} of 2 are there" if found[0] else "the shell gave no answer"
                wrong.append(f"{name}: files below deep directories {what} ({seen})")

        snaps = called("snapshot", lambda: yard.scene.snapshot(env))
        below(env, "after the snapshot", "2")
        for children in called("fork", lambda: yard.scene.fork(env, 1)):
            below(children[0], "in the fork", "2")
            called("close of a fork", lambda: yard.scene.close(children[0]))  # noqa: B023
        other = yard.opened(seed=2)
        for snap in snaps:
            if called("restore in another environment", lambda: yard.scene.restore(other, snap)):  # noqa: B023
                below(other, "restored in another environment", "2")
                called("snapshot of the restored", lambda: yard.scene.snapshot(other))
        if called("restore to before", lambda: yard.scene.restore(env, base)):
            below(env, "restored to before", "0")
            yard.type(env, attacks.nesting(yard.token))
        if called("reset", lambda: env.reset(seed=1, options=subject.options(0))):
            yard.type(env, start())
            below(env, "after a reset", "0")
            yard.type(env, attacks.nesting(yard.token))
        called("close", lambda: yard.scene.close(env))
        evidence = {"nested": reached, "matrix": [{"probe": name, "measured": how} for name, how in calls.items()]}
        if wrong:
            raise Failed("; ".join(wrong), evidence)
    return evidence


@check(
    "hostile.leftovers",
    level=4,
    after=_AFTER,
    hazard="close() cannot clear what hostile commands leave (deep or locked directories, odd names, processes that "
    "are stopped or ignore signals): disks and process tables fill with every episode.",
    blind="Directories outside of TMPDIR and the run directories of this package; processes that this machine does not "
    "see. Without Subject.shell, everything.",
)
def leftovers(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Runs commands that leave deep, locked or oddly named directories, and processes stopped or ignoring signals.
    Then takes a snapshot, and closes and releases everything. All this is done twice. Fails if one of these processes
    or directories is still there ten seconds later, or if the number of mounts grows both times.
    """
    # Run directories of a package that has made its own before are where it was told then.
    elsewhere = [Path(tempfile.gettempdir()), run_directories.runtime_dir(create=False)]
    with process_globals.private_temporary() as folder:
        left: set[str] = set()
        alive: set[int] = set()
        mounts = [len(_mounts(folder, elsewhere))]
        ran = 0
        for seed in range(2):
            token = secrets.token_hex(8)
            try:
                with yard_of(subject) as yard:
                    env = yard.opened(seed=seed)
                    commands = [attacks.leaving(place, token) for place in _few(yard, env)]
                    for command in (*commands, attacks.lingering(token)):
                        ran += attacks.told(yard.type(env, command)) == token
                    yard.refused(lambda: yard.scene.snapshot(env))  # noqa: B023

                def cleared(token: str = token) -> bool:
                    return not attacks.visible(token) and not _named(folder, elsewhere, token)

                processes.until(cleared, _PATIENCE)
                alive |= set(attacks.visible(token))
                left |= set(_named(folder, elsewhere, token))
            finally:
                attacks.end_visible(token)
            mounts.append(len(_mounts(folder, elsewhere)))
        attacks.remove(folder)
    if not ran:
        raise Inconclusive("the sandbox's shell did not get through the scripts")
    evidence = {"directories": sorted(left)[:_SHOWN], "processes": len(alive), "mounts": mounts}
    parts = [f"{len(alive)} processes are alive after close()"] if alive else []
    if left:
        parts.append(f"directories are left after close(), such as {min(left)}")
    if mounts[-1] > mounts[1] > mounts[0]:
        parts.append(f"mounts are left after close(): {mounts[0]}, {mounts[1]}, {mounts[2]}")
    if parts:
        raise Failed("; ".join(parts), evidence)
    return evidence


def _few(yard: Yard, env: AnyEnv) -> list[Place]:
    """The working directory, and one that no snapshot covers; no directory of the machine's own."""
    ask = yard.asks(env)
    with place_probes.own_folders() as folders:
        shared = place_probes.shares_files(ask, folders)
    found = place_probes.walk(ask, yard.token, "before", shared=shared)
    place_probes.remove(ask, found, yard.token)
    if shared:
        return found[:1]
    strange = [place for place in found if not place.own and place.disk]
    return [*found[:1], *strange[:1]]


def _owned(folder: Path, elsewhere: Iterable[Path]) -> list[Path]:
    """A directory of this check, and those elsewhere that are named after this process."""
    return [folder, *(path for parent in set(elsewhere) for path in parent.glob(f"*-{os.getpid()}-*") if path.is_dir())]


def _mounts(folder: Path, elsewhere: Iterable[Path]) -> list[str]:
    return [mount for path in _owned(folder, elsewhere) for mount in processes.mounts_under(path)]


def _named(folder: Path, elsewhere: Iterable[Path], token: str) -> list[str]:
    """Entries with a token in their names, near the top: the directories below may be nested without end."""
    found, level, seen = [], [str(path) for path in _owned(folder, elsewhere)], 0
    for _ in range(_DEEPEST):
        below = []
        for path in level:
            with contextlib.suppress(OSError), os.scandir(path) as entries:
                for entry in entries:
                    seen += 1
                    if token in entry.name:
                        found.append(entry.path)
                    elif entry.is_dir(follow_symlinks=False) and seen < _ENTRIES:
                        below.append(entry.path)
        level = below
    return found
