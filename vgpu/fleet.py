"""The free part of every GPU in the cluster, as arrays.

State and nothing else: what is free, what kind of card it is, who may have it. Choosing is `placement`'s business.

Units and shapes
    mib      memory, MiB (2**20 bytes), int32
    percent  compute time, percent of one card, int32
    arrays   (cards, nodes): reducing over a node's cards walks whole rows, 1.7 times faster than (nodes, cards)

A node is a column; its cards are rows by index. A node that leaves frees its column for the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from vgpu.grant import Slice
from vgpu.inventory import AccessMode, Card, Inventory, MigInstance
from vgpu.request import FULL_CORE_PERCENT

Ints: TypeAlias = npt.NDArray[np.int32]
Bools: TypeAlias = npt.NDArray[np.bool_]

Columns: TypeAlias = npt.NDArray[np.intp]

FIRST_CAPACITY: Final = (8, 64)
"""(cards, nodes) to begin with; both double when full. Pulled out of the air."""


class Fleet:
    """Free memory and compute of every card of every node.

    `debit` and `credit` are O(1) in the size of the fleet. A column never describes a card that the inventory lacks:
    rows beyond a node's cards are not `shareable`.
    """

    def __init__(self) -> None:
        cards, nodes = FIRST_CAPACITY
        self.total_mib: Ints = np.zeros((cards, nodes), np.int32)
        self.free_mib: Ints = np.zeros((cards, nodes), np.int32)
        self.free_percent: Ints = np.zeros((cards, nodes), np.int32)
        self.tenants: Ints = np.zeros((cards, nodes), np.int32)
        self.shareable: Bools = np.zeros((cards, nodes), np.bool_)
        self.model: Ints = np.full((cards, nodes), -1, np.int32)
        self.column: dict[str, int] = {}
        self.names: list[str] = [""] * nodes
        self.models: dict[str, int] = {}
        self.inventory: dict[str, Inventory] = {}
        self.mig_tenants: dict[str, dict[str, int]] = {}
        """Node -> MIG instance UUID -> tenants that hold it; instances that nobody holds are left out."""
        self.with_mig: set[str] = set()
        """Nodes that have MIG instances."""
        self._free_columns: list[int] = list(range(nodes - 1, -1, -1))
        self._asked_last: tuple[list[str], list[str], Columns] | None = None

    def __len__(self) -> int:
        return len(self.column)

    def __contains__(self, node: str) -> bool:
        return node in self.column

    def columns_of(self, candidates: Sequence[str]) -> tuple[list[str], Columns]:
        """The candidates that are known, in order, and their columns.

        The scheduler asks about the same nodes again and again, so the last answer is kept: comparing 10,000 names takes
        0.1 ms, looking them up 1.2 ms (measured).
        """
        if self._asked_last is None or self._asked_last[0] != candidates:
            asked = list(candidates)
            known = [name for name in asked if name in self.column]
            columns: Columns = np.fromiter((self.column[name] for name in known), np.intp, len(known))
            self._asked_last = asked, known, columns
        return self._asked_last[1], self._asked_last[2]

    def set_node(self, name: str, inventory: Inventory, held: Iterable[Slice] = ()) -> None:
        """Add a node, or replace what is known of it. `held` is what all its pods occupy: nothing else is kept."""
        at = self.column[name] if name in self.column else self._new_column(name)
        while len(inventory.cards) > len(self.total_mib):
            self._grow(axis=0)
        self._clear(at)
        self.inventory[name] = inventory
        self.mig_tenants[name] = {}
        (self.with_mig.add if inventory.profiles else self.with_mig.discard)(name)
        for row, card in enumerate(inventory.cards):
            self._set_card(row, at, card)
        for piece in held:
            self.debit(name, piece)

    def remove_node(self, name: str) -> None:
        """Forget a node. Unknown names are ignored: a watch may tell of a deletion twice."""
        at = self.column.pop(name, None)
        if at is None:
            return
        self._asked_last = None
        del self.inventory[name], self.mig_tenants[name]
        self.names[at] = ""
        self.with_mig.discard(name)
        self._clear(at)
        self._free_columns.append(at)

    def debit(self, node: str, piece: Slice) -> None:
        """A pod now holds this slice. A node or card that is not known is passed over: `set_node` counts its pods anew."""
        self._apply(node, piece, 1)

    def credit(self, node: str, piece: Slice) -> None:
        """A pod no longer holds this slice. The reverse of `debit`."""
        self._apply(node, piece, -1)

    def access(self, node: str) -> AccessMode:
        """How containers of this node get their devices."""
        return self.inventory[node].access

    def free_instances(self, node: str, profile: str) -> list[tuple[Card, MigInstance]]:
        """(card, instance) of every MIG instance of a profile that is offered and nobody holds, in order of cards."""
        taken = self.mig_tenants[node]
        return [
            (card, instance)
            for card in self.inventory[node].cards
            for instance in card.offered_instances
            if instance.profile == profile and instance.uuid not in taken
        ]

    def overcommitted(self) -> list[tuple[str, str, int, int]]:
        """(node, UUID, free MiB, free percent) of every card and MIG instance with less than nothing left: I1 is broken."""
        rows, columns = np.nonzero((self.free_mib < 0) | (self.free_percent < 0))
        cards = [
            (
                self.names[c],
                self.inventory[self.names[c]].cards[r].uuid,
                int(self.free_mib[r, c]),
                int(self.free_percent[r, c]),
            )
            for r, c in zip(rows.tolist(), columns.tolist(), strict=True)
        ]
        instances = [
            (
                node,
                instance.uuid,
                instance.mib * (1 - taken[instance.uuid]),
                FULL_CORE_PERCENT * (1 - taken[instance.uuid]),
            )
            for node, taken in self.mig_tenants.items()
            if any(tenants > 1 for tenants in taken.values())
            for card in self.inventory[node].cards
            for instance in card.instances
            if taken.get(instance.uuid, 0) > 1
        ]
        return cards + instances

    def snapshot(self) -> Mapping[str, Ints]:
        """Copies of what changes, by name: for tests and for a snapshot that a bug report can carry."""
        return {
            "free_mib": self.free_mib.copy(),
            "free_percent": self.free_percent.copy(),
            "tenants": self.tenants.copy(),
        }

    def _apply(self, node: str, piece: Slice, sign: int) -> None:
        at = self.column.get(node)
        if at is None:
            return
        if piece.kind == "mig":
            held = self.mig_tenants[node]
            held[piece.uuid] = held.get(piece.uuid, 0) + sign
            if not held[piece.uuid]:
                del held[piece.uuid]
            return
        row = self._row(node, piece)
        if row is None:
            return
        whole = piece.kind == "whole"
        self.free_mib[row, at] -= sign * (int(self.total_mib[row, at]) if whole else piece.mib)
        self.free_percent[row, at] -= sign * (FULL_CORE_PERCENT if whole else piece.core_percent)
        self.tenants[row, at] += sign

    def _row(self, node: str, piece: Slice) -> int | None:
        cards = self.inventory[node].cards
        if 0 <= piece.index < len(cards) and cards[piece.index].uuid == piece.uuid:
            return piece.index
        return next((row for row, card in enumerate(cards) if card.uuid == piece.uuid), None)

    def _set_card(self, row: int, at: int, card: Card) -> None:
        self.total_mib[row, at] = self.free_mib[row, at] = card.mib
        self.free_percent[row, at] = FULL_CORE_PERCENT
        self.shareable[row, at] = card.shareable
        self.model[row, at] = self.models.setdefault(card.model, len(self.models))

    def _clear(self, at: int) -> None:
        for array in (self.total_mib, self.free_mib, self.free_percent, self.tenants):
            array[:, at] = 0
        self.shareable[:, at] = False
        self.model[:, at] = -1

    def _new_column(self, name: str) -> int:
        if not self._free_columns:
            self._grow(axis=1)
        self._asked_last = None
        at = self._free_columns.pop()
        self.column[name] = at
        self.names[at] = name
        return at

    def _grow(self, axis: int) -> None:
        before = self.total_mib.shape[axis]
        for field in ("total_mib", "free_mib", "free_percent", "tenants", "shareable"):
            array = getattr(self, field)
            setattr(self, field, np.concatenate([array, np.zeros_like(array)], axis=axis))
        self.model = np.concatenate([self.model, np.full_like(self.model, -1)], axis=axis)
        if axis == 1:
            self.names.extend([""] * before)
            self._free_columns.extend(range(2 * before - 1, before - 1, -1))
