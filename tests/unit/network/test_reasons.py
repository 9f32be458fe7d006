"""What errors of the system mean to people."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from typing import Optional

import pytest

from gpumesh.network import connecting, reasons
from gpumesh.network.address import Address


def failed(code: int) -> OSError:
    return OSError(code, f"Connect call failed ('192.0.2.1', {code})")  # As an event loop says it.


@pytest.mark.parametrize(
    ("error", "host", "kind", "told"),
    [
        (None, "192.0.2.1", reasons.TIMEOUT, "no answer from 192.0.2.1:8000 within 5 s; a firewall may drop it"),
        (socket.timeout(), "192.0.2.1", reasons.TIMEOUT, "no answer from 192.0.2.1:8000 within 5 s"),
        (failed(errno.ETIMEDOUT), "192.0.2.1", reasons.TIMEOUT, "no answer from 192.0.2.1:8000 within 5 s"),
        (
            failed(errno.ECONNREFUSED),
            "192.0.2.1",
            reasons.REFUSED,
            "nothing listens at 192.0.2.1:8000; start a coordinator there",
        ),
        (
            failed(errno.EHOSTUNREACH),
            "192.0.2.1",
            reasons.NO_HOST,
            "cannot connect to 192.0.2.1:8000: no machine takes anything at this address; see whether it is on",
        ),
        (
            failed(errno.ENETUNREACH),
            "192.0.2.1",
            reasons.NO_ROUTE,
            "cannot connect to 192.0.2.1:8000: there is no way to this address",
        ),
        (
            failed(errno.ENETUNREACH),
            "2001:db8::1",
            reasons.NO_ROUTE,
            "cannot connect to [2001:db8::1]:8000: there is no way to this IPv6",
        ),
        (
            failed(errno.EADDRNOTAVAIL),
            "2001:db8::1",
            reasons.NO_IPV6,
            "cannot connect to [2001:db8::1]:8000: this machine has no IPv6",
        ),
        (
            failed(errno.EAFNOSUPPORT),
            "pc.example",
            reasons.NO_IPV6,
            "cannot connect to pc.example:8000: this machine has no IPv6",
        ),
        (
            failed(errno.EACCES),
            "192.0.2.1",
            reasons.FAILED,
            f"cannot connect to 192.0.2.1:8000: {os.strerror(errno.EACCES)}; check",
        ),
    ],
)
def test_why_there_is_no_connection(error: Optional[OSError], host: str, kind: str, told: str) -> None:
    assert reasons.why(error, host)[0] == kind
    text = str(connecting.no_connection(Address(host, 8000), error, 5.0))
    assert text.startswith(told)
    assert text.endswith(f"; {reasons.why(error, host)[2]}")


def test_what_an_error_says() -> None:
    broken = ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1006)")
    broken.reason = "WRONG_VERSION_NUMBER"
    assert reasons.said(broken) == "WRONG_VERSION_NUMBER"
    broken.reason = None  # type: ignore[assignment]
    assert reasons.said(broken).startswith("[SSL: WRONG_VERSION_NUMBER]")
    assert reasons.said(failed(errno.EPIPE)) == os.strerror(errno.EPIPE)
    assert reasons.said(OSError("an end")) == "an end"
    assert reasons.said(OSError()) == "OSError"
