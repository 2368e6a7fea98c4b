"""A second device, ``second:0``, in the CPU's memory: code that breaks on a GPU by mixing devices breaks here too.

PyTorch keeps a dispatch key for devices of third parties (``PrivateUse1``). Its tensors here are in ordinary memory,
and the CPU runs every operator on them; but for PyTorch, autograd and autocast they are on another device.
What this module promises:

1. Values are those of the CPU. Autocast takes the lists of operators that it takes on CUDA.
2. An operator that is given tensors of both devices is refused as on CUDA. Numbers (tensors of no dimension) are let
   through, where CUDA does so. Indices on the CPU are refused as well: CUDA takes some, and copies them every time.
3. `waits` lists operations that would make the program wait for the device: reading numbers, shapes or tensors back.

Use it in a process of its own: `register` has to come before the first backward pass, and is never undone.
"""

from __future__ import annotations

import ctypes
import functools
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "second"
CPU, EXTENSION = 1, 12
"""DLPack's types of devices."""

COPIES = ("aten::copy_", "aten::_to_copy", "aten::_copy_from", "aten::_copy_from_and_resize")
READING = (
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::unique_consecutive", "aten::_unique2",
    "aten::unique_dim", "aten::repeat_interleave.Tensor", "aten::bincount", "aten::equal", "aten::is_nonzero",
)  # fmt: skip
"""Operators with a number, or the shape of the result, that is known once the device has computed it."""

LOWER = (
    "linear", "matmul", "mm", "mv", "bmm", "addmm", "addmv", "addbmm", "baddbmm", "einsum", "conv1d", "conv2d",
    "_convolution", "scaled_dot_product_attention",
)  # fmt: skip
"""Operators that autocast computes in the lower precision on CUDA."""
SINGLE = (
    "exp", "expm1", "log", "log10", "log1p", "log2", "reciprocal", "rsqrt", "pow.Tensor_Scalar", "pow.Tensor_Tensor",
    "pow.Scalar", "softplus", "layer_norm", "group_norm", "norm.Scalar", "norm.ScalarOpt_dim", "cosine_similarity",
    "nll_loss", "softmax.int", "log_softmax.int", "cumsum", "cumprod", "prod", "prod.dim_int", "sum",
    "sum.dim_IntList", "linalg_vector_norm",
)  # fmt: skip
"""Operators that autocast computes in fp32 on CUDA."""


def _module() -> types.ModuleType:
    """The module ``torch.second``."""
    made = types.ModuleType(f"torch.{NAME}")
    told: dict[str, Any] = {
        "is_initialized": True,
        "is_available": True,
        "current_device": 0,
        "device_count": 1,
        "_is_in_bad_fork": False,
        "get_amp_supported_dtype": [torch.bfloat16, torch.float16],
        "manual_seed_all": None,
        "synchronize": None,
        "empty_cache": None,
    }
    for name, value in told.items():
        setattr(made, name, lambda *_, value=value: value)
    made.get_rng_state = lambda *_: torch.get_rng_state()
    made.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    return made


_libraries: list[torch.library.Library] = []
_waits: list[list[str]] = []
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def register() -> torch.device:
    """Register the device, once per process."""
    if not _libraries:
        _setup_privateuseone_for_python_backend(NAME, _module())
        everything = torch.library.Library("_", "IMPL")
        everything.fallback(_run, "PrivateUse1")
        everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
        operators = torch.library.Library("aten", "IMPL")
        for names, lower in ((LOWER, True), (SINGLE, False)):
            for name in names:
                operators.impl(name, _autocast(name, lower=lower), "AutocastPrivateUse1")
        operators.impl("_fused_sdp_choice", lambda *args, **options: 0, "PrivateUse1")  # attention step by step
        _libraries.extend([everything, operators])
        torch.storage._StorageBase.clone = _cloned(torch.storage._StorageBase.clone)
        torch.__future__.set_swap_module_params_on_conversion(
            True
        )  # a weight that moves stays the same object, as on CUDA
    return torch.device(NAME, 0)


@contextmanager
def waits() -> Iterator[list[str]]:
    """Record the names of operators that wait for the device, in a list that grows."""
    found: list[str] = []
    _waits.append(found)
    try:
        yield found
    finally:
        _waits.remove(found)


def _elsewhere(tensor: Tensor, kind: int) -> Tensor:
    """View the memory of a tensor as a tensor of the other device."""
    capsule = torch._C._to_dlpack(tensor)
    device = (ctypes.c_int32 * 2).from_address(_pointer(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p))
    device[0], device[1] = kind, 0
    with torch.inference_mode(tensor.is_inference()):  # views of weights are not of that mode
        return torch.from_dlpack(capsule)


