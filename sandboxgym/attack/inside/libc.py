"""System calls by number, through ctypes."""

import ctypes
import os
import platform
from typing import Any

from .answers import AttemptAnswer, absent, attempt, name_of, refused, worked

MACHINE = platform.machine()
_COLUMN = 1 if MACHINE == "aarch64" else 0

# number on x86_64, number on aarch64; -1 where there is no such call
NUMBERS = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "capset": (126, 91),
    "clock_adjtime": (305, 266),
    "create_module": (174, -1),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27),
    "io_setup": (206, 0),
    "io_uring_setup": (425, 425),
    "ioperm": (173, -1),
    "iopl": (172, -1),
    "ioprio_set": (251, 30),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "listmount": (458, 458),
    "listns": (470, 470),
    "lookup_dcookie": (212, 18),
    "migrate_pages": (256, 238),
    "mlockall": (151, 230),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "msgctl": (71, 187),
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "nfsservctl": (180, 42),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pidfd_open": (434, 434),
    "pivot_root": (155, 41),
    "prctl": (157, 167),
    "prlimit64": (302, 261),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "query_module": (178, -1),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "rt_sigqueueinfo": (129, 138),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "semctl": (66, 191),
    "semget": (64, 190),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "setpriority": (141, 140),
    "settimeofday": (164, 170),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "shmget": (29, 194),
    "statmount": (457, 457),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "_sysctl": (156, -1),
    "sysfs": (139, -1),
    "syslog": (103, 116),
    "timer_create": (222, 107),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "uselib": (134, -1),
    "userfaultfd": (323, 282),
    "ustat": (136, -1),
    "vhangup": (153, 58),
    "clone": (56, 220),
    "clone3": (435, 435),
    "getpid": (39, 172),
}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def call(name: str, *arguments: Any) -> "tuple[int, int]":
    """Make a system call; returns its result and error number. Buffers are passed by address."""
    number = NUMBERS[name][_COLUMN]
    if number < 0:
        raise absent(f"this machine has no call {name}")
    ctypes.set_errno(0)
    passed = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = _libc.syscall(ctypes.c_long(number), *passed)
    return int(result), ctypes.get_errno()


def check(name: str, *arguments: Any) -> int:
    """Return the result of a system call that has to succeed; otherwise answer "refused"."""
    result, code = call(name, *arguments)
    if result < 0:
        raise refused(f"{name}: {name_of(code)}")
    return result


def _argument(value: Any) -> Any:
    """Convert an argument as the host sends it: a number, a text, ``{"zeros": n}`` or ``{"hex": "…"}``."""
    if isinstance(value, str):
        return ctypes.create_string_buffer(os.fsencode(value))
    if isinstance(value, dict):
        data = bytes(value["zeros"]) if "zeros" in value else bytes.fromhex(value["hex"])
        return ctypes.create_string_buffer(data, len(data))
    return value


@attempt
def _system_call(name: str, arguments: "list[Any]", permitted: "list[str]") -> AttemptAnswer:
    """Attempt one call. An error in ``permitted`` comes after the check of privileges: the call was allowed."""
    result, code = call(name, *[_argument(value) for value in arguments])
    if result >= 0:
        return worked(f"{name} was allowed")
    if name_of(code) in permitted:
        return worked(f"{name} was allowed, and failed for its arguments only ({name_of(code)})")
    return refused(f"{name}: {name_of(code)}")
