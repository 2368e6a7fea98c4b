"""Extraction of an agent's work as one patch, whatever the agent did to git, its index and its configuration.

1. git works in a directory of our own: its index, its configuration and its new objects are there, so that a stale
   lock, a broken configuration, hooks, filters, excluded or hidden files of the agent's repository change nothing. Only
   the objects of that repository are used. Attributes and ignored files count as they are in the tree.
2. A nested repository is read as plain files, unless the task's own tree has it as a submodule. Entries that git cannot
   store (pipes, sockets, devices) are left out.
3. If that fails, the files are copied as an archive over the task's own files, and the patch is made there. The only
   program of the agent's sandbox that this uses is tar.
4. A patch is bounded (`PATCH_LIMIT`), and so is the time spent on it. Every problem is reported.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

from sandboxgym.envs.swebench.rows.recipes import WORKDIR
from sandboxgym.envs.swebench.workspaces.workspace import EXTRACTED, NO_PIPES, Pristine, RepositoryBox
from sandboxgym.sandbox.base import FileTooLarge, Result, SandboxError
from sandboxgym.sandbox.snapshot import SandboxSnapshot

log = logging.getLogger("sandboxgym")

PATCH_LIMIT = 4 * 2**20
"""Limit in bytes of a patch."""
ARCHIVE_LIMIT = 64 * 2**20
"""Limit in bytes of the archive (compressed if there is gzip) of a repository that cannot be read in place."""
SECONDS = 300.0
"""Timeout in seconds of reading the work."""
_SAID = 300  # limit in characters of a reported problem
_PATCH = f"{EXTRACTED}/patch"
_ARCHIVE = f"{EXTRACTED}/files.tar"
_DIRECTORY = f"""set -e
if [ ! -d /tmp ] || [ -L /tmp ]; then rm -f /tmp; fi
mkdir -p /tmp
rm -rf {EXTRACTED}
mkdir {EXTRACTED}
"""
# Writes the difference between the files and the start. It runs in a copy of the sandbox that is thrown away.
_DIFF = f"""
cd {WORKDIR}
[ "$(id -u)" = 0 ] || chmod -R u+rwX . || true
{NO_PIPES}
objects=$PWD/.git/objects
if [ ! -d "$objects" ]; then
  no_pipes .git
  objects=$(git rev-parse --path-format=absolute --git-path objects)
fi
no_pipes "$objects/"
unset "${{!GIT_@}}"
export GIT_DIR={EXTRACTED}/git GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null HOME={EXTRACTED}
export GIT_OPTIONAL_LOCKS=0 XDG_CONFIG_HOME={EXTRACTED}
git init -q --bare --template= "$GIT_DIR"
export GIT_WORK_TREE=$PWD
mkdir -p "$GIT_DIR/objects/info"
printf '%s\\n' "$objects" > "$GIT_DIR/objects/info/alternates"
git config core.bare false
git config core.fileMode true
git config core.symlinks true
git read-tree "$REFERENCE"
submodules=$(git ls-files -s | sed -n 's/^160000 [^\\t]*\\t//p')
find . -mindepth 2 -name .git -prune -print0 | while IFS= read -r -d '' nested; do
  place=${{nested#./}}
  grep -qxF -e "${{place%/.git}}" <<< "$submodules" || rm -rf "$nested"
done
find . -path ./.git -prune -o ! -type f ! -type d ! -type l -exec rm -f {{}} +
left=0
git add -A --ignore-errors . 2> {EXTRACTED}/said || left=1
tail -c 1000 {EXTRACTED}/said
(
  ulimit -f {PATCH_LIMIT // 1024 + 1024}
  git diff --cached --binary --no-color --no-ext-diff --no-textconv --src-prefix=a/ --dst-prefix=b/ \\
    --output={_PATCH} "$REFERENCE"
)
exit $left
"""
_PACK = f"""
cd {WORKDIR}
if command -v gzip > /dev/null; then compress=z; fi
tar "-c${{compress:-}}f" {_ARCHIVE} --exclude=./.git .
"""
_UNPACK = f"""
cd {WORKDIR}
find . -mindepth 1 -maxdepth 1 ! -name .git -exec rm -rf {{}} +
tar -xf {_ARCHIVE} --no-same-owner
"""


@dataclass(frozen=True, slots=True)
class Work:
    """An agent's work in a sandbox."""

    patch: str = field(repr=False)
    """Patch; bytes that are not UTF-8 are surrogates in it."""
    problem: str = ""
    """Reason why the patch may be incomplete, or why the files had to be copied; nearly always empty."""
    too_large: bool = False
    """True if there is a patch, but it is longer than `PATCH_LIMIT`."""


class WorkLost(Exception):
    """Raised if a sandbox cannot be started on the agent's files, though one can on the task's original files."""


def extract(box: RepositoryBox, leaf: SandboxSnapshot, pristine: Pristine) -> Work:
    """Extract the changes since the start, commits included.

    Args:
        box: sandbox for the extraction; its content is lost.
        leaf: snapshot of the sandbox with the work.
        pristine: the task's files before any action.

    Raises:
        WorkLost: the agent removed what is needed to read the work, such as bash.
        SandboxError: the sandbox failed for a reason that is not the agent's.
    """
    files = leaf.files()
    try:
        box.restore(files)
        work = _diff(box, pristine)
    except (SandboxError, OSError) as error:
        box.restore(pristine.snapshot)
        box.run("true")
        raise WorkLost(str(error)) from error
    finally:
        files.release()
    if work.too_large or not work.problem or work.patch:
        return work
    # git, or what it needs, is broken here.
    try:
        packed = box.run(_DIRECTORY + _PACK, timeout=SECONDS)
        archive = box.read_file(_ARCHIVE, limit=ARCHIVE_LIMIT)
    except (OSError, SandboxError) as error:
        return Work("", f"{work.problem}; nor can the files be taken over: {error}"[:_SAID])
    if packed.exit_code not in (0, 1):  # 1: a file was not read
        return Work("", f"{work.problem}; nor can the files be taken over: {_said(packed)}"[:_SAID])
    box.restore(pristine.snapshot)
    made = box.run(_DIRECTORY, timeout=SECONDS)
    box.write_file(_ARCHIVE, archive)
    made = box.run(f"set -e\n{_UNPACK}", timeout=SECONDS)
    if made.exit_code:
        return Work("", f"{work.problem}; nor can the files be taken over: {_said(made)}"[:_SAID])
    taken = _diff(box, pristine)
    return taken if taken.problem else replace(taken, problem=f"{work.problem}; its files were taken over"[:_SAID])


def _diff(box: RepositoryBox, pristine: Pristine) -> Work:
    script = f"{_DIRECTORY}REFERENCE={pristine.reference}\n{_DIFF}"
    done = box.run(script, timeout=SECONDS)
    problem = ""
    if done.timed_out:
        problem = f"the work was not read in {SECONDS:g} s"
    elif done.exit_code:
        problem = f"the work cannot be read: {_said(done)}"[:_SAID]
    try:
        patch = box.read_file(_PATCH, limit=PATCH_LIMIT).decode("utf-8", "surrogateescape")
    except FileTooLarge:
        return Work("", too_large=True)
    except OSError as error:  # the agent may have replaced the programs, which may leave anything there
        log.info("no patch could be read: %s", error)
        return Work("", problem or f"the work cannot be read: {error}"[:_SAID])
    return Work(patch, problem)


def _said(done: Result) -> str:
    text = " ".join(done.output.split())
    return f"exit code {done.exit_code}" + (f", {text[-_SAID:]}" if text else "")
