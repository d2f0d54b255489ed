"""The kubelet's records are requested by many containers that start at once, and the kubelet answers a few."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from deviceplugin import pod_resources as podresources
from deviceplugin.pod_resources import KubeletUnreachable, PodResources
from vgpu_pb import podresources_pb2 as pr
from vgpu_pb import podresources_pb2_grpc as pr_grpc

RESOURCE = "tangram.sh/gpu-mem"


class FixedPodResources(pr_grpc.PodResourcesListerServicer):
    """Answers as `refuses` lets it; each answer has one more pod than the one before."""

    def __init__(self, refuses: Callable[[], bool] = lambda: False) -> None:
        self.refuses, self.requested, self.at_once, self.most_at_once = refuses, 0, 0, 0
        self.came = asyncio.Event()

    async def List(self, request: Any, context: Any) -> pr.ListPodResourcesResponse:  # noqa: N802, ARG002
        self.requested += 1
        number = self.requested
        self.came.set()
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0.01)
        self.at_once -= 1
        if self.refuses():
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
        answer = pr.ListPodResourcesResponse()
        for at in range(number):
            container = answer.pod_resources.add(name=f"p{at}", namespace="default").containers.add(name="main")
            container.devices.add(resource_name=RESOURCE, device_ids=[f"id{at}"])
        return answer


@asynccontextmanager
async def served(records: FixedPodResources, folder: Path) -> AsyncIterator[PodResources]:
    server = grpc.aio.server()
    pr_grpc.add_PodResourcesListerServicer_to_server(records, server)
    server.add_insecure_port(f"unix://{folder / 'kubelet.sock'}")
    await server.start()
    client = PodResources(folder / "kubelet.sock")
    try:
        yield client
    finally:
        await client.close()
        await server.stop(None)


class Limit:
    """As the kubelet's: so many at once, and then so many in a second."""

    def __init__(self, burst: int, a_second: float) -> None:
        self._tokens, self._burst, self._a_second, self._at_s = float(burst), burst, a_second, time.monotonic()

    def __call__(self) -> bool:
        now_s = time.monotonic()
        self._tokens = min(self._burst, self._tokens + (now_s - self._at_s) * self._a_second)
        self._at_s = now_s
        if self._tokens < 1:
            return True
        self._tokens -= 1
        return False


async def test_concurrent_callers_share_two_requests_and_the_second_is_sent_after_all_calls(
    tmp_path: Path,
) -> None:
    records = FixedPodResources()
    async with served(records, tmp_path) as client:
        first = asyncio.create_task(client.holdings("tangram.sh"))
        await records.came.wait()
        others = [asyncio.create_task(client.holdings("tangram.sh")) for _ in range(100)]
        assert len(await first) == 1
        assert {len(one) for one in await asyncio.gather(*others)} == {2}
        assert (records.requested, records.most_at_once) == (2, 1)


async def test_a_kubelet_that_refuses_for_a_while_is_called_again(tmp_path: Path) -> None:
    records = FixedPodResources(Limit(2, 20))
    async with served(records, tmp_path) as client:
        for at in range(8):
            pod, containers = await client.holders(RESOURCE, ["id0"])
            assert (pod, containers) == (("default", "p0"), ("main",)), at
    assert records.requested > 8


async def test_one_that_refuses_for_ever_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(podresources, "DEADLINE_S", 0.2)
    async with served(FixedPodResources(lambda: True), tmp_path) as client:
        with pytest.raises(KubeletUnreachable, match=r"kubelet\.sock: RESOURCE_EXHAUSTED: rejected by rate limit"):
            await client.holdings("tangram.sh")


async def test_what_may_be_long_is_decoded_beside_the_event_loop_and_the_machine_waits_for_no_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, listed, threads = PodResources(tmp_path / "kubelet.sock"), asyncio.Event(), []

    async def answered(method: str) -> bytes:
        if method == podresources.LIST:
            await listed.wait()
        return b""

    class Message:
        pod_resources = ()

        @classmethod
        def FromString(cls, _: bytes) -> Message:  # noqa: N802
            threads.append(threading.get_ident())
            return cls()

    made = SimpleNamespace(ListPodResourcesResponse=Message, AllocatableResourcesResponse=Message)
    monkeypatch.setattr(podresources, "pb", made)
    monkeypatch.setattr(records, "_request", answered)
    pods = asyncio.create_task(records.pods())
    async with asyncio.timeout(20):
        await records.machine()
    listed.set()
    await pods
    assert len(threads) == 2
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("answer", [b"\x0a", b"\x0a\xff", b"\x0a\x05id0"])
@pytest.mark.parametrize(
    "call",
    [
        lambda records: records.holdings("tangram.sh"),
        lambda records: records.holders(RESOURCE, ["id0"]),
        lambda records: records.others("tangram.sh"),
        lambda records: records.pods(),
        lambda records: records.machine(),
    ],
)
async def test_an_answer_that_cannot_be_read_is_none(
    tmp_path: Path, call: Callable[[PodResources], Awaitable[object]], answer: bytes
) -> None:
    records = PodResources(tmp_path / "kubelet.sock")

    async def answered(method: str) -> bytes:
        return answer

    records._request = answered  # type: ignore[method-assign]
    with pytest.raises(KubeletUnreachable, match="the answer cannot be read"):
        await call(records)


async def test_a_caller_that_is_cancelled_cancels_no_other(tmp_path: Path) -> None:
    records = FixedPodResources()
    async with served(records, tmp_path) as client:
        one, other = (asyncio.create_task(client.holdings("tangram.sh")) for _ in range(2))
        await asyncio.sleep(0)
        one.cancel()
        assert await other
        assert one.cancelled()
        assert await client.holdings("tangram.sh")
