"""Attempts to starve the owner of a sandbox: its memory, its time, its way to the sandbox.

Each runs in an owner process of its own (``owner.py``), watched from here: one that grows or waits is killed. An
attempt passes if it makes the owner take more than `MOST_BYTES` or `MOST_SECONDS`, raises an error other than those of
`TYPED`, or leaves a sandbox that cannot be used even after a restore.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sandboxgym import errors
from sandboxgym.attack.attempt import Attempt, NotApplicable, Observed, blocked, never, passed
from sandboxgym.attack.stage import FULL, KILL_BYTES, MIB, Stage
from sandboxgym.sandbox.base import CONTROL, Capabilities, SandboxError
from sandboxgym.sandbox.layers.disk import remove_directories
from sandboxgym.sandbox.sandbox import Sandbox
from sandboxgym.system import run_directories as leftovers

MOST_BYTES = 96 * MIB
MOST_SECONDS = 40.0
TYPED: tuple[type[BaseException], ...] = (
    SandboxError,
    OSError,
    ValueError,
    *(value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)),
)
"""Errors that every user of a sandbox must expect."""
Action = Callable[[Sandbox], object]


class Passed(Exception):
    """Raised if the owner was starved; the message says how."""


@dataclass(frozen=True, slots=True)
class Starvation:
    """Task of an owner process."""

    name: str
    about: str
    before: str
    """Attacker's command, run inside."""
    action: Action
    """Action of the owner afterwards; typed errors are fine."""

    def run(self, stage: Stage) -> str:
        """Perform the task in a new sandbox; returns the observation.

        Raises:
            Passed: the sandbox is of no use any more.
        """
        sandbox, first = _shared(stage)
        detail = "it was done"
        try:
            if self.before:
                sandbox.execute(self.before, timeout=3)
            self.action(sandbox)
        except TYPED as error:
            detail = f"{type(error).__name__}: {error}"[:160]
        except BaseException:
            _forget(stage)
            raise
        try:
            how = _usable(sandbox, first)
            sandbox.restore(first)
        except TYPED:
            _forget(stage)
            how = "it still works"
        except BaseException:
            _forget(stage)
            raise
        return f"{detail}; {how}"


def _shared(stage: Stage) -> tuple[Sandbox, Any]:
    """Sandbox that tasks share, with its first state."""
    if "starved" not in stage.notes:
        sandbox = stage.sandbox(disk=1024 * MIB, processes=450, memory=512 * MIB, seconds=20)
        sandbox.execute("true", timeout=10)
        stage.notes["starved"] = (sandbox, sandbox.snapshot())
    found: tuple[Sandbox, Any] = stage.notes["starved"]
    return found


def _forget(stage: Stage) -> None:
    sandbox, first = stage.notes.pop("starved")
    stage.drop(sandbox)
    first.release()


def _usable(sandbox: Sandbox, first: Any) -> str:
    """Find out how an attacked sandbox can be used again."""
    for attempt in ("it still works", "it was restored"):
        try:
            if attempt == "it was restored":
                sandbox.restore(first)
            if "usable" in sandbox.execute("echo usable", timeout=2).output:
                return attempt
        except TYPED:
            continue
    try:
        sandbox.restore(first)
        done = sandbox.execute("echo usable", timeout=2)
        if "usable" in done.output:
            return "it was restored"
        why = f"exit status {done.exit_code}, {done.output[:60]!r}"
    except TYPED as error:
        why = f"{type(error).__name__}: {error}"[:120]
    raise Passed(f"the sandbox answers no more, not after a restore either: {why}")


TASKS: dict[str, Starvation] = {}


def _task(name: str, about: str, before: str, action: Action = lambda _: None) -> None:
    TASKS[name] = Starvation(name, about, before, action)


def _read(path: str) -> Action:
    def action(sandbox: Sandbox) -> object:
        if "limit" in inspect.signature(sandbox.read_file).parameters:
            return sandbox.read_file(path, limit=MIB)  # type: ignore[call-arg]
        return sandbox.read_file(path)

    return action


def _write(path: str) -> Action:
    return lambda sandbox: sandbox.write_file(path, b"x" * 200000)


def _execute(command: str, timeout: float = 2) -> Action:
    return lambda sandbox: sandbox.execute(command, timeout=timeout)


def _run(command: str, timeout: float = 2) -> Action:
    return lambda sandbox: sandbox.run(command, timeout=timeout)


