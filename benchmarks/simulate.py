"""`python -m benchmarks simulate`: the real scheduler with 10 to 10,000 virtual workers in virtual time."""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
from typing import Any, Dict, List, Optional, Sequence

from benchmarks.environment import describe
from benchmarks.simulate_engine import first_come_first_served, simulate
from benchmarks.simulate_workload import (
    DISTRIBUTIONS,
    EIGHT_SCORES,
    LATENCY_SECONDS,
    SCORES,
    parse_speeds,
    quantile,
    standard_case,
)
from benchmarks.table import aligned

SCALE = "a task of length 1 takes 1 s on a machine of score 1; ratios are wall time over max(sum of work / sum of speeds, longest task on its best worker)"


def main(arguments: Sequence[str]) -> int:
    """Simulate what the arguments ask for; 2 when they make no sense."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        speeds = parse_speeds(options.workers, random.Random(0)) if options.workers else EIGHT_SCORES
    except ValueError as error:
        parser.error(str(error))
    if options.table:
        return _table(options)
    if options.decisions:
        return _decisions(options)
    rows: List[Dict[str, Any]] = []
    print(SCALE)
    total = sum(speeds)
    print(
        f"{len(speeds)} machines of speeds {min(speeds):g} to {max(speeds):g} (sum {total:g}), {options.slots} slot(s) each; ",
        end="",
    )
    print(f"{options.tasks} tasks, {options.seeds} seeds, {2e3 * options.latency:g} ms round trip\n")
    for distribution in options.lengths:
        for scores in options.scores:
            row = measure(
                distribution,
                seeds=options.seeds,
                tasks=options.tasks,
                speeds=speeds,
                scores=scores,
                idempotent=options.idempotent,
                slots=options.slots,
                latency=options.latency,
                slow_links=options.slow_links,
                joins=options.joins,
                deaths=options.deaths,
            )
            rows.append(row)
            print(f"{distribution}, {scores}: {row['median']:.3f} / {row['worst']:.3f}", file=sys.stderr, flush=True)
    print(show(rows))
    print(f"\npeak memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000:.0f} MB")
    _write(options.json, {"speeds": list(speeds), "options": vars(options), "rows": rows})
    return 0


def _table(options: argparse.Namespace) -> int:
    """Print what the placement promises and keeps; 1 when it does not keep something."""
    from benchmarks.simulate_table import HEADING, as_json, cells, rows

    print(SCALE)
    print(f"8 machines of speeds 120 to 0.3, 1,000 tasks unless said, {options.seeds} seeds, median / worst\n", flush=True)
    found = rows(options.seeds, on_row=lambda row: print("  ".join(cells(row)), file=sys.stderr, flush=True))
    print("\n".join(aligned([HEADING, *map(cells, found)])))
    _write(options.json, {"seeds": options.seeds, "rows": as_json(found)})
    return int(not all(row.is_met for row in found))


def _decisions(options: argparse.Namespace) -> int:
    """Print decisions per second and memory."""
    from benchmarks.simulate_decisions import DECISION_BARS, MEMORY_BAR, SLOTS, measure_decisions, measure_memory

    print(
        f"100,000 pending tasks, workers of {SLOTS} slots; tasks assigned and finished per second of the scheduler's processor time\n"
    )
    lines = [["workers", "may run twice", "results per report", "decisions/s", "asked"]]
    found = []
    for workers, bar in DECISION_BARS.items():
        for idempotent in (False, True):
            for batch in (1, 4):
                figure = measure_decisions(workers, idempotent=idempotent, batch=batch)
                found.append({**figure._asdict(), "per_second": figure.per_second})
                results = "1" if batch == 1 else f"1 to {batch}"
                lines.append([f"{workers:,}", "yes" if idempotent else "no", results, f"{figure.per_second:,.0f}", f"{bar:,}"])
    size = measure_memory()
    print("\n".join(aligned(lines)))
    print(f"\n{size:.0f} bytes for each pending task (tracemalloc, 100,000 tasks, their ids included); asked are {MEMORY_BAR}")
    _write(options.json, {"decisions": found, "bytes_per_task": size})
    return 0


def _write(path: Optional[str], found: Dict[str, Any]) -> None:
    if path is not None:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"environment": describe(), **found}, file, indent=1)
            file.write("\n")


def measure(distribution: str, *, seeds: int, **options: Any) -> Dict[str, Any]:
    """One row: `seeds` runs of `standard_case(distribution, seed=..., **options)`."""
    ratios: List[float] = []
    baseline: List[float] = []
    extra = work = cpu = 0.0
    assigned = 0
    for seed in range(seeds):
        case = standard_case(distribution, seed=seed, **options)
        result = simulate(case)
        ratios.append(result.ratio)
        extra += result.extra
        work += result.work
        cpu += result.cpu_seconds
        assigned += result.assigned
        if not options.get("joins") and not options.get("deaths"):
            baseline.append(first_come_first_served(case))
    return {
        "distribution": distribution,
        "scores": options["scores"],
        "idempotent": options["idempotent"],
        "median": quantile(ratios, 0.5),
        "worst": max(ratios),
        "worst_seed": ratios.index(max(ratios)),
        "extra": extra / work,
        "decisions_per_second": assigned / cpu,
        "baseline_median": quantile(baseline, 0.5),
        "baseline_worst": max(baseline, default=None),
        "ratios": ratios,
    }


def show(rows: Sequence[Dict[str, Any]]) -> str:
    """Rows as a table for people."""
    lines = [["lengths", "scores", "median", "worst (seed)", "extra work", "decisions/s", "first come first served"]]
    for row in rows:
        plain = "-" if row["baseline_median"] is None else f"{row['baseline_median']:.2f} / {row['baseline_worst']:.2f}"
        lines.append(
            [
                row["distribution"],
                row["scores"],
                f"{row['median']:.3f}",
                f"{row['worst']:.3f} ({row['worst_seed']})",
                f"{100 * row['extra']:.2f} %",
                f"{row['decisions_per_second']:,.0f}",
                plain,
            ]
        )
    return "\n".join(aligned(lines))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks simulate", description=__doc__)
    parser.add_argument(
        "--table", action="store_true", help="every row that the placement is judged by (--seeds 50 takes some minutes)"
    )
    parser.add_argument("--decisions", action="store_true", help="how fast the scheduler alone decides, and its memory")
    parser.add_argument("--workers", metavar="SPEEDS|N", help="speeds as 120,85,52, or how many to draw from scores of real cards (default: eight unlike ones)")  # fmt: skip
    parser.add_argument("--slots", type=int, default=1, help="of each machine, which share its speed (default 1)")
    parser.add_argument("--tasks", type=int, default=1000, help="default 1000")
    parser.add_argument("--seeds", type=int, default=20, help="runs of each row (default 20)")
    parser.add_argument("--lengths", nargs="+", choices=DISTRIBUTIONS, default=list(DISTRIBUTIONS), help="default: all")
    parser.add_argument("--scores", nargs="+", choices=SCORES, default=["right"], help="told by the machines (default right)")
    parser.add_argument("--idempotent", action="store_true", help="tasks may run twice")
    parser.add_argument("--latency", type=float, default=LATENCY_SECONDS, help="one way, in seconds (default 0.0001)")
    parser.add_argument("--slow-links", type=float, default=0.0, metavar="FRACTION", help="of the machines have 50 ms one way")
    parser.add_argument("--joins", type=int, default=0, help="so many of the machines join late")
    parser.add_argument("--deaths", type=int, default=0, help="so many of them die on the way")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    return parser
