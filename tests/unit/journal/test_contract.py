"""What every journal does, with a file or without."""

from __future__ import annotations

import threading
from typing import Any, List, Optional, Tuple

import pytest

from gpumesh.config import EVENTS_KEPT, JOURNAL_TASK_LOG_BYTES
from gpumesh.errors import JournalError
from gpumesh.journal.base import EventRecord, JobRecord, LogPart, TaskRecord, WorkerRecord
from tests.support.journals import Answers, done, new_job

DIGEST = b"d" * 16


def test_a_job_comes_in_parts_and_is_there_when_it_is_accepted(answers: Answers) -> None:
    journal = answers.journal
    rows: List[int] = []

    begun, first, second = answers.synced(
        lambda on_synced: rows.append(journal.begin_job(new_job("j-1111"), 3, code=None, on_synced=on_synced)),
        lambda on_synced: journal.add_payloads("j-1111", 0, [(0, b"a"), (7, b"")], on_synced),
        lambda on_synced: journal.add_payloads("j-1111", 2, [(65535, b"c" * 100)], on_synced),
    )
    assert [begun, first, second] == [None, None, None]
    assert answers.read(lambda reader: (reader.jobs(), reader.unfinished(), reader.job("j-1111"), reader.tasks("j-1111"))) == (
        [], [], None, [],
    )  # fmt: skip

    assert answers.synced(lambda on_synced: journal.accept_job("j-1111", on_synced)) == [None]

    record = JobRecord(
        "j-1111", "name of j-1111", "work/train.py", b"", b"options", 1000.0, "queued", 0.0, rows[0], 3, {"pending": 3}
    )
    assert answers.read(lambda reader: (reader.jobs(), reader.unfinished(), reader.job("j-1111"))) == (
        [record],
        [record],
        record,
    )
    tasks = [
        TaskRecord(rows[0] + place, "j-1111", variant, "pending", 0, "", 0.0, 0.0, "", "", payload, None)
        for place, (variant, payload) in enumerate([(0, b"a"), (7, b""), (65535, b"c" * 100)])
    ]
    assert answers.read(lambda reader: reader.tasks("j-1111", payloads=True)) == tasks
    assert answers.read(lambda reader: reader.tasks("j-1111")) == [task._replace(payload=None) for task in tasks]
    assert answers.read(lambda reader: reader.task(rows[0] + 1)) == tasks[1]


def test_the_rows_of_jobs_follow_each_other_and_are_never_given_again(answers: Answers) -> None:
    first = answers.submit("j-1111", [b"1", b"2", b"3"])
    empty = answers.submit("j-2222", [])
    third = answers.submit("j-3333", [b"1"])

    assert [first, empty, third] == [1, 4, 5]
    assert answers.read(lambda reader: [(job.id, job.tasks, job.counts) for job in reader.jobs()]) == [
        ("j-1111", 3, {"pending": 3}),
        ("j-2222", 0, {}),
        ("j-3333", 1, {"pending": 1}),
    ]
    assert answers.read(lambda reader: [task and task.job_id for task in map(reader.task, (0, 3, 4, 5, 6))]) == [
        None, "j-1111", None, "j-3333", None,
    ]  # fmt: skip


def test_a_job_that_is_known_already_is_refused_and_stays_as_it_was(answers: Answers) -> None:
    answers.submit("j-1111", [b"1"])

    with pytest.raises(JournalError, match="there is a job j-1111 already"):
        answers.submit("j-1111", [b"2", b"3"])

    assert answers.read(lambda reader: [task.payload for task in reader.tasks("j-1111", payloads=True)]) == [b"1"]


