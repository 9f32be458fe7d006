"""Which of a machine's NVIDIA cards this worker offers, by which numbers, and why not the others: a plain function of what was answered.

Three sources are joined: NVML's list of all cards, what CUDA itself shows to a program here, and the variables. CUDA's word counts where it
speaks; where there is no such library, or cards are divided (a process then sees one slice at a time), the rules of `visible` stand in.
"""

from __future__ import annotations

from typing import Dict, List, Mapping, Optional, Set, Tuple

from gpumesh.devices import nvml, visible
from gpumesh.devices.cards import prior_score
from gpumesh.devices.cuda_driver import NOT_THERE, CudaCard, CudaList
from gpumesh.model.records import NamedTuple
from gpumesh.model.resources import DeviceFacts

UNNAMED = "NVIDIA GPU"
HOST_RESERVE = 8  # One part in this many of the host's memory stays with it where the card has none of its own; Apple keeps a quarter or more.
NO_CUDA = CudaList((), NOT_THERE, "not asked")
_SHOWN = 60  # Characters of a variable that a reason quotes.

Place = Tuple[int, int]  # (place in NVML's list, slice or visible.WHOLE)


class HostMemory(NamedTuple):
    """Bytes of host memory that this process may use, and what of it is free now."""

    total: int
    available: int


def join(
    answers: nvml.Survey, environment: Mapping[str, str], host: HostMemory, shown: CudaList = NO_CUDA
) -> Tuple[DeviceFacts, ...]:
    """What to tell of the cards.

    Args:
        answers: NVML's: all cards, whatever the variables say.
        environment: Of this process: `CUDA_VISIBLE_DEVICES` and `CUDA_DEVICE_ORDER` count.
        host: For cards that have no memory of their own.
        shown: CUDA's.

    Returns:
        First the cards that CUDA numbers, with its numbers, then the others, numbered on. Those that are not used have a `problem`.
    """
    if not answers.cards:
        if shown.cards:  # No NVML (Jetsons before JetPack 6), or one that does not work, and yet CUDA does.
            return tuple(_numbered([_facts(_of_cuda(card), host, card) for card in shown.cards]))
        if not answers.code:
            return ()
        return (DeviceFacts("cuda", 0, UNNAMED, 0, prior_score(""), problem=_library_problem(answers)),)
    cards = answers.cards
    by_rule = _by_rule(cards, environment)
    told = _by_cuda(cards, shown)
    chosen = by_rule if told is None else list(told)
    hidden = _hidden_problem(environment.get(visible.VISIBLE))
    not_started = "" if shown.code in (0, NOT_THERE) else f"CUDA does not start here ({shown.refusal})"

    found: List[DeviceFacts] = []
    for place, part in chosen:
        card = cards[place] if part == visible.WHOLE else _named_slice(cards[place], part)
        found.append(_facts(card, host, told[place, part] if told else None, problem=not_started))
    for place, card in enumerate(cards):
        if not card.slices:
            if (place, visible.WHOLE) not in chosen:
                not_shown = "CUDA does not show it to programs here" if (place, visible.WHOLE) in by_rule else hidden
                found.append(_facts(card, host, problem=not_shown))
            continue
        parts = [part for part in range(len(card.slices)) if (place, part) not in chosen]
        found.extend(_facts(_named_slice(card, part), host, problem=hidden) for part in parts)
        whole = f"divided into {len(card.slices)} MIG slices, which are offered in its place"
        found.append(_facts(card, host, problem=whole if len(parts) < len(card.slices) else hidden))
    return tuple(_numbered(found))


def _by_rule(cards: Tuple[nvml.Card, ...], environment: Mapping[str, str]) -> List[Place]:
    """What the variables leave, as far as can be told from outside."""
    opened = [place for place, card in enumerate(cards) if not card.code]  # CUDA does not count what cannot be opened.
    speeds = [prior_score(cards[place].name, cards[place].hardware) for place in opened]
    places = [opened[position] for position in visible.cuda_order(environment.get(visible.ORDER), speeds)]
    named = [visible.VisibleCard(cards[place].uuid, tuple(part.uuid for part in cards[place].slices)) for place in places]
    return [(places[position], part) for position, part in visible.select(environment.get(visible.VISIBLE), named)]


def _by_cuda(cards: Tuple[nvml.Card, ...], shown: CudaList) -> Optional[Dict[Place, CudaCard]]:
    """What CUDA shows, in its order; None where it was not asked, does not start, or speaks of other cards."""
    if shown.code or any(card.is_divided for card in cards):
        return None
    told: Dict[Place, CudaCard] = {}
    for one in shown.cards:
        matching = [place for place, card in enumerate(cards) if _is_same(card, one)]
        if not matching and len(cards) == len(shown.cards) == 1 and not (cards[0].uuid and one.uuid):
            matching = [0]
        if len(matching) != 1 or (matching[0], visible.WHOLE) in told:
            return None
        told[matching[0], visible.WHOLE] = one
    return told


def _is_same(card: nvml.Card, one: CudaCard) -> bool:
    if card.uuid and one.uuid:
        return card.uuid == one.uuid
    return bool(card.bus) and card.bus == one.bus


