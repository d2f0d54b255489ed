"""`tangram-hostpool`: read the settings, set up the log, run the copiers until SIGTERM."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from hostpool.folders import memory_bytes
from hostpool.metrics import Metrics
from hostpool.pool import BOOT_ID, HostPool
from hostpool.settings import HostPoolSettings
from observe.access_socket import reviewed_by
from observe.operations import Operations
from observe.pages import Pages
from observe.program import run_program
from observe.signals import on_stop_signal
from vgpu.api.readiness import Missing

log = structlog.get_logger("hostpool")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run until SIGTERM or SIGINT."""
    run_program(HostPoolSettings, run, arguments)


async def run(settings: HostPoolSettings) -> None:
    """Until SIGTERM or SIGINT. Raises OSError when the port is taken or the status cannot be written."""
    stop = asyncio.Event()
    on_stop_signal(stop.set)
    pool = HostPool(settings, BOOT_ID.read_text().strip(), memory_bytes())
    metrics = Metrics(lambda: list(pool.copiers.values()), pool.share_of)

    def not_ready() -> str:
        why = pool.not_ready()
        return Missing.POOL.because(why) if why else ""

    operations = Operations(
        Pages(metrics.registry, not_ready), settings.metrics_host, settings.metrics_port,
        review=reviewed_by(settings.metrics_access_socket) if settings.metrics_access_socket else None,
        refused=metrics.refused.of("metrics"),
    )  # fmt: skip
    log.info("serving", pool=settings.pool, folders=list(map(str, settings.pool_dirs)), metrics_port=operations.port)
    work = [asyncio.create_task(operations.run()), asyncio.create_task(pool.run())]
    ended = asyncio.create_task(stop.wait())
    try:
        done, _ = await asyncio.wait({*work, ended}, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {ended}:
            task.result()  # what it raised ends the program
    finally:
        for task in (*work, ended):
            task.cancel()
        await asyncio.gather(*work, ended, return_exceptions=True)
    log.info("stopped")


if __name__ == "__main__":
    main()
