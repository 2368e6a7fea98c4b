"""Hostile commands for a sandbox, as POSIX shell: exceed a limit of bytes or time, nest without end.

1. Each attack is bounded in bytes, processes and time, and ends by itself.
2. An attack prints its result in a line between two ``@@``, after some time in which the sandbox can end it. If it was
   ended, it prints nothing; if it could not be set up, it prints ``absent``.
3. Tools beyond POSIX (``perl``, ``python3``, ``fallocate``, ``setsid``) are used where they exist.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from sandboxgym.conformance.sandbox_probes.places import Place
from sandboxgym.conformance.sandbox_probes.shell import located

MIB = 2**20
SMALLEST, LARGEST = 2 * MIB, 64 * MIB
"""Smallest and largest disk limit in bytes that is tried, by writing two and a half times as much."""
MOST_FILES = 20_000
LONGEST = 20.0
"""Longest time limit that is tried, in seconds."""
LEVELS = 1500
"""Number of nested directories: too deep for recursive functions, but with paths of less than 4,096 bytes."""
LONG, LONG_LEVELS = 200, 40
"""Letters of a directory name, and number of directories so named that are nested: longer than a path may be."""

# Writes so many MiB, as long as it is let; $n counts them. What is written is no hole.
_WRITING = """mib() { dd if=/dev/zero bs=65536 count=16 2>/dev/null; }
rest() { sleep 0.01 2>/dev/null; }
told() { sleep @SETTLE@ 2>/dev/null || sleep 2; echo "@@$1@@"; }
rm -rf h; mkdir -p h && cd h || exit
n=0
"""
_TMPFILES = {
    "python3": """import os,time
kept=[]; n=0
try:
  while n<@MOST@:
    kept.append(os.open(".",os.O_TMPFILE|os.O_RDWR,0o600))
    for i in range(@PART@):
      os.write(kept[-1],bytes(1<<20)); n+=1; time.sleep(.01)
except OSError as error:
  if not n and error.errno in (21,22,95): n="absent"
time.sleep(@SETTLE@)
print("@@%s@@"%n)""",
    "perl": """use Fcntl; $n=0; $flag=`uname -m`=~/arm|aarch/ ? 0x404000 : 0x410000;
