"""A connection whose handshake somebody else makes: handed over behind Welcome, to the byte."""

from __future__ import annotations

from typing import List

import pytest

from gpumesh.config import HEARTBEAT_SECONDS, SILENCE_SECONDS
from gpumesh.errors import AuthenticationError, MeshUnavailableError
from gpumesh.model.payloads import OutOfBand
from gpumesh.protocol.connection import Closed, Connection, Established, State
from gpumesh.protocol.messages import DefineFunction, MeshChanged, Ping, Query, TaskNotice
from tests.unit.protocol.talk import (
    DIALER_FACTS,
    DIALER_NONCE,
    LISTENER_FACTS,
    MESH,
    TOKEN,
    Cut,
    bytewise,
    drain,
    listen,
    pump,
    take,
    whole,
)


def dial_for_another(token: str = TOKEN) -> Connection:
    return Connection.dial(role="client", token=token, nonce=DIALER_NONCE, now=0.0, facts=DIALER_FACTS, hands_over=True)


def relayed(now: float = 0.0) -> Connection:
    return Connection.relayed(role="client", mesh=MESH, workers=3, now=now, facts=LISTENER_FACTS)


@pytest.mark.parametrize("cut", [whole, bytewise])
def test_what_comes_behind_welcome_belongs_to_who_goes_on(cut: Cut) -> None:
    dialer, listener = dial_for_another(), listen()
    listener.workers = 3
    listener.receive_data(take(dialer), 0.0)
    dialer.receive_data(take(listener), 0.0)
    listener.receive_data(take(dialer), 0.0)
    said = [MeshChanged(4), Ping(1), TaskNotice(5, "words")]
    for message in said:
        listener.send(message)

    events = [event for piece in cut(drain(listener)) for event in dialer.receive_data(piece, 0.0)]

    assert [type(event) for event in events] == [Established]
    assert not dialer.has_data, "it must not answer what is not meant for it"
    other = relayed()
    assert other.receive_data(dialer.take_rest(), 0.0) == [MeshChanged(4), TaskNotice(5, "words")]
    assert (dialer.mesh, dialer.workers) == (other.mesh, other.workers)


def test_both_sides_go_on_as_if_they_had_shaken_hands_themselves() -> None:
    dialer, listener = dial_for_another(), listen()
    pump(dialer, listener)
    other = relayed()
    assert other.established
    body = OutOfBand([bytes(3 << 20)])
    other.send(DefineFunction(b"d" * 16, body))
    other.send(Query(1, "workers", {}))
    listener.send(MeshChanged(2))

    at_other, at_listener = pump(other, listener)

    assert at_other == [MeshChanged(2)]
    assert {type(event) for event in at_listener} == {DefineFunction, Query}
    other.close("done")
    assert pump(other, listener)[1] == [Closed(None, "done")]


def test_it_has_heartbeats_and_hears_silence() -> None:
    connection = relayed(100.0)
    assert connection.next_deadline() == 100.0 + HEARTBEAT_SECONDS
    assert connection.on_time(100.0 + HEARTBEAT_SECONDS) == []
    assert connection.has_data
    events: List[object] = []
    while connection.state is State.OPEN:
        due = connection.next_deadline()
        assert due is not None
        events = list(connection.on_time(due))
    (closed,) = events
    assert isinstance(closed, Closed)
    assert isinstance(closed.error, MeshUnavailableError)
    assert str(int(SILENCE_SECONDS)) in closed.reason


def test_a_handshake_that_fails_is_told_as_any_other() -> None:
    dialer, listener = dial_for_another("wrong"), listen()
    at_dialer, _ = pump(dialer, listener)
    (closed,) = at_dialer
    assert isinstance(closed.error, AuthenticationError)


def test_a_patient_side_goes_on_with_heartbeats_however_long_the_other_is_silent() -> None:
    connection = relayed(0.0)
    connection.is_patient = True
    now = 0.0
    for _ in range(20):
        due = connection.next_deadline()
        assert due is not None
        assert now < due <= now + HEARTBEAT_SECONDS
        now = due
        assert connection.on_time(now) == []
        assert connection.has_data
        take(connection)
    assert now > 2 * SILENCE_SECONDS
    assert connection.established
