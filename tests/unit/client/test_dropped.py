"""What a finalizer has done on another thread."""

from __future__ import annotations

import _thread
import threading
from typing import List

import pytest

from gpumesh.client import dropped
from gpumesh.client.dropped import do_soon


def test_it_runs_on_one_other_thread_in_order() -> None:
    threads: List[int] = []
    done = threading.Event()
    for _ in range(5):
        do_soon(lambda: threads.append(threading.get_ident()))
    do_soon(done.set)

    assert done.wait(10)
    assert len(threads) == 5
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()


def test_ctrl_c_in_a_finalizer_is_raised_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()
    is_first = True
    see = dropped._see_to_the_thread

    def interrupted() -> None:
        nonlocal is_first
        if is_first:
            is_first = False
            _thread.interrupt_main()
        see()

    monkeypatch.setattr(dropped, "_see_to_the_thread", interrupted)

    class Dropped:
        def __del__(self) -> None:
            do_soon(done.set)

    it = Dropped()
    with pytest.raises(KeyboardInterrupt):
        del it
        threading.Event().wait(10)

    assert done.wait(10)
