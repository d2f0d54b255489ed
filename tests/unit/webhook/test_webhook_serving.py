"""The whole webhook on real ports, called over real TLS."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import httpx
import msgspec
import pytest

from webhook.app import Webhook
from webhook.certs import CA_CERT, CERT, KEY, renewed
from webhook.settings import Settings

NAME = "localhost"
POD = {
    "metadata": {"name": "a"},
    "spec": {"containers": [{"name": "c", "resources": {"limits": {"tangram.sh/gpu-mem": "8Gi"}}}]},
}
REVIEW = {
    "apiVersion": "admission.k8s.io/v1",
    "kind": "AdmissionReview",
    "request": {"uid": "u-1", "operation": "CREATE", "resource": {"group": "", "resource": "pods"}, "object": POD},
}


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name in (CERT, KEY):
        (folder / name).write_bytes(files[name])


def trusting(files: dict[str, bytes]) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=files[CA_CERT].decode())


@asynccontextmanager
async def running(folder: Path, *, drain_s: float = 0) -> AsyncIterator[Webhook]:
    settings = Settings(
        _cli_parse_args=False, host="127.0.0.1", port=0, metrics_port=0, cert_mode="files", cert_folder=folder,
        cert_check_s=0.05, drain_s=drain_s,
    )  # fmt: skip
    webhook = Webhook(settings)
    task = asyncio.create_task(webhook.run())
    try:
        yield webhook
    finally:
        webhook.stopping.set()
        await asyncio.wait_for(task, 10)


async def test_admission_is_answered_over_tls_and_counted(tmp_path: Path) -> None:
    files = renewed({}, (NAME,), datetime.now(UTC))
    write(tmp_path, files)
    async with running(tmp_path) as webhook:
        await asyncio.wait_for(webhook.accepting.wait(), 10)
        async with httpx.AsyncClient(verify=trusting(files)) as client:
            url = f"https://{NAME}:{webhook.port}/mutate"
            answer = await client.post(url, content=msgspec.json.encode(REVIEW))
            assert answer.status_code == 200
            document = answer.json()
            assert (document["apiVersion"], document["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
            response = document["response"]
            assert (response["uid"], response["allowed"], response["patchType"]) == ("u-1", True, "JSONPatch")
            garbage = await client.post(url, content=b"{")
            assert (garbage.status_code, garbage.text[:28]) == (400, "the body (1 bytes) is no Adm")
            page = (await client.get(f"http://127.0.0.1:{webhook.metrics_port}/metrics")).text
            assert 'tangram_webhook_admissions_total{result="mutated"} 1.0' in page
            assert 'tangram_webhook_admissions_total{result="bad_request"} 1.0' in page
            ready = await client.get(f"http://127.0.0.1:{webhook.metrics_port}/readyz")
            assert (ready.status_code, ready.text) == (200, "ok\n")


async def test_a_renewed_certificate_is_served_without_a_restart(tmp_path: Path) -> None:
    old, new = renewed({}, (NAME,), datetime.now(UTC)), renewed({}, (NAME,), datetime.now(UTC))
    write(tmp_path, old)
    async with running(tmp_path) as webhook:
        await asyncio.wait_for(webhook.accepting.wait(), 10)
        url = f"https://{NAME}:{webhook.port}/mutate"
        async with httpx.AsyncClient(verify=trusting(old)) as standing:
            assert (await standing.post(url, content=msgspec.json.encode(REVIEW))).status_code == 200
            webhook.serving.loaded.clear()
            write(tmp_path, new)
            await asyncio.wait_for(webhook.serving.loaded.wait(), 10)
            assert webhook.metrics.registry.get_sample_value("tangram_webhook_certificate_loads_total") == 2
            assert (await standing.post(url, content=msgspec.json.encode(REVIEW))).status_code == 200
        async with httpx.AsyncClient(verify=trusting(new)) as fresh:
            assert (await fresh.post(url, content=msgspec.json.encode(REVIEW))).status_code == 200


async def test_without_a_certificate_it_lives_but_is_not_ready(tmp_path: Path) -> None:
    async with running(tmp_path) as webhook, httpx.AsyncClient() as client:
        base = f"http://127.0.0.1:{webhook.metrics_port}"
        assert (await client.get(f"{base}/healthz")).status_code == 200
        ready = await client.get(f"{base}/readyz")
        assert (ready.status_code, ready.text) == (503, "no serving certificate yet\n")
        with pytest.raises(httpx.ConnectError):
            await client.get(f"https://{NAME}:{webhook.port}/mutate")


async def test_a_webhook_that_is_stopping_reports_it_and_still_answers(tmp_path: Path) -> None:
    files = renewed({}, (NAME,), datetime.now(UTC))
    write(tmp_path, files)
    settings = Settings(
        _cli_parse_args=False, host="127.0.0.1", port=0, metrics_port=0, cert_mode="files", cert_folder=tmp_path, drain_s=1,
    )  # fmt: skip
    webhook = Webhook(settings)
    task = asyncio.create_task(webhook.run())
    await asyncio.wait_for(webhook.accepting.wait(), 10)
    webhook.stopping.set()
    async with httpx.AsyncClient(verify=trusting(files)) as client:
        assert (await client.get(f"http://127.0.0.1:{webhook.metrics_port}/readyz")).text == "stopping\n"
        answer = await client.post(f"https://{NAME}:{webhook.port}/mutate", content=msgspec.json.encode(REVIEW))
        assert answer.status_code == 200
    await asyncio.wait_for(task, 20)


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        ({"classes_by_priority_class": {"x": "urgent"}}, "urgent: service classes are latency-critical, standard"),
        ({"priority_classes": {"urgent": "x"}}, "service classes are latency-critical, standard, best-effort"),
        ({"largest_gpu": "80"}, "less than 1 MiB"),
        ({"largest_gpu": "80GB"}, "not a Kubernetes quantity"),
        ({"memory_unit": "1Mi"}, "1Gi"),
        ({"port": 70000}, "65535"),
    ],
)
def test_a_bad_setting_is_named(bad: dict[str, object], sentence: str) -> None:
    with pytest.raises(Exception, match=sentence):
        Settings(_cli_parse_args=False, **bad)