def _snapshot(sandbox: Sandbox) -> None:
    snapshot = sandbox.snapshot()
    try:
        sandbox.restore(snapshot)
    finally:
        snapshot.release()


def _pack(sandbox: Sandbox) -> None:
    snapshot = sandbox.snapshot(mode="filesystem")
    try:
        again = sandbox.unpack(snapshot.pack())
        again.release()
    finally:
        snapshot.release()


def _fork(sandbox: Sandbox) -> None:
    for child in sandbox.fork(2):
        child.run("true")
        child.close()


def _processes(sandbox: Sandbox) -> None:
    sandbox.backend.processes()
    sandbox.lossy()


# What is read and written
_PYTHON_SOCKET = "import socket; socket.socket(socket.AF_UNIX).bind('/root/x')"
for _name, _before, _path in (
    ("huge", "truncate -s 200M /root/x", "/root/x"),
    ("sparse", "truncate -s 900M /root/x", "/root/x"),
    ("pagemap", "true", "/proc/1/pagemap"),
    ("own-pagemap", "true", "/proc/self/pagemap"),
    ("memory", "true", "/proc/self/mem"),
    ("zero", "true", "/dev/zero"),
    ("zero-link", "ln -s /dev/zero /root/x", "/root/x"),
    ("random", "true", "/dev/urandom"),
    ("full", "true", "/dev/full"),
    ("terminal", "true", "/dev/tty"),
    ("multiplexer", "true", "/dev/ptmx"),
    ("fifo", "mkfifo /root/x", "/root/x"),
    ("fifo-fed", "mkfifo /root/x; (yes > /root/x &)", "/root/x"),
    ("socket", f'python3 -c "{_PYTHON_SOCKET}"', "/root/x"),
    ("directory", "mkdir /root/x", "/root/x"),
    ("loop", "ln -s x /root/x", "/root/x"),
    ("kernel-log", "true", "/proc/kmsg"),
    ("growing", "(yes > /root/x &) ; sleep 0.05", "/root/x"),
    (
        "deep",
        "cd /root; for i in $(seq 40); do n=$(printf 'd%.0s' {1..200}); mkdir $n; cd -P $n; done; cd /",
        "/root" + f"/{'d' * 200}" * 40,
    ),
):
    _task(f"read-{_name}", f"has the owner read without end or bound ({_name})", _before, _read(_path))
for _name, _before, _path in (
    ("fifo", "mkfifo /root/x", "/root/x"),
    ("fifo-full", "mkfifo /root/x; (sleep 100 < /root/x &)", "/root/x"),
    ("full", "true", "/dev/full"),
    ("terminal", "true", "/dev/tty"),
    ("directory", "mkdir /root/x", "/root/x"),
    ("loop", "ln -s x /root/x", "/root/x"),
    ("process", "true", "/proc/self/mem"),
    ("below-file", "touch /root/x", "/root/x/y"),
    ("locked-parent", "mkdir -m 0 /root/x", "/root/x/y/z"),
):
    _task(f"write-{_name}", f"has the owner wait for a write ({_name})", _before, _write(_path))

# Floods and terminals
for _name, _command in (
    ("lines", "head -c 150000000 /dev/zero | tr '\\0' '\\n'"),
    ("one-line", "head -c 150000000 /dev/zero | tr '\\0' x"),
    ("bytes", "head -c 100000000 /dev/urandom"),
    ("errors", "yes >&2"),
    ("controls", "yes $'\\e[2J\\e]0;x\\a\\e[6n\\x9b\\x00'"),
    ("endless", "yes"),
):
    _task(f"flood-{_name}", "floods the owner with output", "", _execute(_command, 1.5))
    _task(f"flood-{_name}-run", "floods the owner with output of a fresh process", "", _run(_command, 1.5))
