"""Hiding of the files in an image that an agent must not see: removed before the first step, put back for the tests.

1. SWE-bench's images do not need it: only git reveals the solution there (`workspace`). In SWE-smith's images the
   repository has no bug yet, so its files, its history and every copy of them are the solution; R2E-Gym's contain the
   tests.
2. `prepare` makes an image safe for an agent: the bug is added if the image lacks it, in copies of the same files too
   (installed packages, build directories); compiled files of the repository are deleted, because they may be of other
   sources; the history becomes one commit; hidden files are deleted.
3. `archive` takes the hidden files from the original image; `put_back` places them over whatever is there later.
"""

from __future__ import annotations

import shlex
from collections import OrderedDict
from typing import TYPE_CHECKING

from sandboxgym.envs.swebench.rows.datasets import R2E
from sandboxgym.envs.swebench.rows.recipes import WORKDIR, modified_files
from sandboxgym.envs.swebench.rows.row_files import TaskError, shown
from sandboxgym.envs.swebench.rows.tasks import HOST, Task
from sandboxgym.sandbox.base import FileTooLarge, Result, SandboxUnavailable

if TYPE_CHECKING:
    from sandboxgym.envs.swebench.workspaces.workspace import RepositoryBox, WorkspaceSettings

BUG_PATCH = "/tmp/.bug.patch"
ARCHIVE = "/tmp/.hidden.tar"
ARCHIVE_LIMIT = 64 * 2**20
"""Limit in bytes of a task's hidden files."""
KEPT = 128 * 2**20
"""Limit in bytes of the hidden files cached in a process."""
_PATIENCE = 600.0

# Keeps the files without the bug, by which `_SPREAD` recognises their copies.
_REMEMBER = """clean=$(mktemp -d)
for path in "${touched[@]}"; do
  if [ -s "$path" ] && [ ! -L "$path" ]; then
    mkdir -p "$clean/$path"
    cp -p "$path" "$clean/$path/content"
  fi
done
"""
_BREAK = f"""git update-index -q --refresh > /dev/null || true
if ! git apply --index {BUG_PATCH} && ! {{ git apply --cached {BUG_PATCH} && git apply {BUG_PATCH}; }}; then
  git apply --check --reverse {BUG_PATCH} || {{ echo "the bug cannot be brought in"; exit 3; }}
  rm -rf "$clean"/* # it is there already
fi
"""
_SPREAD = """for number in "${!touched[@]}"; do
  path=${touched[number]}
  [ -f "$clean/$path/content" ] || continue
  places=(find "$root" -xdev \\( -path /proc -o -path /sys -o -path /dev -o -path "$clean" -o -name .git \\) -prune)
  "${places[@]}" -o -type f -path "*/${tails[number]}" -print0 | while IFS= read -r -d '' copy; do
    if [ "$copy" -ef "$path" ] || ! diff -q "$clean/$path/content" "$copy" > /dev/null; then continue; fi
    if [ -f "$path" ]; then cat "$path" > "$copy"; else rm -f "$copy"; fi
    name=${copy##*/}
    rm -f "${copy%/*}/__pycache__/${name%.py}".*.pyc
  done
done
rm -rf "$clean"
"""
_UNCOMPILE = f"""find {WORKDIR} \\( -name .git -o -name .venv -o -name node_modules \\) -prune \\
  -o -type f -name '*.pyc' -print0 | xargs -0 -r rm -f
"""
_ONE_COMMIT = """commit=$(git commit-tree -m "Initial commit" "$(git write-tree)")
git update-ref HEAD "$commit"
"""
SCRIPTS = (_REMEMBER, _BREAK, _SPREAD, _UNCOMPILE, _ONE_COMMIT)
"""Scripts run in an image. They are part of the cache key, so files prepared by other scripts are not reused."""


