"""The reference for what goes over TCP: real sockets, a real process."""

from __future__ import annotations

import sys

import pytest

from benchmarks.plain_copy import FRESH, REUSED, PlainCopy

numpy = pytest.importorskip("numpy")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="part of the harness")


@pytest.mark.parametrize("memory", [FRESH, REUSED])
def test_copies_of_any_size_arrive_and_the_receiver_ends_with_the_block(memory: str) -> None:
    with PlainCopy(memory) as plain:
        seconds = [plain.copy(numpy.arange(count, dtype=numpy.float64)) for count in (1, 300_000, 300_000, 2)]

    assert all(0 < elapsed < 10 for elapsed in seconds)
    assert plain.receiver.returncode == 0


def test_a_receiver_that_is_gone_is_an_error() -> None:
    with PlainCopy(FRESH) as plain:
        plain.receiver.kill()
        plain.receiver.wait(10)

        with pytest.raises(ConnectionError):
            plain.copy(numpy.zeros(3_000_000))
