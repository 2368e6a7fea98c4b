"""Attempts to reach the host or another sandbox: devices, files, the kernel, the network, processes, privileges.

Most are one request to the program inside. An effect outside (a mode, a lock, a process) is observed there, and undone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
from collections.abc import Callable, Iterator
from typing import Any

from sandboxgym.attack.attempt import Attempt, NotApplicable, Observed, blocked, leaves_open, passed
from sandboxgym.attack.stage import Stage
from sandboxgym.sandbox.base import Capabilities, SandboxError

_MARK_TIME = 915148800
"""Date set by attempts, 1999-01-01: nothing else sets times to it."""
_OFD_GETLK = 36
_LOCKS, _STATISTICS, CALLS_OPEN = leaves_open("locks"), leaves_open("statistics"), leaves_open("calls")
_NODES = ("null", "zero", "random", "urandom", "tty")
_MASKS = ("kcore", "keys", "timer_list", "sched_debug", "interrupts", "kmsg")

Declared = Callable[[Capabilities], bool]
ESCAPES: list[Attempt] = []


def add(name: str, about: str, run: Callable[[Stage], Observed], declared: Declared | None = None) -> None:
    """Register an attempt to escape."""
    name = f"escape/{name}"
    ESCAPES.append(Attempt(name, about, run) if declared is None else Attempt(name, about, run, declared))


def by_request(do: str, **arguments: Any) -> Callable[[Stage], Observed]:
    """Make one request, judged by its answer."""
    return lambda stage: stage.prober().ask(do, **arguments).seen()


def about_host(do: str, ask: Callable[[Stage], dict[str, Any]]) -> Callable[[Stage], Observed]:
    """Make one request about an object of the host."""
    return lambda stage: stage.prober().ask(do, **ask(stage)).seen()


# Device nodes and masks of /proc: nodes of the host?


@contextlib.contextmanager
def _only_one() -> Iterator[None]:
    """Lock an object of the host while it is observed, against other attacking programs."""
    with open(__file__, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _put_back(path: str) -> Iterator[os.stat_result]:
    """Restore mode, owner and times of a host's file, whatever happens."""
    before = os.stat(path)
    try:
        yield before
    finally:
        after = os.stat(path)
        with contextlib.suppress(PermissionError):
            if (after.st_uid, after.st_gid) != (before.st_uid, before.st_gid):
                os.chown(path, before.st_uid, before.st_gid)
            if stat.S_IMODE(after.st_mode) != stat.S_IMODE(before.st_mode):
                os.chmod(path, stat.S_IMODE(before.st_mode))
            if _MARK_TIME in (int(after.st_mtime), int(after.st_atime)):
                os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _metadata(path: str, what: str, host: str) -> Callable[[Stage], Observed]:
    def run(stage: Stage) -> Observed:
        if not os.path.exists(host):
            raise NotApplicable(f"the host has no {host}")
        with _only_one(), _put_back(host) as before:
            prober = stage.prober()
            mode = stat.S_IMODE(before.st_mode) ^ 0o001
            if what == "mode":
                reply = prober.ask("change_mode", path=path, mode=mode)
            elif what == "owner":
                reply = prober.ask("change_owner", path=path, user=12)
            elif what == "times":
                reply = prober.ask("change_times", path=path, moment=_MARK_TIME)
            else:
                # u::rw-,u:12:rw-,g::rw-,m::rw-,o::rw-: an access list that changes nothing for anybody else
                entries = "0200000001000600ffffffff020006000c00000004000600ffffffff10000600ffffffff20000600ffffffff"
                reply = prober.ask("set_attribute", path=path, name="system.posix_acl_access", value=entries)
            after = os.stat(host)
            changed = {
                "mode": stat.S_IMODE(after.st_mode) == mode,
                "owner": after.st_uid == 12 != before.st_uid,
                "times": int(after.st_mtime) == _MARK_TIME,
            }
            found = _has_access_list(host) if what == "access-list" else changed[what]
            if found:
                return passed(f"{host} of the host was changed: {what}")
            reply.need()
            return blocked(reply.detail if not reply.worked else f"the node is not the host's: {host} is as it was")

    return run


