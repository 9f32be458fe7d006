"""The `gpumesh` command: mounts the commands, and turns what they raise into one line and an exit code.

Exit codes: 0 done, 1 something went wrong (the last line on standard error says what), 2 the command was not understood, 130 interrupted.
"""

from __future__ import annotations

import sys
from typing import List, NoReturn, Optional

import typer

from gpumesh.cli import (
    actors,
    benchmark,
    connection,
    demo,
    devices,
    doctor,
    events,
    jobs,
    join,
    objects,
    owner,
    quickjoin,
    radar,
    serve,
    service,
    setup,
    submit,
    token,
    workers,
)
from gpumesh.cli.console import set_verbosity, verbosity
from gpumesh.errors import MeshError
from gpumesh.version import __version__

app = typer.Typer(
    name="gpumesh",
    help="Run Python functions on all the machines and GPUs you have.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # Plain help that any terminal, pager and log shows alike.
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(name="setup")(setup.setup)
app.command(name="serve")(serve.serve)
app.command(name="join")(join.join)
app.command(name="quickjoin")(quickjoin.quickjoin)
app.command(name="radar")(radar.radar)
app.command(name="show-connection")(connection.show_connection)
app.command(name="disconnect")(connection.disconnect)
app.command(name="workers")(workers.workers)
app.command(name="submit")(submit.submit)
app.command(name="status")(jobs.status)
app.command(name="jobs")(jobs.jobs)
app.command(name="logs")(jobs.logs)
app.command(name="results")(jobs.results)
app.command(name="cancel")(jobs.cancel)
app.command(name="kill")(jobs.kill)
app.command(name="retry")(jobs.retry)
app.command(name="events")(events.events)
app.command(name="objects")(objects.objects)
app.command(name="actors")(actors.actors)
app.command(name="kill-actor")(actors.kill_actor)
app.command(name="devices")(devices.devices)
app.command(name="benchmark")(benchmark.benchmark)
app.command(name="pause")(owner.pause)
app.command(name="resume")(owner.resume)
app.command(name="limit")(owner.limit)
app.add_typer(token.app, name="token")
app.command(name="doctor")(doctor.doctor)
app.add_typer(service.app, name="service")
app.command(name="demo")(demo.demo)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gpumesh {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    verbose: int = typer.Option(
        0, "--verbose", "-v", count=True, metavar="", help="Say more; twice for everything.", show_default=False
    ),
    version: bool = typer.Option(False, "--version", is_eager=True, callback=_show_version, help="Print the version and exit."),
) -> None:
    set_verbosity(verbose)


def _text(error: Exception) -> str:
    """What went wrong. An error of the system needs its number and file; one of ours has said it all, and what to do."""
    told = error.strerror if isinstance(error, OSError) else None
    return told if told and ";" in told else str(error)


def main(arguments: Optional[List[str]] = None) -> NoReturn:
    """Run one command line and exit.

    Args:
        arguments: Without the program's name; by default those of this process.
    """
    try:
        app(arguments, prog_name="gpumesh")
    except KeyboardInterrupt:
        code = 130
    except (MeshError, OSError, ValueError, ImportError) as error:
        if verbosity():
            raise
        typer.echo(f"gpumesh: {_text(error)}", err=True)
        code = 1
    else:
        code = 0
    sys.exit(code)


if __name__ == "__main__":
    main()