def _is_here(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


def _mapped(function: Any, value: Any) -> Any:
    """Apply a function to an argument, or to each in a list."""
    if isinstance(value, list | tuple):
        return type(value)(_mapped(function, part) for part in value)
    return function(value)


@functools.cache
def _told(op: Any) -> tuple[str, bool, bool, list[tuple[int, str]]]:
    """Describe an operator: its name, whether it copies, whether it reads its result back, and what it writes to."""
    name, schema = op.name(), op._schema
    copies = name.partition(".")[0] in COPIES
    changes = any(returned.alias_info is not None and returned.alias_info.is_write for returned in schema.returns)
    written = [
        (i, argument.name)
        for i, argument in enumerate(schema.arguments)
        if changes and argument.alias_info is not None and argument.alias_info.is_write
    ]
    return name, copies, name in READING, written


def _run(op: Any, *args: Any, **options: Any) -> Any:
    """Run an operator on the CPU."""
    name, copies, reads, places = _told(op)
    if name.startswith("aten::set_.source_Storage"):
        args[0].data = _elsewhere(_lying_in(*args[1:], like=args[0]), EXTENSION)
        return args[0]
    here: dict[int, Tensor] = {}

    def down(value: Any) -> Any:
        if isinstance(value, torch.device) and value.type == NAME:
            return torch.device("cpu")
        if not isinstance(value, Tensor):
            return value
        if value.device.type != NAME:
            if value.dim() and not copies:
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but found at least two devices, {NAME}:0 and cpu! "
                    f"(in {name}, of shape {list(value.shape)})"
                )
            return value
        if id(value) not in here:
            here[id(value)] = _elsewhere(value, CPU)
        return here[id(value)]

    written = [tensor for i, key in places for tensor in _listed(args[i] if i < len(args) else options[key])]
    empty = [tensor for tensor in written if not tensor.numel()]
    for tensor in empty:  # made without elements, for the operator to give it a shape: its memory cannot grow
        here[id(tensor)] = torch.empty(0, dtype=tensor.dtype)
    if name.startswith("aten::index.") and any(_is_here(at) and at.dtype == torch.bool for at in args[1]):
        reads = True
    low, named = _mapped(down, args), {key: _mapped(down, value) for key, value in options.items()}
    target = options.get("device")
    back = name == "aten::_to_copy" and target is not None and target.type == "cpu"
    if reads or back or (name.startswith("aten::_copy_from") and not _is_here(args[1])):
        for found in _waits:
            found.append(name.removeprefix("aten::"))
    if name.startswith("aten::_copy_from"):
        low[1].copy_(low[0])
        return args[1]
    result = op(*low, **named)
    for tensor in empty:
        tensor.data = _elsewhere(here[id(tensor)], EXTENSION)
    if written:
        return written[0] if len(written) == 1 else tuple(written)
    return result if back else _mapped(_up, result)


def _up(value: Any) -> Any:
    return _elsewhere(value, EXTENSION) if isinstance(value, Tensor) else value


def _listed(value: Any) -> Sequence[Tensor]:
    return value if isinstance(value, list | tuple) else [value]


def _lying_in(storage: Any, offset: int = 0, size: Any = None, stride: Any = None, *, like: Tensor) -> Tensor:
    """Make a CPU tensor in the memory of one of the device's storages."""
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    memory.owner = storage
    flat = torch.frombuffer(memory, dtype=like.dtype)
    return flat[offset:] if size is None else flat.as_strided(size, stride, offset)


def _cloned(clone: Any) -> Any:
    """Copy a storage, of this device too, for whose memory PyTorch has no allocator."""

    def cloned(storage: Any) -> Any:
        if storage.device.type != NAME:
            return clone(storage)
        bytes_of = _lying_in(storage, like=torch.empty(0, dtype=torch.uint8))
        return _elsewhere(bytes_of.clone(), EXTENSION).untyped_storage()

    return cloned


def _autocast(name: str, *, lower: bool) -> Any:
    """Make an operator's rule for autocast."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def cast(*args: Any, **options: Any) -> Any:
        dtype = torch.get_autocast_dtype(NAME) if lower else torch.float32

        def taken(value: Any) -> Any:
            floating = _is_here(value) and value.is_floating_point() and value.dtype != torch.float64
            return value.to(dtype) if floating else value

        with torch._C._ExcludeDispatchKeyGuard(keys):
            return op(*_mapped(taken, args), **{key: _mapped(taken, value) for key, value in options.items()})

    return cast
