"""What the plugin before this one published of the node. This one will write over it, so it is read before the first write, however late the API server answers."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from kube.objects import Node
from vgpu.api.codec import inventory_from_json
from vgpu.api.errors import BadDocument
from vgpu.api.inventory import Inventory

log = structlog.get_logger("deviceplugin.gpus.earlier")


class EarlierInventory:
    """`remember` is called at most once with it. `key`: of the node's annotation."""

    def __init__(self, key: str, *remember: Callable[[Inventory], None]) -> None:
        self._key, self._remember = key, remember
        self._read = False

    def seen(self, node: Node) -> None:
        """The node as the API server has it. Only the first counts: later ones have what this plugin wrote."""
        if self._read:
            return
        self._read = True
        text = node.metadata.annotation(self._key)
        if not text:
            return
        try:
            earlier = inventory_from_json(text)
        except BadDocument as error:
            log.warning("what was published of this node before cannot be read", error=str(error))
            return
        for remember in self._remember:
            remember(earlier)
