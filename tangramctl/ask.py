"""Options of `run` to the ask that placement understands. An error names the option, the value and the range."""

from __future__ import annotations

from typing import Final

from tangramctl.errors import BadOption
from vgpu.errors import BadAsk
from vgpu.inventory import Inventory
from vgpu.names import CLASSES, LEVELS
from vgpu.quantity import LARGEST_CARD_MIB, MIB, SMALLEST_BYTES, whole_number
from vgpu.request import FULL_CORE_PERCENT, Ask, PodAsk

GIB_MIB: Final = 1024
"""A plain number is GiB, as in a pod."""


def memory_mib(text: str) -> int:
    """`8Gi`, `512Mi`, or `8` for GiB, to MiB, rounded up. Raises BadOption."""
    try:
        number = whole_number(text, what="--gpu-mem")
    except BadAsk as error:
        raise BadOption(str(error)) from None
    mib = -(-number // MIB) if number >= SMALLEST_BYTES else number * GIB_MIB
    if mib > LARGEST_CARD_MIB:
        raise BadOption(
            f"--gpu-mem is {text}, which is {mib} MiB: it must be 1 to {LARGEST_CARD_MIB} MiB{plain_hint(text)}"
        )
    return mib


def plain_hint(text: str) -> str:
    """For the end of an error: what a plain number means; empty where a unit was given."""
    return f"; a plain number is GiB: write {text}Mi for MiB" if text.isdigit() and int(text) < SMALLEST_BYTES else ""


def ask(mib: int, core_percent: int, klass: str, level: int, uuids: frozenset[str]) -> PodAsk:
    """One container with a share of one card. `core_percent` 0 = no cap."""
    if not 0 <= core_percent <= FULL_CORE_PERCENT:
        raise BadOption(f"--gpu-core is {core_percent}: it must be 1 to {FULL_CORE_PERCENT} percent of one GPU")
    if klass not in CLASSES:
        raise BadOption(f"--class is {klass!r}: it must be one of {', '.join(CLASSES)}")
    if level not in LEVELS:
        raise BadOption(f"--level is {level}: it must be {LEVELS.start} to {LEVELS.stop - 1}")
    share = Ask("run", "share", cards=1, mib=mib, core_percent=core_percent)
    return PodAsk((share,), klass=klass, level=level, uuids=uuids)


def cards_named(text: str, inventory: Inventory, what: str) -> frozenset[str]:
    """UUIDs of the cards that a list by comma names by index, UUID or the beginning of one. Raises BadOption."""
    return frozenset(_card_named(word.strip(), inventory, what) for word in text.split(","))


def _card_named(word: str, inventory: Inventory, what: str) -> str:
    if word.isascii() and word.isdigit():
        found = [card for card in inventory.cards if card.index == int(word)]
    else:
        found = [card for card in inventory.cards if word.startswith("GPU-") and card.uuid.startswith(word)]
    if len(found) != 1:
        there = ", ".join(f"{card.index} ({card.uuid})" for card in inventory.cards)
        names = "more than one card" if found else "no card"
        raise BadOption(f"{what} is {word!r}, which names {names}: it must be the index or UUID of one of {there}")
    (card,) = found
    if card.mig:
        raise BadOption(f"{what} is {word!r}: that card is in MIG mode; it must be one that is not")
    return card.uuid
