"""What the profile makes of stacks and processor times."""

from __future__ import annotations

from benchmarks.profiling import Spent, cpu_table, functions_text, self_times


def test_the_innermost_frame_owns_the_sample() -> None:
    collapsed = "main (a.py:1);work (a.py:9) 3\nmain (a.py:1) 2\nmain (a.py:1);other (b.py:4);work (a.py:9) 4\n"

    assert self_times(collapsed) == [("work (a.py:9)", 7), ("main (a.py:1)", 2)]


def test_lines_that_are_no_stacks_are_passed_over() -> None:
    assert self_times("\nnothing here\nmain (a.py:1) 1\n") == [("main (a.py:1)", 1)]


def test_shares_are_of_all_samples_asked_for() -> None:
    text = functions_text(
        "driver", [("work (a.py:9)", 50), ("main (a.py:1)", 10), ("rest (a.py:2)", 1)], samples_asked=200, top=2
    )

    assert text.splitlines() == [
        "driver: busy in 30 % of the samples",
        "   25.0 %  work (a.py:9)",
        "    5.0 %  main (a.py:1)",
    ]


def test_processor_time_is_told_per_task_and_per_core() -> None:
    table = cpu_table(Spent(100_000, 2.0, {10: 1.0, 11: 0.5}), {10: "driver", 11: "gpumesh-coord"})

    assert table.splitlines() == [
        "100,000 tasks in 2.00 s, 20.0 us each, 50,000/s",
        "process        us of CPU per task  % of a core",
        "----------------------------------------------",
        "driver                       10.0         50.0",
        "gpumesh-coord                5.00         25.0",
        "all                          15.0         75.0",
    ]


def test_an_idle_mesh_has_no_time_per_task() -> None:
    assert "-" in cpu_table(Spent(0, 2.0, {10: 0.1}), {10: "driver"}).splitlines()[-1]
