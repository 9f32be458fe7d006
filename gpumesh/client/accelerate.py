"""`accelerate`: functions that run here when called, and on the mesh with `.remote` and `.map`. Nothing of the wire is known here."""

from __future__ import annotations

import functools
import logging
import sys
import types
from sys import modules as _modules
from typing import TYPE_CHECKING, Any, Callable, Dict, Generic, Iterable, List, Optional, Tuple, TypeVar, cast

from gpumesh.client.context import current_mesh
from gpumesh.client.futures import MeshFuture
from gpumesh.client.options import DEFAULTS, Options, bound_to, make_options
from gpumesh.config import INLINE_VALUE_BYTES
from gpumesh.model.resources import show_requirement
from gpumesh.runtime import nesting
from gpumesh.serialization import refs
from gpumesh.serialization.functions import Exporter, check_callable, display_name, is_generator_function, unwrap
from gpumesh.serialization.values import dumps_call

if TYPE_CHECKING:
    from typing import ParamSpec

    from typing_extensions import Unpack

    from gpumesh.client.mesh import GPUMesh
    from gpumesh.client.options import TaskOptions
    from gpumesh.client.session import Session, SpecHandle
    from gpumesh.client.streams import ResultStream

    P = ParamSpec("P")
else:
    P = TypeVar("P")  # Python 3.9 has no ParamSpec, and only type checkers need one.
R = TypeVar("R")

logger = logging.getLogger("gpumesh")

_exporter = Exporter()


