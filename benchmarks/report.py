"""A whole harness run as text and as JSON."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence

from benchmarks.figures import Judged, Summary, judge_all
from benchmarks.running import Run, by_system
from benchmarks.table import measured_table, ratio_table, verdict_table

FORMAT = 1  # Of the JSON; raised when a reader of older files would misread it.


def judged_runs(runs: Sequence[Run]) -> List[Judged]:
    """The table's rows for what was run."""
    workloads = dict.fromkeys(run.workload for run in runs)
    return judge_all({workload: by_system(runs, workload) for workload in workloads})


def as_text(environment: Dict[str, Any], options: Dict[str, Any], runs: Sequence[Run]) -> str:
    """Environment, figures, ratios, verdicts, and what went wrong."""
    judged = judged_runs(runs)
    systems: List[str] = options["systems"]
    succeeded = {(run.workload, run.system) for run in runs if run.metrics}
    failed = {f"{run.workload}/{run.system}" for run in runs} - {f"{workload}/{system}" for workload, system in succeeded}
    parts = [environment_text(environment, options), measured_table(judged, systems, failed)]
    if "gpumesh" in systems:
        parts += [ratio_table(judged, systems), verdict_table(judged)]
    parts.append(trouble_text(runs))
    return "\n\n".join(filter(None, parts))


def environment_text(environment: Dict[str, Any], options: Dict[str, Any]) -> str:
    """What these figures were taken with."""
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    commit = (environment["commit"] or "no commit")[:12] + (" (modified)" if environment["is_modified"] else "")
    loads = " ".join(f"{load:.2f}" for load in environment["load_average_before"])
    machine = (
        f"{environment['cpu']}, {environment['cores']} cores, {environment['memory_gib']} GiB, Linux {environment['kernel']}"
    )
    quick = ", quick: smaller sizes, not for comparison" if options["quick"] else ""
    return "\n".join(
        [
            f"{environment['date']}, {commit}, load before {loads}",
            machine,
            f"{environment['python']}; {versions}",
            f"{options['repeats']} repeat{'s' if options['repeats'] > 1 else ''}{quick}",
        ]
    )


def trouble_text(runs: Sequence[Run]) -> str:
    """Each run that failed or left processes behind; empty when all went well."""
    lines = []
    for run in runs:
        where = f"{run.workload} of {run.system}, repeat {run.repeat + 1}"
        if run.error:
            lines.append(f"{where} failed: {_last_lines(run.error)}")
        if run.left_behind:
            lines.append(f"{where} left processes behind: {', '.join(run.left_behind)}")
    return "\n".join(lines)


def _last_lines(error: str) -> str:
    """What happened and where; the whole is in the JSON."""
    first, *others = error.splitlines()
    return "\n".join([first, *(f"    {line}" for line in others[-5:])])


def as_json(environment: Dict[str, Any], options: Dict[str, Any], runs: Sequence[Run]) -> Dict[str, Any]:
    """Everything, single runs included."""
    return {
        "format": FORMAT,
        "environment": environment,
        "options": options,
        "rows": [_row_json(entry) for entry in judged_runs(runs)],
        "runs": [run._asdict() for run in runs],
    }


def _row_json(entry: Judged) -> Dict[str, Any]:
    row = entry.row
    return {
        "workload": row.workload,
        "title": row.title,
        "unit": row.unit,
        "smaller_is_better": row.smaller_is_better,
        "metrics": {system: row.metric_of(system) for system in entry.summaries},
        "systems": {system: _summary_json(summary) for system, summary in entry.summaries.items()},
        "ratios": {peer: _summary_json(ratio) for peer, ratio in entry.ratios.items()},
        "verdicts": [
            {
                "kind": "goal" if verdict.is_goal else "bar",
                "limit": verdict.bar.limit,
                "against": verdict.bar.against,
                "limit_in_unit": verdict.limit,
                "is_met": verdict.is_met,
            }
            for verdict in entry.verdicts
        ],
    }


def _summary_json(summary: Summary) -> Dict[str, Any]:
    return dict(summary._asdict())
