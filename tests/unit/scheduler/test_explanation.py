"""Why nobody can run a task: the text names what is needed, and the workers that lack least before the others."""

from __future__ import annotations

from typing import Any, List

import pytest

from gpumesh.model.resources import DeviceFacts, Requirement, WorkerFacts
from gpumesh.scheduler.explanation import NAMED_WORKERS, distance, explain, is_version_mismatch, likeness, similar_card
from gpumesh.scheduler.states import Worker

GB = 10**9


def card(name: str, memory: int = 24 * GB, *, index: int = 0, kind: str = "cuda", problem: str = "") -> DeviceFacts:
    return DeviceFacts(kind, index, name, memory, 50.0, uuid=f"{kind}-{index}-{name}", problem=problem)


def worker(ident: str, *devices: DeviceFacts, hostname: str = "", leaving: bool = False, **facts: Any) -> Worker:
    made = Worker(
        ident, WorkerFacts(hostname=hostname or ident, devices=devices, python="3.11", memory=16 * GB, cores=8, **facts)
    )  # type: ignore[arg-type]
    made.is_draining = leaving
    return made


def ranked(need: Requirement, *workers: Worker) -> List[str]:
    return [each.id for each in sorted(workers, key=lambda each: distance(each, need))]


def test_a_worker_that_lacks_a_little_comes_before_one_that_lacks_much() -> None:
    nothing, other = worker("nothing"), worker("other", card("NVIDIA T4", 16 * GB))
    small, nearly = worker("small", card("NVIDIA A100", 10 * GB)), worker("nearly", card("NVIDIA A100", 39 * GB))
    unused = worker("unused", card("NVIDIA A100", 80 * GB, problem="paused by its owner"))
    leaving = worker("leaving", card("NVIDIA A100", 39 * GB), leaving=True)
    need = Requirement("gpu", "a100", 0.0, 40 * GB)

    assert ranked(need, leaving, nothing, other, small, nearly, unused) == [
        "unused", "nearly", "small", "other", "nothing", "leaving",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("need", "better", "worse"),
    [
        (Requirement(cores=64), {"cores": 32}, {"cores": 2}),
        (Requirement(memory=64 * GB), {"memory": 63 * GB}, {"memory": GB}),
        (Requirement(tags=(("a", "1"), ("b", "2"))), {"tags": (("a", "1"),)}, {}),
        (Requirement(python="3.9", cores=8), {"cores": 8}, {"cores": 4}),
    ],
)
def test_each_thing_that_lacks_counts(need: Requirement, better: Any, worse: Any) -> None:
    facts = {"cores": 8, "memory": 16 * GB}

    def made(ident: str, more: Any) -> Worker:
        return Worker(ident, WorkerFacts(hostname=ident, python="3.11", **{**facts, **more}))  # type: ignore[arg-type]

    assert ranked(need, made("worse", worse), made("better", better)) == ["better", "worse"]


def test_of_the_wrong_kind_is_nearer_than_no_gpu_at_all() -> None:
    assert ranked(Requirement("mps", "", 1.0), worker("none"), worker("cuda", card("T4"))) == ["cuda", "none"]
    assert ranked(Requirement("cuda:1", "", 1.0), worker("none"), worker("first", card("T4"))) == ["first", "none"]


def test_more_cards_are_nearer() -> None:
    two = worker("two", card("T4"), card("T4", index=1))

    assert ranked(Requirement("gpu", "", 3.0), worker("one", card("T4")), two) == ["two", "one"]


def test_what_nobody_lacks_is_no_distance() -> None:
    assert distance(worker("w", card("NVIDIA A100", 40 * GB)), Requirement("cuda", "a100", 1.0, 40 * GB, GB, 8)) == 0.0
    assert distance(worker("w"), Requirement()) == 0.0


def test_the_text_puts_the_best_candidate_first() -> None:
    text = explain("train", Requirement("gpu", "", 2.0), [worker("box"), worker("desk", card("RTX 4090"))], client="me")

    assert text == (
        "task 'train' needs 2 GPUs, but none of 2 connected workers can run it: desk has 1 such GPUs, not 2; box has no GPU; "
        "ask for less with options(...), or join a machine that has it with `gpumesh join`"
    )


def test_workers_of_one_host_are_told_apart() -> None:
    text = explain("f", Requirement("gpu", "", 1.0), [worker("w1", hostname="box"), worker("w2", hostname="box"), worker("w3")])

    assert "box (w1) has no GPU; box (w2) has no GPU; w3 has no GPU;" in text


def test_a_worker_that_has_it_and_takes_nothing_is_told_as_that() -> None:
    paused = worker("desk", card("RTX 4090"), problem="paused by its owner until 22:00")

    text = explain("f", Requirement("cuda", "", 1.0), [paused])

    assert "the only connected worker cannot run it: desk has it, but takes no tasks (paused by its owner until 22:00);" in text


def test_the_nearest_are_named_when_there_are_many() -> None:
    many = [worker(f"w{number}") for number in range(20)]

    text = explain("f", Requirement("gpu", "", 2.0), [*many, worker("desk", card("RTX 4090"))])

    assert text.index("desk has 1 such GPUs") < text.index("w0 has no GPU")
    assert f"and {21 - NAMED_WORKERS} more" in text


@pytest.mark.parametrize(
    ("model", "meant"),
    [
        ("a1000", "NVIDIA A100-SXM4-40GB"),
        ("rtx4090", "NVIDIA GeForce RTX 4090"),
        ("rtx 4900", "NVIDIA GeForce RTX 4090"),
        ("rtx-4090", "NVIDIA GeForce RTX 4090"),
        ("a100", ""),
        ("radeon", ""),
        ("", ""),
    ],
)
def test_a_slip_of_the_keyboard_is_answered_with_the_card_that_was_meant(model: str, meant: str) -> None:
    cards = (card("NVIDIA A100-SXM4-40GB"), card("NVIDIA GeForce RTX 4090", index=1))

    assert similar_card(Requirement("gpu", model, 1.0), [WorkerFacts(devices=cards), WorkerFacts()]) == meant


def test_likeness_is_a_share_of_one() -> None:
    assert likeness("rtx 4090", "NVIDIA GeForce RTX 4090") == 1.0
    assert likeness("h100", "Apple M2") < 0.6
    assert likeness("h100", "") == 0.0


def test_a_version_mismatch_is_one_where_only_the_version_lacks() -> None:
    need = Requirement(python="3.9", cores=4)

    assert is_version_mismatch(need, [worker("w")])
    assert not is_version_mismatch(need._replace(cores=64), [worker("w")])
    assert not is_version_mismatch(need, [worker("w", problem="paused"), worker("v", leaving=True)])
    assert not is_version_mismatch(Requirement(cores=4), [worker("w")])


def test_without_workers_the_text_says_so() -> None:
    assert explain("f", Requirement(cores=4), []) == (
        "task 'f' needs 4 cores, but no worker is connected; join a machine with `gpumesh join`"
    )
