"""What docs/protocol.md says is what the code does."""

from __future__ import annotations

import re

from gpumesh import config
from gpumesh.model.actors import ActorPlan
from gpumesh.model.jobs import JobSpec
from gpumesh.model.outcomes import Status
from gpumesh.model.resources import CardReading, DeviceFacts, Requirement, WorkerFacts
from gpumesh.model.tasks import TaskSpec
from gpumesh.protocol import auth, codec, connection, frames, messages
from gpumesh.store.container import container_views
from tests.wire import document

TEXT = document.DOCUMENT.read_text(encoding="utf-8")


def test_the_message_table_is_current() -> None:
    assert document.replaced(TEXT) == TEXT, "write it anew with: python -m tests.wire.document"


def test_every_message_has_a_row() -> None:
    rows = re.findall(r"^\| `([0-9a-f]{2})` \| (\w+) \|", document.table(), re.MULTILINE)

    assert rows == [(f"{tag:02x}", cls.__name__) for tag, cls in messages.MESSAGE_TYPES.items()]


def test_the_limits_are_the_ones_in_force() -> None:
    limits = dict(re.findall(r"^\| (.+?) \| (\d+) (?:bytes|s|) ?\|", TEXT, re.MULTILINE))

    assert {name: int(value) for name, value in limits.items()} == {
        "frame before authentication": config.PREAUTH_FRAME_BYTES,
        "frame after it": config.CONTROL_FRAME_BYTES + config.BULK_MESSAGE_BYTES + config.CHUNK_BYTES,
        "body that a sender puts into one frame": config.CONTROL_FRAME_BYTES,
        "buffers beside one body": config.BULK_MESSAGE_BYTES,
        "number of buffers of one message": frames.MAX_BUFFERS,
        "data of one chunk": config.CHUNK_BYTES,
        "value (all buffers of all open transfers)": config.TRANSFER_BYTES,
        "open transfers": connection.MAX_OPEN_TRANSFERS,
        "fields of a handshake message": codec.HANDSHAKE_FIELDS,
        "handshake": int(config.HANDSHAKE_SECONDS),
        "heartbeat": int(config.HEARTBEAT_SECONDS),
        "silence": int(config.SILENCE_SECONDS),
        "strangers at once": config.PENDING_HANDSHAKES,
    }


def test_constants_stand_in_the_document() -> None:
    for shown in (
        frames.PREAMBLE.hex(" "),
        auth.DIALER_LABEL.decode(),
        auth.LISTENER_LABEL.decode(),
        f"kind `{frames.CHUNK:02x}`",
        f"flag `{frames.TRANSFERRED:02x}`",
        f"extension {codec.OUT_OF_BAND} with two bytes",
        f"extension {codec.STORED} with 16 bytes",
        f"extension {codec.LATER} with 8 bytes",
        f"8 bytes {bytes(container_views([b''])[0][:8]).decode()} · u64 number of parts",
    ):
        assert shown in TEXT


def test_the_nested_arrays_have_the_fields_that_the_document_names() -> None:
    for record in (WorkerFacts, DeviceFacts, CardReading, Requirement, TaskSpec, ActorPlan, JobSpec):
        (fields,) = re.findall(rf"^\| {record.__name__} \| (.*) \|$", TEXT, re.MULTILINE)
        assert re.findall(r"`(\w+)`", fields) == list(record._fields)


def test_every_status_stands_in_the_document() -> None:
    (listed,) = re.findall(r"^Status: (.*)\.$", TEXT, re.MULTILINE)

    assert listed.split(", ") == [f"{status.value} {status.name}" for status in Status]