def test_an_incomplete_job_is_not_accepted(answers: Answers) -> None:
    journal = answers.journal
    errors = answers.synced(
        lambda on_synced: journal.begin_job(new_job("j-1111"), 3, code=None, on_synced=on_synced),
        lambda on_synced: journal.add_payloads("j-1111", 1, [(0, b"b")], on_synced),
        lambda on_synced: journal.add_payloads("j-1111", 1, [(0, b"B"), (0, b"c"), (0, b"d")], on_synced),
        lambda on_synced: journal.add_payloads("j-9999", 0, [(0, b"b")], on_synced),
        lambda on_synced: journal.add_payloads("j-1111", 2, [(65536, b"c")], on_synced),
        lambda on_synced: journal.accept_job("j-1111", on_synced),
    )

    assert [error and str(error) for error in errors] == [
        None,
        None,
        "job j-1111 has 3 tasks, but payloads came for 1 to 3",
        "no job j-9999 is being submitted",
        "job j-1111: a variant is a number from 0 to 65535",
        "job j-1111 is not complete: payloads of 1 of its 3 tasks came",
    ]


def test_the_same_part_once_more_changes_nothing(answers: Answers) -> None:
    journal = answers.journal
    part = [(0, b"a"), (1, b"b")]
    errors = answers.synced(
        lambda on_synced: journal.begin_job(new_job("j-1111"), 3, code=None, on_synced=on_synced),
        lambda on_synced: journal.add_payloads("j-1111", 0, part, on_synced),
        lambda on_synced: journal.add_payloads("j-1111", 2, [(2, b"c")], on_synced),
        lambda on_synced: journal.add_payloads("j-1111", 0, part, on_synced),
        lambda on_synced: journal.accept_job("j-1111", on_synced),
    )

    assert errors == [None] * 5
    assert answers.read(lambda reader: [(task.variant, task.payload) for task in reader.tasks("j-1111", payloads=True)]) == [
        (0, b"a"), (1, b"b"), (2, b"c"),
    ]  # fmt: skip


def test_a_discarded_job_is_gone_and_can_be_submitted_again(answers: Answers) -> None:
    journal = answers.journal
    answers.synced(lambda on_synced: journal.begin_job(new_job("j-1111"), 2, code=None, on_synced=on_synced))
    journal.discard_job("j-1111")

    assert [str(error) for error in answers.synced(lambda on_synced: journal.accept_job("j-1111", on_synced))] == [
        "no job j-1111 is being submitted"
    ]
    row = answers.submit("j-1111", [b"x"])
    journal.discard_job("j-1111")

    assert answers.read(lambda reader: [(job.id, job.first_row) for job in reader.jobs()]) == [("j-1111", row)]


def test_what_has_ended_is_told_with_its_result(answers: Answers) -> None:
    first = answers.submit("j-1111", [b"a", b"b", b"c"])

    answers.end(done(first, b"41"), done(first + 2, b"", status="failed", attempts=3)._replace(error="it broke", result=None))
    answers.end(done(first, b"42"))

    tasks = answers.read(lambda reader: reader.tasks("j-1111"))
    assert [(task.status, task.attempts, task.worker, task.seconds, task.ended, task.error, task.result) for task in tasks] == [
        ("done", 1, "worker", 0.5, 1500.0, "", b"42"),
        ("pending", 0, "", 0.0, 0.0, "", None),
        ("failed", 3, "worker", 0.5, 1500.0, "it broke", None),
    ]
    assert answers.read(lambda reader: [task.result for task in reader.tasks("j-1111", results=False)]) == [None] * 3
    assert answers.read(lambda reader: reader.jobs()[0].counts) == {"done": 1, "failed": 1, "pending": 1}


def test_text_that_is_no_text_is_kept_as_far_as_it_is(answers: Answers) -> None:
    first = answers.submit("j-1111", [b"a"])

    answers.end(done(first)._replace(error="half \udce9 a ch\u00e4racter"))

    assert answers.read(lambda reader: reader.tasks("j-1111")[0].error).endswith(" a ch\u00e4racter")


