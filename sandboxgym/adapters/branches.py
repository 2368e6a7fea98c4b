r"""Sandboxes and snapshots by name, for callers that do not hold objects: a model's tool calls, a protocol.

>>> from sandboxgym.sandbox import make_sandbox
>>> branches = Branches(make_sandbox("copy", allow_unsafe=True))
>>> _ = branches.execute("main", "echo one > notes").result()
>>> branches.snapshot("main", "before").result()["lost"]
[]
>>> branches.fork("main", ["left", "right"]).result()["branches"]
['left', 'right']
>>> branches.execute("left", "echo two >> notes; cat notes").result()["output"]
'one\ntwo\n'
>>> branches.execute("main", "cat notes").result()["output"]
'one\n'
>>> branches.close()
True

1. A branch is a live sandbox, ``main`` the first of them. All branches and snapshots have different names.
2. Every method answers with a future. Calls on one branch run one after the other, in their order; those on different
   branches run side by side. A call that was cancelled before its turn never runs.
3. Branches, snapshots, waiting calls and all that is handed out are bounded.
4. A call that cannot be done raises `CallRefused`, and has changed nothing, or what the sandbox itself raised.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from sandboxgym.brief import brief
from sandboxgym.sandbox.base import SandboxError
from sandboxgym.sandbox.files.differences import differences
from sandboxgym.sandbox.sandbox import Sandbox
from sandboxgym.sandbox.snapshot import SandboxSnapshot

MAIN = "main"
"""Name of the first branch, which always exists."""
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}"
"""Regular expression of a name, as a whole."""
LARGEST_FILE = 256 * 2**10
"""Bytes of a file that is read or written."""
LARGEST_TREE = 256 * 2**20
"""Bytes that a snapshot may hold to be compared, which takes as much memory."""
MOST_PATHS = 200
"""Paths of each list of `Branches.diff`."""
LONGEST_LIST = 20_000
"""Characters of all paths of each list of `Branches.diff`."""
MOST_WAITING = 16
"""Calls on one branch that run or wait."""
_LEAST_SECONDS = 0.1

Answer = dict[str, Any]
"""Plain values, as JSON has them."""


class CallRefused(SandboxError):
    """A call names what does not exist, or exceeds a limit."""


class _Line:
    """Work of one branch, done in its order in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"branch-{name}")
        self._lock = threading.Lock()
        self.waiting: set[Future[Any]] = set()

    def submit(self, work: Callable[[], Answer]) -> Future[Answer]:
        with self._lock:
            self.waiting = {call for call in self.waiting if not call.done()}
            if len(self.waiting) >= MOST_WAITING:
                raise CallRefused(f"{self._name!r} is busy: {MOST_WAITING} calls wait for their turn")
            try:
                future = self._pool.submit(work)
            except RuntimeError as error:  # shut down
                raise CallRefused(f"{self._name!r} was discarded") from error
            self.waiting.add(future)
            return future

    def end(self, last: Callable[[], object]) -> Future[object]:
        """Do the last work, after what runs; what waits is not done any more."""
        for future in list(self.waiting):
            future.cancel()
        future = self._pool.submit(last)
        self._pool.shutdown(wait=False)
        return future


@dataclass(slots=True)
class _Branch:
    sandbox: Sandbox
    line: _Line
    origin: str

    def end(self) -> Future[object]:
        """Close the sandbox, and end the command that runs in it."""
        busy = not all(call.done() for call in self.line.waiting)
        closing = threading.Lock()  # so that two threads do not delete the same files

        def close() -> None:
            with closing:
                self.sandbox.close()

        end = self.line.end(close)

        def interrupt() -> None:
            # The command's thread finds the processes gone, and comes to the end. Again, for it may just start some.
            while not end.done():
                with closing, contextlib.suppress(Exception):  # its processes end meanwhile; it is tried again
                    self.sandbox.backend.close()
                wait([end], 0.1)

        if busy:
            threading.Thread(target=interrupt, daemon=True).start()
        return end


@dataclass(slots=True)
class _Saved:
    snapshot: SandboxSnapshot
    branch: str
    at: float = field(default_factory=time.monotonic)


