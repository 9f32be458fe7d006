"""The decorator `accelerate`. What it makes of a function is in `client.accelerate`, loaded when the first one is decorated.

So `from gpumesh import accelerate` costs next to nothing, and what it needs later is imported while a mesh's processes start.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Callable, Optional, TypeVar, Union, overload

if TYPE_CHECKING:
    from typing import ParamSpec

    from typing_extensions import Unpack

    from gpumesh.client.accelerate import AcceleratedFunction
    from gpumesh.client.mesh import GPUMesh
    from gpumesh.client.options import Options, TaskOptions

    P = ParamSpec("P")
else:
    P = TypeVar("P")  # Python 3.9 has no ParamSpec, and only type checkers need one.
R = TypeVar("R")


class Accelerate:
    """The decorator. One object of this class, `accelerate`, is all there is."""

    def __init__(self) -> None:
        self._mesh: Optional[GPUMesh] = None

    @overload
    def __call__(self, target: Callable[P, R], /, **options: Unpack[TaskOptions]) -> AcceleratedFunction[P, R]: ...

    @overload
    def __call__(
        self, target: Optional[GPUMesh] = None, /, **options: Unpack[TaskOptions]
    ) -> Callable[[Callable[P, R]], AcceleratedFunction[P, R]]: ...

    def __call__(self, target: Union[None, GPUMesh, Callable[..., Any]] = None, /, **options: Any) -> Any:
        """Make a function run on a mesh when asked to.

        All of `@accelerate`, `@accelerate()`, `@accelerate(mesh)`, `@accelerate(mesh, gpu="A100", ...)` and
        `accelerate(mesh)(function)` are valid, on functions, methods, static and class methods, and `async def` functions.

        Args:
            target: The mesh; without one, the mesh given to `accelerate.install`, or else `GPUMesh()`, at the first use.
            options: gpu, cores, memory, tags: what the worker must have. timeout: seconds of run time. retries (3), retry_on,
                backoff, idempotent: when it is run again. name, priority, cost, placement_timeout (60), place. See `client.options`.

        Raises:
            TypeError: There is no such option, or this is not a function.
            ValueError: An option makes no sense.
        """
        from gpumesh.client.options import make_options

        checked = make_options(options)
        if target is None:
            return _Decorator(None, checked)
        if _is_mesh(target):
            return _Decorator(target, checked)  # type: ignore[arg-type]
        if callable(target) or isinstance(target, (staticmethod, classmethod)):
            return _Decorator(None, checked)(target)
        raise TypeError(
            f"accelerate({target!r}) takes a mesh or a function; write accelerate(GPUMesh({target!r})) for an address"
        )

    def install(self, mesh: Optional[GPUMesh]) -> None:
        """Make `mesh` the one that a bare `@accelerate` uses, also for functions decorated earlier; None takes it back."""
        if mesh is not None and not _is_mesh(mesh):
            raise TypeError(f"accelerate.install({mesh!r}) takes a GPUMesh")
        self._mesh = mesh

    @property
    def mesh(self) -> Optional[GPUMesh]:
        """The installed mesh."""
        return self._mesh

    def __repr__(self) -> str:
        return "<accelerate: a decorator for functions that run on a mesh>"


class _Decorator:
    """`accelerate(mesh, ...)`, waiting for its function."""

    def __init__(self, mesh: Optional[GPUMesh], options: Options) -> None:
        self._mesh = mesh
        self._options = options

    def __call__(self, function: Any) -> Any:
        from gpumesh.client.accelerate import AcceleratedFunction

        if isinstance(function, AcceleratedFunction):  # Decorated before: the outer decorator counts.
            function = function.__wrapped__
        return AcceleratedFunction(function, mesh=self._mesh, options=self._options)

    def __repr__(self) -> str:
        return f"<accelerate({self._mesh!r}) waits for a function>"


accelerate = Accelerate()


def _is_mesh(candidate: Any) -> bool:
    module = sys.modules.get("gpumesh.client.mesh")  # Who has a mesh has loaded it.
    return module is not None and isinstance(candidate, module.GPUMesh)