def test_pending_tasks_are_read_in_pages(answers: Answers) -> None:
    first = answers.submit("j-1111", [bytes([65 + place]) * 10 for place in range(10)])
    answers.end(done(first + 1), done(first + 2), done(first + 5))
    answers.submit("j-2222", [b"another"])

    def page(after: int, limit: int = 100, max_bytes: int = 1000) -> List[int]:
        tasks = answers.read(lambda reader: reader.pending("j-1111", after=after, limit=limit, max_bytes=max_bytes))
        assert all(task.payload == bytes([65 + task.row - first]) * 10 for task in tasks)
        return [task.row - first for task in tasks]

    assert page(0) == [0, 3, 4, 6, 7, 8, 9]
    assert page(first + 3) == [4, 6, 7, 8, 9]
    assert page(0, limit=2) == [0, 3]
    assert page(0, max_bytes=35) == [0, 3, 4]
    assert page(0, max_bytes=1) == [0]
    assert page(first + 9) == []
    assert page(0, limit=0) == []
    assert answers.read(lambda reader: reader.pending("j-9999", after=0, limit=10, max_bytes=10)) == []


def test_all_tasks_are_read_in_pages(answers: Answers) -> None:
    first = answers.submit("j-1111", [b"x" * 10] * 10)
    answers.end(done(first + 4, b"y" * 20))

    def page(**how: int) -> List[int]:
        return [task.row - first for task in answers.read(lambda reader: reader.tasks("j-1111", payloads=True, **how))]

    assert page(first=3, limit=4) == [3, 4, 5, 6]
    assert page(first=8, limit=4) == [8, 9]
    assert page(first=10) == []
    assert page(first=3, max_bytes=42) == [3, 4]  # The history of one that ended counts as well.
    assert page(first=3, max_bytes=41) == [3]
    assert page(max_bytes=0) == [0]


def test_started_tasks_are_told_until_they_end_or_are_retried(answers: Answers) -> None:
    first = answers.submit("j-1111", [b"a", b"b", b"c", b"d"])
    other = answers.submit("j-2222", [b"e"])
    journal = answers.journal

    answers.synced(lambda on_synced: journal.mark_started([first, first + 1, first + 2, other], on_synced))
    answers.end(done(first + 1, status="failed"))
    answers.synced(lambda on_synced: journal.mark_started([first + 1], on_synced))

    assert answers.read(lambda reader: [(task.row - first, task.job_id, task.payload, task.status) for task in reader.started()]) == [
        (0, "j-1111", b"a", "pending"), (2, "j-1111", b"c", "pending"), (4, "j-2222", b"e", "pending"),
    ]  # fmt: skip
    assert answers.read(lambda reader: reader.jobs()[0].counts) == {"pending": 3, "failed": 1}
    assert len(answers.read(lambda reader: reader.pending("j-1111", after=0, limit=9, max_bytes=99))) == 3


def test_cancelling_ends_all_that_is_pending_but_what_still_runs(answers: Answers) -> None:
    first = answers.submit("j-1111", [b"a", b"b", b"c", b"d", b"e"])
    journal = answers.journal
    answers.end(done(first))
    answers.synced(lambda on_synced: journal.mark_started([first + 1, first + 2], on_synced))

    answers.synced(
        lambda on_synced: journal.cancel_pending(
            "j-1111", "cancelled", status="cancelling", except_rows=[first + 1, first + 3, first], on_synced=on_synced
        )
    )

    def states() -> List[str]:
        return [task.status for task in answers.read(lambda reader: reader.tasks("j-1111"))]

    assert states() == ["done", "pending", "cancelled", "pending", "cancelled"]
    assert answers.read(lambda reader: [task.ended for task in reader.tasks("j-1111")]) == [1500.0, 0.0, 1234.0, 0.0, 1234.0]
    assert answers.read(lambda reader: [task.row - first for task in reader.pending("j-1111", after=0, limit=9, max_bytes=9)]) == [
        1, 3,
    ]  # fmt: skip
    job = answers.read(lambda reader: reader.job("j-1111"))
    assert job is not None
    assert (job.status, job.counts) == ("cancelling", {"done": 1, "pending": 2, "cancelled": 2})

    answers.end(done(first + 1, status="cancelled"), done(first + 2), done(first + 3, status="failed"))
    answers.finish("j-1111", status="cancelled")

    assert states() == ["done", "cancelled", "done", "failed", "cancelled"]
    assert answers.read(lambda reader: reader.unfinished()) == []
    assert answers.read(lambda reader: [(job.status, job.finished, job.counts) for job in reader.jobs()]) == [
        ("cancelled", 2000.0, {"done": 2, "cancelled": 2, "failed": 1})
    ]


