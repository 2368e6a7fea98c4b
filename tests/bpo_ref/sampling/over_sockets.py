"""Sockets in the place of NCCL, which needs GPUs: in the trainer's process, and in that of a real vLLM server.

PYTHON over_sockets.py serve FOLDER ...    # with vLLM's Python: its server, all of it but NCCL
"""

from __future__ import annotations

import socket
import sys
import uuid
from typing import Any

import torch

BYTES = 128


class SocketGroup:
    """Rank 0, as `bpo_ref.sampling.nccl.NcclGroup`: waits for all others, and sends them each tensor's bytes."""

    waiting: dict[bytes, socket.socket] = {}
    opened = 0
    closed = 0

    def __init__(self, unique: bytes, size: int, device: torch.device) -> None:
        listening = self.waiting.pop(unique)
        self.others = [listening.accept()[0] for _ in range(size - 1)]
        listening.close()
        SocketGroup.opened += 1

    @classmethod
    def unique_id(cls) -> bytes:
        listening = socket.socket(socket.AF_UNIX)
        name = b"\0sandboxgym-" + uuid.uuid4().hex.encode()  # abstract: no file, which a killed server would leave
        listening.bind(name)
        listening.listen()
        unique = name.ljust(BYTES, b"\0")
        cls.waiting[unique] = listening
        return unique

    def broadcast(self, tensor: torch.Tensor) -> None:
        data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        for other in self.others:
            other.sendall(data)

    def arrived(self) -> bool:
        return True

    def close(self) -> None:
        SocketGroup.closed += 1
        for other in self.others:
            other.close()


class Receiver:
    """A server's worker, as vLLM's ``PyNcclCommunicator``."""

    def __init__(self, unique: bytes, rank: int, world_size: int, device: Any) -> None:
        assert 1 <= rank < world_size
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(unique.rstrip(b"\0"))

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any) -> None:
        assert src == 0
        place, found = memoryview(tensor.contiguous().view(torch.uint8).view(-1).numpy()), 0
        while found < len(place):
            more = self.socket.recv_into(place[found:])
            if not more:
                raise ConnectionError("the trainer has left the group")
            found += more

    def destroy(self) -> None:
        self.socket.close()


def pretend() -> None:
    """Let vLLM on a CPU receive as if it had an accelerator with NCCL."""
    from vllm.distributed.weight_transfer import nccl_common

    nccl_common.uid_init_process_group = Receiver  # type: ignore[attr-defined]
    torch.accelerator.current_device_index = lambda: 0  # type: ignore[assignment]
    torch.accelerator.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.cuda.current_stream = lambda *_: None  # type: ignore[assignment]


if __name__ in ("__main__", "__mp_main__"):  # its engine may be a process that is spawned
    pretend()
if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    sys.exit(main())
