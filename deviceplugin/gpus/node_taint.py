"""Keep the taint that says that a GPU of this node is unhealthy, where the operator wants one (`vgpu.health.taints`).

The list of taints is one value for the API server, and others write it too. So it is written with the node's version in it: who writes in between makes this one
read again, and no taint of others is lost. A refusal is no failure of the plugin: pods are placed without the taint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec
import structlog

from kube import paths
from kube.client import Client
from kube.errors import ApiError
from kube.objects import Node
from kube.patch import merge
from vgpu.api.inventory import Inventory
from vgpu.health.taints import Effect, wanted_effect, with_taint

TRIES: Final = 3
"""When others write the node at the same time; the next check tries again. Guessed."""
CONFLICT: Final = 409

log = structlog.get_logger("deviceplugin.gpus.node_taint")


class _Metadata(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str = ""


class _Spec(msgspec.Struct, frozen=True):
    taints: list[dict[str, Any]] | None = None
    """With fields of them that this program does not know."""


class _Tainted(msgspec.Struct, frozen=True):
    """What is read of a node before its taints are written."""

    metadata: _Metadata
    spec: _Spec | None = None


class NodeTaint:
    """Of one node. `effect` None: there should be none."""

    def __init__(
        self, client: Client, node: str, key: str, effect: Effect | None, inventory: Callable[[], Inventory]
    ) -> None:
        self._client, self._path, self._key, self._effect, self._inventory = (
            client, paths.node(node), key, effect, inventory,
        )  # fmt: skip
        self._refused: int | None = None
        """Status of the last refusal, until the taint is written."""

    async def keep(self, node: Node) -> bool:
        """Bring the taint in step, where this node, as it was read just now, has another. Returns whether it was written. Raises msgspec.MsgspecError."""
        effects = [one.effect for one in node.spec.taints if one.key == self._key]
        if effects == [one for one in [self._wanted(present=bool(effects))] if one]:
            return False
        try:
            return await self._write()
        except ApiError as error:
            if error.status != self._refused:
                log.warning("the taint of the node is not written", taint=self._key, error=str(error))
            self._refused = error.status
            return False

    def _wanted(self, *, present: bool) -> Effect | None:
        return wanted_effect(self._inventory(), self._effect, present=present)

    async def _write(self) -> bool:
        for attempt in range(TRIES):
            node = msgspec.json.decode(await self._client.get(self._path), type=_Tainted)
            before = (node.spec and node.spec.taints) or []
            wanted = self._wanted(present=any(one.get("key") == self._key for one in before))
            taints = with_taint(before, self._key, wanted)
            if taints == before:
                return False
            try:
                await merge(
                    self._client,
                    self._path,
                    {
                        "metadata": {"resourceVersion": node.metadata.resource_version},
                        "spec": {"taints": taints or None},
                    },
                )
            except ApiError as error:
                if error.status != CONFLICT or attempt + 1 == TRIES:
                    raise
                continue
            self._refused = None
            log.info("the taint of the node is written", taint=self._key, effect=wanted or "none")
            return True
        return False