def prepare(box: RepositoryBox, task: Task) -> None:
    """Add the bug and remove what reveals the solution, in the sandbox of an original image.

    Raises:
        TaskError: the image is not the one that the row was made for.
        SandboxUnavailable: files cannot be hidden in this kind of sandbox, or the preparation failed.
    """
    if not (task.bug or task.hidden or task.removed):
        return
    if box.shares_root and any(path.startswith("/") and not _inside(path) for path in (*task.hidden, *task.removed)):
        raise SandboxUnavailable(
            f"{task.instance_id}: a row of {task.style} needs a sandbox with a root of its own, because its image has "
            "tests outside of the repository: backend='overlay', 'overlay-rootless' or 'docker'"
        )
    lines = ["set -e", f"cd {WORKDIR} || exit 4"]
    if task.style == R2E:
        lines.append(f"{_any_of(task.hidden)} || {{ echo 'none of its tests is there'; exit 4; }}")
    if task.bug:
        box.write_file(BUG_PATCH, task.bug.encode())
        touched = modified_files(task.bug)
        near = box.shares_root or task.image == HOST  # else every file of a whole machine would be looked at
        lines += [
            f"touched=({' '.join(map(shlex.quote, touched))})",
            f"tails=({' '.join(shlex.quote(_tail(path)) for path in touched)})",
            f"root={WORKDIR if near else '/'}",
            _REMEMBER,
            _BREAK,
            f"rm -f {BUG_PATCH}",
            _SPREAD,
        ]
    lines.append(_UNCOMPILE)
    if tracked := [path for path in task.hidden if not path.startswith("/")]:
        listed = " ".join(map(shlex.quote, tracked))
        lines.append(f"git rm -rqf --cached --ignore-unmatch -- {listed}")
    if gone := [*task.hidden, *task.removed]:
        lines.append(f"rm -rf -- {' '.join(map(shlex.quote, gone))}")
    if task.bug:
        lines.append(_ONE_COMMIT)
    done = box.run("\n".join(lines), timeout=_PATIENCE)
    if done.exit_code in (3, 4):
        column = ", column 'patch'" if done.exit_code == 3 else ""
        raise TaskError(f"{task.instance_id}{column}: {task.image!r} is not the image of this row: {_said(done)}")
    if done.exit_code:
        raise SandboxUnavailable(f"{task.instance_id} could not be prepared: {_said(done)}")


def _said(done: Result) -> str:
    """End of a script's output, for an error."""
    return " / ".join(shown(line, 300) for line in done.output.strip().splitlines()[-3:])


def _inside(path: str) -> bool:
    return path.startswith(f"{WORKDIR}/")


def _any_of(paths: tuple[str, ...]) -> str:
    return "{ " + " || ".join(f"[ -e {shlex.quote(path)} ]" for path in paths) + "; }"


def _tail(path: str) -> str:
    r"""End of a path by which copies of a file are recognised, for find's ``-path``.

    >>> _tail("src/pkg/mod.py"), _tail("src/mod[1].py"), _tail("a/b/c.py")
    ('pkg/mod.py', 'mod\\[1].py', 'b/c.py')
    """
    parts = path.split("/")
    if len(parts) > 1 and parts[0] in ("src", "lib"):
        parts = parts[1:]
    return "".join("\\" + letter if letter in "\\*?[" else letter for letter in "/".join(parts[-2:]))


_kept: OrderedDict[tuple[str, WorkspaceSettings], bytes] = OrderedDict()


def archive(task: Task, settings: WorkspaceSettings) -> bytes:
    """Archive a task's hidden files from its original image, as tar; empty if there are none.

    Raises:
        SandboxUnavailable: there is no such sandbox or image, or the files cannot be read or are too large.
    """
    if not task.hidden:
        return b""
    key = (task.digest, settings)
    found = _kept.get(key)
    if found is None:
        found = _kept[key] = _collect(task, settings)
        while sum(map(len, _kept.values())) > KEPT and len(_kept) > 1:
            _kept.popitem(last=False)
    _kept.move_to_end(key)
    return found


def _collect(task: Task, settings: WorkspaceSettings) -> bytes:
    relative = [path for path in task.hidden if not path.startswith("/")]
    lines = ["set -e", f"cd {WORKDIR}", "paths=()"]
    for path in relative:  # in an image with the bug, they are in the previous commit
        quoted = shlex.quote(path)
        lines.append(f"[ -e {quoted} ] || git checkout -q HEAD~1 -- {quoted} 2> /dev/null || true")
    for path in task.hidden:
        quoted = shlex.quote(path)  # relative ones stay so: another sandbox may have another root
        lines.append(f"if [ -e {quoted} ]; then paths+=({quoted}); fi")
    lines.append(f'tar -P -cf {ARCHIVE} --exclude=__pycache__ --exclude="*.pyc" -T /dev/null "${{paths[@]}}"')
    with settings.box(task) as box:
        box.make_repository(task)
        done = box.run("\n".join(lines), timeout=_PATIENCE)
        if done.exit_code:
            raise SandboxUnavailable(f"{task.instance_id}: its tests cannot be read: {_said(done)}")
        try:
            return box.read_file(ARCHIVE, limit=ARCHIVE_LIMIT)
        except FileTooLarge as error:
            raise SandboxUnavailable(f"{task.instance_id}: its tests are too large: {error}") from error


def put_back(box: RepositoryBox, task: Task, archived: bytes) -> None:
    """Put the hidden files where the tests look for them, in place of whatever is there.

    Raises:
        SandboxUnavailable: the files could not be written.
    """
    if not archived:
        return
    box.write_file(ARCHIVE, archived)
    there = " ".join(map(shlex.quote, task.hidden))
    done = box.run(
        f"cd {WORKDIR} && rm -rf -- {there} && tar -P --unlink-first -xf {ARCHIVE} && rm -f {ARCHIVE}",
        timeout=_PATIENCE,
    )
    if done.exit_code:
        raise SandboxUnavailable(f"{task.instance_id}: its tests cannot be placed: {_said(done)}")
