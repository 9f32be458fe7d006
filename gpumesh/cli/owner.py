"""`gpumesh pause`, `resume` and `limit`: what the owner of this machine lends of it. They write a file; running workers obey it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Tuple, TypeVar

import typer

if TYPE_CHECKING:
    from gpumesh.model.resources import DeviceFacts
    from gpumesh.scheduler.ownership import Amount, Pause, Rules

T = TypeVar("T")

MAX_REASON_CHARACTERS = 200  # It stands in tables of all who use the mesh.

GPU: Any = typer.Option(  # Optional[str]
    None,
    "--gpu",
    metavar="GPU",
    help="Only this GPU: its number as the system's tools show it, cuda:0 as programs number it, its UUID, or 'all'.",
)
HOURS: Any = typer.Option(  # Optional[str]
    None, "--hours", metavar="FROM-TO", help="Lend it only then: 22-7, 'Mon-Fri 22-7, Sat-Sun'; 'always' for no such rule."
)
ONLY_WHEN_IDLE: Any = typer.Option(  # Optional[float]
    None, "--only-when-idle", metavar="MINUTES", help="Lend it only when nobody has touched it for so long; 0 for no such rule."
)
EXCLUSIVE: Any = typer.Option(  # Optional[str]
    None, "--exclusive", metavar="PROGRAMS", help="Lend nothing while one of these runs: 'steam, blender'; '' for no such rule."
)


def pause(
    gpu: Optional[str] = GPU,
    span: Optional[str] = typer.Option(
        None, "--for", metavar="TIME", help="For so long: 2h, 90m; otherwise until `gpumesh resume`."
    ),
    now: bool = typer.Option(False, "--now", help="End what runs, too: it starts again elsewhere. Otherwise it may finish."),
    reason: str = typer.Option("", "--reason", metavar="TEXT", help="Others see it beside this machine."),
) -> None:
    """Lend nothing of this machine, or nothing of a GPU, until it is resumed.

    Workers of this user on this machine take nothing new within a second; what waits there goes elsewhere. A restart changes nothing.
    """
    import time

    from gpumesh.scheduler.ownership import MACHINE, Pause
    from gpumesh.scheduler.ownership_forms import parse_span

    seconds = _parsed(parse_span, span, "--for") if span is not None else 0.0
    target, name = _target(gpu) if gpu is not None else (MACHINE, "this machine")
    until = time.time() + seconds if seconds else 0.0
    paused = Pause(until, _until_text(until) if until else "", " ".join(reason.split())[:MAX_REASON_CHARACTERS], now)

    def change(rules: Rules) -> Rules:
        others = tuple((known, one) for known, one in rules.pauses if known != target)
        return rules._replace(pauses=(*others, (target, paused)))

    _change(change)
    typer.echo(
        f"gpumesh: {name} is {paused.text()}; {'what runs is ended and starts again elsewhere' if now else 'what runs may finish'}"
    )


def resume(gpu: Optional[str] = GPU) -> None:
    """Lend it again: this machine and all its GPUs, or one GPU."""
    from gpumesh.scheduler.ownership import GPUS, MACHINE

    target, name = _target(gpu) if gpu is not None else ("", "this machine")

    def change(rules: Rules) -> Rules:
        if not target:
            return rules._replace(pauses=())
        if target == GPUS:
            return rules._replace(pauses=tuple(one for one in rules.pauses if one[0] == MACHINE))
        return _resume_one(rules, target)

    rules = _change(change)
    typer.echo(f"gpumesh: {name} is lent again")
    _print_rules(rules)


def _resume_one(rules: Rules, target: str) -> Rules:
    """Without what pauses one card; a pause of all cards goes on for the others."""
    from gpumesh.scheduler.ownership import GPUS, MACHINE, names_card

    cards = _cards(target)
    card = next((card for card in cards if names_card(target, card)), None)
    kept: List[Tuple[str, Pause]] = []
    for known, one in rules.pauses:
        if known == GPUS:
            if card is None:
                raise typer.BadParameter("all GPUs are paused together; resume them with --gpu all")
            kept.extend((other.key, one) for other in cards if other is not card)
        elif known == MACHINE or not (known == target or (card is not None and names_card(known, card))):
            kept.append((known, one))
    return rules._replace(pauses=tuple(kept))


def limit(
    slots: Optional[str] = typer.Option(None, "--slots", metavar="N", help="Tasks at a time: 4, or 50%; '100%' for no limit."),
    gpu_memory: Optional[str] = typer.Option(
        None,
        "--gpu-memory",
        metavar="SIZE",
        help="Memory of each GPU, or of the one that --gpu names: 8GB, 50%; '100%' for no limit.",
    ),
    gpu: Optional[str] = GPU,
    hours: Optional[str] = HOURS,
    only_when_idle: Optional[float] = ONLY_WHEN_IDLE,
    exclusive: Optional[str] = EXCLUSIVE,
    now: Optional[bool] = typer.Option(
        None, "--now/--let-finish", help="Whether what runs is ended when hours, idleness or a program take the machine back."
    ),
    clear: bool = typer.Option(
        False, "--clear", help="Drop all of these first (pauses stay, unless the rules could not be read)."
    ),
) -> None:
    """Lend only a part of this machine, or only at times. Without options: show the rules that are in force."""
    from gpumesh.scheduler.ownership import GPUS, Rules
    from gpumesh.scheduler.ownership_forms import parse_gpu_memory, parse_slots

    if gpu is not None and gpu_memory is None:
        raise typer.BadParameter("--gpu goes with --gpu-memory; to lend nothing of it: `gpumesh pause --gpu ...`")
    wanted_slots = _parsed(parse_slots, slots, "--slots") if slots is not None else None
    wanted_memory = _parsed(parse_gpu_memory, gpu_memory, "--gpu-memory") if gpu_memory is not None else None
    target = _target(gpu)[0] if gpu is not None else GPUS
    times = _times(hours, only_when_idle, exclusive)

    def change(rules: Rules) -> Rules:
        if clear:
            rules = Rules(pauses=rules.pauses)
        if wanted_slots is not None:
            rules = rules._replace(slots=None if _is_all(wanted_slots) else wanted_slots)
        if wanted_memory is not None:
            kept = tuple(one for one in rules.gpu_memory if one[0] != target and target != GPUS)
            if not _is_all(wanted_memory) or (target != GPUS and any(one[0] == GPUS for one in kept)):
                kept = (*kept, (target, wanted_memory))
            rules = rules._replace(gpu_memory=kept)
        if now is not None:
            rules = rules._replace(ends_running=now)
        return times(rules)

    is_change = clear or any(one is not None for one in (slots, gpu_memory, hours, only_when_idle, exclusive, now))
    if only_when_idle:
        check_idleness_is_known()
    rules = _change(change, is_afresh=clear) if is_change else _load()
    if not _print_rules(rules):
        typer.echo("gpumesh: everything is lent, always")


def set_times(hours: Optional[str], only_when_idle: Optional[float], exclusive: Optional[str]) -> None:
    """What `join` was told about times, for this start and all later ones; and show the rules that are in force.

    Raises:
        typer.BadParameter: One of them has no meaning.
        ValueError: The rules cannot be read, or nobody can tell whether this machine is idle.
        OSError: They cannot be written.
    """
    given = any(one is not None for one in (hours, only_when_idle, exclusive))
    times = _times(hours, only_when_idle, exclusive)
    if only_when_idle:
        check_idleness_is_known()
    _print_rules(_change(times) if given else _load())


def check_idleness_is_known() -> None:
    """Refuse rather than guess.

    Raises:
        ValueError: Nobody can tell how long nobody has touched this machine.
    """
    from gpumesh.devices.activity import idle_time

    idle = idle_time()
    if idle.seconds is None:
        raise ValueError(
            f"cannot lend this machine only when idle: {idle.problem}; use --hours, --exclusive or `gpumesh pause` instead"
        )


def _times(hours: Optional[str], only_when_idle: Optional[float], exclusive: Optional[str]) -> Callable[[Rules], Rules]:
    """The change that these three options ask for."""
    from gpumesh.scheduler.ownership_forms import parse_hours, parse_minutes, parse_programs

    changes: Dict[str, Any] = {}
    if hours is not None:
        is_always = hours.strip().lower() == "always"
        windows = () if is_always else _parsed(parse_hours, hours, "--hours")
        changes.update(hours="" if is_always else " ".join(hours.split()), windows=windows)
    if only_when_idle is not None:
        changes["idle_minutes"] = _parsed(parse_minutes, only_when_idle, "--only-when-idle")
    if exclusive is not None:
        changes["exclusive"] = _parsed(parse_programs, exclusive, "--exclusive")
    return lambda rules: rules._replace(**changes)


def _parsed(parse: Callable[[Any], T], text: Any, option: str) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(f"{option}: {error}") from None


def _is_all(amount: Amount) -> bool:
    return amount.is_share and amount.value >= 1


# --- the file


def _load() -> Rules:
    from gpumesh.runtime.owner_file import load_rules, rules_file

    rules = load_rules(rules_file())
    if rules.trouble:
        raise ValueError(
            f"this machine is paused, for its owner's rules cannot be read: {rules.trouble}; mend or delete the file, or begin afresh "
            "with `gpumesh limit --clear`"
        )
    return rules


def _change(change: Callable[[Rules], Rules], *, is_afresh: bool = False) -> Rules:
    """Read the rules, change them, write them."""
    import time

    from gpumesh.runtime.owner_file import load_rules, rules_file, rules_locked, save_rules
    from gpumesh.scheduler.ownership import Rules

    path = rules_file()
    with rules_locked(path):
        rules = Rules() if is_afresh and load_rules(path).trouble else _load()
        wall = time.time()
        rules = rules._replace(pauses=tuple(one for one in rules.pauses if not one[1].until or wall < one[1].until))
        rules = change(rules)
        save_rules(path, rules)
    return rules


def _print_rules(rules: Rules) -> bool:
    """Show what is in force; whether there is anything."""
    import time

    from gpumesh.scheduler.ownership import describe

    lines = describe(rules, time.time())
    if lines:
        typer.echo("gpumesh: the owner of this machine lends it like this (change it with `gpumesh limit`, `pause`, `resume`):")
    for line in lines:
        typer.echo(f"  - {line}")
    return bool(lines)


def _until_text(until: float) -> str:
    import time

    there, here = time.localtime(until), time.localtime()
    if there[:3] == here[:3]:
        return time.strftime("%H:%M", there)
    is_this_week = until - time.time() < 6 * 24 * 3600
    return time.strftime("%a %H:%M" if is_this_week else "%d %b %H:%M", there)


# --- GPUs


def _target(gpu: str) -> Tuple[str, str]:
    """What stands in the rules for a GPU that was named, and what people call it.

    Raises:
        typer.BadParameter: There is no such GPU here.
    """
    from gpumesh.scheduler.ownership import GPUS, names_card

    word = gpu.strip().lower()
    if word == "all":
        return GPUS, "every GPU"
    cards = _cards(word)
    meant = [card for card in cards if names_card(word, card)]
    if len(meant) == 1:
        return meant[0].key, f"{meant[0].key} ({meant[0].name})"
    if meant:
        raise typer.BadParameter(f"--gpu {gpu} may be {' or '.join(sorted(card.key for card in meant))}; write more of it")
    numbered = sorted((card.system_index if card.system_index >= 0 else card.index, card.name) for card in cards)
    found = ", ".join(f"{number} {name}" for number, name in numbered)
    raise typer.BadParameter(
        f"--gpu {gpu}: no such GPU on this machine; {f'there are: {found}' if found else 'none was found'}"
    )


def _cards(wanted: str) -> List[DeviceFacts]:
    """The GPUs of this machine: those known from earlier if the wanted one is among them, else after asking the drivers."""
    from gpumesh.devices.detect import gpus_may_exist, local_facts
    from gpumesh.scheduler.ownership import names_card

    known = [device for device in local_facts().devices if device.kind != "cpu"]
    if any(names_card(wanted, card) for card in known) or not gpus_may_exist():
        return known
    from gpumesh.devices.probing import detect

    survey = detect()
    if survey.problem:
        raise ValueError(f"{survey.problem}; pause the whole machine, or every GPU: `gpumesh pause --gpu all`")
    return list(survey.devices)
