"""Benchmark of many live forks of one sandbox: in this process, and at ``sandboxgym serve e2b`` by E2B's own library.

sandboxgym bench e2b [--forks 20] [--size 64] [--repeats 5] [--write docs/results/details/live-forks.md]

The sandbox runs a process with so many MiB of random memory. Forks are timed until every copy has run a command that
finds the process alive; the snapshot counts.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sandboxgym.bench.sandbox import Times
from sandboxgym.bench.tools import result_page
from sandboxgym.sandbox.overlay.backend import criu_checkpointer
from sandboxgym.sandbox.sandbox import LAZY_PAGES, Sandbox, make_sandbox
from sandboxgym.system import interpreter

WANTED = 1.0
"""Seconds that twenty live forks of a process of 64 MiB should take at most."""
THREADS = 8
_HOLD = 'python3 -c \'import os, time; x = os.urandom({size} << 20); open("/tmp/new", "w").write(str(os.getpid())); '
_HOLD += 'os.rename("/tmp/new", "/tmp/pid"); time.sleep(100000)\''
_WAIT = "until [[ -e /tmp/pid ]]; do sleep 0.01; done"
_ALIVE = "kill -0 $(</tmp/pid) && echo alive"


def library(size: int, number: int, repeats: int, *, lazy_pages: int | None) -> tuple[Times, Times]:
    """Time forks in this process: the snapshot alone, and snapshot and forks until each has answered."""
    snapshots, forks = Times(), Times()
    with make_sandbox("overlay", snapshot="full", lazy_pages=lazy_pages) as sandbox:
        sandbox.execute(f"{_HOLD.format(size=size)} & {_WAIT}", timeout=300)
        with ThreadPoolExecutor(THREADS) as pool:
            for _ in range(repeats):
                with snapshots.one():
                    sandbox.snapshot(strict=True).release()
                children: list[Sandbox] = []
                try:
                    with forks.one():
                        children = sandbox.fork(number, strict=True)
                        answers = list(pool.map(lambda child: child.execute(_ALIVE, timeout=300).output, children))
                finally:
                    list(pool.map(Sandbox.close, children))
                if set(answers) != {"alive\n"}:
                    raise RuntimeError(f"the process is not alive in all forks: {answers}")
    return snapshots, forks


@contextmanager
def server() -> Iterator[str]:
    """Run a server; hands out its address."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text("e2b_bench")
        words = ["serve", "e2b", "--port", "0", "--backend", "overlay", "--keys", os.fspath(keys)]
        words += ["--snapshot", "full", "--sandboxes", "1000", "--creations", "1000"]
        command, environment = interpreter.module_command("sandboxgym", *words), interpreter.environment()
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if "http://" not in line:
                raise RuntimeError(f"the server did not start: {line}")
            yield "http://" + line.partition("http://")[2].split()[0]
        finally:
            process.terminate()
            process.wait()
            process.stdout.close()


def service(size: int, number: int, repeats: int) -> tuple[Times, Times]:
    """Time forks at a server: until the request is answered, and until each copy has answered."""
    import e2b

    requests, forks = Times(), Times()
    with server() as url, ThreadPoolExecutor(THREADS) as pool:
        there: dict[str, Any] = {"api_url": url, "sandbox_url": url, "api_key": "e2b_bench"}
        sandbox = e2b.Sandbox.create(timeout=3600, **there)
        sandbox.commands.run(_HOLD.format(size=size), background=True)
        sandbox.commands.run(_WAIT, timeout=300)
        for _ in range(repeats):
            children: list[Any] = []
            try:
                with forks.one():
                    with requests.one():
                        children = sandbox.fork(count=number, timeout=600)
                    if failed := [child for child in children if isinstance(child, Exception)]:
                        raise failed[0]
                    answers = list(pool.map(lambda child: child.commands.run(_ALIVE, timeout=300).stdout, children))
            finally:
                list(pool.map(lambda child: child.kill(), children))
            if set(answers) != {"alive\n"}:
                raise RuntimeError(f"the process is not alive in all forks: {answers}")
    return requests, forks


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line: measure, print, and write the page if asked to."""
    parser = argparse.ArgumentParser(prog="sandboxgym bench e2b", description=__doc__)
    parser.add_argument("--forks", type=int, default=20, help="forks that live at the same time (default: 20)")
    parser.add_argument("--size", type=int, default=64, help="MiB of the process (default: 64)")
    parser.add_argument("--repeats", type=int, default=5, help="(default: 5)")
    parser.add_argument("--write", metavar="FILE", help="file to write the page to")
    options = parser.parse_args(argv)
    checkpointer = criu_checkpointer()
    if reason := checkpointer.why_unavailable():
        raise SystemExit(f"full snapshots are not available here: {reason}")
    try:
        import e2b  # noqa: F401
    except ImportError:
        raise SystemExit("needs E2B's library: pip install 'sandboxgym[e2b]'") from None
    size, number, repeats = options.size, options.forks, options.repeats
    load = os.getloadavg()[0]
    whole, bits = (library(size, number, repeats, lazy_pages=least) for least in (None, LAZY_PAGES // 2))
    served = service(size, number, repeats)
    about = f"CRIU {checkpointer.version()}, e2b {version('e2b')}"
    rows = [
        (f"one snapshot with the process of {size} MiB", whole[0]),
        (f"{number} forks in this process, memory as a whole", whole[1]),
        (f"{number} forks in this process, memory as it is touched", bits[1]),
        (f"`sandbox.fork(count={number})` of E2B's library, until it returns", served[0]),
        ("the same, until each copy has run a command", served[1]),
    ]
    lines = [
        *result_page.head(f"{number} live forks of a sandbox with a process of {size} MiB", "e2b", argv),
        f"{result_page.machine(about)}; load {load:.1f} at the start, {os.getloadavg()[0]:.1f} at the end. "
        "Compare within this page only.",
        "",
        f"| until every copy finds the process alive ({repeats} times) | ms, min / p50 / p95 | per fork, ms | "
        f"at most {WANTED:g} s |",
        "|---|---|---|---|",
    ]
    for what, times in rows:
        each = "" if times is whole[0] else f"{times.median * 1e3 / number:.1f}"
        kept = "" if times is whole[0] else "kept" if times.median <= WANTED else "more"
        lines.append(f"| {what} | {times} | {each} | {kept} |")
    result_page.publish(lines, options.write)


if __name__ == "__main__":
    main()
