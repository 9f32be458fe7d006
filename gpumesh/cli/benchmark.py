"""`gpumesh benchmark`: the figures behind the scores of this machine."""

from __future__ import annotations

from typing import Any, Dict, List

import typer

from gpumesh.cli.console import log_to_stderr
from gpumesh.cli.devices import name_of

# (column, rate, unit's size); a column without a figure in any row is left out.
_COLUMNS = (
    ("fp32 TFLOPS", "float32", 1e12),
    ("bf16 TFLOPS", "bfloat16", 1e12),
    ("fp16 TFLOPS", "float16", 1e12),
    ("copy GB/s", "bandwidth", 1e9),
    ("to it GB/s", "to_device", 1e9),
    ("from it GB/s", "from_device", 1e9),
    ("Python M/s", "python", 1e6),
)


def benchmark(
    save: bool = typer.Option(
        False, "--save", help="Keep the figures: workers on this machine use them from their next start on."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print a JSON list instead of a table."),
) -> None:
    """Measure the processor and each GPU of this machine, a few seconds each, and show what the scores are made of.

    The score is 100 for an RTX 4090: the geometric mean of the float32 matrix product rate and the bandwidth of a copy in the device's own
    memory, each over what people have measured on that card. Half precision (bf16, or fp16 where that is what the card has) is shown beside
    it. Let the machine rest meanwhile.
    """
    import logging

    log_to_stderr(usual_level=logging.WARNING)
    rows = measured_rows(save=save)
    if as_json:
        import json

        typer.echo(json.dumps(rows, indent=2))
    else:
        _print_table(rows, is_saved=save)


def measured_rows(*, save: bool) -> List[Dict[str, Any]]:
    """Measure everything, one device after the other.

    Returns:
        For each device its facts, "rates" as a dict, "scores" by element type, "note" where something speaks against the figures.
    """
    from gpumesh.devices import probing
    from gpumesh.devices.benchmark import measure_cpu
    from gpumesh.devices.detect import gpus_may_exist, local_facts

    figures = measure_cpu(force=True, save=save)
    cpu = next(device for device in local_facts(score=figures.score).devices if device.kind == "cpu")
    rows = [_row(cpu._replace(rates=figures.rates), "" if figures.rates else "an estimate")]
    if gpus_may_exist():
        survey = probing.detect()
        if survey.problem:
            typer.echo(f"gpumesh: {survey.problem}", err=True)
        probing.measure_all(
            survey, lambda _, measured: rows.append(_row(measured.device, measured.note)), force=True, save=save
        )
    return rows


def _row(device: Any, note: str) -> Dict[str, Any]:
    from gpumesh.devices.scoring import REFERENCE_RATE_FLOPS, score_rates

    rates = dict(device.rates)
    scores = {
        dtype: round(score_rates(rates, dtype=dtype), 3)
        for dtype in REFERENCE_RATE_FLOPS
        if dtype in rates and "bandwidth" in rates
    }
    return {**device._asdict(), "key": device.key, "rates": rates, "scores": scores, "note": note}


def _print_table(rows: List[Dict[str, Any]], *, is_saved: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    shown = [column for column in _COLUMNS if any(column[1] in row["rates"] for row in rows)]
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("device", "name"):
        table.add_column(column, overflow="fold")
    for column in (*(title for title, _, _ in shown), "score", "by half"):
        table.add_column(column, justify="right")
    for row in rows:
        halves = [score for dtype, score in row["scores"].items() if dtype != "float32"]
        table.add_row(
            name_of(row),
            str(row["name"]),
            *(f"{row['rates'][rate] / unit:.3g}" if rate in row["rates"] else "" for _, rate, unit in shown),
            f"{'' if row['rates'] else '~'}{row['score']:.3g}",
            f"{halves[0]:.3g}" if halves else "",
        )
    console.print(table)
    for row in rows:
        if row["note"] or row["problem"]:
            console.print(f"{name_of(row)} {row['name']}: {row['note'] or row['problem']}", highlight=False)
    console.print("100 is an RTX 4090 by float32; ~ marks an estimate.", highlight=False)
    if is_saved:
        console.print("Saved: workers on this machine use these figures from their next start on.", highlight=False)
