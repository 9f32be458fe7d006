"""Values of generators on their way through the coordinator. It keeps none: their workers do, until they are taken.

    worker ── StreamItems ──> (their objects are here?) ──> client        worker <── StreamCredit ── client

Promises:

1. Values of one stream go on in their order, and its result after them, also where an object among them is still arriving.
2. Whose client is away they are dropped: when it is back, its worker is asked for what was not taken.
3. A result that was kept for a client that was away follows the values that its worker sends again, or goes alone if that worker is
   gone: the client sees that some are missing.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Callable, Deque, Dict, Iterable, List, Optional, Tuple

from gpumesh.model.ids import SEQUENCE_BITS
from gpumesh.model.payloads import mentioned
from gpumesh.protocol.messages import StreamCredit, StreamItems
from gpumesh.runtime.object_service import ObjectService, is_payload

NOTHING_KEPT = -1  # Instead of an attempt: the worker that was asked for values has none of this stream.

Result = Tuple[int, int, int, Any, float]


class StreamService:
    """See the module's promises. Every method runs on the loop's thread.

    Args:
        send_to_client: (client, message); False if it is not connected.
        send_to_worker: (worker, message), if it is connected.
        on_result: (worker, results) that were held back.
        on_all_sent: (client, task): what its worker had kept of a stream that has ended has been sent again.

    Attributes:
        sources: Task that streams -> its newest attempt that has sent something, and the worker that did.
        held: Task -> (worker, values or result) that wait for an object to arrive, in their order.
        ending: Task that has ended -> the worker that sends its values again, before its result may go on.
    """

    def __init__(
        self,
        objects: ObjectService,
        *,
        send_to_client: Callable[[int, Any], bool],
        send_to_worker: Callable[[str, Any], None],
        on_result: Callable[[str, Result], None],
        on_all_sent: Callable[[int, int], None],
    ) -> None:
        self._objects = objects
        self._send_to_client = send_to_client
        self._send_to_worker = send_to_worker
        self._on_result = on_result
        self._on_all_sent = on_all_sent
        self.sources: Dict[int, Tuple[int, str]] = {}
        self.held: Dict[int, Deque[Tuple[str, Any]]] = {}
        self._awaited: Dict[int, List[int]] = {}  # Object that is arriving -> tasks whose first held values it is among.
        self.ending: Dict[int, str] = {}

    # --- from workers

    def on_items(self, worker: str, message: StreamItems) -> str:
        """Values from a worker; what is wrong with them, "" if nothing."""
        task_id = message.task_id
        if (
            type(task_id) is not int
            or type(message.attempt) is not int
            or type(message.first) is not int
            or message.first < 0
            or not isinstance(message.items, (list, tuple))
            or not all(map(is_payload, message.items))
        ):
            return "these are not values of a generator"
        if message.attempt == NOTHING_KEPT:
            self._all_sent(task_id)
            return ""
        if task_id not in self.ending and self.sources.get(task_id, (0, ""))[0] <= message.attempt:
            self.sources[task_id] = (message.attempt, worker)
        if task_id in self.held:
            self.held[task_id].append((worker, message))
        elif not self._must_wait(task_id, worker, message):
            self._forward(message)
        return ""

    def _must_wait(self, task_id: int, worker: str, message: StreamItems) -> bool:
        oid = self._arriving(message)
        if oid is None:
            return False
        self.held.setdefault(task_id, deque()).appendleft((worker, message))
        self._awaited.setdefault(oid, []).append(task_id)
        return True

    def _arriving(self, message: StreamItems) -> Optional[int]:
        for payload in message.items:
            if type(payload) is not bytes:
                for oid in mentioned(payload):
                    if self._objects.is_arriving(oid):
                        return oid
        return None

    def hold_back(self, worker: str, results: Iterable[Result]) -> List[Result]:
        """Those of these results before which nothing is held."""
        free: List[Result] = []
        for result in results:
            held = self.held.get(result[0])
            if held is None:
                free.append(result)
            else:
                held.append((worker, result))
        return free

    def object_settled(self, oid: int) -> None:
        """An object is here, or will never be."""
        for task_id in self._awaited.pop(oid, ()):
            self._go_on(task_id)

    def _go_on(self, task_id: int) -> None:
        held = self.held.pop(task_id, None)
        while held:
            worker, message = held.popleft()
            if type(message) is not StreamItems:
                self._on_result(worker, message)
            elif self._must_wait(task_id, worker, message):
                self.held[task_id].extend(held)
                return
            else:
                self._forward(message)

    def _forward(self, message: StreamItems) -> None:
        client = message.task_id >> SEQUENCE_BITS
        for payload in message.items:
            if type(payload) is not bytes:
                self._objects.grant_result(client, payload)
        if not self._send_to_client(client, message):
            for payload in message.items:
                if type(payload) is not bytes:
                    self._objects.ungrant_result(client, payload)
        elif not message.items:
            self._all_sent(message.task_id)

    def _all_sent(self, task_id: int) -> None:
        if self.ending.pop(task_id, None) is not None:
            self._on_all_sent(task_id >> SEQUENCE_BITS, task_id)

    def results_of(self, worker: str) -> List[int]:
        """Tasks of a worker whose results are held."""
        return [
            task_id
            for task_id, held in self.held.items()
            for source, message in held
            if source == worker and type(message) is not StreamItems
        ]

    def worker_back(self, worker: str) -> None:
        """It is connected again."""
        for task_id in [task_id for task_id, source in self.ending.items() if source == worker]:
            self._send_to_worker(worker, StreamCredit(task_id, 0))

    def worker_away(self, worker: str) -> None:
        """Its connection broke: what was held of it will come again."""
        for task_id, held in list(self.held.items()):
            left = deque(each for each in held if each[0] != worker)
            if left:
                self.held[task_id] = left
            else:
                del self.held[task_id]

    def worker_gone(self, worker: str) -> None:
        """It will not send anything again."""
        self.worker_away(worker)
        for task_id in [task_id for task_id, source in self.ending.items() if source == worker]:
            self._all_sent(task_id)
        for task_id in [task_id for task_id, (_, source) in self.sources.items() if source == worker]:
            del self.sources[task_id]

    # --- from clients

    def on_credit(self, client: int, message: StreamCredit) -> str:
        """A client has taken some; what is wrong with that, "" if nothing."""
        task_id = message.task_id
        if type(task_id) is not int or task_id >> SEQUENCE_BITS != client or type(message.limit) is not int:
            return "this is not about a stream of this client's"
        source = self.sources.get(task_id)
        worker = source[1] if source is not None else self.ending.get(task_id)
        if worker is not None:
            self._send_to_worker(worker, message)
        return ""

    def send_again(self, task_ids: Iterable[int]) -> None:
        """Their client is back: it may have missed some."""
        for task_id in task_ids:
            source = self.sources.get(task_id)
            if source is not None:
                self._send_to_worker(source[1], StreamCredit(task_id, 0))

    def send_all_before(self, task_id: int, worker: str) -> None:
        """The same of a task that has ended: `on_all_sent` follows."""
        self.ending[task_id] = worker
        self._send_to_worker(worker, StreamCredit(task_id, 0))

    def client_away(self, client: int) -> None:
        """Results that were about to be sent to it stay where they are."""
        for task_id in [task_id for task_id in self.ending if task_id >> SEQUENCE_BITS == client]:
            del self.ending[task_id]

    def client_gone(self, client: int) -> None:
        """Nobody waits for these."""
        self.client_away(client)
        for task_id in [task_id for task_id in self.sources if task_id >> SEQUENCE_BITS == client]:
            del self.sources[task_id]

    def ended(self, task_id: int) -> None:
        """A task has ended."""
        self.sources.pop(task_id, None)
