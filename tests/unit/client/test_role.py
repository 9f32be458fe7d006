"""The receive role, also after an interrupt at the worst moment."""

from __future__ import annotations

import threading

from gpumesh.client.role import ReceiveRole


def in_a_thread(function: object) -> None:
    thread = threading.Thread(target=function)  # type: ignore[arg-type]
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


def test_one_thread_has_it_at_a_time() -> None:
    role = ReceiveRole()
    assert role.try_take()
    assert role.is_mine
    seen = []
    in_a_thread(lambda: seen.append((role.is_mine, role.try_take(), role.give())))
    assert seen == [(False, False, None)]
    role.give()
    assert not role.is_mine
    in_a_thread(lambda: seen.append(role.try_take()))
    assert seen[1:] == [True]


def test_an_owner_that_forgot_it_loses_it_to_who_waits() -> None:
    role = ReceiveRole()
    in_a_thread(role.try_take)  # And never gives it back: as if interrupted right behind.
    assert role.take(5)
    assert role.is_mine


def test_an_interrupt_between_the_lock_and_its_owner_is_healed_as_well() -> None:
    role = ReceiveRole()
    role._lock.acquire()
    assert role.take(5)
    assert role.is_mine


def test_an_owner_at_work_keeps_it() -> None:
    started, may_end = threading.Event(), threading.Event()

    def work() -> None:
        assert role.try_take()
        started.set()
        may_end.wait(10)
        role.give()

    role = ReceiveRole(work.__code__)
    thread = threading.Thread(target=work)
    thread.start()
    started.wait(10)
    assert not role.heal()
    assert not role.take(0.25)
    may_end.set()
    thread.join(10)
    assert role.take(5)
