"""`gpumesh demo`: a real hyperparameter sweep on an embedded mesh, with results as they come."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple, Tuple

import typer

if TYPE_CHECKING:
    from rich.console import Console

PENALTIES = (0.1, 1.0, 10.0, 100.0, 1000.0)  # SVC's C.
GAMMAS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03)
FOLDS = 5
QUICK_PENALTIES = (0.1, 1.0, 10.0, 100.0)
QUICK_FOLDS = 3
BEST_SHOWN = 5


class Trial(NamedTuple):
    """One setting, tried."""

    penalty: float
    gamma: float
    accuracy: float
    seconds: float
    loading_seconds: float


def cross_validate(penalty: float, gamma: float, folds: int) -> Tuple[float, float, float]:
    """Train and test a support vector machine on handwritten digits; what the demo runs on the mesh.

    Args:
        penalty: SVC's C.
        gamma: Width of its kernel.
        folds: Parts of the data, each of which is tested once.

    Returns:
        The mean accuracy over the folds, the seconds that this took, and those that loading scikit-learn took before: next to none when
        an earlier task of this process did it.
    """
    loading = time.perf_counter()
    from sklearn.datasets import load_digits
    from sklearn.model_selection import StratifiedKFold, cross_val_score
    from sklearn.svm import SVC

    started = time.perf_counter()
    images, digits = load_digits(return_X_y=True)
    parts = StratifiedKFold(folds, shuffle=True, random_state=0)
    accuracy = cross_val_score(SVC(C=penalty, gamma=gamma), images, digits, cv=parts).mean()
    return float(accuracy), time.perf_counter() - started, started - loading


def settings(*, quick: bool) -> List[Dict[str, Any]]:
    """The sweep's settings, as keyword arguments of `cross_validate`."""
    return [
        {"penalty": penalty, "gamma": gamma, "folds": QUICK_FOLDS if quick else FOLDS}
        for penalty in (QUICK_PENALTIES if quick else PENALTIES)
        for gamma in GAMMAS
    ]


def demo(
    quick: bool = typer.Option(False, "--quick", help="Fewer settings and folds: done in seconds."),
) -> None:
    """Sweep hyperparameters of a model on this machine's cores, and watch the results stream in.

    Starts a mesh of its own with one slot per core and ends it afterwards. Needs scikit-learn: pip install 'gpumesh[demo]'
    """
    import importlib.util
    import logging

    from rich.console import Console

    from gpumesh.cli.console import log_to_stderr
    from gpumesh.devices.detect import usable_cores

    if importlib.util.find_spec("sklearn") is None:
        raise ModuleNotFoundError("the demo trains models of scikit-learn, which is not installed; pip install 'gpumesh[demo]'")
    log_to_stderr(usual_level=logging.WARNING)
    console = Console(highlight=False)
    sweep = settings(quick=quick)
    cores = usable_cores()
    console.print(f"{len(sweep)} settings of a support vector machine on the digits data set, {cores} slots on this machine")
    started = time.perf_counter()
    try:
        trials = _run(sweep, cores, console)
    except KeyboardInterrupt:
        console.print("interrupted; what was running has been ended")
        raise typer.Exit(130) from None
    _report(trials, time.perf_counter() - started, cores, console)


def _run(sweep: List[Dict[str, Any]], cores: int, console: Console) -> List[Trial]:
    """Run the sweep, print each result when it is there, and keep a bar below them."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from gpumesh import GPUMesh, accelerate

    trials: List[Trial] = []
    columns = (
        TextColumn("sweeping"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[best]}"),
    )
    with GPUMesh.local(workers=1, slots=cores) as mesh, Progress(*columns, console=console) as progress:
        bar = progress.add_task("sweep", total=len(sweep), best="")
        with accelerate(mesh)(cross_validate).map(sweep) as stream:
            for future in stream.as_completed():
                setting = sweep[future.index]
                trial = Trial(setting["penalty"], setting["gamma"], *future.result())
                trials.append(trial)
                progress.console.print(f"{len(trials):3d}  {_show(trial)}")
                progress.update(bar, completed=len(trials), best=f"best so far {max(t.accuracy for t in trials):.4f}")
    return trials


def _show(trial: Trial) -> str:
    return f"C={trial.penalty:<7g} gamma={trial.gamma:<7g} accuracy {trial.accuracy:.4f}  {trial.seconds:6.2f} s"


def _report(trials: List[Trial], wall_seconds: float, cores: int, console: Console) -> None:
    """The best settings, and what running side by side was worth."""
    console.print(f"\nThe {BEST_SHOWN} best:", style="bold")
    for place, trial in enumerate(sorted(trials, key=lambda trial: (-trial.accuracy, trial.seconds))[:BEST_SHOWN], start=1):
        console.print(f"{place:3d}  {_show(trial)}")
    serial_seconds = sum(trial.seconds for trial in trials) + sum(trial.loading_seconds for trial in trials) / cores
    console.print(
        f"\n{len(trials)} trials took {wall_seconds:.1f} s on {cores} slots, starting the mesh and loading scikit-learn included. One after "
        f"the other they would take about {serial_seconds:.1f} s, {serial_seconds / wall_seconds:.2f} times as long: an estimate, the sum of "
        "the run times that the tasks measured themselves, with scikit-learn loaded once."
    )
