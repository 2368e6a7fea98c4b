"""User namespaces with private ids: root inside is an unused user id outside.

1. Each container gets 65,536 user and group ids of its own. Everything that the kernel counts or permits by user
   (pending signals, watches of files, message queues, ownership of the host's files) is then the container's own, and
   none of the host's.
2. Ids are taken from a range that distributions leave unused. Names of sockets show all zygotes of the machine which
   are taken; these vanish with their owner however it ends.

Standard library only.
"""

from __future__ import annotations

import _socket
import errno
import os

from sandboxgym.sandbox.overlay import kernel

FIRST, SIZE, NUMBER = 0x70000000, 1 << 16, 0x0FFE
"""The ranges begin at ``FIRST + n * SIZE``, n below ``NUMBER``: above what containers get, below 2**31."""

_KEEP_CAPABILITIES = 0x4  # SECBIT_NO_SETUID_FIXUP


def claim(wanted: int) -> tuple[int, _socket.socket]:
    """Claim a free range: its first id, and an object that holds the claim while it is open.

    Args:
        wanted: number of the range that is tried first.

    Raises:
        OSError: all are taken.
    """
    for number in range(wanted, wanted + NUMBER):
        base = FIRST + number % NUMBER * SIZE
        holder = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        try:
            holder.bind(f"\0sandboxgym-ids-{base}")
        except OSError as error:
            holder.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return base, holder
    raise OSError(errno.EAGAIN, f"all {NUMBER} ranges of private ids are taken")


def namespace(base: int) -> int:
    """Make a user namespace in which 0 to 65,535 are the ids from ``base`` on; a descriptor.

    It is made by a process that has these ids already, so that what is counted by user counts as theirs up to the top,
    and not as root's.

    Raises:
        OSError: this process is not root of the machine, or the kernel forbids it.
    """
    made, tell = os.pipe()
    wait, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            for descriptor in (made, done):
                os.close(descriptor)
            kernel.set_secure_bits(_KEEP_CAPABILITIES)
            os.setgroups([])
            os.setresgid(base, base, base)
            os.setresuid(base, base, base)
            kernel.unshare(kernel.NEWUSER)
            os.write(tell, b"\0")
            os.read(wait, 1)  # ends with the parent
        except OSError as error:
            os.write(tell, bytes([error.errno or errno.EIO]))
        finally:
            os._exit(0)
    try:
        for descriptor in (tell, wait):
            os.close(descriptor)
        code = (os.read(made, 1) or bytes([errno.EIO]))[0]
        if code:
            raise OSError(code, f"no user namespace can be made: {os.strerror(code)}")
        for name in ("uid_map", "gid_map"):
            kernel.write_text(f"/proc/{pid}/{name}", f"0 {base} {SIZE}")
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(made)
        os.close(done)
        os.waitpid(pid, 0)


def enter(descriptor: int) -> None:
    """Enter a namespace of `namespace` as its root."""
    kernel.set_namespace(descriptor, kernel.NEWUSER)
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def probe(directories: list[str]) -> None:
    """Try whether files in these directories can have private ids. Changes the mounts of this process.

    Args:
        directories: on the file systems in question.

    Raises:
        OSError: they cannot; its text says which and why.
    """
    base, holder = claim(NUMBER - 1)
    kernel.unshare(kernel.NEWNS)
    kernel.make_private()
    descriptor = namespace(base)
    for path in directories:
        try:
            os.close(kernel.copy_mount(path, ids=descriptor, recursive=False))
        except OSError as error:
            raise OSError(error.errno, f"the ids of files in {path} cannot be mapped: {error.strerror}") from None
    holder.close()
