"""Trials of this machine's features: short, as the present user, in a directory that is removed afterwards.

Each returns a `Finding`. A trial uses the feature on a small scale rather than look for signs of it (a kernel may
have overlayfs and forbid it here), in a subprocess with a timeout, in namespaces of its own where it mounts something.
"""

from __future__ import annotations

import http.client
import importlib.metadata
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from sandboxgym import data, registration
from sandboxgym.cli.support.printing import nbytes_text
from sandboxgym.system import interpreter, run_directories
from sandboxgym.system.findings import Finding, Status, package_version

SECONDS = 10.0
"""Timeout in seconds of one trial."""

_FICLONE = 0x40049409
_OVERLAY = """
set -e
cd "$1"
mkdir lower upper work merged
echo below > lower/kept
echo below > lower/deleted
mount -t overlay overlay -o "lowerdir=$1/lower,upperdir=$1/upper,workdir=$1/work$2" "$1/merged"
echo above > merged/kept
rm merged/deleted
test "$(cat lower/kept)" = below
test "$(cat upper/kept)" = above
test ! -e merged/deleted
umount "$1/merged"
"""


def python() -> Finding:
    """Check the Python interpreter."""
    ok = sys.version_info >= (3, 11)
    return Finding(
        "python",
        "ok" if ok else "missing",
        f"{platform.python_implementation()} {platform.python_version()} on {platform.platform(terse=True)}",
        "everything",
        "" if ok else "Python 3.11 or newer",
    )


def cores() -> Finding:
    """Count the cores that this process may run on, after affinity and the control group's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cpu_quota()
    detail = f"{count}" + (f", limited to the time of {quota:g}" if quota and quota < count else "")
    return Finding("cores", "ok", detail, "environments stepping side by side")


def gpu() -> Finding:
    """Check an NVIDIA device and a PyTorch that can use it, without importing PyTorch."""
    enables = "training models of useful size"
    torch = package_version("torch")
    command = shutil.which("nvidia-smi")
    done = _run([command, "--query-gpu=name,memory.total", "--format=csv,noheader"]) if command else None
    if done is None or done.returncode:
        return Finding("gpu", "missing", "no NVIDIA device answers", enables, "not needed for the tiny configurations")
    names = ", ".join(line.strip() for line in done.stdout.splitlines() if line.strip())
    if torch is None:
        return Finding("gpu", "limited", f"{names}; PyTorch is not installed", enables, _pip("train"))
    if "+cpu" in torch:
        fix = "pip install --force-reinstall torch from an index of CUDA builds"
        return Finding("gpu", "limited", f"{names}; PyTorch {torch} is a CPU build", enables, fix)
    return Finding("gpu", "ok", f"{names}; PyTorch {torch}", enables)


def packages() -> Iterator[Finding]:
    """Check the requirements of every extra of the package."""
    for extra, requirements in _extras().items():
        missing = [name for name in requirements if package_version(name) is None]
        here = ", ".join(f"{name} {package_version(name)}" for name in requirements if name not in missing)
        status: Status = "ok" if not missing else "limited" if here else "missing"
        detail = here if not missing else f"without {', '.join(missing)}" + (f"; with {here}" if here else "")
        yield Finding(f"extra:{extra}", status, detail, f"sandboxgym[{extra}]", _pip(extra) if missing else "")


def docker() -> Finding:
    """Check a Docker daemon that answers."""
    enables = "the container backend: sandboxes of container images"
    host = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    scheme, _, address = host.partition("://")
    install = "https://docs.docker.com/engine/install/ and `systemctl start docker`, or set DOCKER_HOST"
    if scheme not in ("unix", "tcp"):
        return Finding("docker", "limited", f"DOCKER_HOST={host} is not tried here", enables, "docker version")
    try:
        return Finding("docker", "ok", f"{_docker_version(scheme, address)} at {host}", enables)
    except PermissionError:
        fix = "sudo usermod -aG docker $USER, and log in again"
        return Finding("docker", "limited", f"no permission to use {host}", enables, fix)
    except (OSError, http.client.HTTPException, ValueError) as error:
        client = "; the client is installed" if shutil.which("docker") else ""
        return Finding("docker", "missing", f"{host}: {error}{client}", enables, install)


def user_namespaces() -> Finding:
    """Try a user namespace in which this user is root."""
    enables = "sandboxes without root"
    done = _unshare("--user", "--map-root-user", script="test $(id -u) = 0")
    if done is None:
        return Finding("user-namespaces", "missing", "no `unshare` command", enables, "apt-get install util-linux")
    if done.returncode:
        fix = "sysctl -w kernel.unprivileged_userns_clone=1 kernel.apparmor_restrict_unprivileged_userns=0 (as root)"
        return Finding("user-namespaces", "missing", _why(done), enables, fix)
    return Finding("user-namespaces", "ok", "as an ordinary user" if os.geteuid() else "as root", enables)


def pid_namespaces() -> Finding:
    """Try a PID namespace with a /proc of its own, with which a sandbox's processes end when it does."""
    enables = "sandboxes whose processes cannot outlive them"
    user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    done = _unshare(*user, "--pid", "--fork", "--mount-proc", script="test $$ = 1")
    if done is None:
        return Finding("pid-namespaces", "missing", "no `unshare` command", enables, "apt-get install util-linux")
    if done.returncode:
        fix = "root, or a container started with --privileged (or --security-opt seccomp=unconfined)"
        return Finding("pid-namespaces", "missing", _why(done), enables, fix)
    return Finding("pid-namespaces", "ok", "with its own /proc", enables)


