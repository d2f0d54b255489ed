"""The whole extender over HTTP, as kube-scheduler calls it, before an API server that loses and refuses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest
from structlog.testing import capture_logs

from kube.paths import NODES, PODS
from tests.builders import PodBuilder, node, pod
from tests.fake_api import FakeApi, answer_with, hold, lose_reply
from tests.integration.extender.scheduler import running
from vgpu.api.codec import assignment_from_json
from vgpu.scheduling.placement import SWAP_RISK
from vgpu.scheduling.snapshot import snapshot_from_json

FULL_MIB = 81_920


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    async with FakeApi() as server:
        server.put(node("n1").with_gpus(1).plain())
        server.put(node("n2").with_gpus(1).plain())
        yield server


async def test_filter_and_bind_make_one_write_that_carries_the_assignment(api: FakeApi) -> None:
    asking = pod("a").asking(mib=8192, core=30)
    api.put(asking.plain())
    async with running(api) as scheduler:
        assert await scheduler.filter(asking, "n1", "n2") == {
            "NodeNames": ["n1"], "FailedNodes": {}, "FailedAndUnresolvableNodes": {}, "Error": "",
        }  # fmt: skip
        assert await scheduler.bind(asking, "n1") == ""
        await scheduler.comes_true(lambda: not len(scheduler.extender.state.reservations))
        assert scheduler.free_mib("n1") == FULL_MIB - 8192
    writes = [call for call in api.requests if not call.startswith("GET")]
    assert writes == ["POST /api/v1/namespaces/default/pods/a/binding"]
    (binding,) = api.bindings
    assert binding["metadata"]["uid"] == "uid-default-a"
    annotations = binding["metadata"]["annotations"]
    (assigned,) = assignment_from_json(annotations["tangram.sh/assignment"]).containers["main"]
    assert (assigned.mib, assigned.core_percent) == (8192, 30)
    assert annotations["tangram.sh/gpus.main"] == assigned.uuid


async def test_a_reply_that_was_lost_after_the_pod_was_bound_is_a_success(api: FakeApi) -> None:
    asking = pod("a").asking(mib=8192)
    api.put(asking.plain())
    async with running(api) as scheduler:
        await scheduler.filter(asking, "n1")
        api.faults.append(lose_reply("POST", "/binding", after=True))
        assert await scheduler.bind(asking, "n1") == ""
        assert await scheduler.bind(asking, "n1") == "", "and a second call changes nothing"
        assert scheduler.free_mib("n1") == FULL_MIB - 8192
    assert len(api.bindings) == 1


async def test_a_binding_that_got_no_answer_and_did_not_happen_keeps_its_place_in_doubt(api: FakeApi) -> None:
    asking, other = pod("a").asking(mib=FULL_MIB), pod("b").asking(mib=FULL_MIB)
    api.put(asking.plain())
    api.put(other.plain())
    async with running(api) as scheduler:
        await scheduler.filter(asking, "n1")
        api.faults.append(lose_reply("POST", "/binding", after=False))
        assert "POST /api/v1/namespaces/default/pods/a/binding" in await scheduler.bind(asking, "n1")
        assert not (await scheduler.filter(other, "n1"))["NodeNames"], "the write may still happen"
        assert (await scheduler.filter(asking, "n1", "n2"))["NodeNames"] == ["n1"]
        assert await scheduler.bind(asking, "n1") == ""


@pytest.mark.parametrize("after", [True, False])
async def test_a_binding_whose_outcome_cannot_be_read_stays_reserved_until_the_watch_reports(
    api: FakeApi, after: bool
) -> None:
    asking, other = pod("a").asking(mib=FULL_MIB), pod("b").asking(mib=FULL_MIB)
    api.put(asking.plain())
    async with running(api) as scheduler:
        await scheduler.filter(asking, "n1")
        api.faults += [lose_reply("POST", "/binding", after=after), answer_with("GET", "/pods/a", 503)]
        assert "POST /api/v1/namespaces/default/pods/a/binding" in await scheduler.bind(asking, "n1")
        assert not (await scheduler.filter(other, "n1"))["NodeNames"]
        if not after:
            api.remove(asking.plain())
        await scheduler.comes_true(lambda: not len(scheduler.extender.state.reservations))
        assert scheduler.free_mib("n1") == (0 if after else FULL_MIB)


async def test_a_conflict_whose_cause_cannot_be_read_frees_nothing(api: FakeApi) -> None:
    asking = pod("a").asking(mib=FULL_MIB)
    api.put(asking.plain())
    async with running(api) as scheduler:
        await scheduler.filter(asking, "n1")
        api.faults += [answer_with("POST", "/binding", 409, "Conflict", "x"), answer_with("GET", "/pods/a", 503)]
        assert "409 Conflict" in await scheduler.bind(asking, "n1")
        assert scheduler.free_mib("n1") == 0, "an earlier call of ours may have bound it"


async def test_a_late_write_after_a_timeout_never_assigns_a_gpu_twice(api: FakeApi) -> None:
    asking, other = pod("a").asking(mib=FULL_MIB), pod("b").asking(mib=FULL_MIB)
    api.put(asking.plain())
    api.put(other.plain())
    async with running(api, bind_timeout_s=0.5) as scheduler:
        await scheduler.filter(asking, "n1")
        late, reached = asyncio.Event(), asyncio.Event()
        api.faults.append(hold("POST", "/binding", late, reached))
        assert "Timeout" in await scheduler.bind(asking, "n1")
        assert (await scheduler.filter(other, "n1"))["FailedNodes"]
        late.set()
        assert await scheduler.bind(asking, "n1") == ""
        assert len(api.bindings) == 1
        assert scheduler.extender.state.fleet.overcommitted() == []


@pytest.mark.parametrize("code", [403, 404, 422, 429])
async def test_a_binding_that_is_refused_gives_its_place_back(api: FakeApi, code: int) -> None:
    asking = pod("a").asking(mib=FULL_MIB)
    api.put(asking.plain())
    async with running(api) as scheduler:
        await scheduler.filter(asking, "n1")
        api.faults.append(answer_with("POST", "/binding", code, "Reason", "sentence"))
        assert f"{code} Reason: sentence" in await scheduler.bind(asking, "n1")
        assert scheduler.free_mib("n1") == FULL_MIB


async def test_an_extender_restarted_between_filter_and_bind_chooses_again_on_that_node(api: FakeApi) -> None:
    asking = pod("a").asking(mib=8192)
    api.put(asking.plain())
    async with running(api) as scheduler:
        await scheduler.filter(asking, "n2")
    async with running(api) as scheduler:
        assert await scheduler.bind(asking, "n2") == ""
        assert scheduler.free_mib("n2") == FULL_MIB - 8192
    bound = api.pod("default/a")
    assert bound
    assert bound["spec"]["nodeName"] == "n2"
    assert "tangram.sh/assignment" in bound["metadata"]["annotations"]


async def test_a_restarted_extender_refuses_a_bind_whose_node_has_filled_up(api: FakeApi) -> None:
    first, second = pod("a").asking(mib=FULL_MIB), pod("b").asking(mib=FULL_MIB)
    for built in (first, second):
        api.put(built.plain())
    async with running(api) as scheduler:
        await scheduler.filter(first, "n1")
    async with running(api) as scheduler:
        await scheduler.filter(second, "n1")
        assert await scheduler.bind(second, "n1") == ""
        assert "pod default/a does not fit node n1 any more: no single GPU" in await scheduler.bind(first, "n1")
        assert (await scheduler.filter(first, "n2"))["NodeNames"] == ["n2"], "the scheduler starts over"


async def test_what_is_bound_is_known_again_after_a_restart(api: FakeApi) -> None:
    pods = [pod(name).asking(mib=FULL_MIB) for name in ("a", "b", "c")]
    for built in pods:
        api.put(built.plain())
    async with running(api) as scheduler:
        for built in pods[:2]:
            (name,) = (await scheduler.filter(built, "n1", "n2"))["NodeNames"]
            assert await scheduler.bind(built, name) == ""
    async with running(api) as scheduler:
        assert set((await scheduler.filter(pods[2], "n1", "n2"))["FailedNodes"]) == {"n1", "n2"}


async def test_a_pod_that_someone_else_bound_is_not_bound_again(api: FakeApi) -> None:
    asking = pod("a").asking(mib=8192)
    api.put(asking.plain())
    async with running(api) as scheduler:
        await scheduler.filter(asking, "n1")
        api.put(asking.on("n2").plain(), reported=False)
        assert "is bound to node n2" in await scheduler.bind(asking, "n1")
        assert scheduler.free_mib("n1") == FULL_MIB
        await scheduler.filter(asking, "n1")
        api.put(asking.on("n1").plain(), reported=False)
        assert "by another scheduler" in await scheduler.bind(asking, "n1")
        assert scheduler.free_mib("n1") == FULL_MIB


async def test_a_pod_made_again_under_its_name_is_not_bound_for_the_old_one(api: FakeApi) -> None:
    asking = pod("a").asking(mib=8192)
    again = asking.plain()
    again["metadata"]["uid"] = "another"
    api.put(again)
    async with running(api) as scheduler:
        await scheduler.filter(asking, "n1")
        assert "has uid another" in await scheduler.bind(asking, "n1")
        assert scheduler.free_mib("n1") == FULL_MIB
        assert await scheduler.bind(pod("unknown").asking(mib=1), "n1") != ""
    assert not api.bindings


async def test_a_pod_being_bound_is_not_bound_a_second_time_meanwhile(api: FakeApi) -> None:
    asking = pod("a").asking(mib=8192)
    api.put(asking.plain())
    async with running(api) as scheduler:
        await scheduler.filter(asking, "n1")
        go, reached = asyncio.Event(), asyncio.Event()
        api.faults.append(hold("POST", "/binding", go, reached))
        first = asyncio.create_task(scheduler.bind(asking, "n1"))
        await reached.wait()
        assert "being bound to node n1 already" in await scheduler.bind(asking, "n1")
        go.set()
        assert await first == ""


async def test_a_pod_that_does_not_request_ours_is_bound_without_annotations(api: FakeApi) -> None:
    api.put(pod("plain").plain())
    async with running(api) as scheduler:
        assert await scheduler.bind(pod("plain"), "n1") == ""
    assert "annotations" not in api.bindings[0]["metadata"]


async def test_same_size_pods_that_come_at_once_never_share_memory_that_is_not_there(api: FakeApi) -> None:
    pods = [pod(f"p{at}").asking(mib=40_960) for at in range(8)]
    for built in pods:
        api.put(built.plain())

    async with running(api) as scheduler:

        async def schedule(built: PodBuilder) -> bool:
            names = (await scheduler.filter(built, "n1", "n2"))["NodeNames"]
            return bool(names) and await scheduler.bind(built, names[0]) == ""

        assert sum(await asyncio.gather(*map(schedule, pods))) == 4
        assert scheduler.extender.state.fleet.overcommitted() == []
        assert (scheduler.free_mib("n1"), scheduler.free_mib("n2")) == (0, 0)


async def test_same_size_pods_on_different_gpus_are_bound_one_after_the_other_where_the_kubelet_could_distribution_them_up(
    api: FakeApi,
) -> None:
    api.put(node("n3").with_gpus(2).with_access("cdi").plain())
    first, second = (pod(name).asking(mib=8192).annotated(placement="spread") for name in ("a", "b"))
    for built in (first, second):
        api.put(built.plain())
    async with running(api, bind_timeout_s=60) as scheduler:
        for built in (first, second):
            assert (await scheduler.filter(built, "n3"))["NodeNames"] == ["n3"]
        assert await scheduler.bind(first, "n3") == ""
        waiting = asyncio.create_task(scheduler.bind(second, "n3"))
        await scheduler.comes_true(lambda: not scheduler.extender.state.reservations.get("uid-default-a"))
        assert (len(api.bindings), waiting.done()) == (1, False)
        started = api.pod("default/a")
        assert started is not None
        api.put(started | {"status": {"phase": "Running", "startTime": "2026-01-01T00:00:00Z"}})
        assert await waiting == ""
    texts = [binding["metadata"]["annotations"]["tangram.sh/assignment"] for binding in api.bindings]
    uuids = [assignment_from_json(text).uuids("main") for text in texts]
    assert len(set(uuids)) == 2


async def test_a_pod_that_waits_in_the_bind_order_in_vain_is_refused_with_the_reason_and_reserves_nothing(
    api: FakeApi,
) -> None:
    api.put(node("n3").with_gpus(2).with_access("cdi").plain())
    first, second = (pod(name).asking(mib=8192).annotated(placement="spread") for name in ("a", "b"))
    for built in (first, second):
        api.put(built.plain())
    async with running(api, bind_timeout_s=4) as scheduler:
        for built in (first, second):
            await scheduler.filter(built, "n3")
        assert await scheduler.bind(first, "n3") == ""
        error = await scheduler.bind(second, "n3")
        assert error == f"pod default/b is not bound to node n3 yet: {SWAP_RISK}"
        assert scheduler.extender.state.allocations.get("uid-default-b") is None


async def test_nothing_is_placed_before_pods_and_nodes_are_known(api: FakeApi) -> None:
    asking = pod("a").asking(mib=8192)
    api.put(asking.plain())
    go, reached = asyncio.Event(), asyncio.Event()
    api.faults.append(hold("GET", PODS, go, reached))
    async with running(api, synced=False) as scheduler:
        await reached.wait()
        await scheduler.extender.nodes.has_synced.wait()
        for error in ((await scheduler.filter(asking, "n1"))["Error"], await scheduler.bind(asking, "n1")):
            assert error == "cache not synced: pods are still being listed"
        body = {"Pod": asking.plain(), "NodeNameToMetaVictims": {"n1": {"Pods": [{"UID": "uid-v"}]}}}
        assert (await scheduler.call("preempt", json.dumps(body).encode()))["NodeNameToMetaVictims"] == {}
        assert scheduler.extender.preemption.verb.missed, "kube-scheduler does not repeat the call"
        ready = await scheduler.get("/readyz")
        assert (ready.status_code, ready.text) == (503, f"{error}\n")
        assert (await scheduler.get("/healthz")).status_code == 200
        go.set()
        await scheduler.extender.pods.has_synced.wait()
        assert (await scheduler.get("/readyz")).status_code == 200
        assert (await scheduler.filter(asking, "n1"))["NodeNames"] == ["n1"]


UNREADABLE = (b"", b"{", b"[]", b'{"Pod":7}', b'{"Pod":{"spec":{"containers":{}}}}', b"\xff", b"null")


@pytest.mark.parametrize("body", UNREADABLE)
async def test_a_body_that_cannot_be_read_is_an_error_in_the_answer(api: FakeApi, body: bytes) -> None:
    async with running(api) as scheduler:
        for verb in ("filter", "bind"):
            assert "the request cannot be read" in (await scheduler.call(verb, body))["Error"]


@pytest.mark.parametrize("verb", ["prioritize", "spare"])
async def test_for_a_body_that_cannot_be_read_no_node_is_rated_and_the_log_shows_the_reason(
    api: FakeApi, verb: str
) -> None:
    async with running(api) as scheduler:
        with capture_logs() as logged:
            assert [await scheduler.call(verb, body) for body in UNREADABLE] == [[]] * len(UNREADABLE)
        warned = [one["event"] for one in logged if one["log_level"] == "warning"]
        assert warned == [f"{verb}: the request cannot be read"] * len(UNREADABLE)
        metrics = (await scheduler.get("/metrics")).text
    assert f'tangram_extender_requests_total{{outcome="error",verb="{verb}"}} {len(UNREADABLE)}.0' in metrics


async def test_an_unknown_path_or_method_is_an_error_and_changes_nothing(api: FakeApi) -> None:
    async with running(api) as scheduler, httpx.AsyncClient() as http:
        at = f"http://127.0.0.1:{scheduler.extender.port}"
        wrong = [await http.get(f"{at}/filter"), await http.post(f"{at}/snapshot"), await http.get(f"{at}/else")]
        assert [(one.status_code, one.text) for one in wrong] == [
            (405, "/filter does not answer GET\n"),
            (405, "/snapshot does not answer POST\n"),
            (404, "the paths are /filter, /prioritize, /spare, /preempt, /bind and /snapshot\n"),
        ]


async def test_a_snapshot_reports_what_is_reserved(api: FakeApi) -> None:
    async with running(api) as scheduler, httpx.AsyncClient() as http:
        await scheduler.filter(pod("a").asking(mib=8192), "n1")
        answer = await http.get(f"http://127.0.0.1:{scheduler.extender.port}/snapshot")
        snapshot = snapshot_from_json(answer.content)
    assert [(one.key, one.node, one.stage) for one in snapshot.pods] == [("default/a", "n1", "reserved")]
    assert {one.name: one.free[0].mib for one in snapshot.nodes} == {"n1": FULL_MIB - 8192, "n2": FULL_MIB}


async def test_a_mistake_of_ours_is_an_error_in_the_answer(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: object, **__: object) -> None:
        raise ZeroDivisionError("ours")

    async with running(api) as scheduler:
        monkeypatch.setattr(scheduler.extender.state, "place", explode)
        result = await scheduler.filter(pod("a").asking(mib=8192), "n1")
        assert result["Error"] == "filter failed: ZeroDivisionError: ours"
        api.put(pod("a").asking(mib=8192).plain())
        assert await scheduler.bind(pod("a").asking(mib=8192), "n1") == "bind failed: ZeroDivisionError: ours"
        metrics = (await scheduler.get("/metrics")).text
        assert 'tangram_extender_requests_total{outcome="error",verb="filter"} 1.0' in metrics


async def test_metrics_report_what_is_reserved_and_how_old_the_caches_are(api: FakeApi) -> None:
    asking = pod("a").asking(mib=8192)
    async with running(api) as scheduler:
        await scheduler.filter(asking, "n1")
        lines = (await scheduler.get("/metrics")).text.splitlines()
    values = {line.rsplit(" ", 1)[0]: line.rsplit(" ", 1)[1] for line in lines if not line.startswith("#")}
    assert values['tangram_extender_reservations{stage="reserved"}'] == "1.0"
    assert values["tangram_extender_nodes"] == "2.0"
    assert values['tangram_extender_cache_objects{cache="nodes"}'] == "2.0"
    assert values["tangram_extender_overcommitted_gpus"] == "0.0"
    assert 0 <= float(values['tangram_extender_cache_age_seconds{cache="pods"}']) < 60
    assert all(name.startswith(("tangram_extender_", "tangram_build_info")) for name in values)
    assert not any("uid" in name for name in values)


async def test_a_node_that_joins_while_running_is_used(api: FakeApi) -> None:
    async with running(api) as scheduler:
        assert "n3" in (await scheduler.filter(pod("a").asking(mib=8192), "n3"))["FailedAndUnresolvableNodes"]
        api.put(node("n3").with_gpus(1).plain())
        async with asyncio.timeout(10):
            while scheduler.extender.nodes.get("n3") is None:
                await scheduler.extender.nodes.changed()
        assert (await scheduler.filter(pod("a").asking(mib=8192), "n3"))["NodeNames"] == ["n3"]
    assert f"GET {NODES}" in api.requests
