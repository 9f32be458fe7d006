"""`gpumesh doctor`: what is wrong, on this machine and on the way to a mesh, and what to do about it."""

from __future__ import annotations

from typing import Any, Callable, List, Mapping, Optional, Tuple, Union

import typer

from gpumesh.cli.console import TOKEN, TOKEN_FILE, given_token, log_to_stderr
from gpumesh.network.address import HTTPS, WEBSOCKET, Address
from gpumesh.runtime.findings import FAULT, MESH, NOTE, OK, WARNING, Finding

_COLOURS = {OK: typer.colors.GREEN, NOTE: typer.colors.CYAN, WARNING: typer.colors.YELLOW, FAULT: typer.colors.RED}
_WIDTH = max(map(len, _COLOURS))


def doctor(
    url: Optional[str] = typer.Argument(
        None, help="The mesh's address; by default the one that is saved on this machine, if any is."
    ),
    token: Optional[str] = TOKEN,
    token_file: Optional[str] = TOKEN_FILE,
    as_json: bool = typer.Option(False, "--json", help="Print a JSON object instead of text."),
    quick: bool = typer.Option(False, "--quick", help="Leave the GPUs out: drivers can take a while to answer."),
) -> None:
    """Look for what is wrong on this machine and on the way to a mesh; changes nothing.

    Python and packages, torch and driver, devices and why they are not used, addresses, firewall, limits; then the way to the mesh, step by
    step: name, route, TCP, TLS, token, versions.

    Exits with 1 if something is wrong that this machine can mend, and only then: a mesh that is down is told, and is no fault here.
    """
    import logging

    log_to_stderr(usual_level=logging.CRITICAL)
    from gpumesh.runtime.findings import as_report, is_at_fault

    supplied = given_token(token, token_file)
    found = list(_here(quick=quick))
    address, secret, trouble = _which(url, supplied)
    if trouble is not None:
        found.append(trouble)
    if not as_json:
        typer.secho("This machine", bold=True)
        _show(found)
    way = list(on_the_way(address, secret)) if address is not None else []
    if as_json:
        import json

        typer.echo(json.dumps(as_report([*found, *way]), indent=2))
    else:
        if address is not None:
            typer.secho(f"\nThe mesh at {address.url}", bold=True)
            _show(way)
        typer.echo(f"\n{_verdict([*found, *way])}")
    raise typer.Exit(1 if is_at_fault([*found, *way]) else 0)


def _here(*, quick: bool) -> List[Finding]:
    from gpumesh.config import DEFAULT_PORT
    from gpumesh.runtime import doctor_here as here
    from gpumesh.runtime.doctor_firewall import check_firewall

    checks: List[Callable[[], Union[Finding, List[Finding]]]] = [here.check_python, here.check_packages]
    if not quick:
        checks.append(here.check_devices)
    checks += [here.check_limits, here.check_addresses, here.check_port, lambda: check_firewall(DEFAULT_PORT)]
    checks.append(here.check_connection)
    found: List[Finding] = []
    for check in checks:
        outcome = check()
        found += [outcome] if isinstance(outcome, Finding) else outcome
    return found


def _which(url: Optional[str], supplied: Optional[str]) -> Tuple[Optional[Address], Optional[str], Optional[Finding]]:
    """The mesh to look at and its token; what is wrong with the address."""
    from gpumesh.network.address import parse_address
    from gpumesh.runtime.findings import fault
    from gpumesh.runtime.settings import resolve_connection

    try:
        found, secret = resolve_connection(url, supplied)
        return (parse_address(found), secret, None) if found else (None, secret, None)
    except ValueError as error:
        return None, None, fault("address", str(error), "give the address that `gpumesh serve` shows")


def on_the_way(address: Address, secret: Optional[str]) -> List[Finding]:
    """What is found on the way to a mesh, and, if it is one of this machine, about its addresses."""
    from gpumesh.network.interfaces import host_addresses
    from gpumesh.runtime.doctor_own import check_others
    from gpumesh.runtime.doctor_way import check_way

    found = check_way(address, secret, _workers)
    own = {"127.0.0.1", "::1", "localhost", *(each.ip for each in host_addresses())}
    if (
        address.way not in (HTTPS, WEBSOCKET)
        and address.host in own
        and any(each.check == "coordinator" and each.state == OK for each in found)
    ):
        found += check_others(address.port, address.way)
    return found


def _workers(address: Address, token: str) -> Union[str, List[Mapping[str, Any]]]:
    """Who works for a mesh; or why that is not known."""
    from gpumesh import GPUMesh
    from gpumesh.config import DOCTOR_STEP_SECONDS
    from gpumesh.errors import MeshError

    try:
        with GPUMesh(
            address.url, token=token, fallback=False, connect_timeout=DOCTOR_STEP_SECONDS, reconnect_timeout=0.0
        ) as mesh:
            return list(mesh.workers())
    except MeshError as error:
        return str(error)


def _show(findings: List[Finding]) -> None:
    for finding in findings:
        word = typer.style(f"{finding.state:<{_WIDTH}}", fg=_COLOURS[finding.state])
        typer.echo(f"  {word}  {finding.check:<11} {finding.text}")
        if finding.advice:
            typer.echo(f"  {'':<{_WIDTH}}  {'':<11} -> {finding.advice}")


def _verdict(findings: List[Finding]) -> str:
    faults = [each for each in findings if each.state == FAULT]
    if not faults:
        warnings = sum(each.state == WARNING for each in findings)
        return (
            "Nothing is wrong."
            if not warnings
            else f"Nothing is broken; {warnings} thing{'s' if warnings > 1 else ''} could be better."
        )
    here = [each for each in faults if each.place != MESH]
    there = len(faults) - len(here)
    if here:
        return f"{len(here)} fault{'s' if len(here) > 1 else ''} here: {'; '.join(each.check for each in here)}."
    return f"Nothing is wrong on this machine; {there} fault{'s' if there > 1 else ''} on the way to the mesh, or there."
