"""Access to the metrics of a node: a plugin process and an arbiter process, whose clients' tokens an API server reviews."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from tests.built import REPOSITORY
from tests.fake import fake_driver
from tests.integration.deviceplugin.harness import Node
from tests.integration.deviceplugin.test_nvml import Start, running

__all__ = ["fake_driver", "running"]

PROMETHEUS = "system:serviceaccount:monitoring:prometheus-k8s"
REVIEW = ("--metrics-access", "review")


def knows(made: Node) -> None:
    """The API server knows a Prometheus that may read metrics, and a pod that may not."""
    made.api.tokens = {"prometheus": PROMETHEUS, "container": "system:serviceaccount:team:default"}
    made.api.may = {PROMETHEUS: {"/metrics"}}


async def status(port: int, token: str = "", path: str = "/metrics") -> int:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with httpx.AsyncClient(timeout=20) as client:
        return (await client.get(f"http://127.0.0.1:{port}{path}", headers=headers)).status_code


@asynccontextmanager
async def arbiter(made: Node) -> AsyncIterator[int]:
    """One that has tokens reviewed by the plugin; its port."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "arbiter", "--grants-dir", str(made.state / "grants"), "--sockets-dir", str(made.state / "sockets"),
        "--status-socket", str(made.state / "status.sock"), "--nvml-socket", str(made.state / "plugin/nvml.sock"),
        "--metrics-access-socket", str(made.state / "plugin/access.sock"), "--metrics-host", "127.0.0.1", "--metrics-port", "0",
        cwd=REPOSITORY, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        async for line in process.stderr:
            if b'"serving"' in line:
                yield int(json.loads(line)["metrics_port"])
                break
    finally:
        process.kill()
        await process.communicate()


async def test_only_an_account_that_may_get_metrics_reads_those_of_plugin_and_arbiter(running: Start) -> None:
    async with running(*REVIEW) as made, arbiter(made) as arbiters_port:
        knows(made)
        for port in (made.port, arbiters_port):
            assert [await status(port, token) for token in ("", "made-up", "container", "prometheus")] == [
                401,
                401,
                403,
                200,
            ]
            assert await status(port, path="/healthz") == 200
        assert await status(made.port, path="/readyz") == 200
        async with httpx.AsyncClient(timeout=20, headers={"Authorization": "Bearer prometheus"}) as client:
            page = (await client.get(f"http://127.0.0.1:{made.port}/metrics")).text
            arbiters = (await client.get(f"http://127.0.0.1:{arbiters_port}/metrics")).text
        assert 'tangram_deviceplugin_refused_total{listener="metrics",reason="no-token"} 1.0' in page
        assert 'tangram_arbiter_refused_total{listener="metrics",reason="forbidden"} 1.0' in arbiters


async def test_the_arbiter_accepts_no_new_token_while_the_plugin_is_away_and_known_tokens_stay_accepted(
    running: Start,
) -> None:
    async with running(*REVIEW) as made, arbiter(made) as port:
        knows(made)
        assert await status(port, "prometheus") == 200
        await made.stop_plugin()
        assert [await status(port, token) for token in ("prometheus", "container")] == [200, 503]
        assert await status(port, path="/healthz") == 200


async def test_metrics_are_open_by_setting(running: Start) -> None:
    async with running() as made:
        assert await status(made.port) == 200
        assert not (made.state / "plugin/access.sock").exists()
