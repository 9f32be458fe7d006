"""Pure arithmetic over what was measured: percentiles, spreads, ratios, and which bars they meet."""

from __future__ import annotations

import math
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

Metrics = Dict[str, float]  # What one run of one workload gave.

# system -> the metrics of each successful run, by repeat
Runs = Dict[str, Dict[int, Metrics]]


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the values lie, interpolated between neighbours.

    Raises:
        ValueError: There are no values.
    """
    if not values:
        raise ValueError("no values to take a percentile of")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


class Summary(NamedTuple):
    """One figure of one system over all repeats."""

    median: float
    low: float
    high: float
    values: List[float]


def summarize(values: Sequence[float]) -> Summary:
    """Median and spread."""
    return Summary(percentile(values, 50), min(values), max(values), list(values))


class Bar(NamedTuple):
    """A limit on gpumesh's median: `limit`, or `limit` times the median of the peer `against`."""

    limit: float
    against: Optional[str] = None


class Row(NamedTuple):
    """One line of the table: a figure of gpumesh beside that of the others."""

    workload: str
    title: str
    metric: str  # gpumesh's
    unit: str
    smaller_is_better: bool
    peer_metric: Optional[str] = None  # Where the peers' figure has another name.
    bars: Tuple[Bar, ...] = ()
    goals: Tuple[Bar, ...] = ()
    is_ratio_useful: bool = True

    def metric_of(self, system: str) -> str:
        return self.metric if system == "gpumesh" or self.peer_metric is None else self.peer_metric


FLAT = 2.0  # A time that does not grow with the size: below a millisecond, single runs differ by nearly as much. A copy would be 1,000 x.
WAYS = {
    "put": "put",  # Client to coordinator.
    "get": "get",  # Coordinator to client.
    "argument": "argument",  # Coordinator to worker.
    "result": "result",  # Worker to coordinator; the client shares its memory.
}

# Wall time over the bound on unlike machines (unlike.py has the cases). Told nothing, peers run the cases of 60 tasks as one.
UNLIKE_ROWS: Tuple[Row, ...] = (
    Row(
        "unlike",
        "speeds 10 5 2 1, 200 tasks: scores equal",
        "even_over_bound",
        "",
        smaller_is_better=True,
        bars=(Bar(1.08), Bar(1, "dask")),
        goals=(Bar(1.03),),
    ),
    Row("unlike", "the same, Ray's SPREAD", "spread_even_over_bound", "", smaller_is_better=True),
    Row(
        "unlike",
        "speeds 20 10 2 0.2, 60 tasks: scores right",
        "right_over_bound",
        "",
        smaller_is_better=True,
        bars=(Bar(1.12),),
        goals=(Bar(1.05),),
    ),
    Row("unlike", "the same, Ray's SPREAD", "spread_right_over_bound", "", smaller_is_better=True),
    Row(
        "unlike",
        "the same, scores equal, never seen, idempotent",
        "unseen_over_bound",
        "",
        smaller_is_better=True,
        peer_metric="right_over_bound",
        bars=(Bar(1.30),),
        goals=(Bar(1.15),),
    ),
    Row(
        "unlike",
        "the same, its second call, not idempotent",
        "second_over_bound",
        "",
        smaller_is_better=True,
        peer_metric="right_over_bound",
        bars=(Bar(1.12),),
        goals=(Bar(1.05),),
    ),
    Row(
        "unlike",
        "the same, 300 tasks: scores wrong by 10 x",
        "wrong_over_bound",
        "",
        smaller_is_better=True,
        bars=(Bar(1.3),),
        goals=(Bar(1.15),),
    ),
    Row("unlike", "the same, Ray's SPREAD", "spread_wrong_over_bound", "", smaller_is_better=True),
)