def _has_access_list(path: str) -> bool:
    with contextlib.suppress(OSError):
        if b"\x02\x00\x06\x00\x0c\x00\x00\x00" in os.getxattr(path, "system.posix_acl_access"):
            os.removexattr(path, "system.posix_acl_access")
            return True
    return False


for _what in ("mode", "owner", "times", "access-list"):
    add(
        f"device-full-{_what}",
        f"changes the {_what} of the host's /dev/full",
        _metadata("/dev/full", _what, "/dev/full"),
    )
for _node in _NODES:
    add(
        f"device-{_node}-times",
        f"changes the times of the host's /dev/{_node}",
        _metadata(f"/dev/{_node}", "times", f"/dev/{_node}"),
    )
for _mask in _MASKS:
    add(
        f"mask-{_mask}-times",
        f"changes the times of the host's /dev/null through /proc/{_mask}",
        _metadata(f"/proc/{_mask}", "times", "/dev/null"),
    )


def _remove_node(stage: Stage) -> Observed:
    before = os.stat("/dev/full").st_ino
    with stage.alone() as prober:
        done = prober.sandbox.run("rm -f /dev/full; mv /dev/zero /dev/full; ln -sf /etc/passwd /dev/random; ls /dev")
    if not os.path.exists("/dev/full") or os.stat("/dev/full").st_ino != before:
        return passed("the host's /dev/full was removed")
    return blocked(f"the host's nodes are where they were: {done.output[:60]!r}")


add("device-removed", "removes device nodes of the host", _remove_node)


# Locks and notifications on files that the host has too


def _lock(path: str, kind: str) -> Callable[[Stage], Observed]:
    def run(stage: Stage) -> Observed:
        host = os.path.realpath(path)
        if not os.path.exists(host):
            raise NotApplicable(f"the host has no {path}")
        prober = stage.prober()
        reply = prober.ask("lock", path=path, kind=kind)
        try:
            if not reply.worked:
                return reply.seen()
            if _locked(host, kind):
                return passed(f"the host finds its {host} locked")
            return blocked("the lock is not seen on the host's file")
        finally:
            prober.let_go()

    return _one_at_a_time(run)


def _one_at_a_time(run: Callable[[Stage], Observed]) -> Callable[[Stage], Observed]:
    def alone(stage: Stage) -> Observed:
        with _only_one():
            return run(stage)

    return alone


def _locked(path: str, kind: str) -> bool:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if kind == "flock":
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False
        if kind == "lease":
            status = os.fstat(descriptor)
            place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino} "
            with open("/proc/locks") as locks:
                return any(place in line and "LEASE" in line for line in locks)
        request = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0)
        found: int = struct.unpack("hhqqi4x", fcntl.fcntl(descriptor, _OFD_GETLK, request))[0]
        return found != fcntl.F_UNLCK
    finally:
        os.close(descriptor)


for _path in ("/dev/full", "/usr/bin/env"):
    for _kind in ("flock", "ofd-read", "posix-write", "lease"):
        add(
            f"lock-{_kind}-{_path.rpartition('/')[2]}",
            f"holds a {_kind} lock on the host's {_path}",
            _lock(_path, _kind),
            _LOCKS,
        )


def _watch(path: str) -> Callable[[Stage], Observed]:
    def run(stage: Stage) -> Observed:
        if not os.path.exists(path):
            raise NotApplicable(f"the host has no {path}")
        prober = stage.prober()
        reply = prober.ask("watch", path=path)
        try:
            if not reply.worked:
                return reply.seen()
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY))
            return prober.ask("watched").seen()
        finally:
            prober.let_go()

    return _one_at_a_time(run)


