"""Run Python functions on all the machines and GPUs you have.

```python
from gpumesh import GPUMesh, accelerate

mesh = GPUMesh("http://host:8000", token="...")

@accelerate(mesh)
def train(lr, epochs): ...

for score in train.map([{"lr": lr, "epochs": 3} for lr in (0.1, 0.01)]):
    print(score)
```

The names below are loaded on first use: importing this package loads no event loop, no threads and no numerical library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, List

if TYPE_CHECKING:
    from gpumesh import errors
    from gpumesh.client.accelerate import AcceleratedFunction
    from gpumesh.client.actor_groups import ActorGroup
    from gpumesh.client.actor_handle import ActorHandle
    from gpumesh.client.actors import ActorClass
    from gpumesh.client.context import current_mesh, get, put
    from gpumesh.client.decorator import accelerate
    from gpumesh.client.futures import MeshFuture
    from gpumesh.client.item_streams import ItemStream
    from gpumesh.client.mesh import GPUMesh
    from gpumesh.client.streams import ResultStream
    from gpumesh.client.waiting import as_completed, wait
    from gpumesh.runtime.actor_exit import exit_actor
    from gpumesh.serialization.refs import ObjectRef
    from gpumesh.version import __version__

__all__ = [
    "AcceleratedFunction",
    "ActorClass",
    "ActorGroup",
    "ActorHandle",
    "GPUMesh",
    "ItemStream",
    "MeshFuture",
    "ObjectRef",
    "ResultStream",
    "__version__",
    "accelerate",
    "as_completed",
    "current_mesh",
    "errors",
    "exit_actor",
    "get",
    "put",
    "wait",
]

_HOMES = {
    "AcceleratedFunction": "gpumesh.client.accelerate",
    "ActorClass": "gpumesh.client.actors",
    "ActorGroup": "gpumesh.client.actor_groups",
    "ActorHandle": "gpumesh.client.actor_handle",
    "GPUMesh": "gpumesh.client.mesh",
    "ItemStream": "gpumesh.client.item_streams",
    "MeshFuture": "gpumesh.client.futures",
    "ObjectRef": "gpumesh.serialization.refs",
    "ResultStream": "gpumesh.client.streams",
    "__version__": "gpumesh.version",
    "accelerate": "gpumesh.client.decorator",
    "as_completed": "gpumesh.client.waiting",
    "current_mesh": "gpumesh.client.context",
    "errors": "",
    "exit_actor": "gpumesh.runtime.actor_exit",
    "get": "gpumesh.client.context",
    "put": "gpumesh.client.context",
    "wait": "gpumesh.client.waiting",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    found = getattr(import_module(home), name) if home else import_module(f"{__name__}.{name}")
    globals()[name] = found
    return found


def __dir__() -> List[str]:
    return sorted({*globals(), *__all__})
