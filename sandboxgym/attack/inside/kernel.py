"""Attempts on the kernel that need several calls: namespaces, calls of other ABIs, tracing, the machine's resources."""

import ctypes
import mmap
import os
import resource
import signal
import struct

from .answers import AttemptAnswer, absent, attempt, name_of, refused, worked
from .libc import MACHINE, call, check


def _made(name: str, *arguments: object) -> AttemptAnswer:
    """Make a process in a new namespace by the call of this name; the process ends at once."""
    result, code = call(name, *arguments)
    if result == 0:
        os._exit(0)
    if result < 0:
        return refused(f"{name}: {name_of(code)}")
    os.waitpid(result, 0)
    return worked("a process in a new namespace was made")


@attempt
def _clone_namespace(flag: int) -> AttemptAnswer:
    return _made("clone", flag | signal.SIGCHLD, 0, 0, 0, 0)


@attempt
def _clone3_namespace(flag: int) -> AttemptAnswer:
    arguments = ctypes.create_string_buffer(struct.pack("8Q", flag, 0, 0, 0, signal.SIGCHLD, 0, 0, 0), 64)
    return _made("clone3", arguments, 64)


@attempt
def _join_namespace(kind: str) -> AttemptAnswer:
    descriptor = os.open(f"/proc/1/ns/{kind}", os.O_RDONLY)
    check("setns", descriptor, 0)
    return worked("the namespace of process 1 was entered")


@attempt
def _join_by_pidfd(flags: int) -> AttemptAnswer:
    check("setns", check("pidfd_open", 1, 0), flags)
    return worked("the namespaces of process 1 were entered")


@attempt
def _parent_namespace(kind: str) -> AttemptAnswer:
    import fcntl

    descriptor = os.open(f"/proc/self/ns/{kind}", os.O_RDONLY)
    parent = fcntl.ioctl(descriptor, 0xB702 if kind == "pid" else 0xB701)
    return worked("a descriptor of a namespace above was given: {}".format(os.readlink(f"/proc/self/fd/{parent}")))


@attempt
def _trace(pid: int) -> AttemptAnswer:
    if not os.path.exists(f"/proc/{pid}"):
        return absent(f"there is no process {pid}")
    check("ptrace", 0x4206, pid, 0, 0)  # PTRACE_SEIZE: does not stop it
    return worked(f"process {pid} can be traced")


@attempt
def _read_memory(pid: int) -> AttemptAnswer:
    with open(f"/proc/{pid}/maps") as maps:
        start = int(maps.readline().split("-")[0], 16)
    buffer = ctypes.create_string_buffer(16)
    local = struct.pack("QQ", ctypes.addressof(buffer), 16)
    remote = struct.pack("QQ", start, 16)
    check(
        "process_vm_readv",
        pid,
        ctypes.create_string_buffer(local, 16),
        1,
        ctypes.create_string_buffer(remote, 16),
        1,
        0,
    )
    return worked(f"memory of process {pid} was read")


@attempt
def _take_descriptor(pid: int) -> AttemptAnswer:
    pidfd = check("pidfd_open", pid, 0)
    for number in range(3, 20):
        result, code = call("pidfd_getfd", pidfd, number, 0)
        if result >= 0:
            return worked(f"descriptor {number} of process {pid} was taken")
        if name_of(code) in ("EPERM", "ENOSYS"):
            return refused(f"pidfd_getfd: {name_of(code)}")
    return refused("no descriptor could be taken")


@attempt
def _machine_code(code: str, number: int) -> AttemptAnswer:
    """Run machine code, for calls that ctypes cannot make; it returns the call's result in eax."""
    if MACHINE != "x86_64":
        return absent(f"instructions of x86_64, this is {MACHINE}")
    data = bytes.fromhex(code)
    memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(data)
    function = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, struct.pack("i", function()))
        os._exit(0)
    os.close(write)
    status = os.waitpid(pid, 0)[1]
    found = os.read(read, 4)
    if not found:
        return refused("killed by signal %s" % (status & 0x7F))
    (result,) = struct.unpack("i", found)
    if -4096 < result < 0:
        return refused(f"call {number}: {name_of(-result)}")
    return worked(f"call {number} of a foreign kind was answered with {result}")


@attempt
def _core_dump() -> AttemptAnswer:
    resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)
    pid = os.fork()
    if pid == 0:
        os.chdir("/tmp")
        os.kill(os.getpid(), signal.SIGSEGV)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status) and os.WCOREDUMP(status):
        return worked("the kernel dumped core, by the host's core_pattern")
    return refused("no core was dumped")


@attempt
def _raise_limit(name: str) -> AttemptAnswer:
    which = getattr(resource, name)
    soft, hard = resource.getrlimit(which)
    if hard == resource.RLIM_INFINITY:
        return absent(f"{name} has no hard limit to raise")
    try:
        resource.setrlimit(which, (soft, hard + 1))
    except ValueError as error:
        return refused(str(error))
    return worked(f"{name} was raised above its hard limit")


@attempt
def _protect_from_killer() -> AttemptAnswer:
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("-1000")
    return worked("this process is exempt from the host's out-of-memory killer")


@attempt
def _real_time() -> AttemptAnswer:
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    return worked("real-time priority over the host's processes was taken")


@attempt
def _negative_nice() -> AttemptAnswer:
    before = os.nice(0)
    if os.nice(-5) >= before:
        return refused("the priority stayed")
    return worked("a higher priority than the host's processes was taken")
