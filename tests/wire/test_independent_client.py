"""docs/protocol.md is enough to write another client: this one was, and a real coordinator and worker serve it."""

from __future__ import annotations

import ast
import hashlib
import hmac
import pickle
import re
import struct
from pathlib import Path
from typing import Dict, Iterator

import pytest

from gpumesh.protocol import auth, codec, frames
from gpumesh.runtime.embedded import add_worker
from tests.support.guarded import TOKEN, Guarded
from tests.support.processes import until
from tests.wire import independent_client
from tests.wire.document import DOCUMENT
from tests.wire.independent_client import IndependentClient, Refused, absolute_of_seven

TEXT = DOCUMENT.read_text(encoding="utf-8")


def test_it_uses_nothing_of_gpumesh() -> None:
    source = Path(independent_client.__file__).read_text(encoding="utf-8")
    imported = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(source))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported == {"__future__", "hashlib", "hmac", "os", "socket", "ssl", "struct", "sys", "typing", "msgpack"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with Guarded(Path(tmp_path_factory.mktemp("site"))) as guarded:
        worker = add_worker(guarded.url, token=guarded.token, slots=1)
        try:
            until(lambda: guarded.peers()[1] == 1, timeout=30)
            yield guarded
        finally:
            worker.stop()


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_it_asks_and_has_a_task_run(site: Guarded, tls: bool) -> None:
    client = IndependentClient("127.0.0.1", site.port, TOKEN, tls=tls)
    assert client.mesh == site.coordinator.mesh
    workers, value = absolute_of_seven(client)
    client.close()

    assert len(workers) == 1
    assert pickle.loads(value) == 7
    until(lambda: site.peers()[0] == 0)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_it_is_refused_with_another_token(site: Guarded, tls: bool) -> None:
    with pytest.raises(Refused, match="the token was refused"):
        IndependentClient("127.0.0.1", site.port, TOKEN + "x", tls=tls)


def test_a_worker_token_is_refused_to_it(site: Guarded) -> None:
    with pytest.raises(Refused, match="lends a machine and nothing else"):
        IndependentClient("127.0.0.1", site.port, auth.worker_token(TOKEN), tls=True)


def example() -> Dict[str, str]:
    """The example of one handshake in the document."""
    block = TEXT[TEXT.index("An example to test against") :]
    block = block[: block.index("Before both proofs")]
    found: Dict[str, str] = {}
    name = ""
    for line in re.findall(r"^    (.*)$", block, re.MULTILINE):
        name = line[:21].strip() or name
        found[name] = found.get(name, "") + line[21:].strip()
    return found


def test_the_example_of_a_handshake_is_right() -> None:
    said = example()
    token = said["token"]
    hello, challenge = bytes.fromhex(said["Hello body"]), bytes.fromhex(said["Challenge body"])
    frame = frames.FrameDecoder().feed(bytes.fromhex(said["Hello frame"]))[0]
    assert bytes(frame.data) == hello
    assert codec.decode_handshake(frame).nonce == bytes(range(32))

    for name, label, binding in (
        ("Proof, plain", auth.DIALER_LABEL, b""),
        ("Welcome, plain", auth.LISTENER_LABEL, b""),
        ("Proof in TLS", auth.DIALER_LABEL, bytes.fromhex(said["binding in TLS"])),
        ("Welcome in TLS", auth.LISTENER_LABEL, bytes.fromhex(said["binding in TLS"])),
    ):
        data = b"".join(struct.pack("<I", len(part)) + part for part in (label, hello, challenge, binding))
        assert hmac.new(token.encode(), data, hashlib.sha256).hexdigest() == said[name], name
        assert auth.make_proof(label, token, hello, challenge, binding).hex() == said[name], name
    assert said["worker token"] == auth.worker_token(token)
    assert said["metrics token"] == auth.metrics_token(token)


def test_the_labels_and_reasons_in_the_document_are_those_in_force() -> None:
    from gpumesh.protocol.connection import UNAVAILABLE

    for label in (auth.DIALER_LABEL, auth.LISTENER_LABEL, b"gpumesh worker token 1", b"gpumesh metrics token 1"):
        assert label.decode() in TEXT
    for reason in (*UNAVAILABLE, "authentication", "version", "protocol"):
        assert f"`{reason}`" in TEXT
