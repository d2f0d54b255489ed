"""The node's inventory annotation, against an API server that fails and is written to by others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest

from deviceplugin.gpus import publish
from deviceplugin.gpus.node_taint import NodeTaint
from deviceplugin.gpus.offer import Offer
from deviceplugin.gpus.publish import Publisher
from kube.client import Client
from kube.errors import ApiError
from kube.objects import Node
from tests.fake_api import answer_with, say_raw
from tests.integration.deviceplugin.harness import NODE, PodApi
from tests.integration.deviceplugin.plugin_kit import until
from tests.unit.deviceplugin.builders import inventory
from vgpu.api.codec import inventory_from_json
from vgpu.api.inventory import GpuCondition
from vgpu.api.names import DEFAULT
from vgpu.api.node_labels import labels_of


async def test_the_annotation_is_written_when_it_is_wrong_and_only_then() -> None:
    async with PodApi() as api, api.client() as client:
        offer = Offer(DEFAULT, 1024)
        offer.set_inventory(inventory(2))
        publisher = Publisher(client, NODE, offer)
        assert await publisher.publish()
        assert api.inventory is not None
        assert inventory_from_json(api.inventory) == offer.inventory()
        assert not await publisher.publish()

        node = api.objects["/api/v1/nodes"][NODE]
        node["metadata"]["annotations"] = {DEFAULT.inventory: "another program's", "other": "kept"}
        assert await publisher.publish()
        assert inventory_from_json(api.inventory) == offer.inventory()
        assert api.objects["/api/v1/nodes"][NODE]["metadata"]["annotations"]["other"] == "kept"
        assert publisher.written == 2


async def test_what_was_published_before_is_shown_once_before_it_is_written_over() -> None:
    async with PodApi() as api, api.client() as client:
        offer, shown = Offer(DEFAULT, 1024), []
        offer.set_inventory(inventory(2))
        api.objects["/api/v1/nodes"][NODE]["metadata"]["annotations"] = {DEFAULT.inventory: "the earlier plugin's"}
        gpu = offer.inventory().gpus[0]

        def seen(node: Node) -> None:
            shown.append(node.metadata.annotation(DEFAULT.inventory))
            offer.set_conditions({gpu.uuid: (GpuCondition("SelfTestFailed", "unhealthy", 7),)})

        publisher = Publisher(client, NODE, offer, seen=seen)
        assert await publisher.publish()
        assert shown == ["the earlier plugin's"]
        assert api.inventory is not None
        assert not inventory_from_json(api.inventory).gpus[0].healthy, "what it changed is in the first text already"
        assert not await publisher.publish()
        assert len(shown) == 1


async def test_a_refusal_of_the_api_server_is_reported_with_verb_and_path() -> None:
    async with PodApi() as api, api.client() as client:
        offer = Offer(DEFAULT, 1024)
        offer.set_inventory(inventory(1))
        api.faults.append(answer_with("PATCH", f"/nodes/{NODE}", 403, "Forbidden", "not your node"))
        with pytest.raises(ApiError, match=rf"PATCH /api/v1/nodes/{NODE}: 403 Forbidden: not your node"):
            await Publisher(client, NODE, offer).publish()


@asynccontextmanager
async def running(api: PodApi) -> AsyncIterator[Publisher]:
    offer = Offer(DEFAULT, 1024)
    offer.set_inventory(inventory(2))
    async with api.client() as client:
        publisher = Publisher(client, NODE, offer)
        work = asyncio.create_task(publisher.run())
        try:
            yield publisher
        finally:
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work


async def written(api: PodApi) -> None:
    async with asyncio.timeout(20):
        while not api.inventory:
            await api.news.wait()


async def test_a_node_that_is_deleted_and_made_again_has_its_annotation_at_once() -> None:
    async with PodApi() as api, running(api):
        await written(api)
        node = {"kind": "Node", "metadata": {"name": NODE, "uid": "again"}}
        api.remove(node)
        began = time.monotonic()
        api.put(node)
        assert api.inventory is None
        await written(api)
        assert time.monotonic() - began < 5.0


async def test_a_node_that_is_away_is_written_to_as_soon_as_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "BACKOFF_S", (60.0, 60.0))
    async with PodApi() as api:
        api.faults.append(answer_with("GET", f"/nodes/{NODE}", 404, "NotFound", "no such node"))
        node = {"kind": "Node", "metadata": {"name": NODE, "uid": "again"}}
        api.remove(node)
        async with running(api) as publisher:
            async with asyncio.timeout(20):
                while "no such node" not in publisher.failing:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            api.put(node)
            await written(api)
            assert inventory_from_json(api.inventory or "") == inventory(2)


async def test_a_watch_that_lags_behind_the_plugins_own_write_costs_no_more_than_a_check() -> None:
    async with PodApi() as api, running(api) as publisher:
        await written(api)
        requested = api.requests.count(f"GET /api/v1/nodes/{NODE}")
        for _ in range(20):
            api.put(api.objects["/api/v1/nodes"][NODE])  # as the kubelet does: its status
        await asyncio.sleep(0.3)
        assert api.requests.count(f"GET /api/v1/nodes/{NODE}") <= requested + 1
        assert publisher.written == 1


async def test_annotations_for_people_are_written_beside_the_inventory_and_taken_away() -> None:
    beside: dict[str, str | None] = {}
    async with PodApi() as api, api.client() as client:
        offer = Offer(DEFAULT, 1024)
        offer.set_inventory(inventory(1))
        publisher = Publisher(client, NODE, offer, lambda: beside)
        assert await publisher.publish()
        beside[DEFAULT.bursts] = "ready"
        assert await publisher.publish()
        annotations = api.objects["/api/v1/nodes"][NODE]["metadata"]["annotations"]
        assert (annotations[DEFAULT.bursts], annotations[DEFAULT.inventory]) == ("ready", api.inventory)
        assert not await publisher.publish()
        beside[DEFAULT.bursts] = None
        assert await publisher.publish()
        assert api.objects["/api/v1/nodes"][NODE]["metadata"]["annotations"].get(DEFAULT.bursts) is None
        assert publisher.written == 3


async def test_an_annotation_for_people_that_is_refused_keeps_no_node_from_being_ready() -> None:
    """As by the admission policy of a chart that does not know it."""
    async with PodApi() as api, api.client() as client:
        offer = Offer(DEFAULT, 1024)
        offer.set_inventory(inventory(1))
        publisher = Publisher(client, NODE, offer, lambda: {DEFAULT.bursts: "ready"})
        assert await publisher.publish()
        api.faults.append(answer_with("PATCH", f"/nodes/{NODE}", 403, "Forbidden", "not that annotation"))
        node = api.objects["/api/v1/nodes"][NODE]
        del node["metadata"]["annotations"][DEFAULT.bursts]
        assert not await publisher.publish()
        assert publisher.failing == ""
        assert api.inventory is not None


async def test_labels_are_written_beside_the_annotations_and_go_with_the_last_gpu() -> None:
    async with PodApi() as api, api.client() as client:
        offer = Offer(DEFAULT, 1024)
        offer.set_inventory(inventory(2))
        publisher = Publisher(client, NODE, offer, labels=lambda: labels_of(offer.reported, DEFAULT))
        api.objects["/api/v1/nodes"][NODE]["metadata"]["labels"] = {"kept": "yes"}
        assert await publisher.publish()
        labels = api.objects["/api/v1/nodes"][NODE]["metadata"]["labels"]
        assert (labels["kept"], labels[DEFAULT.gpu_label("count")]) == ("yes", "2")
        assert not await publisher.publish()
        labels[DEFAULT.gpu_label("count")] = "9"
        assert await publisher.publish()
        offer.set_inventory(inventory(0))
        assert await publisher.publish()
        labels = api.objects["/api/v1/nodes"][NODE]["metadata"]["labels"]
        assert {key: value for key, value in labels.items() if value is not None} == {"kept": "yes"}


LOST = GpuCondition("OffTheBus", "unhealthy", 1, "the driver reported XID 79")
FOREIGN = {"key": "example.com/kept", "value": "x", "effect": "NoExecute", "timeAdded": "2026-01-01T00:00:00Z"}


def with_taint_of(client: Client, offer: Offer, effect: Any) -> Publisher:
    taint = NodeTaint(client, NODE, DEFAULT, effect, offer.inventory)
    return Publisher(client, NODE, offer, taint=taint)


async def test_a_node_is_tainted_while_a_gpu_is_unhealthy_and_others_taints_stay() -> None:
    async with PodApi() as api, api.client() as client:
        node = api.objects["/api/v1/nodes"][NODE]
        node["spec"] = {"taints": [FOREIGN]}
        offer = Offer(DEFAULT, 1024)
        offer.set_inventory(inventory(2))
        publisher = with_taint_of(client, offer, "NoSchedule")
        await publisher.publish()
        assert api.objects["/api/v1/nodes"][NODE]["spec"]["taints"] == [FOREIGN]
        offer.set_conditions({inventory(2).gpus[0].uuid: (LOST,)})
        assert await publisher.publish()
        ours = {"key": "tangram.sh/gpu-unhealthy", "value": "true", "effect": "NoSchedule"}
        assert api.objects["/api/v1/nodes"][NODE]["spec"]["taints"] == [FOREIGN, ours]
        assert not await publisher.publish()
        await with_taint_of(client, offer, None).publish()
        assert api.objects["/api/v1/nodes"][NODE]["spec"]["taints"] == [FOREIGN], "the setting was turned off"


async def test_a_node_that_cannot_be_read_when_its_taint_is_written_is_an_error_that_is_retried() -> None:
    async with PodApi() as api, api.client() as client:
        offer = Offer(DEFAULT, 1024)
        offer.set_inventory(inventory(1))
        offer.set_conditions({inventory(1).gpus[0].uuid: (LOST,)})
        taint = NodeTaint(client, NODE, DEFAULT, "NoSchedule", offer.inventory)
        node = msgspec.convert({"metadata": {"name": NODE}}, Node)
        for body in (b'{"metadata', b'{"metadata":{},"spec":{"taints":7}}'):
            api.faults.append(say_raw("GET", f"/nodes/{NODE}", body))
            with pytest.raises(msgspec.MsgspecError):
                await taint.keep(node)


async def test_a_taint_is_written_again_when_somebody_wrote_in_between_and_a_refusal_is_no_failure() -> None:
    async with PodApi() as api, api.client() as client:
        offer = Offer(DEFAULT, 1024)
        offer.set_inventory(inventory(1))
        publisher = with_taint_of(client, offer, "PreferNoSchedule")
        await publisher.publish()
        offer.set_conditions({inventory(1).gpus[0].uuid: (LOST,)})
        await Publisher(client, NODE, offer).publish()
        api.faults.append(answer_with("PATCH", f"/nodes/{NODE}", 409, "Conflict", "the object has been modified"))
        assert await publisher.publish()
        (ours,) = api.objects["/api/v1/nodes"][NODE]["spec"]["taints"]
        assert ours["effect"] == "PreferNoSchedule"
        offer.set_conditions({})
        await Publisher(client, NODE, offer).publish()
        api.faults.append(answer_with("PATCH", f"/nodes/{NODE}", 403, "Forbidden", "not that taint"))
        assert not await publisher.publish()
        assert publisher.failing == ""


STARTUP = {"key": DEFAULT.startup_taint, "effect": "NoSchedule"}


async def test_the_startup_taint_goes_when_the_kubelet_reports_devices_and_does_not_come_back() -> None:
    async with PodApi() as api, api.client() as client:
        node = api.objects["/api/v1/nodes"][NODE]
        node["spec"] = {"taints": [STARTUP, FOREIGN]}
        node["status"] = {"allocatable": {"cpu": "8", DEFAULT.gpu_mem: "0"}}
        offer = Offer(DEFAULT, 1024)
        offer.set_inventory(inventory(2))
        publisher = with_taint_of(client, offer, None)
        await publisher.publish()
        assert api.objects["/api/v1/nodes"][NODE]["spec"]["taints"] == [STARTUP, FOREIGN], "no device is registered"
        api.objects["/api/v1/nodes"][NODE]["status"] = {"allocatable": {DEFAULT.gpu_mem: "48"}}
        assert await publisher.publish()
        assert api.objects["/api/v1/nodes"][NODE]["spec"]["taints"] == [FOREIGN]
        api.objects["/api/v1/nodes"][NODE]["status"] = {"allocatable": {DEFAULT.gpu_mem: "0"}}
        assert not await publisher.publish()


async def test_without_the_setting_the_startup_taint_stays() -> None:
    async with PodApi() as api, api.client() as client:
        node = api.objects["/api/v1/nodes"][NODE]
        node |= {"spec": {"taints": [STARTUP]}, "status": {"allocatable": {DEFAULT.gpu: "2"}}}
        offer = Offer(DEFAULT, 1024)
        offer.set_inventory(inventory(2))
        taint = NodeTaint(client, NODE, DEFAULT, None, offer.inventory, startup=False)
        await Publisher(client, NODE, offer, taint=taint).publish()
        assert api.objects["/api/v1/nodes"][NODE]["spec"]["taints"] == [STARTUP]


async def test_the_startup_taint_goes_at_once_when_the_watch_shows_registered_devices() -> None:
    async with PodApi() as api, api.client() as client:
        node = api.objects["/api/v1/nodes"][NODE]
        node |= {"spec": {"taints": [STARTUP]}, "status": {"allocatable": {"cpu": "8"}}}
        offer = Offer(DEFAULT, 1024)
        offer.set_inventory(inventory(2))
        publisher = with_taint_of(client, offer, None)
        running = asyncio.create_task(publisher.run())
        try:
            await until(lambda: api.inventory is not None)
            assert api.objects["/api/v1/nodes"][NODE]["spec"]["taints"] == [STARTUP]
            shown = api.objects["/api/v1/nodes"][NODE] | {"status": {"allocatable": {DEFAULT.gpu: "2"}}}
            api.put(shown)
            await until(lambda: not api.objects["/api/v1/nodes"][NODE]["spec"].get("taints"))
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
