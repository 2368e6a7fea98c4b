"""Attempts to gain privileges: set-user-id programs, file capabilities, sets of capabilities, the filter."""

import ctypes
import os
import shutil
import struct
import subprocess
import sys

from .answers import AttemptAnswer, absent, attempt, refused, worked
from .libc import call, check

_NOBODY = 65534


def _status(name: str) -> str:
    with open("/proc/self/status") as file:
        return dict(line.split(":\t", 1) for line in file if ":\t" in line).get(name, "").strip()


@attempt
def _has_capability(number: int, name: str) -> AttemptAnswer:
    effective = int(_status("CapEff") or "0", 16)
    bounding = int(_status("CapBnd") or "0", 16)
    if effective >> number & 1:
        return worked(f"CAP_{name} is there")
    if bounding >> number & 1:
        return worked(f"CAP_{name} can be got by executing a program (bounding set)")
    header = ctypes.create_string_buffer(struct.pack("II", 0x20080522, 0), 8)
    low, high = (1 << number, 0) if number < 32 else (0, 1 << (number - 32))
    data = ctypes.create_string_buffer(struct.pack("6I", low, low, 0, high, high, 0), 24)
    check("capset", header, data)
    return worked(f"CAP_{name} could be added")


@attempt
def _flag(option: int, arguments: "list[int]") -> AttemptAnswer:
    """Set a flag by prctl that a confined process must not be allowed to set."""
    padded = (*arguments, 0, 0, 0, 0)[:4]
    check("prctl", option, *padded)
    return worked(f"prctl {option} was allowed")


@attempt
def _no_new_privileges() -> AttemptAnswer:
    if _status("NoNewPrivs") == "1":
        call("prctl", 38, 0, 0, 0, 0)
        if _status("NoNewPrivs") == "1":
            return refused("no_new_privs is set and stays")
    return worked("programs that are executed may gain privileges")


@attempt
def _filtered() -> AttemptAnswer:
    if _status("Seccomp") == "2":
        return refused("a filter of system calls is on this process")
    return worked("no filter of system calls is on this process")


def _copy(name: str) -> str:
    folder = f"/tmp/attack-{os.getpid()}"
    os.makedirs(folder)
    os.chmod(folder, 0o755)
    path = os.path.join(folder, name)
    shutil.copy("/bin/cat" if os.path.exists("/bin/cat") else sys.executable, path)
    os.chmod(path, 0o755)
    return path


def _as_nobody(argv: "list[str]") -> str:
    def drop() -> None:
        os.setgroups([]) if os.geteuid() == 0 and not _one_user() else None
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)

    done = subprocess.run(argv, preexec_fn=drop, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.stdout.decode(errors="replace")


def _one_user() -> bool:
    with open("/proc/self/uid_map") as file:
        return int(file.read().split()[2]) == 1


@attempt
def _set_user_id(group: bool) -> AttemptAnswer:
    if _one_user():
        return absent("there is one user inside: nobody to gain the rights of another")
    path = _copy("set-id")
    os.chmod(path, 0o2755 if group else 0o4755)
    seen = _as_nobody([path, "/proc/self/status"])
    line = next((line for line in seen.splitlines() if line.startswith("Gid:" if group else "Uid:")), "")
    if not line:
        return absent(f"the program could not be run: {seen[:100]}")
    if line.split()[2] == "0":
        return worked("a set-%s-id program of root gave its rights to nobody" % ("group" if group else "user"))
    return refused("the bit had no effect")


@attempt
def _file_capability() -> AttemptAnswer:
    path = _copy("capable")
    value = struct.pack("<5I", 0x02000001, 0xFFFFFFFF, 0, 0xFF, 0)
    os.setxattr(path, "security.capability", value)
    seen = _as_nobody([path, "/proc/self/status"])
    line = next((line for line in seen.splitlines() if line.startswith("CapEff:")), "")
    if line and int(line.split()[1], 16):
        return worked("capabilities of a file came to a user without any")
    return refused("the file's capabilities had no effect")


@attempt
def _own_executable(pid: str) -> AttemptAnswer:
    """Overwrite the running program, which is a file of the host for a process that came from outside."""
    descriptor = os.open(f"/proc/{pid}/exe", os.O_RDWR)
    os.close(descriptor)
    return worked("the executable of {} ({}) can be written to".format(pid, os.readlink(f"/proc/{pid}/exe")))


@attempt
def _as_other_user(uid: int) -> AttemptAnswer:
    os.setresuid(uid, uid, uid)
    return worked(f"this process became user {uid}", uid=os.getuid())