for _path in ("/dev/full", "/usr/bin/env", "/usr/bin", "/usr/lib"):
    add(f"watch{_path.replace('/', '-')}", f"sees when the host opens {_path}", _watch(_path), _LOCKS)

# Devices that a sandbox has no business with

for _kind, _major, _minor, _thing in (
    ("c", 1, 1, "physical memory"),
    ("c", 1, 2, "kernel memory"),
    ("c", 1, 4, "I/O ports"),
    ("c", 1, 11, "the kernel's log"),
    ("c", 4, 0, "the console"),
    ("c", 10, 200, "tunnels"),
    ("c", 10, 229, "FUSE"),
    ("c", 10, 232, "KVM"),
    ("c", 10, 237, "loop devices"),
    ("b", 7, 0, "a loop device"),
    ("b", 8, 0, "the first SCSI disk"),
    ("b", 254, 0, "the first virtual disk"),
    ("b", 259, 0, "the first NVMe disk"),
):
    for _folder in ("/tmp", "/dev"):
        add(
            f"node-{_kind}-{_major}-{_minor}-{_folder[1:]}",
            f"makes and opens a device for {_thing} in {_folder}",
            by_request("make_node", path=f"{_folder}/attack-node", kind=_kind, major=_major, minor=_minor),
        )


def _host_file(path: str, *, write: bool = False, read_bytes: int = 0) -> Callable[[Stage], Observed]:
    def run(stage: Stage) -> Observed:
        if not os.path.exists(path):
            raise NotApplicable(f"the host has no {path}")
        return stage.prober().ask("open", path=path, write=write, read_bytes=read_bytes).seen()

    return run


for _path in (
    *("/dev/mem", "/dev/kmsg", "/dev/kvm", "/dev/fuse", "/dev/net/tun", "/dev/loop-control", "/dev/mapper/control"),
    *("/dev/vhost-net", "/dev/vhost-vsock", "/dev/uinput", "/dev/console", "/dev/tty1", "/dev/vda", "/dev/sda"),
    *("/dev/vsock", "/dev/userfaultfd", "/dev/snapshot", "/dev/cpu/0/msr", "/dev/rtc0", "/dev/watchdog", "/dev/hpet"),
):
    add(f"open{_path.replace('/', '-')}", f"opens the host's {_path}", _host_file(_path))

for _path in (
    *("/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/kernel/hotplug"),
    *("/proc/sys/vm/overcommit_memory", "/proc/sys/vm/drop_caches", "/proc/sys/fs/file-max", "/proc/sys/kernel/panic"),
    *("/proc/sys/fs/binfmt_misc/register", "/proc/sys/kernel/yama/ptrace_scope", "/proc/sys/kernel/ns_last_pid"),
    *("/proc/irq/default_smp_affinity", "/proc/bus/pci/00/00.0", "/proc/mtrr", "/proc/scsi/scsi", "/proc/acpi/wakeup"),
    *("/proc/sys/kernel/hostname", "/proc/sys/kernel/threads-max", "/proc/sys/user/max_user_namespaces"),
    *("/sys/kernel/uevent_helper", "/sys/power/state", "/sys/kernel/mm/transparent_hugepage/enabled"),
    *("/sys/module/kernel/parameters/panic", "/sys/fs/cgroup/release_agent", "/sys/fs/cgroup/cgroup.procs"),
):
    add(f"write{_path.replace('/', '-')}", f"can write to {_path}", _host_file(_path, write=True))

for _path in ("/proc/kcore", "/proc/kmsg", "/proc/keys", "/sys/kernel/debug", "/sys/firmware", "/sys/kernel/security"):
    add(f"read{_path.replace('/', '-')}", f"reads {_path}", _host_file(_path, read_bytes=16))
