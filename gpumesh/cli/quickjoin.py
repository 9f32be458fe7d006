"""`gpumesh quickjoin`: from nothing to a lent machine in seconds: what it has, how fast it is, where the mesh is, join."""

from __future__ import annotations

import threading
import time
from typing import Dict, List, Optional

import typer

from gpumesh.cli.console import (
    GPU_SCORE,
    SCORE,
    SLOTS,
    TOKEN,
    TOKEN_FILE,
    check_token,
    hide_token,
    log_to_stderr,
    set_gpu_score,
)
from gpumesh.cli.finding import mesh_to_join
from gpumesh.cli.join import lend, parse_tags
from gpumesh.config import QUICK_BENCHMARK_SECONDS


def quickjoin(
    url: Optional[str] = typer.Argument(
        None,
        help="The mesh's address; by default it is found: the saved one if it answers, else one on this machine's networks.",
    ),
    token: Optional[str] = TOKEN,
    token_file: Optional[str] = TOKEN_FILE,
    slots: Optional[int] = SLOTS,
    score: Optional[float] = SCORE,
    gpu_score: Optional[float] = GPU_SCORE,
    tag: Optional[List[str]] = typer.Option(
        None, "--tag", metavar="NAME=VALUE", help="Something for tasks to ask for; may be repeated."
    ),
) -> None:
    """Look at this machine, measure it, find the mesh, and lend this machine to it until Ctrl-C; a few seconds in all.

    The secret is what `gpumesh serve` or `gpumesh token` shows on the other machine: from --token, --token-file or GPUMESH_TOKEN; without any,
    you are asked. A mesh that does not know the secret is skipped.

    `gpumesh join` does the same with more to choose from.
    """
    import logging

    from gpumesh.devices.scoring import check_score

    tags = parse_tags(tag or [])
    if score is not None:
        check_score(score)
    set_gpu_score(gpu_score)
    log_to_stderr(usual_level=logging.INFO)
    look = _Look(slots, score, tags)
    address, secret = mesh_to_join(url, token, token_file, tell=typer.echo, waits=False)
    hide_token()
    check_token(secret)
    for line in look.lines():
        typer.echo(line)

    raise typer.Exit(lend(address, secret, slots=slots, score=score, tags=tags))


class _Look:
    """Looks at this machine while the mesh is looked for."""

    def __init__(self, slots: Optional[int], score: Optional[float], tags: Dict[str, str]) -> None:
        from gpumesh.devices.detect import local_facts

        self._started = time.monotonic()
        self._score = score
        facts = local_facts(slots=slots, score=score, tags=tags)
        from gpumesh.model.resources import show_bytes

        cpu = next(device for device in facts.devices if device.kind == "cpu")
        typer.echo(f"gpumesh: this is {facts.hostname}: {cpu.name}, {facts.cores} cores, {show_bytes(facts.memory)} of memory")
        self._gpus: List[str] = []
        self._figure = ""
        self._thread = threading.Thread(target=self._measure, name="gpumesh-look", daemon=True)
        self._thread.start()

    def _measure(self) -> None:
        from gpumesh.devices.benchmark import cached_cpu, measure_cpu
        from gpumesh.devices.detect import gpus_may_exist

        if self._score is None:
            is_known = cached_cpu() is not None
            found = measure_cpu()
            how = "as measured earlier" if is_known else "measured now" if found.rates else "an estimate"
            self._figure = f"score of the processor {found.score:.3g} ({how}; 100 is an RTX 4090)"
        if gpus_may_exist():
            from gpumesh.devices import probing

            survey = probing.detect()
            for device in survey.devices:
                why = f"not used: {device.problem}" if device.problem else f"score {device.score:.3g}, measured while it works"
                self._gpus.append(f"{device.name} ({why})")
            if survey.problem:
                self._gpus.append(survey.problem)

    def lines(self) -> List[str]:
        """What was found out, as far as it is known in time."""
        self._thread.join(max(0.0, self._started + QUICK_BENCHMARK_SECONDS - time.monotonic()))
        said = [f"gpumesh: {self._figure}"] if self._figure else []
        said += [f"gpumesh: {gpu}" for gpu in self._gpus]
        if self._thread.is_alive():
            said.append("gpumesh: measuring takes long here and goes on while this machine works")
        return said
