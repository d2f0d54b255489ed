"""Which GPUs of a node are cordoned: a node annotation that people write (`tangramctl cordon`), and extender and device plugin read.

    {"v": 1, "gpus": {"GPU-...": {"reason": "fan replaced", "since_s": 1764216000}}}

A cordoned GPU gets no new pods. Those that are there stay, unless they are drained. A document that cannot be read in full is refused: what is half
understood must not offer a GPU that is under repair.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from vgpu.api.errors import BadDocument, NewerVersion
from vgpu.api.inventory import (
    CORDON_REASONS,
    CORDONED,
    MOST_GPUS_OF_A_NODE,
    WITHDRAWN,
    CordonState,
    GpuCondition,
    Inventory,
    withdraw,
)
from vgpu.api.uuids import kind_of_uuid

VERSION: Final = 1
MOST_REASON: Final = 200
"""Characters of a reason. Guessed: a sentence."""
_REASONS: Final = {state: reason for reason, state in CORDON_REASONS.items()}
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class Cordon:
    """Of one GPU."""

    reason: str = ""
    """For people; may be empty."""
    since_s: int = 0
    """Seconds since 1970."""


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    v: int
    gpus: dict[str, Cordon]


class _Version(msgspec.Struct):
    v: int


def cordons_to_json(cordons: Mapping[str, Cordon]) -> str | None:
    """The annotation; None where no GPU is cordoned: then there is none. Raises BadDocument."""
    _check(cordons)
    if not cordons:
        return None
    return msgspec.json.encode(_Document(VERSION, dict(sorted(cordons.items())))).decode()


def cordons_from_json(text: str | None) -> dict[str, Cordon]:
    """UUID -> its cordon. Raises BadDocument; NewerVersion when a newer tangramctl wrote it."""
    if text is None:
        return {}
    try:
        version = msgspec.json.decode(text, type=_Version).v
        if version > VERSION:
            raise NewerVersion(f"list of cordoned GPUs has version {version}: this program reads up to {VERSION}")
        document = msgspec.json.decode(text, type=_Document)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadDocument(f"list of cordoned GPUs: {error}") from None
    if version != VERSION:
        raise BadDocument(f"list of cordoned GPUs has version {version}: it must be {VERSION}")
    _check(document.gpus)
    return document.gpus


def _check(cordons: Mapping[str, Cordon]) -> None:
    if len(cordons) > MOST_GPUS_OF_A_NODE:
        raise BadDocument(f"list of cordoned GPUs names {len(cordons)}: it may name {MOST_GPUS_OF_A_NODE}")
    for uuid, one in cordons.items():
        if kind_of_uuid(uuid) != "GPU":
            raise BadDocument(f"list of cordoned GPUs names {uuid[:80]!r}: it must be the UUID of a GPU")
        if len(one.reason) > MOST_REASON or _CONTROL.search(one.reason):
            raise BadDocument(
                f"list of cordoned GPUs: the reason of {uuid} is {one.reason[:80]!r}: it must be one line of at most {MOST_REASON} characters"
            )
        if not 0 <= one.since_s < 2**53:
            raise BadDocument(f"list of cordoned GPUs: since_s of {uuid} is {one.since_s}: it must be 0 to {2**53 - 1}")


def with_cordons(inventory: Inventory, cordons: Mapping[str, Cordon]) -> Inventory:
    """The same GPUs, those cordoned that the annotation names. One that its plugin still withdraws stays withdrawn: it may not have passed its self-test."""
    if not any(gpu.uuid in cordons and not gpu.cordon for gpu in inventory.gpus):
        return inventory
    gpus = tuple(
        withdraw(gpu, condition(CORDONED, cordons[gpu.uuid])) if gpu.uuid in cordons and not gpu.cordon else gpu
        for gpu in inventory.gpus
    )
    return replace(inventory, gpus=gpus)


def condition(state: CordonState, cordon: Cordon) -> GpuCondition:
    """What the inventory says about a cordoned GPU."""
    return GpuCondition(_REASONS[state], WITHDRAWN, cordon.since_s, cordon.reason)
