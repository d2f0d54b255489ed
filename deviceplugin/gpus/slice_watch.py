"""Watch the node's ResourceSlices: which GPUs NVIDIA's DRA driver offers there.

A cluster may not serve the API: then nobody offers GPUs by it. A watch that is silent for long is no answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec
import structlog

from kube import paths
from kube.cache import Cache
from kube.client import SILENCE_LIMIT_S, Client
from kube.errors import ApiError
from kube.resource_slices import ResourceSlice, served_version
from vgpu.api.back_off import BackOff
from vgpu.health.foreign import DRA_DRIVER, ForeignDevice

AGAIN_S: Final = 60.0
"""Between checks which version of the API is served. Guessed: it changes when the API server is upgraded."""
BACKOFF_S: Final = (0.5, 30.0)

log = structlog.get_logger("deviceplugin.gpus.slice_watch")


class SlicesUnknown(Exception):
    """Why it is not known what the node's ResourceSlices name."""


class SliceWatch:
    """Of one node."""

    def __init__(
        self, client: Client, node: str, *, clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:  # fmt: skip
        self._client, self._node, self._clock, self._sleep = client, node, clock, sleep
        self._why = "the API server was not asked yet"
        """Why it is not known which version is served; empty when it is."""
        self._version: str | None = None
        """That is watched; None = the API is not served."""
        self._cache: Cache[ResourceSlice] | None = None
        self._decided = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled."""
        back_off = BackOff(*BACKOFF_S)
        watching: asyncio.Task[None] | None = None
        try:
            while True:
                before, wait_s = (self._version, self._why), AGAIN_S
                try:
                    self._version, self._why = await self._served(), ""
                    back_off.succeeded()
                except ApiError as error:
                    wait_s = back_off.failed(error.retry_after_s)
                    if self._cache is None:
                        self._why = str(error)
                if (self._version, self._why) != before:
                    await _end(watching)
                    watching = self._watch(self._version) if not self._why else None
                self._decided.set()
                await self._sleep(wait_s)
        finally:
            await _end(watching)

    async def first(self) -> None:
        """Return when the first answer is there."""
        await self._decided.wait()
        if self._cache is not None:
            await self._cache.has_synced.wait()

    def devices(self) -> tuple[ForeignDevice, ...]:
        """What the slices name now. Raises SlicesUnknown."""
        if self._why:
            raise SlicesUnknown(self._why)
        if self._cache is None:
            return ()
        if not self._cache.has_synced.is_set() or self.silent_s() > SILENCE_LIMIT_S:
            raise SlicesUnknown("the API server does not answer a list or watch of resourceslices")
        if self._cache.unknown:
            raise SlicesUnknown(f"{len(self._cache.unknown)} of them cannot be read")
        return tuple(device for one in self._cache.items() for device in _devices(one, self._node))

    def silent_s(self) -> float:
        """For how long the watch has heard nothing. The API server sends a bookmark about every minute. 0 where nothing is watched."""
        return self._clock() - self._cache.heard_s if self._cache is not None else 0.0

    async def _served(self) -> str | None:
        """Raises ApiError."""
        try:
            version = served_version(await self._client.get(paths.RESOURCE_API))
        except ApiError as error:
            if error.not_found:
                return None
            raise
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ApiError(0, "Undecodable", str(error), verb="GET", path=paths.RESOURCE_API) from None
        if version is None:
            log.info("no version of resource.k8s.io that is known here is served: no DRA driver offers GPUs")
        return version

    def _watch(self, version: str | None) -> asyncio.Task[None] | None:
        if version is None:
            self._cache = None
            return None
        self._cache = Cache(
            self._client, paths.resource_slices(version), ResourceSlice,
            field_selector=f"spec.nodeName={self._node},spec.driver={DRA_DRIVER}", clock=self._clock,
        )  # fmt: skip
        return asyncio.create_task(self._cache.run())


async def _end(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.wait([task])


def _devices(one: ResourceSlice, node: str) -> list[ForeignDevice]:
    """A device that names no UUID has its own name for an ID: which GPU it is, is not known."""
    if one.spec.driver != DRA_DRIVER or one.spec.node_name != node:
        return []
    named = ((device.name, list(device.uuids(DRA_DRIVER))) for device in one.spec.devices)
    return [ForeignDevice(DRA_DRIVER, one_id) for name, uuids in named for one_id in (uuids or [name])]
