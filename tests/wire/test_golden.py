"""The protocol is what golden.txt says, in both directions."""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Any

import pytest

from gpumesh.model.payloads import OutOfBand
from gpumesh.model.resources import CardReading, DeviceFacts, facts_from_wire, readings_from_wire
from gpumesh.model.tasks import spec_from_wire
from gpumesh.protocol import codec, frames, messages
from gpumesh.protocol.connection import Connection, Established
from tests.unit.protocol import talk
from tests.wire import golden

GOLDEN = golden.read()
TRANSFER = "Transfer: 3 + 0 bytes as chunks, then RunTasks"
OLDER_TRANSFER = "Transfer: 3 + 0 bytes as chunks, then RunTasks as an older peer writes it"
OBJECT = "Object: 3 bytes as transfer 80000003, then ObjectSent"
DIALER = "Handshake: what the dialer writes"
LISTENER = "Handshake: what the listener writes"


def decode(data: bytes) -> Any:
    decoder = frames.FrameDecoder(limit=1 << 20)
    (frame,) = decoder.feed(data)
    assert decoder.buffered == 0
    return codec.decode(frame, lambda transfer, count: [])


def test_every_message_class_has_golden_bytes() -> None:
    sampled = {type(sample) for sample in golden.SAMPLES.values()}

    assert {cls.__name__ for cls in messages.TAGS} == {cls.__name__ for cls in sampled}
    assert set(golden.SAMPLES) == {title for title in GOLDEN if ":" not in title}


@pytest.mark.parametrize("title", golden.SAMPLES)
def test_a_message_is_written_as_its_golden_bytes(title: str) -> None:
    assert golden.encode(golden.SAMPLES[title]).hex(" ") == GOLDEN[title].hex(" ")


@pytest.mark.parametrize("title", golden.SAMPLES)
def test_golden_bytes_are_read_as_their_message(title: str) -> None:
    message = decode(GOLDEN[title])

    assert message == golden.SAMPLES[title]
    assert type(message) is type(golden.SAMPLES[title])


def test_a_tag_is_never_given_to_another_message() -> None:
    assert {cls.__name__: tag for cls, tag in messages.TAGS.items()} == {
        "Hello": 0x01, "Challenge": 0x02, "Proof": 0x03, "Welcome": 0x04, "Refused": 0x05, "Ping": 0x06, "Pong": 0x07,
        "Goodbye": 0x08, "UnknownMessage": 0x09, "RegisterWorker": 0x10, "RegisterClient": 0x11, "WorkerChanged": 0x12,
        "WorkerDraining": 0x13, "MeshChanged": 0x14, "WorkerReadings": 0x15, "SessionResumed": 0x16, "DefineFunction": 0x20, "DefineSpec": 0x21, "SubmitTasks": 0x22,
        "CancelTasks": 0x23, "ResultsReceived": 0x24, "ResubmissionEnds": 0x25, "TaskResults": 0x28, "TaskNotice": 0x29, "TaskOutput": 0x2A, "RunTasks": 0x30,
        "RecallTasks": 0x31, "TasksFinished": 0x32, "ForgetResults": 0x33, "StreamItems": 0x34, "StreamCredit": 0x35, "TaskWaits": 0x36, "SlotGranted": 0x37, "TasksWait": 0x38,
        "ActorReady": 0x39, "EndActor": 0x3A, "CancelCalls": 0x3B, "CreateDetached": 0x3C, "KillActor": 0x3D, "RotateToken": 0x3E, "TokenRotated": 0x3F, "RunnerReady": 0x40, "Query": 0x50, "Answer": 0x51,
        "OpenStore": 0x60, "StoreOffer": 0x61, "CreateSegment": 0x62, "SegmentCreated": 0x63, "PutObject": 0x64,
        "ObjectStored": 0x65, "LocateObject": 0x66, "ObjectAt": 0x67, "FetchObject": 0x68, "ObjectSent": 0x69,
        "TransferCredit": 0x6A, "CancelFetch": 0x6B, "UnpinObjects": 0x6C, "HoldRefs": 0x6D, "ReleaseRefs": 0x6E,
        "DeleteObjects": 0x6F, "FreeObjects": 0x70, "SegmentsGone": 0x71, "DefineCode": 0x72,
        "SubmitJob": 0x73, "JobPayloads": 0x74, "ChangeJob": 0x75,
    }  # fmt: skip


def test_facts_and_specs_come_back_from_their_golden_bytes() -> None:
    assert facts_from_wire(decode(GOLDEN["RegisterWorker"]).facts) == golden.FACTS
    assert spec_from_wire(decode(GOLDEN["DefineSpec"]).spec) == golden.SPEC


def test_readings_come_back_from_their_golden_bytes() -> None:
    busy, silent = readings_from_wire(decode(GOLDEN["WorkerReadings"]).readings)

    assert busy == CardReading(golden.CARD, 300_000_000, 2_300_000_000, 97.0, 71.0, 218.5)
    assert silent == CardReading("mps:0", -1, -1, -1.0, -1.0, -1.0)


