"""Weights sent to a vLLM server over NCCL, from GPU to GPU: the transport of ``server_sends=nccl``.

Written against the API of vLLM 0.32 (backend ``nccl`` of its ``--weight-transfer-config``), and **never run on GPUs**:
the messages, their order and the failures are tested against a real server on a CPU, with sockets in place of NCCL.

What this module promises:

1. A group of processes lives for one update of one server: a server that was started again needs nothing but another
   update, and one that dies concerns no other.
2. Both sides of a step run at the same time, with a deadline: where one fails, or the time is over, nobody waits for
   the other. A thread that NCCL does not give back is left behind.
3. This process is rank 0, the server's workers follow. Weights go one by one, in the order in which they were named.

Left out: weights packed into larger messages; servers of several that share a broadcast; shards sent by their owners.
"""

from __future__ import annotations

import base64
import ctypes
import queue
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from bpo_ref.sampling.engine import EngineError, EngineUnavailable, Weights

Call = Callable[[str, Any], Any]
"""Function that posts a body to a path of the server, and returns its answer."""

ID_BYTES = 128
SUM = 0
TYPES = {torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9}
"""NCCL's numbers of types (nccl.h)."""


class Group(Protocol):
    """Rank 0 of a group of processes."""

    def broadcast(self, tensor: Tensor) -> None:
        """Send a tensor to all others, maybe later."""

    def arrived(self) -> bool:
        """True if all that was sent has arrived."""

    def close(self) -> None:
        """Leave the group, also in the middle of something."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * ID_BYTES),)


class NcclGroup:
    """A group over NCCL, whose library PyTorch has loaded.

    Args:
        unique: name of the group, from `unique_id`.
        size: number of its processes; waits until all have come.
        device: GPU of this process.

    Raises:
        EngineError: NCCL reports an error.
    """

    def __init__(self, unique: bytes, size: int, device: torch.device) -> None:
        self._nccl, self._device, self._group = _library(), device, ctypes.c_void_p()
        name = _UniqueId()
        ctypes.memmove(ctypes.byref(name), unique, ID_BYTES)
        with torch.cuda.device(device):
            self._nccl("ncclCommInitRank", ctypes.byref(self._group), ctypes.c_int(size), name, ctypes.c_int(0))
            # vLLM's side begins with a sum of one number, in which all have to take part.
            one = torch.zeros(1, device=device)
            self._nccl("ncclAllReduce", *self._of(one), ctypes.c_int(SUM), self._group, self._stream())
            torch.cuda.current_stream().synchronize()

    @staticmethod
    def unique_id() -> bytes:
        """A new name of a group."""
        name = _UniqueId()
        _library()("ncclGetUniqueId", ctypes.byref(name))
        return ctypes.string_at(ctypes.byref(name), ID_BYTES)

    def broadcast(self, tensor: Tensor) -> None:
        """Put a tensor into the GPU's queue; its memory is used again only behind it in this queue."""
        with torch.cuda.device(self._device):
            tensor = tensor.to(self._device).contiguous()
            self._nccl("ncclBroadcast", *self._of(tensor), ctypes.c_int(0), self._group, self._stream())

    def arrived(self) -> bool:
        """True if the GPU's queue is empty."""
        with torch.cuda.device(self._device):
            return torch.cuda.current_stream().query()

    def close(self) -> None:
        """End the group at once; what waits in the GPU's queue is given up."""
        with torch.cuda.device(self._device):
            self._nccl("ncclCommAbort", self._group)

    def _of(self, tensor: Tensor) -> tuple[Any, ...]:
        """Arguments for a tensor that is sent from where it is, and received there."""
        place = ctypes.c_void_p(tensor.data_ptr())
        return place, place, ctypes.c_size_t(tensor.numel()), ctypes.c_int(TYPES[tensor.dtype])

    def _stream(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def _library() -> Callable[..., None]:
    """Function that calls one of NCCL's.

    Raises:
        EngineError: there is no NCCL, or it reports an error.
    """
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise EngineError(f"server_sends: nccl needs libnccl.so.2, which cannot be loaded ({error})") from error

    def call(name: str, *given: Any) -> None:
        if status := getattr(library, name)(*given):
            library.ncclGetErrorString.restype = ctypes.c_char_p
            raise EngineError(f"{name} of NCCL failed: {library.ncclGetErrorString(status).decode()}")

    return call


def send(call: Call, weights: Weights, *, workers: int, device: torch.device, end: float, name: str) -> None:
    """Send weights to a server, which is paused.

    Args:
        call: asks the server, with the deadline.
        weights: with the names and the shapes of a checkpoint.
        workers: number of the server's GPUs.
        device: GPU of this process.
        end: deadline, of the monotonic clock.
        name: of the server, for messages.

    Raises:
        EngineError: they were not sent. The server then has unknown weights, and may wait for the rest for ever.
    """
    unique, size = NcclGroup.unique_id(), 1 + workers
    init = {
        "nccl_unique_id_b64": base64.b64encode(unique).decode(),
        "rank_offset": 1,
        "world_size": size,
        "packed": False,
    }
    group: Group | None = None

    def join() -> None:
        nonlocal group
        group = NcclGroup(unique, size, device)

    def broadcast() -> None:
        assert group is not None
        for _, tensor in weights():
            group.broadcast(tensor)
        while not group.arrived() and time.monotonic() < end:
            time.sleep(0.002)

    try:
        both(name, end, lambda: call("/init_weight_transfer_engine", {"init_info": init}), join)
        call("/start_weight_update", None)
        update = described(weights())
        both(name, end, lambda: call("/update_weights", {"update_info": update}), broadcast)
        call("/finish_weight_update", None)
    finally:
        if group is not None:
            group.close()
            with suppress(EngineError):  # what is raised says more; and another update makes another group
                call("/shutdown_weight_transfer_engine", None)


def described(weights: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
    """Message that announces weights."""
    found: dict[str, list[Any]] = {"names": [], "dtype_names": [], "shapes": []}
    for name, tensor in weights:
        found["names"].append(name)
        found["dtype_names"].append(str(tensor.dtype).removeprefix("torch."))
        found["shapes"].append(list(tensor.shape))
    return found


def both(name: str, end: float, *sides: Callable[[], object]) -> None:
    """Run both sides of a step at the same time; the first error is raised at once, whatever the other side does.

    Raises:
        EngineUnavailable: the time is over.
    """
    done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run(side: Callable[[], object]) -> None:
        try:
            side()
            done.put(None)
        except BaseException as error:  # raised by the caller
            done.put(error)

    for side in sides:
        threading.Thread(target=run, args=(side,), name="sandboxgym-nccl", daemon=True).start()
    for _ in sides:
        try:
            error = done.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            raise EngineUnavailable(
                f"{name}: its GPUs and this process did not find each other over NCCL in time, or it ended meanwhile; "
                "it may wait for ever now: start it again"
            ) from None
        if error is not None:
            raise error
