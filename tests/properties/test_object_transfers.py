"""Objects between two connections, whatever is asked, answered, given up and lost, and however the bytes are cut."""

from __future__ import annotations

from collections import deque
from typing import Any, Deque, Dict, List, Set

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpumesh.model.payloads import OutOfBand
from gpumesh.protocol import connection as module
from gpumesh.protocol import messages
from gpumesh.protocol.connection import OBJECT_TRANSFER, Connection, ObjectDelivered
from tests.unit.protocol.talk import open_pair, take

CHUNK = 100
WINDOWS = [1, CHUNK - 1, CHUNK, 3 * CHUNK, 1000]


@pytest.fixture(autouse=True, scope="module")
def _small_limits() -> Any:
    """Small chunks, so that short examples have many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "OBJECT_CHUNK_BYTES", CHUNK)
        patch.setattr(module, "CHUNK_BYTES", CHUNK)
        patch.setattr(module, "BULK_MESSAGE_BYTES", 3 * CHUNK)
        yield


class Side:
    """One connection, the bytes on their way to it, and what its owner knows."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.wire: Deque[int] = deque()
        self.sent: List[Any] = []  # On the control lane, in order.
        self.sent_bulk: List[Any] = []
        self.got: List[Any] = []
        self.targets: Dict[int, bytearray] = {}  # Asked for, no answer yet.
        self.values: Dict[int, bytes] = {}
        self.forgotten: Dict[int, bytes] = {}  # Given up: what their memory held at that moment.
        self.memory: Dict[int, bytearray] = {}
        self.asked: Dict[int, messages.FetchObject] = {}  # By the other side, to be answered.
        self.sending: Set[int] = set()


