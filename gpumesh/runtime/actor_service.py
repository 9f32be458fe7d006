"""Actors at the coordinator, beside what the scheduler decides: who refers to them, those that outlive their clients, questions and orders."""

from __future__ import annotations

import logging
import secrets
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Iterable, Optional, Protocol

from gpumesh.config import RECOVERY_SECONDS
from gpumesh.model.actors import ACTORS_CLIENT, show_actor
from gpumesh.model.ids import SEQUENCE_BITS, ClientNumber
from gpumesh.model.tasks import TaskSpec
from gpumesh.protocol.messages import CreateDetached, KillActor, Query
from gpumesh.scheduler import events as ev

if TYPE_CHECKING:
    from gpumesh.scheduler.actor_states import Actor
    from gpumesh.scheduler.cluster import Cluster

logger = logging.getLogger("gpumesh.coordinator")

KEYS_KNOWN = 1000  # Orders to create an actor that may be given again after a reconnect.
MAX_DETACHED = 10_000  # Alive at the same time: nobody's end ends them.
RESTORED = (
    "actors that came back"  # Who refers to the tokens of actors that a worker brought back, until their holders have said so.
)


class Owner(Protocol):
    """What this needs of the coordinator."""

    def answer(self, client: int, number: int, value: Any, error: str = "", kind: str = "") -> None:
        """To a question or order of a client, if it is still there."""

    def submit_detached(self, number: int, spec: TaskSpec, task_id: int, payload: Any) -> None:
        """Define a spec of the coordinator's own client, and submit one task of it."""

    def tell_cluster(self, event: Any) -> None:
        """Something has happened."""

    def restore_token(self, oid: int, holder: str) -> None:
        """There is such an object, if there is none yet, and somebody refers to it."""

    def forget_holder(self, holder: str) -> None:
        """It refers to nothing any more."""

    def name_of(self, client: int) -> str:
        """For people."""

    def call_later(self, seconds: float, what: Any) -> None:
        """Once."""


class ActorService:
    """See the module. Every method runs on the loop's thread."""

    def __init__(self, owner: Owner, cluster: Cluster) -> None:
        self._owner = owner
        self._cluster = cluster
        self._next = secrets.randbelow(1 << 30) + 1  # Those of before a restart may be at workers.
        self._specs = 0
        self._keys: OrderedDict[bytes, int] = OrderedDict()
        self._has_client = False
        self._is_settling = False

    # --- questions and orders

    def answer(self, client: int, query: Query) -> None:
        """To the questions "actors" and "actor"."""
        if query.what == "actors":
            self._owner.answer(client, query.number, self._cluster.actor_views())
            return
        name, ident = query.arguments.get("name", ""), query.arguments.get("id", 0)
        actor = self._find(name, ident)
        if actor is None or actor.spec is None:
            wanted = f"with the name {name!r}" if name else show_actor(ident) if type(ident) is int else repr(ident)
            words = f"there is no actor {wanted:.300}; mesh.actors() and `gpumesh actors` list those that there are"
            self._owner.answer(client, query.number, None, words, "unknown")
            return
        plan = actor.plan
        value = {
            "actor": actor.id,
            "token": plan.token,
            "description": plan.description,
            "name": plan.name,
            "class_name": actor.spec.spec.name,
        }
        self._owner.answer(client, query.number, value)

    def _find(self, name: Any, ident: Any) -> Optional[Actor]:
        if isinstance(name, str) and name:
            return self._cluster.find_actor(name=name)
        return self._cluster.find_actor(ident=ident) if type(ident) is int else None

    def kill(self, client: int, order: KillActor) -> None:
        """Whoever asks: all who know the mesh's token are equals."""
        actor = self._cluster.find_actor(ident=order.actor) if type(order.actor) is int else None
        found = actor is not None and actor.spec is not None
        if found:
            why = f"killed by {self._owner.name_of(client)}"
            self._owner.tell_cluster(ev.ActorKilled(order.actor, why, bool(order.force)))
        self._owner.answer(client, order.number, {"found": found})

    def create(self, client: int, order: CreateDetached, spec: TaskSpec) -> None:
        """An actor of the coordinator's own; what its spec refers to has been defined."""
        known = self._keys.get(order.key)
        if known is not None:
            self._owner.answer(client, order.number, {"actor": known})
            return
        plan = spec.plan
        assert plan is not None, spec.name
        holder = self._cluster.find_actor(name=plan.name) if plan.name else None
        if holder is not None:
            words = f"the name {plan.name!r} belongs to actor {show_actor(holder.id)} already; find it with get_actor({plan.name!r})"
            self._owner.answer(client, order.number, None, words, "taken")
            return
        if len(self._cluster.actors_of(ClientNumber(ACTORS_CLIENT))) >= MAX_DETACHED:
            words = f"there are {MAX_DETACHED} detached actors already; end some with `gpumesh kill-actor`"
            self._owner.answer(client, order.number, None, words, "value")
            return
        self.open_client()
        ident = (ACTORS_CLIENT << SEQUENCE_BITS) | self._next
        self._next += 1
        self._specs += 1
        self._keys[order.key] = ident
        if len(self._keys) > KEYS_KNOWN:
            self._keys.popitem(last=False)
        logger.info(
            "actor %s (%s) was created by %s, and outlives it", show_actor(ident), spec.name, self._owner.name_of(client)
        )
        self._owner.submit_detached(self._specs, spec, ident, order.payload)
        self._owner.answer(client, order.number, {"actor": ident})

    def open_client(self) -> None:
        """The scheduler knows the coordinator's own client from now on; whatever workers bring back of it goes on."""
        if not self._has_client:
            self._has_client = True
            self._owner.tell_cluster(ev.ClientConnected(ClientNumber(ACTORS_CLIENT), "detached", True))

    # --- who refers to them

    def token_unneeded(self, oid: int) -> None:
        """Nobody refers to an object any more: if it was an actor's token, that ends."""
        ident = self._cluster.actor_of_token(oid)
        if ident:
            self._owner.tell_cluster(ev.ActorKilled(ident, "ended because nobody refers to it any more"))

    def coming_back(self, held: Iterable[ev.Held]) -> None:
        """A worker brings these: their tokens went with the coordinator of before, and who refers to them says so soon."""
        plans = [each.spec.plan for each in held if each.spec.plan is not None]
        if any(plan.is_detached for plan in plans):
            self.open_client()
        tokens = [plan.token for plan in plans if plan.token]
        for token in tokens:
            self._owner.restore_token(token, RESTORED)
        if tokens and not self._is_settling:
            self._is_settling = True
            self._owner.call_later(RECOVERY_SECONDS, self._settle)

    def _settle(self) -> None:
        self._is_settling = False
        self._owner.forget_holder(RESTORED)
