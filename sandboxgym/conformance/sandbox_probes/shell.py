"""Hidden state of a shell sandbox, as pairs of commands: one changes it, the other shows it.

1. A probe's commands run through the environment's own actions, in POSIX shell; where a tool, or a persistent shell, is
   missing, the change does not show and the probe does not apply.
2. `script` runs many probes in one action: sandboxes may be slow, and episodes short.
3. Reading uses no patterns of file names, because a probe of the shell's options may have switched them off.
4. Nothing outside the directory in which the first command runs is changed, except ``/dev/shm`` and ``$TMPDIR``
   (default: ``/tmp``), there only names that begin with `MARK`; started processes end by themselves within ten minutes.
5. State of a program (memory, connections, deleted files, locks…) is held by ``process_state.py``, which runs in the
   sandbox and is asked through a FIFO.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sandboxgym.conformance.sandbox_probes import process_state

MARK = "sandboxgym-probe"
"""Name of the directory of the probes, and beginning of all other names."""

Need = Literal["state", "processes", "clock", "rng"]
"""Declaration under which a probe is judged: ``state``, which any snapshot keeps, or a flag of `SnapshotSpec`."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One piece of hidden state.

    Attributes:
        name: stable, dotted; the part before the dot is its group.
        mutate: command that changes it to the value ``@V@`` (``one`` or ``two``; ``@N@`` is 1 or 2); may be empty.
        read: command that prints it.
        need: declaration under which it is judged; None: it is reported and not judged.
        prepare: command that runs before the snapshot on which the probed one builds.
        changes: True if reading itself changes it, as drawing a random number does.
        shared: True if one environment's change can show in another.
    """

    name: str
    mutate: str
    read: str
    need: Need | None = "state"
    prepare: str = ""
    changes: bool = False
    shared: bool = True


def _python(code: str) -> str:
    return f"python3 -c '{code}'"


# A separate program, because a subshell would keep the shell's saved descriptors open and make the sandbox wait.
_LOOP = """
sh -c 'cd "$1"; i=0; while [ $i -lt 3000 ] && ! [ -e stopped ]; do i=$((i+1)); echo $i > @F@.count; sleep 0.1; done' \\
  sh "$B" </dev/null >/dev/null 2>&1 &
echo $! > "$B/@F@.pid"
"""
# A killed process whose parent is gone may stay a zombie, for which kill -0 succeeds.
_ALIVE = """
p=$(cat "$B/@F@.pid" 2>/dev/null); x=$(cat "$B/@F@.count" 2>/dev/null); sleep 0.3
case $(cut -d")" -f2 "/proc/$p/stat" 2>/dev/null) in " Z"*) p=;; esac
y=$(cat "$B/@F@.count" 2>/dev/null); i=0
while [ "$x" = "$y" ] && [ -n "$p" ] && kill -0 "$p" 2>/dev/null && [ $i -lt 100 ]; do
  i=$((i+1)); sleep 0.1; y=$(cat "$B/@F@.count" 2>/dev/null)
done
if [ -n "$p" ] && kill -0 "$p" 2>/dev/null; then
  if [ "$x" = "$y" ]; then echo alive, still; else echo alive, advancing; fi
elif [ "$x" = "$y" ]; then echo none; else echo gone, but still writing; fi
"""
_SERVER = _python(
    'import socket,sys,time;s=socket.socket();s.bind(("127.0.0.1",0));s.listen(8);s.settimeout(1);'
    'open(sys.argv[1],"w").write(str(s.getsockname()[1]));end=time.time()+600\n'
    "while time.time()<end:\n"
    "  try:\n"
    '    c=s.accept()[0];c.sendall(b"here");c.close()\n'
    "  except OSError: pass"
)
_CLIENT = _python(
    'import socket,sys;s=socket.create_connection(("127.0.0.1",int(open(sys.argv[1]).read())),1);'
    "print(s.recv(9).decode())"
)

_HTTP_SERVER = (
    "python3 -u -c 'import os,threading,http.server as h;t=threading.Timer(600,os._exit,(0,));t.daemon=True;t.start();"
    'h.test(h.SimpleHTTPRequestHandler,port=0,bind="127.0.0.1")\''
)
_HTTP_CLIENT = _python(
    "import http.client as h,re,sys;c=h.HTTPConnection("
    '"127.0.0.1",int(re.search("port (.*?) ",open(sys.argv[1]).read())[1]),timeout=20);'
    'c.request("GET","/page");print(c.getresponse().read().decode())'
)
# Its standard output is the log. That identifies the process, whose id may be reused.
_LOG = """
python3 -c 'import os,sys,time
for i in range(1,120001):
  os.write(1,b"%d\\n"%i);time.sleep(.005)
  if os.path.exists(sys.argv[1]): break' "$B/stopped" </dev/null >>"$B/@F@.log" 2>/dev/null &