# Actors of one class, called by the driver; and tasks that start tasks.
ACTOR_ROWS: Tuple[Row, ...] = (
    Row(
        "actor_latency",
        "call of an actor, there and back, p50",
        "p50_us",
        "us",
        smaller_is_better=True,
        bars=(Bar(0.45, "ray"),),
        goals=(Bar(0.3, "ray"),),
    ),
    Row("actor_latency", "call of an actor, there and back, p99", "p99_us", "us", smaller_is_better=True),
    Row(
        "actor_throughput",
        "calls of an actor, all submitted at once",
        "per_s",
        "calls/s",
        smaller_is_better=False,
        bars=(Bar(4, "ray"), Bar(1.5, "xoscar")),
        goals=(Bar(8, "ray"),),
    ),
    Row(
        "actor_create",
        "20 actors, and the first call of each",
        "seconds",
        "s",
        smaller_is_better=True,
        bars=(Bar(0.3, "ray"),),
    ),
    Row(
        "actor_array",
        "call with 1 MB, one by one",
        "calls_per_s",
        "calls/s",
        smaller_is_better=False,
        bars=(Bar(1, "ray"),),
    ),
    Row(
        "actor_array",
        "call with 1 MB, all at once",
        "at_once_per_s",
        "calls/s",
        smaller_is_better=False,
        bars=(Bar(1, "ray"),),
    ),
    Row("actor_stream", "items of a generator method", "items_per_s", "items/s", smaller_is_better=False),
    Row("actor_stream", "first item of a generator method", "first_ms", "ms", smaller_is_better=True),
    Row(
        "nested",
        "100 tasks that start 10 of 5 ms: total / ideal",
        "total_over_ideal",
        "",
        smaller_is_better=True,
        bars=(Bar(1.15),),
        goals=(Bar(1.05),),
    ),
    Row("nested", "the same, the first time in a process", "first_over_ideal", "", smaller_is_better=True),
)

