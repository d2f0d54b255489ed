"""Keep the taint that says that a GPU of this node is unhealthy, where the operator wants one, and remove the startup taint once (`vgpu.health.taints`).

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
from kube.objects import Node, NodeSpec, NodeStatus
from kube.patch import merge
from vgpu.api.inventory import Inventory
from vgpu.api.names import Names
from vgpu.health.taints import Effect, is_usable, wanted_effect, with_taint

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
    """Of one node. `effect` None: there should be no taint of an unhealthy GPU. `startup`: is the startup taint removed when the GPUs are usable?"""

    def __init__(
        self,
        client: Client,
        node: str,
        names: Names,
        effect: Effect | None,
        inventory: Callable[[], Inventory],
        *,
        startup: bool = True,
    ) -> None:
        self._client, self._path, self._names, self._effect, self._inventory = (
            client, paths.node(node), names, effect, inventory,
        )  # fmt: skip
        self._key, self._startup = names.unhealthy_taint, startup
        self._refused: int | None = None
        """Status of the last refusal, until the taint is written."""

    async def keep(self, node: Node) -> bool:
        """Bring the taint in step, where this node, as it was read just now, has another. Returns whether it was written. Raises msgspec.MsgspecError."""
        effects = [one.effect for one in node.spec.taints if one.key == self._key]
        usable = self.is_due(node)
        if not usable and effects == [one for one in [self._wanted(present=bool(effects))] if one]:
            return False
        try:
            return await self._write(usable=usable)
        except ApiError as error:
            if error.status != self._refused:
                log.warning("the taints of the node are not written", taint=self._key, error=str(error))
            self._refused = error.status
            return False

    def is_due(self, node: Node) -> bool:
        """Does the node still have the startup taint, although its GPUs are usable?"""
        tainted = self._startup and any(one.key == self._names.startup_taint for one in node.spec.taints)
        return tainted and is_usable(self._inventory(), node.status.allocatable or {}, self._names)

    def of_startup(self, node: Node) -> tuple[NodeSpec, NodeStatus]:
        """What `is_due` reads of a node: nothing of one without the startup taint."""
        taints = tuple(one for one in node.spec.taints if one.key == self._names.startup_taint)
        if not taints:
            return NodeSpec(), NodeStatus()
        ours = {name: amount for name, amount in (node.status.allocatable or {}).items() if self._names.ours(name)}
        return NodeSpec(taints=taints), NodeStatus(ours or None)

    def _wanted(self, *, present: bool) -> Effect | None:
        return wanted_effect(self._inventory(), self._effect, present=present)

    async def _write(self, *, usable: bool) -> bool:
        for attempt in range(TRIES):
            node = msgspec.json.decode(await self._client.get(self._path), type=_Tainted)
            before = (node.spec and node.spec.taints) or []
            wanted = self._wanted(present=any(one.get("key") == self._key for one in before))
            taints = with_taint(before, self._key, wanted)
            if usable:
                taints = with_taint(taints, self._names.startup_taint, None)
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
            log.info("the taints of the node are written", taint=self._key, effect=wanted or "none", usable=usable)
            return True
        return False
