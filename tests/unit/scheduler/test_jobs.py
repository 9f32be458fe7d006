"""Which tasks of which jobs the cluster is given: windows, shares, ends, cancelling and trying again."""

from __future__ import annotations

from typing import List, Tuple

from gpumesh.model.jobs import CANCELLED, DONE, FAILED, PENDING, QUEUED, RUNNING
from gpumesh.scheduler.jobs import Job, JobBook, Wanted, job_state


def rows(first: int, count: int, nbytes: int = 10) -> List[Tuple[int, int]]:
    return [(row, nbytes) for row in range(first, first + count)]


def fed(book: JobBook, job: Job) -> List[int]:
    """What the book sends when its one page is read."""
    (page,) = book.wanted()
    assert page.job == job.id
    left = job.first + job.total - 1 - page.after
    found = rows(page.after + 1, min(left, page.limit))
    return book.read(page, found, is_last=left <= page.limit)


def test_a_small_job_is_read_at_once_and_finishes_with_its_last_task() -> None:
    book = JobBook(window=100)
    job = Job("j-1", first=7, total=3)
    book.add(job)

    assert book.wanted() == [Wanted("j-1", after=6, limit=3, limit_bytes=book._window_bytes, turn=0, room=3)]
    assert book.read(Wanted("j-1", 6, 3, 0, 0, 3), rows(7, 3), is_last=True) == [7, 8, 9]
    assert book.wanted() == []
    assert job.counts(running=2) == {PENDING: 1, RUNNING: 2, DONE: 0, FAILED: 0, CANCELLED: 0}

    assert book.ended(7, DONE) == (job, DONE)
    assert book.ended(8, FAILED) == (job, FAILED)
    assert not job.is_finished
    assert book.ended(9, DONE) == (job, DONE)
    assert job.is_finished
    assert job.counts(running=0) == {PENDING: 0, RUNNING: 0, DONE: 2, FAILED: 1, CANCELLED: 0}
    book.finish("j-1")
    assert book.get("j-1") is None


def test_no_more_than_the_window_is_with_the_cluster() -> None:
    book = JobBook(window=100)
    job = Job("j-1", first=1, total=1_000_000)
    book.add(job)

    assert fed(book, job) == list(range(1, 101))
    assert book.wanted() == []
    for row in range(1, 90):
        book.ended(row, DONE)
    assert fed(book, job) == list(range(101, 190))
    assert len(job.fed) == 100


def test_a_few_ends_do_not_cause_a_page_of_a_few_rows() -> None:
    book = JobBook(window=1000)
    job = Job("j-1", first=1, total=5000)
    book.add(job)
    fed(book, job)
    for row in range(1, 100):
        book.ended(row, DONE)

    assert book.wanted() == []

    for row in range(100, 260):
        book.ended(row, DONE)
    (page,) = book.wanted()
    assert (page.after, page.limit) == (1000, 259)


def test_jobs_share_the_window_and_none_waits_for_the_others() -> None:
    book = JobBook(window=1000)
    large = Job("j-1", first=1, total=5000)
    book.add(large)
    fed(book, large)
    for row in range(1, 101):
        book.ended(row, DONE)
    small = Job("j-2", first=10_001, total=50)
    book.add(small)

    (page,) = book.wanted()

    assert (page.job, page.limit) == ("j-2", 50), "the large one has more than its half"


def test_a_job_with_nothing_left_at_the_cluster_gets_whatever_room_there_is() -> None:
    book = JobBook(window=100)
    large, other = Job("j-1", first=1, total=500), Job("j-2", first=10_001, total=500)
    book.add(large)
    fed(book, large)
    book.add(other)
    for row in range(1, 11):
        book.ended(row, DONE)
    assert fed(book, other) == list(range(10_001, 10_011))

    for row in range(10_001, 10_011):
        book.ended(row, DONE)

    assert fed(book, other) == list(range(10_011, 10_021))


def test_a_higher_priority_is_read_first_when_the_window_is_scarce() -> None:
    book = JobBook(window=64)
    low, high = Job("j-1", first=1, total=500), Job("j-2", first=1001, total=500, priority=5)
    book.add(low)
    book.add(high)

    (page,) = book.wanted()

    assert page.job == "j-2"


def test_large_payloads_fill_the_window_by_their_bytes() -> None:
    book = JobBook(window=1000, window_bytes=1000)
    job = Job("j-1", first=1, total=500)
    book.add(job)
    (page,) = book.wanted()
    assert page.limit_bytes == 1000

    book.read(page, rows(1, 2, nbytes=500), is_last=False)

    assert book.wanted() == []
    book.ended(1, DONE)
    (page,) = book.wanted()
    assert (page.after, page.limit_bytes) == (2, 500)


def test_a_page_that_could_not_be_read_is_asked_for_again() -> None:
    book = JobBook(window=100)
    job = Job("j-1", first=1, total=3)
    book.add(job)
    (page,) = book.wanted()

    book.unread(page)

    assert book.wanted() == [page]


