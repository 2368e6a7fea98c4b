"""Declared losses of a sandbox's snapshots: a traced process, a connection that leads outside.

Each `Snag` is set up in the sandbox by ``uncapturable.py``, as far as the sandbox allows it; then a snapshot is taken.

1. A connection whose other end is outside cannot be duplicated. The snapshot must be refused by an error whose type is
   not one of Python's, or declare in words what it does not hold.
2. State that is entirely inside may instead be kept: it exists in a restored copy, and works.
3. In every case, the sandbox itself continues with its state.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import socketserver
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandboxgym.conformance.harness.scenario import Scene
from sandboxgym.conformance.sandbox_probes import uncapturable
from sandboxgym.conformance.sandbox_probes.shell import located, start
from sandboxgym.conformance.subject import AnyEnv, Subject
from sandboxgym.conformance.supervision import scratch

KEPT, DECLARED, REFUSED = "kept", "declared", "refused"
SILENT, HARMED, CRASHED, SKIPPED = "silent", "harmed", "crashed", "skipped"
WRONG = (SILENT, HARMED, CRASHED)
"""Failures: an undeclared loss; a harmed sandbox; an error of one of Python's types instead of a refusal."""

_PROGRAM = Path(uncapturable.__file__).read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Snag:
    """State that is hard to capture.

    Attributes:
        kind: a key of `uncapturable.MAKERS`.
        outside: True if its other end is outside the sandbox.
        leaves: True if the shell ends after the snag was started.
    """

    kind: str
    outside: bool = False
    leaves: bool = False


SNAGS = (
    Snag("io_uring"),
    Snag("user_namespace"),
    Snag("pid_namespace"),
    Snag("net_namespace"),
    Snag("outer_tcp", outside=True),
    Snag("outer_unix", outside=True),
    Snag("outer_fifo", outside=True),
    Snag("traced"),
    Snag("other_user"),
    Snag("detached", leaves=True),
)
"""All snags, first those that most sandboxes forbid."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one snag."""

    snag: Snag
    measured: str
    detail: str = ""

    def to_json(self) -> dict[str, Any]:
        """The outcome as JSON values, for the evidence."""
        return {"probe": f"snag.{self.snag.kind}", "measured": self.measured, "seen": self.detail}


def measure(subject: Subject, scene: Scene) -> list[Outcome]:
    """Measure the outcome of each snag; environments are closed by the scene."""
    outcomes = []
    with _outside() as arguments:
        env: AnyEnv | None = None
        for snag in SNAGS:
            if env is None:
                env = scene.make()
                scene.reset(env, seed=1, options=subject.options(0))
                _type(subject, scene, env, start())
            try:
                ready = _type(subject, scene, env, _setup(snag, arguments.get(snag.kind, ())))
            except Exception as error:
                ready = f"the shell does not run it: {error}"
            if ready.split()[-1:] != ["there"]:
                outcomes.append(Outcome(snag, SKIPPED, _reason(ready)))
                continue
            outcomes.append(_tried(subject, scene, env, snag))
            scene.close(env)
            env = None
    return outcomes


def _tried(subject: Subject, scene: Scene, env: AnyEnv, snag: Snag) -> Outcome:
    """Take a snapshot of an environment with a snag."""
    if snag.leaves:
        _type(subject, scene, env, "exit")
    if (before := _asked(subject, scene, env, snag)) != "there":
        return Outcome(snag, SKIPPED, f"it did not last: {before}")
    try:
        snap = scene.snapshot(env)
    except Exception as error:
        typed = type(error).__module__ != "builtins"
        outcome = Outcome(snag, REFUSED if typed else CRASHED, f"{type(error).__name__}: {error}"[:200])
    else:
        outcome = _looked(subject, scene, env, snag, snap)
    try:
        after = _asked(subject, scene, env, snag)
    except Exception as error:
        after = f"{type(error).__name__}: {error}"
    return outcome if after == "there" else Outcome(snag, HARMED, f"afterwards: {after}"[:200])


