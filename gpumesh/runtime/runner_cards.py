"""What a runner's environment says of cards: the process sees those of its lease, and one without a lease sees none.

The names have to be there before the process touches a GPU; a runner gets them when it is forked.
"""

from __future__ import annotations

from typing import Dict, Mapping, Sequence, Tuple

from gpumesh.model.resources import DeviceFacts

CUDA = "CUDA_VISIBLE_DEVICES"
HIP = "HIP_VISIBLE_DEVICES"
DEVICE = "GPUMESH_DEVICE"
"""Names the device of the process's tasks as torch does ("cuda:0", "mps"); the runner reads it."""
NO_HIP = (
    "-1"  # HIP takes an empty list for none at all, and then shows every card; a number that no card has ends the list at once.
)


def card_environment(cards: Tuple[str, ...], devices: Sequence[DeviceFacts], inherited: Mapping[str, str]) -> Dict[str, str]:
    """Variables for a process that runs tasks on these cards.

    Args:
        cards: DeviceFacts.key of each, in the order in which the process is to number them.
        devices: What the worker knows of its devices.
        inherited: The environment that the process gets them on top of: it may have been given some of the machine's cards only.

    Raises:
        ValueError: A card cannot be made visible.
    """
    known = {facts.key: facts for facts in devices}
    kind = known[cards[0]].kind if cards[0] in known else cards[0].partition(":")[0]
    if kind == "mps":
        return {DEVICE: "mps"}
    if kind == "rocm":
        return _rocm_environment(cards, known, inherited)
    from gpumesh.devices.visible import mask

    return {CUDA: mask(cards, inherited.get(CUDA)), DEVICE: "cuda:0"}


def no_card_environment(devices: Sequence[DeviceFacts]) -> Dict[str, str]:
    """Variables for a process whose tasks have no card: it sees none. Empty on a machine where there is nothing to see."""
    kinds = {facts.kind for facts in devices if facts.kind != "cpu"}
    if not kinds:
        from gpumesh.devices.detect import gpus_may_exist

        if not gpus_may_exist():
            return {}
    return {CUDA: "", HIP: NO_HIP} if "rocm" in kinds else {CUDA: ""}


def _rocm_environment(cards: Tuple[str, ...], known: Mapping[str, DeviceFacts], inherited: Mapping[str, str]) -> Dict[str, str]:
    """HIP numbers what `ROCR_VISIBLE_DEVICES` has left, which stays as it is."""
    from gpumesh.devices.visible import mask

    keys = [f"cuda:{known[card].index}" if card in known else card.replace("rocm:", "cuda:") for card in cards]
    numbers = mask(keys, inherited.get(HIP, inherited.get(CUDA)))
    # HIP reads CUDA's variable too where its own is not set; beside cards of the other kind it must not show one of those.
    others = any(facts.kind == "cuda" for facts in known.values())
    return {HIP: numbers, CUDA: "" if others else numbers, DEVICE: "cuda:0"}
