"""The plugin's part in the host pool: it names the GPUs that need a copier, and reports why a node has no pool.

A node without a pool keeps its plugin and everything else: its containers run at their guarantees.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final

import structlog
from prometheus_client import Gauge

from deviceplugin.gpus.offer import Offer
from deviceplugin.grants.atomic_file import write_atomically
from deviceplugin.pods.node_pods import NodePods
from kube.errors import ApiError
from kube.objects import Node
from vgpu.api.errors import BadDocument, BadRequest
from vgpu.api.host_pool import (
    NO_STATUS,
    REPORT_AFTER_S,
    SILENT,
    PoolStatus,
    SharedGpus,
    from_text,
    missing_on_node,
    to_text,
)
from vgpu.api.quantity import parse

NO_HOST_POOL: Final = "NoHostPool"
"""Of an Event on the node."""
WRITE_S: Final = 1.0
"""Between checks of what the file says: an operator who releases NVML waits so long for the copiers. Guessed."""
WATCH_S: Final = 5.0
REPORT_AGAIN_S: Final = 3600.0
"""Between two Events while the pool stays missing: the API server keeps Events for an hour by default."""

log = structlog.get_logger("deviceplugin.gpus.host_pool")


class SharedGpusFile:
    """Keeps the file that the host pool's program reads. `released`: the file by which an operator releases NVML."""

    def __init__(self, path: Path, released: Path, offer: Offer, pods: NodePods, boot_id: str) -> None:
        self._path, self._released, self._offer, self._pods, self._boot_id = path, released, offer, pods, boot_id
        self._written: SharedGpus | None = None

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                self.once()
            except OSError as error:
                log.error(
                    "the list of shared GPUs for the host pool cannot be written", error=str(error), retry_s=WRITE_S
                )
            await asyncio.sleep(WRITE_S)

    def once(self) -> None:
        """Write what changed. Before NVML answered and the pods are known, an earlier file of this boot stays. Raises OSError."""
        if not self._offer.probed or not self._pods.synced:
            return
        held = [part for pod in self._pods.node_pods() for part in pod.assignment.held()]
        held += [part for orphan in self._offer.inventory().orphans for part in orphan.held]
        used = {part.uuid for part in held}
        there = [gpu for gpu in self._offer.inventory().gpus if not gpu.mig and not gpu.whole_only]
        gpus = [gpu.uuid for gpu in there if gpu.uuid in used or not gpu.withdrawn]  # no copier on a GPU of others
        whole = {part.uuid for part in held if part.kind == "whole"}
        shared = SharedGpus(
            boot_id=self._boot_id,
            gpus=tuple(sorted(gpus)),
            whole=tuple(sorted(whole.intersection(gpus))),
            released=self._released.exists(),
        )
        if shared != self._written or not self._path.exists():
            write_atomically(self._path, to_text(shared), 0o644)
            self._written = shared


class HostPoolWatch:
    """Reads the status of the host pool, and reports it as a metric and, after a while, as an Event.

    `request`: what the pool's pod requests of the node, by resource. `report` is called with a sentence, once the pool was missing
    for `report_after_s`.
    """

    def __init__(
        self,
        status: Path,
        boot_id: str,
        request: Mapping[str, str],
        fetch_node: Callable[[], Awaitable[Node]],
        report: Callable[[str], None],
        ready: Gauge,
        report_after_s: float = REPORT_AFTER_S,
        *,
        clock: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
    ) -> None:
        self._status, self._boot_id, self._request = status, boot_id, request
        self._fetch_node, self._report, self._ready, self._clock = fetch_node, report, ready, clock
        self._report_after_s = report_after_s
        self.changed: Callable[[], None] = lambda: None
        """Called when the pool is ready, or no more."""
        self.missing = NO_STATUS
        """Why there is none, as of the last look; empty = it is ready."""
        self._missing_since_s: float | None = None
        self._reported_s: float | None = None

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.once()
            await asyncio.sleep(WATCH_S)

    async def once(self) -> str:
        """Look at the status. Returns why the pool is missing; empty when it is there."""
        now_s = self._clock()
        why = missing_on_node(self._read(), boot_id=self._boot_id, now_s=now_s)
        before, self.missing = self.missing, why
        if bool(before) != bool(why):
            self.changed()
        self._ready.set(not why)
        if not why:
            self._missing_since_s = self._reported_s = None
            return ""
        if self._missing_since_s is None:
            self._missing_since_s = now_s
        due = self._reported_s is None or now_s - self._reported_s >= REPORT_AGAIN_S
        if due and now_s - self._missing_since_s >= self._report_after_s:
            self._reported_s = now_s
            if why in (NO_STATUS, SILENT):
                why = await self._too_large() or f"{why}; if it is Pending, `kubectl describe` of it names the reason"
            log.warning("this node has no host pool", why=why)
            self._report(f"containers of this node do not burst, since it has no host pool: {why}")
        return why

    def _read(self) -> PoolStatus | None:
        try:
            return from_text(PoolStatus, self._status.read_bytes())
        except (OSError, BadDocument):
            return None

    async def _too_large(self) -> str:
        """Why the node can never run the pool's pod; empty when it can, or that is not known."""
        try:
            allocatable = (await self._fetch_node()).status.allocatable or {}
            for resource, text in self._request.items():
                if parse(text) > parse(allocatable.get(resource, "0")):
                    return (
                        f"its pod requests {resource} {text}, and the node has {allocatable.get(resource, 'none')} allocatable: "
                        "burst.hostPool is too large for this node"
                    )
        except (ApiError, BadRequest) as error:
            log.warning("what the node has for the host pool is not known", error=str(error))
        return ""
