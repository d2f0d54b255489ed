"""Put the parts together and run them until SIGTERM."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

import msgspec
import structlog

from deviceplugin.access import arbiters_reviews, reviewer
from deviceplugin.grants.atomic_file import make_folder
from deviceplugin.parts import Parts
from deviceplugin.pod_resources import KubeletUnreachable
from deviceplugin.settings import DevicePluginSettings
from deviceplugin.upkeep import restore
from kube.client import Client, connect
from kube.errors import ApiError
from observe import collecting
from observe.operations import Operations
from observe.pages import Pages
from observe.signals import on_stop_signal
from vgpu.api.readiness import Missing

SYNC_WAIT_S: Final = 10.0
"""How long the first list of pods may take before we register all the same: running containers have to be able to restart."""
INSTALL_RETRY_S: Final = 5.0
GRANTS_S: Final = 2.0
"""Between checks whether each grant is there. A check costs some microseconds a directory."""

EARLIER_S: Final = 5.0
"""How long the start waits for the node's annotations. Guessed: GPUs are offered all the same when the API server is away."""
log = structlog.get_logger("deviceplugin")


async def run(settings: DevicePluginSettings) -> None:
    """Until SIGTERM or SIGINT. Raises NoClusterError, OSError when the metrics port is taken."""
    stop = asyncio.Event()
    on_stop_signal(stop.set)
    async with connect(settings.kubeconfig) as client:
        plugin = DevicePlugin(settings, client)
        work = asyncio.create_task(plugin.run())
        ended = asyncio.create_task(stop.wait())
        await asyncio.wait({work, ended}, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if not work.done():
            log.info("stopping")
            await asyncio.to_thread(plugin.nvml_service.close)  # first: a thread may wait for an answer of NVML
            work.cancel()
        with suppress(asyncio.CancelledError):
            await work


class DevicePlugin(Parts):
    """One node's plugin."""

    def __init__(self, settings: DevicePluginSettings, client: Client) -> None:
        super().__init__(settings, client)
        self._installing = Missing.LIBRARY.because("not yet tried")

    async def run(self) -> None:
        """Until cancelled."""
        pages = Pages(self.metrics.registry, self.not_ready)
        review = reviewer(self._client) if self.settings.metrics_access == "review" else None
        operations = Operations(
            pages, self.settings.metrics_host, self.settings.metrics_port, review=review, refused=self.metrics.listeners.of("metrics"),
        )  # fmt: skip
        make_folder(self.settings.plugin_folder)
        self.nvml_service.start()
        try:
            async with asyncio.TaskGroup() as group:
                for part in (
                    operations.run,
                    self.cache.run,
                    self.recorder.run,
                    self.publisher.run,
                    self.nvml_service.run,
                    self.slices.run,
                    self._follow_gpus,
                    self.owner_watch.run,
                    self.health_watch.run,
                    self.cordons.run,
                    self.upkeep.run,
                    self.status_watch.run,
                    self.class_updater.run,
                    self.bursts.run,
                    self.container_ids.run,
                    self.mount_check.run,
                    self.cdi_check.run,
                    self._to_kubelet,
                    self.numa.run,
                    self._keep_grants,
                    self._keep_tidy,
                    *([self.shared_gpus.run, self.host_pool.run] if self.settings.host_pool else []),
                    *([self.declared.run] if self.declared else []),
                    *([self.conditions.run] if self.settings.pod_conditions else []),
                    *([arbiters_reviews(self.settings, review)] if review else []),
                ):
                    group.create_task(part())
        finally:
            await asyncio.to_thread(self.nvml_service.close)
            await self.reports.close()
            await self.records.close()

    def not_ready(self) -> str:
        """Why this node cannot serve pods; empty when it can."""
        if self._installing:
            return self._installing
        if self.gpus.failing:
            return Missing.NVML.because(self.gpus.failing)
        if self.nvml_service.failing:
            return Missing.NVML_SOCKET.because(self.nvml_service.failing)
        if not self.offer.probed:
            return Missing.PROBE.because()
        if not self.cache.has_synced.is_set():
            return Missing.PODS.because()
        if self.cdi_check.failing:
            return Missing.CDI.because(self.cdi_check.failing)
        if self.owner_watch.unknown:
            return Missing.OWNERS.because(self.owner_watch.unknown)
        if self.publisher.failing:
            return Missing.INVENTORY.because(self.publisher.failing)
        return "" if self.registration.known else Missing.KUBELET.because()

    async def _follow_gpus(self) -> None:
        """What the plugin before this one published is read first, if the API server answers in time; else the publisher has it before it writes over it."""
        try:
            async with asyncio.timeout(EARLIER_S):
                self._node_seen(await self._fetch_node())
        except (ApiError, msgspec.MsgspecError, TimeoutError) as error:
            why = str(error) or "no answer in time"
            log.warning("what was published of this node before is not known yet", error=why)
        await self.gpus.run()

    async def _to_kubelet(self) -> None:
        await self._install()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.grants.sockets.run())
            group.create_task(self._serve_kubelet())

    async def _serve_kubelet(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(SYNC_WAIT_S):
                await self.cache.has_synced.wait()
        self.publisher.check()  # the sums of limits are known now
        try:
            await restore(self.records, self.pods, self.ledger, self.grants, self.usage_records, self._names)
        except KubeletUnreachable as error:
            log.warning("what was allocated before this start is known from our own records only", error=str(error))
        self.offer.refresh()  # before the kubelet sees a device: what is in use is known now
        collecting.set_aside()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.orphans.run())
            group.create_task(self.mig.run())
            group.create_task(self.registration.run())

    async def _install(self) -> None:
        while True:
            try:
                path = self.grants.install()
                self.usage_records.load()
            except OSError as error:
                self._installing = Missing.LIBRARY.because(error)
                log.error("no share can be given without the library", error=self._installing, retry_s=INSTALL_RETRY_S)
                await asyncio.sleep(INSTALL_RETRY_S)
                continue
            self._installing = ""
            log.info("library installed", path=str(path))
            return

    async def _keep_tidy(self) -> None:
        await collecting.keep_tidy(self.calls.until_idle)

    async def _keep_grants(self) -> None:
        while True:
            await asyncio.sleep(GRANTS_S)
            await self.calls.until_idle()
            try:
                if back := await asyncio.to_thread(self.grants.put_back):
                    log.warning("what a container was granted was missing and is put back", paths=back)
                self.bursts.once()  # a file of it may be missing too, or a GPU have changed
            except OSError as error:
                log.error("what a container was granted cannot be put back", error=str(error), retry_s=GRANTS_S)
