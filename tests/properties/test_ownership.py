"""An owner's rules under any observations: what is lent is never more than was said."""

from __future__ import annotations

from typing import Any, List, Tuple

from hypothesis import given, settings
from hypothesis import strategies as st

from gpumesh.model.resources import DeviceFacts, WorkerFacts
from gpumesh.scheduler.ownership import (
    GPUS,
    MACHINE,
    QUIET_SECONDS,
    Amount,
    Observations,
    Ownership,
    Pause,
    Rules,
    Window,
    describe,
    is_within,
    memory_limit,
    offered,
    withheld_cards,
)
from gpumesh.scheduler.ownership_forms import parse_hours, rules_from_plain, rules_to_plain

DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
TARGETS = st.sampled_from([MACHINE, GPUS, "0", "1", "cuda:0", "GPU-aaaa1111", "GPU-bbbb1111"])
AMOUNTS = st.one_of(
    st.integers(1, 40).map(lambda count: Amount(float(count))),
    st.builds(lambda percent: Amount(percent / 100, True), st.integers(1, 100)),
)
BYTES = st.one_of(
    st.integers(1, 10**11).map(lambda count: Amount(float(count))),
    st.builds(lambda percent: Amount(percent / 100, True), st.integers(1, 100)),
)
PAUSES = st.builds(
    lambda until, reason, ends_running: Pause(until, "22:00" if until else "", reason, ends_running),
    st.one_of(st.just(0.0), st.floats(1.0, 2000.0)),
    st.sampled_from(["", "a game"]),
    st.booleans(),
)
DEVICES = (
    DeviceFacts("cpu", 0, "CPU", 10**10, 2.0),
    DeviceFacts("cuda", 0, "A", 24 * 10**9, 90.0, uuid="GPU-aaaa1111", system_index=1, others=10**9),
    DeviceFacts("cuda", 1, "B", 10 * 10**9, 60.0, uuid="GPU-bbbb1111", system_index=0),
)


@st.composite
def hours(draw: Any) -> str:
    parts: List[str] = []
    for _ in range(draw(st.integers(1, 3))):
        days = draw(st.sampled_from(["", "Mon", "Sat-Sun", "Fri-Mon", "Tue/Thu"]))
        start = draw(st.integers(0, 1439))
        length = draw(st.integers(1, 1439))
        end = (start + length) % 1440
        parts.append(f"{days} {start // 60}:{start % 60:02}-{end // 60}:{end % 60:02}".strip())
    return ", ".join(parts)


@st.composite
def rules(draw: Any) -> Rules:
    pauses = draw(st.dictionaries(TARGETS, PAUSES, max_size=3))
    memory = draw(st.dictionaries(TARGETS.filter(lambda target: target != MACHINE), BYTES, max_size=3))
    text = draw(st.one_of(st.just(""), hours()))
    return Rules(
        pauses=tuple(pauses.items()),
        slots=draw(st.one_of(st.none(), AMOUNTS)),
        gpu_memory=tuple(memory.items()),
        hours=text,
        windows=parse_hours(text) if text else (),
        idle_minutes=float(draw(st.sampled_from([0, 0, 5]))),
        exclusive=draw(st.sampled_from([(), ("steam",), ("steam", "blender")])),
        ends_running=draw(st.booleans()),
    )


@st.composite
def moments(draw: Any, wanted: Rules) -> Observations:
    minute = draw(st.floats(0, 1440, exclude_max=True))
    return Observations(
        now=draw(st.floats(0, 100)),
        wall=draw(st.floats(0, 3000)),
        weekday=draw(st.integers(0, 6)),
        minute=minute,
        idle_seconds=draw(st.one_of(st.none(), st.floats(0, 1000))),
        idle_problem="nobody knows",
        programs=tuple(name for name in wanted.exclusive if draw(st.booleans())),
    )


FACTS = st.builds(
    WorkerFacts,
    slots=st.integers(1, 64),
    cores=st.integers(1, 64),
    memory=st.just(10**10),
    score=st.just(2.0),
    devices=st.just(DEVICES),
    problem=st.sampled_from(["", "no processes"]),
)


