"""NVML on this node: the child, and the server through which the arbiter queries it.

If the server cannot start, the plugin goes on, reports it and tries again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from deviceplugin.grants.atomic_file import make_folder
from deviceplugin.metrics import Metrics
from deviceplugin.settings import DevicePluginSettings
from nvml.messages import HealthReply
from nvml.replacing import EndReason
from nvml.server import NvmlServer
from nvml.supervisor import NvmlSupervisor, TimeLimits

RETRY_S: Final = 5.0
COUNT_S: Final = 1.0
"""Between updates of the metrics."""

log = structlog.get_logger("deviceplugin.nvml")


class NvmlService:
    """The supervisor runs from `start` to `close`."""

    def __init__(self, settings: DevicePluginSettings, metrics: Metrics) -> None:
        self.supervisor = NvmlSupervisor(
            settings.driver_root,
            TimeLimits(settings.nvml_start_s, settings.nvml_call_s),
            released=settings.nvml_released,
            withheld=settings.nvml_withheld,
            report=_report,
        )
        self.failing = "NVML's socket is not open yet"
        """Why the arbiter cannot query NVML; empty when it can."""
        self.health: Callable[[str], HealthReply] | None = None
        """What the plugin read last of a GPU, for the arbiter."""
        self._settings, self._metrics = settings, metrics
        self._counted: dict[EndReason, int] = {}

    def start(self) -> None:
        """Raises RuntimeError when there is no thread to be had."""
        self.supervisor.start()

    def close(self) -> None:
        """End the child, and answer every caller that waits. Again: no-op."""
        self.supervisor.close()

    async def run(self) -> None:
        """Serve until cancelled."""
        server = await self._opened()
        try:
            while True:
                self._count()
                await asyncio.sleep(COUNT_S)
        finally:
            await asyncio.to_thread(server.close)

    async def _opened(self) -> NvmlServer:
        while True:
            try:
                make_folder(self._settings.plugin_folder)
                server = NvmlServer(
                    self._settings.nvml_socket,
                    self.supervisor,
                    report=lambda text: log.warning("NVML's socket", what=text),
                    health=self.health,
                )
            except OSError as error:
                self.failing = f"NVML's socket is not open: {error}"
                log.error("the arbiter cannot query NVML", error=self.failing, retry_s=RETRY_S)
                await asyncio.sleep(RETRY_S)
                continue
            self.failing = ""
            return server

    def _count(self) -> None:
        for end, count in self.supervisor.ends.copy().items():
            self._metrics.nvml_ends.labels(end).inc(count - self._counted.get(end, 0))
            self._counted[end] = count
        self._metrics.nvml_abandoned.set(self.supervisor.abandoned)


def _report(end: EndReason | None, text: str) -> None:
    if end is None:
        log.info("NVML is open", how=text)
    else:
        log.warning("an NVML process was ended", reason=end, why=text)
