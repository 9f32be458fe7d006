"""The figures as text: what was measured, then which bars are met. Plain characters, about 110 columns."""

from __future__ import annotations

from typing import Iterable, List, Optional, Sequence

from benchmarks.figures import Judged, Summary, Verdict
from benchmarks.systems import PROFILES


def number(value: float) -> str:
    """Three significant digits, or all before the point, with thousands marked."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 1:
        return f"{value:.2f}"
    return f"{value:.3f}" if size >= 0.01 else f"{value:.2g}"


def _spread(summary: Summary) -> str:
    if len(summary.values) < 2:
        return number(summary.median)
    return f"{number(summary.median)} ({number(summary.low)}-{number(summary.high)})"


def aligned(rows: Sequence[Sequence[str]]) -> List[str]:
    """A heading, a rule, and the rows; the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:]))]).rstrip() for row in rows
    ]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def measured_table(judged: Iterable[Judged], systems: Sequence[str], failed: Iterable[str] = ()) -> str:
    """Median and spread of every system. `failed` names "workload/system" pairs of which no run gave a figure."""
    failures = set(failed)
    rows = [["median (lowest-highest)", *(PROFILES[system].title for system in systems)]]
    for entry in judged:
        title = f"{entry.row.title}, {entry.row.unit}" if entry.row.unit else entry.row.title
        cells = [title]
        for system in systems:
            summary = entry.summaries.get(system)
            if summary is not None:
                cells.append(_spread(summary))
            else:
                cells.append("failed" if f"{entry.row.workload}/{system}" in failures else "-")
        rows.append(cells)
    return "\n".join(aligned(rows))


def ratio_table(judged: Iterable[Judged], systems: Sequence[str]) -> str:
    """gpumesh over each peer, with `+` where gpumesh is the better one; empty when there is nothing to compare."""
    peers = [system for system in systems if system != "gpumesh"]
    rows = [["gpumesh / peer (+ better, - worse)", *(PROFILES[peer].title for peer in peers)]]
    for entry in judged:
        if not entry.ratios:
            continue
        cells = [entry.row.title]
        for peer in peers:
            ratio = entry.ratios.get(peer)
            if ratio is None:
                cells.append("-")
                continue
            is_better = (ratio.median <= 1) == entry.row.smaller_is_better
            cells.append(f"{_spread(ratio)} {'+' if is_better else '-'}")
        rows.append(cells)
    return "\n".join(aligned(rows)) if len(rows) > 1 else ""


def verdict_table(judged: Iterable[Judged]) -> str:
    """Every bar and goal with what was reached; empty when none applies."""
    rows = [["bars and goals", "", "asked", "reached", "verdict"]]
    for entry in judged:
        own = entry.summaries.get("gpumesh")
        for verdict in entry.verdicts:
            sign = "<=" if entry.row.smaller_is_better else ">="
            rows.append(
                [
                    entry.row.title,
                    "goal" if verdict.is_goal else "bar",
                    f"{sign} {_asked(verdict, entry.row.unit)}",
                    _reached(verdict, own, entry.row.unit),
                    {True: "met", False: "NOT MET", None: "unknown"}[verdict.is_met],
                ]
            )
    return "\n".join(aligned(rows)) if len(rows) > 1 else ""


def _asked(verdict: Verdict, unit: str) -> str:
    if verdict.bar.against is None:
        return f"{verdict.bar.limit:g} {unit}".rstrip()
    return f"{verdict.bar.limit:g} x {PROFILES[verdict.bar.against].title}"


def _reached(verdict: Verdict, own: Optional[Summary], unit: str) -> str:
    if own is None or verdict.limit is None:
        return "-"
    if verdict.bar.against is None:
        return f"{number(own.median)} {unit}".rstrip()
    return f"{own.median * verdict.bar.limit / verdict.limit:.2f} x"
