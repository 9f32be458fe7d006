"""Who is there in place of the mesh, by the first bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumesh.protocol import frames, strangers


@pytest.mark.parametrize(
    ("data", "called", "calling"),
    [
        (b"HTTP/1.1 200 OK", strangers.HTTP, strangers.HTTP),
        (b"<html>", strangers.HTTP, strangers.HTTP),
        (b"GET / HTTP/1.1", strangers.HTTP_CLIENT, strangers.HTTP_CLIENT),
        (b"SSH-2.0-x", strangers.SSH, strangers.SSH_CLIENT),
        (b"\x16\x03\x01", strangers.TLS, strangers.TLS_CLIENT),
        (b"220 mail", "something that starts with b'220 mail'", "something that starts with b'220 mail'"),
        (b"x" * 100, f"something that starts with {b'x' * 16!r}", f"something that starts with {b'x' * 16!r}"),
    ],
)
def test_who_it_is(data: bytes, called: str, calling: str) -> None:
    assert strangers.who(data) == called
    assert strangers.who(data, is_calling=True) == calling
    error = strangers.not_a_mesh(data)
    assert (error.stranger, called in str(error)) == (called, True)


@given(st.sampled_from([*strangers.HTTP_VERBS, b"SSH-", b"HTTP", b"\x16\x03\x01\x00"]), st.integers(1, 3))
def test_the_beginning_of_somebody_known_is_worth_waiting_for(known: bytes, count: int) -> None:
    assert strangers.may_become_known(known[:count]) or strangers.who(known[:count]) == strangers.who(known)


@pytest.mark.parametrize("data", [b"x", b"\0", b"\x80", frames.MAGIC[:1] + b"X", b"GEX", b"SSH 2"])
def test_nobody_waits_for_who_can_become_nobody_known(data: bytes) -> None:
    assert not strangers.may_become_known(data)


VERBS = [b"GET", b"POST", b"DELETE", b"PRI", b"PROPFIND", b"M-SEARCH", b"VERSION-CONTROL", b"UPDATEREDIRECTREF"]


@given(st.sampled_from(VERBS), st.integers(1, 80))
def test_the_beginning_of_a_request_may_become_one(verb: bytes, count: int) -> None:
    request = verb + b" /some/path?query HTTP/1.1\r\nHost: localhost\r\nX-Y: z\r\n\r\n"
    assert strangers.may_be_http(request[:count])
    assert not strangers.is_broken_http(request[:count])


@pytest.mark.parametrize(
    "data", [b"SSH-", b"SSH-2.0-x\r\n", b"hello", b"Gx", b"\r\n\r\n", b" GET", b"A" * 33, b"\x03\0\0\x13", b"G\0", b"JRMI\0"]
)
def test_what_cannot_become_a_request(data: bytes) -> None:
    assert not strangers.may_be_http(data)


@pytest.mark.parametrize("data", [b"GARBAGE\r\n", b"EHLO me\r\nMORE", b"GET /\n"])
def test_a_first_line_without_a_version_is_no_request(data: bytes) -> None:
    assert strangers.may_be_http(data)
    assert strangers.is_broken_http(data)
