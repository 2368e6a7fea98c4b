"""Sandboxes with a task's repository in place, without anything that reveals the solution.

1. `pristine` returns a task's files at the start of an episode: prepared once per machine (`prepared`), then shared by
   every reset, fork and verdict of every process.
2. Everything that git could reach beyond the starting commit is removed from the repository first: remotes, branches,
   tags and stashes that are not part of its history, reflogs, and the objects that only those held. Tags of the past
   stay, for packages that compute their version from them. Other files that reveal the solution, in the images of
   further training sets, are hidden (`hiding`).
3. A `RepositoryBox` looks the same for every backend: the repository is at ``/testbed`` in commands, files and output,
   even if the backend has no root file system of its own.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import shlex
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sandboxgym.envs.swebench.rows.recipes import WORKDIR
from sandboxgym.envs.swebench.rows.tasks import HOST, Task, TaskError
from sandboxgym.envs.swebench.workspaces import hiding, prepared
from sandboxgym.errors import SnapshotReleased
from sandboxgym.sandbox.agent.box import HASHED, AgentBox
from sandboxgym.sandbox.base import Limits, Result, RootFS, SandboxClosed, SandboxUnavailable
from sandboxgym.sandbox.files.rootfs import resolve
from sandboxgym.sandbox.layers.written import Written, changes
from sandboxgym.sandbox.overlay.runtime import runtime
from sandboxgym.sandbox.sandbox import Sandbox, SnapshotMode, make_sandbox
from sandboxgym.sandbox.snapshot import SandboxSnapshot

KEPT = 64
"""Number of prepared tasks kept in a process; the least recently used one is dropped and loaded again when needed."""

PATCH_FILE = "/tmp/patch.diff"
EVAL_SCRIPT = "/eval.sh"
EXTRACTED = "/tmp/.model.patch"
"""Directory in which `extraction` makes its patch."""
HISTORY = "/tmp/.history"
OWN_PATHS = (WORKDIR, PATCH_FILE, EVAL_SCRIPT, EXTRACTED, HISTORY, hiding.BUG_PATCH, hiding.ARCHIVE)
"""Paths replaced in commands and output too, not only in arguments of `read_file` and `write_file`."""

_QUIET = {
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "MANPAGER": "cat",
    "LESS": "-R",
    "PIP_PROGRESS_BAR": "off",
    "TQDM_DISABLE": "1",
    # Commit ids must not depend on the clock, nor printed text on the order of sets.
    "GIT_AUTHOR_NAME": "agent",
    "GIT_AUTHOR_EMAIL": "agent@localhost",
    "GIT_AUTHOR_DATE": "2000-01-01T00:00:00Z",
    "GIT_COMMITTER_NAME": "agent",
    "GIT_COMMITTER_EMAIL": "agent@localhost",
    "GIT_COMMITTER_DATE": "2000-01-01T00:00:00Z",
    "PYTHONHASHSEED": "0",
}
_MAKE_REPOSITORY = f"""set -e
mkdir -p {WORKDIR}
cd {WORKDIR}
git init -q -b main .
git fast-import --quiet < {HISTORY}
rm {HISTORY}
git reset -q --hard "$BASE"
"""
# Removes from a repository everything that is not part of HEAD's history, or fails.
_FORGET = f"""set -e
cd {WORKDIR}
keep=$(mktemp)
git for-each-ref --merged=HEAD --format='delete %(refname)' refs/tags > "$keep"
if branch=$(git symbolic-ref -q HEAD); then echo "delete $branch" >> "$keep"; fi
for remote in $(git remote); do git remote remove "$remote"; done
git for-each-ref --format='delete %(refname)' | {{ grep -vxFf "$keep" || true; }} | git update-ref --stdin
rm "$keep"
git worktree prune
rm -rf "$(git rev-parse --git-path logs)"
for name in FETCH_HEAD ORIG_HEAD MERGE_HEAD CHERRY_PICK_HEAD REBASE_HEAD BISECT_LOG; do
  rm -f "$(git rev-parse --git-path "$name")"
