"""Fixtures of tests between hosts; tests/support/hosts.py makes the hosts."""

from __future__ import annotations

import contextlib
from typing import Callable, Iterator

import pytest

from tests.support.hosts import Hosts, why_not


@pytest.fixture
def make_hosts() -> Iterator[Callable[..., Hosts]]:
    """Hosts as asked for, which go with the test whatever becomes of it; it is skipped where there are none."""
    if why_not():
        pytest.skip(why_not())
    with contextlib.ExitStack() as ends:

        def make(count: int = 2, **options: str) -> Hosts:
            try:
                made = Hosts(count, **options)
            except RuntimeError as error:
                pytest.skip(f"no network namespaces here: {error}")
            ends.callback(made.close)
            return made

        yield make


@pytest.fixture
def hosts(make_hosts: Callable[..., Hosts]) -> Hosts:
    """Two hosts."""
    return make_hosts(2)
