"""The command line: `python -m benchmarks [workloads...]`, `... profile WORKLOAD`, `... simulate`, `... herd`, and what breaks."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from typing import Any, Dict, List, Optional, Sequence

from benchmarks.environment import describe
from benchmarks.report import as_json, as_text
from benchmarks.running import Run, adopt_orphans, run_all
from benchmarks.systems import PROFILES, is_installed
from benchmarks.table import number
from benchmarks.workloads import WORKLOADS

BUSY_LOAD = 0.5  # Processes ready to run, on average over the last minute, from which figures are in doubt.


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run what the arguments ask for; 1 when a run failed, 2 when the arguments make no sense."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["simulate"]:
        from benchmarks.simulate import main as simulate

        return simulate(given[1:])
    if sys.platform != "linux":
        print("the harness reads /proc, so it runs on Linux only", file=sys.stderr)
        return 2
    if given[:1] == ["herd"]:
        from benchmarks.herd import main as herd

        return herd(given[1:])
    if given and given[0] in ("idle", "cut", "restart"):
        from benchmarks.outages import main as outages

        return outages(given[0], given[1:])
    if given[:1] == ["chaos"]:
        from benchmarks.chaos import main as chaos

        return chaos(given[1:])
    if given[:1] == ["fuzz"]:
        from benchmarks.fuzz import main as fuzz

        return fuzz(given[1:])
    if given[:1] == ["halfopen"]:
        from benchmarks.halfopen import main as halfopen

        return halfopen(given[1:])
    if given[:1] == ["websocket_latency"]:
        from benchmarks.websocket import main as websocket_latency

        return websocket_latency(given[1:])
    if given[:1] == ["profile"]:
        from benchmarks.profiling import main as profile

        return profile(given[1:])
    return compare(given)


def compare(arguments: Sequence[str]) -> int:
    """Measure the systems side by side and print the table."""
    options = _parser().parse_args(arguments)
    systems, missing = _choose_systems(options.systems)
    for system in missing:
        print(f"{PROFILES[system].title} is not installed and left out", file=sys.stderr)
    if not systems:
        return 2
    workloads: List[str] = options.workloads or [name for name, workload in WORKLOADS.items() if workload.is_default]
    chosen: Dict[str, Any] = {"workloads": workloads, "systems": systems, "repeats": options.repeats, "quick": options.quick}
    environment = describe()
    if environment["load_average_before"][0] > BUSY_LOAD:
        print(f"this machine is busy (load {environment['load_average_before'][0]}); figures will suffer", file=sys.stderr)
    adopt_orphans()
    runs: List[Run] = []

    def keep(run: Run) -> None:
        _show_run(run)
        runs.append(run)

    status = 0
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        run_all(workloads, systems, repeats=options.repeats, quick=options.quick, on_run=keep)
    except KeyboardInterrupt:
        print("interrupted; what was measured until now:", file=sys.stderr)
        status = 128 + signal.SIGINT
    if runs:
        print(as_text(environment, chosen, runs))
    if options.json is not None:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(as_json(environment, chosen, runs), file, indent=1)
            file.write("\n")
    return status or int(any(run.error for run in runs))


def _interrupt(*_: object) -> None:
    """A request to end is handled like Ctrl-C: the run in progress is ended, the others are reported."""
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure gpumesh beside ProcessPoolExecutor and, when installed, Ray, Dask, xoscar and Pyro5. "
        "`python -m benchmarks profile WORKLOAD` says where gpumesh's time goes.",
    )
    parser.add_argument("workloads", nargs="*", metavar="workload", type=_one_of(WORKLOADS), help=", ".join(WORKLOADS))
    parser.add_argument(
        "--systems", type=_systems, help=f"comma-separated, of {','.join(PROFILES)}; all that are installed by default"
    )
    parser.add_argument("--repeats", type=_positive, default=3, help="runs of each workload on each system (default 3)")
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that everything works, not how fast")
    parser.add_argument("--json", metavar="FILE", help="write all figures and the environment there")
    return parser


def _one_of(known: Dict[str, Any]) -> Any:
    def parse(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(known)}")
        return text

    return parse


def _systems(text: str) -> List[str]:
    return list(dict.fromkeys(_one_of(PROFILES)(name) for name in text.split(",")))


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _choose_systems(asked: Optional[List[str]]) -> tuple[List[str], List[str]]:
    wanted = asked or list(PROFILES)
    return [system for system in wanted if is_installed(system)], [system for system in wanted if not is_installed(system)]


def _show_run(run: Run) -> None:
    outcome = "failed" if run.error else ", ".join(f"{name} {number(value)}" for name, value in run.metrics.items())
    print(f"[{run.repeat + 1}] {run.workload} {run.system}: {outcome} ({run.seconds:.1f} s)", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