echo $! > "$B/@F@.pid"
i=0; until [ -s "$B/@F@.log" ] || [ $i -ge 300 ]; do i=$((i+1)); sleep 0.1; done
"""
_READ_LOG = """
p=$(cat "$B/@F@.pid"); n=$(wc -l < "$B/@F@.log"); i=0; x=
until [ $(wc -l < "$B/@F@.log") -gt $n ] || [ $i -ge 400 ]; do
  [ "/proc/$p/fd/1" -ef "$B/@F@.log" ] || { x=still; break; }
  i=$((i+1)); sleep 0.05
done
y=$(awk 'NR != $1 { print "not "; exit }' "$B/@F@.log"); [ -e "$B/@F@.log" ] && echo "${y}consecutive, ${x:-growing}"
"""
# Its standard input is the FIFO, for the same reason.
_HOLD = """
p=$(cat "$B/held/pid"); [ "/proc/$p/fd/0" -ef "$B/held/in" ] && kill -9 "$p"
rm -rf "$B/held"; mkdir "$B/held"; mkfifo "$B/held/in"
command -v python3 && {
  sh -c 'cd "$1"; exec python3 -q -i ../holder.py @V@ 0<>in >/dev/null 2>&1' sh "$B/held" </dev/null >/dev/null 2>&1 &
  echo $! > "$B/held/pid"
  i=0; until [ -e "$B/held/ready" ] || ! kill -0 $! || [ $i -ge 300 ]; do i=$((i+1)); sleep 0.1; done
  echo 'typed = ["@V@"] * 2' 1<>"$B/held/in"
} >/dev/null
"""
_ASK_HOLDER = """
rm -f "$B/held/answers"; p=$(cat "$B/held/pid"); i=0
[ "/proc/$p/fd/0" -ef "$B/held/in" ] && {
  echo "report()" 1<>"$B/held/in"
  until [ -e "$B/held/answers" ] || ! [ -e "/proc/$p/fd/0" ] || [ $i -ge 400 ]; do i=$((i+1)); sleep 0.05; done
}
sed -n "s/^repl //p" "$B/held/answers"
"""
_PROGRAM = Path(process_state.__file__).read_text(encoding="utf-8")


def _held(name: str) -> Probe:
    """State held by ``process_state.py``, which `process.repl` starts and asks."""
    return Probe(f"held.{name}", ":", f'sed -n "s/^{name} //p" "$B/held/answers"', need="processes")


PROBES: tuple[Probe, ...] = (
    # Files.
    Probe("file.content", 'echo @V@ > "$B/content"', 'cat "$B/content"'),
    Probe("file.changed", 'echo @V@ > "$B/changed"', 'cat "$B/changed"', prepare='echo below > "$B/changed"'),
    Probe("file.binary", "printf 'a\\000b\\377@V@' > \"$B/binary\"", 'cksum < "$B/binary"'),
    Probe("file.large", 'i=0; while [ $i -lt 2000 ]; do echo "$i @V@ padding padding"; i=$((i+1)); done > "$B/large"',
          'cksum < "$B/large"'),
    Probe("file.mode", 'echo x > "$B/mode"; chmod 60@N@ "$B/mode"', 'ls -l "$B/mode" | cut -c1-10'),
    Probe("file.setgid", 'mkdir -p "$B/setgid"; chmod 275@N@ "$B/setgid"', 'ls -ld "$B/setgid" | cut -c1-10'),
    Probe("file.owner", 'chown 1234@N@:1234@N@ "$B/owner"', 'stat -c "%u %g" "$B/owner"',
          prepare='echo x > "$B/owner"'),
    Probe("file.xattr", 'echo x > "$B/xattr"; ' + _python(
        "import os,sys;os.setxattr(sys.argv[1],\"user.probe\",b\"@V@\")") + ' "$B/xattr"',
        _python("import os,sys;print(os.getxattr(sys.argv[1],\"user.probe\"))") + ' "$B/xattr"'),
    Probe("file.mtime", 'echo x > "$B/mtime"; touch -d "2001-02-0@N@ 03:04:05.123456789" "$B/mtime"',
          'stat -c %y "$B/mtime"'),
    Probe("file.ctime", 'echo @V@ > "$B/ctime"', 'stat -c %z "$B/ctime"', need=None),
    Probe("file.symlink", 'rm -f "$B/symlink"; ln -s target-@V@ "$B/symlink"', 'readlink "$B/symlink"'),
    Probe("file.hardlink", 'echo x > "$B/hard-0"; for i in 1 @N@; do ln -f "$B/hard-0" "$B/hard-$i"; done',
          'stat -c %h "$B/hard-0"'),
    Probe("file.sparse", 'rm -f "$B/sparse"; dd if=/dev/null of="$B/sparse" bs=1M seek=@N@',
          'echo $(wc -c < "$B/sparse") $(du -k "$B/sparse" | cut -f1)', need=None),
    Probe("file.fifo", 'rm -f "$B/fifo"-*; mkfifo "$B/fifo-@V@"', 'cd "$B" && ls -F | grep "^fifo.*|"; cd "$OLDPWD"'),
    Probe("file.special_names", "rm -rf \"$B/names\"; mkdir \"$B/names\"; : > \"$B/names/$(printf 'new\\nline @V@')\"; "
          ": > \"$B/names/$(printf 'bytes-\\377\\376')\"; : > \"$B/names/-dash * ? ü\"",
          'ls "$B/names" | cksum'),
    Probe("directory.empty", 'mkdir -p "$B/empty-@V@"',
          'ls "$B" | grep -c "^empty-"; [ -d "$B/empty-two" ] && echo two'),
    Probe("directory.deleted_file", 'rm -f "$B/below/@V@"', 'ls "$B/below"',
          prepare='mkdir "$B/below"; : > "$B/below/one"; : > "$B/below/two"; : > "$B/below/zero"'),
    Probe("directory.replaced", 'rm -r "$B/opaque"; mkdir "$B/opaque"; : > "$B/opaque/@V@"', 'ls "$B/opaque"',
          prepare='mkdir "$B/opaque"; : > "$B/opaque/old"'),
    Probe("directory.becomes_file", 'rm -r "$B/turned"; echo @V@ > "$B/turned"', 'cat "$B/turned"',
          prepare='mkdir -p "$B/turned/inside"'),
    Probe("directory.renamed", 'mv "$B/moved-@O@" "$B/moved-@V@"', 'ls "$B" | grep "^moved-"',
          prepare='mkdir "$B/moved-two"; : > "$B/moved-two/inside"'),
    Probe("file.tmp", 'echo @V@ > "${TMPDIR:-/tmp}/@T@"', 'cat "${TMPDIR:-/tmp}/@T@"'),
    Probe("file.shm", 'echo @V@ > "/dev/shm/@T@"', 'cat "/dev/shm/@T@"'),
    Probe("file.python_module", 'mkdir -p "$B/module"; echo "v = \\"@V@\\"" > "$B/module/probed.py"; '
          'touch -d 2001-01-01 "$B/module/probed.py"; '
          'rm -rf "$B/module/__pycache__"; PYTHONPATH="$B/module" ' + _python("import probed"),
          'PYTHONPATH="$B/module" ' + _python("import probed;print(probed.v)")
          + '; ls "$B/module/__pycache__" | wc -l'),
    # Git.
    Probe("git.index", 'echo @V@ >> "$B/repo/a"; echo @V@ > "$B/repo/b-@V@"; git -C "$B/repo" add b-@V@',
          'git -C "$B/repo" status --porcelain; git -C "$B/repo" diff --cached --stat | tail -1',
          prepare='git init -q "$B/repo"; cd "$B/repo"; git config user.email p@example.org; git config user.name p; '
          'echo 0 > a; git add a; git commit -qm zero; cd "$OLDPWD"'),
    Probe("git.history", 'echo @V@ > "$B/past/a"; git -C "$B/past" commit -qam @V@; echo s >> "$B/past/a"; '
          'git -C "$B/past" stash -q',
          'git -C "$B/past" reflog --format=%gs; git -C "$B/past" stash list --format=%gs',
          prepare='git init -q "$B/past"; cd "$B/past"; git config user.email p@example.org; git config user.name p; '
          'echo 0 > a; git add a; git commit -qm zero; cd "$OLDPWD"'),
    # The shell.
    Probe("shell.cwd", 'mkdir -p "$B/cwd-@V@"; cd "$B/cwd-@V@"', 'case "$PWD" in *cwd-*) echo "${PWD##*/}";; esac'),
    Probe("shell.exported", "export SANDBOXGYM_PROBE=@V@", "echo $SANDBOXGYM_PROBE"),
    Probe("shell.timezone", 'export TZ="PRB-@N@"', "date +%z"),
    Probe("shell.locale", "export LC_ALL=$([ @N@ = 1 ] && echo POSIX || echo C)", "echo $LC_ALL"),
    Probe("shell.variable", "sandboxgym_probe=@V@", "echo $sandboxgym_probe", need="processes"),
    Probe("shell.function", "sandboxgym_function() { echo function-@V@; }", "sandboxgym_function", need="processes"),
    Probe("shell.alias", "alias sandboxgym_alias=@V@", "alias sandboxgym_alias", need="processes"),
    Probe("shell.option", "[ @N@ = 1 ] && set -f || set +f", 'case $- in *f*) echo noglob;; esac', need="processes"),
    Probe("shell.ulimit", "(ulimit -S -n 25@N@) && ulimit -S -n 25@N@", "ulimit -S -n", need="processes"),
    Probe("shell.descriptor", '(exec 8>"$B/descriptor-@V@") && exec 8>"$B/descriptor-@V@"',
          'f=$(readlink /proc/$$/fd/8) && echo "${f##*/}"', need="processes"),
    Probe("shell.offset", "printf '%@N@0s\\nrest\\n' x > \"$B/offset\"; "
          '(exec 9<"$B/offset") && exec 9<"$B/offset" && read -r x <&9',
          "sed -n 's/^pos:[^0-9]*//p' /proc/$$/fdinfo/9", need="processes"),
    Probe("shell.trap", "trap 'echo probe-@V@' USR2", "trap -p USR2 | sed -n 's/.*probe-\\([a-z]*\\).*/\\1/p'",
          need="processes"),
    Probe("shell.history", "history -s probe-history-@V@",
          "history | sed -n 's/.* probe-history-\\([a-z]*\\)$/\\1/p' | tail -n 1", need="processes"),
    Probe("shell.job", 'kill "%?probe-job"; '
          "sh -c 'sleep 600' probe-job-@V@ </dev/null >/dev/null 2>&1 & echo $! > \"$B/@F@.pid\"",
          "jobs -r | sed -n 's/.*probe-job-\\([a-z]*\\) .*/\\1/p'", need="processes"),
    Probe("shell.random", 'RANDOM=@N@; x="$RANDOM $RANDOM"; RANDOM=@N@; echo "$x" > "$B/random"',
          'echo "$RANDOM $RANDOM|$(cat "$B/random")"', need="rng", changes=True, shared=False),
    # Processes.
    Probe("process.background", "kill $(cat \"$B/@F@.pid\" 2>/dev/null); [ @N@ = 1 ] && { " + _LOOP + "}",
          _ALIVE, need="processes"),
    Probe("process.later", "[ @N@ = 2 ] && { " + _LOOP + "}", _ALIVE, need="processes"),
    Probe("process.server", '[ -e "$B/@F@.pid" ] && kill $(cat "$B/@F@.pid"); [ @N@ = 1 ] && { '
          'rm -f "$B/@F@.port"; ' + _SERVER + ' "$B/@F@.port" </dev/null >/dev/null 2>&1 & echo $! > "$B/@F@.pid"; '
          'i=0; until [ -s "$B/@F@.port" ] || [ $i -ge 300 ]; do i=$((i+1)); sleep 0.1; done; }',
          _CLIENT + ' "$B/@F@.port"', need="processes"),
    Probe("process.http", '[ -e "$B/@F@.pid" ] && kill $(cat "$B/@F@.pid"); [ @N@ = 1 ] && { '
          'mkdir -p "$B/site"; echo a page > "$B/site/page"; cd "$B/site"; ' + _HTTP_SERVER
          + ' </dev/null >"$B/@F@.out" 2>/dev/null & echo $! > "$B/@F@.pid"; cd "$OLDPWD"; '
          'i=0; until [ -s "$B/@F@.out" ] || [ $i -ge 300 ]; do i=$((i+1)); sleep 0.1; done; }',
          _HTTP_CLIENT + ' "$B/@F@.out"', need="processes"),
    Probe("process.log", '[ -e "$B/@F@.pid" ] && kill $(cat "$B/@F@.pid"); [ @N@ = 1 ] && {' + _LOG + "}", _READ_LOG,
          need="processes"),
    Probe("process.repl", _HOLD, _ASK_HOLDER, need="processes",
          prepare="cat > \"$B/holder.py\" <<'@EOF@'\n" + _PROGRAM + "@EOF@"),
    *map(_held, process_state.MAKERS),
    # What an agent can't change, but a snapshot may.
    Probe("identity.hostname", "", "hostname", need=None, shared=False),
    Probe("identity.machine", "", "cat /etc/machine-id", need=None, shared=False),
    Probe("identity.address", "", "hostname -I || ip -o -4 address | cut -d' ' -f7", need=None, shared=False),
    Probe("identity.shell_pid", "", "echo $$", need="processes", shared=False),
    Probe("random.kernel", "", "od -An -N8 -tx8 /dev/urandom", need=None, changes=True, shared=False),
    Probe("clock.wall", "", "date +%s.%N", need="clock", shared=False),
    Probe("clock.monotonic", "", "cut -d' ' -f1 /proc/uptime", need="clock", shared=False),
    # Last, because it would change the modes of the files that other probes make.
    Probe("shell.umask", "umask 02@N@", "umask", need="processes"),
)  # fmt: skip

NEEDS_PROCESSES = ("held.", "process.", "shell.descriptor", "shell.job", "shell.offset")
"""Beginnings of the names of those that only a snapshot of processes keeps."""

_FIND = """B=.; while [ ! -d "$B/@M@" ] && [ "$B" != ./../../../../.. ]; do B=$B/..; done; B=$(cd "$B/@M@" && pwd)"""

Phase = Literal["prepare", "one", "two", "read"]


def start() -> str:
    """First command: makes the directory of the probes in the sandbox's working directory."""
    return f"mkdir -p {MARK} && echo started"