def overlay() -> Finding:
    """Try copy-on-write directories by overlayfs: as root, else rootless in a user namespace."""
    enables = "the namespace backend: a snapshot of a file system in milliseconds"
    rootless = _try_overlay("--user", "--map-root-user", options=",userxattr")
    as_root = _try_overlay() if os.geteuid() == 0 else None
    fix = "a kernel from 6.8 on with user namespaces, or root; inside a container: --privileged and a volume on disk"
    if as_root is None and rootless is None:
        return Finding("overlay", "missing", "no `unshare` command", enables, "apt-get install util-linux")
    ways = [
        way for way, done in (("as root", as_root), ("rootless", rootless)) if done is not None and done.returncode == 0
    ]
    if ways:
        return Finding("overlay", "ok", f"mounted, written and unmounted {' and '.join(ways)}", enables)
    failed = as_root or rootless
    assert failed is not None
    return Finding("overlay", "missing", _why(failed), enables, fix)


def reflink() -> Finding:
    """Try files that share their blocks until they are written."""
    enables = "copies of large files in no time and space"
    fix = "SANDBOXGYM_RUNTIME and SANDBOXGYM_CACHE on btrfs or XFS"
    with _Scratch() as folder:
        (folder / "a").write_bytes(b"x" * 65536)
        try:
            import fcntl

            with open(folder / "a", "rb") as source, open(folder / "b", "wb") as target:
                fcntl.ioctl(target.fileno(), _FICLONE, source.fileno())
            kind = _file_system(folder)
            return Finding("reflink", "ok", f"{kind} under {folder.parent}", enables)
        except (OSError, ImportError):
            return Finding("reflink", "missing", f"not on {_file_system(folder)} ({folder.parent})", enables, fix)


def criu() -> Finding:
    """Try to capture a sandbox with running processes and to continue a copy of it."""
    from sandboxgym.sandbox.overlay.backend import criu_checkpointer

    checkpointer = criu_checkpointer()
    enables = "full snapshots: files and running processes"
    found = checkpointer.candidates()
    if not found:
        return Finding("criu", "missing", "no `criu` command", enables, checkpointer.HOW_TO_GET)
    if os.geteuid():
        return Finding("criu", "limited", f"{found[0]} is there, but it needs root", enables, "run as root")
    tried = _run(
        interpreter.module_command(checkpointer.__module__),
        seconds=checkpointer.SECONDS,
        environment=interpreter.environment(),
    )
    if tried is None or tried.returncode:
        why = "it did not answer" if tried is None else tried.stdout.strip() or _why(tried)
        return Finding("criu", "limited", why, enables, checkpointer.HOW_TO_GET)
    detail = f"{tried.stdout.strip()}: a sandbox with a running process was captured and forked"
    return Finding("criu", "ok", detail, enables)


def environments() -> Iterator[Finding]:
    """Check further needs of the environments, as their cards tell."""
    hooks = dict.fromkeys(card.probes for card in registration.cards().values() if card.probes)
    for name in hooks:
        try:
            for probe in registration.hook(name):
                yield probe()
        except Exception as error:  # of one environment; the others must still be told of
            detail = f"the trial failed: {type(error).__name__}: {error}"
            yield Finding(name.partition(":")[0], "missing", detail, "", "")


def datasets() -> Iterator[Finding]:
    """Check every downloaded data set, and all of them together."""
    found = 0
    known = registration.data_sets()
    for name, dataset in known.items():
        parts = data.parts_found(dataset)
        found += bool(parts)
        where = data.directory(dataset)
        detail = f"{', '.join(parts)} in {where}" if parts else f"nothing in {where}"
        fix = "" if parts else f"sandboxgym download {name}"
        yield Finding(f"data:{name}", "ok" if parts else "missing", detail, dataset.about, fix)
    count = len(known)
    status: Status = "ok" if found == count else "limited" if found else "missing"
    fix = "" if found == count else "sandboxgym download NAME"
    yield Finding("data", status, f"{found} of {count} data sets", "the original tasks; others are embedded", fix)


