"""Keep the node's inventory annotation saying what the node has.

Written when it changed, and looked at now and then in case somebody else changed it: the extender places by it.
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec
import structlog

from deviceplugin.offer import Offer
from kube import paths
from kube.client import Client
from kube.errors import ApiError
from kube.objects import Node
from kube.patch import annotate
from vgpu.codec import inventory_to_json

VERIFY_S: Final = 60.0
"""Between looks at the annotation when nothing changed. Guessed: one GET of a node a minute is little."""
RETRY_S: Final = (0.5, 30.0)

log = structlog.get_logger("deviceplugin.publish")


class Publisher:
    """Writes the annotation of one node."""

    def __init__(self, client: Client, node: str, offer: Offer) -> None:
        self.written = 0
        self.failing = ""
        """Why the last attempt failed; empty when it did not."""
        self._client, self._path, self._offer = client, paths.node(node), offer

    async def run(self) -> None:
        """Until cancelled. Nothing is written before NVML has answered once: silence of the driver is no inventory."""
        await self._offer.changed_since(0)
        wait_s = RETRY_S[0]
        while True:
            version = self._offer.version
            try:
                await self.publish()
            except (ApiError, msgspec.MsgspecError) as error:
                self.failing = str(error)
                log.warning("the inventory is not published", error=self.failing, retry_s=wait_s)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, RETRY_S[1])
                continue
            self.failing, wait_s = "", RETRY_S[0]
            try:
                async with asyncio.timeout(VERIFY_S):
                    await self._offer.changed_since(version)
            except TimeoutError:
                continue

    async def publish(self) -> bool:
        """Make the annotation right. Answers whether it was wrong. Raises ApiError."""
        key, text = self._offer.names.inventory, inventory_to_json(self._offer.inventory())
        node = msgspec.json.decode(await self._client.get(self._path), type=Node)
        if node.metadata.annotation(key) == text:
            return False
        await annotate(self._client, self._path, {key: text})
        self.written += 1
        cards = self._offer.inventory().cards
        log.info("inventory published", cards=len(cards), healthy=sum(card.healthy for card in cards))
        return True
