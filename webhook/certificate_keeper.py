"""Keep the serving certificate fresh, without a restart.

Two keepers, one shape: `once` brings everything up to date or raises, `keep` does that for ever. `SecretKeeper` owns CA and
certificate in a Secret and writes the caBundle that the API server trusts; `FileKeeper` serves what cert-manager writes into a mounted
Secret. What should be kept is decided in `certs`; here are only reads, writes and their order:

    Secret  ->  caBundle  ->  served

so that the API server trusts a certificate before it receives it. Replicas race on the Secret's resourceVersion; a replica that loses
reads again.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import structlog

from kube import paths
from kube.client import JSON_PATCH
from kube.errors import ApiError
from vgpu.api.errors import BadDocument, TangramError
from webhook.certs import CA_CERT, CERT, KEY, renewed
from webhook.metrics import Metrics
from webhook.tls import ServingContext

ATTEMPTS: Final = 5
"""Writes lost to another replica before a round ends. Two replicas need two."""

log = structlog.get_logger()


class KubernetesApi(Protocol):
    """The part of kube.client.Client that is used."""

    async def get(self, path: str) -> bytes:
        """The object at `path`."""
        ...

    async def send(self, method: str, path: str, body: object = None, *, content_type: str = ...) -> bytes:
        """Write an object."""
        ...


class CertificateKeeper(Protocol):
    """Brings the certificate up to date."""

    async def once(self) -> None:
        """One round. Raises TangramError."""
        ...


@dataclass(frozen=True, slots=True)
class CertificateLocations:
    """Where things are."""

    namespace: str
    secret: str
    configuration: str
    """Name of the MutatingWebhookConfiguration."""
    dns_names: tuple[str, ...]

    @property
    def secrets_path(self) -> str:
        """Collection of Secrets."""
        return paths.secret(self.namespace)

    @property
    def secret_path(self) -> str:
        """Our Secret."""
        return paths.secret(self.namespace, self.secret)

    @property
    def configuration_path(self) -> str:
        """Our MutatingWebhookConfiguration."""
        return paths.webhook_configuration(self.configuration)


class SecretKeeper:
    """A CA of our own, in a Secret that all replicas share."""

    def __init__(
        self,
        api: KubernetesApi,
        locations: CertificateLocations,
        serving: ServingContext,
        clock: Callable[[], datetime],
    ) -> None:
        self._api, self._locations, self._serving, self._clock = api, locations, serving, clock
        self._last: dict[str, bytes] = {}
        """The content of the Secret when it was last settled: if it is deleted or emptied, it is made again with that, and no
        replica serves a certificate that the API server no longer trusts."""

    async def once(self) -> None:
        """Secret, caBundle, context, in this order."""
        files = await self._settle()
        await self._announce(files[CA_CERT])
        if self._serving.load(files[CERT], files[KEY]):
            log.info("serving certificate taken into use", expires=str(self._serving.expires))

    async def _settle(self) -> dict[str, bytes]:
        """The Secret's files, brought up to date by us or by another replica."""
        for _ in range(ATTEMPTS):
            secret = await self._read()
            kept = _files(secret)
            files = renewed(kept or self._last, self._locations.dns_names, self._clock())
            if files == kept:
                self._last = files
                return files
            try:
                await self._write(secret, files)
            except ApiError as error:
                if not (error.conflict or error.not_found):
                    raise
                continue
            log.info("certificates written", secret=self._locations.secret, files=sorted(files), made=secret is None)
            self._last = files
            return files
        raise BadDocument(
            f"secret {self._locations.namespace}/{self._locations.secret} was changed by others {ATTEMPTS} times in a row"
        )

    async def _read(self) -> dict[str, Any] | None:
        try:
            return _object(await self._api.get(self._locations.secret_path))
        except ApiError as error:
            if error.not_found:
                return None
            raise

    async def _write(self, secret: dict[str, Any] | None, files: dict[str, bytes]) -> None:
        data = {name: base64.b64encode(content).decode() for name, content in files.items()}
        if secret is not None:
            await self._api.send("PUT", self._locations.secret_path, secret | {"data": data})
            return
        metadata = {"name": self._locations.secret, "namespace": self._locations.namespace}
        fresh = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "data": data}
        await self._api.send("POST", self._locations.secrets_path, fresh)

    async def _announce(self, ca_bundle: bytes) -> None:
        """Have the API server trust our CAs; also restores what an upgrade of the chart removed."""
        text = base64.b64encode(ca_bundle).decode()
        found = _object(await self._api.get(self._locations.configuration_path))
        patch = []
        for index, webhook in enumerate(found.get("webhooks") or []):
            if webhook["clientConfig"].get("caBundle") != text:
                patch.append({"op": "test", "path": f"/webhooks/{index}/name", "value": webhook["name"]})
                patch.append({"op": "add", "path": f"/webhooks/{index}/clientConfig/caBundle", "value": text})
        if patch:
            await self._api.send("PATCH", self._locations.configuration_path, patch, content_type=JSON_PATCH)
            log.info("caBundle written", configuration=self._locations.configuration)


class FileKeeper:
    """Certificate and key from a folder that cert-manager keeps fresh."""

    def __init__(self, folder: Path, serving: ServingContext) -> None:
        self._folder, self._serving = folder, serving

    async def once(self) -> None:
        """Read both files, and serve them when they changed."""
        try:
            cert, key = (self._folder / CERT).read_bytes(), (self._folder / KEY).read_bytes()
        except OSError as error:
            raise BadDocument(f"folder {self._folder} must contain {CERT} and {KEY}: {error}") from None
        if self._serving.load(cert, key):
            log.info("serving certificate taken into use", expires=str(self._serving.expires))


async def keep(
    keeper: CertificateKeeper,
    metrics: Metrics,
    every_s: float,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Rounds for ever. A round that fails is counted and logged, and what is served stays."""
    while True:
        try:
            await keeper.once()
        except TangramError as error:
            metrics.failures.inc()
            log.warning("certificate keeping failed", reason=str(error), again_in_s=every_s)
        await sleep(every_s)


def _object(body: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise BadDocument(f"the API server's answer cannot be read: {error}") from None


def _files(secret: dict[str, Any] | None) -> dict[str, bytes]:
    """The Secret's files; one that is no base64 counts as absent and is written anew."""
    files = {}
    for name, text in ((secret or {}).get("data") or {}).items():
        try:
            files[name] = base64.b64decode(text, validate=True)
        except binascii.Error:
            files[name] = b""
    return files
