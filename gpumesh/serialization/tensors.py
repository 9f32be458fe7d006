"""torch tensors as values: their memory rides beside the pickle, and what lies on a GPU travels as a CPU tensor.

torch itself pickles a tensor's memory inside the pickle, twice copied, and a tensor on a GPU in a way that only loads where there is
that GPU. Nothing here imports torch before somebody else has.
"""

from __future__ import annotations

import copyreg
import io
import logging
import pickle
import sys
from typing import Any, Callable, Dict, Optional, Set, Tuple

reducers: Dict[type, Callable[[Any], Any]] = {}
"""Tensor's own way to be pickled here; empty until torch is loaded. Subclasses keep theirs, and come back to this for their data."""

on_moved: Optional[Callable[[str], None]] = None  # Told the device when a tensor leaves one.
keeps_device = False  # Tensors are to be on a device of the same name again where they are unpickled, if there is one.
_PROTOCOL = 5
_log = logging.getLogger("gpumesh")
_HERE = frozenset({"cpu", "meta"})


def is_loaded() -> bool:
    """Whether values may hold tensors: then `reducers` knows them."""
    if reducers:
        return True
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    if tensor is None:
        return False  # Not loaded, or being loaded by another thread.
    reducers[tensor] = reduce_tensor
    return True


def dumps(value: Any, keep: Callable[[pickle.PickleBuffer], bool]) -> bytes:
    """As `pickle.dumps` with a buffer callback, tensors our way."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, _PROTOCOL, buffer_callback=keep)
    pickler.dispatch_table = {**copyreg.dispatch_table, **reducers}
    pickler.dump(value)
    return file.getvalue()


def leaves_device(kind: str) -> bool:
    """Whether a tensor on a device of this kind ("cuda", "mps", ...) travels as a copy on the CPU."""
    return kind not in _HERE


def reduce_tensor(tensor: Any) -> Any:
    """How a tensor is pickled."""
    kind = tensor.device.type
    device = ""
    if leaves_device(kind):
        if keeps_device:
            device = str(tensor.device)
        elif on_moved is not None:
            on_moved(kind)
        requires_grad = tensor.requires_grad
        tensor = tensor.detach().cpu()
        if requires_grad:
            tensor.requires_grad_()
    if not _is_plain(tensor):
        return tensor.__reduce_ex__(_PROTOCOL)
    import torch  # type: ignore[import-not-found, unused-ignore]

    buffer = None
    if tensor.numel():
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        buffer = pickle.PickleBuffer(raw.numpy())
    facts = (buffer, str(tensor.dtype), tuple(tensor.shape), tensor.requires_grad)
    return make_tensor, (*facts, device) if device else facts


def make_tensor(buffer: Any, dtype: str, shape: Tuple[int, ...], requires_grad: bool, device: str = "") -> Any:
    """The tensor again, on the memory of `buffer`; or on a device, if this process has it."""
    import torch

    kind = getattr(torch, dtype.rpartition(".")[2])
    if buffer is None:
        tensor = torch.empty(shape, dtype=kind)
    else:
        if memoryview(buffer).readonly:
            buffer = bytearray(buffer)
        tensor = torch.frombuffer(buffer, dtype=kind).reshape(shape)
    if device:
        tensor = _on_device(torch, tensor, device)
    return tensor.requires_grad_() if requires_grad else tensor


_missed: Set[str] = set()  # Devices that this process lacks, and has said so.


def _on_device(torch: Any, tensor: Any, device: str) -> Any:
    try:
        return tensor.to(device)
    except (RuntimeError, AssertionError) as error:  # No such device, no room on it; a torch without CUDA asserts.
        if device not in _missed:
            _missed.add(device)
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            _log.warning("tensors that were on %s are on the CPU here, because of place=False and this: %s", device, reason)
        return tensor


def _is_plain(tensor: Any) -> bool:
    """Whether it is its numbers, their type and their shape, and nothing else."""
    return (
        tensor.device.type == "cpu"
        and str(tensor.layout) == "torch.strided"
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not (hasattr(tensor, "has_names") and tensor.has_names())  # Newer versions have no named tensors.
        and not tensor.__dict__
        and not tensor._backward_hooks
    )