class _Recipe:
    """What an accelerated function shares with the copies bound to objects: the function, its options, and where it goes."""

    __slots__ = ("function", "options", "mesh", "is_rebound", "kind", "name", "is_stream", "_known", "_device", "_listed")

    def __init__(
        self, function: Callable[..., Any], options: Options, mesh: Optional[GPUMesh], kind: str, *, is_rebound: bool = False
    ) -> None:
        self.function = function
        self.options = options
        self.mesh = mesh  # None: the installed one, or the default, at the first use.
        self.is_rebound = is_rebound  # By `on`: also inside a task that is its mesh, and not the task's.
        self.kind = kind  # "function" (binds to an object as methods do), "class" or "static".
        self.name = options.name or display_name(function)
        self.is_stream = is_generator_function(function)
        self._known: Any = (None, None, None, None)  # Exported, session, handle and travel that belong together.
        self._listed: Optional[_Recipe] = None
        self._device = ""  # The device of this machine that it is bound to, as torch calls it; "": not known yet.

    def handle(self, session: Session) -> SpecHandle:
        """The function with its options, as the session knows it; defined anew when what it captured has changed."""
        exported = _exporter.export(self.function, self.options.retry_on)
        known = self._known
        if known[0] is exported and known[1] is session and known[3].holds():
            handle: SpecHandle = known[2]
            if not session.is_nested or handle.spec.depth == session.depth:
                return handle
        travel = session.travel(exported, self.options.packages)
        spec = self.options.spec(function=exported.digest, name=exported.name, python=exported.python)
        if self.is_stream:
            spec = spec._replace(is_stream=True, idempotent=False)  # Of two runs at a time only one could be listened to.
        if travel.cargo is not None:
            spec = spec._replace(code=travel.cargo.digest)
        handle = session.define(exported, spec, travel.cargo)
        handle.others = functools.partial(self._with_modules_of, session, travel) if travel.others else None
        self._known = (exported, session, handle, travel)
        return handle

    def _with_modules_of(self, session: Session, travel: Any, handle: SpecHandle, payloads: List[Any]) -> SpecHandle:
        """A handle that takes along what arguments are made of, too."""
        names = travel.mentioned_in(payloads)
        return self.handle(session) if names and session.ship_modules(names) else handle

    def listed(self) -> _Recipe:
        """The same of a generator function as one that returns the list of its values; of any other, the same."""
        if self.is_stream and self._listed is None:
            from gpumesh.serialization.listing import Listed

            self._listed = _Recipe(Listed(self.function), self.options, self.mesh, self.kind, is_rebound=self.is_rebound)
        return self._listed or self

    def call_here(self, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        """Call it on the device of this machine that it is bound to, or on the best."""
        from gpumesh.client import local_device

        bound = self.options.device
        if bound is not None and not self._device:
            self._device = local_device.device_named(bound, function=self.name)
        device = self._device or local_device.best_device()
        if bound is not None or device != "cpu":
            logger.info("%s runs here on %s", self.name, device)
        return local_device.call_here(
            self.function, args, kwargs, device=device, place=self.options.place, is_bound=bound is not None
        )


class AcceleratedFunction(Generic[P, R]):
    """A function of the user's that can also run on the mesh. Made by `accelerate`.

    Calling it runs it here and now. It has the name, documentation and signature of the function, which is `__wrapped__`.
    """

    _recipe: _Recipe
    _bound: Tuple[Any, ...]
    __wrapped__: Callable[..., Any]

    def __init__(self, function: Callable[..., Any], *, mesh: Optional[GPUMesh] = None, options: Options = DEFAULTS) -> None:
        _refuse_what_cannot_run(function)
        kind = {staticmethod: "static", classmethod: "class"}.get(type(function), "function")
        self._set_up(unwrap(function), mesh, options, kind)

    def _set_up(self, function: Callable[..., Any], mesh: Optional[GPUMesh], options: Options, kind: str) -> None:
        name = display_name(function)
        self.__name__ = name.rpartition(".")[2]
        self.__qualname__ = name
        functools.update_wrapper(self, function)
        self._recipe = _Recipe(function, options, mesh, kind)
        self._bound = ()

    # --- running

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run it here and now, on the best device of this machine or the one it is bound to; an `async def` function returns its
        coroutine, a generator function its generator, which runs on the CPU.

        torch modules and tensors among the arguments are on that device for the call, and those of the result come back on the
        CPU, unless `place=False`. A module that was moved is moved back afterwards.

        Raises:
            NoSuitableWorkerError: It is bound to a device that this machine does not have.
        """
        recipe = self._recipe
        if ("torch" in _modules or recipe.options.device is not None) and not recipe.is_stream:
            return cast(R, recipe.call_here((*self._bound, *args), kwargs))
        return cast(R, recipe.function(*self._bound, *args, **kwargs))

    def remote(self, *args: Any, **kwargs: Any) -> MeshFuture:
        """Run it on the mesh; returns at once. Connects on first use, for which it blocks up to the mesh's `connect_timeout`.

        Of a generator function it returns an `ItemStream`: its values one by one, as the generator makes them.

        A future among the arguments stands for its result, an ObjectRef for its value: they go to the worker without coming here.
        Arguments over 64 KiB go through the mesh's object store; what many calls need is better `put` there once.

        Raises:
            SerializationError: The function or an argument cannot travel; the message names the path to the part that cannot.
            ObjectStoreFullError: There is no room for the arguments.
            AuthenticationError, MeshUnavailableError, MeshClosedError: The mesh does not take it.
        """
        recipe = self._recipe
        mesh = recipe.mesh
        if mesh is None or (nesting.mesh is not None and not recipe.is_rebound):
            mesh = current_mesh()
        session = mesh._session
        if session is None:
            session = mesh._start()
        handle = recipe.handle(session)
        if self._bound:
            args = self._bound + args
        future = MeshFuture(handle) if not recipe.is_stream else _open_stream(handle)
        payload: Any
        if refs.are_used or MeshFuture in map(type, args) or (kwargs and MeshFuture in map(type, kwargs.values())):
            from gpumesh.client.inputs import pack_call

            captured = handle.exported.refs
            payload = pack_call(args, kwargs, what=recipe.name, function=recipe.function, captured=captured)
        else:
            payload = dumps_call(args, kwargs, what=recipe.name, function=recipe.function, snapshot=False)
            if type(payload) is not bytes or len(payload) >= INLINE_VALUE_BYTES:
                from gpumesh.client.inputs import Call

                payload = Call(payload)
        future.task_id = session.submit(handle, payload, future if not recipe.is_stream else future.sink)  # type: ignore[attr-defined]
        if mesh._verbosity:
            need = handle.spec.requirement
            future.add_done_callback(functools.partial(_log_end, show_requirement(need) if need.needs_gpu else "CPU"))
        return future

    def map(
        self,
        items: Iterable[Any],
        *more: Iterable[Any],
        progress: bool = False,
        return_exceptions: bool = False,
        window: Optional[int] = None,
    ) -> ResultStream:
        """Run it once for each item, on the whole mesh; returns at once.

        A slow machine gets no item that it would end too late, as far as their length is known. What cannot be known can be told:
        `options(cost=...)` for items that take far longer than others, `idempotent=True` if an item that was started on a slow
        machine may be started a second time on another. Without either, a long item that is started last, on the slowest machine,
        is waited for.

        Of a generator function, each item's result is the list of its values.

        Args:
            items: A dict is keyword arguments, a tuple positional arguments, anything else the one argument. May be endless.
            more: As for the built-in `map`: one positional argument from each.
            progress: Show a live bar.
            return_exceptions: Give a failed item's exception as its value instead of raising it.
            window: Items that the input may be read ahead of the results; by default 8192, fewer if they are large.

        Raises:
            SerializationError: The function cannot travel. An item that cannot fails where the iteration meets it.
            AuthenticationError, MeshUnavailableError, MeshClosedError: The mesh does not take it.
        """
        from gpumesh.client.streams import open_stream

        recipe = self._recipe.listed()
        mesh = recipe.mesh
        if mesh is None or (nesting.mesh is not None and not recipe.is_rebound):
            mesh = current_mesh()
        session = mesh._session if mesh._session is not None else mesh._start()
        if more:
            columns = (items, *more)
            rows = zip(*columns)
            items = list(rows) if all(hasattr(column, "__len__") for column in columns) else rows
        return open_stream(
            items,
            session=session,
            handle=recipe.handle(session),
            function=recipe.function,
            bound=self._bound,
            mesh=mesh,
            window=window,
            return_exceptions=return_exceptions,
            progress=progress,
            is_verbose=mesh._verbosity > 0,
        )

    # --- variants

    @property
    def task_options(self) -> Options:
        """How it runs."""
        return self._recipe.options

    def options(self, **options: Unpack[TaskOptions]) -> AcceleratedFunction[P, R]:
        """A copy with some options changed; see `accelerate`."""
        copy: AcceleratedFunction[P, R] = self._copy(make_options(options, base=self._recipe.options))
        return copy

    def to(self, device: str) -> AcceleratedFunction[P, R]:
        """A copy bound to a device: `"cuda"`, `"cuda:1"`, `"mps"`, `"cpu"`, or a model such as `"RTX 3080"`.

        Called directly it runs on that device of this machine, `.remote` and `.map` use only workers that have it.
        """
        copy: AcceleratedFunction[P, R] = self._copy(bound_to(device, base=self._recipe.options))
        return copy

    def on(self, mesh: Optional[GPUMesh]) -> AcceleratedFunction[P, R]:
        """A copy that runs on another mesh."""
        copy: AcceleratedFunction[P, R] = self._copy(self._recipe.options, mesh=mesh)
        return copy

    def _copy(self, options: Options, *, mesh: Optional[GPUMesh] = None) -> Any:
        recipe = self._recipe
        copy: Any = AcceleratedFunction.__new__(AcceleratedFunction)
        copy.__dict__.update(self.__dict__)
        copy._recipe = _Recipe(
            recipe.function,
            options,
            mesh if mesh is not None else recipe.mesh,
            recipe.kind,
            is_rebound=mesh is not None or recipe.is_rebound,
        )
        return copy

    # --- methods of classes

    def __get__(self, instance: Any, owner: Optional[type] = None) -> AcceleratedFunction[..., R]:
        kind = self._recipe.kind
        if kind == "class":
            instance = owner if owner is not None else type(instance)
        elif instance is None or kind == "static":
            return self
        bound: Any = AcceleratedFunction.__new__(AcceleratedFunction)
        bound.__dict__.update(self.__dict__)
        bound._bound = (instance,)
        return bound  # type: ignore[no-any-return]

    def __set_name__(self, owner: type, name: str) -> None:
        """Part of the protocol for what stands in a class body; nothing depends on the name."""

    def __getattr__(self, name: str) -> Any:
        # Only what is not there otherwise: the signature without the part that is bound, and `__self__`.
        bound = self.__dict__.get("_bound")
        if bound and name == "__signature__":
            import inspect

            return inspect.signature(types.MethodType(self.__wrapped__, bound[0]))
        if bound and name == "__self__":
            return bound[0]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # --- travelling

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._is_importable():
            return self.__qualname__
        from gpumesh.serialization import pickling, values

        data, large, _ = pickling.dump(self)  # Comes back to __gpumesh_reduce__, once for the whole of what it captured.
        return values.loads, (values.to_payload(data, large, True),)

    def __gpumesh_reduce__(self, by_value: bool) -> Any:
        """How it travels to a task: by name where that means something elsewhere, else with the function. Never with the mesh."""
        if not by_value and not self._bound:
            return self.__qualname__
        recipe = self._recipe
        attributes = {name: value for name, value in self.__dict__.items() if name not in ("_recipe", "_bound")}
        return _make_empty, (), (recipe.function, recipe.options, recipe.kind, self._bound, attributes)

    def __setstate__(self, state: Tuple[Any, ...]) -> None:
        function, options, kind, bound, attributes = state
        self.__dict__.update(attributes)
        self._recipe = _Recipe(function, Options(*options), None, kind)
        self._bound = bound

    def _is_importable(self) -> bool:
        if self._bound or self.__module__ in ("__main__", "__mp_main__"):
            return False
        found: Any = sys.modules.get(self.__module__)
        for part in self.__qualname__.split("."):
            found = getattr(found, part, None)
        return found is self

    def __copy__(self) -> Any:
        return self._copy(self._recipe.options)

    def __deepcopy__(self, memo: Dict[int, Any]) -> Any:
        return self  # As functions do.

    def __repr__(self) -> str:
        said = str(self._recipe.options)
        owner = f" of {type(self._bound[0]).__qualname__} object" if self._bound else ""
        return f"<accelerated {self.__qualname__}{owner}{' with ' + said if said else ''}>"


def accelerated(function: Any, *, mesh: GPUMesh, options: Dict[str, Any]) -> AcceleratedFunction[..., Any]:
    """`function` on `mesh`; one that is accelerated already keeps its options where `options` says nothing."""
    if isinstance(function, AcceleratedFunction):
        return function._copy(make_options(options, base=function._recipe.options), mesh=mesh)  # type: ignore[no-any-return]
    return AcceleratedFunction(function, mesh=mesh, options=make_options(options))


def _make_empty() -> AcceleratedFunction[..., Any]:
    """The first half of rebuilding one that travelled by value; `__setstate__` is the other, so that it may refer to itself."""
    made: Any = AcceleratedFunction.__new__(AcceleratedFunction)
    made._bound = ()
    return made  # type: ignore[no-any-return]


def _refuse_what_cannot_run(function: Any) -> None:
    target = unwrap(function)
    if isinstance(target, type):
        raise TypeError(f"accelerate takes functions, and {target.__qualname__} is a class; decorate its methods instead")
    check_callable(target)


def _open_stream(handle: SpecHandle) -> MeshFuture:
    from gpumesh.client.item_streams import ItemStream

    return ItemStream(handle)


def _log_end(device: str, future: Any) -> None:
    logger.info("%r (%s)", future, device)
