"""A webhook that ends while the API server has its connections open: no request is lost."""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from tests.unit.webhook.test_webhook_serving import NAME, REVIEW, running, trusting, write
from webhook.app import Webhook
from webhook.certs import renewed

CLIENTS = 24
BODY = msgspec.json.encode(REVIEW)
REQUEST = (
    f"POST /mutate HTTP/1.1\r\nhost: {NAME}\r\ncontent-type: application/json\r\ncontent-length: {len(BODY)}\r\n\r\n"
).encode() + BODY


class ReadyService:
    """Stands for the Kubernetes Service: a connection goes to the webhook that is ready."""

    def __init__(self, *webhooks: Webhook) -> None:
        self.webhooks = webhooks
        self.answered: Counter[tuple[int, str]] = Counter()
        """(which webhook, its `connection` header) -> answers with status 200."""
        self.lost: list[str] = []
        self.used = [asyncio.Event() for _ in webhooks]
        """Set once a webhook gave ten answers for each client."""

    def ready(self) -> int:
        """Which webhook takes new connections."""
        return next(number for number, webhook in enumerate(self.webhooks) if not webhook.not_ready())

    async def hammer(self, trust: ssl.SSLContext, done: asyncio.Event) -> None:
        """One request after the other, on the same connection until the webhook closes it."""
        while not done.is_set():
            number = self.ready()
            async with connection(self.webhooks[number].port, trust) as (reader, writer):
                header = "keep"
                while header == "keep" and not done.is_set():
                    try:
                        writer.write(REQUEST)
                        header = await answer(reader)
                    except (OSError, asyncio.IncompleteReadError) as error:
                        self.lost.append(f"webhook {number}: {error!r}")
                        break
                    self.answered[number, header] += 1
                    if self.answered[number, header] == 10 * CLIENTS:
                        self.used[number].set()


async def answer(reader: asyncio.StreamReader) -> str:
    """Read one answer, which must be 200; `close` when it is the last one on its connection, else `keep`."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    status, *lines = head.strip().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    await reader.readexactly(int(headers["content-length"]))
    assert status.startswith("http/1.1 200")
    return headers.get("connection", "keep")


@asynccontextmanager
async def connection(
    port: int, trust: ssl.SSLContext
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust, server_hostname=NAME)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def test_no_request_over_a_kept_connection_is_lost_while_the_webhook_ends(tmp_path: Path) -> None:
    files = renewed({}, (NAME,), datetime.now(UTC))
    write(tmp_path, files)
    done = asyncio.Event()
    async with running(tmp_path) as heir:
        async with running(tmp_path, drain_s=0.5) as leaver:
            await asyncio.wait_for(asyncio.gather(leaver.accepting.wait(), heir.accepting.wait()), 10)
            service = ReadyService(leaver, heir)
            clients = [asyncio.create_task(service.hammer(trusting(files), done)) for _ in range(CLIENTS)]
            await asyncio.wait_for(service.used[0].wait(), 10)
        # the leaver got SIGTERM here, and has ended
        await asyncio.wait_for(service.used[1].wait(), 10)
        done.set()
        await asyncio.wait_for(asyncio.gather(*clients), 10)
    assert service.lost == []
    assert service.answered[0, "close"] == CLIENTS