done
reachable() {{ git rev-list --objects --all --indexed-objects HEAD | cut -c1-40 | LC_ALL=C sort -u | wc -l; }}
present() {{ git cat-file --batch-all-objects --batch-check='%(objectname)' | wc -l; }}
if [ "$(present)" -gt "$(reachable)" ]; then
  objects=$(git rev-parse --git-path objects)
  rm -rf "$objects"/pack/*.promisor "$objects"/pack/*.keep "$objects"/pack/*.bitmap "$objects"/info/commit-graph*
  git repack -a -d -q
  rm -f "$objects/info/alternates"
  git prune --expire=now
  if [ "$(present)" -gt "$(reachable)" ]; then echo "objects beyond HEAD cannot be removed"; exit 1; fi
fi
"""
# Writes the present files as a tree into the object store, without changing the index. It follows the rules of
# `extraction`, which looks for later changes: configuration does not count, nor do the repository's own exclusions.
_WRITE_TREE = f"""set -e
cd {WORKDIR}
head=$(git rev-parse HEAD)
GIT_OBJECT_DIRECTORY=$(cd "$(git rev-parse --git-common-dir)/objects" && pwd)
own=$(mktemp -d)
export GIT_OBJECT_DIRECTORY GIT_DIR=$own/git GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null HOME=$own
export XDG_CONFIG_HOME=$own
git init -q --bare --template= "$GIT_DIR"
git config core.bare false
git config core.fileMode true
export GIT_WORK_TREE=$PWD
git read-tree "$head"
git add -A .
git write-tree
rm -rf "$own"
"""
_CONDA = "/opt/miniconda3/bin/activate"
_VENV = f"{WORKDIR}/.venv/bin/activate"
_ACTIVATE = (
    f"if [ -f {_CONDA} ]; then source {_CONDA} && conda activate testbed; elif [ -f {_VENV} ]; then source {_VENV}; fi"
)
# git opens the files in its own directory unchecked: at a pipe or a device it would hang until it is killed.
NO_PIPES = """no_pipes() {
  found=$(find "$1" \\( -xtype p -o -xtype c \\) -print -quit 2>/dev/null)
  if [ "$found" ]; then printf 'no file: %s\\n' "$found"; exit 3; fi
}"""
# Hashes names and contents with few processes, and with git's own hash, which any image has. It changes no file, and
# prints a last line when it is complete, because a process that could not be started would leave a part out. If
# variables were set before it (`RepositoryBox._told`), git reads only what can differ from the start, which gives the
# same text: `paths` and, with `base`, the paths at which the index differs from the start's commit `base` or from the
# present commit. Files whose hash is `known` are not read at all.
_NOTHING_KNOWN = "base= paths=() known_repository= known_beside="
_MOST_PATHS, _LONGEST = 256, 50_000
"""Limits of the script's input: number of paths, and bytes."""
_HASH = f"""export LC_ALL=C
set -o pipefail
{NO_PIPES}
if [ "$known_repository" ]; then
  echo "$known_repository"
elif cd {WORKDIR} 2>/dev/null; then
  [ ${{#paths[@]}} -gt 0 -a -z "$base" ] || no_pipes .git
  options=(--no-optional-locks -c core.fileMode=true -c core.quotePath=true)
  if [ "$base" ]; then
    differs() {{
      GIT_NO_REPLACE_OBJECTS=1 git "${{options[@]}}" diff-index --cached --ita-visible-in-index --no-renames \\
        -z --name-only "$@" -- 2>/dev/null
    }}
    mapfile -d '' -t more < <(differs "$base" && differs HEAD && printf 'whole\\0')
    if [ "${{#more[@]}}" -gt 0 ] && [ "${{#more[@]}}" -le {_MOST_PATHS} ] && [ "${{more[-1]}}" = whole ]; then
      unset 'more[-1]'
      paths+=("${{more[@]}}")
    else
      paths=()
    fi
  fi
  [ ${{#paths[@]}} -eq 0 ] || export GIT_LITERAL_PATHSPECS=1
  about=(--porcelain=v2 --branch --no-renames --untracked-files=all)
  status=$(git "${{options[@]}}" status "${{about[@]}}" -- "${{paths[@]}}" 2>&1)
  {{
    printf '%s\\n' "$status"
    case $status in
      *$'\\n'[12u]' '*)
        git "${{options[@]}}" diff --binary --no-color --no-ext-diff --no-textconv HEAD -- "${{paths[@]}}" ;;
    esac
    case $status in
      *$'\\n? '*)
        git ls-files -z --others --exclude-standard -- "${{paths[@]}}" |
          sort -z | xargs -0 -r git hash-object --no-filters -- ;;
    esac
    true
  }} 2>/dev/null | git hash-object --stdin || exit
else
  echo none
fi
if [ "$known_beside" ]; then
  printf '%s\\n%s\\n' "$known_beside" {HASHED}
  exit
fi
for place in "${{TMPDIR:-/tmp}}" "$HOME"; do
  cd "$place" 2>/dev/null || continue
  names=$(find . -xdev -type f -size -2048k \\
    -not -path '*/.cache/*' -not -path '*/__pycache__/*' -not -path '*/.git/*' | sort)
  if [ "$names" ]; then
    names=$(printf '%s\\n' "$names" | head -n 1000)
    printf '%s\\n' "$names"
    printf '%s\\n' "$names" | git hash-object --no-filters --stdin-paths
  fi
  true
done 2>/dev/null | git hash-object --stdin || exit
echo {HASHED}
"""
# Prints the commit, and the directories beside the repository that count, if the start is simple enough that only what
# was written since can differ from it. Otherwise it fails.
_WHEREABOUTS = f"""set -e
cd {WORKDIR}
[ "$PWD" = "$(pwd -P)" ] && [ -d .git ] && [ ! -L .git ]
status=$(git --no-optional-locks -c core.fileMode=true status --porcelain=v2 --no-renames --untracked-files=all 2>&1)
[ -z "$status" ]
if git ls-files -s | grep -q '^160000'; then exit 1; fi
told='^(include|filter\\.|core\\.(worktree|excludesfile|attributesfile|fsmonitor|untrackedcache|sparse|splitindex))'
if git config --get-regexp "$told" > /dev/null; then exit 1; fi
git rev-parse --verify HEAD
cd "${{TMPDIR:-/tmp}}" && pwd -P
cd "$HOME" && pwd -P
"""
# Files in git's directory that do not matter: they do not affect git status, or it learns of them elsewhere.
_HARMLESS = frozenset(
    (
        *("index", "HEAD", "ORIG_HEAD", "FETCH_HEAD", "MERGE_HEAD", "CHERRY_PICK_HEAD", "REVERT_HEAD", "REBASE_HEAD"),
        *("AUTO_MERGE", "MERGE_MSG", "MERGE_MODE", "COMMIT_EDITMSG", "packed-refs", "logs", "refs", "objects"),
    )
)
_RULES = frozenset((".git", ".gitignore", ".gitattributes", ".gitmodules"))
_READERS = frozenset(("bash", "sh", "find", "sort", "head", "xargs", "grep"))
_PREPARATION = hashlib.sha256(
    "\0".join((_MAKE_REPOSITORY, _FORGET, _WRITE_TREE, _ACTIVATE, _HASH, _WHEREABOUTS, *hiding.SCRIPTS)).encode()
).hexdigest()
"""Digest of the scripts that prepare a task and read data from it: part of every entry's key."""


@dataclass(frozen=True, slots=True)
class WorkspaceSettings:
    """Settings shared by all sandboxes of an environment."""

    backend: str = "auto"
    limits: Limits = field(default_factory=Limits)
    network: bool = False
    allow_unsafe: bool = False
    env: tuple[tuple[str, str], ...] = ()
    """Variables added to the environment of every command."""
    image: str | None = None
    """Image used for tasks that would otherwise run on the host's tool chain."""
    snapshot: SnapshotMode = "filesystem"

    def image_of(self, task: Task) -> str:
        """Image that a task runs on."""
        return self.image if self.image is not None and task.image == HOST else task.image

    def box(self, task: Task) -> RepositoryBox:
        """Make a sandbox for a task, not started."""
        image = self.image_of(task)
        rootfs: str | RootFS
        env = {**_QUIET, **dict(self.env)}
        if not self.network:
            env |= {"PIP_NO_INDEX": "1"} | dict(self.env)
        if self.backend == "auto" or self.backend.startswith("overlay"):
            with contextlib.suppress(SandboxUnavailable, OSError):  # the backend will say so
                runtime()  # its process starts while it is found out what the sandbox stands on
        if image == HOST:
            rootfs, env = _host(), {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **env}
        else:
            rootfs = image.removeprefix("dir:") if image.startswith("dir:") else f"docker:{image}"
        try:
            sandbox = make_sandbox(
                self.backend,
                rootfs=rootfs,
                limits=self.limits,
                network=self.network,
                allow_unsafe=self.allow_unsafe,
                env=env,
                snapshot=self.snapshot,
            )
        except ValueError as error:
            if not image.startswith("dir:"):
                raise
            raise TaskError(f"{task.instance_id}, image {image!r}: {error}") from error
        return RepositoryBox(sandbox, network=self.network)


@functools.cache
def _host() -> str | RootFS:
    """Find the host's tool chain, once; only its name where it cannot be mounted (enough for the copy backend)."""
    try:
        return resolve(HOST)
    except SandboxUnavailable:
        return HOST


@dataclass(frozen=True, slots=True)
class Pristine:
    """A task's files and shell before any action."""

    snapshot: SandboxSnapshot
    reference: str
    """Git tree with which the work is compared."""
    digest: tuple[str, str]
    """`RepositoryBox.digest` of the files and shell."""
    files: tuple[str, str] = ("", "")
    """`RepositoryBox.files` of the files."""
    whereabouts: tuple[str, ...] = ()
    """Commit and the relevant directories beside the repository (`_WHEREABOUTS`); empty if not simple."""
    made: bool = False
    """True if it was prepared for this object, rather than found in the cache or made by another process."""


class RepositoryBox(AgentBox):
    """A sandbox that has its repository at ``/testbed``."""

    def __init__(self, sandbox: Sandbox, *, network: bool) -> None:
        super().__init__(sandbox, reads=WORKDIR)
        self.network = network
        self.start: Pristine | None = None
        """Start of this sandbox, if known: unchanged files then need not be read again."""

    @property
    def shares_root(self) -> bool:
        """Tell whether ``/`` in its commands is that of this machine."""
        return bool(self._root)

    @property
    def _root(self) -> str:
        """Directory that stands for ``/``, if the backend has no root of its own."""
        inside = getattr(self.sandbox.backend, "inside", None)
        return "" if inside is None else str(inside("/")).rstrip("/")

    def localised(self, text: str) -> str:
        """Replace the paths `OWN_PATHS` in a text by those of this backend. Idempotent."""
        if not (root := self._root):
            return text
        for path in OWN_PATHS:
            text = text.replace(root + path, path).replace(path, root + path)
        return text

    def generalised(self, text: str) -> str:
        """Replace this backend's paths by the usual ones, for text that is shown."""
        return text.replace(root, "") if (root := self._root) else text

    def execute(self, command: str, *, timeout: float | None = None, raw: int = 0) -> Result:
        """Run a command in the persistent shell; ``raw``: bytes of its output to keep unchanged."""
        result = super().execute(self.localised(command), timeout=timeout, raw=raw)
        if not (root := self._root):
            return result
        written = result.raw.replace(root.encode("utf-8", "surrogateescape"), b"")
        return replace(result, output=self.generalised(result.output), raw=written)

    def run(
        self, command: str, *, timeout: float | None = None, output: int | None = None, most: int | None = None
    ) -> Result:
        """Run a command in a separate bash, independent of the shell's state; see `Sandbox.run`."""
        result = super().run(self.localised(command), timeout=timeout, output=output, most=most)
        return replace(result, output=self.generalised(result.output)) if self._root else result

    def make_repository(self, task: Task) -> None:
        """Make the repository of a task whose row contains its history; for other tasks it is in the image."""
        if task.history:
            self.write_file(HISTORY, task.history.encode())
            try:
                script(self, f"BASE={shlex.quote(task.base_commit)}\n{_MAKE_REPOSITORY}")
            except SandboxUnavailable as error:
                raise TaskError(f"{task.instance_id}, columns 'history' and 'base_commit': {error}") from error

    def digest(self, *, alone: bool = False, timeout: float | None = None) -> tuple[str, str]:
        """Two hashes of what can change later steps: of all of it, and of the repository alone.

        The repository counts with its commit, what differs from it, and files that are neither tracked nor ignored. The
        first hash also covers the contents of the first 1,000 files of at most 2 MiB in each of /tmp and the home
        directory, and the shell's state. Times and ignored files do not count; see `AgentBox.digest`.

        git reads the whole repository only if the backend cannot list what was written since the task's start
        (`Backend.layers_above`), or if these files affect what git finds. Otherwise it reads only what was written.

        Args:
            alone: True if it is known that nothing but the idle shell runs.
            timeout: limit in seconds of the reading; by default that of a command.
        """
        return super().digest(alone=alone, timeout=timeout)

    def _script(self, written: Written | None) -> str:
        return f"{_NOTHING_KNOWN}\n{self._told(written)}{_HASH}"

    def _told(self, written: Written | None) -> str:
        """Variables for `_HASH` that name the files written since the start; none if all have to be read."""
        start = self.start
        if written is None or start is None or not start.whereabouts or not start.files[0]:
            return ""
        try:
            layers = self.sandbox.backend.layers_above(start.snapshot.tree)
        except (SnapshotReleased, SandboxClosed):
            return ""
        changed = None if layers is None else changes(layers)
        if changed is None:
            return ""
        base, *beside = start.whereabouts
        paths = _paths_of(changed, beside)
        if paths is None:
            return ""
        told = [f"paths=(.git {' '.join(map(shlex.quote, paths))})"]
        if any(_meet(path, f"{WORKDIR}/.git") for path in changed):
            told.append(f"base={shlex.quote(base)}")
        if not any(_meet(path, WORKDIR) for path in changed):
            told.append(f"known_repository={shlex.quote(start.files[0])}")
        if not any(_meet(path, place) for path in changed for place in beside):
            known = start.files[1].removesuffix(f"{HASHED}\n").rstrip("\n")
            told.append(f"known_beside={shlex.quote(known)}")
        text = "".join(f"{line}\n" for line in told)
        return text if len(text.encode()) <= _LONGEST else ""


def _meet(path: str, place: str) -> bool:
    """Tell whether one of two paths contains the other."""
    one, other = f"{path.rstrip('/')}/", f"{place.rstrip('/')}/"
    return one.startswith(other) or other.startswith(one)


def _paths_of(changed: Sequence[str], beside: Sequence[str]) -> list[str] | None:
    """Paths of the repository that git has to look at; None if all.

    Args:
        changed: files written since a start that is simple (see `_WHEREABOUTS`).
        beside: directories beside the repository whose files count.
    """
    paths = dict[str, None]()
    for path in changed:
        names = path.split("/")[1:]
        if not path.isprintable() or names[-1] in _READERS or names[0] == WORKDIR.lstrip("/") == path[1:]:
            return None
        if names[0] != WORKDIR.lstrip("/"):
            # git's own programs and settings; and what the programs that read stand on.
            kept = names[0] in ("run", "var", "dev") or {"__pycache__", "site-packages", "dist-packages"} & set(names)
            if any("git" in name for name in names) or not (kept or any(_meet(path, place) for place in beside)):
                return None
            continue
        inside = names[1:]
        if inside[0] == ".git":
            told = inside[1:] and inside[1] in _HARMLESS
            if not told or inside[1:3] in (["objects", "info"], ["refs", "replace"]):
                return None
            continue
        if _RULES & set(inside):
            return None
        if "__pycache__" in inside:
            inside = inside[: inside.index("__pycache__") + 1]
        paths["/".join(inside)] = None
    return list(paths) if len(paths) <= _MOST_PATHS else None


def script(box: RepositoryBox, source: str) -> str:
    """Run one of our scripts in a sandbox.

    Raises:
        SandboxUnavailable: it failed; the message holds the end of what it printed.
    """
    done = box.run(source, timeout=600.0)
    if done.exit_code:
        raise SandboxUnavailable(f"the repository could not be prepared: {done.output[-1000:].strip()}")
    return done.output


_prepared: OrderedDict[tuple[Any, ...], Pristine] = OrderedDict()


def pristine(task: Task, settings: WorkspaceSettings, *, verify: bool = False) -> Pristine:
    """Prepare or load a task's files at the start of an episode.

    Args:
        task: the task to prepare.
        settings: settings of the sandboxes that will have the files.
        verify: read the whole cached copy on disk, and prepare the task again if the copy has changed.

    Raises:
        SandboxUnavailable: there is no such sandbox on this machine, or no such image.
        TaskError: the image does not hold the repository at the task's base.
        ImportError, ValueError: it cannot be graded, see `verdict.check_gradable`.
    """
    key = (os.getpid(), task.digest, settings)
    found = _prepared.get(key)
    if found is None:
        with settings.box(task) as box:
            key_on_disk = _key(box, task, settings)
            made: list[prepared.PreparedState] = []

            def make() -> prepared.PreparedState:
                made.append(_prepare(box, task, settings))
                return made[0]

            stored = prepared.provide(key_on_disk, box.sandbox, make, verify=verify)
            notes = stored.notes
            of_repository, beside = notes["files"]
            files = (of_repository, beside)
            box.know(stored.snapshot, files)
        whole, repository = notes["digest"]
        digest, whereabouts = (whole, repository), tuple(notes["whereabouts"])
        found = Pristine(stored.snapshot, notes["reference"], digest, files, whereabouts, made=bool(made))
        _prepared[key] = found
        while len(_prepared) > KEPT:
            _prepared.popitem(last=False)[1].snapshot.release()
    _prepared.move_to_end(key)
    return found


def forget_prepared() -> None:
    """Drop the prepared tasks that `pristine` keeps in memory."""
    while _prepared:
        _prepared.popitem()[1].snapshot.release()


def _key(box: RepositoryBox, task: Task, settings: WorkspaceSettings) -> str:
    """Key of a prepared task: the image, the row, the preparation's code, the variables that its shell starts with.

    It also depends on the version of the official code, which has been found able to grade the task.
    """
    try:
        official = importlib.metadata.version("swebench")
    except importlib.metadata.PackageNotFoundError:
        official = ""
    backend = box.sandbox.backend
    base = backend.base()
    try:
        return prepared.key(
            backend.capabilities.name, base.base, task.digest, _PREPARATION, settings.env, settings.network, official
        )
    finally:
        base.release()


def _prepare(box: RepositoryBox, task: Task, settings: WorkspaceSettings) -> prepared.PreparedState:
    from sandboxgym.envs.swebench.grading import verdict as grading

    grading.check_gradable(task)  # here, because it imports the official code, which takes longer than a reset
    box.make_repository(task)
    hiding.prepare(box, task)
    found = box.run(f"cd {WORKDIR} && git cat-file -t {shlex.quote(task.base_commit)}")
    if found.exit_code or found.output.strip() != "commit":
        raise TaskError(
            f"{task.instance_id}, column 'base_commit': {settings.image_of(task)!r} has no commit "
            f"{task.base_commit} in {WORKDIR} ({found.output.strip()[-200:]})"
        )
    script(box, _FORGET)
    reference = script(box, _WRITE_TREE).strip()
    box.execute(f"cd {WORKDIR}")
    if settings.image_of(task) != HOST:
        box.execute(_ACTIVATE, timeout=60.0)
    files = box.files(timeout=600.0)
    simple = box.run(_WHEREABOUTS)
    whereabouts = [] if simple.exit_code else simple.output.splitlines()
    if len(whereabouts) != 3 or any(name.startswith("GIT_") for name, _ in settings.env):
        whereabouts = []
    digest = box.digest_of(files)
    if not digest[0]:
        raise SandboxUnavailable(f"{task.instance_id}: the repository cannot be read within 600 seconds")
    return prepared.PreparedState(
        box.snapshot(strict=False, mode="filesystem"),
        {"instance_id": task.instance_id, "reference": reference, "digest": list(digest), "files": list(files)}
        | {"whereabouts": whereabouts},
    )
