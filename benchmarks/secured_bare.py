"""What Python's `ssl` gives two processes over loopback that block and do nothing else, no mesh in between: the limit for `tls_bulk`."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import sys
import time
from typing import Any, Dict, Optional, Type, Union

from gpumesh.config import MIB
from gpumesh.network.tls import client_context, server_context

PIECE_BYTES = (
    128 * 1024
)  # Encrypted or decrypted at once; larger ones leave the processor's cache, smaller ones cost more calls.
RECORD_BYTES = 16 * 1024  # What TLS encrypts at once, at most.
TAKE, GIVE, TAKEN = b"t", b"g", b"k"
SPEED_SECONDS = 1
CIPHERS = {  # Of TLS 1.3, with the names that `openssl speed` has for them.
    "TLS_AES_256_GCM_SHA384": "aes-256-gcm",
    "TLS_AES_128_GCM_SHA256": "aes-128-gcm",
    "TLS_CHACHA20_POLY1305_SHA256": "chacha20-poly1305",
}


class SocketEnd:
    """One end that leaves reading and writing to OpenSSL (`ssl.SSLSocket`)."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, is_server: bool) -> None:
        self._tls = context.wrap_socket(sock, server_side=is_server)
        self.cipher = (self._tls.cipher() or ("", "", 0))[0]

    def write(self, data: memoryview) -> None:
        """All of it."""
        for begin in range(0, len(data), PIECE_BYTES):
            self._tls.sendall(data[begin : begin + PIECE_BYTES])

    def read_into(self, memory: memoryview) -> None:
        """As much as fits; ConnectionError if the other end leaves before."""
        received = 0
        while received < len(memory):
            count = self._tls.recv_into(memory[received : received + PIECE_BYTES])
            if not count:
                raise ConnectionError(f"the other end has left after {received:,} of {len(memory):,} bytes")
            received += count

    def close(self) -> None:
        """Hang up."""
        self._tls.close()


class MemoryEnd:
    """One end that reads and writes its socket itself, many records at once (`ssl.MemoryBIO`), as an event loop does."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, is_server: bool) -> None:
        self._socket = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls: Any = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server)
        self._raw = memoryview(bytearray(PIECE_BYTES))
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush()
                self._fill()
        self._flush()
        self.cipher = (self._tls.cipher() or ("", "", 0))[0]

    def write(self, data: memoryview) -> None:
        """All of it."""
        written = 0
        while written < len(data):
            written += self._tls.write(data[written : written + PIECE_BYTES])
            self._flush()

    def read_into(self, memory: memoryview) -> None:
        """As much as fits; ConnectionError if the other end leaves before."""
        received = 0
        while received < len(memory):
            try:
                received += self._tls.read(len(memory) - received, memory[received:])
            except ssl.SSLWantReadError:
                self._fill()

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._socket.sendall(self._outgoing.read())

    def _fill(self) -> None:
        count = self._socket.recv_into(self._raw)
        if not count:
            raise ConnectionError("the other end has left")
        self._incoming.write(self._raw[:count])


ENDS: Dict[str, Type[Union[SocketEnd, MemoryEnd]]] = {"socket": SocketEnd, "memory": MemoryEnd}


class BareCopy:
    """Two ends of the same kind, one of them another process; both end with the block.

    Args:
        kind: One of `ENDS`.
    """

    def __init__(self, kind: str, megabytes: int) -> None:
        self._kind = kind
        self.memory = bytearray(megabytes * MIB)

    def __enter__(self) -> BareCopy:
        command = [sys.executable, "-m", "benchmarks.secured_bare", self._kind, str(len(self.memory))]
        self.other = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert self.other.stdout is not None
        sock = socket.create_connection(("127.0.0.1", int(self.other.stdout.readline())), timeout=30)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._end = ENDS[self._kind](sock, client_context(), is_server=False)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end.close()
        self.other.communicate(timeout=10)

    @property
    def cipher(self) -> str:
        """What the two have agreed on, as TLS names it."""
        return self._end.cipher

    def send(self) -> float:
        """Seconds until the other side says that it has all of our memory."""
        before = time.perf_counter()
        self._end.write(memoryview(TAKE))
        self._end.write(memoryview(self.memory))
        answer = bytearray(1)
        self._end.read_into(memoryview(answer))
        return time.perf_counter() - before

    def receive(self) -> float:
        """Seconds until all of the other side's memory is here: what was sent before."""
        before = time.perf_counter()
        self._end.write(memoryview(GIVE))
        self._end.read_into(memoryview(self.memory))
        return time.perf_counter() - before


def openssl_speed(cipher: str) -> Optional[float]:
    """Bytes per second that the `openssl` command encrypts on one core, a TLS record at a time; None without it.

    Args:
        cipher: As TLS 1.3 names it.
    """
    command, name = shutil.which("openssl"), CIPHERS.get(cipher)
    if command is None or name is None:
        return None
    options = ["-evp", name, "-bytes", str(RECORD_BYTES), "-seconds", str(SPEED_SECONDS), "-mr"]
    done = subprocess.run([command, "speed", *options], check=False, capture_output=True, text=True, timeout=60)
    return parse_speed(done.stdout) if done.returncode == 0 else None


def parse_speed(said: str) -> Optional[float]:
    """Bytes per second in what `openssl speed -mr` prints: `+F:number:cipher:bytes per second`."""
    for line in said.splitlines():
        fields = line.split(":")
        if fields[0] == "+F" and len(fields) == 4:
            try:
                return float(fields[3])
            except ValueError:
                return None
    return None


def answer(kind: str, size: int) -> None:
    """Be the other process: print the port, then take and give as the one who connects says, until he leaves."""
    import tempfile

    from gpumesh.network.certificates import load_or_make_identity

    memory, asked = memoryview(bytearray(size)), bytearray(1)
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        context = server_context(load_or_make_identity(folder))
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        sock, _ = server.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end = ENDS[kind](sock, context, is_server=True)
    try:
        while True:
            end.read_into(memoryview(asked))
            if asked == TAKE:
                end.read_into(memory)
                end.write(memoryview(TAKEN))
            else:
                end.write(memory)
    except (ConnectionError, ssl.SSLEOFError):
        pass  # He has left.
    finally:
        end.close()


if __name__ == "__main__":
    answer(sys.argv[1], int(sys.argv[2]))
