"""Linux system calls for making containers that Python does not wrap. Standard library only.

Every function raises ``OSError`` with the kernel's error number. Nothing here is called on other systems; importing it
there is harmless.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x00020000,
    0x02000000,
    0x04000000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
"""Namespaces, as `clone` and `unshare` take them."""

TMPFS = 0x01021994
"""Result of `file_system` for a tmpfs."""

RDONLY, NOSUID, NODEV, NOEXEC = 0x1, 0x2, 0x4, 0x8
"""Attributes of a mount, for `new_mount`, `copy_mount` and `set_attributes`."""

AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_AT_RECURSIVE = 0x8000
_OPEN_TREE_CLONE = 0x1
_CLOEXEC = os.O_CLOEXEC if hasattr(os, "O_CLOEXEC") else 0
_MOVE_MOUNT_F_EMPTY_PATH = 0x4
_IDMAP = 0x00100000
_FSCONFIG_SET_FLAG, _FSCONFIG_SET_STRING, _FSCONFIG_CMD_CREATE = 0, 1, 6
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_MNT_DETACH = 0x2
_RESOLVE_IN_ROOT = 0x10
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_PR_SET_SECUREBITS = 28
_PR_SET_CHILD_SUBREAPER = 36
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_CAPABILITY_VERSION_3 = 0x20080522
_SIGCHLD = 17

_NUMBERS = {
    "x86_64": {"clone": 56, "capget": 125, "capset": 126, "pivot_root": 155},
    "aarch64": {"clone": 220, "capget": 90, "capset": 91, "pivot_root": 41},
}
_COMMON = {  # since 5.1 a new system call has one number everywhere
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "clone3": 435,
    "close_range": 436,
    "openat2": 437,
    "pidfd_getfd": 438,
    "mount_setattr": 442,
}

CAPABILITIES = {
    "CHOWN": 0,
    "DAC_OVERRIDE": 1,
    "FOWNER": 3,
    "FSETID": 4,
    "KILL": 5,
    "SETGID": 6,
    "SETUID": 7,
    "SETPCAP": 8,
    "NET_BIND_SERVICE": 10,
    "SYS_CHROOT": 18,
    "SETFCAP": 31,
}
"""Capabilities of a container's root: Docker's default set without MKNOD, NET_RAW and AUDIT_WRITE."""

# PyDLL keeps the interpreter's lock: after `clone` the child has one thread, and it must find the lock held by it.
_libc = ctypes.PyDLL(None, use_errno=True)


def supported() -> bool:
    """True if the system call numbers of this machine are known here."""
    return sys.platform == "linux" and os.uname().machine in _NUMBERS


def _number(name: str) -> int:
    return _COMMON.get(name) or _NUMBERS[os.uname().machine][name]


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def _syscall(name: str, *arguments: int | bytes | None) -> int:
    values = [ctypes.c_long(value) if isinstance(value, int) else ctypes.c_char_p(value) for value in arguments]
    return _check(int(_libc.syscall(ctypes.c_long(_number(name)), *values)), name)


def clone(flags: int) -> int:
    """``fork`` into new namespaces: the child's id in the parent, 0 in the child. For a process with one thread."""
    return _forked("clone", flags | _SIGCHLD, 0, 0, 0, 0)


def clone_as(pid: int) -> int:
    """``fork`` with the id ``pid`` for the child, in the namespace of process ids that children enter.

    Raises:
        FileExistsError: a process has that id.
    """
    wanted = ctypes.c_int(pid)
    arguments = struct.pack("=11Q", 0, 0, 0, 0, _SIGCHLD, 0, 0, 0, ctypes.addressof(wanted), 1, 0)
    return _forked("clone3", arguments, len(arguments))


def _forked(name: str, *arguments: int | bytes) -> int:
    ctypes.pythonapi.PyOS_BeforeFork()
    try:
        pid = _syscall(name, *arguments)
    except OSError:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
        raise
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    return pid


def unshare(flags: int) -> None:
    """Enter new namespaces."""
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def set_namespace(descriptor: int, flags: int) -> None:
    """Enter existing namespaces.

    Args:
        descriptor: of one of them, or of a process (a pidfd), whose namespaces of the kinds in ``flags`` are meant.
        flags: of `NEWNS`…
    """
    _check(_libc.setns(ctypes.c_int(descriptor), ctypes.c_int(flags)), "setns")