for _path in (
    *("/proc/kpageflags", "/proc/kpagecount", "/proc/kpagecgroup", "/proc/vmallocinfo", "/proc/slabinfo"),
    *("/proc/timer_list", "/proc/sched_debug", "/proc/interrupts", "/proc/pagetypeinfo", "/proc/iomem"),
):
    add(
        f"read{_path.replace('/', '-')}",
        f"reads statistics of the kernel in {_path}",
        _host_file(_path, read_bytes=16),
        _STATISTICS,
    )
add("kernel-addresses", "learns addresses of the kernel from /proc/kallsyms", by_request("addresses"))
add("page-frames", "learns physical addresses of its pages", by_request("page_frames"))

# The host's files


def host_secret(stage: Stage) -> dict[str, Any]:
    """Path and content of the host's secret file."""
    return {"secret": stage.host.secret, "token": stage.host.token}


def _secret_and(**more: Any) -> Callable[[Stage], dict[str, Any]]:
    return lambda stage: {**host_secret(stage), **more}


for _link in ("root", "cwd"):
    add(
        f"files-by-{_link}",
        f"reads a file of the host through /proc/PID/{_link}",
        about_host("secret_by_roots", _secret_and(link=_link)),
    )
add(
    "files-by-descriptors",
    "reads a file of the host through a descriptor",
    about_host("secret_by_descriptors", host_secret),
)
add("files-by-chroot", "leaves its root by a second chroot", about_host("secret_by_chroot", host_secret))
for _prefix, _words in (
    ("", "at its path"),
    ("/..", "above the root"),
    ("/tmp/../../../..", "above the root by way of /tmp"),
    ("/run/.sandboxgym/../../../../../../../..", "above the control directory"),
    ("/dev/shm/../../../../../..", "above /dev/shm"),
    ("/dev/pts/../../../../../..", "above /dev/pts"),
    ("/usr/../../..", "above /usr"),
):
    add(
        f"files-path{(_prefix or '/plain').replace('/..', '').replace('/', '-') or '-up'}",
        f"reads a file of the host {_words}",
        about_host("secret_by_path", _secret_and(prefix=_prefix)),
    )
for _hard in (False, True):
    add(
        f"files-by-{'hard' if _hard else 'symbolic'}-link",
        "reaches a file of the host by a link",
        about_host("secret_by_link", _secret_and(hard=_hard)),
    )
for _source in ("/usr", "/", "/run/.sandboxgym", "/dev/shm"):
    add(
        f"files-by-handle{_source.replace('/', '-')}",
        f"reads a file of the host by a file handle from {_source}",
        about_host("secret_by_handle", _secret_and(source=_source)),
    )
add("files-handle-given", "is given file handles", by_request("get_handle", path="/usr/bin"), CALLS_OPEN)
add("files-inherited", "is started with descriptors of the host", by_request("inherited_descriptors"))
add(
    "environment",
    "reads the environment of the owner",
    about_host("environment_tells", lambda stage: {"token": stage.host.token}),
)


def _write(path: str) -> Callable[[Stage], Observed]:
    def run(stage: Stage) -> Observed:
        reply = stage.prober().ask("write_below", path=path)
        reply.need()
        if not reply.worked:
            return blocked(reply.detail)
        made = reply.facts.get("path")
        if made is None:
            before = os.stat(path) if os.path.exists(path) else None
            same = before is not None and stage.backend != "docker"
            return passed(reply.detail) if same else blocked("it is a file of the sandbox's own")
        if os.path.lexists(made):
            os.unlink(made)
            return passed(f"{made} was made on the host")
        return blocked("what was made is not on the host")

    return run


for _path in ("/usr", "/usr/bin", "/etc", "/dev/shm", "/tmp", "/root", "/run", "/dev", "/dev/pts", "/proc/1"):
    add(f"files-write{_path.replace('/', '-')}", f"makes a file in the host's {_path}", _write(_path))
for _pid in ("self", "1"):
    add(f"executable-of-{_pid}", f"overwrites the program of process {_pid}", by_request("own_executable", pid=_pid))