_task(
    "flood-interact", "floods the owner while it waits", "", lambda s: (s.interact("yes\n", timeout=1), s.interrupt())
)
_task(
    "deaf-interact",
    "cannot be interrupted",
    "",
    lambda s: (s.interact("trap '' INT QUIT TERM HUP TSTP; while :; do :; done\n", timeout=1), s.interrupt()),
)
for _name, _command in (
    ("raw", "stty raw -echo -isig; sleep 0.1"),
    ("slow", "stty 0 2>/dev/null; stty 50"),
    ("echo", "stty echo icanon ixon; printf '\\023'"),
    ("hang-up", "kill -HUP $$"),
    ("killed", "kill -9 $$"),
    ("stopped", "kill -STOP $$"),
    ("closed-output", "exec >&- 2>&-"),
    ("closed-input", "exec <&-"),
    ("all-closed", 'for f in /proc/$$/fd/*; do eval "exec ${f##*/}>&-"; done'),
    ("prompt", "readonly PS1=x PS2=y PROMPT_COMMAND='yes'"),
    ("debug-trap", "trap 'sleep 0.2; echo trapped' DEBUG; shopt -s extdebug"),
    ("exit-trap", "trap 'sleep 100' EXIT"),
    ("strict", "set -euo pipefail -o noclobber -f -n"),
    (
        "functions",
        "for f in echo printf eval builtin command export declare set source read exec test trap cd; do "
        'eval "$f() { :; }" 2>/dev/null; done',
    ),
    ("aliases", "shopt -s expand_aliases; alias echo=false printf=false eval=false builtin=false"),
    ("no-builtins", "enable -n echo printf eval read export declare trap test"),
    ("no-path", "PATH=; unset HOME; IFS=abcdefghijklmnopqrstuvwxyz; cd /"),
    ("limits", "ulimit -n 8; ulimit -f 0; ulimit -v 20000; ulimit -u 1"),
    ("umask", "umask 777"),
    ("variable", "export HUGE=$(head -c 30000000 /dev/zero | tr '\\0' x)"),
    ("variables", "for i in {1..20000}; do export V$i=$i; done"),
    ("function", 'eval "f() { $(for i in {1..40000}; do echo echo $i;done) ; }"'),
    ("readonly", "for v in $(compgen -v); do readonly $v; done 2>/dev/null"),
    ("deleted-directory", "mkdir /tmp/gone; cd /tmp/gone; rmdir /tmp/gone"),
    ("deep-directory", "for i in {1..40}; do n=$(printf 'd%.0s' {1..200}); mkdir -p $n; cd -P $n; done"),
    ("strange-directory", "mkdir $'/tmp/a\\nb\\xff\\e[2J'; cd $'/tmp/a\\nb\\xff\\e[2J'"),
    ("many-jobs", "for i in {1..150}; do sleep 100 & done"),
    ("loop", "while :; do :; done"),
    ("unfinished", "cat <<'X'\nno end"),
):
    _task(f"shell-{_name}", f"makes the shell useless for good ({_name})", _command, _execute("true"))

# The control directory
for _name, _command in (
    (
        "garbage",
        "for f in $(find {c} -type p); do (head -c 40000000 /dev/urandom | tr -d '\\n' > $f &); done; sleep 0.5",
    ),
    ("lines", "for f in $(find {c} -type p); do (yes 0 | head -c 20000000 > $f &); done; sleep 0.5"),
    ("removed", "rm -rf {c}/*"),
    ("renamed", "for f in {c}/*; do mv $f $f.gone; done"),
    ("directories", "find {c} -mindepth 1 ! -type d | while read f; do rm -f $f; mkdir $f; done"),
    ("loops", "find {c} -mindepth 1 ! -type d | while read f; do rm -f $f; ln -s $f $f; done"),
    ("devices", "find {c} -mindepth 1 ! -type d | while read f; do rm -f $f; ln -s /dev/zero $f; done"),
    ("pipes", "find {c} -type f | while read f; do rm -f $f; mkfifo $f; done"),
    ("file", "touch {c}/file {c}/0 {c}/1 {c}/2 {c}/3"),
    ("link", "ln -s /proc/self {c}/link; ln -s / {c}/root"),
    ("fifo", "mkfifo {c}/fifo"),
    ("huge", "head -c 100000000 /dev/zero > {c}/huge"),
    ("many", "for i in {{1..2000}}; do : > {c}/f$i; done"),
    ("closed", "chmod -R 0 {c}"),
    ("deep", 'cd {c}; python3 -c \'import os\nfor _ in range(1500): os.mkdir("d"); os.chdir("d")\'; cd /'),
):
    _task(
        f"control-{_name}",
        f"makes the sandbox useless by its control directory ({_name})",
        _command.format(c=CONTROL),
        _snapshot,
    )

