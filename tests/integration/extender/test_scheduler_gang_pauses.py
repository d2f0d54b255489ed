"""A gang through the real kube-scheduler, which pauses in its cycle, or for one of whose pods binding fails. Its pods wait for volumes, so
that the test chooses when they are bound."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import pytest
from aiohttp import web

from tests.builders import pod
from tests.integration.extender.ganging import FULL_MIB, GPUS, GangSetup, in_gang, members, running
from tests.integration.extender.scheduling import ApiCalls, Stack, Thing, pod_object

ALLOCATIONS: Final = "/api/v1/namespaces/default/persistentvolumeclaims"
VOLUMES: Final = "/api/v1/persistentvolumes"
CLASSES: Final = "/apis/storage.k8s.io/v1/storageclasses"
SELECTED: Final = "volume.kubernetes.io/selected-node"
BOUND: Final = "pv.kubernetes.io/bind-completed"
SIZE: Final = {"storage": "1Gi"}

pytestmark = pytest.mark.timeout(240)


class Pausing:
    """Another extender, which lets every node through and keeps kube-scheduler waiting at the second pod of a gang: until `over` returns."""

    def __init__(self) -> None:
        self.over: Callable[[], Awaitable[object]] | None = None
        self._seen = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Thing]:
        """Its entry in kube-scheduler's configuration."""
        app = web.Application(client_max_size=1 << 20)
        app.router.add_post("/filter", self._filter)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield {"urlPrefix": url, "filterVerb": "filter", "nodeCacheCapable": True, "httpTimeout": "60s"}
        finally:
            await runner.cleanup()

    async def _filter(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.over is not None and body["Pod"]["spec"].get("schedulingGroup"):
            self._seen += 1
            if self._seen == 2:
                await self.over()
        return web.json_response({"NodeNames": body["NodeNames"]})


class Volumes:
    """One claim for each pod, which waits for a provisioner: the test."""

    def __init__(self, api: ApiCalls, names: list[str]) -> None:
        self._api, self._names = api, names

    @asynccontextmanager
    async def there(self) -> AsyncIterator[Volumes]:
        """Until the end of the block."""
        late = {"provisioner": "example.com/test", "volumeBindingMode": "WaitForFirstConsumer"}
        await self._api.call("POST", CLASSES, {"metadata": {"name": "late"}, **late})
        spec = {"accessModes": ["ReadWriteOnce"], "storageClassName": "late", "resources": {"requests": SIZE}}
        await self._api.create(ALLOCATIONS, [{"metadata": {"name": name}, "spec": spec} for name in self._names])
        try:
            yield self
        finally:
            for path in (ALLOCATIONS, VOLUMES):
                for one in (await self._api.call("GET", path))["items"]:
                    name = one["metadata"]["name"]
                    await self._api.patch(f"{path}/{name}", {"metadata": {"finalizers": None}})
                    await self._api.call("DELETE", f"{path}/{name}")
            await self._api.call("DELETE", f"{CLASSES}/late")

    async def all_selected(self) -> None:
        """Return when every pod has a node and is about to be bound."""
        async with asyncio.timeout(60):
            while not all(map(_is_selected, (await self._api.call("GET", ALLOCATIONS))["items"])):  # noqa: ASYNC110 - as in harness
                await asyncio.sleep(0.05)  # another process: no event comes from it

    async def fail(self, name: str) -> None:
        """As a provisioner does that finds no space for the volume on the node."""
        await self._api.patch(f"{ALLOCATIONS}/{name}", {"metadata": {"annotations": {SELECTED: None}}})

    async def provision(self) -> None:
        """All of them."""
        for allocation in (await self._api.call("GET", ALLOCATIONS))["items"]:
            name, uid = allocation["metadata"]["name"], allocation["metadata"]["uid"]
            reference = {"kind": "PersistentVolumeClaim", "namespace": "default", "name": name, "uid": uid}
            spec = {"capacity": SIZE, "accessModes": ["ReadWriteOnce"], "storageClassName": "late"}
            spec |= {"claimRef": reference, "hostPath": {"path": "/nowhere"}}
            await self._api.call("POST", VOLUMES, {"metadata": {"name": name}, "spec": spec})
            bound = {"metadata": {"annotations": {BOUND: "yes"}}, "spec": {"volumeName": name}}
            await self._api.patch(f"{ALLOCATIONS}/{name}", bound)
            await self._api.patch(f"{ALLOCATIONS}/{name}/status", {"status": {"phase": "Bound"}})


def _is_selected(allocation: Thing) -> bool:
    return SELECTED in allocation["metadata"].get("annotations", {})


async def gang(setup: GangSetup) -> list[str]:
    """A gang for three quarters of each GPU, each pod with a claim of its name; their UIDs. By totals another GPU is free."""
    await setup.group("gang", GPUS)
    things = [pod_object(one) for one in members("gang", mib=FULL_MIB * 3 // 4)]
    for thing in things:
        allocation = {"claimName": thing["metadata"]["name"]}
        thing["spec"]["volumes"] = [{"name": "data", "persistentVolumeClaim": allocation}]
    return await setup.add(things)


@pytest.fixture
async def pausing() -> Pausing:
    return Pausing()


@pytest.fixture(params=[True, False], ids=["tried-again-at-once", "tried-again-after-a-back-off"])
async def setup(gang_stack: Stack, pausing: Pausing, request: pytest.FixtureRequest) -> AsyncIterator[GangSetup]:
    async with pausing.running() as entry, running(gang_stack, popped_at_once=request.param, before=[entry]) as made:
        yield made


@pytest.fixture
async def volumes(setup: GangSetup) -> AsyncIterator[Volumes]:
    async with Volumes(setup.api, [f"gang-{at}" for at in range(GPUS)]).there() as made:
        yield made


async def test_a_gang_that_lost_reservations_in_a_pause_is_tried_again_and_not_bound_in_part(
    setup: GangSetup, pausing: Pausing, volumes: Volumes
) -> None:
    async def over() -> None:
        await setup.extender.comes_to(lambda known: len(in_gang(known)) == 1)
        await setup.extender.comes_to(lambda known: not in_gang(known))

    pausing.over = over
    uids = await gang(setup)
    await volumes.all_selected()
    other = await setup.create(pod("other").asking(mib=FULL_MIB))
    await setup.refused(other)
    await volumes.provision()
    await setup.bound(uids)
    assert setup.count(other) == 0


async def test_the_reservations_of_a_gang_that_fits_outlive_the_failure_of_one_of_its_pods(
    setup: GangSetup, volumes: Volumes
) -> None:
    uids = await gang(setup)
    await volumes.all_selected()
    calls = await setup.calls()
    await volumes.fail("gang-1")
    await volumes.all_selected()
    assert await setup.calls() > calls
    other = await setup.create(pod("other").asking(mib=FULL_MIB))
    await setup.refused(other)
    await volumes.provision()
    await setup.bound(uids)
    assert setup.count(other) == 0
