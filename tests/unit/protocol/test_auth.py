"""The proof of the token."""

from __future__ import annotations

import hashlib
import hmac
import struct

import pytest

from gpumesh.protocol import auth

GIVEN = (b"label", "token", b"hello", b"challenge", b"binding")


def test_the_proof_is_hmac_sha256_over_the_parts_with_their_lengths() -> None:
    said = b"".join(struct.pack("<I", len(part)) + part for part in (b"label", b"hello", b"challenge", b"binding"))

    assert auth.make_proof(*GIVEN) == hmac.new(b"token", said, hashlib.sha256).digest()


def test_a_known_proof_stays_what_it_is() -> None:
    assert auth.make_proof(*GIVEN).hex() == "db430efde991e8ad043af36c321bee4f4ce0eaae60e2d7ea338f1e63d86d9157"


@pytest.mark.parametrize(
    "other",
    [
        (b"labex", "token", b"hello", b"challenge", b"binding"),
        (b"label", "Token", b"hello", b"challenge", b"binding"),
        (b"label", "token", b"hellx", b"challenge", b"binding"),
        (b"label", "token", b"hello", b"challengx", b"binding"),
        (b"label", "token", b"hello", b"challenge", b""),
        (b"label", "token", b"helloc", b"hallenge", b"binding"),  # The same bytes, cut elsewhere.
        (b"label", "token", b"hello", b"challengebinding", b""),
    ],
)
def test_every_part_and_every_cut_counts(other: tuple[bytes, str, bytes, bytes, bytes]) -> None:
    assert not auth.proofs_match(auth.make_proof(*GIVEN), auth.make_proof(*other))


def test_the_two_sides_cannot_use_each_others_proof() -> None:
    assert auth.make_proof(auth.DIALER_LABEL, "t", b"h", b"c", b"") != auth.make_proof(
        auth.LISTENER_LABEL, "t", b"h", b"c", b""
    )


def test_proofs_of_other_lengths_do_not_match() -> None:
    proof = auth.make_proof(*GIVEN)

    assert auth.proofs_match(proof, bytes(proof))
    assert not auth.proofs_match(proof, proof[:-1])
    assert not auth.proofs_match(proof, b"")


def test_a_token_of_any_characters_works() -> None:
    assert len(auth.make_proof(b"l", "schlüssel\udcff", b"h", b"c", b"")) == 32
