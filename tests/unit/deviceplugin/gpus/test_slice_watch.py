"""Which devices the ResourceSlices of a node name: in each version of the API, and where it is not served, silent or cannot be read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from deviceplugin.gpus.slice_watch import AGAIN_S, SlicesUnknown, SliceWatch
from kube.client import SILENCE_LIMIT_S
from kube.paths import RESOURCE_API
from tests.fake_api import FakeApi, answer_with, say_raw
from vgpu.health.foreign import DRA_DRIVER, ForeignDevice

WAIT_S = 20.0


class Clock:
    """Stands, but for what a test adds."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def resource_slice(
    name: str, *devices: dict[str, Any], version: str = "v1", driver: str = DRA_DRIVER, node: str = "n1"
) -> dict[str, Any]:
    return {
        "apiVersion": f"resource.k8s.io/{version}", "kind": "ResourceSlice", "metadata": {"name": name},
        "spec": {"driver": driver, "nodeName": node, "devices": list(devices)},
    }  # fmt: skip


def device(uuid: str, key: str = "uuid") -> dict[str, Any]:
    return {"name": "gpu-0", "attributes": {key: {"string": uuid}, "index": {"int": 0}, "even": {"bool": True}}}


def named(*ids: str) -> tuple[ForeignDevice, ...]:
    return tuple(ForeignDevice(DRA_DRIVER, one) for one in ids)


@asynccontextmanager
async def watching(api: FakeApi, clock: Clock) -> AsyncIterator[SliceWatch]:
    async with api.client() as client:
        watch = SliceWatch(client, "n1", clock=clock)
        task = asyncio.create_task(watch.run())
        try:
            async with asyncio.timeout(WAIT_S):
                await watch.first()
                yield watch
        finally:
            task.cancel()
            await asyncio.wait([task])


async def changed(watch: SliceWatch) -> None:
    assert watch._cache is not None
    await watch._cache.changed()


@pytest.mark.parametrize(
    ("served", "version", "thing"),
    [
        (("v1", "v1beta2"), "v1", device("GPU-1")),
        (("v1beta1", "v1beta2"), "v1beta2", device("GPU-1", f"{DRA_DRIVER}/uuid")),
        (("v1beta1",), "v1beta1", {"name": "gpu-0", "basic": {"attributes": device("GPU-1")["attributes"]}}),
    ],
)
async def test_the_best_version_is_read_and_what_it_puts_around_attributes(
    served: tuple[str, ...], version: str, thing: dict[str, Any]
) -> None:
    async with FakeApi() as api:
        api.serve_slices(*served)
        api.put(resource_slice("a", thing, version=version))
        async with watching(api, Clock()) as watch:
            assert watch.devices() == named("GPU-1")


async def test_slices_are_followed_and_those_of_other_nodes_and_drivers_do_not_count() -> None:
    async with FakeApi() as api:
        api.serve_slices("v1")
        api.put(resource_slice("far", device("GPU-2"), node="n2"))
        api.put(resource_slice("net", device("GPU-3"), driver="net.example.com"))
        async with watching(api, Clock()) as watch:
            assert watch.devices() == ()
            await api.watched()
            mine = resource_slice("mine", device("MIG-1") | {"attributes": device("MIG-1")["attributes"] | device("GPU-1", "parentUUID")["attributes"]}, {"name": "gpu-9"})  # fmt: skip
            api.put(mine)
            await changed(watch)
            assert watch.devices() == named("MIG-1", "GPU-1", "gpu-9"), "one without a UUID has its own name"
            api.remove(mine)
            await changed(watch)
            assert watch.devices() == ()


async def test_a_cluster_that_does_not_serve_the_api_has_no_dra_driver() -> None:
    async with FakeApi() as api, watching(api, Clock()) as watch:
        assert (watch.devices(), watch.silent_s()) == ((), 0.0)


async def test_a_server_that_refuses_to_say_what_it_serves_is_no_answer() -> None:
    decided, seen = asyncio.Event(), list[str]()

    async def sleep(seconds: float) -> None:
        try:
            watch.devices()
        except SlicesUnknown as error:
            seen.append(str(error))
        if seconds == AGAIN_S:
            decided.set()
            await asyncio.Event().wait()

    async with FakeApi() as api, api.client() as client:
        api.serve_slices("v1")
        api.faults += [say_raw("GET", RESOURCE_API, b"no JSON"), answer_with("GET", RESOURCE_API, 403, "", "may not")]
        watch = SliceWatch(client, "n1", sleep=sleep)
        task = asyncio.create_task(watch.run())
        async with asyncio.timeout(WAIT_S):
            await decided.wait()
            await watch.first()
        assert watch.devices() == ()
        assert ["JSON" in seen[0], "may not" in seen[1]] == [True, True], seen
        task.cancel()
        await asyncio.wait([task])


async def test_a_slice_that_cannot_be_read_and_a_silent_watch_are_no_answer() -> None:
    clock = Clock()
    async with FakeApi() as api:
        api.serve_slices("v1")
        async with watching(api, clock) as watch:
            await api.watched()
            odd = resource_slice("odd", device("GPU-1"))
            api.put(odd | {"spec": odd["spec"] | {"devices": 7}})
            cache = watch._cache
            assert cache is not None
            assert await cache.wait_for(lambda: True if cache.unknown else None, timeout_s=WAIT_S)
            with pytest.raises(SlicesUnknown, match="1 of them cannot be read"):
                watch.devices()
            api.put(odd)
            await changed(watch)
            clock.now_s += SILENCE_LIMIT_S
            assert (watch.devices(), watch.silent_s()) == (named("GPU-1"), SILENCE_LIMIT_S)
            clock.now_s += 1
            with pytest.raises(SlicesUnknown, match="does not answer"):
                watch.devices()


async def test_before_the_first_answer_nothing_is_known() -> None:
    async with FakeApi() as api, api.client() as client:
        watch = SliceWatch(client, "n1")
        with pytest.raises(SlicesUnknown, match="not asked yet"):
            watch.devices()
