"""`mesh.actor`: classes whose objects live in processes of their own on the mesh. Creates them, and finds them by name."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple

from gpumesh.client.actor_contacts import Contact, Life, contact_of
from gpumesh.client.actor_handle import ActorHandle
from gpumesh.client.actor_options import ActorOptions, make_actor_options
from gpumesh.client.actor_shapes import shape_of
from gpumesh.client.context import current_mesh
from gpumesh.client.inputs import Call, pack_call
from gpumesh.client.orders import give_order
from gpumesh.errors import MeshError, UnknownActorError
from gpumesh.model.actors import ActorPlan, read_actor
from gpumesh.model.tasks import TaskSpec
from gpumesh.protocol.messages import CreateDetached, DefineFunction, Query
from gpumesh.runtime import nesting
from gpumesh.serialization.functions import Exported, Exporter, display_name
from gpumesh.serialization.refs import ObjectRef

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from gpumesh.client.actor_options import ActorOptionsGiven
    from gpumesh.client.channel import Channel
    from gpumesh.client.mesh import GPUMesh
    from gpumesh.client.objects import ObjectSpace
    from gpumesh.client.session import Session

KEY_BYTES = 16
_exporter = Exporter()


class ActorClass:
    """A class whose objects can live on the mesh. Made by `mesh.actor`.

    `.remote(...)` creates an actor; calling it makes a plain object here. It has the name and documentation of the class, which is
    `__wrapped__`, and its attributes; subclasses of it are plain classes.
    """

    __wrapped__: type
    _mesh: Optional[GPUMesh]
    _is_rebound: bool
    _options: ActorOptions

    def __init__(self, class_: type, mesh: Optional[GPUMesh], options: ActorOptions, *, is_rebound: bool = False) -> None:
        self.__wrapped__ = class_
        self.__name__ = class_.__name__
        self.__qualname__ = class_.__qualname__
        self.__module__ = class_.__module__
        self.__doc__ = class_.__doc__
        self._mesh = mesh  # None: the one at hand, at the first use.
        self._is_rebound = is_rebound  # By `on`: also inside a task that is its mesh, and not the task's.
        self._options = options

    def remote(self, *args: Any, **kwargs: Any) -> ActorHandle:
        """Create an actor from these arguments of the constructor; returns its handle at once. Connects on first use.

        If the constructor fails, the first call of a method does: with an ActorDiedError whose cause is that exception. With
        `lifetime="detached"` this waits until the coordinator knows of the actor.

        Raises:
            SerializationError: The class or an argument cannot travel; the message names the path to the part that cannot.
            ValueError: Its name is taken, as far as that is known at once: for detached actors.
            ObjectStoreFullError: There is no room for the arguments.
            AuthenticationError, MeshUnavailableError, MeshClosedError: The mesh does not take it.
        """
        return ActorHandle(create(self, args, kwargs))

    def options(self, **options: Unpack[ActorOptionsGiven]) -> ActorClass:
        """A copy with some options changed; see `GPUMesh.actor`."""
        changed = make_actor_options(options, base=self._options)
        return ActorClass(self.__wrapped__, self._mesh, changed, is_rebound=self._is_rebound)

    def on(self, mesh: Optional[GPUMesh]) -> ActorClass:
        """A copy whose actors live on another mesh."""
        return ActorClass(self.__wrapped__, mesh, self._options, is_rebound=mesh is not None)

    @property
    def actor_options(self) -> ActorOptions:
        """How its actors live."""
        return self._options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A plain object of the class, here."""
        return self.__wrapped__(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.__wrapped__, name)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self.__wrapped__)

    def __subclasscheck__(self, class_: Any) -> bool:
        return issubclass(class_, self.__wrapped__)

    def __mro_entries__(self, bases: Tuple[Any, ...]) -> Tuple[type, ...]:
        return (self.__wrapped__,)

    def __copy__(self) -> ActorClass:
        return self.options()

    def __deepcopy__(self, memo: Any) -> ActorClass:
        return self  # As classes do.

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__gpumesh_reduce__(by_value=_find(self.__module__, self.__qualname__) is not self)

    def __gpumesh_reduce__(self, by_value: bool) -> Any:
        """How it travels to a task: by name where that means something elsewhere, else with the class. Never with the mesh."""
        if not by_value:
            return self.__qualname__
        return _make_class, (self.__wrapped__, self._options)

    def __repr__(self) -> str:
        said = str(self._options)
        return f"<actor class {self.__qualname__}{' with ' + said if said else ''}>"


def _find(module: str, qualname: str) -> Any:
    if module in ("__main__", "__mp_main__"):
        return None
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def _make_class(class_: Any, options: ActorOptions) -> ActorClass:
    return ActorClass(class_, None, options)


def actor_class(target: Any, *, mesh: Optional[GPUMesh], options: Dict[str, Any]) -> ActorClass:
    """`target` on `mesh`; one that is an actor class already keeps its options where `options` says nothing.

    Raises:
        TypeError: It is no class.
    """
    if isinstance(target, ActorClass):
        return ActorClass(target.__wrapped__, mesh, make_actor_options(options, base=target._options))
    if not isinstance(target, type):
        what = f"{display_name(target)} is a function; decorate it with accelerate" if callable(target) else f"not {target!r}"
        raise TypeError(f"mesh.actor takes a class: {what}")
    return ActorClass(target, mesh, make_actor_options(options))