def test_cancelling_ends_at_once_what_is_not_with_the_cluster() -> None:
    book = JobBook(window=10)
    job = Job("j-1", first=1, total=25)
    book.add(job)
    fed(book, job)

    assert book.cancel(job) == (list(range(1, 11)), 15)
    assert book.cancel(job) == (list(range(1, 11)), 0), "twice is no more than once"
    assert not job.is_finished
    for row in range(1, 10):
        book.ended(row, CANCELLED)
    book.ended(10, DONE)  # It was faster.

    assert job.is_finished
    assert job.counts(0) == {PENDING: 0, RUNNING: 0, DONE: 1, FAILED: 0, CANCELLED: 24}
    assert job.state(0) == CANCELLED
    assert book.wanted() == []


def test_a_page_that_arrives_after_cancelling_is_dropped() -> None:
    book = JobBook(window=10)
    job = Job("j-1", first=1, total=3)
    book.add(job)
    (page,) = book.wanted()
    book.cancel(job)

    assert book.read(page, rows(1, 3), is_last=True) == []
    assert job.is_finished


def test_only_what_has_no_result_is_tried_again() -> None:
    book = JobBook(window=10)
    job = Job("j-1", first=1, total=3)
    book.add(job)
    fed(book, job)
    book.ended(1, DONE)
    book.ended(2, FAILED)

    assert book.retry(job) == 1

    (page,) = book.wanted()
    assert (page.after, page.limit) == (0, 2), "the one that is wanted, and one that stands in the way"
    assert book.read(page, [(2, 10), (3, 10)], is_last=True) == [2], "the third is with the cluster already"
    assert job.counts(0) == {PENDING: 2, RUNNING: 0, DONE: 1, FAILED: 0, CANCELLED: 0}


def test_what_is_still_being_cancelled_runs_again_when_it_has_ended() -> None:
    book = JobBook(window=2)
    job = Job("j-1", first=1, total=3)
    book.add(job)
    fed(book, job)
    book.cancel(job)

    assert book.retry(job) == 3
    assert book.ended(1, CANCELLED) == (job, PENDING)
    assert book.ended(2, DONE) == (job, DONE)

    (page,) = book.wanted()
    assert (page.after, page.limit) == (0, 2)
    assert book.read(page, [(1, 10), (3, 10)], is_last=True) == [1, 3]


def test_a_page_from_before_a_retry_is_read_again() -> None:
    book = JobBook(window=10)
    job = Job("j-1", first=1, total=12)
    job.ended[FAILED] = 2
    book.add(job)
    (page,) = book.wanted()
    book.retry(job)

    assert book.read(page, rows(3, 10), is_last=True) == [], "what it says of the two that failed is not true any more"
    (page,) = book.wanted()
    assert book.read(page, rows(1, 10), is_last=False) == list(range(1, 11))


def test_an_end_that_nobody_knows_changes_nothing() -> None:
    book = JobBook()

    assert book.ended(99, DONE) == (None, DONE)
    assert book.job_of(99) is None


def test_the_state_of_a_job_follows_from_its_tasks() -> None:
    none = {PENDING: 0, RUNNING: 0, DONE: 0, FAILED: 0, CANCELLED: 0}

    assert job_state({**none, PENDING: 3}, has_started=False) == QUEUED
    assert job_state({**none, PENDING: 3}, has_started=True) == RUNNING
    assert job_state({**none, PENDING: 2, DONE: 1}, has_started=False) == RUNNING
    assert job_state({**none, RUNNING: 1}, has_started=True) == RUNNING
    assert job_state({**none, DONE: 3}, has_started=True) == DONE
    assert job_state({**none, DONE: 2, FAILED: 1}, has_started=True) == FAILED
    assert job_state({**none, FAILED: 2, CANCELLED: 1}, has_started=True) == CANCELLED
    assert job_state(none, has_started=False) == DONE, "a job without tasks"


def test_what_ended_while_a_page_was_read_makes_no_more_room_than_there_was() -> None:
    book = JobBook(window=3)
    job = Job("j-1", first=1, total=9)
    book.add(job)
    fed(book, job)
    book.ended(1, FAILED)
    book.ended(2, FAILED)
    book.retry(job)
    (page,) = book.wanted()
    assert (page.after, page.limit, page.room) == (0, 3, 2)
    book.ended(3, DONE)

    assert book.read(page, [(1, 10), (2, 10), (4, 10)], is_last=False) == [1, 2], "there was room for two"

    book.ended(1, DONE)
    (page,) = book.wanted()
    assert (page.after, page.room) == (2, 2), "nothing was skipped"


def test_what_ended_while_a_page_was_read_does_not_run_again() -> None:
    book = JobBook(window=4)
    job = Job("j-1", first=1, total=9)
    book.add(job)
    fed(book, job)
    book.ended(1, FAILED)
    book.ended(2, FAILED)
    book.retry(job)
    (page,) = book.wanted()
    book.ended(3, DONE)

    assert book.read(page, [(1, 10), (2, 10), (3, 10), (4, 10)], is_last=False) == [1, 2]
