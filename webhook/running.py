"""Run the two servers and the keeper until told to stop.

The port for admission opens once there is a certificate. On SIGTERM the pod says that it is not ready, goes on answering for
`drain_s` while the Service forgets it, and only then closes: with failurePolicy Fail a refused connection is a refused pod.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, Final

import uvicorn
from fastapi import FastAPI

from kube.client import connect
from webhook.keeper import FileKeeper, Keeper, SecretKeeper, keep
from webhook.metrics import Metrics
from webhook.server import admission_app, operations_app
from webhook.settings import Settings
from webhook.tls import Serving

KEEP_ALIVE_S: Final = 120
"""Longer than the 90 s after which the API server drops an idle connection (client-go), so that the end never comes from us."""


class _Server(uvicorn.Server):
    """Signals are ours, for two servers share them; `up` is set once the port is open."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Webhook:
    """One running webhook. Ports are those in use, also where the settings say 0."""

    def __init__(self, settings: Settings) -> None:
        self.metrics = Metrics()
        self.serving = Serving(self.metrics)
        self.stopping = asyncio.Event()
        self._settings = settings
        self._sockets = [_listen(settings.host, port) for port in (settings.operations_port, settings.port)]
        self.accepting = asyncio.Event()
        self.operations_port, self.port = (sock.getsockname()[1] for sock in self._sockets)

    def not_ready(self) -> str | None:
        """What is missing before pods may be sent here."""
        if self.stopping.is_set():
            return "stopping"
        if self.serving.expires is None:
            return "no serving certificate yet"
        if self.serving.expires <= utc_now():
            return f"the serving certificate expired at {self.serving.expires}"
        return None if self.accepting.is_set() else "the port is not open yet"

    async def run(self) -> None:
        """Until `stopping` is set. If one part dies all do, and Kubernetes starts the pod again."""
        operations = _Server(uvicorn.Config(operations_app(self.metrics, self.not_ready), **_COMMON))
        admission = _Server(self._admission_config(admission_app(self._settings.rules(), self.metrics)))
        async with _keeper(self._settings, self.serving) as keeper, asyncio.TaskGroup() as tasks:
            tasks.create_task(operations.serve([self._sockets[0]]))
            keeping = tasks.create_task(keep(keeper, self.metrics, self._settings.cert_check_s))
            stop = tasks.create_task(self.stopping.wait())
            certificate = tasks.create_task(self.serving.loaded.wait())
            await asyncio.wait([stop, certificate], return_when=asyncio.FIRST_COMPLETED)
            if certificate.done():
                tasks.create_task(admission.serve([self._sockets[1]]))
                opened = tasks.create_task(admission.up.wait())
                await asyncio.wait([stop, opened], return_when=asyncio.FIRST_COMPLETED)
                opened.cancel()
                self.accepting.set()
            await stop
            certificate.cancel()
            await asyncio.sleep(self._settings.drain_s)
            keeping.cancel()
            operations.should_exit = admission.should_exit = True

    def _admission_config(self, app: FastAPI) -> uvicorn.Config:
        return uvicorn.Config(app, ssl_context_factory=lambda _config, _default: self.serving.context, **_COMMON)


_COMMON: Final[dict[str, Any]] = {
    "log_config": None, "access_log": False, "lifespan": "off", "server_header": False, "date_header": False,
    "timeout_keep_alive": KEEP_ALIVE_S, "timeout_graceful_shutdown": 10, "http": "httptools", "ws": "none",
}  # fmt: skip


def utc_now() -> datetime:
    """The wall clock, which certificates are judged by."""
    return datetime.now(UTC)


async def run(settings: Settings) -> None:
    """Until SIGTERM or SIGINT."""
    webhook = Webhook(settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, webhook.stopping.set)
    await webhook.run()


@asynccontextmanager
async def _keeper(settings: Settings, serving: Serving) -> AsyncIterator[Keeper]:
    if settings.cert_mode == "files":
        yield FileKeeper(settings.cert_folder, serving)
        return
    async with connect(settings.kubeconfig or None) as client:
        yield SecretKeeper(client, settings.places(), serving, utc_now)


def _listen(host: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, port))
    return sock