def test_a_job_that_is_retried_has_its_failures_pending_again(answers: Answers) -> None:
    first = answers.submit("j-1111", [b"a", b"b", b"c", b"d"])
    journal = answers.journal
    answers.end(done(first, b"1"), done(first + 1, status="failed"))
    answers.synced(lambda on_synced: journal.cancel_pending("j-1111", "cancelled", status="cancelled", on_synced=on_synced))
    answers.finish("j-1111", status="cancelled")

    assert answers.synced(lambda on_synced: journal.retry_job("j-1111", ["failed"], status="queued", on_synced=on_synced)) == [
        None
    ]

    def states() -> List[str]:
        return [task.status for task in answers.read(lambda reader: reader.tasks("j-1111"))]

    assert states() == ["done", "pending", "cancelled", "cancelled"]
    assert answers.read(lambda reader: [(job.status, job.finished, job.counts) for job in reader.unfinished()]) == [
        ("queued", 0.0, {"done": 1, "pending": 1, "cancelled": 2})
    ]

    answers.synced(lambda on_synced: journal.retry_job("j-1111", ["failed", "cancelled"], status="queued", on_synced=on_synced))

    assert states() == ["done", "pending", "pending", "pending"]
    assert answers.read(lambda reader: [task.result for task in reader.tasks("j-1111")]) == [b"1", None, None, None]
    assert [
        str(error) for error in answers.synced(lambda on_synced: journal.retry_job("j-9", [], status="", on_synced=on_synced))
    ] == ["there is no job j-9"]


def test_facts_about_unknown_jobs_and_tasks_change_nothing(answers: Answers) -> None:
    journal = answers.journal
    errors = answers.synced(
        lambda on_synced: journal.finish_job("j-9999", "done", 1.0, on_synced),
        lambda on_synced: journal.set_job("j-9999", "running", on_synced),
        lambda on_synced: journal.cancel_pending("j-9999", "cancelled", status="cancelled", on_synced=on_synced),
    )
    journal.discard_job("j-9999")

    assert errors == [None] * 3
    assert answers.read(lambda reader: reader.jobs()) == []


def test_the_status_of_a_job_is_the_runtimes_word(answers: Answers) -> None:
    answers.submit("j-1111", [b"1"])

    answers.synced(lambda on_synced: answers.journal.set_job("j-1111", "running", on_synced))

    assert answers.read(lambda reader: [job.status for job in reader.unfinished()]) == ["running"]


def test_a_unique_beginning_of_an_id_will_do(answers: Answers) -> None:
    for job_id in ("j-1111", "j-1122", "j-2222"):
        answers.submit(job_id, [b"1"])

    def found(text: str) -> Optional[str]:
        job = answers.read(lambda reader: reader.job(text))
        return job and job.id

    assert [found(text) for text in ("j-2222", "j-22", "j-11", "j-112", "j-2", "j-22222", "")] == [
        "j-2222", "j-2222", None, "j-1122", None, None, None,
    ]  # fmt: skip


def test_the_newest_jobs_are_listed_oldest_first(answers: Answers) -> None:
    for number in range(5):
        answers.submit(f"j-{number}", [b"1"])

    assert answers.read(lambda reader: [job.id for job in reader.jobs(3)]) == ["j-2", "j-3", "j-4"]
    assert answers.read(lambda reader: reader.jobs(0)) == []


