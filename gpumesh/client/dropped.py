"""What has to be done for objects that the collector has dropped: not there, for it may run under any lock, but on a thread of its own."""

from __future__ import annotations

import sys
import threading
from queue import SimpleQueue
from typing import Callable, Optional

from gpumesh.serialization.interrupts import interrupt_again

_waiting: SimpleQueue[Callable[[], None]] = SimpleQueue()  # Its put may be called by the collector, at any moment.
_thread: Optional[threading.Thread] = None


def do_soon(what: Callable[[], None]) -> None:
    """Have this called on another thread; callable from a finalizer. It keeps what it needs alive until then, and must not raise.

    Ctrl-C that comes meanwhile is raised when the finalizer is over.
    """
    if sys.is_finalizing():
        return  # No thread runs any more; the sessions have ended.
    try:
        _waiting.put(what)
        _see_to_the_thread()
    except KeyboardInterrupt:
        _see_to_the_thread()
        interrupt_again()


def _see_to_the_thread() -> None:
    global _thread
    if _thread is None or not _thread.is_alive():
        _thread = threading.Thread(target=_work, name="gpumesh-dropped", daemon=True)
        try:
            _thread.start()
        except RuntimeError:
            pass  # The interpreter has begun to end.


def _work() -> None:
    while True:
        what = _waiting.get()
        what()
        del what
