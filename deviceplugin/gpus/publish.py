"""Keep the node's annotations, labels and taint saying what the node has: its inventory, and beside it a summary of bursts and labels for people.

Written when it changed, when a watch of the node shows another (a node that was deleted and made again has none), and checked now and
then in case the watch is not there: the extender places by it. What is beside it is compared at the same checks, and when its maker requests one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final

import msgspec
import structlog

from deviceplugin.gpus.node_taint import NodeTaint
from deviceplugin.gpus.offer import Offer
from kube import paths
from kube.cache import Cache
from kube.client import Client
from kube.errors import ApiError
from kube.objects import Metadata, Node, NodeSpec, NodeStatus
from kube.patch import annotate, merge
from vgpu.api.back_off import BackOff
from vgpu.api.codec import inventory_to_json
from vgpu.api.errors import BadDocument, Refused
from vgpu.api.inventory import Inventory

VERIFY_S: Final = 60.0
"""Between checks of the annotation when nothing changed. Guessed: one GET of a node a minute is little."""
BACKOFF_S: Final = (0.5, 30.0)
"""First and longest wait after an attempt that failed. Guessed."""

log = structlog.get_logger("deviceplugin.gpus.publish")


class Publisher:
    """Writes the annotations of one node. `beside`, `labels`: further annotations, and labels, as they should be now; None = it should not be there.
    `label_keys`: of the labels that `labels_seen` answers. `seen` is called with the node as it was before the first write, and as the watch shows it: of its
    annotations, its inventory and its cordoned GPUs are kept, and the version of its container runtime."""

    def __init__(
        self,
        client: Client,
        node: str,
        offer: Offer,
        beside: Callable[[], Mapping[str, str | None]] = dict,
        labels: Callable[[], Mapping[str, str | None]] = dict,
        label_keys: Collection[str] = (),
        seen: Callable[[Node], None] = lambda _: None,
        taint: NodeTaint | None = None,
    ) -> None:
        self.written = 0
        self.failing = ""
        """Why the last attempt failed; empty when it did not."""
        self.before_write: Callable[[Inventory], Awaitable[None]] = _nothing
        """Awaited before an inventory is written. Raises OSError, Refused: then it is not."""
        self.shown: Callable[[Inventory], object] = bool
        """Called with the inventory that the annotation has."""
        self._client, self._path, self._offer, self._beside = client, paths.node(node), offer, beside
        self._labels, self._label_keys, self._taint = labels, frozenset(label_keys), taint
        self._seen, self._began = seen, False
        self._nodes: Cache[Node] = Cache(
            client,
            paths.NODES,
            Node,
            field_selector=f"metadata.name={node}",
            shrink=self._small,
            on_change=lambda _, new: seen(new) if new is not None else None,
        )
        self._due = asyncio.Event()
        self._refused: int | None = None
        """Status of the last refusal of a further annotation, until one is written."""
        self._looked_at = ""
        """Resource version of the node when the watch's word was compared last."""

    async def run(self) -> None:
        """Until cancelled. Nothing is written before NVML has answered once: silence of the driver is no inventory."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._nodes.run())
            group.create_task(self._keep_published())

    def labels_seen(self) -> Mapping[str, str] | None:
        """Those of the node, by `label_keys`, as its watch shows them; None = the watch shows no node."""
        node = next(self._nodes.items(), None)
        return None if node is None else node.metadata.labels or {}

    def check(self) -> None:
        """What is beside the inventory changed, and is worth a check now."""
        self._due.set()

    async def _keep_published(self) -> None:
        await self._offer.changed_since(0)
        back_off = BackOff(*BACKOFF_S)
        while True:
            self._due.clear()
            version = self._offer.version
            try:
                await self.publish()
            except (ApiError, BadDocument, Refused, OSError, msgspec.MsgspecError) as error:
                self.failing, retry_s = str(error), back_off.failed()
                log.warning("the inventory is not published", error=self.failing, retry_s=retry_s)
                await self._wait_for_change(version, retry_s)
                continue
            self.failing = ""
            back_off.succeeded()
            await self._wait_for_change(version, VERIFY_S)

    async def _wait_for_change(self, version: int, at_most_s: float) -> None:
        """Return when the offer changed, a check is due, or the watch shows an annotation that is not ours; or after so long."""
        waiting: list[asyncio.Future[object]] = [
            asyncio.ensure_future(self._offer.changed_since(version)),
            asyncio.ensure_future(self._other_text()),
            asyncio.ensure_future(self._due.wait()),
        ]
        try:
            await asyncio.wait(waiting, timeout=at_most_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waiting:
                one.cancel()

    async def _other_text(self) -> None:
        """Return when the watch shows the node in a version that it did not show before, with another annotation than it should have, or still with the startup taint.

        Each version counts once: a watch that lags behind our own write is no reason to read the node again and again.
        """
        while True:
            for node in self._nodes.items():
                fresh = node.metadata.resource_version != self._looked_at
                self._looked_at = node.metadata.resource_version
                if fresh and (self._differs(node) or (self._taint is not None and self._taint.is_due(node))):
                    return
            await self._nodes.changed()

    def _differs(self, node: Node) -> bool:
        return node.metadata.annotation(self._offer.names.inventory) != inventory_to_json(self._offer.inventory())

    def _small(self, node: Node) -> Node:
        """What is read of a node."""
        meta, names = node.metadata, self._offer.names
        kept = {
            key: text for key in (names.inventory, names.cordoned_gpus) if (text := meta.annotation(key)) is not None
        }
        labels = {one: value for one, value in (meta.labels or {}).items() if one in self._label_keys}
        spec, status = self._taint.of_startup(node) if self._taint is not None else (NodeSpec(), NodeStatus())
        return Node(
            Metadata(meta.name, "", meta.uid, meta.resource_version, labels=labels or None, annotations=kept or None),
            spec,
            msgspec.structs.replace(status, node_info=node.status.node_info),
        )

    async def publish(self) -> bool:
        """Make the annotations right. Returns whether one was written. Raises ApiError, OSError, Refused."""
        node = msgspec.json.decode(await self._client.get(self._path), type=Node)
        if not self._began:  # it may change what is published
            self._began = True
            self._seen(node)
        inventory = self._offer.inventory()
        key, text = self._offer.names.inventory, inventory_to_json(inventory)
        wrong = node.metadata.annotation(key) != text
        if wrong:
            await self.before_write(inventory)
            await annotate(self._client, self._path, {key: text})
            self.written += 1
            gpus = inventory.gpus
            log.info("inventory published", gpus=len(gpus), healthy=sum(gpu.healthy for gpu in gpus))
        self.shown(inventory)
        beside = await self._publish_beside(node)
        tainted = await self._taint.keep(node) if self._taint is not None else False
        return wrong or beside or tainted

    async def _publish_beside(self, node: Node) -> bool:
        """The same for the rest. Pods are placed without it, so a refusal is logged and no failure."""
        has = node.metadata.labels or {}
        wrong = {one: value for one, value in self._beside().items() if node.metadata.annotation(one) != value}
        labels = {one: value for one, value in self._labels().items() if has.get(one) != value}
        if not wrong and not labels:
            return False
        change = {"annotations": wrong, "labels": labels}
        try:
            await merge(
                self._client, self._path, {"metadata": {kind: these for kind, these in change.items() if these}}
            )
        except ApiError as error:
            if error.status != self._refused:
                keys = {"annotations": sorted(wrong), "labels": sorted(labels)}
                log.warning("annotations or labels of the node are not written", **keys, error=str(error))
            self._refused = error.status
            return False
        self._refused = None
        self.written += 1
        return True


async def _nothing(_: Inventory) -> None:
    return None