def test_the_tasks_of_many_jobs_are_counted_together(answers: Answers) -> None:
    for number in range(60):
        first = answers.submit(f"j-{number:04}", [b"1"] * 3)
        answers.end(*[done(first + place) for place in range(number % 4)][:3])
    answers.synced(lambda on_synced: answers.journal.mark_started([1], on_synced))
    answers.finish("j-0003")

    expected = [{"done": min(number % 4, 3), "pending": 3 - number % 4} for number in range(60)]
    found = answers.read(lambda reader: [job.counts for job in reader.jobs()])
    assert found == [{status: count for status, count in counts.items() if count} for counts in expected]
    assert len(answers.read(lambda reader: reader.unfinished())) == 59


def test_a_folder_is_kept_once_and_needs_not_come_again(answers: Answers) -> None:
    journal = answers.journal
    assert not journal.has_code(DIGEST)
    with pytest.raises(JournalError, match="folder of job j-0000 is not kept here any more; submit the job again"):
        answers.submit("j-0000", [b"1"], code=DIGEST)

    answers.submit("j-1111", [b"1"], code=DIGEST, archive=b"archive")

    assert journal.has_code(DIGEST)
    answers.submit("j-2222", [b"1"], code=DIGEST)
    assert answers.read(lambda reader: (reader.code(DIGEST), reader.code(b"e" * 16))) == (b"archive", None)
    assert answers.read(lambda reader: [job.code for job in reader.jobs()]) == [DIGEST, DIGEST]


def test_output_is_kept_in_order_and_told_from_where_one_has_read(answers: Answers) -> None:
    first = answers.submit("j-1111", [b"1", b"2"])
    journal = answers.journal
    journal.append_log(first, 1, 1, b"hello ")
    journal.append_log(first + 1, 1, 1, b"other")
    journal.append_log(first, 1, 2, b"")
    journal.append_log(first, 2, 2, b"world")

    assert answers.read(lambda reader: reader.log(first)) == [LogPart(0, 1, 1, b"hello "), LogPart(6, 2, 2, b"world")]
    assert answers.read(lambda reader: reader.log(first, 3)) == [LogPart(3, 1, 1, b"lo "), LogPart(6, 2, 2, b"world")]
    assert answers.read(lambda reader: reader.log(first, 6)) == [LogPart(6, 2, 2, b"world")]
    assert answers.read(lambda reader: (reader.log(first, 11), reader.log(first, 99), reader.log(first + 2))) == ([], [], [])


def test_the_output_of_a_job_is_told_as_it_came(answers: Answers) -> None:
    first = answers.submit("j-1111", [b"1", b"2"])
    other = answers.submit("j-2222", [b"1"])
    journal = answers.journal
    for row, data in [(first, b"a" * 10), (other, b"b"), (first + 1, b"c" * 10), (first, b"d" * 10)]:
        journal.append_log(row, 1, 1, data)

    def log(**how: Any) -> List[Tuple[int, int, bytes]]:
        parts = answers.read(lambda reader: reader.job_log("j-1111", **{"max_bytes": 1000, **how}))
        assert all((part.attempt, part.stream) == (1, 1) for part in parts)
        return [(part.number, part.row - first, part.data[:1]) for part in parts]

    whole = log()
    numbers = [number for number, _, _ in whole]
    assert [part[1:] for part in whole] == [(0, b"a"), (1, b"c"), (0, b"d")]
    assert numbers == sorted(numbers)
    assert log(after=numbers[0]) == whole[1:]
    assert log(after=numbers[-1]) == []
    assert log(row=first) == [whole[0], whole[2]]
    assert log(row=first, after=numbers[0]) == [whole[2]]
    assert log(row=other) == []
    assert log(max_bytes=20) == whole[:2]
    assert log(max_bytes=0) == whole[:1]
    assert answers.read(lambda reader: reader.job_log("j-9999", max_bytes=10)) == []


def test_a_read_that_breaks_is_answered_all_the_same(answers: Answers) -> None:
    came: List[object] = []

    answers.journal.read(lambda reader: 1 / 0, lambda found, error: came.append((found, str(error))))

    with pytest.raises(ZeroDivisionError):
        answers.turns.until(lambda: len(came) == 2)
    assert came == [(None, "reading the database of jobs failed; the log says why")]