def test_facts_and_specs_of_an_older_peer_lack_what_came_later() -> None:
    devices = tuple(DeviceFacts(*device[:5]) for device in golden.FACTS.devices)
    facts = golden.FACTS._replace(devices=devices, versions=(), installing=())
    older = "as an older peer writes it"

    assert facts_from_wire(decode(GOLDEN[f"RegisterWorker: {older}"]).facts) == facts
    later = facts_from_wire(decode(GOLDEN["RegisterWorker: with devices as an older peer writes them"]).facts)
    assert later == golden.FACTS._replace(devices=devices)
    assert facts_from_wire(decode(GOLDEN[f"WorkerChanged: {older}"]).facts) == facts._replace(devices=(), problem="paused")
    assert spec_from_wire(decode(GOLDEN[f"DefineSpec: {older}"]).spec) == golden.SPEC._replace(
        code=b"", packages=(), place=True, script="", backoff=0.0, plan=None, is_stream=False, depth=0
    )


def test_tasks_of_an_older_coordinator_run_on_no_card() -> None:
    assert decode(GOLDEN["RunTasks: as an older peer writes it"]) == golden.SAMPLES["RunTasks"]


def test_a_message_with_fields_of_a_newer_version_is_understood() -> None:
    newer = talk.raw_frame(0x06, b"\x93\x07\xa5later\xc0")

    assert decode(newer) == messages.Ping(7)


def test_the_handshake_is_byte_for_byte_the_golden_one() -> None:
    dialer, listener = talk.dial(), talk.listen()
    listener.workers = 3
    dialed = talk.take(dialer)
    listener.receive_data(dialed, 0.0)
    answered = talk.take(listener)
    dialer.receive_data(answered, 0.0)
    dialed += talk.take(dialer)
    listener.receive_data(dialed[-frames.HEADER.size - 35 :], 0.0)
    answered += talk.take(listener)

    assert dialed.hex(" ") == GOLDEN[DIALER].hex(" ")
    assert answered.hex(" ") == GOLDEN[LISTENER].hex(" ")
    assert dialer.receive_data(answered[-frames.HEADER.size - 36 :], 0.0) == [
        Established("client", talk.MESH, 3, talk.LISTENER_FACTS._replace(platform=""))
    ]


def test_the_proofs_in_the_golden_handshake_are_the_documented_hmac() -> None:
    hello = golden.SAMPLES["Hello"]
    challenge = golden.SAMPLES["Challenge"]
    parts = [golden.encode(hello)[8:], golden.encode(challenge)[8:], b""]

    def proof(label: bytes) -> bytes:
        mac = hmac.new(talk.TOKEN.encode(), digestmod=hashlib.sha256)
        for part in [label, *parts]:
            mac.update(struct.pack("<I", len(part)) + part)
        return mac.digest()

    assert GOLDEN[DIALER] == frames.PREAMBLE + golden.encode(hello) + golden.encode(messages.Proof(proof(b"gpumesh dialer 1")))
    assert GOLDEN[LISTENER] == frames.PREAMBLE + golden.encode(challenge) + golden.encode(
        messages.Welcome(proof(b"gpumesh listener 1"), 3)
    )


@pytest.mark.parametrize("title", [TRANSFER, OLDER_TRANSFER])
def test_a_golden_transfer_is_read_as_its_message(title: str) -> None:
    connection = Connection.trusted()

    assert connection.receive_data(GOLDEN[title], 0.0) == [messages.RunTasks(7, ((golden.TASK, 1, OutOfBand([b"abc", b""])),))]


def test_a_golden_object_is_received_and_confirmed() -> None:
    connection = Connection.trusted()
    target = bytearray(3)
    connection.receive_into(golden.TRANSFER, target)

    assert connection.receive_data(GOLDEN[OBJECT], 0.0) == [messages.ObjectSent(golden.TRANSFER)]
    assert target == b"abc"
    assert talk.take(connection) == golden.encode(messages.TransferCredit(golden.TRANSFER, 3))


def test_a_golden_object_is_how_it_is_sent() -> None:
    connection = Connection.trusted()
    connection.receive_data(GOLDEN["FetchObject"], 0.0)
    connection.send_object(golden.TRANSFER, [b"a", b"bc"], 10)

    assert talk.take(connection).hex(" ") == GOLDEN[OBJECT].hex(" ")


def test_a_golden_transfer_is_how_it_is_written() -> None:
    tag, body, buffers = codec.Encoder().encode(messages.RunTasks(7, ((golden.TASK, 1, OutOfBand([b"abc", b""])),)))
    written = talk.chunk(5, 0, 0, 3, buffers[0]) + talk.chunk(5, 1, 0, 0, buffers[1])
    written += frames.encode_transferred(tag, 5, body, len(buffers))

    assert written.hex(" ") == GOLDEN[TRANSFER].hex(" ")


def test_the_preamble_is_magic_and_version() -> None:
    assert frames.PREAMBLE.hex(" ") == "89 6d 65 73 68 0a 01 00"