class Transfers(RuleBasedStateMachine):
    """Two sides that both ask and answer."""

    def __init__(self) -> None:
        super().__init__()
        one, other = open_pair()
        self.sides = [Side(one), Side(other)]
        self.next = 0

    sides = st.integers(0, 1)

    @rule(which=sides, value=st.binary(max_size=7 * CHUNK), window=st.sampled_from(WINDOWS))
    def ask(self, which: int, value: bytes, window: int) -> None:
        side = self.sides[which]
        self.next += 1
        number = OBJECT_TRANSFER | self.next
        target = bytearray(len(value))
        side.connection.receive_into(number, target, window)
        side.connection.send(messages.FetchObject(number, self.next, window))
        side.targets[number] = side.memory[number] = target
        side.values[number] = value

    @rule(which=sides, data=st.data())
    @precondition(lambda self: any(side.asked for side in self.sides))
    def answer(self, which: int, data: st.DataObject) -> None:
        side, other = self.sides[which], self.sides[1 - which]
        if not side.asked:
            side, other = other, side
        number = data.draw(st.sampled_from(sorted(side.asked)))
        fetch = side.asked.pop(number)
        value = other.values[number]
        cuts = sorted(data.draw(st.lists(st.integers(0, len(value)), max_size=4)))
        pieces = [value[start:end] for start, end in zip([0, *cuts], [*cuts, len(value)])]
        side.connection.send_object(number, pieces, fetch.window)
        side.sending.add(number)

    @rule(which=sides, data=st.data(), gone=st.booleans())
    @precondition(lambda self: any(side.asked or side.sending for side in self.sides))
    def refuse(self, which: int, data: st.DataObject, gone: bool) -> None:
        """There is no such object; or it went while it was sent."""
        side = self.sides[which] if self.sides[which].asked or self.sides[which].sending else self.sides[1 - which]
        open_numbers = sorted(number for number in side.sending if number in side.connection._fetches)
        choices = open_numbers if gone and open_numbers else sorted(side.asked)
        if not choices:
            return
        number = data.draw(st.sampled_from(choices))
        side.asked.pop(number, None)
        side.sending.discard(number)
        side.connection.stop_sending(number)
        side.connection.send(messages.ObjectAt(number, 0, "", 0, None, "lost: gone"))

    @rule(which=sides, data=st.data())
    @precondition(lambda self: any(side.targets for side in self.sides))
    def forget(self, which: int, data: st.DataObject) -> None:
        side = self.sides[which] if self.sides[which].targets else self.sides[1 - which]
        number = data.draw(st.sampled_from(sorted(side.targets)))
        side.connection.forget_transfer(number)
        side.connection.send(messages.CancelFetch(number))
        side.forgotten[number] = bytes(side.targets.pop(number))

    @rule(which=sides, size=st.integers(0, 6 * CHUNK))
    def send_message(self, which: int, size: int) -> None:
        side = self.sides[which]
        self.next += 1
        message = messages.RunTasks(self.next, ((1, 1, OutOfBand([bytes(size)])),))
        (side.sent_bulk if size > 3 * CHUNK else side.sent).append(message)
        side.connection.send(message)

    @rule(which=sides, bulk=st.booleans(), times=st.integers(1, 4))
    def write(self, which: int, bulk: bool, times: int) -> None:
        side, other = self.sides[which], self.sides[1 - which]
        for _ in range(times):
            other.wire.extend(take(side.connection, bulk=bulk))

    @rule(which=sides, count=st.integers(1, 2 * CHUNK))
    def read(self, which: int, count: int) -> None:
        side = self.sides[which]
        data = bytes(side.wire.popleft() for _ in range(min(count, len(side.wire))))
        for event in side.connection.receive_data(data, 0.0):
            self.on_event(side, event)

    def on_event(self, side: Side, event: Any) -> None:
        kind = type(event)
        if kind is messages.FetchObject:
            side.asked[event.number] = event
        elif kind is messages.ObjectSent:
            assert side.targets.pop(event.number) == side.values[event.number]
        elif kind is messages.ObjectAt:
            del side.targets[event.number]
        elif kind is messages.CancelFetch:
            side.asked.pop(event.number, None)
            side.sending.discard(event.number)
        elif kind is ObjectDelivered:
            side.sending.remove(event.number)
            other = self.sides[1 - self.sides.index(side)]
            assert event.number not in other.targets  # Never before the receiver has said that it has it.
        else:
            assert kind is messages.RunTasks, event
            side.got.append(event)

    @invariant()
    def given_up_memory_is_left_alone(self) -> None:
        for side in self.sides:
            for number, content in side.forgotten.items():
                assert side.memory[number] == content

    @invariant()
    def credit_is_kept(self) -> None:
        for side, other in zip(self.sides, self.sides[::-1]):
            for number, sent in side.connection._outgoing.items():
                asked = other.connection._targets.get(number)
                assert 0 <= sent.credited <= sent.offset <= sent.total
                assert sent.credit >= 0
                if asked is not None:
                    assert sent.offset - sent.credited <= asked.window
            ready = [sent.number for sent in side.connection._ready]
            may_leave = {n for n, s in side.connection._outgoing.items() if s.credit > 0 and s.offset < s.total}
            assert len(set(ready)) == len(ready)
            assert may_leave <= set(ready)

    def teardown(self) -> None:
        """All that is still open gets its answer, and nothing is left anywhere."""
        for _ in range(10_000):
            for which, side in enumerate(self.sides):
                for number, fetch in list(side.asked.items()):
                    del side.asked[number]
                    side.sending.add(number)
                    side.connection.send_object(number, [self.sides[1 - which].values[number]], fetch.window)
                self.write(which, True, 4)
                self.read(1 - which, 1 << 20)
            if not any(side.connection.has_data or side.wire or side.asked for side in self.sides):
                break
        for side, other in zip(self.sides, self.sides[::-1]):
            assert side.connection.established
            assert not side.targets
            assert not side.sending
            assert not side.connection.has_object_transfers
            assert not side.connection._fetches
            assert side.connection._scratch == b""
            assert [message for message in side.got if message in other.sent] == other.sent
            assert [message for message in side.got if message in other.sent_bulk] == other.sent_bulk
            for memory in side.memory.values():
                memory.append(0)  # Nobody holds it.
                del memory[-1]
        self.given_up_memory_is_left_alone()


TestTransfers = Transfers.TestCase
TestTransfers.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
