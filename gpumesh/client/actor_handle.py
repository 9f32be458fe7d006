"""Handles: what a user holds of an actor. How its methods are called is in actor_calls.py, what a process knows of it in actor_contacts.py."""

from __future__ import annotations

from typing import Any, List, NoReturn, Optional

from gpumesh.client.actor_calls import ActorMethod, ready_of
from gpumesh.client.actor_contacts import Contact, contact_from
from gpumesh.model.actors import show_actor


class ActorHandle:
    """One actor. Its methods are called with `handle.method.remote(...)`; what the class does not have is an AttributeError here.

    May be passed to tasks and other actors, alone or inside other values; two handles of one actor are equal. The actor lives as long as
    anybody has a handle, or a call of it is pending, unless it was killed or its client is gone. A method of the class that is called like one
    of the handle's own is reached with `method`.
    """

    __slots__ = ("_contact", "__dict__", "__weakref__")

    _contact: Contact

    def __init__(self, contact: Contact) -> None:
        object.__setattr__(self, "_contact", contact)

    @property
    def actor_id(self) -> str:
        """As people read and type it: `a-1a2b3c4d-17`."""
        return show_actor(self._contact.actor)

    def ready(self, timeout: Optional[float] = None) -> None:
        """Wait until it is there, and all calls made before from here have been run.

        Args:
            timeout: Seconds.

        Raises:
            ActorDiedError: It is gone. The exception of its constructor, if that has failed, is the `__cause__`.
            TimeoutError: It is not there in time; it may come yet.
        """
        ready_of(self._contact).result(timeout)

    def kill(self, *, force: bool = False) -> bool:
        """End it, whoever else has handles; returns whether there was anything to end, once the coordinator knows.

        Calls that have not ended fail with ActorDiedError. Its `close` method, or else `__exit__`, is run, for up to 5 seconds.

        Args:
            force: End its process at once.
        """
        from gpumesh.client.orders import give_order
        from gpumesh.protocol.messages import KillActor

        ident = self._contact.actor
        answer = give_order(self._contact.reach(), lambda number: KillActor(number, ident, force))
        return bool(answer["found"])

    def method(self, name: str) -> ActorMethod:
        """The method of that name, also where the handle has something else of that name, such as `kill`.

        Raises:
            AttributeError: The class has no such method.
        """
        contact = self._contact
        return ActorMethod(contact, name, contact.shape.kind_of(name))

    def __getattr__(self, name: str) -> ActorMethod:
        # Only what is not there yet: from the second time on the method is found like any attribute.
        if name in ("_contact", "__dict__"):
            raise AttributeError(name)
        method = self.method(name)
        self.__dict__[name] = method
        return method

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(
            f"{name} cannot be set: the attributes of actor {self._contact.shown} are in its own process; write a method that sets it"
        )

    def __dir__(self) -> List[str]:
        return sorted({*object.__dir__(self), *self._contact.shape.methods})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActorHandle) and self._contact.actor == other._contact.actor

    def __hash__(self) -> int:
        return hash(self._contact.actor)

    def __copy__(self) -> ActorHandle:
        return ActorHandle(self._contact)

    def __deepcopy__(self, memo: Any) -> ActorHandle:
        return ActorHandle(self._contact)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return make_handle, self._contact.travels_as

    def __gpumesh_reduce__(self, by_value: bool) -> Any:
        return (
            make_handle,
            self._contact.travels_as,
        )  # Says that it never changes: functions that captured it need no second look.

    def __repr__(self) -> str:
        died = self._contact.died
        return f"<actor {self._contact.shown}{', which is gone' if died is not None else ''}>"


def make_handle(actor: int, description: bytes, token: Any) -> ActorHandle:
    """What a handle unpickles by."""
    return ActorHandle(contact_from(actor, description, token))