def _numbered(found: List[DeviceFacts]) -> List[DeviceFacts]:
    """With their numbers; a UUID names one card only, for cards are handed out by it."""
    numbered: List[DeviceFacts] = []
    names: Set[str] = set()
    for index, facts in enumerate(found):
        if facts.uuid and facts.uuid in names:
            facts = facts._replace(problem=facts.problem or f"has the same UUID as another card ({facts.uuid})", uuid="")
        names.add(facts.uuid)
        numbered.append(facts._replace(index=index))
    return numbered


def _named_slice(card: nvml.Card, part: int) -> nvml.Card:
    """A slice by its own name, or by its card's."""
    found = card.slices[part]
    return found if found.name else found._replace(name=f"{card.name or UNNAMED} MIG slice {part}")


def _of_cuda(one: CudaCard) -> nvml.Card:
    """A card of which only CUDA knows. Where it shares the host's memory, as on Jetsons, its UUID names nothing that a mask understands."""
    uuid = "" if one.is_integrated else one.uuid
    return nvml.Card(-1, name=one.name, uuid=uuid, memory_code=nvml.NOT_SUPPORTED, hardware=one.hardware)


def _facts(card: nvml.Card, host: HostMemory, one: Optional[CudaCard] = None, problem: str = "") -> DeviceFacts:
    """One card, completed by what CUDA says of it; `problem` if it has none of its own."""
    name, hardware = card.name or (one.name if one else ""), card.hardware
    if one is not None and not (hardware.capability and (hardware.cores or hardware.multiprocessors)):
        hardware = one.hardware
    # Only NotSupported means that the memory is the host's: a refusal for want of rights, or a lost card, must not turn into all of its RAM.
    is_shared = card.memory_code == nvml.NOT_SUPPORTED and not card.is_divided and bool(name or card.uuid)
    memory, others, is_integrated, silent = 0, 0, False, False
    if card.memory is not None:
        memory, others = card.memory.total, card.memory.total - card.memory.free
    elif one is not None and one.memory and not one.is_integrated:
        memory = one.memory
    elif is_shared or (one is not None and one.is_integrated):
        is_integrated = True
        memory, others = shared_memory(host, limit=one.memory if one else 0)
    else:
        silent = not card.is_divided
    return DeviceFacts(
        kind="cuda",
        index=0,
        name=name or UNNAMED,
        memory=memory,
        score=prior_score(name, hardware),
        uuid=card.uuid,
        system_index=card.system_index,
        problem=_card_problem(card) or problem or (_memory_problem(card) if silent else ""),
        others=others,
        is_integrated=is_integrated,
        capability=hardware.capability,
    )


def shared_memory(host: HostMemory, limit: int = 0) -> Tuple[int, int]:
    """(memory, others) of a card whose memory is the host's: what is offered leaves the host a part, what is free is what the host has free.

    Args:
        host: Its memory.
        limit: Bytes that the device can address at most; 0: all.
    """
    memory = host.total - host.total // HOST_RESERVE
    memory = min(memory, limit) if limit else memory
    return memory, memory - min(memory, host.available)


def _card_problem(card: nvml.Card) -> str:
    if card.code == nvml.GPU_IS_LOST:
        return f"fell off the bus ({card.refusal}): heat, power or its slot; reboot the machine"
    if card.code:
        return f"cannot be opened ({card.refusal}); reboot the machine, or restart the container if this is one"
    if card.compute_mode == nvml.COMPUTE_PROHIBITED:
        return "its compute mode is Prohibited; its owner can allow programs with 'nvidia-smi -c 0'"
    if card.is_divided and not card.slices:
        return (
            "MIG is on, and there is no slice that this worker could use; create one with 'nvidia-smi mig', or switch MIG off"
        )
    return ""


def _memory_problem(card: nvml.Card) -> str:
    if card.memory_code == nvml.NO_PERMISSION:
        return f"does not tell its memory ({card.memory_refusal}): a MIG card, seen from a container that was given none of its slices?"
    return f"does not tell its memory ({card.memory_refusal})"


def _hidden_problem(value: Optional[str]) -> str:
    if not value:
        return f"hidden: {visible.VISIBLE} is empty"
    shown = value if len(value) <= _SHOWN else f"{value[:_SHOWN]}..."
    return f"hidden by {visible.VISIBLE}={shown}"


def _library_problem(answers: nvml.Survey) -> str:
    if answers.code == nvml.LIBRARY_MISMATCH:
        return f"the NVIDIA driver was updated while the system ran ({answers.refusal}); reboot the machine"
    if answers.code in (nvml.LIBRARY_NOT_FOUND, nvml.DRIVER_NOT_LOADED):
        return f"there is a card, but its driver is not there ({answers.refusal}); install NVIDIA's driver, or load it"
    if answers.code == nvml.NO_BINDING:
        return f"there is a card, but it cannot be asked ({answers.refusal}); run 'pip install nvidia-ml-py'"
    if answers.code == nvml.UNKNOWN:
        return f"the NVIDIA driver does not answer ({answers.refusal}); restart the container if this is one, else reboot the machine"
    return f"the NVIDIA driver does not answer ({answers.refusal}); does 'nvidia-smi' work here?"
