"""System calls that a sandbox must not be allowed, each with arguments that do no harm if it is.

The errors in the last column come after the kernel's check of privileges: a call that fails with one of them would have
been allowed with better arguments.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class SystemCall(NamedTuple):
    """One system call."""

    name: str
    about: str
    call: str
    arguments: tuple[Any, ...] = ()
    permitted: tuple[str, ...] = ()


_HERE = -100  # AT_FDCWD
_TMP = "/tmp"
_ZEROS: dict[str, int] = {"zeros": 256}
_REMOUNT, _BIND, _REC, _MOVE, _PRIVATE = 0x20, 0x1000, 0x4000, 0x2000, 0x40000

CALLS = (
    # Mounts
    SystemCall("mount-tmpfs", "mounts a tmpfs", "mount", ("none", _TMP, "tmpfs", 0, "size=64k")),
    SystemCall("mount-bind", "binds a directory elsewhere", "mount", ("/usr", _TMP, "none", _BIND | _REC, 0)),
    SystemCall("mount-proc", "mounts an unmasked /proc", "mount", ("none", _TMP, "proc", 0, 0)),
    SystemCall("mount-sysfs", "mounts sysfs", "mount", ("none", _TMP, "sysfs", 0, 0)),
    SystemCall("mount-cgroup", "mounts control groups", "mount", ("none", _TMP, "cgroup", 0, "pids")),
    SystemCall("mount-cgroup2", "mounts control groups of version 2", "mount", ("none", _TMP, "cgroup2", 0, 0)),
    SystemCall("mount-devpts", "mounts the terminals of the machine", "mount", ("none", _TMP, "devpts", 0, 0)),
    SystemCall("mount-devtmpfs", "mounts the machine's devices", "mount", ("none", _TMP, "devtmpfs", 0, 0)),
    SystemCall("mount-mqueue", "mounts message queues", "mount", ("none", _TMP, "mqueue", 0, 0)),
    SystemCall("mount-debugfs", "mounts debugfs", "mount", ("none", _TMP, "debugfs", 0, 0)),
    SystemCall("mount-overlay", "mounts an overlay", "mount", ("none", _TMP, "overlay", 0, "lowerdir=/usr:/etc")),
    SystemCall(
        "mount-disk", "mounts a disk", "mount", ("/dev/vda", _TMP, "ext4", 1, 0), ("ENOENT", "ENOTBLK", "ENXIO")
    ),
    SystemCall("remount-root", "remounts the root", "mount", ("none", "/", "none", _REMOUNT | _BIND, 0)),
    SystemCall("remount-usr", "makes the host's /usr writable", "mount", ("none", "/usr", "none", _REMOUNT | _BIND, 0)),
    SystemCall(
        "remount-proc-sys", "makes /proc/sys writable", "mount", ("none", "/proc/sys", "none", _REMOUNT | _BIND, 0)
    ),
    SystemCall("mount-move", "moves a mount", "mount", ("/dev/pts", _TMP, "none", _MOVE, 0)),
    SystemCall("mount-propagation", "changes how mounts propagate", "mount", ("none", "/", "none", _PRIVATE | _REC, 0)),
    SystemCall("umount-mask", "takes a mask off /proc", "umount2", ("/proc/sys", 2)),
    SystemCall("umount-dev", "unmounts /dev", "umount2", ("/dev/pts", 2)),
    SystemCall("umount-root", "unmounts the root", "umount2", ("/", 2)),
    SystemCall(
        "pivot-root", "changes the root of all processes", "pivot_root", (".", "."), ("EINVAL", "EBUSY", "ENOTDIR")
    ),
    SystemCall("fsopen", "opens a file system context", "fsopen", ("tmpfs", 0)),
    SystemCall("fspick", "picks a mounted file system to change", "fspick", (_HERE, "/", 0)),
    SystemCall("fsmount", "mounts what a context describes", "fsmount", (-1, 0, 0), ("EBADF",)),
    SystemCall("open-tree", "clones a tree of mounts", "open_tree", (_HERE, "/", 1)),
    SystemCall("open-tree-attr", "clones a tree of mounts, changed", "open_tree_attr", (_HERE, "/", 1, _ZEROS, 32)),
    SystemCall("move-mount", "attaches a mount", "move_mount", (_HERE, "/tmp", _HERE, "/run", 0), ("EINVAL",)),
    SystemCall("mount-setattr", "changes attributes of a mount", "mount_setattr", (_HERE, "/", 0, _ZEROS, 32)),
    # Namespaces
    SystemCall("unshare-user", "makes a user namespace, in which it is privileged", "unshare", (0x10000000,)),
    SystemCall("unshare-mount", "makes a mount namespace", "unshare", (0x00020000,)),
    SystemCall("unshare-net", "makes a network namespace", "unshare", (0x40000000,)),
    SystemCall("unshare-pid", "makes a process namespace", "unshare", (0x20000000,)),
    SystemCall("unshare-uts", "makes a host name namespace", "unshare", (0x04000000,)),
    SystemCall("unshare-ipc", "makes an IPC namespace", "unshare", (0x08000000,)),
    SystemCall("unshare-cgroup", "makes a control group namespace", "unshare", (0x02000000,)),
    SystemCall("unshare-time", "makes a time namespace", "unshare", (0x00000080,)),
    # The kernel itself
    SystemCall("acct", "has the kernel write accounts", "acct", ("/no/such/file",), ("ENOENT",)),
    SystemCall("bpf-map", "makes a BPF map", "bpf", (0, {"hex": "02000000040000000400000001000000" + "00" * 112}, 128)),
    SystemCall("bpf-program", "loads a BPF program", "bpf", (5, _ZEROS, 128), ("EINVAL",)),
    SystemCall("io-uring", "has an io_uring, which passes by filters", "io_uring_setup", (4, _ZEROS)),
    SystemCall(
        "perf",
        "counts the machine's events",
        "perf_event_open",
        ({"hex": "0100000080000000" + "00" * 120}, -1, 0, -1, 0),
    ),
    SystemCall(
        "perf-self",
        "counts its own events",
        "perf_event_open",
        ({"hex": "0100000080000000" + "00" * 120}, 0, -1, -1, 0),
    ),
    SystemCall("userfaultfd", "stops the kernel at a page fault", "userfaultfd", (0,)),
    SystemCall("module-load", "loads a kernel module", "init_module", (_ZEROS, 256, ""), ("ENOEXEC", "EINVAL")),
    SystemCall("module-file", "loads a kernel module of a file", "finit_module", (-1, "", 0), ("EBADF", "ENOEXEC")),
    SystemCall("module-remove", "removes a kernel module", "delete_module", ("no_such_module", 0x800), ("ENOENT",)),
    SystemCall("module-create", "makes a kernel module", "create_module", ("none", 4096), ("EFAULT",)),
    SystemCall("module-query", "lists kernel modules", "query_module", (0, 0, 0, 0, 0)),
    SystemCall("kexec", "loads another kernel", "kexec_load", (0, 0, 0, 0)),
    SystemCall("kexec-file", "loads another kernel of a file", "kexec_file_load", (-1, -1, 0, 0, 0), ("EBADF",)),
    SystemCall("reboot", "restarts the machine", "reboot", (-18751007, 672274793, 0x1234, 0), ("EINVAL",)),
    SystemCall("swap-on", "adds swap", "swapon", ("/no/such/file", 0), ("ENOENT",)),
    SystemCall("swap-off", "takes swap away", "swapoff", ("/no/such/file",), ("ENOENT", "EINVAL")),
    SystemCall("clock-timezone", "sets the machine's clock", "settimeofday", (0, {"zeros": 8})),
    SystemCall(
        "clock-tick",
        "changes the rate of the clock",
        "adjtimex",
        ({"hex": "0040000000000000" + "00" * 232},),
        ("EINVAL",),
    ),
    SystemCall(
        "clock-adjust", "adjusts the clock", "clock_adjtime", (0, {"hex": "0040000000000000" + "00" * 232}), ("EINVAL",)
    ),
    SystemCall("host-name", "sets the host name", "sethostname", ("sandbox", 7)),
    SystemCall("domain-name", "sets the domain name", "setdomainname", ("(none)", 6)),
    SystemCall("kernel-log", "reads the kernel's log", "syslog", (3, _ZEROS, 256)),
    SystemCall("kernel-log-clear", "changes the console's log level", "syslog", (8, 0, 0), ("EINVAL",)),
    SystemCall("io-privileges", "has I/O ports", "iopl", (3,)),
    SystemCall("io-permissions", "has one I/O port", "ioperm", (0x80, 1, 1)),
    SystemCall("cookie", "looks up a profiler's cookie", "lookup_dcookie", (0, _ZEROS, 256), ("EINVAL",)),
    SystemCall("quota", "reads the quotas of a disk", "quotactl", (0x80000400, "/dev/vda", 0, _ZEROS)),
    SystemCall("quota-descriptor", "reads quotas by a directory", "quotactl_fd", (0, 0x80000400, 0, _ZEROS)),
    SystemCall("keyring-add", "adds a key", "add_key", ("user", "attack", "x", 1, -1)),
    SystemCall("keyring-request", "requests a key", "request_key", ("user", "attack", 0, 0), ("ENOKEY",)),
    SystemCall("keyring-read", "reads the keyrings of a session", "keyctl", (0, -3, 0), ("ENOKEY",)),
    SystemCall("keyring-join", "joins a keyring", "keyctl", (1, 0)),
    SystemCall("hang-up", "hangs up a terminal", "vhangup"),
    SystemCall("fanotify", "watches all of a file system", "fanotify_init", (0, 0)),
    SystemCall("nfs", "controls the NFS server", "nfsservctl", (0, 0, 0)),
    SystemCall("use-library", "maps a library the old way", "uselib", ("/no/such",), ("ENOENT",)),
    SystemCall("sysctl", "sets kernel variables the old way", "_sysctl", (_ZEROS,), ("ENOTDIR", "EFAULT")),
    SystemCall("io-priority", "takes real-time I/O priority", "ioprio_set", (1, 0, 0x2000)),
)

OF_INIT = (
    SystemCall("compare-init", "compares the kernel's objects of process 1", "kcmp", (1, 1, 0, 0, 0)),
    SystemCall("move-pages-of-init", "moves pages of process 1", "move_pages", (1, 0, 0, 0, 0, 2)),
)
"""Calls for backends whose process 1 is not one of the sandbox's own."""
