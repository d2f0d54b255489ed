"""One connection pool to the API server: GET, send, stream. Bytes in, bytes out.

Knows HTTP, credentials and errors. Knows no object: what the bytes mean is the caller's business, and so is trying again
(but for a token that expired: the credentials are read again once).

    async with connect() as client:
        body = await client.get("/api/v1/nodes", {"limit": "500"})
        await client.send("PATCH", path, {"metadata": ...}, content_type=MERGE_PATCH)
        async for line in client.stream("/api/v1/pods", {"watch": "1"}): ...
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import msgspec

from kube.auth import Credentials, Load, loader
from kube.errors import ApiError, NoClusterError, api_error

JSON: Final = "application/json"
MERGE_PATCH: Final = "application/merge-patch+json"
JSON_PATCH: Final = "application/json-patch+json"
STRATEGIC_PATCH: Final = "application/strategic-merge-patch+json"
"""Merges lists by their keys, as the conditions of a status by their type."""
METADATA: Final = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
METADATA_LIST: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
"""The `accept` header that requests only the metadata of an object, or of each object of a list."""

CREDENTIALS_AGE_LIMIT_S: Final = 60.0
"""Token, certificates and CA are read again after this. The kubelet rotates projected tokens at 80 % of their life, an hour by default,
and writes a new ca.crt about a minute after the cluster has one."""

CALL_TIMEOUT_S: Final = 30.0
"""For a whole call that is no stream. A page of 500 pods is some 5 MB; guessed to be ample."""

SILENCE_LIMIT_S: Final = 150.0
"""A stream that is silent for longer counts as dead. The API server sends a bookmark about every minute."""

CONNECT_TIMEOUT_S: Final = 10.0

Params = Mapping[str, str]

_NO_ANSWER = (aiohttp.ClientError, TimeoutError, OSError, NoClusterError)


class Client:
    """Made by `connect`."""

    def __init__(
        self, load: Load, credentials: Credentials, session: aiohttp.ClientSession, clock: Callable[[], float]
    ) -> None:
        self._load, self._credentials, self._session, self._clock = load, credentials, session, clock
        self._read_at = clock()
        """When the credentials were read; minus infinity when the next call is to read them again."""
        self._environments_proxy = _environments_proxy(credentials.server)

    @property
    def server(self) -> str:
        """Where the API server is."""
        return self._credentials.server

    async def get(
        self, path: str, params: Params | None = None, *, timeout_s: float = CALL_TIMEOUT_S, accept: str = JSON
    ) -> bytes:
        """The body of a GET. Raises ApiError."""
        return await self._call("GET", path, None, JSON, params, timeout_s, accept)

    async def send(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        content_type: str = JSON,
        params: Params | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> bytes:
        """The body of the answer to POST, PUT, PATCH or DELETE. `body` is sent as it is when bytes, else as JSON. Raises ApiError."""
        raw = body if isinstance(body, bytes) or body is None else msgspec.json.encode(body)
        return await self._call(method, path, raw, content_type, params, timeout_s)

    async def stream(
        self, path: str, params: Params | None = None, *, accept: str = JSON
    ) -> AsyncGenerator[bytes, None]:
        """The lines of an answer as they come, without their ends. Raises ApiError, also when the stream breaks or falls silent."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=SILENCE_LIMIT_S)
        rest = b""
        try:
            async with self._session.request(
                "GET", self.server + path, params=params, timeout=timeout, **await self._options(accept)
            ) as answer:
                if answer.status >= HTTPStatus.BAD_REQUEST:
                    self._read_at = float("-inf")  # it may be the token
                    raise _refusal(answer, await answer.read(), "WATCH", path)
                async for chunk in answer.content.iter_any():
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        if line:
                            yield line
        except _NO_ANSWER as error:
            raise self._no_answer(error, "WATCH", path) from error

    async def _call(
        self,
        verb: str,
        path: str,
        body: bytes | None,
        content_type: str,
        params: Params | None,
        timeout_s: float,
        accept: str = JSON,
    ) -> bytes:
        try:
            return await self._once(verb, path, body, content_type, params, timeout_s, accept)
        except ApiError as error:
            if not error.unauthorized:
                raise
        self._read_at = float("-inf")
        return await self._once(verb, path, body, content_type, params, timeout_s, accept)

    async def _once(
        self,
        verb: str,
        path: str,
        body: bytes | None,
        content_type: str,
        params: Params | None,
        timeout_s: float,
        accept: str,
    ) -> bytes:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        try:
            options = await self._options(accept)
            if body is not None:
                options["headers"]["Content-Type"] = content_type
            async with self._session.request(
                verb, self.server + path, params=params, data=body, timeout=timeout, **options
            ) as answer:
                content = await answer.read()
        except _NO_ANSWER as error:
            raise self._no_answer(error, verb, path) from error
        if answer.status >= HTTPStatus.BAD_REQUEST:
            raise _refusal(answer, content, verb, path)
        return content

    async def _options(self, accept: str) -> dict[str, Any]:
        if self._clock() - self._read_at > CREDENTIALS_AGE_LIMIT_S:
            self._read_at = self._clock()
            self._credentials = await self._load()
        headers = {"Accept": accept}
        if self._credentials.token:
            headers["Authorization"] = self._credentials.token
        options: dict[str, Any] = {"headers": headers}
        if self._credentials.tls is not None:
            options["ssl"] = self._credentials.tls
            options["server_hostname"] = self._credentials.tls_name
        if proxy := self._credentials.proxy or self._environments_proxy:
            options["proxy"] = proxy
        return options

    def _no_answer(self, error: Exception, verb: str, path: str) -> ApiError:
        if isinstance(error, aiohttp.ClientSSLError):
            self._read_at = float("-inf")  # it may be the CA
        kind = "Timeout" if isinstance(error, (TimeoutError, asyncio.TimeoutError)) else "Unreachable"
        return ApiError(0, kind, str(error) or type(error).__name__, verb=verb, path=path)


@asynccontextmanager
async def connect(
    kubeconfig: str | None = None, *, load: Load | None = None, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[Client]:
    """A client of the cluster this process runs in, or that `kubeconfig` (or $KUBECONFIG) names. Raises NoClusterError."""
    load = load or loader(kubeconfig)
    credentials = await load()
    async with aiohttp.ClientSession(auto_decompress=True, cookie_jar=aiohttp.DummyCookieJar()) as session:
        yield Client(load, credentials, session, clock)


def _environments_proxy(server: str) -> str | None:
    """What $HTTPS_PROXY, $HTTP_PROXY and $NO_PROXY set for this server. Read once: aiohttp reads them in a thread at every call."""
    where = urlsplit(server)
    return None if proxy_bypass(where.hostname or "") else getproxies().get(where.scheme)


def _refusal(answer: aiohttp.ClientResponse, body: bytes, verb: str, path: str) -> ApiError:
    return api_error(answer.status, body, verb=verb, path=path, retry_after=answer.headers.get("Retry-After", ""))
