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


def test_lesser_tokens_are_known_values_of_the_full_one() -> None:
    assert auth.worker_token("token") == "gmw-" + hmac.new(b"token", b"gpumesh worker token 1", hashlib.sha256).hexdigest()
    assert auth.metrics_token("token") == "gmm-" + hmac.new(b"token", b"gpumesh metrics token 1", hashlib.sha256).hexdigest()


def test_lesser_tokens_of_lesser_tokens_are_others() -> None:
    """Who holds the worker token cannot make the metrics token out of it, nor one that the mesh would take as its own."""
    worker = auth.worker_token("token")

    assert auth.metrics_token(worker) != auth.metrics_token("token")
    assert auth.worker_token(worker) not in (worker, "token")


@pytest.mark.parametrize(
    ("token", "kind"),
    [
        (auth.worker_token("x"), auth.WORKER),
        (auth.metrics_token("x"), auth.METRICS),
        ("gmw-mine", auth.FULL),  # Somebody's own token may begin like that.
        ("gmw-" + "G" * 64, auth.FULL),
        ("", auth.FULL),
        ("0" * 64, auth.FULL),
    ],
)
def test_a_token_says_of_which_kind_it_is(token: str, kind: str) -> None:
    assert auth.kind_of(token) == kind