def _looked(subject: Subject, scene: Scene, env: AnyEnv, snag: Snag, snap: Any) -> Outcome:
    """Declarations and content of a snapshot that was taken."""
    copy = scene.make()
    scene.reset(copy, seed=2, options=subject.options(0))
    _, info = scene.restore(copy, snap)
    lossy = info.get("lossy") or () if subject.lossy is None else subject.lossy(copy, snap)
    found = _asked(subject, scene, copy, snag)
    scene.close(copy)
    if lossy:
        return Outcome(snag, DECLARED, "; ".join(map(str, lossy))[:200])
    if not subject.capabilities.processes and found != "there":
        return Outcome(snag, DECLARED, "snapshot_spec.processes is False")
    if snag.outside:
        return Outcome(snag, SILENT, f"the copy says: {found}; two of them cannot have one connection")
    return Outcome(snag, KEPT if found == "there" else SILENT, f"the copy says: {found}")


def _setup(snag: Snag, arguments: Sequence[str]) -> str:
    words = " ".join(map(shlex.quote, (snag.kind, *arguments)))
    return located(f"""
cat > "$B/snags.py" <<'@EOF@'
{_PROGRAM}@EOF@
mkdir "$B/{snag.kind}"; mkfifo "$B/{snag.kind}/in"
command -v python3 >/dev/null && {{
  sh -c 'cd "$1"; shift; exec python3 -q -i ../snags.py "$@" 0<>in >/dev/null 2>&1' sh "$B/{snag.kind}" {words} \\
    </dev/null >/dev/null 2>&1 &
  i=0; until [ -e "$B/{snag.kind}/ready" ] || [ $i -ge 400 ]; do i=$((i+1)); sleep 0.05; done
}}
cat "$B/{snag.kind}/ready" || echo no answer
""")


def _asked(subject: Subject, scene: Scene, env: AnyEnv, snag: Snag) -> str:
    """Ask the program that holds the snag whether it exists and works."""
    answer = _type(
        subject,
        scene,
        env,
        located(f"""
cd "$B/{snag.kind}"; rm -f answers; p=$(cat pid); i=0
[ "/proc/$p/fd/0" -ef in ] && {{
  echo "report()" 1<>in
  until [ -e answers ] || ! [ -e "/proc/$p/fd/0" ] || [ $i -ge 400 ]; do i=$((i+1)); sleep 0.05; done
}}
[ -e answers ] && cat answers || echo no such process; cd "$OLDPWD"
"""),
    )
    lines = answer.strip().splitlines()
    return lines[-1] if lines else ""


def _type(subject: Subject, scene: Scene, env: AnyEnv, command: str) -> str:
    assert subject.shell is not None
    scene.note(f"shell({scene.name(env)}, {command!r})")
    return subject.shell(env, command)


def _reason(output: str) -> str:
    lines = output.strip().splitlines()
    return f"the sandbox does not let it be: {lines[-1] if lines else 'no answer'}"[:200]


# The outside.


class _Echo(socketserver.BaseRequestHandler):
    """Server that greets, and answers questions."""

    greeting = b""

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            self.request.sendall(self.greeting)
            while self.request.recv(1) == uncapturable.ASK:
                self.request.sendall(uncapturable.ANSWER)


class _Tcp(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False


class _Unix(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    block_on_close = False


@contextlib.contextmanager
def _outside() -> Iterator[dict[str, tuple[str, ...]]]:
    """Context of peers outside any sandbox: the arguments of the snags that reach them, by kind."""
    greeting = secrets.token_hex(uncapturable.HELLO // 2)
    handler = type("Greeting", (_Echo,), {"greeting": greeting.encode()})
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(scratch.folder()))
        folder.chmod(0o755)
        name = f"sandboxgym-{greeting}"
        makers: list[Callable[[], socketserver.BaseServer]] = [
            lambda: _Tcp(("", 0), handler),
            lambda: _Unix(os.fspath(folder / "socket"), handler),
            lambda: _Unix(f"\0{name}", handler),
        ]
        port = 0
        for make in makers:
            server = stack.enter_context(make())
            thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            if isinstance(server, _Tcp):
                port = server.server_address[1]
        os.mkfifo(folder / "fifo")
        reader = os.open(folder / "fifo", os.O_RDWR | os.O_NONBLOCK)
        stack.callback(os.close, reader)
        yield {
            "outer_tcp": (str(port), greeting),
            "outer_unix": (os.fspath(folder / "socket"), name, greeting),
            "outer_fifo": (os.fspath(folder / "fifo"),),
        }
