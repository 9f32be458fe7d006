"""Ctrl-C that comes while a finalizer runs. Python lets no exception out of one: it prints the KeyboardInterrupt and goes on."""

from __future__ import annotations

import _thread


def interrupt_again() -> None:
    """For a finalizer that has caught a KeyboardInterrupt: have it come again as soon as the finalizer has returned.

    Another thread raises it: this one would be interrupted by its own call, and still in the finalizer.
    """
    try:
        _thread.start_new_thread(_thread.interrupt_main, ())
    except RuntimeError:
        pass  # No thread starts any more: the interpreter is ending, as it was asked to.