def file_system(path: str) -> int:
    """Type number of the file system that holds ``path``."""
    buffer = ctypes.create_string_buffer(512)
    _check(_libc.statfs(os.fsencode(path), buffer), "statfs")
    return int(ctypes.c_long.from_buffer(buffer).value)


def adopt_orphans() -> None:
    """Become the parent of all orphaned descendants; kept when another program is executed."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_hostname(name: bytes) -> None:
    """Set the host name in the current namespace."""
    _check(_libc.sethostname(name, ctypes.c_size_t(len(name))), "sethostname")


def read_text(path: str) -> str:
    """Content of a small file of ``/proc``; ``open`` would dirty 300 kB of a fork's memory."""
    descriptor = os.open(path, os.O_RDONLY)
    content = os.read(descriptor, 1 << 14)
    os.close(descriptor)
    return content.decode()


def write_text(path: str, content: str) -> None:
    """Write to an existing file with one call, as files of ``/proc`` and control groups require."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, content.encode())
    finally:
        os.close(descriptor)


def close_from(lowest: int) -> None:
    """Close every descriptor from ``lowest`` on."""
    _syscall("close_range", lowest, 0xFFFFFFFF, 0)


# Mounts


def make_private() -> None:
    """Make all mounts of this namespace private: no mount propagates out or in."""
    _mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE)


def _mount(source: bytes, target: bytes, kind: bytes | None, flags: int, data: bytes | None = None) -> None:
    result = _libc.mount(source, target, kind, ctypes.c_ulong(flags), data)
    _check(result, f"mount {target.decode(errors='replace')}")


def new_mount(kind: str, options: Sequence[tuple[str, str | None]], *, attributes: int = 0) -> int:
    """Make a new file system that is mounted nowhere yet.

    Args:
        kind: ``"overlay"``, ``"tmpfs"``…
        options: names and values, None for a flag; in order, for ``lowerdir+`` is given once for each layer.
        attributes: of `RDONLY`, `NOSUID`…

    Returns:
        A descriptor for `attach`.
    """
    context = _syscall("fsopen", kind.encode(), 1)
    try:
        for name, value in options:
            command = _FSCONFIG_SET_FLAG if value is None else _FSCONFIG_SET_STRING
            try:
                _syscall("fsconfig", context, command, name.encode(), None if value is None else os.fsencode(value), 0)
            except OSError as error:
                raise OSError(error.errno, f"{kind} option {name}={value}: {_complaint(context) or error}") from None
        try:
            _syscall("fsconfig", context, _FSCONFIG_CMD_CREATE, None, None, 0)
        except OSError as error:
            raise OSError(error.errno, f"{kind}: {_complaint(context) or error}") from None
        return _syscall("fsmount", context, 1, attributes)
    finally:
        os.close(context)


def _complaint(context: int) -> str:
    """The kernel's log message about a mount that failed."""
    lines = []
    while True:
        try:
            lines.append(os.read(context, 4096).decode(errors="replace").strip())
        except OSError:
            return "; ".join(lines)


def mount(kind: str, target: str, *, options: Sequence[tuple[str, str | None]] = (), attributes: int = 0) -> None:
    """Mount a new file system at ``target``."""
    mounted = new_mount(kind, options, attributes=attributes)
    attach(mounted, target)
    os.close(mounted)


def copy_mount(path: str, *, attributes: int = 0, ids: int = -1, recursive: bool = True) -> int:
    """Copy the tree of mounts at ``path`` as a detached mount (a bind mount).

    Args:
        path: a directory or file.
        attributes: set on it and on the mounts below it.
        ids: a user namespace: its 0 is who owns what belongs to 0 on the disk, and so on.
        recursive: copy the mounts below it too.

    Returns:
        A descriptor for `attach`.
    """
    flags = _OPEN_TREE_CLONE | _CLOEXEC | (_AT_RECURSIVE if recursive else 0)
    tree = _syscall("open_tree", AT_FDCWD, os.fsencode(path), flags)
    if attributes or ids >= 0:
        try:
            set_attributes(tree, attributes, ids=ids, recursive=recursive)
        except OSError:
            os.close(tree)
            raise
    return tree


def set_attributes(tree: int, attributes: int, *, ids: int = -1, recursive: bool = True) -> None:
    """Add attributes to a mount, and to those below it; ``ids`` as for `copy_mount`."""
    mapped = _IDMAP if ids >= 0 else 0
    change = struct.pack("=QQQQ", attributes | mapped, 0, 0, max(ids, 0))
    _syscall("mount_setattr", tree, b"", _AT_EMPTY_PATH | (_AT_RECURSIVE if recursive else 0), change, len(change))


