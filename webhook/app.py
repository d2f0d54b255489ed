"""Run the two servers and the keeper until SIGTERM.

The port for admission opens once there is a certificate. On SIGTERM the pod reports that it is not ready, goes on answering for
`drain_s` while the Service removes it, each answer the last on its connection, and only then closes: with failurePolicy Fail a
refused connection is a refused pod. What the API server sends within the moment of closing, over a connection that it did not use
for all of `drain_s`, is lost even so.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

from kube.client import connect
from observe import collecting
from observe.bounds import ADMISSION
from observe.operations import Operations
from observe.pages import Pages
from observe.ports import listen
from observe.serving import Server
from observe.signals import on_stop_signal
from vgpu.api.readiness import Missing
from webhook.certificate_keeper import CertificateKeeper, FileKeeper, SecretKeeper, keep
from webhook.metrics import Metrics
from webhook.server import admission_app
from webhook.settings import Settings
from webhook.tls import ServingContext


class Webhook:
    """One running webhook. Ports are those in use, also where the settings are 0."""

    def __init__(self, settings: Settings) -> None:
        self.metrics = Metrics()
        self.serving = ServingContext(self.metrics)
        self.stopping = asyncio.Event()
        self._settings = settings
        self._operations = Operations(
            Pages(self.metrics.registry, self.not_ready),
            settings.host,
            settings.metrics_port,
            refused=self.metrics.refused.of("metrics"),
        )
        self.metrics_port = self._operations.port
        self._socket = listen(settings.host, settings.port)
        self.port: int = self._socket.getsockname()[1]
        self.accepting = asyncio.Event()

    def not_ready(self) -> str | None:
        """What is missing before pods may be sent here."""
        if self.stopping.is_set():
            return Missing.STOPPING.because()
        if self.serving.expires is None:
            return Missing.NO_CERTIFICATE.because()
        if self.serving.expires <= utc_now():
            return Missing.CERTIFICATE_EXPIRED.because(self.serving.expires)
        return None if self.accepting.is_set() else Missing.PORT.because()

    async def run(self) -> None:
        """Until `stopping` is set. If one part dies all do, and Kubernetes starts the pod again."""
        admission = Server(
            admission_app(self._settings.rules(), self.metrics),
            ADMISSION,
            self.metrics.refused.of("admission"),
            ssl_context_factory=lambda _config, _default: self.serving.context,
        )
        async with _keeper(self._settings, self.serving) as keeper, asyncio.TaskGroup() as tasks:
            operating = tasks.create_task(self._operations.run())
            keeping = tasks.create_task(keep(keeper, self.metrics, self._settings.cert_check_s))
            tidying = tasks.create_task(collecting.keep_tidy())
            stop = tasks.create_task(self.stopping.wait())
            certificate = tasks.create_task(self.serving.loaded.wait())
            await asyncio.wait([stop, certificate], return_when=asyncio.FIRST_COMPLETED)
            if certificate.done():
                tasks.create_task(admission.serve([self._socket]))
                opened = tasks.create_task(admission.up.wait())
                await asyncio.wait([stop, opened], return_when=asyncio.FIRST_COMPLETED)
                opened.cancel()
                collecting.set_aside()
                self.accepting.set()
            await stop
            certificate.cancel()
            admission.drain()
            await asyncio.sleep(self._settings.drain_s)
            for task in (keeping, tidying, operating):
                task.cancel()
            admission.should_exit = True
        self._socket.close()  # it may never have opened


def utc_now() -> datetime:
    """The wall clock, which certificates are judged by."""
    return datetime.now(UTC)


async def run(settings: Settings) -> None:
    """Until SIGTERM or SIGINT."""
    webhook = Webhook(settings)
    on_stop_signal(webhook.stopping.set)
    await webhook.run()


@asynccontextmanager
async def _keeper(settings: Settings, serving: ServingContext) -> AsyncIterator[CertificateKeeper]:
    if settings.cert_mode == "files":
        yield FileKeeper(settings.cert_folder, serving)
        return
    async with connect(settings.kubeconfig or None) as client:
        yield SecretKeeper(client, settings.locations(), serving, utc_now)