def located(command: str) -> str:
    """Prefix ``command`` with a search for the directory of the probes, ``$B``, from it or not too deep below it."""
    return f"{_FIND.replace('@M@', MARK)}\n{command}"


def script(probes: Iterable[Probe], phase: Phase, token: str) -> str:
    """One command that prepares, changes or reads all ``probes``; each one's output is framed for `parse`.

    Args:
        probes: in order.
        phase: the action; ``"one"`` and ``"two"`` are the values to change to.
        token: text unique to the run, for names in shared directories.
    """
    lines = []
    for probe in probes:
        command = {"prepare": probe.prepare, "read": probe.read}.get(phase, probe.mutate)
        if not command:
            continue
        number, other = ("2", "one") if phase == "two" else ("1", "two")
        for mark, value in (
            ("@V@", "two" if phase == "two" else "one"),
            ("@N@", number),
            ("@O@", other),
            ("@T@", f"{MARK}-{token}"),
            ("@F@", probe.name),
        ):
            command = command.replace(mark, value)
        if phase == "read":
            lines.append(f"echo; echo '@@{probe.name}@'")
        lines.append(f"{{ {command.strip()}\n}} 2>/dev/null || :")
    if phase == "read":
        lines.append("echo; echo '@@@'")
    else:
        lines.append("echo done")
    return located("\n".join(lines))


def stop(token: str) -> str:
    """Last command: ends all started processes, and deletes files outside the directory of the probes."""
    return "set +f; " + located(
        ': > "$B/stopped"; for f in "$B"/*.pid; do kill "$(cat "$f")"; done 2>/dev/null\n'
        f'rm -f "/dev/shm/{MARK}-{token}" "${{TMPDIR:-/tmp}}/{MARK}-{token}" 2>/dev/null; echo stopped'
    )


_FRAME = re.compile(r"@@([\w.]+)@\n(.*?)\n?(?=\n@@)", re.DOTALL)


def parse(output: str) -> dict[str, str]:
    """Values of the probes, from the output of the script of phase ``"read"``."""
    return {name: value.strip() for name, value in _FRAME.findall(output.replace("\r", ""))}


Same = Callable[[str, str, float], bool]


def same(probe: Probe, before: str, after: str, elapsed: float) -> bool:
    """True if ``after``, read ``elapsed`` seconds later, is the value after a faithful restore."""
    if probe.name.startswith("clock."):
        try:
            return abs(float(after) - float(before)) < elapsed / 2
        except ValueError:
            return False
    return before == after
