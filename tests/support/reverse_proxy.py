"""A real reverse proxy before a coordinator: HTTPS with a certificate of its own, HTTP/1.1 only, WebSockets passed on message by message.

As a program: `python -m tests.support.reverse_proxy FOLDER PORT TARGET`, with a port of this machine or HOST:PORT. With 0 it serves as many coordinators as there are
ports: whoever connects to 127.1.a.b is passed on to the port a * 256 + b of this machine.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any, Optional

from tests.support.processes import free_port, until

ROOT = Path(__file__).resolve().parent.parent.parent


class ReverseProxy:
    """Such a proxy in a process of its own, on a port that it keeps when it is started again.

    Args:
        folder: For its certificate.
        target: The port of the coordinator behind it; 0: by the address that is called.
    """

    def __init__(self, folder: Path, target: int) -> None:
        self.port = free_port("0.0.0.0")  # All of 127.0.0.0/8 is this machine.
        self.url = f"https://127.0.0.1:{self.port}"
        self._folder = folder
        self._target = target
        self.process: Optional[subprocess.Popen[bytes]] = None
        self.start()

    def start(self) -> None:
        """Listen; returns when it does."""
        words = [sys.executable, "-m", "tests.support.reverse_proxy", str(self._folder), str(self.port), str(self._target)]
        self.process = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, start_new_session=True)
        until(self._answers, 20.0, what="the reverse proxy")

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, "the reverse proxy has ended"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self) -> None:
        """End it as a power cut would."""
        assert self.process is not None
        self.process.kill()
        self.process.communicate()

    def __enter__(self) -> ReverseProxy:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()


async def _serve(folder: str, port: int, target: str) -> None:
    import aiohttp
    from aiohttp import web

    from gpumesh.network.certificates import load_or_make_identity

    identity = load_or_make_identity(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(identity.certificate, identity.key)
    context.set_alpn_protocols(["http/1.1"])
    session = aiohttp.ClientSession(auto_decompress=False)

    def behind(request: web.BaseRequest) -> str:
        if target != "0":
            return target if ":" in target else f"127.0.0.1:{target}"
        assert request.transport is not None
        _, _, high, low = request.transport.get_extra_info("sockname")[0].split(".")
        return f"127.0.0.1:{int(high) * 256 + int(low)}"

    async def pass_on(source: Any, sink: Any) -> None:
        async for message in source:
            if message.type is aiohttp.WSMsgType.BINARY:
                await sink.send_bytes(message.data)
        await sink.close()

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        url = f"http://{behind(request)}{request.path_qs}"
        headers = {name: value for name, value in request.headers.items() if name in ("Authorization", "Accept", "Origin")}
        try:
            if request.headers.get("Upgrade", "").lower() == "websocket":
                async with session.ws_connect(url, headers=headers, max_msg_size=0) as inner:
                    outer = web.WebSocketResponse(max_msg_size=0, compress=False)
                    await outer.prepare(request)
                    await asyncio.gather(pass_on(outer, inner), pass_on(inner, outer))
                    return outer
            async with session.request(request.method, url, headers=headers, data=await request.read()) as answer:
                kept = {name: value for name, value in answer.headers.items() if name not in ("Connection", "Content-Length")}
                return web.Response(status=answer.status, body=await answer.read(), headers=kept)
        except aiohttp.WSServerHandshakeError as error:
            return web.Response(status=error.status)
        except aiohttp.ClientConnectionError:
            return web.Response(status=502, text="Bad Gateway")

    server = web.Server(handle, access_log=None)
    listener = await asyncio.get_running_loop().create_server(server, "0.0.0.0", port, ssl=context, backlog=512)
    over = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, over.set)  # The tests have ended: it does not outlive them.
    await over.wait()
    listener.close()
    await session.close()


def main() -> None:
    """See the module."""
    import uvloop

    folder, port, target = sys.argv[1:]
    uvloop.install()
    asyncio.run(_serve(folder, int(port), target))


if __name__ == "__main__":
    main()
