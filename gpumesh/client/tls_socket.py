"""A socket inside TLS for a link: one thread sends while another receives. Loaded where TLS is spoken.

Promises:

1. OpenSSL's object is used by one thread at a time; neither side waits for the other longer than for TURN_BYTES to be en- or decrypted.
2. What the peer has sent is handed out as it comes: as much as there is room for, decrypted into its place. `pending` is what did not
   fit; no poll of the socket tells of it.
3. What `send` and `sendmsg` say is taken has left this process. What they did not take has to be offered again first, as it is.
4. A connection that ends without the peer's goodbye of TLS is an end like any other: whether it was meant is the mesh's own business.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
import threading
from typing import Any, Callable, List, Sequence

from gpumesh.config import KIB

RECORD_BYTES = 16 * KIB  # TLS encrypts no more at once.
TURN_BYTES = 64 * KIB  # Encrypted under one hold of the lock: 20 us.


class TlsSocket:
    """See the module's promises.

    Args:
        tls: Connected, after its handshake, non-blocking; ours from now on.
    """

    def __init__(self, tls: ssl.SSLSocket) -> None:
        self.protocol = tls.selected_alpn_protocol() or ""
        self._tls = tls
        self._lock = threading.Lock()
        self._unsent: Any = None  # OpenSSL has begun with it, and wants to hear of nothing else first.

    def fileno(self) -> int:
        """For polling."""
        return self._tls.fileno()

    def recv_into(self, buffer: memoryview) -> int:
        """Bytes received, as many as are there and fit; 0 at the end.

        Raises:
            BlockingIOError: Nothing is there.
            OSError: The connection is broken.
        """
        room = len(buffer)
        filled = 0
        read: Callable[[int, memoryview], Any] = self._tls.read
        with self._lock:
            while filled < room:
                try:
                    count = read(room - filled, buffer[filled:] if filled else buffer)
                except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    if filled:
                        break
                    raise BlockingIOError from None
                except OSError:
                    if filled:
                        break  # The next call says it again.
                    raise
                except ValueError:
                    raise _closed() from None
                filled += count
                if count < RECORD_BYTES:
                    break  # The last one for now, most likely; or the end.
        return filled

    def pending(self) -> int:
        """Bytes that are decrypted and have not been handed out."""
        with self._lock:
            return self._tls.pending()

    def send(self, data: Any) -> int:
        """Bytes taken: none while the socket is full."""
        return self.sendmsg((data,))

    def sendmsg(self, parts: Sequence[Any]) -> int:
        """The same of several buffers in a row."""
        with self._lock:
            data = self._unsent if self._unsent is not None else _first_of(parts)
            self._unsent = data
            try:
                count = self._tls.write(data)
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return 0
            except ValueError:
                raise _closed() from None
            self._unsent = None
            return count

    def shutdown(self, how: int) -> None:
        """End both directions of the connection below; whoever is about to read or write finds that out from OpenSSL."""
        socket.socket.shutdown(self._tls, how)  # The class's own takes TLS off, under the feet of whoever is using it.

    def close(self) -> None:
        """Give the file descriptor back."""
        self._tls.close()


def _closed() -> OSError:
    """What a plain socket says that another thread has closed."""
    return OSError(errno.EBADF, os.strerror(errno.EBADF))


def _first_of(parts: Sequence[Any]) -> Any:
    """What is encrypted next: small buffers joined to one record, of a large one the beginning."""
    first = parts[0]
    size = len(first)
    if size > TURN_BYTES:
        return memoryview(first)[:TURN_BYTES]
    if size >= RECORD_BYTES or len(parts) == 1:
        return first
    taken: List[Any] = []
    room = RECORD_BYTES
    for part in parts:
        size = len(part)
        if size > room:
            taken.append(memoryview(part)[:room])
            break
        taken.append(part)
        room -= size
        if not room:
            break
    return b"".join(taken)