# --- creating


class _Creation:
    """An actor to be created over one connection: what is said of it there, as far as it does not depend on the arguments."""

    def __init__(self, made: ActorClass, mesh: GPUMesh, group: str, placement: str) -> None:
        self.made = made
        self.mesh = mesh
        self.options = made._options
        self.description = shape_of(made.__wrapped__, self.options).pack()
        self.plan = ActorPlan(
            name=self.options.name or "",
            is_detached=self.options.lifetime == "detached",
            max_concurrency=self.options.max_concurrency,
            restart_seconds=self.options.restart_seconds or 0.0,
            group=group,
            placement=placement,
            description=self.description,
        )
        self.exported: Exported = _exporter.export(made.__wrapped__)

    def spec(self, session: Session, payload: Any, plan: ActorPlan) -> Tuple[TaskSpec, Any]:
        """The spec of its creation, and the modules that travel with it."""
        packages = self.options.task.packages
        travel = session.travel(self.exported, packages)
        if travel.others:
            names = travel.mentioned_in([payload])
            if names and session.ship_modules(names):
                travel = session.travel(self.exported, packages)
        spec = self.options.task.spec(
            function=self.exported.digest, name=display_name(self.made.__wrapped__), python=self.exported.python
        )
        spec = spec._replace(retries=self.options.max_restarts, plan=plan)
        if travel.cargo is not None:
            spec = spec._replace(code=travel.cargo.digest)
        return spec, travel.cargo

    def make(self, session: Session, space: ObjectSpace, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Contact:
        """Create it."""
        class_ = self.made.__wrapped__
        payload = pack_call(args, kwargs, what=class_.__qualname__, function=class_, captured=self.exported.refs)
        channel = space.channel
        token: Optional[ObjectRef] = None
        plan = self.plan
        if not plan.is_detached:
            token = space.put(None)
            plan = plan._replace(token=token.oid)
        if plan.is_detached or session.is_nested:  # What is created in a task outlives that, as long as somebody has a handle.
            actor = self._order(session, channel, payload, plan._replace(is_detached=True))
            return contact_of(actor, self.description, token, channel, self.mesh)
        spec, cargo = self.spec(session, payload, plan)
        life = Life()
        actor = channel.create(session.define(self.exported, spec, cargo), payload, life)
        contact = contact_of(actor, self.description, token, channel, self.mesh)
        life.belongs_to(contact)
        return contact

    def _order(self, session: Session, channel: Channel, payload: Any, plan: ActorPlan) -> int:
        """Have the coordinator create it for itself; its id."""
        spec, cargo = self.spec(session, payload, plan)
        if session.is_nested:
            spec = spec._replace(depth=session.depth)
        wire = payload
        if isinstance(payload, Call):
            session.adopt(payload)
            for future in payload.missing():  # They are this client's, which may be gone when the actor begins.
                future.exception()
            payload.settle(channel.objects, keep=False)
            wire = payload.wire(channel.client)
        key = os.urandom(KEY_BYTES)
        answer = give_order(
            channel,
            lambda number: CreateDetached(number, key, tuple(spec), wire),
            cargo=cargo,
            before=[DefineFunction(self.exported.digest, self.exported.body)],
        )
        return int(answer["actor"])


def create(made: ActorClass, args: Tuple[Any, ...], kwargs: Dict[str, Any], *, group: str = "", placement: str = "") -> Contact:
    """Create an actor. Raises as `ActorClass.remote`."""
    mesh = made._mesh
    if mesh is None or (nesting.mesh is not None and not made._is_rebound):
        mesh = current_mesh()
    creation = _Creation(made, mesh, group, placement)
    session = mesh._open_session()
    space = session.objects()
    try:
        return creation.make(session, space, args, kwargs)
    except MeshError:
        if space.channel.end is None or session.is_closed:
            raise
    return creation.make(session, session.objects(), args, kwargs)


# --- finding


def find_actor(mesh: GPUMesh, name: str) -> ActorHandle:
    """See `GPUMesh.get_actor`."""
    if not isinstance(name, str) or not name:
        raise TypeError(f"get_actor({name!r}) takes the name of an actor, or its id such as 'a-1a2b3c4d-17'")
    ident = read_actor(name)
    arguments = {"id": ident} if ident else {"name": name}
    unknown: Optional[UnknownActorError] = None
    for channel in mesh._open_session().all_channels():
        try:
            found = give_order(channel, lambda number: Query(number, "actor", arguments))
        except UnknownActorError as error:
            unknown = unknown or error
            continue
        token = ObjectRef(found["token"], 0, channel.objects) if found["token"] else None
        contact = contact_of(found["actor"], found["description"], token, channel, mesh)
        channel.tell(())  # That this process refers to it now.
        return ActorHandle(contact)
    assert unknown is not None
    raise unknown


def list_actors(mesh: GPUMesh) -> List[Dict[str, Any]]:
    """See `GPUMesh.actors`."""
    return [
        dict(each, cards=list(each["cards"]))
        for channel in mesh._open_session().all_channels()
        for each in give_order(channel, lambda number: Query(number, "actors", {}))
    ]
