"""Why nobody can run a task, in words for people: what it needs, what each worker offers, the best candidate first. Changes nothing."""

from __future__ import annotations

import difflib
from typing import List, Sequence, Tuple

from gpumesh.model.resources import DeviceFacts, Requirement, WorkerFacts, lacks, show_requirement
from gpumesh.scheduler.states import Worker, WorkerState

NAMED_WORKERS = 8  # In a text for people; the rest is counted.
ALIKE = 0.6  # Of names: difflib's own cutoff for "a good match".

# How far a worker is from running a task: what nobody can add to a machine weighs more than what a person can change.
_NO_GPU = 10.0  # More than all that can be wrong with one that is there.
_OTHER_KIND = 3.0
_OTHER_MODEL = 2.0
_SHORT = 1.0  # And up to as much again, the less it has of what is wanted.
_UNUSED = 0.5  # There, and its owner or a driver keeps it from us.
_LEAVING = 100.0  # No candidate at all.


def is_version_mismatch(need: Requirement, workers: Sequence[Worker]) -> bool:
    """Whether some worker could run it if only its Python were another."""
    if not need.python:
        return False
    rest = need._replace(python="")
    return any(worker.state is WorkerState.HEALTHY and not lacks(worker.facts, rest) for worker in workers)


def explain(name: str, need: Requirement, workers: Sequence[Worker], *, client: str = "") -> str:
    """Why nobody can run a task, and what to do about it, for people.

    Args:
        name: The function's.
        need: What it needs.
        workers: All that are connected; none of them can run it. Those that lack least are named first.
        client: Who has sent it.
    """
    wanted = f"task {name!r} needs {show_requirement(need)}"
    remedy = "ask for less with options(...), or join a machine that has it with `gpumesh join`"
    if is_version_mismatch(need, workers):
        sender = f" by {client}" if client else ""
        wanted += f", because it was sent{sender} as bytecode of that version"
        remedy = (
            f"join a worker that runs Python {need.python}, run the driver with the Python of the workers, "
            "or put the function into a module that the workers can import"
        )
    if not workers:
        return f"{wanted}, but no worker is connected; join a machine with `gpumesh join`"
    ranked = sorted(workers, key=lambda worker: distance(worker, need))  # Stable: equals stay in the order of joining.
    hosts = [worker.facts.hostname for worker in workers]
    offers = [_offer(worker, need, is_alone=hosts.count(worker.facts.hostname) == 1) for worker in ranked[:NAMED_WORKERS]]
    if len(workers) > NAMED_WORKERS:
        offers.append(f"and {len(workers) - NAMED_WORKERS} more")
    count = "the only connected worker" if len(workers) == 1 else f"none of {len(workers)} connected workers"
    verb = "cannot run it" if len(workers) == 1 else "can run it"
    meant = similar_card(need, [worker.facts for worker in workers])
    hint = f"did you mean {meant!r}? " if meant else ""
    return f"{wanted}, but {count} {verb}: {'; '.join(offers)}; {hint}{remedy}"


def distance(worker: Worker, need: Requirement) -> float:
    """How far a worker is from being able to run this, for sorting: 0 nothing is missing, the more the further."""
    far = _distance(worker.facts, need)
    if worker.facts.problem:
        far += _UNUSED
    return far + _LEAVING if worker.is_draining else far


def similar_card(need: Requirement, workers: Sequence[WorkerFacts]) -> str:
    """The name of a card that may have been meant by a model that nobody has; "" if none comes close."""
    if not need.model:
        return ""
    names = {card.name: None for facts in workers for card in _cards(facts) if card.name}
    if any(need.model in name.lower() for name in names):
        return ""
    best = max(names, key=lambda name: likeness(need.model, name), default="")
    return best if best and likeness(need.model, best) >= ALIKE else ""


def likeness(model: str, name: str) -> float:
    """How much of a card's name sounds like the model that was asked for: 0 to 1.

    Compared with each run of as many words as the model has, with and without the spaces: "rtx3080" is an RTX 3080.
    """
    words = name.lower().replace("-", " ").split()
    wanted = model.replace("-", " ").split()
    best = 0.0
    for length in {len(wanted), len(wanted) + 1}:
        for start in range(max(1, len(words) - length + 1)):
            part = "".join(words[start : start + length])
            best = max(best, difflib.SequenceMatcher(None, "".join(wanted), part).ratio())
    return best


def _offer(worker: Worker, need: Requirement, *, is_alone: bool) -> str:
    host = worker.facts.hostname
    where = host if host and is_alone else f"{host} ({worker.id})" if host else worker.id
    if worker.is_draining:
        return f"{where} is leaving"
    missing = lacks(worker.facts, need)
    if worker.facts.problem:
        return f"{where} {'' if missing else 'has it, but '}takes no tasks ({worker.facts.problem})"
    return f"{where} {' and '.join(missing) or 'has no room that is large enough'}"


def _distance(facts: WorkerFacts, need: Requirement) -> float:
    far = 0.0
    if need.python and facts.python and facts.python != need.python:
        far += _SHORT
    far += _shortage(facts.cores, need.cores) + _shortage(facts.memory, need.memory)
    far += sum(_SHORT for pair in need.tags if pair not in facts.tags)
    return far + _gpu_distance(facts, need) if need.needs_gpu else far


def _gpu_distance(facts: WorkerFacts, need: Requirement) -> float:
    far, cards = _nearest_cards(facts, need)
    usable = [card for card in cards if not card.problem]
    if cards and not usable:
        far, usable = far + _UNUSED, cards
    if not usable:
        return far
    far += _shortage(max(card.memory for card in usable), need.gpu_memory)
    return far + _shortage(sum(card.memory >= need.gpu_memory for card in usable) or len(usable), need.gpus)


def _nearest_cards(facts: WorkerFacts, need: Requirement) -> Tuple[float, List[DeviceFacts]]:
    """The cards that come closest to the kind and model wanted, and how far off they are."""
    cards = _cards(facts)
    if not cards:
        return _NO_GPU, []
    kind, _, index = need.device.partition(":")
    if kind and kind != "gpu":
        same = [card for card in cards if card.kind == kind and (not index or card.index == int(index))]
        if not same:
            return _OTHER_KIND, cards
        cards = same
    named = [card for card in cards if need.model in card.name.lower()]
    if named:
        return 0.0, named
    return _OTHER_MODEL + 1 - max(likeness(need.model, card.name) for card in cards), cards


def _cards(facts: WorkerFacts) -> List[DeviceFacts]:
    return [device for device in facts.devices if device.kind != "cpu"]


def _shortage(offered: float, wanted: float) -> float:
    """0 where there is enough; else 1 to 2, the more is missing the more."""
    return 0.0 if offered >= wanted else _SHORT + 1 - offered / wanted
