"""Attempts to reach the host or another sandbox through the kernel, the network, privileges, processes."""

from __future__ import annotations

import contextlib
import glob
import os
import socket
from collections.abc import Callable
from typing import Any

from sandboxgym.attack.attempt import NotApplicable, Observed, blocked, passed
from sandboxgym.attack.calls import CALLS, OF_INIT
from sandboxgym.attack.escape import CALLS_OPEN, about_host, add, by_request
from sandboxgym.attack.stage import Stage

# The kernel

for _call in CALLS:
    add(
        _call.name,
        _call.about,
        by_request("system_call", name=_call.call, arguments=list(_call.arguments), permitted=list(_call.permitted)),
        CALLS_OPEN if _call.name in ("io-uring", "perf-self") else None,
    )


def _of_init(do: str, **arguments: Any) -> Callable[[Stage], Observed]:
    def run(stage: Stage) -> Observed:
        if stage.backend == "docker":
            raise NotApplicable("process 1 of a container is one of its own")
        return stage.prober().ask(do, **arguments).seen()

    return run


for _call in OF_INIT:
    add(
        _call.name, _call.about, _of_init("system_call", name=_call.call, arguments=list(_call.arguments), permitted=[])
    )
add("trace-init", "traces process 1", _of_init("trace", pid=1))
add("read-memory-of-init", "reads memory of process 1", _of_init("read_memory", pid=1))
add("descriptor-of-init", "takes descriptors of process 1", _of_init("take_descriptor", pid=1))
for _name in ("fd", "map_files"):
    add(f"init-{_name}", f"follows {_name} of process 1", _of_init("follow", folder=f"/proc/1/{_name}"))
for _name in ("mem", "environ", "maps", "cwd", "exe", "root"):
    add(
        f"init-{_name}",
        f"looks at {_name} of process 1",
        _of_init("open", path=f"/proc/1/{_name}", write=_name == "mem", read_bytes=1),
    )
for _name, _flag in (("user", 0x10000000), ("mount", 0x00020000), ("net", 0x40000000), ("pid", 0x20000000)):
    add(f"clone-{_name}", f"makes a process in a new {_name} namespace", by_request("clone_namespace", flag=_flag))
    add(
        f"clone3-{_name}",
        f"makes a process in a new {_name} namespace by clone3",
        by_request("clone3_namespace", flag=_flag),
    )
for _name in ("mnt", "net", "pid", "user", "uts", "ipc", "cgroup"):
    add(f"join-{_name}", f"enters the {_name} namespace of process 1", by_request("join_namespace", kind=_name))
add(
    "join-by-pidfd",
    "enters the namespaces of process 1 by its descriptor",
    by_request("join_by_pidfd", flags=0x00020000),
)
for _name in ("pid", "user"):
    add(f"parent-of-{_name}", f"gets at the {_name} namespace above", by_request("parent_namespace", kind=_name))
add(
    "calls-of-i386",
    "makes calls of 32-bit programs, past the filter",
    by_request("machine_code", code="b814000000cd80c3", number=20),
    CALLS_OPEN,
)
add(
    "calls-of-x32",
    "makes calls of x32 programs, past the filter",
    by_request("machine_code", code="b8270000400f05c3", number=0x40000027),
    CALLS_OPEN,
)
add("core-dump", "has the kernel dump core by the host's settings", by_request("core_dump"))
for _name in ("CORE", "NOFILE", "NPROC", "MEMLOCK", "RTPRIO", "NICE", "SIGPENDING", "MSGQUEUE"):
    add(f"raise-{_name.lower()}", f"raises its limit {_name}", by_request("raise_limit", name=f"RLIMIT_{_name}"))
add("exempt-from-killer", "is exempt from the host's out-of-memory killer", by_request("protect_from_killer"))
add("real-time", "has real-time priority", by_request("real_time"))
add("negative-nice", "has a higher priority than the host", by_request("negative_nice"))

# Privileges

for _name, _number in (
    *(("DAC_READ_SEARCH", 2), ("LINUX_IMMUTABLE", 9), ("NET_ADMIN", 12), ("NET_RAW", 13), ("IPC_LOCK", 14)),
    *(("IPC_OWNER", 15), ("SYS_MODULE", 16), ("SYS_RAWIO", 17), ("SYS_PTRACE", 19), ("SYS_PACCT", 20)),
    *(("SYS_ADMIN", 21), ("SYS_BOOT", 22), ("SYS_NICE", 23), ("SYS_RESOURCE", 24), ("SYS_TIME", 25), ("MKNOD", 27)),
    *(("LEASE", 28), ("AUDIT_CONTROL", 30), ("MAC_OVERRIDE", 32), ("MAC_ADMIN", 33), ("SYSLOG", 34)),
    *(("WAKE_ALARM", 35), ("AUDIT_READ", 37), ("PERFMON", 38), ("BPF", 39), ("CHECKPOINT_RESTORE", 40)),
):
    add(
        f"capability-{_name.lower().replace('_', '-')}",
        f"has CAP_{_name}",
        by_request("has_capability", number=_number, name=_name),
    )
