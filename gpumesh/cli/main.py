"""The `gpumesh` command: mounts the commands, and turns what they raise into one line and an exit code.

Exit codes: 0 done, 1 something went wrong (the last line on standard error says what), 2 the command was not understood, 130 interrupted.
"""

from __future__ import annotations

import sys
from typing import Any, Dict, List, NoReturn, Optional, Sequence, Tuple

import typer
import typer.core

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


class _Headed(typer.core.TyperGroup):
    """Lists the commands under their headings."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(len(name) for mounted in _COMMANDS.values() for name, _, _ in mounted)
        for heading, mounted in _COMMANDS.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), said) for name, said, _ in mounted])


app = typer.Typer(
    name="gpumesh",
    cls=_Headed,
    help="Run Python functions on all the machines and GPUs you have.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # Plain help that any terminal, pager and log shows alike.
    context_settings={"help_option_names": ["-h", "--help"]},
)

# What stands under which heading: a name, what it does in one line of a terminal with 80 columns, and the command or group.
_COMMANDS: Dict[str, Sequence[Tuple[str, str, Any]]] = {
    "Begin": (
        ("demo", "See it work, on this machine alone.", demo.demo),
        ("setup", "Answer a few questions: start a mesh, or lend to one.", setup.setup),
        ("doctor", "Look for what is wrong, and say what to do.", doctor.doctor),
    ),
    "Start a mesh, find one, lend this machine": (
        ("serve", "Start a mesh on this machine.", serve.serve),
        ("quickjoin", "Find the mesh, measure this machine, and lend it.", quickjoin.quickjoin),
        ("join", "Lend this machine to a mesh, with options.", join.join),
        ("service", "Lend it by itself, whenever you log in.", service.app),
        ("radar", "Show the meshes on this machine's networks, live.", radar.radar),
        ("token", "Show the mesh's token, or one that can do less.", token.app),
        ("show-connection", "Show which mesh your programs and commands use.", connection.show_connection),
        ("disconnect", "Forget that mesh: its address and its token.", connection.disconnect),
    ),
    "Run a script many times": (
        ("submit", "Run a script once for each payload.", submit.submit),
        ("status", "Show how far a job is; without one, the mesh.", jobs.status),
        ("jobs", "List the jobs, the newest first.", jobs.jobs),
        ("logs", "Show what the tasks of a job have printed.", jobs.logs),
        ("results", "Show or save what its tasks have returned.", jobs.results),
        ("cancel", "End a job: what runs may clean up.", jobs.cancel),
        ("kill", "End a job at once.", jobs.kill),
        ("retry", "Run again what has failed or was cancelled.", jobs.retry),
    ),
    "See what is on the mesh": (
        ("workers", "Show its machines, and what they do.", workers.workers),
        ("events", "Show who came and went, and what went wrong.", events.events),
        ("objects", "Show the objects that it keeps, largest first.", objects.objects),
        ("actors", "Show its actors, and where they live.", actors.actors),
        ("kill-actor", "End an actor.", actors.kill_actor),
    ),
    "This machine": (
        ("devices", "Show its processors and GPUs.", devices.devices),
        ("benchmark", "Measure how fast they are.", benchmark.benchmark),
        ("pause", "Lend nothing of it, or nothing of a GPU.", owner.pause),
        ("resume", "Lend it again.", owner.resume),
        ("limit", "Lend only a part of it, or only at times.", owner.limit),
    ),
}
for _name, _, _command in (row for rows in _COMMANDS.values() for row in rows):
    if isinstance(_command, typer.Typer):
        app.add_typer(_command, name=_name)
    else:
        app.command(name=_name)(_command)


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
