"""Credentials, errors, and calls that are cut short."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pytest

from kube.auth import Credentials, loader
from kube.client import MERGE_PATCH, connect
from kube.errors import ApiError, NoClusterError, api_error
from kube.patch import annotate, pointer
from kube.paths import PODS, secret
from kube.paths import pod as pod_path
from tests.builders import pod
from tests.fake_api import FakeApi, hold, lose_reply


async def test_an_error_names_verb_path_status_and_the_servers_message() -> None:
    async with FakeApi() as api, api.client() as client:
        with pytest.raises(ApiError) as caught:
            await client.get(pod_path("default", "a"))
    error = caught.value
    assert str(error) == 'GET /api/v1/namespaces/default/pods/a: 404 NotFound: pods "a" not found'
    assert error.not_found
    assert not error.transient


@pytest.mark.parametrize(
    ("status", "transient", "conflict", "gone"),
    [(0, True, False, False), (409, False, True, False), (410, False, False, True), (429, True, False, False), (503, True, False, False), (403, False, False, False)],
)  # fmt: skip
def test_errors_know_whether_the_same_call_may_succeed_later(
    status: int, transient: bool, conflict: bool, gone: bool
) -> None:
    error = ApiError(status, "Reason", "message")
    assert (error.transient, error.conflict, error.gone) == (transient, conflict, gone)


def test_an_answer_that_is_no_status_is_quoted_in_part() -> None:
    error = api_error(502, b"<html>" + b"x" * 9000, verb="GET", path="/x", retry_after="7")
    assert error.reason == "Bad Gateway"
    assert error.message.startswith("<html>x")
    assert len(error.message) == 500
    assert error.retry_after_s == 7


async def test_a_lost_reply_to_a_write_is_an_error_without_status_and_is_not_sent_again() -> None:
    async with FakeApi() as api, api.client() as client:
        api.put(pod("a").plain())
        api.faults.append(lose_reply("POST", "/binding"))
        with pytest.raises(ApiError, match=r"POST .*/binding") as caught:
            await client.send("POST", pod_path("default", "a", "binding"), {"metadata": {}, "target": {"name": "n1"}})
        assert caught.value.status == 0
        assert len(api.bindings) == 1


async def test_a_call_that_takes_too_long_is_given_up() -> None:
    never, reached = asyncio.Event(), asyncio.Event()
    async with FakeApi() as api, api.client() as client:
        api.faults.append(hold("GET", PODS, never, reached))
        with pytest.raises(ApiError, match="Timeout"):
            await client.get(PODS, timeout_s=0.05)
        assert reached.is_set()
        never.set()


async def test_a_kubeconfig_file_sets_server_and_token(tmp_path: Path) -> None:
    text = {
        "apiVersion": "v1", "kind": "Config", "current-context": "x",
        "clusters": [{"name": "c", "cluster": {"server": "http://example:80/"}}],
        "users": [{"name": "u", "user": {"token": "abc"}}], "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
    }  # fmt: skip
    path = tmp_path / "config"
    path.write_text(json.dumps(text))
    assert await loader(str(path))() == Credentials("http://example:80", None, "Bearer abc")
    path.write_text(json.dumps(text | {"current-context": "nope"}))
    with pytest.raises(NoClusterError, match="nope"):
        await loader(str(path))()


def test_without_a_cluster_the_error_names_the_missing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(NoClusterError, match="none does not exist"):
        loader(None)


@pytest.mark.parametrize(
    ("bypassed", "requested_for"), [("", b"GET http://cluster.test/version "), ("cluster.test", None)]
)
async def test_the_environment_names_a_proxy_and_the_hosts_that_bypass_it(
    bypassed: str, requested_for: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines.append(await reader.readline())
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        await writer.drain()
        writer.close()

    async def load() -> Credentials:
        return Credentials("http://cluster.test", None)

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as proxy:
        port = proxy.sockets[0].getsockname()[1]
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("no_proxy", bypassed)
        async with connect(load=load) as client:
            if requested_for is None:
                with pytest.raises(ApiError, match="Unreachable"):
                    await client.get("/version")
                assert not lines
            else:
                assert await client.get("/version") == b"{}"
                assert lines[0].startswith(requested_for)


async def test_a_call_waits_for_no_thread() -> None:
    async with FakeApi() as api, api.client() as client:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(Refuses(max_workers=1))
        assert b"items" in await client.get(PODS)


class Refuses(ThreadPoolExecutor):
    """An executor that must not be used."""

    def submit(self, *_args: object, **_options: object) -> NoReturn:
        raise AssertionError("a call to the API server goes to a thread")


async def test_annotations_go_out_as_a_merge_patch() -> None:
    sent: list[tuple[str, str, bytes]] = []
    async with FakeApi() as api, api.client() as client:

        def note(request, handler):  # type: ignore[no-untyped-def]
            async def answer():  # type: ignore[no-untyped-def]
                sent.append((request.method, request.content_type, await request.read()))
                return await handler(request)

            return answer()

        api.put(pod("a").plain())
        api.faults.append(note)
        await annotate(client, pod_path("default", "a"), {"tangram.sh/x": "1", "tangram.sh/y": None})
    assert sent == [("PATCH", MERGE_PATCH, b'{"metadata":{"annotations":{"tangram.sh/x":"1","tangram.sh/y":null}}}')]


def test_names_cannot_leave_their_place_in_a_path() -> None:
    assert pod_path("default", "../../secrets") == "/api/v1/namespaces/default/pods/..%2F..%2Fsecrets"
    assert secret("a/b", "c?d") == "/api/v1/namespaces/a%2Fb/secrets/c%3Fd"
    assert pointer("metadata", "annotations", "tangram.sh/a~b", 0) == "/metadata/annotations/tangram.sh~1a~0b/0"
