"""Places in a sandbox where a file can be left: found from inside, marked, and read again.

1. Places are found by POSIX shell commands that run like an agent's: mount points, directories below them, well-known
   directories, hidden ones, those of variables and of open descriptors. Their number, depth and time are bounded.
2. A mark is an empty directory or a file of a few bytes whose name holds a unique token. Existing files are not
   changed.
3. A sandbox that writes into the suite's own directories does not isolate files. Then only places for temporary files,
   the home and the working directory are marked, because the others belong to the machine.
4. All marks are removed at the end: from inside, and from outside where they appeared there.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sandboxgym.conformance.sandbox_probes.shell import MARK
from sandboxgym.conformance.supervision import scratch

KINDS = {"b": "before", "a": "after", "f": "fork", "t": "task", "r": "reset"}
"""Time of a mark, by its letter in the output that `found` reads."""
MOST = 400
"""Most places that are marked."""
_TRIED = 2500
"""Most places that are tried."""
_PAGE = 6000
"""Most bytes that one command prints, because sandboxes cut out the middle of long outputs."""
_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "proc", "sysfs", "cgroup", "mqueue", "devpts", "debugfs", "tracefs", "huge")
"""Beginnings of names of file systems in memory."""

_SCRATCH = '"$PWD" "$HOME" "${TMPDIR:-/tmp}" /tmp /var/tmp /dev/shm'
_KNOWN = (
    "/ /run /run/lock /run/user /var/run /dev /dev/mqueue /dev/pts /dev/hugepages /proc /proc/sys /proc/sys/kernel "
    "/proc/sys/fs/binfmt_misc /sys /sys/fs/cgroup /sys/fs/bpf /sys/kernel/tracing/instances /sys/kernel/config /etc "
    "/opt /srv /mnt /media /root /home /boot /usr /usr/local /var /var/lib /var/cache /var/log /var/spool /lost+found "
    '/proc/1/root /proc/1/cwd /proc/self/root "$OLDPWD" "$TMP" "$TEMP" "$XDG_RUNTIME_DIR" "$XDG_CACHE_HOME" '
    '"$XDG_CONFIG_HOME" "$XDG_DATA_HOME" "$XDG_STATE_HOME" "$HOME/.cache" "$HOME/.config" "$HOME/.local/share"'
)
# A mount point of /proc or /sys has thousands of directories in which root may write and nothing can be made.
_CANDIDATES = f"""
printf '%s\\n' {_SCRATCH}
if [ @SHARED@ = no ]; then
  printf '%s\\n' {_KNOWN}
  for d in /run/* /run/.[!.]* /dev/* /dev/.[!.]* /tmp/.[!.]* /var/tmp/.[!.]* /home/* /run/user/* "$HOME"/.[!.]*; do
    if [ -d "$d" ] && ! [ -h "$d" ]; then printf '%s\\n' "$d"; fi
  done
  printf '%s\\n' "$PATH" | tr : '\\n'
  for f in /proc/self/fd/* /proc/$$/fd/* /proc/1/fd/*; do
    if [ -d "$f/." ]; then printf '%s\\n' "$f"; fi
    t=$(readlink "$f") && [ "${{t#/}}" != "$t" ] || continue
    if [ -d "$t" ]; then printf '%s\\n' "$t"; else printf '%s\\n' "${{t%/*}}"; fi
  done
  w=; find / -maxdepth 0 -writable >/dev/null 2>&1 && w=-writable
  limit=; command -v timeout >/dev/null 2>&1 && limit='timeout 1'
  cut -d' ' -f5,6 /proc/self/mountinfo | sed '/ ro,/d; / ro$/d; s/ [^ ]*$//; s/\\\\040/ /g' | sort -u > "$B/mounts"
  [ -s "$B/mounts" ] || echo / > "$B/mounts"
  cat "$B/mounts"
  late=$(($(date +%s) + 4))
  while IFS= read -r p; do
    [ -d "$p" ] || continue
    [ $(date +%s) -lt $late ] || break
    case $p in /proc|/proc/*) continue;; /sys|/sys/*) n=20; deep='1 2';; *) n=60; deep='1 2 3 4 6';; esac
    $limit find "$p" -xdev -maxdepth 8 $w -type d -name '.[!.]*' 2>/dev/null | head -n $n
    for k in $deep; do $limit find "$p" -xdev -mindepth $k -maxdepth $k $w -type d 2>/dev/null | head -n $n; done
  done < "$B/mounts"
fi
"""
_MARK = """
mark() {
  f="$1/@NAME@-$2"
  { printf '%s\\n' "@NAME@" > "$f"; } 2>/dev/null
  [ -e "$f" ] && return
  case $1 in /sys/*|/proc/*|/dev/*) mkdir "$f" 2>/dev/null;; *) false;; esac
}
"""


@dataclass(frozen=True, slots=True)
class Place:
    """A directory in which a mark could be made.

    Attributes:
        path: as the sandbox names it.
        own: True if it is on the file system of the working directory, which any snapshot of files covers.
        disk: True if files there take space on a disk, not in memory.
    """

    path: str
    own: bool
    disk: bool


Ask = Callable[[str], str]
"""Function that runs a command in a sandbox and returns its output."""


class Unreadable(Exception):
    """The sandbox's shell did not complete a script; the message holds its output."""


def walk(ask: Ask, token: str, kind: str, *, shared: bool) -> list[Place]:
    """Find the places of a sandbox and mark them; the shell must be in the directory in which `shell.start` ran.

    Args:
        ask: runs commands in the sandbox.
        token: text unique to the run.
        kind: time of the marks, a value of `KINDS`.
        shared: True if the sandbox writes into directories of its machine; see point 3 of the module's description.

    Raises:
        Unreadable: the shell does not run the script.
    """
    script = f"""(
set +f; B=$PWD/{MARK}; LC_ALL=C
{_MARK}
{{ {_CANDIDATES} }} 2>/dev/null | grep '^/' | grep -v '[^ -~]' | grep -v '/{MARK}' | head -n {_TRIED} > "$B/candidates"
home=$(stat -c %d . 2>/dev/null || echo '?'); n=0; seen='|'
while IFS= read -r d; do
  [ -d "$d/." ] && mark "$d" {kind} || continue
  s=$(stat -L -c '%d %i' "$d/." 2>/dev/null || echo "? $d")
  case $seen in *"|$s|"*) continue;; esac
  seen="$seen$s|"; n=$((n+1))
  o=-; [ "${{s%% *}}" = "$home" ] && o=o
  printf '%s %s %s\\n' "$o" "$(stat -f -c %T "$d/." 2>/dev/null || echo '?')" "$d"
  [ $n -lt {MOST} ] || break
done < "$B/candidates" > "$B/places"
echo "@@$(wc -c < "$B/places" | tr -d ' ')@@" )
"""
    size = _framed(ask(_filled(script, token, shared)))
    if not size.isdigit():
        raise Unreadable(f"expected the size of the list of places, found {size[:100]!r}")
    pages = []
    for page in range(-(-int(size) // _PAGE)):
        command = f"dd if={MARK}/places bs={_PAGE} skip={page} count=1 2>/dev/null | sed 's/^/:/'"
        pages.append(_lines(_framed(ask(f"echo '@@'; {command}; echo; echo '@@'"))))
    return [_place(line) for line in "".join(pages).splitlines() if line.count(" ") >= 2]


def _lines(page: str) -> str:
    """Lines of a part of a file; each ends in a colon, because shells and hooks cut off trailing blanks."""
    text = page.replace("\r", "").strip("\n")
    found = "\n".join(line.removeprefix(":") for line in text.split("\n"))
    return found if len(found) >= _PAGE else f"{found}\n"


def _place(line: str) -> Place:
    own, kind, path = line.split(" ", 2)
    return Place(path, own == "o", not kind.startswith((*_MEMORY, "?")))


def mark(ask: Ask, places: Sequence[Place], token: str, kind: str) -> None:
    """Mark places again.

    Raises:
        Unreadable: the shell does not run the script.
    """
    body = f'{_MARK}while IFS= read -r d; do mark "$d" {kind}; done'
    if _framed(ask(_over(places, token, f"{body} <<'@EOF@'", "echo '@@marked@@'"))) != "marked":
        raise Unreadable("the shell did not get through the marks")


def found(ask: Ask, places: Sequence[Place], token: str) -> list[str]:
    """Letters of the marks (`KINDS`) in each place; ``x`` where the directory does not exist.

    Raises:
        Unreadable: the shell does not run the script.
    """
    letters = " ".join(f"{letter}:{name}" for letter, name in KINDS.items())
    body = f"""i=0; echo '@@'
while IFS= read -r d; do
  s=; for k in {letters}; do if [ -e "$d/@NAME@-${{k#*:}}" ]; then s=$s${{k%%:*}}; fi; done
  [ -d "$d/." ] || s=x
  if [ -n "$s" ]; then printf '%s' "$i$s "; fi; i=$((i+1))
done <<'@EOF@'"""
    seen = [""] * len(places)
    text = _framed(ask(_over(places, token, body, "echo '.@@'")))
    if not text.endswith("."):
        raise Unreadable(f"expected the marks of {len(places)} places, found {text[-100:]!r}")
    for number, marks in re.findall(r"(\d+)([a-z]+)", text):
        seen[int(number)] = marks
    return seen


def remove(ask: Ask, places: Sequence[Place], token: str) -> None:
    """Remove all marks that a sandbox can reach."""
    kinds = " ".join(KINDS.values())
    body = f"""while IFS= read -r d; do
  for k in {kinds}; do f="$d/@NAME@-$k"; if [ -e "$f" ]; then rm -f "$f" || rmdir "$f"; fi; done
done 2>/dev/null <<'@EOF@'"""
    ask(_over(places, token, body, "echo removed"))


def remove_outside(places: Sequence[Place], token: str) -> list[str]:
    """Remove marks that appeared in this machine's own directories; return these directories."""
    reached = []
    for place in places:
        for kind in KINDS.values():
            path = Path(place.path, f"{_name(token)}-{kind}")
            with contextlib.suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()
                reached.append(place.path)
    return list(dict.fromkeys(reached))


@contextlib.contextmanager
def own_folders() -> Iterator[list[Path]]:
    """Context of empty directories of the suite; a sandbox that shares files with the machine shows at least one."""
    with contextlib.ExitStack() as stack:
        folders = []
        for parent in {tempfile.gettempdir(), "/var/tmp", os.path.expanduser("~"), os.getcwd()}:
            with contextlib.suppress(OSError):
                made = scratch.folder(parent, hidden=True)
                folders.append(Path(stack.enter_context(made)))
                folders[-1].chmod(0o777)
        yield folders


def shares_files(ask: Ask, folders: Sequence[Path]) -> bool:
    """True if the sandbox's writes to these directories appear there."""
    names = " ".join(f"'{folder}'" for folder in folders)
    ask(f'for d in {names}; do if [ -d "$d" ]; then echo 2>/dev/null > "$d/written"; fi; done; echo tried')
    return any((folder / "written").exists() for folder in folders)


def _name(token: str) -> str:
    return f".{MARK}-{token}"


def _over(places: Sequence[Place], token: str, body: str, last: str) -> str:
    listed = "\n".join(place.path for place in places)
    return _filled(f"(\nset +f\n{body}\n{listed}\n@EOF@\n{last} )", token, False)


def _filled(script: str, token: str, shared: bool) -> str:
    fills: Mapping[str, str] = {"@NAME@": _name(token), "@SHARED@": "yes" if shared else "no"}
    for hole, value in fills.items():
        script = script.replace(hole, value)
    return script


def _framed(output: str) -> str:
    """Text between two ``@@``."""
    parts = output.replace("\r", "").split("@@")
    if len(parts) < 3:
        raise Unreadable(f"expected an answer between two @@, found {output[-200:]!r}")
    return parts[-2].strip()
