"""Groups of actors: one handle whose calls go to all members, and whose results are lists. What a member is, is actor_handle's matter."""

from __future__ import annotations

import functools
import os
import threading
import time
from concurrent.futures import CancelledError, Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any, Dict, Generator, Iterator, List, NoReturn, Optional, Sequence, Tuple

from gpumesh.client.actor_calls import ActorMethod, ready_of
from gpumesh.client.actor_handle import ActorHandle
from gpumesh.client.futures import MeshFuture
from gpumesh.errors import ActorDiedError, TaskCancelledError
from gpumesh.model.actors import PLACEMENTS

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from gpumesh.client.actor_options import CallOptionsGiven
    from gpumesh.client.mesh import GPUMesh


class ActorGroup:
    """Several actors of one class. Made by `mesh.actors_group`; a sequence of their handles.

    `group.method.remote(...)` calls the method of each, `group[i]` is the handle of one. It may be passed to tasks and actors, as handles may.
    """

    __slots__ = ("_members", "__dict__")

    def __init__(self, members: Sequence[ActorHandle]) -> None:
        self._members = tuple(members)

    def ready(self, timeout: Optional[float] = None) -> None:
        """Wait until all are there.

        Args:
            timeout: Seconds.

        Raises:
            ActorDiedError: One is gone; says which.
            TimeoutError: Not all are there in time.
        """
        GroupFuture([ready_of(member._contact) for member in self._members], self._members).result(timeout)

    def kill(self, *, force: bool = False) -> int:
        """End all members; see `ActorHandle.kill`. Returns how many there were to end."""
        return sum(member.kill(force=force) for member in self._members)

    def __getattr__(self, name: str) -> GroupMethod:
        if name.startswith("__") and name != "__call__":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        method = self.__dict__[name] = GroupMethod(self._members, [member.method(name) for member in self._members])
        return method

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, place: Any) -> Any:
        """The handle of one member; of a slice the list of handles."""
        return list(self._members[place]) if isinstance(place, slice) else self._members[place]

    def __iter__(self) -> Iterator[ActorHandle]:
        return iter(self._members)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActorGroup) and self._members == other._members

    def __hash__(self) -> int:
        return hash(self._members)

    def __reduce__(self) -> Any:
        return ActorGroup, (self._members,)

    def __repr__(self) -> str:
        return f"<group of {len(self._members)} actors {self._members[0]._contact.shape.class_name}>"


class GroupMethod:
    """One method of all members of a group."""

    __slots__ = ("_members", "_methods")

    def __init__(self, members: Tuple[ActorHandle, ...], methods: List[ActorMethod]) -> None:
        self._members = members
        self._methods = methods

    def remote(self, *args: Any, **kwargs: Any) -> GroupFuture:
        """Call it at every member with the same arguments. Returns at once; raises as a member's method."""
        return self._gather([(args, kwargs)] * len(self._methods))

    def scatter(self, items: Sequence[Any]) -> GroupFuture:
        """Call it at every member with arguments of its own.

        Args:
            items: One for each member: a dict is keyword arguments, a tuple positional arguments, anything else the one argument.

        Raises:
            ValueError: There are more or fewer. Else as a member's method.
        """
        return self._gather(_arguments(items, len(self._methods), "items"))

    def options(self, **options: Unpack[CallOptionsGiven]) -> GroupMethod:
        """The same method, called otherwise; see `ActorMethod.options`."""
        return GroupMethod(self._members, [method.options(**options) for method in self._methods])

    def _gather(self, calls: Sequence[Tuple[Tuple[Any, ...], Dict[str, Any]]]) -> GroupFuture:
        if self._methods[0]._kind:
            raise TypeError(
                f"{self._methods[0]._title} is a generator; stream it from each member: group[0].method.stream(...)"
            )
        futures: List[MeshFuture] = []
        try:
            for method, (args, kwargs) in zip(self._methods, calls):
                futures.append(method.remote(*args, **kwargs))
        except BaseException:
            for future in futures:
                future.cancel()
            raise
        return GroupFuture(futures, self._members)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(f"{self._methods[0]._title} runs in the actors' processes; call it with .remote(...)")

    def __repr__(self) -> str:
        return f"<method {self._methods[0]._name} of {len(self._methods)} actors>"