# What gpumesh must reach (bars) and wants to reach (goals): two slots, everything on one machine of two cores.
ROWS: Tuple[Row, ...] = (
    Row(
        "noop_latency",
        "no-op round trip, p50",
        "p50_us",
        "us",
        smaller_is_better=True,
        bars=(Bar(0.25, "ray"), Bar(1.8, "processpool")),
        goals=(Bar(1.3, "processpool"),),
    ),
    Row("noop_latency", "no-op round trip, p99", "p99_us", "us", smaller_is_better=True),
    Row(
        "noop_throughput",
        "no-op, .map",
        "stream_per_s",
        "tasks/s",
        smaller_is_better=False,
        peer_metric="futures_per_s",
        bars=(Bar(3, "processpool"), Bar(20, "ray")),
        goals=(Bar(6, "processpool"),),
    ),
    Row(
        "noop_throughput",
        "no-op, one future each",
        "futures_per_s",
        "tasks/s",
        smaller_is_better=False,
        bars=(Bar(1.5, "processpool"),),
        goals=(Bar(3, "processpool"),),
    ),
    Row(
        "small_args",
        "1 kB in and out, .map",
        "stream_per_s",
        "tasks/s",
        smaller_is_better=False,
        peer_metric="futures_per_s",
        bars=(Bar(2, "processpool"),),
        goals=(Bar(4, "processpool"),),
    ),
    Row("small_args", "1 kB in and out, one future each", "futures_per_s", "tasks/s", smaller_is_better=False),
    Row("first_result", "20 ms tasks: first result", "first_ms", "ms", smaller_is_better=True, bars=(Bar(30),)),
    Row("first_result", "the same, a process's first stream", "first_of_process_ms", "ms", smaller_is_better=True),
    Row("first_result", "20 ms tasks: total / ideal", "total_over_ideal", "", smaller_is_better=True, bars=(Bar(1.03),)),
    Row("start", "process start to first result", "seconds", "s", smaller_is_better=True, bars=(Bar(0.4),), goals=(Bar(0.25),)),
    Row(
        "idle_memory",
        "idle PSS, without driver",
        "system_mb",
        "MB",
        smaller_is_better=True,
        bars=(Bar(75),),
        goals=(Bar(50),),
    ),
    Row("idle_memory", "idle PSS, with driver", "with_driver_mb", "MB", smaller_is_better=True),
    Row(
        "idle_memory",
        "idle CPU, of one core",
        "cpu_percent",
        "%",
        smaller_is_better=True,
        bars=(Bar(1),),
        goals=(Bar(0.3),),
        is_ratio_useful=False,
    ),
    Row("many_pending", "many pending: submit", "submit_s", "s", smaller_is_better=True),
    Row(
        "many_pending",
        "many pending: all results",
        "total_s",
        "s",
        smaller_is_better=True,
        bars=(Bar(0.5, "processpool"),),
        goals=(Bar(0.25, "processpool"),),
    ),
    Row(
        "many_pending",
        "many pending: peak PSS",
        "peak_mb",
        "MB",
        smaller_is_better=True,
        bars=(Bar(1, "processpool"),),
    ),
    Row(
        "many_pending",
        "many pending: PSS after / before",
        "after_over_before",
        "",
        smaller_is_better=True,
        bars=(Bar(1.2),),
        is_ratio_useful=False,
    ),
    Row(
        "put_repeated",
        "put 100 MB again and again",
        "warm_gb_s",
        "GB/s",
        smaller_is_better=False,
        bars=(Bar(0.7, "ray"), Bar(5, "dask")),
        goals=(Bar(1, "ray"),),
    ),
    Row("put_repeated", "put 100 MB, the very first", "cold_gb_s", "GB/s", smaller_is_better=False),
    Row("put_small", "put 1 kB", "per_s", "puts/s", smaller_is_better=False),
    Row("get_other_process", "get inside a task, 1 MB", "get_1mb_ms", "ms", smaller_is_better=True),
    Row("get_other_process", "get inside a task, 10 MB", "get_10mb_ms", "ms", smaller_is_better=True),
    Row("get_other_process", "get inside a task, 100 MB", "get_100mb_ms", "ms", smaller_is_better=True),
    Row("get_other_process", "get inside a task, 1 GB", "get_1000mb_ms", "ms", smaller_is_better=True),
    Row(
        "get_other_process",
        "get inside a task, 1 GB / 1 MB",
        "get_largest_over_smallest",
        "",
        smaller_is_better=True,
        bars=(Bar(FLAT),),
        is_ratio_useful=False,
    ),
    Row("get_other_process", "new ref as argument, 1 MB", "argument_1mb_ms", "ms", smaller_is_better=True),
    Row("get_other_process", "new ref as argument, 10 MB", "argument_10mb_ms", "ms", smaller_is_better=True),
    Row("get_other_process", "new ref as argument, 100 MB", "argument_100mb_ms", "ms", smaller_is_better=True),
    Row("get_other_process", "new ref as argument, 1 GB", "argument_1000mb_ms", "ms", smaller_is_better=True),
    Row(
        "get_other_process",
        "new ref as argument, 1 GB / 1 MB",
        "argument_largest_over_smallest",
        "",
        smaller_is_better=True,
        bars=(Bar(FLAT),),
        is_ratio_useful=False,
    ),
    Row(
        "ref_argument",
        "100 MB ref as argument, one by one",
        "calls_per_s",
        "tasks/s",
        smaller_is_better=False,
        bars=(Bar(0.5, "ray"),),
        goals=(Bar(1, "ray"),),
    ),
    Row("ref_argument", "the same", "call_gb_s", "GB/s", smaller_is_better=False),
    Row(
        "ref_argument",
        "100 MB ref as argument, all at once",
        "at_once_per_s",
        "tasks/s",
        smaller_is_better=False,
        bars=(Bar(0.5, "ray"),),
        goals=(Bar(1, "ray"),),
    ),
    Row("ref_argument", "the same", "at_once_gb_s", "GB/s", smaller_is_better=False),
    Row(
        "return_100mb",
        "task returns 100 MB",
        "warm_gb_s",
        "GB/s",
        smaller_is_better=False,
        bars=(Bar(0.7, "ray"), Bar(4, "dask")),
        goals=(Bar(1, "ray"),),
    ),
    Row(
        "broadcast",
        "100 MB put, 8 tasks on 2 slots add it up",
        "seconds",
        "s",
        smaller_is_better=True,
        bars=(Bar(1.5, "ray"),),
        goals=(Bar(1, "ray"),),
    ),
    Row("broadcast", "the same, without the put", "tasks_s", "s", smaller_is_better=True),
    Row(
        "chain_1000",
        "1,000 steps, each with the future before",
        "seconds",
        "s",
        smaller_is_better=True,
        bars=(Bar(0.5, "ray"),),
        goals=(Bar(0.25, "ray"),),
    ),
    Row("chain_1000", "the same, one step", "step_ms", "ms", smaller_is_better=True),
    Row(
        "store_spill",
        "100 x 100 MB in 500 MB: peak resident",
        "resident_mb",
        "MB",
        smaller_is_better=True,
        bars=(Bar(700),),
    ),
    Row("store_spill", "the same: PSS of its processes", "processes_mb", "MB", smaller_is_better=True),
    Row("store_spill", "the same: shared memory", "shared_mb", "MB", smaller_is_better=True),
    Row("store_spill", "the same: 100 puts", "put_s", "s", smaller_is_better=True),
    Row("store_spill", "the same: 100 values read", "read_s", "s", smaller_is_better=True),
    Row(
        "quickjoin",
        "quickjoin to first result, no address given",
        "first_result_s",
        "s",
        smaller_is_better=True,
        bars=(Bar(5),),
    ),
    Row("quickjoin", "the same: mesh found", "found_s", "s", smaller_is_better=True),
    Row("quickjoin", "the same: joined", "joined_s", "s", smaller_is_better=True),
    *(
        Row(
            "cross_host",
            f"100 MB over TCP / plain sockets: {title}",
            f"{way}_over_plain",
            "",
            smaller_is_better=False,
            bars=(Bar(0.6),),
            goals=(Bar(0.9),),
        )
        for way, title in WAYS.items()
    ),
    *(
        Row("cross_host", f"100 MB over TCP: {title}", f"{way}_gb_s", "GB/s", smaller_is_better=False)
        for way, title in WAYS.items()
    ),
    Row("cross_host", "plain sockets into fresh memory", "plain_fresh_gb_s", "GB/s", smaller_is_better=False),
    Row("cross_host", "plain sockets into the same memory", "plain_reused_gb_s", "GB/s", smaller_is_better=False),
    Row(
        "tls_latency",
        "no-op inside TLS / plain, p50",
        "tls_over_plain",
        "",
        smaller_is_better=True,
        bars=(Bar(1.25),),
    ),
    Row("tls_latency", "no-op inside TLS, p50", "tls_p50_us", "us", smaller_is_better=True),
    Row("tls_latency", "the same, plain", "plain_p50_us", "us", smaller_is_better=True),
    *(
        Row(
            "tls_bulk", f"100 MB inside TLS, {title}", f"tls_link_{end}_gb_s", "GB/s", smaller_is_better=False, bars=(Bar(1.5),)
        )
        for end, title in (("to", "to a coordinator"), ("from", "from it"))
    ),
    *(
        Row("tls_bulk", f"the same over bare ssl, {end}", f"tls_over_bare_{end}", "", smaller_is_better=False)
        for end in ("to", "from")
    ),
    *(
        Row("tls_bulk", f"the same, {title}", f"{name}_gb_s", "GB/s", smaller_is_better=False)
        for name, title in (
            ("plain_link_to", "plain, to"),
            ("plain_link_from", "plain, from"),
            ("tls_put", "put into new memory"),
            ("tls_get", "get into new memory"),
            ("plain_put", "plain put"),
            ("plain_get", "plain get"),
        )
    ),
    *(
        Row("tls_bulk", title, f"{name}_gb_s", "GB/s", smaller_is_better=False)
        for name, title in (
            *(
                (f"bare_{kind}_{end}", f"bare ssl between two processes, {title}, {end}")
                for kind, title in (("socket", "SSLSocket"), ("memory", "MemoryBIO"))
                for end in ("to", "from")
            ),
            ("openssl", "the cipher alone, openssl speed"),
        )
    ),
    *(
        row
        for side, title in (("client", "2 GB put"), ("worker", "2 GB argument"))
        for row in (
            Row(
                "latency_under_transfer",
                f"no-op during a {title}, p99",
                f"{side}_p99_ms",
                "ms",
                smaller_is_better=True,
                bars=(Bar(5),),
                goals=(Bar(2),),
            ),
            Row("latency_under_transfer", f"no-op during a {title}, p50", f"{side}_p50_ms", "ms", smaller_is_better=True),
            Row("latency_under_transfer", f"no-op before a {title}, p99", f"{side}_idle_p99_ms", "ms", smaller_is_better=True),
            Row("latency_under_transfer", f"{title} meanwhile", f"{side}_gb_s", "GB/s", smaller_is_better=False),
        )
    ),
    *ACTOR_ROWS,
    Row(
        "deaths",
        "40 tasks of 0.25 s, kill -9 of a process: past the ideal",
        "process_over_s",
        "s",
        smaller_is_better=True,
        bars=(Bar(0.35),),
        goals=(Bar(1, "ray"), Bar(1, "dask")),
        is_ratio_useful=False,
    ),
    Row("deaths", "its task runs again after", "process_wait_s", "s", smaller_is_better=True, is_ratio_useful=False),
    Row(
        "deaths",
        "kill -9 of a worker: its task runs again after",
        "worker_wait_s",
        "s",
        smaller_is_better=True,
        bars=(Bar(0.75),),  # The rest of what the other one runs, and half a second to notice.
        is_ratio_useful=False,
    ),
    Row(
        "jobs",
        "script tasks accepted, on disk",
        "accepted_per_s",
        "tasks/s",
        smaller_is_better=False,
        bars=(Bar(5000),),
    ),
    Row(
        "jobs",
        "no-op p50 while 6,000 tasks/s come, over p50 at rest",
        "latency_over_idle",
        "",
        smaller_is_better=True,
        bars=(Bar(1.5),),
    ),
    Row("jobs", "tasks that came meanwhile", "paced_per_s", "tasks/s", smaller_is_better=False),
    Row("jobs", "no-op at rest, p50", "idle_p50_us", "us", smaller_is_better=True),
    Row("jobs", "no-op meanwhile, p50", "during_p50_us", "us", smaller_is_better=True),
    Row("jobs", "no-op at rest, p99", "idle_p99_us", "us", smaller_is_better=True),
    Row("jobs", "no-op meanwhile, p99", "during_p99_us", "us", smaller_is_better=True),
    *(
        row._replace(workload=workload, title=f"{title}, {row.title}", bars=bars, goals=goals)
        for workload, title, has_bars in (("unlike", "slept", True), ("unlike_burning", "computed", False))
        for row in UNLIKE_ROWS
        for bars, goals in [(row.bars, row.goals) if has_bars else ((), ())]
    ),
)


