"""torch tensors as values: their memory rides beside the pickle, and what lies on a GPU travels as a CPU tensor.

torch itself pickles a tensor's memory inside the pickle, twice copied, and a tensor on a GPU in a way that only loads where there is
that GPU. Nothing here imports torch before somebody else has.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
from typing import Any, Callable, Dict, Optional, Tuple

reducers: Dict[type, Callable[[Any], Any]] = {}
"""Tensor's own way to be pickled here; empty until torch is loaded. Subclasses keep theirs, and come back to this for their data."""

on_moved: Optional[Callable[[str], None]] = None  # Told the device when a tensor leaves one.
_PROTOCOL = 5
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
    if leaves_device(kind):
        if on_moved is not None:
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
    return make_tensor, (buffer, str(tensor.dtype), tuple(tensor.shape), tensor.requires_grad)


def make_tensor(buffer: Any, dtype: str, shape: Tuple[int, ...], requires_grad: bool) -> Any:
    """The tensor again, on the memory of `buffer`."""
    import torch

    kind = getattr(torch, dtype.rpartition(".")[2])
    if buffer is None:
        return torch.empty(shape, dtype=kind, requires_grad=requires_grad)
    if memoryview(buffer).readonly:
        buffer = bytearray(buffer)
    tensor = torch.frombuffer(buffer, dtype=kind).reshape(shape)
    return tensor.requires_grad_() if requires_grad else tensor


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
