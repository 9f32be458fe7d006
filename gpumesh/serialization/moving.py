"""torch modules and tensors inside values, moved to a device. Imports no torch: who has a tensor has loaded it.

Looked into are lists, tuples and dicts, also named tuples and subclasses, at any place up to `MAX_DEPTH` deep; not the attributes of
objects. What holds nothing to be moved stays the same object; of a container that does, the caller's is left as it was.
"""

from __future__ import annotations

import copy
import sys
from itertools import chain
from typing import Any, Dict, Iterable, List, Tuple

MAX_DEPTH = 32  # Containers within containers; nobody nests tensors deeper, and the walk recurs.


def torch_loaded() -> Any:
    """torch, if this process has loaded all of it; None otherwise."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "Tensor") and hasattr(torch, "nn") and hasattr(torch, "device") else None


class Mover:
    """Moves what is in one call's values; a tensor that stands in several places stays one tensor.

    Args:
        torch: The module.
        device: "cuda:1", "mps", "cpu", ...
    """

    def __init__(self, torch: Any, device: str) -> None:
        self._torch = torch
        self._device = torch.device(device)
        self._tensor_type = torch.Tensor
        self._module_type = torch.nn.Module
        self._kinds: Dict[type, bool] = {}  # Whether objects of a type may hold something to be moved.
        self._done: Dict[int, Any] = {}
        self.modules: List[Tuple[Any, Any]] = []  # (module, the device it was on): moved themselves, in place.
        self.modules_seen: List[Any] = []  # Moved or not.
        self.seen = 0  # Modules and tensors.
        self.moved = 0

    def move(self, value: Any) -> Any:
        """The value with all of it on the device; itself if nothing had to be moved. Modules are moved in place."""
        return self._move(value, MAX_DEPTH) if self._matters(type(value)) else value

    def move_back(self) -> None:
        """Put the modules where they were."""
        for module, device in self.modules:
            module.to(device)
        self.modules = []

    def _matters(self, kind: type) -> bool:
        found = self._kinds.get(kind)
        if found is None:
            found = self._kinds[kind] = issubclass(kind, (self._tensor_type, self._module_type, list, tuple, dict))
        return found

    def _move(self, value: Any, depth: int) -> Any:
        key = id(value)
        if key in self._done:
            return self._done[key]
        self._done[key] = value  # What holds itself holds its old self.
        if isinstance(value, self._tensor_type):
            made = self._tensor(value)
        elif isinstance(value, self._module_type):
            made = self._module(value)
        elif not depth:
            made = value
        elif isinstance(value, dict):
            made = self._dict(value, depth - 1)
        elif isinstance(value, list):
            made = self._list(value, depth - 1)
        else:
            made = self._tuple(value, depth - 1)
        self._done[key] = made
        return made

    def _tensor(self, tensor: Any) -> Any:
        self.seen += 1
        if tensor.device == self._device or tensor.is_meta:
            return tensor
        self.moved += 1
        if not (tensor.is_leaf and tensor.requires_grad):
            return tensor.to(self._device)
        moved = tensor.detach().to(self._device)  # A leaf again: its gradient is what the function will ask for.
        if isinstance(tensor, self._torch.nn.Parameter):
            return self._torch.nn.Parameter(moved)
        return moved.requires_grad_()

    def _module(self, module: Any) -> Any:
        self.seen += 1
        self.modules_seen.append(module)
        devices = {tensor.device for tensor in chain(module.parameters(), module.buffers())}
        if len(devices) == 1:  # None: there is nothing to move. Several: its owner has spread it, and knows why.
            (device,) = devices
            if device != self._device and device.type != "meta":
                self.moved += 1
                self.modules.append((module, device))
                module.to(self._device)
        return module

    def _dict(self, value: Any, depth: int) -> Any:
        if not self._may_hold(value.values()):
            return value
        changed = {key: new for key, item in value.items() if (new := self._item(item, depth)) is not item}
        if not changed:
            return value
        made = copy.copy(value)
        for key, new in changed.items():
            made[key] = new
        return made

    def _list(self, value: Any, depth: int) -> Any:
        if not self._may_hold(value):
            return value
        items = [self._item(item, depth) for item in value]
        if all(map(_is, items, value)):
            return value
        made = copy.copy(value)
        made[:] = items
        return made

    def _tuple(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind is not tuple and hasattr(value, "to"):  # A packed sequence: parts of it belong on the CPU, and it knows which.
            return value.to(self._device)
        if not self._may_hold(value):
            return value
        items = [self._item(item, depth) for item in value]
        if all(map(_is, items, value)):
            return value
        if kind is tuple:
            return tuple(items)
        return kind._make(items) if hasattr(kind, "_make") else value

    def _item(self, item: Any, depth: int) -> Any:
        return self._move(item, depth) if self._matters(type(item)) else item

    def _may_hold(self, items: Iterable[Any]) -> bool:
        """A long list of numbers costs a look at their types."""
        return any(map(self._matters, set(map(type, items))))


def _is(one: Any, other: Any) -> bool:
    return one is other