def attach(mounted: int, target: str) -> None:
    """Attach a mount of `new_mount` or `copy_mount` at ``target``."""
    _syscall("move_mount", mounted, b"", AT_FDCWD, os.fsencode(target), _MOVE_MOUNT_F_EMPTY_PATH)


def bind(source: str, target: str, *, attributes: int = 0) -> None:
    """Bind-mount ``source`` at ``target``."""
    tree = copy_mount(source, attributes=attributes)
    attach(tree, target)
    os.close(tree)


def enter_root() -> None:
    """Make the current directory, a mount point, the root, and detach the old one with all its mounts."""
    _syscall("pivot_root", b".", b".")
    unmount(".")
    os.chdir("/")


def unmount(path: str) -> None:
    """Unmount ``path``, now or when it is no longer used."""
    _check(_libc.umount2(os.fsencode(path), ctypes.c_int(_MNT_DETACH)), "umount2")


def open_beneath(root: int, path: str, flags: int, mode: int = 0) -> int:
    """``open`` with ``root`` as the root directory: neither links nor ``..`` lead out of it.

    Args:
        root: descriptor of a directory.
        path: absolute or relative to it.
        flags: as for ``os.open``; the descriptor is not inherited.
        mode: of a new file.
    """
    how = struct.pack("=QQQ", flags | _CLOEXEC, mode, _RESOLVE_IN_ROOT)
    try:
        return _syscall("openat2", root, os.fsencode(path), how, len(how))
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), path) from None


# Privileges


def get_descriptor(pidfd: int, number: int) -> int:
    """A copy of a descriptor of another process."""
    return _syscall("pidfd_getfd", pidfd, number, 0)


def _prctl(option: int, *values: int) -> None:
    rest = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    _check(_libc.prctl(ctypes.c_int(option), *rest), f"prctl {option}")


def die_with_parent() -> None:
    """Request a kill when the thread that made this process ends; reset when credentials change."""
    _prctl(_PR_SET_PDEATHSIG, 9)


def set_secure_bits(bits: int) -> None:
    """Set the rules by which this thread's capabilities follow its user ids, see capabilities(7)."""
    _prctl(_PR_SET_SECUREBITS, bits)


def act_on_files_as(user: int) -> None:
    """Set the user and group of files that this thread makes, by number, and keep all its capabilities.

    The kernel drops what concerns files when the user changes: it is taken up again.

    Raises:
        OSError: this thread may not.
    """
    for call in (_libc.setfsgid, _libc.setfsuid):
        call(ctypes.c_uint(user))
        if call(ctypes.c_uint(0xFFFFFFFF)) & 0xFFFFFFFF != user:  # asks only
            raise OSError(1, f"files cannot be made as user {user}")
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), 8)
    sets = ctypes.create_string_buffer(24)
    number = ctypes.c_long(_number("capget"))
    _check(int(_libc.syscall(number, header, sets)), "capget")
    _, low, inherited_low, _, high, inherited_high = struct.unpack("=6I", sets.raw)
    _syscall("capset", header.raw, struct.pack("=6I", low, low, inherited_low, high, high, inherited_high))


def undumpable() -> None:
    """Forbid processes of the same user to inspect this one, trace it or open its descriptors."""
    _prctl(_PR_SET_DUMPABLE, 0)


def drop_privileges() -> None:
    """Drop all capabilities but those of `CAPABILITIES`, and forbid gaining any again, by whatever program."""
    kept = sum(1 << number for number in CAPABILITIES.values())
    last = int(read_text("/proc/sys/kernel/cap_last_cap"))
    for number in range(last + 1):
        if not kept >> number & 1:
            _prctl(_PR_CAPBSET_DROP, number)
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    low, high = kept & 0xFFFFFFFF, kept >> 32
    header, sets = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), struct.pack("=6I", low, low, 0, high, high, 0)
    _syscall("capset", header, sets)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def install_filter(program: bytes) -> None:
    """Apply a seccomp filter to this process and all that it starts (BPF instructions of 8 bytes)."""
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    holder = ctypes.create_string_buffer(header, len(header))
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(holder))


def show_command_line(name: bytes) -> None:
    """Set the name that ``ps`` shows for this process, cut to the room of its command line."""
    fields = read_text("/proc/self/stat").rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, name, min(len(name), end - start - 1))