@given(st.data(), FACTS)
@settings(max_examples=400, deadline=None)
def test_what_is_lent_is_never_more_than_was_said(data: Any, facts: WorkerFacts) -> None:
    wanted = data.draw(rules())
    seen = data.draw(moments(wanted))
    ownership = Ownership()
    ownership.rules = wanted

    offer = ownership.judge(seen)
    told = offered(facts, offer)

    lasting = [target for target, pause in wanted.pauses if not pause.until or seen.wall < pause.until]
    takes = MACHINE in lasting or bool(seen.programs)
    takes = takes or bool(wanted.windows and not is_within(wanted.windows, seen.weekday, seen.minute))
    takes = takes or bool(wanted.idle_minutes and (seen.idle_seconds is None or seen.idle_seconds < 300))
    assert bool(offer.problem) is takes
    assert bool(told.problem) is (takes or bool(facts.problem))
    assert 1 <= told.slots <= facts.slots
    assert 1 <= told.cores <= facts.cores
    assert 0 < told.score <= facts.score
    if wanted.slots is not None and wanted.slots.of(facts.slots) >= 1:
        assert told.slots == wanted.slots.of(facts.slots)
    withheld = withheld_cards(facts, offer)
    for before, after in zip(facts.devices, told.devices):
        limit = memory_limit(before, offer)
        assert after.memory == (before.memory if limit is None else min(limit, before.memory))
        assert after.memory - after.others <= before.memory - before.others
        assert bool(after.problem) is (before.key in withheld)
        assert before.kind != "cpu" or after._replace(score=0.0) == before._replace(score=0.0)
        assert (GPUS in lasting and before.kind != "cpu") <= (before.key in withheld)
    assert ownership.judge(seen) == offer, "nothing has changed"
    assert wanted == Rules() or bool(describe(wanted, seen.wall)) or wanted._replace(pauses=(), ends_running=False) == Rules()


@given(rules())
@settings(max_examples=200, deadline=None)
def test_the_file_keeps_every_rule(wanted: Rules) -> None:
    import json

    assert rules_from_plain(json.loads(json.dumps(rules_to_plain(wanted)))) == wanted


@given(hours(), st.integers(0, 6), st.integers(0, 1439))
@settings(max_examples=400, deadline=None)
def test_hours_hold_for_exactly_the_minutes_they_name(text: str, weekday: int, minute: int) -> None:
    lent = set()
    for part in text.split(", "):
        days, _, times = part.rpartition(" ")
        first, last = ([int(piece) for piece in side.split(":")] for side in times.split("-"))
        start, end = first[0] * 60 + first[1], last[0] * 60 + last[1]
        named = {"": range(7), "Mon": [0], "Sat-Sun": [5, 6], "Fri-Mon": [4, 5, 6, 0], "Tue/Thu": [1, 3]}[days]
        for day in named:
            step = day * 1440 + start
            while True:
                lent.add(step % 10080)
                step += 1
                if step % 1440 == end % 1440:
                    break

    assert is_within(parse_hours(text), weekday, minute) is ((weekday * 1440 + minute) in lent)


@given(st.lists(st.tuples(st.floats(0.1, 30.0), st.booleans()), min_size=1, max_size=30))
@settings(max_examples=200, deadline=None)
def test_an_exclusive_program_holds_the_machine_until_it_has_been_gone_for_long(looks: List[Tuple[float, bool]]) -> None:
    ownership = Ownership()
    ownership.rules = Rules(exclusive=("steam",))
    now = 0.0
    seen_at = None
    changes = 0
    before = False
    for pause, runs in looks:
        now += pause
        offer = ownership.judge(Observations(now, now, 0, 0.0, programs=("steam",) if runs else ()))
        if runs:
            seen_at = now
        taken = seen_at is not None and (runs or now - seen_at < QUIET_SECONDS)
        if not taken:
            seen_at = None
        assert bool(offer.problem) is taken
        changes += taken is not before
        before = taken
    assert changes <= 1 + 2 * now / QUIET_SECONDS


@given(
    st.lists(
        st.builds(Window, st.sets(st.integers(0, 6), min_size=1).map(tuple), st.integers(0, 1439), st.integers(1, 1440)),
        max_size=3,
    )
)
def test_a_window_is_open_for_its_whole_length_and_no_longer(windows: List[Window]) -> None:
    for window in windows:
        if window.minutes == 1440:
            continue
        day = window.days[0]
        first = day * 1440 + window.start
        last = (first + window.minutes - 1) % 10080
        after = (first + window.minutes) % 10080
        alone = (Window((day,), window.start, window.end),)
        assert is_within(alone, first // 1440, first % 1440)
        assert is_within(alone, last // 1440, last % 1440)
        assert not is_within(alone, after // 1440, after % 1440)
