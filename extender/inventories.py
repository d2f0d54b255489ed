"""The GPUs that each node offers: its inventory annotation, read and checked, and what keeps a node from taking pods.

A node is left out while its inventory cannot be read or counts memory in another unit, and while a pod on it has an assignment that cannot
be read. An inventory that changes under running pods keeps their allocations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import structlog

from extender.accounting import Accounting
from extender.reasons import (
    NEWER_INVENTORY,
    OTHER_UNIT,
    UNKNOWN_NODE,
    UNREADABLE_ASSIGNMENT,
    UNREADABLE_CORDONS,
    UNREADABLE_INVENTORY,
)
from vgpu.api.codec import inventory_from_json
from vgpu.api.cordon import cordons_from_json, with_cordons
from vgpu.api.errors import BadDocument, NewerVersion
from vgpu.api.inventory import Inventory
from vgpu.scheduling.placement import NO_INVENTORY

log = structlog.get_logger("extender.inventories")


class Inventories:
    """By node name. `unit_mib`: the unit in which this cluster counts GPU memory."""

    def __init__(self, allocations: Accounting, unit_mib: int) -> None:
        self._allocations, self._unit_mib = allocations, unit_mib
        self._nodes: dict[str, Inventory | None] = {}
        """Every node of the cluster, and its GPUs as last read."""
        self._excluded: dict[str, str] = {}
        """Node -> what is wrong with its inventory."""
        self._blocked: dict[str, set[str]] = {}
        """Node -> UIDs of its pods whose assignment cannot be read."""

    def __contains__(self, name: str) -> bool:
        return name in self._nodes

    @property
    def excluded_nodes(self) -> set[str]:
        """Nodes that take no pods until an inventory or an assignment is corrected."""
        return set(self._excluded) | set(self._blocked)

    def set_node(self, name: str, text: str | None, cordons: str | None = None) -> Inventory | None:
        """A node came, or its annotations changed. Returns the inventory, None where there is none or it cannot be used. `cordons`: which GPUs are cordoned."""
        self._nodes[name] = inventory = self._read(name, text, cordons)
        return inventory

    def forget(self, name: str) -> None:
        """The node is gone."""
        self._nodes.pop(name, None)
        self._excluded.pop(name, None)
        self._allocations.set_node(name, None)

    def offer(self, name: str) -> None:
        """Add the node's GPUs to the fleet, or remove them while the node is blocked."""
        self._allocations.set_node(name, None if name in self._blocked else self._nodes.get(name))

    def block(self, name: str, uid: str) -> None:
        """A pod on the node has an assignment that cannot be read. To be followed by `offer`."""
        self._blocked.setdefault(name, set()).add(uid)

    def unblock(self, uid: str) -> Iterator[str]:
        """The pod is gone, or its assignment can be read now. Yields the nodes to `offer` again."""
        for node in [node for node, uids in self._blocked.items() if uid in uids]:
            self._blocked[node].discard(uid)
            if not self._blocked[node]:
                del self._blocked[node]
            yield node

    def reason(self, name: str) -> str:
        """Why a node that is not in the fleet takes no pods."""
        if name in self._blocked:
            return UNREADABLE_ASSIGNMENT
        return self._excluded.get(name, NO_INVENTORY if name in self._nodes else UNKNOWN_NODE)

    def snapshot(self) -> tuple[Mapping[str, Inventory | None], Mapping[str, str]]:
        """Copies: every node with its inventory, and the reason of each that is left out."""
        return dict(self._nodes), self._excluded | dict.fromkeys(self._blocked, UNREADABLE_ASSIGNMENT)

    def _read(self, name: str, text: str | None, cordons: str | None) -> Inventory | None:
        self._excluded.pop(name, None)
        if text is None:
            return None
        try:
            inventory = inventory_from_json(text)
        except BadDocument as error:
            self._excluded[name] = NEWER_INVENTORY if isinstance(error, NewerVersion) else UNREADABLE_INVENTORY
            log.error("an inventory cannot be read; the node takes no pods", node=name, error=str(error))
            return None
        if inventory.unit_mib != self._unit_mib:
            self._excluded[name] = OTHER_UNIT
            log.error(OTHER_UNIT, node=name, node_unit_mib=inventory.unit_mib, cluster_unit_mib=self._unit_mib)
            return None
        try:
            return with_cordons(inventory, cordons_from_json(cordons))
        except BadDocument as error:
            self._excluded[name] = UNREADABLE_CORDONS
            log.error("the list of cordoned GPUs cannot be read; the node takes no pods", node=name, error=str(error))
            return None
