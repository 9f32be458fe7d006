"""Whatever comes to the door, in whatever order: the promises of `protocol.admission`."""

from __future__ import annotations

from collections import Counter
from typing import Dict, List, Tuple

from hypothesis import given
from hypothesis import strategies as st

from gpumesh.config import (
    CROWDED_SECONDS,
    CROWDED_SILENT_SECONDS,
    FAILED_PROOFS_LOCAL_SECONDS,
    FAILED_PROOFS_MAX_SECONDS,
    KNOWN_STRANGERS,
    REFUSALS_LOGGED,
    REFUSALS_LOGGED_SECONDS,
)
from gpumesh.protocol.admission import Admission

ADDRESSES = st.sampled_from(["10.0.0.1", "10.0.0.2", "fd00:0:0:1::/64"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), ADDRESSES),
        st.tuples(st.just("speak"), st.integers(0, 50)),
        st.tuples(st.just("leave"), st.integers(0, 50)),
        st.tuples(st.just("wait"), st.sampled_from([0.01, 0.2, 1.0])),
    ),
    max_size=60,
)


@given(STEPS)
def test_there_is_always_a_place_for_one_more_and_never_more_than_there_are(steps: List[Tuple[str, object]]) -> None:
    admission = Admission(limit=4)
    there: Dict[int, Tuple[str, float, bool]] = {}  # In order of arrival: address, when, whether it has spoken.
    now = 0.0
    for number, (kind, what) in enumerate(steps):
        if kind == "arrive":
            crowded = admission.crowded_for(now)
            gone = admission.arrive(number, str(what), now)
            assert len(gone) == (1 if len(there) == 4 else 0)
            for key in gone:
                assert isinstance(key, int)
                counts = Counter(address for address, _, _ in there.values())
                crowd = {old: each for old, each in there.items() if counts[each[0]] == max(counts.values())}
                silent_crowd = [old for old, each in crowd.items() if not each[2]]
                silent = [old for old, each in there.items() if not each[2] and now - each[1] >= CROWDED_SECONDS]
                assert key == [*silent_crowd, *silent, *crowd][0]
                has_spoken = there[key][2]
                due = there[key][1] + (CROWDED_SECONDS if has_spoken else CROWDED_SILENT_SECONDS)
                assert crowded == max(0.0, due - now)
                del there[key]
            there[number] = (str(what), now, False)
        elif kind == "wait":
            now += float(str(what))
        elif there:
            assert isinstance(what, int)
            key = list(there)[what % len(there)]
            if kind == "leave":
                del there[key]
                assert admission.leave(key)
                assert not admission.leave(key)
            else:
                there[key] = (*there[key][:2], True)
                admission.speaks(key)
        assert [key for key in range(len(steps)) if key in admission] == sorted(there)
        assert len(admission) == len(there) <= 4
    assert 0 <= admission.crowded_for(now) <= CROWDED_SECONDS


@given(st.lists(st.tuples(st.floats(0, 90), st.booleans()), max_size=60), st.booleans())
def test_whoever_tries_tokens_waits_ever_longer_but_never_long(tries: List[Tuple[float, bool]], is_local: bool) -> None:
    admission = Admission()
    longest = FAILED_PROOFS_LOCAL_SECONDS if is_local else FAILED_PROOFS_MAX_SECONDS
    now = 0.0
    waits: List[float] = []
    for pause, obeys in tries:
        now += pause
        if obeys:
            now += admission.is_shut("a", now)
        admission.proof_failed("a", now, is_local=is_local)
        waits.append(admission.is_shut("a", now))
        assert 0 <= waits[-1] <= longest
        assert admission.is_shut("a", now + longest) == 0
        assert admission.is_shut("b", now) == 0
    assert not any(waits[:5])


@given(st.integers(1, 40))
def test_without_a_pause_the_sixth_wrong_token_is_the_last_for_a_while(count: int) -> None:
    admission = Admission()
    tested = 0
    now = 0.0
    for _ in range(count * 100):
        now += 0.01
        if not admission.is_shut("a", now):
            tested += 1
            admission.proof_failed("a", now, is_local=False)

    # Two tries after each of 1, 2, 4, ... seconds.
    assert tested <= 6 + 2 * count.bit_length()


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xyzuvwrst"), st.floats(0, 20)), max_size=80))
def test_the_log_does_not_fill(refusals: List[Tuple[str, str, float]]) -> None:
    admission = Admission()
    now = 0.0
    told: List[Tuple[float, str, str]] = []
    for address, reason, pause in refusals:
        now += pause
        line = admission.line(address, reason, now)
        if line is None:
            continue
        told.append((now, address, reason))
        same = [when for when, *who in told if who == [address, reason]]
        assert len(same) < 2 or same[-1] - same[-2] >= REFUSALS_LOGGED_SECONDS
        recent = [when for when, who, _ in told if who == address and now - when < REFUSALS_LOGGED_SECONDS]
        assert len(recent) <= 2 * REFUSALS_LOGGED  # The time of an address begins anew with its next line.
    assert admission.refused == len(refusals)
    assert not refusals or told


def test_the_tables_are_bounded() -> None:
    admission = Admission()
    for number in range(3 * KNOWN_STRANGERS):
        admission.proof_failed(f"address {number}", 0.0, is_local=False)
        admission.line(f"address {number}", "why", 0.0)

    assert len(admission._records) == len(admission._said) == len(admission._lines) == KNOWN_STRANGERS
