"""Why there is no connection to an address, by the error of the system; one set of words for all who connect."""

from __future__ import annotations

import errno
import os
import socket
from typing import Optional, Tuple

# Kinds of what came out.
REFUSED = "refused"  # The machine is there; nothing listens.
TIMEOUT = "timeout"
NO_ROUTE = "no route"
NO_HOST = "no host"  # Its own network says that it is not there, or its firewall says so.
NO_IPV6 = "no IPv6"
FAILED = "failed"  # Any other error of the system.

_NO_ROUTE = (errno.ENETUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL)
_NO_HOST = (errno.EHOSTUNREACH, errno.EHOSTDOWN)
_NO_FAMILY = (errno.EAFNOSUPPORT, errno.EPFNOSUPPORT)


def why(error: Optional[OSError], host: str) -> Tuple[str, str, str]:
    """What an error of `connect` means: the kind, a clause for people, and what to do.

    Args:
        error: None: no answer in time.
        host: The name or IP address that was meant.
    """
    if error is None or isinstance(error, (TimeoutError, socket.timeout)) or error.errno in (None, errno.ETIMEDOUT):
        return TIMEOUT, "nothing answers", "a firewall may drop it, or the machine is off or on another network"
    if error.errno == errno.ECONNREFUSED:
        advice = "start a coordinator there with `gpumesh serve`, or check the port"
        return REFUSED, "the machine is there, but nothing listens on this port", advice
    if error.errno in _NO_FAMILY or (":" in host and error.errno == errno.EADDRNOTAVAIL):
        return NO_IPV6, "this machine has no IPv6", "use an IPv4 address of that host"
    if error.errno in _NO_HOST:
        advice = "see whether it is on and in this network, whether the address is right, and what its firewall lets in"
        return NO_HOST, "no machine takes anything at this address", advice
    if error.errno in _NO_ROUTE:
        if ":" in host:
            return NO_ROUTE, "there is no way to this IPv6 address from here", "use an IPv4 address of that host"
        return NO_ROUTE, "there is no way to this address from here", "both machines must be in one network, or a VPN"
    return FAILED, f"cannot connect ({said(error)})", "check the address and the network"


def said(error: BaseException) -> str:
    """The few words of an error of TLS or of the system, without numbers and addresses."""
    code = getattr(error, "errno", None) or 0
    if hasattr(error, "reason"):  # Of TLS, whose numbers are none of the system's.
        return str(error.reason or getattr(error, "strerror", "") or error)
    return (os.strerror(code) if code > 0 else getattr(error, "strerror", None)) or str(error) or type(error).__name__
