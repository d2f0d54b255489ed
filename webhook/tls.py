"""The TLS context that is served with, changed under running connections.

A certificate loaded again into the same context serves the next handshake; connections that stand keep theirs. The key goes
from memory to OpenSSL through an anonymous file (memfd_create(2)), so that it never lies on a disk.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from datetime import datetime

from vgpu.api.errors import BadDocument
from webhook.certs import not_after
from webhook.metrics import Metrics


class ServingContext:
    """The TLS context and its certificate, as the server presents them."""

    def __init__(self, metrics: Metrics) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.num_tickets = (
            0  # the API server's client resumes no session, and two tickets are a sixth of a handshake
        )
        self.expires: datetime | None = None
        self.loaded = asyncio.Event()
        self._in_use: tuple[bytes, bytes] | None = None
        self._metrics = metrics

    def load(self, cert: bytes, key: bytes) -> bool:
        """Serve with this certificate from now on; False when it is the one in use.

        Raises BadDocument when certificate and key cannot be used; the one in use then stays.
        """
        if (cert, key) == self._in_use:
            return False
        try:
            expires = not_after(cert)
            _load_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), cert, key)
            _load_pair(self.context, cert, key)
        except (ssl.SSLError, ValueError) as error:
            raise BadDocument(f"the serving certificate cannot be used: {error}") from None
        self._in_use, self.expires = (cert, key), expires
        self._metrics.loads.inc()
        self._metrics.not_after.set(expires.timestamp())
        self.loaded.set()
        return True


def _load_pair(context: ssl.SSLContext, cert: bytes, key: bytes) -> None:
    handle = os.memfd_create("tangram-webhook-certificate", os.MFD_CLOEXEC)
    with os.fdopen(handle, "wb") as file:
        file.write(key + b"\n" + cert)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{handle}", password="")