add("no-new-privileges", "may gain privileges by programs", by_request("no_new_privileges"))
add("filtered", "makes any system call: there is no filter", by_request("filtered"))
add("set-user-id", "gains the rights of a program's owner", by_request("set_user_id", group=False))
add("set-group-id", "gains the rights of a program's group", by_request("set_user_id", group=True))
add("file-capabilities", "gains the capabilities of a program's file", by_request("file_capability"))
add(
    "ambient-capability",
    "keeps a capability for programs that it runs",
    by_request("flag", option=47, arguments=[2, 21]),
)

# The network

add(
    "network-loopback",
    "reaches services of the host's loopback device",
    about_host("connect", lambda stage: {"host": "127.0.0.1", "port": stage.host.port, "token": stage.host.token}),
)
add(
    "network-loopback6",
    "reaches services of the host's loopback device by IPv6",
    about_host(
        "connect", lambda stage: {"host": "::ffff:127.0.0.1", "port": stage.host.port, "token": stage.host.token}
    ),
)


def _own_address() -> str:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    raise NotApplicable("the host has no address beside its loopback")


add(
    "network-host",
    "has a route to the host's own address",
    lambda stage: stage.prober().ask("route", host=_own_address()).seen(),
)
for _name, _address in (
    ("bridge", "172.17.0.1"),
    ("metadata", "169.254.169.254"),
    ("internet", "192.0.2.1"),
    ("private", "10.0.0.1"),
    ("multicast", "224.0.0.251"),
    ("internet6", "2001:db8::1"),
    ("metadata6", "fd00:ec2::254"),
    ("link-local6", "fe80::1%1"),
):
    add(f"network-{_name}", f"has a route to {_address} ({_name})", by_request("route", host=_address))
add(
    "network-abstract",
    "reaches abstract sockets of the host",
    about_host("connect_abstract", lambda stage: {"name": stage.host.abstract, "token": stage.host.token}),
)
add(
    "network-socket-file",
    "reaches a socket file of the host",
    about_host("connect_path", lambda stage: {"path": stage.host.socket_path}),
)
for _path in (
    "/var/run/docker.sock",
    "/run/containerd/containerd.sock",
    "/run/dbus/system_bus_socket",
    "/run/systemd/private",
    "/run/udev/control",
):
    add(
        f"network{_path.replace('/', '-').replace('.', '-')}",
        f"talks to {_path}",
        by_request("connect_path", path=_path),
    )
add("network-interfaces", "sees interfaces of the host", by_request("interfaces"))
add(
    "network-ports-listed",
    "sees the ports that the host listens on",
    about_host("ports_listed", lambda stage: {"port": stage.host.port}),
)
add(
    "network-sockets-listed",
    "sees the abstract sockets of the host",
    about_host("abstract_listed", lambda stage: {"name": stage.host.abstract}),
)
add("network-packet", "sees and sends raw packets", by_request("packet"))
for _name, _family, _kind, _protocol in (
    ("raw", 2, "raw", 1),
    ("raw6", 10, "raw", 58),
    ("vsock", 40, "stream", 0),
    ("algorithms", 38, "seqpacket", 0),
    ("bluetooth", 31, "raw", 1),
    ("keys", 15, "raw", 2),
    ("can", 29, "raw", 1),
    ("tipc", 30, "stream", 0),
    ("rds", 21, "seqpacket", 0),
    ("xdp", 44, "raw", 0),
    ("x25", 9, "seqpacket", 0),
    ("phonet", 35, "dgram", 0),
    ("qipcrtr", 42, "dgram", 0),
    ("smc", 43, "stream", 0),
):
    add(
        f"socket-{_name}",
        f"makes a socket of the {_name} family",
        by_request("socket", family=_family, kind=_kind, protocol=_protocol),
        CALLS_OPEN,
    )
add("network-uevents", "hears of the host's devices", by_request("uevents"))
add("network-configure", "configures network interfaces", by_request("change_interface", name="lo"))

# Processes and shared objects of the host and of a neighbour


def _keyed(kind: str) -> Callable[[Stage], Observed]:
    def run(stage: Stage) -> Observed:
        if not stage.host.key:
            raise NotApplicable("the host lets no such object be made")
        return stage.prober().ask("system_v", kind=kind, key=stage.host.key).seen()

    return run


