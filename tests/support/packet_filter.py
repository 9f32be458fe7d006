"""Rules of the kernel's packet filter, told over netlink, so that no program for it need be installed.

What firewalls and home routers do: flows that were silent for a while are unknown, and what belongs to none is dropped; nobody from outside
can begin one. A flow is known from its first packet on. The numbers are those of linux/netfilter/nf_tables.h.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

_NETLINK_NETFILTER = 12
_SUBSYSTEM = 10 << 8  # nf_tables
_BATCH_BEGIN, _BATCH_END = 16, 17
_NEW_TABLE, _NEW_CHAIN, _NEW_RULE = _SUBSYSTEM | 0, _SUBSYSTEM | 3, _SUBSYSTEM | 6
_REQUEST, _ACK, _CREATE, _APPEND = 1, 4, 0x400, 0x800
_IPV4, _NESTED, _ERROR = 2, 0x8000, 2
_FORWARD_HOOK = 2
_INVALID = 1  # State of a packet that belongs to no known flow and does not begin one.
_NEW = 8  # Of one that begins a flow.
_TO_INTERFACE = 7  # Name of the interface by which a packet will leave, for the expression "meta".
_NAME_BYTES = 16  # Of an interface, with zeros behind.
_CONNTRACK = Path("/proc/sys/net/netfilter")


def forget_idle_flows(seconds: int) -> None:
    """Do so with everything that this network namespace forwards from now on; flows that began before are unknown.

    Args:
        seconds: Silence after which a TCP connection is forgotten.

    Raises:
        OSError: This kernel or this user cannot.
    """
    _send_rule("idle", _flow_is(_INVALID))
    for name, value in (
        ("nf_conntrack_tcp_loose", 0),  # A packet in the middle of a connection does not make it known.
        ("nf_conntrack_tcp_be_liberal", 1),  # Its sequence numbers are not looked at.
        ("nf_conntrack_tcp_timeout_established", seconds),
        ("nf_conntrack_tcp_timeout_unacknowledged", seconds),
        ("nf_conntrack_tcp_timeout_max_retrans", seconds),
    ):
        (_CONNTRACK / name).write_text(str(value))


def let_nobody_in(interface: str) -> None:
    """Let this network namespace forward nothing through that interface that begins a flow: who is behind it can call, and not be called.

    Raises:
        OSError: This kernel or this user cannot.
    """
    name = interface.encode().ljust(_NAME_BYTES, b"\0")
    leaves = _number(1, 1) + _number(2, _TO_INTERFACE)
    is_it = _number(1, 1) + _number(2, 0) + _nest(3, _attribute(1, name))
    _send_rule("outward", _expression("meta", leaves) + _expression("cmp", is_it) + _flow_is(_NEW))


def _flow_is(state: int) -> bytes:
    """Goes on with packets whose flow is in this state."""
    look = _number(1, 1) + _number(2, 0)  # State of the flow -> register 1
    mask = _number(1, 1) + _number(2, 1) + _number(3, 4) + _nest(4, _native(1, state)) + _nest(5, _native(1, 0))
    differs = _number(1, 1) + _number(2, 1) + _nest(3, _native(1, 0))
    return _expression("ct", look) + _expression("bitwise", mask) + _expression("cmp", differs)


def _send_rule(table: str, conditions: bytes) -> None:
    """Drop, of what is forwarded, the packets for which all conditions hold."""
    hook = _number(1, _FORWARD_HOOK) + _number(2, 0)
    chain = _text(1, table) + _text(3, "forward") + _nest(4, hook) + _number(5, 1) + _text(7, "filter")
    drop = _number(1, 0) + _nest(2, _nest(2, _number(1, 0)))
    rule = _text(1, table) + _text(2, "forward") + _nest(4, conditions + _expression("immediate", drop))
    batch = (
        _message(_BATCH_BEGIN, 0, b"", family=0, subsystem=10)
        + _message(_NEW_TABLE, _CREATE, _text(1, table))
        + _message(_NEW_CHAIN, _CREATE, chain)
        + _message(_NEW_RULE, _CREATE | _APPEND, rule)
        + _message(_BATCH_END, 0, b"", family=0, subsystem=10)
    )
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER) as netlink:
        netlink.settimeout(5)
        netlink.bind((0, 0))
        netlink.send(batch)
        for _ in range(3):  # One answer for the table, the chain and the rule each.
            answer = netlink.recv(65536)
            kind = struct.unpack_from("=H", answer, 4)[0]
            code = struct.unpack_from("=i", answer, 16)[0] if kind == _ERROR else 0
            if code:
                raise OSError(-code, f"the packet filter refuses: {os.strerror(-code)}")


def _message(kind: int, flags: int, body: bytes, *, family: int = _IPV4, subsystem: int = 0) -> bytes:
    acknowledge = _ACK if kind >= _SUBSYSTEM else 0
    body = struct.pack("=BB", family, 0) + struct.pack(">H", subsystem) + body
    return struct.pack("=IHHII", 16 + len(body), kind, _REQUEST | acknowledge | flags, 0, 0) + body


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + b"\0" * (-len(value) % 4)


def _text(kind: int, value: str) -> bytes:
    return _attribute(kind, value.encode() + b"\0")


def _number(kind: int, value: int) -> bytes:
    return _attribute(kind, struct.pack(">I", value))


def _native(kind: int, value: int) -> bytes:
    return _attribute(kind, struct.pack("=I", value))


def _nest(kind: int, value: bytes) -> bytes:
    return _attribute(kind | _NESTED, value)


def _expression(name: str, data: bytes) -> bytes:
    return _nest(1, _text(1, name) + _nest(2, data))
