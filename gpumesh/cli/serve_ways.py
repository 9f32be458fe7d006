"""Ways into a mesh that `gpumesh serve` opens or looks for beside its port: tunnels and tailnets."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, List

import typer

from gpumesh.network.address import Address
from gpumesh.network.ranking import ANY, is_only_local

if TYPE_CHECKING:
    from gpumesh.runtime.serving import Beside


_SECRETS = ("NGROK_AUTHTOKEN", "NGROK_API_KEY")


class Ways:
    """What --public, --tailscale and --advertise come to.

    Args:
        named: The addresses of --advertise.

    Raises:
        MeshUnavailableError: There is no tailnet here; the message says what to do.
        typer.BadParameter: --tailscale contradicts --host.
    """

    def __init__(self, *, host: str, public: bool, tailscale: bool, named: List[Address]) -> None:
        self.known = [*(_tailnet(host) if tailscale else []), *named]  # Before the port is open.
        self.tunnels: List[Address] = []  # Once they are open.
        self.obstacles: List[str] = []  # What may keep others out.
        self._host = host
        self._public = public
        # Of the account at ngrok; what is started from here, tasks included, has no use for them.
        self._secrets = {name: os.environ.pop(name) for name in _SECRETS if public and name in os.environ}

    @property
    def named(self) -> List[Address]:
        """Addresses to tell others before all others, the best first."""
        return [*self.tunnels, *self.known]

    def beside(self) -> List[Beside]:
        """What is to go on while the mesh is served."""
        from gpumesh.runtime.reaching import reaching

        found: List[Beside] = []
        if not is_only_local(self._host) or self.known:
            found.append(reaching(self.known, self.obstacles.extend))
        if self._public:
            from gpumesh.runtime.tunnelling import public

            typer.echo("gpumesh: opening a tunnel of ngrok ...", err=True)
            found.append(public(self.tunnels.append, self._secrets))
        return found


def _tailnet(host: str) -> List[Address]:
    from gpumesh.errors import MeshUnavailableError
    from gpumesh.network.tunnels.tailscale import tailnet_addresses

    try:
        ips = tailnet_addresses()
    except RuntimeError as error:
        raise MeshUnavailableError(str(error)) from None
    if host not in (*ANY, *ips):
        raise typer.BadParameter(
            f"--tailscale is of no use with --host {host}; leave that out, or say --host {ips[0]} for the tailnet alone"
        )
    return [Address(ip, 0) for ip in ips if host in (*ANY, ip)]