class Branches:
    """Named forks of one sandbox, with named snapshots.

    Args:
        sandbox: the branch ``main``; owned from here on.
        most_branches: live at one time, ``main`` included.
        most_snapshots: kept at one time.
    """

    def __init__(self, sandbox: Sandbox, *, most_branches: int = 8, most_snapshots: int = 32) -> None:
        self.most_branches, self.most_snapshots = most_branches, most_snapshots
        self.longest = sandbox.limits.seconds
        """Seconds that a command may take at most."""
        self._lock = threading.Lock()
        (self._pristine,) = sandbox.fork(1)  # never started: children of it are restored to any snapshot
        self._branches: dict[str, _Branch | None] = {MAIN: _Branch(sandbox, _Line(MAIN), "")}
        self._snapshots: dict[str, _Saved | None] = {}  # None: being made, here and above
        self._aside = _Line("snapshots")
        self._ends: set[Future[object]] = set()
        self._last: list[Future[object]] = []  # ends that `close` waits for
        self._number = 0
        self._closed = False

    def execute(self, branch: str, command: str, *, seconds: float | None = None) -> Future[Answer]:
        """Run a command in a branch's shell.

        Args:
            branch: name of it.
            command: text for bash.
            seconds: time limit, by default the longest.
        """
        if seconds is not None and not _LEAST_SECONDS <= seconds <= self.longest:
            raise CallRefused(
                f"expected a time limit of {_LEAST_SECONDS:g} to {self.longest:g} seconds, found {seconds}"
            )

        def work(sandbox: Sandbox) -> Answer:
            result = sandbox.execute(command, timeout=seconds)
            return {
                "branch": branch,
                "exit_code": result.exit_code,
                "output": result.output,
                "seconds": round(result.seconds, 3),
                "timed_out": result.timed_out,
                "omitted_bytes": result.elided,
                "shell_replaced": result.ended or result.replaced,
            }

        return self._on(branch, work)

    def snapshot(self, branch: str, name: str = "") -> Future[Answer]:
        """Keep the state of a branch under a name, by default the next of ``s1``, ``s2``, …"""
        self._branch(branch)
        with self._lock:
            name = name or self._free_name()
            self._check_new(name, self._snapshots, self.most_snapshots, "snapshots")
            self._snapshots[name] = None

        def work(sandbox: Sandbox) -> Answer:
            snapshot = sandbox.snapshot()
            with self._lock:
                self._check_open()
                self._snapshots[name] = _Saved(snapshot, branch)
            return {"snapshot": name, "branch": branch, "lost": list(snapshot.lossy)}

        return self._reserved(self._snapshots, [name], lambda: self._on(branch, work))

    def restore(self, branch: str, snapshot: str) -> Future[Answer]:
        """Put a branch into a kept state; its running processes are ended."""
        held = self._hold(snapshot)

        def work(sandbox: Sandbox) -> Answer:
            sandbox.restore(held)
            return {"branch": branch, "snapshot": snapshot, "lost": list(held.lossy)}

        return self._holding([held], lambda: self._on(branch, work))

    def fork(self, source: str, names: Sequence[str]) -> Future[Answer]:
        """Make branches that continue from a branch as it is now, or from a snapshot. All or none."""
        if not names:
            raise CallRefused("expected names of new branches, found none")
        with self._lock:
            self._check_known(source)
            live = source in self._branches
            for at, name in enumerate(names):
                self._check_new(name, self._branches, self.most_branches - at, "branches")
                if name in names[:at]:
                    raise CallRefused(f"expected different names, found {name!r} twice")
            self._branches.update(dict.fromkeys(names))

        def adopt(children: Sequence[Sandbox], held: SandboxSnapshot | None = None) -> Answer:
            try:
                if held is not None:
                    for child in children:
                        child.restore(held)
                with self._lock:
                    self._check_open()
                    for name, child in zip(names, children, strict=True):
                        self._branches[name] = _Branch(child, _Line(name), source)
            except BaseException:
                for child in children:
                    child.close()
                raise
            return {"branches": list(names), "source": source, "lost": list(children[0].lost)}

        def submit() -> Future[Answer]:
            if live:
                return self._on(source, lambda sandbox: adopt(sandbox.fork(len(names), start=True)))
            held = self._hold(source)
            work = lambda: adopt(self._pristine.fork(len(names)), held)  # noqa: E731
            return self._holding([held], lambda: self._aside.submit(work))

        return self._reserved(self._branches, names, submit)

    def diff(self, before: str, after: str) -> Future[Answer]:
        """Files in which a branch or snapshot differs from a snapshot."""
        with self._lock:
            self._check_known(after)
            live = after in self._branches
        old = self._hold(before)

        def compare(new: SandboxSnapshot) -> Answer:
            found = differences(_packed(old, before), _packed(new, after))
            answer: Answer = {"before": before, "after": after}
            for kind, paths in (("written", found.written), ("gone", found.gone)):
                shown = _bounded(paths)
                answer |= {kind: shown, f"{kind}_omitted": len(paths) - len(shown)}
            return answer

        def work(sandbox: Sandbox) -> Answer:
            new = sandbox.snapshot()
            try:
                return compare(new)
            finally:
                new.release()

        def submit() -> Future[Answer]:
            if live:
                return self._on(after, work)
            new = self._hold(after)
            return self._holding([new], lambda: self._aside.submit(lambda: compare(new)))

        return self._holding([old], submit)

    def read_file(self, branch: str, path: str) -> Future[Answer]:
        """A file of a branch as text; bytes that are not UTF-8 as backslash escapes."""

        def work(sandbox: Sandbox) -> Answer:
            data = sandbox.read_file(path, limit=LARGEST_FILE)
            text = data.decode("utf-8", "backslashreplace")
            return {"branch": branch, "path": path, "text": text, "exact": text.encode("utf-8", "replace") == data}

        return self._on(branch, work)

    def write_file(self, branch: str, path: str, text: str) -> Future[Answer]:
        """Write a file of a branch, making missing parent directories."""
        data = text.encode("utf-8", "surrogatepass")
        if len(data) > LARGEST_FILE:
            raise CallRefused(f"expected at most {LARGEST_FILE:,} bytes of text, found {len(data):,}")

        def work(sandbox: Sandbox) -> Answer:
            sandbox.write_file(path, data)
            return {"branch": branch, "path": path, "bytes": len(data)}

        return self._on(branch, work)

    def discard(self, names: Sequence[str]) -> Future[Answer]:
        """Give up snapshots and branches, but never ``main``; a command that runs is ended. All or none.

        A branch counts, and its name is taken, until it has ended.
        """
        with self._lock:
            for name in names:
                self._check_known(name)
                if name == MAIN:
                    raise CallRefused("the branch 'main' cannot be discarded; restore() gives it another state")
            released = [self._snapshots.pop(name) for name in dict.fromkeys(names) if name in self._snapshots]
            ended = {name: self._branches[name] for name in names if name in self._branches}
            self._branches.update(dict.fromkeys(ended))
        for saved in released:
            if saved is not None:
                saved.snapshot.release()
        done: Future[Answer] = Future()
        done.set_running_or_notify_cancel()
        left = set(ended)

        def finish(name: str, _: object) -> None:
            with self._lock:
                self._branches.pop(name, None)
                left.discard(name)
                last = not left
            if last:
                done.set_result({"discarded": [*names]})

        for name, branch in ended.items():
            if branch is not None:
                end = branch.end()
                self._ends.add(end)
                end.add_done_callback(self._ends.discard)
                end.add_done_callback(functools.partial(finish, name))
        if not ended:
            done.set_result({"discarded": [*names]})
        return done

    def overview(self) -> Answer:
        """Branches and snapshots as they are now, and the limits."""
        with self._lock:
            branches = [
                {
                    "name": name,
                    "source": branch.origin,
                    "calls": sum(not call.done() for call in branch.line.waiting),
                    "lost": [*branch.sandbox.lost],
                }
                for name, branch in self._branches.items()
                if branch is not None
            ]
            snapshots = [
                {
                    "name": name,
                    "branch": saved.branch,
                    "seconds_ago": round(time.monotonic() - saved.at, 1),
                    "lost": [*saved.snapshot.lossy],
                }
                for name, saved in self._snapshots.items()
                if saved is not None
            ]
        return {
            "branches": branches,
            "snapshots": snapshots,
            "most_branches": self.most_branches,
            "most_snapshots": self.most_snapshots,
            "longest_command_seconds": self.longest,
        }

    def close(self, *, timeout: float = 1.5) -> bool:
        """End everything, also commands that run. Idempotent.

        Args:
            timeout: seconds to wait for it.

        Returns:
            False if a command could not be ended; its sandbox goes with the process.
        """
        with self._lock:
            if self._closed:
                return not wait(self._last, timeout).not_done
            self._closed = True
            branches = [branch for branch in self._branches.values() if branch is not None]
            snapshots = [saved for saved in self._snapshots.values() if saved is not None]
            self._branches.clear()
            self._snapshots.clear()
        ends = [*self._ends, *(branch.end() for branch in branches)]
        ends.append(self._aside.end(self._pristine.close))
        self._last = ends
        for saved in snapshots:
            saved.snapshot.release()
        return not wait(ends, timeout).not_done

    @property
    def closed(self) -> bool:
        """True from the call of `close` on."""
        return self._closed

    def _check_open(self) -> None:
        if self._closed:
            raise CallRefused("all branches were closed")

    def _branch(self, name: str) -> _Branch:
        with self._lock:
            self._check_open()
            found = self._branches.get(name)
            if found is None:
                if name in self._branches:
                    raise CallRefused(f"the branch {name!r} is not complete yet, or is being discarded")
                which = f"the snapshot {name!r}" if name in self._snapshots else brief(name, 80)
                raise CallRefused(f"expected a branch ({', '.join(self._branches)}), found {which}")
            return found

    def _on(self, branch: str, work: Callable[[Sandbox], Answer]) -> Future[Answer]:
        found = self._branch(branch)
        return found.line.submit(lambda: work(found.sandbox))

    def _hold(self, name: str) -> SandboxSnapshot:
        with self._lock:
            saved = self._snapshots.get(name)
            if saved is None:
                if name in self._snapshots:
                    raise CallRefused(f"the snapshot {name!r} is not complete yet")
                known = ", ".join(self._snapshots) or "none yet"
                raise CallRefused(f"expected a snapshot ({known}), found {brief(name, 80)}")
            return saved.snapshot.retain()

    def _check_known(self, name: str) -> None:
        for kept in (self._branches, self._snapshots):
            if name in kept:
                if kept[name] is None:
                    raise CallRefused(f"{name!r} is not complete yet, or is being discarded")
                return
        raise CallRefused(
            f"expected a branch ({', '.join(self._branches)}) or a snapshot "
            f"({', '.join(self._snapshots) or 'none yet'}), found {brief(name, 80)}"
        )

    def _check_new(self, name: str, kept: dict[str, Any], most: int, kind: str) -> None:
        if not re.fullmatch(NAME, name):
            raise CallRefused(
                f"expected a name of at most 40 letters, digits, dots, hyphens and underscores, found {brief(name, 80)}"
            )
        if name in self._branches or name in self._snapshots:
            raise CallRefused(f"the name {name!r} is taken")
        if len(kept) >= most:
            limit = self.most_branches if kept is self._branches else self.most_snapshots
            raise CallRefused(f"there are {len(kept)} {kind}, and at most {limit} are kept: discard some first")

    def _free_name(self) -> str:
        while True:
            self._number += 1
            if (name := f"s{self._number}") not in self._branches and name not in self._snapshots:
                return name

    def _reserved(
        self, kept: dict[str, Any], names: Sequence[str], submit: Callable[[], Future[Answer]]
    ) -> Future[Answer]:
        """Submit work that fills names which were reserved; they are free again if it fails, or never runs."""

        def free(_: object = None) -> None:
            with self._lock:
                for name in names:
                    if name in kept and kept[name] is None:
                        del kept[name]

        return _then(submit, free)

    def _holding(self, held: Sequence[SandboxSnapshot], submit: Callable[[], Future[Answer]]) -> Future[Answer]:
        """Submit work that needs these holds on snapshots, which are given up afterwards."""

        def release(_: object = None) -> None:
            for snapshot in held:
                snapshot.release()

        return _then(submit, release)


def _then(submit: Callable[[], Future[Answer]], after: Callable[[object], None]) -> Future[Answer]:
    """Submit work, and do something once it is done, was cancelled, or could not be submitted."""
    with contextlib.ExitStack() as stack:
        stack.callback(after, None)
        future = submit()
        stack.pop_all()
    future.add_done_callback(after)
    return future


def _packed(snapshot: SandboxSnapshot, name: str) -> bytes:
    if snapshot.tree.nbytes > LARGEST_TREE:
        raise CallRefused(
            f"{name!r} holds {snapshot.tree.nbytes:,} bytes of written files, and at most {LARGEST_TREE:,} are compared"
        )
    return snapshot.tree.pack()


def _bounded(paths: Sequence[str]) -> list[str]:
    shown: list[str] = []
    length = 0
    for path in paths[:MOST_PATHS]:
        length += len(path)
        if length > LONGEST_LIST:
            break
        shown.append(path)
    return shown
