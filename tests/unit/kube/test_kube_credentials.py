"""Credentials that rotate, vanish or are no credentials, while calls go on."""

from __future__ import annotations

import asyncio
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from aiohttp import web

from kube import auth
from kube.auth import Credentials, loader
from kube.cache import Cache
from kube.client import connect
from kube.errors import ApiError, NoClusterError
from kube.objects import Pod
from kube.paths import PODS
from tests.builders import pod
from tests.fake_api import FakeApi, answer_with
from webhook.certs import CA_CERT, CERT, KEY, renewed


async def test_a_token_that_is_refused_is_read_again_once() -> None:
    tokens = iter(["Bearer old", "Bearer new", "Bearer never"])
    async with FakeApi() as api:

        async def load() -> Credentials:
            return Credentials(f"http://127.0.0.1:{api.port}", None, next(tokens))

        api.faults.append(answer_with("GET", PODS, 401, "Unauthorized", "token expired"))
        async with connect(load=load) as client:
            assert b"items" in await client.get(PODS)
            api.faults += [answer_with("GET", PODS, 401), answer_with("GET", PODS, 401)]
            with pytest.raises(ApiError, match="401"):
                await client.get(PODS)


async def test_a_token_is_read_again_after_a_minute() -> None:
    now, loads = [0.0], []
    async with FakeApi() as api:

        async def load() -> Credentials:
            loads.append(now[0])
            return Credentials(f"http://127.0.0.1:{api.port}", None, "Bearer x")

        async with connect(load=load, clock=lambda: now[0]) as client:
            for now[0] in (0.0, 59.0, 61.0, 62.0):
                await client.get(PODS)
    assert loads == [0.0, 61.0]


async def test_a_token_file_that_vanishes_is_an_error_of_the_call_not_of_the_program() -> None:
    now, lost = [0.0], [False]
    async with FakeApi() as api:

        async def load() -> Credentials:
            if lost[0]:
                raise FileNotFoundError("token")
            return Credentials(f"http://127.0.0.1:{api.port}", None, "Bearer x")

        async with connect(load=load, clock=lambda: now[0]) as client:
            now[0], lost[0] = 100.0, True
            with pytest.raises(ApiError, match="token"):
                await client.get(PODS)


@pytest.mark.parametrize(
    "unreadable", [FileNotFoundError("token"), ssl.SSLError("no start line"), NoClusterError("no token")]
)
async def test_credentials_that_cannot_be_read_after_a_401_are_an_error_of_the_call(unreadable: Exception) -> None:
    async with FakeApi() as api:
        api.faults.append(answer_with("GET", PODS, 401))
        async with connect(load=readable_once(api, unreadable)) as client:
            with pytest.raises(ApiError, match=str(unreadable.args[0])) as caught:
                await client.get(PODS)
            assert caught.value.transient
            assert b"items" in await client.get(PODS), "the next call is made with what was known"


async def test_a_cache_outlives_a_401_and_credentials_that_cannot_be_read_then() -> None:
    async def no_wait(_: float) -> None:
        await asyncio.sleep(0)

    async with FakeApi() as api:
        api.put(pod("a").plain())
        api.faults.append(answer_with("GET", PODS, 401))
        async with connect(load=readable_once(api, FileNotFoundError("token"))) as client:
            cache = Cache(client, PODS, Pod, sleep=no_wait)
            running = asyncio.create_task(cache.run())
            synced = asyncio.create_task(cache.has_synced.wait())
            await asyncio.wait((running, synced), timeout=10, return_when=asyncio.FIRST_COMPLETED)
            assert not running.done()
            assert synced.done()
            assert cache.statistics().failures == 1
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def readable_once(api: FakeApi, then: Exception) -> Callable[[], asyncio.Future[Credentials]]:
    """Credentials that can be read at first, and never again."""
    reads = 0

    async def load() -> Credentials:
        nonlocal reads
        reads += 1
        if reads > 1:
            raise then
        return Credentials(f"http://127.0.0.1:{api.port}", None, "Bearer x")

    return load  # type: ignore[return-value]


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a pod's service account."""
    monkeypatch.setattr(auth, "SERVICE_ACCOUNT", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    (tmp_path / "token").write_text("abc\n")
    (tmp_path / "ca.crt").write_bytes(certificates()[CA_CERT])
    return tmp_path


def certificates() -> Mapping[str, bytes]:
    """A CA, and a certificate that it signed for localhost."""
    return renewed({}, ("localhost",), datetime.now(UTC))


@pytest.mark.usefixtures("account")
async def test_in_a_pod_the_service_account_is_used() -> None:
    access = await loader(None)()
    assert (access.server, access.token) == ("https://[fd00::1]:6443", "Bearer abc")
    assert access.tls is not None
    assert access.tls.verify_mode is ssl.CERT_REQUIRED


@pytest.mark.parametrize("token", [b"", b"a\nb", b"\xff", b"a b"])
async def test_a_token_that_is_none_is_never_sent(account: Path, token: bytes) -> None:
    (account / "token").write_bytes(token)
    with pytest.raises(NoClusterError, match=f"{len(token)} bytes"):
        await loader(None)()


async def test_the_tls_context_stays_as_long_as_the_ca_does(account: Path) -> None:
    load = loader(None)
    first, second = await load(), await load()
    assert first.tls is second.tls
    (account / "ca.crt").write_bytes(certificates()[CA_CERT])
    assert (await load()).tls is not first.tls


async def test_a_kubeconfig_that_is_no_yaml_is_no_cluster(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("{")
    with pytest.raises(NoClusterError, match="cannot be used"):
        await loader(str(tmp_path / "config"))()


async def test_without_the_client_a_kubeconfig_is_no_cluster_and_the_error_names_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config").write_text("{}")
    monkeypatch.setitem(sys.modules, "kubernetes.aio.config", None)
    with pytest.raises(NoClusterError, match=r"kubeconfig .*/config cannot be read .*install tangram\[kubeconfig\]"):
        await loader(str(tmp_path / "config"))()


async def test_a_ca_that_rotates_is_trusted_without_a_restart(account: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = certificates(), certificates()
    (account / "ca.crt").write_bytes(before[CA_CERT])
    async with serving(before, account) as (port, present):
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "localhost")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(port))
        async with connect(clock=lambda: 0.0) as client:
            assert await client.get("/version") == b"{}"
            present(after)
            with pytest.raises(ApiError, match="certificate"):
                await client.get("/version")
            (account / "ca.crt").write_bytes(after[CA_CERT])
            assert await client.get("/version") == b"{}"


@asynccontextmanager
async def serving(
    certs: Mapping[str, bytes], folder: Path
) -> AsyncIterator[tuple[int, Callable[[Mapping[str, bytes]], None]]]:
    """An HTTPS server: its port, and how to have it present another certificate to clients that connect from then on."""
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)

    def present(certs: Mapping[str, bytes]) -> None:
        (folder / "pair.pem").write_bytes(certs[KEY] + certs[CERT])
        tls.load_cert_chain(folder / "pair.pem")

    async def answer(_: web.Request) -> web.Response:
        response = web.Response(text="{}")
        response.force_close()
        return response

    present(certs)
    app = web.Application()
    app.router.add_get("/version", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "localhost", 0, ssl_context=tls).start()
        yield runner.addresses[0][1], present
    finally:
        await runner.cleanup()
