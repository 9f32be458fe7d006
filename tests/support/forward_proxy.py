"""A real HTTP proxy as companies have them for their machines to get out: it knows CONNECT and nothing else.

As a program: `python -m tests.support.forward_proxy HOST PORT [--login USER:PASSWORD] [--refuse STATUS] [--hang-up] [--name NAME=HOST]...`.
It says what it was asked for and what it answered, a line for each request: `CONNECT mesh.example:443 200`. `--name` is its DNS, and
overrides the port, too, when it has one.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import sys
from typing import Dict, List, Mapping

from tests.integration.programs import Program
from tests.support.processes import free_port

LISTENS = "the proxy listens"


class ForwardProxy:
    """Such a proxy in a process of its own on this machine, on a port that it keeps when it is started again.

    Args:
        names: Where names lead that it alone knows: "HOST:PORT".
    """

    def __init__(self, environment: Mapping[str, str], names: Mapping[str, str]) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._environment = environment
        self._names = names
        self._programs: List[Program] = []

    def start(self, *options: str) -> None:
        """Listen; with the words that the program takes. One that ran is ended as by a power cut."""
        self.kill()
        program = Program(command("127.0.0.1", self.port, *options, **self._names), self._environment)
        self._programs.append(program)
        program.wait_for(LISTENS)

    def kill(self) -> None:
        """End it, if it runs."""
        if self._programs:
            self._programs[-1].kill()

    @property
    def asked(self) -> List[str]:
        """What all of them were asked for, and what they answered."""
        return [line for program in self._programs for _, line in program.lines if line != LISTENS]


def command(host: str, port: int, *options: str, **names: str) -> List[str]:
    """What starts it."""
    known = [word for name, where in names.items() for word in ("--name", f"{name}={where}")]
    return [sys.executable, "-u", "-m", "tests.support.forward_proxy", host, str(port), *options, *known]


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
            status = self._judge(method, fields)
            if status == 200:
                host, _, port = self._names.get(target.rpartition(":")[0], target).rpartition(":")
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

    def _judge(self, method: str, fields: Mapping[str, str]) -> int:
        if self._options.hang_up:
            return 0
        if method != "CONNECT":
            return 405
        if self._wanted and fields.get("proxy-authorization") != self._wanted:
            return 407
        refusal: int = self._options.refuse
        return refusal or 200


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
    parser.add_argument("--refuse", type=int, default=0)
    parser.add_argument("--hang-up", action="store_true")
    parser.add_argument("--name", action="append", default=[])
    asyncio.run(_Server(parser.parse_args(words)).serve())


if __name__ == "__main__":
    main(sys.argv[1:])