OUT: while($n<@MOST@){ my $h; sysopen($h,".",$flag|2,0600) or do { $n="absent" unless $n; last }; push @kept,$h;
for(1..@PART@){ defined(syswrite($h,"\\0"x(1<<20))) or last OUT; $n++; select(undef,undef,undef,.01) } }
select(undef,undef,undef,@SETTLE@); print "\\@\\@$n\\@\\@\\n";""",
}
_DESCEND = """
name=x; while [ ${#name} -lt @LONG@ ]; do name=$name$name; done; name=$(printf %.@LONG@s "$name"); i=0
while [ $i -lt @LONG_LEVELS@ ] && mkdir "$name" 2>/dev/null && { cd -P "$name" || cd "$name"; } 2>/dev/null; do
  i=$((i+1))
done
"""
_TMPFILE_COMMAND = "\n".join(
    f"{'if' if number == 0 else 'elif'} command -v {tool} >/dev/null; then {tool} -{'c' if tool == 'python3' else 'e'} "
    f"'{program}'"
    for number, (tool, program) in enumerate(_TMPFILES.items())
)
WRITING = {
    "files": "while [ $n -lt @MOST@ ] && mib >> f$((n / @PART@)); do n=$((n+1)); rest; done; told $n",
    "deleted files": """hold() { (
  exec 7>g || exit; rm g; j=0
  while [ $j -lt @PART@ ] && mib >&7; do j=$((j+1)); n=$((n+1)); rest; done
  if [ $j -eq @PART@ ] && [ $n -lt @MOST@ ]; then hold; else told $n; fi
) }
hold""",
    "files without a name": f"{_TMPFILE_COMMAND}\nelse echo '@@absent@@'; fi",
    "deep directories": f"""{_DESCEND}
if [ $i -lt 25 ]; then echo '@@absent@@'
else while [ $n -lt @MOST@ ] && mib >> f$((n / @PART@)); do n=$((n+1)); rest; done; told $n; fi""",
    "small files": """i=0; ok=y
while [ $i -lt $((@MOST@ * 256)) ] && [ $ok ]; do
  [ $((i % 500)) -eq 0 ] && { d=d$i; mkdir $d 2>/dev/null || ok=; rest; }
  { printf x > $d/$i; } 2>/dev/null || ok=; i=$((i+1))
done
k=$(du -sk . 2>/dev/null | cut -f1); told $((${k:-0} / 1024))""",
    "reserved blocks": """command -v fallocate >/dev/null || { echo '@@absent@@'; exit; }
echo > r; fallocate -n -l $((@MOST@ * 1048576)) r 2>/dev/null; told $(($(du -sk . | cut -f1) / 1024))""",
}
"""Ways of writing too much; each tells how many MiB it has. ``files`` is what any limit holds."""
COUNTING = """i=0; ok=y
while [ $i -lt @FILES@ ] && [ $ok ]; do
  [ $((i % 500)) -eq 0 ] && { d=d$i; mkdir $d 2>/dev/null || ok=; rest; }
  { : ; } > $d/$i 2>/dev/null || ok=; i=$((i+1))
done; told $i"""
"""Command that makes empty files and prints their number."""
ELSEWHERE = """while IFS= read -r d; do
  n=0; while [ $n -lt @MOST@ ] && mib 2>/dev/null >> "$d/@NAME@-bytes$((n / @PART@))"; do n=$((n+1)); rest; done
  sleep @SETTLE@ 2>/dev/null; rm -f "$d/@NAME@-bytes"*; echo "@@$n $d@@"
done <<'@EOF@'
@PLACES@
@EOF@"""
"""Command that writes files in other places; the last one printed is the one that was reached."""


def writing(way: str, limit: int, *, settle: float) -> str:
    """Command that writes two and a half times a disk limit and prints the number of MiB written.

    Args:
        way: a key of `WRITING`.
        limit: the disk limit in bytes.
        settle: seconds to wait before the result is printed.
    """
    return _command(WRITING[way], limit, settle)


def counting(files: int, *, settle: float) -> str:
    """Command that makes twice as many empty files as the limit and prints their number."""
    return _command(COUNTING.replace("@FILES@", str(2 * files + 100)), SMALLEST, settle)


def elsewhere(places: Sequence[Place], token: str, limit: int, *, settle: float) -> str:
    """Command that writes two and a half times a disk limit in the given places."""
    listed = "\n".join(place.path for place in places)
    body = ELSEWHERE.replace("@PLACES@", listed).replace("@NAME@", f".sandboxgym-probe-{token}")
    return _command(body, limit, settle)


def _command(body: str, limit: int, settle: float) -> str:
    most = -(-5 * limit // (2 * MIB)) + 1
    fills = {"@MOST@": most, "@PART@": max(1, limit // (4 * MIB)), "@SETTLE@": f"{settle:g}"}
    fills |= {"@LONG@": LONG, "@LONG_LEVELS@": LONG_LEVELS}
    return located('cd "$B" && sh -c \'' + _quoted(_filled(f"{_WRITING}{body}", fills)) + "' </dev/null 2>/dev/null")


def _quoted(text: str) -> str:
    return text.replace("'", "'\\''")


def _filled(text: str, fills: dict[str, object]) -> str:
    for hole, value in fills.items():
        text = text.replace(hole, str(value))
    return text


def told(output: str) -> str:
    """Result printed by an attack; empty if it was ended."""
    parts = re.findall(r"@@(.*?)@@", output)
    return parts[-1] if parts else ""


# Time.

_BEAT = (
    'i=0; while [ $i -lt @BEATS@ ] && ! [ -e stopped ]; do i=$((i+1)); echo $i > "beat-$1"; sleep 0.1; done 2>/dev/null'
)
# Several processes append to one file: if they overwrote it, it might be empty whenever it is read.
_CHAINS = {
    "perl": 'use POSIX; $end=time+@LASTS@; while(time<$end && !-e "stopped"){ $p=fork; exit if $p; setsid(); '
    'if(open F,">>beat-chain"){ print F "x"; close F } select(undef,undef,undef,.0005) }',
    "python3": 'import os,time\nend=time.time()+@LASTS@\nwhile time.time()<end and not os.path.exists("stopped"):\n'
    '  if os.fork(): os._exit(0)\n  os.setsid();open("beat-chain","a").write("x");time.sleep(.0005)',
}
SURVIVORS = {
    "background": "sh -c '@BEAT@' $t background &",
    "session": "setsid sh -c '@BEAT@' $t session &",
    "double fork": "( ( sh -c '@BEAT@' $t double & ) & )",
    "deaf": "sh -c 'trap \"\" TERM HUP INT QUIT PIPE; @BEAT@' $t deaf &",
    "without variables": 'setsid env -i PATH="$PATH" sh -c \'trap "" TERM; @BEAT@\' $t without &',
    "stopped": "setsid sh -c 'kill -STOP $$; @BEAT@' $t stopped &",
    "fork chain": "for k in 3 6 10 15; do if command -v perl >/dev/null; then perl -e '@PERL@' $t chain & "
    "elif command -v python3 >/dev/null; then python3 -c '@PYTHON@' $t chain & fi; done",
}
"""Ways of continuing after a command's time; each has a heartbeat, or shows in /proc."""
_BEATS = {way: way.split()[-1 if way == "fork chain" else 0] for way in SURVIVORS}


def outliving(token: str, seconds: float) -> str:
    """Command that starts all of `SURVIVORS` and then waits for longer than the time limit, but not for ever."""
    lasts = round(seconds) + 25
    lines = [f"t={token[:3]}; t=${{t}}{token[3:]}", 'cd "$B" && rm -rf h && mkdir h && cd h || exit']
    for line in SURVIVORS.values():
        for hole, program in (("@PERL@", _CHAINS["perl"]), ("@PYTHON@", _CHAINS["python3"]), ("@BEAT@", _BEAT)):
            line = line.replace(hole, program)
        line = line.replace("@LASTS@", str(lasts)).replace("@BEATS@", str(10 * lasts))
        lines.append(f"{{ {line}\n}} </dev/null >/dev/null 2>&1")
    lines.append(f"sleep {lasts}; echo '@@outlived@@'")
    return located("(\n" + "\n".join(lines) + "\n)")


def survivors(output: str) -> list[str]:
    """Names of the surviving ways in the output of `survived`."""
    named = {beat: way for way, beat in _BEATS.items()}
    return sorted({named.get(beat, beat) for beat in told(output).split()})


def survived(token: str) -> str:
    """Command that shows which of `SURVIVORS` are alive, to be run after the time limit."""
    beats = " ".join(_BEATS.values())
    return located(f"""(
t={token[:3]}; t=${{t}}{token[3:]}; cd "$B/h" && printf '%s' "$t" > token || exit
for b in {beats}; do cat beat-$b > was-$b; done 2>/dev/null; sleep 1; found=
for b in {beats}; do
  if [ -e beat-$b ] && ! cmp -s beat-$b was-$b; then found="$found $b"; fi
done
for f in $(grep -l -F -f token /proc/[0-9]*/cmdline 2>/dev/null); do
  case $(cut -d')' -f2 "${{f%cmdline}}stat" 2>/dev/null) in ""|" Z"*|" X"*) continue;; esac
  found="$found $(tr '\\0\\n' '  ' < "$f" | sed 's/ *$//; s/.* //')"
done
echo "@@$found@@" )""")


def ended(token: str) -> str:
    """Command that ends the remaining `SURVIVORS`."""
    return located(f"""(
t={token[:3]}; t=${{t}}{token[3:]}; cd "$B/h" && printf '%s' "$t" > token || exit
: > stopped; sleep 0.3
for f in $(grep -l -F -f token /proc/[0-9]*/cmdline 2>/dev/null); do p=${{f%/cmdline}}; kill -9 ${{p#/proc/}}; done
echo ended ) 2>/dev/null""")


def visible(token: str) -> list[int]:
    """Processes visible on this machine with a token in their arguments or environment, without the suite's own."""
    found = []
    for entry in Path("/proc").iterdir() if Path("/proc").is_dir() else ():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                state = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
                said = (entry / "cmdline").read_bytes() + b"\0" + (entry / "environ").read_bytes()
            except (OSError, IndexError):
                continue
            if state not in "ZX" and token.encode() in said:
                found.append(int(entry.name))
    return found


def end_visible(token: str) -> None:
    """Kill processes with a token in their arguments: only those that the suite started."""
    for pid in visible(token):
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            continue


# Directories.


def nesting(token: str) -> str:
    """Command that nests directories deeply, with short and with long names, and prints the depth reached."""
    body = f"""(
cd "$B" && rm -rf deep long && mkdir deep long || exit
path=d; i=1; while [ $i -lt 500 ]; do path=$path/d; i=$((i+1)); done
cd deep; i=0; while [ $i -lt {LEVELS} ] && mkdir -p "$path" && {{ cd -P "$path" || cd "$path"; }}; do i=$((i+500)); done
echo {token} > bottom; a=$i
cd "$B/long"; {_descend()}
echo {token} > bottom; echo "@@$a $i@@" ) 2>/dev/null"""
    return located(body)


def bottoms(token: str) -> str:
    """Command that prints how many of the two files at the bottoms of `nesting` exist: ``2`` if all is kept."""
    return located(f"""(
n=0; for top in deep long; do
  cd "$B/$top" || continue; p=$(printf %0500d 0 | sed 's/0/d\\//g')
  while :; do
    if [ -d "$p" ]; then cd -P "$p"; else f=; for f in *; do [ -d "$f" ] && break; done; cd -P "$f"; fi || break
  done
  if [ "$(cat bottom)" = {token} ]; then n=$((n+1)); fi
done; echo "@@$n@@" ) 2>/dev/null""")


def leaving(place: Place, token: str) -> str:
    """Command that leaves files that are hard to clear: deep, locked, oddly named; prints the token."""
    return located(f"""(
t={token[:3]}; t=${{t}}{token[3:]}; umask 0
path=d; i=1; while [ $i -lt 500 ]; do path=$path/d; i=$((i+1)); done
(
  cd '{place.path}' && mkdir ".$t" && cd ".$t" || exit
  mkdir locked deep; : > locked/file; chmod 0 locked; mkfifo fifo; : > "$(printf 'new\\nline \\377')"; ln -s / root
  (cd deep; i=0; while [ $i -lt {LEVELS} ] && mkdir -p "$path" && cd -P "$path"; do i=$((i+500)); done)
{_descend()}
) 2>/dev/null
echo "@@$t@@" )""")


def lingering(token: str) -> str:
    """Command that leaves processes that ignore signals, or are stopped; prints the token."""
    return located(f"""(
t={token[:3]}; t=${{t}}{token[3:]}; cd "$B"
{{ setsid env MARKED=$t sh -c 'trap "" TERM HUP INT; i=0; while [ $i -lt 40 ]; do i=$((i+1)); sleep 1; done' $t left &
setsid env MARKED=$t sh -c 'kill -STOP $$; sleep 1' $t stopped & }} </dev/null >/dev/null 2>&1
echo "@@$t@@" )""")


def _descend() -> str:
    return _DESCEND.replace("@LONG@", str(LONG)).replace("@LONG_LEVELS@", str(LONG_LEVELS)).strip()


def remove(folder: Path) -> None:
    """Empty a directory of the suite that `leaving` may have filled, by ``rm``, which handles any depth."""
    for entry in folder.iterdir():
        subprocess.run(["chmod", "-R", "u+rwX", "--", entry], check=False, capture_output=True)
        subprocess.run(["rm", "-rf", "--one-file-system", "--", entry], check=False, capture_output=True)