class Verdict(NamedTuple):
    """Whether a bar or a goal is met."""

    bar: Bar
    is_goal: bool
    limit: Optional[float]  # In the row's unit; None: the peer was not measured.
    is_met: Optional[bool]  # None: cannot be said.


class Judged(NamedTuple):
    """A row with what was measured for it."""

    row: Row
    summaries: Dict[str, Summary]
    ratios: Dict[str, Summary]  # gpumesh / peer: the median is that of the medians, the spread that of the single repeats.
    verdicts: List[Verdict]


def judge(row: Row, runs: Runs) -> Judged:
    """Summarize one row, and hold it against its bars."""
    values = {
        system: {
            repeat: metrics[row.metric_of(system)] for repeat, metrics in repeats.items() if row.metric_of(system) in metrics
        }
        for system, repeats in runs.items()
    }
    summaries = {system: summarize(list(found.values())) for system, found in values.items() if found}
    own = summaries.get("gpumesh")
    ratios = {
        peer: _ratio(values["gpumesh"], values[peer])
        for peer, summary in summaries.items()
        if row.is_ratio_useful and own is not None and peer != "gpumesh" and summary.median > 0
    }
    verdicts = [
        _verdict(row, bar, is_goal, summaries) for is_goal, bars in ((False, row.bars), (True, row.goals)) for bar in bars
    ]
    return Judged(row, summaries, ratios, verdicts)


def _ratio(own: Dict[int, float], peer: Dict[int, float]) -> Summary:
    paired = [value / peer[repeat] for repeat, value in own.items() if peer.get(repeat, 0) > 0]
    median = percentile(list(own.values()), 50) / percentile(list(peer.values()), 50)
    return Summary(median, min([median, *paired]), max([median, *paired]), paired)


def _verdict(row: Row, bar: Bar, is_goal: bool, summaries: Dict[str, Summary]) -> Verdict:
    limit: Optional[float] = bar.limit
    if bar.against is not None:
        limit = bar.limit * summaries[bar.against].median if bar.against in summaries else None
    own = summaries.get("gpumesh")
    if own is None or limit is None:
        return Verdict(bar, is_goal, limit, None)
    return Verdict(bar, is_goal, limit, own.median <= limit if row.smaller_is_better else own.median >= limit)


def judge_all(measured: Dict[str, Runs]) -> List[Judged]:
    """The rows of the workloads that were run, in the table's order."""
    return [judge(row, measured[row.workload]) for row in ROWS if row.workload in measured]
