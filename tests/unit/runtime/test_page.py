"""Results that wait for company on the page of a process."""

from __future__ import annotations

import os
from typing import Iterator

import pytest

from gpumesh.runtime.page import HELD, PAGE_BYTES, STARTED, Page, create_page_fd


@pytest.fixture
def page() -> Iterator[Page]:
    fd = create_page_fd()
    page = Page(fd)
    os.close(fd)
    yield page
    page.close()


def test_results_are_held_in_order_until_they_are_forgotten(page: Page) -> None:
    page.words[STARTED] = 7
    held = [(1 << 62, 3, 0, b"", 0.5), (5, 1, 2, b"payload", 1.25)]
    assert page.held() == []
    assert [page.hold(*result) for result in held] == [True, True]
    assert page.held() == held
    page.words[HELD] = 0
    assert page.held() == []
    assert page.words[STARTED] == 7


def test_no_more_is_held_than_fits(page: Page) -> None:
    assert not page.hold(1, 1, 0, b"x" * PAGE_BYTES, 0.0)
    count = 0
    while page.hold(count, 1, 0, b"x" * 100, 0.0):
        count += 1
    assert PAGE_BYTES // 160 < count < PAGE_BYTES // 100
    assert [result[0] for result in page.held()] == list(range(count))


def test_what_a_process_has_broken_is_not_read_past_its_end(page: Page) -> None:
    page.hold(1, 1, 0, b"x" * 10, 0.0)
    page.words[HELD] = 1 << 60
    assert page.held()[0] == (1, 1, 0, b"x" * 10, 0.0)
