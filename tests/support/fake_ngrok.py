"""A stand-in for ngrok's program: speaks its local API and log lines as pyngrok uses them, and really forwards.

Its "internet" is this machine: a TCP endpoint is a port of its own at 127.0.0.1 whose bytes go to the upstream address as they are, an HTTP
endpoint the same with TLS ended at its edge. How it behaves is in FAKE_NGROK: "" (all is allowed), "no-tcp" (the account may open no TCP
endpoints), "no-account", "sessions" (too many), "dead" (ends once a tunnel is open, when FAKE_NGROK_END exists), "deaf" (tunnels open and
carry nothing), "slow" (never gets ready). FAKE_NGROK_HOST is the address that its endpoints are at, FAKE_NGROK_LOG a file for what happens.

Written for the API of ngrok's agent as pyngrok 7 to 9 use it: /api/tunnels and /api/endpoints.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import signal
import socket
import ssl
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Dict, Optional

MODE = os.environ.get("FAKE_NGROK", "")
HOST = os.environ.get("FAKE_NGROK_HOST", "127.0.0.1")


def note(text: str) -> None:
    """For the test to read."""
    if os.environ.get("FAKE_NGROK_LOG"):
        with open(os.environ["FAKE_NGROK_LOG"], "a") as file:
            file.write(f"{text}\n")


def say(level: str, **fields: str) -> None:
    """A line of its log."""
    rest = " ".join(f'{name}="{value}"' for name, value in fields.items())
    print(f"t=2026-01-01T00:00:00+0000 lvl={level} {rest}", flush=True)


def pump(source: socket.socket, target: socket.socket) -> None:
    """One direction of a connection."""
    with contextlib.suppress(OSError):
        while True:
            data = source.recv(65536)
            if not data:
                break
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


class Endpoint:
    """One way in."""

    def __init__(self, kind: str, upstream: str) -> None:
        host, _, port = re.sub(r"^\w+://", "", upstream).rpartition(":")
        self.upstream = (host or "127.0.0.1", int(port))
        self.listener = socket.create_server((HOST, 0))
        self.context: Optional[ssl.SSLContext] = None
        if kind == "http":
            self.context = edge_context()
        number = self.listener.getsockname()[1]
        self.url = f"{'https' if kind == 'http' else 'tcp'}://{HOST}:{number}"
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.carry, args=(sock,), daemon=True).start()

    def carry(self, sock: socket.socket) -> None:
        if MODE == "deaf":
            sock.close()
            return
        with contextlib.suppress(OSError):
            outer = self.context.wrap_socket(sock, server_side=True) if self.context else sock
            inner = socket.create_connection(self.upstream)
            there = threading.Thread(target=pump, args=(outer, inner), daemon=True)
            there.start()
            pump(inner, outer)
            there.join()
            inner.close()
            outer.close()


def edge_context() -> ssl.SSLContext:
    """TLS of its edge, with a certificate of its own."""
    from gpumesh.network.certificates import load_or_make_identity

    identity = load_or_make_identity(tempfile.mkdtemp(dir=os.environ["HOME"]))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(identity.certificate, identity.key)
    context.set_alpn_protocols(["http/1.1"])
    return context


class Api(http.server.BaseHTTPRequestHandler):
    """What ngrok answers at its web interface."""

    endpoints: Dict[str, Endpoint] = {}  # By name.

    def do_GET(self) -> None:
        found = [self.shown(name, endpoint) for name, endpoint in self.endpoints.items()]
        self.answer(200, {"tunnels": found, "endpoints": found, "uri": self.path})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        upstream = asked.get("addr") or (asked.get("upstream") or {}).get("url")
        url = str(asked.get("url") or "")
        kind = "tcp" if asked.get("proto") == "tcp" or url.startswith("tcp") or str(upstream).startswith("tcp") else "http"
        note(f"asked {kind} {upstream}")
        if kind == "tcp" and MODE == "no-tcp":
            why = "You must add a credit or debit card before you can use TCP endpoints on a free account.\n\nERR_NGROK_8013\n"
            self.answer(502, {"error_code": 103, "status_code": 502, "msg": "failed to start", "details": {"err": why}})
            return
        endpoint = self.endpoints[asked["name"]] = Endpoint(kind, str(upstream))
        self.answer(201, self.shown(asked["name"], endpoint))
        if MODE == "dead":
            threading.Thread(target=end_when_told, daemon=True).start()

    def do_DELETE(self) -> None:
        self.answer(204, None)

    def shown(self, name: str, endpoint: Endpoint) -> Dict[str, Any]:
        kind = endpoint.url.partition(":")[0]
        address = ":".join(map(str, endpoint.upstream))
        return {
            "name": name, "uri": f"/api/endpoints/{name}", "public_url": endpoint.url, "url": endpoint.url, "proto": kind,
            "config": {"addr": address, "inspect": False}, "upstream": {"url": address}, "metrics": {},
        }  # fmt: skip

    def answer(self, code: int, body: Any) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def end_when_told() -> None:
    """End as if ngrok had crashed."""
    while not os.path.exists(os.environ["FAKE_NGROK_END"]):
        time.sleep(0.02)
    os._exit(7)


def install(folder: Path) -> Path:
    """A program in `folder` that is this one."""
    program = folder / "bin" / "ngrok"  # pyngrok keeps a folder of that name at home.
    program.parent.mkdir(parents=True, exist_ok=True)
    root = Path(__file__).resolve().parents[2]
    program.write_text(f'#!/bin/sh\nPYTHONPATH={root} exec {sys.executable} {__file__} "$@"\n')
    program.chmod(0o755)
    return program


def main() -> int:
    note(f"started {os.getpid()} {' '.join(sys.argv[1:])}")
    if sys.argv[1:2] != ["start"]:
        print("ngrok version 3.0.0")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if MODE == "slow":
        say("info", msg="no configuration paths supplied")
        time.sleep(600)
    errors = {
        "no-account": "authentication failed: Usage of ngrok requires a verified account and authtoken. ERR_NGROK_4018",
        "sessions": "authentication failed: Your account is limited to 1 simultaneous ngrok agent sessions. ERR_NGROK_108",
    }
    if MODE in errors:
        say("eror", msg="failed to reconnect session", err=errors[MODE])
        return 1
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Api)
    server.daemon_threads = True
    say("info", msg="starting web service", obj="web", addr=f"127.0.0.1:{server.server_port}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    say("info", msg="client session established", obj="csess")
    say("info", msg="tunnel session started", obj="tunnels.session")
    threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
