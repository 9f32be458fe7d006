"""What `gpumesh serve` says when its port is open: who can connect, as whom their code runs, and the line for other machines."""

from __future__ import annotations

import os
from typing import List, Sequence

from gpumesh.network.address import INSECURE, PORT, Address
from gpumesh.network.ranking import is_only_local
from gpumesh.network.tcp import ANY


class Banner:
    """Makes the lines.

    Args:
        host: Where it listens, as it was asked for; "" for every address of this machine.
        here: The address by which this machine reaches it.
        fingerprint: SHA-256 of its certificate; b"" without TLS.
        named: Addresses that --advertise names.
    """

    def __init__(self, host: str, here: Address, fingerprint: bytes, named: Sequence[Address] = ()) -> None:
        from gpumesh.network.interfaces import in_container
        from gpumesh.runtime.serving_addresses import join_addresses

        way = PORT if fingerprint else INSECURE
        self.fingerprint = fingerprint
        self.is_everywhere = host in ANY
        found = join_addresses(host, here.port, way, named)
        self.is_alone = not found  # Of all networks.
        self.is_near = is_only_local(host) and not named
        self.addresses = found or [here]
        self.is_hidden = self.is_everywhere and not named and in_container()

    def lines(self, token: str, *, is_generated: bool) -> List[str]:
        """One text a line.

        Args:
            token: What the line for other machines is to show; "" for nothing.
            is_generated: Nobody knows it yet.
        """
        best = self.addresses[0]
        said = [f"gpumesh: serving at {best.url}, Ctrl-C to stop"]
        if self.is_near:
            said.append("Only this machine can connect; for others to join too, leave --host out.")
        else:
            who = "can connect, from every network that this machine is on,"
            if not self.is_everywhere:
                who = f"and can reach {best.host} can connect,"
            said.append(f"Whoever knows the token {who} and run code here as {_user()}.")
        if self.fingerprint:
            if not self.is_near:
                said.append(
                    f"What is said with other machines is encrypted (TLS); the certificate's SHA-256 begins with {_hex(self.fingerprint)}."
                )
        elif not self.is_near:
            said.append("NOTHING IS ENCRYPTED (--insecure): others on the network can read and change what is said here.")
        join = f"To join with {'this' if self.is_near or self.is_alone else 'another'} machine: gpumesh join {best.url}"
        if token:
            said.append(f"{join} --token {token}")
        elif is_generated:
            said.append(f"{join}   (`gpumesh token` {'' if self.is_near else 'on this one '}shows the token)")
        else:
            said.append(f"{join}   (with the same token)")
        if self.is_alone:
            said.append(
                "This machine is on no network now; once it is, join with its address there, or with --advertise ADDRESS here."
            )
        if len(self.addresses) > 1:
            said.append(f"If it cannot reach that: {', '.join(each.url for each in self.addresses[1:])}")
        if self.is_hidden:
            said.append(
                "This is a container: if others cannot reach these addresses, name its host's with --advertise HOST:PORT."
            )
        return said


def _hex(fingerprint: bytes) -> str:
    return ":".join(f"{byte:02x}" for byte in fingerprint[:16])


def _user() -> str:
    """Who runs this."""
    if not hasattr(os, "getuid"):
        return f'user "{os.environ.get("USERNAME", "")}"'
    import pwd

    try:
        return f'user "{pwd.getpwuid(os.getuid()).pw_name}"'
    except KeyError:  # A container.
        return f"user {os.getuid()}"
