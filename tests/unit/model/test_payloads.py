"""Values as bytes."""

from __future__ import annotations

from gpumesh.model.payloads import OutOfBand, payload_bytes


def test_payloads_are_measured_in_bytes_whatever_holds_them() -> None:
    assert payload_bytes(b"abc") == 3
    assert payload_bytes(OutOfBand([b"abc", bytearray(4), memoryview(b"12345678").cast("I")])) == 15


def test_payloads_are_equal_when_their_bytes_are() -> None:
    assert OutOfBand([b"abc", b""]) == OutOfBand([bytearray(b"abc"), memoryview(b"")])
    assert hash(OutOfBand([b"abc"])) == hash(OutOfBand([bytearray(b"abc")]))
    assert OutOfBand([b"abc"]) != OutOfBand([b"ab", b"c"])
    assert OutOfBand([b"abc"]) != b"abc"


def test_a_payload_is_shown_by_its_size_and_not_by_its_contents() -> None:
    assert repr(OutOfBand([b"secret", b"x"])) == "OutOfBand(2 parts, 7 bytes)"
