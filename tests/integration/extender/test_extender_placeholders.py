"""Placeholders for autoscalers, by a running extender: one for a stranded pod, gone when the pod is placed, bound or gone, or at the time-out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final

import pytest
from aiohttp import web

from extender import placeholders
from tests.builders import PodBuilder, gpu, node, pod, share
from tests.fake_api import FakeApi, Object, answer_with
from tests.integration.extender.scheduler import Scheduler, running
from vgpu.api.names import DEFAULT

FULL_MIB: Final = 81_920
OURS: Final = "/api/v1/namespaces/tangram/pods"
MAPS: Final = "/api/v1/namespaces/tangram/configmaps"
RECORDS: Final = "tangram-scheduler-placeholders"
TYPE: Final = {"node.kubernetes.io/instance-type": "g2"}


async def until(true: Callable[[], object]) -> None:
    """Return when this is true. What is waited for is seen by several watches."""
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


class Cluster(FakeApi):
    """One that also makes and deletes pods in the namespace `tangram`, and has a ConfigMap there."""

    def __init__(self) -> None:
        super().__init__()
        self.objects |= {OURS: {}, MAPS: {}}
        self.made = 0
        meta = {"name": RECORDS, "namespace": "tangram", "uid": "of-the-records"}
        self.put({"kind": "ConfigMap", "metadata": meta, "data": {}})

    def _place(self, thing: Object) -> tuple[str, str]:
        meta = thing["metadata"]
        if meta.get("namespace") == "tangram":
            return (MAPS if thing.get("kind") == "ConfigMap" else OURS), f"tangram/{meta['name']}"
        return super()._place(thing)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        where, _, name = request.path.rpartition("/")
        key = f"tangram/{name}"
        if request.path == OURS and request.method == "POST":
            body = await request.json()
            if f"tangram/{body['metadata']['name']}" in self.objects[OURS]:
                return web.json_response({"kind": "Status", "code": 409, "reason": "AlreadyExists"}, status=409)
            self.made += 1
            body["metadata"] |= {
                "namespace": "tangram",
                "uid": f"made-{self.made}",
                "creationTimestamp": "2026-01-01T00:00:00Z",
            }
            body["status"] = {"phase": "Pending"}
            return web.json_response(self.put(body), status=201)
        if where == OURS and request.method == "DELETE":
            found = self.objects[OURS].get(key)
            if found is None or (await request.json())["preconditions"]["uid"] != found["metadata"]["uid"]:
                return web.json_response({"kind": "Status", "code": 404, "reason": "NotFound"}, status=404)
            self.remove(found)
            return web.json_response({})
        if where == MAPS and request.method == "PATCH":
            found = self.objects[MAPS][key]
            data = (found.get("data") or {}) | (await request.json())["data"]
            return web.json_response(
                self.put(found | {"data": {one: text for one, text in data.items() if text is not None}})
            )
        return await super()._answer(request)

    @property
    def placeholders(self) -> list[Object]:
        return list(self.objects[OURS].values())

    @property
    def records(self) -> dict[str, str]:
        data: dict[str, str] = self.objects[MAPS][f"tangram/{RECORDS}"]["data"]
        return data


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(placeholders.Placeholders.__init__, "__kwdefaults__", {"check_s": 0.02, "settle_s": 0.0})
    now_s = placeholders.datetime.fromisoformat("2026-01-01T00:00:00Z").timestamp()
    monkeypatch.setattr("extender.app.time.time", lambda: now_s)
    return iter([None])


def typed(name: str, *gpus: Any, labels: dict[str, str] = TYPE) -> Object:
    plain = node(name).with_inventory(*gpus).plain()
    plain["metadata"]["labels"] = labels
    return plain


@pytest.fixture
async def api() -> AsyncIterator[Cluster]:
    """A node with two GPUs, each of which has half of its memory free."""
    async with Cluster() as server:
        gpus = gpu(0), gpu(1)
        server.put(typed("n1", *gpus))
        for at, one in enumerate(gpus):
            mib = FULL_MIB // 2
            server.put(pod(f"on-{at}").asking(mib=mib).on("n1").assigned(share(one, mib)).plain())
        yield server


def placing(api: Cluster, **more: Any) -> Any:
    return running(api, preemption=False, placeholder_config_map=f"tangram/{RECORDS}", **more)


def large(name: str = "large") -> PodBuilder:
    """It fits the sum of n1, and no GPU there."""
    return pod(name).asking(mib=FULL_MIB * 3 // 4)


async def strand(api: Cluster, scheduler: Scheduler, built: PodBuilder) -> Object:
    plain = api.put(built.plain())
    await until(lambda: scheduler.extender.pods.get(f"default/{built.name}") is not None)
    assert not (await scheduler.filter(built, "n1"))["NodeNames"]
    return plain


async def test_a_stranded_pod_gets_one_placeholder_as_large_as_an_empty_node(api: Cluster) -> None:
    async with placing(api) as scheduler:
        plain = await strand(api, scheduler, large())
        await until(lambda: api.placeholders and api.records)
        await scheduler.filter(large(), "n1")
        (one,) = api.placeholders
        amount = one["spec"]["containers"][0]["resources"]["limits"]
        assert {name: amount[name] for name in (DEFAULT.gpu_mem, DEFAULT.gpu_core, DEFAULT.gpu)} == {
            DEFAULT.gpu_mem: "160", DEFAULT.gpu_core: "200", DEFAULT.gpu: "2",
        }  # fmt: skip
        assert one["spec"]["nodeSelector"] == TYPE
        assert one["metadata"]["ownerReferences"][0]["uid"] == "of-the-records"
        assert list(api.records) == [plain["metadata"]["uid"]]
        assert scheduler.extender.placeholders.counts.created == 1


async def test_a_placeholder_is_not_among_the_pods_that_wait_for_capacity(api: Cluster) -> None:
    """Or one that is retried for the others could be it."""
    async with placing(api) as scheduler:
        for built in (large(), large("placeholder").labelled(**{DEFAULT.placeholder_for: "x"})):
            plain = built.plain()
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
            api.put(plain | {"status": {"phase": "Pending", "conditions": [condition]}})
        await until(lambda: len(scheduler.extender.pods) == 4)
        assert [one.metadata.name for one in scheduler.extender.preemption.waiting()] == ["large"]


async def test_a_placeholder_is_bound_to_no_node(api: Cluster) -> None:
    async with placing(api) as scheduler:
        api.put(typed("n2", gpu(0, node="n2"), gpu(1, node="n2")))
        await until(lambda: "n2" in scheduler.extender.state.fleet)
        one = large("placeholder").labelled(**{DEFAULT.placeholder_for: "x"})
        answer = await scheduler.filter(one, "n1", "n2")
        assert not answer["NodeNames"]
        assert set(answer["FailedAndUnresolvableNodes"]) == {"n1", "n2"}


@pytest.mark.parametrize("how", ["placed", "deleted", "timed out"])
async def test_it_goes_when_the_pod_is_placed_or_gone_or_at_the_time_out(
    api: Cluster, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with placing(api, placeholder_timeout_s=900) as scheduler:
        plain = await strand(api, scheduler, large())
        await until(lambda: api.placeholders and api.records)
        if how == "placed":
            api.put(typed("n2", gpu(0, node="n2")))
            await until(lambda: "n2" in scheduler.extender.state.fleet)
            assert (await scheduler.filter(large(), "n1", "n2"))["NodeNames"] == ["n2"]
        elif how == "deleted":
            api.remove(plain)
        else:
            later_s = placeholders.datetime.fromisoformat("2026-01-01T00:15:00Z").timestamp()
            monkeypatch.setattr(scheduler.extender.placeholders, "_wall", lambda: later_s)
        await until(lambda: not api.placeholders)
        if how == "deleted":
            await until(lambda: not api.records)
        if how == "timed out":
            await scheduler.filter(large(), "n1")
            await scheduler.extender.placeholders.check()
            assert not api.placeholders, "none is made again"
            await scheduler.extender.preemption.recorder.flush()
            assert "PlaceholderTimedOut" in {event["reason"] for event in api.events}


async def test_a_placeholder_that_somebody_deletes_is_made_again_until_the_time_out(api: Cluster) -> None:
    async with placing(api) as scheduler:
        await strand(api, scheduler, large())
        await until(lambda: api.placeholders and api.records)
        api.remove(api.placeholders[0])
        await until(lambda: api.placeholders and api.made == 2)


async def test_an_extender_that_restarts_keeps_the_placeholder_and_removes_it_when_the_pod_is_gone(
    api: Cluster,
) -> None:
    async with placing(api) as scheduler:
        plain = await strand(api, scheduler, large())
        await until(lambda: api.placeholders and api.records)
    async with placing(api) as scheduler:
        await until(lambda: scheduler.extender.placeholders.counts.present == 1)
        await scheduler.extender.placeholders.check()
        assert len(api.placeholders) == 1, "it is not known that its pod is stranded, and not that it is not"
        api.remove(plain)
        await until(lambda: not api.placeholders and not api.records)


async def test_no_more_are_made_than_allowed(api: Cluster) -> None:
    async with placing(api, placeholder_most=2) as scheduler:
        for at in range(5):
            await strand(api, scheduler, large(f"large-{at}"))
        await until(lambda: len(api.placeholders) == 2 and len(api.records) == 2)
        await scheduler.extender.placeholders.check()
        assert api.made == 2


async def test_a_pod_that_no_node_type_places_gets_none_and_an_event(api: Cluster) -> None:
    async with placing(api) as scheduler:
        api.put(typed("n1", *(gpu(at) for at in range(4))))
        await until(lambda: len(scheduler.extender.state.fleet.inventory["n1"].gpus) == 4)
        await strand(api, scheduler, pod("huge").asking(mib=FULL_MIB + 1024))
        await until(lambda: any(event["reason"] == "NoNodeType" for event in api.events))
        assert not api.placeholders


async def test_a_refusal_by_the_quota_is_counted_and_tried_again(api: Cluster) -> None:
    async with placing(api) as scheduler:
        api.faults.append(answer_with("POST", OURS, 403, "Forbidden", "exceeded quota"))
        await strand(api, scheduler, large())
        await until(lambda: api.placeholders)
        assert scheduler.extender.placeholders.counts.refused == 1


async def test_records_that_cannot_be_read_are_passed_over(api: Cluster) -> None:
    found = api.objects[MAPS][f"tangram/{RECORDS}"]
    api.put(found | {"data": {"a": "soon", "b": "12", "c": "NaN x/y", "d": json.dumps([1])}})
    async with placing(api) as scheduler:
        await strand(api, scheduler, large())
        await until(lambda: api.placeholders)