def disk() -> Iterator[Finding]:
    """Check the free space for data, caches and run directories, and shared memory."""
    places = {
        "disk:data": (data.data_dir(), 10e9, "downloaded data sets", "SANDBOXGYM_DATA"),
        "disk:cache": (data.cache_dir(), 5e9, "compiled games, indices", "SANDBOXGYM_CACHE"),
        "disk:runtime": (
            run_directories.runtime_dir(create=False),
            5e9,
            "layers of running sandboxes",
            "SANDBOXGYM_RUNTIME",
        ),
        "shm": (Path("/dev/shm"), 1e9, "observations shared with worker processes", "docker run --shm-size=4g"),
    }
    for name, (path, wanted, enables, setting) in places.items():
        existing = next((p for p in (path, *path.parents) if p.exists()), None)
        if existing is None or (name == "shm" and existing != path):
            yield Finding(name, "missing", f"no {path}", enables, setting)
            continue
        free = shutil.disk_usage(existing).free
        enough = free >= wanted
        detail = f"{nbytes_text(free)} free, {path}"
        fix = "" if enough else setting if name == "shm" else f"{setting} on a disk with {nbytes_text(wanted)}"
        yield Finding(name, "ok" if enough else "limited", detail, enables, fix)


PROBES: tuple[Callable[[], Finding | Iterator[Finding]], ...] = (
    python,
    cores,
    gpu,
    packages,
    docker,
    overlay,
    user_namespaces,
    pid_namespaces,
    reflink,
    criu,
    environments,
    datasets,
    disk,
)


class _Scratch:
    """A directory for one trial, which the next process removes if this one is killed."""

    def __enter__(self) -> Path:
        self.path = run_directories.claim("doctor")
        return self.path

    def __exit__(self, *_: object) -> None:
        run_directories.give_back(self.path)


def _try_overlay(*namespaces: str, options: str = "") -> subprocess.CompletedProcess[str] | None:
    with _Scratch() as folder:
        # In a mount namespace of its own, so the kernel unmounts whatever the script does not.
        return _unshare(*namespaces, "--mount", script=_OVERLAY, arguments=(str(folder), options))


def _unshare(*namespaces: str, script: str, arguments: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str] | None:
    command = shutil.which("unshare")
    if command is None:
        return None
    # --kill-child: if this process is killed, so is what it started.
    kill = ("--kill-child",) if "--fork" in namespaces else ()
    failed = subprocess.CompletedProcess([], 1, "", f"no answer within {SECONDS:g} s")
    return _run([command, *namespaces, *kill, "sh", "-c", script, "sh", *arguments]) or failed


def _run(
    command: list[str], *, seconds: float = SECONDS, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str] | None:
    """Run a command; None if it could not be started or did not finish in time."""
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError:
        return None
    with process:
        try:
            out, err = process.communicate(timeout=seconds)
        except BaseException as error:  # Ctrl-C, too: the command must not stay
            os.killpg(process.pid, signal.SIGKILL)  # also what the command has started in turn
            if isinstance(error, subprocess.TimeoutExpired):
                return None
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _why(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return lines[-1][:160] if lines else f"exit status {done.returncode}"


def _extras() -> dict[str, list[str]]:
    try:
        requirements = importlib.metadata.requires("sandboxgym") or []
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that was not installed
        return {}
    extras: dict[str, list[str]] = {}
    for requirement in requirements:
        marker = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", requirement)
        name = re.match(r"[A-Za-z0-9._-]+", requirement)
        # The extras that only gather others name the package itself, and repeat what those say.
        if marker and name and name[0] != "sandboxgym" and marker[1] not in ("all", "dev", "docs"):
            extras.setdefault(marker[1], []).append(name[0])
    return extras


def _pip(extra: str) -> str:
    return f"pip install 'sandboxgym[{extra}]'"


def _docker_version(scheme: str, address: str) -> str:
    if scheme == "unix":
        connection = http.client.HTTPConnection("localhost", timeout=SECONDS)
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.settimeout(SECONDS)
        try:
            connection.sock.connect(address)
        except BaseException:
            connection.close()
            raise
    else:
        connection = http.client.HTTPConnection(address, timeout=SECONDS)
    try:
        connection.request("GET", "/version")
        response = connection.getresponse()
        body = response.read(65536).decode(errors="replace")
        match = re.search(r'"Version"\s*:\s*"([^"]+)"', body)
        if response.status != 200 or match is None:
            raise ValueError(f"expected a Docker daemon, found HTTP {response.status}")
        return match[1]
    finally:
        connection.close()


def _cpu_quota() -> float | None:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _file_system(path: Path) -> str:
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "this file system"
    best = ("", "this file system")
    for line in lines:
        _, point, kind, *_ = line.split()
        inside = Path(point) == path or Path(point) in path.resolve().parents
        if inside and len(point) >= len(best[0]):
            best = (point, kind)
    return best[1]
