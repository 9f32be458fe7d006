"""A real HTTP proxy as companies have them for their machines to get out: it knows CONNECT and nothing else.

As a program: `python -m tests.support.forward_proxy HOST PORT [--login USER:PASSWORD] [--name NAME=WHERE]...`. It says what it was asked for
and what it answered, a line for each request: `CONNECT mesh.example.org:443 200`. WHERE is HOST:PORT, a status to refuse it with, or nothing,
and it hangs up.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import sys
from typing import Dict, List, Mapping

LISTENS = "the proxy listens"


def command(host: str, port: int, login: str, names: Mapping[str, str]) -> List[str]:
    """What starts it."""
    known = [word for name, where in names.items() for word in ("--name", f"{name}={where}")]
    return [sys.executable, "-u", "-m", "tests.support.forward_proxy", host, str(port), "--login", login, *known]


class _Server:
    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._names: Dict[str, str] = dict(each.split("=", 1) for each in options.name)
        pair = base64.b64encode(options.login.encode()).decode() if options.login else ""
        self._wanted = f"Basic {pair}" if pair else ""

    async def serve(self) -> None:
        server = await asyncio.start_server(self._handle, self._options.host, self._options.port)
        print(LISTENS)
        await server.serve_forever()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            method, target, _ = head[0].split(" ")
            fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
            where = self._names.get(target.rpartition(":")[0], target)
            status = self._judge(method, fields, where)
            if status == 200:
                host, _, port = where.rpartition(":")
                try:
                    inner = await asyncio.open_connection(host.strip("[]"), int(port))
                except OSError:
                    status = 502
            print(method, target, status or "nothing")
            if status == 200:
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                await asyncio.gather(_pass_on(reader, inner[1]), _pass_on(inner[0], writer))
            elif status:
                ask = 'Proxy-Authenticate: Basic realm="here"\r\n' if status == 407 else ""
                writer.write(f"HTTP/1.1 {status} No\r\n{ask}Content-Length: 3\r\n\r\nno\n".encode())
                await writer.drain()

    def _judge(self, method: str, fields: Mapping[str, str], where: str) -> int:
        if method != "CONNECT":
            return 405
        if self._wanted and fields.get("proxy-authorization") != self._wanted:
            return 407
        return 200 if ":" in where else int(where or 0)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.closing(writer), contextlib.suppress(OSError):
        while True:
            data = await reader.read(1 << 18)
            if not data:
                return
            writer.write(data)
            await writer.drain()


def main(words: List[str]) -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("--login", default="")
    parser.add_argument("--name", action="append", default=[])
    asyncio.run(_Server(parser.parse_args(words)).serve())


if __name__ == "__main__":
    main(sys.argv[1:])