# Snapshots and listings of hostile files and processes
_DEEPER = 'python3 -c \'import os\nfor _ in range({}): os.mkdir("d"); os.chdir("d")\''
_DEEP = f"cd /root; {_DEEPER.format(1500)}; cd /"
for _name, _command in (
    ("deep", _DEEP),
    ("sparse", "truncate -s 900M /root/x"),
    ("special", f'mkfifo /root/f; python3 -c "{_PYTHON_SOCKET}"; ln -s /dev/zero /root/l'),
    ("names", "cd /root; touch $'a\\nb' $'\\xff\\xfe' -- -rf '*' ' '; mkdir $'\\e[2J'; cd /"),
    ("attributes", "touch /root/x; python3 -c \"import os; os.setxattr('/root/x', 'user.a', b'x' * 3000)\""),
    ("closed", "mkdir -p /root/c/d; touch /root/c/d/x; chmod -R 0 /root/c"),
    ("links", "cd /root; touch x; for i in {1..1000}; do ln x l$i; done; cd /"),
    ("files", "cd /root; for i in {1..2000}; do : > f$i; done; cd /"),
):
    _task(f"pack-{_name}", f"has the owner pack without bound ({_name})", _command, _pack)
    _task(f"snapshot-{_name}", f"makes snapshots fail for good ({_name})", _command, _fork)
for _name, _command in (
    ("many", "for i in {1..380}; do sleep 100 & done"),
    ("names", "(exec -a $'\\e[2J\\n\\xff\\xfe' sleep 100) &"),
    ("long-names", "for i in {1..20}; do (exec -a $(head -c 120000 /dev/zero | tr '\\0' x) sleep 100) & done"),
    (
        "descriptors",
        "python3 -c 'import os,time; f=[os.open(\"/dev/null\",0) for _ in range(3000)]; time.sleep(100)' & sleep 0.4",
    ),
    ("stopped", "for i in {1..50}; do (kill -STOP $BASHPID) & done; sleep 0.2"),
    (
        "zombies",
        "python3 -c 'import os,time\nfor i in range(200):\n  os.fork() or os._exit(0)\ntime.sleep(100)' & sleep 0.3",
    ),
):
    _task(f"processes-{_name}", f"has the owner list processes without end ({_name})", _command, _processes)


def run_directories(pid: int) -> list[Path]:
    """Directories of a process's objects that must not outlive it."""
    root = leftovers.runtime_dir(create=False)
    return sorted(root.glob(f"*-{pid}-*")) if root.is_dir() else []


def clear(pid: int, seconds: float = 5.0) -> None:
    """Remove a killed process's remains, even where their directories stop `run_directories.reap`."""
    deadline = time.monotonic() + seconds
    leftovers.reap()
    while (left := run_directories(pid)) and time.monotonic() < deadline:
        remove_directories(str(entry) for path in left for entry in path.iterdir() if entry.is_dir())
        leftovers.reap()
        time.sleep(0.1)


def starve(stage: Stage, name: str) -> Observed:
    """Have an owner process perform a task, and watch it."""
    owner = stage.owner()
    owner.tell("starve", name)
    found = owner.answer(seconds=MOST_SECONDS + 10, most=KILL_BYTES)
    if owner.process.poll() is not None:
        stage.forget_owner()
        clear(owner.process.pid)
    verdict, detail = found["verdict"], str(found["detail"])
    if verdict == "not applicable":
        raise NotApplicable(detail)
    if verdict in ("passed", "untyped"):
        return passed(detail)
    if found["bytes"] > MOST_BYTES:
        return passed(f"the owner took {found['bytes'] // MIB} MiB; {detail}")
    if found["seconds"] > MOST_SECONDS:
        return passed(f"the owner was kept for {found['seconds']:.0f} s; {detail}")
    return blocked(detail)


def _attempt(task: Starvation) -> Attempt:
    same = task.name.startswith(("read-", "write-", "flood-", "pack-", "shell-"))
    not_on = frozenset({FULL}) if same else frozenset[str]()
    declared = _copies if task.name.startswith("pack-") else never
    run = partial(starve, name=task.name)
    return Attempt(f"starvation/{task.name}", task.about, run, declared=declared, not_on=not_on)


def _copies(capabilities: Capabilities) -> bool:
    """Condition: packing takes as much as everything written, holes and the base image included."""
    return capabilities.snapshot_cost == "written"


STARVATIONS: Sequence[Attempt] = tuple(_attempt(task) for task in TASKS.values())