def _process_by(how: str) -> Callable[[Stage], dict[str, Any]]:
    return lambda stage: {"pid": stage.host.process.pid, "how": how}


def _key_of(kind: str) -> Callable[[Stage, int], dict[str, Any]]:
    return lambda stage, port: {"kind": kind, "key": port}


def _file_in(folder: str) -> Callable[[Stage, int], dict[str, Any]]:
    return lambda stage, port: {
        "secret": f"{folder}/neighbour-{stage.host.token}",
        "token": stage.host.token,
        "prefix": "",
    }


for _kind in ("shm", "msg", "sem"):
    add(f"system-v-{_kind}", f"finds the host's System V object ({_kind})", _keyed(_kind))
add(
    "system-v-number",
    "finds the host's shared memory by its number",
    about_host("system_v_number", lambda stage: {"kind": "shm", "identity": stage.host.segment}),
)
add(
    "shared-memory-file",
    "reads the host's files in /dev/shm",
    about_host(
        "secret_by_path", lambda stage: {"secret": str(stage.host.shared), "token": stage.host.token, "prefix": ""}
    ),
)
add(
    "host-process-visible",
    "sees processes of the host",
    about_host("process_named", lambda stage: {"word": stage.host.token}),
)
for _how in ("kill", "group", "pidfd", "queue"):
    add(
        f"host-process-{_how}",
        f"signals a process of the host ({_how})",
        about_host("signal", _process_by(_how)),
    )
add(
    "host-process-clock",
    "learns the CPU time of a process of the host",
    about_host("clock_of", lambda stage: {"pid": stage.host.process.pid}),
)


def _kill_all(stage: Stage) -> Observed:
    """Send SIGKILL to all visible processes; the host's process and the neighbour must survive."""
    neighbour = stage.prober("neighbour")
    with stage.alone() as prober:
        reply = prober.ask("kill_everything")
    if stage.host.process.poll() is not None:
        return passed("a process of the host was killed")
    neighbour.let_go()
    if not neighbour.ask("one_more", what="shared memory segments").worked:
        return passed("the neighbour stopped")
    reply.need()
    return blocked("the host's process and the neighbour still run")


add("kill-everything", "kills processes of the host or of a neighbour", _kill_all)


def _neighbour(do: str, ask: Callable[[Stage, int], dict[str, Any]]) -> Callable[[Stage], Observed]:
    def run(stage: Stage) -> Observed:
        neighbour = stage.prober("neighbour")
        port, token = 20000 + stage.host.port % 10000, stage.host.token
        made = neighbour.ask("make_system_v", key=port, token=f"neighbour-{token}")
        listening = neighbour.ask("listen", port=port, token=token)
        made.need()
        listening.need()
        neighbour.sandbox.execute(f"(exec -a neighbour-{token} sleep 300) &", timeout=10)
        neighbour.sandbox.write_file(f"/root/neighbour-{token}", token.encode())
        neighbour.sandbox.write_file(f"/tmp/neighbour-{token}", token.encode())
        return stage.prober().ask(do, **ask(stage, port)).seen()

    return run


for _kind in ("shm", "msg", "sem"):
    add(
        f"neighbour-{_kind}",
        f"finds a neighbour's System V object ({_kind})",
        _neighbour("system_v", _key_of(_kind)),
    )
add(
    "neighbour-port",
    "reaches a neighbour's port",
    _neighbour("connect", lambda stage, port: {"host": "127.0.0.1", "port": port, "token": stage.host.token}),
)
add(
    "neighbour-abstract",
    "reaches a neighbour's abstract socket",
    _neighbour(
        "connect_abstract", lambda stage, port: {"name": f"attack-{stage.host.token}", "token": stage.host.token}
    ),
)
for _folder in ("/root", "/tmp", "/dev/shm"):
    add(
        f"neighbour-files{_folder.replace('/', '-')}",
        f"reads a neighbour's files in {_folder}",
        _neighbour(
            "secret_by_path",
            _file_in(_folder),
        ),
    )
add(
    "neighbour-processes",
    "sees a neighbour's processes",
    _neighbour("process_named", lambda stage, port: {"word": f"neighbour-{stage.host.token}"}),
)


def _neighbour_control(stage: Stage) -> Observed:
    control = os.fspath(stage.prober("neighbour").sandbox.backend.control)
    reply = stage.prober().ask("open", path=control, write=False, read_bytes=0)
    reply.need()
    others = glob.glob(f"{control}/*")
    return passed(reply.detail) if reply.worked else blocked(f"{reply.detail} ({len(others)} entries outside)")


add("neighbour-control", "reads a neighbour's control directory", _neighbour_control)
