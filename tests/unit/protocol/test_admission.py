"""Who goes when the place at the door is full, and who may not come in for a while."""

from __future__ import annotations

import pytest

from gpumesh.config import CROWDED_SECONDS, CROWDED_SILENT_SECONDS, FAILED_PROOFS, REFUSALS_LOGGED_SECONDS
from gpumesh.protocol.admission import Admission, network_of


def test_the_oldest_silent_one_of_the_address_with_most_goes() -> None:
    admission = Admission(limit=4)
    for key, address in (("honest", "b"), ("one", "a"), ("two", "a"), ("three", "a")):
        admission.arrive(key, address, 0.0)
    admission.speaks("one")

    assert admission.arrive("four", "a", 1.0) == ["two"]
    assert admission.arrive("five", "c", 1.0) == ["three"]
    assert admission.arrive("six", "a", 1.0) == ["four"]
    assert "honest" in admission


def test_who_is_in_the_midst_of_a_handshake_is_left_alone_for_a_moment() -> None:
    admission = Admission(limit=2)
    for key in ("one", "two"):
        admission.arrive(key, "a", 10.0)
        admission.speaks(key)

    assert admission.crowded_for(10.0) == pytest.approx(CROWDED_SECONDS)
    assert admission.crowded_for(10.0 + CROWDED_SECONDS) == 0
    admission.advances("one", 11.0)
    assert admission.crowded_for(11.0) > 0
    assert admission.arrive("three", "a", 12.0) == ["one"]
    admission.leave("two")
    assert admission.crowded_for(12.0) == 0


def test_who_has_just_come_may_not_have_got_its_first_bytes_through() -> None:
    admission = Admission(limit=2)
    admission.arrive("one", "a", 10.0)
    admission.arrive("two", "a", 10.0)

    assert 0 < admission.crowded_for(10.0) == pytest.approx(CROWDED_SILENT_SECONDS)
    assert admission.crowded_for(10.0 + CROWDED_SILENT_SECONDS) == 0


def test_somebody_silent_goes_before_those_who_are_in_the_midst_of_it() -> None:
    admission = Admission(limit=3)
    for key, address in (("silent", "b"), ("one", "a"), ("two", "a")):
        admission.arrive(key, address, 0.0)
    admission.speaks("one")
    admission.speaks("two")

    assert admission.crowded_for(0.0) > 0
    assert admission.crowded_for(CROWDED_SECONDS) == 0
    assert admission.arrive("three", "a", CROWDED_SECONDS) == ["silent"]


def test_wrong_tokens_shut_an_address_out_for_twice_as_long_each_time() -> None:
    admission = Admission()
    now = 100.0
    waits = []
    for _ in range(40):
        admission.proof_failed("a", now, is_local=False)
        wait = admission.is_shut("a", now)
        if wait:
            waits.append(wait)
            now += wait

    assert waits[:7] == pytest.approx([1, 2, 4, 8, 16, 32, 60])
    assert waits[6:] == pytest.approx([60] * len(waits[6:]))
    assert admission.is_shut("b", now) == 0


def test_a_few_wrong_tokens_now_and_then_are_a_persons() -> None:
    admission = Admission()
    for minute in range(10):
        for _ in range(FAILED_PROOFS):
            admission.proof_failed("a", 60.0 * minute, is_local=False)
        assert admission.is_shut("a", 60.0 * minute) == 0


def test_the_next_line_says_how_many_were_not_told() -> None:
    admission = Admission()

    assert admission.line("a", "x", 0.0) == ""
    assert [admission.line("a", "x", 1.0) for _ in range(7)] == [None] * 7
    assert admission.line("a", "x", REFUSALS_LOGGED_SECONDS) == " (7 more of this since)"


def test_a_trouble_of_this_machine_is_told_as_rarely_and_refuses_nobody() -> None:
    admission = Admission()
    told = [admission.own_trouble("24", 0.1 * number) for number in range(100)]

    assert told == [True] + 99 * [False]
    assert admission.own_trouble("24", REFUSALS_LOGGED_SECONDS)
    assert admission.refused == 0
    assert admission.line("a", "wrong", 0.0) == ""
    assert admission.refused == 1


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("192.168.1.20", "192.168.1.20"),
        ("fe80::1%eth0", "fe80:0:0:0::/64"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:0db8:1:2::9", "2001:db8:1:2::/64"),
        ("2001:db8::9", "2001:db8:0:0::/64"),
        ("::1", "0:0:0:0::/64"),
    ],
)
def test_one_household_is_one_address(host: str, network: str) -> None:
    assert network_of(host) == network