class GroupFuture(Future):  # type: ignore[type-arg]
    """The results of a call of a group: a list, in the order of the members. Fails as soon as one of them has failed.

    Attributes:
        futures: Those of the members.
    """

    def __init__(self, futures: Sequence[MeshFuture], members: Sequence[ActorHandle]) -> None:
        super().__init__()
        self.futures = tuple(futures)
        self._members = tuple(members)
        self._left = len(self.futures)
        self._failed: Optional[int] = None  # The place of the first that has.
        self._guard = threading.Lock()
        for place, future in enumerate(self.futures):
            future.add_done_callback(functools.partial(self._member_ended, place))

    def _member_ended(self, place: int, future: MeshFuture) -> None:
        with self._guard:
            self._left -= 1
            if future.has_failed and self._failed is None:
                self._failed = place
            elif self._left:
                return
        try:
            super().set_result(None)
        except InvalidStateError:
            pass  # It was cancelled, or another has failed before.

    def result(self, timeout: Optional[float] = None) -> List[Any]:
        """The members' results; blocks until all are there, or one has failed.

        Args:
            timeout: Seconds.

        Raises:
            TimeoutError: Not all are there in time; the calls go on.
            ActorDiedError: A member is gone; says which, and `member` is its place.
            TaskCancelledError: It was cancelled.
            BaseException: What the method has raised at a member, as for one actor.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        self._wait(timeout)
        if self._failed is not None:
            raise self._error(self._failed)
        return [future.result(None if deadline is None else max(0.0, deadline - time.monotonic())) for future in self.futures]

    def exception(self, timeout: Optional[float] = None) -> Optional[BaseException]:
        """What `result` would raise; None if it would return. Raises TimeoutError, and TaskCancelledError if it was cancelled."""
        self._wait(timeout)
        if self._failed is not None:
            return self._error(self._failed)
        return next((error for error in (future.exception() for future in self.futures) if error is not None), None)

    def cancel(self) -> bool:
        """Cancel the call at every member; False if it has ended."""
        if not super().cancel():
            return False
        for future in self.futures:
            future.cancel()
        return True

    def _wait(self, timeout: Optional[float]) -> None:
        if not self.done() and not self.futures[0].session.drive_until(self.done, self._condition, timeout):
            left = sum(not future.done() for future in self.futures)
            raise FutureTimeoutError(f"{left} of {len(self.futures)} members are not done after {timeout:g} s; the calls go on")
        if self.cancelled():
            raise TaskCancelledError(f"the call {self.futures[0].name} of a group was cancelled")

    def _error(self, place: int) -> BaseException:
        try:
            error = self.futures[place].exception()
        except CancelledError as cancelled:
            return cancelled
        assert error is not None, place
        if type(error) is not ActorDiedError:
            return error
        where = f" on {error.worker}" if error.worker else ""
        named = ActorDiedError(f"member {place} of {len(self.futures)} of the group ({error.actor_id}{where}): {error}")
        named.__dict__.update(error.__dict__)
        named.member = place
        named.__cause__ = error.__cause__
        return named

    def __await__(self) -> Generator[Any, None, Any]:
        """Await it in any asyncio loop. Cancelling the awaiting asyncio task cancels this future."""
        import asyncio

        if not self.done():
            from gpumesh.client.futures import _arrive

            loop = asyncio.get_running_loop()
            arrival = loop.create_future()
            self.add_done_callback(lambda _: _arrive(loop, arrival))
            session = self.futures[0].session
            try:
                if session.slot is None:
                    yield from arrival
                else:
                    from gpumesh.client.slots import arrive

                    yield from arrive(session, arrival).__await__()
            except asyncio.CancelledError:
                self.cancel()
                raise
        if any(future.payload is not None and type(future.payload) is not bytes for future in self.futures):
            return (yield from asyncio.get_running_loop().run_in_executor(None, self.result))
        return self.result()


def create_group(
    mesh: GPUMesh,
    class_: Any,
    n: int,
    args: Tuple[Any, ...],
    members: Optional[Sequence[Any]],
    placement: Optional[str],
    options: Dict[str, Any],
) -> ActorGroup:
    """See `GPUMesh.actors_group`."""
    from gpumesh.client.actors import actor_class, create

    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"n={n!r} must be a whole number of actors")
    if n < 1:
        raise ValueError(f"n={n!r} must be at least 1")
    if (placement or "") not in PLACEMENTS:
        raise ValueError(f"placement={placement!r} must be 'spread', 'pack' or None")
    if members is not None and args:
        raise TypeError("give arguments that are the same for all members, or members=[...] with those of each, not both")
    calls = [(args, {})] * n if members is None else _arguments(members, n, "members")
    made = actor_class(class_, mesh=mesh, options=options)
    name = made.actor_options.name
    group = f"{made.__name__[:40]}-{os.urandom(6).hex()}"
    handles: List[ActorHandle] = []
    for place, (own, named) in enumerate(calls):
        one = made.options(name=f"{name}-{place}") if name else made
        handles.append(ActorHandle(create(one, own, named, group=group, placement=placement or "")))
    return ActorGroup(handles)


def _arguments(items: Sequence[Any], n: int, what: str) -> List[Tuple[Tuple[Any, ...], Dict[str, Any]]]:
    """Items as positional and keyword arguments."""
    rows = list(items)
    if len(rows) != n:
        raise ValueError(f"there are {len(rows)} {what} for {n} members; give one for each")
    return [((), row) if isinstance(row, dict) else (row, {}) if isinstance(row, tuple) else ((row,), {}) for row in rows]