def test_only_the_end_of_much_output_is_kept(answers: Answers) -> None:
    first = answers.submit("j-1111", [b"1"])
    whole = b"".join(b"%06d\n" % number for number in range(100_000))  # 700 KB.
    for start in range(0, len(whole), 10_000):
        answers.journal.append_log(first, 1, 1, whole[start : start + 10_000])

    parts = answers.read(lambda reader: reader.log(first))

    kept = b"".join(part.data for part in parts)
    assert parts[0].start == len(whole) - len(kept)
    assert whole.endswith(kept)
    assert JOURNAL_TASK_LOG_BYTES - 10_000 <= len(kept) <= JOURNAL_TASK_LOG_BYTES * 5 // 4

    answers.journal.append_log(first, 1, 1, whole)

    (part,) = answers.read(lambda reader: reader.log(first))
    assert part == LogPart(2 * len(whole) - JOURNAL_TASK_LOG_BYTES, 1, 1, whole[-JOURNAL_TASK_LOG_BYTES:])


def test_events_are_kept_up_to_a_limit(answers: Answers) -> None:
    events = [EventRecord(number, f"t{number}", "joined", f"worker {number}", "{}") for number in range(1, EVENTS_KEPT + 11)]
    for event in events:
        answers.journal.note_event(event)

    assert answers.read(lambda reader: reader.events()) == events[-EVENTS_KEPT:]
    assert answers.read(lambda reader: reader.events(after=EVENTS_KEPT + 8)) == events[-2:]
    assert answers.read(lambda reader: reader.events(limit=2)) == events[-2:]


def test_the_workers_are_those_that_are_connected(answers: Answers) -> None:
    journal = answers.journal
    journal.worker_joined(WorkerRecord("b", "second", 20.0))
    journal.worker_joined(WorkerRecord("a", "first", 10.0))
    journal.worker_joined(WorkerRecord("c", "third", 30.0))
    journal.worker_left("b")
    journal.worker_left("x")

    assert answers.read(lambda reader: reader.workers()) == [WorkerRecord("a", "first", 10.0), WorkerRecord("c", "third", 30.0)]


def test_answers_come_in_order_on_the_loop_and_never_from_within_the_call(answers: Answers) -> None:
    journal = answers.journal
    order: List[str] = []
    threads: List[threading.Thread] = []

    def told(what: str) -> None:
        order.append(what)
        threads.append(threading.current_thread())

    first = answers.submit("j-1111", [b"1"])
    journal.mark_started([first], lambda error: told("started"))
    journal.end_tasks([done(first)], lambda error: told("ended"))
    journal.read(lambda reader: reader.task(first), lambda task, error: told(f"read {task and task.status}"))
    assert order == []
    journal.finish_job("j-1111", "done", 2000.0, lambda error: told("finished"))

    answers.turns.until(lambda: len(order) == 4)

    assert [what for what in order if "read" not in what] == ["started", "ended", "finished"]
    assert "read done" in order
    assert set(threads) == {threading.main_thread()}


def test_a_callback_that_raises_keeps_no_other_from_being_called(answers: Answers) -> None:
    first = answers.submit("j-1111", [b"1"])
    journal = answers.journal
    came: List[int] = []

    def broken(error: object) -> None:
        raise ZeroDivisionError

    journal.mark_started([first], broken)
    journal.mark_started([first], lambda error: came.append(1))

    with pytest.raises(ZeroDivisionError):
        answers.turns.until(lambda: came)
    answers.turns.until(lambda: came)


def test_a_journal_says_whose_it_is_and_may_be_closed_twice(answers: Answers) -> None:
    assert len(answers.journal.mesh_id) == 16
    assert answers.journal.generation == 1
    assert answers.journal.trouble is None
    assert not answers.journal.is_pressed
    answers.journal.close()
    answers.journal.close()