def _tells(stage: Stage) -> Observed:
    backend = stage.prober().sandbox.backend
    words = [os.fspath(backend.control), f"-{os.getpid()}-"]
    return stage.prober().ask("path_tells", words=words).seen()


add(
    "paths-of-the-owner",
    "learns paths and the process id of the owner from the table of mounts",
    _tells,
    leaves_open("paths"),
)


# Files through the owner: what it does on behalf of the sandbox must stay inside


def _read_through(trap: str, path: str) -> Callable[[Stage], Observed]:
    def run(stage: Stage) -> Observed:
        sandbox = stage.prober().sandbox
        sandbox.run(trap.format(secret=stage.host.secret, folder=os.path.dirname(stage.host.secret)))
        try:
            data = sandbox.read_file(path.format(secret=stage.host.secret))
        except (OSError, ValueError, SandboxError) as error:
            return blocked(f"{type(error).__name__}: {error}"[:120])
        return (
            passed("the owner read the host's file") if stage.host.token.encode() in data else blocked("another file")
        )

    return run


def _write_through(trap: str, path: str) -> Callable[[Stage], Observed]:
    def run(stage: Stage) -> Observed:
        sandbox, victim = stage.prober().sandbox, f"{stage.host.secret}-victim"
        with open(victim, "w") as file:
            file.write("as it was")
        try:
            sandbox.run(trap.format(secret=victim, folder=os.path.dirname(victim)))
            why = "another file was written"
            try:
                sandbox.write_file(path.format(secret=victim, name=os.path.basename(victim)), b"attack")
            except (OSError, ValueError, SandboxError) as error:
                why = f"{type(error).__name__}: {error}"[:120]
            with open(victim) as file:
                return blocked(why) if file.read() == "as it was" else passed("the owner wrote to the host's file")
        finally:
            os.unlink(victim)

    return run


for _name, _trap, _path in (
    ("symlink", "ln -sfn {secret} /tmp/trap", "/tmp/trap"),
    ("relative-symlink", "ln -sfn ../../../../../../..{secret} /tmp/trap", "/tmp/trap"),
    ("folder", "ln -sfn / /tmp/up", "/tmp/up{secret}"),
    ("proc-root", "true", "/proc/1/root{secret}"),
    ("proc-self", "ln -sfn /proc/self/root{secret} /tmp/trap", "/tmp/trap"),
    ("proc-descriptor", "true", "/proc/self/fd/0/../../../../../..{secret}"),
    ("dots", "true", "/tmp/../../../../../../..{secret}"),
):
    add(f"owner-reads-{_name}", f"has the owner read a file of the host ({_name})", _read_through(_trap, _path))
    add(f"owner-writes-{_name}", f"has the owner write to a file of the host ({_name})", _write_through(_trap, _path))


def _control_trap(stage: Stage) -> Observed:
    """Replace the owner's pipes and scripts by links to a file of the host, then use the shell."""
    victim = f"{stage.host.secret}-control"
    with open(victim, "w") as file:
        file.write("as it was")
    os.chmod(victim, 0o666)
    try:
        with stage.alone() as prober:
            sandbox = prober.sandbox
            sandbox.execute("true", timeout=10)
            with contextlib.suppress(SandboxError):
                sandbox.run(
                    "cd /run/.sandboxgym && find . -mindepth 1 ! -type d | while read -r f; do "
                    f'rm -f "$f"; ln -s {victim} "$f"; done; ls -lR'
                )
            why = "the shell went on"
            for _ in range(2):
                try:
                    sandbox.execute("echo hello", timeout=3)
                except (SandboxError, OSError) as error:
                    why = f"{type(error).__name__}: {error}"[:120]
        with open(victim) as file:
            return blocked(why) if file.read() == "as it was" else passed("the owner wrote through a link")
    finally:
        os.unlink(victim)


add("control-links", "has the owner write to a file of the host through links in the control directory", _control_trap)
