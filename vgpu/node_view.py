"""A node and who holds what there, as arrays: made once, and read by every search for victims until something there changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vgpu.grant import Slice
from vgpu.holder import Holder
from vgpu.inventory import Card, Inventory
from vgpu.names import CLASSES
from vgpu.request import FULL_CORE_PERCENT, PodAsk

RANKS: Final = {klass: at for at, klass in enumerate(CLASSES)}
"""0 latency-critical, 1 standard, 2 best-effort."""

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class NodeView:
    """`holders` must name all that hold something on the node: what they leave is what is free.

    Per pod, in the order of `pods`: `priority`, `rank` of its class, `started`, `evictable` (is it not spared?). Per piece, that is what one pod
    has of one card: `owner` (pod), `row` (card), `mib`, `percent`; a whole GPU counts as all of it.
    """

    __slots__ = (
        "_index",
        "_requests",
        "bounds",
        "budgeted",
        "budgets",
        "evictable",
        "inventory",
        "mib",
        "mig",
        "name",
        "owner",
        "percent",
        "pods",
        "priority",
        "rank",
        "row",
        "shareable",
        "spans",
        "started",
        "total_mib",
    )  # fmt: skip

    def __init__(self, name: str, inventory: Inventory, holders: Sequence[Holder]) -> None:
        self.name, self.inventory, self.pods = name, inventory, tuple(holders)
        cards = {card.uuid: (row, card.mib) for row, card in enumerate(inventory.cards)}
        owner, rows, mib, percent = list[int](), list[int](), list[int](), list[int]()
        mig = list[tuple[int, Slice]]()
        for at, one in enumerate(self.pods):
            for piece in one.held:
                if piece.kind == "mig":
                    mig.append((at, piece))
                elif piece.uuid in cards:
                    row, card_mib = cards[piece.uuid]
                    whole = piece.kind == "whole"
                    owner.append(at)
                    rows.append(row)
                    mib.append(card_mib if whole else piece.mib)
                    percent.append(FULL_CORE_PERCENT if whole else piece.core_percent)
        self.owner, self.row, self.mib, self.percent = map(_ints, (owner, rows, mib, percent))
        self.mig = tuple(mig)
        self.priority = _ints([one.priority for one in self.pods])
        self.rank = _ints([RANKS.get(one.klass, 1) for one in self.pods])
        self.started = _ints([one.started for one in self.pods])
        self.evictable = np.array([not one.spared for one in self.pods], np.bool_)
        self.budgeted = tuple((at, one.budgets) for at, one in enumerate(self.pods) if one.budgets)
        self.budgets = frozenset[str]().union(*(one.budgets for one in self.pods))
        self.bounds: dict[tuple[object, frozenset[str]], Any] = {}
        """What `kept_bounds` keeps here."""
        self.spans = len(set(owner)) < len(owner)
        """Does a pod hold pieces of several cards?"""
        self.shareable = np.array([card.shareable for card in inventory.cards], np.bool_)
        self.total_mib: Ints = np.array([card.mib for card in inventory.cards], np.int64)
        self._index: Mapping[str, int] | None = None
        self._requests: dict[str, Ints] = {}

    def indices(self, uids: Set[str]) -> list[int]:
        """Of those of these pods that are there."""
        if uids and self._index is None:
            self._index = {one.uid: at for at, one in enumerate(self.pods)}
        return [self._index[uid] for uid in sorted(uids) if uid in self._index] if self._index else []

    def requests(self, resource: str) -> Ints:
        """(pods,) what each frees of a resource."""
        if resource not in self._requests:
            self._requests[resource] = np.array([one.frees(resource) for one in self.pods], np.int64)
        return self._requests[resource]

    def instances(self, profile: str) -> int:
        """How many MIG instances of a profile are offered, whoever holds them."""
        return sum(one.profile == profile for card in self.inventory.cards for one in card.offered_instances)

    def allowed(self, ask: PodAsk, only: Set[str] | None) -> Bools:
        """(cards,) which the pod may have a share of, or as a whole. `only`: no others than these."""
        if only is None and not (ask.models or ask.not_models or ask.uuids or ask.not_uuids):
            return self.shareable
        return np.array([may_have(ask, card, only) for card in self.inventory.cards], np.bool_)


def may_have(ask: PodAsk, card: Card, only: Set[str] | None) -> bool:
    """May the pod have a share of this card, or all of it, if there is room?"""
    return card.shareable and ask.allows(card.model, {card.uuid}) and (only is None or card.uuid in only)


def _ints(numbers: Sequence[int]) -> Ints:
    return np.array(numbers, np.int64)
