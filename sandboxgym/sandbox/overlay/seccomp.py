"""Filter of the system calls forbidden inside a container, as a program for the kernel (seccomp).

1. Calls that reach beyond a container are refused with EPERM: mounts, namespaces, kernel modules, keys, BPF,
   performance counters, clocks, io_uring. The list is of closed calls; calls that came to the kernel after `NEWEST` are
   closed too (ENOSYS), so that a new kernel opens nothing by itself.
2. Calls of a foreign architecture (32-bit programs, x32) are refused as a whole, and so are address families other than
   unix, IPv4, IPv6 and netlink: a vsock, say, is not confined by a network namespace.
3. Disk space cannot be reserved without writing (``fallocate`` gives EOPNOTSUPP, which C libraries handle): an instant
   reservation would exceed a limit that is checked periodically. Holes can be punched.
4. Contexts of asynchronous I/O (``io_setup`` gives ENOSYS) are counted for the machine as a whole: none is allowed.
"""

from __future__ import annotations

import errno
import platform
import struct

_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# number on x86_64, number on aarch64; None where there is no such call
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "create_module": (174, None),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "ioperm": (173, None),
    "iopl": (172, None),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "name_to_handle_at": (303, 264),
    "nfsservctl": (180, 42),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "query_module": (178, None),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "_sysctl": (156, None),
    "sysfs": (139, None),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "uselib": (134, None),
    "userfaultfd": (323, 282),
    "ustat": (136, None),
    "vhangup": (153, 58),
}
NEWEST = 469
"""The highest call number known to this list (Linux 6.18); equal on both architectures."""
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_SOCKET = {"x86_64": (41, 53), "aarch64": (198, 199)}
"""Numbers of socket and socketpair."""
_IO_SETUP = {"x86_64": 206, "aarch64": 0}
_FALLOCATE = {"x86_64": 285, "aarch64": 47}
_PUNCH_HOLE = 0x02 | 0x01
_COLLAPSE_RANGE = 0x08
_FAMILIES = (1, 2, 10, 16)
_NEW_NAMESPACES = 0x7E020000
_X32 = 0x40000000

# Offsets in the kernel's struct seccomp_data; arguments are 64 bits wide, low half first on both machines.
_NR, _ARCH, _ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000


def _code(operation: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("=HBBI", operation, yes, no, value)


def program(machine: str | None = None) -> bytes:
    """Build the filter as BPF instructions.

    Args:
        machine: ``"x86_64"`` or ``"aarch64"``; default: this one.

    Raises:
        KeyError: there is no filter for such a machine.
    """
    machine = machine or platform.machine()
    audit = _AUDIT[machine]
    column = 0 if machine == "x86_64" else 1
    refuse = _code(_RETURN, _ERROR | errno.EPERM)
    parts = [
        _code(_LOAD, _ARCH),
        _code(_JUMP_EQUAL, audit, 1, 0),
        _code(_RETURN, _KILL),
        _code(_LOAD, _NR),
    ]
    if machine == "x86_64":
        parts += [_code(_JUMP_AT_LEAST, _X32, 0, 1), _code(_RETURN, _ERROR | errno.ENOSYS)]
    parts += [_code(_JUMP_AT_LEAST, NEWEST + 1, 0, 1), _code(_RETURN, _ERROR | errno.ENOSYS)]
    parts += [_code(_JUMP_EQUAL, _IO_SETUP[machine], 0, 1), _code(_RETURN, _ERROR | errno.ENOSYS)]
    parts += [
        _code(_JUMP_EQUAL, _FALLOCATE[machine], 0, 5),
        _code(_LOAD, _SECOND_ARGUMENT),
        _code(_JUMP_EQUAL, _PUNCH_HOLE, 1, 0),
        _code(_JUMP_EQUAL, _COLLAPSE_RANGE, 0, 1),
        _code(_RETURN, _ALLOW),
        _code(_RETURN, _ERROR | errno.EOPNOTSUPP),
    ]
    # glibc falls back to clone, whose flags can be looked at, when clone3 is not there
    parts += [_code(_JUMP_EQUAL, _CLONE3, 0, 1), _code(_RETURN, _ERROR | errno.ENOSYS)]
    parts += [
        _code(_JUMP_EQUAL, _CLONE[machine], 0, 4),
        _code(_LOAD, _ARGUMENT),
        _code(_JUMP_ANY_BIT, _NEW_NAMESPACES, 0, 1),
        refuse,
        _code(_RETURN, _ALLOW),
    ]
    sockets = [_code(_LOAD, _ARGUMENT)]
    sockets += [_code(_JUMP_EQUAL, family, len(_FAMILIES) - at, 0) for at, family in enumerate(_FAMILIES)]
    sockets += [_code(_RETURN, _ERROR | errno.EAFNOSUPPORT), _code(_RETURN, _ALLOW)]
    first, second = _SOCKET[machine]
    parts += [_code(_JUMP_EQUAL, first, 1, 0), _code(_JUMP_EQUAL, second, 0, len(sockets)), *sockets]
    for numbers in _REFUSED.values():
        number = numbers[column]
        if number is not None:
            parts += [_code(_JUMP_EQUAL, number, 0, 1), refuse]
    return b"".join([*parts, _code(_RETURN, _ALLOW)])
