"""Jobs between a journal in memory and a coordinator that writes down what it is asked: answers, windows, ends, restarts, refusals."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

import pytest

from gpumesh.config import JOB_NEWS_SECONDS, JOB_ONCE_TASKS, JOB_PARTS_AHEAD
from gpumesh.errors import JournalError
from gpumesh.journal.base import OnSynced, TaskEnd
from gpumesh.journal.memory import MemoryJournal
from gpumesh.model.jobs import CANCELLED, DONE, FAILED, PENDING, RUNNING, JobSpec, job_id
from gpumesh.model.outcomes import Status
from gpumesh.model.payloads import OutOfBand
from gpumesh.model.resources import Requirement
from gpumesh.model.tasks import TaskSpec
from gpumesh.protocol.messages import ChangeJob, JobPayloads, Query, SubmitJob
from gpumesh.runtime.job_service import JobService

CODE = bytes(range(16))
PART = bytes(range(16, 32))
FUNCTION = bytes(range(32, 48))
SPEC = TaskSpec(FUNCTION, "train.py", placement_timeout=-1.0, code=CODE, script="train.py")
KEY = bytes(range(16))
JOB = job_id(KEY)
OTHER = bytes(range(1, 17))  # Another's key.
ANN, BOB = 7, 8
OK, RAISED, LOST = int(Status.OK), int(Status.RAISED), int(Status.LOST)


class Timer:
    def __init__(self, delay: float, call: Callable[[], None]) -> None:
        self.delay = delay
        self.call = call
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Clock:
    """The part of a loop that is needed; time passes when `ring` is called."""

    def __init__(self) -> None:
        self.timers: List[Timer] = []

    def call_later(self, delay: float, call: Callable[..., None], *arguments: Any) -> Timer:
        timer = Timer(delay, lambda: call(*arguments))
        self.timers.append(timer)
        return timer

    def ring(self) -> None:
        self.rung(float("inf"))

    def rung(self, seconds: float) -> None:
        """All that were to ring within so many seconds ring now."""
        due = [timer for timer in self.timers if timer.delay <= seconds]
        self.timers = [timer for timer in self.timers if timer.delay > seconds]
        for timer in due:
            if not timer.is_cancelled:
                timer.call()


class Coordinator:
    """Writes down what it is asked."""

    def __init__(self) -> None:
        self.answers: Dict[Tuple[int, int], Any] = {}
        self.runs: List[Tuple[int, List[int], List[Any], bool]] = []
        self.cancelled: List[Tuple[List[int], bool]] = []
        self.specs: Dict[int, TaskSpec] = {}
        self.code: Dict[bytes, Any] = {CODE: b"list", PART: b"files"}  # As clients have defined it.
        self.defined: List[bytes] = []
        self.executing: Dict[int, Tuple[str, int, float]] = {}
        self.unable: List[Tuple[List[int], str]] = []
        self.attempts: Dict[int, List[Dict[str, Any]]] = {}
        self.kept: List[int] = []
        self.slots = 2
        self.told: List[str] = []
        self.is_submitted_again = False

    def answer(self, client: int, number: int, value: Any, error: str = "", kind: str = "") -> None:
        assert (client, number) not in self.answers, "answered twice"
        self.answers[client, number] = (kind, error) if error else value

    def run_script_tasks(self, spec: int, rows: Sequence[int], payloads: Sequence[Any], *, again: bool) -> None:
        self.runs.append((spec, list(rows), list(payloads), again))

    def cancel_script_tasks(self, rows: Sequence[int], *, force: bool) -> None:
        self.cancelled.append((list(rows), force))

    def define_script(self, number: int, spec: TaskSpec) -> None:
        self.specs[number] = spec

    def define_script_code(self, parts: Any, functions: Iterable[bytes]) -> None:
        for digest in [*(part[0] for part in parts), *functions]:
            assert digest not in self.defined, "defined twice"
            self.defined.append(digest)

    def forget_script_code(self, digests: Iterable[bytes]) -> None:
        for digest in digests:
            self.defined.remove(digest)

    def no_scripts_left(self) -> None:
        self.specs = {}

    def code_parts(self, digest: bytes) -> Any:
        return [(PART, b"files", ()), (CODE, b"list", (PART,))] if digest in self.code else ()

    def executing_scripts(self) -> Dict[int, Tuple[str, int, float]]:
        return self.executing

    def unable_scripts(self) -> List[Tuple[List[int], str]]:
        return self.unable

    def script_slots(self) -> int:
        return self.slots

    def failed_attempts(self, row: int) -> Sequence[Dict[str, Any]]:
        return self.attempts.get(row, ())

    def host_of(self, worker: str) -> str:
        return f"{worker}.lan"

    def results_kept(self, rows: Sequence[int]) -> None:
        self.kept.extend(rows)

    def scripts_submitted_again(self) -> None:
        self.is_submitted_again = True

    def note_job(self, kind: str, text: str, job: str) -> None:
        self.told.append(kind)

    @property
    def running(self) -> List[int]:
        return [row for _, rows, _, _ in self.runs for row in rows]


class Journal(MemoryJournal):
    """Refuses what it is told to."""

    refuses: str = ""
    is_full = False

    def begin_job(self, job: Any, tasks: int, *, code: Optional[bytes], on_synced: OnSynced) -> int:
        if self.refuses == "begin":
            self._call_soon(lambda: on_synced(JournalError("the disk is full")))
            return 0
        return super().begin_job(job, tasks, code=code, on_synced=on_synced)

    def add_payloads(self, job_id: str, first: int, payloads: Any, on_synced: OnSynced) -> None:
        if self.refuses == "add":
            self._call_soon(lambda: on_synced(JournalError("the disk is full")))
            return
        super().add_payloads(job_id, first, payloads, on_synced)

    def retry_job(self, job_id: str, statuses: Sequence[str], *, status: str, on_synced: OnSynced) -> None:
        if self.refuses == "retry":
            self._call_soon(lambda: on_synced(JournalError("the disk is full")))
            return
        super().retry_job(job_id, statuses, status=status, on_synced=on_synced)

    def read(self, call: Any, then: Any) -> None:
        if self.refuses == "read":
            self._call_soon(lambda: then(None, JournalError("the disk is gone")))
            return
        super().read(call, then)

    @property
    def trouble(self) -> Optional[JournalError]:
        return JournalError("the disk is full") if self.is_full else None


class Site:
    def __init__(self) -> None:
        self.calls: List[Callable[[], None]] = []
        self.journal = Journal(call_soon=self.calls.append)
        self.number = 0
        self.seconds = 1_000_000.0  # Since the epoch.
        self.start()

    def start(self) -> None:
        """A coordinator on that journal; also another one, after the first was killed."""
        self.calls.clear()
        self.clock: Any = Clock()
        self.mesh = Coordinator()
        self.service = JobService(self.clock, self.mesh, self.journal, wall=lambda: self.seconds)

    def settle(self) -> None:
        """Everything that the journal has to say is said."""
        while self.calls:
            self.calls.pop(0)()

    def say(self, message: Callable[[int], Any], client: int = ANN, *, settle: bool = True) -> int:
        self.number += 1
        self.service.on_message(client, message(self.number))
        if settle:
            self.settle()
        return self.number

    def told(self, number: int, client: int = ANN) -> Any:
        return self.mesh.answers.get((client, number), "nothing yet")

    def announce(
        self, count: int, *, key: bytes = KEY, client: int = ANN, settle: bool = True, specs: Sequence[TaskSpec] = (SPEC,)
    ) -> int:
        job = JobSpec(job_id(key), key, "sweep", "/home/ann/train.py", tuple(tuple(s) for s in specs), count, "ann")  # type: ignore[arg-type]
        return self.say(lambda number: SubmitJob(number, tuple(job)), client, settle=settle)

    def payloads(
        self, first: int, count: int, *, key: bytes = KEY, client: int = ANN, variant: int = 0, settle: bool = True
    ) -> int:
        part = [(variant, b'{"x": %d}' % x) for x in range(first, first + count)]
        return self.say(lambda number: JobPayloads(number, job_id(key), first, part), client, settle=settle)

    def submit(self, count: int, **options: Any) -> str:
        self.announce(count, **options)
        assert self.told(self.payloads(0, count)) == {"accepted": True}
        return JOB

    def ask(self, what: str, **arguments: Any) -> Any:
        return self.told(self.say(lambda number: Query(number, what, arguments)))

    def change(self, what: str, job: str = JOB) -> Any:
        return self.told(self.say(lambda number: ChangeJob(number, job, what)))

    def end(self, *rows: int, status: int = OK, payload: Any = b'{"y": 1}', worker: str = "w1") -> None:
        self.service.ended(worker, [(row, status, payload, 0.5) for row in rows])
        self.settle()

    def counts(self) -> Dict[str, int]:
        counts: Dict[str, int] = self.ask("job", job=JOB)["counts"]
        return {state: count for state, count in counts.items() if count}


@pytest.fixture
def site() -> Site:
    return Site()


# --- submitting


def test_a_job_is_accepted_when_its_last_payloads_are_kept(site: Site) -> None:
    assert site.told(site.announce(3)) == {"accepted": False}
    assert site.told(site.payloads(0, 2)) == {"accepted": False}
    assert site.ask("jobs") == []
    assert site.mesh.runs == []

    assert site.told(site.payloads(2, 1)) == {"accepted": True}

    assert site.mesh.defined == [PART, CODE, FUNCTION]
    assert site.mesh.specs == {1: SPEC}
    assert site.mesh.runs == [(1, [1, 2, 3], [b'{"x": 0}', b'{"x": 1}', b'{"x": 2}'], False)]
    assert site.mesh.told == ["accepted"]
    (view,) = site.ask("jobs")
    assert (view["id"], view["name"], view["state"], view["total"]) == (JOB, "sweep", "queued", 3)


def test_payloads_may_follow_their_announcement_at_once(site: Site) -> None:
    announced = site.announce(2, settle=False)
    sent = site.payloads(0, 2, settle=False)
    site.settle()

    assert site.told(announced) == {"accepted": False}
    assert site.told(sent) == {"accepted": True}
    assert site.mesh.running == [1, 2]


def test_a_job_that_is_submitted_again_is_there_once(site: Site) -> None:
    site.submit(2)

    assert site.told(site.announce(2)) == {"accepted": True}
    assert site.told(site.announce(2, client=BOB), BOB) == {"accepted": True}
    assert len(site.ask("jobs")) == 1


def test_a_job_that_was_cut_off_begins_anew(site: Site) -> None:
    site.announce(3)
    site.payloads(0, 2)
    site.service.client_gone(ANN)

    assert site.told(site.payloads(2, 1))[0] == "again"
    site.submit(3)
    assert site.counts() == {PENDING: 3}


def test_a_job_that_is_announced_over_a_new_connection_drops_what_came_over_the_old_one(site: Site) -> None:
    site.announce(3)
    site.payloads(0, 2)

    site.submit(3, client=ANN)

    assert site.mesh.running == [4, 5, 6]
    assert site.ask("job", job=JOB)["total"] == 3


def test_a_job_whose_last_payloads_are_on_their_way_to_the_disk_outlives_its_client(site: Site) -> None:
    site.announce(2)
    site.payloads(0, 2, settle=False)
    site.service.client_gone(ANN)
    site.settle()

    assert site.counts() == {PENDING: 2}
    assert site.told(site.announce(2)) == {"accepted": True}


def test_an_announcement_while_the_same_job_is_on_its_way_to_the_disk_waits_for_it(site: Site) -> None:
    site.announce(2)
    again = site.announce(2, client=BOB, settle=False)
    sent = site.payloads(0, 2, settle=False)
    site.settle()

    assert site.told(sent) == {"accepted": True}
    assert site.told(again, BOB) == {"accepted": True}
    assert site.counts() == {PENDING: 2}


def test_another_job_with_the_same_id_is_refused(site: Site) -> None:
    site.submit(1)
    other = KEY[:5] + bytes(11)
    assert job_id(other) == JOB

    kind, _ = site.told(site.announce(1, key=other))

    assert kind == "taken"


def test_what_the_journal_refuses_is_told_and_leaves_nothing(site: Site) -> None:
    site.journal.refuses = "begin"
    announced = site.announce(2, settle=False)
    sent = site.payloads(0, 2, settle=False)
    site.settle()
    assert site.told(announced) == ("journal", "the disk is full")
    assert site.told(sent)[0] == "journal"

    site.journal.refuses = "add"
    site.announce(2)
    assert site.told(site.payloads(0, 1)) == ("journal", "the disk is full")

    site.journal.refuses = ""
    assert site.ask("jobs") == []
    site.submit(2)


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ([(1, b"{}")], "not payloads of a job"),
        ([(-1, b"{}")], "not payloads of a job"),
        ([(True, b"{}")], "not payloads of a job"),
        ([(0, "text")], "not payloads of a job"),
        ([0, 1], "not payloads of a job"),
        ([(0, b"{}")] * 4, "cannot follow 0 of 3"),
    ],
)
def test_what_are_no_payloads_ends_the_submission(site: Site, part: Any, problem: str) -> None:
    site.announce(3)

    kind, error = site.told(site.say(lambda number: JobPayloads(number, JOB, 0, part)))

    assert kind == "value"
    assert problem in error
    assert site.told(site.payloads(0, 1))[0] == "again"


def test_payloads_that_leave_a_gap_end_the_submission(site: Site) -> None:
    site.announce(3)

    assert site.told(site.payloads(1, 1)) == ("value", "payloads from place 1 on cannot follow 0 of 3")


def test_nobody_makes_the_coordinator_keep_payloads_without_end(site: Site) -> None:
    site.announce(100, settle=False)

    numbers = [site.payloads(place, 1, settle=False) for place in range(JOB_PARTS_AHEAD + 2)]

    assert site.told(numbers[-1])[0] == "again"


def test_a_job_needs_its_folder(site: Site) -> None:
    site.mesh.code = {}

    assert site.told(site.announce(1))[0] == "value"


def test_what_is_no_job_is_refused(site: Site) -> None:
    kind, error = site.told(site.say(lambda number: SubmitJob(number, ("j-1", b"key"))))

    assert kind == "value"
    assert "not a job" in error


def test_a_job_without_tasks_finishes_at_once(site: Site) -> None:
    assert site.told(site.announce(0, specs=())) == {"accepted": True}

    assert site.ask("job", job=JOB)["state"] == DONE


# --- running


def test_tasks_of_several_specs_go_to_the_scheduler_by_spec(site: Site) -> None:
    other = SPEC._replace(requirement=Requirement(cores=4))
    site.announce(4, specs=(SPEC, other))
    site.payloads(0, 1)
    site.payloads(1, 2, variant=1)
    site.payloads(3, 1)

    assert site.mesh.specs == {1: SPEC, 2: other}
    assert [(spec, rows) for spec, rows, _, _ in site.mesh.runs] == [(1, [1]), (2, [2, 3]), (1, [4])]


def test_a_large_payload_travels_beside_its_message(site: Site) -> None:
    large = b'"' + b"x" * 100_000 + b'"'
    site.announce(1)
    site.say(lambda number: JobPayloads(number, JOB, 0, [(0, OutOfBand([large]))]))

    assert site.mesh.runs[0][2] == [OutOfBand([large])]


def test_an_end_is_acknowledged_when_it_is_kept(site: Site) -> None:
    site.submit(2)

    site.service.ended("w1", [(1, OK, b"42", 0.5)])
    assert site.mesh.kept == []
    site.settle()

    assert site.mesh.kept == [1]
    assert site.counts() == {PENDING: 1, DONE: 1}


def test_a_job_tells_of_its_tasks(site: Site) -> None:
    site.submit(3)
    site.mesh.executing = {2: ("w2", 1, 3.5)}
    site.mesh.attempts[1] = [
        {"worker": "old (w9)", "hostname": "old", "status": int(Status.CRASHED), "reason": "killed", "exit": -9}
    ]
    site.end(1, payload=b"[1, 2]")
    site.mesh.attempts[3] = site.mesh.attempts.pop(1)

    page = site.ask("job-tasks", job=JOB)

    crashed = {"worker": "w9", "hostname": "old", "status": "crashed", "seconds": 0.0, "reason": "killed", "exit": -9}
    done = {"worker": "w1", "hostname": "w1.lan", "status": "ok", "seconds": 0.5}
    plain = {"result": None, "error": None, "worker": "", "hostname": "", "attempts": [], "seconds": 0.0}
    assert page["next"] == -1
    assert page["tasks"] == [
        {
            "id": 0,
            "status": DONE,
            "payload": b'{"x": 0}',
            "result": b"[1, 2]",
            "error": None,
            "worker": "w1",
            "hostname": "w1.lan",
            "attempts": [crashed, done],
            "seconds": 0.5,
        },
        {**plain, "id": 1, "status": RUNNING, "payload": b'{"x": 1}', "worker": "w2", "hostname": "w2.lan", "seconds": 3.5},
        {**plain, "id": 2, "status": PENDING, "payload": b'{"x": 2}', "attempts": [crashed]},
    ]


def test_a_failure_is_told_in_words(site: Site) -> None:
    site.submit(1)

    site.end(1, status=RAISED, payload={"reason": "the script exited with code 3", "exit": 3, "stderr": "oh no\n"})

    (task,) = site.ask("job-tasks", job=JOB)["tasks"]
    assert task["status"] == FAILED
    assert "exited with code 3" in task["error"]
    assert "oh no" in task["error"]
    assert task["attempts"][0]["exit"] == 3
    assert site.ask("job", job=JOB)["state"] == FAILED


def test_when_all_jobs_have_ended_nothing_of_them_is_left_at_the_scheduler(site: Site) -> None:
    site.submit(1)
    site.announce(1, key=bytes(16))
    site.payloads(0, 1, key=bytes(16))
    assert site.mesh.defined == [PART, CODE, FUNCTION]

    site.end(1)
    assert site.mesh.defined == [PART, CODE, FUNCTION], "the other needs it"
    site.end(2)

    assert site.mesh.defined == []
    assert site.mesh.specs == {}


def test_what_may_run_once_is_marked_on_disk_before_it_runs(site: Site) -> None:
    site.announce(JOB_ONCE_TASKS + 5, specs=(SPEC._replace(retries=0),))
    site.payloads(0, JOB_ONCE_TASKS + 5, settle=False)
    while not site.journal.reader().started():
        assert site.mesh.runs == []
        site.calls.pop(0)()
    site.settle()

    assert len(site.mesh.running) == JOB_ONCE_TASKS
    site.mesh.slots = 100
    site.end(1)
    assert len(site.mesh.running) == JOB_ONCE_TASKS + 5, "so many can run at once"


def test_what_was_cancelled_while_it_was_being_marked_does_not_run(site: Site) -> None:
    site.announce(2, specs=(SPEC._replace(retries=0),))
    site.payloads(0, 2, settle=False)
    while not site.journal.reader().started():
        site.calls.pop(0)()
    marked = site.calls.pop()
    assert site.change("cancel") == {"count": 2}
    assert site.counts() == {PENDING: 2}

    marked()
    site.settle()

    assert site.mesh.runs == []
    assert site.counts() == {CANCELLED: 2}


def test_nothing_is_started_while_the_disk_is_full(site: Site) -> None:
    site.announce(1)
    site.journal.is_full = True
    site.payloads(0, 1)
    assert site.mesh.runs == []

    site.journal.is_full = False
    site.journal.on_trouble(None)
    site.settle()

    assert site.mesh.running == [1]


def test_a_page_that_cannot_be_read_is_read_again_later(site: Site) -> None:
    site.announce(1)
    site.payloads(0, 1, settle=False)
    site.journal.refuses = "read"
    site.settle()
    assert site.mesh.runs == []

    site.journal.refuses = ""
    site.clock.ring()
    site.settle()

    assert site.mesh.running == [1]


# --- orders


def test_cancelling_counts_what_it_ends(site: Site) -> None:
    site.submit(3)
    site.end(1)

    assert site.change("cancel") == {"count": 2}
    assert site.change("kill") == {"count": 0}
    site.end(2, 3, status=int(Status.CANCELLED), payload={"reason": "cancelled"})

    assert site.mesh.cancelled == [([2, 3], False), ([2, 3], True)]
    assert site.counts() == {DONE: 1, CANCELLED: 2}
    assert site.change("cancel") == {"count": 0}
    assert site.mesh.told == ["accepted", "cancelled", "finished"]


def test_a_finished_job_is_tried_again_with_its_folder(site: Site) -> None:
    site.submit(2)
    site.end(1)
    site.end(2, status=RAISED, payload={"reason": "no"})
    assert site.mesh.defined == []

    assert site.change("retry") == {"count": 1}

    assert site.mesh.defined == [PART, CODE, FUNCTION]
    assert site.mesh.running == [1, 2, 2]
    assert site.counts() == {PENDING: 1, DONE: 1}
    site.end(2)
    assert site.change("retry") == {"count": 0}


def test_a_retry_that_cannot_be_kept_changes_nothing(site: Site) -> None:
    site.submit(2)
    site.end(1, status=RAISED, payload={"reason": "no"})
    site.journal.refuses = "retry"

    assert site.change("retry") == ("journal", "the disk is full")

    site.journal.refuses = ""
    assert site.counts() == {PENDING: 1, FAILED: 1}
    site.end(2)
    assert site.ask("job", job=JOB)["state"] == FAILED


def test_an_unknown_job_and_an_unknown_order_are_said_to_be(site: Site) -> None:
    site.submit(1)

    assert site.change("cancel", "j-zzzzzzz0")[0] == "unknown"
    assert site.ask("job", job="train.py")[0] == "unknown"
    assert site.ask("job", job=None)[0] == "value"
    assert site.change("explode")[0] == "value"
    assert site.ask("job-horoscope", job=JOB) == ("", "this coordinator knows nothing of 'job-horoscope'")
    assert site.ask("job-logs", job=JOB, task=1) == ("value", f"job {JOB} has the tasks 0 to 0, not 1")


def test_output_is_kept_for_its_task(site: Site) -> None:
    site.submit(2)
    site.service.wrote(2, 1, b"hello\n")
    site.service.wrote(2, 2, b"oh\n")
    site.service.wrote(99, 1, b"nobody knows this task\n")
    site.settle()

    (first, second) = site.ask("job-logs", job=JOB)
    assert (first[1:], second[1:]) == ((1, 1, 1, b"hello\n"), (1, 1, 2, b"oh\n"))
    assert site.ask("job-logs", job=JOB, since=first[0]) == [second]
    assert site.ask("job-logs", job=JOB, task=0) == []


# --- waiting


def test_news_are_told_when_there_are_some(site: Site) -> None:
    site.submit(3)
    view = site.ask("job-wait", job=JOB, seen=0)
    waiting = site.say(lambda number: Query(number, "job-wait", {"job": JOB, "seen": view["version"]}))
    assert site.told(waiting) == "nothing yet"

    site.end(1)
    assert site.told(waiting) == "nothing yet", "in a moment"
    site.clock.ring()

    assert site.told(waiting)["counts"][DONE] == 1
    assert site.told(waiting)["version"] > view["version"]


def test_who_waits_for_the_end_is_told_when_it_is_kept(site: Site) -> None:
    site.submit(1)
    version = site.ask("job-wait", job=JOB, seen=0)["version"]
    waiting = site.say(lambda number: Query(number, "job-wait", {"job": JOB, "seen": version}))

    site.service.ended("w1", [(1, OK, b"1", 0.5)])
    assert site.told(waiting) == "nothing yet"
    site.settle()

    assert site.told(waiting)["finished"] is True
    assert site.ask("job-wait", job=JOB, seen=5)["finished"] is True


def test_a_question_without_news_is_answered_in_the_end(site: Site) -> None:
    site.submit(1)
    version = site.ask("job-wait", job=JOB, seen=0)["version"]
    waiting = site.say(lambda number: Query(number, "job-wait", {"job": JOB, "seen": version}))

    site.clock.ring()

    assert site.told(waiting)["version"] == version


def test_whoever_waits_hears_of_tasks_that_come_and_go_without_a_word_of_their_own(site: Site) -> None:
    site.submit(1)
    site.service.started([1])  # Behind another task that holds the slot.
    first = site.ask("job-wait", job=JOB, seen=0)
    site.clock.ring()

    def next_of(version: int, executing: Dict[int, Tuple[str, int, float]]) -> Any:
        waiting = site.say(lambda number: Query(number, "job-wait", {"job": JOB, "seen": version}))
        site.mesh.executing = executing
        site.service.moved()
        assert site.told(waiting) == "nothing yet"
        site.clock.rung(JOB_NEWS_SECONDS)
        return site.told(waiting)

    then = next_of(first["version"], {1: ("w1", 1, 0.0)})  # The other has ended.
    last = next_of(then["version"], {})  # Its worker is lost.

    assert [view["counts"][RUNNING] for view in (first, then, last)] == [0, 1, 0]
    assert [view["counts"][PENDING] for view in (first, then, last)] == [1, 0, 1]


def test_nobody_hears_of_what_was_not_changed_by_a_movement(site: Site) -> None:
    site.submit(1)
    version = site.ask("job-wait", job=JOB, seen=0)["version"]
    waiting = site.say(lambda number: Query(number, "job-wait", {"job": JOB, "seen": version}))

    site.service.moved()
    site.clock.rung(JOB_NEWS_SECONDS)

    assert site.told(waiting) == "nothing yet"


def test_news_come_no_faster_than_anybody_reads(site: Site) -> None:
    site.submit(3)
    version = site.ask("job-wait", job=JOB, seen=0)["version"]
    site.end(1)
    waiting = site.say(lambda number: Query(number, "job-wait", {"job": JOB, "seen": version}))
    site.end(2)
    assert site.told(waiting) == "nothing yet"
    assert site.ask("job-wait", job=JOB, seen=0)["counts"][DONE] == 2, "the first question is answered at once"

    site.clock.rung(JOB_NEWS_SECONDS)

    assert site.told(waiting)["counts"][DONE] == 2


def test_a_version_that_another_coordinator_has_told_is_not_taken_for_the_newest(site: Site) -> None:
    site.submit(1)
    version = site.ask("job-wait", job=JOB, seen=0)["version"]

    site.seconds += 1.0
    site.start()
    site.service.recover()
    site.settle()

    assert site.ask("job-wait", job=JOB, seen=version)["version"] != version


def test_what_the_scheduler_has_to_say_is_told(site: Site) -> None:
    other = job_id(OTHER)
    site.submit(2)
    site.announce(1, key=OTHER)
    site.payloads(0, 1, key=OTHER)
    version = site.ask("job-wait", job=other, seen=0)["version"]
    waiting = site.say(lambda number: Query(number, "job-wait", {"job": other, "seen": version}))

    site.mesh.unable = [([2, 3], "no worker has 64 cores"), ([1], "no worker has a GPU")]
    site.service.moved()
    site.clock.rung(JOB_NEWS_SECONDS)

    assert site.ask("job", job=JOB)["notices"] == ["no worker has 64 cores", "no worker has a GPU"]
    assert site.told(waiting)["notices"] == ["no worker has 64 cores"]
    assert [view["notices"] for view in site.ask("jobs")] == [
        view["notices"] for view in (site.told(waiting), site.ask("job", job=JOB))
    ]

    site.mesh.unable = []
    assert site.ask("job", job=JOB)["notices"] == [], "somebody has come who can"


# --- after a restart


def test_what_was_started_is_submitted_again_and_the_rest_behind_it(site: Site) -> None:
    site.submit(4)
    site.service.started([3])
    site.end(1)

    site.start()
    site.service.recover()
    assert site.mesh.runs == [(1, [3], [b'{"x": 2}'], True)]
    assert not site.mesh.is_submitted_again
    site.settle()

    assert site.mesh.runs[1:] == [(1, [2, 4], [b'{"x": 1}', b'{"x": 3}'], True)]
    assert site.mesh.is_submitted_again
    assert site.counts() == {PENDING: 3, DONE: 1}
    site.end(2, 3, 4)
    assert site.ask("job", job=JOB)["state"] == DONE


def test_finished_jobs_stay_finished(site: Site) -> None:
    site.submit(1)
    site.end(1)

    site.start()
    site.service.recover()
    site.settle()

    assert site.mesh.runs == []
    assert site.ask("job", job=JOB)["state"] == DONE


def test_a_job_of_which_all_has_ended_finishes(site: Site) -> None:
    site.submit(1)
    site.journal.end_tasks([TaskEnd(1, DONE, 1, result=b"1")])

    site.start()
    site.service.recover()
    site.settle()

    assert site.ask("job", job=JOB)["state"] == DONE
    assert site.mesh.runs == []


def test_a_cancelled_job_is_not_taken_up_again(site: Site) -> None:
    site.submit(3)
    site.service.started([1])
    site.change("cancel")

    site.start()
    site.service.recover()
    site.settle()

    assert site.mesh.runs == []
    assert site.counts() == {CANCELLED: 3}
    assert site.ask("job", job=JOB)["finished"] is True
