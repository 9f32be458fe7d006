"""`python -m benchmarks fuzz`: mutated frames into every side that listens; no crash, no hang, no growth, and others are served.

What it finds is written to a file that plays it again: `python -m benchmarks fuzz --replay FILE`.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
from pathlib import Path
from typing import Any, Dict, List, Sequence

from benchmarks.fuzz_coverage import Coverage
from benchmarks.fuzz_engine import Figures, fuzz, run_one
from benchmarks.fuzz_memory import JumpingLoop
from benchmarks.fuzz_sides import SIDES

OBJECT_GROWTH = 20_000  # Python objects in tables that fill up to a limit once: events, throughput of functions, caches.
RESIDENT_GROWTH = 64 * 2**20


def main(arguments: Sequence[str]) -> int:
    """1 when something was found."""
    options = _parser().parse_args(arguments)
    if options.replay:
        return replay(Path(options.replay))
    logging.disable(logging.CRITICAL)
    found = 0
    for side in options.side or list(SIDES):
        figures = run(side, frames=options.frames, seconds=options.seconds, seed=options.seed, verbose=options.verbose)
        found += report(figures, Path(options.findings))
    return int(found > 0)


def run(side: str, *, frames: int, seconds: float, seed: int, batch_frames: int = 20_000, verbose: bool = False) -> Figures:
    """One side, on a loop of its own."""
    coverage = Coverage()
    try:
        return in_loop(
            lambda loop: fuzz(
                SIDES[side](loop),
                frames=frames,
                seconds=seconds,
                seed=seed,
                coverage=coverage,
                batch_frames=batch_frames,
                on_batch=_show if verbose else _ignore,
            )
        )
    finally:
        coverage.close()


def in_loop(make: Any) -> Any:
    """What a coroutine returns that is made for a loop whose clock can be set forward."""

    async def begin() -> Any:
        return await make(loop)

    loop = JumpingLoop()
    try:
        return loop.run_until_complete(begin())
    finally:
        loop.close()


def report(figures: Figures, folder: Path) -> int:
    """Say what was measured, and write down what was found; how much that is."""
    print(
        f"{figures.side:9} seed {figures.seed}: {figures.frames:,} frames in {figures.cases:,} cases, {figures.seconds:.0f} s, "
        f"{figures.lines} lines reached, corpus {figures.corpus}, slowest case {figures.slowest_seconds * 1e3:.1f} ms, "
        f"grown by {figures.object_growth:,} objects and {figures.resident_growth / 2**20:.1f} MiB, findings: {len(figures.findings)}",
        flush=True,
    )
    for place, finding in enumerate(figures.findings):
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{figures.side}-{figures.seed}-{place}.json"
        file.write_text(json.dumps(finding, indent=1), encoding="utf-8")
        print(f"  {file}: {finding['problem'].strip().splitlines()[-1]}", flush=True)
    grown = figures.object_growth > OBJECT_GROWTH or figures.resident_growth > RESIDENT_GROWTH
    if grown:
        print(f"  {figures.side} has grown", flush=True)
    return len(figures.findings) + grown


def replay(file: Path) -> int:
    """Play a finding again; 1 when it is still one."""
    finding: Dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    case: List[bytes] = [bytes.fromhex(frame) for frame in finding["case"]]
    problem = in_loop(lambda loop: _again(SIDES[finding["side"]](loop), case))
    print(problem or "nothing is wrong any more")
    return int(bool(problem))


async def _again(side: Any, case: List[bytes]) -> str:
    problem = await run_one(side, case)
    if hasattr(side, "close"):
        await side.close()
    return problem


def _show(figures: Figures) -> None:
    grown = f"grown by {figures.object_growth:,} objects and {figures.resident_growth / 2**20:.1f} MiB"
    print(
        f"  {figures.side}: {figures.frames:,} frames, {grown}, {len(figures.findings)} findings", file=sys.stderr, flush=True
    )


def _ignore(figures: Figures) -> None:
    pass


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks fuzz", description=__doc__)
    parser.add_argument("--side", action="append", choices=list(SIDES), help="one of them; again for more. All by default")
    parser.add_argument("--frames", type=int, default=1_000_000, help="into each side (default 1,000,000)")
    parser.add_argument("--seconds", type=float, default=3600.0, help="for each side at most")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30), help="of the random numbers")
    parser.add_argument("--findings", default="fuzz-findings", metavar="FOLDER", help="where each is written to a file")
    parser.add_argument("--replay", metavar="FILE", help="play one of them again")
    parser.add_argument("--verbose", action="store_true", help="say how far it is")
    return parser
